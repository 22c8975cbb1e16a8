"""Amazon's review files of 2014, 2018 and 2023: a category's files and the reviews as a table.

Reviews are JSON lines of any number, read by the engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ibis.expr.types import Table

from recspec.errors import DataError, SettingsError, listed, unknown
from recspec.files import lines
from recspec.prepare import (
    ITEM,
    PROBLEMS_SHOWN,
    ROW,
    TIMESTAMP,
    USER,
    Backend,
    ColumnType,
    JsonFile,
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
KEYS_SHOWN = 8
"""Most columns of a file named in a message."""


@dataclass(frozen=True)
class Layout:
    """The keys of a review, and the units of its time per second."""

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
    """The files of one category, in a folder or its direct subfolders, or beside a file of reviews.

    Raises:
        DataError: if there are no reviews, or several candidates.
        SettingsError: if the given category is not there.
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
    """The reason why a file holds no reviews; None if it does."""
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


def layout_of(path: Path) -> Layout:
    """The layout of a file of reviews, by the keys of its first review or the columns of its header.

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
    """Stage a file of reviews: user_id, item_id, timestamp in seconds, row, and `rating` if `rated`.

    Raises:
        DataError: naming malformed lines, or a truncated file.
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
    return read_header(TextFile(path, {})) if _is_csv(path) else _keys(path)


def _is_csv(path: Path) -> bool:
    return ".csv" in path.suffixes


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
