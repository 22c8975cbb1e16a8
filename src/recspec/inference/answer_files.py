"""Answers of a model written to a file: probabilities of rows, recommendations for users."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recspec.base.errors import DataError, SettingsError, SpecError, unknown
from recspec.data.encoding import Predictions, Vocabulary, as_column, row_at
from recspec.data.storage import Column, Ragged, open_split
from recspec.evaluation import as_batch, check_same_features, id_feature
from recspec.feature_spec import FeatureSpec
from recspec.inference.catalogue import ROLES
from recspec.inference.predictor import Predictor
from recspec.inference.recommender import Asked
from recspec.inference.requesters import problems_by_row
from recspec.inference.row_files import ROW_FORMATS, ROWS, parquet_writer, read_rows, row_writer
from recspec.inference.wanted import Wanted
from recspec.models.layers import to_device

Progress = Callable[[str, float, float | None], None]


def silent(stage: str, done: float, total: float | None) -> None:
    """Report no progress."""


def predict_file(
    predictor: Predictor, rows: Path, out: Path | None, *, columns: Sequence[str] | None = None
) -> Predictions:
    """Score a csv, jsonl or parquet file of raw rows, and write them with `Predictor.column` to a file like `out`.

    Writes the columns named in `columns`, in that order, by default all. Without `out`, CSV goes to standard output.
    Files larger than memory pass through in blocks.

    Raises:
        DataError: if the file can't be read, or a row holds what it can't.
        SettingsError: if `out` has an ending that is none of .csv, .jsonl, .parquet, or a column is not there.
    """
    with row_writer(out) as write:
        return predict_tables(predictor, read_rows(rows), write, columns=columns, where=rows)


def predict_tables(
    predictor: Predictor,
    tables: Iterable[pa.Table],
    write: Callable[[pa.Table], None],
    *,
    columns: Sequence[str] | None = None,
    where: Path | str = "rows",
) -> Predictions:
    """Score tables of raw rows, and hand each on with `Predictor.column`; messages say where the rows are from.

    Raises:
        DataError: if a row holds what it can't, or the column to add is there already.
        SettingsError: if one of `columns` is not there.
    """
    total = Predictions()
    for table in tables:
        if columns is None and predictor.column in table.column_names:
            raise DataError(
                f"{where}: has a column '{predictor.column}' already; rename it, or name other columns to keep"
            )
        names = {name.strip(): name for name in table.column_names}  # ` ad_id` where blanks follow the commas
        values, found = _predict(predictor, table, total.rows)
        total += found
        if columns is not None:
            chosen = _chosen(columns, list(names), where, predictor.column)
            table = table.select([names[name] for name in chosen]).rename_columns(chosen)
        write(table.append_column(predictor.column, pa.array(values)))
    return total


def _predict(predictor: Predictor, rows: pa.Table, first: int) -> tuple[NDArray[np.float32], Predictions]:
    """The predictions of a block of a file; problems count its rows from the file's beginning."""
    try:
        return predictor.predict(rows)
    except DataError as error:
        if not first:
            raise
        raise DataError.of("raw rows", problems_by_row(error, lambda place: row_at(first + place))) from None


def predict_split(
    predictor: Predictor,
    spec: FeatureSpec,
    split: str,
    out: Path | Callable[[pa.Table], None] | None,
    *,
    columns: Sequence[str] | None = None,
    part: range | None = None,
    progress: Progress = silent,
) -> Predictions:
    """Score a split of a prepared dataset, labelled or not, and write its rows with `Predictor.column`.

    The columns before it are those of the group, the user's and the item's id and the label that the split holds, or
    `columns`: any features that are not lists. Ids are written as raw values where there is a vocabulary, and the
    unknown one as null. The ending of `out` says the format; without `out`, CSV goes to standard output. `out` may also
    be a function that receives tables. Rows pass through in blocks, so memory does not grow with their number. `part`
    keeps to some of the rows.

    Raises:
        SpecError: an unknown split, or another dataset than the model was trained on.
        SettingsError: if `out` has an ending that is none of .csv, .jsonl, .parquet, or a column is not there, or is
            called as the one to add.
    """
    _point_to_raw_rows(spec, split)
    held = spec.columns(split)
    check_same_features(predictor.model, spec, predictor.bundle.folder)
    features = predictor.model.features()
    ids = (spec.group, *(id_feature(spec, role) for role in ROLES), spec.label)
    shown = tuple(dict.fromkeys(name for name in ids if name is not None and name in held))
    if predictor.column in held and predictor.column in (shown if columns is None else columns):
        raise SettingsError(
            f"{spec.folder}, split '{split}': holds a column '{predictor.column}', which is also the "
            "name of the predictions; name other columns with --columns"
        )
    if columns is not None:
        scalars = [name for name in held if not spec.features[name].is_list]
        shown = _chosen(columns, scalars, f"{spec.folder}, split '{split}'", predictor.column)
    vocabularies = {name: found for name in shown if (found := _vocabulary_of(spec, name)) is not None}
    reader = open_split(spec, split, tuple(dict.fromkeys((*features, *shown))))
    total = Predictions()
    with row_writer(out) as write:
        rows_wanted = range(reader.num_rows) if part is None else part
        for first, last in pairwise(reader.blocks(ROWS).tolist()):
            start, stop = max(first, rows_wanted.start), min(last, rows_wanted.stop)
            if start >= stop and reader.num_rows:
                continue
            progress("predict", start, reader.num_rows)
            block = reader.read(start, stop)
            batch = to_device(as_batch({name: block[name] for name in features}, spec), predictor.device)
            values = predictor.predict_batch(batch, stop - start)
            rows = {name: _raw(block[name], spec, name, vocabularies.get(name)) for name in shown}
            write(pa.table({**rows, predictor.column: pa.array(values)}))
            total.rows += stop - start
    progress("predict", total.rows, reader.num_rows)
    return total


