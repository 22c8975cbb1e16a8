"""The comparison of several runs; the first is the one that the others are compared with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from recspec.base.errors import RecspecError, how_many
from recspec.report import charts
from recspec.report.examples import Examples, Raw, context_told, history_list, recommended_list
from recspec.report.measured import (
    MODEL,
    Pair,
    Users,
    first_answer,
    is_lower_better,
    mapping,
    numbers,
    of_metric,
    pairs_of,
    ranked,
)
from recspec.report.page import (
    Cell,
    Child,
    Markup,
    Section,
    coded,
    command,
    drawing,
    duration,
    note,
    num,
    number,
    p_value,
    page,
    percent,
    plain,
    signed,
    size,
    soft,
    table,
    tag,
)
from recspec.report.page import charts as side_by_side
from recspec.report.run_facts import RunFacts
from recspec.report.run_page import held_out, train_command
from recspec.report.run_sections import (
    WORDS,
    beyond_of,
    curve,
    evaluate_command,
    exposure_chart,
    interval_text,
    meaning_of,
    reliability_of,
    shares_of,
    slices_of,
    who_of,
)

Paired = Sequence[tuple[RunFacts, Sequence[Pair], Sequence[str]]]
"""Each run but the first, with its pairs with the first and the reasons if there are none."""

NOT_JUDGED = ("novelty", "diversity", "popularity_lift", "coverage")


def paired(runs: Sequence[RunFacts]) -> Paired:
    """Every run beside the first one."""
    return [(run, *pairs_of(runs[0], run)) for run in runs[1:]]


def verdict_section(runs: Sequence[RunFacts], beside: Paired) -> Section:
    """Which run is better, and for whom, in sentences."""
    return Section("verdict", "Verdict", tuple(_verdict(runs, beside)))


def differences_section(runs: Sequence[RunFacts], beside: Paired) -> Section:
    """Paired differences of every metric with their significance."""
    body: list[Child] = []
    names: list[str] = []
    for other, pairs, _ in beside:
        for pair in pairs:
            body += [tag("h3", f"{other.name} beside {runs[0].name}, {pair.title}"), _differences(runs[0], other, pair)]
            names += pair.metrics
    if body:
        told = f"Every difference is over the same users or rows: the run's metric minus that of {runs[0].name}. The "
        told += "interval comes from a bootstrap, p from the paired t-test and from a permutation test. “clear” needs "
        told += "both below 0.05. Of twenty metrics one is clear by chance, so look at the first one."
        body += [soft(told), meaning_of(names)]
    else:
        body = [soft("There are no two evaluations of the same question; the verdict says how to get them.")]
    return Section("differences", "Differences", tuple(body))


def favoured(pair: Pair, metric: str) -> str:
    """`base`, `other` or `neither`, by both tests."""
    from recspec.evaluation import favours

    return {"ours": "base", "theirs": "other"}.get(favours(metric, pair.comparisons[metric]), "neither")


def _verdict(runs: Sequence[RunFacts], beside: Paired) -> Iterator[Child]:
    base = runs[0]
    digests = {run.data_record.digest for run in runs if run.data_record is not None}
    if len(digests) > 1:
        yield note("These runs were trained on different data. Only evaluations on the same data are compared.")
    for other, pairs, why_not in beside:
        if not pairs:
            what = tag("strong", f"{other.name} and {base.name} can't be compared yet: ")
            yield note(what, " ".join(why_not[:3]), " Evaluate both in the same way:")
            yield command(*(evaluate_command(run) for run in (base, other)))
            continue
        yield _sentence(base, other, pairs[0])
    yield _runs_table(runs, beside)
    for run in runs:
        for problem in run.problems:
            yield note(tag("strong", f"{run.name}: "), coded(problem))


def _sentence(base: RunFacts, other: RunFacts, pair: Pair) -> Markup:
    metric = pair.main
    found, who = pair.comparisons[metric], favoured(pair, metric)
    word = {"base": "is worse than", "other": "is better than", "neither": "can't be told from"}[who]
    kind = {"base": "bad", "other": "good", "neither": ""}[who]
    told = f" On {pair.title}, {metric} is {number(found.theirs)} against {number(found.ours)}: a difference of "
    told += f"{signed(found.difference)} (95 % interval {signed(found.low)} to {signed(found.high)}; p "
    told += f"{p_value(found.p_value)}), over {number(pair.count)} "
    told += f"{who_of(pair.base)}."
    lines: list[Child] = [tag("p", tag("strong", f"{other.name} {word} {base.name}."), told)]
    if (users := pair.users) is not None:
        better, worse = users.shares
        by = f" by {users.metric}" if users.metric != metric else ""
        told = f"{other.name} is better{by} for {percent(better)} of the users, worse for {percent(worse)}, and equal "
        lines.append(tag("p", f"{told}for the others. {_for_whom(pair)}"))
    return tag("div", lines, class_=f"note {kind}".strip())


def _for_whom(pair: Pair) -> str:
    """Ranges of activity with a clear gain or loss."""
    ranges = pair.users.by_activity() if pair.users is not None else []
    if len(ranges) < 2:
        return ""
    what = pair.users.what if pair.users is not None else ""
    gaining = [each.name for each in ranges if each.gain.is_clear and each.gain.value > 0]
    losing = [each.name for each in ranges if each.gain.is_clear and each.gain.value < 0]
    told = []
    for names, word in ((gaining, "gain"), (losing, "lose")):
        if len(names) == len(ranges):
            return f"Users of every activity {word}."
        if names:
            told.append(f"Users with {', '.join(names)} {what} {word}")
    if not told:
        return "No group of users by activity gains or loses clearly."
    return "; ".join(told) + ". For the others nothing is clear."


def _runs_table(runs: Sequence[RunFacts], beside: Paired) -> Markup:
    """The runs side by side, the best first."""
    answers = [first_answer(run) for run in runs]
    order = ranked(runs, answers)
    metric = next((each.main for each in answers if each is not None), "metric")
    held = [run for run, _ in order]
    least = min((found.low for _, found in order), default=0.0)
    most = max((found.high for _, found in order), default=1.0)
    values = {run.name: found for run, found in order}
    rows: list[list[Child | Cell]] = []
    best = _clearly_best(held)
    for run in (*held, *(each for each in runs if each not in held)):
        found = values.get(run.name)
        record, drawn = run.data_record, Markup("")
        if found is not None:
            drawn = charts.whisker(found.low, found.value, found.high, least, most, runs.index(run))
        rows.append(
            [
                tag("strong", run.name),
                run.card.model,
                num(None if found is None else found.value, best=run is best),
                num(None, "–" if found is None else interval_text(found)),
                drawing(drawn),
                _apart(runs[0], run, beside),
                num(run.start.get("parameters")),
                num(run.card.trained.get("seconds"), duration(run.card.trained.get("seconds"))),
                num(_size(run), size(_size(run))),
                "–" if record is None else record.name,
            ]
        )
    heads = [
        "Run",
        "Model",
        f"#{metric}",
        "#95 % interval",
        "",
        f"Beside {runs[0].name}",
        "#Parameters",
        "#Training",
        "#On disk",
        "Data",
    ]
    direction = "lower" if is_lower_better(metric) else "higher"
    return table(
        f"The runs by {metric}, {direction} is better; ★ marks one that is clearly better than all others", heads, rows
    )


def _clearly_best(order: Sequence[RunFacts]) -> RunFacts | None:
    """The first of runs in order if the paired tests favour it over every other one."""
    for other in order[1:]:
        pairs, _ = pairs_of(order[0], other)
        if not pairs or favoured(pairs[0], pairs[0].main) != "base":
            return None
    return order[0] if len(order) > 1 else None


def _apart(base: RunFacts, run: RunFacts, beside: Paired) -> str:
    if run is base:
        return "the first run"
    pairs = next((held for other, held, _ in beside if other is run), ())
    if not pairs:
        return "not compared"
    pair = pairs[0]
    found = pair.comparisons[pair.main]
    word = {"base": "worse", "other": "better", "neither": "not clear"}[favoured(pair, pair.main)]
    return f"{word}: {signed(found.difference)}"


def _differences(base: RunFacts, other: RunFacts, pair: Pair) -> Markup:
    rows: list[list[Child | Cell]] = []
    for name in sorted(pair.comparisons, key=lambda each: each != pair.main):
        found = pair.comparisons[name]
        reach = max(abs(found.low), abs(found.high), 1e-12)
        rows.append(
            [
                tag("strong", name) if name == pair.main else name,
                num(found.ours),
                num(found.theirs),
                num(found.difference, signed(found.difference)),
                num(None, f"{signed(found.low)} to {signed(found.high)}"),
                drawing(_around_zero(found.low, found.difference, found.high, reach)),
                num(found.p_value, p_value(found.p_value)),
                num(found.p_permutation, p_value(found.p_permutation)),
                _judged(base, other, pair, name),
            ]
        )
    heads = [
        "Metric",
        f"#{base.name}",
        f"#{other.name}",
        "#Difference",
        "#95 % interval",
        "",
        "#p, t-test",
        "#p, permutation",
        "Better",
    ]
    return table(f"{other.name} minus {base.name}", heads, rows)


def _judged(base: RunFacts, other: RunFacts, pair: Pair, name: str) -> Child:
    if name.startswith(NOT_JUDGED):
        found = pair.comparisons[name]
        return (
            "no clear difference"
            if not found.is_significant
            else f"{other.name if found.difference > 0 else base.name} has more"
        )
    who = favoured(pair, name)
    return {"base": tag("span", f"{base.name}, clear"), "other": tag("span", f"{other.name}, clear")}.get(
        who, "not clear"
    )


def _around_zero(low: float, value: float, high: float, reach: float) -> Markup:
    """An interval beside a line at 0."""
    drawn = charts.whisker(low, value, high, -reach, reach, 0)
    zero = tag("line", x1=100, x2=100, y1=0, y2=16, stroke="var(--soft)", stroke_dasharray="2 2")
    return Markup(drawn.replace("</svg>", f"{zero}</svg>"))


def _size(run: RunFacts) -> int:
    return sum(file.stat().st_size for file in run.bundle.rglob("*") if file.is_file())


EXAMPLES = 2  # users who gain most, and as many who lose most
BINS = 21


def users_section(runs: Sequence[RunFacts], beside: Paired) -> Section:
    """Who gains and who loses, by activity."""
    body: list[Child] = []
    for place, (other, pairs, _) in enumerate(beside):
        pair = _with_users(pairs)
        if pair is None or pair.users is None:
            continue
        body.append(tag("h3", f"{other.name} instead of {runs[0].name}: {pair.users.metric}, {pair.title}"))
        body += _gains(f"users-{place}", runs[0], other, pair.users)
    if not body:
        body = [soft("Values of single users are not at hand: the evaluations have no users, or are not comparable.")]
    return Section("users", "Who gains and who loses", tuple(body))


def lists_section(runs: Sequence[RunFacts], beside: Paired) -> Section:
    """The runs' lists for the same users, side by side."""
    return Section("lists", "Lists side by side", tuple(_lists(runs, beside)))


