"""The context of a preparation: raw files, the folder to write, and the engine with its limits."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from recspec.base.errors import SettingsError, unknown
from recspec.base.machine import parse_bytes
from recspec.data.prepare.backend import Backend
from recspec.data.prepare.duckdb_backend import DuckDBBackend
from recspec.data.prepare.spark_backend import SparkBackend

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
