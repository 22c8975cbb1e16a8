"""What people ask a trained model in raw values: rank these candidates, recommend to this user, score these rows.

Functions over an open `Predictor`, for JSON: plain values in, plain values out. What is unknown is answered by a rule
and flagged. An unknown user is recommended the most popular items; in `rank` and `predict` an unknown user, item or
other value is scored with the id of unknown values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from recspec.batch import Batch
from recspec.encoding import CrossEncoder, Gap
from recspec.errors import DataError, RequestError, listed
from recspec.evaluate import id_feature
from recspec.gaps import column_notes, raw_names, row_at
from recspec.predict import ROLES, Predictor, Role, renumbered

Row = Mapping[str, Any]
"""Raw column -> a text, number, boolean, null, or a list of these."""

SHOWN = 3
"""Problems of one kind that a message names."""
MAX_NOT_READ = 100
"""Columns of a request that nothing is made from; a note names them, more are refused."""


@dataclass(frozen=True)
class RankedItem:
    """A candidate with its place in the answer (from 1) and in the request (from 0)."""

    rank: int
    index: int
    item: Any
    title: str | None
    score: float
    """The logit."""
    probability: float


@dataclass(frozen=True)
class Ranking:
    """The candidates of one request, best first; equal ones in the order of the request."""

    items: tuple[RankedItem, ...]
    unknown_user: bool = False
    unknown_items: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class RowScores:
    """The probability of each row, and how many rows lack a value or hold one that is unknown, by feature."""

    probabilities: tuple[float, ...]
    gaps: Mapping[str, Gap]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        gaps = {name: {"missing": gap.missing, "unknown": gap.unknown} for name, gap in self.gaps.items()}
        return {"probabilities": list(self.probabilities), "gaps": gaps, "notes": list(self.notes)}


def predict(predictor: Predictor, rows: Sequence[Row]) -> RowScores:
    """The probability of each raw row.

    Raises:
        RequestError: naming the rows and columns that can't be read.
    """
    if not rows:
        return RowScores((), {})
    known = known_columns(predictor)
    _check_columns(rows, "rows", known)
    table = table_of(rows, "rows", known)
    with _naming("rows"):
        probabilities, found = predictor.predict(table)
    _check_finite(probabilities, "rows")
    return RowScores(tuple(probabilities.tolist()), found.gaps, tuple(found.notes()))


def rank(
    predictor: Predictor, request: Row, candidates: Sequence[str | int] | Sequence[Row], *, top_k: int | None = None
) -> Ranking:
    """The best candidates (raw item ids, or rows of item columns) for one request, whose part is computed once.

    Raises:
        RequestError: naming what can't be read; or if the model reads no item feature.
    """
    names, of_items = predictor.model.features(), set(predictor.spec.role("item"))
    theirs = [name for name in names if name in of_items]
    if not theirs:
        raise RequestError("this model reads no feature of an item, so candidates can't differ; POST /predict rows")
    rows = [each if isinstance(each, Mapping) else {_item_id(predictor): each} for each in candidates]
    ours = [name for name in names if name not in of_items]
    if rows and (usual := _quickly(predictor, request, rows)) is not None:
        return _ranked(predictor, rows, _scored(predictor, *usual, ()), top_k)
    known = known_columns(predictor)
    _check_columns([request], "request", known)
    _check_columns(rows, "candidates", known)
    user = predictor.anonymous_id(list(request))
    asked, items = (
        table_of([request if user is None else {**request, user: None}], "request", known),
        table_of(rows, "candidates", known),
    )
    if rows and _must_join(predictor, asked.column_names, ours, items.column_names, theirs):
        return _ranked(predictor, rows, _joined(predictor, request, rows), top_k)
    once, gaps = _encoded(predictor, asked, ours, "request") if ours else ({}, {})
    notes = _notes(predictor, asked, gaps)
    if not rows:
        return Ranking(
            (), _unknown(predictor, once, "user").any().item(), (), (*notes, *_unread(predictor, asked, absent=False))
        )
    many, gaps = _encoded(predictor, items, theirs, "candidates")
    notes += [*_notes(predictor, items, gaps), *_unread(predictor, asked, items)]
    return _ranked(predictor, rows, _scored(predictor, once, many, notes), top_k)


@dataclass(frozen=True)
class _Scored:
    """Encoded request and candidates, with their logits (N,)."""

    request: Batch
    items: Batch
    logits: torch.Tensor
    notes: Sequence[str]


def _quickly(predictor: Predictor, request: Row, rows: Sequence[Row]) -> tuple[Batch, Batch] | None:
    """Request and candidates encoded value by value; None where a value or column is missing, unknown or unusual.

    There is nothing to tell of them then, so an answer has no notes.
    """
    quick_request, quick_items = predictor.quick
    if {*quick_request.features, *quick_items.features} != {*predictor.model.features()}:
        return None
    read, names = {*quick_request.sources, *quick_items.sources}, [*rows[0]]
    if not read.issuperset(request) or not read.issuperset(names):
        return None
    try:
        columns = {name: [row[name] for row in rows] for name in names}
    except KeyError:
        return None
    if any(len(row) != len(names) for row in rows):
        return None
    once = quick_request.columns({name: (value,) for name, value in request.items()}, gaps=False)
    many = quick_items.columns(columns, gaps=False)
    if once is None or many is None:
        return None
    return _batch(predictor, once), _batch(predictor, many)


def _batch(predictor: Predictor, inputs: Mapping[str, NDArray[Any]]) -> Batch:
    found = {name: torch.from_numpy(values[:, 0]).to(predictor.device) for name, values in inputs.items()}
    return {name: tensor if tensor.is_floating_point() else tensor.long() for name, tensor in found.items()}


def _scored(predictor: Predictor, once: Batch, many: Batch, notes: Sequence[str]) -> _Scored:
    with torch.inference_mode():
        logits = predictor.model.score_items(once, many)[0] if once else predictor.model(many)
    return _Scored(once, many, logits.float(), notes)


def _must_join(
    predictor: Predictor, asked: Sequence[str], ours: Sequence[str], items: Sequence[str], theirs: Sequence[str]
) -> bool:
    """Whether a feature is made from columns of both sides, as a cross of a user's column and an item's is."""
    both, names = [*asked, *items], [*ours, *theirs]
    apart = all(predictor.can_encode(name, asked, ours) for name in ours) and all(
        predictor.can_encode(name, items, theirs) for name in theirs
    )
    return not apart and all(predictor.can_encode(name, both, names) for name in names)


def _joined(predictor: Predictor, request: Row, rows: Sequence[Row]) -> _Scored:
    """Candidates each with all of the request's columns, where a feature needs both."""
    table = table_of([{**request, **row} for row in rows], "candidates", known_columns(predictor))
    batch, gaps = _encoded(predictor, table, None, "candidates")
    with torch.inference_mode():
        logits = predictor.model(batch).float()
    notes = [*_notes(predictor, table, gaps), *_unread(predictor, table)]
    return _Scored({name: tensor[:1] for name, tensor in batch.items()}, batch, logits, notes)


