"""The first screen of a run's report: what it says of people, the catalogue, money and groups of users."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recspec.report import first_screen as screens
from recspec.report.first_screen import FirstScreen, of_100
from recspec.report.measured import Answer

USERS = 60


class Saved(SimpleNamespace):
    """A saved evaluation of the present model on test, with values by user."""

    split, is_current, time = "test", True, ""

    @property
    def groups(self) -> dict[str, Any]:
        return {self.protocol: SimpleNamespace(saved=self.values.num_rows, of=self.values.num_rows)}

    def table(self, _: str) -> pa.Table:
        return self.values


def screen(monkeypatch: pytest.MonkeyPatch, *saved: Saved) -> FirstScreen | None:
    answers = [Answer(each, each.protocol) for each in saved]
    monkeypatch.setattr(screens, "answers_of", lambda _: answers)
    return screens.first_screen(SimpleNamespace())  # type: ignore[arg-type]


def lists(
    hits: Sequence[float],
    of_baseline: Sequence[float],
    *,
    protocol: str = "full",
    k: int = 10,
    positives: int = USERS,
    beyond: Any = None,
) -> Saved:
    metric, events = f"hit_rate@{k}", np.repeat([2, 40], USERS // 2)
    values = {"id": [f"u{user}" for user in range(USERS)], "events": events, metric: hits}
    facts = {"groups": USERS, "positives": positives, "most_candidates": 101}
    return Saved(
        protocol=protocol,
        metrics={protocol: {metric: float(np.mean(hits)), "ndcg@10": 0.1}},
        baseline_metrics={"popularity": {protocol: {metric: float(np.mean(of_baseline))}}},
        report={"protocols": {protocol: facts}, "beyond_accuracy": beyond or {}},
        values=pa.table({**values, f"popularity/{metric}": of_baseline}),
    )


HITS = [1.0] * 12 + [0.0] * 18 + [1.0] * 6 + [0.0] * 24
"""12 of 30 users with 2 events find it, and 6 of 30 with 40."""
POPULAR = [0.0] * 27 + [1.0] * 9 + [0.0] * 24
"""3 of 30, and 6 of 30."""


def test_the_sentence_and_who_gains_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    found = screen(monkeypatch, lists(HITS, POPULAR))
    assert found is not None
    assert found.sentence == "Of 100 users, 30 found what they chose next among ten."
    assert found.beside == "The best baseline, popularity, reaches 15: a clear difference."
    told = "{} of 100 such users find it; by popularity, {}"
    assert found.tiles == {
        "Who gains most": ("2 events", told.format(40, 10)),
        "Who gains least": ("40 events", told.format(20, 20)),
    }


def test_the_catalogue_and_the_money_are_shown_beside_the_best_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"coverage@10": 0.345, "revenue@10": 0.2}
    others = {"popularity": {"coverage@10": 0.01, "revenue@10": 0.1}, "ease": {"revenue@10": 0.25}}
    found = screen(monkeypatch, lists(HITS, POPULAR, beyond={"model": model, **others}))
    assert found is not None
    assert found.tiles["Catalogue shown"] == ("34.5 %", "of the items are in at least one list of ten")
    shown, told = found.tiles["Revenue captured"]
    assert (shown, told.endswith("by the prices of all chosen items; ease: 25.0 %")) == ("20.0 %", True)


def test_other_lengths_lists_of_candidates_and_several_targets_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = screen(monkeypatch, lists(HITS, HITS, protocol="sampled", k=3, positives=USERS + 1))
    assert found is not None
    assert found.sentence == (
        "Of 100 lists, 30 found something that they chose next among the first three of 101 candidates."
    )
    assert found.beside == "The best baseline, popularity, reaches 30: no clear difference."


def test_rows_are_spoken_of_as_pairs_with_positives_and_negatives_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Saved(
        protocol="rows",
        metrics={"rows": {"auc": 0.871}},
        baseline_metrics={},
        report={"protocols": {"rows": {"rows": 16281, "positives": 3846}}},
        values=pa.table({"auc": [0.871]}),
    )
    found = screen(monkeypatch, rows)
    assert found is not None
    assert (
        found.sentence == "Of 100 pairs of a positive and a negative row, 87 are in the right order; chance gives 50."
    )
    assert found.tiles == {"Positives": ("3,846", "of test"), "Negatives": ("12,435", "of test")}
    assert screen(monkeypatch, rows, lists(HITS, HITS)) == screen(monkeypatch, lists(HITS, HITS)), "lists come first"


def test_without_an_evaluation_of_the_present_model_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert screen(monkeypatch) is None
    earlier = lists(HITS, HITS)
    earlier.is_current = False
    assert screen(monkeypatch, earlier) is None


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.0, "0"),
        (0.009, "fewer than 1"),
        (0.01, "1"),
        (0.234, "23"),
        (0.99, "99"),
        (0.991, "more than 99"),
        (1.0, "100"),
    ],
)
def test_shares_as_people_of_a_hundred(share: float, expected: str) -> None:
    assert of_100(share) == expected
