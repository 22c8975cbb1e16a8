"""Catalogues of users and items by id, and the features and encoders of a dataset."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec.base.errors import DataError, listed
from recspec.data.encoding import (
    ENCODERS_FILE,
    VOCABULARIES,
    BucketEncoder,
    CrossEncoder,
    Encoder,
    Encoders,
    HashEncoder,
    Lists,
    NumberEncoder,
    ScaleEncoder,
    TextEncoder,
    VectorEncoder,
    Vocabulary,
    VocabularyEncoder,
    combined,
    extended,
    in_strings,
    is_text,
    widened,
)
from recspec.data.prepare.columns import Column, fit
from recspec.data.prepare.names import AS_IN_FILE, Notes
from recspec.data.storage import Column as StoredColumn
from recspec.data.storage import Columns, Ragged
from recspec.feature_spec import Feature, FeatureSpec

WHOLE_ID = re.compile(r"-?[0-9]{1,15}(\.0+)?")
MOST_COMPARED = 10_000  # ids that one side lacks
LIST_VALUES = 2**31 - 1  # most values in the lists of one array of type `list`; larger arrays are `large_list`


@dataclass(frozen=True)
class Catalogue:
    """Users or items, one row each. It may describe more of them than the rows name."""

    table: pa.Table
    key: str  # column of the raw id
    columns: Sequence[Column] = ()  # features of the role
    readable: Mapping[str, str] = field(default_factory=dict)  # columns for people: name in the output -> raw column
    file: str | None = None  # the file of `table`, for notes; None if it was made from the rows
    latest: pa.Table | None = None  # further columns made from the rows of train, with the same key


def _feature(encoder: Encoder, vocabulary: Vocabulary | None) -> Feature:
    if isinstance(encoder, (NumberEncoder, ScaleEncoder)):
        return Feature(dtype="float32")
    if isinstance(encoder, (VectorEncoder, TextEncoder)):
        return Feature(dtype="float32", length=encoder.length, vector=True)
    length = encoder.length if isinstance(encoder, (VocabularyEncoder, HashEncoder)) else None
    padding: Literal[0] | None = None if length is None else 0
    if isinstance(encoder, VocabularyEncoder):
        cardinality = vocabulary.cardinality if vocabulary is not None else None
    else:
        cardinality = encoder.cardinality
    return Feature(dtype="int32", cardinality=cardinality, length=length, padding=padding)


# --- catalogues ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreparedCatalogue:
    """Users or items by id: row i has id i + 1."""

    id_name: str
    count: int
    columns: Columns  # prepared features of the role, without its id
    readable: Mapping[str, pa.ChunkedArray]  # columns for people
    vectors: Collection[str] = ()  # the columns that are vectors

    def rows(self, ids: NDArray[np.int64]) -> Columns:
        """The features of the given ids; 0, empty or a vector of zeros for id 0, unknown."""
        found = {name: take(column, np.maximum(ids - 1, 0)) for name, column in self.columns.items()}
        unknown = ids == 0
        if not unknown.any():
            return found
        return {name: _emptied(column, unknown, name in self.vectors) for name, column in found.items()}

    def table(self, start: int = 0, count: int | None = None) -> pa.Table:
        """The id, the prepared features and the columns for people, from row `start`."""
        stop = self.count if count is None else start + count
        arrays: dict[str, object] = {self.id_name: np.arange(start + 1, stop + 1, dtype=np.int32)}
        for name, column in self.columns.items():
            arrays[name] = to_arrow(column.rows(start, stop) if isinstance(column, Ragged) else column[start:stop])
        readable = {name: in_strings(column[start:stop]) for name, column in self.readable.items()}
        return pa.table({**arrays, **readable})

    def write(self, path: Path) -> None:
        pq.write_table(self.table(), path)


def _emptied(column: StoredColumn, rows: NDArray[np.bool_], is_vector: bool) -> StoredColumn:
    """A column that is 0, an empty list, or a vector of zeros, in the marked rows."""
    if isinstance(column, Ragged) and is_vector:
        values = np.where(np.repeat(rows, column.lengths), column.values.dtype.type(0), column.values)
        return Ragged(values, column.offsets)
    if isinstance(column, Ragged):
        return column.where(~np.repeat(rows, column.lengths))
    return np.where(rows, column.dtype.type(0), column)


def to_arrow(column: StoredColumn) -> pa.Array:
    """A prepared column as Parquet holds it."""
    if not isinstance(column, Ragged):
        return pa.array(column)
    if len(column.values) > LIST_VALUES:
        return pa.LargeListArray.from_arrays(pa.array(column.offsets), pa.array(column.values))
    return pa.ListArray.from_arrays(pa.array(column.offsets.astype(np.int32)), pa.array(column.values))


class Fitted:
    """Collects the features, encoders and vocabularies of a dataset, column by column.

    Encoders that were fitted `before` stay as they are, and their vocabularies grow by the values that they lack.
    """

    def __init__(
        self,
        missing_values: Sequence[str],
        missing_by_column: Mapping[str, Sequence[str]],
        before: Encoders | None,
        *,
        strip: bool = False,
    ) -> None:
        self._strip, self._missing, self._missing_by_column = strip, tuple(missing_values), missing_by_column
        self._before = before or Encoders({}, {})
        self.features: dict[str, Feature] = {}
        self.encoders = Encoders({}, {})

    def add(self, name: str, encoder: Encoder, vocabulary: Vocabulary | None) -> None:
        """Add a feature with its encoder, and with its vocabulary if it has one."""
        vocabularies = self.encoders.vocabularies
        if vocabulary is not None:
            known = self._before.vocabularies.get(name)
            try:
                vocabulary = vocabulary if known is None else extended(known, vocabulary)
            except DataError as error:
                raise DataError(f"feature '{name}': {error}") from None
            vocabularies = {**vocabularies, name: vocabulary}
        columns = encoder.columns if isinstance(encoder, CrossEncoder) else (encoder.column or name,)
        missing = dict.fromkeys(text for raw in columns for text in self._missing_by_column.get(raw, self._missing))
        encoder = encoder.model_copy(update={"strip": self._strip, "missing_values": tuple(missing)})
        encoder = self._before.encoders.get(name, encoder)
        self.encoders = Encoders({**self.encoders.encoders, name: encoder}, vocabularies)
        self.features[name] = _feature(encoder, vocabulary)

    def fixed(self, column: Column) -> Column:
        """The column with its encoder of before, if that does not grow; so nothing is fitted again."""
        known = self._before.encoders.get(column.name)
        return column if known is None or isinstance(known, VocabularyEncoder) else replace(column, encoder=known)

    def add_encoder(self, name: str, encoder: Encoder) -> None:
        self.encoders = Encoders({**self.encoders.encoders, name: encoder}, self.encoders.vocabularies)

    def add_cross(self, column: Column) -> None:
        if column.encoder is not None:
            self.add(column.name, column.encoder, None)
            return
        raw: list[str] = []
        cut: dict[str, tuple[float, ...]] = {}
        for name in column.crossed:
            part = self.encoders.encoders[name]
            assert not isinstance(part, CrossEncoder), f"{column.name} crosses the cross {name}"
            raw.append(part.column or name)
            if isinstance(part, BucketEncoder):
                cut[raw[-1]] = part.boundaries
        self.add(column.name, CrossEncoder(columns=tuple(raw), cardinality=column.size, boundaries=cut), None)

    def add_id(self, name: str, vocabulary: Vocabulary, raw: str | None) -> None:
        self.add(name, VocabularyEncoder(vocabulary=name, column=raw if raw != name else None), vocabulary)

    def add_catalogue(
        self, role: str, key: str, catalogue: Catalogue | None, *, notes: Notes, unseen: str, name_missing: bool = False
    ) -> PreparedCatalogue:
        """Add the features of a role, fitted on the users or items with an id.

        `unseen` is the predicate of a note on users or items of the file without an id. With `name_missing`, a missing
        text becomes the category `no_NAME`, with an id of its own.
        """
        ids = self.encoders.vocabularies[key]
        if catalogue is None:
            return PreparedCatalogue(key, len(ids), {}, {})
        known, encoder_of_ids = _by_id(catalogue, ids, role), self.encoders.encoders[key]
        raw_id = (isinstance(encoder_of_ids, VocabularyEncoder) and encoder_of_ids.column) or key
        _note_unmatched(catalogue, ids, role, notes, unseen, raw_id)
        columns: Columns = {}
        for column in catalogue.columns:
            raw = combined(known.column(column.source))
            if column.name not in self.features:
                named = name_missing and column.kind == "category" and is_text(raw.type)
                missing = f"no_{column.name}" if named else None
                encoder, vocabulary = fit(self.fixed(column), pc.fill_null(raw, missing) if named else raw)
                if named and isinstance(encoder, VocabularyEncoder):
                    encoder = encoder.model_copy(update={"missing": missing})
                self.add(column.name, encoder, vocabulary)
            columns[column.name] = self.encode(column.name, raw)
        readable = {new: known.column(old) for new, old in catalogue.readable.items()}
        for name, column in readable.items():  # each engine names the values of a list in its own way
            if pa.types.is_list(column.type):
                readable[name] = column.cast(pa.list_(column.type.value_type))
        vectors = [column.name for column in catalogue.columns if self.features[column.name].is_vector]
        return PreparedCatalogue(key, len(ids), columns, readable, vectors)

    def encode(self, name: str, raw: pa.Array) -> StoredColumn:
        """Encode a raw column for a `SplitWriter`."""
        return self._stored(name, self.encoders.encode_column(name, raw))

    def encode_cross(self, column: Column, parts: Sequence[pa.Array]) -> StoredColumn:
        """Encode a cross, given the raw columns of its features."""
        encoder = self.encoders.encoders[column.name]
        assert isinstance(encoder, CrossEncoder), column
        rows = pa.table(list(parts), names=list(encoder.columns))
        return self._stored(column.name, self.encoders.encode(rows, [column.name])[column.name])

    def _stored(self, name: str, column: NDArray[np.generic] | Lists) -> StoredColumn:
        dtype = self.features[name].dtype
        if isinstance(column, tuple):
            values, offsets = column
            return Ragged(values.astype(dtype), offsets)
        return column.astype(dtype)


def metadata(dataset: str, ids: Mapping[str, str], summary: Mapping[str, object], **more: object) -> dict[str, object]:
    """The metadata of a specification whose users and items have the given id columns, by role."""
    return {
        "dataset": dataset,
        **{f"{role}_id": name for role, name in ids.items()},
        "catalogues": {role: f"{role}s.parquet" for role in ids},
        "encoders": ENCODERS_FILE,
        "vocabularies": VOCABULARIES,
        **more,
        "summary": summary,
    }


def _by_id(catalogue: Catalogue, ids: Vocabulary, role: str) -> pa.Table:
    """The catalogue's rows in the order of the ids; a row of nulls for an id that it lacks."""
    table = _taken(catalogue.table, _places(catalogue.table, catalogue.key, ids, role))
    if catalogue.latest is None:
        return table
    latest = _taken(catalogue.latest, _places(catalogue.latest, catalogue.key, ids, role))
    for name in latest.column_names:
        table = table if name == catalogue.key else table.append_column(name, latest.column(name))
    return table


