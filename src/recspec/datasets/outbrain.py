"""Outbrain's click prediction tables, as Kaggle ships them, to the 29 features that Wide & Deep was published with.

A display is a page with a few ads of which a reader clicked exactly one. A row is an ad in a display; its group is the
display. The features, their formulas and every difference from the published recipe stand in docs/datasets.md. The
differences that matter:

- **Click rates don't hold the row's own label.** The published recipe joins each train row with statistics that count
  the row itself. Leaving only the row out would be worse: the sum of the others' clicks is the sum of all minus the
  row's own label, so among the rows of one ad the feature takes two values, the lower one exactly where the label is 1.
  Here displays are hashed into folds, and a train row's rates come from the other folds: they are the same for all
  labels of its fold, its own and those of the ads it competed with. Counts hold no label, so they leave out the row.
- **A valid split is cut from train.** The published recipe chose on what it reported.
- Lists keep a document's most confident values, not those that come first in a hash table's order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ibis
import pyarrow.parquet as pq
from ibis.expr.types import Column as Values
from ibis.expr.types import IntegerColumn, StringColumn, Table
from pydantic import Field, model_validator

from recspec import splits
from recspec.archives import extract, open_zip
from recspec.config import Settings as BaseSettings
from recspec.datasets import clicks, page_views, prepared
from recspec.datasets.clicks import GROUP, LABEL
from recspec.datasets.columns import Column
from recspec.datasets.notes import Notes
from recspec.datasets.prepared import Prepared, Progress, silent
from recspec.encoding import VOCABULARIES, BucketEncoder, HashEncoder, NumberEncoder, ScaleEncoder, Scaler
from recspec.errors import DataError, listed, nearest, unknown
from recspec.feature_spec import FeatureSpec
from recspec.splits import SPLIT
from recspec.tables import (
    ROW,
    Backend,
    ColumnType,
    TextFile,
    blocks,
    connect,
    count_rows,
    counts_by,
    fetch,
    keep_earliest,
    left_join,
)

NAME = "outbrain"

EPOCH = 1_465_876_799_998
"""Milliseconds since 1970 that the publisher's timestamps count from: 2016-06-14 04:00 UTC, less 2 ms."""
DAY = 86_400_000
NULL = "\\N"
"""How the publisher writes what is missing, beside an empty field."""
LIST_LENGTH = 3
SEPARATOR = "|"
MOST_DAYS = 3650
"""Days since publishing beyond this, or below 0, count as 0."""

CARDINALITIES: Mapping[str, int] = {
    "ad_id": 250_000, "document_id": 300_000, "document_id_promo": 100_000, "campaign_id": 5_000,
    "advertiser_id": 2_500, "source_id": 4_000, "source_id_promo": 4_000, "publisher_id": 1_000,
    "publisher_id_promo": 1_000, "geo_location": 2_500, "geo_location_state": 2_000, "geo_location_country": 300,
    "category_id_list": 100, "topic_id_list": 350, "entity_id_list": 10_000,
}  # fmt: skip
"""Published number of ids of each hashed feature."""

CLICK_RATES: Mapping[str, int] = {
    "ad_id": 5, "document_id_promo": 5, "publisher_id_promo": 10, "source_id_promo": 10, "advertiser_id": 10,
    "campaign_id": 10,
}  # fmt: skip
"""Keys with a click rate, and from how many rows on it is taken for more than chance; below, it is 0."""
COUNTED = ("ad_id", "document_id_promo")

ASPECTS: Mapping[str, str] = {"categories": "category_id", "topics": "topic_id", "entities": "entity_id"}
"""Tables of what documents are about, and the column of each."""

UNLABELLED = "clicks_test"
"""The publisher's rows without a label; never among train, valid and test."""


