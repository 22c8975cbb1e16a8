"""Sections: the verdict, and metrics with intervals beside baselines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recspec.report import charts
from recspec.report.markup import Child, Markup, coded, tag
from recspec.report.measured import (
    MODEL,
    NORMAL,
    Answer,
    Measured,
    answers_of,
    first_answer,
    is_lower_better,
    meanings,
    texts,
)
from recspec.report.numbers import duration, number, signed, size
from recspec.report.page import Cell, Section, command, details, drawing, note, num, soft, table, tiles
from recspec.report.run_facts import RunFacts

CONSTANT = "constant"


def verdict_section(run: RunFacts) -> Section:
    """What to know first: how good the model is beside the best baseline, and what is wrong with it."""
    return Section("verdict", "Verdict", tuple(_verdict(run)))


def metrics_section(run: RunFacts) -> Section:
    """Each evaluation as a table."""
    answers = answers_of(run)
    body: list[Child] = [part for answer in answers for part in _answer(run, answer)]
    if not answers:
        body += _not_evaluated(run)
    elif names := [name for answer in answers for name in answer.metrics.get(MODEL, {})]:
        body.append(meaning_of(names))
    return Section("metrics", "Metrics beside baselines", tuple(body))


def meaning_of(names: Sequence[str]) -> Markup:
    """What some metrics mean, folded."""
    terms = [(tag("dt", tag("code", name)), tag("dd", told)) for name, told in meanings(names)]
    return details("What the metrics mean", tag("dl", terms))


def interval_text(found: Measured) -> str:
    """The 95 % interval in words; a dash without one."""
    return "–" if found.error is None else f"{number(found.low)} to {number(found.high)}"


def evaluate_command(run: RunFacts) -> list[str]:
    """The command that fills the sections of an evaluation."""
    slices = ["--slice", "activity", "--slice", "popularity"] if run.has_users else []
    return ["recspec", "evaluate", str(run.path), run.data_path, "--baselines", *slices]


def _verdict(run: RunFacts) -> Iterator[Child]:
    answer = first_answer(run)
    if answer is None:
        yield note("This run has not been evaluated on a test split yet, so this report can't say how good it is. "
                   "What validation said in training stands under Learning curves. To fill this in:")  # fmt: skip
        yield command(evaluate_command(run))
    else:
        yield from _judged(answer)
    facts: dict[str, tuple[str, str] | str] = {"Model": run.card.model}
    if answer is not None and answer.main:
        ours = answer.metrics[MODEL][answer.main]
        facts[f"{answer.main} on {answer.saved.split}"] = (number(ours.value), _plus_minus(ours))
        if (best := answer.best_baseline) is not None:
            facts[f"best baseline: {best}"] = (
                number(answer.metrics[best][answer.main].value),
                f"the same {answer.main}",
            )
    if (parameters := run.start.get("parameters")) is not None:
        facts["Parameters"] = number(parameters)
    facts["Training took"] = duration(run.card.trained.get("seconds"))
    facts["Model on disk"] = size(sum(file.stat().st_size for file in run.bundle.rglob("*") if file.is_file()))
    yield tiles(facts)
    warnings = [*run.card.warnings, *_dicts(answer)]
    for warning in dict.fromkeys(str(each.get("message", "")) for each in warnings):
        yield note(tag("strong", "Warning: "), coded(warning), kind="bad")
    for problem in run.problems:
        yield note(coded(problem))


def _judged(answer: Answer) -> Iterator[Child]:
    """A sentence on the model beside the best baseline."""
    ours, best = answer.metrics[MODEL].get(answer.main), answer.best_baseline
    if ours is None:
        return
    reached = f"{answer.main} is {number(ours.value)}"
    if ours.error is not None:
        reached += f" (95 % interval {interval_text(ours)})"
    if best is None:
        yield note(
            f"On {answer.title}, {reached}. No baseline stands beside it: evaluate with --baselines to see whether "
            "that is good."
        )
        return
    theirs, gap = answer.metrics[best][answer.main], answer.difference(best, answer.main)
    lower = is_lower_better(answer.main)
    raw = ours.value - theirs.value if gap is None else gap.value
    clear = gap is not None and gap.is_clear
    ahead = (raw < 0) == lower and raw != 0
    if not clear:
        word, kind = "is level with the best baseline", ""
    else:
        word, kind = ("is better than every baseline", "good") if ahead else ("is worse than the best baseline", "bad")
    told = (
        f", {best} with {number(theirs.value)}"
        if not (clear and ahead)
        else f"; the best, {best}, has {number(theirs.value)}"
    )
    by = ""
    if gap is not None and gap.error is not None:
        by = f" The difference is {signed(raw)} (95 % interval {signed(gap.low)} to {signed(gap.high)}), over the same "
        by += f"{number(answer.count)} {who_of(answer)}."
    yield note(tag("strong", f"The model {word}{told}."), f" On {answer.title}, {reached}.{by}", kind=kind)


def _answer(run: RunFacts, answer: Answer) -> Iterator[Child]:
    yield tag("h3", answer.title)
    yield soft(_described(answer))
    if not answer.saved.is_current:
        yield note("This evaluation is of an earlier model in this folder. Evaluate again:")
        yield command(evaluate_command(run))
    yield _table(run, answer)
    verdicts = texts(answer.saved.report.get("verdicts"))
    notes = [each for each in verdicts if each.startswith(f"{answer.protocol}: ")]
    notes += texts(answer.saved.report.get("notes"))
    if notes:
        yield details("Notes of the evaluation", tag("ul", [tag("li", coded(each)) for each in notes]))
    if len(answer.metrics) < 2:
        yield soft("No baseline stands beside the model. To add them:")
        yield command(evaluate_command(run))


def _table(run: RunFacts, answer: Answer) -> Markup:
    main, lower = answer.main, is_lower_better(answer.main)
    others = [name for name in answer.metrics.get(MODEL, {}) if name != main]
    held = {who: of for who, of in answer.metrics.items() if main in of}
    order = sorted(held, key=lambda who: held[who][main].value, reverse=not lower)
    scale = {who: of for who, of in held.items() if who != CONSTANT} or held  # it is too far away to compare the others
    least = min(of[main].low for of in scale.values())
    most = max(of[main].high for of in scale.values())
    best = {name: (min if is_lower_better(name) else max)(of[name].value for of in held.values() if name in of)
            for name in (main, *others)}  # fmt: skip
    rows: list[list[Child | Cell]] = []
    for who in order:
        of = held[who]
        gap = answer.difference(who, main) if who != MODEL else None
        apart = "" if who == MODEL else _apart(gap)
        shown: list[Child | Cell] = [tag("strong", f"{run.card.model} (this model)") if who == MODEL else who]
        shown += [num(of[main].value, best=of[main].value == best[main]), num(None, interval_text(of[main]))]
        shown += [
            drawing(charts.whisker(of[main].low, of[main].value, of[main].high, least, most, 0 if who == MODEL else 5))
        ]
        shown += [num(None if gap is None else gap.value, apart)]
        shown += [
            num(of[name].value, best=of[name].value == best[name]) if name in of else num(None) for name in others
        ]
        rows.append(shown)
    heads = ["Model", f"#{main}", "#95 % interval", "", f"#{run.card.model} minus it", *(f"#{name}" for name in others)]
    return table(f"Sorted by {main}, the best first; ★ marks the best of a column", heads, rows)


def _apart(gap: Measured | None) -> str:
    if gap is None or gap.error is None:
        return "–"
    unclear = "" if gap.is_clear else ", not clear"
    return f"{signed(gap.value)} ({signed(gap.low)} to {signed(gap.high)}){unclear}"


def _described(answer: Answer) -> str:
    facts = answer.facts
    if answer.protocol == "rows":
        return f"{number(facts.get('rows'))} rows, {number(facts.get('positives'))} of them positive."
    few, many = facts.get("fewest_candidates"), facts.get("most_candidates")
    span = number(few) if few == many else f"{number(few)} to {number(many)}"
    told = f"{number(facts.get('groups'))} {who_of(answer)}, {span} candidates each: {facts.get('candidates', '')}."
    return told + (f" The model reads {facts['input']}." if isinstance(facts.get("input"), str) else "")


def who_of(answer: Answer) -> str:
    """Whose values an evaluation's are."""
    return {"rows": "rows", "full": "users"}.get(answer.protocol, "lists")


def _plus_minus(found: Measured) -> str:
    return "" if found.error is None else f"± {number(NORMAL * found.error)}, a 95 % interval"


def _dicts(answer: Answer | None) -> list[dict[str, str]]:
    found = None if answer is None else answer.saved.report.get("warnings")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _not_evaluated(run: RunFacts) -> list[Child]:
    body: list[Child] = []
    if run.card.metrics:
        rows = [
            [f"{protocol}/{name}", num(value)]
            for protocol, named in run.card.metrics.items()
            for name, value in named.items()
        ]
        body.append(table("What training measured on valid, by which the model was chosen", ["Metric", "#Value"], rows))
    told = "There is no saved evaluation. This command measures the model on test, with baselines, and keeps it:"
    return [*body, soft(told), command(evaluate_command(run))]
