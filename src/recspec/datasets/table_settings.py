"""Settings of your own table: which columns hold what, and how the rows are split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from recspec.prepare import (
    HistorySettings,
    RawLayout,
    RawType,
    Reading,
    Repeats,
    UnknownTargets,
    check_encoding,
    check_time_format,
)

Role = Literal["user", "item", "context"]
Split = Literal["leave_one_out", "time", "share", "group"]
Cardinality = Annotated[int, Field(ge=2, le=2**31)]
Buckets = Annotated[int, Field(ge=2)] | tuple[float, ...]


def _character(text: object) -> object:
    r"""A separator as written in a shell: `\t` and `tab` are a tab."""
    return "\t" if text in ("\\t", "tab") else text


Separator = Annotated[str, BeforeValidator(_character), Field(min_length=1, max_length=1)]
TimeFormat = Annotated[str, AfterValidator(check_time_format)]
Encoding = Annotated[str, AfterValidator(check_encoding)]


class Settings(HistorySettings):
    """Settings of your own table."""

    user: str | None = Field("user_id", description="column of the user's id; null if there is none")
    item: str | None = Field("item_id", description="column of the item's id; null if there is none")
    timestamp: str | None = Field("timestamp", description="column of the time; null: the order of the rows")
    label: str | None = Field(None, description="column to predict, 0 or 1; every row is a 1 if null")
    positive_from: float | None = Field(None, description="the label is 1 from this number on, else 0")
    split: Split | None = Field(None, description="if null, leave_one_out without a label and share with one")
    valid: float = Field(0.1, ge=0, lt=1, description="share of rows or groups for valid, unless leave_one_out")
    test: float = Field(0.1, ge=0, lt=1, description="share of rows or groups for test, unless leave_one_out")
    group: str | None = Field(None, description="column of the group, whose rows are ranked together; the user if null")
    user_features: tuple[str, ...] = Field((), description="further columns about the user")
    item_features: tuple[str, ...] = Field((), description="further columns about the item")
    context_features: tuple[str, ...] = Field((), description="further columns about the event")
    numeric: tuple[str, ...] = Field((), description="features to take as numbers")
    categorical: tuple[str, ...] = Field((), description="features to take as categories")
    lists: tuple[str, ...] = Field((), description="features with several values per row")
    list_separator: str = Field("|", min_length=1, description="separator of the values of a list that is text")
    hashed: dict[str, Cardinality] = Field({}, description="categories and lists to hash: {column: cardinality}")
    buckets: dict[str, Buckets] = Field(
        {}, description="numbers that also become a feature NAME_bucket: {column: [boundaries]} or {column: number}"
    )
    crosses: tuple[tuple[str, ...], ...] = Field((), description="with a label: features to hash together as a_x_b")
    cross_cardinality: Cardinality = Field(10_000, description="number of ids of each cross")
    cut_offs: tuple[Annotated[int, Field(ge=1)], ...] = Field((), description="default cut-offs k of `evaluate`")
    users: str | None = Field(None, description="file in the same folder with one row per user, joined by user id")
    items: str | None = Field(None, description="file in the same folder with one row per item, joined by item id")
    title: str | None = Field(None, description="column of the items' file to show to people; `title` if null")
    separator: Separator | None = Field(
        None, description="separator of a text file's columns; if null, a comma, in .tsv a tab, in sequences blanks"
    )
    encoding: Encoding | None = Field(None, description="encoding of text files, such as cp1252; utf-8 if null")
    layout: RawLayout = Field("rows", description="sequences: lines of a user, then items from the earliest; no header")
    files: tuple[str, ...] = Field((), description="files of the folder RAW to read, in this order; all if empty")
    rows: int | None = Field(None, ge=1, description="number of rows to read, from the first; all if null")
    types: dict[str, RawType] = Field({}, description="{column: string, int64 or float64}; ids are text by default")
    missing_values: tuple[Annotated[str, Field(coerce_numbers_to_str=True)], ...] = Field(
        (), description="texts that mean a missing value; in numbers n/a, NA, null, none, nan, - and ? always do"
    )
    time_format: TimeFormat | None = Field(
        None,
        description="format of times, such as %m/%d/%Y, or seconds, milliseconds, microseconds or nanoseconds since "
        "1970; null: numbers as they are, or ISO 8601 dates",
    )
    repeats: Repeats = Field(
        "first", description="without a label: first keeps only a user's earliest row for an item; keep keeps all"
    )
    min_count: int = Field(1, ge=1, description="with a label: values in fewer train rows become unknown")
    min_interactions: int = Field(1, ge=1, description="without a label: users with fewer items are left out")
    num_negatives: int = Field(100, ge=0, description="without a label: candidates beside the positive in each series")
    unknown_targets: UnknownTargets = Field(
        "drop",
        description="split=time without a label: drop or keep (with id 0) held-out rows whose item is not in train",
    )
    seed: int = Field(1, ge=0, description="seed of the negatives, and of splits by share and group")

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        split = self.chosen_split
        if split == "leave_one_out" and self.label is not None:
            raise ValueError("split leave_one_out takes every row as a 1, so goes without a label; pick another split")
        if split in ("share", "group") and self.label is None:
            raise ValueError(f"split {split} needs a label; name its column, or use leave_one_out or time")
        if self.label is None and (self.user is None or self.item is None):
            raise ValueError(f"split {split} needs the columns of user and item, where there is no label")
        of_interactions = (*HistorySettings.model_fields, "unknown_targets", "repeats")
        given = [name for name in of_interactions if getattr(self, name) != type(self).model_fields[name].default]
        if self.label is not None and given:
            raise ValueError(f"{' and '.join(given)}: of rows without a label; leave out the label or these settings")
        if split == "time" and self.timestamp is None:
            raise ValueError("split time needs the column of the timestamp")
        if split == "group" and self.group is None and self.user is None:
            raise ValueError("split group needs the column of the group, or of the user")
        for name, boundaries in self.buckets.items():
            if not isinstance(boundaries, int) and list(boundaries) != sorted(set(boundaries)):
                raise ValueError(f"the boundaries of '{name}' must rise, found {list(boundaries)}")
        if self.crosses and self.label is None:
            raise ValueError("crosses need a label; name its column, or leave crosses out")
        for cross in self.crosses:
            if len(set(cross)) < max(2, len(cross)) or self.crosses.count(cross) > 1:
                raise ValueError(f"a cross is of two different features or more and named once, found {list(cross)}")
        given = [name for name in ("label", "context_features", "group") if getattr(self, name)]
        given += ["split"] if split == "time" else []
        if self.layout == "sequences" and given:
            raise ValueError(f"layout sequences has users and items alone; leave out {' and '.join(given)}")
        if self.valid + self.test >= 1:
            raise ValueError(f"valid and test take {self.valid + self.test:g} of the rows; leave some for train")
        return self

    @property
    def reading(self) -> Reading:
        return Reading(**{name: getattr(self, name) for name in Reading.__dataclass_fields__})

    @property
    def chosen_split(self) -> Split:
        """The given split, or the default one."""
        return self.split or ("leave_one_out" if self.label is None else "share")

    @property
    def features(self) -> tuple[str, ...]:
        return (*self.user_features, *self.item_features, *self.context_features)

    @property
    def by_role(self) -> Mapping[Role, tuple[str, ...]]:
        return {"user": self.user_features, "item": self.item_features, "context": self.context_features}
