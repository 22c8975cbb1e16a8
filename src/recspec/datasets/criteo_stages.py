"""The stages of preparing Criteo's logs: each result is a file or folder, kept when a run is killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import ibis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec.datasets.criteo_buckets import log_squared_boundaries
from recspec.datasets.criteo_files import RawFile, SplitRange, split_ranges, wrong_labels
from recspec.datasets.criteo_settings import Settings
from recspec.encoding import (
    VOCABULARIES,
    BucketEncoder,
    CrossEncoder,
    Encoder,
    Encoders,
    NumberEncoder,
    ScaleEncoder,
    Scaler,
    VocabularyEncoder,
)
from recspec.errors import DataError, listed
from recspec.prepare import (
    LABEL,
    ROW,
    SPLITS,
    Backend,
    ColumnType,
    Notes,
    PrepareContext,
    Scatter,
    TextFile,
    blocks,
    counts_by,
    fetch,
    limit_bytes,
    shuffled,
)
from recspec.spec import Feature
from recspec.storage import feature_to_write

Found = TypeVar("Found")
LOG_PLUS = 3
"""Numbers are published as ln(x + 3); the smallest is -3 in the Terabyte and -2 in Kaggle's file."""
BLOCK_ROWS = 262_144
"""Rows encoded in a block."""
JOINED_BYTES = 64
"""Memory of the engine per value of a vocabulary while rows are joined to it."""
ASSUMED_BYTES = 4 << 30
"""Assumed memory limit for joins with vocabularies, if none is given."""


@dataclass(frozen=True)
class Encoded:
    """Rows in buckets, with their encoders, features and summary."""

    encoders: Encoders
    features: Mapping[str, Feature]
    scatters: Mapping[str, Scatter]
    folders: Sequence[Path]
    counts: Mapping[str, int]
    summary: Mapping[str, object]


def finished_stages(work: Path, num_files: int, settings: Settings) -> str | None:
    """The stages that an interrupted run finished, if any; each file or column is a part of a stage."""
    parts = {
        "reading rows": [work / f"rows-{number}.parquet" for number in range(num_files)],
        "finding ids": [work / VOCABULARIES / f"{name}.parquet" for name in settings.categories],
        "encoding rows": [work / f"encoded-{number}" for number in range(num_files)],
    }
    found = None
    for stage, places in parts.items():
        held = sum(place.exists() for place in places)
        if held == len(places):
            found = f"after stage '{stage}'"
        elif held:
            return f"within stage '{stage}', of which {held} of {len(places)} parts are there"
    return found if any(place.exists() for places in parts.values() for place in places) else None


def _notes(summary: Mapping[str, Any], settings: Settings) -> dict[str, object]:
    notes = Notes()
    if summary["left_out"]:
        notes.dropped.append(f"{summary['left_out']:,} rows that no split takes (rows, or the days that are named)")
    if summary["numbers_without_logarithm"]:
        notes.changed.append(
            f"{summary['numbers_without_logarithm']:,} numbers of {-LOG_PLUS} or less have no ln(x + {LOG_PLUS}), so "
            "they count as missing"
        )
    least = {name: settings.least(name) for name in settings.categories}
    for number in sorted({number for number in least.values() if number > 1}):
        names = [name for name, own in least.items() if own == number]
        notes.changed.append(
            f"values of {listed(names)} in fewer than {number:,} rows share id 0 with missing ones (min_count)"
        )
    return notes.summary()


@dataclass(frozen=True)
class _Rows:
    """The staged rows of all files, numbered over all of them."""

    tables: Sequence[Table]
    counts: Sequence[int]
    first_rows: Sequence[int]
    ranges: Sequence[SplitRange]
    """The rows of each split, sorted."""

    def of(self, split: str) -> Table:
        """The rows of a split from all files."""
        parts = []
        for table, first, count in zip(self.tables, self.first_rows, self.counts, strict=True):
            for found in self.ranges:
                start, stop = max(found.start, first), min(found.stop, first + count)
                if found.split == split and stop > start:
                    whole = stop - start == count
                    parts.append(table if whole else table.filter(table[ROW] >= start, table[ROW] < stop))
        return ibis.union(*parts)

    def places(self, rows: NDArray[np.int64]) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """Yield the places of the rows of each split."""
        place = np.searchsorted([found.start for found in self.ranges], rows, side="right") - 1
        for number, found in enumerate(self.ranges):
            chosen = np.flatnonzero((place == number) & (rows < found.stop))
            if len(chosen):
                yield found.split, chosen


