"""Section: metrics of parts of the users, items or rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from recspec.report import charts
from recspec.report.markup import Child, Markup, tag
from recspec.report.measured import MODEL, NORMAL, Answer, Measured, answers_of, mapping, numbers, of_metric, real
from recspec.report.numbers import number
from recspec.report.page import Cell, Section, command, drawing, num, soft, table
from recspec.report.run_facts import RunFacts
from recspec.report.run_metrics import evaluate_command, interval_text

WORDS = {
    "activity": "Users by how many events the model knows of them",
    "popularity": "Items: the head holds half of training's interactions, the tail the other half",
}
MOST_PARTS = 60


def slices_section(run: RunFacts) -> Section:
    """For whom and for what the model works."""
    return Section("slices", "Slices", tuple(_body(run)))


def slices_of(run: RunFacts, split: str, protocol: str) -> dict[str, Mapping[str, Any]]:
    """The slices of a split and protocol, of the newest evaluation of the present model that has each."""
    found: dict[str, Mapping[str, Any]] = {}
    for saved in sorted(run.evaluations, key=lambda each: (each.is_current, each.time), reverse=True):
        if saved.split == split:
            for by, parts in mapping(saved.report, "slices", protocol).items():
                found.setdefault(str(by), mapping(parts))
    return {by: parts for by, parts in found.items() if parts}


def _body(run: RunFacts) -> Iterator[Child]:
    empty = True
    for answer in answers_of(run):
        held = slices_of(run, answer.saved.split, answer.protocol)
        for by, parts in held.items():
            empty = False
            yield tag("h3", WORDS.get(by, f"By {by}"), f", {answer.saved.split}, protocol {answer.protocol}")
            yield _table(answer, by, parts)
    if empty:
        yield soft(
            "No slices were measured. A slice says for whom a model works: for new or old users, head or tail items, "
            "or each value of a column. For example:"
        )
        yield command([*evaluate_command(run), *([] if run.has_users else ["--slice", "COLUMN"])])


def _table(answer: Answer, by: str, parts: Mapping[str, Any]) -> Markup:
    main = answer.main
    of_all = answer.metrics[MODEL].get(main)
    held = []
    for name, part in list(parts.items())[:MOST_PARTS]:
        values, errors = numbers(mapping(part, "metrics")), numbers(mapping(part, "standard_errors"))
        if main in values:
            held.append((str(name), part, values, of_metric(main, values[main], errors.get(main))))
    least = min((each.low for *_, each in held), default=0.0)
    most = max((each.high for *_, each in held), default=1.0)
    others = [name for name in (held[0][2] if held else {}) if name != main][:4]
    rows: list[list[Child | Cell]] = []
    for name, part, values, found in held:
        few = " (few: read it with care)" if (real(part.get("count")) or 0) < 30 else ""
        rows.append([f"{name}{few}", num(part.get("count")), num(found.value), num(None, interval_text(found)),
                     drawing(charts.whisker(found.low, found.value, found.high, least, most)),
                     _beside(found, of_all), *(num(values.get(each)) for each in others)])  # fmt: skip
    counted = "Rows" if answer.protocol == "rows" else "Users"
    heads = ["Slice", f"#{counted}", f"#{main}", "#95 % interval", "", "Beside all", *(f"#{name}" for name in others)]
    return table(f"Metrics by {by}; over all: {main} {number(of_all.value) if of_all else '–'}", heads, rows)


def _beside(found: Measured, of_all: Measured | None) -> str:
    if of_all is None or found.error is None:
        return ""
    apart = found.value - of_all.value
    if abs(apart) <= NORMAL * found.error:
        return "about the same"
    return "higher" if apart > 0 else "lower"
