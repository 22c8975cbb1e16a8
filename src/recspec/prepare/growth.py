"""`growth.json`: what a prepared dataset of interactions needs to take new events by its own rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from recspec.errors import DataError, problems_in
from recspec.files import PathError, confined, read_json, whole_file
from recspec.prepare.declared import DeclaredColumn, Invalid, declared_columns
from recspec.prepare.histories import HistorySettings
from recspec.prepare.names import AS_IN_FILE
from recspec.prepare.raw_files import check_encoding

GROWTH_FILE = "growth.json"
UNKNOWN_EVENTS_FILE = "unknown_events.parquet"
"""Raw held-out events whose user or item is not in train, which new events may bring there: a file, or a folder of
Spark's files."""
FORMAT = 1


class GrowthRules(BaseModel):
    """How events became rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    split: Literal["leave_one_out", "time", "given"]
    """`given`: every new event is for train."""
    valid_share: float = Field(0.0, ge=0, lt=1)
    test_share: float = Field(0.0, ge=0, lt=1)
    once: bool = False
    """Whether the earliest event of each pair of user and item counts, and no other."""
    timestamp: str | None = None
    """Raw column of the time; None if events have only an order."""
    time_format: str | None = None
    found_time_format: str | None = None
    """The format that the times had, where none was set."""
    types: Annotated[dict[str, DeclaredColumn], BeforeValidator(declared_columns)] = {}
    """The declared columns, with formats and zones of times."""
    invalid_values: Invalid = "refuse"
    rating: str | None = None
    """Raw column of the ratings, of which those below `min_rating` are no events."""
    min_rating: float | None = None
    separator: str | None = None
    encoding: Annotated[str, AfterValidator(check_encoding)] | None = None
    missing_values: tuple[str, ...] = ()
    readable: dict[str, dict[str, str]] = {}
    """Role -> column of the catalogue for people -> column of new events."""
    unknown_events: int | None = Field(None, ge=0)
    """How many events `UNKNOWN_EVENTS_FILE` holds; None if none were kept."""
    refused: str = ""
    """Why the dataset takes no new events; empty if it does."""
    num_negatives: int = Field(0, ge=0)
    seed: int = Field(1, ge=0)
    histories: HistorySettings = HistorySettings()
    gap_unit: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Of the time gaps, in units of the timestamp; None without gaps."""

    @field_validator("readable")
    @classmethod
    def _as_in_events(cls, readable: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        """The names as new events have them; earlier versions wrote them with a mark."""
        return {role: columns_of_events(columns) for role, columns in readable.items()}

    def save(self, folder: Path) -> None:
        """Write `growth.json` into a dataset's folder."""
        with whole_file(folder / GROWTH_FILE) as temporary:
            temporary.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> GrowthRules:
        """Read `growth.json`.

        Raises:
            DataError: if there is none, or a damaged one, or it says that the dataset takes no new events.
        """
        file = folder / GROWTH_FILE
        try:
            if not confined(folder, GROWTH_FILE).is_file():
                raise DataError(
                    f"{folder}: takes no new events: it has no {GROWTH_FILE}, which `recspec prepare` writes for "
                    "interactions (rows without a label) of table, movielens and ncf; prepare it again, or train anew"
                )
            rules = cls.model_validate(read_json(file, most=1 << 20))
        except PathError as error:
            raise DataError(f"{folder}: {error}") from None
        except ValidationError as error:
            raise DataError.of(f"{file}: damaged", problems_in(error)) from None
        if rules.format != FORMAT:
            raise DataError(f"{file}: format {rules.format}; this recspec reads {FORMAT}")
        if rules.refused:
            raise DataError(f"{folder}: takes no new events: {rules.refused}; prepare all events again and train anew")
        return rules


def columns_of_events(readable: Mapping[str, str]) -> dict[str, str]:
    """The columns for people of a catalogue -> the columns of new events that fill them."""
    return {name: column.removeprefix(AS_IN_FILE) for name, column in readable.items()}
