"""`run.json`, the record of a run: model, data, command, time and machine; and digests by which data are the same.

It lies in the folder of a run, beside `bundle/`, or in a bundle that has no run. It is not part of the bundle, so the
manifest does not list it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from recspec import __version__
from recspec.base import machine
from recspec.base.errors import BundleError, SpecError
from recspec.base.files import write_whole
from recspec.base.stores import shown
from recspec.bundle import cards
from recspec.data.storage import preparation
from recspec.feature_spec import FeatureSpec

FILE_NAME = "run.json"
FORMAT = 1
MOST_BYTES = 1 << 20

Kind = Literal["trained", "fitted", "blend", "pipeline", "tuned", "auto", "updated"]


class DataRecord(BaseModel):
    """The dataset of a run or of an evaluation."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    path: str
    """Its folder, absolute, or its URL."""
    digest: str
    """`data_digest`."""
    meaning: str = ""
    """`meaning_digest`, which bundles of models trained on it share."""
    name: str = ""
    """The dataset of `recspec prepare`, or the folder's name."""

    @classmethod
    def of(cls, spec: FeatureSpec) -> Self:
        """The record of a dataset."""
        folder = spec.folder.resolve()
        name = str(spec.metadata.get("dataset") or folder.name)
        return cls(path=shown(folder), digest=data_digest(spec), meaning=meaning_digest(spec), name=name)


class RunRecord(BaseModel):
    """The content of `run.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: int = FORMAT
    recspec: str = __version__
    kind: Kind
    model: str
    data: DataRecord | None = None
    """None if it is not known, as of a blend of runs that don't know theirs."""
    made_of: tuple[str, ...] = ()
    """The runs that a blend or a pipeline was made of; the version before an update."""
    command: tuple[str, ...] | None = None
    """The command line; None if it was made in Python."""
    directory: str = ""
    """Where the command was given, from which its paths start."""
    device: str = "cpu"
    world_size: int = 1
    precision: str = ""
    """The arithmetic of training; empty if nothing was trained."""
    threads: int | None = None
    """Of each process in training; None if nothing was trained."""
    started: str = Field(default_factory=lambda: now())
    """UTC, ISO 8601."""
    seconds: float | None = None
    """Of training; None while it goes, or after it broke off."""
    peak_memory: int | None = None
    """Most bytes that the first process held."""
    machine: dict[str, object] = {}

    def write(self, folder: Path) -> Self:
        """Write it into a run's folder."""
        write_whole(folder / FILE_NAME, self.model_dump_json(indent=2) + "\n")
        return self

    def finish(self, folder: Path, seconds: float) -> Self:
        """Write it again at the end of the work, with its seconds and the memory that it took."""
        found = {"seconds": round(seconds, 3), "peak_memory": machine.peak_memory()}
        return self.model_copy(update=found).write(folder)


def begin(
    folder: Path,
    kind: Kind,
    model: str,
    data: DataRecord | None,
    *,
    made_of: Sequence[Path] = (),
    device: str = "cpu",
    world_size: int = 1,
    precision: str = "",
    threads: int | None = None,
) -> RunRecord:
    """Write `run.json` at the start of the work; a run that goes on keeps the time of its start."""
    try:
        before = read(folder)
    except BundleError:
        before = None
    made = RunRecord(
        kind=kind,
        model=model,
        data=data,
        made_of=tuple(shown(path.resolve()) for path in made_of),
        command=machine.command_line(),
        directory=str(Path.cwd()),
        device=device,
        world_size=world_size,
        precision=precision,
        threads=threads,
        machine=machine.describe(),
        **({} if before is None else {"started": before.started}),
    )
    return made.write(folder)


def hand_over(run: Path, folder: Path, kind: Kind) -> None:
    """Copy a run's record into the folder that its bundle goes to; nothing if it has none."""
    with suppress(BundleError):
        if (record := read(run)) is not None:
            record.model_copy(update={"kind": kind}).write(folder)


def read(folder: Path) -> RunRecord | None:
    """The record of a run's folder; None if it holds none.

    Raises:
        BundleError: if it is damaged, or of another format.
    """
    return cards.read(folder, FILE_NAME, RunRecord, what="run", version=FORMAT, most=MOST_BYTES)


def data_of(bundle_folder: Path) -> DataRecord | None:
    """The dataset that a bundle's run says it was trained on; None if it says nothing, or its record is damaged."""
    try:
        record = read(home(bundle_folder))
    except BundleError:
        return None
    return None if record is None else record.data


def common_data(folders: Iterable[Path]) -> DataRecord | None:
    """The dataset that the runs of some bundles say they were trained on; None if one says nothing, or another one."""
    found = {data_of(folder) for folder in folders}
    return found.pop() if len(found) == 1 else None


def home(bundle_folder: Path) -> Path:
    """The folder that holds what is said about a bundle: its run's, or its own if it lies in none."""
    run = bundle_folder.parent
    signs = (FILE_NAME, "log.jsonl", "checkpoints")
    return run if bundle_folder.name == "bundle" and any((run / name).exists() for name in signs) else bundle_folder


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")


# --- which data -------------------------------------------------------------------------------------------------------


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
    """The specification without the files of seen items, which a bundle holds as tensors, and of disliked ones."""
    left_out = ("seen", "dislikes")
    return spec.replace(metadata={name: of for name, of in spec.metadata.items() if name not in left_out})


def data_digest(spec: FeatureSpec) -> str:
    """The SHA-256 that identifies a dataset: `meaning_digest`, and how it was prepared from which raw files.

    A dataset that recspec did not prepare is identified by the sizes of its files and their first and last bytes.
    """
    return _sha256(
        [
            meaning_digest(spec),
            {name: of for name, of in preparation(spec.folder).items() if name not in NOT_OF_THE_DATA}
            or dict(_chunks(spec)),
        ]
    )


def _companions(spec: FeatureSpec) -> Iterator[tuple[str, str]]:
    """Each file that the metadata names, with its SHA-256."""
    for name in dict.fromkeys(spec.companions.values()):
        path = spec.beside(name)
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                with file.open("rb") as stream:
                    yield str(file.relative_to(spec.folder)), hashlib.file_digest(stream, "sha256").hexdigest()


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
