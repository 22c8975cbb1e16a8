"""Metrics of an evaluation, each under a named protocol.

    rows      every row of the split is scored: AUC, log loss, accuracy, calibration error, GAUC
    sampled   the candidates of each group are ranked: those in the split, in groups of any size, or drawn ones if the
              split lists positives only
    full      each user's positives are ranked among all items that the user has not acted on before

A metric is comparable only under one protocol: HR@10 among 100 candidates and among all items differ sevenfold for the
same model (Krichene and Rendle, "On sampled metrics for item recommendation", KDD 2020). So every result carries the
protocol's name, and `Evaluation.protocols` describes the candidates. Several ranks get the numbers of one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from recspec.evaluation.interactions import group_of
from recspec.evaluation.list_metrics import exposure, measures_of
from recspec.evaluation.rankings import Ranked, rank_full, rank_sampled
from recspec.evaluation.report import Evaluation, Groups
from recspec.evaluation.scoring import SplitScores
from recspec.evaluation.slices import evaluate_some, sampled, slices_of_ranking, slices_of_rows
from recspec.evaluation.task import EvaluationTask
from recspec.metrics import Ranking, Values
from recspec.metrics import measures as metrics

MOST_LISTED = 100
"""The longest lists whose coverage, diversity and so on are measured; the pairs of a list grow with its square."""


def run_protocols(answers: SplitScores, *, list_metrics: bool = False) -> Evaluation:
    """Metrics under each protocol of a task; with `list_metrics`, also coverage and so on of the lists of `full`."""
    task = answers.task
    chosen, left_out = task.choose()
    result = Evaluation({}, left_out=left_out)
    for protocol in chosen:
        if protocol == "rows":
            result = _with_rows(result, answers)
            result.protocols["rows"].update(_facts_of_stages(answers, protocol))
            if list_metrics and (users := task.rows.users) is not None:
                result.groups["rows"] = Groups(task.spec.user_id, users[sampled(len(users))])
            if slices := slices_of_rows(answers):
                result.slices["rows"] = slices
            continue
        listed = max((k for k in task.ks if k <= MOST_LISTED), default=0) if list_metrics else 0
        ranked = rank_sampled(answers) if protocol == "sampled" else rank_full(answers, listed=listed)
        ranking, leaked, ks = ranked.ranking, ranked.leaked, task.ks
        # Lists of a chosen length refuse a longer cut-off; natural groups (2 to 12 ads in Outbrain) may be shorter.
        if protocol == "full" or task.spec.has_series or not task.lists_candidates:
            ks = task.cut_offs(ranking)
            metrics.check_cut_offs(ranking, ks)
        certain = metrics.certain(ranking, ks)
        values = values_of(ranking, ks)
        if leaked is not None:
            values |= {f"mean_average_precision_with_leak@{k}": metrics.average_precisions(leaked, k) for k in ks}
        if ranking.num_groups:
            result.values[protocol] = {**values}
            result.metrics[protocol] = {name: float(of.mean()) for name, of in values.items()}
        else:
            result.left_out[protocol] = task.no_target
        repeats = _count_repeats(task, protocol)
        own_lists = protocol == "sampled" and task.lists_candidates
        unknown = {} if own_lists else {"users": task.num_of_strangers, "items": task.num_of_unknown_items}
        sure = int((ranking.num_positives == ranking.num_candidates).sum())
        result.protocols[protocol] = {
            "candidates": ranked.candidates,
            "groups": ranking.num_groups,
            "positives": int(ranking.num_positives.sum()),
            "fewest_candidates": int(ranking.num_candidates.min()) if ranking.num_groups else 0,
            "most_candidates": int(ranking.num_candidates.max(initial=0)),
            "groups_without_positive": ranking.num_left_out,
            "duplicates_counted_once": ranking.num_duplicates,
            **({"certain": list(certain)} if certain else {}),
            **({"groups_without_negative": sure} if sure else {}),
            **{f"of_unknown_{kind}_left_out": count for kind, count in unknown.items() if count},
            **({"repeats_left_out": repeats[0], "of_positives": repeats[1]} if repeats[0] else {}),
            **_facts_of_choices(answers, protocol),
            **_facts_of_stages(answers, protocol),
        }
        if slices := slices_of_ranking(task, protocol, ranked, partial(values_of, ks=ks)):
            result.slices[protocol] = slices
        if list_metrics and ranking.num_groups:
            result.groups[protocol] = _groups(task, protocol, ranked)
        if ranked.top is not None and ranking.num_groups:
            result = _with_list_metrics(result, task, ranked, ks)
    return result


def _groups(task: EvaluationTask, protocol: str, ranked: Ranked) -> Groups:
    """The groups of a ranking in the order of its values."""
    assert ranked.positives.groups is not None
    ids = np.unique(ranked.positives.groups)
    own = protocol == "sampled" and task.lists_candidates
    feature = group_of(task.spec, task.split) if own else task.spec.user_id
    are_users = feature is not None and feature == task.spec.id_of("user")
    reads = not own or task.spec.has_series  # other lists are judged without reading earlier splits
    return Groups(feature or "", ids, np.diff(task.seen.offsets)[ids] if are_users and reads else None)


def _with_list_metrics(result: Evaluation, task: EvaluationTask, ranked: Ranked, ks: Sequence[int]) -> Evaluation:
    """The evaluation with the measures of the lists added."""
    assert ranked.top is not None
    assert ranked.users is not None
    measures = measures_of(task, ranked.users, ranked.positives)
    for k in (k for k in ks if k <= ranked.top.shape[1]):
        found, values = measures.of(ranked.top[:, :k])
        result.list_metrics.update({f"{name}@{k}": value for name, value in found.items()})
        result.list_values.update({f"{name}@{k}": of for name, of in values.items()})
    return replace(result, exposure=exposure(ranked.top, measures.counts, task.first_item))


def values_of(ranking: Ranking, ks: Sequence[int]) -> dict[str, Values]:
    """The groups' values of each metric at each cut-off, and of MRR; without those that are 1 for any model.

    Capped recall is recall where no group has more positives than k.
    """
    certain = metrics.certain(ranking, ks)
    values = {
        f"{name}@{k}": at_k(ranking, k)
        for k in ks
        for name, at_k in metrics.AT_K.items()
        if f"{name}@{k}" not in certain and (name != "capped_recall" or ranking.num_positives.max(initial=0) > k)
    }
    return {**values, "mrr": metrics.reciprocal_ranks(ranking)}


def _count_repeats(task: EvaluationTask, protocol: str) -> tuple[int, int]:
    """Positives that are no targets, because the user acted on the item before; and all positives."""
    if protocol == "sampled" and task.lists_candidates:
        return int(task.repeats.sum()), int(task.rows.labels.sum())
    return task.num_repeats, task.positives.num_pairs


def _facts_of_choices(answers: SplitScores, protocol: str) -> dict[str, object]:
    """The choices that the protocol of an evaluation leaves open, as made here."""
    task, settings = answers.task, answers.task.settings
    of_lists = protocol == "sampled" and task.lists_candidates
    if of_lists and not task.spec.has_series and settings.cold == "keep":
        return {}  # what was shown was chosen by nobody here
    facts: dict[str, object] = {"repeats": settings.repeats, "cold": settings.cold}
    if answers.known_by:
        facts["input"] = answers.known_by
    if task.trained_on:
        facts["trained_on"] = list(task.trained_on)
    if settings.cold == "drop":
        cold = task.cold_rows
        facts["cold_targets_dropped"] = int((cold & task.rows.labels).sum()) if of_lists else task.num_cold
        facts["cold_items"] = int(task.cold_items[task.first_item :].sum())
    return facts


def _facts_of_stages(answers: SplitScores, protocol: str) -> Mapping[str, object]:
    """What is measured of a pipeline; nothing of a model alone."""
    if answers.of_all is None:
        return {}
    return answers.of_all.facts(answers.ranks) if protocol == "full" else {"stages": "the ranker alone"}


def _with_rows(result: Evaluation, answers: SplitScores) -> Evaluation:
    """The evaluation with the metrics of the split's rows added."""
    # A series lists drawn candidates: their rate of positives is that of the drawing.
    found = evaluate_some(answers, slice(None), have_own_labels=not answers.task.spec.has_series)
    for name in ("metrics", "values", "protocols"):
        getattr(result, name).update(getattr(found, name))
    return replace(result, probabilities=found.probabilities, positive=found.positive)
