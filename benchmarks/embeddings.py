"""Embedding tables: lookup, backward pass and update, by backend and beside torch's own modules, in turns, in one run.

    python benchmarks/embeddings.py [--rounds 5] [--steps 4] [--threads 1] [--tables 26] [--rows 100000] [--width 128]

A step looks up one id of each table for every row of a batch, takes a given gradient of what comes back, and updates
the tables. All contenders read the same ids and write the same tables. FBGEMM is measured where it is installed
(`pip install 'recspec[fbgemm]'`). Page faults a step tell whether freed memory is kept (recspec.base.machine): without
that every large tensor is mapped and unmapped at every step; `--malloc default` measures what it costs. On one thread
the clock is the processor's time, which other work on the machine lengthens less than the time that passes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from recspec.base import machine
from recspec.feature_spec import FeatureSpec
from recspec.models.layers import kernels
from recspec.models.layers.embeddings import Embeddings
from recspec.training.optimizers import Optimizers
from recspec.training.settings import OptimizerSettings

Step = Callable[[dict[str, Tensor], Tensor], None]
"""One step on a batch of ids and the gradient (B, sum of widths) of what is looked up."""

WARM_UP = 2  # steps of each turn that are not counted
NUM_BATCHES = 4


def main() -> None:
    """Measure everybody in turns, print a table, write JSON."""
    arguments = _arguments()
    kept = machine.keep_freed_memory() if arguments.malloc == "kept" else False
    torch.set_num_threads(arguments.threads)
    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "torch": torch.__version__,
        "settings": {**vars(arguments), "out": None},
        "freed_memory_is_kept": kept,
        "clock": "processor time" if arguments.threads == 1 else "time passed",
        "load": os.getloadavg(),
        "results": {},
    }
    torch.manual_seed(0)
    embeddings = tables(arguments.tables, arguments.rows, arguments.width)
    for distribution in ("uniform", "power law"):
        report["results"][distribution] = measured(embeddings, distribution, arguments)
    report["load_after"] = os.getloadavg()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {arguments.out}")


def tables(num_tables: int, rows: int, width: int) -> Embeddings:
    """The tables, as a model has them."""
    features: dict[str, dict[str, object]] = {
        f"id_{place}": {"dtype": "int64", "cardinality": rows} for place in range(num_tables)
    }
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {**features, "label": {"dtype": "float32"}},
            "channel_spec": {"context": list(features), "label": ["label"]},
        }
    )
    return Embeddings(spec, dict.fromkeys(features, width), start="uniform")


def batches(distribution: str, arguments: argparse.Namespace) -> list[dict[str, Tensor]]:
    """Ids: each as likely as any other, or id k with a probability that falls as 1 / (k + 1)."""

    def draw() -> Tensor:
        if distribution == "uniform":
            return torch.randint(arguments.rows, (arguments.batch_size,))
        spread = torch.rand(arguments.batch_size, dtype=torch.float64)
        return (torch.exp(spread * torch.tensor(float(arguments.rows)).log()).long() - 1).clamp(0, arguments.rows - 1)

    return [{f"id_{place}": draw() for place in range(arguments.tables)} for _ in range(NUM_BATCHES)]


def measured(embeddings: Embeddings, distribution: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a step of every contender."""
    data = batches(distribution, arguments)
    gradient = torch.randn(arguments.batch_size, embeddings.width) * 1e-3
    distinct = statistics.mean(len(torch.unique(ids)) for batch in data for ids in batch.values())
    times: dict[str, list[float]] = {name: [] for name in contenders(embeddings)}
    faults: dict[str, list[int]] = {name: [] for name in times}
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    for _ in range(arguments.rounds):
        for name, make in contenders(embeddings).items():
            step = make()
            for place in range(WARM_UP + arguments.steps):
                before, started = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, clock()
                step(data[place % NUM_BATCHES], gradient)
                seconds = clock() - started
                if place >= WARM_UP:
                    times[name].append(seconds * 1e3)
                    faults[name].append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            del step
            embeddings.zero_grad()
            gc.collect()
    found = {
        name: {
            "median_ms": round(statistics.median(each), 1),
            "least_ms": round(min(each), 1),
            "rows_per_second": round(arguments.batch_size / statistics.median(each) * 1e3),
            "page_faults_a_step": round(statistics.median(faults[name])),
            "all_ms": [round(one, 1) for one in each],
        }
        for name, each in times.items()
    }
    print(f"\n{distribution} ids, {distinct:,.0f} different ones of {arguments.batch_size:,} a table and step")
    print(f"{'':44}{'median ms':>10}{'least':>8}{'ratio':>8}{'faults':>9}")
    base = cast(float, found["recspec torch, row-wise Adagrad"]["median_ms"])
    for name, figures in found.items():
        figures["ratio"] = round(cast(float, figures["median_ms"]) / base, 2)
        print(
            f"{name:44}{figures['median_ms']:>10}{figures['least_ms']:>8}{figures['ratio']:>8}"
            f"{figures['page_faults_a_step']:>9}"
        )
    return {"distinct_ids_a_table": round(distinct), "contenders": found}


