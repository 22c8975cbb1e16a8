"""Two evaluations that were kept, group by group: without evaluating again.

Shapes: G groups, users or rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recspec.errors import DataError
from recspec.evaluation.bootstrap import compare_values
from recspec.evaluation.report import Comparison
from recspec.evaluation.saved import EVENTS, ID, ROW, SavedEvaluation, held_values

SAME_FACTS = ("candidates", "groups", "rows", "positives", "fewest_candidates", "most_candidates", "repeats", "cold")
"""Facts on a protocol that must agree: its groups, targets and candidates."""


@dataclass(frozen=True)
class Paired:
    """The values of two evaluations on the same groups, in the same order."""

    protocol: str
    ours: Mapping[str, NDArray[np.float64]]
    """Metric -> (G,) values; of the metrics that both have. Under `rows`, those of `group_auc` are one a group."""
    theirs: Mapping[str, NDArray[np.float64]]
    ids: pa.Array | None
    """(G,) ids in text."""
    events: NDArray[np.int64] | None
    """(G,) items that each user acted on before the split."""

    def compare(self, draws: int = 1_000, seed: int = 0) -> dict[str, Comparison]:
        """The paired comparison of each metric; a difference is theirs minus ours."""
        return {name: compare_values(of, self.theirs[name], draws, seed) for name, of in self.ours.items() if len(of)}


def pair(ours: SavedEvaluation, theirs: SavedEvaluation, protocol: str) -> Paired:
    """Pair two evaluations under a protocol.

    Raises:
        DataError: with everything in which their questions differ, or if one of them lacks the protocol.
        BundleError: if a file of values is gone or damaged.
    """
    if problems := how_questions_differ(ours, theirs, protocol):
        raise DataError.of(f"{ours.file} and {theirs.file} can't be compared under {protocol}", problems)
    first, second = ours.table(protocol), theirs.table(protocol)
    if len(first) != len(second) or any(_column(first, name) != _column(second, name) for name in (ID, ROW)):
        raise DataError(f"{ours.file} and {theirs.file} hold other groups under {protocol}; evaluate both again")
    common = [name for name in ours.groups[protocol].metrics if name in theirs.groups[protocol].metrics]
    common = [name for name in common if name in first.column_names and name in second.column_names]
    values = [{name: held_values(each, name) for name in common} for each in (first, second)]
    return Paired(
        protocol,
        values[0],
        values[1],
        first.column(ID).combine_chunks() if ID in first.column_names else None,
        first.column(EVENTS).to_numpy() if EVENTS in first.column_names else None,
    )


def how_questions_differ(ours: SavedEvaluation, theirs: SavedEvaluation, protocol: str) -> list[str]:
    """In what the questions of two evaluations differ under a protocol, so that their values can't be paired."""
    both = ours, theirs
    problems = [f"{each.file} has no values under {protocol}" for each in both if protocol not in each.groups]
    asked: dict[str, list[object]] = {
        "the data's digest": [each.data.digest[:12] for each in both],
        "the split": [each.split for each in both],
        "known": [each.settings.get("known") for each in both],
    }
    facts = [_facts(each, protocol) for each in both]
    asked |= {name: [each.get(name) for each in facts] for name in SAME_FACTS}
    return problems + [f"{name}: {here!r} and {there!r}" for name, (here, there) in asked.items() if here != there]


def _column(table: pa.Table, name: str) -> pa.ChunkedArray | None:
    return table.column(name) if name in table.column_names else None


def _facts(found: SavedEvaluation, protocol: str) -> Mapping[str, object]:
    protocols = found.report.get("protocols")
    facts = protocols.get(protocol) if isinstance(protocols, dict) else None
    return facts if isinstance(facts, dict) else {}
