"""Columns that alone order the labels almost perfectly, as outcomes do that are known only after the label.

Shapes: N rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from recspec.data.storage.ragged import Column, Ragged, concatenate_column
from recspec.data.storage.splits import open_split
from recspec.feature_spec import FeatureSpec
from recspec.metrics import measures as metrics

LABEL_AUC = 0.99
"""AUC of one column alone from which it is suspected to hold the label."""
FEWEST_ROWS = 30
"""Of each class; the AUC of fewer is too uncertain."""
MOST_ROWS, MOST_VALUES, SAMPLE_BLOCKS = 32_768, 1 << 21, 8
"""What is read of train at most, in blocks at even distances."""
MOST_CODES = 256
"""Distinct numbers, above which they are cut into so many ranges with about equally many rows."""
SMOOTHING = 1.0  # rows at the rate of all that each value's rate counts more


def label_columns(spec: FeatureSpec, read: Collection[str] | None = None) -> dict[str, float]:
    """The columns of train that alone order its labels, and their AUC; ids of users and items are none of them.

    About `MOST_ROWS` rows are read, and fewer of many columns.

    Args:
        read: Columns that a model reads; by default all that a model may.
    """
    if spec.has_series or "train" not in spec.splits or not {*spec.role("label")} & {*spec.columns("train")}:
        return {}
    ids = {spec.metadata.get(f"{role}_id") for role in ("user", "item")}
    names = [
        name
        for name in spec.inputs()
        if name not in ids and name in spec.columns("train") and (read is None or name in read)
    ]
    if not names:
        return {}
    reader = open_split(spec, "train", [*names, spec.label])
    rows = min(sample_rows(len(names)), reader.num_rows)
    each = max(1, -(-rows // SAMPLE_BLOCKS))
    starts = np.unique(np.linspace(0, reader.num_rows - each, -(-rows // each)).astype(np.int64)).tolist()
    blocks = [reader.read(start, start + each) for start in starts]
    columns = {name: concatenate_column([block[name] for block in blocks]) for name in (*names, spec.label)}
    labels = np.asarray(columns.pop(spec.label)).reshape(-1) > 0
    return telling(columns, labels)


def sample_rows(num_columns: int) -> int:
    """How many rows are enough to judge so many columns: fewer of many columns."""
    return max(1, min(MOST_ROWS, MOST_VALUES // (num_columns + 1)))


def telling(columns: Mapping[str, Column], labels: NDArray[np.bool_]) -> dict[str, float]:
    """The columns that order labels (N,) with an AUC of at least `LABEL_AUC`, and their AUC.

    Of a list its length counts. Numbers may order labels either way or by their ranges, which like categories take the
    label rate that their value has in the other half of the rows. None has an AUC with fewer than `FEWEST_ROWS` rows of
    a class.
    """
    if not FEWEST_ROWS <= int(labels.sum()) <= len(labels) - FEWEST_ROWS:
        return {}
    half = np.random.default_rng(0).random(len(labels)) < 0.5
    found = {name: _auc(_numbers(column), labels, half) for name, column in columns.items()}
    return {name: auc for name, auc in found.items() if auc >= LABEL_AUC}


def _numbers(column: Column) -> NDArray[np.float64]:
    if isinstance(column, Ragged):
        return column.lengths.astype(np.float64)
    return np.asarray(column).reshape(len(column), -1)[:, 0].astype(np.float64)


def _auc(values: NDArray[np.float64], labels: NDArray[np.bool_], half: NDArray[np.bool_]) -> float:
    ordered = metrics.auc(np.nan_to_num(values, nan=-np.inf), labels)
    codes = np.unique(values, return_inverse=True)[1]
    if codes.max(initial=0) >= MOST_CODES:
        cuts = np.unique(np.nanquantile(values, np.linspace(0, 1, MOST_CODES + 1)[1:-1]))
        codes = np.where(np.isnan(values), len(cuts) + 1, np.searchsorted(cuts, values))
    rates = np.empty(len(values))
    for part in (half, ~half):
        rates[part] = _rates(codes[~part], labels[~part], codes.max())[codes[part]]
    return max(ordered, 1 - ordered, metrics.auc(rates, labels))


def _rates(codes: NDArray[np.int64], labels: NDArray[np.bool_], most: int) -> NDArray[np.float64]:
    """The label rate of each code from 0 to `most`, drawn to that of all rows where they are few."""
    counts, positives = (np.bincount(codes, weights=weights, minlength=most + 1) for weights in (None, labels))
    rates: NDArray[np.float64] = (positives + SMOOTHING * labels.mean()) / (counts + SMOOTHING)
    return rates
