"""What measurements beside peers share: their environments, the clock, taking turns, medians, the table, the report.

A benchmark is a file that starts itself, once for each measurement, with `--measure` and under the interpreter of the
library that is measured. So this module imports nothing of recspec at its top: a peer's interpreter has none.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

COLD = 5
"""Requests after another contender's turn that do not count."""
SETTLE = 0.3
"""Seconds between two turns, in which threads of the last contender go to sleep."""

Found = dict[str, Any]
"""What one measurement gives: `samples_per_second`, `samples_per_cpu_second`, `parameters`, `torch`, more."""

Runs = dict[str, list[Found]]
"""All rounds of every contender."""

Measures = Mapping[str, Callable[..., Found]]
"""What a benchmark measures whom by: who (`recspec`, or one of `ENVIRONMENTS`) -> a function of its own."""


@dataclass(frozen=True)
class Pace:
    """How a measurement goes, for everybody the same."""

    batch_size: int
    threads: int
    seconds: float
    warm_up: int
    """Batches before the clock starts."""

    profiled: bool = False
    """Whether recspec's step is profiled behind the measurement."""


@dataclass(frozen=True)
class Contender:
    """Who is measured, and what the benchmark's function of that name is told beside the pace."""

    who: str
    told: Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """One table: the same training by everybody."""

    script: Path
    model: str
    title: str
    contenders: Mapping[str, Contender]
    """By name; `recspec` is one of them."""

    same_products: bool = False
    """Whether peers multiply the same matrices, so that their share of the matrix rate can be told too."""

    opposite: Mapping[str, str] = field(default_factory=dict)
    """Peer -> which of recspec's contenders does the same as it, where that is another than `recspec`."""

    left_out: Mapping[str, str] = field(default_factory=dict)
    """Peers that have no place in the table -> why."""


@dataclass(frozen=True)
class Environment:
    """A peer's own environment, in a folder below the one of all of them."""

    name: str
    folder: str
    requirements: Sequence[str]
    alone: Sequence[str] = ()
    """Installed without what they ask for."""


ENVIRONMENTS = {
    "recbole": Environment(
        "RecBole",
        "recbole",
        ("recbole==1.2.1", "numpy==1.26.4", "pandas==2.2.3", "scipy==1.11.4", "setuptools==80.9.0"),
    ),
    "rectools": Environment(
        "RecTools",
        "rectools",
        ("rectools==0.19.0", "pytorch-lightning==2.6.6", "numpy==1.26.4", "pandas==2.3.3"),
    ),
    "lenskit": Environment("LensKit", "lenskit", ("lenskit==2025.8.1", "numpy==2.4.6", "pandas==2.3.3")),
    "torchrec": Environment(
        "TorchRec",
        "torchrec",
        ("numpy==2.4.6", "tensordict==0.15.3", "torchmetrics==1.9.0", "tqdm==4.70.1"),
        # `torchrec` asks for FBGEMM's build for GPUs and an old torchmetrics.
        alone=(
            "torchrec==1.8.0",
            "fbgemm-gpu-cpu==1.8.0",
            "pyre-extensions==0.0.32",
            "typing-inspect==0.9.0",
            "mypy-extensions==1.1.0",
        ),
    ),
    "deepctr": Environment(
        "DeepCTR-Torch",
        "deepctr-torch",
        ("deepctr-torch==0.3.0", "requests==2.34.2", "pandas==3.1.1", "numpy==2.4.6", "scikit-learn==1.9.1"),
    ),
    "rechub": Environment("torch-rechub", "torch-rechub", ("torch-rechub==0.9.0", "pyarrow==26.0.1")),
    "fuxictr": Environment(
        "FuxiCTR", "fuxictr", ("fuxictr==2.3.10", "ray[data]==2.52.1", "numpy==2.4.6", "pandas==3.1.1")
    ),
}
"""Peers, each with the versions that it works with."""


