"""Fits a model of users' interactions: settings that were not given are chosen on valid, then scores become logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from recspec.base import config, machine
from recspec.base.errors import SettingsError, unknown
from recspec.data.encoding import columns_of, read_encoders
from recspec.evaluation import warnings
from recspec.evaluation.choosing import Combination, Tried, choose
from recspec.evaluation.interactions import history_of_items, interactions_of, tells_order
from recspec.evaluation.protocols import run_protocols
from recspec.evaluation.report import Evaluation, Metrics, PerGroup, is_lower_better
from recspec.evaluation.row_baselines import STRENGTHS, LogisticFit, row_blocks, splits_of_rows
from recspec.evaluation.scoring import as_batch, scores_of
from recspec.evaluation.task import EvaluateSettings, EvaluationTask, draw_candidates
from recspec.evaluation.warnings import ModelWarning
from recspec.feature_spec import FOLD_IN, FeatureSpec
from recspec.models import (
    FittedItemModel,
    FittedModel,
    FittedRowModel,
    Interactions,
    LogisticRegression,
    Scores,
    on_meta_device,
)

Value = TypeVar("Value")

METRIC = FittedItemModel.metric

MOST_SCORES = 1 << 26
"""Scores of users x items on valid for each combination of settings: more users are sampled."""

FEWEST_USERS = 2_000
"""Users that are never sampled away: their NDCG has a standard error of about .005."""

MOST_DEARER = 4.0
"""Operations of a fit beyond the grid, in those of the dearest one of the grid: dearer ones are not tried."""

DISLIKES = (0.1, 0.3, 1.0, 3.0)
"""Weights of disliked items compared on valid, beside none."""

MARGIN = 1.0
"""Standard errors of the paired difference by which other settings must lead those before them."""

LINE_ROWS = 200_000
"""Most rows that the line from scores to logits is fitted to."""

FEWEST_OF_A_CLASS = 10
"""Positives and negatives without which no line is fitted."""

DRAWN = 4
"""Negatives for each positive to fit it to if valid lists none: as many as training draws."""


@dataclass(frozen=True)
class Fitted:
    """A fitted model, and how its settings were chosen."""

    model: FittedModel
    tried: tuple[Tried, ...] = ()
    metric: str = ""
    """Empty if nothing was measured."""
    value: float | None = None
    metrics: Metrics = field(default_factory=dict)
    """Of the best combination on valid."""
    evaluation: Evaluation | None = None
    """The same, with the values of users or rows."""
    logits_from: str = "nothing"
    num_pairs: int = 0
    """Interactions, or labelled rows, that the model is fitted to."""
    warnings: tuple[ModelWarning, ...] = ()
    importance: Mapping[str, float] = field(default_factory=dict)
    """Of a model of rows, raw column -> its share of what the splits or the terms explain, largest first."""
    judged: FittedRowModel | None = None
    """The model that valid judged, before all rows were fitted; None if it is `model` itself."""

    @property
    def values(self) -> PerGroup | None:
        """The metric's value of each group of valid, if it is a mean of such."""
        return None if self.evaluation is None else _by_name(self.evaluation.values).get(self.metric)


