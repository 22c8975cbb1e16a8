"""The settings that a search varies, and their values."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from pydantic import BaseModel

from recspec.base import config
from recspec.base.errors import SettingsError
from recspec.models import find_model, on_meta_device
from recspec.training import Plan, TrainSettings

EXAMPLES = (
    "'[16, 32, 64]' for one of several, '0.0..0.5' for a range, '1e-4..1e-2 log' for one of magnitudes, "
    "'0 or 1e-6..1e-2 log' for one with zero, 'x0.1..x10 log' for one around the default"
)

ONLY_DRAWN = ("train.negatives", "train.negative_distribution", "train.popularity_power", "train.reject_positives")
"""Settings of drawn negatives: on rows with labels, drawing them would be another task."""


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class OneOf:
    """One of several values."""

    values: tuple[object, ...]

    def drawn(self, rng: np.random.Generator) -> object:
        """A value, each as likely as another."""
        return self.values[int(rng.integers(len(self.values)))]

    def distribution(self, optuna: Any) -> Any:
        """Optuna's form; the study holds each value as JSON."""
        return optuna.distributions.CategoricalDistribution([json.dumps(value) for value in self.values])

    def value(self, stored: object) -> object:
        """The value of what the study holds."""
        return json.loads(str(stored))

    def holds(self, stored: object) -> bool:
        """Whether a study may hold this."""
        return stored in [json.dumps(value) for value in self.values]

    def stored(self, value: object) -> object | None:
        """What the study holds for a value; None if it is not one of these."""
        return json.dumps(value) if self.holds(json.dumps(value)) else None

    def with_default(self, value: object) -> OneOf:
        """These values and the default."""
        return self if value is None or self.stored(value) is not None else OneOf((value, *self.values))

    def written(self) -> object:
        """The notation of the study and of `--space`."""
        return list(self.values)


@dataclass(frozen=True)
class Range:
    """A number from `low` to `high`, both included; whole if both are.

    `log` draws magnitudes evenly. `or_zero` adds a decade below `low`, whose numbers stand for 0.
    """

    low: float
    high: float
    log: bool = False
    or_zero: bool = False

    @property
    def lowest(self) -> float:
        """The lowest number of the study."""
        return self.low / 10 if self.or_zero else self.low

    @property
    def is_whole(self) -> bool:
        """Whether it draws whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int) and not self.or_zero

    def drawn(self, rng: np.random.Generator) -> object:
        """A number, drawn evenly, or with `log` evenly among magnitudes."""
        low, high = (math.log(each) if self.log else each for each in (self.lowest, self.high))
        number = math.exp(rng.uniform(low, high)) if self.log else float(rng.uniform(low, high))
        return round(number) if self.is_whole else self.value(number)

    def distribution(self, optuna: Any) -> Any:
        """Optuna's form."""
        if self.is_whole:
            return optuna.distributions.IntDistribution(int(self.low), int(self.high), log=self.log)
        return optuna.distributions.FloatDistribution(self.lowest, self.high, log=self.log)

    def value(self, stored: object) -> object:
        """The number of what the study holds."""
        assert isinstance(stored, (int, float))
        return 0.0 if self.or_zero and stored < self.low else stored

    def holds(self, stored: object) -> bool:
        """Whether a study may hold this."""
        return _is_number(stored) and self.lowest <= stored <= self.high

    def stored(self, value: object) -> object | None:
        """What the study holds for the nearest number of the range; None if the value is no number."""
        if not _is_number(value) or not math.isfinite(value):
            return None
        if self.or_zero and value < self.low:
            return self.low / math.sqrt(10) if value < self.low / 2 else self.low
        nearest = min(max(value, self.low), self.high)
        return round(nearest) if self.is_whole else float(nearest)

    def with_default(self, value: object) -> Range:
        """The range, and the default at its end if it lies outside."""
        if not _is_number(value) or (value <= 0 and self.log):
            return self
        return Range(min(self.low, value), max(self.high, value), self.log, self.or_zero)

    def written(self) -> object:
        """The notation of the study and of `--space`."""
        return f"{'0 or ' if self.or_zero else ''}{self.low}..{self.high}{' log' if self.log else ''}"


