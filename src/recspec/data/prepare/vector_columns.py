"""Encoders of columns that become vectors, fitted to raw values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import ibis
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ibis.expr.types import Table

from recspec.data.encoding import MOST_TEXTS, TextEncoder, VectorEncoder, fit_projection, vector_scale, vectors_of
from recspec.data.prepare.backend import Backend
from recspec.data.prepare.tables import count_rows, fetch

NUMBERS_AT_ONCE = 1 << 22  # of raw vectors that are held as float64


def fit_vectors(column: str | None, size: int, parts: Iterable[pa.Array]) -> VectorEncoder:
    """The scale of vectors of `size` numbers that come in parts; `column` is the raw column as an encoder names it."""
    squares, count = 0.0, 0
    step = max(1, NUMBERS_AT_ONCE // size)
    for part in (each[at : at + step] for each in parts for at in range(0, len(each), step)):
        vectors = vectors_of(part, size)
        squares += float(np.nansum(np.square(vectors)))
        count += int(np.count_nonzero(~np.isnan(vectors)))
    return VectorEncoder(column=column, length=size, scale=vector_scale(squares, count))


def fit_texts(column: str | None, name: str, size: int, raw: pa.Array) -> TextEncoder:
    """The projection of a column of texts to `size` numbers, fitted to `MOST_TEXTS` different texts at most."""
    texts = pc.unique(pc.drop_null(raw))
    texts = texts.take(pc.array_sort_indices(texts))
    return _encoder(column, name, size, texts[:: _step(len(texts))].to_pylist())


def fit_texts_in_table(
    backend: Backend, rows: Table, source: str, column: str | None, name: str, size: int
) -> TextEncoder:
    """`fit_texts` for the column `source` of a table of any size."""
    texts = rows.select(source).filter(ibis._[source].notnull()).distinct()
    step = _step(count_rows(backend, texts))
    numbered = texts.mutate(_place=ibis.row_number().over(ibis.window(order_by=source)))
    chosen = fetch(backend, numbered.filter(numbered["_place"] % step == 0).order_by(source))
    return _encoder(column, name, size, chosen.column(source).to_pylist())


def _step(num_texts: int) -> int:
    """Of how many texts in order one is taken."""
    return max(1, -(-num_texts // MOST_TEXTS))


def _encoder(column: str | None, name: str, size: int, texts: Sequence[str]) -> TextEncoder:
    return TextEncoder(column=column, projection=name, length=size).holding(fit_projection(texts, size))
