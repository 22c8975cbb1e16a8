"""Raw files of CSV, JSON lines, Parquet or sequences, staged as one table with the line of each row."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import ibis
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from ibis.expr.datatypes import DataType
from ibis.expr.types import Table

from recspec.base.errors import DataError, SettingsError, how_many, listed, nearest, shortened
from recspec.base.files import local, unpacked_name
from recspec.data.encoding import decoded_type
from recspec.data.prepare.backend import Backend, count_rows, count_where
from recspec.data.prepare.declared import DeclaredColumn, Type
from recspec.data.prepare.duckdb_backend import json_keys
from recspec.data.prepare.known_layouts import LineFile, TextLayout, read_lines
from recspec.data.prepare.names import FILE_SPLIT, ROW, SPLIT_WORDS, SPLITS, Notes, column_of
from recspec.data.prepare.raw_rows import SHOWN, Part, RawRows, Reading, _path_of
from recspec.data.prepare.text_files import (
    ColumnType,
    JsonFile,
    TextFile,
    check_names,
    json_form,
    lines_of,
    with_announced_separator,
)
from recspec.data.prepare.text_layout import begins_with_object, check_quotes, encoding_of, glance

Staged = tuple[Table, Sequence[Part], Sequence[int], Collection[str]]
WIDE = 100  # columns beyond which the files of a table are joined once, not in every query
PARQUET_SUFFIXES = (".parquet",)
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_SUFFIXES = (".csv", ".tsv", ".txt", ".dat", ".data", ".inter")
MOST_DIGITS = 38  # of a decimal: DuckDB makes a float of one with more
LINE_TYPES: Mapping[ColumnType, Type] = {"string": "text", "float64": "number", "list": "list"}
"""Types of the columns of a layout that tells them."""


def named_files(raw: Path, setting: str, names: Sequence[str]) -> list[Path]:
    """The files that a setting names: beside the raw files, or else from the working directory.

    Raises SettingsError, which names both places for each file that is in neither.
    """
    folder = raw if raw.is_dir() else raw.parent
    found: list[Path] = []
    problems = []
    for name in names:
        path = local(name, f"setting '{setting}'")
        places = [*dict.fromkeys((folder / path, path))]
        present = [place for place in places if place.is_file()]
        found += present[:1]
        if not present:
            looked = f"; looked for {places[0]}, beside the raw files, and for {Path.cwd() / path}, from the working "
            looked = "" if len(places) == 1 else f"{looked}directory"
            problems.append(f"{name}: no such file{nearest_file(*places)}{looked}")
    SettingsError.refuse(f"setting '{setting}'", problems)
    return found


def nearest_file(*paths: Path) -> str:
    """A hint at a file of a similar name beside the first path that has one; else nothing."""
    hints = (
        nearest(path.name, [found.name for found in path.parent.iterdir()]) for path in paths if path.parent.is_dir()
    )
    return next(filter(None, hints), "")


def find_raw_files(folder: Path, others: Collection[Path], files: Sequence[str], notes: Notes) -> list[Path]:
    """The files that hold the rows: those in `files`, or all files of one kind, sorted by name; notes the rest.

    `others` are files for another use, which may lie in the folder.
    """
    used = {path.resolve() for path in others}
    inside = [path for path in sorted(folder.iterdir()) if path.resolve() not in used]
    partitions = [path for path in inside if path.is_dir() and "=" in path.name]
    if partitions and not files and not any(path.is_file() for path in inside):
        inside = [path for partition in partitions for path in sorted(partition.iterdir())]
        names = f"{partitions[0].name} to {partitions[-1].name}" if len(partitions) > 1 else partitions[0].name
        notes.inferred.append(f"the rows are those of the folders {names}, whose names are no columns")
    found = [path for path in inside if path.is_file()]
    if files:
        named = {path.name: path for path in found}
        missing = [f"no file '{name}'{nearest(name, named)}" for name in files if name not in named]
        SettingsError.refuse(f"{folder}: setting 'files'", missing)
        _note_left_out([path for path in inside if path.name not in files], notes, "setting 'files' names others")
        return [named[name] for name in files]
    found = [path for path in found if not (_is_about(path) or path.name.startswith("."))]
    kinds = (PARQUET_SUFFIXES, JSON_SUFFIXES, TEXT_SUFFIXES)
    held = [paths for kind in kinds if (paths := [path for path in found if unpacked_name(path).endswith(kind)])]
    if len(held) == 1:
        _note_left_out([path for path in inside if path not in held[0]], notes, "they are no files of rows")
        return held[0]
    names = listed(path.name for path in found)
    raise DataError(
        f"{folder}: expected files of one kind, Parquet, JSON lines or CSV, found {names}; name those you "
        f"mean, such as --set 'files=[{found[0].name if found else 'rows.csv'}]'"
    )


def _note_left_out(paths: Sequence[Path], notes: Notes, why: str) -> None:
    if paths:
        names = listed(f"{path.name}/" if path.is_dir() else path.name for path in paths)
        notes.dropped.append(f"{names}: not read, because {why}")


def _is_about(path: Path) -> bool:
    """Whether a file tells people about the others."""
    return path.name.partition(".")[0].lower() in ("readme", "license", "licence", "provenance", "citation")


def split_of(path: Path) -> str | None:
    """The split that a file's name tells, such as valid for `clicks_val.csv`."""
    words = {SPLIT_WORDS[word] for word in re.split(r"[^a-z]+", path.name.lower()) if word in SPLIT_WORDS}
    return words.pop() if len(words) == 1 else None


