"""Section: what the model recommends to five users."""

from __future__ import annotations

from collections.abc import Iterator

from recspec.errors import RecspecError, how_many
from recspec.report.examples import Examples, context_told, history_list, recommended_list
from recspec.report.markup import Child, plain, tag
from recspec.report.measured import first_answer
from recspec.report.page import Section, note, soft
from recspec.report.run_facts import RunFacts


def examples_section(run: RunFacts) -> Section:
    """Lists of five users with their histories."""
    return Section("examples", "Example lists", tuple(_body(run)))


def held_out(run: RunFacts) -> str:
    """The split whose items count as hits."""
    answer = first_answer(run)
    return "test" if answer is None else answer.saved.split


def _body(run: RunFacts) -> Iterator[Child]:
    if not run.has_users:
        yield soft(
            "This model scores rows and recommends no items; `recspec predict` writes a probability for each row."
        )
        return
    try:
        examples = Examples(run, held_out(run))
        users = examples.typical()
        if not users:
            yield soft("The model knows no user with an event.")
            return
        lists = examples.recommended(users)
        shown = examples.of(users)
    except RecspecError as error:
        yield note(f"No lists could be made: {error}")
        return
    told = "Five users, from few events to many; the choice is by their number of events alone."
    told += context_told(examples)
    marked = any(each.targets for each in shown)
    if marked:
        yield soft(told, f" ✓ marks an item that the user acted on in {examples.split}.")
    else:
        why = f"the items of {examples.split} are not at hand, or the model knows them"
        yield soft(told, f" Hits can't be marked: {why}.")
    for each, found in zip(shown, lists, strict=True):
        head = tag("h3", "User ", tag("bdi", plain(each.user, 80)), f", {how_many(each.num_events, 'event')}")
        parts = [history_list(each, has_order=examples.has_order), recommended_list("Recommended", found, each.targets)]
        yield tag("div", head, tag("div", *parts, class_="lists"), class_="user")
