"""One process beside two: bytes that each reads, losses of the first steps, log loss over seeds, samples/s.

    python benchmarks/ranks.py [--rows 100000] [--seeds 3]

DLRM learns from made-up clicks in split-binary files for two epochs, with rows held in memory and streamed, in fp32 and
bf16.
Two ranks need two free cores for their speed; the other columns do not depend on that. Ranks exchange gradients at each
step, so speed depends on how much a step computes: larger models and batches follow at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from _side_by_side import where_and_when
from recspec.data.prepare import PrepareContext
from recspec.data.storage import transcode
from recspec.datasets import DATASETS
from recspec.feature_spec import FeatureSpec
from recspec.loading import join
from recspec.models import MODELS
from recspec.training import TrainSettings, train

OUT = Path(__file__).parent / "results" / "ranks.json"
STEPS = 50
"""Steps whose losses are compared."""

BUDGETS = {"memory": "4GB", "streamed": "1MB"}
DEEP = {"hidden": [1024] * 5}
SPEEDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "wide_deep, 5 x 1024, bf16": ("wide_deep", "bf16", DEEP),
    "wide_deep, 5 x 1024, fp32": ("wide_deep", "fp32", DEEP),
    "dlrm, fp32": ("dlrm", "fp32", {"dropout": 0.0}),
}
"""Models, precisions and settings whose speed alone is measured, with batches of 8,192."""


def main() -> None:
    """Train on one process and on two, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.seeds)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        synthetic = DATASETS["synthetic"]
        settings = synthetic.Settings(kind="clicks", num_rows=arguments.rows, num_users=2000, num_items=500)  # type: ignore[call-arg]
        synthetic.prepare(PrepareContext(Path(), folder / "made"), settings)
        transcode(FeatureSpec.load(folder / "made"), folder / "data", "split_binary")
        large = synthetic.Settings(kind="clicks", num_rows=200_000, num_users=20_000, num_items=5000)  # type: ignore[call-arg]
        synthetic.prepare(PrepareContext(Path(), folder / "large"), large)
        for world_size in (1, 2):
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                f"{world_size}",
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                "localhost:0",
                __file__,
                "--worker",
                str(folder),
                "--seeds",
                str(arguments.seeds),
            ]
            subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        found = {size: json.loads((folder / f"{size}.json").read_text()) for size in (1, 2)}
    speeds = {case: (found[1].pop(case), found[2].pop(case)) for case in SPEEDS}
    report: dict[str, Any] = {
        **where_and_when(),
        "rows": arguments.rows,
        "seeds": arguments.seeds,
        "cases": _rows(found),
    }
    report["speeds"] = {
        case: {"samples_per_second": [round(one), round(two)], "speed_of_two": round(two / one, 2)}
        for case, (one, two) in speeds.items()
    }
    for case, row in (*report["cases"].items(), *report["speeds"].items()):
        print(case, json.dumps(row))
    OUT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def work(folder: Path, seeds: int) -> None:
    """What each rank does: every case with every seed."""
    torch.set_num_threads(1)
    spec, found = FeatureSpec.load(folder / "data"), dict[str, Any]()
    with join("cpu") as ranks:
        for rows, budget in BUDGETS.items():
            for precision in ("fp32", "bf16"):
                for seed in range(seeds):
                    run = folder / f"{ranks.world_size}-{rows}-{precision}-{seed}"
                    settings = TrainSettings.model_validate(
                        {
                            "epochs": 2,
                            "batch_size": 1024,
                            "optimizer": "adagrad",
                            "learning_rate": 0.05,
                            "log_every": 1,
                            "precision": precision,
                            "memory_budget": budget,
                            "tensorboard": False,
                            "seed": seed,
                            "keep_best": False,
                            "checkpoint_minutes": 1000,
                        }
                    )
                    own = MODELS["dlrm"].Settings.model_validate({"dropout": 0.0})
                    train("dlrm", spec, run, settings=settings, model_settings=own, ranks=ranks)
                    if ranks.is_first:
                        events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
                        found.setdefault(f"{rows}, {precision}", []).append(_figures(events))
        large = FeatureSpec.load(folder / "large")
        for case, (model, precision, given) in SPEEDS.items():
            run = folder / f"{ranks.world_size}-{case}"
            settings = TrainSettings.model_validate(
                {
                    "epochs": 2,
                    "batch_size": 8192,
                    "learning_rate": 0.01,
                    "precision": precision,
                    "tensorboard": False,
                    "keep_best": False,
                    "checkpoint_minutes": 1000,
                }
            )
            own = MODELS[model].Settings.model_validate(given)
            train(model, large, run, settings=settings, model_settings=own, ranks=ranks)
            if ranks.is_first:
                found[case] = _epoch(run)["samples_per_second"]
        if ranks.is_first:
            (folder / f"{ranks.world_size}.json").write_text(json.dumps(found))


def _epoch(run: Path) -> dict[str, Any]:
    """The last epoch of a run's log."""
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    epochs: list[dict[str, Any]] = [event for event in events if event["event"] == "epoch"]
    return epochs[-1]


def _figures(events: list[dict[str, Any]]) -> dict[str, Any]:
    epoch = [event for event in events if event["event"] == "epoch"][-1]
    return {
        "losses": [event["loss"] for event in events if event["event"] == "step"][:STEPS],
        "log_loss": epoch["metrics"]["rows"]["log_loss"],
        "bytes_read": epoch["bytes_read"],
        "samples_per_second": epoch["samples_per_second"],
    }


def _rows(found: dict[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    rows = {}
    for case, one in found[1].items():
        two = found[2][case]
        pairs = [zip(a["losses"], b["losses"], strict=True) for a, b in zip(one, two, strict=True)]
        rows[case] = {
            "bytes_read_of_one": one[0]["bytes_read"],
            "bytes_read_of_two": two[0]["bytes_read"],
            "largest_difference_of_losses": max(abs(a - b) for pair in pairs for a, b in pair),
            "log_loss_of_one": [each["log_loss"] for each in one],
            "log_loss_of_two": [each["log_loss"] for each in two],
            "speed_of_two": statistics.median(each["samples_per_second"] for each in two)
            / statistics.median(each["samples_per_second"] for each in one),
        }
    return rows


if __name__ == "__main__":
    main()
