"""Wide & Deep: a linear model over ids, numbers and crosses beside an MLP over embeddings, their logits added.

Cheng et al.: Wide & Deep Learning for Recommender Systems, DLRS 2016, equation 3:

    P(label = 1) = sigmoid(w_wide . [x; phi(x)] + w_deep . a + b)

with x the one-hot ids and the numbers, phi(x) crosses of ids, a the MLP's last layer.

Shapes: B rows; X the width of the MLP's input; D of its first hidden layer; R requests; N items to score.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from math import prod
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from recspec.base import config
from recspec.base.errors import SettingsError, unknown
from recspec.feature_spec import FeatureSpec
from recspec.models import base
from recspec.models import click_defaults as rules
from recspec.models.base import (
    DECAY_SPACE,
    POSITIVE,
    TRAINING_SPACE,
    WIDTHS_SPACE,
    Model,
    Widths,
    at_once,
    scores_of_sums,
)
from recspec.models.facts import DataFacts, Proposals
from recspec.models.layers import (
    Batch,
    Embeddings,
    Mlp,
    RowsHeld,
    aligned_linear,
    embedding_widths,
    ids_and_numbers,
    may_replace,
    num_rows,
    number_widths,
    runs_on_gpu,
    side_by_side,
)

INDICATOR_MOST_IDS = 10_000
"""The largest cardinality of a one-hot feature in the MLP's input."""

CROSS_SHARE = 1 / 7
"""Share of the embeddings' decay that the weights of crosses get."""

HASH_FACTORS = (-7046029254386353131, -4417276706812531889)
"""Odd 64-bit constants (xxHash's second and fourth prime) that spread a cross over its buckets."""

ROWS_PER_PAIR = 10
"""Training rows for each pair of ids of two columns from which the columns cross by default."""

ROWS_PER_WEIGHT = 2
"""Training rows for each pair of ids of all default crosses; those of the fewest pairs come first."""

WIDE_SHARE = 1 / 30
"""Share of the embeddings' decay that the linear part gets: its weights are the effects of single ids."""


