"""Features of a display's reader from Outbrain's page_views.csv, and the leak in that file.

Features use views strictly before the display's time, so a row never sees its own click, which is a later view of the
promoted page. A click on a test display may still precede another display of the same reader. So reader profiles leave
out every (reader, page) pair that a row of valid, test or clicks_test promotes. Later views are used for `is_leak`
alone, which is set for rows outside train and read by no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ibis
from ibis.expr.types import Table

from recspec.encoding import BucketEncoder, NumberEncoder, ScaleEncoder, Scaler
from recspec.prepare import GROUP, ROW, SPLIT, Backend, Column, fetch, keep_earliest, left_join

LEAK = "is_leak"
DAY = 86_400_000


@dataclass(frozen=True)
class Reader:
    """Displays with features of their readers, and the readers' views."""

    displays: Table
    """With `user_views` and `traffic_source`."""
    views: Table
    """Columns uuid, document_id, and the times of the `first` and `last` view."""
    before: Table
    """Columns display_id, uuid, document_id: the distinct pages that the reader saw before the display."""


def of_displays(backend: Backend, tables: Mapping[str, Table], displays: Table) -> Reader:
    """Join the views of the displays' readers."""
    views = backend.stage(tables["page_views"].semi_join(displays, "uuid"))
    times = views.group_by("uuid", "document_id").aggregate(
        first=views["timestamp"].min(), last=views["timestamp"].max()
    )
    seen = views.select(_uuid="uuid", _document="document_id", _time="timestamp")
    shown = displays.select("display_id", "uuid", "timestamp")
    before = shown.inner_join(seen, [shown["uuid"] == seen["_uuid"], seen["_time"] < shown["timestamp"]])
    counted = before.group_by("display_id").aggregate(user_views=before.count())
    joined = left_join(displays, backend.stage(counted), "display_id")
    joined = left_join(joined, backend.stage(_sources(views, displays)), "display_id")
    return Reader(
        backend.stage(joined.mutate(user_views=joined["user_views"].fill_null(0))),
        backend.stage(times),
        backend.stage(before.select("display_id", "uuid", document_id="_document").distinct()),
    )


def _sources(views: Table, displays: Table) -> Table:
    """The traffic source of the landing page: of its latest view up to the display, on the same day."""
    landed = views.select(_uuid="uuid", _document="document_id", _time="timestamp", _row=ROW,
                          traffic_source="traffic_source")  # fmt: skip
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


def added(backend: Backend, rows: Table, reader: Reader, weights: Mapping[str, Table]) -> Table:
    """The rows with features of the reader and the promoted page.

    Args:
        weights: For each aspect, the tf-idf weight of every document and value.
    """
    times = reader.views.rename(document_id_promo="document_id")
    rows = left_join(rows, times, "uuid", "document_id_promo")
    viewed = (rows["first"] < rows["timestamp"]).fill_null(False)
    leak = (rows["last"] >= rows["timestamp"]).fill_null(False) & (rows[SPLIT] != "train")
    rows = rows.mutate(user_has_already_viewed_doc=viewed.cast("int64"), is_leak=leak.cast("int64"))
    rows = rows.drop("first", "last")
    pairs = backend.stage(
        rows.filter(rows["document_id_promo"].notnull()).select(GROUP, "document_id_promo").distinct()
    )
    held_out = rows.filter((rows[SPLIT] != "train") & rows["document_id_promo"].notnull())
    promised = held_out.select("uuid", document_id="document_id_promo").distinct()
    seen = backend.stage(reader.before.anti_join(promised, ["uuid", "document_id"]))
    for aspect, table in weights.items():
        found = backend.stage(_similarities(pairs, seen, table, f"user_doc_ad_sim_{aspect}"))
        rows = left_join(rows, found, GROUP, "document_id_promo")
    return rows


def _similarities(pairs: Table, seen: Table, weights: Table, name: str) -> Table:
    """Cosine of the summed vectors of all seen pages and the vector of the promoted page, to six digits."""
    of_pages = seen.inner_join(weights, "document_id")
    profile = of_pages.group_by("display_id", "aspect").aggregate(_weight=of_pages["weight"].sum())
    lengths = profile.group_by("display_id").aggregate(_length=(profile["_weight"] * profile["_weight"]).sum().sqrt())
    of_documents = weights.group_by("document_id").aggregate(
        _own_length=(weights["weight"] * weights["weight"]).sum().sqrt()
    )
    found = pairs.inner_join(weights, pairs["document_id_promo"] == weights["document_id"]).drop("document_id")
    profile = profile.rename(_display="display_id", _aspect="aspect")
    met = found.inner_join(profile, [found[GROUP] == profile["_display"], found["aspect"] == profile["_aspect"]])
    dots = met.group_by(GROUP, "document_id_promo").aggregate(_dot=(met["weight"] * met["_weight"]).sum())
    dots = left_join(dots, lengths.rename({GROUP: "display_id"}), GROUP)
    dots = left_join(dots, of_documents.rename(document_id_promo="document_id"), "document_id_promo")
    length = dots["_length"] * dots["_own_length"]
    cosine = ibis.ifelse(length > 0, dots["_dot"] / length.nullif(0), 0.0).round(6)
    return dots.select(GROUP, "document_id_promo", **{name: cosine})


def item_columns() -> Sequence[Column]:
    """Features of the promoted page for this reader."""
    names = [f"user_doc_ad_sim_{aspect}" for aspect in ("categories", "topics", "entities")]
    return [
        *(Column(name, "number", encoder=NumberEncoder()) for name in names),
        Column("user_has_already_viewed_doc", "bucket", encoder=BucketEncoder(boundaries=(1.0,))),
    ]


def context_columns(backend: Backend, rows: Table) -> Sequence[Column]:
    """Features of the reader, equal for all ads of a display."""
    train = rows.filter(rows[SPLIT] == "train")
    logarithm = (train["user_views"] + 1).cast("float64").ln()
    found = fetch(backend, train.aggregate(mean=logarithm.mean(), std=logarithm.std(how="pop")))
    scaler = Scaler.of(found.column("mean")[0].as_py(), found.column("std")[0].as_py())
    views = ScaleEncoder(mean=scaler.mean, std=scaler.std, missing=0.0, log1p=True)
    return [
        Column("user_views", "number", encoder=views),
        Column("traffic_source", "bucket", encoder=BucketEncoder(boundaries=(2.0, 3.0))),
    ]
