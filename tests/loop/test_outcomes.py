"""Outcomes of users, counted by hand from journals of SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from recspec.base.errors import DataError
from recspec.loop import Journal, read_outcomes
from recspec.loop import outcomes as counted
from recspec.loop.assignment import DAY_US
from tests.loop.shop_of_experiments import answer, assigned, event, experiment, simulated

START = experiment().start_us
METRICS = [
    {"name": "clicks", "event": "click"},
    {"name": "clickers", "event": "click", "measure": "any"},
    {"name": "revenue", "event": "purchase", "measure": "value"},
    {"name": "ctr", "event": "click", "per": "exposure"},
    {"name": "lists clicked", "event": "click", "per": "exposure", "measure": "any"},
    {"name": "seen ctr", "event": "click", "per": "impression"},
]
METRICS = [{**each, "name": each["name"].replace(" ", "-")} for each in METRICS]


@pytest.fixture
def journal(url: str) -> Iterator[Journal]:
    """ann: control, first shown at START + 10; bob: new, at START + 20; cleo: control, whose window is not closed."""
    with Journal(url) as opened:
        a, b, c = START + 10, START + 20, START + DAY_US
        assigned(opened, ("bob", "new", b), ("ann", "control", a), ("cleo", "control", c))
        assigned(opened, ("dan", "control", a), name="other")
        opened.store(
            (),
            [
                answer("a0", "ann", a - DAY_US),  # the earliest moment of her past
                answer("a-", "ann", a - DAY_US - 1),
                answer("a1", "ann", a, milliseconds=10.0),
                answer("a2", "ann", a + 5, [], milliseconds=30.0, error="timeout"),
                answer("a3", "ann", a + DAY_US),  # after her window
                answer("b1", "bob", b, milliseconds=True),
            ],
        )
        opened.store(
            [
                event("ann", a - DAY_US - 1),
                event("ann", a - DAY_US, request_id="a0"),
                event("ann", a - 1),
                event("ann", a),
                event("ann", a + 1, request_id="a1"),
                event("ann", a + 2, request_id="a1", item="i2"),
                event("ann", a + 3, request_id="b1"),  # another's answer
                event("ann", a + 1, "impression", item=None, request_id="a1"),
                event("ann", a + DAY_US - 1),
                event("ann", a + DAY_US),
                event("ann", a + 7, "purchase", value=12.5),
                event("ann", a + 8, "purchase", value=2.5),
                event("ann", a + 9, "purchase"),
                event("bob", b + 4, "view"),
                event("dan", a + 1),
                event("cleo", c + 1),
            ]
        )
        yield opened


def numbers(found: object) -> list[object]:
    return [None if each is None else each.tolist() for each in (found.numerator, found.denominator)]  # type: ignore[attr-defined]


def test_events_are_counted_in_each_users_window_and_past(journal: Journal) -> None:
    found = read_outcomes(journal, experiment(metrics=METRICS), START + 20 + DAY_US)
    assert found.entered.tolist() == [0, 1, 0]
    assert found.variant.tolist() == [0, 1]  # ann was first shown before bob
    after = {name: numbers(each.after) for name, each in found.metrics.items()}
    before = {name: numbers(each.before) for name, each in found.metrics.items()}
    assert after == {
        "clicks": [[5, 0], None],
        "clickers": [[1, 0], None],
        "revenue": [[15, 0], None],
        "ctr": [[2, 0], [2, 1]],
        "lists-clicked": [[1, 0], [2, 1]],
        "seen-ctr": [[2, 0], [1, 0]],
    }
    assert before == {
        "clicks": [[2, 0], None],
        "clickers": [[1, 0], None],
        "revenue": [[0, 0], None],
        "ctr": [[1, 0], [1, 0]],
        "lists-clicked": [[1, 0], [1, 0]],
        "seen-ctr": [[0, 0], [0, 0]],
    }


def test_guardrails_are_counted_over_answers(journal: Journal) -> None:
    found = read_outcomes(journal, experiment(), START + 20 + DAY_US)
    assert {name: numbers(each) for name, each in found.guardrails.items()} == {
        "errors": [[1, 0], [2, 0]],
        "empty": [[1, 0], [2, 1]],
        "latency": [[40, 0], [2, 0]],
    }
    assert found.different_items == ()  # too few users to fill every group


def test_users_count_once_their_window_is_closed(journal: Journal) -> None:
    assert len(read_outcomes(journal, experiment(), START + 20 + DAY_US - 1).variant) == 1
    early = read_outcomes(journal, experiment(), START + 15)
    assert (early.entered.tolist(), early.variant.tolist()) == ([0], [])
    assert len(read_outcomes(journal, experiment(), START + 2 * DAY_US).variant) == 3


def test_users_whose_variant_is_not_that_of_the_hash_are_told_of(journal: Journal) -> None:
    (note,) = read_outcomes(journal, experiment(salt="another"), START + 2 * DAY_US).notes
    told = "of 3 got their variant under other shares or another salt; they keep it"
    assert note.endswith(f"{told}, and users before and after the change differ")


def test_an_experiment_without_users_or_with_other_variants_is_refused(journal: Journal) -> None:
    with pytest.raises(DataError, match=r"nobody was assigned to the experiment 'away' yet; does a server with this"):
        read_outcomes(journal, experiment(name="away"), START + DAY_US)
    others = [{"name": "control", "share": 0.5}, {"name": "newer", "share": 0.5}]
    with pytest.raises(DataError, match=r"experiment 'home': 1 user in 'new'; the file has 'control', 'newer'"):
        read_outcomes(journal, experiment(variants=others), START + DAY_US)


def test_different_items_are_counted_in_equally_many_answers(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control shows one item in every answer, the other variant a new one each time."""
    monkeypatch.setattr(counted, "GROUPS", 2)
    monkeypatch.setattr(counted, "AT_ONCE", 3)  # blocks of users
    with Journal(url) as opened:
        rows = [(f"u{n}", ("control", "new")[n % 2], START + n) for n in range(40)]
        assigned(opened, *rows)
        opened.store(
            (),
            [
                answer(f"{subject}.{place}", subject, at, ["i0"] if variant == "control" else [f"i{place}.{at}"])
                for subject, variant, at in rows
                for place in range(2)
            ],
        )
        found = read_outcomes(opened, experiment(), START + 2 * DAY_US)
        control, new = found.different_items
        assert control.tolist() == [1, 1]
        assert new.tolist() == [found.answers] * 2
        assert 2 <= found.answers <= 20
        monkeypatch.setattr(counted, "MOST_LISTS", 3)
        assert read_outcomes(opened, experiment(), START + 2 * DAY_US).answers == 3


