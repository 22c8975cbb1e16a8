"""Lines, tables and JSON on standard output; remarks and errors on standard error."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recspec.base.summaries import shown

if TYPE_CHECKING:
    from recspec.api import Section, View
    from recspec.cli.rich_consoles import Output


class _Lazy:
    """One of the two consoles, made at its first use: rich takes a sixth of the time of `recspec --help`."""

    def __init__(self, place: int) -> None:
        self._place = place

    @property
    def made(self) -> Output:
        """The console itself."""
        return _consoles()[self._place]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made, name)


@cache
def _consoles() -> tuple[Output, Output]:
    from recspec.cli.rich_consoles import consoles

    return consoles()


def open_closed_streams() -> None:
    """Let a standard stream that was closed (`>&-`) be as one that leads to /dev/null.

    Otherwise the next file that is opened takes its number, and gets what libraries print.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


open_closed_streams()
out, err = _Lazy(0), _Lazy(1)


def print_section(section: Section) -> None:
    """Print a table under its title, which is a line of its own so that a narrow table does not cut it."""
    from rich.table import Column, Table

    out.print(f"\n{section.title}", style="bold", soft_wrap=True)
    sides = ["right" if section.is_of_numbers(at) else "left" for at in range(len(section.columns))]
    columns = [
        Column(name, justify=side, overflow="fold")  # type: ignore[arg-type]
        for name, side in zip(section.columns, sides, strict=True)
    ]
    table = Table(*columns, show_header=any(section.columns))
    for row in section.rows:
        table.add_row(*map(shown, row))
    out.print(table)


def print_view(view: View) -> None:
    """Print the tables, warnings and notes of a result; a table without a title has that of the view."""
    for warning in view.warnings:
        out.print(f"warning: {warning}", soft_wrap=True)
    if not view.sections and not view.notes:
        out.print(view.title, soft_wrap=True)
    for section in view.sections:
        print_section(section if section.title else replace(section, title=view.title))
    for note in view.notes:
        out.print(note, soft_wrap=True)
    print_remarks(view)


def print_remarks(view: View) -> None:
    """Print the notes and warnings of a result to standard error."""
    for remark in view.remarks:
        err.print(remark, soft_wrap=True)


def print_json(value: object) -> None:
    """Print a value as JSON."""
    from recspec.base.stores import shown as shown_url
    from recspec.cli.rich_consoles import STEERING

    escaped = {each: f"\\u{each:04x}" for each in STEERING}
    sys.stdout.write(shown_url(json.dumps(value, indent=2, ensure_ascii=False)).translate(escaped) + "\n")


def print_next(*command: object, program: str = "recspec") -> None:
    """Print the command to run next."""
    err.print(f"next: {quoted_command(*command, program=program)}")


def quoted_command(*command: object, program: str = "recspec") -> str:
    """A command, quoted for the shell."""
    from recspec.base.stores import url_text

    return " ".join(map(_quoted, (program, *(url_text(part) or argument(part) for part in command))))


def argument(part: object) -> str:
    """A word of a command; a path that starts with a hyphen is no option."""
    return f"./{part}" if isinstance(part, Path) and str(part).startswith("-") else str(part)


def _quoted(text: str) -> str:
    """A word for the shell; one with characters that can't be shown has them as escapes, as bash and zsh read them."""
    if text.isprintable():
        return shlex.quote(text)
    shown = (chr(b) if 32 <= b < 127 and b not in b"'\\" else f"\\x{b:02x}" for b in os.fsencode(text))
    return f"$'{''.join(shown)}'"


def step(text: str) -> None:
    """Print the title of a step."""
    err.print(f"\n▸ {text}", style="bold")


def tell(text: str) -> None:
    """Print a note."""
    err.print(f"note: {text}", soft_wrap=True)
