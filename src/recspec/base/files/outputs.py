"""Files and folders that are written whole or not at all, by one writer at a time; and Parquet with dictionary codes.

Files are written under a temporary name in the same folder and renamed last. The name cannot be guessed, so nobody can
place a link there in a folder that others can write to. The kernel releases a lock when its process ends, so nothing
has to be cleaned up after `kill -9`.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from recspec.base.errors import DataError, SettingsError

LOCK = ".lock"


def hidden_sibling(path: Path, what: str) -> Path:
    """A hidden name in the folder of `path`, such as `.NAME.123.tmp`."""
    name = path.resolve().name if path.name in ("", "..") else path.name
    return path.parent / f".{name}.{what}"


def temporary_name(path: Path) -> Path:
    """A new name under which `path` can be written."""
    return hidden_sibling(path, f"{secrets.token_hex(8)}.tmp")


def removed(folder: Path) -> None:
    """Remove a folder and its contents; of a link, only the link."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def is_own(folder: Path) -> bool:
    """Whether a path is a folder of this user, and not a link to one."""
    with suppress(OSError):
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return False


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """An empty folder that replaces `out` if the block succeeds, and is removed if it fails."""
    with mkdir_or_undo(out.parent), staging(out) as folder:
        yield folder
        put_in_place(folder, out)


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """An empty folder beside `out`, removed at the end."""
    folder = temporary_name(out)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_in_place(folder: Path, out: Path) -> None:
    """Rename a folder to `out`; what was there is removed last, or comes back if the renames break off."""
    old = hidden_sibling(out, f"{secrets.token_hex(8)}.old.tmp")
    try:
        if out.exists():
            out.rename(old)
        folder.rename(out)
    except BaseException:  # Ctrl-C too
        if old.exists() and not out.exists():
            old.rename(out)
        raise
    removed(old)


def clear_abandoned(out: Path) -> None:
    """Remove the temporary folders that killed writers of the folder `out` left beside it.

    Whoever calls this holds the lock of all its writers. A writer that was killed between the renames of `put_in_place`
    left only what was there before: that is put back.
    """
    ours = re.compile(re.escape(hidden_sibling(out, "").name) + r"[0-9a-f]+(\.old)?\.tmp")
    beside_it: list[Path] = []
    with suppress(PermissionError):  # a parent in which this user may write, but not look
        beside_it = sorted(out.parent.iterdir())
    for folder in beside_it:
        if not ours.fullmatch(folder.name) or not is_own(folder):
            continue
        if folder.name.endswith(".old.tmp") and not out.exists():
            folder.rename(out)
        else:
            removed(folder)


@contextmanager
def whole_file(out: Path) -> Iterator[Path]:
    """A temporary name that becomes `out` if the block succeeds, and is removed if it fails."""
    if out.exists() and not out.is_file():
        raise SettingsError(f"{out}: is there and is no regular file; name another one to write")
    temporary = temporary_name(out)
    with mkdir_or_undo(out.parent):
        try:
            yield temporary
            temporary.replace(out)
        except OSError as error:  # a full disk, of which the call that writes names no file
            error.filename = error.filename or str(out)
            raise
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_whole(out: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with whole_file(out) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def mkdir_or_undo(folder: Path) -> Iterator[None]:
    """Make a folder and its parents; if the block fails, the new ones that are empty are removed."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for each in missing:
            with suppress(OSError):  # not empty: something was written
                each.rmdir()
        raise


@contextmanager
def locked(out: Path, doing: str) -> Iterator[None]:
    """Keep other writers from `out`, which need not exist; the lock lies beside it. What killed ones left is removed.

    Raises DataError at once if another process holds the lock, `doing` it, such as "preparing".
    """
    with mkdir_or_undo(out.parent), _held(hidden_sibling(out, "lock"), out, doing):
        clear_abandoned(out)
        yield


@contextmanager
def locked_inside(folder: Path, doing: str, *, holds: str | None = None) -> Iterator[None]:
    """As `locked`, with the lock inside `folder`, which is made; its parent need not be writable.

    What killed writers left of the folder `holds`, which is written in it, is removed.
    """
    with mkdir_or_undo(folder), _held(folder / LOCK, folder, doing):
        if holds is not None:
            clear_abandoned(folder / holds)
        yield


def is_locked(out: Path) -> bool:
    """Whether some process holds the lock beside `out`."""
    file = hidden_sibling(out, "lock")
    try:
        with FileLock(file, timeout=0) if file.is_file() else nullcontext():
            return False
    except Timeout:
        return True


@contextmanager
def turn(folder: Path, seconds: float = 600.0) -> Iterator[None]:
    """Hold the lock inside `folder`: processes take turns. Raises DataError if it is not free within `seconds`."""
    try:
        with FileLock(folder / LOCK, timeout=seconds):
            yield
    except Timeout:
        raise DataError(f"{folder}: another process has held {folder / LOCK} for {seconds:.0f} s; end it") from None


@contextmanager
def _held(file: Path, out: Path, doing: str) -> Iterator[None]:
    lock = FileLock(file)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise DataError(f"{out}: another process is {doing} it; wait for it, end it, or name another folder") from None
    try:
        yield
    finally:
        with suppress(OSError):  # removed while it is held: a process that waits for this file sees that it is gone
            file.unlink()
        lock.release()


def open_parquet(path: Path, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """Open a Parquet file; a dictionary has codes of 32 bits, whatever type the writer stored beside the file.

    Arrow refuses a file by the stored type if its dictionaries outgrew that type, as those of a merged file do.

    Raises:
        pa.ArrowException, OSError: if it is no Parquet file.
    """
    metadata = metadata or pq.read_metadata(path)
    schema = metadata.schema.to_arrow_schema()
    names = [name for name, kind in zip(schema.names, schema.types, strict=True) if "dictionary<" in str(kind)]
    leaves = [metadata.schema.column(place) for place in range(metadata.num_columns)]
    coded = [
        leaf.path
        for leaf in leaves
        if leaf.physical_type == "BYTE_ARRAY" and any(f"{leaf.path}.".startswith(f"{name}.") for name in names)
    ]
    return pq.ParquetFile(path, metadata=metadata, read_dictionary=coded)
