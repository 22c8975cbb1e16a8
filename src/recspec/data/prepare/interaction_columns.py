"""The interactions of a dataset, with the features, encoders and catalogues made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec.base.errors import DataError
from recspec.data.encoding import Encoders, Vocabulary, extended
from recspec.data.prepare.backend import Backend
from recspec.data.prepare.columns import Catalogue, Column, Fitted, PreparedCatalogue, fit_in_table, note_new
from recspec.data.prepare.histories import HistoryColumns, HistorySettings, UnknownTargets, prepare_history
from recspec.data.prepare.names import EVENT_WEIGHT, ITEM, LABEL, ROW, SPLIT, TIMESTAMP, USER, Notes
from recspec.data.prepare.tables import counts_by, fetch, left_join
from recspec.feature_spec import Feature, FeatureSpec

MOST_HALVINGS = 64  # or doublings, of an event after the end: 2^64 and 2^-64 are float32 numbers with room for a weight


@dataclass(frozen=True)
class Decay:
    """Halves a weight w once each `half_life` before `end`: w 2^((t - end) / half_life) at time t.

    `end` is the last time of train. A later event, of a held-out split, weighs more by the same rule.
    """

    half_life: float
    end: float

    def factors(self, times: NDArray[np.generic]) -> NDArray[np.float64]:
        """What to multiply the weights at some times by, within 2^-64 and 2^64."""
        halvings = (times.astype(np.float64) - self.end) / self.half_life
        return np.asarray(np.exp2(np.clip(halvings, -MOST_HALVINGS, MOST_HALVINGS)), np.float64)


def stored_weights(
    weights: NDArray[np.float64], times: NDArray[np.generic] | None, decay: Decay | None
) -> NDArray[np.float32]:
    """The weights as they are stored: above 0, whatever their size."""
    decayed = weights if decay is None or times is None else weights * decay.factors(times)
    return np.maximum(decayed, np.finfo(np.float32).tiny).astype(np.float32)


NUMBER = "__number__"  # column with the number of a row's user


@dataclass(frozen=True)
class Before:
    """A dataset that takes new events: its ids, scales and lists stay."""

    spec: FeatureSpec
    encoders: Encoders
    dated: bool  # whether its times are seconds since 1970
    first_new: dict[str, int] = field(default_factory=dict)
    """Split -> number of its first row that it did not hold before; writing fills it."""
    notes: list[str] = field(default_factory=list)  # on new users and items; writing adds to them


def stage_by_number(backend: Backend, rows: Table, everyone: Vocabulary, order: Sequence[str], folder: Path) -> Table:
    """Rows sorted by the number of their user, so that the users of a dataset before keep their order."""
    file = folder / "work" / "numbers.parquet"
    pq.write_table(pa.table({USER: everyone.values}), file)
    numbers = backend.read_parquet([file], row=True)
    numbered = left_join(rows, numbers.select(USER, **{NUMBER: numbers[ROW]}), USER)
    return backend.stage_by(numbered, NUMBER, order)


@dataclass(frozen=True)
class Source:
    """Interactions with their split, and everything known about users and items."""

    dataset: str
    rows: Table  # columns user_id, item_id, timestamp, row and split, event_weight if `weighted`, those of `context`
    order: Sequence[str] = (TIMESTAMP, ROW)  # columns that sort a user's rows by time
    users: Catalogue | None = None
    items: Catalogue | None = None
    context: Sequence[Column] = ()
    raw_names: Mapping[str, str] = field(default_factory=dict)  # raw columns of the ids, if their names differ
    candidates: pa.Table | None = None  # of test: columns user_id and negatives (lists of raw item ids); drawn if None
    vocabularies: Literal["all", "train"] = "all"
    """Rows whose users and items get an id; with `train`, a user may have several rows in valid and test."""
    unknown_targets: UnknownTargets = "drop"  # in valid and test, rows with an unknown item; unknown users stay as id 0
    unseen_items: bool = False  # whether items that only the catalogue describes get an id too
    timed: bool = True  # whether `timestamp` holds times and not only an order
    weighted: bool = False  # whether events have weights, above 0
    decay: Decay | None = None  # of the weights with age
    seen: Table | None = None
    """Every event of the users, also those that `rows` lack: columns user_id, item_id, split; None: those of `rows`."""
    missing_values: Sequence[str] = ()  # raw texts for a missing value; `rows` contain none, rows to predict may
    missing_by_column: Mapping[str, Sequence[str]] = field(default_factory=dict)  # the same, of raw columns by name
    summary: Callable[[int], Mapping[str, object]] = lambda _: {}
    """The dataset's own counts, given the number of kept interactions; it may add to `notes`."""
    holds_out: bool = True  # whether rows were meant for valid and test
    notes: Notes = field(default_factory=Notes)  # of the dataset; writing adds to them
    before: Before | None = None  # the dataset that takes these rows, which then hold `SPLIT_BEFORE`


