"""Declared types of raw columns: the setting `types`, or a file such as `columns.yaml`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_serializer,
    model_validator,
)

from recspec.base.config import yaml_problem
from recspec.base.errors import SettingsError, nearest, shortened, unknown
from recspec.base.files import PathError, read_text
from recspec.data.prepare.time_formats import PER_SECOND, check_time_format, check_zone

Type = Literal["text", "integer", "number", "time", "list", "vector"]
TYPES: tuple[Type, ...] = get_args(Type)
Invalid = Literal["refuse", "drop", "missing"]
OTHER_NAMES: Mapping[str, Type] = {
    "string": "text",
    "str": "text",
    "category": "text",
    "int": "integer",
    "int64": "integer",
    "float": "number",
    "float64": "number",
    "double": "number",
    "date": "time",
    "datetime": "time",
    "timestamp": "time",
}
"""Names of types in other tools."""
ONLY = {"format": "time", "zone": "time", "separator": "list", "length": "vector"}
"""Keys that only one type has."""
EXPECTED = {
    "type": "text",
    "missing": 'texts, in quotes: [n/a, "-1"]',
    "format": "text",
    "zone": "text",
    "separator": "a text of one character or more",
    "length": "a whole number from 1 on",
    "invalid": "text",
}
MOST_BYTES = 1 << 20  # of a file of types
DEEPEST = 4  # lists and tables inside each other


def _type(given: object) -> object:
    return OTHER_NAMES.get(given.lower(), given.lower()) if isinstance(given, str) else given


def _texts(given: object) -> object:
    return [given] if isinstance(given, (str, int, float)) and not isinstance(given, bool) else given


class DeclaredColumn(BaseModel):
    """What a column holds, as a user declares it."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    type: Annotated[Type, BeforeValidator(_type)] = Field(description="what the column holds; ids are text by default")
    missing: Annotated[tuple[str, ...], BeforeValidator(_texts)] | None = Field(
        None, description="exactly the texts that mean a missing value here, in place of those for all columns"
    )
    invalid: Invalid | None = Field(
        None, description="values of another type: refuse them, drop their rows, or take them as missing"
    )
    format: Annotated[str, AfterValidator(check_time_format)] | None = Field(
        None, description="time: how it is written, such as %d.%m.%Y %H:%M, or milliseconds since 1970"
    )
    zone: Annotated[str, AfterValidator(check_zone)] | None = Field(
        None, description="time: zone of times that name none, such as Europe/Berlin or +02:00; UTC by default"
    )
    separator: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="list: separator between its values, where they are one text"
    )
    length: Annotated[int, Field(ge=1)] | None = Field(None, description="vector: how many numbers it has")

    @model_validator(mode="after")
    def _fits_together(self) -> DeclaredColumn:
        for name, kind in ONLY.items():
            if getattr(self, name) is not None and self.type != kind:
                raise ValueError(f"{name} is for type {kind}, not for {self.type}; leave it out")
        if self.type in ("text", "list") and self.invalid is not None:
            raise ValueError(f"any value is a {self.type}, so none is invalid; leave invalid out")
        if (
            self.zone is not None
            and self.format is not None
            and (self.format in PER_SECOND or "%z" in self.format.lower())
        ):
            raise ValueError(f"format {self.format} tells the instant by itself, so leave zone out")
        return self

    @model_serializer
    def _short(self) -> str | dict[str, Any]:
        """The type alone, or with the keys that are set."""
        given = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        return self.type if len(given) == 1 else given


# --- many of them ----------------------------------------------------------------------------------------------------

Problem = tuple[Any, str, str]  # the name of the column, the key or nothing, and a sentence


def declared_columns(given: object) -> object:
    """Columns from plain values; a text is the name of a file. Raises ValueError with all problems."""
    if isinstance(given, str):
        return given
    if not isinstance(given, Mapping):
        raise ValueError("expected {column: type}, or the name of a file such as columns.yaml")
    found, problems = _read(given)
    if problems:
        raise ValueError("; ".join(what for *_, what in problems))
    return found


def load_columns(path: Path) -> dict[str, DeclaredColumn]:
    """Read a file of types: YAML with a line `column: type`, or `column: {type: ..., ...}`, for each column.

    Every name and value is read letter for letter. Raises SettingsError, which names each problem with its line.
    """
    given, lines, problems = _parsed(path)
    found, wrong = _read(given)
    problems += [(lines.get((name, key), lines[name, ""]), what) for name, key, what in wrong]
    if problems:
        raise SettingsError.of(str(path), [f"line {line}: {what}" for line, what in sorted(problems)])
    return found


