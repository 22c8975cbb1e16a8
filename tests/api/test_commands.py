"""Commands and verbs of the API have the same names and defaults, and the same results."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import get_args, get_type_hints

import pandas as pd
import pytest
from typer.models import OptionInfo

from recspec import api
from recspec.cli import app as cli
from recspec.feature_spec import FeatureSpec
from tests import made_up

VERBS: dict[str, Callable[..., object]] = {
    "prepare": api.prepare,
    "check": api.check,
    "describe": api.describe,
    "synthesize": api.synthesize,
    "transcode": api.transcode,
    "auto": api.auto,
    "train": api.train,
    "tune": api.tune,
    "evaluate": api.evaluate,
    "predict": api.predict,
    "recommend": api.recommend,
    "similar": api.similar,
    "verify": api.verify,
    "import-tf": api.import_tf,
    "export": api.export,
    "serve": api.serve,
    "models": api.models,
    "datasets": api.datasets,
    "runs": api.runs,
    "report": api.report,
    "pipeline blend": api.blend,
    "pipeline build": api.pipeline,
    "update": api.update,
}
OF_COMMANDS_ALONE = {"demo", "version", "schema", "bench train", "bench infer", "bench serve"}
"""`demo` is a script of the others, and `bench` measures processes."""

ARGUMENTS = {"out_folder": "out", "target": "out"}
FORM = {"json", "verbose"}
"""Options about what is printed."""
API_ALONE = {"progress", "kind", "settings", "tell", "block", "ready", "self", "named"}
"""How progress and answers are handed over; `settings` and keywords are the command's `--set`."""
OTHERWISE: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "recommend": {"user": "users"},  # one id or several
    }
)
NOT_THE_SAME: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("export", "batch_sizes"): "text between commas on the command line",
        ("prepare", "dataset"): "the command names it first; a frame is a table",
        ("pipeline build", "retriever"): "required",
        ("serve", "force"): "the command ends its process",
    }
)


def commands() -> dict[str, Callable[..., object]]:
    """Command -> its function."""
    found = {}
    for prefix, app in (("", cli.app), ("bench ", cli.bench_app), ("pipeline ", cli.pipeline_app)):
        for each in app.registered_commands:
            assert each.callback is not None
            name = each.name or each.callback.__name__.replace("_", "-")
            found[prefix + name] = inspect.unwrap(each.callback)
    return found


def options(command: Callable[..., object]) -> dict[str, object]:
    """Name as it is typed -> default, of a command's arguments and options."""
    hints = get_type_hints(command, include_extras=True)
    found: dict[str, object] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        info = get_args(hints[name])[1]
        told = ARGUMENTS.get(name, name)
        if isinstance(info, OptionInfo):
            long = [each for each in (info.default, *(info.param_decls or ())) if str(each).startswith("--")]
            told = str(long[0]).removeprefix("--").partition("/")[0].replace("-", "_") if long else told
        found[told] = parameter.default
    return found


def test_every_command_is_a_verb_and_every_verb_a_command() -> None:
    assert set(commands()) == {*VERBS, *OF_COMMANDS_ALONE}
    own = {"open", "open_data", "compare", "verify_at", "keep_to_cores", "settings_of", "shown", "stop_on_signal"}
    functions = {name for name in api.__all__ if inspect.isfunction(getattr(api, name))} - own
    assert functions == {each.__name__ for each in VERBS.values()}


@pytest.mark.parametrize("name", VERBS)
def test_a_command_and_its_verb_have_the_same_names_and_defaults(name: str) -> None:
    verb = inspect.signature(VERBS[name]).parameters
    typed = {OTHERWISE.get(name, {}).get(each, each): default for each, default in options(commands()[name]).items()}
    typed = {each: default for each, default in typed.items() if each not in FORM | {"set"}}
    assert set(typed) == {each for each in verb if each not in API_ALONE and (name, each) not in NOT_THE_SAME} | (
        {each for command, each in NOT_THE_SAME if command == name} & set(typed)
    )
    for each, default in typed.items():
        if (name, each) in NOT_THE_SAME:
            continue
        ours = verb[each].default
        default = str(default) if isinstance(default, Path) else default
        assert ours == default, f"{each}: {ours!r}, on the command line {default!r}"


@pytest.mark.parametrize("name", VERBS)
def test_every_keyword_of_a_verb_is_described(name: str) -> None:
    text = inspect.getdoc(VERBS[name]) or ""
    for each, parameter in inspect.signature(VERBS[name]).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and len(inspect.signature(VERBS[name]).parameters) > 4:
            assert f"    {each}: " in text, each


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
