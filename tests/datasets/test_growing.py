"""A dataset that takes new events is the one that preparing all events gives, and no id changes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError
from recspec.data.encoding import Encoders
from recspec.data.prepare import PrepareContext
from recspec.data.prepare.declared import example
from recspec.data.storage import PREPARE_FILE, Ragged, open_split
from recspec.datasets import DATASETS, Grown, append_events, table
from recspec.datasets.table_rows import EVENTS, GROWTH_FILE, GrowthRules
from recspec.feature_spec import FeatureSpec
from tests.dataset_cases import (
    CASES,
    RATINGS,
    prepare_movielens,
    prepare_table,
    prepare_text,
    raw_pairs,
    run,
    write_latest,
    write_ncf,
)
from tests.made_up_events import NEW_ITEM, NEW_USER, prepared, shop_events, written

Row = tuple[object, ...]
COLUMNS_OF_EVENTS = ("user_id", "item_id", "timestamp")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    """A dataset of the known events, which no test changes."""
    return prepared(tmp_path_factory.mktemp("shop"), shop_events()[0])


def appended(base: FeatureSpec, folder: Path, events: pa.Table, name: str = "new") -> Grown:
    """The dataset with the events of a file NAME.csv."""
    return append_events(base, written(folder / f"{name}.csv", events), folder / f"with {name}")


def grown(folder: Path, events: pa.Table, **settings: object) -> tuple[FeatureSpec, Grown]:
    base = prepared(folder / "base", shop_events()[0], **settings)
    return base, appended(base, folder, events)


def changed(events: pa.Table, name: str, values: Sequence[object] | pa.Array) -> pa.Table:
    """The events with other values in a column."""
    return events.set_column(events.column_names.index(name), name, pa.array(values))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    """All events prepared at once, with histories."""
    return prepared(tmp_path_factory.mktemp("whole"), pa.concat_tables(shop_events()), history=6)


@pytest.fixture(scope="module")
def with_new(tmp_path_factory: pytest.TempPathFactory) -> tuple[FeatureSpec, Grown]:
    """A dataset with histories, before and with the new events."""
    return grown(tmp_path_factory.mktemp("with-new"), shop_events()[1], history=6)


def positives(spec: FeatureSpec, split: str) -> list[Row]:
    """Raw user, item, kind, time and history of each positive row."""
    encoders, columns = Encoders.load(spec.folder), open_split(spec, split).read(0, 1 << 40)
    rows = np.flatnonzero(np.asarray(columns["label"]) > 0)

    def raw(name: str, ids: np.ndarray) -> list[object]:
        return list(encoders.vocabularies[name].decode(ids).to_pylist())

    found = [raw(name, np.asarray(columns[name])[rows]) for name in ("user_id", "item_id", "kind")]
    found.append(np.asarray(columns["timestamp"])[rows].tolist())
    if isinstance(lists := columns.get("history_item_id"), Ragged):
        found.append([tuple(raw("item_id", np.array(lists.tolist()[row], np.int64))) for row in rows])
    return sorted(zip(*found, strict=True), key=str)


@pytest.mark.parametrize("bad", ["pipe", "link", "deep"])
def test_a_record_that_cannot_be_read_stops_no_growth(tmp_path: Path, bad: str) -> None:
    known, new = shop_events()
    base = prepared(tmp_path / "base", known)
    file = (base.folder / PREPARE_FILE).rename(tmp_path / "outside.json")
    if bad == "pipe":
        os.mkfifo(base.folder / PREPARE_FILE)
    elif bad == "link":
        (base.folder / PREPARE_FILE).symlink_to(file)
    else:
        (base.folder / PREPARE_FILE).write_text("[" * 100_000)
    made = appended(base, tmp_path, new)
    record = json.loads((made.spec.folder / PREPARE_FILE).read_text())
    assert [each["name"] for each in record["inputs"]] == ["new.csv"]  # nothing of a file outside


def test_a_column_of_another_kind_than_the_held_out_events_is_told(tmp_path: Path) -> None:
    known, new = shop_events()
    base = prepared(tmp_path / "base", known, split="time")
    lists = changed(new, "kind", [[kind] for kind in new.column("kind").to_pylist()])
    pq.write_table(lists, tmp_path / "new.parquet")
    with pytest.raises(
        DataError,
        match=r"new.parquet: column 'kind' holds array.*; the events that the dataset holds have string there",
    ):
        append_events(base, tmp_path / "new.parquet", tmp_path / "grown")


def test_ids_stay_and_new_values_get_the_next_ones(with_new: tuple[FeatureSpec, Grown]) -> None:
    (_, new), (base, found) = shop_events(), with_new
    before, after = Encoders.load(base.folder), Encoders.load(found.spec.folder)
    for name, vocabulary in before.vocabularies.items():
        assert after.vocabularies[name].values.slice(0, len(vocabulary)).equals(vocabulary.values)
    assert after.vocabularies["user_id"].values.to_pylist()[-2:] == ["aaron", NEW_USER]
    assert after.vocabularies["item_id"].values.to_pylist()[-1] == NEW_ITEM
    assert after.vocabularies["kind"].values.to_pylist()[-1] == "new"
    assert found.spec.features["history_item_id"].cardinality == len(after.vocabularies["item_id"]) + 1
    items = pq.read_table(found.spec.folder / "items.parquet")
    assert items.column("kind")[-1].as_py() == len(after.vocabularies["kind"])
    assert found.counts == {"events": new.num_rows, "users": 2, "items": 1, "left_out": 0}


def test_fitted_scales_stay(tmp_path: Path) -> None:
    _, new = shop_events()
    base, found = grown(tmp_path, new, context_features=["hour"])
    before, after = Encoders.load(base.folder), Encoders.load(found.spec.folder)
    assert after.encoders == before.encoders
    columns = open_split(found.spec, "train", ["timestamp", "hour"]).read(found.first_new["train"], 1 << 40)
    hours = (np.asarray(columns["timestamp"]) // 3600 % 24).astype(float)
    assert np.array_equal(np.asarray(columns["hour"]), np.asarray(before.encode_column("hour", hours)))


def test_a_grown_dataset_grows_again(tmp_path: Path, whole: FeatureSpec) -> None:
    _, new = shop_events()
    _, found = grown(tmp_path, new.slice(0, 40), history=6)
    again = appended(found.spec, tmp_path, new.slice(40), name="more")
    assert all(positives(again.spec, split) == positives(whole, split) for split in ("train", "valid", "test"))
    assert again.spec.sources["train"][0].files == ("train/part-00000.parquet", "train-new/part-00000.parquet")


def test_the_latest_events_of_a_user_go_on(with_new: tuple[FeatureSpec, Grown], whole: FeatureSpec) -> None:
    def histories(spec: FeatureSpec) -> dict[object, list[object]]:
        encoders, users = Encoders.load(spec.folder), pq.read_table(spec.folder / "users.parquet")
        lists = users.column("history_item_id").to_pylist()
        names = encoders.vocabularies["user_id"].decode(users.column("user_id").to_numpy()).to_pylist()
        items = encoders.vocabularies["item_id"]
        return {name: items.decode(np.array(each)).to_pylist() for name, each in zip(names, lists, strict=True)}

    assert histories(with_new[1].spec) == histories(whole)


def test_an_order_without_times_goes_on(tmp_path: Path) -> None:
    known, new = (each.drop_columns(["timestamp"]) for each in shop_events())
    base = prepared(tmp_path / "base", known, timestamp=None)
    found = appended(base, tmp_path, new)
    times = np.asarray(open_split(found.spec, "train", ["timestamp"]).read(0, 1 << 40)["timestamp"])
    assert times[found.first_new["train"] :].max() > times[: found.first_new["train"]].max()


def test_ratings_below_the_least_are_no_events(tmp_path: Path) -> None:
    known, new = shop_events()
    stars = pa.array([float(number % 5 + 1) for number in range(known.num_rows)])
    base = prepared(tmp_path / "base", known.append_column("stars", stars), rating="stars", min_rating=3)
    rated = new.append_column("stars", pa.array([float(number % 5 + 1) for number in range(new.num_rows)]))
    found = appended(base, tmp_path, rated)
    assert (found.counts["events"], found.counts["left_out"]) == (54, 36)


def test_what_is_no_file_of_new_events_is_refused(tmp_path: Path, shop: FeatureSpec) -> None:
    new, out = shop_events()[1], tmp_path / "grown"
    with pytest.raises(DataError, match=r"(?s)no column 'item_id'.*no column 'timestamp', the time"):
        appended(shop, tmp_path, new.select(["user_id", "kind"]))
    with pytest.raises(DataError, match=r"time.csv: no column 'timestamp', the time; found 'user_id', 'item_id'$"):
        appended(shop, tmp_path, new.select(["user_id", "item_id"]), name="time")
    with pytest.raises(DataError, match=r"empty.csv: holds no row$"):
        appended(shop, tmp_path, new.slice(0, 0), name="empty")
    with pytest.raises(DataError, match="no such file; expected events in a file of CSV, JSON lines or Parquet"):
        append_events(shop, tmp_path / "nothing.csv", out)
    with pytest.raises(DataError, match="data: is a folder; expected events in a file of CSV"):
        append_events(shop, shop.folder, out)


def test_events_that_are_all_known_are_no_new_ones(tmp_path: Path) -> None:
    known, _ = shop_events()
    base = prepared(tmp_path / "base", known, repeats="first")
    with pytest.raises(DataError, match="holds no new event: each of its 599 rows repeats a known one"):
        appended(base, tmp_path, known.slice(1))


def test_a_copy_of_a_known_event_is_no_new_one(tmp_path: Path) -> None:
    head, other = "user_id,item_id,timestamp\n", "".join(f"u2,j{place},{1_700_000_000 + place}\n" for place in range(5))
    rows = [f"u1,i{place},{1_700_000_000 + place}\n" for place in range(5)]
    base = prepare_text(tmp_path, head + other + "".join(rows[:4]), out="base")
    (tmp_path / "new.csv").write_text(head + rows[3] + rows[4] * 2)  # one that is known, a new one and its copy
    found = append_events(base.spec, tmp_path / "new.csv", tmp_path / "grown").spec
    whole = prepare_table(tmp_path / "b.csv", tmp_path / "whole", head + other + "".join(rows)).spec
    for split in ("train", "valid", "test"):
        assert sorted(map(str, raw_pairs(found, split))) == sorted(map(str, raw_pairs(whole, split)))


def test_declared_types_hold_for_new_events_too(tmp_path: Path) -> None:
    """Times of Berlin, day before month, stay so; another format is refused."""
    rows = [(f"u{user}", f"p{(user + step) % 5}", f"{1 + step:02}/11/2025") for user in range(6) for step in range(4)]
    events = pa.table(
        {name: list(column) for name, column in zip(COLUMNS_OF_EVENTS, zip(*rows, strict=True), strict=True)}
    )
    declared = {"timestamp": {"type": "time", "format": "%d/%m/%Y", "zone": "Europe/Berlin"}}
    base = prepared(tmp_path / "base", events, types=declared, item_features=())
    found = appended(base, tmp_path, changed(events.slice(0, 1), "timestamp", ["09/12/2025"])).spec
    assert max(max(np.asarray(open_split(found, split).read(0, 1 << 40)["timestamp"])) for split in found.splits) == (
        1_765_234_800  # 2025-12-08 23:00 UTC
    )
    with pytest.raises(DataError, match=r"2025-12-09.*%d/%m/%Y"):
        appended(base, tmp_path, changed(events.slice(0, 1), "timestamp", ["2025-12-09"]), name="bad")
    some = changed(events.slice(0, 2), "timestamp", ["09/12/2025", "2025-12-09"])
    with pytest.raises(DataError, match=r"2025-12-09.*correct") as raised:
        appended(base, tmp_path, some, name="some")
    assert "invalid_values" not in str(raised.value)  # nobody can set it for new events


@pytest.mark.parametrize(
    ("time", "message"),
    [
        ("99999999999999999999", r"line 2 is .*; expected a number of seconds, below 2\^63"),
        ("1600000000.5", "line 2 is .*; expected a whole number of at most 64 bits"),
        ("1710000000000", "line 2 is 1710000000000; expected seconds since 1970, as the dataset's times are, 2020-"),
        ("9999999999", "line 2 is 9999999999; expected seconds since 1970, as the dataset's times are, 2020-"),
        ("-5", "line 2 is -5; expected seconds since 1970, as the dataset's times are, 2020-"),
    ],
)
def test_a_time_that_is_none_of_the_dataset_s_is_refused(
    time: str, message: str, tmp_path: Path, shop: FeatureSpec
) -> None:
    new = shop_events()[1]
    times = [time, *map(str, new.column("timestamp").to_pylist()[1:])]
    with pytest.raises(DataError, match=f"'timestamp': {message}"):
        appended(shop, tmp_path, changed(new, "timestamp", times))
    if time == "-5":  # a file without any time offers no setting that an update lacks
        none = changed(new, "timestamp", ["foo"] * len(new))
        with pytest.raises(DataError, match=r"'foo'.*write it as the dataset's times were written") as raised:
            appended(shop, tmp_path, none, name="none")
        assert "time_format" not in str(raised.value)


def test_a_file_whose_events_are_held_already_is_refused(tmp_path: Path) -> None:
    _, new = shop_events()
    _, found = grown(tmp_path, new)
    (tmp_path / "copy.csv").write_bytes((tmp_path / "new.csv").read_bytes())
    with pytest.raises(DataError, match=r"copy.csv: the dataset .* holds the events of this file already"):
        append_events(found.spec, tmp_path / "copy.csv", tmp_path / "again")


def catalogue_of_items() -> pa.Table:
    """Items of the shop, with features of every kind and columns that are only shown."""
    names = [f"i{number:02d}" for number in range(24)]
    return pa.table(
        {
            "item_id": names,
            "name": [f"Thing {name}" for name in names],
            "sort": ["abc"[n % 3] for n in range(24)],
            "price in EUR": [n + 0.25 for n in range(24)],
            "makers": ["Ann|Bob" if n % 2 else "Cy" for n in range(24)],
            "year": [2000 + n for n in range(24)],
            "in print": [True, False] * 12,
        }
    )


def with_items_file(folder: Path, *, in_lists: bool, **settings: object) -> FeatureSpec:
    """A dataset whose items, their features and titles are in a file of their own."""
    folder.mkdir(parents=True)
    items, known = catalogue_of_items(), shop_events()[0]
    if in_lists:
        place = items.column_names.index("makers")
        items = items.set_column(place, "makers", pc.split_pattern(items.column("makers"), "|"))
    pq.write_table(items, folder / "items.parquet")
    asked = {"item_features": ["sort", "price in EUR", "makers"], "lists": ["makers"], "title": "name", **settings}
    return prepared(folder, known.drop_columns(["kind"]), items="items.parquet", **asked)


def events_that_describe(new: pa.Table, **columns: object) -> pa.Table:
    """New events that hold columns of the items' file, the same in every row."""
    new = new.drop_columns(["kind"])
    for name, value in columns.items():
        new = new.append_column(name.replace("_", " "), pa.array([value] * len(new)))
    return new


