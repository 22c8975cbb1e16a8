"""The arithmetic of a step, in force."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def arithmetic(precision: str, deterministic: bool) -> Iterator[None]:
    """Set the precision of matrix products and, if asked, deterministic kernels until the end of the block."""
    before, was_deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    if deterministic:  # cuBLAS needs this variable and reads it at its first use
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        if deterministic:  # torch's function loads its compiler
            torch.use_deterministic_algorithms(was_deterministic)
