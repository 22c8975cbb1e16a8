"""A matrix whose products set the floating-point flag of an invalid operation, as OpenBLAS does of lanes it drops.

Seen with OpenBLAS 0.3.31 on processors with AVX-512: a float32 matrix with rows of five numbers times a vector, right
in every number, flags an invalid operation where the stack happens to hold a signaling NaN. numpy then warns.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class FlaggingMatrix(np.ndarray[Any, np.dtype[Any]]):
    """An array whose products are right and flagged."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *given: Any, **named: Any) -> Any:
        """A plain result of a product, which is flagged before it; of all else an array of this kind."""
        if ufunc is np.matmul:
            np.subtract(np.float32(np.inf), np.float32(np.inf))
        named = {key: plain(value) for key, value in named.items()}
        made = getattr(ufunc, method)(*map(plain, given), **named)
        return made if ufunc is np.matmul or not isinstance(made, np.ndarray) else flagging(made)


def plain(value: Any) -> Any:
    """Arrays of this kind, alone or in a tuple, as plain ones."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return value.view(np.ndarray) if isinstance(value, FlaggingMatrix) else value


def flagging(values: np.ndarray[Any, Any]) -> FlaggingMatrix:
    """A view of values."""
    return values.view(FlaggingMatrix)
