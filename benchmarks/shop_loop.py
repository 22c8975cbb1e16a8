"""A simulated shop: click rate of a model updated every 15 minutes, against one that is frozen and one trained hourly.

    python benchmarks/shop_loop.py WORK --out benchmarks/results/shop_loop.json
    python benchmarks/shop_loop.py WORK --quick

The truth is a choice model. User u's utility of item i at time t is

    x = u.v + q + FRESH exp(-age / FADE)

with u, v normal vectors and q the item's quality. On a visit, the user takes one item of the whole shop by search, with
probability proportional to exp(x), and looks at a list of 10: item i of it is clicked with probability
exp(x_i) / (exp(OUTSIDE) + sum over the list of exp(x_j)). Items come out all the time and fade within hours, so what a
model does not know yet is what would be clicked. The three shops have the same users, visits, searches and draws; only
their lists differ. All leave out items that the user took before.

The loop is the real one: events go into a journal, `Updater` makes and judges versions, `recommend` makes the lists. A
version answers from the minute after its update on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

import recspec as rs
from _side_by_side import where_and_when
from recspec.bundle import folder as bundle
from recspec.inference import Predictor, RecommendRequest, build_pipeline
from recspec.loop import Journal, JournalSettings, Updater, read_events
from recspec.training import Learning

DIM, FRESH, FADE, OUTSIDE = 8, 2.5, 90.0, 5.0
"""Numbers of a vector; weight and minutes of freshness; utility of leaving."""
START = 1_700_000_000
"""Of the simulation, in seconds since 1970."""
BEFORE = 300
"""Minutes of searches before it, on which the first model is trained."""
K, ASKED = 10, 60
SECOND = 1_000_000


@dataclass
class Shop:
    """Users, items and visits, and the truth about them."""

    minutes: int
    visits: int
    users: int
    seed: int

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        total = BEFORE + self.minutes
        self.born = np.sort(rng.uniform(-BEFORE, self.minutes, total))  # minutes; about one item comes out in each
        self.user_vectors = rng.normal(0, 1, (self.users, DIM)) * 0.5
        self.item_vectors = rng.normal(0, 1, (total, DIM))
        self.quality = rng.normal(0, 0.5, total)
        activity = rng.pareto(1.5, self.users) + 0.2
        self.activity = activity / activity.sum()

    def utilities(self, users: NDArray[np.int64], minute: int) -> NDArray[np.float64]:
        """(V, N) of the items that are out; -inf of others."""
        age = minute - self.born
        x = self.user_vectors[users] @ self.item_vectors.T + self.quality
        x += np.where(age >= 0, FRESH * np.exp(-np.maximum(age, 0) / FADE), -np.inf)
        return x

    def visits_of(self, minute: int) -> tuple[NDArray[np.int64], NDArray[np.float64], np.random.Generator]:
        """Users of a minute's visits, and their utilities."""
        rng = np.random.default_rng([self.seed, minute + BEFORE])
        count = self.visits // self.minutes
        users = rng.choice(self.users, count, p=self.activity)
        return users, self.utilities(users, minute), rng


