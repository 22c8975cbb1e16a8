"""Everything that has to be known of a GPU, in two phases of five minutes with a repair between them.

    python benchmarks/stress/gpu_lease.py --phase 1 --seconds 290 --out OUT
    python benchmarks/stress/gpu_lease.py --phase 2 --seconds 290 --out OUT [--also 'train:sim*,profile:sim*']
    python benchmarks/stress/gpu_lease.py --phase 1 --device cpu --small --out OUT      the same code in seconds

Phase 1: a first step of each of the ten trained models, Triton's kernels, every model against the CPU, then speeds,
profiles and answers in bf16, determinism, other arithmetics. Phase 2: compiled steps, rankings of a million items, the
commands, the tests that need a GPU; `--also` adds tasks of phase 1 that were mended. docs/contributing/gpu.md says what
each table means.

Each model has a process of its own. A process asks for the device, alone where time is measured, and the most valuable
request gets it. Every result is a JSON line in OUT/lines.jsonl as soon as it is there. A task that dies or hangs takes
its own process with it, which starts anew behind that task. Needs torch, numpy, pyarrow, typer, PyYAML, safetensors and
pydantic; no network.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recspec import __version__
from recspec.base import machine

if TYPE_CHECKING:
    from _gpu_tasks import Figures, Task
else:
    Figures = dict

ROOT = Path(__file__).parents[2]

MODELS = ("dlrm", "neumf", "wide_deep", "sim", "dcnv2", "mult_vae", "sasrec", "two_tower", "din", "dien")
PROCESSES = ("device", *MODELS)

LATE = 5.0
"""A task is ended when it has had the device for so many times the seconds expected, and half a minute at least."""

RESTARTS = 3
"""Of one process, at most."""


@dataclass(frozen=True)
class Order:
    """What a process is to do: some of a phase's tasks."""

    process: str
    phase: int
    also: tuple[str, ...]
    """Patterns of tasks of the other phase."""
    only: tuple[str, ...]
    """Patterns of the tasks; without any, all of the phase."""
    skip: tuple[str, ...]
    device: str
    small: bool
    seconds: float
    folder: str

    def tasks(self) -> list[Task]:
        """The tasks; those of the other phase last, without any that both have."""
        from _gpu_tasks import Place, tasks_of
        from recspec.loading import pick_device

        place = Place(pick_device(self.device), self.small, Path(self.folder), self.seconds)
        own = [task for task in tasks_of(self.process, self.phase, place) if _fits(task.name, self.only or ("*",))]
        other = [task for task in tasks_of(self.process, 3 - self.phase, place) if _fits(task.name, self.also)]
        known = {task.name for task in own} | set(self.skip)
        return [
            *(task for task in own if task.name not in self.skip),
            *(task for task in other if task.name not in known),
        ]


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


# --- in a process of its own -----------------------------------------------------------------------------------------


def work(order: Order, parent: Any) -> None:
    """Do the tasks of a process; tells its parent of each, and asks for the device."""
    import torch

    torch.set_num_threads(2 if order.device.startswith("cuda") else 1)
    if order.device.startswith("cuda"):
        torch.cuda.init()  # type: ignore[no-untyped-call]  # before its memory is asked about
    for task in order.tasks():
        started = time.perf_counter()
        on_device = 0.0
        parent.send(("begun", task.name))
        try:
            task.ready()
            parent.send(("want", task.name, task.alone, task.worth, task.seconds))
            if parent.recv():
                at = time.perf_counter()
                figures = task.run()
                on_device = time.perf_counter() - at
            else:
                figures = {"skipped": "too little time left"}
        except Exception as error:
            figures = {"error": _cause(error), "traceback": traceback.format_exc()[-3000:]}
        figures |= {"task_seconds": round(time.perf_counter() - started, 1), "device_seconds": round(on_device, 1)}
        if order.device.startswith("cuda"):
            gc.collect()
            torch.cuda.empty_cache()  # other models have their own processes
        parent.send(("done", task.name, figures))
        if "error" in figures and order.device.startswith("cuda"):
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                os._exit(70)  # a failed kernel leaves nothing of the process's device; the parent starts another
    parent.send(("end",))