def splits_by_name(paths: Sequence[Path], notes: Notes) -> dict[str, list[Path]]:
    """The files of each split, if their names tell train and another split; else empty."""
    found: dict[str, list[Path]] = {}
    for path in paths:
        if (split := split_of(path)) is not None:
            found.setdefault(split, []).append(path)
    if "train" not in found or len(found) < 2:
        return {}
    told = "; ".join(f"{split}: {listed(path.name for path in found[split])}" for split in SPLITS if split in found)
    notes.inferred.append(f"files are splits, by their names: {told}")
    others = [path.name for path in paths if split_of(path) is None]
    if others:
        notes.dropped.append(f"{listed(others)}: not read, because the names of the other files tell splits")
    return {split: found[split] for split in SPLITS if split in found}


def stage(
    backend: Backend, paths: Sequence[Path], ids: Sequence[str], reading: Reading, notes: Notes, folder: Path
) -> RawRows:
    """Stage the rows of all files; `ids` are the columns of layout sequences, `folder` is for intermediate files."""
    name = unpacked_name(paths[0])
    is_parquet = name.endswith(PARQUET_SUFFIXES)
    is_json = not is_parquet and (name.endswith(JSON_SUFFIXES) or begins_with_object(paths[0]))
    roles: Mapping[str, str] = {}
    if reading.columns and (is_parquet or is_json):
        raise SettingsError(f"setting 'columns': {paths[0]} has column names of its own; leave columns out")
    if is_parquet:
        staged = _parquet(backend, paths, reading)
    elif is_json:
        staged = _json(backend, paths, reading, notes, folder)
    else:
        staged, layout = _text(backend, paths, ids, reading, notes, folder)
        reading, roles = replace(reading, types={**layout.types, **reading.types}), layout.roles
    as_staged = staged
    if (is_parquet or is_json) and reading.layout != "rows":
        staged = _flattened(backend, staged, reading, notes, folder)
    table, parts, counts, texts = staged
    if reading.splits:
        table = _with_split(table, counts, reading.splits)
    if reading.rows is not None:
        table = _some_rows(table, sum(counts), reading, notes)
    if len(table.columns) > WIDE and len(paths) > 1:  # or each query names every column of every file
        table = backend.stage(table)
    own = staged is not as_staged
    return RawRows(backend, table, parts, counts, texts, reading, notes, roles=roles, flattened=own)


def _with_split(table: Table, counts: Sequence[int], splits: Sequence[str]) -> Table:
    ends = [(table[ROW] < end, split) for end, split in zip(accumulate(counts), splits, strict=True)]
    return table.mutate(**{FILE_SPLIT: ibis.cases(*ends, else_=splits[-1])})


