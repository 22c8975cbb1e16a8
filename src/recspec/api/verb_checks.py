"""What all verbs share: checked keywords and paths, settings from keywords, signals to stop."""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from recspec.base.errors import RecspecError, SettingsError, shortened, unknown
from recspec.base.machine import pin
from recspec.base.signals import handled

if TYPE_CHECKING:
    from pydantic import BaseModel

    from recspec.base.config import Settings
    from recspec.training import TrainSettings

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

Place = str | os.PathLike[str]
"""A path, or an object that stands for one: a `Data` or a `Model`."""

FILES = ("raw", "rows", "new_events")
"""Parameters that take a path or a data frame."""

RANGES: Mapping[str, tuple[float, float | None]] = {
    "budget": (0, None),
    "depth": (0, 32),
    "events_days": (1, None),
    "exposures_days": (1, None),
    "minutes": (0.05, None),
    "processes": (1, None),
    "rows": (1, None),
    "seed": (0, None),
    "seeds": (1, 1_000),
    "shard_size": (1, None),
    "steps": (1, None),
    "trials": (1, None),
    "warmup": (0, None),
    "workers": (1, None),
}
"""Least and largest value of numbers that no settings check."""

PATIENCE = 10.0  # seconds in which the first process of a machine reports an error that all of them found


