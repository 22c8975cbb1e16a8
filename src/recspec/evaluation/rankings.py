"""Where the positives of a split stand among their candidates, under the protocols that rank.

Shapes: R users or requests; N items; P positives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recspec.base.errors import DataError
from recspec.evaluation.interactions import Rows, history_of_items
from recspec.evaluation.scoring import ModelRanker, Ranker, SplitScores
from recspec.evaluation.task import EvaluationTask
from recspec.metrics import Ranking
from recspec.metrics import measures as metrics
from recspec.models import Ids, Scores, at_once

SCORES_PER_BLOCK = 1 << 23  # scores of users x items held at once on a CPU: 32 MB in fp32


@dataclass(frozen=True)
class Ranked:
    """The positives of a split among their candidates."""

    ranking: Ranking
    candidates: str
    """What the candidates are."""
    positives: Rows
    """The P positives: groups, users and items."""
    part: Callable[[NDArray[np.bool_]], Ranking]
    """The ranking of some of the positives (P,) alone: groups without one are left out, and candidates stay."""
    leaked: Ranking | None = None
    """The ranking with the leak, if the dataset names one."""
    users: Ids | None = None
    """The users of `top`."""
    top: NDArray[np.int32] | None = None
    """(R, k) the best items of each user, best first; -1 after the last candidate."""


def rank_sampled(answers: SplitScores) -> Ranked:
    """The candidates of each group, ranked."""
    task = answers.task
    rows, ids = task.candidates, task.candidate_ids
    scores = answers.of_candidates()
    dropped = task.cold_rows
    if task.lists_candidates:
        dropped = dropped | task.repeats
    if dropped.any():
        new = ~dropped
        scores, ids, rows = scores[new], None if ids is None else ids[new], rows.take(new)
    groups = rows.groups
    assert groups is not None
    ranking = metrics.rank_groups(scores, rows.labels, groups, candidates=ids)
    leaked = None
    if rows.leak is not None:
        leaked = metrics.rank_groups(_with_leak(scores, rows.leak), rows.labels, groups, candidates=ids)
    drawn = f"{task.settings.num_negatives} uniform negatives a user, seed {task.settings.seed}"
    described = "the dataset's own" if task.lists_candidates else drawn
    at = np.flatnonzero(rows.labels)

    def part(chosen: NDArray[np.bool_]) -> Ranking:
        labels = np.zeros_like(rows.labels)
        labels[at[chosen]] = True
        return metrics.rank_groups(scores, labels, groups, candidates=ids)

    return Ranked(ranking, described, rows.take(rows.labels), part, leaked)


def _with_leak(scores: Scores, leak: NDArray[np.bool_]) -> Scores:
    """(rows,) scores in the order of probability + leak, without its rounding: leaked rows first, then by score.

    A probability is in [0, 1], so a leak of 1 puts a row above all others; 1 + probability would merge small ones.
    """
    distinct, places = np.unique(scores, return_inverse=True)
    return np.asarray(places + leak * len(distinct), dtype=np.float64)


def rank_full(answers: SplitScores, *, listed: int = 0) -> Ranked:
    """Every user's positives, ranked among all items; with each user's `listed` best items.

    Ranks take shares of the users, and join the results.
    """
    task, ranks = answers.task, answers.ranks
    truth, ranker = task.truth, answers.of_all or answers.ranker()
    users = task.ranked_users
    device = ranker.device if isinstance(ranker, ModelRanker) else torch.device("cpu")
    # Ranks with other GPUs take the blocks of the smallest.
    step = int(ranks.gather(torch.tensor([users_at_once(truth.num_items, device)])).min())
    starts = range(0, len(users), step)
    share = ranks.share(len(starts))

    def rank(start: int) -> tuple[Tensor, Tensor, Tensor]:
        with torch.inference_mode():
            positions, sizes, best = _rank_block(ranker, users[start : start + step], task, step, listed)
            positions[:, 0] += start
        return positions, sizes, best

    found, sizes = [torch.zeros((0, 4), dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    lists = [torch.zeros((0, min(listed, truth.num_items)), dtype=torch.int32)]
    blocks, done = starts[share], 0
    whole = max(1, sum(len(users[start : start + step]) for start in blocks))
    answers.progress("full", 0, whole)
    for positions, of_each, best in map(rank, blocks):
        found.append(positions)
        sizes.append(of_each)
        lists.append(best)
        done += len(of_each)
        answers.progress("full", done, whole)
    answers.progress("full", whole, whole)
    group, item, higher, tied = ranks.gather(torch.cat(found)).numpy().T
    candidates = ranks.gather(torch.cat(sizes)).numpy()
    positives = Rows(np.ones(len(group), dtype=bool), users[group], users[group], item)

    def part(chosen: NDArray[np.bool_]) -> Ranking:
        held, codes = np.unique(group[chosen], return_inverse=True)
        return Ranking.of_positives(codes, higher[chosen], tied[chosen], candidates[held])

    top = ranks.gather(torch.cat(lists)).numpy() if listed else None
    ranking = Ranking.of_positives(group, higher, tied, candidates)
    return Ranked(ranking, _described(answers), positives, part, users=users, top=top)


def users_at_once(num_items: int, device: torch.device) -> int:
    """Users whose scores of all items a device holds at once."""
    return max(1, at_once(SCORES_PER_BLOCK, device) // num_items)


def _described(answers: SplitScores) -> str:
    """What the candidates of protocol `full` are, and what the models knew."""
    task = answers.task
    earlier = " and ".join(task.before)
    if earlier and history_of_items(task.spec) is not None:
        earlier += ", histories included"
    seen = "the user's seen ones of " if "target" in task.spec.metadata else "those of the user in "
    described = f"all items without {seen}{earlier}" if task.excluded.num_pairs else "all items"
    users, known = len(task.ranked_users), np.count_nonzero(np.diff(task.truth.offsets))
    if users < known:
        described += f"; {users:,} of {known:,} users, seed {task.settings.seed}"
    return described


def _rank_block(
    ranker: Ranker, users: Ids, task: EvaluationTask, step: int, listed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """For each positive of some users (place of the user, item, higher, tied); the users' numbers of candidates; lists.

    Counting the higher scores takes one pass over the scores; sorting them would take many.
    """
    scores = ranker.scores(users) if isinstance(ranker, ModelRanker) else torch.from_numpy(ranker.score_users(users))
    device, truth, seen = scores.device, task.truth, task.excluded
    (rows, items), (seen_rows, seen_items) = truth.of(users), seen.of(users)
    cold = np.flatnonzero(task.cold_items[task.first_item :]) + task.first_item
    # None of them is in `truth`.
    excluded = (seen_items >= task.first_item) & ~task.cold_items[seen_items]
    others = np.bincount(seen_rows[excluded], minlength=len(users)) + len(cold)
    num_candidates = truth.num_items - task.first_item - others

    at = (torch.from_numpy(rows).to(device), torch.from_numpy(items).long().to(device))
    # NaN marks items that are no candidates: NaN is neither higher than any number nor equal to one.
    out = (torch.from_numpy(seen_rows[excluded]).to(device), torch.from_numpy(seen_items[excluded]).long().to(device))
    has_nan = not bool(scores.sum().isfinite())  # or an infinite score; one pass, where looking at each takes eight
    scores[out] = torch.nan
    scores[:, : task.first_item] = torch.nan
    if len(cold):
        scores[:, torch.from_numpy(cold).to(device)] = torch.nan
    if has_nan and not np.array_equal(_num_true(scores == scores).cpu().numpy(), num_candidates):
        raise DataError("some scores are NaN: the model has diverged, or its weights or inputs hold NaN")
    higher, tied = (_by_row if device.type == "cpu" else _by_block)(scores, *at, step)
    positions = torch.stack((*at, higher, tied), dim=1).cpu()
    return positions, torch.from_numpy(num_candidates), _best(scores, torch.from_numpy(num_candidates), listed)


def _best(scores: Tensor, num_candidates: Tensor, listed: int) -> Tensor:
    """(R, k) each user's best items, best first, of scores that are NaN for no candidates; -1 after the last."""
    listed = min(listed, scores.shape[1])
    if not listed:
        return torch.zeros((len(scores), 0), dtype=torch.int32)
    best = scores.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).topk(listed, dim=1).indices
    places = torch.arange(listed)
    return torch.where(places < num_candidates.unsqueeze(1), best.cpu().int(), -1)


