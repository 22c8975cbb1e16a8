"""Lists drawn by chance, with the exact chance of each shown item: Plackett-Luce over a pool, with a floor.

For each slot k over the remaining pool R_k, with scores s in units of the pool's standard deviation:

    p_k(a) = (1 - floor) exp(s_a / T) / sum over R_k of exp(s / T) + floor / |R_k|

p_k is the chance of the item at slot k given those above it; the chance of a list is their product. A model's scores
may be of any scale, so the temperature T is a number of standard deviations: 1 draws almost at random (21 % of a list
of 10 is the best 10 of 200 normal scores), .5 keeps half of it, .25 keeps 80 %, too few surprises to learn from.

Shapes: N lists, K slots, P items of a pool.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recspec.base.errors import DataError, SettingsError

PLACKETT_LUCE = "plackett-luce"
GREEDY = "greedy"
"""Name of the policy that shows the best items; each has the chance 1."""
POOL = 200
"""Items that may be shown; the floor gives each of them a chance of at least floor / 200."""
MOST_POOL = 10_000

Places = NDArray[np.int64]
Chances = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Exploration:
    """How lists are drawn."""

    temperature: float = 0.5
    """In standard deviations of the pool's scores."""
    floor: float = 0.05
    """Share of each slot that is drawn evenly from the remaining pool."""
    pool: int = POOL
    """The best items of a request that may be shown."""
    last: int | None = None
    """Only so many slots at the end of a list are drawn, those above hold the best items; None: all slots."""

    def __post_init__(self) -> None:
        problems = []
        if not (math.isfinite(self.temperature) and 0.001 <= self.temperature <= 1_000):
            problems.append(f"temperature: found {self.temperature!r}; expected 0.001 to 1,000")
        if not 0 <= self.floor <= 1:
            problems.append(f"floor: found {self.floor!r}; expected 0 to 1")
        if not 1 <= self.pool <= MOST_POOL:
            problems.append(f"pool: found {self.pool!r}; expected 1 to {MOST_POOL:,} items")
        if self.last is not None and self.last < 1:
            problems.append(f"last: found {self.last!r}; expected at least 1 slot")
        SettingsError.refuse("exploration", problems)

    def to_dict(self) -> dict[str, object]:
        """The policy as the journal keeps it with each answer."""
        return {"name": PLACKETT_LUCE, **asdict(self)}

    @classmethod
    def of(cls, policy: Mapping[str, Any]) -> Exploration:
        """The policy that the journal kept.

        Raises:
            DataError: if it is of another kind.
        """
        if policy.get("name") != PLACKETT_LUCE:
            raise DataError(f"policy: found {str(policy.get('name'))[:80]!r}; expected {PLACKETT_LUCE!r}")
        try:
            last = policy.get("last")
            return cls(
                float(policy["temperature"]),
                float(policy["floor"]),
                int(policy["pool"]),
                None if last is None else int(last),
            )
        except (KeyError, TypeError, ValueError, OverflowError, SettingsError) as error:
            raise DataError(f"policy: {str(dict(policy))[:200]} can't be read: {error}") from None


def generator(seed: str) -> np.random.Generator:
    """The random numbers of a seed; a list is drawn from its uniform numbers alone."""
    return np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:16], "big")))


def explore(
    scores: ArrayLike,
    ids: Sequence[int] | Sequence[str] | NDArray[Any],
    k: int,
    temperature: float,
    floor: float,
    rng: np.random.Generator,
    *,
    pool: int = POOL,
    last: int | None = None,
) -> tuple[Places, Chances]:
    """Draw a list.

    Args:
        scores: Score of each candidate. One that is not finite is no candidate.
        ids: Their ids. Equal scores stand in the order of ids, so the order of candidates changes nothing.
        k: Length of the list; shorter with fewer candidates.
        temperature: As `Exploration`, like the other settings.
        floor: Share of even draws.
        rng: `generator(seed)`; with the same seed and scores, the list is the same.
        pool: How many of the best candidates may be shown. Of a union of models' candidates, give its size.
        last: Number of drawn slots; None for all.

    Returns:
        (K,) places of the shown candidates among `scores`, from the top, and (K,) the chance of each given those above.
    """
    values = np.asarray(scores, np.float64)
    order = pool_of(values, ids, pool)
    size = len(order)
    shown = min(k, size)
    fixed = 0 if last is None else max(0, shown - last)  # the best items, in their order
    if fixed == shown:
        return order[:shown], np.ones(shown)
    own = values[order] - values[order[0]]
    away = own - own.sum() / size
    std = math.sqrt(float(away @ away) / size)
    logits = own * 0.0 if std <= _rounding(values[order[0]]) else own / (std * temperature)
    uniform = rng.random(size + 2 * shown)
    # Gumbel noise sorts items as repeated draws from the softmax do. What an even draw takes out does not depend on
    # the noise, so the others still stand in the order of such draws.
    noisy = np.log(np.maximum(-np.log1p(-uniform[:size]), 1e-300)) - logits
    by_noise = iter(np.argsort(noisy, kind="stable").tolist())
    coins, even = uniform[size : size + shown].tolist(), uniform[size + shown :].tolist()
    chosen, taken = list(range(fixed)), set(range(fixed))
    for slot in range(fixed, shown):
        if coins[slot] < floor:
            one = int(even[slot] * (size - slot))  # of those not taken
            for each in sorted(taken):
                one += each <= one
        else:
            one = next(each for each in by_noise if each not in taken)
        taken.add(one)
        chosen.append(one)
    return order[chosen], _chances(logits, chosen, fixed, floor)


