"""Modules whose tensors take no memory, to learn their shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from recspec.errors import SettingsError

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


def without_memory(make: Callable[[], Module]) -> Module:
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
