"""`import recspec` loads nothing heavy, and its names are the API's."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import ModuleType

import pytest

import recspec as rs
from recspec import api
from recspec.models import MODELS


def _in_a_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_import_loads_no_library_and_nothing_of_the_package_and_preparing_no_torch() -> None:
    code = """
import sys
before = set(sys.modules)
import recspec as rs
new = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(*sorted(new), *(name for name in sys.modules if name.startswith("recspec.")))
rs.prepare, rs.open_data, rs.Model
print({"torch", "pandas", "pydantic", "pyarrow"} & set(sys.modules))
help(rs.api.prepare)
"""
    told = _in_a_process(code)
    assert told.startswith("recspec\nset()\nHelp on function prepare in module recspec.api")
    assert "PACKAGE CONTENTS" not in told


def test_a_folder_that_is_a_verb_too_can_be_called_and_imported_from_in_any_order() -> None:
    code = """
import recspec as rs
first = callable(rs.export), callable(rs.datasets)
import recspec.export as export
from recspec.datasets import DATASETS
from recspec import datasets
print(*first, export is rs.export, datasets is rs.datasets, {*rs.datasets()} == {*DATASETS})
help(rs.export)
"""
    first, _, told = _in_a_process(code).partition("\n")
    assert first == "True True True True True"
    assert f"recspec.export - {api.export.__doc__.splitlines()[0]}" in told
    assert told.index("export(run: ") < told.index("Args:") < told.index("PACKAGE CONTENTS")
    for name in ("datasets", "export", "models", "report"):
        assert isinstance(getattr(rs, name), ModuleType)
        assert callable(getattr(rs, name))
    assert {*rs.models()} == {*MODELS}


def test_every_name_of_the_package_is_there_and_listed() -> None:
    assert set(rs.__all__) <= set(dir(rs))
    for name in rs.__all__:
        assert getattr(rs, name) is not None
    with pytest.raises(AttributeError, match="module 'recspec' has no attribute 'trian'"):
        _ = rs.trian  # type: ignore[attr-defined]


def test_verbs_show_their_signature_and_text_wherever_they_come_from() -> None:
    for name in ("prepare", "export", "auto", "models", "datasets", "train", "evaluate"):
        assert inspect.signature(getattr(rs, name)) == inspect.signature(getattr(api, name)), name
        own, told = (inspect.getdoc(getattr(each, name)) or "" for each in (rs, api))
        call = f"{name}{inspect.signature(getattr(api, name))}"
        assert own.replace(f"\n\n{call}", "", 1).strip() == told, name
