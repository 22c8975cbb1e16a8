"""An evaluation's task: a split, its settings, and the data that the protocols share."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from recspec.base import config
from recspec.base.errors import SettingsError, SpecError, listed, unknown
from recspec.evaluation.interactions import (
    Rows,
    disliked_items,
    group_of,
    positives,
    read_events,
    read_rows,
    seen_items,
)
from recspec.feature_spec import FOLD_IN, SIGNALS, FeatureSpec
from recspec.metrics import Ranking
from recspec.models import Ids, Interactions, ItemModel, UserEvents

ProtocolName = Literal["rows", "sampled", "full"]
PROTOCOLS: tuple[ProtocolName, ...] = get_args(ProtocolName)

EARLIER: Mapping[str, tuple[str, ...]] = {
    "train": (),
    FOLD_IN: ("train",),
    "test": ("train", "valid", "validation", "val", FOLD_IN, SIGNALS[0]),
}
"""Split -> the earlier splits, whose positives count as known; of any other split: train, and what is folded in."""

USERS_PER_DRAW = 4_096  # users whose negatives are drawn together: at most a few hundred MB of lookups
DEFAULT_KS = (10,)  # cut-offs if neither the user nor the dataset names any
SHORT_KS = (5, 1)  # if every list is shorter than `DEFAULT_KS`, the first of these below the longest list replaces it


MOST_PAIRS_OF_EVENTS = 1e10
"""Pairs of item and event beyond which `full` is left out by default: about 20 minutes of SIM on two cores."""


class EvaluateSettings(config.Settings):
    """Settings of an evaluation."""

    label: str | None = Field(
        default=None, description="label to measure, of several; by default the first that the model learned"
    )
    ks: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        default=None,
        min_length=1,
        description="cut-offs, as in HR@10; by default the dataset's metadata.cut_offs, else 10, or 5 or 1 if every "
        "list of candidates is shorter",
    )
    num_negatives: int = Field(default=99, ge=1, description="negatives drawn for each user, if the split lists none")
    users: int | None = Field(
        default=None, ge=1, description="number of users, drawn with the seed, whom protocol full ranks; by default all"
    )
    seed: int = Field(default=0, ge=0, description="seed of the drawn negatives, users and bootstrap samples")
    known: Literal["before", "train"] = Field(
        default="before",
        description="events of a user that are a model's input; before: those of every earlier split, so valid's event "
        "is an input on test; train: those of train alone",
    )
    cold: Literal["keep", "drop"] = Field(
        default="keep",
        description="items without a positive in the splits that trained the model; drop: they are neither targets nor "
        "candidates",
    )
    repeats: Literal["drop", "keep"] = Field(
        default="drop",
        description="items that the user acted on before; drop: they are neither targets nor candidates; keep: both",
    )
    bootstrap: int = Field(
        default=0, ge=0, le=100_000, description="bootstrap draws for an interval of each metric; 0 gives none"
    )
    slices: tuple[str, ...] = Field(
        default=(),
        description="slices for which metrics are measured apart: activity (users by their number of known events), "
        "popularity (head and tail items), or a feature or catalogue column of single values",
    )
    diversity: str | None = Field(
        default=None,
        description="item feature or catalogue column by which the diversity of lists is measured; by default the "
        "first categorical item feature beside the id",
    )


class EvaluationTask:
    """A split, the requested protocols, and the data that the protocols share, read once.

    One class because its answers depend on each other: what is excluded decides the targets, and these the users.
    """

    def __init__(
        self,
        spec: FeatureSpec,
        split: str,
        protocols: Sequence[str] | None,
        settings: EvaluateSettings,
        *,
        reads: Collection[str] | None = None,
        trained_on: Sequence[str] | None = None,
    ) -> None:
        self.spec, self.split, self.settings = spec, split, settings
        self.reads = reads  # features that the scores depend on; None means all
        self.trained_on = trained_on  # splits that trained the model; None: not known, and taken to be train
        self.requested = protocols or None
        absent = [role for role in ("user", "item") if spec.id_of(role) is None]
        self.lacks = f"the dataset has no {' and no '.join(absent)}" if absent else ""
        self.ks = settings.ks or cut_offs_of(spec)
        held = spec.columns(split)  # an unknown split is reported before an unknown protocol
        if spec.label not in held:
            raise SpecError(
                f"{spec.folder}: split '{split}' does not hold the label '{spec.label}', so it has no metrics; "
                "`recspec predict` writes its probabilities"
            )
        if settings.known == "train" and self.histories and self.known != self.before:
            raise SettingsError(
                f"known is train, and the model reads {listed(self.histories)} of each row, which hold the user's "
                f"events up to that row; leave known at before, or evaluate a model that reads no history"
            )
        if strange := [name for name in protocols or () if name not in PROTOCOLS]:
            raise SettingsError(f"protocols: {unknown('protocol', strange, PROTOCOLS)}")
        ranks_own_groups = spec.group is not None and "full" not in (protocols or ())
        if protocols and set(protocols) & {"sampled", "full"} and not ranks_own_groups:
            spec.require(("user", "item"), f"protocol {listed(name for name in protocols if name != 'rows')}")

    def with_protocols(self, protocols: Sequence[str]) -> EvaluationTask:
        """The same task under some of its protocols, without reading again."""
        other = copy.copy(self)
        other.requested = protocols or None
        return other

    def read_by(self, reads: Collection[str]) -> EvaluationTask:
        """The same task to a model of other features, without reading again."""
        other = copy.copy(self)
        other.reads = reads
        return other

    def choose(self) -> tuple[tuple[ProtocolName, ...], dict[str, str]]:
        """The protocols to use, and the reason for each protocol left out of an automatic choice."""
        if self.requested is not None:
            return tuple(name for name in PROTOCOLS if name in self.requested), {}
        why: dict[str, str] = {}
        spec, groups, ask = self.spec, self.rows.groups, "ask for it with the protocol's name"
        requests = spec.role("context") + spec.role("history")
        if not self.rows.has_both_classes:
            kind = "positive" if self.rows.labels.any() else "negative"
            why["rows"] = (
                f"every row of {self.split} is {kind}" if len(self.rows.labels) else f"{self.split} has no row"
            )
        if self.lacks:
            why["full"] = self.lacks
            if spec.group is None:
                why["sampled"] = f"{self.lacks}, and no group"
            elif not self.lists_candidates:
                why["sampled"] = f"the split lists no negatives, and {self.lacks} to draw them for"
        elif requests and not spec.has_series:
            why["full"] = f"requests differ by {listed(requests)}; {ask}"
            if spec.group is None:
                why["sampled"] = f"the dataset names no group; {ask}"
        elif (weighed := self.pairs_of_events) > MOST_PAIRS_OF_EVENTS:
            why["full"] = (
                f"it weighs every item against {listed(self.histories)} of each user, {weighed:.1e} pairs of item and "
                f"event, more than {MOST_PAIRS_OF_EVENTS:.0e}; {ask}, or for fewer users with --users"
            )
        if not self.lacks and ("full" not in why or not self.lists_candidates) and (nothing := self.no_target):
            why.setdefault("full", nothing)
            if spec.has_series or not self.lists_candidates:
                why.setdefault("sampled", nothing)
        if self.lists_candidates and (groups is None or len(np.unique(groups)) == len(groups)):
            why.setdefault("sampled", "every group is a single row, so there is nothing to rank")
        return tuple(name for name in PROTOCOLS if name not in why), why

    @property
    def histories(self) -> tuple[str, ...]:
        """The features of users' events that the scores depend on."""
        return tuple(name for name in self.spec.role("history") if self.reads is None or name in self.reads)

    @property
    def pairs_of_events(self) -> float:
        """About how many pairs of an item and an event of a user protocol `full` weighs, by a model of histories."""
        lengths = [length for name in self.histories if (length := self.spec.features[name].length) is not None]
        if not lengths:
            return 0.0
        users = self.ranked_users
        events = np.minimum(np.diff(self.seen.offsets)[users], max(lengths))
        return float(events.sum()) * self.truth.num_items

    @property
    def lists_candidates(self) -> bool:
        """Whether the split's own rows are the candidates of protocol `sampled`."""
        return group_of(self.spec, self.split) is not None and self.rows.has_both_classes

    def cut_offs(self, ranking: Ranking) -> tuple[int, ...]:
        """The k to report; default cut-offs are shortened below the longest list."""
        longest = int(ranking.num_candidates.max(initial=0))
        if self.settings.ks is not None or "cut_offs" in self.spec.metadata or max(self.ks) <= longest:
            return self.ks
        return (next((k for k in SHORT_KS if k < longest), 1),)

    @cached_property
    def candidate_ids(self) -> Ids | None:
        """Ids that identify the candidates of a group, each counted once; None if every row counts.

        Rows that differ by more than the item (for example, by the hour) are different candidates. So are unknown
        items, which share id 0.
        """
        items = self.candidates.items
        differ = self.spec.role("context") + self.spec.role("history")
        if items is None or (self.lists_candidates and differ and not self.spec.has_series):
            return None
        unknown_items = items < self.first_item
        if unknown_items.any():
            items = items.astype(np.int64)
            items[unknown_items] = -1 - np.arange(unknown_items.sum())
        return items

    @property
    def first_item(self) -> int:
        """The smallest item id: 1 if id 0 means unknown."""
        return int(self.spec.reserves_unknown(self.spec.item_id))

    @cached_property
    def rows(self) -> Rows:
        """Labels and ids of every row of the split."""
        return read_rows(self.spec, self.split)

    @property
    def before(self) -> tuple[str, ...]:
        """The splits that precede this one."""
        return tuple(name for name in EARLIER.get(self.split, ("train", FOLD_IN)) if name in self.spec.splits)

    @cached_property
    def seen(self) -> Interactions:
        """Items of which each user has positives before the split."""
        return positives(self.spec, self.before)

    @property
    def known(self) -> tuple[str, ...]:
        """The splits whose events are a model's input."""
        return (
            self.before if self.settings.known == "before" else tuple(x for x in self.before if x in ("train", FOLD_IN))
        )

    def known_interactions(self, model: ItemModel) -> Interactions:
        """The users' events that an item model may know: those of the splits `known`, each read once."""
        found = self.known_positives
        if model.reads_dislikes:
            found = replace(found, dislikes=disliked_items(self.spec, self.known, found))
        return replace(found, order=self._events_known) if model.reads_order else found

    @cached_property
    def dislikes(self) -> Interactions | None:
        """Items that users disliked in the split and could be recommended; None if the dataset keeps no dislikes."""
        found = disliked_items(self.spec, (self.split,), self.positives)
        return None if found is None else found.without(self.excluded)

    @cached_property
    def known_positives(self) -> Interactions:
        """Items that each user acted on in the splits `known`."""
        return self.seen if self.known == self.before else positives(self.spec, self.known)

    @cached_property
    def _events_known(self) -> UserEvents:
        return read_events(self.spec, self.known)

    @cached_property
    def excluded(self) -> Interactions:
        """Items of each user that are no candidates: those acted on before the split, unless repeats are kept.

        Events whose rating or weight left no row count too, but not those of an item that the split holds out. Of
        held-out users, only what is folded in counts (Liang et al., 2018).
        """
        if self.settings.repeats == "drop":
            all_seen = "seen" in self.spec.companions and FOLD_IN not in self.spec.splits
            seen = seen_items(self.spec, self.before) if all_seen else self.seen
            return seen.without(self.positives.without(self.seen))
        return replace(self.seen, offsets=np.zeros_like(self.seen.offsets), items=self.seen.items[:0])

    @cached_property
    def learned(self) -> Interactions:
        """The positives of the splits that trained the model."""
        splits = [split for split in self.trained_on or ("train",) if split in self.spec.splits]
        return positives(self.spec, splits)

    @cached_property
    def cold_items(self) -> NDArray[np.bool_]:
        """(N,) items that are neither targets nor candidates because no positive of the model's training has them."""
        if self.settings.cold == "keep":
            return np.zeros(self.spec.num_ids(self.spec.item_id), dtype=bool)
        cold: NDArray[np.bool_] = self.learned.counts == 0
        cold[: self.first_item] = True  # ids that stand for unknown items
        return cold

    @cached_property
    def truth(self) -> Interactions:
        """The positives to rank: by default those of items that the user did not act on before the split.

        A ranking of new items, as `recommend` gives, holds no other: repeats would be easy targets.
        """
        return self._without_cold(self.positives.without(self.excluded))

    def _without_cold(self, found: Interactions) -> Interactions:
        users, items = np.divmod(found.keys, found.num_items)
        warm = ~self.cold_items[items]
        if warm.all():
            return found
        return Interactions.from_pairs(users[warm], items[warm], num_users=found.num_users, num_items=found.num_items)

    @property
    def first_user(self) -> int:
        """The smallest user id: 1 if id 0 means unknown."""
        return int(self.spec.reserves_unknown(self.spec.user_id))

    @property
    def num_of_strangers(self) -> int:
        """Positive rows that are no targets because their user is unknown."""
        users = self.rows.users
        return 0 if users is None else int(np.count_nonzero(self.rows.labels & (users < self.first_user)))

    @property
    def num_of_unknown_items(self) -> int:
        """Positive rows of known users that are no targets because their item is unknown."""
        users, items = self.rows.users, self.rows.items
        if users is None or items is None:
            return 0
        strange = (users >= self.first_user) & (items < self.first_item)
        return int(np.count_nonzero(self.rows.labels & strange))

    @property
    def no_target(self) -> str:
        """Why no positive of the split is a target of protocol full or of drawn candidates; empty if one is."""
        if self.truth.num_pairs:
            return ""
        causes = {
            "of unknown users": self.num_of_strangers,
            "of unknown items": self.num_of_unknown_items,
            "of items that the user acted on before (--repeats keep ranks them)": self.num_repeats,
            "of items that training never saw (--cold keep ranks them)": self.num_cold,
        }
        told = ", ".join(f"{count:,} {what}" for what, count in causes.items() if count)
        return f"no positive of {self.split} can be ranked: {told}" if told else f"no row of {self.split} is positive"

    @property
    def num_repeats(self) -> int:
        """Positives that are no targets because the user acted on the item before."""
        return self.positives.num_pairs - self.positives.without(self.excluded).num_pairs

    @property
    def num_cold(self) -> int:
        """Positives that are no targets because training never saw the item."""
        return self.positives.num_pairs - self.num_repeats - self.truth.num_pairs

    @cached_property
    def repeats(self) -> NDArray[np.bool_]:
        """(rows,) which rows of a series are positives of items that the user acted on before the split.

        Rows with labels of their own, such as displays, are judged as they are: what was shown may repeat.
        """
        rows = self.rows
        found = np.zeros(len(rows.labels), dtype=bool)
        if self.spec.has_series and rows.users is not None and rows.items is not None:
            at = np.flatnonzero(rows.labels & (rows.items >= self.first_item))
            found[at] = self.excluded.contain(rows.users[at], rows.items[at])
        return found

    @cached_property
    def cold_rows(self) -> NDArray[np.bool_]:
        """(rows,) which rows of `candidates` hold an item that is dropped because training never saw it."""
        items = self.candidates.items
        if self.settings.cold == "keep" or items is None:
            return np.zeros(len(self.candidates.labels), dtype=bool)
        return self.cold_items[items]

    @cached_property
    def positives(self) -> Interactions:
        """The split's positives without unknown items, which no ranking of items can hold, and unknown users.

        Strangers share one id. As one user, they would have one list for all that any of them chose.
        """
        rows = self.rows
        assert rows.users is not None
        assert rows.items is not None
        known = rows.labels & (rows.items >= self.first_item) & (rows.users >= self.first_user)
        num_users, num_items = self.spec.num_ids(self.spec.user_id), self.spec.num_ids(self.spec.item_id)
        return Interactions.from_pairs(rows.users[known], rows.items[known], num_users=num_users, num_items=num_items)

    @cached_property
    def ranked_users(self) -> Ids:
        """The users of protocol `full`, ascending: those with positives, or a sample of them."""
        users, most = np.flatnonzero(np.diff(self.truth.offsets)), self.settings.users
        if most is None or len(users) <= most:
            return users
        return np.sort(np.random.default_rng(self.settings.seed).choice(users, most, replace=False))

    @cached_property
    def candidates(self) -> Rows:
        """The rows of protocol `sampled`: the split's own rows, or candidates drawn for its positives."""
        if self.lists_candidates:
            return self.rows
        self.spec.require(
            ("user", "item"), f"protocol 'sampled' on the split '{self.split}', which lists no negatives,"
        )
        num_negatives, seed = self.settings.num_negatives, self.settings.seed
        return draw_candidates(
            self.truth, self.excluded, num_negatives=num_negatives, first_item=self.first_item, seed=seed
        )


