"""Amazon's review files of 2014, 2018 and 2023: which are there, the reviews as a table, and what is said of the items.

Reviews are JSON lines of any number, read by the engine. What is said of the items (the publisher's "metadata": lines
of JSON, in 2014 of Python literals) is read line by line, and kept only for the items that some review names.
"""

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
from ibis.expr.types import Table

from recspec.archives import lines
from recspec.encoding import widened
from recspec.errors import DataError, SettingsError, listed, unknown
from recspec.tables import (
    PROBLEMS_SHOWN,
    ROW,
    Backend,
    ColumnType,
    JsonFile,
    TextFile,
    read_header,
)

USER, ITEM, TIMESTAMP, RATING = "user_id", "item_id", "timestamp", "rating"

NO_CATEGORY, NO_BRAND = "no_category", "no_brand"
"""Values of an item of which nothing is said; the first is the published one."""

FILE_NAME = re.compile(r"(?:reviews_)?(?P<category>[^.]+?)(?P<core>_[0-9]+)?\.(?:json|jsonl|csv)(?:\.gz)?")
META_NAME = re.compile(r"meta_(?P<category>[^.]+)\.(?:json|jsonl)(?:\.gz)?")

EXPECTED = (
    "2014: reviews_X.json.gz or reviews_X_5.json.gz, with meta_X.json.gz",
    "2018: X.json.gz or X_5.json.gz, with meta_X.json.gz",
    "2023: X.jsonl.gz or X.csv.gz, with meta_X.jsonl.gz",
)

KEYS_SHOWN = 8
"""Columns of a file that a message names."""

META_PROGRESS = 100_000
"""Lines of what is said of the items between two reports of progress."""
TITLES = 50_000
"""Titles held as Python's texts, which take twice their bytes, before they are packed."""


@dataclass(frozen=True)
class Layout:
    """The keys of a review, and how its time counts."""

    releases: str
    user: str
    item: str
    time: str
    rating: str
    per_second: int

    def fits(self, names: Sequence[str]) -> bool:
        """Whether a review with these keys is of this layout."""
        return {self.user, self.item, self.time} <= set(names)


LAYOUTS = (
    Layout("2014 and 2018", "reviewerID", "asin", "unixReviewTime", "overall", 1),
    Layout("2023, of products", "user_id", "parent_asin", "timestamp", "rating", 1000),
    Layout("2023, of their variants", "user_id", "asin", "timestamp", "rating", 1000),
)


@dataclass(frozen=True)
class Files:
    """A category's files."""

    category: str
    reviews: Path
    meta: Path | None


def find(raw: Path, category: str | None) -> Files:
    """The files of one category, in a folder or the folders right in it, or beside a file of reviews.

    Raises:
        DataError: if there is none, or several could be meant.
        SettingsError: if the category that is asked for is not there.
    """
    if raw.is_file():
        return _beside(raw)
    if not raw.is_dir():
        raise DataError(f"{raw}: no such file or folder; expected Amazon's reviews, such as reviews_Books.json.gz")
    paths = [path for path in sorted([*raw.glob("*"), *raw.glob("*/*")]) if path.is_file()]
    found: dict[str, list[Path]] = {}
    for path in paths:
        matched = FILE_NAME.fullmatch(path.name)
        if matched and not META_NAME.fullmatch(path.name):
            found.setdefault(matched["category"], []).append(path)
    if not found:
        shown = listed(path.name for path in paths[:12]) + (f" and {len(paths) - 12} more" if len(paths) > 12 else "")
        raise DataError.of(f"{raw}: holds no reviews; found {shown or 'nothing'}", EXPECTED)
    if category in found and len(found[category]) == 1:
        return _of_category(raw, found, paths, category)
    wrong = {path: what for files in found.values() for path in files if (what := _lacking(path)) is not None}
    fitting = {each: kept for each, files in found.items() if (kept := [path for path in files if path not in wrong])}
    if not fitting and len(wrong) > 1:
        told = [f"{path.relative_to(raw)}: {what}" for path, what in wrong.items()]
        left = f"; the first {PROBLEMS_SHOWN} of {len(told)}" if len(told) > PROBLEMS_SHOWN else ""
        raise DataError.of(f"{raw}: no file there holds reviews{left}", told[:PROBLEMS_SHOWN])
    return _of_category(raw, fitting or found, paths, category)


def _lacking(path: Path) -> str | None:
    """What keeps a file from being one of reviews; None where it is one."""
    try:
        names = _names(path)
    except DataError as error:
        return str(error).removeprefix(f"{path}: ")
    if any(layout.fits(names) for layout in LAYOUTS):
        return None
    missing = [[key for key in (each.user, each.item, each.time) if key not in names] for each in LAYOUTS]
    nearest_one = min(range(len(LAYOUTS)), key=lambda place: len(missing[place]))
    held = listed(names[:KEYS_SHOWN]) + (f" and {len(names) - KEYS_SHOWN} more" if len(names) > KEYS_SHOWN else "")
    return f"lacks {listed(missing[nearest_one])} of the layout of {LAYOUTS[nearest_one].releases}; it has {held}"


