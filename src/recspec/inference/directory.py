"""The users or items that a model knows, searched by raw id and title.

All ids and titles stand in one text, the busiest first, so that a search reads it once from the beginning and stops at
the last result that it needs. Case and accents don't count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recspec.inference.catalogue import Role
from recspec.inference.predictor import Predictor

LONGEST_TITLE = 200
"""Characters of a title that are searched."""
MOST_WORDS = 8
"""Words of a query that are looked for apart."""
MOST_LOOKED_AT = 20_000
"""Entries with the longest word of a query that are searched for its other words."""

ENTRY, TITLE = "\n", "\x1f"
"""What stands before each id, and between it and the title."""


class Directory:
    """Completes a typed text to the raw ids and titles of users or items."""

    def __init__(self, predictor: Predictor, role: Role) -> None:
        catalogue, seen = predictor.catalogues.of(role), predictor.recommender.seen
        ids = np.arange(catalogue.first_id, catalogue.first_id + len(catalogue))
        counts = seen.num_known if role == "user" else seen.counts
        activity = np.asarray(counts.numpy()[ids], np.int64)
        """How many items each user acted on, or how many users acted on each item."""
        order = np.argsort(-activity, kind="stable")
        self.role, self._activity = role, activity[order]
        self._raw = predictor.catalogues.raw_ids(role, ids[order])
        self._titles = catalogue.titles_of(ids[order])
        self._text, self._starts = _joined(self._raw.cast(pa.large_string()), self._titles.cast(pa.large_string()))

    def find(self, query: str, limit: int) -> list[dict[str, Any]]:
        """Users or items with the text in their id or title.

        First the id itself, then ids and titles that begin with the text, then titles with a word that begins with it,
        then those that contain it, then those that contain all of its words; within these, the busiest first.
        """
        text = _folded(pa.array([query.strip()], pa.large_string()))[0].as_py().strip()
        chosen = self._matches(text, query.strip(), limit) if text else list(range(min(limit, len(self))))
        places = pa.array(chosen, pa.int64())
        raw, titles = (each.take(places).to_pylist() for each in (self._raw, self._titles))
        found = zip(raw, titles, self._activity[chosen].tolist(), strict=True)
        return [{self.role: one, "title": title, "count": count} for one, title, count in found]

    def __len__(self) -> int:
        return len(self._activity)

    def _matches(self, text: str, written: str, limit: int) -> list[int]:
        """Places of the best entries for a folded text."""
        same = list(self._places([ENTRY + text + TITLE], limit))
        same.sort(key=lambda place: str(self._raw[place].as_py()) != written)  # letter for letter first
        found = dict.fromkeys(same)
        steps: list[Callable[[], Iterator[int]]] = [
            lambda: self._places([ENTRY + text, TITLE + text], limit),
            lambda: self._places([" " + text], limit),
            lambda: self._places([text], limit),
            lambda: self._of_words(text),
        ]
        for step in steps:
            for place in step() if len(found) < limit else ():
                found[place] = None
                if len(found) >= limit:
                    break
        return list(found)[:limit]

    def _places(self, texts: list[str], limit: int) -> Iterator[int]:
        """Entries that hold one of some texts, in order; `limit` for each text, as all may be known already."""
        most = 2 * limit
        found = {place for text in texts for _, place in zip(range(most), self._holding(text), strict=False)}
        yield from sorted(found)

    def _holding(self, text: str) -> Iterator[int]:
        """Entries that hold a text, in order."""
        wanted, start, mark = text.encode(), 0, ENTRY.encode()
        while (start := self._text.find(wanted, start)) >= 0:
            place = int(np.searchsorted(self._starts, start, side="right")) - 1
            yield place
            start = self._text.find(mark, start + 1)
            if start < 0:
                return

    def _of_words(self, text: str) -> Iterator[int]:
        """Entries that hold every word of a text, in any order."""
        words = sorted({*text.split()}, key=lambda word: (-len(word), word))[:MOST_WORDS]
        if words == [text]:  # looked for already
            return
        others = [word.encode() for word in words[1:]]
        for _, place in zip(range(MOST_LOOKED_AT), self._holding(words[0]), strict=False):
            entry = self._text[self._starts[place] : self._starts[place + 1]]
            if all(word in entry for word in others):
                yield place


def _joined(ids: pa.Array, titles: pa.Array) -> tuple[bytes, NDArray[np.int64]]:
    """All ids and titles as one folded text, and where each entry begins in it; then its end."""
    cut = pc.utf8_slice_codeunits(pc.fill_null(titles, ""), 0, LONGEST_TITLE)
    nothing, entry, title = (pa.scalar(text, pa.large_string()) for text in ("", ENTRY, TITLE))
    entries = pc.binary_join_element_wise(nothing, _folded(ids), entry)
    entries = pc.binary_join_element_wise(entries, _folded(cut), title)
    entries = entries.combine_chunks() if isinstance(entries, pa.ChunkedArray) else entries
    _, offsets, text = pa.concat_arrays([entries.cast(pa.large_binary())]).buffers()
    starts = np.frombuffer(offsets, np.int64, len(entries) + 1).copy() if len(entries) else np.zeros(1, np.int64)
    return (text.to_pybytes() if text is not None else b"") + ENTRY.encode(), starts


def _folded(texts: pa.Array) -> pa.Array:
    """Texts in lower case, without accents or signs that would end an entry."""
    if not pc.all(pc.string_is_ascii(texts)).as_py():
        texts = pc.utf8_normalize(texts, "NFKD")
        texts = pc.replace_substring_regex(texts, r"\p{Mn}+", "")
    lower = pc.utf8_lower(texts)
    return pc.replace_substring_regex(lower, r"[\x00-\x1f]", " ")
