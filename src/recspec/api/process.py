"""Signals, cores and settings of the process that does the work."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, cast

from pydantic import BaseModel

from recspec.base import config
from recspec.base.errors import RecspecError, SettingsError
from recspec.base.machine import pin
from recspec.base.signals import handled

if TYPE_CHECKING:
    from recspec.training import TrainSettings


PATIENCE = 10.0  # seconds in which the first process of a machine reports an error that all of them found


def settings_of(model: str, recipe: Path | None, values: Mapping[str, object]) -> tuple[config.Settings, TrainSettings]:
    """The model's settings and the trainer's: a recipe's, with the values of `--set` over them.

    A recipe is complete: of what it leaves out the classes' defaults hold, so that its result stays the same.

    Raises:
        SettingsError: with every unknown name and wrong value.
        MissingExtraError: without a library that the model or a setting needs.
    """
    from recspec.models import find_model, require_libraries
    from recspec.training import TrainSettings, require_mlflow

    kind = find_model(model)
    require_libraries(kind)
    loaded = config.load_recipe(recipe) if recipe is not None else config.Recipe()
    if loaded.model not in (None, model):
        raise SettingsError(f"recipe {recipe} is for the model '{loaded.model}', not '{model}'")
    given = [name for name, there in ((f"recipe {recipe}", recipe is not None), ("--set", values)) if there]
    where = " and ".join(given) or "settings"
    types: dict[str, type[BaseModel]] = {"settings": kind.Settings, "train": TrainSettings}
    assigned = config.assign(values, types)
    made: list[BaseModel] = []
    problems: list[str] = []
    for section, values_of_recipe in (("settings", loaded.settings), ("train", loaded.train)):
        try:
            built = config.build(types[section], where, values_of_recipe, assigned[section])
            made.append(config.complete(built) if recipe is not None else built)
        except SettingsError as error:
            problems += error.problems
    if problems:
        raise SettingsError.of(where, problems)
    model_settings, train_settings = cast(config.Settings, made[0]), cast("TrainSettings", made[1])
    require_mlflow(train_settings.mlflow)
    return model_settings, train_settings


def joined(where: str, settings: Mapping[str, object] | None, named: Mapping[str, object]) -> dict[str, object]:
    """Settings from a dict and from keywords, as plain values. Raises `SettingsError` for one that both give."""
    given = dict(settings or {})
    if both := [name for name in named if name in given]:
        raise SettingsError.of(
            where, [f"'{name}' is given as a keyword and in settings; give it once" for name in both]
        )
    return {str(name): _plain(value) for name, value in {**given, **named}.items()}


def _plain(value: object) -> object:
    """Numbers of numpy as Python's, paths as texts; lists and tables likewise."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each) for each in value]
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    return value.tolist() if hasattr(value, "tolist") else value


def keep_to_cores(affinity: str) -> None:
    """Pin this process to its cores, with a thread for each."""
    import torch

    from recspec.loading import local_ranks

    cores = pin(affinity, *local_ranks())
    if cores is not None:
        torch.set_num_threads(len(cores))


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Ctrl-C, SIGTERM and SIGHUP ask the work to write a checkpoint and stop; a second Ctrl-C stops at once.

    Outside of the main thread no signal arrives, and nothing is changed.
    """
    asked: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    with handled(ask):
        yield lambda: bool(asked)


@contextmanager
def told_once() -> Iterator[None]:
    """Let the first process of a machine report an error of all; the others wait for torchrun to end them."""
    try:
        yield
    except RecspecError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(PATIENCE)
        raise
