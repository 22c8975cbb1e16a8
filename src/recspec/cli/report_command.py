"""The command that writes reports: report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from recspec.cli.console import err, out
from recspec.machine import keep_freed_memory

RUNS = Argument(
    metavar="RUN...",
    help="Folders of runs or bundles; the others are compared with the first.",
)
OUT = Option("--out", help="HTML file to write; by default RUN/report.html, or comparison.html of several runs.")
DATA = Option(
    "--data",
    help="Dataset of the runs; by default where they say it lies, if it has not changed since.",
)


def report(
    runs: Annotated[list[Path], RUNS],
    out_file: Annotated[Path | None, OUT] = None,
    data: Annotated[Path | None, DATA] = None,
) -> None:
    """Write a report of a run, or a comparison of several, as one HTML file."""
    from recspec import api

    keep_freed_memory()
    made = api.report(runs, out=out_file, data=data)
    if made.why_not_tracked is not None:
        err.print(f"note: {made.why_not_tracked}", soft_wrap=True)
    out.print(str(made.path), soft_wrap=True)
