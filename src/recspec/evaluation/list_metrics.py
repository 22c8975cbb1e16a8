"""Measures of recommendation lists beside accuracy: coverage, novelty, diversity, popularity lift, captured revenue.

All are of the lists of protocol `full`: the k best candidates of each ranked user. Of equally scored items at the end
of a list, one choice is taken. Popularity is the number of users with a positive of the item in the splits that trained
the model.

Shapes: R users; N items; k length of the lists, -1 where a user has fewer candidates; L ids of an item in a column.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recspec.evaluation.interactions import Rows
from recspec.evaluation.report import Exposure
from recspec.evaluation.slices import default_kind, kinds_of_items, prices_of_items
from recspec.evaluation.task import EvaluationTask
from recspec.models import Ids, Interactions

Lists = NDArray[np.int32]  # (R, k), best first
Values = NDArray[np.float64]

COMPARED = 1 << 24
"""Pairs of ids that `diversities` compares at once: 16 MB."""


PARTS = 10
"""Parts of the items by popularity, whose shares of the recommendations `exposure` gives."""


@dataclass(frozen=True)
class ListMetrics:
    """What the measures need beside the lists."""

    counts: NDArray[np.int64]  # (N,) popularity: users of each item
    num_users: int  # users with any of these positives
    num_candidates: int  # items that can be recommended
    history_popularity: Values  # (R,) mean popularity of the items that each ranked user acted on; NaN for none
    kinds: NDArray[np.integer] | None = None  # (N, L) ids of each item in the column of diversity, 0 for none
    dislikes: Interactions | None = None  # of the ranked users, numbered from 0, in the split
    targets: Interactions | None = None  # likewise what they chose in the split
    prices: Values | None = None  # (N,) of each item, 0 where it is unknown; None without prices

    def of(self, lists: Lists) -> tuple[dict[str, float], dict[str, Values]]:
        """Each measure of some lists, and the users' values where it is a mean over users."""
        found = {"coverage": coverage(lists, self.num_candidates)}
        values = {"novelty": novelties(lists, self.counts, self.num_users)}
        if self.kinds is not None and lists.shape[1] > 1:
            values["diversity"] = diversities(lists, self.kinds)
        if self.dislikes is not None and self.dislikes.num_pairs:
            values["disliked"] = disliked(lists, self.dislikes)
        if self.prices is not None and self.targets is not None and self.prices[self.targets.items].any():
            values["revenue"] = revenues(lists, self.targets, self.prices)
        found |= {name: float(np.nanmean(of)) for name, of in values.items() if not np.isnan(of).all()}
        lift = popularity_lift(lists, self.counts, self.history_popularity)
        if not np.isnan(lift):
            found["popularity_lift"] = lift
        return found, {name: of for name, of in values.items() if not np.isnan(of).any()}


def measures_of(task: EvaluationTask, users: Ids, positives: Rows | None = None) -> ListMetrics:
    """The measures of the lists of some users (R,), ascending, under protocol `full`; `positives` are their targets."""
    counts, name = task.learned.counts, task.settings.diversity or default_kind(task.spec)
    num_users = int(np.count_nonzero(np.diff(task.learned.offsets)))
    num_candidates = int((~task.cold_items[task.first_item :]).sum())
    popularity, kinds = (
        history_popularity(task.seen, users, counts),
        None if name is None else kinds_of_items(task, name),
    )
    dislikes = None
    if task.dislikes is not None:
        rows, items = task.dislikes.of(users)
        dislikes = Interactions.from_pairs(rows, items, num_users=len(users), num_items=task.dislikes.num_items)
    targets, prices = None, prices_of_items(task.spec)
    if prices is not None and positives is not None:
        assert positives.groups is not None
        assert positives.items is not None
        rows = np.searchsorted(users, positives.groups)
        targets = Interactions.from_pairs(rows, positives.items, num_users=len(users), num_items=len(counts))
    return ListMetrics(counts, num_users, num_candidates, popularity, kinds, dislikes, targets, prices)


def coverage(lists: Lists, num_candidates: int) -> float:
    """Share of the items that at least one list holds; NaN without items.

    RecPack's `CoverageK`; Elliot's `ItemCoverage` is the number instead of the share.
    """
    held = len(np.unique(lists[lists >= 0]))
    return held / num_candidates if num_candidates else float("nan")


def disliked(lists: Lists, dislikes: Interactions) -> Values:
    """(R,) disliked items in each list, divided by the mean number of a user's disliked items, which is above 0.

    The mean of these values is the share of all disliked items that the lists hold.
    """
    held: NDArray[np.bool_] = dislikes.contain(np.arange(len(lists))[:, None], lists) & (lists >= 0)
    shares: Values = held.sum(1) * (len(lists) / dislikes.num_pairs)
    return shares


