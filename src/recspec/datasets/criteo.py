"""Criteo's click logs: a label, integers and hashed categories, separated by tabs, without a header, of any size.

Kaggle's train.txt is split by rows, the Terabyte's day_0 to day_23 by days, always in order of time. The work has
stages that survive a kill: rows are read into Parquet, counted, and encoded into buckets (`Scatter`); then splits are
written. The engine joins rows with vocabularies, so Python holds none. All features have the role context, because
there are neither users nor items.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import ibis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec.base.errors import DataError, listed
from recspec.base.files import whole_file, write_whole
from recspec.base.prefetch import prefetched
from recspec.data.encoding import (
    ENCODERS_FILE,
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
from recspec.data.prepare import (
    LABEL,
    ROW,
    SPLITS,
    Backend,
    ColumnType,
    Notes,
    Part,
    PartFiles,
    PrepareContext,
    Prepared,
    Progress,
    Scatter,
    Share,
    TextFile,
    blocks_of_part,
    counts_by,
    fetch,
    gather,
    prepared,
    shuffled,
)
from recspec.data.storage import SplitWriter, feature_to_write
from recspec.datasets import criteo_files
from recspec.datasets.criteo_files import RawFile, SplitRange
from recspec.datasets.criteo_files import Settings as Settings
from recspec.feature_spec import ChunkType, Feature, FeatureSpec

NAME = "criteo"
_Values: TypeAlias = Mapping[str, NDArray[Any]]
LOG_PLUS = 3  # numbers are published as ln(x + 3); the smallest is -3 in the Terabyte and -2 in Kaggle's file
BLOCK_ROWS = 262_144  # rows encoded in a block
JOINED_BYTES = 64  # memory of the engine per value of a vocabulary while rows are joined to it
ASSUMED_BYTES = 4 << 30  # assumed memory limit for joins and sorting, if none is given
SORTED_TIMES = 6  # memory that sorting and writing a bucket takes, in buckets (measured: 5.0 to 5.6)
JOINED_COLUMN_BYTES = 32 << 20  # of the memory limit for each join in a query (measured: 5 MB of the engine's share)
BUCKETS = "buckets"  # folders of encoded rows; another layout needs another name, because a killed run goes on with it


def prepare(context: PrepareContext, settings: Settings) -> Prepared:
    """Prepare a file of rows or a folder of days; a killed run continues at its last finished stage."""
    files = criteo_files.find_days(context.raw, settings)
    for file in files:
        criteo_files.check_width(file.path, settings)

    def build(folder: Path) -> FeatureSpec:
        shutil.rmtree(folder / "work" / "engine", ignore_errors=True)
        with context.connect(folder / "work" / "engine") as backend:
            encoded = _Stages(backend, folder / "work", files, settings, context).encode()
            return _write(backend, folder, encoded, settings, context.progress)

    return prepared.run(
        context,
        NAME,
        settings,
        [file.path for file in files],
        build,
        resumable=True,
        finished=lambda folder: _finished_stages(folder / "work", len(files), settings),
    )


def _write(backend: Backend, folder: Path, encoded: _Encoded, settings: Settings, progress: Progress) -> FeatureSpec:
    encoded.encoders.save(folder)
    (folder / VOCABULARIES).mkdir(exist_ok=True)
    for name in settings.categories:
        place = Path(VOCABULARIES, f"{name}.parquet")
        _copy_values(folder / "work" / place, folder / place)
    done, total = 0, sum(encoded.counts.values())
    limit = backend.memory_limit or ASSUMED_BYTES

    def report(rows: int) -> None:
        nonlocal done
        done += rows
        progress("writing splits", done, total)

    shares: list[tuple[str, Sequence[int]]] = []
    for split, scatter in encoded.scatters.items():
        shutil.rmtree(folder / split, ignore_errors=True)  # of a run killed here
        buckets = range(scatter.num_buckets)
        apart = settings.format == "parquet" or backend.distributed  # files of other formats would be joined again
        shares += [(split, [bucket]) for bucket in buckets] if apart else [(split, buckets)]
    largest = max(scatter.largest(encoded.of(split)) for split, scatter in encoded.scatters.items())
    at_once = limit // 2 // (SORTED_TIMES * largest + 1)
    parts = backend.each_share(shares, _Writing(encoded, settings.format), report, at_once=at_once)
    if done != total:
        lost = f"{done:,} of the {total:,} encoded rows are in {folder / 'work'}"
        raise DataError(f"{lost}; remove that folder and start again")
    chunks = gather(backend, folder, parts)
    channels = {"context": tuple(name for name in encoded.features if name != LABEL), "label": (LABEL,)}
    metadata = {
        "dataset": NAME,
        "catalogues": {},
        "encoders": ENCODERS_FILE,
        "vocabularies": VOCABULARIES,
        "summary": dict(encoded.summary),
    }
    return FeatureSpec(encoded.features, chunks, channels, metadata, folder)


@dataclass(frozen=True)
class _Writing:
    """Writes buckets of a split. Executors of a cluster receive it."""

    encoded: _Encoded
    format: ChunkType

    def __call__(self, share: Share[tuple[str, Sequence[int]]]) -> PartFiles:
        split, buckets = share.item
        rows = self.encoded.scatters[split].ordered(self.encoded.of(split), BLOCK_ROWS, buckets)
        with SplitWriter(share.folder, split, self.encoded.features, self.format, label=LABEL) as writer:
            for block in prefetched(rows, 0) if len(buckets) > 1 else rows:
                writer.write({**block})
                share.done(len(block[LABEL]))
        return PartFiles.of(share.folder, {split: writer})


def _copy_values(place: Path, target: Path) -> None:
    """Copy a vocabulary as `Vocabulary.load` reads it: values in the order of ids."""
    with pq.ParquetWriter(target, pa.schema([("value", pa.string())])) as writer:
        for batch in pq.ParquetFile(place).iter_batches(columns=["value"]):
            writer.write_batch(batch)


# --- stages ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Encoded:
    encoders: Encoders
    features: Mapping[str, Feature]
    scatters: Mapping[str, Scatter]
    folders: Sequence[Path]
    """With the buckets of each split in a folder of its own."""
    counts: Mapping[str, int]
    summary: Mapping[str, object]

    def of(self, split: str) -> list[Path]:
        """The folders with the buckets of a split."""
        return [folder / split for folder in self.folders]


def _finished_stages(work: Path, num_files: int, settings: Settings) -> str | None:
    """The finished stages of an interrupted run, if any; a stage has a part for each file or column."""
    parts = {
        "reading rows": [work / f"rows-{number}.parquet" for number in range(num_files)],
        "finding ids": [work / VOCABULARIES / f"{name}.parquet" for name in settings.categories],
        "encoding rows": [work / f"{BUCKETS}-{number}" for number in range(num_files)],
    }
    found = None
    for stage, places in parts.items():
        held = sum(place.exists() for place in places)
        if 0 < held < len(places):
            return f"within stage '{stage}', of which {held} of {len(places)} parts are there"
        found = f"after stage '{stage}'" if held else found
    return found


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
    for number in sorted({*least.values()} - {0, 1}):
        names = listed(name for name, own in least.items() if own == number)
        what = f"values of {names} in fewer than {number:,} rows"
        notes.changed.append(f"{what} share id 0 with missing ones (min_count)")
    return notes.summary()


@dataclass(frozen=True)
class _Rows:
    """The staged rows of all files, numbered over all of them."""

    parts: Sequence[tuple[Table, int, int]]
    """Each file's rows, the number of the first one, and that after the last one."""
    ranges: Sequence[SplitRange]  # the rows of each split, sorted

    def of(self, split: str) -> Table:
        found = []
        for table, first, end in self.parts:
            for part in (part for part in self.ranges if part.split == split):
                start, stop = max(part.start, first), min(part.stop, end)
                if stop > start:
                    whole = (start, stop) == (first, end)
                    found.append(table if whole else table.filter(table[ROW] >= start, table[ROW] < stop))
        return ibis.union(*found)


