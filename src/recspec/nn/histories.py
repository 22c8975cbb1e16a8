"""The features that describe a user's events, and their pairs with the features of an item.

Shapes: B rows; T events; D width of an event's vector.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recspec.batch import Batch
from recspec.errors import SpecError, listed
from recspec.nn.embeddings import Embeddings
from recspec.nn.events import Events, events_of
from recspec.spec import FILE_NAME, FeatureSpec


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
        numbers = tuple(name for name in spec.role("history") if not spec.features[name].is_categorical)
        self.pairs: Mapping[str, str] = _paired(spec, "history")
        """Item feature -> its history."""
        self.negatives: Mapping[str, str] = _paired(spec, "negative_history", self.pairs)
        """Item feature -> the sampled ids for its history; empty if the dataset has none."""
        self.time_gaps = numbers
        """Numerical features of an event: ln(1 + time to the row)."""
        own = [name for name in self.pairs if name == spec.item_id]
        self.mark = self.pairs[own[0] if own else next(iter(self.pairs))]
        """The history whose nonzero ids mark events."""
        self.spec = _sharing(
            spec, {**{h: i for i, h in self.pairs.items()}, **{n: i for i, n in self.negatives.items()}}
        )
        """The specification for `Embeddings`: each history has its item feature's vocabulary."""
        self._shifts = {name: self.spec.shift(name) - spec.shift(name) for name in self.pairs}

    @property
    def features(self) -> tuple[str, ...]:
        """The histories and gaps that `vectors` reads, without sampled ids."""
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
        return events_of(present)

    def target(self, batch: Batch) -> Batch:
        """The ids (B,) of the item features with histories, numbered as in their tables."""
        return {name: batch[name] + shift if (shift := self._shifts[name]) else batch[name] for name in self.pairs}

    def vectors(
        self,
        embeddings: Embeddings,
        batch: Batch,
        events: Events | None = None,
        *,
        target: bool = True,
        sampled: bool = False,
        others: Collection[str] = (),
    ) -> Vectors:
        """The requested vectors, from one lookup: the fewest gathers and one gradient a table.

        Args:
            embeddings: tables made from `spec`, for the item features with histories and the `others`.
            batch: the ids.
            events: events to look up; None for none.
            target: whether to look up the item.
            sampled: whether to look up the sampled ids of the events.
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
    """The vectors of `Histories.vectors`; None for what was not requested.

    D is the sum of the widths of the features with histories, in the order of `embeddings.order(pairs)`.
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
    """Item feature -> its feature in another role, by vocabulary or else by order.

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
