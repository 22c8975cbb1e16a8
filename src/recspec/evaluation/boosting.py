"""Grows the trees of `LightGbm` on labelled rows: settings that were not given are chosen on valid.

Growing needs LightGBM, which comes with `pip install 'recspec[baselines]'`; the model itself does not. Nothing is drawn
but the columns of `feature_share`, and with them the same rows and seed give the same trees on any number of threads.

Shapes: N rows; C columns; I scalar features of ids; K pairs of ids that occur.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recspec.base import config
from recspec.base.errors import DataError, require_extra
from recspec.data.encoding import CrossEncoder, read_encoders
from recspec.data.storage import Column, Ragged
from recspec.evaluation.choosing import Combination, Tried, choose
from recspec.evaluation.fitting import Fitted, by_column, metric_value
from recspec.evaluation.protocols import run_protocols
from recspec.evaluation.report import is_lower_better
from recspec.evaluation.row_baselines import (
    HELD_OUT,
    Scorer,
    count_both_classes,
    count_labels,
    labels_of,
    row_blocks,
    splits_of_rows,
    uniform,
)
from recspec.evaluation.scoring import ModelRanker, SplitScores, as_batch, scores_of
from recspec.evaluation.task import EvaluateSettings, EvaluationTask
from recspec.feature_spec import FeatureSpec
from recspec.metrics import measures as metrics
from recspec.models import Ids, LightGbm, LightGbmSettings, Scores, on_meta_device

MOST_VALUES = 1 << 26  # of the matrix, 4 bytes each: 1.6 million rows of 40 columns

PATIENCE = 2.5  # sum of the learning rates of rounds without a lower log loss on the rows held out: 25 rounds at .1
MOST_ROUNDS = 3000
ROUNDS_UNJUDGED = 100  # LightGBM's default, for rows too few to hold any out

COMPARED = LightGbm.searched()[:-1]
PORTFOLIO: Sequence[Combination] = tuple(
    dict(zip(COMPARED, values, strict=True))
    for values in (
        ("none", 4000, 32, 1.0, 31, 20, 0.0),
        ("pairs", 4000, 16, 0.4, 63, 100, 0.0),
        ("columns", 0, 32, 0.6, 31, 50, 30.0),
        ("pairs", 100, 8, 0.3, 7, 100, 10.0),
        ("columns", 500, 8, 0.3, 63, 100, 30.0),
        ("none", 500, 16, 0.6, 7, 50, 0.0),
        ("columns", 100, 32, 0.3, 127, 20, 0.0),
    )
)
"""Combinations compared: first the model's defaults, then of 60 random ones each that which mends most of what those
before leave, over fifteen tables (docs/decisions.md)."""
OF_IDS = COMPARED[:3]
"""Settings that are compared only if there is a scalar feature of ids."""

FOLDS = 5
SMOOTHING = 10.0
"""Rows at the label's rate that a mean of ids is made of besides its own."""
MOST_FEATURES = 10
"""Features of ids that make pairs: those that tell most by themselves."""
MOST_PAIRS = 20
"""Pairs that get a column: those that tell most."""


