"""The raw values of a catalogue of items, by which filters choose, and what a form needs to know about a column.

`items.parquet` holds what models read, ids and scaled numbers, and display columns. A raw value is taken from a display
column if there is one; otherwise it is decoded, as far as its encoder allows. The text of a list is cut into its
values, as the feature's encoder cuts it.

Kinds of columns: `choice` (one of a few values), `choices` (a list of them, or one text with `|` between them),
`number`, `truth` (true and false, or 1 and 0), `date`, `image` (addresses of pictures), `text`, and `other`, which no
form shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recspec.base.errors import BundleError, DataError, RequestError, listed, nearest
from recspec.data.encoding import (
    BucketEncoder,
    ClockEncoder,
    CrossEncoder,
    Encoder,
    Encoders,
    HashEncoder,
    NumberEncoder,
    ScaleEncoder,
    TextEncoder,
    VocabularyEncoder,
    combined,
    is_text,
    plain,
    split_lists,
)
from recspec.feature_spec import FeatureSpec
from recspec.inference.catalogue import is_list
from recspec.inference.filters import Filter, Mask, TestedColumn, evaluate
from recspec.inference.item_changes import BoundChanges

DISPLAYED = "_text"  # suffix of a display column whose plain name is a feature's

Column: TypeAlias = Any
"""A pyarrow array, or a chunked one (pyarrow has no types)."""

Kind = Literal["choice", "choices", "number", "truth", "date", "image", "text", "other"]
MOST_VALUES = 200
"""Values to choose from; a column with more is a text."""
SAMPLE = 1 << 16
"""Rows that decide the kind."""
LONGEST_VALUE = 100
"""Characters of a value to choose; a column with longer ones is a text."""
MANY = 5
"""Numbers between two whole ones that are this far apart are taken for whole ones, if an example is to be given."""
BETWEEN = "|"
"""What stands between the values of a list that is one text."""
DATE = r"^\d{4}-\d{2}-\d{2}([T ].*)?$"
IMAGE_NAMES = frozenset(
    f"{first}{last}"
    for first in ("image", "img", "picture", "photo", "thumbnail", "poster", "cover")
    for last in ("", "s", "_url", "_link", "_src", "url")
) | {"image_link", "product_image", "main_image", "product_image_url"}
IMAGE_ENDING = r"(?i)^https?://[^?#]+\.(png|jpe?g|gif|webp|avif)([?#].*)?$"
IMAGE_ADDRESS = r"(?i)^(https?://|data:image/(png|jpe?g|gif|webp|avif);base64,)"
"""What an address of a picture begins with."""
LONGEST_TEXT, LONGEST_LIST, LONGEST_IMAGE = 300, 20, 1 << 16
"""Characters, entries and characters of a picture that one value shows."""


class RawCatalogue:
    """Raw columns of the items of a specification, each read when it is first asked for, with what changed since.

    One class because a column is found by any of its names, and is a display column or a decoded feature.
    """

    def __init__(self, spec: FeatureSpec, encoders: Encoders | None, changes: BoundChanges | None = None) -> None:
        self._spec, self._encoders, self._changes = spec, encoders, changes
        self._first = int(spec.reserves_unknown(spec.item_id))
        self._num_known = spec.num_ids(spec.item_id) - self._first
        self.num_items = self._num_known + (0 if changes is None else len(changes.new_rows))
        self._file = spec.catalogue("item")
        self._read: dict[str, Column] = {}
        self._tested: dict[str, TestedColumn] = {}

    @property
    def columns(self) -> tuple[str, ...]:
        """Names that a filter may use."""
        return tuple(self._sources)

    @property
    def distinct(self) -> tuple[str, ...]:
        """Names that a filter may use, each column by one of its names alone; the id comes first."""
        kept = dict[int, str]()
        for name in (self._spec.item_id, *self._sources):
            if name in self._sources:
                plain = name.removesuffix(DISPLAYED)
                kept.setdefault(id(self._sources[name]), plain if plain in self._features else name)
        return tuple(dict.fromkeys(kept.values()))

    def kept_as(self, column: str) -> tuple[str, ...]:
        """The names by which `ItemChanges` holds a raw column of the items' file; none if it is unknown."""
        renamed = self._spec.metadata.get("item_columns")
        found = [str(renamed[column])] if isinstance(renamed, dict) and column in renamed else []
        made = self._encoders.made_from(column) if self._encoders is not None else ()
        kinds = (VocabularyEncoder, ScaleEncoder, NumberEncoder)
        for name in (column, *(name for name in made if isinstance(self._encoder(name), kinds))):
            shown = f"{name}{DISPLAYED}"
            found += [shown if shown in self._stored else name] if name in self._sources else []
        return tuple(dict.fromkeys(found))

    def num_bytes(self, name: str) -> int:
        """Bytes of a column in the file, unpacked; 0 if it is in none."""
        stored = f"{name}{DISPLAYED}" if f"{name}{DISPLAYED}" in self._stored else name
        if self._file is None or stored not in self._stored:
            return 0
        with pq.ParquetFile(self._file) as file:
            groups = [file.metadata.row_group(each) for each in range(file.metadata.num_row_groups)]
            columns = [group.column(each) for group in groups for each in range(group.num_columns)]
            return sum(each.total_uncompressed_size for each in columns if each.path_in_schema.split(".")[0] == stored)

    def mask(self, asked: str | Filter, until: float | None = None) -> Mask:
        """Whether each id (num_ids,) is an item that a filter keeps; False for ids of no item.

        Raises:
            RequestError: with every problem of the filter, or once `time.monotonic()` is past `until`.
        """
        parsed = Filter.parse(asked, self._sources) if isinstance(asked, str) else asked
        kept = evaluate(parsed, self.tested, self.num_items, until)
        return np.concatenate([np.zeros(self._first, bool), kept])

    def tested(self, name: str) -> TestedColumn:
        """A column as filters test it. Raises `RequestError` if there is none."""
        if name not in self._tested:
            self._tested[name] = TestedColumn(self.column(name))
        return self._tested[name]

    def column(self, name: str) -> Column:
        """The raw values of every item, in order of ids. Raises `RequestError` if there are none."""
        source = self._sources.get(name)
        if source is None:
            choice = f"columns of the catalogue: {listed(self._sources)}"
            if why := self._lost.get(name):
                raise RequestError(f"column '{name}' {why}, so its raw values are not known; {choice}")
            raise RequestError(f"no column '{name}'{nearest(name, self._sources)}; {choice}")
        if name not in self._read:
            self._read[name] = source()
        return self._read[name]

    @cached_property
    def _sources(self) -> dict[str, Callable[[], Column]]:
        """Each name of a column -> how the column is read."""
        found: dict[str, Callable[[], Column]] = {}
        for name in self._stored:
            if name not in self._features:
                found[name] = partial(self._shown, name)
        for name in self._features:
            encoder = self._encoder(name)
            if f"{name}{DISPLAYED}" in found:
                separator = getattr(encoder, "separator", None)
                shown = f"{name}{DISPLAYED}"
                found[name] = found[shown] if separator is None else partial(_cut, found[shown], separator)
            elif name not in self._lost:
                found[name] = partial(self._decoded, name, encoder)
            column = getattr(encoder, "column", None)
            if column is not None and name in found:
                found.setdefault(column, found[name])
        return found

    @cached_property
    def _lost(self) -> dict[str, str]:
        """Features whose raw values can't be had, and why."""
        why = {"hash": "is hashed", "bucket": "is cut into buckets", "cross": "is a cross of several columns"}
        kinds = {name: getattr(self._encoder(name), "kind", "") for name in self._features}
        lost = {name: why[kind] for name, kind in kinds.items() if kind in why}
        return {name: why for name, why in lost.items() if f"{name}{DISPLAYED}" not in self._stored}

    @cached_property
    def _stored(self) -> tuple[str, ...]:
        """The columns of the file."""
        if self._file is None:
            return ()
        try:
            with pq.ParquetFile(self._file) as file:
                if file.metadata.num_rows != self._num_known:
                    found = f"has {file.metadata.num_rows:,} rows; expected {self._num_known:,}, one for each item"
                    raise BundleError(f"{self._file}: {found}")
                return tuple(file.schema_arrow.names)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise BundleError(f"{self._file}: damaged: {error}") from None

    @cached_property
    def _features(self) -> tuple[str, ...]:
        """Features of items that the file holds, and the id."""
        features = self._spec.role("item")
        return tuple(name for name in features if name in self._stored or name == self._spec.item_id)

    def _encoder(self, name: str) -> Encoder | None:
        return self._encoders.encoders.get(name) if self._encoders is not None else None

    def _shown(self, name: str) -> Column:
        """A display column, with what changed."""
        column = self._held(name)
        return column if self._changes is None else self._changes.applied(name, column)

    def _held(self, name: str) -> Column:
        """A column of the file."""
        assert self._file is not None
        try:
            column = pq.read_table(self._file, columns=[name], partitioning=None).column(name)
            column.validate(full=True)  # refuses texts that are not UTF-8
            return column
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise BundleError(f"{self._file}: column '{name}': damaged: {error}") from None

    def _decoded(self, name: str, encoder: Encoder | None) -> Column:
        """What a feature was made from, or the feature itself where nothing encodes it; with what changed."""
        column = self._decoded_known(name, encoder)
        return column if self._changes is None else self._changes.applied(name, column)

    def _decoded_known(self, name: str, encoder: Encoder | None) -> Column:
        if name == self._spec.item_id:
            ids = pa.array(np.arange(self._first, self._first + self._num_known))
            shifted = pc.subtract(ids, self._spec.shift(name))
            return self._of_vocabulary(name, encoder, ids) if isinstance(encoder, VocabularyEncoder) else shifted
        column = self._held(name)
        array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        if isinstance(encoder, VocabularyEncoder):
            return self._of_vocabulary(name, encoder, array)
        if isinstance(encoder, (ScaleEncoder, NumberEncoder)) and not pa.types.is_nested(array.type):
            return decoded_numbers(encoder, array.to_numpy(zero_copy_only=False))
        return array

    def _of_vocabulary(self, name: str, encoder: VocabularyEncoder, ids: Column) -> Column:
        """The raw values of ids, or of lists of ids; null for unknown ones."""
        assert self._encoders is not None
        values = self._encoders.vocabularies[encoder.vocabulary].values
        lists = pa.types.is_nested(ids.type)
        places = pc.subtract((pc.list_flatten(ids) if lists else ids).cast(pa.int64()), 1)
        known = pc.and_(pc.greater_equal(places, 0), pc.less(places, len(values)))
        found = values.take(pc.if_else(known, places, None))
        if encoder.missing is not None:
            found = pc.if_else(pc.equal(found, encoder.missing), None, found)
        if not lists:
            return found
        try:
            return pa.LargeListArray.from_arrays(ids.cast(pa.large_list(ids.type.value_type)).offsets, found)
        except (pa.ArrowException, DataError) as error:
            raise BundleError(f"{self._file}: column '{name}': damaged: {error}") from None


