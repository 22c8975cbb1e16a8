"""Commands that train: train, tune."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from recspec import config
from recspec.cli.console import err, print_json, step
from recspec.cli.options import Data, Device, Json, Out, Outside, Set
from recspec.cli.process import keep_to_cores, settings_of, stop_on_signal, told_once
from recspec.cli.training_display import (
    TrainingDisplay,
    print_found,
    print_next_of,
    print_plan,
    print_result,
    show_trial,
)
from recspec.errors import SettingsError
from recspec.machine import keep_freed_memory
from recspec.spec import FeatureSpec


def train(
    model: Annotated[str, Argument(metavar="MODEL", help="Name from `recspec models`.")],
    data: Data,
    run: Annotated[Path, Argument(help="Folder for the run: checkpoints, log and bundle.", metavar="RUN")],
    recipe: Annotated[Path | None, Option(help="Recipe, a YAML file.")] = None,
    settings: Set = None,
    resume: Annotated[bool, Option(help="Continue the run from its newest checkpoint.")] = False,
    amp: Annotated[bool, Option(help="Use the fastest precision of the device.")] = False,
    verbose: Annotated[bool, Option("--verbose", "-v", help="Show every automatic choice and its reason.")] = False,
    plan: Annotated[
        bool, Option("--plan", help="Show every automatic choice and its reason without training.")
    ] = False,
    json_output: Json = False,
    device: Device = "auto",
    allow_outside: Outside = False,
) -> None:
    """Train a model, on one process or on several under torchrun."""
    from recspec.distributed import join
    from recspec.training import plan_run
    from recspec.training import train as run_training

    keep_freed_memory()
    with told_once():
        spec = FeatureSpec.load(data, allow_outside=allow_outside)
        model_settings, train_settings = settings_of(model, recipe, settings or [], amp=amp)
        if train_settings.epochs == 0:
            what = "which trains nothing and leaves a run to continue"
            raise SettingsError(f"train.epochs is 0, {what}; ask for 1 or more")
    keep_to_cores(train_settings.affinity)
    with join(device) as ranks, stop_on_signal() as stop_requested:
        if plan:
            planned = plan_run(model, spec, run, train_settings, model_settings, ranks, resume=resume)
            if ranks.is_first:
                print_plan(planned, json_output)
            return
        with TrainingDisplay(run, live=err.is_terminal and ranks.is_first, verbose=verbose) as display:
            result = run_training(model, spec, run, settings=train_settings, model_settings=model_settings,
                                  ranks=ranks, resume=resume, baselines=True, on_event=display.show,
                                  stop_requested=stop_requested)  # fmt: skip
        if ranks.is_first:
            print_result(result)
            print_next_of(run, data, allow_outside=allow_outside)
            if json_output:
                print_json(result.to_dict())


BUDGET = Option(min=0, metavar="MINUTES", help="Minutes before the search stops; the same command continues it.")
SPACE = Option(metavar="NAME=VALUES", help="Values to search, beside or instead of those of the model's own space: "
               "'[16, 32, 64]', '0.0..0.5', '1e-4..1e-2 log', '0 or 1e-6..1e-2 log', or 'x0.1..x10 log' around the "
               "default.")  # fmt: skip
LIKE = Option(metavar="SEARCH", help="Folder of an earlier search of this model; its best trials are tried early.")


def tune(
    model: Annotated[str, Argument(metavar="MODEL", help="Name from `recspec models`.")],
    data: Data,
    out_folder: Out,
    trials: Annotated[int, Option(min=1, help="Total number of trials, including earlier calls.")] = 20,
    budget: Annotated[float | None, BUDGET] = None,
    space: Annotated[list[str] | None, SPACE] = None,
    search: Annotated[list[str] | None, Option(hidden=True, help="The former name of --space.")] = None,
    only: Annotated[bool, Option("--only", help="Search only the settings of --space.")] = False,
    like: Annotated[list[Path] | None, LIKE] = None,
    recipe: Annotated[Path | None, Option(help="Recipe that every trial starts from, a YAML file.")] = None,
    settings: Set = None,
    seed: Annotated[int, Option(min=0, help="Random seed.")] = 0,
    json_output: Json = False,
    device: Device = "auto",
    allow_outside: Outside = False,
) -> None:
    """Search for settings on valid; stop hopeless trials early and write the best one as a recipe.

    Settings that --set gives are not searched, unless --space names them.
    """
    from recspec.distributed import join
    from recspec.training import Tuning, describe, parse_space, sections_of

    keep_freed_memory()
    spec = FeatureSpec.load(data, allow_outside=allow_outside)
    model_settings, train_settings = settings_of(model, recipe, settings or [], amp=False)
    values = {
        "settings": model_settings.model_dump(mode="json", exclude_unset=True),
        "train": train_settings.model_dump(mode="json", exclude_unset=True),
    }
    sections = sections_of(model)
    if search:
        err.print("note: --search is now --space; the old name ends with the next release")
    asked = parse_space(config.parse_assignments([*(space or []), *(search or [])]), sections)
    given = config.assign(config.parse_assignments(settings or []), sections)
    with join(device) as ranks, stop_on_signal() as stop_requested:
        if ranks.world_size > 1:
            raise SettingsError("tune: one process a search; start it without torchrun")
        tuning = Tuning(
            model, spec, out_folder, values, asked, trials, only=only,
            fixed=[f"{section}.{name}" for section, named in given.items() for name in _names(named)],
            like=like or (), minutes=budget, seed=seed, ranks=ranks, on_event=show_trial,
            stop_requested=stop_requested,
        )  # fmt: skip
        step(f"searching {describe(tuning.space)}")
        found = tuning.run()
    if json_output:
        print_json(found.to_dict())
    else:
        print_found(found)
    if found.best is not None and not found.left:
        print_next_of(out_folder / "best", data, allow_outside=allow_outside)


def _names(values: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Dotted names of settings; those of a table's entries too, as `parts.embeddings.weight_decay`."""
    for name, value in values.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{name}.")
