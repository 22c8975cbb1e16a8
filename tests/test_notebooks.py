"""The notebooks run from top to bottom on data that they make up, and keep small outputs of the code that they show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts import run_notebooks

from recspec.models import MODELS
from tests.documented import NOTEBOOKS


@pytest.fixture(autouse=True)
def _models_as_they_were() -> Iterator[None]:
    """Takes out the models of one's own that a page enters."""
    before = dict(MODELS)
    yield
    MODELS.clear()
    MODELS.update(before)


every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_five() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "1_first_recommendations",
        "2_click_prediction",
        "3_sequences",
        "4_own_model",
        "5_serve_and_export",
    ]


@every_notebook
def test_it_keeps_small_outputs_of_its_own_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert notebook["metadata"]["recspec"]["outputs_of"] == run_notebooks.digest(notebook), "run `make notebooks`"
    assert len(text) < 150_000
    assert notebook["nbformat"] == 4
    assert all(cell["execution_count"] for cell in run_notebooks.code_cells(notebook))
    assert "/tmp/" not in text, "an output names a folder of the machine on which it ran"


SLOW = {"2_click_prediction", "3_sequences", "5_serve_and_export"}
each_notebook = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else []) for path in NOTEBOOKS
]


@pytest.mark.slow
@pytest.mark.parametrize("path", each_notebook)
def test_it_runs(path: Path, tmp_path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    outputs = run_notebooks.run(notebook, tmp_path, path.name)
    kept = [cell["outputs"] for cell in run_notebooks.code_cells(notebook)]
    assert [bool(each) for each in outputs] == [bool(each) for each in kept], "run `make notebooks`"


def cells(*codes: str) -> dict[str, object]:
    """A notebook of these cells."""
    return {"cells": [{"cell_type": "code", "source": code, "metadata": {}} for code in codes], "metadata": {}}


def test_outputs_are_prints_and_the_last_expression(tmp_path: Path) -> None:
    class_ = "class View:\n    def _repr_html_(self):\n        return '<b>1</b>'\n    __repr__ = lambda self: 'one'"
    codes = ("x = 2\nprint('two')\nx + 1", class_, "View()", "None", "x;", "import os; os.getcwd()")
    first, second, third, fourth, fifth, sixth = run_notebooks.run(cells(*codes), tmp_path, "n")
    assert first[0] == {"name": "stdout", "output_type": "stream", "text": ["two\n"]}
    assert first[1]["data"] == {"text/plain": ["3"]}
    assert second == []
    assert third[0]["data"] == {"text/html": ["<b>1</b>"], "text/plain": ["one"]}
    assert fourth == []
    assert fifth == []
    assert sixth[0]["data"] == {"text/plain": ["'.'"]}


def test_an_error_names_its_cell(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_notebooks.run(cells("x = 1", "x / 0"), tmp_path, "wrong.ipynb")
    assert caught.value.__notes__ == ["in wrong.ipynb, cell 2"]


def test_changed_code_is_noticed(tmp_path: Path) -> None:
    notebook = cells("1 + 1")
    kept = json.loads(run_notebooks.written(notebook, run_notebooks.run(notebook, tmp_path, "n")))
    assert kept["metadata"]["recspec"]["outputs_of"] == run_notebooks.digest(kept)
    kept["cells"][0]["source"] = "1 + 2"
    assert kept["metadata"]["recspec"]["outputs_of"] != run_notebooks.digest(kept)
