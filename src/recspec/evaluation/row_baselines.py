"""Classic models of labelled rows, as baselines for a click model.

    scorer = logistic_regression(spec, ["train"])
    scorer.logits(columns)             # (B,) logits of labelled rows

Logistic regression reads an even share of the rows if there are too many, and judges on a tenth of it; a hash of the
row's number picks both. Nothing is drawn, so the same rows give the same weights.

Shapes: B rows; D columns of a one-hot matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import DataError
from recspec.data.encoding import mix
from recspec.data.storage import Column, Ragged, open_split, scalar
from recspec.evaluation.choosing import Combination, choose
from recspec.evaluation.interactions import blocks
from recspec.feature_spec import FeatureSpec
from recspec.metrics import measures as metrics
from recspec.models import LogisticRegression, Scores

if TYPE_CHECKING:
    from scipy.sparse import csr_array

HELD_OUT = 0.1
"""Share of the rows on which strengths of logistic regression are compared, and that stop the boosting of trees."""

MOST_ENTRIES = 1 << 26  # of logistic regression's one-hot matrix, 8 bytes each: 2 million rows of 32 features
NUM_BINS = LogisticRegression.num_bins
TUNING_ROWS = 200_000  # rows for the comparison of L2 strengths; the best strength does not grow with the rows
STRENGTHS = (3.0, 10.0, 1.0)
"""L2 strengths compared first (inverse prior variance of a weight); each fit starts from the last. The first one is
used where nothing can be compared."""


@dataclass(frozen=True, eq=False)
class Scorer:
    """A fitted model that gives rows their logits."""

    features: tuple[str, ...]  # columns that it reads
    logits: Callable[[Mapping[str, Column]], Scores]  # (B,) logits of rows
    facts: Mapping[str, object] = field(default_factory=dict)  # details of the fit, for a report


def splits_of_rows(spec: FeatureSpec, splits: Sequence[str]) -> list[str]:
    """The splits whose labels a model of rows is fitted to; of a series train, as the others list drawn candidates."""
    return [split for split in splits if split == "train" or not spec.has_series]


def count_labels(spec: FeatureSpec, splits: Sequence[str]) -> tuple[int, int]:
    """Number of rows of some splits, and number of positive rows."""
    rows = positives = 0
    for _, block in row_blocks(spec, splits, (spec.label,)):
        labels = labels_of(block, spec)
        rows, positives = rows + len(labels), positives + int(labels.sum())
    return rows, positives


def row_blocks(
    spec: FeatureSpec, splits: Sequence[str], features: Sequence[str]
) -> Iterator[tuple[int, Mapping[str, Column]]]:
    """Blocks of the rows of some splits, each with the number of its first row, counted over all the splits."""
    before = 0
    for split in splits:
        reader = open_split(spec, split, features)
        for start, block in blocks(reader):
            yield before + start, block
        before += reader.num_rows


def labels_of(block: Mapping[str, Column], spec: FeatureSpec) -> NDArray[np.bool_]:
    """(B,) whether each row of a block is positive."""
    positive: NDArray[np.bool_] = scalar(block[spec.label]).astype(np.float32) > 0
    return positive


def count_both_classes(spec: FeatureSpec, splits: Sequence[str]) -> tuple[int, int]:
    """`count_labels` of rows to fit a model to. Raises `DataError` unless they have both classes."""
    rows, positives = count_labels(spec, splits)
    if not 0 < positives < rows:
        raise DataError(f"of {rows:,} rows to fit {positives:,} are positive; labelled rows of both classes are needed")
    return rows, positives


def _num_values(spec: FeatureSpec, *, categorical: bool) -> int:
    """The most ids, or the count of numbers, in a row."""
    return sum(spec.features[name].length or 1 for name in spec.inputs(categorical=categorical))


def _numbers_of(spec: FeatureSpec, columns: Mapping[str, Column], names: Sequence[str]) -> NDArray[np.float64]:
    """(B, number columns); lists padded to their length."""
    num_rows = len(next(iter(columns.values())))
    parts = [np.zeros((num_rows, 0))]
    for name in names:
        column, length = columns[name], spec.features[name].length
        values = column.pad(length or 0) if isinstance(column, Ragged) else column
        parts.append(values.reshape(num_rows, -1).astype(np.float64))
    return np.concatenate(parts, axis=1)


def uniform(numbers: NDArray[np.uint64], salt: int) -> NDArray[np.float64]:
    """A fixed number in [0, 1) for each row number, from splitmix64 with wrap-around."""
    with np.errstate(over="ignore"):
        bits = mix((numbers + np.uint64(salt << 40)) * np.uint64(0x9E3779B97F4A7C15))
    return (bits >> np.uint64(11)) / 2.0**53


# --- logistic regression ---------------------------------------------------------------------------------------------


def constant(spec: FeatureSpec, splits: Sequence[str]) -> Scorer:
    """Gives every row the logit of the label's rate, the best constant."""
    rows, positives = count_both_classes(spec, splits)
    logit = float(np.log(positives / (rows - positives)))
    return Scorer((spec.label,), lambda columns: np.full(len(columns[spec.label]), logit))


