"""Amazon's reviews of 2014, 2018 and 2023, any category, as rows with what their user did before.

Every review is something a user did. The published preparation (SIM's, of Books 2014) is a choice of settings, named in
docs/datasets.md; the defaults differ from it where it lets negatives leak or has no valid split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from ibis.expr.types import Table
from pydantic import Field, model_validator

from recspec import splits
from recspec.datasets import interactions, prepared, reviews, sim_records
from recspec.datasets.columns import Catalogue, Column
from recspec.datasets.histories import HistorySettings, Prefixes, TimeSplitSettings
from recspec.datasets.interactions import ITEM, TIMESTAMP, USER, Source
from recspec.datasets.negatives import Distribution
from recspec.datasets.notes import Notes
from recspec.datasets.prepared import Prepared, Progress, silent
from recspec.datasets.reviews import RATING, Files
from recspec.errors import DataError, SettingsError, listed
from recspec.feature_spec import FeatureSpec
from recspec.splits import SPLIT
from recspec.tables import ROW, Backend, at_least, connect, count_rows, counts_by, fetch, keep_earliest, limit_bytes

NAME = "amazon"
ORDER = (TIMESTAMP, ITEM, ROW)
"""Of a user's reviews: by time, those of one time by item as published, and repeats as in the file."""

ROWS_BYTES = 700_000_000
"""Of rows with histories of 100 events while they are written: blocks of users, and what waits for its row group
(measured: 700 MB beside the engine)."""
LEAST_BYTES = 800_000_000
"""Below this the engine can't read JSON, of which it takes 32 MB a thread at once."""


class Settings(HistorySettings, TimeSplitSettings):
    """How reviews are prepared; the lengths, filters and negatives are the published ones."""

    category: str | None = Field(None, description="whose reviews, where RAW holds several categories: Books, ...")
    min_rating: float | None = Field(None, description="reviews of fewer stars are left out; all count when null")
    repeats: Literal["keep", "drop"] = Field("keep", description="a user's further reviews of one item")
    min_item_reviews: int = Field(1, ge=1, description="items with fewer reviews are left out, before users are")
    min_reviews: int = Field(20, ge=1, description="users with fewer reviews are left out")
    categories: Literal["last", "path"] = Field(
        "last", description="the most special category of an item; path: all from the most general on as a list, too"
    )
    brand: bool = Field(False, description="the item's brand as a category, too")
    valid: bool = Field(
        True, description="leave_one_out: last review but one for valid; false: for train, as published"
    )
    history: int | None = Field(100, ge=2, description="most events of a history, the latest; no histories when null")
    min_history: int = Field(1, ge=0, description="train rows with fewer events before them are left out")
    prefixes: Prefixes = Field("all", description="train rows of each user: all, last, or so many of the latest")
    negative_history: bool = Field(True, description="beside each event of a history an item that stands for it")
    train_negatives: int = Field(1, ge=0, description="rows of label 0 behind each train row, with drawn items")
    num_negatives: int = Field(1, ge=0, description="candidates beside the positive in each series of valid and test")
    negatives: Distribution = Field(
        "popularity", description="how items are drawn: popularity is the item of a random review, as published"
    )
    seed: int = Field(1, ge=0, description="of everything drawn")
    format: Literal["parquet", "tfrecord"] = Field(
        "parquet", description="how rows are written; tfrecord: in the published layout, names and padding"
    )
    prebatch: int = Field(0, ge=0, description="tfrecord: rows in a record, feature by feature; one when 0")
    train_files: int = Field(8, ge=1, description="tfrecord: files of train")
    test_files: int = Field(4, ge=1, description="tfrecord: files of valid and of test")

    @model_validator(mode="after")
    def _make_sense(self) -> Settings:
        problems = []
        if self.split == "time" and not self.valid:
            problems.append("valid=false is for split leave_one_out; with split=time set valid_share=0")
        if self.format == "tfrecord":
            wrong = {
                "history": self.history is None,
                "negative_history": not self.negative_history,
                "categories": self.categories == "path",
                "split": self.split == "time",
            }
            problems += [
                f"format=tfrecord can't hold {name}={getattr(self, name)}" for name, held in wrong.items() if held
            ]
        else:
            given = [name for name in ("prebatch", "train_files", "test_files") if name in self.model_fields_set]
            problems += [f"{listed(given)} say how records are written; set format=tfrecord too"] if given else []
        if problems:
            raise ValueError("; ".join(problems))
        return self


