"""The files of the NCF paper: `PREFIX.train.rating`, `PREFIX.test.rating` and `PREFIX.test.negative` in one folder.

A line of a `.rating` file is a user, an item and optionally a rating and a time, separated by tabs. The test candidates
are those of the file: a positive among its own negatives stays, and the metrics count a candidate once. The paper has
no valid split. Here each user's last train interaction is valid, beside as many drawn negatives as the test file lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import ibis
import numpy as np
import pyarrow as pa
from ibis.expr.types import Table
from numpy.typing import NDArray
from pydantic import Field

from recspec.base.errors import DataError, listed
from recspec.data.prepare import (
    ITEM,
    PROBLEMS_SHOWN,
    ROW,
    SPLIT,
    TIMESTAMP,
    USER,
    Backend,
    Catalogue,
    ColumnType,
    HistorySettings,
    Notes,
    PrepareContext,
    Prepared,
    Progress,
    Source,
    TextFile,
    clean,
    fetch,
    interactions,
    leave_one_out,
    lines_of,
    named_files,
    prepared,
    read_header,
)
from recspec.feature_spec import FeatureSpec

NAME = "ncf"
SUFFIXES = ("train.rating", "test.rating", "test.negative")


class Settings(HistorySettings):
    """Settings of the NCF paper's files."""

    seed: int = Field(1, ge=0, description="seed of the negatives of valid and train")
    titles: str | None = Field(None, description="CSV file with a column item_id and display columns, such as title")


@dataclass(frozen=True)
class _Files:
    train: Path
    test: Path
    negative: Path


def prepare(context: PrepareContext, settings: Settings) -> Prepared:
    """Prepare a folder with the NCF paper's files."""
    files = _recognise(context.raw)
    titles = named_files(context.raw, "titles", [settings.titles])[0] if settings.titles is not None else None
    inputs = [files.train, files.test, files.negative, *filter(None, [titles])]

    def build(folder: Path) -> FeatureSpec:
        with context.connect(folder / "work") as backend:
            return _build(backend, folder, files, titles, settings, context.progress)

    return prepared.run(context, NAME, settings, inputs, build)


def _recognise(raw: Path) -> _Files:
    expected = ", ".join(f"PREFIX.{suffix}" for suffix in SUFFIXES)
    if not raw.is_dir():
        raise DataError(f"{raw}: no such folder; expected one with {expected}")
    names = sorted(path.name for path in raw.iterdir() if path.is_file())
    prefixes = sorted({name.removesuffix(f".{s}") for name in names for s in SUFFIXES if name.endswith(f".{s}")})
    if not prefixes:
        raise DataError(f"{raw}: holds none of the NCF paper's files; found {listed(names[:12])}, expected {expected}")
    missing = [f"{p}.{s} is missing" for p in prefixes for s in SUFFIXES if f"{p}.{s}" not in names]
    DataError.refuse(str(raw), missing)
    if len(prefixes) > 1:
        raise DataError(f"{raw}: holds files of {listed(prefixes)}; put each into a folder of its own")
    return _Files(*(raw / f"{prefixes[0]}.{suffix}" for suffix in SUFFIXES))


def _build(
    backend: Backend, folder: Path, files: _Files, titles: Path | None, settings: Settings, progress: Progress
) -> FeatureSpec:
    progress("reading interactions", 0, None)
    notes = Notes()
    timed = _all_have_times(files, notes)
    train = _read_ratings(backend, files.train, timed=timed)
    test = _read_ratings(backend, files.test, timed=timed)
    candidates = _candidates(files, fetch(backend, test.order_by(ROW)))
    order = (TIMESTAMP, ROW)
    cleaned = clean(backend, train, min_interactions=1, order=order)
    train = leave_one_out(cleaned.rows, by=USER, order=order)
    train = train.mutate(**{SPLIT: ibis.ifelse(train[SPLIT] == "test", "valid", "train")})
    rows = train.union(test.mutate(**{SPLIT: ibis.literal("test")}))
    # Test rows sort after train rows of the same second, so that no history contains a test row.
    rows = rows.mutate(_is_test=rows[SPLIT] == "test")

    def summary(kept: int) -> dict[str, object]:
        cleaned.note(backend, notes, kept - len(candidates))
        return {"repeats_dropped": cleaned.num_before + len(candidates) - kept, **_oddities(candidates, notes)}

    source = Source(
        dataset=NAME,
        rows=rows,
        order=("_is_test", *order),
        items=_titles(backend, titles) if titles else None,
        candidates=candidates,
        summary=summary,
        timed=timed,
        notes=notes,
    )
    num_negatives = len(candidates.column("negatives")[0])
    return interactions.write(
        backend, folder, source, settings, num_negatives=num_negatives, seed=settings.seed, progress=progress
    )


