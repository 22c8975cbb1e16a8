"""Paths that come out of a file, a request or a command line, checked before anything is opened.

Every path that a file names is confined to that file's folder by `confined`; no other code decides where such a path
may lead. Paths that a user types are checked by `local`.
"""

from __future__ import annotations

import json
import re
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from recspec.errors import DataError

MOST_TEXT_BYTES = 64 << 20
"""Of a file that is read as one text: far beyond any that recspec writes, and quick to refuse."""

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
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
        PathError: if the path is empty, a URL, absolute, `folder` itself, leads outside it, or is a special file.
    """
    if not name or "\0" in name:
        raise PathError(f"{name!r} is not the name of a file")
    if _SCHEME.match(name):
        raise PathError(f"{name!r} is a URL; name a file in the folder {folder}")
    try:
        base = folder.resolve()
        path = (base / name).resolve()
        circle = path.is_symlink()  # where Python 3.13 and newer stop
    except RuntimeError:
        raise PathError(f"{name!r} leads into a circle of links") from None
    except (OSError, ValueError) as error:  # a name that is too long, a character no file name has
        raise PathError(f"{name!r} cannot be followed: {error}") from None
    if circle:
        raise PathError(f"{name!r} leads into a circle of links")
    if not allow_outside and (Path(name).is_absolute() or not path.is_relative_to(base)):
        raise PathError(f"{name!r} leads outside the folder {base}")
    if path == base:
        raise PathError(f"{name!r} is the folder {base} itself; expected a file or a folder in it")
    if problem := special(path):
        raise PathError(f"{name!r} {problem}")
    return folder / name


def confine(folder: Path, names: Iterable[str]) -> None:
    """Refuse a folder in which something that is about to be written or removed leads elsewhere.

    Raises:
        PathError: naming all that `confined` refuses.
    """
    problems = []
    for name in names:
        try:
            confined(folder, name)
        except PathError as error:
            problems.append(str(error))
    if problems:
        raise PathError.of(str(folder), problems)


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
        written = re.sub(":/+", "://", str(text), count=1)  # Path makes one slash of two
        raise PathError(
            f"{what}: '{written}' is a URL, and only local paths are supported; copy the files to a local folder "
            "first, or mount the store"
        )
    return Path(text)


def read_text(file: Path, *, most: int = MOST_TEXT_BYTES) -> str:
    """The whole text of a file.

    Raises:
        PathError: if it is a special file, holds more than `most` bytes, is not UTF-8, or can't be read.
    """
    if problem := special(file):
        raise PathError(f"{file}: {problem}")
    try:
        with file.open("rb") as stream:
            data = stream.read(most + 1)
        if len(data) > most:
            raise PathError(f"{file}: holds more than {most:,} bytes, the most that are read of such a file")
        return data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise PathError(f"{file}: can't be read as text: {error}") from None


def parse_json(text: str) -> object:
    """The data of a JSON text.

    Raises:
        ValueError: if it is no JSON, is nested too deeply, or holds half a surrogate pair, which no file can hold.
    """
    try:
        data: object = json.loads(text)
    except RecursionError:
        raise ValueError("lists and objects are nested too deeply") from None
    if _ESCAPED_SURROGATE.search(text):
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    return data


def read_json(file: Path, *, most: int = MOST_TEXT_BYTES) -> object:
    """The data of a JSON file.

    Raises:
        PathError: if it can't be read, is not JSON, or is nested too deeply.
    """
    try:
        return parse_json(read_text(file, most=most))
    except ValueError as error:
        raise PathError(f"{file}: damaged: {error}") from None


def copy(name: str, source: Path, target: Path) -> None:
    """Copy a file, or a folder with all that is in it, from the folder `source` to the same place in `target`.

    Raises:
        PathError: if the path, or anything below it, leads outside `source` or `target`, or is a special file.
        OSError: if the disk does not take it.
    """
    origin, copied = confined(source, name), confined(target, name)
    if origin.is_dir():
        copied.mkdir(parents=True, exist_ok=True)
        for child in sorted(origin.iterdir()):
            copy(f"{name}/{child.name}", source, target)
    else:
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, copied)
