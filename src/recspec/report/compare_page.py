"""The comparison of several runs; the first is the one that the others are compared with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from recspec.base.errors import RecspecError
from recspec.evaluation import is_lower_better
from recspec.report import charts
from recspec.report.measured import (
    MODEL,
    Pair,
    Users,
    first_answer,
    held_out,
    mapping,
    meanings,
    of_slice,
    pairs_of,
    ranked,
    slices_of,
)
from recspec.report.page import (
    code,
    draw,
    duration,
    num,
    number,
    p_value,
    percent,
    plain,
    render,
    signed,
    size,
    strong,
    table,
)
from recspec.report.run_facts import Examples, Raw, RunFacts
from recspec.report.run_page import (
    SLICE_TITLES,
    curve,
    evaluate_command,
    exposure_chart,
    reliability_chart,
    reliability_of,
    train_command,
)

Paired = Sequence[tuple[RunFacts, Sequence[Pair], Sequence[str]]]
"""Each run but the first, with its pairs with the first and the reasons if there are none."""
Runs = Sequence[RunFacts]

NOT_JUDGED = ("novelty", "diversity", "popularity_lift", "coverage", "disliked")
EXAMPLES = 2
"""Users who gain most, and as many who lose most."""
BINS = 21
SECTIONS = {
    "verdict": "Verdict",
    "differences": "Differences",
    "users": "Who gains and who loses",
    "slices": "Slices",
    "exposure": "Coverage and popularity",
    "lists": "Lists side by side",
    "curves": "Curves and calibration",
    "settings": "What differs",
    "cost": "Cost and commands",
}


def compare_page(runs: Runs) -> str:
    """The whole page."""
    beside: Paired = [(run, *pairs_of(runs[0], run)) for run in runs[1:]]
    names = [run.name for run in runs]
    left_out = () if any(run.has_users for run in runs) else ("users", "exposure", "lists")
    metrics = [name for _, pairs, _ in beside for pair in pairs for name in pair.metrics]
    digests = {run.data_record.digest for run in runs if run.data_record is not None}
    return render(
        "compare.html",
        f"Comparison of {', '.join(names[:-1])} and {names[-1]}",
        {name: heading for name, heading in SECTIONS.items() if name not in left_out},
        runs=runs,
        names=names,
        have_other_data=len(digests) > 1,
        beside=beside,
        verdict=lambda other, pair: verdict(runs[0], other, pair),
        runs_table=runs_table(runs, beside),
        evaluate=evaluate_command,
        train=train_command,
        differences=lambda other, pair: differences(runs[0], other, pair),
        meanings=[*meanings(metrics)],
        gains=[*gains(runs[0], beside)],
        slices=[*slices(runs, beside)],
        by_activity=compares_activity(beside),
        exposure=exposure_of(runs),
        lists=lists_of(runs, beside),
        curves=curves_of(runs),
        settings=[*different_settings(runs)],
        cost=cost_table(runs),
    )


# --- verdict and differences -----------------------------------------------------------------------------------------


def verdict(base: RunFacts, other: RunFacts, pair: Pair) -> tuple[str, str, str, str]:
    """Whether a run is better than the first: a statement, its numbers, for whom, and `good` or `bad`."""
    metric = pair.main
    found, who = pair.comparisons[metric], pair.favoured(metric)
    word = {"base": "is worse than", "other": "is better than", "neither": "can't be told from"}[who]
    told = f" On {pair.title}, {metric} is {number(found.theirs)} against {number(found.ours)}: a difference of "
    told += f"{signed(found.difference)} (95 % interval {signed(found.low)} to {signed(found.high)}; p "
    told += f"{p_value(found.p_value)}), over {number(pair.count)} {pair.base.who}."
    for_whom = ""
    if (users := pair.users) is not None:
        better, worse = users.shares
        by = f" by {users.metric}" if users.metric != metric else ""
        for_whom = f"{other.name} is better{by} for {percent(better)} of the users, worse for {percent(worse)}, and "
        for_whom += f"equal for the others. {_for_whom(users)}"
    kind = {"base": "bad", "other": "good", "neither": ""}[who]
    return f"{other.name} {word} {base.name}.", told, for_whom, kind


def _for_whom(users: Users) -> str:
    """Ranges of activity with a clear gain or loss."""
    ranges = users.by_activity()
    if len(ranges) < 2:
        return ""
    told = []
    for sign, word in ((1, "gain"), (-1, "lose")):
        names = [name for name, each in ranges.items() if each.gain.is_clear and sign * each.gain.value > 0]
        if len(names) == len(ranges):
            return f"Users of every activity {word}."
        if names:
            told.append(f"Users with {', '.join(names)} {users.what} {word}")
    if not told:
        return "No group of users by activity gains or loses clearly."
    return "; ".join(told) + ". For the others nothing is clear."


def runs_table(runs: Runs, beside: Paired) -> Markup:
    """The runs side by side, the best first."""
    answers = [first_answer(run) for run in runs]
    order = ranked(runs, answers)
    metric = next((each.main for each in answers if each is not None), "metric")
    held = [run for run, _ in order]
    least, most = (
        min((found.low for _, found in order), default=0.0),
        max((found.high for _, found in order), default=1.0),
    )
    values = {run.name: found for run, found in order}
    best, rows = _clearly_best(held), []
    for run in (*held, *(each for each in runs if each not in held)):
        found, record, seconds = values.get(run.name), run.data_record, run.card.trained.get("seconds")
        row: list[object] = [strong(run.name), run.card.model]
        if found is None:
            row += [num(None), num(None, "–"), draw(Markup(""))]
        else:
            drawn = charts.whisker(found.low, found.value, found.high, least, most, runs.index(run))
            row += [num(found.value, best=run is best), num(None, found.interval), draw(drawn)]
        row += [_apart(runs[0], run, beside), num(run.start.get("parameters")), num(seconds, duration(seconds))]
        rows.append([*row, num(run.size, size(run.size)), "–" if record is None else record.name])
    heads = ["Run", "Model", f"#{metric}", "#95 % interval", "", f"Beside {runs[0].name}"]
    heads += ["#Parameters", "#Training", "#On disk", "Data"]
    direction = "lower" if is_lower_better(metric) else "higher"
    caption = f"The runs by {metric}, {direction} is better; ★ marks one that is clearly better than all others"
    return table(caption, heads, rows)


def _clearly_best(order: Runs) -> RunFacts | None:
    """The first of runs in order if the paired tests favour it over every other one."""
    for other in order[1:]:
        pairs, _ = pairs_of(order[0], other)
        if not pairs or pairs[0].favoured(pairs[0].main) != "base":
            return None
    return order[0] if len(order) > 1 else None


def _apart(base: RunFacts, run: RunFacts, beside: Paired) -> str:
    if run is base:
        return "the first run"
    pairs = next((held for other, held, _ in beside if other is run), ())
    if not pairs:
        return "not compared"
    pair = pairs[0]
    word = {"base": "worse", "other": "better", "neither": "not clear"}[pair.favoured(pair.main)]
    return f"{word}: {signed(pair.comparisons[pair.main].difference)}"


def differences(base: RunFacts, other: RunFacts, pair: Pair) -> Markup:
    """Paired differences of every metric with their significance."""
    rows = []
    for name in sorted(pair.comparisons, key=lambda each: each != pair.main):
        found = pair.comparisons[name]
        reach = max(abs(found.low), abs(found.high), 1e-12)
        drawn = draw(charts.whisker(found.low, found.difference, found.high, -reach, reach, zero=True))
        row: list[object] = [strong(name) if name == pair.main else name]
        row += [num(found.difference, signed(found.difference)), _judged(base, other, pair, name)]
        row += [num(found.ours), num(found.theirs), num(None, f"{signed(found.low)} to {signed(found.high)}"), drawn]
        rows.append([*row, *(num(each, p_value(each)) for each in (found.p_value, found.p_permutation))])
    heads = ["Metric", "#Difference", "Better", f"#{base.name}", f"#{other.name}", "#95 % interval", ""]
    return table(f"{other.name} minus {base.name}", [*heads, "#p, t-test", "#p, permutation"], rows)


def _judged(base: RunFacts, other: RunFacts, pair: Pair, name: str) -> str:
    if name.startswith(NOT_JUDGED):
        found = pair.comparisons[name]
        more = other.name if found.difference > 0 else base.name
        return f"{more} has more" if found.is_significant else "no clear difference"
    who = pair.favoured(name)
    return "not clear" if who == "neither" else f"{(base if who == 'base' else other).name}, clear"


# --- users -----------------------------------------------------------------------------------------------------------


def _with_users(pairs: Sequence[Pair]) -> tuple[Pair, Users] | None:
    return next(((pair, pair.users) for pair in pairs if pair.users is not None), None)


def gains(base: RunFacts, beside: Paired) -> Iterator[dict[str, Any]]:
    """Who gains and who loses with each run: a sentence, charts, and a table by activity."""
    for place, (other, pairs, _) in enumerate(beside):
        if (found := _with_users(pairs)) is None:
            continue
        pair, users = found
        better, worse = users.shares
        told = f"Of {number(len(users.ids))} users {percent(better)} gain, {percent(worse)} lose, and "
        told += f"{percent(1 - better - worse)} have the same {users.metric}. Above 0, {other.name} is better."
        yield {
            "heading": f"{other.name} instead of {base.name}: {users.metric}, {pair.title}",
            "told": told,
            "charts": [*_gain_charts(f"users-{place}", users)],
            "table": _gains_table(base, other, users),
        }


def _gain_charts(name: str, users: Users) -> Iterator[Markup]:
    ranges, values = users.by_activity(), users.gains
    if len(ranges) > 1:
        ends = [[getattr(each.gain, end) for each in ranges.values()] for end in ("value", "low", "high")]
        title = "Mean gain by the user's activity, with 95 % intervals"
        yield charts.ranges(f"{name}-ranges", [*ranges], *ends, title=title, x=users.what, y="gain")
    reach = float(np.abs(values).max()) or 1.0
    counts, edges = np.histogram(values, np.linspace(-reach, reach, BINS + 1))
    # letters, digits and @ alone: the axis is drawn
    word = "".join(each for each in users.metric if each.isascii() and (each.isalnum() or each in "@_ "))[:30]
    title, x = "Gains of single users", f"gain in {word}"
    yield charts.columns(f"{name}-spread", edges.tolist(), counts.tolist(), title=title, x=x, y="users")


def _gains_table(base: RunFacts, other: RunFacts, users: Users) -> Markup | None:
    rows = []
    for name, part in users.by_activity().items():
        (up, down), gain = part.shares, part.gain
        word = "gain" if gain.value > 0 else "lose"
        row = [name, num(len(part.ids)), num(float(part.base.mean())), num(float(part.other.mean()))]
        row += [num(gain.value, signed(gain.value)), num(None, f"{signed(gain.low)} to {signed(gain.high)}")]
        row += [num(up, percent(up)), num(down, percent(down)), f"they {word}" if gain.is_clear else "not clear"]
        rows.append(row)
    heads = [users.what.capitalize(), "#Users", f"#{base.name}", f"#{other.name}", "#Mean gain", "#95 % interval"]
    heads += ["#Gain", "#Lose", "Verdict"]
    return table(f"{users.metric} by the activity of users", heads, rows, sorts=False) if rows else None


def compares_activity(beside: Paired) -> bool:
    """Whether the section of users compares every run by activity."""
    found = [_with_users(pairs) for _, pairs, _ in beside]
    return all(each is not None and each[1].by_activity() for each in found)


def slices(runs: Runs, beside: Paired) -> Iterator[tuple[str, Markup]]:
    """The same slices of every run; activity only where no section before compares users by it."""
    first = first_answer(runs[0])
    if first is None:
        return
    held = [slices_of(run, first.saved.split, first.protocol) for run in runs]
    for by in held[0]:
        if all(by in each for each in held) and not (by == "activity" and compares_activity(beside)):
            yield SLICE_TITLES.get(by, f"By {by}"), _slices_table(runs, by, [each[by] for each in held], first.main)


def _slices_table(runs: Runs, by: str, held: Sequence[Mapping[str, Any]], metric: str) -> Markup:
    rows = []
    for name in list(held[0])[:60]:
        row: list[object] = [str(name), num(mapping(held[0], name).get("count"))]
        for each in held:
            found = of_slice(mapping(each, name), metric)
            row.append(num(None) if found is None else num(found.value, f"{number(found.value)} ({found.interval})"))
        rows.append(row)
    return table(f"{metric} by {by}", ["Slice", "#Users or rows", *(f"#{run.name}" for run in runs)], rows)


# --- lists -----------------------------------------------------------------------------------------------------------


def exposure_of(runs: Runs) -> dict[str, Any]:
    """Coverage, novelty and popularity of the lists."""
    answers = [(run, answer) for run in runs if (answer := first_answer(run)) is not None]
    held = [(run, answer.list_metrics.get(MODEL, {}), answer.exposure("shares")) for run, answer in answers]
    names = list(dict.fromkeys(name for _, measured, _ in held for name in measured))
    if not names:
        return {"table": None}
    rows = [[strong(run.name), *(num(measured.get(name)) for name in names)] for run, measured, _ in held]
    return {
        "table": table("Measures of the lists", ["Run", *(f"#{name}" for name in names)], rows),
        "chart": exposure_chart({run.name: shares for run, _, shares in held}),
        "meanings": [*meanings(names)],
    }


def lists_of(runs: Runs, beside: Paired) -> dict[str, Any]:
    """Every run's lists for the same users, those who gain or lose most first; or `problems`."""
    able = [run for run in runs if run.has_users]
    if not able:
        return {"problems": [], "users": [], "told": "These models score rows and recommend no items."}
    try:
        examples = Examples(able[0], held_out(able[0]))
        chosen = _chosen(able, beside)
        typical = [each for each in examples.typical() if str(each) not in {str(user) for user, _ in chosen}]
        wanted = [*chosen, *((user, "") for user in typical)]
        if not wanted:
            return {"problems": [], "users": [], "told": "The models know no user with an event."}
        shown = examples.of([user for user, _ in wanted])
    except RecspecError as error:
        return {"problems": [("", f"No lists could be made: {error}")], "users": [], "told": ""}
    lists, problems = {}, []
    for run in able:
        try:
            lists[run.name] = Examples(run, examples.split).recommended([user for user, _ in wanted])
        except RecspecError as error:
            problems.append((f"{run.name}: ", f"no lists could be made: {error}"))
    told = "First users who gain or lose most, which shows what differs and proves nothing; then five users from few "
    told = f"{told}events to many." if chosen else "Five users, from few events to many."
    told += examples.context_in_words
    if any(each.targets for each in shown):
        told += f" ✓ marks an item that the user acted on in {examples.split}."
    users = [
        (each, {name: found[place] for name, found in lists.items()}, why)
        for place, ((_, why), each) in enumerate(zip(wanted, shown, strict=True))
    ]
    return {"problems": problems, "users": users, "told": told, "has_order": examples.has_order}


