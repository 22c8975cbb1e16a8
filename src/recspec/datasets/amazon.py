"""Amazon's reviews of 2014, 2018 and 2023, any category, as rows with their user's history.

Every review is an interaction. docs/datasets.md gives the settings of the published preparation (SIM's, of Books 2014).
The defaults differ from it: they leak no negatives and give a valid split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from ibis.expr.types import Table
from pydantic import Field, model_validator

from recspec.base.errors import DataError, SettingsError, listed
from recspec.data.prepare import (
    ITEM,
    ROW,
    SPLIT,
    TIMESTAMP,
    USER,
    Backend,
    Catalogue,
    Column,
    Distribution,
    HistorySettings,
    Notes,
    Prefixes,
    PrepareContext,
    Prepared,
    Progress,
    Source,
    TimeSplitSettings,
    at_least,
    count_rows,
    counts_by,
    fetch,
    first_left_out,
    interactions,
    keep_earliest,
    limit_bytes,
    prepared,
    splits,
    with_splits,
)
from recspec.datasets import reviews, sim_records
from recspec.datasets.reviews import RATING, Files
from recspec.feature_spec import FeatureSpec

NAME = "amazon"
ORDER = (TIMESTAMP, ITEM, ROW)  # the order of a user's reviews: by time, then by item as published, then as in the file

ROWS_BYTES = 700_000_000  # memory for writing rows with histories of 100 events (measured: 700 MB beside the engine)
LEAST_BYTES = 800_000_000  # least memory with which the engine can read JSON, in buffers of 32 MB per thread


class Settings(HistorySettings, TimeSplitSettings):
    """Settings of Amazon's reviews; lengths, filters and negatives are the published ones."""

    category: str | None = Field(None, description="category of the reviews, if RAW holds several: Books, ...")
    min_rating: float | None = Field(None, description="minimum number of stars; null: all reviews")
    repeats: Literal["keep", "drop"] = Field(
        "keep", description="whether to keep or drop a user's further reviews of the same item"
    )
    min_item_reviews: int = Field(1, ge=1, description="items with fewer reviews are left out, before users are")
    min_reviews: int = Field(20, ge=1, description="users with fewer reviews are left out")
    categories: Literal["last", "path"] = Field(
        "last", description="last: the most specific category of an item; path: also all its categories, as a list"
    )
    brand: bool = Field(False, description="add the item's brand as a category")
    valid: bool = Field(
        True, description="leave_one_out: the second-to-last review goes to valid; false: to train, as published"
    )
    history: int | None = Field(
        100, ge=2, description="maximum number of latest events stored with each row; null: no histories"
    )
    min_history: int = Field(1, ge=0, description="minimum number of earlier events of a train row")
    prefixes: Prefixes = Field(
        "all", description="train rows to keep of each user: all, last, or a number of latest rows"
    )
    negative_history: bool = Field(True, description="store a drawn negative for each event of a history")
    train_negatives: int = Field(
        1, ge=0, description="number of rows with label 0 and drawn items after each train row"
    )
    num_negatives: int = Field(1, ge=0, description="candidates beside the positive in each series of valid and test")
    negatives: Distribution = Field(
        "popularity", description="distribution of drawn items; popularity: the item of a random review, as published"
    )
    seed: int = Field(1, ge=0, description="seed of all draws")
    format: Literal["parquet", "tfrecord"] = Field(
        "parquet", description="format of the rows; tfrecord: with the published layout, names and padding"
    )
    prebatch: int = Field(0, ge=0, description="tfrecord: rows per record, stored feature by feature; 0: one row")
    train_files: int = Field(8, ge=1, description="tfrecord: files of train")
    test_files: int = Field(4, ge=1, description="tfrecord: files of valid and of test")

    @model_validator(mode="after")
    def _make_sense(self) -> Settings:
        problems = []
        if self.split == "time" and not self.valid:
            problems.append("valid=false is for split leave_one_out; with split=time set valid_share=0")
        if self.format == "tfrecord":
            wrong = {"history": None, "negative_history": False, "categories": "path", "split": "time"}
            problems += [
                f"format=tfrecord can't hold {name}={value}"
                for name, value in wrong.items()
                if getattr(self, name) == value
            ]
        elif given := [name for name in ("prebatch", "train_files", "test_files") if name in self.model_fields_set]:
            problems.append(f"{listed(given)} say how records are written; set format=tfrecord too")
        if problems:
            raise ValueError("; ".join(problems))
        return self


