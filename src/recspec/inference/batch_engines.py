"""Who writes the shards of a batch job: this process, several local ones, Spark's executors, or Ray's actors.

Spark and Ray only hand out shards. Their processes write the files, so the job's folder and the run must be readable
by them under the same paths.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import pyarrow as pa

from recspec.base.errors import DataError, RecspecError, require_extra
from recspec.base.spark_session import is_of_spark, start_session, without_pandas_warning
from recspec.inference.batch_job import Done, Shard, ShardWriter, Work

Engine = Literal["local", "spark", "ray"]
Report = Callable[[Done], None]
Note = Callable[[str], None]

MOST_DEATHS = 2
"""Processes that may die at one shard; more would die of it too."""

COLUMNS = ("number", "start", "stop")
DONE = pa.schema({"number": pa.int64(), "count": pa.int64(), "unknown": pa.int64()})


def write_here(writer: ShardWriter, shards: Sequence[Shard], done: Report) -> None:
    """Write the shards in this process."""
    for shard in shards:
        done(writer.write(shard))


# --- local processes -------------------------------------------------------------------------------------------------


def write_by_processes(work: Work, shards: Sequence[Shard], workers: int, done: Report, note: Note) -> None:
    """Write the shards by processes of this machine, which take the next shard when they have finished one.

    If a process dies, another one takes its shard up, once.

    Raises:
        DataError: naming the shard at which processes died.
        RecspecError: what a process found wrong.
    """
    left, lock = deque(shards), Lock()
    deaths: dict[int, int] = {}
    processes: list[_Process] = []
    stop: list[BaseException] = []

    def take() -> Shard | None:
        with lock:
            return left.popleft() if left and not stop else None

    def work_off() -> Iterator[Done]:
        process: _Process | None = None
        while (shard := take()) is not None:
            if process is None:
                process = _Process(work, workers)
                with lock:
                    processes.append(process)
            found = process.ask(shard)
            if found is not None:
                yield found
                continue
            how, process = process.ended(), None
            if stop:
                return
            with lock:
                deaths[shard.number] = deaths.get(shard.number, 0) + 1
                again = deaths[shard.number] < MOST_DEATHS
                if again:
                    left.appendleft(shard)
            if not again:
                raise DataError(
                    f"{work.out}: {MOST_DEATHS} processes died at {shard.name}; the last one {how}. The other finished "
                    "shards are kept; start the same command again with fewer workers or more memory"
                )
            note(f"a process {how} at {shard.name}; another one takes it up")

    def run() -> None:
        try:
            for found in work_off():
                with lock:
                    done(found)
        except BaseException as error:
            stop.append(error)
            raise

    with ThreadPoolExecutor(workers) as pool:
        try:
            futures = {pool.submit(run) for _ in range(min(workers, len(shards)))}
            while futures:
                finished, futures = wait(futures, return_when=FIRST_COMPLETED)
                for each in finished:
                    each.result()
        except BaseException as error:
            stop.append(error)
            for process in processes:
                process.kill()
            raise
        finally:
            for process in processes:
                process.close()


class _Process:
    """A process that is asked for one shard after another; it ends with its standard input."""

    def __init__(self, work: Work, workers: int) -> None:
        threads = str(max(1, len(os.sched_getaffinity(0)) // workers)) if hasattr(os, "sched_getaffinity") else "1"
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        source = str(Path(__file__).parents[2])
        paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {**dict.fromkeys(names, threads), **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        code = f"from {__name__} import answer; answer()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._send(work.to_dict())

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died: its silence tells
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def ask(self, shard: Shard) -> Done | None:
        """Have a shard written; None if the process dies of it."""
        self._send(vars(shard))
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            return None
        told = json.loads(line)
        if "error" in told:
            raise DataError(f"{shard.name}: {told['error']}")
        return Done(**told)

    def ended(self) -> str:
        """How the process ended, in words."""
        status = self._process.wait()
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    def kill(self) -> None:
        """End the process."""
        self._process.kill()

    def close(self) -> None:
        """Let the process end, and wait for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def answer() -> None:
    """Write the shards that standard input names, a line each, and tell of each on standard output."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    lines = iter(sys.stdin.readline, "")
    work, writer = Work(**json.loads(next(lines))), None
    for line in lines:
        try:
            writer = writer or ShardWriter(work)
            found: dict[str, Any] = vars(writer.write(Shard(**json.loads(line))))
        except RecspecError as error:
            found = {"error": str(error)}
        told.write(json.dumps(found) + "\n")
        told.flush()


# --- Spark and Ray ---------------------------------------------------------------------------------------------------


def write_by_spark(work: Work, shards: Sequence[Shard], workers: int, done: Report) -> None:
    """Write the shards in Spark's Python processes; each opens the model once for its share of the shards.

    Spark itself starts a lost process's share again, of which finished shards are kept.

    Raises:
        SettingsError: without Java, or if Spark can't be started.
        DataError: if Spark gives up.
    """
    own = {"spark.ui.enabled": "false", "spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    settings = {
        "spark.master": os.environ.get("SPARK_MASTER", f"local[{workers}]"),
        "spark.app.name": "recspec batch job",
        "spark.ui.showConsoleProgress": "false",
        **({} if "SPARK_MASTER" in os.environ else own),
    }
    session = start_session(settings, "local")
    try:
        session.sparkContext.setLogLevel("OFF")
        slots = min(len(shards), max(workers, session.sparkContext.defaultParallelism))
        rows = [tuple(getattr(each, name) for name in COLUMNS) for each in shards]
        named = session.sparkContext.parallelize(rows, slots)
        frame = session.createDataFrame(named, ", ".join(f"{name} long" for name in COLUMNS))
        with without_pandas_warning():
            made = frame.mapInArrow(partial(_write_batches, work.to_dict()), "number long, count long, unknown long")
        for row in made.toLocalIterator() if slots == 1 else made.collect():
            done(Done(row["number"], row["count"], row["unknown"]))
    except Exception as error:
        if not is_of_spark(error):
            raise
        raise DataError(f"{work.out}: Spark gave up: {_reason(error)}. Finished shards are kept") from None
    finally:
        session.stop()


def _write_batches(work: Mapping[str, Any], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Shards that Spark sends -> what was written."""
    writer: ShardWriter | None = None
    for batch in batches:
        for row in batch.to_pylist():
            writer = writer or ShardWriter(Work(**work))
            yield pa.RecordBatch.from_pylist([vars(writer.write(Shard(**row)))], DONE)


