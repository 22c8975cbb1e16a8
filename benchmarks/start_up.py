"""How long commands take to start: the help, the first step of a training, the first answer of a server.

    python benchmarks/start_up.py [--turns 7] [--only help,train] [--source OTHER/src] [--out FILE]

Every measurement is a process of its own, started as a user starts it, on small made-up data. The
bytecode of recspec is there, as after an installation, and the page cache is warm.
Seconds are those of the clock and of the CPU, from the start of the process to

- `help`: its end;
- `train MODEL`: the time that `log.jsonl` gives for the first step (`train.log_every=1`). This step has been computed.
  `train MODEL, first run` has an empty cache folder, so that the speed of the CPU's products is measured too;
- `serve`: the answer with status 200 to `POST /recommend` with a raw user id. A client asks every 5 ms.

The CPU seconds of `train` and `serve` are read from /proc right after that, so this script needs Linux. `--source` runs
another version of recspec, on the data and the bundle of this one.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from _raw_files import write_table
from _side_by_side import compile_source, where_and_when, write

AIMS = {"help": 0.15, "train": 1.5, "serve": 1.5}
"""Seconds of the clock."""
MODELS = {"neumf": "films", "two_tower": "films", "wide_deep": "clicks", "dlrm": "clicks"}
"""Models that are trained, and the data of each."""
PATIENCE = 120
"""Seconds after which a process has failed."""

Took = tuple[float, float]
"""Seconds of the clock and of the CPU."""


def main() -> None:
    """Print a line for each command and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7, help="measurements of each command; one more warms up")
    parser.add_argument("--only", default="", help="beginnings of the names of what to measure, between commas")
    parser.add_argument("--source", type=Path, help="folder src of the version to measure; by default this one's")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "start_up.json")
    asked = parser.parse_args()
    own = Path(__file__).parents[1] / "src"
    for source in {own, asked.source or own}:
        compile_source(source)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_data(folder, environment(own))
        measures = {
            name: measure
            for name, measure in measurements(folder, environment(asked.source or own)).items()
            if name.startswith(tuple(asked.only.split(",")))
        }
        found: dict[str, list[Took]] = {name: [] for name in measures}
        for turn in range(asked.turns + 1):
            for name, measure in measures.items():
                took = measure()
                if turn:
                    found[name].append(took)
    lines = {name: summary(name, times) for name, times in found.items()}
    print_table(lines)
    write({"turns": asked.turns, "seconds": lines, **where_and_when()}, asked.out)


def measurements(folder: Path, env: Mapping[str, str]) -> dict[str, Callable[[], Took]]:
    """What is measured, by name."""
    trainings = {f"train {model}": partial(first_step, model, folder, env) for model in MODELS}
    empty = {"train neumf, first run": partial(first_step, "neumf", folder, env, is_first=True)}
    return {"help": partial(whole_help, env), **trainings, **empty, "serve": partial(first_answer, folder, env)}


def environment(source: Path) -> dict[str, str]:
    """This process's environment, with the version of recspec in `source`."""
    return {**os.environ, "PYTHONPATH": str(source)}


