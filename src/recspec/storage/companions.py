"""Files beside a specification that its metadata names: catalogues, vocabularies and encoders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recspec.encoding import ENCODERS_FILE, VOCABULARIES, Encoder, VocabularyEncoder, read_encoders
from recspec.errors import DataError, RecspecError, nearest
from recspec.files import confined, copy
from recspec.spec import FeatureSpec

PREPARE_FILE = "prepare.json"
"""Beside a specification: the source and the settings from which the dataset was prepared."""


def companions(spec: FeatureSpec) -> tuple[str, ...]:
    """Files and folders beside the specification that its metadata names.

    Raises:
        DataError: for one that is missing.
    """
    named = tuple(dict.fromkeys(spec.companions.values()))
    missing = [name for name in named if not spec.beside(name).exists()]
    if missing:
        here = [found.name for found in spec.folder.iterdir()] if spec.folder.is_dir() else []
        problems = [f"metadata names '{name}', which does not exist{nearest(name, here)}" for name in missing]
        raise DataError.of(str(spec.folder), problems)
    return named


def copy_companions(spec: FeatureSpec, out: Path) -> None:
    """Copy the files beside the specification that its metadata names.

    Raises:
        DataError: as `companions`; or if something in a folder leads outside it or is a special file.
    """
    for name in companions(spec):
        copy(name, spec.folder, out)


def companion_problems(spec: FeatureSpec) -> list[str]:
    """Catalogues, vocabularies and encoders whose ids differ from those of the specification."""
    try:
        return [*_catalogue_problems(spec), *_vocabulary_problems(spec), *_encoder_problems(spec)]
    except RecspecError as error:  # a path that leads outside, a damaged file
        return [str(error)]


def _encoder_problems(spec: FeatureSpec) -> list[str]:
    problems = []
    for name, encoder in _encoders(spec).items():
        feature = spec.features.get(name)
        if feature is None or not isinstance(feature.cardinality, int):
            continue
        ids = _num_ids(encoder, spec.folder)
        if ids is None:
            problems.append(f"{ENCODERS_FILE}: '{name}' is encoded as a number; the specification has ids for it")
        elif ids != feature.cardinality:
            problems.append(
                f"{ENCODERS_FILE}: '{name}' is encoded as {ids} ids; its cardinality is {feature.cardinality}"
            )
    return problems


def _encoders(spec: FeatureSpec) -> dict[str, Encoder]:
    if "encoders" not in spec.companions or not spec.beside(ENCODERS_FILE).exists():
        return {}  # `companions` reports missing files
    return read_encoders(spec.folder)


def _num_ids(encoder: Encoder, folder: Path) -> int | None:
    """How many ids an encoder gives, 0 included; None for numbers."""
    if isinstance(encoder, VocabularyEncoder):
        return 1 + _num_rows(confined(folder, f"{VOCABULARIES}/{encoder.vocabulary}.parquet")) + encoder.buckets
    return getattr(encoder, "cardinality", None)


def _num_rows(file: Path) -> int:
    try:
        return int(pq.read_metadata(file).num_rows)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{file}: can't be read as Parquet: {error}") from None


def _catalogue_problems(spec: FeatureSpec) -> list[str]:
    problems = []
    for role in ("user", "item"):
        path = spec.catalogue(role)
        if path is not None and spec.role(role):  # without features of the role nothing reads the catalogue
            name = spec.user_id if role == "user" else spec.item_id
            if isinstance(spec.features[name].cardinality, int):
                first = int(spec.reserves_unknown(name))
                problems += _file_problems(spec, path, name, range(first, spec.num_ids(name)), has_ids=True)
    return problems


def _vocabulary_problems(spec: FeatureSpec) -> list[str]:
    largest: dict[str, int] = {}
    for name, feature in spec.features.items():
        if isinstance(feature.cardinality, int):
            space = spec.vocabulary(name)
            largest[space] = max(largest.get(space, 0), feature.cardinality)
    encoded = {each.vocabulary for each in _encoders(spec).values() if isinstance(each, VocabularyEncoder)}
    files = {space: spec.vocabulary_file(space) for space in largest if space not in encoded}
    return [
        problem
        for space, path in files.items()
        if path is not None
        for problem in _file_problems(spec, path, space, range(1, largest[space]))
    ]


def _file_problems(spec: FeatureSpec, path: Path, name: str, ids: range, *, has_ids: bool = False) -> list[str]:
    """What is wrong with a file that has one row for each id; it may have the ids as a column `name` too."""
    file = path.relative_to(spec.folder)
    if not path.exists():
        return []  # `companions` reports missing files
    try:
        with pq.ParquetFile(path) as parquet:
            num_rows = parquet.metadata.num_rows
            if num_rows != len(ids):
                but_zero = " but 0" * ids.start
                return [f"{file}: has {num_rows} rows; expected {len(ids)}, one for each id of '{name}'{but_zero}"]
            if not has_ids or name not in parquet.schema_arrow.names:
                return []
            found = parquet.read(columns=[name])[name].to_numpy()
    except (pa.ArrowException, OSError, ValueError) as error:
        return [f"{file}: can't be read as Parquet: {error}"]
    wrong = np.flatnonzero(found != np.array(ids))
    if not len(wrong):
        return []
    row = int(wrong[0])
    told = f"row {row + 1} is of '{name}' {found[row]}; expected {ids[row]}, because rows are in the order of ids"
    return [f"{file}: {told}"]
