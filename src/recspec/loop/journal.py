"""The journal: events that a shop sent, answers that it was given, and what became of them, in one database.

SQLite needs no setup; PostgreSQL serves several hosts. Consumers read in the order of arrival, `seq`; histories are in
the order (`occurred_at`, `seq`). Times are microseconds since 1970 in UTC.

Writers take turns: of a SQLite file by a lock beside it, so that no two connections write or checkpoint at once (SQLite
3.7.0 to 3.51.2 can lose a WAL that is reset meanwhile); of PostgreSQL by an advisory lock for each transaction, so
that `seq` grows in the order of commits, and `seq > last` misses nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import orjson
import pyarrow as pa
import sqlalchemy as sa
from filelock import FileLock, Timeout
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from recspec.base.errors import DataError, SettingsError, listed, require_extra
from recspec.base.files import special
from recspec.loop.events import AHEAD_US, IMPRESSION, Event

SCHEMA = 1
"""Version of the tables; a journal with another one is refused."""
LOCK_KEY = 0x7265_6373
"""Of PostgreSQL's advisory lock of writers."""
WAIT_SECONDS = 30.0
"""Longest wait for other writers, and for a database that is busy."""
POLL_SECONDS = 0.005
"""Between looks whether another process has ended its turn; a server under load leaves only short gaps."""
BLOCK_ROWS = 50_000
"""Rows of a block when a journal is read from front to back."""
_HISTORY = (
    f"SELECT seq, type, item, value, occurred_at FROM event %(index)s WHERE type <> '{IMPRESSION}' "
    "AND subject = %(each)s AND occurred_at > %(each)s AND seq > %(each)s AND seq <= %(each)s "
    "ORDER BY occurred_at DESC, seq DESC "
    "LIMIT %(each)s"
)
HISTORY_IN_SQLITE = _HISTORY % {"index": "INDEXED BY event_acts", "each": "?"}  # or it takes the other index
HISTORY_IN_POSTGRESQL = _HISTORY % {"index": "", "each": "%s"}
NEWEST = 2**63 - 1
ELSEWHERE = "give the journal a database, or a schema, of its own"
VARIANTS = "variants"
"""Key of an exposure's policy: experiment -> variant, of a user who takes part in several."""
AT_ONCE = 500
"""Most rows of a statement."""

T = TypeVar("T")

metadata = sa.MetaData()
_is_act = sa.text(f"type <> '{IMPRESSION}'")
_seq = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

