"""A journal of events: fill it from files, look into it, check it, write it as files, and remove what is too old."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from recspec.api.experiments import moment_text
from recspec.api.progress import Stages, stages
from recspec.api.verb_checks import Place, one_of, several, verb
from recspec.api.views import Section, View, Viewed, figures
from recspec.base.errors import SettingsError, how_many, require_extra

if TYPE_CHECKING:
    from recspec.loop import ImportedEvents, Journal, JournalSummary

TimeUnit = Literal["s", "ms", "us"]


class ImportedRows(Viewed):
    """What became of the rows of files.

    Attributes:
        found: The counts, the first refused rows with their reasons, and the columns that were not read.
    """

    def __init__(self, found: ImportedEvents) -> None:
        self.found = found

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {**self.found.counts, "refusals": self.found.refusals, "left_out": self.found.left_out}

    def view(self) -> View:
        """Counts, and what was not read."""
        found = self.found
        notes = [f"columns that were not read: {', '.join(found.left_out)}"] if found.left_out else []
        more = found.counts["refused"] - len(found.refusals)
        refused = [*found.refusals, *([f"{how_many(more, 'more row')} refused"] if more else [])]
        return View("imported", [figures("", found.counts)], notes, refused)


class JournalView(Viewed):
    """What a journal holds.

    Attributes:
        found: Rows of each table, events by day and type, the newest event, consumers, and the size.
    """

    def __init__(self, found: JournalSummary) -> None:
        self.found = found

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        days = [{"day": day, "type": kind, "events": count} for day, kind, count in self.found.days]
        return {**asdict(self.found), "days": days}

    def view(self) -> View:
        """Tables of these."""
        found = self.found
        newest = "none" if found.newest_received_at is None else moment_text(found.newest_received_at)
        told = {"newest event": newest, "its number": found.newest_seq, "size in bytes": found.size_bytes}
        told |= {f"{name}s": count for name, count in found.rows.items()}
        told |= {"pruned events": found.pruned} if found.pruned else {}
        waits = [(name, seq, found.newest_seq - seq) for name, seq in found.consumers.items()]
        sections = [
            figures("", told),
            Section("events by day of receipt (UTC)", ("day", "type", "events"), found.days),
            Section("consumers", ("name", "has read to", "behind by"), waits),
        ]
        return View(found.url, [each for each in sections if each.rows])


class JournalRows(Viewed):
    """Numbers of rows by what they are, and notes."""

    def __init__(self, title: str, counts: Mapping[str, int], notes: Sequence[str] = ()) -> None:
        self.title, self.counts, self.notes = title, dict(counts), tuple(notes)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return dict(self.counts)

    def view(self) -> View:
        """A table of them."""
        return View(self.title, [figures("", self.counts)], self.notes)


@contextmanager
def existing_journal(url: str, *, read_only: bool = True) -> Iterator[Journal]:
    """A journal that is there."""
    require_extra("sqlalchemy", "loop")
    from recspec.loop import Journal

    with Journal(url, read_only=True) as journal:
        if read_only:
            yield journal
            return
    with Journal(url) as journal:
        yield journal


@verb
def journal_import(
    journal: str,
    files: Place | Sequence[Place],
    *,
    column: str | Sequence[str] | None = None,
    type: str | None = None,
    context: Sequence[str] | None = None,
    time_unit: TimeUnit = "s",
    forgotten: str | None = None,
    progress: bool | Stages | None = None,
) -> ImportedRows:
    """Store events of csv, jsonl and parquet files in a journal, which is made if there is none.

    Columns have the names of the fields of POST /events: user, item, type, value, time, id, request, position. A time
    is a number, or ISO 8601; without a zone it is of UTC. Rows are stored in their order, so give the oldest file
    first. Rows that are stored already are counted as duplicates, so that an import that broke off can be repeated.

    Args:
        journal: URL, either sqlite:///FILE or postgresql+psycopg://USER@HOST/DATABASE.
        files: Files to read.
        column: FIELD=COLUMN where a column has another name, such as user=customer_id, or several.
        type: Type of all events.
        context: Columns that are stored as the context of the events.
        time_unit: Unit of times that are numbers since 1970.
        forgotten: URL of the journal that the files are from; events of people whom it has forgotten are refused.
        progress: What receives the progress; by default a bar on a terminal.

    Raises:
        SettingsError: if a file lacks a column, or the URL names no journal.
        DataError: if a file can't be read or no row is an event, or the journal can't be opened.
    """
    require_extra("sqlalchemy", "loop")
    from recspec.loop import Journal, import_events

    columns = {}
    for text in several(column):
        name, equals, given = text.partition("=")
        if not equals or not given:
            raise SettingsError(f"column: found {text[:80]!r}; expected FIELD=COLUMN, such as user=customer_id")
        columns[name.strip()] = given.strip()
    unit: TimeUnit = one_of("time_unit", time_unit, get_args(TimeUnit))
    paths = [Path(each) for each in several(files)]
    with stages(progress) as show, Journal(journal) as opened:
        if forgotten is not None:
            with existing_journal(forgotten) as before:
                opened.take_forgotten(before)
        found = import_events(
            opened, paths, columns, kind=type, context=tuple(context or ()), time_unit=unit, progress=show
        )
    return ImportedRows(found)


@verb
def journal_export(journal: str, out: Place, *, since: str | None = None, until: str | None = None) -> JournalRows:
    """Write a journal as Parquet files, a folder for each day.

    OUT/events/day=2026-11-28/part-0.parquet holds the events that were received on that day, in UTC, and
    OUT/exposures/day=... the answers. Folders of other days stay, so an export of each night adds to the ones before.

    Args:
        journal: URL, either sqlite:///FILE or postgresql+psycopg://USER@HOST/DATABASE.
        out: Folder to write into.
        since: First day, such as 2026-11-28.
        until: Day after the last one.

    Raises:
        SettingsError: if a day is none, or the URL names no journal.
        DataError: if there is no such journal.
    """
    first, end = _day("since", since), _day("until", until)
    with existing_journal(journal) as opened:
        from recspec.loop import export_days

        found = export_days(opened, Path(out), since=first, until=end)
    counts = {f"{what} of {day}": rows for what, days in found.items() for day, rows in days.items()}
    return JournalRows(f"wrote {out}", counts, [] if counts else ["no event or answer is of these days"])


@verb
def journal_show(journal: str) -> JournalView:
    """Show what a journal holds: events by type and day, the newest one, consumers, and the size.

    Args:
        journal: URL, either sqlite:///FILE or postgresql+psycopg://USER@HOST/DATABASE.

    Raises:
        SettingsError: if the URL names no journal.
        DataError: if there is no such journal.
    """
    with existing_journal(journal) as opened:
        from recspec.loop import summarize

        return JournalView(summarize(opened))


@verb
def journal_verify(journal: str) -> JournalRows:
    """Check that a journal is whole.

    It checks a SQLite file's pages, every row, that ids are unique, that no consumer or answer is ahead of the events,
    and that no event is of a forgotten person.

    Args:
        journal: URL, either sqlite:///FILE or postgresql+psycopg://USER@HOST/DATABASE.

    Raises:
        SettingsError: if the URL names no journal.
        DataError: names every problem.
    """
    with existing_journal(journal) as opened:
        from recspec.loop import verify_journal

        found = verify_journal(opened)
    counts = {"events": found.events, "exposures": found.exposures, "unknown requests": found.unknown_requests}
    notes = ["unknown requests: events that name an answer which is not there, such as a pruned one"]
    return JournalRows("the journal is whole", counts, notes if found.unknown_requests else ())


@verb
def journal_prune(journal: str, *, exposures_days: int | None = 90, events_days: int | None = None) -> JournalRows:
    """Remove old answers and events from a journal.

    Whole days in UTC go. Of the events, the number of each day and type stays, and the sum of their values. Events that
    a consumer has not read stay too. SQLite uses the room again; the file does not shrink.

    Args:
        journal: URL, either sqlite:///FILE or postgresql+psycopg://USER@HOST/DATABASE.
        exposures_days: Days for which answers stay.
        events_days: Days for which events stay; by default all.

    Raises:
        SettingsError: if the URL names no journal.
        DataError: if there is no such journal.
    """
    with existing_journal(journal, read_only=False) as opened:
        from recspec.loop import prune_journal

        done = prune_journal(opened, exposures_days=exposures_days, events_days=events_days)
    notes = [f"{how_many(done.unread, 'old event')} stay, because a consumer has not read them"] if done.unread else ()
    return JournalRows("removed", {"events": done.events, "exposures": done.exposures}, notes)


def _day(name: str, text: str | None) -> date | None:
    if text is None:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise SettingsError(f"{name}: found {text[:40]!r}; expected a day such as 2026-11-28") from None
