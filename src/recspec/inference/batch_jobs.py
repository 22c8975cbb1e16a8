"""Batch jobs: recommendations for many users, probabilities of many rows, as a folder of Parquet shards.

This process writes the shards, several local ones, Spark's executors, or Ray's actors. Spark and Ray only hand out
shards. Their processes write the files, so the job's folder and the run must be readable by them under the same paths.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recspec.base.errors import DataError, RecspecError, SettingsError, require_extra, unknown
from recspec.base.files import (
    temporary_name,
)
from recspec.base.spark_session import is_of_spark, start_session, without_pandas_warning
from recspec.data.storage import open_split
from recspec.feature_spec import FeatureSpec
from recspec.inference.answer_files import Progress, check_any_known, lines_of_users, silent
from recspec.inference.batch_shards import (
    ITEMS,
    SHARD_SIZE,
    Done,
    Job,
    Shard,
    ShardWriter,
    Work,
    count_users,
    opened,
    settings_of,
    shards_of,
)
from recspec.inference.index import INDEX_FILE, ItemIndex
from recspec.inference.pipeline import has_vectors, item_vectors
from recspec.inference.predictor import Predictor, note_of_scores
from recspec.inference.recommendation import RecommendRequest

Engine = Literal["local", "spark", "ray"]
Note = Callable[[str], None]

MOST_WORKERS = 1024
MOST_DEATHS = 2
"""Processes that may die at one shard; more would die of it too."""
DONE = pa.schema({"number": pa.int64(), "count": pa.int64(), "unknown": pa.int64()})
LIBRARIES: Mapping[str, str] = MappingProxyType({"spark": "pyspark", "ray": "ray"})
"""Engine -> its library, which the extra of the engine's name installs."""


def no_note(note: str) -> None:
    """Drop a note."""


@dataclass(frozen=True)
class How:
    """How a job is divided: it changes no answer, except that shards of a job that goes on keep their size."""

    engine: Engine = "local"
    workers: int = 1
    """Processes; on a cluster, at least as many shards are worked on at once."""
    shard_size: int = SHARD_SIZE

    def check(self) -> None:
        """Raises `SettingsError`, naming everything that is out of range, or `MissingExtraError`."""
        found = []
        if self.engine not in get_args(Engine):
            found.append(f"engine: {unknown('engine', self.engine, get_args(Engine))}")
        if not 1 <= self.workers <= MOST_WORKERS:
            found.append(f"workers is {self.workers}; expected 1 to {MOST_WORKERS:,}")
        if self.shard_size < 1:
            found.append(f"shard_size is {self.shard_size}; expected 1 or more")
        SettingsError.refuse("batch job", found)
        if self.engine in LIBRARIES:
            require_extra(LIBRARIES[self.engine], self.engine)


@dataclass(frozen=True)
class Counts:
    """What the shards of a job hold together."""

    count: int
    """Users or rows."""
    unknown: int
    shards: int
    kept: int
    """Shards that an earlier start had finished."""


def recommend_shards(
    predictor: Predictor,
    users: Path | None,
    out: Path,
    wanted: RecommendRequest,
    how: How,
    *,
    progress: Progress = silent,
    note: Note = no_note,
) -> Counts:
    """Write the best items of the users of a file, or of all (None), as Parquet shards into the folder `out`.

    The columns are those of `recommend_to_file`. A job that was killed goes on with its unfinished shards.

    Raises:
        RequestError: with every problem of the request.
        SettingsError: if `out` holds another job, or a setting is out of range.
        DataError: if the model knows none of the users, or if processes die of a shard; a second start goes on.
    """
    how.check()
    predictor.recommender.check(wanted)  # raises before any work
    if users is None:
        asked, count = dict[str, Any](all=True), len(predictor.users)
    else:
        asked, count = {"users": str(users.resolve()), **_version(users)}, count_users(users)
        check_any_known(predictor, lines_of_users(users), wanted)
    job = Job.of(predictor, "recommendations", asked, settings_of(wanted), count, how.shard_size)
    through_index = (
        predictor.pipeline is None and not (wanted.boosts or wanted.at_most) and has_vectors(predictor.model)
    )
    return _run(predictor, job, out, how, progress, note, through_index=through_index)


