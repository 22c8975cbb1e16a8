"""What a model knows: users and items by id and title, the columns of items, one user's history.

All ids and titles stand in one text, the busiest first, so that a search reads it once from the beginning and stops at
the last result that it needs. Case and accents don't count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recspec.base.errors import RequestError, shortened
from recspec.data.encoding import AVAILABILITY, IN_STOCK, OUT_OF_STOCK, PIECES
from recspec.inference.catalogue import TITLE_COLUMNS, Role
from recspec.inference.explanations import Explanation
from recspec.inference.predictor import Predictor
from recspec.inference.raw_columns import ColumnFacts, facts_of_values, shown_values
from recspec.inference.recommendation import RawId, RecommendRequest
from recspec.models import KnownEvents

LONGEST_TITLE = 200
"""Characters of a title that are searched."""
MOST_WORDS = 8
"""Words of a query that are looked for apart."""
MOST_LOOKED_AT = 20_000
"""Entries with the longest word of a query that are searched for its other words."""

ENTRY, TITLE = "\n", "\x1f"
"""What stands before each id, and between it and the title."""


class Directory:
    """Completes a typed text to the raw ids and titles of users or items."""

    def __init__(self, predictor: Predictor, role: Role) -> None:
        catalogue, seen = predictor.catalogues.of(role), predictor.recommender.seen
        ids = np.arange(catalogue.first_id, catalogue.first_id + len(catalogue))
        counts = seen.num_known if role == "user" else seen.counts
        activity = np.asarray(counts.numpy()[ids], np.int64)
        """How many items each user acted on, or how many users acted on each item."""
        order = np.argsort(-activity, kind="stable")
        self.role, self._activity = role, activity[order]
        self._raw = predictor.catalogues.raw_ids(role, ids[order])
        self._titles = catalogue.titles_of(ids[order])
        self._text, self._starts = _joined(self._raw.cast(pa.large_string()), self._titles.cast(pa.large_string()))

    def find(self, query: str, limit: int, *, are_typical: bool = False) -> list[dict[str, Any]]:
        """Users or items with the text in their id or title.

        First the id itself, then ids and titles that begin with the text, then titles with a word that begins with it,
        then those that contain it, then those that contain all of its words; within these, the busiest first. Without a
        text, all: the busiest first, or with `are_typical` those whose activity is nearest to the median.
        """
        text = _folded(pa.array([query.strip()], pa.large_string()))[0].as_py().strip()
        if text:
            chosen = self._matches(text, query.strip(), limit)
        else:
            chosen = self._typical[:limit] if are_typical else list(range(min(limit, len(self))))
        places = pa.array(chosen, pa.int64())
        raw, titles = (each.take(places).to_pylist() for each in (self._raw, self._titles))
        found = zip(raw, titles, self._activity[np.asarray(chosen, int)].tolist(), strict=True)
        return [{self.role: one, "title": title, "count": count} for one, title, count in found]

    @cached_property
    def _typical(self) -> list[int]:
        """Places of those with any activity, the nearest to the median first."""
        active = np.flatnonzero(self._activity)
        far = np.abs(self._activity[active] - np.median(self._activity[active])) if len(active) else active
        return list(map(int, active[np.argsort(far, kind="stable")]))

    def __len__(self) -> int:
        return len(self._activity)

    def _matches(self, text: str, written: str, limit: int) -> list[int]:
        """Places of the best entries for a folded text."""
        same = list(self._places([ENTRY + text + TITLE], limit))
        same.sort(key=lambda place: str(self._raw[place].as_py()) != written)  # letter for letter first
        found = dict.fromkeys(same)
        steps: list[Callable[[], Iterator[int]]] = [
            lambda: self._places([ENTRY + text, TITLE + text], limit),
            lambda: self._places([" " + text], limit),
            lambda: self._places([text], limit),
            lambda: self._of_words(text),
        ]
        for step in steps:
            for place in step() if len(found) < limit else ():
                found[place] = None
                if len(found) >= limit:
                    break
        return list(found)[:limit]

    def _places(self, texts: list[str], limit: int) -> Iterator[int]:
        """Entries that hold one of some texts, in order; `limit` for each text, as all may be known already."""
        most = 2 * limit
        found = {place for text in texts for _, place in zip(range(most), self._holding(text), strict=False)}
        yield from sorted(found)

    def _holding(self, text: str) -> Iterator[int]:
        """Entries that hold a text, in order."""
        wanted, start, mark = text.encode(), 0, ENTRY.encode()
        while (start := self._text.find(wanted, start)) >= 0:
            place = int(np.searchsorted(self._starts, start, side="right")) - 1
            yield place
            start = self._text.find(mark, start + 1)
            if start < 0:
                return

    def _of_words(self, text: str) -> Iterator[int]:
        """Entries that hold every word of a text, in any order."""
        words = sorted({*text.split()}, key=lambda word: (-len(word), word))[:MOST_WORDS]
        if words == [text]:  # looked for already
            return
        others = [word.encode() for word in words[1:]]
        for _, place in zip(range(MOST_LOOKED_AT), self._holding(words[0]), strict=False):
            entry = self._text[self._starts[place] : self._starts[place + 1]]
            if all(word in entry for word in others):
                yield place


def _joined(ids: pa.Array, titles: pa.Array) -> tuple[bytes, NDArray[np.int64]]:
    """All ids and titles as one folded text, and where each entry begins in it; then its end."""
    cut = pc.utf8_slice_codeunits(pc.fill_null(titles, ""), 0, LONGEST_TITLE)
    nothing, entry, title = (pa.scalar(text, pa.large_string()) for text in ("", ENTRY, TITLE))
    entries = pc.binary_join_element_wise(nothing, _folded(ids), entry)
    entries = pc.binary_join_element_wise(entries, _folded(cut), title)
    entries = entries.combine_chunks() if isinstance(entries, pa.ChunkedArray) else entries
    _, offsets, text = pa.concat_arrays([entries.cast(pa.large_binary())]).buffers()
    starts = np.frombuffer(offsets, np.int64, len(entries) + 1).copy() if len(entries) else np.zeros(1, np.int64)
    return (text.to_pybytes() if text is not None else b"") + ENTRY.encode(), starts


def _folded(texts: pa.Array) -> pa.Array:
    """Texts in lower case, without accents or signs that would end an entry."""
    if not pc.all(pc.string_is_ascii(texts)).as_py():
        texts = pc.utf8_normalize(texts, "NFKD")
        texts = pc.replace_substring_regex(texts, r"\p{Mn}+", "")
    lower = pc.utf8_lower(texts)
    return pc.replace_substring_regex(lower, r"[\x00-\x1f]", " ")


MOST_COLUMNS = 50
"""Columns of a catalogue that are shown: the first."""
MOST_SHOWN = 200
"""Items whose fields one request may ask for."""
LARGEST_COLUMN = 256 << 20
"""Bytes of a column in the file that is shown; larger ones would fill the memory."""


def catalogue_columns(predictor: Predictor, names: Sequence[str], items: Sequence[RawId]) -> dict[str, Any]:
    """Raw values of the catalogue of known items, by column, in the order of the items.

    Raises:
        RequestError: for a column that the catalogue lacks.
    """
    known, raw = predictor.catalogues, predictor.recommender.chooser.raw
    places = pa.array(known.item_ids(items) - known.items.first_id)
    return {name: raw.column(name).take(places) for name in dict.fromkeys(names)}


SOLD = frozenset({"in_stock", "available", "preorder", "backorder"})
"""Values of the column `availability` of product feeds with which an item can be bought."""


def for_sale(columns: Sequence[ColumnFacts], stock: Mapping[str, Any] | None = None) -> str | None:
    """The filter of items that are in stock; None without a column that tells.

    `stock` names the column, and the values of items in stock where these are texts. Without it, every column with a
    name such as `in_stock` tells.
    """
    tests = []
    if stock is not None:
        return next((test for each in columns if (test := _declared_stock(each, stock))), None)
    for each in columns:
        name, quoted = each.name.lower(), f"`{each.name}`"
        if "`" in each.name:
            continue
        if each.kind == "truth" and name in IN_STOCK | OUT_OF_STOCK | PIECES:
            tests.append(f"{quoted} == {'false' if name in OUT_OF_STOCK else 'true'}")
        elif (
            name in PIECES
            and each.kind in ("number", "choice")
            and all(type(one) in (int, float) for one in each.values)
        ):
            tests.append(f"{quoted} > 0")
        elif name == AVAILABILITY and each.kind == "choice":
            sold = [one for one in each.values if str(one).lower().replace(" ", "_") in SOLD]
            tests += [f"{quoted} in ({', '.join(map(repr, sold))})"] if sold else []
    return " and ".join(tests) or None


def _declared_stock(column: ColumnFacts, stock: Mapping[str, Any]) -> str:
    """The filter by a column that a setting names; empty for another column."""
    name = str(stock.get("column"))
    if column.name not in (name, f"{name}_text") or "`" in column.name:
        return ""
    if isinstance(values := stock.get("values"), list):
        return f"`{column.name}` in ({', '.join(map(repr, map(str, values)))})"
    return f"`{column.name}` {'== true' if column.kind == 'truth' else '> 0'}"


class ItemFields:
    """The catalogue of a predictor's items, by column."""

    def __init__(self, predictor: Predictor) -> None:
        chooser = predictor.recommender.chooser
        self._known, self._raw, self._kept = predictor.catalogues, chooser.raw, chooser.kept

    @cached_property
    def columns(self) -> tuple[ColumnFacts, ...]:
        """The facts of each column but the id and the title; of no column that can't be shown."""
        own = self._known.spec.item_id
        stored = self._raw.distinct
        title = next((name for name in TITLE_COLUMNS if name in stored), None)
        names = [name for name in stored if name not in (own, title)][:MOST_COLUMNS]
        small = [name for name in names if self._raw.num_bytes(name) <= LARGEST_COLUMN]
        found = [facts_of_values(name, self._raw.column(name)) for name in small]
        return tuple(facts for facts in found if facts.kind != "other")

    @cached_property
    def for_sale(self) -> str | None:
        """The filter of items that are in stock; see `for_sale`."""
        stock = self._known.spec.metadata.get("stock")
        return for_sale(self.columns, stock if isinstance(stock, Mapping) else None)

    @cached_property
    def _are_for_sale(self) -> NDArray[np.bool_]:
        """(N,) the ids of items that are neither withdrawn nor blocked, and in stock."""
        found = np.ones(self._raw.num_items + self._known.items.first_id, bool)
        if self._kept is not None:
            found &= self._kept
        if (retired := self._known.retired) is not None:
            found[: len(retired)] &= ~retired  # new items of the catalogue lie behind
        return found if self.for_sale is None else found & self._raw.mask(self.for_sale)

    def of(self, items: Sequence[RawId]) -> list[dict[str, Any]]:
        """Id, title and fields of items by raw id; of unknown ones only the id, and `is_known` is False.

        `is_for_sale` tells whether an item may be sold: neither withdrawn nor blocked, and in stock.
        """
        ids = self._known.item_ids(items)
        known = ids >= self._known.items.first_id
        sold = known & self._are_for_sale[np.where(known, ids, 0)]
        places = pa.array(ids[known] - self._known.items.first_id)
        titles = iter(self._known.items.titles_of(ids[known]).to_pylist())
        raw = iter(self._known.raw_ids("item", np.asarray(ids[known])).to_pylist())
        values = {
            facts.name: iter(shown_values(facts, self._raw.column(facts.name).take(places).to_pylist()))
            for facts in self.columns
        }
        return [
            {
                "item": next(raw),
                "is_known": True,
                "is_for_sale": is_for_sale,
                "title": next(titles),
                "fields": {name: next(each) for name, each in values.items()},
            }
            if is_known
            else {"item": item, "is_known": False, "is_for_sale": False, "title": None, "fields": {}}
            for item, is_known, is_for_sale in zip(items, known.tolist(), sold.tolist(), strict=True)
        ]


