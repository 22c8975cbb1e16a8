"""The versions of a run: its bundle, and the updates of it.

RUN/bundle                            the model as it was trained
RUN/updates/0001/bundle               the model after the first update, a bundle like any other
RUN/updates/0001/delta.safetensors    how it differs from the version before; written last
RUN/updates/0001/data, run.json, log.jsonl    the dataset with the new events, and the record of the update

An update counts once its delta is there, so an update that was killed leaves the version before it. A copy of a run
that gets the deltas alone makes the bundles of them by `take_deltas`.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recspec.base.errors import BundleError
from recspec.base.files import PathError, confine, confined, locked_inside, manifest, staging
from recspec.bundle import delta

UPDATES = "updates"
DELTA = "delta.safetensors"
BUNDLE = "bundle"
NUMBER = re.compile(r"[0-9]{4,9}")

log = logging.getLogger("recspec.versions")


def updates_of(run: Path) -> list[Path]:
    """The folders of a run's updates that are complete or can be made complete, oldest first."""
    try:
        found = [each for each in (run / UPDATES).iterdir() if NUMBER.fullmatch(each.name)]
    except OSError:
        return []
    return sorted((each for each in found if _holds_delta(run, each.name)), key=lambda each: int(each.name))


def _holds_delta(run: Path, name: str) -> bool:
    """Whether an update has its delta; one behind a link that leads out of the run has none."""
    try:
        return (
            all(confined(run, f"{UPDATES}/{name}/{part}") for part in (DELTA, BUNDLE))
            and (run / UPDATES / name / DELTA).is_file()
        )
    except PathError:
        return False


def newest(run: Path) -> Path | None:
    """The bundle of the newest update that has one; None if there is none."""
    return made[-1] if (made := _made(run)) else None


def number_made(run: Path) -> int:
    """How many updates have their bundle; a delta that was copied alone has none before `take_deltas`."""
    return len(_made(run))


def _made(run: Path) -> list[Path]:
    return [each / BUNDLE for each in updates_of(run) if (each / BUNDLE / "bundle.json").is_file()]


def number_of(bundle: Path) -> int:
    """The number of the update whose bundle this is; 0 for the bundle of a run."""
    folder = bundle.parent
    is_update = folder.parent.name == UPDATES and bundle.name == BUNDLE and NUMBER.fullmatch(folder.name)
    return int(folder.name) if is_update else 0


def next_update(run: Path) -> Path:
    """The folder of the next update; what a killed update left there is removed."""
    known = updates_of(run)
    folder = run / UPDATES / f"{1 + (int(known[-1].name) if known else 0):04d}"
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
    return folder


def take_deltas(run: Path) -> int:
    """Make the bundle of each update that has only its delta, in order; returns how many were made.

    Raises:
        BundleError: if a delta is damaged, or is none of the version before it; later ones are not tried.
    """
    if not _unmade(run):
        return 0
    with updating(run):
        return make_missing(run)


@contextmanager
def updating(run: Path) -> Iterator[None]:
    """Keep other processes from the updates of a run.

    Raises:
        PathError: if the folder of the updates leads out of the run, where a new update would replace what is there.
    """
    confine(run, [UPDATES])
    with locked_inside(run / UPDATES, "updating"):
        yield


def make_missing(run: Path) -> int:
    """As `take_deltas`, for a process that holds the lock of the updates."""
    missing, base = _unmade(run), run / BUNDLE
    for folder in updates_of(run) if missing else ():
        made = folder / BUNDLE
        if folder in missing:
            if not (base / "bundle.json").is_file():
                raise BundleError(f"{folder / DELTA}: {base} is not there, to which the delta belongs")
            with staging(made) as temporary:
                delta.apply(base, folder / DELTA, temporary)
                temporary.rename(made)
                temporary.mkdir()  # which `staging` removes
            log.info("%s: made from %s and its delta", made, base)
        base = made
    return len(missing)


def _unmade(run: Path) -> list[Path]:
    return [each for each in updates_of(run) if not (each / BUNDLE / "bundle.json").is_file()]


def check_base(folder: Path) -> str:
    """The digest of a bundle's manifest, which a delta names. Raises BundleError if it has none."""
    digest = manifest.digest(folder)
    if not digest:
        raise BundleError(f"{folder}: has no {manifest.FILE_NAME}, so an update can't name it; train it anew")
    return digest
