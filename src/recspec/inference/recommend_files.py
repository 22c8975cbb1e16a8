"""Recommendations for many users, written to a Parquet file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from recspec.errors import DataError
from recspec.inference.predict_files import Progress, silent
from recspec.inference.predictor import Predictor
from recspec.inference.row_files import parquet_writer


def read_users(path: Path) -> list[str]:
    """Raw user ids of a text file, one a line; empty lines are skipped.

    Raises:
        DataError: if the file can't be read.
    """
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: can't be read as a list of users: {error}") from None


def recommend_to_parquet(
    predictor: Predictor,
    users: Sequence[str | int] | None,
    out: Path,
    *,
    k: int = 10,
    include_seen: bool = False,
    progress: Progress = silent,
) -> tuple[int, int]:
    """Write the k best items of the users (None: of all) to Parquet, in blocks of bounded memory.

    Returns the number of users, and how many of them are unknown.

    Columns: user, known, rank (from 1), item, title, score; one row an item.
    """
    recommender, seen = predictor.recommender, predictor.seen
    if users is None:
        ids = np.arange(predictor.users.first_id, seen.num_users)
        raw = predictor.raw_ids("user", ids)
    else:
        ids = predictor.user_ids(users)
        raw = _as_array(users)
    with parquet_writer(out, _recommendation_schema(predictor, raw)) as write:
        for start in range(0, len(ids), recommender.block):
            part = slice(start, start + recommender.block)
            write(_recommendation_table(predictor, raw[part], ids[part], k, include_seen))
            progress("recommend", min(start + recommender.block, len(ids)), len(ids))
    return len(ids), int((ids < predictor.users.first_id).sum())


def _recommendation_schema(predictor: Predictor, users: pa.Array) -> pa.Schema:
    item = predictor.raw_ids("item", np.zeros(0, np.int64)).type
    return pa.schema(
        {
            "user": users.type,
            "known": pa.bool_(),
            "rank": pa.int32(),
            "item": item,
            "title": pa.string(),
            "score": pa.float32(),
        }.items()
    )


def _recommendation_table(
    predictor: Predictor, users: pa.Array, ids: NDArray[np.int64], k: int, include_seen: bool
) -> pa.Table:
    """Recommendations for a block of users, one row an item."""
    popular, counts = predictor.recommender.most_popular(k)
    known = ids >= predictor.users.first_id
    width = min(k, len(predictor.items))
    items = np.zeros((len(ids), width), np.int64)
    scores = np.full((len(ids), width), -np.inf, np.float32)
    if known.any():
        best, places = predictor.recommender.best(torch.from_numpy(ids[known]), k, include_seen=include_seen)
        scores[known], items[known] = best.numpy(), places.numpy()
    scores[~known, : len(counts)], items[~known, : len(popular)] = counts.numpy(), popular.numpy()
    kept = np.isfinite(scores)
    rows, ranks = np.nonzero(kept)
    chosen = items[kept]
    columns = [
        users.take(pa.array(rows)),
        pa.array(known[rows]),
        pa.array(ranks.astype(np.int32) + 1),
        predictor.raw_ids("item", chosen),
        predictor.items.titles_of(chosen),
        pa.array(scores[kept]),
    ]
    return pa.Table.from_arrays(columns, schema=_recommendation_schema(predictor, users))


def _as_array(users: Sequence[str | int]) -> pa.Array:
    """Raw user ids as one column; numbers and texts together become texts."""
    if all(isinstance(user, int) for user in users):
        return pa.array(users, pa.int64())
    return pa.array([str(user) for user in users], pa.string())