SHOWN = {"title": "New thing", "sort_text": "new", "price in EUR_text": 9.5, "year": 2026, "in print": 1}
TOLD = {"name": "New thing", "sort": "new", "price_in_EUR": "9.5", "year": "2026", "in_print": "true"}


@pytest.mark.parametrize("in_lists", [False, True])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_new_item_shows_what_the_events_say_of_it(tmp_path: Path, in_lists: bool, kind: str) -> None:
    """Filters and displays read the columns for people, beside which the features have the suffix `_text`."""
    base = with_items_file(tmp_path / "base", in_lists=in_lists)
    makers: object = ["Ann", "Dora"] if kind == "parquet" or in_lists else "Ann|Dora"
    new = events_that_describe(shop_events()[1], **TOLD, makers=makers)
    file = tmp_path / f"new.{kind}"
    if kind == "parquet":
        pq.write_table(new, file)
    elif in_lists:
        file = tmp_path / "new.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in new.to_pylist()))
    else:
        written(file, new)
    found = append_events(base, file, tmp_path / "grown")
    assert found.notes == ()
    items = pq.read_table(found.spec.folder / "items.parquet")
    assert items.schema == pq.read_table(base.folder / "items.parquet").schema
    shown = items.slice(len(items) - 1).to_pylist()[0]
    assert {name: shown[name] for name in SHOWN} == SHOWN
    assert shown["makers_text"] == (["Ann", "Dora"] if in_lists else "Ann|Dora")
    encoders = Encoders.load(found.spec.folder)
    assert encoders.vocabularies["makers"].decode(np.array(shown["makers"])).to_pylist() == ["Ann", "Dora"]
    assert shown["sort"] == len(encoders.vocabularies["sort"])


