"""Requests in raw values to a trained model: rank candidates, recommend to a user, score rows.

Functions over an open `Predictor`, for JSON: plain values in, plain values out. Unknown values are flagged.
`recommend` answers an unknown user with the most popular items; `rank` and `predict` score an unknown user, item or
other value with the id of unknown values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from recspec.base.errors import DataError, RequestError
from recspec.data.encoding import CrossEncoder, MissingValues, column_notes, row_at
from recspec.inference.catalogue import ROLES, Role, has_column
from recspec.inference.live_events import LiveEvents
from recspec.inference.predictor import SCORE, Predictor
from recspec.inference.raw_columns import ColumnFacts, facts_of_encoder
from recspec.inference.recommendation import MOST_EXPLAINED, Recommendation, RecommendRequest
from recspec.inference.request_features import Row, check_columns, known_columns, problems_by_row, row_name, table_of
from recspec.inference.row_explanations import RowExplanations
from recspec.models import ItemModel, Model
from recspec.models.layers import Batch


@dataclass(frozen=True)
class RankedItem:
    """A candidate with its place in the answer (from 1) and in the request (from 0)."""

    rank: int
    index: int
    item: Any
    title: str | None
    score: float
    """The logit."""
    probability: float | None = None
    """None for a model that only ranks."""


@dataclass(frozen=True)
class Ranking:
    """The candidates of one request, best first; equal ones in the order of the request."""

    items: tuple[RankedItem, ...]
    unknown_user: bool = False
    unknown_items: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        items = (
            {name: value for name, value in vars(item).items() if name != "probability" or value is not None}
            for item in self.items
        )
        return {**vars(self), "items": tuple(items)}


@dataclass(frozen=True)
class RowScores:
    """The value of each row, and for each feature the number of rows without a value or with an unknown one."""

    values: tuple[float, ...]
    kind: str
    """`Predictor.column`: probability or score."""
    missing_values: Mapping[str, MissingValues]
    notes: tuple[str, ...] = ()
    others: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Probabilities of the labels besides the first, by `probability_LABEL`."""
    explained: RowExplanations | None = None

    def to_dict(self) -> dict[str, Any]:
        gaps = {name: {"missing": each.missing, "unknown": each.unknown} for name, each in self.missing_values.items()}
        name = "scores" if self.kind == SCORE else "probabilities"
        explained = {} if self.explained is None else {"explanations": self.explained.to_dicts()}
        return {name: list(self.values), **self.others, **explained, "gaps": gaps, "notes": list(self.notes)}


def predict(predictor: Predictor, rows: Sequence[Row], *, explain: bool = False) -> RowScores:
    """The probability of each raw row, or its score by a model that only ranks; `explain` says why it is so large.

    Raises:
        RequestError: naming the rows and columns that can't be read; or for a model whose rows can't be explained, or
            too many rows to explain.
    """
    explainer = predictor.row_explainer if explain else None
    if explain and len(rows) > MOST_EXPLAINED:  # a row may take some milliseconds, while others wait
        raise RequestError(
            f"rows: {len(rows):,} rows; expected at most {MOST_EXPLAINED:,} with explanations", status=413
        )
    if not rows:
        return RowScores((), predictor.column, {})
    known = known_columns(predictor.spec, predictor.encoders)
    check_columns(rows, "rows", known)
    table = table_of(rows, "rows", known)
    with _naming("rows"):
        made, found = predictor.predict_labels(table)
        batch = {} if explainer is None else predictor.encode(predictor.row_encoder.named(table))[0]
    values = made.pop(predictor.column)
    _check_finite(values, "rows")
    others = {name: each.tolist() for name, each in made.items()}
    with torch.inference_mode():
        explained = None if explainer is None else explainer.explain(batch)
    told = found.missing_values, tuple(found.notes())
    return RowScores(tuple(values.tolist()), predictor.column, *told, others, explained)


