"""What a dataset of your own table keeps to take new events: its raw events, and the settings they were prepared by.

DATA/growth.json          settings in which nothing is left to guess
DATA/raw/events.parquet   every raw event that was read, with its types and the split that it got; Spark writes a folder
DATA/raw/users.parquet, DATA/raw/items.parquet    the files of users and items, if there were any
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from ibis.expr.types import Table
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recspec.base.errors import DataError, problems_in
from recspec.base.files import PathError, confined, read_json, whole_file
from recspec.data.prepare import (
    FILE_SPLIT,
    ROW,
    SEEN,
    SPLIT,
    SPLIT_BEFORE,
    WEIGHT,
    Backend,
    Before,
    count_rows,
    is_dated,
    left_join,
)
from recspec.datasets.table_features import Tables
from recspec.datasets.table_settings import Settings
from recspec.feature_spec import FeatureSpec

GROWTH_FILE = "growth.json"
RAW = "raw"
EVENTS = f"{RAW}/events.parquet"
FORMAT = 2
OUR_TYPES = {ROW: "int64", SPLIT_BEFORE: "string", FILE_SPLIT: "string", WEIGHT: "float64", SEEN: "boolean"}
"""The types of the columns of raw events that no file has."""


class GrowthRules(BaseModel):
    """How events became rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    dataset: str
    settings: Settings
    """As a table's, with every role, format and threshold that was found."""
    found_time_format: str | None = None
    """The format that the times had, where none was set."""
    dated: bool = False
    """Whether times are seconds since 1970."""
    copies: bool | None = None
    """Whether labelled rows of equal features are copies, which split share keeps together; None: another split."""
    events: int = Field(0, ge=0)
    """How many events `EVENTS` holds."""

    @classmethod
    def of(
        cls,
        tables: Tables,
        split: Table,
        least: float | None,
        dataset: str,
        before: Before | None,
        copies: bool | None = None,
    ) -> Self:
        """The rules by which some tables became `split`; `least` is the rating of an interaction."""
        settings = tables.settings
        found = {
            "min_rating": least,
            "rating": settings.rating if least is not None else None,
            "timestamp": tables.time,
            "rows": None,
            "files": (),
        }
        return cls(
            dataset=dataset,
            settings=settings.model_copy(update=found),
            found_time_format=tables.notes.time_format,
            dated=before.dated if before else tables.time is not None and is_dated(tables.backend, split),
            events=count_rows(tables.backend, tables.rows),
            copies=copies,
        )

    def save(self, folder: Path) -> None:
        """Write `growth.json` into a dataset's folder."""
        with whole_file(folder / GROWTH_FILE) as temporary:
            temporary.write_text(self.model_dump_json(indent=2, exclude_unset=True) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, base: FeatureSpec) -> GrowthRules:
        """Read the `growth.json` of a dataset. Raises DataError if there is none, or a damaged one."""
        folder = base.folder
        file = folder / GROWTH_FILE
        try:
            if not confined(folder, GROWTH_FILE).is_file():
                raise DataError(f"{folder}: takes no new events: {_why_none(base)}")
            found = read_json(file, most=1 << 20)
            if isinstance(found, dict) and found.get("format", FORMAT) != FORMAT:
                raise DataError(f"{file}: format {found['format']}; this recspec reads {FORMAT}")
            return cls.model_validate(found)
        except PathError as error:
            raise DataError(f"{folder}: {error}") from None
        except ValidationError as error:
            raise DataError.of(f"{file}: damaged", problems_in(error)) from None


def _why_none(base: FeatureSpec) -> str:
    """Why a dataset has no `growth.json`, and what to do."""
    summary, dataset = base.metadata.get("summary"), base.metadata.get("dataset")
    order = summary.get("order") if isinstance(summary, Mapping) else None
    if isinstance(order, str) and order.startswith("random"):
        return (
            "its file is sorted by item and has no times, so its rows are in a random order, in which later rows "
            "have no place; prepare a file with times"
        )
    if dataset == "ncf":
        return (
            "its test candidates are listed for the paper's events alone, and figures on other events do not "
            "compare with theirs; to update a model, prepare the events by `recspec prepare table`"
        )
    again = "prepare all rows again and train anew"
    return f"it has no {GROWTH_FILE}, which `recspec prepare` writes for table and movielens; {again}"


def keep_raw(folder: Path, tables: Tables, split: Table, rules: GrowthRules) -> None:
    """Write the raw events with the splits that they got, the files of users and items, and the rules."""
    backend, rows = tables.backend, tables.rows
    (folder / RAW).mkdir()
    events = rows.drop(SPLIT_BEFORE) if SPLIT_BEFORE in rows.columns else rows
    events = left_join(events, split.select(ROW, **{SPLIT_BEFORE: split[SPLIT]}), ROW)
    backend.stage(events.order_by(ROW), folder / EVENTS)
    for name, side in (("users", tables.users), ("items", tables.items)):
        if side is not None:
            backend.stage(side.order_by(ROW), folder / RAW / f"{name}.parquet")
    rules.save(folder)


def read_raw(backend: Backend, folder: Path, name: str) -> Table | None:
    """A table that `keep_raw` wrote; None if it wrote none. Raises DataError if it is damaged, or has other columns."""
    try:
        place = confined(folder, f"{RAW}/{name}.parquet")
        names = sorted(each.name for each in place.iterdir()) if place.is_dir() else []  # Spark's
        parts = [f"{RAW}/{place.name}/{name}" for name in names if not name.startswith(("_", "."))]
        files = [confined(folder, part) for part in parts] or [place]
        if not all(file.is_file() for file in files):
            return None
        table = backend.read_parquet(files, foreign=True)
        needed = {ROW, SPLIT_BEFORE} if name == "events" else {ROW}
        kinds = {column: str(kind.copy(nullable=True)) for column, kind in table.schema().items()}
        for column, kind in OUR_TYPES.items():
            if kinds.get(column, None if column in needed else kind) != kind:
                raise DataError(f"column '{column}' holds {kinds.get(column, 'nothing')}; expected {kind}")
        return table
    except (PathError, OSError, DataError, ValueError) as error:
        raise _unreadable(folder, name, error) from None


def _unreadable(folder: Path, name: str, error: Exception) -> DataError:
    return DataError(f"{folder}: {RAW}/{name}.parquet can't be read: {error}; prepare it again")


@contextmanager
def reading_raw(folder: Path) -> Iterator[None]:
    """Errors of files that `read_raw` gave as errors of the dataset; they are read once, later."""
    try:
        yield
    except DataError as error:
        for name in ("events", "users", "items"):
            if str(error).startswith(str(folder / RAW / f"{name}.parquet")):
                raise _unreadable(folder, name, error) from None
        raise