def _some_rows(table: Table, count: int, reading: Reading, notes: Notes) -> Table:
    assert reading.rows is not None
    if reading.rows >= count:
        notes.inferred.append(f"rows={reading.rows:,}, and there are {count:,}: all are read")
        return table
    if reading.rows_by == "first":
        notes.dropped.append(f"{count - reading.rows:,} of {count:,} rows: the first {reading.rows:,} are read (rows)")
        return table.filter(table[ROW] < reading.rows)
    notes.dropped.append(
        f"{count - reading.rows:,} of {count:,} rows: {reading.rows:,} random ones are read (rows, "
        f"rows_by, seed {reading.seed})"
    )
    digest = (ibis.literal(f"rows:{reading.seed}:") + table[ROW].cast("string")).hexdigest("md5")
    chosen = table.select(ROW, _digest=digest).order_by(["_digest", ROW]).limit(reading.rows)
    return table.semi_join(chosen.select(ROW), ROW)


def _text(
    backend: Backend, paths: Sequence[Path], ids: Sequence[str], reading: Reading, notes: Notes, folder: Path
) -> tuple[Staged, TextLayout]:
    """Stage text files; the first one's layout is that of all."""
    first = _raw_text(paths[0], reading, notes)
    layout = glance(
        first,
        separator=reading.separator,
        columns=reading.columns,
        layout=reading.layout,
        mentioned=reading.mentioned,
        key=reading.key,
        notes=notes,
    )
    encodings = [first.encoding, *(encoding_of(path, reading.encoding, notes) for path in paths[1:])]
    plain = [
        with_announced_separator(replace(first, path=path, encoding=each, announced=False))
        for path, each in zip(paths, encodings, strict=True)
    ]
    if layout.lines is not None:
        return _by_line(backend, plain, layout, ids, notes, folder)
    files = [_with_layout(file, layout, reading) for file in plain]
    for file in files:
        if set(file.columns) != set(files[0].columns):
            raise _differing(file.path, file.columns, paths[0], files[0].columns)
    found = [_read_text(backend, file, reading, notes) for file in files]
    return _joined_up(backend, [file for file, _ in found], [table for _, table in found], ()), layout


def _by_line(
    backend: Backend, plain: Sequence[TextFile], layout: TextLayout, ids: Sequence[str], notes: Notes, folder: Path
) -> tuple[Staged, TextLayout]:
    """Stage text files whose lines become rows by a layout of their own."""
    assert layout.lines is not None
    files = [replace(file, separator=layout.separator, header=False, quote="") for file in plain]
    columns: Mapping[str, ColumnType] = layout.lines.columns(files)
    if layout.sequences:
        columns = dict.fromkeys(ids, "string")
    parts = [LineFile(file, layout, columns) for file in files]
    tables = [
        read_lines(backend, part, notes, folder / f"lines-{number}-{part.path.name}.parquet")
        for number, part in enumerate(parts)
    ]
    if layout.lines.typed:
        types = {name: DeclaredColumn(type=LINE_TYPES[kind]) for name, kind in columns.items() if name != "label"}
        layout = replace(layout, types=types)
    return _joined_up(backend, parts, tables, ids if layout.sequences else ()), layout


def _read_text(backend: Backend, file: TextFile, reading: Reading, notes: Notes) -> tuple[TextFile, Table]:
    """A staged file, with quotes and escapes as its values have them. Raises DataError if these are in doubt."""
    try:
        table = backend.read_text(file)
    except DataError as error:
        if reading.quote_given or not file.quote:
            raise
        escaped = replace(file, escape="\\")
        try:
            table = backend.read_text(escaped)
        except DataError:
            raise error from None
        notes.changed.append(
            f"{file.path.name}: a backslash stands before quotes inside of values, and is left out "
            "with any letter behind it kept, because quotes are not doubled there"
        )
        file = escaped
    if file.quote:
        check_quotes(backend, file, table, notes, given=reading.quote_given)
    return file, table


def _raw_text(path: Path, reading: Reading, notes: Notes) -> TextFile:
    tabs = unpacked_name(path).endswith((".tsv", ".inter"))
    encoding = encoding_of(path, reading.encoding, notes)
    return with_announced_separator(
        TextFile(
            path,
            {},
            separator="\t" if tabs else ",",
            encoding=encoding,
            quote=reading.quote or "",
            escape=reading.quote or '"',
            multiline=True,
        )
    )