def rank(
    predictor: Predictor,
    request: Row,
    candidates: Sequence[str | int] | Sequence[Row],
    *,
    top_k: int | None = None,
    live: LiveEvents | None = None,
) -> Ranking:
    """The best candidates (raw item ids, or rows of item columns) for one request, whose part is computed once.

    `live` holds new events of the request's user. A model that crosses the request's columns with those of candidates
    does not read them.

    Raises:
        RequestError: naming what can't be read; or if the model reads no item feature.
    """
    names, of_items = predictor.model.features(), set(predictor.spec.role("item"))
    item_features = [name for name in names if name in of_items]
    if not item_features:
        raise RequestError("this model reads no feature of an item, so candidates can't differ; POST /predict rows")
    item_id = id_name(predictor, "item")
    if item_id is None and not all(isinstance(each, Mapping) for each in candidates):
        raise RequestError("candidates: this model knows no item ids; give each candidate's columns as an object")
    rows = [each if isinstance(each, Mapping) else {item_id or "": each} for each in candidates]
    if rows and (clean := _encode_clean(predictor, request, rows)) is not None:
        return _ranked(predictor, rows, clean, _logits(predictor, *clean, live, request), [], top_k)
    known = known_columns(predictor.spec, predictor.encoders)
    check_columns([request], "request", known)
    check_columns(rows, "candidates", known)
    user = predictor.row_encoder.anonymous_id(list(request))
    table = table_of([request if user is None else {**request, user: None}], "request", known)
    one = _Side("request", table, [name for name in names if name not in of_items])
    many = _Side("candidates", table_of(rows, "candidates", known), item_features)
    if rows and _must_join(predictor, one, many):
        if user is not None:
            one = replace(one, table=table.drop_columns([user]))
        return _ranked(predictor, rows, *_joined(predictor, one, many), top_k)
    request_batch, notes = _encoded(predictor, one)
    if not rows:
        notes += _unused(predictor, table, absent=False)
        return Ranking((), _unknown(predictor, request_batch, "user").any().item(), (), tuple(notes))
    item_batch, more = _encoded(predictor, many)
    notes += [*more, *_unused(predictor, table, many.table)]
    both = request_batch, item_batch
    return _ranked(predictor, rows, both, _logits(predictor, *both, live, request), notes, top_k)


@dataclass(frozen=True)
class _Side:
    """A request or its candidates: raw columns, and the features of the model that are its own."""

    where: str
    table: pa.Table
    features: Sequence[str]

    @property
    def columns(self) -> list[str]:
        return [*self.table.column_names]


def _encode_clean(predictor: Predictor, request: Row, rows: Sequence[Row]) -> tuple[Batch, Batch] | None:
    """Request and candidates, encoded value by value; None if anything is missing, unknown or unusual."""
    of_request, of_items = predictor.row_encoder.request_encoders
    read, names = {*of_request.sources, *of_items.sources}, [*rows[0]]
    if {*of_request.features, *of_items.features} != {*predictor.model.features()} or not read.issuperset(request):
        return None
    if not read.issuperset(names) or any(len(row) != len(names) for row in rows):
        return None
    try:
        columns = {name: [row[name] for row in rows] for name in names}
    except KeyError:
        return None
    request_batch = of_request.matrices({name: (value,) for name, value in request.items()}, strict=True)
    item_batch = of_items.matrices(columns, strict=True)
    if request_batch is None or item_batch is None:
        return None
    return _batch(predictor, request_batch), _batch(predictor, item_batch)


def _batch(predictor: Predictor, inputs: Sequence[tuple[Sequence[str], NDArray[Any]]]) -> Batch:
    """Inputs as tensors (B,); ids as int64, whatever type the data has for them."""
    batch: Batch = {}
    for names, matrix in inputs:
        rows = torch.from_numpy(matrix).to(predictor.device)
        batch.update(zip(names, (rows if rows.is_floating_point() else rows.long()).unbind(), strict=True))
    return batch


