"""How much another busy process slows training, `auto` and a server's answers, with threads chosen by recspec.

    python benchmarks/stress/busy_neighbour.py [--only din,serve] [--seconds 5] [--data PREPARED --recipe RECIPE]

Needs a quiet machine. Every measurement is a process of its own without OMP_NUM_THREADS, once alone and once beside a
process that counts without end. Models that are trained by steps train for so many seconds, and the figure is samples/s
of the log; others are fitted once, and the figure is fits/s. `auto` compares three models. `serve` answers one request
after the other; the figure is answers/s, that is 1 / mean latency. A slowdown is the figure alone divided by the figure
beside the other process. Data is made up: 60,000 events of 1,500 users on 2,000 items; `--data` takes another dataset.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from _side_by_side import where_and_when, write
from recspec.models import MODELS, FittedModel

AIM = 2.2
"""The slowdown that is still fair: one core of two, and what changing places costs."""
COUNTS = "while True: pass"
REQUESTS = 300
SEARCHED = "ease,neumf,item_knn"
PREPARED = (
    "history=20",
    "negative_history=true",
    "train_negatives=1",
    "num_negatives=20",
    "items=items.csv",
    "item_features=[kind]",
)


def main() -> None:
    """Measure, print a line for each and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models, auto and serve, between commas; by default all")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each training")
    parser.add_argument("--data", type=Path, help="a prepared dataset")
    parser.add_argument("--recipe", help="recipe of the models")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "busy_neighbour.json")
    asked = parser.parse_args()
    lines: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = asked.data or prepared(folder)
        measures: dict[str, Callable[[], float]] = {
            **{name: partial(trained, name, data, asked.recipe, asked.seconds) for name in MODELS},
            "auto": partial(searched, data),
            "serve": partial(answered, data, folder),
        }
        print(f"{'':22}{'alone':>12}{'beside':>12}{'slowdown':>10}")
        for name in asked.only.split(",") if asked.only else measures:
            alone = measures[name]()
            with busy():
                beside = measures[name]()
            lines[name] = {"alone": alone, "beside": beside, "slowdown": round(alone / beside, 2)}
            print(f"{name:22}{alone:12.4g}{beside:12.4g}{alone / beside:10.2f}", flush=True)
    write({"aim": AIM, "seconds": asked.seconds, "slowdowns": lines, **where_and_when()}, asked.out)


@contextmanager
def busy() -> Iterator[None]:
    """Another process that wants a core, until the end of the block."""
    process = subprocess.Popen([sys.executable, "-c", COUNTS])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def prepared(folder: Path) -> Path:
    """A dataset with histories, candidates and a kind of each item."""
    rng = np.random.default_rng(0)
    items = (2000 * rng.random((1500, 40)) ** 2).astype(int)
    lines = [f"u{user},i{item},{time}\n" for user, own in enumerate(items) for time, item in enumerate(own)]
    (folder / "rows.csv").write_text("user_id,item_id,timestamp\n" + "".join(lines))
    (folder / "items.csv").write_text("item_id,kind\n" + "".join(f"i{item},k{item % 20}\n" for item in range(2000)))
    recspec("prepare", "table", folder / "rows.csv", folder / "data", *settings(PREPARED))
    return folder / "data"


def trained(model: str, data: Path, recipe: str | None, seconds: float) -> float:
    """Samples/s of a training, or fits/s."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        fitted = issubclass(MODELS[model], FittedModel)
        steps = () if fitted else (f"train.minutes={seconds / 60}", "train.log_every=1", "train.tensorboard=false")
        named = ("--recipe", recipe) if recipe and not fitted else ()
        recspec("train", model, data, run, *named, *settings(steps))
        events = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    if fitted:
        begun = next(event["time"] for event in events if event["event"] == "start")
        return 1 / float(events[-1]["time"] - begun)
    return float([event["samples_per_second"] for event in events if event["event"] == "step"][-1])


def searched(data: Path) -> float:
    """Searches/s: settings and epochs are the same in each."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        few = ("train.epochs=3", "train.tensorboard=false")
        recspec("auto", data, Path(folder) / "out", "--models", SEARCHED, "--minutes", "30", *settings(few))
        return 1 / (time.perf_counter() - began)


def answered(data: Path, folder: Path) -> float:
    """Answers/s to one client."""
    run = folder / "served"
    if not run.exists():
        recspec("train", "sasrec", data, run, *settings(("train.epochs=1", "train.tensorboard=false")))
    words = ["serve", f"m={run}", "--http-port", "0", "--grpc-port", "0"]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command(*words), env=environment(), stdout=said, stderr=said)
        try:
            while not (port := re.search(rb" at http://[\d.]+:(\d+)", os.pread(said.fileno(), 1 << 20, 0))):
                time.sleep(0.05)
            connection = http.client.HTTPConnection("127.0.0.1", int(port[1]), timeout=60)
            took = []
            for number in range(REQUESTS + 20):
                body = json.dumps({"user": f"u{number % 1500}", "k": 10})
                began = time.perf_counter()
                connection.request("POST", "/recommend", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                text = answer.read()
                if answer.status != 200:
                    raise SystemExit(f"the server answered {answer.status}: {text!r}")
                took.append(time.perf_counter() - began)
        finally:
            process.kill()
            process.wait()
    return 1 / float(np.mean(took[20:]))


def settings(assignments: tuple[str, ...]) -> list[str]:
    """The options of a command that set these."""
    return [word for assignment in assignments for word in ("--set", assignment)]


def environment() -> dict[str, str]:
    """Threads are for recspec to choose."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def command(*words: object) -> list[str]:
    """The command line of recspec with these words."""
    return [sys.executable, "-m", "recspec", *map(str, words)]


def recspec(*words: object) -> None:
    """Run a command to its end."""
    done = subprocess.run(command(*words), env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"recspec {' '.join(map(str, words))}:\n{done.stderr}")


if __name__ == "__main__":
    main()