class Clock:
    """Time and samples between the end of the warm-up and the first batch that ends after `seconds`."""

    def __init__(self, pace: Pace, *, forever: bool = False) -> None:
        self.pace, self.batches = pace, 0
        self.seconds = float("inf") if forever else pace.seconds
        self.first = self.last = (0.0, 0.0, 0)

    def tick(self, samples: int) -> bool:
        """A batch has been trained on, `samples` in all so far; tells whether the time is over."""
        self.batches += 1
        self.last = (time.perf_counter(), time.process_time(), samples)
        if self.batches == self.pace.warm_up:
            self.first = self.last
        return self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the measured time has passed."""
        return self.batches > self.pace.warm_up and self.last[0] - self.first[0] >= self.seconds

    def result(self) -> Found:
        """Samples, batches, seconds and speeds of the time measured."""
        wall, cpu, samples = (last - first for last, first in zip(self.last, self.first, strict=True))
        return {
            "samples": samples,
            "batches": self.batches - self.pace.warm_up,
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


def environments() -> Path:
    """The folder that peers' environments are made in unless said otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "recspec" / "peers"


def interpreters(wanted: Iterable[str], folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """The interpreters of those of `ENVIRONMENTS` that are there or can be made, and why the others can't."""
    python, missing = {}, {}
    for who in dict.fromkeys(wanted):
        try:
            python[who] = peer_python(ENVIRONMENTS[who], folder)
        except (subprocess.CalledProcessError, OSError) as error:
            missing[who] = f"its environment could not be made: {_last_line(error)}"
    return python, missing


def made_python(what: str, folder: Path, requirements: Sequence[str]) -> Path:
    """The interpreter of an environment without torch, which is made where there is none.

    Raises:
        subprocess.CalledProcessError: if pip can't install what it needs.
    """
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.is_file():
        print(f"making {what}'s environment in {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *requirements], check=True)
        ready.touch()
    return python


def peer_python(environment: Environment, folder: Path) -> Path:
    """The interpreter of a peer's environment, which is made where there is none, or one of other versions.

    Raises:
        subprocess.CalledProcessError: if pip can't install what it needs.
    """
    home = folder / environment.folder
    python, ready = home / "bin" / "python", home / "ready"
    wanted = "\n".join((TORCH, *environment.requirements, *environment.alone))
    if ready.is_file() and ready.read_text(encoding="utf-8") == wanted:
        return python
    print(f"making {environment.name}'s environment in {home}", file=sys.stderr)
    venv.create(home, with_pip=True, clear=True)
    try:
        _install(python, TORCH)
    except subprocess.CalledProcessError:
        _install(python, TORCH, "--index-url", CPU_INDEX)
    _install(python, *environment.requirements)
    if environment.alone:
        _install(python, "--no-deps", *environment.alone)
    ready.write_text(wanted, encoding="utf-8")
    return python


def _install(python: Path, *what: str) -> None:
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *what], check=True, stderr=subprocess.PIPE)


def _last_line(error: Exception) -> str:
    """The last line that a program said before it failed, or else the error itself."""
    said = getattr(error, "stderr", None) or b""
    lines = (said.decode(errors="replace") if isinstance(said, bytes) else said).strip().splitlines()
    return lines[-1] if lines else str(error)


class TimeOver(Exception):
    """Ends a peer's `fit`, which knows epochs only."""


def clocked(optimizer: Any, pace: Pace, *, passes: int = 0) -> Clock:
    """A clock that ticks after every step of the optimizer, and ends the training when the time is over.

    Training that goes over the rows a number of times ends by itself.
    """
    clock = Clock(pace, forever=passes > 0)

    def tick(*_: object) -> None:
        if clock.tick((clock.batches + 1) * pace.batch_size):
            raise TimeOver

    optimizer.register_step_post_hook(tick)
    return clock


def epochs(passes: int) -> int:
    """Epochs to ask of a peer's `fit`: as many passes as are wanted, or more than the time allows."""
    return passes or 1_000_000


def fit_deepctr(
    model: Any, optimizer: Any, columns: Any, labels: Any, pace: Pace, *, helped: bool, passes: int = 0
) -> Clock:
    """DeepCTR-Torch's own `fit`; `helped` as `help_peer` says, and with rows taken a batch at a time."""
    from deepctr_torch.models import basemodel  # type: ignore[import-not-found]

    clock = clocked(optimizer, pace, passes=passes)
    model.compile(optimizer, "binary_crossentropy", metrics=[])
    own_loader = basemodel.DataLoader
    if helped:
        help_peer()
        basemodel.DataLoader = Blocks
    with suppress(TimeOver):
        model.fit(columns, labels, batch_size=pace.batch_size, epochs=epochs(passes), verbose=0, shuffle=True)
    basemodel.DataLoader = own_loader
    return clock


