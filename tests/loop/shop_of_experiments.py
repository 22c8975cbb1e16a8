"""Journals of experiments: by hand, and simulated with a known effect."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import sqlalchemy as sa

from recspec.loop import Event, Experiment, Exposure, Journal, assign
from recspec.loop.assignment import DAY_US
from recspec.loop.interleaving import interleave
from recspec.loop.journal import assignment

DEFINITION = {
    "name": "home",
    "start": "2026-12-01",
    "days": 4,
    "window_days": 1,
    "users": 1_000,
    "variants": [{"name": "control", "share": 0.5, "model": "ease"}, {"name": "new", "share": 0.5, "model": "sasrec"}],
    "metrics": [{"name": "clicks", "event": "click"}, {"name": "ctr", "event": "click", "per": "exposure"}],
}


def experiment(**changes: object) -> Experiment:
    return Experiment.model_validate(DEFINITION | changes)


def assigned(journal: Journal, *rows: tuple[str, str, int], name: str = "home") -> None:
    """Record (subject, variant, first exposure)."""
    values = [
        {"experiment": name, "subject": subject, "variant": variant, "first_at": at, "first_seq": number}
        for number, (subject, variant, at) in enumerate(rows)
    ]
    journal.write(lambda connection: connection.execute(sa.insert(assignment), values))


def event(subject: str, at: int, kind: str = "click", **more: object) -> Event:
    number = f"{subject}.{kind}.{at}.{more.get('request_id')}.{more.get('item')}"
    return Event(number, subject, kind, more.pop("item", "i1"), more.pop("value", None), at, at, **more)  # type: ignore[arg-type]


def answer(request: str, subject: str, at: int, items: list[str] | None = None, **policy: object) -> Exposure:
    shown = ["i1", "i2"] if items is None else items
    return Exposure(request, subject, at, "m", "1", policy, 0, shown, 200, experiment="home")


def simulated(journal: Journal, found: Experiment, users: int, lift: float, seed: int = 0) -> None:
    """Users who enter over the days of the experiment, and click `lift` times as often on what `new` shows.

    A user's clicks before and after go with a liking of their own. Interleaved lists hold 4 items of either model.
    """
    rng = np.random.default_rng(seed)
    events: list[Event] = []
    answers: list[Exposure] = []
    rows: list[tuple[str, str, int]] = []
    for number in range(users):
        subject, liking = f"u{number}", rng.gamma(2, 0.1)
        variant = assign([found], subject)[found.name]
        first = found.start_us + number * int(found.days * DAY_US) // users
        rows.append((subject, variant, first))
        events += [event(subject, first - 1 - place) for place in range(rng.poisson(5 * liking))]
        for place in range(1 + rng.poisson(2)):
            request, at = f"r{number}.{place}", first + place * 1_000
            items, teams = interleave([f"a{n}" for n in range(4)], [f"b{n}" for n in range(4)], rng, 8)
            policy = {"teams": teams} if found.interleave else {}
            shown = answer(request, subject, at, items, milliseconds=float(rng.exponential(9)), **policy)
            answers.append(replace(shown, experiment=found.name))
            for item, team in zip(items, teams, strict=True):
                better = team == 1 if found.interleave else variant == "new"
                if rng.random() < liking / 4 * (lift if better else 1):
                    events.append(event(subject, at + 1, item=item, request_id=request))
    assigned(journal, *rows, name=found.name)
    journal.store(events)
    journal.store((), answers)
