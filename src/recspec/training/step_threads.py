"""How many CPU threads a training step takes, measured on the steps themselves.

On small operations a second thread gains little, and beside another busy process it costs much: at every operation the
thread that has a core waits for the one that has none, up to a time slice of the system (milliseconds).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from statistics import median
from typing import TypeVar

import torch

T = TypeVar("T")

WARM_UP = 3
"""First steps, which allocate and compile; they take one thread and are not measured."""
ROUNDS = 5
"""Steps with several threads, and as many with one, in turns, that decide."""
GIVEN_UP = 4.0
"""How many times as long as with one thread a single step takes when several are given up without more rounds."""
PAYS = 1.05
"""Speed of several threads, relative to one, from which they are taken."""
SLOW = 1.6
"""How many times as long as before a step of several threads takes when they are measured anew."""
WAITS = (100, 1600)
"""Steps between two measurements: at first, doubled after each, and at most."""


class StepThreads:
    """Runs steps on `most` threads, or on one where several do not pay.

    Measures as training begins, when steps have become slow, and now and then while one thread is in use: what kept the
    other cores busy may have ended. `tell` gets the first change of each kind as a note.
    """

    def __init__(self, most: int, tell: Callable[[str], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self.most, self.tell, self.clock = most, tell, clock
        self.number = 1
        self.usual: float | None = None  # seconds a row since the last measurement
        self.recent: deque[float] = deque(maxlen=ROUNDS)
        self.trial: dict[int, list[float]] | None = None  # seconds a row by number of threads, while measuring
        self.steps, self.may_measure_at, self.wait = 0, WARM_UP, WAITS[0]
        self.told: set[str] = set()

    def over(self, steps: Iterator[T], rows_so_far: Callable[[], int]) -> Iterator[T]:
        """The same steps, each on the number of threads that suits it."""
        if self.most > 1:
            torch.set_num_threads(self.number)
        while True:
            self._begin()
            rows, began = rows_so_far(), self.clock()
            taken = next(steps, None)
            if taken is None:
                return
            self._end((self.clock() - began) / max(1, rows_so_far() - rows))
            yield taken

    def _begin(self) -> None:
        """Begin a measurement if one is due; its steps take turns."""
        if self.most == 1:
            return
        if self.trial is None and self.steps >= self.may_measure_at and (self.number == 1 or self._is_slow()):
            self.trial = {1: [], self.most: []}
        if (trial := self.trial) is not None:
            torch.set_num_threads(min(trial, key=lambda number: len(trial[number])))

    def _is_slow(self) -> bool:
        """Whether the last steps took much longer than those that were measured."""
        return self.usual is not None and len(self.recent) == ROUNDS and median(self.recent) > SLOW * self.usual

    def _end(self, seconds: float) -> None:
        """Take in the time of a step, in seconds a row."""
        self.steps += 1
        if self.trial is None:
            self.recent.append(seconds)
            return
        one, several = self.trial[1], self.trial[self.most]
        (several if torch.get_num_threads() == self.most else one).append(seconds)
        if len(one) != len(several):
            return
        most = (GIVEN_UP if len(one) == 1 else SLOW) * median(one)
        if len(one) == ROUNDS or median(several) > most:
            self._choose(median(several), median(one))

    def _choose(self, several: float, one: float) -> None:
        usual = self.usual
        before = self.most if usual is None else self.number
        self.number = self.most if one > PAYS * several else 1
        self.usual = several if self.number > 1 else one
        self.trial = None
        self.recent.clear()
        torch.set_num_threads(self.number)
        self.may_measure_at, self.wait = self.steps + self.wait, min(2 * self.wait, WAITS[1])
        if self.number == before:
            return
        if self.number > 1:
            self._tell("again", f"{self.number} CPU threads are {one / several:.1f} times as fast as one again")
        elif usual is None:
            self._tell("first", f"steps take one CPU thread: {self.most} take {several / one:.1f} times as long")
        else:
            slower = f"{self.most} CPU threads became {several / usual:.1f} times as slow as before"
            self._tell("slow", f"{slower}, as beside other work on the machine; training goes on with one")

    def _tell(self, kind: str, message: str) -> None:
        if kind not in self.told:
            self.told.add(kind)
            self.tell(message)
