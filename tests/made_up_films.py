"""Raw files in the layout of MovieLens 20M/25M, made up: tests and benchmarks of any size without a download."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.random import Generator
from numpy.typing import NDArray

from recspec.datasets.synthetic import made_up_titles, ratings_per_user

Ids = NDArray[np.int64]
GENRES: Sequence[str] = """
Action Adventure Animation Children Comedy Crime Documentary Drama Fantasy Film-Noir Horror Musical Mystery Romance
Sci-Fi Thriller War Western
""".split()
MOST_STRANDS = 4  # finer tastes inside a genre, where there are enough items
ITEMS_PER_STRAND = 40  # least number of items of a strand; users who rate 70 items must not run out of items they like
FAVOURITES = 3  # number of genres that a user rates most
SECONDS_PER_DAY = 86_400
FIRST_DAY, LAST_DAY = 9_500, 17_000  # first and last day on which users join, since 1970: 1996 to 2016


def write_movielens_like(
    folder: Path, *, num_users: int, num_items: int, num_ratings: int, seed: int = 0, ratings_per_block: int = 1_000_000
) -> None:
    """Write `ratings.csv` and `movies.csv` in the layout of MovieLens 20M/25M, with made-up titles.

    Each user has a few favourite genres and a favourite strand in each. Popularity of items and activity of users
    follow power laws. So popularity is a fair model, and a model that finds the tastes is much better. Memory holds one
    block of ratings at a time. Equal arguments give equal bytes.

    Args:
        num_users: Each rates at least min(20, ratings per user) items and at most half of them.
        num_ratings: Exact number of rows.
    """
    if num_users < 1 or num_items < 2 or not num_users <= num_ratings <= num_users * (num_items // 2):
        raise ValueError(
            f"can't spread {num_ratings} ratings over {num_users} users: each rates 1 to half of the {num_items} items"
        )
    folder.mkdir(parents=True, exist_ok=True)
    catalogue = _Catalogue(num_items, seed)
    catalogue.write(folder / "movies.csv")
    counts = ratings_per_user(num_users, num_items, num_ratings, np.random.default_rng((seed, 1)))
    schema = pa.schema(
        [("userId", pa.int64()), ("movieId", pa.int64()), ("rating", pa.string()), ("timestamp", pa.int64())]
    )
    options = pa.csv.WriteOptions(quoting_style="none", quoting_header="none")
    with pa.csv.CSVWriter(folder / "ratings.csv", schema, write_options=options) as writer:
        for number, (start, stop) in enumerate(_blocks(counts, ratings_per_block)):
            rng = np.random.default_rng((seed, 2, number))
            writer.write(pa.table(_rate(catalogue, start, counts[start:stop], rng), schema=schema))


class _Catalogue:
    """Items; the strands of all genres are numbered together: genre * strands + strand."""

    def __init__(self, num_items: int, seed: int) -> None:
        rng = np.random.default_rng((seed, 0))
        self.num_items = num_items
        self.strands = int(np.clip(num_items // (len(GENRES) * ITEMS_PER_STRAND), 1, MOST_STRANDS))
        self.movie_ids = np.sort(rng.choice(np.arange(1, 3 * num_items + 1), num_items, replace=False))
        self.genre_share = (np.arange(len(GENRES)) + 2.0) ** -0.8
        self.genre_share = rng.permutation(self.genre_share / self.genre_share.sum())
        self.strand = rng.permutation(np.arange(num_items) % (len(GENRES) * self.strands))
        self.popularity = rng.permutation((np.arange(num_items) + 1 + num_items / 100) ** -1.0)
        self.quality = rng.normal(0, 0.4, num_items) + 0.15 * np.log(self.popularity / self.popularity.mean())
        self.titles = made_up_titles(num_items, rng)
        self.second_genre = rng.integers(0, len(GENRES), num_items)
        self.draw_any = _drawer(np.zeros(num_items, np.int64), self.popularity)
        self.draw = _drawer(self.strand, self.popularity)

    def write(self, path: Path) -> None:
        genre = self.strand // self.strands
        pairs = zip(genre.tolist(), self.second_genre.tolist(), strict=True)
        names = ["|".join(sorted({GENRES[genre] for genre in pair})) for pair in pairs]
        table = pa.table({"movieId": self.movie_ids, "title": self.titles, "genres": names})
        pa.csv.write_csv(table, path, pa.csv.WriteOptions(quoting_style="needed", quoting_header="none"))


def _drawer(group: Ids, weight: NDArray[np.float64]) -> Callable[[Ids, Generator], Ids]:
    """A function that draws a member of each given group by weight, or of the next group if one is empty.

    The cumulative weights of each group are raised by its number, so one binary search draws from any mix of groups.
    """
    order = np.argsort(group, kind="stable")
    sorted_group, sorted_weight = group[order], weight[order]
    total = np.bincount(sorted_group, sorted_weight)
    before = (np.cumsum(total) - total)[sorted_group]
    share = (np.cumsum(sorted_weight) - before) / total[sorted_group]
    cumulative = sorted_group + np.clip(share, 0.0, 1.0)
    groups = np.unique(sorted_group)

    def draw(wanted: Ids, rng: Generator) -> Ids:
        place = np.minimum(np.searchsorted(groups, wanted), len(groups) - 1)
        found = np.searchsorted(cumulative, groups[place] + rng.random(len(wanted)), side="left")
        return np.asarray(order[np.minimum(found, len(order) - 1)], np.int64)

    return draw


def _blocks(counts: Ids, rows: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of users with about `rows` rows each, at least one user in each."""
    ends = np.cumsum(counts)
    start = 0
    while start < len(counts):
        before = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, before + rows, side="right")), start + 1)
        yield start, stop
        start = stop


