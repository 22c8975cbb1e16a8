"""An MLP's layers, their dropout on a CPU, and the way through them there and back a block of rows at a time.

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

    @property
    def tail(self) -> tuple[Tensor, ...]:
        """Weight and bias of every layer but the first."""
        layers = [cast(nn.Linear, layer) for layer in self.layers[1:]]
        return tuple(each for layer in layers for each in (layer.weight, layer.bias))

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
    keep = in_digits(1 - p)
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


def comes_with_gradients(x: Tensor) -> bool:
    """Whether a loss of what an MLP makes of `x` may be computed together with its gradients."""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def in_blocks(first: Tensor, units: int) -> bool:
    """Whether a loss from so many `units`, behind an MLP's first layer, is computed with its gradients, in blocks."""
    return units >= SMALL and comes_with_gradients(first)


def block_rows(*widths: int) -> int:
    """Rows of a block whose tensors have so many numbers a row."""
    return max(1, BLOCK_FLOATS // max(1, *widths))


class Scratch:
    """Tensors that one block after the other writes over: fresh ones cost page faults, and room in the cache."""

    def __init__(self, like: Tensor, rows: int) -> None:
        self._like, self._rows = like, rows
        self._held: dict[str, Tensor] = {}

    def __call__(self, name: str, rows: int, width: int) -> Tensor:
        """(rows, width), whatever it holds; the same memory for the same name."""
        if name not in self._held or len(self._held[name]) < rows:
            self._held[name] = self._like.new_empty(max(self._rows, rows), width)
        return self._held[name][:rows]


class Tail:
    """What comes after an MLP's first linear layer, there and back for a block of rows at a time: its activation,
    further layers, and a last one of one number a row.

    Between the products of a whole batch, activations and their gradients are read and written in memory, which took
    NeuMF as long as the products. Blocks small enough for the cache, one after the other written over the same memory,
    leave little but the products. Gradients of the weights add up from block to block.
    """

    def __init__(self, kind: str, tail: Sequence[Tensor], keep: float = 1.0) -> None:
        """`tail` is weight and bias of the further layers and of the last; `kind` is relu or sigmoid.

        Units are kept with probability `keep`, after relu alone.
        """
        self.kind = kind
        self.keep = in_digits(keep)
        # Scaling weights instead of units: thousands of products a batch instead of millions.
        self.weights = [weight if self.keep == 1.0 else weight / self.keep for weight in tail[::2]]
        self.biases = tail[1::2]
        self._transposed = [weight.t() for weight in self.weights]  # views, taken once for all blocks
        self._slopes = [torch.zeros_like(each) for each in tail]
        self._of_last = self._slopes[-2][0]

    def layers(self, first: Tensor, scratch: Scratch) -> list[Tensor]:
        """What the first layer gives (n, W_0), and room for what the further ones give (n, W_i), in `scratch`."""
        widths = [len(bias) for bias in self.biases[:-1]]
        return [first, *(scratch(f"{place}", len(first), width) for place, width in enumerate(widths, start=1))]

    def forward(self, layers: Sequence[Tensor], out: Tensor) -> Tensor:
        """From what the first layer gives, layers[0] (n, W_0), to `out` (n,); `layers` become the activations."""
        x = self._activate(layers[0])
        for weight, bias, layer in zip(self._transposed[:-1], self.biases[:-1], layers[1:], strict=True):
            x = self._activate(torch.addmm(bias, x, weight, out=layer))
        return torch.addmv(self.biases[-1], x, self.weights[-1][0], out=out)

    def backward(self, gradient: Tensor, layers: Sequence[Tensor], scratch: Scratch) -> Tensor:
        """The gradient of what the first layer gives, from that of `forward`'s numbers.

        It stands in `scratch`, until the next call.
        """
        self._slopes[-1].add_(gradient.sum())
        self._of_last.addmv_(layers[-1].t(), gradient)
        last = scratch(f"of {len(layers) - 1}", *layers[-1].shape)
        slope = self._through(torch.outer(gradient, self.weights[-1][0], out=last), layers[-1])
        for place in range(len(layers) - 1, 0, -1):
            self._slopes[2 * place - 2].addmm_(slope.t(), layers[place - 1])
            self._slopes[2 * place - 1].add_(slope.sum(0))
            below = scratch(f"of {place - 1}", *layers[place - 1].shape)
            slope = self._through(torch.mm(slope, self.weights[place - 1], out=below), layers[place - 1])
        return slope

    def gradients(self) -> list[Tensor]:
        """The gradients of `tail`, once all blocks are done."""
        if self.keep < 1.0:
            for slope in self._slopes[::2]:
                slope.div_(self.keep)  # it was that of a scaled weight
        return self._slopes

    def _activate(self, x: Tensor) -> Tensor:
        if self.kind == "sigmoid":
            return x.sigmoid_()
        if self.keep == 1.0:
            return x.relu_()
        _relu_and_drop_(x.view(-1), self.keep)
        return x

    def _through(self, slope: Tensor, y: Tensor) -> Tensor:
        """The gradient before an activation, from that after it, in place; `y` is what it gave."""
        if self.kind == "sigmoid":
            return cast(Tensor, torch.ops.aten.sigmoid_backward.grad_input(slope, y, grad_input=slope))
        # A unit that was dropped and one that ReLU stopped are both 0, and neither passes a gradient.
        return cast(Tensor, torch.ops.aten.threshold_backward.grad_input(slope, y, 0, grad_input=slope))


def at_least_fp32(x: Tensor) -> Tensor:
    """`x`, as float32 where its type is narrower: losses and sums of squares are not computed in fewer digits."""
    return x if x.dtype == torch.float64 else x.float()


def cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """Mean binary cross-entropy of logits and labels of equal shape, in nats: computed in float32 or wider."""
    logits = at_least_fp32(logits)
    return F.binary_cross_entropy_with_logits(logits, label.to(logits.dtype))


def cross_entropy_(logits: Tensor, label: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """`share` times the summed binary cross-entropy, in nats, and its gradient, written over the logits (n,)."""
    loss = F.binary_cross_entropy_with_logits(logits, label, reduction="sum") * share
    return loss, logits.sigmoid_().sub_(label).mul_(share)


def times(gradients: Sequence[Tensor | None], factor: Tensor) -> tuple[Tensor | None, ...]:
    """What a loss that came with its gradients gives in the backward pass: they, times that of the loss, mostly 1.

    Raises:
        NotImplementedError: where their own gradients are asked for (`create_graph`), of which nothing is known here.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "this loss comes with its gradients and has no second derivatives (create_graph); take torch's binary "
            "cross-entropy of the model's logits instead"
        )
    if factor.item() == 1.0:
        return tuple(gradients)
    return tuple(None if gradient is None else gradient * factor for gradient in gradients)


def in_digits(keep: float) -> float:
    """The probability nearest to `keep` that masks are drawn with: at least 2^-16."""
    digits: int = max(1, round(keep * 2**DIGITS))
    return digits / int(2**DIGITS)


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
