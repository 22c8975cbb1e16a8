"""The interactions of a dataset, with the features, encoders and catalogues made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec.encoding import NumberEncoder, Vocabulary, VocabularyEncoder
from recspec.errors import DataError
from recspec.prepare.backend import Backend
from recspec.prepare.columns import Catalogue, Column, Fitted, PreparedCatalogue, fit_in_table
from recspec.prepare.histories import SECONDS_A_DAY, HistorySettings, UnknownTargets
from recspec.prepare.names import GAP, HISTORY, ITEM, LABEL, NEGATIVE_HISTORY, ROW, SPLIT, TIMESTAMP, USER
from recspec.prepare.notes import Notes
from recspec.prepare.tables import counts_by, fetch
from recspec.spec import Feature


@dataclass(frozen=True)
class Source:
    """Interactions with their split, and everything known about users and items."""

    dataset: str
    rows: Table  # columns user_id, item_id, timestamp, row and split, and those of `context`
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
    missing_values: Sequence[str] = ()  # raw texts for a missing value; `rows` contain none, rows to predict may
    summary: Callable[[int], Mapping[str, object]] = lambda _: {}
    """The dataset's own counts, given the number of kept interactions; it may add to `notes`."""
    notes: Notes = field(default_factory=Notes)  # of the dataset; writing adds to them


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


@dataclass(frozen=True)
class HistoryColumns:
    """The lists of a row's history."""

    length: int
    columns: Mapping[str, NDArray[np.generic]]  # scalar ids by item id (I + 1,): the item's own, its category, ...
    channels: Mapping[str, Sequence[str]]  # names of the lists
    left_out: Sequence[str]  # features without a list, because some item has no value, which would look like padding
    unit: float | None  # of the time gaps, in units of the timestamp; None without gaps


def prepare_columns(
    backend: Backend, rows: Table, source: Source, settings: HistorySettings, dated: bool
) -> InteractionColumns:
    """Fit the features of interactions; `dated` timestamps count seconds since 1970."""
    fitted, notes = Fitted(missing_values=source.missing_values), source.notes
    train = rows.filter(rows[SPLIT] == "train")
    known, unseen = (rows, "occur in no row") if source.vocabularies == "all" else (train, "occur in no train row")
    counted = fetch(backend, counts_by(known, ITEM))
    named = counted.column(ITEM)
    if source.candidates is not None:
        listed = pc.unique(pc.list_flatten(source.candidates.column("negatives")))
        named = pa.chunked_array([*named.chunks, listed.cast(named.type)])
    if source.unseen_items and source.items is not None:
        named = _with_unseen(named, source.items, notes)
    items = Vocabulary.of(named)
    users = Vocabulary.of(_values(backend, known, USER))
    fitted.add_id(USER, users, source.raw_names.get(USER))
    fitted.add_id(ITEM, items, source.raw_names.get(ITEM))
    item_counts = _counts_by_id(items, counted)
    train_counts = item_counts if known is train else _counts_by_id(items, fetch(backend, counts_by(train, ITEM)))
    everyone = users if known is rows else Vocabulary.of(_values(backend, rows, USER))
    of_users = fitted.add_catalogue("user", USER, source.users, notes=notes, unseen=unseen)
    of_items = fitted.add_catalogue(
        "item", ITEM, source.items, notes=notes, unseen=unseen, name_missing=settings.history is not None
    )
    for column in source.context:
        fitted.add(column.name, *fit_in_table(backend, train, column))
    history = _prepare_history(fitted, of_items, source, settings, dated)
    fitted.features[LABEL] = Feature(dtype="float32")
    fitted.features[TIMESTAMP] = Feature(dtype="float64" if rows[TIMESTAMP].type().is_floating() else "int64")
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


def _prepare_history(
    fitted: Fitted, items: PreparedCatalogue, source: Source, settings: HistorySettings, dated: bool
) -> HistoryColumns | None:
    """The columns of the lists; their features and encoders go to `fitted`."""
    length = settings.history
    if length is None:
        return None
    columns: dict[str, NDArray[np.generic]] = {ITEM: np.arange(items.count + 1, dtype=np.int32)}
    for name, column in items.columns.items():
        if isinstance(column, np.ndarray) and fitted.features[name].is_categorical:
            columns[name] = np.append(column.dtype.type(0), column)
    left_out = [name for name, column in columns.items() if (column[1:] == 0).any()]
    kept = {name: column for name, column in columns.items() if name not in left_out}
    prefixes = (HISTORY, NEGATIVE_HISTORY) if settings.negative_history else (HISTORY,)
    channels = {prefix: [f"{prefix}_{name}" for name in kept] for prefix in prefixes}
    if taken := [name for name in (*chain(*channels.values()), GAP) if name in fitted.features]:
        end = "has a name that histories need; rename its column"
        raise DataError.of("rows", [f"feature '{name}' {end}" for name in taken])
    for prefix in prefixes:
        for name in kept:
            of = {"vocabulary": name, "length": length, "padding": 0}
            fitted.features[f"{prefix}_{name}"] = fitted.features[name].model_copy(update=of)
    raw = source.raw_names.get(ITEM, ITEM)
    encoder = VocabularyEncoder(column=f"{HISTORY}_{raw}" if raw != ITEM else None, vocabulary=ITEM, separator="|",
                                length=length, keep="last")  # fmt: skip
    fitted.add_encoder(f"{HISTORY}_{ITEM}", encoder)
    if not (settings.gaps and source.timed):
        return HistoryColumns(length, kept, channels, left_out, None)
    channels[HISTORY].append(GAP)
    fitted.features[GAP] = Feature(dtype="float32", length=length)
    fitted.add_encoder(GAP, NumberEncoder(log1p=True, separator="|", length=length, keep="last"))
    return HistoryColumns(length, kept, channels, left_out, SECONDS_A_DAY if dated else 1)


def _values(backend: Backend, rows: Table, name: str) -> pa.ChunkedArray:
    return fetch(backend, counts_by(rows, name)).column(name)
