"""The kinds of encoders. Each is an entry of `encoders.json` and turns raw columns into a prepared column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, TypeAdapter, model_validator

from recspec.base.errors import DataError, unknown
from recspec.data.encoding import raw_values
from recspec.data.encoding.hashing import Prints, fingerprint64, fingerprint64_of_one
from recspec.data.encoding.raw_columns import (
    SMALL,
    RawValues,
    as_array,
    as_int64,
    as_numbers,
    as_text,
    each_once,
    is_text,
    split_lists,
    vectors_of,
)
from recspec.data.encoding.raw_values import UNKNOWN, Encoded, Ids
from recspec.data.encoding.text_vectors import TextProjection
from recspec.data.encoding.vocabulary import Vocabulary

FAR = 100.0  # standard deviations: none of 10,000 training rows can lie as far from the mean (Samuelson's inequality)
MOST_NUMBERS = 1 << 16  # of a vector
NUMBERS_AT_ONCE = 1 << 22  # of raw vectors that are held as float64
EMPTY_PRINT = fingerprint64_of_one(b"")  # of a missing text too
Printed = tuple[Prints, NDArray[np.bool_]]  # a fingerprint for each row of a column, and where it lacks a value


class _Encoder(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    strip: bool = Field(False, description="blanks around a text don't count")
    missing_values: tuple[str, ...] = Field((), description="texts that stand for a missing value")

    def present(self, values: RawValues) -> pa.Array:
        """Raw values as `prepare` read them: stripped where blanks don't count, null where a value means missing."""
        array = as_array(values)
        if is_text(array.type):
            array = pc.utf8_trim_whitespace(array) if self.strip else array
            if self.missing_values:
                array = pc.if_else(pc.is_in(array, pa.array(self.missing_values, array.type)), None, array)
        elif (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)) and self.missing_values:
            missing = pa.array(raw_values.missing_numbers(self), pa.int64())
            array = pc.if_else(pc.is_in(as_int64(array), missing), None, array) if len(missing) else array
        return array


class _OneColumn(_Encoder):
    column: str | None = Field(None, description="the raw column's name, where it is not the feature's")


