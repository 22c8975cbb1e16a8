"""Dataset summary: what each split and feature of a prepared dataset holds.

Also values as the raw files hold them: the most frequent ones, and ranges of numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recspec.base.errors import RecspecError
from recspec.data.encoding import (
    BucketEncoder,
    ClockEncoder,
    Encoder,
    Encoders,
    NumberEncoder,
    ScaleEncoder,
    VocabularyEncoder,
    raw_values,
)
from recspec.data.storage import Array, Columns, Ragged, open_split
from recspec.feature_spec import NO_FILES, Feature, FeatureSpec
from recspec.report.dataset_figures import BLOCK, num_ids, sample

COUNTED_IDS = 1 << 28  # largest id whose distinct values are counted: a byte for each id up to it

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)

TOP = 10
MOST_COUNTED = 1 << 22
"""Ids of a feature whose values are counted: 32 MB."""
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
TITLES = ("title", "name", "product_title")


@dataclass(frozen=True)
class SplitCard:
    """One split: how much it holds."""

    rows: int
    files: int
    bytes: int
    label_mean: float | None
    """Mean of the label: the share of positives where it is 0 or 1. None where the split has no label."""


@dataclass(frozen=True)
class FeatureCard:
    """One feature over all splits, as it is stored: ids are not shifted."""

    roles: tuple[str, ...]
    dtype: str
    cardinality: int | str | None
    vocabulary: str | None
    length: int | None
    vector: bool | None  # whether every row holds exactly `length` numbers; None where it is no vector
    minimum: float | None  # None where a list feature holds no value at all
    maximum: float | None
    mean: float | None  # of numbers; None for ids
    distinct: int | None
    """Different ids that occur; None for numbers, without files, and where ids are too large to be counted."""
    zero_share: float | None  # share of values that are 0: of ids in data prepared by recspec, the unknown ones
    list_lengths: Mapping[str, float] | None  # for a list, quantiles of the values a row holds and their mean


@dataclass(frozen=True)
class Card:
    """A dataset's figures."""

    folder: str
    splits: Mapping[str, SplitCard]
    features: Mapping[str, FeatureCard]
    notes: tuple[str, ...]  # what is allowed, but perhaps not meant

    def to_dict(self) -> dict[str, object]:
        """Plain dicts, lists and numbers."""
        return asdict(self)


def describe(spec: FeatureSpec) -> Card:
    """Read a dataset once, in bounded memory, and draw its card. Without files it says what the specification does.

    Raises:
        DataError: the first values found that contradict the specification; `check` finds all.
    """
    names = {name for split in spec.splits for name in spec.columns(split)} if spec.splits else spec.features
    figures = {name: _Figures(feature) for name, feature in spec.features.items() if name in names}
    splits = {}
    for split in spec.splits:
        reader = open_split(spec, split, shifted=False)
        label_sum = 0.0
        for columns in reader.batches():
            label_sum += _add(figures, columns, spec.label)
        paths = {spec.path(file) for chunk in spec.sources[split] for file in chunk.files}
        size = sum(path.stat().st_size for path in paths)
        label_mean = label_sum / reader.num_rows if spec.label in reader.features else None
        splits[split] = SplitCard(reader.num_rows, len(paths), size, label_mean)
    features = {name: figure.card(spec, name) for name, figure in figures.items()}
    auto = [name for name, feature in spec.features.items() if feature.cardinality == "auto"]
    notes = [f"cardinality of '{name}' is auto: models need a number, which `recspec transcode` finds" for name in auto]
    return Card(str(spec.folder), splits, features, tuple(notes if spec.splits else [NO_FILES, *notes]))


def _add(figures: Mapping[str, _Figures], columns: Columns, label: str) -> float:
    """Count a block's values; the sum of its labels."""
    for name, column in columns.items():
        if isinstance(column, Ragged):
            figures[name].add_lengths(column.lengths)
        figures[name].add(column.values if isinstance(column, Ragged) else column)
    labels = columns.get(label, np.zeros(0))
    assert not isinstance(labels, Ragged)
    return float(labels.sum(dtype=np.float64))


