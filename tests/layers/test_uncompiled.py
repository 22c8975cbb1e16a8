"""Functions that compiled programs leave to Python."""

from __future__ import annotations

import torch
from torch import Tensor

from recspec.models.layers import uncompiled


class Kept:
    """Keeps tensors in a list, for whose length a program would be compiled anew."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.while_compiling: list[bool] = []

    @uncompiled
    def keep(self, part: Tensor, *, factor: int) -> Tensor:
        """Keep a part, and return a multiple of it."""
        self.while_compiling.append(torch.compiler.is_compiling())
        self.parts.append(part)
        return part * factor


def test_a_compiled_program_calls_it_in_python_and_is_compiled_once() -> None:
    kept, graphs = Kept(), list[object]()

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    program = torch.compile(lambda x: kept.keep(x + 1, factor=2) + x, backend=backend)
    for _ in range(4):
        assert program(torch.ones(3)).tolist() == [5, 5, 5]
    assert len(kept.parts) == 4
    assert not any(kept.while_compiling)
    assert len(graphs) == 2  # before the call, and after it


def test_without_a_compiled_program_it_is_a_plain_call() -> None:
    kept = Kept()
    assert kept.keep(torch.ones(2), factor=3).tolist() == [3, 3]
    assert kept.keep.__doc__ == "Keep a part, and return a multiple of it."
