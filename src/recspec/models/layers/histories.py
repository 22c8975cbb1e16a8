"""The features that describe a user's events, and their pairs with the features of an item.

Shapes: B rows; T events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from recspec.base.errors import SpecError, listed
from recspec.feature_spec import FILE_NAME, FeatureSpec
from recspec.models.layers.batch import Batch
from recspec.models.layers.events import Events, events_of
from recspec.models.layers.kernels import Backend


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
    if problems:
        raise SpecError.of(str(spec.folder / FILE_NAME), problems)
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