def _with_layout(file: TextFile, layout: TextLayout, reading: Reading) -> TextFile:
    """A file with the columns of the layout of the first, or, with headers, of its own."""
    separator, names, header = layout.separator, layout.names, layout.header
    if header or next(lines_of(file), None) is not None:
        mentioned = frozenset(names if header else ("column_1",))
        columns = reading.columns
        own = glance(file, separator=separator, columns=columns, layout="rows", mentioned=mentioned, notes=Notes())
        if columns:
            header = own.header
        elif own.header != header:
            what, other = ("data", "names the columns") if header else ("a header", "is data")
            so = "write the names above it" if header else "leave it out"
            raise DataError(f"{file.path}: the first line is {what}, and that of the first file {other}; {so}")
        elif header:
            names = own.names
    quote = layout.quote if len(separator) == 1 and separator != " " else ""
    return replace(
        file,
        separator=separator,
        header=header,
        names=names,
        columns=dict.fromkeys(names, "string"),
        quote=quote,
    )


def _differing(path: Path, names: Collection[str], first: Path, expected: Collection[str]) -> DataError:
    ours, others = [name for name in names if name not in expected], [name for name in expected if name not in names]
    only = [f"only {path.name} has {listed(ours)}"] if ours else []
    only += [f"only {first.name} has {listed(others)}"] if others else []
    return DataError(
        f"{path}: columns differ from those of {first.name}: {'; '.join(only) or 'another order'}; name "
        f"the files you mean, such as --set 'files=[{shortened(first.name)}]'"
    )


def _joined_up(backend: Backend, parts: Sequence[Part], tables: Sequence[Table], texts: Collection[str]) -> Staged:
    counts = [count_rows(backend, table) for table in tables]
    names = [name for name in tables[0].columns if name != ROW]
    moved, first = [], 0
    for table, count in zip(tables, counts, strict=True):
        moved.append(table.select((table[ROW] + first).name(ROW), *names) if first else table.select(ROW, *names))
        first += count
    return ibis.union(*moved) if len(moved) > 1 else moved[0], parts, counts, texts


def _json(backend: Backend, paths: Sequence[Path], reading: Reading, notes: Notes, folder: Path) -> Staged:
    files = [JsonFile(path, {}, encoding=encoding_of(path, reading.encoding, notes)) for path in paths]
    files = [replace(file, form=json_form(file)) for file in files]
    told = {"literals": "lines of Python dictionaries", "values": "JSON objects over several lines, or a list of them"}
    notes.inferred.extend(f"{file.path.name}: read as {told[file.form]}" for file in files if file.form in told)
    found = [json_keys(file, folder) for file in files]
    kinds = {name: kind for keys in found for name, kind in keys.items()}
    if not kinds:
        raise DataError(f"{paths[0]}: holds no object with a key; expected a JSON object a line")
    if all(isinstance(kind, dict) for kind in kinds.values()) and len(kinds) > 1:
        raise DataError(
            f"{paths[0]}: holds objects under each of {listed(kinds)}, as tables by columns or ids have; "
            "expected an object a row, as pandas' to_json(..., orient='records', lines=True) writes "
            "them"
        )
    lists = {name for name in kinds if all(isinstance(keys.get(name, []), list) for keys in found)}
    texts = {name for name in kinds if all(keys.get(name, "VARCHAR") == "VARCHAR" for keys in found)}
    inside = _inside({name: keys_of(kinds[name]) for name in kinds}, reading, paths[0])
    columns: dict[str, ColumnType] = {name: "list" if name in lists else "string" for name in kinds}
    columns |= {name: columns[of] for name, (of, _) in inside.items()}
    columns = {name: kind for name, kind in columns.items() if name not in {of for of, _ in inside.values()}}
    files = [replace(file, columns=columns, inside=inside) for file in files]
    lists |= {name for name, (of, _) in inside.items() if of in lists}
    staged = _joined_up(backend, files, [backend.read_json(file) for file in files], texts | lists)
    _check_rows(staged, kinds, {of for of, _ in inside.values()}, paths[0])
    return staged


