"""Lines, tables and JSON on standard output; remarks and errors on standard error."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from recspec.base.summaries import shown

if TYPE_CHECKING:
    from recspec.api import Section, View

WIDE = 160  # columns of a table in a file or a pipe


STEERING = [*(each for each in range(32) if chr(each) not in "\t\n"), *range(127, 160)]
"""Characters that steer a terminal: ids and titles of other people could change its title or what stands on it."""
_AS_TEXT = {each: f"\\x{each:02x}" for each in STEERING}
_AS_JSON = {each: f"\\u{each:04x}" for each in STEERING}


class _Output(Console):
    """A console that shows text as it is: no character steers the terminal, and `:100:` in an id is no emoji.

    URLs stand in place of the local copies that stand for them.
    """

    def print(self, *objects: Any, **settings: Any) -> None:
        from recspec.base.stores import shown as shown_url

        super().print(*(shown_url(each) if isinstance(each, (str, Path)) else each for each in objects), **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Every text that is printed, also in the cells of tables."""
        return super().render_str(text.translate(_AS_TEXT), **settings)


class _Remarks(_Output):
    """The console of remarks and progress. If nobody can read them any more, the work goes on without them.

    Its pipe or terminal was closed, or its disk is full.
    """

    def on_broken_pipe(self) -> None:
        """Say nothing from now on; rich would end the process."""
        self.quiet = True
        del self._buffer[:]

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:
            self.on_broken_pipe()


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
out = _Output(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False, emoji=False)
err = _Remarks(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)


def print_section(section: Section) -> None:
    """Print a table under its title, which is a line of its own so that a narrow table does not cut it."""
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

    sys.stdout.write(shown_url(json.dumps(value, indent=2, ensure_ascii=False)).translate(_AS_JSON) + "\n")


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
