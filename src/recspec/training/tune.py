"""Hyper-parameter search: trials of `train`, judged on valid alone; poor trials are stopped early.

A search lives in a folder and outlasts the process:

    OUT/study.db          the trials and their outcomes (Optuna, SQLite)
    OUT/trials/0007/      the run of trial 7: log.jsonl, and checkpoints while it is under way
    OUT/best.yaml         the best recipe so far
    OUT/best/             its bundle

The same command continues a search that was stopped or killed, and its trial under way from the trial's checkpoint.
Several processes may run the same command at once; they share the trials. The test split is never opened.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from recspec import __version__, config
from recspec.bundle import folder as bundle
from recspec.distributed import Ranks
from recspec.errors import Interrupted, RecspecError, SettingsError, TrainingError
from recspec.files import local, made, put_in_place, turn, whole_file
from recspec.models import MODELS
from recspec.spec import FeatureSpec
from recspec.training.loop import train
from recspec.training.run_folder import Event
from recspec.training.search_space import SearchSpace
from recspec.training.settings import TrainSettings
from recspec.training.study import BUNDLE, RECIPE, Found, Study, sign_of

if TYPE_CHECKING:
    import optuna

FAILURES = 5
"""Failed trials, with no successful one, after which a search gives up."""


@dataclass
class Tuning:
    """A search for settings of one model on one dataset."""

    model: str
    spec: FeatureSpec
    out: Path
    values: Mapping[str, Mapping[str, object]]
    """Sections `settings` and `train` that every trial starts from."""
    space: SearchSpace
    trials: int
    """Number of trials of the search, those of earlier calls included."""
    minutes: float | None = None
    """Time limit of this call; the trial under way then stops at a checkpoint."""
    seed: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    on_event: Callable[[int, Event], None] = lambda _, __: None
    """Called with the number of a trial and each of its events."""
    stop_requested: Callable[[], bool] = lambda: False
    """Asked after every step."""

    def run(self) -> Found:
        """Run trials until there are as many as asked for, or the time is over.

        Raises:
            SettingsError: if the folder holds another search, or settings fit no trial.
            MissingExtraError: without Optuna.
            Interrupted: if `stop_requested` says so; the same command continues.
        """
        started = time.monotonic()
        self.out = local(self.out, "OUT")
        study = Study(self.out, self._identity(), self.space, trials=self.trials, seed=self.seed)
        with made(self.out), study.opened():
            while not self.is_over(started):
                with ExitStack() as held:
                    trial = study.next(held)
                    if trial is None:
                        break
                    self._run_trial(study, trial, started)
            if self.stop_requested():
                done = f"stopped after {study.ended()} of {self.trials} trials"
                raise Interrupted(f"{self.out}: {done}; the same command goes on")
            return study.found()

    def is_over(self, started: float) -> bool:
        """Whether this call, begun at `started`, should end."""
        late = self.minutes is not None and time.monotonic() - started > self.minutes * 60
        return late or self.stop_requested()

    def _identity(self) -> dict[str, object]:
        """What distinguishes this search from another; the study's file holds it under these names."""
        return {
            "model": self.model,
            "dataset": str(self.spec.folder.resolve()),
            "settings": dict(self.values["settings"]),
            "train": dict(self.values["train"]),
            "search": {name: drawn.written() for name, drawn in self.space.items()},
        }

    def _run_trial(self, study: Study, trial: optuna.Trial, started: float) -> None:
        """Draw settings, train with them and record the outcome; an interrupted trial stays under way."""
        drawn = {name: each.suggest(trial, name) for name, each in self.space.items()}
        run = study.run_of(str(trial.user_attrs["folder"]))
        watch = _Watch(self, trial, started)
        try:
            self._train(run, drawn, watch)
        except Interrupted:
            if not watch.pruned:  # the next call continues it
                return
            with turn(self.out):
                study.study.tell(trial, state=study.optuna.trial.TrialState.PRUNED)
        except (SettingsError, TrainingError) as error:
            trial.set_user_attr("reason", str(error))
            study.study.tell(trial, state=study.optuna.trial.TrialState.FAIL)
            self._give_up(study, error)
        else:
            if watch.best is None:
                raise SettingsError(
                    f"{self.spec.folder}: there is no valid split to judge trials on; "
                    "set train.valid_share=0.1 to hold out a share of train"
                )
            with turn(self.out):  # the bundle is kept or deleted before another worker looks for the best one
                study.study.tell(trial, watch.best * watch.sign)
                self._keep_best(study, run)
        for left in ("checkpoints", "bundle"):
            shutil.rmtree(run / left, ignore_errors=True)

    def _train(self, run: Path, drawn: Mapping[str, object], watch: _Watch) -> None:
        model_settings, train_settings = self._settings(drawn)
        resume = any((run / "checkpoints").glob("step-*"))
        if not resume:
            shutil.rmtree(run, ignore_errors=True)
        train(
            self.model,
            self.spec,
            run,
            settings=train_settings,
            model_settings=model_settings,
            ranks=self.ranks,
            resume=resume,
            on_event=watch.see,
            stop_requested=watch.should_stop,
        )

    def _settings(self, drawn: Mapping[str, object]) -> tuple[config.Settings, TrainSettings]:
        own = MODELS[self.model].Settings
        assigned = config.assign(drawn, {"settings": own, "train": TrainSettings})
        where = "the settings drawn"
        return (
            config.build(own, where, self.values["settings"], assigned["settings"]),
            config.build(TrainSettings, where, self.values["train"], assigned["train"]),
        )

    def _give_up(self, study: Study, error: RecspecError) -> None:
        """End a search whose trials all fail for one reason: the mistake is not in the drawn settings."""
        failed = study.failures()
        some_went_well = any(trial.state.name == "COMPLETE" for trial in study.study.get_trials(deepcopy=False))
        if not some_went_well and (len(failed) >= FAILURES or (len(failed) > 1 and len(set(failed)) == 1)):
            raise SettingsError(f"{self.out}: {len(failed)} trials failed and none went well; the last one: {error}")

    def _keep_best(self, study: Study, run: Path) -> None:
        """Write the best recipe, and keep the bundle of the trial in `run` if it is the best one."""
        found = study.found()
        if (best := found.best) is None:
            return
        folders = {trial.number: trial.user_attrs.get("folder") for trial in study.study.get_trials(deepcopy=False)}
        if study.run_of(str(folders[best.number])) == run and (run / "bundle").is_dir():
            put_in_place(run / "bundle", self.out / BUNDLE)
        # A recipe is complete: it holds what was proposed for the data too.
        card = bundle.read_card(self.out / BUNDLE)
        model_settings = config.build(MODELS[self.model].Settings, BUNDLE, card.settings)
        train_settings = config.build(TrainSettings, BUNDLE, card.train)
        recipe = {
            "about": {
                "dataset": self.spec.metadata.get("dataset") or self.spec.folder.name,
                "how": f"trial {best.number}, the best of {found.ended} of `recspec tune`, chosen on valid alone",
                "reached": f"{found.metric} {best.value:.5f} on valid; test was not opened",
                "recspec": __version__,
            },
            "model": self.model,
            "settings": model_settings.model_dump(mode="json", exclude_defaults=True),
            "train": train_settings.model_dump(mode="json", exclude_defaults=True),
        }
        with whole_file(self.out / RECIPE) as temporary:
            temporary.write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), encoding="utf-8")


@dataclass
class _Watch:
    """Follows the events of one trial."""

    tuning: Tuning
    trial: optuna.Trial
    started: float
    best: float | None = None
    sign: float = 1.0
    pruned: bool = False

    def see(self, event: Event) -> None:
        """Report each evaluation; a trial below the median of the others at its epoch is stopped."""
        self.tuning.on_event(self.trial.number, event)
        fitted = event["event"] == "done" and event.get("stopped") == "fitted"
        if not (fitted or event["event"] == "epoch") or event.get("best") is None:
            return
        metric = str(event["metric"])
        if "metric" not in self.trial.study.user_attrs:
            self.trial.study.set_user_attr("metric", metric)
        self.sign = sign_of(metric)
        self.best = float(str(event["best"]))
        if fitted:
            return
        epoch = int(float(str(event["epoch"])))
        self.trial.report(self.best * self.sign, epoch)
        self.pruned = epoch < int(float(str(event["epochs"]))) and bool(self.trial.should_prune())

    def should_stop(self) -> bool:
        """Whether to stop after this step."""
        return self.pruned or self.tuning.is_over(self.started)
