"""Events and answers of a journal as raw rows of a dataset.

Interactions: each event is a row. Labelled rows: each item of an answer is one, and its label is final when the window
after the answer closes. The label is 1 if the user acted on the item within it: by an event that names the answer, or
by one that names none, of the same user and item. If the shop tells what was shown, by events of type `impression`,
items of answers that were not shown are no rows.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recspec.base.errors import DataError, listed
from recspec.datasets import RawEvents
from recspec.loop.events import IMPRESSION
from recspec.loop.journal import EVENT_FIELDS

SEQ = "_seq"
"""Column of the event's or the answer's number in the journal."""
LABEL = "_label"
"""Column of 0 or 1 of labelled rows, however the dataset writes its label."""
WHOLE = r"^-?[0-9]{1,18}$"
MOST_WEIGHT = 1e9
LARGEST_FLOAT = float(np.finfo(np.float32).max)
"""Of a context's number; models compute in 32 bits."""
TIME = pa.timestamp("us", tz="UTC")


@dataclass
class RawRows:
    """Raw rows with the columns of a dataset and `SEQ`, in the order of arrival."""

    table: pa.Table
    left_out: Counter[str] = field(default_factory=Counter)
    """Events and shown items that are no rows, by reason."""

    def notes(self) -> list[str]:
        """What was left out, for people."""
        return [f"{why}: {count:,} left out" for why, count in self.left_out.most_common()]


def check_times(raw: RawEvents, where: str) -> None:
    """Refuse a dataset whose times have no place for those of a journal. Raises DataError."""
    if raw.settings.timestamp is not None and not raw.dated:
        why = (
            f"its times, in column '{raw.settings.timestamp}', are no dates, so events of a journal have no place there"
        )
        raise DataError(f"{where}: {why}; prepare it with times in seconds since 1970, or of ISO 8601")


# --- interactions -----------------------------------------------------------------------------------------------------


def rows_of_events(blocks: Iterable[pa.RecordBatch], raw: RawEvents, types: Sequence[str] | None) -> RawRows:
    """The rows of events; `types` names those that are rows, and by default all but impressions are."""
    table = pa.Table.from_batches(blocks, EVENT_FIELDS)
    left_out, settings = Counter[str](), raw.settings
    assert settings.user is not None
    assert settings.item is not None

    def keep(table: pa.Table, test: pa.ChunkedArray | pa.Array, why: str) -> pa.Table:
        kept = table.filter(test)
        if len(kept) < len(table):
            left_out[why] += len(table) - len(kept)
        return kept

    shown = pc.equal(table.column("type"), IMPRESSION)
    table = table.filter(pc.and_(pc.invert(shown), pc.is_valid(table.column("item"))))
    if types is not None:
        table = keep(table, pc.is_in(table.column("type"), pa.array(types, pa.string())), "events of other types")
    if settings.event_weights:
        known = pa.array([*settings.event_weights], pa.string())
        table = keep(table, pc.is_in(table.column("type"), known), "events of types that event_weights do not name")
    for name, column in (("subject", settings.user), ("item", settings.item)):
        if pa.types.is_integer(raw.kinds[column]):
            what = "user" if name == "subject" else name
            fits = pc.match_substring_regex(table.column(name), WHOLE)
            table = keep(table, fits, f"events whose {what} is no whole number")
            low, high = _bounds(raw.kinds[column])
            number = table.column(name).cast(pa.int64())
            fits = pc.and_(pc.greater_equal(number, max(low, -(2**63))), pc.less_equal(number, min(high, 2**63 - 1)))
            table = keep(table, fits, f"events whose {what} is beyond the {raw.kinds[column]} of the dataset")
    if settings.weight is not None:
        value = pc.fill_null(table.column("value"), 1.0)
        good = pc.and_(pc.greater_equal(value, 0.0), pc.less_equal(value, MOST_WEIGHT))
        table = keep(table, good, "events whose value is no weight")
    columns: dict[str, Any] = {SEQ: table.column("seq")}
    columns[settings.user] = table.column("subject").cast(raw.kinds[settings.user])
    columns[settings.item] = table.column("item").cast(raw.kinds[settings.item])
    columns |= _times(raw, table.column("occurred_at"))
    if settings.event is not None:
        columns[settings.event] = table.column("type")
    if settings.rating is not None:
        columns[settings.rating] = table.column("value")
    if settings.weight is not None:
        columns[settings.weight] = pc.fill_null(table.column("value"), 1.0)
    others = [name for name in settings.features if name in raw.kinds and name not in columns]
    if others:
        found = [json.loads(text) if text else {} for text in table.column("context").to_pylist()]
        for name in others:
            columns[name] = pa.array([_as(each.get(name), raw.kinds[name]) for each in found], raw.kinds[name])
    return RawRows(pa.table(columns), left_out)


