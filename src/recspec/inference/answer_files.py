"""Rows read from files, and answers of a model written to files: csv, jsonl and parquet, in blocks.

Answers are probabilities of rows, or recommendations for users.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recspec.base.errors import DataError, SettingsError, SpecError, listed, nearest, shortened, unknown
from recspec.base.files import lines, local, open_parquet, special, whole_file
from recspec.data.encoding import (
    BucketEncoder,
    NumberEncoder,
    Predictions,
    ScaleEncoder,
    Vocabulary,
    as_column,
    combined,
    is_text,
    raw_names,
    repeated,
    row_at,
    with_points,
)
from recspec.data.storage import Column, Ragged, open_split
from recspec.evaluation import as_batch, check_same_features
from recspec.feature_spec import FeatureSpec
from recspec.inference.catalogue import ROLES, is_list
from recspec.inference.live_events import LiveEvents
from recspec.inference.lookup import catalogue_columns
from recspec.inference.predictor import ROWS, Predictor, Values
from recspec.inference.recommendation import RecommendRequest
from recspec.inference.recommender import CheckedRequest
from recspec.inference.request_features import problems_by_row
from recspec.models.layers import to_device

Progress = Callable[[str, float, float | None], None]
Write = Callable[[pa.Table], None]

HEADER = 1 << 20
"""Bytes of a first line that are searched for the separator of a CSV file."""
MOST_KINDS = 100
"""Most kinds of values of a column of JSON lines; every block is read beside an example of each kind."""
ROW_FORMATS = (".csv", ".jsonl", ".parquet")


def silent(stage: str, done: float, total: float | None) -> None:
    """Report no progress."""


def predict_file(
    predictor: Predictor,
    rows: Path,
    out: Path | None,
    *,
    columns: Sequence[str] | None = None,
    explain: bool = False,
) -> Predictions:
    """Score a csv, jsonl or parquet file of raw rows, and write it with `Predictor.columns_added` to a file like `out`.

    Writes the columns named in `columns`, in that order, by default all. Without `out`, CSV goes to standard output.
    Files larger than memory pass through in blocks.

    Raises:
        DataError: if the file can't be read, or a row holds what it can't.
        SettingsError: if `out` has an ending that is none of .csv, .jsonl, .parquet, or a column is not there.
    """
    with row_writer(out, like=marks_of(predictor, rows)) as write:
        return predict_tables(predictor, read_rows(rows), write, columns=columns, explain=explain, where=rows)


@dataclass(frozen=True)
class Marks:
    """How a CSV file is written."""

    separator: str = ","
    decimal: str = "."


def marks_of(predictor: Predictor, rows: Path) -> Marks:
    """The marks of a file of raw rows, with which its predictions are written; the usual ones of another format."""
    separator = separator_of(rows) if rows.suffix == ".csv" and local(rows, "rows").is_file() else ","
    return Marks(separator, "," if _has_commas(predictor) and separator != "," else ".")


def _has_commas(predictor: Predictor) -> bool:
    """Whether the dataset was prepared from numbers with a decimal comma."""
    return predictor.spec.metadata.get("decimal") == "comma"


def _with_points(predictor: Predictor, rows: pa.Table) -> pa.Table:
    """The rows with a point in the numbers that are texts with a decimal comma.

    Raises:
        DataError: if a number has a point, which may be the decimal mark or one of thousands.
    """
    encoders = predictor.encoders.encoders if predictor.encoders is not None else {}
    kinds = (NumberEncoder, ScaleEncoder, BucketEncoder)
    read = {name for feature, of in encoders.items() if isinstance(of, kinds) for name in (feature, of.column)}
    problems = list[str]()
    for place, name in enumerate(rows.column_names):
        values = combined(rows.column(place))
        if name.strip() not in read or not is_text(values.type):
            continue
        changed, unclear = with_points(values)
        rows = rows.set_column(place, name, changed)
        for row in np.flatnonzero(unclear)[:1].tolist():
            found = shortened(values[row].as_py())
            problems.append(f"column '{name}': row {row + 1} is '{found}'; expected a decimal comma, as prepared")
    DataError.refuse("raw rows", problems)
    return rows


def predict_tables(
    predictor: Predictor,
    tables: Iterable[pa.Table],
    write: Write,
    *,
    columns: Sequence[str] | None = None,
    explain: bool = False,
    where: Path | str = "rows",
) -> Predictions:
    """Score tables of raw rows, and hand each on with `Predictor.columns_added`; messages say where the rows are from.

    Raises:
        DataError: if a row holds what it can't, or the column to add is there already.
        SettingsError: if one of `columns` is not there.
    """
    total, added = Predictions(), predictor.columns_added(explain=explain)
    for table in tables:
        if columns is None and (held := [name for name in added if name in table.column_names]):
            raise DataError(f"{where}: has a column '{held[0]}' already; rename it, or name other columns to keep")
        names = {name.strip(): name for name in table.column_names}  # ` ad_id` where blanks follow the commas
        values, found = _predict(predictor, table, total.rows, explain=explain)
        total += found
        if columns is not None:
            chosen = _chosen(columns, list(names), where, added)
            table = table.select([names[name] for name in chosen]).rename_columns(chosen)
        for name, each in values.items():
            table = table.append_column(name, pa.array(each))
        write(table)
    return total


def _predict(predictor: Predictor, rows: pa.Table, first: int, *, explain: bool) -> tuple[Values, Predictions]:
    """The predictions of a block of a file; problems count its rows from the file's beginning."""
    try:
        rows = _with_points(predictor, rows) if _has_commas(predictor) else rows
        return predictor.predict_labels(rows, explain=explain)
    except DataError as error:
        if not first:
            raise
        raise DataError.of("raw rows", problems_by_row(error, lambda place: row_at(first + place))) from None


