"""Outbrain's click prediction tables from Kaggle, with the 29 features published for Wide & Deep.

A display is a page with a few ads, of which a reader clicked exactly one. A row is an ad in a display, and its group is
the display. docs/datasets.md lists the features, their formulas and all differences from the published recipe:

- **Click rates exclude the row's own label.** The published recipe joins each train row with statistics that include
  the row itself. Leaving out only the row is worse: among the rows of one ad, the rate then takes two values, the lower
  one exactly where the label is 1. Here displays are hashed into folds, and a train row's rates come from the other
  folds. Counts do not depend on labels; they leave out the row.
- **A valid split is cut from train.** The published recipe selects on the reported split.
- Lists keep a document's most confident values, not the first ones in a hash table's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import ibis
import numpy as np
import pyarrow.parquet as pq
from ibis.expr.types import Table
from pydantic import Field, model_validator

from recspec.base.config import Settings as BaseSettings
from recspec.base.errors import DataError, how_many, unknown
from recspec.data.encoding import VOCABULARIES, BucketEncoder, HashEncoder, NumberEncoder, ScaleEncoder, Scaler
from recspec.data.prepare import (
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
from recspec.datasets import outbrain_tables as features
from recspec.datasets.outbrain_tables import (
    ASPECTS,
    CLICK_RATES,
    COUNTED,
    DAY,
    LEAK,
    LIST_LENGTH,
    NO_FOLD,
    NULL,
    SEPARATOR,
    TABLES,
    check_tables,
    each_ad_once,
    read_tables,
    recognise,
    unpacked,
)
from recspec.feature_spec import FeatureSpec

NAME = "outbrain"
EPOCH = 1_465_876_799_998
"""Start of the publisher's timestamps, in milliseconds since 1970: 2016-06-14 04:00 UTC, less 2 ms."""
MOST_DAYS = 3650  # days since publication above this or below 0 count as 0
CARDINALITIES: Mapping[str, int] = {
    "ad_id": 250_000,
    "document_id": 300_000,
    "document_id_promo": 100_000,
    "campaign_id": 5_000,
    "advertiser_id": 2_500,
    "source_id": 4_000,
    "source_id_promo": 4_000,
    "publisher_id": 1_000,
    "publisher_id_promo": 1_000,
    "geo_location": 2_500,
    "geo_location_state": 2_000,
    "geo_location_country": 300,
    "category_id_list": 100,
    "topic_id_list": 350,
    "entity_id_list": 10_000,
}
"""Published number of ids of each hashed feature."""
UNLABELLED = "clicks_test"  # the publisher's rows without a label, which are in no split
AFTER = 10**12  # offset of row numbers of clicks_test.csv, so that its rows follow those of clicks_train.csv