def _taken(table: pa.Table, places: pa.Array) -> pa.Table:
    return pa.table({name: widened(table.column(name)) for name in table.column_names}).take(places)


def _places(table: pa.Table, key: str, ids: Vocabulary, role: str) -> pa.Array:
    """The row of a table that describes each id; null if there is none."""
    places = ids.encode(table.column(key))
    known = np.flatnonzero(places > 0)
    found, first, count = np.unique(places[known], return_index=True, return_counts=True)
    if (count > 1).any():
        twice = ids.decode(found[count > 1][:5]).to_pylist()
        raise DataError(
            f"the {role} catalogue names {int((count > 1).sum())} ids more than once, such as "
            f"{listed(map(str, twice))}; expected one row each"
        )
    take = np.full(len(ids), -1)
    take[found - 1] = known[first]
    return pa.array(take, mask=take < 0)


def _equal_as_numbers(some: pa.ChunkedArray, others: pa.Array) -> tuple[str, str] | None:
    """Two ids that are one whole number and other texts, such as 3 and 3.0, or 7 and 007."""
    found = (
        {int(float(text)): text for text in map(str, each.to_pylist()) if WHOLE_ID.fullmatch(text)}
        for each in (some, others)
    )
    ours, theirs = found
    return next(((text, theirs[number]) for number, text in ours.items() if number in theirs), None)