@dataclass(frozen=True)
class InteractionColumns:
    """Features, encoders and catalogues of all rows."""

    fitted: Fitted
    users: PreparedCatalogue
    items: PreparedCatalogue
    context: Sequence[Column]
    everyone: Vocabulary  # all users, known or not; it numbers users while splits are written
    user_ids: NDArray[np.int64]  # the id of each number of `everyone`
    item_counts: NDArray[np.int64]  # interactions of each item, for ids from 1, in the rows of the vocabulary
    train_counts: NDArray[np.int64]  # likewise in train
    history: HistoryColumns | None

    def vocabulary(self, name: str) -> Vocabulary:
        return self.fitted.encoders.vocabularies[name]


def prepare_columns(
    backend: Backend, rows: Table, source: Source, settings: HistorySettings, dated: bool
) -> InteractionColumns:
    """Fit the features of interactions; `dated` timestamps count seconds since 1970."""
    before, notes = source.before, source.notes
    fitted = Fitted(
        missing_values=source.missing_values,
        missing_by_column=source.missing_by_column,
        before=before.encoders if before else None,
    )
    train = rows.filter(rows[SPLIT] == "train")
    known, unseen = (rows, "occur in no row") if source.vocabularies == "all" else (train, "occur in no train row")
    counted = fetch(backend, counts_by(known, ITEM))
    named = counted.column(ITEM)
    if source.candidates is not None:
        listed = pc.unique(pc.list_flatten(source.candidates.column("negatives")))
        named = pa.chunked_array([*named.chunks, listed.cast(named.type)])
    if source.unseen_items and source.items is not None:
        named = _with_unseen(named, source.items, notes)
    fitted.add_id(USER, Vocabulary.of(_values(backend, known, USER)), source.raw_names.get(USER))
    fitted.add_id(ITEM, Vocabulary.of(named), source.raw_names.get(ITEM))
    users, items = (fitted.encoders.vocabularies[name] for name in (USER, ITEM))
    item_counts = _counts_by_id(items, counted)
    train_counts = item_counts if known is train else _counts_by_id(items, fetch(backend, counts_by(train, ITEM)))
    everyone = users
    if known is not rows:
        everyone = Vocabulary.of(_values(backend, rows, USER))
        everyone = extended(users, everyone) if before else everyone
    of_users = fitted.add_catalogue("user", USER, source.users, notes=notes, unseen=unseen)
    of_items = fitted.add_catalogue(
        "item", ITEM, source.items, notes=notes, unseen=unseen, name_missing=settings.history is not None
    )
    for role, key, given in (("user", USER, source.users), ("item", ITEM, source.items)):
        if before is not None and given is not None:
            before.notes.extend(note_new(role, key, given, before.encoders, fitted.encoders))
    for column in source.context:
        fitted.add(column.name, *fit_in_table(backend, train, fitted.fixed(column)))
    raw_item = source.raw_names.get(ITEM, ITEM)
    lists = before.spec.role("history") if before else None
    dated = before.dated if before else dated
    history = prepare_history(fitted, of_items, settings, raw_item, timed=source.timed, dated=dated, lists=lists)
    fitted.features[LABEL] = Feature(dtype="float32")
    fitted.features[TIMESTAMP] = Feature(dtype="float64" if rows[TIMESTAMP].type().is_floating() else "int64")
    if source.weighted:
        fitted.features[EVENT_WEIGHT] = Feature(dtype="float32")
    user_ids = np.append(0, np.arange(1, len(users) + 1) if everyone is users else users.encode(everyone.values))
    return InteractionColumns(
        fitted, of_users, of_items, source.context, everyone, user_ids, item_counts, train_counts, history
    )


def _with_unseen(named: pa.ChunkedArray, catalogue: Catalogue, notes: Notes) -> pa.ChunkedArray:
    """The named items and those that only the catalogue describes, which are counted."""
    keys = catalogue.table.column(catalogue.key)
    try:
        described = pc.drop_null(pc.unique(keys.cast(named.type)))
    except pa.ArrowInvalid as error:
        raise DataError(f"{catalogue.file}: column '{catalogue.key}' holds ids unlike the rows': {error}") from None
    unseen = described.filter(pc.invert(pc.is_in(described, value_set=pc.unique(named))))
    if len(unseen) == len(described):  # the file describes none of the rows' items, which is refused later
        return named
    if len(unseen):
        notes.changed.append(
            f"{len(unseen):,} of {len(described):,} items in {catalogue.file} have no interaction, such as "
            f"'{unseen[0].as_py()}'; they are kept for models that score items from their features"
        )
    return pa.chunked_array([*named.chunks, unseen])


def _counts_by_id(items: Vocabulary, counted: pa.Table) -> NDArray[np.int64]:
    counts = np.zeros(len(items), np.int64)
    counts[items.encode(counted.column(ITEM)) - 1] = counted.column("rows").to_numpy()
    return counts


def _values(backend: Backend, rows: Table, name: str) -> pa.ChunkedArray:
    return fetch(backend, counts_by(rows, name)).column(name)
