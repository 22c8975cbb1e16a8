"""The raw values of a catalogue of items, by which filters choose.

`items.parquet` holds what models read, ids and scaled numbers, and display columns. A raw value is taken from a display
column if there is one; otherwise it is decoded, as far as its encoder allows. The text of a list is cut into its
values, as the feature's encoder cuts it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recspec.base.errors import BundleError, DataError, RequestError, listed, nearest
from recspec.data.encoding import (
    Encoder,
    Encoders,
    NumberEncoder,
    ScaleEncoder,
    VocabularyEncoder,
    combined,
    is_text,
    split_lists,
)
from recspec.feature_spec import FeatureSpec
from recspec.inference.filter_columns import Mask, TestedColumn, evaluate
from recspec.inference.filters import Filter

DISPLAYED = "_text"  # suffix of a display column whose plain name is a feature's

Column: TypeAlias = Any
"""A pyarrow array, or a chunked one (pyarrow has no types)."""


class RawCatalogue:
    """Raw columns of the items of a specification, each read when it is first asked for."""

    def __init__(self, spec: FeatureSpec, encoders: Encoders | None) -> None:
        self._spec, self._encoders = spec, encoders
        self._first = int(spec.reserves_unknown(spec.item_id))
        self.num_items = spec.num_ids(spec.item_id) - self._first
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
        """How each column is read, by every name that it goes by."""
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
                if file.metadata.num_rows != self.num_items:
                    found = f"has {file.metadata.num_rows:,} rows; expected {self.num_items:,}, one for each item"
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
        assert self._file is not None
        try:
            column = pq.read_table(self._file, columns=[name], partitioning=None).column(name)
            column.validate(full=True)  # refuses texts that are not UTF-8
            return column
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise BundleError(f"{self._file}: column '{name}': damaged: {error}") from None

    def _decoded(self, name: str, encoder: Encoder | None) -> Column:
        """What a feature was made from, or the feature itself where nothing encodes it."""
        if name == self._spec.item_id:
            ids = pa.array(np.arange(self._first, self._first + self.num_items))
            shifted = pc.subtract(ids, self._spec.shift(name))
            return self._of_vocabulary(name, encoder, ids) if isinstance(encoder, VocabularyEncoder) else shifted
        column = self._shown(name)
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
