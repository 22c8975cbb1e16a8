"""Signals, cores and settings of the process that runs a command."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar, cast

from pydantic import BaseModel

from recspec import config
from recspec.errors import RecspecError, SettingsError, unknown
from recspec.machine import pin

if TYPE_CHECKING:
    from recspec.training import TrainSettings

PATIENCE = 10.0  # seconds in which the first process of a machine reports an error that all of them found


def end_by_force(why: str) -> None:
    """End the process with status 1, whatever its threads do."""
    logging.getLogger("recspec.serve").error("the server ends by force: %s", why)
    logging.shutdown()
    os._exit(1)


def settings_of(
    model: str, recipe: Path | None, assignments: Sequence[str], *, amp: bool
) -> tuple[config.Settings, TrainSettings]:
    """The model's settings and the trainer's: a recipe's, with `--set` over them.

    A recipe is complete: of what it leaves out the classes' defaults hold, so that its result stays the same.
    """
    from recspec.models import MODELS
    from recspec.training import TrainSettings

    if model not in MODELS:
        raise SettingsError(unknown("model", model, MODELS))
    loaded = config.load_recipe(recipe) if recipe is not None else config.Recipe()
    if loaded.model not in (None, model):
        raise SettingsError(f"recipe {recipe} is for the model '{loaded.model}', not '{model}'")
    given = [name for name, there in ((f"recipe {recipe}", recipe is not None), ("--set", assignments)) if there]
    where = " and ".join(given) or "settings"
    types: dict[str, type[BaseModel]] = {"settings": MODELS[model].Settings, "train": TrainSettings}
    assigned = config.assign(config.parse_assignments(assignments), types)
    faster = {"precision": "auto"} if amp else {}
    made: list[BaseModel] = []
    problems: list[str] = []
    for section, layers in (("settings", (loaded.settings,)), ("train", (loaded.train, faster))):
        try:
            built = config.build(types[section], where, *layers, assigned[section])
            made.append(config.complete(built) if recipe is not None else built)
        except SettingsError as error:
            problems += error.problems
    if problems:
        raise SettingsError.of(where, problems)
    model_settings, train_settings = made
    return cast(config.Settings, model_settings), cast(TrainSettings, train_settings)


def keep_to_cores(affinity: str) -> None:
    """Pin this process to its cores, with a thread for each."""
    import torch

    from recspec.distributed import local_ranks

    cores = pin(affinity, *local_ranks())
    if cores is not None:
        torch.set_num_threads(len(cores))


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


@contextmanager
def told_once() -> Iterator[None]:
    """Let the first process of a machine report an error of all; the others wait for torchrun to end them."""
    try:
        yield
    except RecspecError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(PATIENCE)
        raise


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask the run to write a checkpoint and stop; a second Ctrl-C stops at once."""
    asked: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
