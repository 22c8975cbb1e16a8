"""Outbrain's raw tables, their checks, and the features of a row that come from other rows and tables.

Features of the reader use views strictly before the display's time, so a row never sees its own click, which is a later
view of the promoted page. A click on a test display may still precede another display of the same reader. So reader
profiles leave out every (reader, page) pair that a row of valid, test or clicks_test promotes. Later views are used for
`is_leak` alone, which is set for rows outside train and read by no model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ibis
from ibis.expr.types import Column as Values
from ibis.expr.types import IntegerColumn, StringColumn, Table

from recspec.base.errors import DataError, listed, nearest
from recspec.base.files import extract, open_zip
from recspec.data.encoding import BucketEncoder, NumberEncoder, ScaleEncoder, Scaler
from recspec.data.prepare import (
    GROUP,
    LABEL,
    ROW,
    SPLIT,
    Backend,
    Column,
    ColumnType,
    Notes,
    TextFile,
    count_rows,
    counts_by,
    fetch,
    keep_earliest,
    left_join,
)

NULL = "\\N"  # the publisher's text for a missing value, besides an empty field
TABLES: Mapping[str, Mapping[str, ColumnType]] = {
    "clicks_train": {"display_id": "int64", "ad_id": "int64", "clicked": "int64"},
    "clicks_test": {"display_id": "int64", "ad_id": "int64"},
    "events": {
        "display_id": "int64",
        "uuid": "string",
        "document_id": "int64",
        "timestamp": "int64",
        "platform": "string",
        "geo_location": "string",
    },
    "promoted_content": {"ad_id": "int64", "document_id": "int64", "campaign_id": "int64", "advertiser_id": "int64"},
    "documents_meta": {
        "document_id": "int64",
        "source_id": "string",
        "publisher_id": "string",
        "publish_time": "string",
    },
    "documents_categories": {"document_id": "int64", "category_id": "int64", "confidence_level": "float64"},
    "documents_topics": {"document_id": "int64", "topic_id": "int64", "confidence_level": "float64"},
    "documents_entities": {"document_id": "int64", "entity_id": "string", "confidence_level": "float64"},
    "page_views": {"uuid": "string", "document_id": "int64", "timestamp": "int64", "traffic_source": "int64"},
}
"""Columns to read of each table; those with missing values are read as text."""
UNIQUE = {"events": "display_id", "promoted_content": "ad_id", "documents_meta": "document_id"}


def read_tables(backend: Backend, files: Mapping[str, Path]) -> dict[str, Table]:
    """The tables, with missing values as nulls."""
    tables = {}
    for name, path in files.items():
        columns = TABLES[name]
        required = [column for column, kind in columns.items() if kind != "string" or column in ("uuid", "entity_id")]
        table = backend.read_text(TextFile(path, columns, quote="", required=required))
        texts = {column: table[column].nullif(NULL).nullif("") for column, kind in columns.items() if kind == "string"}
        tables[name] = table.mutate(**texts) if texts else table
    for name, column in (("events", "platform"), ("documents_meta", "source_id"), ("documents_meta", "publisher_id")):
        tables[name] = _with_numbers(backend, tables[name], column, files[name])
    tables["documents_meta"] = backend.stage(_with_publishers(backend, tables["documents_meta"]))
    return tables


def _with_numbers(backend: Backend, table: Table, name: str, path: Path) -> Table:
    """Convert a text column to whole numbers; other text is an error that names its lines."""
    numbers = table[name].try_cast("int64")
    wrong = table.filter(numbers.isnull() & table[name].notnull()).select(ROW, value=name)
    first = fetch(backend, wrong.order_by(ROW).limit(3)).to_pylist()
    if first:
        expected = f"expected a whole number, {NULL} or nothing"
        lines = {entry[ROW] + 2: entry["value"][:60] for entry in first}
        problems = [f"line {line:,}: column '{name}' is '{value}'; {expected}" for line, value in lines.items()]
        raise DataError.of(str(path), problems)
    return table.mutate(**{name: numbers})


def _with_publishers(backend: Backend, meta: Table) -> Table:
    """Documents, with a publisher of its own for each document without one: the largest number plus 2, 3, 4, ..."""
    largest = fetch(backend, meta.aggregate(largest=meta["publisher_id"].max())).column("largest")[0].as_py() or 0
    present = meta["publisher_id"].count().over(ibis.cumulative_window(order_by=ROW))
    publisher = meta["publisher_id"].fill_null(largest + 2 + meta[ROW] - present)
    return meta.mutate(publisher_id=publisher, publish_time=_milliseconds(meta["publish_time"])).drop(ROW)


def _milliseconds(texts: StringColumn) -> IntegerColumn:
    """A time such as 2016-06-05 00:00:00 in milliseconds since 1970; null for other text."""
    written = texts.re_search(r"^[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}")
    time = ibis.ifelse(written, texts.substr(0, 19), None).try_cast("timestamp")
    return time.epoch_seconds().cast("int64") * 1000


def check_tables(backend: Backend, tables: Mapping[str, Table], files: Mapping[str, Path]) -> None:
    """Check that keys are unique, labels 0 or 1, and displays in one of the clicks files."""
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
    DataError.refuse("Outbrain's tables", problems)


def each_ad_once(backend: Backend, labelled: Table, notes: Notes) -> tuple[Table, int]:
    """Keep an ad's clicked row, else its first, in each display, because MAP takes rows for different ads."""
    repeated = count_rows(backend, labelled) - count_rows(backend, labelled.select("display_id", "ad_id").distinct())
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


