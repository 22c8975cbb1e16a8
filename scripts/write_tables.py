"""Write what the code knows into the documents: tables of settings, and the reference of commands.

A table with the head `| setting | default | what it is |` is of what the heading above it names (a model or a dataset);
one below no such heading is of training. All that follows `<!-- commands -->` is the reference of commands. `make docs`
writes them, and tests/test_docs.py fails where that would change something.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from typer.models import ArgumentInfo, OptionInfo

from recspec.cli import app as cli
from recspec.datasets import DATASETS
from recspec.models import MODELS
from recspec.training.settings import TrainSettings

ROOT = Path(__file__).parents[1]

SETTINGS: Mapping[str, type[BaseModel]] = {
    "training": TrainSettings,
    **{name: dataset.Settings for name, dataset in DATASETS.items()},
    **{name: model.Settings for name, model in MODELS.items()},
}

MANY = 3
"""An option or argument of so many commands is described once, for all."""

HEAD = "| setting | default | what it is |\n|---|---|---|\n"

_HEADING = re.compile(r"^(?=#+ )", re.MULTILINE)
_SETTINGS_PLACE = re.compile(rf"^{re.escape(HEAD)}(?:\|.*\n)*", re.MULTILINE)
_COMMANDS_PLACE = re.compile(r"(<!-- commands[^>]*-->\n).*", re.DOTALL)


def documents() -> list[Path]:
    """Every document of the project."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def with_sections(path: Path, text: str) -> str:
    """A document with a section for every registered model, or dataset, that it lacks."""
    about = {
        "models.md": {
            name: f"{inspect.getdoc(model)}\n\nNeeds: {', '.join(model.needs)}." for name, model in MODELS.items()
        },
        "datasets.md": {name: f"{dataset.about}." for name, dataset in DATASETS.items()},
    }.get(path.name, {})
    lacking = {name: said for name, said in about.items() if f"\n## {name}\n" not in text}
    return text + "".join(f"\n## {name}\n\n{said}\n\n{HEAD}" for name, said in lacking.items())


def in_step(text: str) -> str:
    """A document's text as it ought to be."""
    text = "".join(_with_settings(part) for part in _HEADING.split(text))
    return _COMMANDS_PLACE.sub(lambda place: place[1] + _reference(), text)


def _with_settings(part: str) -> str:
    """A heading and what stands under it."""
    title = part.splitlines()[0].lstrip("# ") if part.startswith("#") else ""
    settings = SETTINGS.get(title, SETTINGS["training"])
    return _SETTINGS_PLACE.sub(lambda _: settings_table(settings), part)


def settings_table(settings: type[BaseModel]) -> str:
    """Name, default and meaning of each setting, as Markdown."""
    rows = "".join(
        f"| `{name}` | {_cell(_default(field.default))} | {_cell(field.description or '')} |\n"
        for name, field in settings.model_fields.items()
    )
    return HEAD + rows


@dataclass(frozen=True)
class Parameter:
    """An argument or an option of a command."""

    shown: str
    is_option: bool
    help: str
    default: object


@dataclass(frozen=True)
class Command:
    """A command of the command line."""

    name: str
    about: str
    parameters: tuple[Parameter, ...]

    @property
    def options(self) -> list[str]:
        """`--set`, `-k`: the options' own names."""
        return [each.shown.split()[0] for each in self.parameters if each.is_option]


def commands() -> Iterator[Command]:
    """Every command of the command line, in the order of its help."""
    yield from _commands_of("recspec", cli.app)


def _commands_of(name: str, app: typer.Typer) -> Iterator[Command]:
    for info in app.registered_commands:
        function = info.callback
        assert function is not None
        own = info.name or function.__name__.strip("_").replace("_", "-")
        yield Command(f"{name} {own}", inspect.getdoc(function) or "", tuple(_parameters(function)))
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from _commands_of(f"{name} {group.name}", group.typer_instance)


def _parameters(function: Callable[..., object]) -> Iterator[Parameter]:
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        kind, info = hints[name], None
        if get_origin(kind) is Annotated:
            kind, info = get_args(kind)[:2]
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        about = (info.help or "") if isinstance(info, (ArgumentInfo, OptionInfo)) else ""
        if isinstance(info, OptionInfo) and info.hidden:
            continue
        if isinstance(info, ArgumentInfo):
            yield Parameter(info.metavar or name.upper(), False, about, default)
            continue
        # inside Annotated, typer keeps an option's first name where its default would be
        declared = (info.default, *(info.param_decls or ())) if isinstance(info, OptionInfo) else ()
        names = [each for each in declared if isinstance(each, str) and each.startswith("-")]
        option = names[-1] if names else f"--{name.replace('_', '-')}"
        metavar = info.metavar if isinstance(info, OptionInfo) else None
        value = "" if kind is bool else f" {metavar or _values(kind)}"
        yield Parameter(option + value, True, about, default)


def _values(kind: object) -> str:
    """What may stand after an option: a word for its type, or the choices."""
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    words = {int: "N", float: "X", Path: "PATH"}
    inner = [words[part] for part in (kind, *get_args(kind)) if part in words]
    return inner[0] if inner else "TEXT"


def _reference() -> str:
    """All commands, as Markdown; what many commands share is described once, at the top."""
    found = list(commands())
    uses = Counter((each.shown, each.help) for command in found for each in command.parameters)
    shared = {parameter for parameter, count in uses.items() if count >= MANY}
    arguments_first = sorted(shared, key=lambda each: (each[0].startswith("-"), *each))
    rows = "".join(f"- `{shown}`: {text}\n" for shown, text in arguments_first)
    head = f"\n## Shared arguments and options\n\n{rows}"
    return head + "".join(_describe(each, shared) for each in found)


def _describe(command: Command, shared: Set[tuple[str, str]]) -> str:
    arguments = [each.shown for each in command.parameters if not each.is_option]
    usage = " ".join([command.name, *arguments, *(["[OPTIONS]"] if command.options else [])])
    own = [each for each in command.parameters if (each.shown, each.help) not in shared]
    others = [each for each in command.parameters if (each.shown, each.help) in shared]
    rows = "".join(f"- `{each.shown}`: {each.help}{_with_default(each)}\n" for each in own)
    names = ", ".join(f"`{each.shown.split()[0]}`{_with_default(each)}" for each in others)
    line = f"- [Shared](#shared-arguments-and-options): {names}."
    line = fill(line, 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False) if names else ""
    return f"\n## {command.name}\n\n`{usage}`\n\n{command.about}\n\n{rows}{line}".rstrip() + "\n"


def _with_default(parameter: Parameter) -> str:
    is_unset = parameter.default is None or parameter.default is False
    return "" if is_unset else f" (default {_default(parameter.default)})"


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return "must be given"
    return f"`{json.dumps(value if not isinstance(value, Path) else str(value))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Rewrite the documents, and say which changed."""
    for path in documents():
        before = path.read_text(encoding="utf-8")
        after = in_step(with_sections(path, before))
        if after != before:
            path.write_text(after, encoding="utf-8")
            sys.stdout.write(f"{path.relative_to(ROOT)}: written anew\n")


if __name__ == "__main__":
    main()
