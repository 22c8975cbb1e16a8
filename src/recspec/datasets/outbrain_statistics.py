"""Statistics of Outbrain's rows and documents: click rates, counts, similarities and lists of aspects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import ibis
from ibis.expr.types import Column as Values
from ibis.expr.types import Table

from recspec.encoding import Scaler
from recspec.prepare import LABEL, ROW, SPLIT, Backend, count_rows, fetch, left_join

LIST_LENGTH = 3
SEPARATOR = "|"
CLICK_RATES: Mapping[str, int] = {
    "ad_id": 5, "document_id_promo": 5, "publisher_id_promo": 10, "source_id_promo": 10, "advertiser_id": 10,
    "campaign_id": 10,
}  # fmt: skip
"""Keys with a click rate, and the least number of rows for it; with fewer, it is 0."""
COUNTED = ("ad_id", "document_id_promo")
NO_FOLD = -1
"""The fold of rows outside train; their rates come from all of train."""


@dataclass(frozen=True)
class KeyStatistics:
    """The statistics of one key for rows of each fold, and the scale of its counts."""

    table: Table
    """Columns key, fold, KEY_ctr, and KEY_count if it is a feature."""
    scaler: Scaler


def statistics_of_keys(backend: Backend, rows: Table, folds: int) -> dict[str, KeyStatistics]:
    """The statistics of every key with a click rate."""
    train = rows.filter(rows[SPLIT] == "train")
    num_rows = count_rows(backend, train)
    return {key: _statistics_of(backend, train, key, least, num_rows, folds) for key, least in CLICK_RATES.items()}


def _statistics_of(backend: Backend, train: Table, key: str, least: int, num_rows: int, folds: int) -> KeyStatistics:
    present = train.filter(train[key].notnull())
    clicked = present[LABEL] == 1  # counted, because DuckDB's sums are wider than int64
    by_fold = present.group_by(key, "fold").aggregate(
        _clicks=present[LABEL].count(where=clicked), _rows=present.count()
    )
    totals = present.group_by(key).aggregate(_all_clicks=present[LABEL].count(where=clicked), _all_rows=present.count())
    by_fold, totals = backend.stage(by_fold), backend.stage(totals)
    all_of_it = totals.select(key, fold=ibis.literal(NO_FOLD, "int64"), _clicks="_all_clicks", _rows="_all_rows",
                              _count="_all_rows")  # fmt: skip
    own = left_join(by_fold, totals, key)
    if folds:
        others = {"_clicks": own["_all_clicks"] - own["_clicks"], "_rows": own["_all_rows"] - own["_rows"],
                "_count": own["_all_rows"] - 1}  # fmt: skip
    else:
        others = {"_clicks": own["_all_clicks"], "_rows": own["_all_rows"], "_count": own["_all_rows"]}
    table = own.select(key, "fold", **others).union(all_of_it)
    rate = ibis.ifelse(table["_rows"] >= least, table["_clicks"].cast("float64") / table["_rows"].cast("float64"), 0.0)
    columns: dict[str, Values] = {f"{key}_ctr": rate}
    if key in COUNTED:
        columns[f"{key}_count"] = table["_count"]
    return KeyStatistics(
        backend.stage(table.select(key, "fold", **columns)),
        _scaler(backend, totals, num_rows, own=0 if folds else 1) if key in COUNTED else Scaler(0.0, 1.0),
    )


def _scaler(backend: Backend, totals: Table, num_rows: int, *, own: int) -> Scaler:
    """Mean and deviation of ln(1 + count) over train rows: a value of n rows counts n times, as n - 1 + own.

    Rows without the key have count 0 and add nothing to the sums.
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


def with_statistics(rows: Table, statistics: Mapping[str, KeyStatistics]) -> Table:
    """The rows with the click rates and counts of their fold."""
    for key, found in statistics.items():
        rows = left_join(rows, found.table, key, "fold")
    return rows


# --- documents -------------------------------------------------------------------------------------------------------


ASPECTS: Mapping[str, str] = {"categories": "category_id", "topics": "topic_id", "entities": "entity_id"}
"""Tables of the aspects of documents, and the column of each."""


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
    """The feature that compares landing and promoted document by an aspect."""
    return f"document_id_document_id_promo_sim_{aspect}"


def with_lists(backend: Backend, rows: Table, tables: Mapping[str, Table], displays: Table) -> Table:
    """The rows with the landing document's most confident values of each aspect, as one text."""
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
