"""Commands that put trained models together: `recspec pipeline`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from recspec.cli.console import out, print_json, stages, titled_table
from recspec.cli.options import Device, Json, Out, Outside
from recspec.errors import SettingsError
from recspec.machine import keep_freed_memory
from recspec.spec import FeatureSpec

RUNS = Argument(help="Runs or bundles of models trained on the same dataset.", metavar="RUN...")
DATA = Option("--data", metavar="DATA", help="Prepared dataset, whose split valid chooses the weights.")
LIKE = Option(metavar="BLEND", help="Another blend of the same models: take its forms and weights, and choose nothing.")


def blend(
    target: Out,
    runs: Annotated[list[Path], RUNS],
    data: Annotated[Path | None, DATA] = None,
    like: Annotated[Path | None, LIKE] = None,
    metric: Annotated[str, Option(help="PROTOCOL/METRIC that chooses the weights.")] = "full/ndcg@10",
    json_output: Json = False,
    device: Device = "cpu",
    allow_outside: Outside = False,
) -> None:
    """Blend models that rank items: a bundle of the weighted sum of their scores, with weights chosen on valid."""
    from recspec.distributed import pick_device
    from recspec.training import blend_runs

    keep_freed_memory()
    if (data is None) == (like is None):
        raise SettingsError("pipeline blend: give --data DATA to choose weights on its valid, or --like BLEND")
    spec = FeatureSpec.load(data, allow_outside=allow_outside) if data is not None else None
    with stages() as progress:
        made = blend_runs(target, runs, spec=spec, like=like, metric=metric, device=pick_device(device),
                          progress=progress)  # fmt: skip
    if json_output:
        print_json(made.to_dict())
        return
    table = titled_table(f"blend of {len(runs)} models", "run", "model", "alone", "form", "weight")
    for line in made.lines():
        table.add_row(*line)
    out.print(table)
    if made.value is not None:
        best = max(made.alone)
        out.print(f"{metric} on valid: {made.value:.4f}, {made.value - best:+.4f} against the best model alone "
                  f"({made.users:,} users)")  # fmt: skip
    out.print(f"wrote {made.bundle}")