def _ranked(predictor: Predictor, rows: Sequence[Row], scored: _Scored, top_k: int | None) -> Ranking:
    logits = scored.logits.cpu()
    _check_finite(logits.numpy(), "candidates")
    order = torch.argsort(logits, descending=True, stable=True)[: len(rows) if top_k is None else top_k].tolist()
    given = _given(predictor, rows, "item")
    ids = scored.items.get(id_name(predictor, "item") or "")
    titles = _titles(predictor, ids.cpu().numpy()[order]) if ids is not None else [None] * len(order)
    scores, probabilities = logits.tolist(), torch.sigmoid(logits).tolist()
    items = tuple(
        RankedItem(place, index, given[index], title, scores[index], probabilities[index])
        for place, (index, title) in enumerate(zip(order, titles, strict=True), start=1)
    )
    strange = np.flatnonzero(_unknown(predictor, scored.items, "item")).tolist()
    unknown_items = tuple(dict.fromkeys(given[index] for index in strange))
    return Ranking(items, bool(_unknown(predictor, scored.request, "user").any()), unknown_items, tuple(scored.notes))


def recommend(
    predictor: Predictor, user: str | int, *, k: int = 10, exclude_seen: bool = True, liked: int = 0
) -> dict[str, Any]:
    """The k best items for a raw user id; for an unknown user the most popular ones. With `liked`, some the user took.

    Raises:
        RequestError: for a model that knows no users and items.
    """
    if not can_recommend(predictor):
        raise RequestError(
            "this model can't recommend: it knows no users and items, or reads what belongs to neither; "
            "POST /rank candidates or /predict rows"
        )
    found = predictor.recommend([user], k=k, include_seen=not exclude_seen)[0]
    return {
        "user": user,
        "unknown_user": not found.known,
        "liked": liked_items(predictor, user, liked) if found.known and liked else [],
        "items": [{"rank": rank, **asdict(item)} for rank, item in enumerate(found.items, start=1)],
        "notes": list(found.notes),
    }


def liked_items(predictor: Predictor, user: str | int, k: int) -> list[dict[str, Any]]:
    """Raw id and title of k items that a known user acted on, the most popular first."""
    number = int(predictor.user_ids([user])[0])
    items = predictor.seen.of(number).long()
    popularity = predictor.seen.counts[items]
    best = items[torch.argsort(popularity, descending=True, stable=True)][:k].numpy()
    return [
        {"item": item, "title": title}
        for item, title in zip(predictor.raw_ids("item", best).to_pylist(), _titles(predictor, best), strict=True)
    ]


