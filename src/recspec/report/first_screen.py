"""The first screen of a run's report, for who decides: people found, catalogue shown, money captured, who gains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from recspec.report.measured import MODEL, PROTOCOLS, Answer, answers_of
from recspec.report.page import number, percent
from recspec.report.run_facts import RunFacts

LENGTH = 10
"""Length of the lists to speak of, if it was measured."""
NUMBERS = dict(enumerate("one two three four five six seven eight nine ten".split(), start=1))

Tile = tuple[str, str]
"""What a tile shows, and of what it is."""


@dataclass(frozen=True)
class FirstScreen:
    """A sentence that anybody understands, the one on the best baseline, and the numbers below."""

    sentence: str
    beside: str = ""
    tiles: dict[str, Tile] = field(default_factory=dict)


def first_screen(run: RunFacts) -> FirstScreen | None:
    """By lists of the test split where there are any, else by its rows; None without an evaluation."""
    answers = [each for each in answers_of(run) if each.saved.is_current and each.protocol in PROTOCOLS]
    for answer in sorted(answers, key=lambda each: (each.saved.split != "test", PROTOCOLS.index(each.protocol))):
        k = _length(answer)
        if k is not None:
            return _of_lists(answer, k)
        if "auc" in answer.metrics.get(MODEL, {}):
            return _of_rows(answer)
    return None


def _length(answer: Answer) -> int | None:
    """The measured length of lists that is nearest to `LENGTH`."""
    names = [name.partition("@")[2] for name in answer.metrics.get(MODEL, {}) if name.startswith("hit_rate@")]
    lengths = [int(each) for each in names if each.isascii() and each.isdigit()]
    return min(lengths, key=lambda each: (abs(each - LENGTH), each), default=None)


def _of_lists(answer: Answer, k: int) -> FirstScreen:
    metric, among = f"hit_rate@{k}", NUMBERS.get(k, number(k))
    if answer.protocol == "sampled":
        among = f"the first {among} of {number(answer.facts.get('most_candidates'))} candidates"
    what = "what" if answer.facts.get("positives") == answer.facts.get("groups") else "something that"
    found = of_100(answer.metrics[MODEL][metric].value)
    said = f"Of 100 {answer.who}, {found} found {what} they chose next among {among}."
    return FirstScreen(said, _beside(answer, metric), dict(_tiles(answer, k)))


def _of_rows(answer: Answer) -> FirstScreen:
    """AUC in words: the share of pairs of rows of both classes that are in the right order."""
    right = of_100(answer.metrics[MODEL]["auc"].value)
    said = f"Of 100 pairs of a positive and a negative row, {right} are in the right order; chance gives 50."
    rows, positives = (answer.facts.get(name) for name in ("rows", "positives"))
    tiles = {}
    if isinstance(rows, int) and isinstance(positives, int):
        tiles["Positives"] = number(positives), f"of {answer.saved.split}"
        tiles["Negatives"] = number(rows - positives), f"of {answer.saved.split}"
    return FirstScreen(said, _beside(answer, "auc"), tiles)


def _beside(answer: Answer, metric: str) -> str:
    """How many the best baseline reaches by a metric of which more is better."""
    held = {who: of[metric].value for who, of in answer.metrics.items() if who != MODEL and metric in of}
    if not held:
        return ""
    best = max(held, key=held.__getitem__)
    gap = answer.difference(best, metric)
    clear = "" if gap is None else "a clear difference" if gap.is_clear else "no clear difference"
    return f"The best baseline, {best}, reaches {of_100(held[best])}{': ' if clear else ''}{clear}."


def _tiles(answer: Answer, k: int) -> Iterator[tuple[str, Tile]]:
    lists = answer.list_metrics.get(MODEL, {}) if answer.protocol == "full" else {}
    if (coverage := lists.get(f"coverage@{k}")) is not None:
        yield "Catalogue shown", (percent(coverage), f"of the items are in at least one list of {NUMBERS.get(k, k)}")
    if (revenue := lists.get(name := f"revenue@{k}")) is not None:
        others = {who: of[name] for who, of in answer.list_metrics.items() if who != MODEL and name in of}
        best = max(others, key=others.__getitem__, default=None)
        beside = "" if best is None else f"; {best}: {percent(others[best])}"
        told = "prices of the chosen items that are in the lists, by the prices of all chosen items"
        yield "Revenue captured", (percent(revenue), told + beside)
    yield from _gainers(answer, f"hit_rate@{k}")


def _gainers(answer: Answer, metric: str) -> Iterator[tuple[str, Tile]]:
    """The users, by their number of events, who gain most and least against popularity, or the best baseline."""
    names = [who for who, of in answer.metrics.items() if who != MODEL and metric in of]
    beside = "popularity" if "popularity" in names else answer.best_baseline
    users = None if beside is None else answer.users_beside(beside, metric)
    ranges = {} if users is None else users.by_activity()
    if len(ranges) < 2:
        return
    order = sorted(ranges, key=lambda name: ranges[name].gain.value)
    for title, name in (("Who gains most", order[-1]), ("Who gains least", order[0])):
        part = ranges[name]
        told = f"{of_100(float(part.other.mean()))} of 100 such users find it; by {beside}, "
        yield title, (f"{name} events", told + of_100(float(part.base.mean())))


def of_100(share: float) -> str:
    """A share as a number of people among a hundred."""
    return "fewer than 1" if 0 < share < 0.01 else "more than 99" if 0.99 < share < 1 else f"{100 * share:.0f}"
