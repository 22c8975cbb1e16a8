"""The report of one run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from markupsafe import Markup

from recspec import __version__
from recspec.base.errors import RecspecError
from recspec.datasets import DATASETS
from recspec.evaluation import is_lower_better, real
from recspec.report import charts
from recspec.report.charts import Series
from recspec.report.dataset_page import distributions, overview, splits_table
from recspec.report.first_screen import first_screen
from recspec.report.measured import (
    MODEL,
    NORMAL,
    Answer,
    Measured,
    answers_of,
    first_answer,
    held_out,
    mapping,
    meanings,
    numbers,
    of_slice,
    slices_of,
    texts,
)
from recspec.report.page import code, draw, duration, num, number, percent, plain, render, signed, size, strong, table
from recspec.report.run_facts import Examples, RunFacts

CONSTANT = "constant"
"""The baseline that is too far away to compare the others on one scale."""
MOST_PARTS = 60
"""Slices of one column."""
PARTS = ("top", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th", "9th", "tail", "none")
MOST_COLUMNS = 100
"""Columns whose importance is shown."""
MOST_SHOWN = 3
"""Models in the chart of exposure."""
MOST_POINTS = 400
MOST_CURVES = 8
"""Metrics with a chart each."""
SLICE_TITLES = {
    "activity": "Users by how many events the model knows of them",
    "popularity": "Items: the head holds half of training's interactions, the tail the other half",
}
SECTIONS = {
    "verdict": "Verdict",
    "metrics": "Metrics beside baselines",
    "slices": "Slices",
    "exposure": "Coverage and popularity",
    "calibration": "Calibration",
    "examples": "Example lists",
    "curves": "Learning curves",
    "data": "Data",
    "plan": "Plan",
    "cost": "Time and memory",
    "reproduce": "Make it again",
}


def run_page(run: RunFacts) -> str:
    """The whole page."""
    left_out = () if run.has_users else ("exposure", "examples")
    answers = answers_of(run)
    slices = [
        (answer, by, slices_table(run, answer, by, parts))
        for answer in answers
        for by, parts in slices_of(run, answer.saved.split, answer.protocol).items()
    ]
    return render(
        "run.html",
        f"Run {run.name}",
        {name: heading for name, heading in SECTIONS.items() if name not in left_out},
        run=run,
        answers=answers,
        first=first_screen(run),
        judged=judgement(first_answer(run)),
        tiles=verdict_tiles(run),
        warnings=warnings_of(run),
        evaluate=evaluate_command(run),
        metrics_table=lambda answer: metrics_table(run, answer),
        described=lambda answer: described(run, answer),
        notes_of=notes_of,
        validation=validation_table(run),
        meanings=[*meanings([name for answer in answers for name in answer.metrics.get(MODEL, {})])],
        slices=slices,
        slice_titles=SLICE_TITLES,
        **exposure_of(run, answers),
        **calibration_of(run),
        **curves_of(run),
        examples=examples_of(run) if run.has_users else {},
        data=data_of(run),
        plan=plan_of(run),
        cost=table("What the run took, and where it ran", ["", "Value"], cost_rows(run), sorts=False),
        prepare=prepare_command(run),
        train=train_command(run),
        versions=table("Versions and seed", ["", "Value"], version_rows(run), sorts=False),
    )


# --- commands --------------------------------------------------------------------------------------------------------


def evaluate_command(run: RunFacts) -> list[str]:
    """The command that fills the sections of an evaluation."""
    slices = ["--slice", "activity", "--slice", "popularity"] if run.has_users else []
    return ["recspec", "evaluate", str(run.path), run.data_path, "--baselines", *slices]


def train_command(run: RunFacts) -> list[str]:
    """The command that made the run, as it was typed, or as its settings say."""
    if run.record is not None and run.record.command:
        return [*run.record.command]
    settings = [word for name, value in run.card.settings.items() for word in ("--set", f"{name}={as_set(value)}")]
    return ["recspec", "train", run.card.model, run.data_path, str(run.path), *settings]


def prepare_command(run: RunFacts) -> list[str]:
    """The preparation with the settings that are not the defaults; empty if they are not known."""
    dataset, settings = run.preparation.get("dataset"), run.preparation.get("settings")
    if not isinstance(dataset, str) or not isinstance(settings, Mapping) or dataset not in DATASETS:
        return []
    defaults: Mapping[str, Any] = DATASETS[dataset].Settings.model_construct().model_dump(mode="json")
    changed = [name for name, value in settings.items() if name in defaults and defaults[name] != value]
    given = [word for name in changed for word in ("--set", f"{name}={as_set(settings[name])}")]
    return ["recspec", "prepare", dataset, "RAW", run.data_path, *given]


def as_set(value: object) -> str:
    """A value as `--set` reads it: YAML, in which a plain text needs no quotes."""
    try:
        is_plain = isinstance(value, str) and yaml.safe_load(value) == value
    except yaml.YAMLError:
        is_plain = False
    return str(value) if is_plain else json.dumps(value)


# --- verdict and metrics ---------------------------------------------------------------------------------------------


def verdict_tiles(run: RunFacts) -> dict[str, tuple[str, str] | str]:
    """The numbers below the first screen."""
    answer = first_answer(run)
    facts: dict[str, tuple[str, str] | str] = {"Model": run.card.model}
    if answer is not None and answer.main:
        ours = answer.metrics[MODEL][answer.main]
        error = "" if ours.error is None else f"± {number(NORMAL * ours.error)}, a 95 % interval"
        facts[f"{answer.main} on {answer.saved.split}"] = (number(ours.value), error)
        if (best := answer.best_baseline) is not None:
            theirs = number(answer.metrics[best][answer.main].value)
            facts[f"best baseline: {best}"] = (theirs, f"the same {answer.main}")
    if (parameters := run.start.get("parameters")) is not None:
        facts["Parameters"] = number(parameters)
    elif (told := run.card.trained.get("size")) is not None:
        facts["Size"] = number(told)
    return {**facts, "Training took": duration(run.card.trained.get("seconds")), "Model on disk": size(run.size)}


def warnings_of(run: RunFacts) -> list[str]:
    """Warnings of training and of the evaluation, each once."""
    answer = first_answer(run)
    found = None if answer is None else answer.saved.report.get("warnings")
    evaluated = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    return list(dict.fromkeys(str(each.get("message", "")) for each in [*run.card.warnings, *evaluated]))


def judgement(answer: Answer | None) -> tuple[str, str, str] | None:
    """The model beside the best baseline: a statement, its reasons, and whether that is `good` or `bad`."""
    ours = None if answer is None else answer.metrics[MODEL].get(answer.main)
    if answer is None or ours is None:
        return None
    best, lower = answer.best_baseline, is_lower_better(answer.main)
    reached = f"{answer.main} is {number(ours.value)}"
    reached += "" if ours.error is None else f" (95 % interval {ours.interval})"
    if best is None:
        reached += ". No baseline stands beside it: evaluate with --baselines to see whether that is good."
        return "", f"On {answer.title}, {reached}", ""
    theirs, gap = answer.metrics[best][answer.main], answer.difference(best, answer.main)
    raw = ours.value - theirs.value if gap is None else gap.value
    ahead, clear = (raw < 0) == lower and raw != 0, gap is not None and gap.is_clear
    if not clear:
        said, kind = f"is level with the best baseline, {best} with {number(theirs.value)}", ""
    elif ahead:
        said, kind = f"is better than every baseline; the best, {best}, has {number(theirs.value)}", "good"
    else:
        said, kind = f"is worse than the best baseline, {best} with {number(theirs.value)}", "bad"
    by = ""
    if gap is not None and gap.error is not None:
        by = f" The difference is {signed(raw)} (95 % interval {signed(gap.low)} to {signed(gap.high)}), over the same "
        by += f"{number(answer.count)} {answer.who}."
    return f"The model {said}.", f" On {answer.title}, {reached}.{by}", kind


def described(run: RunFacts, answer: Answer) -> str:
    """What was ranked or scored."""
    facts = answer.facts
    if isinstance(facts.get("described"), str):
        return f"{facts['described']}."
    if answer.protocol == "rows":
        rows, positives = real(facts.get("rows")), real(facts.get("positives"))
        negatives = None if rows is None or positives is None else int(rows - positives)
        drawn = "drawn " if run.spec.has_series else ""
        return f"{number(facts.get('positives'))} positives and {number(negatives)} {drawn}negatives."
    few, many = facts.get("fewest_candidates"), facts.get("most_candidates")
    span = number(few) if few == many else f"{number(few)} to {number(many)}"
    told = f"{number(facts.get('groups'))} {answer.who}, {span} candidates each: {facts.get('candidates', '')}."
    return told + (f" The model reads {facts['input']}." if isinstance(facts.get("input"), str) else "")


def notes_of(answer: Answer) -> list[str]:
    """What the evaluation remarks."""
    verdicts = [each for each in texts(answer.saved.report.get("verdicts")) if each.startswith(f"{answer.protocol}: ")]
    return verdicts + texts(answer.saved.report.get("notes"))


def metrics_table(run: RunFacts, answer: Answer) -> Markup:
    """The model and the baselines, the best first."""
    main = answer.main
    others = [name for name in answer.metrics.get(MODEL, {}) if name != main]
    held = {who: of for who, of in answer.metrics.items() if main in of}
    order = sorted(held, key=lambda who: held[who][main].value, reverse=not is_lower_better(main))
    scale = {who: of for who, of in held.items() if who != CONSTANT} or held
    least, most = min(of[main].low for of in scale.values()), max(of[main].high for of in scale.values())
    best = {
        name: (min if is_lower_better(name) else max)(of[name].value for of in held.values() if name in of)
        for name in (main, *others)
    }
    rows = []
    for who in order:
        of, is_own = held[who], who == MODEL
        found, gap = of[main], None if is_own else answer.difference(who, main)
        named = strong(f"{run.card.model} (this model)") if is_own else who
        drawn = draw(charts.whisker(found.low, found.value, found.high, least, most, 0 if is_own else 5))
        apart = num(None if gap is None else gap.value, "" if is_own else _apart(gap))
        of_gap = "" if gap is None or gap.error is None else f"{signed(gap.low)} to {signed(gap.high)}"
        row = [named, num(found.value, best=found.value == best[main]), apart, drawn]
        row += [num(None, found.interval), num(None, of_gap)]
        row += [num(of[each].value, best=of[each].value == best[each]) if each in of else num(None) for each in others]
        rows.append(row)
    heads = ["Model", f"#{main}", f"#{run.card.model} minus it", "", "#95 % interval", "#95 % of the difference"]
    heads += [f"#{name}" for name in others]
    return table(f"Sorted by {main}, the best first; ★ marks the best of a column", heads, rows)


def validation_table(run: RunFacts) -> Markup | None:
    """What training measured; None if nothing."""
    measured = [
        (protocol, name, value) for protocol, named in run.card.metrics.items() for name, value in named.items()
    ]
    if not run.card.metrics:
        return None
    rows = [[f"{protocol}/{name}", num(value)] for protocol, name, value in measured]
    return table("What training measured on valid, by which the model was chosen", ["Metric", "#Value"], rows)


def _apart(gap: Measured | None) -> str:
    if gap is None or gap.error is None:
        return "–"
    return f"{signed(gap.value)}{'' if gap.is_clear else ', not clear'}"


# --- slices ----------------------------------------------------------------------------------------------------------


def slices_table(run: RunFacts, answer: Answer, by: str, parts: Mapping[str, Any]) -> Markup:
    """The metrics of each slice beside those of all. Of rows with drawn negatives, the positives count."""
    what = "users" if answer.protocol != "rows" else "positives" if run.spec.has_series else "rows"
    count = "positives" if what == "positives" else "count"
    main, of_all = answer.main, answer.metrics[MODEL].get(answer.main)
    measured = [(str(name), part, of_slice(part, main)) for name, part in list(parts.items())[:MOST_PARTS]]
    held = [(name, part, found) for name, part, found in measured if found is not None]
    least = min((each.low for *_, each in held), default=0.0)
    most = max((each.high for *_, each in held), default=1.0)
    others = [name for name in (numbers(mapping(held[0][1], "metrics")) if held else {}) if name != main][:4]
    rows = []
    for name, part, found in held:
        values = numbers(mapping(part, "metrics"))
        few = " (few: read it with care)" if (real(part.get(count)) or 0) < 30 else ""
        drawn = draw(charts.whisker(found.low, found.value, found.high, least, most))
        row = [f"{name}{few}", num(found.value), _beside(found, of_all), num(part.get(count))]
        rows.append([*row, num(None, found.interval), drawn, *(num(values.get(each)) for each in others)])
    heads = [
        "Slice",
        f"#{main}",
        "Beside all",
        f"#{what.capitalize()}",
        "#95 % interval",
        "",
        *(f"#{name}" for name in others),
    ]
    return table(f"Metrics by {by}; over all: {main} {number(of_all.value) if of_all else '–'}", heads, rows)


def _beside(found: Measured, of_all: Measured | None) -> str:
    if of_all is None or found.error is None:
        return ""
    apart = found.value - of_all.value
    return "about the same" if abs(apart) <= NORMAL * found.error else "higher" if apart > 0 else "lower"


# --- coverage and popularity -----------------------------------------------------------------------------------------


def exposure_chart(series: Mapping[str, list[float]]) -> Markup | None:
    """Shares of the recommendations that popular and rare items get."""
    held = {who: [100 * each for each in of] for who, of in series.items() if len(of) == len(PARTS)}
    if not held:
        return None
    title = "Which items are recommended, from popular to rare"
    x = "tenth of training's interactions, from the most popular items"
    return charts.grouped("exposure", PARTS, held, title=title, x=x, y="% of recommendations", level=10)


def exposure_of(run: RunFacts, answers: Sequence[Answer]) -> dict[str, Any]:
    """Which items are recommended: a table, a chart, and the number of items in its ranges."""
    answer = next((each for each in answers if each.protocol == "full" and each.list_metrics), None)
    if answer is None or not run.has_users:
        return {"list_metrics": None}
    own, measured = f"{run.card.model} (this model)", answer.list_metrics
    names = list(measured.get(MODEL, {}))
    rows = [
        [strong(own) if who == MODEL else who, *(num(of.get(each), _shown(each, of.get(each))) for each in names)]
        for who, of in measured.items()
    ]
    others = [who for who in mapping(answer.saved.report, "exposure") if who != MODEL]
    picked = [who for who in (answer.best_baseline, *others) if who is not None and who in others]
    shown = {own: answer.exposure("shares")}
    shown |= {who: answer.exposure("shares", who) for who in list(dict.fromkeys(picked))[: MOST_SHOWN - 1]}
    items = [int(each) for each in answer.exposure("items")]
    return {
        "list_metrics": table(f"Measures of the lists of {answer.saved.split}", ["Model", *_heads(names)], rows),
        "exposure_chart": exposure_chart(shown),
        "items_of_parts": items if len(items) == len(PARTS) else None,
        "list_meanings": [*meanings(names)],
    }


def _heads(names: Sequence[str]) -> list[str]:
    return [f"#{name}" for name in names]


def _shown(name: str, value: float | None) -> str:
    return percent(value) if name.startswith(("coverage", "revenue")) else number(value)


# --- calibration -----------------------------------------------------------------------------------------------------


def reliability_of(run: RunFacts) -> tuple[Answer, Series] | None:
    """The bins of a reliability diagram; None without probabilities."""
    for answer in answers_of(run):
        bins = _bins(answer) if answer.protocol == "rows" else []
        if bins:
            told = [f"{number(n)} rows: probability {x:.4g}, positives {y:.4g}" for n, x, y in bins]
            return answer, Series(run.name, [x for _, x, _ in bins], [y for _, _, y in bins], told)
    return None


def reliability_chart(series: Sequence[Series]) -> Markup:
    """The diagram of some runs."""
    return charts.reliability("reliability", series, title="Probabilities and what came true")


def calibration_of(run: RunFacts) -> dict[str, Any]:
    """Whether probabilities come true: a judgement, a sentence about the loss, the diagram and its bins."""
    found = reliability_of(run)
    if found is None:
        return {"reliability": None}
    answer, series = found
    held = mapping(answer.saved.report, "probabilities")
    loss, constant = real(held.get("log_loss")), real(held.get("log_loss_of_constant"))
    rows, positives = real(held.get("rows")), real(held.get("positives"))
    of_loss = ""
    if loss is not None and constant is not None and rows and positives is not None:
        of_loss = f"Log loss {number(loss)}; the rate of all rows, {percent(positives / rows)}, as every row's "
        of_loss += f"probability has {number(constant)}."
    heads = ["#Rows", "#Mean probability", "#Share of positives", "#Difference"]
    bins = [[num(n), num(x), num(y), num(y - x)] for n, x, y in _bins(answer)]
    judged = _judged_calibration(mapping(held, "calibration"))
    return {
        "reliability": reliability_chart([series]),
        "calibration": judged,
        "of_loss": of_loss if judged else "",
        "bins": table("Bins of equally many rows", heads, bins, named=False),
    }


def _judged_calibration(of: Mapping[str, Any]) -> tuple[str, str] | None:
    """A sentence, and whether that is `good` or `bad`."""
    error, chance, spread = (real(of.get(name)) for name in ("value", "by_chance", "chance_std"))
    if error is None or chance is None or spread is None:
        return None
    told = f"Calibration error {number(error)}; perfect probabilities would have {number(chance)} by chance on as many "
    told += "rows."
    if error <= chance + 3 * spread:
        return f"The probabilities come true. {told}", "good"
    mended = "`train.calibration=temperature` mends that without changing any ranking."
    return f"The probabilities are {of.get('lean')}. {told} {mended}", "bad"


def _bins(answer: Answer) -> list[tuple[int, float, float]]:
    held = mapping(answer.saved.report, "probabilities", "calibration").get("bins")
    found = []
    for each in held if isinstance(held, list) else ():
        rows, expected, true = (real(mapping(each).get(name)) for name in ("rows", "expected", "true"))
        if rows is not None and expected is not None and true is not None:
            found.append((int(rows), expected, true))
    return found[:200]


# --- learning curves -------------------------------------------------------------------------------------------------


def curve(run: RunFacts, metric: str) -> Series | None:
    """A metric of valid, `PROTOCOL/NAME`, over the epochs; None if there are fewer than two."""
    return _series(run.name, _epochs(run), lambda each: _metric(each, metric), metric)


def curves_of(run: RunFacts) -> dict[str, Any]:
    """Loss and metrics as training went: charts, and a table of the epochs."""
    steps, epochs, best = _steps(run), _epochs(run), run.card.trained.get("epoch")
    drawn: list[Markup] = []
    if loss := _series("loss", steps, lambda each: each.get("loss"), "loss"):
        by_epoch = _series("mean of the epoch", epochs, lambda each: each.get("train_loss"), "loss")
        held = [loss, *([by_epoch] if by_epoch else [])]
        drawn.append(charts.lines("loss", held, title="Loss in training", x="epoch", y="loss"))
    marks = {"the epoch that was kept": float(best)} if isinstance(best, (int, float)) and best else {}
    names = [name for each in epochs[:1] for name in _metrics(each)][:MOST_CURVES]
    wanted = str(run.card.trained.get("valid_metric") or "")
    for place, name in enumerate(sorted(names, key=lambda name: name != wanted)):
        if found := _series(name, epochs, lambda each, name=name: _metric(each, name), name):  # type: ignore[misc]
            title = f"{plain(name)} on valid" + (", which chose the epoch" if name == wanted else "")
            drawn.append(charts.lines(f"curve-{place}", [found], title=title, x="epoch", y="value", marks=marks))
    rate = _series("rate", steps, lambda each: each.get("learning_rate"), "rate")
    if rate is not None and max(rate.y) > min(rate.y):
        drawn.append(charts.lines("rate", [rate], title="Learning rate", x="epoch", y="rate"))
    return {
        "curves": drawn,
        "is_fitted": run.card.trained.get("stopped") == "fitted" or bool(run.start.get("fitted")),
        "epochs": _epochs_table(epochs) if epochs else None,
    }


def _steps(run: RunFacts) -> list[Mapping[str, Any]]:
    """The logged steps, once each: of a step that was repeated after a stop, the last one."""
    found = {each["step"]: each for each in run.of("step") if isinstance(each.get("step"), int)}
    ordered = [found[step] for step in sorted(found)]
    return ordered[:: max(1, math.ceil(len(ordered) / MOST_POINTS))]


def _epochs(run: RunFacts) -> list[Mapping[str, Any]]:
    found = {each["epoch"]: each for each in run.of("epoch") if isinstance(each.get("epoch"), (int, float))}
    return [found[epoch] for epoch in sorted(found)]


def _metrics(epoch: Mapping[str, Any]) -> list[str]:
    return [f"{protocol}/{name}" for protocol, named in mapping(epoch, "metrics").items() for name in mapping(named)]


def _metric(epoch: Mapping[str, Any], name: str) -> object:
    protocol, _, metric = name.partition("/")
    return mapping(epoch, "metrics", protocol).get(metric)


def _series(
    name: str, events: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], object], what: str
) -> Series | None:
    """Values over the epochs; None if there are fewer than two."""
    pairs = [(real(each.get("epoch")), real(value(each))) for each in events]
    held = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(held) < 2:
        return None
    told = [f"epoch {number(a)}: {plain(what)} {number(b)}" for a, b in held]
    return Series(name, [a for a, _ in held], [b for _, b in held], told)


def _epochs_table(epochs: Sequence[Mapping[str, Any]]) -> Markup:
    names = list(dict.fromkeys(name for each in epochs for name in _metrics(each)))[:12]
    rows = [
        [number(each["epoch"]), number(each.get("train_loss")), *(number(_metric(each, name)) for name in names)]
        for each in epochs
    ]
    return table("Valid after each epoch", ["Epoch", "#Training loss", *_heads(names)], rows)


# --- examples and data -----------------------------------------------------------------------------------------------


def examples_of(run: RunFacts) -> dict[str, Any]:
    """Lists of five users with their histories; or `problem`."""
    try:
        examples = Examples(run, held_out(run))
        if not (users := examples.typical()):
            return {"problem": "", "users": []}
        lists, shown = examples.recommended(users), examples.of(users)
    except RecspecError as error:
        return {"problem": str(error)}
    hits = f" Hits can't be marked: the items of {examples.split} are not at hand, or the model knows them."
    if any(each.targets for each in shown):
        hits = f" ✓ marks an item that the user acted on in {examples.split}."
    return {"problem": "", "examples": examples, "users": [*zip(shown, lists, strict=True)], "hits": hits}


def data_of(run: RunFacts) -> dict[str, Any]:
    """The dataset: a table, and either figures or what the bundle itself knows."""
    record, figures = run.data_record, run.figures
    found: dict[str, Any] = {"table": None, "figures": None, "tiles": {}}
    if record is not None:
        rows: list[list[object]] = [
            ["Dataset", record.name],
            ["Folder", code(record.path)],
            ["Digest", code(record.digest)],
        ]
        rows += [["Made from", _inputs(run)]] if run.preparation.get("inputs") else []
        found["table"] = table("The dataset that the model was trained on", ["", "Value"], rows, sorts=False)
    if figures is not None:
        parts = {"tiles": overview(figures), "splits": splits_table(figures), "charts": distributions(figures)}
        return {**found, "figures": figures, **parts}
    summary = run.spec.summary
    shown = {
        name.replace("_", " ").capitalize(): number(value)
        for name, value in summary.items()
        if isinstance(value, (int, float, str))
    }
    users, items, events = (real(summary.get(name)) for name in ("users", "items", "interactions"))
    if users and items and events:
        shown["Density"] = percent(events / (users * items), 2)
    return {**found, "tiles": dict(list(shown.items())[:12])}


def _inputs(run: RunFacts) -> str:
    inputs = run.preparation.get("inputs")
    names = [str(each.get("name")) for each in inputs if isinstance(each, dict)] if isinstance(inputs, list) else []
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more files" if len(names) > 5 else "")


# --- plan, cost, versions --------------------------------------------------------------------------------------------


def plan_of(run: RunFacts) -> dict[str, Any]:
    """What was trained, with which settings, and why."""
    parameters, choices = run.start.get("parameters"), mapping(run.start, "choices")
    splits = run.card.train.get("train_splits") or run.card.trained.get("splits")
    rows = [[str(name).replace("_", " "), *str(told).partition(": ")[::2]] for name, told in choices.items()]
    made = "Choices that recspec made, and why"
    return {
        "parameters": f" with {number(parameters)} parameters" if isinstance(parameters, int) else "",
        "splits": " and ".join(map(str, splits)) if isinstance(splits, (list, tuple)) and splits else "train",
        "importance": _importance(run),
        "choices": table(made, ["Choice", "Value", "Reason"], rows, sorts=False) if rows else None,
        "tried": _tried(run),
        "model": _settings_table(run.card.settings),
        "training": _settings_table(run.card.train) if run.card.train else None,
    }


def _importance(run: RunFacts) -> Markup | None:
    """The importance of each column; None if it is not known."""
    known = list(mapping(run.card.trained, "importance").items())[:MOST_COLUMNS]
    rows = [[plain(name, 100), percent(real(share))] for name, share in known]
    caption = "Importance of columns: shares of the variance of log-odds that splits or terms explain"
    return table(caption, ["Column", "#Share"], rows) if rows else None


def _tried(run: RunFacts) -> Markup | None:
    """Settings that were tried, and which were chosen; None if none were."""
    held = run.card.trained.get("tried")
    found = [each for each in held if isinstance(each, dict)] if isinstance(held, list) else []
    if not found:
        return None
    taken = max((place for place, each in enumerate(found) if each.get("taken")), default=-1)
    rows = [
        [_settings_text(each.get("settings")), num(real(each.get("value"))), "chosen" if place == taken else ""]
        for place, each in enumerate(found)
    ]
    return table("Settings that were tried on valid", ["Settings", "#Value", "Chosen"], rows)


def _settings_text(settings: object) -> str:
    if not isinstance(settings, Mapping):
        return ""
    return ", ".join(f"{name} {number(value)}" for name, value in settings.items()) or "defaults"


def _settings_table(settings: Mapping[str, object]) -> Markup:
    rows = [[name, code(plain(json.dumps(value, default=str), 300))] for name, value in settings.items()]
    return table("Settings", ["Setting", "Value"], rows)


def cost_rows(run: RunFacts) -> Iterator[list[str]]:
    """Seconds, memory and the machine."""
    trained, record = run.card.trained, run.record
    yield ["Training", duration(trained.get("seconds"))]
    if record is not None and record.seconds is not None:
        yield ["Whole command", duration(record.seconds)]
    if evaluating := sum(real(each.get("evaluation_seconds")) or 0.0 for each in run.of("epoch")):
        yield ["Validation within it", duration(evaluating)]
    if epochs := len([*run.of("epoch")]):
        kept = number(trained.get("epoch"))
        yield ["Epochs", f"{epochs}, the kept one is {kept}; stopped: {trained.get('stopped')}"]
    if speed := real(run.done.get("samples_per_second")):
        yield ["Samples a second", number(round(speed))]
    if record is not None and record.peak_memory:
        yield ["Peak memory of the process", size(record.peak_memory)]
    for name in ("peak_device_memory", "device_memory"):
        if (held := real(run.done.get(name))) is not None:
            yield ["Peak memory of the device", size(held)]
    for saved in run.evaluations[:5]:
        if saved.seconds is not None:
            beside = ", with baselines" if saved.baseline_metrics else ""
            yield [f"Evaluation on {saved.split}{beside}", duration(saved.seconds)]
    yield ["Model on disk", size(run.size)]
    yield ["Device", f"{trained.get('device', '–')}, {number(trained.get('world_size', 1))} process(es)"]
    for name, value in (record.machine if record is not None else {}).items():
        yield [f"Machine: {name.replace('_', ' ')}", size(value) if "memory" in name else number(value)]


def version_rows(run: RunFacts) -> Iterator[list[str]]:
    """Versions, seed and time."""
    machine = run.record.machine if run.record is not None else {}
    yield ["recspec", run.card.recspec]
    yield ["torch", str(run.card.trained.get("torch", "–"))]
    yield ["Python", str(machine.get("python", "–"))]
    yield ["Seed", str(run.card.train.get("seed", "–"))]
    if run.card.recspec != __version__:
        yield ["recspec of this report", __version__]
    if run.record is not None:
        yield ["Started", run.record.started]
