"""Settings of Criteo's click logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, field_validator, model_validator

from recspec.config import Settings as BaseSettings
from recspec.errors import listed, unknown


class Settings(BaseSettings):
    """Settings of Criteo's click logs."""

    num_numerical: int = Field(13, ge=0, description="columns of integers after the label: I1, I2, ...")
    num_categorical: int = Field(26, ge=0, description="columns of categories after those: C1, C2, ...")
    min_count: int = Field(15, ge=0, description="values in fewer rows share id 0 with missing ones; 0 keeps all")
    min_counts: dict[str, int] = Field({}, description="min_count of single columns, such as {C1: 20}")
    vocabulary_from: Literal["train", "all"] = Field(
        "train", description="rows that define the ids; `all` includes valid and test, as published"
    )
    scale: bool = Field(False, description="scale ln(x + 3) to mean 0 and standard deviation 1 over train")
    buckets: bool = Field(
        False, description="also each number as a category: x up to 2, then floor(ln(x)^2); rare buckets join the next"
    )
    split: Literal["days", "share"] | None = Field(
        None, description="by whole days, or by rows in their order; if null, days for a folder of days"
    )
    train_days: tuple[int, ...] | None = Field(
        None, description="days for train; if null, all days not in valid_days or test_days"
    )
    valid_days: tuple[int, ...] | None = Field(None, description="days for valid; the last if null")
    test_days: tuple[int, ...] | None = Field(
        None, description="days for test; the last if null. A day in both is halved: test, then valid"
    )
    valid: float = Field(0.1, ge=0, lt=1, description="share of rows for valid, after train")
    test: float = Field(0.1, ge=0, lt=1, description="share of rows for test, at the end")
    rows: tuple[int, int, int] | None = Field(
        None, description="numbers of rows for train, valid and test, one after another, in place of shares"
    )
    shuffle: bool = Field(True, description="shuffle the train rows once")
    seed: int = Field(1, ge=0, lt=2**63, description="seed of that order")
    format: Literal["parquet", "split_binary"] = Field("parquet", description="format of the rows")

    @field_validator("rows")
    @classmethod
    def _counts(cls, rows: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
        if rows is not None and (rows[0] < 1 or min(rows) < 0):
            raise ValueError(f"{list(rows)}: train needs a row, and no count may be below 0")
        return rows

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        problems = [
            unknown("column in min_counts", name, self.categories)
            for name in self.min_counts
            if name not in self.categories
        ]
        problems += [f"min_counts: {name}: {count} is below 0" for name, count in self.min_counts.items() if count < 0]
        if not self.num_numerical + self.num_categorical:
            problems.append("num_numerical and num_categorical are both 0; a row needs a feature")
        if self.valid + self.test >= 1:
            problems.append(f"valid and test take {self.valid + self.test:g} of the rows; leave some for train")
        given = self.model_fields_set & {"train_days", "valid_days", "test_days"}
        if self.rows is not None and self.model_fields_set & {"valid", "test"}:
            problems.append("rows stand in place of the shares valid and test; give one or the other")
        if given and (self.rows is not None or self.split == "share"):
            problems.append(f"{listed(sorted(given))} go with split days, not with shares or rows")
        if self.split == "days" and self.rows is not None:
            problems.append("rows are of a split by rows; leave out split: days")
        if (self.valid_days is None) != (self.test_days is None):
            problems.append("valid_days and test_days go together; give both, [] for none")
        overlap = set(self.train_days or ()) & {*(self.valid_days or ()), *(self.test_days or ())}
        if overlap:
            problems.append(f"days {numbers_of(overlap)} are for train and for valid or test; a day trains or judges")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def numbers(self) -> tuple[str, ...]:
        """Columns of integers."""
        return tuple(f"I{number}" for number in range(1, self.num_numerical + 1))

    @property
    def categories(self) -> tuple[str, ...]:
        """Columns of categories."""
        return tuple(f"C{number}" for number in range(1, self.num_categorical + 1))

    @property
    def given_days(self) -> set[int]:
        """All days named in a setting."""
        return {*(self.train_days or ()), *(self.valid_days or ()), *(self.test_days or ())}

    def is_shuffled(self, split: str) -> bool:
        """Whether the rows of a split are in random order."""
        return split == "train" and self.shuffle

    def least(self, category: str) -> int:
        """The least number of rows with a value for it to get an id."""
        return self.min_counts.get(category, self.min_count)


def numbers_of(numbers: set[int] | Mapping[int, object]) -> str:
    """Numbers, sorted, for a message."""
    return ", ".join(map(str, sorted(numbers)))
