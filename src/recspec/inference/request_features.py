"""Raw rows to a model's batches, with notes on what the rows lacked; the model's side of a request.

Rows come as JSON or tables. The features of a request are those of users, of a context, or of a basket.

Shapes: R users.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from recspec.base.errors import BundleError, DataError, RecspecError, RequestError, listed, nearest
from recspec.data import encoding
from recspec.data.encoding import (
    Encoders,
    Lists,
    MissingValues,
    Predictions,
    RequestEncoder,
    as_column,
    raw_names,
    renumbered,
    row_at,
)
from recspec.data.storage import Ragged
from recspec.feature_spec import FeatureSpec, signature_of
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
from recspec.inference.live_events import LiveEvents, StoredEvents
from recspec.models import ItemModel, Model, UserEvents
from recspec.models.layers import Batch

Row = Mapping[str, Any]
"""Raw column -> a text, number, boolean, null, or a list of these."""
ROWS_SHOWN = 3
"""Problems of one kind that a message names."""
MOST_BITS = 128
"""Most bits of a whole number; a larger one is no id."""
MAX_NOT_READ = 100
"""Most columns of a request that the model's data lacks; a note names them, and more are refused."""
AnsweredBy = Literal["user", "basket", "history", "context", "basket_vectors", "popularity"]
"""What an answer is made from.

`basket_vectors`: the items nearest to those of the basket; `history`: the events of a user whom the dataset lacks.
"""
FEATURES_SHOWN = 20
"""Columns that a message asks for."""
SECONDS_A_DAY = 86_400


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
        ids = [own for role in ROLES if (own := self._spec.id_of(role)) is not None]
        read = {*encoding.raw_names(self._encoders, [*self._readable, *ids]), *self._spec.labels, self._spec.group}
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
        user = self._spec.id_of("user") if self._spec.role("user") else None
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

    def with_live(self, users: NDArray[np.int64], live: LiveEvents, names: Sequence[str]) -> Batch:
        """Histories of R users, known ones or not, with their new events, padded to the longest.

        The times of stored events are those that their gaps tell; without gaps, new events come last. Gaps count from
        the last event, in days.
        """
        catalogue, events, gap = self._catalogues.users, live.events, None
        own = np.where(users < catalogue.first_id, -1, users)
        if catalogue.until is not None and events.times is not None:
            gap = next((name for name in catalogue.lists if self._is_gap(name)), None)
        stored = {name: catalogue.lists_of(name, own) for name in (*names, *([gap] if gap else []))}
        offsets = next(iter(stored.values())).offsets
        times, until = None, np.zeros(len(users))
        if gap is not None and catalogue.until is not None:
            until = np.where(own < 0, 0.0, catalogue.until[own])
            passed = SECONDS_A_DAY * np.expm1(stored[gap].values.astype(np.float64))
            times = np.repeat(until, np.diff(offsets)) - passed
        held = UserEvents(offsets, np.arange(offsets[-1], dtype=np.int32), times)
        new = np.arange(len(events.items), dtype=np.int32) + len(held.items)
        order = held.joined(UserEvents(events.offsets, new, events.times))
        found: Batch = {}
        for name in names:
            values = np.concatenate([stored[name].values, self._of_events(name, events.items.astype(np.int64))])
            values = values[order.items]
            if name == gap and order.times is not None:
                now = np.repeat(np.maximum(until, order.of_last(order.times)), order.lengths)
                values = np.log1p(np.maximum(now - order.times, 0) / SECONDS_A_DAY).astype(np.float32)
            lists = Ragged(*encoding.cut(values, order.offsets, self._spec.features[name].length or 1, "last"))
            padded = lists.pad(int(lists.lengths.max(initial=0)))
            found[name] = torch.from_numpy(padded).to(self._catalogues.device)
        return found

    def _is_gap(self, name: str) -> bool:
        """Whether a history holds the logarithm of the time since each event."""
        encoder = None if self._encoders is None else self._encoders.encoders.get(name)
        return isinstance(encoder, encoding.NumberEncoder) and encoder.log1p

    def _of_events(self, name: str, items: NDArray[np.int64]) -> NDArray[np.generic]:
        if name == self.of_items:
            return items
        if not self._spec.features[name].is_categorical:
            return np.zeros(len(items), np.float32)
        return self._feature_of_items(name)[items]

    def _knows_histories(self, rows: pa.Table, names: Sequence[str]) -> bool:
        """Whether the rows name users, and the user catalogue holds their histories."""
        user = self._spec.id_of("user")
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


