"""Parts of layers that are computed by hand: dropout masks of random bits, and an MLP for a block of rows at a time.

Shapes: n rows of a block; W_i widths of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

DIGITS = 16
"""Binary digits of a keep probability in masks of random bits; the rounding error is at most 2^-17."""
DROPPED = 1 << 18
"""Elements of a mask that is made at once: 1 MB of floats, and as much for the mask."""

INTEGERS = {16: torch.int16, 32: torch.int32, 64: torch.int64}
"""Integer types by their number of bits."""


def relu_and_drop_(x: Tensor, keep: float) -> None:
    """In place on a flat tensor: negative elements become 0, all others with probability 1 - keep.

    It works on pieces that stay in the cache with their bits. The r-th bit of word j, from the sign down, decides
    about element r * words + j of a piece: shifted to the sign, it makes a negative integer to drop the element.
    """
    bits = x.element_size() * 8
    words = -(-min(x.numel(), DROPPED) // bits)
    shifted = torch.empty(bits, words, dtype=INTEGERS[bits])
    places = torch.arange(bits, dtype=shifted.dtype).unsqueeze(1)
    for piece in torch.split(x, words * bits):
        torch.bitwise_left_shift(bernoulli_words(words, 1 - keep, bits), places, out=shifted)
        units, signs = piece.view(shifted.dtype), shifted.view(-1)[: len(piece)]
        # 0 where the second operand is -1 or less; a unit's bits pass unchanged, as an integer of its size.
        torch.ops.aten.threshold_backward.grad_input(units, signs, -1, grad_input=units)
        piece.relu_()


def in_digits(keep: float) -> float:
    """The probability nearest to `keep` that masks can have, at least 2^-16."""
    digits: int = max(1, round(keep * 2**DIGITS))
    return digits / int(2**DIGITS)


def bernoulli_words(num_words: int, probability: float, bits: int) -> Tensor:
    """Integers (num_words,) of 16, 32 or 64 bits; each bit is 1 with `probability` < 1, independently.

    It takes the probability's binary digits from the last to the first. OR with a random bit prepends a digit 1, so P
    becomes (1 + P) / 2; AND prepends a 0, so P becomes P / 2.
    """
    dtype = INTEGERS[bits]
    numerator = round(probability * 2**DIGITS)
    words = torch.zeros(-(-num_words * bits // 64), dtype=torch.int64)
    for digit in reversed(f"{numerator:0{DIGITS}b}".rstrip("0")):
        fresh = torch.empty_like(words).random_(-(2**63), None)
        words = words.bitwise_or_(fresh) if digit == "1" else words.bitwise_and_(fresh)
    return words.view(dtype)[:num_words]


def drop(x: Tensor, probability: float) -> Tensor:
    """Dropout: each element becomes 0 with `probability`, and is divided by 1 - probability otherwise.

    On a CPU, masks of random bits take a fifth of the time of `F.dropout`, whose draws take 10 ns an element.
    """
    if not probability:
        return x
    if x.device.type != "cpu" or x.element_size() * 8 not in INTEGERS or torch.compiler.is_compiling():
        return F.dropout(x, probability, training=True)
    bits, keep = x.element_size() * 8, in_digits(1 - probability)
    words = bernoulli_words(-(-x.numel() // bits), 1 - keep, bits)
    places = torch.arange(bits, dtype=words.dtype).unsqueeze(1)
    # Shifted to the sign and back, a bit fills an integer: all ones keep the bits of 1 / keep.
    signs = torch.bitwise_left_shift(words, places).bitwise_right_shift_(bits - 1).bitwise_not_()
    scale = torch.full((1,), 1 / keep, dtype=x.dtype).view(words.dtype)
    return x * signs.view(-1)[: x.numel()].bitwise_and_(scale).view(x.dtype).view(x.shape)


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
