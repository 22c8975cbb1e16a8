"""Metrics of an evaluation, each under a named protocol.

    rows      every row of the split is scored: AUC, log loss, accuracy, calibration error, GAUC
    sampled   the candidates of each group are ranked: those in the split, in groups of any size, or drawn ones if the
              split lists positives only
    full      each user's positives are ranked among all items that the user has not acted on before

A metric is comparable only under one protocol: HR@10 among 100 candidates and among all items differ sevenfold for the
same model (Krichene and Rendle, "On sampled metrics for item recommendation", KDD 2020). So every result carries the
protocol's name, and `Evaluation.protocols` describes the candidates. Several ranks get the numbers of one process.

Shapes: R users or requests; N items; P positives or pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recspec import metrics
from recspec.calibration import calibration_error
from recspec.errors import DataError
from recspec.evaluation.interactions import history_of_items
from recspec.evaluation.question import Question
from recspec.evaluation.report import Evaluation
from recspec.evaluation.scoring import ModelRanker, Ranker, SplitScores
from recspec.evaluation.warnings import Probabilities
from recspec.metrics import Ranking, Values
from recspec.models import Ids, Scores

MOST_ROWS_OF_ERRORS = 1 << 22  # rows of which values are kept for standard errors: 16 MB for each metric

SCORES_PER_BLOCK = 1 << 22  # scores of users x items held at once: 16 MB in fp32, which still fits a core's caches


def run_protocols(answers: SplitScores) -> Evaluation:
    """Metrics under each protocol of a question."""
    question = answers.question
    chosen, left_out = question.choose()
    result = Evaluation({}, left_out=left_out)
    for protocol in chosen:
        if protocol == "rows":
            result = _with_rows(result, answers)
            if answers.of_all is not None:
                result.protocols["rows"]["stages"] = "the ranker alone"
            continue
        staged: dict[str, object] = {"stages": "the ranker alone"} if answers.of_all is not None else {}
        if protocol == "full" and answers.of_all is not None:
            ranker = answers.of_all()
            ranking, candidates, leaked = _full(answers, ranker)
            staged.update(ranker.facts(answers.ranks))
        else:
            ranking, candidates, leaked = _sampled(answers) if protocol == "sampled" else _full(answers)
        ks = question.ks
        # Lists of a chosen length refuse a longer cut-off; natural groups (2 to 12 ads in Outbrain) may be shorter.
        if protocol == "full" or question.spec.has_series or not question.lists_candidates:
            ks = question.cut_offs(ranking)
            metrics.check_cut_offs(ranking, ks)
        certain = metrics.certain(ranking, ks)
        values = {f"{name}@{k}": at_k(ranking, k) for k in ks for name, at_k in metrics.AT_K.items()}
        if leaked is not None:
            values |= {f"mean_average_precision_with_leak@{k}": metrics.average_precisions(leaked, k) for k in ks}
        values["mrr"] = metrics.reciprocal_ranks(ranking)
        values = {name: of for name, of in values.items() if name not in certain}
        result.values[protocol] = {**values}
        result.metrics[protocol] = {name: float(of.mean()) for name, of in values.items() if len(of)}
        repeats = _count_repeats(question, protocol)
        result.protocols[protocol] = {
            "candidates": candidates,
            "groups": ranking.num_groups,
            "positives": int(ranking.num_positives.sum()),
            "fewest_candidates": int(ranking.num_candidates.min()) if ranking.num_groups else 0,
            "most_candidates": int(ranking.num_candidates.max(initial=0)),
            "groups_without_positive": ranking.num_left_out,
            "duplicates_counted_once": ranking.num_duplicates,
            **({"certain": list(certain)} if certain else {}),
            **({"repeats_left_out": repeats[0], "of_positives": repeats[1]} if repeats[0] else {}),
            **staged,
        }
    return result


def _count_repeats(question: Question, protocol: str) -> tuple[int, int]:
    """Positives that are no targets, because the user acted on the item before; and all positives."""
    if protocol == "sampled" and question.lists_candidates:
        return int(question.repeats.sum()), int(question.rows.labels.sum())
    return question.positives.num_pairs - question.truth.num_pairs, question.positives.num_pairs


def _with_rows(result: Evaluation, answers: SplitScores) -> Evaluation:
    """The evaluation with the metrics of the split's rows added."""
    question, rows = answers.question, answers.question.rows
    # A series lists drawn candidates: their rate of positives is that of the drawing.
    found = evaluate_rows(
        answers.of_rows(),
        rows.labels,
        groups=rows.groups,
        are_logits=answers.gives_logits,
        calibrated=answers.calibrated,
        have_own_labels=not question.spec.has_series,
    )
    for name in ("metrics", "values", "protocols"):
        getattr(result, name).update(getattr(found, name))
    return replace(result, probabilities=found.probabilities)


