"""Defaults of models that rank items, beside their recipes and tuned classics, on many sets of interactions.

    python benchmarks/stress/defaults_topk.py WORK prepare --raw RAW [--sets ml-100k gowalla-3k]
    python benchmarks/stress/defaults_topk.py WORK classics [--sets ...]
    python benchmarks/stress/defaults_topk.py WORK train PANEL [--sets ...] [--seed 0]
    python benchmarks/stress/defaults_topk.py WORK table [--models ...]

RAW holds the publishers' files, a folder each; without `--sets`, all sets whose files are there. Each user's last item
is for test and the last but one for valid. Settings and epochs are chosen on valid by NDCG@10 among all items; test is
only reported. PANEL is a YAML file: experiment -> assignments as in `--set`, with `model` and `recipe` beside them:

    new: {model: neumf}
    recipe: {model: neumf, recipe: recipes/neumf-ml-1m.yaml, set: [train.metric=full/ndcg@10]}

Results are lines of `WORK/results.jsonl`. An experiment whose line is there is not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from recspec.base import config
from recspec.base.machine import keep_freed_memory
from recspec.bundle import folder as bundle
from recspec.data.prepare import PrepareContext
from recspec.datasets import DATASETS
from recspec.evaluation import evaluate_model, positives
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS, FittedItemModel, Interactions
from recspec.training import TrainSettings, train

PROTOCOLS = ("sampled", "full")
METRIC = "full/ndcg@10"
Events = NDArray[np.int64]
"""(E, 3) user, item and place in time of each event."""

GRIDS: Mapping[str, Mapping[str, Sequence[float]]] = {
    "popularity": {},
    "item_knn": {"k": (20, 100), "shrink": (0.0, 10.0, 50.0)},
    "ease": {"l2": (10.0, 30.0, 100.0, 300.0)},
    "ials": {"l2": (0.003, 0.01, 0.03), "unobserved_weight": (0.01, 0.1, 0.5)},
}
"""Settings of the classics; `l2` of EASE is in multiples of `scale`."""


# --- the sets --------------------------------------------------------------------------------------------------------


def _lines(path: Path, separator: str, *, skip: int = 0) -> Events:
    """Users, items and times of a text file of columns."""
    rows = [line.split(separator) for line in path.read_text("latin-1").splitlines()[skip:]]
    return np.array([(row[0], row[1], row[-1]) for row in rows], dtype=np.float64).astype(np.int64)


def _sequences(path: Path, *, shuffled: bool = False) -> Events:
    """Events of a file with a user and their items in each line; `shuffled` for items that stand in no order."""
    rng = np.random.default_rng(0)
    parts = []
    for line in path.read_text("ascii").splitlines():
        user, *items = map(int, line.split())
        if shuffled:
            rng.shuffle(items)
        parts.append(np.stack([np.full(len(items), user), items, np.arange(len(items))], axis=1))
    return np.concatenate(parts)


def _of_users(events: Events, num_users: int, *, seed: int = 0) -> Events:
    """The events of some users, drawn uniformly."""
    users = np.random.default_rng(seed).permutation(np.unique(events[:, 0]))[:num_users]
    return events[np.isin(events[:, 0], users)]


def _of_items(events: Events, num_items: int) -> Events:
    """The events with the most popular items."""
    items, counts = np.unique(events[:, 1], return_counts=True)
    return events[np.isin(events[:, 1], items[np.argsort(-counts, kind="stable")[:num_items]])]


def _core(events: Events, least: int) -> Events:
    """The largest part in which every user and every item has `least` events."""
    while True:
        keep = np.ones(len(events), dtype=bool)
        for column in (0, 1):
            _, which, counts = np.unique(events[:, column], return_inverse=True, return_counts=True)
            keep &= counts[which] >= least
        if keep.all():
            return events
        events = events[keep]


def _ml_1m(raw: Path) -> Events:
    return _lines(raw / "movielens-1m" / "ratings.dat", "::")


def _beauty(raw: Path) -> Events:
    return _sequences(raw / "amazon-s3rec" / "Beauty.txt")


def _sports(raw: Path) -> Events:
    return _sequences(raw / "amazon-s3rec" / "Sports_and_Outdoors.txt")


def _grocery(raw: Path) -> Events:
    return _lines(raw / "amazon-grocery" / "train.csv", "\t", skip=1)


def _gowalla(raw: Path) -> Events:
    return _sequences(raw / "gowalla-lightgcn" / "train.txt", shuffled=True)


def _music(raw: Path) -> Events:
    rows = [json.loads(line) for line in (raw / "amazon-musical-instruments" / "Musical_Instruments_5.json").open()]
    columns = [np.unique([row[name] for row in rows], return_inverse=True)[1] for name in ("reviewerID", "asin")]
    return np.stack([*columns, [row["unixReviewTime"] for row in rows]], axis=1)


SETS: Mapping[str, Callable[[Path], Events] | Sequence[str]] = {
    "ml-100k": lambda raw: _lines(raw / "movielens-100k" / "u.data", "\t"),
    "ml-small": lambda raw: _lines(raw / "movielens-latest-small" / "ratings.csv", ",", skip=1),
    "ml-1m-1500": lambda raw: _of_users(_ml_1m(raw), 1500),
    "ml-1m-thin": lambda raw: _core(_thinned(_ml_1m(raw), 0.06), 3),
    "music": _music,
    "grocery-4k": lambda raw: _core(_of_users(_grocery(raw), 4000), 3),
    "beauty-dense": lambda raw: _core(_of_users(_of_items(_beauty(raw), 2500), 8000), 4),
    "beauty-4k": lambda raw: _core(_of_users(_beauty(raw), 4000), 2),
    "sports-core": lambda raw: _core(_of_users(_sports(raw), 14000), 5),
    "gowalla-3k": lambda raw: _core(_of_users(_gowalla(raw), 3000), 4),
    "gowalla-core": lambda raw: _core(_of_users(_of_items(_gowalla(raw), 4000), 9000), 10),
    "made-dense": ("num_users=800", "num_items=500", "num_rows=40000"),
    "made-sparse": ("num_users=3000", "num_items=1500", "num_rows=30000", "seed=1"),
    "beauty": _beauty,
    "ml-1m": _ml_1m,
}
"""Name -> how its events are read, or the settings of made-up ones."""

LARGE = ("beauty", "ml-1m")
"""Sets that are left out unless asked for: they take minutes an experiment."""


def _thinned(events: Events, share: float) -> Events:
    """A share of the events, drawn uniformly."""
    return events[np.random.default_rng(0).random(len(events)) < share]


def prepare(name: str, raw: Path, folder: Path) -> FeatureSpec:
    """The prepared set."""
    given = SETS[name]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.csv"
        if callable(given):
            events, kind, values = given(raw), "table", ["num_negatives=99"]
            np.savetxt(file, events, fmt="%d", delimiter=",", header="user_id,item_id,timestamp", comments="")
        else:
            kind, values = "synthetic", ["kind=interactions", "num_negatives=99", *given]
        chosen = DATASETS[kind]
        settings = config.build(chosen.Settings, "--set", config.parse_assignments(values))
        chosen.prepare(PrepareContext(file, folder, memory_limit="3GB", threads=1), settings)
    return FeatureSpec.load(folder)


def facts(spec: FeatureSpec) -> dict[str, Any]:
    """The size and the density of a set's train split."""
    known = positives(spec, ["train"])
    users, items = int(np.count_nonzero(np.diff(known.offsets))), int(np.count_nonzero(known.counts))
    return {
        "rows": known.num_pairs,
        "users": users,
        "items": items,
        "catalogue": known.num_items - 1,
        "rows_per_user": known.num_pairs / users,
        "rows_per_item": known.num_pairs / items,
        "density": known.num_pairs / users / items,
        "scale": known.scale,
    }