@dataclass
class BoostedFit:
    """The fit of trees to the labelled rows of some splits; it takes what `ItemFit` takes."""

    kind: type[LightGbm]
    spec: FeatureSpec
    settings: config.Settings
    splits: Sequence[str] = ("train",)
    valid: str = ""
    metric: str = LightGbm.metric
    seed: int = 0
    on_tried: Callable[[Tried], None] = lambda _: None
    enough: Callable[[], bool] = lambda: False
    most_values: int = MOST_VALUES
    facts: dict[str, object] = field(default_factory=dict)
    """Details of the fit, for a report; `run` fills them."""

    def run(self) -> Fitted:
        """Choose settings and the number of trees on valid; without valid on a tenth of train, then fit to all rows.

        Raises:
            DataError: without rows of both classes.
            SettingsError: for a metric that valid does not give.
            MissingExtraError: without LightGBM.
        """
        splits = splits_of_rows(self.spec, self.splits)
        before = [split for split in splits if split != self.valid]
        valid = self.valid if before else ""
        count_both_classes(self.spec, before or splits)
        require_extra("lightgbm", "baselines")
        rows = TreeRows(self, before or splits, valid)
        best, self.facts = self._choose(rows), rows.facts
        judged = best.model
        assert isinstance(judged, LightGbm)
        if not valid or before != splits:
            model, _, booster = TreeRows(self, splits, None).grow(judged.settings)
            best = replace(best, model=with_trees(model, booster), judged=judged)
        assert isinstance(best.model, LightGbm)
        return replace(best, importance=by_column(self.spec, best.model.gains()))

    def _choose(self, rows: TreeRows) -> Fitted:
        """The best combination of `PORTFOLIO`, but for the settings given."""
        task = None
        if rows.valid:
            task = EvaluationTask(self.spec, rows.valid, [self.metric.partition("/")[0]], EvaluateSettings())

        def attempt(combination: Combination) -> tuple[float, tuple[Fitted, Any]]:
            settings = self.settings.model_copy(update=dict(combination))
            model, logits, booster = rows.grow(settings)  # type: ignore[arg-type]
            if task is None:
                value = metrics.log_loss(logits, rows.held.labels) if rows.judges else 0.0
                return value, (Fitted(model, num_pairs=rows.num_rows), booster)
            if len(logits) == len(task.rows.labels):
                scores = SplitScores(task, lambda: logits, partial(ModelRanker, model, task))
            else:
                scores = scores_of(with_trees(model, booster), task)
            found = run_protocols(scores)
            value = metric_value(found.metrics, self.metric)
            own = Fitted(model, (), self.metric, value, found.metrics, found, "its own loss", rows.num_rows)
            return value, (own, booster)

        free = [name for name in COMPARED if rows.judges and name not in self.settings.model_fields_set]
        free = [name for name in free if rows.plain.ids or name not in OF_IDS]
        grid = list[Combination]()
        for each in PORTFOLIO:
            own = {name: each[name] for name in free}
            grid += [own] if own not in grid else []
        told: Callable[[Tried], None] = self.on_tried if task is not None else lambda _: None
        (best, booster), tried = choose(
            grid,
            attempt,
            lower=task is None or is_lower_better(self.metric),
            may_be=lambda _: False,
            on_tried=told,
            enough=self.enough,
        )
        with_trees(best.model, booster)  # type: ignore[arg-type]
        return replace(best, tried=tried if task is not None else ())

    def model_of(self, settings: Mapping[str, object]) -> LightGbm:
        """A model with the fit's settings but for these, without weights."""
        own: Any = self.settings.model_copy(update=dict(settings))
        return on_meta_device(lambda: self.kind(self.spec, own))


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows: the matrix (N, C) without means, ids (N, I), labels (N,) and folds (N,)."""

    matrix: NDArray[np.float32]
    ids: NDArray[np.int64]
    labels: NDArray[np.bool_]
    folds: NDArray[np.int64]


class TreeRows:
    """The rows that trees are grown on, and the rows held out: those of valid, a tenth, or with None none at all.

    Rows beyond `most_values` are left out evenly; a hash of a row's number chooses them.
    """

    def __init__(self, fit: BoostedFit, splits: Sequence[str], valid: str | None) -> None:
        self.fit, self.spec, self.valid = fit, fit.spec, valid
        self.plain = fit.model_of({"target_means": "none"})
        self.facts: dict[str, object] = {}
        self.codes = self._codes(splits)
        self.plain.codes = self.codes
        self.plain.pairs.fill([], [], [], 0.0)
        width = len(self.plain.column_features([]))
        of_rows, _ = count_labels(self.spec, splits)
        if "target_means" not in fit.settings.model_fields_set or vars(fit.settings)["target_means"] != "none":
            width += len(self.plain.ids) + min(MOST_PAIRS, math.comb(len(self.plain.ids), 2))
        share = min(1.0, fit.most_values / (of_rows * width))
        self.grown, self.held = self._read(splits, share, HELD_OUT if valid == "" else 0.0)
        if valid:
            self.held, _ = self._read([valid], share, 0.0)
        self.judges = bool(len(self.held.labels)) and 0 < self.grown.labels.sum() < len(self.grown.labels)
        if not self.judges and len(self.held.labels) and not valid:  # a tenth that takes a class away
            self.grown, self.held = self._read(splits, share, 0.0)
        self.num_rows = len(self.grown.labels) + (0 if valid else len(self.held.labels))
        self.facts |= {"rows": self.num_rows, "of_rows": of_rows}
        self.rate = float(self.grown.labels.mean())
        self._pairs: tuple[list[tuple[int, int]], list[Ids], list[Ids]] | None = None
        self._kept_means: dict[str, list[tuple[Part, list[NDArray[np.float32]]]]] = {}

    def _codes(self, splits: Sequence[str]) -> torch.Tensor:
        """The code of each id, feature after feature: from 1 for the most frequent, 0 for the others and for crosses.

        Trees cross by themselves, and overfit the many ids of a cross of columns that other features hold.
        """
        names, crosses = (*self.plain.ids, *self.plain.lists), crosses_of(self.spec)
        counts = _id_counts(self.spec, splits, names)
        if crosses:
            self.facts["crosses_left_out"] = list(crosses)
        most = {name: LightGbm.most_listed if name in self.plain.lists else len(counts[name]) for name in names}
        made = [codes_of(counts[name], 0 if name in crosses else most[name]) for name in names]
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *made]))

    def _read(self, splits: Sequence[str], share: float, held_out: float) -> tuple[Part, Part]:
        """An even share of the rows, and those of it that are held out."""
        names = self.plain.features()
        made: tuple[list[Part], list[Part]] = ([], [])
        for first, block in row_blocks(self.spec, splits, (*names, self.spec.label)):
            labels = labels_of(block, self.spec)
            numbers = np.arange(first, first + len(labels), dtype=np.uint64)
            chosen, judging = uniform(numbers, 1) < share, uniform(numbers, 2) < held_out
            folds = (uniform(numbers, 3) * FOLDS).astype(np.int64)
            batch = as_batch({name: block[name] for name in names}, self.spec)
            matrix = self.plain.columns(batch).float().numpy()
            ids = np.array([batch[name].numpy() for name in self.plain.ids], np.int64).reshape(-1, len(labels)).T
            for parts, rows in zip(made, (chosen & ~judging, chosen & judging), strict=True):
                parts.append(Part(matrix[rows], ids[rows], labels[rows], folds[rows]))
        kept, held = (
            Part(*(np.concatenate([getattr(each, name) for each in parts]) for name in vars(parts[0])))
            for parts in made
        )
        return kept, held

    def grow(self, settings: LightGbmSettings) -> tuple[LightGbm, Scores, Any]:
        """The model with these settings, its logits of the rows held out, and LightGBM's booster, for `with_trees`."""
        lightgbm = require_extra("lightgbm", "baselines")
        model = self._encoder(settings)
        if settings.target_means not in self._kept_means:
            self._kept_means[settings.target_means] = [*self._means(model)]
        grown, held = (
            np.concatenate([part.matrix, *means], axis=1) for part, means in self._kept_means[settings.target_means]
        )
        first = sum(self.plain.widths)
        of_ids = slice(first, first + len(self.plain.ids))
        for matrix in (grown, held):
            matrix[:, of_ids][matrix[:, of_ids] > settings.max_categories] = 0
        data = lightgbm.Dataset(grown, self.grown.labels, categorical_feature=list(range(of_ids.start, of_ids.stop)))
        judged = self.judges and settings.trees is None
        booster = lightgbm.train(
            {
                "objective": "binary",
                "learning_rate": settings.learning_rate,
                "num_leaves": settings.num_leaves,
                "max_cat_threshold": settings.max_cat_threshold,
                "min_data_in_leaf": settings.min_rows,
                "lambda_l2": settings.l2,
                "feature_fraction": settings.feature_share,
                "seed": self.fit.seed,
                "num_threads": torch.get_num_threads(),
                "use_missing": False,  # no value is missing in the matrix
                "deterministic": True,
                "force_row_wise": True,  # otherwise a timing of both layouts chooses
                "verbosity": -1,
            },
            data,
            num_boost_round=settings.trees or (MOST_ROUNDS if judged else ROUNDS_UNJUDGED),
            valid_sets=[data.create_valid(held, self.held.labels)] if judged else [],
            callbacks=[lightgbm.early_stopping(max(10, round(PATIENCE / settings.learning_rate)), verbose=False)]
            if judged
            else [],
        )
        best = booster.best_iteration or booster.current_iteration()
        model.settings = settings.model_copy(update={"trees": best})
        logits = booster.predict(held, raw_score=True, num_iteration=best) if len(held) else np.zeros(0)
        return model.eval(), np.asarray(logits), booster

    # --- means of the label ---

    def _encoder(self, settings: LightGbmSettings) -> LightGbm:
        """The model with codes and means, and no trees."""
        model = self.fit.model_of({"target_means": settings.target_means})
        scalar = sum(self.spec.num_ids(name) for name in self.plain.ids)
        rare = (self.codes > settings.max_categories) & (torch.arange(len(self.codes)) < scalar)
        model.codes = self.codes.masked_fill(rare, 0)
        sums = [_sums(ids, self.grown.labels, num_ids) for ids, num_ids in self._columns()] if model.has_means else []
        means = [_smoothed(positives, rows, self.rate) for positives, rows in sums]
        model.means = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *means]))
        pairs, keys, of_pairs = self._chosen_pairs() if settings.target_means == "pairs" else ([], [], [])
        model.pairs.fill(pairs, keys, of_pairs, self.rate)  # type: ignore[arg-type]
        return model

    def _columns(self) -> Iterator[tuple[Ids, int]]:
        """The ids (N,) of each scalar feature, and how many ids it has."""
        for place, name in enumerate(self.plain.ids):
            yield self.grown.ids[:, place], self.spec.num_ids(name)

    def _means(self, model: LightGbm) -> Iterator[tuple[Part, list[NDArray[np.float32]]]]:
        """The columns of means of the rows to grow on, by the other folds, and of the rows held out, by all."""
        own: list[NDArray[np.float32]] = []
        if model.has_means:
            own += [self._out_of_fold(ids, num_ids)[:, None] for ids, num_ids in self._columns()]
        for a, b in model.pairs.columns.T.tolist():
            own.append(self._out_of_fold(*_as_ids(self._key(a, b)))[:, None])
        yield self.grown, own
        others: list[NDArray[np.float32]] = []
        ids = self.held.ids
        if model.has_means:
            places = [model.first[name] for name in model.ids]
            others.append(model.means.numpy()[ids + np.array(places)])
        if model.pairs.num_pairs:
            others.append(model.pairs(torch.from_numpy(np.ascontiguousarray(ids))).numpy())
        yield self.held, others

    def _out_of_fold(self, ids: Ids, num_ids: int) -> NDArray[np.float32]:
        """(N,) the mean of each row's id over the rows of other folds, so that no row tells its own label."""
        places = ids * FOLDS + self.grown.folds
        positives, rows = _sums(places, self.grown.labels, num_ids * FOLDS)
        of_ids = [each.reshape(-1, FOLDS).sum(1) for each in (positives, rows)]
        return _smoothed(of_ids[0][ids] - positives[places], of_ids[1][ids] - rows[places], self.rate)

    def _key(self, a: int, b: int) -> Ids:
        """(N,) one number for the ids of two features, as in `PairMeans`."""
        return self.grown.ids[:, a] * self.spec.num_ids(self.plain.ids[b]) + self.grown.ids[:, b]

    def _chosen_pairs(self) -> tuple[list[tuple[int, int]], list[Ids], list[Ids]]:
        """Pairs of features whose means out of fold tell more than those of each one, with their keys and means."""
        if self._pairs is None:
            losses = [self._loss(*each) for each in self._columns()]
            tell_most = sorted(np.argsort(losses, kind="stable")[:MOST_FEATURES].tolist())
            found = [(self._loss(*_as_ids(self._key(a, b))), a, b) for a, b in combinations(tell_most, 2)]
            kept = sorted(each for each in found if each[0] < min(losses[each[1]], losses[each[2]]))[:MOST_PAIRS]
            pairs, keys, means = [(a, b) for _, a, b in kept], list[Ids](), list[Ids]()
            for a, b in pairs:
                own, ids = np.unique(self._key(a, b), return_inverse=True)
                positives, rows = _sums(ids, self.grown.labels, len(own))
                keys.append(own)
                means.append(_smoothed(positives, rows, self.rate))  # type: ignore[arg-type]
            self._pairs = pairs, keys, means
        return self._pairs

    def _loss(self, ids: Ids, num_ids: int) -> float:
        """Log loss of the means out of fold."""
        means = self._out_of_fold(ids, num_ids).astype(np.float64)
        return metrics.log_loss(np.log(means / (1 - means)), self.grown.labels)


