"""Which trials stop early, on made-up traces: losers die, slow starters live."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from recspec.training.search.study import FIRST_RUNG, Trace, is_compared, is_hopeless, is_rung, value_at


def trace(curve: Callable[[int], float], epochs: int) -> dict[int, float]:
    """The best AUC so far after each epoch, negated: lower is better."""
    values, best = {}, math.inf
    for epoch in range(1, epochs + 1):
        best = min(best, -curve(epoch))
        values[epoch] = best
    return values


def good(epoch: int) -> float:
    return 0.8 - 0.1 * math.exp(-epoch / 2)


def flat_then_wins(epoch: int) -> float:
    """Flat for six epochs, then towards .85: above all others from epoch 18 on."""
    return 0.5 if epoch <= 6 else 0.85 - 0.35 * math.exp(-(epoch - 6) / 4)


def loses(epoch: int) -> float:
    """Climbs all the time, too slowly."""
    return 0.55 + 0.0005 * epoch


def peaks_low(epoch: int) -> float:
    return 0.7 - 0.01 * abs(epoch - 4)


GOOD = [(trace(lambda epoch, shift=shift: good(epoch) + shift, 30), True) for shift in (0, 0.001, 0.002, 0.003, 0.004)]


def stops_at(curve: Callable[[int], float], others: Sequence[tuple[Trace, bool]], epochs: int = 81) -> int | None:
    """The epoch at which a trial is stopped."""
    whole = trace(curve, epochs)
    return next((epoch for epoch in whole if is_hopeless({at: whole[at] for at in range(1, epoch + 1)}, others)), None)


def test_a_slow_starter_that_wins_is_not_stopped() -> None:
    assert stops_at(flat_then_wins, GOOD) is None


@pytest.mark.parametrize("flat", range(9))
def test_a_trial_may_be_flat_for_eight_epochs(flat: int) -> None:
    assert stops_at(lambda epoch: 0.5 if epoch <= flat else 0.85 - 0.35 * math.exp(-(epoch - flat) / 4), GOOD) is None


@pytest.mark.parametrize("curve", [loses, peaks_low, lambda _: 0.5])
def test_a_clear_loser_is_stopped_at_the_first_rung(curve: Callable[[int], float]) -> None:
    assert stops_at(curve, GOOD) == FIRST_RUNG


def test_the_best_third_goes_on() -> None:
    assert stops_at(lambda epoch: good(epoch) + 0.01, GOOD) is None
    assert stops_at(lambda epoch: good(epoch) + 0.003, GOOD) is None, "as good as the second of six"
    assert stops_at(lambda epoch: min(good(epoch), good(5)) - 0.01, GOOD) == FIRST_RUNG


def test_by_hand_two_thirds_stop_and_the_pace_decides() -> None:
    """Six trials at rung 9: two go on, so the cut is .80 of .81, .80, .79, .78, .77."""
    others = [({9: -value}, False) for value in (0.81, 0.80, 0.79, 0.78, 0.77)]
    flat = dict.fromkeys(range(1, 10), -0.795)
    assert is_hopeless(flat, others)
    # From epoch 6 to 9 it gained .0006: .0002 an epoch, .0036 in the 18 epochs up to rung 27: .7986 < .80.
    assert is_hopeless({6: -0.7944, 9: -0.795}, others)
    # .0009 in 3 epochs are .0054 in 18: .8004 > .80.
    assert not is_hopeless({6: -0.7941, 9: -0.795}, others)
    assert not is_hopeless({9: -0.80}, others), "a tie with the second goes on"


def test_nothing_is_stopped_without_others_to_compare_with() -> None:
    assert stops_at(loses, GOOD[:3]) is None
    assert stops_at(loses, GOOD[:4]) == FIRST_RUNG
    short = [(dict.fromkeys(range(1, 9), -0.9), False)] * 9
    assert stops_at(loses, short) is None, "trials that have not reached the rung are not compared"


def test_a_trial_that_ended_before_a_rung_counts_there() -> None:
    early = [(trace(good, 5), True)] * 4
    assert stops_at(loses, early) == FIRST_RUNG
    assert value_at({1: -0.5, 3: -0.7}, 9, ended=True) == -0.7
    assert value_at({1: -0.5, 3: -0.7}, 2, ended=False) == -0.5
    assert value_at({1: -0.5, 3: -0.7}, 9, ended=False) is None
    assert value_at({}, 9, ended=True) is None
    assert value_at({5: -0.5}, 3, ended=True) is None


def test_a_trial_is_judged_at_rungs_alone() -> None:
    assert [epoch for epoch in range(1, 300) if is_rung(epoch)] == [9, 27, 81, 243]
    assert [epoch for epoch in range(1, 300) if is_compared(epoch)] == [6, 9, 18, 27, 54, 81, 162, 243]
    assert not is_hopeless({}, GOOD)
    assert not is_hopeless(dict.fromkeys(range(1, 9), -0.1), GOOD)
