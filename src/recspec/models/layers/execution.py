"""How modules run: how much at once, outside of compiled programs, without memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from recspec.base.errors import SettingsError

TIMES = 16
"""How many times as much a GPU takes. A CPU's blocks stay in its caches; a GPU ends an operation on such a block sooner
than the next one is launched."""
SHARE = 64
"""A tensor of a block takes at most one part in so many of a GPU's memory."""


def at_once(number: int, device: torch.device, *, width: int = 1) -> int:
    """Floats, or rows of `width` floats, that a device computes at once: `number` on a CPU, more on a GPU.

    It depends on the GPU's memory, not on what is free, so that the same run has the same blocks.
    """
    if device.type != "cuda":
        return number
    fits = torch.cuda.get_device_properties(device).total_memory // (SHARE * 4 * width)
    return min(TIMES * number, max(number, fits))


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


Module = TypeVar("Module", bound=nn.Module)

DRAWN = (torch.Tensor.normal_, torch.Tensor.erfinv_, torch.Tensor.clamp_, nn.init.normal_)
"""Operations of fillings that torch (some in 2.11, none in 2.13 but the first) writes in Python for the meta device.

They load its compiler, which takes as long as torch.
"""


class _Undrawn(TorchFunctionMode):
    """Leaves out `DRAWN`, because tensors without memory have no values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in DRAWN:
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


def on_meta_device(make: Callable[[], Module]) -> Module:
    """Build a module whose tensors have shapes but no values (torch's meta device).

    Raises:
        SettingsError: if a tensor has more elements than torch can count.
    """
    try:
        with torch.device("meta"), _Undrawn():
            return make()
    except (RuntimeError, TypeError, OverflowError) as error:
        if "overflow" not in str(error).lower():
            raise
        raise SettingsError(
            "a tensor of the model would be larger than any memory; make its widths, lengths and cardinalities smaller"
        ) from None