def predict_split(
    predictor: Predictor,
    spec: FeatureSpec,
    split: str,
    out: Path | Write | None,
    *,
    columns: Sequence[str] | None = None,
    explain: bool = False,
    part: range | None = None,
    progress: Progress = silent,
) -> Predictions:
    """Score a split of a prepared dataset, labelled or not, and write its rows with `Predictor.columns_added`.

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
    features, added = predictor.model.features(), predictor.columns_added(explain=explain)
    ids = (spec.group, *(spec.id_of(role) for role in ROLES), *spec.labels)
    shown = tuple(dict.fromkeys(name for name in ids if name is not None and name in held))
    wanted = shown if columns is None else columns
    if twice := [name for name in added if name in held and name in wanted]:
        raise SettingsError(
            f"{spec.folder}, split '{split}': holds a column '{twice[0]}', which is also the "
            "name of the predictions; name other columns with --columns"
        )
    if columns is not None:
        scalars = [name for name in held if not spec.features[name].is_list]
        shown = _chosen(columns, scalars, f"{spec.folder}, split '{split}'", added)
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
            values = predictor.predict_batch(batch, stop - start, explain=explain)
            rows = {name: _raw(block[name], spec, name, vocabularies.get(name)) for name in shown}
            write(pa.table({**rows, **{name: pa.array(each) for name, each in values.items()}}))
            total.rows += stop - start
    progress("predict", total.rows, reader.num_rows)
    return total


def _chosen(columns: Sequence[str], known: Sequence[str], where: Path | str, added: Sequence[str]) -> tuple[str, ...]:
    """The columns to write before the added ones, each once."""
    chosen = tuple(dict.fromkeys(name for name in columns if name not in added))
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


Note = Callable[[str], None]


def read_users(predictor: Predictor, path: Path, note: Note = lambda _: None) -> list[str]:
    """Raw user ids of a file: one a line, or the column of the users' ids of a csv, jsonl or parquet file.

    A csv file of one column may lack a header: its first line is a user if the model knows it.

    Raises:
        DataError: if the file can't be read, or has several columns and none is the users'.
    """
    if path.suffix not in ROW_FORMATS:
        return [*lines_of_users(path)]
    table = pa.concat_tables([*read_rows(path)], promote_options="permissive")
    names = {name.strip(): name for name in table.column_names}
    user = predictor.spec.id_of("user")
    keys = list(dict.fromkeys(raw_names(predictor.encoders, [] if user is None else [user])))
    first: list[str] = []
    if (key := next((name for name in reversed(keys) if name in names), None)) is None:
        if len(names) != 1:
            wanted = "' or '".join(keys)
            raise DataError(f"{path}: no column '{wanted}', the users' ids; found {listed(names)}")
        key = next(iter(names))
        if path.suffix == ".csv" and _are_known(predictor, [key]).any():
            first = [key]
        else:
            note(f"{path}: the first line, '{key}', is no user but the name of the column")
    values = table.column(names[key])
    texts = [str(value).strip() for value in values.to_pylist() if value is not None]
    return [*first, *filter(None, texts)]


def lines_of_users(path: Path) -> Iterator[str]:
    """Raw user ids of a text file, one a line; empty lines are skipped.

    Raises:
        DataError: if the file can't be read.
    """
    try:
        with path.open(encoding="utf-8") as file:
            yield from filter(None, map(str.strip, file))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: can't be read as a list of users: {error}") from None


def _are_known(predictor: Predictor, users: Sequence[str | int]) -> NDArray[np.bool_]:
    return np.asarray(predictor.catalogues.user_ids(users) >= predictor.users.first_id)


def check_any_known(predictor: Predictor, users: Iterable[str | int], wanted: RecommendRequest) -> None:
    """Refuse users of whom the model knows none: a wrong column or file, rather than a list of newcomers.

    With a context, unknown users may be answered by it.

    Raises:
        DataError: with an example.
    """
    given, example = iter(users), None
    while block := list(islice(given, ROWS)):
        if wanted.context or _are_known(predictor, block).any():
            return
        example = block[0] if example is None else example
    if example is not None:
        raise _nobody_known(predictor, example)


def _nobody_known(predictor: Predictor, example: object) -> DataError:
    known = predictor.catalogues.raw_ids("user", np.array([predictor.users.first_id]))[0].as_py()
    return DataError(
        f"recommend: the model knows none of the users, such as '{shortened(str(example))}'; expected ids of the users "
        f"that it was trained with, such as '{shortened(str(known))}'. Nothing was written"
    )


ReadLive = Callable[[Sequence[str | int]], LiveEvents]
"""Reads the events of users, by raw ids, that the dataset lacks."""


def recommend_to_file(
    predictor: Predictor,
    users: Sequence[str | int] | None,
    out: Path,
    wanted: RecommendRequest,
    *,
    columns: Sequence[str] = (),
    live: ReadLive | None = None,
    progress: Progress = silent,
) -> tuple[int, int]:
    """Write the best items of some users, or of all (None), to a csv, jsonl or parquet file, in bounded memory.

    `wanted` is what is asked for each of them, `live` reads their events that the dataset lacks. Columns: user, known,
    rank (from 1), item, title, score, of a pipeline retrieved_by, and `columns` of the catalogue; one row an item.
    Returns the number of users, and how many of them are unknown and without events.

    Raises:
        RequestError: with every problem of the request, or for a column that the catalogue lacks.
        SettingsError: if `out` has an ending that is none of .csv, .jsonl, .parquet.
        DataError: if the model knows none of the users. Nothing is written then.
    """
    schema, blocks = recommended(predictor, users, wanted, live=live)
    named = [name for name in columns if name not in schema.names]
    empty = catalogue_columns(predictor, named, [])
    wide = reduce(lambda made, name: made.append(pa.field(name, empty[name].type)), named, schema)

    def extended() -> Iterator[Recommended]:
        for block in blocks:
            found = catalogue_columns(predictor, named, block.table.column("item").to_pylist())
            arrays = [*block.table.columns, *found.values()]
            yield replace(block, table=pa.Table.from_arrays(arrays, schema=wide))

    with row_writer(out) as write:
        count, unknown = write_blocks(wide, extended() if named else blocks, write, progress)
        if users and count == unknown and not wanted.context:
            raise _nobody_known(predictor, users[0])
    return count, unknown


def write_blocks(
    schema: pa.Schema, blocks: Iterable[Recommended], write: Write, progress: Progress = silent
) -> tuple[int, int]:
    """Write the tables of some blocks, or an empty one; returns the number of users, and of unknown ones."""
    count = strangers = 0
    for block in blocks:
        write(block.table)
        count, strangers = count + block.users, strangers + block.unknown
        progress("recommend", count, block.of)
    if not count:
        write(schema.empty_table())
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
    predictor: Predictor,
    users: Sequence[str | int] | None,
    wanted: RecommendRequest,
    part: slice | None = None,
    live: ReadLive | None = None,
) -> tuple[pa.Schema, Iterator[Recommended]]:
    """The best items of some users, or of all (None), in blocks of bounded memory; see `recommend_to_file`.

    `part` keeps to some of all users.
    """
    recommender, known = predictor.recommender, predictor.catalogues
    checked = recommender.check(wanted)  # raises for a model that can't recommend
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
            events = None if live is None else live(raw[part].to_pylist())
            columns = _recommendations(predictor, raw[part], ids[part], checked, events)
            is_strange = ids[part] < known.users.first_id
            strangers = int((is_strange if events is None else is_strange & ~events.has).sum())
            yield Recommended(pa.Table.from_arrays(columns, schema=schema), len(ids[part]), strangers, len(ids))

    return schema, blocks()


def _recommendations(
    predictor: Predictor, users: pa.Array, ids: NDArray[np.int64], checked: CheckedRequest, live: LiveEvents | None
) -> list[Any]:
    """The columns of a block of users, one row an item."""
    top = predictor.recommender.top_items(ids, checked, live)
    kept = top.items >= 0
    rows, ranks = np.nonzero(kept)
    items, known = top.items[kept], ids[rows] >= predictor.users.first_id
    raw, titles = predictor.catalogues.raw_ids("item", items), predictor.items.titles_of(items)
    columns = [users.take(pa.array(rows)), known, ranks.astype(np.int32) + 1, raw, titles, top.scores[kept]]
    if predictor.pipeline is not None and top.brought_by is not None:
        names = map(predictor.pipeline.names_of, top.brought_by[kept].tolist())
        columns.append(pa.array([list(each) for each in names], pa.list_(pa.string())))
    return columns


# --- files of rows ---------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> Iterator[pa.Table]:
    """Read tables of at most `ROWS` rows from a csv, jsonl or parquet file; one of no row if only columns are named."""
    if not local(path, "rows").is_file():
        known = [found.name for found in path.parent.iterdir()] if path.parent.is_dir() else []
        wrong = special(path) or f"no such file{nearest(path.name, known)}"
        raise DataError(f"{path}: {wrong}")
    if path.suffix not in ROW_FORMATS:
        raise DataError(f"{path}: rows are read from {', '.join(ROW_FORMATS)}; found '{path.suffix}'")
    try:
        if path.suffix == ".parquet":
            with open_parquet(path) as file:
                _check_names(path, file.schema_arrow.names)
                for batch in file.iter_batches(ROWS):
                    batch.validate(full=True)  # refuses texts that are not UTF-8
                    yield pa.Table.from_batches([batch])
                if not file.metadata.num_rows:
                    yield file.schema_arrow.empty_table()
        elif path.suffix == ".csv":
            marks = pa_csv.ParseOptions(newlines_in_values=True, delimiter=separator_of(path))
            with path.open("rb") as names, path.open("rb") as values:
                with pa_csv.open_csv(names, parse_options=marks) as reader:
                    _check_names(path, reader.schema.names)
                    texts = dict.fromkeys(reader.schema.names, pa.string())
                # Text as it is written: `007` is not 7, and the encoders know where numbers are meant.
                convert = pa_csv.ConvertOptions(column_types=texts, null_values=[""], strings_can_be_null=True)
                with pa_csv.open_csv(values, convert_options=convert, parse_options=marks) as reader:
                    is_empty = True
                    for batch in reader:
                        is_empty = is_empty and not batch.num_rows
                        starts = range(0, batch.num_rows, ROWS)
                        yield from (pa.Table.from_batches([batch.slice(start, ROWS)]) for start in starts)
                    if is_empty:
                        yield reader.schema.empty_table()
        else:
            yield from _read_objects(path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        is_text = path.suffix != ".parquet" and (isinstance(error, UnicodeDecodeError) or "invalid UTF8" in str(error))
        remedy = "; expected utf-8: convert the file, such as by `iconv -f cp1252 -t utf-8`" if is_text else ""
        raise DataError(f"{path}: can't be read as {path.suffix[1:]}: {error}{remedy}") from None


def separator_of(path: Path) -> str:
    """The mark between the columns of a CSV file: as `prepare` finds it, if the first line has no comma."""
    with path.open("rb") as file:
        first = re.sub(rb'"[^"]*"', b"", file.readline(HEADER))  # a name may hold any mark
    return next((mark for mark in ",\t;|" if mark.encode() in first), ",")


def _check_names(path: Path, names: Sequence[str]) -> None:
    DataError.refuse(str(path), repeated(names))


def _read_objects(path: Path) -> Iterator[pa.Table]:
    """Tables of JSON lines: numbers are numbers, and texts stay as they are, dates among them.

    Every table has the columns and types of the whole file, which a first pass over it finds.
    """
    kinds: dict[str, dict[object, object]] = {}
    for each in _objects(path):
        for name, value in each.items():
            found = kinds.setdefault(name, {})
            if (kind := _kind(value)) not in found:
                found[kind] = value
                if len(found) > MOST_KINDS:
                    raise DataError(f"{path}: '{name}' holds more than {MOST_KINDS} kinds of values; give it one type")
    objects = _objects(path)
    while block := list(islice(objects, ROWS)):
        columns = {name: [*kinds[name].values(), *(each.get(name) for each in block)] for name in kinds}
        try:
            yield pa.table({name: as_column(values)[-len(block) :] for name, values in columns.items()})
        except DataError as error:
            raise DataError(f"{path}: {error}") from None


def _kind(value: object) -> object:
    """What of a value decides a column's type; float64 holds whole numbers of 53 bits, int64 those of 63."""
    if isinstance(value, int):
        bits = value.bit_length()
        return type(value), bits > 53, bits > 63
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value)):
        return str(as_column([value]).type)
    return frozenset(map(_kind, value)) if isinstance(value, list) else type(value)