def cut_offs_of(spec: FeatureSpec) -> tuple[int, ...]:
    """The cut-offs of a dataset."""
    named = spec.metadata.get("cut_offs")
    return tuple(map(int, named)) if isinstance(named, (list, tuple)) else DEFAULT_KS


def list_metric(spec: FeatureSpec) -> str:
    """PROTOCOL/METRIC by which models that rank all items are chosen: NDCG@10; of held-out users at their longest list.

    Liang et al., 2018, choose by NDCG@100.
    """
    return f"full/ndcg@{max(cut_offs_of(spec)) if FOLD_IN in spec.splits else 10}"


def draw_candidates(
    truth: Interactions, seen: Interactions, *, num_negatives: int, first_item: int = 0, seed: int = 0
) -> Rows:
    """Each user's positives and `num_negatives` different items, drawn uniformly from items the user never acted on.

    A user with fewer such items gets them all. The same seed gives the same draws on any number of ranks.
    """
    active = np.flatnonzero(np.diff(truth.offsets))
    users, items, labels = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)], [np.zeros(0, bool)]
    for block in range(0, truth.num_users, USERS_PER_DRAW):
        here = active[np.searchsorted(active, block) : np.searchsorted(active, block + USERS_PER_DRAW)]
        rng = np.random.default_rng([seed, block])
        places, drawn = _draw_unseen(here, truth, seen, num_negatives, first_item, rng)
        rows, positive = truth.of(here)
        users += [here[rows], here[places]]
        items += [positive, drawn.astype(np.int32)]
        labels += [np.ones(len(rows), dtype=bool), np.zeros(len(places), dtype=bool)]
    who = np.concatenate(users)
    return Rows(np.concatenate(labels), who, who, np.concatenate(items))