class Settings(BaseSettings):
    """Settings of Outbrain's tables."""

    train_days: int = Field(11, ge=1, description="displays of later days are all for test; the data has 13 days")
    test: float = Field(0.2, ge=0, lt=1, description="share of the earlier days' displays that are also for test")
    valid: float = Field(0.05, ge=0, lt=1, description="share of train's displays for valid; 0 as published")
    folds: int = Field(
        5,
        ge=0,
        le=100,
        description="folds of train; click rates come from the other folds; 0, as published: from all of train",
    )
    cardinalities: dict[str, int] = Field({}, description="numbers of ids of hashed features, if not as published")
    page_views: bool = Field(False, description="add features of the reader from page_views.csv, and the flag is_leak")
    submission: bool = Field(False, description="also write the raw rows of clicks_test.csv, for `recspec predict`")
    seed: int = Field(0, ge=0, description="seed of the splits and folds")
    max_unpacked: str | None = Field(
        None,
        description="maximum unpacked size of a file in the zip, such as 20GB; null: 100 times its packed size, at "
        "least 1 GB",
    )

    @model_validator(mode="after")
    def _make_sense(self) -> Settings:
        if self.folds == 1:
            raise ValueError("folds 1 leaves no row to take click rates from; give 2 or more, or 0 as published")
        problems = [
            unknown("hashed feature", name, CARDINALITIES) for name in self.cardinalities if name not in CARDINALITIES
        ]
        problems += [
            f"the cardinality of '{name}' is {count}; expected 2 or more: id 0 is what is missing"
            for name, count in self.cardinalities.items()
            if count < 2
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def cardinality(self, name: str) -> int:
        return self.cardinalities.get(name, CARDINALITIES[name])


def prepare(context: PrepareContext, settings: Settings) -> Prepared:
    """Prepare Outbrain's tables from a folder or a zip, each table as CSV or as Kaggle's zip."""
    wanted = {"clicks_test": settings.submission, "page_views": settings.page_views}
    places = recognise(context.raw, [name for name in TABLES if wanted.get(name, True)])

    def build(folder: Path) -> FeatureSpec:
        raw, limit = folder / "work" / "raw", settings.max_unpacked
        files = {name: unpacked(place, raw / f"{name}.csv", limit) for name, place in places.items()}
        with context.connect(folder / "work" / "tables") as backend:
            return _build(backend, folder, files, settings, context.progress)

    inputs = list(dict.fromkeys(place.file for place in places.values()))
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
    reader = features.readers_of(backend, tables, displays) if settings.page_views else None
    progress("joining tables", 0, None)
    rows = backend.stage(_joined(tables, reader.displays if reader else displays))
    _check_displays(backend, rows)
    progress("counting clicks", 0, None)
    statistics, scalers = features.statistics_of_keys(backend, rows, settings.folds)
    progress("comparing documents", 0, None)
    weights = {
        aspect: backend.stage(features.tf_idf(tables[f"documents_{aspect}"], key)) for aspect, key in ASPECTS.items()
    }
    pairs = backend.stage(features.with_similarities(backend, rows, weights))
    full = features.with_readers(backend, rows, reader, weights) if reader else rows
    for key, table in statistics.items():  # the click rates and counts of each row's fold
        full = left_join(full, table, key, "fold")
    full = left_join(full, pairs, "document_id", "document_id_promo")
    full = features.with_lists(backend, full, tables, displays)
    columns = _columns(backend, rows, scalers, settings)
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
        kept=(LEAK,) if reader else (),
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
    return spec.replace(metadata=metadata | ({"leak": LEAK} if reader else {}))


# --- rows ------------------------------------------------------------------------------------------------------------


def _displays(tables: Mapping[str, Table], settings: Settings) -> Table:
    events = tables["events"].drop(ROW)
    train = settings.valid * (1 - settings.test)
    labelled = splits.by_group(
        events.semi_join(tables["clicks_train"], "display_id"),
        group="display_id",
        valid=train,
        test=settings.test,
        seed=settings.seed,
    )
    late = labelled["timestamp"] // DAY >= settings.train_days
    displays = labelled.mutate(split=ibis.ifelse(late, "test", labelled[SPLIT]))
    displays = splits.folds(displays, group="display_id", folds=max(settings.folds, 1), seed=settings.seed)
    displays = displays.mutate(fold=ibis.ifelse(displays[SPLIT] == "train", displays["fold"], NO_FOLD))
    if settings.submission:
        unlabelled = events.semi_join(tables["clicks_test"], "display_id")
        unlabelled = unlabelled.anti_join(tables["clicks_train"], "display_id")
        unlabelled = unlabelled.mutate(split=ibis.literal(UNLABELLED), fold=ibis.literal(NO_FOLD, "int64"))
        displays = displays.union(unlabelled)
    place = displays["geo_location"]
    return displays.mutate(geo_location_country=place.substr(0, 2), geo_location_state=place.substr(0, 5))


def _joined(tables: Mapping[str, Table], displays: Table) -> Table:
    rows = tables["clicks_train"].select(ROW, "display_id", "ad_id", label="clicked")
    if "clicks_test" in tables:
        further = tables["clicks_test"]
        further = further.select("display_id", "ad_id", **{ROW: further[ROW] + AFTER, LABEL: ibis.null("int64")})
        rows = rows.union(further.select(rows.columns))
    meta = tables["documents_meta"]
    rows = left_join(rows, displays, "display_id")
    rows = left_join(rows, tables["promoted_content"].drop(ROW).rename(document_id_promo="document_id"), "ad_id")
    rows = left_join(rows, meta, "document_id")
    rows = left_join(rows, meta.rename(lambda name: f"{name}_promo"), "document_id_promo")
    times = ("publish_time", "publish_time_promo")
    days = {f"{name}_days_since_published": (rows["timestamp"] + EPOCH - rows[name]) // DAY for name in times}
    return rows.mutate(**days).drop(*times).rename({GROUP: "display_id"})


def _check_displays(backend: Backend, rows: Table) -> None:
    lost = rows.filter(rows["timestamp"].isnull())
    first = fetch(backend, lost.select(GROUP).distinct().order_by(GROUP).limit(5)).column(GROUP).to_pylist()
    if first:
        clicks = how_many(count_rows(backend, lost), "row")
        raise DataError(
            f"Outbrain's tables: {clicks} of clicks, of displays that events.csv doesn't name, such as {first}; "
            "expected one event a display"
        )


def _summary(backend: Backend, rows: Table) -> dict[str, object]:
    labelled = rows.filter(rows[SPLIT] != UNLABELLED)
    clicked = labelled.group_by(GROUP).aggregate(clicks=labelled[LABEL].sum())
    counts = clicked.aggregate(
        displays=clicked.count(), none=(clicked["clicks"] == 0).sum(), several=(clicked["clicks"] > 1).sum()
    )
    found = fetch(backend, counts).to_pylist()[0]
    none, several = (int(found[name] or 0) for name in ("none", "several"))
    return {"displays": found["displays"], "displays_without_click": none, "displays_with_several_clicks": several}


# --- features --------------------------------------------------------------------------------------------------------


def _columns(
    backend: Backend, rows: Table, scalers: Mapping[str, Scaler], settings: Settings
) -> dict[clicks.Role, Sequence[Column]]:
    """The features by role: item for the ad, context for all that the ads of a display share."""

    def hashed(name: str) -> Column:
        return Column(name, "hash", encoder=HashEncoder(cardinality=settings.cardinality(name)))

    def listed_ids(name: str) -> Column:
        encoder = HashEncoder(cardinality=settings.cardinality(name), separator=SEPARATOR, length=LIST_LENGTH)
        return Column(name, "hash", separator=SEPARATOR, encoder=encoder)

    def count(key: str) -> Column:
        encoder = ScaleEncoder(mean=scalers[key].mean, std=scalers[key].std, missing=0.0, log1p=True)
        return Column(f"{key}_count", "number", encoder=encoder)

    def days(name: str) -> Column:
        encoder = NumberEncoder(low=0, high=MOST_DAYS, outside=0.0, missing=_median(backend, rows, name), log1p=True)
        return Column(name, "number", encoder=encoder)

    item = [
        *map(
            hashed,
            ("ad_id", "document_id_promo", "campaign_id", "advertiser_id", "source_id_promo", "publisher_id_promo"),
        ),
        *(
            Column(name, "number", encoder=NumberEncoder())
            for name in (*map(features.similarity_name, ASPECTS), *(f"{key}_ctr" for key in CLICK_RATES))
        ),
        *map(count, COUNTED),
        days("publish_time_promo_days_since_published"),
    ]
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
        item += features.reader_item_columns()
        context += features.reader_context_columns(backend, rows)
    return {"item": item, "context": context}


def _median(backend: Backend, rows: Table, name: str) -> float:
    """The median over train rows with a value, after values outside 0..3650 become 0."""
    train = rows.filter((rows[SPLIT] == "train") & rows[name].notnull())
    clipped = train.mutate(_days=ibis.ifelse(train[name].between(0, MOST_DAYS), train[name], 0))
    counted = fetch(backend, counts_by(clipped, "_days").order_by("_days"))
    values, counts = (counted.column(name).to_numpy() for name in ("_days", "rows"))
    total = int(counts.sum())
    if not total:
        return 0.0
    middle = np.searchsorted(np.cumsum(counts), [(total - 1) // 2, total // 2], side="right")
    return float(values[middle].mean())


def _write_unlabelled(backend: Backend, rows: Table, names: Sequence[str], path: Path) -> None:
    """Write the raw rows of clicks_test.csv for `recspec predict`: display_id, ad_id, then the features' columns."""
    further = {name: name for name in names if name != "ad_id"}
    unlabelled = rows.filter(rows[SPLIT] == UNLABELLED).order_by(ROW)
    with ExitStack() as stack:
        writer = None
        for block in blocks(backend, unlabelled.select(display_id=GROUP, ad_id="ad_id", **further), clicks.BLOCK_ROWS):
            writer = writer or stack.enter_context(pq.ParquetWriter(path, block.schema))
            writer.write_table(block)
