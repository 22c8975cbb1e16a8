"""A job of many answers: a folder of Parquet shards, written in any order by any number of processes.

_job.json             what the job is: the model's digest, the input, the settings, users or rows of a shard
part-00000.parquet    the answers of the first `shard_size` users or rows; whole, or not there
.items/               vectors of items, made once and mapped by every process, until the job is done

A shard that is there is finished: it is renamed into place last, and names the job in its footer. So a job that was
killed goes on where it stopped, whatever killed it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recspec.errors import DataError, SettingsError, problems_in
from recspec.files import PathError, local, locked_inside, read_json, removed, whole_file

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
        if any(
            name.startswith("input.") and name not in VERSION for name in names
        ):  # another input has another version
            names = [name for name in names if name not in VERSION]
        if "input.modified" in names:
            names.remove("input.modified")
            return ["the input file was written again since", *_told(names, mine, theirs)]
        return _told(names, mine, theirs)


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
        raise DataError.of(
            f"{out / FILE_NAME}: damaged; remove the folder, or name another one", problems_in(error)
        ) from None
    if job.format != FORMAT:
        raise DataError(f"{out / FILE_NAME}: format {job.format}; this recspec reads {FORMAT}")
    return job


def marked(schema: pa.Schema, job: Job, count: int, unknown: int) -> pa.Schema:
    """A shard's schema, which names the job."""
    told = {"job": job.digest, "count": count, "unknown": unknown}
    return schema.with_metadata({**(schema.metadata or {}), MARK: json.dumps(told).encode()})


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


def _told(names: Iterable[str], mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    return [f"{name} is {_shown(mine.get(name))}, and was {_shown(theirs.get(name))}" for name in names]


def _shown(value: object) -> str:
    text = "not given" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
