"""Criteo's raw files, as settings choose them for the splits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from recspec.base.config import Settings as BaseSettings
from recspec.base.errors import DataError, SettingsError, listed, unknown
from recspec.base.files import lines
from recspec.data.prepare import PROBLEMS_SHOWN, ROW_BYTES, SPLITS

DAY = re.compile(r"day_([0-9]+)(\.gz)?")
INTEGER = re.compile(rb"[+-]?[0-9]{1,18}")


class Settings(BaseSettings):
    """Settings of Criteo's click logs."""

    num_numerical: int = Field(13, ge=0, description="columns of integers after the label: I1, I2, ...")
    num_categorical: int = Field(26, ge=0, description="columns of categories after those: C1, C2, ...")
    min_count: int = Field(15, ge=0, description="values in fewer rows share id 0 with missing ones; 0 keeps all")
    min_counts: dict[str, int] = Field({}, description="min_count of single columns, such as {C1: 20}")
    vocabulary_from: Literal["train", "all"] = Field(
        "train", description="rows that define the ids; `all` includes valid and test, as published"
    )
    scale: bool = Field(False, description="scale ln(x + 3) to mean 0 and standard deviation 1 over train")
    buckets: bool = Field(
        False,
        description="add each number as a category: integers up to 2, then floor(ln(x)^2); rare buckets are merged "
        "with the next",
    )
    split: Literal["days", "share"] | None = Field(
        None,
        description="days: by whole days; share: by rows in order; null: days for a folder of days, otherwise share",
    )
    train_days: tuple[int, ...] | None = Field(None, description="days for train; all others if null")
    valid_days: tuple[int, ...] | None = Field(None, description="days for valid; the last if null")
    test_days: tuple[int, ...] | None = Field(
        None, description="days for test; the last if null; a day in both settings is halved: test, then valid"
    )
    valid: float = Field(0.1, ge=0, lt=1, description="share of rows for valid, after train")
    test: float = Field(0.1, ge=0, lt=1, description="share of rows for test, at the end")
    rows: tuple[int, int, int] | None = Field(None, description="rows of train, then valid, then test; replaces shares")
    shuffle: bool = Field(True, description="shuffle the train rows once")
    seed: int = Field(1, ge=0, lt=2**63, description="seed of the shuffled order")
    format: Literal["parquet", "split_binary"] = Field("parquet", description="format of the rows")

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
        overlap = {*(self.train_days or ())} & {*(self.valid_days or ()), *(self.test_days or ())}
        if overlap:
            problems.append(f"days {_numbers_of(overlap)} are for train and for valid or test; a day trains or judges")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def numbers(self) -> tuple[str, ...]:
        return tuple(f"I{number}" for number in range(1, self.num_numerical + 1))

    @property
    def categories(self) -> tuple[str, ...]:
        return tuple(f"C{number}" for number in range(1, self.num_categorical + 1))

    @property
    def given_days(self) -> set[int]:
        return {*(self.train_days or ()), *(self.valid_days or ()), *(self.test_days or ())}

    def is_shuffled(self, split: str) -> bool:
        return split == "train" and self.shuffle

    def least(self, category: str) -> int:
        """The least number of rows with a value for it to get an id."""
        return self.min_counts.get(category, self.min_count)


def _numbers_of(numbers: set[int] | Mapping[int, object]) -> str:
    return ", ".join(map(str, sorted(numbers)))


# --- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RawFile:
    """A file of rows."""

    path: Path
    day: int | None  # None for a single file of rows


def find_days(raw: Path, settings: Settings) -> list[RawFile]:
    """The files of rows, in order of days."""
    if raw.is_file():
        if settings.split == "days" or settings.given_days:
            raise SettingsError(f"{raw}: is one file; a split by days takes a folder of day_0, day_1, ...")
        return [RawFile(raw, None)]
    if not raw.is_dir():
        raise DataError(f"{raw}: no such file or folder; expected Kaggle's train.txt, or a folder of day_0 to day_23")
    names = sorted(path.name for path in raw.iterdir())
    found: dict[int, list[str]] = {}
    for match in filter(None, map(DAY.fullmatch, names)):
        found.setdefault(int(match[1]), []).append(match[0])
    if not found:
        kaggle = [name for name in names if name in ("train.txt", "train.txt.gz")]
        if len(kaggle) != 1:
            raise DataError(f"{raw}: expected train.txt, or day_0 to day_23, each plain or .gz; found {listed(names)}")
        return find_days(raw / kaggle[0], settings)
    problems = [f"{listed(twice)} are one day; keep one of them" for twice in found.values() if len(twice) > 1]
    DataError.refuse(str(raw), problems)
    missing = settings.given_days - set(found)
    if missing:
        raise SettingsError(f"{raw}: no file of days {_numbers_of(missing)}; found days {_numbers_of(found)}")
    days = sorted(found)
    if settings.split != "share":
        _check_days(raw, days, settings)
    if settings.train_days is not None and settings.test_days is not None:
        days = sorted(settings.given_days)  # the others are not read
    return [RawFile(raw / found[day][0], day) for day in days]


