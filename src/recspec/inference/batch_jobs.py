"""Batch jobs: recommendations for many users, probabilities of many rows, as a folder of Parquet shards.

_job.json             what the job is: the model's digest, the input, the settings, users or rows of a shard
part-00000.parquet    the answers of the first `shard_size` users or rows; whole, or not there
.items/               vectors of items, made once and mapped by every process, until the job is done

A shard that is there is finished: it is renamed into place last, and names the job in its footer. So a job that was
killed goes on where it stopped, whatever killed it. Spark and Ray only hand out shards. Their processes write the
files, so the job's folder and the run must be readable by them under the same paths.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recspec.base.errors import DataError, RecspecError, SettingsError, problems_in, require_extra, unknown
from recspec.base.files import (
    PathError,
    local,
    locked_inside,
    manifest,
    read_json,
    removed,
    temporary_name,
    whole_file,
)
from recspec.base.spark_session import is_of_spark, start_session, without_pandas_warning
from recspec.data.storage import open_split
from recspec.feature_spec import FeatureSpec
from recspec.inference.answer_files import Progress, parquet_writer, predict_split, predict_tables, recommended, silent
from recspec.inference.index import INDEX_FILE, ItemIndex
from recspec.inference.pipeline import has_vectors, item_vectors
from recspec.inference.predictor import ROWS, Predictor, note_of_scores
from recspec.inference.recommendation import RecommendRequest

Engine = Literal["local", "spark", "ray"]
Note = Callable[[str], None]

FILE_NAME, ITEMS = "_job.json", ".items"  # readers of Parquet folders pass over files that begin with _
FORMAT = 1
SHARD_SIZE = 1 << 14
"""Users or rows of a shard: some megabytes, and at 1 ms a user some seconds of work that a killed job repeats."""
MOST_SHARDS, MOST_WORKERS = 1_000_000, 1024
MOST_DEATHS = 2
"""Processes that may die at one shard; more would die of it too."""
VERSION = ("input.bytes", "input.modified")
"""What tells a file that was written again."""
MARK = b"recspec"
"""The key of a shard's footer under which its job, users and unknown users stand."""
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
        if found:
            raise SettingsError.of("batch job", found)
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

    The columns are those of `recommend_to_parquet`. A job that was killed goes on with its unfinished shards.

    Raises:
        RequestError: with every problem of the request.
        SettingsError: if `out` holds another job, or a setting is out of range.
        DataError: if processes die of a shard; a second start goes on.
    """
    how.check()
    predictor.recommender.check(wanted)  # raises before any work
    if users is None:
        asked, count = dict[str, Any](all=True), len(predictor.users)
    else:
        asked, count = {"users": str(users.resolve()), **_version(users)}, count_users(users)
    job = Job.of(predictor, "recommendations", asked, settings_of(wanted), count, how.shard_size)
    through_index = predictor.pipeline is None and not wanted.boosts and has_vectors(predictor.model)
    return _run(predictor, job, out, how, progress, note, through_index=through_index)


def predict_shards(
    predictor: Predictor,
    rows: Path | FeatureSpec,
    out: Path,
    how: How,
    *,
    split: str = "test",
    columns: Sequence[str] | None = None,
    allow_outside: bool = False,
    progress: Progress = silent,
    note: Note = no_note,
) -> Counts:
    """Write rows of a Parquet file, or a split of a prepared dataset, with `Predictor.column`, as Parquet shards.

    Raises:
        SettingsError: if `out` holds another job, or a setting is out of range.
        DataError: if the rows can't be read, or processes die of a shard; a second start goes on.
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
    settings = {"columns": None if columns is None else list(columns)}
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


