"""The YAML file of a specification: finding it, parsing it with line numbers, writing it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import yaml

from recspec.base.config import yaml_problem
from recspec.base.errors import SpecError, listed, nearest
from recspec.base.files import PathError, confined, local, read_text, whole_file
from recspec.feature_spec.checks import Problem, dotted, shown
from recspec.feature_spec.sections import Place

FILE_NAME = "feature_spec.yaml"
RAW_SUFFIXES = (".csv", ".tsv", ".parquet", ".json", ".jsonl", ".ndjson", ".gz", ".zip")  # raw rows, named by mistake
BUNDLES = ("bundle.json", "bundle/bundle.json")  # what a trained model's folder holds, named by mistake too
MAX_BYTES = 16 << 20
MAX_VALUES = 1_000_000  # in the file once its aliases are followed: far beyond any real file, and quick to refuse


class YamlFile:
    """A parsed specification file: its data, the line of every value, and the names that stand twice."""

    def __init__(self, path: str | Path) -> None:
        """Parse the file. Raises `SpecError` if it is missing, holds raw rows, or is no YAML mapping."""
        try:
            self.path = _find(local(path, "the specification"))
            text = read_text(self.path, most=MAX_BYTES)
        except PathError as error:
            raise SpecError(str(error)) from None
        self.duplicates: list[Problem] = []  # of a name that stands twice, YAML keeps the last
        self._lines: dict[Place, int] = {}
        self._values: dict[int, int] = {}  # node id -> values it stands for; 0 while they are counted
        data = self._parse(text)
        if not isinstance(data, dict):
            found = "nothing" if data is None else shown(data)
            raise SpecError(f"{self.path}: expected sections feature_spec, source_spec, channel_spec; found {found}")
        self.data: dict[str, object] = data

    def error(self, problems: Iterable[Problem]) -> SpecError:
        """One error for all problems, each with its line."""
        return SpecError.of(str(self.path), [f"{self._line(place)}{dotted(place)}: {what}" for place, what in problems])

    def _line(self, place: Place) -> str:
        """`line 12: ` for a place, or for the nearest part of it that the file holds."""
        parts = (place[:end] for end in range(len(place), 0, -1))
        return next((f"line {self._lines[part]}: " for part in parts if part in self._lines), "")

    def _parse(self, text: str) -> object:
        try:
            loader = yaml.SafeLoader(text)
            root = loader.get_single_node()
            if root is None:
                return None
            self._visit(root, ())
            return loader.construct_document(root)
        except yaml.YAMLError as error:
            raise SpecError(f"{self.path}: {yaml_problem(error)}") from None
        except ValueError as error:  # a date such as 2020-13-45
            raise SpecError(f"{self.path}: not valid YAML: {error}") from None
        except RecursionError:
            raise SpecError(f"{self.path}: not valid YAML: lists and mappings are nested too deeply") from None

    def _visit(self, node: yaml.Node, place: Place) -> int:
        """Note lines and duplicate names; count the values that a node stands for, with all its aliases followed."""
        self._lines.setdefault(place, node.start_mark.line + 1)
        if id(node) not in self._values:
            self._values[id(node)] = 0
            self._values[id(node)] = 1 + sum(self._visit(child, inner) for inner, child in self._children(node, place))
        count = self._values[id(node)]
        if count == 0:
            raise yaml.MarkedYAMLError(problem="a value that holds itself", problem_mark=node.start_mark)
        if count > MAX_VALUES:
            what = f"its aliases make more than {MAX_VALUES:,} values of it"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)
        return count

    def _children(self, node: yaml.Node, place: Place) -> Iterator[tuple[Place, yaml.Node]]:
        if isinstance(node, yaml.SequenceNode):
            yield from (((*place, position), child) for position, child in enumerate(node.value))
        if not isinstance(node, yaml.MappingNode):
            return
        first: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in first:
                self.duplicates.append(((*place, name), f"appears twice, first in line {first[name]}; remove one"))
            first.setdefault(name, line)
            self._lines[*place, name] = line
            yield (*place, name), value


def save_yaml(data: Mapping[str, object], path: str | Path) -> Path:
    """Write the YAML file (into `path` when it is a folder) under a temporary name, then rename it."""
    file = local(path, "the specification")
    if file.is_dir() or file.suffix not in (".yaml", ".yml"):
        file = file / FILE_NAME
    with whole_file(file) as temporary:
        text = yaml.dump(data, Dumper=_PlainDumper, sort_keys=False, width=120, allow_unicode=True)
        temporary.write_text(text, encoding="utf-8")
    return file


class _PlainDumper(yaml.SafeDumper):
    """Writes short lists on one line and no anchors, so that a person can read and edit the file."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


def _write_list(dumper: yaml.SafeDumper, data: list[object]) -> yaml.Node:
    flow = all(not isinstance(value, (dict, list)) for value in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flow)


_PlainDumper.add_representer(list, _write_list)


def _find(path: Path) -> Path:
    """The file to read for what the user named, or an error that says what is there instead."""
    if path.is_dir():
        try:
            file = confined(path, FILE_NAME)
        except PathError as error:
            raise SpecError(f"{path}: {error}") from None
        if not file.is_file() and any((path / name).is_file() for name in BUNDLES):
            raise SpecError(
                f"{path}: is a trained model, not a prepared dataset; `recspec evaluate RUN DATA` takes the run first"
            )
        if not file.is_file():
            others = sorted(found.name for found in path.glob("*.y*ml"))
            hint = f"; found {listed(others)}: name the one you mean" if others else ""
            raise SpecError(f"{path}: no {FILE_NAME} in this folder, so it is not a prepared dataset{hint}")
        return file
    if not path.is_file():
        known = [found.name for found in path.parent.iterdir()] if path.parent.is_dir() else []
        raise SpecError(f"{path}: no such file or folder{nearest(path.name, known)}")
    if path.name.lower().endswith(RAW_SUFFIXES):
        prepare = f"prepare it (recspec prepare table {path.name} OUT) and name the folder OUT"
        raise SpecError(f"{path}: holds rows, and is not a specification; {prepare}")
    return path
