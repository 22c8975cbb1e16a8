"""Classic models of labelled rows, as baselines for a click model.

    scorer = ROW_BASELINES["logistic_regression"](spec, ["train"])
    scorer.logits(columns)             # (B,) logits of labelled rows

The constant needs numpy only; logistic regression needs scipy, from `pip install 'recspec[baselines]'`.

Shapes: B rows; D columns of a one-hot matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from recspec import metrics
from recspec.errors import DataError, require_extra
from recspec.evaluation.rows import Scores, blocks, scalar
from recspec.spec import FeatureSpec
from recspec.storage import Column, Ragged, open_split

if TYPE_CHECKING:
    from scipy.sparse import csr_array

MOST_ENTRIES = 1 << 26
"""Most entries of logistic regression's one-hot matrix, 8 bytes each: 2 million rows of 32 features."""

NUM_BINS = 64
"""Most bins of a number, cut evenly among its distinct values. On Adult's valid: AUC .9237; 32 cut by rows .9167; none
.9157."""

TUNING_ROWS = 200_000
"""Rows for the comparison of L2 strengths; the best strength does not grow with the rows."""

HELD_OUT = 0.1
"""Share of those rows on which the strengths are judged."""

STRENGTHS = (100.0, 30.0, 10.0, 3.0, 1.0, 0.3)
"""L2 strengths compared (inverse prior variance of a weight), from strong to weak; each fit starts from the last."""


class Scorer(Protocol):
    """A fitted model that gives rows their logits."""

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns that it reads."""

    @property
    def facts(self) -> Mapping[str, object]:
        """Details of the fit, for a report."""

    def logits(self, columns: Mapping[str, Column]) -> Scores:
        """(B,) logits of rows."""


class FitRows(Protocol):
    """A fit on all rows of some splits of a prepared dataset."""

    def __call__(self, spec: FeatureSpec, splits: Sequence[str]) -> Scorer:
        """Fit."""


def count_labels(spec: FeatureSpec, splits: Sequence[str]) -> tuple[int, int]:
    """Number of rows of some splits, and number of positive rows."""
    rows = positives = 0
    for _, block in _row_blocks(spec, splits, (spec.label,)):
        labels = _labels(block, spec)
        rows, positives = rows + len(labels), positives + int(labels.sum())
    return rows, positives


def constant(spec: FeatureSpec, splits: Sequence[str]) -> Scorer:
    """Gives every row the logit of the label's rate, the best constant."""
    rows, positives = _both_classes(*count_labels(spec, splits))
    return Constant(spec.label, float(np.log(positives / (rows - positives))))


def logistic_regression(
    spec: FeatureSpec, splits: Sequence[str], *, l2: float | None = None, most_entries: int = MOST_ENTRIES
) -> Scorer:
    """Logistic regression over the prepared ids one-hot, lists as counts, numbers standardised and in bins one-hot.

    Minimises sum log(1 + exp(x)) - y x + l2 / 2 |w|^2 over the weights w (the intercept is free) by L-BFGS with the
    analytic gradient. `l2` is chosen among `STRENGTHS` by the log loss on a tenth of the rows, which a hash of the
    row's number picks; then all rows are fitted. Rows beyond `most_entries` are left out evenly. Nothing is drawn, so
    the same rows give the same weights.
    """
    require_extra("scipy.sparse", "baselines")
    num_rows, _ = _both_classes(*count_labels(spec, splits))
    share = min(1.0, most_entries / (num_rows * _most_entries_per_row(spec)))
    layout = _OneHot.fit(spec, splits, share)
    rows = _read_sample(spec, splits, layout, share)
    seen = rows.drop_unseen(layout.width)
    facts: dict[str, object] = {"rows": rows.num_rows, "of_rows": num_rows}
    weights = np.zeros(len(seen) + 1)
    if l2 is None:
        l2, weights, tried = _choose_strength(rows, weights)
        facts["log_loss_by_l2"] = tried
    weights = _fit_logistic(rows.kept + rows.held_out, l2, weights)
    everywhere = np.zeros(layout.width)
    everywhere[seen] = weights[:-1]
    return Logistic(layout, everywhere, float(weights[-1]), {"l2": l2, **facts})


