"""Divided embedding tables beside TorchRec's: milliseconds a step, and whether the losses are the same.

    python benchmarks/sharding.py [--python PYTHON] [--ranks 2] [--width 32] [--sharding table_wise]

Each rank looks up its share of a batch of power-law ids in 26 tables of 100,000 rows, and updates the rows by row-wise
Adagrad; there is nothing but tables, so that nothing else is measured. `--python` is an interpreter that has TorchRec
beside recspec; without TorchRec recspec is measured alone. `by TorchRec` is `train.shard_by=torchrec`. All start from
the same weights and see the same ids, and each takes its turns in one run.

    pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 pyre-extensions typing-inspect mypy-extensions \
        tensordict pyvers orjson cloudpickle torchmetrics lightning-utilities iopath portalocker packaging tqdm
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recspec.base import machine
from recspec.feature_spec import FeatureSpec
from recspec.loading import PlacementSettings, Ranks, build, join, place, torchrec_tables
from recspec.models.layers.embeddings import Embeddings, RowsHeld
from recspec.training.optimizers import Optimizers
from recspec.training.settings import OptimizerSettings

ROOT = Path(__file__).parents[1]
TABLES, ROWS, BATCH = 26, 100_000, 8192
RATE, EPS = 0.02, 1e-8
NAMES = [f"C{number}" for number in range(TABLES)]

Step = Callable[[Tensor], Tensor]
"""Ids of a rank's share of a batch (B, tables) -> its loss; the tables are updated."""


def main() -> None:
    """Start the ranks, print what they took, write JSON."""
    arguments = _arguments()
    if arguments.worker:
        work(arguments)
        return
    command = [
        arguments.python,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        f"{arguments.ranks}",
        "--master-port",
        "0",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        __file__,
        *sys.argv[1:],
        "--worker",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    for name, found in report["results"].items():
        print(
            f"{name:11} {found['median_ms']:8.1f} ms a step (least {found['least_ms']:.1f})  losses {found['losses']}"
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {arguments.out}")


def work(arguments: argparse.Namespace) -> None:
    """What each rank does."""
    machine.keep_freed_memory()
    with join("cpu") as ranks:
        batches = [power_law_ids(seed, ranks) for seed in range(8)]
        weights = 2 * torch.rand(TABLES, arguments.width, generator=torch.Generator().manual_seed(1)) - 1
        contenders = {"recspec": recspec_step(arguments.width, weights, ranks)}
        if importlib.util.find_spec("torchrec") is not None:
            contenders["by TorchRec"] = recspec_step(arguments.width, weights, ranks, shard_cut=arguments.sharding)
            contenders["TorchRec"] = torchrec_step(arguments.width, weights, ranks, arguments.sharding)
        elif ranks.is_first:
            print("TorchRec is not installed; see the head of this file", file=sys.stderr)
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        losses: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(arguments.rounds):
            for name, step in contenders.items():
                for batch in batches:
                    ranks.barrier()
                    started = time.perf_counter()
                    loss = step(batch)
                    seconds[name].append(time.perf_counter() - started)
                    losses[name].append(float(ranks.sum(loss)) / ranks.world_size)
        if ranks.is_first:
            print(json.dumps(_report(arguments, seconds, losses)))


def power_law_ids(seed: int, ranks: Ranks) -> Tensor:
    """A rank's share of a batch (B, tables): the logarithm of an id is uniform."""
    drawn = torch.rand(BATCH, TABLES, generator=torch.Generator().manual_seed(seed))
    return torch.pow(float(ROWS), drawn).long().remainder(ROWS)[ranks.share(BATCH)]


def loss_of(vectors: Tensor, weights: Tensor) -> Tensor:
    """Something that every vector has a part in."""
    return ((vectors * weights.flatten()).sum(1) - 1).square().mean()


def recspec_step(width: int, weights: Tensor, ranks: Ranks, shard_cut: str | None = None) -> Step:
    """A step over tables that recspec divides by its own exchange, or with `shard_cut` by TorchRec."""
    make = partial(tables, width)
    placement = place(make, ranks, PlacementSettings(shard_embeddings="always"), lambda _, width: 4 * width + 4)
    if shard_cut is not None:
        chosen = PlacementSettings.model_validate({"shard_by": "torchrec", "shard_cut": shard_cut})
        placement = torchrec_tables.divide_by_torchrec(placement, ranks, chosen, by_column=False)
    model, shards = build(make, ranks, placement)
    settings = OptimizerSettings(optimizer="rowwise_adagrad", learning_rate=RATE, eps=EPS)
    optimizers = Optimizers(model.named_parameters(), settings)
    if shard_cut is not None:
        updates = {name: optimizers.fused_update(name) for name in placement.by_torchrec}
        shards = torchrec_tables.with_torchrec(shards, model, updates, "fp32")

    def step(ids: Tensor) -> Tensor:
        loss = loss_of(model(dict(zip(NAMES, ids.unbind(1), strict=True))), weights)
        loss.backward()  # type: ignore[no-untyped-call]
        shards.collect()
        shards.deliver(lambda _: True)
        optimizers.step()
        optimizers.zero_grad()
        return loss.detach()

    return step


def tables(width: int, held: RowsHeld | None = None) -> nn.Module:
    """The tables, always with the same first values."""
    features = {name: {"dtype": "int32", "cardinality": ROWS} for name in NAMES}
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {**features, "label": {"dtype": "int8"}},
            "channel_spec": {"context": NAMES, "label": ["label"]},
        }
    )
    torch.manual_seed(0)
    return nn.Sequential(Embeddings(spec, dict.fromkeys(NAMES, width), start="uniform", table_rows=held))


