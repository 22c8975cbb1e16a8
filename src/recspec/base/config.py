"""Typed settings from recipes (YAML) and from `--set name=value`; unknown names are refused."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from recspec.base.errors import SettingsError, nearest, shortened, unknown
from recspec.base.files import PathError, local, read_text, whole_file

MOST_RECIPE_BYTES = 1 << 20
MOST_YAML_VALUES = 200_000
"""Values of a file, with those that its aliases repeat."""
MOST_INTEGER = (1 << 63) - 1
"""Largest whole number of a setting."""
RECIPE_SECTIONS = ("about", "model", "settings", "train")
RECIPES = Path(__file__).parents[1] / "recipes"
"""The published recipes in an installed recspec."""
RECIPES_OF_CLONE = Path(__file__).parents[3] / "recipes"
"""The same in a clone of the repository."""
TOKEN_VARIABLE = "RECSPEC_TOKEN"


class Settings(BaseModel):
    """Frozen settings that refuse unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """Python takes true for 1; nobody who writes `epochs: yes` means one epoch."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("YAML reads yes, no, on and off as true and false; put text in quotes")
        return value

    @field_validator("*")
    @classmethod
    def _fits_64_bits(cls, value: object) -> object:
        values: Iterable[object] = value.values() if isinstance(value, Mapping) else [value]
        for each in itertools.chain.from_iterable(one if isinstance(one, (list, tuple)) else [one] for one in values):
            if isinstance(each, int) and abs(each) > MOST_INTEGER:
                raise ValueError(f"holds {each}; the largest whole number is {MOST_INTEGER:,}")
        return value


SettingsType = TypeVar("SettingsType", bound=BaseModel)


@dataclass(frozen=True)
class Recipe:
    """A recipe file: which model, its settings, how to train it; `about` is for people."""

    model: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    train: Mapping[str, object] = field(default_factory=dict)
    about: object = None


def recipe_file(path: str | Path) -> Path:
    """The file of a recipe; `NAME` or `recipes/NAME.yaml` is a published one where no such file exists.

    Raises:
        SettingsError: if there is no such file.
    """
    file = local(path, "the recipe")
    if file.is_file():
        return file
    published = RECIPES if RECIPES.is_dir() else RECIPES_OF_CLONE
    by_name = str(path) == file.stem
    if by_name or str(file.parent) == "recipes":
        folder, found = published, published / f"{file.stem}.yaml" if by_name else published / file.name
        if found.is_file():
            return found
    else:
        folder = file.parent
    known = [each.stem if by_name else each.name for each in folder.iterdir()] if folder.is_dir() else []
    what = "no such file, and no published recipe of this name" if by_name else "no such file"
    raise SettingsError(f"recipe {file}: {what}{nearest(file.name, known)}")


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe; raises `SettingsError` if it is missing, not YAML, or has a section that recipes don't have."""
    file = recipe_file(path)
    try:
        data = read_yaml(read_text(file, most=MOST_RECIPE_BYTES)) or {}
    except PathError as error:
        raise SettingsError(f"recipe {error}") from None
    except ValueError as error:
        raise SettingsError(f"recipe {file}: {error}") from None
    if not isinstance(data, dict):
        raise SettingsError(f"recipe {file}: expected sections {', '.join(RECIPE_SECTIONS)}")
    problems = [unknown("section", str(name), RECIPE_SECTIONS) for name in data if name not in RECIPE_SECTIONS]
    if not isinstance(data.get("model"), (str, type(None))):
        problems.append(f"section 'model' holds {data['model']!r}; expected a model's name")
    for name in ("settings", "train"):
        if not isinstance(data.get(name) or {}, dict):
            problems.append(f"section '{name}' holds {data[name]!r}; expected settings, one `name: value` a line")
    SettingsError.refuse(f"recipe {file}", problems)
    return Recipe(data.get("model"), data.get("settings") or {}, data.get("train") or {}, data.get("about"))


def write_recipe(file: Path, recipe: Mapping[str, object]) -> None:
    """Write a recipe, whole or not at all."""
    with whole_file(file) as temporary:
        temporary.write_text(yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True), encoding="utf-8")


def parse_assignments(assignments: Iterable[str]) -> dict[str, object]:
    """`["epochs=3", "layers=[64, 32]"]` -> names and values.

    A value in brackets, braces or quotes is read as YAML. Any other is one plain YAML scalar: a number, a truth value,
    null, or else text in which no character has a meaning (`%d/%m/%Y`, `#`, `|`, `a: b`). Raises `SettingsError`, which
    names every entry without a `=`.
    """
    values: dict[str, object] = {}
    problems = []
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            problems.append(f"'{shortened(assignment)}' is not of the form name=value")
            continue
        try:
            values[name.strip()] = _read_value(text.strip()) if text.strip() or not text else text  # a tab is a value
        except ValueError as error:
            problems.append(f"'{shortened(assignment)}': the value is {str(error).removeprefix('line 1, ')}")
    SettingsError.refuse("--set", problems)
    return values