# --- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """The place of a table: a CSV file, or the member of a zip, which may be a zip itself."""

    file: Path
    member: str | None = None


def recognise(raw: Path, names: Sequence[str]) -> dict[str, Place]:
    """Find each table, as NAME.csv or NAME.csv.zip in a folder, in its direct subfolders, or in a zip of all tables."""
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
    DataError.refuse(f"{raw}: not Outbrain's tables", problems)
    return places


def unpacked(place: Place, target: Path, limit: str | None) -> Path:
    """The table as a CSV file, at a path that does not depend on the member's own."""
    if place.member is None and place.file.suffix != ".zip":
        return place.file
    target.parent.mkdir(parents=True, exist_ok=True)
    archive, member = place.file, place.member or target.name
    if member.endswith(".zip"):
        archive, member = target.with_suffix(".zip"), target.name
        _extract(place.file, str(place.member), archive, limit)
    _extract(archive, member, target, limit)
    if archive != place.file:
        archive.unlink()
    return target


def _extract(archive: Path, member: str, target: Path, limit: str | None) -> None:
    with open_zip(archive) as opened:
        names = [info.filename for info in opened.infolist() if not info.is_dir()]
        inside = [name for name in names if name == member or Path(name).name == member]
        if not inside:
            raise DataError(f"{archive}: holds {listed(names)}; expected {member}")
        extract(opened, inside[0], target, limit)


LIST_LENGTH = 3
SEPARATOR = "|"
CLICK_RATES: Mapping[str, int] = {
    "ad_id": 5,
    "document_id_promo": 5,
    "publisher_id_promo": 10,
    "source_id_promo": 10,
    "advertiser_id": 10,
    "campaign_id": 10,
}
"""Keys with a click rate, and the least number of rows for it; with fewer, it is 0."""
COUNTED = ("ad_id", "document_id_promo")
NO_FOLD = -1  # the fold of rows outside train; their rates come from all of train
ASPECTS: Mapping[str, str] = {"categories": "category_id", "topics": "topic_id", "entities": "entity_id"}
"""Tables of the aspects of documents, and the column of each."""
LEAK = "is_leak"
DAY = 86_400_000


