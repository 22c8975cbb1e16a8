"""Speed of two trees in turns: training of every model, programs on their own, and raw requests to the server.

Training has the sizes of `training.py --quick`: made-up rows in the shapes of ml-1m (NeuMF), Outbrain (Wide & Deep),
Criteo (DLRM, DCNv2) and histories of up to 50 events (DIN, DIEN, SIM). Latency is that of a Wide & Deep with the
features and widths of `outbrain_latency.py`, trained on a few rows: `recspec bench infer` for the bundle and its
exports, and `/rank` over HTTP for requests of raw values.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from _trees import Server, Tree
from dcnv2_vs_peers import CROSSES, TOP
from dcnv2_vs_peers import RATE as DCNV2_RATE
from dcnv2_vs_peers import WIDTH as DCNV2_WIDTH
from dlrm_vs_peers import BOTTOM, EPS, NUM_IDS, NUMBERS, RATE, TABLES, WIDTH
from dlrm_vs_peers import TOP as DLRM_TOP
from neumf_vs_peers import LEARNING_RATE
from neumf_vs_peers import SIZES as NEUMF
from outbrain_latency import HIDDEN, IDS, drawn, requests
from outbrain_latency import NUMBERS as OUTBRAIN_NUMBERS
from sequence_vs_peers import ATTENTION, LENGTH, OF_EVENTS, OURS
from sequence_vs_peers import HIDDEN as SEQUENCE_HIDDEN
from sequence_vs_peers import IDS as SEQUENCE_IDS
from sequence_vs_peers import WIDTH as SEQUENCE_WIDTH
from wide_deep_vs_peers import OPTIMIZER, SETTINGS

Settings = Mapping[str, Any]

SEQUENCES: Settings = {
    "embedding_dim": SEQUENCE_WIDTH,
    "hidden": SEQUENCE_HIDDEN,
    "activation": "relu",
    "attention_hidden": ATTENTION,
    "attention_activation": "relu",
}


@dataclass(frozen=True)
class Training:
    """A model's training: its rows, batch, settings, and how many steps are measured."""

    data: str | None
    """`criteo` or `histories`; None takes the rows that `recspec bench train` makes up."""

    batch_size: int
    steps: int
    settings: Settings


TRAININGS: Mapping[str, Training] = {
    "neumf": Training(
        None,
        65_536,
        3,
        {
            "train.learning_rate": LEARNING_RATE,
            "train.negatives": NEUMF["negatives"],
            **{name: NEUMF[name] for name in ("factors", "layers", "dropout")},
        },
    ),
    "wide_deep": Training(
        None,
        4096,
        2,
        {
            "train.optimizer": "rmsprop",
            **{f"train.{name}": value for name, value in OPTIMIZER.items()},
            **SETTINGS["published"],
        },
    ),
    "dlrm": Training(
        "criteo",
        8192,
        2,
        {
            "train.optimizer": "adagrad",
            "train.learning_rate": RATE,
            "train.eps": EPS,
            "train.parts": {"embeddings": {"optimizer": "rowwise_adagrad"}},
            "embedding_dim": WIDTH,
            "bottom": BOTTOM,
            "top": DLRM_TOP,
        },
    ),
    "dcnv2": Training(
        "criteo",
        4096,
        10,
        {
            "train.optimizer": "adagrad",
            "train.learning_rate": DCNV2_RATE,
            "embedding_dim": DCNV2_WIDTH,
            "bottom": (),
            "cross_layers": CROSSES,
            "cross_rank": 0,
            "top": TOP,
            "structure": "parallel",
        },
    ),
    **{model: Training("histories", 4096, 10, {**SEQUENCES, **OURS[model]["recspec"]}) for model in OURS},
}
WARM_UP = 2

ROWS = {"criteo": 131_072, "histories": 65_536}
ALPHA = 1.45
"""Exponent of the power law of ids, as for DLRM's made-up ids."""

OUTBRAIN_ROWS = 2000
CANDIDATES = {1: 200, 64: 40}
"""Candidates of a raw request -> requests of a turn."""
EXPORTS = {"fp32": (), "int8": ("--precision", "int8"), "ranker fp32": ("--form", "ranker")}
INFER_ROWS = (1, 64)


