"""The users or items that a model knows, searched by raw id and title."""

from __future__ import annotations

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
        catalogue, seen = predictor.catalogues.of(role), predictor.recommender.seen
        ids = np.arange(catalogue.first_id, catalogue.first_id + len(catalogue))
        self.role, self._titles = role, catalogue.titles_of(ids)
        self._raw = predictor.catalogues.raw_ids(role, ids)
        self._texts = self._raw.cast(pa.string())
        counts = seen.offsets.diff() if role == "user" else seen.counts
        self._activity = np.asarray(counts.numpy()[ids], np.int64)
        """How many items each user acted on, or how many users acted on each item."""

    def find(self, query: str, limit: int) -> list[dict[str, Any]]:
        """Ids and titles that contain the text in any case: the id itself, then beginnings, then the busiest."""
        text = query.strip()
        closeness = self._closeness(text) if text else np.ones(len(self), np.int64)
        places = np.flatnonzero(closeness)
        chosen = places[np.lexsort((places, -self._activity[places], -closeness[places]))[:limit]]
        raw, titles = (each.take(pa.array(chosen)).to_pylist() for each in (self._raw, self._titles))
        found = zip(raw, titles, self._activity[chosen].tolist(), strict=True)
        return [{self.role: one, "title": title, "count": count} for one, title, count in found]

    def __len__(self) -> int:
        return len(self._activity)

    def _closeness(self, text: str) -> NDArray[np.int64]:
        """3 for the id itself, 2 for the beginning of an id or title, 1 for a part of one, 0 for nothing."""
        found = np.zeros(len(self), np.int64)
        for texts in (self._texts, self._titles):
            found[_true(pc.match_substring(texts, text, ignore_case=True))] = 1
            found[_true(pc.starts_with(texts, text, ignore_case=True))] = 2
        found[_true(pc.equal(self._texts, text))] = 3
        return found


def _true(matches: pa.Array) -> NDArray[np.bool_]:
    """Where matches are true, and not null."""
    return np.asarray(pc.fill_null(matches, False).to_numpy(zero_copy_only=False))
