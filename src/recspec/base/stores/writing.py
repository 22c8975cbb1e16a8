"""Writing to a store: one writer at a time, into a local folder first, the objects that tell that all is there last.

Stores have no locks and no renames, but their listings show what was written before. A writer puts an object of its own
into `.recspec/writers` and then lists them: of two writers, at least one sees the other and gives up. It renews the
object every `BEAT` seconds; one that was not renewed for `DEAD` seconds by the store's clock is of a writer that died.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from recspec.base.errors import DataError
from recspec.base.files import parse_json
from recspec.base.stores import copies
from recspec.base.stores.store import STATE, Store

BEAT, DEAD = 15.0, 90.0
"""Seconds."""
LOOK = 1.0
"""Seconds between looks for new files of a run."""
WRITERS = "writers"
LAST = ("run.json", "bundle.json", "feature_spec.yaml", "export.json", "prepare.json", "manifest.json")
"""Files by which readers know that the others are there, in the order in which they are written."""
GROWING = ("log.jsonl", "tensorboard", "tracking.json", ".job")
"""Files of a run that change all the time; they go up together with others."""

log = logging.getLogger("recspec.base.stores")


class Writing:
    """The sole writer of a URL, and the local folder or file that it fills.

    Args:
        keeps: Whether what an unfinished writer left is continued, as the checkpoints of a run are.
        token: Names the local folder; processes with the same one share it.
    """

    def __init__(self, store: Store, *, keeps: bool, token: str | None = None) -> None:
        self.store, self.url, self.token = store, store.url, token or secrets.token_hex(8)
        self.path = copies.work_folder(self.url, self.token)
        self._sent: dict[str, tuple[int, int]] = {}
        self._there: set[str] = set()
        self._keeps, self._beaten, self._lost = keeps, 0.0, ""
        self._turn, self._end = threading.Lock(), threading.Event()

    # --- the lock -----------------------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Become the sole writer. Raises DataError if another one is alive."""
        self._beat()
        alive = self._others()
        if alive:
            self.unlock()
            raise DataError(
                f"{self.url}: {alive[0]} is writing there; wait for it, end it, or name another place. A "
                f"writer that died counts as alive for {DEAD:.0f} s"
            )

    def _others(self) -> list[str]:
        """The other writers that live; the objects of dead ones are removed."""
        writers = self.store.state(WRITERS)
        now = writers.get(self.token, 0)
        alive = []
        for name, beaten in writers.items():
            if name == self.token:
                continue
            told = self._told(name)
            if (now - beaten) / 1e9 > DEAD or _is_dead_here(told):
                self.store.delete(f"{STATE}/{WRITERS}/{name}")
            else:
                alive.append(f"process {told.get('process')} on {told.get('host')}")
        return alive

    def _told(self, name: str) -> Mapping[str, object]:
        try:
            told = parse_json(self.store.get(f"{STATE}/{WRITERS}/{name}") or "{}")
        except ValueError:
            told = {}
        return told if isinstance(told, dict) else {}

    def _beat(self) -> None:
        told = {"host": platform.node(), "process": os.getpid(), "boot": _boot()}
        self.store.put(f"{STATE}/{WRITERS}/{self.token}", json.dumps(told))
        self._beaten = time.monotonic()

    def _keep_alive(self) -> None:
        if time.monotonic() - self._beaten > BEAT:
            late = time.monotonic() - self._beaten > DEAD
            self._beat()
            if late and self._others():
                self._lost = f"{self.url}: this process stood still for {DEAD:.0f} s, and another one writes there now"
                raise DataError(self._lost)

    def unlock(self) -> None:
        """Let others write."""
        self.store.delete(f"{STATE}/{WRITERS}/{self.token}")

    # --- files --------------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Copy what lies at the URL into the local folder.

        What an earlier writer left unfinished is continued or written anew.
        """
        unfinished = self.store.get(copies.UNFINISHED)
        listing = self.store.listing()
        if "" in listing:  # a file, which will be replaced
            return
        if unfinished is not None and not self._keeps:
            self._there = set(listing) & _names(unfinished)
            if others := sorted(set(listing) - self._there):
                raise DataError(f"{self.url}: holds '{others[0]}', which no writer of recspec left; name another place")
            return
        self._there = set(listing)
        if not listing:
            return
        if unfinished is None:
            copies.clone(copies.copied(self.store, "OUT"), self.path, linked=False)
        else:
            self.path.mkdir()
            self.store.download(listing, self.path, lambda name: self.path / name)
        self._sent = {name: _stamp(file) for name, file in copies.files_of(self.path).items()}

    def send(self, *, last: bool) -> None:
        """Write every new and changed file to the store; after the `last` time, nothing is unfinished."""
        with self._turn:
            files = copies.files_of(self.path) if self.path.exists() else {}
            new = {name: stamp for name, file in files.items() if self._sent.get(name) != (stamp := _stamp(file))}
            gone = sorted(self._there - set(files)) if last or self._keeps else []
            if not new and not gone:
                return
            whole = set(files) == {""}  # one object appears at once
            if not whole:
                self.store.put(copies.UNFINISHED, json.dumps(sorted(self._there | set(files))))
            for name in sorted(new, key=_order):
                try:
                    self.store.upload(files[name], name, alive=self._keep_alive)
                except FileNotFoundError:  # an old checkpoint, removed meanwhile
                    continue
                self._sent[name] = new[name]
                self._there.add(name)
            for name in gone:
                self.store.delete(name)
                self._there.discard(name)
                self._sent.pop(name, None)
            if not whole and last:
                self.store.delete(copies.UNFINISHED)

    @contextmanager
    def alive(self, *, mirrors: bool) -> Iterator[None]:
        """Renew the lock, and with `mirrors` send new files, while the block runs."""
        thread = threading.Thread(target=self._live, args=(mirrors,), name=f"writing {self.url}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def _live(self, mirrors: bool) -> None:
        while not self._end.wait(LOOK):
            try:
                self._keep_alive()
                if mirrors and self._has_news():
                    self.send(last=False)
            except DataError as error:
                log.warning("%s; it is tried again", error)
                if self._lost:
                    return

    def _has_news(self) -> bool:
        files = copies.files_of(self.path) if self.path.exists() else {}
        return any(self._sent.get(name) != _stamp(file) for name, file in files.items() if not name.startswith(GROWING))

    def finish(self) -> None:
        """Send the rest; raises DataError if the store fails, or another writer has taken over."""
        if self._lost:
            raise DataError(self._lost)
        self._keep_alive()
        self.send(last=True)
        copies.adopt(self.path, self.url, self.store.listing())


def _stamp(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except FileNotFoundError:
        return (-1, -1)
    return found.st_size, found.st_mtime_ns


def _order(name: str) -> tuple[int, str]:
    base = name.rpartition("/")[2]
    return (LAST.index(base) if base in LAST else -1, name)


def _names(unfinished: str) -> set[str]:
    try:
        found = parse_json(unfinished)
    except ValueError:
        return set()
    return {str(each) for each in found} if isinstance(found, list) else set()


def _boot() -> str:
    """What distinguishes this start of the machine from others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _is_dead_here(told: Mapping[str, object]) -> bool:
    """Whether a writer was a process of this machine, and has ended."""
    process = told.get("process")
    if told.get("host") != platform.node() or not told.get("boot") or told.get("boot") != _boot():
        return False
    return isinstance(process, int) and not _runs(process)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
