"""Folders of models, under the names that a server gives them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recspec.base.errors import SettingsError
from recspec.base.files import PathError, named_path
from recspec.bundle import folder as bundle
from recspec.feature_spec import find_export_file

RAW = "_raw"
"""Suffix of a model's name for its raw form."""
EXPORT = "export"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")

Fingerprint = tuple[tuple[str, int, int, int], ...]
"""Name, time, size and inode of every file of a folder."""


@dataclass(frozen=True)
class Source:
    """A model's name, and its folder."""

    name: str
    path: Path


def sources_of(named: Sequence[str]) -> tuple[Source, ...]:
    """Names and folders from texts such as `["runs/neumf", "ctr=runs/dlrm"]`; the default name is the folder's.

    Raises:
        SettingsError: for an invalid name, or a name given twice.
    """
    sources: list[Source] = []
    problems: list[str] = []
    for text in named:
        try:
            name, folder = named_path(text, "a model")
        except PathError as error:
            problems.append(str(error))
            continue
        own = folder.resolve()
        name = name or (own.parent.name if own.name == "bundle" else own.name)
        if not NAME.fullmatch(name):
            problems.append(f"'{name}': expected a model name of letters, digits, _ . and -; write NAME={folder}")
        if name in {source.name for source in sources}:
            problems.append(f"two models are called '{name}'; write NAME={folder}")
        if name.endswith(RAW) and name.removesuffix(RAW) in {source.name for source in sources}:
            problems.append(f"'{name}' is the name of the raw form of '{name.removesuffix(RAW)}'; write NAME={folder}")
        sources.append(Source(name, folder))
    if not sources:
        problems.append("no model was named; name a run, a bundle, or NAME=PATH")
    if problems:
        raise SettingsError.of("models", problems)
    return tuple(sources)


def find_versions(path: Path) -> dict[int, Path]:
    """Version -> folder of a bundle, run or export; `path` itself is version 1 if it is one of these."""
    if path.is_dir() and not _holds_model(path):
        found = {int(each.name): each for each in path.iterdir() if each.name.isdecimal() and _holds_model(each)}
        if found:
            return dict(sorted(found.items()))
    return {1: path if find_export_file(path) is not None else bundle.find(path)}


def _holds_model(folder: Path) -> bool:
    bundles = (folder / "bundle.json", folder / "bundle" / "bundle.json")
    return find_export_file(folder) is not None or any(file.is_file() for file in bundles)


def fingerprint(folder: Path) -> Fingerprint:
    """Names, times, sizes and inodes of a folder's files, which change with its content."""
    folder = folder if find_export_file(folder) is not None else bundle.find(folder)
    export = export_beside(folder)
    found = []
    for file in [*sorted(folder.iterdir()), *(sorted(export.iterdir()) if export is not None else ())]:
        stat = file.stat()
        found.append((file.name, stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return tuple(found)


def export_beside(folder: Path) -> Path | None:
    """The export of a bundle, in `export` beside or inside its folder, as from `recspec export RUN RUN/export`."""
    places = [folder / EXPORT, folder.parent / EXPORT] if folder.name == "bundle" else [folder / EXPORT]
    return next((place for place in places if find_export_file(place) is not None), None)
