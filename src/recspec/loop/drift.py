"""Drift: how far the newest events of a journal have moved from the data that a model was trained on.

The training data's raw rows and the journal's become the model's features in the same way, and each feature is
compared. Both sides are samples: 20,000 rows for features and scores; of the window at most 200,000 events and 20,000
answers, in blocks drawn by chance. So time and memory do not grow with the journal.

A shift is flagged if its PSI is above the 99 % quantile that it has without any shift, and above .1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
from numpy.typing import NDArray
from pydantic import Field

from recspec.base.config import Duration, Settings, micros_in
from recspec.base.errors import BundleError, DataError, RecspecError, how_many
from recspec.datasets import RawEvents
from recspec.feature_spec import FeatureSpec
from recspec.inference import Predictor, requests
from recspec.loop import journal as tables
from recspec.loop.events import IMPRESSION
from recspec.loop.journal import AT_ONCE, EVENT_FIELDS, Journal
from recspec.loop.raw_rows import LABEL, SEQ, Acts, RawRows, check_exposures, rows_of_events, rows_of_exposures
from recspec.loop.statistics import (
    CalibrationDrift,
    PopularityBins,
    Shift,
    shift_of_categories,
    shift_of_numbers,
)
from recspec.loop.upkeep import DAY_US
from recspec.training import dataset_of

MOST_ROWS = 20_000
"""Rows of each side whose features and scores are compared."""
MOST_EVENTS, EVENTS_OF_BLOCK = 200_000, 1_000
MOST_ANSWERS, ANSWERS_OF_BLOCK = 20_000, 100
UNKNOWN_USERS, NEW_ITEMS, NEW_SHOWN_ITEMS = "unknown_users", "new_items", "new_shown_items"
"""Shares of events, of events, and of items that were shown."""
FEWEST = 100
"""Rows of each side below which nothing is compared."""


class DriftSettings(Settings):
    """What is compared."""

    window: Duration = Field("7d", description="time before now whose events are compared")
    label_window: Duration = Field(
        "30m", description="time after an answer in which an act on an item makes its label 1"
    )


@dataclass(frozen=True)
class Share:
    """A part of a whole."""

    name: str
    count: int
    of: int

    @property
    def value(self) -> float:
        """The share; 0 of nothing."""
        return self.count / self.of if self.of else 0.0


@dataclass
class DriftReport:
    """What was found."""

    since: int
    """Begin of the window, in microseconds since 1970."""
    until: int
    events: int = 0
    """Events of the window that were read; impressions are none."""
    answers: int = 0
    shifts: list[Shift] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)
    calibration: CalibrationDrift | None = None
    untold: list[str] = field(default_factory=list)
    """What can't be said, and why."""

    @property
    def flagged(self) -> list[str]:
        """Names of what has drifted."""
        found = [each.name for each in self.shifts if each.flagged]
        return [*found, *(["calibration"] if self.calibration is not None and self.calibration.flagged else [])]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **{name: getattr(self, name) for name in ("since", "until", "events", "answers", "flagged")},
            "shifts": [{**asdict(each), "flagged": each.flagged} for each in self.shifts],
            "shares": [{**asdict(each), "share": each.value} for each in self.shares],
            "calibration": None if self.calibration is None else asdict(self.calibration),
            "untold": self.untold,
        }


# --- what the model was trained on ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """A feature of some rows."""

    values: NDArray[Any]
    """Of rows that give a known value."""
    unknown: float | None
    """Share of the rows with a value whose value is unknown."""


