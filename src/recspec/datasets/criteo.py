"""Criteo's click logs: a label, integers, hashed categories, tab separated and without a header, of any size.

Kaggle's train.txt, cut by rows, or the Terabyte's day_0 to day_23, cut by days, always in the order of time. Work goes
in stages that outlive a kill: rows read into Parquet, what is to know of them, one vocabulary a column, rows encoded
and dealt into buckets (`Scatter`), splits written. The engine joins rows with vocabularies; Python holds none.
All features are in the role context, for there are neither users nor items.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar

import ibis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ibis.expr.types import Table
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from recspec.archives import lines
from recspec.config import Settings as BaseSettings
from recspec.datasets import prepared
from recspec.datasets.clicks import LABEL, SPLITS
from recspec.datasets.notes import Notes
from recspec.datasets.prepared import Prepared, Progress, silent
from recspec.datasets.scatter import Scatter, shuffled
from recspec.encoding import (
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
from recspec.errors import DataError, SettingsError, listed, unknown
from recspec.feature_spec import Chunk, Feature, FeatureSpec
from recspec.storage import Column, SplitWriter, feature_to_write
from recspec.tables import ROW, ROW_BYTES, Backend, ColumnType, TextFile, blocks, connect, counts_by, fetch, limit_bytes

NAME = "criteo"
Found = TypeVar("Found")

DAY = re.compile(r"day_([0-9]+)(\.gz)?")
INTEGER = re.compile(rb"[+-]?[0-9]{1,18}")
LOG_PLUS = 3
"""Numbers are published as ln(x + 3); the least there are is -3 in the Terabyte, -2 in Kaggle's file."""
BLOCK_ROWS = 262_144
"""Rows encoded at once."""
PROBLEMS_SHOWN = 10
JOINED_BYTES = 64
"""What one value of a vocabulary takes in the engine's memory while rows are joined to it."""
ASSUMED_BYTES = 4 << 30
"""Memory that vocabularies are joined within where no limit is given."""