def _objects(path: Path) -> Iterator[dict[str, object]]:
    return (_object(path, number, line) for number, line in lines(path) if line.strip())


def _object(path: Path, number: int, line: bytes) -> dict[str, object]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: line {number:,}: is no JSON object: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}: line {number:,}: is no JSON object: {line[:60]!r}")
    return found


@contextmanager
def row_writer(out: Path | Write | None, *, like: Marks | None = None) -> Iterator[Write]:
    """Write tables in the format of the ending of `out`; without `out`, CSV to standard output; or call `out`.

    CSV has the marks of `like`.
    """
    marks = like or Marks()
    if callable(out):
        yield out
        return
    if out is None:
        yield _csv_to(sys.stdout.buffer, marks)
        return
    if out.suffix not in ROW_FORMATS:
        raise SettingsError(f"--out {out}: expected a name that ends in {', '.join(ROW_FORMATS)}")
    if out.suffix == ".parquet":
        with parquet_writer(out) as write:
            yield write
        return
    with whole_file(local(out, "out")) as temporary, temporary.open("wb") as file:
        yield _csv_to(file, marks) if out.suffix == ".csv" else _jsonl_to(file)


def _csv_to(file: BinaryIO, marks: Marks) -> Write:
    is_first = True

    def with_commas(table: pa.Table) -> pa.Table:
        for place, column in enumerate(table.columns):
            if pa.types.is_floating(column.type):
                texts = pc.replace_substring(column.cast(pa.string()), ".", ",")
                table = table.set_column(place, table.field(place).name, texts)
        return table

    def write(table: pa.Table) -> None:
        nonlocal is_first
        table = _with_nested_as_texts(table)
        table = with_commas(table) if marks.decimal == "," else table
        how = pa_csv.WriteOptions(include_header=is_first, delimiter=marks.separator, quoting_style="needed")
        pa_csv.write_csv(table, file, how)
        is_first = False

    return write