def table_of(rows: Sequence[Row], where: str, known: Set[str] | None = None) -> pa.Table:
    """Raw rows as columns; a row that lacks a column has null there. Numbers and texts together become texts.

    Columns other than the `known` ones are empty, as nothing is made from them.

    Raises:
        RequestError: naming the values that are no text, number, boolean, null or list of these.
    """
    columns, problems = {}, list[str]()
    for name in dict.fromkeys(name for row in rows for name in row):
        if known is not None and name not in known and name.strip() not in known:
            columns[name] = pa.nulls(len(rows))
            continue
        values = [row.get(name) for row in rows]
        wrong = _wrong_values(values)
        if wrong:
            problems += [f"{row_name(row, where, name[:80])} {what}" for row, what in wrong]
        else:
            columns[name] = _column(values)
    RequestError.refuse("request", problems)
    return pa.table(columns)


def known_columns(spec: FeatureSpec, encoders: Encoders | None) -> Set[str]:
    """The raw columns that a model's data has, whether the model reads them or not."""
    return {*spec.features, *raw_names(encoders, encoders.encoders if encoders is not None else ())}


def check_columns(rows: Sequence[Row], where: str, known: Set[str]) -> None:
    """Refuse too many columns before anything is built: each costs a look at every row, and a row may bring many."""
    strange = dict[str, None]()
    for row in rows:
        strange.update((name, None) for name in row if name not in known)
        if len(strange) > MAX_NOT_READ:
            shown = f"such as {listed(name[:40] for name in list(strange)[:ROWS_SHOWN])}"
            message = f"more than {MAX_NOT_READ} columns are none of the model's, {shown}"
            raise RequestError(f"{where}: {message}; send those that GET /models names")


def _wrong_values(values: Sequence[Any]) -> list[tuple[int, str]]:
    """Rows, and what is wrong with their values."""
    kinds = {type(value) for value in values} - {type(None)}
    if kinds <= {str, float, bool}:
        return []
    if list in kinds and len(kinds) > 1:
        row = next(row for row, value in enumerate(values) if value is not None and not isinstance(value, list))
        return [(row, "is a single value, where another row has a list; expected one or the other")]
    wrong = [(row, what) for row, value in enumerate(values) if (what := _wrong(value, may_be_list=True))]
    return wrong[:ROWS_SHOWN]


def _wrong(value: Any, *, may_be_list: bool) -> str | None:
    if isinstance(value, list) and may_be_list:
        return next((f"holds what {what}" for each in value if (what := _wrong(each, may_be_list=False))), None)
    if isinstance(value, (dict, list)):
        return f"is {'an object' if isinstance(value, dict) else 'a list'}; expected a text, number, boolean or null"
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return f"is a whole number of {value.bit_length():,} bits; expected at most {MOST_BITS}"
    return None


def _column(values: Sequence[Any]) -> pa.Array:
    if any(isinstance(value, list) for value in values):
        lists = [value for value in values if value is not None]
        flat = as_column([each for value in lists for each in value])
        ends = np.cumsum([0, *(0 if value is None else len(value) for value in values)])
        return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), flat)
    return as_column(values)


def row_name(place: int, where: str, field: str = "") -> str:
    """A row of a request as messages name it; the request itself is one row, so it needs no number."""
    if where == "request":
        return f"request.{field}" if field else "its value"
    return row_at(place, where, field)


def problems_by_row(error: DataError, name: Callable[[int], str]) -> list[str]:
    """The problems with raw rows, each row by another name."""
    return [renumbered(problem.removeprefix("raw rows: "), name) for problem in error.problems]


@dataclass(frozen=True, eq=False)
class Context:
    """What a request gives beside the user: encoded columns, and a basket."""

    features: Batch  # one row
    basket: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    notes: tuple[str, ...] = ()

    def no_finite_score(self, of: str) -> RecspecError:
        """The error for scores that are not finite: numbers of the context cause them, or else the model does."""
        what = f"the {of} gives no finite score for some items"
        if any(each.is_floating_point() for each in self.features.values()):
            return RequestError(f"context: {what}; a value is too large")
        return BundleError(f"{what}; train it again")