class _Loader(yaml.SafeLoader):
    """Of two equal names, YAML keeps the last in silence; this refuses them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        first: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in first:
                problem = f"'{name}' stands twice, first in line {first[name]}; remove one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            first[name] = line
        return super().construct_mapping(node, deep)


def _read_value(text: str) -> object:
    """The value of a setting named on the command line; a `ValueError` says where it is not valid."""
    if text.startswith(("[", "{", '"', "'")):
        return read_yaml(text)
    loader = _Loader("")
    try:
        tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        if tag.rpartition(":")[2] in ("bool", "float", "int", "null", "timestamp"):  # YAML's `=` and `<<` are text here
            return loader.construct_object(yaml.ScalarNode(tag, text))
    except (ValueError, yaml.YAMLError) as error:  # a date such as 2020-13-45
        raise ValueError(f"not valid YAML: {error}") from None
    return text


def read_yaml(text: str) -> object:
    """The data of a YAML text; raises a `ValueError` that says where it is not valid."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None and (count := _values_of(node, {})) > MOST_YAML_VALUES:
            raise ValueError(f"its aliases stand for {float(count):.3g} values; at most {MOST_YAML_VALUES:,} are read")
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(yaml_problem(error)) from None
    except (ValueError, RecursionError) as error:  # a date such as 2020-13-45; a thousand brackets
        raise ValueError(f"not valid YAML: {error}") from None


def _values_of(node: yaml.Node, known: dict[int, int]) -> int:
    """The values that a node stands for: 30 aliases can stand for 2³⁰."""
    if id(node) not in known:
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        known[id(node)] = 1 + sum(
            _values_of(each, known) for part in parts for each in (part if isinstance(part, tuple) else (part,))
        )
    return known[id(node)]


def yaml_problem(error: yaml.YAMLError) -> str:
    """`line 3, column 7: not valid YAML: ...`."""
    mark = getattr(error, "problem_mark", None)
    line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return f"{line}not valid YAML: {getattr(error, 'problem', None) or error}"


def assign(values: Mapping[str, object], sections: Mapping[str, type[BaseModel]]) -> dict[str, dict[str, object]]:
    """Sort settings named on the command line into the sections that own them.

    `train.epochs` names its section; `epochs` alone is enough where only one section has the name. Raises
    `SettingsError`, which names every unknown or ambiguous name.
    """
    sorted_values: dict[str, dict[str, object]] = {section: {} for section in sections}
    problems = []
    for name, value in values.items():
        section, dot, bare = name.partition(".")
        if dot and section in sections:
            paths = {section: _path(bare, sections[section])}
        else:
            paths = {owner: _path(name, model) for owner, model in sections.items()}
        owners = [owner for owner, path in paths.items() if path]
        if len(owners) == 1:
            table, path = sorted_values[owners[0]], paths[owners[0]]
            for key in path[:-1]:
                inner = table.setdefault(key, Entries())
                assert isinstance(inner, dict)
                table = inner
            table[path[-1]] = value
        elif owners:
            problems.append(f"'{name}' is a setting of {' and of '.join(owners)}; say {owners[0]}.{name}")
        else:
            listing = "`recspec datasets`" if "prepare" in sections else "`recspec models`"
            problems.append(f"unknown setting '{name}'{_hint(name, sections)}; see {listing}")
    SettingsError.refuse("--set", problems)
    return sorted_values


def _hint(name: str, sections: Mapping[str, type[BaseModel]]) -> str:
    """The nearest setting, in the form the name was given in: with its section or without."""
    section, dot, bare = name.partition(".")
    if not dot:
        return nearest(name, [field for model in sections.values() for field in model.model_fields])
    own = nearest(bare, sections[section].model_fields) if section in sections else ""
    dotted = [f"{owner}.{field}" for owner, model in sections.items() for field in model.model_fields]
    return own.replace("'", f"'{section}.", 1) or nearest(name, dotted)


class Entries(dict[str, object]):
    """Some entries of a setting that is a table; the others stay as they are."""


def _path(name: str, model: type[BaseModel]) -> list[str]:
    """Where a value goes: to its setting, or into the table of one, as `parts.wide.optimizer`; else nowhere."""
    setting, dot, entry = name.partition(".")
    if name in model.model_fields:
        return [name]
    annotation = model.model_fields[setting].annotation if dot and setting in model.model_fields else None
    if get_origin(annotation) is not dict:
        return []
    if (
        get_origin(get_args(annotation)[1]) is dict and "." in entry
    ):  # a part's name may hold dots, its setting has none
        return [setting, *entry.rpartition(".")[::2]]
    return [setting, entry]


def deep_merge(below: object, above: object) -> object:
    """The value of a later layer, its entries put into the earlier one's table where it has some only."""
    if not isinstance(above, Entries) or not isinstance(below, Mapping):
        return above
    return {**below, **{key: deep_merge(below.get(key), value) for key, value in above.items()}}


