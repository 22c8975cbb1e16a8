"""Modules whose tensors take no memory, to learn their shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from recspec.errors import SettingsError

Module = TypeVar("Module", bound=nn.Module)


def without_memory(make: Callable[[], Module]) -> Module:
    """Build a module whose tensors have shapes but no values (torch's meta device).

    Raises:
        SettingsError: if a tensor has more elements than torch can count.
    """
    try:
        with torch.device("meta"):
            return make()
    except (RuntimeError, TypeError, OverflowError) as error:
        if "overflow" not in str(error).lower():
            raise
        raise SettingsError(
            "a tensor of the model would be larger than any memory; make its widths, lengths and cardinalities smaller"
        ) from None
