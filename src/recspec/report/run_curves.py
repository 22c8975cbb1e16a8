"""Section: learning curves, from log.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recspec.report import charts
from recspec.report.charts import Series
from recspec.report.markup import Child, Markup, plain
from recspec.report.measured import real
from recspec.report.numbers import number
from recspec.report.page import Section, details, soft, table
from recspec.report.page import charts as side_by_side
from recspec.report.run_facts import RunFacts

MOST_POINTS = 400
MOST_CURVES = 8  # metrics with a chart each


def curves_section(run: RunFacts) -> Section:
    """Loss and metrics as training went."""
    return Section("curves", "Learning curves", tuple(_body(run)))


def curve(run: RunFacts, metric: str) -> Series | None:
    """A metric of valid, `PROTOCOL/NAME`, over the epochs; None if there are fewer than two."""
    return _series(run.name, _epochs(run), "epoch", lambda each: _metric(each, metric), metric)


def _body(run: RunFacts) -> Iterator[Child]:
    steps, epochs = _steps(run), _epochs(run)
    best = run.card.trained.get("epoch")
    drawn: list[Markup] = []
    if loss := _series("loss", steps, "epoch", lambda each: each.get("loss"), "loss"):
        by_epoch = _series("mean of the epoch", epochs, "epoch", lambda each: each.get("train_loss"), "loss")
        held = [loss, *([by_epoch] if by_epoch else [])]
        drawn.append(charts.lines("loss", held, title="Loss in training", x="epoch", y="loss"))
    marks = {"the epoch that was kept": float(best)} if isinstance(best, (int, float)) and best else {}
    names = [name for each in epochs[:1] for name in _metrics(each)][:MOST_CURVES]
    wanted = str(run.card.trained.get("valid_metric") or "")
    for place, name in enumerate(sorted(names, key=lambda name: name != wanted)):
        if found := _series(name, epochs, "epoch", lambda each, name=name: _metric(each, name), name):
            title = f"{plain(name)} on valid" + (", which chose the epoch" if name == wanted else "")
            drawn.append(charts.lines(f"curve-{place}", [found], title=title, x="epoch", y="value", marks=marks))
    if (rate := _series("rate", steps, "epoch", lambda each: each.get("learning_rate"), "rate")) and _varies(rate.y):
        drawn.append(charts.lines("rate", [rate], title="Learning rate", x="epoch", y="rate"))
    if drawn:
        yield side_by_side(*drawn)
    elif run.card.trained.get("stopped") == "fitted" or run.start.get("fitted"):
        yield soft("This model is fitted in one go, without steps, so there are no curves.")
    else:
        yield soft("There is no log.jsonl with steps in this folder, so there are no curves.")
    if epochs:
        yield details("Metrics of every epoch", _table(epochs))


def _steps(run: RunFacts) -> list[Mapping[str, Any]]:
    """The logged steps, once each: of a step that was repeated after a stop, the last one."""
    found = {each["step"]: each for each in run.of("step") if isinstance(each.get("step"), int)}
    ordered = [found[step] for step in sorted(found)]
    return ordered[:: max(1, math.ceil(len(ordered) / MOST_POINTS))]


def _epochs(run: RunFacts) -> list[Mapping[str, Any]]:
    found = {each["epoch"]: each for each in run.of("epoch") if isinstance(each.get("epoch"), (int, float))}
    return [found[epoch] for epoch in sorted(found)]


def _metrics(epoch: Mapping[str, Any]) -> Iterator[str]:
    held = epoch.get("metrics")
    for protocol, named in held.items() if isinstance(held, Mapping) else ():
        yield from (f"{protocol}/{name}" for name in (named if isinstance(named, Mapping) else ()))


def _metric(epoch: Mapping[str, Any], name: str) -> object:
    protocol, _, metric = name.partition("/")
    held = epoch.get("metrics")
    named = held.get(protocol) if isinstance(held, Mapping) else None
    return named.get(metric) if isinstance(named, Mapping) else None


def _series(name: str, events: Sequence[Mapping[str, Any]], x: str, value: Any, what: str) -> Series | None:
    pairs = [(each.get(x), value(each)) for each in events]
    numbers = [(real(a), real(b)) for a, b in pairs]
    held = [(a, b) for a, b in numbers if a is not None and b is not None]
    if len(held) < 2:
        return None
    told = [f"epoch {number(a)}: {plain(what)} {number(b)}" for a, b in held]
    return Series(name, [a for a, _ in held], [b for _, b in held], told)


def _varies(values: Any) -> bool:
    return bool(max(values) > min(values))


def _table(epochs: Sequence[Mapping[str, Any]]) -> Markup:
    names = list(dict.fromkeys(name for each in epochs for name in _metrics(each)))[:12]
    rows = [[number(each["epoch"]), number(each.get("train_loss")), *(number(_metric(each, name)) for name in names)]
            for each in epochs]  # fmt: skip
    return table("Valid after each epoch", ["Epoch", "#Training loss", *(f"#{name}" for name in names)], rows)