def predict_shards(
    predictor: Predictor,
    rows: Path | FeatureSpec,
    out: Path,
    how: How,
    *,
    split: str = "test",
    columns: Sequence[str] | None = None,
    explain: bool = False,
    allow_outside: bool = False,
    progress: Progress = silent,
    note: Note = no_note,
) -> Counts:
    """Write rows of a Parquet file, or a split of a prepared dataset, with `Predictor.columns_added`, as shards.

    Raises:
        SettingsError: if `out` holds another job, or a setting is out of range.
        DataError: if the rows can't be read, or processes die of a shard; a second start goes on.
        RequestError: with `explain`, for a model whose rows can't be explained.
    """
    how.check()
    if isinstance(rows, FeatureSpec):
        reader = open_split(rows, split, tuple(predictor.model.features()))
        asked: dict[str, Any] = {"data": str(rows.folder.resolve()), "split": split, "spec": rows.content_hash()}
        count = reader.num_rows
    else:
        if rows.suffix != ".parquet":
            raise SettingsError(
                f"{rows}: shards are made of Parquet files; name one or a prepared dataset, or write one file with "
                "--out FILE"
            )
        try:
            count = pq.read_metadata(rows).num_rows
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{rows}: can't be read as parquet: {error}") from None
        asked = {"rows": str(rows.resolve()), **_version(rows)}
    if said := note_of_scores(predictor):
        note(said)
    predictor.columns_added(explain=explain)  # refuses before any work
    settings = {"columns": None if columns is None else list(columns), "explain": explain}
    job = Job.of(predictor, "probabilities", asked, settings, count, how.shard_size)
    return _run(predictor, job, out, how, progress, note, allow_outside=allow_outside)


def _run(
    predictor: Predictor,
    job: Job,
    out: Path,
    how: How,
    progress: Progress,
    note: Note,
    *,
    through_index: bool = False,
    allow_outside: bool = False,
) -> Counts:
    """Write the shards that are not there yet."""
    what = "recommend" if job.answers == "recommendations" else "predict"
    with opened(out, job) as finished:
        kept, shards = len(finished), [each for each in shards_of(job) if each.number not in finished]
        if kept and shards:
            note(f"{out}: {kept:,} of {job.num_shards:,} shards are there; the job goes on with the others")

        def done(found: Done) -> None:
            finished[found.number] = found
            progress(what, sum(each.count for each in finished.values()), job.count)

        if shards:
            if through_index:
                _make_index(predictor, out)
            run, folder = str(predictor.bundle.folder.resolve()), str(out.resolve())
            work = Work(run, folder, str(predictor.device), allow_outside, through_index)
            if how.engine == "spark":
                write_by_spark(work, shards, how.workers, done)
            elif how.engine == "ray":
                write_by_ray(work, shards, how.workers, done)
            elif how.workers == 1:
                write_here(ShardWriter(work, predictor), shards, done)
                if through_index:
                    predictor.recommender.index = None  # its file goes with the job
            else:
                write_by_processes(work, shards, how.workers, done, note)
        whole = finished.values()
        return Counts(sum(each.count for each in whole), sum(each.unknown for each in whole), len(finished), kept)


def _make_index(predictor: Predictor, out: Path) -> None:
    """Vectors of all items that the model can recommend, in a file that every process maps."""
    folder = out / ITEMS
    if (folder / INDEX_FILE).exists():  # of the same model: the job says so
        return
    ids = np.flatnonzero(predictor.recommender.chooser.scorable)
    ids = ids[ids >= predictor.items.first_id]
    index = ItemIndex.build(item_vectors(predictor.model, predictor.items.features)[ids], ids)
    temporary = temporary_name(folder)
    temporary.mkdir()
    index.save(temporary)
    temporary.rename(folder)


