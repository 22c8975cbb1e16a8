"""Sections of a comparison: which users gain and lose, and the lists of the runs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from recspec.errors import RecspecError, how_many
from recspec.report import charts
from recspec.report.compare_verdict import Paired
from recspec.report.examples import Examples, Raw, context_told, history_list, recommended_list
from recspec.report.markup import Child, plain, tag
from recspec.report.numbers import number, percent, signed
from recspec.report.page import Cell, Section, note, num, soft, table
from recspec.report.page import charts as side_by_side
from recspec.report.pairing import Pair, Users
from recspec.report.run_examples import held_out
from recspec.report.run_facts import RunFacts

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
    drawn = [charts.columns(f"{name}-spread", edges.tolist(), counts.tolist(), title="Gains of single users",
                            x=f"gain in {_word(users.metric)}", y="users")]  # fmt: skip
    if len(ranges) > 1:
        found = [each.gain for each in ranges]
        title = "Mean gain by the user's activity, with 95 % intervals"
        drawn.insert(0, charts.ranges(f"{name}-ranges", [each.name for each in ranges], [each.value for each in found],
                     [each.low for each in found], [each.high for each in found], title=title, x=users.what,
                     y="gain"))  # fmt: skip
    yield side_by_side(*drawn)
    if ranges:
        rows: list[list[Child | Cell]] = []
        for each in ranges:
            up, down = each.users.shares
            gain = each.gain
            told = "gain" if gain.value > 0 else "lose"
            rows.append([
                each.name, num(len(each.users.ids)), num(float(each.users.base.mean())),
                num(float(each.users.other.mean())), num(gain.value, signed(gain.value)),
                num(None, f"{signed(gain.low)} to {signed(gain.high)}"), num(up, percent(up)),
                num(down, percent(down)), f"they {told}" if gain.is_clear else "not clear",
            ])  # fmt: skip
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
