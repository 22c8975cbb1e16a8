"""Steps take several threads only where these pay, and leave them when other work takes their cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from recspec.feature_spec import FeatureSpec
from recspec.loading import Ranks
from recspec.models import MODELS
from recspec.training.plan import make_plan
from recspec.training.settings import TrainSettings
from recspec.training.step_threads import ROUNDS, WAITS, WARM_UP, StepThreads

MOST = 4
TRIAL = WARM_UP + 2 * ROUNDS
"""Steps until the first choice."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The last number of threads that torch was asked for."""
    now = [MOST]
    monkeypatch.setattr(torch, "set_num_threads", lambda number: now.__setitem__(0, number))
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    return now


class Machine:
    """A clock, and steps that take as long as `seconds` says of their place and number of threads."""

    def __init__(self, asked: list[int], seconds: Callable[[int, int], float], rows: Callable[[int], int]) -> None:
        self.now, self.rows, self.used, self.told = 0.0, 0, list[int](), list[str]()
        self.asked, self.seconds, self.rows_of = asked, seconds, rows

    def steps(self, number: int) -> Iterator[int]:
        for place in range(number):
            self.used.append(self.asked[0])
            self.rows += self.rows_of(place)
            self.now += self.seconds(place, self.asked[0]) * self.rows_of(place)
            yield place

    def run(self, number: int, most: int = MOST) -> list[int]:
        """The threads of each of so many steps."""
        threads = StepThreads(most, self.told.append, lambda: self.now)
        assert list(threads.over(self.steps(number), lambda: self.rows)) == list(range(number))
        return self.used


def machine(
    asked: list[int], seconds: Callable[[int, int], float], rows: Callable[[int], int] = lambda _: 8
) -> Machine:
    return Machine(asked, seconds, rows)


def test_one_thread_is_taken_where_several_are_no_faster(asked: list[int]) -> None:
    made = machine(asked, lambda _, threads: 1.0 if threads > 1 else 1.02)
    used = made.run(60)
    assert used[:WARM_UP] == [1] * WARM_UP
    assert sorted(used[WARM_UP:TRIAL]) == [1] * ROUNDS + [MOST] * ROUNDS
    assert set(used[TRIAL:]) == {1}
    assert made.told == [f"steps take one CPU thread: {MOST} take 1.0 times as long"]


def test_several_threads_stay_where_they_pay_and_nothing_is_told(asked: list[int]) -> None:
    made = machine(asked, lambda _, threads: 1.0 if threads > 1 else 1.7)
    assert set(made.run(5000)[TRIAL:]) == {MOST}
    assert made.told == []


def test_batches_of_other_sizes_are_no_slow_steps(asked: list[int]) -> None:
    made = machine(asked, lambda _, threads: 1.0 if threads > 1 else 1.7, lambda place: (900, 1, 30)[place % 3])
    assert set(made.run(3000)[TRIAL:]) == {MOST}


def test_beside_a_busy_process_steps_go_on_with_one_thread_and_it_is_told_once(asked: list[int]) -> None:
    busy = range(1000, 100_000)

    def seconds(place: int, threads: int) -> float:
        return 1.7 if threads == 1 else 27.0 if place in busy else 1.0

    made = machine(asked, seconds)
    used = made.run(9000)
    assert set(used[TRIAL : busy.start]) == {MOST}
    assert used[busy.start + 10 :].count(MOST) < 12
    slower = f"{MOST} CPU threads became 27.0 times as slow as before"
    assert made.told == [f"{slower}, as beside other work on the machine; training goes on with one"]
    assert made.now / made.rows < 2.2


def test_when_the_other_process_has_ended_several_threads_are_taken_again(asked: list[int]) -> None:
    busy = range(300)
    made = machine(asked, lambda place, threads: 1.7 if threads == 1 else 27.0 if place in busy else 1.0)
    used = made.run(5000)
    assert used[: WAITS[0]].count(MOST) == 1  # one such step is enough
    assert set(used[-2000:]) == {MOST}
    assert made.told == [
        f"steps take one CPU thread: {MOST} take 15.9 times as long",
        f"{MOST} CPU threads are 1.7 times as fast as one again",
    ]


def test_a_busy_process_that_comes_and_goes_does_not_fill_the_log(asked: list[int]) -> None:
    made = machine(asked, lambda place, threads: 1.7 if threads == 1 else 27.0 if place // 1500 % 2 else 1.0)
    made.run(30_000)
    assert len(made.told) <= 2


def test_a_number_that_was_given_is_left_alone(asked: list[int]) -> None:
    asked[0] = 1
    assert set(machine(asked, lambda *_: 1.0).run(500, most=1)) == {1}


def test_threads_are_measured_only_where_nobody_gave_their_number(
    datasets: dict[str, FeatureSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measures(**settings: object) -> bool:
        asked = TrainSettings.model_validate({"tensorboard": False, "epochs": 1, **settings})
        name = "neumf"
        return make_plan(name, datasets["interactions"], asked, MODELS[name].Settings(), Ranks()).measures_threads

    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert not measures()
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert measures()
    assert not measures(threads=2)
    assert not measures(deterministic=True)
