"""Raw values to ids and scaled numbers: what was fitted when the data was prepared is what serves.

A prepared dataset keeps its vocabularies (`vocabularies/NAME.parquet`) and, in `encoders.json`, how each feature's raw
value becomes the prepared one. `prepare` and every server encode through this module alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from recspec.errors import DataError, listed, nearest, unknown
from recspec.hashing import Prints, cross, fingerprint64
from recspec.outputs import whole_file
from recspec.paths import PathError, confined, read_text, special

ENCODERS_FILE = "encoders.json"
VOCABULARIES = "vocabularies"
UNKNOWN = 0
"""The id of a value that the vocabulary does not hold; in a list, of padding."""

SMALL = 4096
"""Values up to which a lookup in a Python dict, built once, beats building pyarrow's hash table (5 ms at 200,000)."""

TEXT_BYTES = 2**31 - 1
"""Text that one array of type `string` can hold; more text is held as `large_string`."""

FAR = 100.0
"""Standard deviations from the mean; among 10,000 training rows not one can lie as far (Samuelson's inequality)."""

MISSING_NUMBERS = ("n/a", "na", "#n/a", "null", "none", "nan", "-", "?", "\\n")
"""Texts that stand for a missing value where a number is expected, in any case; elsewhere they are text like any."""
TRUTH = {"true": 1, "false": 0}
"""Texts that are numbers where a number is expected, in any case, as JSON's own true and false are."""

RawValues: TypeAlias = Any
"""A sequence of Python values, a numpy array, or a pyarrow array or chunked array (pyarrow has no types)."""
Ids = NDArray[np.int64]
Lists = tuple[NDArray[np.generic], NDArray[np.int64]]
"""Values and offsets: row i holds values[offsets[i]:offsets[i + 1]]."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Raw values and their ids: the value in row i has id i + 1, and id 0 is unknown."""

    values: pa.Array
    """Distinct values, all strings or all int64; strings of more than 2 GiB together are of type large_string."""

    def __post_init__(self) -> None:
        kind = self.values.type
        assert pa.types.is_int64(kind) or is_text(kind), kind
        if self.values.null_count or len(pc.unique(self.values)) != len(self.values):
            raise DataError("a vocabulary's values must be distinct, and none may be missing")

    @classmethod
    def of(cls, values: RawValues) -> Vocabulary:
        """The vocabulary of all different values, in sorted order; missing ones have no id."""
        array = _whole_or_text(_arrow(values))
        unique = pc.unique(pc.drop_null(array))
        return cls(_narrowed(unique.take(pc.sort_indices(unique))))

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a vocabulary that `save` wrote.

        Raises:
            DataError: if the file is missing or holds something else.
        """
        try:
            if problem := special(path):
                raise DataError(f"{path}: {problem}")
            table = pq.read_table(path, partitioning=None)
            return cls(_narrowed(_whole_or_text(combined(table.column("value")))))
        except FileNotFoundError:
            raise DataError(f"{path}: no such vocabulary; the folder is not a prepared dataset, or not whole") from None
        except (KeyError, pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a vocabulary (one column 'value' in Parquet): {error}") from None

    def save(self, path: Path) -> None:
        """Write the values in order of their ids, as the one column `value` of a Parquet file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            pq.write_table(pa.table({"value": in_strings(pa.chunked_array([self.values]))}), temporary)

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
        kind = self.values.type if array.type == self.values.type else pa.large_string()
        found = pc.index_in(array.cast(kind), value_set=self.values.cast(kind), skip_nulls=True)
        places = pc.fill_null(found, -1)
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
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    strip: bool = Field(False, description="blanks around a text don't count")
    missing_values: tuple[str, ...] = Field((), description="texts that stand for a missing value")

    def present(self, values: RawValues) -> pa.Array:
        """Raw values as `prepare` saw them: without the blanks around them, and null where they say missing."""
        array = _arrow(values)
        if not is_text(array.type):
            return self._present_numbers(array)
        if self.strip:
            array = pc.utf8_trim_whitespace(array)
        if self.missing_values:
            array = pc.if_else(pc.is_in(array, pa.array(self.missing_values, array.type)), None, array)
        return array

    def _present_numbers(self, array: pa.Array) -> pa.Array:
        """`-1` says missing of the number -1 too."""
        numbers = [int(text) for text in self.missing_values if re.fullmatch(r"-?[0-9]{1,18}", text)]
        if not numbers or not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
            return array
        return pc.if_else(pc.is_in(_as_int64(array), pa.array(numbers, pa.int64())), None, array)


