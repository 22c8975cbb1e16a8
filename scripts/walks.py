"""How far a request walks through the source: functions, files, and moves between files.

    python -m scripts.walks

A function counts once, in the order of its first call, from any thread; a move is a step from one file to another in
that order. Four walks: `train neumf` to its first step, `prepare table` from CSV to Parquet, `POST /recommend` to a
running server, and `update` of a run with new events. Functions that run while a module is imported don't count.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType

import recspec as rs
from recspec.training.step import TrainingStep

PACKAGE = str(Path(rs.__file__).parent)


class FirstStep(Exception):
    """Training has come to its first step."""


class Walk:
    """The functions of the package that are called within the block, in this thread and in those it starts."""

    def __init__(self) -> None:
        self._seen: dict[CodeType, None] = {}

    def __enter__(self) -> Walk:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")  # no body of a class
        if event == "call" and is_function and code.co_filename.startswith(PACKAGE):
            self._seen.setdefault(code)

    def begin(self) -> None:
        """Forget what was called so far."""
        self._seen.clear()

    @property
    def found(self) -> list[CodeType]:
        """Each function once, in the order of its first call."""
        return list(self._seen)


def line(walk: str, found: list[CodeType]) -> str:
    """A row of the table."""
    files = [code.co_filename for code in found]
    moves = sum(one != other for one, other in pairwise(files))
    return f"| {walk} | {len(found):,} | {len(set(files)):,} | {moves:,} |"


def events(path: Path, *, seed: int, rows: int = 3_000, start: int = 1_600_000_000) -> Path:
    """Made-up events of 60 users and 50 items."""
    drawn = random.Random(seed)
    lines = [f"u{drawn.randrange(60)},i{drawn.randrange(50)},{start + number * 60}" for number in range(rows)]
    path.write_text("\n".join(["user,item,timestamp", *lines]) + "\n", encoding="utf-8")
    return path


def train_to_the_first_step(data: Path, out: Path) -> None:
    """`train neumf` until its first step is called."""
    usual = TrainingStep.__call__

    def stop(*_: object, **__: object) -> None:
        raise FirstStep

    TrainingStep.__call__ = stop  # type: ignore[method-assign, assignment]
    try:
        with suppress(FirstStep):
            rs.train("neumf", data, out)
    finally:
        TrainingStep.__call__ = usual  # type: ignore[method-assign]


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data, run = folder / "data", folder / "run"
        raw = events(folder / "events.csv", seed=1)
        new = events(folder / "new.csv", seed=2, rows=200, start=1_600_400_000)
        walks: dict[str, Callable[[], object]] = {
            "`prepare table`, CSV to Parquet": lambda: rs.prepare(raw, out=data),
            "`train neumf` to the first step": lambda: train_to_the_first_step(data, folder / "never"),
        }
        rows = []
        for walk, call in walks.items():
            with Walk() as followed:
                call()
            rows.append(line(walk, followed.found))
        rs.train("neumf", data, run, settings={"train.epochs": 1})
        with Walk() as followed, rs.serve(run, block=False, http_port=0) as serving:
            body = json.dumps({"user": "u1", "k": 5}).encode()
            request = urllib.request.Request(f"{serving.url}/recommend", body, {"Content-Type": "application/json"})
            followed.begin()
            with urllib.request.urlopen(request) as answer:
                answer.read()
            rows.append(line("`POST /recommend`", followed.found))
        with Walk() as followed:
            rs.update(run, new)
        rows.append(line("`update` with new events", followed.found))
    head = "| walk | functions | files | moves between files |\n|---|---|---|---|"
    sys.stdout.write("\n".join([head, *rows, ""]))


if __name__ == "__main__":
    main()
