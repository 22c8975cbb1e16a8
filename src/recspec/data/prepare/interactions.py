"""From interactions to a dataset of positives to train on and candidates to rank.

Every row of train is a positive (label 1). For each user, valid and test hold one series: the held-out positive, then
`num_negatives` items without an interaction of the user (label 0). Rows may hold their user's history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec.base.errors import DataError
from recspec.data.encoding import Vocabulary, extended
from recspec.data.prepare.backend import Backend, Part, PartFiles, count_rows, fetch, part_writers, write_parts
from recspec.data.prepare.catalogues import Catalogue, Fitted, Rows, metadata, note_new
from recspec.data.prepare.columns import Column, fit_in_table
from recspec.data.prepare.histories import HistorySettings, UnknownTargets, prepare_history
from recspec.data.prepare.interaction_rows import (
    BlockRows,
    Counts,
    InteractionColumns,
    Plan,
    blocks_of_users,
    check_memory_limit,
)
from recspec.data.prepare.names import (
    EVENT_WEIGHT,
    IS_TARGET,
    ITEM,
    LABEL,
    NEW,
    ROW,
    SERIES,
    SIGNALS_OF,
    SPLIT,
    SPLITS,
    TIMESTAMP,
    USER,
    WRITTEN,
    Notes,
)
from recspec.data.prepare.prepared import Progress
from recspec.data.prepare.splits import write_seen
from recspec.data.prepare.tables import counts_by, stage_by_number, time_range
from recspec.data.storage import DISLIKES_FILE, SEEN_FILE
from recspec.feature_spec import Chunk, Feature, FeatureSpec

LIANGS_CUT_OFFS = (20, 50, 100)  # of Liang et al., 2018, on held-out users; shorter than half of the items


@dataclass(frozen=True, kw_only=True)
class Source(Rows):
    """Interactions: columns user_id, item_id, timestamp, row and split, event_weight if `weighted`, and `context`.

    With `IS_TARGET`, a row of valid or test where it is false is no target: it is known to later splits alone.
    """

    order: Sequence[str] = (TIMESTAMP, ROW)  # columns that sort a user's rows by time
    context: Sequence[Column] = ()
    raw_names: Mapping[str, str] = field(default_factory=dict)  # raw columns of the ids, if their names differ
    candidates: pa.Table | None = None  # of test: columns user_id and negatives (lists of raw item ids); drawn if None
    vocabularies: Literal["all", "train"] = "all"
    """Rows whose users and items get an id; with `train`, a user may have several rows in valid and test."""
    unknown_targets: UnknownTargets = "drop"  # in valid and test, rows with an unknown item; unknown users stay as id 0
    unseen_items: bool = False  # whether items that only the catalogue describes get an id too
    timed: bool = True  # whether `timestamp` holds times and not only an order
    summary: Callable[[int], Mapping[str, object]] = lambda _: {}
    """The dataset's own counts, given the number of kept interactions; it may add to `notes`."""
    holds_out: bool = True  # whether rows were meant for valid and test
    folds_in: bool = False  # whether users of valid and test are held out, with known events in fold_in


def prepare_columns(
    backend: Backend, rows: Table, source: Source, settings: HistorySettings, dated: bool
) -> InteractionColumns:
    """Fit the features of interactions; `dated` timestamps count seconds since 1970."""
    before, notes = source.before, source.notes
    fitted = Fitted(source.missing_values, source.missing_by_column, before.encoders if before else None)
    train = rows.filter(rows[SPLIT] == "train")
    known, unseen = (rows, "occur in no row") if source.vocabularies == "all" else (train, "occur in no train row")
    present = known.filter(known[ITEM].notnull())
    targets = present.count(where=present[IS_TARGET] if IS_TARGET in present.columns else None)
    each = present.group_by(ITEM).aggregate(rows=targets, train=(present[SPLIT] == "train").cast("int64").sum())
    counted = fetch(backend, each.order_by(ITEM))
    named = counted.column(ITEM)
    if source.candidates is not None:
        listed = pc.unique(pc.list_flatten(source.candidates.column("negatives")))
        named = pa.chunked_array([*named.chunks, listed.cast(named.type)])
    if source.unseen_items and source.items is not None:
        named = _with_unseen(named, source.items, notes)
    fitted.add_id(USER, Vocabulary.of(_values(backend, known, USER)), source.raw_names.get(USER))
    fitted.add_id(ITEM, Vocabulary.of(named), source.raw_names.get(ITEM))
    users, items = (fitted.encoders.vocabularies[name] for name in (USER, ITEM))
    item_counts, train_counts = (_counts_by_id(items, counted, name) for name in ("rows", "train"))
    everyone = users
    if known is not rows:
        everyone = Vocabulary.of(_values(backend, rows, USER))
        everyone = extended(users, everyone) if before else everyone
    of_users = fitted.add_catalogue("user", USER, source.users, notes=notes, unseen=unseen)
    of_items = fitted.add_catalogue(
        "item", ITEM, source.items, notes=notes, unseen=unseen, name_missing=settings.history is not None
    )
    for role, key, given in (("user", USER, source.users), ("item", ITEM, source.items)):
        if before is not None and given is not None:
            before.notes.extend(note_new(role, key, given, before.encoders, fitted.encoders))
    for column in source.context:
        fitted.add(column.name, *fit_in_table(backend, train, fitted.fixed(column)))
    raw_item = source.raw_names.get(ITEM, ITEM)
    lists = before.spec.role("history") if before else None
    dated = before.dated if before else dated
    history = prepare_history(fitted, of_items, settings, raw_item, timed=source.timed, dated=dated, lists=lists)
    fitted.features[LABEL] = Feature(dtype="float32")
    fitted.features[TIMESTAMP] = Feature(dtype="float64" if rows[TIMESTAMP].type().is_floating() else "int64")
    if source.weighted:
        fitted.features[EVENT_WEIGHT] = Feature(dtype="float32")
    user_ids = np.append(0, np.arange(1, len(users) + 1) if everyone is users else users.encode(everyone.values))
    return InteractionColumns(
        fitted, of_users, of_items, source.context, everyone, user_ids, item_counts, train_counts, history
    )