def _times(raw: RawEvents, micros: pa.ChunkedArray) -> dict[str, pa.ChunkedArray]:
    """The column of times, if there is one; in whole seconds where the known ones are."""
    if raw.settings.timestamp is None:
        return {}
    if pa.types.is_integer(raw.kinds[raw.settings.timestamp]):
        micros = pc.multiply(pc.divide(micros, 1_000_000), 1_000_000)
    return {raw.settings.timestamp: micros.cast(TIME)}


def _as(value: object, kind: pa.DataType) -> object:
    """A value of a context with the type of a column; None if it has no such form."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        made = [_as(each, kind.value_type) for each in value] if isinstance(value, list) else None
        return None if made is None or None in made else made
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        if isinstance(value, bool):
            return str(value).lower()
        return str(value) if isinstance(value, (str, int, float)) else None
    if not isinstance(value, (int, float)) or not abs(value) <= LARGEST_FLOAT:
        return None
    if pa.types.is_integer(kind):
        low, high = _bounds(kind)
        return int(value) if float(value).is_integer() and low <= value <= high else None
    return float(value) if pa.types.is_floating(kind) else None


def _bounds(kind: pa.DataType) -> tuple[int, int]:
    """The least and the largest whole number of a type of columns."""
    bits = kind.bit_width
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if pa.types.is_signed_integer(kind) else (0, (1 << bits) - 1)


# --- labelled rows ----------------------------------------------------------------------------------------------------


@dataclass
class Acts:
    """What users did: on items of an answer, and on items without naming one."""

    by_answer: dict[tuple[str, str], list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    """(request, item) -> times and types."""
    by_user: dict[tuple[str, str], list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    """(user, item) -> likewise, ascending."""
    shown: dict[str, set[str | None]] = field(default_factory=lambda: defaultdict(set))
    """Request -> items that an impression confirms; None in it means all."""

    @classmethod
    def of(cls, blocks: Iterable[pa.RecordBatch]) -> Acts:
        """Those of some events."""
        found = cls()
        wanted = ("subject", "type", "item", "occurred_at", "request_id")
        for block in blocks:
            for user, kind, item, time, request in zip(
                *(block.column(each).to_pylist() for each in wanted), strict=True
            ):
                if kind == IMPRESSION:
                    if request is not None:
                        found.shown[request].add(item)
                elif request is not None:
                    found.by_answer[request, item].append((time, kind))
                else:
                    found.by_user[user, item].append((time, kind))
        for each in found.by_user.values():
            each.sort()
        return found

    def types(self, request: str, user: str | None, item: str, start: int, end: int) -> set[str]:
        """The types of what a user did with an item of an answer from `start` to `end`, in microseconds."""
        found = {kind for time, kind in self.by_answer.get((request, item), ()) if time <= end}
        own = self.by_user.get((user, item), ()) if user is not None else ()
        for time, kind in own[bisect_left(own, (start, "")) :]:
            if time > end:
                break
            found.add(kind)
        return found


def rows_of_exposures(
    blocks: Iterable[pa.RecordBatch], acts: Acts, raw: RawEvents, window: int, positive: Sequence[str] | None
) -> RawRows:
    """The rows of answers whose windows of `window` microseconds are closed.

    Types of `positive` make the label 1; by default those that the dataset was prepared with, or all. A further label
    is 1 by events of the type that it is called as.

    Raises:
        DataError: if the rows lack what the dataset weighs them by.
    """
    settings, left_out = raw.settings, Counter[str]()
    assert settings.label is not None
    names = [SEQ, LABEL, settings.user, settings.item, settings.timestamp, settings.label, settings.group]
    names += [settings.event, settings.weight, *settings.other_labels]
    made: dict[str, list[object]] = {name: [] for name in names if name is not None}
    own = [name for name in settings.context_features if name in ("position", "surface") and name in raw.kinds]
    made |= {name: [] for name in own}
    positive = positive if positive is not None else settings.positive
    if settings.event is not None and settings.event_weights and IMPRESSION not in settings.event_weights:
        why = f"event_weights weigh no '{IMPRESSION}', the type of items that were shown and not acted on"
        raise DataError(f"{why}; prepare the dataset with its weight, such as 1")
    for each in _answers(blocks):
        request, user, start = each["request_id"], each["subject"], each["served_at"]
        confirmed = acts.shown.get(request, set()) if acts.shown else {None}
        for position, item in enumerate(json.loads(each["items"]), 1):
            if not {item, None} & confirmed:
                left_out["items that were not shown"] += 1
                continue
            types = acts.types(request, user, item, start, start + window)
            label = bool(types if positive is None else types.intersection(positive))
            kind = _main_type(types, positive) if label else IMPRESSION
            row: dict[str | None, object] = {
                SEQ: each["seq"],
                LABEL: int(label),
                settings.group: _id(request, raw, settings.group, hashed=True),
                settings.user: _id(user, raw, settings.user),
                settings.item: _id(item, raw, settings.item),
                settings.timestamp: start,
                settings.weight: 1.0,
                settings.event: kind,
                settings.label: _label(raw, label, kind),
                "position": position,
                "surface": each["surface"],
                **{name: int(name in types) for name in settings.other_labels},
            }
            if any(row[name] is None for name in (settings.user, settings.item) if name is not None):
                left_out["items of answers whose user or item is missing, or no whole number"] += 1
                continue
            for name, values in made.items():
                values.append(row[name])
    kinds = {SEQ: pa.int64(), **{name: kind for name, kind in raw.kinds.items() if name not in _written(raw)}}
    table = pa.table({name: pa.array(values, kinds.get(name)) for name, values in made.items()})
    if settings.timestamp is not None:
        micros = table.column(settings.timestamp)
        place = table.column_names.index(settings.timestamp)
        table = table.set_column(place, settings.timestamp, _times(raw, micros)[settings.timestamp])
    return RawRows(_with_latest(table, raw), left_out)


def _answers(blocks: Iterable[pa.RecordBatch]) -> Iterator[Mapping[str, Any]]:
    for block in blocks:
        yield from block.to_pylist()


def _written(raw: RawEvents) -> set[str | None]:
    """Columns whose values are written otherwise than the dataset keeps them."""
    settings = raw.settings
    return {settings.timestamp, settings.label, settings.event, *settings.other_labels}


def _main_type(types: Iterable[str], positive: Sequence[str] | None) -> str:
    """The type that stands for several: the first in the order of `positive`, or of the alphabet."""
    order = sorted(types) if positive is None else [each for each in positive if each in types]
    return order[0]


def _label(raw: RawEvents, label: bool, kind: str) -> object:
    """A label as raw rows write it."""
    settings = raw.settings
    if settings.positive is not None:
        return (kind if kind in settings.positive else settings.positive[0]) if label else IMPRESSION
    if settings.positive_from is not None:
        return settings.positive_from if label else settings.positive_from - 1
    return int(label)


def _id(text: str | None, raw: RawEvents, column: str | None, *, hashed: bool = False) -> object:
    """An id with the type of its column; None if it has no such form, unless it may be `hashed`."""
    if text is None or column is None or not pa.types.is_integer(raw.kinds[column]):
        return text
    low, high = _bounds(raw.kinds[column])
    if re.fullmatch(WHOLE, text) and low <= int(text) <= high:
        return int(text)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") if hashed else None


def _with_latest(table: pa.Table, raw: RawEvents) -> pa.Table:
    """Rows with the features of their users and items as the dataset's events had them last."""
    settings = raw.settings
    for key, names in ((settings.user, settings.user_features), (settings.item, settings.item_features)):
        lacking = [name for name in names if name in raw.kinds and name not in table.column_names]
        if key is None or not lacking:
            continue
        latest = raw.latest(key, lacking)
        places = pc.index_in(table.column(key), value_set=latest.column(key).combine_chunks())
        for name in lacking:
            table = table.append_column(name, latest.column(name).take(places))
    return table


def check_exposures(raw: RawEvents) -> list[str]:
    """Notes on what answers do not tell of labelled rows."""
    told = {"position", "surface"}
    lacking = [name for name in raw.settings.context_features if name in raw.kinds and name not in told]
    return [f"answers do not tell {listed(lacking)}, which new rows lack"] if lacking else []
