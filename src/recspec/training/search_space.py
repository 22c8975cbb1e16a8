"""The settings that a search varies, and their values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel

from recspec import config
from recspec.errors import SettingsError, listed
from recspec.models import MODELS, FittedModel
from recspec.training.settings import TrainSettings

if TYPE_CHECKING:
    import optuna

EXAMPLES = "'[16, 32, 64]' for one of several, '0.0..0.5' for a range, '1e-4..1e-2 log' for one of magnitudes"


@dataclass(frozen=True)
class OneOf:
    """One of several values."""

    values: tuple[object, ...]

    def suggest(self, trial: optuna.Trial, name: str) -> object:
        """Draw a value; the study holds lists and tables as JSON."""
        return json.loads(str(trial.suggest_categorical(name, [json.dumps(value) for value in self.values])))

    def written(self) -> object:
        """The notation of the study and of `--space`."""
        return list(self.values)


@dataclass(frozen=True)
class Range:
    """A number from `low` to `high`, both included; whole if both are; `log` draws magnitudes evenly."""

    low: float
    high: float
    log: bool = False

    def suggest(self, trial: optuna.Trial, name: str) -> object:
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(name, self.low, self.high, log=self.log)
        return trial.suggest_float(name, self.low, self.high, log=self.log)

    def written(self) -> object:
        return f"{self.low}..{self.high}{' log' if self.log else ''}"


SearchSpace = Mapping[str, OneOf | Range]
"""Values by setting with its section: `train.learning_rate`, `settings.dropout`."""


def parse_space(entries: Mapping[str, object], sections: Mapping[str, type[BaseModel]]) -> dict[str, OneOf | Range]:
    """Read `--space NAME=VALUES`, or a file of such entries.

    Raises:
        SettingsError: with every unreadable entry and every unknown name.
    """
    problems: list[str] = []
    found: dict[str, OneOf | Range] = {}
    for name, value in entries.items():
        try:
            found[_full_name(name, sections)] = _parsed(value)
        except SettingsError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(f"'{name}' is {value!r}: {error}; write {EXAMPLES}")
    if problems:
        raise SettingsError.of("--space", problems)
    return found


def default_space(model: str, values: Mapping[str, Mapping[str, object]]) -> dict[str, OneOf | Range]:
    """The learning rate around that of `values["train"]`, and those of the usual settings that the model has."""
    own = MODELS[model]
    if issubclass(own, FittedModel):
        if not own.space:
            raise SettingsError(f"there is nothing to search: {model} has no settings")
        return parse_space(own.space, {"settings": own.Settings})
    rate = values["train"].get("learning_rate", TrainSettings.model_fields["learning_rate"].default)
    assert isinstance(rate, (int, float))
    space: dict[str, OneOf | Range] = {"train.learning_rate": Range(float(rate) / 10, float(rate) * 10, log=True)}
    widths = OneOf((8, 16, 32, 64))
    known = MODELS[model].Settings.model_fields
    if "dropout" in known:
        space["settings.dropout"] = Range(0.0, 0.5)
    # DLRM's width must equal that of the bottom MLP's last layer, another setting.
    if model != "dlrm" and "embedding_dim" in known and known["embedding_dim"].annotation is int:
        space["settings.embedding_dim"] = widths
    if "factors" in known:
        space["settings.factors"] = widths
    return space


def describe(space: SearchSpace) -> str:
    """The space in one line."""
    return listed([f"{name} {drawn.written()}" for name, drawn in space.items()])


def _full_name(name: str, sections: Mapping[str, type[BaseModel]]) -> str:
    assigned = config.assign({name: None}, sections)
    section = next(section for section, values in assigned.items() if values)
    return name if name.startswith(f"{section}.") else f"{section}.{name}"


def _parsed(value: object) -> OneOf | Range:
    if isinstance(value, list):
        if len(value) < 2:
            raise ValueError("expected at least two values to choose from")
        return OneOf(tuple(value))
    if not isinstance(value, str) or ".." not in value:
        raise ValueError("expected a list of values or a range")
    text, _, kind = value.strip().partition(" ")
    kind = kind.strip()
    if kind not in ("", "log"):
        raise ValueError(f"'{kind}' behind the range; expected 'log' or nothing")
    try:
        low, high = (_number(end) for end in text.split("..", 1))
    except ValueError:
        raise ValueError("the ends of the range are no numbers") from None
    if not low < high:
        raise ValueError("the first number is not below the second")
    if kind == "log" and low <= 0:
        raise ValueError("magnitudes need a lowest number above 0")
    return Range(low, high, kind == "log")


def _number(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        return float(text)
