"""Faces of folders whose names are loaded when they are first used, so that a part does not wait for all."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_face(package: str, file: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package: imports a name as the block `if TYPE_CHECKING:` of its `__init__.py` says.

    So each name is written once, where type checkers read it too.
    """

    @cache
    def homes() -> dict[str, str]:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
        blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        froms = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
        return {alias.asname or alias.name: str(node.module) for node in froms for alias in node.names}

    def load(name: str) -> Any:
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        found = getattr(import_module(homes()[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return load
