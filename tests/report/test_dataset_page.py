"""The page of a dataset: figures by hand, leaks that are found, and hostile texts."""

from pathlib import Path

import numpy as np
import pytest

from recspec.errors import DataError
from recspec.report import write_dataset_page
from recspec.report.dataset_figures import figures_of, sample
from recspec.report.dataset_leaks import Leaks, leaks_of
from recspec.report.dataset_values import RawNames, numbers_of, top_values
from recspec.spec import FeatureSpec
from tests import made_up
from tests.report.pages import HOSTILE, read
from tests.report.test_dataset_summary import dataset

TRAIN = '1,2,"[1]",0.5,1\n1,3,"[]",1.5,0\n2,2,"[2]",1,1\n'
TEST = '1,2,"[1]",0.5,1\n3,5,"[]",1.5,0\n'


def split_of(folder: Path, columns: dict[str, np.ndarray], metadata: dict[str, object] | None = None) -> FeatureSpec:
    """Splits train and test, the first and the last half of columns that are named in the order that they are given."""
    features: dict[str, dict[str, object]] = {}
    for name, values in columns.items():
        number = name in ("label", "price", "time")
        features[name] = {} if number else {"cardinality": int(values.max()) + 1}
    features["time"] = {"dtype": "int64"}
    rows = np.stack([columns[name] for name in columns], axis=1)
    half = len(rows) // 2
    for split, part in (("train", rows[:half]), ("test", rows[half:])):
        (folder / f"{split}.csv").write_text("".join(",".join(f"{each:g}" for each in row) + "\n" for row in part))
    sources = {
        split: [{"type": "csv", "features": [*columns], "files": [f"{split}.csv"]}] for split in ("train", "test")
    }
    context = [name for name in columns if name not in ("user", "item", "label", "time")]
    channels = {"user": ["user"], "item": ["item"], "context": context, "label": ["label"]}
    sections = {"feature_spec": {name: features[name] for name in columns}, "source_spec": sources,
                "channel_spec": channels, "metadata": {"timestamp": "time", **(metadata or {})}}  # fmt: skip
    return FeatureSpec.from_dict(sections, folder)


def rows(count: int = 400) -> dict[str, np.ndarray]:
    """Rows without a leak, in order of time."""
    rng = np.random.default_rng(0)
    return {"user": np.arange(count) % 50, "item": rng.integers(0, 30, count), "price": rng.normal(size=count).round(3),
            "label": rng.integers(0, 2, count), "time": np.arange(count)}  # fmt: skip


def told(leaks: Leaks) -> str:
    return " ".join(leaks.suspected)


# --- figures ---


def test_figures_by_hand(tmp_path: Path) -> None:
    found = figures_of(dataset(tmp_path, {"train": TRAIN, "test": TEST}))
    train, test = found.splits["train"], found.splits["test"]
    assert (train.rows, train.events, train.users, train.items, train.label_mean) == (3, 3, 2, 2, pytest.approx(2 / 3))
    assert (train.cold_users, train.first) == (None, None)
    assert (test.cold_users, test.cold_items) == (0.5, 0.5), "user 3 and item 5 are not in train"
    assert (found.users, found.items, found.pairs, found.events) == (3, 3, 4, 5)
    assert found.density == 4 / 9
    assert found.head_share == 3 / 5, "item 2"
    assert sorted(found.per_user.tolist()) == [1, 1, 3]


def test_events_of_series_are_their_positives(tmp_path: Path) -> None:
    found = figures_of(made_up.interactions(tmp_path))
    test = found.splits["test"]
    assert found.are_positives
    assert test.rows == 21 * test.events
    assert sum(found.per_user) == found.events == sum(each.events for each in found.splits.values())


def test_a_sample_is_even_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = split_of(tmp_path, rows())
    monkeypatch.setattr("recspec.report.dataset_figures.BLOCK", 7)
    found = sample(spec, "train", ["time"], most=70)
    np.testing.assert_array_equal(np.asarray(found["time"]), np.arange(0, 200, 3))


# --- values ---


def test_values_are_those_of_the_raw_files(data: FeatureSpec) -> None:
    names = RawNames(data)
    top = top_values(data, "train", names)
    kind = top["kind"]
    assert kind.distinct == 3
    assert {value for value, _ in kind.values} == {
        f"{each} {place}".replace("\x00", "") for place, each in enumerate(HOSTILE[:3])
    }
    assert kind.total == sum(count for _, count in kind.values)
    title, count = top["item_id"].values[0]
    assert title.endswith(")"), "the raw id stands behind the title"
    assert count == max(count for _, count in top["item_id"].values)