def test_a_feature_of_another_name_than_its_column_is_shown_from_its_own_column(tmp_path: Path) -> None:
    """The rows hold a column `hour` of their own, so the item's hour is the column `hour_item` of new events."""
    folder = tmp_path / "base"
    folder.mkdir()
    items = catalogue_of_items().select(["item_id"]).append_column("hour", pa.array(["early", "late"] * 12))
    pq.write_table(items, folder / "items.parquet")
    base = prepared(folder, shop_events()[0], items="items.parquet", item_features=["hour"])
    found = appended(
        base,
        tmp_path,
        events_that_describe(shop_events()[1]).append_column("hour_item", pa.array(["late"] * len(shop_events()[1]))),
    )
    assert found.notes == ()
    items = pq.read_table(found.spec.folder / "items.parquet")
    assert items.column("hour")[-1].as_py() == "late"


def test_new_items_of_which_the_file_tells_too_little_are_counted(tmp_path: Path) -> None:
    base = with_items_file(tmp_path / "base", in_lists=False)
    new = shop_events()[1]
    found = appended(base, tmp_path, events_that_describe(new), name="none")
    (note,) = found.notes
    assert note == (
        f"1 new item, such as '{NEW_ITEM}', lacks values in 'name', 'sort', 'price in EUR', 'makers', 'year', "
        "'in print': an update reads them from the new events, features from events of train alone; to give them, "
        "delete this version, add the columns to the file and update again"
    )
    others = [f"j{number}" if number < 2 else name for number, name in enumerate(new.column("item_id").to_pylist())]
    more = events_that_describe(changed(new, "item_id", others), **TOLD, makers="Ann")
    names = [None, "J 1", *(["New thing"] * (len(more) - 2))]
    found = appended(base, tmp_path, changed(more, "name", names), name="some")
    (note,) = found.notes
    # The events of j1 are held out, so it has the columns that are shown and no features.
    assert note.startswith("2 of 3 new items, such as 'j0', lack values in 'name', 'sort', 'price in EUR', 'makers': ")