@dataclass
class DriftReference:
    """The training data of a model, as the newest events are compared with it. Keep it for as long as the model."""

    raw: RawEvents | None = None
    """The raw rows of its dataset; None if there are none."""
    learned: int = 0
    """Newest answer that the model has learned."""
    rows: int = 0
    columns: dict[str, _Column] = field(default_factory=dict)
    types: NDArray[np.object_] | None = None
    popularity: PopularityBins | None = None
    scores: NDArray[np.float64] | None = None
    untold: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, predictor: Predictor, data: FeatureSpec | None = None, *, origin: Path | None = None) -> DriftReference:
        """Read the training data of a model.

        Args:
            predictor: The model.
            data: Its dataset, if that was moved.
            origin: The bundle of which the predictor's is a copy.
        """
        found = cls()
        try:
            spec = dataset_of(origin or predictor.bundle.folder, data)
            found.raw = RawEvents.of(spec)
            found.learned = spec.exposures_to
        except (BundleError, DataError) as error:
            found.untold.append(f"features, types, popularity, scores and calibration: no reference: {error}")
            return found
        found._read(predictor, found.raw)
        return found

    def _read(self, predictor: Predictor, raw: RawEvents) -> None:
        settings, rows = raw.settings, _drawn(raw, "train")
        self.rows = 0 if rows is None else len(rows)
        if rows is None or len(rows) < FEWEST:
            self.untold.append(f"features: train holds {how_many(self.rows, 'row')}; expected {FEWEST} or more")
            return
        self.columns, told = _columns(predictor, _without_times(raw, rows))
        self.untold += [f"{name}: {why or 'the raw rows of train do not give it'}" for name, why in told.items()]
        if settings.event is not None and settings.event in rows.column_names:
            self.types = np.array(rows.column(settings.event).drop_null().cast(pa.string()).to_pylist(), object)
        if requests.knows_users_and_items(predictor) and settings.item is not None:
            halves = np.zeros((2, predictor.spec.num_ids(predictor.spec.item_id)), np.int64)
            for place, block in enumerate(raw.blocks("train", [settings.item])):
                ids = _known_items(predictor, block.column(0).to_pylist())
                side = (np.arange(len(ids)) + place) % 2
                np.add.at(halves, (side[ids >= 0], ids[ids >= 0]), 1)
            if halves.sum(1).min() >= FEWEST:
                self.popularity = PopularityBins.of(*halves)
        if _compares_scores(predictor, raw):
            held_out = _drawn(raw, "valid")  # of rows that a model has learned it is surer than of new ones
            enough = held_out is not None and len(held_out) >= FEWEST
            try:
                self.scores = _predicted(predictor, _without_times(raw, held_out if enough else rows))
            except DataError as error:
                self.untold.append(f"scores: {error}")


def _known_items(predictor: Predictor, raw: Sequence[Any]) -> NDArray[np.int64]:
    """Ids of items; -1 for those that the model was not trained with."""
    spec = predictor.spec
    ids = predictor.catalogues.item_ids(["" if each is None else each for each in raw])
    known = (ids >= int(spec.reserves_unknown(spec.item_id))) & (ids < spec.num_ids(spec.item_id))
    return np.where(known, ids, -1)


def _compares_scores(predictor: Predictor, raw: RawEvents) -> bool:
    """Whether scores of training rows and of new ones mean the same: chances of a label that rest on no history.

    A history holds the training rows themselves, and no new ones.
    """
    past = {*predictor.spec.role("history"), *predictor.spec.role("negative_history")}
    is_labelled = raw.settings.label is not None
    return is_labelled and predictor.bundle.gives_probabilities and past.isdisjoint(predictor.model.features())


def _predicted(predictor: Predictor, rows: pa.Table) -> NDArray[np.float64]:
    return predictor.predict(rows)[0].astype(np.float64)


def _drawn(raw: RawEvents, split: str) -> pa.Table | None:
    """A sample of a split's raw rows; None without any."""
    rng = np.random.default_rng(0)
    sample = _Sample(MOST_ROWS, rng)
    for block in raw.blocks(split, drawn=rng):
        sample.add(pa.Table.from_batches([block]))
    return sample.table()


def _without_times(raw: RawEvents, rows: pa.Table) -> pa.Table:
    """Rows as a model reads them: without the column of times, which every window moves, and without ours."""
    left = (raw.settings.timestamp, SEQ, LABEL)
    return rows.drop_columns([name for name in left if name in rows.column_names])


# --- what is new ------------------------------------------------------------------------------------------------------


