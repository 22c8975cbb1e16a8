"""What raw rows lack, or hold in vain, in sentences.

Missing and unknown values, columns that nothing reads, and lists whose values stand between another separator than
`prepare` saw.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recspec.encoding import (
    FAR,
    MISSING_ID,
    UNKNOWN_ID,
    CrossEncoder,
    Encoders,
    Gap,
    NumberEncoder,
    ScaleEncoder,
    VocabularyEncoder,
    split_lists,
)
from recspec.errors import nearest

NO_EVENT, LEFT_OUT = "an empty history", "such events are left out"
"""What stands for a history without events, and for events of unknown items."""

SEPARATORS = ("|", ",", ";", "\t", " ")
"""That people put between the values of a list which is one text."""

SHOWN = 10
"""Columns that a sentence names."""


@dataclass(frozen=True)
class Misread:
    """How many rows hold a list, none of whose values is known, as one text with another separator than expected."""

    rows: int
    found: str
    expected: str

    def __add__(self, other: Misread) -> Misread:
        return Misread(self.rows + other.rows, self.found, self.expected)


@dataclass(frozen=True)
class Beyond:
    """How many rows hold a number outside the limits of a feature, or far from all that it was fitted on."""

    outside: int
    far: int
    limits: str
    taken: float

    def __add__(self, other: Beyond) -> Beyond:
        return Beyond(self.outside + other.outside, self.far + other.far, self.limits, self.taken)

    def note(self, name: str, rows: int) -> str:
        """Both counts in one sentence."""
        of = f"of {rows:,} row{'s' * (rows != 1)}"
        told = []
        if self.outside:
            has = "has" if self.outside == 1 else "have"
            told.append(f"{self.outside:,} {of} {has} {name} outside {self.limits}; {self.taken:g} is taken")
        if self.far:
            has = "has" if self.far == 1 else "have"
            told.append(f"{self.far:,} {of} {has} {name} {FAR:g} or more standard deviations from the mean of the "
                        "training data; the answer means little there")  # fmt: skip
        return "; ".join(told)


@dataclass
class Predictions:
    """How many raw rows were scored, and what was missing, unknown or not read in them."""

    rows: int = 0
    gaps: dict[str, Gap] = field(default_factory=dict)
    """By feature."""
    misread: dict[str, Misread] = field(default_factory=dict)
    """By raw column."""
    not_read: tuple[str, ...] = ()
    """Given columns from which the model makes nothing."""
    absent: tuple[str, ...] = ()
    """Features that no column gives, so that the catalogues' values are taken; told where a name may be mistaken."""
    beyond: dict[str, Beyond] = field(default_factory=dict)
    """By feature."""

    def __iadd__(self, other: Predictions) -> Predictions:
        """With those of a further block of rows of the same columns."""
        self.rows += other.rows
        for name, gap in other.gaps.items():
            self.gaps[name] = self.gaps[name] + gap if name in self.gaps else gap
        for name, found in other.misread.items():
            self.misread[name] = self.misread[name] + found if name in self.misread else found
        for name, numbers in other.beyond.items():
            self.beyond[name] = self.beyond[name] + numbers if name in self.beyond else numbers
        self.not_read, self.absent = other.not_read, other.absent
        return self

    def notes(self) -> list[str]:
        """A sentence for each thing that stands for missing or unknown values, with the features it stands for.

        Then one for each feature with numbers that are out of range, one for each list that could not be read,
        and those of `column_notes`.
        """
        kinds: dict[str, dict[str, Gap]] = {}
        for name, gap in self.gaps.items():
            kinds.setdefault(gap.taken, {})[name] = gap
        told = [_note_of_many(gaps, taken, self.rows) for taken, gaps in kinds.items()]
        told += [found.note(name, self.rows) for name, found in self.beyond.items()]
        told += [_note_of_list(name, found, self.rows) for name, found in self.misread.items()]
        return told + column_notes(self.not_read, self.absent, self.gaps)


def column_notes(not_read: Sequence[str], absent: Sequence[str], gaps: Collection[str] = ()) -> list[str]:
    """Where columns are not read: which those are, and which others are absent though no gap tells of them.

    A name that was mistaken then stands beside the one that was meant.
    """
    if not not_read:
        return []
    told = [f"not read: {_named(not_read, (*absent, *gaps))}"]
    quiet = [name for name in absent if name not in gaps]
    return told + ([f"absent: {_named(quiet)}; the catalogues' values are taken"] if quiet else [])


def _note_of_many(gaps: Mapping[str, Gap], taken: str, rows: int) -> str:
    if len(gaps) == 1:
        return _note(*next(iter(gaps.items())), rows)
    counted: dict[tuple[str, int], list[str]] = {}
    for name, gap in gaps.items():
        for kind, count in (("no", gap.missing), ("an unknown", gap.unknown)):
            if count:
                counted.setdefault((kind, count), []).append(name)
    told = [f"{count:,} {'has' if count == 1 else 'have'} {kind} {', '.join(names)}"
            for (kind, count), names in counted.items()]  # fmt: skip
    then = f"they are scored with {taken}" if taken in (UNKNOWN_ID, MISSING_ID) else f"{taken} is taken"
    return f"of {rows:,} row{'s' * (rows != 1)} {'; '.join(told)}: {then}"


