"""The house stands as CONTRIBUTING.md draws it: imports point down, and each thing is done in one place."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "recspec"

LIGHT = {
    "base.errors",
    "base.machine",
    "base.signals",
    "base.latency",
    "base.prefetch",
    "base.spark_session",
    "base.files",
    "base.stores",
    "base.config",
    "base.summaries",
    "metrics",
    "feature_spec",
    "data.encoding",
    "data.storage",
    "data.prepare",
    "datasets",
    "report",
    "api",
    "cli",
}
"""Rooms of the map that load without torch; the others stand on `models.layers`, which needs it."""

EVASIVE = {"util", "utils", "helper", "helpers", "common", "manager", "engine", "runner", "misc"}

MOST_METHODS, MOST_LINES = 15, 300
"""Of a class whose docstring gives no reason for more."""


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str  # `data.storage.reader`, `base.errors`; `models` for models/__init__.py

    @property
    def room(self) -> str:
        """The entry of the map that it belongs to."""
        return room_of(self.name)

    @property
    def is_face(self) -> bool:
        """Whether it is a folder's `__init__.py`."""
        return (PACKAGE / Path(*self.name.split("."))).is_dir()

    @property
    def tree(self) -> ast.Module:
        return _parse(PACKAGE / _file(self.name))

    @property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of its syntax tree."""
        return _nodes(PACKAGE / _file(self.name))

    @property
    def imports(self) -> set[str]:
        """Modules of the package that it imports, wherever in the file."""
        return {_module(name) for name in _imports(self.nodes) if name.split(".")[0] == "recspec"} - {""}


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(_parse(path)))


@cache
def _file(name: str) -> Path:
    path = Path(*name.split("."))
    return path / "__init__.py" if (PACKAGE / path).is_dir() else path.with_suffix(".py")


@cache
def _module(dotted: str) -> str:
    """`storage` for `recspec.data.storage.Ragged`, the longest part that is a file; nothing for the package itself."""
    parts = dotted.split(".")[1:]
    for end in range(len(parts), 0, -1):
        if (PACKAGE / _file(".".join(parts[:end]))).is_file():
            return ".".join(parts[:end])
    return ""


def _imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Dotted names imported anywhere."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are written out in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = [
    Module(".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"))
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE) not in {Path("__init__.py"), Path("base/__init__.py"), Path("data/__init__.py")}
]


def every_module(check: Callable[[Module], None]) -> Callable[[], None]:
    """The test that all modules pass a check; it names each one that does not."""

    def test() -> None:
        failed = []
        for module in MODULES:
            try:
                check(module)
            except AssertionError as error:
                failed.append(f"{module.name}: {str(error).partition(chr(10))[0]}")
        assert not failed, "\n".join(failed)

    test.__doc__ = check.__doc__
    return test


@cache
def rooms() -> tuple[str, ...]:
    """The map of CONTRIBUTING.md, from top to bottom: `base.errors`, `data.storage`, `models`."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = re.search(r"^src/recspec/\n((?:  .*\n)+)", text, re.MULTILINE)
    assert tree, "CONTRIBUTING.md draws no tree that begins with 'src/recspec/'"
    return tuple(name.replace("/", ".") for name in re.findall(r"^  ([\w/]+?)(?:/|\.py) ", tree[1], re.MULTILINE))


@cache
def room_of(name: str) -> str:
    """The entry of the map that a module belongs to: the longest that it begins with."""
    return max((room for room in rooms() if f"{name}.".startswith(f"{room}.")), key=len, default=name)


@cache
def face(room: str) -> frozenset[str]:
    """What a folder's `__init__.py` lets other folders import: `__all__`, or else what it imports of its own files."""
    found = set[str]()
    for node in ast.walk(_parse(PACKAGE / _file(room))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"recspec.{room}."):
            found.update(alias.asname or alias.name for alias in node.names)
    return frozenset(found)


FOLDERS = sorted({module.name for module in MODULES if module.is_face})


# --- what imports what -----------------------------------------------------------------------------------------------


def test_the_map_holds_every_room() -> None:
    there = {module.room for module in MODULES} - {"__main__"}
    assert set(rooms()) == there, f"CONTRIBUTING.md lacks {there - set(rooms())} and still names {set(rooms()) - there}"


@every_module
def test_imports_point_down(module: Module) -> None:
    if module.name == "__main__":
        assert module.imports == {"cli"}
        return
    order = rooms()
    for name in module.imports:
        room = room_of(name)
        if room != module.room:
            assert order.index(room) < order.index(module.room), (
                f"{module.name} imports {name}, which the map lists later"
            )


@every_module
def test_other_folders_are_imported_by_their_face(module: Module) -> None:
    """From another folder a file imports names that its `__init__.py` lists; a sibling it imports by its own path."""
    for node in module.nodes:
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("recspec."):
            continue
        assert node.module is not None
        name = node.module.removeprefix("recspec.")
        room = room_of(name)
        if room not in FOLDERS:
            continue
        where, inside = f"{module.name}, line {node.lineno}", name != room
        if room == module.room:
            siblings = all((PACKAGE / _file(f"{room}.{alias.name}")).is_file() for alias in node.names)
            assert inside or siblings, f"{where}: imports its own folder's face"
        else:
            assert not inside, f"{where}: reaches into recspec.{room}; import from recspec.{room} itself"
            unnamed = {alias.name for alias in node.names} - face(room)
            assert not unnamed, f"{where}: recspec.{room} does not show {sorted(unnamed)}"


