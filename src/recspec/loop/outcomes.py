"""What became of the users of an experiment: outcomes of each one, counted from a journal.

A user counts once, `window_days` after the first exposure, with the events of that window; so users are units that
don't depend on how often somebody looks. Their past is as long.

Shapes: N users whose window is closed, in the order of their first exposures.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from recspec.base.errors import DataError, how_many, listed
from recspec.loop.assignment import Experiment, Metric, position
from recspec.loop.events import IMPRESSION
from recspec.loop.interleaving import INTERLEAVED, TEAMS
from recspec.loop.journal import AT_ONCE, Journal, assignment, event, experiment, exposure, now_us
from recspec.loop.statistics import UnitValues, Values

MILLISECONDS, ERROR = "milliseconds", "error"
"""Keys of an exposure's policy: how long the answer took; and, of a fallback, which error it stands for."""
GROUPS = 20
"""Groups of users of a variant in which different items are counted."""
MOST_LISTS = 20_000
"""Answers of a group whose items are counted."""


@dataclass(frozen=True)
class Counted:
    """A metric of each user after the first exposure and before it, for as long."""

    after: UnitValues
    before: UnitValues


@dataclass(frozen=True)
class Outcomes:
    """What became of an experiment's users."""

    entered: NDArray[np.int64]
    """Variant of every user with an exposure, in the order of the first one."""
    variant: NDArray[np.int64]
    """Variant of each user whose window is closed (N,)."""
    metrics: Mapping[str, Counted]
    guardrails: Mapping[str, UnitValues] = field(default_factory=dict)
    """`errors`, `empty` and `latency`, as ratios of sums over answers; those that the journal can tell."""
    different_items: tuple[Values, ...] = ()
    """For each variant the number of different items in as many answers of each of `GROUPS` groups of users."""
    answers: int = 0
    """Answers of such a group."""
    clicks: NDArray[np.int64] | None = None
    """Of an interleaved experiment: clicks (N, 2) of each user on items of either variant."""
    notes: tuple[str, ...] = ()


def read_outcomes(journal: Journal, experiment: Experiment, at: int) -> Outcomes:
    """Count the outcomes of an experiment, as the journal holds them.

    Args:
        journal: An open journal.
        experiment: Its definition.
        at: Time in microseconds since 1970; users whose window closes later are left out.

    Raises:
        DataError: if nobody was assigned, or to variants that the experiment doesn't have.
    """
    return _Reading(journal, experiment, at).outcomes()