class _OneColumn(_Encoder):
    column: str | None = Field(None, description="the raw column's name, where it is not the feature's")


class VocabularyEncoder(_OneColumn):
    """A raw value becomes its id; with a `length`, a row holds several values.

    A value that the vocabulary of V values does not hold is unknown, id 0. Models that were imported may have other
    ids for it: 1 + V + fingerprint64(text) % buckets, or one that stands for all.
    """

    kind: Literal["vocabulary"] = "vocabulary"
    vocabulary: str = Field(description="file in the folder `vocabularies`, without .parquet")
    separator: str | None = Field(None, description="between the values of a list that is one text")
    length: int | None = Field(None, gt=0, description="the most values of a list that are kept, first ones first")
    keep: Literal["first", "last"] = Field("first", description="which values of a longer list: a history's last ones")
    missing: str | None = Field(None, description="the text that a missing one counts as")
    buckets: int = Field(0, ge=0, le=2**31, description="ids after the vocabulary's, for values it does not hold")
    otherwise: int = Field(0, ge=0, le=2**31, description="the id of values that the vocabulary does not hold")

    def present(self, values: RawValues) -> pa.Array:
        """Likewise, with `missing` in the place of missing texts."""
        array = super().present(values)
        if self.missing is None or not (is_text(array.type) or pa.types.is_null(array.type)):
            return array
        return pc.fill_null(_as_text(array), self.missing)

    def ids(self, values: RawValues, vocabulary: Vocabulary) -> Ids:
        """The id of each value, one a row."""
        ids = vocabulary.encode(values)
        if not (self.buckets or self.otherwise):
            return ids
        array = _arrow(values)
        texts = _as_text(_as_int64(array) if vocabulary.is_numeric else array)
        given = pc.fill_null(pc.not_equal(texts, ""), False).to_numpy(zero_copy_only=False)
        rows = np.flatnonzero((ids == UNKNOWN) & given)
        ids[rows] = self.otherwise
        if self.buckets and len(rows):
            ids[rows] = len(vocabulary) + _within(fingerprint64(texts.take(pa.array(rows))), self.buckets + 1)
        return ids


class HashEncoder(_OneColumn):
    """A raw value becomes 1 + fingerprint64(text) % (cardinality - 1), a missing or empty one 0.

    Whole numbers are hashed as their decimal digits: 42, 42.0 and "42" are one value. Where all are `whole` numbers,
    "042" is that value too, and what is no whole number is missing. With a `length`, a row holds several values.
    """

    kind: Literal["hash"] = "hash"
    cardinality: int = Field(ge=2, le=2**31, description="number of ids, 0 for missing values included")
    separator: str | None = Field(None, description="between the values of a list that is one text")
    length: int | None = Field(None, gt=0, description="the most values of a list that are kept, first ones first")
    whole: bool = Field(False, description="the values are whole numbers")

    def ids(self, values: RawValues) -> Ids:
        """The id of each value, one a row."""
        array = _as_int64(_arrow(values)) if self.whole else _arrow(values)
        if len(array) > SMALL:  # each different value once
            coded = array.dictionary_encode()
            ids = np.append(self._hash(coded.dictionary), UNKNOWN)
            return np.asarray(ids[pc.fill_null(coded.indices, len(ids) - 1).to_numpy(zero_copy_only=False)], np.int64)
        return self._hash(array)

    def _hash(self, array: pa.Array) -> Ids:
        texts = _as_text(array)
        ids = _within(fingerprint64(texts), self.cardinality)
        return np.where(pc.fill_null(pc.not_equal(texts, ""), False).to_numpy(zero_copy_only=False), ids, UNKNOWN)


class BucketEncoder(_OneColumn):
    """A number becomes 1 + how many boundaries are at most as large, a missing one 0."""

    kind: Literal["bucket"] = "bucket"
    boundaries: tuple[float, ...] = Field(description="in rising order")

    @model_validator(mode="after")
    def _rises(self) -> BucketEncoder:
        _check_rising(self.boundaries)
        return self

    @property
    def cardinality(self) -> int:
        """Number of ids, 0 for missing values included."""
        return len(self.boundaries) + 2

    def ids(self, values: RawValues) -> Ids:
        """The id of each number."""
        return _buckets(values, self.boundaries) + 1