def torchrec_step(width: int, weights: Tensor, ranks: Ranks, sharding: str) -> Step:
    """A step over the same tables divided by TorchRec, updated in the backward pass by FBGEMM."""
    import torch.distributed as dist
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=width, num_embeddings=ROWS, feature_names=[name]) for name in NAMES
    ]
    model = nn.Sequential(EmbeddingBagCollection(device=torch.device("cpu"), tables=configs))
    model.register_parameter("bias", nn.Parameter(torch.zeros(1)))  # its data-parallel part must not be empty
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": RATE, "eps": EPS}
    sharders: Any = [EmbeddingBagCollectionSharder(fused_params=fused)]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=ranks.world_size, compute_device="cpu"),
        constraints={name: ParameterConstraints(sharding_types=[sharding]) for name in NAMES},
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    divided = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    (store,) = tables(width).state_dict().values()
    for name, value in divided.state_dict().items():
        if hasattr(value, "local_shards"):
            table = store[NAMES.index(name.split(".")[-2]) * ROWS :][:ROWS]
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                shard.tensor.detach().copy_(table[row : row + rows, column : column + columns])

    def step(ids: Tensor) -> Tensor:
        lengths = torch.ones(ids.numel(), dtype=torch.int32)
        found = divided(KeyedJaggedTensor.from_lengths_sync(NAMES, ids.t().contiguous().view(-1), lengths))
        vectors = found.wait() if hasattr(found, "wait") else found
        loss = loss_of(vectors.values(), weights[[NAMES.index(name) for name in vectors.keys()]])  # noqa: SIM118
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return step


def _report(
    arguments: argparse.Namespace, seconds: dict[str, list[float]], losses: dict[str, list[float]]
) -> dict[str, Any]:
    results = {
        name: {
            "median_ms": round(1000 * statistics.median(taken[8:]), 1),  # the first round warms up
            "least_ms": round(1000 * min(taken), 1),
            "losses": [round(loss, 5) for loss in losses[name][:5]],
        }
        for name, taken in seconds.items()
    }
    return {
        "what": "a step of divided embedding tables, row-wise Adagrad, no other layer",
        "tables": TABLES,
        "rows": ROWS,
        "width": arguments.width,
        "batch_size": BATCH,
        "ranks": arguments.ranks,
        "sharding": {"recspec": "by memory", "by TorchRec": arguments.sharding, "TorchRec": arguments.sharding},
        "results": results,
        "largest_difference_of_losses": max(
            abs(a - b) for one in losses.values() for a, b in zip(losses["recspec"], one, strict=True)
        ),
        "torch": torch.__version__,
        "machine": machine.describe(),
        "load_average": os.getloadavg()[0],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has recspec and TorchRec")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sharding", default="table_wise", help="TorchRec's: table_wise or column_wise on a CPU")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "sharding.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
