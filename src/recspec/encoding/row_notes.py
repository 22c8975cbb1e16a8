"""Notes to the user, in sentences, on raw values and columns that were not taken as they are."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from recspec.encoding.encoder_kinds import FAR
from recspec.encoding.missing_values import MISSING_ID, UNKNOWN_ID, MisreadLists, MissingValues, OutOfRange
from recspec.errors import nearest

NO_EVENT, LEFT_OUT = "an empty history", "such events are left out"
"""What replaces a history without events, and events of unknown items."""

SHOWN = 10
"""Columns that a sentence names."""

Count = TypeVar("Count", MissingValues, MisreadLists, OutOfRange)


@dataclass
class Predictions:
    """How many raw rows were scored, and what was missing, unknown or not read in them."""

    rows: int = 0
    missing_values: dict[str, MissingValues] = field(default_factory=dict)
    """By feature."""
    misread: dict[str, MisreadLists] = field(default_factory=dict)
    """By raw column."""
    unused: tuple[str, ...] = ()
    """Given columns that the model does not read."""
    absent: tuple[str, ...] = ()
    """Features without a column, whose values the catalogues give; named where a column's name may be mistaken."""
    out_of_range: dict[str, OutOfRange] = field(default_factory=dict)
    """By feature."""

    def __iadd__(self, other: Predictions) -> Predictions:
        """Add those of a further block of rows of the same columns."""
        self.rows += other.rows
        _add(self.missing_values, other.missing_values)
        _add(self.misread, other.misread)
        _add(self.out_of_range, other.out_of_range)
        self.unused, self.absent = other.unused, other.absent
        return self

    def notes(self) -> list[str]:
        """A sentence for each replacement of missing or unknown values, with the features concerned.

        Then a sentence for each feature with numbers out of range, one for each list that could not be read, and those
        of `column_notes`.
        """
        by_replacement: dict[str, dict[str, MissingValues]] = {}
        for name, values in self.missing_values.items():
            by_replacement.setdefault(values.taken, {})[name] = values
        notes = [_note_of_many(values, taken, self.rows) for taken, values in by_replacement.items()]
        notes += [_note_of_numbers(name, found, self.rows) for name, found in self.out_of_range.items()]
        notes += [_note_of_list(name, found, self.rows) for name, found in self.misread.items()]
        return notes + column_notes(self.unused, self.absent, self.missing_values)


def _add(total: dict[str, Count], counts: Mapping[str, Count]) -> None:
    for name, count in counts.items():
        total[name] = total[name] + count if name in total else count


def column_notes(unused: Sequence[str], absent: Sequence[str], noted: Collection[str] = ()) -> list[str]:
    """The names of unused columns, each beside the one that was probably meant, and of absent features.

    Args:
        noted: Features that another note names already.
    """
    if not unused:
        return []
    notes = [f"not read: {_named(unused, (*absent, *noted))}"]
    quiet = [name for name in absent if name not in noted]
    return notes + ([f"absent: {_named(quiet)}; the catalogues' values are taken"] if quiet else [])


def _note_of_many(features: Mapping[str, MissingValues], taken: str, rows: int) -> str:
    if len(features) == 1:
        return _note(*next(iter(features.items())), rows)
    counted: dict[tuple[str, int], list[str]] = {}
    for name, values in features.items():
        for kind, count in (("no", values.missing), ("an unknown", values.unknown)):
            if count:
                counted.setdefault((kind, count), []).append(name)
    parts = [f"{count:,} {'has' if count == 1 else 'have'} {kind} {', '.join(names)}"
             for (kind, count), names in counted.items()]  # fmt: skip
    then = f"they are scored with {taken}" if taken in (UNKNOWN_ID, MISSING_ID) else f"{taken} is taken"
    return f"of {rows:,} row{'s' * (rows != 1)} {'; '.join(parts)}: {then}"


def _note(name: str, values: MissingValues, rows: int) -> str:
    of = f"of {rows:,} row{'s' * (rows != 1)}"
    if values.taken == LEFT_OUT:
        holds = "holds" if values.unknown == 1 else "hold"
        return f"{values.unknown:,} {of} {holds} unknown {name}; {LEFT_OUT}"
    lack = f"{values.missing:,} {of} {'has' if values.missing == 1 else 'have'} no {name}"
    if values.taken not in (UNKNOWN_ID, MISSING_ID):
        return f"{lack}; {values.taken} is taken"
    if not values.missing:
        lack = f"{values.unknown:,} {of} {'has' if values.unknown == 1 else 'have'} an unknown {name}"
    elif values.unknown:
        lack += f" and {values.unknown:,} an unknown one"
    return f"{lack}; {'it is' if values.missing + values.unknown == 1 else 'they are'} scored with {values.taken}"


def _note_of_numbers(name: str, found: OutOfRange, rows: int) -> str:
    of = f"of {rows:,} row{'s' * (rows != 1)}"
    parts = []
    if found.outside:
        has = "has" if found.outside == 1 else "have"
        parts.append(f"{found.outside:,} {of} {has} {name} outside {found.limits}; {found.taken:g} is taken")
    if found.far:
        has = "has" if found.far == 1 else "have"
        parts.append(f"{found.far:,} {of} {has} {name} {FAR:g} or more standard deviations from the mean of the "
                     "training data; the answer means little there")  # fmt: skip
    return "; ".join(parts)


def _note_of_list(name: str, found: MisreadLists, rows: int) -> str:
    holds = "holds" if found.rows == 1 else "hold"
    return (
        f"{found.rows:,} of {rows:,} row{'s' * (rows != 1)} {holds} {found.found!r} and no known value in {name}; "
        f"expected its values between {found.expected!r}, or a list of them"
    )


def _named(names: Sequence[str], meant: Collection[str] = ()) -> str:
    shown = [f"'{name[:80]}'{closest(name[:80], meant)}" for name in names[:SHOWN]]
    return ", ".join(shown) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def closest(name: str, known: Collection[str]) -> str:
    """As `nearest`; where no name is near, the one with the nearest beginning: `histroy` for `history_item_id`."""
    suggestion = nearest(name, known)
    if suggestion or len(name) < 4:
        return suggestion
    beginnings = {each[: len(name)].lower(): each for each in reversed(list(known)) if len(each) > len(name)}
    found = difflib.get_close_matches(name.lower(), beginnings, n=1, cutoff=0.75)
    return f" (did you mean '{beginnings[found[0]]}'?)" if found else ""


def row_at(place: int, where: str = "", field: str = "") -> str:
    """How messages name the row at a place, from 0: `row 4`, or of a request's JSON `row 4 (rows[3].age)`.

    Rows and candidates are counted from 1, in a file without its header; the place in brackets from 0, as in JSON.
    """
    if not where:
        return f"row {place + 1:,}"
    return f"{where.removesuffix('s')} {place + 1:,} ({where}[{place}]{'.' if field else ''}{field})"


_ROW = re.compile(r"((?:raw rows: )?(?:column '.*?': )?)row ([0-9]+)\b")


def renumbered(problem: str, name: Callable[[int], str]) -> str:
    """A problem of encoded rows with its row named by `name`, which gets the row's place in the table."""
    return _ROW.sub(lambda found: found[1] + name(int(found[2]) - 1), problem, count=1)
