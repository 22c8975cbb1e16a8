"""`recspec evaluate RUN events.csv`: lists and probabilities against newer events, kept, compared, and refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import recspec as rs
from recspec.base.errors import DataError, SettingsError
from tests.cli.conftest import Cli
from tests.made_up_events import NEW_ITEM, NEW_USER, prepared, shop_events, written


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Two runs on the known events, the file of these, and one of newer ones that repeats some of them."""
    folder = tmp_path_factory.mktemp("events")
    known, new = shop_events()
    data = prepared(folder, known, seen=None).folder
    for model in ("ease", "popularity"):
        rs.train(model, data, folder / model, progress=False)
    written(folder / "new.csv", pa.concat_tables([known.slice(len(known) - 7), new]))
    return {"folder": folder, **{name: folder / name for name in ("ease", "popularity", "new.csv", "rows.csv")}}


def wanted(run: Path) -> dict[str, set[str]]:
    """What each user acted on afterwards, without what the model has seen of them."""
    found: dict[str, set[str]] = {}
    for user, item in zip(*(shop_events()[1].column(name).to_pylist() for name in ("user_id", "item_id")), strict=True):
        found.setdefault(user, set()).add(item)
    model = rs.open(run)
    known = {user for user in found if model.predictor.catalogues.user_ids([user])[0] > 0}
    seen = {user: set(model.history(user).column("item").to_pylist()) for user in known}
    left = {user: items - seen.get(user, set()) for user, items in found.items()}
    return {user: items for user, items in left.items() if items}


def test_lists_are_measured_as_recommend_gives_them(shop: Mapping[str, Path]) -> None:
    hits, gains, recalls = [], [], []
    expected = wanted(shop["ease"])
    assert NEW_USER in expected
    assert any(NEW_ITEM in items for items in expected.values())
    for user, items in expected.items():
        answers = rs.recommend(shop["ease"], user, k=3, kind="answers")
        rows = [{"rank": place, "item": each.item} for place, each in enumerate(answers[0][0].items, 1)]
        places = [row["rank"] for row in rows if row["item"] in items]
        best = sum(1 / log2(1 + place) for place in range(1, min(len(items), 3) + 1))
        hits.append(bool(places))
        gains.append(sum(1 / log2(1 + place) for place in places) / best)
        recalls.append(len(places) / len(items))
    result = rs.evaluate(shop["ease"], shop["new.csv"], k=3)
    figures = {"hit_rate@3": np.mean(hits), "ndcg@3": np.mean(gains), "recall@3": np.mean(recalls)}
    assert result.metrics["full"] == pytest.approx(figures)
    assert 0 < figures["recall@3"] < 1
    view = result.view()
    assert f"the lists of {len(expected)} users" in view.sections[0].title
    assert "2 users unknown to the model" in view.sections[0].title
    assert "unknown to it, which no list can hold" in view.sections[0].title
    assert any(note.startswith("7 events left out, which are not after the newest one") for note in view.notes)
    assert any(note.endswith(" of user and item left out, as the user has the item already") for note in view.notes)


def test_the_baseline_is_what_unknown_users_get_without_what_a_user_has(shop: Mapping[str, Path]) -> None:
    result = rs.evaluate(shop["ease"], shop["new.csv"], k=[2, 5])
    assert result.metrics["full"].keys() == {f"{name}@{k}" for name in ("hit_rate", "ndcg", "recall") for k in (2, 5)}
    model = rs.open(shop["ease"])
    (popular,) = model.predictor.recommend(["a stranger"], k=1000)
    assert popular.answered_by == "popularity"
    hits = []
    for user, items in wanted(shop["ease"]).items():
        is_known = model.predictor.catalogues.user_ids([user])[0] > 0
        seen = model.history(user).column("item").to_pylist() if is_known else ()
        best = [each.item for each in popular.items if each.item not in seen]
        hits.append(bool(items.intersection(best[:2])))
    assert result.report.baselines["popularity"]["full"]["hit_rate@2"] == pytest.approx(np.mean(hits))


