"""Writing a dataset again in another chunk type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from recspec.base.files import copy
from recspec.data.storage.check import companions
from recspec.data.storage.formats import feature_to_write
from recspec.data.storage.ragged import Ragged
from recspec.data.storage.reader import SplitReader, open_split
from recspec.data.storage.writer import new_dataset, write_dataset
from recspec.feature_spec import ChunkType, Feature, FeatureSpec

PREPARE_FILE = "prepare.json"  # beside a specification: the source and the settings of the prepared dataset


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
            spec.replace(features=_resolved(spec, readers, to)),
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
    """Copy `companions`. Raises `DataError` if one is missing, leads outside its folder or is a special file."""
    for name in companions(spec):
        copy(name, spec.folder, out)


def _resolved(spec: FeatureSpec, readers: Mapping[str, SplitReader], to: ChunkType) -> dict[str, Feature]:
    """The features with every dtype known, and every cardinality: an `auto` is its vocabulary's largest id plus one."""
    found = {spec.vocabulary(name): 1 for name, feature in spec.features.items() if feature.cardinality == "auto"}
    for split, reader in readers.items():
        names = [name for name in reader.features if spec.features[name].cardinality == "auto"]
        for columns in open_split(spec, split, names, shifted=False).batches() if names else ():
            for name, column in columns.items():
                values = column.values if isinstance(column, Ragged) else column
                space = spec.vocabulary(name)
                found[space] = max(found[space], int(values.max(initial=0)) + 1)
    features = {}
    for name, feature in spec.features.items():
        cardinality = found[spec.vocabulary(name)] if feature.cardinality == "auto" else feature.cardinality
        features[name] = feature_to_write(feature, cardinality, to)
    return features
