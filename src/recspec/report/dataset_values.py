"""Values of a dataset's features as the raw files hold them: the most frequent ones, and ranges of numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recspec.base.errors import RecspecError
from recspec.data.encoding import (
    BucketEncoder,
    Encoder,
    Encoders,
    NumberEncoder,
    ScaleEncoder,
    VocabularyEncoder,
    raw_values,
)
from recspec.data.storage import Ragged, open_split
from recspec.feature_spec import FeatureSpec
from recspec.report.dataset_figures import BLOCK, num_ids, sample

TOP = 10
MOST_COUNTED = 1 << 22
"""Ids of a feature whose values are counted: 32 MB."""
TITLES = ("title", "name", "product_title")


@dataclass(frozen=True)
class TopValues:
    """The most frequent values of a categorical feature."""

    values: tuple[tuple[str, int], ...]
    """Each value and how often it occurs."""
    total: int
    distinct: int
    unknown: int
    """Values with id 0: missing or unknown ones, where the dataset has such an id."""


@dataclass(frozen=True)
class Numbers:
    """A numerical feature of single values, in the units of the raw files.

    A prepared dataset does not mark missing numbers: each holds what `fill_of` gives. Where that is the mean, these
    rows are left out of everything below, because few real values are exactly the mean.
    """

    quantiles: tuple[float, ...]
    """Least, lower quarter, median, upper quarter, largest."""
    mean: float
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    is_raw: bool
    """Whether the units are those of the raw files; otherwise they are the prepared ones."""
    filled: float | None
    """Share of all rows that hold exactly what a missing value becomes; None if nothing tells what that is."""


class RawNames:
    """What prepared ids stand for, as far as the dataset's folder tells."""

    def __init__(self, spec: FeatureSpec) -> None:
        self.spec = spec
        try:
            self.encoders = Encoders.load(spec.folder) if spec.metadata.get("encoders") else None
        except RecspecError:
            self.encoders = None
        self.titles = self._titles()

    def encoder(self, name: str) -> Encoder | None:
        """How a feature was made."""
        return self.encoders.encoders.get(name) if self.encoders is not None else None

    def of(self, name: str, ids: NDArray[np.int64]) -> list[str]:
        """The raw value of each id of a feature, with the title of an item."""
        encoder = self.encoder(name)
        if isinstance(encoder, VocabularyEncoder) and self.encoders is not None:
            known = self.encoders.vocabulary_of(name)
            inside = np.where((ids > 0) & (ids <= len(known)), ids, 0)
            raw = [
                str(each) if each is not None else f"id {number}"
                for each, number in zip(known.decode(inside).to_pylist(), ids.tolist(), strict=True)
            ]
        elif isinstance(encoder, BucketEncoder):
            raw = [_bucket(encoder, number) for number in ids.tolist()]
        else:
            raw = [str(number - self.spec.shift(name)) for number in ids.tolist()]
        if self.titles is not None and name == self._item:
            told = [self._title(number) for number in ids.tolist()]
            raw = [f"{title} ({each})" if title else each for title, each in zip(told, raw, strict=True)]
        return raw

    @property
    def _item(self) -> str | None:
        try:
            return self.spec.item_id
        except RecspecError:
            return None

    def _title(self, number: int) -> str | None:
        assert self.titles is not None
        assert self._item is not None
        row = number - int(self.spec.reserves_unknown(self._item))
        return self.titles[row].as_py() if 0 <= row < len(self.titles) else None

    def _titles(self) -> pa.ChunkedArray | None:
        try:
            file = self.spec.catalogue("item")
            held = pq.read_schema(file).names if file is not None else []
            name = next((each for each in TITLES if each in held), None)
            return name and pq.read_table(file, columns=[name], partitioning=None).column(0).cast("string")
        except (RecspecError, OSError, pa.ArrowException):
            return None


