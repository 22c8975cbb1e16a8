"""The file of a text projection: a row for each kept gram, with its bucket, rarity and weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recspec.encoding.text_vectors import MOST_GRAMS, NUM_BUCKETS, TextProjection
from recspec.errors import DataError
from recspec.files import whole_file


def save_projection(projection: TextProjection, path: Path) -> None:
    """Write a Parquet file."""
    dim = projection.weights.shape[1]
    weights = pa.FixedSizeListArray.from_arrays(pa.array(projection.weights.reshape(-1)), dim)
    columns = {"bucket": projection.buckets, "rarity": projection.rarity, "weights": weights}
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        pq.write_table(pa.table(columns), temporary)


def load_projection(path: Path, dim: int) -> TextProjection:
    """Read what `save_projection` wrote. Raises `DataError` if the file is missing or holds anything else."""
    try:
        if pq.read_metadata(path).num_rows > MOST_GRAMS:
            raise DataError(f"{path}: has more than {MOST_GRAMS:,} rows; a projection of texts has at most as many")
        table = pq.read_table(path, columns=["bucket", "rarity", "weights"], partitioning=None).combine_chunks()
        buckets = table.column("bucket").to_numpy().astype(np.int64, casting="same_kind")
        rarity = table.column("rarity").to_numpy().astype(np.float32, casting="same_kind")
        flat = table.column("weights").combine_chunks().flatten().to_numpy(zero_copy_only=False)
        weights = flat.astype(np.float32, casting="same_kind").reshape(len(buckets), dim)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path}: can't be read as a projection of texts to {dim} numbers: {error}") from None
    rises = bool((np.diff(buckets) > 0).all()) and (not len(buckets) or 0 <= buckets[0] <= buckets[-1] < NUM_BUCKETS)
    if not (rises and (rarity > 0).all() and np.isfinite(rarity).all() and np.isfinite(weights).all()):
        raise DataError(f"{path}: is no projection of texts: its numbers are out of range")
    return TextProjection(buckets, rarity, weights)