@dataclass(frozen=True)
class Around:
    """A range from `low` times the default to `high` times the default."""

    low: float
    high: float
    log: bool = False

    def of(self, default: object) -> Range:
        """The range; whole numbers if the default is one."""
        if not _is_number(default) or default <= 0:
            raise ValueError(f"the default is {default!r}, and a range around it needs a number above 0")
        if isinstance(default, int):
            low, high = max(1, round(default * self.low)), max(1, round(default * self.high))
            return Range(low, max(high, low + 1), self.log)
        return Range(default * self.low, default * self.high, self.log)

    def written(self) -> object:
        """The notation of `--space`."""
        return f"x{self.low}..x{self.high}{' log' if self.log else ''}"


SearchSpace: TypeAlias = Mapping[str, OneOf | Range]
"""Values by setting with its section: `train.learning_rate`, `settings.dropout`.

Settings that vary together share an entry, `settings.embedding_dim,settings.bottom`; each of its values is a list with
a value for each of them.
"""


def sections_of(model: str) -> dict[str, type[BaseModel]]:
    """The sections of a recipe of this model."""
    return {"settings": find_model(model).Settings, "train": TrainSettings}


def parse_space(
    entries: Mapping[str, object], sections: Mapping[str, type[BaseModel]], where: str = "--space"
) -> dict[str, OneOf | Range | Around]:
    """Read `--space NAME=VALUES`, or a model's own space.

    Raises:
        SettingsError: with every unreadable entry and every unknown name.
    """
    problems: list[str] = []
    found: dict[str, OneOf | Range | Around] = {}
    for name, value in entries.items():
        try:
            names = [_full_name(each.strip(), sections) for each in name.split(",")]
            found[",".join(names)] = _parsed(value, together=len(names))
        except SettingsError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(f"'{name}' is {value!r}: {error}; write {EXAMPLES}")
    SettingsError.refuse(where, problems)
    return found


def search_space(
    model: str,
    plan: Plan,
    asked: Mapping[str, OneOf | Range | Around],
    *,
    fixed: Collection[str] = (),
    only: bool = False,
) -> dict[str, OneOf | Range]:
    """The settings to search: those of the model's own space, and those that are asked for, which take precedence.

    Args:
        model: its name.
        plan: of a run with the default settings, which lie in the space.
        asked: what `parse_space` read.
        fixed: settings with their sections that are not searched, unless asked for.
        only: search nothing else than what is asked for.

    Raises:
        SettingsError: if a range around a default has none to be around, or there is nothing to search.
    """
    taken = {each for name in asked for each in name.split(",")} | set(fixed)
    if not plan.negatives.value:
        taken |= set(ONLY_DRAWN)
    own = {} if only else parse_space(find_model(model).space, sections_of(model), f"the space of {model}")
    parts = [name for name, _ in on_meta_device(lambda: plan.make(None)).named_parameters()]
    own = {
        name: drawn
        for name, drawn in own.items()
        if not taken & set(name.split(",")) and not _is_of_a_missing_part(name, parts) and not _is_dear(name, plan)
    }
    found: dict[str, OneOf | Range] = {}
    problems = []
    for name, drawn in {**own, **asked}.items():
        default = default_of(name, plan)
        try:
            found[name] = drawn.of(default) if isinstance(drawn, Around) else drawn
        except ValueError as error:
            problems.append(f"'{name}' is '{drawn.written()}': {error}")
        else:
            if name in own:
                found[name] = found[name].with_default(default)
    if not found:
        problems.append(f"there is nothing to search: {model} names no setting that is free; name some with --space")
    SettingsError.refuse("--space", problems)
    return found