class Settings(BaseSettings):
    """How Outbrain's tables are split and their statistics taken."""

    train_days: int = Field(11, ge=1, description="displays of later days are all for test; the data has 13 days")
    test: float = Field(0.2, ge=0, lt=1, description="share of the earlier days' displays that are for test too")
    valid: float = Field(0.05, ge=0, lt=1, description="share of train's displays cut off for valid; 0 as published")
    folds: int = Field(5, ge=0, le=100, description="parts of train, whose click rates leave the row's part out; "
                       "0 as published, where they hold the row's own label")  # fmt: skip
    cardinalities: dict[str, int] = Field({}, description="numbers of ids of hashed features, where not as published")
    page_views: bool = Field(False, description="add what page_views.csv says about the reader, and the leak")
    submission: bool = Field(False, description="also write the raw rows of clicks_test.csv, for `recspec predict`")
    seed: int = Field(0, ge=0, description="of the splits and folds")
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
    """Prepare Outbrain's tables from their folder or zip, each table as CSV or as the zip that Kaggle ships.

    Raises:
        DataError: if a table is missing, malformed or contradicts another, or `out` holds something else.
    """
    places = recognise(raw, _names_of(settings))
    inputs = list(dict.fromkeys(place.file for place in places.values()))
    job = prepared.Job(NAME, settings, inputs, out)

    def build(folder: Path) -> FeatureSpec:
        work = folder / "work"
        files = {
            name: _unpacked(place, work / "raw" / f"{name}.csv", settings.max_unpacked)
            for name, place in places.items()
        }
        with connect(engine, folder=work / "tables", memory_limit=memory_limit, threads=threads) as backend:
            return _build(backend, folder, files, settings, progress)

    return prepared.run(job, build, force=force)


def _build(
    backend: Backend, folder: Path, files: Mapping[str, Path], settings: Settings, progress: Progress
) -> FeatureSpec:
    progress("reading tables", 0, None)
    tables = _read(backend, files)
    _check(backend, tables, files)
    notes = Notes()
    tables["clicks_train"], repeated = _each_ad_once(backend, tables["clicks_train"], notes)
    progress("splitting displays", 0, None)
    displays = backend.stage(_displays(tables, settings))
    reader = page_views.of_displays(backend, tables, displays) if settings.page_views else None
    progress("joining tables", 0, None)
    rows = backend.stage(_joined(tables, reader.displays if reader else displays))
    _check_displays(backend, rows)
    progress("counting clicks", 0, None)
    statistics = _statistics(backend, rows, settings)
    progress("comparing documents", 0, None)
    weights = {aspect: backend.stage(_weights(tables[f"documents_{aspect}"], key)) for aspect, key in ASPECTS.items()}
    pairs = backend.stage(_with_similarities(backend, rows, weights))
    full = page_views.added(backend, rows, reader, weights) if reader else rows
    full = _with_statistics(full, statistics)
    full = left_join(full, pairs, "document_id", "document_id_promo")
    full = _with_lists(backend, full, tables, displays)
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
    (folder / VOCABULARIES).mkdir()  # everything is hashed, so it stays empty
    spec = clicks.write(backend, folder, source, progress=progress)
    if settings.submission:
        raw_names = [column.source for part in columns.values() for column in part]
        _write_unlabelled(backend, full, raw_names, folder / f"{UNLABELLED}.parquet")
    metadata = {**spec.metadata, "item_id": "ad_id", "cut_offs": [12]}
    return spec.replace(metadata=metadata | ({"leak": page_views.LEAK} if reader else {}))


# --- the tables ------------------------------------------------------------------------------------------------------

TABLES: Mapping[str, Mapping[str, ColumnType]] = {
    "clicks_train": {"display_id": "int64", "ad_id": "int64", "clicked": "int64"},
    "clicks_test": {"display_id": "int64", "ad_id": "int64"},
    "events": {
        "display_id": "int64", "uuid": "string", "document_id": "int64", "timestamp": "int64", "platform": "string",
        "geo_location": "string",
    },
    "promoted_content": {
        "ad_id": "int64", "document_id": "int64", "campaign_id": "int64", "advertiser_id": "int64"
    },
    "documents_meta": {
        "document_id": "int64", "source_id": "string", "publisher_id": "string", "publish_time": "string"
    },
    "documents_categories": {"document_id": "int64", "category_id": "int64", "confidence_level": "float64"},
    "documents_topics": {"document_id": "int64", "topic_id": "int64", "confidence_level": "float64"},
    "documents_entities": {"document_id": "int64", "entity_id": "string", "confidence_level": "float64"},
    "page_views": {"uuid": "string", "document_id": "int64", "timestamp": "int64", "traffic_source": "int64"},
}  # fmt: skip
"""Columns that are read of each table. Those that may be missing are read as text."""

