"""Commands that put trained models together: `recspec pipeline`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from recspec.cli.console import out, print_json, print_next, stages, titled_table
from recspec.cli.options import Device, Json, Out, Outside
from recspec.cli.training_display import print_next_of
from recspec.machine import keep_freed_memory

RUNS = Argument(help="Runs or bundles of models trained on the same dataset.", metavar="RUN...")
DATA = Option("--data", metavar="DATA", help="Prepared dataset, whose split valid chooses the weights.")
LIKE = Option(metavar="BLEND", help="Another blend of the same models: take its forms and weights, and choose nothing.")


RETRIEVER = Option("--retriever", metavar="RUN", help="Run or bundle of a model that finds candidates, as PATH or "
                   "NAME=PATH; repeatable.")  # fmt: skip
RANKER = Option("--ranker", metavar="RUN", help="Run or bundle of the model that ranks the candidates.")
FILTER = Option("--filter", metavar="EXPR", help="Expression over columns of the item catalogue; other items are never "
                "recommended.")  # fmt: skip


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
    from recspec import api

    keep_freed_memory()
    with stages() as progress:
        model = api.blend(target, runs, data, like=like, metric=metric, device=device, allow_outside=allow_outside,
                          progress=progress)  # fmt: skip
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
        out.print(f"{metric} on valid: {made.value:.4f}, {made.value - best:+.4f} against the best model alone "
                  f"({made.users:,} users)")  # fmt: skip
    out.print(f"wrote {made.bundle}")
    if data is not None:
        print_next_of(target, model.data, data)


def build(
    target: Out,
    retriever: Annotated[list[str], RETRIEVER],
    ranker: Annotated[Path, RANKER],
    candidates: Annotated[int, Option(min=1, max=100_000, help="Items that the ranker scores for a request.")] = 500,
    filter_text: Annotated[str | None, FILTER] = None,
    json_output: Json = False,
    device: Device = "cpu",
) -> None:
    """Join retrievers and a ranker: one run that finds candidates among all items, filters them and ranks them."""
    from recspec import api

    keep_freed_memory()
    with stages() as progress:
        made = api.pipeline(target, retriever=retriever, ranker=ranker, candidates=candidates, filter=filter_text,
                            device=device, progress=progress).built  # fmt: skip
    if json_output:
        print_json(made.to_dict())
        return
    table = titled_table(f"{made.card.candidates:,} candidates, ranked by {made.model}", "retriever", "model", "items",
                         "search")  # fmt: skip
    for each in made.retrievers:
        table.add_row(each.name, each.model, f"{each.items:,}", each.search)
    out.print(table)
    if made.card.filter is not None:
        out.print(f"the filter keeps {made.kept:,} of {made.items:,} items")
    out.print(f"wrote {made.bundle}")
    print_next("serve", target)
