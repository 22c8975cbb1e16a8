"""The arithmetic of a step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from recspec.errors import SettingsError
from recspec.machine import cpu_is_intels, cpu_multiplies_bf16

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]


def pick_precision(asked: Precision, device: torch.device, *, steady: bool = True) -> tuple[str, str]:
    """The arithmetic of a step and the reason for it.

    Args:
        asked: the setting.
        device: where the step runs.
        steady: whether all matrix products have the same shapes at every step.

    Raises:
        SettingsError: if the device is far too slow in the precision asked for.
    """
    if asked == "fp16" and device.type == "cpu":
        raise SettingsError("train.precision is fp16, which a CPU does many times slower than fp32; use bf16 or fp32")
    if asked != "auto":
        return asked, "as asked"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported():
            return "bf16", "this GPU multiplies bf16 at full speed"
        return "fp16", "this GPU has fp16 units and no bf16 units"
    if not steady:
        return "fp32", "products change shape at every step, and bf16 and oneDNN prepare for each new shape"
    if cpu_multiplies_bf16():
        return "bf16", "this CPU multiplies bf16 faster than fp32"
    if cpu_is_intels():
        return "fp32", "this CPU multiplies nothing faster"
    return "tf32", "this CPU is not faster in bf16; products go through oneDNN, in fp32 arithmetic here"


@contextmanager
def arithmetic(precision: str, deterministic: bool) -> Iterator[None]:
    """Set the precision of matrix products and, if asked, deterministic kernels until the end of the block."""
    before = torch.get_float32_matmul_precision()
    if deterministic:  # cuBLAS needs this variable and reads it at its first use
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_float32_matmul_precision({"fp32": "highest"}.get(precision, "medium"))
    if deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.use_deterministic_algorithms(was_deterministic)
