"""Commands and verbs of the Python API work on local paths; here, the URLs that they are given become such.

What is read is copied before the work. What is written is made in a local folder and sent to the store at the end, or
while it grows if it is a run; the objects that tell that all is there go last. What the work adds to a run that it
reads, such as an evaluation, is sent too.

Stores have no locks and no renames, but their listings show what was written before. A writer puts an object of its own
into `.recspec/writers` and then lists them: of two writers, at least one sees the other and gives up. It renews the
object every `BEAT` seconds; one that was not renewed for `DEAD` seconds by the store's clock is of a writer that died.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePath
from typing import TypeGuard

from recspec.base.errors import DataError, RecspecError
from recspec.base.files import parse_json, put_in_place
from recspec.base.stores import copies
from recspec.base.stores.store import STATE, Store, Url, local_of, parse, url_text

FOLDERS = ("out", "run")
"""Parameters that name a folder to write, in the verbs of `WRITERS`."""
WRITERS = (
    "prepare",
    "synthesize",
    "transcode",
    "train",
    "tune",
    "auto",
    "blend",
    "pipeline",
    "export",
    "import_tf",
    "demo",
    "update",
)
KEEPS = ("train", "auto", "tune", "update")
"""Writers of a run: they go on with what is there."""
FILES = {"describe": "html", "report": "out", "predict": "out", "recommend": "out"}
"""Verb -> parameter that names a file to write."""
GROWS = ("train", "auto")
"""Verbs whose folder is sent while it grows, so that another machine can go on after this one died."""
ADDS = {"evaluate": ("run", "against"), "report": ("runs",)}
"""Verb -> parameters that name runs to which it adds files."""
LOCAL = ("token_file", "tls_cert", "tls_key", "tls_ca")
"""Parameters that only local files may give: secrets of a machine."""
BEAT, DEAD = 15.0, 90.0
"""Seconds."""
LOOK = 1.0
"""Seconds between looks for new files of a run."""
MARKS = "writers"
LAST = ("run.json", "bundle.json", "feature_spec.yaml", "export.json", "prepare.json", "manifest.json")
"""Files by which readers know that the others are there, in the order in which they are written."""
GROWING = ("log.jsonl", "tensorboard", "tracking.json", ".job")
"""Files of a run that change all the time; they go up together with others."""

log = logging.getLogger("recspec.base.stores")

Stamp = tuple[int, int, int]
"""Size, time in nanoseconds and inode of a file."""


@contextmanager
def with_local_paths(verb: str, values: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """The arguments of a verb that name places in stores, with local paths in their place; empty if there are none.

    When the block has succeeded, what it wrote is in the stores. Errors name the URLs and not the local copies.
    """
    if verb == "compare":  # it evaluates, and `evaluate` resolves
        yield {}
        return
    with ExitStack() as held:
        resolver = UrlResolver(
            verb, held, float(watch) if isinstance(watch := values.get("watch"), (int, float)) else 5.0
        )
        changed = {}
        for name, value in values.items():
            if (local := resolver.resolve(name, value)) is not value:
                changed[name] = local
        try:
            yield changed
            resolver.finish()
        except RecspecError as error:
            raise _as_shown(error) from None


def _as_shown(error: RecspecError) -> RecspecError:
    """The error with URLs in place of the paths of copies."""
    error.args = tuple(copies.shown(each) for each in error.args)
    error.problems = tuple(copies.shown(each) for each in error.problems)
    if hasattr(error, "__notes__"):
        error.__notes__ = [copies.shown(each) for each in error.__notes__]
    return error


class UrlResolver:
    """The places of one call, opened one after the other."""

    def __init__(self, verb: str, held: ExitStack, watch: float) -> None:
        self.verb, self.held, self.watch = verb, held, watch
        self.written: list[Writing] = []
        self.files: list[tuple[Store, Path]] = []
        self.added: list[tuple[Store, Path, dict[str, Stamp]]] = []

    def resolve(self, name: str, value: object) -> object:
        """An argument with local paths in place of URLs; the same object if it holds none."""
        if isinstance(value, (list, tuple)):
            each = [self.resolve(name, one) for one in value]
            return value if all(a is b for a, b in zip(each, value, strict=True)) else type(value)(each)
        if isinstance(value, Mapping) and name == "retriever":
            named = {key: self.resolve(name, one) for key, one in value.items()}
            return value if all(named[key] is one for key, one in value.items()) else named
        if name in ("models", "retriever") and isinstance(value, str) and "=" in value.partition("/")[0]:
            label, _, rest = value.partition("=")
            return value if url_text(rest) is None else f"{label}={self._local(name, rest)}"
        text = url_text(value)
        changes = name in ADDS.get(self.verb, ()) or (self.verb in KEEPS and name in FOLDERS)
        if text is None and changes and _is_model(value):
            text = url_text(copies.shown(os.fspath(value)))  # of a model whose folder is a copy
        if text is None:
            return value
        local = self._local(name, text)
        if isinstance(value, str):
            named_after = parse(text, name)
            own = named_after.parent.name if named_after.name == "bundle" else named_after.name
            return f"{own}={local}" if name == "models" and self.verb == "serve" else str(local)
        return local

    def _local(self, name: str, text: str) -> Path:
        url = parse(text, name)
        if url.scheme == "file":
            return local_of(url)
        if name in LOCAL:
            raise DataError(f"{name}: {url} is a URL; expected a local file, which other machines can't read")
        if self.verb in WRITERS and name in FOLDERS:
            return self._folder(url)
        if name == FILES.get(self.verb):
            return self._file(url)
        if name in ADDS.get(self.verb, ()):
            return self._with_additions(url, name)
        if self.verb == "serve":
            return self._served(url)
        if name in ("data", "spec", "rows") and url.name.endswith((".yaml", ".yml")) and url.parts:
            return copies.fetched(url.parent, name) / url.name  # a specification names files beside it
        return copies.fetched(url, name)

    # --- what is written ----------------------------------------------------------------------------------------------

    def _folder(self, url: Url) -> Path:
        rank, size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if size != int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
            raise DataError(
                f"{url}: several hosts share the folder of a run; name one on a shared disk, and copy it afterwards"
            )
        job = f"{os.environ.get('TORCHELASTIC_RUN_ID')} {os.getppid()}" if size > 1 else ""
        token = hashlib.sha256(job.encode()).hexdigest()[:16] if job else secrets.token_hex(8)
        writing = Writing(Store(url), keeps=self.verb in KEEPS, token=token)
        ready = writing.path.parent / "ready"
        if rank:
            _wait_for(ready, url)
            return writing.path
        writing.lock()
        self.held.callback(writing.unlock)
        if not ready.exists():  # torchrun may have started these processes anew
            writing.fill()
            ready.touch()
        self.held.enter_context(writing.alive(mirrors=self.verb in GROWS))
        self.written.append(writing)
        return writing.path

    def _file(self, url: Url) -> Path:
        store = Store(url)
        path = copies.work_folder(url, secrets.token_hex(8))
        self.files.append((store, path))
        return path

    def _with_additions(self, url: Url, name: str) -> Path:
        path = copies.work_folder(url, secrets.token_hex(8))
        store = Store(url)
        copies.clone(copies.copied(store, name), path, linked=True)
        self.added.append((store, path, _stamps(path)))
        return path

    def finish(self) -> None:
        """Send what the work wrote."""
        for writing in self.written:
            writing.finish()
        for store, path in self.files:
            if path.is_file():
                store.upload(path)
        for store, path, before in self.added:
            try:
                for file, stamp in _stamps(path).items():
                    if before.get(file) != stamp:
                        store.upload(path / file, file)
            except DataError as error:
                log.warning("what was found out about %s is not kept there: %s", store.url, error)

    # --- what is served -----------------------------------------------------------------------------------------------

    def _served(self, url: Url) -> Path:
        """A folder whose content is replaced whenever the store's changes, until the process ends."""
        path = copies.work_folder(url, secrets.token_hex(8))
        store = Store(url)
        found = copies.copied(store, "a model")
        copies.clone(found, path, linked=True)
        if self.watch:
            follow(store, path, found, self.watch)
        return path


