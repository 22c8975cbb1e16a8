"""The last candidate of a search: a blend of its best models that rank items by the users' events.

A blend holds each model once, by its best candidate. Its weights are chosen on the users of valid on whom all
candidates are judged, in a share of the time that is left.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from recspec.base.errors import Interrupted
from recspec.bundle import as_part
from recspec.bundle import folder as bundle
from recspec.evaluation import Question, seconds_of
from recspec.feature_spec import FeatureSpec
from recspec.loading import Ranks
from recspec.training import Blended, blend_runs
from recspec.training.search import candidates
from recspec.training.search import candidates as cost
from recspec.training.search.leaderboard import write_blend
from recspec.training.search.state import BLEND, MOST_MEMBERS, RUNS, Blending, Line, State, judge, question_of, sign_of

SHARE = 0.25
"""Share of the time left for choosing a blend; the rest is for the second training and test."""
FEWEST_USERS = 200
"""Users without which weights are not chosen: fewer are noise."""
LEAST_LEAD = 1.0
"""Standard errors by which a blend must lead its best model, which costs less."""
TRIALS = 60
"""Blends that are tried in a search of two models, and of each further one about as many again."""
TIMED = 1 << 20
"""Scores of users x items of a timed trial."""


def blended(
    spec: FeatureSpec, state: State, out: Path, ranks: Ranks, left: float, check: Callable[..., None]
) -> Blending:
    """The blend of the candidates that are `offered`, with `left` seconds for the whole end; or why there is none.

    `check` is called after each trial and may raise.
    """
    started, lines = time.monotonic(), offered(state, spec)
    seconds, question = SHARE * left, question_of(spec, "valid", state.deciding, state.users)
    for line in lines:
        check()
        time_judging(state, line, out, ranks, question)
    lines, users = affordable(state, lines, len(question.ranked_users), seconds, seconds_of_trial(question))
    if len(lines) < 2:
        return Blending(why_not=f"{seconds:.0f} s are too few to choose its weights; give more --minutes")
    target, until = out / RUNS / BLEND, started + seconds
    shutil.rmtree(target, ignore_errors=True)
    try:
        made = blend_runs(
            target,
            [out / RUNS / line.name for line in lines],
            spec=spec,
            metric=state.deciding,
            users=users,
            device=ranks.device,
            progress=check,
            enough=lambda: time.monotonic() > until,
        )
        members = [line.name for line, part in zip(lines, made.members, strict=True) if part is not None]
        if len(members) < 2:
            return Blending(why_not=f"no other model improves {members[0]}")
        value, why_not = _judged(made, out / RUNS / lines[0].name, question, state.deciding, ranks, check)
        if why_not:
            return Blending(why_not=f"{why_not} against {lines[0].name}, which is cheaper")
    except Interrupted:
        raise
    except candidates.FAILURES as error:
        return Blending(why_not=candidates.told(error))
    write_blend(target, {name: out / RUNS / name for name in members}, state.dataset, metric=state.deciding)
    line = Line(
        name=BLEND,
        model=BLEND,
        values=[sign_of(state.deciding) * value],
        ended="blended",
        seconds=time.monotonic() - started,
    )
    return Blending(members=members, line=line)


def _judged(
    made: Blended, best: Path, question: Question, metric: str, ranks: Ranks, check: Callable[..., None]
) -> tuple[float, str]:
    """Its value on valid, by the question that all candidates were asked; and why it is no better than the best run."""
    models = [bundle.load(run, device=ranks.device).model.eval() for run in (made.bundle, best)]
    found, other = [judge(model, question, metric, ranks, check) for model in models]
    by, error = found.lead(other)
    enough = by > LEAST_LEAD * error and by > 0
    return found.value, "" if enough else f"it gains {by:.4f}, less than a standard error of {error:.4f},"


def offered(state: State, spec: FeatureSpec) -> list[Line]:
    """The best candidate of each model that ranks items by the users' events, at most `MOST_MEMBERS`.

    None if there are fewer than two, or valid does not decide by full ranking.
    """
    best: dict[str, Line] = {}
    for line in state.ranked if state.deciding.startswith("full/") and "valid" in spec.splits else ():
        if candidates.ranks_items(line.model):
            best.setdefault(line.model, line)
    return list(best.values())[:MOST_MEMBERS] if len(best) > 1 else []


def affordable(state: State, lines: Sequence[Line], users: int, seconds: float, trial: float) -> tuple[list[Line], int]:
    """The models and the users for which weights can be chosen in the time; the last models are dropped first.

    `trial` holds the seconds of one trial for one user and one model.
    """
    kept = list(lines)
    while len(kept) > 1:
        once = sum(state.each.get(line.model, 0.0) for line in kept)
        each = 2 * once + trial * sum(TRIALS * number for number in range(1, len(kept)))
        most = int(seconds / each) if each > 0 else users
        if most >= min(users, FEWEST_USERS):
            return kept, min(users, most)
        kept.pop()
    return kept, 0


def seconds_of_trial(question: Question) -> float:
    """Seconds to try weights for one user and one model: the logarithm of the shares, the sum, and the order."""
    items = question.truth.num_items
    scores = torch.rand(max(1, TIMED // items), items)

    def trial() -> None:
        (as_part(scores, "log", 1e-3) + scores).topk(min(items, 10)).values.sum()

    return seconds_of(trial) / len(scores)


def time_judging(state: State, line: Line, out: Path, ranks: Ranks, question: Question) -> None:
    """Note the seconds to judge a model on one user or row, of a fitted one now that it is there."""
    if line.model not in state.each:
        with suppress(*candidates.FAILURES):  # whoever opens it next tells what is wrong with it
            model = bundle.load(out / RUNS / line.name, device=ranks.device).model.eval()
            state.each[line.model], state.size = cost.seconds_each(model, question), cost.size_of(question)
