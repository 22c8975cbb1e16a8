"""Vocabularies: the raw values of an id space in the order of their ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recspec.base.errors import DataError
from recspec.base.files import special, whole_file
from recspec.data.encoding import raw_columns
from recspec.data.encoding.raw_columns import SMALL, RawValues
from recspec.data.encoding.raw_values import UNKNOWN, Ids, KnownValues, Raw

LONGEST_ID = 1_000
"""Characters of a raw id of a user or item that a request may name."""

BLANK = "\0"
"""What the texts of blank ids begin with; no event's id holds it."""
LEAST = np.iinfo(np.int64).min
"""Blank ids of whole numbers are counted up from here."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Raw values and their ids: the value in row i has id i + 1, and id 0 is unknown.

    One class because every method looks up, reads or changes the same values.
    """

    values: pa.Array  # distinct, all strings or all int64; strings of more than 2 GiB together are large_string

    def __post_init__(self) -> None:
        kind = self.values.type
        assert pa.types.is_int64(kind) or raw_columns.is_text(kind), kind
        if self.values.null_count or len(pc.unique(self.values)) != len(self.values):
            raise DataError("a vocabulary's values must be distinct, and none may be missing")

    @classmethod
    def of(cls, values: RawValues) -> Vocabulary:
        """The vocabulary of all different values, in sorted order; missing ones have no id."""
        array = raw_columns.whole_or_text(raw_columns.as_array(values))
        unique = pc.unique(pc.drop_null(array))
        return cls(raw_columns.narrowed(unique.take(pc.sort_indices(unique))))

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a vocabulary that `save` wrote. Raises `DataError` if the file is missing or holds something else."""
        try:
            if problem := special(path):
                raise DataError(f"{path}: {problem}")
            table = pq.read_table(path, partitioning=None)
            table.validate(full=True)  # refuses texts that are not UTF-8
            return cls(raw_columns.narrowed(raw_columns.whole_or_text(raw_columns.combined(table.column("value")))))
        except FileNotFoundError:
            raise DataError(f"{path}: no such vocabulary; the folder is not a prepared dataset, or not whole") from None
        except (KeyError, pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a vocabulary (one column 'value' in Parquet): {error}") from None

    def save(self, path: Path) -> None:
        """Write the values in order of their ids, as the one column `value` of a Parquet file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            pq.write_table(pa.table({"value": raw_columns.in_strings(pa.chunked_array([self.values]))}), temporary)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def cardinality(self) -> int:
        """Number of ids, unknown included."""
        return len(self.values) + 1

    @property
    def is_numeric(self) -> bool:
        """Whether the raw values are whole numbers; the text `42` then finds 42."""
        return bool(pa.types.is_int64(self.values.type))

    def blanked(self, ids: Ids) -> Vocabulary:
        """The vocabulary with values that no raw value equals in place of those of some ids, which stay theirs."""
        if self.is_numeric:
            numbers = self.values.to_numpy().copy()
            numbers[ids - 1] = LEAST + ids
            return Vocabulary(pa.array(numbers))
        texts = self.values.to_pylist()
        for each in ids.tolist():
            texts[each - 1] = f"{BLANK}{each}"
        return Vocabulary(pa.array(texts, self.values.type))

    def encode(self, values: RawValues) -> Ids:
        """The id of each raw value, 0 where it is unknown or missing."""
        is_short = isinstance(values, list) and len(values) <= SMALL and not self.is_numeric
        if is_short and all(type(each) is str for each in values):  # as a server asks: without a column of Arrow
            return self.find(values)
        array = raw_columns.as_array(values)
        if array.type != self.values.type:
            array = raw_columns.as_int64(array) if self.is_numeric else raw_columns.as_text(array)
        if self.is_numeric:
            numbers = pc.fill_null(array, 0).to_numpy(zero_copy_only=False)
            return self._find_numbers(numbers, array.is_valid().to_numpy(zero_copy_only=False))
        return raw_columns.each_once(array, self._find_texts)

    def find(self, keys: Sequence[Raw]) -> Ids:
        """The id of each text, or of each whole number where the values are numbers; 0 where it is unknown or None."""
        if not self.is_numeric:
            return self._known_texts.find(keys)
        return self._find_numbers(
            np.array([0 if key is None else key for key in keys], np.int64),
            np.array([key is not None for key in keys], bool),
        )

    def _find_texts(self, array: pa.Array) -> Ids:
        if len(array) <= SMALL:
            return self.find(array.to_pylist())
        kind = self.values.type if array.type == self.values.type else pa.large_string()
        found = pc.index_in(array.cast(kind), value_set=self.values.cast(kind), skip_nulls=True)
        return np.asarray(pc.fill_null(found, -1).to_numpy(zero_copy_only=False), np.int64) + 1

    def decode(self, ids: NDArray[np.integer] | Sequence[int]) -> pa.Array:
        """The raw value of each id, null for 0; a `DataError` names an id that the vocabulary does not have."""
        places = np.asarray(ids, np.int64) - 1
        if len(places) and (places.min() < -1 or places.max() >= len(self)):
            wrong = places[(places < -1) | (places >= len(self))][0] + 1
            raise DataError(f"id {wrong} is not one of the vocabulary's {self.cardinality} ids")
        return self.values.take(pa.array(places, mask=places < 0))

    def _find_numbers(self, numbers: Ids, given: NDArray[np.bool_]) -> Ids:
        if not len(self):
            return np.zeros(len(numbers), np.int64)
        ordered, order = self._sorted_numbers
        place = np.minimum(np.searchsorted(ordered, numbers), len(ordered) - 1)
        return np.where((ordered[place] == numbers) & given, order[place] + 1, UNKNOWN)

    @cached_property
    def _sorted_numbers(self) -> tuple[Ids, Ids]:
        numbers = self.values.to_numpy()
        order = np.argsort(numbers, kind="stable")
        return numbers[order], order

    @cached_property
    def _known_texts(self) -> KnownValues:
        return KnownValues(self.values.to_pylist())


def are_blank(vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """(cardinality,) Whether each id is one that `blanked` took the value of."""
    if vocabulary.is_numeric:
        blank = vocabulary.values.to_numpy() <= LEAST + len(vocabulary)
    else:
        blank = pc.starts_with(vocabulary.values, BLANK).to_numpy(zero_copy_only=False)
    return np.concatenate([np.zeros(1, bool), np.asarray(blank, bool)])
