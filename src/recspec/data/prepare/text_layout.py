"""The layout of a text file, from its first lines: separator, header, names of columns, or one sequence a line."""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import islice

from recspec.base.errors import DataError, SettingsError, listed, shortened
from recspec.data.prepare.column_roles import is_usual
from recspec.data.prepare.known_layouts import KNOWN, OTHERS, TextLayout
from recspec.data.prepare.names import FILE_SPLIT, ROW, Notes
from recspec.data.prepare.sequences import SEQUENCES
from recspec.data.prepare.text_files import TextFile, lines_of, numbered_records, open_text
from recspec.data.prepare.time_formats import GUESSES, PER_SECOND, fits

SEPARATORS = ("\t", "::", ";", "|", " ")
"""Separators to try where the usual one does not occur in the first line."""
NAMED = {"\t": "tabs", " ": "blanks", ",": "commas", "::": "'::'", ";": "semicolons", "|": "'|'"}
GLANCED = 1_000  # lines
NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
DATE = re.compile(r"[0-9]{4}[-/][0-9]{2}[-/][0-9]{2}([T ].*)?")
WHOLE = re.compile(r"[0-9]+")
ASIN, REVIEWER = re.compile("[0-9B][0-9A-Z]{9}"), re.compile("A[0-9A-Z]{9,}")  # items and users of Amazon
EPOCH = (3e8, 4.2e9)  # seconds since 1970, of 1979 to 2103
HIGHEST_RATING = 100.0
TRIED = 20  # values whose time is looked for in all formats
FEWEST, FEW_RATINGS = 20, 10  # rows that tell ids from ratings; most different ratings


def glance(
    file: TextFile,
    *,
    separator: str | None,
    columns: Sequence[str],
    layout: str | None,
    mentioned: Collection[str],
    key: str | None = None,
    notes: Notes,
) -> TextLayout:
    """The layout of a file, given what settings say; everything inferred leaves a note.

    `file.separator` is the usual separator of such a file. `mentioned` are the column names in settings; `key` is the
    id's column in a file of users or items. Raises DataError if the file is empty, and SettingsError if `columns` do
    not fit it.
    """
    lines = [line for _, line in islice(lines_of(file), GLANCED) if line.strip()]
    if not lines:
        raise DataError(f"{file.path}: is empty; expected a header line and rows")
    if layout == "sequences":
        return replace(SEQUENCES, separator=separator or " ")
    if not columns and (known := _known(file, lines, key, notes)) is not None:
        return replace(known, names=_unique(known.names, file, notes))
    if layout is None and not columns and (found := _sequences(lines, separator)) is not None:
        mark, shortest, longest = found
        notes.inferred.append(
            f"{file.path.name}: each line is a user followed by the user's items, oldest first, because lines hold "
            f"{shortest:,} to {longest:,} whole numbers, separated by {NAMED[mark]}, and no user comes twice "
            "(layout=rows reads rows)"
        )
        return replace(SEQUENCES, separator=mark)
    chosen = separator or _separator(file, lines)
    if separator is None and chosen != file.separator:
        notes.inferred.append(
            f"{file.path.name}: columns are separated by {NAMED[chosen]}, as in the first line "
            f"(separator='{chosen.replace(chr(9), chr(92) + 't')}')"
        )
    with_separator = replace(file, separator=chosen, quote=file.quote if len(chosen) == 1 and chosen != " " else "")
    with open_text(with_separator) as stream:
        rows = [values for _, values in islice(numbered_records(with_separator, stream), GLANCED)]
    return _named(with_separator, rows, columns, mentioned, key, notes)


def _known(file: TextFile, lines: Sequence[str], key: str | None, notes: Notes) -> TextLayout | None:
    for name, (pattern, remedy) in OTHERS.items():
        if len(lines) > 1 and pattern.match("".join(lines[:2])):
            raise DataError(f"{file.path}: its first lines are those of {name}; {remedy}")
    parts = [line.split() for line in lines]
    if len({len(each) for each in parts}) > 1 and all(each[0] == str(len(each) - 1) for each in parts):
        raise DataError(
            f"{file.path}: each line begins with the number of the values behind it, and names no user; "
            f"write the number of the line there, as awk '{{$1=NR}}1' {file.path.name} does"
        )
    for name, recognise in KNOWN.items():
        if (found := recognise(lines, key)) is not None:
            notes.inferred.append(f"{file.path.name}: read as {name}: {found.told} (columns=[...] reads it otherwise)")
            if found.lost:
                notes.dropped.append(f"{file.path.name}, as {name}: {found.lost}")
            return found
    return None


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
    file: TextFile,
    rows: Sequence[Sequence[str]],
    columns: Sequence[str],
    mentioned: Collection[str],
    key: str | None,
    notes: Notes,
) -> TextLayout:
    first, name = list(rows[0]), file.path.name
    if columns:
        if len(columns) != len(first):
            raise SettingsError(
                f"setting 'columns': names {len(columns)} columns, and the first line of {file.path} has {len(first)}, "
                f"separated by {file.separator!r}: {shortened(file.separator.join(first))!r}; name them all, in order"
            )
        header = [value.strip().lower() for value in first] == [value.lower() for value in columns]
        return TextLayout(file.separator, header, _unique(columns, file, notes), file.quote)
    generated = [f"column_{place}" for place in range(1, len(first) + 1)]
    asked = {*mentioned} & {*generated}
    has_name = any(value.strip() in mentioned or is_usual(value) for value in first)
    if has_name or not (asked or _is_data(first)):
        return TextLayout(file.separator, True, _unique(first, file, notes), file.quote)
    names = tuple(generated)
    if not asked:
        names = _by_position(rows, generated, str(file.path)) if key is None else (key, *generated[1:])
    notes.inferred.append(
        f"{name}: the first line is data, not a header; its {len(first)} columns are taken as {listed(names)} "
        f"(columns=[{', '.join(shortened(each) for each in names[:6])}{', ...' if len(names) > 6 else ''}] names "
        "them otherwise)"
    )
    return TextLayout(file.separator, False, names, file.quote)


