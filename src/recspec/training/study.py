"""The study of a search: an Optuna file that several workers share."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from recspec.errors import SettingsError, require_extra
from recspec.evaluation import LOWER_IS_BETTER
from recspec.files import PathError, confine, confined, is_locked, locked, turn
from recspec.training.search_space import OneOf, SearchSpace

if TYPE_CHECKING:
    import optuna

STUDY = "study.db"
RECIPE = "best.yaml"
BUNDLE = "best"

FIRST_TRIALS = 5
"""Trials that are never stopped early, since there is nothing to compare them with."""

WAIT = 120.0
"""Seconds that a worker waits for another one's transaction."""


@dataclass(frozen=True)
class Trial:
    """One trial and its outcome."""

    number: int
    state: str
    """`complete`, `pruned` (stopped early), `failed` or `running`."""
    value: float | None
    """The metric on valid at its best epoch."""
    settings: Mapping[str, object]
    seconds: float | None
    reason: str = ""


@dataclass(frozen=True)
class Found:
    """The findings of a search so far."""

    metric: str
    trials: Sequence[Trial]
    best: Trial | None
    recipe: Path
    left: int
    """Trials still to run."""

    @property
    def ended(self) -> int:
        """Number of trials that are over, failed ones included."""
        return sum(trial.state != "running" for trial in self.trials)

    def to_dict(self) -> dict[str, object]:
        """The findings as a JSON value."""
        return {
            "metric": self.metric,
            "best": asdict(self.best) if self.best else None,
            "recipe": str(self.recipe) if self.best else None,
            "trials": [asdict(trial) for trial in self.trials],
            "left": self.left,
        }