def _cause(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


# --- the clock, and who has the device -------------------------------------------------------------------------------


@dataclass
class Worker:
    """A process, and where it stands."""

    name: str
    process: Any
    conn: Any
    doing: str | None = None
    wants: tuple[bool, float, float, int] | None = None
    """Whether alone, what it is worth, the seconds expected, and the place in the queue."""
    has_since: float | None = None
    done: set[str] = field(default_factory=set)
    restarts: int = 0

    @property
    def is_alone(self) -> bool:
        return self.has_since is not None and self.wants is not None and self.wants[0]


class Lease:
    """The processes, one clock and one device."""

    def __init__(self, arguments: argparse.Namespace, end: float, folder: str) -> None:
        self.arguments, self.end, self.folder = arguments, end, folder
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["_gpu_tasks"])
        self.found: dict[str, Figures] = {}
        self.asked = 0
        self.to_start = [*arguments.processes]
        # A GPU's host prepares all models at once; on a CPU that is the device itself, each core takes one.
        self.at_once = len(self.to_start) if arguments.device.startswith("cuda") else len(os.sched_getaffinity(0))
        self.workers: list[Worker] = []
        arguments.out.mkdir(parents=True, exist_ok=True)
        self.lines = arguments.out / "lines.jsonl"

    def _start(self, name: str, skip: Iterable[str] = (), restarts: int = 0) -> Worker:
        own = self.arguments
        where = own.device, own.small, own.measured, self.folder
        order = Order(name, own.phase, own.also, own.only, tuple(skip), *where)
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=work, args=(order, theirs), daemon=True)
        process.start()
        theirs.close()
        return Worker(name, process, ours, done=set(skip), restarts=restarts)

    def run(self) -> dict[str, Figures]:
        """All tasks that the time allows."""
        while (self.workers or self.to_start) and (left := self.end - time.monotonic()) > 0:
            while self.to_start and len(self.workers) < self.at_once:
                self.workers.append(self._start(self.to_start.pop(0)))
            ready = connection.wait([each.conn for each in self.workers], timeout=min(1.0, left))
            for worker in [each for each in self.workers if each.conn in ready]:
                self._hear(worker)
            self._end_late()
            self._grant()
        for worker in self.workers:
            worker.process.kill()
            if worker.doing is not None:
                self._note(worker.doing, {"error": "not done when the time was over"})
        return self.found

    def _hear(self, worker: Worker) -> None:
        try:
            what, *rest = worker.conn.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(5)
            self._replace(worker, f"its process ended with status {worker.process.exitcode}")
            return
        if what == "begun":
            (worker.doing,) = rest
        elif what == "want":
            _, alone, worth, seconds = rest
            self.asked += 1
            worker.wants = (alone, worth, seconds, self.asked)
        elif what == "done":
            worker.doing = worker.wants = worker.has_since = None
            worker.done.add(rest[0])
            self._note(*rest)
        else:
            self.workers.remove(worker)

    def _replace(self, worker: Worker, why: str) -> None:
        """Start a process anew behind the task that it died of."""
        self.workers.remove(worker)
        if worker.doing is not None:
            worker.done.add(worker.doing)
            self._note(worker.doing, {"error": why})
        if worker.restarts < RESTARTS:
            self.workers.append(self._start(worker.name, worker.done, worker.restarts + 1))

    def _end_late(self) -> None:
        now = time.monotonic()
        for worker in [*self.workers]:
            if worker.has_since is not None and worker.wants is not None:
                most = max(30.0, LATE * worker.wants[2])
                if now - worker.has_since > most:
                    worker.process.kill()
                    worker.process.join(5)
                    self._replace(worker, f"ended after {most:.0f} s on the device")

    def _grant(self) -> None:
        """Give the device to those who wait, the most valuable first."""
        queue = [each for each in self.workers if each.wants is not None and each.has_since is None]
        for worker in sorted(queue, key=lambda each: (each.wants[1], each.wants[3]) if each.wants else (0, 0)):
            assert worker.wants is not None
            alone, _, seconds, _ = worker.wants
            if self.end - time.monotonic() < seconds / 2:
                worker.wants = None
                worker.conn.send(False)
                continue
            holders = [each for each in self.workers if each.has_since is not None]
            if any(each.is_alone for each in holders) or (alone and holders):
                return
            worker.has_since = time.monotonic()
            worker.conn.send(True)

    def _note(self, task: str, figures: Figures) -> None:
        self.found[task] = figures
        at = round(self.arguments.seconds - (self.end - time.monotonic()), 1)
        with self.lines.open("a") as lines:
            lines.write(json.dumps({"at": at, "task": task, **figures}) + "\n")
        print(f"{at:6.1f} {task:28} {said_of(figures)}"[:200], flush=True)


