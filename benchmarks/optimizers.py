"""A training step of embedding tables: sparse gradients here beside torch's dense and sparse optimizers, in one run.

    python benchmarks/optimizers.py [--dims 16 64] [--rows 100000] [--tables 26] [--batch 8192] [--rounds 7]

Each table looks up one id for each row of the batch, and gets the gradient of that back. Two clocks run: one over the
optimizer's step alone, one over lookup, backward pass and step, since a dense gradient is as large as its table and has
to be made first. The clocks count the processor time of one thread, which other work on the machine disturbs least; of
the rounds the fastest counts. Everybody runs under the allocator settings of recspec's command line.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recspec.base import machine
from recspec.training.optimizers import Optimizers
from recspec.training.settings import OptimizerSettings

RATE = 0.01


class Steps(Protocol):
    """What is measured."""

    def step(self) -> object:
        """Update the tables by their gradients."""


def _here(name: str) -> Callable[[list[nn.Parameter]], Steps]:
    settings = OptimizerSettings.model_validate({"optimizer": name, "learning_rate": RATE})
    return lambda tables: Optimizers([(f"table{number}", table) for number, table in enumerate(tables)], settings)


HERE = ("sgd", "adagrad", "rowwise_adagrad", "rmsprop", "ftrl", "adam")

CONTENDERS: dict[str, tuple[bool, Callable[[list[nn.Parameter]], Steps]]] = {
    **{f"here, sparse: {name}": (True, _here(name)) for name in HERE},
    "torch, sparse: SGD": (True, lambda tables: torch.optim.SGD(tables, RATE)),
    "torch, sparse: Adagrad": (True, lambda tables: torch.optim.Adagrad(tables, RATE)),
    "torch, sparse: SparseAdam": (True, lambda tables: torch.optim.SparseAdam(tables, RATE)),
    "here, dense: rmsprop": (False, _here("rmsprop")),
    "here, dense: ftrl": (False, _here("ftrl")),
    "torch, dense: SGD, fused": (False, lambda tables: torch.optim.SGD(tables, RATE, fused=True)),
    "torch, dense: Adagrad, fused": (False, lambda tables: torch.optim.Adagrad(tables, RATE, fused=True)),
    "torch, dense: RMSprop, foreach": (False, lambda tables: torch.optim.RMSprop(tables, RATE, foreach=True)),
    "torch, dense: Adam, fused": (False, lambda tables: torch.optim.Adam(tables, RATE, fused=True)),
}
"""Whether the gradients are sparse, and the optimizer."""

BESIDE = (
    ("here, sparse: sgd", "torch, dense: SGD, fused"),
    ("here, sparse: adagrad", "torch, dense: Adagrad, fused"),
    ("here, sparse: rowwise_adagrad", "torch, dense: Adagrad, fused"),
    ("here, sparse: rmsprop", "torch, dense: RMSprop, foreach"),
    ("here, sparse: ftrl", "here, dense: ftrl"),
    ("here, sparse: adam", "torch, dense: Adam, fused"),
    ("here, sparse: sgd", "torch, sparse: SGD"),
    ("here, sparse: adagrad", "torch, sparse: Adagrad"),
    ("here, sparse: adam", "torch, sparse: SparseAdam"),
    ("here, dense: rmsprop", "torch, dense: RMSprop, foreach"),
)
"""Who is set beside whom; torch has no FTRL and no row-wise Adagrad."""


def main() -> None:
    """Measure everybody, print tables, write JSON."""
    arguments = _arguments()
    machine.keep_freed_memory()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Sparse invariant checks")  # of torch's own sparse optimizers
    results = []
    for dim in arguments.dims:
        for ids in ("uniform", "power law"):
            figures = measure(arguments, dim, ids)
            results.append({"dim": dim, "ids": ids, **figures})
            _print(dim, ids, figures)
    report = {
        "what": "processor time in ms of one thread, the fastest of the rounds; ratios: times the first is faster",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "torch": torch.__version__,
        **{name: getattr(arguments, name) for name in ("tables", "rows", "batch", "rounds")},
        "results": results,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {arguments.out}")


def measure(arguments: argparse.Namespace, dim: int, ids: str) -> dict[str, Any]:
    """Everybody's step on the same ids."""
    torch.manual_seed(0)
    lookups = [_ids(arguments.rows, arguments.batch, ids) for _ in range(arguments.tables)]
    upstream = torch.randn(arguments.batch, dim)
    milliseconds: dict[str, dict[str, float]] = {}
    for name, (sparse, make) in CONTENDERS.items():
        tables = [nn.Parameter(torch.zeros(arguments.rows, dim)) for _ in lookups]
        steps = make(tables)
        rounds = [_clock(tables, lookups, upstream, sparse, steps) for _ in range(arguments.rounds + 1)][1:]
        alone, whole = (min(times) for times in zip(*rounds, strict=True))
        milliseconds[name] = {"step": round(1e3 * alone, 1), "lookup, backward and step": round(1e3 * whole, 1)}
        del tables, steps
    return {
        "distinct_rows_of_a_table": round(sum(len(torch.unique(each)) for each in lookups) / len(lookups)),
        "milliseconds": milliseconds,
        "ratios": {
            f"{first} / {second}": {
                clock: round(milliseconds[second][clock] / time, 2) for clock, time in milliseconds[first].items()
            }
            for first, second in BESIDE
        },
    }


def _clock(
    tables: list[nn.Parameter], lookups: list[Tensor], upstream: Tensor, sparse: bool, steps: Steps
) -> tuple[float, float]:
    """Seconds of the step alone, and of everything."""
    for table in tables:
        table.grad = None
    started = time.process_time()
    found = [nn.functional.embedding(ids, table, sparse=sparse) for ids, table in zip(lookups, tables, strict=True)]
    torch.autograd.backward(found, [upstream] * len(found))
    between = time.process_time()
    steps.step()
    ended = time.process_time()
    return ended - between, ended - started


def _ids(rows: int, batch: int, kind: str) -> Tensor:
    """Ids in [0, rows). Power law: id i is drawn about as often as i ** -0.8, as popular items are."""
    draws = torch.rand(batch)
    if kind == "power law":
        draws = draws.pow(5)
    return (draws * rows).long().clamp_(max=rows - 1)


def _print(dim: int, ids: str, figures: dict[str, Any]) -> None:
    print(f"\ndim {dim}, {ids} ids, {figures['distinct_rows_of_a_table']} distinct rows a table: ms step, whole")
    for name, times in figures["milliseconds"].items():
        print(f"  {name:<64}" + "".join(f"{time:9.1f}" for time in times.values()))
    print("  times faster")
    for name, ratios in figures["ratios"].items():
        print(f"  {name:<64}" + "".join(f"{ratio:9.2f}" for ratio in ratios.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=100_000, help="of a table")
    parser.add_argument("--batch", type=int, default=8192, help="rows of a batch; ids a table gets in a step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "optimizers.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
