"""Calls that Spark's executors make, in their Python processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow.parquet as pq

from recspec.base.errors import RecspecError
from recspec.data.prepare.backend import Part, Share, T, X
from recspec.data.prepare.staging import WATCH_SECONDS


@dataclass(frozen=True)
class _File:
    """A file of a staged table, which is a part of it."""

    path: Path
    first_row: int
    num_columns: int


def call_with_parts(
    context: Any,
    make: Callable[[Part], T],
    paths: Sequence[Path],
    folder: Path,
    memory_limit: int | None,
    done: Callable[[int], None],
) -> list[T]:
    """Call `make` with each file of a staged table that has rows; see `Backend.each_part`."""
    held = [pq.read_metadata(path) for path in paths]
    ends = [0, *accumulate(each.num_rows for each in held)]
    files = [
        _File(path, start, each.num_columns)
        for path, each, (start, stop) in zip(paths, held, pairwise(ends), strict=True)
        if stop > start
    ]
    told = 0

    def tell(share: float) -> None:
        nonlocal told
        done(round(share * ends[-1]) - told)
        told = round(share * ends[-1])

    shared = context.broadcast(make)  # once to each machine; it may hold large vocabularies
    found: list[T] = call(context, partial(_made, shared, folder, memory_limit), files, tell)
    shared.destroy()
    return found


def call_with_shares(
    context: Any, make: Callable[[Share[X]], T], items: Sequence[X], folder: Path, done: Callable[[int], None]
) -> list[T]:
    """Call `make` with each item; see `Backend.each_share`."""
    results = call(context, partial(_counted, make, folder), items, lambda _: done(0))
    for _, rows in results:
        done(rows)
    return [found for found, _ in results]


def call(context: Any, make: Callable[[Any], T], items: Sequence[Any], told: Callable[[float], None]) -> list[T]:
    """Call `make` with each item; `told` receives the share of the calls that have ended.

    Raises:
        RecspecError: what a call found wrong.
        Exception: of Spark, if it gives up.
    """
    job = context.parallelize(items, max(1, len(items))).map(partial(_result, make))
    tracker = context.statusTracker()
    with ThreadPoolExecutor(1) as pool:
        collected = pool.submit(job.collect)
        try:
            while not wait([collected], WATCH_SECONDS).done:
                for stage in filter(None, map(tracker.getStageInfo, tracker.getActiveStageIds())):
                    told(stage.numCompletedTasks / stage.numTasks)
        except BaseException:
            context.cancelAllJobs()
            raise
        found: list[T] = []
        for result in collected.result():
            if isinstance(result, RecspecError):
                raise result
            found.append(result)
    told(1)
    return found


def _result(make: Callable[[Any], T], item: object) -> T | RecspecError:
    """What a call returns, or its error if another attempt would raise it too."""
    try:
        return make(item)
    except RecspecError as error:
        return error


def _made(shared: Any, folder: Path, memory_limit: int | None, file: _File) -> Any:
    with pq.ParquetFile(file.path) as rows:
        own = _own(folder)
        return shared.value(Part(rows.iter_batches, file.num_columns, file.first_row, own, memory_limit, _ignore))


def _counted(make: Callable[[Share[X]], T], folder: Path, item: X) -> tuple[T, int]:
    """What a call returns, and the rows that it dealt with."""
    rows = list[int]()
    return make(Share(item, _own(folder), rows.append)), sum(rows)


def _own(folder: Path) -> Path:
    """A folder for one attempt, so that one that Spark took for lost disturbs no other."""
    own = folder / uuid4().hex
    own.mkdir(parents=True)
    return own


def _ignore(rows: int) -> None:
    """The driver tells how many rows are done."""
