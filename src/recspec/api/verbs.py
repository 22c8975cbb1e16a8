"""What every function of the Python API promises: a wrong keyword is answered with the nearest known one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from os import PathLike
from typing import ParamSpec, TypeVar

from recspec.base import stores
from recspec.base.errors import SettingsError, unknown

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

Place = str | PathLike[str]
"""A path, or an object that stands for one: a `Data` or a `Model`."""


def verb(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A function of the API; a keyword that it does not know raises `SettingsError` with the nearest known one.

    Arguments may be URLs of stores: the function gets local paths in their place.

    So does a value that is no path where one is expected, such as a data frame that was not prepared.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    known = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    takes_more = any(each.kind is each.VAR_KEYWORD for each in parameters)
    urls = [each.name for each in parameters if "Place" in str(each.annotation) or each.name in ("raw", "rows")]
    places = [each.name for each in parameters if each.annotation in ("Place", "Place | None")]

    @wraps(function)
    def checked(*given: Parameters.args, **named: Parameters.kwargs) -> Result:
        if not takes_more:
            check_keywords(function.__name__, named, [each for each in known if each != "self"])
        try:
            bound = signature.bind_partial(*given, **named)
        except TypeError:  # Python's own message names the function
            return function(*given, **named)
        for name in places:
            check_place(f"{function.__name__}: {name}", bound.arguments.get(name))
        values = {name: value for name, value in bound.arguments.items() if name in urls}
        with stores.with_local_paths(function.__name__, values) as changed:
            if not changed:
                return function(*given, **named)
            bound.arguments |= changed
            return function(*bound.args, **bound.kwargs)

    return checked


def signed(function: Callable[..., Result], parameters: Iterable[inspect.Parameter]) -> Callable[..., Result]:
    """The function, which shows these parameters in help and in notebooks instead of its keywords `**named`."""
    function.__signature__ = inspect.Signature(list(parameters))  # type: ignore[attr-defined]
    return function


def as_verb(of: Callable[..., object]) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """A method that hands its keywords to a verb, with the verb's parameters in place of `**named`."""

    def signs(method: Callable[..., Result]) -> Callable[..., Result]:
        own = [each for each in inspect.signature(method).parameters.values() if each.kind is not each.VAR_KEYWORD]
        _, *theirs = inspect.signature(of).parameters.values()
        return signed(method, [*own, *(each for each in theirs if each.name not in {one.name for one in own})])

    return signs


def check_place(where: str, value: object) -> None:
    """Refuse what is neither a path nor an object that stands for one; None passes."""
    if value is not None and not isinstance(value, (str, PathLike)):
        hint = "; prepare a data frame first, with prepare(frame, out)" if hasattr(value, "__arrow_c_stream__") else ""
        raise SettingsError(f"{where}: found {type(value).__name__}; expected a path{hint}")


def check_keywords(where: str, named: Mapping[str, object], known: Iterable[str]) -> None:
    """Refuse keywords that are not known. Raises `SettingsError`, which names the nearest known ones."""
    known = list(known)
    if strange := [name for name in named if name not in known]:
        raise SettingsError(f"{where}: {unknown('keyword', strange, known)}")
