"""How `recspec prepare --engine spark` grows: CPU time and memory of the driver and of the executors.

A standalone master and two workers of one core each run on this machine. Made-up rows are prepared at 1, 4 and 16 times
their number: interactions in the layout of MovieLens, with histories and negatives, or clicks in Criteo's. Each line of
the table is one run.

    python benchmarks/spark_growth.py [--dataset movielens] [--rows 125000] [--times 1 4 16] [--source src]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pyspark

from _side_by_side import machine_line, where_and_when

HOST = "127.0.0.1"
SETTINGS = {
    "movielens": ("history=20", "num_negatives=20", "negative_history=true"),
    "criteo": ("format=split_binary",),
}
ROOT = Path(__file__).resolve().parents[1]
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dataset", choices=[*SETTINGS], default="movielens")
    parser.add_argument("--rows", type=int, default=125_000)
    parser.add_argument("--times", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="recspec's code")
    chosen = parser.parse_args()
    found = where_and_when()
    print(f"{machine_line(found)}, load {found['load_average']:.1f}, {found['date']}, commit {found['commit']}\n")
    print(
        "| rows | s | driver's Python: CPU s, peak MB | driver's JVM: CPU s "
        "| executors: CPU s in Python, in JVMs, peak MB of a Python process |\n|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for times in chosen.times:
            rows = times * chosen.rows
            raw = Path(folder) / f"raw-{times}"
            sys.path.insert(0, str(ROOT))  # this file may be run from anywhere
            if chosen.dataset == "movielens":
                from tests.made_up_films import write_movielens_like

                write_movielens_like(raw, num_users=rows // 100, num_items=4000, num_ratings=rows)
            else:
                from tests import made_up_criteo

                made_up_criteo.write(raw, num_rows=rows)
            print(_measured(chosen.dataset, raw, Path(folder) / f"out-{times}", rows, chosen.source), flush=True)


def _measured(dataset: str, raw: Path, out: Path, rows: int, source: Path) -> str:
    env = {
        **os.environ,
        "PYTHONPATH": str(source),
        "SPARK_LOCAL_IP": HOST,
        "OMP_NUM_THREADS": "1",
        "PYSPARK_PYTHON": sys.executable,
    }
    with ExitStack() as stack:
        where = ["--host", HOST, "--webui-port", "0"]
        log = stack.enter_context(tempfile.NamedTemporaryFile())
        stack.enter_context(_running("master.Master", [*where, "--port", "0"], env, log.fileno()))
        while not (listening := re.search(rb"spark://[\w.]+:[1-9]\d*", Path(log.name).read_bytes())):
            time.sleep(0.1)
        url = listening[0].decode()
        own = [*where, "-c", "1", "-m", "2g", url]
        workers = [stack.enter_context(_running("worker.Worker", own, env)) for _ in range(2)]
        time.sleep(5)
        command = [sys.executable, "-m", "recspec", "prepare", dataset, str(raw), str(out), "--engine", "spark"]
        command += [part for setting in SETTINGS[dataset] for part in ("--set", setting)]
        started = time.perf_counter()
        driver = subprocess.Popen(command, env={**env, "SPARK_MASTER": url}, stdout=subprocess.DEVNULL)
        driver_seen: dict[int, _Seen] = {}
        workers_seen: dict[int, _Seen] = {}
        while driver.poll() is None:
            _look([driver.pid], driver_seen)
            _look([worker.pid for worker in workers], workers_seen)
            time.sleep(0.1)
        took = time.perf_counter() - started
        if driver.returncode:
            raise SystemExit(f"prepare ended with {driver.returncode}")
    python_driver = driver_seen.pop(driver.pid)
    jvm = sum(seen.cpu for seen in driver_seen.values())
    python = [seen for seen in workers_seen.values() if not seen.is_java]
    java = sum(seen.cpu for seen in workers_seen.values() if seen.is_java)
    peak = max((seen.peak for seen in python), default=0)
    return (
        f"| {rows:,} | {took:.0f} | {python_driver.cpu:.1f}, {python_driver.peak:.0f} | {jvm:.0f} | "
        f"{sum(seen.cpu for seen in python):.1f}, {java:.0f}, {peak:.0f} |"
    )


@contextmanager
def _running(
    name: str, arguments: list[str], env: dict[str, str], log: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[bytes]]:
    script = Path(pyspark.__file__).parent / "bin" / "spark-class"
    command = [str(script), f"org.apache.spark.deploy.{name}", *arguments]
    with tempfile.TemporaryDirectory() as work:
        process = subprocess.Popen(
            command, env={**env, "SPARK_WORKER_DIR": work}, cwd=work, stdout=subprocess.DEVNULL, stderr=log
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


class _Seen:
    """A process: CPU seconds, peak of its memory in MB, and whether it is a JVM."""

    def __init__(self) -> None:
        self.cpu, self.peak, self.is_java = 0.0, 0.0, False


def _look(roots: list[int], seen: dict[int, _Seen]) -> None:
    """Note what the processes of some trees have used so far; one that ended keeps what was seen last."""
    parents: dict[int, tuple[int, str, float]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name, rest = (folder / "stat").read_text().rsplit(") ", 1)
            fields = rest.split()
            cpu = (int(fields[11]) + int(fields[12])) / TICKS
            parents[int(folder.name)] = int(fields[1]), name.split("(", 1)[1], cpu
    for pid, (_, name, cpu) in parents.items():
        above = pid
        while above in parents and above not in roots:
            above = parents[above][0]
        if above in roots:
            each = seen.setdefault(pid, _Seen())
            each.cpu, each.is_java = cpu, name == "java"
            with suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                peak = next(line for line in lines if line.startswith("VmHWM"))
                each.peak = max(each.peak, int(peak.split()[1]) / 1000)


if __name__ == "__main__":
    main()