UNIQUE = {"events": "display_id", "promoted_content": "ad_id", "documents_meta": "document_id"}


def _names_of(settings: Settings) -> list[str]:
    wanted = {"clicks_test": settings.submission, "page_views": settings.page_views}
    return [name for name in TABLES if wanted.get(name, True)]


def _read(backend: Backend, files: Mapping[str, Path]) -> dict[str, Table]:
    """The tables, with missing values as nulls."""
    tables = {}
    for name, path in files.items():
        columns = TABLES[name]
        required = [column for column, kind in columns.items() if kind != "string" or column in ("uuid", "entity_id")]
        table = backend.read_text(TextFile(path, columns, quoted=False, required=required))
        texts = {column: table[column].nullif(NULL).nullif("") for column, kind in columns.items() if kind == "string"}
        tables[name] = table.mutate(**texts) if texts else table
    for name, column in (("events", "platform"), ("documents_meta", "source_id"), ("documents_meta", "publisher_id")):
        tables[name] = _with_numbers(backend, tables[name], column, files[name])
    tables["documents_meta"] = backend.stage(_with_publishers(backend, tables["documents_meta"]))
    return tables


def _with_numbers(backend: Backend, table: Table, name: str, path: Path) -> Table:
    """The table with a column of text as whole numbers.

    Raises:
        DataError: naming the lines that hold something else.
    """
    numbers = table[name].try_cast("int64")
    wrong = table.filter(numbers.isnull() & table[name].notnull()).select(ROW, value=name)
    first = fetch(backend, wrong.order_by(ROW).limit(3)).to_pylist()
    if first:
        problems = [
            f"line {entry[ROW] + 2:,}: column '{name}' is '{entry['value'][:60]}'; expected a whole number, {NULL} or "
            "nothing"
            for entry in first
        ]
        raise DataError.of(str(path), problems)
    return table.mutate(**{name: numbers})


def _with_publishers(backend: Backend, meta: Table) -> Table:
    """Documents, each one without a publisher having one of its own: the largest number and 2, 3, 4, ... more."""
    largest = fetch(backend, meta.aggregate(largest=meta["publisher_id"].max())).column("largest")[0].as_py() or 0
    present = meta["publisher_id"].count().over(ibis.cumulative_window(order_by=ROW))
    return meta.mutate(
        publisher_id=meta["publisher_id"].fill_null(largest + 2 + meta[ROW] - present),
        publish_time=_milliseconds(meta["publish_time"]),
    ).drop(ROW)


def _milliseconds(texts: StringColumn) -> IntegerColumn:
    """A time such as 2016-06-05 00:00:00 in milliseconds since 1970; null where the text is none."""
    written = texts.re_search(r"^[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}")
    time = ibis.ifelse(written, texts.substr(0, 19), None).try_cast("timestamp")
    return time.epoch_seconds().cast("int64") * 1000


def _check(backend: Backend, tables: Mapping[str, Table], files: Mapping[str, Path]) -> None:
    problems = []
    for name, key in UNIQUE.items():
        counted = counts_by(tables[name], key)
        twice = fetch(backend, counted.filter(counted["rows"] > 1).order_by(key).limit(5)).column(key).to_pylist()
        if twice:
            problems.append(f"{files[name]}: '{key}' {listed(map(str, twice))} stands more than once; expected one row")
    labelled = tables["clicks_train"]
    wrong = labelled.filter(~labelled["clicked"].isin([0, 1])).select(ROW, "clicked").order_by(ROW).limit(3)
    for entry in fetch(backend, wrong).to_pylist():
        line = f"{files['clicks_train']}: line {entry[ROW] + 2:,}"
        problems.append(f"{line}: column 'clicked' is {entry['clicked']}; expected 0 or 1")
    if "clicks_test" in tables:
        both = tables["clicks_test"].semi_join(labelled, "display_id").select("display_id").distinct()
        first = fetch(backend, both.order_by("display_id").limit(5)).column("display_id").to_pylist()
        if first:
            problems.append(f"{files['clicks_test']}: displays {first} stand in clicks_train.csv too; expected others")
    if problems:
        raise DataError.of("Outbrain's tables", problems)


