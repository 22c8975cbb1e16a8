"""DIN, DIEN and SIM beside FuxiCTR, DeepCTR-Torch and torch-rechub: same rows, sizes, optimizer, in turns.

    python benchmarks/sequence_vs_peers.py [--models din dien sim] [--histories power_law full] [--quick]

Made-up rows held in memory: a user, an item of 100,000 and its category of 1,000, and a history of up to 50 such
items. `power_law`: lengths from 1 to 50, as often as 1 / length (mean 11); `full`: always 50. Embeddings of width 16,
an MLP of 512-256-128, attention of 80-40, Adam, batches of 4096.

The clock runs over whole training steps after the first ones: choosing rows at random, forward, backward, optimizer.
Peers pad every history to 50. They are helped with what a user could add from outside: rows that are tensors already
and are taken a batch at a time instead of one by one, no progress bar, and torch's setting that sends products through
oneDNN. DeepCTR-Torch and torch-rechub train by their own `fit`; FuxiCTR by its own `train_step`, for its `fit` reads
files of its own. SIM is FuxiCTR's alone.

AUC: every contender trains on the same rows as often, in batches of 512, and scores the same test rows. A row's label
depends on how much of the history is of the target's taste, and on the taste; `best possible` is what the true
probabilities reach.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from _side_by_side import (
    Blocks,
    Clock,
    Comparison,
    Contender,
    Found,
    Measures,
    Pace,
    TimeOver,
    clocked,
    compared,
    epochs,
    fit_deepctr,
    fit_rechub,
    found_of_peer,
    help_peer,
    interpreters,
    measured,
    parser,
    recspec_run,
    start,
    time_recspec,
    without_batch_normalisation,
)

NUM_USERS, NUM_ITEMS, NUM_CATEGORIES, LENGTH = 20_000, 100_000, 1_000, 50
ROWS = {"train": 65_536, "test": 16_384}
TASTES = 4
WIDTH, HIDDEN, ATTENTION = 16, (512, 256, 128), (80, 40)
TOP_K, SHORT, SEARCH_DIM, HEADS = 20, 10, 64, 2
"""Of SIM: events that are searched for, the latest ones read as they are, width of the search, heads of attention."""

RATE = 0.001
IDS = {"user_id": NUM_USERS + 1, "item_id": NUM_ITEMS + 1, "category": NUM_CATEGORIES + 1}
OF_EVENTS = ("item_id", "category")
"""Item features that have histories."""

PEERS = {
    "din": {"FuxiCTR": "fuxictr", "DeepCTR-Torch": "deepctr", "torch-rechub": "rechub"},
    "dien": {"FuxiCTR, no auxiliary loss": "fuxictr", "DeepCTR-Torch": "deepctr", "torch-rechub": "rechub"},
    "sim": {"FuxiCTR": "fuxictr"},
}

OURS: dict[str, dict[str, dict[str, Any]]] = {
    "din": {"recspec": {}},
    "dien": {"recspec": {}, "recspec, no auxiliary loss": {"auxiliary": 0.0}},
    "sim": {
        "recspec": {
            "search": "soft",
            "search_dim": SEARCH_DIM,
            "search_hidden": HIDDEN,
            "top_k": TOP_K,
            "short": "din",
            "short_length": SHORT,
            "heads": HEADS,
        }
    },
}

DIFFERENCES = (
    "peers read histories padded to 50, recspec the events alone; FuxiCTR and DeepCTR-Torch pack them for the GRU",
    "DIN: torch-rechub weighs items and categories apart, by units of half the width, and masks no padding",
    "DIEN: FuxiCTR 2.3.10 has no auxiliary loss; torch-rechub's is a product of vectors, the others' an MLP",
    "DIEN: DeepCTR-Torch attends by an MLP, the others by a product with a matrix; torch-rechub has a GRU a feature",
    "SIM: FuxiCTR attends by heads to the latest 10 events and to the best 20 of all",
    "SIM: recspec reads the latest 10 by an attention unit, and searches those before them",
    "FuxiCTR clips the norm of gradients, which its train_step always does",
    "torch-rechub's MLP is Dice, without its batch normalisation; the others' ReLU",
    "products: recspec as its `precision` says, peers through oneDNN where torch's setting sends them there",
    "recspec's command line tells glibc to keep freed memory; peers run with the allocator as it is",
)


LEFT_OUT = {
    "din": {},
    "dien": {},
    "sim": dict.fromkeys(("DeepCTR-Torch", "torch-rechub"), "it has no SIM"),
}


def compare(arguments: argparse.Namespace, scratch: Path) -> Found:
    """All measurements of a run."""
    report: dict[str, Any] = {}
    for histories in ["power_law"] if arguments.quick else arguments.histories:
        folder = scratch / histories
        best = write_rows(folder, histories)
        for model in arguments.models:
            table = _comparison(model, histories, str(folder), arguments)
            found = compared(table, arguments)
            if histories == "power_law" and arguments.passes and not arguments.quick:
                found["auc"] = {**_qualities(table, [*found["results"]], arguments), "best possible": best}
                print("  ".join(f"{name}: AUC {auc:.4f}" for name, auc in found["auc"].items()))
            report[f"{model}, {histories}"] = found
    return {
        "what": "training, samples/s over whole steps, and AUC after as many passes",
        "sizes": {"ids": IDS, "length": LENGTH, "width": WIDTH, "hidden": HIDDEN, "attention": ATTENTION},
        "optimizer": {"optimizer": "adam", "learning_rate": RATE},
        "data": "made up, ids of a power law",
        "rows": ROWS,
        "passes": arguments.passes,
        "settings": report,
        "differences": DIFFERENCES,
    }


def _comparison(model: str, histories: str, data: str, arguments: argparse.Namespace) -> Comparison:
    common = {"model": model, "data": data, "passes": 0}
    contenders = {
        name: Contender("recspec", {"settings": own, "precision": arguments.precision, **common})
        for name, own in OURS[model].items()
    }
    contenders |= {name: Contender(who, common) for name, who in PEERS[model].items()}
    title = f"{model.upper()}, {histories}"
    opposite = {peer: f"recspec, {what}" for peer in PEERS[model] for _, comma, what in [peer.partition(", ")] if comma}
    return Comparison(Path(__file__), model, title, contenders, opposite=opposite, left_out=LEFT_OUT[model])


def _qualities(table: Comparison, names: list[str], arguments: argparse.Namespace) -> dict[str, float]:
    """The AUC of each contender that could be measured."""
    python, _ = interpreters(
        (table.contenders[name].who for name in names if name in PEERS[table.model]), arguments.environments
    )
    python["recspec"] = Path(sys.executable)
    pace = Pace(arguments.quality_batch_size, arguments.threads, arguments.seconds, arguments.warm_up)
    reached = {}
    for name in names:
        who, told = table.contenders[name].who, table.contenders[name].told
        trained = Contender(who, {**told, "passes": arguments.passes})
        reached[name] = float(measured(table.script, python[who], trained, pace)["auc"])
    return reached


# --- the rows --------------------------------------------------------------------------------------------------------


def write_rows(folder: Path, histories: str, seed: int = 0) -> float:
    """Rows as a dataset and, for peers, as padded arrays (rows,) and (rows, 50); gives the best possible AUC of test.

    A category has one of 4 tastes, and of a user's events 3 in 5 are of the user's; so are half of the targets. The
    logit of a 1 is -3 + 6 * (share of the events of the target's taste) + the taste's own part, from -1 to 1.
    """
    import numpy as np

    from recspec.data.storage import Ragged, SplitWriter
    from recspec.feature_spec import FeatureSpec
    from recspec.metrics import measures as metrics

    fixed = np.random.default_rng(seed)
    taste = fixed.integers(0, TASTES, NUM_CATEGORIES)  # of a category
    category = (NUM_CATEGORIES * fixed.random(NUM_ITEMS) ** 2).astype(np.int64)  # of an item: some are large
    items_of = [np.flatnonzero(taste[category] == each) for each in range(TASTES)]
    spec = _spec(folder)
    sources, best = {}, float("nan")
    for number, (split, rows) in enumerate(ROWS.items(), start=1):
        rng = np.random.default_rng([seed, number])

        def draw(tastes: Any, rng: Any = rng) -> Any:
            """An item of each taste, low numbers more often, as the cube of a uniform number."""
            sizes = np.array([len(items) for items in items_of])[tastes]
            places = (sizes * rng.random(tastes.shape) ** 3).astype(np.int64)
            return np.concatenate(items_of)[np.cumsum([0, *map(len, items_of)])[tastes] + places]

        chances = np.ones(LENGTH) / np.arange(1, LENGTH + 1)
        lengths = rng.choice(np.arange(1, LENGTH + 1), rows, p=chances / chances.sum())
        lengths = np.full(rows, LENGTH) if histories == "full" else lengths
        present = np.arange(LENGTH) < lengths[:, None]
        favourite = rng.integers(0, TASTES, rows)
        anything = rng.integers(0, TASTES, (rows, LENGTH))
        of_events = np.where(rng.random((rows, LENGTH)) < 0.6, favourite[:, None], anything)
        of_target = np.where(rng.random(rows) < 0.5, favourite, rng.integers(0, TASTES, rows))
        share = ((of_events == of_target[:, None]) & present).sum(1) / lengths
        logit = -3 + 6 * share + np.linspace(-1, 1, TASTES)[of_target]
        probability = 1 / (1 + np.exp(-logit))
        drawn = {"": draw(of_target), "history_": draw(of_events), "negative_history_": draw(anything[::-1])}
        columns = {
            "user_id": rng.integers(1, NUM_USERS + 1, rows),
            "label": (rng.random(rows) < probability).astype(np.float32),
        }
        for prefix, items in drawn.items():
            kept = present if prefix else np.ones(rows, bool)
            columns[f"{prefix}item_id"] = np.where(kept, items + 1, 0)
            columns[f"{prefix}category"] = np.where(kept, category[items] + 1, 0)
        columns = {name: column.astype(np.float32 if name == "label" else np.int32) for name, column in columns.items()}
        (folder / "arrays" / split).mkdir(parents=True)
        for name, column in columns.items():
            np.save(folder / "arrays" / split / f"{name}.npy", column)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        with SplitWriter(folder, split, spec.features, label="label") as writer:
            writer.write({n: Ragged(c[present], offsets) if c.ndim == 2 else c for n, c in columns.items()})
        sources[split] = writer.chunks
        best = metrics.auc(probability, columns["label"])
    assert isinstance(spec, FeatureSpec)
    spec.replace(sources=sources).save(folder)
    return best


def _spec(folder: Path) -> Any:
    from recspec.feature_spec import FeatureSpec

    lists = {
        f"{channel}_{name}": {
            "dtype": "int32",
            "cardinality": IDS[name],
            "vocabulary": name,
            "length": LENGTH,
            "padding": 0,
        }
        for channel in ("history", "negative_history")
        for name in OF_EVENTS
    }
    return FeatureSpec.from_dict(
        {
            "feature_spec": {
                **{name: {"dtype": "int32", "cardinality": count} for name, count in IDS.items()},
                **lists,
                "label": {"dtype": "float32"},
            },
            "channel_spec": {
                "user": ["user_id"],
                "item": [*OF_EVENTS],
                "history": [f"history_{name}" for name in OF_EVENTS],
                "negative_history": [f"negative_history_{name}" for name in OF_EVENTS],
                "label": ["label"],
            },
        },
        folder,
    )


# --- in a process of its own -----------------------------------------------------------------------------------------


def measure_recspec(
    data: str, *, pace: Pace, model: str, settings: Mapping[str, Any], precision: str, passes: int
) -> Found:
    """This project, by the steps of its own training run."""
    train = {"optimizer": "adam", "learning_rate": RATE, "precision": precision}
    sizes = {
        "embedding_dim": WIDTH,
        "hidden": HIDDEN,
        "activation": "relu",
        "attention_hidden": ATTENTION,
        "attention_activation": "relu",
        **settings,
    }
    if not passes:
        return time_recspec(model, data, pace, train=train, sizes=sizes)
    from recspec.evaluation import evaluate_model
    from recspec.training.product_rates import arithmetic

    with recspec_run(model, data, {"batch_size": pace.batch_size, **train}, sizes) as run:
        clock = Clock(pace, forever=True)
        with arithmetic(run.plan.precision.value, run.settings.deterministic):
            for epoch in range(passes):
                run.progress.epoch, run.progress.batch = epoch, 0
                for _ in run.epoch():
                    clock.tick(run.progress.samples)
            reached = evaluate_model(run.model, run.plan.spec, "test", protocols=("rows",)).metrics["rows"]["auc"]
    return {**clock.result(), "auc": reached}


def measure_deepctr(data: str, *, pace: Pace, model: str, passes: int) -> Found:
    """DeepCTR-Torch's DIN and DIEN, by their own `fit`; ids stay exact in its float32 matrix."""
    import numpy as np
    import torch
    from deepctr_torch.inputs import SparseFeat, VarLenSparseFeat  # type: ignore[import-not-found]
    from deepctr_torch.models import DIEN, DIN  # type: ignore[import-not-found]

    torch.manual_seed(0)
    columns = [SparseFeat(name, count, embedding_dim=WIDTH) for name, count in IDS.items()]
    names = {"hist_": "history_", "neg_hist_": "negative_history_"} if model == "dien" else {"hist_": "history_"}
    columns += [
        VarLenSparseFeat(
            SparseFeat(f"{theirs}{name}", IDS[name], embedding_dim=WIDTH, embedding_name=name),
            maxlen=LENGTH,
            length_name="length",
        )
        for theirs in names
        for name in OF_EVENTS
    ]
    common = {"dnn_hidden_units": HIDDEN, "l2_reg_embedding": 0, "l2_reg_dnn": 0, "att_activation": "relu"}
    if model == "din":
        made = DIN(columns, [*OF_EVENTS], att_hidden_size=ATTENTION, **common)
    else:
        made = DIEN(columns, [*OF_EVENTS], gru_type="AUGRU", use_negsampling=True, att_hidden_units=ATTENTION, **common)

    def read(split: str) -> tuple[dict[str, Any], Any]:
        held = _read(data, split)
        rows = {name: held[name] for name in IDS} | {
            f"{theirs}{name}": held[f"{ours}{name}"] for theirs, ours in names.items() for name in OF_EVENTS
        }
        rows["length"] = (held["history_item_id"] > 0).sum(1)
        return {name: np.asarray(column, np.float32) for name, column in rows.items()}, held["label"]

    rows, labels = read("train")
    optimizer = torch.optim.Adam(made.parameters(), lr=RATE)
    clock = fit_deepctr(made, optimizer, rows, labels, pace, helped=True, passes=passes)
    if not passes:
        return found_of_peer(clock, made)
    rows, labels = read("test")
    return {**clock.result(), "auc": _auc(labels, made.predict(rows, pace.batch_size))}


def measure_rechub(data: str, *, pace: Pace, model: str, passes: int) -> Found:
    """torch-rechub's DIN and DIEN, by its own trainer."""
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from torch_rechub.basic.features import SequenceFeature, SparseFeature  # type: ignore[import-not-found]
    from torch_rechub.models.ranking import DIEN, DIN  # type: ignore[import-not-found]
    from torch_rechub.utils.data import DataGenerator  # type: ignore[import-not-found]

    torch.manual_seed(0)
    user = [SparseFeature("user_id", IDS["user_id"], embed_dim=WIDTH)]
    target = [SparseFeature(name, IDS[name], embed_dim=WIDTH, padding_idx=0) for name in OF_EVENTS]

    def lists(prefix: str) -> list[Any]:
        return [
            SequenceFeature(
                f"{prefix}{name}", IDS[name], embed_dim=WIDTH, pooling="concat", shared_with=name, padding_idx=0
            )
            for name in OF_EVENTS
        ]

    top = {"dims": [*HIDDEN]}
    if model == "din":
        made = DIN(user, lists("history_"), target, top, {"dims": [*ATTENTION], "activation": "relu"})
    else:
        made = DIEN(user, lists("history_"), lists("negative_history_"), target, top, alpha=1.0)
    without_batch_normalisation(made)

    def read(split: str) -> Any:
        held = _read(data, split)
        labels = held.pop("label")
        if model == "din":
            held = {name: column for name, column in held.items() if not name.startswith("negative")}
        return DataGenerator(held, labels).dataset

    def optimizer(parameters: Any) -> Any:
        return torch.optim.Adam(parameters, lr=RATE)

    mode = {"loss_mode": model == "din"}
    trainer, clock = fit_rechub(made, optimizer, read("train"), pace, helped=True, passes=passes, **mode)
    if not passes:
        return found_of_peer(clock, made)
    test = Blocks(read("test"), False, pace.batch_size)
    return {**clock.result(), "auc": _auc(test.labels, trainer.predict(made, test))}


def measure_fuxictr(data: str, *, pace: Pace, model: str, passes: int) -> Found:
    """FuxiCTR's DIN, DIEN and SIM of `model_zoo.LongCTR`, by their own `train_step`."""
    import importlib
    from collections import OrderedDict

    import torch
    from fuxictr.features import FeatureMap  # type: ignore[import-not-found]

    torch.manual_seed(0)
    help_peer()
    name = model.upper()
    kind = getattr(importlib.import_module(f"model_zoo.LongCTR.{name}.{name}"), name)
    features = FeatureMap("made_up", ".")
    features.labels, features.default_emb_dim = ["label"], WIDTH
    features.features = OrderedDict(
        (each, {"type": "categorical", "source": "item" if each in OF_EVENTS else "user", "vocab_size": count})
        for each, count in IDS.items()
    )
    settings: dict[str, dict[str, Any]] = {
        "din": {"attention_hidden_units": [*ATTENTION], "attention_hidden_activations": "ReLU"},
        "dien": {"batch_norm": False},
        "sim": {"topk": TOP_K, "short_seq_len": SHORT + 1, "attention_dim": SEARCH_DIM, "num_heads": HEADS},
    }
    made = kind(
        features,
        embedding_dim=WIDTH,
        dnn_hidden_units=[*HIDDEN],
        learning_rate=RATE,
        optimizer="adam",
        loss="binary_crossentropy",
        metrics=["AUC"],
        verbose=0,
        model_root=".",
        **settings[model],
    )
    made._max_gradient_norm, made._batch_index = 10.0, 0
    clock = clocked(made.optimizer, pace, passes=passes)
    batches = _FuxiBatches(data, "train", pace.batch_size, left_padded=model == "sim", shuffle=True)
    made.train()
    with suppress(TimeOver):
        for _ in range(epochs(passes)):
            for batch in batches:
                made.train_step(batch).item()  # which its own loop reads too
    if not passes:
        return found_of_peer(clock, made)
    test = _FuxiBatches(data, "test", pace.batch_size, left_padded=model == "sim", shuffle=False)
    return {**clock.result(), "auc": _auc(test.blocks.labels, made.predict(test))}


class _FuxiBatches:
    """Batches as FuxiCTR's loader of long histories makes them: scalars, each row's events and target, and the mask."""

    def __init__(self, data: str, split: str, batch_size: int, *, left_padded: bool, shuffle: bool) -> None:
        import numpy as np
        import torch

        held = _read(data, split)
        present = held["history_item_id"] > 0
        if left_padded:  # as its SIM takes the latest events from the end
            order = np.argsort(present, axis=1, kind="stable")
            held = {n: np.take_along_axis(c, order, 1) if c.ndim == 2 else c for n, c in held.items()}
            present = np.take_along_axis(present, order, 1)
        columns: dict[str, Any] = {"user_id": held["user_id"], "mask": present.astype(np.int64)}
        for name in OF_EVENTS:
            columns[name] = np.concatenate([held[f"history_{name}"], held[name][:, None]], axis=1)
        tensors = {name: torch.as_tensor(column) for name, column in columns.items()}
        self.blocks = Blocks(_Sized((tensors, torch.as_tensor(held["label"]))), shuffle, batch_size)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], dict[str, Any], Any]]:
        for rows, labels in self.blocks:
            items = {name: rows[name].flatten() for name in OF_EVENTS}
            yield {"user_id": rows["user_id"], "label": labels}, items, rows["mask"]


