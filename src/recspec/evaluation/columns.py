"""Columns that describe users, items and rows: features of the dataset, and raw columns of its catalogues.

Shapes: U users; N items; L values of a list; V distinct values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recspec.base.errors import DataError, RecspecError, SettingsError, unknown
from recspec.base.summaries import as_data
from recspec.data.encoding import Encoders
from recspec.data.storage import open_split
from recspec.evaluation.interactions import blocks, id_feature, scalar
from recspec.evaluation.question import Question
from recspec.feature_spec import FeatureSpec
from recspec.loading import item_features

Owner = Literal["user", "item", "row"]

RANGES = 4
"""Ranges of about equally many entries into which a column of numbers is cut."""

MOST_VALUES = 20
"""Values that stay apart; the others, which are rarer, become one."""


@dataclass(frozen=True)
class Codes:
    """A column as codes: of every user or item by id, or of every row of the split."""

    owner: Owner
    codes: NDArray[np.int64]
    """-1 without a value."""
    names: Sequence[str]
    """(V,) the value of each code."""


def default_kind(spec: FeatureSpec) -> str | None:
    """The first categorical item feature beside the id."""
    own = id_feature(spec, "item")
    return next((name for name in spec.role("item") if name != own and spec.features[name].is_categorical), None)


def kinds_of_items(question: Question, name: str) -> NDArray[np.integer]:
    """(N, L) ids of each item in a categorical feature or a catalogue column, 0 for none.

    Every value has its own id: rare ones that share one, as in slices, would be of one kind.
    """
    spec = question.spec
    if name in spec.role("item") and spec.features[name].is_categorical:
        found = item_features(spec, (*question.before, question.split), [name])
        ids = found[name].numpy() if found else np.zeros(spec.num_ids(spec.item_id), np.int64)
        if ids.ndim == 1:
            ids = ids[:, None] + (not spec.reserves_unknown(name))  # 0 is a value where no id means unknown
        return ids
    if (table := _catalogue(spec, "item", name)) is None:
        raise SettingsError(f"diversity: {unknown('item column', name, _columns(spec, 'item'))}")
    if pa.types.is_floating(table.type):
        table = pa.array(table.to_numpy(zero_copy_only=False), from_pandas=True)  # NaN is no value
    codes = table.dictionary_encode().indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return _by_id(spec, "item", codes + 1, 0)[:, None]


def codes_of(question: Question, name: str) -> Codes:
    """A feature of users, items or rows, or a raw column of a catalogue, as codes.

    Raises:
        SettingsError: for an unknown name, or a column of lists.
    """
    spec = question.spec
    for owner in ("user", "item"):
        own = id_feature(spec, owner)
        table = _catalogue(spec, owner, name) if own is not None else None
        if table is not None and not (name in spec.features and name not in spec.role(owner)):
            codes, names = _encoded(table) if name not in spec.features else _of_feature(spec, name, table.to_numpy())
            return Codes(owner, _by_id(spec, owner, codes, -1), names)
    if name not in spec.columns(question.split):
        if any(name in _columns(spec, owner) for owner in ("user", "item")):
            raise SettingsError(
                f"slice: '{name}' holds lists in the catalogue; slices are by a column of single values"
            )
        known = [*spec.columns(question.split), *_columns(spec, "user"), *_columns(spec, "item")]
        raise SettingsError(f"slice: {unknown('slice', name, ['activity', 'popularity', *dict.fromkeys(known)])}")
    if spec.features[name].is_list:
        raise SettingsError(f"slice: '{name}' holds a list in each row; slices are by a column of single values")
    reader = open_split(spec, question.split, [name])
    values = np.concatenate([np.zeros(0), *(scalar(block[name]) for _, block in blocks(reader))])
    return Codes("row", *_of_feature(spec, name, values))


def ranges(
    values: NDArray[Any], among: NDArray[Any], whole_number: Callable[[float], str] = as_data
) -> tuple[NDArray[np.int64], list[str]]:
    """The range of each value, of `RANGES` ranges with about equally many of the values `among`; their names."""
    among = among[np.isfinite(among)]
    cuts = np.unique(np.quantile(among, np.arange(1, RANGES) / RANGES)) if len(among) else np.zeros(0)
    codes = np.searchsorted(cuts, values, side="left")  # a cut ends its range
    whole = bool(len(among)) and bool((among == np.floor(among)).all())
    names = []
    for place in range(len(cuts) + 1):
        held = among[np.searchsorted(cuts, among, side="left") == place]
        if not len(held):
            names.append("none")
            continue
        low, high = float(held.min()), float(held.max())
        shown = [whole_number(each) if whole else f"{each:.4g}" for each in (low, high)]
        names.append(shown[0] if low == high else f"{shown[0]} to {shown[1]}")
    return np.where(np.isfinite(values), codes, -1), names


def _of_feature(spec: FeatureSpec, name: str, values: NDArray[Any]) -> tuple[NDArray[np.int64], list[str]]:
    feature = spec.features[name]
    if not feature.is_categorical:
        return _numbers(values)
    distinct, codes = np.unique(values.astype(np.int64), return_inverse=True)
    raw, unknown_id = _raw_values(spec, name), 0 if spec.reserves_unknown(name) else -1

    def named(place: int) -> str:
        number = int(distinct[place])
        if number == unknown_id:
            return "unknown"
        known = raw is not None and 0 < number <= len(raw)
        return str(raw[number - 1].as_py()) if raw is not None and known else str(number)

    return _commonest(codes, len(distinct), named)


def _numbers(values: NDArray[Any]) -> tuple[NDArray[np.int64], list[str]]:
    distinct, codes = np.unique(values, return_inverse=True)
    if len(distinct) <= MOST_VALUES and not np.isnan(distinct.astype(np.float64)).any():
        return codes, [as_data(each) for each in distinct.tolist()]
    return ranges(values.astype(np.float64), values.astype(np.float64))


def _raw_values(spec: FeatureSpec, name: str) -> pa.Array | None:
    """The raw values of a feature's ids from 1 on, where the dataset keeps its vocabulary."""
    if "encoders" not in spec.metadata:
        return None
    try:
        return Encoders.load(spec.folder).vocabulary_of(name).values
    except (RecspecError, KeyError):  # hashed values have none
        return None