def _each_ad_once(backend: Backend, labelled: Table, notes: Notes) -> tuple[Table, int]:
    """The clicks with one row for each ad of a display, and how many rows that leaves out.

    MAP takes a display's rows for different ads. The clicked row stays, else the first.
    """
    pairs = labelled.select("display_id", "ad_id").distinct()
    repeated = count_rows(backend, labelled) - count_rows(backend, pairs)
    if repeated:
        order = [ibis.desc("clicked"), ROW]
        kept = backend.stage(keep_earliest(labelled, ["display_id", "ad_id"], order).order_by(ROW))
        left_out = labelled.anti_join(kept.select(ROW), ROW).order_by(ROW).limit(1)
        first = fetch(backend, left_out.select("display_id", "ad_id")).to_pylist()[0]
        notes.dropped.append(
            f"{repeated:,} rows of clicks_train.csv repeat an ad of the same display, such as ad {first['ad_id']} of "
            f"display {first['display_id']}; the clicked one stays, else the first"
        )
        labelled = kept
    return labelled, repeated


def _check_displays(backend: Backend, rows: Table) -> None:
    lost = rows.filter(rows["timestamp"].isnull())
    first = fetch(backend, lost.select(GROUP).distinct().order_by(GROUP).limit(5)).column(GROUP).to_pylist()
    if first:
        raise DataError(
            f"Outbrain's tables: {count_rows(backend, lost):,} rows of clicks are of displays that events.csv doesn't "
            f"name, such as {first}; expected one event a display"
        )


# --- rows ------------------------------------------------------------------------------------------------------------


def _displays(tables: Mapping[str, Table], settings: Settings) -> Table:
    """One row a display that the clicks name: when, where, for which split and in which fold."""
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


NO_FOLD = -1
"""The fold of rows that are not for training: their rates come from all of train."""


def _joined(tables: Mapping[str, Table], displays: Table) -> Table:
    """Every row with what is known of its display, ad and documents."""
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


AFTER = 10**12
"""Added to the row numbers of clicks_test.csv, so that its rows come after those of clicks_train.csv."""


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


# --- click rates and counts ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Statistics:
    """Of one key: what rows of each fold are told about each value, and how counts are scaled."""

    table: Table
    """Columns key, fold, KEY_ctr, and KEY_count where it is a feature."""
    scaler: Scaler


def _statistics(backend: Backend, rows: Table, settings: Settings) -> dict[str, _Statistics]:
    train = rows.filter(rows[SPLIT] == "train")
    num_rows = count_rows(backend, train)
    return {
        key: _statistics_of(backend, train, key, least, num_rows, settings.folds) for key, least in CLICK_RATES.items()
    }


def _statistics_of(backend: Backend, train: Table, key: str, least: int, num_rows: int, folds: int) -> _Statistics:
    present = train.filter(train[key].notnull())
    clicked = present[LABEL] == 1  # counted, not summed: DuckDB's sums of whole numbers are wider than int64
    by_fold = present.group_by(key, "fold").aggregate(
        _clicks=present[LABEL].count(where=clicked), _rows=present.count()
    )
    totals = present.group_by(key).aggregate(_all_clicks=present[LABEL].count(where=clicked), _all_rows=present.count())
    by_fold, totals = backend.stage(by_fold), backend.stage(totals)
    all_of_it = totals.select(key, fold=ibis.literal(NO_FOLD, "int64"), _clicks="_all_clicks", _rows="_all_rows",
                              _count="_all_rows")  # fmt: skip
    own = left_join(by_fold, totals, key)
    if folds:
        told = {"_clicks": own["_all_clicks"] - own["_clicks"], "_rows": own["_all_rows"] - own["_rows"],
                "_count": own["_all_rows"] - 1}  # fmt: skip
    else:
        told = {"_clicks": own["_all_clicks"], "_rows": own["_all_rows"], "_count": own["_all_rows"]}
    table = own.select(key, "fold", **told).union(all_of_it)
    rate = ibis.ifelse(table["_rows"] >= least, table["_clicks"].cast("float64") / table["_rows"].cast("float64"), 0.0)
    columns: dict[str, Values] = {f"{key}_ctr": rate}
    if key in COUNTED:
        columns[f"{key}_count"] = table["_count"]
    return _Statistics(
        backend.stage(table.select(key, "fold", **columns)),
        _scaler(backend, totals, num_rows, own=0 if folds else 1) if key in COUNTED else Scaler(0.0, 1.0),
    )


