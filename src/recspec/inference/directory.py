"""The users or items that a model knows, searched by raw id and title."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recspec.inference.catalogue import Role
from recspec.inference.predictor import Predictor


class Directory:
    """Completes a typed text to the raw ids and titles of users or items."""

    def __init__(self, predictor: Predictor, role: Role) -> None:
        catalogue = predictor.catalogues.of(role)
        self.role = role
        self._predictor = predictor
        self._numbers = np.arange(catalogue.first_id, catalogue.first_id + len(catalogue))
        self._titles = catalogue.titles_of(self._numbers)

    def find(self, query: str, limit: int) -> list[dict[str, Any]]:
        """Ids and titles that contain the text in any case: the id itself, then beginnings, then the busiest."""
        text = query.strip()
        places = np.arange(len(self._numbers)) if not text else np.flatnonzero(self._closeness(text))
        closeness = self._closeness(text)[places] if text else np.zeros(len(places))
        order = np.lexsort((places, -self._activity[places], -closeness))[:limit]
        chosen = places[order]
        raw = self._raw.take(pa.array(chosen)).to_pylist()
        titles = self._titles.take(pa.array(chosen)).to_pylist()
        counts = self._activity[chosen].tolist()
        return [
            {self.role: one, "title": title, "count": count}
            for one, title, count in zip(raw, titles, counts, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._numbers)

    def _closeness(self, text: str) -> NDArray[np.int64]:
        """3 for the id itself, 2 for the beginning of an id or title, 1 for a part of one, 0 for nothing."""
        found = np.zeros(len(self._numbers), np.int64)
        for texts in (self._texts, self._titles):
            for value, matches in (
                (1, pc.match_substring(texts, text, ignore_case=True)),
                (2, pc.starts_with(texts, text, ignore_case=True)),
            ):
                found[pc.fill_null(matches, False).to_numpy(zero_copy_only=False)] = value
        found[pc.fill_null(pc.equal(self._texts, text), False).to_numpy(zero_copy_only=False)] = 3
        return found

    @cached_property
    def _raw(self) -> pa.Array:
        return self._predictor.raw_ids(self.role, self._numbers)

    @cached_property
    def _texts(self) -> pa.Array:
        return self._raw.cast(pa.string())

    @cached_property
    def _activity(self) -> NDArray[np.int64]:
        """How many items each user acted on, or how many users acted on each item."""
        seen = self._predictor.seen
        counts = seen.offsets.diff() if self.role == "user" else seen.counts
        return np.asarray(counts.numpy()[self._numbers], np.int64)
