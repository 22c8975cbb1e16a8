"""SIM: what concerns the target is searched in a long history, and attended to exactly.

Pi et al.: Search-based User Interest Modeling with Lifelong Sequential Behavior Data for Click-Through Rate Prediction,
CIKM 2020. The latest events are a short history of their own, which DIEN's or DIN's block reads.

Shapes: B rows; L the longest history of a batch; D width of an event's vector, Z with its gap; S states' width; T short
events; k events kept by the search; H heads; R requests (users); N items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn

from recspec import config
from recspec.batch import Batch, num_rows
from recspec.errors import DataError, SettingsError, unknown
from recspec.feature_spec import FeatureSpec
from recspec.layers import Embeddings
from recspec.models.base import Model
from recspec.models.dien import DienSettings, Evolution
from recspec.models.din import Head, Inputs, OneGradient, SequenceSettings, split
from recspec.search import (
    Column,
    History,
    PaddedHistory,
    StoredHistory,
    TargetQueries,
    latest_best,
)
from recspec.sequences import AttentionUnit, Events, NextEvent, events_of

GAP_STEP = 0.5
"""Width of a bucket of gaps, which are ln(1 + days): the borders lie at 0.6, 1.7, 3.5, 6.4, 11, 19, 32, 54 days, ..."""

PAIRS = 1 << 12
"""Pairs of a request and an item that `score_items` forms at once: their short histories stay within 100 MB."""

SCORES = 1 << 22
"""Numbers of one for each pair and event that `score_items` forms at once: 16 MB a head."""


class SimSettings(SequenceSettings):
    """Sizes of SIM; the defaults are those published for Amazon Books, with the paper's exact search."""

    search: Literal["soft", "hard"] = Field(
        "soft",
        description="soft: the events whose vectors have the highest products with the target's; hard: the latest of "
        "those that share an id with it",
    )
    hard_feature: str | None = Field(
        None, description="item feature that hard search compares; null: the second that has a history, else the first"
    )
    search_dim: int | None = Field(
        None, ge=1, description="width that soft search projects target and events to; null: their vectors as they are"
    )
    search_hidden: tuple[int, ...] = Field((200,), min_length=1, description="widths of the soft search's own MLP")
    top_k: int = Field(50, ge=1, description="events that the search keeps")
    short_length: int = Field(10, ge=0, description="latest events, left to the short part; the others are searched")
    long_length: int | None = Field(
        None, ge=0, description="latest events before those of the short part that are searched; null: all"
    )
    short: Literal["dien", "din", "none"] = Field(
        "dien", description="what reads the latest events; none: they are searched with all others"
    )
    exact: Literal["multihead", "din"] = Field(
        "multihead",
        description="attention over the events kept: of several heads, over vectors and gaps; or, as published, one "
        "product with the target, and their mean",
    )
    heads: int = Field(4, ge=1, description="heads of `exact: multihead`")
    gap_buckets: int = Field(
        16, ge=1, description="embeddings of the gap between an event and the row, half a unit of ln(1 + days) each"
    )
    gru_hidden: int | None = Field(
        None, ge=1, description="width of the states of DIEN's recurrences; null takes that of an event. Published: 96"
    )
    auxiliary: float | None = Field(
        None,
        ge=0,
        description="weight of DIEN's auxiliary loss, which needs the role negative_history; null is 1 where short is "
        "dien and a dataset has it, and 0 elsewhere",
    )
    auxiliary_hidden: tuple[int, ...] = Field(
        (100, 50), min_length=1, description="widths of the auxiliary network's hidden layers"
    )
    alpha: float = Field(0.5, ge=0, description="weight of the soft search's own loss")
    beta: float = Field(0.5, gt=0, description="weight of the loss of the logit")

    @field_validator("search_hidden", "auxiliary_hidden")
    @classmethod
    def _positive_too(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        return cls._positive(widths)


class Sim(Model):
    """Search-based interest model: a general search unit (GSU) keeps k events of a long history, an exact one attends.

    Soft search scores an event by the product of its vector with the target's. The k best are a choice, through which
    no gradient flows: what makes the scores good is the GSU's own loss, of an MLP over all events' sum weighted by the
    softmax of their scores (section 3.1 of the paper; its sum has the scores themselves, the published program their
    softmax). Tables are shared, so both losses move them. Hard search has no GSU to train.

    A row's logit depends on its own events alone, in whatever company and with whatever padding; without events the
    sums are zeros. Equal scores: the later event is kept.
    """

    name: ClassVar[str] = "sim"
    steady_shapes: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ("item", "history", "label")
    Settings: ClassVar[type[config.Settings]] = SimSettings
    settings: SimSettings

    def __init__(self, spec: FeatureSpec, settings: SimSettings) -> None:
        super().__init__(spec, settings)
        self.inputs = Inputs(spec, settings, self.name)
        self.histories = self.inputs.histories
        self.hard_feature = _hard_feature(settings, tuple(self.histories.pairs))
        self.order = self.inputs.embeddings.order(tuple(self.histories.pairs))
        """The item features that have histories, as their vectors stand side by side in an event's."""
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
                for _ in self.histories.gaps
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
        """The inputs, the histories, and the gaps where they are read."""
        return (*self.inputs.features, *self._gap_names)

    def loss_features(self) -> tuple[str, ...]:
        """Those of `forward`, and the sampled ids where there is an auxiliary loss."""
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
        """alpha times the soft search's cross-entropy, beta times the logit's, DIEN's auxiliary loss: means, in nats.

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

        A request's events are looked up once, and multiplied with all items at once. The events that an item does not
        keep get no weight, so none is copied for a pair.
        """
        requests, candidates = num_rows(request), num_rows(items)
        compiling = torch.compiler.is_compiling()  # then all at once, whatever the number of items
        if not compiling and not (requests and candidates):
            return torch.zeros(requests, candidates, device=self.device)
        request = self._with_a_place(request)
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
        """What a block of requests brings to every pair."""
        windows = _Windows.of(request[self.histories.mark] != 0, self.settings)
        pairs, length = self.histories.pairs, windows.long.shape[1]
        long = {name: request[history][:, :length].long() for name, history in pairs.items()}
        vectors = self.inputs.embeddings({name: ids.flatten() for name, ids in long.items()}, pairs)
        vectors = vectors.view(*windows.long.shape, self.inputs.event_dim)
        gaps = [self._bucket(request[name])[:, :length] for name in self._gap_names]
        with_gaps = [F.embedding(own, table) for own, table in zip(gaps, self.gaps if gaps else (), strict=True)]
        events = events_of(windows.short)
        latest = {**request, **windows.latest(request, list(pairs.values()))}
        read = self.inputs(latest, events, target=False)
        states = self.evolution.interests(read.events, events) if self.settings.short == "dien" else read.events
        kept = torch.cat([vectors, *with_gaps], dim=2)
        return _Asked(vectors, kept, windows.long, long[self.hard_feature], events, states, read.side)

    def _made(self, ours: _Asked, target: Tensor, ids: Tensor) -> Tensor:
        """What is made of some requests' histories for some items: (R, N, made_dim)."""
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
        """What is made of the latest events of each pair (R, N, its width)."""
        times, there = target.shape[0], ours.events.there  # an exporter leaves shapes open, and fixes len()
        events = events_of(there.repeat_interleave(times, dim=0))
        short = events.flat(ours.events.padded(ours.short).repeat_interleave(times, dim=0))
        own = target.repeat(len(there), 1)
        made = (
            self.evolution(short, own, events) if self.settings.short == "dien" else self._interest(short, own, events)
        )
        return made.view(len(there), times, -1)

    # --- reading a batch -----------------------------------------------------------------------------------------

    def _read(self, batch: Batch, *, sampled: bool) -> _Read:
        """A batch's vectors, from one lookup; those of a long history are read where they stand, on a CPU."""
        batch = self._with_a_place(batch)
        windows = _Windows.of(batch[self.histories.mark] != 0, self.settings)
        target, pairs = self.histories.target(batch), self.histories.pairs
        latest = windows.latest(batch, [*pairs.values(), *(self.histories.negatives.values() if sampled else ())])
        events = events_of(windows.short)
        long = {name: batch[history][:, : windows.long.shape[1]].long() for name, history in pairs.items()}
        parts = [target]
        if self.settings.short != "none":
            parts.append({name: events.flat(latest[history]) for name, history in pairs.items()})
            if sampled:
                negatives = self.histories.negatives
                parts.append({name: events.flat(latest[negatives[name]]) for name in pairs})
        stored, tables = self._reads_tables(), self.inputs.tables(more=2 * len(pairs))
        if not stored:
            parts.append({name: ids.flatten() for name, ids in long.items()})
        ids = {name: torch.cat([part[name] for part in parts]) for name in pairs}
        beside, found = tables.beside(batch, self.inputs.others, ids)
        vectors = list(torch.split(found, [part[self.order[0]].shape[0] for part in parts]))
        searched, attended = self._histories(long, windows.long, tables, None if stored else vectors.pop())
        side = [vectors[0].new_zeros(vectors[0].shape[0], 0) if beside is None else beside]
        side += [batch[name].unsqueeze(1) for name in self.inputs.numbers]
        return _Read(
            target=vectors[0],
            side=torch.cat(side, dim=1),
            long=searched,
            exact=attended,
            matches=long[self.hard_feature] == target[self.hard_feature].unsqueeze(1),
            gaps=[self._bucket(batch[name])[:, : windows.long.shape[1]] for name in self._gap_names],
            events=events,
            short=vectors[1] if self.settings.short != "none" else vectors[0][:0],
            sampled=vectors[2] if sampled else vectors[0][:0],
        )

    @property
    def _gap_names(self) -> tuple[str, ...]:
        return self.histories.gaps if self.settings.exact == "multihead" else ()

    def _with_a_place(self, batch: Batch) -> Batch:
        """The batch, its histories with one place at least: a maximum of nothing is none."""
        if torch.compiler.is_compiling() or batch[self.histories.mark].shape[1]:
            return batch
        lists = (*self.histories.features, *self.histories.negatives.values())
        return {**batch, **{name: F.pad(batch[name], (0, 1)) for name in lists if name in batch}}

    def _bucket(self, gap: Tensor) -> Tensor:
        """Which gap embedding each event takes."""
        return (gap / GAP_STEP).clamp(0, self.settings.gap_buckets - 1).long()

    def _reads_tables(self) -> bool:
        """Whether events are read where they stand in their table: it lies here, and nothing else moves it."""
        key = str(self.settings.embedding_dim)
        embeddings = self.inputs.embeddings
        store = embeddings.stores[key]
        updated = key in embeddings.updates and self.training and torch.is_grad_enabled()
        here = store.device.type == "cpu" and store.dtype == torch.float32 and key not in embeddings.fetch
        return here and not updated and not torch.compiler.is_compiling()

    def _histories(
        self, ids: Batch, present: Tensor, tables: Embeddings | OneGradient, vectors: Tensor | None
    ) -> tuple[History, History]:
        """The long history, to search and to attend to; where it stands in its tables, or of vectors (B L, D)."""
        if vectors is not None:
            padded = PaddedHistory(vectors.view(*present.shape, self.inputs.event_dim), present)
            return padded, padded
        self._check(ids)
        searched, attended = (StoredHistory(self._columns(ids, tables), present) for _ in range(2))
        return searched, attended

    def _columns(self, ids: Batch, tables: Embeddings | OneGradient) -> tuple[Column, ...]:
        """The store's rows that events take."""
        key, embeddings = str(self.settings.embedding_dim), self.inputs.embeddings
        parts = {name: slice(first := embeddings.first_row[name], first + embeddings.num_rows[name]) for name in ids}
        if isinstance(tables, OneGradient):
            return tuple(Column(next(tables.stores), ids[name], parts[name], True) for name in self.order)
        store, sparse = embeddings.stores[key], key in embeddings.sparse
        return tuple(Column(store, ids[name], parts[name], sparse) for name in self.order)

    def _check(self, ids: Batch) -> None:
        """Refuse ids outside their tables, where nothing else would.

        Raises:
            DataError: naming every feature.
        """
        num_rows = self.inputs.embeddings.num_rows
        problems = []
        for name, own in ids.items():
            if own.numel() and not 0 <= int(own.min()) <= int(own.max()) < num_rows[name]:
                problems.append(
                    f"feature '{self.histories.pairs[name]}': ids from {int(own.min())} to {int(own.max())}; "
                    f"its table has rows 0 to {num_rows[name] - 1}"
                )
        if problems:
            raise DataError.of("a batch holds ids outside their tables", problems)

    # --- from vectors to logits ----------------------------------------------------------------------------------

    def _search_query(self, target: Tensor) -> Tensor:
        """What soft search multiplies events by: (B, D)."""
        return target if self.settings.search_dim is None else self.search_queries(target).squeeze(1)

    def _joined(self, read: _Read, scores: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the MLP reads (B, its width), and the first states of DIEN's block (T, S), if any; hard search has no
        scores.
        """
        if scores is None:
            allowed, scores = read.long.present & read.matches, torch.zeros(read.matches.shape, device=self.device)
        else:
            allowed = read.long.present
        places, chosen = latest_best(scores, allowed, self.settings.top_k)
        kept = read.exact.take(places, chosen)
        parts = [read.target, self._exact(read, kept, places).flatten(1)]
        states = None
        if self.settings.short == "din":
            parts.append(self._interest(read.short, read.target, read.events))
        elif self.settings.short == "dien":
            states = self.evolution.interests(read.short, read.events)
            parts.append(self.evolution(states, read.target, read.events))
        return torch.cat([*parts, read.side], dim=1), states

    def _interest(self, happened: Tensor, target: Tensor, events: Events) -> Tensor:
        """DIN's block: the sum of the events, weighted by the attention unit (B, D)."""
        return events.weighted_sum(happened, self.unit(happened, target, events))

    def _exact(self, read: _Read, kept: History, places: Tensor) -> Tensor:
        """What the exact search unit makes of the events kept: (B, H or 2, their width)."""
        if self.settings.exact == "din":
            return kept.attend(read.target.unsqueeze(1), mean=True)
        for table, buckets in zip(self.gaps, read.gaps, strict=True):
            kept = kept.beside(table, buckets.gather(1, places))
        return kept.attend(self.exact_queries(read.target))


@dataclass(frozen=True)
class _Read:
    """A batch's vectors."""

    target: Tensor
    """(B, D)."""
    side: Tensor
    """What else is known (B, its width)."""
    long: History
    """What is searched."""
    exact: History
    """The same, of which the best are attended to."""
    matches: Tensor
    """Which places of the long history share the target's id (B, L)."""
    gaps: Sequence[Tensor]
    """Which row of its table each gap takes (B, L)."""
    events: Events
    short: Tensor
    """(T, D)."""
    sampled: Tensor
    """(T, D)."""


@dataclass(frozen=True)
class _Asked:
    """What requests bring to every pair."""

    vectors: Tensor
    """The long histories (R, L, D)."""
    kept: Tensor
    """With their gaps (R, L, Z)."""
    present: Tensor
    """(R, L)."""
    ids: Tensor
    """Of the feature that hard search compares (R, L)."""
    events: Events
    """The latest ones."""
    short: Tensor
    """Their vectors (T, D), or DIEN's first states (T, S)."""
    side: Tensor
    """What else the requests bring (R, its width)."""


def _softmax(scores: Tensor, kept: Tensor) -> Tensor:
    """Shares over the last dimension of those that are kept; zeros where none is."""
    return torch.where(kept, scores, torch.finfo(scores.dtype).min).softmax(-1) * kept


@dataclass(frozen=True)
class _Windows:
    """Which places of a history are searched, and which are the latest."""

    long: Tensor
    """(B, up to L): events before the latest ones."""
    short: Tensor
    """(B, short_length): which of the latest events are there."""
    places: Tensor
    """(B, short_length): where those stand, the oldest first."""

    @classmethod
    def of(cls, present: Tensor, settings: SimSettings) -> _Windows:
        """Cut before the latest `short_length` events; places without an event (id 0) count nowhere."""
        last, length = (0 if settings.short == "none" else settings.short_length), present.shape[1]
        so_far = present.cumsum(1)  # events up to each place
        events = so_far[:, -1:]
        # The latest events by their number, counted from 1; there is none of a number above `events`.
        number = events.clamp(min=last) - last + 1 + torch.arange(last, device=present.device)
        short = number <= events
        places = _first_at_least(so_far, number).clamp(max=length - 1)
        start = (events - last).clamp(min=0)
        long = present & (so_far <= start)
        if settings.long_length is not None:
            long = long & (so_far > start - settings.long_length)
        if not torch.compiler.is_compiling():  # what comes after is nobody's
            long = long[:, : max(length - last, 0)]
        return cls(long, short, places)

    def latest(self, batch: Batch, names: Sequence[str]) -> Batch:
        """Ids at the latest places (B, short_length)."""
        return {name: batch[name].gather(1, self.places).long() for name in names}


def _first_at_least(ascending: Tensor, wanted: Tensor) -> Tensor:
    """The first place of each row (B, L) that holds a number of at least that wanted (B, n), L where none does."""
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