def write_by_ray(work: Work, shards: Sequence[Shard], workers: int, done: Report) -> None:
    """Write the shards in Ray's actors, each of which opens the model once; Ray replaces an actor that dies.

    Raises:
        DataError: if Ray gives up.
    """
    ray = require_extra("ray", "ray")
    data = require_extra("ray.data", "ray")
    errors = require_extra("ray.exceptions", "ray")
    started = not ray.is_initialized()
    if started:
        here = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": workers, "include_dashboard": False}
        ray.init(log_to_driver=False, logging_level="ERROR", **here)
    try:
        data.DataContext.get_current().enable_progress_bars = False
        rows = [{name: getattr(each, name) for name in COLUMNS} for each in shards]
        made = data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            RayWriter,
            fn_constructor_args=(work.to_dict(),),
            batch_size=1,
            batch_format="pyarrow",
            compute=data.ActorPoolStrategy(size=min(workers, len(rows))),
            num_cpus=1,
        )
        for row in made.iter_rows():
            done(Done(int(row["number"]), int(row["count"]), int(row["unknown"])))
    except errors.RayError as error:
        raise DataError(f"{work.out}: Ray gave up: {_reason(error)}. Finished shards are kept") from None
    finally:
        if started:
            ray.shutdown()


class RayWriter:
    """Shards that Ray sends -> what was written."""

    def __init__(self, work: Mapping[str, Any]) -> None:
        self._writer = ShardWriter(Work(**work))

    def __call__(self, batch: pa.Table) -> pa.Table:
        return pa.Table.from_pylist([vars(self._writer.write(Shard(**row))) for row in batch.to_pylist()], DONE)


def _reason(error: Exception) -> str:
    """The line of an engine's error that names the first cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    own = [line for line in lines if "recspec.base.errors." in line or "Error: " in line]
    return (own or lines or [type(error).__name__])[-1][:400]
