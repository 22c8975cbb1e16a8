"""The house stands as CONTRIBUTING.md draws it: imports point down, and each thing is done in one place."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "recspec"

DOORS = ("datasets", "models")
"""The folders of the package; each is one entry of the map."""

LOADS_TORCH = {
    "batch", "distributed", "layers", "mlp", "sequences", "search", "kernels", "loader", "sampling", "sharding",
    "optim", "models",
}  # fmt: skip
"""What computes with torch; what imports one of these loads it too."""

EVASIVE = {"util", "utils", "helper", "helpers", "common", "manager", "engine", "runner", "misc"}


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str  # `storage`, `models.neumf`; `models` for models/__init__.py

    @property
    def room(self) -> str:
        """The entry of the map that it belongs to."""
        return self.name.split(".")[0]

    @property
    def tree(self) -> ast.Module:
        return _parse(PACKAGE / _file(self.name))

    @property
    def imports(self) -> set[str]:
        """Modules of the package that it imports, wherever in the file."""
        return {_module(name) for name, _ in _imports(self.tree) if name.split(".")[0] == "recspec"} - {""}

    @property
    def imports_at_once(self) -> set[str]:
        """Top names that it imports as soon as it is imported itself, and modules of the package."""
        names = {name for name, at_once in _imports(self.tree) if at_once}
        return {_module(name) if name.startswith("recspec") else name.split(".")[0] for name in names} - {""}


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _file(name: str) -> Path:
    path = Path(*name.split("."))
    return path / "__init__.py" if (PACKAGE / path).is_dir() else path.with_suffix(".py")


def _module(dotted: str) -> str:
    """`storage` for `recspec.storage.Ragged`, the longest part that is a file; nothing for the package itself."""
    parts = dotted.split(".")[1:]
    for end in range(len(parts), 0, -1):
        if (PACKAGE / _file(".".join(parts[:end]))).is_file():
            return ".".join(parts[:end])
    return ""


def _imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Dotted names imported anywhere, and whether importing the file imports them."""
    at_once = {id(node) for statement in tree.body for node in _run_at_import(statement)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in at_once) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are written out in full"
            yield from ((f"{node.module}.{alias.name}", id(node) in at_once) for alias in node.names)


def _run_at_import(statement: ast.stmt) -> Iterator[ast.AST]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return
    if isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING"):
        return
    yield statement
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.stmt):
            yield from _run_at_import(child)


MODULES = [
    Module(".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"))
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE) != Path("__init__.py")
]
every_module = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)


@cache
def layers() -> dict[str, int]:
    """The map of CONTRIBUTING.md: room -> line, lower lines first. Names are two spaces apart, then comes a remark."""
    found = {}
    for line in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines():
        drawn = re.fullmatch(r"([0-9]+)  (\S+(?:  \S+)*)(?:   .*)?", line)
        if drawn:
            found.update({name.rstrip("/"): int(drawn[1]) for name in drawn[2].split("  ")})
    return found


# --- what imports what -----------------------------------------------------------------------------------------------


def test_the_map_holds_every_module() -> None:
    assert set(layers().values()) == set(range(11))
    missing = {module.room for module in MODULES} - set(layers()) - {"__main__"}
    assert not missing, f"CONTRIBUTING.md does not say which line these stand on: {sorted(missing)}"


@every_module
def test_imports_point_down(module: Module) -> None:
    if module.name == "__main__":
        assert module.imports == {"cli"}
        return
    line = layers()[module.room]
    for name in module.imports:
        room = name.split(".")[0]
        if room != module.room:
            assert layers()[room] < line, f"{module.name} (line {line}) imports {name} (line {layers()[room]})"


@pytest.mark.parametrize("door", DOORS)
def test_the_files_of_a_folder_do_not_import_in_a_circle(door: str) -> None:
    graph = {module.name: {name for name in module.imports if name.startswith(f"{door}.")} for module in MODULES
             if module.name.startswith(f"{door}.")}  # fmt: skip
    list(TopologicalSorter(graph).static_order())
    for module in MODULES:
        if module.name.startswith(f"{door}."):
            assert door not in module.imports, f"{module.name} imports the registry that lists it"


def test_the_package_has_two_folders() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == set(DOORS)


# --- torch -----------------------------------------------------------------------------------------------------------


@every_module
def test_torch_is_imported_by_what_computes_with_it_and_what_stands_on_that(module: Module) -> None:
    allowed = module.room in LOADS_TORCH or layers().get(module.room, 10) >= 5 or module.room == "checkpoint"
    if not allowed or module.room in ("cli", "__main__"):
        heavy = {"torch", *LOADS_TORCH} & {name.split(".")[0] for name in module.imports_at_once}
        assert not heavy, f"{module.name} loads torch as soon as it is imported, through {sorted(heavy)}"


