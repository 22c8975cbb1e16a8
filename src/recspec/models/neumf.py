"""NeuMF: matrix factorisation and an MLP over user and item, joined in one linear layer.

He, Liao, Zhang, Nie, Hu, Chua: Neural Collaborative Filtering, WWW 2017, equation 12:

    logit = h · [p_u * q_i ; mlp([a_u ; b_i])] + c

with p, q of `factors` numbers, and a, b of half the MLP's input each. The MLP's first linear layer W [a ; b] + w is the
sum of a user's part and an item's part. Each is computed once for a row of its table instead of once for a pair: the
same function with less than half the arithmetic at the published sizes.

Shapes: B rows; F factors; D width of the MLP's first hidden layer; R requests (users); N items to score.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from recspec import config
from recspec.batch import Batch
from recspec.models.base import Model, counts_of
from recspec.nn import Mlp, RowsHeld, at_least_fp32, cross_entropy, may_replace
from recspec.spec import FeatureSpec

SCORE_FLOATS = 1 << 20
"""Floats of the MLP's first hidden layer that `score_items` computes at once: 4 MB stay in the cache."""


class NeuMFSettings(config.Settings):
    """Sizes and regularisation of NeuMF; the defaults are the sizes published for MovieLens 20M."""

    factors: int = Field(64, ge=1, description="width of the matrix-factorisation (GMF) embeddings")
    layers: tuple[int, ...] = Field(
        (256, 256, 128, 64),
        min_length=2,
        description="widths of the MLP: its input (half from the user, half from the item), then each hidden layer",
    )
    dropout: float = Field(0.5, ge=0, lt=1, description="share of units dropped after each hidden ReLU")
    use_gmf: bool = Field(True, description="use the matrix-factorisation half; without it the model is MLP alone")
    use_mlp: bool = Field(True, description="use the MLP half; without it the model is GMF alone")
    item_bias: bool = Field(False, description="add a bias for each item to the logit")
    l2: float = Field(
        0.0,
        ge=0,
        description="factor of the sum of squares of the GMF rows and item biases that a batch uses, each once, "
        "divided by the batch's rows",
    )
    l2_hidden: float = Field(
        0.0,
        ge=0,
        description="as l2, for the users' and items' parts of the MLP's first layer, before its ReLU",
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
    """Neural matrix factorisation (NeuMF); by its settings, GMF alone or the MLP alone.

    It reads only the user's id and the item's id. Embeddings start N(0, 0.01), hidden layers Glorot-uniform,
    the last layer LeCun-uniform, ±sqrt(3 / in), item biases at 0.
    """

    name: ClassVar[str] = "neumf"
    needs: ClassVar[tuple[str, ...]] = ("user", "item", "label")
    Settings: ClassVar[type[config.Settings]] = NeuMFSettings
    settings: NeuMFSettings

    def __init__(self, spec: FeatureSpec, settings: NeuMFSettings, held: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, held)
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
        """Both ids, if table rows are penalised: each once, however many rows of the batch use it."""
        return self.features() if self.settings.l2 or self.settings.l2_hidden else ()

    def forward(self, batch: Batch) -> Tensor:
        """Logits (B,)."""
        if not may_replace(*self.children()):
            return self._by_modules(batch[self.user_id], batch[self.item_id])
        return self._join(
            _of_pairs(self._user_part, self.num_users, batch[self.user_id]).pairs(),
            _of_pairs(self._item_part, self.num_items, batch[self.item_id]).pairs(),
        )

    def loss(self, batch: Batch) -> Tensor:
        """Mean binary cross-entropy in nats, plus the squares of the rows that the batch uses (l2, l2_hidden).

        A table row that n rows of the batch use is penalised once: each of the n adds 1/n of it. So the penalties of a
        batch's parts sum to that of the whole.
        """
        # Drawn negatives repeat the users of the positives; a user's part serves all repetitions.
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
        if may_replace(*self.children()):
            logits = self._join(user_side.pairs(), item_side.pairs())
        else:
            logits = self._by_modules(batch[self.user_id], batch[self.item_id]).view(-1, period)
        return cross_entropy(logits, label) + penalty

    def _by_modules(self, user: Tensor, item: Tensor) -> Tensor:
        """Logits (B,) from calls of all modules, as hooks expect them."""
        parts = []
        if self.settings.use_gmf:
            parts.append(self.gmf_user(user) * self.gmf_item(item))
        if self.settings.use_mlp:
            parts.append(self.mlp(torch.cat([self.mlp_user(user), self.mlp_item(item)], dim=1)))
        logits: Tensor = self.out(torch.cat(parts, dim=1)).squeeze(1)
        return logits + self.item_bias(item).squeeze(1) if self.settings.item_bias else logits

    def score_items(self, request: Batch, items: Batch) -> Tensor:
        """Logits (R, N) of every item for every request.

        Each side is computed once. A pair costs a dot product and the MLP without its first layer.
        """
        if not may_replace(self):
            return super().score_items(request, items)
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
        """The part of the users `ids`, or of all users, in the logit."""
        return _Part(
            gmf=_rows(self.gmf_user, ids) if self.settings.use_gmf else None,
            first=F.linear(_rows(self.mlp_user, ids), *self._first_layer("user")) if self.settings.use_mlp else None,
        )

    def _item_part(self, ids: Tensor | None) -> _Part:
        """The part of the items `ids`, or of all items, in the logit."""
        return _Part(
            gmf=_rows(self.gmf_item, ids) if self.settings.use_gmf else None,
            first=F.linear(_rows(self.mlp_item, ids), *self._first_layer("item")) if self.settings.use_mlp else None,
            bias=_rows(self.item_bias, ids).squeeze(1) if self.settings.item_bias else None,
        )

    def _first_layer(self, side: Literal["user", "item"]) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a side's half of the MLP's first layer; the user's half has the bias."""
        layer, half = self.mlp.first, self.settings.layers[0] // 2
        return (layer.weight[:, :half], layer.bias) if side == "user" else (layer.weight[:, half:], None)

    def _gmf_weight(self) -> Tensor:
        return self.out.weight[0, : self.settings.factors]

    def _mlp_weight(self) -> Tensor:
        return self.out.weight[0, -self.settings.layers[-1] :]

    # --- from both sides to logits --------------------------------------------------------------------------------

    def _join(self, user: _Part, item: _Part) -> Tensor:
        """Logits of pairs; the shapes of both sides broadcast."""
        logits: Tensor = self.out.bias
        if user.gmf is not None and item.gmf is not None:
            logits = logits + (user.gmf * self._gmf_weight() * item.gmf).sum(-1)
        if item.bias is not None:
            logits = logits + item.bias
        if user.first is not None and item.first is not None:
            logits = logits + self.mlp.after_first(user.first + item.first) @ self._mlp_weight()
        return logits

    def _mlp_scores(self, user: Tensor, item: Tensor) -> Tensor:
        """The MLP's part of the scores (R, N), from the sides' parts (R, D) and (N, D) of its first layer."""
        if torch.compiler.is_compiling():
            return self.mlp.after_first(user.unsqueeze(1) + item) @ self._mlp_weight()
        step = max(1, SCORE_FLOATS // max(1, item.numel()))
        rows = [self.mlp.after_first(part.unsqueeze(1) + item) @ self._mlp_weight() for part in torch.split(user, step)]
        return torch.cat(rows)

    def _regularised(
        self, part: Callable[[Tensor | None], _Part], num_ids: int, ids: Tensor, shares: Tensor | None
    ) -> tuple[_Side, Tensor | float]:
        """A side's part for ids, and strength times the sum of squares of the rows that they use, each once.

        With `shares`, shaped as ids, each id adds its share of its row's square.
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
    """One side's part of the logit, a row for each user or item."""

    gmf: Tensor | None
    """(..., F)."""

    first: Tensor | None
    """(..., D): the side's part of the MLP's first layer, before the ReLU."""

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
        """Copies of the given rows; the shape of `rows` replaces the first dimension."""
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
    """One side's part of pairs, and the row of each pair in it."""

    part: _Part
    shape: torch.Size
    """The shape of the pairs."""

    rows: Tensor | None
    """The row of each pair, in their shape; None if the part has a row for each pair, in order."""

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
    """A side's part for ids (...), by way of the whole table if that has fewer rows to multiply.

    Exported and compiled programs take any number of ids, so they never use the whole table.
    """
    if torch.compiler.is_compiling() or ids.numel() <= num_ids:
        return _Side(part(ids.reshape(-1)), ids.shape, None)
    return _Side(part(None), ids.shape, ids)


def _of_used(part: Callable[[Tensor | None], _Part], num_ids: int, ids: Tensor) -> _Side:
    """A side's part with one row for each distinct id: the whole table, or the rows that occur if ids are fewer."""
    if ids.numel() > num_ids:
        return _Side(part(None), ids.shape, ids)
    used, at = torch.unique(ids, return_inverse=True)
    return _Side(part(used), ids.shape, at)


def _sum_of_squares(rows: Tensor, used: Tensor) -> Tensor:
    """The sum of the squares of rows (n, width) or (n,), each times its `used` (n,)."""
    rows = at_least_fp32(rows)
    kept = rows.detach() * used.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))
    product = torch.dot(kept.view(-1), rows.reshape(-1))
    # The gradient of `product` is `kept`. So the true one, twice that, takes one pass over the rows instead of five.
    return 2 * product - product.detach()


def repeat_period(ids: Tensor) -> int:
    """The smallest b that divides len(ids) such that ids repeat their first b ones; len(ids) if there is none.

    Returns len(ids) on a GPU, which the search would stall, and while compiling.
    """
    length = len(ids)
    if length == 0 or ids.device.type != "cpu" or torch.compiler.is_compiling():
        return length
    for start in (ids == ids[0]).nonzero().view(-1).tolist():
        if start and length % start == 0 and torch.equal(ids[start:], ids[:-start]):
            return int(start)
    return length
