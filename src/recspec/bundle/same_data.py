"""Whether models and datasets are of the same data: digests of what a preparation left, and of a whole dataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from recspec.base.errors import SpecError
from recspec.base.files import PathError, confined, read_json
from recspec.data.storage import PREPARE_FILE
from recspec.feature_spec import FeatureSpec

NOT_OF_THE_DATA = ("seconds", "continued")
"""What `prepare.json` says about the preparation alone, which differs from one to the next of equal data."""

END = 1 << 20
"""Bytes at the start and at the end of a file that identify it, with its size, where nothing else does."""


def meaning_digest(spec: FeatureSpec) -> str:
    """The SHA-256 of what gives ids their meaning: features, channels, counts, vocabularies, encoders and catalogues.

    It is the same for a dataset and for the bundle of every model that was trained on it.
    """
    spec = without_seen(spec)
    return _sha256([spec.content_hash(), spec.metadata.get("summary"), dict(_companions(spec))])


def without_seen(spec: FeatureSpec) -> FeatureSpec:
    """The specification without the file of seen items, which a bundle holds as tensors."""
    return spec.replace(metadata={name: of for name, of in spec.metadata.items() if name != "seen"})


def data_digest(spec: FeatureSpec) -> str:
    """The SHA-256 that identifies a dataset: `meaning_digest`, and how it was prepared from which raw files.

    A dataset that recspec did not prepare is identified by the sizes of its files and their first and last bytes.
    """
    return _sha256([meaning_digest(spec), _preparation(spec) or dict(_chunks(spec))])


def _companions(spec: FeatureSpec) -> Iterator[tuple[str, str]]:
    """Each file that the metadata names, with its SHA-256."""
    for name in dict.fromkeys(spec.companions.values()):
        path = spec.beside(name)
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                with file.open("rb") as stream:
                    yield str(file.relative_to(spec.folder)), hashlib.file_digest(stream, "sha256").hexdigest()


def _preparation(spec: FeatureSpec) -> dict[str, object]:
    """What `prepare.json` says about the data; nothing if there is none, or a damaged one."""
    try:
        found = read_json(confined(spec.folder, PREPARE_FILE))
    except PathError:
        return {}
    return {name: of for name, of in found.items() if name not in NOT_OF_THE_DATA} if isinstance(found, dict) else {}


def _chunks(spec: FeatureSpec) -> Iterator[tuple[str, object]]:
    """Each file of rows, with its size and the digest of its ends."""
    for split, chunks in spec.sources.items():
        for name in (name for chunk in chunks for name in chunk.files):
            try:
                yield f"{split}: {name}", _ends(spec.path(name))
            except (OSError, SpecError):
                yield f"{split}: {name}", None


def _ends(file: Path) -> list[object]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(END)
        stream.seek(max(0, size - END))
        return [size, hashlib.sha256(first + stream.read(END)).hexdigest()]


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
