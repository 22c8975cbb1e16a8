"""The best model for a dataset within a time: every suitable model competes on valid, and test is opened at the end.

Models that are fitted come first, the cheapest first: one combination of settings each, which tells who may win; then
those that may choose among all combinations.

For the others, successive halving over time: a candidate trains in slices, each up to twice the time of all before.
After a slice it waits; the better half of those that had as many slices goes on (Li et al.: A System for Massively
Parallel Hyperparameter Tuning, MLSys 2020, algorithm 2, with time as the resource and one worker). What waits goes on
when nothing better can.

A race ends candidates: one that the best candidate leads, over the same users or rows, by more than it may still gain
and two standard errors (after Maron, Moore: Hoeffding Races, NIPS 1993, with paired errors). All that don't lead share
two fifths of the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from recspec.base.errors import Interrupted, SettingsError
from recspec.base.files import confine, local, locked_inside, mkdir_or_undo
from recspec.base.signals import stopping_at_once
from recspec.evaluation import Evaluation
from recspec.training import Event, Result, TrackedSearch, TrainingPlan, plan_run
from recspec.training.search import candidates
from recspec.training.search.finish import Finish
from recspec.training.search.state import (
    BEST,
    CLEAR,
    WRITTEN,
    Judged,
    Leaderboard,
    Line,
    Search,
    State,
    check_metric,
    sign_of,
    write_recipe,
)
from recspec.training.search.study import FIRST_RUNG, most_gain

KEPT_BACK = 0.2
"""Share of the time kept for training the winner again, test and latency."""
VARIANTS = 24
"""Most candidates beyond each model's defaults; small data would take thousands."""
TOGETHER = 4
"""Variants that begin together, so that halving has something to halve."""
OF_MODELS = 2
"""Variants are of the best models, so many of them."""

SAVED_EVERY = 5.0
"""Seconds after which the time of a candidate that trains is written down."""
MOST_ATTEMPTS = 3
"""Times that a candidate may end the process, as too little memory does, before it is given up."""
STOPPED = "stopped as asked; the same command goes on"

GRID_GAIN = 0.3
"""What all combinations of a fitted model's settings gain at most on its first one, as a share of its value."""
FIRST_FIT = 1e-3
"""Seconds of a first fit: it ends after one combination."""
BEHIND = "behind"
"""Why the training of a candidate ended that can't win any more."""

GROWTH = 2
"""How many times as long a candidate has trained after each slice, and the inverse of the share that goes on."""

Look = Callable[[State, float], None]
"""Receives the state after each slice, and the seconds that are left."""