# --- experiments -----------------------------------------------------------------------------------------------------


class Results:
    """The lines of a file, each written once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = [json.loads(line) for line in path.open()] if path.exists() else []
        self.keys = {line["key"] for line in self.lines}

    def add(self, key: Mapping[str, object], measure: Callable[[], dict[str, Any]]) -> None:
        """Measure and write, unless there is a line for the key."""
        digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
        if digest in self.keys:
            return
        started = time.monotonic()
        line = {"key": digest, **key, **measure(), "seconds": round(time.monotonic() - started, 1)}
        self.keys.add(digest)
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")
        full = line["valid"]["full"], line["test"]["full"]
        said = "  ".join(f"{each['ndcg@10'][0]:.4f} {each['hit_rate@10'][0]:.4f}" for each in full)
        print(
            f"{line['set']:13}{line['label']:34}{said}  epoch {line.get('best_epoch', '-')}  {line['seconds']} s",
            flush=True,
        )


def measure(model: Any, spec: FeatureSpec) -> dict[str, Any]:
    """HR@10 and NDCG@10 with their standard errors, on valid and test."""
    found: dict[str, Any] = {}
    for split in ("valid", "test"):
        evaluated = evaluate_model(model, spec, split, protocols=PROTOCOLS)
        found[split] = {
            of: {
                name: (evaluated.metrics[of][name], evaluated.standard_errors[of][name])
                for name in ("hit_rate@10", "ndcg@10")
            }
            for of in PROTOCOLS
        }
    return found


def run_classics(name: str, spec: FeatureSpec, results: Results, only: Sequence[str]) -> None:
    """Every classic at every point of its grid."""
    known = positives(spec, ["train"])
    for classic in only:
        grid = GRIDS[classic]
        for values in itertools.product(*grid.values()):
            settings = dict(zip(grid, values, strict=True))
            own = {**settings, "l2": settings["l2"] * known.scale} if classic == "ease" else settings
            label = " ".join([classic, *(f"{key}={value:g}" for key, value in settings.items())])
            key = {"set": name, "model": classic, "label": label, "settings": settings}
            results.add(key, partial(_of_classic, classic, own, known, spec))


def _of_classic(classic: str, settings: Mapping[str, Any], known: Interactions, spec: FeatureSpec) -> dict[str, Any]:
    kind = MODELS[classic]
    model = kind(spec, kind.Settings(**settings))
    assert isinstance(model, FittedItemModel)
    model.fit(known)
    return measure(model, spec)


def run_training(
    name: str, spec: FeatureSpec, label: str, trial: Mapping[str, Any], seed: int, results: Results
) -> None:
    """One experiment of a panel, with the value on valid after each evaluation."""
    recipe = config.load_recipe(trial["recipe"]) if "recipe" in trial else config.Recipe()
    sections: dict[str, type[config.Settings]] = {"settings": MODELS[trial["model"]].Settings, "train": TrainSettings}
    given = config.assign(config.parse_assignments(trial.get("set", ())), sections)
    own = {**recipe.settings, **given["settings"]}
    how = {
        "metric": METRIC,
        "tensorboard": False,
        "checkpoint_minutes": 60,
        "seed": seed,
        **recipe.train,
        **given["train"],
    }
    key = {"set": name, "model": trial["model"], "label": label, "settings": own, "train": how}

    def trained() -> dict[str, Any]:
        trace: list[tuple[float, float]] = []

        def follow(event: Any) -> None:
            if event["event"] == "epoch" and event["metrics"]:
                of, _, metric = str(how["metric"]).partition("/")
                trace.append((event["epoch"], event["metrics"][of][metric]))

        with tempfile.TemporaryDirectory() as scratch:
            result = train(
                trial["model"],
                spec,
                Path(scratch) / "run",
                on_event=follow,
                settings=config.build(TrainSettings, "train", how),
                model_settings=config.build(MODELS[trial["model"]].Settings, "settings", own),
            )
            model = bundle.load(result.bundle).model
        return {
            **measure(model, spec),
            "trace": trace,
            "best_epoch": result.best_epoch,
            "train_seconds": result.seconds,
        }

    results.add(key, trained)


# --- the table -------------------------------------------------------------------------------------------------------


def best_on_valid(lines: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The line with the best NDCG@10 among all items on valid."""
    return max(lines, key=lambda line: line["valid"]["full"]["ndcg@10"][0], default=None)