DAYS = {"%d.%m.%Y": "{0:02}.11.2025", "%m/%d/%Y": "11/{0:02}/2025"}


@pytest.mark.parametrize("form", DAYS)
def test_times_that_were_read_by_a_format_found_in_them_are_read_by_it_again(form: str, tmp_path: Path) -> None:
    """A file whose few times fit several formats has the dataset's, and a message names it."""
    rows = [
        (f"u{user}", f"p{(user + step) % 5}", DAYS[form].format(11 + step + user))
        for user in range(6)
        for step in range(4)
    ]
    events = pa.table({name: list(each) for name, each in zip(COLUMNS_OF_EVENTS, zip(*rows, strict=True), strict=True)})
    base = prepared(tmp_path / "base", events, item_features=())
    assert GrowthRules.load(base).found_time_format == form
    later = changed(events.slice(0, 1), "timestamp", [DAYS[form].format(12).replace("2025", "2026")])
    found = appended(base, tmp_path, later).spec
    assert max(max(np.asarray(open_split(found, split).read(0, 1 << 40)["timestamp"])) for split in found.splits) == (
        1_794_441_600  # 2026-11-12
    )
    bad = changed(events.slice(0, 1), "timestamp", ["01-02-2025"])
    expected = rf"write it as the dataset's times were written: {form}, such as {example(form)}"
    with pytest.raises(DataError, match=expected):
        appended(base, tmp_path, bad, name="bad")


