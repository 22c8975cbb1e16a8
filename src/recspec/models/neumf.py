"""NeuMF: matrix factorisation and an MLP over user and item, joined in one linear layer.

He, Liao, Zhang, Nie, Hu, Chua: Neural Collaborative Filtering, WWW 2017, equation 12:

    logit = h · [p_u * q_i ; mlp([a_u ; b_i])] + c

with p, q of `factors` numbers, and a, b of half the MLP's input each. The MLP's first linear layer W [a ; b] + w is the
sum of a user's part and an item's part. Each is computed once for a row of its table instead of once for a pair: the
same function with less than half the arithmetic at the published sizes.

Shapes: B rows; n negatives drawn for a row; F factors; D width of the MLP's first hidden layer; R requests (users);
N items to score.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from recspec.base import config
from recspec.feature_spec import FeatureSpec
from recspec.models.base import TRAINING_SPACE, LossNeeds, Model, Traits, counts_of
from recspec.models.facts import DataFacts, Proposals
from recspec.models.layers import (
    Batch,
    Mlp,
    RowsHeld,
    at_least_fp32,
    cross_entropy,
    drawn_of,
    exact_in_answers,
    floats_in_cache,
    kernels,
    log_expected_of,
    may_replace,
    rows_or_nan,
    sampled_softmax,
)

NEGATIVES, FEWEST_POSITIVES, MOST_POSITIVES, MOST_STEPS = 15, 512, 8192, 400
"""Negatives of a positive; the fewest and the most positives of a step; and steps of an epoch above which it grows."""

LEARNING_RATE, L2_POSITIVES = 0.002, 0.03
"""For steps of `FEWEST_POSITIVES`. Found on sets of 7 to 98 thousand interactions (docs/decisions.md)."""

MANY_IDS = 1_000_000
"""Users and items together, above which factors are fewer: at 128, a table with its optimizer takes 1.5 GB."""

Side = Literal["user", "item"]

Part = dict[str, Tensor]
"""One side's part of the logit, a row for each user or item: `gmf` (..., F); `first` (..., D), its part of the MLP's
first layer before the ReLU; `bias` (...)."""


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
    loss: Literal["cross_entropy", "softmax"] = Field(
        "cross_entropy",
        description=(
            "cross_entropy of each row's label, or softmax of a positive among its drawn negatives, which gives no "
            "probabilities. Without train.negatives, always cross_entropy"
        ),
    )
    l2: float = Field(
        0.0,
        ge=0,
        description=(
            "L2 penalty on the GMF rows and item biases of a batch (with softmax, of its positives); each row counts "
            "once, divided by the batch size"
        ),
    )
    l2_hidden: float = Field(
        0.0, ge=0, description="like l2, for the user and item parts of the MLP's first layer before its ReLU"
    )
    l2_positives: float = Field(
        0.0,
        ge=0,
        description=(
            "L2 penalty for each positive, on the GMF rows of its user and item and on their parts of the MLP's first "
            "layer"
        ),
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

    One class because losses, penalties and scores of all items are made of the same two sides of a pair.
    """

    name = "neumf"
    needs = ("user", "item", "label")
    traits = Traits(scores_by_product=lambda settings: not settings.use_mlp)
    Settings = NeuMFSettings
    space = MappingProxyType(
        {
            **TRAINING_SPACE,
            "factors": [8, 16, 32, 64, 128],
            "layers": [[32, 32, 16], [64, 64, 32], [128, 128, 64], [256, 256, 128, 64]],
            "dropout": "0.0..0.7",
            "settings.l2": "0 or 1e-4..1 log",
            "l2_hidden": "0 or 1e-3..1 log",
            "loss": ["cross_entropy", "softmax"],
            "l2_positives": "0 or 1e-3..1 log",
            "item_bias": [False, True],
            "use_mlp": [False, True],
        }
    )
    settings: NeuMFSettings

    @classmethod
    def defaults(cls, facts: DataFacts) -> Proposals:
        """For interactions: factors alone, by the softmax of each positive among drawn negatives, with L2.

        On the sets that the rules were fitted on, cross-entropy lost 2 to 7 standard errors of NDCG@10 among all items
        against the softmax, and the MLP half lost 3 to 5 (docs/decisions.md).
        """
        if facts.task != "interactions":
            return {}
        many = facts.users + facts.items > MANY_IDS
        found: dict[str, tuple[object, str]] = {
            "use_mlp": (False, "products of factors rank all items better than an MLP"),
            "factors": (64 if many else 128, f"{facts.users:,} users and {facts.items:,} items"),
            "item_bias": (True, "popular items differ in how often they are taken"),
            "l2_positives": (L2_POSITIVES, "most ids have few rows; it does not depend on the batch size"),
        }
        if round(facts.positive_share * facts.samples) < facts.rows:  # negatives were prepared
            return found
        wanted = max(FEWEST_POSITIVES, facts.rows // MOST_STEPS)
        step = min(MOST_POSITIVES, 1 << wanted.bit_length() - 1)  # a power of two
        # The root of the step's size: Adam's steps have a length of their own, and the noise of a mean falls with the
        # root.
        rate = LEARNING_RATE * (step / FEWEST_POSITIVES) ** 0.5
        return found | {
            "loss": ("softmax", "interactions are judged by the rank of the positive among all items"),
            "train.negatives": (NEGATIVES, "more teach little more and cost their time"),
            "train.batch_size": ((1 + NEGATIVES) * step, f"{step:,} of {facts.rows:,} positives a step"),
            "train.learning_rate": (round(rate, 4), f"for {step:,} positives a step"),
        }

    def __init__(self, spec: FeatureSpec, settings: NeuMFSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.user_id, self.item_id = spec.user_id, spec.item_id
        self.num_ids = {"user": spec.num_ids(self.user_id), "item": spec.num_ids(self.item_id)}
        joined = 0
        if settings.use_gmf:
            self.gmf_user = _table(self.num_ids["user"], settings.factors)
            self.gmf_item = _table(self.num_ids["item"], settings.factors)
            joined += settings.factors
        if settings.use_mlp:
            self.mlp_user = _table(self.num_ids["user"], settings.layers[0] // 2)
            self.mlp_item = _table(self.num_ids["item"], settings.layers[0] // 2)
            self.mlp = Mlp(settings.layers, dropout=settings.dropout)
            joined += settings.layers[-1]
        if settings.item_bias:
            self.item_bias = _table(self.num_ids["item"], 1)
            nn.init.zeros_(self.item_bias.weight)
        self.out = nn.Linear(joined, 1)
        nn.init.kaiming_uniform_(self.out.weight, nonlinearity="linear")
        if settings.loss == "softmax":  # which cancels the bias: Adam would make steps of the rounding errors
            nn.init.zeros_(self.out.bias)
            self.out.bias.requires_grad_(False)

    def features(self) -> tuple[str, ...]:
        """The user's and the item's id."""
        return self.user_id, self.item_id

    def loss_needs(self) -> LossNeeds:
        """Counts of both ids, if table rows are penalised: each once, however many rows of the batch use it."""
        counted = self.features() if self.settings.l2 or self.settings.l2_hidden else ()
        negatives: Literal["rows", "columns"] = "columns" if self.settings.loss == "softmax" else "rows"
        return LossNeeds(self.features(), negatives, counted)

    def forward(self, batch: Batch) -> Tensor:
        if not may_replace(*self.children()):
            return self._by_modules(batch[self.user_id], batch[self.item_id])
        return self._join(self._pairs("user", batch[self.user_id]), self._pairs("item", batch[self.item_id]))

    def loss(self, batch: Batch) -> Tensor:
        """Mean loss of the rows, in nats, plus the penalties.

        A table row that n rows of the batch use is penalised once by l2 and l2_hidden: each of the n adds 1/n of it. So
        the penalties of a batch's parts sum to that of the whole.
        """
        if drawn_of(self.item_id) in batch:
            return self._softmax(batch)
        # Drawn negatives repeat the users of the positives; a user's part serves all repetitions.
        period = repeat_period(batch[self.user_id])
        item, label = (batch[name].view(-1, period) for name in (self.item_id, self.spec.label))
        user, item_part, penalty = self._penalised(batch, item, label, batch[self.user_id][:period])
        if may_replace(*self.children()):
            logits = self._join(user, item_part)
        else:
            logits = self._by_modules(batch[self.user_id], batch[self.item_id]).view(-1, period)
        return cross_entropy(logits, label) + penalty

    def _softmax(self, batch: Batch) -> Tensor:
        """`loss`, with the softmax of each positive among its drawn negatives (`sampled_softmax`)."""
        own, drawn, label = (batch[name] for name in (self.item_id, drawn_of(self.item_id), self.spec.label))
        user, item = batch[self.user_id], torch.cat([own.unsqueeze(0), drawn.T])  # (1 + n, B)
        user_part, own_part, penalty = self._penalised(batch, own, label, user)
        if may_replace(*self.children()):
            others = self._pairs("item", drawn.T)
            every = {name: torch.cat([own_part[name].unsqueeze(0), others[name]]) for name in others}
            logits = self._join(user_part, every)
        else:
            logits = self._by_modules(user.repeat(len(item)), item.reshape(-1)).view(item.shape)
        logits, expected = at_least_fp32(logits), batch[log_expected_of(self.item_id)].T
        loss = sampled_softmax(logits[0], logits[1:].masked_fill(own == drawn.T, -torch.inf), expected)
        return (loss * label.to(loss.dtype)).mean() + penalty

    def _penalised(self, batch: Batch, item: Tensor, label: Tensor, user: Tensor) -> tuple[Part, Part, Tensor | float]:
        """The parts of users (period,) and of items (..., period), and the penalties of their rows."""
        user_shares = item_shares = None
        if counts_of(self.user_id) in batch:  # a part of a batch
            user_shares = (item.numel() // len(user)) / batch[counts_of(self.user_id)][: len(user)]
            item_shares = 1 / batch[counts_of(self.item_id)].view_as(item)
        users, user_penalty = self._regularised("user", user, user_shares)
        items, item_penalty = self._regularised("item", item, item_shares)
        penalty = (user_penalty + item_penalty) / label.numel()
        if self.settings.l2_positives:
            squares = label * (_squares(users) + _squares(items))
            penalty = penalty + self.settings.l2_positives * squares.mean()
        return users, items, penalty

    def _by_modules(self, user: Tensor, item: Tensor) -> Tensor:
        """Logits (B,) from calls of all modules, as hooks expect them."""
        parts = []
        if self.settings.use_gmf:
            parts.append(self.gmf_user(user) * self.gmf_item(item))
        if self.settings.use_mlp:
            parts.append(self.mlp(torch.cat([self.mlp_user(user), self.mlp_item(item)], dim=1)))
        logits: Tensor = self.out(torch.cat(parts, dim=1)).squeeze(1)
        return logits + self.item_bias(item).squeeze(1) if self.settings.item_bias else logits

    def item_parts(self, items: Batch) -> Part:
        """The items' part of the logit; `first` has a column for each item (D, N)."""
        part = self._part("item", items[self.item_id])
        if "first" in part:
            part["first"] = part["first"].T.contiguous()
        return part

    def side_scores(self, request: Batch, items: Part) -> Tensor:
        """`score_items`: each side is computed once; a pair costs a dot product and the MLP without its first layer."""
        user = self._part("user", request[self.user_id])
        bias = items["bias"] + self.out.bias if "bias" in items else self.out.bias
        scores: Tensor | None = None
        if "gmf" in user:  # with the bias in the same pass
            scores = torch.addmm(bias, user["gmf"] * self.out.weight[0, : self.settings.factors], items["gmf"].T)
        if "first" in user:
            of_mlp = self._of_sums(user["first"], items["first"])
            scores = of_mlp + (bias if scores is None else scores)
        assert scores is not None, "one half is on"
        return scores

    def item_embeddings(self, items: Tensor) -> Tensor:
        """The rows (N, D) of items in all its tables side by side, by which items are alike."""
        tables = [self.gmf_item] if self.settings.use_gmf else []
        tables += [self.mlp_item] if self.settings.use_mlp else []
        return torch.cat([_rows(each, items, self.backend) for each in tables], dim=1)

    # --- the two sides of a pair ----------------------------------------------------------------------------------

    def _part(self, side: Side, ids: Tensor | None = None) -> Part:
        """The part of the users or items `ids`, or of all of them, in the logit."""
        part: Part = {}  # `Part()`, a call of an alias, would break a compiled graph
        is_user = side == "user"
        if self.settings.use_gmf:
            part["gmf"] = _rows(self.gmf_user if is_user else self.gmf_item, ids, self.backend)
        if self.settings.use_mlp:
            layer, half = self.mlp.first, self.settings.layers[0] // 2
            # W [a ; b] + w = W_u a + w + W_i b: the columns of W for one side.
            weight = layer.weight[:, :half] if is_user else layer.weight[:, half:]
            rows = _rows(self.mlp_user if is_user else self.mlp_item, ids, self.backend)
            part["first"] = F.linear(rows, weight, layer.bias if is_user else None)
        if self.settings.item_bias and not is_user:
            part["bias"] = _rows(self.item_bias, ids, self.backend).squeeze(1)
        return part

    def _pairs(self, side: Side, ids: Tensor) -> Part:
        """A side's part for ids (...), by way of the whole table if that has fewer rows to multiply.

        Exported and compiled programs take any number of ids, so they never use the whole table.
        """
        if torch.compiler.is_compiling() or ids.numel() <= self.num_ids[side]:
            return {name: _shaped(rows, ids.shape) for name, rows in self._part(side, ids.reshape(-1)).items()}
        return _at(self._part(side), ids, self.backend)

    def _regularised(self, side: Side, ids: Tensor, shares: Tensor | None) -> tuple[Part, Tensor | float]:
        """A side's part for ids, and strength times the sum of squares of the rows that they use, each once.

        With `shares`, shaped as ids, each id adds its share of its row's square.
        """
        if not (self.settings.l2 or self.settings.l2_hidden):
            return self._pairs(side, ids), 0.0
        if ids.numel() > self.num_ids[side]:
            rows, at = self._part(side), ids
        else:
            distinct, at = torch.unique(ids, return_inverse=True)
            rows = self._part(side, distinct)
        used, places = torch.zeros(len(next(iter(rows.values()))), device=at.device), at.reshape(-1).long()
        if shares is None:
            used.index_fill_(0, places, 1.0)
        else:
            used.index_add_(0, places, shares.reshape(-1))
        penalty: Tensor | float = 0.0
        for name, strength in ("gmf", self.settings.l2), ("bias", self.settings.l2), ("first", self.settings.l2_hidden):
            if name in rows and strength:
                penalty = penalty + strength * _sum_of_squares(rows[name], used)
        return _at(rows, at, self.backend), penalty

    # --- from both sides to logits --------------------------------------------------------------------------------

    def _of_first(self, x: Tensor) -> Tensor:
        """The MLP's part of logits (...), from its first layer's output (..., D)."""
        return exact_in_answers(self.mlp.after_first(x), self.out.weight[0, -self.settings.layers[-1] :])

    def _of_sums(self, ours: Tensor, theirs: Tensor) -> Tensor:
        """The MLP's part of logits (R, N) from the first layer's parts of users (R, D) and items (D, N).

        Items are columns, so that a user's part is added to long rows, and a layer is one wide product: in rows as
        narrow as the published layers the same steps take twice as long.
        """
        if torch.compiler.is_compiling():  # a program takes any number of items
            return self._of_first(ours.unsqueeze(1) + theirs.T)
        layers = [cast(nn.Linear, layer) for layer in self.mlp.layers][1:]
        last, found = self.out.weight[:, -self.settings.layers[-1] :], []
        # As many users at once as threads: each thread computes one user's layers, and reads what it wrote itself.
        users = min(len(ours), torch.get_num_threads()) if ours.device.type == "cpu" else len(ours)
        step = max(1, floats_in_cache(theirs) // max(1, users * len(theirs)))
        for some in torch.split(theirs, step, dim=1):
            rows = []
            for group in torch.split(ours, max(1, users)):
                x = torch.relu_(some + group.unsqueeze(2))  # (users, D, step)
                for layer in layers:
                    weight = layer.weight.expand(len(group), -1, -1)
                    x = torch.relu_(torch.baddbmm(layer.bias.unsqueeze(1), weight, x))
                rows.append((last @ x).squeeze(1))
            found.append(torch.cat(rows))
        return torch.cat(found, dim=1)

    def _join(self, user: Part, item: Part) -> Tensor:
        """Logits of pairs; the shapes of both sides broadcast."""
        logits: Tensor = self.out.bias
        if "gmf" in user:
            # h . [p_u * q_i ; ...] of equation 12: the last layer's columns of the GMF half times the element-wise
            # product.
            product = user["gmf"] * self.out.weight[0, : self.settings.factors].to(user["gmf"].dtype) * item["gmf"]
            logits = logits + product.sum(-1, dtype=self.out.weight.dtype)
        if "bias" in item:
            logits = logits + item["bias"]
        if "first" in user:
            logits = logits + self._of_first(user["first"] + item["first"])
        return logits


def _table(num_ids: int, width: int) -> nn.Embedding:
    table = nn.Embedding(num_ids, width)
    nn.init.normal_(table.weight, std=0.01)
    return table


def _rows(table: nn.Embedding, ids: Tensor | None, backend: kernels.Backend | None) -> Tensor:
    return table.weight if ids is None else rows_or_nan(table.weight, ids, backend)


def _at(part: Part, rows: Tensor, backend: kernels.Backend | None) -> Part:
    """Copies of some rows of a part, on a GPU in autocast's type; the shape of `rows` replaces the first dimension."""
    flat, device = rows.reshape(-1), rows.device.type
    if device != "cpu" and torch.is_autocast_enabled(device):  # one table is a fraction of the rows taken of it
        part = {name: every.to(torch.get_autocast_dtype(device)) for name, every in part.items()}
    return {name: _shaped(rows_or_nan(every, flat, backend), rows.shape) for name, every in part.items()}


def _shaped(rows: Tensor, shape: torch.Size) -> Tensor:
    return rows if len(shape) == 1 else rows.view(*shape, *rows.shape[1:])


def _squares(part: Part) -> Tensor:
    """The sum of squares of each row (...) of a part, without biases."""
    return torch.stack([at_least_fp32(part[name]).square().sum(-1) for name in ("gmf", "first") if name in part]).sum(0)


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