def _check_rows(staged: Staged, kinds: Mapping[str, object], read: Collection[str], path: Path) -> None:
    """Refuse one object around the list of objects that are the rows."""
    rows = next((name for name in kinds if name not in read and all(keys_of(kinds[name]))), None)
    if rows is not None and sum(staged[2]) == 1:
        raise DataError(
            f"{path}: is one object, whose '{shortened(rows)}' holds a list of objects with "
            f"{listed(keys_of(kinds[rows])[1])}; expected an object a row, as jq -c "
            f"'.{json.dumps(rows)}[]' {path.name} writes them"
        )


def _inside(keys: Mapping[str, tuple[bool, Sequence[str]]], reading: Reading, path: Path) -> dict[str, tuple[str, str]]:
    if reading.layout != "rows":
        check_items(keys, reading.item, str(path))
    return inside(keys, {*reading.mentioned, *([reading.item] if reading.item else [])})


def _parquet(backend: Backend, paths: Sequence[Path], reading: Reading) -> Staged:
    counts = []
    for path in paths:
        try:
            schema, expected = _schema(path), _schema(paths[0])
            counts.append(pq.read_metadata(path).num_rows)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path}: not a Parquet file: {error}") from None
        wide = [
            f"column '{shortened(each.name)}' is {each.type}"
            for each in schema
            if pa.types.is_decimal256(each.type) and each.type.precision > MOST_DIGITS
        ]
        if wide:
            raise DataError(
                f"{path}: {'; '.join(wide)}; expected decimals of at most {MOST_DIGITS} digits; cast them, "
                "or write text"
            )
        if "" in schema.names:
            raise DataError(f"{path}: column {schema.names.index('') + 1} has an empty name; name it")
        check_names(path, schema.names)
        if not schema.equals(expected):
            if {*schema.names} != {*expected.names}:
                raise _differing(path, schema.names, paths[0], expected.names)
            kinds = [
                f"'{shortened(a.name)}' is {shortened(str(a.type))}, not {shortened(str(b.type))}"
                for a, b in zip(schema, expected, strict=True)
                if not a.equals(b)
            ]
            raise DataError(f"{path}: columns differ from those of {paths[0].name}: {'; '.join(kinds[:SHOWN])}")
    table = backend.read_parquet(paths, row=True)
    structs = {name: fields_of(table[name].type()) for name in _columns(table)}
    inside = _inside(structs, reading, paths[0])
    for name, (of, key) in inside.items():
        values = table[of]
        inner = values.map(lambda each, key=key: each[key]) if structs[of][0] else values[key]
        table = table.mutate(**{name: inner})
    table = table.drop(*{of for of, _ in inside.values()}) if inside else table
    return table, paths, counts, [*expected.names, *(set(_columns(table)) - {*expected.names})]


def _schema(path: Path) -> pa.Schema:
    """The columns of a Parquet file; those that one file stores as codes, and another does not, are the same."""
    return pa.schema([(each.name, decoded_type(each.type)) for each in pq.read_schema(path)])


def _flattened(backend: Backend, staged: Staged, reading: Reading, notes: Notes, folder: Path) -> Staged:
    """One row an event, if rows hold lists of items; with counts of events for each file."""
    table, parts, counts, texts = staged
    items = sequence_column(table, reading.item)
    if items is None:
        if reading.layout == "sequences":
            where = _path_of(parts[0])
            raise DataError(
                f"{where}: layout sequences needs a column with lists of items; found "
                f"{listed(_columns(table))}; "
                "name it with item=COLUMN, or leave layout out"
            )
        return staged
    ends = [0, *accumulate(counts)]
    tables = []
    for number in range(len(parts)):
        own = table.filter((table[ROW] >= ends[number]) & (table[ROW] < ends[number + 1]))
        tables.append(flattened(backend, own, items, notes, folder / f"events-{number}.parquet"))
    paths = [_path_of(part) for part in parts]
    lists = [name for name in _columns(table) if table[name].type().is_array()]
    return _joined_up(backend, paths, tables, {*texts, *lists})


def _columns(table: Table) -> list[str]:
    return [name for name in table.columns if name != ROW]


