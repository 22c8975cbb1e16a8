"""Random data of a specification's shape, for benchmarks, tests and a first look at a model.

Ids are uniform or follow a power law, as real ids do: a few items get most of the clicks. Lists vary in length, numbers
are uniform, and labels are 0 or 1 at random. A model learns nothing here; `datasets/synthetic.py` makes learnable data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recspec.errors import SettingsError
from recspec.spec import SPLITS, ChunkType, Feature, FeatureSpec
from recspec.storage.chunk_file import BLOCK_ROWS
from recspec.storage.dataset_writer import new_dataset, write_dataset
from recspec.storage.formats import feature_to_write
from recspec.storage.ragged import Array, Column, Columns, Ragged, offsets_of, ragged_range

Distribution = Literal["uniform", "power_law"]

CRITEO_ALPHA = 1.45  # the exponent that made DLRM's synthetic ids look like Criteo's
_EXACT = {"bool": 2, "float16": 2**11, "float32": 2**24, "float64": 2**53} | {
    name: int(np.iinfo(name).max) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
}  # how many whole numbers from 0 on each type tells apart
_ABOUT_REAL_DATA = ("catalogues", "encoders", "vocabularies", "summary", "dataset")


def synthesize(
    spec: FeatureSpec,
    out: str | Path,
    rows: int | Mapping[str, int],
    *,
    type: ChunkType = "parquet",
    seed: int = 0,
    distribution: Distribution = "uniform",
    alpha: float = CRITEO_ALPHA,
    cardinality: int = 1000,
    progress: Callable[[int, int], None] | None = None,
) -> FeatureSpec:
    """Write random data with the features, channels and splits of `spec`, whose own files need not exist.

    `rows` is the number for each split, or for train; then the other splits get a tenth. A specification without splits
    gets train, valid and test. A feature with its own `alpha` follows a power law whatever the `distribution`.
    `cardinality` replaces a cardinality of `auto`. If the metadata has `test_samples_per_series`, valid and test hold
    such series: one user each, the positive first. Their rows are rounded down to whole series (at least one). Memory
    does not grow with the rows.

    Raises:
        DataError: an `out` that holds a dataset already.
        SettingsError: a number of rows below 1, an alpha not above 0.
    """
    counts = _counts(spec, rows)
    if alpha <= 0:
        raise SettingsError(f"alpha is {alpha}; expected a number above 0, such as {CRITEO_ALPHA}")
    shape = spec.replace(features=_resolved(spec, type, cardinality), sources={}, metadata=_metadata(spec))

    def blocks(number: int, split: str, names: tuple[str, ...]) -> Iterator[Columns]:
        random, series = np.random.default_rng([seed, number]), _series_length(spec, split)
        step = max(1, BLOCK_ROWS // series) * series
        for first in range(0, counts[split], step):
            num_rows = min(step, counts[split] - first)
            yield _Rows(spec, shape, random, distribution, alpha, first, num_rows, series).of(names)

    held = {split: spec.columns(split) if split in spec.splits else tuple(spec.features) for split in counts}
    splits = {split: (names, blocks(number, split, names)) for number, (split, names) in enumerate(held.items())}
    with new_dataset(out) as folder:
        written = write_dataset(shape, folder, type, splits, sum(counts.values()), progress=progress)
    return written.replace(folder=Path(out))


def power_law(random: np.random.Generator, size: int, num_ids: int, alpha: float) -> NDArray[np.int64]:
    """Ids in [0, num_ids) of which 0 is the most frequent.

    The inverse distribution function of a Pareto law with exponent alpha, cut to [1, K) for K = num_ids + 1, at
    uniform u: x = (1 - u (1 - K^(1 - alpha)))^(1 / (1 - alpha)), or K^u for alpha = 1; the id is floor(x) - 1.
    """
    u, end = random.random(size), float(num_ids + 1)
    if alpha == 1:
        x = end**u
    else:
        x = (1 - u * (1 - end ** (1 - alpha))) ** (1 / (1 - alpha))
    ids: NDArray[np.int64] = x.astype(np.int64) - 1
    return ids.clip(0, num_ids - 1)  # rounding may reach K


def _counts(spec: FeatureSpec, rows: int | Mapping[str, int]) -> dict[str, int]:
    if isinstance(rows, int):
        rows = {split: rows if split == "train" else -(-rows // 10) for split in spec.splits or SPLITS}
    problems = [f"split '{split}': {count} rows; expected 1 or more" for split, count in rows.items() if count < 1]
    if problems:
        raise SettingsError.of("rows", problems)
    return {
        split: max(1, count // series) * series
        for split, count in rows.items()
        for series in [_series_length(spec, split)]
    }


def _series_length(spec: FeatureSpec, split: str) -> int:
    length = spec.metadata.get("test_samples_per_series", 1)
    return length if isinstance(length, int) and split in ("valid", "test") else 1


def _resolved(spec: FeatureSpec, kind: ChunkType, cardinality: int) -> dict[str, Feature]:
    """Every feature with a cardinality and a dtype; features of one vocabulary get the largest of theirs."""
    features = {}
    for name, feature in spec.features.items():
        own: int | None = None
        if feature.is_categorical:
            others = [f.cardinality for o, f in spec.features.items() if spec.vocabulary(o) == spec.vocabulary(name)]
            known = [other for other in others if isinstance(other, int)]
            own = feature.cardinality if isinstance(feature.cardinality, int) else max(known, default=cardinality)
        features[name] = feature_to_write(feature, own, kind)
    return features


def _metadata(spec: FeatureSpec) -> dict[str, object]:
    """Without the files and figures of the data that the specification described."""
    kept = {key: value for key, value in spec.metadata.items() if key not in _ABOUT_REAL_DATA}
    return {**kept, "dataset": "synthesize"}


@dataclass
class _Rows:
    """A block of random rows."""

    source: FeatureSpec
    shape: FeatureSpec
    random: np.random.Generator
    distribution: Distribution
    alpha: float
    first_row: int
    num_rows: int
    series: int

    def of(self, names: tuple[str, ...]) -> Columns:
        """The columns of these features."""
        lengths: dict[object, NDArray[np.int64]] = {}  # features of a history share the lengths of their lists
        return {name: self._column(name, lengths) for name in names}

    def _column(self, name: str, lengths: dict[object, NDArray[np.int64]]) -> Column:
        feature, roles = self.shape.features[name], set(self.shape.roles_of(name))
        if self.series > 1 and name == self.shape.label:
            return np.equal(np.arange(self.num_rows) % self.series, 0).astype(np.int8)
        once = self.series > 1 and not roles & {"item", "label"}  # one value a series, as a request has
        num_rows = self.num_rows // self.series if once else self.num_rows
        if feature.length is not None:
            key = ("history", feature.length) if roles & {"history", "negative_history"} else name
            if key not in lengths:
                lengths[key] = self.random.integers(1, feature.length + 1, num_rows)
            offsets = offsets_of(lengths[key])
            lists = Ragged(self._values(name, int(offsets[-1])), offsets)
            return _repeated(lists, self.series) if once else lists
        if once and (name == self.shape.group or self._is_user_id(name)):
            values = self._in_turn(name, num_rows)
        else:
            values = self._values(name, num_rows)
        return values.repeat(self.series) if once else values

    def _values(self, name: str, size: int) -> Array:
        feature = self.shape.features[name]
        if feature.is_categorical:
            first, num_ids = self._ids(name)
            alpha = feature.alpha or (self.alpha if self.distribution == "power_law" else None)
            if alpha is None:
                return self.random.integers(first, first + num_ids, size)
            return first + power_law(self.random, size, num_ids, alpha)
        dtype = np.dtype(feature.dtype or "float32")
        if dtype.kind == "b" or name == self.shape.label:
            return self.random.integers(0, 2, size)
        if dtype.kind in "iu":
            return self.random.integers(0, 100, size)
        return self.random.random(size, np.float32)

    def _in_turn(self, name: str, size: int) -> Array:
        """Another id for each series, so that no group holds two while there are ids left."""
        feature = self.shape.features[name]
        first, num_ids = self._ids(name) if feature.is_categorical else (0, _EXACT[feature.dtype or "float32"])
        numbers: Array = first + (np.arange(size) + self.first_row // self.series) % num_ids
        return numbers

    def _ids(self, name: str) -> tuple[int, int]:
        """The first id, 1 where 0 is kept for unknown and padding, and how many there are."""
        cardinality = self.shape.features[name].cardinality
        assert isinstance(cardinality, int)
        kept = self.source.reserves_unknown(name) and self.source.shift(name) == 0 and cardinality > 1
        return int(kept), cardinality - int(kept)

    def _is_user_id(self, name: str) -> bool:
        feature = self.shape.features[name]
        scalar_id = feature.is_categorical and not feature.is_list
        return scalar_id and "user" in self.shape.roles_of(name) and name == self.shape.user_id


def _repeated(lists: Ragged, times: int) -> Ragged:
    """Each row `times` times in a row."""
    starts, lengths = np.repeat(lists.offsets[:-1], times), np.repeat(lists.lengths, times)
    return Ragged(lists.values[ragged_range(starts, lengths)], offsets_of(lengths))
