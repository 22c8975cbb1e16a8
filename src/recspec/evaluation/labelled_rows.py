"""Labelled rows of a dataset, as classic models read them, and the form of a fitted classic model.

Shapes: B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import DataError
from recspec.data.storage import Column, Ragged, open_split
from recspec.evaluation.interactions import blocks, scalar
from recspec.feature_spec import FeatureSpec
from recspec.models import Scores


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


def num_values(spec: FeatureSpec, *, categorical: bool) -> int:
    """The most ids, or the count of numbers, in a row."""
    return sum(spec.features[name].length or 1 for name in spec.inputs(categorical=categorical))


def numbers_of(spec: FeatureSpec, columns: Mapping[str, Column], names: Sequence[str]) -> NDArray[np.float64]:
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
        bits = (numbers + np.uint64(salt << 40)) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits >> np.uint64(11)) / 2.0**53