@dataclass(frozen=True)
class _Encoding:
    """Encodes rows with ids into buckets of the splits, in the folder of a part. Executors of a cluster receive it."""

    encoders: Encoders
    features: Mapping[str, Feature]
    scatters: Mapping[str, Scatter]
    ranges: Sequence[SplitRange]
    settings: Settings
    looked_up: Mapping[str, Path]
    """Files with the ids of columns that the rows lack."""
    first: int
    """The number of the row that these files begin with."""

    def __call__(self, part: Part) -> Path:
        ids = {name: np.memmap(path, np.int32, "r") for name, path in self.looked_up.items()}
        for split in self.scatters:
            (part.folder / split).mkdir()
        for batch in blocks_of_part(part, BLOCK_ROWS):
            rows = batch.column(ROW).to_numpy()
            columns = self._columns(batch, {name: held[rows - self.first] for name, held in ids.items()})
            for split, chosen in self._places(rows):
                keys = rows[chosen].astype(np.uint64)
                if self.settings.is_shuffled(split):
                    keys = shuffled(rows[chosen], self.settings.seed)
                self.scatters[split].deal(part.folder / split, keys, {name: columns[name][chosen] for name in columns})
            part.done(batch.num_rows)
        return part.folder

    def _columns(self, batch: pa.Table, ids: _Values) -> _Values:
        columns = {}
        for name, feature in self.features.items():
            encoder = self.encoders.encoders.get(name)
            if name in ids:
                values = ids[name]
            elif encoder is None or isinstance(encoder, VocabularyEncoder):
                values = batch.column(name).to_numpy()
            else:
                assert not isinstance(encoder, CrossEncoder)
                encoded = self.encoders.encode_column(name, batch.column(encoder.column or name))
                assert isinstance(encoded, np.ndarray)
                values = encoded
            columns[name] = values.astype(np.dtype(feature.dtype))
        return columns

    def _places(self, rows: NDArray[np.int64]) -> Iterator[tuple[str, NDArray[np.int64] | slice]]:
        """Yield the places of the rows of each split, as a slice if they lie together."""
        place = np.searchsorted([found.start for found in self.ranges], rows, side="right") - 1
        for number, found in enumerate(self.ranges):
            chosen = np.flatnonzero((place == number) & (rows < found.stop))
            if len(chosen):
                first, last = int(chosen[0]), int(chosen[-1])
                yield found.split, slice(first, last + 1) if last - first + 1 == len(chosen) else chosen


