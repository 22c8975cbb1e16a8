"""Paths that come out of a file, a request or a command line, checked before anything is opened.

Every path that a file names is confined to that file's folder by `confined`; no other code decides where such a path
may lead. Paths that a user types are checked by `local`.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path

from recspec.errors import DataError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


class PathError(DataError):
    """A path that leads where it must not. Callers re-raise it as their own error, with the file that names it."""


def confined(folder: Path, name: str, *, allow_outside: bool = False) -> Path:
    """Where `name`, which a file in `folder` names, lies.

    Symbolic links are followed before the path is judged. A path that does not exist yet is judged by the folders that
    do. What exists must be a regular file or a folder: a device, pipe or socket is refused, because reading one may
    never end.

    Args:
        allow_outside: Accept a path outside `folder`, because the user asked for it.

    Raises:
        PathError: if the path is empty, a URL, absolute, leads outside `folder`, or is a special file.
    """
    if not name or "\0" in name:
        raise PathError(f"{name!r} is not the name of a file")
    if _SCHEME.match(name):
        raise PathError(f"{name!r} is a URL; name a file in the folder {folder}")
    try:
        base = folder.resolve()
        path = (base / name).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links, a name that is too long
        raise PathError(f"{name!r} cannot be followed: {error}") from None
    if not allow_outside and (Path(name).is_absolute() or not path.is_relative_to(base)):
        raise PathError(f"{name!r} leads outside the folder {base}")
    if problem := special(path):
        raise PathError(f"{name!r} {problem}")
    return folder / name


def special(path: Path) -> str | None:
    """What is wrong with a path that is neither a regular file nor a folder: `is a named pipe`; None if nothing is."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return None  # opening it says what is wrong
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return f"is {kinds.get(stat.S_IFMT(mode), 'a device')}; expected a regular file or a folder"


def local(text: str | Path, what: str) -> Path:
    """A path that a user typed, such as the argument `what`.

    Raises:
        PathError: if it is a URL, which is not supported: `s3://bucket/run` would become the local folder `s3:`.
    """
    if _SCHEME.match(str(text)):
        raise PathError(
            f"{what}: '{text}' is a URL, and only local paths are supported; copy the files to a local folder first, "
            "or mount the store"
        )
    return Path(text)
