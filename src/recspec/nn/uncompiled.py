"""Functions that compiled programs leave to Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
T = TypeVar("T")


def uncompiled(function: Callable[Given, T]) -> Callable[Given, T]:
    """`torch.compiler.disable`, without loading the compiler before a program is compiled.

    Loading it takes as long as loading torch itself; most processes never compile.
    """

    @wraps(function)
    def called(*given: Given.args, **named: Given.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling():
            disabled: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            return disabled(*given, **named)  # type: ignore[no-any-return]
        return function(*given, **named)

    return called