def test_clicks_on_interleaved_lists_belong_to_teams(url: str) -> None:
    found = experiment(interleave=True)
    with Journal(url) as opened:
        assigned(opened, ("ann", "interleaved", START), ("bob", "interleaved", START + 1))
        opened.store(
            (),
            [
                answer("a", "ann", START, ["x", "y", "z"], teams=[0, 1, -1]),
                answer("b", "bob", START + 1, ["x", "y"], teams="01"),
                answer("c", "bob", START + 2, ["x", "y"]),
            ],
        )
        clicked = [("ann", "x", "a"), ("ann", "y", "a"), ("ann", "y", None), ("ann", "z", "a"), ("ann", "other", "a")]
        clicked += [("bob", "x", "b"), ("bob", "y", "c"), ("bob", "y", "a")]
        opened.store([event(who, START + 5, item=item, request_id=asked) for who, item, asked in clicked])
        opened.store([event("ann", START + 6, item="y", request_id="a")])
        got = read_outcomes(opened, found, START + 2 * DAY_US)
        assert got.clicks is not None
        assert got.clicks.tolist() == [[1, 2], [0, 0]]


def test_a_simulated_journal_has_the_clicks_that_were_made(url: str) -> None:
    with Journal(url) as opened:
        simulated(opened, experiment(), 300, 1.0)
        found = read_outcomes(opened, experiment(), experiment().end_us)
        per_user, per_answer = found.metrics["clicks"].after, found.metrics["ctr"].after
        assert per_answer.denominator is not None
        assert np.array_equal(per_user.numerator, per_answer.numerator)
        events = sum(each.num_rows for each in opened.events())
        assert per_user.numerator.sum() + found.metrics["clicks"].before.numerator.sum() == events
        assert per_answer.denominator.sum() == sum(each.num_rows for each in opened.exposures())
