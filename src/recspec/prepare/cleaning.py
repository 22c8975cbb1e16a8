"""Interactions without repeats and without users who have too few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ibis.expr.types import Table

from recspec.errors import DataError
from recspec.prepare.backend import Backend
from recspec.prepare.names import ITEM, USER
from recspec.prepare.notes import Notes
from recspec.prepare.tables import at_least, count_rows, fetch, keep_earliest
from recspec.prepare.text_files import ROW

Repeats = Literal["first", "keep"]


@dataclass(frozen=True)
class Cleaned:
    """Cleaned interactions, and the rows before each step."""

    rows: Table
    before: Table
    num_before: int
    distinct: Table
    num_distinct: int | None
    """Rows without repeats; None if no user was left out, so that it equals the number kept."""
    min_interactions: int

    def summary(self, kept: int) -> dict[str, object]:
        """The numbers of dropped rows, given the number kept in the end."""
        distinct = self.num_distinct or kept
        return {"repeats_dropped": self.num_before - distinct, "of_users_with_too_few_dropped": distinct - kept}

    def note(self, backend: Backend, notes: Notes, kept: int) -> None:
        """Note the dropped rows, with an example."""
        distinct = self.num_distinct or kept
        if self.num_before > distinct:
            left_out = first_left_out(backend, self.before, self.distinct)
            notes.dropped.append(
                f"{self.num_before - distinct:,} of {self.num_before:,} rows repeat an earlier one of the same user "
                f"and item, such as user '{left_out[USER]}' and item '{left_out[ITEM]}'; the earliest counts"
            )
        if distinct > kept:
            left_out = first_left_out(backend, self.distinct, self.rows)
            notes.dropped.append(
                f"{distinct - kept:,} rows of users with fewer than {self.min_interactions:,} items, such as user "
                f"'{left_out[USER]}' (min_interactions)"
            )


def first_left_out(backend: Backend, rows: Table, kept: Table) -> Mapping[str, object]:
    """User and item of the first row of the file that is not kept."""
    left_out = rows.select(ROW, USER, ITEM).anti_join(kept.select(ROW), ROW)
    return dict(fetch(backend, left_out.order_by(ROW).limit(1)).to_pylist()[0])


def clean(
    backend: Backend,
    rows: Table,
    *,
    min_interactions: int,
    keys: Sequence[str] = (USER, ITEM),
    order: Sequence[str],
    repeats: Repeats = "first",
) -> Cleaned:
    """Remove repeats, then users with too few interactions.

    Args:
        repeats: `first` keeps a user's earliest interaction with an item, `keep` keeps all of them.

    Raises:
        DataError: if there is no interaction, or no user has enough.
    """
    before = count_rows(backend, rows)
    if before == 0:
        raise DataError("the raw files hold no interaction, a header at most; expected one row at least")
    distinct = keep_earliest(rows, keys, order) if repeats == "first" else rows
    if min_interactions <= 1:
        return Cleaned(distinct, rows, before, distinct, None, min_interactions)
    staged = backend.stage(distinct)  # it is read twice
    kept = at_least(staged, USER, min_interactions)
    if count_rows(backend, kept) == 0:
        raise DataError(f"no user has {min_interactions:,} items or more; set min_interactions lower")
    return Cleaned(kept, rows, before, staged, count_rows(backend, staged), min_interactions)