def prepare(
    raw: Path,
    out: Path,
    settings: Settings,
    *,
    engine: str = "duckdb",
    memory_limit: str | None = None,
    threads: int | None = None,
    progress: Progress = silent,
    force: bool = False,
) -> Prepared:
    """Prepare a category's reviews from their folder or file, or records of the published layout from theirs.

    Raises:
        DataError: if files are missing or malformed, no user is left, or `out` holds something else.
    """
    records = sim_records.found_in(raw)
    if records is not None:
        return _prepare_records(records, out, settings, progress, force=force)
    files = reviews.find(raw, settings.category)
    inputs = [files.reviews, *([files.meta] if files.meta else [])]
    job = prepared.Job(NAME, settings, inputs, out)

    def build(folder: Path) -> FeatureSpec:
        limit = _limit_of_engine(memory_limit)
        with connect(engine, folder=folder / "work", memory_limit=limit, threads=threads) as backend:
            spec = _build(backend, folder, files, settings, progress)
        if settings.format == "parquet":
            return spec
        told = sim_records.Records(settings.prebatch, settings.train_files, settings.test_files)
        return sim_records.write(spec, told, progress)

    return prepared.run(job, build, force=force)


def _limit_of_engine(memory_limit: str | None) -> str | None:
    """The memory limit less what the rows with their histories take."""
    if memory_limit is None:
        return None
    size = limit_bytes(memory_limit)
    return f"{max(size - ROWS_BYTES, min(size, LEAST_BYTES)) // 1_000_000}MB"


def _prepare_records(path: Path, out: Path, settings: Settings, progress: Progress, *, force: bool) -> Prepared:
    """Records are rows already: every setting but the format would change nothing."""
    given = sorted(settings.model_fields_set - {"format"})
    if given:
        raise SettingsError(f"{path}: records are taken as they are; {listed(given)} can't be set for them")
    spec = FeatureSpec.load(path)
    files = [spec.folder / file for chunks in spec.sources.values() for chunk in chunks for file in chunk.files]
    job = prepared.Job(NAME, settings, [path, *dict.fromkeys(files)], out)
    return prepared.run(job, lambda folder: sim_records.read(path, folder, settings.format, progress), force=force)


def _build(backend: Backend, folder: Path, files: Files, settings: Settings, progress: Progress) -> FeatureSpec:
    progress("reading reviews", 0, None)
    layout = reviews.layout_of(files.reviews)
    raw = reviews.read(backend, files.reviews, layout, rated=settings.min_rating is not None)
    progress("filtering reviews", 0, None)
    notes = Notes()
    rows, dropped = _filtered(backend, raw, files.reviews, settings, notes)
    wanted = fetch(backend, counts_by(rows, ITEM)).column(ITEM).to_pylist()
    items = reviews.describe(files.meta, wanted, lambda lines: progress("reading what is said of items", lines, None))
    source = Source(
        dataset=NAME,
        rows=_split(rows, settings),
        order=ORDER,
        items=_catalogue(items.table, settings),
        raw_names={USER: layout.user, ITEM: layout.item},
        vocabularies="train" if settings.split == "time" else "all",
        unknown_targets=settings.unknown_targets,
        summary=lambda _: {
            "category": files.category,
            "layout": layout.releases,
            **dropped,
            **_said(items, files, notes),
            "split": settings.split,
        },
        notes=notes,
    )
    return interactions.write(
        backend,
        folder,
        source,
        num_negatives=settings.num_negatives,
        seed=settings.seed,
        progress=progress,
        histories=settings.histories,
        train_negatives=settings.train_negatives,
        negatives=settings.negatives,
        reject_seen=settings.reject_seen,
    )


