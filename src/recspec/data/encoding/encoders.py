"""The encoders of a dataset with their vocabularies and text projections: raw rows to prepared columns.

`Encoders` take tables. `RequestEncoder` turns the raw values of one request into the inputs of an exported model, in
microseconds instead of milliseconds. It takes scalar features and clean values only: texts, whole numbers, numbers. It
remembers ids by raw value, and asks `Encoders.encode_values` for new ones. It leaves everything else to
`Encoders.encode`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import ValidationError

from recspec.base.errors import DataError, how_many, listed, nearest, problems_in, unknown
from recspec.base.files import PathError, confined, read_text, whole_file, write_whole
from recspec.data.encoding.encoder_kinds import (
    ENCODERS,
    BucketEncoder,
    CrossEncoder,
    Encoder,
    HashEncoder,
    NumberEncoder,
    ScaleEncoder,
    TextEncoder,
    VectorEncoder,
    VocabularyEncoder,
    encode,
    is_far,
)
from recspec.data.encoding.raw_columns import RawValues, as_int64, narrowed, split_lists
from recspec.data.encoding.raw_values import (
    UNKNOWN,
    Encoded,
    Ids,
    Lists,
    Raw,
    encode_ids,
    encode_numbers,
    is_outside,
    of_known,
)
from recspec.data.encoding.text_vectors import MOST_GRAMS, NUM_BUCKETS, TextProjection
from recspec.data.encoding.vocabulary import Vocabulary
from recspec.feature_spec import Port


def save_projection(projection: TextProjection, path: Path) -> None:
    """Write a Parquet file."""
    dim = projection.weights.shape[1]
    weights = pa.FixedSizeListArray.from_arrays(pa.array(projection.weights.reshape(-1)), dim)
    columns = {"bucket": projection.buckets, "rarity": projection.rarity, "weights": weights}
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        pq.write_table(pa.table(columns), temporary)


def load_projection(path: Path, dim: int) -> TextProjection:
    """Read what `save_projection` wrote. Raises `DataError` if the file is missing or holds anything else."""
    try:
        if pq.read_metadata(path).num_rows > MOST_GRAMS:
            raise DataError(f"{path}: has more than {MOST_GRAMS:,} rows; a projection of texts has at most as many")
        table = pq.read_table(path, columns=["bucket", "rarity", "weights"], partitioning=None).combine_chunks()
        buckets = table.column("bucket").to_numpy().astype(np.int64, casting="same_kind")
        rarity = table.column("rarity").to_numpy().astype(np.float32, casting="same_kind")
        flat = table.column("weights").combine_chunks().flatten().to_numpy(zero_copy_only=False)
        weights = flat.astype(np.float32, casting="same_kind").reshape(len(buckets), dim)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path}: can't be read as a projection of texts to {dim} numbers: {error}") from None
    rises = bool((np.diff(buckets) > 0).all()) and (not len(buckets) or 0 <= buckets[0] <= buckets[-1] < NUM_BUCKETS)
    if not (rises and (rarity > 0).all() and np.isfinite(rarity).all() and np.isfinite(weights).all()):
        raise DataError(f"{path}: is no projection of texts: its numbers are out of range")
    return TextProjection(buckets, rarity, weights)


def extended(vocabulary: Vocabulary, other: Vocabulary) -> Vocabulary:
    """A vocabulary with the values of another one that it lacks, appended in their order.

    Raises:
        DataError: for a value that is no whole number of 64 bits, where all known ones are.
    """
    values = other.values.filter(pa.array(vocabulary.encode(other.values) == 0))
    if not len(values):
        return vocabulary
    if vocabulary.is_numeric:
        numbers = as_int64(values)
        if numbers.null_count:
            wrong = values.filter(numbers.is_null())[0]
            raise DataError(f"'{wrong}' is no whole number of 64 bits, and all known values are; prepare all rows anew")
        values = pc.unique(numbers)  # 6 and 6.0 are one
    kind = pa.int64() if vocabulary.is_numeric else pa.large_string()
    both = pa.chunked_array([vocabulary.values.cast(kind), values.cast(kind)])
    return Vocabulary(narrowed(both.combine_chunks()))


ENCODERS_FILE = "encoders.json"
VOCABULARIES = "vocabularies"


def read_encoders(folder: Path) -> dict[str, Encoder]:
    """What `encoders.json` says, by feature. Raises `DataError` if the file is missing or not what it should be."""
    path = folder / ENCODERS_FILE
    if not path.exists():
        raise DataError(f"{path}: no such file; raw values can't be encoded without it")
    try:
        return ENCODERS.validate_json(read_text(confined(folder, ENCODERS_FILE)))
    except ValidationError as error:
        raise DataError.of(str(path), problems_in(error)) from None


@dataclass(frozen=True)
class Encoders:
    """How each feature's raw values become prepared ones, with the vocabularies this takes."""

    encoders: Mapping[str, Encoder]
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> Encoders:
        """Read `encoders.json` and its vocabularies. Raises `DataError` if a file is missing or damaged."""
        encoders = read_encoders(folder)
        names = {encoder.vocabulary for encoder in encoders.values() if isinstance(encoder, VocabularyEncoder)}
        vocabularies = {name: Vocabulary.load(_file(folder, name)) for name in sorted(names)}
        for name, each in encoders.items():
            if isinstance(each, TextEncoder):
                encoders[name] = each.holding(load_projection(_file(folder, each.projection), each.length))
        return cls(encoders, vocabularies)

    def save(self, folder: Path) -> None:
        """Write `encoders.json`, which keeps settings other than the defaults, and every vocabulary."""
        data = {
            name: encoder.model_dump(mode="json", include={"kind", *encoder.model_dump(exclude_defaults=True)})
            for name, encoder in self.encoders.items()
        }
        (folder / VOCABULARIES).mkdir(parents=True, exist_ok=True)
        write_whole(folder / ENCODERS_FILE, json.dumps(data, indent=2) + "\n")
        for name, vocabulary in self.vocabularies.items():
            vocabulary.save(_file(folder, name))
        for encoder in self.encoders.values():
            if isinstance(encoder, TextEncoder):
                save_projection(encoder.held, _file(folder, encoder.projection))

    def vocabulary_of(self, feature: str) -> Vocabulary:
        """The vocabulary of a feature. Raises `DataError` if the feature is unknown, a number, or hashed."""
        encoder = self.encoder(feature)
        if not isinstance(encoder, VocabularyEncoder):
            numbers = (NumberEncoder, ScaleEncoder, VectorEncoder)
            what = "a number" if isinstance(encoder, numbers) else f"encoded by {encoder.kind}"
            raise DataError(f"feature '{feature}' is {what}; it has no vocabulary")
        return self.vocabularies[encoder.vocabulary]

    def encode(self, table: pa.Table, features: Iterable[str] | None = None) -> dict[str, Encoded]:
        """Prepared columns of raw rows, by default of all features: arrays, and for lists values and offsets.

        A raw column may bear the feature's name or the name it had in the raw files. Raises `DataError`, which names
        every column that is missing and every value that is not a number where one must be.
        """
        found = table.column_names
        problems: list[str] = []
        missing: dict[str, str] = {}  # column -> the feature that needs it, where its name does not say so
        encoded: dict[str, Encoded] = {}
        for name in self.encoders if features is None else features:
            encoder, sources = self.encoder(name), self.sources(name, found)
            there = [source for source in sources if source is not None]
            if len(there) < len(sources):
                for column, source in zip(self._raw(name), sources, strict=True):
                    if source is None:
                        own = getattr(encoder, "column", None) or name  # as the raw files call it
                        or_raw = f" or '{own}'" if own != name else ""
                        missing.setdefault(column, or_raw if column == name else f" that '{name}' is made from")
                continue
            try:
                encoded[name] = encode(encoder, [table.column(source) for source in there], self.vocabularies, there)
            except DataError as error:  # a bad cell is one problem, however many features are made from it
                where = "" if isinstance(encoder, CrossEncoder) else f"column '{there[0]}': "
                problems += [f"{where}{problem}" for problem in error.problems]
        problems += [f"no column '{column}'{needed}{nearest(column, found)}" for column, needed in missing.items()]
        if problems:
            refused = DataError.of("raw rows", problems)
            between = "; " if len(refused.problems) == 1 else "\n  "
            raise DataError(f"{refused}{between}found {listed(found)}", refused.problems) if missing else refused
        return encoded

    def encode_column(self, feature: str, values: RawValues) -> Encoded:
        """The prepared column of a feature made from one raw column. A `DataError` names a row that holds no number."""
        return encode(self.encoder(feature), [values], self.vocabularies, None)

    def encode_values(self, feature: str, values: Sequence[Raw], *, are_texts: bool) -> Ids:
        """The ids of a few values, all texts or all whole numbers (or None), as `encode_column` gives them."""
        encoder = self.encoders[feature]
        known = self.vocabularies[encoder.vocabulary] if encoder.kind == "vocabulary" else None
        return encode_ids(encoder, values, known, are_texts=are_texts)

    def named(self, columns: Sequence[str]) -> list[str]:
        """Names of raw columns without blanks around them, unless a feature needs the blanks or names become equal."""
        made_from = {*self.encoders}
        for encoder in self.encoders.values():
            made_from |= {*encoder.columns} if isinstance(encoder, CrossEncoder) else {encoder.column or ""}
        plain = [name if name in made_from else name.strip() for name in columns]
        return [name if plain.count(short) > 1 else short for name, short in zip(columns, plain, strict=True)]

    def can_encode(self, feature: str, columns: Sequence[str]) -> bool:
        """Whether the raw columns that a feature is made from are all there."""
        return None not in self.sources(feature, columns)

    def encoder(self, feature: str) -> Encoder:
        """The encoder of a feature. Raises `DataError` if there is none, with the nearest name."""
        if feature not in self.encoders:
            raise DataError(unknown("feature", feature, self.encoders))
        return self.encoders[feature]

    def sources(self, feature: str, columns: Sequence[str]) -> list[str | None]:
        """The names here of the columns that a feature is made from; None for each that is missing."""
        encoder = self.encoder(feature)
        if isinstance(encoder, CrossEncoder):
            return [
                next((name for name in chain([raw], self.made_from(raw)) if name in columns), None)
                for raw in encoder.columns
            ]
        return [next((name for name in (feature, encoder.column) if name in columns), None)]

    def made_from(self, raw: str) -> Iterator[str]:
        """The features made from this raw column alone, under whose names a cross finds it too."""
        for name, encoder in self.encoders.items():
            if not isinstance(encoder, CrossEncoder) and encoder.column == raw:
                yield name

    def _raw(self, feature: str) -> Sequence[str]:
        """The columns to ask for where a feature's are missing."""
        encoder = self.encoders[feature]
        if isinstance(encoder, CrossEncoder):
            return encoder.columns
        # buckets of a number are made from the number's column, whatever their own name
        return [encoder.column if encoder.column is not None and encoder.column in self.encoders else feature]