def revenues(lists: Lists, targets: Interactions, prices: Values) -> Values:
    """(R,) prices of each user's targets in the list, divided by the mean over users of the prices of all targets.

    The mean of these values is the share of all targets' prices that the lists capture:

        sum over users u of sum over i in list(u) and targets(u) of price(i) / sum over u of sum over i in targets(u)
    """
    held: NDArray[np.bool_] = targets.contain(np.arange(len(lists))[:, None], lists) & (lists >= 0)
    captured: Values = (held * prices[lists]).sum(1) * (len(lists) / prices[targets.items].sum())
    return captured


def novelties(lists: Lists, counts: NDArray[np.int64], num_users: int) -> Values:
    """(R,) mean of -log2(users of the item / users) over each list, in bits; NaN for an empty list.

    The self-information of Zhou et al., "Solving the apparent diversity-accuracy dilemma of recommender systems", PNAS
    2010, which Elliot's `EFD` weighs by rank. An item without users counts as one of a single user.
    """
    bits = -np.log2(np.maximum(counts, 1) / max(1, num_users))
    return _means(bits, lists)


def diversities(lists: Lists, kinds: NDArray[np.integer]) -> Values:
    """(R,) intra-list diversity: the mean distance of a list's pairs of items; NaN for a list of fewer than two.

    Ziegler et al., "Improving recommendation lists through topic diversification", WWW 2005, as the mean of pairs
    (Castells et al., 2015). The distance is 1 - Jaccard index of the items' ids in a column, so of items with one id
    each 0 if the ids are equal, else 1. An item without an id is at distance 1 from any other.
    """
    found = np.full(len(lists), np.nan)
    length, width = lists.shape[1], kinds.shape[1]
    above = np.triu_indices(length, 1)
    step = max(1, COMPARED // max(1, length * length * width * width))
    for start in range(0, len(lists), step):
        part = lists[start : start + step]
        ids = np.where((part >= 0)[:, :, None], kinds[part], 0)
        equal = (ids[:, :, None, :, None] == ids[:, None, :, None, :]) & (ids[:, :, None, :, None] != 0)
        common = equal.any(4).sum(3)
        sizes = (ids != 0).sum(2)
        union = sizes[:, :, None] + sizes[:, None, :] - common
        distance = 1 - common / np.maximum(union, 1)
        there = (part >= 0)[:, :, None] & (part >= 0)[:, None, :]
        pairs, distances = there[:, above[0], above[1]], distance[:, above[0], above[1]]
        counted = pairs.sum(1)
        has = counted > 0
        found[start : start + step][has] = (distances * pairs).sum(1)[has] / counted[has]
    return found


def popularity_lift(lists: Lists, counts: NDArray[np.int64], history_popularity: Values) -> float:
    """Mean popularity of the users' lists, divided by that of their histories, minus 1; NaN without either.

    Abdollahpouri et al., "The connection between popularity bias, calibration, and fairness in recommendation", RecSys
    2020. Above 0, recommendations are more popular than what users choose. Users without a history do not count.
    """
    of_lists = _means(counts.astype(np.float64), lists)
    both = ~(np.isnan(of_lists) | np.isnan(history_popularity))
    chosen = float(history_popularity[both].mean()) if both.any() else 0.0
    return float(of_lists[both].mean()) / chosen - 1 if chosen > 0 else float("nan")


def exposure(lists: Lists, counts: NDArray[np.int64], first_item: int = 0) -> Exposure:
    """Shares of the lists' places that items of each popularity take.

    From the most popular item on, the items are cut into parts that hold a tenth of the interactions each: an item
    belongs to the part in which its first interaction lies. The last part holds the items without any interaction.
    Reserved ids below `first_item` are no items.
    """
    order = np.argsort(-counts[first_item:], kind="stable") + first_item
    of_items = np.full(len(counts), PARTS)
    total = int(counts[order].sum())
    before = np.cumsum(counts[order]) - counts[order]
    part = np.minimum(before * PARTS // max(1, total), PARTS - 1)
    of_items[order] = np.where(counts[order] > 0, part, PARTS)
    places = np.bincount(of_items[lists[lists >= 0]], minlength=PARTS + 1)
    items = np.bincount(of_items[first_item:], minlength=PARTS + 1)
    return Exposure(tuple((places / max(1, places.sum())).tolist()), tuple(items.tolist()))


def history_popularity(history: Interactions, users: NDArray[np.integer], counts: NDArray[np.int64]) -> Values:
    """(R,) mean popularity of the items in the histories of some users; NaN for an empty one."""
    rows, items = history.of(users)
    sizes = np.bincount(rows, minlength=len(users))
    sums = np.bincount(rows, weights=counts[items], minlength=len(users))
    return np.where(sizes > 0, sums / np.maximum(sizes, 1), np.nan)


def _means(of_items: Values, lists: Lists) -> Values:
    """(R,) mean value of the items of each list; NaN for an empty one."""
    there = lists >= 0
    sizes = there.sum(1)
    sums = np.where(there, of_items[lists], 0.0).sum(1)
    return np.where(sizes > 0, sums / np.maximum(sizes, 1), np.nan)