def compares_activity(pairs: Sequence[Pair]) -> bool:
    """Whether the section of users compares two runs by activity."""
    pair = _with_users(pairs)
    return pair is not None and pair.users is not None and bool(pair.users.by_activity())


def _with_users(pairs: Sequence[Pair]) -> Pair | None:
    return next((pair for pair in pairs if pair.users is not None), None)


def _gains(name: str, base: RunFacts, other: RunFacts, users: Users) -> Iterator[Child]:
    better, worse = users.shares
    told = f"Of {number(len(users.ids))} users {percent(better)} gain, {percent(worse)} lose, and "
    told += f"{percent(1 - better - worse)} have the same {users.metric}. Above 0, {other.name} is better."
    yield tag("p", told)
    ranges = users.by_activity()
    gains = users.gains
    reach = float(np.abs(gains).max()) or 1.0
    counts, edges = np.histogram(gains, np.linspace(-reach, reach, BINS + 1))
    drawn = [
        charts.columns(
            f"{name}-spread",
            edges.tolist(),
            counts.tolist(),
            title="Gains of single users",
            x=f"gain in {_word(users.metric)}",
            y="users",
        )
    ]
    if len(ranges) > 1:
        found = [each.gain for each in ranges]
        title = "Mean gain by the user's activity, with 95 % intervals"
        drawn.insert(
            0,
            charts.ranges(
                f"{name}-ranges",
                [each.name for each in ranges],
                [each.value for each in found],
                [each.low for each in found],
                [each.high for each in found],
                title=title,
                x=users.what,
                y="gain",
            ),
        )
    yield side_by_side(*drawn)
    if ranges:
        rows: list[list[Child | Cell]] = []
        for each in ranges:
            up, down = each.users.shares
            gain = each.gain
            told = "gain" if gain.value > 0 else "lose"
            rows.append(
                [
                    each.name,
                    num(len(each.users.ids)),
                    num(float(each.users.base.mean())),
                    num(float(each.users.other.mean())),
                    num(gain.value, signed(gain.value)),
                    num(None, f"{signed(gain.low)} to {signed(gain.high)}"),
                    num(up, percent(up)),
                    num(down, percent(down)),
                    f"they {told}" if gain.is_clear else "not clear",
                ]
            )
        heads = [
            users.what.capitalize(),
            "#Users",
            f"#{base.name}",
            f"#{other.name}",
            "#Mean gain",
            "#95 % interval",
            "#Gain",
            "#Lose",
            "Verdict",
        ]
        yield table(f"{users.metric} by the activity of users", heads, rows, sorts=False)