class _Reading:
    """The users of an experiment, and queries about them."""

    def __init__(self, journal: Journal, experiment: Experiment, at: int) -> None:
        self.journal, self.experiment, self.latest = journal, experiment, at - experiment.window_us
        names = [INTERLEAVED] if experiment.interleave else [each.name for each in experiment.variants]
        own = assignment.c
        asked = sa.select(own.subject, own.variant, own.first_at).where(own.experiment == experiment.name)
        rows = journal.rows(asked.where(own.first_at <= at).order_by(own.first_at, own.first_seq))
        if not rows:
            told = f"nobody was assigned to the experiment '{experiment.name}' yet"
            raise DataError(f"{journal.shown}: {told}; does a server with this journal read the file?")
        if strange := Counter(row.variant for row in rows if row.variant not in names):
            told = ", ".join(f"{how_many(count, 'user')} in '{name[:80]}'" for name, count in strange.most_common(10))
            expected = f"the file has {listed(names)}"
            raise DataError(f"{journal.shown}: experiment '{experiment.name}': {told}; {expected}")
        self.entered = np.array([names.index(row.variant) for row in rows])
        closed = [row.first_at <= self.latest for row in rows]
        self.variant = self.entered[closed]
        users = [row.subject for row, is_closed in zip(rows, closed, strict=True) if is_closed]
        self.place = {subject: place for place, subject in enumerate(users)}
        self.group = np.array([int(position("groups", subject) * GROUPS) for subject in users], int)
        self.moved = sum(row.variant != experiment.variant_of(row.subject) for row in rows)
        self.mine = sa.and_(own.experiment == experiment.name, own.first_at <= self.latest)

    def outcomes(self) -> Outcomes:
        notes = []
        if self.moved:
            told = f"{how_many(self.moved, 'user')} of {len(self.entered):,} got their variant under other shares or"
            notes.append(f"{told} another salt; they keep it, and users before and after the change differ")
        if self.experiment.interleave:
            return Outcomes(self.entered, self.variant, {}, clicks=self._team_clicks(), notes=tuple(notes))
        metrics = {each.name: self._counted(each) for each in self.experiment.metrics}
        lists = self._answers(is_seen=False)[0]
        answers = self._answers_of_groups(lists)
        guardrails, items = self._shown(answers)
        return Outcomes(self.entered, self.variant, metrics, guardrails, items, answers, notes=tuple(notes))

    # --- metrics ------------------------------------------------------------------------------------------------------

    def _counted(self, metric: Metric) -> Counted:
        """A metric's numerators, and denominators if it is one per answer."""
        own, first = event.c, assignment.c.first_at
        joined = sa.join(assignment, event, own.subject == assignment.c.subject)
        when: sa.ColumnElement[Any] = own.occurred_at
        one: sa.ColumnElement[Any] = sa.func.coalesce(own.value, 0.0) if metric.measure == "value" else sa.literal(1.0)
        if metric.per != "user":
            shown = sa.and_(exposure.c.request_id == own.request_id, exposure.c.subject == own.subject)
            joined, when = joined.join(exposure, shown), exposure.c.served_at
        asked = sa.select(assignment.c.subject).select_from(joined).where(self.mine, own.type == metric.event)
        asked = asked.where(own.occurred_at < first + self.experiment.window_us)
        if metric.per == "impression":
            asked = asked.where(_is_confirmed())
        if metric.per != "user" and metric.measure == "any":
            after, before = self._summed(asked, when, exposure.c.request_id)
        else:
            after, before = self._summed(asked, when, one)
        if metric.per != "user":
            answers = self._answers(is_seen=metric.per == "impression")
            return Counted(UnitValues(after, answers[0]), UnitValues(before, answers[1]))
        if metric.measure == "any":
            after, before = np.minimum(after, 1), np.minimum(before, 1)
        return Counted(UnitValues(after), UnitValues(before))

    def _answers(self, *, is_seen: bool) -> tuple[Values, Values]:
        """Answers that each user got after and before the first exposure; with `is_seen` those with an impression."""
        joined = sa.join(assignment, exposure, exposure.c.subject == assignment.c.subject)
        asked = sa.select(assignment.c.subject).select_from(joined).where(self.mine)
        if is_seen:
            asked = asked.where(_is_confirmed())
        return self._summed(asked, exposure.c.served_at, sa.literal(1.0))

    def _summed(
        self, asked: sa.Select[Any], when: sa.ColumnElement[Any], one: sa.ColumnElement[Any]
    ) -> tuple[Values, Values]:
        """Sums of `one` (or the count of different texts) for each user, after and before the first exposure."""
        first, window = assignment.c.first_at, self.experiment.window_us
        sides = sa.and_(when >= first, when < first + window), sa.and_(when < first, when >= first - window)
        if isinstance(one.type, sa.Text):
            sums: list[sa.ColumnElement[Any]] = [sa.func.count(sa.distinct(sa.case((side, one)))) for side in sides]
        else:
            sums = [sa.func.sum(sa.case((side, one), else_=0.0)) for side in sides]
        inside = asked.add_columns(*sums).where(sa.or_(*sides)).group_by(assignment.c.subject)
        found = np.zeros((2, len(self.place)))
        for row in self.journal.rows(inside):
            subject, after, before = tuple(row)
            found[:, self.place[subject]] = after, before
        return found[0], found[1]

    # --- guardrails ---------------------------------------------------------------------------------------------------

    def _shown(self, answers: int) -> tuple[dict[str, UnitValues], tuple[Values, ...]]:
        """Guardrails of answers, and the different items in the first `answers` of each group."""
        names = ("answers", "errors", "empty", "milliseconds", "timed")
        sums = dict(zip(names, np.zeros((len(names), len(self.place))), strict=True))
        seen = {key: set[str]() for key in np.ndindex(len(self.experiment.variants), GROUPS)}
        left = dict.fromkeys(seen, answers)
        for place, items_text, policy_text in self._exposures():
            policy, items = _object(policy_text), _list(items_text)
            sums["answers"][place] += 1
            sums["empty"][place] += not items
            took = policy.get(MILLISECONDS)
            if isinstance(took, (int, float)) and not isinstance(took, bool) and 0 <= took < 1e9:
                sums["milliseconds"][place] += took
                sums["errors"][place] += policy.get(ERROR) is not None
                sums["timed"][place] += 1
            key = int(self.variant[place]), int(self.group[place])
            if left[key]:
                left[key] -= 1
                seen[key].update(items)
        found = {
            "errors": UnitValues(sums["errors"], sums["timed"]),
            "empty": UnitValues(sums["empty"], sums["answers"]),
            "latency": UnitValues(sums["milliseconds"], sums["timed"]),
        }
        told = {name: each for name, each in found.items() if each.denominator is not None and each.denominator.any()}
        counts = np.array([len(seen[key]) for key in seen], float).reshape(-1, GROUPS)
        return told, tuple(counts) if answers else ()

    def _exposures(self) -> Iterator[tuple[int, str, str]]:
        """Place of the user, items and policy of every answer in the users' windows."""
        own, first = exposure.c, assignment.c.first_at
        asked = sa.select(own.subject, own["items"], own.policy)  # `own.items` is a method
        asked = asked.join(assignment, own.subject == assignment.c.subject).order_by(own.seq)
        asked = asked.where(self.mine, own.served_at >= first, own.served_at < first + self.experiment.window_us)
        users = [*self.place]
        for start in range(0, len(users), AT_ONCE):
            for row in self.journal.rows(asked.where(own.subject.in_(users[start : start + AT_ONCE]))):
                subject, items, policy = tuple(row)
                yield self.place[subject], items, policy

    def _answers_of_groups(self, lists: Values) -> int:
        """The answers that every group of users of every variant got, up to `MOST_LISTS`."""
        counts = np.zeros((len(self.experiment.variants), GROUPS))
        np.add.at(counts, (self.variant, self.group), lists)
        return int(min(MOST_LISTS, counts.min()))

    # --- interleaving -------------------------------------------------------------------------------------------------

    def _team_clicks(self) -> NDArray[np.int64]:
        """Events of the first metric on items of each team."""
        own, first = event.c, assignment.c.first_at
        joined = sa.join(assignment, event, own.subject == assignment.c.subject)
        shown = sa.and_(exposure.c.request_id == own.request_id, exposure.c.subject == own.subject)
        asked = sa.select(own.subject, own.item, exposure.c["items"], exposure.c.policy)
        asked = asked.select_from(joined.join(exposure, shown)).where(
            self.mine,
            own.type == self.experiment.metrics[0].event,
            exposure.c.experiment == self.experiment.name,
            exposure.c.served_at >= first,
            own.occurred_at < first + self.experiment.window_us,
        )
        clicks = np.zeros((len(self.place), 2), np.int64)
        for row in self.journal.rows(asked):
            subject, item, items, policy = tuple(row)
            teams = _object(policy).get(TEAMS)
            team = dict(zip(_list(items), teams, strict=False)).get(item) if isinstance(teams, list) else None
            if team in (0, 1):
                clicks[self.place[subject], team] += 1
        return clicks


