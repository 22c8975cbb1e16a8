"""Raw values to ids and scaled numbers: what was fitted when the data was prepared is what serves.

A prepared dataset keeps its vocabularies (`vocabularies/NAME.parquet`) and, in `encoders.json`, how each feature's raw
value becomes the prepared one. `prepare` and every server encode through this module alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from recspec.errors import DataError, listed, nearest, unknown

ENCODERS_FILE = "encoders.json"
VOCABULARIES = "vocabularies"
UNKNOWN = 0
"""The id of a value that the vocabulary does not hold; in a list, of padding."""

SMALL = 4096
"""Values up to which a lookup in a Python dict, built once, beats building pyarrow's hash table (5 ms at 200,000)."""

RawValues: TypeAlias = Any
"""A sequence of Python values, a numpy array, or a pyarrow array or chunked array (pyarrow has no types)."""
Ids = NDArray[np.int64]
Lists = tuple[NDArray[np.generic], NDArray[np.int64]]
"""Values and offsets: row i holds values[offsets[i]:offsets[i + 1]]."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Raw values and their ids: the value in row i has id i + 1, and id 0 is unknown."""

    values: pa.Array
    """Distinct values, all strings or all int64."""

    def __post_init__(self) -> None:
        kind = self.values.type
        assert pa.types.is_int64(kind) or pa.types.is_string(kind), kind
        if self.values.null_count or len(pc.unique(self.values)) != len(self.values):
            raise DataError("a vocabulary's values must be distinct, and none may be missing")

    @classmethod
    def of(cls, values: RawValues) -> Vocabulary:
        """The vocabulary of all different values, in sorted order; missing ones have no id."""
        array = _whole_or_text(_arrow(values))
        unique = pc.unique(pc.drop_null(array))
        return cls(unique.take(pc.sort_indices(unique)))

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a vocabulary that `save` wrote.

        Raises:
            DataError: if the file is missing or holds something else.
        """
        try:
            table = pq.read_table(path)
            return cls(_whole_or_text(table.column("value").combine_chunks()))
        except FileNotFoundError:
            raise DataError(f"{path}: no such vocabulary; the folder is not a prepared dataset, or not whole") from None
        except (KeyError, pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a vocabulary (one column 'value' in Parquet): {error}") from None

    def save(self, path: Path) -> None:
        """Write the values in order of their ids, as the one column `value` of a Parquet file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        pq.write_table(pa.table({"value": self.values}), temporary)
        temporary.replace(path)

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

    def encode(self, values: RawValues) -> Ids:
        """The id of each raw value, 0 where it is unknown or missing."""
        array = self._of_own_type(values)
        if self.is_numeric:
            return self._encode_numbers(array)
        if len(array) > SMALL:  # each different text once: rows are many, texts are not
            coded = array.dictionary_encode()
            ids = np.append(self._encode_texts(coded.dictionary), UNKNOWN)
            return np.asarray(ids[pc.fill_null(coded.indices, len(ids) - 1).to_numpy(zero_copy_only=False)], np.int64)
        return self._encode_texts(array)

    def _encode_texts(self, array: pa.Array) -> Ids:
        if len(array) <= SMALL:
            places = [self._ids_by_text.get(text, UNKNOWN) for text in array.to_pylist()]
            return np.array(places, np.int64)
        places = pc.fill_null(pc.index_in(array, value_set=self.values, skip_nulls=True), -1)
        return np.asarray(places.to_numpy(zero_copy_only=False), np.int64) + 1

    def decode(self, ids: NDArray[np.integer] | Sequence[int]) -> pa.Array:
        """The raw value of each id, null for 0.

        Raises:
            DataError: for an id that the vocabulary does not have.
        """
        places = np.asarray(ids, np.int64) - 1
        if len(places) and (places.min() < -1 or places.max() >= len(self)):
            wrong = places[(places < -1) | (places >= len(self))][0] + 1
            raise DataError(f"id {wrong} is not one of the vocabulary's {self.cardinality} ids")
        return self.values.take(pa.array(places, mask=places < 0))

    def _encode_numbers(self, array: pa.Array) -> Ids:
        numbers = pc.fill_null(array, 0).to_numpy(zero_copy_only=False)
        if not len(self):
            return np.zeros(len(numbers), np.int64)
        ordered, order = self._sorted_numbers
        place = np.minimum(np.searchsorted(ordered, numbers), len(ordered) - 1)
        found = ordered[place] == numbers
        if array.null_count:
            found &= array.is_valid().to_numpy(zero_copy_only=False)
        return np.where(found, order[place] + 1, UNKNOWN)

    @cached_property
    def _sorted_numbers(self) -> tuple[Ids, Ids]:
        numbers = self.values.to_numpy()
        order = np.argsort(numbers, kind="stable")
        return numbers[order], order

    @cached_property
    def _ids_by_text(self) -> dict[str, int]:
        return {text: number for number, text in enumerate(self.values.to_pylist(), 1)}

    def _of_own_type(self, values: RawValues) -> pa.Array:
        array = _arrow(values)
        if array.type == self.values.type:
            return array
        return _as_int64(array) if self.is_numeric else _as_text(array)