def _word(metric: str) -> str:
    """A metric's name for an axis: letters, digits and @ alone."""
    return "".join(each for each in metric if each.isascii() and (each.isalnum() or each in "@_ "))[:30]


# --- lists ------------------------------------------------------------------------------------------------------------


def _lists(runs: Sequence[RunFacts], beside: Paired) -> Iterator[Child]:
    able = [run for run in runs if run.has_users]
    if not able:
        yield soft("These models score rows and recommend no items.")
        return
    try:
        examples = Examples(able[0], held_out(able[0]))
        chosen = _chosen(able, beside)
        typical = [each for each in examples.typical() if str(each) not in {str(user) for user, _ in chosen}]
        wanted = [*chosen, *((user, "") for user in typical)]
        if not wanted:
            yield soft("The models know no user with an event.")
            return
        shown = examples.of([user for user, _ in wanted])
    except RecspecError as error:
        yield note(f"No lists could be made: {error}")
        return
    lists = {}
    for run in able:
        try:
            lists[run.name] = Examples(run, examples.split).recommended([user for user, _ in wanted])
        except RecspecError as error:
            yield note(tag("strong", f"{run.name}: "), f"no lists could be made: {error}")
    told = "First users who gain or lose most, which shows what differs and proves nothing; then five users from few "
    told += "events to many."
    told = (told if chosen else "Five users, from few events to many.") + context_told(examples)
    marked = any(each.targets for each in shown)
    yield soft(told, f" ✓ marks an item that the user acted on in {examples.split}." if marked else None)
    for place, ((_, why), each) in enumerate(zip(wanted, shown, strict=True)):
        head = tag("h3", "User ", tag("bdi", plain(each.user, 80)), f", {how_many(each.num_events, 'event')}")
        columns = [history_list(each, has_order=examples.has_order)]
        columns += [recommended_list(name, found[place], each.targets) for name, found in lists.items()]
        reason = tag("p", tag("span", plain(why), class_="tag")) if why else None
        yield tag("div", head, reason, tag("div", *columns, class_="lists"), class_="user")


