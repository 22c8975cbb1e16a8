"""What a user did before, event by event: histories of any length without work for padding.

A batch holds histories padded, (B, L). Here they become *jagged*: the T events that are there, one after the other,
step by step: the first events of all rows, then all second ones, and so on; within a step rows stand from the longest
history to the shortest. So the rows that have a step are the first ones of those that had the step before, and sums
over a history, or a recurrence, touch slices only.

While a program is compiled or exported, whose shapes must not depend on the values, the *padded* form takes its place:
T = B L places, row by row, some of which hold no event. `Events` hides which of the two it is; both give equal results.

Shapes: B rows; L the history's length in this batch; T events; D width of an event's vector; W any width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recspec.batch import Batch
from recspec.errors import SpecError, listed
from recspec.feature_spec import FILE_NAME, FeatureSpec
from recspec.mlp import Scratch, Tail, at_least_fp32, cross_entropy_, times

SLICED = 64
"""Rows a step, on average, from which sums over histories go step by step; with fewer they go event by event."""


class Tables(Protocol):
    """Embedding tables, as `layers.Embeddings` has them."""

    def beside(self, batch: Batch, names: Collection[str], ids: Batch) -> tuple[Tensor | None, Tensor]:
        """Vectors of some features of a batch, if any, and of ids of others."""


# --- which features belong together ----------------------------------------------------------------------------------


class Histories:
    """Which features of a specification describe a user's events, and which feature of the target each belongs to.

    `history_X` belongs to the item feature whose vocabulary it shares. In a specification that shares none, as
    published ones, the scalar ids of the roles item, history and negative_history belong together by their order.
    """

    def __init__(self, spec: FeatureSpec, who: str) -> None:
        """Find the pairs.

        Raises:
            SpecError: with every feature of a history that belongs to no item feature, or to one that is taken.
        """
        spec.require(("item", "history"), who)
        numbers = tuple(name for name in spec.role("history") if not spec.features[name].is_categorical)
        self.pairs: Mapping[str, str] = _paired(spec, "history")
        """Item feature -> its history."""
        self.negatives: Mapping[str, str] = _paired(spec, "negative_history", self.pairs)
        """Item feature -> the sampled ids that stand beside its history; empty where the dataset has none."""
        self.gaps = numbers
        """Numbers an event has: ln(1 + time to the row)."""
        own = [name for name in self.pairs if name == spec.item_id]
        self.mark = self.pairs[own[0] if own else next(iter(self.pairs))]
        """The history whose ids other than 0 say that there is an event."""
        self.spec = _sharing(
            spec, {**{h: i for i, h in self.pairs.items()}, **{n: i for i, n in self.negatives.items()}}
        )
        """The specification, each history with its item feature's vocabulary: what `Embeddings` are made from."""
        self._shifts = {name: self.spec.shift(name) - spec.shift(name) for name in self.pairs}

    @property
    def features(self) -> tuple[str, ...]:
        """What `vectors` reads beside the item's features, without sampled ids."""
        return (*self.pairs.values(), *self.gaps)

    @property
    def ids_per_event(self) -> Mapping[str, int]:
        """Item feature -> ids that its table is asked for beside the target's, for the longest history."""
        lengths = {name: self.spec.features[history].length or 0 for name, history in self.pairs.items()}
        return {name: length * (2 if name in self.negatives else 1) for name, length in lengths.items()}

    def events(self, batch: Batch, *, last: int | None = None, but_last: int = 0) -> Events:
        """The events of a batch; the latest `last` of each row, and without its latest `but_last`."""
        present = batch[self.mark] != 0
        if last is not None or but_last:
            behind = present.sum(1, keepdim=True) - present.cumsum(1)  # events after each
            present = present & (behind >= but_last)
            if last is not None:
                present = present & (behind < but_last + last)
        return events_of(present)

    def target(self, batch: Batch) -> Batch:
        """The ids (B,) of the item features that have histories, as their tables count them."""
        return {name: batch[name] + shift if (shift := self._shifts[name]) else batch[name] for name in self.pairs}

    def gap_values(self, batch: Batch, events: Events) -> Tensor:
        """The numbers of each event: (T, number of `gaps`)."""
        return torch.stack([events.flat(batch[name]) for name in self.gaps], dim=1)

    def vectors(
        self,
        embeddings: Tables,
        batch: Batch,
        events: Events | None = None,
        *,
        target: bool = True,
        sampled: bool = False,
        others: Collection[str] = (),
    ) -> Vectors:
        """Vectors of what is asked for, from one lookup: the fewest gathers, and one gradient a table.

        Args:
            embeddings: made from `spec`; they hold the item features that have histories, and the `others`.
            batch: holds the ids.
            events: whose vectors to look up; None for none.
            target: whether to look up the item.
            sampled: whether to look up the ids that stand beside the events.
            others: further features of the embeddings.
        """
        asked = [self.target(batch)] if target else []
        if events is not None:
            asked += [_of_events(batch, self.pairs, events)]
            asked += [_of_events(batch, self.negatives, events)] if sampled else []
        ids = {name: torch.cat([part[name] for part in asked]) for name in self.pairs} if len(asked) > 1 else asked[0]
        beside, found = embeddings.beside(batch, others, ids)
        first = next(iter(self.pairs))
        parts = list(torch.split(found, [part[first].shape[0] for part in asked])) if len(asked) > 1 else [found]
        return Vectors(
            parts.pop(0) if target else None,
            parts.pop(0) if events is not None else None,
            parts.pop(0) if parts else None,
            beside,
        )


@dataclass(frozen=True)
class Vectors:
    """What `Histories.vectors` looks up; None where it was not asked for.

    D is the sum of the widths of the features that have histories; their order is that of `embeddings.order(pairs)`.
    """

    target: Tensor | None
    """(B, D)."""
    events: Tensor | None
    """(T, D)."""
    sampled: Tensor | None
    """(T, D)."""
    others: Tensor | None
    """(B, sum of their widths), lists pooled, in the order of `embeddings.order(others)`."""


def _of_events(batch: Batch, features: Mapping[str, str], events: Events) -> Batch:
    return {name: events.flat(batch[history]) for name, history in features.items()}