class CrossEncoder(_Encoder):
    """The values of several raw columns become one id, 1 + fingerprint % (cardinality - 1), as in TensorFlow.

    A column's part is the fingerprint of its text, or with `boundaries` the number of those at most as large, or the
    value itself of a column of `whole` numbers. A missing value counts as the empty text, or as bucket -1, so a cross
    has no id 0; but where it `needs_all`, a row that lacks a value (null, not the empty text) gets it.
    """

    kind: Literal["cross"] = "cross"
    columns: tuple[str, ...] = Field(min_length=2, description="the raw columns, in the order they are chained")
    cardinality: int = Field(ge=2, le=2**31, description="number of ids; 0 is never used")
    boundaries: dict[str, tuple[float, ...]] = Field({}, description="of columns that are numbers cut into buckets")
    whole: tuple[str, ...] = Field((), description="columns of whole numbers, which are chained as they are")
    needs_all: bool = Field(False, description="a row that lacks one of the values gets id 0")

    @model_validator(mode="after")
    def _fits_together(self) -> CrossEncoder:
        for name in self.whole:
            if name not in self.columns or name in self.boundaries:
                raise ValueError(f"whole: '{name}' is no column of the cross, or is cut into buckets")
        for name, boundaries in self.boundaries.items():
            if name not in self.columns:
                raise ValueError(f"boundaries: {unknown('column', name, self.columns)}")
            _check_rising(boundaries)
        return self

    def ids(self, parts: Sequence[RawValues], sources: Sequence[str] | None = None) -> Ids:
        """The id of each row, of the columns' values in their order.

        Args:
            sources: What the columns are called where the values come from.

        Raises:
            DataError: naming each column that holds no numbers where it has boundaries.
        """
        prints, problems = [], []
        lacks = np.zeros(len(parts[0]), bool)
        for name, source, part in zip(self.columns, sources or self.columns, parts, strict=True):
            try:
                array = _as_int64(_arrow(part)) if name in self.whole else _arrow(part)
                prints.append(self._print(name, array))
                lacks |= np.isnan(_as_numbers(array)) if name in self.boundaries else _is_missing(array)
            except DataError as error:
                problems += [f"column '{source}': {problem}" for problem in error.problems]
        if problems:
            raise DataError.of("raw rows", problems)
        ids = _within(cross(prints), self.cardinality)
        return np.where(lacks, UNKNOWN, ids) if self.needs_all else ids

    def _print(self, name: str, array: pa.Array) -> Prints:
        if name in self.boundaries:
            return _buckets(array, self.boundaries[name]).astype(np.uint64)
        if name in self.whole:
            numbers: NDArray[np.int64] = pc.fill_null(array, -1).to_numpy(zero_copy_only=False)
            return numbers.astype(np.uint64)
        if len(array) > SMALL:
            coded = array.dictionary_encode()
            texts = _as_text(coded.dictionary)
            prints = np.append(fingerprint64(texts), fingerprint64(pa.array([""])))
            found: Prints = prints[pc.fill_null(coded.indices, len(prints) - 1).to_numpy(zero_copy_only=False)]
            return found
        return fingerprint64(_as_text(array))


