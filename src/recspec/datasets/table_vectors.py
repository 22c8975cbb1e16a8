"""Vectors among the features of your own table: lists of numbers of one size in all rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec.base.errors import DataError
from recspec.data.encoding import renumbered, vectors_of
from recspec.data.prepare import LARGEST, ROW, Backend, fetch

GLANCED = 1_000  # rows with a value that decide whether a column holds vectors, and their size


@dataclass(frozen=True)
class Vectors:
    """A column of vectors."""

    size: int
    num_rows: int
    missing: int
    first_missing: int  # the number of the first row without a vector, from 1; 0 if there is none


def find_vectors(backend: Backend, table: Table, column: str, where: str, *, declared: bool) -> Vectors | None:
    """The size of a column's vectors, all rows checked; None if it holds other lists.

    Unless `declared`, lists are vectors if they hold numbers, some of them with a fraction, and most have one size of
    2 or more.

    Raises:
        DataError: naming the first row that does not hold as many finite numbers as most rows.
    """
    held = table[column].type()
    if not declared and not (held.value_type.is_string() or held.value_type.is_floating()):
        return None
    glance = fetch(backend, table.filter(table[column].notnull()).order_by(ROW).limit(GLANCED).select(column))
    size = _size([value for value in glance.column(column).to_pylist() if value], declared=declared)
    if size is None:
        if declared:
            raise DataError(f"{where}, column '{column}': no row holds a number; expected vectors")
        return None
    return _checked(backend, table, column, size, where)


def _size(values: list[list[object]], *, declared: bool) -> int | None:
    if not values:
        return None
    if declared:
        return Counter(map(len, values)).most_common(1)[0][0]
    read = [[_number(each) for each in value] for value in values]
    numbers = [row for row in read if None not in row]
    size, count = Counter(map(len, numbers)).most_common(1)[0] if numbers else (0, 0)
    if size < 2 or 2 * count <= len(values):
        return None
    return size if any(not each.is_integer() for row in numbers for each in row if each is not None) else None


def _number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _checked(backend: Backend, table: Table, column: str, size: int, where: str) -> Vectors:
    """Read every row. Raises `DataError` for the first that holds no such vector."""
    num_rows = 0
    absent: list[NDArray[np.int64]] = []
    problems: list[tuple[int, str]] = []
    for batch in backend.batches(table.select(ROW, column)):
        rows = batch.column(0).to_numpy(zero_copy_only=False)
        num_rows += len(rows)
        try:
            vectors = vectors_of(batch.column(1), size)
            absent.append(rows[np.isnan(vectors).all(axis=1)])
            problems += [_too_large(vectors, rows, place) for place in _large(vectors)[:1]]
        except DataError as error:
            problems.append(_placed(error.problems[0], rows))
    if problems:
        advice = f"correct it, or take the values as categories with lists=[{column}]"
        raise DataError(f"{where}, column '{column}': {min(problems)[1]}; {advice}")
    missing = np.concatenate(absent) if absent else np.zeros(0, np.int64)
    return Vectors(size, num_rows, len(missing), int(missing.min()) + 1 if len(missing) else 0)


def _large(vectors: NDArray[np.float64]) -> NDArray[np.int64]:
    """The places of vectors with a number that float32 can't hold."""
    return np.flatnonzero((np.abs(vectors) > LARGEST).any(axis=1))


def _too_large(vectors: NDArray[np.float64], rows: NDArray[np.int64], place: int) -> tuple[int, str]:
    most = float(np.abs(vectors[place]).max())
    row = int(rows[place])
    return row, f"row {row + 1:,} holds a number as large as {most:g} in its vector; expected 3.4e38 at most"


def _placed(problem: str, rows: NDArray[np.int64]) -> tuple[int, str]:
    """The row of a problem in a block, and the problem with its row in the file."""
    found = [-1]

    def name(place: int) -> str:
        found[0] = int(rows[place])
        return f"row {found[0] + 1:,}"

    said = renumbered(problem, name)
    return found[0], said