def _version(file: Path) -> dict[str, int]:
    """What changes when a file is written again."""
    try:
        found = file.stat()
    except OSError as error:
        raise DataError(f"{file}: can't be read: {error.strerror}") from None
    return {"bytes": found.st_size, "modified": found.st_mtime_ns}


# --- who writes the shards -------------------------------------------------------------------------------------------


def write_here(writer: ShardWriter, shards: Sequence[Shard], done: Callable[[Done], None]) -> None:
    """Write the shards in this process."""
    for shard in shards:
        done(writer.write(shard))


def write_by_processes(
    work: Work, shards: Sequence[Shard], workers: int, done: Callable[[Done], None], note: Note
) -> None:
    """Write the shards by processes of this machine, which take the next shard when they have finished one.

    If a process dies, another one takes its shard up, once.

    Raises:
        DataError: naming the shard at which processes died.
        RecspecError: what a process found wrong.
    """
    left, lock, deaths = deque(shards), Lock(), Counter[int]()
    processes: list[_Process] = []

    def work_off() -> None:
        process: _Process | None = None
        while True:
            with lock:
                if not left:
                    return
                shard = left.popleft()
                if process is None:
                    process = _Process(work, workers)
                    processes.append(process)
            found = process.ask(shard)
            if found is None:
                how, process = process.ended(), None
            with lock:
                if found is not None:
                    done(found)
                    continue
                if stopped:
                    return
                deaths[shard.number] += 1
                if deaths[shard.number] == MOST_DEATHS:
                    raise DataError(
                        f"{work.out}: {MOST_DEATHS} processes died at {shard.name}; the last one {how}. Finished "
                        "shards are kept; start the same command again with fewer workers or more memory"
                    )
                left.appendleft(shard)
                note(f"a process {how} at {shard.name}; another one takes it up")

    stopped = False
    with ThreadPoolExecutor(workers) as pool:
        try:
            for each in as_completed([pool.submit(work_off) for _ in range(min(workers, len(shards)))]):
                each.result()
        except BaseException:
            with lock:
                stopped = True
                left.clear()
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
        self._send(vars(work))

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
        """End the process at once."""
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


def write_by_spark(work: Work, shards: Sequence[Shard], workers: int, done: Callable[[Done], None]) -> None:
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
        named = session.sparkContext.parallelize([astuple(each) for each in shards], slots)
        frame = session.createDataFrame(named, "number long, start long, stop long")
        with without_pandas_warning():
            made = frame.mapInArrow(partial(_write_batches, asdict(work)), "number long, count long, unknown long")
        for row in made.toLocalIterator() if slots == 1 else made.collect():
            done(Done(row["number"], row["count"], row["unknown"]))
    except Exception as error:
        if not is_of_spark(error):
            raise
        raise DataError(f"{work.out}: Spark gave up: {_reason(error)}. Finished shards are kept") from None
    finally:
        session.stop()


def write_by_ray(work: Work, shards: Sequence[Shard], workers: int, done: Callable[[Done], None]) -> None:
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
        rows = [{name: getattr(each, name) for name in vars(each)} for each in shards]
        made = data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            BatchWriter,
            fn_constructor_args=(asdict(work),),
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


class BatchWriter:
    """Tables of shards that Spark or Ray sends -> what was written."""

    def __init__(self, work: Mapping[str, Any]) -> None:
        self._writer = ShardWriter(Work(**work))

    def __call__(self, batch: Any) -> pa.Table:
        return pa.Table.from_pylist([vars(self._writer.write(Shard(**row))) for row in batch.to_pylist()], DONE)


def _write_batches(work: Mapping[str, Any], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Shards that Spark sends -> what was written."""
    writer: BatchWriter | None = None
    for batch in batches:
        if batch.num_rows:
            writer = writer or BatchWriter(work)
            yield from writer(batch).to_batches()


def _reason(error: Exception) -> str:
    """The line of an engine's error that names the first cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    own = [line for line in lines if "recspec.base.errors." in line or "Error: " in line]
    return (own or lines or [type(error).__name__])[-1][:400]
