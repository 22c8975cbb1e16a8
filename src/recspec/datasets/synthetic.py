"""Made-up data whose structure is known: first runs, tests and size measurements need no download.

Two kinds. `write_movielens_like` writes raw files in the MovieLens layout, of any size. The dataset `synthetic` is
prepared at once, and keeps beside every row the score that the best possible model would give it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

# --- raw files in the MovieLens layout -------------------------------------------------------------------------------

GENRES = (
    "Action", "Adventure", "Animation", "Children", "Comedy", "Crime", "Documentary", "Drama", "Fantasy", "Film-Noir",
    "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
FIRST_WORDS = (
    "Silent", "Golden", "Broken", "Hidden", "Crimson", "Distant", "Electric", "Forgotten", "Last", "Burning", "Quiet",
    "Winter", "Midnight", "Paper", "Velvet", "Hollow", "Northern", "Savage", "Gentle", "Iron", "Lonely", "Scarlet",
    "Second", "Sleeping", "Stolen", "Summer", "Tangled", "Wandering", "Wild", "Wooden", "Empty", "Endless", "Fallen",
    "First", "Frozen", "Glass", "Infinite", "Little", "Lost", "Painted",
)  # fmt: skip
SECOND_WORDS = (
    "Harbor", "River", "Garden", "Empire", "Promise", "Letters", "Mountain", "Station", "Circus", "Orchard", "Shadow",
    "Kingdom", "Voyage", "Witness", "Bridge", "Island", "Carnival", "Detective", "Lighthouse", "Machine", "Melody",
    "Mirror", "Morning", "Neighbor", "Ocean", "Palace", "Planet", "Road", "Season", "Secret", "Soldier", "Stranger",
    "Teacher", "Thief", "Tiger", "Tower", "Treasure", "Valley", "Window", "Wolf",
)  # fmt: skip
STRANDS = 4
"""Finer tastes inside a genre."""
FAVOURITES = 3
"""Genres that a user mostly rates."""
SECONDS_PER_DAY = 86_400
FIRST_DAY, LAST_DAY = 9_500, 18_000
"""Days since 1970 between which people join: 1996 to 2019."""


def write_movielens_like(
    folder: Path, *, users: int, items: int, ratings: int, seed: int = 0, ratings_per_block: int = 1_000_000
) -> None:
    """Write `ratings.csv` and `movies.csv` in the layout of MovieLens 20M/25M, with made-up titles.

    Each user has a few favourite genres and, in each, a favourite strand; items are popular by a power law, and people
    rate by a power law too. So popularity is a fair guess and a model that finds the tastes is a much better one.
    Memory is bounded by the block, whatever the number of ratings. The same arguments give the same bytes.

    Args:
        users: Each rates at least min(20, ratings // users) items and at most half of them.
        ratings: Exactly so many rows.
    """
    if users < 1 or items < 2 or not users <= ratings <= users * (items // 2):
        raise ValueError(f"can't spread {ratings} ratings over {users} users and {items} items: 1 to items/2 a user")
    folder.mkdir(parents=True, exist_ok=True)
    catalogue = _Catalogue(items, seed)
    catalogue.write(folder / "movies.csv")
    counts = _ratings_per_user(users, items, ratings, np.random.default_rng((seed, 1)))
    schema = pa.schema([("userId", pa.int64()), ("movieId", pa.int64()), ("rating", pa.string()),
                        ("timestamp", pa.int64())])  # fmt: skip
    options = pa.csv.WriteOptions(quoting_style="none", quoting_header="none")
    with pa.csv.CSVWriter(folder / "ratings.csv", schema, write_options=options) as writer:
        for number, (start, stop) in enumerate(_blocks(counts, ratings_per_block)):
            rng = np.random.default_rng((seed, 2, number))
            writer.write(pa.table(_rate(catalogue, start, counts[start:stop], rng), schema=schema))


class _Catalogue:
    """Items with their raw id, genre, strand, quality, and the power law of their popularity."""

    def __init__(self, items: int, seed: int) -> None:
        rng = np.random.default_rng((seed, 0))
        self.movie_ids = np.sort(rng.choice(np.arange(1, 3 * items + 1), items, replace=False))
        self.cluster = rng.permutation(np.arange(items) % (len(GENRES) * STRANDS))
        popularity = rng.permutation((np.arange(items) + 10.0) ** -0.9)
        self.quality = rng.normal(0, 0.5, items)
        self.titles = _titles(items, rng)
        self.second_genre = rng.integers(0, len(GENRES), items)
        # One row of cumulative weights for every cluster, each raised by the cluster's number: one searchsorted
        # then draws from any mixture of clusters.
        self.order = np.argsort(self.cluster, kind="stable")
        sorted_clusters = self.cluster[self.order]
        total = np.bincount(sorted_clusters, popularity[self.order], minlength=len(GENRES) * STRANDS)
        share = np.cumsum(popularity[self.order]) - np.concatenate([[0.0], np.cumsum(total)])[sorted_clusters]
        self.cumulative = sorted_clusters + np.minimum(share / total[sorted_clusters], 1.0)
        self.clusters = np.unique(sorted_clusters)

    def draw(self, cluster: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """One item from each given cluster, by popularity."""
        place = np.searchsorted(self.cumulative, cluster + rng.random(len(cluster)), side="left")
        return self.order[np.minimum(place, len(self.order) - 1)]

    def write(self, path: Path) -> None:
        genre = self.cluster // STRANDS
        second = np.where(self.second_genre == genre, -1, self.second_genre)
        names = [GENRES[a] if b < 0 else "|".join(sorted((GENRES[a], GENRES[b]))) for a, b in zip(genre, second)]
        pa.csv.write_csv(
            pa.table({"movieId": self.movie_ids, "title": self.titles, "genres": names}),
            path,
            pa.csv.WriteOptions(quoting_style="needed", quoting_header="none"),
        )


def _titles(items: int, rng: np.random.Generator) -> list[str]:
    """Readable titles, no two alike."""
    patterns = ("The {} {}", "{} {}", "A {} {}", "Return to the {} {}", "Beyond the {} {}", "My {} {}")
    base = [
        pattern.format(first, second) for pattern in patterns for second in SECOND_WORDS for first in FIRST_WORDS
    ]
    picked = rng.permutation(len(base))
    years = rng.integers(1950, 2020, items)
    parts = ["" if part == 0 else f" {part + 1}" for part in range(items // len(base) + 1)]
    return [f"{base[picked[i % len(base)]]}{parts[i // len(base)]} ({years[i]})" for i in range(items)]


def _ratings_per_user(users: int, items: int, ratings: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """How many items each user rates: heavy-tailed, between the least and half of the items, summing to `ratings`."""
    least, most = min(20, ratings // users, items // 2), items // 2
    weight = rng.lognormal(0.0, 1.1, users)
    counts = np.full(users, least)
    while (left := ratings - int(counts.sum())) > 0:
        open_users = np.flatnonzero(counts < most)
        more = np.floor(left * weight[open_users] / weight[open_users].sum()).astype(np.int64)
        if not more.any():
            more[:left] = 1
        counts[open_users] = np.minimum(counts[open_users] + more, most)
    return counts


def _blocks(counts: NDArray[np.int64], rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of users with about `rows` rows each, at least one user in each."""
    ends = np.cumsum(counts)
    start = 0
    while start < len(counts):
        before = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, before + rows, side="right")), start + 1)
        yield start, stop
        start = stop


