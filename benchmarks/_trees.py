"""Two source trees of recspec, each asked by its command line in processes of its own.

Nothing of recspec is imported here: the trees may have different modules.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "COLUMNS": "200",
}
"""One thread, no GPU, the same hashes: what makes two runs of a command equal."""


class CommandError(Exception):
    """A command failed, or listed what no check covers."""


class Tree:
    """A source tree, and a folder of its own that its commands run in."""

    def __init__(self, name: str, source: Path, folder: Path) -> None:
        self.name, self.source, self.folder = name, source, folder
        self.done: dict[Sequence[str], str] = {}
        folder.mkdir(parents=True)

    def environment(self, *paths: Path) -> dict[str, str]:
        """The environment of a process that imports this tree's recspec."""
        search = os.pathsep.join(map(str, (self.source / "src", *paths)))
        return {**os.environ, **QUIET, "PYTHONPATH": search}

    def python(self, *arguments: str, paths: Sequence[Path] = ()) -> str:
        """Standard output of the interpreter with these arguments.

        Raises:
            CommandError: if it fails.
        """
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=self.environment(*paths), capture_output=True, text=True
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            said = lines[-1] if lines else "no message"
            raise CommandError(f"{self.name}: {said} (status {done.returncode} of {' '.join(arguments)})")
        return done.stdout

    def once(self, *arguments: str) -> str:
        """As `python`, but what this tree has run already is not run again."""
        if arguments not in self.done:
            self.done[arguments] = self.python(*arguments)
        return self.done[arguments]

    def recspec(self, *command: str) -> str:
        """Standard output of a `recspec` command, run once."""
        return self.once("-m", "recspec", *command)

    def check(self) -> None:
        """Raise unless a process of this tree imports this tree's recspec."""
        found = self.python("-c", "import recspec; print(recspec.__file__)").strip()
        if not Path(found).is_relative_to(self.source):
            raise CommandError(f"{self.name}: imports {found}, which lies outside {self.source}")

    @contextmanager
    def serving(self, *models: str) -> Iterator[Server]:
        """`recspec serve` of these models on a free port."""
        options = ["--http-port", "0", "--no-grpc", "--threads", "1", "--watch", "0", "--json"]
        command = [sys.executable, "-m", "recspec", "serve", *models, *options]
        with (
            (self.folder / "server.log").open("w") as log,
            subprocess.Popen(
                command, cwd=self.folder, env=self.environment(), stdout=subprocess.PIPE, stderr=log, text=True
            ) as process,
        ):
            assert process.stdout is not None
            try:
                said = "".join(iter(process.stdout.readline, "}\n"))
                if process.poll() is not None:
                    log_lines = (self.folder / "server.log").read_text(encoding="utf-8").strip().splitlines()
                    raise CommandError(f"{self.name}: recspec serve {' '.join(models)}: {log_lines[-1:]}")
                yield Server(json.loads(said + "}"))
                process.send_signal(signal.SIGTERM)
                process.wait(60)
            finally:
                process.kill()


class Server:
    """A connection to a running server."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        address = next(value for value in told.values() if isinstance(value, str) and value.startswith("http://"))
        self.connection = http.client.HTTPConnection(address.removeprefix("http://").rstrip("/"), timeout=60)

    def ask(self, route: str, body: str | None = None) -> Any:
        """The JSON answer of a route, beside its status."""
        method, headers = ("GET", {}) if body is None else ("POST", {"Content-Type": "application/json"})
        self.connection.request(method, route, body, headers)
        answer = self.connection.getresponse()
        return {"status": answer.status, "answer": json.loads(answer.read())}


@contextmanager
def source_of(given: str, scratch: Path) -> Iterator[Path]:
    """The source tree that an argument names: a folder, or a commit checked out into `scratch` for the time being.

    Raises:
        SystemExit: if it is neither.
    """
    if Path(given, "src", "recspec").is_dir():
        yield Path(given).resolve()
        return
    git = ["git", "-C", str(ROOT)]
    added = subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(scratch), given], capture_output=True)
    if added.returncode:
        raise SystemExit(f"{given}: neither a folder with src/recspec nor a commit: {added.stderr.decode().strip()}")
    try:
        yield scratch
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(scratch)], check=True)


def commit_of(source: Path) -> str | None:
    """The commit of a source tree, and whether files differ from it; None without git."""
    done = subprocess.run(["git", "-C", str(source), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip() or None
