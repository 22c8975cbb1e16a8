"""Raw columns become features with encoders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import ibis
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec.data.encoding import (
    MOST_TEXTS,
    BucketEncoder,
    Encoder,
    HashEncoder,
    ScaleEncoder,
    Scaler,
    TextEncoder,
    VectorEncoder,
    Vocabulary,
    VocabularyEncoder,
    combined,
    fit_projection,
    split_lists,
    vector_scale,
    vectors_of,
)
from recspec.data.prepare.backend import Backend, count_rows, fetch, figures
from recspec.data.prepare.tables import counts_by

FittedColumn = tuple[Encoder, Vocabulary | None]
Kind = Literal["category", "number", "list", "hash", "bucket", "cross", "vector", "text", "clock"]
SKEWED = 1.5  # skewness from which a number's logarithm may be scaled in its place; an exponential distribution has 2
WIDEST = 4.0  # deviations that the range of a limited number takes at most
VALUES_AT_ONCE = 1 << 20  # raw values that are held to fit columns in memory


@dataclass(frozen=True)
class Column:
    """A feature made from a raw column, or a cross of several features."""

    name: str
    kind: Kind
    raw: str | None = None  # the raw column, if its name differs from the feature's
    called: str | None = None  # its name in raw files and in rows to predict, if it differs again
    separator: str | None = None  # of the values of a list that is one text
    encoder: Encoder | None = None  # if given, nothing is fitted
    size: int = 0  # the cardinality of a hash or cross; the number of about equally full buckets; of a vector or text
    log1p: bool | None = False  # scales the logarithm of a number; None: if train's are skewed and not negative
    limited: bool = False  # takes a number beyond the range of train as the nearer end of the range
    crossed: Sequence[str] = ()  # the features of a cross; buckets are crossed as buckets
    is_list: bool = False  # whether a hashed column holds several values per row

    @property
    def source(self) -> str:
        return self.raw or self.name

    @property
    def column(self) -> str | None:
        """The raw column as an encoder names it: None if it has the feature's name."""
        name = self.called or self.source
        return name if name != self.name else None


def fit(column: Column, raw: pa.Array, min_count: int = 1) -> FittedColumn:
    """Fit the encoder of a column in memory; values in fewer than `min_count` rows become unknown."""
    if column.encoder is not None:
        return column.encoder, None
    if column.kind == "number":
        return _fit_held_numbers(column, raw), None
    if column.kind == "vector":
        return fit_vectors(column.column, column.size, [raw]), None
    if column.kind == "text":
        return fit_texts(column.column, column.name, column.size, raw), None
    if column.kind in ("bucket", "category"):
        counted = pc.value_counts(pc.drop_null(raw))
        return _fit_counted(column, counted.field("values"), counted.field("counts"), min_count)
    if column.kind == "hash" and not column.is_list:
        return HashEncoder(column=column.column, cardinality=column.size), None
    flat, offsets = split_lists(raw, column.separator)
    counted = pc.value_counts(flat)
    kept = counted.field("values").filter(pc.greater_equal(counted.field("counts"), min_count))
    return _list_encoder(column, int(np.diff(offsets).max(initial=0)), kept)


def fit_columns(
    backend: Backend, rows: Table, num_rows: int, columns: Sequence[Column], min_count: int = 1
) -> Iterator[FittedColumn]:
    """Fit columns of a table, in order; of a small table many with one query, as a query costs more than its values."""
    step = VALUES_AT_ONCE // max(1, num_rows)
    for start in range(0, len(columns), max(1, step)):
        some = columns[start : start + max(1, step)]
        names = dict.fromkeys(column.source for column in some if column.encoder is None)
        if not step or not names:
            yield from (fit_in_table(backend, rows, column, min_count) for column in some)
            continue
        held = fetch(backend, rows.select(*names))
        for column in some:
            raw = pa.nulls(0) if column.encoder is not None else combined(held.column(column.source))
            yield fit(column, raw, min_count)


def fit_in_table(backend: Backend, rows: Table, column: Column, min_count: int = 1) -> FittedColumn:
    """Fit the encoder of a column of a table of any size; values in fewer than `min_count` rows become unknown."""
    if column.encoder is not None:
        return column.encoder, None
    name = column.column
    if column.kind == "number":
        return _fit_numbers(backend, rows, column), None
    if column.kind == "vector":
        held = rows.select(column.source)
        return fit_vectors(name, column.size, (batch.column(0) for batch in backend.batches(held))), None
    if column.kind == "text":
        return fit_texts_in_table(backend, rows, column.source, name, column.name, column.size), None
    if column.kind in ("bucket", "category"):
        counted = fetch(backend, counts_by(rows, column.source))
        return _fit_counted(column, counted.column(column.source), counted.column("rows"), min_count)
    if column.kind == "hash" and not column.is_list:
        return HashEncoder(column=name, cardinality=column.size), None
    seen: dict[object, int] = {}
    longest, kind = 0, None
    for batch in backend.batches(rows.select(column.source)):
        flat, offsets = split_lists(batch.column(0), column.separator)
        longest, kind = max(longest, int(np.diff(offsets).max(initial=0))), flat.type
        for entry in pc.value_counts(flat).to_pylist() if column.kind == "list" else ():
            seen[entry["values"]] = seen.get(entry["values"], 0) + entry["counts"]
    kept = [value for value, count in seen.items() if count >= min_count]
    return _list_encoder(column, longest, pa.array(kept, kind if kept else pa.string()))