event = sa.Table(
    "event",
    metadata,
    sa.Column("seq", _seq, sa.Identity(), primary_key=True),
    sa.Column("event_id", sa.Text, nullable=False, unique=True),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("item", sa.Text),
    sa.Column("value", sa.Float(53)),
    sa.Column("occurred_at", sa.BigInteger, nullable=False),
    sa.Column("received_at", sa.BigInteger, nullable=False),
    sa.Column("request_id", sa.Text, index=True),
    sa.Column("position", sa.Integer),
    sa.Column("context", sa.Text),
    sa.Index("event_history", "subject", "occurred_at", "seq"),
    sa.Index("event_acts", "subject", "occurred_at", "seq", sqlite_where=_is_act, postgresql_where=_is_act),
    sqlite_autoincrement=True,  # a deleted newest row's number is not given again
)
exposure = sa.Table(
    "exposure",
    metadata,
    sa.Column("seq", _seq, sa.Identity(), primary_key=True),
    sa.Column("request_id", sa.Text, nullable=False, unique=True),
    sa.Column("subject", sa.Text, index=True),
    sa.Column("served_at", sa.BigInteger, nullable=False, index=True),
    sa.Column("surface", sa.Text),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("version", sa.Text, nullable=False),
    sa.Column("experiment", sa.Text),
    sa.Column("variant", sa.Text),
    sa.Column("policy", sa.Text, nullable=False),
    sa.Column("seed", sa.Text),
    sa.Column("history_seq", sa.BigInteger, nullable=False),
    sa.Column("items", sa.Text, nullable=False),
    sa.Column("propensities", sa.Text),
    sa.Column("pool_size", sa.Integer, nullable=False),
    sqlite_autoincrement=True,
)
experiment = sa.Table(
    "experiment",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("definition", sa.Text, nullable=False),
    sa.Column("started_at", sa.BigInteger, nullable=False),
)
assignment = sa.Table(
    "assignment",
    metadata,
    sa.Column("experiment", sa.Text, primary_key=True),
    sa.Column("subject", sa.Text, primary_key=True),
    sa.Column("variant", sa.Text, nullable=False),
    sa.Column("first_at", sa.BigInteger, nullable=False),
    sa.Column("first_seq", sa.BigInteger, nullable=False),
)
consumer = sa.Table(
    "consumer",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("seq", sa.BigInteger, nullable=False),
)
version = sa.Table(
    "version",
    metadata,
    sa.Column("run", sa.Text, primary_key=True),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("parent", sa.Integer),
    sa.Column("trained_to", sa.BigInteger, nullable=False),
    sa.Column("made_at", sa.BigInteger, nullable=False),
    sa.Column("gate", sa.Text),
    sa.Column("state", sa.Text, nullable=False),
)
deletion = sa.Table(
    "deletion",
    metadata,
    sa.Column("digest", sa.Text, primary_key=True),
    sa.Column("requested_at", sa.BigInteger, nullable=False),
    sa.Column("done_at", sa.BigInteger),
    sa.Column("counts", sa.Text),
)
daily = sa.Table(
    "daily",
    metadata,
    sa.Column("day", sa.Text, primary_key=True),
    sa.Column("type", sa.Text, primary_key=True),
    sa.Column("events", sa.BigInteger, nullable=False),
    sa.Column("value", sa.Float(53), nullable=False),
)
"""What is kept of pruned events: of each day of receipt in UTC and each type their number, and the sum of values."""
setting = sa.Table(
    "setting", metadata, sa.Column("name", sa.Text, primary_key=True), sa.Column("value", sa.Text, nullable=False)
)

KEY_LOST = "the key by which forgotten people are known is lost or damaged; restore the journal from a backup"
KEY_OF = "key of "
"""Begins the names of settings that hold the keys of other journals."""

Outcome = Literal["accepted", "duplicate", "conflict", "forgotten"]
"""What became of an event."""
REFUSALS: Mapping[Outcome, str] = {
    "conflict": "id: another event has it, with other content",
    "forgotten": "user: was forgotten; the journal takes no events of this user",
}
"""Why an event was not stored."""


def fields_of(table: sa.Table) -> pa.Schema:
    """The names and types of a table's columns."""
    kinds = {sa.Text: pa.string(), sa.Float: pa.float64(), sa.Integer: pa.int32(), sa.BigInteger: pa.int64()}
    return pa.schema([(each.name, kinds[type(each.type)]) for each in table.columns])


EVENT_FIELDS = fields_of(event)


@dataclass(frozen=True, slots=True)
class Exposure:
    """An answer that was given: which items, by which model, and with which chance."""

    request_id: str
    subject: str | None
    served_at: int
    model: str
    version: str
    """Number of the update and digest of the bundle, as `2:1f0c...`."""
    policy: Mapping[str, object]
    history_seq: int
    """Newest event that the answer saw."""
    items: Sequence[str]
    pool_size: int
    propensities: Sequence[float] | None = None
    """Chance of each item at its place, given those above it; None where rules changed the list afterwards."""
    seed: str | None = None
    """Of the draw; with the policy and the scores it gives the list again."""
    surface: str | None = None
    experiment: str | None = None
    variant: str | None = None

    @property
    def variants(self) -> dict[str, str]:
        """Experiment -> variant of the user."""
        own = {} if self.experiment is None or self.variant is None else {self.experiment: self.variant}
        several = self.policy.get(VARIANTS)
        return {**several, **own} if isinstance(several, Mapping) else own

    def row(self) -> dict[str, object]:
        """The row of the table."""
        chances = None if self.propensities is None else json.dumps(list(self.propensities))
        texts = {"policy": json.dumps(dict(self.policy), sort_keys=True), "items": json.dumps(list(self.items))}
        values = {name: getattr(self, name) for name in Exposure.__slots__}
        return {**values, **texts, "propensities": chances}