def statistics_of_keys(backend: Backend, rows: Table, folds: int) -> tuple[dict[str, Table], dict[str, Scaler]]:
    """The statistics of each key for the rows of each fold, and the scale of each count.

    A table has the columns key, fold, KEY_ctr, and KEY_count if it is a feature.
    """
    train = rows.filter(rows[SPLIT] == "train")
    num_rows = count_rows(backend, train)
    tables, scalers = {}, {}
    for key, least in CLICK_RATES.items():
        tables[key], totals = _statistics_of(backend, train, key, least, folds)
        if key in COUNTED:
            scalers[key] = _scaler(backend, totals, num_rows, own=0 if folds else 1)
    return tables, scalers


def _statistics_of(backend: Backend, train: Table, key: str, least: int, folds: int) -> tuple[Table, Table]:
    """The statistics of a key for each fold, and its totals."""
    present = train.filter(train[key].notnull())
    clicks = present[LABEL].count(where=present[LABEL] == 1)  # counted, because DuckDB's sums are wider than int64
    by_fold = backend.stage(present.group_by(key, "fold").aggregate(_clicks=clicks, _rows=present.count()))
    totals = backend.stage(present.group_by(key).aggregate(_all_clicks=clicks, _all_rows=present.count()))
    all_of_it = totals.select(
        key, fold=ibis.literal(NO_FOLD, "int64"), _clicks="_all_clicks", _rows="_all_rows", _count="_all_rows"
    )
    own = left_join(by_fold, totals, key)
    others = {"_clicks": own["_all_clicks"], "_rows": own["_all_rows"], "_count": own["_all_rows"]}
    if folds:
        others = {
            "_clicks": own["_all_clicks"] - own["_clicks"],
            "_rows": own["_all_rows"] - own["_rows"],
            "_count": own["_all_rows"] - 1,
        }
    table = own.select(key, "fold", **others).union(all_of_it)
    rate = ibis.ifelse(table["_rows"] >= least, table["_clicks"].cast("float64") / table["_rows"].cast("float64"), 0.0)
    columns: dict[str, Values] = {f"{key}_ctr": rate}
    if key in COUNTED:
        columns[f"{key}_count"] = table["_count"]
    return backend.stage(table.select(key, "fold", **columns)), totals


def _scaler(backend: Backend, totals: Table, num_rows: int, *, own: int) -> Scaler:
    """Mean and deviation of ln(1 + count) over train rows: a value of n rows counts n times, as n - 1 + own.

    Rows without the key have count 0 and add nothing to the sums.
    """
    logarithm = (totals["_all_rows"] + own).cast("float64").ln()
    moments = {"first": logarithm * totals["_all_rows"], "second": logarithm * logarithm * totals["_all_rows"]}
    found = fetch(backend, totals.aggregate(**{name: value.sum() for name, value in moments.items()})).to_pylist()[0]
    first, second = (float(found[name] or 0.0) / max(num_rows, 1) for name in moments)
    return Scaler.of(first, math.sqrt(max(second - first * first, 0.0)))


# --- documents -------------------------------------------------------------------------------------------------------


def tf_idf(table: Table, key: str) -> Table:
    """tf-idf of every document and aspect.

    weight = confidence * ln(documents / documents with the aspect), over the documents in the table.
    """
    entries = table.group_by("document_id", aspect=table[key]).aggregate(confidence=table["confidence_level"].sum())
    of_aspect = entries.group_by("aspect").aggregate(_holders=entries.count())
    everyone = entries.aggregate(_documents=entries["document_id"].nunique())
    counted = left_join(entries, of_aspect, "aspect").cross_join(everyone)
    ratio = counted["_documents"].cast("float64") / counted["_holders"].cast("float64")
    return counted.select("document_id", "aspect", weight=counted["confidence"] * ratio.ln())


