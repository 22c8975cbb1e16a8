"""Random data of any specification's shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recspec.base.errors import DataError, SettingsError
from recspec.data.storage import Ragged, open_split
from recspec.data.storage.check import check, count_rows
from recspec.data.storage.transcode import power_law, synthesize
from recspec.feature_spec import CHUNK_TYPES, ChunkType, FeatureSpec
from tests import made_up


def shape(metadata: dict[str, object] | None = None, **features: dict[str, object]) -> FeatureSpec:
    """No files are there."""
    return FeatureSpec.from_dict(
        {
            "feature_spec": {
                "user": {"cardinality": 20},
                "item": {"cardinality": 50, "vocabulary": "items"},
                "history": {"cardinality": 50, "length": 5, "vocabulary": "items"},
                "categories": {"cardinality": 7, "length": 5, "padding": 0},
                "tags": {"cardinality": 9, "length": 3},
                "price": {},
                "title": {"length": 4, "vector": True},
                "age": {"dtype": "int8"},
                "member": {"dtype": "bool"},
                "label": {"dtype": "bool"},
                **features,
            },
            "channel_spec": {
                "user": ["user", "age", "member"],
                "item": ["item", "tags", "price", "title"],
                "history": ["history", "categories"],
                "label": ["label"],
                "group": ["user"],
            },
            "metadata": metadata or {},
        }
    )


@pytest.mark.parametrize("kind", CHUNK_TYPES)
def test_made_data_pass_the_check(kind: ChunkType, tmp_path: Path) -> None:
    made = synthesize(shape(), tmp_path / "out", 200, type=kind)
    assert FeatureSpec.load(tmp_path / "out") == made
    check(made)
    assert count_rows(made) == {"train": 200, "valid": 20, "test": 20}
    assert {chunk.type for chunks in made.sources.values() for chunk in chunks} == {kind}
    columns = open_split(made, "train").read(0, 200)
    assert set(np.unique(columns["label"])) == {False, True}
    assert 0 <= np.min(columns["price"]) < np.max(columns["price"]) <= 1
    assert len(np.unique(columns["age"])) > 20
    assert len(np.unique(columns["user"])) == 20
    assert isinstance(columns["title"], Ragged)
    assert set(columns["title"].lengths) == {4}


def test_lists_vary_in_length_and_those_of_a_history_go_together(tmp_path: Path) -> None:
    made = synthesize(shape(), tmp_path / "out", 300)
    columns = open_split(made, "train").read(0, 300)
    lengths = {name: column.lengths for name, column in columns.items() if isinstance(column, Ragged)}
    assert set(lengths["history"].tolist()) == {1, 2, 3, 4, 5}
    assert lengths["history"].tolist() == lengths["categories"].tolist()
    assert set(lengths["tags"].tolist()) == {1, 2, 3}
    stored = open_split(made, "train", shifted=False).read(0, 300)
    assert isinstance(stored["categories"], Ragged)
    assert isinstance(stored["tags"], Ragged)
    assert stored["categories"].values.min() == 1, "0 is declared to be padding"
    assert stored["tags"].values.min() == 0


def test_a_seed_makes_the_same_data_and_another_one_others(tmp_path: Path) -> None:
    specs = [synthesize(shape(), tmp_path / str(i), 50, seed=seed) for i, seed in enumerate([1, 1, 2])]
    users = [open_split(spec, "train").read(0, 50)["user"].tolist() for spec in specs]
    assert users[0] == users[1] != users[2]
    assert users[0][:5] != open_split(specs[0], "valid").read(0, 5)["user"].tolist(), "splits differ"


def test_the_power_law_has_its_probabilities() -> None:
    """P(id = k) = (F(k + 2) - F(k + 1)), F(x) = (1 - x^(1 - alpha)) / (1 - K^(1 - alpha)), K = num_ids + 1."""
    num_ids, alpha, size = 10, 1.45, 200_000
    ids = power_law(np.random.default_rng(0), size, num_ids, alpha)
    edges = np.arange(1, num_ids + 2) ** (1 - alpha)
    expected = size * np.diff((1 - edges) / (1 - edges[-1]))
    counts = np.bincount(ids, minlength=num_ids)
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert len(counts) == num_ids
    assert chi_squared < 27.9, "99.9 % of 9 degrees of freedom"
    assert counts[0] / size == pytest.approx(0.4060, abs=0.005)  # worked by hand: (1 - 2^-.45) / (1 - 11^-.45)


@pytest.mark.parametrize("alpha", [0.5, 1, 1.45, 5])
@pytest.mark.parametrize("num_ids", [1, 2, 300_000_000])
def test_the_power_law_stays_in_range(num_ids: int, alpha: float) -> None:
    ids = power_law(np.random.default_rng(0), 10_000, num_ids, alpha)
    assert (ids.min(), ids.max() < num_ids) == (0, True) if alpha >= 1 or num_ids < 3 else ids.max() < num_ids


def test_ids_follow_a_power_law_when_asked_or_where_the_feature_says_so(tmp_path: Path) -> None:
    spec = shape(user={"cardinality": 1000, "alpha": 1.45})
    made = synthesize(spec, tmp_path / "a", 2000)
    columns = open_split(made, "train", ["user", "item"]).read(0, 2000)
    assert np.bincount(columns["user"]).argmax() == 0
    assert np.mean(columns["user"] == 0) > 0.25
    assert np.mean(columns["item"] == 1) < 0.1, "uniform; the first id of a shifted vocabulary is 1"
    columns = open_split(synthesize(spec, tmp_path / "b", 2000, distribution="power_law"), "train").read(0, 2000)
    assert np.mean(columns["item"] == 1) > 0.25


def test_series_have_one_user_and_their_positive_first(tmp_path: Path) -> None:
    made = synthesize(shape({"test_samples_per_series": 11}), tmp_path / "out", {"train": 30, "test": 120})
    check(made)
    assert count_rows(made) == {"train": 30, "test": 110}
    columns = open_split(made, "test").read(0, 110)
    assert columns["label"].reshape(10, 11).tolist() == [[True] + [False] * 10] * 10
    users = columns["user"].reshape(10, 11)
    assert (users == users[:, :1]).all()
    assert len(np.unique(users)) == 10
    histories = columns["history"]
    assert isinstance(histories, Ragged)
    assert histories.tolist()[:11] == [histories.tolist()[0]] * 11
    assert len(np.unique(columns["item"])) > 20
    tiny = synthesize(shape({"test_samples_per_series": 11}), tmp_path / "tiny", 1)
    assert count_rows(tiny) == {"train": 1, "valid": 11, "test": 11}


def test_id_0_stays_unknown_where_the_specification_was_prepared(tmp_path: Path) -> None:
    spec = shape({"vocabularies": "vocabularies", "dataset": "movielens", "user_id": "user"})
    made = synthesize(spec, tmp_path / "out", 500)
    assert open_split(made, "train").read(0, 500)["user"].min() == 1
    assert dict(made.metadata) == {"dataset": "synthesize", "user_id": "user"}
    check(made)


def test_open_cardinalities_and_dtypes_are_resolved(tmp_path: Path) -> None:
    spec = shape(user={"cardinality": "auto"}, item={"cardinality": "auto", "vocabulary": "items"})
    made = synthesize(spec, tmp_path / "out", 20, cardinality=200)
    found = {name: (feature.cardinality, feature.dtype) for name, feature in made.features.items()}
    assert (found["user"], found["item"], found["price"]) == ((200, "int16"), (50, "int8"), (None, "float32"))


def test_blocks_are_written_as_they_come(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    spec = shape({"test_samples_per_series": 3})
    synthesize(spec, tmp_path / "out", {"test": 70_000}, progress=lambda done, total: told.append((done, total)))
    assert told == [(65_535, 69_999), (69_999, 69_999)]
    users = open_split(FeatureSpec.load(tmp_path / "out"), "test").read(65_500, 65_600)["user"].tolist()
    assert users == [(row // 3) % 20 for row in range(65_500, 65_600)], "the second block goes on with the next series"


def test_gaps_are_as_long_as_the_history_they_stand_beside(tmp_path: Path) -> None:
    made = synthesize(made_up.sequences(tmp_path / "data", num_rows=40), tmp_path / "out", 50)
    columns = open_split(made, "train", made.columns("train")).read(0, 50)
    lists = [column.lengths.tolist() for column in columns.values() if isinstance(column, Ragged)]
    assert len(lists) == 5
    assert all(lengths == lists[0] for lengths in lists)


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    synthesize(shape(), tmp_path / "out", 1)
    with pytest.raises(DataError, match="holds a dataset already"):
        synthesize(shape(), tmp_path / "out", 1)
    with pytest.raises(SettingsError) as caught:
        synthesize(shape(), tmp_path / "other", {"train": 0, "test": -1})
    assert list(caught.value.problems) == [
        "split 'test': -1 rows; expected 1 or more",
        "split 'train': 0 rows; expected 1 or more",
    ]
    with pytest.raises(SettingsError, match=r"alpha is 0; expected a number above 0"):
        synthesize(shape(), tmp_path / "other", 1, distribution="power_law", alpha=0)


def test_every_published_specification_can_be_filled(real_data, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    files = sorted(real_data("feature-specs").rglob("*.yaml"))
    assert len(files) >= 35
    for number, file in enumerate(files):
        made = synthesize(FeatureSpec.load(file), tmp_path / str(number), 4, distribution="power_law")
        check(made)
        assert count_rows(made)["train"] == 4
