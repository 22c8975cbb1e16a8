"""What a preparation inferred, dropped and changed, for the report at its end."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Notes:
    """Sentences with counts and an example, in the order in which they were found.

    A value that is not kept as it was written, and a row that is left out, always leaves a note.
    """

    inferred: list[str] = field(default_factory=list)
    """Choices made from the data: the type of a column, the time column, its format."""
    dropped: list[str] = field(default_factory=list)
    """Rows, users, items and values that are not in the prepared dataset."""
    changed: list[str] = field(default_factory=list)
    """Values kept in another form than they were written in."""

    def summary(self) -> dict[str, object]:
        """The sentences that there are, as they stand in `prepare.json`."""
        found = {"inferred": self.inferred, "dropped": self.dropped, "changed": self.changed}
        return {name: list(sentences) for name, sentences in found.items() if sentences}
