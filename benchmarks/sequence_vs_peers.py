"""DIN, DIEN and SIM beside FuxiCTR, DeepCTR-Torch and torch-rechub: same rows, sizes, optimizer, in turns.

    python benchmarks/sequence_vs_peers.py [--models din dien sim] [--histories power_law full] [--rounds 2]

Made-up rows held in memory: a user, an item of 100,000 and its category of 1,000, and a history of up to 50 such
items. `power_law`: lengths from 1 to 50, as often as 1 / length (mean 11); `full`: always 50. Embeddings of width 16,
an MLP of 512-256-128, attention of 80-40, Adam, batches of 4096.

The clock runs over whole training steps after the first two: choosing rows at random, forward, backward, optimizer.
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
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from _side_by_side import (
    Blocks,
    Clock,
    Contender,
    Found,
    TimeOver,
    circumstances,
    clocked,
    environments,
    fastest,
    found_of_peer,
    parser,
    peer_python,
    print_table,
    ratios,
    run_in_turns,
    shared,
    start,
    summarise,
    time_training,
)

NUM_USERS, NUM_ITEMS, NUM_CATEGORIES, LENGTH = 20_000, 100_000, 1_000, 50
ROWS = {"train": 65_536, "test": 16_384}
TASTES = 4
WIDTH, HIDDEN, ATTENTION = 16, (512, 256, 128), (80, 40)
TOP_K, SHORT, SEARCH_DIM, HEADS = 20, 10, 64, 2
"""Of SIM: events that are searched for, the latest ones read as they are, width of the search, heads of attention."""

RATE, WARM_UP = 0.001, 2
IDS = {"user_id": NUM_USERS + 1, "item_id": NUM_ITEMS + 1, "category": NUM_CATEGORIES + 1}
OF_EVENTS = ("item_id", "category")
"""Item features that have histories."""

REQUIREMENTS = {
    "deepctr": ("deepctr-torch==0.3.0", "requests==2.34.2", "pandas==3.1.1", "numpy==2.4.6", "scikit-learn==1.9.1"),
    "rechub": ("torch-rechub==0.9.0", "pyarrow==26.0.1"),
    "fuxictr": ("fuxictr==2.3.10", "ray[data]==2.52.1", "numpy==2.4.6", "pandas==3.1.1"),
}

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


def main() -> None:
    """Measure everybody in turns, print tables, write JSON."""
    start(_arguments(), MEASURES, compare)


def compare(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All measurements of a run."""
    wanted = {who for model in arguments.models for who in PEERS[model].values()}
    python = {
        who: peer_python(who, arguments.environments / name, REQUIREMENTS[who])
        for who, name in (("deepctr", "deepctr-torch"), ("rechub", "torch-rechub"), ("fuxictr", "fuxictr"))
        if who in wanted
    }
    report: dict[str, Any] = {}
    for histories in arguments.histories:
        folder = scratch / histories
        best = write_rows(folder, histories)
        for model in arguments.models:
            common = {"model": model, "data": str(folder), **shared(arguments)}
            contenders = {
                name: Contender(
                    Path(sys.executable),
                    {"who": "recspec", "settings": own, "precision": arguments.precision, "passes": 0, **common},
                )
                for name, own in OURS[model].items()
            }
            contenders |= {
                name: Contender(python[who], {"who": who, "passes": 0, **common}) for name, who in PEERS[model].items()
            }
            found = _compared(contenders, f"{model}, {histories}", model, arguments)
            if histories == "power_law" and arguments.passes:
                found["auc"] = {**_qualities(contenders, arguments), "best possible": best}
                print("  ".join(f"{name}: AUC {auc:.4f}" for name, auc in found["auc"].items()))
            report[f"{model}, {histories}"] = found
    return {
        "what": "training, samples/s over whole steps, and AUC after as many passes; ratio is recspec over a peer",
        "sizes": {"ids": IDS, "length": LENGTH, "width": WIDTH, "hidden": HIDDEN, "attention": ATTENTION},
        "optimizer": {"optimizer": "adam", "learning_rate": RATE},
        "data": "made up, ids of a power law",
        "rows": ROWS,
        "passes": arguments.passes,
        "settings": report,
        **circumstances(arguments, DIFFERENCES),
    }