class _Number(_OneColumn):
    low: float | None = Field(None, description="a smaller value becomes `outside`")
    high: float | None = Field(None, description="a larger value becomes `outside`")
    outside: float = Field(0.0, description="in place of values below `low` or above `high`")
    missing: float | None = Field(None, description="in place of a missing value")
    log1p: bool = Field(False, description="take the logarithm: sign(value) * ln(1 + |value|)")
    log_plus: float | None = Field(None, description="take ln(value + this); where there is none the value is missing")

    @model_validator(mode="after")
    def _one_logarithm(self) -> _Number:
        if self.log1p and self.log_plus is not None:
            raise ValueError("log1p and log_plus are two logarithms; give one of them")
        return self

    def transformed(self, values: RawValues) -> NDArray[np.float64]:
        """Numbers after low and high, then missing, then the logarithm; NaN where one is missing for good."""
        return self.of_numbers(self.plain(values))

    def plain(self, values: RawValues) -> NDArray[np.float64]:
        """Raw values as the numbers they are; NaN where one is missing."""
        return _as_numbers(_arrow(values))

    def of_numbers(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """What `transformed` makes of numbers, NaN where one is missing."""
        numbers = np.where(self.is_outside(numbers), self.outside, numbers)
        if self.missing is not None:
            numbers = np.nan_to_num(numbers, nan=self.missing)
        if self.log_plus is not None:
            moved = numbers + self.log_plus
            return np.log(np.where(moved > 0, moved, np.nan))
        return np.sign(numbers) * np.log1p(np.abs(numbers)) if self.log1p else numbers

    def is_outside(self, numbers: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which numbers lie below `low` or above `high`, so that `outside` is taken for them."""
        beyond = np.zeros(numbers.shape, bool)
        if self.low is not None:
            beyond |= numbers < self.low
        if self.high is not None:
            beyond |= numbers > self.high
        return beyond

    def is_far(self, _: NDArray[np.float64]) -> NDArray[np.bool_] | bool:
        """Which numbers lie far from all that the encoder was fitted on; none where it was fitted on nothing."""
        return False


class NumberEncoder(_Number):
    """A number is taken as it is; a missing one is 0. With a `length`, a row holds several numbers."""

    kind: Literal["number"] = "number"
    separator: str | None = Field(None, description="between the numbers of a list that is one text")
    length: int | None = Field(None, gt=0, description="the most numbers of a list that are kept")
    keep: Literal["first", "last"] = Field("first", description="which numbers of a longer list: a history's last ones")


class ScaleEncoder(_Number):
    """A number becomes (value - mean) / std, both of the transformed values; a missing one is the mean."""

    kind: Literal["scale"] = "scale"
    mean: float
    std: float = Field(gt=0)

    def is_far(self, numbers: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which numbers are `FAR` standard deviations or more from the mean."""
        far: NDArray[np.bool_] = np.abs(self.of_numbers(numbers) - self.mean) >= FAR * self.std
        return far


Encoder = VocabularyEncoder | HashEncoder | BucketEncoder | CrossEncoder | NumberEncoder | ScaleEncoder
_FILE = TypeAdapter(dict[str, Annotated[Encoder, Field(discriminator="kind")]])


def _within(prints: Prints, cardinality: int) -> Ids:
    """Ids from 1 on."""
    return 1 + (prints % np.uint64(cardinality - 1)).astype(np.int64)


def _buckets(values: RawValues, boundaries: Sequence[float]) -> Ids:
    """How many boundaries are at most as large as each number; -1 where it is missing."""
    numbers = _as_numbers(_arrow(values))
    return np.where(np.isnan(numbers), -1, np.searchsorted(np.array(boundaries, np.float64), numbers, side="right"))


def _is_missing(array: pa.Array) -> NDArray[np.bool_]:
    missing: NDArray[np.bool_] = array.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
    return missing


def _check_rising(boundaries: Sequence[float]) -> None:
    for earlier, later in pairwise(boundaries):
        if later <= earlier:
            raise ValueError(f"boundaries must rise; {later:g} follows {earlier:g}")


@dataclass(frozen=True)
class Gap:
    """How many rows lack a value, and how many hold one that was unknown when the data was prepared."""

    missing: int
    unknown: int
    taken: str
    """What stands for them."""

    def __add__(self, other: Gap) -> Gap:
        return Gap(self.missing + other.missing, self.unknown + other.unknown, self.taken)


UNKNOWN_ID, MISSING_ID = "the id of unknown values", "the id of missing values"


@dataclass(frozen=True)
class History:
    """What rows say of their users' earlier events."""

    ids: Lists
    """The known items, at most the latest `length` of a row."""
    numbers: Lists | None
    """Beside each of them, where the rows hold such a column."""
    empty: int
    """Rows without any event."""
    with_unknown: int
    """Rows with an item that was unknown when the data was prepared; such events are left out."""


def _gap(encoder: Encoder, values: RawValues, encoded: NDArray[np.generic]) -> Gap:
    if isinstance(encoder, (NumberEncoder, ScaleEncoder)):
        nothing = "the mean" if isinstance(encoder, ScaleEncoder) else "0"
        taken = nothing if encoder.missing is None else f"{encoder.missing:g}"
        return Gap(int(np.isnan(_as_numbers(encoder.present(values))).sum()), 0, taken)
    zeros = encoded == UNKNOWN
    if not isinstance(encoder, VocabularyEncoder):
        return Gap(int(zeros.sum()), 0, MISSING_ID)
    array = encoder.present(values).filter(pa.array(zeros))
    missing = array.is_null(nan_is_null=True)
    if is_text(array.type):
        missing = pc.or_(missing, pc.fill_null(pc.equal(array, ""), False))
    count = pc.sum(missing).as_py() or 0
    return Gap(count, len(array) - count, UNKNOWN_ID)


def read_encoders(folder: Path) -> dict[str, Encoder]:
    """What `encoders.json` says, by feature.

    Raises:
        DataError: if the file is missing or not what it should be.
    """
    path = folder / ENCODERS_FILE
    if not path.exists():
        raise DataError(f"{path}: no such file; raw values can't be encoded without it")
    try:
        return _FILE.validate_json(read_text(confined(folder, ENCODERS_FILE)))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, found['loc'])) or 'the file'}: {found['msg']}" for found in error.errors()]
        raise DataError.of(str(path), problems) from None


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
        encoders = read_encoders(folder)
        names = {encoder.vocabulary for encoder in encoders.values() if isinstance(encoder, VocabularyEncoder)}
        try:
            files = {name: confined(folder, f"{VOCABULARIES}/{name}.parquet") for name in sorted(names)}
        except PathError as error:
            raise DataError(f"{folder / ENCODERS_FILE}: {error}") from None
        return cls(encoders, {name: Vocabulary.load(file) for name, file in files.items()})

    def save(self, folder: Path) -> None:
        """Write `encoders.json` and every vocabulary."""
        data = {name: _told(encoder) for name, encoder in self.encoders.items()}
        (folder / VOCABULARIES).mkdir(parents=True, exist_ok=True)
        with whole_file(folder / ENCODERS_FILE) as temporary:
            temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        for name, vocabulary in self.vocabularies.items():
            vocabulary.save(confined(folder, f"{VOCABULARIES}/{name}.parquet"))

    def vocabulary_of(self, feature: str) -> Vocabulary:
        """The vocabulary that a categorical feature's raw values are looked up in.

        Raises:
            DataError: if the feature is unknown, a number, or hashed.
        """
        encoder = self._encoder(feature)
        if not isinstance(encoder, VocabularyEncoder):
            what = "a number" if isinstance(encoder, _Number) else f"encoded by {encoder.kind}"
            raise DataError(f"feature '{feature}' is {what}; it has no vocabulary")
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
        found = table.column_names
        missing = self._missing(wanted, found)
        problems = [f"no column '{column}'{needed}{nearest(column, found)}" for column, needed in missing.items()]
        encoded: dict[str, NDArray[np.generic] | Lists] = {}
        for name in wanted:
            sources = [source for source in self._sources(name, found) if source is not None]
            if self.can_encode(name, found):
                try:
                    encoded[name] = self._encode(name, [table.column(source) for source in sources], sources)
                except DataError as error:  # of one bad cell the same problem, whatever is made from it
                    of = "" if isinstance(self.encoders[name], CrossEncoder) else f"column '{sources[0]}': "
                    problems += [f"{of}{problem}" for problem in error.problems]
        if problems:
            told = DataError.of("raw rows", problems)
            between = "; " if len(told.problems) == 1 else "\n  "
            raise DataError(f"{told}{between}found {listed(found)}", told.problems) if missing else told
        return encoded

    def gaps(self, table: pa.Table, encoded: Mapping[str, NDArray[np.generic] | Lists]) -> dict[str, Gap]:
        """What rows lack or hold that is unknown, of the columns they were encoded from, each told once.

        Lists and crosses are passed over.
        """
        gaps: dict[str, Gap] = {}
        told: set[str | None] = set()
        for name in sorted(encoded, key=lambda name: isinstance(self._encoder(name), BucketEncoder)):
            encoder, column = self._encoder(name), encoded[name]
            if isinstance(encoder, CrossEncoder) or isinstance(column, tuple):
                continue
            (source,) = self._sources(name, table.column_names)
            if source in told:
                continue
            told.add(source)
            gap = _gap(encoder, table.column(source), column)
            if gap.missing or gap.unknown:
                gaps[str(source) if isinstance(encoder, BucketEncoder) else name] = gap
        return gaps

    def encode_history(self, table: pa.Table, items: str, numbers: str | None) -> History:
        """Histories of raw rows: a column of lists of raw items, and if the rows hold it one of a number for each.

        Raises:
            DataError: if the items' column is missing, or a row has not as many numbers as items.
        """
        encoder, columns = self._encoder(items), table.column_names
        assert isinstance(encoder, VocabularyEncoder), items
        if not self.can_encode(items, columns):
            self.encode(table, [items])  # says what is missing
        (source,) = self._sources(items, columns)
        flat, offsets = split_lists(encoder.present(table.column(source)), encoder.separator)
        ids = self.vocabularies[encoder.vocabulary].encode(flat)
        length = encoder.length or len(ids)
        beside = None
        if numbers is not None and self.can_encode(numbers, columns):
            values = self._numbers_beside(table, numbers, np.diff(offsets))
            beside = _of_known(values, ids, offsets, length)
        unknown = np.bincount(np.repeat(np.arange(table.num_rows), np.diff(offsets))[ids == UNKNOWN],
                              minlength=table.num_rows)  # fmt: skip
        known = _of_known(ids, ids, offsets, length)
        return History(known, beside, int((np.diff(offsets) == 0).sum()), int((unknown > 0).sum()))

    def _numbers_beside(self, table: pa.Table, name: str, lengths: NDArray[np.int64]) -> NDArray[np.generic]:
        encoder = self._encoder(name)
        assert isinstance(encoder, NumberEncoder), name
        (source,) = self._sources(name, table.column_names)
        flat, offsets = split_lists(encoder.present(table.column(source)), encoder.separator)
        wrong = np.flatnonzero(np.diff(offsets) != lengths)
        if len(wrong):
            row = int(wrong[0])
            found = f"row {row + 1} holds {np.diff(offsets)[row]} numbers beside {lengths[row]} items"
            raise DataError(f"raw rows: column '{source}': {found}; expected one for each, or no such column")
        return np.nan_to_num(encoder.transformed(flat), nan=0.0).astype(np.float32)

    def encode_column(self, feature: str, values: RawValues) -> NDArray[np.generic] | Lists:
        """One prepared column of the values of its one raw column.

        Raises:
            DataError: for a value that is not a number where one must be, naming its row.
        """
        return self._encode(feature, [values])

    def named(self, columns: Sequence[str]) -> list[str]:
        """Names of raw columns without the blanks around them, as files have that put ", " between values.

        A name stays as it is where a feature is made from just that, or where another column would bear it too.
        """
        made_from = {*self.encoders}
        for encoder in self.encoders.values():
            made_from |= {*encoder.columns} if isinstance(encoder, CrossEncoder) else {encoder.column or ""}
        plain = [name if name in made_from else name.strip() for name in columns]
        return [name if plain.count(short) > 1 else short for name, short in zip(columns, plain, strict=True)]

    def can_encode(self, feature: str, columns: Sequence[str]) -> bool:
        """Whether the raw columns that a feature is made from are all there."""
        return None not in self._sources(feature, columns)

    def _encode(
        self, feature: str, parts: Sequence[RawValues], sources: Sequence[str] | None = None
    ) -> NDArray[np.generic] | Lists:
        encoder = self._encoder(feature)
        parts = [encoder.present(part) for part in parts]
        if isinstance(encoder, CrossEncoder):
            return encoder.ids(parts, sources)
        (values,) = parts
        if isinstance(encoder, ScaleEncoder):
            return Scaler(encoder.mean, encoder.std).encode(encoder.transformed(values))
        if isinstance(encoder, NumberEncoder):
            return self._numbers(encoder, values)
        if isinstance(encoder, BucketEncoder):
            return encoder.ids(values)
        if isinstance(encoder, HashEncoder):
            ids: Callable[[RawValues], Ids] = encoder.ids
        else:
            ids = partial(encoder.ids, vocabulary=self.vocabularies[encoder.vocabulary])
        if encoder.length is None:
            return ids(values)
        flat, offsets = split_lists(values, encoder.separator)
        keep = encoder.keep if isinstance(encoder, VocabularyEncoder) else "first"
        found = ids(encoder.present(flat))
        return _of_known(found, found, offsets, encoder.length, keep)

    def _numbers(self, encoder: NumberEncoder, values: RawValues) -> NDArray[np.generic] | Lists:
        if encoder.length is None:
            return np.nan_to_num(encoder.transformed(values), nan=0.0).astype(np.float32)
        flat, offsets = split_lists(values, encoder.separator)
        numbers = np.nan_to_num(encoder.transformed(flat), nan=0.0).astype(np.float32)
        return cut(numbers, offsets, encoder.length, encoder.keep)

    def _encoder(self, feature: str) -> Encoder:
        if feature not in self.encoders:
            raise DataError(unknown("feature", feature, self.encoders))
        return self.encoders[feature]

    def _sources(self, feature: str, columns: Sequence[str]) -> list[str | None]:
        """The columns that a feature is made from, as they are named here; None for each that is missing."""
        encoder = self._encoder(feature)
        if isinstance(encoder, CrossEncoder):
            return [self._renamed(raw, columns) for raw in encoder.columns]
        return [next((name for name in (feature, encoder.column) if name in columns), None)]

    def _renamed(self, raw: str, columns: Sequence[str]) -> str | None:
        """A raw column by its own name, or by that of the feature which is nothing but this column."""
        if raw in columns:
            return raw
        same = (name for name, encoder in self.encoders.items() if not isinstance(encoder, CrossEncoder)
                and encoder.column == raw and name in columns)  # fmt: skip
        return next(same, None)

    def _missing(self, features: Iterable[str], columns: Sequence[str]) -> dict[str, str]:
        """Each column that is missing, once, and why it must be there where its name does not say so."""
        missing: dict[str, str] = {}
        for name in features:
            encoder = self._encoder(name)
            if isinstance(encoder, CrossEncoder):
                raw = encoder.columns
            else:  # a number's buckets are made from the number's column, whatever they are called
                raw = (encoder.column if encoder.column is not None and encoder.column in self.encoders else name,)
            for column, source in zip(raw, self._sources(name, columns), strict=True):
                if source is None:
                    missing.setdefault(column, "" if column == name else f" that '{name}' is made from")
        return missing


