"""Data frames in and out: pandas, polars, pyarrow, DuckDB, dicts of columns, lists of rows.

No data-frame library is needed: frames come in through the Arrow PyCapsule interface (`__arrow_c_stream__`), and a
library is imported only to make a frame of its kind.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, get_args

from recspec.base.errors import DataError, MissingExtraError, RecspecError, SettingsError, listed, unknown

if TYPE_CHECKING:
    import pyarrow as pa


Kind = Literal["pandas", "polars", "polars_lazy", "pyarrow", "duckdb", "dict", "rows"]
"""A kind of frame: `dict` is a dict of columns (lists), `rows` a list of dicts."""
KINDS: tuple[Kind, ...] = get_args(Kind)

EXPECTED = (
    "expected a data frame of pandas, polars, pyarrow or DuckDB, any object with __arrow_c_stream__, a dict of columns "
    "or a list of rows (dicts)"
)


def is_frame(value: object) -> bool:
    """Whether a value is a frame of any kind, rather than a path."""
    if isinstance(value, Mapping) or hasattr(value, "__arrow_c_stream__") or hasattr(value, "__arrow_c_array__"):
        return True
    return _library(value) in ("pandas", "polars", "pyarrow") or (
        isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and all(map(_is_row, value))
    )


def kind_of(frame: object) -> Kind:
    """The kind in which an answer to this frame goes out; `pyarrow` for an Arrow stream of any other library."""
    library = _library(frame)
    if library == "polars":
        return "polars_lazy" if type(frame).__name__ == "LazyFrame" else "polars"
    if library == "pandas":
        return "pandas"
    if library in ("duckdb", "_duckdb"):
        return "duckdb"
    if isinstance(frame, Mapping):
        return "dict"
    return "rows" if isinstance(frame, Sequence) and not hasattr(frame, "__arrow_c_stream__") else "pyarrow"


def chosen_kind(kind: str | None, otherwise: Kind | None = None) -> Kind:
    """The kind asked for by name; without one, `otherwise` or pyarrow. Raises `SettingsError` for an unknown name."""
    if kind is None:
        return otherwise or "pyarrow"
    if kind not in KINDS:
        raise SettingsError(f"kind: {unknown('kind of frame', kind, KINDS)}")
    return kind


def to_table(frame: object, what: str = "the data frame") -> pa.Table:
    """A frame of any kind as a pyarrow table of the types that `recspec.data.encoding.plain` gives.

    The named levels of a pandas index become columns.

    Raises:
        DataError: if it is no frame, or a column can't be read; `what` names it.
    """
    import pyarrow as pa

    try:
        table = _read(frame)
        names = _named(table.column_names)
        return pa.table({name: _plain(name, column) for name, column in zip(names, table.columns, strict=True)})
    except (RecspecError, MemoryError) as error:
        if isinstance(error, RecspecError):
            raise DataError(f"{what}: {error}") from None
        raise
    except Exception as error:  # a frame computes its rows when they are read, and may raise anything
        raise DataError(f"{what}: can't be read: {reason(error)}; {EXPECTED}, each column of one type") from None


def reason(error: Exception) -> str:
    """What a library says of a frame that it can't read or write, on one line that can be printed."""
    texts = all(isinstance(part, str) for part in error.args)
    told = "; ".join(reversed(error.args)) if texts else str(error)  # pyarrow puts the column last
    told = " ".join(told.partition(". Detail: ")[0].split()) or type(error).__name__
    return told.encode("utf-8", "backslashreplace").decode("utf-8")[:300]


def _named(names: Iterable[object]) -> list[str]:
    """The names of columns as texts. Raises `DataError` for names that are the same as texts."""
    texts = [str(name) for name in names]
    if twice := [name for name in dict.fromkeys(texts) if texts.count(name) > 1]:
        raise DataError(f"has more than one column {listed(twice)}; rename them")
    return texts


