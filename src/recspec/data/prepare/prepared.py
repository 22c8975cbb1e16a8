"""The prepared folder: written beside its place, renamed once it is complete, and never prepared twice.

OUT/feature_spec.yaml      the features of the rows
OUT/{train,valid,test}/    the rows
OUT/vocabularies/NAME.parquet, OUT/encoders.json    from raw values to prepared ones
OUT/items.parquet, OUT/users.parquet    one row per id, from 1: prepared features and readable columns
OUT/prepare.json           inputs, settings, summary and duration
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import recspec
from recspec.base.config import Settings
from recspec.base.errors import DataError, SettingsError, unknown
from recspec.base.files import (
    confined,
    hidden_sibling,
    is_own,
    local,
    locked,
    put_in_place,
    read_json,
    removed,
    whole_folder,
)
from recspec.base.machine import parse_bytes
from recspec.data.prepare.backend import Backend
from recspec.data.prepare.duckdb_backend import DuckDBBackend
from recspec.data.prepare.outcome import warnings_of
from recspec.data.prepare.spark_backend import SparkBackend
from recspec.data.storage import PREPARE_FILE, preparation
from recspec.feature_spec import FILE_NAME, FeatureSpec

LEAST_MEMORY = 1_000_000
"""Bytes of the smallest memory limit: less has lost its unit."""

ENGINES = {"duckdb": DuckDBBackend, "spark": SparkBackend}


class Progress(Protocol):
    """Receives the current stage, the amount done, and the total (None if unknown)."""

    def __call__(self, stage: str, done: int, total: int | None) -> None: ...


class Remark(str):
    """A message that a `Progress` receives in place of a stage; every display shows it on a line of its own."""

    __slots__ = ()


def silent(stage: str, done: int, total: int | None) -> None:
    """A `Progress` that shows nothing."""


@dataclass(frozen=True)
class PrepareContext:
    """One preparation: where it reads, where it writes, and what it may use of the machine."""

    raw: Path
    out: Path
    engine: str = "duckdb"
    memory_limit: str | None = None  # of the whole process, such as `2GB`; by default 80 % of the machine's memory
    threads: int | None = None  # by default all cores
    progress: Progress = silent
    force: bool = False  # replaces an earlier preparation in `out`

    def connect(self, folder: Path) -> Backend:
        """Start the engine, which stages and spills inside `folder`; closing it removes the folder."""
        if self.engine not in ENGINES:
            raise SettingsError(f"--engine: {unknown('engine', self.engine, ENGINES)}")
        limit = limit_bytes(self.memory_limit) if self.memory_limit else None
        return ENGINES[self.engine](folder, limit, self.threads)


def limit_bytes(text: str) -> int:
    """A memory limit in bytes. Raises SettingsError if the text is not a size, or too little to be meant."""
    with suppress(ValueError):
        size = parse_bytes(text)
        if size >= LEAST_MEMORY:
            return size
        raise SettingsError(f"--memory-limit: '{text}' is {size:,} bytes; expected such as '2GB' or '512MB'")
    raise SettingsError(f"--memory-limit: '{text}' is not an amount of memory; expected such as '2GB' or '512MB'")


HASHED_BYTES = 64 << 20  # larger inputs are identified by size and modification time, others by their SHA-256


@dataclass(frozen=True)
class Prepared:
    """The result of a preparation."""

    spec: FeatureSpec
    summary: Mapping[str, object]  # counts of rows, users, items and left-out rows; the seconds of the (last) run
    message: str  # the outcome, in a sentence


def run(
    context: PrepareContext,
    dataset: str,
    settings: Settings,
    inputs: Sequence[Path],
    build: Callable[[Path], FeatureSpec],
    *,
    resumable: bool = False,
    finished: Callable[[Path], str | None] = lambda _: None,
) -> Prepared:
    """Prepare a dataset, unless `context.out` holds the same one. Raises DataError if it holds something else.

    Args:
        build: Fills an empty folder and returns its specification, whose `metadata.summary` is kept.
        resumable: `build` keeps its stages in the folder `work`, each under its name once it is complete. After an
            interruption, the same preparation with the same engine gets the same folder again.
        finished: Says which stages a folder holds, as in "after stage 'finding ids'"; None for a fresh one.
    """
    out = local(context.out, "OUT")
    with locked(out, "preparing"):
        identity: dict[str, object] = {"dataset": dataset, "settings": settings.model_dump(mode="json")}
        identity |= {"inputs": [fingerprint(path) for path in inputs], "recspec": recspec.__version__}
        if _holds(out, identity, context.force):
            return _prepared(out, f"already prepared: {out} holds what was asked for")
        unfinished = hidden_sibling(out, "unfinished.tmp")
        if not resumable:  # the folder is of another dataset
            removed(unfinished)
        started = time.perf_counter()
        job = {**identity, "engine": context.engine}
        with _resumed(unfinished, out, job) if resumable else _beside(out) as folder:
            held = finished(folder)
            if held is not None:
                context.progress(Remark(f"continuing {held}"), 0, None)
            spec = _with_warnings(build(folder))
            spec.save(folder)
            seconds = round(time.perf_counter() - started, 3)
            summary = spec.metadata.get("summary", {})
            record = {**identity, "summary": summary, "seconds": seconds, "continued": held}
            (folder / PREPARE_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        return _prepared(out, f"prepared {dataset} in {out}{f', continuing {held}' if held else ''}")


def _with_warnings(spec: FeatureSpec) -> FeatureSpec:
    """The specification with the warnings about its outcome among those of its summary."""
    counts = spec.summary
    told = counts.get("warnings")
    warnings = [*(told if isinstance(told, list) else []), *warnings_of(spec)]
    return spec.replace(metadata={**spec.metadata, "summary": {**counts, "warnings": warnings}}) if warnings else spec


def _prepared(out: Path, message: str) -> Prepared:
    record = read_json(confined(out, PREPARE_FILE))
    if not isinstance(record, dict) or not isinstance(record.get("summary"), dict) or "seconds" not in record:
        raise DataError(f"{out / PREPARE_FILE}: damaged: it has no summary; pass --force to prepare it again")
    seconds = "seconds of the last run" if record.get("continued") else "seconds"
    return Prepared(FeatureSpec.load(out), {**record["summary"], seconds: record["seconds"]}, message)


def _holds(out: Path, identity: Mapping[str, object], force: bool) -> bool:
    """Whether `out` holds the same dataset already; an error if it holds anything that may not be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / PREPARE_FILE).is_file():
        raise DataError(f"{out}: exists and is not a dataset that recspec prepared; name another place for it")
    earlier = preparation(out)
    differences = [name for name in identity if earlier.get(name) != identity[name]]
    if not differences and (out / FILE_NAME).is_file():
        return True
    if force:
        return False
    problems = [_difference(name, earlier.get(name), identity[name]) for name in differences]
    raise DataError.of(f"{out}: was prepared differently; pass --force to replace it, or name another place", problems)


