"""The folder that every `prepare` leaves: made beside its place, renamed when whole, and not made twice.

OUT/feature_spec.yaml      what the rows hold
OUT/{train,valid,test}/    the rows
OUT/vocabularies/NAME.parquet, OUT/encoders.json    how raw values become prepared ones
OUT/items.parquet, OUT/users.parquet    one row an id, from 1: prepared features and readable columns
OUT/prepare.json           from what, with which settings, what came out, how long it took
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import recspec
from recspec.config import Settings
from recspec.errors import DataError
from recspec.feature_spec import FILE_NAME, FeatureSpec
from recspec.outputs import beside, is_own, locked, put_in_place, removed, whole_folder
from recspec.paths import PathError, confined, local, read_json
from recspec.storage import PREPARE_FILE

HASHED_BYTES = 64 << 20
"""Inputs up to this size are known by their SHA-256, larger ones by size and time of change."""


class Progress(Protocol):
    """Told what is being done: the stage, how far it is, and how far it goes (None: not known)."""

    def __call__(self, stage: str, done: int, total: int | None) -> None: ...


class Remark(str):
    """What a `Progress` is told once in place of a stage: it has no extent, and is worth a line on any display."""

    __slots__ = ()


def silent(stage: str, done: int, total: int | None) -> None:
    """A `Progress` that tells nobody."""


@dataclass(frozen=True)
class Prepared:
    """What a preparation gives back."""

    spec: FeatureSpec
    summary: Mapping[str, object]
    """Counts of rows, users, items and of what was left out; seconds it took when it was made, those of the last run
    where several made it."""
    message: str
    """What was done, in a sentence."""


@dataclass(frozen=True)
class Job:
    """One preparation: from which inputs, with which settings, into which folder."""

    dataset: str
    settings: Settings
    inputs: Sequence[Path]
    out: Path

    def identity(self) -> dict[str, object]:
        """What decides the outcome; the engine does not."""
        return {
            "dataset": self.dataset,
            "settings": self.settings.model_dump(mode="json"),
            "inputs": [_fingerprint(path) for path in self.inputs],
            "recspec": recspec.__version__,
        }


def run(
    job: Job,
    build: Callable[[Path], FeatureSpec],
    *,
    force: bool = False,
    resumable_by: str | None = None,
    finished: Callable[[Path], str | None] = lambda _: None,
    progress: Progress = silent,
) -> Prepared:
    """Prepare a dataset, unless `out` already holds the very same.

    Args:
        build: Fills an empty folder and gives its specification, whose `metadata.summary` is kept.
        force: Replace what an earlier preparation left in `out`.
        resumable_by: The engine whose stages `build` keeps in the folder `work`, each under its name once it is whole.
            After an end before its time the same job is given the same folder again, with all that is in it.
        finished: Says which stages a folder holds, as in "after stage 'finding ids'"; None for a fresh one.
        progress: Told that the work goes on, where it does.

    Raises:
        DataError: if `out` holds something else, or another process prepares it.
    """
    out = local(job.out, "OUT")
    with locked(out, "preparing"):
        return _run(job, job.identity(), build, force, resumable_by, finished, progress)


def _run(
    job: Job,
    identity: dict[str, object],
    build: Callable[[Path], FeatureSpec],
    force: bool,
    resumable_by: str | None,
    finished: Callable[[Path], str | None],
    progress: Progress,
) -> Prepared:
    _remove_abandoned(job.out)
    if _holds(job.out, identity, force):
        return _prepared(job, f"already prepared: {job.out} holds what was asked for")
    if resumable_by is None:  # of another dataset that was to be here
        removed(_unfinished(job.out))
    started = time.perf_counter()
    place = _beside(job.out) if resumable_by is None else _resumed(job.out, {**identity, "engine": resumable_by})
    with place as folder:
        held = finished(folder)
        if held is not None:
            progress(Remark(f"continuing {held}"), 0, None)
        spec = build(folder)
        spec.save(folder)
        seconds = round(time.perf_counter() - started, 3)
        record = {
            **identity, "summary": spec.metadata.get("summary", {}), "seconds": seconds, "continued": held
        }  # fmt: skip
        (folder / PREPARE_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return _prepared(job, f"prepared {job.dataset} in {job.out}{f', continuing {held}' if held else ''}")


def _prepared(job: Job, message: str) -> Prepared:
    record = read_json(confined(job.out, PREPARE_FILE))
    if not isinstance(record, dict) or not isinstance(record.get("summary"), dict) or "seconds" not in record:
        raise DataError(f"{job.out / PREPARE_FILE}: damaged: it has no summary; pass --force to prepare it again")
    seconds = "seconds of the last run" if record.get("continued") else "seconds"
    return Prepared(FeatureSpec.load(job.out), {**record["summary"], seconds: record["seconds"]}, message)


def _holds(out: Path, identity: Mapping[str, object], force: bool) -> bool:
    """Whether `out` holds exactly what is asked for; an error if it holds anything that may not be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    record = out / PREPARE_FILE
    if not record.is_file():
        raise DataError(f"{out}: exists and is not a dataset that recspec prepared; name another place for it")
    try:
        read = read_json(confined(out, PREPARE_FILE))
    except PathError:
        read = {}
    earlier = read if isinstance(read, dict) else {}
    differences = [name for name in identity if earlier.get(name) != identity[name]]
    if not differences and (out / FILE_NAME).is_file():
        return True
    if force:
        return False
    problems = [_difference(name, earlier.get(name), identity[name]) for name in differences]
    raise DataError.of(f"{out}: was prepared otherwise; pass --force to replace it, or name another place", problems)


