"""Quality does not depend on what makes training fast: one recipe in several precisions and ways to update tables.

Real data, the same recipe, several seeds: the metric on test of each setting, its mean and spread over the seeds, and
whether the mean lies among the seeds of fp32. Below that, unless only some settings were asked for, what
`train.deterministic` costs, and whether two of its runs give the same weights, byte for byte.

    RECSPEC_DATA=FOLDER python benchmarks/stress/precisions.py [--tasks neumf wide_deep] [--seeds 0 1 2]
    python benchmarks/stress/precisions.py --tasks din din_ml_100k --settings fp32 bf16 --seeds 0 1 2 3 4

What the report knows of other tasks stays. `--add` keeps the measured tasks' runs, too, and makes the missing ones:
`--add --settings fp32 --seeds 3 4` tells more of the spread.

Sparse updates with Adam are lazy (docs/training.md): another algorithm, which `auto` therefore never takes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from _side_by_side import Found, where_and_when, write

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Task:
    """A recipe on a real data set, and the metric on test that it is judged by."""

    model: str
    dataset: str
    raw: str
    recipe: str
    protocol: str
    metric: str
    prepare: Mapping[str, object]
    train: Mapping[str, object] = field(default_factory=dict)
    """What differs from the recipe, so that all seeds fit in half an hour; the report tells it."""


TASKS = {
    "neumf": Task("neumf", "movielens", "movielens-100k", "neumf-ml-latest-small.yaml", "sampled", "ndcg@10", {}),
    "wide_deep": Task("wide_deep", "adult", "adult", "wide-deep-adult.yaml", "rows", "auc", {}),
    "dlrm": Task(
        "dlrm",
        "criteo",
        "criteo-kaggle/train_first80k.tsv",
        "dlrm-criteo-sample.yaml",
        "rows",
        "auc",
        {"rows": [50000, 10000, 20000], "min_count": 2, "buckets": True, "scale": True},
    ),
    "dcnv2": Task(
        "dcnv2",
        "criteo",
        "criteo-kaggle/train_first80k.tsv",
        "dcnv2-criteo-sample.yaml",
        "rows",
        "auc",
        {"rows": [50000, 10000, 20000], "min_count": 2, "buckets": True, "scale": True},
    ),
    "din": Task("din", "amazon", "amazon-beauty", "din-amazon-beauty.yaml", "rows", "auc", {"min_reviews": 5}),
    "sim": Task("sim", "amazon", "amazon-beauty", "sim-amazon-beauty.yaml", "rows", "auc", {"min_reviews": 5}),
    "dien": Task(
        "dien", "amazon", "amazon-beauty", "dien-amazon-beauty.yaml", "rows", "auc", {"min_reviews": 5}, {"epochs": 3}
    ),
    **{
        f"{model}_ml_100k": Task(
            model,
            "movielens",
            "movielens-100k",
            recipe,
            "rows",
            "auc",
            {"history": history, "prefixes": 50, "num_negatives": 50, "min_history": 1},
            {"epochs": 8},
        )
        for model, recipe, history in (
            ("din", "din-ml-1m.yaml", 20),
            ("dien", "din-ml-1m.yaml", 20),
            ("sim", "sim-ml-1m.yaml", 250),
        )
    },
    "sasrec": Task("sasrec", "table", "amazon-s3rec/Beauty.txt", "sasrec-amazon-beauty.yaml", "full", "ndcg@10", {}),
    "sasrec_ml_100k": Task("sasrec", "movielens", "movielens-100k", "sasrec-amazon-beauty.yaml", "full", "ndcg@10", {}),
}

BASE = "fp32"
SETTINGS: dict[str, Mapping[str, object]] = {
    BASE: {"precision": "fp32"},
    "tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "sparse updates always": {"precision": "fp32", "sparse_gradients": "always"},
    "sparse updates never": {"precision": "fp32", "sparse_gradients": "never"},
    "compile off": {"precision": "fp32", "compile": False},
    "compile on": {"precision": "fp32", "compile": True},
}


def main() -> None:
    """Every model, every setting, every seed, and the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=sorted(TASKS), default=["neumf", "wide_deep", "dlrm"])
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), help="all but `compile on` by default")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--add", action="store_true", help="keep the tasks' runs in the report, make the others")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "precisions.json")
    arguments = parser.parse_args()
    chosen = arguments.settings or [name for name in SETTINGS if name != "compile on"]
    if BASE not in chosen:
        chosen = [BASE, *chosen]

    import torch

    from recspec.base.machine import keep_freed_memory

    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    root = Path(os.environ.get("RECSPEC_DATA", REPOSITORY.parent / "shared" / "data"))
    known = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.tasks:
            task = TASKS[name]
            if not (root / task.raw).exists():
                print(f"{name}: {root / task.raw} is not there; set RECSPEC_DATA", file=sys.stderr)
                continue
            before = known.get(name, {}) if arguments.add else {}
            at, costs = Path(scratch) / name, not arguments.settings
            found = _of_task(name, task, root, chosen, arguments.seeds, before, at, costs=costs)
            known[name] = {"threads": arguments.threads, **found, **where_and_when()}
            write(known, arguments.out)  # after each task: a later one may take hours, and earlier calls' ones stay


