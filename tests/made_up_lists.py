"""A simulated server that draws lists and logs them, and users who read from the top until they click."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recspec.base.files import manifest
from recspec.inference import Predictor, RecommendRequest
from recspec.loop import Event, Exploration, Exposure, Histories, Journal, explore, generator, slot_chances

START, MINUTE = 1_700_000_000_000_000, 60_000_000
POLICY = Exploration(1.0, 0.1)
USERS = [f"c{number}" for number in range(30)]


def likes(user: str, item: str) -> float:
    """Chance that a user who reads an item clicks it."""
    return 0.4 if int(item[1:]) % 3 == int(user[1:]) % 3 else 0.1


def list_chances(scores: NDArray[np.float64], places: NDArray[np.int64], policy: Exploration) -> NDArray[np.float64]:
    """(N, K) chance under `policy` of each shown item given those above; arguments as `slot_chances`."""
    rows = np.arange(len(places))
    found = [
        np.where(places[:, slot] >= 0, chances[rows, places[:, slot]], 0.0)
        for slot, chances in enumerate(slot_chances(scores, places, policy))
    ]
    return np.stack(found, axis=1) if found else np.zeros(places.shape)


class Shop:
    """A server that draws lists and logs them, and users who read from the top until they click."""

    def __init__(self, journal: Journal, predictor: Predictor, policy: Exploration = POLICY) -> None:
        self.journal, self.predictor, self.policy = journal, predictor, policy
        self.rng, self.shown, self.clicks = np.random.default_rng(0), list[Exposure](), list[Event]()
        self.version = f"0:{manifest.digest(predictor.bundle.folder)[:16]}"

    def pool(self, user: str, **request: object) -> tuple[list[str], np.ndarray]:
        live = Histories(self.journal, self.predictor).of([user])
        wanted = RecommendRequest((user,), k=self.policy.pool, **request)  # type: ignore[arg-type]
        found = self.predictor.recommend(wanted, live=live)[0].items
        return [str(each.item) for each in found], np.array([each.score for each in found])

    def show(self, user: str, k: int = 3, pools: dict[str, tuple[list[str], np.ndarray]] | None = None, **request):
        number = len(self.shown)
        if pools is None or user not in pools:
            names, scores = self.pool(user, **request)
            if pools is not None:
                pools[user] = names, scores
        else:
            names, scores = pools[user]
        own, name = self.policy, f"r{number}"
        places, chances = explore(
            scores, names, k, own.temperature, own.floor, generator(name), pool=own.pool, last=own.last
        )
        items = [names[place] for place in places]
        policy = {**own.to_dict(), "answered_by": "user", "request": {**request, "k": k}}
        at, newest = START + number, self.journal.newest_seq() if pools is None else 0
        size = min(len(names), own.pool)
        self.shown.append(
            Exposure(name, user, at, "shop", self.version, policy, newest, items, size, chances.tolist(), name)
        )
        for slot, item in enumerate(items):
            if self.rng.random() < likes(user, item):
                told = (f"e{number}", user, "click", item, None, at + MINUTE, at + MINUTE, name, slot + 1)
                self.clicks.append(Event(*told))
                break

    def store(self) -> None:
        self.journal.store(self.clicks, self.shown)


def values_of(shown: Exposure) -> dict[str, object]:
    return {name: getattr(shown, name) for name in Exposure.__slots__}


def simulated(journal: Journal, predictor: Predictor, count: int, k: int = 3, policy: Exploration = POLICY) -> Shop:
    shop, pools = Shop(journal, predictor, policy), dict[str, tuple[list[str], np.ndarray]]()
    for user in shop.rng.choice(USERS, count).tolist():
        shop.show(user, k, pools)
    return shop