def prepare(context: PrepareContext, settings: Settings) -> Prepared:
    """Prepare a category's reviews from their folder or file, or records of the published layout from theirs."""
    if (records := sim_records.found_in(context.raw)) is not None:
        return _prepare_records(context, records, settings)
    files = reviews.find(context.raw, settings.category)

    def build(folder: Path) -> FeatureSpec:
        limited = replace(context, memory_limit=_limit_of_engine(context.memory_limit))
        with limited.connect(folder / "work") as backend:
            spec = _build(backend, folder, files, settings, context.progress)
        if settings.format == "parquet":
            return spec
        num_files = {"train": settings.train_files, "valid": settings.test_files, "test": settings.test_files}
        return sim_records.write(spec, settings.prebatch, num_files, context.progress)

    return prepared.run(context, NAME, settings, [files.reviews, *filter(None, [files.meta])], build)


def _limit_of_engine(memory_limit: str | None) -> str | None:
    """The memory limit minus the memory of rows with histories."""
    if memory_limit is None:
        return None
    size = limit_bytes(memory_limit)
    return f"{max(size - ROWS_BYTES, min(size, LEAST_BYTES)) // 1_000_000}MB"


def _prepare_records(context: PrepareContext, path: Path, settings: Settings) -> Prepared:
    """Prepare records, which are rows already, so no setting except the format applies."""
    given = sorted(settings.model_fields_set - {"format"})
    if given:
        raise SettingsError(f"{path}: records are taken as they are; {listed(given)} can't be set for them")
    spec = FeatureSpec.load(path)
    files = [spec.folder / file for chunks in spec.sources.values() for chunk in chunks for file in chunk.files]

    def build(folder: Path) -> FeatureSpec:
        return sim_records.read(path, folder, settings.format, context.progress)

    return prepared.run(context, NAME, settings, [path, *dict.fromkeys(files)], build)


def _build(backend: Backend, folder: Path, files: Files, settings: Settings, progress: Progress) -> FeatureSpec:
    progress("reading reviews", 0, None)
    layout = reviews.layout_of(files.reviews)
    raw = reviews.read(backend, files.reviews, layout, rated=settings.min_rating is not None)
    progress("filtering reviews", 0, None)
    notes = Notes()
    rows, dropped = _filtered(backend, raw, files.reviews, settings, notes)
    wanted = fetch(backend, counts_by(rows, ITEM)).column(ITEM).to_pylist()
    items = reviews.describe(files.meta, wanted, progress)
    split = _split(rows, settings)
    source = Source(
        dataset=NAME,
        rows=split,
        order=ORDER,
        items=_catalogue(items.table, settings),
        raw_names={USER: layout.user, ITEM: layout.item},
        vocabularies="train" if settings.split == "time" else "all",
        unknown_targets=settings.unknown_targets,
        summary=lambda _: {
            "category": files.category,
            "layout": layout.releases,
            **dropped,
            **_metadata_summary(items, files, notes),
            "split": settings.split,
        },
        notes=notes,
        seen=with_splits(raw, split, "all" if settings.split == "time" else "user") if settings.min_rating else None,
    )
    return interactions.write(
        backend, folder, source, settings, num_negatives=settings.num_negatives, seed=settings.seed, progress=progress
    )