def evaluate_rows(
    scores: Scores,
    labels: NDArray[np.bool_],
    *,
    groups: Ids | None = None,
    are_logits: bool = True,
    calibrated: Callable[[Scores], Scores] | None = None,
    have_own_labels: bool = True,
) -> Evaluation:
    """The evaluation of rows by their scores.

    Args:
        scores: (rows,) the model's scores.
        labels: (rows,) whether each row is positive.
        groups: (rows,) the group of each row, for GAUC.
        are_logits: Whether the scores are logits, so that their sigmoid is a probability.
        calibrated: Gives the calibrated logits, by which losses are then measured.
        have_own_labels: Whether the rate of positives is that of the data, by which probabilities are judged.
    """
    facts: dict[str, int] = {"rows": len(labels), "positives": int(labels.sum())}
    probabilities = None
    sample = slice(None, None, max(1, -(-len(labels) // MOST_ROWS_OF_ERRORS)))
    reached = {"auc": metrics.auc(scores, labels)}
    values = {"auc": metrics.auc_of_rows(scores[sample], labels[sample])}
    if are_logits:
        logits = scores if calibrated is None else calibrated(scores)
        found = calibration_error(logits, labels)
        reached["log_loss"] = metrics.log_loss(logits, labels)
        reached["accuracy"] = metrics.accuracy(logits, labels)
        reached["calibration_error"] = found.value
        values["log_loss"] = metrics.log_losses(logits[sample], labels[sample])
        values["accuracy"] = np.where(logits[sample] == 0, 0.5, (logits[sample] > 0) == labels[sample])
        if calibrated is not None:
            reached["log_loss_uncalibrated"] = metrics.log_loss(scores, labels)
            reached["calibration_error_uncalibrated"] = calibration_error(scores, labels).value
        if have_own_labels and 0 < facts["positives"] < facts["rows"]:
            constant, error = _against_the_rate(values["log_loss"], labels, labels[sample])
            probabilities = Probabilities(**facts, log_loss=reached["log_loss"], log_loss_of_constant=constant,
                                          standard_error=error, calibration=found,
                                          is_calibrated=calibrated is not None)  # fmt: skip
    if groups is not None:
        reached["group_auc"] = metrics.group_auc(scores, labels, groups)
    defined = {name: value for name, value in reached.items() if not np.isnan(value)}
    kept = {name: of.astype(np.float32) for name, of in values.items() if name in defined}
    return Evaluation(
        {"rows": defined}, protocols={"rows": {**facts}}, values={"rows": kept}, probabilities=probabilities
    )


def _against_the_rate(losses: Values, labels: NDArray[np.bool_], sampled: NDArray[np.bool_]) -> tuple[float, float]:
    """Log loss of the best constant, the rate of these very labels, and the standard error of the difference to it."""
    rate = float(labels.mean())
    of_constant = np.where(sampled, -np.log(rate), -np.log1p(-rate))
    constant = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    differences = losses - of_constant
    error = float(differences.std(ddof=1) / np.sqrt(len(differences))) if len(differences) > 1 else 0.0
    return float(constant), error


def _sampled(answers: SplitScores) -> tuple[Ranking, str, Ranking | None]:
    """The ranking, a description of its candidates, and the ranking with the leak, if the dataset names one."""
    question = answers.question
    rows, ids = question.candidates, question.candidate_ids
    scores = answers.of_candidates()
    if question.lists_candidates and question.repeats.any():
        new = ~question.repeats
        scores, ids, rows = scores[new], None if ids is None else ids[new], rows.take(new)
    assert rows.groups is not None
    ranking = metrics.rank_groups(scores, rows.labels, rows.groups, candidates=ids)
    leaked = None
    if rows.leak is not None:
        leaked = metrics.rank_groups(_with_leak(scores, rows.leak), rows.labels, rows.groups, candidates=ids)
    drawn = f"{question.settings.num_negatives} uniform negatives a user, seed {question.settings.seed}"
    return ranking, "the dataset's own" if question.lists_candidates else drawn, leaked


def _with_leak(scores: Scores, leak: NDArray[np.bool_]) -> Scores:
    """(rows,) scores in the order of probability + leak, without its rounding: leaked rows first, then by score.

    A probability is in [0, 1], so a leak of 1 puts a row above all others; 1 + probability would merge small ones.
    """
    distinct, places = np.unique(scores, return_inverse=True)
    return np.asarray(places + leak * len(distinct), dtype=np.float64)


def _full(answers: SplitScores, ranker: Ranker | None = None) -> tuple[Ranking, str, None]:
    """Ranks the positives of this rank's share of the users among all items, then joins the results of all ranks."""
    question, ranks, progress = answers.question, answers.ranks, answers.progress
    truth, ranker = question.truth, ranker or answers.ranker()
    users = question.ranked_users
    step = max(1, SCORES_PER_BLOCK // truth.num_items)
    blocks = range(0, len(users), step)
    share = ranks.share(len(blocks))
    found, sizes = [torch.zeros((0, 3), dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    with torch.inference_mode():
        for number, start in enumerate(blocks[share]):
            progress("full", number, share.stop - share.start)
            here = users[start : start + step]
            positions, of_each = _count_higher(ranker, here, question, step)
            positions[:, 0] += start
            found.append(positions)
            sizes.append(of_each)
    progress("full", 1, 1)
    group, higher, tied = ranks.gather(torch.cat(found)).numpy().T
    candidates = ranks.gather(torch.cat(sizes)).numpy()
    earlier = " and ".join(question.before)
    if earlier and history_of_items(question.spec) is not None:
        earlier += ", histories included"
    described = f"all items without those of the user in {earlier}" if earlier else "all items"
    if len(users) < (known := np.count_nonzero(np.diff(truth.offsets))):
        described += f"; {len(users):,} of {known:,} users, seed {question.settings.seed}"
    return Ranking.of_positives(group, higher, tied, candidates), described, None


def _count_higher(ranker: Ranker, users: Ids, question: Question, step: int) -> tuple[Tensor, Tensor]:
    """For each positive of some users (place of the user, higher, tied); for each user the number of candidates.

    Counting the higher scores takes one pass over the scores; sorting them would take many.
    """
    scores = ranker.scores(users) if isinstance(ranker, ModelRanker) else torch.from_numpy(ranker.score_users(users))
    device, truth, seen = scores.device, question.truth, question.seen
    (rows, items), (seen_rows, seen_items) = truth.of(users), seen.of(users)
    excluded = seen_items >= question.first_item  # none of them is in `truth`
    num_candidates = truth.num_items - question.first_item - np.bincount(seen_rows[excluded], minlength=len(users))

    at = (torch.from_numpy(rows).to(device), torch.from_numpy(items).long().to(device))
    # NaN marks items that are no candidates: NaN is neither higher than any number nor equal to one.
    out = (torch.from_numpy(seen_rows[excluded]).to(device), torch.from_numpy(seen_items[excluded]).long().to(device))
    scores[out] = torch.nan
    scores[:, : question.first_item] = torch.nan
    if not np.array_equal(_num_true(scores == scores).cpu().numpy(), num_candidates):
        raise DataError("some scores are NaN: the model has diverged, or its weights or inputs hold NaN")
    values = scores[at]
    higher, tied = torch.empty_like(at[0]), torch.empty_like(at[0])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        lists = scores if len(rows) == len(users) else scores[at[0][part]]  # one positive each: no copy
        higher[part] = _num_true(lists > values[part, None])
        tied[part] = _num_true(lists == values[part, None])
    return torch.stack((at[0], higher, tied), dim=1).cpu(), torch.from_numpy(num_candidates)


def _num_true(mask: Tensor) -> Tensor:
    """(R,) the number of true values of each row; summed as bytes, eight times as fast as booleans."""
    return mask.view(torch.uint8).sum(dim=1, dtype=torch.int32)