def _fit_held_numbers(column: Column, raw: pa.Array) -> ScaleEncoder:
    """The scale of a number in memory, or of its logarithm."""
    asked = [False, True] if column.log1p is None else [column.log1p]
    limits: tuple[float | None, float | None] = (None, None)
    scalers, skews = {}, {}
    for log in asked:
        values = ScaleEncoder(mean=0, std=1, log1p=log).transformed(raw)
        missing, values = bool(np.isnan(values).any()), values[~np.isnan(values)]
        if not log and len(values):
            limits = float(values.min()), float(values.max())
            if missing and limits[0] == limits[1]:
                return _present_or_missing(column, limits)
        with np.errstate(over="ignore", invalid="ignore"):  # moments of the largest numbers are infinite
            scaler = Scaler.of(values.mean(), values.std()) if len(values) else Scaler.of(None, None)
            skew = abs((((values - scaler.mean) / scaler.std) ** 3).mean()) if len(values) else 0.0
        scalers[log], skews[log] = scaler, float(skew) if values.min(initial=0) >= 0 else 0.0
    return _scale(column, scalers, skews, limits)


def _scale(
    column: Column,
    scalers: Mapping[bool, Scaler],
    skews: Mapping[bool, float],
    limits: tuple[float | None, float | None],
) -> ScaleEncoder:
    """The scale of a number or of its logarithm, which is chosen if it is much less skewed."""
    low, high = limits if column.limited else (None, None)
    bounds = {} if low is None or high is None else {"low": low, "high": high, "outside": None}
    log = next(iter(scalers)) if len(scalers) == 1 else skews[False] > SKEWED and skews[True] * 2 < skews[False]
    scaler = scalers[log]
    encoder = ScaleEncoder(column=column.column, mean=scaler.mean, std=scaler.std, log1p=log, **bounds)
    if bounds:  # a number that is seldom anything but 0 has a tiny deviation, and would be huge in these rows
        least, most = encoder.transformed([low, high])
        encoder = encoder.model_copy(update={"std": max(scaler.std, float(f"{(most - least) / WIDEST:.9g}"))})
    return encoder


def _present_or_missing(column: Column, limits: tuple[float, float]) -> ScaleEncoder:
    """The scale of a number that has one value or none: 1 and, as the mean, 0."""
    return _scale(column, {False: Scaler(limits[0] - 1, 1.0)}, {False: 0.0}, limits)


def _fit_numbers(backend: Backend, rows: Table, column: Column) -> ScaleEncoder:
    """The scale of a number, or of its logarithm."""
    values = rows[column.source]
    real = values.cast("float64")  # the largest whole number has no successor
    forms = {False: values, True: real.sign() * (real.abs() + 1).ln()}
    asked = [*forms] if column.log1p is None else [column.log1p]
    moments = {
        f"{what}_{log}": value
        for log in asked
        for what, value in (("mean", forms[log].mean()), ("std", forms[log].std(how="pop")))
    }
    asked_of = {"least": real.min(), "most": real.max(), "missing": values.isnull().any(), **moments}
    found = figures(backend, rows, asked_of)
    if found["missing"] and found["least"] is not None and found["least"] == found["most"]:
        return _present_or_missing(column, (found["least"], found["most"]))
    scalers = {log: Scaler.of(found[f"mean_{log}"], found[f"std_{log}"]) for log in asked}
    skews = dict.fromkeys(asked, 0.0)
    if len(asked) > 1 and found["least"] is not None and found["least"] >= 0:
        cubes = {log: (((forms[log] - scaler.mean) / scaler.std) ** 3).mean() for log, scaler in scalers.items()}
        skews = {log: abs(cube or 0.0) for log, cube in figures(backend, rows, cubes).items()}
    return _scale(column, scalers, skews, (found["least"], found["most"]))


def _fit_counted(column: Column, values: pa.Array, counts: pa.Array, min_count: int) -> FittedColumn:
    """The encoder of a bucket or a category, given the distinct values and their numbers of rows."""
    name = column.column
    if column.kind == "bucket":
        cuts = boundaries(np.asarray(values), np.asarray(counts), column.size)
        return BucketEncoder(column=name, boundaries=cuts), None
    kept = values.filter(pc.greater_equal(counts, min_count))
    return VocabularyEncoder(column=name, vocabulary=column.name), Vocabulary.of(kept)


def _list_encoder(column: Column, longest: int, values: pa.Array) -> FittedColumn:
    name, separator = column.column, column.separator
    length = max(longest, 2)  # a length of 1 means a scalar
    if column.kind == "hash":
        return HashEncoder(column=name, cardinality=column.size, separator=separator, length=length), None
    assert column.kind == "list", column
    encoder = VocabularyEncoder(column=name, vocabulary=column.name, separator=separator, length=length)
    return encoder, Vocabulary.of(values)


def boundaries(values: NDArray[np.number], counts: NDArray[np.int64], num_buckets: int) -> tuple[float, ...]:
    """Boundaries between about equally full buckets, ascending, from distinct numbers and their numbers of rows.

    A value in many rows, such as zero, fills a bucket of its own; so there may be fewer buckets than `num_buckets`.
    """
    order = np.argsort(values, kind="stable")
    left, inside, buckets = int(counts.sum()), 0, num_buckets
    cuts: list[float] = []
    for value, count in zip(values[order].tolist(), counts[order].tolist(), strict=True):
        full = buckets > 1 and inside and inside + count / 2 > left / buckets
        if full and (not cuts or float(value) > cuts[-1]):  # as floats, neighbouring large numbers are the same
            cuts.append(float(value))
            left, inside, buckets = left - inside, 0, buckets - 1
        inside += count
    return tuple(cuts)


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