@dataclass(frozen=True)
class _Stages:
    """Runs the stages. Each result is a file or folder in `work`, named once it is complete and never made twice."""

    backend: Backend
    work: Path
    files: Sequence[RawFile]
    settings: Settings
    context: PrepareContext

    def encode(self) -> _Encoded:
        staged, facts = [], []
        for number in range(len(self.files)):  # each file is checked before the next one is read
            staged.append(self._read(number))
            facts.append(self._facts(number, staged[-1]))
        read = sum(file.path.stat().st_size for file in self.files)
        self.context.progress("reading rows", read, read)
        counts = [int(fact["rows"]) for fact in facts]
        ranges = sorted(criteo_files.split_ranges(self.files, counts, self.settings), key=lambda found: found.start)
        rows = _Rows(
            [
                # numbered from 0 in each file; Ibis writes a query without a sum in less time
                (table.mutate(**{ROW: table[ROW] + end - count}) if end > count else table, end - count, end)
                for table, count, end in zip(staged, counts, accumulate(counts), strict=True)
            ],
            ranges,
        )
        train = rows.of("train")
        everything = ibis.union(*(table for table, *_ in rows.parts))
        sizes = self._vocabularies(everything if self.settings.vocabulary_from == "all" else train)
        encoders, features = self._fit(train, sizes)
        split_rows = {name: sum(r.stop - r.start for r in ranges if r.split == name) for name in SPLITS}
        split_rows = {name: count for name, count in split_rows.items() if count}
        scatters = _scatters(features, split_rows, ranges, self.settings)
        folders = self._deal(rows, encoders, features, scatters, sizes)
        left_out = sum(counts) - sum(split_rows.values())
        if left_out:
            kept = ibis.union(*map(rows.of, split_rows))
            facts = [_once(self.work / "facts-kept.json", lambda: self._counted(kept))]
        positives, beyond = (sum(fact[name] for fact in facts) for name in ("positives", "without_logarithm"))
        summary: dict[str, Any] = {"rows": split_rows, "left_out": left_out, "positives": positives}
        summary["numbers_without_logarithm"] = beyond
        return _Encoded(encoders, features, scatters, folders, split_rows, summary | _notes(summary, self.settings))

    def _read(self, number: int) -> Table:
        sizes = [file.path.stat().st_size for file in self.files]
        before, total = sum(sizes[:number]), sum(sizes)
        self.context.progress("reading rows", before, total)
        place, path = self.work / f"rows-{number}.parquet", self.files[number].path
        if place.exists():
            return self.backend.read_parquet([place], row=True)
        columns: dict[str, ColumnType] = dict.fromkeys((LABEL, *self.settings.numbers), "int64")
        columns |= dict.fromkeys(self.settings.categories, "string")
        file = TextFile(path, columns, separator="\t", header=False, quote="", required=(LABEL,))

        def progress(share: float) -> None:
            self.context.progress("reading rows", before + int(share * sizes[number]), total)

        try:
            return self.backend.read_text(file, place, progress)
        except DataError as error:
            if not any(problem.startswith("line ") for problem in error.problems):
                raise
            raise DataError.of(str(path), [*error.problems, *criteo_files.wrong_labels(path)]) from None

    def _facts(self, number: int, table: Table) -> Mapping[str, int]:
        """Counts of a file's rows, whose labels must all be 0 or 1."""
        facts: dict[str, int] = _once(self.work / f"facts-{number}.json", lambda: self._counted(table))
        if facts["wrong"]:
            path = self.files[number].path
            problems = criteo_files.wrong_labels(path)
            more = facts["wrong"] > len(problems)
            first = f": {facts['wrong']:,} labels are wrong, the first of them" if more else ""
            raise DataError.of(f"{path}{first}", problems)
        return facts

    def _counted(self, rows: Table) -> dict[str, int]:
        label, numbers = rows[LABEL], self.settings.numbers
        wrong = (~label.isin([0, 1])).cast("int64").sum()
        beyond = {name: (rows[name] <= -LOG_PLUS).cast("int64").sum() for name in numbers}
        counts = rows.aggregate(rows=rows.count(), positives=label.sum(), wrong=wrong, **beyond)
        found = {name: int(count or 0) for name, count in fetch(self.backend, counts).to_pylist()[0].items()}
        return {**found, "without_logarithm": sum(found[name] for name in numbers)}

    def _vocabularies(self, rows: Table) -> dict[str, int]:
        categories = self.settings.categories
        for number, name in enumerate(categories):
            self.context.progress("finding ids", number, len(categories))
            place = self._vocabulary(name)
            if not place.exists():
                counted = rows.group_by(name).aggregate(count=rows.count())
                kept = counted.filter(counted[name].notnull(), counted["count"] >= self.settings.least(name))
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
        folders: list[Path] = []
        small, large = [*sizes], list[str]()
        if not self.backend.distributed:  # a vocabulary's join takes an eighth of the memory, so that no row is spilled
            limit = self.backend.memory_limit or ASSUMED_BYTES
            small, large = _by_size(sizes, limit // 8 // JOINED_BYTES, max(1, limit // JOINED_COLUMN_BYTES))
        done, total = 0, rows.parts[-1][2]

        def report(rows: int) -> None:
            nonlocal done
            done += rows
            self.context.progress("encoding rows", done, total)

        for number, (table, first, end) in enumerate(rows.parts):
            if not any(found.start < end and found.stop > first for found in rows.ranges):
                done += end - first
                continue
            place = self.work / f"{BUCKETS}-{number}"
            if place.exists():
                done += end - first
            else:
                temporary = place.with_suffix(".tmp")
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                ids = {name: self._large(number, name, table, first, end - first) for name in large}
                encoding = _Encoding(encoders, features, scatters, rows.ranges, self.settings, ids, first)
                made = self.backend.each_part(self._with_ids(table, small, leave=large), encoding, report)
                for part, folder in enumerate(made):
                    folder.replace(temporary / str(part))
                temporary.replace(place)
                for name in large:
                    self._ids(number, name).unlink()
            folders += place.iterdir()
        return folders

    def _with_ids(self, table: Table, small: Sequence[str], *, leave: Sequence[str] = ()) -> Table:
        """The rows with ids for the values of the columns `small`, 0 for values without one, and without `leave`."""
        joined = table
        for name in small:
            ids = self.backend.read_parquet([self._vocabulary(name)])
            ids = ids.select(**{f"_{name}": ids["value"], f"_{name}_id": ids["id"]})
            joined = joined.left_join(ids, joined[name] == ids[f"_{name}"])
        return joined.select(
            **{
                name: ibis.coalesce(joined[f"_{name}_id"], 0) if name in small else joined[name]
                for name in table.columns
                if name not in leave
            }
        )

    def _large(self, number: int, name: str, table: Table, first: int, count: int) -> Path:
        """The file of the ids of one column of a file, in the order of its rows.

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
        return place

    def _ids(self, number: int, name: str) -> Path:
        return self.work / f"ids-{number}-{name}.bin"


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


def _by_size(sizes: Mapping[str, int], most: int, columns: int) -> tuple[list[str], list[str]]:
    """The smallest vocabularies, which hold at most `most` values together and are at most `columns`; the others."""
    ascending = sorted(sizes, key=lambda name: sizes[name])
    held = zip(ascending, accumulate(sizes[name] for name in ascending), strict=True)
    small = {name for name, values in list(held)[:columns] if values <= most}
    return [name for name in sizes if name in small], [name for name in sizes if name not in small]


def _write_vocabulary(batches: Iterator[pa.RecordBatch], place: Path) -> None:
    """Write values in the given order, numbered from 1."""
    schema = pa.schema([("value", pa.string()), ("id", pa.int32())])
    count = 0
    with whole_file(place) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for batch in batches:
            ids = np.arange(count + 1, count + 1 + batch.num_rows, dtype=np.int32)
            writer.write_batch(pa.record_batch([batch.column(0).cast(pa.string()), pa.array(ids)], schema=schema))
            count += batch.num_rows


def _once(place: Path, find: Callable[[], object]) -> Any:
    """The result of `find`, from this run or an earlier one."""
    if not place.exists():
        write_whole(place, json.dumps(find()))
    return json.loads(place.read_text(encoding="utf-8"))


# --- buckets ---------------------------------------------------------------------------------------------------------


def log_squared_boundaries(values: NDArray[np.int64], counts: NDArray[np.int64], least: int) -> list[int]:
    """Boundaries between buckets of integers: each integer up to 2, then floor(ln(x)^2).

    A bucket in fewer than `least` rows joins the next above; the highest joins the next below. `values` are distinct
    integers in ascending order, `counts` the rows of each.
    """
    kinds = _log_squared(values)
    starts = np.flatnonzero(np.diff(kinds, prepend=kinds[:1] - 1))
    sizes = np.add.reduceat(counts, starts) if len(starts) else counts
    cuts: list[int] = []
    inside = 0
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        if inside >= max(least, 1):
            cuts.append(_first_of(int(values[start])))
            inside = 0
        inside += size
    if cuts and inside < least:
        cuts.pop()
    return cuts


def _log_squared(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers of buckets: integers up to 2 are their own, larger ones follow from 3."""
    return np.where(values <= 2, values, 2 + np.floor(np.log(np.maximum(values, 1)) ** 2).astype(np.int64))


def _first_of(value: int) -> int:
    """The smallest integer in the same bucket."""
    if value <= 2:
        return value
    name = int(_log_squared(np.array([value]))[0])
    near = math.floor(math.exp(math.sqrt(name - 2)))
    candidates = np.arange(max(near - 2, 3), near + 3)
    return int(candidates[_log_squared(candidates) >= name][0])
