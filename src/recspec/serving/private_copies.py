"""Private copies of the models' files: a server reads each file once, compares it, and answers from the copy alone.

What others write to a model's files, in place or cut short, changes no answer and ends no process. Processes of one
server share the copies: the supervisor makes them, and each worker links their files into a folder of its own.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from recspec.base.errors import BundleError
from recspec.base.files import beside, is_locked, is_own, locked, manifest, removed
from recspec.bundle import folder as bundle
from recspec.feature_spec import find_export_file
from recspec.serving.line import Line
from recspec.serving.sources import EXPORT, Fingerprint, export_beside, fingerprint

PREFIX = "recspec-serve-"
BUNDLE = "bundle"


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
    def from_dict(cls, data: Mapping[str, str | None]) -> PrivateCopy:
        """The copy that `to_dict` gave."""
        export = data["export"]
        place, name, origin = (str(data[each]) for each in ("place", "name", "origin"))
        return cls(Path(place), name, Path(origin), None if export is None else Path(export))


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
        raise BundleError(
            f"{origin}: its private copy takes {need:,} bytes, and {tempfile.gettempdir()} has {free:,}; name a larger "
            "folder in TMPDIR"
        )
    place.mkdir()
    try:
        for each, part in parts.items():
            (place / each).mkdir()
            manifest.copy(part, place / each, verify=verify)
    except BaseException:
        removed(place)
        raise
    return PrivateCopy(place, name, origin, export)


class Copies(Protocol):
    """Where a repository gets the private copies of its models from."""

    async def of(self, name: str, number: int, folder: Path, *, is_new: bool) -> tuple[PrivateCopy, str]:
        """A copy of a version for the caller, who removes it; also why it is not of the present content, or ''.

        Earlier content is given only to a process that has none (`is_new`).
        """
        ...

    def close(self) -> None:
        """Remove all copies."""


@dataclass
class _Root:
    """A folder of this server, made when it is first needed. Used on one thread, as its lock is."""

    _held: ExitStack = field(default_factory=ExitStack)
    _folder: Path | None = None

    def new_place(self) -> Path:
        """A name for a new copy."""
        if self._folder is None:
            self._folder = self._held.enter_context(_private_folder())
        return self._folder / secrets.token_hex(8)

    def close(self) -> None:
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
                beside(left, "lock").unlink(missing_ok=True)
    folder = base / f"{PREFIX}{secrets.token_hex(8)}"
    with locked(folder, "serving from"):
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            removed(folder)


class OwnCopies:
    """The copies of a server of one process."""

    def __init__(self, *, verify: bool) -> None:
        self._verify, self._root = verify, _Root()

    async def of(self, name: str, number: int, folder: Path, *, is_new: bool) -> tuple[PrivateCopy, str]:  # noqa: ARG002
        """See `Copies`."""
        return await asyncio.to_thread(copy_version, folder, self._root.new_place(), verify=self._verify), ""

    def close(self) -> None:
        """See `Copies`."""
        self._root.close()


class SharedCopies:
    """The copies of a server of several processes, held by their supervisor."""

    def __init__(self, *, verify: bool) -> None:
        self._verify, self._root = verify, _Root()
        self._held: dict[tuple[str, int], tuple[Fingerprint, PrivateCopy]] = {}
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def answer(self, name: str, number: int, folder: Path, *, is_new: bool) -> dict[str, object]:
        """The held copy of a version, made anew if its files changed, as JSON; see `Copies.of`."""
        async with self._locks[name]:
            for key in [key for key, (_, copy) in self._held.items() if key[0] == name and not copy.origin.exists()]:
                removed(self._held.pop(key)[1].place)
            held, problem = self._held.get((name, number)), ""
            try:
                content = await asyncio.to_thread(fingerprint, folder)
                if held is None or held[0] != content:
                    place = self._root.new_place()
                    made = await asyncio.to_thread(copy_version, folder, place, verify=self._verify)
                    self._held[name, number] = content, made
                    if held is not None:
                        removed(held[1].place)
                    held = content, made
            except (BundleError, OSError) as error:
                if held is None or not is_new:
                    raise
                problem = str(error)
            return {**held[1].to_dict(), "problem": problem}

    def close(self) -> None:
        """Remove all copies."""
        self._root.close()
        self._held.clear()


class LinkedCopies:
    """The copies of a worker: links to the files that the supervisor holds, so that all share their memory."""

    def __init__(self, line: Line, number: int) -> None:
        self._line, self._number = line, number

    async def of(self, name: str, number: int, folder: Path, *, is_new: bool) -> tuple[PrivateCopy, str]:
        """See `Copies`."""
        told = await self._line.ask("copy", {"name": name, "number": number, "folder": str(folder), "is_new": is_new})
        held = PrivateCopy.from_dict(told)
        place = held.place.with_name(f"{held.place.name}-{self._number}-{secrets.token_hex(4)}")
        await asyncio.to_thread(shutil.copytree, held.place, place, copy_function=os.link)
        return replace(held, place=place), told["problem"]

    def close(self) -> None:
        """See `Copies`; the supervisor removes what is left."""
