"""Columns of rows as a model reads them: raw values by the encoders, or ids and numbers as the rows hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from recspec.encoding import Encoders, Lists, split_lists
from recspec.errors import DataError, nearest
from recspec.spec import FeatureSpec
from recspec.storage import Ragged

Columns = Mapping[str, NDArray[np.generic] | Lists]
"""Feature -> its values, or the values and offsets of its lists."""


def is_list(column: pa.Array | pa.ChunkedArray) -> bool:
    """Whether a column holds lists."""
    kind = column.type
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def has_column(encoders: Encoders | None, feature: str, columns: Sequence[str]) -> bool:
    """Whether the columns that a feature is made from are all there."""
    if encoders is not None and feature in encoders.encoders:
        return encoders.can_encode(feature, columns)
    return feature in columns


def encode_columns(rows: pa.Table, names: Sequence[str], spec: FeatureSpec, encoders: Encoders | None) -> Columns:
    """Prepared columns of rows; without encoders, the rows hold ids and numbers already."""
    return prepared_columns(rows, names, spec) if encoders is None else encoders.encode(rows, names)


def prepared_columns(rows: pa.Table, names: Sequence[str], spec: FeatureSpec) -> Columns:
    """Columns of a dataset that recspec did not prepare: its rows hold ids and numbers. The error has all problems."""
    columns: dict[str, NDArray[np.generic] | Lists] = {}
    problems = []
    for name in names:
        if name not in rows.column_names:
            problems.append(f"no column '{name}'{nearest(name, rows.column_names)}")
            continue
        column = rows.column(name).combine_chunks()
        try:
            made = _prepared_lists if spec.features[name].is_list else _prepared_column
            columns[name] = made(column, spec, name)
        except (DataError, pa.ArrowException) as error:
            problems.append(f"column '{name}': {error}")
    if problems:
        raise DataError.of("raw rows", problems)
    return columns


def _prepared_column(column: pa.Array, spec: FeatureSpec, name: str) -> NDArray[np.generic]:
    if is_list(column):
        raise DataError("holds lists; expected one value a row")
    if column.null_count:
        row = column.is_null().index(True).as_py() + 1
        raise DataError(f"row {row} has no value; expected one in every row")
    if not spec.features[name].is_categorical:
        numbers: NDArray[np.generic] = column.cast(pa.float32()).to_numpy(zero_copy_only=False)
        return numbers
    return _in_range(column, np.arange(len(column) + 1), spec, name)


def _prepared_lists(column: pa.Array, spec: FeatureSpec, name: str) -> Lists:
    """Values and offsets of lists, without the padding that stands in them."""
    feature = spec.features[name]
    if not is_list(column):
        raise DataError(f"holds {column.type}; expected a list in every row, as JSONL and Parquet have them")
    flat, offsets = split_lists(column, None)
    if not feature.is_categorical:
        lengths = np.diff(offsets)
        wrong = np.flatnonzero(lengths != feature.length)
        if len(wrong) and name not in spec.role("history"):
            raise DataError(f"row {wrong[0] + 1} holds {lengths[wrong[0]]} numbers; expected {feature.length}")
        return flat.cast(pa.float32()).to_numpy(zero_copy_only=False), offsets
    padding = -1 if feature.padding is None else feature.padding
    lists = Ragged(flat.cast(pa.int64()).to_numpy(zero_copy_only=False), offsets)
    lists = lists.where(lists.values != padding)
    return _in_range(pa.array(lists.values), lists.offsets, spec, name), lists.offsets


def _in_range(values: pa.Array, offsets: NDArray[np.int64], spec: FeatureSpec, name: str) -> NDArray[np.int64]:
    """Ids as batches have them, of rows [offsets[i], offsets[i + 1])."""
    shift = spec.shift(name)
    ids: NDArray[np.int64] = values.cast(pa.int64()).to_numpy(zero_copy_only=False) + shift
    limit = spec.num_ids(name)
    wrong = np.flatnonzero((ids < shift) | (ids >= limit))
    if len(wrong):
        row = int(np.searchsorted(offsets, wrong[0], side="right"))
        verb = "holds" if spec.features[name].is_list else "is"
        raise DataError(f"row {row} {verb} {ids[wrong[0]] - shift}; expected an id in [0, {limit - shift})")
    return ids


def as_tensor(column: object, spec: FeatureSpec, name: str) -> Tensor:
    """A prepared column as the tensor a batch holds: (B,), or (B, length) with padding 0."""
    if isinstance(column, tuple):
        values, offsets = column
        length = spec.features[name].length
        assert length is not None, f"{name} is no list, but its column holds lists"
        return torch.from_numpy(Ragged(np.asarray(values), np.asarray(offsets)).pad(length))
    return torch.from_numpy(np.array(column))  # a copy: arrow's memory may not be written to