def _of_category(raw: Path, found: Mapping[str, list[Path]], paths: Sequence[Path], category: str | None) -> Files:
    if category is not None and category not in found:
        raise SettingsError(f"setting 'category': {unknown('category', category, sorted(found))}")
    if category is None and len(found) > 1:
        raise DataError(
            f"{raw}: holds the reviews of {listed(sorted(found))}; name one of them, as --set category={min(found)}"
        )
    category = category or next(iter(found))
    files = found[category]
    if len(files) > 1:
        raise DataError(f"{raw}: holds several files of reviews of {category}: {listed(map(str, files))}; name one")
    return Files(category, files[0], _meta(paths, category, raw))


def _beside(path: Path) -> Files:
    matched = FILE_NAME.fullmatch(path.name)
    if matched is None or META_NAME.fullmatch(path.name):
        raise DataError.of(f"{path}: is named like no file of reviews", EXPECTED)
    category = matched["category"]
    return Files(category, path, _meta(sorted(path.parent.iterdir()), category, path.parent))


def _meta(paths: Sequence[Path], category: str, raw: Path) -> Path | None:
    files = []
    for path in paths:
        matched = META_NAME.fullmatch(path.name)
        if matched and matched["category"] == category:
            files.append(path)
    if len(files) > 1:
        raise DataError(f"{raw}: holds {listed(map(str, files))}, which say the same of the items; keep one of them")
    return files[0] if files else None


# --- reviews ---------------------------------------------------------------------------------------------------------


def layout_of(path: Path) -> Layout:
    """Which release a file of reviews is of, by the keys of its first one or the columns of its header.

    Raises:
        DataError: if it is empty, or holds something else.
    """
    names = _names(path)
    for layout in LAYOUTS:
        if layout.fits(names):
            return layout
    expected = [f"{layout.releases}: {layout.user}, {layout.item}, {layout.time}" for layout in LAYOUTS]
    raise DataError.of(f"{path}: is no file of reviews; its first one holds {listed(names) or 'nothing'}", expected)


def read(backend: Backend, path: Path, layout: Layout, *, rated: bool) -> Table:
    """A file of reviews as a staged table: user_id, item_id, timestamp in seconds, row, and if asked `rating`.

    Raises:
        DataError: naming malformed lines, or that the file was cut short.
    """
    kinds: dict[str, ColumnType] = {layout.user: "string", layout.item: "string", layout.time: "int64"}
    if rated:
        kinds[layout.rating] = "float64"
    if _is_csv(path):
        table = backend.read_text(TextFile(path, kinds, required=tuple(kinds)))
    else:
        table = backend.read_json(JsonFile(path, kinds, required=tuple(kinds)))
    time = table[layout.time]
    columns = {
        USER: table[layout.user],
        ITEM: table[layout.item],
        TIMESTAMP: time if layout.per_second == 1 else time / layout.per_second,
    }
    return table.select(ROW, **columns, **({RATING: table[layout.rating]} if rated else {}))


def _names(path: Path) -> list[str]:
    """The columns of the header, or the keys of the first review."""
    return read_header(TextFile(path, {})) if _is_csv(path) else _keys(path)


def _is_csv(path: Path) -> bool:
    return ".csv" in path.suffixes


def _keys(path: Path) -> list[str]:
    """The keys of the first review."""
    for number, line in lines(path):
        if not line.strip():
            continue
        try:
            first = json.loads(line)
        except (ValueError, RecursionError):
            first = None
        if not isinstance(first, dict):
            shown = line.strip()[:60].decode(errors="replace")
            raise DataError(f"{path}: line {number}: is no JSON object: {shown!r}; expected a review a line")
        return list(first)
    raise DataError(f"{path}: is empty; expected a review a line")


# --- what is said of the items ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Items:
    """What is said of the items that reviews name."""

    table: pa.Table
    """Columns item_id, category, categories (a list, the most general first), brand and title, where nothing is said
    `no_category`, a list of it, `no_brand` and null; a row an item, in the order of the wanted ones."""
    described: int
    repeated: int
    """Lines about an item that an earlier line was about."""


def describe(path: Path | None, wanted: Sequence[str], progress: Callable[[int], None]) -> Items:
    """Read what is said of some items; the first line about an item counts.

    Raises:
        DataError: naming the lines that are neither JSON objects nor Python literals of one.
    """
    said = _Said(wanted)
    if path is not None:
        with warnings.catch_warnings():
            for kind in (SyntaxWarning, DeprecationWarning):  # Python's own, of a backslash before a slash, say
                warnings.simplefilter("ignore", kind)
            for entry in _entries(path, said.places, progress):
                said.add(entry)
    return said.items()


class _Said:
    """What is said of items, gathered: a path or brand is held once, and titles as bytes."""

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
    """Categories from the most general on: 2014 lists several paths, of which the first counts, 2018 and 2023 one.

    2023 leaves the path empty where it knows only the department.
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
"""How every line of 2014 begins: lines about items that nobody reviewed need not be parsed."""

RELATED = re.compile(
    r", ?'related': ?\{(?:'\w+': ?\[(?:'\w*'(?:, ?)?)*\](?:, ?)?)*\}"  # nothing here can match in two ways: linear time
)
"""Up to 240 other items that 2014 lists with an item; nine tenths of the time that a line takes to parse."""


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
"""What Python raises of text that is no literal, or none of an item."""


def _parsed(line: bytes) -> Mapping[str, Any]:
    """A line as JSON, else as a Python literal; nothing in it is ever run."""
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