def _cut(shown: Callable[[], Column], separator: str) -> Column:
    """A display column of texts as lists of their values; a missing text is a missing list."""
    column = shown()
    if not is_text(column.type):
        return column
    values, offsets = split_lists(combined(column), separator)
    missing = np.append(np.asarray(column.is_null()), False)
    return pa.LargeListArray.from_arrays(pa.array(offsets, mask=missing), values)


def decoded_numbers(encoder: ScaleEncoder | NumberEncoder, numbers: NDArray[Any]) -> Column:
    """The numbers that an encoder scaled, to as many digits as float32 kept; null for a scale's 0, a missing number."""
    found = numbers.astype(np.float64)
    error = np.abs(found) * 2.0**-23
    missing = np.zeros(len(found), bool)
    if isinstance(encoder, ScaleEncoder):
        missing = (found == 0) if encoder.missing is None else missing
        found, error = found * encoder.std + encoder.mean, error * encoder.std
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if encoder.log1p:
            found = np.sign(found) * np.expm1(np.abs(found))
            error = error * (1 + np.abs(found))
        elif encoder.log_plus is not None:
            found = np.exp(found) - encoder.log_plus
            error = error * np.abs(found + encoder.log_plus)
        digits = np.clip(np.floor(-np.log10(2 * error)), -15, 15)  # that the error leaves as they are
        rounded = np.round(found * 10.0**digits) / 10.0**digits
    return pa.array(np.where(np.isfinite(rounded), rounded, found), mask=missing | ~np.isfinite(found))


