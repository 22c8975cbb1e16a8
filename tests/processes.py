"""Processes of their own: copies of one process that has loaded torch and recspec, so that each begins at once.

A new interpreter takes two seconds of a core to load torch. The process that is copied starts with a test session's
first copy, has a single thread, and ends with the session.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from torch.distributed import TCPStore

PATIENCE = 600.0
"""Seconds until processes that hang are ended; they take a few on a quiet machine."""

COMMAND = "from recspec import cli; cli.main()"
"""The code of `recspec` itself."""

LOADED = ["recspec.cli.app", "recspec.inference", "recspec.training", "torch.distributed", "tests.processes"]
"""Modules that a copy finds loaded."""

_copies = multiprocessing.get_context("forkserver")
_copies.set_forkserver_preload(LOADED)


@dataclass(frozen=True)
class Ended:
    """What a process printed, and its exit status; below 0, the signal that killed it."""

    returncode: int
    stdout: str
    stderr: str


class Running:
    """A process that runs Python code."""

    def __init__(self, code: str, *arguments: str, **environment: str) -> None:
        self._folder = Path(tempfile.mkdtemp(dir=_printed()))
        given = (code, ["-c", *arguments], {**os.environ, **environment}, os.fspath(self._folder))
        self._process: ForkServerProcess = _copies.Process(target=_become, args=given)
        self._process.start()

    @property
    def pid(self) -> int:
        """The number of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.exitcode is None

    def ended(self) -> Ended:
        """Wait for the end."""
        self._process.join(PATIENCE)
        status = self._process.exitcode
        self.kill()
        assert status is not None, f"it did not end; it said {self._said('err')}"
        return Ended(status, self._said("out"), self._said("err"))

    def kill(self) -> None:
        """End the process if it still runs."""
        self._process.kill()
        self._process.join()

    def _said(self, stream: str) -> str:
        return (self._folder / stream).read_text(encoding="utf-8", errors="replace")


def ended(code: str, *arguments: str, **environment: str) -> Ended:
    """Run Python code in a process of its own, with `arguments` in `sys.argv`."""
    return Running(code, *arguments, **environment).ended()


def recspec(*arguments: str | Path) -> Ended:
    """Run a command in a process of its own."""
    return ended(COMMAND, *map(str, arguments))


def a_store() -> TCPStore:
    """A store at a port that the system chose; ranks can meet there as long as the store is kept.

    torchrun does the same: it keeps the store and hands its port down. A port that is looked for first and opened later
    by the first rank could be taken in between.
    """
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@contextmanager
def ranks(
    code: str, world_size: int, *arguments: str, store: TCPStore | None = None, **environment: str
) -> Iterator[list[Running]]:
    """The processes of all ranks, which meet at `store`, held by the test; those that run at the end are killed."""
    store = store or a_store()
    shared = {
        "WORLD_SIZE": f"{world_size}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{store.port}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    processes = [
        Running(code, *arguments, **{**shared, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"})
        for rank in range(world_size)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def recspec_on_two(*arguments: str | Path) -> list[Ended]:
    """Run a command on two ranks, each a process of its own."""
    with ranks(COMMAND, 2, *map(str, arguments)) as processes:
        return [process.ended() for process in processes]


@cache
def _printed() -> str:
    """Folder of what processes print, for as long as the tests run."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _become(code: str, argv: list[str], environment: dict[str, str], folder: str) -> None:
    """What a copy does: Python's own `-c`, with files for what it prints."""
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT, 0o600)  # noqa: PTH118
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a script has started the tests with `&`
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
