"""The versions of a run: its bundle, and the updates of it.

RUN/bundle                                    the model as it was trained
RUN/updates/0001/bundle                       the model after the first update, a bundle like any other
RUN/updates/0001/data, run.json, log.jsonl    the dataset with the new events, and the record of the update
RUN/catalogue_changes.parquet                 stock, prices and blocked items, of the bundle and of all updates

An update counts once its bundle is there, which is renamed into place. So a killed update leaves the version before it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recspec.base.files import PathError, confine, confined, locked_inside

UPDATES = "updates"
BUNDLE = "bundle"
CHANGES = "catalogue_changes.parquet"
"""What became of items since the training; see `inference/item_changes.py`."""
NUMBER = re.compile(r"[0-9]{4,9}")


def updates_of(run: Path) -> list[Path]:
    """The folders of a run's updates that have their bundle, oldest first."""
    try:
        found = [each for each in (run / UPDATES).iterdir() if NUMBER.fullmatch(each.name)]
    except OSError:
        return []
    return sorted((each for each in found if _holds_bundle(run, each.name)), key=lambda each: int(each.name))


def _holds_bundle(run: Path, name: str) -> bool:
    """Whether an update has its bundle; one behind a link that leads out of the run has none."""
    try:
        return (confined(run, f"{UPDATES}/{name}/{BUNDLE}") / "bundle.json").is_file()
    except PathError:
        return False


def newest(run: Path) -> Path | None:
    """The bundle of the newest update; None if there is none."""
    return known[-1] / BUNDLE if (known := updates_of(run)) else None


def number_of(bundle: Path) -> int:
    """The number of the update whose bundle this is; 0 for the bundle of a run."""
    folder = bundle.parent
    is_update = folder.parent.name == UPDATES and bundle.name == BUNDLE and NUMBER.fullmatch(folder.name)
    return int(folder.name) if is_update else 0


def run_of(bundle: Path) -> Path | None:
    """The run whose bundle, or whose update's, this is; None for a bundle elsewhere."""
    if number_of(bundle):
        return bundle.parent.parent.parent
    return bundle.parent if bundle.name == BUNDLE else None


def next_update(run: Path) -> Path:
    """The folder of the next update; what a killed update left there is removed."""
    known = updates_of(run)
    folder = run / UPDATES / f"{1 + (int(known[-1].name) if known else 0):04d}"
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
    return folder


@contextmanager
def updating(run: Path) -> Iterator[None]:
    """Keep other processes from the updates of a run.

    Raises:
        PathError: if the folder of the updates leads out of the run, where a new update would replace what is there.
    """
    confine(run, [UPDATES])
    with locked_inside(run / UPDATES, "updating"):
        yield