class WideDeepSettings(config.Settings):
    """Sizes of Wide & Deep; the defaults are those published for Outbrain, except the embeddings' widths."""

    hidden: Widths = Field((1024,) * 5, description="widths of the MLP's hidden layers")
    dropout: float = Field(0.1, ge=0, lt=1, description="share of units dropped after each hidden ReLU")
    embedding_dim: int | Literal["rule"] = Field(
        16, description="width of every embedding; `rule`: 6 times the fourth root of the cardinality"
    )
    embedding_dims: Annotated[dict[str, int], POSITIVE] = Field(
        {}, description="widths of single features, as {feature: width}; embedding_dim for the others"
    )
    embedding_std: float | None = Field(
        None, ge=0, description="standard deviation of initial embeddings; null: sqrt(2 / (rows + width))"
    )
    indicators: tuple[str, ...] = Field((), description="features that enter the MLP one-hot, without an embedding")
    combiner: Literal["sum", "mean"] = Field("sum", description="pooling of a list's embeddings in the deep part")
    use_wide: bool = Field(True, description="use the linear part; without it the model is deep only")
    use_deep: bool = Field(True, description="use the MLP; without it the model is a logistic regression")
    wide_features: tuple[str, ...] | None = Field(None, description="features of the linear part; null: all")
    deep_features: tuple[str, ...] | None = Field(None, description="features of the MLP; null: all")
    crosses: tuple[tuple[str, ...], ...] = Field(
        (), description="combinations of scalar ids with weights in the linear part, as [[item_id, hour]]"
    )
    cross_buckets: int = Field(
        100_000,
        ge=1,
        description="weights per cross, which combinations share by hash if there are more",
    )

    @field_validator("embedding_dim")
    @classmethod
    def _has_width(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("a width is at least 1; for a feature without an embedding see `indicators`")
        return value

    @model_validator(mode="after")
    def _some_part(self) -> WideDeepSettings:
        if not (self.use_wide or self.use_deep):
            raise ValueError("use_wide and use_deep are both false; a model needs one of them")
        if self.crosses and not self.use_wide:
            raise ValueError("crosses belong to the linear part, and use_wide is false")
        if any(len(set(cross)) < 2 for cross in self.crosses):
            raise ValueError("a cross joins two features or more, each once")
        return self


class WideDeep(Model):
    """Wide & Deep: a linear model and an MLP over any features, trained together; either alone by its settings.

    Lists are summed in the linear part and pooled in the MLP; both read numbers unchanged, and the MLP vectors too. The
    linear part starts
    at 0, embeddings and hidden layers Glorot, hidden biases at 0.
    """

    name = "wide_deep"
    Settings = WideDeepSettings
    space = MappingProxyType(
        {
            **TRAINING_SPACE,
            "embedding_dim": [4, 8, 16, 32, 64],
            "hidden": WIDTHS_SPACE,
            "dropout": "0.0..0.6",
            "train.parts.deep.embeddings.weight_decay": DECAY_SPACE,
            "train.parts.wide.tables.weight_decay": DECAY_SPACE,
        }
    )
    settings: WideDeepSettings

    def __init__(self, spec: FeatureSpec, settings: WideDeepSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        _check(spec, settings)
        if settings.use_wide:
            self.wide = Wide(spec, _chosen(spec, settings.wide_features), settings, table_rows)
        if settings.use_deep:
            self.deep = Deep(spec, _chosen(spec, settings.deep_features), settings, table_rows)

    @classmethod
    def defaults(cls, facts: DataFacts) -> Proposals:
        """See `Model.defaults`: the published 5 x 1024 take minutes an epoch on a laptop and overfit small data."""
        crosses, buckets = _dense_pairs(facts)
        tables = {"deep.embeddings": 1.0, "wide.tables": WIDE_SHARE}
        found = dict(rules.training(facts, tables | ({"wide.cross_weights": CROSS_SHARE} if crosses else {})))
        if rules.is_published_size(facts):
            return found
        size = f"{facts.samples:,} samples"
        if crosses:
            found["crosses"] = (crosses, f"{ROWS_PER_PAIR} training rows or more for each pair of their ids")
            found["cross_buckets"] = (buckets, "so that no two pairs share a weight")
        return found | {
            "hidden": (rules.hidden(facts), size),
            "embedding_dim": (rules.embedding_dim(facts), size),
            "dropout": (0.1, size),
        }

    def features(self) -> tuple[str, ...]:
        """The features of both parts."""
        wide = self.wide.features if self.settings.use_wide else ()
        deep = self.deep.features if self.settings.use_deep else ()
        return tuple(dict.fromkeys((*wide, *deep)))

    def forward(self, batch: Batch) -> Tensor:
        if not self.settings.use_deep:
            return cast(Tensor, self.wide(batch))
        deep = cast(Tensor, self.deep(batch))
        return deep + self.wide(batch) if self.settings.use_wide else deep

    def item_parts(self, items: Batch) -> ItemParts:
        """The items, and their shares of the linear part and of the MLP's first layer."""
        crosses = self.wide.crosses if self.settings.use_wide else ()
        if any(set(cross) & set(items) and not set(cross) <= set(items) for cross in crosses):
            return ItemParts(items)
        wide = self.wide.part(items) if self.settings.use_wide else None
        return ItemParts(items, wide, self.deep.first_layer(items) if self.settings.use_deep else None)

    def side_scores(self, request: Batch, items: ItemParts) -> Tensor:
        """`score_items`, with a feature's share of the linear part and of the MLP's first layer computed once.

        Crosses of features of both sides need the pairs.
        """
        if items.wide is None and items.first is None:
            return self.pair_scores(request, items.features)
        scores: Tensor | float = 0.0
        if items.wide is not None:
            # The linear part is a sum over features, so a pair's is the request's plus the item's.
            scores = (self.wide.part(request) + self.wide.bias)[:, None] + items.wide
            if items.first is None:
                return scores
        assert items.first is not None
        ours, floats = self.deep.first_layer(request), at_once(base.SCORE_FLOATS, items.first.device)
        return scores + scores_of_sums(ours, items.first, floats, self.deep.after_first)


def _dense_pairs(facts: DataFacts) -> tuple[tuple[tuple[str, str], ...], int]:
    """Pairs of columns of ids that cross by default, and the most pairs of ids of one of them.

    Not where items are ranked: a cross of both sides would be looked up for every item of every request. Not beside
    rare ids, whose pairs are learnt by heart.
    """
    rare = rules.rows_per_id(facts) < rules.DENSE_IDS
    if facts.task != "clicks" or facts.items or rare or rules.is_published_size(facts):
        return (), 0
    columns = {name: each.num_ids for name, each in facts.ids.items() if not each.is_list}
    sizes = {(one, other): columns[one] * columns[other] for one, other in combinations(columns, 2)}
    dense = sorted((size, pair) for pair, size in sizes.items() if size * ROWS_PER_PAIR <= facts.rows)
    weights = accumulate(size for size, _ in dense)
    kept = [each for each, upto in zip(dense, weights, strict=True) if upto * ROWS_PER_WEIGHT <= facts.rows]
    return tuple(pair for _, pair in kept), max((size for size, _ in kept), default=0)


@dataclass(frozen=True, eq=False)
class ItemParts:
    """What is computed once of N items; without the parts, scores need the pairs."""

    features: Batch
    wide: Tensor | None = None  # (N,)
    first: Tensor | None = None  # (N, D)


class Wide(nn.Module):
    """The linear part: a weight for every id, number and combination of ids, all 0 at first."""

    def __init__(
        self, spec: FeatureSpec, features: Sequence[str], settings: WideDeepSettings, table_rows: RowsHeld | None = None
    ) -> None:
        super().__init__()
        self.ids, numbers = ids_and_numbers(spec, features)
        self.numbers = tuple(name for name in numbers if not spec.features[name].is_vector)
        self.crosses, self.cross_buckets = settings.crosses, settings.cross_buckets
        self.sizes = {name: spec.num_ids(name) for cross in self.crosses for name in cross}
        self.bias = nn.Parameter(torch.zeros(1))
        if self.ids:
            self.tables = Embeddings(spec, dict.fromkeys(self.ids, 1), std=0.0, table_rows=table_rows)
            self.tables.in_autocast_type = False
        if self.numbers:
            self.slopes = nn.Parameter(torch.zeros(len(self.numbers)))
        if self.crosses:
            self.cross_weights = nn.Parameter(torch.zeros(len(self.crosses) * self.cross_buckets, 1))

    @property
    def features(self) -> tuple[str, ...]:
        """The features that the linear part reads."""
        return tuple(dict.fromkeys((*self.ids, *self.numbers, *self.sizes)))

    def forward(self, batch: Batch) -> Tensor:
        """The linear part's logits (B,)."""
        return self.part(batch) + self.bias

    def part(self, batch: Batch) -> Tensor:
        """The share of a batch's features in the logit (B,), without the bias."""
        parts: list[Tensor] = []
        if ids := [name for name in self.ids if name in batch]:
            parts.append(self.tables(batch, ids).sum(1))
        if numbers := [name for name in self.numbers if name in batch]:
            slopes = [self.slopes[self.numbers.index(name)] for name in numbers]
            own = torch.stack(slopes) if len(numbers) < len(self.numbers) else self.slopes
            parts.append(torch.stack([batch[name] for name in numbers], dim=1) @ own)
        if crosses := [(place, cross) for place, cross in enumerate(self.crosses) if set(cross) <= set(batch)]:
            buckets = [self.bucket(batch, cross) + place * self.cross_buckets for place, cross in crosses]
            parts.append(F.embedding(torch.stack(buckets, dim=1), self.cross_weights).sum((1, 2)))
        return sum(parts[1:], parts[0]) if parts else torch.zeros(num_rows(batch), device=self.bias.device)

    def bucket(self, batch: Batch, cross: Sequence[str]) -> Tensor:
        """The bucket (B,) of each row's combination: its number if all combinations fit, else its hash."""
        all_fit = prod(self.sizes[name] for name in cross) <= self.cross_buckets
        mixed = torch.zeros_like(batch[cross[0]], dtype=torch.int64)
        for name in cross:
            ids = batch[name].long()
            # A mixed-radix number counts the combinations without gaps; the hash spreads them over the buckets.
            mixed = mixed * self.sizes[name] + ids if all_fit else _mixed(mixed, ids)
        return mixed.remainder(self.cross_buckets)


class Deep(nn.Module):
    """The MLP over embeddings, one-hot ids and numbers."""

    def __init__(
        self, spec: FeatureSpec, features: Sequence[str], settings: WideDeepSettings, table_rows: RowsHeld | None = None
    ) -> None:
        super().__init__()
        ids, self.numbers = ids_and_numbers(spec, features)
        self.indicators = {name: spec.num_ids(name) for name in ids if name in settings.indicators}
        embedded = [name for name in ids if name not in self.indicators]
        self.widths = embedding_widths(spec, embedded, settings.embedding_dim, settings.embedding_dims)
        if embedded:
            std, combiner = settings.embedding_std, settings.combiner
            self.embeddings = Embeddings(spec, self.widths, combiner=combiner, std=std, table_rows=table_rows)
        self.number_widths = number_widths(spec, self.numbers)
        self.width = sum(sum(each.values()) for each in (self.widths, self.indicators, self.number_widths))
        self.features = (*embedded, *self.indicators, *self.numbers)
        self.mlp = Mlp((self.width, *settings.hidden), dropout=settings.dropout)
        self._first_parts: dict[tuple[str, ...], Tensor] | None = None
        """Parts of the first layer's weight by features, after `prepare_for_inference`."""
        for layer in self.mlp.layers:
            nn.init.zeros_(cast(nn.Linear, layer).bias)
        self.out = nn.Linear(settings.hidden[-1], 1)
        nn.init.xavier_uniform_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, batch: Batch) -> Tensor:
        """The MLP's logits (B,)."""
        if not may_replace(self.mlp, self.out):
            return cast(Tensor, self.out(self.mlp(self.inputs(batch))).squeeze(1))
        if runs_on_gpu(self.out.weight):
            return self.mlp.logits_of_parts(self.input_parts(batch), self.out)
        return self.after_first(aligned_linear(self.inputs(batch), self.mlp.first))

    def inputs(self, batch: Batch, names: Collection[str] | None = None) -> Tensor:
        """The MLP's input (B, X), or the part from the features `names`."""
        parts = self.input_parts(batch, names)
        return torch.cat(parts, dim=1) if len(parts) != 1 else parts[0]

    def input_parts(self, batch: Batch, names: Collection[str] | None = None) -> list[Tensor]:
        """`inputs` in parts."""
        names = self.features if names is None else names
        parts: list[Tensor] = []
        if any(name in names for name in self.widths):
            chosen = None if names is self.features else names
            plain = may_replace(self.embeddings)
            parts += self.embeddings.parts(batch, chosen) if plain else [self.embeddings(batch, chosen)]
        parts += [_one_hot(batch[name], size) for name, size in self.indicators.items() if name in names]
        if numbers := [batch[name] for name in self.numbers if name in names]:
            parts.append(side_by_side(numbers))
        return parts

    def first_layer(self, batch: Batch) -> Tensor:
        """The share of a batch's features in the first layer (B, D); the first feature brings the bias."""
        names = [name for name in self.features if name in batch]
        bias = self.mlp.first.bias if self.features[0] in names else None
        if not names:
            return torch.zeros(num_rows(batch), self.mlp.first.out_features, device=self.out.weight.device)
        return F.linear(self.inputs(batch, names), self._first_weight(tuple(names)), bias)

    def _first_weight(self, names: tuple[str, ...]) -> Tensor:
        """The part (D, X) of the first layer's weight for some features; kept after `prepare_for_inference`."""
        kept = None if torch.is_grad_enabled() or torch.compiler.is_compiling() else self._first_parts
        if kept is None:
            return self.mlp.first.weight[:, self._columns(names)]
        if names not in kept:
            kept[names] = self.mlp.first.weight[:, self._columns(names)]
        return kept[names]

    def prepare_for_inference(self) -> None:
        """Keep products of the weights until they are trained, loaded or moved."""
        self._first_parts = {}

    def train(self, mode: bool = True) -> Self:
        """Drop the kept parts of the weights, then switch as torch does."""
        self._first_parts = None
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self._first_parts = None
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call,no-any-return]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._first_parts = None
        super()._load_from_state_dict(*args, **kwargs)

    def after_first(self, x: Tensor) -> Tensor:
        """Logits (...) from the first linear layer's output (..., D), which this overwrites."""
        return self.mlp.logits(x, self.out)

    def _columns(self, names: Collection[str]) -> Tensor:
        """The columns of the MLP's input from the features `names`."""
        order = self.embeddings.order() if self.widths else ()
        widths = {name: self.widths[name] for name in order} | self.indicators | self.number_widths
        owners = [name for name, width in widths.items() for _ in range(width)]
        return torch.tensor([place for place, name in enumerate(owners) if name in names])