def _file(folder: Path, name: str) -> Path:
    """The file of a vocabulary or projection. Raises `PathError` if its name leads outside."""
    try:
        return confined(folder, f"{VOCABULARIES}/{name}.parquet")
    except PathError as error:
        raise PathError(f"{folder / ENCODERS_FILE}: {error}") from None


def raw_names(encoders: Encoders | None, features: Iterable[str]) -> Iterator[str]:
    """The possible names of the raw columns that features are made from."""
    for feature in features:
        encoder = encoders.encoders.get(feature) if encoders is not None else None
        if encoder is None or encoders is None:
            yield feature
        elif isinstance(encoder, CrossEncoder):
            yield from encoder.columns
            for raw in encoder.columns:
                yield from encoders.made_from(raw)
        else:
            yield from (feature, encoder.column or feature)


def columns_of(encoders: Mapping[str, Encoder], feature: str) -> tuple[str, ...]:
    """The raw columns that a feature is made from, each under one name."""
    encoder = encoders.get(feature)
    if encoder is None:
        return (feature,)
    return tuple(encoder.columns) if isinstance(encoder, CrossEncoder) else (encoder.column or feature,)


@dataclass(frozen=True)
class History:
    """The earlier events of each row's user."""

    ids: Lists  # of the known items, at most the latest `length` of a row
    numbers: Lists | None  # the number of each of these items, where the rows hold such a column
    empty: int  # rows without any event
    with_unknown: int  # rows with an unknown item; such events are left out


