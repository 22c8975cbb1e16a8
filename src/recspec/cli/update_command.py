"""The command that takes new events into a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from recspec.cli.console import err, print_json, print_next
from recspec.cli.options import Json, Outside, Set
from recspec.cli.training_display import TrainingDisplay, print_result
from recspec.errors import how_many
from recspec.machine import keep_freed_memory


def update(
    run: Annotated[Path, Argument(help="Folder of a run.", metavar="RUN")],
    new_events: Annotated[
        Path, Argument(help="Raw events: CSV, JSON lines or Parquet, with the columns that were prepared.")
    ],
    data: Annotated[
        Path | None, Option(help="Dataset that the run was trained on; by default where the run says.")
    ] = None,
    settings: Set = None,
    json_output: Json = False,
    allow_outside: Outside = False,
) -> None:
    """Take new events, users and items into a trained model without training it anew.

    The new version lies in RUN/updates; a running server takes it by itself. Settings: epochs, replay, learning_rate.
    """
    from recspec import api, config

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
    err.print(f"{found.folder}: the new version, in {seconds['all']:.1f} s (data {seconds['data']:.1f}, model "
              f"{seconds['train']:.1f}); delta {found.delta_bytes:,} bytes, bundle {found.bundle_bytes:,}")  # fmt: skip
    print_next("serve", run)
    if json_output:
        print_json(updated.to_dict())