def test_rows_that_were_there_come_first_in_each_split(tmp_path: Path) -> None:
    """So that training can go on from the new ones."""
    _, new = shop_events()
    base, found = grown(tmp_path, new)
    for split in found.spec.splits:
        names, last = ["user_id", "item_id", "timestamp", "label"], found.first_new[split]
        held, rows = (open_split(each, split, names).read(0, 1 << 40) for each in (base, found.spec))
        before = set(zip(*(np.asarray(held[name]).tolist() for name in names), strict=True))
        now = list(zip(*(np.asarray(rows[name]).tolist() for name in names), strict=True))
        positive = [row for row in now if row[-1] > 0]
        assert {row for row in now[:last] if row[-1] > 0} == before & set(positive)
        assert not before & {row for row in now[last:] if row[-1] > 0}
    assert found.touched.tolist() == sorted(
        Encoders.load(found.spec.folder).vocabularies["user_id"].encode(pc.unique(new.column("user_id"))).tolist()
    )


def test_trained_events_that_late_ones_push_into_test_are_counted(tmp_path: Path) -> None:
    known, new = shop_events()
    base = prepared(tmp_path / "base", known, split="time")
    times = np.asarray(known.column("timestamp")).min() - 1 - np.arange(len(new))
    found = appended(base, tmp_path, changed(new, "timestamp", times))
    (note,) = (each for each in found.notes if "held out now" in each)
    assert note == (
        "18 events that the model has trained on are held out now, because late events moved the splits: the figures "
        "of this version are too good; train anew to measure it"
    )


