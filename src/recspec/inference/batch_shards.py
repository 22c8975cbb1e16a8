"""The shards of a batch job: a folder of Parquet files, written in any order by any process.

_job.json             what the job is: the model's digest, the input, the settings, users or rows of a shard
part-00000.parquet    the answers of the first `shard_size` users or rows; whole, or not there
.items/               vectors of items, made once and mapped by every process, until the job is done

A shard that is there is finished: it is renamed into place last, and names the job in its footer. So a job that was
killed goes on where it stopped, whatever killed it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recspec.base.errors import DataError, SettingsError, problems_in
from recspec.base.files import (
    PathError,
    local,
    locked_inside,
    manifest,
    read_json,
    removed,
    write_whole,
)
from recspec.feature_spec import FeatureSpec
from recspec.inference.answer_files import parquet_writer, predict_split, predict_tables, recommended, write_blocks
from recspec.inference.index import ItemIndex
from recspec.inference.predictor import ROWS, Predictor
from recspec.inference.recommendation import RecommendRequest

FILE_NAME, ITEMS = "_job.json", ".items"  # readers of Parquet folders pass over files that begin with _
FORMAT = 1
SHARD_SIZE = 1 << 14
"""Users or rows of a shard: some megabytes, and at 1 ms a user some seconds of work that a killed job repeats."""
MOST_SHARDS = 1_000_000
VERSION = ("input.bytes", "input.modified")
"""What tells a file that was written again."""
MARK = b"recspec"
"""The key of a shard's footer under which its job, users and unknown users stand."""


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
            write_whole(out / FILE_NAME, job.model_dump_json(indent=2) + "\n")
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
        with parquet_writer(target, footer) as write:
            count, strangers = answer(shard, write)
            told = {"job": self.job.digest, "count": count, "unknown": strangers}
            footer[MARK] = json.dumps(told).encode()
        return Done(shard.number, count, strangers)

    def _recommend(self, shard: Shard, write: Callable[[pa.Table], None]) -> tuple[int, int]:
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self.job.settings.items()
        }
        wanted = RecommendRequest(**settings)
        path = self.job.input.get("users")
        users = None if path is None else read_bytes_of_users(Path(path), shard.start, shard.stop)
        part = slice(shard.start, shard.stop) if path is None else None
        return write_blocks(*recommended(self.predictor, users, wanted, part), write)

    def _predict(self, shard: Shard, write: Callable[[pa.Table], None]) -> tuple[int, int]:
        how, asked, part = self.job.settings, self.job.input, range(shard.start, shard.stop)
        if "split" in asked:
            split = asked["split"]
            return predict_split(self.predictor, self.spec, split, write, **how, part=part).rows, 0
        rows = rows_of(Path(asked["rows"]), shard.start, shard.stop)
        return predict_tables(self.predictor, rows, write, **how, where=asked["rows"]).rows, 0

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