def verb(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A function of the API whose arguments are checked before it begins.

    A keyword that it does not know raises `SettingsError` with the nearest known one. So do a number outside its range
    and a value that is no path where one is expected, such as a data frame that was not prepared. Arguments may be URLs
    of stores: the function gets local paths in their place.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    known = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    takes_more = any(each.kind is each.VAR_KEYWORD for each in parameters)
    urls = [each.name for each in parameters if "Place" in str(each.annotation) or each.name in FILES]
    places = [each.name for each in parameters if each.annotation in ("Place", "Place | None")]

    @wraps(function)
    def checked(*given: Parameters.args, **named: Parameters.kwargs) -> Result:
        from recspec.base import stores

        where = function.__name__
        if not takes_more and (strange := [name for name in named if name not in known or name == "self"]):
            names = [each for each in known if each != "self"]
            raise SettingsError(f"{where}: {unknown('keyword', strange, names)}")
        try:
            bound = signature.bind_partial(*given, **named)
        except TypeError:  # Python's own message names the function
            return function(*given, **named)
        for name in places:
            _check_place(f"{where}: {name}", bound.arguments.get(name))
        _check_ranges(where, bound.arguments)
        _check_texts(where, {name: value for name, value in bound.arguments.items() if name not in urls})
        values = {name: value for name, value in bound.arguments.items() if name in urls or isinstance(value, Path)}
        with stores.with_local_paths(where, values) as changed:
            bound.arguments |= changed
            for name in places:
                _check_path(f"{where}: {name}", bound.arguments.get(name))
            return function(*bound.args, **bound.kwargs)

    return checked


def _check_place(where: str, value: object) -> None:
    """Refuse what is neither a path nor an object that stands for one; None passes."""
    if value is not None and not isinstance(value, (str, os.PathLike)):
        hint = "; prepare a data frame first, with prepare(frame, out)" if hasattr(value, "__arrow_c_stream__") else ""
        raise SettingsError(f"{where}: found {type(value).__name__}; expected a path{hint}")


def _check_path(where: str, value: object) -> None:
    """Refuse a URL of no store, and a name that no file of recspec could hold."""
    from recspec.base.files import local

    if isinstance(value, (str, Path)):
        local(value, where)


def _check_ranges(where: str, values: Mapping[str, object]) -> None:
    problems = []
    for name, (least, most) in RANGES.items():
        value = values.get(name)
        if isinstance(value, (int, float)) and not (least <= value and (most is None or value <= most)):
            expected = f"{least} or more" if most is None else f"{least} to {most}"
            problems.append(f"{name} is {value}; expected {expected}")
    SettingsError.refuse(where, problems)


def _check_texts(where: str, values: Mapping[str, object]) -> None:
    """Refuse texts that no file or database could hold, as a command line has them in another encoding."""
    problems = []
    for name, value in values.items():
        for text in several(value) if isinstance(value, (str, list, tuple)) else ():
            if isinstance(text, str) and (problem := _no_text(text)):
                problems.append(f"{name}: {shortened(ascii(text))} {problem}")
    SettingsError.refuse(where, problems)


def _no_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is no UTF-8 text; write it in UTF-8"
    return "holds a character NUL; leave it out" if "\0" in text else ""


def signed(function: Callable[..., Result], parameters: Iterable[inspect.Parameter]) -> Callable[..., Result]:
    """The function, which shows these parameters in help and in notebooks instead of its keywords `**named`."""
    function.__signature__ = inspect.Signature(list(parameters))  # type: ignore[attr-defined]
    return function


def as_verb(of: Callable[..., object]) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """A method that hands its keywords to a verb, with the verb's parameters in place of `**named`."""

    def signs(method: Callable[..., Result]) -> Callable[..., Result]:
        own = [each for each in inspect.signature(method).parameters.values() if each.kind is not each.VAR_KEYWORD]
        _, *others = inspect.signature(of).parameters.values()
        return signed(method, [*own, *(each for each in others if each.name not in {one.name for one in own})])

    return signs


def one_of(option: str, value: str, known: Iterable[str], kind: str = "value") -> Any:
    """The value of an option with a fixed set of values; the message names the nearest one."""
    names = list(known)
    if value not in names:
        raise SettingsError(f"{option}: {unknown(kind, value, names)}")
    return value


def several(values: Any) -> tuple[Any, ...]:
    """A tuple of one value, of several, or of none."""
    if values is None:
        return ()
    return (values,) if isinstance(values, (str, int, os.PathLike)) else tuple(values)


def path_or_none(place: Place | None) -> Path | None:
    """The path of a place that may be left out."""
    return None if place is None else Path(place)


# --- settings --------------------------------------------------------------------------------------------------------


def settings_of(model: str, recipe: Place | None, values: Mapping[str, object]) -> tuple[Settings, TrainSettings]:
    """The model's settings and the trainer's: a recipe's, with the values of `--set` over them.

    A recipe is complete: of what it leaves out the classes' defaults hold, so that its result stays the same.

    Raises:
        SettingsError: with every unknown name and wrong value.
        MissingExtraError: without a library that the model or a setting needs.
    """
    from recspec.base import config
    from recspec.models import FittedModel, find_model, require_libraries
    from recspec.training import TrainSettings, require_mlflow

    kind = find_model(model)
    require_libraries(kind)
    loaded = config.load_recipe(Path(recipe)) if recipe is not None else config.Recipe()
    if loaded.model not in (None, model):
        raise SettingsError(f"recipe {recipe} is for the model '{loaded.model}', not '{model}'")
    given = [name for name, there in ((f"recipe {recipe}", recipe is not None), ("--set", values)) if there]
    where = " and ".join(given) or "settings"
    types: dict[str, type[BaseModel]] = {"settings": kind.Settings, "train": TrainSettings}
    if issubclass(kind, FittedModel):  # a name such as l2 can't be meant for steps
        own = {each for each in kind.Settings.model_fields.keys() - {*kind.reads} if f"settings.{each}" not in values}
        values = {f"settings.{each}" if each in own else each: value for each, value in values.items()}
    assigned = config.assign(values, types)
    made: list[BaseModel] = []
    problems: list[str] = []
    for section, values_of_recipe in (("settings", loaded.settings), ("train", loaded.train)):
        try:
            built = config.build(types[section], where, values_of_recipe, assigned[section])
            made.append(config.mark_all_set(built) if recipe is not None else built)
        except SettingsError as error:
            problems += error.problems
    SettingsError.refuse(where, problems)
    model_settings, train_settings = cast("Settings", made[0]), cast("TrainSettings", made[1])
    require_mlflow(train_settings.mlflow)
    return model_settings, train_settings


def merge_settings(where: str, settings: Mapping[str, object] | None, named: Mapping[str, object]) -> dict[str, object]:
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
    return value.tolist() if hasattr(value, "tolist") else value


# --- the process -----------------------------------------------------------------------------------------------------


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
def report_on_first_rank() -> Iterator[None]:
    """Let the first process of a machine report an error of all; the others wait for torchrun to end them."""
    try:
        yield
    except RecspecError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(PATIENCE)
        raise