def build(model: type[SettingsType], where: str, *layers: Mapping[str, object]) -> SettingsType:
    """Settings from layers of values, of which later ones win. Raises `SettingsError`, which names every fault."""
    values: dict[str, object] = {}
    for layer in layers:
        values.update({name: deep_merge(values.get(name), value) for name, value in layer.items()})
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise SettingsError.of(where, settings_problems(error, model)) from None


def mark_all_set(settings: SettingsType) -> SettingsType:
    """The same settings as if every one had been given, so that none is proposed in its place."""
    return settings.model_copy(update=dict(settings))


SHAPES = {
    "string_type": "text; put it in quotes",
    "tuple_type": "a list, as [a, b]; a list of lists is [[a, b], [c, d]]",
    "dict_type": "names and values, as {name: value}",
    "too_short": "a list of at least {min_length}",
}  # pydantic's error type -> the value that YAML should hold


def settings_problems(error: ValidationError, model: type[BaseModel]) -> Sequence[str]:
    """What pydantic found, in our words: one sentence a setting."""
    problems = []
    places = [detail["loc"] for detail in error.errors()]
    for detail in error.errors():
        if detail["type"] == "too_short" and any(each[:-1][: len(detail["loc"])] == detail["loc"] for each in places):
            continue  # too short without its wrong items
        name, outer = (_setting_name(loc, model) for loc in (detail["loc"], detail["loc"][:-1]))
        if detail["type"] == "extra_forbidden":
            told = unknown("setting", str(detail["loc"][-1]), _owner(detail["loc"], model).model_fields)
            problems.append(f"'{outer}': {told}" if outer else told)
        elif detail["type"] == "missing":
            problems.append(f"setting '{name}' is missing")
        elif detail["type"] in SHAPES:
            shape = SHAPES[detail["type"]].replace("{min_length}", str(detail.get("ctx", {}).get("min_length")))
            problems.append(f"setting '{name}' is {shortened(repr(detail['input']))}: expected {shape}")
        else:
            what = detail["msg"].removeprefix("Value error, ")
            where = f"setting '{name}' is {shortened(repr(detail['input']))}: " if name else ""
            kept = what if what[:4].isupper() else f"{what[0].lower()}{what[1:]}"
            problems.append(f"{where}{kept}")
    return problems


def _owner(loc: Sequence[str | int], model: type[BaseModel]) -> type[BaseModel]:
    """The settings that a place lies in: of `variants[1].share` those of a variant."""
    for part in loc[:-1]:
        field = model.model_fields.get(str(part))
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        model = next((each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel)), model)
    return model


def _setting_name(loc: Sequence[str | int], model: type[BaseModel]) -> str:
    """`layers[1]`; without pydantic's names for the branches of a union."""
    if not loc:
        return ""
    field = model.model_fields.get(str(loc[0]))
    is_union = field is not None and get_origin(field.annotation) in (Union, UnionType)
    parts = [part for part in loc[1:] if isinstance(part, int) or not is_union]
    return str(loc[0]) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


def read_token(environment: Mapping[str, str], file: Path | None = None) -> str | None:
    """The bearer token of a server from a file, else from the variable RECSPEC_TOKEN, else None.

    Raises:
        SettingsError: if it can't be read, is empty, or does not fit into a header.
    """
    where = f"token file {file}" if file is not None else TOKEN_VARIABLE
    if file is None and TOKEN_VARIABLE not in environment:
        return None
    try:
        token = (file.read_text(encoding="utf-8") if file is not None else environment[TOKEN_VARIABLE]).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{where}: can't be read: {error}") from None
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise SettingsError(f"{where}: expected one line of letters, digits and signs without spaces")
    return token


# --- durations -----------------------------------------------------------------------------------------------------


UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800, "y": 31_557_600}  # in seconds; y: 365.25 days
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) *([a-z]?)")


def _duration(text: str) -> str:
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None or (found[2] and found[2] not in UNITS) or not 0 < float(found[1]) < 1e15:
        raise ValueError(
            "expected a time such as 90d, 12h or 2w (s, m, h, d, w, y), or a number in the units of the timestamps"
        )
    return text.strip().lower()


Duration = Annotated[str, Field(coerce_numbers_to_str=True), AfterValidator(_duration)]


def duration_in(text: str, setting: str, *, dated: bool) -> float:
    """A duration in the units of the timestamps, which are seconds if these are `dated`.

    Raises:
        SettingsError: for a duration in seconds, days and so on beside timestamps that are no dates.
    """
    found = _DURATION.fullmatch(text)
    assert found is not None
    if found[2] and not dated:
        raise SettingsError(
            f"setting '{setting}': is {text}, but the times of the rows are no dates; give a number in the same units"
        )
    return float(found[1]) * UNITS.get(found[2], 1)


def micros_in(text: str) -> int:
    """A duration in microseconds."""
    return round(duration_in(text, "", dated=True) * 1_000_000)