def fit_rechub(
    model: Any, optimizer: Callable[..., Any], dataset: Any, pace: Pace, *, helped: bool, passes: int = 0, **more: Any
) -> tuple[Any, Clock]:
    """torch-rechub's own trainer, which is given back too; `helped` as `fit_deepctr`."""
    import torch
    from torch_rechub.trainers import CTRTrainer  # type: ignore[import-not-found]

    trainer = CTRTrainer(
        model,
        optimizer_fn=lambda parameters, **_: optimizer(parameters),
        optimizer_params={},
        n_epoch=epochs(passes),
        **more,
    )
    clock = clocked(trainer.optimizer, pace, passes=passes)
    if helped:
        help_peer()
    loader = (Blocks if helped else torch.utils.data.DataLoader)(dataset, shuffle=True, batch_size=pace.batch_size)
    with suppress(TimeOver):
        trainer.fit(loader)
    return trainer, clock


def help_peer() -> None:
    """What a user could set from outside: products through oneDNN where that has a faster way."""
    import torch

    torch.set_float32_matmul_precision("medium")


def without_batch_normalisation(model: Any) -> None:
    """torch-rechub's MLPs have it, nobody else's."""
    import torch

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.BatchNorm1d):
                module.register_module(name, torch.nn.Identity())


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


@contextmanager
def recspec_run(model: str, data: str, train: Mapping[str, Any], sizes: Mapping[str, Any]) -> Iterator[Any]:
    """A training run of this project by its own settings, allocator set as the command line sets it."""
    from recspec.base.machine import keep_freed_memory
    from recspec.feature_spec import FeatureSpec
    from recspec.loading.ranks import Ranks
    from recspec.models import MODELS
    from recspec.training.loop import TrainingRun
    from recspec.training.plan import make_plan
    from recspec.training.settings import TrainSettings

    keep_freed_memory()
    settings = TrainSettings.model_validate({"tensorboard": False, **train})
    made = MODELS[model].Settings.model_validate(sizes)
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(model, FeatureSpec.load(data), settings, made, Ranks())
        yield TrainingRun(plan, Path(folder) / "run", Ranks())


def time_recspec(model: str, data: str, pace: Pace, *, train: Mapping[str, Any], sizes: Mapping[str, Any]) -> Found:
    """Steps of a training run of this project until the time is over.

    Where the pace says so, with its shares of the machine's matrix rate and memory bandwidth and its profile.
    """
    import torch

    from recspec.bench.profiling import endless, profile_steps
    from recspec.bench.speed import matrix_rate, measure_limits
    from recspec.training.product_rates import arithmetic

    with recspec_run(model, data, {"batch_size": pace.batch_size, **train}, sizes) as run:
        clock, device = Clock(pace), torch.device("cpu")
        precision = run.plan.precision.value
        with arithmetic(precision, run.settings.deterministic):
            before = matrix_rate(precision, device)
            taken = endless(run)
            for loss in taken:  # noqa: B007
                if clock.tick(run.progress.samples):
                    break
            found = {
                **clock.result(),
                "parameters": run.model.num_parameters(),
                "precision": precision,
                "torch": torch.__version__,
                "peak_memory_bytes": peak_memory(),
                "sparse_gradients": list(run.step.sparse),
                "embedding_backend": run.plan.embedding_backend.value,
                "loss": float(loss),
                "matrix_rate": (before + matrix_rate(precision, device)) / 2,
            }
            if pace.profiled:
                steps = found["batches"] / found["seconds"]
                limits = {**measure_limits(run, taken, steps, before), "profile": profile_steps(run, taken, PROFILED)}
                found |= {**limits, "flop_per_sample": 1e9 * limits["gflop_per_step"] * steps}
                found["flop_per_sample"] /= found["samples_per_second"]
    return found


PROFILED = 2
"""Steps that a profile looks at, by the clock and by torch's profiler."""


# --- measuring -------------------------------------------------------------------------------------------------------


def start(
    options: argparse.ArgumentParser, measures: Measures, compare: Callable[[argparse.Namespace, Path], Found]
) -> None:
    """One measurement if this process was started for one, else all of them and their report."""
    arguments = settled(options.parse_args())
    if arguments.measure:
        answer(arguments.measure, measures)
        return
    with tempfile.TemporaryDirectory() as scratch:
        report = compare(arguments, Path(scratch))
    write({**report, **circumstances(arguments)}, arguments.out)


