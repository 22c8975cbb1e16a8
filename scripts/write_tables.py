"""Write what the code knows into the documents: tables of settings, and the list of commands.

A table with the head `| setting | default | what it is |` is of what the heading above it names (a model or a dataset);
one below no such heading is of training. All that follows `<!-- commands -->` is the list of commands. `make docs`
writes them, and tests/test_docs.py fails where that would change something. What the command line prints stands in the
site alone: the settings of models, at `<!-- settings -->`, and the options of commands (`for_site`).
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from recspec.cli import app as cli
from recspec.datasets import DATASETS
from recspec.loop import Experiment, Guardrails, Metric, Variant
from recspec.models import MODELS
from recspec.training.settings import TrainSettings

ROOT = Path(__file__).parents[1]

SETTINGS: Mapping[str, type[BaseModel]] = {
    "training": TrainSettings,
    **{name: dataset.Settings for name, dataset in DATASETS.items()},
    **{name: model.Settings for name, model in MODELS.items()},
    **{each.__name__: each for each in (Experiment, Variant, Metric, Guardrails)},
}

MANY = 3
"""What so many commands share is described once, for all."""

SAME = 2
"""So many rows that stand in a table before are named together, with a link to it."""

HEAD = "| setting | default | what it is |\n|---|---|---|\n"

ON_SITE = "<!-- settings -->\n"
"""Place of a table that only the site shows."""

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
    table = ON_SITE if path.name == "models.md" else HEAD
    return text + "".join(f"\n## {name}\n\n{said}\n\n{table}" for name, said in lacking.items())


def in_step(text: str) -> str:
    """A document's text as it ought to be."""
    seen: dict[str, dict[str, str]] = {}
    text = "".join(_with_settings(part, seen) for part in _HEADING.split(text))
    return _COMMANDS_PLACE.sub(lambda place: place[1] + _list_of_commands(), text)


def for_site(text: str) -> str:
    """A document's text as the site shows it."""
    return in_step(text.replace(ON_SITE, HEAD)) + (reference() if _COMMANDS_PLACE.search(text) else "")


def _with_settings(part: str, seen: dict[str, dict[str, str]]) -> str:
    """A heading and what stands under it, given the rows of the tables before, to which its own are added."""
    title = part.splitlines()[0].lstrip("# ").removeprefix("Settings of ") if part.startswith("#") else ""
    settings = SETTINGS.get(title, SETTINGS["training"])
    return _SETTINGS_PLACE.sub(lambda _: _settings_table(title, settings, seen), part)


def _settings_table(title: str, settings: type[BaseModel], seen: dict[str, dict[str, str]]) -> str:
    """Name, default and meaning of each setting, as Markdown; `SAME` rows that a table before has are named as one."""
    rows = {
        name: f"| `{name}` | {_cell(_default(field.default))} | {_cell(field.description or '')} |\n"
        for name, field in settings.model_fields.items()
    }
    own, references = dict(rows), ""
    while own:
        same = {other: [name for name in own if there.get(name) == rows[name]] for other, there in seen.items()}
        other = max(same, key=lambda name: len(same[name]), default="")
        if not other or len(same[other]) < SAME:
            break
        references += f"| {', '.join(f'`{name}`' for name in same[other])} | | as in [{other}](#{other}) |\n"
        own = {name: row for name, row in own.items() if name not in same[other]}
    seen[title] = own
    return HEAD + "".join(own.values()) + references


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
    yield from _commands_of("recspec", typer.main.get_command(cli.app))


def _commands_of(name: str, command: Any) -> Iterator[Command]:
    below = getattr(command, "commands", None)
    if below is None:
        yield Command(name, inspect.cleandoc(command.help), tuple(map(_parameter, command.params)))
        return
    for own, each in below.items():
        yield from _commands_of(f"{name} {own}", each)


def _parameter(parameter: Any) -> Parameter:
    if parameter.param_type_name == "argument":
        return Parameter(parameter.metavar, False, parameter.help, parameter.default)
    names = "/".join((parameter.opts[0], *parameter.secondary_opts))
    return Parameter(" ".join(filter(None, (names, parameter.metavar))), True, parameter.help, parameter.default)


def _list_of_commands() -> str:
    """The commands with the first line of each one's help, as a table."""
    rows = "".join(
        f"| `{each.name.removeprefix('recspec ')}` | {_cell(each.about.splitlines()[0])} |\n" for each in commands()
    )
    return f"\n| command | what it does |\n|---|---|\n{rows}"


def reference() -> str:
    """All commands with their options, as Markdown; what many commands share is described once, at the top."""
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
    others = [each for each in command.parameters if each.is_option and (each.shown, each.help) in shared]
    rows = "".join(f"- `{each.shown}`: {each.help}{_with_default(each)}\n" for each in own)
    names = ", ".join(f"`{each.shown.split()[0]}`{_with_default(each)}" for each in others)
    line = f"- [Shared](#shared-arguments-and-options): {names}."
    line = fill(line, 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False) if names else ""
    return f"\n## {command.name}\n\n`{usage}`\n\n{command.about}\n\n{rows}{line}".rstrip() + "\n"


def _with_default(parameter: Parameter) -> str:
    is_unset = parameter.default is None or parameter.default is False or parameter.default == ()
    return "" if is_unset else f" (default {_default(parameter.default)})"


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return "must be given"
    return f"`{json.dumps(value.model_dump() if isinstance(value, BaseModel) else value)}`"


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