def compare_speed(trees: Sequence[Tree], rounds: int, models: Sequence[str] | None) -> list[dict[str, Any]]:
    """Measure both trees in turns, print a line for each measurement; the ratio is that of the medians, B / A."""
    folder = trees[0].folder.parent / "speed"
    for name, rows in ROWS.items():
        {"criteo": write_criteo, "histories": write_histories}[name](folder / name, rows)
    lines = []
    print(f"\n{'':34}{'A':>14}{'B':>14}{'B / A':>8}  unit")
    for model in models or TRAININGS:
        speeds: dict[str, list[float]] = {tree.name: [] for tree in trees}
        for _ in range(rounds):
            for tree in trees:
                speeds[tree.name].append(trained_samples(tree, model))
        lines.append(_line(f"train {model}", "samples/s", speeds))
    latencies: dict[str, dict[str, list[float]]] = {}
    for name, whose, speed in latency_turns(trees, rounds, folder / "outbrain"):
        latencies.setdefault(name, {tree.name: [] for tree in trees})[whose].append(speed)
    return [*lines, *(_line(name, "calls/s (1 / p50)", speeds) for name, speeds in latencies.items())]


def _line(name: str, unit: str, speeds: Mapping[str, list[float]]) -> dict[str, Any]:
    a, b = (statistics.median(each) for each in speeds.values())
    print(f"{name:34}{a:14,.1f}{b:14,.1f}{b / a:8.3f}  {unit}", flush=True)
    return {"what": name, "unit": unit, "a": a, "b": b, "ratio": round(b / a, 3), "turns": dict(speeds)}


def trained_samples(tree: Tree, model: str) -> float:
    """Samples per second of a few training steps, in a process of their own."""
    training = TRAININGS[model]
    settings = sets({"train.batch_size": training.batch_size, **training.settings})
    data = ["--data", f"../speed/{training.data}"] if training.data else []
    pace = ["--steps", str(training.steps), "--warmup", str(WARM_UP), "--json"]
    told = tree.python("-m", "recspec", "bench", "train", model, *data, *settings, *pace)
    return float(json.loads(told)["samples_per_second"])


