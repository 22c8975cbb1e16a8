"""The best of scored candidates: which items may be recommended, boosts, variety.

Shapes: N ids of items, those of nobody included.

Carbonell, Goldstein: The Use of MMR, Diversity-Based Reranking, SIGIR 1998. Of the items R that are not yet in the list
S, the next one is

    argmax over i in R of (1 - d) * relevance(i) - d * max over j in S of likeness(i, j)

with d the diversity. Relevance is the score, scaled to 0..1 over the pool of the best items.

Shapes: P items of the pool; D width of a vector.

Shapes: R users; C candidates of a user; P items of a pool; k items of an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from recspec.base.errors import RequestError, shortened
from recspec.inference.catalogue import Catalogues
from recspec.inference.exact_search import highest
from recspec.inference.filters import Filter, check_work
from recspec.inference.raw_columns import RawCatalogue
from recspec.inference.recommendation import Boost, Draw, RawId, RecommendRequest, cap_of

MASKS = 32
"""Masks of filters that are kept: 1 MB each for a million items."""
SHOWN = 5
"""Unknown ids that a note names."""


@dataclass(frozen=True, eq=False)
class Choice:
    """The items that may be recommended to anyone, and what changes their order."""

    allowed: NDArray[np.bool_]  # (N,) kept by the filter, not excluded, not of the basket, known to the model
    boosts: NDArray[np.float32] | None = None  # (N,) in spreads of a user's scores
    groups: Any = None
    """The raw column (N,) that tells which items are alike, if the request names one; without ids of nobody."""
    cap: tuple[NDArray[np.int64], int] | None = None
    """(N,) value of a column as a code, -1 without a value, and the most items of a list with one value."""
    first_id: int = 0
    basket: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Known items of the basket, oldest first."""
    notes: tuple[str, ...] = ()
    kept: NDArray[np.bool_] | None = None  # (N,) kept by the filter; None without one
    left_out: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Items that are excluded, or of the basket."""
    unknown: int = 0
    """Items that would be allowed if the model knew anything of them."""


class Chooser:
    """Reads filters, excluded items and boosts of requests; keeps the masks of the latest filters.

    Items that are not `scorable` (N,) are never allowed: the model knows nothing of them. Nor are items that are not
    `kept` (N,): a pipeline's own filter leaves them out of every answer, or they are withdrawn or blocked.
    """

    def __init__(self, known: Catalogues, scorable: NDArray[np.bool_], kept: NDArray[np.bool_] | None = None) -> None:
        self._known, self.scorable, self.kept = known, scorable, kept
        self.raw = RawCatalogue(known.spec, known.encoders, known.changes)
        self._masks: OrderedDict[str, NDArray[np.bool_]] = OrderedDict()

    def choose(self, wanted: RecommendRequest, problems: list[str]) -> Choice:
        """The choice of a request; its problems are added to `problems`."""
        first = int(self._known.spec.reserves_unknown(self._known.spec.item_id))
        allowed = np.ones(len(self.scorable), bool) if self.kept is None else self.kept.copy()
        allowed[:first] = False
        notes = []
        boosts = self._read(wanted.boosts, problems)
        texts = {} if wanted.filter is None else {wanted.filter: ""}
        texts |= {boost.where: "boost: " for boost in boosts if boost.where != wanted.filter}
        masks = self._masks_of(texts, wanted.until, problems)
        kept = masks.get(wanted.filter) if wanted.filter is not None else None
        if kept is not None:
            allowed &= kept
        left_out, note = self.known_items(wanted.exclude, "excluded")
        notes += note
        basket, note = self.known_items(wanted.items, "basket")
        notes += note
        if not wanted.include_seen:
            left_out = np.concatenate([left_out, basket])
        basket = basket[basket < self._known.spec.num_ids(self._known.spec.item_id)]  # models read no newer items
        allowed[left_out] = False
        groups = self._column("diverse_by", wanted.diverse_by, problems) if wanted.diverse_by is not None else None
        cap = self._cap(wanted.at_most, first, problems)
        left = allowed & self.scorable
        unknown = int(np.count_nonzero(allowed) - np.count_nonzero(left))
        added = _added(boosts, masks, len(allowed)) if boosts else None
        return Choice(left, added, groups, cap, first, basket, tuple(notes), kept, left_out, unknown)

    def known_items(self, items: Sequence[RawId], what: str) -> tuple[NDArray[np.int64], list[str]]:
        """Prepared ids of those items that are known, and a note on the others."""
        ids = self._known.item_ids(items)
        known = ids >= self._known.items.first_id
        strange = [items[place] for place in np.flatnonzero(~known).tolist()]
        if not strange:
            return ids, []
        more = f" and {len(strange) - SHOWN:,} more" if len(strange) > SHOWN else ""
        shown = ", ".join(f"'{shortened(str(each))}'{self._known.nearest('item', each)}" for each in strange[:SHOWN])
        return ids[known], [f"{what}: {len(strange):,} of {len(items):,} items are unknown: {shown}{more}"]

    def _read(self, texts: Sequence[str], problems: list[str]) -> list[Boost]:
        """The boosts that can be read."""
        boosts = []
        for text in texts:
            try:
                boosts.append(Boost.parse(text))
            except RequestError as error:
                problems += error.problems
        return boosts

    def _masks_of(
        self, texts: Mapping[str, str], until: float | None, problems: list[str]
    ) -> dict[str, NDArray[np.bool_]]:
        """The items (N,) that each expression keeps, without those that can't be read; none if they take too long.

        `texts` maps each expression to what stands before its problems.
        """
        parsed: dict[str, Filter] = {}
        found = {text: self._masks[text] for text in texts if text in self._masks}
        for text, where in texts.items():
            if text not in found:
                with _named(where, problems):
                    parsed[text] = Filter.parse(text, self.raw.columns)
        try:
            if parsed:
                check_work(parsed.values(), self.raw.tested, self.raw.num_items)
        except RequestError as error:
            problems += error.problems
            return found
        for text, each in parsed.items():
            with _named(texts[text], problems):
                found[text] = self.raw.mask(each, until)
        for text, mask in found.items():
            self._masks[text] = mask
            self._masks.move_to_end(text)
        while len(self._masks) > MASKS:
            self._masks.popitem(last=False)
        return found

    def _cap(self, text: str | None, first: int, problems: list[str]) -> tuple[NDArray[np.int64], int] | None:
        """The codes of the column of `at_most`, from the ids of nobody on, and its number."""
        if text is None or (parsed := cap_of(text)) is None:
            return None
        name, most = parsed
        column = self._column("at_most", name, problems)
        if column is None:
            return None
        if pa.types.is_nested(column.type):
            problems.append(f"at_most: column '{name}' holds lists; expected one value an item")
            return None
        return np.concatenate([np.full(first, -1), _codes(column)]), most

    def _column(self, where: str, name: str, problems: list[str]) -> Any:
        try:
            return self.raw.column(name)
        except RequestError as error:
            problems += [f"{where}: {problem}" for problem in error.problems]
            return None


def _added(boosts: Sequence[Boost], masks: Mapping[str, NDArray[np.bool_]], count: int) -> NDArray[np.float32]:
    """The sum (N,) of the boosts whose masks are known."""
    total = np.zeros(count, np.float32)
    for boost in boosts:
        if boost.where in masks:
            total += np.float32(boost.weight) * masks[boost.where]
    return total


@contextmanager
def _named(where: str, problems: list[str]) -> Iterator[None]:
    """Take down the problems of a filter, each with the word filter before it."""
    try:
        yield
    except RequestError as error:
        told = ("filter", "the filter")
        whole = (problem if problem.startswith(told) else f"filter: {problem}" for problem in error.problems)
        problems += [f"{where}{problem}" for problem in whole]


Likeness = Callable[[int], NDArray[np.floating[Any]]]
"""Likeness (P,), at most 1, of every item of the pool to one of them, by its place."""

FEWEST, TIMES, MOST = 100, 5, 5_000  # items of the pool: as many times k, within these bounds


def pool_size(k: int) -> int:
    """Number of best items among which a list of k is chosen."""
    return max(k, min(MOST, max(FEWEST, TIMES * k)))


def diversified(scores: NDArray[np.floating[Any]], likeness: Likeness, k: int, diversity: float) -> NDArray[np.int64]:
    """Places of k items of a pool, in the order of choice; the pool's order decides between equal ones."""
    spread = float(scores.max() - scores.min()) if len(scores) else 0.0
    relevance = (scores - scores.min()) / spread if spread > 0 else np.zeros(len(scores))
    value, nearest = (1 - diversity) * relevance.astype(np.float64), np.full(len(scores), -np.inf)
    chosen: list[int] = []
    left = np.ones(len(scores), bool)
    for _ in range(min(k, len(scores))):
        penalty = diversity * nearest if chosen else 0.0
        place = int(np.argmax(np.where(left, value - penalty, -np.inf)))
        chosen.append(place)
        left[place] = False
        np.maximum(nearest, likeness(place), out=nearest)
    return np.array(chosen, np.int64)