def _of_task(
    title: str,
    task: Task,
    root: Path,
    chosen: Sequence[str],
    seeds: Sequence[int],
    before: Mapping[str, Any],
    scratch: Path,
    *,
    costs: bool,
) -> dict[str, Any]:
    from recspec.base.errors import SettingsError

    told = {
        "data": task.raw,
        "recipe": task.recipe,
        "instead of the recipe's": dict(task.train),
        "metric": f"{task.protocol}/{task.metric}",
    }
    if any(before.get(name, value) != value for name, value in told.items()):
        raise SystemExit(f"{title}: the report's runs are of another task; leave --add out")
    spec = _prepare(task, root, scratch / "data")
    found: dict[str, dict[int, Found]] = {name: _known(before[name]) for name in SETTINGS if name in before}
    refused: dict[str, str] = dict(before.get("refused", {}))
    for name in chosen:
        runs = found.get(name, {})
        try:
            for seed in [seed for seed in seeds if seed not in runs]:
                at = scratch / f"{name}-{seed}".replace(" ", "-")
                runs[seed] = _run(task, spec, at, {**SETTINGS[name], "seed": seed})
            found[name] = runs
        except SettingsError as error:  # what the recipe's optimizer does not allow
            refused[name] = str(error)
    summary = {name: _summary(found[name], found[BASE]) for name in SETTINGS if name in found}
    _show(f"{title} on {task.raw}, test {told['metric']}", summary, refused)
    asked = {"deterministic": before["deterministic"]} if "deterministic" in before else {}
    if not asked and costs:
        asked = {"deterministic": _deterministic(task, spec, scratch)}
        print(asked)
    return {**told, **summary, "refused": refused, **asked}


def _known(row: Mapping[str, Any]) -> dict[int, Found]:
    """A setting's runs as the report has them, by seed; of their times it knows the mean."""
    pairs = zip(row["seeds"], row["values"], strict=True)
    return {seed: {"value": value, "seconds": row["seconds"]} for seed, value in pairs}


def _show(title: str, summary: Mapping[str, Found], refused: Mapping[str, str]) -> None:
    print(f"\n{title}")
    print(f"{'':24}{'mean':>10}{'lowest':>10}{'highest':>10}{'from fp32':>12}{'within':>8}{'seeds':>7}{'seconds':>9}")
    for name, row in summary.items():
        print(
            f"{name:24}{row['mean']:10.4f}{row['lowest']:10.4f}{row['highest']:10.4f}{row['from fp32']:+12.4f}"
            f"{'yes' if row['within the seeds of fp32'] else 'NO':>8}{len(row['seeds']):7}{row['seconds']:9.1f}"
        )
    for name, why in refused.items():
        print(f"{name}: {why}")


def _prepare(task: Task, root: Path, out: Path) -> Any:
    from recspec.base import config
    from recspec.data.prepare import PrepareContext
    from recspec.datasets import DATASETS
    from recspec.feature_spec import FeatureSpec

    dataset = DATASETS[task.dataset]
    dataset.prepare(PrepareContext(root / task.raw, out), config.build(dataset.Settings, task.dataset, task.prepare))
    return FeatureSpec.load(out)


def _run(task: Task, spec: Any, run: Path, chosen: Mapping[str, object]) -> Found:
    """Train and evaluate on test; the metric, and how long training took."""
    from recspec.bundle import folder as bundle
    from recspec.evaluation import evaluate

    result = _train(task, spec, run, chosen)
    report = evaluate(bundle.load(run), spec, "test", protocols=(task.protocol,))
    value = report.metrics[task.protocol][task.metric]
    print(f"{task.model} {dict(chosen)}: {value:.4f}, {result.seconds:.1f} s", file=sys.stderr)
    return {"value": value, "seconds": result.seconds}


def _train(task: Task, spec: Any, run: Path, chosen: Mapping[str, object]) -> Any:
    from recspec.base import config
    from recspec.models import MODELS
    from recspec.training.loop import train
    from recspec.training.settings import TrainSettings

    recipe = config.load_recipe(REPOSITORY / "recipes" / task.recipe)
    return train(
        task.model,
        spec,
        run,
        settings=config.build(TrainSettings, task.model, recipe.train, task.train, {"tensorboard": False}, chosen),
        model_settings=config.build(MODELS[task.model].Settings, task.model, recipe.settings),
    )


def _summary(by_seed: Mapping[int, Found], base: Mapping[int, Found]) -> Found:
    """Of a setting's runs; what separates them from fp32 is the mean over the seeds that both have."""
    runs = [by_seed[seed] for seed in sorted(by_seed)]
    values = [run["value"] for run in runs]
    mean = statistics.mean(values)
    of_base = [run["value"] for run in base.values()]
    return {
        "seeds": sorted(by_seed),
        "values": values,
        "mean": mean,
        "lowest": min(values),
        "highest": max(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else None,
        "from fp32": statistics.mean(by_seed[seed]["value"] - base[seed]["value"] for seed in by_seed if seed in base),
        "within the seeds of fp32": min(of_base) <= mean <= max(of_base),
        "seconds": statistics.mean(run["seconds"] for run in runs),
    }


def _deterministic(task: Task, spec: Any, scratch: Path) -> Found:
    """One epoch with and without `train.deterministic`, in turns: the cost, and whether its runs give equal weights."""
    shared = {"precision": "fp32", "epochs": 1, "seed": 0, "evaluate_every": 1}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    weights: dict[bool, list[str]] = {False: [], True: []}
    for turn in range(2):
        for asked in (False, True):
            run = scratch / f"deterministic-{asked}-{turn}"
            started = time.process_time()
            _train(task, spec, run, {**shared, "deterministic": asked})
            seconds[asked].append(time.process_time() - started)
            file = run / "bundle" / "weights.safetensors"
            weights[asked].append(hashlib.sha256(file.read_bytes()).hexdigest())
    return {
        "equal_weights": len(set(weights[True])) == 1,
        "equal_weights_without": len(set(weights[False])) == 1,
        "cpu_seconds": min(seconds[True]),
        "cpu_seconds_without": min(seconds[False]),
        "ratio": round(min(seconds[True]) / min(seconds[False]), 3),
    }


if __name__ == "__main__":
    main()
