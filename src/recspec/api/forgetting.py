"""Forget a person, wherever recspec keeps them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from recspec.api.journals import existing_journal
from recspec.api.progress import Events, events
from recspec.api.verb_checks import Place, stop_on_signal, verb
from recspec.api.views import Section, View, Viewed, figures
from recspec.base.errors import SettingsError, require_extra

if TYPE_CHECKING:
    from recspec.loop import Forgotten as Found


class Forgotten(Viewed):
    """What was removed of a person, and what stays.

    Attributes:
        found: The counts, the changed folders and files, what stays and until when, and other files with the id.
    """

    def __init__(self, found: Found) -> None:
        self.found = found

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        found = self.found
        places = {name: [str(each) for each in getattr(found, name)] for name in ("changed", "refitted", "found")}
        return {"removed": dict(found.counts), **places, "stays": found.stays}

    def view(self) -> View:
        """What was removed, what stays, and which other files hold the id."""
        found = self.found
        notes = list(found.stays)
        if found.found:
            notes += [
                f"{file}: still holds the id, or the same word; look into it, and edit or remove it"
                for file in found.found
            ]
        else:
            notes.append("a search for the id finds nothing")
        sections = [figures("removed", dict(found.counts))]
        if found.refitted:
            sections.append(Section("trained again", ("",), [(str(each),) for each in found.refitted]))
        return View("Forgotten", sections, tuple(notes))


@verb
def forget(
    user: str,
    *,
    under: Place,
    journal: str | None = None,
    refit: bool = False,
    progress: bool | Events | None = None,
) -> Forgotten:
    """Remove a person from datasets, runs, answers and a journal.

    The person's rows, seen items and row of each table go, in all versions; late events of the person are refused.
    Run it again after a kill. A running server takes the new files as it takes a new model.

    Args:
        user: Raw id of the person.
        under: Folder with datasets, runs, updates, reports and batch answers.
        journal: URL of the journal: sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE.
        refit: Then train the models again that the person's data shaped, each with its own settings.
        progress: A function that receives the events of the training, or False for no bar.

    Raises:
        Interrupted: with `refit`, after Ctrl-C or SIGTERM; the same command goes on.
        SettingsError: if the id is empty, or the URL names no journal.
        DataError: if a folder is damaged or being written, or the journal can't be opened.
    """
    require_extra("sqlalchemy", "loop")
    from recspec.loop import forget as run

    if not user.strip():
        raise SettingsError("forget: expected the raw id of a person")
    with nullcontext() if journal is None else existing_journal(journal, read_only=False) as opened:
        if not refit:
            return Forgotten(run(user, Path(under), opened))
        from recspec.inference import build_pipeline
        from recspec.training import Learning

        with stop_on_signal() as stop, events(progress) as show:
            learning = Learning(build_pipeline=build_pipeline, on_event=show, stop_requested=stop)
            return Forgotten(run(user, Path(under), opened, learning=learning))
