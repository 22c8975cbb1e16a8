"""Training: one model, a search for settings, the best of all models, and models put together."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from recspec.api.comparing import MethodTable, trained_seeds
from recspec.api.data import Data, opened
from recspec.api.model import Model, Plan
from recspec.api.progress import Events, Stages, bar, events, stages
from recspec.api.ray_launcher import rank_on_ray, train_on_ray
from recspec.api.verb_checks import (
    Place,
    keep_to_cores,
    merge_settings,
    one_of,
    report_on_first_rank,
    settings_of,
    several,
    stop_on_signal,
    verb,
)
from recspec.api.views import Section, View, Viewed
from recspec.base.errors import SettingsError, require_extra
from recspec.base.summaries import shown

if TYPE_CHECKING:
    from recspec.inference import Built
    from recspec.training import Blended
    from recspec.training.search import Found, Leaderboard, State


TrialEvents = Callable[[int, Mapping[str, object]], None]
"""Receives the number of a trial and each of its events."""


@overload
def train(
    model: str, data: Place, run: Place, *, plan: Literal[False] = ..., seeds: None = ..., **named: Any
) -> Model: ...
@overload
def train(model: str, data: Place, run: Place, *, plan: Literal[True], **named: Any) -> Plan: ...
@overload
def train(
    model: str, data: Place, run: Place, *, plan: Literal[False] = ..., seeds: int, **named: Any
) -> MethodTable: ...


@verb
def train(
    model: str,
    data: Place,
    run: Place,
    *,
    recipe: Place | None = None,
    seeds: int | None = None,
    resume: bool = False,
    force: bool = False,
    plan: bool = False,
    launcher: Literal["ray"] | None = None,
    processes: int = 1,
    device: str = "auto",
    allow_outside: bool = False,
    settings: Mapping[str, object] | None = None,
    progress: bool | Events | None = None,
    tell: Callable[[str], None] | None = None,
    **named: object,
) -> Model | Plan | MethodTable:
    """Train a model.

    Under torchrun, several processes train it. Ctrl-C writes a checkpoint, from which `resume` continues. With `seeds`,
    the same call continues: finished runs stay.

    Args:
        model: Name from `recspec models`.
        data: Prepared dataset: its folder or specification file.
        run: Folder for checkpoints, log and bundle.
        recipe: Recipe: a YAML file, or the name of a published one.
        seeds: Number of seeds, from train.seed on; each has its run in RUN/seed-N.
        resume: Continue the run from its newest checkpoint.
        force: Replace the run in the folder.
        plan: Show every automatic choice and its reason without training.
        launcher: Start the processes with ray, on the cluster at RAY_ADDRESS.
        processes: Number of Ray workers.
        device: Device: auto, cpu, cuda or cuda:N.
        allow_outside: Allow files outside the specification's folder.
        settings: Settings by name, such as {"dim": 64, "train.epochs": 3}.
        progress: A function that receives the events of the training, or False for no bar.
        tell: Receives a sentence on each seed.
        **named: Settings of the model and of training as keywords, such as `dim=64, epochs=3`.

    Raises:
        SettingsError: for an unknown model or setting, or a folder that holds a run already, or seeds of another call.
        MissingExtraError: without a library that the model, a setting or the launcher needs.
        SpecError: if the dataset lacks a role that the model needs, or a split.
        CheckpointError: with `resume`, if there is nothing to continue from or it is of another run.
        TrainingError: if the loss is no longer a number, or the disk is full.
        Interrupted: after Ctrl-C or SIGTERM.
    """
    from recspec.base import config
    from recspec.loading import join
    from recspec.training import plan_run
    from recspec.training import train as run_training

    with report_on_first_rank():
        values = merge_settings("train", settings, named)
        model_settings, train_settings = settings_of(model, recipe, values)
        if launcher is not None and not plan:
            one_of("--launcher", launcher, ("ray",))
            require_extra("ray", "ray")
        prepared = opened(data, allow_outside=allow_outside)
        spec = prepared.spec
        if train_settings.epochs == 0:
            what = "which trains nothing and leaves a run to continue"
            raise SettingsError(f"train.epochs is 0, {what}; ask for 1 or more")
    folder = Path(run)
    if seeds is not None and not plan:
        first = train_settings.seed
        common = {
            "model": model,
            "settings": model_settings.model_dump(mode="json", exclude_unset=True),
            "train": train_settings.model_dump(mode="json", exclude_unset=True, exclude={"seed"}),
        }
        others = {name: value for name, value in values.items() if name not in ("seed", "train.seed")}

        def train_one(place: Path, seed: int, resume: bool) -> None:
            where: dict[str, Any] = {"launcher": launcher, "processes": processes, "device": device}
            how: dict[str, Any] = {"resume": resume, "recipe": recipe, "progress": progress}
            train(model, prepared, place, settings={**others, "train.seed": seed}, **where, **how)

        if force and resume:
            raise SettingsError("resume continues the runs and force replaces them; leave one of them out")
        if force:  # once the plan of the new runs is made
            train(model, prepared, folder, recipe=recipe, plan=True, device=device, settings=values)
            with join(device) as ranks:
                if ranks.is_first:
                    _remove_seeds(folder)
                ranks.barrier()
        trained = _train_seeds(folder, range(first, first + seeds), common, prepared, train_one, tell)
        with join(device):  # the first process has written the last bundle once all meet
            return trained_seeds(folder, trained, prepared)
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
        return Model(folder, kind=prepared.kind, data=prepared)
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
    return Model(folder, device=device, kind=prepared.kind, data=prepared, result=result)


SEEDS_FILE = "seeds.json"
"""What all seeds of a folder are trained with."""


def _train_seeds(
    folder: Path,
    seeds: Sequence[int],
    given: Mapping[str, object],
    data: Data,
    train_one: Callable[[Path, int, bool], None],
    tell: Callable[[str], None] | None,
) -> list[Path]:
    """Train each seed that is not trained yet, and return the folders of all runs.

    Raises:
        SettingsError: if the folder is a run, or its seeds were trained with other settings or on other data.
    """
    from recspec.base.files import PathError, read_json, write_whole
    from recspec.bundle import DataRecord
    from recspec.training import has_checkpoint

    if (folder / "bundle").exists() or (folder / "bundle.json").exists() or has_checkpoint(folder):
        raise SettingsError(f"{folder}: is a run itself; name another folder for the runs of seeds")
    given = {**given, "data": DataRecord.of(data.spec).digest}
    file = folder / SEEDS_FILE
    if file.exists():
        try:
            before = read_json(file)
        except PathError as error:
            raise SettingsError(f"{error}; replace the runs with --force, or name another folder") from None
        before = before if isinstance(before, dict) else {}
        if other := [name for name in given if before.get(name) != given[name]]:
            problems = [f"{name}: {shown(given[name])}; before: {shown(before.get(name))}" for name in other]
            hint = "repeat that call, name another folder, or replace the runs with --force"
            raise SettingsError.of(f"{folder}: its seeds were trained otherwise; {hint}", problems)
    write_whole(file, json.dumps(given, indent=2) + "\n")
    runs = [folder / f"seed-{seed}" for seed in seeds]
    for seed, run in zip(seeds, runs, strict=True):
        is_done = (run / "bundle" / "bundle.json").is_file()
        if not is_done:
            train_one(run, seed, has_checkpoint(run))
        if tell is not None:
            tell(f"{run}: {'was trained before' if is_done else 'trained'}")
    return runs


def _remove_seeds(folder: Path) -> None:
    """Remove all runs of seeds, also those that are not asked for again: they were trained otherwise."""
    from recspec.training import remove_run

    for run in sorted(folder.glob("seed-*")):
        remove_run(run)
    (folder / SEEDS_FILE).unlink(missing_ok=True)


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

    def view(self) -> View:
        """The trials, best first; the best one against the defaults; what mattered; where the best recipe is."""
        found = self.found
        rows = []
        for trial in sorted(found.trials, key=lambda one: (one is not found.best, one.state != "complete", one.number)):
            state = ", ".join(filter(None, ("best" if trial is found.best else trial.state, trial.start)))
            why = f": {trial.reason.strip().partition(chr(10))[0]}" if trial.reason else ""
            value, seconds = (
                "" if x is None else f"{x:.{digits}f}" for x, digits in ((trial.value, 5), (trial.seconds, 1))
            )
            settings = ", ".join(f"{name.partition('.')[2]} {_short(each)}" for name, each in trial.settings.items())
            rows.append((trial.number, value, f"{state}{why}", seconds, settings))
        notes = []
        if found.best is not None:
            notes = [
                _against_defaults(found),
                f"what mattered: {found.importances}",
                f"{found.recipe}: the best recipe; its bundle is in the folder best beside it",
            ]
        if found.left:
            notes.append(f"{found.left} {'trial is' if found.left == 1 else 'trials are'} left; the same call goes on")
        title = f"Search in {self._folder}: {found.counts}; {found.metric or 'no metric yet'} on valid"
        return View(title, [Section("", ("trial", "value", "", "seconds", "settings"), rows)], notes)


def _against_defaults(found: Found) -> str:
    """The best trial beside that of the defaults."""
    best, defaults = found.best, found.defaults
    assert best is not None
    line = f"best: trial {best.number}, {found.metric} {best.value:.5f} on valid"
    if defaults is best:
        return f"{line}: the defaults"
    if defaults is None or defaults.value is None:
        return f"{line}; the defaults have no value yet"
    how = "" if defaults.state == "complete" else f" ({defaults.state})"
    return f"{line}; the defaults, trial {defaults.number}: {defaults.value:.5f}{how}"


def _short(value: object) -> str:
    """A setting's value; a list in brackets, since commas stand between settings."""
    return str(value) if isinstance(value, list) else shown(value)


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
    """Search for the best settings of a model on valid.

    The best trial becomes a recipe. Given settings are not searched, unless `space` names them. The same call continues
    a search that was stopped.

    Args:
        model: Name from `recspec models`.
        data: Prepared dataset: its folder or specification file.
        out: Folder to write.
        trials: Number of trials, including earlier calls.
        budget: Minutes of search in this call; the same call continues it.
        workers: Number of processes that run trials; in Python, several need `if __name__ == "__main__":`.
        space: Values to search of a setting, such as '[16, 32, 64]', '0.0..0.5' or '1e-4..1e-2 log'.
        only: Search only the settings of `space`.
        like: Earlier search of this model whose best trials are tried first, or several.
        recipe: Recipe that trials start from, a YAML file.
        seed: Random seed.
        device: Device: auto, cpu, cuda or cuda:N.
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
    from recspec.base import config
    from recspec.loading import join
    from recspec.training.search import Tuning, parse_space, sections_of
    from recspec.training.search import describe as described

    require_extra("optuna", "tune")
    values = merge_settings("tune", settings, named)
    model_settings, train_settings = settings_of(model, recipe, values)
    prepared = opened(data, allow_outside=allow_outside)
    given = {
        "settings": model_settings.model_dump(mode="json", exclude_unset=True),
        "train": train_settings.model_dump(mode="json", exclude_unset=True),
    }
    sections = sections_of(model)
    wanted = space if isinstance(space, Mapping) else config.parse_assignments(space or ())
    asked = parse_space(merge_settings("space", wanted, {}), sections)
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
            prepared.spec,
            folder,
            given,
            asked,
            trials,
            only=only,
            fixed=[f"{section}.{name}" for section, each in fixed.items() for name in _names(each)],
            like=[Path(each) for each in several(like)],
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
    return Search(folder, found, prepared)


COLUMNS = {
    "name": "model",
    "valid": "valid",
    "valid_error": "+-",
    "test": "test",
    "test_error": "+-",
    "seconds": "seconds",
    "epochs": "epochs",
    "ended": "ended by",
    "megabytes": "MB",
    "p50_ms": "ms a request",
}
"""Figures of a candidate -> heading."""
USERS = {"valid": "for valid", "valid_error": "for its standard error and the lead", "test": "for test"}
"""Figures that are of users -> their name in a sentence."""


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

    def view(self) -> View:
        """The leaderboard, its verdict, and where the winner lies."""
        from recspec.training.search import by_reason, main_reason

        board, first = self.board, self.board.lines[0]
        notes = []
        if board.users:
            of = {figure: f"{ranked:,} of {known:,}" for figure, (ranked, known) in board.users.items()}
            notes.append(f"users ranked: {', '.join(f'{of[key]} {what}' for key, what in USERS.items() if key in of)}")
        again = "trained again on train and valid"
        if "trained_again_on" not in first:
            again = f"not {again}: {first['not_trained_again']}"
        elif "again_test" in first:
            error = shown(first["again_test_error"])
            again += f": {board.metric} on test {shown(first['again_test'])} +- {error}"
        notes += [
            board.verdict,
            f"{first['name']} was {again}",
            f"{board.seconds:,.0f} of {board.given:,.0f} s, {board.share_of_losers:.0%} for models that did not win",
            board.more,
            f"{board.best}: the winner; evaluate, predict, serve and export take it, and recommend if it ranks items",
        ]
        remarks = [f"warning: {warning}" for warning in board.warnings]
        remarks += [f"left out: {line}" for line in by_reason(board.left_out)]
        remarks += [
            f"not measured: {line['name']}: {main_reason(str(line['problem']))}"
            for line in board.lines
            if "problem" in line
        ]
        if board.left_out:
            remarks.append(f"{board.best.parent / 'leaderboard.json'} holds the whole reasons")
        rows = [tuple(shown(line[name]) for name in COLUMNS) for line in board.lines]
        title = f"AutoResult: {board.metric}, chosen on valid"
        return View(title, [Section("", tuple(COLUMNS.values()), rows)], notes, remarks=remarks)


@verb
def auto(
    data: Place,
    out: Place,
    *,
    minutes: float = 30.0,
    metric: str | None = None,
    models: Sequence[str] | None = None,
    seed: int = 0,
    device: str = "auto",
    allow_outside: bool = False,
    progress: bool | AutoDisplay | None = None,
) -> AutoResult:
    """Train every suitable model and keep the best.

    The winner is chosen on valid and measured once on test. The same call continues a search that was stopped.

    Args:
        data: Prepared dataset: its folder or specification file.
        out: Folder to write.
        minutes: Minutes of search, over all calls.
        metric: Metric on valid that decides; by default that of training.
        models: Models to try; by default all that suit the dataset.
        seed: Random seed.
        device: Device: auto, cpu, cuda or cuda:N.
        allow_outside: Allow files outside the specification's folder.
        progress: A display of the search, or False for no bar.

    Raises:
        SettingsError: if the folder holds another search, or no model can train on the dataset.
        DataError: if another process searches in the folder.
        Interrupted: after Ctrl-C or SIGTERM.
    """
    from recspec.loading import join
    from recspec.training.search import AutoSearch

    prepared = opened(data, allow_outside=allow_outside)
    only = None if models is None else list(several(models))
    display = None if progress is None or isinstance(progress, bool) else progress
    with join(device) as ranks, stop_on_signal() as stop_requested, bar(_quiet(progress)) as shown:
        if ranks.world_size > 1:
            raise SettingsError("auto: one process a search; start it without torchrun")

        def show(name: str, event: Mapping[str, object]) -> None:
            if shown is not None and event["event"] == "epoch":
                shown.stage(f"{name}: epoch {event['epoch']}, best {event.get('best')}", 0, None)

        board = AutoSearch(
            prepared.spec,
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
    return AutoResult(board, prepared)


def _quiet(progress: object) -> bool | None:
    """Whether a bar is wanted: not if it is declined, or if another display takes its place."""
    return None if progress is None or progress is True else False


def _names(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of settings; those of a table's entries too, as `parts.embeddings.weight_decay`."""
    for name, value in values.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{name}.")