# --- the report ------------------------------------------------------------------------------------------------------


def said_of(found: Figures) -> str:
    """A task's figures in a line."""
    if "error" in found:
        return f"FAILED: {found['error']}"
    if "skipped" in found:
        return f"skipped: {found['skipped']}"
    if "samples_per_second" in found:
        ratio = f" {found['ratio']:.2f} x published" if found["ratio"] else ""
        return (
            f"{found['samples_per_second'] / 1e6:.3f} M/s{ratio}, {found['milliseconds_per_step']:.2f} ms, "
            f"{found['peak_memory_bytes'] / 2**30:.1f} GiB, {found['embedding_backend']}, loss {found['loss']:.4g}"
        )
    if "launches" in found:
        top = ", ".join(f"{each['kernel'][:28]} {each['milliseconds']:.2f}" for each in found["largest"][:3])
        spent = f"{found['gpu_milliseconds']:.2f} ms, {found['launches']:.0f} launches"
        return f"{spent}, host {found['host_milliseconds']:.1f} ms, waits {found['waits']}; {top}"
    parts = []
    for name, each in found.items():
        if isinstance(each, Mapping):
            shown = ", ".join(f"{key} {value:.3g}" for key, value in each.items() if isinstance(value, (int, float)))
            parts.append(f"{name}: {shown}")
        elif isinstance(each, float):
            parts.append(f"{name} {each:.3g}")
    return "; ".join(parts)


def report(found: Mapping[str, Figures], arguments: argparse.Namespace, seconds: float) -> Figures:
    """All that was found, where and when."""
    import torch

    return {
        "what": f"phase {arguments.phase} of benchmarks/stress/gpu_lease.py",
        "card": _card(arguments.device),
        "small": arguments.small,
        "seconds": round(seconds, 1),
        "tasks": dict(found),
        "recspec": __version__,
        "commit": _printed(["git", "rev-parse", "HEAD"]),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "machine": machine.describe(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _card(device: str) -> str | None:
    if not device.startswith("cuda"):
        return None
    return _printed(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])


def _printed(command: Sequence[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def main(given: Sequence[str] | None = None) -> int:
    """Run a phase, print its table and write it; 1 if a task failed."""
    started = time.monotonic()
    arguments = _arguments(given)
    sys.path.insert(0, str(Path(__file__).parent))  # for the processes
    with tempfile.TemporaryDirectory() as folder:
        found = Lease(arguments, started + arguments.seconds, folder).run()
    whole = report(found, arguments, time.monotonic() - started)
    (arguments.out / f"phase{arguments.phase}.json").write_text(json.dumps(whole, indent=1) + "\n")
    failed = [name for name, each in found.items() if "error" in each]
    print("\n".join(f"{name:30} {said_of(found[name])}"[:190] for name in _ordered(found)))
    print(f"{len(found)} tasks, {len(failed)} failed, {whole['seconds']} s; {whole['card']}")
    return int(bool(failed))


def _ordered(found: Mapping[str, Figures]) -> list[str]:
    """Tasks by model, those of no model first."""
    return sorted(
        found, key=lambda name: (next((i for i, own in enumerate(MODELS) if own in name.split(":")), -1), name)
    )


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase", type=int, choices=(1, 2), default=1)
    parser.add_argument("--seconds", type=float, default=290.0, help="time of the whole phase")
    parser.add_argument("--measured", type=float, help="seconds of a measurement; by default 2, with --small .02")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that all runs")
    parser.add_argument("--models", default=",".join(PROCESSES), help="some of device and the models, between commas")
    parser.add_argument("--only", default="", help="patterns of tasks, between commas")
    parser.add_argument("--also", default="", help="patterns of tasks of the other phase, between commas")
    arguments = parser.parse_args(given)
    for name in ("only", "also"):
        setattr(arguments, name, tuple(each for each in getattr(arguments, name).split(",") if each))
    arguments.processes = [name for name in arguments.models.split(",") if name]
    if unknown := [name for name in arguments.processes if name not in PROCESSES]:
        parser.error(f"--models: {', '.join(unknown)}; expected some of {', '.join(PROCESSES)}")
    if arguments.measured is None:
        arguments.measured = 0.02 if arguments.small else 2.0
    return arguments


if __name__ == "__main__":
    sys.exit(main())
