"""The model's side of a request: features of users, of a context or of a basket, from rows of JSON or tables.

Shapes: R users.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from recspec.base.errors import BundleError, DataError, RecspecError, RequestError, listed, nearest
from recspec.data.encoding import Encoders, as_column, raw_names, renumbered, row_at
from recspec.feature_spec import FeatureSpec
from recspec.inference.catalogue import Catalogues, as_tensor, has_column
from recspec.inference.row_encoder import RowEncoder
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
    if problems:
        raise RequestError.of("request", problems)
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


AnsweredBy = Literal["user", "basket", "context", "basket_vectors", "popularity"]
"""What an answer is made from; `basket_vectors`: the items nearest to those of the basket."""

FEATURES_SHOWN = 20
"""Columns that a message asks for."""


@dataclass(frozen=True, eq=False)
class Context:
    """What a request gives beside the user: encoded columns, and a basket."""

    features: Batch  # one row
    basket: NDArray[np.int64] | None = None
    notes: tuple[str, ...] = ()

    def no_finite_score(self, of: str) -> RecspecError:
        """The error for scores that are not finite: numbers of the context cause them, or else the model does."""
        what = f"the {of} gives no finite score for some items"
        if any(each.is_floating_point() for each in self.features.values()):
            return RequestError(f"context: {what}; a value is too large")
        return BundleError(f"{what}; train it again")


class Requesters:
    """Makes the batches that a model scores items for."""

    def __init__(self, model: Model, known: Catalogues, rows: RowEncoder) -> None:
        self._model, self._known, self._rows = model, known, rows
        self._spec = known.spec
        items = {*self._spec.role("item")}
        self._wanted = [name for name in model.features() if name not in items]
        self._item_columns = {*raw_names(known.encoders, items)} - {*raw_names(known.encoders, self._wanted)}

    # --- the context --------------------------------------------------------------------------------------------------

    @property
    def asked(self) -> list[str]:
        """Features that no catalogue knows, which differ from request to request."""
        users = self._known.users
        return [
            name
            for name in self._wanted
            if name not in users.features and name not in users.lists and name not in self._spec.role("history")
        ]

    @property
    def columns(self) -> tuple[list[str], list[str]]:
        """Raw columns that every request must give, and those of the user that it may give too."""
        past, own = self._spec.role("history"), self._spec.user_id
        asked = self.asked
        others = [name for name in self._wanted if name not in past and name != own and name not in asked]
        return self.columns_of(asked), self.columns_of(others)

    @property
    def crosses_items(self) -> bool:
        """Whether the model crosses columns of items with those of requests, so that it can't score all items."""
        return bool(self._item_columns.intersection(self.columns_of(self.asked)))

    def columns_of(self, features: list[str]) -> list[str]:
        """The raw columns that features are made from, each by the first of its names."""
        encoders = self._known.encoders
        found = dict[str, None]()
        for name in features:
            encoder = encoders.encoders.get(name) if encoders is not None else None
            columns = getattr(encoder, "columns", None)  # of a cross
            found.update(dict.fromkeys(columns if columns is not None else [name]))
        return list(found)

    def context(self, given: Mapping[str, Any], basket: NDArray[np.int64] | None, problems: list[str]) -> Context:
        """The context and basket of a request; its problems are added to `problems`."""
        encoders = self._known.encoders
        own = {*raw_names(encoders, [self._spec.user_id])}
        readable = [name for name in self._wanted if name not in self._spec.role("history")]
        known = {*raw_names(encoders, readable)} - own
        problems += [
            f"context: '{name[:80]}' is the user's id; name the user instead"
            if name in own
            else f"context: the model reads no '{name[:80]}'{nearest(name, known)}; it reads {listed(sorted(known))}"
            for name in given
            if name not in known
        ]
        lacking = [name for name in self.asked if not has_column(encoders, name, list(given))]
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
        past = [name for name in self._wanted if name in self._spec.role("history")]
        if not all(name in self._known.users.lists for name in past) and (basket is None or not len(basket)):
            problems.append(f"the model reads the histories {listed(past)}, which no catalogue holds; give a basket")
        readable_columns = {name: value for name, value in given.items() if name in known}
        names = [name for name in readable if has_column(encoders, name, list(readable_columns))]
        return self._encoded(readable_columns, names, basket, problems) if names else Context({}, basket)

    def _encoded(
        self, given: Mapping[str, Any], names: list[str], basket: NDArray[np.int64] | None, problems: list[str]
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

    @property
    def knows_strangers(self) -> bool:
        """Whether the model scores users without an id: by an id of unknown ones, or because it reads no id."""
        reads = [name for name in self._wanted if name in self._known.users.features]
        return not reads or self._known.users.first_id > 0

    def answered_by(self, context: Context) -> tuple[AnsweredBy, AnsweredBy]:
        """What known users and others are answered by."""
        has_basket = context.basket is not None and len(context.basket) > 0
        by_model: AnsweredBy = "basket" if has_basket and self.reads_baskets else "user"
        if isinstance(self._model, ItemModel) and by_model == "basket":
            return by_model, by_model
        if self.knows_strangers and (by_model == "basket" or context.features):
            return by_model, "basket" if by_model == "basket" else "context"
        return by_model, "basket_vectors" if has_basket else "popularity"

    # --- batches ------------------------------------------------------------------------------------------------------

    def batch(self, users: NDArray[np.int64], context: Context) -> tuple[Model, Batch]:
        """The model, and the features of R users; of a basket of an item model, one that knows the basket."""
        basket = context.basket if context.basket is not None and len(context.basket) else None
        if isinstance(self._model, ItemModel) and basket is not None:
            events = UserEvents(np.array([0, len(basket)], np.int64), basket.astype(np.int32))
            asked = torch.zeros(len(users), dtype=torch.int64, device=self._known.device)
            return self._model.knowing(events.interactions(self._model.num_items)), {self._spec.user_id: asked}
        known, rows = self._known.users, torch.from_numpy(np.maximum(users, 0)).to(self._known.device)
        found: Batch = {}
        past = [name for name in self._wanted if name in self._spec.role("history")]
        if past and basket is not None:
            lists = self._rows.histories.of_basket(basket, past)
            padded = {name: as_tensor(column, self._spec, name) for name, column in lists.items()}
            found |= {name: each.to(self._known.device).expand(len(users), -1) for name, each in padded.items()}
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