def _told(encoder: Encoder) -> dict[str, object]:
    """An encoder as the file keeps it, without what goes without saying."""
    defaults = {name: field.default for name, field in type(encoder).model_fields.items() if name != "kind"}
    told = encoder.model_dump(mode="json").items()
    return {name: value for name, value in told if name not in defaults or getattr(encoder, name) != defaults[name]}


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
    if is_text(flat.type):
        kept = pc.and_(kept, pc.fill_null(pc.not_equal(flat, ""), False))
    mask = kept.to_numpy(zero_copy_only=False)
    return flat.filter(kept), np.concatenate([np.zeros(1, np.int64), np.cumsum(mask)])[offsets]


def _of_known(
    values: NDArray[np.generic],
    ids: Ids,
    offsets: NDArray[np.int64],
    length: int,
    keep: Literal["first", "last"] = "last",
) -> Lists:
    """Lists of the values that stand beside known ids, each cut to its first or last `length`."""
    known = ids != UNKNOWN
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(known)])
    return cut(values[known], before[offsets], length, keep)


def cut(values: NDArray[np.generic], offsets: NDArray[np.int64], length: int, keep: Literal["first", "last"]) -> Lists:
    """Lists, each cut to its first or last `length` values."""
    counts = np.diff(offsets)
    if not len(counts) or counts.max() <= length:
        return values, offsets
    ends = offsets[:-1] if keep == "first" else offsets[1:] - 1
    kept = np.abs(np.arange(len(values)) - np.repeat(ends, counts)) < length
    return values[kept], np.concatenate([np.zeros(1, np.int64), np.cumsum(np.minimum(counts, length))])