def _compared(
    contenders: Mapping[str, Contender], title: str, model: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    runs = run_in_turns(Path(__file__), contenders, rounds=arguments.rounds)
    summary = summarise(runs)
    best = fastest(summary, [*PEERS[model]])
    print_table(summary, best, title)
    return {
        "results": summary,
        "fastest_peer": best,
        "over_each_peer": {
            f"{own} / {peer}": ratios(summary, own, peer) for own in OURS[model] for peer in PEERS[model]
        },
        "runs": runs,
    }


def _qualities(contenders: Mapping[str, Contender], arguments: argparse.Namespace) -> dict[str, float]:
    """The AUC of each contender, the mean of all seeds."""
    told = {"passes": arguments.passes, "batch_size": arguments.quality_batch_size}
    trained = {name: Contender(who.python, {**who.measure, **told}) for name, who in contenders.items()}
    runs = run_in_turns(Path(__file__), trained, rounds=1)
    return {name: statistics.fmean(found["auc"] for found in rounds) for name, rounds in runs.items()}


# --- the rows --------------------------------------------------------------------------------------------------------


def write_rows(folder: Path, histories: str, seed: int = 0) -> float:
    """Rows as a dataset and, for peers, as padded arrays (rows,) and (rows, 50); gives the best possible AUC of test.

    A category has one of 4 tastes, and of a user's events 3 in 5 are of the user's; so are half of the targets. The
    logit of a 1 is -3 + 6 * (share of the events of the target's taste) + the taste's own part, from -1 to 1.
    """
    import numpy as np

    from recspec import metrics
    from recspec.feature_spec import FeatureSpec
    from recspec.storage import Ragged, SplitWriter

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
        f"{channel}_{name}": {"dtype": "int32", "cardinality": IDS[name], "vocabulary": name, "length": LENGTH,
                              "padding": 0}
        for channel in ("history", "negative_history")
        for name in OF_EVENTS
    }  # fmt: skip
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
    data: str,
    *,
    model: str,
    settings: dict[str, Any],
    precision: str,
    passes: int,
    batch_size: int,
    seconds: float,
    threads: int,
) -> Found:
    """This project, by the steps of its own training run."""
    import torch

    from recspec.distributed import Ranks
    from recspec.evaluate import evaluate_model
    from recspec.feature_spec import FeatureSpec
    from recspec.machine import keep_freed_memory
    from recspec.models import MODELS
    from recspec.train import TrainingRun, TrainSettings, arithmetic

    keep_freed_memory()
    torch.set_num_threads(threads)
    spec = FeatureSpec.load(data)
    sizes = {
        "embedding_dim": WIDTH,
        "hidden": HIDDEN,
        "activation": "relu",
        "attention_hidden": ATTENTION,
        "attention_activation": "relu",
        **settings,
    }
    train = TrainSettings(
        batch_size=batch_size, optimizer="adam", learning_rate=RATE, precision=precision, tensorboard=False
    )
    with tempfile.TemporaryDirectory() as folder:
        made = MODELS[model].Settings.model_validate(sizes)
        run = TrainingRun(model, spec, Path(folder) / "run", train, made, Ranks())
        if not passes:
            return time_training(run, seconds, WARM_UP)
        clock = Clock(float("inf"), WARM_UP)
        with arithmetic(run.precision, train.deterministic):
            for epoch in range(passes):
                run.progress.epoch, run.progress.batch = epoch, 0
                for _ in run.epoch():
                    clock.tick(run.progress.samples)
            reached = evaluate_model(run.model, spec, "test", protocols=("rows",)).metrics["rows"]["auc"]
    return {**clock.result(), "auc": reached}


def measure_deepctr(data: str, *, model: str, passes: int, batch_size: int, seconds: float, threads: int) -> Found:
    """DeepCTR-Torch's DIN and DIEN, by their own `fit`; ids stay exact in its float32 matrix."""
    import numpy as np
    import torch
    from deepctr_torch.inputs import SparseFeat, VarLenSparseFeat  # type: ignore[import-not-found]
    from deepctr_torch.models import DIEN, DIN, basemodel  # type: ignore[import-not-found]

    _prepare_torch(threads)
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
    clock = clocked(optimizer, batch_size, float("inf") if passes else seconds, WARM_UP)
    made.compile(optimizer, "binary_crossentropy", metrics=[])
    own_loader, basemodel.DataLoader = basemodel.DataLoader, Blocks
    try:
        made.fit(rows, labels, batch_size=batch_size, epochs=passes or 1_000_000, verbose=0, shuffle=True)
    except TimeOver:
        return found_of_peer(clock, made)
    basemodel.DataLoader = own_loader
    rows, labels = read("test")
    return {**clock.result(), "auc": _auc(labels, made.predict(rows, batch_size))}