def _parsed(path: Path) -> tuple[dict[str, object], dict[tuple[str, str], int], list[tuple[int, str]]]:
    """The columns of a file, the lines of their names and keys, and names that stand twice."""
    try:
        text = read_text(path, most=MOST_BYTES)
        _check_events(path, text)
        loader = yaml.BaseLoader(text)
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            found = "is empty" if root is None else "holds no columns"
            raise SettingsError(f"{path}: {found}; expected a line such as `price: number` for each column")
        given: dict[str, object] = {}
        lines: dict[tuple[str, str], int] = {}
        problems: list[tuple[int, str]] = []
        for column, node in root.value:
            if not isinstance(column, yaml.ScalarNode):
                problems.append((column.start_mark.line + 1, "the name of a column must be text"))
                continue
            name, inner = str(column.value), node.value if isinstance(node, yaml.MappingNode) else []
            keys = [(str(key.value), key.start_mark.line + 1) for key, _ in inner]
            for key, line in [("", column.start_mark.line + 1), *keys]:
                if (first := lines.setdefault((name, key), line)) != line or keys.count((key, line)) > 1:
                    what = (
                        f"column '{shortened(name)}'{key and f': {shortened(key)}'} stands twice, first in line {first}"
                    )
                    problems.append((line, f"{what}; remove one"))
            given.setdefault(name, loader.construct_object(node, deep=True))
    except PathError as error:
        raise SettingsError(f"setting 'types': {error}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: {yaml_problem(error)}") from None
    return given, lines, problems


def _check_events(path: Path, text: str) -> None:
    """Refuse aliases and deep nesting, of which a short text can make much work."""
    depth = 0
    for event in yaml.parse(text):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        assert event.start_mark is not None
        line = f"{path}: line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise SettingsError(f"{line}: write out what *{event.anchor} stands for")
        if depth > DEEPEST:
            raise SettingsError(f"{line}: nested too deeply; expected `column: {{key: [value, ...]}}` at most")


def _read(given: Mapping[Any, object]) -> tuple[dict[str, DeclaredColumn], list[Problem]]:
    """The columns, and every problem."""
    found: dict[str, DeclaredColumn] = {}
    problems: list[Problem] = []
    for name, value in given.items():
        called = f"column '{shortened(str(name))}'"
        if not isinstance(name, str):
            problems.append((name, "", f"{called}: a column's name must be text; put it in quotes"))
        elif isinstance(value, DeclaredColumn):
            found[name] = value
        elif not isinstance(value, (str, Mapping)):
            expected = f"expected a type ({', '.join(TYPES)}), or {{type: ..., ...}}"
            problems.append((name, "", f"{called} holds {_shown(value)}; {expected}"))
        else:
            try:
                found[name] = DeclaredColumn.model_validate({"type": value} if isinstance(value, str) else value)
            except ValidationError as error:
                problems += [(name, key, f"{called}: {what}") for key, what in _problems(error)]
    return found, problems


def _problems(error: ValidationError) -> Iterator[tuple[str, str]]:
    """What pydantic found, in our words, with its key."""
    for detail in error.errors():
        key = str(detail["loc"][0]) if detail["loc"] else ""
        held, kind = _shown(detail["input"]), detail["type"]
        if kind == "extra_forbidden":
            yield key, unknown("key", key, DeclaredColumn.model_fields)
        elif kind == "missing":
            yield "", f"has no type; add one: {', '.join(TYPES)}"
        elif kind == "literal_error":
            known = (*TYPES, *OTHER_NAMES) if key == "type" else get_args(Invalid)
            hint = nearest(str(detail["input"]), known)
            yield key, f"{key} is {held}{hint}; expected {', '.join(TYPES if key == 'type' else known)}"
        elif kind == "value_error":
            yield key, detail["msg"].removeprefix("Value error, ")
        else:
            yield key, f"{key} is {held}; expected {EXPECTED[key]}"


def _shown(value: object) -> str:
    return (
        repr(value) if isinstance(value, (str, int, float, type(None))) and len(str(value)) < 60 else "a list or table"
    )


def columns_schema() -> dict[str, object]:
    """The JSON Schema of a file of types, for editors."""
    column = DeclaredColumn.model_json_schema(mode="validation")
    text = {"type": ["string", "number"]}
    column["properties"]["missing"] |= {"anyOf": [text, {"type": "array", "items": text}, {"type": "null"}]}
    short = {"enum": [*TYPES, *OTHER_NAMES]}
    column["properties"]["type"] = {"description": column["properties"]["type"]["description"], **short}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Types of the columns of raw files",
        "type": "object",
        "additionalProperties": {"anyOf": [short, column]},
    }
