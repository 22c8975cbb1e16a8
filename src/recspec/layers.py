"""Blocks that two or more models use.

Shapes: B rows; D a layer's width; L a list feature's length.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recspec.batch import Batch
from recspec.feature_spec import FeatureSpec

DIGITS = 16
"""Binary digits that a keep probability is rounded to when masks are drawn bit by bit: it is off by at most 2^-17."""

SMALL = 1 << 16
"""Elements below which torch's own dropout is as fast: the bit masks cost some hundred small operations a call."""


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
        return self.after_first(self.first(x))

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


def relu_dropout_(x: Tensor, p: float, *, training: bool) -> tuple[Tensor, float]:
    """ReLU, then dropout of a share `p` of the units: overwrites `x`, and gives it and what to multiply it by.

    The factor, 1 / (1 - p) where units were dropped, keeps the mean. It is left to the caller, who can often multiply
    something smaller.

    On a CPU, drawing one random float a unit costs more than a layer's matrix product. Here one random bit a unit and
    binary digit of 1 - p is drawn instead (a single bit for p = 0.5), and the backward pass needs no mask: a unit that
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

    The tensor is cut into as many slices as an integer of its element's size has bits. The r-th bit of word j, from the
    sign down, decides on element j of slice r: shifted down from the sign it makes all ones (keep) or all zeros (drop).
    """
    bits = x.element_size() * 8
    num_words = -(-x.numel() // bits)
    words = bernoulli_words(num_words, keep, bits)
    mask = torch.empty_like(words)
    slices = zip(torch.split(x, num_words), torch.split(x.view(words.dtype), num_words), strict=True)
    for part, integers in slices:
        if part.shape != words.shape:
            words, mask = words[: len(part)], mask[: len(part)]
        torch.bitwise_right_shift(words, bits - 1, out=mask)
        part.relu_()
        integers.bitwise_and_(mask)
        words.add_(words)  # the next bit moves to the sign


def bernoulli_words(num_words: int, probability: float, bits: int) -> Tensor:
    """Integers (num_words,) of 16, 32 or 64 bits, every bit of them 1 with `probability`, all independent.

    Taking the probability's binary digits from the last to the first, a random bit joined by OR where the digit is 1
    and by AND where it is 0 puts that digit in front: P becomes (1 + P) / 2 or P / 2.
    """
    dtype = {16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
    numerator = round(probability * 2**DIGITS)
    if numerator == 2**DIGITS:
        return torch.full((num_words,), -1, dtype=dtype)
    words = torch.zeros(-(-num_words * bits // 64), dtype=torch.int64)
    for digit in reversed(f"{numerator:0{DIGITS}b}".rstrip("0")):
        fresh = torch.empty_like(words).random_(-(2**63), None)
        words = words.bitwise_or_(fresh) if digit == "1" else words.bitwise_and_(fresh)
    return words.view(dtype)[:num_words]


# --- embeddings ------------------------------------------------------------------------------------------------------

Combiner = Literal["sum", "mean"]


class Embeddings(nn.Module):
    """Embedding tables of several features, looked up together and laid side by side: (B, sum of widths).

    All tables of one width lie one after the other in one tensor, a store, so that a batch takes one gather a width
    and not one a feature. Features that share a vocabulary share a table. A list's vectors are pooled, padding (id 0)
    left out: it neither adds to the sum nor counts in the mean, and an empty list gives zeros.

    A row starts Glorot-normal for its table, N(0, 2 / (rows + width)) cut off at two standard deviations, or with the
    standard deviation given.
    """

    def __init__(
        self, spec: FeatureSpec, widths: Mapping[str, int], *, combiner: Combiner = "sum", std: float | None = None
    ) -> None:
        super().__init__()
        self.combiner = combiner
        self.widths = dict(widths)
        self.lengths = {name: spec.features[name].length or 1 for name in widths}
        self.lists = frozenset(name for name in widths if spec.features[name].is_list)
        self.first_row: dict[str, int] = {}
        tables: dict[int, dict[str, range]] = {}
        for name, width in widths.items():
            store = tables.setdefault(width, {})
            start = max((table.stop for table in store.values()), default=0)
            table = store.setdefault(spec.vocabulary(name), range(start, start + spec.num_ids(name)))
            self.first_row[name] = table.start
        self.stores = nn.ParameterDict(
            {
                str(width): _filled_tables([len(table) for table in store.values()], width, std)
                for width, store in tables.items()
            }
        )
        self.sparse: set[str] = set()
        """Stores whose gradient holds the rows of the batch alone; `recspec.train` decides."""

    @property
    def width(self) -> int:
        """Numbers a row: the sum of all features' widths."""
        return sum(self.widths.values())

    def ids_per_row(self, store: str) -> int:
        """Most ids a row of a batch looks up in a store: one of each scalar, a list's length."""
        return sum(self.lengths[name] for name, width in self.widths.items() if width == int(store))

    def order(self, names: Collection[str] | None = None) -> tuple[str, ...]:
        """The features in the order in which their vectors stand in what `forward` gives for `names`."""
        chosen = self.widths if names is None else names
        return tuple(
            name
            for store in self.stores
            for part in (self._scalars(int(store), chosen), self._lists(int(store), chosen))
            for name in part
        )

    def forward(self, batch: Batch, names: Collection[str] | None = None) -> Tensor:
        """The vectors of all features, or of those named, side by side: (B, sum of their widths)."""
        chosen = self.widths if names is None else names
        parts: list[Tensor] = []
        for key, store in self.stores.items():
            width = int(key)
            if scalars := self._scalars(width, chosen):
                ids = torch.stack([batch[name].long() + self.first_row[name] for name in scalars], dim=1)
                parts.append(F.embedding(ids, store, sparse=key in self.sparse).flatten(1))
            parts += [self._pooled(batch[name], store, name, key) for name in self._lists(width, chosen)]
        return torch.cat(parts, dim=1) if len(parts) != 1 else parts[0]

    def _pooled(self, ids: Tensor, store: Tensor, name: str, key: str) -> Tensor:
        """A list's vectors (B, L) -> (B, width), summed or averaged without padding."""
        first = self.first_row[name]
        if torch.compiler.is_compiling():  # exporters know no padding in a bag
            present = (ids != 0).unsqueeze(-1).to(store.dtype)
            total = (F.embedding(ids.long() + first, store) * present).sum(1)
            return total if self.combiner == "sum" else total / present.sum(1).clamp(min=1)
        bags = ids.long() + first
        return F.embedding_bag(bags, store, mode=self.combiner, padding_idx=first, sparse=key in self.sparse)

    def _scalars(self, width: int, names: Collection[str]) -> list[str]:
        return [name for name, own in self.widths.items() if own == width and name in names and name not in self.lists]

    def _lists(self, width: int, names: Collection[str]) -> list[str]:
        return [name for name, own in self.widths.items() if own == width and name in names and name in self.lists]


def _filled_tables(num_rows: Sequence[int], width: int, std: float | None) -> nn.Parameter:
    """Tables of one width, one after the other, with their starting values; zeros with a deviation of 0."""
    store = torch.zeros(sum(num_rows), width)
    for table, rows in zip(torch.split(store, list(num_rows)), num_rows, strict=True):
        spread = (2 / (rows + width)) ** 0.5 if std is None else std
        if spread:
            # A normal distribution cut off at two standard deviations has .87963 of its own.
            own = spread / 0.87962566103423978
            nn.init.trunc_normal_(table, std=own, a=-2 * own, b=2 * own)
    return nn.Parameter(store)