@dataclass
class _Figures:
    """Running figures of one feature."""

    feature: Feature
    count: int = 0
    total: float = 0.0
    zeros: int = 0
    minimum: float = np.inf
    maximum: float = -np.inf
    seen: NDArray[np.bool_] | None = field(default_factory=lambda: np.zeros(0, np.bool_))
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))  # rows of each list length

    def add(self, values: Array) -> None:
        if not len(values):
            return
        self.count += len(values)
        self.zeros += len(values) - int(np.count_nonzero(values))
        self.minimum = min(self.minimum, values.min().item())
        self.maximum = max(self.maximum, values.max().item())
        if self.feature.is_categorical:
            self._mark(values)
        else:
            self.total += float(values.sum(dtype=np.float64))

    def add_lengths(self, lengths: NDArray[np.int64]) -> None:
        counts = np.bincount(lengths, minlength=len(self.lengths))
        counts[: len(self.lengths)] += self.lengths
        self.lengths = counts

    def _mark(self, ids: Array) -> None:
        if self.seen is None or self.maximum >= COUNTED_IDS:
            self.seen = None
            return
        if self.maximum >= len(self.seen):
            declared = self.feature.cardinality if isinstance(self.feature.cardinality, int) else 0
            grown = np.zeros(min(COUNTED_IDS, max(declared, 2 * int(self.maximum) + 1)), np.bool_)
            grown[: len(self.seen)] = self.seen
            self.seen = grown
        self.seen[ids] = True

    def card(self, spec: FeatureSpec, name: str) -> FeatureCard:
        feature, some = self.feature, self.count > 0
        read = some or bool(self.lengths.any())
        return FeatureCard(
            roles=spec.roles_of(name),
            dtype=str(spec.storage_dtype(name)),
            cardinality=feature.cardinality,
            vocabulary=spec.vocabulary(name) if feature.is_categorical else None,
            length=feature.length,
            vector=feature.vector,
            minimum=self.minimum if some else None,
            maximum=self.maximum if some else None,
            mean=self.total / self.count if some and not feature.is_categorical else None,
            distinct=int(self.seen.sum()) if feature.is_categorical and self.seen is not None and read else None,
            zero_share=self.zeros / self.count if some else None,
            list_lengths=_quantiles(self.lengths) if feature.is_list and not feature.is_vector and read else None,
        )


def _quantiles(counts: NDArray[np.int64]) -> dict[str, float]:
    """Of a variable that was k in counts[k] cases: the least value that a share of the cases does not exceed."""
    total = int(counts.sum())
    below = np.cumsum(counts)
    ranks = {f"{share:.0%}": max(1, int(np.ceil(share * total))) for share in QUANTILES}
    found: dict[str, float] = {name: int(np.searchsorted(below, rank)) for name, rank in ranks.items()}
    return {**found, "mean": float(np.arange(len(counts)) @ counts / max(total, 1))}


# --- values ----------------------------------------------------------------------------------------------------------


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
        elif isinstance(encoder, ClockEncoder):
            names = dict(enumerate(WEEKDAYS if encoder.part == "weekday" else map("{}:00".format, range(24)), 1))
            raw = [names.get(number, "missing") for number in ids.tolist()]
        elif isinstance(encoder, BucketEncoder):
            raw = [_bucket(encoder, number) for number in ids.tolist()]
        else:
            raw = [str(number - self.spec.shift(name)) for number in ids.tolist()]
        if self.titles is not None and name == self.spec.id_of("item"):
            told = [self._title(number) for number in ids.tolist()]
            raw = [f"{title} ({each})" if title else each for title, each in zip(told, raw, strict=True)]
        return raw

    def _title(self, number: int) -> str | None:
        assert self.titles is not None
        row = number - int(self.spec.reserves_unknown(self.spec.item_id))
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
    held = [name for name in spec.columns(split) if name in wanted and num_ids(spec, name) <= MOST_COUNTED]
    held = [name for name in held if getattr(names.encoder(name), "kind", "") not in ("hash", "cross")]
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
        of_mean = isinstance(encoder, ScaleEncoder) and encoder.missing is None
        if filled is not None and of_mean and not filled.all():
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