def default_of(name: str, plan: Plan) -> object:
    """The value that a run takes for a setting, or a list of values for settings that vary together."""
    if "," in name:
        return [default_of(each, plan) for each in name.split(",")]
    if name == "train.negatives":
        return plan.negatives.value
    section, _, path = name.partition(".")
    whole: dict[str, Any] = (plan.settings if section == "train" else plan.model_settings).model_dump(mode="json")
    first, _, rest = path.partition(".")
    part, _, setting = rest.rpartition(".")
    if part:  # train.parts: what a part does not set is as in train
        return whole[first].get(part, {}).get(setting, whole.get(setting))
    return whole[first].get(rest) if rest else whole.get(first)


def assigned(drawn: Mapping[str, object], sections: Mapping[str, type[BaseModel]]) -> dict[str, dict[str, object]]:
    """Drawn values in the sections of a recipe."""
    return config.assign(spread(drawn), sections)


def spread(drawn: Mapping[str, object]) -> dict[str, object]:
    """A value for each setting; those that vary together are drawn as one list."""
    values: dict[str, object] = {}
    for name, value in drawn.items():
        names = name.split(",")
        values.update(zip(names, value, strict=True) if len(names) > 1 and isinstance(value, list) else [(name, value)])
    return values


def describe(space: SearchSpace) -> str:
    """The space in one line."""
    return "; ".join(f"{name} {drawn.written()}" for name, drawn in space.items())


def _is_of_a_missing_part(name: str, parameters: Sequence[str]) -> bool:
    """Whether it is a setting of `train.parts` for a part without parameters."""
    part = name.removeprefix("train.parts.").rpartition(".")[0]
    return name.startswith("train.parts.") and not any(each.startswith(f"{part}.") for each in parameters)


def _is_dear(name: str, plan: Plan) -> bool:
    """Whether it is the weight decay of a part whose optimizer updates only the rows of a batch, for large tables:
    with decay, every step would go through whole tables.
    """
    part, _, setting = name.removeprefix("train.parts.").rpartition(".")
    if not part or setting != "weight_decay" or not name.startswith("train.parts."):
        return False
    return default_of(f"train.parts.{part}.optimizer", plan) not in ("adam", "adamw") and not default_of(name, plan)


def _full_name(name: str, sections: Mapping[str, type[BaseModel]]) -> str:
    found = config.assign({name: None}, sections)
    section = next(section for section, values in found.items() if values)
    return name if name.startswith(f"{section}.") else f"{section}.{name}"


def _parsed(value: object, *, together: int = 1) -> OneOf | Range | Around:
    if isinstance(value, (list, tuple)):
        if len(value) < 2:
            raise ValueError("expected at least two values to choose from")
        if together > 1 and not all(isinstance(each, (list, tuple)) and len(each) == together for each in value):
            raise ValueError(f"expected a list of {together} values in each place, one for each setting")
        try:
            return OneOf(tuple(json.loads(json.dumps(each)) for each in value))
        except TypeError:
            raise ValueError("expected numbers, text, true or false, or lists of them") from None
    if together > 1:
        raise ValueError("settings that vary together need a list of lists, as [[16, [64, 16]], [32, [64, 32]]]")
    if not isinstance(value, str) or ".." not in value:
        raise ValueError("expected a list of values or a range")
    or_zero, text = value.strip().startswith("0 or "), value.strip().removeprefix("0 or ").strip()
    text, _, kind = (each.strip() for each in text.partition(" "))
    if kind not in ("", "log"):
        raise ValueError(f"'{kind}' behind the range; expected 'log' or nothing")
    ends = text.split("..", 1)
    around = all(end.startswith("x") for end in ends)
    try:
        low, high = (_number(end.removeprefix("x") if around else end) for end in ends)
    except ValueError:
        raise ValueError("the ends of the range are no numbers") from None
    if not low < high:
        raise ValueError("the first number is not below the second")
    if (kind == "log" or around) and low <= 0:
        raise ValueError("magnitudes need a lowest number above 0")
    if or_zero and (around or not kind):
        raise ValueError("'0 or' stands before a range of magnitudes, as 0 or 1e-6..1e-2 log")
    return Around(low, high, kind == "log") if around else Range(low, high, kind == "log", or_zero)


def _number(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError("not finite") from None
        return number