def knows_users_and_items(predictor: Predictor) -> bool:
    """Whether the bundle keeps who acted on what."""
    return predictor.bundle.seen is not None and all(id_name(predictor, role) is not None for role in ROLES)


def can_recommend(predictor: Predictor) -> bool:
    """Whether `recommend` answers: the model knows users and items, and reads nothing that belongs to neither."""
    if not knows_users_and_items(predictor):
        return False
    owned = {*predictor.users.features, *predictor.users.lists, *predictor.spec.role("item")}
    return all(name in owned for name in predictor.model.features())


# --- flags and notes -------------------------------------------------------------------------------------------------


def _encoded(
    predictor: Predictor, table: pa.Table, features: Sequence[str] | None, where: str
) -> tuple[Batch, dict[str, Gap]]:
    if predictor.encoders is not None:
        table = table.rename_columns(predictor.encoders.named(table.column_names))
    with _naming(where):
        return predictor.encode(table, features)


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Refuses rows that can't be encoded, saying which part of the request they are."""
    try:
        yield
    except DataError as error:
        problems = [problem.removeprefix("raw rows: ") for problem in error.problems]
        raise RequestError.of(
            where, [renumbered(problem, lambda row: _row(row, where)) for problem in problems]
        ) from None
    except (pa.ArrowException, OverflowError) as error:
        raise RequestError(f"{where}: a value can't be read: {str(error)[:200]}") from None


def _check_finite(values: NDArray[np.float32], where: str) -> None:
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise RequestError(
            f"{row_at(int(wrong[0]), where)}: the model gives no finite number for it; a value is too large"
        )


def _row(place: int, where: str, field: str = "") -> str:
    """A row of a request as messages name it; what is asked of all candidates is one row, and so needs no number."""
    if where == "request":
        return f"request.{field}" if field else "its value"
    return row_at(place, where, field)


def _notes(predictor: Predictor, table: pa.Table, gaps: dict[str, Gap]) -> list[str]:
    return predictor.told(table, gaps).notes()


def _unread(predictor: Predictor, *tables: pa.Table, absent: bool = True) -> list[str]:
    """Notes on columns of a request and its candidates that nothing is made from; the label may be there."""
    names = [name for table in tables for name in table.column_names]
    not_read, lacking = predictor.in_vain(names)
    return column_notes(not_read, lacking if absent else ())


def _unknown(predictor: Predictor, batch: Batch, role: Role) -> NDArray[np.bool_]:
    """Which rows have a user or item without an id of its own (B,); none where the model does not read it."""
    name = id_name(predictor, role)
    if name is None or name not in batch or not predictor.spec.reserves_unknown(name):
        return np.zeros(0, bool)
    return np.asarray((batch[name] == 0).cpu().numpy())


def id_name(predictor: Predictor, role: Role) -> str | None:
    """The feature that tells users or items apart; None where the model's data has none."""
    return id_feature(predictor.spec, role) if predictor.spec.role(role) else None


def _item_id(predictor: Predictor) -> str:
    name = id_name(predictor, "item")
    if name is None:
        raise RequestError("candidates: this model knows no item ids; give each candidate's columns as an object")
    return name


def _given(predictor: Predictor, rows: Sequence[Row], role: Role) -> list[Any]:
    """The raw id of each row as it was sent; None where a row has none."""
    name = id_name(predictor, role)
    encoder = predictor.encoders.encoders.get(name or "") if predictor.encoders is not None else None
    column = None if encoder is None or isinstance(encoder, CrossEncoder) else encoder.column
    return [row.get(name or "", row.get(column or "")) for row in rows]


def _titles(predictor: Predictor, ids: NDArray[np.int64]) -> list[str | None]:
    """Titles (N,) of items; None for unknown ones and those without."""
    known = ids >= predictor.items.first_id
    found = iter(predictor.items.titles_of(ids[known]).to_pylist())
    return [next(found) if is_known else None for is_known in known.tolist()]


# --- rows of JSON as a table -----------------------------------------------------------------------------------------


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
            problems += [f"{_row(row, where, name[:80])} {what}" for row, what in wrong]
        else:
            columns[name] = _column(values)
    if problems:
        raise RequestError.of("request", problems)
    return pa.table(columns)


def known_columns(predictor: Predictor) -> Set[str]:
    """The raw columns that a model's data has, whether the model reads them or not."""
    spec, encoders = predictor.spec, predictor.encoders
    return {*spec.features, *raw_names(encoders, encoders.encoders if encoders is not None else ())}


