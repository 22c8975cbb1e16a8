"""`recspec update` on the last tenth of MovieLens 1M in ten steps, beside training anew, with a server under load.

    python benchmarks/update.py ml-1m OUT --models ease neumf --out benchmarks/results/update.json

The ratings are sorted by time. A model is trained on the first 90 %, and `recspec update` takes each further percent.
After each step the new version and the same model trained from nothing on the same grown dataset are measured on the
dataset's test rows (protocol full, NDCG@10), with the paired standard error of their difference. A server of the run
answers `/recommend` from two threads throughout; requests that fail are counted, and the seconds until it answers by
the new version.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import recspec as rs
from _side_by_side import where_and_when

STEPS, SHARE = 10, 0.1
MODELS: dict[str, dict[str, Any]] = {
    "ease": {"settings.l2": 500.0},
    "neumf": {
        "train.batch_size": 20_480,
        "use_mlp": False,
        "factors": 64,
        "item_bias": True,
        "loss": "softmax",
        "train.negatives": 4,
        "train.learning_rate": 0.002,
        "train.epochs": 10,
    },
    "sasrec": {
        "dim": 64,
        "hidden": 64,
        "blocks": 2,
        "length": 50,
        "dropout": 0.2,
        "train.epochs": 12,
        "train.batch_size": 128,
        "train.learning_rate": 0.001,
        "train.metric": "full/ndcg@10",
    },
}
PREPARATION = {"num_negatives": 20}
LOAD_THREADS, PAUSE = 2, 0.1


def main() -> None:
    """Every model, step by step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("raw", type=Path, help="folder of ml-1m")
    parser.add_argument("work", type=Path, help="folder to write")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--retrain", type=int, nargs="*", default=list(range(1, STEPS + 1)), help="steps to train anew")
    parser.add_argument("--set", nargs="*", default=[], help="settings of the update")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    base, parts = cut(asked.raw, asked.work)
    data = asked.work / "data"
    rs.prepare(base, data, dataset="movielens", settings=PREPARATION, progress=False)
    report: dict[str, Any] = {**where_and_when(), "seed": asked.seed, "set": asked.set, "models": {}}
    for model in asked.models:
        report["models"][model] = measure(model, data, parts, asked)
        if asked.out:
            asked.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def cut(raw: Path, work: Path) -> tuple[Path, list[Path]]:
    """A release with the first ratings, and files of the later ones."""
    lines = (raw / "ratings.dat").read_text(encoding="latin-1").splitlines()
    times = np.array([int(line.rpartition("::")[2]) for line in lines])
    order = np.argsort(times, kind="stable")
    first = round(len(lines) * (1 - SHARE))
    base = work / "base"
    base.mkdir(parents=True, exist_ok=True)
    (base / "ratings.dat").write_text("\n".join(lines[i] for i in order[:first]) + "\n")
    for name in ("movies.dat", "users.dat"):
        shutil.copyfile(raw / name, base / name)
    files = []
    for number, part in enumerate(np.array_split(order[first:], STEPS), 1):
        files.append(work / f"events-{number:02d}.csv")
        rows = [lines[i].replace("::", ",") for i in part]
        files[-1].write_text("userId,movieId,rating,timestamp\n" + "\n".join(rows) + "\n")
    return base, files


def measure(model: str, data: Path, parts: list[Path], asked: argparse.Namespace) -> dict[str, Any]:
    """One model through all steps."""
    run = asked.work / model
    settings = {**MODELS[model], "train.seed": asked.seed}
    started = time.monotonic()
    rs.train(model, data, run, settings=settings, progress=False)
    found: dict[str, Any] = {"settings": settings, "train_seconds": time.monotonic() - started, "steps": []}
    with served(run) as server:
        for number, events in enumerate(parts, 1):
            step = updated(run, events, server, asked.set)
            step["step"] = number
            found["steps"].append(step)
            say(model, step)
    found["requests"], found["failed"] = server.answered, server.failed
    print(f"{model}: {server.answered} requests, {len(server.failed)} failed", flush=True)
    for number in asked.retrain:
        step = found["steps"][number - 1]
        version = run / "updates" / f"{number:04d}"
        anew = asked.work / f"{model}-anew-{number:02d}"
        started, cpu = time.monotonic(), time.process_time()
        rs.train(model, version / "data", anew, settings=settings, progress=False)
        step["retrain_seconds"], step["retrain_cpu_seconds"] = time.monotonic() - started, time.process_time() - cpu
        against = (
            rs.compare([anew, version], version / "data", protocol="full", progress=False).comparisons().to_pylist()
        )
        of = next(each for each in against if each["metric"] == "ndcg@10")
        alone = rs.evaluate(anew, version / "data", protocol="full", progress=False).to_frame().to_pylist()
        error = next(each["standard_error"] for each in alone if each["metric"] == "ndcg@10")
        step |= {
            "retrained": of["ours"],
            "updated": of["theirs"],
            "difference": of["difference"],
            "paired_error": of["standard_error"],
            "standard_error": error,
        }
        shutil.rmtree(anew)
        say(model, step)
    return found


def say(model: str, step: dict[str, Any]) -> None:
    """One line of a step."""
    print(model, {name: round(x, 4) if isinstance(x, float) else x for name, x in step.items()}, flush=True)


def updated(run: Path, events: Path, server: Server, settings: list[str]) -> dict[str, Any]:
    """One step: `recspec update` in a process of its own, and the seconds until the server answers by it."""
    loads, started, cpu = server.loads(), time.monotonic(), cpu_of_children()
    command = [sys.executable, "-m", "recspec", "update", str(run), str(events), "--json"]
    for each in settings:
        command += ["--set", each]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    took, cpu = time.monotonic() - started, cpu_of_children() - cpu
    while server.loads() == loads:
        time.sleep(0.05)
    told = json.loads(done.stdout)
    return {
        "seconds": took,
        "cpu_seconds": cpu,
        "served_after": time.monotonic() - started,
        **told["seconds"],
        **told["counts"],
        "bundle_bytes": told["bundle_bytes"],
    }


def cpu_of_children() -> float:
    """CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Server:
    """A server under load."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        self.answered, self.failed, self.going = 0, list[str](), True
        self.threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(LOAD_THREADS)]

    def _ask(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while self.going:
            body = json.dumps({"user": int(rng.integers(1, 6041)), "k": 10}).encode()
            headers = {"Content-Type": "application/json"}
            try:
                asked = urllib.request.Request(f"{self.url}/recommend", body, headers)
                with urllib.request.urlopen(asked, timeout=30) as answer:
                    assert json.load(answer)
                self.answered += 1
            except Exception as error:
                self.failed.append(repr(error))
            time.sleep(PAUSE)

    def loads(self) -> float:
        """How often the server has opened a model."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(
            (float(line.rpartition(" ")[2]) for line in lines if "loads_total{" in line and "loaded" in line), 0.0
        )


@contextmanager
def served(run: Path) -> Iterator[Server]:
    """`recspec serve` of a run, asked from threads until the block ends."""
    command = [sys.executable, "-m", "recspec", "serve", str(run), "--http-port", "0", "--no-grpc", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    server = Server(process, json.loads(_first_object(process.stdout))["http"])
    for thread in server.threads:
        thread.start()
    try:
        yield server
    finally:
        server.going = False
        for thread in server.threads:
            thread.join()
        process.terminate()
        process.wait()


def _first_object(lines: Iterator[str]) -> str:
    text = ""
    for line in lines:
        text += line
        try:
            json.loads(text)
        except ValueError:
            continue
        return text
    sys.exit("the server did not start")


if __name__ == "__main__":
    main()