def follow(store: Store, path: Path, copy: Path, seconds: float, stop: Callable[[], bool] = lambda: False) -> None:
    """Replace a folder, made from a copy, whenever the store's content has changed, from a thread of its own."""

    def look() -> None:
        shown = copies.listing_of(copy.parent)
        while not stop():
            time.sleep(seconds)
            try:
                if (now := store.listing()) and now != shown:
                    found = copies.copied(store, "a model")
                    beside = path.parent / f".{secrets.token_hex(8)}.tmp"
                    copies.clone(found, beside, linked=True)
                    put_in_place(beside, path)
                    shown = now
            except (RecspecError, OSError) as error:
                log.warning("%s: the served version stays: %s", store.url, error)

    threading.Thread(target=look, name=f"following {store.url}", daemon=True).start()


def _is_model(value: object) -> TypeGuard[os.PathLike[str]]:
    """Whether an object of the API stands for a path."""
    return isinstance(value, os.PathLike) and not isinstance(value, PurePath)


def _wait_for(ready: Path, url: Url, seconds: float = 3600.0) -> None:
    """Wait until the first process of this host has filled the folder."""
    started, parent = time.monotonic(), os.getppid()
    while not ready.exists():
        if time.monotonic() - started > seconds or os.getppid() != parent:
            raise DataError(f"{url}: the first process did not read it within {seconds:,.0f} s")
        time.sleep(0.05)


