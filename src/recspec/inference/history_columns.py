"""Histories of rows: the lists of each row's earlier events, as long as one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recspec.encoding import LEFT_OUT, NO_EVENT, Encoders, Lists, MissingValues, cut, encode_history
from recspec.errors import DataError
from recspec.evaluation import id_feature
from recspec.inference.catalogue import Catalogues
from recspec.inference.columns import encode_columns, has_column, prepared_columns
from recspec.spec import FeatureSpec


class HistoryColumns:
    """Takes histories from the rows, with what the item catalogue knows of each item, or from the user catalogue."""

    def __init__(self, spec: FeatureSpec, encoders: Encoders | None, catalogues: Catalogues) -> None:
        self._spec, self._encoders, self._catalogues = spec, encoders, catalogues

    def encode(self, rows: pa.Table, names: Sequence[str]) -> tuple[Mapping[str, Lists], dict[str, MissingValues]]:
        """The lists of each row's history, aligned, and what they lack.

        They come from the column of the history's items and the item catalogue; without this column, from the user
        catalogue.

        Raises:
            DataError: naming columns that are missing, and the row whose lists are not equally long.
        """
        items, numbers = self.of_items, [name for name in names if not self._spec.features[name].is_categorical]
        if items is None:
            return self._given(rows, names), {}
        if not has_column(self._encoders, items, rows.column_names) and self._knows_histories(rows, names):
            return self._of_users(rows, names)
        if self._encoders is None:
            return self._given(rows, names), {}
        found = encode_history(self._encoders, rows, items, numbers[0] if numbers else None)
        ids, offsets = found.ids
        lists: dict[str, Lists] = {items: found.ids}
        for name in names:
            if name in numbers:
                lists[name] = found.numbers or (np.zeros(len(ids), np.float32), offsets)
            elif name != items:
                lists[name] = self._feature_of_items(name)[ids], offsets
        missing = {
            items: MissingValues(found.empty, 0, NO_EVENT),
            **{name: MissingValues(rows.num_rows, 0, "0") for name in numbers if found.numbers is None},
            f"events of {items}": MissingValues(0, found.with_unknown, LEFT_OUT),
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
        missing = {names[0]: MissingValues(empty, 0, NO_EVENT)} if empty else {}
        return {name: (lists.values, lists.offsets) for name, lists in found.items()}, missing

    def _given(self, rows: pa.Table, names: Sequence[str]) -> dict[str, Lists]:
        """Histories of rows that hold ids and numbers already."""
        lists: dict[str, Lists] = {}
        for name, column in prepared_columns(rows, names, self._spec).items():
            assert isinstance(column, tuple), f"{name} is a list"
            lists[name] = column
        first = names[0]
        for name in names[1:]:
            wrong = np.flatnonzero(np.diff(lists[name][1]) != np.diff(lists[first][1]))
            if len(wrong):
                row = int(wrong[0])
                held = [f"{np.diff(lists[n][1])[row]} in '{n}'" for n in (first, name)]
                raise DataError(f"raw rows: row {row + 1} holds {' and '.join(held)}; expected as many of each event")
        return {name: cut(*column, self._spec.features[name].length or 1, "last") for name, column in lists.items()}

    def _feature_of_items(self, history: str) -> NDArray[np.generic]:
        """The values of a history's feature by the item's id (I,)."""
        space, items = self._spec.vocabulary(history), self._catalogues.items
        own = next((name for name in self._spec.role("item") if self._spec.vocabulary(name) == space), None)
        if own is None or own not in items.features:
            raise DataError(f"raw rows: the item catalogue does not know what '{history}' holds of an item")
        known: NDArray[np.generic] = items.features[own].cpu().numpy()
        return known
