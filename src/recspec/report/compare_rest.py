"""Sections of a comparison: slices, what is recommended, curves, calibration, settings and cost side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from recspec.report import charts
from recspec.report.compare_users import compares_activity
from recspec.report.compare_verdict import Paired
from recspec.report.markup import Child, Markup, plain, tag
from recspec.report.measured import MODEL, first_answer, mapping, numbers, of_metric
from recspec.report.numbers import duration, number, size
from recspec.report.page import Cell, Section, command, num, soft, table
from recspec.report.page import charts as side_by_side
from recspec.report.run_calibration import reliability_of
from recspec.report.run_cost import train_command
from recspec.report.run_curves import curve
from recspec.report.run_exposure import beyond_of, exposure_chart, shares_of
from recspec.report.run_facts import RunFacts
from recspec.report.run_metrics import evaluate_command, interval_text, meaning_of
from recspec.report.run_slices import WORDS, slices_of

Runs = Sequence[RunFacts]


def slices_section(runs: Runs, beside: Paired) -> Section:
    """The same slices of every run; activity only where no section before compares users by it."""
    body: list[Child] = []
    by_activity = all(compares_activity(pairs) for _, pairs, _ in beside)
    first = first_answer(runs[0])
    if first is not None:
        held = [slices_of(run, first.saved.split, first.protocol) for run in runs]
        for by in held[0]:
            if by == "activity" and by_activity:
                continue
            if all(by in each for each in held):
                body += [
                    tag("h3", WORDS.get(by, f"By {by}")),
                    _slices(runs, by, [each[by] for each in held], first.main),
                ]
    if body:
        body.append(
            soft(
                "Intervals of 95 % in brackets. They are of each run alone, so two runs may differ clearly though "
                "their intervals overlap."
            )
        )
    else:
        told = "no slices in common but activity, which is above" if by_activity else "no slices in common"
        body = [
            soft(f"The runs have {told}. For example:"),
            command(*(evaluate_command(run) for run in runs)),
        ]
    return Section("slices", "Slices", tuple(body))


def exposure_section(runs: Runs) -> Section:
    """Coverage, novelty and popularity of the lists."""
    answers = [(run, first_answer(run)) for run in runs]
    held = [(run, beyond_of(answer).get(MODEL, {}), shares_of(answer)) for run, answer in answers if answer is not None]
    names = list(dict.fromkeys(name for _, beyond, _ in held for name in beyond))
    if not names:
        return Section(
            "exposure", "Coverage and popularity", (soft("Not measured: the runs have no lists under protocol full."),)
        )
    rows = [[tag("strong", run.name), *(num(beyond.get(name)) for name in names)] for run, beyond, _ in held]
    body: list[Child] = [table("Measures of the lists", ["Run", *(f"#{name}" for name in names)], rows)]
    if (chart := exposure_chart({run.name: shares for run, _, shares in held})) is not None:
        body.append(side_by_side(chart))
    return Section("exposure", "Coverage and popularity", (*body, meaning_of(names)))


def curves_section(runs: Runs) -> Section:
    """Metrics of valid over the epochs, and reliability diagrams, in one chart each."""
    drawn: list[Markup] = []
    names = dict.fromkeys(str(run.card.trained.get("valid_metric") or "") for run in runs)
    for place, name in enumerate(filter(None, names)):
        series = [each for run in runs if (each := curve(run, name)) is not None]
        if series:
            drawn.append(charts.lines(f"curve-{place}", series, title=f"{plain(name)} on valid", x="epoch", y="value"))
    reliabilities = [found[1] for run in runs if (found := reliability_of(run)) is not None]
    if reliabilities:
        drawn.append(charts.reliability("reliability", reliabilities, title="Probabilities and what came true"))
    body: tuple[Child, ...] = (
        (side_by_side(*drawn),) if drawn else (soft("No run has curves: models fitted in one go take no steps."),)
    )
    return Section("curves", "Curves and calibration", body)


def settings_section(runs: Runs) -> Section:
    """What differs between the runs' settings."""
    body: list[Child] = []
    for title, held in (("Data", [_data(run) for run in runs]), ("Model", [run.card.settings for run in runs]),
                        ("Training", [run.card.train for run in runs])):  # fmt: skip
        names = dict.fromkeys(name for each in held for name in each)
        different = [name for name in names if len({_text(each.get(name, "–")) for each in held}) > 1]
        if different:
            rows = [[name, *(tag("code", _text(each.get(name, "–"))) for each in held)] for name in different]
            body.append(table(f"{title}: settings that differ", ["Setting", *(run.name for run in runs)], rows))
        else:
            body.append(soft(f"{title}: nothing differs."))
    return Section("settings", "What differs", tuple(body))


def cost_section(runs: Runs) -> Section:
    """Time, memory and size."""
    rows: list[list[Child | Cell]] = []
    for run in runs:
        seconds = run.card.trained.get("seconds")
        peak = run.record.peak_memory if run.record is not None else None
        whole = run.record.seconds if run.record is not None else None
        device = str(run.card.trained.get("device", "–"))
        rows.append([
            tag("strong", run.name), num(seconds, duration(seconds)), num(whole, duration(whole)),
            num(peak, size(peak)), num(len([*run.of("epoch")]) or None), num(run.start.get("parameters")), device,
        ])  # fmt: skip
    heads = ["Run", "#Training", "#Whole command", "#Peak memory", "#Epochs", "#Parameters", "Device"]
    body: list[Child] = [table("What the runs took", heads, rows), tag("h3", "Make them again")]
    body.append(command(*(train_command(run) for run in runs), *(evaluate_command(run) for run in runs),
                        ["recspec", "report", *(run.path for run in runs)]))  # fmt: skip
    body.append(soft("Each run has a report of its own: recspec report RUN."))
    return Section("cost", "Cost and commands", tuple(body))


def _slices(runs: Runs, by: str, held: Sequence[Mapping[str, Any]], metric: str) -> Markup:
    rows: list[list[Child | Cell]] = []
    for name in list(held[0])[:60]:
        row: list[Child | Cell] = [str(name), num(mapping(held[0], name).get("count"))]
        found = []
        for each in held:
            values, errors = (numbers(mapping(each, name, of)) for of in ("metrics", "standard_errors"))
            found.append(of_metric(metric, values[metric], errors.get(metric)) if metric in values else None)
        row += [num(None) if one is None else num(one.value, f"{number(one.value)} ({interval_text(one)})")
                for one in found]  # fmt: skip
        rows.append(row)
    return table(f"{metric} by {by}", ["Slice", "#Users or rows", *(f"#{run.name}" for run in runs)], rows)


def _data(run: RunFacts) -> dict[str, object]:
    record = run.data_record
    return {} if record is None else {"dataset": record.name, "folder": record.path, "digest": record.digest}


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 200 else f"{text[:199]}…"