def measure_drift(
    predictor: Predictor,
    reference: DriftReference,
    journal: Journal,
    at: int,
    settings: DriftSettings | None = None,
) -> DriftReport:
    """Compare the newest events of a journal with what a model was trained on.

    Args:
        predictor: The model.
        reference: Its training data.
        journal: An open journal.
        at: Time in microseconds since 1970; the window ends there.
        settings: The windows.

    Raises:
        DataError: if the journal can't be read.
    """
    asked = settings or DriftSettings()
    report = DriftReport(at - micros_in(asked.window), at, untold=[*reference.untold])
    return _Measuring(predictor, reference, journal, report, micros_in(asked.label_window)).report()


class _Measuring:
    """One comparison."""

    def __init__(
        self,
        predictor: Predictor,
        reference: DriftReference,
        journal: Journal,
        report: DriftReport,
        label_window: int,
    ) -> None:
        self._reference, self._journal, self._report = reference, journal, report
        self._label_window, self._rng = label_window, np.random.default_rng(0)
        self._predictor, self._raw = predictor, reference.raw
        self._knows = requests.knows_users_and_items(predictor)
        if not self._knows:
            report.untold.append("unknown users and new items: the model knows no users and items")

    def report(self) -> DriftReport:
        """The report."""
        report, raw = self._report, self._raw
        rows = self._events()
        labelled = self._answers()
        if raw is not None and raw.settings.label is not None:
            rows = labelled
        elif raw is not None:
            report.untold.append("calibration: the data has no label, so scores are no chances of one")
        if raw is not None and self._reference.rows >= FEWEST:
            self._compare(raw, rows)
        return report

    # --- events ---------------------------------------------------------------------------------------------------

    def _events(self) -> pa.Table | None:
        """Count the window's events; returns their raw rows, a sample, where events are rows."""
        report, raw, event = self._report, self._raw, tables.event.c
        sample, left_out = _Sample(MOST_ROWS, self._rng), dict[str, int]()
        unknown, new = 0, 0
        spec = self._predictor.spec
        counts = np.zeros(spec.num_ids(spec.item_id) if self._knows else 0, np.int64)
        own = sa.and_(event.occurred_at >= report.since, event.occurred_at <= report.until, event.type != IMPRESSION)
        first, last = _seqs(self._journal, tables.event, event.received_at, report.since)
        for block in _blocks(self._journal, tables.event, (first, last), EVENTS_OF_BLOCK, MOST_EVENTS, own, self._rng):
            report.events += len(block)
            if self._knows:
                users = self._predictor.catalogues.user_ids(block.column("subject").to_pylist())
                unknown += int((users < int(spec.reserves_unknown(spec.user_id))).sum())
                items = _known_items(self._predictor, block.column("item").to_pylist())
                new += int((items < 0).sum())
                np.add.at(counts, items[items >= 0], 1)
            if raw is not None and raw.settings.label is None:
                found = rows_of_events([block], raw, None)
                sample.add(found.table)
                for why, count in found.left_out.items():
                    left_out[why] = left_out.get(why, 0) + count
        if not report.events:
            report.untold.append(f"events: {self._none('event', tables.event.c.occurred_at)}")
            return None
        report.untold += [f"{why}: {count:,} left out" for why, count in left_out.items()]
        if self._knows:
            report.shares += [Share(UNKNOWN_USERS, unknown, report.events)]
            report.shares += [Share(NEW_ITEMS, new, report.events)]
            popularity = self._reference.popularity
            if popularity is not None and counts.sum() >= FEWEST:
                report.shifts.append(popularity.shift(counts))
        return sample.table()

    # --- answers --------------------------------------------------------------------------------------------------

    def _answers(self) -> pa.Table | None:
        """Count the window's answers; returns a sample of labelled rows, where these are the dataset's rows."""
        report, raw, answer = self._report, self._raw, tables.exposure.c
        is_labelled = raw is not None and raw.settings.label is not None
        sample, left_out = _Sample(MOST_ROWS, self._rng), dict[str, int]()
        items, new = 0, 0
        seqs = _seqs(self._journal, tables.exposure, answer.served_at, report.since)
        own = sa.and_(answer.served_at >= report.since, answer.served_at <= report.until)
        confirms = is_labelled and self._confirms(report)
        for block in _blocks(self._journal, tables.exposure, seqs, ANSWERS_OF_BLOCK, MOST_ANSWERS, own, self._rng):
            report.answers += len(block)
            if self._knows:
                shown = [item for text in block.column("items").to_pylist() for item in json.loads(text)]
                items += len(shown)
                new += int((_known_items(self._predictor, shown) < 0).sum()) if shown else 0
            if is_labelled:
                closed = block.filter(pc.less_equal(block.column("served_at"), report.until - self._label_window))
                found = self._labelled(closed, confirms=confirms)
                sample.add(found.table)
                for why, count in found.left_out.items():
                    left_out[why] = left_out.get(why, 0) + count
        if not report.answers:
            report.untold.append(f"answers: {self._none('answer', answer.served_at)}")
            return None
        if self._knows:
            report.shares.append(Share(NEW_SHOWN_ITEMS, new, items))
        report.untold += [f"{why}: {count:,} left out" for why, count in left_out.items()]
        rows = sample.table()
        if raw is not None and raw.settings.label is not None:
            self._calibrate(raw, rows)
        return rows

    def _confirms(self, report: DriftReport) -> bool:
        """Whether impressions confirm what was shown in the window."""
        own = tables.event.c
        asked = sa.select(own.seq).where(own.type == IMPRESSION, own.request_id.is_not(None))
        return self._journal.scalar(asked.where(own.received_at >= report.since).limit(1)) is not None

    def _labelled(self, answers: pa.RecordBatch, *, confirms: bool) -> RawRows:
        """The rows of some answers, labelled by the events inside their windows."""
        assert self._raw is not None
        own, found = tables.event.c, list[sa.Row[Any]]()
        columns = (own.subject, own.type, own.item, own.occurred_at, own.request_id)
        names = [*dict.fromkeys(answers.column("request_id").to_pylist())]
        users = [*dict.fromkeys(each for each in answers.column("subject").to_pylist() if each is not None)]
        if len(answers):
            start = pc.min(answers.column("served_at")).as_py()
            end = pc.max(answers.column("served_at")).as_py() + self._label_window
            for at in range(0, len(names), AT_ONCE):
                found += self._journal.rows(sa.select(*columns).where(own.request_id.in_(names[at : at + AT_ONCE])))
            for at in range(0, len(users), AT_ONCE):
                during = sa.and_(own.request_id.is_(None), own.occurred_at >= start, own.occurred_at <= end)
                found += self._journal.rows(
                    sa.select(*columns).where(own.subject.in_(users[at : at + AT_ONCE]), during)
                )
        kinds = pa.schema([EVENT_FIELDS.field(each.name) for each in columns])
        events = pa.RecordBatch.from_pylist([each._asdict() for each in found], schema=kinds)
        acts = Acts.of([events])
        if confirms:
            acts.shown[""].add("")  # answers without an impression were not shown, also in a block without any
        return rows_of_exposures([answers], acts, self._raw, self._label_window, None)

    def _calibrate(self, raw: RawEvents, rows: pa.Table | None) -> None:
        """Compare the model's chances with the labels of answers that it has not learned."""
        report = self._report
        if not self._predictor.bundle.gives_probabilities:
            report.untold.append("calibration: the model gives scores, which are no chances")
            return
        rows = None if rows is None else rows.filter(pc.greater(rows.column(SEQ), self._reference.learned))
        if rows is None or len(rows) < FEWEST:
            count = how_many(0 if rows is None else len(rows), "shown item")
            report.untold.append(
                f"calibration: {count} with a closed window that the model has not learned; {FEWEST} are needed"
            )
            return
        try:
            chances = _predicted(self._predictor, _without_times(raw, rows))
        except DataError as error:
            report.untold.append(f"calibration: {error}")
            return
        labels = rows.column(LABEL).to_numpy().astype(np.float64)
        answers = np.unique(rows.column(SEQ).to_numpy(), return_inverse=True)[1]
        report.calibration = CalibrationDrift.of(chances, labels, answers)
        if report.calibration is None:
            report.untold.append(f"calibration: nothing that was shown was acted on, of {how_many(len(rows), 'row')}")

    # --- features -------------------------------------------------------------------------------------------------

    def _compare(self, raw: RawEvents, rows: pa.Table | None) -> None:
        """Compare features, types and scores."""
        report, reference = self._report, self._reference
        if rows is None or len(rows) < FEWEST:
            count = how_many(0 if rows is None else len(rows), "row")
            report.untold.append(f"features: the window gives {count}; {FEWEST} are needed")
            return
        plain = _without_times(raw, rows)
        now, told = _columns(self._predictor, plain)
        lacks = "the journal's rows do not give it"
        report.untold += [f"{name}: {why or lacks}" for name, why in told.items() if name in reference.columns]
        if raw.settings.label is not None:
            report.untold += check_exposures(raw)
        for name, before in reference.columns.items():
            if name in now:
                report.shifts.append(_shift(self._predictor.spec, name, before, now[name]))
        if reference.types is not None and raw.settings.event in rows.column_names:
            names, codes = np.unique(reference.types, return_inverse=True)
            kinds = np.array(rows.column(raw.settings.event).drop_null().to_pylist(), object)
            known = np.isin(kinds, names)
            unknown = 0.0, float(1 - known.mean()) if len(known) else 0.0
            now_codes = np.searchsorted(names, kinds[known]).astype(np.int64)
            report.shifts.append(shift_of_categories("type of event", "type", codes, now_codes, unknown))
        elif raw.settings.event is None:
            report.untold.append("types of events: the dataset has no column of them")
        if reference.scores is not None:
            try:
                scores = _predicted(self._predictor, plain)
            except DataError as error:
                report.untold.append(f"scores: {error}")
                return
            report.shifts.append(shift_of_numbers("scores", "score", reference.scores, scores))
        elif not any(each.startswith("scores") for each in report.untold):
            report.untold.append(
                "scores: no reference: only chances of labelled rows, of a model that reads no history, are comparable"
            )

    def _none(self, what: str, time: sa.ColumnElement[int]) -> str:
        """Why nothing can be said of a window without rows."""
        newest = self._journal.scalar(sa.select(sa.func.max(time)))
        if newest is None:
            return f"the journal holds no {what}"
        moment = np.datetime64(newest, "us").astype("datetime64[s]")
        return f"the window holds no {what}; the newest one is of {moment}Z"