@pytest.mark.parametrize("room", FOLDERS)
def test_the_files_of_a_folder_do_not_import_in_a_circle(room: str) -> None:
    graph = {
        module.name: {name for name in module.imports if room_of(name) == room and name != room}
        for module in MODULES
        if module.room == room and not module.is_face
    }
    list(TopologicalSorter(graph).static_order())


def test_tests_mirror_the_folders() -> None:
    tested = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert tested == {name.split(".")[-1] for name in FOLDERS}


@every_module
def test_a_large_class_says_why_it_is_one(module: Module) -> None:
    for node in module.nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        assert node.end_lineno is not None
        methods = sum(isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) for part in node.body)
        lines = node.end_lineno - node.lineno + 1
        if methods > MOST_METHODS or lines > MOST_LINES:
            says = "One class because" in (ast.get_docstring(node) or "")
            assert says, f"{module.name}.{node.name}: {methods} methods, {lines} lines; divide it, or give the reason"


# --- torch -----------------------------------------------------------------------------------------------------------


def test_torch_is_not_loaded_by_light_rooms() -> None:
    code = """
import importlib, sys

for room in sys.argv[1:]:
    importlib.import_module(f"recspec.{room}")
    for name in {"torch", "pyspark", "tensorboard", "implicit"} & set(sys.modules):
        print(f"{room} loads {name}")
"""
    done = subprocess.run([sys.executable, "-c", code, *sorted(LIGHT)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


NOT_FOR_HELP = {
    "torch",
    "numpy",
    "pyarrow",
    "pydantic",
    "yaml",
    "duckdb",
    "ibis",
    "filelock",
    "asyncio",
    "rich",
    "recspec.base.config",
    "recspec.base.files",
    "recspec.feature_spec",
}
"""Modules that `--help` does without; they took more than half of its time."""


def test_the_help_answers_without_the_modules_that_commands_need() -> None:
    code = """
import sys
from recspec import cli
unwanted = set(sys.argv[1:])
sys.argv = ["recspec", "--help"]
try:
    cli.main()
finally:
    print(*sorted(unwanted & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code, *NOT_FOR_HELP], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "prepare" in done.stdout
    assert done.stderr.strip() == ""


def test_a_lazy_face_loads_each_of_its_names_and_torch_only_where_one_needs_it() -> None:
    code = """
import sys
import recspec.loop as loop
for name in sys.argv[1:]:
    getattr(loop, name)
print(*sorted({"torch", "recspec.inference", "recspec.training"} & set(sys.modules)))
print(hasattr(loop, "no_such_name"))
"""
    of_journals = "Journal summarize verify_journal prune_journal export_days import_events".split()
    of_experiments = "analyse assign load_experiments named now_us read_outcomes register".split()
    asked = [sys.executable, "-c", code, *of_journals, *of_experiments]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "\nFalse\n"), done.stderr
    import recspec.loop as loop

    assert [name for name in face("loop") if not hasattr(loop, name)] == []


# --- who may do what -------------------------------------------------------------------------------------------------


def calls(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.Call]]:
    """Every call by its dotted name: `yaml.load`, `print`."""
    for node in nodes:
        if isinstance(node, ast.Call) and (name := dotted(node.func)):
            yield name, node


def dotted(node: ast.expr) -> str:
    """`yaml.load` for an attribute of a name; calls and subscripts on the way are left out."""
    while isinstance(node, (ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Attribute):
        of = dotted(node.value)
        return f"{of}.{node.attr}" if of else ""
    return node.id if isinstance(node, ast.Name) else ""


@every_module
def test_only_the_command_line_prints_and_exits(module: Module) -> None:
    if module.room == "cli":
        return
    found = {name for name, _ in calls(module.nodes)}
    if module.name == "api.progress":  # the bar of a terminal
        found -= {"sys.stderr.write"}
    assert not found & {"print", "exit", "quit", "sys.exit", "os._exit", "sys.stdout.write", "sys.stderr.write"}
    names = {node.id for node in module.nodes if isinstance(node, ast.Name)}
    assert "SystemExit" not in names
    assert "rich" not in {name.split(".")[0] for name in _imports(module.nodes)}


@every_module
def test_nothing_read_from_a_file_is_run(module: Module) -> None:
    for name, call in calls(module.nodes):
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
    classes = [node.name for node in module.nodes if isinstance(node, ast.ClassDef)]
    for name in classes:
        assert not EVASIVE & {word.lower() for word in re.findall(r"[A-Z][a-z]*", name)}, name


@every_module
def test_every_module_and_public_name_says_what_it_is(module: Module) -> None:
    assert ast.get_docstring(module.tree), module.name
    for node in module.tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            if "overload" in map(ast.unparse, node.decorator_list):  # says only how types go together
                continue
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
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(name in text for name in BITWISE):
            continue
        lines = text.splitlines()
        for name, call in calls(ast.walk(ast.parse(text))):
            if name not in BITWISE:
                continue
            given = " ".join(map(ast.unparse, call.args))
            said = " ".join(lines[call.lineno - 2 : call.end_lineno])
            if COMPUTED.search(given) and "# same operations" not in said:
                found.append(f"{path.name}:{call.lineno}: {name}({given})")
    assert not found, "compare with tests.closeness.assert_close:\n" + "\n".join(found)
