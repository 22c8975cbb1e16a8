"""The columns of the item catalogue as a page shows them: controls of a filter, and fields of items."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from recspec.inference.catalogue import TITLE_COLUMNS
from recspec.inference.column_facts import ColumnFacts, facts_of_values, shown_values
from recspec.inference.predictor import Predictor
from recspec.inference.wanted import RawId

MOST_COLUMNS = 50
"""Columns of a catalogue that are shown: the first."""
MOST_SHOWN = 200
"""Items whose fields one request may ask for."""
LARGEST_COLUMN = 256 << 20
"""Bytes of a column in the file that is shown; larger ones would fill the memory."""


def catalogue_columns(predictor: Predictor, names: Sequence[str], items: Sequence[RawId]) -> dict[str, Any]:
    """Raw values of the catalogue of known items, by column, in the order of the items.

    Raises:
        RequestError: for a column that the catalogue lacks.
    """
    known, raw = predictor.catalogues, predictor.recommender.chooser.raw
    places = pa.array(known.item_ids(items) - known.items.first_id)
    return {name: raw.column(name).take(places) for name in dict.fromkeys(names)}


class ItemFields:
    """The catalogue of a predictor's items, by column."""

    def __init__(self, predictor: Predictor) -> None:
        self._known, self._raw = predictor.catalogues, predictor.recommender.chooser.raw

    @cached_property
    def columns(self) -> tuple[ColumnFacts, ...]:
        """The facts of each column but the id and the title; of no column that can't be shown."""
        own = self._known.spec.item_id
        stored = self._raw.distinct
        title = next((name for name in TITLE_COLUMNS if name in stored), None)
        names = [name for name in stored if name not in (own, title)][:MOST_COLUMNS]
        small = [name for name in names if self._raw.num_bytes(name) <= LARGEST_COLUMN]
        found = [facts_of_values(name, self._raw.column(name)) for name in small]
        return tuple(facts for facts in found if facts.kind != "other")

    def of(self, items: Sequence[RawId]) -> list[dict[str, Any]]:
        """Id, title and fields of items by raw id; of unknown ones only the id, and `is_known` is False."""
        ids = self._known.item_ids(items)
        known = ids >= self._known.items.first_id
        places = pa.array(ids[known] - self._known.items.first_id)
        titles = iter(self._known.items.titles_of(ids[known]).to_pylist())
        raw = iter(self._known.raw_ids("item", np.asarray(ids[known])).to_pylist())
        values = {facts.name: iter(shown_values(facts, self._raw.column(facts.name).take(places).to_pylist()))
                  for facts in self.columns}  # fmt: skip
        return [
            {"item": next(raw), "is_known": True, "title": next(titles),
             "fields": {name: next(each) for name, each in values.items()}}
            if is_known
            else {"item": item, "is_known": False, "title": None, "fields": {}}
            for item, is_known in zip(items, known.tolist(), strict=True)
        ]  # fmt: skip
