"""Dataset summary: what each split and feature of a prepared dataset holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from recspec.data.storage import Array, Columns, Ragged, open_split
from recspec.feature_spec import NO_FILES, Feature, FeatureSpec

COUNTED_IDS = 1 << 28  # largest id whose distinct values are counted: a byte for each id up to it

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)


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
