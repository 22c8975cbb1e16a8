"""A user's events in the jagged form: histories of any length without work for padding.

A batch holds histories padded, (B, L). The *jagged* form holds the T events present, step by step: the first events of
all rows, then all second ones, and so on. Within a step, rows stand from the longest history to the shortest. So the
rows of a step are the first rows of the step before, and a recurrence touches slices only.

The *padded* form has T = B L places, row by row, some of them without an event. Compiled and exported programs use it,
because their shapes must not depend on values. `Events` hides the form; all give equal results.

*Even* events are in the jagged form with a few places more, of rows whose history is over, so that few numbers of rows
occur from batch to batch: in each step if steps are large, otherwise in all steps together. oneDNN compiles a kernel
for each number of rows, in 1.0 to 1.5 ms. On a GPU, short histories have places of all rows in every step, so that
nothing waits for their lengths.

Shapes: B rows; L the history's length in this batch; T events; W any width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from recspec.base.errors import SpecError, listed
from recspec.feature_spec import FILE_NAME, FeatureSpec
from recspec.models.layers.batch import Batch
from recspec.models.layers.blocks import Scratch
from recspec.models.layers.gathered_rows import sum_by_row, take_rows
from recspec.models.layers.kernels import Backend

SLICED = 64
"""Mean rows of a step from which code written by hand takes histories step by step."""

BLOCK = 2048
"""Rows of a step that a CPU computes together: their layers of some hundred units stay in a core's cache."""

SHORT = 32
"""Length up to which a GPU computes all rows at every step, because that costs less than waiting for their lengths."""


