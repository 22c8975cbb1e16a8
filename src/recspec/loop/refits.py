"""Runs that stood on a forgotten person's data, trained again on their cleaned datasets.

`forget` marks each run whose bundle it blanked (RUN/forgotten.json). A refit trains a marked run again in a hidden
folder inside it, puts the whole bundle in place of the old one, then checkpoints, log and record, and removes the mark.
So a kill leaves the old model or the new one, and the mark says what is still to be done.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from recspec.base.errors import BundleError, DataError, Interrupted, RecspecError
from recspec.base.files import clear_abandoned, locked_inside, put_in_place, staging, write_whole
from recspec.bundle import folder as bundle
from recspec.bundle import run_record, versions
from recspec.training import Learning, dataset_of, parts_of, refit

MARK = "forgotten.json"
WORK = "refit"
REPLACED = ("checkpoints", "log.jsonl", "tensorboard", run_record.FILE_NAME)
"""What a run holds beside its bundle of the training that is replaced."""


@dataclass
class Refits:
    """What became of the marked runs."""

    done: list[Path] = field(default_factory=list)
    failed: dict[Path, str] = field(default_factory=dict)
    """Run -> why it is as it was, without the person's own rows."""


def mark(home: Path) -> None:
    """Note that the weights of a run's bundle, or of an update's, were shaped by somebody who is forgotten now."""
    write_whole(home / MARK, json.dumps({"since": run_record.now()}) + "\n")


def refit_runs(under: Path, learning: Learning) -> Refits:
    """Train the marked runs below a folder again, each part before what is made of it.

    Raises:
        Interrupted: if `learning.stop_requested` says so; the marks that are left say what is to be done.
    """
    found, waiting = Refits(), sorted(_marked(under))
    while waiting:
        ready = [home for home in waiting if not any(part in waiting for part in _parts(home, learning))]
        for home in ready or waiting[:1]:
            waiting.remove(home)
            try:
                _refit(home, under, learning)
                found.done.append(home)
            except Interrupted:
                raise
            except RecspecError as error:
                found.failed[home] = str(error)
    return found


def _marked(under: Path) -> Iterator[Path]:
    """Runs and updates with a mark. Links are not followed."""
    for root, folders, files in os.walk(under):
        folders.sort()
        if MARK in files:
            yield Path(root)


def _parts(home: Path, learning: Learning) -> list[Path]:
    """The runs that a blend or a pipeline is made of; none of a model alone, or if they can't be told."""
    base = home / versions.BUNDLE
    try:
        return [run_record.home(each) for each in parts_of(base, bundle.read_card(base), learning) or ()]
    except RecspecError:
        return []


def _refit(home: Path, under: Path, learning: Learning) -> None:
    base = home / versions.BUNDLE
    with ExitStack() as held:
        if (run := _updated_run(home)) is not None:
            held.enter_context(versions.updating(run))
        held.enter_context(locked_inside(home, "refitting", holds=versions.BUNDLE))
        clear_abandoned(home / WORK)
        data = run_record.data_of(base)
        if data is not None and not Path(data.path).resolve().is_relative_to(under.resolve()):
            where = f"its dataset {data.path} lies outside {under}, and may hold the person"
            raise DataError(f"{where}; forget the person in a folder that holds both")
        spec = dataset_of(base, None)
        for part in _parts(home, learning):
            if (part / MARK).is_file():
                raise BundleError(f"its part {part} was not trained again")
        with staging(home / WORK) as made:
            refit(base, spec, made, learning)
            put_in_place(made / versions.BUNDLE, base)
            for name in REPLACED:
                _replace(made / name, home / name)
    (home / MARK).unlink()


def _updated_run(home: Path) -> Path | None:
    """The run whose updates must not go on meanwhile: the one that holds this update or part, or itself."""
    for each in (home, *home.parents):
        if each.parent.name == versions.UPDATES and versions.NUMBER.fullmatch(each.name):
            return each.parent.parent
    return home if (home / versions.UPDATES).is_dir() else None


def _replace(new: Path, old: Path) -> None:
    if not new.exists():
        return
    if new.is_dir():
        shutil.rmtree(old, ignore_errors=True)
    new.replace(old)
