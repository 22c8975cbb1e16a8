"""Sections of a run's page: verdict, metrics, slices, exposure, calibration, learning curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recspec.report import charts
from recspec.report.charts import Series
from recspec.report.measured import (
    MODEL,
    NORMAL,
    Answer,
    Measured,
    answers_of,
    first_answer,
    is_lower_better,
    mapping,
    meanings,
    numbers,
    of_metric,
    real,
    texts,
)
from recspec.report.page import (
    Cell,
    Child,
    Markup,
    Section,
    coded,
    command,
    details,
    drawing,
    duration,
    note,
    num,
    number,
    percent,
    plain,
    signed,
    size,
    soft,
    table,
    tag,
    tiles,
)
from recspec.report.page import charts as side_by_side
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
        yield note(
            "This run has not been evaluated on a test split yet, so this report can't say how good it is. "
            "What validation said in training stands under Learning curves. To fill this in:"
        )
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
    yield _metrics_table(run, answer)
    verdicts = texts(answer.saved.report.get("verdicts"))
    notes = [each for each in verdicts if each.startswith(f"{answer.protocol}: ")]
    notes += texts(answer.saved.report.get("notes"))
    if notes:
        yield details("Notes of the evaluation", tag("ul", [tag("li", coded(each)) for each in notes]))
    if len(answer.metrics) < 2:
        yield soft("No baseline stands beside the model. To add them:")
        yield command(evaluate_command(run))


def _metrics_table(run: RunFacts, answer: Answer) -> Markup:
    main, lower = answer.main, is_lower_better(answer.main)
    others = [name for name in answer.metrics.get(MODEL, {}) if name != main]
    held = {who: of for who, of in answer.metrics.items() if main in of}
    order = sorted(held, key=lambda who: held[who][main].value, reverse=not lower)
    scale = {who: of for who, of in held.items() if who != CONSTANT} or held  # it is too far away to compare the others
    least = min(of[main].low for of in scale.values())
    most = max(of[main].high for of in scale.values())
    best = {
        name: (min if is_lower_better(name) else max)(of[name].value for of in held.values() if name in of)
        for name in (main, *others)
    }
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


WORDS = {
    "activity": "Users by how many events the model knows of them",
    "popularity": "Items: the head holds half of training's interactions, the tail the other half",
}
MOST_PARTS = 60


def slices_section(run: RunFacts) -> Section:
    """For whom and for what the model works."""
    return Section("slices", "Slices", tuple(_slices_body(run)))


def slices_of(run: RunFacts, split: str, protocol: str) -> dict[str, Mapping[str, Any]]:
    """The slices of a split and protocol, of the newest evaluation of the present model that has each."""
    found: dict[str, Mapping[str, Any]] = {}
    for saved in sorted(run.evaluations, key=lambda each: (each.is_current, each.time), reverse=True):
        if saved.split == split:
            for by, parts in mapping(saved.report, "slices", protocol).items():
                found.setdefault(str(by), mapping(parts))
    return {by: parts for by, parts in found.items() if parts}


def _slices_body(run: RunFacts) -> Iterator[Child]:
    empty = True
    for answer in answers_of(run):
        held = slices_of(run, answer.saved.split, answer.protocol)
        for by, parts in held.items():
            empty = False
            yield tag("h3", WORDS.get(by, f"By {by}"), f", {answer.saved.split}, protocol {answer.protocol}")
            yield _slices_table(answer, by, parts)
    if empty:
        yield soft(
            "No slices were measured. A slice says for whom a model works: for new or old users, head or tail items, "
            "or each value of a column. For example:"
        )
        yield command([*evaluate_command(run), *([] if run.has_users else ["--slice", "COLUMN"])])


def _slices_table(answer: Answer, by: str, parts: Mapping[str, Any]) -> Markup:
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
        rows.append(
            [
                f"{name}{few}",
                num(part.get("count")),
                num(found.value),
                num(None, interval_text(found)),
                drawing(charts.whisker(found.low, found.value, found.high, least, most)),
                _beside(found, of_all),
                *(num(values.get(each)) for each in others),
            ]
        )
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


PARTS = ("top", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th", "9th", "tail", "none")
SHOWN = 3  # series of the chart


def exposure_section(run: RunFacts) -> Section:
    """How many items are recommended at all, and how popular these are."""
    return Section("exposure", "Coverage and popularity", tuple(_exposure_body(run)))


def shares_of(answer: Answer, who: str = MODEL) -> list[float]:
    """Shares of the recommendations by popularity; empty if they were not measured."""
    return _reals(mapping(answer.saved.report, "exposure", who).get("shares"))


def exposure_chart(series: Mapping[str, list[float]]) -> Markup | None:
    """Shares of the recommendations that popular and rare items get."""
    held = {who: [100 * each for each in of] for who, of in series.items() if len(of) == len(PARTS)}
    if not held:
        return None
    return charts.grouped(
        "exposure",
        PARTS,
        held,
        title="Which items are recommended, from popular to rare",
        x="tenth of training's interactions, from the most popular items",
        y="% of recommendations",
        level=10,
    )


def beyond_of(answer: Answer) -> dict[str, dict[str, float]]:
    """Coverage and so on, of the model and each baseline."""
    held = mapping(answer.saved.report, "beyond_accuracy")
    return {str(who): numbers(mapping(of)) for who, of in held.items()}


def _exposure_body(run: RunFacts) -> Iterator[Child]:
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


def calibration_section(run: RunFacts) -> Section:
    """The reliability diagram of the rows of a split."""
    return Section("calibration", "Calibration", tuple(_calibration_body(run)))


def reliability_of(run: RunFacts) -> tuple[Answer, Series] | None:
    """The bins of a reliability diagram; None without probabilities."""
    for answer in answers_of(run):
        bins = _bins(answer) if answer.protocol == "rows" else []
        if bins:
            told = [f"{number(n)} rows: probability {x:.4g}, positives {y:.4g}" for n, x, y in bins]
            return answer, Series(run.name, [x for _, x, _ in bins], [y for _, _, y in bins], told)
    return None


def _calibration_body(run: RunFacts) -> Iterator[Child]:
    found = reliability_of(run)
    if found is None:
        why = "it ranks, and its scores are no probabilities of labels in this dataset" if run.has_users else ""
        yield soft(
            f"There are no probabilities to judge{f': {why}' if why else ''}. Calibration is measured under "
            "protocol rows, on splits whose negatives were not drawn."
        )
        return
    answer, series = found
    held = mapping(answer.saved.report, "probabilities")
    yield from _judged_calibration(held)
    yield side_by_side(charts.reliability("reliability", [series], title="Probabilities and what came true"))
    rows = [[num(n), num(x), num(y), num(y - x)] for n, x, y in _bins(answer)]
    yield details(
        "The bins as a table",
        table(
            "Bins of equally many rows",
            ["#Rows", "#Mean probability", "#Share of positives", "#Difference"],
            rows,
            named=False,
        ),
    )


def _judged_calibration(held: Mapping[str, object]) -> Iterator[Child]:
    of = mapping(held, "calibration")
    error, chance, spread = (real(of.get(name)) for name in ("value", "by_chance", "chance_std"))
    if error is None or chance is None or spread is None:
        return
    beyond = error > chance + 3 * spread
    told = f"Calibration error {number(error)}; perfect probabilities would have {number(chance)} by chance on as "
    told += "many rows."
    if beyond:
        yield note(
            coded(
                f"The probabilities are {of.get('lean')}. {told} `recspec train --resume --set "
                "train.calibration=temperature` mends that without changing any ranking."
            ),
            kind="bad",
        )
    else:
        yield note(f"The probabilities come true. {told}", kind="good")
    loss, constant = real(held.get("log_loss")), real(held.get("log_loss_of_constant"))
    rows, positives = real(held.get("rows")), real(held.get("positives"))
    if loss is not None and constant is not None and rows and positives is not None:
        yield soft(
            f"Log loss {number(loss)}; the rate of all rows, {percent(positives / rows)}, as every row's "
            f"probability has {number(constant)}."
        )


def _bins(answer: Answer) -> list[tuple[int, float, float]]:
    held = mapping(answer.saved.report, "probabilities", "calibration").get("bins")
    found = []
    for each in held if isinstance(held, list) else ():
        values = [real(mapping(each).get(name)) for name in ("rows", "expected", "true")]
        if None not in values:
            found.append((int(values[0] or 0), values[1] or 0.0, values[2] or 0.0))
    return found[:200]


MOST_POINTS = 400
MOST_CURVES = 8  # metrics with a chart each


def curves_section(run: RunFacts) -> Section:
    """Loss and metrics as training went."""
    return Section("curves", "Learning curves", tuple(_curves_body(run)))


def curve(run: RunFacts, metric: str) -> Series | None:
    """A metric of valid, `PROTOCOL/NAME`, over the epochs; None if there are fewer than two."""
    return _series(run.name, _epochs(run), "epoch", lambda each: _metric(each, metric), metric)


def _curves_body(run: RunFacts) -> Iterator[Child]:
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
        yield details("Metrics of every epoch", _curves_table(epochs))


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


def _curves_table(epochs: Sequence[Mapping[str, Any]]) -> Markup:
    names = list(dict.fromkeys(name for each in epochs for name in _metrics(each)))[:12]
    rows = [
        [number(each["epoch"]), number(each.get("train_loss")), *(number(_metric(each, name)) for name in names)]
        for each in epochs
    ]
    return table("Valid after each epoch", ["Epoch", "#Training loss", *(f"#{name}" for name in names)], rows)
