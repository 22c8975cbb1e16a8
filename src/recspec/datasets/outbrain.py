"""Outbrain's click prediction tables from Kaggle, with the 29 features published for Wide & Deep.

A display is a page with a few ads, of which a reader clicked exactly one. A row is an ad in a display, and its group is
the display. docs/datasets.md lists the features, their formulas and all differences from the published recipe. The main
differences are:

- **Click rates exclude the row's own label.** The published recipe joins each train row with statistics that include
  the row itself. Leaving out only the row is worse: the others' clicks are all clicks minus the row's own label. Among
  the rows of one ad, the feature then takes two values, the lower one exactly where the label is 1. Here displays are
  hashed into folds, and a train row's rates come from the other folds, so they are independent of all labels of its
  fold. Counts do not depend on labels; they leave out the row.
- **A valid split is cut from train.** The published recipe selects on the reported split.
- Lists keep a document's most confident values, not the first ones in a hash table's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import ibis
import pyarrow.parquet as pq
from ibis.expr.types import Table
from pydantic import Field, model_validator

from recspec.config import Settings as BaseSettings
from recspec.datasets import page_views
from recspec.datasets.outbrain_statistics import (
    ASPECTS,
    CLICK_RATES,
    COUNTED,
    LIST_LENGTH,
    NO_FOLD,
    SEPARATOR,
    KeyStatistics,
    similarity_name,
    statistics_of_keys,
    tf_idf,
    with_lists,
    with_similarities,
    with_statistics,
)
from recspec.datasets.outbrain_tables import NULL, TABLES, check_tables, each_ad_once, read_tables, recognise, unpacked
from recspec.encoding import VOCABULARIES, BucketEncoder, HashEncoder, NumberEncoder, ScaleEncoder
from recspec.errors import DataError, unknown
from recspec.prepare import (
    GROUP,
    LABEL,
    ROW,
    SPLIT,
    Backend,
    Column,
    Notes,
    PrepareContext,
    Prepared,
    Progress,
    blocks,
    clicks,
    count_rows,
    counts_by,
    fetch,
    left_join,
    prepared,
    splits,
)
from recspec.spec import FeatureSpec

NAME = "outbrain"
EPOCH = 1_465_876_799_998
"""Start of the publisher's timestamps, in milliseconds since 1970: 2016-06-14 04:00 UTC, less 2 ms."""
DAY = 86_400_000
MOST_DAYS = 3650
"""Days since publication above this or below 0 count as 0."""
CARDINALITIES: Mapping[str, int] = {
    "ad_id": 250_000, "document_id": 300_000, "document_id_promo": 100_000, "campaign_id": 5_000,
    "advertiser_id": 2_500, "source_id": 4_000, "source_id_promo": 4_000, "publisher_id": 1_000,
    "publisher_id_promo": 1_000, "geo_location": 2_500, "geo_location_state": 2_000, "geo_location_country": 300,
    "category_id_list": 100, "topic_id_list": 350, "entity_id_list": 10_000,
}  # fmt: skip
"""Published number of ids of each hashed feature."""
UNLABELLED = "clicks_test"
"""The publisher's rows without a label, which are in no split."""


