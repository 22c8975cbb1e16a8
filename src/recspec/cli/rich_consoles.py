"""The consoles of the command line, which load rich: it takes a sixth of the time of `recspec --help`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

WIDE = 160  # columns of a table in a file or a pipe

STEERING = [*(each for each in range(32) if chr(each) not in "\t\n"), *range(127, 160)]
"""Characters that steer a terminal: ids and titles of other people could change its title or what stands on it."""
AS_TEXT = {each: f"\\x{each:02x}" for each in STEERING}


class Output(Console):
    """A console that shows text as it is: no character steers the terminal, and `:100:` in an id is no emoji.

    URLs stand in place of the local copies that stand for them.
    """

    def print(self, *objects: Any, **settings: Any) -> None:
        from recspec.base.stores import shown as shown_url

        super().print(*(shown_url(each) if isinstance(each, (str, Path)) else each for each in objects), **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Every text that is printed, also in the cells of tables."""
        return super().render_str(text.translate(AS_TEXT), **settings)


class Remarks(Output):
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


def consoles() -> tuple[Output, Remarks]:
    """Those of standard output and of standard error."""
    width = None if sys.stdout.isatty() else WIDE
    return (
        Output(width=width, highlight=False, markup=False, emoji=False),
        Remarks(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False),
    )