def _check_columns(rows: Sequence[Row], where: str, known: Set[str]) -> None:
    """Refuse too many columns before anything is built: each costs a look at every row, and a row may bring many.

    Raises:
        RequestError: for more than `MAX_NOT_READ` columns that the model's data does not have.
    """
    strange = dict[str, None]()
    for row in rows:
        strange.update((name, None) for name in row if name not in known)
        if len(strange) > MAX_NOT_READ:
            shown = listed(name[:40] for name in list(strange)[:SHOWN])
            raise RequestError(
                f"{where}: more than {MAX_NOT_READ} columns are none of the model's, such as {shown}; "
                "send those that GET /models names"
            )


def _wrong_values(values: Sequence[Any]) -> list[tuple[int, str]]:
    """Rows, and what is wrong with their values."""
    kinds = {type(value) for value in values} - {type(None)}
    if kinds <= {str, float, bool}:
        return []
    if list in kinds and len(kinds) > 1:
        row = next(row for row, value in enumerate(values) if value is not None and not isinstance(value, list))
        return [(row, "is a single value, where another row has a list; expected one or the other")]
    wrong = [(row, what) for row, value in enumerate(values) if (what := _wrong(value, may_be_list=True))]
    return wrong[:SHOWN]


def _wrong(value: Any, *, may_be_list: bool) -> str | None:
    if isinstance(value, list) and may_be_list:
        return next((f"holds what {what}" for each in value if (what := _wrong(each, may_be_list=False))), None)
    if isinstance(value, (dict, list)):
        return f"is {'an object' if isinstance(value, dict) else 'a list'}; expected a text, number, boolean or null"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"is {value}; expected a whole number of 64 bits"
    return None


def _column(values: Sequence[Any]) -> pa.Array:
    if any(isinstance(value, list) for value in values):
        lists = [value for value in values if value is not None]
        flat = _scalars([each for value in lists for each in value])
        ends = np.cumsum([0, *(0 if value is None else len(value) for value in values)])
        return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), flat)
    return _scalars(values)


def _scalars(values: Sequence[Any]) -> pa.Array:
    kinds = {type(value) for value in values} - {type(None)}
    if str in kinds and kinds != {str}:
        return pa.array([_text(value) for value in values], pa.string())
    if bool in kinds:
        values = [int(value) if isinstance(value, bool) else value for value in values]
    if float in kinds:
        values = [None if value is None else float(value) for value in values]
    return pa.array(values)


def _text(value: Any) -> str | None:
    """A number's text is that of the whole number where it is one, as files spell ids."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and not value.is_integer():
        return repr(value)
    return str(int(value))


# --- finding users and items -----------------------------------------------------------------------------------------


class Directory:
    """The users or items that a model knows, by raw id and title, for a field that completes what is typed."""

    def __init__(self, predictor: Predictor, role: Role) -> None:
        catalogue = predictor.users if role == "user" else predictor.items
        self.role = role
        self._predictor = predictor
        self._numbers = np.arange(catalogue.first_id, catalogue.first_id + len(catalogue))
        self._titles = catalogue.titles_of(self._numbers)

    def find(self, query: str, limit: int) -> list[dict[str, Any]]:
        """Ids and titles that hold the text, whatever its case: the id itself, then beginnings, then the busiest."""
        text = query.strip()
        places = np.arange(len(self._numbers)) if not text else np.flatnonzero(self._closeness(text))
        closeness = self._closeness(text)[places] if text else np.zeros(len(places))
        order = np.lexsort((places, -self._activity[places], -closeness))[:limit]
        chosen = places[order]
        raw = self._raw.take(pa.array(chosen)).to_pylist()
        titles = self._titles.take(pa.array(chosen)).to_pylist()
        counts = self._activity[chosen].tolist()
        return [
            {self.role: one, "title": title, "count": count}
            for one, title, count in zip(raw, titles, counts, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._numbers)

    def _closeness(self, text: str) -> NDArray[np.int64]:
        """3 for the id itself, 2 for the beginning of an id or title, 1 for a part of one, 0 for nothing."""
        found = np.zeros(len(self._numbers), np.int64)
        for texts in (self._texts, self._titles):
            for value, matches in (
                (1, pc.match_substring(texts, text, ignore_case=True)),
                (2, pc.starts_with(texts, text, ignore_case=True)),
            ):
                found[pc.fill_null(matches, False).to_numpy(zero_copy_only=False)] = value
        found[pc.fill_null(pc.equal(self._texts, text), False).to_numpy(zero_copy_only=False)] = 3
        return found

    @cached_property
    def _raw(self) -> pa.Array:
        return self._predictor.raw_ids(self.role, self._numbers)

    @cached_property
    def _texts(self) -> pa.Array:
        return self._raw.cast(pa.string())

    @cached_property
    def _activity(self) -> NDArray[np.int64]:
        """How many items each user acted on, or how many users acted on each item."""
        seen = self._predictor.seen
        counts = seen.offsets.diff() if self.role == "user" else seen.counts
        return np.asarray(counts.numpy()[self._numbers], np.int64)