def test_features_that_a_file_does_not_give_stay(tmp_path: Path, shop: FeatureSpec) -> None:
    found = appended(shop, tmp_path, shop_events()[1].drop_columns(["kind"])).spec
    before, after = (pq.read_table(each.folder / "items.parquet").column("kind").to_pylist() for each in (shop, found))
    assert after == [*before, 0]


@pytest.mark.parametrize("bad", ["damaged", "link", "pipe", "link in a folder"])
def test_raw_events_are_read_from_the_dataset_alone(tmp_path: Path, bad: str) -> None:
    known, new = shop_events()
    base = prepared(tmp_path / "base", known)
    place = base.folder / EVENTS
    outside = place.rename(tmp_path / "outside.parquet")
    if bad == "damaged":
        place.write_bytes(b"PAR1")
    elif bad == "pipe":
        os.mkfifo(place)
    elif bad == "link":
        place.symlink_to(outside)
    else:
        place.mkdir()
        (place / "part-0.parquet").symlink_to(outside)
    with pytest.raises(DataError, match=r"raw/events.parquet can't be read: .*; prepare it again"):
        appended(base, tmp_path, new)


def test_damaged_rules_and_those_of_other_rows_are_refused(tmp_path: Path) -> None:
    known, new = shop_events()
    base, events = prepared(tmp_path / "base", known, train_negatives=1), written(tmp_path / "new.csv", new)
    file = base.folder / GROWTH_FILE
    rules = json.loads(file.read_text())
    settings = rules["settings"]

    def with_settings(**changed: object) -> dict[str, object]:
        return {**rules, "settings": {**settings, **changed}}

    for number, (other, message) in enumerate(
        (
            ({**rules, "format": 9}, "format 9; this recspec reads 2"),
            (with_settings(split="never"), r"growth.json: damaged.*split"),
            (with_settings(encoding="../x"), r"growth.json: damaged.*encoding '../x' is not known"),
            (
                with_settings(num_negatives=10**12),
                "growth.json: other rows than the dataset's, by 'num_negatives'; prep",
            ),
            (
                with_settings(train_negatives=10**12),
                "growth.json: other rows than the dataset's, by 'train_negatives'; ",
            ),
            (with_settings(history=6), "growth.json: other rows than the dataset's, by 'history'; prepare it again"),
            ({**rules, "events": 599}, "raw/events.parquet is damaged: expected 599 events; prepare it again"),
            (with_settings(item_features=[]), "growth.json: other features than the dataset's; prepare it again"),
        )
    ):
        file.write_text(json.dumps(other))
        with pytest.raises(DataError, match=message):
            append_events(base, events, tmp_path / f"out-{number}")
    lying = base.replace(metadata={**base.metadata, "test_samples_per_series": 10**9 + 1})
    file.write_text(json.dumps(with_settings(num_negatives=10**9)))
    with pytest.raises(DataError, match=r"growth.json: other rows than the dataset's, by 'num_negatives'; prepare"):
        append_events(lying, events, tmp_path / "out-0")
    file.unlink()
    with pytest.raises(DataError, match=r"takes no new events: it has no growth.json, which `recspec prepare` writes"):
        append_events(base, events, tmp_path / "out-0")


TEXTS = ("", "..", "../../etc/passwd", "/dev/zero", "a\0b", "\ud800", "x" * 5000, "__row__", "'; DROP TABLE x; --")
HOSTILE: Sequence[object] = (None, True, -1, 2**64, 10**400, 1e308, [], [[]], [["a"]], {}, {"train": ["../x"]}, *TEXTS)