def by_vectors(vectors: NDArray[np.floating[Any]]) -> Likeness:
    """Cosines of vectors (P, D); 0 with a vector of zeros."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)

    def cosines(place: int) -> NDArray[np.floating[Any]]:
        with np.errstate(invalid="ignore"):  # OpenBLAS may say so of lanes that it drops
            return np.asarray(unit @ unit[place])

    return cosines


def by_values(column: Any) -> Likeness:
    """1 for equal values (P,), else 0; of lists the share of their values that both hold (Jaccard).

    A missing value is like no other.
    """
    values = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if not pa.types.is_nested(values.type):
        codes = _codes(values)
        return lambda place: ((codes == codes[place]) & (codes[place] >= 0)).astype(np.float64)
    sets = [frozenset(map(str, each or ())) for each in values.to_pylist()]

    def shared(place: int) -> NDArray[np.float64]:
        own = sets[place]
        return np.array([len(own & each) / max(1, len(own | each)) for each in sets])

    return shared


def _codes(column: Any) -> NDArray[np.int64]:
    """The place (P,) of each value among the distinct ones; -1 without a value."""
    values = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    coded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    return np.asarray(pc.fill_null(coded.indices, -1).to_numpy(zero_copy_only=False), np.int64)


@dataclass(frozen=True, eq=False)
class Ranked:
    """The best candidates of R users; -1 and -inf fill short lists."""

    items: NDArray[np.int64]  # (R, k)
    scores: NDArray[np.float32]  # (R, k)
    boosts: NDArray[np.float32]  # (R, k), the part of the scores that boosts added
    chances: NDArray[np.float64] | None = None  # (R, k) of drawn lists; see `Recommendation`
    pool_sizes: NDArray[np.int64] | None = None  # (R,) of drawn lists


def ranked(
    scores: Tensor,
    ids: Tensor,
    k: int,
    choice: Choice,
    *,
    diversity: float = 0.0,
    vectors: Tensor | None = None,
    draw: Draw | None = None,
) -> Ranked:
    """The k best of candidates (R, C), whose ids ascend in each row; -inf leaves one out, equal scores go by id.

    With `draw`, k drawn candidates, in the order in which they were drawn.
    """
    boosts = torch.zeros(1, 1).expand(scores.shape)
    if choice.boosts is not None:
        boosts = torch.from_numpy(choice.boosts)[ids.clamp(min=0)] * _spread(scores)
        scores = scores + boosts
    if choice.cap is not None:
        scores = _capped(scores, ids, *choice.cap)
    width, chances, pool_sizes = min(pool_size(k) if diversity else k, scores.shape[1]), None, None
    if draw is None:
        best, places = highest(scores, width)
    else:
        best, places, chances, pool_sizes = _drawn(scores, ids, width, draw)
    if diversity:
        chances = None
        order = _diverse(best, ids.gather(1, places), k, choice, diversity, vectors)
        best, places = best.gather(1, order), places.gather(1, order)
    items = torch.where(best.isfinite(), ids.gather(1, places), -1)
    more = (0, k - best.shape[1])
    wide = torch.nn.functional.pad
    return Ranked(
        wide(items, more, value=-1).numpy(),
        wide(best, more, value=-np.inf).numpy(),
        wide(boosts.gather(1, places), more).numpy(),
        None if chances is None else np.pad(chances, ((0, 0), more)),
        pool_sizes,
    )


def _drawn(
    scores: Tensor, ids: Tensor, k: int, draw: Draw
) -> tuple[Tensor, Tensor, NDArray[np.float64], NDArray[np.int64]]:
    """Scores, places and chances (R, k) of drawn candidates, and the sizes (R,) of the pools."""
    best, places = torch.full((len(scores), k), -torch.inf), torch.zeros((len(scores), k), dtype=torch.int64)
    chances = np.zeros((len(scores), k))
    for row in range(len(scores)):
        drawn, chances_of_row = draw(scores[row].numpy(), ids[row].numpy(), k)
        places[row, : len(drawn)] = torch.from_numpy(drawn)
        best[row, : len(drawn)] = scores[row, places[row, : len(drawn)]]
        chances[row, : len(drawn)] = chances_of_row
    return best, places, chances, scores.isfinite().sum(1).clamp(max=draw.pool).numpy()


def _diverse(scores: Tensor, ids: Tensor, k: int, choice: Choice, diversity: float, vectors: Tensor | None) -> Tensor:
    """Places (R, at most k) in pools (R, P), best first, of lists with variety; candidates left out come last."""
    made = torch.arange(scores.shape[1] - 1, -1, -1)[:k].repeat(len(scores), 1)
    for row in range(len(scores)):
        held = int(scores[row].isfinite().sum())
        own = ids[row, :held]
        if choice.groups is not None:
            likeness = by_values(choice.groups.take((own - choice.first_id).numpy()))
        else:
            assert vectors is not None, "checked with the request"
            likeness = by_vectors(vectors[own].numpy())
        chosen = diversified(scores[row, :held].numpy(), likeness, k, diversity)
        others = torch.arange(held, scores.shape[1])[: made.shape[1] - len(chosen)]
        made[row] = torch.cat([torch.from_numpy(chosen), others])
    return made


def _capped(scores: Tensor, ids: Tensor, codes: NDArray[np.int64], most: int) -> Tensor:
    """The scores (R, C), with -inf for candidates behind the `most` best ones of the same code; -1 is no code."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    sorted_codes = torch.from_numpy(codes)[ids.clamp(min=0)].gather(1, order)
    by_code = sorted_codes.argsort(dim=1, stable=True)  # within a code, the best first
    grouped = sorted_codes.gather(1, by_code)
    places = torch.arange(scores.shape[1]).expand_as(grouped)
    begins = torch.ones_like(grouped, dtype=torch.bool)
    begins[:, 1:] = grouped[:, 1:] != grouped[:, :-1]
    rank = places - torch.where(begins, places, 0).cummax(dim=1).values
    over = torch.zeros_like(begins).scatter(1, order.gather(1, by_code), (rank >= most) & (grouped >= 0))
    return scores.masked_fill(over, -torch.inf)


def _spread(scores: Tensor) -> Tensor:
    """(R, 1) standard deviation of the finite scores of each row (R, C); 0 without any."""
    held = scores.isfinite()
    count = held.sum(1, keepdim=True).clamp(min=1)
    values = torch.where(held, scores, 0.0).double()
    mean = values.sum(1, keepdim=True) / count
    return (torch.where(held, values - mean, 0.0).square().sum(1, keepdim=True) / count).sqrt().float()
