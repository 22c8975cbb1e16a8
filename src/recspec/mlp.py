"""An MLP's hidden layers, their dropout on a CPU, and a loss that comes with its gradients a block of rows at a time.

Shapes: B rows; R rows of a block; D a layer's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

DIGITS = 16
"""Binary digits that a keep probability is rounded to when masks are drawn bit by bit: it is off by at most 2^-17."""

SMALL = 1 << 16
"""Units below which torch's own dropout is as fast as bit masks, which cost some hundred small operations a call; and
below which the units of a loss stay in the cache without blocks."""

DROPPED = 1 << 18
"""Elements whose mask is made at once: 1 MB of floats, and as much for the mask."""

INTEGERS = {16: torch.int16, 32: torch.int32, 64: torch.int64}
"""The integers of so many bits."""

BLOCK_FLOATS = 1 << 20
"""Numbers of the widest tensor of a block of rows: 4 MB, near a core's second-level cache."""


class Mlp(nn.Module):
    """Linear layers, each followed by ReLU and dropout: (B, dims[0]) -> (B, dims[-1]).

    Weights start Glorot-uniform, ±sqrt(6 / (in + out)); biases as torch leaves them, ±1/sqrt(in).
    """

    def __init__(self, dims: Sequence[int], *, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(x_dim, y_dim) for x_dim, y_dim in pairwise(dims))
        self.dropout = dropout
        for layer in self.layers:
            nn.init.xavier_uniform_(cast(nn.Linear, layer).weight)

    @property
    def first(self) -> nn.Linear:
        """The first linear layer."""
        return cast(nn.Linear, self.layers[0])

    def forward(self, x: Tensor) -> Tensor:
        """All layers."""
        return self.after_first(aligned_linear(x, self.first))

    def after_first(self, x: Tensor) -> Tensor:
        """The rest of the way from what the first linear layer gives, (..., dims[1]); overwrites it."""
        x, scale = self._hidden(x)
        return x if scale == 1.0 else x * scale

    def logits(self, first: Tensor, out: nn.Linear) -> Tensor:
        """`after_first`, then an output layer of one unit: (..., dims[1]) -> (...)."""
        x, scale = self._hidden(first)
        weight = out.weight[0] if scale == 1.0 else out.weight[0] * scale
        logits = x @ weight  # a product with a vector; with a matrix of one row it takes several times as long
        return logits if out.bias is None else logits + out.bias

    def parameters_after_first(self, out: Tensor) -> tuple[Tensor, ...]:
        """Weight and bias of each layer but the first, then `out`, the weight (D,) of a unit of output."""
        layers = [cast(nn.Linear, layer) for layer in self.layers[1:]]
        return (*(each for layer in layers for each in (layer.weight, layer.bias)), out)

    @property
    def keep(self) -> float:
        """The probability with which a unit is kept now."""
        return 1.0 - self.dropout if self.training else 1.0

    def _hidden(self, x: Tensor) -> tuple[Tensor, float]:
        """The last layer's units, and what is left to multiply them by."""
        shape = x.shape[:-1]
        x, scale = relu_dropout_(x, self.dropout, training=self.training)
        # In two dimensions a layer's output is no view, and changing it in place costs nothing in the backward pass.
        x = x.reshape(-1, x.shape[-1])
        for layer in self.layers[1:]:
            weight, bias = cast(nn.Linear, layer).weight, cast(nn.Linear, layer).bias
            # Scaling weights instead of units: thousands of products a batch instead of millions.
            x = F.linear(x, weight if scale == 1.0 else weight * scale, bias)
            x, scale = relu_dropout_(x, self.dropout, training=self.training)
        return x.view(*shape, x.shape[-1]), scale


def aligned_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """The layer's output, computed at a width that is a multiple of 8, the columns more being zeros.

    Products of matrices whose rows start at odd places take a CPU up to one and a half times as long: with (8192, 479)
    x (479, 1024) the three of a training step took 368 ms on one thread, and 278 ms at a width of 480.
    """
    more = -layer.in_features % 8
    if torch.compiler.is_compiling() or not more or x.device.type != "cpu" or x.numel() < SMALL:
        return cast(Tensor, layer(x))
    return F.linear(F.pad(x, (0, more)), F.pad(layer.weight, (0, more)), layer.bias)


