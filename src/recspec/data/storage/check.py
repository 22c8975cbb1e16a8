"""Checks of a prepared dataset: every file is read once and compared with the specification."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recspec.base.errors import DataError, RecspecError, how_many, nearest
from recspec.base.files import confined
from recspec.data.encoding import (
    ENCODERS_FILE,
    VOCABULARIES,
    Encoder,
    TextEncoder,
    VectorEncoder,
    VocabularyEncoder,
    read_encoders,
    repeated,
)
from recspec.data.storage.chunk_file import BLOCK_ROWS, ColumnPlan, Findings, sentences
from recspec.data.storage.seen_file import read_seen
from recspec.data.storage.splits import length_problems, open_chunks, open_split, published_records
from recspec.feature_spec import FeatureSpec


def check(spec: FeatureSpec) -> None:
    """Read every file of a dataset once, in bounded memory. Raises `DataError` with every problem and its place.

    Problems are files that are missing or of another format, chunks of unequal length, empty splits; values of a wrong
    type, ids outside [0, cardinality), numbers that are not finite or don't fit; series that do not divide valid and
    test; catalogues and vocabularies that are missing or of another length than their ids.
    """
    problems: list[str] = []
    for split in spec.splits:
        found, num_rows = check_split(spec, split)
        problems += [*found, *_series_problems(spec, split, num_rows)]
    try:
        check_sidecar_files(spec)
        read_seen(spec)
        read_seen(spec, named="dislikes")
    except DataError as error:
        problems += error.problems or [str(error)]
    problems += companion_problems(spec)
    if problems:
        raise DataError.of(str(spec.folder), [*published_records(spec, problems), *problems])


def count_rows(spec: FeatureSpec) -> dict[str, int]:
    """Rows of each split, without reading their values."""
    return {split: open_split(spec, split).num_rows for split in spec.splits}


def _series_problems(spec: FeatureSpec, split: str, num_rows: int | None) -> Iterator[str]:
    series = spec.metadata.get("test_samples_per_series")
    if isinstance(series, int) and split in ("valid", "test") and num_rows is not None and (left := num_rows % series):
        expected = f"not a multiple of metadata.test_samples_per_series = {series}"
        yield f"split '{split}' has {num_rows} rows, {expected}: {how_many(left, 'row')} left over"


def check_split(spec: FeatureSpec, split: str) -> tuple[list[str], int | None]:
    """Read every value of a split once, in bounded memory: all problems, and its rows where all chunks agree."""
    findings: Findings = {}
    chunks = open_chunks(spec, split, findings)
    lengths = [] if findings else length_problems(split, chunks)
    for chunk in chunks:
        plans = [ColumnPlan.of_spec(spec, name, shifted=False) for name in chunk.chunk.features]
        for start in range(0, chunk.num_rows, BLOCK_ROWS):
            chunk.read(start, min(start + BLOCK_ROWS, chunk.num_rows), plans, findings)
    all_open = all(kind != "file" for *_, kind in findings)
    agree = all_open and len({chunk.num_rows for chunk in chunks}) == 1
    return sentences(findings) + lengths, chunks[0].num_rows if agree else None


def check_sidecar_files(spec: FeatureSpec) -> tuple[str, ...]:
    """Files and folders that the metadata of a specification names. Raises `DataError` if one is missing."""
    named = tuple(dict.fromkeys(spec.companions.values()))
    missing = [name for name in named if not spec.beside(name).exists()]
    if missing:
        here = [found.name for found in spec.folder.iterdir()] if spec.folder.is_dir() else []
        problems = [f"metadata names '{name}', which does not exist{nearest(name, here)}" for name in missing]
        raise DataError.of(str(spec.folder), problems)
    return named


def companion_problems(spec: FeatureSpec) -> list[str]:
    """Catalogues, vocabularies and encoders with other ids than the specification; missing ones are found elsewhere."""
    try:
        problems = [*_catalogue_problems(spec)]
        has_encoders = "encoders" in spec.companions and spec.beside(ENCODERS_FILE).exists()
        encoders = read_encoders(spec.folder) if has_encoders else {}
        return [*problems, *_vocabulary_problems(spec, encoders), *_encoder_problems(spec, encoders)]
    except RecspecError as error:  # a path that leads outside, a damaged file
        return [str(error)]


def _catalogue_problems(spec: FeatureSpec) -> Iterator[str]:
    for role in ("user", "item"):
        path = spec.catalogue(role)
        if path is not None and spec.role(role):  # without features of the role nothing reads the catalogue
            name = spec.user_id if role == "user" else spec.item_id
            if isinstance(spec.features[name].cardinality, int):
                first = int(spec.reserves_unknown(name))
                yield from _file_problems(spec, path, name, range(first, spec.num_ids(name)), has_ids=True)


def _vocabulary_problems(spec: FeatureSpec, encoders: Mapping[str, Encoder]) -> Iterator[str]:
    largest: dict[str, int] = {}
    for name, feature in spec.features.items():
        if isinstance(feature.cardinality, int):
            space = spec.vocabulary(name)
            largest[space] = max(largest.get(space, 0), feature.cardinality)
    encoded = {each.vocabulary for each in encoders.values() if isinstance(each, VocabularyEncoder)}
    files = {space: spec.vocabulary_file(space) for space in largest if space not in encoded}
    for space, path in files.items():
        if path is not None:
            yield from _file_problems(spec, path, space, range(1, largest[space]))


def _encoder_problems(spec: FeatureSpec, encoders: Mapping[str, Encoder]) -> Iterator[str]:
    for name, encoder in encoders.items():
        feature = spec.features.get(name)
        vector = encoder.length if isinstance(encoder, (VectorEncoder, TextEncoder)) else None
        declared = feature.length if feature is not None and feature.is_vector else None
        if feature is not None and vector != declared:
            ours, theirs = (f"a vector of {size}" if size else "no vector" for size in (vector, declared))
            yield f"{ENCODERS_FILE}: '{name}' is encoded as {ours}; in the specification it is {theirs}"
        if feature is None or not isinstance(feature.cardinality, int):
            continue
        ids = _num_ids(encoder, spec.folder)
        if ids is None:
            yield f"{ENCODERS_FILE}: '{name}' is encoded as a number; the specification has ids for it"
        elif ids != feature.cardinality:
            yield f"{ENCODERS_FILE}: '{name}' is encoded as {ids} ids; its cardinality is {feature.cardinality}"


def _num_ids(encoder: Encoder, folder: Path) -> int | None:
    """How many ids an encoder gives, 0 included; None for numbers."""
    if not isinstance(encoder, VocabularyEncoder):
        return getattr(encoder, "cardinality", None)
    file = confined(folder, f"{VOCABULARIES}/{encoder.vocabulary}.parquet")
    try:
        return 1 + int(pq.read_metadata(file).num_rows) + encoder.buckets
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{file}: can't be read as Parquet: {error}") from None


def _file_problems(spec: FeatureSpec, path: Path, name: str, ids: range, *, has_ids: bool = False) -> Iterator[str]:
    """What is wrong with a file that has one row for each id; it may have the ids as a column `name` too."""
    if not path.exists():
        return
    file = path.relative_to(spec.folder)
    try:
        with pq.ParquetFile(path) as parquet:
            num_rows = parquet.metadata.num_rows
            if num_rows != len(ids):
                but_zero = " but 0" * ids.start
                yield f"{file}: has {num_rows} rows; expected {len(ids)}, one for each id of '{name}'{but_zero}"
                return
            if problems := repeated(parquet.schema_arrow.names):
                yield f"{file}: {problems[0]}"
                return
            if not has_ids or name not in parquet.schema_arrow.names:
                return
            column = parquet.read(columns=[name])[name]
    except (pa.ArrowException, OSError, ValueError) as error:
        yield f"{file}: can't be read as Parquet: {error}"
        return
    if not pa.types.is_integer(column.type) or column.null_count:
        yield f"{file}: column '{name}' holds {column.type}{' and nulls' * bool(column.null_count)}; expected its ids"
        return
    found = column.to_numpy()
    wrong = np.flatnonzero(found != np.array(ids))
    if len(wrong):
        row = int(wrong[0])
        expected = f"expected {ids[row]}, because rows are in the order of ids"
        yield f"{file}: row {row + 1} is of '{name}' {found[row]}; {expected}"
