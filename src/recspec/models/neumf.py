"""NeuMF: matrix factorisation and an MLP over user and item, joined in one linear layer.

He, Liao, Zhang, Nie, Hu, Chua: Neural Collaborative Filtering, WWW 2017, equation 12:

    logit = h · [p_u * q_i ; mlp([a_u ; b_i])] + c

with p, q of `factors` numbers, a, b of half the MLP's input each. The MLP's first linear layer W [a ; b] + w is a sum
of a user's part and an item's part. Each is computed once for a row of its table, not once for every pair: the same
function for less than half the arithmetic at the published sizes.

Shapes: B rows; F factors; D width of the MLP's first hidden layer; R requests (users); N items to score.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from recspec import config
from recspec.batch import Batch
from recspec.feature_spec import FeatureSpec
from recspec.mlp import Mlp, Scratch, Tail, at_least_fp32, block_rows, cross_entropy, cross_entropy_, in_blocks, times
from recspec.models.base import Model, counts_of

SCORE_FLOATS = 1 << 20
"""Floats of the MLP's first hidden layer that `score_items` forms at once: 4 MB, so that they stay in the cache."""


class NeuMFSettings(config.Settings):
    """Sizes and regularisation of NeuMF; the defaults are the sizes published for MovieLens 20M."""

    factors: int = Field(64, ge=1, description="width of the matrix-factorisation (GMF) embeddings")
    layers: tuple[int, ...] = Field(
        (256, 256, 128, 64),
        min_length=2,
        description="the MLP: width of its input (half from the user, half from the item), then of each hidden layer",
    )
    dropout: float = Field(0.5, ge=0, lt=1, description="share of units dropped after every hidden ReLU; 0 is none")
    use_gmf: bool = Field(True, description="the matrix-factorisation half; without it the model is MLP alone")
    use_mlp: bool = Field(True, description="the MLP half; without it the model is GMF alone")
    item_bias: bool = Field(False, description="one number for each item, added to the logit")
    l2: float = Field(
        0.0,
        ge=0,
        description="times the sum of squares of the GMF rows and item biases that a batch uses, each once, over the "
        "batch's rows",
    )
    l2_hidden: float = Field(
        0.0,
        ge=0,
        description="as l2, of the users' and items' parts of the MLP's first layer, before its ReLU",
    )

    @field_validator("layers")
    @classmethod
    def _positive_and_even(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        if any(width < 1 for width in layers):
            raise ValueError(f"layers are {list(layers)}; every width is at least 1")
        if layers[0] % 2:
            raise ValueError(
                f"the first of layers is {layers[0]}, the MLP's input, of which user and item take half each; "
                f"it must be even, as {layers[0] + 1}"
            )
        return layers

    @model_validator(mode="after")
    def _some_half(self) -> NeuMFSettings:
        if not (self.use_gmf or self.use_mlp):
            raise ValueError("use_gmf and use_mlp are both false; a model needs one of them")
        return self


class NeuMF(Model):
    """Neural matrix factorisation (NeuMF); GMF alone or the MLP alone by its settings.

    Reads the user's id and the item's id, and nothing else. Embeddings start N(0, 0.01), hidden layers Glorot-uniform,
    the last layer LeCun-uniform, ±sqrt(3 / in), item biases at 0.
    """

    name: ClassVar[str] = "neumf"
    needs: ClassVar[tuple[str, ...]] = ("user", "item", "label")
    Settings: ClassVar[type[config.Settings]] = NeuMFSettings
    settings: NeuMFSettings

    def __init__(self, spec: FeatureSpec, settings: NeuMFSettings) -> None:
        super().__init__(spec, settings)
        self.user_id, self.item_id = spec.user_id, spec.item_id
        self.num_users, self.num_items = spec.num_ids(self.user_id), spec.num_ids(self.item_id)
        joined = 0
        if settings.use_gmf:
            self.gmf_user = _table(self.num_users, settings.factors)
            self.gmf_item = _table(self.num_items, settings.factors)
            joined += settings.factors
        if settings.use_mlp:
            self.mlp_user = _table(self.num_users, settings.layers[0] // 2)
            self.mlp_item = _table(self.num_items, settings.layers[0] // 2)
            self.mlp = Mlp(settings.layers, dropout=settings.dropout)
            joined += settings.layers[-1]
        if settings.item_bias:
            self.item_bias = _table(self.num_items, 1)
            nn.init.zeros_(self.item_bias.weight)
        self.out = nn.Linear(joined, 1)
        nn.init.kaiming_uniform_(self.out.weight, nonlinearity="linear")

    def features(self) -> tuple[str, ...]:
        """The user's and the item's id."""
        return self.user_id, self.item_id

    def counted(self) -> tuple[str, ...]:
        """Both ids, where rows of tables are penalised: each once, however many rows of the batch use it."""
        return self.features() if self.settings.l2 or self.settings.l2_hidden else ()

    def forward(self, batch: Batch) -> Tensor:
        """Logits (B,)."""
        return self._join(
            _of_pairs(self._user_part, self.num_users, batch[self.user_id]).pairs(),
            _of_pairs(self._item_part, self.num_items, batch[self.item_id]).pairs(),
        )

    def loss(self, batch: Batch) -> Tensor:
        """Mean binary cross-entropy in nats, plus the squares of the rows that the batch uses (l2, l2_hidden).

        A table's row that n rows of the batch use is penalised once: each of the n pays 1/n of it. So parts of a batch
        pay together what the whole batch pays.
        """
        # Drawn negatives repeat the users of the positives, and a user's part serves all its repetitions.
        period = repeat_period(batch[self.user_id])
        item, label = (batch[name].view(-1, period) for name in (self.item_id, self.spec.label))
        user_shares = item_shares = None
        if counts_of(self.user_id) in batch:  # a part of a batch
            user_shares = len(item) / batch[counts_of(self.user_id)][:period]
            item_shares = 1 / batch[counts_of(self.item_id)].view_as(item)
        user_ids = batch[self.user_id][:period]
        user_side, user_penalty = self._regularised(self._user_part, self.num_users, user_ids, user_shares)
        item_side, item_penalty = self._regularised(self._item_part, self.num_items, item, item_shares)
        penalty = (user_penalty + item_penalty) / label.numel()
        first = item_side.part.first
        if first is not None and self._in_blocks(first, label):
            return self._loss_in_blocks(user_side, item_side, label) + penalty
        logits = self._join(user_side.pairs(), item_side.pairs())
        return cross_entropy(logits, label) + penalty

    def _in_blocks(self, first: Tensor, label: Tensor) -> bool:
        """Whether the loss of pairs (repetitions, users) comes with its gradients; a block holds a user at least."""
        return len(label) <= self._block_rows and in_blocks(first, label.numel() * first.shape[1])

    @property
    def _block_rows(self) -> int:
        return block_rows(*self.settings.layers[1:], self.settings.factors if self.settings.use_gmf else 1)

    def _loss_in_blocks(self, user: _Side, item: _Side, label: Tensor) -> Tensor:
        """Mean binary cross-entropy of pairs (repetitions, users), with its gradients."""
        return cast(
            Tensor,
            _PairLoss.apply(  # type: ignore[no-untyped-call]
                self._block_rows,
                (user.at.long(), item.at.long()),
                label,
                self.mlp.keep,
                self._gmf_weight() if self.settings.use_gmf else None,
                *(user.part.first, user.part.gmf, item.part.first, item.part.gmf, item.part.bias),
                *self.mlp.tail,
                self._mlp_weight().unsqueeze(0),
                self.out.bias,
            ),
        )

    def score_items(self, request: Batch, items: Batch) -> Tensor:
        """Logits (R, N) of every item for every request.

        Each side is computed once; what is left for a pair is a dot product and the MLP without its first layer.
        """
        user, item = self._user_part(request[self.user_id]), self._item_part(items[self.item_id])
        scores = self.out.bias.expand(request[self.user_id].shape[0], items[self.item_id].shape[0])
        if user.gmf is not None and item.gmf is not None:
            scores = scores + (user.gmf * self._gmf_weight()) @ item.gmf.T
        if item.bias is not None:
            scores = scores + item.bias
        if user.first is not None and item.first is not None:
            scores = scores + self._mlp_scores(user.first, item.first)
        return scores

    # --- the two sides of a pair ----------------------------------------------------------------------------------

    def _user_part(self, ids: Tensor | None) -> _Part:
        """What users bring to the logit: those of `ids`, or all of the table."""
        return _Part(
            gmf=_rows(self.gmf_user, ids) if self.settings.use_gmf else None,
            first=F.linear(_rows(self.mlp_user, ids), *self._first_layer("user")) if self.settings.use_mlp else None,
        )

    def _item_part(self, ids: Tensor | None) -> _Part:
        """What items bring to the logit: those of `ids`, or all of the table."""
        return _Part(
            gmf=_rows(self.gmf_item, ids) if self.settings.use_gmf else None,
            first=F.linear(_rows(self.mlp_item, ids), *self._first_layer("item")) if self.settings.use_mlp else None,
            bias=_rows(self.item_bias, ids).squeeze(1) if self.settings.item_bias else None,
        )

    def _first_layer(self, side: Literal["user", "item"]) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a side's half of the MLP's first layer; the bias goes with the user."""
        layer, half = self.mlp.first, self.settings.layers[0] // 2
        return (layer.weight[:, :half], layer.bias) if side == "user" else (layer.weight[:, half:], None)

    def _gmf_weight(self) -> Tensor:
        return self.out.weight[0, : self.settings.factors]

    def _mlp_weight(self) -> Tensor:
        return self.out.weight[0, -self.settings.layers[-1] :]

    # --- from both sides to logits --------------------------------------------------------------------------------

    def _join(self, user: _Part, item: _Part) -> Tensor:
        """Logits of pairs; the two sides' shapes are broadcast."""
        logits: Tensor = self.out.bias
        if user.gmf is not None and item.gmf is not None:
            logits = logits + (user.gmf * self._gmf_weight() * item.gmf).sum(-1)
        if item.bias is not None:
            logits = logits + item.bias
        if user.first is not None and item.first is not None:
            logits = logits + self.mlp.after_first(user.first + item.first) @ self._mlp_weight()
        return logits

    def _mlp_scores(self, user: Tensor, item: Tensor) -> Tensor:
        """The MLP's share of the scores (R, N), from each side's part (R, D) and (N, D) of its first layer."""
        if torch.compiler.is_compiling():
            return self.mlp.after_first(user.unsqueeze(1) + item) @ self._mlp_weight()
        step = max(1, SCORE_FLOATS // max(1, item.numel()))
        rows = [self.mlp.after_first(part.unsqueeze(1) + item) @ self._mlp_weight() for part in torch.split(user, step)]
        return torch.cat(rows)

    def _regularised(
        self, part: Callable[[Tensor | None], _Part], num_ids: int, ids: Tensor, shares: Tensor | None
    ) -> tuple[_Side, Tensor | float]:
        """A side's part for ids, and strength times the sum of squares of the rows they use, each once.

        With `shares`, in the shape of ids, each id adds that share of its row's square.
        """
        if not (self.settings.l2 or self.settings.l2_hidden):
            return _of_pairs(part, num_ids, ids), 0.0
        side = _of_used(part, num_ids, ids)
        rows, at = side.part, side.at
        used, places = torch.zeros(rows.num_rows, device=at.device), at.reshape(-1).long()
        if shares is None:
            used.index_fill_(0, places, 1.0)
        else:
            used.index_add_(0, places, shares.reshape(-1))
        penalty: Tensor | float = 0.0
        for table, strength in (
            (rows.gmf, self.settings.l2),
            (rows.bias, self.settings.l2),
            (rows.first, self.settings.l2_hidden),
        ):
            if table is not None and strength:
                penalty = penalty + strength * _sum_of_squares(table, used)
        return side, penalty


@dataclass(frozen=True)
class _Part:
    """What one side of the pair brings to the logit, a row for each user or item."""

    gmf: Tensor | None
    """(..., F)."""

    first: Tensor | None
    """(..., D): its part of the MLP's first layer, before the ReLU."""

    bias: Tensor | None = None
    """(...)."""

    @property
    def num_rows(self) -> int:
        return len(self._any)

    @property
    def device(self) -> torch.device:
        return self._any.device

    @property
    def _any(self) -> Tensor:
        return next(tensor for tensor in (self.gmf, self.first) if tensor is not None)

    def at(self, rows: Tensor) -> _Part:
        """Copies of the given rows; their shape replaces the first dimension."""
        flat = rows.reshape(-1)
        return self._each(lambda tensor: tensor.index_select(0, flat)).shaped(rows.shape)

    def shaped(self, shape: torch.Size) -> _Part:
        """The same rows in several dimensions."""
        return self if len(shape) == 1 else self._each(lambda tensor: tensor.view(*shape, *tensor.shape[1:]))

    def _each(self, change: Callable[[Tensor], Tensor]) -> _Part:
        gmf, first, bias = (None if tensor is None else change(tensor) for tensor in (self.gmf, self.first, self.bias))
        return _Part(gmf, first, bias)


@dataclass(frozen=True)
class _Side:
    """What one side brings to pairs, and which of its rows is whose."""

    part: _Part
    shape: torch.Size
    """Of the pairs."""

    rows: Tensor | None
    """The row of each pair, in their shape; the part has a row for each, in order, where it is None."""

    @property
    def at(self) -> Tensor:
        """The row of each pair, in their shape."""
        if self.rows is not None:
            return self.rows
        return torch.arange(self.part.num_rows, device=self.part.device).view(self.shape)

    def pairs(self) -> _Part:
        """A row for each pair, in their shape."""
        return self.part.shaped(self.shape) if self.rows is None else self.part.at(self.rows)


def _table(num_ids: int, width: int) -> nn.Embedding:
    table = nn.Embedding(num_ids, width)
    nn.init.normal_(table.weight, std=0.01)
    return table


def _rows(table: nn.Embedding, ids: Tensor | None) -> Tensor:
    return table.weight if ids is None else table.weight.index_select(0, ids)


def _of_pairs(part: Callable[[Tensor | None], _Part], num_ids: int, ids: Tensor) -> _Side:
    """A side's part for ids (...): by way of the whole table where that has fewer rows to multiply.

    A program that is being exported or compiled takes any number, so it must not depend on which is fewer.
    """
    if torch.compiler.is_compiling() or ids.numel() <= num_ids:
        return _Side(part(ids.reshape(-1)), ids.shape, None)
    return _Side(part(None), ids.shape, ids)


def _of_used(part: Callable[[Tensor | None], _Part], num_ids: int, ids: Tensor) -> _Side:
    """A side's part for rows among which each of `ids` is once.

    The rows are the whole table, or those of its rows that occur where ids are fewer than rows.
    """
    if ids.numel() > num_ids:
        return _Side(part(None), ids.shape, ids)
    used, at = torch.unique(ids, return_inverse=True)
    return _Side(part(used), ids.shape, at)


class _PairLoss(torch.autograd.Function):
    """Mean binary cross-entropy of pairs on a CPU, with its gradients, some users with all their items at a time.

    Rows of both sides are looked up, and their gradients added to those of the tables, while a block is in the cache.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: int,
        at: tuple[Tensor, Tensor],
        label: Tensor,
        keep: float,
        gmf_weight: Tensor | None,
        user_first: Tensor,
        user_gmf: Tensor | None,
        item_first: Tensor,
        item_gmf: Tensor | None,
        item_bias: Tensor | None,
        *tail: Tensor,
    ) -> Tensor:
        repeats, loss = len(label), item_first.new_zeros(())
        step = min(rows // repeats, label.shape[1])
        network, scratch = Tail("relu", tail, keep), Scratch(item_first, step * repeats)
        user, item = _Rows(user_first, step), _Rows(item_first, step * repeats)
        gmf = None
        if gmf_weight is not None and user_gmf is not None and item_gmf is not None:
            gmf = _GmfBlocks(gmf_weight, _Rows(user_gmf, step), _Rows(item_gmf, step * repeats))
        offsets = None if item_bias is None else _Rows(item_bias.unsqueeze(1), step * repeats)
        for user_at, items_at, wanted in zip(
            torch.split(at[0], step), torch.split(at[1], step, dim=1), torch.split(label, step, dim=1), strict=True
        ):
            item_at = items_at.reshape(-1)
            first = item.taken(item_at)
            first.view(repeats, len(user_at), -1).add_(user.taken(user_at))
            layers = network.layers(first, scratch)
            logits = network.forward(layers, scratch("logits", len(first), 1).squeeze(1))
            if gmf is not None:
                logits += gmf.logits(user_at, item_at)
            if offsets is not None:
                logits += offsets.taken(item_at).squeeze(1)
            share, slope = cross_entropy_(logits, wanted.reshape(-1).to(logits.dtype), 1 / label.numel())
            loss += share
            if gmf is not None:
                gmf.add(user_at, item_at, slope)
            if offsets is not None:
                offsets.add(item_at, slope.unsqueeze(1))
            of_first = network.backward(slope, layers, scratch)
            item.add(item_at, of_first)
            user.add(user_at, of_first.view(repeats, len(user_at), -1).sum(0))
        ctx.save_for_backward(
            None if gmf is None else gmf.gradient,
            user.gradient,
            None if gmf is None else gmf.user.gradient,
            item.gradient,
            None if gmf is None else gmf.item.gradient,
            None if offsets is None else offsets.gradient.squeeze(1),
            *network.gradients(),
        )
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *times(ctx.saved_tensors, gradient)


class _Rows:
    """Rows of a table for a block of pairs, and the table's gradient, which adds up from block to block."""

    def __init__(self, table: Tensor, rows: int) -> None:
        self.table, self.gradient = table.detach(), torch.zeros_like(table)
        self.block = table.new_empty(rows, table.shape[1])

    def taken(self, at: Tensor) -> Tensor:
        """The rows wanted, written over those of the block before."""
        return torch.index_select(self.table, 0, at, out=self.block[: len(at)])

    def add(self, at: Tensor, gradient: Tensor) -> None:
        """Add what the rows of a block bring to the gradient."""
        self.gradient.index_add_(0, at, gradient)


class _GmfBlocks:
    """The matrix factorisation's share of logits, and its gradients, for a block of pairs at a time.

    What belongs to a user is multiplied once for all its pairs.
    """

    def __init__(self, weight: Tensor, user: _Rows, item: _Rows) -> None:
        self.weight, self.user, self.item = weight.detach(), user, item
        self.gradient = torch.zeros_like(self.weight)
        self._weighted = torch.empty_like(user.block)
        self._products = torch.empty_like(item.block)
        self._ones = torch.ones_like(self.weight)

    def logits(self, user_at: Tensor, item_at: Tensor) -> Tensor:
        """Sum of w * p_u * q_i, (pairs,)."""
        p, q = self.user.taken(user_at), self.item.taken(item_at)
        weighted = torch.mul(p, self.weight, out=self._weighted[: len(p)])
        products = self._products[: len(q)]
        torch.mul(q.view(-1, *p.shape), weighted, out=products.view(-1, *p.shape))
        return torch.mv(products, self._ones)

    def add(self, user_at: Tensor, item_at: Tensor, slope: Tensor) -> None:
        """Add to the gradients what comes from that (pairs,) of the last logits."""
        p, q = self.user.block[: len(user_at)], self.item.block[: len(item_at)]
        weighted, products = self._weighted[: len(p)], self._products[: len(q)]
        of_item = torch.mul(slope.view(-1, len(p), 1), weighted, out=products.view(-1, *p.shape))
        self.item.add(item_at, of_item.view_as(q))
        of_user = q.mul_(slope.unsqueeze(1)).view(-1, *p.shape).sum(0)
        self.gradient += (of_user * p).sum(0)
        self.user.add(user_at, of_user.mul_(self.weight))


def _sum_of_squares(rows: Tensor, used: Tensor) -> Tensor:
    """Sum of the squares of the rows (n, width) or (n,), each row's times its `used` (n,)."""
    rows = at_least_fp32(rows)
    kept = rows.detach() * used.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))
    product = torch.dot(kept.view(-1), rows.reshape(-1))
    # The gradient of `product` is `kept`; the true one, twice that, then costs one pass over the rows instead of five.
    return 2 * product - product.detach()


def repeat_period(ids: Tensor) -> int:
    """The smallest b that divides len(ids) for which ids are their first b ones over and over; len(ids) where none is.

    Answers len(ids) without looking on a GPU, which it would stall, and while compiling.
    """
    length = len(ids)
    if length == 0 or ids.device.type != "cpu" or torch.compiler.is_compiling():
        return length
    for start in (ids == ids[0]).nonzero().view(-1).tolist():
        if start and length % start == 0 and torch.equal(ids[start:], ids[:-start]):
            return int(start)
    return length
