"""Errors that name the malformed lines of a raw text file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import IO

from recspec.errors import DataError, nearest
from recspec.files import LINE_BYTES, LineError, bounded_lines
from recspec.prepare.text_files import (
    ColumnType,
    JsonFile,
    TextFile,
    file_columns,
    not_text,
    numbered_records,
    open_text,
)

PROBLEMS_SHOWN = 10
"""Most lines named in one message; a wrong separator makes all of them malformed."""


def explained(file: TextFile | JsonFile, engine_message: str) -> DataError:
    """The error for a file that an engine failed to read: its malformed lines, else the engine's message."""
    return DataError.of(str(file.path), problems_of(file) or [" ".join(engine_message.split())[:300]])


def problems_of(file: TextFile | JsonFile) -> list[str]:
    """The first malformed lines of a file, each with its number; slow, so called after a failure only."""
    problems: list[str] = []
    try:
        with open_text(file) as stream:
            found = _object_problems(file, stream) if isinstance(file, JsonFile) else _line_problems(file, stream)
            for problem in islice(found, PROBLEMS_SHOWN):
                problems.append(problem)
    except LineError as error:
        problems.append(str(error))
    except UnicodeError as error:
        problems.append(not_text(file, error))
    return problems


def _line_problems(file: TextFile, stream: IO[str]) -> Iterator[str]:
    columns = file_columns(file)
    records = numbered_records(file, stream)
    if file.header:
        next(records, None)
    for line, values in records:
        if len(values) != len(columns):
            yield f"line {line:,}: has {len(values)} columns, expected {len(columns)} separated by {file.separator!r}"
            continue
        for value, (name, kind) in zip(values, columns.items(), strict=True):
            problem = _value_problem(value, kind, required=name in file.required)
            if problem:
                yield f"line {line:,}: column '{name}' {problem}"


def _object_problems(file: JsonFile, stream: IO[str]) -> Iterator[str]:
    for number, line in enumerate(bounded_lines(stream, LINE_BYTES), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield f"line {number:,}: is no JSON object ({_said(error)}): {_beginning(line)}"
            continue
        if not isinstance(found, dict):
            yield f"line {number:,}: is no JSON object: {_beginning(line)}"
            continue
        for name, kind in file.columns.items():
            value = found.get(name)
            text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
            problem = _value_problem(text, kind, required=name in file.required and value is None)
            if problem:
                known = nearest(name, list(found)) if value is None else ""
                yield f"line {number:,}: '{name}' {problem}{known}"


def _said(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _beginning(line: str) -> str:
    return repr(line.strip()[:60])


def _value_problem(value: str, kind: ColumnType, *, required: bool) -> str | None:
    if not value:
        return "has no value; expected one in every row" if required else None
    if kind in ("string", "list"):
        return None
    try:
        int(value) if kind == "int64" else float(value)
    except ValueError:
        return f"is '{value[:60]}'; expected {'a whole number' if kind == 'int64' else 'a number'}"
    return None
