"""Commands and verbs of the API have the same names and defaults, and the same results."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pytest
from typer import Typer
from typer.testing import CliRunner

from recspec import api
from recspec.api import Place
from recspec.base.errors import SettingsError
from recspec.cli import app as cli
from recspec.cli import from_verbs
from recspec.feature_spec import FeatureSpec
from tests import made_up

VERBS = {name: verb for name, (verb, _) in cli.COMMANDS.items()}
OF_COMMANDS_ALONE = {"demo", "version", "schema"}


def test_every_command_is_a_verb_and_every_verb_a_command() -> None:
    own = {
        "open",
        "open_data",
        "compare",
        "event_number",
        "figures",
        "reasons",
        "stages",
        "stop_on_signal",
        "verb",
    }
    functions = {name for name in api.__all__ if inspect.isfunction(getattr(api, name))} - own
    assert functions == {verb.__name__ for name, verb in VERBS.items() if name not in OF_COMMANDS_ALONE}


@pytest.mark.parametrize("name", VERBS)
def test_every_keyword_of_a_verb_is_described(name: str) -> None:
    text = inspect.getdoc(VERBS[name]) or ""
    for each, parameter in inspect.signature(VERBS[name]).parameters.items():
        assert f"    {'**' if parameter.kind is parameter.VAR_KEYWORD else ''}{each}: " in text, each


def test_a_command_is_made_from_its_verb() -> None:
    called: list[dict[str, Any]] = []

    def sell(
        item: str | int,
        shop: Place,
        *,
        price: float = 1.5,
        sizes: Sequence[int] = (1, 2),
        colours: Sequence[str] | None = None,
        like: Place | Sequence[Place] | None = None,
        k: int | Sequence[int] | None = None,
        ids: object = None,
        form: Literal["box", "bag"] = "box",
        checked: bool = True,
        settings: Mapping[str, object] | None = None,
        progress: bool | Callable[[str], None] | None = None,
    ) -> None:
        """Sell an item.

        It is sold once.

        Args:
            item: Name of
                the item.
            shop: Folder; in Python also a data frame.
            k: Number, or several.

        Raises:
            SettingsError: never.
        """

    def present(call: from_verbs.Call, *, json: bool = False) -> None:
        called.append({**call.values, "json": json})

    app = Typer(rich_markup_mode=None)
    from_verbs.add_command(app, "sell", sell, present)
    told = " ".join(CliRunner().invoke(app, ["--help"], terminal_width=200).output.split())
    for part in (
        "Sell an item. It is sold once.",
        "Name of the item. [",
        "Folder. [",
        "Number; repeatable.",
        "box|bag",
    ):
        assert part in told
    assert "never" not in told
    assert "--progress" not in told
    defaults = {"price": 1.5, "sizes": (1, 2), "form": "box", "checked": True, "settings": {}}
    words = ["7", "a/b", "--sizes", "3, 4", "--colours", 'red,"a,b"', "--like", "x", "--like", "y", "-k", "5", "--json"]
    words += ["--ids", "u1,u2", "--no-checked", "--set", "a=[1, 2]"]
    for typed in (["7", "a/b"], words):
        assert CliRunner().invoke(app, typed, catch_exceptions=False).exit_code == 0
    assert called == [
        {"item": "7", "shop": Path("a/b"), **defaults, "json": False},
        {
            "item": "7",
            "shop": Path("a/b"),
            **defaults,
            "sizes": (3, 4),
            "colours": ["red", "a,b"],
            "like": [Path("x"), Path("y")],
            "k": [5],
            "ids": ["u1", "u2"],
            "checked": False,
            "settings": {"a": [1, 2]},
            "json": True,
        },
    ]


def test_texts_that_no_file_or_database_could_hold_are_refused_by_every_verb(tmp_path: Path) -> None:
    message = r"\\udcff(\.db)?' is no UTF-8 text; write it in UTF-8"
    journal, bad = f"sqlite:///{tmp_path / 'j.db'}", "\udcff"
    asked: list[Callable[[], object]] = [
        lambda: api.forget(bad, under=tmp_path),
        lambda: api.catalogue(tmp_path, block=["a", bad]),
        lambda: api.experiment_check(tmp_path / "x.yaml", user=bad),
        lambda: api.journal_show(f"sqlite:///{bad}.db"),
        lambda: api.journal_import(journal, tmp_path / "x.csv", type=bad),
    ]
    for ask in asked:
        with pytest.raises(SettingsError, match=message):
            ask()
    with pytest.raises(SettingsError, match=r"forget: user: 'a\\x00' holds a character NUL; leave it out"):
        api.forget("a\0", under=tmp_path)


def test_a_number_out_of_its_range_is_refused_with_all_others(data: FeatureSpec, tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"(?s)2 problems.*seed is -1; expected 0 or more.*trials is 0; expected 1 or"
    ):
        api.tune("neumf", data.folder, tmp_path / "out", trials=0, seed=-1)
    with pytest.raises(SettingsError, match="runs: depth is 33; expected 0 to 32"):
        api.runs(tmp_path, depth=33)


@pytest.mark.parametrize(("method", "of"), [("serve", api.serve), ("export", api.export), ("evaluate", api.evaluate)])
def test_a_method_shows_the_keywords_of_its_verb(method: str, of: Callable[..., object]) -> None:
    shown, theirs = (inspect.signature(each).parameters for each in (getattr(api.Model, method), of))
    first, *others = theirs
    assert list(shown) == ["self", *others]
    assert first in ("models", "run")


Typed = Callable[..., str]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Runs a command that succeeds, in this process; returns what it prints."""

    def run(*arguments: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["recspec", *map(str, arguments)])
        capsys.readouterr()
        with suppress(SystemExit):
            cli.main()
        return capsys.readouterr().out

    return run


