"""The SHA-256 of every file of a folder, in its `manifest.json`.

A manifest finds files that were changed, lost or added by mistake. Whoever can write to the folder can also replace the
manifest; compare the manifest's own digest, noted elsewhere, to rule that out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from recspec.base.errors import BundleError
from recspec.base.files.outputs import write_whole
from recspec.base.files.paths import PathError, confined, parse_json, read_text

FILE_NAME = "manifest.json"
FORMAT = 1
BLOCK = 1 << 20
ASIDE = ("export", "evaluations", "run.json", "report.html")
"""Files and folders that are no part of the model: exports, which have a manifest of their own, and what is said of the
model later."""


def write(folder: Path) -> str:
    """Write the manifest of all files of the folder; returns its digest."""
    files = {name: _digest(folder / name) for name in names(folder)}
    text = json.dumps({"format": FORMAT, "files": files}, indent=2, sort_keys=True) + "\n"
    write_whole(folder / FILE_NAME, text)
    return hashlib.sha256(text.encode()).hexdigest()


def check(folder: Path, copied_to: Path | None = None) -> str:
    """Compare every file with the manifest; returns the manifest's digest.

    With `copied_to`, an empty folder, each file is read once, and what is compared is what was copied there.

    Raises BundleError, naming every file that is missing, changed, added or special, or leads outside the folder.
    """
    there = set(names(folder))
    if not (folder / FILE_NAME).exists():
        raise BundleError(f"{folder}: has no {FILE_NAME} to check its files by; write it again, or pass --no-verify")
    listed, text = _read(folder)
    problems = [f"'{name}' is missing" for name in listed if name not in there]
    problems += [f"'{name}' is not in {FILE_NAME}" for name in there if name not in listed]
    to = {} if copied_to is None else {name: copied_to / name for name in listed}
    changed = [name for name in listed if name in there and _digest(folder / name, to.get(name)) != listed[name]]
    problems += [f"'{name}' was changed: its SHA-256 is not the one in {FILE_NAME}" for name in changed]
    if problems:
        advice = "restore them or write it again, or pass --no-verify if you changed them"
        raise BundleError.of(f"{folder}: its files are not as they were written; {advice}", problems)
    if copied_to is not None:
        (copied_to / FILE_NAME).write_text(text, encoding="utf-8")
    return _digest_of(text)


def copy(folder: Path, target: Path, *, verify: bool) -> None:
    """Copy the files that a manifest covers, and the manifest, into an empty folder; with `verify` as `check` does."""
    if verify:
        check(folder, target)
        return
    for name in (*names(folder), FILE_NAME):
        if (folder / name).exists():
            _digest(confined(folder, name), target / name)


def digest(folder: Path) -> str:
    """The manifest's own digest, as `check` returns it, without comparing any file; empty without a manifest."""
    try:
        confined(folder, FILE_NAME)
        return _digest_of(read_text(folder / FILE_NAME))
    except PathError:
        return ""


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read(folder: Path) -> tuple[dict[str, str], str]:
    """The digests that a manifest lists, and its text."""
    file = folder / FILE_NAME
    try:
        confined(folder, FILE_NAME)
        text = read_text(file)
        data = parse_json(text)
    except PathError as error:
        raise BundleError(str(error)) from None
    except ValueError as error:
        raise BundleError(f"{file}: damaged: {error}") from None
    data = data if isinstance(data, dict) else {}
    files = data.get("files")
    if not isinstance(files, dict) or not all(isinstance(each, str) for each in files.values()):
        raise BundleError(f"{file}: damaged: expected {{'format': {FORMAT}, 'files': {{NAME: SHA-256}}}}")
    if (written := data.get("format")) != FORMAT:
        raise BundleError(f"{file}: manifest format {written!r}; this recspec reads {FORMAT}")
    return files, text


def names(folder: Path) -> Iterator[str]:
    """The files that a manifest lists: those of a folder and its subfolders, sorted, without hidden ones and `ASIDE`.

    Raises BundleError, naming every file that is special, or leads outside the folder.
    """
    problems: list[str] = []
    found: list[str] = []

    def walk(below: str) -> None:
        for child in sorted((folder / below).iterdir()):
            name = f"{below}{child.name}"
            if child.name.startswith(".") or name in (FILE_NAME, *ASIDE):
                continue
            try:
                confined(folder, name)
            except PathError as error:
                problems.append(str(error))
                continue
            if child.is_dir():
                walk(f"{name}/")
            else:
                found.append(name)

    walk("")
    BundleError.refuse(str(folder), problems)
    return iter(found)


def _digest(file: Path, copied_to: Path | None = None) -> str:
    """The SHA-256 of a file, or of what was copied of it."""
    try:
        with ExitStack() as opened:
            stream = opened.enter_context(file.open("rb"))
            if copied_to is None:
                return hashlib.file_digest(stream, "sha256").hexdigest()
            copied_to.parent.mkdir(parents=True, exist_ok=True)
            target, digest = opened.enter_context(copied_to.open("xb")), hashlib.sha256()
            while block := stream.read(BLOCK):
                digest.update(block)
                target.write(block)
            return digest.hexdigest()
    except OSError as error:
        what = "read" if copied_to is None else f"copied to {copied_to}"
        raise BundleError(f"{file}: can't be {what}: {error.strerror}") from None