def history_of(predictor: Predictor, user: str | int) -> pa.Table:
    """The items of a user's events, one row each: `item` and `title`.

    Oldest first where the model or its bundle keeps the order of events, otherwise in order of the items' ids.

    Raises:
        RequestError: for an unknown user.
    """
    number = _user(predictor, user)
    known = getattr(predictor.model, "known", None)
    if isinstance(known, KnownEvents):
        events = known.items[int(known.offsets[number]) : int(known.offsets[number + 1])].long().cpu().numpy()
    else:
        events = predictor.recommender.explainer.history(number)
    events = events[events >= predictor.items.first_id]
    return pa.table({"item": predictor.raw_ids("item", events), "title": predictor.items.titles_of(events)})


def explain(predictor: Predictor, user: str | int, item: str | int) -> tuple[float, Explanation | None]:
    """The model's score of an item for a user, and what explains it; None if nothing does.

    Raises:
        RequestError: for an unknown user or item, or a model that reads a context.
    """
    recommender = predictor.recommender
    number, found = _user(predictor, user), predictor.catalogues.item_ids([item])
    if found[0] < predictor.items.first_id:
        hint = predictor.catalogues.nearest("item", item)
        raise RequestError(f"item '{shortened(str(item))}': is unknown to the model{hint}")
    asked = recommender.check(RecommendRequest(users=(user,), explain=True))
    scores = recommender.scores_of_all(np.array([number]), asked.context)[0].numpy()[found - predictor.items.first_id]
    return float(scores[0]), recommender.explainer.explain(number, "user", asked.context, found, scores)[0]


def _user(predictor: Predictor, user: str | int) -> int:
    """The prepared id of a user whom the model knows."""
    _ = predictor.recommender.seen  # raises for a model without users and items
    number = int(predictor.catalogues.user_ids([user])[0])
    if number < predictor.users.first_id:
        hint = predictor.catalogues.nearest("user", user)
        raise RequestError(f"user '{shortened(str(user))}': is unknown to the model{hint}")
    return number
