"""Names of the columns and splits of a prepared dataset, and the notes of a preparation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

USER, ITEM, TIMESTAMP = "user_id", "item_id", "timestamp"
LABEL, GROUP, SERIES = "label", "group", "series"
EVENT_WEIGHT = "event_weight"
SPLIT = "split"  # column with the split of a row: one of `SPLITS`
SPLITS = ("train", "valid", "test")
HISTORY, NEGATIVE_HISTORY, GAP = "history", "negative_history", "history_gap"
ROW = "__row__"  # column with a row's place in its raw file; files with a column of this name are refused
FILE_SPLIT = "__split__"  # column with the split of a row's file, if files are splits; likewise refused
AS_IN_FILE = "\0"  # before the name of a column that a catalogue shows as its file holds it
SEEN = "__seen__"  # column that says whether an event counts as seen, if the settings name types; likewise refused
WEIGHT = "__weight__"  # column with the weight of a row's event, if the settings give weights; likewise refused
SPLIT_BEFORE = "__split_before__"  # column with the split that a row had in the dataset before; likewise refused
NEW = "-new"  # ends the name of the folder with those rows of a split that were not in it before
DESCRIBES = {"user": "__user__", "item": "__item__"}
"""Before the name of a column of the users' or items' file that rows of new events hold; likewise refused."""


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