def answer(measure: str, measures: Measures) -> None:
    """In a process of its own: measure whom the JSON names with the arguments it holds, and print what was found."""
    import torch

    given = json.loads(measure)
    pace = Pace(**given["pace"])
    torch.set_num_threads(pace.threads)
    print(json.dumps(measures[given["who"]](pace=pace, **given["told"])))


def compared(comparison: Comparison, arguments: argparse.Namespace) -> Found:
    """Everybody in turns, their table printed: medians, ratios, and why a peer is missing.

    A peer whose environment can't be made, or whose measurement fails, is left out with its reason.
    """
    wanted = [each.who for each in comparison.contenders.values() if each.who != "recspec"]
    python, absent = interpreters(wanted, arguments.environments)
    python["recspec"] = Path(sys.executable)
    here = {name: each for name, each in comparison.contenders.items() if each.who in python}
    missing = {name: absent[each.who] for name, each in comparison.contenders.items() if each.who in absent}
    runs, failed = run_in_turns(comparison, here, python, arguments)
    missing |= {**failed, **comparison.left_out}
    add_shares(runs, everybody=comparison.same_products)
    summary = summarise(runs)
    ours = [name for name in summary if here[name].who == "recspec"]
    peers = [name for name in summary if name not in ours]
    best = max(peers, key=lambda name: summary[name]["samples_per_second"], default="recspec")
    print_table(summary, best, comparison.title)
    for name, why in missing.items():
        print(f"{name}: not measured; {why}")
    return {
        "model": comparison.model,
        "results": summary,
        "ours": ours,
        "fastest_peer": best if peers else None,
        "over_each_peer": {f"{own} / {peer}": ratios(summary, own, peer) for own in ours for peer in peers},
        "over_equals": {
            peer: ratios(summary, comparison.opposite.get(peer, "recspec"), peer)["ratio"] for peer in peers
        },
        "not_measured": missing,
        "runs": runs,
    }


def run_in_turns(
    comparison: Comparison,
    contenders: Mapping[str, Contender],
    python: Mapping[str, Path],
    arguments: argparse.Namespace,
) -> tuple[Runs, dict[str, str]]:
    """Every contender once a round, each time in a process of its own, and why a peer's measurement failed."""
    found: Runs = {name: [] for name in contenders}
    failed: dict[str, str] = {}
    for turn in range(arguments.rounds):
        for name, contender in contenders.items():
            if name in failed:
                continue
            pace = _pace(arguments, profiled=turn == 0 and name == "recspec")
            try:
                found[name].append(measured(comparison.script, python[contender.who], contender, pace))
            except subprocess.CalledProcessError as error:
                if contender.who == "recspec":
                    raise
                failed[name] = f"its measurement failed: {_last_line(error)}"
                print(f"round {turn + 1}: {name} {failed[name]}", file=sys.stderr)
                continue
            print(f"round {turn + 1}: {name} {found[name][-1]['samples_per_second']:,.0f} samples/s", file=sys.stderr)
    return {name: rounds for name, rounds in found.items() if name not in failed}, failed


def _pace(arguments: argparse.Namespace, *, profiled: bool) -> Pace:
    return Pace(arguments.batch_size, arguments.threads, arguments.seconds, arguments.warm_up, profiled)