def _logits(
    predictor: Predictor,
    request_batch: Batch,
    item_batch: Batch,
    live: LiveEvents | None = None,
    given: Row | None = None,
) -> torch.Tensor:
    model: Model = predictor.model
    if live is not None and (user := id_name(predictor, "user")) in request_batch:
        users, features = request_batch[str(user)].long().cpu().numpy(), predictor.recommender.request_features
        model, request_batch = features.with_live(users, request_batch, live, list(given or ()))
    with torch.inference_mode():
        return (model.score_items(request_batch, item_batch)[0] if request_batch else model(item_batch)).float()


def _must_join(predictor: Predictor, one: _Side, many: _Side) -> bool:
    """Whether a feature is made from columns of both sides, as a cross of a user's column and an item's is."""

    def gives(columns: Sequence[str], features: Sequence[str]) -> bool:
        return all(predictor.row_encoder.can_encode(name, columns, features) for name in features)

    apart = all(gives(side.columns, side.features) for side in (one, many))
    return not apart and gives([*one.columns, *many.columns], [*one.features, *many.features])


def _joined(predictor: Predictor, one: _Side, many: _Side) -> tuple[tuple[Batch, Batch], torch.Tensor, list[str]]:
    """Scores of candidates where a feature needs columns of both sides.

    Each value of the request is encoded once: copies of it for every candidate would be as large as their product.
    """
    one, many = (replace(side, table=predictor.row_encoder.named(side.table)) for side in (one, many))
    has = partial(has_column, predictor.encoders)
    both, features = [*one.columns, *many.columns], [*one.features, *many.features]
    apart = {name for name in features if has(name, one.columns) or has(name, many.columns)}
    crossed = {name for name in features if has(name, both)} - apart
    to_items = _given_by_other_side(predictor, "user", one, many)
    to_request = _given_by_other_side(predictor, "item", many, one)
    of_request = ({*one.features} - crossed - to_items) | to_request
    request_batch, notes = _encoded(predictor, replace(one, features=[each for each in features if each in of_request]))
    of_items = [name for name in features if name not in of_request | crossed]
    item_batch, more = _encoded(predictor, replace(many, features=of_items))
    item_batch |= {name: _cross(predictor, name, one.table, many.table) for name in crossed}
    rows = many.table.num_rows
    batch = {name: each.expand(rows, *each.shape[1:]) for name, each in request_batch.items()} | item_batch
    notes += [*more, *_unused(predictor, one.table, many.table)]
    return ({name: each[:1] for name, each in batch.items()}, batch), _logits(predictor, {}, batch), notes


def _given_by_other_side(predictor: Predictor, role: Role, here: _Side, there: _Side) -> set[str]:
    """Features of one side whose columns only the other side gives, and what the catalogue knows by such an id."""
    has, own_id = partial(has_column, predictor.encoders), id_name(predictor, role)
    moved = {name for name in here.features if not has(name, here.columns) and has(name, there.columns)}
    both = [*here.columns, *there.columns]
    return moved | {name for name in here.features if own_id in moved and not has(name, both)}


def _cross(predictor: Predictor, name: str, asked: pa.Table, items: pa.Table) -> torch.Tensor:
    """The ids (N,) of a cross of the request's columns with those of N candidates.

    A column that both sides give is the candidates'.
    """
    assert predictor.encoders is not None
    encoder = predictor.encoders.encoder(name)
    assert isinstance(encoder, CrossEncoder), name
    parts = []
    sources = predictor.encoders.sources(name, [*items.column_names, *asked.column_names])
    for column, source in zip(encoder.columns, sources, strict=True):
        table, where = (items, "candidates") if source in items.column_names else (asked, "request")
        with _naming(where):
            try:
                parts.append(encoder.printed(column, encoder.present(table.column(source))))
            except DataError as error:
                raise DataError.of("raw rows", [f"column '{source}': {each}" for each in error.problems]) from None
    return torch.from_numpy(encoder.of_prints(parts)).to(predictor.device)