# --- models put together ---------------------------------------------------------------------------------------------


class BlendedModel(Model):
    """A blend of models. `blended` says how its weights were chosen."""

    blended: Blended


class PipelineModel(Model):
    """Retrievers and a ranker in one bundle. `built` says what each retriever may bring."""

    built: Built


@verb
def blend(
    out: Place,
    runs: Sequence[Place],
    data: Place | None = None,
    *,
    like: Place | None = None,
    metric: str = "full/ndcg@10",
    device: str = "cpu",
    allow_outside: bool = False,
    progress: bool | Stages | None = None,
) -> BlendedModel:
    """Blend models that rank items by a weighted sum of scores.

    Args:
        out: Folder to write.
        runs: Runs or bundles trained on one dataset.
        data: Prepared dataset; the weights are chosen on its valid split.
        like: Another blend of the same models, whose forms and weights are used.
        metric: PROTOCOL/METRIC that chooses the weights.
        device: Device: auto, cpu, cuda or cuda:N.
        allow_outside: Allow files outside the specification's folder.
        progress: A function that receives stages (stage, done, total), or False for no bar.

    Raises:
        SettingsError: unless exactly one of `data` and `like` is given.
        BundleError: for models that can't be blended.
    """
    from recspec.loading import pick_device
    from recspec.training import blend_runs

    if (data is None) == (like is None):
        raise SettingsError("pipeline blend: give --data DATA to choose weights on its valid, or --like BLEND")
    prepared = opened(data, allow_outside=allow_outside) if data is not None else None
    with stages(progress) as show:
        made = blend_runs(
            Path(out),
            [Path(run) for run in runs],
            spec=None if prepared is None else prepared.spec,
            like=None if like is None else Path(like),
            metric=metric,
            device=pick_device(device),
            progress=show,
        )
    model = BlendedModel(out, device=device, kind=prepared.kind if prepared else "pyarrow", data=prepared)
    model.blended = made
    return model