def measured(script: Path, python: Path, contender: Contender, pace: Pace) -> Found:
    """What a contender's measurement found, in a process of its own.

    Raises:
        subprocess.CalledProcessError: if it failed; with what it said.
    """
    from recspec.base.machine import SPINS

    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(pace.threads),
        "MKL_NUM_THREADS": str(pace.threads),
        # For both sides, as recspec's command line has it: threads that wait for long don't spin beside other work.
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", SPINS),
        "KINETO_LOG_LEVEL": "99",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        "PYTHONWARNINGS": "ignore",
    }
    given = {"who": contender.who, "told": dict(contender.told), "pace": asdict(pace)}
    with tempfile.TemporaryDirectory() as folder:  # peers leave logs and checkpoints where they run
        done = subprocess.run(
            [str(python), str(script.resolve()), "--measure", json.dumps(given)],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        done.check_returncode()
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
    for name, places in (
        ("share_of_matrix_rate", 3),
        ("share_of_memory_bandwidth", 3),
        ("peak_memory_bytes", None),
    ):
        values = [found[name] for found in rounds if name in found]
        if values:
            summary[name] = round(statistics.median(values), places)
    return summary


def add_shares(runs: Runs, *, everybody: bool) -> None:
    """Shares of the matrix rate that recspec's process measured in the same round, of recspec or of everybody.

    A sample's arithmetic is that of all matrix products of recspec's step, as its profile counts them.
    """
    arithmetic = runs["recspec"][0]["flop_per_sample"]
    for name, rounds in runs.items():
        if everybody or name == "recspec":
            for found, ours in zip(rounds, runs["recspec"], strict=True):
                found["share_of_matrix_rate"] = arithmetic * found["samples_per_second"] / ours["matrix_rate"]


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
        f"{'of matrix rate':>16}{'of bandwidth':>14}{'peak memory':>13}"
    )
    for name, row in summary.items():
        ratio = ratios(summary, name, base)
        shares = [
            f"{row[share]:.3f}" if share in row else ""
            for share in ("share_of_matrix_rate", "share_of_memory_bandwidth")
        ]
        memory = f"{row['peak_memory_bytes'] / 1e9:.2f} GB" if "peak_memory_bytes" in row else ""
        print(
            f"{name:{wide}}{row['samples_per_second']:12,}{row['slowest']:12,}{row['fastest']:12,}{ratio['ratio']:8.2f}"
            f"{row['samples_per_cpu_second']:16,}{ratio['ratio_per_cpu_second']:8.2f}{shares[0]:>16}{shares[1]:>14}{memory:>13}"
        )


def circumstances(arguments: argparse.Namespace) -> Found:
    """Sizes of the measurements, machine, load, date and commit: what a report ends with."""
    return {
        **{name: getattr(arguments, name) for name in ("batch_size", "threads", "rounds", "seconds", "warm_up")},
        **where_and_when(),
    }


def compile_source(source: Path) -> None:
    """Write the bytecode of recspec, as pip does at an installation, even if this shell forbids Python to write it."""
    compileall.compile_dir(source / "recspec", quiet=2)


def where_and_when() -> Found:
    """Machine, load, date and commit."""
    from recspec.base import machine

    return {
        "machine": machine.describe(),
        "load_average": os.getloadavg()[0],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
    }


def machine_line(found: Mapping[str, Any]) -> str:
    """CPU and instruction sets of `where_and_when`, for people."""
    here = found["machine"]
    return f"on {here['processor']}, {here['cores']} cores: {', '.join(here['isa']) or 'no known instruction sets'}"


def write(report: Mapping[str, Any], out: Path) -> None:
    """The report as JSON, and the CPU if it says which."""
    if "machine" in report:
        print(machine_line(report))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {out}")


def _commit() -> str | None:
    if shutil.which("git") is None:
        return None
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True)
    return done.stdout.strip() or None


# --- the command line ------------------------------------------------------------------------------------------------


def parser(about: str | None, script: str, *, batch_size: int) -> argparse.ArgumentParser:
    """The options that all benchmarks beside peers have; `about` is the benchmark's docstring."""
    script_path = Path(script)
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="of everybody")
    parser.add_argument("--batch-size", type=int, default=batch_size, help="drawn negatives included")
    parser.add_argument("--precision", default="auto", help="recspec's, as in train.precision")
    add_pace(parser)
    parser.add_argument("--environments", type=Path, default=environments(), help="the folder of peers' environments")
    parser.add_argument("--out", type=Path, default=script_path.parent / "results" / f"{script_path.stem}.json")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser


def add_pace(parser: argparse.ArgumentParser) -> None:
    """The options that say how long measurements take."""
    parser.add_argument("--quick", action="store_true", help="2 rounds of 2 seconds, and contenders of note only")
    parser.add_argument("--rounds", type=int, help="each contender once a round; 3 without")
    parser.add_argument("--seconds", type=float, help="of each measurement; 10 without")
    parser.add_argument("--warm-up", type=int, help="batches before the clock starts; 3 without")


def settled(arguments: argparse.Namespace) -> argparse.Namespace:
    """The same with a value wherever none was given."""
    usual = (
        {"rounds": 2, "seconds": 2.0, "warm_up": 2} if arguments.quick else {"rounds": 3, "seconds": 10.0, "warm_up": 3}
    )
    for name, value in usual.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments
