"""Sections of a comparison: which run is better, and by how much on each metric."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recspec.report import charts
from recspec.report.markup import Child, Markup, coded, tag
from recspec.report.measured import first_answer, is_lower_better
from recspec.report.numbers import duration, number, p_value, percent, signed, size
from recspec.report.page import Cell, Section, command, drawing, note, num, soft, table
from recspec.report.pairing import Pair, pairs_of, ranked
from recspec.report.run_facts import RunFacts
from recspec.report.run_metrics import evaluate_command, interval_text, meaning_of, who_of

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
        rows.append([
            tag("strong", run.name), run.card.model,
            num(None if found is None else found.value, best=run is best),
            num(None, "–" if found is None else interval_text(found)),
            drawing(drawn),
            _apart(runs[0], run, beside), num(run.start.get("parameters")),
            num(run.card.trained.get("seconds"), duration(run.card.trained.get("seconds"))),
            num(_size(run), size(_size(run))), "–" if record is None else record.name,
        ])  # fmt: skip
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
    return table(f"The runs by {metric}, {direction} is better; ★ marks one that is clearly better than all others",
                 heads, rows)  # fmt: skip


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
        rows.append([
            tag("strong", name) if name == pair.main else name, num(found.ours), num(found.theirs),
            num(found.difference, signed(found.difference)), num(None, f"{signed(found.low)} to {signed(found.high)}"),
            drawing(_around_zero(found.low, found.difference, found.high, reach)),
            num(found.p_value, p_value(found.p_value)), num(found.p_permutation, p_value(found.p_permutation)),
            _judged(base, other, pair, name),
        ])  # fmt: skip
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
