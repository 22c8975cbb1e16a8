"""Raw text files, delimited or JSON, read line by line: for their header and for messages that name lines."""

from __future__ import annotations

import ast
import codecs
import csv
import io
import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

from recspec.base.errors import DataError, how_many, listed, nearest, shortened
from recspec.base.files import LINE_BYTES, LineError, bounded_lines, opened, packing
from recspec.data.prepare.names import DESCRIBES, FILE_SPLIT, IS_TARGET, ROW, SEEN, SPLIT_BEFORE, WEIGHT

ColumnType = Literal["int64", "float64", "string", "list"]  # a list holds text and occurs in JSON alone
JsonForm = Literal["lines", "literals", "values"]
"""JSON in lines; Python literals in lines, as `print(dict)` writes them; JSON over several lines, or in a list."""
LITERAL_BYTES = 2 << 20  # most bytes of a Python literal
ROW_BYTES = 2 << 20  # most bytes of a row of a delimited file, which may span lines; see `LINE_BYTES` for JSON
ENGINE_ENCODINGS = ("utf-8", "latin-1")  # that every backend reads
LETTERS = ", or, where the dataset has that setting, take quotes as letters with --set quote=null"
PROBLEMS_SHOWN = 10  # most lines named in one message; a wrong separator makes all of them malformed


@dataclass(frozen=True)
class TextFile:
    """The layout of a delimited text file."""

    path: Path
    columns: Mapping[str, ColumnType]  # to read; without a header, all columns of the file in order
    separator: str = ","  # a blank stands for any number of blanks and tabs
    header: bool = True
    names: Sequence[str] = ()  # names of all columns in order, in place of those in the header
    encoding: str = "utf-8"  # any that Python knows; other files than UTF-8 and Latin-1 are first copied as UTF-8
    quote: str = '"'  # around values; empty if quotes are letters like any other
    escape: str = '"'  # before a quote inside a quoted value: the quote again, or a backslash
    multiline: bool = False  # whether quoted values may contain line breaks; DuckDB reads such a file for Spark
    announced: bool = False  # whether a line before all others names the separator; see `with_announced_separator`
    required: Sequence[str] = ()  # columns without missing values


