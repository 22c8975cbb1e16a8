"""Notes of a preparation on inferred, dropped and changed values."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Notes:
    """Sentences with counts and an example, in the order of discovery.

    Every changed value and every left-out row has a note.
    """

    inferred: list[str] = field(default_factory=list)
    """Choices made from the data, such as the type of a column or the time column."""
    dropped: list[str] = field(default_factory=list)
    """Rows, users, items and values missing from the prepared dataset."""
    changed: list[str] = field(default_factory=list)
    """Values kept in another form."""

    def summary(self) -> dict[str, object]:
        """The non-empty lists, as in `prepare.json`."""
        found = {"inferred": self.inferred, "dropped": self.dropped, "changed": self.changed}
        return {name: list(sentences) for name, sentences in found.items() if sentences}