@dataclass(frozen=True)
class Scaler:
    """Numbers brought to mean 0 and standard deviation 1; a missing one becomes the mean, so 0."""

    mean: float
    std: float

    @classmethod
    def of(cls, mean: float | None, std: float | None) -> Scaler:
        """From moments, rounded to 9 digits so that two engines' orders of summing agree; a constant keeps std 1."""
        rounded = float(f"{std or 0.0:.9g}")
        return cls(float(f"{mean or 0.0:.9g}"), rounded if rounded > 0 and np.isfinite(rounded) else 1.0)

    def encode(self, values: RawValues) -> NDArray[np.float32]:
        """Scaled numbers."""
        numbers = _as_numbers(_arrow(values))
        return np.nan_to_num((numbers - self.mean) / self.std, nan=0.0).astype(np.float32)


# --- encoders.json ---------------------------------------------------------------------------------------------------


class _Encoder(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    column: str | None = Field(None, description="the raw column's name, where it is not the feature's")


class VocabularyEncoder(_Encoder):
    """A raw value becomes its id; with a `length`, a row holds several values."""

    kind: Literal["vocabulary"] = "vocabulary"
    vocabulary: str = Field(description="file in the folder `vocabularies`, without .parquet")
    separator: str | None = Field(None, description="between the values of a list that is one text")
    length: int | None = Field(None, gt=0, description="the most values of a list that are kept, first ones first")


class NumberEncoder(_Encoder):
    """A number is taken as it is; a missing one is 0."""

    kind: Literal["number"] = "number"


class ScaleEncoder(_Encoder):
    """A number becomes (value - mean) / std; a missing one is the mean."""

    kind: Literal["scale"] = "scale"
    mean: float
    std: float = Field(gt=0)


Encoder = VocabularyEncoder | NumberEncoder | ScaleEncoder
_FILE = TypeAdapter(dict[str, Annotated[Encoder, Field(discriminator="kind")]])


@dataclass(frozen=True)
class Encoders:
    """How each feature's raw value becomes the prepared one, with the vocabularies that takes."""

    encoders: Mapping[str, Encoder]
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> Encoders:
        """Read `encoders.json` and the vocabularies it names.

        Raises:
            DataError: if a file is missing or not what it should be.
        """
        path = folder / ENCODERS_FILE
        try:
            encoders = _FILE.validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataError(f"{path}: no such file; raw values can't be encoded without it") from None
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, found['loc']))}: {found['msg']}" for found in error.errors()]
            raise DataError.of(str(path), problems) from None
        names = {encoder.vocabulary for encoder in encoders.values() if isinstance(encoder, VocabularyEncoder)}
        files = {name: folder / VOCABULARIES / f"{name}.parquet" for name in sorted(names)}
        return cls(encoders, {name: Vocabulary.load(file) for name, file in files.items()})

    def save(self, folder: Path) -> None:
        """Write `encoders.json` and every vocabulary."""
        data = {name: encoder.model_dump(exclude_none=True) for name, encoder in self.encoders.items()}
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{ENCODERS_FILE}.tmp"
        temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        temporary.replace(folder / ENCODERS_FILE)
        for name, vocabulary in self.vocabularies.items():
            vocabulary.save(folder / VOCABULARIES / f"{name}.parquet")

    def vocabulary_of(self, feature: str) -> Vocabulary:
        """The vocabulary that a categorical feature's raw values are looked up in.

        Raises:
            DataError: if the feature is unknown or a number.
        """
        encoder = self._encoder(feature)
        if not isinstance(encoder, VocabularyEncoder):
            raise DataError(f"feature '{feature}' is a number; it has no vocabulary")
        return self.vocabularies[encoder.vocabulary]

    def encode(self, table: pa.Table, features: Iterable[str] | None = None) -> dict[str, NDArray[np.generic] | Lists]:
        """Prepared columns of raw rows: arrays, and for lists values and offsets.

        A raw column may bear the feature's name or the name it had in the raw files.

        Args:
            features: Which to encode; all by default.

        Raises:
            DataError: naming every column that is missing, and every value that is not a number where one must be.
        """
        wanted = list(self.encoders if features is None else features)
        sources = {name: self._source(name, table.column_names) for name in wanted}
        problems = [
            f"no column '{name}'{nearest(name, table.column_names)}; found {listed(table.column_names)}"
            for name, source in sources.items()
            if source is None
        ]
        encoded: dict[str, NDArray[np.generic] | Lists] = {}
        for name, source in sources.items():
            if source is not None:
                try:
                    encoded[name] = self.encode_column(name, table.column(source))
                except DataError as error:
                    problems += [f"column '{source}': {problem}" for problem in error.problems]
        if problems:
            raise DataError.of("raw rows", problems)
        return encoded

    def encode_column(self, feature: str, values: RawValues) -> NDArray[np.generic] | Lists:
        """One prepared column of raw values.

        Raises:
            DataError: for a value that is not a number where one must be, naming its row.
        """
        encoder = self._encoder(feature)
        if isinstance(encoder, ScaleEncoder):
            return Scaler(encoder.mean, encoder.std).encode(values)
        if isinstance(encoder, NumberEncoder):
            return np.nan_to_num(_as_numbers(_arrow(values)), nan=0.0).astype(np.float32)
        vocabulary = self.vocabularies[encoder.vocabulary]
        if encoder.length is None:
            return vocabulary.encode(values)
        flat, offsets = split_lists(_arrow(values), encoder.separator)
        return _without_unknown(vocabulary.encode(flat), offsets, encoder.length)

    def _encoder(self, feature: str) -> Encoder:
        if feature not in self.encoders:
            raise DataError(unknown("feature", feature, self.encoders))
        return self.encoders[feature]

    def _source(self, feature: str, columns: Sequence[str]) -> str | None:
        raw = self._encoder(feature).column
        return next((name for name in (feature, raw) if name in columns), None)


