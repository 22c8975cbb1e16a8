"""The study of a search, an Optuna file: which trials stop early, and which settings mattered.

Jamieson, Talwalkar: Non-stochastic Best Arm Identification and Hyperparameter Optimization, AISTATS 2016; in the
asynchronous form of Li et al.: A System for Massively Parallel Hyperparameter Tuning, MLSys 2020. Optuna's pruners are
not used: they stop slow starters and forget trials that ended before a rung (`tests/search/test_optuna.py`).

Watanabe, Bansal, Hutter: PED-ANOVA: Efficiently Quantifying Hyperparameter Importance in Arbitrary Subspaces,
IJCAI 2023: how far the values of the best trials are from those of all trials.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from recspec.base.errors import SettingsError, how_many, require_extra
from recspec.base.files import PathError, confine, confined, is_locked, locked, turn
from recspec.training.search.search_space import SearchSpace, spread
from recspec.training.search.state import sign_of

if TYPE_CHECKING:
    import optuna


FIRST_RUNG = 9
"""Epochs that every trial gets: AUC on sparse data may be flat for six to eight epochs and then climb."""

REDUCTION = 3
"""The share of trials that go on from a rung is 1 / REDUCTION; the next rung has REDUCTION times as many epochs."""

FEWEST_OTHERS = 4
"""Number of other trials that must have reached a rung before one is stopped there."""

Trace = Mapping[int, float]
"""The best value so far after each evaluated epoch; lower is better."""


def is_hopeless(trace: Trace, others: Sequence[tuple[Trace, bool]]) -> bool:
    """Whether a trial stops at its newest epoch.

    It stops if that epoch is a rung, two thirds of the trials that got so far were better there, and its pace does not
    take it to the best third by the next rung. The pace is that of the last third of its epochs.

    Args:
        trace: the trial's.
        others: the other trials', each with whether it trained to its end. Such a trial counts at later epochs too.
    """
    epoch = max(trace, default=0)
    if not is_rung(epoch):
        return False
    known = [value for each, ended in others if (value := value_at(each, epoch, ended=ended)) is not None]
    if len(known) < FEWEST_OTHERS:
        return False
    go_on = max(1, (len(known) + 1) // REDUCTION)
    cut = sorted(known)[go_on - 1]
    return trace[epoch] - most_gain(trace) > cut


def most_gain(trace: Trace, share: float = 1 / REDUCTION) -> float:
    """The gain until `REDUCTION` times as many epochs at the pace of the last `share`; curves bend: rarely more."""
    epoch = max(trace)
    past = min(at for at in trace if at >= epoch - round(epoch * share))
    return (trace[past] - trace[epoch]) / max(1, epoch - past) * epoch * (REDUCTION - 1)


def is_rung(epoch: int) -> bool:
    """Whether trials are compared after this epoch: 9, 27, 81, ..."""
    rung = FIRST_RUNG
    while rung < epoch:
        rung *= REDUCTION
    return rung == epoch


def is_compared(epoch: int) -> bool:
    """Whether the value after this epoch is read at a rung: the rung's own, and the one before its last third."""
    return is_rung(epoch) or (
        epoch * REDUCTION % (REDUCTION - 1) == 0 and is_rung(epoch * REDUCTION // (REDUCTION - 1))
    )


def value_at(trace: Trace, epoch: int, *, ended: bool) -> float | None:
    """A trial's best value after an epoch, or None if it did not get so far and could have."""
    if not trace or (max(trace) < epoch and not ended):
        return None
    return min((value for at, value in trace.items() if at <= epoch), default=None)


FEWEST_TRIALS = 15
"""Judged trials below which nothing is said: the best third are five."""

MOST_TRIALS = 500
"""Judged trials that are compared, the latest ones: the time grows with their number."""

SHUFFLES = 99
"""A setting stands out if it matters more than in each of this many shuffles of the outcomes: 1 in 100 by chance."""


@dataclass(frozen=True)
class Importance:
    """A setting's share of the difference between the best trials and all."""

    share: float
    """From 0 to 1; the shares of all settings sum to 1."""
    stands_out: bool
    """Whether it is more than chance explains."""


@dataclass(frozen=True)
class Importances:
    """What mattered, or how many trials are missing to say it."""

    judged: int = 0
    """Trials with a value, those that were stopped early included."""
    settings: Mapping[str, Importance] = field(default_factory=dict)
    """By name, the largest first; empty if there are too few trials."""

    def to_dict(self) -> dict[str, object]:
        """A JSON value."""
        named = self.settings.items()
        settings = {name: {"share": round(each.share, 4), "stands_out": each.stands_out} for name, each in named}
        return {"judged": self.judged, "needed": FEWEST_TRIALS, "settings": settings}

    def __str__(self) -> str:
        if not self.settings:
            return f"too few trials to say: {self.judged} judged, {FEWEST_TRIALS} needed"
        clear, rest = (
            [f"{name} {each.share:.0%}" for name, each in self.settings.items() if each.stands_out == stands_out]
            for stands_out in (True, False)
        )
        if not clear:
            return f"nothing beyond chance in {self.judged} trials; {', '.join(rest[:3])} come first"
        return ", ".join(clear) + (f"; no more than chance: {', '.join(rest)}" if rest else "")


def importances(
    optuna: Any, space: SearchSpace, outcomes: Sequence[tuple[Mapping[str, object], float]], seed: int
) -> Importances:
    """The importance of each setting.

    Args:
        optuna: the module.
        space: the settings that were searched.
        outcomes: each judged trial's settings as the study holds them, and its best value; lower is better.
        seed: of the shuffles.
    """
    judged = [(params, value) for params, value in outcomes if set(params) == set(space)][-MOST_TRIALS:]
    if len(judged) < FEWEST_TRIALS:
        return Importances(len(judged))
    distributions = {name: each.distribution(optuna) for name, each in space.items()}
    study = optuna.create_study()
    for params, value in judged:
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
    best = max(0.1, 5 / len(judged))
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=best)
    values = np.array([value for _, value in judged])

    def measured(values: np.ndarray) -> np.ndarray:
        found = evaluator.evaluate(study, list(space), target=lambda trial: float(values[trial.number]))
        return np.array([found[name] for name in space])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna warns whenever a target is given that lower values are better
        found = measured(values)
        random = np.random.default_rng(seed)
        by_chance = np.max([measured(random.permutation(values)) for _ in range(SHUFFLES)], axis=0)
    total = float(found.sum()) or 1.0
    order = np.argsort(-found, kind="stable")
    names = list(space)
    return Importances(
        len(judged), {names[at]: Importance(float(found[at]) / total, bool(found[at] > by_chance[at])) for at in order}
    )