def _chosen(columns: Sequence[str], known: Sequence[str], where: Path | str, added: str) -> tuple[str, ...]:
    """The columns to write before the added one, each once."""
    chosen = tuple(dict.fromkeys(name for name in columns if name != added))
    strange = [name for name in chosen if name not in known]
    if strange:
        raise SettingsError(f"--columns: {where}: {unknown('column', strange, known)}")
    return chosen


def _point_to_raw_rows(spec: FeatureSpec, split: str) -> None:
    """Refuse the name of a file of raw rows beside the splits, such as Outbrain's clicks_test, naming that file."""
    if split in spec.splits or "/" in split:
        return
    for file in (spec.folder / f"{split}{ending}" for ending in ROW_FORMATS):
        if file.is_file():
            found = f"{file} is there: if it holds raw rows, `recspec predict RUN {file}`"
            raise SpecError(f"{spec.folder}: {unknown('split', split, spec.splits)}; {found}")


def _vocabulary_of(spec: FeatureSpec, name: str) -> Vocabulary | None:
    """The raw values of a feature's ids, where `prepare` wrote them beside the specification."""
    file = spec.vocabulary_file(spec.vocabulary(name)) if spec.features[name].is_categorical else None
    return Vocabulary.load(file) if file is not None and file.is_file() else None


def _raw(column: Column, spec: FeatureSpec, name: str, vocabulary: Vocabulary | None) -> pa.Array:
    assert not isinstance(column, Ragged), "a group, an id or a label is a scalar"
    if vocabulary is not None:
        return vocabulary.decode(column.astype(np.int64))
    shift = spec.shift(name)
    return pa.array(column - shift if shift else column)


# --- recommendations -------------------------------------------------------------------------------------------------


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
    predictor: Predictor, users: Sequence[str | int] | None, out: Path, wanted: Wanted, *, progress: Progress = silent
) -> tuple[int, int]:
    """Write the best items of some users, or of all (None), to Parquet, in blocks of bounded memory.

    `wanted` is what is asked for each of them. Columns: user, known, rank (from 1), item, title, score, and of a
    pipeline retrieved_by; one row an item. Returns the number of users, and how many of them are unknown.
    """
    schema, blocks = recommended(predictor, users, wanted)
    count = strangers = 0
    with parquet_writer(out, schema) as write:
        for block in blocks:
            write(block.table)
            count, strangers = count + block.users, strangers + block.unknown
            progress("recommend", count, block.of)
    return count, strangers


@dataclass(frozen=True)
class Recommended:
    """The answers of a block of users, one row an item."""

    table: pa.Table
    users: int
    unknown: int
    of: int
    """Users of all blocks."""


def recommended(
    predictor: Predictor, users: Sequence[str | int] | None, wanted: Wanted, part: slice | None = None
) -> tuple[pa.Schema, Iterator[Recommended]]:
    """The best items of some users, or of all (None), in blocks of bounded memory; see `recommend_to_parquet`.

    `part` keeps to some of all users.
    """
    recommender, known = predictor.recommender, predictor.catalogues
    asked = recommender.check(wanted)  # raises for a model that can't recommend
    if users is None:
        ids = np.arange(known.users.first_id, recommender.seen.num_users)[part or slice(None)]
        raw = known.raw_ids("user", ids)
    else:
        ids = known.user_ids(users)
        raw = as_column(users) if users else pa.array([], pa.string())
    item = known.raw_ids("item", np.zeros(0, np.int64)).type
    kinds = {"user": raw.type, "known": pa.bool_(), "rank": pa.int32(), "item": item}
    staged = {} if predictor.pipeline is None else {"retrieved_by": pa.list_(pa.string())}
    schema = pa.schema({**kinds, "title": pa.string(), "score": pa.float32(), **staged})

    def blocks() -> Iterator[Recommended]:
        for part in recommender.blocks(len(ids)):
            columns = _recommendations(predictor, raw[part], ids[part], asked)
            strangers = int((ids[part] < known.users.first_id).sum())
            yield Recommended(pa.Table.from_arrays(columns, schema=schema), len(ids[part]), strangers, len(ids))

    return schema, blocks()


def _recommendations(predictor: Predictor, users: pa.Array, ids: NDArray[np.int64], asked: Asked) -> list[Any]:
    """The columns of a block of users, one row an item."""
    picked = predictor.recommender.picked(ids, asked)
    kept = picked.items >= 0
    rows, ranks = np.nonzero(kept)
    items, known = picked.items[kept], ids[rows] >= predictor.users.first_id
    raw, titles = predictor.catalogues.raw_ids("item", items), predictor.items.titles_of(items)
    columns = [users.take(pa.array(rows)), known, ranks.astype(np.int32) + 1, raw, titles, picked.scores[kept]]
    if predictor.pipeline is not None and picked.brought_by is not None:
        names = map(predictor.pipeline.names_of, picked.brought_by[kept].tolist())
        columns.append(pa.array([list(each) for each in names], pa.list_(pa.string())))
    return columns