@pytest.mark.parametrize("imported", ["recspec.cli", "recspec.feature_spec", "recspec.datasets", "recspec.card"])
def test_torch_is_not_loaded_by(imported: str) -> None:
    code = (
        f"import {imported}, sys; print(*sorted({{'torch', 'pyspark', 'tensorboard', 'implicit'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_help_answers_without_torch() -> None:
    code = """
import sys
from recspec import cli
sys.argv = ["recspec", "--help"]
try:
    cli.main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "prepare" in done.stdout
    assert done.stderr.strip() == "False"


# --- who may do what -------------------------------------------------------------------------------------------------


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Every call by its dotted name: `yaml.load`, `print`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            yield ast.unparse(node.func), node


@every_module
def test_only_the_command_line_prints_and_exits(module: Module) -> None:
    if module.name == "cli":
        return
    found = {name for name, _ in calls(module.tree)}
    assert not found & {"print", "exit", "quit", "sys.exit", "os._exit", "sys.stdout.write", "sys.stderr.write"}
    names = {node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name)}
    assert "SystemExit" not in names
    assert "rich" not in {name.split(".")[0] for name, _ in _imports(module.tree)}


@every_module
def test_nothing_read_from_a_file_is_run(module: Module) -> None:
    for name, call in calls(module.tree):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert name not in {"eval", "exec", "compile", "__import__", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
        assert not re.match(r"(pickle|cloudpickle|dill|marshal|shelve|joblib)\.", name), f"line {call.lineno}: {name}"
        if name == "torch.load":
            assert given.get("weights_only") == "True", f"line {call.lineno}: torch.load without weights_only=True"
        if name in ("np.load", "numpy.load"):
            assert given.get("allow_pickle", "False") == "False"
        assert given.get("shell", "False") == "False"


@every_module
def test_nothing_is_named_evasively(module: Module) -> None:
    assert not EVASIVE & set(re.split(r"[._]", module.name))
    classes = [node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    for name in classes:
        assert not EVASIVE & {word.lower() for word in re.findall(r"[A-Z][a-z]*", name)}, name


@every_module
def test_every_module_and_public_name_says_what_it_is(module: Module) -> None:
    assert ast.get_docstring(module.tree), module.name
    for node in module.tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{module.name}.{node.name} (line {node.lineno})"


@every_module
def test_no_unfinished_work(module: Module) -> None:
    text = (PACKAGE / _file(module.name)).read_text(encoding="utf-8")
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text)


@pytest.mark.parametrize(("door", "registry"), [("datasets", "DATASETS"), ("models", "MODELS")])
def test_a_registry_is_a_literal_dict(door: str, registry: str) -> None:
    values = [
        node.value
        for node in _parse(PACKAGE / door / "__init__.py").body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        and registry
        in {ast.unparse(target) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])}
    ]
    assert len(values) == 1
    (value,) = values
    if isinstance(value, ast.Call):  # MappingProxyType({...})
        assert ast.unparse(value.func) == "MappingProxyType"
        (value,) = value.args
    assert isinstance(value, ast.Dict)
    assert all(key is not None for key in value.keys)  # no {**others}


def test_no_path_of_a_machine_stands_in_the_project() -> None:
    """What is committed runs anywhere; tests look for real data where conftest.py says."""
    for folder in ("src", "tests", "docs", "recipes", "benchmarks", "scripts"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".md", ".yaml", ".sh", ".toml"}:
                found = re.search(r"(?<![\w.])/(home|root|work|Users)/\w", path.read_text(encoding="utf-8"))
                assert not found, f"{path}: {found}"


BITWISE = {"torch.equal", "np.array_equal", "np.array_equiv", "np.testing.assert_array_equal"}
COMPUTED = re.compile(r"probabilit|logit|score|predict|infer\(|answers?\(|loss\(|model\(|forward\(")


def test_answers_of_a_model_are_compared_within_a_tolerance() -> None:
    """Bits depend on the processor (tests/closeness.py); a comment `# same operations` says why they may not here."""
    found = []
    for path in sorted((ROOT / "tests").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for name, call in calls(ast.parse(text)):
            given = " ".join(map(ast.unparse, call.args))
            said = " ".join(lines[call.lineno - 2 : call.end_lineno])
            if name in BITWISE and COMPUTED.search(given) and "# same operations" not in said:
                found.append(f"{path.name}:{call.lineno}: {name}({given})")
    assert not found, "compare with tests.closeness.assert_close:\n" + "\n".join(found)