def encode_history(encoders: Encoders, table: pa.Table, items: str, numbers: str | None) -> History:
    """The histories in a column of lists of raw items and, if the rows hold it, a column of a number for each item.

    Raises `DataError` if the items' column is missing, or a row has not as many numbers as items.
    """
    encoder, columns = encoders.encoder(items), table.column_names
    assert isinstance(encoder, VocabularyEncoder), items
    if not encoders.can_encode(items, columns):
        encoders.encode(table, [items])  # names what is missing
    _, flat, offsets = _split(encoders, table, items)
    ids, lengths = encoders.vocabularies[encoder.vocabulary].encode(flat), np.diff(offsets)
    length = encoder.length or len(ids)
    of_events = None
    if numbers is not None and encoders.can_encode(numbers, columns):
        of_events = of_known(_numbers(encoders, table, numbers, lengths), ids, offsets, length, "last")
    rows = np.repeat(np.arange(table.num_rows), lengths)
    with_unknown = len(np.unique(rows[ids == UNKNOWN]))
    return History(of_known(ids, ids, offsets, length, "last"), of_events, int((lengths == 0).sum()), with_unknown)


def _numbers(encoders: Encoders, table: pa.Table, name: str, lengths: NDArray[np.int64]) -> NDArray[np.float32]:
    encoder = encoders.encoder(name)
    assert isinstance(encoder, NumberEncoder), name
    source, flat, offsets = _split(encoders, table, name)
    wrong = np.flatnonzero(np.diff(offsets) != lengths)
    if len(wrong):
        row = int(wrong[0])
        numbers, items = how_many(int(np.diff(offsets)[row]), "number"), how_many(int(lengths[row]), "item")
        found = f"row {row + 1} holds {numbers} beside {items}"
        raise DataError(f"raw rows: column '{source}': {found}; expected one for each, or no such column")
    return np.nan_to_num(encoder.transformed(flat), nan=0.0).astype(np.float32)