def keys_of(structure: object) -> tuple[bool, list[str]]:
    """Whether a structure is a list, and the keys of its objects whose values are no lists or objects."""
    is_list = isinstance(structure, list)
    inner = structure[0] if isinstance(structure, list) and structure else structure
    return is_list, [key for key, kind in inner.items() if isinstance(kind, str)] if isinstance(inner, dict) else []


def fields_of(kind: DataType) -> tuple[bool, list[str]]:
    """`keys_of` for a column of structs in Parquet."""
    is_list = kind.is_array()
    inner = kind.value_type if is_list else kind
    return is_list, [key for key, each in inner.fields.items() if not each.is_nested()] if inner.is_struct() else []


def inside(keys: Mapping[str, tuple[bool, Sequence[str]]], asked: Collection[str]) -> dict[str, tuple[str, str]]:
    """The columns inside of objects that settings name, and all others of these objects: {column: (key, inner key)}."""
    found: dict[str, tuple[str, str]] = {}
    for name, (_, inner) in keys.items():
        columns = {f"{name}.{key}": (name, key) for key in inner if f"{name}.{key}" not in keys}
        found |= columns if {*asked} & {*columns} else {}
    return found


def check_items(keys: Mapping[str, tuple[bool, Sequence[str]]], item: str | None, where: str) -> None:
    """Refuse objects as items. Raises DataError, which names the setting for the key of their id."""
    items = item if item in keys else column_of("item", keys)
    is_inside = any((item or "").startswith(f"{name}.") for name in keys)
    if items is None and not is_inside and column_of("label", keys) is None:
        items = next((name for name, (_, inner) in keys.items() if column_of("item", inner)), None)
    if items is None or not keys[items][1] or is_inside:
        return
    is_list, inner = keys[items]
    likely = column_of("item", inner) or next((key for key in inner if key == "id"), inner[0])
    raise DataError(
        f"{where}: column '{shortened(items)}' holds {'lists of ' if is_list else ''}objects with "
        f"{listed(inner)}; expected ids; name the key of the item's id, such as --set "
        f"'item={items}.{likely}'"
    )


BLOCK_USERS = 8_192


def sequence_column(table: Table, item: str | None) -> str | None:
    """The column whose lists hold the items of a row: the item's, if it holds lists."""
    lists = [name for name in table.columns if table[name].type().is_array()]
    if item is not None and item in table.columns:
        return item if item in lists else None
    likely = column_of("item", table.columns)
    return likely if likely in lists else None


def flattened(backend: Backend, table: Table, items: str, notes: Notes, target: Path) -> Table:
    """One row for each value of the lists `items`; lists of the same lengths in other columns are read along."""
    others = [name for name in table.columns if name != items and table[name].type().is_array()]
    lengths = {name: table[name].length().fill_null(0) for name in (items, *others)}
    unequal = count_where(backend, table, {name: lengths[name] != lengths[items] for name in others})
    along = [items, *(name for name, count in unequal.items() if not count)]
    with_names = [name for name in table.columns if name != ROW]
    writer: pq.ParquetWriter | None = None
    rows = events = empty = 0
    for batch in backend.batches(table.order_by(ROW), BLOCK_USERS):
        lists = batch.column(batch.schema.get_field_index(items))
        parents = pc.list_parent_indices(lists)
        empty += batch.num_rows - len(pc.unique(parents))
        columns = {}
        for name in with_names:
            column = batch.column(batch.schema.get_field_index(name))
            columns[name] = pc.list_flatten(column) if name in along else column.take(parents)
        block = pa.table(columns)
        writer = writer or pq.ParquetWriter(target, block.schema)
        writer.write_table(block)
        rows, events = rows + batch.num_rows, events + block.num_rows
    if writer is None:
        return table
    writer.close()
    if empty:
        notes.dropped.append(f"{how_many(empty, 'row')} whose '{items}' holds no item")
    notes.inferred.append(
        f"'{items}' holds lists, so each of {rows:,} rows is a sequence of items, oldest first: {events:,} events"
        + (f"; {listed(along[1:])} hold a value for each of them" if along[1:] else "")
    )
    return backend.read_parquet([target], row=True)