def _check_days(raw: Path, days: Sequence[int], settings: Settings) -> None:
    """Refuse an impossible split by days before terabytes are read."""
    if settings.rows is not None:
        raise SettingsError(
            f"{raw}: is a folder of days, which are split by days, and rows cuts by counts of rows; set split=share to "
            "cut all days' rows in their order, or leave rows out"
        )
    judging = {day for given in (settings.valid_days, settings.test_days) for day in given or ()}
    if settings.valid_days is None:
        judging = {days[-1]}
    if not set(days) - judging:
        held = f"days {_numbers_of(judging)} are" if len(judging) > 1 else f"day {days[-1]} is"
        raise DataError(
            f"{raw}: no row is for training: {held} for valid and test, and there is no other; add days, or set "
            "split=share to cut the rows in their order"
        )


def check_width(path: Path, settings: Settings) -> None:
    """Check the number of columns in the first line."""
    _, first = next(lines(path, ROW_BYTES), (1, b""))
    if not first.strip(b"\r\n"):
        raise DataError(f"{path}: is empty, or starts with an empty line; expected rows")
    found, expected = first.count(b"\t") + 1, 1 + settings.num_numerical + settings.num_categorical
    head = first.rstrip(b"\r\n")
    mark = next((mark for mark in (b",", b";", b"|") if head.count(mark) + 1 == expected != found), None)
    if mark is not None or (found == expected and head.split(b"\t")[0].isalpha()):
        what = f"separates columns by '{mark.decode()}'" if mark is not None else "begins with a header"
        raise DataError(
            f"{path}: {what}; Criteo's own files have tabs and no header; `recspec prepare table "
            f"{path} OUT` reads this one"
        )
    if found != expected:
        raise DataError(
            f"{path}: has {found} columns, separated by tabs; expected {expected}: the label, {settings.num_numerical} "
            f"integers and {settings.num_categorical} categories; set num_numerical and num_categorical"
        )


def wrong_labels(path: Path) -> list[str]:
    """The first labels of a file that are integers other than 0 and 1; slow, so called after a failure only."""
    problems: list[str] = []
    for number, line in lines(path, ROW_BYTES):
        label = line.rstrip(b"\r\n").partition(b"\t")[0]
        if label not in (b"0", b"1") and INTEGER.fullmatch(label) and int(label) not in (0, 1):
            problems.append(f"line {number:,}: the label is {int(label)}; expected 0 or 1")
        if len(problems) == PROBLEMS_SHOWN:
            break
    return problems


# --- splits ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitRange:
    """Rows of a split, counted over all files."""

    split: str
    start: int
    stop: int


def split_ranges(files: Sequence[RawFile], counts: Sequence[int], settings: Settings) -> list[SplitRange]:
    """The rows of each split; rows in no range are left out."""
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
    return _not_empty([SplitRange(name, end - size, end) for name, size, end in zip(SPLITS, sizes, ends, strict=True)])


def _by_day(files: Sequence[RawFile], counts: Sequence[int], settings: Settings) -> list[SplitRange]:
    last = max(file.day for file in files if file.day is not None)
    valid, test = (set(days if days is not None else (last,)) for days in (settings.valid_days, settings.test_days))
    ranges = []
    for file, stop, count in zip(files, accumulate(counts), counts, strict=True):
        start = stop - count
        if file.day in valid & test:
            half = start + count // 2
            ranges += [SplitRange("test", start, half), SplitRange("valid", half, stop)]
        elif file.day in valid | test:
            ranges.append(SplitRange("valid" if file.day in valid else "test", start, stop))
        elif settings.train_days is None or file.day in settings.train_days:
            ranges.append(SplitRange("train", start, stop))
    return _not_empty(ranges)


def _not_empty(ranges: Sequence[SplitRange]) -> list[SplitRange]:
    kept = [found for found in ranges if found.stop > found.start]
    if not any(found.split == "train" for found in kept):
        raise DataError("no row is for training; give more rows, or smaller shares for valid and test")
    return kept