@dataclass
class AutoSearch(Search):
    """A search over all models that a dataset's roles fill."""

    minutes: float
    metric: str | None = None
    models: Sequence[str] | None = None
    seed: int = 0
    train: Mapping[str, object] = field(default_factory=dict)
    """Settings of training that every model trained by steps is given."""
    most_variants: int = VARIANTS
    look: Look = lambda _, __: None
    plans: dict[str, TrainingPlan] = field(default_factory=dict, init=False)
    judged: dict[str, Judged] = field(default_factory=dict, init=False)
    """Candidates on valid, of those that trained in this call."""
    _started: float = field(default=0.0, init=False)
    _counted: float = field(default=0.0, init=False)

    def run(self) -> Leaderboard:
        """Train until the time is spent or nothing is left to train, then judge once.

        The time is that of all calls together. The same command continues a search that was stopped or killed.

        Raises:
            SettingsError: if the folder holds another search, or no model can train on the dataset.
            DataError: if another process searches in the folder.
            Interrupted: if `stop_requested` says so.
        """
        self.out = local(self.out, "OUT")
        self.tracked = TrackedSearch(self.out)
        with mkdir_or_undo(self.out), locked_inside(self.out, "searching in", holds=BEST):
            confine(self.out, WRITTEN)
            self._open()
            if self.state.ending is None or self.state.ending.done:
                while (line := self._next()) is not None:
                    if self.state.ending is not None or self.state.blend is not None:
                        self.state.check_runs(self.out)
                        self.state.ending = self.state.blend = None  # a new choice; then test is opened for it
                    self._slice(line)
            if self.stop_requested():
                self.tracked.wait()
                raise Interrupted(f"{self.out}: {STOPPED}")
            board = Finish(self).run(self.left)
            if problem := self._track(board):
                self.tell(problem)
            return board

    def _track(self, board: Leaderboard) -> str | None:
        """Tell MLflow the winner, if candidates are tracked. Returns what failed."""
        asked, best, bundle = self.train.get("mlflow"), board.lines[0], board.best / "bundle"
        about = {"data": str(self.spec.folder), "model": best["model"], "metric": board.metric}
        return self.tracked.finish(
            asked if isinstance(asked, str) else None,
            start={**about, "verdict": board.verdict},
            done={
                "bundle": str(bundle if bundle.is_dir() else board.best),
                "metrics": {split: {board.metric: best.get(split)} for split in ("valid", "test")},
                "seconds": board.seconds,
            },
        )

    # --- what to train -----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Take up the search in the folder, or begin one."""
        found = State.load(self.out)
        if found is None:
            self._begin()
            return
        asked = None if self.models is None else sorted(self.models)
        about = {"dataset": str(self.spec.folder.resolve()), "seed": self.seed, "models": asked}
        if self.metric is not None:
            check_metric(self.metric)
            about["metric"] = self.metric
        if differing := [
            f"{name} was {getattr(found, name)!r}, and is {value!r}"
            for name, value in about.items()
            if getattr(found, name) != value
        ]:
            raise SettingsError.of(f"{self.out}: holds another search; name another folder", differing)
        self.state = found
        for line in found.lines:
            if line.attempts >= MOST_ATTEMPTS and not line.is_over:
                line.failed = f"the process ended {line.attempts} times while it trained"
        self.tell(f"{self.out}: {found.progress(self.left)}")

    def _begin(self) -> None:
        started = time.monotonic()
        with stopping_at_once(f"{self.out}: {STOPPED}") if self.ranks.world_size == 1 else nullcontext():
            self.state, self.plans = candidates.begin(
                self.spec, self.out, self.minutes, self.metric, self.models, self.seed, self.train, self.ranks
            )
        found = self.state
        for name, why in found.left_out.items():
            self.tell(f"left out: {name}: {candidates.main_reason(why)}")
        for warning in found.warnings:
            self.tell(f"warning: {warning}")
        if found.users is not None and found.users < found.size:
            self.tell(f"all candidates are judged on {found.users:,} of the {found.size:,} users of valid")
        found.spent = time.monotonic() - started
        found.save(self.out)

    @property
    def left(self) -> float:
        """Seconds left of the whole time."""
        return self.minutes * 60 - self.state.spent

    @property
    def left_to_train(self) -> float:
        """Seconds left for training candidates."""
        return self.left - KEPT_BACK * self.minutes * 60

    def _next(self) -> Line | None:
        """The candidate to train now; None if the time is over or nothing is left."""
        if self.stop_requested() or self.left_to_train <= 0:
            return None
        fits = [line for line in self.state.lines if line.is_fitted and not line.is_over and self._has_room(line)]
        pausable = [line for line in self.state.lines if not line.is_fitted]
        if any(not line.values and self._has_room(line) for line in pausable):  # they come before long fits
            share = candidates.LOSERS * self.minutes * 60 / len(self.state.lines)
            fits = [line for line in fits if _shortest(line) <= share]
        if fits:
            return min(fits, key=lambda line: (line.hope is not None, -line.best if line.values else 0.0))
        found = next_of(pausable, self._has_room)
        if found is None and self._add_variants(pausable):
            return self._next()
        return found

    @property
    def _best(self) -> Line:
        return max(self.state.lines, key=lambda line: line.best)

    def _room(self, line: Line) -> float:
        """Seconds that a candidate's next slice may take, all included."""
        losers = sum(each.seconds for each in self.state.lines if each is not self._best)
        left = self.left_to_train
        return left if line is self._best and line.values else min(left, candidates.LOSERS * self.minutes * 60 - losers)

    def _has_room(self, line: Line) -> bool:
        """Whether a slice would end in time. It costs more than training; for a first one that is estimated."""
        judging = self.state.each.get(line.model, 0.0) * (self.state.users or self.state.size)
        return self._room(line) > (line.beside or judging) + _shortest(line)

    def _race(self) -> None:
        """End the candidates that can't win any more."""
        for line in self.state.lines:
            if line.values and not line.is_over and line.hope is not None:
                twice = 1.0 if line.is_fitted else min(1.0, self.left_to_train / (2 * line.trained + 1e-9))
                if self._is_behind(line, twice * line.hope):
                    line.ended = BEHIND

    def _is_behind(self, line: Line, gain: float) -> bool:
        """Whether the best candidate leads clearly, even after such a gain; not if that is unknown."""
        best = self._best
        if not {best.name, line.name} <= self.judged.keys():
            return False
        by, error = self.judged[best.name].lead(self.judged[line.name])
        return by - CLEAR * error > gain

    def _add_variants(self, pausable: Sequence[Line]) -> bool:
        """Add variants of the best models that are not clearly behind; False if there were enough."""
        made_so_far = sum(line.name != line.model for line in pausable)
        reached = {line.model: line for line in sorted(pausable, key=lambda line: line.best) if line.values}
        best = [
            line
            for line in sorted(reached.values(), key=lambda line: -line.best)[:OF_MODELS]
            if not self._is_behind(line, 0.0) and self._has_room(Line(name="", model=line.model, beside=line.beside))
        ]
        if not best or made_so_far >= self.most_variants:
            return False
        for model in islice(cycle(line.model for line in best), min(TOGETHER, self.most_variants - made_so_far)):
            number = sum(other.model == model for other in self.state.lines)
            own, train_settings = next(islice(self._variants(self.state.line(model)), number - 1, None))
            name = f"{model}-{number + 1}"
            self.state.lines.append(Line(name=name, model=model, settings=own, train=train_settings))
        return True

    def _variants(self, line: Line) -> Iterator[tuple[dict[str, object], dict[str, object]]]:
        if line.model not in self.plans:  # the search was taken up
            own, train_settings = candidates.build_settings(line.model, {}, line.train)
            plan = plan_run(line.model, self.spec, Path(), train_settings, own, self.ranks, resume=False)
            assert isinstance(plan, TrainingPlan)
            self.plans[line.model] = plan
        return candidates.variants(line.model, self.plans[line.model], line.train, self.seed)

    # --- training ----------------------------------------------------------------------------------------------------

    def _slice(self, line: Line) -> None:
        """Train a candidate for its next slice, and note what it reached."""
        self._started = self._counted = time.monotonic()
        line.attempts += 1
        line.began = 1 + max(other.began for other in self.state.lines)
        defaults = sum(other.name == other.model for other in self.state.lines if not other.is_fitted)
        slices = first_slice(self.minutes * 60 * (1 - KEPT_BACK), defaults) * GROWTH ** len(line.values)
        room = self._room(line) - line.beside
        until = min(max(slices, line.trained + 1), line.trained + max(1.0, room))
        if line.is_fitted:
            until, line.values = FIRST_FIT if line.hope is None else self._seconds_to_fit(line), []  # a new bundle
        self.state.save(self.out)
        try:
            result = self._train(line, until)
        except Interrupted:
            line.attempts = 0
            raise Interrupted(f"{self.out}: {STOPPED}") from None
        except candidates.FAILURES as error:
            line.failed = candidates.problems_of(error)
        else:
            line.attempts = 0
            self._note(line, result)
            self._race()
        finally:
            self._count(line)
            self.state.save(self.out)
        self.look(self.state, self.left)

    def _count(self, line: Line) -> None:
        """Add the time since the last count to that of the candidate and of the search."""
        now = time.monotonic()
        line.seconds += now - self._counted
        self.state.spent += now - self._counted
        self._counted = now

    def _note(self, line: Line, result: Result) -> None:
        protocol, _, name = self.state.deciding.partition("/")
        found = result.metrics.get(protocol, {})
        if name not in found and self.metric is None:  # lists too short for the cut-off, for all models alike
            name = next((each for each in found if each.startswith(f"{name.rpartition('@')[0]}@")), name)
            self.state.shorter = f"{protocol}/{name}"
        value = found.get(name, math.nan)
        line.beside = max(0.0, time.monotonic() - self._started - (result.seconds - line.trained))
        line.trained = result.seconds
        line.best_epoch = result.best_epoch
        if not math.isfinite(value):
            line.failed = f"it has no {self.state.deciding} on valid"
            return
        line.values.append(sign_of(self.state.metric) * value)
        if result.cut and line.hope is None:
            line.hope = GRID_GAIN * abs(value)
        elif result.stopped != "minutes":
            line.ended = result.stopped
        else:
            line.hope = hope_of(result, sign_of(self.state.metric))
        if (
            result.evaluation is not None
            and (values := result.evaluation.values.get(protocol, {}).get(name)) is not None
        ):
            kept = Evaluation({protocol: {name: value}}, values={protocol: {name: values}})
            self.judged[line.name] = Judged(f"{protocol}/{name}", kept)
        write_recipe(line, self.run_of(line.name), self.state.dataset)

    def _seconds_to_fit(self, line: Line) -> float:
        """Seconds in which a fit may try settings: an even share, of a half if others train by steps."""
        fits = sum(line.is_fitted and not line.is_over for line in self.state.lines)
        others = any(not line.is_fitted for line in self.state.lines)
        return max(1.0, self._room(line) / (fits * (1 + others)))

    def _train(self, line: Line, until: float) -> Result:
        given = {**line.train, "minutes": until / 60}
        return candidates.train_candidate(
            line.model,
            self.spec,
            self.run_of(line.name),
            candidates.build_settings(line.model, line.settings, given),
            ranks=self.ranks,
            on_event=lambda event: self._see(line, event),
            stop_requested=self.stop_requested,
            part_of=self.tracked,
        )

    def _see(self, line: Line, event: Event) -> None:
        if event["event"] == "epoch":
            line.epoch = float(str(event["epoch"]))
        if time.monotonic() - self._counted > SAVED_EVERY:  # so that the clock of a killed search is right
            self._count(line)
            self.state.save(self.out)
        self.on_event(line.name, event)


