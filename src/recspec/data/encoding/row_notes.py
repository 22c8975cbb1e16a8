"""Notes to the user on raw values that were not taken as they are: missing, unknown, misread or out of range."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recspec.base.errors import nearest
from recspec.data.encoding.encoder_kinds import (
    FAR,
    BucketEncoder,
    CrossEncoder,
    Encoder,
    NumberEncoder,
    ScaleEncoder,
    TextEncoder,
    VectorEncoder,
    VocabularyEncoder,
    is_far,
)
from recspec.data.encoding.encoders import Encoders
from recspec.data.encoding.raw_columns import RawValues, as_array, as_numbers, as_text, is_text, split_lists, vectors_of
from recspec.data.encoding.raw_values import UNKNOWN, Encoded, is_outside
from recspec.data.encoding.vocabulary import Vocabulary

# What replaces unknown and missing values, a history without events, and events of unknown items:
UNKNOWN_ID, MISSING_ID = "the id of unknown values", "the id of missing values"
NO_EVENT, LEFT_OUT = "an empty history", "such events are left out"
NO_KNOWN_EVENT = "the empty history of a user without events in the catalogue"

SEPARATORS = ("|", ",", ";", "\t", " ")  # common signs between the values of a list that is one text
SHOWN = 10  # columns that a sentence names


@dataclass(frozen=True)
class MissingValues:
    """How many rows lack a value, and how many hold one that was unknown when the data was prepared."""

    missing: int
    unknown: int
    taken: str  # what replaces them

    def __add__(self, other: MissingValues) -> MissingValues:
        return MissingValues(self.missing + other.missing, self.unknown + other.unknown, self.taken)

    def note(self, name: str, rows: int) -> str:
        """A sentence on these values of a feature, of so many rows in all."""
        if self.taken == LEFT_OUT:
            return f"{_some(self.unknown, rows, 'holds')} unknown {name}; {LEFT_OUT}"
        if self.taken == NO_KNOWN_EVENT:
            return f"{_some(self.missing, rows)} a user without a history in the catalogue; {NO_EVENT} is taken"
        lack = f"{_some(self.missing, rows)} no {name}"
        if self.taken not in (UNKNOWN_ID, MISSING_ID):
            return f"{lack}; {self.taken} is taken"
        if not self.missing:
            lack = f"{_some(self.unknown, rows)} an unknown {name}"
        elif self.unknown:
            lack += f" and {self.unknown:,} an unknown one"
        return f"{lack}; {'it is' if self.missing + self.unknown == 1 else 'they are'} scored with {self.taken}"


@dataclass(frozen=True)
class MisreadLists:
    """How many rows hold a list without a known value, as one text with another separator than expected."""

    rows: int
    found: str
    expected: str

    def __add__(self, other: MisreadLists) -> MisreadLists:
        return MisreadLists(self.rows + other.rows, self.found, self.expected)

    def note(self, name: str, rows: int) -> str:
        holds = f"{_some(self.rows, rows, 'holds')} {self.found!r} and no known value in {name}"
        return f"{holds}; expected its values between {self.expected!r}, or a list of them"


@dataclass(frozen=True)
class OutOfRange:
    """How many rows hold a number outside the limits of a feature, or far from the numbers it was fitted on."""

    outside: int
    far: int
    limits: str
    taken: float | None

    def __add__(self, other: OutOfRange) -> OutOfRange:
        return OutOfRange(self.outside + other.outside, self.far + other.far, self.limits, self.taken)

    def note(self, name: str, rows: int) -> str:
        parts = []
        if self.outside:
            taken = "the nearer limit" if self.taken is None else f"{self.taken:g}"
            parts.append(f"{_some(self.outside, rows)} {name} outside {self.limits}; {taken} is taken")
        if self.far:
            far = f"{FAR:g} or more standard deviations from the mean of the training data"
            parts.append(f"{_some(self.far, rows)} {name} {far}; the answer means little there")
        return "; ".join(parts)


@dataclass
class Predictions:
    """How many raw rows were scored, and what was missing, unknown or not read in them."""

    rows: int = 0
    missing_values: dict[str, MissingValues] = field(default_factory=dict)  # by feature
    misread: dict[str, MisreadLists] = field(default_factory=dict)  # by raw column
    unused: tuple[str, ...] = ()  # given columns that the model does not read
    absent: tuple[str, ...] = ()  # features without a column, whose values the catalogues give
    out_of_range: dict[str, OutOfRange] = field(default_factory=dict)  # by feature
    not_finite: int = 0  # rows whose answer is no number

    def __iadd__(self, other: Predictions) -> Predictions:
        """Add those of a further block of rows of the same columns."""
        self.rows += other.rows
        self.not_finite += other.not_finite
        _add(self.missing_values, other.missing_values)
        _add(self.misread, other.misread)
        _add(self.out_of_range, other.out_of_range)
        self.unused, self.absent = other.unused, other.absent
        return self

    def notes(self) -> list[str]:
        """Sentences on rows without an answer, replaced values, numbers out of range, misread lists, unused columns."""
        by_replacement: dict[str, dict[str, MissingValues]] = {}
        for name, values in self.missing_values.items():
            by_replacement.setdefault(values.taken, {})[name] = values
        notes = [_note_of_many(values, taken, self.rows) for taken, values in by_replacement.items()]
        if self.not_finite:
            why = "no value: the model gives no finite number; a value is too large, or the model is damaged"
            notes.insert(0, f"{_some(self.not_finite, self.rows)} {why}")
        notes += [found.note(name, self.rows) for name, found in self.out_of_range.items()]
        notes += [found.note(name, self.rows) for name, found in self.misread.items()]
        return notes + column_notes(self.unused, self.absent, self.missing_values)


Count = TypeVar("Count", MissingValues, MisreadLists, OutOfRange)


def _add(total: dict[str, Count], counts: Mapping[str, Count]) -> None:
    for name, count in counts.items():
        total[name] = total[name] + count if name in total else count


def _note_of_many(features: Mapping[str, MissingValues], taken: str, rows: int) -> str:
    if len(features) == 1:
        ((name, values),) = features.items()
        return values.note(name, rows)
    counted: dict[tuple[str, int], list[str]] = {}
    for name, values in features.items():
        for kind, count in (("no", values.missing), ("an unknown", values.unknown)):
            if count:
                counted.setdefault((kind, count), []).append(name)
    parts = [
        f"{count:,} {'has' if count == 1 else 'have'} {kind} {', '.join(names)}"
        for (kind, count), names in counted.items()
    ]
    then = f"they are scored with {taken}" if taken in (UNKNOWN_ID, MISSING_ID) else f"{taken} is taken"
    return f"of {rows:,} row{'s' * (rows != 1)} {'; '.join(parts)}: {then}"


def _some(count: int, rows: int, verb: str = "has") -> str:
    """`1 of 20 rows has`, `3 of 20 rows have`."""
    verbs = {"has": "have", "holds": "hold"}
    return f"{count:,} of {rows:,} row{'s' * (rows != 1)} {verb if count == 1 else verbs[verb]}"


def column_notes(unused: Sequence[str], absent: Sequence[str], noted: Collection[str] = ()) -> list[str]:
    """The names of unused columns, each beside the one probably meant, and of absent features that are not `noted`."""
    if not unused:
        return []
    notes = [f"not read: {_named(unused, (*absent, *noted))}"]
    quiet = [name for name in absent if name not in noted]
    return notes + ([f"absent: {_named(quiet)}; the catalogues' values are taken"] if quiet else [])


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


def count_missing(rows: pa.Table, encoders: Encoders, encoded: Mapping[str, Encoded]) -> dict[str, MissingValues]:
    """Missing and unknown values of the raw columns that were encoded, each column once, without lists and crosses."""
    found: dict[str, MissingValues] = {}
    counted: set[str | None] = set()
    for name in sorted(encoded, key=lambda name: isinstance(encoders.encoder(name), BucketEncoder)):
        encoder, column = encoders.encoder(name), encoded[name]
        is_list = isinstance(column, tuple) and not isinstance(encoder, (VectorEncoder, TextEncoder))
        if isinstance(encoder, CrossEncoder) or is_list:
            continue
        (source,) = encoders.sources(name, rows.column_names)
        if source in counted:
            continue
        counted.add(source)
        values = _missing_values(encoder, rows.column(source), column)
        if values.missing or values.unknown:
            found[str(source) if isinstance(encoder, BucketEncoder) else name] = values
    return found


def _missing_values(encoder: Encoder, values: RawValues, encoded: Encoded) -> MissingValues:
    if isinstance(encoder, VectorEncoder):
        absent = np.isnan(vectors_of(encoder.present(values), encoder.length)).all(axis=1)
        return MissingValues(int(absent.sum()), 0, "a vector of zeros")
    if isinstance(encoder, TextEncoder):
        texts = pc.fill_null(as_text(encoder.present(values)), "")
        return MissingValues(int(pc.sum(pc.equal(texts, "")).as_py() or 0), 0, "a vector of zeros")
    assert not isinstance(encoded, tuple), "of lists, only vectors are counted"
    if isinstance(encoder, (NumberEncoder, ScaleEncoder)):
        nothing = "the mean" if isinstance(encoder, ScaleEncoder) else "0"
        taken = nothing if encoder.missing is None else f"{encoder.missing:g}"
        return MissingValues(int(np.isnan(_numbers(encoder, values)).sum()), 0, taken)
    zeros = encoded == UNKNOWN
    if not isinstance(encoder, VocabularyEncoder):
        return MissingValues(int(zeros.sum()), 0, MISSING_ID)
    array = encoder.present(values).filter(pa.array(zeros))
    missing = array.is_null(nan_is_null=True)
    if is_text(array.type):
        missing = pc.or_(missing, pc.fill_null(pc.equal(array, ""), False))
    count = pc.sum(missing).as_py() or 0
    return MissingValues(count, len(array) - count, UNKNOWN_ID)


def _numbers(encoder: NumberEncoder | ScaleEncoder, values: RawValues) -> NDArray[np.float64]:
    return as_numbers(as_array(encoder.present(values)))


def misread_lists(rows: pa.Table, encoders: Encoders, features: Iterable[str]) -> dict[str, MisreadLists]:
    """Columns of lists as texts where rows hold another usual separator, and no known value."""
    found: dict[str, MisreadLists] = {}
    for feature in features:
        encoder = encoders.encoders.get(feature)
        if not isinstance(encoder, VocabularyEncoder) or encoder.separator is None:
            continue
        (column,) = encoders.sources(feature, rows.column_names)
        if column is None or column in found:
            continue
        values = encoder.present(rows.column(column))
        misread = _misread(values, encoder.separator, encoders.vocabulary_of(feature)) if is_text(values.type) else None
        if misread is not None:
            found[column] = misread
    return found


def _misread(values: pa.Array, separator: str, vocabulary: Vocabulary) -> MisreadLists | None:
    trimmed = pc.utf8_trim_whitespace(values)
    for sign in SEPARATORS:
        if sign == separator:
            continue
        chosen = trimmed.filter(pc.fill_null(pc.match_substring(trimmed, sign), False))
        if not len(chosen) or np.any(vocabulary.encode(split_lists(chosen, separator)[0])):
            continue
        # a sign that occurs in known values separates nothing
        if vocabulary.is_numeric or not pc.any(pc.match_substring(vocabulary.values, sign)).as_py():
            return MisreadLists(len(chosen), sign, separator)
    return None


def out_of_range(rows: pa.Table, encoders: Encoders, features: Iterable[str]) -> dict[str, OutOfRange]:
    """Features whose raw numbers lie outside their limits, or far from those that they were fitted on."""
    found: dict[str, OutOfRange] = {}
    for feature in features:
        encoder = encoders.encoders.get(feature)
        if not isinstance(encoder, (NumberEncoder, ScaleEncoder)) or getattr(encoder, "length", None) is not None:
            continue
        (column,) = encoders.sources(feature, rows.column_names)
        if column is None:
            continue
        numbers = _numbers(encoder, rows.column(column))
        counts = int(is_outside(encoder, numbers).sum()), int(is_far(encoder, numbers).sum())
        if any(counts):
            low, high = (f"{limit:g}" if limit is not None else "" for limit in (encoder.low, encoder.high))
            found[feature] = OutOfRange(*counts, f"[{low}, {high}]", encoder.outside)
    return found


def row_at(place: int, where: str = "", field: str = "") -> str:
    """How messages name the row at a place from 0: `row 4`, or of a request `row 4 (rows[3].age)`, as in its JSON."""
    if not where:
        return f"row {place + 1:,}"
    return f"{where.removesuffix('s')} {place + 1:,} ({where}[{place}]{'.' if field else ''}{field})"


_ROW = re.compile(r"((?:raw rows: )?(?:column '.*?': )?)row ([0-9]+)\b")


def renumbered(problem: str, name: Callable[[int], str]) -> str:
    """A problem of encoded rows with its row named by `name`, which gets the row's place in the table."""
    return _ROW.sub(lambda found: found[1] + name(int(found[2]) - 1), problem, count=1)
