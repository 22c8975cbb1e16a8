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

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recspec.batch import Batch
from recspec.errors import SpecError, listed
from recspec.feature_spec import FILE_NAME, FeatureSpec

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
        return padded_events(present) if torch.compiler.is_compiling() else jagged_events(present)

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
        parts = list(torch.split(found, [len(part[first]) for part in asked])) if len(asked) > 1 else [found]
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
        return len(self.lengths)

    @property
    def num_events(self) -> int:
        """T, of which the padded form counts places without an event."""
        return len(self.rows)

    @property
    def step_by_step(self) -> bool:
        """Whether sums go over slices, a step at a time."""
        many = bool(self.sizes) and len(self.rows) >= SLICED * len(self.sizes)
        return many and self.present is None and self.rows.device.type == "cpu"

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
            later = places[:, 1:].flatten()
            return later - 1, later
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


def _summed(x: Tensor, events: Events) -> Tensor:
    total = x.new_zeros(events.num_rows, x.shape[1])
    for size, part in zip(events.sizes, torch.split(x, list(events.sizes)), strict=True):
        total[:size] += part
    return total.index_select(0, cast(Tensor, events.rank))


def _spread(x: Tensor, events: Events) -> Tensor:
    ordered = x.index_select(0, cast(Tensor, events.order))
    return torch.cat([ordered[:size] for size in events.sizes])