# --- the same results ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("parity") / "data")


def test_a_command_and_its_verb_give_the_same_bundle_and_the_same_figures(
    typed: Typed, tmp_path: Path, data: FeatureSpec
) -> None:
    folder, by_command = data.folder, tmp_path / "typed"
    settings = ("--set", "settings.l2=50", "--set", "recency=0.5")
    typed("train", "ease", folder, by_command, *settings)
    model = api.train("ease", folder, tmp_path / "called", settings={"settings.l2": 50}, recency=0.5, progress=False)
    weights = [(each / "bundle" / "weights.safetensors").read_bytes() for each in (by_command, model.path)]
    assert weights[0] == weights[1]
    assert typed("verify", by_command).split()[0] == api.verify(by_command)
    printed = json.loads(
        typed("evaluate", by_command, folder, "--baselines", "--protocol", "full", "-k", "5", "--json")
    )
    result = api.evaluate(by_command, folder, baselines=True, protocol="full", k=5, progress=False)
    assert printed == json.loads(json.dumps(result.to_dict()))
    user = str(model.predictor.busiest_user())
    printed = json.loads(typed("recommend", by_command, "--user", user, "-k", "3", "--json"))
    rows = model.recommend(user, k=3, kind="rows")
    assert [each["item"] for each in printed[0]["items"]] == [row["item"] for row in rows]
    item = rows[0]["item"]
    printed = json.loads(typed("similar", by_command, str(item), "-k", "2", "--json"))
    assert [each["item"] for each in printed["items"]] == model.similar(item, k=2, kind="dict")["item"]
    assert json.loads(typed("describe", folder, "--json")) == json.loads(json.dumps(api.describe(folder).to_dict()))
    assert json.loads(typed("models", "--json")) == json.loads(json.dumps(api.models().to_dict()))
    printed = json.loads(typed("train", "ease", folder, tmp_path / "no", *settings, "--plan", "--json"))
    planned = api.train("ease", folder, tmp_path / "no", plan=True, settings={"settings.l2": 50, "recency": 0.5})
    assert printed["choices"] == json.loads(json.dumps(planned.to_dict()["choices"]))


def test_the_same_raw_rows_are_the_same_dataset_from_a_file_and_from_a_frame(typed: Typed, tmp_path: Path) -> None:
    made_up.write_films(tmp_path, 30, "film", kinds=True)
    rows, items = (pd.read_csv(tmp_path / name, dtype={"item_id": str}) for name in ("rows.csv", "items.csv"))
    typed(
        "prepare",
        "table",
        tmp_path / "rows.csv",
        tmp_path / "typed",
        "--set",
        "items=items.csv",
        "--set",
        "item_features=[kind]",
    )
    (tmp_path / "items.csv").unlink()
    framed = api.prepare(rows, tmp_path / "called", items=items, item_features=["kind"], progress=False)
    filed = api.open_data(tmp_path / "typed")
    assert framed.kind == "pandas"
    assert framed.splits == filed.splits == ("train", "valid", "test")
    for split in filed.splits:
        assert framed.to_frame(split, kind="dict") == filed.to_frame(split, kind="dict")
    catalogues = [(each.path / "items.parquet").read_bytes() for each in (framed, filed)]
    assert catalogues[0] == catalogues[1]
    assert sorted(each.name for each in tmp_path.iterdir() if "frames" in each.name) == []