# --- raw values of any type as arrow arrays --------------------------------------------------------------------------


def as_column(values: Sequence[object]) -> pa.Array:
    """Raw values as JSON gives them; numbers and texts together become texts."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([_text(value) for value in values], pa.string())


def _arrow(values: RawValues) -> pa.Array:
    if not isinstance(values, (pa.Array, pa.ChunkedArray)):
        values = as_column(values)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if isinstance(values, pa.ChunkedArray):
        values = combined(values)
    return values.cast(pa.int64()) if pa.types.is_boolean(values.type) else values


def combined(column: pa.ChunkedArray) -> pa.Array:
    """All of a column in one array, which holds more than 2 GiB of text if need be."""
    return widened(column).combine_chunks()


def widened(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column whose text can be copied into one array: beyond 2 GiB as large_string, in lists too."""
    held = column.type.value_type if _is_list(column.type) else column.type
    if not pa.types.is_string(held) or column.nbytes <= TEXT_BYTES:
        return column
    return column.cast(pa.large_string() if is_text(column.type) else pa.large_list(pa.large_string()))


def _narrowed(array: pa.Array) -> pa.Array:
    """The array as string if its text fits, so that a vocabulary's type depends on its own size alone."""
    if not pa.types.is_large_string(array.type) or array.nbytes > TEXT_BYTES:
        return array
    return array.cast(pa.string())


