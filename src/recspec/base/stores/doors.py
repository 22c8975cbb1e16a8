"""Commands and verbs of the Python API work on local paths; here, the URLs that they are given become such.

What is read is copied before the work. What is written is made in a local folder and sent to the store at the end, or
while it grows if it is a run. What the work adds to a run that it reads, such as an evaluation, is sent too.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePath
from typing import TypeGuard

from recspec.base.errors import DataError, RecspecError
from recspec.base.files import put_in_place
from recspec.base.stores import copies
from recspec.base.stores.store import Store, Url, local_of, parse, url_text
from recspec.base.stores.writing import Writing

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

log = logging.getLogger("recspec.base.stores")


@contextmanager
def resolved(verb: str, values: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """The arguments of a verb that name places in stores, with local paths in their place; empty if there are none.

    When the block has succeeded, what it wrote is in the stores. Errors name the URLs and not the local copies.
    """
    if verb == "compare":  # it evaluates, and `evaluate` resolves
        yield {}
        return
    with ExitStack() as held:
        door = _Door(verb, held, float(watch) if isinstance(watch := values.get("watch"), (int, float)) else 5.0)
        changed = {}
        for name, value in values.items():
            if (local := door.resolve(name, value)) is not value:
                changed[name] = local
        try:
            yield changed
            door.finish()
        except RecspecError as error:
            raise _as_shown(error) from None


def _as_shown(error: RecspecError) -> RecspecError:
    """The error with URLs in place of the paths of copies."""
    error.args = tuple(copies.shown(each) for each in error.args)
    error.problems = tuple(copies.shown(each) for each in error.problems)
    if hasattr(error, "__notes__"):
        error.__notes__ = [copies.shown(each) for each in error.__notes__]
    return error


class _Door:
    """The places of one call, opened one after the other."""

    def __init__(self, verb: str, held: ExitStack, watch: float) -> None:
        self.verb, self.held, self.watch = verb, held, watch
        self.written: list[Writing] = []
        self.files: list[tuple[Store, Path]] = []
        self.added: list[tuple[Store, Path, dict[str, tuple[int, ...]]]] = []

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
                f"{url}: the processes of several hosts share the folder of a run; name a folder on a disk "
                "that all of them see, and copy it to the store afterwards"
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


def _stamps(path: Path) -> dict[str, tuple[int, ...]]:
    """What tells that a file was replaced."""
    stats = {name: file.stat() for name, file in copies.files_of(path).items()}
    return {name: (each.st_size, each.st_mtime_ns, each.st_ino) for name, each in stats.items()}


def _wait_for(ready: Path, url: Url, seconds: float = 3600.0) -> None:
    """Wait until the first process of this host has filled the folder."""
    started, parent = time.monotonic(), os.getppid()
    while not ready.exists():
        if time.monotonic() - started > seconds or os.getppid() != parent:
            raise DataError(f"{url}: the first process did not read it within {seconds:,.0f} s")
        time.sleep(0.05)
