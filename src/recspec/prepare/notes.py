"""Notes of a preparation on inferred, dropped and changed values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass
class Notes:
    """Sentences with counts and an example; every changed value and every left-out row has one."""

    warnings: list[str] = field(default_factory=list)  # what looks wrong, and the setting that mends it
    inferred: list[str] = field(default_factory=list)  # choices made from the data, such as the type of a column
    dropped: list[str] = field(default_factory=list)  # rows, users, items and values that are left out
    changed: list[str] = field(default_factory=list)  # values kept in another form
    time_format: str | None = None  # in which the times of the rows are written, if it was found in them
    num_invalid: int = 0  # rows that were left out by invalid values

    def summary(self) -> dict[str, object]:
        """The non-empty lists, as in `prepare.json`."""
        return {name: told for name, told in asdict(self).items() if isinstance(told, list) and told}
