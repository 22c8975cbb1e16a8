"""From labelled rows (clicked or not) to a dataset for models of click-through rate.

Vocabularies and scales are fitted on train alone, so valid and test are as unknown as future rows. Datasets of labelled
rows (such as `table` with a label) bring them as an Ibis expression with the column `split`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec.encoding import ENCODERS_FILE, VOCABULARIES, NumberEncoder, Vocabulary
from recspec.errors import DataError
from recspec.prepare.backend import Backend
from recspec.prepare.columns import Catalogue, Column, Fitted, PreparedCatalogue, fit_in_table
from recspec.prepare.context import Progress
from recspec.prepare.names import GROUP, LABEL, SPLIT, SPLITS
from recspec.prepare.notes import Notes
from recspec.prepare.tables import blocks, count_rows, counts_by, fetch
from recspec.prepare.text_files import ROW
from recspec.spec import Chunk, Feature, FeatureSpec
from recspec.storage import Columns, Ragged, SplitWriter

BLOCK_ROWS = 262_144
"""Rows encoded in a block."""

Role = Literal["user", "item", "context"]


@dataclass(frozen=True)
class Source:
    """Labelled rows with their split, and everything known about users and items."""

    dataset: str
    rows: Table
    """Columns row, split, label (0 or 1), group if `grouped`, and those of `ids` and `columns`."""
    ids: Mapping[Literal["user", "item"], Column]
    """The id of users and of items, if there is one."""
    columns: Mapping[Role, Sequence[Column]]
    """The other features. Those of a catalogue are in the rows too, so that unknown items have theirs."""
    users: Catalogue | None = None
    items: Catalogue | None = None
    raw_names: Mapping[str, str | None] = field(default_factory=dict)
    """Raw columns of the ids, if their names differ."""
    grouped: Literal[False, "values", "ids"] = False
    """Whether rows are ranked in groups: by any values, or by whole numbers from 0, kept as they are."""
    kept: Sequence[str] = ()
    """Numbers kept as they are, without a role, so that no model reads them."""
    min_count: int = 1
    """Values in fewer train rows become unknown."""
    strip: bool = False
    """Whether blanks around raw texts are ignored. `rows` contain none; rows to predict may."""
    missing_values: Sequence[str] = ()
    """Raw texts that mean a missing value. `rows` contain none; rows to predict may."""
    summary: Mapping[str, object] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    """What the dataset inferred, dropped and changed; writing adds to it."""


def write(backend: Backend, folder: Path, source: Source, *, progress: Progress) -> FeatureSpec:
    """Write splits, vocabularies and catalogues into `folder`.

    Raises:
        DataError: if train has no rows, or a catalogue names an id twice.
    """
    progress("splitting rows", 0, None)
    rows = backend.stage(source.rows.order_by(ROW))
    total = count_rows(backend, rows)
    counted = {entry[SPLIT]: entry["rows"] for entry in fetch(backend, counts_by(rows, SPLIT)).to_pylist()}
    if not total:
        raise DataError(f"{source.dataset}: the files hold no row; expected one at least for training")
    if not counted.get("train"):
        raise DataError(f"{source.dataset}: none of {total:,} rows is for training; give valid and test smaller shares")
    progress("finding ids", 0, None)
    fitted, catalogues = _fit(backend, rows, source)
    fitted.encoders.save(folder)
    for role, catalogue in catalogues.items():
        catalogue.write(folder / f"{role}s.parquet")
    chunks = _write_splits(backend, folder, rows, total, source, fitted, list(counted), progress)
    return _specification(folder, source, fitted, catalogues, chunks, counted)


def _fit(
    backend: Backend, rows: Table, source: Source
) -> tuple[Fitted, dict[Literal["user", "item"], PreparedCatalogue]]:
    train = rows.filter(rows[SPLIT] == "train")
    fitted = Fitted(strip=source.strip, missing_values=source.missing_values)
    for column in source.ids.values():
        _, vocabulary = fit_in_table(backend, train, column, source.min_count)
        assert vocabulary is not None
        fitted.add_id(column.name, vocabulary, source.raw_names.get(column.name))
    for columns in source.columns.values():
        for column in columns:
            if column.kind == "cross":
                fitted.add_cross(column)
            else:
                fitted.add(column.name, *fit_in_table(backend, train, column, source.min_count))
    for name in source.kept:
        fitted.add(name, NumberEncoder(), None)
    given: dict[Literal["user", "item"], Catalogue | None] = {"user": source.users, "item": source.items}
    few = "stand in no train row" if source.min_count <= 1 else f"stand in fewer than {source.min_count} train rows"
    catalogues = {
        role: fitted.add_catalogue(role, column.name, given[role], notes=source.notes, unseen=few)
        for role, column in source.ids.items()
    }
    return fitted, catalogues


def _write_splits(
    backend: Backend,
    folder: Path,
    rows: Table,
    total: int,
    source: Source,
    fitted: Fitted,
    splits: Sequence[str],
    progress: Progress,
) -> dict[str, tuple[Chunk, ...]]:
    groups = None
    if source.grouped == "values":
        groups = Vocabulary.of(fetch(backend, counts_by(rows, GROUP)).column(GROUP))
        fitted.features[GROUP] = Feature(dtype="int32", cardinality=groups.cardinality)
    elif source.grouped == "ids":
        fitted.features[GROUP] = Feature(dtype="int64", cardinality=_group_cardinality(backend, rows))
    fitted.features[LABEL] = Feature(dtype="float32")
    done = 0
    unknown: Counter[str] = Counter()
    with ExitStack() as stack:
        names = [name for name in SPLITS if name in splits]
        writers = {name: stack.enter_context(SplitWriter(folder, name, fitted.features)) for name in names}
        for batch in blocks(backend, rows, BLOCK_ROWS):
            for name, writer in writers.items():
                part = batch.filter(pc.equal(batch.column(SPLIT), name))
                if part.num_rows:
                    columns = _columns(part, source, fitted, groups)
                    writer.write(columns)
                    unknown.update({role: _zeros(columns[identity.name]) for role, identity in source.ids.items()
                                    if name != "train"})  # fmt: skip
            done += batch.num_rows
            progress("writing splits", done, total)
    held_out = sum(writer.num_rows for name, writer in writers.items() if name != "train")
    for role, count in unknown.items():
        if count:
            source.notes.changed.append(
                f"{count:,} of {held_out:,} held-out rows have {role} id 0: train lacks their {role}"
            )
    if source.min_count > 1:
        source.notes.changed.append(
            f"ids and categories in fewer than {source.min_count:,} train rows share id 0 with unknown ones (min_count)"
        )
    return {name: writer.chunks for name, writer in writers.items()}


def _zeros(ids: NDArray[np.generic] | Ragged) -> int:
    assert not isinstance(ids, Ragged)
    return int((ids == 0).sum())


def _group_cardinality(backend: Backend, rows: Table) -> int:
    """One more than the largest group.

    Raises:
        DataError: if a group is missing or negative.
    """
    group = rows[GROUP]
    assert group.type().is_integer(), group.type()
    found = fetch(
        backend, rows.aggregate(least=group.min(), most=group.max(), missing=group.isnull().sum())
    ).to_pylist()
    least, most, missing = (found[0][name] for name in ("least", "most", "missing"))
    if missing or least < 0:
        had = f"{missing:,} rows without one" if missing else f"the number {least}"
        raise DataError(f"groups: found {had}; expected a whole number from 0 on in every row")
    return int(most) + 1


def _columns(batch: pa.Table, source: Source, fitted: Fitted, groups: Vocabulary | None) -> Columns:
    held = (*source.ids.values(), *(column for columns in source.columns.values() for column in columns))
    sources = {column.name: column.source for column in held}
    columns: Columns = {
        column.name: fitted.encode_cross(column, [batch.column(sources[name]) for name in column.crossed])
        if column.kind == "cross"
        else fitted.encode(column.name, batch.column(column.source))
        for column in held
    }
    columns |= {name: fitted.encode(name, batch.column(name)) for name in source.kept}
    if source.grouped == "ids":
        columns[GROUP] = batch.column(GROUP).to_numpy().astype(np.int64)
    elif groups is not None:
        columns[GROUP] = groups.encode(batch.column(GROUP)).astype(np.int32)
    columns[LABEL] = batch.column(LABEL).to_numpy().astype(np.float32)
    return columns


def _specification(
    folder: Path,
    source: Source,
    fitted: Fitted,
    catalogues: Iterable[str],
    chunks: Mapping[str, tuple[Chunk, ...]],
    counted: Mapping[str, int],
) -> FeatureSpec:
    channels: dict[str, tuple[str, ...]] = {}
    metadata: dict[str, object] = {"dataset": source.dataset}
    summary: dict[str, object] = {"rows": {name: counted[name] for name in SPLITS if name in counted}}
    for role, identity in source.ids.items():
        channels[role] = (identity.name,)
        metadata[f"{role}_id"] = identity.name
        summary[f"{role}s"] = len(fitted.encoders.vocabularies[identity.name])
    for part, columns in source.columns.items():
        if columns:
            channels[part] = (*channels.get(part, ()), *(column.name for column in columns))
    channels["label"] = (LABEL,)
    if source.grouped:
        channels["group"] = (GROUP,)
    metadata |= {
        "catalogues": {role: f"{role}s.parquet" for role in catalogues},
        "encoders": ENCODERS_FILE,
        "vocabularies": VOCABULARIES,
        "summary": {**summary, **source.summary, **source.notes.summary()},
    }
    return FeatureSpec(fitted.features, chunks, channels, metadata, folder)