def _shift(spec: FeatureSpec, name: str, before: _Column, now: _Column) -> Shift:
    if spec.features[name].is_categorical:
        unknown = None if before.unknown is None or now.unknown is None else (before.unknown, now.unknown)
        return shift_of_categories(name, "category", before.values, now.values, unknown)
    return shift_of_numbers(name, "number", before.values, now.values)


def _columns(predictor: Predictor, rows: pa.Table) -> tuple[dict[str, _Column], dict[str, str]]:
    """The features of raw rows, and why others can't be told; an empty text where the rows do not give them.

    Users and items themselves are compared by what is unknown and popular. Histories are made of items.
    """
    spec, encoder = predictor.spec, predictor.row_encoder
    given = [name for name in rows.column_names if rows.column(name).null_count < len(rows)]
    rows = encoder.named(rows.select(given))
    ids = [spec.user_id] if spec.role("user") else []
    ids += [spec.item_id] if spec.role("item") else []
    past = {*spec.role("history"), *spec.role("negative_history")}
    names = dict.fromkeys((*spec.role("user"), *spec.role("item"), *spec.role("context")))
    found, told = dict[str, _Column](), dict[str, str]()
    for name in (each for each in names if each not in (*ids, *past)):
        if not encoder.can_encode(name, rows.column_names, [*ids, name]):
            told[name] = ""
            continue
        try:
            found[name] = _column(predictor, rows, name, ids)
        except RecspecError as error:
            told[name] = str(error)
    return found, told


