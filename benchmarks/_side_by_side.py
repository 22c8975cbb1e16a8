"""What measurements beside peers share: their environments, the clock, taking turns, medians, the table, the report.

A benchmark is a file that starts itself, once for each measurement, with `--measure` and under the interpreter of the
library that is measured. So this module imports nothing of recspec at its top: a peer's interpreter has none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

WARM_UP = 5  # batches
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

Found = dict[str, Any]
"""What one measurement gives: `samples_per_second`, `samples_per_cpu_second`, `parameters`, `torch`, more."""

Runs = dict[str, list[Found]]
"""All rounds of every contender."""


@dataclass(frozen=True)
class Contender:
    """Who is measured, by which interpreter, and what its measurement is told."""

    python: Path
    measure: Mapping[str, Any]
    """The arguments of a function of the benchmark's `MEASURES`, which `who` names."""


class Clock:
    """Time and samples between the end of the warm-up and the first batch that ends after `seconds`."""

    def __init__(self, seconds: float, warm_up: int = WARM_UP) -> None:
        self.seconds, self.warm_up, self.batches = seconds, warm_up, 0
        self.first = self.last = (0.0, 0.0, 0)

    def tick(self, samples: int) -> bool:
        """A batch has been trained on, `samples` in all so far; tells whether the time is over."""
        self.batches += 1
        self.last = (time.perf_counter(), time.process_time(), samples)
        if self.batches == self.warm_up:
            self.first = self.last
        return self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the measured time has passed."""
        return self.batches > self.warm_up and self.last[0] - self.first[0] >= self.seconds

    def result(self) -> Found:
        """Samples, batches, seconds and speeds of the time measured."""
        wall, cpu, samples = (last - first for last, first in zip(self.last, self.first, strict=True))
        return {
            "samples": samples,
            "batches": self.batches - self.warm_up,
            "seconds": wall,
            "samples_per_second": samples / wall,
            "samples_per_cpu_second": samples / cpu,
        }


def peak_memory() -> int:
    """Most memory this process has held so far, in bytes; where Linux tells, without its parent's."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text(encoding="utf-8")) if status.exists() else None
    return int(found[1]) * 1024 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- the peer's side -------------------------------------------------------------------------------------------------


