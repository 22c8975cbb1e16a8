"""Fresh models without a hand: new versions of a run from the events of a journal, judged before they answer.

A version's dataset says which events it holds (`trained_to`, and `exposures_to` of labelled rows), so a killed update
has taken nothing. The next version is made of later ones but the newest, which judge it (`gate`). If it passes,
`updates/current.json` names it, and servers of the run take it up; if it fails, the version before goes on. After two
failures in a row, and after a roll-back, no version is made until `unfreeze`. The journal's table `version` records
each: `current`, `replaced`, `failed` or `rolled back`.

One process at a time updates a run: files are locked, and in PostgreSQL a name, for hosts that share no files.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event as Stopping
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import sqlalchemy as sa
from pydantic import Field
from sqlalchemy.exc import SQLAlchemyError

from recspec.base.config import Duration, micros_in
from recspec.base.errors import DataError, Interrupted, RecspecError, how_many
from recspec.base.files import local
from recspec.bundle import folder as bundle
from recspec.bundle import versions
from recspec.datasets import RawEvents, Words
from recspec.feature_spec import FeatureSpec
from recspec.inference import Predictor
from recspec.loop import journal as tables
from recspec.loop.events import AHEAD_US
from recspec.loop.gate import Judgement, judge
from recspec.loop.journal import Journal, now_us
from recspec.loop.raw_rows import (
    LABEL,
    SEQ,
    Acts,
    RawRows,
    check_exposures,
    check_times,
    rows_of_events,
    rows_of_exposures,
)
from recspec.training import Learning, Updated, UpdateSettings, check_run, dataset_of, next_version

MOST_FAILURES = 2
"""New versions that may fail in a row; then no further one is made."""
EVENTS_FILE = "events.parquet"
"""In the folder of updates, while one is made."""
SECOND = 1_000_000

State = Literal["new version", "failed", "waiting", "frozen"]


class JournalSettings(UpdateSettings):
    """How new versions are made of a journal's events."""

    types: Words = Field(
        None, description="types of events that are interactions, such as view and purchase; null: all but impression"
    )
    positive: Words = Field(
        None,
        description="types of events that make the label of a shown item 1; null: those of `prepare`, or all types",
    )
    min_events: int = Field(
        1, ge=1, description="new events, or labelled rows, from which a version is made; fewer wait for `max_age`"
    )
    max_age: Duration = Field("1d", description="age of a waiting event from which a version is made of fewer")
    gate: float = Field(
        0.2, ge=0, lt=1, description="share of the new events, the newest, that judge a version before it learns them"
    )
    margin: float = Field(
        0.01, gt=0, description="how far below the version before, in NDCG@10 or nats, a new one may be for certain"
    )
    keep: int = Field(3, ge=1, description="versions before that stay, so that they can be gone back to")
    window: Duration = Field("30m", description="time after an answer in which an act on an item makes its label 1")
    every: Duration | None = Field(None, description="time from one attempt at a new version to the next")


@dataclass(frozen=True)
class UpdateOutcome:
    """What an attempt at a new version came to."""

    state: State
    version: int
    """The version that answers."""
    why: str = ""
    trained_to: int = 0
    """Newest event of the journal that the version that answers has learned."""
    judgement: Judgement | None = None
    updated: Updated | None = None
    """The new version."""
    newest: int = 0
    """Newest row, by its number in the journal, that was learned or judged a version; 0 if none was made."""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    """From the first look at the journal to the version that answers."""

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        parts = {
            name: None if (of := getattr(self, name)) is None else of.to_dict() for name in ("judgement", "updated")
        }
        return {**vars(self), **parts, "notes": list(self.notes)}

    def line(self) -> str:
        """It in one line."""
        why = f": {self.why}" if self.why else ""
        return f"{self.state}; {versions.called(self.version)} answers{why} ({self.seconds:.1f} s)"


@dataclass(frozen=True)
class _New:
    """What the journal holds beyond a dataset."""

    rows: RawRows
    until: int
    """The newest event that was read."""
    exposures_until: int = 0
    oldest: int = 0
    """When the first of them was received, in microseconds since 1970."""


