"""Outbrain's raw tables: their files, columns and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ibis
from ibis.expr.types import IntegerColumn, StringColumn, Table

from recspec.errors import DataError, listed, nearest
from recspec.files import extract, open_zip
from recspec.prepare import ROW, Backend, ColumnType, Notes, TextFile, count_rows, counts_by, fetch, keep_earliest

NULL = "\\N"  # the publisher's text for a missing value, besides an empty field
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
    if problems:
        raise DataError.of("Outbrain's tables", problems)


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
    if problems:
        raise DataError.of(f"{raw}: not Outbrain's tables", problems)
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