class VocabularyEncoder(_OneColumn):
    """A raw value becomes its id. With a `length`, a row holds several values.

    A value that the vocabulary of V values does not hold is unknown, id 0. Imported models may give it another id:
    1 + V + fingerprint64(text) % buckets, or one id for all such values.
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
        """Likewise, with `missing` in place of missing texts."""
        array = super().present(values)
        if self.missing is None or not (is_text(array.type) or pa.types.is_null(array.type)):
            return array
        return pc.fill_null(as_text(array), self.missing)

    def ids(self, values: RawValues, vocabulary: Vocabulary) -> Ids:
        """The id of each value, one a row."""
        ids = vocabulary.encode(values)
        if not (self.buckets or self.otherwise):
            return ids
        array = as_array(values)
        keys = as_int64(array) if vocabulary.is_numeric else as_text(array)
        return raw_values.others(self, ids, keys.to_pylist(), len(vocabulary))


class HashEncoder(_OneColumn):
    """A raw value becomes 1 + fingerprint64(text) % (cardinality - 1); a missing or empty one becomes 0.

    A whole number is hashed as its decimal digits: 42, 42.0 and "42" are one value. With `whole`, "042" is that value
    too, and anything but a whole number is missing. With a `length`, a row holds several values.
    """

    kind: Literal["hash"] = "hash"
    cardinality: int = Field(ge=2, le=2**31, description="number of ids, 0 for missing values included")
    separator: str | None = Field(None, description="between the values of a list that is one text")
    length: int | None = Field(None, gt=0, description="the most values of a list that are kept, first ones first")
    whole: bool = Field(False, description="the values are whole numbers")

    def ids(self, values: RawValues) -> Ids:
        """The id of each value, one a row."""
        return each_once(as_int64(as_array(values)) if self.whole else as_array(values), self._hash)

    def _hash(self, array: pa.Array) -> Ids:
        texts = as_text(array)
        ids = raw_values.within(fingerprint64(texts), self.cardinality)
        return np.where(pc.fill_null(pc.not_equal(texts, ""), False).to_numpy(zero_copy_only=False), ids, UNKNOWN)


class BucketEncoder(_OneColumn):
    """A number becomes 1 + the number of boundaries that are at most as large; a missing one becomes 0."""

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


class ClockEncoder(_OneColumn):
    """A time becomes 1 + its hour, or 1 + its weekday from Monday on, in UTC; a missing one becomes 0."""

    kind: Literal["clock"] = "clock"
    part: Literal["hour", "weekday"]
    format: str | None = Field(None, description="how texts are written, in codes such as %d.%m.%Y %H:%M")

    @property
    def cardinality(self) -> int:
        """Number of ids, 0 for missing values included."""
        return 1 + (24 if self.part == "hour" else 7)

    def ids(self, values: pa.Array) -> Ids:
        """The id of each time: of a text, a number or a timestamp."""
        if pa.types.is_timestamp(values.type) or pa.types.is_date(values.type):
            micros = values.cast(pa.timestamp("us", getattr(values.type, "tz", None)), safe=False)
            return raw_values.clock_of(self, as_numbers(micros.cast(pa.int64())))
        if not is_text(values.type):
            return raw_values.clock_of(self, as_numbers(values))
        try:
            return each_once(values, lambda texts: raw_values.clock_ids(self, texts.to_pylist()))
        except ValueError:  # it names a place among the different texts; name the row
            try:
                return raw_values.clock_ids(self, values.to_pylist())
            except ValueError as error:
                raise DataError(str(error)) from None


class CrossEncoder(_Encoder):
    """The values of several raw columns become one id, 1 + fingerprint % (cardinality - 1), as in TensorFlow.

    Each column contributes the fingerprint of its text. A column with `boundaries` contributes its bucket instead, and
    a column of `whole` numbers the value itself. A missing value counts as the empty text, or as bucket -1, so a cross
    has no id 0; but with `needs_all`, a row that lacks a value (null, not the empty text) gets it.
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
        """The id of each row, from its values in the columns' order. Errors name a column as in `sources`."""
        found, problems = list[Printed](), list[str]()
        for name, source, part in zip(self.columns, sources or self.columns, parts, strict=True):
            try:
                found.append(self.printed(name, part))
            except DataError as error:
                problems += [f"column '{source}': {problem}" for problem in error.problems]
        DataError.refuse("raw rows", problems)
        return self.of_prints(found)

    def of_prints(self, parts: Sequence[Printed]) -> Ids:
        """The id of each row, from what `printed` gives of each column; a column of one row stands for all rows."""
        return raw_values.crossed(self, *zip(*parts, strict=True))

    def printed(self, name: str, values: RawValues) -> Printed:
        """A fingerprint for each row of one of the columns, and where it lacks a value."""
        array = as_array(values)
        if name in self.boundaries:
            numbers = as_numbers(array)
            return raw_values.bucket(self.boundaries[name], numbers).astype(np.uint64), np.isnan(numbers)
        if name in self.whole:
            array = as_int64(array)
        lacks = array.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
        if name in self.whole:
            return pc.fill_null(array, -1).to_numpy(zero_copy_only=False).astype(np.uint64), lacks
        return each_once(array, lambda each: fingerprint64(as_text(each)), EMPTY_PRINT), lacks


