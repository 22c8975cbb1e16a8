"""Raw files in the shape of Outbrain's click prediction tables, of any size, with clicks that can be foreseen.

A display shows a few ads beside a landing page and exactly one is clicked: the one of largest appeal, which adds up

- how good the ad is (each ad's own number, so its share of clicks says much),
- whether the ad's page and the landing page are about the same category (1.5 more),
- whether the advertiser suits the reader's country (each pair's own number),

and Gumbel noise, so that clicks follow a softmax of the appeal. Columns that nothing depends on (campaign, platform,
entities, ...) are there as in the real tables, and so are their gaps: `\\N`, empty fields, pages that no table
describes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray

EPOCH = 1_465_876_799_998
"""Milliseconds since 1970 that the publisher's timestamps count from."""
DAY = 86_400_000
DAYS = 13
PLACES = ("US>CA>807", "US>NY>501", "US>TX>623", "US>CA", "US", "GB>H9", "GB", "CA>ON", "CA>BC", "AU>02", "IN", "DE>16")
PLACE_WEIGHTS = np.array([20, 15, 12, 4, 8, 9, 5, 8, 5, 5, 6, 3]) / 100
NULL = "\\N"

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class World:
    """Who and what there is: documents with their categories, ads with their documents and advertisers."""

    rng: np.random.Generator
    num_documents: int
    num_ads: int
    num_users: int
    num_categories: int = 30
    num_topics: int = 60
    num_entities: int = 400
    category: Numbers = field(init=False)
    """Main category of each document."""
    popularity: NDArray[np.float64] = field(init=False)
    landing: Numbers = field(init=False)
    """Documents that ads stand beside, the most read first; the others are only promoted."""
    ad_document: Numbers = field(init=False)
    ad_advertiser: Numbers = field(init=False)
    ad_campaign: Numbers = field(init=False)
    quality: NDArray[np.float64] = field(init=False)
    affinity: NDArray[np.float64] = field(init=False)
    """Of each advertiser in each country."""

    def __post_init__(self) -> None:
        rng = self.rng
        num_promoted = max(4, self.num_documents // 3)
        num_advertisers = max(3, self.num_ads // 40)
        advertiser = rng.integers(0, num_advertisers, self.num_ads)
        settled = {
            "category": rng.integers(0, self.num_categories, self.num_documents),
            "landing": np.arange(num_promoted, self.num_documents),
            "ad_document": rng.integers(0, num_promoted, self.num_ads),
            "ad_advertiser": advertiser,
            "ad_campaign": advertiser * 3 + rng.integers(0, 3, self.num_ads),
            "quality": rng.normal(0, 1.2, self.num_ads),
            "affinity": rng.normal(0, 0.6, (num_advertisers, len({place[:2] for place in PLACES}))),
            "popularity": 1 / np.arange(1, self.num_ads + 1) ** 0.7,
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)


def write(
    folder: Path, *, num_rows: int = 2000, seed: int = 0, page_views: bool = True, clicks_test: bool = True
) -> Path:
    """Write all tables into `folder`; `clicks_train.csv` gets about `num_rows` rows."""
    folder.mkdir(parents=True)
    num_displays = max(4, num_rows // 5)
    world = World(
        np.random.default_rng(seed),
        num_documents=max(24, num_rows // 60),
        num_ads=max(20, num_rows // 120),
        num_users=max(4, num_displays * 3 // 4),
    )
    num_unlabelled = num_displays // 10 if clicks_test else 0
    events = _events(world, num_displays + num_unlabelled)
    display, ad, clicked = _clicks(world, events)
    labelled = display < num_displays
    tables = {
        "clicks_train": pa.table(
            {"display_id": display[labelled] + 1, "ad_id": _ad_ids(ad[labelled]), "clicked": clicked[labelled]}
        ),
        "events": _event_table(world, events),
        "promoted_content": _promoted(world),
        "documents_meta": _meta(world),
        **{f"documents_{kind}": table for kind, table in _aspects(world).items()},
    }
    if clicks_test:
        tables["clicks_test"] = pa.table({"display_id": display[~labelled] + 1, "ad_id": _ad_ids(ad[~labelled])})
    if page_views:
        tables["page_views"] = _page_views(world, events, display, ad, clicked)
    options = pa.csv.WriteOptions(include_header=False, quoting_style="none")
    for name, table in tables.items():
        with (folder / f"{name}.csv").open("wb") as file:
            file.write(",".join(table.column_names).encode() + b"\n")
            pa.csv.write_csv(table, file, options)
    return folder


# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Events:
    """One entry a display."""

    user: Numbers
    document: Numbers
    time: Numbers
    place: Numbers
    platform: Numbers


def _events(world: World, count: int) -> Events:
    rng = world.rng
    read = 1 / np.arange(1, len(world.landing) + 1) ** 0.8
    day = np.arange(count) % DAYS  # every day has displays, however few there are
    return Events(
        user=rng.integers(0, world.num_users, count),
        document=rng.choice(world.landing, count, p=read / read.sum()),
        time=day * DAY + rng.integers(0, DAY, count),
        place=rng.choice(len(PLACES), count, p=PLACE_WEIGHTS),
        platform=rng.choice([1, 2, 3], count, p=[0.45, 0.4, 0.15]),
    )


def _clicks(world: World, events: Events) -> tuple[Numbers, Numbers, Numbers]:
    """Display and ad of every row, and 1 where the ad was clicked: 2 to 12 ads a display, none twice in one."""
    rng = world.rng
    sizes = 2 + rng.binomial(10, 0.33, len(events.time))
    display = np.repeat(np.arange(len(sizes)), sizes)
    drawn = rng.choice(world.num_ads, len(display), p=world.popularity / world.popularity.sum())
    pairs = np.unique(display * world.num_ads + drawn)
    display, ad = pairs // world.num_ads, pairs % world.num_ads
    noisy = _appeal(world, events, display, ad) + rng.gumbel(size=len(ad))
    first = np.flatnonzero(np.diff(display, prepend=-1))
    best = np.repeat(np.maximum.reduceat(noisy, first), np.diff(first, append=len(ad)))
    shuffled = np.lexsort((rng.random(len(ad)), display))  # a display's ads stand in no order
    return display[shuffled], ad[shuffled], (noisy == best).astype(np.int64)[shuffled]


def _appeal(world: World, events: Events, display: Numbers, ad: Numbers) -> NDArray[np.float64]:
    same = world.category[world.ad_document[ad]] == world.category[events.document[display]]
    suits = world.affinity[world.ad_advertiser[ad], _countries()[events.place[display]]]
    total: NDArray[np.float64] = world.quality[ad] + 1.5 * same + suits
    return total


def _countries() -> Numbers:
    codes = [place[:2] for place in PLACES]
    return np.array([sorted(set(codes)).index(code) for code in codes])


# --- tables ----------------------------------------------------------------------------------------------------------


def _ad_ids(ad: Numbers) -> Numbers:
    return ad * 7 + 11


def _document_ids(document: Numbers) -> Numbers:
    return document * 13 + 1001


def _names(prefix: str, numbers: Numbers, width: int) -> pa.Array:
    """Hexadecimal names of a fixed width, such as the publisher's uuid."""
    distinct, places = np.unique(numbers, return_inverse=True)
    names = pa.array([f"{prefix}{number * 2654435761 % 2**40:0{width - len(prefix)}x}" for number in distinct.tolist()])
    return names.take(pa.array(places))


def _with_gaps(values: pa.Array, rng: np.random.Generator, share: float) -> pa.Array:
    """Text, of which a share is missing: half of it written `\\N`, half empty."""
    draw = pa.array(rng.random(len(values)))
    text = values.cast(pa.string())
    return pc.if_else(pc.less(draw, share / 2), NULL, pc.if_else(pc.less(draw, share), "", text))


def _event_table(world: World, events: Events) -> pa.Table:
    places = pa.array(PLACES).take(pa.array(events.place))
    return pa.table(
        {
            "display_id": np.arange(len(events.time)) + 1,
            "uuid": _names("u", events.user, 14),
            "document_id": _document_ids(events.document),
            "timestamp": events.time,
            "platform": _with_gaps(pa.array(events.platform), world.rng, 0.002),
            "geo_location": _with_gaps(places, world.rng, 0.01),
        }
    )


def _promoted(world: World) -> pa.Table:
    ads = np.arange(world.num_ads)
    return pa.table(
        {
            "ad_id": _ad_ids(ads),
            "document_id": _document_ids(world.ad_document),
            "campaign_id": world.ad_campaign + 1,
            "advertiser_id": world.ad_advertiser + 1,
        }
    )


def _meta(world: World) -> pa.Table:
    """Sources and publishers of all documents but one in fifty; a few were published after they were read."""
    rng = world.rng
    documents = np.flatnonzero(rng.random(world.num_documents) > 0.02)
    source = rng.integers(0, max(4, world.num_documents // 10), len(documents))
    age = rng.exponential(200, len(documents)) - 8  # days
    seconds = EPOCH // 1000 - (age * 86_400).astype(np.int64)
    published = pc.strftime(pa.array(seconds, pa.timestamp("s")), format="%Y-%m-%d %H:%M:%S")
    return pa.table(
        {
            "document_id": _document_ids(documents),
            "source_id": _with_gaps(pa.array(source + 1), rng, 0.01),
            "publisher_id": _with_gaps(pa.array(source // 2 + 1), rng, 0.03),
            "publish_time": _with_gaps(published, rng, 0.3),
        }
    )


def _aspects(world: World) -> dict[str, pa.Table]:
    """What documents are about: categories (the main one first), topics and entities, each with a confidence."""
    rng = world.rng
    documents = np.arange(world.num_documents)
    second = rng.random(world.num_documents) < 0.6
    other = (world.category + rng.integers(1, world.num_categories, world.num_documents)) % world.num_categories
    categories = pa.table(
        {
            "document_id": _document_ids(np.concatenate([documents, documents[second]])),
            "category_id": np.concatenate([world.category, other[second]]) + 1000,
            "confidence_level": np.concatenate([np.full(len(documents), 0.92), np.full(second.sum(), 0.07)]),
        }
    )
    tables = {"categories": categories}
    for kind, most, count in (("topic", 6, world.num_topics), ("entity", 5, world.num_entities)):
        sizes = rng.integers(0, most + 1, world.num_documents)
        document = np.repeat(documents, sizes)
        pairs = rng.permutation(np.unique(document * count + rng.integers(0, count, len(document))))
        value = pairs % count
        tables["topics" if kind == "topic" else "entities"] = pa.table(
            {
                "document_id": _document_ids(pairs // count),
                f"{kind}_id": value if kind == "topic" else _names("f", value, 32),
                "confidence_level": np.round(rng.uniform(0.01, 0.99, len(pairs)), 6),
            }
        )
    return tables


def _page_views(world: World, events: Events, display: Numbers, ad: Numbers, clicked: Numbers) -> pa.Table:
    """The events' own views, views before them, and the promoted page of some clicks right after: the leak."""
    rng = world.rng
    earlier = rng.integers(0, len(events.time), 2 * len(events.time))
    taken = np.flatnonzero((clicked == 1) & (rng.random(len(clicked)) < 0.3))
    shown = display[taken]
    document = [events.document, rng.integers(0, world.num_documents, len(earlier)), world.ad_document[ad[taken]]]
    time = [events.time, events.time[earlier] - rng.integers(1, DAY, len(earlier)), events.time[shown] + 5_000]
    event = np.concatenate([np.arange(len(events.time)), earlier, shown])
    order = rng.permutation(np.flatnonzero(np.concatenate(time) >= 0))
    event = event[order]
    return pa.table(
        {
            "uuid": _names("u", events.user[event], 14),
            "document_id": _document_ids(np.concatenate(document)[order]),
            "timestamp": np.concatenate(time)[order],
            "platform": events.platform[event],
            "geo_location": pa.array(PLACES).take(pa.array(events.place[event])),
            "traffic_source": rng.choice([1, 2, 3], len(event), p=[0.6, 0.25, 0.15]),
        }
    )