ROW_BASELINES: Mapping[str, FitRows] = MappingProxyType(
    {"constant": constant, "logistic_regression": logistic_regression}
)


@dataclass(frozen=True)
class Constant:
    """Gives every row the same logit."""

    feature: str
    logit: float
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def features(self) -> tuple[str, ...]:
        """Name of any column, for the number of rows."""
        return (self.feature,)

    def logits(self, columns: Mapping[str, Column]) -> Scores:
        """(B,) the logit."""
        return np.full(len(columns[self.feature]), self.logit)


@dataclass(frozen=True, eq=False)
class Logistic:
    """Gives a row the sum of its columns' weights."""

    layout: _OneHot
    weights: NDArray[np.float64]  # (D,), 0 for ids that training never saw
    intercept: float
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def features(self) -> tuple[str, ...]:
        """Every input of the dataset."""
        return self.layout.features

    def logits(self, columns: Mapping[str, Column]) -> Scores:
        """(B,) logits."""
        scores: Scores = self.layout.encode(columns) @ self.weights + self.intercept
        return scores


@dataclass(frozen=True, eq=False)
class _OneHot:
    """Layout of the one-hot matrix: columns of numbers (one for each value of a list), bins, ids."""

    spec: FeatureSpec
    numbers: tuple[str, ...]
    ids: tuple[str, ...]
    first: Mapping[str, int]  # of ids
    first_bin: NDArray[np.int64]  # of each number
    edges: tuple[NDArray[np.float64], ...]  # between the bins of each number
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    width: int

    @classmethod
    def fit(cls, spec: FeatureSpec, splits: Sequence[str], share: float) -> _OneHot:
        """Fit means, deviations and bins of the numbers to an even share of the rows."""
        numbers, ids = spec.inputs(categorical=False), spec.inputs(categorical=True)
        parts = []
        for start, block in _row_blocks(spec, splits, numbers) if numbers else ():
            values = _numbers(spec, block, numbers)
            parts.append(values[_uniform(np.arange(start, start + len(values), dtype=np.uint64), 1) < share])
        held = np.concatenate([np.zeros((0, _num_numbers(spec))), *parts])
        mean, std = (held.mean(axis=0), held.std(axis=0)) if len(held) else (np.zeros(0), np.ones(0))
        edges = tuple(_edges(column) for column in held.T)
        sizes = [len(of) + 1 if len(of) else 0 for of in edges]
        starts = len(mean) + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        first: dict[str, int] = {}
        width = int(starts[-1])
        for name in ids:
            first[name] = width
            width += spec.num_ids(name)
        return cls(spec, numbers, ids, first, starts[:-1], edges, mean, np.where(std > 0, std, 1.0), width)

    @property
    def features(self) -> tuple[str, ...]:
        return (*self.numbers, *self.ids)

    def encode(self, columns: Mapping[str, Column]) -> csr_array:
        """(B, D) matrix: 1 for each id except padding and for the bin of a number; numbers are standardised."""
        sparse = require_extra("scipy.sparse", "baselines")
        num_rows = len(next(iter(columns.values())))
        numbers = _numbers(self.spec, columns, self.numbers)
        binned = [number for number, edges in enumerate(self.edges) if len(edges)]
        bins = [self.first_bin[j] + np.searchsorted(self.edges[j], numbers[:, j], side="right") for j in binned]
        lists = {name: self._without_padding(name, columns[name]) for name in self.ids}
        num_fixed = len(self.mean) + len(binned)
        sizes = [np.full(num_rows, num_fixed), *(lengths for _, lengths in lists.values())]
        offsets = np.concatenate([[0], np.cumsum(np.sum(sizes, axis=0))]).astype(np.int64)
        indices = np.empty(offsets[-1], dtype=np.int64 if self.width > 2**31 - 1 else np.int32)
        data = np.ones(offsets[-1], dtype=np.float32)
        if num_fixed:
            fixed = offsets[:-1, None] + np.arange(num_fixed)
            linear = np.broadcast_to(np.arange(len(self.mean)), numbers.shape)
            indices[fixed] = np.concatenate([linear, *(of[:, None] for of in bins)], axis=1)
            data[fixed[:, : len(self.mean)]] = (numbers - self.mean) / self.std
        filled = offsets[:-1] + num_fixed
        for name, (values, lengths) in lists.items():
            within = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            indices[np.repeat(filled, lengths) + within] = values + self.first[name]
            filled = filled + lengths
        return sparse.csr_array((data, indices, offsets), shape=(num_rows, self.width))

    def _without_padding(self, name: str, column: Column) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A feature's ids, row after row, and their number in each row; at most `length` for a list."""
        if not isinstance(column, Ragged):
            return column.astype(np.int64), np.ones(len(column), dtype=np.int64)
        kept = column.truncate(self.spec.features[name].length or 0)
        kept = kept.where(kept.values != 0)
        return kept.values.astype(np.int64), kept.lengths