def top_values(
    spec: FeatureSpec, split: str, names: RawNames, only: Collection[str] | None = None
) -> dict[str, TopValues]:
    """The most frequent values of each categorical feature that models read, in a split's rows.

    Hashed features are left out, because nothing tells what their ids stand for; so are those of very many ids.
    """
    wanted = [name for name in spec.inputs(categorical=True) if only is None or name in only]
    held = [
        name
        for name in spec.columns(split)
        if name in wanted and num_ids(spec, name) <= MOST_COUNTED and not _is_hashed(names.encoder(name))
    ]
    counts = {name: np.zeros(spec.num_ids(name), np.int64) for name in held}
    for block in open_split(spec, split, held).batches(BLOCK) if held else ():
        for name in held:
            column: Any = block[name]
            values = column.values if isinstance(column, Ragged) else column
            counts[name] += np.bincount(values.astype(np.int64), minlength=len(counts[name]))
    return {name: _top(spec, name, of, names) for name, of in counts.items()}


def numbers_of(spec: FeatureSpec, split: str, names: RawNames) -> Mapping[str, Numbers]:
    """The distribution of each numerical feature of single values that models read."""
    held = [name for name in spec.inputs(categorical=False, is_list=False) if name in spec.columns(split)]
    if not held:
        return {}
    found = {}
    for name, column in sample(spec, split, held).items():
        encoder, stored = names.encoder(name), np.asarray(column)
        fill = fill_of(encoder)
        filled = None if fill is None else stored == fill
        if filled is not None and _fills_by_mean(encoder) and not filled.all():
            stored = stored[~filled]
        values, is_raw = _unscaled(encoder, stored.astype(np.float64))
        values = values[np.isfinite(values)]
        if len(values):
            counts, edges = np.histogram(values, 24)
            cuts = np.quantile(values, (0, 0.25, 0.5, 0.75, 1)).tolist()
            found[name] = Numbers(
                tuple(cuts),
                float(values.mean()),
                tuple(edges.tolist()),
                tuple(counts.tolist()),
                is_raw,
                None if filled is None else float(filled.mean()),
            )
    return found


def fill_of(encoder: Encoder | None) -> np.float32 | None:
    """The prepared number that stands for a missing one; None if nothing tells."""
    if not isinstance(encoder, (NumberEncoder, ScaleEncoder)):
        return None
    return np.float32(raw_values.encode_numbers(encoder, np.array([np.nan]))[0])


def _fills_by_mean(encoder: Encoder | None) -> bool:
    return isinstance(encoder, ScaleEncoder) and encoder.missing is None


def _is_hashed(encoder: Encoder | None) -> bool:
    return encoder is not None and encoder.kind in ("hash", "cross")


def _top(spec: FeatureSpec, name: str, counts: NDArray[np.int64], names: RawNames) -> TopValues:
    reserved = spec.reserves_unknown(name)
    order = np.argsort(-counts, kind="stable")
    order = order[counts[order] > 0]
    unknown = int(counts[0]) if reserved and len(counts) else 0
    known = order[order > 0] if reserved else order
    best = known[:TOP]
    told = zip(names.of(name, best.astype(np.int64)), counts[best].tolist(), strict=True)
    return TopValues(tuple(told), int(counts.sum()), len(known), unknown)


def _bucket(encoder: BucketEncoder, number: int) -> str:
    cuts = encoder.boundaries
    if number <= 0 or not cuts:
        return f"id {number}"
    if number == 1:
        return f"below {cuts[0]:g}"
    if number > len(cuts):
        return f"{cuts[-1]:g} and more"
    return f"{cuts[number - 2]:g} to below {cuts[number - 1]:g}"


def _unscaled(encoder: Encoder | None, values: NDArray[np.float64]) -> tuple[NDArray[np.float64], bool]:
    """Numbers in the units of the raw files, where the encoder can be undone."""
    if encoder is None or encoder.kind not in ("scale", "number"):
        return values, False
    if isinstance(encoder, ScaleEncoder):
        values = values * encoder.std + encoder.mean
    if encoder.log1p:
        values = np.sign(values) * np.expm1(np.abs(values))
    elif encoder.log_plus is not None:
        values = np.exp(values) - encoder.log_plus
    widest = float(np.nanmax(np.abs(values), initial=0.0))
    digits = 5 - int(np.floor(np.log10(widest))) if 0 < widest < np.inf else 0  # float32 holds about seven digits
    return np.round(values, max(digits, 0)) + 0.0, True