class ListDraw:
    """Draws the lists of one request by a policy and a seed, for `RecommendRequest.draw`."""

    def __init__(self, policy: Exploration, seed: str) -> None:
        self.policy, self.pool, self._rng = policy, policy.pool, generator(seed)

    def __call__(self, scores: NDArray[Any], ids: NDArray[Any], k: int) -> tuple[Places, Chances]:
        own = self.policy
        return explore(scores, ids, k, own.temperature, own.floor, self._rng, pool=own.pool, last=own.last)


def _chances(logits: Chances, chosen: list[int], fixed: int, floor: float) -> Chances:
    """(K,) the chance of each chosen item at its slot; the first `fixed` ones are certain."""
    # log of the sum of exp(s / T) over R_k, from the last slot up: subtracting from the top down would cancel
    rest = logits.copy()
    rest[chosen] = -np.inf
    best = float(rest.max())
    total = best + math.log(float(np.exp(rest - best).sum())) if best > -np.inf else best
    chances, size = np.ones(len(chosen)), len(logits)
    for slot in range(len(chosen) - 1, fixed - 1, -1):
        own = float(logits[chosen[slot]])
        high, low = (own, total) if own > total else (total, own)
        total = high + math.log1p(math.exp(low - high))
        chances[slot] = (1 - floor) * math.exp(own - total) + floor / (size - slot)
    return chances


def pool_of(scores: NDArray[np.float64], ids: Sequence[int] | Sequence[str] | NDArray[Any], pool: int) -> Places:
    """(P,) places of the best candidates, the best first; equal scores in the order of ids."""
    places = np.flatnonzero(np.isfinite(scores))
    if len(places) > pool:
        least = np.partition(scores[places], len(places) - pool)[len(places) - pool]
        places = places[scores[places] >= least]
    own = scores[places]
    order = np.argsort(-own, kind="stable")
    down = own[order]
    if (down[1:] == down[:-1]).any():
        order = np.lexsort((np.asarray(ids)[places], -own))
    return np.asarray(places[order[:pool]])


def slot_chances(scores: NDArray[np.float64], places: Places, policy: Exploration) -> Iterator[Chances]:
    """For each slot (N, P) the chance of every item of the pool under `policy`, given the items shown above.

    The chance of a shown item is 0 if it is not in the pool: the policy never shows it.

    Args:
        scores: (N, P) of the pools' items, of equal ones in the order of `pool_of`; -inf is none.
        places: (N, K) of the shown items in the pool; -1 for an item outside of it. All lists have K slots.
        policy: The settings of the draw; its `pool` is not looked at.
    """
    remaining = np.isfinite(scores)
    logits = np.where(remaining, _standardised(scores, remaining) / policy.temperature, -np.inf)
    lists, slots = places.shape
    rows = np.arange(lists)
    fixed = 0 if policy.last is None else max(0, slots - policy.last)
    for slot in range(slots):
        count = remaining.sum(1, keepdims=True)
        own = np.where(remaining, logits, -np.inf)
        best = own.max(1, keepdims=True, initial=-np.inf)
        best[count == 0] = 0.0
        if slot < fixed:
            chances = np.zeros_like(own)
            chances[rows, np.where(remaining, scores, -np.inf).argmax(1)] = 1.0
        else:
            chances = np.exp(own - best)
            chances *= (1 - policy.floor) / np.maximum(chances.sum(1, keepdims=True), 1e-300)
            chances += remaining * (policy.floor / np.maximum(count, 1))
        chances[count[:, 0] == 0] = 0.0
        yield chances
        here = places[:, slot] >= 0
        remaining[rows[here], places[here, slot]] = False


def _standardised(scores: NDArray[np.float64], present: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(N, P) scores less the best of their pool, in its standard deviations; 0 where all are equal."""
    count = np.maximum(present.sum(1, keepdims=True), 1)
    best = np.where(present, scores, -np.inf).max(1, keepdims=True, initial=-np.inf)
    best[~np.isfinite(best)] = 0.0
    own = np.where(present, scores - best, 0.0)
    away = np.where(present, own - own.sum(1, keepdims=True) / count, 0.0)
    std = np.sqrt((away**2).sum(1, keepdims=True) / count)
    return np.asarray(np.where(std <= _rounding(best), 0.0, own / np.maximum(std, 1e-300)))


def _rounding(best: Any) -> Any:
    """A spread of scores that is none: their rounding."""
    return 1e-12 * np.abs(best)