def with_similarities(backend: Backend, rows: Table, weights: Mapping[str, Table]) -> Table:
    """Each pair of landing and promoted document with the cosine of their tf-idf vectors for each aspect.

    Cosines are rounded to six digits, because engines sum in different orders.
    """
    pairs = _pairs(backend, rows, "document_id")
    result = pairs
    for aspect, table in weights.items():
        unit = left_join(table, _lengths(table, "document_id", "length"), "document_id")
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
        cosine = {similarity_name(aspect): (met["weight"] * met["_weight"]).sum().round(6)}
        summed = met.group_by("document_id", "document_id_promo").aggregate(**cosine)
        result = left_join(result, backend.stage(summed), "document_id", "document_id_promo")
    return result


def _pairs(backend: Backend, rows: Table, name: str) -> Table:
    """The distinct pairs of a column and the promoted document."""
    return backend.stage(rows.filter(rows["document_id_promo"].notnull()).select(name, "document_id_promo").distinct())


def _lengths(weights: Table, key: str, name: str, weight: str = "weight") -> Table:
    """The lengths of the vectors of a key."""
    return weights.group_by(key).aggregate(**{name: (weights[weight] * weights[weight]).sum().sqrt()})


def similarity_name(aspect: str) -> str:
    """The feature that compares landing and promoted document by an aspect."""
    return f"document_id_document_id_promo_sim_{aspect}"


def with_lists(backend: Backend, rows: Table, tables: Mapping[str, Table], displays: Table) -> Table:
    """The rows with the landing document's most confident values of each aspect, as one text."""
    for aspect, key in ASPECTS.items():
        table = tables[f"documents_{aspect}"].semi_join(displays, "document_id")
        order = [ibis.desc("confidence_level"), key, ROW]
        placed = table.mutate(_place=ibis.row_number().over(ibis.window(group_by="document_id", order_by=order)))
        text, *others = (
            ibis.ifelse(placed["_place"] == place, placed[key].cast("string"), None).max()
            for place in range(LIST_LENGTH)
        )
        for other in others:
            text = text + (ibis.literal(SEPARATOR) + other).fill_null("")
        listed = placed.filter(placed["_place"] < LIST_LENGTH).group_by("document_id")
        rows = left_join(rows, backend.stage(listed.aggregate(**{f"{key}_list": text})), "document_id")
    return rows


# --- readers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """Displays with features of their readers, and the readers' views."""

    displays: Table  # with `user_views` and `traffic_source`
    views: Table  # columns uuid, document_id, and the times of the `first` and `last` view
    before: Table  # columns display_id, uuid, document_id: the distinct pages that the reader saw before the display


def readers_of(backend: Backend, tables: Mapping[str, Table], displays: Table) -> Reader:
    """Join the views of the displays' readers."""
    views = backend.stage(tables["page_views"].semi_join(displays, "uuid"))
    time = views["timestamp"]
    times = views.group_by("uuid", "document_id").aggregate(first=time.min(), last=time.max())
    seen = views.select(_uuid="uuid", _document="document_id", _time="timestamp")
    shown = displays.select("display_id", "uuid", "timestamp")
    before = shown.inner_join(seen, [shown["uuid"] == seen["_uuid"], seen["_time"] < shown["timestamp"]])
    counted = before.group_by("display_id").aggregate(user_views=before.count())
    joined = left_join(displays, backend.stage(counted), "display_id")
    joined = left_join(joined, backend.stage(_sources(views, displays)), "display_id")
    joined = backend.stage(joined.mutate(user_views=joined["user_views"].fill_null(0)))
    pages = before.select("display_id", "uuid", document_id="_document").distinct()
    return Reader(joined, backend.stage(times), backend.stage(pages))


def _sources(views: Table, displays: Table) -> Table:
    """The traffic source of the landing page: of its latest view up to the display, on the same day."""
    landed = views.select(
        _uuid="uuid", _document="document_id", _time="timestamp", _row=ROW, traffic_source="traffic_source"
    )
    shown = displays.select("display_id", "uuid", "document_id", "timestamp")
    found = shown.inner_join(
        landed,
        [
            shown["uuid"] == landed["_uuid"],
            shown["document_id"] == landed["_document"],
            landed["_time"] <= shown["timestamp"],
            landed["_time"] // DAY == shown["timestamp"] // DAY,
        ],
    )
    aged = found.mutate(_age=-found["_time"], _order=-found["_row"])
    return keep_earliest(aged, ["display_id"], ["_age", "_order"]).select("display_id", "traffic_source")


