"""Folders of models: their names and versions, the private copies that a server answers from, and the reports of runs.

A server reads each file once, compares it, and answers from the copy alone. What others write to a model's files, in
place or cut short, changes no answer and ends no process. Processes of one server share the copies: the supervisor
makes them, and each worker links their files into a folder of its own.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recspec.base.errors import BundleError, RequestError, SettingsError
from recspec.base.files import PathError, hidden_sibling, is_locked, is_own, locked, manifest, named_path, removed
from recspec.bundle import folder as bundle
from recspec.feature_spec import find_export_file

RAW = "_raw"
"""Suffix of a model's name for its raw form."""
EXPORT, BUNDLE = "export", "bundle"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
PREFIX = "recspec-serve-"
"""Of the folders in TMPDIR that hold the copies of a server."""
TRIES = 3
"""Times that a worker asks for a copy that was replaced while it linked the files."""
REPORTS = "/report/"
"""What the paths of reports begin with."""
REPORT_BYTES = 16 << 20
"""Largest report that is served."""

Fingerprint = tuple[tuple[str, int, int, int], ...]
"""Name, time, size and inode of every file of a folder."""


@dataclass(frozen=True)
class Source:
    """A model's name, and its folder."""

    name: str
    path: Path


def sources_of(named: Sequence[str]) -> tuple[Source, ...]:
    """Names and folders from texts such as `["runs/neumf", "ctr=runs/dlrm"]`; the default name is the folder's.

    Raises:
        SettingsError: for an invalid name, or a name given twice.
    """
    sources: list[Source] = []
    problems: list[str] = []
    for text in named:
        try:
            name, folder = named_path(text, "a model")
        except PathError as error:
            problems.append(str(error))
            continue
        own = folder.resolve()
        name = name or (own.parent.name if own.name == "bundle" else own.name)
        if not NAME.fullmatch(name):
            problems.append(f"'{name}': expected a model name of letters, digits, _ . and -; write NAME={folder}")
        if name in {source.name for source in sources}:
            problems.append(f"two models are called '{name}'; write NAME={folder}")
        if name.endswith(RAW) and name.removesuffix(RAW) in {source.name for source in sources}:
            problems.append(f"'{name}' is the name of the raw form of '{name.removesuffix(RAW)}'; write NAME={folder}")
        sources.append(Source(name, folder))
    if not sources:
        problems.append("no model was named; name a run, a bundle, or NAME=PATH")
    SettingsError.refuse("models", problems)
    return tuple(sources)


def find_versions(path: Path) -> dict[int, Path]:
    """Version -> folder of a bundle, run or export; `path` itself is version 1 if it is one of these."""
    if path.is_dir() and not _holds_model(path):
        found = {int(each.name): each for each in path.iterdir() if each.name.isdecimal() and _holds_model(each)}
        if found:
            return dict(sorted(found.items()))
    return {1: path if find_export_file(path) is not None else bundle.find(path)}


def _holds_model(folder: Path) -> bool:
    bundles = (folder / "bundle.json", folder / "bundle" / "bundle.json")
    return find_export_file(folder) is not None or any(file.is_file() for file in bundles)