def test_numbers_are_in_the_units_of_the_raw_files(tmp_path: Path) -> None:
    spec = made_up.clicks(tmp_path)
    assert all(of.quantiles == tuple(sorted(of.quantiles)) for of in numbers_of(spec, "train", RawNames(spec)).values())


# --- leaks ---


def test_clean_data_are_not_suspected(tmp_path: Path) -> None:
    found = leaks_of(split_of(tmp_path, rows()))
    assert found.suspected == []
    assert "All rows of test lie after train." in found.clean
    assert "No row of test equals a row of train." in found.clean


def test_a_column_that_gives_the_label_away_is_suspected(tmp_path: Path) -> None:
    held = rows()
    held["price"] = held["label"] * 10 + held["price"] / 10
    found = leaks_of(split_of(tmp_path, held))
    assert "Column 'price' alone orders the labels of test with AUC 1.0000." in told(found)


def test_a_code_that_gives_the_label_away_is_suspected(tmp_path: Path) -> None:
    held = rows()
    held["status"] = 2 * held["label"] + np.arange(400) % 2
    assert "Column 'status' alone orders the labels" in told(leaks_of(split_of(tmp_path, held)))


def test_a_column_that_tells_the_item_is_suspected(tmp_path: Path) -> None:
    held = rows()
    held["label"] = np.ones(400)
    held["order"] = (held["item"] * 7 + 3) % 31
    found = leaks_of(split_of(tmp_path, held))
    assert "Column 'order' alone tells the item of" in told(found)
    assert len(found.suspected) == 1


def test_test_rows_in_train_are_suspected(tmp_path: Path) -> None:
    held = rows()
    for name in held:
        held[name] = np.concatenate([held[name][:200], held[name][100:200], held[name][300:]])
    found = leaks_of(split_of(tmp_path, held))
    assert "50.0 % of the rows of test equal a row of train in every column" in told(found)


def test_values_of_the_future_are_suspected(tmp_path: Path) -> None:
    held = rows()
    held["time"] = held["time"][::-1].copy()
    found = leaks_of(split_of(tmp_path, held))
    assert "100.0 % of the rows of test lie before a row of the same user in train" in told(found)
    assert any("lie before the last row of train" in each for each in found.remarks)


def test_one_split_alone_is_not_judged(tmp_path: Path) -> None:
    found = leaks_of(dataset(tmp_path, {"train": TRAIN}))
    assert (found.suspected, found.clean) == ([], [])
    assert found.remarks == ["There are no two splits to compare, so nothing was looked for."]


# --- the page ---


def test_the_page_shows_hostile_texts_as_texts(data: FeatureSpec, tmp_path: Path) -> None:
    page = read(write_dataset_page(data, tmp_path / "page.html"))
    for place in range(3):
        assert " ".join(f"{HOSTILE[place]} {place}".split()) in page.shown
    assert "<b>data" in page.shown
    for name in (
        "At a glance",
        "Suspected leaks",
        "Splits",
        "Users, items and time",
        "Features",
        "Most frequent values",
    ):
        assert name in page.inside["h2"], name
    assert "No leak is suspected." in page.shown or "Suspected leak:" in page.shown


def test_the_page_of_labelled_rows_shows_numbers(tmp_path: Path) -> None:
    page = read(write_dataset_page(made_up.clicks(tmp_path / "data"), tmp_path / "page.html"))
    assert "Numbers" in page.inside["h2"]


def test_the_page_of_a_dataset_with_unknown_cardinalities_leaves_out_what_needs_them(tmp_path: Path) -> None:
    sections = dataset(tmp_path, {"train": TRAIN, "test": TEST}).to_dict()
    for name in ("user", "item", "tags"):
        sections["feature_spec"][name]["cardinality"] = "auto"  # type: ignore[index]
    page = read(write_dataset_page(FeatureSpec.from_dict(sections, tmp_path), tmp_path / "page.html"))
    assert "cardinality of 'user' is auto" in page.shown


def test_the_page_of_a_dataset_without_files_shows_its_features(tmp_path: Path) -> None:
    page = read(write_dataset_page(dataset(tmp_path, {}), tmp_path / "page.html"))
    assert page.inside["h2"] == ["Features"]


def test_a_page_is_not_written_to_a_url(data: FeatureSpec) -> None:
    with pytest.raises(DataError, match=r"the page: .* is a URL"):
        write_dataset_page(data, "s3://bucket/page.html")
