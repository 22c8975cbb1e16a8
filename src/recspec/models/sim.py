"""SIM: a search in a long history for events relevant to the target, then attention to those.

Pi et al.: Search-based User Interest Modeling with Lifelong Sequential Behavior Data for Click-Through Rate Prediction,
CIKM 2020. The latest events form a short history, which DIEN's or DIN's block reads.

Shapes: B rows; L the longest history of a batch; D width of an event's vector, Z with its gap; S states' width; T short
events; k events kept by the search; H heads; R requests (users); N items.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from recspec.base.errors import SettingsError, unknown
from recspec.feature_spec import FeatureSpec
from recspec.models.base import Widths, at_once
from recspec.models.dien import DienSettings, Evolution, auxiliary_weight
from recspec.models.din import Head, Made, SequenceModel, SequenceSettings
from recspec.models.layers import (
    AttentionUnit,
    Batch,
    Column,
    Events,
    Histories,
    History,
    NextEvent,
    PaddedHistory,
    RowsHeld,
    StoredHistory,
    TableHistory,
    TargetQueries,
    attention_to_items,
    events_of,
    kernels,
    latest_best,
    may_replace,
    num_rows,
    take,
    weighted_sums,
)

GAP_STEP = 0.5
"""Bucket width of time gaps, which are ln(1 + days): borders at 0.6, 1.7, 3.5, 6.4, 11, 19, 32, 54 days, ..."""

REQUEST_FLOATS = 1 << 24
"""Floats of requests' events that `score_items` looks up at once: 64 MB."""


class SimSettings(SequenceSettings):
    """Sizes of SIM; the defaults are those published for Amazon Books, with the paper's exact search."""

    search: Literal["soft", "hard"] = Field(
        "soft",
        description=(
            "events to keep: soft, those with the highest dot products with the target; hard, the latest that share an"
            " id with it"
        ),
    )
    hard_feature: str | None = Field(
        None,
        description="item feature that hard search compares; null: the second with a history, or else the first",
    )
    search_dim: int | None = Field(
        None, ge=1, description="width of projections of target and events for soft search; null: no projection"
    )
    search_hidden: Widths = Field((200,), description="widths of the soft search's own MLP")
    top_k: int = Field(50, ge=1, description="number of events that the search keeps")
    short_length: int = Field(10, ge=0, description="number of latest events for the short part; others are searched")
    long_length: int | None = Field(None, ge=0, description="maximum number of earlier events to search; null: all")
    short: Literal["dien", "din", "none"] = Field(
        "dien", description="block that reads the latest events; none: the search covers them too"
    )
    exact: Literal["multihead", "din"] = Field(
        "multihead",
        description="attention over the kept events; multihead: over vectors and time gaps; din, as published: dot "
        "products with the target, plus the mean of the events",
    )
    heads: int = Field(4, ge=1, description="number of heads of `exact: multihead`")
    gap_buckets: int = Field(
        16, ge=1, description="embeddings of an event's time gap, each for half a unit of ln(1 + days)"
    )
    gru_hidden: int | None = Field(
        None, ge=1, description="width of DIEN's states; null: the width of an event. Published: 96"
    )
    auxiliary: float | None = Field(
        None,
        ge=0,
        description=(
            "weight of DIEN's auxiliary loss; null: 1 if short is dien and the dataset has the role negative_history, "
            "else 0"
        ),
    )
    auxiliary_hidden: Widths = Field((100, 50), description="widths of the auxiliary network's hidden layers")
    alpha: float = Field(0.5, ge=0, description="weight of the soft search's own loss")
    beta: float = Field(0.5, gt=0, description="weight of the main loss")