def _chosen(runs: Runs, beside: Paired) -> list[tuple[Raw, str]]:
    """Users who gain or lose most, with the reason in words."""
    found: dict[str, str] = {}
    for other, pairs, _ in beside:
        pair = _with_users(pairs)
        if pair is None or other not in runs:
            continue
        for gaining, word in ((True, "gains"), (False, "loses")):
            for user in pair[1].most(EXAMPLES, gaining=gaining):
                found.setdefault(user, f"{word} with {other.name}")
        if len(beside) > 1:
            break
    return [*found.items()]


# --- curves, settings and cost ---------------------------------------------------------------------------------------


def curves_of(runs: Runs) -> list[Markup]:
    """Metrics of valid over the epochs, and reliability diagrams, in one chart each."""
    drawn: list[Markup] = []
    names = dict.fromkeys(str(run.card.trained.get("valid_metric") or "") for run in runs)
    for place, name in enumerate(filter(None, names)):
        series = [each for run in runs if (each := curve(run, name)) is not None]
        if series:
            drawn.append(charts.lines(f"curve-{place}", series, title=f"{plain(name)} on valid", x="epoch", y="value"))
    reliabilities = [found[1] for run in runs if (found := reliability_of(run)) is not None]
    return [*drawn, *([reliability_chart(reliabilities)] if reliabilities else [])]


