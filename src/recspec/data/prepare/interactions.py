"""From interactions to a dataset of positives to train on and candidates to rank.

Every row of train is a positive (label 1). For each user, valid and test hold one series: the held-out positive, then
`num_negatives` items without an interaction of the user (label 0). Rows may hold their user's history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec.base.errors import DataError
from recspec.data.prepare.backend import Backend, Part
from recspec.data.prepare.columns import metadata
from recspec.data.prepare.context import Progress
from recspec.data.prepare.histories import HistorySettings
from recspec.data.prepare.interaction_columns import (
    Before,
    InteractionColumns,
    Source,
    prepare_columns,
    stage_by_number,
)
from recspec.data.prepare.interaction_rows import BlockRows, Counts, Plan, blocks_of_users, check_memory_limit
from recspec.data.prepare.names import EVENT_WEIGHT, ITEM, LABEL, NEW, SERIES, SPLITS, TIMESTAMP, USER
from recspec.data.prepare.seen import write_seen
from recspec.data.prepare.staging import PartFiles, gather, part_writers
from recspec.data.prepare.tables import count_rows, time_range
from recspec.data.storage import SEEN_FILE
from recspec.feature_spec import Feature, FeatureSpec


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
    """Write splits, vocabularies and catalogues. Raises DataError if nothing is left, or a catalogue repeats an id.

    Negatives of train are items the user did not act on in train. Items from valid and test may be drawn; excluding
    them would leak the answers. The user never acted on the `num_negatives` items behind a positive of test, whatever
    the rating or weight of the event. Those behind a positive of valid are drawn without knowledge of test rows.
    """
    progress("sorting interactions", 0, None)
    rows = source.rows if source.before else backend.stage_by(source.rows, USER, source.order)
    total = count_rows(backend, rows)
    if total == 0:
        raise DataError(f"{source.dataset}: no interaction is left to prepare; expected one row at least")
    progress("finding ids", 0, None)
    times = time_range(backend, rows)
    prepared = prepare_columns(backend, rows, source, settings, isinstance(times["first"], str))
    if source.before:  # whose users keep their numbers
        rows = stage_by_number(backend, rows, prepared.everyone, source.order, folder)
    prepared.fitted.encoders.save(folder)
    write_seen(backend, folder, rows if source.seen is None else source.seen)
    if settings.history is None:
        prepared.users.write(folder / "users.parquet")
    prepared.items.write(folder / "items.parquet")
    most = total * (1 + max(num_negatives, settings.train_negatives))
    check_memory_limit(backend.memory_limit, prepared.fitted.features, most)
    plan = Plan(
        prepared,
        settings,
        num_negatives,
        seed,
        backend.memory_limit,
        by_series=source.vocabularies == "train",
        unknown_targets=source.unknown_targets,
        weighted=source.weighted,
        decay=source.decay,
        listed=_listed_negatives(source.candidates, prepared),
        seen=folder / SEEN_FILE if source.seen is not None else None,
    )
    counts = _write_splits(backend, folder, rows, total, plan, source.before, progress)
    if not counts.rows["train"] and prepared.history is not None:
        raise DataError(
            f"{source.dataset}: no train row has {settings.min_history} events before it; lower min_history"
        )
    summary: dict[str, object] = {"interactions": total}
    summary |= {"users": len(prepared.vocabulary(USER)), "items": len(prepared.vocabulary(ITEM))}
    summary |= {**times, **source.summary(total), **counts.summary(plan)}
    _note_left_out(source, plan, counts)
    return _specification(folder, source, plan, counts, {**summary, **source.notes.summary()})


# --- the rows --------------------------------------------------------------------------------------------------------


def _write_splits(
    backend: Backend, folder: Path, rows: Table, total: int, plan: Plan, before: Before | None, progress: Progress
) -> Counts:
    counts = Counts(dict.fromkeys(SPLITS, 0), {})
    parts: list[PartFiles] = []
    done = 0

    def report(rows: int) -> None:
        nonlocal done
        done += rows
        progress("writing splits", done, total)

    items = replace(plan.prepared.items, readable={})  # titles would take memory in every executor
    sent = replace(plan, prepared=replace(plan.prepared, items=items))
    for files, found in backend.each_part(rows, partial(_write_part, sent), report):
        parts.append(files)
        counts.add(found)
    counts.chunks.update(gather(backend, folder, parts))
    if before is not None:
        before.first_new.update({split: counts.rows[split] - counts.new[split] for split in SPLITS})
    return counts


def _write_part(plan: Plan, part: Part) -> tuple[PartFiles, Counts]:
    """Write the rows of a part's users; the series have numbers of no other part."""
    counts = Counts(dict.fromkeys(SPLITS, 0), {}, series=Counter(dict.fromkeys(SPLITS, part.first_row)))
    features = {f"{name}{end}": _features_of(plan, name) for end in ("", NEW) for name in SPLITS}
    with part_writers(part.folder, features) as (writers, users):
        for block in blocks_of_users(part, with_histories=plan.prepared.history is not None):
            made = BlockRows(block, plan, counts)
            for split in SPLITS:
                for is_new, columns in made.of(split):
                    writers[f"{split}{NEW if is_new else ''}"].write(columns)
            if (table := made.catalogue()) is not None:
                users.write(table)
            part.done(block.num_rows)
    for split in SPLITS:
        counts.new[split] = writers[f"{split}{NEW}"].num_rows
        counts.rows[split] = writers[split].num_rows + counts.new[split]
    return PartFiles.of(part.folder, writers), counts


