"""Classic models of labelled rows, as baselines for a click model.

    scorer = ROW_BASELINES["logistic_regression"](spec, ["train"])
    scorer.logits(columns)             # (B,) logits of labelled rows

Boosted trees need LightGBM, which comes with `pip install 'recspec[baselines]'`. Trees and logistic regression read an
even share of the rows if there are too many, and judge on a tenth of it; a hash of the row's number picks both. Nothing
is drawn, so the same rows give the same weights, and with the same number of threads the same trees.

Shapes: B rows; D columns of a one-hot matrix; C columns of the matrix that trees split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import DataError, require_extra
from recspec.data.encoding import CrossEncoder, read_encoders
from recspec.data.storage import Column, Ragged, open_split
from recspec.evaluation.choosing import Combination, choose
from recspec.evaluation.interactions import blocks, scalar
from recspec.feature_spec import FeatureSpec
from recspec.metrics import measures as metrics
from recspec.models import Ids, LogisticRegression, Scores

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

MOST_VALUES = 1 << 26  # of the matrix, 4 bytes each: 1.6 million rows of 40 columns

MOST_CATEGORIES = 4000
"""Of a feature: the most frequent ids; the others share one category. On the valid rows of ml-latest-small with labels:
AUC .7805; 1000: .7720; 255: .7382. Criteo's sample has no feature with more than 1000."""

MOST_LISTED = 32  # ids of a list that get a column of counts, the most frequent ones

PATIENCE = 50  # rounds without a lower log loss on them
MOST_ROUNDS = 3000
ROUNDS_UNJUDGED = 100  # LightGBM's default, for rows too few to hold any out

CATEGORIES_APART = (32, 8)
"""Values of `max_cat_threshold` compared: 32 is LightGBM's. Many categorical features overfit with it (AUC on the valid
rows of Criteo's sample: .7622, with 8 .7722); a user and an item alone do not (.7720, with 8 .7681)."""

PARAMETERS: Mapping[str, object] = {
    "objective": "binary",
    "learning_rate": 0.05,
    "num_leaves": 31,
    "seed": 0,
    "deterministic": True,
    "force_row_wise": True,  # otherwise a timing of both layouts chooses
    "verbosity": -1,
}


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
        labels = _labels_of(block, spec)
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


def _labels_of(block: Mapping[str, Column], spec: FeatureSpec) -> NDArray[np.bool_]:
    """(B,) whether each row of a block is positive."""
    positive: NDArray[np.bool_] = scalar(block[spec.label]).astype(np.float32) > 0
    return positive


def _count_both_classes(spec: FeatureSpec, splits: Sequence[str]) -> tuple[int, int]:
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


def _uniform(numbers: NDArray[np.uint64], salt: int) -> NDArray[np.float64]:
    """A fixed number in [0, 1) for each row number, from splitmix64 with wrap-around."""
    with np.errstate(over="ignore"):
        bits = (numbers + np.uint64(salt << 40)) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits >> np.uint64(11)) / 2.0**53


# --- logistic regression ---------------------------------------------------------------------------------------------


def constant(spec: FeatureSpec, splits: Sequence[str]) -> Scorer:
    """Gives every row the logit of the label's rate, the best constant."""
    rows, positives = _count_both_classes(spec, splits)
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
        num_rows, _ = _count_both_classes(spec, splits)
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
            parts.append(values[_uniform(np.arange(start, start + len(values), dtype=np.uint64), 1) < share])
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


# --- boosted trees ---------------------------------------------------------------------------------------------------


def boosted_trees(spec: FeatureSpec, splits: Sequence[str], *, most_values: int = MOST_VALUES) -> Scorer:
    """Trees over the prepared features: ids as categories, numbers as they are, lists as counts.

    Crosses of columns that other features hold are left out: trees cross by themselves, and overfit their many ids.
    Boosting stops by the log loss on the rows held out, which also chooses among `CATEGORIES_APART`. Rows beyond
    `most_values` are left out evenly.
    """
    num_rows, _ = _count_both_classes(spec, splits)
    require_extra("lightgbm", "baselines")
    table = _Table(spec, splits)
    if not table.width:
        raise DataError(f"{spec.folder}: holds no feature that a model may read")
    share = min(1.0, most_values / (num_rows * max(1, table.width)))
    kept, held_out = _read_sample(spec, splits, table, share)
    booster, tried = _fit_trees(kept, held_out, table.categorical)
    best = booster.best_iteration or booster.current_iteration()
    facts: dict[str, object] = {"rows": _num_rows(kept + held_out), "of_rows": num_rows, "trees": best}
    facts |= {"log_loss_by_max_cat_threshold": tried} if len(tried) > 1 else {}
    facts |= table.facts

    def logits(columns: Mapping[str, Column]) -> Scores:
        rows = table.encode(columns)
        return np.asarray(booster.predict(rows, raw_score=True, num_iteration=best)) if len(rows) else np.zeros(0)

    return Scorer(table.features, logits, facts)


def _fit_trees(
    kept: Sequence[_Block], held_out: Sequence[_Block], categorical: Sequence[int]
) -> tuple[Any, dict[str, float]]:
    """The booster with the least log loss on the held-out rows, and the loss of each one tried."""
    lightgbm = require_extra("lightgbm", "baselines")
    judges = _have_both_classes(kept) and _have_both_classes(held_out)
    matrix, labels = _joined(kept if _have_both_classes(kept) else [*kept, *held_out])
    data = lightgbm.Dataset(matrix, labels, categorical_feature=list(categorical))
    judging = [data.create_valid(*_joined(held_out))] if judges else []
    tried: dict[str, float] = {}
    boosters = []
    for apart in CATEGORIES_APART if judges and categorical else CATEGORIES_APART[:1]:
        booster = lightgbm.train(
            {**PARAMETERS, "max_cat_threshold": apart},
            data,
            num_boost_round=MOST_ROUNDS if judges else ROUNDS_UNJUDGED,
            valid_sets=judging,
            callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False)] if judges else [],
        )
        boosters.append(booster)
        tried[str(apart)] = float(booster.best_score["valid_0"]["binary_logloss"]) if judges else 0.0
    return boosters[int(np.argmin(list(tried.values())))], tried