@dataclass(frozen=True)
class Stages:
    """Runs the stages. Each result is a file or folder in `work`, named once it is complete and never made twice."""

    backend: Backend
    work: Path
    files: Sequence[RawFile]
    settings: Settings
    context: PrepareContext

    def encode(self) -> Encoded:
        """Run all stages up to the buckets."""
        staged, facts = [], []
        for number in range(len(self.files)):  # each file is checked before the next one is read
            staged.append(self._read(number))
            facts.append(self._facts(number, staged[-1]))
        read = sum(file.path.stat().st_size for file in self.files)
        self.context.progress("reading rows", read, read)
        counts = [int(fact["rows"]) for fact in facts]
        ranges = sorted(split_ranges(self.files, counts, self.settings), key=lambda found: found.start)
        first_rows = [stop - count for stop, count in zip(accumulate(counts), counts, strict=True)]
        tables = [table.mutate(**{ROW: table[ROW] + first}) for table, first in zip(staged, first_rows, strict=True)]
        rows = _Rows(tables, counts, first_rows, ranges)
        train = rows.of("train")
        sizes = self._vocabularies(ibis.union(*tables) if self.settings.vocabulary_from == "all" else train)
        encoders, features = self._fit(train, sizes)
        split_rows = {name: sum(r.stop - r.start for r in ranges if r.split == name) for name in SPLITS}
        split_rows = {name: count for name, count in split_rows.items() if count}
        scatters = _scatters(features, split_rows, ranges, self.settings)
        folders = self._deal(rows, encoders, features, scatters, sizes)
        left_out = sum(counts) - sum(split_rows.values())
        if left_out:
            kept = ibis.union(*map(rows.of, split_rows))
            facts = [_once(self.work / "facts-kept.json", lambda: self._counted(kept))]
        summary = {
            "rows": split_rows,
            "left_out": left_out,
            "positives": sum(fact["positives"] for fact in facts),
            "numbers_without_logarithm": sum(fact["without_logarithm"] for fact in facts),
        }
        return Encoded(encoders, features, scatters, folders, split_rows, summary | _notes(summary, self.settings))

    def _read(self, number: int) -> Table:
        sizes = [file.path.stat().st_size for file in self.files]
        before, total = sum(sizes[:number]), sum(sizes)
        self.context.progress("reading rows", before, total)
        place = self.work / f"rows-{number}.parquet"
        if place.exists():
            return self.backend.read_parquet([place])
        path = self.files[number].path
        columns: dict[str, ColumnType] = dict.fromkeys((LABEL, *self.settings.numbers), "int64")
        columns |= dict.fromkeys(self.settings.categories, "string")
        file = TextFile(path, columns, separator="\t", header=False, quoted=False, required=(LABEL,))
        try:
            return self.backend.read_text(
                file,
                place,
                lambda share: self.context.progress("reading rows", before + int(share * sizes[number]), total),
            )
        except DataError as error:
            if not any(problem.startswith("line ") for problem in error.problems):
                raise
            raise DataError.of(str(path), [*error.problems, *wrong_labels(path)]) from None

    def _facts(self, number: int, table: Table) -> Mapping[str, int]:
        """Counts of a file's rows.

        Raises:
            DataError: if a label is neither 0 nor 1.
        """

        def counted() -> dict[str, int]:
            facts = self._counted(table)
            if facts["wrong"]:
                path, problems = self.files[number].path, wrong_labels(self.files[number].path)
                more = facts["wrong"] > len(problems)
                first = f": {facts['wrong']:,} labels are wrong, the first of them" if more else ""
                raise DataError.of(f"{path}{first}", problems)
            return facts

        return _once(self.work / f"facts-{number}.json", counted)

    def _counted(self, rows: Table) -> dict[str, int]:
        label = rows[LABEL]
        beyond = [(rows[name] <= -LOG_PLUS).cast("int64").sum() for name in self.settings.numbers]
        found = fetch(
            self.backend,
            rows.aggregate(
                rows=rows.count(),
                positives=label.sum(),
                wrong=(~label.isin([0, 1])).cast("int64").sum(),
                **{f"beyond_{place}": part for place, part in enumerate(beyond)},
            ),
        ).to_pylist()[0]
        return {
            "rows": int(found["rows"]),
            "positives": int(found["positives"] or 0),
            "wrong": int(found["wrong"] or 0),
            "without_logarithm": sum(int(found[f"beyond_{place}"] or 0) for place in range(len(beyond))),
        }

    def _vocabularies(self, rows: Table) -> dict[str, int]:
        categories = self.settings.categories
        for number, name in enumerate(categories):
            self.context.progress("finding ids", number, len(categories))
            place = self._vocabulary(name)
            if not place.exists():
                present = rows.filter(rows[name].notnull())
                counted = present.group_by(name).aggregate(count=present.count())
                kept = counted.filter(counted["count"] >= self.settings.least(name)).select(name, "count")
                _write_vocabulary(self.backend.batches(kept.order_by([ibis.desc("count"), name])), place)
        self.context.progress("finding ids", len(categories), len(categories))
        return {name: pq.read_metadata(self._vocabulary(name)).num_rows for name in categories}

    def _vocabulary(self, name: str) -> Path:
        return self.work / VOCABULARIES / f"{name}.parquet"

    def _fit(self, train: Table, sizes: Mapping[str, int]) -> tuple[Encoders, dict[str, Feature]]:
        settings = self.settings
        encoders: dict[str, Encoder] = {}
        features: dict[str, Feature] = {}
        for name in settings.numbers:
            encoders[name] = self._number(train, name)
            features[name] = Feature(dtype="float16" if settings.format == "split_binary" else "float32")
        for name in settings.numbers if settings.buckets else ():
            bucket = BucketEncoder(column=name, boundaries=self._boundaries(train, name))
            encoders[f"{name}_bucket"] = bucket
            features[f"{name}_bucket"] = _categorical(bucket.cardinality)
        for name, size in sizes.items():
            encoders[name] = VocabularyEncoder(vocabulary=name)
            features[name] = _categorical(size + 1)
        return Encoders(encoders), {**features, LABEL: Feature(dtype="bool")}

    def _number(self, train: Table, name: str) -> Encoder:
        if not self.settings.scale:
            return NumberEncoder(log_plus=LOG_PLUS)

        def moments() -> dict[str, float | None]:
            known = train.filter(train[name] > -LOG_PLUS)
            logarithm = (known[name] + LOG_PLUS).ln()
            found = fetch(self.backend, known.aggregate(mean=logarithm.mean(), std=logarithm.std(how="pop")))
            return dict(found.to_pylist()[0])

        held = _once(self.work / f"moments-{name}.json", moments)
        scaler = Scaler.of(held["mean"], held["std"])
        return ScaleEncoder(log_plus=LOG_PLUS, mean=scaler.mean, std=scaler.std)

    def _boundaries(self, train: Table, name: str) -> tuple[float, ...]:
        def cuts() -> list[int]:
            counted = fetch(self.backend, counts_by(train, name))
            values, counts = (counted.column(part).to_numpy() for part in (name, "rows"))
            return log_squared_boundaries(values, counts, self.settings.min_count)

        return tuple(float(cut) for cut in _once(self.work / f"boundaries-{name}.json", cuts))

    def _deal(
        self,
        rows: _Rows,
        encoders: Encoders,
        features: Mapping[str, Feature],
        scatters: Mapping[str, Scatter],
        sizes: Mapping[str, int],
    ) -> list[Path]:
        """Encode each file's rows into buckets; return their folders."""
        folders = []
        small, large = _by_size(sizes, _joined_values(self.context.memory_limit))
        done, total = 0, sum(rows.counts)
        for number, (table, first, count) in enumerate(zip(rows.tables, rows.first_rows, rows.counts, strict=True)):
            place = self.work / f"encoded-{number}"
            folders.append(place)
            wanted = any(found.start < first + count and found.stop > first for found in rows.ranges)
            if place.exists() or not wanted:
                done += count
                continue
            temporary = place.with_suffix(".tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            for split in scatters:
                (temporary / split).mkdir(parents=True)
            ids = {name: self._large(number, name, table, first, count) for name in large}
            for batch in blocks(self.backend, self._with_ids(table, small, leave=large), BLOCK_ROWS):
                numbers = batch.column(ROW).to_numpy()
                columns = self._columns(batch, encoders, features, {name: ids[name][numbers - first] for name in large})
                for split, chosen in rows.places(numbers):
                    part = numbers[chosen]
                    keys = (
                        shuffled(part, self.settings.seed)
                        if self.settings.is_shuffled(split)
                        else part.astype(np.uint64)
                    )
                    held = {name: column[chosen] for name, column in columns.items()}
                    scatters[split].deal(temporary / split, keys, held)
                done += batch.num_rows
                self.context.progress("encoding rows", done, total)
            temporary.replace(place)
            for name in large:
                self._ids(number, name).unlink()
        return folders

    def _with_ids(self, table: Table, small: Sequence[str], *, leave: Sequence[str] = ()) -> Table:
        """The rows with ids for the values of the columns `small`, 0 for values without one, and without `leave`."""
        joined = table
        for name in small:
            ids = self.backend.read_parquet([self._vocabulary(name)])
            ids = ids.select(**{f"_{name}": ids["value"], f"_{name}_id": ids["id"]})
            joined = joined.left_join(ids, joined[name] == ids[f"_{name}"])
        columns = {
            name: ibis.coalesce(joined[f"_{name}_id"], 0) if name in small else joined[name]
            for name in table.columns
            if name not in leave
        }
        return joined.select(**columns)

    def _large(self, number: int, name: str, table: Table, first: int, count: int) -> NDArray[np.int32]:
        """The ids of one column of a file, in the order of its rows, on disk.

        A join that exceeds the memory spills its rows; here they have two columns instead of all.
        """
        place = self._ids(number, name)
        if not place.exists():
            self.context.progress(f"looking up {name}", 0, count)
            temporary = place.with_suffix(".tmp")
            ids = np.memmap(temporary, np.int32, "w+", shape=(count,))
            for batch in self.backend.batches(self._with_ids(table.select(ROW, name), [name])):
                ids[batch.column(0).to_numpy() - first] = batch.column(1).to_numpy()
            ids.flush()
            temporary.replace(place)
            self.context.progress(f"looking up {name}", count, count)
        return np.memmap(place, np.int32, "r")

    def _ids(self, number: int, name: str) -> Path:
        return self.work / f"ids-{number}-{name}.bin"

    def _columns(
        self,
        batch: pa.Table,
        encoders: Encoders,
        features: Mapping[str, Feature],
        large: Mapping[str, NDArray[np.int32]],
    ) -> dict[str, NDArray[np.generic]]:
        columns: dict[str, NDArray[np.generic]] = {}
        for name, feature in features.items():
            encoder = encoders.encoders.get(name)
            if name in large:
                values: NDArray[np.generic] = large[name]
            elif encoder is None or isinstance(encoder, VocabularyEncoder):
                values = batch.column(name).to_numpy()
            else:
                assert not isinstance(encoder, CrossEncoder)
                found = encoders.encode_column(name, batch.column(encoder.column or name))
                assert isinstance(found, np.ndarray)
                values = found
            columns[name] = values.astype(np.dtype(feature.dtype))
        return columns


def _scatters(
    features: Mapping[str, Feature], split_rows: Mapping[str, int], ranges: Sequence[SplitRange], settings: Settings
) -> dict[str, Scatter]:
    dtypes = {name: np.dtype(feature.dtype) for name, feature in features.items()}
    scatters = {}
    for split, rows in split_rows.items():
        held = [found for found in ranges if found.split == split]
        keys = (0, 2**64) if settings.is_shuffled(split) else (held[0].start, max(found.stop for found in held))
        scatters[split] = Scatter(dtypes, rows, keys)
    return scatters


def _categorical(cardinality: int) -> Feature:
    return feature_to_write(Feature(), cardinality, "parquet")


def _by_size(sizes: Mapping[str, int], most: int) -> tuple[list[str], list[str]]:
    """Columns whose vocabularies hold at most `most` values together, smallest first, and the other columns."""
    held = dict(zip(sorted(sizes, key=lambda name: sizes[name]), accumulate(sorted(sizes.values())), strict=True))
    return [name for name in sizes if held[name] <= most], [name for name in sizes if held[name] > most]


def _joined_values(memory_limit: str | None) -> int:
    """Most values of vocabularies to join at once: an eighth of the memory, so that no row is spilled."""
    limit = limit_bytes(memory_limit) if memory_limit else ASSUMED_BYTES
    return limit // 8 // JOINED_BYTES


def _write_vocabulary(batches: Iterator[pa.RecordBatch], place: Path) -> None:
    """Write values in the given order, numbered from 1."""
    schema = pa.schema([("value", pa.string()), ("id", pa.int32())])
    place.parent.mkdir(exist_ok=True)
    temporary = place.with_suffix(".tmp")
    count = 0
    with pq.ParquetWriter(temporary, schema) as writer:
        for batch in batches:
            ids = np.arange(count + 1, count + 1 + batch.num_rows, dtype=np.int32)
            writer.write_batch(pa.record_batch([batch.column(0).cast(pa.string()), pa.array(ids)], schema=schema))
            count += batch.num_rows
    temporary.replace(place)


def _once(place: Path, find: Callable[[], Found]) -> Found:
    """The result of `find`, from this run or an earlier one."""
    if not place.exists():
        _write_json(place, find())
    held: Found = json.loads(place.read_text(encoding="utf-8"))
    return held


def _write_json(place: Path, found: object) -> None:
    temporary = place.with_suffix(".tmp")
    temporary.write_text(json.dumps(found), encoding="utf-8")
    temporary.replace(place)
