"""Which items may be recommended, and how much some of them are boosted.

Shapes: N ids of items, those of nobody included.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recspec.errors import RequestError, shortened
from recspec.inference.catalogue import Catalogues
from recspec.inference.wanted import Boost, RawId, Wanted
from recspec.retrieval import Filter, RawCatalogue, check_work

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
    first_id: int = 0
    basket: NDArray[np.int64] | None = None
    """Known items of the basket, oldest first; None without a basket."""
    notes: tuple[str, ...] = ()
    kept: NDArray[np.bool_] | None = None  # (N,) kept by the filter; None without one
    left_out: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Items that are excluded, or of the basket."""
    unknown: int = 0
    """Items that would be allowed if the model knew anything of them."""


class Chooser:
    """Reads filters, excluded items and boosts of requests; keeps the masks of the latest filters.

    Items that are not `scorable` (N,) are never allowed: the model knows nothing of them. Nor are items that are not
    `kept` (N,): a pipeline's own filter leaves them out of every answer.
    """

    def __init__(self, known: Catalogues, scorable: NDArray[np.bool_], kept: NDArray[np.bool_] | None = None) -> None:
        self._known, self.scorable, self._kept = known, scorable, kept
        self.raw = RawCatalogue(known.spec, known.encoders)
        self._masks: OrderedDict[str, NDArray[np.bool_]] = OrderedDict()

    def choose(self, wanted: Wanted, problems: list[str]) -> Choice:
        """The choice of a request; its problems are added to `problems`."""
        first = int(self._known.spec.reserves_unknown(self._known.spec.item_id))
        num_ids = self._known.spec.num_ids(self._known.spec.item_id)
        allowed = np.ones(num_ids, bool) if self._kept is None else self._kept.copy()
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
        basket = None
        if wanted.items:
            basket, note = self.known_items(wanted.items, "basket")
            notes += note
            if not wanted.include_seen:
                left_out = np.concatenate([left_out, basket])
        allowed[left_out] = False
        groups = self._column(wanted.diverse_by, problems) if wanted.diverse_by is not None else None
        left = allowed & self.scorable
        unknown = int(np.count_nonzero(allowed) - np.count_nonzero(left))
        added = _added(boosts, masks, len(allowed)) if boosts else None
        return Choice(left, added, groups, first, basket, tuple(notes), kept, left_out, unknown)

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

    def _column(self, name: str, problems: list[str]) -> Any:
        try:
            return self.raw.column(name)
        except RequestError as error:
            problems += [f"diverse_by: {problem}" for problem in error.problems]
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
