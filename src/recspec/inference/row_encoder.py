"""Raw rows to a model's batches, with notes on what the rows lacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recspec.base.errors import DataError, nearest
from recspec.data import encoding
from recspec.data.encoding import Encoders, Lists, MissingValues, Predictions, RequestEncoder
from recspec.evaluation import id_feature
from recspec.feature_spec import signature_of
from recspec.inference.catalogue import (
    ROLES,
    Catalogue,
    Catalogues,
    as_tensor,
    encode_columns,
    has_column,
    own_id,
    prepared_columns,
)
from recspec.models.layers import Batch


class RowEncoder:
    """Encodes raw rows for one model: from the rows' columns, or from the catalogues where the rows leave them out."""

    def __init__(self, catalogues: Catalogues, features: Sequence[str]) -> None:
        self._spec, self._encoders, self._device = catalogues.spec, catalogues.encoders, catalogues.device
        self._catalogues, self._features = catalogues, tuple(features)
        self.histories = HistoryColumns(catalogues)

    def named(self, rows: pa.Table) -> pa.Table:
        """The rows, their columns' names without blanks around them."""
        return rows if self._encoders is None else rows.rename_columns(self._encoders.named(rows.column_names))

    def encode(self, rows: pa.Table, features: Sequence[str] | None = None) -> tuple[Batch, dict[str, MissingValues]]:
        """Features of raw rows, by default all of the model's, and what was missing or unknown in them."""
        wanted = self._features if features is None else features
        anonymous = self.anonymous_id(rows.column_names)
        if anonymous is not None:
            rows = rows.append_column(anonymous, pa.nulls(rows.num_rows, pa.string()))
        looked_up = self._from_catalogues(wanted, rows.column_names)
        past = [name for name in wanted if name in self._spec.role("history")]
        given = [name for name in wanted if name not in looked_up and name not in past]
        columns = encode_columns(rows, given, self._spec, self._encoders)
        batch = {name: as_tensor(columns[name], self._spec, name).to(self._device) for name in given}
        for name, (id_name, catalogue) in looked_up.items():
            batch[name] = catalogue.features[name].index_select(0, batch[id_name].long())
        histories, lacking = self.histories.encode(rows, past) if past else ({}, {})
        batch |= {name: as_tensor(column, self._spec, name).to(self._device) for name, column in histories.items()}
        if self._encoders is not None:
            return batch, encoding.count_missing(rows, self._encoders, columns) | lacking
        unknown = {name: int((batch[name] == 0).sum()) for name in given if self._may_be_unknown(name)}
        return batch, {name: MissingValues(0, count, encoding.UNKNOWN_ID) for name, count in unknown.items() if count}

    def _may_be_unknown(self, name: str) -> bool:
        feature = self._spec.features[name]
        return feature.is_categorical and not feature.is_list and self._spec.reserves_unknown(name)

    def report(
        self,
        rows: pa.Table,
        missing: dict[str, MissingValues],
        unused: tuple[str, ...] = (),
        absent: tuple[str, ...] = (),
    ) -> Predictions:
        """Everything to note on encoded rows, with misread lists and numbers out of range."""
        if self._encoders is None:
            return Predictions(rows.num_rows, missing, {}, unused, absent)
        lists = encoding.misread_lists(rows, self._encoders, self._features)
        numbers = encoding.out_of_range(rows, self._encoders, self._features)
        return Predictions(rows.num_rows, missing, lists, unused, absent, numbers)

    def unused_columns(self, columns: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Raw columns that the model does not read, and features whose columns may be misspelled.

        The label and the group are not counted. Features are listed only if the dataset lacks one of the columns. Then
        they are all features without a column, except an unknown user's id.
        """
        unused = self._unused(columns)
        if {name.strip() for name in unused} <= {*encoding.raw_names(self._encoders, self._spec.features)}:
            return unused, ()
        readable = self._readable
        given = (self.anonymous_id(columns), *(name for name in readable if has_column(self._encoders, name, columns)))
        return unused, tuple(name for name in readable if name not in given)

    def _unused(self, columns: Sequence[str]) -> tuple[str, ...]:
        ids = [own for role in ROLES if (own := id_feature(self._spec, role)) is not None]
        read = {*encoding.raw_names(self._encoders, [*self._readable, *ids]), self._spec.label, self._spec.group}
        return tuple(name for name in columns if name.strip() not in read)

    @property
    def _readable(self) -> list[str]:
        """Features that rows may hold; of a history its items and numbers, because the catalogue knows the others."""
        if self._encoders is None:
            return [*self._features]
        past, items = self._spec.role("history"), self.histories.of_items
        return [
            name
            for name in self._features
            if name not in past or name == items or not self._spec.features[name].is_categorical
        ]

    def anonymous_id(self, columns: Sequence[str]) -> str | None:
        """The user's id if no column holds it and unknown users have an id; such rows belong to an unknown user.

        None if an unused column has nearly that name, because it was probably meant to hold the id.
        """
        user = id_feature(self._spec, "user") if self._spec.role("user") else None
        if user is None or self._encoders is None or has_column(self._encoders, user, columns):
            return None
        has_unknown = isinstance(self._encoders.encoders.get(user), encoding.VocabularyEncoder | encoding.HashEncoder)
        return user if has_unknown and not nearest(user, self._unused(columns)) else None

    def can_encode(self, feature: str, columns: Sequence[str], features: Sequence[str]) -> bool:
        """Whether a feature comes from raw columns, or from the catalogue of a user or item among `features`."""
        return (
            has_column(self._encoders, feature, columns)
            or feature == self.anonymous_id(columns)
            or feature in self._from_catalogues(features, columns)
        )

    def _from_catalogues(self, wanted: Sequence[str], columns: Sequence[str]) -> dict[str, tuple[str, Catalogue]]:
        """Features that the rows leave out and a catalogue knows: name -> (id feature, catalogue)."""
        found: dict[str, tuple[str, Catalogue]] = {}
        for role in ROLES:
            own = self._spec.role(role)
            if not own or (id_name := own_id(self._spec, role)) not in wanted:
                continue
            others = [name for name in own if name in wanted and name != id_name]
            missing = [name for name in others if not has_column(self._encoders, name, columns)]
            if missing:
                catalogue = self._catalogues.of(role)
                found |= {name: (id_name, catalogue) for name in missing if name in catalogue.features}
        return found

    @cached_property
    def request_encoders(self) -> tuple[RequestEncoder, RequestEncoder]:
        """The encoders of clean values, in microseconds: of the request's features, and of the candidates'."""
        items, encoders = {*self._spec.role("item")}, self._encoders or Encoders({}, {})
        inputs = signature_of(self._spec, self._features, "rows").inputs
        request = [port for port in inputs if port.name not in items]
        return RequestEncoder(encoders, request), RequestEncoder(encoders, [p for p in inputs if p.name in items])


class HistoryColumns:
    """Histories of rows: from the rows themselves and the item catalogue, or from the user catalogue."""

    def __init__(self, catalogues: Catalogues) -> None:
        self._spec, self._encoders, self._catalogues = catalogues.spec, catalogues.encoders, catalogues

    def encode(self, rows: pa.Table, names: Sequence[str]) -> tuple[Mapping[str, Lists], dict[str, MissingValues]]:
        """The lists of each row's history, aligned, and what they lack.

        They come from the column of the history's items and the item catalogue; without this column, from the user
        catalogue.
        """
        items, numbers = self.of_items, [name for name in names if not self._spec.features[name].is_categorical]
        if items is None:
            return self._given(rows, names), {}
        if not has_column(self._encoders, items, rows.column_names) and self._knows_histories(rows, names):
            return self._of_users(rows, names)
        if self._encoders is None:
            return self._given(rows, names), {}
        found = encoding.encode_history(self._encoders, rows, items, numbers[0] if numbers else None)
        ids, offsets = found.ids
        lists: dict[str, Lists] = {items: found.ids}
        for name in names:
            if name in numbers:
                lists[name] = found.numbers or (np.zeros(len(ids), np.float32), offsets)
            elif name != items:
                lists[name] = self._feature_of_items(name)[ids], offsets
        missing = {
            items: MissingValues(found.empty, 0, encoding.NO_EVENT),
            **{name: MissingValues(rows.num_rows, 0, "0") for name in numbers if found.numbers is None},
            f"events of {items}": MissingValues(0, found.with_unknown, encoding.LEFT_OUT),
        }
        return lists, {name: values for name, values in missing.items() if values.missing or values.unknown}

    @property
    def of_items(self) -> str | None:
        """The history that holds the items' own ids."""
        if not self._spec.role("item"):
            return None
        space = self._spec.vocabulary(self._spec.item_id)
        found = (name for name in self._spec.role("history") if self._spec.features[name].is_categorical)
        return next((name for name in found if self._spec.vocabulary(name) == space), None)

    def of_basket(self, items: NDArray[np.int64], names: Sequence[str]) -> Mapping[str, Lists]:
        """One row of histories: these items, oldest first, and what the item catalogue knows of them; numbers are 0."""
        kept = {name: items[-(self._spec.features[name].length or len(items)) :] for name in names}
        offsets = {name: np.array([0, len(each)], np.int64) for name, each in kept.items()}
        return {name: (self._of_events(name, kept[name]), offsets[name]) for name in names}

    def _of_events(self, name: str, items: NDArray[np.int64]) -> NDArray[np.generic]:
        if name == self.of_items:
            return items
        if not self._spec.features[name].is_categorical:
            return np.zeros(len(items), np.float32)
        return self._feature_of_items(name)[items]

    def _knows_histories(self, rows: pa.Table, names: Sequence[str]) -> bool:
        """Whether the rows name users, and the user catalogue holds their histories."""
        user = id_feature(self._spec, "user")
        known = user is not None and has_column(self._encoders, user, rows.column_names)
        return known and set(names) <= set(self._catalogues.users.lists)

    def _of_users(self, rows: pa.Table, names: Sequence[str]) -> tuple[Mapping[str, Lists], dict[str, MissingValues]]:
        id_name = self._spec.user_id
        user = encode_columns(rows, [id_name], self._spec, self._encoders)[id_name]
        assert not isinstance(user, tuple), "a user's id is a scalar"
        found = {name: self._catalogues.users.lists_of(name, user.astype(np.int64)) for name in names}
        empty = int((next(iter(found.values())).lengths == 0).sum())
        missing = {names[0]: MissingValues(empty, 0, encoding.NO_KNOWN_EVENT)} if empty else {}
        return {name: (lists.values, lists.offsets) for name, lists in found.items()}, missing

    def _given(self, rows: pa.Table, names: Sequence[str]) -> dict[str, Lists]:
        """Histories of rows that hold ids and numbers already."""
        lists: dict[str, Lists] = {}
        for name, column in prepared_columns(rows, names, self._spec).items():
            assert isinstance(column, tuple), f"{name} is a list"
            lists[name] = column
        lengths = {name: np.diff(offsets) for name, (_, offsets) in lists.items()}
        for name in names[1:]:
            wrong = lengths[name] != lengths[names[0]]
            if wrong.any():
                row = int(wrong.argmax())
                held = " and ".join(f"{lengths[each][row]} in '{each}'" for each in (names[0], name))
                raise DataError(f"raw rows: row {row + 1} holds {held}; expected as many of each event")
        features = self._spec.features
        return {name: encoding.cut(*lists[name], features[name].length or 1, "last") for name in lists}

    def _feature_of_items(self, history: str) -> NDArray[np.generic]:
        """The values of a history's feature by the item's id (I,)."""
        space, items = self._spec.vocabulary(history), self._catalogues.items
        own = next((name for name in self._spec.role("item") if self._spec.vocabulary(name) == space), None)
        if own is None or own not in items.features:
            raise DataError(f"raw rows: the item catalogue does not know what '{history}' holds of an item")
        known: NDArray[np.generic] = items.features[own].cpu().numpy()
        return known
