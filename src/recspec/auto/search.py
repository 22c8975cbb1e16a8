"""The best model for a dataset within a time: every suitable model competes on valid, and test is opened at the end."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

import yaml

from recspec import __version__
from recspec.auto import candidates, cost, halving
from recspec.auto.ending import finish
from recspec.auto.judging import sign_of
from recspec.auto.leaderboard import Leaderboard
from recspec.auto.state import RECIPE, RUNS, WRITTEN, Line, State
from recspec.bundle import folder as bundle
from recspec.distributed import Ranks
from recspec.errors import Interrupted, RecspecError, SettingsError
from recspec.files import confine, local, locked_inside, made, whole_file
from recspec.spec import FeatureSpec
from recspec.training import Event, FitPlan, Result, TrainingPlan, has_checkpoint, train

KEPT_BACK = 0.2
"""Share of the time kept for training the winner again, test and latency."""
MOST_FOR_JUDGING = 0.2
"""Share of the time that one evaluation of a model may take; a model that takes longer is left out."""
VARIANTS = 24
"""Most candidates beyond each model's defaults; small data would take thousands."""
TOGETHER = 4
"""Variants that begin together, so that halving has something to halve."""
OF_MODELS = 2
"""Variants are of the best models, so many of them."""

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

    def run(self) -> Leaderboard:
        """Train until the time is spent or nothing is left to train, then judge once.

        The time is that of all calls together. The same command continues a search that was stopped or killed.

        Raises:
            SettingsError: if the folder holds another search, or no model can train on the dataset.
            DataError: if another process searches in the folder.
            Interrupted: if `stop_requested` says so.
        """
        self.out = local(self.out, "OUT")
        with made(self.out), locked_inside(self.out, "searching in"):
            confine(self.out, WRITTEN)
            self._open()
            while (line := self._next()) is not None:
                self._slice(line)
            if self.stop_requested():
                raise Interrupted(f"{self.out}: stopped as asked; the same command goes on")
            return finish(self.spec, self.state, self.out, self.left, self.ranks, self.on_event, self.stop_requested)

    # --- what to train -----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Take up the search in the folder, or begin one: find the models, the metric and what an evaluation costs."""
        asked: dict[str, object] = {} if self.metric is None else {"metric": self.metric}
        plans, left_out = candidates.suitable(self.spec, self.models, asked, self.ranks)
        self.plans, planned = plans, next(iter(plans.values()))
        if not planned.valid.value:
            raise SettingsError(f"{self.spec.folder}: no split to choose on: {planned.valid.reason}")
        metric = self.metric or candidates.common_metric(self.spec, planned)
        about = {"dataset": str(self.spec.folder.resolve()), "metric": metric, "seed": self.seed}
        found = State.load(self.out)
        if found is None:
            started = time.monotonic()
            found = State(**about, left_out=left_out)
            self.sign, self.state = sign_of(metric), found
            self._plan_cost(plans)
            found.spent = time.monotonic() - started
        if differing := [
            f"{name} was {getattr(found, name)!r}, and is {value!r}"
            for name, value in about.items()
            if getattr(found, name) != value
        ]:
            raise SettingsError.of(f"{self.out}: holds another search; name another folder", differing)
        self.state, self.sign = found, sign_of(metric)
        found.save(self.out)

    def _plan_cost(self, plans: Mapping[str, TrainingPlan | FitPlan]) -> None:
        """Begin with every model whose evaluation is not too long."""
        state, protocol = self.state, self.state.metric.partition("/")[0]
        for name, plan in plans.items():
            if not candidates.is_fitted(name):
                state.each[name], state.size = cost.seconds_each(plan.make(None), self.spec, protocol, self.ranks)
        most = MOST_FOR_JUDGING * self.minutes * 60
        too_slow = [name for name, each in state.each.items() if protocol != "full" and each * state.size > most]
        if protocol == "full":
            state.users, too_slow = cost.users_to_rank(state.each, state.size or cost.MOST_USERS, most)
        for name in too_slow:
            takes = state.each[name] * (state.users or state.size)
            state.left_out[name] = f"one evaluation takes {takes:.0f} of {60 * self.minutes:.0f} s; give more --minutes"
        train_settings: dict[str, object] = {"tensorboard": False, "seed": self.seed}
        if state.users is not None:
            train_settings["valid_users"] = state.users
        for name in (name for name in plans if name not in too_slow):
            more = dict[str, object]() if candidates.is_fitted(name) else dict(self.train)
            if self.metric is not None or plans[name].metric.value != state.metric:
                more["metric"] = state.metric
            state.lines.append(Line(name=name, model=name, train={**train_settings, **more}))

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
        return found

    def _add_variants(self, pausable: Sequence[Line]) -> bool:
        """Add variants of the best models; False if there were enough."""
        defaults = [line for line in pausable if line.name == line.model in self.plans and not line.failed]
        made_so_far = len(pausable) - sum(line.name == line.model for line in pausable)
        if not defaults or made_so_far >= self.most_variants:
            return False
        best = sorted(defaults, key=lambda line: -self._best_of(line.model))[:OF_MODELS]
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
        plan = self.plans[line.model]
        assert isinstance(plan, TrainingPlan)
        return candidates.variants(line.model, plan, line.train, self.seed)

    def _best_of(self, model: str) -> float:
        return max(line.best for line in self.state.lines if line.model == model)

    # --- training ----------------------------------------------------------------------------------------------------

    def _slice(self, line: Line) -> None:
        """Train a candidate for its next slice, and note what it reached."""
        started, before = time.monotonic(), line.seconds
        line.began = 1 + max(other.began for other in self.state.lines)
        defaults = sum(other.name == other.model for other in self.state.lines if not candidates.is_fitted(other.model))
        slices = halving.first_slice(self.minutes * 60 * (1 - KEPT_BACK), defaults) * halving.GROWTH ** len(line.values)
        until = min(max(slices, before + 1), before + max(1.0, self.left_to_train))
        try:
            result = self._train(line, until)
        except Interrupted:
            raise Interrupted(f"{self.out}: stopped as asked; the same command goes on") from None
        except RecspecError as error:
            line.failed = str(error)
        else:
            self._note(line, result)
        finally:
            line.seconds = before + time.monotonic() - started
            self.state.spent += time.monotonic() - started
            self.state.save(self.out)
        self.look(self.state, self.left)

    def _note(self, line: Line, result: Result) -> None:
        protocol, _, name = self.state.deciding.partition("/")
        found = result.metrics.get(protocol, {})
        if name not in found and self.metric is None:  # lists too short for the cut-off, for all models alike
            name = next((each for each in found if each.startswith(f"{name.rpartition('@')[0]}@")), name)
            self.state.shorter = f"{protocol}/{name}"
        value = found.get(name, math.nan)
        line.best_epoch = float(result.best_epoch)
        if not math.isfinite(value):
            line.failed = f"it has no {self.state.deciding} on valid"
            return
        line.values.append(self.sign * value)
        if result.stopped != "minutes":
            line.ended = result.stopped
        self._write_recipe(line)

    def _train(self, line: Line, until: float) -> Result:
        fitted = candidates.is_fitted(line.model)
        seconds = max(1.0, self.left_to_train) if fitted else until  # a fit ends with the best settings so far
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
        )

    def _see(self, line: Line, event: Event) -> None:
        if event["event"] == "epoch":
            line.epoch = float(str(event["epoch"]))
        self.on_event(line.name, event)

    def run_of(self, name: str) -> Path:
        """The folder of a candidate's run."""
        return self.out / RUNS / name

    def _write_recipe(self, line: Line) -> None:
        """Write the recipe that repeats a candidate's training up to its best epoch."""
        card = bundle.read_card(bundle.find(self.run_of(line.name)))
        train_settings = {**card.train, "epochs": max(1, math.ceil(line.best_epoch)), "minutes": None, "patience": None}
        how = f"candidate {line.name} of `recspec auto`"
        recipe = {
            "about": {"dataset": self.state.dataset, "how": how, "recspec": __version__},
            "model": line.model,
            "settings": dict(card.settings),
            "train": train_settings if not candidates.is_fitted(line.model) else dict(line.train),
        }
        with whole_file(self.run_of(line.name) / RECIPE) as temporary:
            temporary.write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), encoding="utf-8")
