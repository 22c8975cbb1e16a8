"""Metrics by slice by hand: activity, popularity, features and catalogue columns."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import SettingsError
from recspec.evaluation.evaluations import evaluate_model
from recspec.evaluation.report import Evaluation
from recspec.evaluation.slices import _numbers, codes_of, kinds_of_items, ranges
from recspec.evaluation.task import EvaluateSettings, EvaluationTask
from tests.evaluation.tables import TableModel, dataset, ranked


def sliced(folder: Path, *by: str) -> Evaluation:
    """User 0 is new; user 1 acted on 1 item, user 2 on 3. Half of the interactions are of item 0."""
    splits = {
        "train": [(1, 0, 1), (2, 0, 1), (2, 1, 1), (2, 2, 1)],
        "test": [(0, 3, 1), (1, 1, 1), (1, 3, 1), (2, 3, 1), (0, 0, 0), (2, 4, 0)],
    }
    return ranked(dataset(folder, splits), np.array([6.0, 5, 4, 3, 2, 1]), ks=(1,), slices=by)


def test_activity_by_hand(tmp_path: Path) -> None:
    parts = sliced(tmp_path, "activity").slices["full"]["activity"]
    assert {name: (part.count, part.positives) for name, part in parts.items()} == {
        "new: 0": (1, 1),
        "1 event": (1, 2),
        "3 events": (1, 1),
    }
    # User 0: item 3 is fourth. User 1, who acted on 0: item 1 is first. User 2, on 0 to 2: item 3 is first.
    assert [part.metrics["mrr"] for part in parts.values()] == [0.25, 1.0, 1.0]


def test_popularity_by_hand(tmp_path: Path) -> None:
    found = sliced(tmp_path, "popularity")
    parts = found.slices["full"]["popularity"]
    # Item 1 is of the tail; item 3 was never trained on: fourth, third beside 1 and 2, and first.
    assert {name: (part.count, part.positives) for name, part in parts.items()} == {
        "tail": (1, 1),
        "not in training": (3, 3),
    }
    assert parts["tail"].metrics["mrr"] == 1.0
    assert parts["not in training"].metrics["mrr"] == pytest.approx((1 / 4 + 1 / 3 + 1) / 3)
    assert parts["not in training"].standard_errors["mrr"] > 0
    rows = found.slices["rows"]["popularity"]
    assert {name: (part.count, part.positives) for name, part in rows.items()} == {
        "head": (1, 0),
        "tail": (1, 1),
        "not in training": (4, 3),
    }
    assert rows["not in training"].metrics["auc"] == 1.0


def test_slices_add_up_to_the_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    train = [(int(u), int(i), 1) for u, i in {*zip(rng.integers(0, 30, 200), rng.integers(0, 40, 200), strict=True)}]
    test = [
        (u, int(i), int(y)) for u in range(30) for i, y in zip(rng.permutation(40)[:6], (1, 0, 1, 0, 0, 0), strict=True)
    ]
    spec = dataset(tmp_path, {"train": train, "test": test}, users=30, items=40)
    model = TableModel(spec, rng.normal(size=(30, 40)))
    found = evaluate_model(model, spec, "test", settings=EvaluateSettings(ks=(3,), slices=("activity", "user")))
    for protocol, named in found.slices.items():
        for parts in named.values():
            total = sum(part.count for part in parts.values())
            for metric in ("mrr", "ndcg@3") if protocol != "rows" else ("log_loss", "accuracy"):
                mean = sum(part.count * part.metrics[metric] for part in parts.values()) / total
                assert mean == pytest.approx(found.metrics[protocol][metric], rel=1e-5), (protocol, metric)
    assert "others" in found.slices["rows"]["user"]


def test_a_slice_leaves_out_what_is_1_for_any_model(tmp_path: Path) -> None:
    """Users 1 and 2 have two and three candidates."""
    rows = [(1, 1, 1), (1, 2, 0), (2, 1, 1), (2, 3, 0), (2, 4, 0)]
    spec = dataset(tmp_path, {"train": [(1, 0, 1), (2, 0, 1)], "test": rows})

    def of(k: int) -> tuple[set[str], list[set[str]]]:
        found = ranked(spec, np.array([6.0, 5, 4, 3, 2, 1]), "sampled", ks=(k,), slices=("user",))
        return set(found.metrics["sampled"]), [{*each.metrics} for each in found.slices["sampled"]["user"].values()]

    whole, parts = of(3)
    assert "hit_rate@3" not in whole
    assert parts == [whole, whole]
    whole, parts = of(2)
    assert parts == [whole - {"hit_rate@2", "recall@2"}, whole], "user 1 has no more than two candidates"


def test_ranges_hold_about_equally_many() -> None:
    values = np.array([1.0, 1, 1, 2, 3, 4, 5, 100, np.nan])
    codes, names = ranges(values, values)
    # Quartiles 1, 2.5 and 4.25 end their ranges.
    assert codes.tolist() == [0, 0, 0, 1, 2, 2, 3, 3, -1]
    assert names == ["1", "2", "3 to 4", "5 to 100"]
    assert ranges(np.zeros(0), np.zeros(0)) == (pytest.approx(np.zeros(0)), ["none"])


def test_years_have_no_thousands_separators_and_counts_of_events_have() -> None:
    years = np.arange(1990.0, 2030)
    assert ranges(years, years)[1][0] == "1990 to 1999"
    assert ranges(years, years, "{:,.0f}".format)[1][0] == "1,990 to 1,999"
    assert _numbers(np.array([20161234.0, 1999.5]))[1] == ["1999.5", "20161234"]


@pytest.mark.parametrize(
    "values", [[f"title {n}" for n in range(60)], [n / 7 for n in range(60)]], ids=["texts", "numbers"]
)
def test_every_value_of_a_column_is_a_kind_of_its_own(values: list[object], tmp_path: Path) -> None:
    """Slices join rare values; a diversity that did so too would take items of 41 rare brands for alike."""
    metadata = {"catalogues": {"item": "items.parquet"}}
    spec = dataset(tmp_path, {"train": [(1, 1, 1)], "test": [(1, 2, 1)]}, items=63, metadata=metadata)
    pq.write_table(pa.table({"column": [*values, None, values[3]]}), tmp_path / "items.parquet")
    kinds = kinds_of_items(EvaluationTask(spec, "test", ["full"], EvaluateSettings()), "column").ravel()
    assert len(set(kinds[:60].tolist())) == 60
    assert (kinds[:60].min() > 0, kinds[60], kinds[61] == kinds[3]) == (True, 0, True)


def test_raw_columns_of_catalogues_are_slices_and_kinds(tmp_path: Path) -> None:
    """Items 1 to 5 are of brands a, b, a, none, b; users 1 to 3 are 20, 20 and 35 years old; tags are lists."""
    splits = {"train": [(1, 1, 1)], "test": [(1, 2, 1), (2, 3, 1), (3, 4, 1)]}
    spec = dataset(tmp_path, splits, metadata={"catalogues": {"user": "users.parquet", "item": "items.parquet"}})
    brands = pa.table({"brand": ["z", "a", "b", "a", None, "b"], "tags": [["x"]] * 6, "raw": [b"\xff"] * 6})
    pq.write_table(brands, tmp_path / "items.parquet")
    pq.write_table(pa.table({"age": [1, 20, 20, 35]}), tmp_path / "users.parquet")
    asked = EvaluateSettings(ks=(1,), slices=("brand", "age"), diversity="brand")
    task = EvaluationTask(spec, "test", ["full"], asked)
    found = ranked(spec, np.array([0.0, 5, 4, 3, 2, 1]), "full", **asked.model_dump()).slices["full"]
    assert {name: part.count for name, part in found["brand"].items()} == {"a": 1, "b": 1, "missing": 1}
    assert found["brand"]["a"].metrics["mrr"] == pytest.approx(1 / 3)
    assert {name: part.count for name, part in found["age"].items()} == {"20": 2, "35": 1}
    kinds = kinds_of_items(task, "brand").ravel()
    assert (kinds[1] == kinds[3] != 0, kinds[2] == kinds[5] != 0, kinds[4]) == (True, True, 0)
    for name, message in (
        ("tags", "slice: 'tags' holds lists in the catalogue"),
        ("raw", "a catalogue column of binary has no values to measure by"),
        ("activty", r"slice: unknown slice 'activty' \(did you mean 'activity'\?\)"),
    ):
        with pytest.raises(SettingsError, match=message):
            codes_of(task, name)
    with pytest.raises(SettingsError, match=r"diversity: unknown item column 'brnd' \(did you mean 'brand'\?\)"):
        kinds_of_items(task, "brnd")