@dataclass(frozen=True)
class Events:
    """Where the T events of a batch of histories stand.

    One class because each method gives the same result in every form.
    """

    places: Tensor
    """The place of each event in a flattened (B, L) tensor (T,)."""
    rows: Tensor
    """The row of each event (T,)."""
    lengths: Tensor
    """Events of each row (B,)."""
    length: int
    """L."""
    present: Tensor | None = None
    """The places that hold an event (T,); only in the padded form."""
    held: Tensor | None = None
    """The places that hold an event (T,); only if the events are even."""
    in_even_steps: bool = False
    """Whether each step has one of few numbers of rows."""
    sizes: tuple[int, ...] = ()
    """The number of rows of each step, descending and above 0; only in the jagged form."""
    order: Tensor | None = None
    """The rows from the longest history to the shortest (B,); only in the jagged form."""
    rank: Tensor | None = None
    """The place of each row in `order` (B,); only in the jagged form."""
    starts: Tensor | None = None
    """The first event of each step, at least one number; only in the jagged form."""

    is_rectangle: bool = False
    """Whether every step has all rows, in their order."""
    backend: Backend | None = None
    """What takes and sums rows; see `Embeddings.backend`."""

    @property
    def num_rows(self) -> int:
        """B."""
        return self.lengths.shape[0]  # an exporter fixes len(), and leaves this open

    @property
    def num_events(self) -> int:
        """T, with the places without an event."""
        return self.rows.shape[0]

    @property
    def mask(self) -> Tensor | None:
        """The places that hold an event (T,); None if all do."""
        return self.held if self.present is None else self.present

    @property
    def in_large_steps(self) -> bool:
        """Whether steps hold enough rows, on a CPU and in the jagged form, for code that takes them one by one."""
        return self.in_even_steps or (
            bool(self.sizes) and len(self.rows) >= SLICED * len(self.sizes) and self.rows.device.type == "cpu"
        )

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks of the jagged form, which forward and backward passes share."""
        return Blocks(self)

    @property
    def present_mask(self) -> Tensor:
        """The places that hold an event (B, L)."""
        if self.present is not None:
            return self.present.view(self.num_rows, self.length)
        return self.padded(torch.ones_like(self.rows, dtype=torch.bool), False)

    def flat(self, padded: Tensor) -> Tensor:
        """The values at the events: (B, L, ...) -> (T, ...)."""
        flat = padded.flatten(0, 1)
        return flat if self.present is not None else take_rows(flat, self.places, self.backend)

    def padded(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """(T, ...) -> (B, L, ...), with `fill` at places without an event."""
        shape = (self.num_rows, self.length, *x.shape[1:])
        if self.present is not None:
            mask = self.present.view(-1, *[1] * (x.dim() - 1))
            return torch.where(mask, x, fill).view(shape)
        if self.held is not None:  # the others write `fill` to a place without an event
            x = torch.where(self.held.view(-1, *[1] * (x.dim() - 1)), x, fill)
        empty = x.new_full((self.num_rows * self.length, *x.shape[1:]), fill)
        return empty.index_copy(0, self.places, x).view(shape)

    def spread(self, x: Tensor) -> Tensor:
        """Each row's value at its events: (B, W) -> (T, W)."""
        if self.present is not None:
            return x.unsqueeze(1).expand(-1, self.length, -1).reshape(-1, x.shape[1])
        if self.is_rectangle:
            return x.repeat(self.length, 1)
        return take_rows(x, self.rows, self.backend)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over each row's events: (T, W) -> (B, W); zeros for an empty history."""
        if self.present is not None:
            return self.padded(x).sum(1)
        return self._sum(x if self.held is None else x * self.held.unsqueeze(1))

    def _sum(self, x: Tensor) -> Tensor:
        if self.is_rectangle:
            return x.view(self.length, self.num_rows, x.shape[1]).sum(0)
        return sum_by_row(x, self.rows, self.num_rows, self.backend)

    def weighted_sum(self, x: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum over each row's events: (T, W), (T,) -> (B, W)."""
        if self.held is not None:
            return self._sum(x * (weights * self.held).unsqueeze(1))
        return self.sum(x * weights.unsqueeze(1))

    def softmax(self, scores: Tensor) -> Tensor:
        """The softmax of scores over each row's events: (T,) -> (T,)."""
        shares = self.padded(scores, torch.finfo(scores.dtype).min).softmax(1)
        own = self.flat(shares) if self.present is None else shares.flatten()
        return own if self.mask is None else own * self.mask

    def successors(self) -> tuple[Where, Where]:
        """Pairs of an event and the next event of its row, as indices of events: (P,), (P,).

        In the padded form P is B (L - 1). `follows` marks the pairs of two events.
        """
        if self.is_rectangle:
            return slice(0, self.num_events - self.num_rows), slice(self.num_rows, self.num_events)
        if self.present is not None:
            places = torch.arange(self.num_events, device=self.rows.device).view(self.num_rows, self.length)
            # The last event so far; before the first event, the row's first place.
            latest = torch.where(self.present_mask, places, places[:, :1]).cummax(1).values
            return latest[:, :-1].flatten(), places[:, 1:].flatten()
        if not self.sizes:
            return self.rows, self.rows  # none
        every = torch.arange(self.num_events, device=self.rows.device)
        steps = every.split_with_sizes(self.sizes)
        # Without an event before, `steps[:0]`: no step has no rows.
        earlier = [step[:size] for step, size in zip(steps, self.sizes[1:], strict=False)]
        return torch.cat(earlier or [every[:0]]), every[self.sizes[0] :]

    def follows(self, earlier: Where, later: Where) -> Tensor | None:
        """The pairs of `successors` that join two events (P,); None for all."""
        return None if self.mask is None else at(self.mask, earlier) & at(self.mask, later)


Where: TypeAlias = Tensor | slice
"""Indices of events, or a range of them."""


def at(x: Tensor, where: Where) -> Tensor:
    """The values at some events: (T, ...) -> (P, ...)."""
    return x[where] if isinstance(where, slice) else x.index_select(0, where)


def events_of(present: Tensor, *, through_onednn: bool = True, backend: Backend | None = None) -> Events:
    """Events at the places `present` (B, L), in the padded form while compiling, else in the jagged form.

    They are even on a CPU whose products go through oneDNN. Large steps are not, unless `through_onednn` sends their
    products that way too.
    """
    if torch.compiler.is_compiling():
        return padded_events(present)
    if present.device.type != "cpu":
        return events_on_gpu(present, backend=backend)
    even = torch.get_float32_matmul_precision() != "highest"
    return jagged_events(present, even=even, large_too=through_onednn)


def events_on_gpu(present: Tensor, *, short: int = SHORT, backend: Backend | None = None) -> Events:
    """Events at the places `present` (B, L) in the jagged form, found with at most one wait for the device.

    Histories of up to `short` places are never waited for: each step holds all rows, with a place without an event for
    rows whose history is over. For longer ones, the numbers of rows of all steps are read at once.
    """
    rows, length = present.shape
    lengths, every = present.sum(1), torch.arange(rows, device=present.device)
    # Each row's events, and then its places without one.
    columns = present.byte().sort(dim=1, descending=True, stable=True).indices
    places = columns + every.unsqueeze(1) * length
    there = lengths > torch.arange(length, device=present.device).unsqueeze(1)  # (L, B)
    if length <= short:
        order = rank = every
        sizes, starts = (rows,) * length if rows else (), torch.arange(max(length, 1), device=present.device) * rows
        by_step, held = places.t().flatten(), there.flatten()
    else:
        order, held = lengths.argsort(descending=True, stable=True), None
        rank = torch.empty_like(order).index_copy_(0, order, every)
        counts = there.sum(1)
        sizes, starts = tuple(size for size in counts.tolist() if size), counts.cumsum(0) - counts
        steps = places.index_select(0, order).t()
        by_step = torch.cat([step[:size] for step, size in zip(steps, sizes, strict=False)] or [every[:0]])
    row_of = by_step // max(length, 1)
    shape = length <= short, backend
    return Events(by_step, row_of, lengths, length, None, held, False, sizes, order, rank, starts, *shape)


def jagged_events(present: Tensor, *, even: bool = False, large_too: bool = True) -> Events:
    """Events at the places `present` (B, L) in the jagged form, even if asked; large steps only with `large_too`."""
    rows, length = present.shape
    lengths = present.sum(1)
    _, order = lengths.sort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(rows, device=order.device)
    places = present.flatten().nonzero().squeeze(1)
    row = places // max(length, 1)
    step = torch.arange(len(places), device=row.device) - (lengths.cumsum(0) - lengths)[row]
    sizes = torch.bincount(step, minlength=1)
    in_even_steps = even and len(places) > 0 and len(places) >= SLICED * int(lengths.max())
    if in_even_steps and not large_too:
        even = in_even_steps = False
    if even and len(places):
        evened = _even_steps if in_even_steps else _even_together
        sizes = torch.tensor(evened(sizes.tolist(), rows), device=sizes.device)
    starts = sizes.cumsum(0) - sizes
    position = starts[step] + rank[row]
    counts = tuple(size for size in sizes.tolist() if size)
    if even and counts:
        row_at = torch.cat([order[:size] for size in counts])
        # A row whose history is over has a place without an event.
        by_step = row_at * length + present.to(torch.uint8).argmin(1)[row_at]
        held = torch.zeros_like(by_step, dtype=torch.bool)
        held[position] = True
    else:
        by_step, held = torch.empty_like(places), None
    by_step[position] = places
    row_of = by_step // max(length, 1)
    return Events(by_step, row_of, lengths, length, None, held, in_even_steps, counts, order, rank, starts)


def _even_steps(sizes: list[int], most: int) -> list[int]:
    """Sizes of steps, at most `most`, of which the last block has one of twenty numbers of rows."""
    return [min(whole + _even(size - whole), most) for size in sizes for whole in [size // BLOCK * BLOCK]]


def _even_together(sizes: list[int], most: int) -> list[int]:
    """Sizes of steps, at most `most` and descending, whose sum is one of few numbers or all places of these steps."""
    more, found = _even(sum(sizes)) - sum(sizes), list[int]()
    for size in sizes:
        most = min(size + more, most) if size else 0
        more -= most - size
        found.append(most)
    return found


def _even(size: int) -> int:
    """The next multiple of 32, and of an eighth of the next power of two."""
    unit = max(32, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // unit) * unit


def padded_events(present: Tensor) -> Events:
    """Events at the places `present` (B, L) in the padded form."""
    rows, length = present.shape
    places = torch.arange(rows * length, device=present.device)
    return Events(places, places // length, present.sum(1), length, present=present.flatten())


class Blocks:
    """Blocks of rows of a step in the order of a recurrence: all steps of some rows, then of the next rows."""

    def __init__(self, events: Events) -> None:
        """Blocks of events in the jagged form; on a GPU of all rows, as each block costs some hundred launches."""
        self.most = most = BLOCK if events.rows.device.type == "cpu" else max(1, events.num_rows)
        """The most rows of a block."""
        self.sizes = [min(most, size - first) for size in events.sizes for first in range(0, size, most)]
        """The number of events of each block, step by step."""
        self.stay = [0] * len(self.sizes)
        """The number of those events that have a next event."""
        self.rows, self.first = list[slice](), list[bool]()
        """The rows of each block, as places in `Events.order`; whether its step is the first."""
        self.places, self.earlier = list[int](), list[int]()
        """The place of each block in `sizes`, and of the same rows one step before; 0 at the first step."""
        starts = [0, *accumulate(-(-size // most) for size in events.sizes)]  # the first block of each step
        for column in range(-(-events.num_rows // most)):
            for step, start in enumerate(starts[:-1]):
                place = start + column
                if place >= starts[step + 1]:
                    break
                self.rows.append(slice(column * most, column * most + self.sizes[place]))
                self.first.append(step == 0)
                self.places.append(place)
                self.earlier.append(starts[step - 1] + column if step else 0)
                if step:
                    self.stay[self.earlier[-1]] = self.sizes[place]

    def scratch(self, like: Tensor) -> Scratch:
        """Memory for tensors of a block, like one that has a row for each event."""
        return Scratch(like, min(len(like), self.most))

    def cut(self, x: Tensor) -> list[Tensor]:
        """The part of each block, of a tensor with one entry an event."""
        parts = x.split_with_sizes(self.sizes)  # a third of the cost of separate slices
        return [parts[place] for place in self.places]

    def cut_before(self, x: Tensor) -> list[Tensor]:
        """The part of the same rows one step before; at a first step any."""
        sizes = [part for size, stay in zip(self.sizes, self.stay, strict=True) for part in (stay, size - stay)]
        parts = x.split_with_sizes(sizes)[::2]
        return [parts[place] for place in self.earlier]


class Histories:
    """The features of a specification that describe a user's events, and the target's feature of each.

    `history_X` belongs to the item feature whose vocabulary it shares. In a specification without shared vocabularies,
    as published ones are, the scalar ids of the roles item, history and negative_history are paired in order.
    """

    def __init__(self, spec: FeatureSpec, who: str) -> None:
        """Find the pairs.

        Raises:
            SpecError: naming every feature of a history without an item feature, or whose item feature is taken.
        """
        spec.require(("item", "history"), who)
        self.pairs: Mapping[str, str] = _paired(spec, "history")
        """Item feature -> its history."""
        self.negatives: Mapping[str, str] = _paired(spec, "negative_history", self.pairs)
        """Item feature -> the sampled ids for its history; empty if the dataset has none."""
        self.time_gaps = tuple(name for name in spec.role("history") if not spec.features[name].is_categorical)
        """Numerical features of an event: ln(1 + time to the row)."""
        self.mark = self.pairs.get(spec.item_id, next(iter(self.pairs.values())))
        """The history whose nonzero ids mark events."""
        self.spec = _sharing(spec, {own: item for each in (self.pairs, self.negatives) for item, own in each.items()})
        """The specification for `Embeddings`: each history has its item feature's vocabulary."""
        self.through_onednn = True
        """Whether a CPU's products over events go through oneDNN in tf32 and bf16; training sets it."""
        self.backend: Backend | None = None
        """What takes and sums rows of events; training sets it, see `Embeddings.backend`."""
        self._shifts = {name: self.spec.shift(name) - spec.shift(name) for name in self.pairs}

    @property
    def features(self) -> tuple[str, ...]:
        """The histories and time gaps, without sampled ids."""
        return (*self.pairs.values(), *self.time_gaps)

    @property
    def ids_per_event(self) -> Mapping[str, int]:
        """Item feature -> ids for its table besides the target's, for the longest history."""
        lengths = {name: self.spec.features[history].length or 0 for name, history in self.pairs.items()}
        return {name: length * (2 if name in self.negatives else 1) for name, length in lengths.items()}

    def events(self, batch: Batch, *, last: int | None = None) -> Events:
        """The events of a batch, or each row's latest `last`."""
        present = batch[self.mark] != 0
        if last is not None:
            later = present.sum(1, keepdim=True) - present.cumsum(1)  # events after each
            present = present & (later < last)
        return self.events_at(present)

    def events_at(self, present: Tensor) -> Events:
        """The events at the places `present` (B, L)."""
        return events_of(present, through_onednn=self.through_onednn, backend=self.backend)

    def target(self, batch: Batch) -> Batch:
        """The ids (B,) of the item features with histories, numbered as in their tables."""
        return {name: batch[name] + shift if (shift := self._shifts[name]) else batch[name] for name in self.pairs}

    def lists(self, *, sampled: bool = False) -> Sequence[Mapping[str, str]]:
        """Item feature -> its history, and then, if `sampled`, -> the sampled ids for it."""
        return (self.pairs, self.negatives) if sampled else (self.pairs,)

    def at(self, batch: Batch, events: Events, *, sampled: bool = False) -> list[Batch]:
        """The ids (T,) of the events by item feature, and then, if `sampled`, the ids sampled for them."""
        return [{name: events.flat(batch[each[name]]) for name in self.pairs} for each in self.lists(sampled=sampled)]


def _paired(spec: FeatureSpec, role: str, with_histories: Mapping[str, str] | None = None) -> dict[str, str]:
    """Item feature -> its feature in another role, by vocabulary or else by order.

    Raises:
        SpecError: see `Histories`.
    """
    ids = [name for name in spec.role("item") if spec.features[name].is_categorical]
    known = [name for name in ids if not spec.features[name].is_list] if with_histories is None else [*with_histories]
    lists = [name for name in spec.role(role) if spec.features[name].is_categorical]  # type: ignore[arg-type]
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
    SpecError.refuse(str(spec.folder / FILE_NAME), problems)
    return {name: by_space[space][0] for space, name in reversed(spaces.items()) if space in by_space}


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
