"""The features, encoders and catalogues of a dataset of interactions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec.encoding import NumberEncoder, Vocabulary, VocabularyEncoder
from recspec.errors import DataError
from recspec.prepare.backend import Backend
from recspec.prepare.columns import Column, Fitted, PreparedCatalogue, fit_in_table
from recspec.prepare.histories import SECONDS_A_DAY, Histories
from recspec.prepare.interaction_source import Source
from recspec.prepare.names import GAP, HISTORY, ITEM, LABEL, NEGATIVE_HISTORY, SPLIT, TIMESTAMP, USER
from recspec.prepare.tables import counts_by, fetch
from recspec.spec import Feature


@dataclass(frozen=True)
class InteractionColumns:
    """Features, encoders and catalogues of all rows."""

    fitted: Fitted
    users: PreparedCatalogue
    items: PreparedCatalogue
    context: Sequence[Column]
    everyone: Vocabulary
    """All users, known or not; it numbers users while splits are written."""
    user_ids: NDArray[np.int64]
    """The id of each number of `everyone`."""
    item_counts: NDArray[np.int64]
    """Interactions of each item in the rows that the vocabulary is made from, for ids from 1."""
    train_counts: NDArray[np.int64]
    """Interactions of each item in train."""
    history: HistoryColumns | None = None

    @property
    def features(self) -> Mapping[str, Feature]:
        return self.fitted.features

    def vocabulary(self, name: str) -> Vocabulary:
        return self.fitted.encoders.vocabularies[name]


@dataclass(frozen=True)
class HistoryColumns:
    """The lists of a row's history."""

    asked: Histories
    columns: Mapping[str, NDArray[np.generic]]
    """The item's scalar ids by item id (I + 1,): the item's own id, its category, ..."""
    channels: Mapping[str, Sequence[str]]
    """Names of the lists, by channel."""
    left_out: Sequence[str]
    """Features without a list, because some item has no value, which would look like padding."""
    unit: float | None
    """Unit of the time gaps, in units of the timestamp; None without gaps."""


def prepare_columns(
    backend: Backend, rows: Table, source: Source, histories: Histories | None, dated: bool
) -> InteractionColumns:
    """Fit the features of interactions.

    Args:
        dated: Whether timestamps count seconds since 1970.
    """
    fitted = Fitted(missing_values=source.missing_values)
    train = rows.filter(rows[SPLIT] == "train")
    known = rows if source.vocabularies == "all" else train
    counted = fetch(backend, counts_by(known, ITEM))
    items = _with_candidates(counted.column(ITEM), source.candidates)
    users = Vocabulary.of(_values(backend, known, USER))
    fitted.add_id(USER, users, source.raw_names.get(USER))
    item_ids = Vocabulary.of(items)
    fitted.add_id(ITEM, item_ids, source.raw_names.get(ITEM))
    item_counts = _counts_by_id(item_ids, counted)
    everyone = users if source.vocabularies == "all" else Vocabulary.of(_values(backend, rows, USER))
    unseen = "stand in no row" if source.vocabularies == "all" else "stand in no train row"
    prepared = InteractionColumns(
        fitted,
        fitted.add_catalogue("user", USER, source.users, notes=source.notes, unseen=unseen),
        fitted.add_catalogue(
            "item", ITEM, source.items, notes=source.notes, unseen=unseen, name_missing=histories is not None
        ),
        source.context,
        everyone,
        np.append(0, np.arange(1, len(users) + 1) if everyone is users else users.encode(everyone.values)),
        item_counts,
        item_counts if known is train else _counts_by_id(item_ids, fetch(backend, counts_by(train, ITEM))),
    )
    for column in source.context:
        fitted.add(column.name, *fit_in_table(backend, train, column))
    if histories is not None:
        prepared = replace(prepared, history=_prepare_history(prepared, source, histories, dated))
    fitted.features[LABEL] = Feature(dtype="float32")
    fitted.features[TIMESTAMP] = Feature(dtype="float64" if rows[TIMESTAMP].type().is_floating() else "int64")
    return prepared


def _counts_by_id(items: Vocabulary, counted: pa.Table) -> NDArray[np.int64]:
    counts = np.zeros(len(items), np.int64)
    counts[items.encode(counted.column(ITEM)) - 1] = counted.column("rows").to_numpy()
    return counts


def _prepare_history(prepared: InteractionColumns, source: Source, histories: Histories, dated: bool) -> HistoryColumns:
    """The columns of the lists; their features and encoders go to `prepared.fitted`."""
    fitted, length = prepared.fitted, histories.length
    columns: dict[str, NDArray[np.generic]] = {ITEM: np.arange(len(prepared.vocabulary(ITEM)) + 1, dtype=np.int32)}
    for name, column in prepared.items.columns.items():
        if isinstance(column, np.ndarray) and fitted.features[name].is_categorical:
            columns[name] = np.append(column.dtype.type(0), column)
    left_out = [name for name, column in columns.items() if (column[1:] == 0).any()]
    kept = {name: column for name, column in columns.items() if name not in left_out}
    channels = {HISTORY: [f"{HISTORY}_{name}" for name in kept]}
    if histories.negative:
        channels[NEGATIVE_HISTORY] = [f"{NEGATIVE_HISTORY}_{name}" for name in kept]
    gaps = histories.gaps and source.timed
    _check_names_are_free([*channels[HISTORY], *channels.get(NEGATIVE_HISTORY, ()), GAP], fitted.features)
    for prefix in (HISTORY, NEGATIVE_HISTORY) if histories.negative else (HISTORY,):
        for name in kept:
            of = {"vocabulary": name, "length": length, "padding": 0}
            fitted.features[f"{prefix}_{name}"] = fitted.features[name].model_copy(update=of)
    raw = source.raw_names.get(ITEM, ITEM)
    encoder = VocabularyEncoder(column=f"{HISTORY}_{raw}" if raw != ITEM else None, vocabulary=ITEM, separator="|",
                                length=length, keep="last")  # fmt: skip
    fitted.add_encoder(f"{HISTORY}_{ITEM}", encoder)
    if not gaps:
        return HistoryColumns(histories, kept, channels, left_out, None)
    channels[HISTORY].append(GAP)
    fitted.features[GAP] = Feature(dtype="float32", length=length)
    fitted.add_encoder(GAP, NumberEncoder(log1p=True, separator="|", length=length, keep="last"))
    return HistoryColumns(histories, kept, channels, left_out, SECONDS_A_DAY if dated else 1)


def _check_names_are_free(names: Sequence[str], features: Mapping[str, Feature]) -> None:
    taken = [
        f"feature '{name}' has a name that histories need; rename its column" for name in names if name in features
    ]
    if taken:
        raise DataError.of("rows", taken)


def _values(backend: Backend, rows: Table, name: str) -> pa.ChunkedArray:
    return fetch(backend, counts_by(rows, name)).column(name)


def _with_candidates(items: pa.ChunkedArray, candidates: pa.Table | None) -> pa.ChunkedArray:
    if candidates is None:
        return items
    named = pc.unique(pc.list_flatten(candidates.column("negatives")))
    return pa.chunked_array([*items.chunks, named.cast(items.type)])