def _is_data(first: Sequence[str]) -> bool:
    """Whether a first line without a usual name is no header: it holds a number or a time."""
    values = [value.strip() for value in first]
    return any(NUMBER.fullmatch(value) or _is_written_time(value) for value in values)


def _is_written_time(text: str) -> bool:
    return DATE.fullmatch(text) is not None or any(fits(text, form) for form in GUESSES)


def _by_position(rows: Sequence[Sequence[str]], generated: Sequence[str], where: str) -> tuple[str, ...]:
    """A user, then an item, beside a time at any place and a rating behind them; other columns as `column_5`.

    Raises SettingsError if the values leave it open which column is which.
    """
    names = [*generated]
    if not 2 <= len(names) <= 4:
        return tuple(names)
    held = [
        [row[place].strip() for row in rows if len(row) > place and row[place].strip()] for place in range(len(names))
    ]
    written = [place for place, values in enumerate(held) if values and all(map(_is_written_time, values[:TRIED]))]
    counted = [place for place, values in enumerate(held) if _are_times(values)]
    others = [place for place in range(len(names)) if place not in written]
    late = [place for place in counted if place > 1]
    early = [place for place in counted if place <= 1 and not written and not late and len(names) > 2]
    time = next(iter([*written, *late, *early]), None)
    others = [place for place in others if place != time]
    if len(others) < 2:
        return tuple(names)
    ratings = [place for place in others if _are_ratings(held[place])]
    if (early and any(_are_small(held[place]) for place in others[1:])) or _is_rating_first(others, ratings, len(rows)):
        raise SettingsError(
            f"{where}: has no header, and its values leave open which column is the user, the item, "
            f"the rating and the time: {shortened(', '.join(rows[0]))!r}; name them in order, such as "
            "--set 'columns=[user_id, item_id, rating]'"
        )
    user, item = others[:2]
    if all(map(ASIN.fullmatch, held[user])) and all(map(REVIEWER.fullmatch, held[item])):
        user, item = item, user
    names[user], names[item] = "user_id", "item_id"
    if time is not None:
        names[time] = "timestamp"
    rating = next((place for place in others[2:] if _are_small(held[place])), None)
    if rating is not None:
        names[rating] = "rating"
    return tuple(names)


def _is_rating_first(others: Sequence[int], ratings: Sequence[int], num_rows: int) -> bool:
    """Whether a column in place of the user or the item, and none behind them, looks like ratings or a label."""
    early = [place for place in others[:2] if place in ratings]
    return len(others) > 2 and num_rows >= FEWEST and bool(early) and not {*others[2:]} & {*ratings}


def _are_times(values: Sequence[str]) -> bool:
    """Whether all are numbers of times since 1970 in one unit, or days such as 20240131."""
    if not values or not all(map(NUMBER.fullmatch, values)):
        return False
    if all(fits(value, "%Y%m%d") and "1980" < value < "2066" for value in values):
        return len(values) >= FEWEST
    numbers = [float(value) for value in values]
    return any(EPOCH[0] * unit <= min(numbers) and max(numbers) <= EPOCH[1] * unit for unit in PER_SECOND.values())


def _are_small(values: Sequence[str]) -> bool:
    return bool(values) and all(map(NUMBER.fullmatch, values)) and max(abs(float(v)) for v in values) <= HIGHEST_RATING


def _are_ratings(values: Sequence[str]) -> bool:
    """Whether all are small numbers, of which there are few, or fractions."""
    if not _are_small(values):
        return False
    few = len({*values}) <= FEW_RATINGS and max(float(value) for value in values) <= FEW_RATINGS
    return few or any("." in value for value in values)


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
