"""Datasets made from a specification: the same rows in another chunk type, or random rows of its shape.

Random data serve benchmarks, tests and a first look at a model. Ids are uniform or follow a power law, as real ids do:
a few items get most of the clicks. Lists vary in length, numbers are uniform, and labels are 0 or 1 at random. A model
learns nothing here; `datasets/synthetic.py` makes learnable data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import SettingsError
from recspec.base.files import PathError, confined, copy, read_json
from recspec.data.storage.check import check_sidecar_files
from recspec.data.storage.chunk_file import BLOCK_ROWS
from recspec.data.storage.ragged import Array, Column, Columns, Ragged, offsets_of, ragged_range
from recspec.data.storage.splits import SplitReader, new_dataset, open_split, write_dataset
from recspec.feature_spec import SPLITS, ChunkType, Feature, FeatureSpec

# --- in another chunk type --------------------------------------------------------------------------------------------


PREPARE_FILE = "prepare.json"  # beside a specification: the source and the settings of the prepared dataset


def preparation(folder: Path) -> dict[str, object]:
    """What `prepare.json` of a dataset says; nothing if there is none, or a damaged one."""
    with suppress(PathError):
        found = read_json(confined(folder, PREPARE_FILE))
        if isinstance(found, dict):
            return found
    return {}


def transcode(
    spec: FeatureSpec,
    out: str | Path,
    to: ChunkType = "parquet",
    *,
    rows_per_file: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FeatureSpec:
    """Write a dataset again in another chunk type, with a complete specification.

    A cardinality of `auto` becomes the largest id of all splits plus one. A missing dtype becomes the narrowest integer
    for ids (int64 in `torch_tensor`, where features of one dtype share a file) and float32 for numbers. In `tfrecord`
    float64 becomes float32. Splits, channels and metadata stay, and the catalogues, vocabularies and encoders that the
    metadata names are copied. Memory does not grow with the rows. `progress` gets the rows written and the rows in all.

    Raises `DataError` for values that contradict the specification, and for an `out` that holds a dataset already.
    """
    with new_dataset(out) as folder:
        readers = {split: open_split(spec, split, shifted=False) for split in spec.splits}
        written = write_dataset(
            spec.replace(features=features_to_write(spec, _largest_ids(spec, readers), to)),
            folder,
            to,
            {split: (reader.features, reader.batches()) for split, reader in readers.items()},
            sum(reader.num_rows for reader in readers.values()),
            rows_per_file=rows_per_file,
            progress=progress,
        )
        copy_companions(spec, folder)
        if spec.beside(PREPARE_FILE).is_file():
            copy(PREPARE_FILE, spec.folder, folder)
    return written.replace(folder=Path(out))


def copy_companions(spec: FeatureSpec, out: Path) -> None:
    """Copy the sidecar files. Raises `DataError` if one is missing, leads outside its folder or is a special file."""
    for name in check_sidecar_files(spec):
        copy(name, spec.folder, out)


def _largest_ids(spec: FeatureSpec, readers: Mapping[str, SplitReader]) -> dict[str, int]:
    """The largest stored id plus one of each vocabulary whose cardinality is `auto`."""
    found = {spec.vocabulary(name): 1 for name, feature in spec.features.items() if feature.cardinality == "auto"}
    for split, reader in readers.items():
        names = [name for name in reader.features if spec.features[name].cardinality == "auto"]
        for columns in open_split(spec, split, names, shifted=False).batches() if names else ():
            for name, column in columns.items():
                values = column.values if isinstance(column, Ragged) else column
                space = spec.vocabulary(name)
                found[space] = max(found[space], int(values.max(initial=0)) + 1)
    return found


def features_to_write(spec: FeatureSpec, cardinalities: Mapping[str, int], to: ChunkType) -> dict[str, Feature]:
    """The features with every dtype known, and every cardinality: of an `auto` that of its vocabulary."""
    resolved = {
        name: cardinalities[spec.vocabulary(name)] if feature.cardinality == "auto" else feature.cardinality
        for name, feature in spec.features.items()
    }
    return {name: feature_to_write(feature, resolved[name], to) for name, feature in spec.features.items()}


def feature_to_write(feature: Feature, cardinality: int | None, to: ChunkType) -> Feature:
    """The feature with a cardinality, and a dtype that the chunk type `to` can hold."""
    dtype = feature.dtype or _narrowest(cardinality, to)
    if to == "tfrecord" and dtype == "float64":
        dtype = "float32"
    return Feature.model_validate({**feature.model_dump(), "cardinality": cardinality, "dtype": dtype})


def _narrowest(cardinality: int | None, to: ChunkType) -> str:
    if cardinality is None:
        return "float32"
    if to == "torch_tensor":
        return "int64"
    return next(name for name in ("int8", "int16", "int32", "int64") if cardinality - 1 <= np.iinfo(name).max)


# --- random data ------------------------------------------------------------------------------------------------------


Distribution = Literal["uniform", "power_law"]

CRITEO_ALPHA = 1.45  # the exponent that made DLRM's synthetic ids look like Criteo's
_EXACT = {"bool": 2, "float16": 2**11, "float32": 2**24, "float64": 2**53} | {
    name: int(np.iinfo(name).max) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
}  # how many whole numbers from 0 on each type tells apart
_ABOUT_REAL_DATA = ("catalogues", "encoders", "vocabularies", "seen", "dislikes", "summary", "dataset")


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
    does not grow with the rows. Raises `DataError` if `out` holds a dataset already, and `SettingsError` for a number
    of rows below 1 or an alpha not above 0.
    """
    counts = _counts(spec, rows)
    if alpha <= 0:
        raise SettingsError(f"alpha is {alpha}; expected a number above 0, such as {CRITEO_ALPHA}")
    metadata = {key: value for key, value in spec.metadata.items() if key not in _ABOUT_REAL_DATA}
    metadata["dataset"] = "synthesize"
    known: dict[str, int] = {}  # features of one vocabulary get the largest cardinality of theirs
    for name, feature in spec.features.items():
        if isinstance(feature.cardinality, int):
            known[spec.vocabulary(name)] = max(feature.cardinality, known.get(spec.vocabulary(name), 0))
    spaces = dict.fromkeys(map(spec.vocabulary, spec.features), cardinality) | known
    shape = spec.replace(features=features_to_write(spec, spaces, type), sources={}, metadata=metadata)

    def blocks(number: int, split: str, names: tuple[str, ...]) -> Iterator[Columns]:
        random, series = np.random.default_rng([seed, number]), _series_length(spec, split)
        rows = _Rows(spec, shape, random, alpha if distribution == "power_law" else None, series)
        step = max(1, BLOCK_ROWS // series) * series
        for first in range(0, counts[split], step):
            yield rows.columns(names, first, min(step, counts[split] - first))

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
    SettingsError.refuse("rows", problems)
    series = {split: _series_length(spec, split) for split in rows}
    return {split: max(1, count // series[split]) * series[split] for split, count in rows.items()}


def _series_length(spec: FeatureSpec, split: str) -> int:
    length = spec.metadata.get("test_samples_per_series", 1)
    return length if isinstance(length, int) and split in ("valid", "test") else 1


@dataclass(frozen=True)
class _Rows:
    """Random rows of a split, a block after another."""

    source: FeatureSpec
    shape: FeatureSpec
    random: np.random.Generator
    alpha: float | None  # None: uniform
    series: int  # rows of a series

    def columns(self, names: tuple[str, ...], first_row: int, num_rows: int) -> Columns:
        """The next block of rows, which starts at `first_row` of the split."""
        lengths: dict[object, NDArray[np.int64]] = {}  # features of a history share the lengths of their lists
        return {name: self._column(name, first_row, num_rows, lengths) for name in names}

    def _column(self, name: str, first_row: int, num_rows: int, lengths: dict[object, NDArray[np.int64]]) -> Column:
        feature, roles = self.shape.features[name], set(self.shape.roles_of(name))
        if self.series > 1 and name == self.shape.label:
            return np.equal(np.arange(num_rows) % self.series, 0).astype(np.int8)
        times = 1 if roles & {"item", "label"} else self.series  # of a request, a series has one value
        num_values = num_rows // times
        if feature.length is not None:
            key = ("history", feature.length) if roles & {"history", "negative_history"} else name
            if key not in lengths:
                shortest = feature.length if feature.is_vector else 1
                lengths[key] = self.random.integers(shortest, feature.length + 1, num_values)
            offsets = offsets_of(lengths[key])
            return _repeated(Ragged(self._values(name, int(offsets[-1])), offsets), times)
        is_user_id = feature.is_categorical and "user" in roles and name == self.shape.user_id
        if times > 1 and (name == self.shape.group or is_user_id):
            # another id for each series, so that no group holds two while there are ids left
            first, num_ids = self._ids(name) if feature.is_categorical else (0, _EXACT[feature.dtype or "float32"])
            values: Array = first + (np.arange(num_values) + first_row // self.series) % num_ids
        else:
            values = self._values(name, num_values)
        return values.repeat(times)

    def _values(self, name: str, size: int) -> Array:
        feature = self.shape.features[name]
        if feature.is_categorical:
            first, num_ids = self._ids(name)
            alpha = feature.alpha or self.alpha
            if alpha is None:
                return self.random.integers(first, first + num_ids, size)
            return first + power_law(self.random, size, num_ids, alpha)
        dtype = np.dtype(feature.dtype or "float32")
        if dtype.kind == "b" or name in self.shape.labels:
            return self.random.integers(0, 2, size)
        if dtype.kind in "iu":
            return self.random.integers(0, 100, size)
        return self.random.random(size, np.float32)

    def _ids(self, name: str) -> tuple[int, int]:
        """The first id, 1 where 0 is kept for unknown and padding, and how many there are."""
        cardinality = self.shape.features[name].cardinality
        assert isinstance(cardinality, int)
        kept = int(self.source.reserves_unknown(name) and self.source.shift(name) == 0 and cardinality > 1)
        return kept, cardinality - kept


def _repeated(lists: Ragged, times: int) -> Ragged:
    """Each row `times` times in a row."""
    starts, lengths = np.repeat(lists.offsets[:-1], times), np.repeat(lists.lengths, times)
    return Ragged(lists.values[ragged_range(starts, lengths)], offsets_of(lengths))