def _column(predictor: Predictor, rows: pa.Table, name: str, ids: Sequence[str]) -> _Column:
    """A feature of the rows that have it: from their own columns, else from the catalogue of the user or the item."""
    spec, encoders = predictor.spec, predictor.encoders
    sources = [] if encoders is None else encoders.sources(name, rows.column_names)
    own = [each for each in sources if each is not None]
    if own and len(own) == len(sources):
        values = predictor.encode(rows, [name])[0][name].cpu().numpy()
        has = np.ones(len(rows), bool)
        for each in own:
            has &= rows.column(each).is_valid().to_numpy()
    else:
        of = next(each for each in ids if name in spec.role("user" if each == spec.user_id else "item"))
        batch = predictor.encode(rows, [of, name])[0]
        values, keys = batch[name].cpu().numpy(), batch[of].cpu().numpy()
        has = keys >= int(spec.reserves_unknown(of))
        own = []
    values = values[has]
    feature = spec.features[name]
    if not feature.is_categorical:
        if values.ndim > 1:
            raise DataError("is a vector, which has no bins")
        return _Column(values.astype(np.float64), None)
    if values.ndim > 1:  # id 0 fills lists up
        flat = values.ravel()
        return _Column(flat[flat > 0].astype(np.int64), None)
    known = values > 0 if spec.reserves_unknown(name) else np.ones(len(values), bool)
    unknown = float(1 - known.mean()) if own and len(values) else None
    return _Column(values[known].astype(np.int64), unknown)