def _paired(spec: FeatureSpec, role: str, with_histories: Mapping[str, str] | None = None) -> dict[str, str]:
    """Item feature -> its feature in another role: by vocabulary, else by order.

    Raises:
        SpecError: see `Histories`.
    """
    items = [name for name in spec.role("item") if _is_scalar_id(spec, name)]
    known = items if with_histories is None else list(with_histories)
    lists = [name for name in spec.role(role) if spec.features[name].is_categorical]  # type: ignore[arg-type]
    where = str(spec.folder / FILE_NAME)
    if with_histories is not None and not lists:
        return {}
    by_space: dict[str, list[str]] = {}
    for name in lists:
        by_space.setdefault(spec.vocabulary(name), []).append(name)
    spaces = {spec.vocabulary(name): name for name in reversed(known)}
    if not set(spaces) & set(by_space) and len(known) == len(lists) and lists:
        return dict(zip(known, lists, strict=True))
    problems = [
        f"feature '{name}' in the role '{role}' shares its vocabulary with no scalar item feature ({listed(known)}); "
        "give it the `vocabulary` of one, or take it out of channel_spec"
        for name in lists
        if spec.vocabulary(name) not in spaces
    ]
    problems += [
        f"features {listed(names)} in the role '{role}' share a vocabulary; expected one of them for '{spaces[space]}'"
        for space, names in by_space.items()
        if len(names) > 1 and space in spaces
    ]
    if not lists:
        problems.append(f"the role '{role}' holds no list of ids; expected one for an item feature ({listed(known)})")
    if with_histories is not None:
        problems += [
            f"no feature in the role '{role}' shares the vocabulary of '{history}'; expected one for each history"
            for name, history in with_histories.items()
            if spec.vocabulary(name) not in by_space
        ]
    if problems:
        raise SpecError.of(where, problems)
    return {name: by_space[space][0] for space, name in reversed(spaces.items()) if space in by_space}


def _is_scalar_id(spec: FeatureSpec, name: str) -> bool:
    return spec.features[name].is_categorical and not spec.features[name].is_list


def _sharing(spec: FeatureSpec, item_of: Mapping[str, str]) -> FeatureSpec:
    """The specification in which each feature of a history names its item feature's vocabulary.

    Raises:
        SpecError: if their cardinalities differ.
    """
    if all(spec.vocabulary(name) == spec.vocabulary(item) for name, item in item_of.items()):
        return spec
    features = {
        name: feature.model_copy(update={"vocabulary": spec.vocabulary(item_of[name])}) if name in item_of else feature
        for name, feature in spec.features.items()
    }
    return spec.replace(features=features)


