"""The application, and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.models import ArgumentInfo

from recspec.files import local

Command = TypeVar("Command", bound=Callable[..., Any])


class Commands(typer.Typer):
    """Commands none of whose paths may be a URL."""

    def command(self, *args: Any, **settings: Any) -> Callable[[Command], Command]:
        """Register a command, and have every path that it is given checked first."""
        register = super().command(*args, **settings)

        def registered(function: Command) -> Command:
            @wraps(function)
            def checked(**values: object) -> object:
                for name, value in values.items():
                    for path in value if isinstance(value, (list, tuple)) else [value]:
                        if isinstance(path, Path):
                            local(path, _told_name(function, name))
                return function(**values)

            register(checked)
            return function

        return registered


def _told_name(function: Callable[..., object], name: str) -> str:
    """An argument as `--help` shows it: `OUT`, `--recipe`."""
    _, info = get_args(get_type_hints(function, include_extras=True)[name])
    if isinstance(info, ArgumentInfo):
        return info.metavar or name.upper()
    given = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
    return next((each for each in given if each.startswith("--")), f"--{name.replace('_', '-')}")


Data = Annotated[Path, typer.Argument(help="a prepared dataset: its folder, or its specification file", metavar="DATA")]
Run = Annotated[Path, typer.Argument(help="a run's folder, or a bundle's", metavar="RUN")]
Out = Annotated[Path, typer.Argument(help="folder to write", metavar="OUT")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Set one setting; repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output.")]
Outside = Annotated[bool, typer.Option("--allow-outside", help="Allow files outside the specification's folder.")]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Check every file against its manifest.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