def in_strings(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """What `widened` made as it was before, in more pieces: a file does not show how its text was held."""
    held = column.type.value_type if _is_list(column.type) else column.type
    if not pa.types.is_large_string(held):
        return column
    kind = pa.string() if is_text(column.type) else pa.list_(pa.string())
    if column.nbytes <= TEXT_BYTES or len(column) < 2:
        return column.cast(kind)
    half = len(column) // 2
    return pa.chunked_array([*in_strings(column[:half]).chunks, *in_strings(column[half:]).chunks], kind)


def _text(value: object) -> str | None:
    if value is None:
        return None
    return str(int(value)) if isinstance(value, bool) else str(value)


def _whole_or_text(array: pa.Array) -> pa.Array:
    """The array as int64 where its type is a whole number, else as text."""
    whole = pa.types.is_integer(array.type) and not pa.types.is_uint64(array.type)
    return array.cast(pa.int64()) if whole else _as_text(array)


def _as_text(array: pa.Array) -> pa.Array:
    if is_text(array.type):
        return array
    if pa.types.is_floating(array.type):  # 42.0 is how a table with gaps spells 42, and NaN how it spells a gap
        whole = _as_int64(array)
        known = pc.if_else(pc.is_nan(array), None, array)
        return pc.coalesce(whole.cast(pa.string()), known.cast(pa.string()))
    if pa.types.is_nested(array.type):
        held = "lists" if _is_list(array.type) else "objects"
        raise DataError(f"holds {held}; expected one value a row")
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
    if pa.types.is_nested(array.type):
        held = "lists" if _is_list(array.type) else "objects"
        raise DataError(f"holds {held}; expected one value a row")
    text = _without_words(pc.utf8_trim_whitespace(_as_text(array)))
    digits = pc.match_substring_regex(text, r"^-?[0-9]{1,18}(\.0+)?$")
    text = pc.replace_substring_regex(text, r"\.0+$", "")
    return pc.if_else(pc.fill_null(digits, False), text, None).cast(pa.int64())


def _as_numbers(array: pa.Array) -> NDArray[np.float64]:
    """Numbers as float64, NaN where one is missing."""
    if is_text(array.type):
        text = pc.utf8_trim_whitespace(array)
        array = pc.if_else(pc.equal(text, ""), None, text)
    try:
        numbers: NDArray[np.float64] = _cast_to_numbers(array).to_numpy(zero_copy_only=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise DataError.of("numbers", _not_numbers(array)) from None
    infinite = np.flatnonzero(np.isinf(numbers))
    if len(infinite):
        raise DataError(f"row {infinite[0] + 1} is infinite; expected a finite number")
    return numbers


def _cast_to_numbers(array: pa.Array) -> pa.Array:
    try:
        return array.cast(pa.float64())
    except pa.ArrowInvalid:
        if not is_text(array.type):
            raise
        return _without_words(array.cast(pa.string())).cast(pa.float64())


def _without_words(texts: pa.Array) -> pa.Array:
    """Texts of numbers with 1 and 0 in place of true and false, and null in place of what says missing."""
    lowered = pc.utf8_lower(texts)
    for word, number in TRUTH.items():
        texts = pc.if_else(pc.fill_null(pc.equal(lowered, word), False), str(number), texts)
    return pc.if_else(pc.is_in(lowered, pa.array(MISSING_NUMBERS)), None, texts)


_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)
"""Python's float takes more, such as `1_000` and digits of other scripts."""


def _not_numbers(array: pa.Array) -> list[str]:
    problems = []
    for row, value in enumerate(array.to_pylist(), 1):
        text = str(value).strip()
        if value is not None and text.lower() not in (*MISSING_NUMBERS, *TRUTH) and not _NUMBER.fullmatch(text):
            problems.append(f"row {row} is {text[:60]!r}; expected a number")
        if len(problems) == 3:
            break
    return problems or [f"holds {array.type}; expected numbers"]


def is_text(kind: pa.DataType) -> bool:
    """Whether a type is text, of whatever size."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