# --- where the events stand ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Events:
    """Where the T events of a batch of histories stand."""

    places: Tensor
    """Where in a padded (B, L) tensor, laid flat, each event stands (T,)."""
    rows: Tensor
    """Which row each event is of (T,)."""
    lengths: Tensor
    """Events of each row (B,)."""
    length: int
    """L."""
    present: Tensor | None = None
    """Only in the padded form: which places hold an event (T,)."""
    sizes: tuple[int, ...] = ()
    """Only in the jagged form: rows that have each step, from most to fewest, none of them 0."""
    order: Tensor | None = None
    """Only in the jagged form: the rows from the longest history to the shortest (B,)."""
    rank: Tensor | None = None
    """Only in the jagged form: where in `order` each row stands (B,)."""

    @property
    def num_rows(self) -> int:
        """B."""
        return self.lengths.shape[0]  # which an exporter leaves open, and len() does not

    @property
    def num_events(self) -> int:
        """T, of which the padded form counts places without an event."""
        return self.rows.shape[0]

    @property
    def step_by_step(self) -> bool:
        """Whether sums go over slices, a step at a time."""
        many = bool(self.sizes) and len(self.rows) >= SLICED * len(self.sizes)
        return many and self.present is None and self.rows.device.type == "cpu"

    @cached_property
    def blocks(self) -> Blocks:
        """What work on the jagged form takes one after the other; forward and backward passes share it."""
        return Blocks.of(self)

    @property
    def there(self) -> Tensor:
        """Which of the places (B, L) hold an event."""
        if self.present is not None:
            return self.present.view(self.num_rows, self.length)
        return self.padded(torch.ones_like(self.rows, dtype=torch.bool), False)

    def flat(self, padded: Tensor) -> Tensor:
        """(B, L, ...) -> (T, ...): what belongs to the events."""
        flat = padded.flatten(0, 1)
        return flat if self.present is not None else flat.index_select(0, self.places)

    def padded(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """(T, ...) -> (B, L, ...), `fill` where no event is."""
        shape = (self.num_rows, self.length, *x.shape[1:])
        if self.present is not None:
            return torch.where(self._mask(x), x, fill).view(shape)
        empty = x.new_full((self.num_rows * self.length, *x.shape[1:]), fill)
        return empty.index_copy(0, self.places, x).view(shape)

    def spread(self, x: Tensor) -> Tensor:
        """Of each row (B, W), to each of its events: (T, W)."""
        if self.present is not None:
            return x.unsqueeze(1).expand(-1, self.length, -1).reshape(-1, x.shape[1])
        if not self.step_by_step:
            return x.index_select(0, self.rows)
        return cast(Tensor, _Spread.apply(x, self))  # type: ignore[no-untyped-call]

    def sum(self, x: Tensor) -> Tensor:
        """The sum over each row's events: (T, W) -> (B, W); zeros for an empty history."""
        if self.present is not None:
            kept = torch.where(self._mask(x), x, 0)
            return kept.view(self.num_rows, self.length, x.shape[1]).sum(1)
        if not self.step_by_step:
            return x.new_zeros(self.num_rows, x.shape[1]).index_add(0, self.rows, x)
        return cast(Tensor, _Sum.apply(x, self))  # type: ignore[no-untyped-call]

    def weighted_sum(self, x: Tensor, weights: Tensor) -> Tensor:
        """The sum over each row's events, each times its weight: (T, W), (T,) -> (B, W)."""
        if not self.step_by_step or x.dtype != weights.dtype:
            return self.sum(x * weights.unsqueeze(1))
        return cast(Tensor, _WeightedSum.apply(x, weights, self))  # type: ignore[no-untyped-call]

    def mean(self, x: Tensor) -> Tensor:
        """The mean over each row's events: (T, W) -> (B, W); zeros for an empty history."""
        return self.sum(x) / self.lengths.clamp(min=1).unsqueeze(1)

    def softmax(self, scores: Tensor) -> Tensor:
        """exp(score) as a share of the row's sum, for each event: (T,) -> (T,)."""
        shares = self.padded(scores, torch.finfo(scores.dtype).min).softmax(1)
        return self.flat(shares) if self.present is None else shares.flatten() * self.present

    def successors(self) -> tuple[Tensor, Tensor]:
        """Pairs of an event and the next one of its row, as places among the T: (P,), (P,).

        In the padded form P is B (L - 1), and `follows` says which of the pairs are there.
        """
        if self.present is not None:
            places = torch.arange(self.num_events, device=self.rows.device).view(self.num_rows, self.length)
            # The last event so far; the row's first place before there is one.
            latest = torch.where(self.there, places, places[:, :1]).cummax(1).values
            return latest[:, :-1].flatten(), places[:, 1:].flatten()
        if not self.sizes:
            return self.rows, self.rows  # none
        later = torch.arange(self.sizes[0], self.num_events, device=self.rows.device)
        sizes = torch.tensor(self.sizes, device=self.rows.device)
        return later - sizes[:-1].repeat_interleave(sizes[1:]), later

    def follows(self, earlier: Tensor, later: Tensor) -> Tensor | None:
        """Which of the pairs of `successors` are there; None for all."""
        return None if self.present is None else self.present[earlier] & self.present[later]

    def _mask(self, x: Tensor) -> Tensor:
        assert self.present is not None
        return self.present.view(-1, *[1] * (x.dim() - 1))


_in_one_shape: ContextVar[bool] = ContextVar("in_one_shape", default=False)


@contextmanager
def in_one_shape() -> Iterator[None]:
    """Events are in the padded form until the end of the block: the shapes of a step are those of any other."""
    token = _in_one_shape.set(True)
    try:
        yield
    finally:
        _in_one_shape.reset(token)


def events_of(present: Tensor) -> Events:
    """Events that stand where `present` (B, L) says, in the form that suits what is going on."""
    if _in_one_shape.get() or torch.compiler.is_compiling():
        return padded_events(present)
    return jagged_events(present)


def jagged_events(present: Tensor) -> Events:
    """Events in the jagged form; `present` (B, L) says where they stand."""
    rows, length = present.shape
    lengths = present.sum(1)
    _, order = lengths.sort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(rows, device=order.device)
    places = present.flatten().nonzero().squeeze(1)
    row = places // max(length, 1)
    step = torch.arange(len(places), device=row.device) - (lengths.cumsum(0) - lengths)[row]
    # Which rows have each step: those of the histories that are longer.
    sizes = torch.bincount(step, minlength=1)
    position = (sizes.cumsum(0) - sizes)[step] + rank[row]
    by_step = torch.empty_like(places)
    by_step[position] = places
    counts = tuple(size for size in sizes.tolist() if size)
    return Events(by_step, by_step // max(length, 1), lengths, length, sizes=counts, order=order, rank=rank)


def padded_events(present: Tensor) -> Events:
    """Events in the padded form; `present` (B, L) says where they stand."""
    rows, length = present.shape
    places = torch.arange(rows * length, device=present.device)
    return Events(places, places // length, present.sum(1), length, present=present.flatten())


class _Sum(torch.autograd.Function):
    """`Events.sum`, a step at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: Events) -> Tensor:
        ctx.events = events
        return _summed(x, events)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _spread(gradient, ctx.events), None


class _Spread(torch.autograd.Function):
    """`Events.spread`, a step at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: Events) -> Tensor:
        ctx.events = events
        return _spread(x, events)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.events), None


class _WeightedSum(torch.autograd.Function):
    """`Events.weighted_sum`, a step at a time: no tensor of the events is made but the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, events: Events) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.events = events
        total = x.new_zeros(events.num_rows, x.shape[1])
        column = weights.unsqueeze(1)
        for part, _ in _steps(events):
            total[: part.stop - part.start].addcmul_(x[part], column[part])
        return total.index_select(0, cast(Tensor, events.rank))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights = ctx.saved_tensors
        events: Events = ctx.events
        ordered = gradient.index_select(0, cast(Tensor, events.order))
        of_x, of_weights, column = torch.empty_like(x), torch.empty_like(weights), weights.unsqueeze(1)
        for part, _ in _steps(events):
            own = ordered[: part.stop - part.start]
            torch.mul(own, column[part], out=of_x[part])
            torch.sum(own * x[part], 1, out=of_weights[part])
        return of_x, of_weights, None


def _summed(x: Tensor, events: Events) -> Tensor:
    total = x.new_zeros(events.num_rows, x.shape[1])
    for size, part in zip(events.sizes, torch.split(x, list(events.sizes)), strict=True):
        total[:size] += part
    return total.index_select(0, cast(Tensor, events.rank))


def _spread(x: Tensor, events: Events) -> Tensor:
    ordered = x.index_select(0, cast(Tensor, events.order))
    return torch.cat([ordered[:size] for size in events.sizes])


# --- what an event weighs --------------------------------------------------------------------------------------------

Activation = Literal["prelu", "dice", "sigmoid", "relu"]


class Dice(nn.Module):
    """p x + (1 - p) a x with p = sigmoid of the standardised x and a slope a for each unit: (N, W) -> (N, W).

    Zhou et al.: Deep Interest Network for Click-Through Rate Prediction, KDD 2018, equation 8. Mean and variance are
    those of the rows given while training, and running ones else. So a row's result depends on its company while
    training, and parts of a batch (micro-batches, ranks) are each standardised by their own rows. The running values
    follow the whole batch, once a step (`follow_together`). Without a row nothing is learnt; one has variance 0.
    """

    mean: Tensor
    variance: Tensor
    parts: list[Tensor] | None = None
    """What is known of the parts of a step (2 width + 1,): rows, mean and variance. None: each batch is a step."""

    def __init__(self, width: int, *, momentum: float = 0.1, eps: float = 1e-8) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.slope = nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def forward(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """`present` (N,) says which rows count."""
        away, variance = self._of_rows(x, present) if self.training else (x - self.mean, self.variance)
        share = torch.sigmoid(away * (variance + self.eps).rsqrt()).to(x.dtype)
        return x * (share + (1 - share) * self.slope)

    def _of_rows(self, x: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
        """Distances from the mean (N, W) and the variance (W,) of the rows that count; the running values follow.

        The rounded mean of numbers that hardly differ is further away from them than they are from each other. So the
        mean of the distances is taken off too: with units of 100 ± 1e-4 the error of the gradient, in float32, goes
        from 1e-2 to 4e-7 of its size.
        """
        x = at_least_fp32(x)
        own = x.new_ones(len(x), 1) if present is None else present.unsqueeze(1).to(x.dtype)
        count = own.sum()
        rows = count.clamp(min=1)
        first = (x.detach() * own).sum(0) / rows
        away = x - first
        rest = (away * own).sum(0) / rows
        away = away - rest
        variance = (away.square() * own).sum(0) / rows
        with torch.no_grad():
            if self.parts is None:
                self.follow(count, first + rest, variance)
            else:
                self._keep(torch.cat([count.view(1), first + rest, variance]))
        return away, variance

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _keep(self, part: Tensor) -> None:
        """Remember a part of a step; not in a program, which would be compiled anew for each length of the list."""
        assert self.parts is not None
        self.parts.append(part)

    @torch.no_grad()
    def follow(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        """Move the running values towards those of a step's rows (), (W,), (W,)."""
        rate = self.momentum * (count > 0)
        self.mean.lerp_(mean, rate)
        self.variance.lerp_(variance, rate)


def follow_together(unit: Dice, parts: Tensor) -> None:
    """Let the running values follow all parts of a step at once: rows, mean and variance of each (P, 2 W + 1)."""
    rows, means, variances = torch.split(parts, [1, len(unit.mean), len(unit.mean)], dim=1)
    count = rows.sum()
    shares = rows / count.clamp(min=1)
    mean = (shares * means).sum(0)
    unit.follow(count, mean, (shares * (variances + (means - mean).square())).sum(0))


def activation(kind: Activation, width: int) -> nn.Module:
    """(N, width) -> (N, width); the slope of PReLU starts at 0.1 for each unit."""
    if kind == "dice":
        return Dice(width)
    if kind == "prelu":
        return nn.PReLU(width, init=0.1)
    return nn.Sigmoid() if kind == "sigmoid" else nn.ReLU()


class ActivatedMlp(nn.Module):
    """Linear layers, each followed by an activation and dropout: (N, dims[0]) -> (N, dims[-1]).

    Weights start Glorot-uniform, biases at 0.
    """

    def __init__(self, dims: Sequence[int], kind: Activation, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(x_dim, y_dim) for x_dim, y_dim in pairwise(dims))
        self.activations = nn.ModuleList(activation(kind, width) for width in dims[1:])
        self.dropout = nn.Dropout(dropout)
        self.kind = kind
        for layer in self.layers:
            start_glorot(cast(nn.Linear, layer))

    @property
    def first(self) -> nn.Linear:
        """The first linear layer."""
        return cast(nn.Linear, self.layers[0])

    @property
    def tail(self) -> tuple[Tensor, ...]:
        """Weight and bias of every layer but the first."""
        layers = [cast(nn.Linear, layer) for layer in self.layers[1:]]
        return tuple(each for layer in layers for each in (layer.weight, layer.bias))

    def cross_entropy(self, x: Tensor, out: nn.Linear, label: Tensor, scale: float) -> Tensor:
        """`scale` times the mean binary cross-entropy of the logits that `out` makes of the last layer: (B, dims[0]),
        (B,) -> (), in nats.

        It goes some rows at a time, and computes its gradient with them: for at least one row, where `can_go_by_blocks`
        and `mlp.comes_with_gradients` hold.
        """
        layers = (self.first.weight, self.first.bias, *self.tail, out.weight, out.bias)
        return cast(Tensor, _CrossEntropy.apply(self.kind, scale, x, label, *layers))  # type: ignore[no-untyped-call]

    def can_go_by_blocks(self, x: Tensor) -> bool:
        """Whether what stands on this MLP may compute some rows at a time by hand, with input as `x`."""
        plain = self.kind in ("sigmoid", "relu") and (self.dropout.p == 0 or not self.training)
        return plain and (x.dtype == self.first.weight.dtype or torch.is_autocast_enabled(x.device.type))

    def forward(self, x: Tensor) -> Tensor:
        """All layers."""
        return self.after_first(self.first(x))

    def after_first(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """The rest of the way from what the first linear layer gives, (N, dims[1])."""
        for place, act in enumerate(self.activations):
            x = x if place == 0 else self.layers[place](x)
            x = self.dropout(act(x, present) if isinstance(act, Dice) else act(x))
        return x


def start_glorot(layer: nn.Linear) -> None:
    """First values: weights Glorot-uniform, ±sqrt(6 / (in + out)), biases 0."""
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


class AttentionUnit(nn.Module):
    """How much each event matters to the target: (T, D) events, (B, D) targets -> (T,).

    An MLP over [h, t, h - t, h * t]: Zhou et al.: Deep Interest Network, KDD 2018, section 4.3, without a softmax.
    Its first layer is multiplied by parts: what comes of the event once an event, what comes of the target once a row;
    h - t goes with both. Targets of another width are first brought to the events', by a layer with PReLU.
    """

    def __init__(self, event_dim: int, target_dim: int, hidden: Sequence[int], kind: Activation) -> None:
        super().__init__()
        self.dim = event_dim
        if target_dim != event_dim:
            self.bring = ActivatedMlp((target_dim, event_dim), "prelu")
        self.mlp = ActivatedMlp((4 * event_dim, *hidden), kind)
        self.out = nn.Linear(hidden[-1], 1)
        start_glorot(self.out)

    def forward(self, happened: Tensor, target: Tensor, events: Events) -> Tensor:
        """Weights of the events (T,)."""
        target = self.brought(target)
        if events.step_by_step and self.mlp.can_go_by_blocks(happened):
            return self._by_blocks(happened, target, events)
        joined = happened * events.spread(target)
        first = self.of_events(happened) + events.spread(self.of_targets(target)) + self.of_products(joined)
        return self.after_first(first, events.present)

    def _by_blocks(self, happened: Tensor, target: Tensor, events: Events) -> Tensor:
        event, _, difference, product = self._parts
        with _small_products(happened):
            happened, target = happened.to(product.dtype), target.to(product.dtype)
            parts = (happened, target, self.of_targets(target), event + difference, product)
            return cast(Tensor, _Weights.apply(events, self.mlp.kind, *parts, *self.mlp.tail, *self.out.parameters()))  # type: ignore[no-untyped-call]

    def brought(self, target: Tensor) -> Tensor:
        """Targets (B, target_dim) at the events' width."""
        return cast(Tensor, self.bring(target)) if hasattr(self, "bring") else target

    def of_events(self, happened: Tensor) -> Tensor:
        """What events bring to the first layer: (T, D) -> (T, hidden[0])."""
        event, _, difference, _ = self._parts
        return F.linear(happened, event + difference)

    def of_targets(self, target: Tensor) -> Tensor:
        """What targets bring to the first layer: (B, D) -> (B, hidden[0])."""
        _, own, difference, _ = self._parts
        return F.linear(target, own - difference, self.mlp.first.bias)

    def of_products(self, joined: Tensor) -> Tensor:
        """What products of an event and a target bring to the first layer: (..., D) -> (..., hidden[0])."""
        return F.linear(joined, self._parts[3])

    def after_first(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """Weights (N,) from what the first layer gives (N, hidden[0])."""
        return cast(Tensor, self.out(self.mlp.after_first(x, present))).squeeze(1)

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        """Columns of the first layer for h, t, h - t and h * t."""
        return torch.split(self.mlp.first.weight, self.dim, dim=1)


class NextEvent(nn.Module):
    """The auxiliary network of DIEN: tells the next event from a sampled item by the state before it.

    Zhou et al.: Deep Interest Evolution Network, AAAI 2019, equation 7, with a network in the place of the inner
    product, as in the authors' code: the mean over rows of each row's mean, over its events but the first, of
    -ln sigmoid(f(h, next)) - ln(1 - sigmoid(f(h, sampled))), in nats; a row of one event adds 0. So every row stands
    alone, as in the other loss, and ranks that share a batch get the gradient of one that has it whole. It is computed
    from logits: no probability is rounded to 0.
    """

    def __init__(self, hidden_dim: int, event_dim: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.widths = (hidden_dim, event_dim)
        self.mlp = ActivatedMlp((hidden_dim + event_dim, *hidden), "sigmoid")
        self.out = nn.Linear(hidden[-1], 1)
        start_glorot(self.out)

    def forward(self, states: Tensor, happened: Tensor, sampled: Tensor, events: Events) -> Tensor:
        """The loss: (T, H), (T, D), (T, D) -> ()."""
        of_state, of_event = torch.split(self.mlp.first.weight, list(self.widths), dim=1)
        if events.step_by_step and all(self.mlp.can_go_by_blocks(each) for each in (states, happened, sampled)):
            with _small_products(happened):
                given = (each.to(of_event.dtype) for each in (states, happened, sampled))
                parts = (*given, of_state, of_event, self.mlp.first.bias)
                return cast(Tensor, _Contrast.apply(events, *parts, *self.mlp.tail, *self.out.parameters()))  # type: ignore[no-untyped-call]
        earlier, later = events.successors()
        known = F.linear(states[earlier], of_state, self.mlp.first.bias)
        right, wrong = (self._logits(known + F.linear(each[later], of_event)) for each in (happened, sampled))
        losses = F.softplus(-at_least_fp32(right)) + F.softplus(at_least_fp32(wrong))
        losses = losses / (events.lengths - 1).clamp(min=1)[events.rows[later]]
        follows = events.follows(earlier, later)
        return (losses if follows is None else losses * follows).sum() / max(1, events.num_rows)

    def _logits(self, first: Tensor) -> Tensor:
        return cast(Tensor, self.out(self.mlp.after_first(first))).squeeze(1)


# --- by blocks -------------------------------------------------------------------------------------------------------

BLOCK = 2048
"""Rows of a step that are computed together: their layers of some hundred units stay in a core's cache."""

ROWS = 1024
"""Rows of a batch that a whole MLP, with wider layers, computes together."""


@contextmanager
def _small_products(x: Tensor) -> Iterator[None]:
    """Products of the parameters' own type, on a CPU by its BLAS, until the end of the block.

    torch sends narrow products, and those of a precision of tf32 or bf16, through oneDNN, which compiles a kernel for
    every number of rows it has not seen: 1.0 to 1.5 ms, where the product of 1024 rows takes 0.06. How many rows a step
    has is another number in every batch.
    """
    before = torch.get_float32_matmul_precision()
    with torch.autocast(x.device.type, enabled=False):
        if x.device.type != "cpu" or before == "highest":
            yield
            return
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


class _Weights(torch.autograd.Function):
    """`AttentionUnit` a block of rows of a step at a time.

    Layer by layer over all events, every activation and its gradient go through memory several times; here they leave
    the cache once, to be kept for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        events: Events,
        kind: Activation,
        happened: Tensor,
        target: Tensor,
        of_targets: Tensor,
        by_event: Tensor,
        by_product: Tensor,
        *tail: Tensor,
    ) -> Tensor:
        order = cast(Tensor, events.order)
        target, of_targets = target.index_select(0, order), of_targets.index_select(0, order)
        kept = [happened.new_empty(len(happened), len(each)) for each in (by_event, *tail[:-2:2])]
        scratch, network = Scratch(happened, min(len(happened), BLOCK)), Tail(kind, tail)
        weights = happened.new_empty(len(happened))
        blocks, event, product = events.blocks, by_event.t(), by_product.t()
        for rows, x, own, *parts in zip(blocks.rows, *map(blocks.cut, (happened, weights, *kept)), strict=True):
            first = torch.addmm(of_targets[rows], x, event, out=parts[0])
            first.addmm_(torch.mul(x, target[rows], out=scratch("joined", *x.shape)), product)
            network.forward(parts, own)
        ctx.save_for_backward(happened, target, by_event, by_product, *tail, *kept)
        ctx.events, ctx.kind, ctx.num_tail = events, kind, len(tail)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        happened, target, by_event, by_product, *rest = ctx.saved_tensors
        network, kept = Tail(ctx.kind, rest[: ctx.num_tail]), rest[ctx.num_tail :]
        events: Events = ctx.events
        of_happened, of_target = torch.empty_like(happened), torch.zeros_like(target)
        of_first = target.new_zeros(len(target), len(by_event))
        of_by_event, of_by_product = torch.zeros_like(by_event), torch.zeros_like(by_product)
        scratch, blocks = Scratch(happened, min(len(happened), BLOCK)), events.blocks
        cut = map(blocks.cut, (happened, of_happened, gradient, *kept))
        with _small_products(happened):
            for rows, x, of_x, of_own, *parts in zip(blocks.rows, *cut, strict=True):
                own = target[rows]
                slope = network.backward(of_own, parts, scratch)
                of_first[rows].add_(slope)
                turned = slope.t()
                of_by_event.addmm_(turned, x)
                joined = torch.mul(x, own, out=scratch("joined", *x.shape))
                of_by_product.addmm_(turned, joined)
                of_joined = torch.mm(slope, by_product, out=joined)
                of_target[rows].addcmul_(of_joined, x)
                torch.mm(slope, by_event, out=of_x).addcmul_(of_joined, own)
        rank = cast(Tensor, events.rank)
        to_rows = of_target.index_select(0, rank), of_first.index_select(0, rank)
        return None, None, of_happened, *to_rows, of_by_event, of_by_product, *network.gradients()


class _Contrast(torch.autograd.Function):
    """`NextEvent` a block of rows of a step at a time.

    The loss is one number, so its gradient is known, but for a factor, as soon as a block's logits are: it is computed
    at once, and no activation is kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        events: Events,
        states: Tensor,
        happened: Tensor,
        sampled: Tensor,
        by_state: Tensor,
        by_event: Tensor,
        bias: Tensor,
        *tail: Tensor,
    ) -> Tensor:
        given = (states, happened, sampled, by_state, by_event, bias)
        slopes = [torch.zeros_like(each) for each in given]
        of_states, of_happened, of_sampled, of_by_state, of_by_event, of_bias = slopes
        share = ((events.lengths - 1).clamp(min=1) * max(1, events.num_rows)).to(states.dtype).reciprocal()
        share = share.index_select(0, cast(Tensor, events.order))
        total, scratch = states.new_zeros(()), Scratch(states, min(len(states), BLOCK))
        network, blocks = Tail("sigmoid", tail), events.blocks
        events_of_block = map(blocks.cut, (happened, sampled, of_happened, of_sampled))
        states_before = map(blocks.cut_before, (states, of_states))
        for rows, first_step, right_event, wrong_event, of_right, of_wrong, state, of_state in zip(
            blocks.rows, blocks.first, *events_of_block, *states_before, strict=True
        ):
            if first_step:
                continue
            own = share[rows]
            size = len(own)
            known = torch.addmm(bias, state, by_state.t(), out=scratch("known", size, len(bias)))
            # Both answers go through the network one after the other in the same tensors.
            first = scratch("0", 2 * size, len(bias))
            right, wrong = slice(0, size), slice(size, 2 * size)
            for half, each in ((right, right_event), (wrong, wrong_event)):
                torch.addmm(known, each, by_event.t(), out=first[half])
            layers = network.layers(first, scratch)
            logits = network.forward(layers, scratch("logits", 2 * size, 1).squeeze(1))
            total += torch.dot(F.softplus(-logits[right]) + F.softplus(logits[wrong]), own)
            gradient = logits.sigmoid_()
            gradient[right] -= 1
            gradient.view(2, size).mul_(own)
            slope = network.backward(gradient, layers, scratch)
            for half, each, of_each in ((right, right_event, of_right), (wrong, wrong_event, of_wrong)):
                of_by_event.addmm_(slope[half].t(), each)
                torch.mm(slope[half], by_event, out=of_each)
            of_known = torch.add(slope[right], slope[wrong], out=known)
            of_by_state.addmm_(of_known.t(), state)
            of_bias += of_known.sum(0)
            torch.mm(of_known, by_state, out=of_state)
        slopes += network.gradients()
        ctx.save_for_backward(*slopes)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *times(ctx.saved_tensors, gradient)


class _CrossEntropy(torch.autograd.Function):
    """`ActivatedMlp.cross_entropy` a block of rows at a time.

    As in `_Contrast` a block's gradients are computed while its layers are in the cache, and no activation is kept: a
    layer of the whole batch goes through memory for its bias, its activation, and the gradients of both.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kind: Activation,
        scale: float,
        x: Tensor,
        label: Tensor,
        weight: Tensor,
        bias: Tensor,
        *tail: Tensor,
    ) -> Tensor:
        of_x, of_weight, of_bias = torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
        total, scratch, share = x.new_zeros(()), Scratch(x, min(len(x), ROWS)), scale / max(1, len(x))
        network, first = Tail(kind, tail), weight.t()
        for own, of_own, right in zip(*(torch.split(each, ROWS) for each in (x, of_x, label)), strict=True):
            layers = network.layers(torch.addmm(bias, own, first, out=scratch("0", len(own), len(bias))), scratch)
            logits = network.forward(layers, scratch("logits", len(own), 1).squeeze(1))
            loss, of_logits = cross_entropy_(logits, right, share)
            total += loss
            slope = network.backward(of_logits, layers, scratch)
            of_weight.addmm_(slope.t(), own)
            of_bias += slope.sum(0)
            torch.mm(slope, weight, out=of_own)
        slopes = of_x, of_weight, of_bias, *network.gradients()
        ctx.save_for_backward(*slopes)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_x, *of_parameters = times(ctx.saved_tensors, gradient)
        return None, None, of_x, None, *of_parameters


@dataclass(frozen=True)
class Blocks:
    """Blocks of rows of a step, in the order a recurrence takes them: all steps of some rows, then of the next rows."""

    rows: Sequence[slice]
    """Which of the rows in order each block is of."""
    first: Sequence[bool]
    """Whether its step is the first."""
    sizes: Sequence[int]
    """How many events each block of each step has, step by step."""
    stay: Sequence[int]
    """How many of those have a step after."""
    places: Sequence[int]
    """Which of `sizes` each block is."""
    earlier: Sequence[int]
    """Which of `sizes` its rows had one step before; 0 at the first step."""

    @classmethod
    def of(cls, events: Events) -> Blocks:
        """The blocks of events in the jagged form."""
        sizes = [min(BLOCK, size - first) for size in events.sizes for first in range(0, size, BLOCK)]
        starts = [0, *accumulate(-(-size // BLOCK) for size in events.sizes)]  # places of each step's blocks
        stay = [0] * len(sizes)
        rows, first, places, earlier = list[slice](), list[bool](), list[int](), list[int]()
        for column in range(-(-events.num_rows // BLOCK)):
            for step, start in enumerate(starts[:-1]):
                place = start + column
                if place >= starts[step + 1]:
                    break
                rows.append(slice(column * BLOCK, column * BLOCK + sizes[place]))
                first.append(step == 0)
                places.append(place)
                earlier.append(starts[step - 1] + column if step else 0)
                if step:
                    stay[earlier[-1]] = sizes[place]
        return cls(rows, first, sizes, stay, places, earlier)

    def cut(self, x: Tensor) -> list[Tensor]:
        """What belongs to each block, of what belongs to the events."""
        parts = x.split_with_sizes(self.sizes)  # a third of what a slice each costs
        return [parts[place] for place in self.places]

    def cut_before(self, x: Tensor) -> list[Tensor]:
        """What belongs to its rows one step before; of a first step whatever."""
        sizes = [part for size, stay in zip(self.sizes, self.stay, strict=True) for part in (stay, size - stay)]
        parts = x.split_with_sizes(sizes)[::2]
        return [parts[place] for place in self.earlier]


# --- recurrences -----------------------------------------------------------------------------------------------------


class Gru(nn.Module):
    """A recurrence over each row's events: (T, X) -> states (T, H) and the last state of each row (B, H).

        u = sigmoid(W_u x + U_u h + b_u)      r = sigmoid(W_r x + U_r h + b_r)
        c = tanh(W_c x + r * (U_c h) + b_c)   h' = (1 - u) h + u c

    Zhou et al.: Deep Interest Evolution Network, AAAI 2019, equations 2 to 5. With an attention a for each event
    it is AUGRU, equations 14 to 16: a u takes the place of u, so an event without attention leaves the state.
    An empty history ends in zeros. Weights start uniform within 1 / sqrt(H), biases at 0.
    """

    def __init__(self, input_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.weight_x = nn.Parameter(torch.empty(3 * hidden_dim, input_dim))
        self.weight_h = nn.Parameter(torch.empty(3 * hidden_dim, hidden_dim))
        self.bias = nn.Parameter(torch.zeros(3 * hidden_dim))
        for weight in (self.weight_x, self.weight_h):
            nn.init.uniform_(weight, -(hidden_dim**-0.5), hidden_dim**-0.5)

    def forward(self, x: Tensor, events: Events, attention: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """States (T, H) after each event, and last states (B, H)."""
        with _small_products(x):  # and errors of a narrow type would add up over the steps
            dtype = self.weight_h.dtype
            x, attention = x.to(dtype), None if attention is None else attention.to(dtype)
            parameters = self.weight_x, self.weight_h, self.bias
            if events.present is not None:
                return _padded_recurrence(x, attention, *parameters, events)
            return cast(
                tuple[Tensor, Tensor],
                _Recurrence.apply(x, attention, *parameters, events),  # type: ignore[no-untyped-call]
            )


def _padded_recurrence(
    x: Tensor, attention: Tensor | None, weight_x: Tensor, weight_h: Tensor, bias: Tensor, events: Events
) -> tuple[Tensor, Tensor]:
    """`Gru` of events in the padded form; a place without an event hands the state on."""
    hidden = weight_h.shape[1]
    inputs = F.linear(x, weight_x, bias).view(events.num_rows, events.length, 3 * hidden)
    shape = (events.num_rows, events.length, 1)
    present = cast(Tensor, events.present).view(shape)
    weights = None if attention is None else attention.view(shape)
    state = x.new_zeros(events.num_rows, hidden)
    states = []
    for step in range(events.length):
        u, r, c = F.linear(state, weight_h).chunk(3, dim=1)
        x_u, x_r, x_c = inputs[:, step].chunk(3, dim=1)
        update, candidate = torch.sigmoid(x_u + u), torch.tanh(x_c + torch.sigmoid(x_r + r) * c)
        if weights is not None:
            update = update * weights[:, step]
        state = torch.where(present[:, step], state + update * (candidate - state), state)
        states.append(state)
    every = torch.stack(states, dim=1) if states else x.new_zeros(events.num_rows, 0, hidden)
    return every.flatten(0, 1), state


class _Recurrence(torch.autograd.Function):
    """`Gru` of events in the jagged form, by hand.

    A block of rows goes through all its steps before the next one does, and all is done to it while it is in the cache:
    what inputs bring to the gates, and every gradient of a weight, which one product for all steps would read again
    from memory, at half the speed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        attention: Tensor | None,
        weight_x: Tensor,
        weight_h: Tensor,
        bias: Tensor,
        events: Events,
    ) -> tuple[Tensor, Tensor]:
        hidden = weight_h.shape[1]
        both = 2 * hidden
        gates = x.new_empty(len(x), both)  # u and r
        candidates, recalled, states = (x.new_empty(len(x), hidden) for _ in range(3))  # recalled: U_c h
        x_gates, x_candidate, h_gates, h_candidate = (
            each for weight in (weight_x, weight_h) for each in (weight[:both].t(), weight[both:].t())
        )
        of_gates, of_candidate = bias[:both], bias[both:]
        blocks, scratch = events.blocks, Scratch(x, min(len(x), BLOCK))
        kept = (x, gates, *gates.split_with_sizes([hidden, hidden], 1), candidates, recalled, states)
        for first, weight, old, own, gate, u, r, c, memory, state in zip(
            blocks.first,
            [None] * len(blocks.rows) if attention is None else blocks.cut(attention.unsqueeze(1)),
            blocks.cut_before(states),
            *map(blocks.cut, kept),
            strict=True,
        ):
            torch.addmm(of_gates, own, x_gates, out=gate)
            torch.addmm(of_candidate, own, x_candidate, out=c)
            if first:
                gate.sigmoid_()
            else:
                gate.addmm_(old, h_gates).sigmoid_()
                c.addcmul_(r, torch.mm(old, h_candidate, out=memory))
            c.tanh_()
            update = u if weight is None else torch.mul(u, weight, out=scratch("update", *state.shape))
            _ = torch.mul(c, update, out=state) if first else torch.lerp(old, c, update, out=state)
        ctx.save_for_backward(x, attention, weight_x, weight_h, gates, candidates, recalled, states)
        ctx.events = events
        ctx.set_materialize_grads(False)
        return states, _last(states, events)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_states: Tensor | None, of_last: Tensor | None) -> tuple[Tensor | None, ...]:
        x, attention, weight_x, weight_h, gates, candidates, recalled, states = ctx.saved_tensors
        events: Events = ctx.events
        hidden = weight_h.shape[1]
        # (B, H), the gradient of the state of each row so far.
        carried = (
            x.new_zeros(events.num_rows, hidden)
            if of_last is None
            else of_last.index_select(0, cast(Tensor, events.order))
        )
        of_x, of_attention = torch.empty_like(x), None if attention is None else torch.empty_like(attention)
        by_x = torch.cat([weight_x[2 * hidden :], weight_x[: 2 * hidden]])
        of_by_x, of_weight_h, of_bias = torch.zeros_like(by_x), torch.zeros_like(weight_h), x.new_zeros(3 * hidden)
        blocks, scratch = events.blocks, Scratch(x, min(len(x), BLOCK))
        none = [None] * len(blocks.rows)
        parts = zip(
            blocks.rows,
            blocks.first,
            none if of_states is None else blocks.cut(of_states),
            none if attention is None else blocks.cut(attention.unsqueeze(1)),
            none if of_attention is None else blocks.cut(of_attention),
            *map(blocks.cut, (x, of_x)),
            blocks.cut_before(states),
            *map(blocks.cut, (*gates.split_with_sizes([hidden, hidden], 1), candidates, recalled)),
            strict=True,
        )
        with _small_products(x):
            for rows, first, of_state, weight, of_weight, own, of_own, old, u, r, c, memory in reversed([*parts]):
                here = carried[rows]
                if of_state is not None:
                    here += of_state
                # A block's gradients of c, u, r and U_c h: the first three go to x, the last three to the state.
                slope = scratch("slope", len(here), 4 * hidden)
                of_c, of_u, of_r, of_recalled = slope.split_with_sizes([hidden] * 4, 1)
                update, of_update = u, scratch("of_update", *here.shape)
                _ = torch.mul(c, here, out=of_update) if first else torch.sub(c, old, out=of_update).mul_(here)
                if weight is not None:
                    update = torch.mul(of_update, u, out=scratch("weighted", *here.shape))
                    torch.sum(update, 1, out=of_weight)
                    of_update *= weight
                    torch.mul(u, weight, out=update)
                of_candidate = torch.mul(here, update, out=scratch("of_candidate", *here.shape))
                sigmoid_backward(of_update, u, grad_input=of_u)
                tanh_backward(of_candidate, c, grad_input=of_c)
                if first:
                    of_r.zero_()
                else:
                    here -= of_candidate
                    sigmoid_backward(torch.mul(of_c, memory, out=of_candidate), r, grad_input=of_r)
                    torch.mul(of_c, r, out=of_recalled)
                    recurrent = slope[:, hidden:]
                    here.addmm_(recurrent, weight_h)
                    of_weight_h.addmm_(recurrent.t(), old)
                inputs = slope[:, : 3 * hidden]
                torch.mm(inputs, by_x, out=of_own)
                of_by_x.addmm_(inputs.t(), own)
                of_bias += inputs.sum(0)
        of_weight_x, of_bias = (torch.cat([each[hidden:], each[:hidden]]) for each in (of_by_x, of_bias))
        return of_x, of_attention, of_weight_x, of_weight_h, of_bias, None


def _last(states: Tensor, events: Events) -> Tensor:
    """The state after each row's last event: (T, H) -> (B, H), zeros for an empty history."""
    if not events.sizes:
        return states.new_zeros(events.num_rows, states.shape[1])
    starts = torch.tensor([0, *accumulate(events.sizes[:-1])], device=states.device)
    places = starts.index_select(0, (events.lengths - 1).clamp(min=0)) + cast(Tensor, events.rank)
    # An empty history stands behind all others, and its place may lie outside the first step.
    found = states.index_select(0, places.clamp(max=len(states) - 1))
    if events.sizes[0] == events.num_rows:
        return found
    return found.masked_fill((events.lengths == 0).unsqueeze(1), 0.0)


sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
tanh_backward = torch.ops.aten.tanh_backward.grad_input


def _steps(events: Events) -> list[tuple[slice, slice | None]]:
    """Of each step the events, and the rows' events one step before; None at the first."""
    steps: list[tuple[slice, slice | None]] = []
    start = before = 0
    for place, size in enumerate(events.sizes):
        steps.append((slice(start, start + size), slice(before, before + size) if place else None))
        start, before = start + size, start
    return steps