def _note_unmatched(catalogue: Catalogue, ids: Vocabulary, role: str, notes: Notes, unseen: str, raw: str) -> None:
    """Note the users or items that only the file names, and those that it lacks; refuse a file that lacks all."""
    everyone = np.arange(1, len(ids) + 1)
    if catalogue.latest is not None:
        missing = np.setdiff1d(everyone, ids.encode(catalogue.latest.column(catalogue.key)))
        if len(missing):
            features = listed(name for name in catalogue.latest.column_names if name != catalogue.key)
            notes.dropped.append(
                f"{features} of {len(missing):,} of {len(ids):,} {role}s, such as "
                f"'{ids.decode(missing[:1]).to_pylist()[0]}': they have no train row, and values of held-out rows are "
                f"not used; a file of {role}s ({role}s=FILE) can give them"
            )
    if catalogue.file is None or not len(catalogue.table):
        return
    keys = catalogue.table.column(catalogue.key)
    places = ids.encode(keys)
    without_id = np.flatnonzero(places == 0)
    missing = np.setdiff1d(everyone, places)
    same = _equal_as_numbers(keys.take(without_id[:MOST_COMPARED]), ids.decode(missing[:MOST_COMPARED]))
    remedy = "name the file that fits, or leave it out"
    if same is not None:
        remedy = f"'{same[0]}' and '{same[1]}' are equal as numbers; --set 'types={{{raw}: integer}}' reads both as one"
    if len(missing) == len(ids) > 0:
        raise DataError(
            f"{catalogue.file}: describes none of the {len(ids):,} {role}s of the rows; its column '{raw}' "
            f"holds {listed(map(str, keys[:3].to_pylist()))}, the rows' ids are such as "
            f"{listed(map(str, ids.decode(missing[:3]).to_pylist()))}; {remedy}"
        )
    if same is not None:
        notes.inferred.append(f"{role}s of {catalogue.file} and of the rows: {remedy}")
    if len(without_id):
        notes.dropped.append(
            f"{len(without_id):,} of {len(places):,} {role}s in {catalogue.file} {unseen}, such as "
            f"'{keys[int(without_id[0])].as_py()}'; they have no id, so they are never recommended"
        )
    if len(missing):
        notes.changed.append(
            f"{len(missing):,} of {len(ids):,} {role}s of the rows are not in {catalogue.file}, such as "
            f"'{ids.decode(missing[:1]).to_pylist()[0]}'; nothing of the file is known of them: add them to it"
        )


