"""Criteo's raw files: a file of rows or a folder of days, and the rows of each split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from recspec.datasets.criteo_settings import Settings, numbers_of
from recspec.errors import DataError, SettingsError, listed
from recspec.files import lines
from recspec.prepare import PROBLEMS_SHOWN, ROW_BYTES, SPLITS

DAY = re.compile(r"day_([0-9]+)(\.gz)?")
INTEGER = re.compile(rb"[+-]?[0-9]{1,18}")


@dataclass(frozen=True)
class RawFile:
    """A file of rows."""

    path: Path
    day: int | None
    """None for a single file of rows."""


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
    for name in names:
        match = DAY.fullmatch(name)
        if match:
            found.setdefault(int(match[1]), []).append(name)
    if not found:
        kaggle = [name for name in names if name in ("train.txt", "train.txt.gz")]
        if len(kaggle) != 1:
            raise DataError(f"{raw}: expected train.txt, or day_0 to day_23, each plain or .gz; found {listed(names)}")
        return find_days(raw / kaggle[0], settings)
    problems = [f"{listed(twice)} are one day; keep one of them" for twice in found.values() if len(twice) > 1]
    if problems:
        raise DataError.of(str(raw), problems)
    missing = settings.given_days - set(found)
    if missing:
        raise SettingsError(f"{raw}: no file of days {numbers_of(missing)}; found days {numbers_of(found)}")
    if settings.split != "share":
        _check_days(raw, sorted(found), settings)
    days = sorted(found)
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
        held = f"days {numbers_of(judging)} are" if len(judging) > 1 else f"day {days[-1]} is"
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
    """The rows of each split; rows in no range are left out.

    Raises:
        DataError: if train is empty, or there are fewer rows than set.
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
    return _not_empty([SplitRange(name, end - size, end) for name, size, end in zip(SPLITS, sizes, ends, strict=True)])


def _by_day(files: Sequence[RawFile], counts: Sequence[int], settings: Settings) -> list[SplitRange]:
    last = max(file.day for file in files if file.day is not None)
    valid, test = (set(days if days is not None else (last,)) for days in (settings.valid_days, settings.test_days))
    ranges = []
    for file, stop, count in zip(files, accumulate(counts), counts, strict=True):
        start = stop - count
        if file.day in valid and file.day in test:
            half = start + count // 2
            ranges += [SplitRange("test", start, half), SplitRange("valid", half, stop)]
        elif file.day in valid or file.day in test:
            ranges.append(SplitRange("valid" if file.day in valid else "test", start, stop))
        elif settings.train_days is None or file.day in settings.train_days:
            ranges.append(SplitRange("train", start, stop))
    return _not_empty(ranges)


def _not_empty(ranges: Sequence[SplitRange]) -> list[SplitRange]:
    kept = [found for found in ranges if found.stop > found.start]
    if not any(found.split == "train" for found in kept):
        raise DataError("no row is for training; give more rows, or smaller shares for valid and test")
    return kept