def _scaler(backend: Backend, totals: Table, num_rows: int, *, own: int) -> Scaler:
    """Mean and deviation of ln(1 + count) over train rows: a value of n rows stands n times, with count n - 1 + own.

    Rows without the key have count 0, so add nothing to the sums.
    """
    logarithm = (totals["_all_rows"] + own).cast("float64").ln()
    found = fetch(
        backend,
        totals.aggregate(
            first=(logarithm * totals["_all_rows"]).sum(), second=(logarithm * logarithm * totals["_all_rows"]).sum()
        ),
    )
    first, second = (float(found.column(name)[0].as_py() or 0.0) / max(num_rows, 1) for name in ("first", "second"))
    return Scaler.of(first, math.sqrt(max(second - first * first, 0.0)))


def _with_statistics(rows: Table, statistics: Mapping[str, _Statistics]) -> Table:
    for key, found in statistics.items():
        rows = left_join(rows, found.table, key, "fold")
    return rows


# --- documents -------------------------------------------------------------------------------------------------------


def _weights(table: Table, key: str) -> Table:
    """tf-idf of every document and aspect, and each document's length as a vector.

    weight = confidence * ln(documents / documents with the aspect), over the documents that the table holds.
    """
    entries = table.group_by("document_id", aspect=table[key]).aggregate(confidence=table["confidence_level"].sum())
    of_aspect = entries.group_by("aspect").aggregate(_holders=entries.count())
    everyone = entries.aggregate(_documents=entries["document_id"].nunique())
    counted = left_join(entries, of_aspect, "aspect").cross_join(everyone)
    ratio = counted["_documents"].cast("float64") / counted["_holders"].cast("float64")
    return counted.select("document_id", "aspect", weight=counted["confidence"] * ratio.ln())


def _with_similarities(backend: Backend, rows: Table, weights: Mapping[str, Table]) -> Table:
    """Each pair of landing and promoted document with the cosine of their tf-idf vectors for each aspect.

    Rounded to six digits, for engines sum in different orders.
    """
    pairs = backend.stage(
        rows.filter(rows["document_id_promo"].notnull()).select("document_id", "document_id_promo").distinct()
    )
    result = pairs
    for aspect, table in weights.items():
        lengths = table.group_by("document_id").aggregate(length=(table["weight"] * table["weight"]).sum().sqrt())
        unit = left_join(table, lengths, "document_id")
        unit = unit.filter(unit["length"] > 0)
        unit = unit.select("document_id", "aspect", weight=unit["weight"] / unit["length"])
        landing = unit.semi_join(pairs, "document_id")
        promoted = unit.rename(document_id_promo="document_id", _weight="weight", _aspect="aspect")
        promoted = promoted.semi_join(pairs, "document_id_promo")
        found = pairs.inner_join(landing, "document_id")
        met = found.inner_join(
            promoted,
            [found["document_id_promo"] == promoted["document_id_promo"], found["aspect"] == promoted["_aspect"]],
        )
        name = similarity_name(aspect)
        summed = met.group_by("document_id", "document_id_promo").aggregate(
            **{name: (met["weight"] * met["_weight"]).sum().round(6)}
        )
        result = left_join(result, backend.stage(summed), "document_id", "document_id_promo")
    return result


def similarity_name(aspect: str) -> str:
    """Name of the feature that compares landing and promoted document by an aspect."""
    return f"document_id_document_id_promo_sim_{aspect}"


