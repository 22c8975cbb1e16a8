"""The command that finds the best model for a dataset: auto."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from typer import Option

from recspec.cli.console import cell, err, out, print_json, titled_table
from recspec.cli.options import Data, Device, Json, Out, Outside
from recspec.cli.training_display import print_next_of
from recspec.machine import keep_freed_memory

if TYPE_CHECKING:
    from recspec.auto import Leaderboard, State

COLUMNS = {
    "name": "model", "valid": "valid", "valid_error": "+-", "test": "test", "test_error": "+-", "seconds": "seconds",
    "epochs": "epochs", "ended": "ended by", "megabytes": "MB", "p50_ms": "ms a request",
}  # fmt: skip
"""Figures of a line -> heading."""
USERS = {"valid": "for valid", "valid_error": "for its standard error and the lead", "test": "for test"}
"""Figures that are of users -> their name in a sentence."""


def auto(
    data: Data,
    out_folder: Out,
    minutes: Annotated[float, Option(min=0.05, help="Time of the whole search, over all calls.")] = 30.0,
    metric: Annotated[
        str | None, Option(metavar="PROTOCOL/METRIC", help="Metric on valid that decides; by default that of training.")
    ] = None,
    models: Annotated[str | None, Option(help="Models between commas; by default all that can train on DATA.")] = None,
    seed: Annotated[int, Option(min=0, help="Random seed.")] = 0,
    json_output: Json = False,
    device: Device = "auto",
    allow_outside: Outside = False,
) -> None:
    """Find the best model for a dataset: train all that fit, choose on valid, open test at the end."""
    from recspec import api

    keep_freed_memory()
    only = None if models is None else [name.strip() for name in models.split(",") if name.strip()]
    with _Display(minutes) as display:
        result = api.auto(data, out_folder, minutes=minutes, metric=metric, models=only, seed=seed, device=device,
                         allow_outside=allow_outside, progress=display)  # fmt: skip
    board = result.board
    if json_output:
        print_json(board.to_dict())
    else:
        print_board(board)
    print_next_of(board.best, result.model.data, data)


def print_board(board: Leaderboard) -> None:
    """The leaderboard, its verdict, and where the winner lies."""
    from recspec.auto import main_reason

    table = titled_table(f"{board.metric}, chosen on valid", *COLUMNS.values())
    for line in board.lines:
        table.add_row(*(cell(line[name]) for name in COLUMNS))
    out.print(table)
    if board.users:
        of = {figure: f"{ranked:,} of {known:,}" for figure, (ranked, known) in board.users.items()}
        said = [f"{of[figure]} {what}" for figure, what in USERS.items() if figure in of]
        out.print(f"users ranked: {', '.join(said)}", soft_wrap=True)
    out.print(board.verdict, soft_wrap=True)
    first = board.lines[0]
    if "trained_again_on" in first:
        reached = (
            f": {board.metric} on test {cell(first['again_test'])} +- {cell(first['again_test_error'])}"
            if "again_test" in first
            else ""
        )
        out.print(f"{first['name']} was trained again on train and valid{reached}")
    else:
        out.print(
            f"{first['name']} was not trained again on train and valid: {first['not_trained_again']}", soft_wrap=True
        )
    for warning in board.warnings:
        err.print(f"warning: {warning}", soft_wrap=True)
    for name, why in board.left_out.items():
        err.print(f"left out: {name}: {main_reason(why)}", soft_wrap=True)
    for line in board.lines:
        if "problem" in line:
            err.print(f"not measured: {line['name']}: {main_reason(str(line['problem']))}", soft_wrap=True)
    if board.left_out:
        err.print(f"{board.best.parent / 'leaderboard.json'} holds the whole reasons", soft_wrap=True)
    out.print(f"{board.seconds:,.0f} s, {board.share_of_losers:.0%} of them for models that did not win")
    out.print(
        f"{board.best}: the winner; evaluate, predict, serve and export take it, and recommend if it ranks items",
        soft_wrap=True,
    )


class _Display:
    """What a search shows while it goes: the leaderboard on a terminal, a line for each slice elsewhere."""

    def __init__(self, minutes: float) -> None:
        from rich.live import Live

        self.live = Live(console=err, transient=True, refresh_per_second=2, auto_refresh=err.is_terminal)
        self.until, self.now = time.monotonic() + 60 * minutes, ""
        self.state: State | None = None

    def __enter__(self) -> _Display:
        if err.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if err.is_terminal:
            self.live.stop()

    def tell(self, message: str) -> None:
        """Print what begins, goes on or is left out."""
        err.print(message, soft_wrap=True, highlight=False)

    def show(self, name: str, event: Mapping[str, object]) -> None:
        """Show one event of a candidate's training."""
        if event["event"] == "epoch":
            self.now = f"{name}: epoch {cell(event['epoch'])}, best {cell(event.get('best'))}"
            self._refresh()

    def look(self, state: State, left: float) -> None:
        """Show the candidates after a slice."""
        left = max(0.0, left)
        self.until, self.state = time.monotonic() + left, state
        if err.is_terminal:
            self._refresh()
            return
        line = max(state.lines, key=lambda each: each.began)
        reached = f"{state.deciding} {cell(abs(line.best))}" if line.values else line.failed.partition("\n")[0]
        best = max(state.lines, key=lambda each: each.best)
        err.print(
            f"{line.name}: {line.seconds:.0f} s, {reached}; best so far {best.name}; {left / 60:.1f} minutes left"
        )

    def _refresh(self) -> None:
        if not err.is_terminal:
            return
        left = max(0.0, self.until - time.monotonic()) / 60
        from rich.table import Table

        table = Table("model", "valid", "seconds", "", title=f"{left:.1f} minutes left  {self.now}")
        lines = sorted(self.state.lines if self.state else (), key=lambda each: -each.best)
        for line in lines:
            how = line.failed.partition("\n")[0] or line.ended or ("waits" if line.values else "not begun")
            table.add_row(line.name, cell(abs(line.best)) if line.values else "", f"{line.seconds:.0f}", how)
        self.live.update(table)
