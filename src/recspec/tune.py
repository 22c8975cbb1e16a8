"""Hyper-parameter search: trials of `train`, each judged on valid alone, the poor ones stopped early.

The search lives in a folder and outlasts the process:

    OUT/study.db          what was tried and what came of it (Optuna, SQLite)
    OUT/trials/0007/      the run of trial 7: log.jsonl, and checkpoints while it is under way
    OUT/best.yaml         the best recipe so far
    OUT/best/             its bundle

A search that was stopped, or killed, goes on with the same command: the trial under way continues from its checkpoint.
The same command may run several times at once: the workers share the trials.
test is never opened.
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import yaml
from pydantic import BaseModel

from recspec import __version__, config
from recspec.distributed import Ranks
from recspec.errors import Interrupted, RecspecError, SettingsError, TrainingError, listed, require_extra
from recspec.evaluate import LOWER_IS_BETTER
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS
from recspec.outputs import is_locked, locked, made, put_in_place, turn, whole_file
from recspec.paths import PathError, confine, confined, local
from recspec.runlog import Event
from recspec.train import TrainSettings, train

if TYPE_CHECKING:
    import optuna

STUDY = "study.db"
RECIPE = "best.yaml"
BUNDLE = "best"
EXAMPLES = "'[16, 32, 64]' for one of several, '0.0..0.5' for a range, '1e-4..1e-2 log' for one of magnitudes"

FIRST_TRIALS = 5
"""Trials that are never stopped early: there is nothing to compare them with."""

WAIT = 120.0
"""Seconds that a worker waits for another one's transaction."""

FAILURES = 5
"""Failed trials, with none that went well, after which a search gives up."""


# --- what is searched ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    values: tuple[object, ...]

    def suggest(self, trial: optuna.Trial, name: str) -> object:
        """A value; lists and tables go through the study as JSON."""
        return json.loads(str(trial.suggest_categorical(name, [json.dumps(value) for value in self.values])))

    def told(self) -> object:
        """As it is written in the study."""
        return list(self.values)