def _ranked(
    predictor: Predictor,
    rows: Sequence[Row],
    encoded: tuple[Batch, Batch],
    logits: torch.Tensor,
    notes: Sequence[str],
    top_k: int | None,
) -> Ranking:
    """The answer, from the encoded request and candidates, and the logits (N,)."""
    (request_batch, item_batch), known = encoded, predictor.bundle.gives_probabilities
    probabilities = predictor.model.probabilities(logits).tolist() if known else [None] * len(logits)
    logits = logits.cpu()
    _check_finite(logits.numpy(), "candidates")
    order = torch.argsort(logits, descending=True, stable=True)[: len(rows) if top_k is None else top_k].tolist()
    given = raw_ids_of(predictor, "item", rows)
    ids = item_batch.get(id_name(predictor, "item") or "")
    titles = _titles(predictor, ids.cpu().numpy()[order]) if ids is not None else [None] * len(order)
    scores = logits.tolist()
    items = tuple(
        RankedItem(place, index, given[index], title, scores[index], probabilities[index])
        for place, (index, title) in enumerate(zip(order, titles, strict=True), start=1)
    )
    strange = dict.fromkeys(given[index] for index in np.flatnonzero(_unknown(predictor, item_batch, "item")).tolist())
    return Ranking(items, bool(_unknown(predictor, request_batch, "user").any()), tuple(strange), tuple(notes))


def recommend(
    predictor: Predictor, wanted: RecommendRequest, *, liked: int = 0, live: LiveEvents | None = None
) -> dict[str, Any]:
    """The best items for the one user, basket or context of a request.

    With `liked`, also as many items that the user acted on. `live` holds new events of the user.

    Raises:
        RequestError: for a model that knows no users and items, or with every problem of the request.
    """
    return recommend_with_chances(predictor, wanted, liked=liked, live=live)[1]


def recommend_with_chances(
    predictor: Predictor, wanted: RecommendRequest, *, liked: int = 0, live: LiveEvents | None = None
) -> tuple[Recommendation, dict[str, Any]]:
    """As `recommend`, with the answer that also tells the chance of each item."""
    if not knows_users_and_items(predictor):
        raise RequestError("this model can't recommend: it knows no users and items; POST /predict rows")
    if not wanted.users and not wanted.is_anonymous:
        raise RequestError("recommend: name a user, a basket of items or a context")
    found = predictor.recommend(wanted, live=live)[0]
    taken = predictor.recommender.liked(wanted.users[0], k=liked, live=live) if wanted.users and liked else ()
    items = [{"rank": rank, **item.to_dict()} for rank, item in enumerate(found.items, start=1)]
    # an item model's scores here are its own, without the line that makes them logits
    known = predictor.bundle.gives_probabilities and not isinstance(predictor.model, ItemModel)
    if known and found.answered_by in ("user", "basket", "history", "context"):
        logits = torch.tensor([each.score - (each.boost or 0.0) for each in found.items])
        for item, probability in zip(items, predictor.model.probabilities(logits).tolist(), strict=True):
            item["probability"] = probability
    return found, {
        "user": found.user,
        "unknown_user": not found.known,
        "answered_by": found.answered_by,
        "liked": [{"item": item.item, "title": item.title} for item in taken],
        "items": items,
        "notes": list(found.notes),
    }


def similar(predictor: Predictor, wanted: RecommendRequest) -> dict[str, Any]:
    """The items most like the only one of the basket; see `Predictor.similar`.

    Raises:
        RequestError: for a model that knows no users and items, or with every problem of the request.
    """
    if not knows_users_and_items(predictor):
        raise RequestError("this model knows no users and items, so it can't tell which are alike; POST /predict rows")
    found = predictor.similar(wanted)
    items = [{"rank": rank, **each.to_dict()} for rank, each in enumerate(found.items, start=1)]
    return {**found.to_dict(), "items": items}


