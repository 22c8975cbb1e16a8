"""An evaluation's question: a split, its settings, and the data that the protocols share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Literal, get_args

import numpy as np
from pydantic import Field

from recspec import config
from recspec.errors import SettingsError, SpecError, listed, unknown
from recspec.evaluation.candidates import draw_candidates
from recspec.evaluation.interactions import Interactions, positives
from recspec.evaluation.rows import Ids, Rows, group_of, id_feature, read_rows
from recspec.metrics import Ranking
from recspec.spec import FeatureSpec

ProtocolName = Literal["rows", "sampled", "full"]
PROTOCOLS: tuple[ProtocolName, ...] = get_args(ProtocolName)

EARLIER: Mapping[str, tuple[str, ...]] = {
    "train": (),
    "valid": ("train",),
    "validation": ("train",),
    "val": ("train",),
    "test": ("train", "valid", "validation", "val"),
}
"""Split -> the earlier splits, whose positives count as known."""

DEFAULT_KS = (10,)
"""Cut-offs if neither the user nor the dataset names any."""

SHORT_KS = (5, 1)
"""If every list is shorter than `DEFAULT_KS`, the first of these below the longest list replaces it."""


class EvaluateSettings(config.Settings):
    """Settings of an evaluation."""

    ks: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        default=None,
        min_length=1,
        description="cut-offs, as in HR@10; by default the dataset's metadata.cut_offs, else 10, or 5 or 1 if every "
        "list of candidates is shorter",
    )
    num_negatives: int = Field(default=99, ge=1, description="negatives drawn for each user, if the split lists none")
    seed: int = Field(default=0, ge=0, description="seed of the drawn negatives")


class Question:
    """A split, the requested protocols, and the data that the protocols share, read once."""

    def __init__(
        self,
        spec: FeatureSpec,
        split: str,
        protocols: Sequence[str] | None,
        settings: EvaluateSettings,
        *,
        reads: Collection[str] | None = None,
    ) -> None:
        self.spec, self.split, self.settings = spec, split, settings
        self.reads = reads
        """Features that the scores depend on; None means all."""
        self.requested = protocols or None
        self.ks = settings.ks or _cut_offs(spec)
        held = spec.columns(split)  # an unknown split is an error before an unknown protocol is
        if spec.label not in held:
            raise SpecError(
                f"{spec.folder}: split '{split}' does not hold the label '{spec.label}', so it has no metrics; "
                "`recspec predict` writes its probabilities"
            )
        strange = [name for name in protocols or () if name not in PROTOCOLS]
        if strange:
            raise SettingsError(f"protocols: {unknown('protocol', strange, PROTOCOLS)}")
        ranks_own_groups = spec.group is not None and "full" not in (protocols or ())
        if protocols and set(protocols) & {"sampled", "full"} and not ranks_own_groups:
            spec.require(("user", "item"), f"protocol {listed(name for name in protocols if name != 'rows')}")

    def under(self, protocols: Sequence[str]) -> Question:
        """The same question under other protocols, without reading again."""
        other = Question(self.spec, self.split, protocols, self.settings, reads=self.reads)
        for name in ("rows", "candidates", "candidate_ids", "seen", "truth"):
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other

    def choose(self) -> tuple[tuple[ProtocolName, ...], dict[str, str]]:
        """The protocols to use, and the reason for each protocol left out of an automatic choice."""
        if self.requested is not None:
            return tuple(name for name in PROTOCOLS if name in self.requested), {}
        why: dict[str, str] = {}
        requests = self.spec.role("context") + self.spec.role("history")
        histories = [name for name in self.spec.role("history") if self.reads is None or name in self.reads]
        if not self.rows.has_both_classes:
            why["rows"] = "the split's rows are of one class"
        if not (self.has_users and self.has_items):
            why["full"] = self.lacks
            if self.spec.group is None:
                why["sampled"] = f"{self.lacks}, and no group"
        elif requests and not self.spec.has_series:
            why["full"] = f"requests differ by {listed(requests)}; ask for it with the protocol's name"
            if self.spec.group is None:
                why["sampled"] = "the dataset names no group; ask for it with the protocol's name"
        elif histories:
            why["full"] = (
                f"it weighs every item against {listed(histories)} of each user, which takes long; ask for it with the "
                "protocol's name"
            )
        if "sampled" not in why and not self.lists_candidates and not (self.has_users and self.has_items):
            why["sampled"] = f"the split lists no negatives, and {self.lacks} to draw them for"
        groups = self.rows.groups
        any_group_of_two = groups is not None and len(np.unique(groups)) < len(groups)
        if "sampled" not in why and self.lists_candidates and not any_group_of_two:
            why["sampled"] = "every group is a single row, so there is nothing to rank"
        return tuple(name for name in PROTOCOLS if name not in why), why

    @property
    def has_users(self) -> bool:
        """Whether a feature identifies users."""
        return id_feature(self.spec, "user") is not None

    @property
    def has_items(self) -> bool:
        """Whether a feature identifies items."""
        return id_feature(self.spec, "item") is not None

    @property
    def lacks(self) -> str:
        """The missing id features, as a message names them."""
        absent = {"user": not self.has_users, "item": not self.has_items}
        return f"the dataset has no {' and no '.join(role for role in absent if absent[role])}"

    @property
    def lists_candidates(self) -> bool:
        """Whether the split's own rows are the candidates of protocol `sampled`."""
        return group_of(self.spec, self.split) is not None and self.rows.has_both_classes

    def cut_offs(self, ranking: Ranking) -> tuple[int, ...]:
        """The k to report; default cut-offs are made shorter than the longest list."""
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
        unknown_items = np.flatnonzero(items < self.first_item)
        if len(unknown_items):
            items = items.astype(np.int64)
            items[unknown_items] = -1 - np.arange(len(unknown_items))
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
        return tuple(name for name in EARLIER.get(self.split, ("train",)) if name in self.spec.splits)

    @cached_property
    def seen(self) -> Interactions:
        """Items that each user acted on before the split."""
        return positives(self.spec, self.before)

    @cached_property
    def truth(self) -> Interactions:
        """The split's positives without unknown items, which no ranking of items can hold."""
        rows = self.rows
        assert rows.users is not None
        assert rows.items is not None
        known = rows.labels & (rows.items >= self.first_item)
        return Interactions.from_pairs(
            rows.users[known],
            rows.items[known],
            num_users=self.spec.num_ids(self.spec.user_id),
            num_items=self.spec.num_ids(self.spec.item_id),
        )

    @cached_property
    def candidates(self) -> Rows:
        """The rows of protocol `sampled`: the split's own rows, or candidates drawn for its positives."""
        if self.lists_candidates:
            return self.rows
        self.spec.require(
            ("user", "item"), f"protocol 'sampled' on the split '{self.split}', which lists no negatives,"
        )
        return draw_candidates(
            self.truth,
            self.seen,
            num_negatives=self.settings.num_negatives,
            first_item=self.first_item,
            seed=self.settings.seed,
        )


def _cut_offs(spec: FeatureSpec) -> tuple[int, ...]:
    """The cut-offs in the dataset's metadata, or the default."""
    named = spec.metadata.get("cut_offs")
    return tuple(int(k) for k in named) if isinstance(named, (list, tuple)) else DEFAULT_KS