def _with_lists(backend: Backend, rows: Table, tables: Mapping[str, Table], displays: Table) -> Table:
    """Rows with the landing document's most confident values of each aspect, as one text."""
    for aspect, key in ASPECTS.items():
        table = tables[f"documents_{aspect}"].semi_join(displays, "document_id")
        order = [ibis.desc("confidence_level"), key, ROW]
        placed = table.mutate(_place=ibis.row_number().over(ibis.window(group_by="document_id", order_by=order)))
        texts = [
            ibis.ifelse(placed["_place"] == place, placed[key].cast("string"), None).max()
            for place in range(LIST_LENGTH)
        ]
        joined = texts[0]
        for text in texts[1:]:
            joined = joined + (ibis.literal(SEPARATOR) + text).fill_null("")
        lists = (
            placed.filter(placed["_place"] < LIST_LENGTH).group_by("document_id").aggregate(**{f"{key}_list": joined})
        )
        rows = left_join(rows, backend.stage(lists), "document_id")
    return rows


# --- features --------------------------------------------------------------------------------------------------------


def _columns(
    backend: Backend, rows: Table, statistics: Mapping[str, _Statistics], settings: Settings
) -> dict[clicks.Role, Sequence[Column]]:
    """The features, by role: of the ad, and of everything that all ads of a display share."""

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
    # Not hashed: of the three platforms, 2 of 3 hashes would make two one.
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
    """Of the train rows that have a value, once values outside 0..3650 became 0; of two in the middle, their mean."""
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
    """Raw rows of clicks_test.csv, which `recspec predict` takes: display_id, ad_id, then the features' columns."""
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


# --- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a table lies: a CSV file, or inside a zip, whose member may be a zip itself."""

    file: Path
    member: str | None = None


def recognise(raw: Path, names: Sequence[str]) -> dict[str, Place]:
    """Where each table lies: as NAME.csv or NAME.csv.zip in a folder, in a folder right in it, or in a zip of all.

    Raises:
        DataError: naming every table that is missing, or that stands in two places.
    """
    if raw.is_dir():
        found = [Place(path) for path in sorted([*raw.glob("*"), *raw.glob("*/*")]) if path.is_file()]
    elif raw.is_file():
        with open_zip(raw) as archive:
            found = [Place(raw, info.filename) for info in archive.infolist() if not info.is_dir()]
    else:
        raise DataError(f"{raw}: no such file or folder; expected Outbrain's tables in a folder or a zip")
    by_name: dict[str, list[Place]] = {}
    for place in found:
        by_name.setdefault(Path(place.member or place.file).name, []).append(place)
    problems, places = [], {}
    others = set(by_name) - {f"{name}.csv" for name in TABLES}
    for name in names:
        candidates = by_name.get(f"{name}.csv") or by_name.get(f"{name}.csv.zip") or []
        if len(candidates) == 1:
            places[name] = candidates[0]
        elif candidates:
            where = listed(str(place.member or place.file) for place in candidates)
            problems.append(f"{name}.csv stands in several places: {where}; name the folder you mean")
        else:
            problems.append(f"{name}.csv is missing, and {name}.csv.zip too{nearest(f'{name}.csv', others)}")
    if problems:
        raise DataError.of(f"{raw}: not Outbrain's tables", problems)
    return places


def _unpacked(place: Place, target: Path, limit: str | None) -> Path:
    """The table as a CSV file. A member's own path is not used, so none can lead out of the work folder."""
    if place.member is None and place.file.suffix != ".zip":
        return place.file
    target.parent.mkdir(parents=True, exist_ok=True)
    if place.member is None:
        _extract(place.file, target.name, target, limit)
        return target
    if not place.member.endswith(".zip"):
        _extract(place.file, place.member, target, limit)
        return target
    inner = target.with_suffix(".zip")
    _extract(place.file, place.member, inner, limit)
    _extract(inner, target.name, target, limit)
    inner.unlink()
    return target


def _extract(archive: Path, member: str, target: Path, limit: str | None) -> None:
    with open_zip(archive) as opened:
        names = [info.filename for info in opened.infolist() if not info.is_dir()]
        inside = [name for name in names if name == member or Path(name).name == member]
        if not inside:
            raise DataError(f"{archive}: holds {listed(names)}; expected {member}")
        extract(opened, inside[0], target, limit)