def _with_unseen(named: pa.ChunkedArray, catalogue: Catalogue, notes: Notes) -> pa.ChunkedArray:
    """The named items and those that only the catalogue describes, which are counted."""
    keys = catalogue.table.column(catalogue.key)
    try:
        described = pc.drop_null(pc.unique(keys.cast(named.type)))
    except pa.ArrowInvalid as error:
        raise DataError(f"{catalogue.file}: column '{catalogue.key}' holds ids unlike the rows': {error}") from None
    unseen = described.filter(pc.invert(pc.is_in(described, value_set=pc.unique(named))))
    if len(unseen) == len(described):  # the file describes none of the rows' items, which is refused later
        return named
    if len(unseen):
        notes.changed.append(
            f"{len(unseen):,} of {len(described):,} items in {catalogue.file} have no interaction, such as "
            f"'{unseen[0].as_py()}'; they are kept for models that score items from their features"
        )
    return pa.chunked_array([*named.chunks, unseen])


def _counts_by_id(items: Vocabulary, counted: pa.Table, name: str) -> NDArray[np.int64]:
    counts = np.zeros(len(items), np.int64)
    counts[items.encode(counted.column(ITEM)) - 1] = counted.column(name).to_numpy()
    return counts


def _values(backend: Backend, rows: Table, name: str) -> pa.ChunkedArray:
    return fetch(backend, counts_by(rows, name)).column(name)


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
    if source.dislikes is not None:
        write_seen(backend, folder, source.dislikes, DISLIKES_FILE)
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
        splits=WRITTEN if source.folds_in else SPLITS,
        signals=SIGNALS_OF if IS_TARGET in rows.columns else {},
    )
    counts = Counts(dict.fromkeys(plan.splits, 0))
    items = replace(prepared.items, readable={})  # titles would take memory in every executor
    write_part = partial(_write_part, replace(plan, prepared=replace(prepared, items=items)))
    first_new = source.before.first_new if source.before else None
    chunks = write_parts(backend, folder, rows, total, write_part, counts, first_new, progress)
    if not counts.rows["train"] and prepared.history is not None:
        raise DataError(
            f"{source.dataset}: no train row has {settings.min_history} events before it; lower min_history"
        )
    summary: dict[str, object] = {"interactions": total}
    summary |= {"users": len(prepared.vocabulary(USER)), "items": len(prepared.vocabulary(ITEM))}
    summary |= {**times, **source.summary(total), **counts.summary(plan)}
    _note_left_out(source, plan, counts)
    return _specification(folder, source, plan, chunks, {**summary, **source.notes.summary()})


# --- the rows --------------------------------------------------------------------------------------------------------


def _write_part(plan: Plan, part: Part) -> tuple[PartFiles, Counts]:
    """Write the rows of a part's users; the series have numbers of no other part."""
    counts = Counts(dict.fromkeys(plan.splits, 0), series=Counter(dict.fromkeys(SPLITS, part.first_row)))
    features = {f"{name}{end}": _features_of(plan, name) for end in ("", NEW) for name in plan.splits}
    features |= dict.fromkeys(plan.signals.values(), plan.prepared.fitted.features)
    with part_writers(part.folder, features) as (writers, users):
        for block in blocks_of_users(part, with_histories=plan.prepared.history is not None):
            made = BlockRows(block, plan, counts)
            for split in plan.splits:
                for is_new, columns in made.of(split):
                    writers[f"{split}{NEW if is_new else ''}"].write(columns)
            for split, name in plan.signals.items():
                for columns in made.signals(split):
                    writers[name].write(columns)
            if (table := made.catalogue()) is not None:
                users.write(table)
            part.done(block.num_rows)
    for split in plan.splits:
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
    folder: Path, source: Source, plan: Plan, chunks: Mapping[str, tuple[Chunk, ...]], summary: Mapping[str, object]
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
    named: dict[str, object] = {"timestamp": TIMESTAMP} if source.timed else {}
    named |= {"event_weight": EVENT_WEIGHT} if source.weighted else {}
    named |= {"seen": SEEN_FILE} | ({"dislikes": DISLIKES_FILE} if source.dislikes is not None else {})
    if source.folds_in:
        longest = len(prepared.vocabulary(ITEM)) // 2
        named |= {"cut_offs": found} if (found := [k for k in LIANGS_CUT_OFFS if k <= longest]) else {}
    told = metadata(source.dataset, {"user": USER, "item": ITEM}, summary, **named, **drawn)
    present = {name: tuple(names) for name, names in channels.items() if names}
    return FeatureSpec(_features_of(plan, "test"), chunks, present, told, folder)
