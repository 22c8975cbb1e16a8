"""Lists that were drawn by chance and shown, as a journal holds them, with the clicks: data of off-policy estimates.

Shapes: N lists, K slots, G users.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from recspec.base.errors import DataError, how_many
from recspec.loop.events import IMPRESSION
from recspec.loop.exploration import PLACKETT_LUCE, Exploration
from recspec.loop.journal import Journal, event, exposure

MOST_LISTS = 100_000
"""The newest answers that are read."""
MOST_SLOTS = 200
OPEN, NO_USER, NOT_SHOWN = "window still open", "no user", "no impression confirms it"
NOT_DRAWN, UNKNOWN, EMPTY = "nothing drawn by chance", "chances not known", "empty"
LEARNED, NO_REQUEST, DAMAGED = "a model has learned from its clicks", "request too large to log", "damaged"


@dataclass(frozen=True, eq=False)
class ShownLists:
    """Lists in the order of their answers."""

    users: NDArray[np.int64]
    """(N,) number of the user in `subjects`."""
    subjects: tuple[str, ...]
    """(G,) raw ids of users."""
    items: NDArray[np.int64]
    """(N, K) number of the item in `names`; -1 after the end of a list."""
    names: tuple[str, ...]
    """Raw ids of items."""
    chances: NDArray[np.float64]
    """(N, K) of the items, given those above; 1 after the end of a list."""
    clicks: NDArray[np.float64]
    """(N, K) 1 if the item was acted on, else 0."""
    history_seq: tuple[int, ...]
    """(N,) the newest event that each answer saw."""
    versions: tuple[str, ...]
    """(N,) of the models."""
    requests: tuple[str, ...]
    """(N,) what each answer was asked for beside the user, as a JSON object."""
    policies: tuple[Exploration | None, ...]
    """(N,) how each list was drawn; None if another system drew it."""
    left_out: Mapping[str, int]
    """Reason -> answers."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(N,) items of each list."""
        return np.asarray((self.items >= 0).sum(1), np.int64)

    @property
    def digest(self) -> str:
        """A digest of what was shown and clicked."""
        made = hashlib.sha256(json.dumps([self.subjects, self.names]).encode())
        for each in (self.users, self.items, self.chances, self.clicks):
            made.update(np.ascontiguousarray(each).tobytes())
        return made.hexdigest()


def read_shown_lists(journal: Journal, *, act: str, window: int, at: int, after: int = 0) -> ShownLists:
    """The newest lists whose window is closed, each with the acts on its items.

    An act counts if it names the answer, its user and an item of it. If impressions confirm answers, others were not
    shown.

    Args:
        journal: An open journal.
        act: Type of the events that are the reward, such as click.
        window: Microseconds after an answer in which an act counts.
        at: Time in microseconds since 1970.
        after: Newest event that a model has learned; it has learned the clicks on lists that are older.

    Raises:
        DataError: if there is none, with the reasons.
    """
    own = exposure.c
    newest = journal.scalar(sa.select(own.seq).order_by(own.seq.desc()).offset(MOST_LISTS).limit(1)) or 0
    asked = sa.select(
        own.request_id,
        own.subject,
        own.served_at,
        own.version,
        own.policy,
        own.history_seq,
        own["items"].label("shown"),
        own.propensities,
    )
    rows = journal.rows(asked.where(own.seq > newest).order_by(own.seq))
    joined = sa.join(exposure, event, sa.and_(event.c.request_id == own.request_id, event.c.subject == own.subject))
    told = sa.select(own.request_id, event.c.item).select_from(joined).where(own.seq > newest).distinct()
    acts = {*map(tuple, journal.rows(told.where(event.c.type == act, event.c.occurred_at - own.served_at <= window)))}
    confirmed = {row.request_id for row in journal.rows(told.where(event.c.type == IMPRESSION))}
    left_out, kept = Counter[str](), list[_List]()
    for row in rows:
        found = _read(row)
        if row.served_at + window > at:
            found = OPEN
        elif row.history_seq < after:
            found = LEARNED
        elif row.subject is None:
            found = NO_USER
        elif confirmed and row.request_id not in confirmed:
            found = NOT_SHOWN
        if isinstance(found, str):
            left_out[found] += 1
        else:
            kept.append(found)
    if not kept:
        raise DataError(f"{journal.shown}: holds no list that was drawn by chance and shown{_reasons(left_out)}")
    return _arrays(kept, acts, left_out)


@dataclass(frozen=True, slots=True)
class _List:
    row: Any
    items: Sequence[str]
    chances: Sequence[float]
    policy: Mapping[str, Any]


def _read(row: Any) -> _List | str:
    """A list, or why it is none."""
    try:
        items, policy = json.loads(row.shown), json.loads(row.policy)
        chances = None if row.propensities is None else json.loads(row.propensities)
    except ValueError:
        return DAMAGED
    if not isinstance(policy, dict) or not isinstance(items, list) or not all(isinstance(x, str) for x in items):
        return DAMAGED
    if not items:
        return EMPTY
    if policy.get("name") == "greedy":
        return NOT_DRAWN
    if chances is None:
        return UNKNOWN
    if not isinstance(chances, list) or len(chances) != len(items) or not all(map(_is_chance, chances)):
        return DAMAGED
    if all(each == 1 for each in chances):
        return NOT_DRAWN
    request = policy.get("request")
    if request is None and "answered_by" in policy:  # by the server, which logs no large one
        return NO_REQUEST
    if len(set(items)) < len(items) or len(items) > MOST_SLOTS or not isinstance(request, dict | None):
        return DAMAGED
    return _List(row, items, chances, policy)


def _is_chance(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1 and math.isfinite(value)


def _arrays(kept: Sequence[_List], acts: set[tuple[Any, ...]], left_out: Mapping[str, int]) -> ShownLists:
    users, names = dict[str, int](), dict[str, int]()
    shape = (len(kept), max(len(each.items) for each in kept))
    items, chances, clicks = np.full(shape, -1, np.int64), np.ones(shape), np.zeros(shape)
    numbers = np.zeros(len(kept), np.int64)
    for place, each in enumerate(kept):
        numbers[place] = users.setdefault(each.row.subject, len(users))
        length = len(each.items)
        items[place, :length] = [names.setdefault(item, len(names)) for item in each.items]
        chances[place, :length] = each.chances
        clicks[place, :length] = [(each.row.request_id, item) in acts for item in each.items]
    return ShownLists(
        numbers,
        tuple(users),
        items,
        tuple(names),
        chances,
        clicks,
        tuple(each.row.history_seq for each in kept),
        tuple(each.row.version for each in kept),
        tuple(json.dumps(each.policy.get("request") or {}, sort_keys=True) for each in kept),
        tuple(Exploration.of(each.policy) if each.policy.get("name") == PLACKETT_LUCE else None for each in kept),
        dict(left_out),
    )


def _reasons(left_out: Mapping[str, int]) -> str:
    told = [f"{how_many(count, 'answer')} left out: {why}" for why, count in sorted(left_out.items())]
    return f"; {'; '.join(told)}" if told else "; serve with --journal and --explore first"
