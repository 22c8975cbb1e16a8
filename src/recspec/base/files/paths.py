"""Paths from a file, a request or a command line, checked before anything is opened.

`confined` keeps every path that a file names inside that file's folder; no other code decides where it may lead.
`local` checks the paths that a user types.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from recspec.base.errors import DataError

MOST_TEXT_BYTES = 64 << 20  # most bytes of a file that is read as one text: far more than recspec writes
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


class PathError(DataError):
    """A forbidden path. Callers re-raise it as their own error, with the file that names it."""


def confined(folder: Path, name: str, *, allow_outside: bool = False) -> Path:
    """The path of `name`, which a file in `folder` names; outside `folder` only if the user asked (`allow_outside`).

    Symbolic links are followed first. A path that does not exist yet is judged by its existing parents. Raises
    PathError if it is empty, a URL, absolute, `folder` itself, outside it, or special: reading a pipe may never end.
    """
    if not name or "\0" in name:
        raise PathError(f"{name!r} is not the name of a file")
    if _SCHEME.match(name):
        raise PathError(f"{name!r} is a URL; name a file in the folder {folder}")
    try:
        base = folder.resolve()
        path = _followed(base, name)
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


def _followed(base: Path, name: str) -> Path:
    """`base / name` with every link followed; `base` has none, so that most names are done after a look at each part.

    Following them again from the root takes most of the time of opening a dataset of many files.
    """
    parts = name.split("/")
    if {"", os.curdir, os.pardir}.intersection(parts):
        return (base / name).resolve()
    path = base
    for part in parts:
        path /= part
        try:
            if stat.S_ISLNK(path.lstat().st_mode):
                return (base / name).resolve()
        except (FileNotFoundError, NotADirectoryError):  # nothing below it is a link
            break
    return base.joinpath(*parts)


def confine(folder: Path, names: Iterable[str]) -> None:
    """Refuse a folder in which a file to write or remove leads elsewhere. Raises PathError, naming all such files."""
    problems = []
    for name in names:
        try:
            confined(folder, name)
        except PathError as error:
            problems.append(str(error))
    PathError.refuse(str(folder), problems)


def special(path: Path) -> str | None:
    """The problem of a path that is neither a regular file nor a folder, such as `is a named pipe`; otherwise None."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return None  # opening it says what is wrong
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return f"is {kinds.get(stat.S_IFMT(mode), 'a device')}; expected a regular file or a folder"


def local(text: str | Path, what: str) -> Path:
    """A path that a user typed as `what`. Raises PathError for a URL: `s3://a/run` would become the folder `s3:`.

    Also raises it for a name with bytes that are not UTF-8, because no JSON, YAML or Parquet file could hold the name.
    Commands and verbs resolve URLs of stores (`recspec.base.stores`) before this; here, only a local path is left.
    """
    if _SCHEME.match(str(text)):
        written = re.sub(":/+", "://", str(text), count=1)  # Path makes one slash of two
        raise PathError(f"{what}: '{masked(written)}' is a URL, and only local paths are supported here; copy it first")
    try:
        str(text).encode("utf-8")
    except UnicodeEncodeError:
        shown = str(text).encode("utf-8", "backslashreplace").decode("utf-8")
        raise PathError(f"{what}: the name '{shown}' holds bytes that are not UTF-8; rename it") from None
    return Path(text)


def masked(text: str) -> str:
    """A URL as messages show it, without its user, password and query."""
    text = re.sub(r"(?<=//)[^/]*@", "***@", text)
    return re.sub(r"\?.*", "?***", text, flags=re.DOTALL)


def named_path(text: str, what: str) -> tuple[str, Path]:
    """The name and path of `NAME=PATH`, as a user typed it as `what`; no name for a path alone.

    A file or folder that is there under the whole text is a path, whatever its name holds.
    """
    name, equals, path = text.partition("=")
    if not equals or "/" in name or (not _SCHEME.match(text) and os.path.lexists(text)):
        name, path = "", text
    return name, local(path, what)


def read_text(file: Path, *, most: int = MOST_TEXT_BYTES) -> str:
    """The text of a file. Raises PathError if it is special, over `most` bytes, not UTF-8, or can't be read."""
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
    """The data of a JSON text. Raises ValueError if it is damaged, too deep, or holds half a surrogate pair."""
    try:
        data: object = json.loads(text)
    except RecursionError:
        raise ValueError("lists and objects are nested too deeply") from None
    if _ESCAPED_SURROGATE.search(text):
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    return data


def read_json(file: Path, *, most: int = MOST_TEXT_BYTES) -> object:
    """The data of a JSON file. Raises PathError if it can't be read, is not JSON, or is nested too deeply."""
    try:
        return parse_json(read_text(file, most=most))
    except ValueError as error:
        raise PathError(f"{file}: damaged: {error}") from None


def copy(name: str, source: Path, target: Path) -> None:
    """Copy a file or folder to the same place in `target`. Raises PathError if any part leads outside or is special."""
    origin, copied = confined(source, name), confined(target, name)
    if origin.is_dir():
        copied.mkdir(parents=True, exist_ok=True)
        for child in sorted(origin.iterdir()):
            copy(f"{name}/{child.name}", source, target)
    else:
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, copied)