def _joined(parts: Sequence[_Block]) -> _Block:
    matrices, labels = zip(*parts, strict=True)
    return np.concatenate(matrices), np.concatenate(labels)


def _have_both_classes(parts: Sequence[_Block]) -> bool:
    positives = sum(int(labels.sum()) for _, labels in parts)
    return 0 < positives < _num_rows(parts)


class _Table:
    """The columns of the matrix: numbers, one category an id feature, counts of a list's ids and its length."""

    def __init__(self, spec: FeatureSpec, splits: Sequence[str]) -> None:
        self.spec, self.numbers, self.crosses = spec, spec.inputs(categorical=False), _crosses(spec)
        ids = tuple(name for name in spec.inputs(categorical=True) if name not in self.crosses)
        self.lists = tuple(name for name in ids if spec.features[name].is_list)
        self.ids = tuple(name for name in ids if name not in self.lists)
        self.features = (*self.numbers, *self.ids, *self.lists)
        counts = _id_counts(spec, splits, ids)
        self.codes = {name: _codes(counts[name], MOST_CATEGORIES) for name in self.ids}
        self.listed = {name: _codes(counts[name], MOST_LISTED) for name in self.lists}
        most = dict.fromkeys(self.ids, MOST_CATEGORIES) | dict.fromkeys(self.lists, MOST_LISTED)
        self.cut = [name for name in ids if np.count_nonzero(counts[name]) > most[name]]
        num_numbers = _num_values(spec, categorical=False)
        self.categorical = [num_numbers + place for place in range(len(self.ids))]
        self.width = num_numbers + len(self.ids) + sum(_num_codes(each) for each in self.listed.values())

    @property
    def facts(self) -> dict[str, object]:
        """The features whose rarer ids share a category or are not counted, and those left out, for a report."""
        found = {"rare_ids_together": self.cut, "crosses_left_out": list(self.crosses)}
        return {what: names for what, names in found.items() if names}

    def encode(self, columns: Mapping[str, Column]) -> NDArray[np.float32]:
        """(B, C) matrix of rows."""
        num_rows = len(next(iter(columns.values()))) if columns else 0
        made = np.empty((num_rows, self.width), dtype=np.float32)
        if self.numbers:
            numbers = _numbers_of(self.spec, columns, self.numbers)
            made[:, : numbers.shape[1]] = numbers
        for place, name in zip(self.categorical, self.ids, strict=True):
            column = columns[name]
            assert not isinstance(column, Ragged)
            made[:, place] = self.codes[name][column]
        at = self.width - sum(_num_codes(each) for each in self.listed.values())
        for name, codes in self.listed.items():
            wide, column = _num_codes(codes), columns[name]
            assert isinstance(column, Ragged)
            made[:, at : at + wide] = _counts_of_lists(_without_padding(self.spec, name, column), codes)
            at += wide
        return made


def _crosses(spec: FeatureSpec) -> tuple[str, ...]:
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


def _codes(counts: Ids, most: int) -> NDArray[np.int32]:
    """The code of each id: from 1 for the most frequent; 0 for those beyond `most`, and those that no row has."""
    frequent = np.argsort(-counts, kind="stable")[:most]
    frequent = frequent[counts[frequent] > 0]
    codes = np.zeros(len(counts), dtype=np.int32)
    codes[frequent] = np.arange(1, len(frequent) + 1)
    return codes


def _num_codes(codes: NDArray[np.int32]) -> int:
    """Codes in use, 0 included."""
    return int(codes.max(initial=0)) + 1


def _counts_of_lists(column: Ragged, codes: NDArray[np.int32]) -> NDArray[np.float32]:
    """(B, codes) the length of each row's list, then the count of each code from 1."""
    rows, wide = np.repeat(np.arange(len(column)), column.lengths), _num_codes(codes)
    places = rows * wide + codes[column.values.astype(np.int64)]
    made = np.bincount(places, minlength=len(column) * wide).reshape(-1, wide).astype(np.float32)
    made[:, 0] = column.lengths
    return made


ROW_BASELINES: Mapping[str, Callable[[FeatureSpec, Sequence[str]], Scorer]] = MappingProxyType(
    {"constant": constant, "logistic_regression": logistic_regression, "lightgbm": boosted_trees}
)


# --- samples of rows -------------------------------------------------------------------------------------------------


_Block = tuple[Any, NDArray[np.bool_]]  # rows of a matrix, and their labels


def _read_sample(
    spec: FeatureSpec, splits: Sequence[str], layout: _OneHot | _Table, share: float
) -> tuple[list[_Block], list[_Block]]:
    """An even share of the rows, and those of it that are held out."""
    kept: list[_Block] = []
    held_out: list[_Block] = []
    for first, block in row_blocks(spec, splits, (*layout.features, spec.label)):
        labels = _labels_of(block, spec)
        numbers = np.arange(first, first + len(labels), dtype=np.uint64)
        matrix = layout.encode({name: block[name] for name in layout.features})
        chosen, judging = _uniform(numbers, 1) < share, _uniform(numbers, 2) < HELD_OUT
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