class Journal:
    """An open journal; close it, or use it as a context manager. Safe to use from several threads.

    One class because every method is a question to, or a change of, the same database.
    """

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        """Open a journal, and create its tables if it has none.

        Args:
            url: `sqlite:///FILE` or `postgresql+psycopg://USER:PASSWORD@HOST/DATABASE`.
            read_only: Only read, from a journal that exists.

        Raises:
            SettingsError: if the URL names no database that can be a journal.
            DataError: if the database can't be opened, or holds other tables.
            MissingExtraError: without the libraries of the extra `loop`.
        """
        self.url, self.read_only = _checked(url), read_only
        self.shown = self.url.render_as_string(hide_password=True).replace("+pysqlite", "")
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._turn = threading.Lock()
        self._file_lock: FileLock | None = None
        if self.is_sqlite:
            file = self._file()
            if read_only and not file.is_file():
                raise DataError(f"{self.shown}: there is no such journal")
            self._file_lock = FileLock(
                f"{file}.lock", timeout=WAIT_SECONDS, poll_interval=POLL_SECONDS, thread_local=False
            )
        self._readers = self._connect(writes=False)
        self._driver: Any = self._readers.dialect.loaded_dbapi
        self._writer = self._readers if read_only or not self.is_sqlite else self._connect(writes=True)
        try:
            self._key = self._opened()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections."""
        self._readers.dispose()
        with self._turn, self._file_turn():  # the last connection of a SQLite file checkpoints
            self._writer.dispose()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- write --------------------------------------------------------------------------------------------------------

    def store(self, events: Sequence[Event], exposures: Sequence[Exposure] = ()) -> list[Outcome]:
        """Store events and answers in one transaction, durable at the return; the outcome of each event.

        An answer whose request id is known is left as it is. The first answer of an experiment to a user is the user's
        assignment, which holds for ever.

        Raises:
            DataError: if the database refuses; then nothing is stored.
        """
        if not events and not exposures:
            return []
        first: dict[str, Event] = {}
        with self._told(), self._writing() as connection:
            forgotten = self._forgotten(
                connection, [*(each.subject for each in events), *(each.subject for each in exposures)]
            )
            known = self._known(connection, [each.event_id for each in events])
            outcomes: list[Outcome] = []
            for each in events:
                if each.subject in forgotten:
                    outcomes.append("forgotten")
                elif (other := known.get(each.event_id) or first.get(each.event_id)) is not None:
                    outcomes.append("duplicate" if each.is_same(other) else "conflict")
                else:
                    first[each.event_id] = each
                    outcomes.append("accepted")
            self._insert(connection, event, first.values())
            if exposures:
                shown = [each for each in exposures if each.subject not in forgotten]
                self._insert_exposures(connection, shown)
                self._assign(connection, [each for each in shown if each.subject is not None and each.variants])
        return outcomes

    def write(self, change: Callable[[sa.Connection], Any]) -> Any:
        """Run `change` in one transaction, alone among writers, and return what it gives."""
        with self._told(), self._writing() as connection:
            return change(connection)

    def advance(self, name: str, seq: int) -> None:
        """Store how far a consumer has read."""

        def change(connection: sa.Connection) -> None:
            insert = self.upsert(consumer).values(name=name, seq=seq)
            connection.execute(insert.on_conflict_do_update(index_elements=["name"], set_={"seq": seq}))

        self.write(change)

    def compact(self) -> None:
        """Let a SQLite file give back what deleted rows took, in the file and its write-ahead log."""
        if not self.is_sqlite:
            return
        with self._told(), self._turn, self._file_turn(), self._writer.connect() as connection:
            for statement in ("VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"):
                connection.connection.cursor().execute(statement).fetchall()

    # --- read ---------------------------------------------------------------------------------------------------------

    def newest_seq(self) -> int:
        """Number of the newest event; 0 without any."""
        return int(self.scalar(sa.select(sa.func.coalesce(sa.func.max(event.c.seq), 0))))

    def newest_received_at(self) -> int | None:
        """When the newest event was received, in microseconds since 1970; None without any."""
        found: int | None = self.scalar(sa.select(event.c.received_at).order_by(event.c.seq.desc()).limit(1))
        return found

    def recent_types(self, most: int = 10_000) -> dict[str, int]:
        """How many of the newest events are of each type."""
        newest = sa.select(event.c.type).order_by(event.c.seq.desc()).limit(most).subquery()
        asked = sa.select(newest.c.type, sa.func.count().label("events")).group_by(newest.c.type)
        return {row.type: int(row.events) for row in self.rows(asked.order_by(newest.c.type))}

    def events(self, after: int = 0, until: int | None = None) -> Iterator[pa.RecordBatch]:
        """Events with after < seq <= until in the order of arrival, in blocks."""
        return self.blocks(event, after, until)

    def exposures(self, after: int = 0, until: int | None = None) -> Iterator[pa.RecordBatch]:
        """Answers with after < seq <= until in the order of arrival, in blocks."""
        return self.blocks(exposure, after, until)

    def history(
        self, subject: str, *, most: int, after: int = 0, since: int = -1, until: int | None = None
    ) -> list[tuple[int, str, str | None, float | None, int]]:
        """The newest acts of a user, at most `most`, in the order of (occurred_at, seq); impressions are no acts.

        Those with after < seq <= until and since < occurred_at, as (seq, type, item, value, occurred_at). A request
        waits for them, so the statement is not compiled each time.
        """
        given = (subject, since, after, NEWEST if until is None else until, most)
        with self._told():
            connection = self._readers.raw_connection()
            try:
                cursor = connection.cursor()
                cursor.execute(HISTORY_IN_SQLITE if self.is_sqlite else HISTORY_IN_POSTGRESQL, given)
                return [tuple(row) for row in reversed(cursor.fetchall())]
            finally:
                connection.close()

    def rows(self, asked: sa.Executable) -> Sequence[sa.Row[Any]]:
        """The rows of a query."""
        with self._told(), self._reading() as connection:
            return connection.execute(asked).all()

    def scalar(self, asked: sa.Select[*tuple[Any, ...]]) -> Any:
        """The first value of a query; None without any."""
        with self._told(), self._reading() as connection:
            return connection.execute(asked).scalar()

    @property
    def id(self) -> str:
        """What tells this journal from another one."""
        return self.digest_of("")[:16]

    def digest_of(self, subject: str) -> str:
        """The keyed digest by which a forgotten person's late events are known."""
        return _digest(self._key, subject)

    def forgotten_among(self, subjects: Iterable[str]) -> set[str]:
        """Those of some people who were forgotten."""
        with self._told(), self._reading() as connection:
            return self._forgotten(connection, subjects)

    def take_forgotten(self, other: Journal) -> int:
        """Refuse events of the people whom another journal refuses, too; returns how many it knows."""
        digests = other.rows(sa.select(deletion.c.digest, deletion.c.requested_at, deletion.c.done_at))
        with other._told(), other._reading() as connection:
            keys = other._keys(connection)

        def change(connection: sa.Connection) -> None:
            own = self._keys(connection)
            for key in (each for each in keys if each not in own):
                named = {"name": f"{KEY_OF}{_digest(key, '')[:16]}", "value": key.hex()}
                connection.execute(sa.insert(setting).values(named))
            for each in digests:
                connection.execute(self.upsert(deletion).values(dict(each._mapping)).on_conflict_do_nothing())

        self.write(change)
        return len(digests)

    def blocks(
        self,
        table: sa.Table,
        after: int,
        until: int | None,
        where: sa.ColumnElement[bool] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Rows of a table with after < seq <= until, and for which `where` holds, in the order of arrival."""
        fields = fields_of(table)
        while True:
            asked = sa.select(table).where(table.c.seq > after).order_by(table.c.seq).limit(BLOCK_ROWS)
            asked = asked if until is None else asked.where(table.c.seq <= until)
            rows = self.rows(asked if where is None else asked.where(where))
            if not rows:
                return
            names = list(rows[0]._fields)
            columns = dict(zip(names, zip(*rows, strict=True), strict=True))
            yield pa.RecordBatch.from_arrays([pa.array(columns[f.name], f.type) for f in fields], schema=fields)
            after = rows[-1].seq
            if len(rows) < BLOCK_ROWS:
                return

    # --- within a transaction -----------------------------------------------------------------------------------------

    def upsert(self, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
        """An insertion that can say what it does on a conflict."""
        return sqlite.insert(table) if self.is_sqlite else postgresql.insert(table)

    def _insert(self, connection: sa.Connection, table: sa.Table, rows: Iterable[Any]) -> None:
        """Insert rows that have the names of the columns, without `seq`, as attributes.

        One statement for many rows, because the thread of a server's writer may wait for its turn at each of them.
        """
        columns = [each for each in table.columns if each.name != "seq"]
        values, names = attrgetter(*(each.name for each in columns)), ", ".join(each.name for each in columns)
        into = f"INSERT INTO {table.name} ({names})"
        for block in _in_blocks([values(each) for each in rows]):
            if self.is_sqlite:
                marks = ", ".join([f"({', '.join('?' * len(columns))})"] * len(block))
                connection.exec_driver_sql(f"{into} VALUES {marks}", tuple(chain.from_iterable(block)))
            else:  # as one value, because each one costs psycopg ten times as long as SQLite
                types = [each.type.compile(connection.dialect) for each in columns]
                read = ", ".join(f"(row ->> {place})::{each}" for place, each in enumerate(types))
                statement = f"{into} SELECT {read} FROM json_array_elements(%s::json) AS row"
                connection.exec_driver_sql(statement, (orjson.dumps(block).decode(),))

    def _insert_exposures(self, connection: sa.Connection, exposures: Sequence[Exposure]) -> None:
        """Insert those whose request id is new."""
        first: dict[str, Exposure] = {}
        for each in exposures:
            first.setdefault(each.request_id, each)
        for block in _in_blocks([*first]):
            asked = sa.select(exposure.c.request_id).where(exposure.c.request_id.in_(block))
            for name in connection.execute(asked).scalars():
                del first[name]
        self._insert(connection, exposure, [SimpleNamespace(**each.row()) for each in first.values()])

    def _assign(self, connection: sa.Connection, shown: Sequence[Exposure]) -> None:
        """Store the variants of users who have none yet."""
        seqs: dict[str, int] = {}
        for block in _in_blocks([each.request_id for each in shown]):
            asked = sa.select(exposure.c.request_id, exposure.c.seq).where(exposure.c.request_id.in_(block))
            seqs |= {row.request_id: row.seq for row in connection.execute(asked)}
        names = [column.name for column in assignment.c]
        rows = [
            dict(zip(names, (name, each.subject, variant, each.served_at, seqs[each.request_id]), strict=True))
            for each in shown
            for name, variant in each.variants.items()
        ]
        if rows:
            insert = self.upsert(assignment)
            connection.execute(insert.on_conflict_do_nothing(index_elements=["experiment", "subject"]), rows)

    def _known(self, connection: sa.Connection, ids: Sequence[str]) -> dict[str, Event]:
        found: dict[str, Event] = {}
        for block in _in_blocks(ids):
            among = "SELECT value FROM json_each(?)" if self.is_sqlite else "SELECT json_array_elements_text(%s::json)"
            asked = f"SELECT {', '.join(Event.__slots__)} FROM event WHERE event_id IN ({among})"
            rows = connection.exec_driver_sql(asked, (orjson.dumps(block).decode(),))
            found |= {each.event_id: Event(*each) for each in rows}
        return found

    def _keys(self, connection: sa.Connection) -> list[bytes]:
        """The keys of digests: its own, and those of journals whose forgotten people it has taken."""
        asked = sa.select(setting.c.value).where(setting.c.name.startswith(KEY_OF)).order_by(setting.c.name)
        try:
            return [self._key, *map(bytes.fromhex, connection.execute(asked).scalars())]
        except ValueError:
            raise DataError(f"{self.shown}: {KEY_LOST}") from None

    def _forgotten(self, connection: sa.Connection, subjects: Iterable[str | None]) -> set[str]:
        """Those whose deletion was asked for; their events are refused."""
        if not connection.exec_driver_sql("SELECT digest FROM deletion LIMIT 1").first():
            return set()
        keys, people = self._keys(connection), {each for each in subjects if each is not None}
        by_digest = {_digest(key, each): each for key in keys for each in people}
        found = set[str]()
        for block in _in_blocks([*by_digest]):
            asked = sa.select(deletion.c.digest).where(deletion.c.digest.in_(block))
            found.update(by_digest[each] for each in connection.execute(asked).scalars())
        return found

    # --- connections --------------------------------------------------------------------------------------------------

    def _file(self) -> Path:
        """The SQLite file, without links on the way, so that each name of it leads to one lock."""
        try:
            file = Path(str(self.url.database)).resolve()
            if problem := "is a folder" if file.is_dir() else special(file):
                raise DataError(f"{self.shown}: {problem}; name a file")
            if not file.parent.is_dir():
                raise DataError(f"{self.shown}: there is no folder {file.parent}")
        except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, a loop of links
            raise DataError(f"{self.shown[:200]}: can't be opened: {error}") from None
        return file

    def _connect(self, *, writes: bool) -> sa.Engine:
        if not self.is_sqlite:
            named = {"connect_timeout": 10, "application_name": "recspec"}
            return sa.create_engine(self.url, max_overflow=16, pool_pre_ping=True, connect_args=named)
        path = self._file().as_posix()
        mode = {"uri": "true", "mode": "rwc" if writes else "ro"}
        url = self.url.set(database=f"file:{_quoted(path)}", query=mode)
        engine = sa.create_engine(url, max_overflow=16, connect_args={"timeout": WAIT_SECONDS})

        @sa.event.listens_for(engine, "connect")
        def prepare(connection: sqlite3.Connection, _: object) -> None:
            connection.isolation_level = None  # `begin` below says when a transaction begins
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=ON") if writes else ():
                connection.execute(f"PRAGMA {pragma}")

        @sa.event.listens_for(engine, "begin")
        def begin(connection: sa.Connection) -> None:
            connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

        return engine

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        """A transaction of the only writer."""
        with self._turn, self._file_turn(), self._writer.begin() as connection:
            if not self.is_sqlite:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK_KEY)))
            yield connection

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        with self._readers.begin() as connection:
            yield connection

    @contextmanager
    def _file_turn(self) -> Iterator[None]:
        if self._file_lock is None or self.read_only:
            yield
            return
        try:
            self._file_lock.acquire()
        except Timeout:
            raise DataError(f"{self.shown}: another process has written for {WAIT_SECONDS:.0f} s; end it") from None
        except OSError as error:
            raise DataError(f"{self.shown}: can't be locked, so nothing was written: {error}") from None
        try:
            yield
        finally:
            self._file_lock.release()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of the database in one line, without values."""
        try:
            yield
        except (SQLAlchemyError, self._driver.Error) as error:
            said = str(error.orig if isinstance(error, DBAPIError) else error).strip().split("\n")[0][:300]
            lost = isinstance(error, (OperationalError, self._driver.OperationalError))
            what = "can't be reached" if lost and not self.is_sqlite else "failed"
            raise DataError(f"{self.shown}: the journal {what}: {said}") from None

    def _opened(self) -> bytes:
        """Make the tables if there are none, and check their version; returns the key of digests."""
        with self._told():
            if not self.read_only:
                with self._writing() as connection:
                    held = {*sa.inspect(connection).get_table_names()} & {*metadata.tables}
                    if "setting" not in held:
                        if held:
                            raise DataError(
                                f"{self.shown}: has other tables called {listed(sorted(held))}; {ELSEWHERE}"
                            )
                        metadata.create_all(connection)
                        own = {"schema": str(SCHEMA), "key": secrets.token_hex(32)}
                        connection.execute(sa.insert(setting), [{"name": k, "value": v} for k, v in own.items()])
            with self._reading() as connection:
                there = sa.inspect(connection)
                if not there.has_table("setting"):
                    raise DataError(f"{self.shown}: holds no journal")
                if not {"name", "value"} <= {each["name"] for each in there.get_columns("setting")}:
                    raise DataError(f"{self.shown}: has another table called 'setting'; {ELSEWHERE}")
                own = {
                    name: value for name, value, *_ in connection.execute(sa.select(setting.c.name, setting.c.value))
                }
        if own.get("schema") != str(SCHEMA):
            found = f"is a journal of version {own.get('schema')}"
            raise DataError(f"{self.shown}: {found}; this recspec reads version {SCHEMA}")
        try:
            return bytes.fromhex(own["key"] or "none")
        except (KeyError, ValueError):
            raise DataError(f"{self.shown}: {KEY_LOST}") from None


def is_sqlite(url: str) -> bool:
    """Whether a journal's URL names a SQLite file, of which only one process may be the writer.

    Raises:
        SettingsError: if the URL names no database that can be a journal.
    """
    return _checked(url).get_backend_name() == "sqlite"


def _digest(key: bytes, subject: str) -> str:
    return hmac.new(key, subject.encode(), hashlib.sha256).hexdigest()


class _Clock:
    """The machine's clock; while it is set back by at most `AHEAD_US`, it stands still, so order and windows hold."""

    newest = 0

    def now(self) -> int:
        found = time.time_ns() // 1_000
        if not found < self.newest <= found + AHEAD_US:
            self.newest = found
        return self.newest


_clock = _Clock()


def now_us() -> int:
    """The time in microseconds since 1970 in UTC; see `_Clock`."""
    return _clock.now()


def _in_blocks(values: Sequence[T]) -> Iterable[Sequence[T]]:
    return (values[start : start + AT_ONCE] for start in range(0, len(values), AT_ONCE))


def _quoted(path: str) -> str:
    """A path in a URI of SQLite."""
    return re.sub(r"[%?#]", lambda found: f"%{ord(found[0]):02x}", path)


def _checked(url: str) -> sa.URL:
    expected = "expected sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE"
    try:
        parsed = sa.make_url(url)
    except (SQLAlchemyError, ValueError):
        raise SettingsError(f"journal: found no URL of a database; {expected}") from None
    backend = parsed.drivername.partition("+")[0]
    if (
        backend == "sqlite"
        and parsed.drivername in ("sqlite", "sqlite+pysqlite")
        and parsed.database
        and "?" not in url
    ):
        if parsed.database == ":memory:":
            raise SettingsError(f"journal: {url} is lost at the end; {expected}")
        return parsed.set(drivername="sqlite+pysqlite")
    if backend == "postgresql" and parsed.drivername in ("postgresql", "postgresql+psycopg") and parsed.database:
        require_extra("psycopg", "loop")
        return parsed.set(drivername="postgresql+psycopg")
    raise SettingsError(f"journal: found {parsed.render_as_string(hide_password=True)[:200]!r}; {expected}")