class Study:
    """The trials of a search in its folder; one worker at a time changes them."""

    def __init__(
        self, folder: Path, identity: Mapping[str, object], space: SearchSpace, *, trials: int, seed: int
    ) -> None:
        self.folder, self.space, self.trials, self.seed = folder, space, trials, seed
        self.identity = identity  # what distinguishes this search from another, as JSON values
        self.optuna: Any = require_extra("optuna", "tune")

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the study's file, and close it at the end of the block."""
        from sqlalchemy.engine import URL
        from sqlalchemy.pool import NullPool

        # SQLite opens what lies beside its file, and clears it away.
        written = ("trials", BUNDLE, RECIPE, STUDY, *(f"{STUDY}-{each}" for each in ("journal", "wal", "shm")))
        confine(self.folder, written)
        # A URI of SQLite's within a URL of SQLAlchemy's, each quoted by its own rules: `?` in a name is part of it.
        file = f"file:{quote(str((self.folder / STUDY).resolve()))}"
        url = URL.create("sqlite", database=file, query={"uri": "true"}).render_as_string()
        with _quiet(self.optuna):
            with self._readable():
                # Without a pool no connection stays open if the file turns out not to be a database.
                kept = {"connect_args": {"timeout": WAIT}, "poolclass": NullPool}
                storage = self.optuna.storages.RDBStorage(url, engine_kwargs=kept)
            try:
                with turn(self.folder):
                    self.study = self._create(storage)
                yield
            finally:
                storage.remove_session()
                storage.engine.dispose()

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Report a damaged file, or one of another version of Optuna, in one message."""
        import sqlalchemy.exc

        try:
            yield
        except (sqlalchemy.exc.DatabaseError, RuntimeError) as error:
            why = str(getattr(error, "orig", error)).splitlines()[0]
            raise SettingsError(f"{self.folder / STUDY}: can't be read: {why}; name another folder") from None

    def _create(self, storage: optuna.storages.RDBStorage) -> optuna.Study:
        with self._readable():
            study = self.optuna.create_study(
                study_name="recspec",
                storage=storage,
                pruner=self.optuna.pruners.MedianPruner(n_startup_trials=FIRST_TRIALS, n_warmup_steps=1),
                load_if_exists=True,
            )
        if not study.user_attrs:
            for name, value in self.identity.items():
                study.set_user_attr(name, value)
        differing = [
            f"{name} was {json.dumps(study.user_attrs.get(name))}, and is {json.dumps(value)}"
            for name, value in self.identity.items()
            if study.user_attrs.get(name) != json.loads(json.dumps(value))
        ]
        if differing:
            raise SettingsError.of(f"{self.folder}: holds another search; name another folder", differing)
        return study

    def next(self, held: ExitStack) -> optuna.Trial | None:
        """The trial to run now, or None if all are over or under way.

        `held` keeps the lock of its folder, which tells other workers that it is under way until this process ends.
        """
        with turn(self.folder):
            under_way = self._take_up()
            if self.ended() + under_way >= self.trials:
                return None
            # A new seed for each trial: neither a later call nor a second worker draws the first trials again.
            seed = self.seed + len(self.study.get_trials(deepcopy=False))
            self.study.sampler = self.optuna.samplers.TPESampler(seed=seed, n_startup_trials=FIRST_TRIALS)
            trial = self.study.ask()
            folder = str(trial.user_attrs.get("continues") or f"{trial.number:04d}")
            trial.set_user_attr("folder", folder)
            held.enter_context(locked(self.run_of(folder), "training in"))
            return trial

    def run_of(self, folder: str) -> Path:
        """The folder of a trial by its name in the study, a file that anyone may have written."""
        try:
            return confined(self.folder / "trials", folder)
        except PathError as error:
            raise SettingsError(f"{self.folder / STUDY}: damaged: the folder of a trial: {error}") from None

    def _take_up(self) -> int:
        """Queue the trials that ended processes left under way; returns the number of trials in other processes."""
        alive = 0
        for trial in self.study.get_trials(states=(self.optuna.trial.TrialState.RUNNING,)):
            folder = str(trial.user_attrs.get("folder", ""))
            if folder and is_locked(self.run_of(folder)):
                alive += 1
                continue
            self.study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)
            self.study.enqueue_trial(trial.params, user_attrs={"continues": folder})
        return alive

    def ended(self) -> int:
        """Number of trials that are over; a continued one counts once."""
        states = [trial.state.name for trial in self.study.get_trials(deepcopy=False)]
        return states.count("COMPLETE") + states.count("PRUNED") + len(self.failures())

    def failures(self) -> list[str]:
        """The reasons of the failed trials."""
        trials = self.study.get_trials(deepcopy=False)
        return [str(trial.user_attrs["reason"]) for trial in trials if "reason" in trial.user_attrs]

    def found(self) -> Found:
        """The findings so far, without trials that wait, or that were cut off and continued."""
        metric = str(self.study.user_attrs.get("metric", ""))
        sign = sign_of(metric)
        trials = [
            self._as_trial(each, sign)
            for each in self.study.get_trials()
            if each.state.name in SHOWN or "reason" in each.user_attrs
        ]
        complete = [trial for trial in trials if trial.state == "complete" and trial.value is not None]
        best = min(complete, key=lambda trial: (sign * float(trial.value or 0), trial.number), default=None)
        return Found(metric, trials, best, self.folder / RECIPE, max(0, self.trials - self.ended()))

    def _as_trial(self, trial: optuna.trial.FrozenTrial, sign: float) -> Trial:
        value = trial.value if trial.value is not None else min(trial.intermediate_values.values(), default=None)
        settings = {
            name: json.loads(str(value)) if isinstance(self.space[name], OneOf) else value
            for name, value in trial.params.items()
            if name in self.space
        }
        return Trial(
            trial.number,
            SHOWN.get(trial.state.name, "failed"),
            None if value is None else value * sign,
            settings,
            trial.duration.total_seconds() if trial.duration else None,
            str(trial.user_attrs.get("reason", "")),
        )


SHOWN = {"COMPLETE": "complete", "PRUNED": "pruned", "RUNNING": "running"}
"""Optuna's states of trials that are shown without a reason -> ours."""


def sign_of(metric: str) -> float:
    """-1 for a metric of which more is better: Optuna minimises."""
    return 1.0 if metric.rpartition("/")[2] in LOWER_IS_BETTER else -1.0


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Silence Optuna's own log until the end of the block."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
