"""The versions of a run: its bundle, and the updates of it.

RUN/bundle                                    the model as it was trained
RUN/updates/0001/bundle                       the model after the first update, a bundle like any other
RUN/updates/0001/data, run.json, log.jsonl    the dataset with the new events, and the record of the update
RUN/catalogue_changes.parquet                 stock, prices and blocked items, of the bundle and of all updates
RUN/updates/current.json                      which version answers, where updates are judged first

An update's bundle is renamed into place. Without `current.json` it counts from then on; with it, once the file names
it. So a killed update leaves the version before it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field

from recspec.base.errors import DataError
from recspec.base.files import PathError, confine, confined, locked_inside, removed, write_whole
from recspec.bundle import cards

UPDATES = "updates"
BUNDLE = "bundle"
CHANGES = "catalogue_changes.parquet"
"""What became of items since the training; see `inference/item_changes.py`."""
CURRENT, TURN = "current.json", ".current.lock"
PATIENCE = 30.0
"""Seconds to wait for another process that changes which version answers."""
FORMAT = 1
NUMBER = re.compile(r"[0-9]{4,9}")
MOST_BYTES = 1 << 20


class Current(BaseModel):
    """The content of `current.json`; 0 is the bundle of the run itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    version: int = Field(0, ge=0)
    """The update that answers."""
    earlier: tuple[int, ...] = ()
    """The versions before it that can be gone back to, oldest first."""
    newest: int = Field(0, ge=0)
    """The highest number that was given."""
    failures: int = Field(0, ge=0)
    """New versions that failed in a row."""
    frozen: str = ""
    """Why no new version is made; empty while they are."""


def read_current(run: Path) -> Current | None:
    """What `current.json` says; None if there is none. Raises BundleError if it is damaged."""
    return cards.read(run / UPDATES, CURRENT, Current, what="state of versions", version=FORMAT, most=MOST_BYTES)


def state(run: Path) -> Current:
    """Which version answers, whether a file says so or the newest one does. Raises BundleError if it is damaged."""
    found = read_current(run)
    if found is None:
        numbers = [int(each.name) for each in updates_of(run)]
        chain = (0, *numbers)
        return Current(version=chain[-1], earlier=chain[:-1], newest=chain[-1])
    chain = tuple(each for each in (*found.earlier, found.version) if not each or _holds_bundle(run, f"{each:04d}"))
    return found.model_copy(update={"version": (chain or (0,))[-1], "earlier": chain[:-1]})


@contextmanager
def _changing(run: Path) -> Iterator[Current]:
    """The state, which no other process changes until the end of the block."""
    (run / UPDATES).mkdir(exist_ok=True)
    try:
        with FileLock(run / UPDATES / TURN, timeout=PATIENCE):
            yield state(run)
    except Timeout:
        raise DataError(f"{run}: another process changes its versions; try again") from None


def _write(run: Path, current: Current) -> Current:
    write_whole(run / UPDATES / CURRENT, current.model_dump_json(indent=2) + "\n")
    return current


def hold(run: Path) -> Current:
    """Let the version that answers go on to, when a newer one is there; returns the state."""
    with _changing(run) as now:
        return _write(run, now)


def publish(run: Path, number: int, *, base: int, keep: int | None = None) -> Current:
    """Let an update of the version `base` answer; of the versions before it, `keep` stay, and by default all.

    Nothing changes if `base` does not answer any more, as after a roll-back.
    """
    with _changing(run) as now:
        if now.version != base:
            return now
        earlier = (*now.earlier, now.version)
        earlier = earlier if keep is None else earlier[max(0, len(earlier) - keep) :]
        made = _write(run, Current(version=number, earlier=earlier, newest=max(now.newest, number)))
        for each in _folders(run) if keep is not None else ():
            if int(each.name) not in (number, *earlier):
                removed(each)
        return made


def fail(run: Path, number: int, *, most: int) -> Current:
    """Remove an update that was judged and failed; after `most` in a row no further one is made."""
    with _changing(run) as now:
        failures = now.failures + 1
        frozen = now.frozen or (f"{failures} new versions in a row failed" if failures >= most else "")
        known = {"newest": max(now.newest, number), "failures": failures, "frozen": frozen}
        made = _write(run, now.model_copy(update=known))
        removed(run / UPDATES / f"{number:04d}")
        return made


def roll_back(run: Path) -> Current:
    """Let the version before answer again, and make no new one. Raises DataError if there is none."""
    with _changing(run) as now:
        if not now.earlier:
            raise DataError(f"{run}: there is no version before {called(now.version)} to go back to")
        *earlier, version = now.earlier
        why = f"{called(now.version)} was rolled back"
        known = {"version": version, "earlier": tuple(earlier), "failures": 0, "frozen": why}
        return _write(run, now.model_copy(update=known))


def unfreeze(run: Path) -> Current:
    """Let new versions be made again."""
    with _changing(run) as now:
        return _write(run, now.model_copy(update={"failures": 0, "frozen": ""}))


def _folders(run: Path) -> list[Path]:
    """The folders of updates, whole or not."""
    try:
        found = [each for each in (run / UPDATES).iterdir() if NUMBER.fullmatch(each.name)]
    except OSError:
        return []
    return sorted(found, key=lambda each: int(each.name))


def updates_of(run: Path) -> list[Path]:
    """The folders of a run's updates that have their bundle, oldest first, whether they answered or not."""
    return [each for each in _folders(run) if _holds_bundle(run, each.name)]


def _holds_bundle(run: Path, name: str) -> bool:
    """Whether an update has its bundle; one behind a link that leads out of the run has none."""
    try:
        return (confined(run, f"{UPDATES}/{name}/{BUNDLE}") / "bundle.json").is_file()
    except PathError:
        return False


def newest(run: Path) -> Path | None:
    """The bundle of the update that answers; None if the run's own does. Raises BundleError; see `state`."""
    number = state(run).version
    return run / UPDATES / f"{number:04d}" / BUNDLE if number else None


def number_of(bundle: Path) -> int:
    """The number of the update whose bundle this is; 0 for the bundle of a run."""
    folder = bundle.parent
    is_update = folder.parent.name == UPDATES and bundle.name == BUNDLE and NUMBER.fullmatch(folder.name)
    return int(folder.name) if is_update else 0


def called(number: int) -> str:
    """What people call a version of a run, by the number of its update."""
    return f"update {number}" if number else "update 0 (as trained)"


def run_of(bundle: Path) -> Path | None:
    """The run whose bundle, or whose update's, this is; None for a bundle elsewhere."""
    if number_of(bundle):
        return bundle.parent.parent.parent
    return bundle.parent if bundle.name == BUNDLE else None


def next_update(run: Path) -> Path:
    """The folder of the next update; what a killed update left there is removed."""
    now = state(run)
    folder = run / UPDATES / f"{1 + max(now.newest, now.version):04d}"
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
