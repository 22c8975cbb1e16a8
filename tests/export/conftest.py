"""What the tests of exports share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_table_of_operators() -> Iterator[None]:
    """torch.onnx makes its table of operators anew for each program, half a second each; here one serves all."""
    registration = pytest.importorskip("torch.onnx._internal.exporter._registration")
    with pytest.MonkeyPatch.context() as patch:
        if registry := getattr(registration, "ONNXRegistry", None):
            patch.setattr(registry, "from_torchlib", staticmethod(cache(registry.from_torchlib)))
        yield