class _Number(_OneColumn):
    low: float | None = Field(None, description="a smaller value becomes `outside`")
    high: float | None = Field(None, description="a larger value becomes `outside`")
    outside: float | None = Field(
        0.0, description="in place of values below `low` or above `high`; null: the nearer one"
    )
    missing: float | None = Field(None, description="in place of a missing value")
    log1p: bool = Field(False, description="take the logarithm: sign(value) * ln(1 + |value|)")
    log_plus: float | None = Field(None, description="take ln(value + this); where there is none the value is missing")

    @model_validator(mode="after")
    def _one_logarithm(self) -> _Number:
        if self.log1p and self.log_plus is not None:
            raise ValueError("log1p and log_plus are two logarithms; give one of them")
        return self

    def transformed(self, values: RawValues) -> NDArray[np.float64]:
        """Numbers after low and high, then missing, then the logarithm; NaN where one stays missing."""
        return raw_values.transformed(self, as_numbers(as_array(values)))

    def is_outside(self, values: RawValues) -> NDArray[np.bool_]:
        """Which numbers lie below `low` or above `high`."""
        return raw_values.is_outside(self, as_numbers(as_array(values)))


class NumberEncoder(_Number):
    """A number stays as it is; a missing one becomes 0. With a `length`, a row holds several numbers."""

    kind: Literal["number"] = "number"
    separator: str | None = Field(None, description="between the numbers of a list that is one text")
    length: int | None = Field(None, gt=0, description="the most numbers of a list that are kept")
    keep: Literal["first", "last"] = Field("first", description="which numbers of a longer list: a history's last ones")


class ScaleEncoder(_Number):
    """A number becomes (value - mean) / std, both of the transformed values; a missing one is the mean."""

    kind: Literal["scale"] = "scale"
    mean: float
    std: float = Field(gt=0)


