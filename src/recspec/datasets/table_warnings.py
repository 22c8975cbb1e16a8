"""Warnings about your own table: columns, settings and values that look as if something else was meant."""

from __future__ import annotations

from pathlib import Path

from recspec.data.prepare import ColumnRole, RawRows, doubtful_times, unused_columns, unused_types
from recspec.datasets.table_features import OURS, Tables
from recspec.datasets.table_settings import Settings

ROLES: tuple[ColumnRole, ...] = ("label", "rating", "timestamp")


def warnings(raw: RawRows, tables: Tables, asked: Settings) -> list[str]:
    """What looks wrong in the raw rows under the settings that were `asked` for and those that were inferred."""
    backend, settings, rows = tables.backend, tables.settings, tables.rows
    names = [name for name in rows.columns if name not in OURS]
    used = [
        *settings.features,
        *settings.declared,
        settings.user,
        settings.item,
        settings.timestamp,
        settings.label,
        settings.rating,
        settings.splits,
        settings.weight,
        settings.event,
        settings.group,
    ]
    open_roles = [
        role
        for role in ROLES
        if settings.label is None and role not in asked.model_fields_set and getattr(settings, role) not in names
    ]
    unused = [name for name in names if name not in used]
    told = unused_columns(backend, rows, unused, open_roles)
    told += unused_types(backend, rows, unused) if settings.label is None and settings.event is None else []
    told += doubtful_times(backend, rows, tables.time) if tables.time and rows[tables.time].type().is_numeric() else []
    return told + without_effect(raw, tables, asked)


def without_effect(raw: RawRows, tables: Tables, asked: Settings) -> list[str]:
    """A sentence for each setting that was given and changed nothing."""
    settings, split = tables.settings, tables.settings.chosen_split
    is_labelled, timed = settings.label is not None, tables.time is not None
    if_labelled = "rows have a label" if is_labelled else ""
    if_not = "" if is_labelled else "rows have no label (label=COLUMN names it)"
    no_text = all(isinstance(part, Path) for part in raw.parts) and not (settings.users or settings.items)
    has_lists = settings.lists or any(each.type == "list" for each in settings.declared.values())
    why = {
        "min_interactions": if_labelled,
        "num_negatives": if_labelled,
        "min_count": if_not,
        "group": if_not,
        "valid": f"the split is {split}" if split in ("leave_one_out", "none") else "",
        "test": f"the split is {split}" if split in ("leave_one_out", "none", "given") else "",
        "unknown_targets": f"the split is {split}" if split not in ("time", "given") else "",
        "negatives": "" if settings.train_negatives or settings.negative_history else "none are drawn for train",
        "min_rating": "" if settings.rating else "no column is the rating (rating=COLUMN names it)",
        "time_format": "" if timed else "no column is the time (timestamp=COLUMN names it)",
        "half_life": "" if timed else "no column is the time (timestamp=COLUMN names it)",
        "rows_by": "" if settings.rows else "all rows are taken (rows=NUMBER takes some)",
        "title": "" if settings.items else "there is no file of items (items=FILE names it)",
        "text_dim": "" if settings.text else "no column is text (text=[COLUMN] names it)",
        "list_separator": "" if has_lists else "no column holds lists (lists=[COLUMN] names it)",
        "cross_cardinality": "" if settings.crosses else "nothing is crossed (crosses=[[COLUMN, COLUMN]])",
        "separator": "no file is text" if no_text else "",
        "encoding": "no file is text" if no_text else "",
    }
    given = [name for name in asked.model_fields_set if getattr(asked, name) != Settings.model_fields[name].default]
    return [
        f"setting '{name}' ({getattr(asked, name)}) has no effect: {why[name]}"
        for name in sorted(given)
        if why.get(name)
    ]