def _rate(catalogue: _Catalogue, first_user: int, counts: Ids, rng: Generator) -> dict[str, Ids | pa.Array]:
    """The ratings of consecutive users, sorted by user and movie as MovieLens sorts them."""
    genres = rng.choice(len(GENRES), (len(counts), FAVOURITES), p=catalogue.genre_share)
    tastes = genres * catalogue.strands + rng.integers(0, catalogue.strands, genres.shape)
    user, item = _distinct_items(catalogue, tastes, counts, rng)
    liked = (catalogue.strand[item][:, None] == tastes[user]).any(axis=1)
    stars = 3.1 + 0.8 * liked + catalogue.quality[item] + rng.normal(0, 0.7, len(item))
    half_stars = np.clip(np.rint(stars * 2), 1, 10).astype(np.int64)
    order = np.lexsort((item, user))
    return {
        "userId": (first_user + 1 + user)[order],
        "movieId": catalogue.movie_ids[item][order],
        "rating": pa.array([f"{half / 2}" for half in range(11)]).take(pa.array(half_stars[order])),
        "timestamp": _timestamps(user, counts, rng)[order],
    }


def _distinct_items(catalogue: _Catalogue, tastes: Ids, counts: Ids, rng: Generator) -> tuple[Ids, Ids]:
    """Draw `counts` distinct items of each user, in random order; rows are grouped by user."""
    num_items = catalogue.num_items
    keys = np.empty(0, np.int64)
    missing, attempt = counts, 0
    while missing.any():
        user = np.repeat(np.arange(len(counts)), missing + missing // 3 + 1)
        item = _drawn_by_taste(catalogue, tastes, user, rng)
        # Users who run out of favourites take more and more of any items, so the loop ends.
        anything = rng.random(len(user)) < min(0.05 * attempt, 0.5)
        item[anything] = rng.integers(0, num_items, int(anything.sum()))
        drawn = np.concatenate([keys, user * num_items + item])
        _, first = np.unique(drawn, return_index=True)
        drawn = drawn[np.sort(first)]
        drawn = drawn[np.argsort(drawn // num_items, kind="stable")]
        user = drawn // num_items
        starts = np.searchsorted(user, np.arange(len(counts)))
        keys = drawn[np.arange(len(drawn)) - starts[user] < counts[user]]
        missing, attempt = counts - np.bincount(keys // num_items, minlength=len(counts)), attempt + 1
    # Late draws are atypical; the shuffle spreads them, because the last item of a user is held out for test.
    keys = rng.permutation(keys)
    keys = keys[np.argsort(keys // num_items, kind="stable")]
    return keys // num_items, keys % num_items


def _drawn_by_taste(catalogue: _Catalogue, tastes: Ids, user: Ids, rng: Generator) -> Ids:
    """Draw an item per row: of a favourite strand (65 %), elsewhere in its genre (15 %), or a popular one (20 %)."""
    which = np.minimum(rng.geometric(0.5, len(user)) - 1, FAVOURITES - 1)
    strand = tastes[user, which]
    kind = rng.random(len(user))
    elsewhere = strand // catalogue.strands * catalogue.strands + rng.integers(0, catalogue.strands, len(user))
    item = catalogue.draw(np.where(kind < 0.15, elsewhere, strand), rng)
    popular = kind > 0.8
    item[popular] = catalogue.draw_any(np.zeros(int(popular.sum()), np.int64), rng)
    return item


def _timestamps(user: Ids, counts: Ids, rng: Generator) -> Ids:
    """Seconds since 1970: users rate in sittings, with seconds between ratings and days between sittings."""
    joined = rng.integers(FIRST_DAY, LAST_DAY, len(counts)) * SECONDS_PER_DAY
    gap = rng.exponential(20.0, len(user))
    gap += np.where(rng.random(len(user)) < 0.02, rng.exponential(10.0 * SECONDS_PER_DAY, len(user)), 0.0)
    elapsed = np.cumsum(gap)
    since_first = elapsed - elapsed[np.cumsum(counts) - counts][user]
    return np.asarray(joined[user] + since_first, np.int64)
