"""Training: one model, a search for settings, the best of all models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from recspec.api.data import Data, load_spec
from recspec.api.evaluating import kind_of_object
from recspec.api.model import Model, Plan
from recspec.api.process import joined, keep_to_cores, settings_of, stop_on_signal, told_once
from recspec.api.progress import Events, bar, events
from recspec.api.ray_launcher import rank_on_ray, train_on_ray
from recspec.api.verbs import Place, verb
from recspec.api.views import Section, View, Viewed
from recspec.base import config
from recspec.base.errors import SettingsError, require_extra

if TYPE_CHECKING:
    from recspec.training.search import Found, Leaderboard, State


TrialEvents = Callable[[int, Mapping[str, object]], None]
"""Receives the number of a trial and each of its events."""


@overload
def train(
    model: str,
    data: Place,
    run: Place,
    *,
    recipe: Place | None = ...,
    resume: bool = ...,
    force: bool = ...,
    plan: Literal[False] = ...,
    launcher: Literal["ray"] | None = ...,
    processes: int = ...,
    device: str = ...,
    allow_outside: bool = ...,
    settings: Mapping[str, object] | None = ...,
    progress: bool | Events | None = ...,
    **named: object,
) -> Model: ...


@overload
def train(
    model: str,
    data: Place,
    run: Place,
    *,
    recipe: Place | None = ...,
    resume: bool = ...,
    force: bool = ...,
    plan: Literal[True],
    launcher: Literal["ray"] | None = ...,
    processes: int = ...,
    device: str = ...,
    allow_outside: bool = ...,
    settings: Mapping[str, object] | None = ...,
    progress: bool | Events | None = ...,
    **named: object,
) -> Plan: ...


@verb
def train(
    model: str,
    data: Place,
    run: Place,
    *,
    recipe: Place | None = None,
    resume: bool = False,
    force: bool = False,
    plan: bool = False,
    launcher: Literal["ray"] | None = None,
    processes: int = 1,
    device: str = "auto",
    allow_outside: bool = False,
    settings: Mapping[str, object] | None = None,
    progress: bool | Events | None = None,
    **named: object,
) -> Model | Plan:
    """Train a model, on one process, on several under torchrun, or on the workers of a Ray cluster.

    Ctrl-C (in a notebook: Interrupt) writes a checkpoint and raises `Interrupted`; `resume=True` continues.

    Args:
        model: Name from `models()`.
        data: A prepared dataset, or its path.
        run: Folder for the run: checkpoints, log and bundle.
        recipe: Recipe: a YAML file, or the name of a published one.
        resume: Continue the run from its newest checkpoint.
        force: Replace the run that the folder holds.
        plan: Return every automatic choice and its reason without training.
        launcher: Start the processes by ray, on the workers of a Ray cluster, which is found at RAY_ADDRESS.
        processes: Number of Ray workers.
        device: auto, cpu, cuda or cuda:N.
        allow_outside: Allow files outside the specification's folder.
        settings: Settings by name, such as {"dim": 64, "train.epochs": 3}.
        progress: A function that receives the events of the training, or False for no bar.
        **named: Settings of the model and of training as keywords, such as `dim=64, epochs=3`.

    Raises:
        SettingsError: for an unknown model or setting, or a folder that holds a run already.
        MissingExtraError: without a library that the model, a setting or the launcher needs.
        SpecError: if the dataset lacks a role that the model needs, or a split.
        CheckpointError: with `resume`, if there is nothing to continue from or it is of another run.
        TrainingError: if the loss is no longer a number, or the disk is full.
        Interrupted: after Ctrl-C or SIGTERM.
    """
    from recspec.loading import join
    from recspec.training import plan_run
    from recspec.training import train as run_training

    with told_once():
        values = joined("train", settings, named)
        model_settings, train_settings = settings_of(model, _path(recipe), values)
        if launcher is not None and not plan:
            require_extra("ray", "ray")
        spec = load_spec(data, allow_outside=allow_outside)
        if train_settings.epochs == 0:
            what = "which trains nothing and leaves a run to continue"
            raise SettingsError(f"train.epochs is 0, {what}; ask for 1 or more")
    folder = Path(run)
    if launcher is None and processes > 1:
        raise SettingsError(f"processes is {processes} without a launcher; take launcher ray, or start torchrun")
    if launcher is not None and not plan:
        given = {
            "model": model,
            "data": str(spec.folder.resolve()),
            "recipe": recipe and str(config.recipe_file(Path(recipe)).resolve()),
            "resume": resume,
            "force": force,
            "allow_outside": allow_outside,
            "settings": values,
        }
        with events(progress) as show:
            train_on_ray(_train_on_ray, processes, folder, device, given, show)
        return Model(folder, kind=kind_of_object(data), data=data if isinstance(data, Data) else Data(spec))
    keep_to_cores(train_settings.affinity)
    with join(device) as ranks, stop_on_signal() as stop_requested:
        if plan:
            planned = plan_run(model, spec, folder, train_settings, model_settings, ranks, resume=resume)
            choices = {name: str(choice) for name, choice in planned.choices.items()}
            return Plan(f"plan of {model} on {spec.folder}", choices, planned.to_dict(), planned.notes)
        with events(progress if ranks.is_first else False) as show:
            result = run_training(
                model,
                spec,
                folder,
                settings=train_settings,
                model_settings=model_settings,
                ranks=ranks,
                resume=resume,
                force=force,
                baselines=True,
                on_event=show,
                stop_requested=stop_requested,
            )
    opened = data if isinstance(data, Data) else Data(spec)
    return Model(folder, device=device, kind=kind_of_object(data), data=opened, result=result)


def _train_on_ray(config: Mapping[str, Any]) -> None:
    """What each worker of Ray does."""
    with rank_on_ray(config):
        train(**config["given"], progress=False)


class Search(Viewed):
    """What a search for settings found.

    Attributes:
        found: The trials, the best one, and what mattered.
        recipe: The best recipe, a YAML file.
        data: The dataset.
    """

    def __init__(self, folder: Path, found: Found, data: Data) -> None:
        self.found, self.recipe, self._folder, self.data = found, found.recipe, folder, data

    @property
    def model(self) -> Model:
        """The model of the best trial."""
        if self.found.best is None:
            raise SettingsError(f"{self._folder}: no trial is complete yet; the same call goes on")
        return Model(self._folder / "best", kind=self.data.kind, data=self.data)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return self.found.to_dict()

    def _view(self) -> View:
        found = self.found
        order = sorted(
            found.trials, key=lambda trial: (trial is not found.best, trial.state != "complete", trial.number)
        )
        rows = [
            (
                f"{trial.number}",
                "" if trial.value is None else f"{trial.value:.5f}",
                "best" if trial is found.best else trial.state,
                ", ".join(f"{name.partition('.')[2]} {value}" for name, value in trial.settings.items()),
            )
            for trial in order
        ]
        title = f"{found.counts}; {found.metric or 'no metric yet'} on valid"
        left = [f"{found.left} more to run; the same call goes on"] if found.left else []
        return View(f"Search in {self._folder}: {title}", [Section("", ("trial", "value", "", "settings"), rows)], left)


@verb
def tune(
    model: str,
    data: Place,
    out: Place,
    *,
    trials: int = 20,
    budget: float | None = None,
    workers: int = 1,
    space: Mapping[str, object] | Sequence[str] | None = None,
    only: bool = False,
    like: Place | Sequence[Place] | None = None,
    recipe: Place | None = None,
    seed: int = 0,
    device: str = "auto",
    allow_outside: bool = False,
    settings: Mapping[str, object] | None = None,
    progress: bool | TrialEvents | None = None,
    tell: Callable[[str], None] | None = None,
    **named: object,
) -> Search:
    """Search for settings on valid; stop hopeless trials early and write the best one as a recipe.

    The same call continues a search that was stopped. Settings that are given are not searched, unless `space` names
    them.

    Args:
        model: Name from `models()`.
        data: A prepared dataset, or its path.
        out: Folder of the search.
        trials: Total number of trials, including earlier calls.
        budget: Minutes before the search stops.
        workers: Number of processes that run trials, this one included. In a script, call `tune` under
            `if __name__ == "__main__":` if it is more than 1.
        space: Values to search, beside or instead of those of the model's own space, such as
            {"dim": [16, 32, 64], "dropout": "0.0..0.5", "learning_rate": "1e-4..1e-2 log"}.
        only: Search only the settings of `space`.
        like: Folders of earlier searches of this model; their best trials are tried early.
        recipe: Recipe that every trial starts from, a YAML file.
        seed: Random seed.
        device: auto, cpu, cuda or cuda:N.
        allow_outside: Allow files outside the specification's folder.
        settings: Settings by name, such as {"dim": 64, "train.epochs": 3}.
        progress: A function that receives the number of a trial and each of its events, or False for no bar.
        tell: Receives a sentence on what is searched.
        **named: Settings of the model and of training as keywords.

    Raises:
        SettingsError: if the folder holds another search, settings fit no trial, or there is no valid split.
        MissingExtraError: without Optuna, or a library that the model needs.
        Interrupted: after Ctrl-C or SIGTERM.
    """
    from recspec.loading import join
    from recspec.training.search import Tuning, parse_space, sections_of
    from recspec.training.search import describe as described

    require_extra("optuna", "tune")
    values = joined("tune", settings, named)
    model_settings, train_settings = settings_of(model, _path(recipe), values)
    spec = load_spec(data, allow_outside=allow_outside)
    given = {
        "settings": model_settings.model_dump(mode="json", exclude_unset=True),
        "train": train_settings.model_dump(mode="json", exclude_unset=True),
    }
    sections = sections_of(model)
    wanted = space if isinstance(space, Mapping) else config.parse_assignments(space or ())
    asked = parse_space(joined("space", wanted, {}), sections)
    fixed = config.assign(values, sections)
    folder = Path(out)
    with join(device) as ranks, stop_on_signal() as stop_requested, bar(_quiet(progress)) as shown:
        if ranks.world_size > 1:
            raise SettingsError("tune: one process a search; start it without torchrun")

        def show(trial: int, event: Mapping[str, object]) -> None:
            if callable(progress):
                progress(trial, event)
            elif shown is not None:
                shown.event(event)

        tuning = Tuning(
            model,
            spec,
            folder,
            given,
            asked,
            trials,
            only=only,
            fixed=[f"{section}.{name}" for section, each in fixed.items() for name in _names(each)],
            like=[Path(each) for each in _places(like)],
            minutes=budget,
            seed=seed,
            workers=workers,
            ranks=ranks,
            on_event=show,
            stop_requested=stop_requested,
        )
        if tell is not None:
            tell(f"searching {described(tuning.space)}")
        found = tuning.run()
    return Search(folder, found, data if isinstance(data, Data) else Data(spec))


class AutoDisplay(Protocol):
    """Receives what a search of `auto` does."""

    def look(self, state: State, left: float) -> None:
        """The candidates after a slice, and the seconds that are left."""

    def show(self, name: str, event: Mapping[str, object]) -> None:
        """A candidate's name and an event of its training."""

    def tell(self, message: str) -> None:
        """A sentence on what begins, goes on or is left out."""


