"""The layout of a text file, from its first lines: separator, header, names of columns, or one sequence a line."""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from recspec.errors import DataError, SettingsError, listed, shortened
from recspec.prepare.column_roles import is_usual
from recspec.prepare.names import FILE_SPLIT, ROW
from recspec.prepare.notes import Notes
from recspec.prepare.text_files import TextFile, lines_of, numbered_records, open_text

SEPARATORS = ("\t", "::", ";", "|", " ")
"""Separators to try where the usual one does not occur in the first line."""
NAMED = {"\t": "tabs", " ": "blanks", ",": "commas", "::": "'::'", ";": "semicolons", "|": "'|'"}
GLANCED = 1_000  # lines
NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
DATE = re.compile(r"[0-9]{4}[-/][0-9]{2}[-/][0-9]{2}([T ].*)?")
WHOLE = re.compile(r"[0-9]+")
EPOCH = (3e8, 4.2e18)  # numbers of a time since 1970, from seconds of 1979 to nanoseconds of 2103
HIGHEST_RATING = 100.0


@dataclass(frozen=True)
class TextLayout:
    """How a text file is to be read."""

    separator: str
    header: bool
    names: tuple[str, ...]
    sequences: bool = False


def glance(
    file: TextFile, *, separator: str | None, columns: Sequence[str], layout: str | None, mentioned: Collection[str],
    notes: Notes,
) -> TextLayout:  # fmt: skip
    """The layout of a file, given what settings say; everything inferred leaves a note.

    `file.separator` is the usual separator of such a file. `mentioned` are the column names in settings. Raises
    DataError if the file is empty, and SettingsError if `columns` do not fit it.
    """
    lines = [line for _, line in islice(lines_of(file), GLANCED) if line.strip()]
    if not lines:
        raise DataError(f"{file.path}: is empty; expected a header line and rows")
    if layout == "sequences":
        return TextLayout(separator or " ", False, (), True)
    if layout is None and not columns and (found := _sequences(lines, separator)) is not None:
        mark, shortest, longest = found
        notes.inferred.append(
            f"{file.path.name}: each line is a user followed by the user's items, oldest first, because lines hold "
            f"{shortest:,} to {longest:,} whole numbers, separated by {NAMED[mark]}, and no user comes twice "
            "(layout=rows reads rows)"
        )
        return TextLayout(mark, False, (), True)
    chosen = separator or _separator(file, lines)
    if separator is None and chosen != file.separator:
        notes.inferred.append(f"{file.path.name}: columns are separated by {NAMED[chosen]}, as in the first line "
                              f"(separator='{chosen.replace(chr(9), chr(92) + 't')}')")  # fmt: skip
    with_separator = replace(file, separator=chosen, quoted=file.quoted and len(chosen) == 1 and chosen != " ")
    with open_text(with_separator) as stream:
        rows = [values for _, values in islice(numbered_records(with_separator, stream), GLANCED)]
    return _named(with_separator, rows, columns, mentioned, notes)


def _separator(file: TextFile, lines: Sequence[str]) -> str:
    first = lines[0].rstrip("\r\n")
    if file.separator in first:
        return file.separator
    for mark in ("," if file.separator != "," else "\t", *SEPARATORS):
        if mark in first.strip() and _count(first, mark) > 1:
            return mark
    return file.separator


def _count(line: str, mark: str) -> int:
    text = line.rstrip("\r\n")
    if len(mark) > 1:
        return len(text.split(mark))
    return len(text.split()) if mark == " " else len(next(csv.reader([text], delimiter=mark), []))


