"""From interactions to a dataset of positives to train on and candidates to rank.

Every row of train is a positive (label 1). For each user, valid and test hold one series: the held-out positive, then
`num_negatives` items without an interaction of the user (label 0). Datasets of implicit feedback (`movielens`, `ncf`,
`table`, `amazon`) bring their rows as an Ibis expression with the column `split`. Rows may hold their user's history.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec.encoding import ENCODERS_FILE, VOCABULARIES
from recspec.errors import DataError, SettingsError, listed
from recspec.prepare.backend import Backend
from recspec.prepare.columns import to_arrow
from recspec.prepare.context import Progress
from recspec.prepare.histories import HistorySettings
from recspec.prepare.interaction_columns import InteractionColumns, prepare_columns
from recspec.prepare.interaction_rows import BlockRows, Counts, Plan, blocks_of_users
from recspec.prepare.interaction_source import Source
from recspec.prepare.names import ITEM, LABEL, SERIES, SPLITS, TIMESTAMP, USER
from recspec.prepare.negatives import Draws
from recspec.prepare.tables import count_rows, fetch
from recspec.spec import Feature, FeatureSpec
from recspec.storage import BLOCK_ROWS, SplitWriter

SECONDS = (1e8, 1e10)
"""Timestamps in this range, March 1973 to November 2286, are shown as dates."""
WRITING_BYTES = 370_000_000
"""Memory of the process while it writes splits without lists (measured: 330 to 370 MB)."""
LIST_BYTES = 10
"""Memory per list value in the row group of a split that is not yet written: 4 bytes, held two and a half times
(measured: 570 MB for 10 million rows with two lists of 50)."""
USERS_PER_GROUP = 16_384
"""Users in a row group of their catalogue, if it holds histories."""


def write(
    backend: Backend,
    folder: Path,
    source: Source,
    settings: HistorySettings,
    *,
    num_negatives: int,
    seed: int,
    progress: Progress,
) -> FeatureSpec:
    """Write splits, vocabularies and catalogues into `folder`.

    Args:
        settings: Histories and the negatives of train. Train negatives are never an item the user acted on in train.
            Items from valid and test may be drawn; excluding them would leak the answers.
        num_negatives: Items of label 0 behind each positive of valid and test, none that the user ever acted on.

    Raises:
        DataError: if no interaction is left, or a catalogue names an id twice.
    """
    progress("sorting interactions", 0, None)
    rows = backend.stage(source.rows.order_by([USER, *source.order]))
    total = count_rows(backend, rows)
    if total == 0:
        raise DataError(f"{source.dataset}: no interaction is left to prepare; expected one row at least")
    progress("finding ids", 0, None)
    times = time_range(backend, rows)
    histories, train_negatives = settings.histories, settings.train_negatives
    prepared = prepare_columns(backend, rows, source, histories, isinstance(times["first"], str))
    prepared.fitted.encoders.save(folder)
    if histories is None:
        prepared.users.write(folder / "users.parquet")
    prepared.items.write(folder / "items.parquet")
    draws, train_draws = (
        Draws(settings.negatives, counts, settings.reject_seen)
        for counts in (prepared.item_counts, prepared.train_counts)
    )
    _check_memory_limit(backend.memory_limit, prepared, total * (1 + max(num_negatives, train_negatives)))
    plan = Plan(source, prepared, draws, train_draws, num_negatives, train_negatives, seed, backend.memory_limit)
    counts = _write_splits(backend, folder, rows, total, plan, progress)
    summary = {
        "interactions": total,
        "users": len(prepared.vocabulary(USER)),
        "items": len(prepared.vocabulary(ITEM)),
        **times,
        **source.summary(total),
        **counts.summary(plan),
    }
    _note_left_out(plan, counts)
    summary |= source.notes.summary()
    return _specification(folder, plan, counts, summary)


def _check_memory_limit(memory_limit: int | None, prepared: InteractionColumns, rows: int) -> None:
    """Refuse lists whose row groups, one per split with at most `rows`, exceed the memory limit."""
    lists = {name: feature.length for name, feature in prepared.features.items() if feature.length}
    values = sum(lists.values())
    least = WRITING_BYTES + len(SPLITS) * LIST_BYTES * values * min(rows, BLOCK_ROWS)
    if memory_limit is not None and lists and least > memory_limit:
        raise SettingsError(
            f"--memory-limit of {memory_limit / 1e6:,.0f} MB is too little for rows with {values:,} values in lists "
            f"({listed(sorted(lists))}); give {-(-least // 10**8) * 100:,} MB or more, or make the lists shorter"
        )


# --- the rows --------------------------------------------------------------------------------------------------------


def _write_splits(backend: Backend, folder: Path, rows: Table, total: int, plan: Plan, progress: Progress) -> Counts:
    listed_negatives = _listed_negatives(plan.source.candidates, plan.prepared)
    counts = Counts(dict.fromkeys(SPLITS, 0), {})
    done = 0
    with ExitStack() as stack:
        writers = {name: stack.enter_context(SplitWriter(folder, name, _features_of(plan, name))) for name in SPLITS}
        users = stack.enter_context(_Users(folder / "users.parquet", plan.prepared))
        for block in blocks_of_users(backend, rows, plan.prepared):
            made = BlockRows(block, plan, counts, listed_negatives)
            for split in SPLITS:
                for columns in made.of(split):
                    writers[split].write(columns)
            users.write(made)
            done += len(block.users)
            progress("writing splits", done, total)
    if not writers["train"].num_rows and plan.prepared.history is not None:
        least = plan.prepared.history.asked.min_history
        raise DataError(f"{plan.source.dataset}: no train row has {least} events before it; lower min_history")
    for name, writer in writers.items():
        counts.rows[name] = writer.num_rows
        if writer.num_rows:
            counts.chunks[name] = writer.chunks
        else:
            _remove_empty(folder, writer)
    return counts


def _features_of(plan: Plan, split: str) -> Mapping[str, Feature]:
    numbered = {SERIES: Feature(dtype="int64")} if plan.by_series and split != "train" else {}
    return {**plan.prepared.features, **numbered}


def _remove_empty(folder: Path, writer: SplitWriter) -> None:
    for chunk in writer.chunks:
        for file in chunk.files:
            (folder / file).unlink()
    (folder / writer.split).rmdir()


def _listed_negatives(candidates: pa.Table | None, prepared: InteractionColumns) -> NDArray[np.int64] | None:
    if candidates is None:
        return None
    users = prepared.vocabulary(USER).encode(candidates.column(USER))
    lists = candidates.column("negatives")
    items = prepared.vocabulary(ITEM).encode(pc.list_flatten(lists)).reshape(len(users), -1)
    table = np.zeros((len(prepared.vocabulary(USER)) + 1, items.shape[1]), np.int64)
    table[users] = items
    return table


def _note_left_out(plan: Plan, counts: Counts) -> None:
    notes, history = plan.source.notes, plan.prepared.history
    reasons = {
        "without_negatives": "held-out rows of users who acted on every item, so that no candidate is left beside them",
        "unknown_targets": "held-out rows whose item is not in train",
        "unknown_users": "held-out rows whose user is not in train; they have id 0",
    }
    if history is not None:
        reasons["short_histories"] = "train rows " + " or ".join(history.asked.leaves_out)
    for name, what in reasons.items():
        number = counts.left_out[name]
        if not number:
            continue
        kept = name == "unknown_users" or (name == "unknown_targets" and plan.source.unknown_targets == "keep")
        user = plan.prepared.everyone.decode(np.array([counts.examples[name]])).to_pylist()[0]
        end = "; they are kept with id 0 (unknown_targets)" if kept and name == "unknown_targets" else ""
        (notes.changed if kept else notes.dropped).append(f"{number:,} {what}{end}, such as one of user '{user}'")
    if history is not None and history.left_out:
        notes.dropped.append(
            f"histories of {listed(history.left_out)}: some item has no value, which would look like padding"
        )
    for split, rows in counts.rows.items():
        if not rows:
            notes.dropped.append(f"the split {split}: it has no row")


class _Users:
    """Writes the catalogue of users with their latest events, block by block; nothing without histories."""

    def __init__(self, path: Path, prepared: InteractionColumns) -> None:
        self._path, self._prepared = path, prepared
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []

    def __enter__(self) -> _Users:
        return self

    def __exit__(self, *_: object) -> None:
        if self._waiting:
            self._flush(1)
        if self._writer is not None:
            self._writer.close()

    def write(self, made: BlockRows) -> None:
        """Write the users of a block that have an id, with their latest events in all splits."""
        history, users = self._prepared.history, made.block.users
        if history is None:
            return
        last = np.flatnonzero(np.diff(users, append=-1))
        ids = self._prepared.user_ids[users[last]]
        last, ids = last[ids > 0], ids[ids > 0]
        if not len(ids):
            return
        events = made.timeline.histories_of_users(last, history.asked.length)
        lists = made.history_columns(events, made.block.timestamps[last])
        table = self._prepared.users.table(int(ids[0]) - 1, len(ids))
        for name, column in lists.items():
            table = table.append_column(name, to_arrow(column))
        self._waiting.append(table)
        self._flush(USERS_PER_GROUP)

    def _flush(self, least: int) -> None:
        """Write row groups of equal size while at least `least` users wait, so that blocks do not show in the file."""
        while sum(table.num_rows for table in self._waiting) >= least:
            waiting = pa.concat_tables(self._waiting)
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._path, waiting.schema)
            self._writer.write_table(waiting.slice(0, USERS_PER_GROUP).combine_chunks())
            rest = waiting.slice(USERS_PER_GROUP)
            self._waiting = [rest] if rest.num_rows else []


# --- the specification -----------------------------------------------------------------------------------------------


def _specification(folder: Path, plan: Plan, counts: Counts, summary: dict[str, object]) -> FeatureSpec:
    source, prepared, num_negatives = plan.source, plan.prepared, plan.num_negatives
    if source.candidates is not None:
        num_negatives = len(source.candidates.column("negatives")[0])
    channels: dict[str, Sequence[str]] = {
        "user": (USER, *prepared.users.columns),
        "item": (ITEM, *prepared.items.columns),
        "context": tuple(column.name for column in prepared.context),
        **(prepared.history.channels if prepared.history is not None else {}),
        "label": (LABEL,),
        "group": (SERIES if plan.by_series else USER,),
    }
    metadata: dict[str, object] = {
        "dataset": source.dataset,
        "user_id": USER,
        "item_id": ITEM,
        "catalogues": {"user": "users.parquet", "item": "items.parquet"},
        "encoders": ENCODERS_FILE,
        "vocabularies": VOCABULARIES,
        "test_samples_per_series": num_negatives + 1,
        **({"train_negatives": plan.train_negatives} if plan.train_negatives else {}),
        "summary": summary,
    }
    return FeatureSpec(
        features={**prepared.features, **({SERIES: Feature(dtype="int64")} if plan.by_series else {})},
        sources=counts.chunks,
        channels={name: tuple(names) for name, names in channels.items() if names},
        metadata=metadata,
        folder=folder,
    )


def time_range(backend: Backend, rows: Table) -> dict[str, object]:
    """First and last timestamp, as dates if they can be seconds since 1970."""
    times = rows[TIMESTAMP]
    found = fetch(backend, rows.aggregate(first=times.min(), last=times.max())).to_pylist()[0]
    if SECONDS[0] <= found["first"] and found["last"] <= SECONDS[1]:
        return {name: _date(seconds) for name, seconds in found.items()}
    return dict(found)


def _date(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