def _note(name: str, gap: Gap, rows: int) -> str:
    of = f"of {rows:,} row{'s' * (rows != 1)}"
    if gap.taken == LEFT_OUT:
        holds = "holds" if gap.unknown == 1 else "hold"
        return f"{gap.unknown:,} {of} {holds} unknown {name}; {LEFT_OUT}"
    lack = f"{gap.missing:,} {of} {'has' if gap.missing == 1 else 'have'} no {name}"
    if gap.taken not in (UNKNOWN_ID, MISSING_ID):
        return f"{lack}; {gap.taken} is taken"
    if not gap.missing:
        lack = f"{gap.unknown:,} {of} {'has' if gap.unknown == 1 else 'have'} an unknown {name}"
    elif gap.unknown:
        lack += f" and {gap.unknown:,} an unknown one"
    return f"{lack}; {'it is' if gap.missing + gap.unknown == 1 else 'they are'} scored with {gap.taken}"


def _note_of_list(name: str, found: Misread, rows: int) -> str:
    holds = "holds" if found.rows == 1 else "hold"
    return (
        f"{found.rows:,} of {rows:,} row{'s' * (rows != 1)} {holds} {found.found!r} and no known value in {name}; "
        f"expected its values between {found.expected!r}, or a list of them"
    )


def _named(names: Sequence[str], meant: Collection[str] = ()) -> str:
    told = [f"'{name[:80]}'{closest(name[:80], meant)}" for name in names[:SHOWN]]
    return ", ".join(told) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def closest(name: str, known: Collection[str]) -> str:
    """As `nearest`; where no name is near, the one with the nearest beginning: `histroy` for `history_item_id`."""
    told = nearest(name, known)
    if told or len(name) < 4:
        return told
    beginnings = {each[: len(name)].lower(): each for each in reversed(list(known)) if len(each) > len(name)}
    found = difflib.get_close_matches(name.lower(), beginnings, n=1, cutoff=0.75)
    return f" (did you mean '{beginnings[found[0]]}'?)" if found else ""


def row_at(place: int, where: str = "", field: str = "") -> str:
    """How messages name the row at a place, from 0: `row 4`, or of a request's JSON `row 4 (rows[3].age)`.

    Rows, and candidates, are counted from 1, in a file without its header; what stands in brackets from 0, as in JSON.
    """
    if not where:
        return f"row {place + 1:,}"
    return f"{where.removesuffix('s')} {place + 1:,} ({where}[{place}]{'.' if field else ''}{field})"


def raw_names(encoders: Encoders | None, features: Iterable[str]) -> Iterator[str]:
    """The names under which raw columns may be given that features are made from."""
    for feature in features:
        encoder = encoders.encoders.get(feature) if encoders is not None else None
        if encoder is None or encoders is None:
            yield feature
        elif isinstance(encoder, CrossEncoder):
            yield from encoder.columns
            yield from (name for name, other in encoders.encoders.items()
                        if not isinstance(other, CrossEncoder) and other.column in encoder.columns)  # fmt: skip
        else:
            yield from (feature, encoder.column or feature)


def misread_lists(rows: pa.Table, encoders: Encoders, features: Iterable[str]) -> dict[str, Misread]:
    """Columns of lists as texts that hold a usual separator which is not theirs, and in those rows no known value.

    A sign that stands in values of the vocabulary separates nothing, so it is passed over.
    """
    found: dict[str, Misread] = {}
    for feature in features:
        encoder = encoders.encoders.get(feature)
        if not isinstance(encoder, VocabularyEncoder) or encoder.separator is None:
            continue
        column = next((name for name in (feature, encoder.column) if name in rows.column_names), None)
        if column is None or column in found:
            continue
        values = encoder.present(rows.column(column))
        if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
            continue
        told = _misread(values, encoder, encoders)
        if told is not None:
            found[column] = told
    return found


def out_of_range(rows: pa.Table, encoders: Encoders, features: Iterable[str]) -> dict[str, Beyond]:
    """Features whose raw numbers are outside their limits, or far from those that they were fitted on."""
    found: dict[str, Beyond] = {}
    for feature in features:
        encoder = encoders.encoders.get(feature)
        column = next((name for name in (feature, getattr(encoder, "column", None)) if name in rows.column_names), None)
        if column is None or not isinstance(encoder, (NumberEncoder, ScaleEncoder)):
            continue
        if isinstance(encoder, NumberEncoder) and encoder.length is not None:
            continue
        numbers = encoder.plain(encoder.present(rows.column(column)))
        counts = int(encoder.is_outside(numbers).sum()), int(np.sum(encoder.is_far(numbers)))
        if any(counts):
            low, high = (f"{limit:g}" if limit is not None else "" for limit in (encoder.low, encoder.high))
            found[feature] = Beyond(*counts, f"[{low}, {high}]", encoder.outside)
    return found


def _misread(values: pa.Array, encoder: VocabularyEncoder, encoders: Encoders) -> Misread | None:
    assert encoder.separator is not None, "asked of lists that are one text"
    vocabulary = encoders.vocabularies[encoder.vocabulary]
    trimmed = pc.utf8_trim_whitespace(values)
    for sign in SEPARATORS:
        if sign == encoder.separator:
            continue
        chosen = trimmed.filter(pc.fill_null(pc.match_substring(trimmed, sign), False))
        if not len(chosen):
            continue
        flat, _ = split_lists(chosen, encoder.separator)
        if np.any(vocabulary.encode(flat)):
            continue
        if not vocabulary.is_numeric and pc.any(pc.match_substring(vocabulary.values, sign)).as_py():
            continue
        return Misread(len(chosen), sign, encoder.separator)
    return None