def _split(encoders: Encoders, table: pa.Table, name: str) -> tuple[str | None, pa.Array, NDArray[np.int64]]:
    """A raw column of lists: its name, all values, and the offset of each row."""
    encoder, (source,) = encoders.encoder(name), encoders.sources(name, table.column_names)
    assert isinstance(encoder, (VocabularyEncoder, NumberEncoder)), name
    return source, *split_lists(encoder.present(table.column(source)), encoder.separator)


# --- the values of one request ----------------------------------------------------------------------------------------

REMEMBERED = 1 << 16  # raw values whose ids a feature remembers, beyond its vocabulary's; then it forgets all
LONGEST = 256  # characters of a text that is encoded here
WHOLE = 1 << 53  # whole numbers below this are exact as float64, and fit 64 bits

Arrays = dict[str, NDArray[Any]]
_Value = str | int | None


class RequestEncoder:
    """Encodes those features of a request's user and context, of its candidates, or of whole rows that it can."""

    def __init__(self, encoders: Encoders, ports: Sequence[Port]) -> None:
        found = {port.name: encoders.encoders.get(port.name) for port in ports}
        self._ids = [
            (name, _sources(name, encoder), _RememberedIds(encoders, name))
            for name, encoder in found.items()
            if isinstance(encoder, (VocabularyEncoder, HashEncoder)) and encoder.length is None
        ]
        numbers = {name: encoder for name, encoder in found.items() if encoder and _is_one_number(encoder)}
        self._types = {port.name: np.dtype(port.dtype) for port in ports}
        self._numbers = [
            _Alike({name: numbers[name] for name in alike}, self._types[alike[0]])
            for alike in _alike(numbers, self._types)
        ]
        self._sources_of_numbers = [_sources(name, numbers[name]) for alike in self._numbers for name in alike.names]
        self._names_of_ids = tuple(name for name, *_ in self._ids)
        self.features = frozenset((*self._names_of_ids, *numbers))
        self.sources = tuple(dict.fromkeys(name for port in ports for name in _sources(port.name, found[port.name])))
        """Possible names of the raw columns."""

    def columns(self, columns: Mapping[str, Sequence[Any]], *, strict: bool = False) -> Arrays | None:
        """Inputs (B, 1) of raw columns; None if one is missing, unusual or, if `strict`, unknown or out of range."""
        made = self.matrices(columns, strict=strict)
        if made is None:
            return None
        rows = {name: row for names, matrix in made for name, row in zip(names, matrix, strict=True)}
        return {name: row.astype(self._types[name], copy=False)[:, None] for name, row in rows.items()}

    def matrices(
        self, columns: Mapping[str, Sequence[Any]], *, strict: bool = False
    ) -> list[tuple[Sequence[str], NDArray[Any]]] | None:
        """`columns` as matrices (F, B), each with its features: ids as int64, numbers by their type."""
        made: list[tuple[Sequence[str], NDArray[Any]]] = []
        found: list[list[int]] = []
        for _, sources, remembered in self._ids:
            values = _given(columns, sources)
            ids = None if values is None else remembered.of(values)
            if ids is None or (strict and UNKNOWN in ids):
                return None
            found.append(ids)
        if found:
            made.append((self._names_of_ids, np.array(found, np.int64)))
        given = [_given(columns, sources) for sources in self._sources_of_numbers]
        numbers = _as_numbers([values for values in given if values is not None], strict=strict) if given else None
        if given and (numbers is None or len(numbers) < len(given)):
            return None
        first = 0
        for alike in self._numbers:
            assert numbers is not None
            own, first = numbers[first : first + len(alike.names)], first + len(alike.names)
            if strict and alike.any_beyond(own):
                return None
            made.append((alike.names, alike.encode(own)))
        return made


