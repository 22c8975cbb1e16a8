"""Files and folders that are written whole or not at all, by one writer at a time.

What is written stands under a temporary name beside its place and is renamed last. No one can guess that name, so in a
folder that others can write to nobody can lay a link there that leads elsewhere. Locks are the kernel's: they end
with the process that holds them, however it ends, so nothing has to be cleaned up after `kill -9`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from recspec.errors import DataError, SettingsError

LOCK = ".lock"


def beside(path: Path, what: str) -> Path:
    """A hidden name in the folder of `path`, such as `.NAME.123.tmp`."""
    name = path.resolve().name if path.name in ("", "..") else path.name
    return path.parent / f".{name}.{what}"


def temporary_name(path: Path) -> Path:
    """A new name under which `path` can be written."""
    return beside(path, f"{secrets.token_hex(8)}.tmp")


def removed(folder: Path) -> None:
    """Remove a folder with all that is in it; of a link, the link alone."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def is_own(folder: Path) -> bool:
    """Whether there is a folder, no link to one, and it is this user's."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """An empty folder that takes the place of `out` when the block ends well, and is removed when it doesn't.

    What stood in the place of `out` is removed last.
    """
    with made(out.parent), staging(out) as folder:
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
    """Rename a folder to `out`; what was there is removed last."""
    old = beside(out, f"{secrets.token_hex(8)}.old.tmp")
    if out.exists():
        out.rename(old)
    folder.rename(out)
    removed(old)


@contextmanager
def whole_file(out: Path) -> Iterator[Path]:
    """A temporary name that becomes `out` when the block ends well, and is removed when it doesn't."""
    if out.exists() and not out.is_file():
        raise SettingsError(f"{out}: is there and is no regular file; name another one to write")
    temporary = temporary_name(out)
    with made(out.parent):
        try:
            yield temporary
            temporary.replace(out)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """Make a folder and its parents; those that were made and are empty are removed if the block fails."""
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
    """Keep other writers from `out`, which need not exist; the lock lies beside it.

    Args:
        doing: What a second writer is told, such as "preparing".

    Raises:
        DataError: at once, if another process holds the lock.
    """
    with made(out.parent), _held(beside(out, "lock"), out, doing):
        yield


@contextmanager
def locked_inside(folder: Path, doing: str) -> Iterator[None]:
    """Likewise with the lock inside `folder`, which is made: one whose own parent can't be written to will do."""
    with made(folder), _held(folder / LOCK, folder, doing):
        yield


def is_locked(out: Path) -> bool:
    """Whether some process holds the lock beside `out`."""
    file = beside(out, "lock")
    if not file.is_file():
        return False
    lock = FileLock(file)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    lock.release()
    return False


@contextmanager
def turn(folder: Path, seconds: float = 600.0) -> Iterator[None]:
    """Wait for the lock inside `folder` and hold it: for what several processes do one after another.

    Raises:
        DataError: if it is not free for so long.
    """
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