def _commonest(
    codes: NDArray[np.int64], count: int, named: Callable[[int], str]
) -> tuple[NDArray[np.int64], list[str]]:
    """Codes of the most frequent of `count` values in their order, and one for all others; their names."""
    if count <= MOST_VALUES:
        return codes, [named(place) for place in range(count)]
    counts = np.bincount(codes[codes >= 0], minlength=count)
    kept = np.sort(np.argsort(-counts, kind="stable")[: MOST_VALUES - 1])
    new = np.full(count + 1, len(kept))
    new[kept], new[-1] = np.arange(len(kept)), -1  # a code of -1 reads the last place
    return new[codes], [*(named(int(each)) for each in kept), "others"]


def _catalogue(spec: FeatureSpec, owner: str, name: str) -> pa.Array | None:
    """A column of single values of a catalogue, one for each id after unknown; None without it."""
    if name not in _columns(spec, owner):
        return None
    file = spec.catalogue(owner)  # type: ignore[arg-type]
    try:
        column = pq.read_table(file, columns=[name], partitioning=None).column(0).combine_chunks()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{file}, column '{name}': damaged: {error}") from None
    return None if pa.types.is_nested(column.type) else column


def _columns(spec: FeatureSpec, owner: str) -> list[str]:
    file: Path | None = spec.catalogue(owner) if id_feature(spec, owner) is not None else None  # type: ignore[arg-type]
    return list(pq.read_schema(file).names) if file is not None else []


def _encoded(column: pa.Array) -> tuple[NDArray[np.int64], list[str]]:
    """Codes of a raw column, -1 for missing values; numbers of many values in ranges."""
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return _numbers(column.cast(pa.float64()).to_numpy(zero_copy_only=False))
    try:
        encoded = column.cast(pa.string()).dictionary_encode()
    except pa.ArrowException:
        raise SettingsError(f"a catalogue column of {column.type} has no values to measure by") from None
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return _commonest(codes, len(encoded.dictionary), lambda place: str(encoded.dictionary[place].as_py()))


def _by_id(spec: FeatureSpec, owner: str, of_rows: NDArray[np.int64], none: int) -> NDArray[np.int64]:
    """Values of a catalogue's rows by id; reserved ids and ids after the last row have `none`."""
    own = id_feature(spec, owner)  # type: ignore[arg-type]
    assert own is not None
    found = np.full(spec.num_ids(own), none, dtype=np.int64)
    first = int(spec.reserves_unknown(own))
    rows = of_rows[: len(found) - first]
    found[first : first + len(rows)] = rows
    return found