@dataclass(frozen=True)
class JsonFile:
    """A file of JSON objects, one a line unless `form` says otherwise; blank lines are skipped."""

    path: Path
    columns: Mapping[str, ColumnType]
    """Keys to read; an object may lack them and may have others. A `string` reads other values as their JSON text."""
    encoding: str = "utf-8"  # any that Python knows; other files than UTF-8 are first copied as UTF-8
    required: Sequence[str] = ()  # keys that every object has
    form: JsonForm = "lines"  # other forms are first copied as lines
    inside: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Columns that are a key of the objects, or lists of objects, under another key: {column: (key, inner key)}."""


def with_announced_separator(file: TextFile) -> TextFile:
    """The file with the separator that its first line names, as Excel writes and reads it: `sep=;`."""
    with open_text(file) as stream:
        found = re.fullmatch(r'"?sep=(.)"?[\r\n]*', stream.readline(9), re.IGNORECASE)
    return file if found is None else replace(file, separator=found[1], announced=True)


def file_columns(file: TextFile) -> dict[str, ColumnType]:
    """All columns of the file in order; a column not in `file.columns` is read as string. Checks the header."""
    if not file.header:
        return dict(file.columns)
    names = list(file.names) or read_header(file)
    missing = [name for name in file.columns if name not in names]
    if missing:
        problems = [f"no column '{name}'{nearest(name, names)}; found {listed(names)}" for name in missing]
        raise DataError.of(f"{file.path}: header", [*problems, *_name_problems(names)])
    check_names(file.path, names, "header")
    return {name: file.columns.get(name, "string") for name in names}


def check_names(path: Path, names: Sequence[str], where: str = "columns") -> None:
    """Refuse names that recspec uses itself, and those that an engine confuses because they differ in case alone."""
    DataError.refuse(f"{path}: {where}", _name_problems(names))


def _name_problems(names: Sequence[str]) -> list[str]:
    by_plain: dict[str, list[str]] = {}
    for name in names:
        by_plain.setdefault(name.lower(), []).append(name)
    problems = [
        f"column '{name}' has a name that recspec needs for itself; rename it"
        for name in by_plain
        if name in (ROW, FILE_SPLIT, WEIGHT, SEEN, IS_TARGET, SPLIT_BEFORE) or name.startswith((*DESCRIBES.values(),))
    ]
    problems += ["a column has an empty name; name it"] if "" in by_plain else []
    for same in by_plain.values():
        problems += [
            f"column '{shortened(name)}' stands more than once; rename all but one"
            for name in dict.fromkeys(same)
            if same.count(name) > 1
        ]
        if len(set(same)) > 1:
            problems.append(f"columns {listed(dict.fromkeys(same))} differ in case alone; rename all but one")
    return problems


def read_header(file: TextFile) -> list[str]:
    """The column names in the first line; the third is `column_3` if the line leaves its name empty."""
    with open_text(file) as stream:
        _, first = next(numbered_records(file, stream), (0, None))
    if first is None:
        raise DataError(f"{file.path}: is empty; expected a header line and rows")
    return [name or f"column_{place}" for place, name in enumerate(first, 1)]


def readable(file: TextFile, copy: Path) -> TextFile:
    """The file, or a copy of it in UTF-8, unpacked and with tabs for blanks, if a backend does not read it as it is.

    Backends read UTF-8, Latin-1 and gzip, and take the first line for the header, even if it is blank. Raises as
    `open_text` does.
    """
    if file.separator == " " or file.announced or (file.header and _begins_blank(file)):
        return rewritten(file, copy)
    if file.encoding in ENGINE_ENCODINGS and packing(file.path) in (None, "gzip"):
        return file
    with _copying(file, copy) as (stream, written):
        shutil.copyfileobj(stream, written, 1 << 20)
    return replace(file, path=copy, encoding="utf-8")


def readable_json(file: JsonFile, copy: Path) -> JsonFile:
    """`readable` for a file of JSON lines, which backends read in UTF-8 alone, and without a byte order mark."""
    with opened(file.path) as stream:
        marked = stream.read(3) == codecs.BOM_UTF8
    if file.form != "lines":
        return rewritten_json(file, copy)
    if file.encoding == "utf-8" and packing(file.path) in (None, "gzip") and not marked:
        return file
    with _copying(file, copy) as (stream, written):
        shutil.copyfileobj(stream, written, 1 << 20)
    return replace(file, path=copy, encoding="utf-8")


def rewritten(file: TextFile, copy: Path) -> TextFile:
    """A copy with the records that `numbered_records` finds, in UTF-8: one line end, and quotes only where needed."""
    separator = "\t" if file.separator == " " else file.separator
    with _copying(file, copy) as (stream, written):
        records = (values for _, values in numbered_records(file, stream, strict=True))
        if file.quote and file.escape != file.quote:  # Python also takes escapes outside of quotes
            written.writelines(line.rstrip("\r\n") + "\n" for line in bounded_lines(stream, ROW_BYTES))
        elif file.quote and len(separator) == 1:
            writer = csv.writer(written, delimiter=separator, lineterminator="\n", quotechar=file.quote)
            writer.writerows(records)
        else:
            written.writelines(separator.join(values) + "\n" for values in records)
    return replace(file, path=copy, encoding="utf-8", separator=separator, announced=False)


def rewritten_json(file: JsonFile, copy: Path) -> JsonFile:
    """A copy in UTF-8 whose objects are each on a line that ends in a line feed."""
    with _copying(file, copy) as (stream, written):
        written.writelines(text + "\n" for _, text in _json_texts(file, stream))
    return replace(file, path=copy, encoding="utf-8", form="lines")


def json_form(file: JsonFile) -> JsonForm:
    """How the objects of a file are written, by its beginning."""
    with suppress(LineError, UnicodeError), _stream(file) as stream:
        start = stream.read(1 << 16).lstrip()
        first = start.partition("\n")[0].strip()
        if re.match(r"\{\s*[uU]?'", start):
            return "literals"
        if start.startswith("[") or first == "{":
            return "values"
    return "lines"


def _json_texts(file: JsonFile, stream: IO[str]) -> Iterator[tuple[int, str]]:
    """The number of the line, or of the object if `form` is values, and the JSON text of every object.

    Raises LineError, which names the line or the object that is malformed.
    """
    if file.form == "values":
        yield from _json_values(stream)
        return
    for number, line in enumerate(bounded_lines(stream, LINE_BYTES), 1):
        if line.strip():
            yield number, line.strip() if file.form == "lines" else _literal(number, line.strip())


def _literal(number: int, text: str) -> str:
    """A Python literal as JSON."""
    if len(text) > LITERAL_BYTES:
        raise LineError(
            f"line {number:,}: a Python literal is longer than {LITERAL_BYTES:,} characters; write JSON lines"
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes such as \d
            found = ast.literal_eval(text)
        if not isinstance(found, dict):
            raise ValueError
        return json.dumps(found, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise LineError(
            f"line {number:,}: is no Python dictionary of texts, numbers, lists and dictionaries, as the "
            f"first line is: {shortened(text)!r}"
        ) from None


def _json_values(stream: IO[str]) -> Iterator[tuple[int, str]]:
    """The objects of a list, or one after another, over any lines."""
    decoder, held, number, ended = json.JSONDecoder(), "", 1, False
    while True:
        start = re.match(r"[\s,\[\]]*", held)
        held = held[start.end() :] if start else held
        try:
            found, stop = decoder.raw_decode(held) if held else (None, 0)
        except (ValueError, RecursionError) as error:
            if ended or len(held) > LINE_BYTES:
                said = getattr(error, "msg", "nested too deeply")
                raise LineError(f"object {number:,}: is no JSON ({said}): {shortened(held.strip())!r}") from None
            stop = 0
        if stop and not isinstance(found, dict):
            raise LineError(
                f"value {number:,}: is no JSON object: {shortened(held[:stop])!r}; expected a list of objects"
            )
        if stop:
            yield number, re.sub("[\r\n]", " ", held[:stop])
            held, number = held[stop:], number + 1
        elif ended:
            return
        else:
            block = stream.read(max(1 << 16, len(held)))
            held, ended = held + block, not block


def _begins_blank(file: TextFile) -> bool:
    with open_text(file) as stream:
        return stream.read(1) in ("\n", "\r")


@contextmanager
def _copying(file: TextFile | JsonFile, copy: Path) -> Iterator[tuple[IO[str], IO[str]]]:
    """The text of a file, and a copy to write, which is removed after an error."""
    try:
        with open_text(file) as stream, copy.open("w", encoding="utf-8", newline="") as written:
            yield stream, written
    except DataError:
        copy.unlink(missing_ok=True)
        raise


def line_numbers(file: TextFile | JsonFile, rows: Sequence[int]) -> dict[int, int]:
    """The line in which each of the given rows begins, from 1; for messages, because it reads up to the last."""
    found: dict[int, int] = {}
    with suppress(LineError), _stream(file) as stream:
        if isinstance(file, JsonFile):
            if file.form == "values":
                return {}
            lines = (number for number, line in enumerate(bounded_lines(stream, LINE_BYTES), 1) if line.strip())
        else:
            lines = (number for number, _ in numbered_records(file, stream))
            if file.header:
                next(lines, None)
        wanted = set(rows)
        for row, line in enumerate(islice(lines, max(rows, default=-1) + 1)):
            if row in wanted:
                found[row] = line
    return found


def lines_of(file: TextFile) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file with their numbers from 1; raises as `open_text` does."""
    with open_text(file) as stream:
        yield from enumerate(bounded_lines(stream, ROW_BYTES), 1 + file.announced)