@dataclass(frozen=True)
class Updater:
    """Makes the versions of a run from a journal."""

    run: Path
    journal: Journal
    settings: JournalSettings = field(default_factory=JournalSettings)
    data: FeatureSpec | None = None
    """The dataset of a run that was never updated, if it was moved."""
    learning: Learning = field(default_factory=Learning)
    clock: Callable[[], int] = now_us
    """Microseconds since 1970, for labels and ages."""

    def once(self, beyond: int = 0) -> UpdateOutcome:
        """Make the next version, unless the run is frozen or too few events are new.

        Args:
            beyond: Newest row of the attempt before. Rows up to it, which judged a version, wait for newer ones.

        Raises:
            DataError: if another process updates the run, the dataset takes no events of this journal, or the journal
                can't be reached.
            BundleError: see `training.update`.
        """
        started, run = time.monotonic(), local(self.run, "RUN")
        check_run(run)
        with versions.updating(run), self._alone() as still_alone:
            now = versions.state(run)
            self._record(now)
            spec = dataset_of(bundle.find(run), self.data)
            here = UpdateOutcome("waiting", now.version, trained_to=spec.trained_to)
            if now.frozen:
                return replace(here, state="frozen", why=f"{now.frozen}; --unfreeze lets new versions be made")
            raw = RawEvents.of(spec)
            new = self._read(spec, raw)
            numbers, age = new.rows.table.column(SEQ).to_numpy(), self.clock() - new.oldest
            count = int(np.count_nonzero(numbers > beyond))
            waits = count < self.settings.min_events and age < micros_in(self.settings.max_age)
            if not len(numbers) or waits:
                judged = f", and {len(numbers) - count:,} that judged before" if count < len(numbers) else ""
                return replace(here, why=how_many(count, "new row") + judged, notes=(*new.rows.notes(),))
            made = replace(self._make(run, spec, raw, new, here), newest=int(numbers[-1]))
            if made.state == "new version" and not still_alone():
                raise DataError(f"{self.journal.shown}: was lost while a version was made, which does not count")
            return replace(self._settled(run, now, made), seconds=round(time.monotonic() - started, 3))

    def keep_on(self, tell: Callable[[str], object], stop: Stopping) -> UpdateOutcome | None:
        """Try again after each `every` until `stop` is set; the last outcome.

        An error is told, and the next attempt may do better: a journal comes back, another process ends.
        """
        last, beyond, every = None, 0, micros_in(self.settings.every or "15m") / SECOND
        while not stop.is_set():
            began = time.monotonic()
            try:
                last = self.once(beyond)
                beyond = max(beyond, last.newest)
                tell("; ".join((last.line(), *last.notes)))
            except Interrupted:
                break
            except RecspecError as error:
                tell(str(error))
            stop.wait(max(0.0, every - (time.monotonic() - began)))
        return last

    # --- what is new --------------------------------------------------------------------------------------------------

    def _read(self, spec: FeatureSpec, raw: RawEvents) -> _New:
        """The raw rows of what the dataset does not hold yet."""
        journal, where = self.journal, str(spec.folder)
        check_times(raw, where)
        if spec.metadata.get("journal", journal.id) != journal.id:
            raise DataError(
                f"{where}: holds events of another journal than {journal.shown}; name that one, or train a new run for "
                "this one (docs/guides/learning_shop.md, several hosts)"
            )
        newest, after = journal.newest_seq(), spec.trained_to
        if raw.settings.label is None:
            rows = rows_of_events(journal.events(after, newest), raw, self.settings.types)
            oldest = self._received(after) if len(rows.table) else 0
            return _New(rows, newest, oldest=oldest)
        window = micros_in(self.settings.window)
        closed = self.clock() - window
        exposures_to = spec.exposures_to
        answers = answers_before(journal.exposures(exposures_to), closed, closed + window + AHEAD_US)
        if not exposures_to and raw.newest is not None:  # what the dataset was prepared from may be of this journal
            limit = round(raw.newest * SECOND)
            answers = [each.filter(pc.greater(each.column("served_at"), limit)) for each in answers]
            answers = [each for each in answers if each.num_rows]
        acts = Acts.of(journal.events(after, newest)) if answers else Acts()
        rows = rows_of_exposures(answers, acts, raw, window, self.settings.positive)
        last = answers[-1].column("seq")[-1].as_py() if answers else exposures_to
        first = answers[0].column("served_at")[0].as_py() if answers else 0
        return _New(rows, self._newest_before(closed, after), last, first + window)

    def _make(self, run: Path, spec: FeatureSpec, raw: RawEvents, new: _New, here: UpdateOutcome) -> UpdateOutcome:
        """The next version, and the gate's judgement, by which it passed or failed."""
        table, (cut, trained_to, exposures_to) = new.rows.table, self._cut(new, spec, raw)
        versions.hold(run)  # so that no server takes up a version before it is judged
        file = run / versions.UPDATES / EVENTS_FILE
        try:
            written = table.slice(0, cut).drop_columns([name for name in (SEQ, LABEL) if name in table.column_names])
            pq.write_table(written, file)
            told: dict[str, object] = {"trained_to": trained_to, "journal": self.journal.id}
            told |= {"exposures_to": exposures_to} if exposures_to else {}
            made = next_version(run, file, self.learning, data=self.data, metadata=told)
        finally:
            file.unlink(missing_ok=True)
        notes = (*new.rows.notes(), *(check_exposures(raw) if raw.settings.label is not None else ()), *made.notes)
        if (split := raw.settings.split) not in (None, "none", "given"):
            kept = f"split={split} of the dataset keeps events for valid and test, which train nothing"
            notes = (f"{kept}; prepare it with split=none to learn from all", *notes)
        number = versions.number_of(made.bundle)
        if cut == len(table):
            why = "too few rows are new" if self.settings.gate else "the gate is 0"
            found = Judgement(True, f"passed without a test: {why}")
        else:
            before, after = (Predictor.open(each, device="cpu", verify=False) for each in (made.base, made.bundle))
            found = judge(before, after, table.slice(cut), raw, self.settings.margin)
        if not found.passed:
            return replace(here, state="failed", version=number, why=found.why, judgement=found, notes=notes)
        return UpdateOutcome("new version", number, found.why, trained_to, found, made, notes=notes)

    def _cut(self, new: _New, spec: FeatureSpec, raw: RawEvents) -> tuple[int, int, int]:
        """How many rows are learned, to which event, and to which answer."""
        table = new.rows.table
        numbers = table.column(SEQ).to_numpy()
        cut = len(table) - int(self.settings.gate * len(table))
        cut = int(numbers.searchsorted(numbers[cut])) if cut < len(table) else cut  # an answer's rows stay together
        if not cut or cut == len(table):
            return len(table), new.until, new.exposures_until
        if raw.settings.label is None:
            return cut, int(numbers[cut]) - 1, 0
        answer = tables.exposure.c
        first = self.journal.scalar(sa.select(answer.served_at).where(answer.seq == int(numbers[cut])))
        return cut, self._newest_before(int(first), spec.trained_to), int(numbers[cut]) - 1

    def _received(self, after: int) -> int:
        own = tables.event.c
        asked = sa.select(own.received_at).where(own.seq > after).order_by(own.seq).limit(1)
        return int(self.journal.scalar(asked) or 0)

    def _newest_before(self, moment: int, after: int) -> int:
        """The newest event before the first that was received at a moment or later."""
        own = tables.event.c
        late = own.received_at.between(moment, self.clock() + AHEAD_US)  # not those of a clock that was ahead
        asked = sa.select(sa.func.min(own.seq)).where(own.seq > after, late)
        if (first := self.journal.scalar(asked)) is not None:
            return int(first) - 1
        return max(after, self.journal.newest_seq())

    # --- what becomes of it -------------------------------------------------------------------------------------------

    def _settled(self, run: Path, now: versions.Current, made: UpdateOutcome) -> UpdateOutcome:
        """Let a version that passed answer, and remove one that failed; the journal records it."""
        if made.state == "new version":
            after = versions.publish(run, made.version, base=now.version, keep=self.settings.keep)
            if after.version != made.version:
                return replace(made, state="frozen", version=after.version, why=after.frozen, updated=None)
            self._record(after, made, parent=now.version)
            self.journal.advance(f"update {self._name}", made.trained_to)
            return made
        after = versions.fail(run, made.version, most=MOST_FAILURES)
        self._record(after, made, parent=now.version)
        why = f"{made.why}; {after.frozen}: --unfreeze lets new versions be made" if after.frozen else made.why
        return replace(made, version=after.version, why=why)

    @property
    def _name(self) -> str:
        return str(self.run.resolve())

    def _record(self, now: versions.Current, made: UpdateOutcome | None = None, *, parent: int | None = None) -> None:
        """Bring the journal's table of versions up to date with `current.json`, and add what was made."""
        own, run = tables.version.c, self._name

        def change(connection: sa.Connection) -> None:
            if made is not None and made.judgement is not None:
                gate = json.dumps(made.judgement.to_dict())
                state = "current" if made.judgement.passed else "failed"
                values = {"parent": parent, "trained_to": made.trained_to, "made_at": now_us(), "gate": gate}
                mine = (own.run == run) & (own.id == made.version)
                connection.execute(sa.delete(tables.version).where(mine))
                connection.execute(sa.insert(tables.version).values(run=run, id=made.version, state=state, **values))
            known = connection.execute(sa.select(own.id, own.state).where(own.run == run)).all()
            if now.version not in {each.id for each in known}:
                there = {"parent": None, "trained_to": 0, "made_at": now_us(), "gate": None}
                if now.version:
                    spec = FeatureSpec.load(bundle.find(self.run))
                    there |= {"parent": (*now.earlier, None)[-2], "trained_to": spec.trained_to}
                connection.execute(sa.insert(tables.version).values(run=run, id=now.version, state="current", **there))
            for each in known:
                if (state := _state(each.id, each.state, now)) != each.state:
                    mine = (own.run == run) & (own.id == each.id)
                    connection.execute(sa.update(tables.version).where(mine).values(state=state))

        self.journal.write(change)

    # --- alone --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[Callable[[], bool]]:
        """Keep updaters of other hosts from this run; gives whether that still holds."""
        if self.journal.is_sqlite:
            yield lambda: True
            return
        digest = hashlib.sha256(f"update {self._name}".encode()).digest()
        key = int.from_bytes(digest[:8], "big", signed=True)
        engine = sa.create_engine(self.journal.url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                if not connection.scalar(sa.select(sa.func.pg_try_advisory_lock(key))):
                    raise DataError(f"{self.run}: another host is updating it; wait for it")

                def holds() -> bool:
                    try:
                        return connection.scalar(sa.select(1)) == 1
                    except SQLAlchemyError:
                        return False

                yield holds
        except SQLAlchemyError as error:
            said = str(error).strip().split("\n")[0][:300]
            raise DataError(f"{self.journal.shown}: the journal can't be reached: {said}") from None
        finally:
            engine.dispose()


def _state(number: int, state: str, now: versions.Current) -> str:
    """The state of a version, given which one answers."""
    if state == "failed":
        return state
    if number == now.version:
        return "current"
    return "replaced" if number < now.version else "rolled back"


def answers_before(blocks: Iterator[pa.RecordBatch], moment: int, future: int) -> list[pa.RecordBatch]:
    """The first answers, up to one that was given at a moment or later.

    One of the `future` was given while the clock was ahead; it would keep all later ones waiting for years.
    """
    found = []
    for block in blocks:
        served = block.column("served_at").to_numpy()
        late = (served >= moment) & (served <= future)
        count = int(late.argmax()) if late.any() else len(block)
        found += [block.slice(0, count)] if count else []
        if count < len(block):
            break
    return found
