"""The page of a dataset: figures by hand, leaks that are found, and hostile texts."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recspec.base.errors import DataError
from recspec.data.encoding import NumberEncoder, ScaleEncoder, VocabularyEncoder
from recspec.data.prepare import PrepareContext
from recspec.datasets import DATASETS
from recspec.feature_spec import FeatureSpec
from recspec.report import write_dataset_page
from recspec.report.dataset_figures import figures_of, leaks_of, sample
from recspec.report.dataset_page import overview, splits_table
from recspec.report.dataset_summary import RawNames, fill_of, numbers_of, top_values
from tests import made_up
from tests.evaluation.tables import csv_spec
from tests.report.pages import HOSTILE, Page, read
from tests.report.test_dataset_summary import dataset

TRAIN = '1,2,"[1]",0.5,1\n1,3,"[]",1.5,0\n2,2,"[2]",1,1\n'
TEST = '1,2,"[1]",0.5,1\n3,5,"[]",1.5,0\n'


def split_of(folder: Path, columns: dict[str, np.ndarray], metadata: dict[str, object] | None = None) -> FeatureSpec:
    """Splits train and test, the first and the last half of columns that are named in the order that they are given."""
    numbers: dict[str, dict[str, object]] = {"label": {}, "price": {}, "time": {"dtype": "int64"}}
    features = {name: numbers.get(name, {"cardinality": int(of.max()) + 1}) for name, of in columns.items()}
    rows = np.stack([*columns.values()], axis=1)
    texts = {
        split: "".join(",".join(f"{each:g}" for each in row) + "\n" for row in part)
        for split, part in zip(("train", "test"), np.split(rows, 2), strict=True)
    }
    context = [name for name in columns if name not in ("user", "item", "label", "time")]
    channels = {"user": ["user"], "item": ["item"], "context": context, "label": ["label"]}
    return csv_spec(folder, texts, features, channels, {"timestamp": "time", **(metadata or {})})


def rows(count: int = 400) -> dict[str, np.ndarray]:
    """Rows without a leak, in order of time."""
    rng = np.random.default_rng(0)
    return {
        "user": np.arange(count) % 50,
        "item": rng.integers(0, 30, count),
        "price": rng.normal(size=count).round(3),
        "label": rng.integers(0, 2, count),
        "time": np.arange(count),
    }


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
    shown = Page(str(splits_table(found)))
    assert "Drawn negatives" in shown.shown
    assert f"{20 * test.events:,}" in shown.shown
    assert "Rows" not in shown.shown, "a drawn negative is no row"
    (_, of_events) = overview(found)["Events"]
    assert f"beside {sum(each.rows - each.events for each in found.splits.values()):,} drawn negatives" in of_events
    assert sum(found.per_user) == found.events == sum(each.events for each in found.splits.values())


def test_a_sample_is_even_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = split_of(tmp_path, rows())
    monkeypatch.setattr("recspec.report.dataset_figures.BLOCK", 7)
    found = sample(spec, "train", ["time"], most=70)
    np.testing.assert_array_equal(np.asarray(found["time"]), np.arange(0, 200, 3))


# --- unknown ids and missing numbers ---


@pytest.fixture
def with_gaps(tmp_path: Path) -> FeatureSpec:
    """Ads shown to 5 users in train; test has rows of an unknown user and an unknown ad. 4 of 20 train prices lack."""
    prices = [*range(10, 26), *[""] * 4]
    lines = [f"u{row % 5},a{row % 4},{row % 2},{price},{row}" for row, price in enumerate(prices)]
    lines += ["u0,a0,1,10,100", "stranger,a1,0,12,101", "u1,unheard,1,,102", "u2,a2,0,17,103"]
    (tmp_path / "rows.csv").write_text("\n".join(["user,ad,clicked,price,time", *lines, ""]))
    table = DATASETS["table"]
    settings = table.Settings(
        user="user",
        item="ad",
        label="clicked",
        timestamp="time",  # type: ignore[call-arg]
        context_features=["price"],
        split="time",
        valid=0,
        test=4 / 24,
    )
    table.prepare(PrepareContext(tmp_path / "rows.csv", tmp_path / "data", threads=1), settings)
    return FeatureSpec.load(tmp_path / "data")


def test_the_unknown_user_and_item_are_no_user_and_no_item(with_gaps: FeatureSpec, tmp_path: Path) -> None:
    found = figures_of(with_gaps)
    assert (found.splits["test"].rows, found.splits["test"].users, found.splits["test"].items) == (4, 3, 3)
    assert (found.splits["train"].users, found.splits["train"].items) == (5, 4)
    assert (found.users, found.items, len(found.per_user), len(found.per_item)) == (5, 4, 5, 4)
    assert found.pairs == 20, "which train has; those of unknown ids are none"
    assert found.density == 1.0
    page = read(write_dataset_page(with_gaps, tmp_path / "page.html"))
    assert "user_id user ids 5 5 4.2 %" in page.shown
    assert "item_id item ids 4 4 4.2 %" in page.shown
    assert "Id 0 stands for missing and unknown values; it is not among the ids." in page.shown


def test_numbers_leave_out_the_rows_that_hold_the_mean_for_a_missing_one(
    with_gaps: FeatureSpec, tmp_path: Path
) -> None:
    price = numbers_of(with_gaps, "train", RawNames(with_gaps))["price"]
    assert price.quantiles == pytest.approx((10, 13.75, 17.5, 21.25, 25)), "of 10 to 25"
    assert sum(price.counts) == 16
    assert price.filled == 4 / 20
    page = read(write_dataset_page(with_gaps, tmp_path / "page.html"))
    assert "price up to 20.0 % 10.0" in page.shown, "of train"
    assert "price context numbers – – up to 20.8 %" in page.shown, "of all splits"
    assert "A prepared dataset does not mark missing numbers" in page.shown
    assert "Where a missing number holds the mean, the other columns and the charts leave these rows out." in page.shown


def test_years_have_no_thousands_separators(tmp_path: Path) -> None:
    held = rows()
    held["price"] = 1990 + np.arange(400) % 35
    page = read(write_dataset_page(split_of(tmp_path, held), tmp_path / "page.html"))
    assert "price – 1990 1998" in page.shown
    assert "1,99" not in page.shown


def test_numbers_that_are_0_where_one_is_missing_keep_their_zeros() -> None:
    assert fill_of(NumberEncoder()) == 0
    assert fill_of(NumberEncoder(missing=3.0)) == 3
    assert fill_of(ScaleEncoder(mean=5.0, std=2.0, missing=1.0)) == -2
    assert fill_of(VocabularyEncoder(vocabulary="user_id")) is None
    assert fill_of(None) is None


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
    spec = made_up.clicks(tmp_path / "data", num_rows=1000)
    assert "Numbers" in read(write_dataset_page(spec, tmp_path / "page.html")).inside["h2"]
    assert all(of.quantiles == tuple(sorted(of.quantiles)) for of in numbers_of(spec, "train", RawNames(spec)).values())


# --- leaks ---


def test_clean_data_are_not_suspected(tmp_path: Path) -> None:
    found = leaks_of(split_of(tmp_path, rows()))
    assert found.suspected == []
    assert "All rows of test lie after train." in found.clean
    assert "No row of test equals a row of train." in found.clean


def label_in_a_price(held: dict[str, np.ndarray]) -> None:
    held["price"] = held["label"] * 10 + held["price"] / 10


def label_in_a_code(held: dict[str, np.ndarray]) -> None:
    held["status"] = 2 * held["label"] + np.arange(400) % 2


def item_in_a_column(held: dict[str, np.ndarray]) -> None:
    held["label"] = np.ones(400)
    held["order"] = (held["item"] * 7 + 3) % 31


def half_of_test_in_train(held: dict[str, np.ndarray]) -> None:
    for name in held:
        held[name] = np.concatenate([held[name][:200], held[name][100:200], held[name][300:]])


def time_reversed(held: dict[str, np.ndarray]) -> None:
    held["time"] = held["time"][::-1].copy()


@pytest.mark.parametrize(
    ("leak", "told"),
    [
        (label_in_a_price, "Column 'price' alone orders the labels of train with AUC 1.0000."),
        (label_in_a_code, "Column 'status' alone orders the labels"),
        (item_in_a_column, "Column 'order' alone tells the item of"),
        (half_of_test_in_train, "50.0 % of the rows of test equal a row of train in every column"),
        (time_reversed, "100.0 % of the rows of test lie before a row of the same user in train"),
    ],
)
def test_leaks_are_suspected(leak: Callable[[dict[str, np.ndarray]], None], told: str, tmp_path: Path) -> None:
    held = rows()
    leak(held)
    found = leaks_of(split_of(tmp_path, held))
    assert told in " ".join(found.suspected)
    if leak is item_in_a_column:
        assert len(found.suspected) == 1
    if leak is time_reversed:
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


def test_the_page_of_a_dataset_with_unknown_cardinalities_leaves_out_what_needs_them(tmp_path: Path) -> None:
    sections = dataset(tmp_path, {"train": TRAIN, "test": TEST}).to_dict()
    for name in ("user", "item", "tags"):
        sections["feature_spec"][name]["cardinality"] = "auto"  # type: ignore[index]
    page = read(write_dataset_page(FeatureSpec.from_dict(sections, tmp_path), tmp_path / "page.html"))
    assert "cardinality of 'user' is auto" in page.shown
    page = read(write_dataset_page(dataset(tmp_path, {}), tmp_path / "page.html"))
    assert page.inside["h2"] == ["Features"], "without files"


def test_a_page_is_not_written_to_a_url(data: FeatureSpec) -> None:
    with pytest.raises(DataError, match=r"the page: .* is a URL"):
        write_dataset_page(data, "s3://bucket/page.html")