def note_new(role: str, key: str, catalogue: Catalogue, before: Encoders, after: Encoders) -> list[str]:
    """A note on the users or items that are new and lack values, if there are any."""
    new = Vocabulary(after.vocabularies[key].values.slice(len(before.vocabularies[key])))
    known = _by_id(catalogue, new, role)
    sources = {column.called or column.source: column.source for column in catalogue.columns}
    sources = {old.removeprefix(AS_IN_FILE): old for old in catalogue.readable.values()} | sources
    lacking = {name: np.asarray(known.column(old).is_null()) for name, old in sources.items()}
    columns = [name for name, lacks in lacking.items() if lacks.any()]
    if not columns:
        return []
    some = np.logical_or.reduce([*lacking.values()])
    count, first = int(some.sum()), new.values[int(np.argmax(some))].as_py()
    who = f"1 new {role}" if len(new) == 1 else f"{count:,} of {len(new):,} new {role}s"
    told = (
        f"{who}, such as '{first}', {'lacks' if count == 1 else 'lack'} values in {listed(columns)}: an update reads "
        "them from the new events, features from events of train alone; to give them, delete this version, add the "
        "columns to the file and update again"
    )
    return [told]


def take(column: StoredColumn, places: NDArray[np.int64]) -> StoredColumn:
    """The rows of a column at the given places."""
    if not isinstance(column, Ragged):
        return column[places]
    lengths = column.lengths
    if len(lengths) and lengths[0] and (lengths == lengths[0]).all():  # as of vectors; six times as fast
        return Ragged.of_rectangle(column.values.reshape(len(lengths), -1)[places])
    lengths = lengths[places]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    inside = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    return Ragged(column.values[np.repeat(column.offsets[places], lengths) + inside], offsets)


