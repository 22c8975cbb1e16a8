"""New events into a trained model."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from recspec.api.data import opened, staged
from recspec.api.frames import is_frame
from recspec.api.progress import Events, events
from recspec.api.verb_checks import Place, stop_on_signal, verb
from recspec.api.views import Section, View, Viewed, figures
from recspec.base.errors import DataError, SettingsError
from recspec.base.signals import handled

if TYPE_CHECKING:
    from recspec.loop import UpdateOutcome
    from recspec.training import Updated


class Update(Viewed):
    """What an update came to.

    Attributes:
        path: The folder of the new version, a run by itself; None without one.
        found: What is new, the seconds and bytes, and what training reached; None without a new version.
        outcome: Of a journal, which version answers, and what the gate found; None for a file of events.
    """

    def __init__(self, found: Updated | None, outcome: UpdateOutcome | None = None, line: str = "") -> None:
        self.path, self.found, self.outcome = None if found is None else found.folder, found, outcome
        self.line = line if outcome is None else outcome.line()

    def __fspath__(self) -> str:
        if self.path is None:
            raise DataError(f"update: there is no new version: {self.line}")
        return str(self.path)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        told = self.outcome or self.found
        return {"line": self.line} if told is None else told.to_dict()

    def view(self) -> View:
        """What is new, what training reached, and how long it took."""
        found, more = self.found, () if self.outcome is None else self.outcome.notes
        if found is None:
            return View(f"Update: {self.line}", (), more)
        sizes = {"bundle": f"{found.bundle_bytes:,} bytes"}
        result = found.result
        reached = [] if result is None or result.value is None else [(result.metric, f"{result.value:.4f}")]
        sections = [figures("new", found.counts), figures("seconds", found.seconds), figures("size", sizes)]
        sections += [Section("valid", ("", ""), reached)] if reached else []
        return View(f"Update: {self.path}", sections, (self.line, *more) if self.line else found.notes)


@verb
def update(
    run: Place,
    new_events: object | None = None,
    *,
    journal: str | None = None,
    every: str | None = None,
    window: str | None = None,
    roll_back: bool = False,
    unfreeze: bool = False,
    data: Place | None = None,
    allow_outside: bool = False,
    settings: Mapping[str, object] | None = None,
    progress: bool | Events | None = None,
    tell: Callable[[str], object] | None = None,
    **named: object,
) -> Update:
    """Add new events, users and items to a trained model.

    The new version goes to RUN/updates, where a running server finds it. With a journal, the newest events judge it
    first; a version that fails does not answer. Settings: epochs, replay, learning_rate, admit_after, retire_after,
    retire_most; with a journal also types, positive, min_events, max_age, gate, margin, keep.

    Args:
        run: Folder of a run.
        new_events: Raw events (csv, jsonl or parquet; in Python also a data frame) with the prepared columns.
        journal: Take the events of a journal instead, such as sqlite:///journal.db.
        every: With a journal, try again after so long, such as 15m, until the process is asked to stop.
        window: With a journal, time after an answer in which an act on an item makes its label 1; by default 30m.
        roll_back: Let the version before answer again, and make no new one until --unfreeze.
        unfreeze: Let new versions be made again, after two that failed or a roll-back.
        data: Dataset of the run, if it was moved.
        allow_outside: Allow files outside the specification's folder.
        settings: Settings of the update by name.
        progress: A function that receives the events of the training, or False for no bar.
        tell: A function that receives a line for each attempt of `every`.
        **named: Settings of the update, such as `epochs` or `replay`.

    Raises:
        BundleError: if the run holds no model, or one that takes no new events.
        DataError: if the dataset takes none, or with what is wrong with the events; if the run is frozen.
        SettingsError: if neither events nor a journal are given, or both.
        Interrupted: after Ctrl-C or SIGTERM; the run is as it was.
    """
    from recspec.base import config
    from recspec.inference import build_pipeline
    from recspec.training import Learning, UpdateSettings, check_run
    from recspec.training import update as run_update

    _check_asked(new_events, journal, every, changes=(roll_back, unfreeze))
    place = Path(run)
    if roll_back or unfreeze:
        return _changed(place, roll_back=roll_back)
    spec = opened(data, allow_outside=allow_outside).spec if data is not None else None
    given = {**(settings or {}), **named}
    if journal is None:
        asked = config.build(UpdateSettings, "update", config.assign(given, {"update": UpdateSettings})["update"])
        with _as_file(place, new_events) as file, stop_on_signal() as stop, events(progress) as show:
            found = run_update(
                place,
                file,
                settings=asked,
                data=spec,
                build_pipeline=build_pipeline,
                on_event=show,
                stop_requested=stop,
            )
            return Update(found)
    from recspec.loop import Journal, JournalSettings, Updater

    values = config.assign(given, {"update": JournalSettings})["update"]
    own = config.build(JournalSettings, "update", values, _given(window=window, every=every))
    ended = threading.Event()

    def ask(number: int, _: FrameType | None) -> None:
        if ended.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        ended.set()

    check_run(place)  # before a journal is made for nothing
    with Journal(journal) as source, events(progress) as show, handled(ask):
        updater = Updater(place, source, own, spec, Learning(own, build_pipeline, show, ended.is_set))
        outcome = updater.once() if every is None else updater.keep_on(tell or (lambda _: None), ended)
    if every is None and outcome is not None and outcome.state == "frozen":
        raise DataError(f"{run}: {outcome.why}")
    return Update(None if outcome is None else outcome.updated, outcome)


def _given(**values: object) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


def _check_asked(new_events: object, journal: str | None, every: str | None, changes: Sequence[bool]) -> None:
    """Refuse what does not go together."""
    asked = [new_events is not None, journal is not None, *changes]
    if sum(asked) != 1 and not (journal is not None and new_events is None and sum(changes) == 1):
        raise SettingsError("update: give a file of events, journal (--journal), roll_back or unfreeze: one of them")
    if every is not None and (journal is None or any(changes)):
        raise SettingsError("update: every (--every) goes with a journal, in which new events come")


def _changed(run: Path, *, roll_back: bool) -> Update:
    """Change which version of a run answers, or whether new ones are made."""
    from recspec.bundle import versions
    from recspec.training import check_run

    check_run(run)
    now = versions.roll_back(run) if roll_back else versions.unfreeze(run)
    frozen = f"{now.frozen}: no new version is made until --unfreeze" if now.frozen else "new versions are made again"
    return Update(None, line=f"{versions.called(now.version)} answers; {frozen}")


@contextmanager
def _as_file(run: Path, rows: object) -> Iterator[Path]:
    """The file of the events; a frame is written into one beside the run, which is removed at the end."""
    if is_frame(rows):
        with staged(run, rows, {}) as (file, _):
            yield file
        return
    if not isinstance(rows, (str, os.PathLike)):
        raise DataError(f"update: found {type(rows).__name__}; expected a data frame of raw events, or a file of them")
    yield Path(rows)
