"""Histories of raw rows: the ids of each user's earlier items, and a number for each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recspec.encoding.encoder_kinds import NumberEncoder, VocabularyEncoder
from recspec.encoding.encoders import Encoders
from recspec.encoding.raw_columns import split_lists
from recspec.encoding.raw_values import UNKNOWN, Lists, of_known
from recspec.errors import DataError


@dataclass(frozen=True)
class History:
    """The earlier events of each row's user."""

    ids: Lists
    """The known items, at most the latest `length` of a row."""
    numbers: Lists | None
    """The number of each of these items, where the rows hold such a column."""
    empty: int
    """Rows without any event."""
    with_unknown: int
    """Rows with an unknown item; such events are left out."""


def encode_history(encoders: Encoders, table: pa.Table, items: str, numbers: str | None) -> History:
    """The histories in a column of lists of raw items and, if the rows hold it, a column of a number for each item.

    Raises:
        DataError: if the items' column is missing, or a row has not as many numbers as items.
    """
    encoder, columns = encoders.encoder(items), table.column_names
    assert isinstance(encoder, VocabularyEncoder), items
    if not encoders.can_encode(items, columns):
        encoders.encode(table, [items])  # names what is missing
    (source,) = encoders.sources(items, columns)
    flat, offsets = split_lists(encoder.present(table.column(source)), encoder.separator)
    ids, lengths = encoders.vocabularies[encoder.vocabulary].encode(flat), np.diff(offsets)
    length = encoder.length or len(ids)
    of_events = None
    if numbers is not None and encoders.can_encode(numbers, columns):
        of_events = of_known(_numbers(encoders, table, numbers, lengths), ids, offsets, length, "last")
    rows = np.repeat(np.arange(table.num_rows), lengths)
    with_unknown = len(np.unique(rows[ids == UNKNOWN]))
    return History(of_known(ids, ids, offsets, length, "last"), of_events, int((lengths == 0).sum()), with_unknown)


def _numbers(encoders: Encoders, table: pa.Table, name: str, lengths: NDArray[np.int64]) -> NDArray[np.float32]:
    encoder = encoders.encoder(name)
    assert isinstance(encoder, NumberEncoder), name
    (source,) = encoders.sources(name, table.column_names)
    flat, offsets = split_lists(encoder.present(table.column(source)), encoder.separator)
    wrong = np.flatnonzero(np.diff(offsets) != lengths)
    if len(wrong):
        row = int(wrong[0])
        found = f"row {row + 1} holds {np.diff(offsets)[row]} numbers beside {lengths[row]} items"
        raise DataError(f"raw rows: column '{source}': {found}; expected one for each, or no such column")
    return np.nan_to_num(encoder.transformed(flat), nan=0.0).astype(np.float32)