def _by_row(scores: Tensor, rows: Tensor, items: Tensor, step: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """For each positive (P,), the numbers of scores (R, N) of its row that are higher, and equal.

    numpy compares four times as fast as torch.
    """
    table, held = scores.numpy(), np.empty(scores.shape[1], bool)
    higher, tied = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    for place, (row, item) in enumerate(zip(rows.tolist(), items.tolist(), strict=True)):
        of_user = table[row]
        higher[place] = np.count_nonzero(np.greater(of_user, of_user[item], out=held))
        tied[place] = np.count_nonzero(np.equal(of_user, of_user[item], out=held))
    return torch.from_numpy(higher).to(rows.dtype), torch.from_numpy(tied).to(rows.dtype)


def _by_block(scores: Tensor, rows: Tensor, items: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """As `_by_row`, for `step` positives at once, as a GPU likes it."""
    values, higher, tied = scores[rows, items], torch.empty_like(rows), torch.empty_like(rows)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        lists = scores if len(rows) == len(scores) else scores[rows[part]]  # one positive each: no copy
        higher[part] = _num_true(lists > values[part, None])
        tied[part] = _num_true(lists == values[part, None])
    return higher, tied


def _num_true(mask: Tensor) -> Tensor:
    """(R,) the number of true values of each row; summed as bytes, eight times as fast as booleans."""
    return mask.view(torch.uint8).sum(dim=1, dtype=torch.int32)