def _chosen(runs: Sequence[RunFacts], beside: Paired) -> list[tuple[Raw, str]]:
    """Users who gain or lose most, with the reason in words."""
    found: dict[str, str] = {}
    for other, pairs, _ in beside:
        pair = _with_users(pairs)
        if pair is None or pair.users is None or other not in runs:
            continue
        for gaining, word in ((True, "gains"), (False, "loses")):
            for user in pair.users.most(EXAMPLES, gaining=gaining):
                found.setdefault(user, f"{word} with {other.name}")
        if len(beside) > 1:
            break
    return [*found.items()]


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
    for title, held in (
        ("Data", [_data(run) for run in runs]),
        ("Model", [run.card.settings for run in runs]),
        ("Training", [run.card.train for run in runs]),
    ):
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
        rows.append(
            [
                tag("strong", run.name),
                num(seconds, duration(seconds)),
                num(whole, duration(whole)),
                num(peak, size(peak)),
                num(len([*run.of("epoch")]) or None),
                num(run.start.get("parameters")),
                device,
            ]
        )
    heads = ["Run", "#Training", "#Whole command", "#Peak memory", "#Epochs", "#Parameters", "Device"]
    body: list[Child] = [table("What the runs took", heads, rows), tag("h3", "Make them again")]
    body.append(
        command(
            *(train_command(run) for run in runs),
            *(evaluate_command(run) for run in runs),
            ["recspec", "report", *(run.path for run in runs)],
        )
    )
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
        row += [
            num(None) if one is None else num(one.value, f"{number(one.value)} ({interval_text(one)})") for one in found
        ]
        rows.append(row)
    return table(f"{metric} by {by}", ["Slice", "#Users or rows", *(f"#{run.name}" for run in runs)], rows)


def _data(run: RunFacts) -> dict[str, object]:
    record = run.data_record
    return {} if record is None else {"dataset": record.name, "folder": record.path, "digest": record.digest}


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 200 else f"{text[:199]}…"


def compare_page(runs: Sequence[RunFacts]) -> str:
    """The whole page."""
    beside = paired(runs)
    names = [run.name for run in runs]
    told = f" beside {', '.join(names[1:])}. A difference is the other run's metric minus that of {names[0]}."
    lead = tag("p", tag("strong", names[0]), told, class_="lead")
    sections = [
        verdict_section(runs, beside),
        differences_section(runs, beside),
        users_section(runs, beside),
        slices_section(runs, beside),
        exposure_section(runs),
        lists_section(runs, beside),
        curves_section(runs),
        settings_section(runs),
        cost_section(runs),
    ]
    if not any(run.has_users for run in runs):  # they score rows and recommend nothing
        sections = [each for each in sections if each.name not in ("users", "exposure", "lists")]
    return page(f"Comparison of {' and '.join([', '.join(names[:-1]), names[-1]])}", lead, sections)