def _with_nested_as_texts(table: pa.Table) -> pa.Table:
    """The same table for CSV, which has single values alone: lists with `|` between their values, the rest as JSON."""
    for place, column in enumerate(table.columns):
        if is_list(column) and not pa.types.is_nested(column.type.value_type):
            texts = pc.binary_join(column.cast(pa.list_(pa.string())), "|")
        elif pa.types.is_nested(column.type):
            texts = pa.array([None if value is None else _json(value) for value in column.to_pylist()], pa.string())
        else:
            continue
        table = table.set_column(place, table.field(place).name, texts)
    return table


def _json(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def _jsonl_to(file: BinaryIO) -> Write:
    def write(table: pa.Table) -> None:
        file.writelines((_json(row) + "\n").encode() for row in table.to_pylist())

    return write


@contextmanager
def parquet_writer(out: Path, footer: Mapping[bytes, bytes] | None = None) -> Iterator[Write]:
    """Write tables to a Parquet file under a temporary name, renamed at the end; `footer` may be filled meanwhile."""
    with whole_file(local(out, "out")) as temporary, ExitStack() as open_file:
        writer: pq.ParquetWriter | None = None

        def write(table: pa.Table) -> None:
            nonlocal writer
            if writer is None:
                writer = open_file.enter_context(pq.ParquetWriter(temporary, table.schema, compression="zstd"))
            writer.write_table(table)

        yield write
        if writer is None:
            write(pa.schema([]).empty_table())
        if footer:
            assert writer is not None
            writer.add_key_value_metadata(footer)
