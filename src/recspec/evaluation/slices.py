"""Metrics of rows by their scores, and by slice: new and old users, head and tail items, values of a column.

A slice of users or rows holds their groups or rows. A slice of items holds the positives of those items, and of rows
all rows of those items. Candidates stay what they are: a target of the tail is ranked among head items too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import SettingsError
from recspec.evaluation.columns import Codes, codes_of, ranges
from recspec.evaluation.interactions import Rows, positives
from recspec.evaluation.question import Question
from recspec.evaluation.rankings import Ranked
from recspec.evaluation.report import Evaluation, Slice
from recspec.evaluation.scoring import SplitScores
from recspec.evaluation.warnings import Probabilities
from recspec.metrics import Ranking, Values, calibration_error
from recspec.metrics import measures as metrics
from recspec.models import Ids, Scores

MOST_ROWS_OF_ERRORS = 1 << 22  # rows of which values are kept for standard errors: 16 MB for each metric


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
    sample = sampled(len(labels))
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
            probabilities = Probabilities(
                **facts,
                log_loss=reached["log_loss"],
                log_loss_of_constant=constant,
                standard_error=error,
                calibration=found,
                is_calibrated=calibrated is not None,
            )
    if groups is not None:
        ranking = metrics.rank_groups(scores, labels, groups)
        reached["group_auc"] = metrics.mean_area(ranking)
        values["group_auc"] = metrics.areas_of_groups(ranking)
        without = {"positive": ranking.num_left_out, "negative": ranking.num_groups - len(values["group_auc"])}
        facts |= {f"groups_without_{name}": count for name, count in without.items() if count}
    defined = {name: value for name, value in reached.items() if not np.isnan(value)}
    kept = {name: of.astype(np.float32) for name, of in values.items() if name in defined}
    return Evaluation(
        {"rows": defined},
        protocols={"rows": {**facts}},
        values={"rows": kept},
        positive=labels[sample],
        probabilities=probabilities,
    )


def sampled(num_rows: int) -> slice:
    """The rows of which values are kept."""
    return slice(None, None, max(1, -(-num_rows // MOST_ROWS_OF_ERRORS)))


def _against_the_rate(losses: Values, labels: NDArray[np.bool_], sampled: NDArray[np.bool_]) -> tuple[float, float]:
    """Log loss of the best constant, the rate of these very labels, and the standard error of the difference to it."""
    rate = float(labels.mean())
    of_constant = np.where(sampled, -np.log(rate), -np.log1p(-rate))
    constant = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    differences = losses - of_constant
    error = float(differences.std(ddof=1) / np.sqrt(len(differences))) if len(differences) > 1 else 0.0
    return float(constant), error


HEAD_SHARE = 0.5
"""Share of the interactions that the head holds: the fewest most popular items that together reach it."""


def slices_of_rows(answers: SplitScores) -> dict[str, dict[str, Slice]]:
    """The metrics of the rows of each slice: log loss, AUC and so on."""
    question, found = answers.question, dict[str, dict[str, Slice]]()
    if not question.settings.slices:
        return {}
    scores, rows = answers.of_rows(), question.rows
    for by, codes in _asked(question):
        found[by] = {}
        for name, chosen in _parts(codes, _of_rows(codes, rows)):
            groups = None if rows.groups is None else rows.groups[chosen]
            part = evaluate_rows(
                scores[chosen],
                rows.labels[chosen],
                groups=groups,
                are_logits=answers.gives_logits,
                calibrated=answers.calibrated,
                have_own_labels=False,
            )
            found[by][name] = _slice(part, int(chosen.sum()), int(rows.labels[chosen].sum()))
    return found


def slices_of_ranking(
    question: Question, protocol: str, ranked: Ranked, values_of: Callable[[Ranking], Mapping[str, Values]]
) -> dict[str, dict[str, Slice]]:
    """The metrics of the positives of each slice among their candidates."""
    found: dict[str, dict[str, Slice]] = {}
    for by, codes in _asked(question):
        found[by] = {}
        at = _rows_of(question, protocol, ranked.positives) if codes.owner == "row" else None
        of_positives = codes.codes[at] if at is not None else _of_rows(codes, ranked.positives)
        for name, chosen in _parts(codes, of_positives):
            ranking = ranked.part(chosen)
            values = {protocol: dict(values_of(ranking))}
            metrics = {protocol: {each: float(of.mean()) for each, of in values[protocol].items() if len(of)}}
            part = Evaluation(metrics, values=values)  # type: ignore[arg-type]
            found[by][name] = _slice(part, ranking.num_groups, int(chosen.sum()))
    return found


def _slice(part: Evaluation, count: int, num_positives: int) -> Slice:
    metrics = {name: value for named in part.metrics.values() for name, value in named.items()}
    errors = {name: value for named in part.standard_errors.values() for name, value in named.items()}
    return Slice(count, num_positives, metrics, errors)


def _asked(question: Question) -> Iterator[tuple[str, Codes]]:
    for by in question.settings.slices:
        if by in ("activity", "popularity") and question.lacks:
            raise SettingsError(f"slice '{by}': {question.lacks}")
        if by == "activity" and by not in question.spec.features:
            yield by, _activity(question)
        elif by == "popularity" and by not in question.spec.features:
            yield by, _popularity(question)
        else:
            yield by, codes_of(question, by)


def _activity(question: Question) -> Codes:
    """Users by their number of known events before the split: none, and four ranges of about equally many users."""
    events = np.diff(question.seen.offsets).astype(np.float64)
    rows = question.rows
    assert rows.users is not None
    here = events[np.unique(rows.users)]
    codes, names = ranges(events, here[here > 0], "{:,.0f}".format)
    told = (f"{name} {'event' if name == '1' else 'events'}" for name in names)
    return Codes("user", np.where(events > 0, codes + 1, 0), ["new: 0", *told])


def _popularity(question: Question) -> Codes:
    """Head items: the fewest most popular ones that hold half of the interactions; the tail; items without any."""
    splits = [split for split in question.trained_on or ("train",) if split in question.spec.splits]
    counts = positives(question.spec, splits).counts
    order = np.argsort(-counts, kind="stable")
    before = np.cumsum(counts[order]) - counts[order]
    codes = np.ones(len(counts), dtype=np.int64)
    codes[order[before < HEAD_SHARE * counts.sum()]] = 0
    codes[counts == 0] = 2
    return Codes("item", codes, ["head", "tail", "not in training"])


def _of_rows(codes: Codes, rows: Rows) -> NDArray[np.int64]:
    """The code of each row."""
    if codes.owner == "row":
        return codes.codes
    ids = rows.users if codes.owner == "user" else rows.items
    if ids is None:
        raise SettingsError(f"slices by {codes.owner}s need the {codes.owner}s of the rows, which the split lacks")
    return codes.codes[ids]


def _rows_of(question: Question, protocol: str, found: Rows) -> NDArray[np.int64]:
    """The split's row of each positive: the first of the same user and item."""
    rows = question.rows
    if protocol == "sampled" and question.lists_candidates:
        kept = ~(question.repeats | question.cold_rows)
        return np.flatnonzero(rows.labels & kept)
    assert rows.users is not None
    assert rows.items is not None
    assert found.users is not None
    assert found.items is not None
    at = np.flatnonzero(rows.labels)
    count = question.spec.num_ids(question.spec.item_id)
    keys, first = np.unique(rows.users[at].astype(np.int64) * count + rows.items[at], return_index=True)
    wanted = found.users.astype(np.int64) * count + found.items
    places: NDArray[np.int64] = at[first[np.searchsorted(keys, wanted)]]
    return places


def _parts(codes: Codes, of_rows: NDArray[np.int64]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Each value that occurs, with its rows."""
    for code, name in [*enumerate(codes.names), (-1, "missing")]:
        chosen = of_rows == code
        if chosen.any():
            yield name, chosen
