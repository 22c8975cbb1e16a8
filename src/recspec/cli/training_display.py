"""What a training and a search show while they go, and what a training reached."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from recspec.api import Bar, event_number
from recspec.base.errors import how_many
from recspec.base.summaries import shown
from recspec.cli.console import err, print_next

if TYPE_CHECKING:
    from recspec.api import Data
    from recspec.training import Result
    from recspec.training.search import State


FEW_STEPS = 5
MOST_IMPORTANT = 8
"""Columns whose importance is printed."""
WHY_STOPPED = {
    "patience": "valid no longer improved",
    "falling": "valid had become clearly worse",
    "target": "valid reached train.target",
    "minutes": "train.minutes were over; --resume with more minutes goes on",
}


class TrainingDisplay:
    """What a run shows while it goes: a live line on a terminal, one plain line an epoch elsewhere."""

    def __init__(self, *, verbose: bool = False) -> None:
        self.verbose, self.bar, self.best = verbose, Bar(), ""
        self.steps: float | None = None

    def __enter__(self) -> TrainingDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, event: Mapping[str, object]) -> None:
        """Show one event of the run."""
        kind = event["event"]
        if kind != "step":
            self.bar.close()
        if kind == "start":
            self._start_fit(event) if event.get("fitted") else self._start(event)
        elif kind == "tried":
            err.print(_tried_line(event))
        elif kind == "step":
            loss, speed = event_number(event, "loss"), event_number(event, "samples_per_second")
            text = f"epoch {event_number(event, 'epoch'):.1f}  loss {loss:.4f}  {speed:,.0f} samples/s{self.best}"
            self.bar.stage(text, event_number(event, "step"), self.steps)
        elif kind == "epoch":
            err.print(_epoch_line(event))
            if event.get("best") is not None:
                self.best = f"  best {event_number(event, 'best'):.4f} (epoch {event_number(event, 'best_epoch'):g})"
        elif kind == "note":
            err.print(f"note: {event['message']}")

    def _start_fit(self, event: Mapping[str, object]) -> None:
        parameters = event.get("parameters")
        self._print_five(
            data=_data(event),
            model=f"{event['model']}, fitted in one go",
            parameters="known once it is fitted" if parameters is None else f"{parameters:,}",
            steps=f"none; {shown(chosen)} chosen on valid" if (chosen := event.get("chosen")) else "none",
            where=_where(event),
        )
        self._print_choices(event)

    def _start(self, event: Mapping[str, object]) -> None:
        rows, negatives = event_number(event, "rows"), event_number(event, "negatives")
        drawn = f" and {negatives:.0f} drawn {'negative' if negatives == 1 else 'negatives'} each" if negatives else ""
        not_read = f"; not read: {shown(event['not_read'])}" if event["not_read"] else ""
        steps = event_number(event, "steps_per_epoch")
        epochs = event_number(event, "steps") / max(1, steps)
        length = f"{epochs:.0f} {'epoch' if epochs == 1 else 'epochs'}"
        if event.get("open_ended"):
            length = f"epochs until valid no longer improves, {epochs:.0f} at most"
        measured = f"valid {event['metric']} is measured" if event["metric"] else "no split valid to measure on"
        proposed = event.get("proposed")
        proposed = proposed if isinstance(proposed, Mapping) else {}
        settings = "setting" if len(proposed) == 1 else "settings"
        chosen = f", {len(proposed)} {settings} chosen for the data (-v shows them)" if proposed else ""
        self._print_five(
            data=f"{_data(event)}: {rows:,.0f} rows{drawn}{not_read}",
            model=f"{event['model']}{'' if self.verbose else chosen}",
            parameters=f"{event_number(event, 'parameters'):,.0f}{_frozen(event)}",
            steps=f"{steps:,.0f} an epoch, {event['batch_size']:,} rows each; {length}; {measured}",
            where=f"{_where(event)}, precision {event['precision']}",
        )
        if proposed and self.verbose:
            err.print(f"chosen for the data: {'; '.join(f'{name} {shown(value)}' for name, value in proposed.items())}")
        self._print_choices(event)
        if self.verbose or event_number(event, "world_size") > 1:
            for line in _placement_lines(event):
                err.print(line)
        if steps < FEW_STEPS < rows:
            few = how_many(int(steps), "step")
            err.print(f"note: only {few} per epoch; lower train.batch_size (now {event['batch_size']:,}) for more")
        if event_number(event, "resumed_at_step"):
            epoch = event_number(event, "resumed_at_step") / max(1, event_number(event, "steps_per_epoch"))
            err.print(f"continuing from step {event['resumed_at_step']}, {epoch:.1f} epochs in")
        # The length of an open-ended run is unknown: no bar, and no remaining time.
        self.steps = None if event.get("open_ended") else event_number(event, "steps")

    def _print_five(self, *, data: str, model: str, parameters: str, steps: str, where: str) -> None:
        """The five lines that matter."""
        lines = {"data": data, "model": model, "parameters": parameters, "steps": steps, "runs on": where}
        for name, what in lines.items():
            err.print(f"{name + ':':<12}{what}")

    def _print_choices(self, event: Mapping[str, object]) -> None:
        """Every automatic choice and its reason, if it is asked for."""
        choices = event.get("choices")
        for name, what in choices.items() if self.verbose and isinstance(choices, Mapping) else ():
            err.print(f"{name}: {what}")


def _data(event: Mapping[str, object]) -> str:
    """The folder of the data, and the dataset that `recspec prepare` made of it."""
    folder, dataset = event.get("data", ""), event.get("dataset")
    return f"{folder} ({dataset})" if dataset else str(folder)


def _where(event: Mapping[str, object]) -> str:
    threads, processes = event_number(event, "threads"), event_number(event, "world_size")
    among = f", {processes:.0f} processes" if processes > 1 else ""
    return f"{event['device']}{among}, {threads:.0f} {'thread' if threads == 1 else 'threads'}"


def _frozen(event: Mapping[str, object]) -> str:
    """How many parameters are trained, and which parts are not, where any is frozen."""
    frozen = event.get("frozen")
    if not isinstance(frozen, Mapping) or not frozen:
        return ""
    parts = ", ".join(f"{part} ({size:,})" for part, size in frozen.items())
    return f", {event_number(event, 'trained_parameters'):,.0f} of them trained; frozen: {parts}"


def _placement_lines(event: Mapping[str, object]) -> list[str]:
    """Which rank holds which tables, where they are divided, and which lie on the host."""
    sharding, offloaded = event.get("sharding"), event.get("offloaded")
    lines = [str(event["placement_reason"])] if sharding else []
    if isinstance(sharding, list) and len(sharding) > 1:
        lines += map(str, sharding)
    if isinstance(offloaded, list) and offloaded:
        lines.append(f"in the host's memory: {', '.join(offloaded)}")
    return lines


def _epoch_line(event: Mapping[str, object]) -> str:
    length = "" if event.get("open_ended") else f"/{event_number(event, 'epochs'):.0f}"
    line = f"epoch {round(event_number(event, 'epoch'), 1):g}{length}  loss "
    line += f"{event_number(event, 'train_loss'):.4f}  {event_number(event, 'samples_per_second'):,.0f} samples/s"
    metrics, metric = event.get("metrics"), str(event.get("metric"))
    protocol, _, name = metric.partition("/")
    values = metrics.get(protocol) if isinstance(metrics, Mapping) else None
    if isinstance(values, Mapping) and name in values:
        best = " (best)" if event.get("best_epoch") == event.get("epoch") else ""
        line += f"  valid {metric} {values[name]:.4f}{best}"
    return line


def _tried_line(event: Mapping[str, object]) -> str:
    settings = event.get("settings")
    named = shown(settings) if isinstance(settings, dict) else ""
    how = (
        " (taken)"
        if event.get("best")
        else " (ahead by no more than chance: not taken)"
        if event.get("is_level")
        else ""
    )
    return f"{named or 'as given'}  valid {event['metric']} {event_number(event, 'value'):.4f}{how}"


def show_trial(trial: int, event: Mapping[str, object]) -> None:
    """One line an epoch of each trial, while it goes."""
    if event["event"] == "epoch":
        err.print(f"trial {trial}  {_epoch_line(event)}")
    elif event["event"] == "worker":
        err.print(f"note: {event['message']}")


def print_result(result: Result) -> None:
    """Print what a training reached beside the best baseline that was measured, and where its bundle is."""
    if (reached := _reached(result)) is not None:
        err.print(reached)
    if result.stopped == "fitted":
        size = f"; {result.size}" if result.size else ""
        err.print(f"{result.bundle}: bundle, fitted in {result.seconds:.1f} s{size}")
        if result.importance:
            named = [f"{name} {share:.0%}" for name, share in list(result.importance.items())[:MOST_IMPORTANT]]
            err.print(f"importance: {', '.join(named)}", soft_wrap=True)
    else:
        where = f"{result.bundle}: bundle of epoch {round(result.best_epoch, 2):g}"
        speed = f"{result.samples_per_second:,.0f} samples/s, {result.seconds:.1f} s"
        why = "" if result.stopped == "epochs" else f"; stopped, as {WHY_STOPPED[result.stopped]}"
        err.print(f"{where}; {speed}{why}")
    for warning in result.warnings:
        err.print(f"warning: {warning.message}", soft_wrap=True)


def print_next_of(run: Path, opened: Data | None, data: Path) -> None:
    """The command that measures a run on test, or, without that split, the one that serves it."""
    outside = ["--allow-outside"] if opened is not None and opened.spec.allow_outside else []
    if opened is not None and "test" in opened.splits:
        print_next("evaluate", run, data, "--baselines", *outside)
    else:
        print_next("serve", run)


def _reached(result: Result) -> str | None:
    """The metric on valid, beside the best of the baselines."""
    from recspec.evaluation import is_lower_better

    if result.value is None:
        return None
    line = f"{result.metric} on valid: {result.value:.4f}"
    if not result.baselines:
        return line
    best = (min if is_lower_better(result.metric) else max)(result.baselines, key=lambda name: result.baselines[name])
    among = "" if len(result.baselines) == 1 else f", the best of {', '.join(result.baselines)} with default settings"
    return f"{line}; {best}{among}: {result.baselines[best]:.4f}"


class SearchDisplay:
    """What a search shows while it goes: the leaderboard on a terminal, a line for each slice elsewhere."""

    def __init__(self, minutes: float) -> None:
        from rich.live import Live

        self.live = Live(console=err.made, transient=True, refresh_per_second=2, auto_refresh=err.is_terminal)
        self.until, self.now = time.monotonic() + 60 * minutes, ""
        self.state: State | None = None

    def __enter__(self) -> SearchDisplay:
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
            self.now = f"{name}: epoch {shown(event['epoch'])}, best {shown(event.get('best'))}"
            self._refresh()

    def look(self, state: State, left: float) -> None:
        """Show the candidates after a slice."""
        left = max(0.0, left)
        self.until, self.state = time.monotonic() + left, state
        if err.is_terminal:
            self._refresh()
            return
        line = max(state.lines, key=lambda each: each.began)
        reached = f"{state.deciding} {shown(abs(line.best))}" if line.values else line.failed.partition("\n")[0]
        best = max(state.lines, key=lambda each: each.best)
        err.print(
            f"{line.name}: {line.seconds:.0f} s, {reached}; best so far {best.name}; {left / 60:.1f} minutes left"
        )

    def _refresh(self) -> None:
        if not err.is_terminal:
            return
        from rich.table import Table

        left = max(0.0, self.until - time.monotonic()) / 60
        table = Table("model", "valid", "seconds", "", title=f"{left:.1f} minutes left  {self.now}")
        lines = sorted(self.state.lines if self.state else (), key=lambda each: -each.best)
        for line in lines:
            how = line.failed.partition("\n")[0] or line.ended or ("waits" if line.values else "not begun")
            table.add_row(line.name, shown(abs(line.best)) if line.values else "", f"{line.seconds:.0f}", how)
        self.live.update(table)
