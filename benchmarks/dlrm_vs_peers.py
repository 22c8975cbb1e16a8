"""Training speed of DLRM at its published sizes beside TorchRec's: same rows, layers, optimizers, in turns.

    python benchmarks/dlrm_vs_peers.py [--threads 1] [--rounds 3] [--seconds 10] [--quick]

26 tables of 100,000 rows x 128, a bottom MLP of 512-256-128, a top MLP of 1024-1024-512-256-1, batches of 8192 made-up
rows held in memory: ids of a power law, 13 numbers. Tables are updated by row-wise Adagrad, layers by Adagrad.

TorchRec's `DLRM` is the one that a package of PyPI brings. It has no loader and no loop for data in memory, so it is
given batches taken at once from a matrix, the way its own loader of Criteo makes them, and torch's plainest loop. Its
tables are fused with their optimizer (`FusedEmbeddingBagCollection`, FBGEMM's kernels), which is the fastest it can do
on a CPU. `helped` is the same with what a user could add from outside: products through oneDNN, in bf16 where the CPU
is faster with it, and a malloc that keeps freed memory. Peers left out: DeepCTR-Torch and torch-rechub have no
DLRM, and FuxiCTR's package comes without its models.

`recspec, fp32` computes as torch does by default: the same products as the peer as it comes. `recspec, fbgemm` looks up
and updates tables by FBGEMM's kernels, as TorchRec does; it is measured where this interpreter has them. The clock runs
over whole training steps after the first batches: choosing rows at random, forward, backward, optimizers.

`of matrix rate` is the arithmetic of all matrix products (as recspec's step does them) over what plain matrix products
reach, as recspec's process measured it in the same round: the machine's own limit for everybody.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from _side_by_side import (
    Clock,
    Comparison,
    Contender,
    Found,
    Measures,
    Pace,
    compared,
    found_of_peer,
    help_peer,
    parser,
    start,
    time_recspec,
)

TABLES, NUM_IDS, WIDTH, NUMBERS = 26, 100_000, 128, 13
BOTTOM, TOP = (512, 256, 128), (1024, 1024, 512, 256)
"""The sizes published for Criteo Terabyte; the top MLP ends in one unit more, the logit."""

BATCHES = 64
"""Batches of made-up rows an epoch."""

RATE, EPS = 0.005, 1e-8
"""Learning rate and eps of both optimizers, for everybody."""

DIFFERENCES = (
    "the peer computes in fp32 as torch does by default, helped in bf16 or through oneDNN, recspec as `precision` says",
    "rows reach recspec through its own loader, TorchRec as one indexing of a matrix a batch",
    "recspec's command line tells glibc to keep freed memory; TorchRec runs with the allocator as it is unless helped",
)


def compare(arguments: argparse.Namespace, scratch: Path) -> Found:
    """All measurements of a run."""
    spec = clicks_like_criteo(scratch / "data", BATCHES * arguments.batch_size)
    rows = write_matrix(spec, scratch / "matrix")

    def ours(precision: str, backend: str) -> Contender:
        return Contender("recspec", {"data": str(spec.folder), "precision": precision, "backend": backend})

    contenders = {"recspec": ours(arguments.precision, "auto")}
    if importlib.util.find_spec("fbgemm_gpu") and not arguments.quick:
        contenders["recspec, fbgemm"] = ours(arguments.precision, "fbgemm")
    if not arguments.quick:
        contenders["recspec, fp32"] = ours("fp32", "auto")
    for name, helped in (("TorchRec", False), ("TorchRec, helped", True)):
        contenders[name] = Contender("torchrec", {"data": str(scratch / "matrix"), "helped": helped})
    table = Comparison(Path(__file__), "dlrm", "DLRM", contenders, same_products=True)
    return {
        "what": "DLRM training, samples/s over whole steps",
        "sizes": {"tables": TABLES, "rows": NUM_IDS, "width": WIDTH, "numbers": NUMBERS, "bottom": BOTTOM, "top": TOP},
        "optimizer": {"tables": "rowwise_adagrad", "layers": "adagrad", "learning_rate": RATE, "eps": EPS},
        "data": "made up in Criteo's shape, ids of a power law",
        "rows": rows,
        "settings": {"published": compared(table, arguments)},
        "differences": DIFFERENCES,
    }


def clicks_like_criteo(folder: Path, rows: int) -> Any:
    """Made-up clicks with as many features as Criteo's, ids of the power law that DLRM's made-up ids follow."""
    from recspec.data.storage import synthesize
    from recspec.feature_spec import FeatureSpec

    ids, numbers = features_like_criteo()
    features: dict[str, dict[str, object]] = {
        **{name: {"dtype": "int32", "cardinality": NUM_IDS} for name in ids},
        **{name: {"dtype": "float32"} for name in numbers},
        "label": {"dtype": "int8"},
    }
    shape = FeatureSpec.from_dict(
        {
            "feature_spec": features,
            "source_spec": {"train": [{"type": "parquet", "features": list(features), "files": ["train.parquet"]}]},
            "channel_spec": {"context": [*ids, *numbers], "label": ["label"]},
        }
    )
    return synthesize(shape, folder, rows, distribution="power_law")


def write_matrix(spec: Any, folder: Path) -> int:
    """The training split as a matrix of ids (int32), one of numbers and the labels (float32); gives its rows."""
    import numpy as np

    from recspec.data.storage import open_split

    folder.mkdir()
    ids, numbers = features_like_criteo()
    parts: dict[str, list[Any]] = {"ids": [], "numbers": [], "labels": []}
    for columns in open_split(spec, "train", (*ids, *numbers, "label")).batches():
        for part, names, dtype in (
            ("ids", ids, np.int32),
            ("numbers", numbers, np.float32),
            ("labels", ("label",), np.float32),
        ):
            parts[part].append(np.stack([np.asarray(columns[name], dtype=dtype) for name in names], axis=1))
    for part, blocks in parts.items():
        np.save(folder / f"{part}.npy", np.concatenate(blocks))
    return sum(len(block) for block in parts["labels"])


def features_like_criteo() -> tuple[list[str], list[str]]:
    """Names of the categorical and of the numerical features."""
    return [f"id_{place}" for place in range(TABLES)], [f"number_{place}" for place in range(NUMBERS)]


# --- in a process of its own -----------------------------------------------------------------------------------------


def measure_recspec(data: str, *, pace: Pace, precision: str, backend: str) -> Found:
    """This project, by the steps of its own training run."""
    train = {
        "optimizer": "adagrad",
        "learning_rate": RATE,
        "eps": EPS,
        "parts": {"embeddings": {"optimizer": "rowwise_adagrad"}},
        "precision": precision,
        "embedding_backend": backend,
    }
    sizes = {"embedding_dim": WIDTH, "bottom": BOTTOM, "top": TOP}
    return time_recspec("dlrm", data, pace, train=train, sizes=sizes)


def measure_torchrec(data: str, *, pace: Pace, helped: bool) -> Found:
    """TorchRec's DLRM, its tables fused with their optimizer."""
    import ctypes
    from contextlib import nullcontext

    import numpy as np
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.models.dlrm import DLRM
    from torchrec.modules.fused_embedding_modules import fuse_embedding_optimizer
    from torchrec.optim import RowWiseAdagrad

    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    # Intel's instructions for bf16 without AMX are slower than those for fp32 (docs/decisions.md).
    bf16 = helped and ("amx_bf16" in cpu or ("avx512_bf16" in cpu and "AuthenticAMD" in cpu))
    if helped:
        help_peer()
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # no blocks mapped one by one
        mallopt(-1, -1)  # nothing handed back
    ids, numbers, labels = (torch.from_numpy(np.load(Path(data) / f"{n}.npy")) for n in ("ids", "numbers", "labels"))
    names, _ = features_like_criteo()
    tables = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=WIDTH,
            num_embeddings=NUM_IDS,
            feature_names=[name],
            init_fn=lambda weight: torch.nn.init.uniform_(weight, -(NUM_IDS**-0.5), NUM_IDS**-0.5),
        )
        for name in names
    ]
    model = DLRM(EmbeddingBagCollection(tables=tables, device=torch.device("meta")), NUMBERS, [*BOTTOM], [*TOP, 1])
    arch = model.sparse_arch
    arch.embedding_bag_collection = fuse_embedding_optimizer(
        arch.embedding_bag_collection, RowWiseAdagrad, {"lr": RATE, "eps": EPS}, torch.device("cpu")
    )
    dense = [parameter for name, parameter in model.named_parameters() if not name.startswith("sparse_arch")]
    optimizer = torch.optim.Adagrad(dense, lr=RATE, eps=EPS)
    lengths = torch.ones(TABLES * pace.batch_size, dtype=torch.int32)
    offsets = torch.arange(TABLES * pace.batch_size + 1, dtype=torch.int32)
    clock = Clock(pace)
    while not clock.is_over:
        for rows in torch.randperm(len(ids)).split(pace.batch_size):  # type: ignore[no-untyped-call]
            jagged = KeyedJaggedTensor(
                names,
                ids.index_select(0, rows).t().reshape(-1),
                lengths=lengths,
                offsets=offsets,
                stride=pace.batch_size,
            )
            with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
                logits = model(numbers.index_select(0, rows), jagged).squeeze(1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                logits.float(), labels.index_select(0, rows).squeeze(1)
            )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if clock.tick((clock.batches + 1) * pace.batch_size):
                break
    return {**found_of_peer(clock, model), "precision": "bf16" if bf16 else "fp32", "loss": float(loss)}


MEASURES: Measures = {"recspec": measure_recspec, "torchrec": measure_torchrec}


def options() -> argparse.ArgumentParser:
    """What the command line takes."""
    return parser(__doc__, __file__, batch_size=8192)


if __name__ == "__main__":
    start(options(), MEASURES, compare)
