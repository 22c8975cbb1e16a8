"""A command for each verb of the Python API, made from its signature and docstring.

| parameter of the verb | on the command line |
|---|---|
| positional, without a default | argument |
| any other | option `--name`; a truth value that is true by default also has `--no-name` |
| `Sequence[X]`, or an object such as a list of ids | one option with commas: `--batch-sizes 1,64` |
| `X \\| Sequence[X]` | repeatable option |
| `settings` | `--set NAME=VALUE`, repeatable |
| how progress and frames are handed over | none |

The docstring up to `Args:` is the help of the command, and each entry below is the help of its option, without a clause
`; in Python ...`. What a presenter takes by keyword is an option of the command alone, such as `--json`.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, BadParameter, Option, Typer
from typer.core import TyperCommand, TyperOption

from recspec import api
from recspec.base.errors import SettingsError
from recspec.base.machine import keep_freed_memory
from recspec.cli.console import tell

ARGUMENTS: Mapping[str, Sequence[str]] = {
    "prepare": ("dataset", "raw", "out"),
    "evaluate": ("run", "data"),
    "compare": ("folder", "data"),
    "runs": ("folder",),
    "models": ("name",),
    "catalogue": ("run", "products"),
    "update": ("run", "new_events"),
}
"""Arguments of commands that differ from those of their verbs."""
SHORT = {"k": "-k", "verbose": "-v"}
HELP = {"json": "Print JSON to standard output.", "set": "Set one setting; repeatable."}
WORDS = {
    "against": "RUN",
    "at_most": "COLUMN:N",
    "block": "ITEM",
    "boost": "EXPRESSION:WEIGHT",
    "budget": "MINUTES",
    "context": "COLUMN=VALUE",
    "diverse_by": "COLUMN",
    "expect": "DIGEST",
    "filter": "EXPRESSION",
    "journal": "URL",
    "like": "RUN",
    "metric": "PROTOCOL/METRIC",
    "models": "[NAME=]RUN",
    "paths": "RUN|EXPORT",
    "ranker": "RUN",
    "retriever": "[NAME=]RUN",
    "runs": "RUN",
    "set": "NAME=VALUE",
    "slice": "BY",
    "sort": "NAME",
    "space": "NAME=VALUES",
    "unblock": "ITEM",
}
"""What stands for the value of an option or argument, if it is not the word of its type."""
OF_PYTHON = ("self", "progress", "kind", "named")
IN_FOREGROUND = inspect.Parameter("block", inspect.Parameter.KEYWORD_ONLY, default=False, annotation="bool")
"""Of `serve`, whose command always does so."""
NAMED = ("models", "retriever")
"""Places that may be NAME=PATH."""
_NEXT = re.compile(r'\s*"((?:[^"]|"")+)"\s*(?:,|$)|([^,]+)(?:,|$)')

Presenter = Callable[..., None]


@dataclass(frozen=True)
class Call:
    """A verb, and its arguments as they were typed."""

    verb: Callable[..., Any]
    values: Mapping[str, Any]

    def __call__(self, **more: Any) -> Any:
        """Call the verb, with further arguments; what it warns of is printed."""
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, api.Note):
                tell(str(message))
            else:
                usual(message, category, *place, **more)

        with warnings.catch_warnings():
            warnings.simplefilter("always", api.Note)
            warnings.showwarning = show
            return getattr(api, self.verb.__name__, self.verb)(**{**self.values, **more})

    def __getitem__(self, name: str) -> Any:
        """A typed argument; None if it was left out."""
        return self.values.get(name)


@dataclass(frozen=True)
class Typed:
    """An argument or option: the type that typer reads, its word in help, and how a value of the verb is made of it."""

    type: Any
    word: str | None
    value: Callable[[Any], Any] = lambda typed: typed
    repeats: bool = False


def add_command(app: Typer, name: str, verb: Callable[..., Any], present: Presenter) -> None:
    """Add the command of a verb; `present` gets the call, makes it and prints its result."""
    about, texts = _described(verb)
    texts |= {**HELP, **_described(present)[1]}
    _, *alone = inspect.signature(present).parameters.values()
    added = {each.name: each for each in alone}
    own = {each.name: each for each in _parameters(verb) if each.name not in added}
    arguments = ARGUMENTS.get(name, [each.name for each in own.values() if _is_positional(each)])
    ordered = [own[each] for each in arguments] + [each for each in own.values() if each.name not in arguments]
    if len(arguments) > 1:  # a default would leave open which argument was left out
        ordered[0] = ordered[0].replace(default=inspect.Parameter.empty)
    typed: dict[str, Typed] = {}
    shown = []
    for parameter in (*ordered, *added.values()):
        argument = parameter.name in arguments
        typed[parameter.name] = each = _typed(parameter, is_argument=argument)
        shown.append(_declared(parameter, each, texts.get(parameter.name, ""), is_argument=argument))

    def command(**values: Any) -> None:
        from recspec.base import config

        if name not in ("prepare", "serve"):
            keep_freed_memory()
        made = {key: typed[key].value(value) for key, value in values.items() if value is not None}
        if "set" in values:
            made["settings"] = config.parse_assignments(made.pop("set", ()))
        own_values = {key: made.pop(key) for key in added if key in made}
        present(Call(verb, made), **own_values)

    command.__doc__ = about
    command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in shown}
    # An id may begin with a minus: what is no option of `similar` is an argument.
    of_ids = {"ignore_unknown_options": True} if name == "similar" else None
    app.command(name, context_settings=of_ids, cls=OneValueEach)(command)


class OneValueEach(TyperCommand):
    """A command that refuses an option given twice, of which only the last value would count."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(args=[*args])  # an entry for each time
        for each, times in Counter(given).items():
            if times > 1 and isinstance(each, TyperOption) and not (each.multiple or each.is_flag):
                several = f", with commas: {each.opts[0]} {each.metavar}" if each.metavar == "A,B" else ""
                raise BadParameter(f"given {times} times; give it once{several}", ctx=ctx, param=each)
        return super().parse_args(ctx, args)