# --- samples ----------------------------------------------------------------------------------------------------------


class _Sample:
    """Rows drawn by chance from all that are added, each as likely as any other: those with the smallest keys."""

    def __init__(self, most: int, rng: np.random.Generator) -> None:
        self._most, self._rng = most, rng
        self._tables, self._keys = list[pa.Table](), list[NDArray[np.float64]]()

    def add(self, rows: pa.Table) -> None:
        """Add rows."""
        if len(rows):
            self._tables.append(rows)
            self._keys.append(self._rng.random(len(rows)))
            if sum(map(len, self._keys)) > 4 * self._most:
                self._shrink()

    def table(self) -> pa.Table | None:
        """The sample, in the order in which its rows were added; None without any."""
        self._shrink()
        return self._tables[0] if self._tables else None

    def _shrink(self) -> None:
        if not self._tables:
            return
        table, keys = pa.concat_tables(self._tables, promote_options="permissive"), np.concatenate(self._keys)
        kept = np.sort(np.argpartition(keys, self._most)[: self._most]) if len(keys) > self._most else None
        self._tables = [table if kept is None else table.take(pa.array(kept))]
        self._keys = [keys if kept is None else keys[kept]]


def _seqs(journal: Journal, table: sa.Table, time: sa.ColumnElement[int], since: int) -> tuple[int, int]:
    """The first and the last number of rows, among which are all that arrived since a time.

    A search by halves, because arrivals ascend; it begins a day before, as a clock may have been set back.
    """
    since -= DAY_US
    own = table.c.seq
    newest = int(journal.scalar(sa.select(sa.func.coalesce(sa.func.max(own), 0))))
    low, high = 0, newest + 1
    while low < high:
        middle = (low + high) // 2
        asked = sa.select(own.label("seq"), time.label("at")).where(own >= middle).order_by(own).limit(1)
        found = journal.rows(asked)
        if not found or found[0].at >= since:
            high = middle
        else:
            low = found[0].seq + 1
    return low, newest


def _blocks(
    journal: Journal,
    table: sa.Table,
    seqs: tuple[int, int],
    size: int,
    most: int,
    where: sa.ColumnElement[bool],
    rng: np.random.Generator,
) -> Iterator[pa.RecordBatch]:
    """Rows between two numbers: all, or of more than `most` blocks of `size` that are drawn by chance."""
    first, last = seqs
    count = last - first + 1
    if count <= most:
        yield from journal.blocks(table, first - 1, last, where)
        return
    for place in np.sort(rng.choice(count // size, most // size, replace=False)).tolist():
        start = first + place * size
        yield from journal.blocks(table, start - 1, start + size - 1, where)