def with_trees(model: LightGbm, booster: Any) -> LightGbm:
    """The model, filled with the trees; that takes a quarter of the time of growing them."""
    told = booster.dump_model(num_iteration=model.settings.trees)["tree_info"]
    model.fill([each["tree_structure"] for each in told])
    return model


def _as_ids(keys: Ids) -> tuple[Ids, int]:
    """Keys as ids from 0, and the number of ids."""
    own, ids = np.unique(keys, return_inverse=True)
    return ids, len(own)


def _sums(ids: Ids, labels: NDArray[np.bool_], num_ids: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Positive rows and rows of each id."""
    positives, rows = np.bincount(ids, labels, minlength=num_ids), np.bincount(ids, minlength=num_ids)
    return positives.astype(np.float64), rows.astype(np.float64)


def _smoothed(positives: NDArray[np.float64], rows: NDArray[np.float64], rate: float) -> NDArray[np.float32]:
    made: NDArray[np.float32] = ((positives + SMOOTHING * rate) / (rows + SMOOTHING)).astype(np.float32)
    return made


def crosses_of(spec: FeatureSpec) -> tuple[str, ...]:
    """Features that cross raw columns, each of which another feature holds."""
    if not spec.metadata.get("encoders"):
        return ()
    encoders = {name: each for name, each in read_encoders(spec.folder).items() if name in spec.inputs()}
    alone = {each.column or name for name, each in encoders.items() if not isinstance(each, CrossEncoder)}
    return tuple(n for n, each in encoders.items() if isinstance(each, CrossEncoder) and alone.issuperset(each.columns))


def _id_counts(spec: FeatureSpec, splits: Sequence[str], names: Sequence[str]) -> dict[str, Ids]:
    """The count of each id of each feature in the rows to fit."""
    counts: dict[str, Ids] = {name: np.zeros(spec.num_ids(name), dtype=np.int64) for name in names}
    for _, block in row_blocks(spec, splits, names) if names else ():
        for name in names:
            column = block[name]
            ids = column.values if isinstance(column, Ragged) else column
            counts[name] += np.bincount(ids.astype(np.int64), minlength=len(counts[name]))
    return counts


def codes_of(counts: Ids, most: int) -> NDArray[np.int32]:
    """The code of each id: from 1 for the most frequent; 0 for those beyond `most`, and those that no row has."""
    frequent = np.argsort(-counts, kind="stable")[:most]
    frequent = frequent[counts[frequent] > 0]
    codes = np.zeros(len(counts), dtype=np.int32)
    codes[frequent] = np.arange(1, len(frequent) + 1)
    return codes


# --- the baseline -----------------------------------------------------------------------------------------------------


def boosted_trees(spec: FeatureSpec, splits: Sequence[str], *, most_values: int = MOST_VALUES) -> Scorer:
    """`LightGbm` with 31 leaves and without means of the label, stopped on a tenth of the rows."""
    if not spec.inputs():
        raise DataError(f"{spec.folder}: holds no feature that a model may read")
    settings = LightGbmSettings(**dict(PORTFOLIO[0]))
    fit = BoostedFit(LightGbm, spec, settings, splits, most_values=most_values)
    model = fit.run().model
    assert isinstance(model, LightGbm)

    def logits(columns: Mapping[str, Column]) -> Scores:
        with torch.inference_mode():
            made: Scores = model(as_batch(columns, spec)).numpy()
        return made

    return Scorer(model.features(), logits, {**fit.facts, "trees": model.settings.trees})
