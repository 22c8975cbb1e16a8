"""What became of items after training: new values of catalogue columns, new, withdrawn and blocked items.

RUN/catalogue_changes.parquet, which lies beside the bundle and the updates of a run, has a row for each such item:

    item                        the raw id as text
    is_withdrawn, is_blocked    whether it is never recommended
    value NAME, given NAME      its value in the column NAME of the bundle's items, and whether it has one

Its footer holds the format and the number of the version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recspec.base.errors import BundleError
from recspec.base.files import PathError, confined, open_parquet, special, whole_file
from recspec.bundle import versions
from recspec.data.encoding import combined
from recspec.models.layers import Batch

FORMAT = b"1"
ITEM, WITHDRAWN, BLOCKED = "item", "is_withdrawn", "is_blocked"
VALUE, GIVEN = "value ", "given "
"""What stands before the name of a column, in the name of its values and of the marks that they are there."""
COLUMNS = pa.schema({ITEM: pa.string(), WITHDRAWN: pa.bool_(), BLOCKED: pa.bool_()})


@dataclass(frozen=True, eq=False)
class ItemChanges:
    """The rows of the file, whatever model reads them."""

    table: pa.Table = field(default_factory=COLUMNS.empty_table)
    version: int = 0

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of catalogue columns of which some items have a value here."""
        return tuple(name.removeprefix(VALUE) for name in self.table.column_names if name.startswith(VALUE))

    def values(self, name: str) -> tuple[pa.Array, NDArray[np.bool_]]:
        """The values of a column (T,), and where they are given."""
        return combined(self.table.column(VALUE + name)), self.flags(GIVEN + name)

    def flags(self, name: str) -> NDArray[np.bool_]:
        """A column of truths (T,)."""
        return np.asarray(self.table.column(name).to_numpy())

    @classmethod
    def of_bundle(cls, bundle: Path) -> ItemChanges | None:
        """Those of the run that a bundle belongs to; None if there are none. Raises BundleError if they are damaged."""
        file = place_of(bundle)
        return None if file is None or not file.exists() else cls.load(file)

    @classmethod
    def load(cls, file: Path) -> ItemChanges:
        """Read a file. Raises BundleError if it is damaged."""
        try:
            if problem := special(file):
                raise ValueError(problem)
            with open_parquet(file) as opened:
                footer = opened.metadata.metadata or {}
                table = opened.read()
            table.validate(full=True)
            if footer.get(b"format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT.decode()}")
            found = cls(table, int(footer[b"version"]))
            kinds = {ITEM: pa.string(), WITHDRAWN: pa.bool_(), BLOCKED: pa.bool_()}
            kinds |= {GIVEN + name: pa.bool_() for name in found.columns}
            held = {name: table.column(name) for name in kinds}
            if any(held[name].type != kind or held[name].null_count for name, kind in kinds.items()):
                raise ValueError("its columns hold something else")
            if len(pc.unique(table.column(ITEM))) != table.num_rows:
                raise ValueError("an item has two rows")
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise BundleError(
                f"{file}: damaged: {error}; write it again with `recspec catalogue`, or remove it to go back to the "
                "catalogue of the training"
            ) from None
        return found

    def save(self, file: Path) -> None:
        """Write the file, whole or not at all."""
        schema = self.table.schema.with_metadata({b"format": FORMAT, b"version": str(self.version).encode()})
        with whole_file(file) as temporary:
            pq.write_table(self.table.replace_schema_metadata(schema.metadata), temporary, compression="zstd")


def place_of(bundle: Path) -> Path | None:
    """The file of the run that a bundle belongs to; None for a bundle of no run, or a link out of it."""
    run = versions.run_of(bundle)
    try:
        return None if run is None else confined(run, versions.CHANGES)
    except PathError:
        return None


@dataclass(frozen=True, eq=False)
class BoundChanges:
    """Changes by the ids of a model. Items that are new to it, and that it can score, have the ids behind its own."""

    changes: ItemChanges
    ids: NDArray[np.int64]  # (T,) the id of each row's item; -1 for those that wait for a training
    num_ids: int  # of the model, those of nobody included
    first_id: int
    features: Batch = field(default_factory=dict)
    """Features of the new items (M, ...), their id included."""

    @cached_property
    def new_rows(self) -> NDArray[np.int64]:
        """(M,) the rows of new items, in order of their ids."""
        return np.flatnonzero(self.ids >= self.num_ids)

    @cached_property
    def new_ids(self) -> Mapping[str, int]:
        """The id of each new item by its raw id as text."""
        names = self.changes.table.column(ITEM).take(self.new_rows).to_pylist()
        return {name: self.num_ids + place for place, name in enumerate(names)}

    @cached_property
    def available(self) -> NDArray[np.bool_]:
        """(num_ids + M,) which items may be recommended."""
        found = np.ones(self.num_ids + len(self.new_rows), bool)
        gone = self.changes.flags(WITHDRAWN) | self.changes.flags(BLOCKED)
        found[self.ids[gone & (self.ids >= 0)]] = False
        return found

    def applied(self, name: str, column: Any) -> pa.Array:
        """A column of the model's items, in order of ids from the first on, with the new values, and with new items."""
        base = combined(column) if isinstance(column, pa.ChunkedArray) else column
        places = np.arange(len(base) + len(self.new_rows))
        missing = places >= len(base)
        if name in self.changes.columns:
            values, given = self.changes.values(name)
            base, values = of_one_type(base, values)
            rows = np.flatnonzero(given & (self.ids >= self.first_id))
            places[self.ids[rows] - self.first_id] = len(base) + rows
            missing[self.ids[rows] - self.first_id] = False
            base = pa.concat_arrays([base, values])
        return base.take(pa.array(places, mask=missing))


def of_one_type(base: pa.Array, values: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Both columns in the wider type: prices that were whole may get a fraction."""
    if base.type == values.type:
        return base, values
    for kind in (base.type, values.type, pa.string()):
        try:
            return base.cast(kind), values.cast(kind)
        except pa.ArrowException:
            continue
    raise BundleError(f"the catalogue holds {base.type}, and its changes {values.type}; write them again")
