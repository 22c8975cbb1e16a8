"""Lines, tables and JSON on standard output; remarks and errors on standard error; shared options."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from typer import Argument, Option

from recspec.base.errors import how_many
from recspec.base.summaries import shown

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.progress import TaskID

    from recspec.inference import Counts, How, Predictor, RecommendRequest


cell = shown
"""A value as a table shows it."""

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


COUNTED = {"full": "users", "rows": "rows"}
"""Stages whose bar tells the amount done, and its unit."""


class Stage(Protocol):
    """Receives the progress of a stage; `total` is None if unknown."""

    def __call__(self, stage: str, done: float, total: float | None) -> None: ...


@contextmanager
def stages(*, show: bool = True) -> Iterator[Stage]:
    """A live bar for each stage, with its time so far and the time left; nothing if there is no terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%{task.fields[amount]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=err,
        disable=not (show and err.is_terminal),
        transient=True,
    )
    tasks: dict[str, TaskID] = {}

    def progress(stage: str, done: float, total: float | None) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total, amount="")
        unit = COUNTED.get(stage)
        amount = f", {done:,.0f} of {total:,.0f} {unit}" if unit and total else ""
        bars.update(tasks[stage], completed=done, total=total, amount=amount)

    with bars:
        yield progress


def print_lines(title: str, lines: Sequence[Mapping[str, object]]) -> None:
    """A table of lines that hold the same figures."""
    figures = lines[0].items()
    table = titled_table(
        title,
        *(Column(name, justify="left" if isinstance(x, str) else "right", overflow="fold") for name, x in figures),
    )
    for line in lines:
        table.add_row(*(cell(value) for value in line.values()))
    out.print(table)


def print_settings(title: str, model: type[BaseModel]) -> None:
    """Print the settings of a model or dataset as a table."""
    table = titled_table(title, "name", "default", "what it is")
    for name, field in model.model_fields.items():
        default = json.dumps(field.get_default(call_default_factory=True), default=str)
        table.add_row(name, "required" if field.is_required() else default, field.description or "")
    out.print(table)


def print_section(title: str, value: object) -> None:
    """A value as a table with a row for each name, as names and figures, or as one line."""
    if isinstance(value, Mapping) and value and all(isinstance(row, Mapping) for row in value.values()):
        named = dict.fromkeys(chain(*value.values()))
        columns = [column for column in named if any(cell(row.get(column)) for row in value.values())]
        table = titled_table(title, *(Column(name, overflow="fold") for name in ("", *columns)))
        for name, row in value.items():
            table.add_row(str(name), *(cell(row.get(column)) for column in columns))
        out.print(table)
    elif isinstance(value, Mapping) and value:
        print_figures(title, value)
    elif cell(value):
        out.print(f"{title}: {cell(value)}")


def titled_table(title: str, *columns: str | Column) -> Table:
    """An empty table under its title, which is a line of its own so that a narrow table does not cut it."""
    out.print(f"\n{title}", style="bold", soft_wrap=True)
    return Table(*columns)


def print_figures(title: str, figures: Mapping[str, object]) -> None:
    """Print names and figures as a table."""
    table = titled_table(title)
    table.show_header = False
    for name, value in figures.items():
        table.add_row(name, cell(value))
    out.print(table)


def print_json(value: object) -> None:
    """Print a value as JSON."""
    from recspec.base.stores import shown as shown_url

    sys.stdout.write(shown_url(json.dumps(value, indent=2, ensure_ascii=False)).translate(_AS_JSON) + "\n")


def print_next(*command: object) -> None:
    """The command of recspec to run next, quoted for the shell."""
    print_next_program("recspec", *command)


def print_next_program(program: str, *command: object) -> None:
    """The program to run next, quoted for the shell; a path that starts with a hyphen is not read as an option."""
    parts = [f"./{part}" if isinstance(part, Path) and str(part).startswith("-") else str(part) for part in command]
    err.print(f"next: {' '.join(map(_quoted, (program, *parts)))}")


def _quoted(text: str) -> str:
    """A word for the shell; one with characters that can't be shown has them as escapes, as bash and zsh read them."""
    if text.isprintable():
        return shlex.quote(text)
    shown = (chr(b) if 32 <= b < 127 and b not in b"'\\" else f"\\x{b:02x}" for b in os.fsencode(text))
    return f"$'{''.join(shown)}'"


def step(text: str) -> None:
    """Print the title of a step of the demo."""
    err.print(f"\n▸ {text}", style="bold")


def first_line(text: str | None) -> str:
    """The first line of a text."""
    return (text or "").strip().partition("\n")[0]


Data = Annotated[Path, Argument(help="Prepared dataset: its folder or specification file.", metavar="DATA")]
Run = Annotated[Path, Argument(help="Folder of a run or a bundle.", metavar="RUN")]
Out = Annotated[Path, Argument(help="Folder to write.", metavar="OUT")]
Set = Annotated[list[str] | None, Option("--set", metavar="NAME=VALUE", help="Set one setting; repeatable.")]
Workers = Annotated[int, Option(min=1, metavar="N", help="Processes that write shards.")]
Engine = Annotated[str, Option(help="Engine of these processes: local, spark or ray.")]
ShardSize = Annotated[int | None, Option(min=1, metavar="N", help="Users or rows of a shard; by default 16,384.")]
Json = Annotated[bool, Option("--json", help="Print JSON to standard output.")]
Outside = Annotated[bool, Option("--allow-outside", help="Allow files outside the specification's folder.")]
Verify = Annotated[bool, Option("--verify/--no-verify", help="Compare files with their manifest.")]
Device = Annotated[str, Option(help="Device: auto, cpu, cuda or cuda:N.")]


def shard_problems(workers: int, engine: str, shard_size: int | None) -> list[str]:
    """Options of shards that are given without a folder."""
    given = {"--workers": workers != 1, "--engine": engine != "local", "--shard-size": shard_size is not None}
    return [f"{name}: goes with --out FOLDER, a name without an ending" for name, is_there in given.items() if is_there]


def how_of(workers: int, engine: str, shard_size: int | None) -> How:
    """How a job is divided."""
    from recspec.inference import SHARD_SIZE, How

    return How(engine, workers, shard_size or SHARD_SIZE)  # type: ignore[arg-type]  # checked when the job begins


def tell(text: str) -> None:
    """Print a note."""
    err.print(f"note: {text}", soft_wrap=True)


def print_counts(out: Path, counts: Counts, seconds: float, what: str) -> None:
    """Print what a job wrote."""
    rate = "" if counts.kept == counts.shards else f", {seconds:,.0f} s"
    err.print(f"{out}: {how_many(counts.count, what)} in {how_many(counts.shards, 'shard')}{rate}", soft_wrap=True)


def print_unknown(predictor: Predictor, wanted: RecommendRequest, users: int) -> None:
    """Print how many users the model does not know, and what they were answered by."""
    from recspec.inference import note_of_unknown_users

    if users:
        tell(note_of_unknown_users(users, predictor.recommender.fallback_for_unknown_users(wanted)))