FILTERS = {
    "reviews_of_few_stars": ("of fewer than {0.min_rating:g} stars", "min_rating"),
    "repeats": ("that repeat an earlier one of the same user and item", "repeats"),
    "of_items_with_too_few": ("of items with fewer than {0.min_item_reviews:,}", "min_item_reviews"),
    "of_users_with_too_few": ("of users with fewer than {0.min_reviews:,}", "min_reviews"),
}
"""The reviews that each filter leaves out, and its setting."""


def _filtered(
    backend: Backend, raw: Table, path: Path, settings: Settings, notes: Notes
) -> tuple[Table, dict[str, int]]:
    """The reviews that count as a staged table, and how many each filter left out."""
    filters: list[tuple[str, Callable[[Table], Table]]] = []
    if settings.min_rating is not None:
        filters.append(("reviews_of_few_stars", lambda rows: rows.filter(rows[RATING] >= settings.min_rating)))
    if settings.repeats == "drop":
        filters.append(("repeats", lambda rows: keep_earliest(rows, [USER, ITEM], [TIMESTAMP, ROW])))
    if settings.min_item_reviews > 1:
        filters.append(("of_items_with_too_few", lambda rows: at_least(rows, ITEM, settings.min_item_reviews)))
    if settings.min_reviews > 1:
        filters.append(("of_users_with_too_few", lambda rows: at_least(rows, USER, settings.min_reviews)))
    rows, left = raw, count_rows(backend, raw)
    if not left:
        raise DataError(f"{path}: holds no review; expected one at least")
    told = {"reviews": left}
    for name, kept in filters:
        before, rows = rows, backend.stage(kept(rows))
        told[f"{name}_dropped"], left = left - (count := count_rows(backend, rows)), count
        what, setting = FILTERS[name][0].format(settings), FILTERS[name][1]
        if not left:
            raise DataError(
                f"{path}: no review is left: of {told['reviews']:,} all that other filters keep are {what}; set "
                f"{setting} lower"
            )
        if told[f"{name}_dropped"]:
            example = interactions.first_left_out(backend, before, rows)
            notes.dropped.append(
                f"{told[f'{name}_dropped']:,} reviews {what}, such as that of user '{example[USER]}' of item "
                f"'{example[ITEM]}' ({setting})"
            )
    return rows.select(ROW, USER, ITEM, TIMESTAMP), told


def _split(rows: Table, settings: Settings) -> Table:
    if settings.split == "time":
        return splits.by_time(rows, time=TIMESTAMP, valid=settings.valid_share, test=settings.test_share)
    split = splits.leave_one_out(rows, by=USER, order=ORDER)
    return split if settings.valid else split.mutate(**{SPLIT: split[SPLIT].replace("valid", "train")})


def _catalogue(items: pa.Table, settings: Settings) -> Catalogue:
    columns: Sequence[Column] = [
        Column("category", "category"),
        *([Column("category_path", "list", raw="categories")] if settings.categories == "path" else []),
        *([Column("brand", "category")] if settings.brand else []),
    ]
    readable = {"title": "title", "category_text": "category", "categories_text": "categories", "brand_text": "brand"}
    return Catalogue(items, ITEM, columns, readable)


def _said(items: reviews.Items, files: Files, notes: Notes) -> dict[str, object]:
    """What the summary says of what is said of the items."""
    without = int(pc.sum(nameless := pc.equal(items.table.column("category"), reviews.NO_CATEGORY)).as_py() or 0)
    if without:
        notes.changed.append(
            f"{without:,} of {len(items.table):,} items have no category in "
            f"{files.meta.name if files.meta else 'any file: there is no meta file'}, such as item "
            f"'{items.table.filter(nameless).column(ITEM)[0].as_py()}'; theirs is '{reviews.NO_CATEGORY}'"
        )
    if items.repeated:
        notes.dropped.append(f"{items.repeated:,} further lines about items that have one already; the first counts")
    if files.meta is None:
        return {
            "metadata": f"none: no meta_{files.category}.json.gz beside the reviews",
            "items_without_category": without,
        }
    return {
        "metadata": files.meta.name,
        "items_described": items.described,
        "items_without_category": without,
        "repeated_lines_about_items": items.repeated,
    }