def sets(settings: Settings) -> list[str]:
    """Options of the command line that set these."""
    return [part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")]


def latency_turns(trees: Sequence[Tree], rounds: int, raw: Path) -> Iterator[tuple[str, str, float]]:
    """Calls per second (1 / p50) by what is called, of each tree in each turn."""
    write_outbrain(raw)
    for tree in trees:
        take_outbrain(tree)
    with ExitStack() as stack:
        servers = [(tree, stack.enter_context(tree.serving("clicks=outbrain-run"))) for tree in trees]
        for turn in range(rounds):
            for tree in trees:
                yield from infer_calls(tree)
            for size, count in CANDIDATES.items():
                for tree, server in servers:
                    yield f"rank {size} raw candidates", tree.name, ranked(server, size, count, turn)


def take_outbrain(tree: Tree) -> None:
    """Prepare, train and export Wide & Deep at Outbrain's sizes."""
    belongs = {**{name: item for name, (_, _, item) in IDS.items()}, **OUTBRAIN_NUMBERS}
    table = {
        "user": None,
        "item": None,
        "timestamp": None,
        "label": "clicked",
        "numeric": [*OUTBRAIN_NUMBERS],
        "item_features": [name for name, item in belongs.items() if item],
        "context_features": [name for name, item in belongs.items() if not item],
        "hashed": {name: buckets for name, (buckets, *_) in IDS.items()},
    }
    model = {
        "hidden": HIDDEN,
        "embedding_dims": {name: width for name, (_, width, _) in IDS.items()},
        "train.optimizer": "adagrad",
        "train.epochs": 1,
        "train.batch_size": 500,
        "train.tensorboard": False,
    }
    tree.recspec("prepare", "table", "../speed/outbrain/clicks.csv", "outbrain-data", *sets(table))
    tree.recspec("train", "wide_deep", "outbrain-data", "outbrain-run", *sets(model))
    for name, more in EXPORTS.items():
        options = ("--batch-sizes", "1", "--threads", "1", "--allow-drift")
        tree.recspec("export", "outbrain-run", f"outbrain {name}", *more, *options)


def infer_calls(tree: Tree) -> Iterator[tuple[str, str, float]]:
    """Calls per second of the bundle and its exports, rows in memory."""
    programs = ["outbrain-run", *(f"outbrain {name}" for name in EXPORTS)]
    options = ["--batch-sizes", ",".join(map(str, INFER_ROWS)), "--threads", "1", "--seconds", "2", "--json"]
    found = json.loads(tree.python("-m", "recspec", "bench", "infer", *programs, *options))
    for each in found["measured"]:
        name = f"{Path(each['path']).name.removeprefix('outbrain').strip(' -')}, {each['batch_size']} rows"
        yield f"infer {name}", tree.name, 1000 / each["p50_ms"]


def ranked(server: Server, size: int, count: int, turn: int) -> float:
    """Requests per second, by the median, of raw requests that are asked once each."""
    times = []
    for request, items in requests(size, count + 2, turn):
        body = json.dumps({"request": request, "candidates": items})
        started = time.perf_counter()
        answer = server.ask("/rank", body)
        times.append(time.perf_counter() - started)
        if answer["status"] != 200:
            raise SystemExit(f"/rank: {answer}")
    return 1 / statistics.median(times[2:])


# --- made-up rows ----------------------------------------------------------------------------------------------------


def write_criteo(folder: Path, rows: int) -> None:
    """Clicks with as many features as Criteo's, ids of a power law."""
    rng = np.random.default_rng(0)
    ids, numbers = [f"id_{place}" for place in range(TABLES)], [f"number_{place}" for place in range(NUMBERS)]
    features: dict[str, Any] = {name: {"dtype": "int32", "cardinality": NUM_IDS} for name in ids}
    features |= {name: {"dtype": "float32"} for name in (*numbers, "label")}
    columns: dict[str, Any] = {name: _power_law(rng, rows, NUM_IDS) for name in ids}
    columns |= {name: rng.random(rows, np.float32) for name in numbers}
    columns["label"] = rng.integers(0, 2, rows).astype(np.float32)
    _write_split(folder, features, {"context": [*ids, *numbers], "label": ["label"]}, columns)


def write_histories(folder: Path, rows: int) -> None:
    """Labelled rows with a history whose lengths are as frequent as 1 / length."""
    import pyarrow as pa

    rng = np.random.default_rng(0)
    features: dict[str, Any] = {name: {"dtype": "int32", "cardinality": count} for name, count in SEQUENCE_IDS.items()}
    columns: dict[str, Any] = {name: 1 + _power_law(rng, rows, count - 1) for name, count in SEQUENCE_IDS.items()}
    chances = 1 / np.arange(1, LENGTH + 1)
    lengths = rng.choice(np.arange(1, LENGTH + 1), rows, p=chances / chances.sum())
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    channels: dict[str, list[str]] = {"user": ["user_id"], "item": [*OF_EVENTS]}
    for channel in ("history", "negative_history"):
        channels[channel] = [f"{channel}_{name}" for name in OF_EVENTS]
        for name, feature in zip(OF_EVENTS, channels[channel], strict=True):
            features[feature] = {**features[name], "vocabulary": name, "length": LENGTH, "padding": 0}
            events = 1 + _power_law(rng, int(lengths.sum()), SEQUENCE_IDS[name] - 1)
            columns[feature] = pa.ListArray.from_arrays(offsets, pa.array(events))
    features["label"] = {"dtype": "float32"}
    columns["label"] = rng.integers(0, 2, rows).astype(np.float32)
    _write_split(folder, features, {**channels, "label": ["label"]}, columns)


def _power_law(rng: np.random.Generator, size: int, num_ids: int) -> Any:
    """Ids from 0 on, the most frequent first."""
    x = (1 - rng.random(size) * (1 - (num_ids + 1.0) ** (1 - ALPHA))) ** (1 / (1 - ALPHA))
    return (x.astype(np.int32) - 1).clip(0, num_ids - 1)


def _write_split(folder: Path, features: Settings, channels: Settings, columns: Settings) -> None:
    """A prepared dataset with a split for training."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    pq.write_table(pa.table(dict(columns)), folder / "train.parquet")
    chunk = {"type": "parquet", "features": [*columns], "files": ["train.parquet"]}
    spec = {"feature_spec": features, "source_spec": {"train": [chunk]}, "channel_spec": channels}
    (folder / "feature_spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")


def write_outbrain(folder: Path) -> None:
    """Raw clicks with the columns of `outbrain_latency.py`."""
    rng = np.random.default_rng(0)
    sides = (drawn(rng, OUTBRAIN_ROWS, of_items=items) for items in (False, True))
    rows = [{**context, **item, "clicked": int(rng.random() < 0.3)} for context, item in zip(*sides, strict=True)]
    lines = [[*rows[0]], *([*row.values()] for row in rows)]
    folder.mkdir(parents=True)
    (folder / "clicks.csv").write_text("".join(",".join(map(str, line)) + "\n" for line in lines), encoding="utf-8")
