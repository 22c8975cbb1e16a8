"""`seen.parquet`: the items that each user acted on, whatever the split, the rating or the weight of the event.

A row is a pair of ids, `user_id` and `item_id`, and the number of the first split whose rows know of it: 0 train,
1 valid, 2 test, 3 fold_in. Rows are sorted by user and item, and no pair repeats.

`dislikes.parquet`, of the same form, holds those that the user disliked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recspec.base.errors import DataError
from recspec.base.files import special, whole_file
from recspec.feature_spec import FOLD_IN, SPLITS, FeatureSpec

SEEN_FILE, DISLIKES_FILE = "seen.parquet", "dislikes.parquet"
UNTIL = "history_until"
"""Column of `users.parquet` with the time of each user's last row, from which the gaps of the history count."""
ROWS_PER_GROUP = 131_072
SEEN_SPLITS = (*SPLITS, FOLD_IN)
_SCHEMA = pa.schema({"user_id": pa.int32(), "item_id": pa.int32(), "split": pa.int8()})

Pairs = tuple[NDArray[np.int32], NDArray[np.int32]]


def write_seen_file(path: Path, batches: Iterable[pa.RecordBatch]) -> None:
    """Write rows that are sorted already, in row groups of equal size, so that no engine's batches show in the file."""
    with whole_file(path) as temporary, pq.ParquetWriter(temporary, _SCHEMA) as writer:
        waiting = _SCHEMA.empty_table()
        for batch in batches:
            waiting = pa.concat_tables([waiting, pa.Table.from_batches([batch]).cast(_SCHEMA)])
            while waiting.num_rows >= ROWS_PER_GROUP:
                writer.write_table(waiting.slice(0, ROWS_PER_GROUP).combine_chunks())
                waiting = waiting.slice(ROWS_PER_GROUP)
        writer.write_table(waiting.combine_chunks())


def read_seen_pairs(
    path: Path, splits: Sequence[str] = SEEN_SPLITS, users: range | None = None, most: int | None = None
) -> Pairs:
    """Users (P,) and items (P,) that are known by some splits, in order; with `users`, those of a range of ids.

    Raises:
        DataError: if the file is damaged, or has more than `most` rows.
    """
    numbers = [SEEN_SPLITS.index(split) for split in splits if split in SEEN_SPLITS]
    wanted = pc.field("split").isin(pa.array(numbers, pa.int8()))
    if users is not None:
        wanted &= (pc.field("user_id") >= users.start) & (pc.field("user_id") < users.stop)
    try:
        if problem := special(path):
            raise DataError(f"{path}: {problem}")
        if not pq.read_schema(path).equals(_SCHEMA):
            raise DataError(f"{path}: damaged: expected the columns user_id, item_id, split of int32, int32, int8")
        if most is not None and (rows := pq.read_metadata(path).num_rows) > most:
            raise DataError(f"{path}: damaged: has {rows:,} rows; expected at most {most:,}, one for each pair of ids")
        table = pq.read_table(path, filters=wanted, partitioning=None)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: can't be read as Parquet: {error}; prepare the dataset again") from None
    if table.column("user_id").null_count or table.column("item_id").null_count:
        raise DataError(f"{path}: damaged: an id is missing")
    return table.column("user_id").to_numpy(), table.column("item_id").to_numpy()


def read_seen(
    spec: FeatureSpec, splits: Sequence[str] = SEEN_SPLITS, named: Literal["seen", "dislikes"] = "seen"
) -> Pairs | None:
    """Users (P,) and items (P,) that are known by some splits of a dataset; None if it keeps no such file.

    Raises:
        DataError: if the file is damaged, or holds ids that the dataset lacks.
    """
    name = spec.companions.get(named)
    if name is None:
        return None
    counts = {feature: spec.num_ids(feature) for feature in (spec.user_id, spec.item_id)}
    pairs = read_seen_pairs(path := spec.beside(name), splits, most=math.prod(counts.values()))
    for ids, (feature, most) in zip(pairs, counts.items(), strict=True):
        if len(ids) and not 0 < int(ids.min()) <= int(ids.max()) < most:
            raise DataError(
                f"{path}: damaged: holds ids of '{feature}' from {ids.min()} to {ids.max()}; expected 1 to {most - 1}"
            )
    return pairs