def make_data(folder: Path, env: Mapping[str, str]) -> None:
    """Prepare films (interactions) and clicks (labelled rows), and train the model that is served."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file may be run from anywhere
    from tests.made_up_films import write_movielens_like

    write_movielens_like(folder / "raw", num_users=500, num_items=400, num_ratings=20_000, seed=0)
    write_table(folder / "table", np.random.default_rng(1))
    columns = ["label=clicked", "user=who", "item=what", "timestamp=when"]
    run("prepare", "movielens", folder / "raw", folder / "films", env=env)
    run("prepare", "table", folder / "table" / "clicks.csv", folder / "clicks", *set_all(columns), env=env)
    run("train", "neumf", folder / "films", folder / "served", *set_all(["train.epochs=1"]), env=env)


def set_all(assignments: list[str]) -> list[str]:
    """The options of a command that set these."""
    return [word for assignment in assignments for word in ("--set", assignment)]


def run(*words: object, env: Mapping[str, str]) -> None:
    """Run a command of recspec to its end."""
    done = subprocess.run(command(*words), env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"recspec {' '.join(map(str, words))}:\n{done.stderr}")


def command(*words: object) -> list[str]:
    """The command line of recspec with these words."""
    return [sys.executable, "-m", "recspec", *map(str, words)]


# --- measurements ----------------------------------------------------------------------------------------------------


def whole_help(env: Mapping[str, str]) -> Took:
    """`recspec --help` to its end."""
    started = time.perf_counter()
    process = subprocess.Popen(command("--help"), env=env, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit("recspec --help failed")
    return time.perf_counter() - started, used.ru_utime + used.ru_stime


def first_step(model: str, folder: Path, env: Mapping[str, str], *, is_first: bool = False) -> Took:
    """`recspec train` to the end of its first step."""
    with tempfile.TemporaryDirectory(dir=folder) as run_folder:
        log = Path(run_folder) / "run" / "log.jsonl"
        words = ["train", model, folder / MODELS[model], log.parent, *set_all(["train.epochs=3", "train.log_every=1"])]
        if is_first:
            env = {**env, "XDG_CACHE_HOME": str(Path(run_folder) / "cache")}
        with started_process(words, env) as (process, started, _):
            while True:
                written = log.read_text(encoding="utf-8") if log.exists() else ""
                for line in filter(lambda each: '"event": "step"' in each, written.splitlines()):
                    with suppress(json.JSONDecodeError):  # half of a line
                        return json.loads(line)["time"] - started, cpu_seconds(process)
                wait_for(process, started)


def first_answer(folder: Path, env: Mapping[str, str]) -> Took:
    """`recspec serve` to its first list of items."""
    body = json.dumps({"user": "1", "k": 10})
    with started_process(["serve", f"m={folder / 'served'}", "--http-port", 0, "--grpc-port", 0], env) as (
        process,
        started,
        said,
    ):
        while not (listening := re.search(rb" at http://([\d.:]+)", os.pread(said.fileno(), 1 << 20, 0))):
            wait_for(process, started)
        while True:
            connection = http.client.HTTPConnection(listening[1].decode(), timeout=PATIENCE)
            with suppress(OSError, http.client.HTTPException):
                connection.request("POST", "/recommend", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                text = answer.read()
                if answer.status == 200:
                    return time.time() - started, cpu_seconds(process)
                raise SystemExit(f"the server answered {answer.status}: {text!r}")
            connection.close()
            wait_for(process, started)


@contextmanager
def started_process(
    words: list[object], env: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], float, IO[bytes]]]:
    """A command of recspec that is killed at the end of the block, the time of its start, and what it prints."""
    with tempfile.TemporaryFile() as said:
        started = time.time()
        process = subprocess.Popen(command(*words), env=env, stdout=said, stderr=said)
        try:
            yield process, started, said
        except TimeoutError:
            said.seek(0)
            raise SystemExit(f"recspec {' '.join(map(str, words))}:\n{said.read().decode()}") from None
        finally:
            process.kill()
            process.wait()


def wait_for(process: subprocess.Popen[bytes], started: float) -> None:
    """Wait 5 ms.

    Raises:
        TimeoutError: if the process has ended or takes too long.
    """
    if process.poll() is not None or time.time() - started > PATIENCE:
        raise TimeoutError
    time.sleep(0.005)


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """CPU seconds of a process so far."""
    parts = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


# --- reporting -------------------------------------------------------------------------------------------------------


def summary(name: str, times: list[Took]) -> dict[str, float]:
    """Medians, the range of the clock, and the aim."""
    clock = [took[0] for took in times]
    return {
        "clock": round(statistics.median(clock), 3),
        "fastest": round(min(clock), 3),
        "slowest": round(max(clock), 3),
        "cpu": round(statistics.median(took[1] for took in times), 3),
        "aim": AIMS[name.split()[0]],
    }


def print_table(lines: Mapping[str, Mapping[str, float]]) -> None:
    """A line for each command."""
    print(f"{'seconds':26}{'clock':>8}{'fastest':>9}{'slowest':>9}{'CPU':>8}{'aim':>7}")
    for name, line in lines.items():
        wide = {"clock": 8, "fastest": 9, "slowest": 9, "cpu": 8, "aim": 7}
        print(f"{name:26}" + "".join(f"{line[column]:{width}.2f}" for column, width in wide.items()))


if __name__ == "__main__":
    main()