@pytest.mark.parametrize("name", ["format", "dataset", "found_time_format", "dated", "copies", "events", "settings"])
def test_rules_with_any_value_are_taken_or_refused_as_an_error_of_the_data(
    name: str, tmp_path: Path, shop: FeatureSpec
) -> None:
    rules = json.loads((shop.folder / GROWTH_FILE).read_text())
    base = shop.replace(folder=tmp_path)
    names = [*table.Settings.model_fields] if name == "settings" else [name]
    for place, each in enumerate(names):
        for value in HOSTILE if name != "settings" else (HOSTILE[place % len(HOSTILE)], HOSTILE[(7 * place) % 19]):
            part = {each: value} if name != "settings" else {"settings": {**rules["settings"], each: value}}
            (tmp_path / GROWTH_FILE).write_text(json.dumps({**rules, **part}))
            with suppress(DataError):
                GrowthRules.load(base)


COLUMNS_OF_STRANGERS = {
    "__row__": ([None], ["x"], [7], [-1], [True], [[1]]),
    "__split_before__": ([7], ["never"], [["train"]]),
    "__seen__": ([1], ["x"]),
    "__weight__": ([{"a": 1}], ["x"]),
    "__split__": ([float("inf")],),
    "timestamp": ([None], ["soon"]),
}


@pytest.mark.parametrize("name", COLUMNS_OF_STRANGERS)
def test_raw_events_with_strange_columns_are_refused_in_one_message(
    name: str, tmp_path: Path, shop: FeatureSpec
) -> None:
    shutil.copytree(shop.folder, tmp_path / "data")
    file, new = tmp_path / "data" / EVENTS, written(tmp_path / "new.csv", shop_events()[1])
    held, base = pq.read_table(file), FeatureSpec.load(tmp_path / "data")
    others = held.drop_columns([name]) if name in held.column_names else held
    changed = [others.append_column(name, pa.array(values * len(held))) for values in COLUMNS_OF_STRANGERS[name]]
    for place, each in enumerate([*changed, *([others] if others is not held else [])]):
        pq.write_table(each, file)
        with pytest.raises(DataError, match=f"raw/events.parquet .*(?s:.)*'{name}'"):
            append_events(base, new, tmp_path / f"out-{place}")
        assert not (tmp_path / f"out-{place}" / "feature_spec.yaml").exists()


