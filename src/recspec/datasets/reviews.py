"""Amazon's raw files of 2014, 2018 or 2023: a category's reviews, with the metadata of its items.

Reviews are JSON lines of any number, read by the engine. Metadata are lines of JSON or, in 2014, of Python literals.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from ibis.expr.types import Table

from recspec.base.errors import DataError, SettingsError, listed, unknown
from recspec.base.files import lines
from recspec.data.encoding import widened
from recspec.data.prepare import (
    ITEM,
    PROBLEMS_SHOWN,
    ROW,
    TIMESTAMP,
    USER,
    Backend,
    ColumnType,
    JsonFile,
    Progress,
    TextFile,
    read_header,
)

RATING = "rating"
FILE_NAME = re.compile(r"(?:reviews_)?(?P<category>[^.]+?)(?P<core>_[0-9]+)?\.(?:json|jsonl|csv)(?:\.gz)?")
META_NAME = re.compile(r"meta_(?P<category>[^.]+)\.(?:json|jsonl)(?:\.gz)?")
EXPECTED = (
    "2014: reviews_X.json.gz or reviews_X_5.json.gz, with meta_X.json.gz",
    "2018: X.json.gz or X_5.json.gz, with meta_X.json.gz",
    "2023: X.jsonl.gz or X.csv.gz, with meta_X.jsonl.gz",
)
KEYS_SHOWN = 8  # most columns of a file named in a message


@dataclass(frozen=True)
class Layout:
    """The keys of a review, and the units of its time per second."""

    releases: str
    user: str
    item: str
    time: str
    rating: str
    per_second: int

    def missing(self, names: Sequence[str]) -> list[str]:
        """Required keys that are not among `names`."""
        return [key for key in (self.user, self.item, self.time) if key not in names]


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
    """The files of one category, in a folder or its direct subfolders, or beside a file of reviews."""
    if raw.is_file():
        if (own := _category(raw)) is None:
            raise DataError.of(f"{raw}: is named like no file of reviews", EXPECTED)
        return Files(own, raw, _meta(sorted(raw.parent.iterdir()), own, raw.parent))
    if not raw.is_dir():
        raise DataError(f"{raw}: no such file or folder; expected Amazon's reviews, such as reviews_Books.json.gz")
    paths = [path for path in sorted([*raw.glob("*"), *raw.glob("*/*")]) if path.is_file()]
    found: dict[str, list[Path]] = {}
    for path in paths:
        if (category_there := _category(path)) is not None:
            found.setdefault(category_there, []).append(path)
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
    """The reason why a file holds no reviews; None if it does."""
    try:
        names = _names(path)
    except DataError as error:
        return str(error).removeprefix(f"{path}: ")
    layout = min(LAYOUTS, key=lambda each: len(each.missing(names)))
    if not layout.missing(names):
        return None
    held = listed(names[:KEYS_SHOWN]) + (f" and {len(names) - KEYS_SHOWN} more" if len(names) > KEYS_SHOWN else "")
    return f"lacks {listed(layout.missing(names))} of the layout of {layout.releases}; it has {held}"


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


def _category(path: Path) -> str | None:
    """The category of a file of reviews, by its name; None for other names."""
    matched = FILE_NAME.fullmatch(path.name)
    return matched["category"] if matched and not META_NAME.fullmatch(path.name) else None


def _meta(paths: Sequence[Path], category: str, raw: Path) -> Path | None:
    files = [path for path in paths if (found := META_NAME.fullmatch(path.name)) and found["category"] == category]
    if len(files) > 1:
        raise DataError(f"{raw}: holds {listed(map(str, files))}, which say the same of the items; keep one of them")
    return files[0] if files else None


def layout_of(path: Path) -> Layout:
    """The layout of a file of reviews, by the keys of its first review or the columns of its header."""
    names = _names(path)
    for layout in LAYOUTS:
        if not layout.missing(names):
            return layout
    expected = [f"{layout.releases}: {layout.user}, {layout.item}, {layout.time}" for layout in LAYOUTS]
    raise DataError.of(f"{path}: is no file of reviews; its first one holds {listed(names) or 'nothing'}", expected)


def read(backend: Backend, path: Path, layout: Layout, *, rated: bool) -> Table:
    """Stage a file of reviews: user_id, item_id, timestamp in seconds, row, and `rating` if `rated`."""
    kinds: dict[str, ColumnType] = {layout.user: "string", layout.item: "string", layout.time: "int64"}
    if rated:
        kinds[layout.rating] = "float64"
    if ".csv" in path.suffixes:
        table = backend.read_text(TextFile(path, kinds, required=tuple(kinds)))
    else:
        table = backend.read_json(JsonFile(path, kinds, required=tuple(kinds)))
    time = table[layout.time]
    seconds = time if layout.per_second == 1 else time / layout.per_second
    columns = {USER: table[layout.user], ITEM: table[layout.item], TIMESTAMP: seconds}
    return table.select(ROW, **columns, **({RATING: table[layout.rating]} if rated else {}))


def _names(path: Path) -> list[str]:
    return read_header(TextFile(path, {})) if ".csv" in path.suffixes else _keys(path)


def _keys(path: Path) -> list[str]:
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


# --- metadata of items -----------------------------------------------------------------------------------------------

NO_CATEGORY, NO_BRAND = "no_category", "no_brand"  # values of an item without metadata; the first is the published one
META_PROGRESS = 100_000  # lines of metadata between two reports of progress
TITLES = 50_000  # titles kept as Python strings, which take twice their bytes, before they are packed


@dataclass(frozen=True)
class Items:
    """Metadata of the items that reviews name."""

    table: pa.Table
    """One row per wanted item, in order: item_id, category, categories (a list, the most general first), brand, title.
    Without metadata, these are `no_category`, a list of it, `no_brand` and null."""
    described: int
    repeated: int  # further lines about an item


def describe(path: Path | None, wanted: Sequence[str], progress: Progress) -> Items:
    """Read the metadata of some items; the first line about an item counts."""
    places = {item: place for place, item in enumerate(wanted)}
    paths: dict[tuple[str, ...], int] = {(NO_CATEGORY,): 0}
    brands: dict[str, int] = {NO_BRAND: 0}
    path_of, brand_of = (np.zeros(len(wanted), np.int32) for _ in range(2))
    title_of = np.zeros(len(wanted), np.int64)
    described = repeated = 0
    titles: list[str | None] = [None]
    packed = []
    with warnings.catch_warnings():
        for kind in (SyntaxWarning, DeprecationWarning):  # Python's, such as for a backslash before a slash
            warnings.simplefilter("ignore", kind)
        for entry in _entries(path, places, progress) if path is not None else ():
            place = places[_identity(entry)]
            if title_of[place]:
                repeated += 1
                continue
            described += 1
            title_of[place] = described
            path_of[place] = paths.setdefault(_path(entry) or (NO_CATEGORY,), len(paths))
            brand = _text(entry.get("brand")) or _text(entry.get("store")) or NO_BRAND
            brand_of[place] = brands.setdefault(brand, len(brands))
            titles.append(_text(entry.get("title")))
            if len(titles) >= TITLES:
                packed.append(pa.array(titles, pa.string()))
                titles = []
    packed.append(pa.array(titles, pa.string()))
    table = pa.table(
        {
            ITEM: pa.array(wanted, pa.string()),
            "category": pa.array([each[-1] for each in paths], pa.string()).take(pa.array(path_of)),
            "categories": pa.array(list(paths), pa.list_(pa.string())).take(pa.array(path_of)),
            "brand": pa.array(list(brands), pa.string()).take(pa.array(brand_of)),
            "title": widened(pa.chunked_array(packed)).take(pa.array(title_of)),
        }
    )
    return Items(table, described, repeated)


def _path(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Categories from the most general: the first path of several (2014), or the department alone (2023)."""
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


def _entries(path: Path, wanted: Mapping[str, int], progress: Progress) -> Iterator[Mapping[str, Any]]:
    problems: list[str] = []
    for number, line in lines(path):
        if number % META_PROGRESS == 0:
            progress("reading what is said of items", number, None)
        begins = ASIN_FIRST.match(line)
        if not line.strip() or (begins and begins["asin"].decode(errors="replace") not in wanted):
            continue
        try:
            entry = _parsed(line)
            is_wanted = _identity(entry) in wanted
        except _MALFORMED as error:
            problems.append(f"line {number:,}: {_why(error)}: {line.strip()[:60].decode(errors='replace')!r}")
            if len(problems) == PROBLEMS_SHOWN:
                break
        else:
            if is_wanted:
                yield entry
    DataError.refuse(str(path), problems)


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
