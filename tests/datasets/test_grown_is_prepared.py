"""Preparing all events at once and preparing a part that then grows give the same rows, splits and features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ibis
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError
from recspec.data.encoding import Encoders, ScaleEncoder
from recspec.data.prepare import SPLIT_BEFORE, Before, PrepareContext
from recspec.data.storage import Ragged, check, open_split
from recspec.datasets import DATASETS, append_events, table
from recspec.feature_spec import SIGNALS, FeatureSpec

Rows = list[tuple[object, ...]]
USERS, ITEMS, NUM_EVENTS = 14, 9, 110
HISTORIES = {"history": 4, "negative_history": True, "train_negatives": 2, "negatives": "popularity"}
TARGET = {"event": "sort", "target": ["m1"], "event_weights": {"m0": 1, "m1": 3}}
LABELLED = {"label": "clicked", "numeric": ["price", "hour"], "seed": 2}  # other numbers end at those of the first part
FEATURES = {"user_features": ["town"], "item_features": ["kind", "price", "maker"], "context_features": ["hour"]}


@dataclass(frozen=True)
class Kind:
    """A way to prepare events, and what of them comes first."""

    settings: Mapping[str, object] = field(default_factory=dict)
    late: bool = False  # whether new events are of any time, and not the newest
    timed: bool = True


KINDS = {
    "leave-one-out": Kind({**FEATURES, **HISTORIES}),
    "leave-one-out-late": Kind({**FEATURES, **HISTORIES}, late=True),
    "once": Kind({"repeats": "first", "item_features": ["kind"], "history": 3}, late=True),
    "last": Kind({"repeats": "last", "min_interactions": 3}, late=True),
    "weighted": Kind({"repeats": "sum", "weight": "stars", "half_life": None}, late=True),
    "decayed": Kind({"half_life": "2d", "weight": "stars", "rating": None}),
    "rated": Kind({"rating": "stars", "min_rating": 3, "train_negatives": 1}, late=True),
    "time": Kind({**FEATURES, **HISTORIES, "split": "time"}),
    "time-late": Kind({**FEATURES, "split": "time", "unknown_targets": "keep"}, late=True),
    "prefixes": Kind({"history": 4, "min_history": 1, "prefixes": 2}, late=True),
    "given": Kind({**FEATURES, **HISTORIES, "splits": "part"}, late=True),
    "given-without-valid": Kind({"splits": "half", "history": 3}, late=True),
    "given-untimed": Kind({"splits": "half", "history": 3, "timestamp": None}, timed=False),
    "untimed": Kind({"timestamp": None, **HISTORIES}, timed=False),
    "none": Kind({**FEATURES, "split": "none", "history": 4}, late=True),
    "target": Kind({**FEATURES, **HISTORIES, **TARGET, "split": "leave_one_out"}, late=True),
    "target-time": Kind({**FEATURES, **HISTORIES, **TARGET}),
    "target-given": Kind({**FEATURES, **TARGET, "splits": "half", "history": 3, "seen": ["m0"]}, late=True),
    "labelled-share": Kind(
        {
            **FEATURES,
            **LABELLED,
            "split": "share",
            "context_features": ["hour", "hash"],
            "crosses": [["kind", "hash"]],
            "hashed": {"hash": 9},
        },
        late=True,
    ),
    "labelled-time": Kind({**FEATURES, **LABELLED, "split": "time", "history": 4, "negative_history": True}),
    "labelled-late": Kind({**FEATURES, **LABELLED, "split": "share", "history": 4, "half_life": "9d"}, late=True),
    "labelled-group": Kind({**FEATURES, **LABELLED, "split": "group", "group": "user_id"}, late=True),
    "labelled-given": Kind({**FEATURES, **LABELLED, "splits": "part"}, late=True),
    "labelled-without-valid": Kind({**FEATURES, **LABELLED, "splits": "half", "timestamp": None}, timed=False),
    "labelled-without-ids": Kind(
        {
            **LABELLED,
            "user": None,
            "item": None,
            "split": "share",
            "group": "town",
            "context_features": ["kind", "price", "hour"],
        },
        late=True,
    ),
}


def made_up(seed: int) -> pa.Table:
    """Events whose features change, are missing, or are new at the end; user and item ids grow with time."""
    rng = np.random.default_rng(seed)
    places = np.arange(NUM_EVENTS)
    users = (rng.random(NUM_EVENTS) * (3 + places * (USERS - 3) / NUM_EVENTS)).astype(int)
    items = (rng.random(NUM_EVENTS) * (3 + places * (ITEMS - 3) / NUM_EVENTS)).astype(int)
    times = 1_600_000_000 + 7_200 * np.sort(rng.integers(0, 80, NUM_EVENTS))  # some at the same time
    towns = [None if rng.random() < 0.1 else f"town {(user + place // 40) % 4}" for place, user in enumerate(users)]
    return pa.table(
        {
            "user_id": [f"u{user * 7 % 16:02d}" for user in users],
            "item_id": [f"i{item * 5 % 11:02d}" for item in items],
            "timestamp": times,
            "town": towns,
            "kind": [f"k{item % 4}" for item in items],
            "price": [1.37 * item + 0.777 * (place // 30) for place, item in enumerate(items)],  # no mean is a price
            "maker": [f"m{place % 5}|m{item}" for place, item in enumerate(items)],
            "hour": times // 3600 % 24 + 0.013 * places,
            "stars": rng.integers(1, 6, NUM_EVENTS),
            "part": np.array(["train", "valid", "test"])[rng.choice(3, NUM_EVENTS, p=[0.7, 0.15, 0.15])].tolist(),
            "half": np.where(rng.random(NUM_EVENTS) < 0.8, "train", "test").tolist(),
            "clicked": rng.integers(0, 2, NUM_EVENTS),
            "sort": [f"m{place % 3 // 2}" for place in range(NUM_EVENTS)],
            "hash": [f"h{place % 4}" for place in range(NUM_EVENTS)],
        }
    )


def in_two(events: pa.Table, kind: Kind, seed: int) -> tuple[pa.Table, pa.Table]:
    """The part that is prepared, and the rest; every split has a row in the first."""
    rng = np.random.default_rng(seed + 100)
    new = rng.random(NUM_EVENTS) < 0.3 if kind.late else np.arange(NUM_EVENTS) >= 80
    return events.filter(pa.array(~new)), events.filter(pa.array(new))


def prepared(folder: Path, events: pa.Table, settings: Mapping[str, object]) -> FeatureSpec:
    folder.mkdir(parents=True)
    pa_csv.write_csv(events, folder / "rows.csv")
    lists = {"lists": ["maker"]} if "maker" in settings.get("item_features", ()) else {}  # type: ignore[operator]
    drawn = {} if "label" in settings else {"num_negatives": 2, "label": None}
    asked = table.Settings(**{**drawn, **lists, **settings})  # type: ignore[arg-type]
    DATASETS["table"].prepare(PrepareContext(folder / "rows.csv", folder / "data", threads=1), asked)
    return FeatureSpec.load(folder / "data")


def raw_rows(spec: FeatureSpec, split: str, *, negatives: bool = False) -> Rows:
    """The rows of a split, sorted, with raw values in place of ids; drawn negatives only if `negatives`."""
    if split not in spec.splits:
        return []
    encoders, columns = Encoders.load(spec.folder), open_split(spec, split).read(0, 1 << 40)
    is_drawn = not negatives and "test_samples_per_series" in spec.metadata
    kept = np.flatnonzero(np.asarray(columns["label"]) >= (1 if is_drawn else 0))
    drawn = () if negatives else spec.role("negative_history")
    names = [name for name in columns if name not in ("series", "group", *drawn)]
    found = [decoded(encoders, spec, name, columns[name]) for name in names]
    return sorted((tuple(column[row] for column in found) for row in kept.tolist()), key=str)


def decoded(encoders: Encoders, spec: FeatureSpec, name: str, column: Any) -> list[object]:
    space = encoders.vocabularies.get(spec.vocabulary(name)) if spec.features[name].is_categorical else None
    if isinstance(scale := encoders.encoders.get(name), ScaleEncoder):  # scales stay those of the first part
        numbers = np.round(np.asarray(column, np.float64) * scale.std + scale.mean, 3).tolist()
        return [value if given else None for value, given in zip(numbers, np.asarray(column) != 0, strict=True)]
    if isinstance(column, Ragged):
        rows = column.tolist()
        return [tuple(space.decode(np.array(row, np.int64)).to_pylist() if space else np.round(row, 3)) for row in rows]
    return list(space.decode(column).to_pylist() if space else np.round(np.asarray(column, np.float64), 3).tolist())


def catalogue(spec: FeatureSpec, role: str) -> dict[object, tuple[object, ...]]:
    """The raw values of each user or item."""
    encoders, held = Encoders.load(spec.folder), pq.read_table(spec.folder / f"{role}s.parquet")
    found = []
    for name in held.column_names:
        column = held.column(name)
        if pa.types.is_list(column.type):
            column = Ragged.of(column.to_pylist(), np.float64 if pa.types.is_floating(column.type.value_type) else int)
        found.append(decoded(encoders, spec, name, column) if name in spec.features else column.to_pylist())
    return {row[0]: row[1:] for row in zip(*found, strict=True)}


def same(one: FeatureSpec, two: FeatureSpec, *, negatives: bool = False) -> None:
    """Row for row, split for split, feature for feature."""
    for name, known in Encoders.load(one.folder).vocabularies.items():
        other = Encoders.load(two.folder).vocabularies[name]
        assert set(known.values.to_pylist()) >= set(other.values.to_pylist())  # a value that is gone keeps its id
    for split in ("train", "valid", "test", *SIGNALS):
        assert raw_rows(one, split, negatives=negatives) == raw_rows(two, split, negatives=negatives), split
    for role in one.metadata["catalogues"]:  # type: ignore[attr-defined]
        assert catalogue(one, role) == catalogue(two, role)


QUICK = ("leave-one-out-late", "time", "target", "target-time", "given", "weighted", "labelled-share", "labelled-time")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
def test_growing_a_part_gives_what_preparing_all_gives(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    known, new = in_two(made_up(len(name)), kind, len(name))
    base = prepared(tmp_path / "part", known, kind.settings)
    pa_csv.write_csv(new, tmp_path / "new.csv")
    grown = append_events(base, tmp_path / "new.csv", tmp_path / "grown")
    check.check(grown.spec)
    everything = pa.concat_tables([known, new])
    whole = prepared(tmp_path / "whole", everything, kind.settings)
    same(grown.spec, whole)
    if "train_negatives" not in kind.settings:
        return

    def with_known_ids(folder: Path, tables: Any, plan: Any, progress: Any, **more: Any) -> FeatureSpec:
        rows = tables.rows.mutate(**{SPLIT_BEFORE: ibis.null("string")})
        before = Before(grown.spec, Encoders.load(grown.spec.folder), kind.timed)
        return write(folder, replace(tables, rows=rows), plan, progress, before=before, **more)

    write = table.write_interactions
    monkeypatch.setattr(table, "write_interactions", with_known_ids)
    same(grown.spec, prepared(tmp_path / "same ids", everything, kind.settings), negatives=True)


def test_a_copy_of_a_labelled_row_goes_to_the_split_of_the_row_in_an_update_too(tmp_path: Path) -> None:
    """A split by share keeps rows of equal features together, also by a column that no feature is made of."""
    events = made_up(5).append_column("page", pa.array([f"p{place}" for place in range(NUM_EVENTS)]))
    events = pa.concat_tables([events, events.slice(0, 9)])  # nine copies show that rows of equal features are copies
    settings = {**LABELLED, "split": "share", "valid": 0.3, "test": 0.3, "context_features": ["kind", "price", "hour"]}
    base, again = prepared(tmp_path / "base", events, settings), events.slice(9, 60)
    other = again.set_column(again.column_names.index("page"), "page", pa.array([f"q{place}" for place in range(60)]))
    pa_csv.write_csv(pa.concat_tables([again, other]), tmp_path / "new.csv")
    grown = append_events(base, tmp_path / "new.csv", tmp_path / "grown").spec
    held = (
        pq.read_table(grown.folder / "raw" / "events.parquet").sort_by("__row__").column("__split_before__").to_pylist()
    )
    first = len(events)
    assert held[first : first + 60] == held[9:69]
    assert held[first + 60 :] != held[9:69]


def test_labels_of_new_rows_are_read_as_the_known_ones(tmp_path: Path) -> None:
    """A file may hold one of the words alone, and no user or item may be new."""
    words = made_up(6)
    place = words.column_names.index("clicked")
    said = pa.array([["no", "yes"][value] for value in words.column("clicked").to_pylist()])
    words = words.set_column(place, "clicked", said)
    base = prepared(tmp_path / "base", words, {**LABELLED, **FEATURES, "positive": ["yes"], "split": "share"})
    new = words.filter(pc.equal(words.column("clicked"), "no")).slice(0, 20)
    pa_csv.write_csv(new, tmp_path / "new.csv")
    grown = append_events(base, tmp_path / "new.csv", tmp_path / "grown")
    assert grown.counts == {"events": 20, "users": 0, "items": 0, "left_out": 0}
    for split in base.splits:
        columns = open_split(grown.spec, split, ["label"]).read(grown.first_new[split], 1 << 40)
        assert not np.asarray(columns["label"]).any()
    pa_csv.write_csv(new.drop_columns(["clicked"]), tmp_path / "bad.csv")
    with pytest.raises(DataError, match="no column 'clicked', the label"):
        append_events(base, tmp_path / "bad.csv", tmp_path / "grown")


def test_a_new_item_of_labelled_rows_has_what_the_rows_say_of_it(tmp_path: Path) -> None:
    """Its features are in the rows and in the catalogue."""
    events = made_up(7)
    names = sorted(set(events.column("item_id").to_pylist()))
    colours = [("red", "blue")[place % 2] for place in range(len(names))]
    pq.write_table(pa.table({"item_id": names, "colour": colours}), tmp_path / "items.parquet")
    settings = {
        **LABELLED,
        "items": str(tmp_path / "items.parquet"),
        "item_features": ["colour"],
        "split": "share",
        "context_features": ["price", "hour"],
    }
    base = prepared(tmp_path / "data", events, settings)
    new = events.slice(0, 30)
    new = new.set_column(new.column_names.index("item_id"), "item_id", pa.array(["new"] * 30))
    pa_csv.write_csv(new.append_column("colour", pa.array(["green"] * 30)), tmp_path / "new.csv")
    grown = append_events(base, tmp_path / "new.csv", tmp_path / "grown")
    assert grown.notes == ()
    assert catalogue(grown.spec, "item")["new"][0] == "green"
    encoders, columns = (
        Encoders.load(tmp_path / "grown"),
        open_split(grown.spec, "train").read(grown.first_new["train"], 99),
    )
    assert set(decoded(encoders, grown.spec, "colour", columns["colour"])) == {"green"}
