"""New events into a trained model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from recspec.api.data import opened, staged
from recspec.api.frames import is_frame
from recspec.api.progress import Events, events
from recspec.api.verb_checks import Place, stop_on_signal, verb
from recspec.api.views import Section, View, Viewed, figures
from recspec.base.errors import DataError

if TYPE_CHECKING:
    from recspec.training import Updated


class Update(Viewed):
    """A new version of a run.

    Attributes:
        path: The folder of the version, a run by itself.
        found: What is new, the seconds and bytes, and what training reached.
    """

    def __init__(self, found: Updated) -> None:
        self.path, self.found = found.folder, found

    def __fspath__(self) -> str:
        return str(self.path)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return self.found.to_dict()

    def view(self) -> View:
        """What is new, what training reached, and how long it took."""
        found = self.found
        sizes = {"bundle": f"{found.bundle_bytes:,} bytes"}
        reached = [] if found.result.value is None else [(found.result.metric, f"{found.result.value:.4f}")]
        sections = [figures("new", found.counts), figures("seconds", found.seconds), figures("size", sizes)]
        sections += [Section("valid", ("", ""), reached)] if reached else []
        return View(f"Update: {self.path}", sections, found.notes)


@verb
def update(
    run: Place,
    new_events: object,
    *,
    data: Place | None = None,
    allow_outside: bool = False,
    settings: Mapping[str, object] | None = None,
    progress: bool | Events | None = None,
    **named: object,
) -> Update:
    """Add new events, users and items to a trained model.

    The new version goes to RUN/updates, where a running server finds it. Settings: epochs, replay, learning_rate.

    Args:
        run: Folder of a run.
        new_events: Raw events (csv, jsonl or parquet; in Python also a data frame) with the prepared columns.
        data: Dataset of the run, if it was moved.
        allow_outside: Allow files outside the specification's folder.
        settings: Settings of the update by name.
        progress: A function that receives the events of the training, or False for no bar.
        **named: Settings of the update: `epochs`, `replay`, `learning_rate`.

    Raises:
        BundleError: if the run holds no model, or one that takes no new events.
        DataError: if the dataset takes none, or with what is wrong with the events.
        Interrupted: after Ctrl-C or SIGTERM; the run is as it was.
    """
    from recspec.base import config
    from recspec.training import UpdateSettings
    from recspec.training import update as run_update

    values = config.assign({**(settings or {}), **named}, {"update": UpdateSettings})["update"]
    asked = config.build(UpdateSettings, "update", values)
    spec = opened(data, allow_outside=allow_outside).spec if data is not None else None
    with _as_file(Path(run), new_events) as file, stop_on_signal() as stop, events(progress) as show:
        return Update(run_update(Path(run), file, settings=asked, data=spec, on_event=show, stop_requested=stop))


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