# --- lists -----------------------------------------------------------------------------------------------------------


def split_lists(array: pa.Array, separator: str | None) -> tuple[pa.Array, NDArray[np.int64]]:
    """All values of a column of lists, and the offset of each row; a text is cut at the separator.

    Empty values (as in `a||b` or an empty text) are left out; a missing list is empty.
    """
    if not _is_list(array.type):
        if separator is None:
            array = pc.list_slice(pa.array([[v] for v in array.to_pylist()], pa.list_(array.type)), 0)
        else:
            array = pc.split_pattern(pc.fill_null(_as_text(array), ""), separator)
    array = array.cast(pa.large_list(array.type.value_type))
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    flat = pc.list_flatten(array)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    kept = flat.is_valid()
    if pa.types.is_string(flat.type):
        kept = pc.and_(kept, pc.fill_null(pc.not_equal(flat, ""), False))
    mask = kept.to_numpy(zero_copy_only=False)
    return flat.filter(kept), np.concatenate([np.zeros(1, np.int64), np.cumsum(mask)])[offsets]


def _without_unknown(ids: Ids, offsets: NDArray[np.int64], length: int) -> Lists:
    """Lists of known ids, each cut to its first `length`."""
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    rows, ids = rows[ids != UNKNOWN], ids[ids != UNKNOWN]
    starts = np.searchsorted(rows, np.arange(len(offsets) - 1))
    kept = np.arange(len(rows)) - starts[rows] < length
    counts = np.bincount(rows[kept], minlength=len(offsets) - 1)
    return ids[kept], np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