def knows_users_and_items(predictor: Predictor) -> bool:
    """Whether the bundle keeps who acted on what."""
    return predictor.bundle.seen is not None and all(id_name(predictor, role) is not None for role in ROLES)


def can_recommend(predictor: Predictor) -> bool:
    """Whether `recommend` answers for a user alone: the model knows users and items, and reads no context."""
    return knows_users_and_items(predictor) and not predictor.recommender.request_features.context_features


def can_recommend_in_context(predictor: Predictor) -> bool:
    """Whether `recommend` answers if the request gives the context that the model reads."""
    return knows_users_and_items(predictor) and not predictor.recommender.request_features.crosses_items


def context_columns(predictor: Predictor) -> list[ColumnFacts]:
    """Raw columns that a request's context may give; those that it must give first."""
    if not knows_users_and_items(predictor):
        return []
    required, others = predictor.recommender.request_features.columns
    of_encoder = partial(facts_of_encoder, encoders=predictor.encoders)
    found = [of_encoder(name, is_required=True) for name in required]
    return found + [of_encoder(name) for name in others if name not in required]


# --- flags and notes -------------------------------------------------------------------------------------------------


def _encoded(predictor: Predictor, side: _Side) -> tuple[Batch, list[str]]:
    """The features of one side, and notes on their values."""
    with _naming(side.where):
        table = predictor.row_encoder.named(side.table)
        batch, missing = predictor.encode(table, side.features) if side.features else (Batch(), {})
        return batch, predictor.row_encoder.report(side.table, missing).notes()


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Name the part of the request in problems with its rows."""
    try:
        yield
    except DataError as error:
        raise RequestError.of(where, problems_by_row(error, lambda row: row_name(row, where))) from None
    except (pa.ArrowException, OverflowError) as error:
        raise RequestError(f"{where}: a value can't be read: {str(error)[:200]}") from None


def _check_finite(values: NDArray[np.float32], where: str) -> None:
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        why = "the model gives no finite number for it; a value is too large"
        raise RequestError(f"{row_at(int(wrong[0]), where)}: {why}")


def _unused(predictor: Predictor, *tables: pa.Table, absent: bool = True) -> list[str]:
    """Notes on unused columns of a request and its candidates; the label is not counted."""
    unused, lacking = predictor.row_encoder.unused_columns([name for table in tables for name in table.column_names])
    return column_notes(unused, lacking if absent else ())


def _unknown(predictor: Predictor, batch: Batch, role: Role) -> NDArray[np.bool_]:
    """Which rows have a user or item without an id of its own (B,); none where the model does not read it."""
    name = id_name(predictor, role)
    if name is None or name not in batch or not predictor.spec.reserves_unknown(name):
        return np.zeros(0, bool)
    return np.asarray((batch[name] == 0).cpu().numpy())


def id_name(predictor: Predictor, role: Role) -> str | None:
    """The feature that tells users or items apart; None where the model's data has none."""
    return predictor.spec.id_of(role) if predictor.spec.role(role) else None


def raw_ids_of(predictor: Predictor, role: Role, rows: Sequence[Row]) -> list[Any]:
    """The raw id of a user or item of each row as it was sent; None where a row has none."""
    name = id_name(predictor, role)
    encoder = predictor.encoders.encoders.get(name or "") if predictor.encoders is not None else None
    column = None if encoder is None or isinstance(encoder, CrossEncoder) else encoder.column
    return [row.get(name or "", row.get(column or "")) for row in rows]


def _titles(predictor: Predictor, ids: NDArray[np.int64]) -> list[str | None]:
    """Titles (N,) of items; None for unknown ones and those without."""
    known = ids >= predictor.items.first_id
    found = iter(predictor.items.titles_of(ids[known]).to_pylist())
    return [next(found) if is_known else None for is_known in known.tolist()]