def _rate(
    catalogue: _Catalogue, first_user: int, counts: NDArray[np.int64], rng: np.random.Generator
) -> dict[str, NDArray[np.int64] | pa.Array]:
    """The ratings of consecutive users, sorted by user and movie as MovieLens sorts them."""
    favourites = rng.integers(0, len(GENRES), (len(counts), FAVOURITES))
    strands = rng.integers(0, STRANDS, (len(counts), FAVOURITES))
    user, item = _distinct_items(catalogue, favourites * STRANDS + strands, counts, rng)
    liked = (catalogue.cluster[item][:, None] == favourites[user] * STRANDS + strands[user]).any(axis=1)
    stars = 3.1 + 0.8 * liked + catalogue.quality[item] + rng.normal(0, 0.7, len(item))
    half_stars = np.clip(np.rint(stars * 2), 1, 10).astype(np.int64)
    order = np.lexsort((item, user))
    return {
        "userId": (first_user + 1 + user)[order],
        "movieId": catalogue.movie_ids[item][order],
        "rating": pa.array([f"{half / 2}" for half in range(11)]).take(pa.array(half_stars[order])),
        "timestamp": _timestamps(user, counts, rng)[order],
    }


def _distinct_items(
    catalogue: _Catalogue, tastes: NDArray[np.int64], counts: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each user so many different items, in the order drawn; rows are grouped by user."""
    num_items = len(catalogue.order)
    keys = np.empty(0, np.int64)
    missing = counts
    for attempt in range(1000):
        user = np.repeat(np.arange(len(counts)), missing + missing // 3 + 1)
        anywhere = rng.random(len(user)) < min(0.1 + 0.1 * attempt, 1.0)
        item = _drawn_by_taste(catalogue, tastes, user, rng)
        item[anywhere] = rng.integers(0, num_items, int(anywhere.sum()))
        drawn = np.concatenate([keys, user * num_items + item])
        _, first = np.unique(drawn, return_index=True)
        drawn = drawn[np.sort(first)]
        drawn = drawn[np.argsort(drawn // num_items, kind="stable")]
        user = drawn // num_items
        starts = np.searchsorted(user, np.arange(len(counts)))
        keys = drawn[np.arange(len(drawn)) - starts[user] < counts[user]]
        missing = counts - np.bincount(keys // num_items, minlength=len(counts))
        if not missing.any():
            break
    return keys // num_items, keys % num_items


def _drawn_by_taste(
    catalogue: _Catalogue, tastes: NDArray[np.int64], user: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """One item for each row: mostly from the user's favourite strands, sometimes elsewhere in the genre."""
    which = np.minimum(rng.geometric(0.5, len(user)) - 1, FAVOURITES - 1)
    cluster = tastes[user, which]
    astray = rng.random(len(user)) < 0.25
    cluster = np.where(astray, cluster // STRANDS * STRANDS + rng.integers(0, STRANDS, len(user)), cluster)
    known = catalogue.clusters[np.minimum(np.searchsorted(catalogue.clusters, cluster), len(catalogue.clusters) - 1)]
    return catalogue.draw(known, rng)


def _timestamps(user: NDArray[np.int64], counts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Seconds since 1970: people rate in sittings, some seconds between two ratings and days between two sittings."""
    joined = rng.integers(FIRST_DAY, LAST_DAY, len(counts)) * SECONDS_PER_DAY
    gap = rng.exponential(20.0, len(user))
    gap += np.where(rng.random(len(user)) < 0.02, rng.exponential(30.0 * SECONDS_PER_DAY, len(user)), 0.0)
    elapsed = np.cumsum(gap)
    first = np.cumsum(counts) - counts
    return joined[user] + (elapsed - elapsed[first][user]).astype(np.int64)
