"""Experiments and who takes part in them, as the journal holds it."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from recspec.loop.assignment import Experiment
from recspec.loop.journal import Journal, assignment, experiment, now_us


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