class VectorEncoder(_OneColumn):
    """A list of `length` numbers becomes its multiple by `scale`, which keeps its direction; a missing one zeros."""

    kind: Literal["vector"] = "vector"
    length: int = Field(gt=0, le=MOST_NUMBERS, description="how many numbers every row holds")
    scale: float = Field(1.0, gt=0, description="factor of every number")

    def vectors(self, values: RawValues) -> NDArray[np.float32]:
        """The prepared vectors (rows, length)."""
        array = as_array(values)
        made = np.empty((len(array), self.length), np.float32)
        step = max(1, NUMBERS_AT_ONCE // self.length)
        for first in range(0, len(array), step):
            vectors = vectors_of(array[first : first + step], self.length, first)
            try:
                made[first : first + step] = raw_values.encode_vectors(self, vectors, first)
            except ValueError as error:
                raise DataError(str(error)) from None
        return made


class TextEncoder(_OneColumn):
    """A text becomes a vector of `length` numbers by its words and n-grams; see `text_vectors`. A missing one zeros."""

    kind: Literal["text"] = "text"
    projection: str = Field(description="file in the folder `vocabularies`, without .parquet")
    length: int = Field(gt=0, le=MOST_NUMBERS, description="how many numbers a text becomes")
    _held: TextProjection | None = PrivateAttr(None)

    def holding(self, projection: TextProjection) -> TextEncoder:
        """The same encoder, with its projection."""
        held = self.model_copy()
        held._held = projection
        return held

    @property
    def held(self) -> TextProjection:
        """The projection, which `Encoders.load` reads."""
        assert self._held is not None, "an encoder is loaded with its projection"
        return self._held

    def vectors(self, values: RawValues) -> NDArray[np.float32]:
        """The prepared vectors (rows, length)."""
        texts = as_text(as_array(values))
        if len(texts) <= SMALL:
            return self.held.vectors(pc.fill_null(texts, "").to_pylist())
        coded = texts.dictionary_encode()
        made = self.held.vectors([*coded.dictionary.to_pylist(), ""])
        found: NDArray[np.float32] = made[pc.fill_null(coded.indices, len(made) - 1).to_numpy(zero_copy_only=False)]
        return found


Encoder = (
    TextEncoder
    | VectorEncoder
    | VocabularyEncoder
    | HashEncoder
    | BucketEncoder
    | ClockEncoder
    | CrossEncoder
    | NumberEncoder
    | ScaleEncoder
)
ENCODERS = TypeAdapter(dict[str, Annotated[Encoder, Field(discriminator="kind")]])  # what `encoders.json` holds


def encode(
    encoder: Encoder, parts: Sequence[RawValues], vocabularies: Mapping[str, Vocabulary], sources: Sequence[str] | None
) -> Encoded:
    """The prepared column that an encoder makes of its raw columns."""
    parts = [encoder.present(part) for part in parts]
    if isinstance(encoder, CrossEncoder):
        return encoder.ids(parts, sources)
    (values,) = parts
    if isinstance(encoder, (VectorEncoder, TextEncoder)):
        vectors = encoder.vectors(values)
        return vectors.reshape(-1), np.arange(len(vectors) + 1) * encoder.length
    if isinstance(encoder, (BucketEncoder, ClockEncoder, ScaleEncoder)) or (length := encoder.length) is None:
        return _encode_scalars(encoder, values, vocabularies)
    flat, offsets = split_lists(values, encoder.separator)
    if isinstance(encoder, NumberEncoder):
        return raw_values.cut(_encode_scalars(encoder, flat, vocabularies), offsets, length, encoder.keep)
    ids = _encode_scalars(encoder, encoder.present(flat), vocabularies).astype(np.int64, copy=False)
    return raw_values.of_known(ids, ids, offsets, length, getattr(encoder, "keep", "first"))


def _encode_scalars(encoder: Encoder, values: pa.Array, vocabularies: Mapping[str, Vocabulary]) -> NDArray[np.generic]:
    if isinstance(encoder, VocabularyEncoder):
        return encoder.ids(values, vocabularies[encoder.vocabulary])
    if isinstance(encoder, (ClockEncoder, HashEncoder)):
        return encoder.ids(values)
    made = raw_values.encode_numbers(encoder, as_numbers(values))
    if isinstance(encoder, BucketEncoder):
        return made
    with np.errstate(over="ignore"):  # infinite; whoever scores it says that no finite number comes of it
        return made.astype(np.float32)


def is_far(encoder: Encoder, numbers: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which numbers are `FAR` standard deviations or more from the mean of a `scale` encoder; of others none."""
    if encoder.kind != "scale":
        return np.zeros(numbers.shape, bool)
    return np.greater_equal(np.abs(raw_values.transformed(encoder, numbers) - encoder.mean), FAR * encoder.std)


MOVED = 1e-4
"""Standard deviations by which rounding may move a mean."""


@dataclass(frozen=True)
class Scaler:
    """The mean and standard deviation that a `scale` encoder takes."""

    mean: float
    std: float

    @classmethod
    def of(cls, mean: float | None, std: float | None) -> Scaler:
        """From moments, rounded so that two engines' orders of summing agree; a constant keeps std 1.

        9 digits are kept, and more of a mean that is large beside the deviation, as of order numbers or times: else the
        rounded rest would be many deviations.
        """
        mean, rounded = float(mean or 0.0), float(f"{std or 0.0:.9g}")
        rounded = rounded if rounded > 0 and np.isfinite(rounded) else 1.0
        forms = (float(f"{mean:.{digits}g}") for digits in range(9, 18))
        return cls(next((form for form in forms if abs(form - mean) <= MOVED * rounded), mean), rounded)


def vector_scale(squares: float, count: int) -> float:
    """The `scale` of vectors of `count` numbers in all with this sum of squares: their mean square becomes 1.

    So the mean squared length of a vector becomes its number of values. Rounded as `Scaler.of` rounds; vectors of
    zeros keep their scale.
    """
    mean = squares / count if count else 0.0
    return float(f"{mean**-0.5:.9g}") if mean > 0 and np.isfinite(mean) else 1.0


def _check_rising(boundaries: Sequence[float]) -> None:
    for earlier, later in pairwise(boundaries):
        if later <= earlier:
            raise ValueError(f"boundaries must rise; {later:g} follows {earlier:g}")
