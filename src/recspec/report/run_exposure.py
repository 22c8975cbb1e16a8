"""Section: coverage and popularity of what is recommended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from recspec.report import charts
from recspec.report.markup import Child, Markup, tag
from recspec.report.measured import MODEL, Answer, answers_of, mapping, numbers, real
from recspec.report.numbers import number, percent
from recspec.report.page import Section, command, num, soft, table
from recspec.report.page import charts as side_by_side
from recspec.report.run_facts import RunFacts
from recspec.report.run_metrics import evaluate_command, meaning_of

PARTS = ("top", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th", "9th", "tail", "none")
SHOWN = 3  # series of the chart


def exposure_section(run: RunFacts) -> Section:
    """How many items are recommended at all, and how popular these are."""
    return Section("exposure", "Coverage and popularity", tuple(_body(run)))


def shares_of(answer: Answer, who: str = MODEL) -> list[float]:
    """Shares of the recommendations by popularity; empty if they were not measured."""
    return _reals(mapping(answer.saved.report, "exposure", who).get("shares"))


def exposure_chart(series: Mapping[str, list[float]]) -> Markup | None:
    """Shares of the recommendations that popular and rare items get."""
    held = {who: [100 * each for each in of] for who, of in series.items() if len(of) == len(PARTS)}
    if not held:
        return None
    return charts.grouped("exposure", PARTS, held, title="Which items are recommended, from popular to rare",
                          x="tenth of training's interactions, from the most popular items", y="% of recommendations",
                          level=10)  # fmt: skip


def beyond_of(answer: Answer) -> dict[str, dict[str, float]]:
    """Coverage and so on, of the model and each baseline."""
    held = mapping(answer.saved.report, "beyond_accuracy")
    return {str(who): numbers(mapping(of)) for who, of in held.items()}


def _body(run: RunFacts) -> Iterator[Child]:
    answer = next((each for each in answers_of(run) if each.protocol == "full" and beyond_of(each)), None)
    if answer is None:
        if not run.has_users:
            yield soft("This model scores rows and recommends no items.")
            return
        yield soft("These are measured on the lists of protocol full:")
        yield command([*evaluate_command(run), "--protocol", "full"])
        return
    beyond = beyond_of(answer)
    names = list(beyond.get(MODEL, {}))
    own = tag("strong", f"{run.card.model} (this model)")
    rows = [
        [own if who == MODEL else who, *(num(of.get(name), _shown(name, of.get(name))) for name in names)]
        for who, of in beyond.items()
    ]
    yield table(f"Measures of the lists of {answer.saved.split}", ["Model", *(f"#{name}" for name in names)], rows)
    others = [who for who in mapping(answer.saved.report, "exposure") if who != MODEL]
    best = answer.best_baseline
    picked = [who for who in (best, *others) if who is not None and who in others]
    shown = {f"{run.card.model} (this model)": shares_of(answer)}
    shown |= {who: shares_of(answer, who) for who in list(dict.fromkeys(picked))[: SHOWN - 1]}
    if (chart := exposure_chart(shown)) is not None:
        items = [int(each) for each in _reals(mapping(answer.saved.report, "exposure", MODEL).get("items"))]
        yield side_by_side(chart)
        yield tag(
            "p",
            "Each range of items but the last holds a tenth of training's interactions. So a model that recommends "
            "items as often as users choose them has 10 % everywhere (dashed). A high first column means that a few "
            "hits fill the lists.",
        )
        if len(items) == len(PARTS):
            first, tail, none = number(items[0]), number(items[9]), number(items[10])
            yield soft(f"The first range has {first} items, the tenth {tail}; {none} have no interaction in training.")
    yield meaning_of(names)


def _shown(name: str, value: float | None) -> str:
    return percent(value) if name.startswith("coverage") else number(value)


def _reals(value: Any) -> list[float]:
    held = [real(each) for each in value] if isinstance(value, list) else []
    return [each for each in held if each is not None]
