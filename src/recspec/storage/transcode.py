"""Writing a dataset again in another chunk type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from recspec.files import copy
from recspec.spec import ChunkType, Feature, FeatureSpec
from recspec.storage.companions import PREPARE_FILE, copy_companions
from recspec.storage.dataset_writer import new_dataset, write_dataset
from recspec.storage.formats import feature_to_write
from recspec.storage.ragged import Ragged
from recspec.storage.reader import SplitReader, open_split


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
    metadata names are copied. Memory does not grow with the rows.

    `progress` gets the rows written and the rows in all.

    Raises:
        DataError: values that contradict the specification; an `out` that holds a dataset already.
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


def _resolved(spec: FeatureSpec, readers: Mapping[str, SplitReader], to: ChunkType) -> dict[str, Feature]:
    """The features with every cardinality and dtype known."""
    found = _found_cardinalities(spec, readers)
    features = {}
    for name, feature in spec.features.items():
        cardinality = found.get(spec.vocabulary(name), 1) if feature.cardinality == "auto" else feature.cardinality
        features[name] = feature_to_write(feature, cardinality, to)
    return features


def _found_cardinalities(spec: FeatureSpec, readers: Mapping[str, SplitReader]) -> dict[str, int]:
    """Largest id plus one of every vocabulary that has a feature whose cardinality is `auto`."""
    found: dict[str, int] = {}
    auto = [name for name, feature in spec.features.items() if feature.cardinality == "auto"]
    for split, reader in readers.items():
        names = [name for name in auto if name in reader.features]
        if not names:
            continue
        for columns in open_split(spec, split, names, shifted=False).batches():
            for name, column in columns.items():
                values = column.values if isinstance(column, Ragged) else column
                space = spec.vocabulary(name)
                found[space] = max(found.get(space, 1), int(values.max(initial=0)) + 1)
    return found
