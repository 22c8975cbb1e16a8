"""A shard of users or rows -> a Parquet file: the work that every engine of a batch job hands out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recspec.errors import DataError
from recspec.files import whole_file
from recspec.inference import batch_job
from recspec.inference.answer_files import predict_split, predict_tables, recommended
from recspec.inference.batch_job import Done, Job, Shard
from recspec.inference.predictor import Predictor
from recspec.inference.row_files import ROWS
from recspec.inference.wanted import Wanted
from recspec.retrieval import index_file
from recspec.spec import FeatureSpec


@dataclass(frozen=True)
class Work:
    """What a process needs to write shards; plain values, so that it can be sent to other machines."""

    run: str
    out: str
    device: str = "cpu"
    allow_outside: bool = False
    mapped_items: bool = False
    """Whether the folder holds vectors of items, which stand for the model's scores."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class ShardWriter:
    """Answers one shard after another; the model is opened once."""

    def __init__(self, work: Work, predictor: Predictor | None = None) -> None:
        self.work, self.out = work, Path(work.out)
        self.job: Job = batch_job.read(self.out)
        self.predictor = predictor or Predictor.open(work.run, device=work.device, verify=False)
        if work.mapped_items:
            self.predictor.recommender.index = index_file.load(self.out / batch_job.ITEMS)

    def write(self, shard: Shard) -> Done:
        """Write a shard, unless it is there.

        Raises:
            RecspecError: if the model can't answer, or the input can't be read.
        """
        target = self.out / shard.name
        if target.exists():
            return batch_job.check(target, self.job, shard.number)
        with whole_file(target) as temporary:
            count, unknown = (
                self._recommend(shard, temporary) if self.job.answers == "recommendations"
                else self._predict(shard, temporary)
            )  # fmt: skip
        return Done(shard.number, count, unknown)

    def _recommend(self, shard: Shard, file: Path) -> tuple[int, int]:
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self.job.settings.items()
        }
        wanted = Wanted(**settings)
        path = self.job.input.get("users")
        users = None if path is None else read_bytes_of_users(Path(path), shard.start, shard.stop)
        part = slice(shard.start, shard.stop) if path is None else None
        schema, blocks = recommended(self.predictor, users, wanted, part)
        counts = [0, 0]

        def tables() -> Iterator[pa.Table]:
            for block in blocks:
                counts[0], counts[1] = counts[0] + block.users, counts[1] + block.unknown
                yield block.table

        self._write(file, schema, tables(), counts)
        return counts[0], counts[1]

    def _predict(self, shard: Shard, file: Path) -> tuple[int, int]:
        columns, asked = self.job.settings["columns"], self.job.input
        kept: list[pa.Table] = []
        if "split" in asked:
            predict_split(self.predictor, self.spec, asked["split"], kept.append, columns=columns,
                          part=range(shard.start, shard.stop))  # fmt: skip
        else:
            rows = rows_of(Path(asked["rows"]), shard.start, shard.stop)
            predict_tables(self.predictor, rows, kept.append, columns=columns, where=asked["rows"])
        counts = [sum(table.num_rows for table in kept), 0]
        self._write(file, kept[0].schema if kept else pa.schema([]), kept, counts)
        return counts[0], counts[1]

    @cached_property
    def spec(self) -> FeatureSpec:
        """The prepared dataset whose split is scored."""
        return FeatureSpec.load(Path(self.job.input["data"]), allow_outside=self.work.allow_outside)

    def _write(self, file: Path, schema: pa.Schema, tables: Iterable[pa.Table], counts: list[int]) -> None:
        """Write tables; the footer tells the counts, which are known at the end."""
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for table in tables:
                writer.write_table(table)
            told = batch_job.marked(pa.schema([]), self.job, counts[0], counts[1]).metadata
            writer.add_key_value_metadata(told)


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


def settings_of(wanted: Wanted) -> dict[str, Any]:
    """What decides the answers to every user, as plain values."""
    found: dict[str, Any] = asdict(replace(wanted, users=(), context={}))
    found = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
    return {**found, "context": dict(wanted.context)}