def peer_python(name: str, folder: Path, requirements: Sequence[str], alone: Sequence[str] = ()) -> Path:
    """The interpreter of a peer's environment, which is made where there is none; `alone` come without dependencies."""
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.is_file():
        return python
    print(f"making {name}'s environment in {folder}", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    if subprocess.run([*pip, TORCH]).returncode:
        subprocess.run([*pip, TORCH, "--index-url", CPU_INDEX], check=True)
    subprocess.run([*pip, *requirements], check=True)
    if alone:
        subprocess.run([*pip, "--no-deps", *alone], check=True)
    ready.touch()
    return python


def environments() -> Path:
    """The folder that peers' environments are made in unless said otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "recspec" / "peers"


class TimeOver(Exception):
    """Ends a peer's `fit`, which knows epochs only."""


def clocked(optimizer: Any, batch_size: int, seconds: float, warm_up: int = WARM_UP) -> Clock:
    """A clock that ticks after every step of the optimizer, and ends the training when the time is over."""
    clock = Clock(seconds, warm_up)

    def tick(*_: object) -> None:
        if clock.tick((clock.batches + 1) * batch_size):
            raise TimeOver

    optimizer.register_step_post_hook(tick)
    return clock


def found_of_peer(clock: Clock, model: Any) -> Found:
    """What a peer's measurement found; it computes in fp32."""
    import torch

    return {
        **clock.result(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "precision": "fp32",
        "torch": torch.__version__,
        "peak_memory_bytes": peak_memory(),
    }


class Blocks:
    """In place of torch's loader: the rows of a batch by one indexing a column, as torch's could take them."""

    def __init__(self, dataset: Any, shuffle: bool, batch_size: int) -> None:
        import torch

        self.batch_size, self.num_rows = batch_size, len(dataset)
        self.order = torch.randperm if shuffle else torch.arange
        tensors = getattr(dataset, "tensors", None)
        columns, labels = tensors if tensors is not None else (dataset.x, dataset.y)
        as_tensor = torch.as_tensor
        self.columns = {n: as_tensor(c) for n, c in columns.items()} if isinstance(columns, dict) else columns
        self.labels = as_tensor(labels)

    def __len__(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        order: Any = self.order(self.num_rows)
        for rows in order.split(self.batch_size):
            labels = self.labels.index_select(0, rows)
            if isinstance(self.columns, dict):
                yield {name: column.index_select(0, rows) for name, column in self.columns.items()}, labels
            else:
                yield self.columns.index_select(0, rows), labels


# --- this project's side ---------------------------------------------------------------------------------------------


def time_training(run: Any, seconds: float, warm_up: int = WARM_UP) -> Found:
    """A training run of this project until the time is over, and what plain matrix products reach around it."""
    import torch

    from recspec.bench import matrix_rate
    from recspec.train import arithmetic

    clock, device = Clock(seconds, warm_up), torch.device("cpu")
    with arithmetic(run.precision, run.settings.deterministic):
        rate = matrix_rate(run.precision, device)
        while not clock.is_over:
            for loss in run.epoch():  # noqa: B007
                if clock.tick(run.progress.samples):
                    break
            run.progress.epoch, run.progress.batch = run.progress.epoch + 1, 0
        rate = (rate + matrix_rate(run.precision, device)) / 2
    return {
        **clock.result(),
        "parameters": run.model.num_parameters(),
        "precision": run.precision,
        "torch": torch.__version__,
        "peak_memory_bytes": peak_memory(),
        "sparse_gradients": list(run.sparse),
        "embedding_backend": run.embedding_backend,
        "loss": float(loss),
        "linear_weights": linear_weights(run.model),
        "matrix_rate": rate,
    }


def linear_weights(model: Any) -> int:
    """Weights of all linear layers."""
    import torch

    return sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))


# --- measuring -------------------------------------------------------------------------------------------------------


def start(
    arguments: argparse.Namespace,
    measures: Mapping[str, Callable[..., Found]],
    compare: Callable[[argparse.Namespace, Path], Mapping[str, Any]],
) -> None:
    """One measurement if this process was started for one, else all of them and their report."""
    if arguments.measure:
        answer(arguments.measure, measures)
        return
    with tempfile.TemporaryDirectory() as scratch:
        report = compare(arguments, Path(scratch))
    write(report, arguments.out)


def shared(arguments: argparse.Namespace) -> Found:
    """What every measurement is told."""
    return {"batch_size": arguments.batch_size, "seconds": arguments.seconds, "threads": arguments.threads}


def answer(measure: str, measures: Mapping[str, Callable[..., Found]]) -> None:
    """In a process of its own: measure whom the JSON names with the arguments it holds, and print what was found."""
    given = json.loads(measure)
    print(json.dumps(measures[given.pop("who")](**given)))


def run_in_turns(script: Path, contenders: Mapping[str, Contender], *, rounds: int) -> Runs:
    """Every contender once a round, each time in a process of its own."""
    found: Runs = {name: [] for name in contenders}
    for turn in range(rounds):
        for name, contender in contenders.items():
            found[name].append(_measured(script, contender))
            print(f"round {turn + 1}: {name} {found[name][-1]['samples_per_second']:,.0f} samples/s", file=sys.stderr)
    return found


def _measured(script: Path, contender: Contender) -> Found:
    threads = str(contender.measure["threads"])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # For both sides, as recspec's command line has it: threads that wait don't spin beside other work.
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000"),
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        "PYTHONWARNINGS": "ignore",
    }
    with tempfile.TemporaryDirectory() as folder:  # peers leave logs and checkpoints where they run
        done = subprocess.run(
            [str(contender.python), str(script.resolve()), "--measure", json.dumps(dict(contender.measure))],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


# --- reporting -------------------------------------------------------------------------------------------------------


def summarise(runs: Runs) -> dict[str, Found]:
    """For each contender the medians over the rounds, and the slowest and fastest."""
    return {name: _summary(rounds) for name, rounds in runs.items()}


def _summary(rounds: list[Found]) -> Found:
    speeds = [found["samples_per_second"] for found in rounds]
    summary = {
        "samples_per_second": round(statistics.median(speeds)),
        "slowest": round(min(speeds)),
        "fastest": round(max(speeds)),
        "samples_per_cpu_second": round(statistics.median(found["samples_per_cpu_second"] for found in rounds)),
        **{name: rounds[0][name] for name in ("parameters", "precision", "torch")},
    }
    for name, places in (("share_of_matrix_rate", 3), ("peak_memory_bytes", None)):
        values = [found[name] for found in rounds if name in found]
        if values:
            summary[name] = round(statistics.median(values), places)
    return summary


def add_shares(runs: Runs) -> None:
    """Each run's share of the matrix rate that recspec's process measured in the same round."""
    for rounds in runs.values():
        for found, ours in zip(rounds, runs["recspec"], strict=True):
            arithmetic = 6 * ours["linear_weights"] * found["samples_per_second"]
            found["share_of_matrix_rate"] = arithmetic / ours["matrix_rate"]


def fastest(summary: Mapping[str, Found], names: Sequence[str]) -> str:
    """Which of some contenders is the fastest."""
    return max(names, key=lambda name: summary[name]["samples_per_second"])


def ratios(summary: Mapping[str, Found], ours: str, theirs: str) -> dict[str, float]:
    """How many times as fast one contender is as another, by the clock and per CPU second."""
    return {
        name: round(summary[ours][speed] / summary[theirs][speed], 2)
        for name, speed in (
            ("ratio", "samples_per_second"),
            ("ratio_per_cpu_second", "samples_per_cpu_second"),
        )
    }


def print_table(summary: Mapping[str, Found], base: str, title: str = "") -> None:
    """Speeds of all contenders, as ratios to that of `base` too."""
    wide = max(20, *(len(name) + 2 for name in summary))
    print(
        f"{title:{wide}}{'samples/s':>12}{'slowest':>12}{'fastest':>12}{'ratio':>8}{'per CPU second':>16}{'ratio':>8}"
        f"{'of matrix rate':>16}{'peak memory':>13}"
    )
    for name, row in summary.items():
        ratio = ratios(summary, name, base)
        share = f"{row['share_of_matrix_rate']:.3f}" if "share_of_matrix_rate" in row else ""
        memory = f"{row['peak_memory_bytes'] / 1e9:.2f} GB" if "peak_memory_bytes" in row else ""
        print(
            f"{name:{wide}}{row['samples_per_second']:12,}{row['slowest']:12,}{row['fastest']:12,}{ratio['ratio']:8.2f}"
            f"{row['samples_per_cpu_second']:16,}{ratio['ratio_per_cpu_second']:8.2f}{share:>16}{memory:>13}"
        )


def print_differences(differences: Sequence[str]) -> None:
    """What is not the same on both sides, below the table."""
    for difference in differences:
        print(f"  - {difference}")


def circumstances(arguments: argparse.Namespace, differences: Sequence[str]) -> Found:
    """Sizes, what differs, machine, load, date and commit: what a report of measurements ends with."""
    print_differences(differences)
    return {
        "batch_size": arguments.batch_size,
        "threads": arguments.threads,
        "differences": differences,
        **where_and_when(),
    }


def where_and_when() -> Found:
    """Machine, load, date and commit."""
    from recspec import machine

    return {
        "machine": machine.describe(),
        "load_average": os.getloadavg()[0],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
    }


def write(report: Mapping[str, Any], out: Path) -> None:
    """The report as JSON."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {out}")


def _commit() -> str | None:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True)
    return done.stdout.strip() or None


def parser(about: str | None, *, batch_size: int, out: Path) -> argparse.ArgumentParser:
    """The options that all benchmarks beside peers have; `about` is the benchmark's docstring."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=batch_size, help="drawn negatives included")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser
