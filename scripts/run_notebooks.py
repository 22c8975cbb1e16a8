"""Run the notebooks of docs/notebooks and keep what they show, so that they can be read without running them.

Cells run in order in this process, in a folder of their own. What they print is kept, and the view of a cell's last
expression: a frame or an object as HTML, else as text. Progress, on standard error, is not. `make notebooks` writes the
outputs anew; tests/test_notebooks.py fails if a cell was changed since.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).parents[1] / "docs" / "notebooks"

MOST_SHOWN = 20_000
"""Most characters of one output that are kept."""

Cell = dict[str, Any]


def code_cells(notebook: Mapping[str, Any]) -> list[Cell]:
    """The cells that run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def digest(notebook: Mapping[str, Any]) -> str:
    """Digest of the code, which tells whether the kept outputs are of it."""
    code = "\0".join("".join(cell["source"]) for cell in code_cells(notebook))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def run(notebook: Mapping[str, Any], folder: Path, name: str) -> list[list[Cell]]:
    """Run the cells in `folder`; returns the outputs of each.

    Raises whatever a cell raises, with a note that names the cell.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    with contextlib.chdir(folder):
        for number, cell in enumerate(code_cells(notebook), 1):
            try:
                outputs.append(_outputs("".join(cell["source"]), f"{name}, cell {number}", names, number))
            except Exception as error:
                error.add_note(f"in {name}, cell {number}")
                raise
    return [[_without(folder, each) for each in found] for found in outputs]


def _outputs(code: str, place: str, names: dict[str, Any], number: int) -> list[Cell]:
    """Run one cell; returns what it printed, and the view of its last expression."""
    body = ast.parse(code).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) and not code.rstrip().endswith(";") else None
    shown: list[object] = []
    printed = io.StringIO()
    before, sys.displayhook = sys.displayhook, shown.append
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.Module(body, []), place, "exec"), names)
            if last is not None:
                exec(compile(ast.Interactive([last]), place, "single"), names)
    finally:
        sys.displayhook = before
    found: list[Cell] = []
    if printed.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    for value in shown:
        if value is not None:
            found.append(
                {"data": _views(value), "execution_count": number, "metadata": {}, "output_type": "execute_result"}
            )
    return found


def _views(value: object) -> dict[str, list[str]]:
    """What a notebook shows of a value: HTML if it has such a view of a moderate size, and text."""
    views = {"text/plain": _lines(repr(value)[:MOST_SHOWN])}
    view = getattr(value, "_repr_html_", None)
    as_html = view() if callable(view) else None
    if as_html and len(as_html) <= MOST_SHOWN:
        views["text/html"] = _lines(as_html)
    return views


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _without(folder: Path, output: Cell) -> Cell:
    """An output without the folder's name, which is another one in each run."""
    text = json.dumps(output)
    for each in {str(folder), os.path.realpath(folder)}:
        text = text.replace(f"{each}/", "").replace(each, ".")
    found: Cell = json.loads(re.sub(r"0x[0-9a-f]{8,}", "0x0", text))
    return found


def written(notebook: dict[str, Any], outputs: Sequence[Sequence[Cell]]) -> str:
    """The text of a notebook's file with these outputs."""
    for number, (cell, found) in enumerate(zip(code_cells(notebook), outputs, strict=True), 1):
        cell.update(outputs=list(found), execution_count=number)
    notebook["metadata"]["recspec"] = {"outputs_of": digest(notebook)}
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main(names: Sequence[str] = ()) -> None:
    """Run the notebooks with these names, by default all, and write their outputs."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        notebook = json.loads(path.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder:
            outputs = run(notebook, Path(folder), path.name)
        path.write_text(written(notebook, outputs), encoding="utf-8")
        sys.stdout.write(f"{path.name}: {len(outputs)} cells\n")


if __name__ == "__main__":
    main(sys.argv[1:])