# --- parts -----------------------------------------------------------------------------------------------------------


def _chosen(spec: FeatureSpec, names: Sequence[str] | None) -> tuple[str, ...]:
    return spec.inputs() if names is None else tuple(names)


def _one_hot(ids: Tensor, size: int) -> Tensor:
    """Ids (B,) -> (B, size); for lists (B, L), the count of each id without padding."""
    if ids.dim() == 1:
        return F.one_hot(ids.long(), size).float()
    counts = torch.zeros(ids.shape[0], size, device=ids.device)
    counts.scatter_add_(1, ids.long(), (ids != 0).float())
    return counts


def _mixed(hashed: Tensor, ids: Tensor) -> Tensor:
    """A 64-bit hash extended by one id; products wrap around."""
    first, second = HASH_FACTORS
    hashed = (hashed ^ (ids * first)) * second
    return hashed ^ (hashed >> 29)


def _check(spec: FeatureSpec, settings: WideDeepSettings) -> None:
    """Raise a `SettingsError` with every problem if settings name features that the specification does not have."""
    inputs, ids = spec.inputs(), spec.inputs(categorical=True)
    scalar_ids = spec.inputs(categorical=True, is_list=False)
    problems = [
        f"{setting}: {unknown(what, name, known)}"
        for setting, names, known, what in (
            ("wide_features", settings.wide_features or (), inputs, "feature"),
            ("deep_features", settings.deep_features or (), inputs, "feature"),
            ("embedding_dims", settings.embedding_dims, ids, "categorical feature"),
            ("indicators", settings.indicators, ids, "categorical feature"),
            ("crosses", [n for cross in settings.crosses for n in cross], scalar_ids, "scalar categorical feature"),
        )
        for name in dict.fromkeys(names)
        if name not in known
    ]
    problems += [
        f"indicators: feature '{name}' has {spec.num_ids(name):,} ids, and one-hot takes at most "
        f"{INDICATOR_MOST_IDS:,}; give it an embedding"
        for name in settings.indicators
        if name in ids and spec.num_ids(name) > INDICATOR_MOST_IDS
    ]
    problems += [
        f"feature '{name}' is a list of numbers, which wide_deep does not take; leave it out of wide_features and "
        "deep_features"
        for name in dict.fromkeys((*_chosen(spec, settings.wide_features), *_chosen(spec, settings.deep_features)))
        if name in inputs and spec.features[name].is_list and name not in ids and not spec.features[name].is_vector
    ]
    problems += [
        f"wide_features: feature '{name}' is a vector, which only the MLP reads; leave it out"
        for name in settings.wide_features or ()
        if name in inputs and spec.features[name].is_vector
    ]
    for setting, used in (("wide_features", settings.use_wide), ("deep_features", settings.use_deep)):
        if used and not _chosen(spec, getattr(settings, setting)):
            problems.append(f"{setting}: there is no feature to read in the roles user, item and context")
    SettingsError.refuse("wide_deep", problems)
