"""The process that runs a command, and options that are read by hand."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import TypeVar, cast

from recspec.errors import SettingsError, unknown


def end_by_force(why: str) -> None:
    """End the process with status 1, whatever its threads do."""
    logging.getLogger("recspec.serve").error("the server ends by force: %s", why)
    logging.shutdown()
    os._exit(1)


def sizes(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on between commas."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise SettingsError(f"{option} {text!r}: expected whole numbers from 1 between commas, such as 1,64,512")
    return tuple(map(int, parts))


Choice = TypeVar("Choice", bound=str)


def one_of(option: str, value: str, known: Sequence[Choice], kind: str = "value") -> Choice:
    """The value of an option with a fixed set of values; unlike typer's, the message names the nearest one."""
    if value not in known:
        raise SettingsError(f"{option}: {unknown(kind, value, known)}")
    return cast(Choice, value)


def fresh_folder(parent: Path, name: str) -> Path:
    """`parent/name`, or the first of `name-2`, `name-3`, ... that is not there yet."""
    names = chain([name], map(f"{name}-{{}}".format, count(2)))
    return next(parent / each for each in names if not (parent / each).exists())


def is_first() -> bool:
    """Whether this is the only process, or the first that torchrun started, which shows progress."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"
