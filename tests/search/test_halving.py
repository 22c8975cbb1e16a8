"""Who trains next, by hand and by simulation."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from recspec.training.search.auto import first_slice, next_of


@dataclass
class Made:
    """A made-up candidate whose curve is known."""

    name: str
    curve: tuple[float, ...] = ()
    values: list[float] = field(default_factory=list)
    is_over: bool = False

    def train(self) -> None:
        """Take the next slice."""
        self.values.append(max([*self.values[-1:], self.curve[len(self.values)]]))
        self.is_over = len(self.values) == len(self.curve)


def order(*made: Made) -> list[str]:
    """Names in the order of their slices, until all are over."""
    names = []
    while (found := next_of(made)) is not None:
        assert isinstance(found, Made)
        found.train()
        names.append(found.name)
    return names


def test_all_begin_and_the_better_half_goes_on_first() -> None:
    a, b, c, d = (
        Made(name, (best, best + 0.01, best + 0.02)) for name, best in zip("abcd", (0.1, 0.4, 0.3, 0.2), strict=True)
    )
    # b is the better of two, so it goes on at once; of four, b and c do. b ends first, then what waits, best first.
    assert "".join(order(a, b, c, d)) == "abbcdcbcddaa"


def test_by_hand() -> None:
    a, b = Made("a", values=[0.1]), Made("b", values=[0.2])
    assert next_of([a, b]) is b  # the better of two
    b.values.append(0.25)
    b.is_over = True
    assert next_of([a, b]) is a  # what waits goes on when nothing better can
    a.is_over = True
    assert next_of([a, b]) is None


def test_untried_ones_come_before_the_worse_half() -> None:
    worse, better, fresh = Made("worse", values=[0.1]), Made("better", values=[0.2, 0.2], is_over=True), Made("fresh")
    assert next_of([worse, better, fresh]) is fresh


def test_one_that_ended_early_still_counts_among_those_that_had_more_slices() -> None:
    ended = Made("ended", values=[0.9], is_over=True)
    two = [Made("x", values=[0.1, 0.2]), Made("y", values=[0.1, 0.3])]
    # Of three that had two slices or ended, one may go on: the best is over, so nobody is promoted.
    assert next_of([ended, *two]).name == "y"  # type: ignore[union-attr]


def test_nothing_to_train() -> None:
    assert next_of([]) is None


def test_a_slow_starter_is_trained_to_its_end_if_time_allows() -> None:
    slow, fast = Made("slow", (0.0, 0.0, 0.0, 0.9)), Made("fast", (0.5, 0.5, 0.5, 0.5))
    assert order(slow, fast).count("slow") == 4


@pytest.mark.parametrize(("seconds", "candidates", "first"), [(600, 5, 30.0), (10, 100, 2.0), (60, 0, 15.0)])
def test_the_first_slice(seconds: float, candidates: int, first: float) -> None:
    assert first_slice(seconds, candidates) == first
