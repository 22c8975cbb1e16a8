"""What measurements of `recspec prepare` share: their options, and a process whose time and memory are counted."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _side_by_side import compile_source

ROOT = Path(__file__).parents[1]


def options(about: str | None, script: str) -> argparse.ArgumentParser:
    """The options that all of them have; `about` is the benchmark's docstring."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-limit", default="2GB")
    parser.add_argument("--engine", default="duckdb")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scratch", type=Path, default=None, help="folder for raw files, stages and spilling")
    out = ROOT / "benchmarks" / "results" / f"{Path(script).stem}.json"
    parser.add_argument("--out", type=Path, default=out)
    return parser


def prepare_command(name: str, raw: Path, out: Path, arguments: argparse.Namespace, *settings: str) -> list[str]:
    """`recspec prepare NAME RAW OUT` under this interpreter."""
    given = ["--engine", arguments.engine, "--memory-limit", arguments.memory_limit]
    given += [part for setting in settings for part in ("--set", setting)]
    return [sys.executable, "-m", "recspec", "prepare", name, str(raw), str(out), *given]


def counted(command: Sequence[str], *, after: Path | None = None) -> dict[str, Any]:
    """Seconds and peak memory of a command in a process of its own, killed once the file `after` is there.

    The peak is the most memory that it ever held resident, as the kernel counted it.
    """
    compile_source(ROOT / "src")
    started = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
        while after is not None and not after.exists() and process.poll() is None:
            time.sleep(0.05)
        if after is not None:
            process.send_signal(signal.SIGKILL)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != (0 if after is None else -signal.SIGKILL):
            said.seek(0)
            raise SystemExit(said.read().decode())
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_megabytes": round(usage.ru_maxrss * 1024 / 1e6),
        "load_when_it_ended": os.getloadavg()[0],
    }


def megabytes(folder: Path) -> float:
    """Of all files below a folder."""
    return round(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6, 1)