def _num_numbers(spec: FeatureSpec) -> int:
    return sum(spec.features[name].length or 1 for name in spec.inputs(categorical=False))


def _most_entries_per_row(spec: FeatureSpec) -> int:
    ids = sum(spec.features[name].length or 1 for name in spec.inputs(categorical=True))
    return max(1, ids + 2 * _num_numbers(spec))


def _numbers(spec: FeatureSpec, columns: Mapping[str, Column], names: Sequence[str]) -> NDArray[np.float64]:
    """(B, number columns); lists padded to their length."""
    num_rows = len(next(iter(columns.values())))
    parts = [np.zeros((num_rows, 0))]
    for name in names:
        column, length = columns[name], spec.features[name].length
        values = column.pad(length or 0) if isinstance(column, Ragged) else column
        parts.append(values.reshape(num_rows, -1).astype(np.float64))
    return np.concatenate(parts, axis=1)


def _edges(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Edges between bins: a bin for each distinct value, or `NUM_BINS` bins of about equally many distinct values."""
    distinct = np.unique(values)
    if len(distinct) <= NUM_BINS:
        return distinct[1:]
    return distinct[np.linspace(0, len(distinct), NUM_BINS + 1).astype(np.int64)[1:-1]]


_Block = tuple["csr_array", NDArray[np.bool_]]
"""Rows of the one-hot matrix, and their labels."""


@dataclass(eq=False)
class _Sample:
    kept: list[_Block]
    held_out: list[_Block]  # a fixed share, which compares strengths

    @property
    def num_rows(self) -> int:
        return sum(len(labels) for _, labels in self.kept + self.held_out)

    def drop_unseen(self, width: int) -> NDArray[np.int64]:
        """Drop the columns that no row has; return the numbers of the others."""
        seen = np.zeros(width, dtype=bool)
        for matrix, _ in self.kept + self.held_out:
            seen[matrix.indices] = True
        place = np.cumsum(seen, dtype=np.int32) - 1
        self.kept, self.held_out = (
            [(_with_columns(matrix, place, int(seen.sum())), labels) for matrix, labels in part]
            for part in (self.kept, self.held_out)
        )
        return np.flatnonzero(seen)


def _with_columns(matrix: csr_array, place: NDArray[np.int32], width: int) -> csr_array:
    sparse = require_extra("scipy.sparse", "baselines")
    return sparse.csr_array((matrix.data, place[matrix.indices], matrix.indptr), shape=(matrix.shape[0], width))


def _read_sample(spec: FeatureSpec, splits: Sequence[str], layout: _OneHot, share: float) -> _Sample:
    """An even share of the rows; a hash of the row's number selects and holds out rows."""
    kept: list[_Block] = []
    held_out: list[_Block] = []
    for first, block in _row_blocks(spec, splits, (*layout.features, spec.label)):
        labels = _labels(block, spec)
        numbers = np.arange(first, first + len(labels), dtype=np.uint64)
        matrix = layout.encode({name: block[name] for name in layout.features})
        chosen, judging = _uniform(numbers, 1) < share, _uniform(numbers, 2) < HELD_OUT
        for part, rows in ((kept, chosen & ~judging), (held_out, chosen & judging)):
            if rows.any():
                part.append((matrix[np.flatnonzero(rows)], labels[rows]))
    return _Sample(kept, held_out)


def _uniform(numbers: NDArray[np.uint64], salt: int) -> NDArray[np.float64]:
    """A fixed number in [0, 1) for each row number, from splitmix64 with wrap-around."""
    with np.errstate(over="ignore"):
        bits = (numbers + np.uint64(salt << 40)) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits >> np.uint64(11)) / 2.0**53