class RequestFeatures:
    """Makes the batches that a model scores items for."""

    def __init__(self, model: Model, known: Catalogues, rows: RowEncoder, stored: StoredEvents) -> None:
        self._model, self._known, self._rows, self._stored = model, known, rows, stored
        self._spec = known.spec
        items = {*self._spec.role("item")}
        self._wanted = [name for name in model.features() if name not in items]
        self._past = [name for name in self._wanted if name in self._spec.role("history")]
        self._current = [name for name in self._wanted if name not in self._past]
        self._item_columns = {*raw_names(known.encoders, items)} - {*raw_names(known.encoders, self._wanted)}

    # --- the context --------------------------------------------------------------------------------------------------

    @cached_property
    def context_features(self) -> list[str]:
        """Features that no catalogue knows, which differ from request to request."""
        users = self._known.users
        return [name for name in self._current if name not in users.features and name not in users.lists]

    @property
    def columns(self) -> tuple[list[str], list[str]]:
        """Raw columns that every request must give, and those of the user that it may give too."""
        asked = self.context_features
        others = [name for name in self._current if name != self._spec.user_id and name not in asked]
        return self.columns_of(asked), self.columns_of(others)

    @cached_property
    def crosses_items(self) -> bool:
        """Whether the model crosses columns of items with those of requests, so that it can't score all items."""
        return bool(self._item_columns.intersection(self.columns_of(self.context_features)))

    def columns_of(self, features: list[str]) -> list[str]:
        """The raw columns that features are made from, each by the first of its names."""
        encoders = self._known.encoders
        found = dict[str, None]()
        for name in features:
            encoder = encoders.encoders.get(name) if encoders is not None else None
            columns = getattr(encoder, "columns", None)  # of a cross
            found.update(dict.fromkeys(columns if columns is not None else [name]))
        return list(found)

    def context(self, given: Mapping[str, Any], basket: NDArray[np.int64], problems: list[str]) -> Context:
        """The context and basket of a request; its problems are added to `problems`."""
        encoders = self._known.encoders
        own = {*raw_names(encoders, [self._spec.user_id])}
        known = {*raw_names(encoders, self._current)} - own
        problems += [
            f"context: '{name[:80]}' is the user's id; name the user instead"
            if name in own
            else f"context: the model reads no '{name[:80]}'{nearest(name, known)}; it reads {listed(sorted(known))}"
            for name in given
            if name not in known
        ]
        lacking = [name for name in self.context_features if not has_column(encoders, name, list(given))]
        missing = [name for name in self.columns_of(lacking) if name not in given]
        if both := [name for name in missing if name in self._item_columns]:
            problems.append(
                f"the model crosses columns of items ({listed(both)}) with others, so it can't recommend; rank or "
                "predict rows"
            )
        elif missing:
            more = f" and {len(missing) - FEATURES_SHOWN} more" if len(missing) > FEATURES_SHOWN else ""
            problems.append(
                f"context: the model reads {listed(missing[:FEATURES_SHOWN])}{more}, which differ from request to "
                "request; give a value of each"
            )
        if not all(name in self._known.users.lists for name in self._past) and not len(basket):
            what = f"the histories {listed(self._past)}, which no catalogue holds"
            problems.append(f"the model reads {what}; give a basket")
        columns = {name: value for name, value in given.items() if name in known}
        names = [name for name in self._current if has_column(encoders, name, list(columns))]
        return self._encoded(columns, names, basket, problems) if names else Context({}, basket)

    def _encoded(
        self, given: Mapping[str, Any], names: list[str], basket: NDArray[np.int64], problems: list[str]
    ) -> Context:
        try:
            table = table_of([given], "request")
            features, missing = self._rows.encode(table, names)
            notes = self._rows.report(table, missing).notes()
        except DataError as error:
            found = problems_by_row(error, lambda row: row_name(row, "request"))
            problems += [f"context: {problem}" for problem in found]
        except RequestError as error:
            problems += [f"context.{problem.removeprefix('request.')}" for problem in error.problems]
        except (pa.ArrowException, OverflowError) as error:
            problems.append(f"context: a value can't be read: {str(error)[:200]}")
        else:
            return Context(features, basket, tuple(note for note in notes if self._spec.user_id not in note))
        return Context({}, basket)

    @property
    def item_history(self) -> str | None:
        """The history that holds ids of items."""
        return self._rows.histories.of_items

    # --- who can be answered ------------------------------------------------------------------------------------------

    @property
    def reads_baskets(self) -> bool:
        """Whether the model ranks by any events: it is a model of users' events, or its item history is an input."""
        return isinstance(self._model, ItemModel) or self.item_history in self._wanted

    def reads_history(self, context: Context) -> bool:
        """Whether the model can rank by the new events of a user without an id; a basket stands in their place."""
        if len(context.basket):
            return False
        return isinstance(self._model, ItemModel) or (self.reads_baskets and self.knows_strangers)

    @property
    def knows_strangers(self) -> bool:
        """Whether the model scores users without an id: by an id of unknown ones, or because it reads no id."""
        reads = [name for name in self._wanted if name in self._known.users.features]
        return not reads or self._known.users.first_id > 0

    def answered_by(self, context: Context) -> tuple[AnsweredBy, AnsweredBy]:
        """What known users and others are answered by."""
        has_basket = len(context.basket) > 0
        by_model: AnsweredBy = "basket" if has_basket and self.reads_baskets else "user"
        if isinstance(self._model, ItemModel) and by_model == "basket":
            return by_model, by_model
        if self.knows_strangers and (by_model == "basket" or context.features):
            return by_model, "basket" if by_model == "basket" else "context"
        return by_model, "basket_vectors" if has_basket else "popularity"

    # --- batches ------------------------------------------------------------------------------------------------------

    def batch(self, users: NDArray[np.int64], context: Context, live: LiveEvents | None = None) -> tuple[Model, Batch]:
        """The model, and the features of R users; an item model knows the basket, or the users' new events."""
        basket = context.basket
        if isinstance(self._model, ItemModel) and len(basket):
            events = UserEvents(np.array([0, len(basket)], np.int64), basket.astype(np.int32))
            asked = torch.zeros(len(users), dtype=torch.int64, device=self._known.device)
            return self._model.knowing(events.interactions(self._model.num_items)), {self._spec.user_id: asked}
        if isinstance(self._model, ItemModel) and live is not None and live.has.any():
            return self._knowing(self._model, users, live)
        known, rows = self._known.users, torch.from_numpy(np.maximum(users, 0)).to(self._known.device)
        found: Batch = {}
        if self._past and len(basket):
            lists = self._rows.histories.of_basket(basket, self._past)
            padded = {name: as_tensor(column, self._spec, name) for name, column in lists.items()}
            found |= {name: each.to(self._known.device).expand(len(users), -1) for name, each in padded.items()}
        elif self._past and live is not None and live.has.any():
            found |= self._rows.histories.with_live(users, live, self._past)
        for name in self._wanted:
            if name in context.features:
                found[name] = context.features[name].expand(len(users), *context.features[name].shape[1:])
            elif name in found:
                continue
            elif name in known.features:
                found[name] = known.features[name].index_select(0, rows)
            else:
                ragged = known.lists_of(name, np.maximum(users, 0))
                found[name] = torch.from_numpy(ragged.pad(int(ragged.lengths.max(initial=0)))).to(self._known.device)
        return self._model, found

    def with_live(
        self, users: NDArray[np.int64], request: Batch, live: LiveEvents, given: Sequence[str]
    ) -> tuple[Model, Batch]:
        """The model, and encoded requests of R users as `batch` makes them; columns that are `given` stay."""
        if not live.has.any():
            return self._model, request
        if isinstance(self._model, ItemModel):
            return self._knowing(self._model, users, live)
        if not self._past or any(has_column(self._known.encoders, name, given) for name in self._past):
            return self._model, request
        return self._model, request | self._rows.histories.with_live(users, live, self._past)

    def _knowing(self, model: ItemModel, users: NDArray[np.int64], live: LiveEvents) -> tuple[Model, Batch]:
        """An item model that knows R users alone, by their place."""
        known = model.knowing(self._stored.with_live(users, live, ordered=model.reads_order))
        return known, {self._spec.user_id: torch.arange(len(users), device=self._known.device)}