def logistic_regression(
    spec: FeatureSpec, splits: Sequence[str], *, l2: float | None = None, most_entries: int = MOST_ENTRIES
) -> Scorer:
    """`LogisticFit` with one strength: by default the best one on a tenth of the rows."""
    fit = LogisticFit(spec, splits, most_entries)
    tried: dict[str, float] = {}
    if l2 is None:
        l2, tried = fit.choose_strength()
    weights, intercept = fit.solve(l2)
    facts = {"l2": l2, **fit.facts, **({"log_loss_by_l2": tried} if tried else {})}
    return Scorer(fit.layout.features, lambda columns: fit.layout.encode(columns) @ weights + intercept, facts)


class LogisticFit:
    """Logistic regression over the prepared ids one-hot, lists as counts, numbers standardised and in bins one-hot.

    Minimises sum log(1 + exp(x)) - y x + l2 / 2 |w|^2 over the weights w (the intercept is free) by L-BFGS with the
    analytic gradient. Rows beyond `most_entries` are left out evenly.
    """

    def __init__(self, spec: FeatureSpec, splits: Sequence[str], most_entries: int = MOST_ENTRIES) -> None:
        num_rows, _ = count_both_classes(spec, splits)
        most_of_a_row = max(1, _num_values(spec, categorical=True) + 2 * _num_values(spec, categorical=False))
        share = min(1.0, most_entries / (num_rows * most_of_a_row))
        self.layout = _OneHot(spec, splits, share)
        self.kept, self.held_out = _read_sample(spec, splits, self.layout, share)
        some_row_has = np.zeros(self.layout.width, dtype=bool)
        for matrix, _ in self.kept + self.held_out:
            some_row_has[matrix.indices] = True
        self.seen = np.flatnonzero(some_row_has)
        for part in (self.kept, self.held_out):
            part[:] = [(matrix[:, self.seen], labels) for matrix, labels in part]
        self.last = np.zeros(len(self.seen) + 1)  # where the next fit starts
        self.facts: dict[str, object] = {"rows": _num_rows(self.kept + self.held_out), "of_rows": num_rows}

    def choose_strength(self) -> tuple[float, dict[str, float]]:
        """The strength with the least log loss on the rows held out, and the loss of each one tried."""
        l2, self.last, tried = _choose_strength(self.kept, self.held_out, self.last)
        return l2, tried

    def solve(self, l2: float) -> tuple[NDArray[np.float64], float]:
        """Weights (D,), 0 for ids that training never saw, and the intercept, from all rows."""
        self.last = _fit_logistic(self.kept + self.held_out, l2, self.last)
        everywhere = np.zeros(self.layout.width)
        everywhere[self.seen] = self.last[:-1]
        return everywhere, float(self.last[-1])