class Job(BaseModel):
    """What decides the answers of a job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    answers: Literal["recommendations", "probabilities"]
    model: str = Field(max_length=64)
    """SHA-256 of the manifest of the model's bundle."""
    input: dict[str, Any]
    settings: dict[str, Any]
    count: int = Field(ge=0)
    """Users or rows, as the input's kind tells."""
    shard_size: int = Field(ge=1)

    @classmethod
    def of(
        cls,
        predictor: Predictor,
        answers: Literal["recommendations", "probabilities"],
        input: dict[str, Any],
        settings: dict[str, Any],
        count: int,
        shard_size: int,
    ) -> Job:
        """The job of a model."""
        digest = manifest.digest(predictor.bundle.folder)
        return cls(answers=answers, model=digest, input=input, settings=settings, count=count, shard_size=shard_size)

    @property
    def num_shards(self) -> int:
        """At least one, so that a job without users has a file that tells its columns."""
        return max(1, -(-self.count // self.shard_size))

    @property
    def digest(self) -> str:
        """SHA-256 of all of this."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()

    def differences(self, other: Job) -> list[str]:
        """In which respects another job is another one, a sentence each."""
        mine, theirs = _flat(self.model_dump()), _flat(other.model_dump())
        names = [name for name in dict.fromkeys((*mine, *theirs)) if mine.get(name) != theirs.get(name)]
        if any(name.startswith("input.") and name not in VERSION for name in names):  # it has another version, too
            names = [name for name in names if name not in VERSION]
        again = ["the input file was written again since"] * ("input.modified" in names)
        return again + [
            f"{name} is {_shown(mine.get(name))}, and was {_shown(theirs.get(name))}"
            for name in names
            if name != "input.modified"
        ]


@dataclass(frozen=True)
class Shard:
    """A part of a job's input: users or rows from `start` on, up to `stop`; of a file of users, bytes."""

    number: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"part-{self.number:05}.parquet"


@dataclass(frozen=True)
class Done:
    """What a finished shard holds."""

    number: int
    count: int
    """Users or rows."""
    unknown: int
    """Users that the model does not know."""


@contextmanager
def opened(out: Path, job: Job) -> Iterator[dict[int, Done]]:
    """Keep other jobs from the folder `out` and begin a job in it, or take it up again; gives the finished shards.

    Raises:
        SettingsError: if `out` holds another job, or files of something else.
        DataError: if another process is at it, or a shard is damaged.
    """
    out = local(out, "out")
    if job.num_shards > MOST_SHARDS:
        raise SettingsError(f"{out}: {job.num_shards:,} shards; take a larger shard size, for at most {MOST_SHARDS:,}")
    if out.exists() and not out.is_dir():
        raise SettingsError(f"{out}: is a file; name a folder for the shards, or a file that ends in .parquet")
    if out.is_dir() and not (out / FILE_NAME).exists() and any(not each.name.startswith(".") for each in out.iterdir()):
        raise SettingsError(f"{out}: is not empty and holds no {FILE_NAME}; name a new folder")
    with locked_inside(out, "writing answers to"):
        begun = (out / FILE_NAME).exists()
        if begun:
            if problems := job.differences(read(out)):
                advice = "name another folder, or remove this one"
                raise SettingsError.of(f"{out}: holds the answers of another job; {advice}", problems)
        else:
            with whole_file(out / FILE_NAME) as temporary:
                temporary.write_text(job.model_dump_json(indent=2) + "\n", encoding="utf-8")
        for left in out.glob(".part-*.tmp"):  # of a process that was killed
            left.unlink(missing_ok=True)
        held = [(number, out / Shard(number, 0, 0).name) for number in range(job.num_shards)]
        done = {number: check(file, job, number) for number, file in held if file.exists()}
        try:
            yield done
        except BaseException:
            if not begun and not any(file.exists() for _, file in held):  # so that the folder is free for another job
                removed(out / ITEMS)
                (out / FILE_NAME).unlink(missing_ok=True)
            raise
        if all(file.exists() for _, file in held):
            removed(out / ITEMS)


def read(out: Path) -> Job:
    """The job of a folder. Raises `DataError` if it can't be read."""
    try:
        job = Job.model_validate(read_json(out / FILE_NAME))
    except (PathError, OSError) as error:
        raise DataError(f"{error}; remove the folder, or name another one") from None
    except ValidationError as error:
        where = f"{out / FILE_NAME}: damaged; remove the folder, or name another one"
        raise DataError.of(where, problems_in(error)) from None
    if job.format != FORMAT:
        raise DataError(f"{out / FILE_NAME}: format {job.format}; this recspec reads {FORMAT}")
    return job


def check(file: Path, job: Job, number: int) -> Done:
    """What a shard tells of itself. Raises `DataError` if it is damaged, or of another job."""
    try:
        told = json.loads((pq.read_metadata(file).metadata or {})[MARK])
        done = Done(number, int(told["count"]), int(told["unknown"]))
        of = str(told["job"])
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{file}: is no whole shard ({str(error)[:100]}); remove it, and start the job again") from None
    if of != job.digest:
        raise DataError(f"{file}: belongs to another job; remove it, and start the job again")
    return done


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values by `name.name`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = _flat(value) if isinstance(value, Mapping) else None
        flat |= {name: value} if inner is None else {f"{name}.{key}": each for key, each in inner.items()}
    return flat


def _shown(value: object) -> str:
    text = "not given" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


# --- writing a shard -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What a process needs to write shards; plain values, so that it can be sent to other machines."""

    run: str
    out: str
    device: str = "cpu"
    allow_outside: bool = False
    mapped_items: bool = False
    """Whether the folder holds vectors of items, which stand for the model's scores."""


class ShardWriter:
    """Answers one shard after another; the model is opened once."""

    def __init__(self, work: Work, predictor: Predictor | None = None) -> None:
        self.work, self.out = work, Path(work.out)
        self.job: Job = read(self.out)
        self.predictor = predictor or Predictor.open(work.run, device=work.device, verify=False)
        if work.mapped_items:
            self.predictor.recommender.index = ItemIndex.load(self.out / ITEMS)

    def write(self, shard: Shard) -> Done:
        """Write a shard, unless it is there.

        Raises:
            RecspecError: if the model can't answer, or the input can't be read.
        """
        target = self.out / shard.name
        if target.exists():
            return check(target, self.job, shard.number)
        answer = self._recommend if self.job.answers == "recommendations" else self._predict
        footer: dict[bytes, bytes] = {}  # tells the counts, which are known at the end
        with parquet_writer(target, None, footer) as write:
            count, strangers = answer(shard, write)
            told = {"job": self.job.digest, "count": count, "unknown": strangers}
            footer[MARK] = json.dumps(told).encode()
        return Done(shard.number, count, strangers)

    def _recommend(self, shard: Shard, write: Callable[[pa.Table], None]) -> tuple[int, int]:
        settings = self.job.settings.items()
        wanted = RecommendRequest(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in settings}
        )
        path = self.job.input.get("users")
        users = None if path is None else read_bytes_of_users(Path(path), shard.start, shard.stop)
        part = slice(shard.start, shard.stop) if path is None else None
        schema, blocks = recommended(self.predictor, users, wanted, part)
        count = strangers = 0
        for block in blocks:
            write(block.table)
            count, strangers = count + block.users, strangers + block.unknown
        if not count:
            write(schema.empty_table())
        return count, strangers

    def _predict(self, shard: Shard, write: Callable[[pa.Table], None]) -> tuple[int, int]:
        columns, asked, part = self.job.settings["columns"], self.job.input, range(shard.start, shard.stop)
        if "split" in asked:
            split = asked["split"]
            return predict_split(self.predictor, self.spec, split, write, columns=columns, part=part).rows, 0
        rows = rows_of(Path(asked["rows"]), shard.start, shard.stop)
        return predict_tables(self.predictor, rows, write, columns=columns, where=asked["rows"]).rows, 0

    @cached_property
    def spec(self) -> FeatureSpec:
        """The prepared dataset whose split is scored."""
        return FeatureSpec.load(Path(self.job.input["data"]), allow_outside=self.work.allow_outside)


def shards_of(job: Job) -> list[Shard]:
    """The shards of a job's users or rows."""
    if (path := job.input.get("users")) is not None:
        offsets = [*_offsets(Path(path), job.shard_size)[0]]
        pairs = list(pairwise(offsets)) or [(0, 0)]
    else:
        starts = range(0, max(1, job.count), job.shard_size)
        pairs = [(start, min(job.count, start + job.shard_size)) for start in starts]
    return [Shard(number, start, stop) for number, (start, stop) in enumerate(pairs)]


def count_users(path: Path) -> int:
    """The lines of a file of users that name one."""
    return _offsets(path, 1 << 62)[1]


def _offsets(path: Path, size: int) -> tuple[list[int], int]:
    """Bytes of a file of users at which every `size` users begin, then its end; and the number of users."""
    offsets, users, place = list[int](), 0, 0
    try:
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    if users % size == 0:
                        offsets.append(place)
                    users += 1
                place += len(line)
    except OSError as error:
        raise DataError(f"{path}: can't be read as a list of users: {error}") from None
    return [*offsets, place], users


def read_bytes_of_users(path: Path, start: int, stop: int) -> list[str]:
    """Raw user ids of some bytes of a text file, one a line."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            lines = file.read(stop - start).split(b"\n")
        return [line.strip().decode("utf-8") for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: can't be read as a list of users: {error}") from None


def rows_of(path: Path, start: int, stop: int) -> Iterator[pa.Table]:
    """Rows `start` to `stop` of a Parquet file, in blocks; row groups before them are not read."""
    try:
        with pq.ParquetFile(path) as file:
            first, groups = 0, []
            for group in range(file.metadata.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                if first + size > start and first < stop:
                    groups.append((group, first))
                first += size
            at = groups[0][1] if groups else 0
            for batch in file.iter_batches(ROWS, row_groups=[group for group, _ in groups]):
                low, high = max(start - at, 0), min(stop - at, batch.num_rows)
                if low < high:
                    yield pa.Table.from_batches([batch.slice(low, high - low)])
                at += batch.num_rows
            if not groups:
                yield file.schema_arrow.empty_table()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: can't be read as parquet: {error}") from None


def settings_of(wanted: RecommendRequest) -> dict[str, Any]:
    """What decides the answers to every user, as plain values."""
    found: dict[str, Any] = asdict(replace(wanted, users=(), context={}))
    found = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
    return {**found, "context": dict(wanted.context)}


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
