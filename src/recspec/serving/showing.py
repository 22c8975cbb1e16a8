"""How lists are made: by which model, under which experiment, and whether the best items or drawn ones are shown."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from recspec.base.errors import RequestError, SettingsError, listed, unknown
from recspec.inference import requests
from recspec.serving import json_types as types
from recspec.serving.journal_reader import JournalReader

if TYPE_CHECKING:
    from recspec.loop import Experiment, Exploration, Journal, Variant

MOST_KNOWN = 50_000
"""Users whose variants are kept in memory."""
NOT_SET = frozenset({"model", "version", "user", "items", "context", "surface", "shown", "liked"})
"""Fields of a request that no variant may set."""


class ServedModels(Protocol):
    """The models of a server, by name and version."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of loaded models."""

    def endpoint(self, name: str, version: str = "") -> Any:
        """A loaded model by its name."""


@dataclass(frozen=True)
class Showing:
    """What a server was started with."""

    exploration: Exploration | None = None
    experiments: tuple[Experiment, ...] = ()


@dataclass(frozen=True)
class Way:
    """One way to make a list."""

    model: str | None = None
    """None for the only model of the server."""
    version: str | None = None
    fields: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Fields of the request that it sets."""
    exploration: Exploration | None = None
    """None for the best items."""


class Ways:
    """Finds the ways to answer each user. Used on one event loop.

    A user who is in no experiment is answered as the controls are.
    """

    def __init__(self, showing: Showing, reader: JournalReader) -> None:
        self.experiments, self._reader = showing.experiments, reader
        self.journal: Journal | None = None
        controls = (each.variants[0].model for each in self.experiments)
        model = next((each for each in controls if each is not None), None)
        self.usual = Way(model, exploration=showing.exploration)
        self._known = OrderedDict[str, dict[str, str]]()
        self._fields: dict[tuple[str, str], dict[str, Any]] = {}
        """(experiment, variant) -> the checked fields that it sets."""

    def check(self, served: ServedModels) -> None:
        """Refuse experiments that the server can't run.

        Raises:
            SettingsError: with every problem.
        """
        problems: list[str] = []
        for each in self.experiments:
            for variant in each.variants:
                try:
                    self._fields[each.name, variant.name] = _fields_of(variant)
                    _check_model(self._changed(self.usual, each, variant), served)
                except RequestError as error:
                    problems += [f"{each.name}, variant '{variant.name}': {problem}" for problem in error.problems]
        SettingsError.refuse("experiment", problems)

    async def variants_of(self, user: str | int) -> dict[str, str]:
        """Experiment -> variant of a user."""
        if not self.experiments or self.journal is None:
            return {}
        from recspec.loop import assign, now_us, recorded_variants

        subject = str(user)
        known = self._known.get(subject)
        if known is None:
            found = await self._reader.ask(partial(recorded_variants, self.journal, self.experiments, subject))
            if found is None:
                return assign(self.experiments, subject, at=now_us())
            known = found
        made = assign(self.experiments, subject, at=now_us(), recorded=known)
        self._known[subject] = known | made
        self._known.move_to_end(subject)
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return made

    def of(self, variants: Mapping[str, str]) -> tuple[Way, ...]:
        """The way for a user with these variants; two if their lists are interleaved."""
        if not variants:
            return (self.usual,)
        from recspec.loop import INTERLEAVED

        way, mixed = self.usual, None
        for each in self.experiments:
            name = variants.get(each.name)
            if name == INTERLEAVED:
                mixed = mixed or each
            elif name is not None:
                way = self._changed(way, each, next(variant for variant in each.variants if variant.name == name))
        return (way,) if mixed is None else tuple(self._changed(way, mixed, each) for each in mixed.variants[:2])

    def named(self, variants: Mapping[str, str]) -> tuple[str | None, str | None]:
        """The experiment and the variant that an answer names: the one with interleaved lists, else the first."""
        if not variants:
            return None, None
        from recspec.loop import INTERLEAVED

        return min(variants.items(), key=lambda each: each[1] != INTERLEAVED)

    def _changed(self, way: Way, experiment: Experiment, variant: Variant) -> Way:
        is_other = variant.model is not None or variant.version is not None
        return replace(
            way,
            model=variant.model or way.model,
            version=variant.version if is_other else way.version,
            fields={**way.fields, **self._fields[experiment.name, variant.name]},
            exploration=variant.explore or way.exploration,
        )


def _fields_of(variant: Variant) -> dict[str, Any]:
    """The fields of a request that a variant sets. Raises RequestError with those that can't be read."""
    if wrong := sorted(NOT_SET & {*variant.request}):
        raise RequestError.of("request", [f"{name}: no variant may set it" for name in wrong])
    made = types.read_request(types.RecommendRequest, json.dumps(dict(variant.request)).encode())
    return {name: getattr(made, name) for name in variant.request}


def _check_model(way: Way, served: ServedModels) -> None:
    """Refuse a way whose model is not served, or can't recommend."""
    names = [name for name in served.names if not served.endpoint(name).is_raw]
    if way.model is None and len(names) > 1:
        raise RequestError(f"model: expected one of {listed(names)}")
    name = way.model or names[0]
    if name not in names:
        raise RequestError(f"model: {unknown('model', name, names)}")
    predictor = served.endpoint(name, way.version or "").model.opened.predictor
    if predictor is None or not requests.knows_users_and_items(predictor):
        raise RequestError(f"model '{name}' can't recommend: it knows no users and items")
