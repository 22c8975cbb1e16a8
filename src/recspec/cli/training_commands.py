"""Commands that train: train, tune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from recspec.cli.console import err, print_json, step
from recspec.cli.options import Data, Device, Json, Out, Outside, Set
from recspec.cli.process import is_first
from recspec.cli.training_display import (
    TrainingDisplay,
    print_found,
    print_next_of,
    print_plan,
    print_result,
    show_trial,
)
from recspec.machine import keep_freed_memory

Launcher = Literal["ray"]
LAUNCHER = Option(help="Start the processes by ray, on the workers of a Ray cluster, which is found at RAY_ADDRESS.")


def train(
    model: Annotated[str, Argument(metavar="MODEL", help="Name from `recspec models`.")],
    data: Data,
    run: Annotated[Path, Argument(help="Folder for the run: checkpoints, log and bundle.", metavar="RUN")],
    recipe: Annotated[Path | None, Option(help="Recipe, a YAML file.")] = None,
    settings: Set = None,
    resume: Annotated[bool, Option(help="Continue the run from its newest checkpoint.")] = False,
    force: Annotated[bool, Option(help="Replace the run that the folder holds.")] = False,
    amp: Annotated[bool, Option(help="Use the fastest precision of the device.")] = False,
    verbose: Annotated[bool, Option("--verbose", "-v", help="Show every automatic choice and its reason.")] = False,
    plan: Annotated[
        bool, Option("--plan", help="Show every automatic choice and its reason without training.")
    ] = False,
    json_output: Json = False,
    launcher: Annotated[Launcher | None, LAUNCHER] = None,
    processes: Annotated[int, Option(min=1, help="Number of Ray workers.")] = 1,
    device: Device = "auto",
    allow_outside: Outside = False,
) -> None:
    """Train a model, on one process, on several under torchrun, or on the workers of a Ray cluster."""
    from recspec import api, config

    keep_freed_memory()
    asked: dict[str, Any] = {
        "recipe": recipe, "resume": resume, "force": force, "amp": amp, "device": device,
        "allow_outside": allow_outside, "settings": config.parse_assignments(settings or []),
        "launcher": launcher, "processes": processes,
    }  # fmt: skip
    if plan:
        planned = api.train(model, data, run, plan=True, **asked)
        if is_first():
            print_plan(planned, json_output)
        return
    with TrainingDisplay(run, live=err.is_terminal and is_first(), verbose=verbose) as display:
        trained = api.train(model, data, run, progress=display.show, **asked)
    if is_first() and launcher is not None:
        step(f"{run / 'bundle'}: the bundle; {run / 'log.jsonl'}: the figures")
        print_next_of(run, trained.data, data)
    elif is_first() and (result := trained.result) is not None:
        print_result(result)
        print_next_of(run, trained.data, data)
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
    workers: Annotated[int, Option(min=1, help="Number of processes that run trials at once.")] = 1,
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
    from recspec import api, config

    keep_freed_memory()
    if search:
        err.print("note: --search is now --space; the old name ends with the next release")
    searched = api.tune(
        model, data, out_folder, trials=trials, budget=budget, workers=workers,
        space=[*(space or []), *(search or [])], only=only, like=like, recipe=recipe,
        settings=config.parse_assignments(settings or []), seed=seed, device=device, allow_outside=allow_outside,
        progress=show_trial, tell=step,
    )  # fmt: skip
    found = searched.found
    if json_output:
        print_json(found.to_dict())
    else:
        print_found(found)
    if found.best is not None and not found.left:
        print_next_of(out_folder / "best", searched.data, data)