@dataclass(frozen=True)
class Range:
    """A number from `low` to `high`, both possible; whole where both are; `log` draws magnitudes evenly."""

    low: float
    high: float
    log: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether only whole numbers are meant."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def suggest(self, trial: optuna.Trial, name: str) -> object:
        """A value."""
        if self.is_whole:
            return trial.suggest_int(name, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(name, self.low, self.high, log=self.log)

    def told(self) -> object:
        """As it is written in the study."""
        return f"{self.low}..{self.high}{' log' if self.log else ''}"


Search = Mapping[str, Choice | Range]
"""Setting with its section (`train.learning_rate`, `settings.dropout`) -> what to draw it from."""


def parse_search(entries: Mapping[str, object], sections: Mapping[str, type[BaseModel]]) -> dict[str, Choice | Range]:
    """What `--search NAME=VALUES` and a file of them say.

    Raises:
        SettingsError: with every entry that can't be read, and every name that is no setting.
    """
    problems: list[str] = []
    found: dict[str, Choice | Range] = {}
    for name, value in entries.items():
        try:
            full_name = _full_name(name, sections)
            found[full_name] = _parsed(value)
        except SettingsError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(f"'{name}' is {value!r}: {error}; write {EXAMPLES}")
    if problems:
        raise SettingsError.of("--search", problems)
    return found


def _full_name(name: str, sections: Mapping[str, type[BaseModel]]) -> str:
    assigned = config.assign({name: None}, sections)
    section = next(section for section, values in assigned.items() if values)
    return name if name.startswith(f"{section}.") else f"{section}.{name}"


def _parsed(value: object) -> Choice | Range:
    if isinstance(value, list):
        if len(value) < 2:
            raise ValueError("expected at least two values to choose from")
        return Choice(tuple(value))
    if not isinstance(value, str) or ".." not in value:
        raise ValueError("expected a list of values or a range")
    text, _, kind = value.strip().partition(" ")
    low_text, _, high_text = text.partition("..")
    if kind.strip() not in ("", "log"):
        raise ValueError(f"'{kind.strip()}' behind the range; expected 'log' or nothing")
    try:
        low, high = _number(low_text), _number(high_text)
    except ValueError:
        raise ValueError("the ends of the range are no numbers") from None
    if not low < high:
        raise ValueError("the first number is not below the second")
    if kind.strip() == "log" and low <= 0:
        raise ValueError("magnitudes need a lowest number above 0")
    return Range(low, high, kind.strip() == "log")


def _number(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def default_search(model: str, values: Mapping[str, Mapping[str, object]]) -> dict[str, Choice | Range]:
    """What is searched where nobody says: the learning rate, and those of the usual settings that the model has.

    Args:
        model: Its name.
        values: The sections `settings` and `train` that a trial starts from.
    """
    rate = values["train"].get("learning_rate", TrainSettings.model_fields["learning_rate"].default)
    assert isinstance(rate, (int, float))
    search: dict[str, Choice | Range] = {"train.learning_rate": Range(float(rate) / 10, float(rate) * 10, log=True)}
    known = MODELS[model].Settings.model_fields
    for name, drawn in (
        ("dropout", Range(0.0, 0.5)),
        ("embedding_dim", Choice((8, 16, 32, 64))),
        ("factors", Choice((8, 16, 32, 64))),
    ):
        field_info = known.get(name)
        if field_info is None or (name == "embedding_dim" and field_info.annotation is not int):
            continue
        search[f"settings.{name}"] = drawn
    if model == "dlrm":  # its width is that of the bottom MLP's last layer: two settings that move together
        search.pop("settings.embedding_dim", None)
    return search


# --- the search ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """One trial and what came of it."""

    number: int
    state: str
    """`complete`, `pruned` (stopped early), `failed` or `running`."""
    value: float | None
    """The metric on valid at its best epoch."""
    settings: Mapping[str, object]
    seconds: float | None
    reason: str = ""

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return dict(vars(self))


@dataclass(frozen=True)
class Found:
    """What a search has found so far."""

    metric: str
    trials: Sequence[Trial]
    best: Trial | None
    recipe: Path
    left: int
    """Trials that were asked for and not made."""

    @property
    def ended(self) -> int:
        """Trials that ended, one way or another."""
        return sum(trial.state != "running" for trial in self.trials)

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "metric": self.metric,
            "best": self.best.to_dict() if self.best else None,
            "recipe": str(self.recipe) if self.best else None,
            "trials": [trial.to_dict() for trial in self.trials],
            "left": self.left,
        }


def _silent(trial: int, event: Event) -> None:  # noqa: ARG001
    return


@dataclass
class Tuning:
    """A search for settings of one model on one dataset.

    Args:
        model: A name of `MODELS`.
        spec: The dataset.
        out: The search's folder.
        values: Sections `settings` and `train` that every trial starts from.
        search: What is drawn.
        trials: How many trials the search has in all, those of earlier calls counted.
        minutes: How long this call may go on; the trial under way then stops at a checkpoint.
        seed: Of what is drawn.
        on_event: Told each event of each trial.
        stop_requested: Asked after every step.
    """

    model: str
    spec: FeatureSpec
    out: Path
    values: Mapping[str, Mapping[str, object]]
    search: Search
    trials: int
    minutes: float | None = None
    seed: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    on_event: Callable[[int, Event], None] = _silent
    stop_requested: Callable[[], bool] = lambda: False

    def run(self) -> Found:
        """Trials until there are as many as asked for, or the time is over.

        Raises:
            SettingsError: if the folder holds another search, or settings fit no trial.
            MissingExtraError: without Optuna.
            Interrupted: if it was asked to stop; the same command goes on.
        """
        require_extra("optuna", "tune")
        started = time.monotonic()
        self.out = local(self.out, "OUT")
        with _quiet(), made(self.out), self._storage() as storage:
            with turn(self.out):
                study = self._study(storage)
            while not self._over(started):
                with ExitStack() as held:
                    trial = self._next(study, held)
                    if trial is None:
                        break
                    self._one(study, trial, started)
            if self.stop_requested():
                raise Interrupted(
                    f"{self.out}: stopped after {self._made(study)} of {self.trials} trials; the same command goes on"
                )
            return self._found(study)

    # --- the study ---------------------------------------------------------------------------------------------

    @contextmanager
    def _storage(self) -> Iterator[optuna.storages.RDBStorage]:
        """The file of the search, closed at the end."""
        import optuna
        from sqlalchemy.engine import URL

        # SQLite opens what lies beside its file, and clears it away.
        confine(self.out, ("trials", BUNDLE, RECIPE, STUDY, *(f"{STUDY}-{each}" for each in ("journal", "wal", "shm"))))
        # A URI of SQLite's within a URL of SQLAlchemy's, each quoted by its own rules: `?` in a name is part of it.
        file = quote(str((self.out / STUDY).resolve()))
        url = URL.create("sqlite", database=f"file:{file}", query={"uri": "true"}).render_as_string()
        with self._readable():
            storage = optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": WAIT}})
        try:
            yield storage
        finally:
            storage.remove_session()
            storage.engine.dispose()

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Turns the errors of a file that is damaged, or of another version of Optuna, into one message."""
        import sqlalchemy.exc

        try:
            yield
        except (sqlalchemy.exc.DatabaseError, RuntimeError) as error:
            why = str(getattr(error, "orig", error)).splitlines()[0]
            raise SettingsError(f"{self.out / STUDY}: can't be read: {why}; name another folder") from None

    def _study(self, storage: optuna.storages.RDBStorage) -> optuna.Study:
        import optuna

        with self._readable():
            study = optuna.create_study(
                study_name="recspec",
                storage=storage,
                pruner=optuna.pruners.MedianPruner(n_startup_trials=FIRST_TRIALS, n_warmup_steps=1),
                load_if_exists=True,
            )
        told = self._told()
        if not study.user_attrs:
            for name, value in told.items():
                study.set_user_attr(name, value)
        differing = [
            f"{name} was {json.dumps(study.user_attrs.get(name))}, and is {json.dumps(value)}"
            for name, value in told.items()
            if study.user_attrs.get(name) != json.loads(json.dumps(value))
        ]
        if differing:
            raise SettingsError.of(f"{self.out}: holds another search; name another folder", differing)
        return study

    def _told(self) -> dict[str, object]:
        """What makes it this search and no other."""
        return {
            "model": self.model,
            "dataset": str(self.spec.folder.resolve()),
            "settings": dict(self.values["settings"]),
            "train": dict(self.values["train"]),
            "search": {name: drawn.told() for name, drawn in self.search.items()},
        }

    def _next(self, study: optuna.Study, held: ExitStack) -> optuna.Trial | None:
        """The trial to make now, or None where all are made or under way.

        The lock of its folder, which goes to `held`, tells other workers that it is under way; the kernel gives it
        back however this process ends. Whatever concerns all trials is done by one worker after another.
        """
        import optuna

        with turn(self.out):
            under_way = self._take_up(study)
            if self._made(study) + under_way >= self.trials:
                return None
            # Each trial draws anew: a call that goes on, or a second worker, does not draw the first trials again.
            seed = self.seed + len(study.get_trials(deepcopy=False))
            study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=FIRST_TRIALS)
            trial = study.ask()
            folder = str(trial.user_attrs.get("continues") or f"{trial.number:04d}")
            trial.set_user_attr("folder", folder)
            held.enter_context(locked(self._run_of(folder), "training in"))
            return trial

    def _run_of(self, folder: str) -> Path:
        """The folder of a trial, as the study names it: a file, which need not be ours."""
        try:
            return confined(self.out / "trials", folder)
        except PathError as error:
            raise SettingsError(f"{self.out / STUDY}: damaged: the folder of a trial: {error}") from None

    def _take_up(self, study: optuna.Study) -> int:
        """Trials that an ended process left under way wait to be made again, from their checkpoints.

        Gives how many are under way in other processes.
        """
        import optuna

        alive = 0
        for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            folder = str(trial.user_attrs.get("folder", ""))
            if folder and is_locked(self._run_of(folder)):
                alive += 1
                continue
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            study.enqueue_trial(trial.params, user_attrs={"continues": folder})
        return alive

    def _made(self, study: optuna.Study) -> int:
        """Trials that ended, one way or another; those made again count once."""
        import optuna

        ended = study.get_trials(
            deepcopy=False, states=(optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
        )
        return len(ended) + len(self._failed(study))

    def _failed(self, study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
        return [trial for trial in study.get_trials(deepcopy=False) if "reason" in trial.user_attrs]

    def _over(self, started: float) -> bool:
        late = self.minutes is not None and time.monotonic() - started > self.minutes * 60
        return late or self.stop_requested()

    # --- one trial ---------------------------------------------------------------------------------------------

    def _one(self, study: optuna.Study, trial: optuna.Trial, started: float) -> None:
        """Draw settings, train with them and say what came of it; one that is cut off stays under way."""
        import optuna

        drawn = {name: each.suggest(trial, name) for name, each in self.search.items()}
        run = self._run_of(str(trial.user_attrs["folder"]))
        watch = _Watch(self, trial, started)
        try:
            self._train(run, drawn, watch)
        except Interrupted:
            if not watch.pruned:  # the next call takes it up
                return
            with turn(self.out):
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        except (SettingsError, TrainingError) as error:
            trial.set_user_attr("reason", str(error))
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            self._give_up(study, error)
        else:
            if watch.best is None:
                raise SettingsError(
                    f"{self.spec.folder}: there is no valid split to judge trials on; "
                    "set train.valid_share=0.1 to hold out a share of train"
                )
            with turn(self.out):  # the bundle is kept or given up before another worker looks for the best one
                study.tell(trial, watch.best * watch.sign)
                self._keep_best(study, run)
        for left in ("checkpoints", "bundle"):
            shutil.rmtree(run / left, ignore_errors=True)

    def _train(self, run: Path, drawn: Mapping[str, object], watch: _Watch) -> None:
        model_settings, train_settings = self._settings(drawn)
        resume = (run / "checkpoints").is_dir() and any((run / "checkpoints").glob("step-*"))
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
        sections: dict[str, type[BaseModel]] = {"settings": MODELS[self.model].Settings, "train": TrainSettings}
        assigned = config.assign(drawn, sections)
        where = "the settings drawn"
        return (
            config.build(MODELS[self.model].Settings, where, self.values["settings"], assigned["settings"]),
            config.build(TrainSettings, where, self.values["train"], assigned["train"]),
        )

    def _give_up(self, study: optuna.Study, error: RecspecError) -> None:
        """Trials that all fail say the same: the mistake is not in what was drawn."""
        import optuna

        good = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        failed = self._failed(study)
        reasons = {str(trial.user_attrs["reason"]) for trial in failed}
        if not good and (len(failed) >= FAILURES or (len(failed) > 1 and len(reasons) == 1)):
            raise SettingsError(f"{self.out}: {len(failed)} trials failed and none went well; the last one: {error}")

    # --- what came of it ---------------------------------------------------------------------------------------

    def _keep_best(self, study: optuna.Study, run: Path) -> None:
        """The bundle of the trial that was made in `run`, if it is the best one; and the best recipe."""
        found = self._found(study)
        if found.best is None:
            return
        bundle = self._run_of(_folder_of(study, found.best.number)) / "bundle"
        if bundle.parent == run and bundle.is_dir():
            put_in_place(bundle, self.out / BUNDLE)
        self._write_recipe(found)

    def _write_recipe(self, found: Found) -> None:
        best = found.best
        assert best is not None
        model_settings, train_settings = self._settings(best.settings)
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

    def _found(self, study: optuna.Study) -> Found:
        metric = str(study.user_attrs.get("metric", ""))
        sign = _sign(metric)
        trials = [_as_trial(each, self.search, sign) for each in study.get_trials() if _counts(each)]
        complete = [trial for trial in trials if trial.state == "complete" and trial.value is not None]
        best = min(complete, key=lambda trial: (sign * float(trial.value or 0), trial.number), default=None)
        return Found(metric, trials, best, self.out / RECIPE, max(0, self.trials - self._made(study)))


@dataclass
class _Watch:
    """Looks on while one trial trains."""

    tuning: Tuning
    trial: optuna.Trial
    started: float
    best: float | None = None
    sign: float = 1.0
    pruned: bool = False

    def see(self, event: Event) -> None:
        """Report each evaluation; a trial below the median of the others at its epoch is stopped."""
        self.tuning.on_event(self.trial.number, event)
        if event["event"] != "epoch" or event.get("best") is None:
            return
        metric = str(event["metric"])
        if "metric" not in self.trial.study.user_attrs:
            self.trial.study.set_user_attr("metric", metric)
        self.sign = _sign(metric)
        self.best = float(str(event["best"]))
        epoch = int(float(str(event["epoch"])))
        self.trial.report(self.best * self.sign, epoch)
        self.pruned = epoch < int(float(str(event["epochs"]))) and bool(self.trial.should_prune())

    def should_stop(self) -> bool:
        """Asked after every step."""
        return self.pruned or self.tuning._over(self.started)


def _sign(metric: str) -> float:
    """Optuna minimises: -1 where more is better."""
    return 1.0 if metric.rpartition("/")[2] in LOWER_IS_BETTER else -1.0


def _folder_of(study: optuna.Study, number: int) -> str:
    return next(str(trial.user_attrs["folder"]) for trial in study.get_trials() if trial.number == number)


def _counts(trial: optuna.trial.FrozenTrial) -> bool:
    """Whether it is a trial to show: not one that only waits, nor one that was cut off and made again."""
    return trial.state.name in ("COMPLETE", "PRUNED", "RUNNING") or "reason" in trial.user_attrs


def _as_trial(trial: optuna.trial.FrozenTrial, search: Search, sign: float) -> Trial:
    value = trial.value if trial.value is not None else min(trial.intermediate_values.values(), default=None)
    state = {"COMPLETE": "complete", "PRUNED": "pruned", "RUNNING": "running"}.get(trial.state.name, "failed")
    settings = {
        name: json.loads(str(value)) if isinstance(search[name], Choice) else value
        for name, value in trial.params.items()
        if name in search
    }
    return Trial(
        trial.number,
        state,
        None if value is None else value * sign,
        settings,
        trial.duration.total_seconds() if trial.duration else None,
        str(trial.user_attrs.get("reason", "")),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Optuna logs by itself; here the caller shows what there is to see."""
    import optuna

    before: Any = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def describe(search: Search) -> str:
    """What is searched, in one line."""
    return listed([f"{name} {drawn.told()}" for name, drawn in search.items()])