def test_runs_are_compared_and_each_keeps_its_own(shop: Mapping[str, Path], run: Cli) -> None:
    asked = ("evaluate", shop["ease"], shop["new.csv"], "--against", shop["popularity"], "--json")
    status, out, said = run(*asked)
    assert status == 0, said
    printed = json.loads(out)
    compared = printed["against"][str(shop["popularity"])]["full"]["ndcg@10"]
    assert compared["difference"] == pytest.approx(compared["theirs"] - compared["ours"])
    files = [line.partition(": kept")[0] for line in said.splitlines() if line.endswith(": kept")]
    assert [Path(file).parent.parent.name for file in files] == ["ease", "popularity"]
    assert json.loads(Path(files[1]).read_text())["report"]["metrics"]["full"]["ndcg@10"] == compared["theirs"]
    before = sorted((shop["ease"] / "evaluations").iterdir())
    assert run(*asked)[0] == 0
    assert sorted((shop["ease"] / "evaluations").iterdir()) == before, "the same question replaces its answer"
    status, out, _ = run("report", shop["ease"])
    assert status == 0
    assert "trained on other data" not in Path(out.strip()).read_text()


def test_labelled_rows_are_scored(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    count = 600
    columns: dict[str, Any] = {
        "user_id": [f"u{each}" for each in rng.integers(0, 30, count)],
        "item_id": [f"i{each}" for each in rng.integers(0, 20, count)],
        "timestamp": 1_600_000_000 + np.arange(count) * 60,
    }
    columns["label"] = [int(item in ("i1", "i2", "i3", "i4", "i5", "i6", "i7")) for item in columns["item_id"]]
    table = pa.table(columns)
    data = prepared(tmp_path, table.slice(0, 500), label="label", item_features=[]).folder
    rs.train("logistic_regression", data, tmp_path / "run", progress=False)
    file = written(tmp_path / "new.csv", table.slice(500))
    result = rs.evaluate(tmp_path / "run", file)
    scored = rs.predict(tmp_path / "run", table.slice(500).drop_columns(["label", "timestamp"]), kind="rows")
    chances = np.array([row["probability"] for row in scored])
    labels = np.array(columns["label"][500:], bool)
    assert result.metrics["rows"]["log_loss"] == pytest.approx(
        -np.log(np.where(labels, chances, 1 - chances)).mean(), rel=1e-5
    )
    pairs = chances[labels][:, None] - chances[~labels]
    assert result.metrics["rows"]["auc"] == pytest.approx(((pairs > 0) + (pairs == 0) / 2).mean(), abs=1e-6)


def test_files_that_tell_nothing_are_refused(shop: Mapping[str, Path], tmp_path: Path) -> None:
    known, _ = shop_events()
    old = written(tmp_path / "old.csv", known.slice(100, 50))
    with pytest.raises(DataError, match="holds no event after the newest one of the dataset"):
        rs.evaluate(shop["ease"], old)
    with pytest.raises(DataError, match="holds the events of this file already"):
        rs.evaluate(shop["ease"], shop["rows.csv"])
    later = known.slice(100, 1).set_column(2, "timestamp", pa.array([1_900_000_000]))
    with pytest.raises(DataError, match="holds no event on an item that is new to its user"):
        rs.evaluate(shop["ease"], written(tmp_path / "repeats.csv", later))
    with pytest.raises(DataError, match=r"none\.csv: no such file"):
        rs.evaluate(shop["ease"], tmp_path / "none.csv")
    with pytest.raises(
        SettingsError, match="'split', 'baselines', 'bootstrap': used with a prepared dataset, not with"
    ):
        rs.evaluate(shop["ease"], shop["new.csv"], "valid", baselines=True, bootstrap=5)
    with pytest.raises(SettingsError, match="ks"):
        rs.evaluate(shop["ease"], shop["new.csv"], k=0)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("recommend", "run", "--exclude", "a", "--exclude=b"),
            "'--exclude': given 2 times; give it once, with commas",
        ),
        (("evaluate", "run", "data", "--split", "valid", "--split", "test"), "'--split': given 2 times; give it once"),
        (("recommend", "run", "-k5", "-k", "10"), "given 2 times; give it once"),
    ],
)
def test_an_option_whose_last_value_alone_would_count_is_given_once(
    words: tuple[str, ...], told: str, run: Cli
) -> None:
    status, _, said = run(*words)
    assert (status, told in " ".join(said.split())) == (2, True), said