class Settings(BaseSettings):
    """Settings of Outbrain's tables."""

    train_days: int = Field(11, ge=1, description="displays of later days are all for test; the data has 13 days")
    test: float = Field(0.2, ge=0, lt=1, description="share of the earlier days' displays that are also for test")
    valid: float = Field(0.05, ge=0, lt=1, description="share of train's displays for valid; 0 as published")
    folds: int = Field(5, ge=0, le=100, description="parts of train; click rates leave out the row's own part; "
                       "0 as published, with the row's own label in them")  # fmt: skip
    cardinalities: dict[str, int] = Field({}, description="numbers of ids of hashed features, if not as published")
    page_views: bool = Field(False, description="add features of the reader from page_views.csv, and the leak")
    submission: bool = Field(False, description="also write the raw rows of clicks_test.csv, for `recspec predict`")
    seed: int = Field(0, ge=0, description="seed of the splits and folds")
    max_unpacked: str | None = Field(
        None,
        description="most bytes a file of the zip may unpack to, such as 20GB; 100 times its size in the zip, and "
        "1 GB at least, when null",
    )

    @model_validator(mode="after")
    def _make_sense(self) -> Settings:
        if self.folds == 1:
            raise ValueError("folds 1 leaves no row to take click rates from; give 2 or more, or 0 as published")
        problems = [unknown("hashed feature", name, CARDINALITIES) for name in self.cardinalities
                    if name not in CARDINALITIES]  # fmt: skip
        problems += [
            f"the cardinality of '{name}' is {count}; expected 2 or more: id 0 is what is missing"
            for name, count in self.cardinalities.items()
            if count < 2
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def cardinality(self, name: str) -> int:
        """Number of ids of a hashed feature."""
        return self.cardinalities.get(name, CARDINALITIES[name])


def prepare(context: PrepareContext, settings: Settings) -> Prepared:
    """Prepare Outbrain's tables from a folder or a zip, each table as CSV or as Kaggle's zip.

    Raises:
        DataError: if a table is missing, malformed or contradicts another, or `out` holds something else.
    """
    places = recognise(context.raw, _names_of(settings))
    inputs = list(dict.fromkeys(place.file for place in places.values()))

    def build(folder: Path) -> FeatureSpec:
        work = folder / "work"
        files = {
            name: unpacked(place, work / "raw" / f"{name}.csv", settings.max_unpacked) for name, place in places.items()
        }
        with context.connect(work / "tables") as backend:
            return _build(backend, folder, files, settings, context.progress)

    return prepared.run(context, NAME, settings, inputs, build)


def _build(
    backend: Backend, folder: Path, files: Mapping[str, Path], settings: Settings, progress: Progress
) -> FeatureSpec:
    progress("reading tables", 0, None)
    tables = read_tables(backend, files)
    check_tables(backend, tables, files)
    notes = Notes()
    tables["clicks_train"], repeated = each_ad_once(backend, tables["clicks_train"], notes)
    progress("splitting displays", 0, None)
    displays = backend.stage(_displays(tables, settings))
    reader = page_views.of_displays(backend, tables, displays) if settings.page_views else None
    progress("joining tables", 0, None)
    rows = backend.stage(_joined(tables, reader.displays if reader else displays))
    _check_displays(backend, rows)
    progress("counting clicks", 0, None)
    statistics = statistics_of_keys(backend, rows, settings.folds)
    progress("comparing documents", 0, None)
    weights = {aspect: backend.stage(tf_idf(tables[f"documents_{aspect}"], key)) for aspect, key in ASPECTS.items()}
    pairs = backend.stage(with_similarities(backend, rows, weights))
    full = page_views.added(backend, rows, reader, weights) if reader else rows
    full = with_statistics(full, statistics)
    full = left_join(full, pairs, "document_id", "document_id_promo")
    full = with_lists(backend, full, tables, displays)
    columns = _columns(backend, rows, statistics, settings)
    full = full.drop("timestamp", "fold", "uuid")
    if settings.submission:  # it is read twice
        full = backend.stage(full)
    summary = {**_summary(backend, rows), "repeated_rows": repeated}
    for name, what in (("displays_without_click", "no click"), ("displays_with_several_clicks", "several clicks")):
        if summary[name]:
            notes.inferred.append(f"{summary[name]:,} displays have {what}; they stay as they are")
    source = clicks.Source(
        dataset=NAME,
        rows=full.filter(full[SPLIT] != UNLABELLED),
        ids={},
        columns=columns,
        grouped="ids",
        kept=(page_views.LEAK,) if reader else (),
        missing_values=(NULL,),
        summary=summary,
        notes=notes,
    )
    (folder / VOCABULARIES).mkdir()  # stays empty, because all ids are hashed
    spec = clicks.write(backend, folder, source, progress=progress)
    if settings.submission:
        raw_names = [column.source for part in columns.values() for column in part]
        _write_unlabelled(backend, full, raw_names, folder / f"{UNLABELLED}.parquet")
    metadata = {**spec.metadata, "item_id": "ad_id", "cut_offs": [12]}
    return spec.replace(metadata=metadata | ({"leak": page_views.LEAK} if reader else {}))


def _names_of(settings: Settings) -> list[str]:
    wanted = {"clicks_test": settings.submission, "page_views": settings.page_views}
    return [name for name in TABLES if wanted.get(name, True)]


# --- rows ------------------------------------------------------------------------------------------------------------


def _displays(tables: Mapping[str, Table], settings: Settings) -> Table:
    events = tables["events"].drop(ROW)
    train = settings.valid * (1 - settings.test)
    labelled = splits.by_group(events.semi_join(tables["clicks_train"], "display_id"), group="display_id",
                               valid=train, test=settings.test, seed=settings.seed)  # fmt: skip
    late = labelled["timestamp"] // DAY >= settings.train_days
    displays = labelled.mutate(split=ibis.ifelse(late, "test", labelled[SPLIT]))
    displays = splits.folds(displays, group="display_id", folds=max(settings.folds, 1), seed=settings.seed)
    displays = displays.mutate(fold=ibis.ifelse(displays[SPLIT] == "train", displays["fold"], NO_FOLD))
    if settings.submission:
        unlabelled = events.semi_join(tables["clicks_test"], "display_id")
        unlabelled = unlabelled.anti_join(tables["clicks_train"], "display_id")
        displays = displays.union(
            unlabelled.mutate(split=ibis.literal(UNLABELLED), fold=ibis.literal(NO_FOLD, "int64"))
        )
    place = displays["geo_location"]
    return displays.mutate(geo_location_country=place.substr(0, 2), geo_location_state=place.substr(0, 5))


AFTER = 10**12
"""Offset of row numbers of clicks_test.csv, so that its rows follow those of clicks_train.csv."""


def _joined(tables: Mapping[str, Table], displays: Table) -> Table:
    labelled = tables["clicks_train"]
    rows = labelled.select(ROW, "display_id", "ad_id", label="clicked")
    if "clicks_test" in tables:
        further = tables["clicks_test"]
        null = ibis.null("int64")
        further = further.select("display_id", "ad_id", **{ROW: further[ROW] + AFTER, LABEL: null})
        rows = rows.union(further.select(rows.columns))
    promoted = tables["promoted_content"].drop(ROW).rename(document_id_promo="document_id")
    meta = tables["documents_meta"]
    meta_promo = meta.rename(lambda name: f"{name}_promo")
    rows = left_join(rows, displays, "display_id")
    rows = left_join(rows, promoted, "ad_id")
    rows = left_join(rows, meta, "document_id")
    rows = left_join(rows, meta_promo, "document_id_promo")
    days = {
        f"{name}_days_since_published": (rows["timestamp"] + EPOCH - rows[name]) // DAY
        for name in ("publish_time", "publish_time_promo")
    }
    return rows.mutate(**days).drop("publish_time", "publish_time_promo").rename({GROUP: "display_id"})


def _check_displays(backend: Backend, rows: Table) -> None:
    lost = rows.filter(rows["timestamp"].isnull())
    first = fetch(backend, lost.select(GROUP).distinct().order_by(GROUP).limit(5)).column(GROUP).to_pylist()
    if first:
        raise DataError(
            f"Outbrain's tables: {count_rows(backend, lost):,} rows of clicks are of displays that events.csv doesn't "
            f"name, such as {first}; expected one event a display"
        )


def _summary(backend: Backend, rows: Table) -> dict[str, object]:
    labelled = rows.filter(rows[SPLIT] != UNLABELLED)
    clicked = labelled.group_by(GROUP).aggregate(clicks=labelled[LABEL].sum())
    counts = clicked.aggregate(displays=clicked.count(), none=(clicked["clicks"] == 0).sum(),
                               several=(clicked["clicks"] > 1).sum())  # fmt: skip
    found = fetch(backend, counts).to_pylist()[0]
    return {
        "displays": found["displays"],
        "displays_without_click": int(found["none"] or 0),
        "displays_with_several_clicks": int(found["several"] or 0),
    }


# --- features --------------------------------------------------------------------------------------------------------


def _columns(
    backend: Backend, rows: Table, statistics: Mapping[str, KeyStatistics], settings: Settings
) -> dict[clicks.Role, Sequence[Column]]:
    """The features by role: item for the ad, context for all that the ads of a display share."""

    def hashed(name: str) -> Column:
        return Column(name, "hash", encoder=HashEncoder(cardinality=settings.cardinality(name)))

    def listed_ids(name: str) -> Column:
        encoder = HashEncoder(cardinality=settings.cardinality(name), separator=SEPARATOR, length=LIST_LENGTH)
        return Column(name, "hash", separator=SEPARATOR, encoder=encoder)

    def number(name: str) -> Column:
        return Column(name, "number", encoder=NumberEncoder())

    def count(key: str) -> Column:
        scaler = statistics[key].scaler
        encoder = ScaleEncoder(mean=scaler.mean, std=scaler.std, missing=0.0, log1p=True)
        return Column(f"{key}_count", "number", encoder=encoder)

    def days(name: str) -> Column:
        encoder = NumberEncoder(low=0, high=MOST_DAYS, outside=0.0, missing=_median(backend, rows, name), log1p=True)
        return Column(name, "number", encoder=encoder)

    item = [
        *map(hashed, ("ad_id", "document_id_promo", "campaign_id", "advertiser_id", "source_id_promo",
                      "publisher_id_promo")),
        *(number(similarity_name(aspect)) for aspect in ASPECTS),
        *(number(f"{key}_ctr") for key in CLICK_RATES),
        *map(count, COUNTED),
        days("publish_time_promo_days_since_published"),
    ]  # fmt: skip
    # Not hashed, because with few ids two of the three platforms would share one.
    platform = Column("platform", "bucket", encoder=BucketEncoder(boundaries=(2.0, 3.0)))
    context = [
        hashed("document_id"),
        platform,
        *map(hashed, ("geo_location", "geo_location_state", "geo_location_country", "source_id", "publisher_id")),
        *(listed_ids(f"{key}_list") for key in ASPECTS.values()),
        days("publish_time_days_since_published"),
    ]
    if settings.page_views:
        item += page_views.item_columns()
        context += page_views.context_columns(backend, rows)
    return {"item": item, "context": context}


def _median(backend: Backend, rows: Table, name: str) -> float:
    """The median over train rows with a value, after values outside 0..3650 become 0."""
    train = rows.filter((rows[SPLIT] == "train") & rows[name].notnull())
    clipped = train.mutate(_days=ibis.ifelse(train[name].between(0, MOST_DAYS), train[name], 0))
    counted = fetch(backend, counts_by(clipped, "_days").order_by("_days"))
    values, counts = counted.column("_days").to_pylist(), counted.column("rows").to_pylist()
    total, seen, middle = sum(counts), 0, []
    for value, count in zip(values, counts, strict=True):
        seen_before, seen = seen, seen + count
        middle += [value for place in {(total - 1) // 2, total // 2} if seen_before <= place < seen]
    return sum(middle) / len(middle) if middle else 0.0


def _write_unlabelled(backend: Backend, rows: Table, names: Sequence[str], path: Path) -> None:
    """Write the raw rows of clicks_test.csv for `recspec predict`: display_id, ad_id, then the features' columns."""
    further = [name for name in names if name != "ad_id"]
    chosen = rows.filter(rows[SPLIT] == UNLABELLED).order_by(ROW).select(display_id=GROUP, ad_id="ad_id", **{
        name: name for name in further})  # fmt: skip
    writer: pq.ParquetWriter | None = None
    try:
        for block in blocks(backend, chosen, clicks.BLOCK_ROWS):
            writer = writer or pq.ParquetWriter(path, block.schema)
            writer.write_table(block)
    finally:
        if writer is not None:
            writer.close()