def drawn(x: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    """One item of each row, with probability proportional to exp(x)."""
    return np.asarray((x + rng.gumbel(size=x.shape)).argmax(1))


@dataclass
class World:
    """One shop with its model, and what happened in it."""

    name: str
    shop: Shop
    predictor: Predictor
    at_events: Callable[[list[dict[str, object]], int], None] = lambda _events, _minute: None
    """Takes the events of a minute."""
    at_minute: Callable[[World, int], None] = lambda _world, _minute: None
    """May put another model in place."""
    taken: list[set[int]] = field(default_factory=list)
    clicks: list[NDArray[np.bool_]] = field(default_factory=list)
    num_events: int = 0

    def live(self, minute: int, users: NDArray[np.int64], x: NDArray[np.float64], rng: np.random.Generator) -> None:
        """One minute: searches, lists and clicks."""
        searched = drawn(x, rng)
        seconds = START + 60 * minute + np.sort(rng.uniform(0, 60, len(users)))
        chance, which = rng.random(len(users)), rng.random(len(users))
        lists = self.lists(users)
        clicked = np.zeros(len(users), bool)
        events: list[dict[str, object]] = []

        def event(place: int, item: int, kind: str) -> None:
            user = int(users[place])
            self.taken[user].add(item)
            events.append({"user": f"u{user}", "item": f"i{item}", "type": kind, "time": float(seconds[place])})

        for place, items in enumerate(lists):
            event(place, int(searched[place]), "search")
            weights = np.exp(x[place, items])
            reached = np.cumsum(weights) / (np.exp(OUTSIDE) + weights.sum())
            if len(items) and chance[place] < reached[-1]:
                clicked[place] = True
                event(place, items[int(np.searchsorted(reached, which[place] * reached[-1]))], "click")
        self.clicks.append(clicked)
        self.num_events += len(events)
        self.at_events(events, minute)

    def lists(self, users: NDArray[np.int64]) -> list[list[int]]:
        """Ten items for each user, without those that the user took before."""
        names = tuple(f"u{user}" for user in users.tolist())
        answers = self.predictor.recommend(RecommendRequest(users=names, k=ASKED, include_seen=True))
        found = []
        for user, answer in zip(users.tolist(), answers, strict=True):
            items = (int(str(each.item)[1:]) for each in answer.items)
            found.append([item for item in items if item not in self.taken[user]][:K])
        return found


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """The three shops, side by side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path, help="folder to write")
    parser.add_argument("--model", default="ease")
    parser.add_argument("--set", nargs="*", default=[], help="settings of the update")
    parser.add_argument("--minutes", type=int, default=300)
    parser.add_argument("--visits", type=int, default=135_000)
    parser.add_argument("--users", type=int, default=4_000)
    parser.add_argument("--journal", help="by default a file of SQLite in WORK")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="an hour and 9,000 visits of 500 users")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(argv)
    if asked.quick:
        asked.minutes, asked.visits, asked.users = 60, 9_000, 500
    asked.work.mkdir(parents=True, exist_ok=True)
    report = {**where_and_when(), **{name: str(of) for name, of in vars(asked).items()}, **simulate(asked)}
    print(json.dumps({name: report[name] for name in ("events", "click_rate", "against", "loop")}, indent=2))
    if asked.out:
        asked.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def simulate(asked: argparse.Namespace) -> dict[str, Any]:
    """Run the shop three times, minute by minute."""
    started, shop, work = time.monotonic(), Shop(asked.minutes, asked.visits, asked.users, asked.seed), asked.work
    first, taken = searches_before(shop)
    run = trained(asked.model, [first], work / "first")
    settings = dict(each.split("=", 1) for each in asked.set)
    with Journal(asked.journal or f"sqlite:///{work / 'journal.db'}") as journal:
        loop = Loop(run, journal, settings)
        hourly = Hourly(asked.model, first, work)
        worlds = [
            World("frozen", shop, Predictor.open(run / "bundle", device="cpu")),
            World("hourly", shop, Predictor.open(run / "bundle", device="cpu"), hourly.note, hourly.look),
            World("loop", shop, Predictor.open(run / "bundle", device="cpu"), loop.note, loop.look),
        ]
        for world in worlds:
            world.taken = [set(each) for each in taken]
        users = []
        for minute in range(shop.minutes):
            for world in worlds:
                world.at_minute(world, minute)
                own, x, rng = shop.visits_of(minute)
                world.live(minute, own, x, rng)
            users.append(own)
            if minute % 15 == 14:
                print(minute + 1, {each.name: round(float(each.clicks[-1].mean()), 3) for each in worlds}, flush=True)
    clicks = {each.name: np.concatenate(each.clicks) for each in worlds}
    everyone = np.concatenate(users)
    return {
        "events": {each.name: each.num_events for each in worlds},
        "click_rate": {name: float(each.mean()) for name, each in clicks.items()},
        "against": {name: paired(clicks["loop"], clicks[name], everyone, shop.users) for name in ("frozen", "hourly")},
        "loop": loop.told(),
        "hourly_seconds": hourly.seconds,
        "seconds": time.monotonic() - started,
    }


def paired(
    ours: NDArray[np.bool_], theirs: NDArray[np.bool_], users: NDArray[np.int64], count: int
) -> dict[str, float]:
    """The difference of click rates, and its standard error with users as units."""
    difference = ours.astype(float) - theirs
    mean = difference.mean()
    sums = np.bincount(users, difference - mean, count)
    error = float(np.sqrt((sums**2).sum()) / len(users))
    return {"difference": float(mean), "standard_error": error, "errors": float(mean / error) if error else 0.0}


def searches_before(shop: Shop) -> tuple[pa.Table, list[set[int]]]:
    """What users took before the simulation, a tenth as often."""
    rows: dict[str, list[object]] = {"user_id": [], "item_id": [], "timestamp": []}
    taken: list[set[int]] = [set() for _ in range(shop.users)]
    for minute in range(-BEFORE, 0):
        users, x, rng = shop.visits_of(minute)
        users, x = users[: len(users) // 4], x[: len(users) // 4]
        if not np.isfinite(x).any():
            continue
        for user, item in zip(users.tolist(), drawn(x, rng).tolist(), strict=True):
            taken[user].add(item)
            rows["user_id"].append(f"u{user}")
            rows["item_id"].append(f"i{item}")
            rows["timestamp"].append(float(START + 60 * minute))
    return pa.table(rows), taken


def trained(model: str, parts: list[pa.Table], folder: Path) -> Path:
    """A run on some events, all of them for training."""
    folder.mkdir(parents=True)
    pa_csv.write_csv(pa.concat_tables(parts), folder / "events.csv")
    rs.prepare(folder / "events.csv", folder / "data", split="none", num_negatives=0, progress=False)
    rs.train(model, folder / "data", folder / "run", progress=False)
    return folder / "run"


class Hourly:
    """Prepares and trains anew each hour."""

    def __init__(self, model: str, first: pa.Table, work: Path) -> None:
        self.model, self.parts, self.work, self.seconds = model, [first], work, list[float]()

    def note(self, events: list[dict[str, object]], _minute: int) -> None:
        columns = {"user_id": "user", "item_id": "item", "timestamp": "time"}
        self.parts.append(pa.table({name: [each[of] for each in events] for name, of in columns.items()}))

    def look(self, world: World, minute: int) -> None:
        if minute % 60 == 1 and minute > 1:
            began = time.monotonic()
            run = trained(self.model, self.parts[:-1], self.work / f"hourly-{minute // 60}")
            world.predictor = Predictor.open(run, device="cpu")
            self.seconds.append(round(time.monotonic() - began, 3))


class Loop:
    """Journals events, and makes a version of them every 15 minutes."""

    def __init__(self, run: Path, journal: Journal, settings: dict[str, Any]) -> None:
        self.run, self.journal, self.now = run, journal, START
        self.settings = JournalSettings.model_validate(settings)
        self.updates: list[dict[str, Any]] = []

    def note(self, events: list[dict[str, object]], _minute: int) -> None:
        self.journal.store(read_events(events, self.now * SECOND).events)

    def look(self, world: World, minute: int) -> None:
        self.now = START + 60 * (minute + 1)
        if minute % 15 or not minute:
            return
        began = time.monotonic()
        updater = Updater(
            self.run,
            self.journal,
            self.settings,
            learning=Learning(self.settings, build_pipeline),
            clock=lambda: self.now * SECOND,
        )
        made = updater.once()
        world.predictor = Predictor.open(bundle.find(self.run), device="cpu")
        world.predictor.recommend(["u0"], k=K)
        seconds = time.monotonic() - began
        of_gate = None if made.judgement is None else made.judgement.to_dict()
        parts = {} if made.updated is None else dict(made.updated.seconds)
        told = {"minute": minute, "state": made.state, "seconds": round(seconds, 3), "parts": parts, "gate": of_gate}
        self.updates.append(told)

    def told(self) -> dict[str, Any]:
        """What became of the updates, and the seconds from the newest event to an answer of the new version."""
        seconds = [each["seconds"] for each in self.updates]
        states = [each["state"] for each in self.updates]
        return {
            "updates": {name: states.count(name) for name in dict.fromkeys(states)},
            "seconds_mean": round(float(np.mean(seconds)), 2),
            "seconds_most": max(seconds),
            "each": self.updates,
        }


if __name__ == "__main__":
    main()
