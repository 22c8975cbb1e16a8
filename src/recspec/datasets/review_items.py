"""Metadata of the items in Amazon's reviews, read from lines of JSON or, in 2014, of Python literals."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recspec.encoding import widened
from recspec.errors import DataError
from recspec.files import lines
from recspec.prepare import ITEM, PROBLEMS_SHOWN

NO_CATEGORY, NO_BRAND = "no_category", "no_brand"
"""Values of an item without metadata; the first is the published one."""
META_PROGRESS = 100_000
"""Lines of metadata between two reports of progress."""
TITLES = 50_000
"""Titles kept as Python strings, which take twice their bytes, before they are packed."""


@dataclass(frozen=True)
class Items:
    """Metadata of the items that reviews name."""

    table: pa.Table
    """One row per wanted item, in order: item_id, category, categories (a list, the most general first), brand, title.
    Without metadata, these are `no_category`, a list of it, `no_brand` and null."""
    described: int
    repeated: int
    """Further lines about an item."""


def describe(path: Path | None, wanted: Sequence[str], progress: Callable[[int], None]) -> Items:
    """Read the metadata of some items; the first line about an item counts.

    Raises:
        DataError: naming the lines that are neither JSON objects nor Python literals of one.
    """
    metadata = _Metadata(wanted)
    if path is not None:
        with warnings.catch_warnings():
            for kind in (
                SyntaxWarning,
                DeprecationWarning,
            ):  # such as Python's warning about a backslash before a slash
                warnings.simplefilter("ignore", kind)
            for entry in _entries(path, metadata.places, progress):
                metadata.add(entry)
    return metadata.items()


class _Metadata:
    """Collects metadata: each path and brand once, titles as bytes."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self.places = {item: place for place, item in enumerate(wanted)}
        self._paths: dict[tuple[str, ...], int] = {(NO_CATEGORY,): 0}
        self._brands: dict[str, int] = {NO_BRAND: 0}
        self._codes = np.zeros((2, len(wanted)), np.int32)
        self._titles: list[str | None] = []
        self._packed = [pa.array([None], pa.string())]
        self._title_of = np.zeros(len(wanted), np.int64)
        self._described = 0
        self._repeated = 0

    def add(self, entry: Mapping[str, Any]) -> None:
        place = self.places[_identity(entry)]
        if self._title_of[place]:
            self._repeated += 1
            return
        self._described += 1
        self._title_of[place] = self._described
        brand = _text(entry.get("brand")) or _text(entry.get("store")) or NO_BRAND
        self._codes[0, place] = self._paths.setdefault(_path(entry) or (NO_CATEGORY,), len(self._paths))
        self._codes[1, place] = self._brands.setdefault(brand, len(self._brands))
        self._titles.append(_text(entry.get("title")))
        if len(self._titles) == TITLES:
            self._pack()

    def items(self) -> Items:
        self._pack()
        paths = pa.array(list(self._paths), pa.list_(pa.string()))
        last = pa.array([path[-1] for path in self._paths], pa.string())
        columns = {
            ITEM: pa.array(list(self.places), pa.string()),
            "category": last.take(pa.array(self._codes[0])),
            "categories": paths.take(pa.array(self._codes[0])),
            "brand": pa.array(list(self._brands), pa.string()).take(pa.array(self._codes[1])),
            "title": widened(pa.chunked_array(self._packed)).take(pa.array(self._title_of)),
        }
        return Items(pa.table(columns), self._described, self._repeated)

    def _pack(self) -> None:
        self._packed.append(pa.array(self._titles, pa.string()))
        self._titles = []


def _path(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Categories from the most general to the most specific; the first path of several (2014).

    In 2023, the path is empty if only the department is known.
    """
    found = entry.get("categories") or entry.get("category") or []
    if isinstance(found, str):
        found = [found]
    if found and isinstance(found[0], list):
        found = found[0]
    path = tuple(text for text in map(_text, found) if text)
    department = _text(entry.get("main_category"))
    return path or ((department,) if department else ())


def _text(value: object) -> str | None:
    return value.strip() or None if isinstance(value, str) else None


def _identity(entry: Mapping[str, Any]) -> str:
    return str(entry.get("parent_asin") or entry["asin"])


ASIN_FIRST = re.compile(rb"""\s*\{['"]asin['"]: ?(['"])(?P<asin>[^'"\\]+)\1""")
"""The start of every line of 2014, so that lines about items without reviews are not parsed."""
RELATED = re.compile(
    r", ?'related': ?\{(?:'\w+': ?\[(?:'\w*'(?:, ?)?)*\](?:, ?)?)*\}"  # no part matches in two ways: linear time
)
"""Up to 240 related items per item of 2014, which take nine tenths of the parsing time."""


def _entries(path: Path, wanted: Mapping[str, int], progress: Callable[[int], None]) -> Iterator[Mapping[str, Any]]:
    problems: list[str] = []
    for number, line in lines(path):
        if number % META_PROGRESS == 0:
            progress(number)
        begins = ASIN_FIRST.match(line)
        if not line.strip() or (begins and begins["asin"].decode(errors="replace") not in wanted):
            continue
        try:
            entry = _parsed(line)
            identity = _identity(entry)
        except _MALFORMED as error:
            problems.append(f"line {number:,}: {_why(error)}: {line.strip()[:60].decode(errors='replace')!r}")
            if len(problems) == PROBLEMS_SHOWN:
                break
            continue
        if identity in wanted:
            yield entry
    if problems:
        raise DataError.of(str(path), problems)


_MALFORMED = (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError)
"""Errors of Python for text that is not a literal, or not one of an item."""


def _parsed(line: bytes) -> Mapping[str, Any]:
    """A line as JSON, else as a Python literal; nothing in it is executed."""
    text = line.decode("utf-8")
    try:
        entry = json.loads(text)
    except json.JSONDecodeError:
        entry = ast.literal_eval(RELATED.sub("", text.strip()))
    if not isinstance(entry, dict):
        raise TypeError
    return entry


def _why(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return "names no item; expected a key 'asin' or 'parent_asin'"
    if isinstance(error, UnicodeDecodeError):
        return "is no UTF-8 text"
    return "is neither a JSON object nor a Python literal of one"