def _features_of(plan: Plan, split: str) -> Mapping[str, Feature]:
    numbered = {SERIES: Feature(dtype="int64")} if plan.by_series and split != "train" else {}
    return {**plan.prepared.fitted.features, **numbered}


def _listed_negatives(candidates: pa.Table | None, prepared: InteractionColumns) -> NDArray[np.int64] | None:
    if candidates is None:
        return None
    users = prepared.vocabulary(USER).encode(candidates.column(USER))
    lists = candidates.column("negatives")
    items = prepared.vocabulary(ITEM).encode(pc.list_flatten(lists)).reshape(len(users), -1)
    table = np.zeros((len(prepared.vocabulary(USER)) + 1, items.shape[1]), np.int64)
    table[users] = items
    return table


def _note_left_out(source: Source, plan: Plan, counts: Counts) -> None:
    notes, history = source.notes, plan.prepared.history
    reasons = {
        "without_negatives": "held-out rows of users who acted on every item, so that no candidate is left beside them",
        "unknown_targets": "held-out rows whose item is not in train",
        "unknown_users": "held-out rows whose user is not in train; they have id 0",
    }
    if history is not None:
        reasons["short_histories"] = "train rows " + " or ".join(plan.settings.leaves_out)
    for name, what in reasons.items():
        number = counts.left_out[name]
        if not number:
            continue
        kept = name == "unknown_users" or (name == "unknown_targets" and plan.unknown_targets == "keep")
        user = plan.prepared.everyone.decode(np.array([counts.examples[name]])).to_pylist()[0]
        end = "; they are kept with id 0 (unknown_targets)" if kept and name == "unknown_targets" else ""
        (notes.changed if kept else notes.dropped).append(f"{number:,} {what}{end}, such as one of user '{user}'")
    if history is not None:
        history.note(notes)
    if source.holds_out:
        notes.dropped += [f"the split {split}: it has no row" for split, rows in counts.rows.items() if not rows]


# --- the specification -----------------------------------------------------------------------------------------------


def _specification(
    folder: Path, source: Source, plan: Plan, counts: Counts, summary: Mapping[str, object]
) -> FeatureSpec:
    prepared, num_negatives = plan.prepared, plan.num_negatives
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
    drawn = {"test_samples_per_series": num_negatives + 1}
    if plan.settings.train_negatives:
        drawn["train_negatives"] = plan.settings.train_negatives
    named = {"timestamp": TIMESTAMP} if source.timed else {}
    named |= {"event_weight": EVENT_WEIGHT} if source.weighted else {}
    named["seen"] = SEEN_FILE
    told = metadata(source.dataset, {"user": USER, "item": ITEM}, summary, **named, **drawn)
    present = {name: tuple(names) for name, names in channels.items() if names}
    return FeatureSpec(_features_of(plan, "test"), counts.chunks, present, told, folder)