def _is_confirmed() -> sa.ColumnElement[bool]:
    """Whether an impression confirms that an answer was shown."""
    seen = event.alias("seen")
    said = sa.and_(seen.c.request_id == exposure.c.request_id, seen.c.subject == exposure.c.subject)
    return sa.exists().where(said, seen.c.type == IMPRESSION)


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    return found if isinstance(found, dict) else {}


def _list(text: str) -> list[Any]:
    found = json.loads(text)
    return found if isinstance(found, list) else []


# --- who takes part ---------------------------------------------------------------------------------------------------


def register(journal: Journal, experiments: Sequence[Experiment]) -> None:
    """Store what a file says of experiments; of one that is known, its newest definition."""

    def change(connection: sa.Connection) -> None:
        known = {*connection.execute(sa.select(experiment.c.name)).scalars()}
        for each in experiments:
            values = {"definition": each.model_dump_json(exclude_defaults=True)}
            if each.name in known:
                connection.execute(sa.update(experiment).where(experiment.c.name == each.name).values(values))
            else:
                connection.execute(sa.insert(experiment).values(name=each.name, started_at=now_us(), **values))

    if experiments:
        journal.write(change)


def recorded_variants(journal: Journal, experiments: Sequence[Experiment], subject: str) -> dict[str, str]:
    """Experiment -> variant that a user got first."""
    own = assignment.c
    asked = sa.select(own.experiment, own.variant).where(own.subject == subject)
    found = journal.rows(asked.where(own.experiment.in_([each.name for each in experiments])))
    return {row.experiment: row.variant for row in found}


def users_of_variants(journal: Journal) -> dict[tuple[str, str], int]:
    """(experiment, variant) -> its number of users."""
    own = assignment.c
    asked = sa.select(own.experiment, own.variant, sa.func.count().label("users")).group_by(own.experiment, own.variant)
    return {(row.experiment, row.variant): row.users for row in journal.rows(asked)}