class _Alike:
    """Features whose encoders differ in their numbers only, so that one call encodes them all."""

    def __init__(self, encoders: Mapping[str, Encoder], dtype: np.dtype[Any]) -> None:
        self.names, self._dtype = (*encoders,), dtype
        first = next(iter(encoders.values()))
        self._encoder = _stacked([*encoders.values()])
        bounded = (getattr(first, "low", None), getattr(first, "high", None)) != (None, None)
        self._limits = [*([is_outside] if bounded else []), *([is_far] if isinstance(first, ScaleEncoder) else [])]

    def any_beyond(self, numbers: NDArray[np.float64]) -> bool:
        """Whether one of the numbers (C, B) is out of its encoder's range."""
        return any(is_beyond(self._encoder, numbers).any() for is_beyond in self._limits)

    def encode(self, numbers: NDArray[np.float64]) -> NDArray[Any]:
        """The features' inputs (C, B)."""
        return encode_numbers(self._encoder, numbers).astype(self._dtype, copy=False)


def _alike(encoders: Mapping[str, Encoder], types: Mapping[str, np.dtype[Any]]) -> list[list[str]]:
    """Features by what their encoders do: by all settings but the raw column's name and the values of numbers."""
    groups: dict[Any, list[str]] = {}
    for name, encoder in encoders.items():
        settings = (float if isinstance(value, float) else value for own, value in encoder if own != "column")
        groups.setdefault((types[name], *settings), []).append(name)
    return [*groups.values()]