def _difference(name: str, earlier: object, now: object) -> str:
    if name == "settings" and isinstance(earlier, dict) and isinstance(now, dict):
        changed = sorted(key for key in {*earlier, *now} if earlier.get(key) != now.get(key))
        return "settings: " + ", ".join(
            f"{key} was {json.dumps(earlier.get(key))}, now {json.dumps(now.get(key))}" for key in changed
        )
    if name == "inputs":
        return "inputs: the raw files are not the same"
    return f"{name}: was {earlier}, now {now}"


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `out` once all went well, and else leaves no trace."""
    try:
        with whole_folder(out) as folder:
            yield folder
            shutil.rmtree(folder / "work", ignore_errors=True)
    except BaseException as error:
        error.add_note(f"Nothing was lost: {out} is as it was before.")
        raise


@contextmanager
def _resumed(out: Path, identity: Mapping[str, object]) -> Iterator[Path]:
    """Likewise one that stays when things went wrong, for the same job to go on in.

    Malformed data leave no trace: what is read after they are mended is another job. What another user left there is
    not gone on with.
    """
    folder = _unfinished(out)
    job = folder / "work" / "job.json"
    asked = json.dumps(identity, sort_keys=True)
    if not is_own(folder) or not is_own(job.parent) or not job.is_file() or job.read_text(encoding="utf-8") != asked:
        removed(folder)
        folder.mkdir(parents=True)
        job.parent.mkdir()
        job.write_text(asked, encoding="utf-8")
    try:
        yield folder
        shutil.rmtree(folder / "work", ignore_errors=True)
        put_in_place(folder, out)
    except DataError as error:
        shutil.rmtree(folder, ignore_errors=True)
        error.add_note(f"Nothing was lost: {out} is as it was before.")
        raise
    except BaseException as error:
        error.add_note(
            f"Nothing was lost: {out} is as it was before. What is finished lies in {folder}: "
            "the same command goes on from there."
        )
        raise


def _unfinished(out: Path) -> Path:
    return beside(out, "unfinished.tmp")


def _remove_abandoned(out: Path) -> None:
    """Clear away what earlier preparations of `out` left whose process was killed; what one may resume stays.

    Whoever holds the lock of `out` is its only writer, so whatever is there was abandoned.
    """
    ours = re.compile(re.escape(beside(out, "").name) + r"[0-9a-f]+(\.old)?\.tmp")
    for folder in sorted(out.parent.iterdir()):
        if not ours.fullmatch(folder.name):
            continue
        if folder.name.endswith(".old.tmp") and not out.exists():  # killed between the two renames
            folder.replace(out)
        else:
            removed(folder)


def _fingerprint(path: Path) -> dict[str, object]:
    size = path.stat().st_size
    if size > HASHED_BYTES:
        return {"name": path.name, "bytes": size, "modified": path.stat().st_mtime_ns}
    return {"name": path.name, "bytes": size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