class Settings(BaseSettings):
    """Which columns there are, which values get an id, which rows are for what."""

    num_numerical: int = Field(13, ge=0, description="columns of integers after the label: I1, I2, ...")
    num_categorical: int = Field(26, ge=0, description="columns of categories after those: C1, C2, ...")
    min_count: int = Field(15, ge=0, description="values in fewer rows share id 0 with missing ones; 0 keeps all")
    min_counts: dict[str, int] = Field({}, description="min_count of single columns, such as {C1: 20}")
    vocabulary_from: Literal["train", "all"] = Field(
        "train", description="rows that ids are given by; `all` lets them know valid and test, as published"
    )
    scale: bool = Field(False, description="bring ln(x + 3) to mean 0 and standard deviation 1 over train")
    buckets: bool = Field(
        False, description="each number as a category, too: x up to 2, then floor(ln(x)^2); rare buckets join the next"
    )
    split: Literal["days", "share"] | None = Field(
        None, description="by whole days, or by rows in their order; days for a folder of days when null"
    )
    train_days: tuple[int, ...] | None = Field(None, description="all days not in valid_days or test_days when null")
    valid_days: tuple[int, ...] | None = Field(None, description="days for valid; the last when null")
    test_days: tuple[int, ...] | None = Field(
        None, description="days for test; the last when null. A day in both is halved: test, then valid"
    )
    valid: float = Field(0.1, ge=0, lt=1, description="share of rows for valid, after train")
    test: float = Field(0.1, ge=0, lt=1, description="share of rows for test, at the end")
    rows: tuple[int, int, int] | None = Field(
        None, description="rows for train, valid and test, one after another, in place of shares"
    )
    shuffle: bool = Field(True, description="put the train rows in random order, once")
    seed: int = Field(1, ge=0, lt=2**63, description="of that order")
    format: Literal["parquet", "split_binary"] = Field("parquet", description="how the rows are written")

    @field_validator("rows")
    @classmethod
    def _counts(cls, rows: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
        if rows is not None and (rows[0] < 1 or min(rows) < 0):
            raise ValueError(f"{list(rows)}: train needs a row, and no count may be below 0")
        return rows

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        problems = [
            unknown("column in min_counts", name, self.categories)
            for name in self.min_counts
            if name not in self.categories
        ]
        problems += [f"min_counts: {name}: {count} is below 0" for name, count in self.min_counts.items() if count < 0]
        if not self.num_numerical + self.num_categorical:
            problems.append("num_numerical and num_categorical are both 0; a row needs a feature")
        if self.valid + self.test >= 1:
            problems.append(f"valid and test take {self.valid + self.test:g} of the rows; leave some for train")
        given = self.model_fields_set & {"train_days", "valid_days", "test_days"}
        if self.rows is not None and self.model_fields_set & {"valid", "test"}:
            problems.append("rows stand in place of the shares valid and test; give one or the other")
        if given and (self.rows is not None or self.split == "share"):
            problems.append(f"{listed(sorted(given))} go with split days, not with shares or rows")
        if self.split == "days" and self.rows is not None:
            problems.append("rows are of a split by rows; leave out split: days")
        if (self.valid_days is None) != (self.test_days is None):
            problems.append("valid_days and test_days go together; give both, [] for none")
        overlap = set(self.train_days or ()) & {*(self.valid_days or ()), *(self.test_days or ())}
        if overlap:
            problems.append(f"days {_numbers(overlap)} are for train and for valid or test; a day trains or judges")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def numbers(self) -> tuple[str, ...]:
        """Columns of integers."""
        return tuple(f"I{number}" for number in range(1, self.num_numerical + 1))

    @property
    def categories(self) -> tuple[str, ...]:
        """Columns of categories."""
        return tuple(f"C{number}" for number in range(1, self.num_categorical + 1))

    @property
    def given_days(self) -> set[int]:
        """All days that a setting names."""
        return {*(self.train_days or ()), *(self.valid_days or ()), *(self.test_days or ())}

    def least(self, category: str) -> int:
        """In how many rows a value must stand to get an id."""
        return self.min_counts.get(category, self.min_count)


def prepare(
    raw: Path,
    out: Path,
    settings: Settings,
    *,
    engine: str = "duckdb",
    memory_limit: str | None = None,
    threads: int | None = None,
    progress: Progress = silent,
    force: bool = False,
) -> Prepared:
    """Prepare one file of rows, or a folder of days; a run that was killed goes on at its last finished stage.

    Raises:
        DataError: if a file is missing or a line malformed, a split comes out empty, or `out` holds something else.
        SettingsError: if settings ask for days that are not there, or for rows of whole days.
    """
    files = _files(raw, settings)
    for file in files:
        _check_width(file.path, settings)
    job = prepared.Job(NAME, settings, [file.path for file in files], out)

    def build(folder: Path) -> FeatureSpec:
        shutil.rmtree(folder / "work" / "engine", ignore_errors=True)
        with connect(engine, folder=folder / "work" / "engine", memory_limit=memory_limit, threads=threads) as backend:
            stages = _Stages(backend, folder, files, settings, progress, _joined_values(memory_limit))
            encoded = stages.encode()
        return _write(folder, encoded, settings, progress)

    return prepared.run(
        job,
        build,
        force=force,
        resumable_by=engine,
        finished=lambda folder: _finished(folder / "work", len(files), settings),
        progress=progress,
    )


# --- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _File:
    path: Path
    day: int | None
    """None for a single file of rows."""


def _files(raw: Path, settings: Settings) -> list[_File]:
    if raw.is_file():
        if settings.split == "days" or settings.given_days:
            raise SettingsError(f"{raw}: is one file; a split by days takes a folder of day_0, day_1, ...")
        return [_File(raw, None)]
    if not raw.is_dir():
        raise DataError(f"{raw}: no such file or folder; expected Kaggle's train.txt, or a folder of day_0 to day_23")
    names = sorted(path.name for path in raw.iterdir())
    found: dict[int, list[str]] = {}
    for name in names:
        match = DAY.fullmatch(name)
        if match:
            found.setdefault(int(match[1]), []).append(name)
    if not found:
        kaggle = [name for name in names if name in ("train.txt", "train.txt.gz")]
        if len(kaggle) != 1:
            raise DataError(f"{raw}: expected train.txt, or day_0 to day_23, each plain or .gz; found {listed(names)}")
        return _files(raw / kaggle[0], settings)
    problems = [f"{listed(twice)} are one day; keep one of them" for twice in found.values() if len(twice) > 1]
    if problems:
        raise DataError.of(str(raw), problems)
    missing = settings.given_days - set(found)
    if missing:
        raise SettingsError(f"{raw}: no file of days {_numbers(missing)}; found days {_numbers(found)}")
    if settings.split != "share":
        _check_days(raw, sorted(found), settings)
    days = sorted(found)
    if settings.train_days is not None and settings.test_days is not None:
        days = sorted(settings.given_days)  # the others are not read
    return [_File(raw / found[day][0], day) for day in days]


def _check_days(raw: Path, days: Sequence[int], settings: Settings) -> None:
    """What would go wrong with a split by days, said before terabytes are read."""
    if settings.rows is not None:
        raise SettingsError(
            f"{raw}: is a folder of days, which are split by days, and rows cuts by counts of rows; set split=share to "
            "cut all days' rows in their order, or leave rows out"
        )
    judging = {day for given in (settings.valid_days, settings.test_days) for day in given or ()}
    if settings.valid_days is None:
        judging = {days[-1]}
    if not set(days) - judging:
        held = f"days {_numbers(judging)} are" if len(judging) > 1 else f"day {days[-1]} is"
        raise DataError(
            f"{raw}: no row is for training: {held} for valid and test, and there is no other; add days, or set "
            "split=share to cut the rows in their order"
        )


def _numbers(numbers: set[int] | Mapping[int, object]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _check_width(path: Path, settings: Settings) -> None:
    _, first = next(lines(path, ROW_BYTES), (1, b""))
    if not first.strip(b"\r\n"):
        raise DataError(f"{path}: is empty, or starts with an empty line; expected rows")
    found, expected = first.count(b"\t") + 1, 1 + settings.num_numerical + settings.num_categorical
    if found != expected:
        raise DataError(
            f"{path}: has {found} columns, separated by tabs; expected {expected}: the label, {settings.num_numerical} "
            f"integers and {settings.num_categorical} categories; set num_numerical and num_categorical"
        )


def _wrong_labels(path: Path) -> list[str]:
    """The first labels of a file that are integers other than 0 and 1; slow, so only asked once something failed."""
    problems: list[str] = []
    for number, line in lines(path, ROW_BYTES):
        label = line.rstrip(b"\r\n").partition(b"\t")[0]
        if label not in (b"0", b"1") and INTEGER.fullmatch(label) and int(label) not in (0, 1):
            problems.append(f"line {number:,}: the label is {int(label)}; expected 0 or 1")
        if len(problems) == PROBLEMS_SHOWN:
            break
    return problems


# --- which rows are for what -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Range:
    """Rows of a split, counted over all files."""

    split: str
    start: int
    stop: int


def _ranges(files: Sequence[_File], counts: Sequence[int], settings: Settings) -> list[_Range]:
    """What each split holds; rows in no range are left out.

    Raises:
        DataError: if no row is left for train, or there are fewer than asked for.
    """
    total = sum(counts)
    if settings.rows is not None:
        if sum(settings.rows) > total:
            raise DataError(f"rows {list(settings.rows)} are {sum(settings.rows):,}, and the data hold {total:,}")
        sizes: Sequence[int] = settings.rows
    elif files[0].day is not None and settings.split != "share":
        return _by_day(files, counts, settings)
    else:
        valid, test = round(total * settings.valid), round(total * settings.test)
        sizes = (total - valid - test, valid, test)
    ends = list(accumulate(sizes))
    return _not_empty([_Range(name, end - size, end) for name, size, end in zip(SPLITS, sizes, ends, strict=True)])


def _by_day(files: Sequence[_File], counts: Sequence[int], settings: Settings) -> list[_Range]:
    last = max(file.day for file in files if file.day is not None)
    valid, test = (set(days if days is not None else (last,)) for days in (settings.valid_days, settings.test_days))
    ranges = []
    for file, stop, count in zip(files, accumulate(counts), counts, strict=True):
        start = stop - count
        if file.day in valid and file.day in test:
            half = start + count // 2
            ranges += [_Range("test", start, half), _Range("valid", half, stop)]
        elif file.day in valid or file.day in test:
            ranges.append(_Range("valid" if file.day in valid else "test", start, stop))
        elif settings.train_days is None or file.day in settings.train_days:
            ranges.append(_Range("train", start, stop))
    return _not_empty(ranges)


def _not_empty(ranges: Sequence[_Range]) -> list[_Range]:
    kept = [found for found in ranges if found.stop > found.start]
    if not any(found.split == "train" for found in kept):
        raise DataError("no row is for training; give more rows, or smaller shares for valid and test")
    return kept


# --- stages ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Encoded:
    """Rows in buckets, and how they came to be."""

    encoders: Encoders
    features: Mapping[str, Feature]
    scatters: Mapping[str, Scatter]
    folders: Sequence[Path]
    counts: Mapping[str, int]
    summary: Mapping[str, object]


def _finished(work: Path, num_files: int, settings: Settings) -> str | None:
    """Which stages a run that ended before its time left behind, if any; each file or column is a part of one."""
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


class _Stages:
    """Each result is a file or folder that gets its name once it is whole; what is there is not made again."""

    def __init__(
        self,
        backend: Backend,
        folder: Path,
        files: Sequence[_File],
        settings: Settings,
        progress: Progress,
        joined_values: int,
    ) -> None:
        self._backend = backend
        self._folder = folder
        self._work = folder / "work"
        self._files = files
        self._settings = settings
        self._progress = progress
        self._joined_values = joined_values

    def encode(self) -> _Encoded:
        """Go through all stages up to the buckets."""
        staged, facts = [], []
        for number in range(len(self._files)):  # each file is checked before the next is read
            staged.append(self._read(number))
            facts.append(self._facts(number, staged[-1]))
        read = sum(file.path.stat().st_size for file in self._files)
        self._progress("reading rows", read, read)
        counts = [int(fact["rows"]) for fact in facts]
        ranges = _ranges(self._files, counts, self._settings)
        first_rows = [stop - count for stop, count in zip(accumulate(counts), counts, strict=True)]
        tables = [table.mutate(**{ROW: table[ROW] + first}) for table, first in zip(staged, first_rows, strict=True)]
        train = _rows_of("train", tables, first_rows, counts, ranges)
        sizes = self._vocabularies(ibis.union(*tables) if self._settings.vocabulary_from == "all" else train)
        encoders, features = self._fit(train, sizes)
        split_rows = {name: sum(r.stop - r.start for r in ranges if r.split == name) for name in SPLITS}
        split_rows = {name: rows for name, rows in split_rows.items() if rows}
        scatters = self._scatters(features, split_rows, ranges)
        folders = self._deal(tables, encoders, features, scatters, ranges, first_rows, counts, sizes)
        left_out = sum(counts) - sum(split_rows.values())
        if left_out:
            kept = ibis.union(*(_rows_of(split, tables, first_rows, counts, ranges) for split in split_rows))
            facts = [_once(self._work / "facts-kept.json", lambda: self._counted(kept))]
        summary = {
            "rows": split_rows,
            "left_out": left_out,
            "positives": sum(fact["positives"] for fact in facts),
            "numbers_without_logarithm": sum(fact["without_logarithm"] for fact in facts),
        }
        return _Encoded(encoders, features, scatters, folders, split_rows, summary | _notes(summary, self._settings))

    def _read(self, number: int) -> Table:
        sizes = [file.path.stat().st_size for file in self._files]
        before, total = sum(sizes[:number]), sum(sizes)
        self._progress("reading rows", before, total)
        place = self._work / f"rows-{number}.parquet"
        if place.exists():
            return self._backend.read_parquet([place])
        path = self._files[number].path
        file = TextFile(path, self._raw_columns(), separator="\t", header=False, quoted=False, required=(LABEL,))
        try:
            return self._backend.read_text(
                file, place, lambda share: self._progress("reading rows", before + int(share * sizes[number]), total)
            )
        except DataError as error:
            if not any(problem.startswith("line ") for problem in error.problems):
                raise
            raise DataError.of(str(path), [*error.problems, *_wrong_labels(path)]) from None

    def _raw_columns(self) -> dict[str, ColumnType]:
        columns: dict[str, ColumnType] = {LABEL: "int64"}
        columns |= dict.fromkeys(self._settings.numbers, "int64")
        columns |= dict.fromkeys(self._settings.categories, "string")
        return columns

    def _facts(self, number: int, table: Table) -> Mapping[str, int]:
        """Counts of a file's rows.

        Raises:
            DataError: if a label is neither 0 nor 1.
        """

        def counted() -> dict[str, int]:
            facts = self._counted(table)
            if facts["wrong"]:
                path, problems = self._files[number].path, _wrong_labels(self._files[number].path)
                more = facts["wrong"] > len(problems)
                first = f": {facts['wrong']:,} labels are wrong, the first of them" if more else ""
                raise DataError.of(f"{path}{first}", problems)
            return facts

        return _once(self._work / f"facts-{number}.json", counted)

    def _counted(self, rows: Table) -> dict[str, int]:
        """How many rows there are, and how many of what is told in the summary or refused."""
        label = rows[LABEL]
        beyond = [(rows[name] <= -LOG_PLUS).cast("int64").sum() for name in self._settings.numbers]
        found = fetch(
            self._backend,
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
        """Write the vocabulary of each column; gives back how many values it has."""
        categories = self._settings.categories
        for number, name in enumerate(categories):
            self._progress("finding ids", number, len(categories))
            place = self._vocabulary(name)
            if not place.exists():
                present = rows.filter(rows[name].notnull())
                counted = present.group_by(name).aggregate(count=present.count())
                kept = counted.filter(counted["count"] >= self._settings.least(name)).select(name, "count")
                _write_vocabulary(self._backend.batches(kept.order_by([ibis.desc("count"), name])), place)
        self._progress("finding ids", len(categories), len(categories))
        return {name: pq.read_metadata(self._vocabulary(name)).num_rows for name in categories}

    def _vocabulary(self, name: str) -> Path:
        return self._work / VOCABULARIES / f"{name}.parquet"

    def _fit(self, train: Table, sizes: Mapping[str, int]) -> tuple[Encoders, dict[str, Feature]]:
        settings = self._settings
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
        if not self._settings.scale:
            return NumberEncoder(log_plus=LOG_PLUS)

        def moments() -> dict[str, float | None]:
            known = train.filter(train[name] > -LOG_PLUS)
            logarithm = (known[name] + LOG_PLUS).ln()
            found = fetch(self._backend, known.aggregate(mean=logarithm.mean(), std=logarithm.std(how="pop")))
            return dict(found.to_pylist()[0])

        held = _once(self._work / f"moments-{name}.json", moments)
        scaler = Scaler.of(held["mean"], held["std"])
        return ScaleEncoder(log_plus=LOG_PLUS, mean=scaler.mean, std=scaler.std)

    def _boundaries(self, train: Table, name: str) -> tuple[float, ...]:
        def cuts() -> list[int]:
            counted = fetch(self._backend, counts_by(train, name))
            values, counts = (counted.column(part).to_numpy() for part in (name, "rows"))
            return log_squared_boundaries(values, counts, self._settings.min_count)

        return tuple(float(cut) for cut in _once(self._work / f"boundaries-{name}.json", cuts))

    def _scatters(
        self, features: Mapping[str, Feature], split_rows: Mapping[str, int], ranges: Sequence[_Range]
    ) -> dict[str, Scatter]:
        dtypes = {name: np.dtype(feature.dtype) for name, feature in features.items()}
        scatters = {}
        for split, rows in split_rows.items():
            low, high = 0, 2**64
            if not self._is_shuffled(split):
                held = [found for found in ranges if found.split == split]
                low, high = min(found.start for found in held), max(found.stop for found in held)
            scatters[split] = Scatter(dtypes, rows, (low, high))
        return scatters

    def _is_shuffled(self, split: str) -> bool:
        return split == "train" and self._settings.shuffle

    def _deal(
        self,
        tables: Sequence[Table],
        encoders: Encoders,
        features: Mapping[str, Feature],
        scatters: Mapping[str, Scatter],
        ranges: Sequence[_Range],
        first_rows: Sequence[int],
        counts: Sequence[int],
        sizes: Mapping[str, int],
    ) -> list[Path]:
        """Encode each file's rows into buckets; gives back their folders."""
        starts = np.array([found.start for found in sorted(ranges, key=lambda found: found.start)])
        ordered = sorted(ranges, key=lambda found: found.start)
        folders = []
        small, large = _by_size(sizes, self._joined_values)
        done, total = 0, sum(counts)
        for number, table in enumerate(tables):
            place = self._work / f"encoded-{number}"
            folders.append(place)
            first, stop = first_rows[number], first_rows[number] + counts[number]
            wanted = [found for found in ordered if found.start < stop and found.stop > first]
            if place.exists() or not wanted:
                done += counts[number]
                continue
            temporary = place.with_suffix(".tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            for split in scatters:
                (temporary / split).mkdir(parents=True)
            ids = {name: self._large(number, name, table, first, counts[number]) for name in large}
            for batch in blocks(self._backend, self._with_ids(table, small, leave=large), BLOCK_ROWS):
                rows = batch.column(ROW).to_numpy()
                columns = self._columns(batch, encoders, features, {name: ids[name][rows - first] for name in large})
                for split, chosen in _by_split(rows, starts, ordered):
                    part = rows[chosen]
                    keys = shuffled(part, self._settings.seed) if self._is_shuffled(split) else part.astype(np.uint64)
                    held = {name: column[chosen] for name, column in columns.items()}
                    scatters[split].deal(temporary / split, keys, held)
                done += batch.num_rows
                self._progress("encoding rows", done, total)
            temporary.replace(place)
            for name in large:
                self._ids(number, name).unlink()
        return folders

    def _with_ids(self, table: Table, small: Sequence[str], *, leave: Sequence[str] = ()) -> Table:
        """The rows with the ids of the values of some columns, 0 for what has none; without others."""
        joined = table
        for name in small:
            ids = self._backend.read_parquet([self._vocabulary(name)])
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

        A join that does not fit the memory spills its rows: two columns of them instead of all.
        """
        place = self._ids(number, name)
        if not place.exists():
            self._progress(f"looking up {name}", 0, count)
            temporary = place.with_suffix(".tmp")
            ids = np.memmap(temporary, np.int32, "w+", shape=(count,))
            for batch in self._backend.batches(self._with_ids(table.select(ROW, name), [name])):
                ids[batch.column(0).to_numpy() - first] = batch.column(1).to_numpy()
            ids.flush()
            temporary.replace(place)
            self._progress(f"looking up {name}", count, count)
        return np.memmap(place, np.int32, "r")

    def _ids(self, number: int, name: str) -> Path:
        return self._work / f"ids-{number}-{name}.bin"

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


def _rows_of(
    split: str, tables: Sequence[Table], first_rows: Sequence[int], counts: Sequence[int], ranges: Sequence[_Range]
) -> Table:
    """The rows of a split, of all files."""
    parts = []
    for table, first, count in zip(tables, first_rows, counts, strict=True):
        for found in ranges:
            start, stop = max(found.start, first), min(found.stop, first + count)
            if found.split != split or stop <= start:
                continue
            whole = stop - start == count
            parts.append(table if whole else table.filter(table[ROW] >= start, table[ROW] < stop))
    return ibis.union(*parts)


def _by_split(
    rows: NDArray[np.int64], starts: NDArray[np.int64], ordered: Sequence[_Range]
) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Places of the rows of each split."""
    place = np.searchsorted(starts, rows, side="right") - 1
    for number, found in enumerate(ordered):
        chosen = np.flatnonzero((place == number) & (rows < found.stop))
        if len(chosen):
            yield found.split, chosen


def _categorical(cardinality: int) -> Feature:
    return feature_to_write(Feature(), cardinality, "parquet")


def _by_size(sizes: Mapping[str, int], most: int) -> tuple[list[str], list[str]]:
    """Columns whose vocabularies together hold at most so many values, smallest first, and the others."""
    held = dict(zip(sorted(sizes, key=lambda name: sizes[name]), accumulate(sorted(sizes.values())), strict=True))
    return [name for name in sizes if held[name] <= most], [name for name in sizes if held[name] > most]


def _joined_values(memory_limit: str | None) -> int:
    """Values of vocabularies to join at once: an eighth of the memory for them, so that no row is spilled."""
    limit = limit_bytes(memory_limit) if memory_limit else ASSUMED_BYTES
    return limit // 8 // JOINED_BYTES


def log_squared_boundaries(values: NDArray[np.int64], counts: NDArray[np.int64], least: int) -> list[int]:
    """Where integers are cut into buckets: each up to 2 on its own, then by floor(ln(x)^2).

    A bucket that fewer than `least` rows hold joins the next above, the highest the next below.

    Args:
        values: Different integers, in rising order.
        counts: In how many rows each stands.
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
    """The buckets' names: integers up to 2 keep theirs, larger ones follow from 3 on."""
    return np.where(values <= 2, values, 2 + np.floor(np.log(np.maximum(values, 1)) ** 2).astype(np.int64))


def _first_of(value: int) -> int:
    """The least integer in the same bucket."""
    if value <= 2:
        return value
    name = int(_log_squared(np.array([value]))[0])
    near = math.floor(math.exp(math.sqrt(name - 2)))
    candidates = np.arange(max(near - 2, 3), near + 3)
    return int(candidates[_log_squared(candidates) >= name][0])


def _write_vocabulary(batches: Iterator[pa.RecordBatch], place: Path) -> None:
    """Values in the order they come, numbered from 1."""
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
    """What was found, in this run or in one before."""
    if not place.exists():
        _write_json(place, find())
    held: Found = json.loads(place.read_text(encoding="utf-8"))
    return held


def _write_json(place: Path, found: object) -> None:
    temporary = place.with_suffix(".tmp")
    temporary.write_text(json.dumps(found), encoding="utf-8")
    temporary.replace(place)


# --- the prepared folder ---------------------------------------------------------------------------------------------


def _write(folder: Path, encoded: _Encoded, settings: Settings, progress: Progress) -> FeatureSpec:
    encoded.encoders.save(folder)
    (folder / VOCABULARIES).mkdir(exist_ok=True)
    for name in settings.categories:
        _copy_values(folder / "work" / VOCABULARIES / f"{name}.parquet", folder / VOCABULARIES / f"{name}.parquet")
    chunks: dict[str, tuple[Chunk, ...]] = {}
    done, total = 0, sum(encoded.counts.values())
    for split in encoded.counts:
        shutil.rmtree(folder / split, ignore_errors=True)  # of a run that was killed here
        folders = [place / split for place in encoded.folders]
        with SplitWriter(folder, split, encoded.features, settings.format, label=LABEL) as writer:
            for block in encoded.scatters[split].ordered(folders, BLOCK_ROWS):
                columns: dict[str, Column] = dict(block)
                writer.write(columns)
                done += len(block[LABEL])
                progress("writing splits", done, total)
        chunks[split] = writer.chunks
    channels = {"context": tuple(name for name in encoded.features if name != LABEL), "label": (LABEL,)}
    metadata = {
        "dataset": NAME,
        "catalogues": {},
        "encoders": ENCODERS_FILE,
        "vocabularies": VOCABULARIES,
        "summary": dict(encoded.summary),
    }
    return FeatureSpec(encoded.features, chunks, channels, metadata, folder)


def _copy_values(place: Path, target: Path) -> None:
    """A vocabulary as `Vocabulary.load` reads it: the values in the order of their ids."""
    with pq.ParquetWriter(target, pa.schema([("value", pa.string())])) as writer:
        for batch in pq.ParquetFile(place).iter_batches(columns=["value"]):
            writer.write_batch(batch)
