"""Commands that list runs and write reports: runs, report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Column
from typer import Argument, Option

from recspec.base.machine import keep_freed_memory
from recspec.cli.console import Json, cell, err, out, print_json, titled_table

if TYPE_CHECKING:
    from recspec.evaluation import FoundRun, RunList


RUNS = Argument(
    metavar="RUN...",
    help="Runs or bundles; the others are compared with the first.",
)
OUT = Option("--out", help="HTML file; by default RUN/report.html, or comparison.html.")
DATA = Option(
    "--data",
    help="Dataset of the runs, if it was moved.",
)


def report(
    runs: Annotated[list[Path], RUNS],
    out_file: Annotated[Path | None, OUT] = None,
    data: Annotated[Path | None, DATA] = None,
) -> None:
    """Write an HTML report of a run, or a comparison of several."""
    from recspec import api

    keep_freed_memory()
    made = api.report(runs, out=out_file, data=data)
    if made.why_not_tracked is not None:
        err.print(f"note: {made.why_not_tracked}", soft_wrap=True)
    out.print(str(made.path), soft_wrap=True)


COLUMNS = ("run", "data", "model", "metric", "valid", "test", "made (UTC)", "seconds", "MB")
NUMBERS = ("valid", "test", "seconds", "MB")
SORT = Option(metavar="NAME", help="Order: time, seconds, size, model, data, run or PROTOCOL/METRIC.")


def runs(
    folder: Annotated[Path, Argument(help="Folder to search for runs and bundles.", metavar="FOLDER")] = Path(),
    sort: Annotated[str, SORT] = "time",
    split: Annotated[str, Option(help="Split of the metric that sorts.")] = "test",
    depth: Annotated[int, Option(min=0, max=32, metavar="N", help="Number of folder levels to search.")] = 6,
    json_output: Json = False,
) -> None:
    """List the runs in a folder: data, model, metric, time and size."""
    from recspec import api

    found = api.runs(folder, sort=sort, split=split, depth=depth).found
    if json_output:
        print_json(found.to_dict())
    else:
        print_runs(found, sort if "/" in sort else "", split)


def print_runs(found: RunList, metric: str = "", split: str = "test") -> None:
    """A line for each run, with `metric` or its own; then what is unknown, and why."""
    if found.runs:
        other = () if split in ("valid", "test") else (split,)
        names = [*COLUMNS[:6], *other, *COLUMNS[6:]]
        columns = (Column(name, justify="right" if name in (*NUMBERS, *other) else "left") for name in names)
        count = f"{len(found.runs):,} {'run' if len(found.runs) == 1 else 'runs'}"
        table = titled_table(f"{count} in {found.folder}", *columns)
        for each in found.runs:
            table.add_row(*_cells(each, metric, ("valid", "test", *other)))
        out.print(table)
    else:
        out.print(f"no run in {found.folder}")
    for each in found.runs:
        for name, choices in each.choices.items():
            err.print(f"* {each.path}: on {name} with {choices}", soft_wrap=True)
    for each in found.runs:
        if each.updates:
            told = f"{each.updates:,} {'update' if each.updates == 1 else 'updates'} since; the newest answers"
            err.print(f"* {each.path}: {told}", soft_wrap=True)
        if each.problem:
            err.print(f"note: {each.path}: {each.problem}", soft_wrap=True)
    for problem in found.problems:
        err.print(f"note: {problem}", soft_wrap=True)


def _cells(run: FoundRun, metric: str, splits: tuple[str, ...]) -> list[str]:
    values = []
    for split in splits:
        value = run.value(split, metric)
        values.append("" if value is None else f"{value:.4f}{' *' if run.choices.get(split) else ''}")
    size = "" if run.megabytes is None else cell(run.megabytes)
    seconds = "" if run.seconds is None else cell(round(run.seconds, 1))
    return [run.path, run.data_shown, run.model, metric or run.metric, *values, run.made, seconds, size]