def _stacked(encoders: Sequence[Encoder]) -> Any:
    """The settings of encoders that do the same: each number becomes a column (C, 1) of theirs."""
    return SimpleNamespace(
        **{
            name: np.array([[getattr(each, name)] for each in encoders]) if isinstance(value, float) else value
            for name, value in encoders[0]
        }
    )


class _RememberedIds:
    """The ids of a feature's raw values, by value."""

    def __init__(self, encoders: Encoders, feature: str) -> None:
        self._encoders, self._feature = encoders, feature
        self._known: dict[type, dict[_Value, int]] = {str: {}, int: {}}
        encoder = encoders.encoders[feature]
        vocabulary = encoders.vocabularies[encoder.vocabulary] if isinstance(encoder, VocabularyEncoder) else ()
        self._most = REMEMBERED + len(vocabulary)

    def of(self, values: Sequence[Any]) -> list[int] | None:
        """An id for each value; None unless they are all texts or all whole numbers, missing ones aside."""
        if len(values) == 1:  # the common case in a request: a known value skips the set of types
            value = values[0]
            known = self._known.get(type(value))
            if known is not None and (id_ := known.get(value)) is not None:
                return [id_]
        kinds = set(map(type, values))
        kinds.discard(type(None))
        if len(kinds) != 1:
            return None
        known = self._known.get(kinds.pop())
        if known is None:
            return None
        ids = list(map(known.get, values))
        if None not in ids:
            return ids  # type: ignore[return-value]
        learned = self._learn({value for value, id_ in zip(values, ids, strict=True) if id_ is None}, known)
        if learned is None:
            return None
        return [learned[value] if id_ is None else id_ for value, id_ in zip(values, ids, strict=True)]

    def _learn(self, values: set[_Value], known: dict[_Value, int]) -> dict[_Value, int] | None:
        """Ids of new values; None if one is too long or too large. Unknown values are not remembered."""
        new = list(values)
        if not all(map(_is_usual, new)):
            return None
        found = self._encoders.encode_values(self._feature, new, are_texts=known is self._known[str])
        learned = dict(zip(new, found.tolist(), strict=True))
        if len(known) + len(learned) > self._most:
            known.clear()
        known.update({value: id_ for value, id_ in learned.items() if id_ != UNKNOWN})
        return learned


def _is_usual(value: _Value) -> bool:
    """Whether a text is short enough, and Unicode, and a whole number is not too large."""
    if not isinstance(value, str):
        return value is None or abs(value) < WHOLE
    try:
        return len(value) <= LONGEST and (value.isascii() or bool(value.encode()))
    except UnicodeEncodeError:
        return False


def _as_numbers(columns: Sequence[Sequence[Any]], *, strict: bool) -> NDArray[np.float64] | None:
    """Numbers (C, B) of C columns as float64, NaN where one is missing; None if anything else is among them."""
    kinds = set[type]().union(*(map(type, values) for values in columns))
    if not kinds <= {float, int, type(None)}:
        return None
    try:
        numbers = np.array(columns, np.float64)
    except OverflowError:
        return None
    if np.isinf(numbers).any() or (int in kinds and (np.abs(numbers) >= WHOLE).any()):
        return None
    return None if strict and np.isnan(numbers).any() else numbers


def _is_one_number(encoder: Encoder | None) -> bool:
    is_number = isinstance(encoder, (NumberEncoder, ScaleEncoder, BucketEncoder)) and not encoder.missing_values
    return is_number and getattr(encoder, "length", None) is None


def _sources(feature: str, encoder: Encoder | None) -> tuple[str, ...]:
    """Possible names of the feature's raw column."""
    column = getattr(encoder, "column", None)
    return (feature,) if column is None else (feature, column)


def _given(columns: Mapping[str, Sequence[Any]], sources: Sequence[str]) -> Sequence[Any] | None:
    for name in sources:
        if name in columns:
            return columns[name]
    return None
