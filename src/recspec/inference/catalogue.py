"""Catalogues: the users and items that a model knows by id, and the raw columns of their rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from recspec.base.errors import BundleError, DataError, listed, nearest
from recspec.data.encoding import Encoders, Lists, Vocabulary, are_blank, split_lists
from recspec.data.storage import UNTIL, Ragged, offsets_of, ragged_range
from recspec.feature_spec import FeatureSpec
from recspec.inference.item_changes import BoundChanges
from recspec.models.layers import Batch, num_rows, take

Columns = Mapping[str, NDArray[np.generic] | Lists]
"""Feature -> its values, or the values and offsets of its lists."""


def is_list(column: pa.Array | pa.ChunkedArray) -> bool:
    """Whether a column holds lists."""
    kind = column.type
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def has_column(encoders: Encoders | None, feature: str, columns: Sequence[str]) -> bool:
    """Whether the columns that a feature is made from are all there."""
    if encoders is not None and feature in encoders.encoders:
        return encoders.can_encode(feature, columns)
    return feature in columns


def encode_columns(rows: pa.Table, names: Sequence[str], spec: FeatureSpec, encoders: Encoders | None) -> Columns:
    """Prepared columns of rows; without encoders, the rows hold ids and numbers already."""
    return prepared_columns(rows, names, spec) if encoders is None else encoders.encode(rows, names)


def prepared_columns(rows: pa.Table, names: Sequence[str], spec: FeatureSpec) -> Columns:
    """Columns of a dataset that recspec did not prepare: its rows hold ids and numbers. The error has all problems."""
    columns: dict[str, NDArray[np.generic] | Lists] = {}
    problems = []
    for name in names:
        if name not in rows.column_names:
            problems.append(f"no column '{name}'{nearest(name, rows.column_names)}")
            continue
        column = rows.column(name).combine_chunks()
        try:
            made = _prepared_lists if spec.features[name].is_list else _prepared_column
            columns[name] = made(column, spec, name)
        except (DataError, pa.ArrowException) as error:
            problems.append(f"column '{name}': {error}")
    DataError.refuse("raw rows", problems)
    return columns


def _prepared_column(column: pa.Array, spec: FeatureSpec, name: str) -> NDArray[np.generic]:
    if is_list(column):
        raise DataError("holds lists; expected one value a row")
    if column.null_count:
        row = column.is_null().index(True).as_py() + 1
        raise DataError(f"row {row} has no value; expected one in every row")
    if not spec.features[name].is_categorical:
        numbers: NDArray[np.generic] = column.cast(pa.float32()).to_numpy(zero_copy_only=False)
        return numbers
    return _in_range(column, np.arange(len(column) + 1), spec, name)


def _prepared_lists(column: pa.Array, spec: FeatureSpec, name: str) -> Lists:
    """Values and offsets of lists, without the padding that stands in them."""
    feature = spec.features[name]
    if not is_list(column):
        raise DataError(f"holds {column.type}; expected a list in every row, as JSONL and Parquet have them")
    flat, offsets = split_lists(column, None)
    if not feature.is_categorical:
        lengths = np.diff(offsets)
        wrong = np.flatnonzero(lengths != feature.length)
        if len(wrong) and name not in spec.role("history"):
            raise DataError(f"row {wrong[0] + 1} holds {lengths[wrong[0]]} numbers; expected {feature.length}")
        return flat.cast(pa.float32()).to_numpy(zero_copy_only=False), offsets
    padding = -1 if feature.padding is None else feature.padding
    lists = Ragged(flat.cast(pa.int64()).to_numpy(zero_copy_only=False), offsets)
    lists = lists.where(lists.values != padding)
    return _in_range(pa.array(lists.values), lists.offsets, spec, name), lists.offsets


def _in_range(values: pa.Array, offsets: NDArray[np.int64], spec: FeatureSpec, name: str) -> NDArray[np.int64]:
    """Ids as batches have them, of rows [offsets[i], offsets[i + 1])."""
    shift = spec.shift(name)
    ids: NDArray[np.int64] = values.cast(pa.int64()).to_numpy(zero_copy_only=False) + shift
    limit = spec.num_ids(name)
    wrong = np.flatnonzero((ids < shift) | (ids >= limit))
    if len(wrong):
        row = int(np.searchsorted(offsets, wrong[0], side="right"))
        verb = "holds" if spec.features[name].is_list else "is"
        raise DataError(f"row {row} {verb} {ids[wrong[0]] - shift}; expected an id in [0, {limit - shift})")
    return ids


def as_tensor(column: object, spec: FeatureSpec, name: str) -> Tensor:
    """A prepared column as the tensor a batch holds: (B,), or (B, length) with padding 0."""
    if isinstance(column, tuple):
        values, offsets = column
        length = spec.features[name].length
        assert length is not None, f"{name} is no list, but its column holds lists"
        return torch.from_numpy(Ragged(np.asarray(values), np.asarray(offsets)).pad(length))
    return torch.from_numpy(np.array(column))  # a copy: arrow's memory may not be written to


TITLE_COLUMNS = ("title", "name", "product_title")

Role = Literal["user", "item"]
ROLES: tuple[Role, ...] = ("user", "item")


@dataclass(frozen=True)
class Catalogue:
    """Features of every user or item, by id: row i of each tensor is id i; ids below `first_id` are nobody's."""

    features: Batch
    first_id: int
    titles: pa.Array | None
    lists: Mapping[str, Ragged] = field(default_factory=dict)
    """Histories of users, by id, in host memory because most are never used."""
    until: NDArray[np.float64] | None = None
    """The time of each user's last row, by id, from which the gaps of their histories count; None if it is not kept."""

    def __len__(self) -> int:
        return num_rows(self.features) - self.first_id

    def lists_of(self, name: str, ids: NDArray[np.int64]) -> Ragged:
        """The histories of some users; a negative id has none."""
        lists, known = self.lists[name], np.maximum(ids, 0)
        starts = lists.offsets[known]
        lengths = np.where(ids < 0, 0, lists.offsets[known + 1] - starts)
        return Ragged(lists.values[ragged_range(starts, lengths)], offsets_of(lengths))

    @property
    def candidates(self) -> Batch:
        """Every real user or item as a batch."""
        return take(self.features, slice(self.first_id, None))

    def titles_of(self, ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.Array:
        """Titles (N,) of ids (N,); null where there is none."""
        if self.titles is None:
            return pa.nulls(len(ids), pa.string())
        return self.titles.take(pa.array(ids - self.first_id))


def _read_catalogue(
    spec: FeatureSpec, role: Role, device: torch.device, changes: BoundChanges | None = None
) -> Catalogue:
    """The catalogue in the model's bundle, with new titles and items; without one, the ids alone."""
    id_name = own_id(spec, role)
    first_id = int(spec.reserves_unknown(id_name))
    features: Batch = {id_name: torch.arange(spec.num_ids(id_name), device=device)}
    new = changes.features if changes is not None else {}
    if new:
        features[id_name] = torch.cat([features[id_name], new[id_name].to(device)])
    file = spec.catalogue(role)
    if file is None:
        return Catalogue(features, first_id, None)
    try:
        table = pq.read_table(file, partitioning=None)
        table.validate(full=True)  # refuses texts that are not UTF-8
        _check_catalogue(table, spec, id_name)
        flat = [each.name for each in table.schema if not pa.types.is_nested(each.type)]
        title = next((name for name in TITLE_COLUMNS if name in flat), None)
        titles = table.column(title).combine_chunks() if title else None
        if titles is not None and changes is not None:
            titles = changes.applied(str(title), titles)
        titles = None if titles is None else titles.cast(pa.string())
    except (pa.ArrowException, OSError, ValueError, DataError) as error:
        raise BundleError(f"{file}: damaged, or of another specification: {error}") from None
    past = {name for name in table.column_names if name in spec.role("history")}
    lists = {name: _history(_column(table.column(name)), first_id) for name in past}
    for name in table.column_names:
        if name in spec.role(role) and name != id_name:  # a readable column may have the name of another feature
            tensor = as_tensor(_column(table.column(name)), spec, name)
            nobody = tensor.new_zeros((first_id, *tensor.shape[1:]))
            more = tensor.new_zeros((len(new[id_name]) if new else 0, *tensor.shape[1:]))
            features[name] = torch.cat([nobody, tensor, new.get(name, more).to(tensor)]).to(device)
    until = None
    if lists and UNTIL in flat and pa.types.is_primitive(table.schema.field(UNTIL).type):
        until = np.concatenate([np.zeros(first_id), table.column(UNTIL).to_numpy().astype(np.float64)])
    return Catalogue(features, first_id, titles, lists, until)


def _check_catalogue(table: pa.Table, spec: FeatureSpec, id_name: str) -> None:
    """Refuse columns out of range, and any other number of rows than ids."""
    problems = []
    for name in table.column_names:
        feature = spec.features.get(name)
        if feature is None or name == id_name:
            continue
        column = table.column(name).combine_chunks()
        of_lists = is_list(column)
        values = column.flatten() if of_lists else column
        fits = pa.types.is_integer(values.type) or (pa.types.is_floating(values.type) and not feature.is_categorical)
        if of_lists != feature.is_list or not fits:
            what = f"{'lists of ' * feature.is_list}{'ids' if feature.is_categorical else 'numbers'}"
            problems.append(f"column '{name}' holds {column.type}; expected {what}")
        elif column.null_count or values.null_count:
            problems.append(f"column '{name}' has missing values; expected one in every row")
        elif feature.is_vector and not pc.all(pc.equal(pc.list_value_length(column), feature.length)).as_py():
            problems.append(
                f"column '{name}' holds lists of other lengths; expected {feature.length} numbers in every row"
            )
        elif len(values):
            low, high = (each.as_py() for each in pc.min_max(values).values())
            if feature.is_categorical and not 0 <= low <= high < spec.num_ids(name):
                problems.append(f"column '{name}' holds ids {low} to {high}; expected 0 to {spec.num_ids(name) - 1}")
            elif not feature.is_categorical and not pc.all(pc.is_finite(values)).as_py():
                problems.append(f"column '{name}' holds numbers that are not finite")
    own = spec.features[id_name].cardinality
    expected = spec.num_ids(id_name) - int(spec.reserves_unknown(id_name))
    if isinstance(own, int) and len(table) != expected:
        problems.append(f"has {len(table)} rows; expected {expected}, one for each id of '{id_name}'")
    DataError.refuse("its columns", problems)


def _history(column: object, first_id: int) -> Ragged:
    """A user catalogue's column of lists, by id: those below the first have none."""
    assert isinstance(column, tuple), "a history is a list"
    values, offsets = column
    return Ragged(np.array(values), np.concatenate([np.zeros(first_id, np.int64), offsets]))


def _column(column: pa.ChunkedArray) -> object:
    """A Parquet column as an array, or for lists as values and offsets."""
    array = column.combine_chunks()
    if is_list(array):
        array = array.cast(pa.large_list(array.type.value_type))
        return array.flatten().to_numpy(zero_copy_only=False), np.asarray(array.offsets, np.int64)
    return array.to_numpy(zero_copy_only=False)


@dataclass(frozen=True)
class Catalogues:
    """The users and items of a model, read when they are first needed, and their ids."""

    spec: FeatureSpec
    encoders: Encoders | None
    device: torch.device
    changes: BoundChanges | None = None

    @cached_property
    def users(self) -> Catalogue:
        """Every user, in order of id."""
        return _read_catalogue(self.spec, "user", self.device)

    @cached_property
    def items(self) -> Catalogue:
        """Every item, in order of id."""
        return _read_catalogue(self.spec, "item", self.device, self.changes)

    @cached_property
    def retired(self) -> NDArray[np.bool_] | None:
        """(N,) the items that were retired by an update; None if there is none."""
        vocabulary = self._vocabulary("item")
        return None if vocabulary is None or not (blank := are_blank(vocabulary)).any() else blank

    def check_items(self, features: Sequence[str]) -> None:
        """Raise `BundleError` if the catalogue lacks a feature of items among those that a model reads."""
        lacking = [name for name in self.spec.role("item") if name in features and name not in self.items.features]
        if lacking:
            file = self.spec.catalogue("item")
            where = f"{self.spec.folder}: no catalogue of items" if file is None else f"{file}"
            raise BundleError(
                f"{where}: lacks {listed(lacking)}, which the model reads of every item; score rows with "
                "`recspec predict`, or train on a dataset whose catalogue holds them"
            )

    def of(self, role: Role) -> Catalogue:
        """Every user or item."""
        return self.users if role == "user" else self.items

    def user_ids(self, users: Sequence[str | int]) -> NDArray[np.int64]:
        """Prepared ids; 0 (or -1 where 0 is a real user) for unknown ones."""
        return self._ids("user", users)

    def item_ids(self, items: Sequence[str | int]) -> NDArray[np.int64]:
        """Prepared ids; 0 (or -1 where 0 is a real item) for unknown ones."""
        ids = self._ids("item", items)
        unknown = ids < self.spec.reserves_unknown(self.spec.item_id)
        for place in np.flatnonzero(unknown).tolist() if self._new else ():
            ids[place] = self._new.get(str(items[place]), ids[place])
        return ids

    def nearest(self, role: Role, raw: str | int) -> str:
        """A hint at the known id that differs from an unknown one only in blanks, case, zeros or a `.0`; else empty."""
        text = str(raw)[:MOST_OF_AN_ID]
        bare = text.strip()
        forms = [bare, f"{text} ", f" {text}", bare.removesuffix(".0"), bare.lstrip("0")]
        forms += [bare.lower(), bare.upper(), bare.capitalize()]
        others = [form for form in dict.fromkeys(forms) if form and form != str(raw)]
        known = self._ids(role, others) >= self.of(role).first_id
        return f" (did you mean '{others[int(known.argmax())]}'?)" if known.any() else ""

    def _ids(self, role: Role, raw: Sequence[str | int]) -> NDArray[np.int64]:
        if not len(raw):
            return np.zeros(0, np.int64)
        if (vocabulary := self._vocabulary(role)) is not None:
            return vocabulary.encode(list(raw))
        name = own_id(self.spec, role)
        shift, count = self.spec.shift(name), self.spec.num_ids(name)
        numbers = [int(each) + shift if re.fullmatch(r"-?[0-9]{1,18}", str(each)) else -1 for each in raw]
        return np.array([number if shift <= number < count else -1 for number in numbers], np.int64)

    def raw_ids(self, role: Role, ids: NDArray[np.int64]) -> pa.Array:
        """Raw values of prepared ids (N,) of users or items."""
        num_ids = self.spec.num_ids(own_id(self.spec, role))
        if role == "item" and self._new and (new := ids >= num_ids).any():
            names = pa.array([*self._new])
            known = self.raw_ids(role, np.where(new, 0, ids))
            of_new = names.take(pa.array(np.where(new, ids - num_ids, 0))).cast(known.type)
            return pc.if_else(pa.array(new), of_new, known)
        if (vocabulary := self._vocabulary(role)) is not None:
            return vocabulary.decode(ids)
        return pa.array(ids - self.spec.shift(own_id(self.spec, role)))

    @property
    def _new(self) -> Mapping[str, int]:
        """The ids of items that are new to the model, by raw id as text."""
        return {} if self.changes is None else self.changes.new_ids

    def _vocabulary(self, role: Role) -> Vocabulary | None:
        return self.encoders.vocabulary_of(own_id(self.spec, role)) if self.encoders is not None else None


MOST_OF_AN_ID = 200
"""Characters of an unknown id that are compared with known ones."""


def own_id(spec: FeatureSpec, role: Role) -> str:
    """The feature that holds the id of users or items."""
    return spec.user_id if role == "user" else spec.item_id