STUDY, NAME = "study.db", "recspec"
RECIPE = "best.yaml"
BUNDLE = "best"

WRITTEN = ("trials", BUNDLE, RECIPE, STUDY, *(f"{STUDY}-{each}" for each in ("journal", "wal", "shm")))
"""What a search writes in its folder; SQLite opens what lies beside its file, and clears it away."""

DEFAULTS = "defaults"
"""The name of the first trial's start."""

RANDOM_TRIALS = 5
"""Trials that are over before Optuna's sampler learns from them; it draws at random until then."""

WAIT = 120.0
"""Seconds that a worker waits for another one's transaction."""


@dataclass(frozen=True)
class Trial:
    """One trial and its outcome."""

    number: int
    """Also the name of its folder."""
    state: str
    """`complete`, `pruned` (stopped early), `failed` or `running`."""
    value: float | None
    """The metric on valid at its best epoch."""
    settings: Mapping[str, object]
    seconds: float | None
    reason: str = ""
    start: str = ""
    """What it started from: `defaults`, an earlier search, or nothing if it was drawn."""


@dataclass(frozen=True)
class Found:
    """The findings of a search so far."""

    metric: str
    trials: Sequence[Trial]
    best: Trial | None
    recipe: Path
    left: int
    """Trials still to run."""
    importances: Importances = field(default_factory=Importances)
    """The settings that made a difference."""

    @property
    def defaults(self) -> Trial | None:
        """The trial of the default settings."""
        return next((trial for trial in self.trials if trial.start == DEFAULTS), None)

    @property
    def counted(self) -> dict[str, int]:
        """Number of trials in each state."""
        states = [trial.state for trial in self.trials]
        return {state: states.count(state) for state in ("complete", "pruned", "failed", "running")}

    @property
    def counts(self) -> str:
        """`30 trials: 9 complete, 19 pruned, 2 failed`."""
        total = len(self.trials)
        parts = [f"{number} {state}" for state, number in self.counted.items() if number]
        return f"{how_many(total, 'trial')}: {', '.join(parts)}" if parts else "no trials"

    def to_dict(self) -> dict[str, object]:
        """The findings as a JSON value."""
        return {
            "metric": self.metric,
            "best": asdict(self.best) if self.best else None,
            "defaults": asdict(self.defaults) if self.defaults else None,
            "counts": self.counted,
            "importances": self.importances.to_dict(),
            "recipe": str(self.recipe) if self.best else None,
            "trials": [asdict(trial) for trial in self.trials],
            "left": self.left,
        }