# --- contenders ------------------------------------------------------------------------------------------------------


def contenders(embeddings: Embeddings) -> Mapping[str, Callable[[], Step]]:
    """Everybody, by name; each is made anew for a turn, on the same tables."""
    rules = {"row-wise Adagrad": "rowwise_adagrad", "SGD": "sgd", "Adagrad": "adagrad"}
    backends: list[kernels.Backend] = ["torch"]
    if kernels.why_not("fbgemm", torch.device("cpu")) is None:
        backends.append("fbgemm")
    found: dict[str, Callable[[], Step]] = {}
    for backend in backends:
        for title, rule in rules.items():
            found[f"recspec {backend}, {title}"] = _Recspec(embeddings, backend, rule)
    found["recspec torch, lazy Adam"] = _Recspec(embeddings, "torch", "adam")
    found["nn.EmbeddingBag a table + SGD"] = lambda: _modules(embeddings, nn.EmbeddingBag, torch.optim.SGD)
    found["nn.Embedding a table + SGD"] = lambda: _modules(embeddings, nn.Embedding, torch.optim.SGD)
    found["nn.Embedding a table + SparseAdam"] = lambda: _modules(embeddings, nn.Embedding, torch.optim.SparseAdam)
    return found


class _Recspec:
    """Steps of recspec's tables with a backend and an optimizer."""

    def __init__(self, embeddings: Embeddings, backend: kernels.Backend, rule: str) -> None:
        self.embeddings, self.backend, self.rule = embeddings, backend, rule

    def __call__(self) -> Step:
        embeddings = self.embeddings
        settings = OptimizerSettings.model_validate({"optimizer": self.rule, "learning_rate": 0.01})
        optimizers = Optimizers(embeddings.named_parameters(), settings)
        embeddings.backend, embeddings.updates, embeddings.sparse = self.backend, {}, set(embeddings.stores)
        optimizers.use_backend(self.backend)
        if self.backend == "fbgemm":
            embeddings.updates = {key: optimizers.fused_update(f"stores.{key}") for key in embeddings.stores}

        def step(batch: dict[str, Tensor], gradient: Tensor) -> None:
            torch.autograd.backward(embeddings(batch), gradient)
            optimizers.step()
            optimizers.zero_grad()

        return step


def _modules(embeddings: Embeddings, kind: type[nn.Module], optimizer: type[torch.optim.Optimizer]) -> Step:
    """Steps of one module of torch a table, on the same numbers."""
    (store,) = embeddings.stores.values()
    modules = {
        name: cast(Any, kind).from_pretrained(
            store.detach()[first : first + embeddings.num_rows[name]], freeze=False, sparse=True
        )
        for name, first in embeddings.first_row.items()
    }
    updates = optimizer([module.weight for module in modules.values()], lr=0.01)  # type: ignore[call-arg]

    def looked_up(batch: dict[str, Tensor]) -> Iterator[Tensor]:
        for name, module in modules.items():
            ids = batch[name]
            yield module(ids.unsqueeze(1)) if kind is nn.EmbeddingBag else module(ids)

    def step(batch: dict[str, Tensor], gradient: Tensor) -> None:
        torch.autograd.backward(torch.cat(list(looked_up(batch)), dim=1), gradient)
        updates.step()
        updates.zero_grad()

    return step


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a turn")
    parser.add_argument("--malloc", choices=("kept", "default"), default="kept")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "embeddings.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
