"""Training speed of NeuMF beside RecBole's: same rows, sizes, batch and threads, in turns, in one run.

    python benchmarks/neumf_vs_peers.py [--data PREPARED] [--threads 1] [--rounds 3] [--seconds 10] [--quick]

A sample is a row that the model trains on, drawn negatives included. The clock runs over everything a training step
takes (choosing rows, drawing negatives, forward, backward, optimizer) after the first batches; set-up is left out.
RecBole needs older libraries, so it runs in an environment of its own, made once in `--environments`.

Each measurement is a process of its own that this file starts with `--measure`: on that side it imports nothing of
recspec but what it measures, and under RecBole's interpreter nothing of recspec at all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
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
    parser,
    start,
    time_recspec,
)

SIZES: dict[str, Any] = {"factors": 64, "layers": [256, 256, 128, 64], "dropout": 0.5, "negatives": 4}
"""The published sizes (He et al. 2017 in the form published for MovieLens 20M)."""

LEARNING_RATE = 0.0045

DIFFERENCES = (
    "recspec drops units after every hidden ReLU (448 a sample), RecBole at the input of every linear layer (640)",
    "RecBole draws a negative anew when the user acted on it; recspec does not unless asked, and is measured both ways",
    "recspec's command line tells glibc to keep freed memory; RecBole runs with the allocator as it is",
)


def compare(arguments: argparse.Namespace, scratch: Path) -> Found:
    """All measurements of a run."""
    from recspec.bench.speed import interactions_like_ml_1m
    from recspec.feature_spec import FeatureSpec

    spec = FeatureSpec.load(arguments.data) if arguments.data else interactions_like_ml_1m(scratch / "data")
    rows = write_atomic_file(spec, scratch / "atomic")
    ours = {"data": str(spec.folder.resolve()), "precision": arguments.precision}
    contenders = {
        "recspec": Contender("recspec", {**ours, "reject": False}),
        "recspec, rejecting": Contender("recspec", {**ours, "reject": True}),
        "RecBole": Contender("recbole", {"data": str(scratch / "atomic")}),
    }
    if arguments.quick:
        del contenders["recspec, rejecting"]
    return {
        "what": "NeuMF training, samples/s with drawn negatives included",
        "sizes": SIZES,
        "data": spec.metadata.get("dataset", "made up in ml-1m's shape"),
        "rows": rows,
        "settings": {"published": compared(Comparison(Path(__file__), "neumf", "NeuMF", contenders), arguments)},
        "differences": DIFFERENCES,
    }


def write_atomic_file(spec: Any, folder: Path) -> int:
    """The training split as RecBole reads it: `ncf/ncf.inter`; gives its rows."""
    import numpy as np

    from recspec.data.storage import open_split

    (folder / "ncf").mkdir(parents=True)
    rows = 0
    with (folder / "ncf" / "ncf.inter").open("w", encoding="ascii") as file:
        file.write("user_id:token\titem_id:token\n")
        for columns in open_split(spec, "train", [spec.user_id, spec.item_id]).batches():
            pairs = np.stack([np.asarray(columns[name]) for name in (spec.user_id, spec.item_id)], axis=1)
            np.savetxt(file, pairs, fmt="%d", delimiter="\t")
            rows += len(pairs)
    return rows


# --- in a process of its own -----------------------------------------------------------------------------------------


def measure_recspec(data: str, *, pace: Pace, precision: str, reject: bool) -> Found:
    """This project, by the steps of its own training run."""
    train = {
        "negatives": SIZES["negatives"],
        "reject_positives": reject,
        "learning_rate": LEARNING_RATE,
        "precision": precision,
    }
    sizes = {name: SIZES[name] for name in ("factors", "layers", "dropout")}
    return time_recspec("neumf", data, pace, train=train, sizes=sizes)


def measure_recbole(data: str, *, pace: Pace) -> Found:
    """RecBole, by its own trainer's epoch over its own loader, which is stopped when the time is over."""
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.model.general_recommender import NeuMF
    from recbole.trainer import Trainer
    from recbole.utils import init_seed

    settings = {
        "data_path": data,
        "use_gpu": False,
        "state": "ERROR",
        "show_progress": False,
        "load_col": {"inter": ["user_id", "item_id"]},
        "mf_embedding_size": SIZES["factors"],
        "mlp_embedding_size": SIZES["layers"][0] // 2,
        "mlp_hidden_size": SIZES["layers"][1:],
        "dropout_prob": SIZES["dropout"],
        "train_batch_size": pace.batch_size,  # RecBole too counts negatives in it
        "learner": "adam",
        "learning_rate": LEARNING_RATE,
        "train_neg_sample_args": {
            "distribution": "uniform",
            "sample_num": SIZES["negatives"],
            "alpha": 1.0,
            "dynamic": False,
            "candidate_num": 0,
        },
        "eval_args": {"split": {"RS": [1.0, 0.0, 0.0]}, "group_by": "user", "order": "RO", "mode": "full"},
    }
    arguments, sys.argv = sys.argv, sys.argv[:1]  # RecBole reads the command line of whoever imports it
    config = Config(model="NeuMF", dataset="ncf", config_dict=settings)
    sys.argv = arguments
    init_seed(0, True)
    train_data, _, _ = data_preparation(config, create_dataset(config))
    model = NeuMF(config, train_data.dataset)
    clock = Clock(pace)

    class UntilTimeIsOver:
        """RecBole's loader, with the clock between its batches."""

        def __getattr__(self, name: str) -> Any:
            return getattr(train_data, name)

        def __len__(self) -> int:
            return len(train_data)

        def __iter__(self) -> Iterator[Any]:
            seen = 0
            for batch in train_data:
                yield batch
                seen += len(batch)
                if clock.tick(seen):
                    return

    epoch = 0
    while not clock.is_over:
        Trainer(config, model)._train_epoch(UntilTimeIsOver(), epoch, show_progress=False)
        epoch += 1
    return found_of_peer(clock, model)


MEASURES: Measures = {"recspec": measure_recspec, "recbole": measure_recbole}


def options() -> argparse.ArgumentParser:
    """What the command line takes."""
    options = parser(__doc__, __file__, batch_size=65536)
    options.add_argument("--data", type=Path, help="a prepared dataset; made-up rows in ml-1m's shape without")
    return options


if __name__ == "__main__":
    start(options(), MEASURES, compare)