def table(results: Results, wanted: Sequence[str]) -> Iterator[str]:
    """A line for each set and contender; a contender is a label, or a classic's best settings on valid."""
    yield f"{'set':13}{'contender':36}" + "  ".join(f"{of} HR@10        NDCG@10      " for of in PROTOCOLS)
    for name in dict.fromkeys(line["set"] for line in results.lines):
        here = [line for line in results.lines if line["set"] == name]
        chosen = [best_on_valid(line for line in here if line["model"] == classic) for classic in GRIDS]
        chosen += [line for line in here if line["label"] in wanted]
        for line in filter(None, chosen):
            values = [line["test"][of][metric] for of in PROTOCOLS for metric in ("hit_rate@10", "ndcg@10")]
            yield f"{name:13}{line['label']:36}" + "  ".join(f"{value:.4f} +-{error:.4f}" for value, error in values)


def main() -> None:
    """Run a command."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("work", type=Path)
    options.add_argument("command", choices=["prepare", "classics", "train", "table"])
    options.add_argument("panel", type=Path, nargs="?")
    options.add_argument("--raw", type=Path)
    options.add_argument("--sets", nargs="*", default=[name for name in SETS if name not in LARGE])
    options.add_argument("--models", nargs="*", default=[*GRIDS])
    options.add_argument("--labels", nargs="*", default=[])
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    asked.work.mkdir(parents=True, exist_ok=True)
    results = Results(asked.work / "results.jsonl")
    if asked.command == "table":
        print("\n".join(table(results, asked.labels)))
        return
    for name in asked.sets:
        folder = asked.work / "data" / name
        if asked.command == "prepare":
            spec = prepare(name, asked.raw, folder)
            print(name, {key: round(value, 5) for key, value in facts(spec).items()}, flush=True)
            continue
        spec = FeatureSpec.load(folder)
        if asked.command == "classics":
            run_classics(name, spec, results, asked.models)
            continue
        for label, trial in yaml.safe_load(asked.panel.read_text()).items():
            run_training(name, spec, label, trial, asked.seed, results)


if __name__ == "__main__":
    main()
