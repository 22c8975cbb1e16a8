"""An MLP for a block of rows at a time, forward and backward.

Shapes: n rows of a block; W_i widths of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor


class Scratch:
    """Tensors that every block overwrites; fresh ones would cost page faults and room in the cache."""

    def __init__(self, like: Tensor, rows: int) -> None:
        self._like, self._rows = like, rows
        self._held: dict[str, Tensor] = {}

    def __call__(self, name: str, rows: int, width: int) -> Tensor:
        """An uninitialised tensor (rows, width); the same memory for the same name."""
        if name not in self._held or len(self._held[name]) < rows:
            self._held[name] = self._like.new_empty(max(self._rows, rows), width)
        return self._held[name][:rows]


class Tail:
    """The part of an MLP after its first linear layer: activation, further layers, and a last layer of one unit.

    For a whole batch, moving activations and their gradients through memory takes as long as the products, measured
    on NeuMF. Blocks that fit in the cache and share their memory leave little but the products. The gradients of the
    weights grow from block to block.
    """

    def __init__(self, kind: str, tail: Sequence[Tensor]) -> None:
        """`tail` holds weight and bias of the further layers and of the last; `kind` is relu or sigmoid."""
        self.kind = kind
        self.weights, self.biases = tail[::2], tail[1::2]
        self._transposed = [weight.t() for weight in self.weights]  # views, made once for all blocks
        self.slopes = [torch.zeros_like(each) for each in tail]
        """The gradients of `tail`, after all blocks."""
        self._of_last = self.slopes[-2][0]

    def layers(self, first: Tensor, scratch: Scratch) -> list[Tensor]:
        """The first layer's output (n, W_0) and, in `scratch`, room for the further ones' (n, W_i)."""
        widths = [len(bias) for bias in self.biases[:-1]]
        return [first, *(scratch(f"{place}", len(first), width) for place, width in enumerate(widths, start=1))]

    def forward(self, layers: Sequence[Tensor], out: Tensor) -> Tensor:
        """From the first layer's output, layers[0] (n, W_0), to `out` (n,); `layers` become the activations."""
        x = self._activate(layers[0])
        for weight, bias, layer in zip(self._transposed[:-1], self.biases[:-1], layers[1:], strict=True):
            x = self._activate(torch.addmm(bias, x, weight, out=layer))
        return torch.addmv(self.biases[-1], x, self.weights[-1][0], out=out)

    def backward(self, gradient: Tensor, layers: Sequence[Tensor], scratch: Scratch) -> Tensor:
        """The gradient of the first layer's output from that of `forward`'s; valid in `scratch` until the next call."""
        self.slopes[-1].add_(gradient.sum())
        self._of_last.addmv_(layers[-1].t(), gradient)
        last = scratch(f"of {len(layers) - 1}", *layers[-1].shape)
        slope = self._through(torch.outer(gradient, self.weights[-1][0], out=last), layers[-1])
        for place in range(len(layers) - 1, 0, -1):
            self.slopes[2 * place - 2].addmm_(slope.t(), layers[place - 1])
            self.slopes[2 * place - 1].add_(slope.sum(0))
            below = scratch(f"of {place - 1}", *layers[place - 1].shape)
            slope = self._through(torch.mm(slope, self.weights[place - 1], out=below), layers[place - 1])
        return slope

    def _activate(self, x: Tensor) -> Tensor:
        return x.sigmoid_() if self.kind == "sigmoid" else x.relu_()

    def _through(self, slope: Tensor, y: Tensor) -> Tensor:
        """The gradient before an activation from that after it, in place; `y` is the activation's output."""
        if self.kind == "sigmoid":
            return cast(Tensor, torch.ops.aten.sigmoid_backward.grad_input(slope, y, grad_input=slope))
        return cast(Tensor, torch.ops.aten.threshold_backward.grad_input(slope, y, 0, grad_input=slope))