# --- writing to a store ----------------------------------------------------------------------------------------------


class Writing:
    """The sole writer of a URL, and the local folder or file that it fills.

    Args:
        keeps: Whether what an unfinished writer left is continued, as the checkpoints of a run are.
        token: Names the local folder; processes with the same one share it.
    """

    def __init__(self, store: Store, *, keeps: bool, token: str | None = None) -> None:
        self.store, self.url, self.token = store, store.url, token or secrets.token_hex(8)
        self.path = copies.work_folder(self.url, self.token)
        self._sent: dict[str, Stamp] = {}
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
                f"{self.url}: {alive[0]} is writing there; wait for it ({DEAD:.0f} s if it died), or name another place"
            )

    def _others(self) -> list[str]:
        """The other writers that live; the objects of dead ones are removed."""
        writers = self.store.state(MARKS)
        now = writers.get(self.token, 0)
        alive = []
        for name, beaten in writers.items():
            if name == self.token:
                continue
            told = self._told(name)
            if (now - beaten) / 1e9 > DEAD or _is_dead_here(told):
                self.store.delete(f"{STATE}/{MARKS}/{name}")
            else:
                alive.append(f"process {told.get('process')} on {told.get('host')}")
        return alive

    def _told(self, name: str) -> Mapping[str, object]:
        try:
            told = parse_json(self.store.get(f"{STATE}/{MARKS}/{name}") or "{}")
        except ValueError:
            told = {}
        return told if isinstance(told, dict) else {}

    def _beat(self) -> None:
        told = {"host": platform.node(), "process": os.getpid(), "boot": _boot()}
        self.store.put(f"{STATE}/{MARKS}/{self.token}", json.dumps(told))
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
        self.store.delete(f"{STATE}/{MARKS}/{self.token}")

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
        self._sent = _stamps(self.path)

    def send(self, *, last: bool) -> None:
        """Write every new and changed file to the store; after the `last` time, nothing is unfinished."""
        with self._turn:
            stamps = _stamps(self.path)
            new = sorted((name for name, stamp in stamps.items() if self._sent.get(name) != stamp), key=_order)
            gone = sorted(self._there - set(stamps)) if last or self._keeps else []
            if not new and not gone:
                return
            whole = set(stamps) == {""}  # one object appears at once
            if not whole:
                self.store.put(copies.UNFINISHED, json.dumps(sorted(self._there | set(stamps))))
            for name in new:
                with suppress(FileNotFoundError):  # an old checkpoint, removed meanwhile
                    self.store.upload(self.path / name, name, alive=self._keep_alive)
                    self._sent[name] = stamps[name]
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
                stamps = _stamps(self.path) if mirrors else {}
                if any(
                    self._sent.get(name) != stamp and not name.startswith(GROWING) for name, stamp in stamps.items()
                ):
                    self.send(last=False)
            except DataError as error:
                log.warning("%s; it is tried again", error)
                if self._lost:
                    return

    def finish(self) -> None:
        """Send the rest; raises DataError if the store fails, or another writer has taken over."""
        if self._lost:
            raise DataError(self._lost)
        self._keep_alive()
        self.send(last=True)


def _stamps(path: Path) -> dict[str, Stamp]:
    """What tells that a file of a folder was replaced or changed; nothing for those that are removed meanwhile."""
    found = {}
    for name, file in copies.files_of(path).items() if path.exists() else ():
        with suppress(FileNotFoundError):
            stat = file.stat()
            found[name] = stat.st_size, stat.st_mtime_ns, stat.st_ino
    return found


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
    process, is_here = told.get("process"), told.get("host") == platform.node() and told.get("boot") == _boot() != ""
    if not is_here or not isinstance(process, int):
        return False
    try:
        os.kill(process, 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, ProcessLookupError)
    return False