@pytest.mark.parametrize("cut", ["half", "pages"])
def test_truncated_raw_events_are_refused(cut: str, tmp_path: Path, shop: FeatureSpec) -> None:
    shutil.copytree(shop.folder, tmp_path / "data")
    file = tmp_path / "data" / EVENTS
    held = file.read_bytes()
    file.write_bytes(held[: len(held) // 2] if cut == "half" else held[:4] + b"\xff" * 400 + held[404:])
    with pytest.raises(DataError, match=r"raw/events.parquet can't be read: .*; prepare it again"):
        appended(FeatureSpec.load(tmp_path / "data"), tmp_path, shop_events()[1])


def test_a_dataset_that_takes_no_events_says_why(tmp_path: Path) -> None:
    lines = "".join(f"u{user},i{item:02d}\n" for user in range(20) for item in range(6))
    made = prepare_text(tmp_path, "user_id,item_id\n" + lines, out="drawn").spec
    ncf = run(CASES["ncf"], write_ncf(tmp_path / "raw"), tmp_path / "ncf").spec
    users = prepare_text(tmp_path, out="users", split="users", heldout_users=2, num_negatives=0).spec
    (tmp_path / "new.csv").write_text("user_id,item_id\nu1,i09\n")
    for base, why in (
        (
            users,
            "users: takes no new events: its users are divided by a draw .*; to update a model, prepare the events",
        ),
        (
            made,
            "drawn: takes no new events: its file is sorted by item and has no times, .*; prepare a file with times",
        ),
        (ncf, "ncf: takes no new events: its test candidates are listed .* by `recspec prepare table`"),
    ):
        with pytest.raises(DataError, match=why):
            append_events(base, tmp_path / "new.csv", tmp_path / "out")


def test_rows_that_are_left_out_of_the_file_are_told(tmp_path: Path) -> None:
    known, new = shop_events()
    declared = {"hour": {"type": "number", "invalid": "drop"}}
    base = prepared(tmp_path / "base", known, types=declared, context_features=["hour"])
    hours = ["late", *map(str, new.column("hour").to_pylist()[1:])]
    found = appended(base, tmp_path, changed(new, "hour", hours))
    assert [note for note in found.notes if note.startswith("1 row of new.csv, by invalid values: column 'hour': line")]
    assert found.counts["events"] == len(new) - 1


def test_sequences_go_on(tmp_path: Path) -> None:
    lines = [
        " ".join(["1" + str(user), *(str(200 + (user + place) % 7) for place in range(3 + user % 3))])
        for user in range(9)
    ]
    (tmp_path / "all.txt").write_text("\n".join(lines) + "\n")
    table = DATASETS["table"]
    table.prepare(PrepareContext(tmp_path / "all.txt", tmp_path / "data"), table.Settings(num_negatives=1))
    (tmp_path / "new.txt").write_text("11 300\n19 200 201 300\n77 300 301 302 303\n")
    found = append_events(FeatureSpec.load(tmp_path / "data"), tmp_path / "new.txt", tmp_path / "grown")
    assert found.counts == {"events": 8, "users": 2, "items": 4, "left_out": 0}


def test_ratings_of_movielens_go_on(tmp_path: Path) -> None:
    first, later = [row for row in RATINGS if row[3] < 300], [row for row in RATINGS if row[3] >= 300]
    base = prepare_movielens(write_latest(tmp_path / "raw", first), tmp_path / "part").spec
    new = "".join(f"{user},{movie},{stars},{time}\n" for user, movie, stars, time in [*later, (5, 10, 4.0, 900)])
    (tmp_path / "new.csv").write_text(f"user_id,movieId,rating,timestamp\n{new}")
    grown = append_events(base, tmp_path / "new.csv", tmp_path / "grown").spec
    whole = prepare_movielens(write_latest(tmp_path / "all", [*RATINGS, (5, 10, 4.0, 900)]), tmp_path / "whole").spec
    for split in whole.splits:
        assert sorted(raw_pairs(grown, split)) == sorted(raw_pairs(whole, split))
    assert pq.read_table(grown.folder / "items.parquet").column("title")[0].as_py() == "Ten, The (1990)"
    assert grown.metadata["dataset"] == "movielens"


def test_types_of_events_weigh_and_count_as_seen_in_an_update_too(tmp_path: Path) -> None:
    """A file of new events may hold some of the types alone."""
    known, new = shop_events()
    types = {"event": "type", "event_weights": {"view": 1, "buy": 3, "hide": 0}, "seen": ["buy", "hide"]}
    kinds = pa.array([("view", "buy", "hide")[number % 3] for number in range(len(known))])
    base = prepared(tmp_path / "base", known.append_column("type", kinds), **types)
    some = new.slice(0, 9).append_column("type", pa.array(["view", "hide", *["view"] * 6, "buy"]))
    found = appended(base, tmp_path, some)
    assert found.counts["events"] == 8  # all but the one of weight 0
    encoders = Encoders.load(found.spec.folder)
    pairs = {
        (user, item)
        for each in (some.slice(1, 1), some.slice(8))
        for user, item in zip(
            *(encoders.vocabularies[name].encode(each.column(name)).tolist() for name in ("user_id", "item_id")),
            strict=True,
        )
    }
    held = pq.read_table(found.spec.folder / "seen.parquet").to_pydict()
    assert pairs <= set(zip(held["user_id"], held["item_id"], strict=True))


@pytest.mark.parametrize(("name", "form"), [("user_id", "{} "), ("user_id", "{:>8}"), ("item_id", "I{0[1]}{0[2]}")])
def test_new_ids_that_are_known_ones_in_another_spelling_are_refused(name: str, form: str, tmp_path: Path) -> None:
    new = shop_events()[1]
    values = [form.format(value) for value in new.column(name).to_pylist()]
    with pytest.raises(DataError, match=r"new (user|item)s differ from a known one only .*; write the ids as the"):
        grown(tmp_path, changed(new, name, values))


def test_few_new_ids_in_another_spelling_are_noted(tmp_path: Path) -> None:
    new = shop_events()[1]
    users = new.column("user_id").to_pylist()
    _, found = grown(tmp_path, changed(new, "user_id", ["USER01", "NULL", *users[2:]]))
    assert "1 of 4 new users differ from a known one only" in str(found.notes)
    assert "1 id, in 1 row, look like missing values, and are kept as ids: 'NULL'" in str(found.notes)