def _shortest(line: Line) -> float:
    """Seconds of a fit that can't be shorter: of one combination of settings; of two if others follow the first."""
    if not line.is_fitted:
        return 0.0
    return line.fit if line.hope is None else 2 * line.trained


def hope_of(result: Result, sign: float) -> float | None:
    """Most that a training may still gain if it goes on for twice its time; None before its pace is known."""
    values = result.trace.get(result.metric, ())
    best = np.minimum.accumulate(-sign * np.array(values))
    trace = {int(epoch): float(value) for epoch, value in zip(result.trace.get("epoch", ()), best, strict=True)}
    return most_gain(trace) if max(trace, default=0) >= FIRST_RUNG else None


def next_of(lines: Sequence[Line], may: Callable[[Line], bool] = lambda _: True) -> Line | None:
    """The candidate to train now, of those that `may`; None if there is none.

    First one that is among the better half after its number of slices, those with most slices first. Then one that has
    not begun, in order. Then the best of those that wait.
    """
    longest = max((len(each.values) for each in lines), default=0)
    for slices in range(longest, 0, -1):
        had = [each for each in lines if len(each.values) >= slices or (each.is_over and each.values)]
        # One that ended earlier keeps its last value.
        had.sort(key=lambda each: -each.values[min(slices, len(each.values)) - 1])
        better = had[: len(had) // GROWTH]
        if waiting := [each for each in better if len(each.values) == slices and not each.is_over and may(each)]:
            return waiting[0]
    begun = [each for each in lines if each.values and not each.is_over and may(each)]
    fresh = [each for each in lines if not each.values and not each.is_over and may(each)]
    return fresh[0] if fresh else max(begun, key=lambda each: each.values[-1], default=None)


def first_slice(seconds: float, num_candidates: int) -> float:
    """Seconds of the first slice: all first slices take a quarter of the time, and none less than two seconds."""
    return max(2.0, seconds / (4 * max(1, num_candidates)))
