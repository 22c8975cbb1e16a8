"""The best model for a dataset within a time: every suitable model competes on valid, and test is opened at the end.

Models that are fitted come first, the cheapest first: one combination of settings each, which tells who may win; then
those that may choose among all combinations. The others train in slices (`race`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

from recspec.base.errors import Interrupted, SettingsError
from recspec.base.files import confine, local, locked_inside, mkdir_or_undo
from recspec.base.signals import stopping_at_once
from recspec.evaluation import Evaluation
from recspec.training import Event, Result, TrackedSearch, TrainingPlan, plan_run
from recspec.training.search import candidates
from recspec.training.search.finish import Finish
from recspec.training.search.race import GRID_GAIN, GROWTH, KEPT_BACK, Race, first_slice, hope_of, next_of
from recspec.training.search.state import (
    BEST,
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

FIRST_FIT = 1e-3
"""Seconds of a first fit: it ends after one combination."""
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
    race: Race = field(init=False)
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
            board = Finish(self).run(self.race.left)
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
        self.state, self.race = found, Race(found, self.minutes)
        for line in found.lines:
            if line.attempts >= MOST_ATTEMPTS and not line.is_over:
                line.failed = f"the process ended {line.attempts} times while it trained"
        self.tell(f"{self.out}: {found.progress(self.race.left)}")

    def _begin(self) -> None:
        started = time.monotonic()
        with stopping_at_once(f"{self.out}: {STOPPED}") if self.ranks.world_size == 1 else nullcontext():
            self.state, self.plans = candidates.begin(
                self.spec, self.out, self.minutes, self.metric, self.models, self.seed, self.train, self.ranks
            )
        found, self.race = self.state, Race(self.state, self.minutes)
        for warning in found.warnings:
            self.tell(f"warning: {warning}")
        if found.users is not None and found.users < found.size:
            self.tell(f"all candidates are judged on {found.users:,} of the {found.size:,} users of valid")
        found.spent = time.monotonic() - started
        found.save(self.out)

    def _next(self) -> Line | None:
        """The candidate to train now; None if the time is over or nothing is left."""
        if self.stop_requested() or self.race.left_to_train <= 0:
            return None
        if fits := self.race.fits():
            return fits[0]
        pausable = [line for line in self.state.lines if not line.is_fitted]
        found = next_of(pausable, self.race.has_room)
        if found is None and self._add_variants(pausable):
            return self._next()
        return found

    def _add_variants(self, pausable: Sequence[Line]) -> bool:
        """Add variants of the best models that are not clearly behind; False if there were enough."""
        made_so_far = sum(line.name != line.model for line in pausable)
        reached = {line.model: line for line in sorted(pausable, key=lambda line: line.best) if line.values}
        best = [
            line
            for line in sorted(reached.values(), key=lambda line: -line.best)[:OF_MODELS]
            if not self.race.is_behind(line, 0.0)
            and self.race.has_room(Line(name="", model=line.model, beside=line.beside))
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
        room = self.race.room(line) - line.beside
        until = min(max(slices, line.trained + 1), line.trained + max(1.0, room))
        if line.is_fitted:
            until, line.values = FIRST_FIT if line.hope is None else self.race.seconds_to_fit(line), []  # a new bundle
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
            self.race.end_hopeless()
        finally:
            self._count(line)
            self.state.save(self.out)
        self.look(self.state, self.race.left)

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
            self.race.judged[line.name] = Judged(f"{protocol}/{name}", kept)
        write_recipe(line, self.run_of(line.name), self.state.dataset)

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
