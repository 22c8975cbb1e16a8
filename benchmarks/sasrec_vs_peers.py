"""Training speed of SASRec beside RecTools': same users, sizes, loss, batch and threads, in turns, in one run.

    python benchmarks/sasrec_vs_peers.py [--data PREPARED] [--threads 1] [--rounds 3] [--seconds 10] [--quick]

A sample is a user, whose latest 50 events each predict the next one by a softmax over all items. The clock runs over
everything a training step takes after the first batches; set-up is left out. RecTools runs in an environment of its
own, made once in `--environments`.

Each measurement is a process of its own that this file starts with `--measure`: on that side it imports nothing of
recspec but what it measures, and under RecTools' interpreter nothing of recspec at all.
"""

from __future__ import annotations

import argparse
import logging
import warnings
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

SIZES: dict[str, Any] = {"dim": 64, "blocks": 1, "heads": 1, "hidden": 256, "length": 50, "dropout": 0.2}
"""Those of eSASRec's benchmark (RecSys 2025); RecTools' feed-forward nets are four times as wide as the vectors."""

LEARNING_RATE = 0.001

DIFFERENCES = (
    "RecTools pads every user of a batch to 50 events, and computes logits of padding too; recspec packs them",
    "RecTools drops attention weights too; recspec drops nothing inside attention",
    "recspec's products are in bf16 where the CPU has units for it; RecTools has fp32, or torch's `medium` (helped)",
    "RecTools' optimizer is Adam, recspec's is AdamW without decay, which is the same",
)


def compare(arguments: argparse.Namespace, scratch: Path) -> Found:
    """All measurements of a run."""
    from recspec.bench.speed import interactions_like_ml_1m
    from recspec.feature_spec import FeatureSpec

    spec = FeatureSpec.load(arguments.data) if arguments.data else interactions_like_ml_1m(scratch / "data")
    rows = write_events(spec, scratch / "events.npy")
    ours = {"data": str(spec.folder.resolve())}
    contenders = {
        "recspec": Contender("recspec", {**ours, "precision": arguments.precision}),
        "recspec, fp32": Contender("recspec", {**ours, "precision": "fp32"}),
        "RecTools": Contender("rectools", {"data": str(scratch / "events.npy"), "helped": False}),
        "RecTools, helped": Contender("rectools", {"data": str(scratch / "events.npy"), "helped": True}),
    }
    if arguments.quick:
        del contenders["recspec, fp32"]
    return {
        "what": "SASRec training, users/s",
        "sizes": SIZES,
        "data": spec.metadata.get("dataset", "made up in ml-1m's shape"),
        "rows": rows,
        "settings": {"published": compared(Comparison(Path(__file__), "sasrec", "SASRec", contenders), arguments)},
        "differences": DIFFERENCES,
    }


def write_events(spec: Any, file: Path) -> int:
    """The training events as an array (events, 2) of users and items, oldest first; gives their number."""
    import numpy as np

    from recspec.evaluation import interactions_of
    from recspec.models import MODELS, TrainedItemModel

    kind = MODELS["sasrec"]
    assert issubclass(kind, TrainedItemModel)
    events = interactions_of(kind, spec, ["train"]).events
    np.save(file, np.stack([events.users, events.items], axis=1), allow_pickle=False)
    return len(events.items)


# --- in a process of its own -----------------------------------------------------------------------------------------


def measure_recspec(data: str, *, pace: Pace, precision: str) -> Found:
    """This project, by the steps of its own training run."""
    train = {"optimizer": "adamw", "learning_rate": LEARNING_RATE, "precision": precision}
    return time_recspec("sasrec", data, pace, train=train, sizes=SIZES)


def measure_rectools(data: str, *, pace: Pace, helped: bool) -> Found:
    """RecTools, by its own model's fit, which is stopped when the time is over."""
    import numpy as np
    import pandas as pd
    from pytorch_lightning import Callback, Trainer
    from rectools import Columns
    from rectools.dataset import Dataset
    from rectools.models import SASRecModel

    if helped:
        help_peer()
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    events = np.load(data, allow_pickle=False)
    frame = pd.DataFrame({Columns.User: events[:, 0], Columns.Item: events[:, 1], Columns.Weight: 1.0})
    frame[Columns.Datetime] = pd.to_datetime(np.arange(len(events)), unit="s")  # in the order of the rows
    clock, seen = Clock(pace), 0

    class UntilTimeIsOver(Callback):  # type: ignore[misc]
        """The clock behind every batch."""

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
            nonlocal seen
            seen += len(batch["x"])
            trainer.should_stop = clock.tick(seen)

    def make_trainer() -> Any:
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        return Trainer(
            max_epochs=-1,
            min_epochs=0,
            accelerator="cpu",
            enable_model_summary=False,
            callbacks=[UntilTimeIsOver()],
            **quiet,
        )

    model = SASRecModel(
        n_factors=SIZES["dim"],
        n_blocks=SIZES["blocks"],
        n_heads=SIZES["heads"],
        dropout_rate=SIZES["dropout"],
        session_max_len=SIZES["length"],
        loss="softmax",
        lr=LEARNING_RATE,
        batch_size=pace.batch_size,
        get_trainer_func=make_trainer,
    )
    model.fit(Dataset.construct(frame))
    return found_of_peer(clock, model.lightning_model.torch_model)


MEASURES: Measures = {"recspec": measure_recspec, "rectools": measure_rectools}


def options() -> argparse.ArgumentParser:
    """What the command line takes."""
    options = parser(__doc__, __file__, batch_size=256)
    options.add_argument("--data", type=Path, help="a prepared dataset; made-up rows in ml-1m's shape without")
    return options


if __name__ == "__main__":
    start(options(), MEASURES, compare)
