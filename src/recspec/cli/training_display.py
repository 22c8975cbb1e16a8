"""The progress, plan and result of a training, and of a search for settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from recspec.cli.console import cell, err, first_line, out, print_json, print_next, titled_table

if TYPE_CHECKING:
    from rich.progress import TaskID

    from recspec.api import Data, Plan
    from recspec.training import Result
    from recspec.training.search import Found


FEW_STEPS = 5
WHY_STOPPED = {
    "patience": "valid no longer improved",
    "falling": "valid had become clearly worse",
    "target": "valid reached train.target",
    "minutes": "train.minutes were over; --resume with more minutes goes on",
}


class TrainingDisplay:
    """What a run shows while it goes: a live line on a terminal, one plain line an epoch elsewhere."""

    def __init__(self, run: Path, *, live: bool, verbose: bool) -> None:
        self.run, self.verbose = run, verbose
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
        self.bars = Progress(*columns, console=err, disable=not live, transient=True)
        self.task: TaskID | None = None
        self.best = ""

    def __enter__(self) -> TrainingDisplay:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def show(self, event: Mapping[str, object]) -> None:
        """Show one event of the run."""
        kind = event["event"]
        if kind == "start":
            self._start_fit(event) if event.get("fitted") else self._start(event)
        elif kind == "tried":
            err.print(_tried_line(event))
        elif kind == "step" and self.task is not None:
            loss, speed = _number(event, "loss"), _number(event, "samples_per_second")
            text = f"epoch {_number(event, 'epoch'):.1f}  loss {loss:.4f}  {speed:,.0f} samples/s{self.best}"
            self.bars.update(self.task, completed=_number(event, "step"), description=text)
        elif kind == "epoch":
            err.print(_epoch_line(event))
            if event.get("best") is not None:
                self.best = f"  best {_number(event, 'best'):.4f} (epoch {_number(event, 'best_epoch'):g})"
        elif kind == "note":
            err.print(f"note: {event['message']}")

    def _start_fit(self, event: Mapping[str, object]) -> None:
        choices = _choices(event)
        self._print_five(
            data=_data(event),
            model=f"{event['model']}, fitted in one go",
            parameters=f"{_number(event, 'parameters'):,.0f}",
            steps=f"none; {cell(chosen)} chosen on valid" if (chosen := event.get("chosen")) else "none",
            where=_where(event),
        )
        self._print_rest(choices)

    def _start(self, event: Mapping[str, object]) -> None:
        rows, negatives = _number(event, "rows"), _number(event, "negatives")
        drawn = f" and {negatives:.0f} drawn {'negative' if negatives == 1 else 'negatives'} each" if negatives else ""
        not_read = f"; not read: {cell(event['not_read'])}" if event["not_read"] else ""
        steps = _number(event, "steps_per_epoch")
        epochs = _number(event, "steps") / max(1, steps)
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
            parameters=f"{_number(event, 'parameters'):,.0f}{_frozen(event)}",
            steps=f"{steps:,.0f} an epoch, {event['batch_size']:,} rows each; {length}; {measured}",
            where=f"{_where(event)}, precision {event['precision']}",
        )
        if proposed and self.verbose:
            err.print(f"chosen for the data: {'; '.join(f'{name} {cell(value)}' for name, value in proposed.items())}")
        self._print_rest(_choices(event))
        if self.verbose or _number(event, "world_size") > 1:
            for line in _placement_lines(event):
                err.print(line)
        if steps < FEW_STEPS < rows:
            err.print(f"note: few steps an epoch; a train.batch_size under {event['batch_size']} takes more of them")
        if _number(event, "resumed_at_step"):
            epoch = _number(event, "resumed_at_step") / max(1, _number(event, "steps_per_epoch"))
            err.print(f"continuing from step {event['resumed_at_step']}, {epoch:.1f} epochs in")
        # The length of an open-ended run is unknown: no bar, and no remaining time.
        self.task = self.bars.add_task("training", total=None if event.get("open_ended") else _number(event, "steps"))

    def _print_five(self, *, data: str, model: str, parameters: str, steps: str, where: str) -> None:
        """The five lines that matter."""
        lines = {"data": data, "model": model, "parameters": parameters, "steps": steps, "runs on": where}
        for name, what in lines.items():
            err.print(f"{name + ':':<12}{what}")

    def _print_rest(self, choices: Mapping[str, object]) -> None:
        """Every automatic choice and its reason, if it is asked for."""
        if self.verbose:
            for name, what in choices.items():
                err.print(f"{name}: {what}")


def _choices(event: Mapping[str, object]) -> Mapping[str, object]:
    found = event.get("choices")
    return found if isinstance(found, Mapping) else {}


def _data(event: Mapping[str, object]) -> str:
    """The folder of the data, and the dataset that `recspec prepare` made of it."""
    folder, dataset = event.get("data", ""), event.get("dataset")
    return f"{folder} ({dataset})" if dataset else str(folder)


def _where(event: Mapping[str, object]) -> str:
    threads, processes = _number(event, "threads"), _number(event, "world_size")
    among = f", {processes:.0f} processes" if processes > 1 else ""
    return f"{event['device']}{among}, {threads:.0f} {'thread' if threads == 1 else 'threads'}"


def _frozen(event: Mapping[str, object]) -> str:
    """How many parameters are trained, and which parts are not, where any is frozen."""
    frozen = event.get("frozen")
    if not isinstance(frozen, Mapping) or not frozen:
        return ""
    parts = ", ".join(f"{part} ({size:,})" for part, size in frozen.items())
    return f", {_number(event, 'trained_parameters'):,.0f} of them trained; frozen: {parts}"


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
    length = "" if event.get("open_ended") else f"/{_number(event, 'epochs'):.0f}"
    line = f"epoch {round(_number(event, 'epoch'), 1):g}{length}  loss "
    line += f"{_number(event, 'train_loss'):.4f}  {_number(event, 'samples_per_second'):,.0f} samples/s"
    metrics = event.get("metrics")
    metric = str(event.get("metric"))
    protocol, _, name = metric.partition("/")
    values = metrics.get(protocol) if isinstance(metrics, Mapping) else None
    if isinstance(values, Mapping) and name in values:
        best = " (best)" if event.get("best_epoch") == event.get("epoch") else ""
        line += f"  valid {metric} {values[name]:.4f}{best}"
    return line


def _tried_line(event: Mapping[str, object]) -> str:
    settings = event.get("settings")
    named = ", ".join(f"{name} {cell(value)}" for name, value in settings.items()) if isinstance(settings, dict) else ""
    best = " (best)" if event.get("best") else ""
    return f"{named or 'as given'}  valid {event['metric']} {_number(event, 'value'):.4f}{best}"


def show_trial(trial: int, event: Mapping[str, object]) -> None:
    """One line an epoch of each trial, while it goes."""
    if event["event"] == "epoch":
        err.print(f"trial {trial}  {_epoch_line(event)}")
    elif event["event"] == "worker":
        err.print(f"note: {event['message']}")


def print_found(found: Found) -> None:
    """The trials, best first; the best one against the defaults; what mattered; where the best recipe is."""
    order = sorted(found.trials, key=lambda trial: (trial is not found.best, trial.state != "complete", trial.number))
    table = titled_table(f"{found.counts}; {found.metric or 'no metric yet'} on valid")
    for name in ("trial", "value", "", "seconds", "settings"):
        table.add_column(name, justify="right" if name in ("trial", "value", "seconds") else "left")
    for trial in order:
        told = [trial.state if trial is not found.best else "best", *([trial.start] if trial.start else [])]
        table.add_row(
            f"{trial.number}",
            "" if trial.value is None else f"{trial.value:.5f}",
            ", ".join(told) + (f": {first_line(trial.reason)}" if trial.reason else ""),
            "" if trial.seconds is None else f"{trial.seconds:.1f}",
            ", ".join(f"{name.partition('.')[2]} {_short(value)}" for name, value in trial.settings.items()),
        )
    out.print(table)
    if found.best is not None:
        out.print(_against_defaults(found))
        out.print(f"what mattered: {found.importances}")
        out.print(f"{found.recipe}: the best recipe; its bundle is in the folder best beside it")
    if found.left:
        out.print(f"{found.left} {'trial is' if found.left == 1 else 'trials are'} left; the same command goes on")


def _against_defaults(found: Found) -> str:
    """The best trial beside that of the defaults."""
    best, defaults = found.best, found.defaults
    assert best is not None
    line = f"best: trial {best.number}, {found.metric} {best.value:.5f} on valid"
    if defaults is best:
        return f"{line}: the defaults"
    if defaults is None or defaults.value is None:
        return f"{line}; the defaults have no value yet"
    how = "" if defaults.state == "complete" else f" ({defaults.state})"
    return f"{line}; the defaults, trial {defaults.number}: {defaults.value:.5f}{how}"


def _short(value: object) -> str:
    """A setting's value; a list in brackets, since commas stand between settings."""
    return str(value) if isinstance(value, list) else cell(value)


def print_plan(plan: Plan, json_output: bool) -> None:
    """Every choice of a run and its reason."""
    if json_output:
        print_json(plan.to_dict())
        return
    for name, choice in plan.items():
        out.print(f"{name}: {choice}", soft_wrap=True)
    for note in plan.notes:
        err.print(f"note: {note}")


def print_result(result: Result) -> None:
    """Print what a training reached beside the best baseline that was measured, and where its bundle is."""
    if (reached := _reached(result)) is not None:
        err.print(reached)
    if result.stopped == "fitted":
        err.print(f"{result.bundle}: bundle, fitted in {result.seconds:.1f} s")
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


def _number(event: Mapping[str, object], name: str) -> float:
    value = event.get(name)
    return float(value) if isinstance(value, (int, float)) else float("nan")