def fingerprint(folder: Path) -> Fingerprint:
    """Names, times, sizes and inodes of a folder's files, which change with its content."""
    folder = folder if find_export_file(folder) is not None else bundle.find(folder)
    export = export_beside(folder)
    found = []
    for file in [*sorted(folder.iterdir()), *(sorted(export.iterdir()) if export is not None else ())]:
        stat = file.stat()
        found.append((file.name, stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return tuple(found)


def export_beside(folder: Path) -> Path | None:
    """The export of a bundle, in `export` beside or inside its folder, as from `recspec export RUN RUN/export`."""
    places = [folder / EXPORT, folder.parent / EXPORT] if folder.name == "bundle" else [folder / EXPORT]
    return next((place for place in places if find_export_file(place) is not None), None)


# --- private copies --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrivateCopy:
    """The files of one version of a model, in a folder that only this server writes to."""

    place: Path
    """`bundle` lies in it, `export`, or both."""
    name: str
    """Which of them is the copy of `origin`."""
    origin: Path
    """The bundle or the export that was copied."""
    export: Path | None
    """The export beside a bundle that was copied."""

    @property
    def folder(self) -> Path:
        """The copy of `origin`."""
        return self.place / self.name

    def shown(self, text: str) -> str:
        """A text in which the paths of copies are those of the files that were copied."""
        if self.export is not None:
            text = text.replace(str(self.place / EXPORT), str(self.export))
        return text.replace(str(self.folder), str(self.origin))

    def to_dict(self) -> dict[str, str | None]:
        """Plain values for JSON."""
        return {name: None if value is None else str(value) for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PrivateCopy:
        """The copy that `to_dict` gave."""
        export = data["export"]
        return cls(Path(data["place"]), data["name"], Path(data["origin"]), None if export is None else Path(export))


def copy_version(folder: Path, place: Path, *, verify: bool) -> PrivateCopy:
    """Copy the bundle or export at `folder`, and the export beside a bundle, into the new folder `place`.

    Raises:
        BundleError: if there is none, or with `verify` if the copied bytes are not those of its manifest.
    """
    is_export = find_export_file(folder) is not None
    origin = folder if is_export else bundle.find(folder)
    export = None if is_export else export_beside(origin)
    name = EXPORT if is_export else BUNDLE
    parts = {name: origin, **({} if export is None else {EXPORT: export})}
    need = sum(each.stat().st_size for part in parts.values() for each in part.rglob("*") if each.is_file())
    if (free := shutil.disk_usage(place.parent).free) < need:
        base = tempfile.gettempdir()
        raise BundleError(f"{origin}: its copy takes {need:,} bytes, and {base} has {free:,}; name a larger TMPDIR")
    place.mkdir()
    try:
        for each, part in parts.items():
            (place / each).mkdir()
            manifest.copy(part, place / each, verify=verify)
    except BaseException:
        removed(place)
        raise
    return PrivateCopy(place, name, origin, export)


class _CopyFolder:
    """A folder of this server for its copies, made when it is first needed. Used on one thread, as its lock is."""

    def __init__(self, *, verify: bool) -> None:
        self._verify, self._held = verify, ExitStack()
        self._folder: Path | None = None

    async def _copy(self, folder: Path) -> PrivateCopy:
        if self._folder is None:
            self._folder = self._held.enter_context(_private_folder())
        place = self._folder / secrets.token_hex(8)
        return await asyncio.to_thread(copy_version, folder, place, verify=self._verify)

    def close(self) -> None:
        """Remove all copies."""
        self._held.close()
        self._folder = None


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder in TMPDIR, removed at the end. Those of servers that were killed are removed too."""
    base = Path(tempfile.gettempdir()).resolve()
    for left in base.glob(f"{PREFIX}*"):
        if is_own(left) and not is_locked(left):
            removed(left)
            with suppress(OSError):
                hidden_sibling(left, "lock").unlink(missing_ok=True)
    folder = base / f"{PREFIX}{secrets.token_hex(8)}"
    with locked(folder, "serving from"):
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            removed(folder)


class OwnCopies(_CopyFolder):
    """The copies of a server of one process."""

    async def of(self, name: str, number: int, folder: Path, *, is_new: bool) -> tuple[PrivateCopy, str]:  # noqa: ARG002
        """A copy of a version for the caller, who removes it; also why it is not of the present content, or ''.

        Earlier content is given only to a process that has none (`is_new`).
        """
        return await self._copy(folder), ""


class SharedCopies(_CopyFolder):
    """The copies of a server of several processes, held by their supervisor."""

    def __init__(self, *, verify: bool) -> None:
        super().__init__(verify=verify)
        self._copies: dict[tuple[str, int], tuple[Fingerprint, PrivateCopy]] = {}
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def answer(self, name: str, number: int, folder: Path, *, is_new: bool) -> dict[str, object]:
        """The held copy of a version, made anew if its files changed, as JSON; see `OwnCopies.of`."""
        async with self._locks[name]:
            for key in [key for key, (_, copy) in self._copies.items() if key[0] == name and not copy.origin.exists()]:
                removed(self._copies.pop(key)[1].place)
            held, problem = self._copies.get((name, number)), ""
            try:
                content = await asyncio.to_thread(fingerprint, folder)
                if held is None or held[0] != content:
                    old, held = held, (content, await self._copy(folder))
                    self._copies[name, number] = held
                    if old is not None:
                        removed(old[1].place)
            except (BundleError, OSError) as error:
                if held is None or not is_new:
                    raise
                problem = str(error)
            return {**held[1].to_dict(), "problem": problem}


class LinkedCopies:
    """The copies of a worker: links to the files that the supervisor holds, so that all share their memory."""

    def __init__(self, ask: Callable[[str, object], Awaitable[Any]], number: int) -> None:
        self._ask, self._number = ask, number

    async def of(self, name: str, number: int, folder: Path, *, is_new: bool) -> tuple[PrivateCopy, str]:
        """See `OwnCopies`. A copy that is replaced before all its files are linked is asked for again."""
        wanted = {"name": name, "number": number, "folder": str(folder), "is_new": is_new}
        for left in reversed(range(TRIES)):
            answer = await self._ask("copy", wanted)
            held = PrivateCopy.from_dict(answer)
            place = held.place.with_name(f"{held.place.name}-{self._number}-{secrets.token_hex(4)}")
            try:
                await asyncio.to_thread(shutil.copytree, held.place, place, copy_function=os.link)
                return replace(held, place=place), answer["problem"]
            except (shutil.Error, FileNotFoundError):
                removed(place)
                if not left:
                    raise
        raise AssertionError("the last try raises")

    def close(self) -> None:
        """Remove nothing; the supervisor removes what is left."""


# --- reports of runs -------------------------------------------------------------------------------------------------


def report_path(folder: Path) -> Path:
    """Where the report of a bundle lies: in the run around its folder, or in the folder itself."""
    return (folder.parent if folder.name == "bundle" else folder) / "report.html"


def has_report(folder: Path) -> bool:
    """Whether there is a report: an ordinary file, and no link."""
    try:
        return stat.S_ISREG(report_path(folder).lstat().st_mode)
    except OSError:
        return False


def read_report(folder: Path, model: str) -> bytes:
    """The report of a bundle.

    Raises:
        RequestError: 404 if there is none, or if it is a link, no ordinary file, or larger than `REPORT_BYTES`.
    """
    missing = RequestError(f"model '{model}' has no report; write one with `recspec report RUN`", status=404)
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        with os.fdopen(os.open(report_path(folder), flags), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise missing
            text = file.read(REPORT_BYTES + 1)
    except OSError:
        raise missing from None
    if len(text) > REPORT_BYTES:
        raise RequestError(f"the report of model '{model}' is larger than {REPORT_BYTES >> 20} MiB", status=404)
    return text
