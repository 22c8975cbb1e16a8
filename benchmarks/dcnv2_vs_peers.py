"""Training speed of DCNv2 beside DeepCTR-Torch's and torch-rechub's: same rows, layers, optimizer, in turns.

    python benchmarks/dcnv2_vs_peers.py [--threads 1] [--rounds 3] [--seconds 10] [--quick]

26 tables of 100,000 rows x 16 and 13 numbers (ids of a power law, made-up rows held in memory), three cross layers with
full matrices (429 x 429), an MLP of 1024-512-256 beside them, Adagrad, batches of 4096. Full matrices, for neither peer
has cross layers of low rank without a mixture of experts.

The clock runs over whole training steps after the first batches: choosing rows at random, forward, backward, optimizer.
Each peer trains by its own `fit` with its own loader, which takes rows one at a time. `helped` is the same `fit` with
what a user could add from outside: a loader that takes a batch's rows at once, torch's setting that sends products
through oneDNN, and Adagrad in one pass (`fused`).

Left out: FuxiCTR's package brings a DCNv2 that reads histories, and no other.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from _side_by_side import (
    Comparison,
    Contender,
    Found,
    Measures,
    Pace,
    compared,
    fit_deepctr,
    fit_rechub,
    found_of_peer,
    parser,
    start,
    time_recspec,
    without_batch_normalisation,
)
from dlrm_vs_peers import clicks_like_criteo
from wide_deep_vs_peers import deepctr_features, read_matrix, write_matrix

WIDTH, CROSSES, TOP = 16, 3, (1024, 512, 256)
RATE, EPS = 0.01, 1e-10
BATCHES = 128
"""Batches of made-up rows an epoch."""

DIFFERENCES = (
    "peers compute in fp32 as torch does by default, helped ones through oneDNN, recspec as its `precision` says",
    "peers update all rows of all tables at every step, recspec those in use: with Adagrad that is the same",
    "DeepCTR-Torch adds a linear part, one weight an id and number, and multiplies each row by the matrix for itself",
    "torch-rechub's MLP is measured without its batch normalisation",
    "recspec's command line tells glibc to keep freed memory; peers run with the allocator as it is",
)


def compare(arguments: argparse.Namespace, scratch: Path) -> Found:
    """All measurements of a run."""
    spec = clicks_like_criteo(scratch / "data", BATCHES * arguments.batch_size)
    rows = write_matrix(spec, scratch / "matrix")
    contenders = {"recspec": Contender("recspec", {"data": str(spec.folder), "precision": arguments.precision})}
    for name, who in (("DeepCTR-Torch", "deepctr"), ("torch-rechub", "rechub")):
        theirs = {"data": str(scratch / "matrix")}
        if not arguments.quick:
            contenders[name] = Contender(who, {**theirs, "helped": False})
        contenders[f"{name}, helped"] = Contender(who, {**theirs, "helped": True})
    table = Comparison(
        Path(__file__),
        "dcnv2",
        "DCNv2",
        contenders,
        same_products=True,
        left_out={"FuxiCTR": "its package brings a DCNv2 that reads histories, and no other"},
    )
    return {
        "what": "DCNv2 training, samples/s over whole steps",
        "sizes": {"width": WIDTH, "cross_layers": CROSSES, "top": TOP},
        "optimizer": {"optimizer": "adagrad", "learning_rate": RATE, "eps": EPS},
        "data": "made up in Criteo's shape, ids of a power law",
        "rows": rows,
        "settings": {"peers' sizes": compared(table, arguments)},
        "differences": DIFFERENCES,
    }


# --- in a process of its own -----------------------------------------------------------------------------------------


def measure_recspec(data: str, *, pace: Pace, precision: str) -> Found:
    """This project, by the steps of its own training run."""
    train = {"optimizer": "adagrad", "learning_rate": RATE, "eps": EPS, "precision": precision}
    sizes = {
        "embedding_dim": WIDTH,
        "bottom": (),
        "cross_layers": CROSSES,
        "cross_rank": 0,
        "top": TOP,
        "structure": "parallel",
    }
    return time_recspec("dcnv2", data, pace, train=train, sizes=sizes)


def measure_deepctr(data: str, *, pace: Pace, helped: bool) -> Found:
    """DeepCTR-Torch's DCN with matrices, by its own `fit`."""
    from deepctr_torch.models import DCN  # type: ignore[import-not-found]

    columns, features, labels = read_matrix(data)
    held = deepctr_features(features, lambda _: WIDTH)
    model = DCN(
        held,
        held,
        cross_num=CROSSES,
        cross_parameterization="matrix",
        dnn_hidden_units=TOP,
        l2_reg_linear=0,
        l2_reg_embedding=0,
        l2_reg_cross=0,
        l2_reg_dnn=0,
    )
    optimizer = _adagrad(model.parameters(), fused=helped)
    return found_of_peer(fit_deepctr(model, optimizer, columns, labels, pace, helped=helped), model)


def measure_rechub(data: str, *, pace: Pace, helped: bool) -> Found:
    """torch-rechub's DCNv2, by its own trainer."""
    os.environ["TQDM_DISABLE"] = "1"
    from torch_rechub.basic.features import DenseFeature, SparseFeature  # type: ignore[import-not-found]
    from torch_rechub.models.ranking import DCNv2  # type: ignore[import-not-found]
    from torch_rechub.utils.data import DataGenerator  # type: ignore[import-not-found]

    columns, features, labels = read_matrix(data)
    held: list[Any] = []
    for feature in features:
        name, ids = feature["name"], feature["ids"]
        held.append(DenseFeature(name) if ids is None else SparseFeature(name, ids, embed_dim=WIDTH))
        columns[name] = columns[name][:, 0] if ids is None else columns[name][:, 0].astype("int32")
    top = {"dims": [*TOP], "activation": "relu"}
    model = DCNv2(held, CROSSES, top, model_structure="parallel", use_low_rank_mixture=False)
    without_batch_normalisation(model)

    def optimizer(parameters: Any) -> Any:
        return _adagrad(parameters, fused=helped)

    _, clock = fit_rechub(model, optimizer, DataGenerator(columns, labels).dataset, pace, helped=helped)
    return found_of_peer(clock, model)


MEASURES: Measures = {"recspec": measure_recspec, "deepctr": measure_deepctr, "rechub": measure_rechub}


def _adagrad(parameters: Any, *, fused: bool) -> Any:
    import torch

    return torch.optim.Adagrad(parameters, lr=RATE, eps=EPS, fused=fused)


def options() -> argparse.ArgumentParser:
    """What the command line takes."""
    return parser(__doc__, __file__, batch_size=4096)


if __name__ == "__main__":
    start(options(), MEASURES, compare)
