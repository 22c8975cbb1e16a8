"""The page of an experiment: a verdict, each metric, guardrails, and how the effect came to be."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from recspec.loop import Effect, ExperimentReport
from recspec.report import charts
from recspec.report.page import draw, moment, num, number, p_value, percent, render, signed, strong, table

SECTIONS = {"verdict": "Verdict", "metrics": "Metrics", "guardrails": "Guardrails", "looks": "The first metric so far"}
STATES = {"holds": "holds", "broken": "broken", "open": "not yet sure"}


def experiment_page(report: ExperimentReport) -> str:
    """The whole page."""
    left_out = {name for name in ("metrics", "guardrails", "looks") if not getattr(report, name)}
    sections = {name: heading for name, heading in SECTIONS.items() if name not in left_out}
    if report.preference is not None:
        sections["preference"] = "Preference"
    shown = report.metrics or report.preference
    return render(
        "experiment.html",
        f"Experiment {report.name}",
        sections,
        report=report,
        at=moment(report.at / 1e6),
        end=moment(report.end / 1e6),
        tiles=_tiles(report),
        has_welch=bool(shown) and not report.is_over,
        is_divided=len(report.variants) > 2,
        metrics=_metrics(report),
        guardrails=_guardrails(report),
        looks=_looks(report),
        preference=_preference(report),
    )


def _tiles(report: ExperimentReport) -> dict[str, tuple[str, str] | str]:
    """The numbers to see first."""
    names = report.variants if len(report.entered) > 1 else ("interleaved",)
    found: dict[str, tuple[str, str] | str] = {
        name: (number(counted), f"of {number(entered)} users have a closed window")
        for name, entered, counted in zip(names, report.entered, report.counted, strict=True)
    }
    if len(report.entered) > 1:
        found["Sample ratio"] = (f"p {p_value(report.ratio_p_sequential)}", f"chi-square p {p_value(report.ratio_p)}")
    return found


def _metrics(report: ExperimentReport) -> Markup:
    rows = []
    for each in report.metrics:
        row = [strong(each.name), each.variant, num(each.control), num(each.treatment), *_effect(each.effect)]
        rows.append([*row, num(each.variance_left, percent(each.variance_left))])
    heads = ["Metric", "Variant", f"#{report.variants[0]}", "#variant", *EFFECT_HEADS, "#Variance left"]
    return table("Every metric of every variant beside the control", heads, rows)


EFFECT_HEADS = ("#Difference", "#At any look", "", "#p at any look", "#Welch's interval", "#p of Welch")


def _effect(effect: Effect) -> list[object]:
    """The cells of an effect, below `EFFECT_HEADS`."""
    most = max(abs(effect.low), abs(effect.high))
    drawn = charts.whisker(effect.low, effect.difference, effect.high, -most, most, zero=True)
    return [
        num(effect.difference, signed(effect.difference)),
        num(effect.low, _interval(effect.low, effect.high)),
        draw(drawn),
        num(effect.p, p_value(effect.p)),
        num(effect.fixed_low, _interval(effect.fixed_low, effect.fixed_high)),
        num(effect.fixed_p, p_value(effect.fixed_p)),
    ]


def _guardrails(report: ExperimentReport) -> Markup:
    rows: list[Sequence[object]] = []
    for each in report.guardrails:
        margin = percent(each.margin) if each.is_relative else number(each.margin)
        figures = num(each.control), num(each.treatment), num(each.margin, margin)
        left = num(each.low, _interval(each.low, each.high))
        rows.append([strong(each.name), each.variant, *figures, left, STATES[each.state]])
    heads = ["Guardrail", "Variant", f"#{report.variants[0]}", "#variant", "#Margin", "#Left of the margin", "State"]
    return table("What a variant may not harm", heads, rows)


def _looks(report: ExperimentReport) -> list[Markup]:
    """A chart a variant: the difference with its interval, over the users."""
    drawn = []
    for place, name in enumerate(dict.fromkeys(each.variant for each in report.looks)):
        own = [each for each in report.looks if each.variant == name]
        users, told = [each.users for each in own], [f"{each.users:,} users" for each in own]
        lines = {
            "difference": [each.difference for each in own],
            "low": [each.low for each in own],
            "high": [each.high for each in own],
        }
        series = [
            charts.Series(
                line, users, values, [f"{when}: {value:+.4g}" for when, value in zip(told, values, strict=True)]
            )
            for line, values in lines.items()
        ]
        title = f"{report.metrics[0].name}: {name} minus {report.variants[0]}"
        drawn.append(charts.lines(f"looks-{place}", series, title=title, x="users", y="difference"))
    return drawn


def _preference(report: ExperimentReport) -> Markup | None:
    found = report.preference
    if found is None:
        return None
    first, second = report.variants
    counts = num(found.users), num(found.first), num(found.second), num(found.tied)
    heads = ["", "#Users with a click", f"#prefer {first}", f"#prefer {second}", "#tied", *EFFECT_HEADS, "#p of signs"]
    row = [strong(f"{second} minus {first}"), *counts, *_effect(found.effect), num(found.p_sign, p_value(found.p_sign))]
    return table("Shares of a user's clicks on interleaved lists", heads, [row])


def _interval(low: float, high: float) -> str:
    return f"{signed(low)} to {signed(high)}"