def _plain(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    from recspec.data.encoding import plain

    try:
        return plain(column)
    except DataError as error:
        raise DataError(f"column '{name}' {error}") from None


def _read(frame: object) -> pa.Table:
    import pyarrow as pa

    match kind_of(frame):
        case "polars_lazy":
            return _read(frame.collect())  # type: ignore[attr-defined]
        case "polars" if hasattr(frame, "schema"):
            wide = [name for name, kind in frame.schema.items() if str(kind) in ("Int128", "UInt128")]
            return _from_digits(frame.with_columns(frame[name].cast(str) for name in wide), wide)  # type: ignore[attr-defined,index]
        case "duckdb":
            kinds = zip(frame.columns, frame.types, strict=True)  # type: ignore[attr-defined]
            wide = [name for name, kind in kinds if str(kind) == "UHUGEINT"]  # which DuckDB gives Arrow with a sign
            quoted = ['"' + name.replace('"', '""') + '"' for name in wide]
            casts = ", ".join(f"CAST({name} AS VARCHAR) AS {name}" for name in quoted)
            return _from_digits(frame.project(f"* REPLACE ({casts})") if wide else frame, wide)  # type: ignore[attr-defined]
        case "pandas":  # its own stream would hold an index without a name as a column too
            if not hasattr(frame, "columns"):
                raise TypeError(f"found {type(frame).__name__} of pandas")
            frame = frame.set_axis(_named(frame.columns), axis=1)  # type: ignore[attr-defined]
            table = _of_pandas(frame)
            return table.drop_columns([name for name in table.column_names if name.startswith("__index_level_")])
        case "dict":
            assert isinstance(frame, Mapping)
            return pa.table(dict(zip(_named(frame), map(_column, frame.values()), strict=True)))
        case "rows":
            assert isinstance(frame, Sequence)
            if isinstance(frame, (str, bytes)) or not all(map(_is_row, frame)):
                raise TypeError(f"found {type(frame).__name__}")
            keys = dict.fromkeys(key for row in frame for key in row)
            columns = [_column([row.get(key) for row in frame]) for key in keys]
            return pa.table(dict(zip(_named(keys), columns, strict=True)))
    if isinstance(frame, pa.Table):
        return frame
    if not hasattr(frame, "__arrow_c_stream__") and not hasattr(frame, "__arrow_c_array__"):
        raise TypeError(f"found {type(frame).__name__}")
    return pa.table(frame)


def _from_digits(frame: object, names: Sequence[str]) -> pa.Table:
    """A frame as a table, where the digits of some columns become numbers again, of more bits than Arrow's integers."""
    import pyarrow as pa

    table = pa.table(frame)
    for name in names:
        place = table.column_names.index(name)
        table = table.set_column(place, name, table.column(name).cast(pa.decimal256(76, 0)))
    return table


def _of_pandas(frame: Any) -> pa.Table:
    import pyarrow as pa

    try:
        return pa.Table.from_pandas(frame)
    except OverflowError:  # a column of objects holds whole numbers of more than 64 bits
        held = {name: _column(frame[name].to_numpy()) for name in frame.columns if frame[name].dtype == object}
        return pa.Table.from_pandas(frame.assign(**{name: each.to_pylist() for name, each in held.items()}))


def _column(values: object) -> pa.Array | pa.ChunkedArray:
    import pyarrow as pa

    from recspec.data.encoding import as_column

    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if hasattr(values, "__arrow_c_stream__"):
        return pa.chunked_array(values)
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"a column holds {values!r:.60}; expected a list of values")
    try:
        return pa.array(values if hasattr(values, "__array__") else list(values), from_pandas=True)
    except OverflowError:
        return as_column([None if value != value else value for value in values])  # NaN is missing


def from_table(table: pa.Table, kind: Kind) -> Any:
    """A pyarrow table as a frame of a kind. Raises `MissingExtraError` if its library is not installed."""
    match kind:
        case "pandas":
            return _to_pandas(table)
        case "polars" | "polars_lazy":
            frame = _imported("polars").from_arrow(table)
            return frame if kind == "polars" else frame.lazy()
        case "duckdb":
            return _imported("duckdb").from_arrow(table)
        case "dict":
            return table.to_pydict()
        case "rows":
            return table.to_pylist()
    return table