def _parameters(verb: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """The parameters of a verb that a command has too."""
    for each in inspect.signature(verb).parameters.values():
        if each.name == "settings":
            yield each.replace(name="set", annotation="str | Sequence[str] | None")
        elif each.name not in OF_PYTHON and "Callable" not in str(each.annotation) and each != IN_FOREGROUND:
            yield each


def _is_positional(parameter: inspect.Parameter) -> bool:
    return parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty


def _described(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The text of a docstring before `Args:`, and that of each argument in one line."""
    about, _, rest = (inspect.getdoc(function) or "").partition("Args:\n")
    entries = re.findall(r"^ {4}\*{0,2}(\w+): (.*(?:\n {8}.*)*)", re.split(r"\n\n\w+:\n", rest)[0], re.MULTILINE)
    return about.split("\n\nReturns:")[0].split("\n\nRaises:")[0].strip(), {
        name: re.sub(r"; in Python[ ,][^.;)]*", "", " ".join(text.split())) for name, text in entries
    }


def _typed(parameter: inspect.Parameter, *, is_argument: bool) -> Typed:
    name, plain = parameter.name, str(parameter.annotation).removesuffix(" | None")
    first, *others = plain.split(" | ")
    repeats = any(each.startswith("Sequence") for each in (others or [first] * is_argument))
    element = first.removeprefix("Sequence[").removesuffix("]")
    word = WORDS.get(name)
    if name in NAMED and element == "Place":
        return Typed(str, word, list if repeats else str, repeats)
    if element == "Place" or (plain == "object" and is_argument):
        path = "PATH" if not is_argument else None
        return Typed(str, word or path, (lambda texts: [*map(Path, texts)]) if repeats else Path, repeats)
    if not repeats and (plain == "object" or first.startswith("Sequence")):
        option = f"--{name.replace('_', '-')}"
        return Typed(str, "A,B", (lambda text: _numbers(option, text)) if element == "int" else split_at_commas)
    if element.startswith("Literal"):
        return Typed(str, "|".join(re.findall("'(.*?)'", element)))
    known = {"bool": (bool, None), "int": (int, "N"), "float": (float, "X")}
    kind, usual = known.get(element, (str, None if is_argument else "TEXT"))
    return Typed(kind, word or usual, list if repeats else lambda typed: typed, repeats)


def _declared(parameter: inspect.Parameter, typed: Typed, text: str, *, is_argument: bool) -> inspect.Parameter:
    """The parameter as typer reads it."""
    name, default = parameter.name, parameter.default
    if typed.word == "A,B" and isinstance(default, tuple):
        default = ",".join(map(str, default))
    if default is parameter.empty:
        default = ...
    kind = list[typed.type] if typed.repeats else typed.type  # type: ignore[name-defined]
    word = typed.word or (name.upper() if is_argument else None)
    info: Any
    if is_argument:
        info = Argument(metavar=f"{word}..." if typed.repeats else word, help=text)
    else:
        if typed.repeats and "repeatable" not in text:
            text = f"{text.replace(', or several', '').removesuffix('.')}; repeatable."
        long = f"--{name.replace('_', '-')}"
        flag = f"{long}/--no-{long[2:]}" if default is True else long
        info = Option(*filter(None, [SHORT.get(name), flag]), metavar=word, help=text)
    if default is ...:
        return inspect.Parameter(name, parameter.KEYWORD_ONLY, annotation=Annotated[kind, info])
    kind = kind if default is not None else kind | None
    return inspect.Parameter(name, parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def split_at_commas(text: str) -> list[str]:
    """Texts between commas; one with a comma, or with blanks at its ends, stands in double quotes."""
    found = (quoted.replace('""', '"') or bare.strip() for quoted, bare in _NEXT.findall(text))
    return [each for each in found if each]


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on between commas."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise SettingsError(f"{option} {text!r}: expected whole numbers from 1 between commas, such as 1,64,512")
    return tuple(map(int, parts))