class _OneHot:
    """Layout of the one-hot matrix: columns of numbers (one for each value of a list), bins, ids.

    Means, deviations and bins of the numbers are fitted to an even share of the rows.
    """

    def __init__(self, spec: FeatureSpec, splits: Sequence[str], share: float) -> None:
        self.spec, self.numbers, self.ids = spec, spec.inputs(categorical=False), spec.inputs(categorical=True)
        self.features = (*self.numbers, *self.ids)
        parts = [np.zeros((0, _num_values(spec, categorical=False)))]
        for start, block in row_blocks(spec, splits, self.numbers) if self.numbers else ():
            values = _numbers_of(spec, block, self.numbers)
            parts.append(values[uniform(np.arange(start, start + len(values), dtype=np.uint64), 1) < share])
        held = np.concatenate(parts)
        self.mean = held.mean(axis=0) if len(held) else np.zeros(0)
        std = held.std(axis=0) if len(held) else np.ones(0)
        self.std = np.where(std > 0, std, 1.0)
        self.edges = [_edges(column) for column in held.T]  # between the bins of each number
        sizes = [len(of) + 1 if len(of) else 0 for of in self.edges]
        *self.first_bin, self.width = (len(self.mean) + np.cumsum([0, *sizes])).tolist()
        self.first: dict[str, int] = {}  # column of each feature's id 0
        for name in self.ids:
            self.first[name] = self.width
            self.width += spec.num_ids(name)

    def encode(self, columns: Mapping[str, Column]) -> csr_array:
        """(B, D) matrix: 1 for each id except padding and for the bin of a number; numbers are standardised."""
        from scipy import sparse

        num_rows = len(next(iter(columns.values())))
        numbers = _numbers_of(self.spec, columns, self.numbers)
        binned = [number for number, edges in enumerate(self.edges) if len(edges)]
        bins = [self.first_bin[j] + np.searchsorted(self.edges[j], numbers[:, j], side="right") for j in binned]
        lists = {name: self._ids_of(name, columns[name]) for name in self.ids}
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

    def _ids_of(self, name: str, column: Column) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A feature's ids, row after row, and their number in each row."""
        if not isinstance(column, Ragged):
            return column.astype(np.int64), np.ones(len(column), dtype=np.int64)
        kept = _without_padding(self.spec, name, column)
        return kept.values.astype(np.int64), kept.lengths


def _edges(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Edges between bins: a bin for each distinct value, or `NUM_BINS` bins of about equally many distinct values."""
    distinct = np.unique(values)
    if len(distinct) <= NUM_BINS:
        return distinct[1:]
    return distinct[np.linspace(0, len(distinct), NUM_BINS + 1).astype(np.int64)[1:-1]]


def _choose_strength(
    kept: Sequence[_Block], held_out: Sequence[_Block], weights: NDArray[np.float64]
) -> tuple[float, NDArray[np.float64], dict[str, float]]:
    """The strength with the least log loss on the held-out rows, its weights, and the loss of each strength."""
    step = -(-(_num_rows(kept) + _num_rows(held_out)) // TUNING_ROWS)
    kept, held_out = kept[::step], held_out[::step]
    labels = np.concatenate([np.zeros(0, dtype=bool), *(labels for _, labels in held_out)])
    if not kept or labels.all() or not labels.any():
        return STRENGTHS[0], weights, {}  # too few rows to choose by

    def attempt(combination: Combination) -> tuple[float, tuple[float, NDArray[np.float64]]]:
        nonlocal weights
        l2 = float(str(combination["l2"]))
        weights = _fit_logistic(kept, l2, weights, tolerance=1e-7)
        logits = np.concatenate([matrix @ weights[:-1] + weights[-1] for matrix, _ in held_out])
        return metrics.log_loss(logits, labels), (l2, weights)

    best, tried = choose([{"l2": l2} for l2 in STRENGTHS], attempt, lower=True)
    return *best, {f"{each.settings['l2']:g}": each.value for each in tried}


def _fit_logistic(
    rows: Sequence[_Block], l2: float, start: NDArray[np.float64], *, tolerance: float = 1e-8
) -> NDArray[np.float64]:
    """Weights (D,) and intercept with the least loss, from an fp32 matrix and fp64 sums."""
    from scipy import optimize, special

    num_rows = _num_rows(rows)

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


# --- samples of rows -------------------------------------------------------------------------------------------------


_Block = tuple[Any, NDArray[np.bool_]]  # rows of a matrix, and their labels


def _read_sample(
    spec: FeatureSpec, splits: Sequence[str], layout: _OneHot, share: float
) -> tuple[list[_Block], list[_Block]]:
    """An even share of the rows, and those of it that are held out."""
    kept: list[_Block] = []
    held_out: list[_Block] = []
    for first, block in row_blocks(spec, splits, (*layout.features, spec.label)):
        labels = labels_of(block, spec)
        numbers = np.arange(first, first + len(labels), dtype=np.uint64)
        matrix = layout.encode({name: block[name] for name in layout.features})
        chosen, judging = uniform(numbers, 1) < share, uniform(numbers, 2) < HELD_OUT
        for part, rows in ((kept, chosen & ~judging), (held_out, chosen & judging)):
            if rows.any():
                part.append((matrix[np.flatnonzero(rows)], labels[rows]))
    return kept, held_out


def _num_rows(blocks: Sequence[_Block]) -> int:
    return sum(len(labels) for _, labels in blocks)


def _without_padding(spec: FeatureSpec, name: str, column: Ragged) -> Ragged:
    """The lists of a feature, cut to its length."""
    kept = column.truncate(spec.features[name].length or 0)
    return kept.where(kept.values != 0)
