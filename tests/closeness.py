"""How near two computations of the same thing have to be.

Bits may be compared only where both sides run the very same operations on the same shapes: one run and its repetition,
a run and its resumption, a file and what was read from it. Everything else is compared with a tolerance, because a
matrix product picks its kernel, and with it the order of its sums, by the processor, the number of threads, the number
of rows and even the address of its operands. On one machine two such results often agree to the bit; on the next they
don't.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.002}
"""Largest relative difference: some tens of units in the last place, what sums of a few hundred terms may differ by."""

ABSOLUTE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 0.01, torch.float16: 0.001}
"""Largest difference near zero, where terms of about 1 cancel."""


def assert_close(found: Any, expected: Any, message: str = "") -> None:
    """Raise AssertionError unless two tensors or arrays agree in shape, type and, up to the tolerance, values.

    Integers, booleans and texts have to be equal.
    """
    if isinstance(found, np.ndarray) and found.dtype.kind not in "iufb":
        np.testing.assert_array_equal(found, expected, err_msg=message)
        return
    found, expected = (each if isinstance(each, torch.Tensor) else torch.tensor(each) for each in (found, expected))
    torch.testing.assert_close(
        found,
        expected,
        rtol=RELATIVE.get(found.dtype, 0),
        atol=ABSOLUTE.get(found.dtype, 0),
        equal_nan=True,
        msg=lambda said: f"{message}: {said}" if message else said,
    )