def different_settings(runs: Runs) -> Iterator[tuple[str, Markup | None]]:
    """What differs between the runs' settings; None where nothing does."""
    records = [run.data_record for run in runs]
    data: list[Mapping[str, object]] = [
        {} if each is None else {"dataset": each.name, "folder": each.path, "digest": each.digest} for each in records
    ]
    for title, held in (
        ("Data", data),
        ("Model", [run.card.settings for run in runs]),
        ("Training", [run.card.train for run in runs]),
    ):
        names = dict.fromkeys(name for each in held for name in each)
        different = [name for name in names if len({_text(each.get(name, "–")) for each in held}) > 1]
        rows = [[name, *(code(_text(each.get(name, "–"))) for each in held)] for name in different]
        heads = ["Setting", *(run.name for run in runs)]
        yield title, table(f"{title}: settings that differ", heads, rows) if rows else None


def _text(value: object) -> str:
    return plain(value if isinstance(value, str) else json.dumps(value, default=str))


def cost_table(runs: Runs) -> Markup:
    """Time and memory."""
    rows = []
    for run in runs:
        seconds, record = run.card.trained.get("seconds"), run.record
        peak, whole = (None, None) if record is None else (record.peak_memory, record.seconds)
        row = [strong(run.name), num(seconds, duration(seconds)), num(whole, duration(whole)), num(peak, size(peak))]
        row += [num(len([*run.of("epoch")]) or None), num(run.start.get("parameters"))]
        rows.append([*row, str(run.card.trained.get("device", "–"))])
    heads = ["Run", "#Training", "#Whole command", "#Peak memory", "#Epochs", "#Parameters", "Device"]
    return table("What the runs took", heads, rows)