class Sim(SequenceModel):
    """Search-based interest model: a general search unit (GSU) keeps k events of a long history, an exact unit attends.

    Soft search scores an event by the product of its vector with the target's. No gradient flows through the choice of
    the k best. Instead the GSU has its own loss, of an MLP over the sum of all events weighted by the softmax of their
    scores. In section 3.1 of the paper the weights are the scores; the published program takes their softmax. Both
    losses train the shared tables. Hard search has no GSU to train.

    A row's logit depends on its own events only, not on other rows or padding; without events the sums are zeros. Of
    equal scores, the later event is kept.
    """

    name = "sim"
    Settings = SimSettings
    space = MappingProxyType({**SequenceModel.space, "top_k": "10..100 log", "short": ["dien", "din", "none"]})
    settings: SimSettings

    def __init__(self, spec: FeatureSpec, settings: SimSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.time_gaps = self.histories.time_gaps if settings.exact == "multihead" else ()
        self.hard_feature = _hard_feature(settings, tuple(self.histories.pairs))
        self.order = self.inputs.embeddings.order(tuple(self.histories.pairs))
        """The item features with histories, in the order of their parts in an event's vector."""
        width, event_dim, side_dim = settings.embedding_dim, self.inputs.event_dim, self.inputs.side_dim
        if settings.search == "soft":
            if settings.search_dim is not None:
                self.search_queries = TargetQueries(event_dim, event_dim, heads=1, head_dim=settings.search_dim)
            own = settings.model_copy(update={"hidden": settings.search_hidden})
            self.search_head = Head(2 * event_dim + side_dim, own)
        self.made_dim = 2 * event_dim  # with the mean
        if settings.exact == "multihead":
            self.gaps = nn.ParameterList(
                nn.Parameter(torch.empty(settings.gap_buckets, width).uniform_(-(width**-0.5), width**-0.5))
                for _ in self.histories.time_gaps
            )
            kept_dim = event_dim + width * len(self.gaps)
            self.exact_queries = TargetQueries(event_dim, kept_dim, heads=settings.heads, head_dim=width)
            self.made_dim = settings.heads * kept_dim
        self.auxiliary = _auxiliary_weight(settings, self.histories)
        if settings.short == "din":
            self.unit = AttentionUnit(event_dim, event_dim, settings.attention_hidden, settings.attention_activation)
            self.made_dim += event_dim
        elif settings.short == "dien":
            shared = ("embedding_dim", "attention_hidden", "attention_activation", "gru_hidden")
            self.evolution = Evolution(event_dim, DienSettings(**{name: getattr(settings, name) for name in shared}))
            self.made_dim += self.evolution.hidden_dim
        if self.auxiliary:
            self.next_event = NextEvent(self.evolution.hidden_dim, event_dim, settings.auxiliary_hidden)
        self.head = Head(event_dim + self.made_dim + side_dim, settings)

    def features(self) -> tuple[str, ...]:
        """The inputs, the histories and, if read, the time gaps."""
        return (*self.inputs.features, *self.time_gaps)

    def forward(self, batch: Batch) -> Tensor:
        read = self._read(batch)
        with torch.no_grad():
            scores = read.long.scores(self._search_query(read.target)) if self.settings.search == "soft" else None
        return cast(Tensor, self.head(self._joined(batch, read, scores)))

    def loss(self, batch: Batch) -> Tensor:
        """alpha times the soft search's cross-entropy, beta times the logit's, and DIEN's auxiliary loss, in nats.

        Equation 3 of the paper; hard search has nothing to train.
        """
        label, read = batch[self.spec.label], self._read(batch, sampled=self.auxiliary > 0)
        loss, scores = read.target.new_zeros((), dtype=torch.float32), None
        if self.settings.search == "soft":
            scores, found = read.long.search(self._search_query(read.target))
            first = torch.cat([read.target, found, read.side], dim=1)
            loss = self.search_head.loss(first, label, self.settings.alpha)
        loss = loss + self.head.loss(self._joined(batch, read, scores), label, self.settings.beta)
        if self.auxiliary:
            loss = loss + self.auxiliary * self.next_event(read.states, read.short, read.sampled, read.events)
        return loss

    def side_scores(self, request: Batch, items: Batch) -> Tensor:
        """`score_items`, with a request's events looked up once and multiplied with all items at once."""
        if self.training:  # Dice standardises by the rows of a call
            return self.pair_scores(request, items)
        targets = self.histories.target(items)
        (target,), of_theirs = self.inputs(items, [targets])
        columns = self.inputs.side_columns(request, items)
        of_target, of_made, of_request, of_item = self.head.parts(self.inputs.event_dim, self.made_dim, *columns)
        other = F.linear(target, of_target, self.head.mlp.first.bias) + F.linear(of_theirs, of_item)
        ids, request = targets[self.hard_feature], _with_a_place(request, self.histories)
        if torch.compiler.is_compiling():
            ours = self._read(request, target=False, stored=False)
            made = F.linear(self._made(ours, target, ids), of_made)
            first = made + F.linear(ours.side, of_request).unsqueeze(1) + other
            return self.head.after_first(first.flatten(0, 1)).view(-1, num_rows(items))
        floats = request[self.histories.mark].shape[1] * self.inputs.event_dim
        step = max(1, at_once(REQUEST_FLOATS, target.device) // floats)
        blocks = [take(request, slice(start, start + step)) for start in range(0, num_rows(request), step)]
        return torch.cat([self._scores_of_all(block, target, ids, other, of_made, of_request) for block in blocks])

    def _scores_of_all(self, request: Batch, target: Tensor, ids: Tensor, other: Tensor, *parts: Tensor) -> Tensor:
        """`side_scores` of some requests; `parts` are the head's columns for the interests and for the request."""
        of_made, of_request = parts
        ours = self._read(request, target=False, stored=False)
        laid = self._with_gaps(ours.long, ours.gaps)
        assert isinstance(ours.long, PaddedHistory)
        assert isinstance(laid, PaddedHistory)
        vectors, with_gaps, present = ours.long.vectors, laid.vectors, ours.long.present
        states, there = ours.events.padded(ours.states), ours.events.present_mask
        exact_dim = self.made_dim - (states.shape[2] if self.settings.short != "none" else 0)
        of_exact, of_short = of_made[:, :exact_dim], of_made[:, exact_dim:]
        projected = self.evolution.unit.project_target(target) if self.settings.short == "dien" else target

        def interests(row: int, some: slice) -> list[Made]:
            made: list[Made] = []
            kept = present[row]
            if kept.any():
                long = vectors[row][kept], with_gaps[row][kept], ours.ids[row][kept]
                made.append(weighted_sums(*_exact_of_items(self, *long, target[some], ids[some]), of_exact))
            latest = states[row][there[row]]
            if len(latest) and self.settings.short == "dien":
                made.append((self.evolution.of_items(latest, projected[some]), of_short))
            elif len(latest):
                attention = attention_to_items(self.unit, latest, projected[some])
                made.append(weighted_sums([attention], latest, of_short))
            return made

        return self.head.scores_of_all(F.linear(ours.side, of_request), other, interests)

    def _made(self, ours: _Read, target: Tensor, ids: Tensor) -> Tensor:
        """The interests of requests in items, in programs of any size: (R, N, made_dim)."""
        with_gaps = self._with_gaps(ours.long, ours.gaps)
        assert isinstance(ours.long, PaddedHistory)
        assert isinstance(with_gaps, PaddedHistory)
        vectors, laid = ours.long.vectors, with_gaps.vectors
        pairs = ours.long.present.unsqueeze(1).expand(-1, target.shape[0], -1)  # (R, N, L)
        if self.settings.search == "hard":
            allowed = pairs & (ours.ids.unsqueeze(1) == ids.view(-1, 1))
            scores = torch.zeros(allowed.shape, device=allowed.device)
        else:
            allowed, scores = pairs, self._search_query(target) @ vectors.transpose(1, 2)
        places, chosen = latest_best(scores, allowed, self.settings.top_k)
        kept = torch.zeros_like(allowed).scatter(2, places, chosen)
        if self.settings.exact == "din":
            shares = _softmax(target @ vectors.transpose(1, 2), kept)
            even = kept.to(vectors.dtype) / (1 + kept.sum(2, keepdim=True))
            parts = [weights @ vectors for weights in (shares, even)]
        else:
            heads = self.exact_queries(target).unbind(1)
            parts = [_softmax(query @ laid.transpose(1, 2), kept) @ laid for query in heads]
        if self.settings.short == "dien":
            parts.append(self.evolution.of_pairs(ours.events.padded(ours.states), ours.events.present_mask, target))
        elif self.settings.short == "din":
            parts.append(self._short_pairs(ours, target))
        return torch.cat(parts, dim=2)

    def _short_pairs(self, ours: _Read, target: Tensor) -> Tensor:
        """The interest of DIN's block from the latest events for each pair (R, N, its width)."""
        times, there = target.shape[0], ours.events.present_mask  # an exporter leaves shapes open, and fixes len()
        events = events_of(there.repeat_interleave(times, dim=0))
        states = events.flat(ours.events.padded(ours.states).repeat_interleave(times, dim=0))
        return self._short(states, target.repeat(there.shape[0], 1), events).view(there.shape[0], times, -1)

    def _short(self, states: Tensor, target: Tensor, events: Events) -> Tensor:
        """The interest from the latest events (B, its width)."""
        if self.settings.short == "dien":
            return cast(Tensor, self.evolution(states, target, events))
        return events.weighted_sum(states, self.unit(states, target, events))

    # --- reading a batch -----------------------------------------------------------------------------------------

    def _read(self, batch: Batch, *, target: bool = True, sampled: bool = False, stored: bool | None = None) -> _Read:
        """A batch's vectors, from one lookup; on a CPU, long histories stay in their tables by default."""
        batch = _with_a_place(batch, self.histories)
        present, latest, places = _windows(batch[self.histories.mark] != 0, self.settings)
        events, length = self.histories.events_at(latest), present.shape[1]
        asked = [self.histories.target(batch)] if target else []
        if self.settings.short != "none":
            lists = [name for each in self.histories.lists(sampled=sampled) for name in each.values()]
            ids = {name: batch[name].gather(1, places).long() for name in lists}
            asked += self.histories.at(ids, events, sampled=sampled)
        long = {name: batch[history][:, :length].long() for name, history in self.histories.pairs.items()}
        stored = self._reads_tables(length) if stored is None else stored
        if not stored:
            asked.append({name: ids.flatten() for name, ids in long.items()})
        vectors, side = self.inputs(batch, asked)
        history = self._history(long, present, None if stored else vectors.pop())
        none = side[:0, :0]
        wanted = vectors.pop(0) if target else none
        short, negative = (vectors.pop(0) if vectors else none for _ in range(2))
        states = self.evolution.interests(short, events) if self.settings.short == "dien" else short
        gaps = [_buckets(batch[name][:, :length], self.settings.gap_buckets) for name in self.time_gaps]
        return _Read(wanted, side, history, long[self.hard_feature], gaps, events, short, states, negative)

    def _reads_tables(self, length: int) -> bool:
        """Whether to read long histories in their table: it lies here, and nothing else updates it."""
        key = str(self.settings.embedding_dim)
        embeddings = self.inputs.embeddings
        store = embeddings.stores[key]
        if torch.compiler.is_compiling() or key in embeddings.fetch or not may_replace(embeddings):
            return False
        trains = self.training and torch.is_grad_enabled()
        if store.device.type == "cpu":
            return store.dtype == torch.float32 and not (key in embeddings.updates and trains)
        # On a GPU, kernels add gradients to a whole one, in any order.
        whole = not trains or not (key in embeddings.sparse or torch.are_deterministic_algorithms_enabled())
        uses_triton = kernels.uses_triton(embeddings.backend, store.device)
        return whole and uses_triton and kernels.can_attend(store, length, len(self.order))

    def _history(self, ids: Batch, present: Tensor, vectors: Tensor | None) -> History:
        """The long history, of vectors (B L, D) or of rows in their tables."""
        if vectors is not None:
            return PaddedHistory(vectors.view(*present.shape, self.inputs.event_dim), present)
        key, embeddings = str(self.settings.embedding_dim), self.inputs.embeddings
        store, sparse = embeddings.stores[key], key in embeddings.sparse
        if store.device.type != "cpu":
            return TableHistory(store, embeddings.places(ids, self.order), present)
        embeddings.check(ids, called=self.histories.pairs)
        parts = {name: slice(first := embeddings.first_row[name], first + embeddings.num_rows[name]) for name in ids}
        return StoredHistory(tuple(Column(store, ids[name], parts[name], sparse) for name in self.order), present)

    # --- from vectors to logits ----------------------------------------------------------------------------------

    def _search_query(self, target: Tensor) -> Tensor:
        """The vector that soft search multiplies events by: (B, D)."""
        return target if self.settings.search_dim is None else self.search_queries(target).squeeze(1)

    def _joined(self, batch: Batch, read: _Read, scores: Tensor | None) -> Tensor:
        """The MLP's input (B, its width). Hard search has no `scores`."""
        allowed = read.long.present
        if scores is None:
            target = self.histories.target(batch)[self.hard_feature]
            allowed = allowed & (read.ids == target.unsqueeze(1))
            scores = torch.zeros(allowed.shape, device=self.device)
        places, chosen = latest_best(scores, allowed, self.settings.top_k)
        kept = read.long.take(places, chosen)
        if self.settings.exact == "din":
            exact = kept.attend(read.target.unsqueeze(1), mean=True)
        else:
            kept = self._with_gaps(kept, [each.gather(1, places) for each in read.gaps])
            exact = kept.attend(self.exact_queries(read.target))
        parts = [read.target, exact.flatten(1)]
        if self.settings.short != "none":
            parts.append(self._short(read.states, read.target, read.events))
        return torch.cat([*parts, read.side], dim=1)

    def _with_gaps(self, history: History, gaps: Sequence[Tensor]) -> History:
        """The events with vectors of the buckets of their time gaps (B, L), if exact search reads these."""
        for table, buckets in zip(self.gaps if gaps else (), gaps, strict=True):
            history = history.beside(table, buckets)
        return history


def _with_a_place(batch: Batch, histories: Histories) -> Batch:
    """The batch with at least one place in its histories, because an empty maximum fails."""
    if torch.compiler.is_compiling() or batch[histories.mark].shape[1]:
        return batch
    lists = (*histories.features, *histories.negatives.values())
    return {**batch, **{name: F.pad(batch[name], (0, 1)) for name in lists if name in batch}}


def _buckets(gaps: Tensor, most: int) -> Tensor:
    """The bucket of each event's time gap."""
    return (gaps / GAP_STEP).clamp(0, most - 1).long()


@dataclass(frozen=True)
class _Read:
    """A batch's vectors; empty if not requested."""

    target: Tensor
    """(B, D)."""
    side: Tensor
    """The other features (B, their width)."""
    long: History
    """The history that is searched and attended to."""
    ids: Tensor
    """Its ids that hard search compares (B, L)."""
    gaps: Sequence[Tensor]
    """The bucket of each of its time gaps (B, L)."""
    events: Events
    """The latest events."""
    short: Tensor
    """Their vectors (T, D)."""
    states: Tensor
    """DIEN's first states (T, S), or `short` without them."""
    sampled: Tensor
    """The vectors sampled for them (T, D)."""


def _exact_of_items(
    model: Sim, vectors: Tensor, laid: Tensor, ids: Tensor, target: Tensor, wanted: Tensor
) -> tuple[Iterator[Tensor], Tensor]:
    """The attention of a number of sums to one request's long history (L events) for items (N).

    Args:
        model: the model, whose settings say how to search and to attend.
        vectors: (L, D) the events.
        laid: (L, Z) the events with their gaps.
        ids: (L,) the ids that hard search compares.
        target: (N, D) the items.
        wanted: (N,) their ids that hard search compares.

    Returns:
        the weights (L, N) of each sum, and the vectors summed, (L, D) or (L, Z).
    """
    hard, shape = model.settings.search == "hard", (len(target), len(vectors))
    kept = ids == wanted.unsqueeze(1) if hard else target.new_ones((), dtype=torch.bool).expand(shape)
    if shape[1] > model.settings.top_k:
        scores = target.new_zeros(shape) if hard else model._search_query(target) @ vectors.t()
        places, chosen = latest_best(scores, kept, model.settings.top_k)
        kept = torch.zeros_like(kept).scatter(1, places, chosen)
    kept = kept.t()  # a softmax over rows is several times as fast as over columns
    if model.settings.exact == "multihead":
        return (_softmax(events @ target.t(), kept, 0) for events in model.exact_queries.of_events(laid)), laid
    even = kept.to(vectors.dtype) / (1 + kept.sum(0))
    return iter([_softmax(vectors @ target.t(), kept, 0), even]), vectors


def _softmax(scores: Tensor, kept: Tensor, dim: int = -1) -> Tensor:
    """The softmax over a dimension among `kept`; zeros if none is kept."""
    return torch.where(kept, scores, torch.finfo(scores.dtype).min).softmax(dim) * kept


def _windows(present: Tensor, settings: SimSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Histories cut before their latest `short_length` events, ignoring places without an event (id 0).

    Returns:
        the places before the latest events (B, up to L); which of the latest events exist, and their places, the oldest
        first (B, short_length).
    """
    last, length = (0 if settings.short == "none" else settings.short_length), present.shape[1]
    so_far = present.cumsum(1)  # events up to each place
    events = so_far[:, -1:]
    # The numbers of the latest events, counted from 1; numbers above `events` have no event.
    number = events.clamp(min=last) - last + 1 + torch.arange(last, device=present.device)
    places = _first_at_least(so_far, number).clamp(max=length - 1)
    start = (events - last).clamp(min=0)
    long = present & (so_far <= start)
    if settings.long_length is not None:
        long = long & (so_far > start - settings.long_length)
    if not torch.compiler.is_compiling():  # no row searches later places
        long = long[:, : max(length - last, 0)]
    return long, number <= events, places


def _first_at_least(ascending: Tensor, wanted: Tensor) -> Tensor:
    """The first place of each row (B, L) with at least the number `wanted` (B, n); L if there is none."""
    if torch.compiler.is_compiling():  # exporters know no search
        return (ascending.unsqueeze(1) < wanted.unsqueeze(2)).sum(2)
    return torch.searchsorted(ascending, wanted)


# --- settings that a specification decides on -------------------------------------------------------------------------


def _auxiliary_weight(settings: SimSettings, histories: Histories) -> float:
    """The auxiliary loss's weight; raises `SettingsError` if the settings ask for an impossible one."""
    if settings.short == "dien":
        return auxiliary_weight("sim", settings.auxiliary, histories)
    if settings.auxiliary:
        raise SettingsError(
            f"sim: auxiliary is {settings.auxiliary}, and short is '{settings.short}'; that loss is of the states of "
            "DIEN's block, so set short to dien, or auxiliary to 0"
        )
    return 0.0


def _hard_feature(settings: SimSettings, pairs: Sequence[str]) -> str:
    """The item feature that hard search compares; raises `SettingsError` if it has no history."""
    if settings.hard_feature is None:
        return pairs[1] if len(pairs) > 1 else pairs[0]
    if settings.hard_feature not in pairs:
        problem = unknown("item feature with a history", settings.hard_feature, pairs)
        raise SettingsError.of("sim: hard_feature", [problem])
    return settings.hard_feature
