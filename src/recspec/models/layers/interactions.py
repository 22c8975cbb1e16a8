"""Interactions of features: dot products of all pairs, and cross layers.

Shapes: B rows; F vectors a row; D their width; X the input's width of a cross layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recspec.models.layers import kernels
from recspec.models.layers.hand_written import Dots


def dot_interaction(vectors: Tensor, backend: kernels.Backend | None = None) -> Tensor:
    """The dot product of every pair of a row's vectors: (B, F, D) -> (B, F (F - 1) / 2).

    The strictly lower triangle of the Gram matrix, row by row: 10, 20, 21, 30, ... Naumov et al.: Deep Learning
    Recommendation Model for Personalization and Recommendation Systems, 2019, section 2.1.
    """
    device = vectors.device.type
    if kernels.uses_triton(backend, vectors.device) and kernels.can_dot(vectors):
        if torch.is_autocast_enabled(device):
            vectors = vectors.to(torch.get_autocast_dtype(device))
        return cast(Tensor, Dots.apply(vectors))  # type: ignore[no-untyped-call]
    gram = torch.bmm(vectors, vectors.transpose(1, 2))
    # Tensors made in a trace must not outlive it.
    triangle = _lower_triangle if torch.compiler.is_compiling() else _kept_lower_triangle
    return gram.flatten(1).index_select(1, triangle(vectors.shape[1], vectors.device))


@cache
def _kept_lower_triangle(features: int, device: torch.device) -> Tensor:
    """Kept on the device; a copy at every step would wait for it. Autograd may need what an inference made."""
    with torch.inference_mode(False):
        return _lower_triangle(features, torch.device("cpu")).to(device)


def _lower_triangle(features: int, device: torch.device) -> Tensor:
    """The places below the diagonal of a flattened square matrix, row by row."""
    if device.type == "cuda":  # a mask would wait for the device to count its places
        row, column = torch.tril_indices(features, features, offset=-1, device=device).unbind()
        return row * features + column
    square = torch.arange(features * features, device=device).view(features, features)
    return square[torch.ones_like(square, dtype=torch.bool).tril(-1)]


def linear_of_parts(layer: nn.Linear, parts: Sequence[tuple[Tensor, Sequence[int]]]) -> Tensor:
    """A linear layer's output from broadcasting parts of its input, each (..., n) with the layer's n columns for it.

    So a request's part is multiplied once a request, and an item's part once an item.
    """
    total: Tensor | None = None
    for x, columns in parts:
        product = F.linear(x, layer.weight[:, torch.tensor(columns, device=x.device)])
        total = product if total is None else total + product
    assert total is not None, "a layer without input"
    return total if layer.bias is None else total + layer.bias


class CrossNetwork(nn.Module):
    """Low-rank cross layers: x_{l+1} = x_0 * (V (U x_l) + b) + x_l, (B, X) -> (B, X).

    Wang et al.: DCN V2: Improved Deep & Cross Network, WWW 2021, equation 2 with W = V U of the given rank; a rank of 0
    takes a full W. Weights start normal, N(0, 2 / (in + out)) cut off at two deviations, biases at 0.
    """

    def __init__(self, width: int, *, num_layers: int, rank: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(num_layers if rank else 0))
        self.up = nn.ModuleList(nn.Linear(rank or width, width) for _ in range(num_layers))
        for layer in (*self.down, *self.up):
            linear = cast(nn.Linear, layer)
            std = (2 / (linear.in_features + linear.out_features)) ** 0.5
            nn.init.trunc_normal_(linear.weight, std=std, a=-2 * std, b=2 * std)
        for layer in self.up:
            nn.init.zeros_(cast(nn.Linear, layer).bias)

    def forward(self, first: Tensor, product: Tensor | None = None) -> Tensor:
        """All layers, from x_0 (..., X) and, if already known, the product of `opening` with it."""
        x = first
        for place, up in enumerate(self.up):
            if place == 0 and product is not None:
                crossed = up(product) if len(self.down) else product
            else:
                crossed = up(self.down[place](x) if len(self.down) else x)
            x = torch.addcmul(x, first, crossed)
        return x

    @property
    def opening(self) -> nn.Linear:
        """The layer that multiplies x_0 first: a sum over its columns, and so over features."""
        return cast(nn.Linear, self.down[0] if len(self.down) else self.up[0])
