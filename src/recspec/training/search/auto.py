"""The best model for a dataset within a time: every suitable model competes on valid, and test is opened at the end."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

from recspec.base.errors import Interrupted, SettingsError
from recspec.base.files import confine, local, locked_inside, mkdir_or_undo
from recspec.base.signals import stopping_at_once
from recspec.feature_spec import FeatureSpec
from recspec.loading import Ranks
from recspec.training import Event, Result, TrackedSearch, TrainingPlan, has_checkpoint, plan_run, train
from recspec.training.search import candidates, halving
from recspec.training.search.beginning import begin, so_far
from recspec.training.search.ending import Finish
from recspec.training.search.leaderboard import Leaderboard, write_recipe
from recspec.training.search.state import BEST, RUNS, WRITTEN, Line, State, check_metric, sign_of

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

Look = Callable[[State, float], None]
"""Receives the state after each slice, and the seconds that are left."""


@dataclass
class AutoSearch:
    """A search over all models that a dataset's roles fill."""

    spec: FeatureSpec
    out: Path
    minutes: float
    metric: str | None = None
    models: Sequence[str] | None = None
    seed: int = 0
    train: Mapping[str, object] = field(default_factory=dict)
    """Settings of training that every model trained by steps is given."""
    most_variants: int = VARIANTS
    ranks: Ranks = field(default_factory=Ranks)
    look: Look = lambda _, __: None
    on_event: Callable[[str, Event], None] = lambda _, __: None
    """Called with the name of a candidate and each event of its training."""
    stop_requested: Callable[[], bool] = lambda: False
    tell: Callable[[str], None] = lambda _: None
    """Called with a sentence on what the search takes up, leaves out, or does at its end."""
    plans: dict[str, TrainingPlan] = field(default_factory=dict, init=False)
    _tracked: TrackedSearch = field(init=False)
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
        self._tracked = TrackedSearch(self.out)
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
                self._tracked.wait()
                raise Interrupted(f"{self.out}: {STOPPED}")
            end = Finish(
                self.spec,
                self.state,
                self.out,
                self.ranks,
                self.on_event,
                self.tell,
                self.stop_requested,
                self._tracked,
            )
            board = end.run(self.left)
            asked = self.train.get("mlflow")
            if problem := _track(self._tracked, asked if isinstance(asked, str) else None, self.spec, board):
                self.tell(problem)
            return board

    # --- what to train -----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Take up the search in the folder, or begin one."""
        found = State.load(self.out)
        asked = None if self.models is None else sorted(self.models)
        if found is None:
            started = time.monotonic()
            with stopping_at_once(f"{self.out}: {STOPPED}") if self.ranks.world_size == 1 else nullcontext():
                found, self.plans = begin(
                    self.spec, self.out, self.minutes, self.metric, self.models, self.seed, self.train, self.ranks
                )
            self.state, self.sign = found, sign_of(found.metric)
            for name, why in found.left_out.items():
                self.tell(f"left out: {name}: {candidates.main_reason(why)}")
            for warning in found.warnings:
                self.tell(f"warning: {warning}")
            if found.users is not None and found.users < found.size:
                self.tell(f"all candidates are judged on {found.users:,} of the {found.size:,} users of valid")
            found.spent = time.monotonic() - started
            found.save(self.out)
            return
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
        self.state, self.sign = found, sign_of(found.metric)
        for line in found.lines:
            if line.attempts >= MOST_ATTEMPTS and not line.is_over:
                line.failed = f"the process ended {line.attempts} times while it trained"
        self.tell(f"{self.out}: {so_far(found, self.left)}")

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
        for line in self.state.lines:
            if candidates.is_fitted(line.model) and not line.is_over:
                return line
        pausable = [line for line in self.state.lines if not candidates.is_fitted(line.model)]
        found = halving.next_of(pausable)
        if found is None and self._add_variants(pausable):
            return self._next()
        assert found is None or isinstance(found, Line)
        # A slice costs more than training; without room for that it would end after the time.
        return None if found is None or found.beside >= self.left_to_train else found

    def _add_variants(self, pausable: Sequence[Line]) -> bool:
        """Add variants of the best models; False if there were enough."""
        defaults = [line for line in pausable if line.name == line.model and not line.failed]
        made_so_far = len(pausable) - sum(line.name == line.model for line in pausable)
        if not defaults or made_so_far >= self.most_variants:
            return False
        reached: dict[str, float] = {}
        for line in self.state.lines:
            reached[line.model] = max(line.best, reached.get(line.model, line.best))
        best = sorted(defaults, key=lambda line: -reached[line.model])[:OF_MODELS]
        added = 0
        for line in islice(cycle(best), min(TOGETHER, self.most_variants - made_so_far)):
            number = sum(other.model == line.model for other in self.state.lines)
            given = next(islice(self._variants(line), number - 1, None), None)
            if given is not None:
                name = f"{line.model}-{number + 1}"
                own, train_settings = dict(given["settings"]), dict(given["train"])
                self.state.lines.append(Line(name=name, model=line.model, settings=own, train=train_settings))
                added += 1
        return bool(added)

    def _variants(self, line: Line) -> Iterator[candidates.Given]:
        plan = self.plans.get(line.model)
        if plan is None:  # the search was taken up
            own, train_settings = candidates.built(line.model, {"settings": {}, "train": line.train})
            made = plan_run(line.model, self.spec, Path(), train_settings, own, self.ranks, resume=False)
            assert isinstance(made, TrainingPlan)
            plan = self.plans[line.model] = made
        return candidates.variants(line.model, plan, line.train, self.seed)

    # --- training ----------------------------------------------------------------------------------------------------

    def _slice(self, line: Line) -> None:
        """Train a candidate for its next slice, and note what it reached."""
        self._started = self._counted = time.monotonic()
        line.attempts += 1
        line.began = 1 + max(other.began for other in self.state.lines)
        defaults = sum(other.name == other.model for other in self.state.lines if not candidates.is_fitted(other.model))
        slices = halving.first_slice(self.minutes * 60 * (1 - KEPT_BACK), defaults) * halving.GROWTH ** len(line.values)
        room = self.left_to_train - line.beside
        self.state.save(self.out)
        until = min(max(slices, line.trained + 1), line.trained + max(1.0, room))
        try:
            result = self._train(line, until)
        except Interrupted:
            line.attempts = 0
            raise Interrupted(f"{self.out}: {STOPPED}") from None
        except candidates.FAILURES as error:
            line.failed = candidates.told(error)
        else:
            line.attempts = 0
            self._note(line, result)
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
        line.best_epoch = float(result.best_epoch)
        if not math.isfinite(value):
            line.failed = f"it has no {self.state.deciding} on valid"
            return
        line.values.append(self.sign * value)
        if result.stopped != "minutes":
            line.ended = result.stopped
        write_recipe(line, self.run_of(line.name), self.state.dataset)

    def _seconds_to_fit(self) -> float:
        """Seconds in which a fit may try settings: an even share; the models trained by steps have one together."""
        fits = sum(candidates.is_fitted(line.model) and not line.is_over for line in self.state.lines)
        others = any(not candidates.is_fitted(line.model) for line in self.state.lines)
        return max(1.0, self.left_to_train / (fits + others))

    def _train(self, line: Line, until: float) -> Result:
        fitted = candidates.is_fitted(line.model)
        seconds = self._seconds_to_fit() if fitted else until  # a fit ends with the best settings so far
        given = {"settings": line.settings, "train": {**line.train, "minutes": seconds / 60}}
        model_settings, train_settings = candidates.built(line.model, given)
        run = self.run_of(line.name)
        resume = has_checkpoint(run) and not fitted
        if not resume:
            shutil.rmtree(run, ignore_errors=True)
        return train(
            line.model,
            self.spec,
            run,
            settings=train_settings,
            model_settings=model_settings,
            ranks=self.ranks,
            resume=resume,
            on_event=lambda event: self._see(line, event),
            stop_requested=self.stop_requested,
            part_of=self._tracked,
        )

    def _see(self, line: Line, event: Event) -> None:
        if event["event"] == "epoch":
            line.epoch = float(str(event["epoch"]))
        if time.monotonic() - self._counted > SAVED_EVERY:  # so that the clock of a killed search is right
            self._count(line)
            self.state.save(self.out)
        self.on_event(line.name, event)

    def run_of(self, name: str) -> Path:
        """The folder of a candidate's run."""
        return self.out / RUNS / name


def _track(search: TrackedSearch, asked: str | None, spec: FeatureSpec, board: Leaderboard) -> str | None:
    """Tell MLflow the winner, if candidates are tracked. Returns what failed."""
    best, bundle = board.lines[0], board.best / "bundle"
    return search.finish(
        asked,
        start={
            "data": str(spec.folder),
            "model": best["model"],
            "metric": board.metric,
            "verdict": board.verdict,
        },
        done={
            "bundle": str(bundle if bundle.is_dir() else board.best),
            "metrics": {split: {board.metric: best.get(split)} for split in ("valid", "test")},
            "seconds": board.seconds,
        },
    )