class AutoResult(Viewed):
    """The candidates of a search, best first, and what the search concludes.

    Attributes:
        board: The leaderboard.
        model: The winner.
    """

    def __init__(self, board: Leaderboard, data: Data) -> None:
        self.board = board
        self.model = Model(board.best, kind=data.kind, data=data)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return self.board.to_dict()

    def _view(self) -> View:
        board = self.board
        columns = ("name", "valid", "valid_error", "test", "test_error", "seconds", "epochs", "megabytes", "p50_ms")
        rows = [tuple(line.get(name) for name in columns) for line in board.lines]
        left_out = [f"left out: {name}: {why.partition(chr(10))[0]}" for name, why in board.left_out.items()]
        return View(
            f"AutoResult: {board.metric}, chosen on valid",
            [Section("", columns, rows)],
            [board.verdict, *board.warnings, *left_out],
        )


@verb
def auto(
    data: Place,
    out: Place,
    *,
    minutes: float = 30.0,
    metric: str | None = None,
    models: str | Sequence[str] | None = None,
    seed: int = 0,
    device: str = "auto",
    allow_outside: bool = False,
    progress: bool | AutoDisplay | None = None,
) -> AutoResult:
    """Find the best model for a dataset: train all that fit, choose on valid, open test at the end.

    Args:
        data: A prepared dataset, or its path.
        out: Folder of the search; the same call continues one that was stopped.
        minutes: Time of the whole search, over all calls.
        metric: PROTOCOL/METRIC on valid that decides; by default that of training.
        models: Names of models; by default all that can train on the dataset.
        seed: Random seed.
        device: auto, cpu, cuda or cuda:N.
        allow_outside: Allow files outside the specification's folder.
        progress: A display of the search, or False for no bar.

    Raises:
        SettingsError: if the folder holds another search, or no model can train on the dataset.
        DataError: if another process searches in the folder.
        Interrupted: after Ctrl-C or SIGTERM.
    """
    from recspec.loading import join
    from recspec.training.search import AutoSearch

    spec = load_spec(data, allow_outside=allow_outside)
    only = None if models is None else [models] if isinstance(models, str) else list(models)
    display = None if progress is None or isinstance(progress, bool) else progress
    with join(device) as ranks, stop_on_signal() as stop_requested, bar(_quiet(progress)) as shown:
        if ranks.world_size > 1:
            raise SettingsError("auto: one process a search; start it without torchrun")

        def show(name: str, event: Mapping[str, object]) -> None:
            if shown is not None and event["event"] == "epoch":
                shown.stage(f"{name}: epoch {event['epoch']}, best {event.get('best')}", 0, None)

        board = AutoSearch(
            spec,
            Path(out),
            minutes,
            metric,
            only,
            seed,
            ranks=ranks,
            look=display.look if display else lambda _state, _left: None,
            on_event=display.show if display else show,
            tell=display.tell if display else lambda _: None,
            stop_requested=stop_requested,
        ).run()
    return AutoResult(board, data if isinstance(data, Data) else Data(spec))


def _quiet(progress: object) -> bool | None:
    """Whether a bar is wanted: not if it is declined, or if another display takes its place."""
    return None if progress is None or progress is True else False


def _path(place: Place | None) -> Path | None:
    return None if place is None else Path(place)


def _places(places: Place | Sequence[Place] | None) -> Sequence[Place]:
    if places is None:
        return ()
    return list(places) if isinstance(places, (list, tuple)) else [places]  # type: ignore[list-item]


def _names(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of settings; those of a table's entries too, as `parts.embeddings.weight_decay`."""
    for name, value in values.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{name}.")