def _sequences(lines: Sequence[str], separator: str | None) -> tuple[str, int, int] | None:
    """The separator and the bounds of the length, if lines clearly are sequences."""
    for mark in (" ", "\t", ",") if separator is None else (separator,):
        parts = [line.split() if mark == " " else [part.strip() for part in line.strip().split(mark)] for line in lines]
        if mark == " " and any("\t" in line.strip() for line in lines):
            continue
        lengths = {len(part) for part in parts}
        if len(lengths) < 2 or max(lengths) < 3 or len({part[0] for part in parts}) < len(parts):
            continue
        if mark in NAMED and all(WHOLE.fullmatch(value) for part in parts for value in part):
            return mark, min(lengths), max(lengths)
    return None


# --- names of columns ------------------------------------------------------------------------------------------------


def _named(
    file: TextFile, rows: Sequence[Sequence[str]], columns: Sequence[str], mentioned: Collection[str], notes: Notes
) -> TextLayout:
    first, name = list(rows[0]), file.path.name
    if columns:
        if len(columns) != len(first):
            raise SettingsError(
                f"setting 'columns': names {len(columns)} columns, and the first line of {file.path} has {len(first)}, "
                f"separated by {file.separator!r}: {shortened(file.separator.join(first))!r}; name them all, in order"
            )
        header = [value.strip().lower() for value in first] == [value.lower() for value in columns]
        return TextLayout(file.separator, header, _unique(columns, file, notes))
    generated = [f"column_{place}" for place in range(1, len(first) + 1)]
    asked = {*mentioned} & {*generated}
    has_name = any(value.strip() in mentioned or is_usual(value) for value in first)
    if has_name or not (asked or _is_data(first)):
        return TextLayout(file.separator, True, _unique(first, file, notes))
    names = tuple(generated) if asked else _by_position(rows, generated)
    notes.inferred.append(
        f"{name}: the first line is data, not a header; its {len(first)} columns are taken as {listed(names)} "
        f"(columns=[{', '.join(shortened(each) for each in names[:6])}{', ...' if len(names) > 6 else ''}] names "
        "them otherwise)"
    )
    return TextLayout(file.separator, False, names)


def _is_data(first: Sequence[str]) -> bool:
    """Whether a first line without a usual name is no header: it holds a number or a date."""
    values = [value.strip() for value in first]
    return any(NUMBER.fullmatch(value) or DATE.fullmatch(value) for value in values)


def _by_position(rows: Sequence[Sequence[str]], generated: Sequence[str]) -> tuple[str, ...]:
    """A user, an item, then a rating and a time in any order; names such as `column_5` for further columns."""
    names = [*generated]
    if not 2 <= len(names) <= 4:
        return tuple(names)
    names[:2] = ["user_id", "item_id"]
    for place in range(2, len(names)):
        values = [row[place].strip() for row in rows if len(row) > place and row[place].strip()]
        if not values:
            continue
        if all(DATE.fullmatch(value) for value in values):
            kind = "timestamp"
        elif all(NUMBER.fullmatch(value) for value in values):
            numbers = [float(value) for value in values]
            is_time = EPOCH[0] <= min(numbers) and max(numbers) <= EPOCH[1]
            kind = "timestamp" if is_time else "rating" if max(map(abs, numbers)) <= HIGHEST_RATING else ""
        else:
            kind = ""
        if kind and kind not in names:
            names[place] = kind
    return tuple(names)


def _unique(names: Sequence[str], file: TextFile, notes: Notes) -> tuple[str, ...]:
    """Names without empty ones and without two that differ in case at most, which engines can't keep apart."""
    wanted = {name.lower() for name in names}
    found: list[str] = []
    taken: set[str] = {ROW, FILE_SPLIT}
    for place, name in enumerate(names, 1):
        new, number = name or f"column_{place}", 2
        while new.lower() in taken or (new != name and new.lower() in wanted):
            new, number = f"{name or f'column_{place}'}_{number}", number + 1
        if new != name:
            why = "has no name" if not name else f"is named '{shortened(name)}', as another one or as a column of ours"
            notes.changed.append(f"column {place} of {file.path.name} {why}; it is '{shortened(new)}' here")
        taken.add(new.lower())
        found.append(new)
    return tuple(found)
