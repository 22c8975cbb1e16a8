"""SIM: a search in a long history for events relevant to the target, then attention to those.

Pi et al.: Search-based User Interest Modeling with Lifelong Sequential Behavior Data for Click-Through Rate Prediction,
CIKM 2020. The latest events form a short history, which DIEN's or DIN's block reads.

Shapes: B rows; L the longest history of a batch; D width of an event's vector, Z with its gap; S states' width; T short
events; k events kept by the search; H heads; R requests (users); N items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn

from recspec import config
from recspec.batch import Batch, num_rows
from recspec.errors import DataError, SettingsError, unknown
from recspec.models.base import Model
from recspec.models.dien import DienSettings, Evolution
from recspec.models.din import Head, Inputs, SequenceSettings, split
from recspec.nn import (
    AttentionUnit,
    Column,
    Events,
    Histories,
    History,
    NextEvent,
    PaddedHistory,
    RowsHeld,
    StoredHistory,
    TargetQueries,
    events_of,
    latest_best,
    may_replace,
)
from recspec.spec import FeatureSpec

GAP_STEP = 0.5
"""Bucket width of time gaps, which are ln(1 + days): borders at 0.6, 1.7, 3.5, 6.4, 11, 19, 32, 54 days, ..."""

PAIRS = 1 << 12
"""Pairs of request and item that `score_items` builds at once; their short histories take up to 100 MB."""

SCORES = 1 << 22
"""Scores of pairs and events that `score_items` computes at once: 16 MB a head."""


class SimSettings(SequenceSettings):
    """Sizes of SIM; the defaults are those published for Amazon Books, with the paper's exact search."""

    search: Literal["soft", "hard"] = Field(
        "soft",
        description="soft: keep the events with the highest dot products with the target; hard: keep the latest events "
        "that share an id with it",
    )
    hard_feature: str | None = Field(
        None, description="item feature that hard search compares; null: the second with a history, else the first"
    )
    search_dim: int | None = Field(
        None, ge=1, description="width of projections of target and events for soft search; null: no projection"
    )
    search_hidden: tuple[int, ...] = Field((200,), min_length=1, description="widths of the soft search's own MLP")
    top_k: int = Field(50, ge=1, description="number of events that the search keeps")
    short_length: int = Field(10, ge=0, description="number of latest events for the short part; others are searched")
    long_length: int | None = Field(
        None, ge=0, description="number of events before the short part that are searched; null: all"
    )
    short: Literal["dien", "din", "none"] = Field(
        "dien", description="block that reads the latest events; none: they are searched with all others"
    )
    exact: Literal["multihead", "din"] = Field(
        "multihead",
        description="attention over the events kept: multihead, over vectors and time gaps; din, as published, by dot "
        "products with the target, plus their mean",
    )
    heads: int = Field(4, ge=1, description="number of heads of `exact: multihead`")
    gap_buckets: int = Field(
        16, ge=1, description="number of embeddings of an event's time gap, each for half a unit of ln(1 + days)"
    )
    gru_hidden: int | None = Field(
        None, ge=1, description="width of the states of DIEN's recurrences; null: the width of an event. Published: 96"
    )
    auxiliary: float | None = Field(
        None,
        ge=0,
        description="weight of DIEN's auxiliary loss, which needs the role negative_history; null: 1 if short is dien "
        "and the dataset has that role, else 0",
    )
    auxiliary_hidden: tuple[int, ...] = Field(
        (100, 50), min_length=1, description="widths of the auxiliary network's hidden layers"
    )
    alpha: float = Field(0.5, ge=0, description="weight of the soft search's own loss")
    beta: float = Field(0.5, gt=0, description="weight of the main loss")

    @field_validator("search_hidden", "auxiliary_hidden")
    @classmethod
    def _positive_too(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        return cls._positive(widths)


class Sim(Model):
    """Search-based interest model: a general search unit (GSU) keeps k events of a long history, an exact unit attends.

    Soft search scores an event by the product of its vector with the target's. No gradient flows through the choice of
    the k best. Instead the GSU has its own loss, of an MLP over the sum of all events weighted by the softmax of their
    scores. In section 3.1 of the paper the weights are the scores; the published program takes their softmax. Both
    losses train the shared tables. Hard search has no GSU to train.

    A row's logit depends on its own events only, not on other rows or padding; without events the sums are zeros. Of
    equal scores, the later event is kept.
    """

    name: ClassVar[str] = "sim"
    steady_shapes: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ("item", "history", "label")
    Settings: ClassVar[type[config.Settings]] = SimSettings
    settings: SimSettings

    def __init__(self, spec: FeatureSpec, settings: SimSettings, held: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, held)
        self.inputs = Inputs(spec, settings, self.name, held)
        self.histories = self.inputs.histories
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
        self.auxiliary = _auxiliary_weight(settings, has_negatives=bool(self.histories.negatives))
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

    def loss_features(self) -> tuple[str, ...]:
        """Those of `forward`, and the sampled ids if there is an auxiliary loss."""
        return (*self.features(), *(self.histories.negatives.values() if self.auxiliary else ()))

    def forward(self, batch: Batch) -> Tensor:
        """Logits (B,)."""
        read = self._read(batch, sampled=False)
        scores = None
        if self.settings.search == "soft":
            with torch.no_grad():
                scores = read.long.scores(self._search_query(read.target))
        return cast(Tensor, self.head(self._joined(read, scores)[0]))

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
        joined, states = self._joined(read, scores)
        loss = loss + self.head.loss(joined, label, self.settings.beta)
        if self.auxiliary and states is not None:
            loss = loss + self.auxiliary * self.next_event(states, read.short, read.sampled, read.events)
        return loss

    def score_items(self, request: Batch, items: Batch) -> Tensor:
        """Logits (R, N) of every item for every request.

        A request's events are looked up once and multiplied with all items at once. Events that an item does not keep
        get weight 0, so no pair copies events.
        """
        if not may_replace(self):
            return super().score_items(request, items)
        requests, candidates = num_rows(request), num_rows(items)
        compiling = torch.compiler.is_compiling()  # then all at once, whatever the number of items
        if not compiling and not (requests and candidates):
            return torch.zeros(requests, candidates, device=self.device)
        request = _with_a_place(request, self.histories)
        theirs, ids = self.inputs(items), self.histories.target(items)[self.hard_feature]
        of_target, of_made, of_request, of_item = self.head.parts(
            self.inputs.event_dim, self.made_dim, *self.inputs.side_columns(request, items)
        )
        other = F.linear(theirs.target, of_target, self.head.mlp.first.bias) + F.linear(theirs.side, of_item)
        heads = self.settings.heads if self.settings.exact == "multihead" else 1
        at_once = max(1, SCORES // (heads * request[self.histories.mark].shape[1]))
        at_once = at_once if self.settings.short == "none" else min(at_once, PAIRS)
        step = requests if compiling else max(1, at_once // candidates)
        scores = []
        for start in range(0, requests, step):
            block = {name: each[start : start + step] for name, each in request.items()}
            ours = self._asked(block)
            own = F.linear(ours.side, of_request)
            parts = []
            for some, same, known in zip(*(split(each, at_once) for each in (theirs.target, ids, other)), strict=True):
                first = F.linear(self._made(ours, some, same), of_made) + own.unsqueeze(1) + known
                parts.append(self.head.after_first(first.flatten(0, 1)).view(num_rows(block), -1))
            scores.append(torch.cat(parts, dim=1))
        return torch.cat(scores)

    def _asked(self, request: Batch) -> _Asked:
        """The part of a block of requests in every pair."""
        windows = _Windows.of(request[self.histories.mark] != 0, self.settings)
        pairs, length = self.histories.pairs, windows.long.shape[1]
        long = {name: request[history][:, :length].long() for name, history in pairs.items()}
        vectors = self.inputs.embeddings({name: ids.flatten() for name, ids in long.items()}, pairs)
        vectors = vectors.view(*windows.long.shape, self.inputs.event_dim)
        gaps = [_buckets(request[name], self.settings.gap_buckets)[:, :length] for name in self.time_gaps]
        with_gaps = [F.embedding(own, table) for own, table in zip(gaps, self.gaps if gaps else (), strict=True)]
        events = events_of(windows.short)
        latest = {**request, **windows.latest(request, list(pairs.values()))}
        read = self.inputs(latest, events, target=False)
        states = self.evolution.interests(read.events, events) if self.settings.short == "dien" else read.events
        kept = torch.cat([vectors, *with_gaps], dim=2)
        return _Asked(vectors, kept, windows.long, long[self.hard_feature], events, states, read.side)

    def _made(self, ours: _Asked, target: Tensor, ids: Tensor) -> Tensor:
        """The interests of some requests in some items: (R, N, made_dim)."""
        pairs = ours.present.unsqueeze(1).expand(-1, target.shape[0], -1)  # (R, N, L)
        if self.settings.search == "hard":
            allowed = pairs & (ours.ids.unsqueeze(1) == ids.view(-1, 1))
            scores = torch.zeros(allowed.shape, device=allowed.device)
        else:
            allowed, scores = pairs, self._search_query(target) @ ours.vectors.transpose(1, 2)
        places, chosen = latest_best(scores, allowed, self.settings.top_k)
        kept = torch.zeros_like(allowed).scatter(2, places, chosen)
        if self.settings.exact == "din":
            shares = _softmax(target @ ours.vectors.transpose(1, 2), kept)
            even = kept.to(ours.vectors.dtype) / (1 + kept.sum(2, keepdim=True))
            parts = [weights @ ours.vectors for weights in (shares, even)]
        else:
            heads = self.exact_queries(target).unbind(1)
            parts = [_softmax(query @ ours.kept.transpose(1, 2), kept) @ ours.kept for query in heads]
        if self.settings.short != "none":
            parts.append(self._short_pairs(ours, target))
        return torch.cat(parts, dim=2)

    def _short_pairs(self, ours: _Asked, target: Tensor) -> Tensor:
        """The interest from the latest events for each pair (R, N, its width)."""
        times, there = target.shape[0], ours.events.there  # an exporter leaves shapes open, and fixes len()
        events = events_of(there.repeat_interleave(times, dim=0))
        short = events.flat(ours.events.padded(ours.short).repeat_interleave(times, dim=0))
        own = target.repeat(len(there), 1)
        if self.settings.short == "dien":
            made = self.evolution(short, own, events)
        else:
            made = events.weighted_sum(short, self.unit(short, own, events))
        return cast(Tensor, made.view(len(there), times, -1))

    # --- reading a batch -----------------------------------------------------------------------------------------

    def _read(self, batch: Batch, *, sampled: bool) -> _Read:
        """A batch's vectors, from one lookup; on a CPU, long histories stay in their tables."""
        batch = _with_a_place(batch, self.histories)
        windows = _Windows.of(batch[self.histories.mark] != 0, self.settings)
        target, pairs = self.histories.target(batch), self.histories.pairs
        latest = windows.latest(batch, [*pairs.values(), *(self.histories.negatives.values() if sampled else ())])
        events = events_of(windows.short)
        length = windows.long.shape[1]
        long = {name: batch[history][:, :length].long() for name, history in pairs.items()}
        parts = [target]
        if self.settings.short != "none":
            parts.append({name: events.flat(latest[history]) for name, history in pairs.items()})
            if sampled:
                negatives = self.histories.negatives
                parts.append({name: events.flat(latest[negatives[name]]) for name in pairs})
        stored = self._reads_tables()
        if not stored:
            parts.append({name: ids.flatten() for name, ids in long.items()})
        ids = {name: torch.cat([part[name] for part in parts]) for name in pairs}
        beside, found = self.inputs.embeddings.beside(batch, self.inputs.others, ids)
        vectors = list(torch.split(found, [part[self.order[0]].shape[0] for part in parts]))
        history = self._history(long, windows.long, None if stored else vectors.pop())
        side = [vectors[0].new_zeros(vectors[0].shape[0], 0) if beside is None else beside]
        side += [batch[name].unsqueeze(1) for name in self.inputs.numbers]
        return _Read(
            target=vectors[0],
            side=torch.cat(side, dim=1),
            long=history,
            matches=long[self.hard_feature] == target[self.hard_feature].unsqueeze(1),
            gaps=[_buckets(batch[name][:, :length], self.settings.gap_buckets) for name in self.time_gaps],
            events=events,
            short=vectors[1] if self.settings.short != "none" else vectors[0][:0],
            sampled=vectors[2] if sampled else vectors[0][:0],
        )

    def _reads_tables(self) -> bool:
        """Whether to read events in their table: it lies here, and nothing else updates it."""
        key = str(self.settings.embedding_dim)
        embeddings = self.inputs.embeddings
        store = embeddings.stores[key]
        updated = key in embeddings.updates and self.training and torch.is_grad_enabled()
        here = store.device.type == "cpu" and store.dtype == torch.float32 and key not in embeddings.fetch
        return here and not updated and not torch.compiler.is_compiling() and may_replace(embeddings)

    def _history(self, ids: Batch, present: Tensor, vectors: Tensor | None) -> History:
        """The long history, of vectors (B L, D) or of rows in their tables."""
        if vectors is not None:
            return PaddedHistory(vectors.view(*present.shape, self.inputs.event_dim), present)
        key, embeddings = str(self.settings.embedding_dim), self.inputs.embeddings
        _check(ids, self.histories.pairs, embeddings.num_rows)
        store, sparse = embeddings.stores[key], key in embeddings.sparse
        parts = {name: slice(first := embeddings.first_row[name], first + embeddings.num_rows[name]) for name in ids}
        return StoredHistory(tuple(Column(store, ids[name], parts[name], sparse) for name in self.order), present)

    # --- from vectors to logits ----------------------------------------------------------------------------------

    def _search_query(self, target: Tensor) -> Tensor:
        """The vector that soft search multiplies events by: (B, D)."""
        return target if self.settings.search_dim is None else self.search_queries(target).squeeze(1)

    def _joined(self, read: _Read, scores: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The MLP's input (B, its width), and the first states of DIEN's block (T, S), if any.

        Hard search has no `scores`.
        """
        if scores is None:
            allowed, scores = read.long.present & read.matches, torch.zeros(read.matches.shape, device=self.device)
        else:
            allowed = read.long.present
        places, chosen = latest_best(scores, allowed, self.settings.top_k)
        kept = read.long.take(places, chosen)
        parts = [read.target, self._exact(read, kept, places).flatten(1)]
        states = None
        if self.settings.short == "din":
            weights = self.unit(read.short, read.target, read.events)
            parts.append(read.events.weighted_sum(read.short, weights))
        elif self.settings.short == "dien":
            states = self.evolution.interests(read.short, read.events)
            parts.append(self.evolution(states, read.target, read.events))
        return torch.cat([*parts, read.side], dim=1), states

    def _exact(self, read: _Read, kept: History, places: Tensor) -> Tensor:
        """The exact search unit's output for the events kept: (B, H or 2, their width)."""
        if self.settings.exact == "din":
            return kept.attend(read.target.unsqueeze(1), mean=True)
        for table, buckets in zip(self.gaps, read.gaps, strict=True):
            kept = kept.beside(table, buckets.gather(1, places))
        return kept.attend(self.exact_queries(read.target))


def _with_a_place(batch: Batch, histories: Histories) -> Batch:
    """The batch with at least one place in its histories, because an empty maximum fails."""
    if torch.compiler.is_compiling() or batch[histories.mark].shape[1]:
        return batch
    lists = (*histories.features, *histories.negatives.values())
    return {**batch, **{name: F.pad(batch[name], (0, 1)) for name in lists if name in batch}}


def _buckets(gaps: Tensor, most: int) -> Tensor:
    """The bucket of each event's time gap."""
    return (gaps / GAP_STEP).clamp(0, most - 1).long()


def _check(ids: Batch, histories: Mapping[str, str], num_rows: Mapping[str, int]) -> None:
    """Refuse ids outside their tables, where nothing else does.

    Raises:
        DataError: naming every feature.
    """
    problems = []
    for name, own in ids.items():
        if own.numel() and not 0 <= int(own.min()) <= int(own.max()) < num_rows[name]:
            problems.append(
                f"feature '{histories[name]}': ids from {int(own.min())} to {int(own.max())}; "
                f"its table has rows 0 to {num_rows[name] - 1}"
            )
    if problems:
        raise DataError.of("a batch holds ids outside their tables", problems)


@dataclass(frozen=True)
class _Read:
    """A batch's vectors."""

    target: Tensor
    """(B, D)."""
    side: Tensor
    """The other features (B, their width)."""
    long: History
    """The history that is searched and attended to."""
    matches: Tensor
    """The places of the long history with the target's id (B, L)."""
    gaps: Sequence[Tensor]
    """The bucket of each time gap (B, L)."""
    events: Events
    short: Tensor
    """(T, D)."""
    sampled: Tensor
    """(T, D)."""


@dataclass(frozen=True)
class _Asked:
    """The part of requests in every pair."""

    vectors: Tensor
    """The long histories (R, L, D)."""
    kept: Tensor
    """With embeddings of their time gaps (R, L, Z)."""
    present: Tensor
    """(R, L)."""
    ids: Tensor
    """The ids that hard search compares (R, L)."""
    events: Events
    """The latest events."""
    short: Tensor
    """Their vectors (T, D), or DIEN's first states (T, S)."""
    side: Tensor
    """The requests' other features (R, their width)."""


def _softmax(scores: Tensor, kept: Tensor) -> Tensor:
    """The softmax over the last dimension among `kept`; zeros if none is kept."""
    return torch.where(kept, scores, torch.finfo(scores.dtype).min).softmax(-1) * kept


@dataclass(frozen=True)
class _Windows:
    """The places of a history that are searched, and the latest ones."""

    long: Tensor
    """(B, up to L): events before the latest ones."""
    short: Tensor
    """(B, short_length): the latest events that exist."""
    places: Tensor
    """(B, short_length): their places, the oldest first."""

    @classmethod
    def of(cls, present: Tensor, settings: SimSettings) -> _Windows:
        """Cut before the latest `short_length` events, ignoring places without an event (id 0)."""
        last, length = (0 if settings.short == "none" else settings.short_length), present.shape[1]
        so_far = present.cumsum(1)  # events up to each place
        events = so_far[:, -1:]
        # The numbers of the latest events, counted from 1; numbers above `events` have no event.
        number = events.clamp(min=last) - last + 1 + torch.arange(last, device=present.device)
        short = number <= events
        places = _first_at_least(so_far, number).clamp(max=length - 1)
        start = (events - last).clamp(min=0)
        long = present & (so_far <= start)
        if settings.long_length is not None:
            long = long & (so_far > start - settings.long_length)
        if not torch.compiler.is_compiling():  # no row searches later places
            long = long[:, : max(length - last, 0)]
        return cls(long, short, places)

    def latest(self, batch: Batch, names: Sequence[str]) -> Batch:
        """Ids at the latest places (B, short_length)."""
        return {name: batch[name].gather(1, self.places).long() for name in names}


def _first_at_least(ascending: Tensor, wanted: Tensor) -> Tensor:
    """The first place of each row (B, L) with at least the number `wanted` (B, n); L if there is none."""
    if torch.compiler.is_compiling():  # exporters know no search
        return (ascending.unsqueeze(1) < wanted.unsqueeze(2)).sum(2)
    return torch.searchsorted(ascending, wanted)


# --- settings that a specification decides on -------------------------------------------------------------------------


def _auxiliary_weight(settings: SimSettings, *, has_negatives: bool) -> float:
    """The auxiliary loss's weight.

    Raises:
        SettingsError: if one is asked for that can't be.
    """
    if settings.auxiliary is None:
        return 1.0 if has_negatives and settings.short == "dien" else 0.0
    if settings.auxiliary and settings.short != "dien":
        raise SettingsError(
            f"sim: auxiliary is {settings.auxiliary}, and short is '{settings.short}'; that loss is of the states of "
            "DIEN's block, so set short to dien, or auxiliary to 0"
        )
    if settings.auxiliary and not has_negatives:
        raise SettingsError(
            f"sim: auxiliary is {settings.auxiliary}, and no feature plays the role 'negative_history', which that "
            "loss tells the history from; prepare the dataset with --set negative_history=true, or set auxiliary to 0"
        )
    return settings.auxiliary


def _hard_feature(settings: SimSettings, pairs: Sequence[str]) -> str:
    """The item feature that hard search compares.

    Raises:
        SettingsError: if it has no history.
    """
    if settings.hard_feature is None:
        return pairs[1] if len(pairs) > 1 else pairs[0]
    if settings.hard_feature not in pairs:
        raise SettingsError.of(
            "sim: hard_feature", [unknown("item feature with a history", settings.hard_feature, pairs)]
        )
    return settings.hard_feature