@dataclass(frozen=True)
class Before:
    """A dataset that takes new events: its ids, scales and lists stay."""

    spec: FeatureSpec
    encoders: Encoders
    dated: bool  # whether its times are seconds since 1970
    first_new: dict[str, int] = field(default_factory=dict)
    """Split -> number of its first row that it did not hold before; writing fills it."""
    notes: list[str] = field(default_factory=list)  # on new users and items; writing adds to them
    waiting: Table | None = None  # column row of raw rows that are kept, and are no rows yet


MOST_HALVINGS = 64  # or doublings, of an event after the end: 2^64 and 2^-64 are float32 numbers with room for a weight


@dataclass(frozen=True)
class Decay:
    """Halves a weight w once each `half_life` before `end`: w 2^((t - end) / half_life) at time t.

    `end` is the last time of train. A later event, of a held-out split, weighs more by the same rule.
    """

    half_life: float
    end: float

    def factors(self, times: NDArray[np.generic]) -> NDArray[np.float64]:
        """What to multiply the weights at some times by, within 2^-64 and 2^64."""
        halvings = (times.astype(np.float64) - self.end) / self.half_life
        return np.asarray(np.exp2(np.clip(halvings, -MOST_HALVINGS, MOST_HALVINGS)), np.float64)


def stored_weights(
    weights: NDArray[np.float64], times: NDArray[np.generic] | None, decay: Decay | None
) -> NDArray[np.float32]:
    """The weights as they are stored: above 0, whatever their size."""
    decayed = weights if decay is None or times is None else weights * decay.factors(times)
    return np.maximum(decayed, np.finfo(np.float32).tiny).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of a dataset with their split, and everything known about users and items."""

    dataset: str
    rows: Table
    users: Catalogue | None = None
    items: Catalogue | None = None
    weighted: bool = False  # whether events have weights, above 0
    decay: Decay | None = None  # of the weights with age
    seen: Table | None = None
    """Every event of the users, also those that `rows` lack: columns user_id, item_id, split; None: those of `rows`,
    or, of labelled ones, those with label 1."""
    dislikes: Table | None = None  # of interactions: events whose items the user disliked, in the same columns
    missing_values: Sequence[str] = ()  # raw texts for a missing value; `rows` contain none, rows to predict may
    missing_by_column: Mapping[str, Sequence[str]] = field(default_factory=dict)  # the same, of raw columns by name
    notes: Notes = field(default_factory=Notes)  # of the dataset; writing adds to them
    before: Before | None = None  # the dataset that takes these rows, which then hold `SPLIT_BEFORE`