class Study:
    """The trials of a search in its folder; one worker at a time changes them."""

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, object],
        space: SearchSpace,
        *,
        trials: int,
        seed: int,
        starts: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        self.folder, self.space, self.trials, self.seed = folder, space, trials, seed
        self.identity = identity  # what distinguishes this search from another, as JSON values
        self.starts = starts or {}  # values of the first trials, by what they start from
        self.optuna: Any = require_extra("optuna", "tune")
        self.distributions = {name: each.distribution(self.optuna) for name, each in space.items()}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the study's file, and close it at the end of the block."""
        confine(self.folder, WRITTEN)
        with storage_of(self.optuna, self.folder) as storage:
            with turn(self.folder):
                self.study = self._create(storage)
            yield

    def _create(self, storage: optuna.storages.RDBStorage) -> optuna.Study:
        with _readable(self.folder):
            study = self.optuna.create_study(
                study_name=NAME, storage=storage, pruner=self.optuna.pruners.NopPruner(), load_if_exists=True
            )
        if not study.user_attrs:
            for name, value in self.identity.items():
                study.set_user_attr(name, value)
        differing = [
            f"{name} was {json.dumps(study.user_attrs.get(name))}, and is {json.dumps(value)}"
            for name, value in self.identity.items()
            if study.user_attrs.get(name) != json.loads(json.dumps(value))
        ]
        SettingsError.refuse(f"{self.folder}: holds another search; name another folder", differing)
        return study

    def next(self, held: ExitStack) -> optuna.Trial | None:
        """The trial to run now, or None if all are over or under way.

        `held` keeps the lock of its folder, which tells other workers that it is under way until this process ends.
        """
        with turn(self.folder):
            under_way = self._take_up()
            if self.ended() + under_way >= self.trials:
                return None
            known = self.study.get_trials(deepcopy=False)
            begun = {trial.user_attrs.get("start") for trial in known}
            start = next((start for start in self.starts if start not in begun), None)
            if start is not None and not any(trial.state.name == "WAITING" for trial in known):
                self.study.enqueue_trial(self._stored(self.starts[start]), user_attrs={"start": start})
            # A new seed for each trial: neither a later call nor a second worker draws the first trials again.
            sampler = self.optuna.samplers.TPESampler(seed=self.seed + len(known), n_startup_trials=RANDOM_TRIALS)
            self.study.sampler = sampler
            trial = self.study.ask(self.distributions)
            folders = {each.user_attrs["folder"] for each in known if "folder" in each.user_attrs}
            folder = str(trial.user_attrs.get("continues") or f"{len(folders):04d}")
            trial.set_user_attr("folder", folder)
            held.enter_context(locked(self.run_of(folder), "training in"))
            return trial

    def complete(self, trial: optuna.Trial, value: float, chosen: Mapping[str, object]) -> None:
        """Record the value of a trial that trained to its end; lower is better.

        `chosen` holds the model's settings, with their section, if it chose some of them itself, instead of those drawn
        for it or beside them.
        """
        if not chosen:
            self.study.tell(trial, value)
            return
        kept = {name: trial.user_attrs[name] for name in ("start", "folder") if name in trial.user_attrs}
        anew = self.optuna.trial.create_trial(
            params={**trial.params, **self._stored(chosen)},
            distributions=self.distributions,
            user_attrs={**kept, "chosen": dict(chosen)},
            value=value,
        )
        anew.datetime_start = trial.datetime_start
        self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
        self.study.add_trial(anew)

    def _stored(self, values: Mapping[str, object]) -> dict[str, object]:
        """Values as the study holds them, without those that the space does not have."""
        found = {name: each.stored(values[name]) for name, each in self.space.items() if name in values}
        return {name: value for name, value in found.items() if value is not None}

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
            kept = {name: trial.user_attrs[name] for name in ("start",) if name in trial.user_attrs}
            trace = {str(epoch): value for epoch, value in trial.intermediate_values.items()}
            self.study.enqueue_trial(trial.params, user_attrs={**kept, "continues": folder, "trace": trace})
        return alive

    def others(self, trial: optuna.Trial) -> list[tuple[Trace, bool]]:
        """The traces of the other trials, each with whether it trained to its end."""
        return [
            (each.intermediate_values, each.state.name == "COMPLETE")
            for each in self.study.get_trials(deepcopy=False)
            if each.number != trial.number and each.state.name in SHOWN
        ]

    def ended(self) -> int:
        """Number of trials that are over; a continued one counts once."""
        return sum(
            trial.state.name in ("COMPLETE", "PRUNED") or (trial.state.name == "FAIL" and "reason" in trial.user_attrs)
            for trial in self.study.get_trials(deepcopy=False)
        )

    def failures(self) -> list[str]:
        """The reasons of the failed trials."""
        trials = self.study.get_trials(deepcopy=False)
        return [str(trial.user_attrs["reason"]) for trial in trials if "reason" in trial.user_attrs]

    def found(self) -> Found:
        """The findings so far, without trials that wait, or that were cut off and continued."""
        metric = str(self.study.user_attrs.get("metric", ""))
        sign = -sign_of(metric)  # Optuna minimises
        trials = [
            self._as_trial(each, sign)
            for each in self.study.get_trials()
            if each.state.name in SHOWN or "reason" in each.user_attrs
        ]
        complete = [trial for trial in trials if trial.state == "complete" and trial.value is not None]
        best = min(complete, key=lambda trial: (sign * float(trial.value or 0), trial.number), default=None)
        return Found(metric, trials, best, self.folder / RECIPE, max(0, self.trials - self.ended()))

    def findings(self) -> Found:
        """The findings, and what mattered."""
        outcomes = [
            (trial.params, best)
            for trial in self.study.get_trials(deepcopy=False)
            if trial.state.name in ("COMPLETE", "PRUNED")
            and math.isfinite(
                best := min([*trial.intermediate_values.values(), *(trial.values or ())], default=math.nan)
            )
        ]
        return replace(self.found(), importances=importances(self.optuna, self.space, outcomes, self.seed))

    def _as_trial(self, trial: optuna.trial.FrozenTrial, sign: float) -> Trial:
        value = trial.value if trial.value is not None else min(trial.intermediate_values.values(), default=None)
        reason, chosen = str(trial.user_attrs.get("reason", "")), trial.user_attrs.get("chosen")
        return Trial(
            number_of(trial),
            "failed" if reason else SHOWN[trial.state.name],
            None if value is None or not math.isfinite(value) else value * sign,
            {**spread(values_of(trial.params, self.space)), **(chosen if isinstance(chosen, dict) else {})},
            trial.duration.total_seconds() if trial.duration else None,
            reason,
            str(trial.user_attrs.get("start", "")),
        )