def numbered_records(file: TextFile, stream: IO[str], *, strict: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line number and the values of every record that is not blank.

    Raises:
        LineError: if a line is too long; with `strict` also for text behind a closing quote, or a quote left open.
    """
    lines = bounded_lines(stream, ROW_BYTES)
    if not (file.quote and len(file.separator) == 1):
        for number, line in enumerate(lines, 1 + file.announced):
            text = line.rstrip("\r\n")
            if values := text.split() if file.separator == " " else text and text.split(file.separator):
                yield number, list(values)
        return
    csv.field_size_limit(ROW_BYTES)  # for the whole process, which uses the csv module here alone
    escapes: dict[str, Any] = {} if file.escape == file.quote else {"escapechar": file.escape, "doublequote": False}
    reader = csv.reader(lines, delimiter=file.separator, quotechar=file.quote, strict=strict, **escapes)
    first = 1 + file.announced
    try:
        for values in reader:
            if values:
                yield first, values
            first = reader.line_num + 1 + file.announced
    except csv.Error as error:
        said = str(error)
        if "field larger" in said:
            said = f"a value is longer than {ROW_BYTES:,} characters; is a closing quote missing?"
        elif "expected after" in said:
            said = f"a value goes on behind its closing quote; double the quotes inside a value{LETTERS}"
        elif "unexpected end" in said:
            said = f"a quote is never closed{LETTERS}"
        raise LineError(f"line {first:,}: {said}") from None


@contextmanager
def open_text(file: TextFile | JsonFile) -> Iterator[IO[str]]:
    """Open a text file, unpacked and without a byte order mark.

    Raises:
        DataError: if a line is too long, or the file contradicts its encoding or its suffix; also while it is read.
    """
    try:
        with _stream(file) as stream:
            yield stream
    except (LineError, UnicodeError) as error:
        raise DataError(f"{file.path}: {_problem(file, error)}") from None


@contextmanager
def _stream(file: TextFile | JsonFile) -> Iterator[IO[str]]:
    with opened(file.path) as stream:
        text = io.TextIOWrapper(stream, encoding=_codec(file), newline="")
        if isinstance(file, TextFile) and file.announced:
            text.readline()
        yield text


def _codec(file: TextFile | JsonFile) -> str:
    return "utf-8-sig" if file.encoding == "utf-8" else file.encoding


def _problem(file: TextFile | JsonFile, error: LineError | UnicodeError) -> str:
    if isinstance(error, LineError):
        return str(error)
    held, place = str(error), ""
    if isinstance(error, UnicodeDecodeError):
        held, place = f"byte 0x{error.object[error.start]:02x} ({error.reason})", _place_of_wrong_byte(file)
    return (
        f"{place}is not {file.encoding} text: {held}; convert the file to utf-8, or name its encoding where the "
        "dataset has that setting, as in --set encoding=cp1252"
    )


def _place_of_wrong_byte(file: TextFile | JsonFile) -> str:
    """The line and the character at which the text of a file breaks off, as the start of a message."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(_codec(file))(), translate=True)
    line, column = 1, 1

    def advance(text: str) -> None:
        nonlocal line, column
        line += text.count("\n")
        column = len(text) - text.rfind("\n") if "\n" in text else column + len(text)

    with opened(file.path) as stream:
        while block := stream.read(1 << 16):
            before = decoder.getstate()
            try:
                advance(decoder.decode(block))
            except UnicodeDecodeError:
                decoder.setstate(before)
                with suppress(UnicodeDecodeError):
                    for place in range(len(block)):
                        advance(decoder.decode(block[place : place + 1]))
                break
    return f"line {line:,}, character {column:,}: "


# --- malformed lines -------------------------------------------------------------------------------------------------


def explained(file: TextFile | JsonFile, engine_message: str) -> DataError:
    """The error for a file that an engine failed to read: its malformed lines, else the engine's message."""
    return DataError.of(str(file.path), problems_of(file) or [" ".join(engine_message.split())[:300]])


def problems_of(file: TextFile | JsonFile) -> list[str]:
    """The first malformed lines of a file, each with its number; slow, so called after a failure only."""
    problems: list[str] = []
    try:
        if isinstance(file, TextFile) and (odd := _odd_first_line(file)):
            return [odd]
        with _stream(file) as stream:
            found = _object_problems(file, stream) if isinstance(file, JsonFile) else _line_problems(file, stream)
            for problem in islice(found, PROBLEMS_SHOWN):
                problems.append(problem)
    except (LineError, UnicodeError) as error:
        problems.append(_problem(file, error))
    return problems


def _odd_first_line(file: TextFile) -> str:
    """The problem of a first line that has other columns than all lines behind it, or nothing."""
    with _stream(file) as stream:
        rows = list(islice(numbered_records(file, stream), PROBLEMS_SHOWN))
    if rows and rows[0][1][0].startswith("#"):
        comment = shortened(file.separator.join(rows[0][1]))
        return f"line {rows[0][0]:,}: {comment!r} looks like a comment; leave such lines out, as grep -v '^#' does"
    widths = {len(values) for _, values in rows[1:]}
    if len(rows) < PROBLEMS_SHOWN or len(widths) != 1 or len(rows[0][1]) in widths:
        return ""
    number, first = rows[0]
    return (
        f"line {number:,}: has {how_many(len(first), 'column')}, and the {len(rows) - 1} lines behind it have "
        f"{widths.pop():,} separated by {file.separator!r}: {shortened(file.separator.join(first))!r}; correct it "
        "if it is the header, or leave it out"
    )


def _line_problems(file: TextFile, stream: IO[str]) -> Iterator[str]:
    columns = file_columns(file)
    records = numbered_records(file, stream, strict=True)
    if file.header:
        next(records, None)
    for line, values in records:
        if len(values) != len(columns):
            mark = "blanks" if file.separator == " " else repr(file.separator)
            yield f"line {line:,}: has {len(values)} columns, expected {len(columns)} separated by {mark}"
            continue
        for value, (name, kind) in zip(values, columns.items(), strict=True):
            if problem := _value_problem(value, kind, required=name in file.required):
                yield f"line {line:,}: column '{shortened(name)}' {problem}"


def _object_problems(file: JsonFile, stream: IO[str]) -> Iterator[str]:
    for number, line in _json_texts(file, stream):
        try:
            found, why = json.loads(line, object_pairs_hook=_object), ""
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            yield f"line {number:,}: holds half of a surrogate pair (\\ud800 to \\udfff), which is no character"
            continue
        except (ValueError, RecursionError) as error:
            found, why = None, f" ({getattr(error, 'msg', error)})"
        if not isinstance(found, dict):
            yield f"line {number:,}: is no JSON object{why}: {line.strip()[:60]!r}"
            continue
        for name, kind in file.columns.items():
            value = found.get(name)
            text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
            if problem := _value_problem(text, kind, required=name in file.required and value is None):
                known = nearest(name, list(found)) if value is None else ""
                yield f"line {number:,}: '{shortened(name)}' {problem}{known}"


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    held = dict(pairs)
    if len(held) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key '{shortened(twice)}' stands more than once")
    return held


def _value_problem(value: str, kind: ColumnType, *, required: bool) -> str | None:
    if not value:
        return "has no value; expected one in every row" if required else None
    if kind in ("string", "list"):
        return None
    try:
        if not value.isascii():
            raise ValueError
        number = int(value) if kind == "int64" else float(value)
        if kind == "int64" and not -(2**63) <= number < 2**63:
            return f"is '{value[:60]}'; expected a whole number of at most 64 bits"
    except ValueError:
        return f"is '{value[:60]}'; expected {'a whole number' if kind == 'int64' else 'a number'}"
    return None
