"""Typed settings from recipes (YAML) and from `--set name=value`; unknown names are refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from recspec.errors import SettingsError, nearest, unknown

RECIPE_SECTIONS = ("about", "model", "settings", "train")


class Settings(BaseModel):
    """Frozen settings that refuse names they don't know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


SettingsType = TypeVar("SettingsType", bound=BaseModel)


@dataclass(frozen=True)
class Recipe:
    """A recipe file: which model, its settings, how to train it; `about` is for people."""

    model: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    train: Mapping[str, object] = field(default_factory=dict)
    about: object = None
    path: Path | None = None


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe.

    Raises:
        SettingsError: if the file is missing, not YAML, or has a section that recipes don't have.
    """
    file = Path(path)
    if not file.is_file():
        known = [found.name for found in file.parent.iterdir()] if file.parent.is_dir() else []
        raise SettingsError(f"recipe {file}: no such file{nearest(file.name, known)}")
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"recipe {file}: not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise SettingsError(f"recipe {file}: expected sections {', '.join(RECIPE_SECTIONS)}")
    problems = [unknown("section", str(name), RECIPE_SECTIONS) for name in data if name not in RECIPE_SECTIONS]
    problems += [
        f"section '{name}' holds {data[name]!r}; expected settings, one `name: value` a line"
        for name in ("settings", "train")
        if not isinstance(data.get(name) or {}, dict)
    ]
    if problems:
        raise SettingsError.of(f"recipe {file}", problems)
    return Recipe(data.get("model"), data.get("settings") or {}, data.get("train") or {}, data.get("about"), file)


def parse_assignments(assignments: Iterable[str]) -> dict[str, object]:
    """`["epochs=3", "layers=[64, 32]"]` -> names and values; a value is read as YAML.

    Raises:
        SettingsError: naming every entry without a `=`.
    """
    values: dict[str, object] = {}
    problems = []
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            problems.append(f"'{assignment}' is not of the form name=value")
            continue
        try:
            values[name.strip()] = yaml.safe_load(text)
        except yaml.YAMLError:
            problems.append(f"'{assignment}': the value is not valid YAML")
    if problems:
        raise SettingsError.of("--set", problems)
    return values


def assign(values: Mapping[str, object], sections: Mapping[str, type[BaseModel]]) -> dict[str, dict[str, object]]:
    """Sort settings named on the command line into the sections that own them.

    `train.epochs` names its section; `epochs` alone is enough where only one section has the name.

    Raises:
        SettingsError: naming every unknown or ambiguous name.
    """
    sorted_values: dict[str, dict[str, object]] = {section: {} for section in sections}
    problems = []
    for name, value in values.items():
        section, dot, bare = name.partition(".")
        if dot and section in sections:
            owners = [section] if bare in sections[section].model_fields else []
        else:
            bare = name
            owners = [owner for owner, model in sections.items() if name in model.model_fields]
        if len(owners) == 1:
            sorted_values[owners[0]][bare] = value
        elif owners:
            problems.append(f"'{name}' is a setting of {' and of '.join(owners)}; say {owners[0]}.{name}")
        else:
            known = [f"{owner}.{field}" for owner, model in sections.items() for field in model.model_fields]
            bare_names = [field for model in sections.values() for field in model.model_fields]
            hint = nearest(name, known) or nearest(name, bare_names)
            problems.append(f"unknown setting '{name}'{hint}; `recspec models` lists the settings")
    if problems:
        raise SettingsError.of("--set", problems)
    return sorted_values


def build(model: type[SettingsType], where: str, *layers: Mapping[str, object]) -> SettingsType:
    """Settings from layers of values, later ones first in rank.

    Raises:
        SettingsError: with every unknown name and every value out of range.
    """
    values: dict[str, object] = {}
    for layer in layers:
        values.update(layer)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise SettingsError.of(where, settings_problems(error, model)) from None


def settings_problems(error: ValidationError, model: type[BaseModel]) -> Sequence[str]:
    """What pydantic found, in our words: one sentence a setting."""
    problems = []
    for detail in error.errors():
        name = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            problems.append(unknown("setting", name, model.model_fields))
        elif detail["type"] == "missing":
            problems.append(f"setting '{name}' is missing")
        else:
            what = detail["msg"].removeprefix("Value error, ")
            where = f"setting '{name}' is {detail['input']!r}: " if name else ""
            problems.append(f"{where}{what[0].lower()}{what[1:]}")
    return problems