def _read_ratings(backend: Backend, path: Path, *, timed: bool) -> Table:
    """User, item and time of each line, with the line's number if there are no times; ratings are ignored."""
    width = _width(path)
    names = (USER, ITEM, "rating", TIMESTAMP)[: width if 2 <= width < 4 else 4]  # other widths are malformed
    kinds: dict[str, ColumnType] = {name: "float64" if name == "rating" else "int64" for name in names}
    required = [name for name in names if name != "rating" and (timed or name != TIMESTAMP)]
    table = backend.read_text(TextFile(path, kinds, separator="\t", header=False, quote="", required=required))
    return table.select(USER, ITEM, ROW, **{TIMESTAMP: table[TIMESTAMP if timed else ROW]})


def _all_have_times(files: _Files, notes: Notes) -> bool:
    """Whether both files have times, in a fourth column; pinterest-20 has three."""
    without = [path.name for path in (files.train, files.test) if _width(path) < 4]
    if without:
        notes.inferred.append(
            f"no times: {' and '.join(without)} without a fourth column, so each user's rows are in "
            "the order of the file"
        )
    return not without


def _width(path: Path) -> int:
    with path.open("rb") as stream:
        return stream.readline(1 << 20).count(b"\t") + 1


# --- listed candidates -----------------------------------------------------------------------------------------------

POSITIVE = re.compile(r"\(([0-9]{1,18}),\s*([0-9]{1,18})\)")
NEGATIVE = re.compile(r"[0-9]{1,18}")


def _candidates(files: _Files, test: pa.Table) -> pa.Table:
    """Listed negatives of each test row: columns user_id, item_id (the positive) and negatives."""
    users, items = test.column(USER).to_numpy(), test.column(ITEM).to_numpy()
    DataError.refuse(str(files.test), list(islice(_repeated(users), PROBLEMS_SHOWN)))
    lines = [line.rstrip("\r\n") for _, line in lines_of(TextFile(files.negative, {}))]
    while lines and not lines[-1]:
        lines.pop()
    width = len(lines[0].split("\t")) - 1 if lines else 0
    DataError.refuse(str(files.negative), list(islice(_line_problems(lines, users, items, width), PROBLEMS_SHOWN)))
    numbers = np.fromstring("\t".join(line.split("\t", 1)[1] for line in lines), np.int64, sep="\t")
    lists = pa.ListArray.from_arrays(pa.array(np.arange(len(lines) + 1, dtype=np.int32) * width), pa.array(numbers))
    return pa.table({USER: users, ITEM: items, "negatives": lists})


def _repeated(users: NDArray[np.int64]) -> Iterator[str]:
    first: dict[int, int] = {}
    for line, user in enumerate(users.tolist(), 1):
        if (earlier := first.setdefault(user, line)) < line:
            yield f"line {line:,}: user {user} stands in line {earlier:,} too; expected one test row a user"


def _line_problems(lines: list[str], users: NDArray[np.int64], items: NDArray[np.int64], width: int) -> Iterator[str]:
    if len(lines) != len(users):
        yield f"has {len(lines):,} lines, but the test file has {len(users):,}; expected one for each"
    if not lines or width == 0:
        yield "line 1: lists no negative; expected `(user,item)` and items, separated by tabs"
        return
    for number, (line, user, item) in enumerate(zip(lines, users.tolist(), items.tolist(), strict=False), 1):
        head, *negatives = line.split("\t")
        found = POSITIVE.fullmatch(head)
        if found is None:
            yield f"line {number:,}: begins with '{head[:40]}'; expected `(user,item)`"
        elif (int(found[1]), int(found[2])) != (user, item):
            yield f"line {number:,}: is of {head}, but line {number:,} of the test file is of ({user},{item})"
        elif len(negatives) != width:
            yield f"line {number:,}: lists {len(negatives)} negatives; expected {width}, as in line 1"
        elif wrong := [negative for negative in negatives if not NEGATIVE.fullmatch(negative)]:
            yield f"line {number:,}: negative '{wrong[0][:40]}' is not an item's number"


def _oddities(candidates: pa.Table, notes: Notes) -> dict[str, object]:
    lists = candidates.column("negatives").combine_chunks()
    negatives = lists.flatten().to_numpy().reshape(len(lists), -1)
    own = (negatives == candidates.column(ITEM).to_numpy()[:, None]).any(axis=1)
    if own.any():
        first = int(np.flatnonzero(own)[0])
        notes.inferred.append(
            f"{int(own.sum()):,} of {len(own):,} test lines hold the positive among their negatives, such as user "
            f"'{candidates.column(USER)[first].as_py()}'; they stay as they are, and metrics count an item once"
        )
    return {"listed_negatives": negatives.shape[1], "rows_with_positive_among_negatives": int(own.sum())}


def _titles(backend: Backend, path: Path) -> Catalogue:
    columns = read_header(TextFile(path, {}))
    if ITEM not in columns:
        raise DataError(f"{path}: header: no column '{ITEM}'; found {listed(columns)}")
    types: dict[str, ColumnType] = {**dict.fromkeys(columns, "string"), ITEM: "int64"}
    table = fetch(backend, backend.read_text(TextFile(path, types, multiline=True, required=(ITEM,))).order_by(ROW))
    return Catalogue(table, key=ITEM, readable={name: name for name in columns if name != ITEM}, file=path.name)