def measure_rechub(data: str, *, model: str, passes: int, batch_size: int, seconds: float, threads: int) -> Found:
    """torch-rechub's DIN and DIEN, by its own trainer."""
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from torch_rechub.basic.features import SequenceFeature, SparseFeature  # type: ignore[import-not-found]
    from torch_rechub.models.ranking import DIEN, DIN  # type: ignore[import-not-found]
    from torch_rechub.trainers import CTRTrainer  # type: ignore[import-not-found]
    from torch_rechub.utils.data import DataGenerator  # type: ignore[import-not-found]

    _prepare_torch(threads)
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
    for module in list(made.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.BatchNorm1d):  # nobody else has it
                module.register_module(name, torch.nn.Identity())
    trainer = CTRTrainer(
        made,
        optimizer_params={"lr": RATE},
        n_epoch=passes or 1_000_000,
        loss_mode=model == "din",
    )
    clock = clocked(trainer.optimizer, batch_size, float("inf") if passes else seconds, WARM_UP)

    def loader(split: str, shuffle: bool) -> Blocks:
        held = _read(data, split)
        labels = held.pop("label")
        if model == "din":
            held = {name: column for name, column in held.items() if not name.startswith("negative")}
        return Blocks(DataGenerator(held, labels).dataset, shuffle, batch_size)

    try:
        trainer.fit(loader("train", shuffle=True))
    except TimeOver:
        return found_of_peer(clock, made)
    test = loader("test", shuffle=False)
    return {**clock.result(), "auc": _auc(test.labels, trainer.predict(made, test))}


def measure_fuxictr(data: str, *, model: str, passes: int, batch_size: int, seconds: float, threads: int) -> Found:
    """FuxiCTR's DIN, DIEN and SIM of `model_zoo.LongCTR`, by their own `train_step`."""
    import importlib
    from collections import OrderedDict

    from fuxictr.features import FeatureMap  # type: ignore[import-not-found]

    _prepare_torch(threads)
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
    clock = clocked(made.optimizer, batch_size, float("inf") if passes else seconds, WARM_UP)
    batches = _FuxiBatches(data, "train", batch_size, left_padded=model == "sim", shuffle=True)
    made.train()
    try:
        for _ in range(passes or 1_000_000):
            for batch in batches:
                made.train_step(batch).item()  # which its own loop reads too
    except TimeOver:
        return found_of_peer(clock, made)
    test = _FuxiBatches(data, "test", batch_size, left_padded=model == "sim", shuffle=False)
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


MEASURES: dict[str, Callable[..., Found]] = {
    "recspec": measure_recspec,
    "deepctr": measure_deepctr,
    "rechub": measure_rechub,
    "fuxictr": measure_fuxictr,
}


def _prepare_torch(threads: int) -> None:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("medium")


def _read(data: str, split: str) -> dict[str, Any]:
    """Every column of a split by its name, lists padded with 0 behind."""
    import numpy as np

    return {file.stem: np.load(file) for file in sorted((Path(data) / "arrays" / split).glob("*.npy"))}


def _auc(labels: Any, scores: Any) -> float:
    import numpy as np
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(np.asarray(labels), np.asarray(scores).reshape(-1)))


def _arguments() -> argparse.Namespace:
    results = Path(__file__).parent / "results"
    options = parser(__doc__, batch_size=4096, out=results / "sequence_vs_peers.json")
    options.set_defaults(rounds=2, seconds=6.0)
    options.add_argument("--models", nargs="+", choices=[*PEERS], default=[*PEERS])
    options.add_argument("--histories", nargs="+", choices=["power_law", "full"], default=["power_law", "full"])
    options.add_argument("--passes", type=int, default=1, help="over the training rows, before AUC; 0: no AUC")
    options.add_argument("--quality-batch-size", type=int, default=512)
    options.add_argument("--precision", default="auto", help="recspec's, as in train.precision")
    options.add_argument("--environments", type=Path, default=environments(), help="the folder of peers' environments")
    return options.parse_args()


if __name__ == "__main__":
    main()