def _difference(name: str, earlier: object, now: object) -> str:
    if name == "settings" and isinstance(earlier, dict) and isinstance(now, dict):
        pairs = {key: (earlier.get(key), now.get(key)) for key in sorted({*earlier, *now})}
        changed = (f"{key} was {json.dumps(a)}, now {json.dumps(b)}" for key, (a, b) in pairs.items() if a != b)
        return f"settings: {', '.join(changed)}"
    if name == "inputs":
        return "inputs: the raw files are not the same"
    return f"{name}: was {earlier}, now {now}"


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A temporary folder that replaces `out` on success and is removed on failure."""
    try:
        with whole_folder(out) as folder:
            yield folder
            removed(folder / "work")
    except BaseException as error:
        error.add_note(f"Nothing was lost: {out} is as it was before.")
        raise


@contextmanager
def _resumed(folder: Path, out: Path, identity: Mapping[str, object]) -> Iterator[Path]:
    """A temporary folder that replaces `out` on success and stays on failure, so that the same job can continue.

    Malformed data remove it, because corrected data make another job. A folder of another user is never continued.
    """
    job = folder / "work" / "job.json"
    asked = json.dumps(identity, sort_keys=True)
    if not is_own(folder) or not is_own(job.parent) or not job.is_file() or job.read_text(encoding="utf-8") != asked:
        removed(folder)
        folder.mkdir(parents=True)
        job.parent.mkdir()
        job.write_text(asked, encoding="utf-8")
    try:
        yield folder
        removed(folder / "work")
        put_in_place(folder, out)
    except BaseException as error:
        rest = f" What is finished lies in {folder}: the same command goes on from there."
        if isinstance(error, DataError):
            removed(folder)
            rest = ""
        error.add_note(f"Nothing was lost: {out} is as it was before.{rest}")
        raise


def fingerprint(path: Path) -> dict[str, object]:
    """What identifies a raw file. Raises PathError for a name that a record can't hold."""
    size = local(path, "a raw file").stat().st_size
    if size > HASHED_BYTES:
        return {"name": path.name, "bytes": size, "modified": path.stat().st_mtime_ns}
    return {"name": path.name, "bytes": size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