@dataclass
class ItemFit:
    """The fit of one kind of model to the interactions of some splits."""

    kind: type[FittedItemModel]
    spec: FeatureSpec
    settings: config.Settings
    """Those that were given are kept; the others are chosen."""
    splits: Sequence[str] = ("train",)
    valid: str = ""
    """The split to choose on; empty for none. If it is fitted on too, the choice is made without it."""
    metric: str = METRIC
    seed: int = 0
    users: int | None = None
    """Most users whose items are ranked on valid; by default a number that takes seconds."""
    on_tried: Callable[[Tried], None] = lambda _: None
    """Called after each combination."""
    enough: Callable[[], bool] = lambda: False
    """Whether to try no more combinations."""
    _named: str = ""

    def run(self) -> Fitted:
        """Choose, fit, and turn scores into logits.

        Raises:
            DataError: without a single positive.
            SettingsError: for a metric that valid does not give.
        """
        before = [split for split in self.splits if split != self.valid]
        task = self.task() if self.valid and before else None
        interactions = interactions_of(self.kind, self.spec, before or self.splits)
        best = None if task is None else self._choose(interactions, task)
        if best is not None and before == list(self.splits):
            return best
        first = _combinations(self.kind, interactions, self.settings)[0]
        chosen = self.settings.model_copy(update=dict(first)) if best is None else best.model.settings
        if before and before != list(self.splits):
            interactions = interactions_of(self.kind, self.spec, self.splits)
        model = self._fitted(chosen, interactions)
        if best is None:
            return Fitted(model, num_pairs=interactions.num_pairs)
        assert isinstance(best.model, FittedItemModel)
        model.set_line(*best.model.line.tolist())
        return replace(best, model=model, num_pairs=interactions.num_pairs)

    def task(self) -> EvaluationTask | None:
        """What valid asks; None if it holds no positive of known items that are new to their users."""
        protocol, _, name = self.metric.partition("/")
        cut_off = name.rpartition("@")[2]
        # By default the data set's own cut-off holds, or a shorter one where lists are short.
        asked = self.metric != METRIC and cut_off.isdecimal() and int(cut_off) > 0
        most = self.users or max(FEWEST_USERS, MOST_SCORES // self.spec.num_ids(self.spec.item_id))
        settings = EvaluateSettings(ks=(int(cut_off),) if asked else None, users=most)
        task = EvaluationTask(self.spec, self.valid, [protocol], settings, reads=(self.spec.user_id, self.spec.item_id))
        judged = task.positives if protocol == "rows" else task.truth
        return task if judged.num_pairs else None

    def _choose(self, interactions: Interactions, task: EvaluationTask) -> Fitted:
        """The best combination of the model's grid, without what was given, and of values beyond its edges.

        Then settings `at_scoring` are chosen one by one for the best fit, which is not repeated.
        """
        at_scoring = self.kind.at_scoring
        base: FittedModel | None = None

        def attempt(combination: Combination) -> tuple[float, Fitted]:
            if isinstance(base, FittedItemModel):
                varied = {name: value for name, value in combination.items() if name in at_scoring}
                model = base.varied(varied, interactions)
            else:
                model = self._fitted(self.settings.model_copy(update=dict(combination)), interactions)
            found = self._measure(model, task)
            value, warned = self._value(found.metrics), tuple(warnings.of_protocols(found.protocols, self.valid))
            measured = Fitted(model, (), self._named, value, found.metrics, found, warnings=warned)
            return value, replace(measured, num_pairs=interactions.num_pairs)

        grid = _combinations(self.kind, interactions, self.settings)
        best, tried = _search(self, grid, attempt, affords=self._affords(grid))
        free = [name for name in at_scoring if name not in self.settings.model_fields_set]
        for name in [name for name in free if name != "recency" or tells_order(self.spec)]:
            base = best.model
            so_far = next(each for each in reversed(tried) if each.best)
            so_far = replace(so_far, settings={**so_far.settings, name: vars(base.settings)[name]})
            grid = [{**so_far.settings, name: value} for value in at_scoring[name]]
            best, more = _search(self, grid, attempt, start=(so_far, best))
            tried += more
        if "dislike_weight" not in self.settings.model_fields_set and interactions.dislikes is not None:
            best, more = self._choose_dislikes(best, interactions, task)
            tried += more
        assert isinstance(best.model, FittedItemModel)
        return replace(best, tried=tried, logits_from=_set_line(best.model, self._informed(best.model, task), task))

    def _choose_dislikes(
        self, best: Fitted, interactions: Interactions, task: EvaluationTask
    ) -> tuple[Fitted, tuple[Tried, ...]]:
        """The largest weight of dislikes that costs less of the metric than chance, and lists fewer disliked items."""
        assert isinstance(best.model, FittedItemModel)
        chosen, base, before, tried = best, best.model, metric_value(best.metrics, best.metric), list[Tried]()
        listed = _disliked(run_protocols(scores_of(self._informed(base, task), task), list_metrics=True))
        for weight in () if listed is None else DISLIKES:
            model = base.varied({"dislike_weight": weight}, interactions)
            found = run_protocols(scores_of(self._informed(model, task), task), list_metrics=True)
            value, shares = self._value(found.metrics), _disliked(found)
            assert shares is not None
            assert listed is not None
            measured = replace(best, model=model, value=value, metrics=found.metrics, evaluation=found)
            costs = (value > before if is_lower_better(self.metric) else value < before) and beats(measured, best)
            fewer = differ(shares, listed) and shares.mean() < listed.mean()
            tried.append(Tried({"dislike_weight": weight}, value, fewer and not costs))
            self.on_tried(tried[-1])
            if costs:
                break
            if fewer:
                chosen, listed = measured, shares
        return chosen, tuple(tried)

    def _affords(self, grid: Sequence[Combination]) -> Callable[[Combination], bool]:
        """Whether a fit beyond the grid costs little more than those of the grid."""

        def operations(combination: Combination) -> float:
            settings = self.settings.model_copy(update=dict(combination))
            return on_meta_device(lambda: self.kind(self.spec, settings)).operations()

        most = MOST_DEARER * max(map(operations, grid))
        return lambda each: operations(each) <= most

    def _fitted(self, settings: config.Settings, interactions: Interactions) -> FittedItemModel:
        model = on_meta_device(lambda: self.kind(self.spec, settings))
        model.how()
        machine.return_freed_memory()  # for what fits allocate, the holes of reading and of other fits are too small
        model.fit(interactions, seed=self.seed)
        machine.return_freed_memory()
        return model.eval()

    def _measure(self, model: FittedItemModel, task: EvaluationTask) -> Evaluation:
        return run_protocols(scores_of(self._informed(model, task), task))

    def _informed(self, model: FittedItemModel, task: EvaluationTask) -> FittedItemModel:
        """The model with what users of valid are known by beside the rows that it is fitted to, if there is any."""
        if FOLD_IN in task.before or (task.before and history_of_items(self.spec) is not None):
            return model.knowing(task.known_interactions(model))
        return model

    def _value(self, found: Metrics) -> float:
        known = _by_name(found)
        self._named = self.metric
        if self.metric not in known and self.metric == METRIC:
            self._named = next((name for name in known if name.startswith("full/ndcg@")), self.metric)
        return metric_value(found, self._named)


def _search(
    fit: ItemFit | RowFit,
    grid: Sequence[Combination],
    attempt: Callable[[Combination], tuple[float, Fitted]],
    *,
    start: tuple[Tried, Fitted] | None = None,
    affords: Callable[[Combination], bool] = lambda _: True,
) -> tuple[Fitted, tuple[Tried, ...]]:
    """`choose` by the metric of a fit; what needs no further fit, and so has a `start`, is tried however late it is."""
    return choose(
        grid,
        attempt,
        lower=is_lower_better(fit.metric),
        beats=beats,
        may_be=lambda each: _may_be(fit.settings, each) and affords(each),
        on_tried=fit.on_tried,
        enough=fit.enough if start is None else bool,
        start=start,
    )


def beats(ours: Fitted, theirs: Fitted) -> bool:
    """Whether two results on the same groups differ by more than `MARGIN`, or have no values of groups to tell."""
    if ours.values is None or theirs.values is None or len(ours.values) < 2:
        return True
    return differ(ours.values, theirs.values)


def differ(ours: PerGroup, theirs: PerGroup) -> bool:
    """Whether the means of two values of the same groups differ by more than `MARGIN`."""
    differences = ours.astype(np.float64) - theirs
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    return abs(float(differences.mean())) > MARGIN * error


def _disliked(found: Evaluation) -> PerGroup | None:
    """The users' shares of disliked items in lists of 10, or in the longest ones; None if nothing is disliked."""
    named = {name: values for name, values in found.list_values.items() if name.startswith("disliked@")}
    return named.get("disliked@10", named[max(named, key=len)] if named else None)


def _combinations(
    kind: type[FittedItemModel], interactions: Interactions, settings: config.Settings
) -> list[Combination]:
    """The combinations of the model's grid that differ in settings which were not given."""
    distinct: list[Combination] = []
    for combination in kind.grid(interactions) if interactions.num_pairs else [{}]:
        free = {name: value for name, value in combination.items() if name not in settings.model_fields_set}
        if free not in distinct:
            distinct.append(free)
    return distinct


def _may_be(settings: config.Settings, combination: Combination) -> bool:
    """Whether each value is within the setting's limits."""
    try:
        type(settings).model_validate(dict(combination))
    except ValidationError:
        return False
    return True


def _by_name(found: Mapping[str, Mapping[str, Value]]) -> dict[str, Value]:
    """Values under `PROTOCOL/METRIC`."""
    return {f"{of}/{name}": value for of, values in found.items() for name, value in values.items()}


def metric_value(found: Metrics, metric: str) -> float:
    """The value of PROTOCOL/METRIC. Raises `SettingsError` if there is none."""
    known = _by_name(found)
    if metric not in known:
        raise SettingsError(f"train.metric: {unknown('metric', metric, known)}")
    return known[metric]


@dataclass
class RowFit:
    """The fit of logistic regression to the labelled rows of some splits; it takes what `ItemFit` takes."""

    kind: type[LogisticRegression]
    spec: FeatureSpec
    settings: config.Settings
    splits: Sequence[str] = ("train",)
    valid: str = ""
    metric: str = LogisticRegression.metric
    on_tried: Callable[[Tried], None] = lambda _: None
    enough: Callable[[], bool] = lambda: False

    def run(self) -> Fitted:
        """Choose the strength on valid; without valid on a tenth of train.

        Raises:
            DataError: without rows of both classes.
            SettingsError: for a metric that valid does not give.
        """
        splits = splits_of_rows(self.spec, self.splits)
        before = [split for split in splits if split != self.valid]
        fit = LogisticFit(self.spec, before or splits)
        if not self.valid or not before:
            given = "l2" in self.settings.model_fields_set
            l2 = vars(self.settings)["l2"] if given else fit.choose_strength()[0]
            best = Fitted(self._filled(fit, l2), num_pairs=_rows_of(fit))
        else:
            best = self._choose(fit)
            if before != splits:
                fit, judged = LogisticFit(self.spec, splits), best.model
                assert isinstance(judged, LogisticRegression)
                best = replace(
                    best, model=self._filled(fit, judged.settings.l2), num_pairs=_rows_of(fit), judged=judged
                )
        assert isinstance(best.model, LogisticRegression)
        means, variances = _terms(best.model, self.spec, splits)
        best.model.set_usual(means)
        importance = by_column(self.spec, dict(zip(best.model.features(), variances.tolist(), strict=True)))
        return replace(best, importance=importance)

    def _choose(self, fit: LogisticFit) -> Fitted:
        given = "l2" in self.settings.model_fields_set
        task = EvaluationTask(self.spec, self.valid, [self.metric.partition("/")[0]], EvaluateSettings())

        def attempt(combination: Combination) -> tuple[float, Fitted]:
            model = self._filled(fit, float(str(combination.get("l2", vars(self.settings)["l2"]))))
            found = run_protocols(scores_of(model, task))
            value = metric_value(found.metrics, self.metric)
            return value, Fitted(model, (), self.metric, value, found.metrics, found, "its own loss", _rows_of(fit))

        best, tried = _search(self, [{}] if given else [{"l2": l2} for l2 in STRENGTHS], attempt)
        return replace(best, tried=tried)

    def _filled(self, fit: LogisticFit, l2: float) -> LogisticRegression:
        settings = self.settings.model_copy(update={"l2": l2})
        model = on_meta_device(lambda: self.kind(self.spec, settings))  # type: ignore[arg-type]
        model.fill(fit.layout.mean, fit.layout.std, fit.layout.edges, *fit.solve(l2))
        return model.eval()


def _terms(
    model: LogisticRegression, spec: FeatureSpec, splits: Sequence[str]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The mean and the variance of each feature's term (F,) over the rows of some splits."""
    parts = list[NDArray[np.float64]]()
    for _, block in row_blocks(spec, splits, model.features()):
        with torch.inference_mode():
            made = model.contributions(as_batch(block, spec))[1].numpy()
        parts.append(np.stack([np.full(made.shape[1], len(made)), made.sum(0), (made**2).sum(0)]))
    rows, sums, squares = np.sum(parts, axis=0)
    means = sums / rows
    return means, np.maximum(squares / rows - means**2, 0.0)


def by_column(spec: FeatureSpec, by_feature: Mapping[str, float]) -> dict[str, float]:
    """Shares of raw columns, largest first, from amounts of features; columns of one feature get equal parts of it."""
    encoders = read_encoders(spec.folder) if spec.metadata.get("encoders") else {}
    made, total = dict[str, float](), max(1e-300, sum(by_feature.values()))
    for name, amount in by_feature.items():
        columns = columns_of(encoders, name)
        for column in columns:
            made[column] = made.get(column, 0.0) + amount / total / len(columns)
    return dict(sorted(made.items(), key=lambda each: -each[1]))


def _rows_of(fit: LogisticFit) -> int:
    return int(str(fit.facts["rows"]))


# --- scores become logits ---------------------------------------------------------------------------------------------


def _set_line(model: FittedItemModel, informed: FittedItemModel, task: EvaluationTask) -> str:
    """Set the model's line from scores to logits by what `informed` gives the rows of valid; describes these rows."""
    rows, weight = task.rows, 1.0
    if rows.has_both_classes:
        described = f"the rows of {task.split}"
    else:
        rows = draw_candidates(task.truth, task.excluded, num_negatives=DRAWN, first_item=task.first_item)
        described = f"the positives of {task.split}, with {DRAWN} drawn negatives each"
        weight = DRAWN * rows.labels.sum() / max(1, (~rows.labels).sum())
    assert rows.users is not None
    assert rows.items is not None
    sample = slice(None, None, max(1, -(-len(rows.labels) // LINE_ROWS)))
    with torch.inference_mode():
        pairs = (torch.from_numpy(ids[sample].astype(np.int64)) for ids in (rows.users, rows.items))
        scores = informed.score_pairs(*pairs).float().numpy()
    line = fit_line(scores, rows.labels[sample], weight)
    if line is None:
        return "nothing"
    model.set_line(*line)
    return described


def fit_line(scores: Scores, labels: NDArray[np.bool_], weight: float = 1.0) -> tuple[float, float] | None:
    """Slope and intercept with the least log loss of slope * score + intercept; None if it would not rise.

    Returns None, too, for fewer than `FEWEST_OF_A_CLASS` rows of a class. A negative row has the `weight`. A slight
    penalty on the slope keeps it finite where scores separate the labels.
    """
    scores = scores.astype(np.float64)  # the square of a large float32 is infinite
    spread = float(scores.std()) if len(scores) else 0.0
    if not spread or min(labels.sum(), (~labels).sum()) < FEWEST_OF_A_CLASS:
        return None
    middle = float(scores.mean())
    inputs = np.column_stack([(scores - middle) / spread, np.ones(len(scores))])
    weights = np.where(labels, 1.0, weight)
    penalty = np.diag([1e-4 * weights.sum(), 0.0])
    line = np.zeros(2)
    for _ in range(50):  # Newton's steps, none longer than 1
        probability = 0.5 * (1 + np.tanh(inputs @ line / 2))
        gradient = inputs.T @ (weights * (probability - labels)) + penalty @ line
        curvature = (inputs * (weights * probability * (1 - probability))[:, None]).T @ inputs + penalty
        step = np.linalg.solve(curvature + 1e-9 * np.eye(2) * weights.sum(), gradient)
        line = line - step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() < 1e-8:
            break
    slope, intercept = line[0] / spread, line[1] - line[0] * middle / spread
    return (float(slope), float(intercept)) if slope > 0 else None
