"""Lines of code and time from a data frame to recommendations, to a comparison, and to an endpoint, beside peers.

    python benchmarks/first_hour.py path/to/ml-100k [--rounds 3]

Each library has a file in `first_hour/` with three functions, the shortest that its own documentation leads to. Each
starts from the same pandas frame of users, items and times, and imports what it needs. A line is a line of a function
that is neither blank nor its head, in ruff's format of 120 columns. Each function runs in a process of its own, on one
thread, in the library's own environment; the clock runs from before the imports to the answer, and for the endpoint to
the answer of its first request.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

HERE = Path(__file__).resolve().parent
STEPS = ("recommendations", "comparison", "endpoint")
LIBRARIES = {"recspec": "recspec", "recbole": "RecBole", "lenskit": "LensKit", "rectools": "RecTools"}
THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "POLARS_MAX_THREADS",
    "LK_NUM_THREADS",
    "LK_NUM_PROCS",
)


def main() -> None:
    """One measurement if this process was started for one, else all of them in turns."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("raw", type=Path, help="folder of MovieLens 100K, with u.data")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--environments", type=Path, help="folder of the peers' environments")
    options.add_argument("--out", type=Path, default=HERE / "results" / "first_hour.json")
    options.add_argument("--measure", nargs=2, metavar=("LIBRARY", "STEP"), help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure, arguments.raw / "u.data")))
        return
    compare(arguments)


def measure(library: str, step: str, file: Path) -> dict[str, float]:
    """Wall and CPU seconds of a step, in this process and its children."""
    import pandas as pd

    events = pd.read_csv(file, sep="\t", names=["user_id", "item_id", "rating", "timestamp"], dtype={0: str, 1: str})
    events = events[["user_id", "item_id", "timestamp"]]
    sys.path.insert(0, str(HERE / "first_hour"))
    module = importlib.import_module(f"with_{library}")
    start, before = time.perf_counter(), os.times()
    if step == "endpoint":
        said: object = _first_answer(module, events)
    else:
        said = getattr(module, step)(events)
    after = os.times()
    print(said, file=sys.stderr)
    return {"seconds": time.perf_counter() - start, "cpu_seconds": sum(after[:4]) - sum(before[:4])}


def _first_answer(module: Any, events: Any) -> object:
    """What the endpoint answers to its first request."""
    server = module.endpoint(events)
    url = getattr(server, "url", None)
    if url is None:
        url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.handle_request, daemon=True).start()
    route, question = module.ASK
    request = Request(f"{url}{route}", json.dumps(question).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        said = answer.read()
    if hasattr(server, "stop"):
        server.stop()
    return said


def compare(arguments: argparse.Namespace) -> None:
    """Every library and step once a round, in turns; the medians as a table and a file."""
    from _side_by_side import ENVIRONMENTS, environments, interpreters, write

    python, missing = interpreters(
        [name for name in LIBRARIES if name in ENVIRONMENTS], arguments.environments or environments()
    )
    python["recspec"] = Path(sys.executable)
    lines, own = _lines()
    runs: dict[str, dict[str, list[dict[str, float]]]] = {name: {step: [] for step in STEPS} for name in python}
    for _ in range(arguments.rounds):
        for step in STEPS:
            for name in python:
                runs[name][step].append(_measured(python[name], name, step, arguments.raw))
                print(name, step, runs[name][step][-1], file=sys.stderr)
    found = {
        name: {
            step: {
                "lines": lines[name][step],
                "own_code": own[name].get(step, ""),
                **{
                    each: round(statistics.median(run[each] for run in runs[name][step]), 1)
                    for each in ("seconds", "cpu_seconds")
                },
            }
            for step in STEPS
        }
        for name in python
    }
    print(f"{'':10}" + "".join(f"{step:>32}" for step in STEPS))
    for name, steps in found.items():
        cells = (f"{each['lines']} lines, {each['seconds']} s, {each['cpu_seconds']} CPU s" for each in steps.values())
        print(f"{LIBRARIES[name]:10}" + "".join(f"{cell:>32}" for cell in cells))
    for name, why in missing.items():
        print(f"{name}: not measured; {why}")
    write({"results": found, "not_measured": missing, "rounds": arguments.rounds, "runs": runs}, arguments.out)


def _measured(python: Path, library: str, step: str, raw: Path) -> dict[str, float]:
    environment = {
        **os.environ,
        **dict.fromkeys(THREADS, "1"),
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        "PYTHONWARNINGS": "ignore",
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [python, __file__, raw.resolve(), "--measure", library, step]
        done = subprocess.run(
            [str(each) for each in command], env=environment, cwd=folder, capture_output=True, text=True
        )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        done.check_returncode()
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _lines() -> tuple[dict[str, dict[str, int]], dict[str, dict[str, str]]]:
    """Lines of each library's functions, and which part of them is code that the library lacks."""
    sys.path.insert(0, str(HERE / "first_hour"))
    modules = {name: importlib.import_module(f"with_{name}") for name in LIBRARIES}
    lines = {
        name: {
            step: sum(1 for line in inspect.getsource(getattr(module, step)).splitlines()[1:] if line.strip())
            for step in STEPS
        }
        for name, module in modules.items()
    }
    return lines, {name: module.OWN_CODE for name, module in modules.items()}


if __name__ == "__main__":
    main()