@dataclass(frozen=True)
class ColumnFacts:
    """A column as a form shows it."""

    name: str
    kind: Kind
    values: tuple[Any, ...] = ()
    """Of `choice` and `choices`, the most frequent first where that is known."""
    low: float | str | None = None
    high: float | str | None = None
    """The range of `number` and `date`, where it is known."""
    is_whole: bool = False
    """Whether the numbers are whole."""
    is_required: bool = False
    """Whether the model needs a value in every request."""
    example: Any = None
    """A value that the model knows, to begin with; None where there is none."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "values": list(self.values)}


# --- from the values of a catalogue ----------------------------------------------------------------------------------


def facts_of_values(name: str, column: Column) -> ColumnFacts:
    """The facts of a column from its values."""
    array = plain(pa.chunked_array([column]) if isinstance(column, pa.Array) else column)
    kind = array.type
    if pa.types.is_boolean(kind):
        return ColumnFacts(name, "truth")
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return _of_numbers(name, array)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return _of_dates(name, array.cast(pa.timestamp("us", getattr(kind, "tz", None)), safe=False))
    if is_text(kind):
        return _of_texts(name, array)
    if is_list(array):
        within = kind.value_type
        if is_text(within) or pa.types.is_integer(within):
            values = _few_values(pc.list_flatten(array))
            return ColumnFacts(name, "other" if values is None else "choices", values or ())
    return ColumnFacts(name, "other")


def _of_numbers(name: str, array: Column) -> ColumnFacts:
    values = array.drop_null().cast(pa.float64(), safe=False).to_numpy()
    values = values[np.isfinite(values)]
    if not len(values):
        return ColumnFacts(name, "other")
    low, high = float(values.min()), float(values.max())
    is_whole = bool((values == np.floor(values)).all())
    if low >= 0 and high <= 1 and is_whole:
        return ColumnFacts(name, "truth")
    return ColumnFacts(name, "number", (), low, high, is_whole)


def _of_dates(name: str, array: Column) -> ColumnFacts:
    low, high = (each.as_py() for each in pc.min_max(array).values())
    if low is None:
        return ColumnFacts(name, "other")
    return ColumnFacts(name, "date", (), f"{low:%Y-%m-%d}", f"{high:%Y-%m-%d}")


def _of_texts(name: str, array: Column) -> ColumnFacts:
    sample = array.slice(0, SAMPLE).drop_null()
    sample = sample.filter(pc.not_equal(sample, pa.scalar("", sample.type)))
    if not len(sample):
        return ColumnFacts(name, "other")
    if _all(sample, IMAGE_ADDRESS) and (name.lower() in IMAGE_NAMES or _all(sample, IMAGE_ENDING)):
        return ColumnFacts(name, "image")
    if _all(sample, DATE):
        found = pc.min_max(array.filter(pc.match_substring_regex(array, DATE)))
        return ColumnFacts(name, "date", (), *(found[each].as_py()[:10] for each in ("min", "max")))
    if pc.any(pc.match_substring(sample, BETWEEN)).as_py() and _few_values(_parted(sample)) is not None:
        values = _few_values(_parted(array))
        return ColumnFacts(name, "text" if values is None else "choices", values or ())
    values = _few_values(sample) and _few_values(array)
    return ColumnFacts(name, "choice" if values else "text", values or ())


def _all(texts: Column, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(texts, pattern)).as_py())


def _parted(texts: Column) -> Column:
    return pc.list_flatten(pc.split_pattern(texts, BETWEEN))


def _few_values(array: Column) -> tuple[Any, ...] | None:
    """The distinct values, most frequent first; None if there are many, or hardly any is there twice."""
    counts = pc.value_counts(array.drop_null())
    values, numbers = counts.field(0), counts.field(1).to_numpy(zero_copy_only=False)
    texts = is_text(values.type)
    if texts and len(values):
        kept = pc.not_equal(values, pa.scalar("", values.type))
        values, numbers = values.filter(kept), numbers[kept.to_numpy(zero_copy_only=False)]
    if not 0 < len(values) <= MOST_VALUES or 2 * len(values) > numbers.sum():
        return None
    if texts and pc.max(pc.utf8_length(values)).as_py() > LONGEST_VALUE:
        return None
    order = sorted(range(len(values)), key=lambda place: (-int(numbers[place]), str(values[place])))
    return tuple(values.take(pa.array(order)).to_pylist())


# --- from what encodes a request -------------------------------------------------------------------------------------


def facts_of_encoder(name: str, encoders: Encoders | None, *, is_required: bool = False) -> ColumnFacts:
    """The facts of a raw column of requests, from the encoder that reads it."""
    found = ColumnFacts(name, "text") if encoders is None else _of_encoder(name, encoders)
    return replace(found, is_required=is_required)


def _of_encoder(name: str, encoders: Encoders) -> ColumnFacts:
    encoder = _reader(name, encoders)
    match encoder:
        case None | TextEncoder() | ClockEncoder():
            return ColumnFacts(name, "text")
        case VocabularyEncoder():
            vocabulary = encoders.vocabularies[encoder.vocabulary]
            is_list = encoder.separator is not None or encoder.length is not None
            kind: Kind = "other" if is_list else "number" if vocabulary.is_numeric else "text"
            kept = vocabulary.values[: MOST_VALUES + 1].to_pylist()
            first = None if is_list or not kept else kept[0]
            if len(kept) <= MOST_VALUES:
                values = tuple(each for each in kept if each != encoder.missing)
                return ColumnFacts(name, "choices" if is_list else "choice", values, example=first)
            return ColumnFacts(name, kind, is_whole=vocabulary.is_numeric, example=first)
        case BucketEncoder():
            return ColumnFacts(name, "number")
        case ScaleEncoder() | NumberEncoder():
            if getattr(encoder, "length", None) is not None:
                return ColumnFacts(name, "other")
            return ColumnFacts(name, "number", (), encoder.low, encoder.high, example=_usual(encoder))
        case CrossEncoder():
            is_number = name in encoder.boundaries or name in encoder.whole
            return ColumnFacts(name, "number" if is_number else "text", is_whole=name in encoder.whole)
        case HashEncoder():
            kind = "number" if encoder.whole else "other" if encoder.length is not None else "text"
            return ColumnFacts(name, kind, is_whole=encoder.whole)
    return ColumnFacts(name, "other")  # a vector


def _usual(encoder: ScaleEncoder | NumberEncoder) -> float | None:
    """The mean of the numbers in train, before they were scaled, to three digits; None if it is not known."""
    if not isinstance(encoder, ScaleEncoder):
        return encoder.low
    found = float(encoder.mean)
    if encoder.log1p:
        found = float(np.sign(found) * np.expm1(min(abs(found), 50.0)))
    elif encoder.log_plus is not None:
        found = float(np.exp(min(found, 50.0))) - encoder.log_plus
    if encoder.low is not None and encoder.high is not None and encoder.high - encoder.low >= MANY:
        are_whole = encoder.low.is_integer() and encoder.high.is_integer()
        return float(round(found)) if are_whole else float(f"{found:.3g}")
    return float(f"{found:.3g}")


def _reader(name: str, encoders: Encoders) -> Encoder | None:
    """The encoder that tells most about a raw column: its own, else a cross's."""
    own = encoders.encoders.get(name)
    if own is not None and not isinstance(own, CrossEncoder):
        return own
    of_column = [each for each in encoders.encoders.values() if getattr(each, "column", None) == name]
    crossed = [each for each in encoders.encoders.values() if isinstance(each, CrossEncoder) and name in each.columns]
    return next(iter([*sorted(of_column, key=lambda each: each.kind == "bucket"), *crossed]), None)


# --- values of items -------------------------------------------------------------------------------------------------


def shown_values(facts: ColumnFacts, values: Sequence[Any]) -> list[Any]:
    """Values as JSON has them: texts and lists cut short, times as texts, and only allowed addresses of pictures."""
    return [_shown(facts, value) for value in values]


def _shown(facts: ColumnFacts, value: Any) -> Any:
    if facts.kind == "image":
        is_one = isinstance(value, str) and len(value) <= LONGEST_IMAGE and re.match(IMAGE_ADDRESS, value)
        return value if is_one else None
    if facts.kind == "truth" and value is not None:
        return bool(value)
    if facts.kind == "choices" and isinstance(value, str):
        value = [each for each in value.split(BETWEEN) if each]
    if isinstance(value, list):
        return [_scalar(each) for each in value[:LONGEST_LIST]]
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return value if len(value) <= LONGEST_TEXT else value[: LONGEST_TEXT - 1] + "…"
    if hasattr(value, "isoformat"):
        return value.isoformat()
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if np.isfinite(number) else None