def _choose_strength(
    rows: _Sample, weights: NDArray[np.float64]
) -> tuple[float, NDArray[np.float64], dict[str, float]]:
    """The strength with the least log loss on the held-out rows, its weights, and the loss of each strength."""
    step = -(-rows.num_rows // TUNING_ROWS)
    kept, held_out = rows.kept[::step], rows.held_out[::step]
    labels = np.concatenate([np.zeros(0, dtype=bool), *(labels for _, labels in held_out)])
    if not kept or not (labels.any() and not labels.all()):
        return STRENGTHS[len(STRENGTHS) // 2], weights, {}  # too few rows to choose by
    tried: dict[str, float] = {}
    best = (float("inf"), STRENGTHS[0], weights)
    for l2 in STRENGTHS:
        weights = _fit_logistic(kept, l2, weights, tolerance=1e-7)
        logits = np.concatenate([matrix @ weights[:-1] + weights[-1] for matrix, _ in held_out])
        tried[f"{l2:g}"] = reached = metrics.log_loss(logits, labels)
        if reached >= best[0]:
            break  # weaker ones only fit more noise
        best = (reached, l2, weights)
    return best[1], best[2], tried


def _fit_logistic(
    rows: Sequence[_Block], l2: float, start: NDArray[np.float64], *, tolerance: float = 1e-8
) -> NDArray[np.float64]:
    """Weights (D,) and intercept with the least loss, from an fp32 matrix and fp64 sums."""
    optimize, special = require_extra("scipy.optimize", "baselines"), require_extra("scipy.special", "baselines")
    num_rows = sum(len(labels) for _, labels in rows)

    def loss(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        total = 0.5 * l2 * float(weights[:-1] @ weights[:-1])
        gradient = np.append(l2 * weights[:-1], 0.0)
        for matrix, labels in rows:
            logits = matrix @ weights[:-1] + weights[-1]
            total += float(np.logaddexp(0.0, np.where(labels, -logits, logits)).sum())
            error = special.expit(logits) - labels
            gradient[:-1] += matrix.T @ error
            gradient[-1] += error.sum()
        return total / num_rows, gradient / num_rows

    options = {"maxiter": 300, "ftol": tolerance, "gtol": 1e-7}
    found: NDArray[np.float64] = optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=options).x
    return found


def _row_blocks(
    spec: FeatureSpec, splits: Sequence[str], features: Sequence[str]
) -> Iterator[tuple[int, Mapping[str, Column]]]:
    """Blocks of the rows of some splits, each with the number of its first row, counted over all the splits."""
    before = 0
    for split in splits:
        reader = open_split(spec, split, features)
        for start, block in blocks(reader):
            yield before + start, block
        before += reader.num_rows


def _labels(block: Mapping[str, Column], spec: FeatureSpec) -> NDArray[np.bool_]:
    positive: NDArray[np.bool_] = scalar(block[spec.label]).astype(np.float32) > 0
    return positive


def _both_classes(rows: int, positives: int) -> tuple[int, int]:
    if not 0 < positives < rows:
        raise DataError(f"of {rows:,} rows to fit {positives:,} are positive; labelled rows of both classes are needed")
    return rows, positives