def answered(frame: object, table: pa.Table, kind: Kind, columns: Sequence[str] | None = None) -> Any:
    """The rows of a frame and an answer to each, which `table` holds, as a frame of a kind.

    If the frame is of this kind, its own columns stand in place of the table's, in which categories, decimals and whole
    numbers beside missing ones are plain values. A pandas frame keeps its index; a level is a column only if `columns`
    names it.
    """
    import pyarrow as pa

    if kind == kind_of(frame) == "pandas":
        own = {str(name): name for name in frame.columns}  # type: ignore[attr-defined]
        levels = set(map(str, frame.index.names)) - {*own, *(columns or ())}  # type: ignore[attr-defined]
        made = _to_pandas(table.drop_columns([name for name in table.column_names if name in levels]))
        made = made.set_axis(frame.index, axis=0)  # type: ignore[attr-defined]
        return made.assign(**{name: frame[own[name]] for name in made.columns if name in own})  # type: ignore[index]
    if kind == kind_of(frame) == "polars":
        held = [frame[name] for name in table.column_names if name in frame.columns]  # type: ignore[attr-defined,index]
        return from_table(table, kind).with_columns(held)
    if kind == "pyarrow" and isinstance(frame, pa.Table):
        for place, name in enumerate(table.column_names):
            if name in frame.column_names:
                table = table.set_column(place, frame.field(name), frame.column(name))
    return from_table(table, kind)


def table_of(kinds: Mapping[str, Any], rows: Iterable[Sequence[object]]) -> pa.Table:
    """A table of rows, whose columns have the names and Arrow types of `kinds`."""
    import pyarrow as pa

    columns = [*zip(*rows, strict=True)] or [()] * len(kinds)
    return pa.table({name: pa.array(column, kind) for (name, kind), column in zip(kinds.items(), columns, strict=True)})


def _to_pandas(table: pa.Table) -> Any:
    """A table as pandas makes it, but for whole numbers beside missing ones that are too large for its fractions."""
    import pyarrow as pa
    import pyarrow.compute as pc

    pandas = _imported("pandas")
    frame = table.to_pandas()
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_integer(column.type) and column.null_count:
            ends = pc.min_max(column).as_py()
            if any(value is not None and abs(value) > 1 << 53 for value in ends.values()):
                frame[name] = pandas.array(column.to_pylist(), dtype="Int64")
    return frame


def _imported(library: str) -> Any:
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError:
        raise MissingExtraError(
            f"frames of {library} need the library '{library}', which is not installed: pip install {library}"
        ) from None


def as_ids(values: object, what: str) -> tuple[str | int, ...]:
    """Raw ids from one id, a list, a column of a data frame, or a frame of one column."""
    from recspec.data.encoding import as_column, plain

    if values is None:
        return ()
    if hasattr(values, "item") and not hasattr(type(values), "__iter__"):  # a number of NumPy, as frames hold it
        values = values.item()
    if isinstance(values, (str, int)) and not isinstance(values, bool):
        return (values,)
    if isinstance(values, Mapping) or hasattr(type(values), "columns") or not hasattr(type(values), "__iter__"):
        table = to_table(values, what)
        if table.num_columns != 1:
            raise DataError(f"{what}: is a frame of the columns {listed(table.column_names)}; pass the column of ids")
        found = table.column(0).to_pylist()
    elif isinstance(values, Iterable) and not isinstance(values, (bytes, bytearray)):
        found = [value.item() if hasattr(value, "item") else value for value in values]
        found = [value.as_py() if hasattr(value, "as_py") else value for value in found]
    else:
        raise DataError(f"{what}: found {type(values).__name__}; expected an id or a list of ids")
    found = [plain(as_column([value]))[0].as_py() if isinstance(value, Decimal) else value for value in found]
    wrong = [value for value in found if isinstance(value, bool) or not isinstance(value, (str, int))]
    if wrong:
        raise DataError(f"{what}: holds {wrong[0]!r:.60}; expected texts or whole numbers")
    return tuple(found)


def _is_row(value: object) -> bool:
    return isinstance(value, Mapping)


def _library(value: object) -> str:
    return type(value).__module__.partition(".")[0]