@verb
def pipeline(
    out: Place,
    *,
    retriever: Place | Sequence[Place] | Mapping[str, Place],
    ranker: Place,
    candidates: int = 500,
    filter: str | None = None,
    device: str = "cpu",
    progress: bool | Stages | None = None,
) -> PipelineModel:
    """Join retrievers, a filter and a ranker into one run.

    Args:
        out: Folder to write.
        retriever: Model that finds candidates, as PATH or NAME=PATH, or several; in Python also a dict.
        ranker: Model that ranks the candidates; lightgbm grows trees over the retrievers' scores.
        candidates: Items that the ranker scores per request.
        filter: Expression that recommended items must satisfy.
        device: Device: auto, cpu, cuda or cuda:N.
        progress: A function that receives stages (stage, done, total), or False for no bar.

    Raises:
        SettingsError: for a number of candidates out of range.
        BundleError: for models that can't be joined.
    """
    from recspec.inference import build_pipeline
    from recspec.loading import pick_device

    if isinstance(retriever, Mapping):
        named = [f"{name}={os.fspath(place)}" for name, place in retriever.items()]
    else:
        named = [os.fspath(each) for each in several(retriever)]
    if isinstance(candidates, bool) or not 1 <= candidates <= 100_000:
        raise SettingsError(f"pipeline: candidates is {candidates!r}; expected a whole number from 1 to 100,000")
    with stages(progress) as show:
        made = build_pipeline(
            Path(out),
            named,
            Path(ranker),
            candidates=candidates,
            filter=filter,
            device=pick_device(device),
            progress=show,
        )
    source = ranker if isinstance(ranker, Model) else None
    model = PipelineModel(
        out, device=device, kind=source.kind if source else "pyarrow", data=source.data if source else None
    )
    model.built = made
    return model