# --- raw values of any type as arrow arrays --------------------------------------------------------------------------


def _arrow(values: RawValues) -> pa.Array:
    if not isinstance(values, (pa.Array, pa.ChunkedArray)):
        try:
            values = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError):  # numbers and texts mixed, as JSON allows
            values = pa.array([_text(value) for value in values], pa.string())
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if pa.types.is_boolean(values.type):
        return values.cast(pa.int64())
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def _text(value: object) -> str | None:
    if value is None:
        return None
    return str(int(value)) if isinstance(value, bool) else str(value)


def _whole_or_text(array: pa.Array) -> pa.Array:
    """The array as int64 where its type is a whole number, else as text."""
    whole = pa.types.is_integer(array.type) and not pa.types.is_uint64(array.type)
    return array.cast(pa.int64()) if whole else _as_text(array)


def _as_text(array: pa.Array) -> pa.Array:
    if pa.types.is_string(array.type):
        return array
    if pa.types.is_floating(array.type):  # 42.0 is how a table with gaps spells 42
        whole = _as_int64(array)
        return pc.coalesce(whole.cast(pa.string()), array.cast(pa.string()))
    if _is_list(array.type):
        raise DataError("holds lists; expected one value a row")
    return array.cast(pa.string())


def _as_int64(array: pa.Array) -> pa.Array:
    """Whole numbers, null where a value is not one."""
    if pa.types.is_integer(array.type):
        if pa.types.is_uint64(array.type):
            array = pc.if_else(pc.less_equal(array, pa.scalar(np.iinfo(np.int64).max, pa.uint64())), array, None)
        return array.cast(pa.int64())
    if pa.types.is_floating(array.type):
        array = array.cast(pa.float64())
        whole = pc.and_(pc.equal(pc.floor(array), array), pc.less(pc.abs(array), 2.0**53))
        return pc.if_else(pc.fill_null(whole, False), array, None).cast(pa.int64())
    if _is_list(array.type):
        raise DataError("holds lists; expected one value a row")
    text = pc.utf8_trim_whitespace(array.cast(pa.string()))
    digits = pc.match_substring_regex(text, r"^-?[0-9]{1,18}(\.0+)?$")
    text = pc.replace_substring_regex(text, r"\.0+$", "")
    return pc.if_else(pc.fill_null(digits, False), text, None).cast(pa.int64())


def _as_numbers(array: pa.Array) -> NDArray[np.float64]:
    """Numbers as float64, NaN where one is missing."""
    if pa.types.is_string(array.type):
        text = pc.utf8_trim_whitespace(array)
        array = pc.if_else(pc.equal(text, ""), None, text)
    try:
        numbers: NDArray[np.float64] = array.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise DataError.of("numbers", _not_numbers(array)) from None
    infinite = np.flatnonzero(np.isinf(numbers))
    if len(infinite):
        raise DataError(f"row {infinite[0] + 1} is infinite; expected a finite number")
    return numbers


def _not_numbers(array: pa.Array) -> list[str]:
    problems = []
    for row, value in enumerate(array.to_pylist(), 1):
        try:
            float(value or 0)
        except (TypeError, ValueError):
            problems.append(f"row {row} is {str(value)[:60]!r}; expected a number")
        if len(problems) == 3:
            break
    return problems or [f"holds {array.type}; expected numbers"]


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