def _filtered(
    backend: Backend, raw: Table, path: Path, settings: Settings, notes: Notes
) -> tuple[Table, dict[str, int]]:
    """Stage the filtered reviews, and count those that each filter leaves out."""
    stars, least, users = settings.min_rating, settings.min_item_reviews, settings.min_reviews
    filters: list[tuple[bool, str, str, str, Callable[[Table], Table]]] = [
        (
            stars is not None,
            "reviews_of_few_stars",
            "min_rating",
            f"of fewer than {stars or 0:g} stars",
            lambda rows: rows.filter(rows[RATING] >= stars),
        ),
        (
            settings.repeats == "drop",
            "repeats",
            "repeats",
            "that repeat an earlier one of the same user and item",
            lambda rows: keep_earliest(rows, [USER, ITEM], [TIMESTAMP, ROW]),
        ),
        (
            least > 1,
            "of_items_with_too_few",
            "min_item_reviews",
            f"of items with fewer than {least:,}",
            lambda rows: at_least(rows, ITEM, least),
        ),
        (
            users > 1,
            "of_users_with_too_few",
            "min_reviews",
            f"of users with fewer than {users:,}",
            lambda rows: at_least(rows, USER, users),
        ),
    ]
    rows, left = raw, count_rows(backend, raw)
    if not left:
        raise DataError(f"{path}: holds no review; expected one at least")
    counts = {"reviews": left}
    for name, setting, what, kept in (each[1:] for each in filters if each[0]):
        before, rows, left_before = rows, backend.stage(kept(rows)), left
        left = count_rows(backend, rows)
        counts[f"{name}_dropped"] = left_before - left
        if not left:
            raise DataError(
                f"{path}: no review is left: of {counts['reviews']:,} all that other filters keep are {what}; set "
                f"{setting} lower"
            )
        if left < left_before:
            example = first_left_out(backend, before, rows)
            notes.dropped.append(
                f"{left_before - left:,} reviews {what}, such as that of user '{example[USER]}' of item "
                f"'{example[ITEM]}' ({setting})"
            )
    return rows.select(ROW, USER, ITEM, TIMESTAMP), counts


def _split(rows: Table, settings: Settings) -> Table:
    if settings.split == "time":
        return splits.by_time(rows, time=TIMESTAMP, valid=settings.valid_share, test=settings.test_share)
    split = splits.leave_one_out(rows, by=USER, order=ORDER)
    return split if settings.valid else split.mutate(**{SPLIT: split[SPLIT].replace("valid", "train")})


def _catalogue(items: pa.Table, settings: Settings) -> Catalogue:
    columns = [Column("category", "category")]
    if settings.categories == "path":
        columns.append(Column("category_path", "list", raw="categories"))
    if settings.brand:
        columns.append(Column("brand", "category"))
    readable = {"title": "title", "category_text": "category", "categories_text": "categories", "brand_text": "brand"}
    return Catalogue(items, ITEM, columns, readable)


def _metadata_summary(items: reviews.Items, files: Files, notes: Notes) -> dict[str, object]:
    nameless = items.table.filter(pc.equal(items.table.column("category"), reviews.NO_CATEGORY))
    without = len(nameless)
    if without:
        notes.changed.append(
            f"{without:,} of {len(items.table):,} items have no category in "
            f"{files.meta.name if files.meta else 'any file: there is no meta file'}, such as item "
            f"'{nameless.column(ITEM)[0].as_py()}'; theirs is '{reviews.NO_CATEGORY}'"
        )
    if items.repeated:
        notes.dropped.append(f"{items.repeated:,} further lines about items that have one already; the first counts")
    if files.meta is None:
        none = f"none: no meta_{files.category}.json.gz beside the reviews"
        return {"metadata": none, "items_without_category": without}
    return {
        "metadata": files.meta.name,
        "items_described": items.described,
        "items_without_category": without,
        "repeated_lines_about_items": items.repeated,
    }
