"""When training stops by itself: small traces worked by hand."""

from __future__ import annotations

import pytest

from recspec.training.validation import standard_error, stop_reason

SLOW_START = (0.501, 0.499, 0.502, 0.5, 0.501, 0.5)
"""AUC of sparse ids in the first epochs, flat within its error."""


def reason(*values: float, lower: bool = False, count: int = 2500) -> str:
    return stop_reason(values, count=count, lower=lower, patience=10, falling_patience=3)


def test_a_standard_error_by_hand() -> None:
    assert standard_error(0.5, 2500, bounded=True) == pytest.approx(0.01)  # sqrt(0.5 * 0.5 / 2500)
    assert standard_error(0.6, 3600, bounded=False) == pytest.approx(0.01)  # 0.6 / 60
    assert standard_error(1.0, 0, bounded=True) == 0


@pytest.mark.parametrize(
    ("values", "stopped"),
    [
        ((), ""),
        ((0.5,), ""),
        (SLOW_START, ""),
        ((*SLOW_START, 0.6, 0.7), ""),
        ((0.75, 0.73, 0.72), ""),  # two values below 0.75 - 0.0087
        ((0.75, 0.73, 0.72, 0.71), "falling"),
        ((0.75, 0.71, 0.72, 0.73), ""),  # it recovers
        ((0.75, 0.745, 0.746, 0.744), ""),  # within the error
        ((0.75, *(0.745,) * 9), ""),
        ((0.75, *(0.745,) * 10), "patience"),
        ((0.5, *(0.5,) * 10), "patience"),  # equal values are no improvement
    ],
)
def test_flat_values_are_waited_for_and_falling_ones_are_not(values: tuple[float, ...], stopped: str) -> None:
    assert reason(*values) == stopped


def test_of_losses_lower_values_are_better() -> None:
    assert reason(0.6, 0.63, 0.64, 0.65, lower=True, count=3600) == "falling"
    assert not reason(0.65, 0.64, 0.63, 0.6, lower=True, count=3600)


def test_few_rows_hide_a_fall() -> None:
    assert reason(0.75, 0.73, 0.72, 0.71, count=2500) == "falling"
    assert not reason(0.75, 0.73, 0.72, 0.71, count=25)


def test_nothing_stops_without_patience() -> None:
    assert not stop_reason([0.9, *[0.1] * 50], count=100, lower=False, patience=None, falling_patience=None)