def relu_dropout_(x: Tensor, p: float, *, training: bool) -> tuple[Tensor, float]:
    """ReLU, then dropout of a share `p` of the units: overwrites `x`, and gives it and what to multiply it by.

    The factor, 1 / (1 - p) where units were dropped, keeps the mean. It is left to the caller, who can often multiply
    something smaller.

    On a CPU, drawing one random float a unit costs more than a layer's matrix product. Here one random bit a unit and
    binary digit of p is drawn instead (a single bit for p = 0.5), and the backward pass needs no mask: a unit that
    was dropped and one that ReLU stopped are both 0 in the output, and neither passes a gradient.
    """
    if not training or p == 0.0:
        return x.relu_(), 1.0
    if x.device.type != "cpu" or x.numel() < SMALL or not x.is_contiguous() or torch.compiler.is_compiling():
        return F.dropout(x.relu_(), p, training=True), 1.0
    keep = max(1, round((1 - p) * 2**DIGITS)) / 2**DIGITS
    return cast(Tensor, _ReluDropout.apply(x, keep)), 1 / keep  # type: ignore[no-untyped-call]


class _ReluDropout(torch.autograd.Function):
    """`relu_dropout_` on a CPU.

    Its backward pass overwrites the gradient it is given, so what uses the output must make a gradient of its own, as a
    product does; an addition would hand the same one to its other side.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: float) -> Tensor:
        _relu_and_drop_(x.view(-1), keep)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        # The gradient of a matrix product is nobody else's: overwriting it saves a pass over fresh memory.
        if gradient.is_contiguous() and gradient._base is None:
            return torch.ops.aten.threshold_backward.grad_input(gradient, y, 0, grad_input=gradient), None
        return torch.ops.aten.threshold_backward(gradient, y, 0), None


def _relu_and_drop_(x: Tensor, keep: float) -> None:
    """In place on a flat tensor: negative elements become 0, and each other one with probability 1 - keep.

    A piece at a time, so that it and its bits stay in the cache. The r-th bit of word j, from the sign down, decides on
    element r * words + j of a piece: shifted to the sign it makes an integer of 0 or more (keep) or a negative one.
    """
    bits = x.element_size() * 8
    words = -(-min(x.numel(), DROPPED) // bits)
    shifted = torch.empty(bits, words, dtype=INTEGERS[bits])
    places = torch.arange(bits, dtype=shifted.dtype).unsqueeze(1)
    for piece in torch.split(x, words * bits):
        torch.bitwise_left_shift(bernoulli_words(words, 1 - keep, bits), places, out=shifted)
        units, signs = piece.view(shifted.dtype), shifted.view(-1)[: len(piece)]
        # "0 where the second is -1 or less": a unit's bits are passed as they are, as an integer of its size.
        torch.ops.aten.threshold_backward.grad_input(units, signs, -1, grad_input=units)
        piece.relu_()


def in_blocks(first: Tensor, units: int) -> bool:
    """Whether a loss from so many `units`, behind an MLP's first layer, is computed with its gradients, in blocks."""
    return (
        units >= SMALL
        and first.device.type == "cpu"
        and first.dtype == torch.float32
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def block_rows(*widths: int) -> int:
    """Rows of a block whose tensors have so many numbers a row."""
    return max(1, BLOCK_FLOATS // max(1, *widths))


class MlpBlocks:
    """The way from an MLP's first linear layer to logits and back, for a block of rows at a time.

    Between the products of a whole batch, ReLU, dropout and their gradients read and write the units in memory, which
    took NeuMF as long as the products. Blocks small enough for the cache, one after the other written over the same
    memory, leave little but the products. Gradients of the weights add up from block to block, in `gradients`.
    """

    def __init__(self, parameters: Sequence[Tensor], keep: float, rows: int) -> None:
        """`parameters` as `Mlp.parameters_after_first` gives them; a block has at most `rows` rows."""
        self.keep = max(1, round(keep * 2**DIGITS)) / 2**DIGITS
        *hidden, out = (parameter.detach() for parameter in parameters)
        # Scaling weights instead of units: thousands of products a batch instead of millions.
        self.weights = [weight / self.keep for weight in hidden[::2]]
        self.biases = hidden[1::2]
        self.out = out / self.keep
        self.gradients = [torch.zeros_like(parameter) for parameter in (*hidden, out)]
        self._units = [out.new_empty(rows, len(bias)) for bias in self.biases]
        self._slopes = [torch.empty_like(units) for units in self._units]
        self._ones = out.new_ones(rows)
        self._block: list[Tensor] = []

    def logits(self, first: Tensor) -> Tensor:
        """Logits (R,) from what the first layer gives, (R, D), which becomes its units."""
        self._block = [self._stopped(first)]
        for weight, bias, units in zip(self.weights, self.biases, self._units, strict=True):
            product = torch.addmm(bias, self._block[-1], weight.t(), out=units[: len(first)])
            self._block.append(self._stopped(product))
        return torch.mv(self._block[-1], self.out)

    def slopes(self, gradient: Tensor, into: Tensor) -> Tensor:
        """From the gradient (R,) of the last logits that of `first`, (R, D), which is written into `into`."""
        rows = len(gradient)
        targets = [slopes[:rows] for slopes in (into, *self._slopes)]
        self.gradients[-1].addmv_(self._block[-1].t(), gradient)
        torch.mul(gradient.unsqueeze(1), self.out, out=targets[-1])
        for place in reversed(range(len(targets))):
            slope, units = targets[place], self._block[place]
            # A unit that was dropped and one that ReLU stopped are both 0, and neither passes a gradient.
            torch.ops.aten.threshold_backward.grad_input(slope, units, 0, grad_input=slope)
            if place:
                below = self._block[place - 1]
                self.gradients[2 * place - 2].addmm_(slope.t(), below)
                self.gradients[2 * place - 1].addmv_(slope.t(), self._ones[:rows])
                torch.mm(slope, self.weights[place - 1], out=targets[place - 1])
        return targets[0]

    def finished(self) -> list[Tensor]:
        """The gradients of `parameters`, when all blocks are done."""
        for gradient in (*self.gradients[:-1:2], self.gradients[-1]):
            gradient.div_(self.keep)  # they were those of the scaled weights
        return self.gradients

    def _stopped(self, x: Tensor) -> Tensor:
        if self.keep < 1.0:
            _relu_and_drop_(x.view(-1), self.keep)
            return x
        return x.relu_()


def cross_entropy_(logits: Tensor, label: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """A block's share of the mean binary cross-entropy over `rows` rows, and its gradient, written over the logits."""
    loss = F.binary_cross_entropy_with_logits(logits, label, reduction="sum") / rows
    return loss, logits.sigmoid_().sub_(label).div_(rows)


def times(gradients: Sequence[Tensor | None], factor: Tensor) -> tuple[Tensor | None, ...]:
    """What a loss that came with its gradients gives in the backward pass: they, times that of the loss, mostly 1.

    Raises:
        NotImplementedError: where their own gradients are asked for (`create_graph`), of which nothing is known here.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError("a loss computed in blocks has no second derivatives; set recspec.mlp.SMALL higher")
    if factor.item() == 1.0:
        return tuple(gradients)
    return tuple(None if gradient is None else gradient * factor for gradient in gradients)


def bernoulli_words(num_words: int, probability: float, bits: int) -> Tensor:
    """Integers (num_words,) of 16, 32 or 64 bits, every bit of them 1 with `probability` < 1, all independent.

    Taking the probability's binary digits from the last to the first, a random bit joined by OR where the digit is 1
    and by AND where it is 0 puts that digit in front: P becomes (1 + P) / 2 or P / 2.
    """
    dtype = INTEGERS[bits]
    numerator = round(probability * 2**DIGITS)
    words = torch.zeros(-(-num_words * bits // 64), dtype=torch.int64)
    for digit in reversed(f"{numerator:0{DIGITS}b}".rstrip("0")):
        fresh = torch.empty_like(words).random_(-(2**63), None)
        words = words.bitwise_or_(fresh) if digit == "1" else words.bitwise_and_(fresh)
    return words.view(dtype)[:num_words]