class _Sized:
    """Columns and labels with the number of rows."""

    def __init__(self, tensors: tuple[dict[str, Any], Any]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[1])


MEASURES: Measures = {
    "recspec": measure_recspec,
    "deepctr": measure_deepctr,
    "rechub": measure_rechub,
    "fuxictr": measure_fuxictr,
}


def _read(data: str, split: str) -> dict[str, Any]:
    """Every column of a split by its name, lists padded with 0 behind."""
    import numpy as np

    return {file.stem: np.load(file) for file in sorted((Path(data) / "arrays" / split).glob("*.npy"))}


def _auc(labels: Any, scores: Any) -> float:
    import numpy as np
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(np.asarray(labels), np.asarray(scores).reshape(-1)))


def options() -> argparse.ArgumentParser:
    """What the command line takes."""
    options = parser(__doc__, __file__, batch_size=4096)
    options.add_argument("--models", nargs="+", choices=[*PEERS], default=[*PEERS])
    options.add_argument("--histories", nargs="+", choices=["power_law", "full"], default=["power_law", "full"])
    options.add_argument("--passes", type=int, default=1, help="over the training rows, before AUC; 0: no AUC")
    options.add_argument("--quality-batch-size", type=int, default=512)
    return options


if __name__ == "__main__":
    start(options(), MEASURES, compare)