def _draw_unseen(
    users: Ids, truth: Interactions, seen: Interactions, num_negatives: int, first_item: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(place in `users`, item) of the negatives: by rejection, or by permutation if few items are left."""
    num_items = truth.num_items
    taken = np.diff(seen.offsets)[users] + np.diff(truth.offsets)[users]
    roomy = num_items - first_item - taken >= 4 * num_negatives
    places, drawn = [], []
    for place in np.flatnonzero(~roomy):
        free = np.ones(num_items, dtype=bool)
        free[:first_item] = False
        for known in (seen, truth):
            free[known.of(users[place : place + 1])[1]] = False
        unseen = np.flatnonzero(free)
        chosen = np.sort(rng.choice(unseen, min(num_negatives, len(unseen)), replace=False))
        places.append(np.full(len(chosen), place))
        drawn.append(chosen)
    rows = np.flatnonzero(roomy)
    picks = np.full((len(rows), num_negatives), -1, dtype=np.int64)
    open_rows, open_columns = np.nonzero(picks < 0)
    while len(open_rows):
        picks[open_rows, open_columns] = rng.integers(first_item, num_items, len(open_rows))
        touched = np.unique(open_rows)
        picks[touched] = np.sort(picks[touched], axis=1)
        here, who = picks[touched], users[rows[touched]][:, None]
        bad = seen.contain(who, here) | truth.contain(who, here)
        bad[:, 1:] |= here[:, 1:] == here[:, :-1]
        where = np.nonzero(bad)
        open_rows, open_columns = touched[where[0]], where[1]
    places.append(np.repeat(rows, num_negatives))
    drawn.append(picks.ravel())
    return np.concatenate(places), np.concatenate(drawn)
