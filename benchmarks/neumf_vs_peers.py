"""Training speed of NeuMF beside RecBole's: same rows, sizes, batch and threads, in turns, in one run.

    python benchmarks/neumf_vs_peers.py [--data PREPARED] [--threads 1] [--rounds 3] [--seconds 20]

A sample is a row that the model trains on, drawn negatives included. The clock runs over everything a training step
takes (choosing rows, drawing negatives, forward, backward, optimizer) after the first batches; set-up is left out.
RecBole needs older libraries, so it runs in an environment of its own, made once in `--environment`.

Each measurement is a process of its own that this file starts with `--measure`: on that side it imports nothing of
recspec but what it measures, and under RecBole's interpreter nothing of recspec at all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {"factors": 64, "layers": [256, 256, 128, 64], "dropout": 0.5, "negatives": 4}
"""The published sizes (He et al. 2017 in the form published for MovieLens 20M)."""

LEARNING_RATE = 0.0045
WARM_UP = 5  # batches

REQUIREMENTS = ("recbole==1.2.1", "numpy==1.26.4", "pandas==2.2.3", "scipy==1.11.4")
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

DIFFERENCES = (
    "recspec drops units after every hidden ReLU (448 a sample), RecBole at the input of every linear layer (640)",
    "RecBole draws a negative anew when the user acted on it; recspec does not unless asked, and is measured both ways",
    "recspec's command line tells glibc to keep freed memory; RecBole runs with the allocator as it is",
)


def main() -> None:
    """Measure everybody in turns, print a table, write JSON."""
    arguments = _arguments()
    if arguments.measure:
        given = json.loads(arguments.measure)
        print(json.dumps(MEASURES[given.pop("who")](**given)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        report = compare(arguments, Path(scratch))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {arguments.out}")


def compare(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All measurements of a run."""
    from recspec import machine
    from recspec.bench import interactions_like_ml_1m
    from recspec.feature_spec import FeatureSpec

    peer = peer_python(arguments.environment)
    spec = FeatureSpec.load(arguments.data) if arguments.data else interactions_like_ml_1m(scratch / "data")
    rows = write_atomic_file(spec, scratch / "atomic")
    common = {"batch_size": arguments.batch_size, "seconds": arguments.seconds, "threads": arguments.threads}
    contenders: dict[str, tuple[str, dict[str, Any]]] = {
        "recspec": (sys.executable, {"who": "recspec", "data": str(spec.folder.resolve()), "reject": False, **common}),
        "recspec, rejecting": (
            sys.executable,
            {"who": "recspec", "data": str(spec.folder.resolve()), "reject": True, **common},
        ),
        "RecBole": (str(peer), {"who": "recbole", "data": str(scratch / "atomic"), **common}),
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for turn in range(arguments.rounds):
        for name, (python, measure) in contenders.items():
            found[name].append(_measured(python, measure))
            print(f"round {turn + 1}: {name} {found[name][-1]['samples_per_second']:,.0f} samples/s", file=sys.stderr)
    summary = {name: _summary(runs) for name, runs in found.items()}
    _print_table(summary)
    return {
        "what": "NeuMF training, samples/s with drawn negatives included",
        "sizes": SIZES,
        "batch_size": arguments.batch_size,
        "threads": arguments.threads,
        "data": spec.metadata.get("dataset", "made up in ml-1m's shape"),
        "rows": rows,
        "results": summary,
        "ratio": round(summary["recspec"]["samples_per_second"] / summary["RecBole"]["samples_per_second"], 2),
        "ratio_per_cpu_second": round(
            summary["recspec"]["samples_per_cpu_second"] / summary["RecBole"]["samples_per_cpu_second"], 2
        ),
        "runs": found,
        "differences": DIFFERENCES,
        "machine": machine.describe(),
        "load_average": os.getloadavg()[0],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
    }


def peer_python(folder: Path) -> Path:
    """The interpreter of RecBole's environment, which is made where there is none."""
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.is_file():
        return python
    print(f"making RecBole's environment in {folder}", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    if subprocess.run([*pip, TORCH]).returncode:
        subprocess.run([*pip, TORCH, "--index-url", CPU_INDEX], check=True)
    subprocess.run([*pip, *REQUIREMENTS], check=True)
    ready.touch()
    return python


def write_atomic_file(spec: Any, folder: Path) -> int:
    """The training split as RecBole reads it: `ncf/ncf.inter`; gives its rows."""
    import numpy as np

    from recspec.storage import open_split

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


def measure_recspec(data: str, *, reject: bool, batch_size: int, seconds: float, threads: int) -> dict[str, Any]:
    """This project, by the steps of its own training run."""
    import torch

    from recspec.bench import matrix_rate
    from recspec.distributed import Ranks
    from recspec.feature_spec import FeatureSpec
    from recspec.machine import keep_freed_memory
    from recspec.models.neumf import NeuMFSettings
    from recspec.train import TrainingRun, TrainSettings, arithmetic

    keep_freed_memory()
    torch.set_num_threads(threads)
    sizes = {name: SIZES[name] for name in ("factors", "layers", "dropout")}
    settings = TrainSettings(
        batch_size=batch_size,
        negatives=SIZES["negatives"],
        reject_positives=reject,
        learning_rate=LEARNING_RATE,
        tensorboard=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = TrainingRun(
            "neumf",
            FeatureSpec.load(data),
            Path(folder) / "run",
            settings,
            NeuMFSettings.model_validate(sizes),
            Ranks(),
        )

        with arithmetic(run.precision, settings.deterministic):
            rate = matrix_rate(run.precision, torch.device("cpu"))
            clock = _Clock(seconds)
            over = False
            while not over:
                for _ in run.epoch():
                    over = clock.tick(run.progress.samples)
                    if over:
                        break
                run.progress.epoch, run.progress.batch = run.progress.epoch + 1, 0
            rate = (rate + matrix_rate(run.precision, torch.device("cpu"))) / 2
    weights = sum(module.weight.numel() for module in run.model.modules() if isinstance(module, torch.nn.Linear))
    return {
        **clock.result(),
        "parameters": run.model.num_parameters(),
        "precision": run.precision,
        "torch": torch.__version__,
        "matrix_rate": rate,
        "share_of_matrix_rate": 6 * weights * clock.result()["samples_per_second"] / rate,
    }


def measure_recbole(data: str, *, batch_size: int, seconds: float, threads: int) -> dict[str, Any]:
    """RecBole, by its own trainer's epoch over its own loader, which is stopped when the time is over."""
    import torch
    from recbole.config import Config  # type: ignore[import-not-found]
    from recbole.data import create_dataset, data_preparation  # type: ignore[import-not-found]
    from recbole.model.general_recommender import NeuMF  # type: ignore[import-not-found]
    from recbole.trainer import Trainer  # type: ignore[import-not-found]
    from recbole.utils import init_seed  # type: ignore[import-not-found]

    torch.set_num_threads(threads)
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
        "train_batch_size": batch_size,  # RecBole too counts negatives in it
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
    clock = _Clock(seconds)

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
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {**clock.result(), "parameters": parameters, "precision": "fp32", "torch": torch.__version__}


MEASURES: dict[str, Callable[..., dict[str, Any]]] = {"recspec": measure_recspec, "recbole": measure_recbole}


class _Clock:
    """Time and samples between the end of the warm-up and the first batch that ends after `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.batches = seconds, 0
        self.first = self.last = (0.0, 0.0, 0)

    def tick(self, samples: int) -> bool:
        """A batch has been trained on, `samples` in all so far; tells whether the time is over."""
        self.batches += 1
        self.last = (time.perf_counter(), time.process_time(), samples)
        if self.batches == WARM_UP:
            self.first = self.last
        return self.is_over

    @property
    def is_over(self) -> bool:
        return self.batches > WARM_UP and self.last[0] - self.first[0] >= self.seconds

    def result(self) -> dict[str, Any]:
        wall, cpu, samples = (last - first for last, first in zip(self.last, self.first, strict=True))
        return {
            "samples": samples,
            "batches": self.batches - WARM_UP,
            "seconds": wall,
            "samples_per_second": samples / wall,
            "samples_per_cpu_second": samples / cpu,
        }


# --- around the measurements -----------------------------------------------------------------------------------------


def _measured(python: str, measure: dict[str, Any]) -> dict[str, Any]:
    """What a process of its own says of one contender."""
    threads = str(measure["threads"])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # For both sides, as recspec's command line has it: threads that wait don't spin beside other work.
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000"),
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        "PYTHONWARNINGS": "ignore",
    }
    with tempfile.TemporaryDirectory() as folder:  # RecBole leaves logs and checkpoints where it runs
        done = subprocess.run(
            [python, str(Path(__file__).resolve()), "--measure", json.dumps(measure)],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, and the slowest and fastest."""
    speeds = [run["samples_per_second"] for run in runs]
    summary = {
        "samples_per_second": round(statistics.median(speeds)),
        "slowest": round(min(speeds)),
        "fastest": round(max(speeds)),
        "samples_per_cpu_second": round(statistics.median(run["samples_per_cpu_second"] for run in runs)),
        **{name: runs[0][name] for name in ("parameters", "precision", "torch")},
    }
    shares = [run["share_of_matrix_rate"] for run in runs if "share_of_matrix_rate" in run]
    return {**summary, "share_of_matrix_rate": round(statistics.median(shares), 3)} if shares else summary


def _print_table(summary: dict[str, dict[str, Any]]) -> None:
    base = summary["RecBole"]
    print(f"{'':20}{'samples/s':>12}{'slowest':>12}{'fastest':>12}{'ratio':>8}{'per CPU second':>16}{'ratio':>8}")
    for name, row in summary.items():
        print(
            f"{name:20}{row['samples_per_second']:12,}{row['slowest']:12,}{row['fastest']:12,}"
            f"{row['samples_per_second'] / base['samples_per_second']:8.2f}{row['samples_per_cpu_second']:16,}"
            f"{row['samples_per_cpu_second'] / base['samples_per_cpu_second']:8.2f}"
        )
    for difference in DIFFERENCES:
        print(f"  - {difference}")


def _commit() -> str | None:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True)
    return done.stdout.strip() or None


def _arguments() -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="a prepared dataset; made-up rows in ml-1m's shape without")
    parser.add_argument("--environment", type=Path, default=cache / "recspec" / "peers" / "recbole")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=65536, help="negatives included")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "neumf_vs_peers.json")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
