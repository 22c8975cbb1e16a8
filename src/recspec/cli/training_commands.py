"""Commands that train, search, update and put models together: train, tune, auto, update, pipeline."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from recspec.base.errors import how_many
from recspec.base.machine import keep_freed_memory
from recspec.cli.console import (
    Data,
    Device,
    Json,
    Out,
    Outside,
    Set,
    cell,
    err,
    out,
    print_json,
    print_next,
    stages,
    step,
    titled_table,
)
from recspec.cli.process import is_first
from recspec.cli.training_display import (
    TrainingDisplay,
    print_found,
    print_next_of,
    print_plan,
    print_result,
    show_trial,
)

if TYPE_CHECKING:
    from recspec.training.search import Leaderboard, State


Launcher = Literal["ray"]
LAUNCHER = Option(help="Start the processes with ray, on the cluster at RAY_ADDRESS.")


def train(
    model: Annotated[str, Argument(metavar="MODEL", help="Name from `recspec models`.")],
    data: Data,
    run: Annotated[Path, Argument(help="Folder for checkpoints, log and bundle.", metavar="RUN")],
    recipe: Annotated[Path | None, Option(help="Recipe: a YAML file, or the name of a published one.")] = None,
    settings: Set = None,
    resume: Annotated[bool, Option(help="Continue the run from its newest checkpoint.")] = False,
    force: Annotated[bool, Option(help="Replace the run in the folder.")] = False,
    verbose: Annotated[bool, Option("--verbose", "-v", help="Show every automatic choice and its reason.")] = False,
    plan: Annotated[bool, Option("--plan", help="Show every automatic choice without training.")] = False,
    json_output: Json = False,
    launcher: Annotated[Launcher | None, LAUNCHER] = None,
    processes: Annotated[int, Option(min=1, help="Number of Ray workers.")] = 1,
    device: Device = "auto",
    allow_outside: Outside = False,
) -> None:
    """Train a model."""
    from recspec import api
    from recspec.base import config

    keep_freed_memory()
    asked: dict[str, Any] = {
        "recipe": recipe,
        "resume": resume,
        "force": force,
        "device": device,
        "allow_outside": allow_outside,
        "settings": config.parse_assignments(settings or []),
        "launcher": launcher,
        "processes": processes,
    }
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


BUDGET = Option(min=0, metavar="MINUTES", help="Minutes of search in this call; the same command continues it.")
SPACE = Option(
    metavar="NAME=VALUES",
    help="Values to search, such as '[16, 32, 64]', '0.0..0.5' or '1e-4..1e-2 log'; repeatable.",
)
LIKE = Option(metavar="SEARCH", help="Earlier search of this model whose best trials are tried first.")


def tune(
    model: Annotated[str, Argument(metavar="MODEL", help="Name from `recspec models`.")],
    data: Data,
    out_folder: Out,
    trials: Annotated[int, Option(min=1, help="Number of trials, including earlier calls.")] = 20,
    budget: Annotated[float | None, BUDGET] = None,
    workers: Annotated[int, Option(min=1, help="Number of processes that run trials.")] = 1,
    space: Annotated[list[str] | None, SPACE] = None,
    only: Annotated[bool, Option("--only", help="Search only the settings of --space.")] = False,
    like: Annotated[list[Path] | None, LIKE] = None,
    recipe: Annotated[Path | None, Option(help="Recipe that trials start from, a YAML file.")] = None,
    settings: Set = None,
    seed: Annotated[int, Option(min=0, help="Random seed.")] = 0,
    json_output: Json = False,
    device: Device = "auto",
    allow_outside: Outside = False,
) -> None:
    """Search for the best settings of a model on valid.

    The best trial becomes a recipe. Settings of --set are not searched, unless --space names them.
    """
    from recspec import api
    from recspec.base import config

    keep_freed_memory()
    searched = api.tune(
        model,
        data,
        out_folder,
        trials=trials,
        budget=budget,
        workers=workers,
        space=space,
        only=only,
        like=like,
        recipe=recipe,
        settings=config.parse_assignments(settings or []),
        seed=seed,
        device=device,
        allow_outside=allow_outside,
        progress=show_trial,
        tell=step,
    )
    found = searched.found
    if json_output:
        print_json(found.to_dict())
    else:
        print_found(found)
    if found.best is not None and not found.left:
        print_next_of(out_folder / "best", searched.data, data)


def update(
    run: Annotated[Path, Argument(help="Folder of a run.", metavar="RUN")],
    new_events: Annotated[Path, Argument(help="Raw events (csv, jsonl or parquet) with the prepared columns.")],
    data: Annotated[Path | None, Option(help="Dataset of the run, if it was moved.")] = None,
    settings: Set = None,
    json_output: Json = False,
    allow_outside: Outside = False,
) -> None:
    """Add new events, users and items to a trained model.

    The new version goes to RUN/updates, where a running server finds it. Settings: epochs, replay, learning_rate.
    """
    from recspec import api
    from recspec.base import config

    keep_freed_memory()
    asked = config.parse_assignments(settings or [])
    with TrainingDisplay(run, live=err.is_terminal, verbose=False) as display:
        updated = api.update(
            run, new_events, data=data, settings=asked, progress=display.show, allow_outside=allow_outside
        )
    found = updated.found
    print_result(found.result)
    counts, seconds = found.counts, found.seconds
    left = f"; left out: {how_many(counts['left_out'], 'row')}" if counts["left_out"] else ""
    err.print(", ".join(how_many(counts[f"{thing}s"], f"new {thing}") for thing in ("event", "user", "item")) + left)
    for note in found.notes:
        err.print(f"note: {note}")
    err.print(
        f"{found.folder}: the new version, in {seconds['all']:.1f} s (data {seconds['data']:.1f}, model "
        f"{seconds['train']:.1f}); {found.bundle_bytes:,} bytes"
    )
    print_next("serve", run)
    if json_output:
        print_json(updated.to_dict())


RUNS = Argument(help="Runs or bundles trained on one dataset.", metavar="RUN...")
DATA = Option("--data", metavar="DATA", help="Prepared dataset; the weights are chosen on its valid split.")
LIKE_BLEND = Option(metavar="BLEND", help="Another blend of the same models, whose weights are used.")


RETRIEVER = Option(
    "--retriever",
    metavar="RUN",
    help="Model that finds candidates, as PATH or NAME=PATH; repeatable.",
)
RANKER = Option("--ranker", metavar="RUN", help="Model that ranks the candidates.")
FILTER = Option("--filter", metavar="EXPR", help="Expression that recommended items must satisfy.")


def blend(
    target: Out,
    runs: Annotated[list[Path], RUNS],
    data: Annotated[Path | None, DATA] = None,
    like: Annotated[Path | None, LIKE_BLEND] = None,
    metric: Annotated[str, Option(help="PROTOCOL/METRIC that chooses the weights.")] = "full/ndcg@10",
    json_output: Json = False,
    device: Device = "cpu",
    allow_outside: Outside = False,
) -> None:
    """Blend models that rank items by a weighted sum of scores."""
    from recspec import api

    keep_freed_memory()
    with stages() as progress:
        model = api.blend(
            target, runs, data, like=like, metric=metric, device=device, allow_outside=allow_outside, progress=progress
        )
    made = model.blended
    if json_output:
        print_json(made.to_dict())
        return
    table = titled_table(f"blend of {len(runs)} models", "run", "model", "alone", "form", "weight")
    for line in made.lines():
        table.add_row(*line)
    out.print(table)
    if made.value is not None:
        best = max(made.alone)
        out.print(
            f"{metric} on valid: {made.value:.4f}, {made.value - best:+.4f} against the best model alone "
            f"({made.users:,} users)"
        )
    out.print(f"wrote {made.bundle}")
    if data is not None:
        print_next_of(target, model.data, data)


def build(
    target: Out,
    retriever: Annotated[list[str], RETRIEVER],
    ranker: Annotated[Path, RANKER],
    candidates: Annotated[int, Option(min=1, max=100_000, help="Items that the ranker scores per request.")] = 500,
    filter_text: Annotated[str | None, FILTER] = None,
    json_output: Json = False,
    device: Device = "cpu",
) -> None:
    """Join retrievers, a filter and a ranker into one run."""
    from recspec import api

    keep_freed_memory()
    with stages() as progress:
        made = api.pipeline(
            target,
            retriever=retriever,
            ranker=ranker,
            candidates=candidates,
            filter=filter_text,
            device=device,
            progress=progress,
        ).built
    if json_output:
        print_json(made.to_dict())
        return
    table = titled_table(
        f"{made.card.candidates:,} candidates, ranked by {made.model}", "retriever", "model", "items", "search"
    )
    for each in made.retrievers:
        table.add_row(each.name, each.model, f"{each.items:,}", each.search)
    out.print(table)
    if made.card.filter is not None:
        out.print(f"the filter keeps {made.kept:,} of {made.items:,} items")
    out.print(f"wrote {made.bundle}")
    print_next("serve", target)


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
"""Figures of a line -> heading."""
USERS = {"valid": "for valid", "valid_error": "for its standard error and the lead", "test": "for test"}
"""Figures that are of users -> their name in a sentence."""


def auto(
    data: Data,
    out_folder: Out,
    minutes: Annotated[float, Option(min=0.05, help="Minutes of search, over all calls.")] = 30.0,
    metric: Annotated[
        str | None, Option(metavar="PROTOCOL/METRIC", help="Metric on valid that decides; by default that of training.")
    ] = None,
    models: Annotated[
        str | None, Option(help="Models to try, separated by commas; by default all that suit DATA.")
    ] = None,
    seed: Annotated[int, Option(min=0, help="Random seed.")] = 0,
    json_output: Json = False,
    device: Device = "auto",
    allow_outside: Outside = False,
) -> None:
    """Train every suitable model and keep the best.

    The winner is chosen on valid and measured once on test.
    """
    from recspec import api

    keep_freed_memory()
    only = None if models is None else [name.strip() for name in models.split(",") if name.strip()]
    with _Display(minutes) as display:
        result = api.auto(
            data,
            out_folder,
            minutes=minutes,
            metric=metric,
            models=only,
            seed=seed,
            device=device,
            allow_outside=allow_outside,
            progress=display,
        )
    board = result.board
    if json_output:
        print_json(board.to_dict())
    else:
        print_board(board)
    print_next_of(board.best, result.model.data, data)


def print_board(board: Leaderboard) -> None:
    """The leaderboard, its verdict, and where the winner lies."""
    from recspec.training.search import main_reason

    table = titled_table(f"{board.metric}, chosen on valid", *COLUMNS.values())
    for line in board.lines:
        table.add_row(*(cell(line[name]) for name in COLUMNS))
    out.print(table)
    if board.users:
        of = {figure: f"{ranked:,} of {known:,}" for figure, (ranked, known) in board.users.items()}
        said = [f"{of[figure]} {what}" for figure, what in USERS.items() if figure in of]
        out.print(f"users ranked: {', '.join(said)}", soft_wrap=True)
    out.print(board.verdict, soft_wrap=True)
    first = board.lines[0]
    if "trained_again_on" in first:
        reached = (
            f": {board.metric} on test {cell(first['again_test'])} +- {cell(first['again_test_error'])}"
            if "again_test" in first
            else ""
        )
        out.print(f"{first['name']} was trained again on train and valid{reached}")
    else:
        out.print(
            f"{first['name']} was not trained again on train and valid: {first['not_trained_again']}", soft_wrap=True
        )
    for warning in board.warnings:
        err.print(f"warning: {warning}", soft_wrap=True)
    for name, why in board.left_out.items():
        err.print(f"left out: {name}: {main_reason(why)}", soft_wrap=True)
    for line in board.lines:
        if "problem" in line:
            err.print(f"not measured: {line['name']}: {main_reason(str(line['problem']))}", soft_wrap=True)
    if board.left_out:
        err.print(f"{board.best.parent / 'leaderboard.json'} holds the whole reasons", soft_wrap=True)
    out.print(f"{board.seconds:,.0f} s, {board.share_of_losers:.0%} of them for models that did not win")
    out.print(
        f"{board.best}: the winner; evaluate, predict, serve and export take it, and recommend if it ranks items",
        soft_wrap=True,
    )


class _Display:
    """What a search shows while it goes: the leaderboard on a terminal, a line for each slice elsewhere."""

    def __init__(self, minutes: float) -> None:
        from rich.live import Live

        self.live = Live(console=err, transient=True, refresh_per_second=2, auto_refresh=err.is_terminal)
        self.until, self.now = time.monotonic() + 60 * minutes, ""
        self.state: State | None = None

    def __enter__(self) -> _Display:
        if err.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if err.is_terminal:
            self.live.stop()

    def tell(self, message: str) -> None:
        """Print what begins, goes on or is left out."""
        err.print(message, soft_wrap=True, highlight=False)

    def show(self, name: str, event: Mapping[str, object]) -> None:
        """Show one event of a candidate's training."""
        if event["event"] == "epoch":
            self.now = f"{name}: epoch {cell(event['epoch'])}, best {cell(event.get('best'))}"
            self._refresh()

    def look(self, state: State, left: float) -> None:
        """Show the candidates after a slice."""
        left = max(0.0, left)
        self.until, self.state = time.monotonic() + left, state
        if err.is_terminal:
            self._refresh()
            return
        line = max(state.lines, key=lambda each: each.began)
        reached = f"{state.deciding} {cell(abs(line.best))}" if line.values else line.failed.partition("\n")[0]
        best = max(state.lines, key=lambda each: each.best)
        err.print(
            f"{line.name}: {line.seconds:.0f} s, {reached}; best so far {best.name}; {left / 60:.1f} minutes left"
        )

    def _refresh(self) -> None:
        if not err.is_terminal:
            return
        left = max(0.0, self.until - time.monotonic()) / 60
        from rich.table import Table

        table = Table("model", "valid", "seconds", "", title=f"{left:.1f} minutes left  {self.now}")
        lines = sorted(self.state.lines if self.state else (), key=lambda each: -each.best)
        for line in lines:
            how = line.failed.partition("\n")[0] or line.ended or ("waits" if line.values else "not begun")
            table.add_row(line.name, cell(abs(line.best)) if line.values else "", f"{line.seconds:.0f}", how)
        self.live.update(table)