def with_readers(backend: Backend, rows: Table, reader: Reader, weights: Mapping[str, Table]) -> Table:
    """The rows with features of the reader and the promoted page; `weights` are the tf-idf weights of each aspect."""
    rows = left_join(rows, reader.views.rename(document_id_promo="document_id"), "uuid", "document_id_promo")
    viewed = (rows["first"] < rows["timestamp"]).fill_null(False)
    leak = (rows["last"] >= rows["timestamp"]).fill_null(False) & (rows[SPLIT] != "train")
    rows = rows.mutate(user_has_already_viewed_doc=viewed.cast("int64"), is_leak=leak.cast("int64"))
    rows = rows.drop("first", "last")
    pairs = _pairs(backend, rows, GROUP)
    held_out = rows.filter((rows[SPLIT] != "train") & rows["document_id_promo"].notnull())
    promised = held_out.select("uuid", document_id="document_id_promo").distinct()
    seen = backend.stage(reader.before.anti_join(promised, ["uuid", "document_id"]))
    for aspect, table in weights.items():
        found = backend.stage(_reader_similarities(pairs, seen, table, f"user_doc_ad_sim_{aspect}"))
        rows = left_join(rows, found, GROUP, "document_id_promo")
    return rows


def _reader_similarities(pairs: Table, seen: Table, weights: Table, name: str) -> Table:
    """Cosine of the summed vectors of all seen pages and the vector of the promoted page, to six digits."""
    of_pages = seen.inner_join(weights, "document_id")
    profile = of_pages.group_by("display_id", "aspect").aggregate(_weight=of_pages["weight"].sum())
    lengths = _lengths(profile, "display_id", "_length", "_weight")
    of_documents = _lengths(weights, "document_id", "_own_length")
    found = pairs.inner_join(weights, pairs["document_id_promo"] == weights["document_id"]).drop("document_id")
    profile = profile.rename(_display="display_id", _aspect="aspect")
    met = found.inner_join(profile, [found[GROUP] == profile["_display"], found["aspect"] == profile["_aspect"]])
    dots = met.group_by(GROUP, "document_id_promo").aggregate(_dot=(met["weight"] * met["_weight"]).sum())
    dots = left_join(dots, lengths.rename({GROUP: "display_id"}), GROUP)
    dots = left_join(dots, of_documents.rename(document_id_promo="document_id"), "document_id_promo")
    length = dots["_length"] * dots["_own_length"]
    cosine = ibis.ifelse(length > 0, dots["_dot"] / length.nullif(0), 0.0).round(6)
    return dots.select(GROUP, "document_id_promo", **{name: cosine})


def reader_item_columns() -> Sequence[Column]:
    """Features of the promoted page for this reader."""
    viewed = Column("user_has_already_viewed_doc", "bucket", encoder=BucketEncoder(boundaries=(1.0,)))
    return [*(Column(f"user_doc_ad_sim_{each}", "number", encoder=NumberEncoder()) for each in ASPECTS), viewed]


def reader_context_columns(backend: Backend, rows: Table) -> Sequence[Column]:
    """Features of the reader, equal for all ads of a display."""
    train = rows.filter(rows[SPLIT] == "train")
    logarithm = (train["user_views"] + 1).cast("float64").ln()
    found = fetch(backend, train.aggregate(mean=logarithm.mean(), std=logarithm.std(how="pop"))).to_pylist()[0]
    scaler = Scaler.of(found["mean"], found["std"])
    views = ScaleEncoder(mean=scaler.mean, std=scaler.std, missing=0.0, log1p=True)
    source = BucketEncoder(boundaries=(2.0, 3.0))
    return [Column("user_views", "number", encoder=views), Column("traffic_source", "bucket", encoder=source)]
