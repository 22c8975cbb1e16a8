"""Hyper-parameter search: trials of `train`, judged on valid alone, in one process or several.

A search lives in a folder and outlasts the process:

    OUT/study.db          the trials and their outcomes (Optuna, SQLite)
    OUT/trials/0007/      the run of trial 7: log.jsonl, and checkpoints while it is under way
    OUT/best.yaml         the best recipe so far
    OUT/best/             its bundle

The same command continues a search that was stopped or killed, and its trial under way from the trial's checkpoint.
Several processes may run the same command at once, or one command starts `workers`; they share the trials. The test
split is never opened.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch

from recspec import __version__
from recspec.base import config
from recspec.base.errors import Interrupted, RecspecError, SettingsError, TrainingError, require_extra
from recspec.base.files import clear_abandoned, confine, local, mkdir_or_undo, put_in_place, turn
from recspec.base.signals import handled
from recspec.bundle import run_record
from recspec.feature_spec import FeatureSpec
from recspec.loading import Ranks
from recspec.models import find_model
from recspec.training import Event, Plan, TrackedSearch, TrainSettings, plan_run
from recspec.training.search.candidates import train_candidate
from recspec.training.search.search_space import (
    Around,
    OneOf,
    Range,
    assigned,
    default_of,
    parse_space,
    search_space,
    sections_of,
)
from recspec.training.search.state import sign_of
from recspec.training.search.study import (
    BUNDLE,
    DEFAULTS,
    NAME,
    RECIPE,
    STUDY,
    WRITTEN,
    Found,
    Study,
    is_compared,
    is_hopeless,
    is_rung,
    number_of,
    storage_of,
    values_of,
)

if TYPE_CHECKING:
    import optuna


MOST_STARTS = 3
"""Trials taken from each earlier search."""


def previous_best(folders: Sequence[Path], model: str) -> dict[str, Mapping[str, object]]:
    """The settings of the best complete trials of earlier searches of a model, by a name for each.

    Nothing is written to the folders.

    Raises:
        SettingsError: with every folder that holds no search of this model, or none with a complete trial.
    """
    found: dict[str, Mapping[str, object]] = {}
    problems: list[str] = []
    for folder in folders:
        try:
            found |= _best_in(local(folder, "--like"), model)
        except SettingsError as error:
            problems += error.problems
    SettingsError.refuse("--like", problems)
    return found


def _best_in(folder: Path, model: str) -> dict[str, Mapping[str, object]]:
    optuna: Any = require_extra("optuna", "tune")
    if not (folder / STUDY).is_file():
        raise SettingsError(f"{folder}: holds no search; expected the folder of an earlier `recspec tune {model}`")
    confine(folder, WRITTEN)
    with storage_of(optuna, folder, read_only=True) as storage:
        try:
            study = optuna.load_study(study_name=NAME, storage=storage)
        except KeyError:
            raise SettingsError(f"{folder / STUDY}: holds no search of recspec's") from None
        known, searched = study.user_attrs.get("model"), study.user_attrs.get("search")
        if known != model:
            raise SettingsError(f"{folder}: is a search of '{known}', not of '{model}'")
        space: dict[str, OneOf | Range | Around] = {}
        for name, written in searched.items() if isinstance(searched, dict) else ():
            with suppress(SettingsError):  # settings come and go, and anyone may write the file
                space |= parse_space({name: written}, sections_of(model))
        trials = study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    judged = [trial for trial in trials if trial.value is not None and math.isfinite(trial.value)]
    if not judged:
        raise SettingsError(f"{folder}: no trial of this search is complete")
    best = sorted(judged, key=lambda trial: (trial.value, trial.number))[:MOST_STARTS]
    readable = {name: drawn for name, drawn in space.items() if not isinstance(drawn, Around)}
    return {f"trial {number_of(trial)} of {folder}": values_of(trial.params, readable) for trial in best}


END_SECONDS = 8.0
"""Time for workers to write their checkpoints."""


@dataclass(frozen=True)
class Workers:
    """Processes that work beside this one."""

    processes: tuple[SpawnProcess, ...] = ()
    errors: SimpleQueue[str] | None = None
    """Errors of the user that ended a process."""
    found: list[str] = field(default_factory=list)

    @property
    def work(self) -> bool:
        """Whether some process still works."""
        return any(process.is_alive() for process in self.processes)

    def problems(self) -> list[str]:
        """How each process ended that did not end well."""
        while self.errors is not None and not self.errors.empty():
            self.found.append(self.errors.get())
        told = list(self.found)
        for process in self.processes:
            if status := process.exitcode:
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                told.append(f"worker process {process.pid} {how}; the others go on with its trial")
        return told


@contextmanager
def workers(number: int, work: Callable[..., object], given: Mapping[str, Any]) -> Iterator[Workers]:
    """Processes that call `work(stop_requested=..., **given)`, until the end of the block.

    They share the threads of this one, unless OMP_NUM_THREADS gives their number.
    """
    if number == 0:
        yield Workers()
        return
    before = torch.get_num_threads()
    threads = before if "OMP_NUM_THREADS" in os.environ else max(1, before // (1 + number))
    spawned = multiprocessing.get_context("spawn")
    errors: SimpleQueue[str] = spawned.SimpleQueue()
    arguments = (work, given, os.getpid(), threads, errors)
    found = Workers(tuple(spawned.Process(target=_run, args=arguments, daemon=True) for _ in range(number)), errors)
    torch.set_num_threads(threads)
    try:
        for process in found.processes:
            process.start()
        yield found
    finally:
        torch.set_num_threads(before)
        for process in found.processes:
            if process.is_alive():
                process.terminate()  # it stops at a checkpoint
        end = time.monotonic() + END_SECONDS
        for process in found.processes:
            if process.pid is not None:
                process.join(max(0.0, end - time.monotonic()))
                process.kill()  # it computes without a pause; its trial goes on from the last checkpoint
                process.join()


def _run(
    work: Callable[..., object], given: Mapping[str, Any], parent: int, threads: int, errors: SimpleQueue[str]
) -> None:
    """What a worker does; it also stops when the process that started it has died, whatever it is doing then."""
    stopped = False
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    torch.set_num_threads(threads)
    try:
        with handled(stop):
            work(stop_requested=lambda: stopped or os.getppid() != parent, **given)
    except RecspecError as error:
        if not stopped:
            errors.put(f"worker process {os.getpid()} ended: {error}")


def _end_with(parent: int) -> None:
    """End this process soon after the one that started it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(END_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


CURVES = "train.tensorboard"
"""The setting that trials turn off unless it is given."""

WAITING = 0.1
"""Seconds between looks at the workers, when no trial is left to begin."""

FAILURES = 5
"""Failed trials, with no successful one, after which a search gives up."""


@dataclass
class Tuning:
    """A search for settings of one model on one dataset.

    The first trial is the defaults: the given values, and the plan's choices for the others. The best trials of the
    searches in `like` come next.
    """

    model: str
    spec: FeatureSpec
    out: Path
    values: Mapping[str, Mapping[str, object]]
    """Sections `settings` and `train`: the given settings. The plan chooses the others, as for `train`."""
    asked: Mapping[str, OneOf | Range | Around]
    """Values to search besides the model's own space, or instead of its values."""
    trials: int
    """Number of trials of the search, those of earlier calls included."""
    only: bool = False
    """Search nothing else than `asked`."""
    fixed: Collection[str] = ()
    """Settings that are not searched, with their sections: `train.batch_size`."""
    like: Sequence[Path] = ()
    """Folders of earlier searches of the same model."""
    minutes: float | None = None
    """Time limit of this call; the trial under way then stops at a checkpoint."""
    seed: int = 0
    workers: int = 1
    """Number of processes that run trials, this one included."""
    ranks: Ranks = field(default_factory=Ranks)
    on_event: Callable[[int, Event], None] = lambda _, __: None
    """Called with the number of a trial and each of its events; only for trials of this process."""
    stop_requested: Callable[[], bool] = lambda: False
    """Asked after every step."""
    _tracked: TrackedSearch = field(init=False)

    def run(self) -> Found:
        """Run trials until there are as many as asked for, or the time is over, and tell MLflow the best one.

        Raises:
            SettingsError: if the folder holds another search, settings fit no trial, or there is no valid split.
            MissingExtraError: without Optuna.
            Interrupted: if `stop_requested` says so; the same command continues.
        """
        found = self.work()
        if found.best is None:
            return found
        problem = self._tracked.finish(
            self._plan.settings.mlflow,
            start={
                "data": str(self.spec.folder),
                "model": self.model,
                "metric": found.metric,
                "model_settings": found.best.settings,
            },
            done={
                "bundle": str(self.out / BUNDLE),
                "metrics": {found.metric: found.best.value},
                "trials": len(found.trials),
            },
        )
        if problem is not None:
            self.on_event(found.best.number, {"event": "note", "message": problem})
        return found

    def work(self) -> Found:
        """Run trials, as each worker of the search does."""
        started = time.monotonic()
        self.out = local(self.out, "OUT")
        self._tracked = TrackedSearch(self.out)
        study = Study(self.out, self._identity(), self.space, trials=self.trials, seed=self.seed, starts=self._starts())
        with mkdir_or_undo(self.out), study.opened():
            with turn(self.out):
                clear_abandoned(self.out / BUNDLE)
                self._keep_best(study)  # a call may have been killed after it recorded a trial
            for trial in study.found().trials:
                if trial.state != "running":
                    _clear(study.run_of(f"{trial.number:04d}"))
            _run_trials(self, study, started)
            self._tracked.wait()
            if self.stop_requested():
                done = f"stopped after {study.ended()} of {self.trials} trials"
                raise Interrupted(f"{self.out}: {done}; the same command goes on")
            return study.findings()

    @cached_property
    def space(self) -> dict[str, OneOf | Range]:
        """The settings to search, and their values."""
        return search_space(self.model, self._plan, self.asked, fixed=self.fixed, only=self.only)

    @cached_property
    def _plan(self) -> Plan:
        """The plan of a trial that draws nothing."""
        own, train = self._given()
        plan = plan_run(self.model, self.spec, self.out, train, own, self.ranks, resume=False)
        if not plan.valid.value:
            raise SettingsError(
                f"{self.spec.folder}: there is no valid split to judge trials on; "
                "set train.valid_share=0.1 to hold out a share of train"
            )
        return plan

    def _starts(self) -> dict[str, Mapping[str, object]]:
        """The values of the first trials; those that an earlier search does not give are the defaults."""
        defaults, space = self._defaults(), self.space
        starts: dict[str, Mapping[str, object]] = {DEFAULTS: defaults}
        for name, values in previous_best(self.like, self.model).items():
            fitting = {of: each for of, each in values.items() if of in space and space[of].stored(each) is not None}
            if (start := {**defaults, **fitting}) not in starts.values():
                starts[name] = start
        return starts

    def is_over(self, started: float) -> bool:
        """Whether this call, begun at `started`, should end."""
        late = self.minutes is not None and time.monotonic() - started > self.minutes * 60
        return late or self.stop_requested()

    def _identity(self) -> dict[str, object]:
        """What distinguishes this search from another; the study's file holds it under these names."""
        return {
            "model": self.model,
            "dataset": str(self.spec.folder.resolve()),
            "settings": self._plan.model_settings.model_dump(mode="json", exclude_defaults=True),
            "train": self._plan.settings.model_dump(mode="json", exclude_defaults=True),
            "search": {name: drawn.written() for name, drawn in self.space.items()},
        }

    def _run_trial(self, study: Study, trial: optuna.Trial, started: float) -> None:
        """Draw settings, train with them and record the outcome; an interrupted trial stays under way."""
        drawn = {name: each.value(trial.params[name]) for name, each in self.space.items()}
        is_plain = trial.user_attrs.get("start") == DEFAULTS and drawn == self._defaults()
        run = study.run_of(str(trial.user_attrs["folder"]))
        watch = _Watch(self, study, trial, started)
        states = study.optuna.trial.TrialState
        try:
            # The trial of the defaults is plain training: a fitted model then chooses its settings itself.
            train_candidate(
                self.model,
                self.spec,
                run,
                self._given() if is_plain else self._settings(drawn),
                ranks=self.ranks,
                on_event=watch.see,
                stop_requested=watch.should_stop,
                part_of=self._tracked,
            )
            if (best := watch.best) is None:
                raise TrainingError(f"{run}: the metric on valid is no number")
        except Interrupted:
            if not watch.pruned:  # the next call continues it
                return
            self._end(study, lambda: study.study.tell(trial, state=states.PRUNED))
        except (SettingsError, TrainingError) as error:
            trial.set_user_attr("reason", str(error))
            # The sampler learns to avoid what diverged; settings that fit no model say nothing about their neighbours.
            state = states.PRUNED if isinstance(error, TrainingError) else states.FAIL
            self._end(study, lambda: study.study.tell(trial, state=state))
            self._give_up(study, error)
        else:
            chosen = {f"settings.{name}": value for name, value in watch.chosen.items()} if is_plain else {}
            self._end(study, lambda: study.complete(trial, best * watch.sign, chosen))
        _clear(run)

    def _end(self, study: Study, record: Callable[[], object]) -> None:
        """Record how a trial ended; its bundle is kept before another worker looks for the best one."""
        with turn(self.out):
            record()
            self._keep_best(study)

    def _given(self) -> tuple[config.Settings, TrainSettings]:
        """The settings that are given."""
        curves = {} if CURVES in self.fixed else {"tensorboard": False}
        return (
            config.build(find_model(self.model).Settings, "settings", self.values["settings"]),
            config.build(TrainSettings, "train", self.values["train"], curves),
        )

    def _defaults(self) -> dict[str, object]:
        """The default of each setting that is searched."""
        return {name: default_of(name, self._plan) for name in self.space}

    def _settings(self, drawn: Mapping[str, object]) -> tuple[config.Settings, TrainSettings]:
        """Settings of a trial: what it draws over those of the plan, so that trials differ in nothing else."""
        found, where = assigned(drawn, sections_of(self.model)), "the settings drawn"
        own, train = self._plan.model_settings.model_dump(mode="json"), self._plan.settings.model_dump(mode="json")
        return (
            config.build(find_model(self.model).Settings, where, own, found["settings"]),
            config.build(TrainSettings, where, train, found["train"]),
        )

    def _give_up(self, study: Study, error: RecspecError) -> None:
        """End a search whose trials all fail for one reason: the mistake is not in the drawn settings."""
        failed = study.failures()
        some_went_well = any(trial.state.name == "COMPLETE" for trial in study.study.get_trials(deepcopy=False))
        if not some_went_well and (len(failed) >= FAILURES or (len(failed) > 1 and len(set(failed)) == 1)):
            raise SettingsError(f"{self.out}: {len(failed)} trials failed and none went well; the last one: {error}")

    def _keep_best(self, study: Study) -> None:
        """Write the best recipe, and keep the bundle of the best trial, unless it has been taken from its run."""
        found = study.found()
        if (best := found.best) is None:
            return
        run = study.run_of(f"{best.number:04d}")
        if (run / "bundle").is_dir():
            put_in_place(run / "bundle", self.out / BUNDLE)
            run_record.hand_over(run, self.out / BUNDLE, "tuned")
        # A recipe is complete: it holds what the plan chose for the data too.
        model_settings, train_settings = self._settings(best.settings)
        curves = {} if CURVES in self.fixed else {"tensorboard": TrainSettings.model_fields["tensorboard"].default}
        train = train_settings.model_copy(update=curves).model_dump(mode="json", exclude_defaults=True)
        if "metric" in train:  # a proposed one gives way where lists are too short for it; one of a recipe fails
            train["metric"] = found.metric
        recipe = {
            "about": {
                "dataset": self.spec.metadata.get("dataset") or self.spec.folder.name,
                "how": f"trial {best.number}, the best of `recspec tune` ({found.counts}), chosen on valid alone",
                "reached": f"{found.metric} {best.value:.5f} on valid; test was not opened",
                "recspec": __version__,
            },
            "model": self.model,
            "settings": model_settings.model_dump(mode="json", exclude_defaults=True),
            "train": train,
        }
        config.write_recipe(self.out / RECIPE, recipe)


def _clear(run: Path) -> None:
    """Remove what a trial that is over needs no more."""
    for left in ("checkpoints", "bundle"):
        shutil.rmtree(run / left, ignore_errors=True)
    (run / run_record.FILE_NAME).unlink(missing_ok=True)  # a trial without its bundle is no run


def _run_trials(tuning: Tuning, study: Study, started: float) -> None:
    """Run trials until none is left, those of workers that died included."""
    alone = replace(tuning, workers=1, on_event=_ignore, stop_requested=_go_on)  # which other processes can read
    with workers(tuning.workers - 1, work, {"tuning": alone}) as others:
        last = False
        while not tuning.is_over(started):
            with ExitStack() as held:
                trial = study.next(held)
                if trial is not None:
                    tuning._run_trial(study, trial, started)
                elif last:
                    break
                while trial is None and others.work and not tuning.is_over(started):
                    time.sleep(WAITING)
                last = trial is None
        for problem in others.problems():
            tuning.on_event(0, {"event": "worker", "message": problem})


def work(tuning: Tuning, stop_requested: Callable[[], bool]) -> None:
    """What a worker process of a search does."""
    replace(tuning, stop_requested=stop_requested).work()


def _ignore(_number: int, _event: Event) -> None:
    """Show no event."""


def _go_on() -> bool:
    """Never stop."""
    return False


@dataclass
class _Watch:
    """Follows the events of one trial."""

    tuning: Tuning
    study: Study
    trial: optuna.Trial
    started: float
    best: float | None = None
    sign: float = 1.0
    pruned: bool = False
    chosen: Mapping[str, object] = field(default_factory=dict)
    """The model's settings, if it chose some of them itself."""
    trace: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take up the trace of a trial that was cut off."""
        before = self.trial.user_attrs.get("trace")
        for epoch, value in before.items() if isinstance(before, dict) else ():
            if str(epoch).isdecimal() and isinstance(value, (int, float)):
                self._note(int(epoch), float(value), report=True)

    def see(self, event: Event) -> None:
        """Note the best value so far, and whether the trial is hopeless (see `halving`)."""
        self.tuning.on_event(number_of(self.trial), event)
        best = event.get("best")
        if event["event"] not in ("epoch", "done") or not isinstance(best, (int, float)) or not math.isfinite(best):
            return
        metric = str(event["metric"])
        if self.best is None and "metric" not in self.study.study.user_attrs:
            self.study.study.set_user_attr("metric", metric)
        self.sign, self.best = -sign_of(metric), float(best)  # Optuna minimises
        if isinstance(event.get("settings"), Mapping):
            self.chosen = cast(Mapping[str, object], event["settings"])
        if event["event"] == "done":  # later rungs compare with the best value of a trial that is over
            self._note(max(self.trace, default=0) + 1, self.best * self.sign, report=True)
            return
        epoch, epochs = (int(float(str(event[name]))) for name in ("epoch", "epochs"))
        self._note(epoch, self.best * self.sign, report=is_compared(epoch))
        may_stop = epoch < epochs and is_rung(epoch)
        self.pruned = may_stop and is_hopeless(self.trace, self.study.others(self.trial))

    def _note(self, epoch: int, value: float, *, report: bool) -> None:
        """Add to the trace; a report costs a write to the disk, so only epochs that are compared are reported."""
        if epoch not in self.trace:
            self.trace[epoch] = value
            if report:
                self.trial.report(value, epoch)

    def should_stop(self) -> bool:
        """Whether to stop after this step."""
        return self.pruned or self.tuning.is_over(self.started)