def number_of(trial: optuna.Trial | optuna.trial.FrozenTrial) -> int:
    """The number that names a trial's folder; Optuna counts a trial that was cut off and continued twice."""
    folder = str(trial.user_attrs.get("folder", ""))
    return int(folder) if folder.isdecimal() and len(folder) < 10 else trial.number


SHOWN = {"COMPLETE": "complete", "PRUNED": "pruned", "RUNNING": "running"}
"""Optuna's states of trials that are shown without a reason -> ours."""


def values_of(params: Mapping[str, object], space: SearchSpace) -> dict[str, object]:
    """The settings of a trial by what the study holds, without those that the space does not have."""
    return {name: space[name].value(each) for name, each in params.items() if name in space and space[name].holds(each)}


@contextmanager
def storage_of(optuna: Any, folder: Path, *, read_only: bool = False) -> Iterator[optuna.storages.RDBStorage]:
    """Open the file of the study in a folder, and close it at the end of the block."""
    from sqlalchemy.engine import URL
    from sqlalchemy.pool import NullPool

    # A URI of SQLite's within a URL of SQLAlchemy's, each quoted by its own rules: `?` in a name is part of it.
    mode = "?mode=ro" if read_only else ""
    file = f"file:{quote(str((folder / STUDY).resolve()))}{mode}"
    url = URL.create("sqlite", database=file, query={"uri": "true"}).render_as_string()
    with quiet(optuna):
        with _readable(folder):
            # Without a pool no connection stays open if the file turns out not to be a database.
            kept = {"connect_args": {"timeout": WAIT}, "poolclass": NullPool}
            storage = optuna.storages.RDBStorage(url, engine_kwargs=kept)
        try:
            yield storage
        finally:
            storage.remove_session()
            storage.engine.dispose()


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Report a damaged file, or one of another version of Optuna, in one message."""
    import sqlalchemy.exc

    try:
        yield
    except (sqlalchemy.exc.DatabaseError, RuntimeError) as error:
        why = str(getattr(error, "orig", error)).splitlines()[0]
        raise SettingsError(f"{folder / STUDY}: can't be read: {why}; name another folder") from None


@contextmanager
def quiet(optuna: Any) -> Iterator[None]:
    """Silence Optuna's own log and warnings until the end of the block."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
