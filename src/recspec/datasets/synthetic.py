"""Made-up data whose structure is known: first runs, tests and size measurements need no download.

Two kinds. `write_movielens_like` writes raw files in the MovieLens layout, of any size. The dataset `synthetic` is
prepared at once, and keeps beside every row the score that the best possible model would give it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field, model_validator

from recspec import metrics
from recspec.datasets import clicks, interactions, prepared
from recspec.datasets.columns import Catalogue, Column
from recspec.datasets.histories import HistorySettings
from recspec.datasets.prepared import Prepared, Progress, silent
from recspec.feature_spec import FeatureSpec
from recspec.splits import by_share, leave_one_out
from recspec.storage import open_split
from recspec.tables import ROW, Backend, connect

NAME = "synthetic"


class Settings(HistorySettings):
    """What is made up."""

    kind: Literal["clicks", "interactions"] = Field(
        "clicks", description="clicks: labelled rows with features of every kind; interactions: who took what, in order"
    )
    num_users: int = Field(300, ge=2, description="users")
    num_items: int = Field(200, ge=8, description="items")
    num_rows: int = Field(20_000, ge=100, description="rows before they are split")
    num_negatives: int = Field(50, ge=1, description="interactions: candidates beside the positive in each series")
    seed: int = Field(0, ge=0, description="of everything drawn")

    @model_validator(mode="after")
    def _fits_the_kind(self) -> Settings:
        given = [name for name, field in HistorySettings.model_fields.items() if getattr(self, name) != field.default]
        if self.kind == "clicks" and given:
            raise ValueError(f"{' and '.join(given)}: of kind interactions; set kind=interactions too")
        return self


def prepare(
    raw: Path,  # noqa: ARG001
    out: Path,
    settings: Settings,
    *,
    engine: str = "duckdb",
    memory_limit: str | None = None,
    threads: int | None = None,
    progress: Progress = silent,
    force: bool = False,
) -> Prepared:
    """Make up a dataset; `raw` is not read.

    `metadata.summary.best_possible` holds what the best possible model scores on valid and test: of clicks the AUC and
    log loss of the probabilities that labels were drawn from (kept in the column `probability`), of interactions HR@10
    and NDCG@10 of the preferences that items were taken by.
    """

    def build(folder: Path) -> FeatureSpec:
        work = folder / "work"
        with connect(engine, folder=work, memory_limit=memory_limit, threads=threads) as backend:
            make = _make_clicks if settings.kind == "clicks" else _make_interactions
            return make(backend, folder, settings, progress)

    return prepared.run(prepared.Job(NAME, settings, [], out), build, force=force)


# --- clicks ----------------------------------------------------------------------------------------------------------

NUM_TAGS, MOST_TAGS = 30, 4
HOURS = 24


def _make_clicks(backend: Backend, folder: Path, settings: Settings, progress: Progress) -> FeatureSpec:
    rng = np.random.default_rng(settings.seed)
    users, items, rows = _draw_clicks(settings, rng)
    file = folder / "work" / "rows.parquet"
    pq.write_table(rows, file)
    table = backend.read_parquet([file], row=True)
    user_columns = (Column("age", "number"), Column("gender", "category"))
    item_columns = (Column("price", "number"), Column("tags", "list", separator="|"))
    source = clicks.Source(
        dataset=NAME,
        rows=by_share(table, row=ROW, valid=0.1, test=0.1, seed=settings.seed),
        ids={"user": Column("user_id", "category"), "item": Column("item_id", "category")},
        columns={
            "user": user_columns,
            "item": item_columns,
            "context": (Column("hour", "category"), Column("speed", "number")),
        },
        users=Catalogue(users, "user_id", user_columns),
        items=Catalogue(items, "item_id", item_columns, {"title": "title"}),
        grouped="values",
        kept=("probability",),
    )
    return _with_best(clicks.write(backend, folder, source, progress=progress), _best_of_clicks)


def _draw_clicks(settings: Settings, rng: np.random.Generator) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Users, items and rows. The logit of a click is a sum that every kind of feature has a part in."""
    num_users, num_items, num_rows = settings.num_users, settings.num_items, settings.num_rows
    taste = rng.normal(0, 0.5**0.5, (num_users, 4))
    trait = rng.normal(0, 0.5**0.5, (num_items, 4))
    age, price = rng.integers(18, 80, num_users), np.round(rng.lognormal(2, 0.5, num_items), 2)
    gender = rng.integers(0, 2, num_users)
    num_tags = rng.integers(0, MOST_TAGS + 1, num_items)
    tags = [np.sort(rng.choice(NUM_TAGS, count, replace=False)) for count in num_tags]
    tag_effect = rng.normal(0, 0.8, NUM_TAGS)
    user_effect = rng.normal(0, 0.5, num_users) + (age - 48) / 40 + 0.3 * gender
    item_effect = rng.normal(0, 0.5, num_items) - (np.log(price) - 2) * 0.8
    item_effect += [tag_effect[own].sum() for own in tags]

    user = _popular(num_users, num_rows, rng)
    item = _popular(num_items, num_rows, rng)
    hour, speed = rng.integers(0, HOURS, num_rows), rng.normal(5, 2, num_rows)
    logit = (taste[user] * trait[item]).sum(axis=1) + user_effect[user] + item_effect[item]
    logit += 0.6 * np.sin(hour * 2 * np.pi / HOURS) + 0.2 * (speed - 5) - 0.5
    probability = (1 / (1 + np.exp(-logit))).astype(np.float32)
    label = (rng.random(num_rows) < probability).astype(np.int64)

    user_ids = np.array([f"u{number:05d}" for number in range(num_users)])
    item_ids = 1000 + 7 * np.arange(num_items)
    tag_texts = np.array(["|".join(f"tag{tag:02d}" for tag in own) for own in tags])
    genders = np.array(["f", "m"])[gender]
    users = pa.table({"user_id": user_ids, "age": age, "gender": genders})
    items = pa.table({"item_id": item_ids, "price": price, "tags": tag_texts, "title": _titles(num_items, rng)})
    rows = pa.table(
        {
            "user_id": user_ids[user],
            "item_id": item_ids[item],
            "age": age[user],
            "gender": genders[user],
            "price": price[item],
            "tags": tag_texts[item],
            "hour": hour,
            "speed": np.round(speed, 3),
            "label": label,
            "group": user_ids[user],
            "probability": probability,
        }
    )
    return users, items, rows


def _popular(number: int, rows: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """So many draws from `number` things that are popular by a power law."""
    weight = (np.arange(number) + 5.0) ** -0.7
    return rng.permutation(number)[rng.choice(number, rows, p=weight / weight.sum())]


def _best_of_clicks(spec: FeatureSpec, split: str) -> dict[str, float]:
    columns = open_split(spec, split, ["probability", clicks.LABEL]).read(0, 2**62)
    probability, label = np.asarray(columns["probability"], np.float64), np.asarray(columns[clicks.LABEL])
    return {
        "auc": metrics.auc(probability, label),
        "log_loss": metrics.log_loss_of_probabilities(probability, label),
    }


# --- interactions ----------------------------------------------------------------------------------------------------


def _make_interactions(backend: Backend, folder: Path, settings: Settings, progress: Progress) -> FeatureSpec:
    rng = np.random.default_rng(settings.seed)
    preference = _preferences(settings, rng)
    file = folder / "work" / "rows.parquet"
    pq.write_table(_take_in_order(preference, settings, rng), file)
    table = backend.read_parquet([file], row=True)
    titles = pa.table({"item_id": np.arange(1, settings.num_items + 1), "title": _titles(settings.num_items, rng)})
    source = interactions.Source(
        dataset=NAME,
        rows=leave_one_out(table, by=interactions.USER, order=(interactions.TIMESTAMP, ROW)),
        items=Catalogue(titles, "item_id", (), {"title": "title"}),
    )
    spec = interactions.write(
        backend,
        folder,
        source,
        num_negatives=settings.num_negatives,
        seed=settings.seed,
        progress=progress,
        histories=settings.histories,
        train_negatives=settings.train_negatives,
        negatives=settings.negatives,
        reject_seen=settings.reject_seen,
    )

    def best(spec: FeatureSpec, split: str) -> dict[str, float]:
        columns = open_split(spec, split, [spec.user_id, spec.item_id, spec.label]).read(0, 2**62)
        user, item, label = (np.asarray(columns[name]) for name in (spec.user_id, spec.item_id, spec.label))
        raw_user, raw_item = (_raw_ids(folder, name)[ids] for name, ids in (("user_id", user), ("item_id", item)))
        ranking = metrics.rank_groups(preference[raw_user - 1, raw_item - 1], label, user, candidates=item)
        return {"hit_rate@10": metrics.hit_rate(ranking, 10), "ndcg@10": metrics.ndcg(ranking, 10)}

    return _with_best(spec, best)


def _preferences(settings: Settings, rng: np.random.Generator) -> NDArray[np.float64]:
    """(users, items) logits by which users take items."""
    taste = rng.normal(0, 1, (settings.num_users, 4))
    trait = rng.normal(0, 1, (settings.num_items, 4))
    return np.asarray(taste @ trait.T + rng.normal(0, 0.7, settings.num_items))


def _take_in_order(preference: NDArray[np.float64], settings: Settings, rng: np.random.Generator) -> pa.Table:
    """Each user takes some items, one after another, by the softmax of the preferences over those not yet taken.

    Adding Gumbel noise and sorting does so (Gumbel-top-k). So what the last item is among is known: the best ranking
    of any candidates not taken before is by preference.
    """
    num_users, num_items = preference.shape
    most = num_items // 2
    counts = _ratings_per_user(num_users, num_items, min(settings.num_rows, num_users * most), rng)
    noisy = preference + rng.gumbel(size=preference.shape)
    order = np.argsort(-noisy, axis=1)
    user = np.repeat(np.arange(num_users), counts)
    place = np.arange(len(user)) - np.repeat(np.cumsum(counts) - counts, counts)
    columns = {"user_id": user + 1, "item_id": order[user, place] + 1, "timestamp": place}
    shuffled = rng.permutation(len(user))
    return pa.table({name: column[shuffled] for name, column in columns.items()})


def _raw_ids(folder: Path, name: str) -> NDArray[np.int64]:
    """Raw values by id; there is none for id 0."""
    values = pq.read_table(folder / "vocabularies" / f"{name}.parquet").column("value").to_numpy()
    return np.concatenate([np.zeros(1, np.int64), values])


def _with_best(spec: FeatureSpec, best: _Best) -> FeatureSpec:
    """The specification whose summary says what the best possible model scores."""
    summary = spec.metadata["summary"]
    assert isinstance(summary, Mapping)
    scores = {split: best(spec, split) for split in ("valid", "test")}
    rounded = {split: {name: round(float(value), 6) for name, value in of.items()} for split, of in scores.items()}
    return spec.replace(metadata={**spec.metadata, "summary": {**summary, "best_possible": rounded}})


class _Best(Protocol):
    def __call__(self, spec: FeatureSpec, split: str) -> dict[str, float]: ...


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
MOST_STRANDS = 4
"""Finer tastes inside a genre, where there are enough items."""
ITEMS_PER_STRAND = 40
"""At least so many: people who rate 70 items must not run out of those they like."""
FAVOURITES = 3
"""Genres that a user mostly rates."""
SECONDS_PER_DAY = 86_400
FIRST_DAY, LAST_DAY = 9_500, 17_000
"""Days since 1970 between which people join: 1996 to 2016."""


def write_movielens_like(
    folder: Path,
    *,
    num_users: int,
    num_items: int,
    num_ratings: int,
    seed: int = 0,
    ratings_per_block: int = 1_000_000,
) -> None:
    """Write `ratings.csv` and `movies.csv` in the layout of MovieLens 20M/25M, with made-up titles.

    Each user has a few favourite genres and, in each, a favourite strand; items are popular by a power law, and people
    rate by a power law too. So popularity is a fair guess and a model that finds the tastes is a much better one.
    Memory is bounded by the block, whatever the number of ratings. The same arguments give the same bytes.

    Args:
        num_users: Each rates at least min(20, ratings a user) items and at most half of them.
        num_ratings: Exactly so many rows.
    """
    if num_users < 1 or num_items < 2 or not num_users <= num_ratings <= num_users * (num_items // 2):
        raise ValueError(
            f"can't spread {num_ratings} ratings over {num_users} users: each rates 1 to half of the {num_items} items"
        )
    folder.mkdir(parents=True, exist_ok=True)
    catalogue = _Catalogue(num_items, seed)
    catalogue.write(folder / "movies.csv")
    counts = _ratings_per_user(num_users, num_items, num_ratings, np.random.default_rng((seed, 1)))
    schema = pa.schema([("userId", pa.int64()), ("movieId", pa.int64()), ("rating", pa.string()),
                        ("timestamp", pa.int64())])  # fmt: skip
    options = pa.csv.WriteOptions(quoting_style="none", quoting_header="none")
    with pa.csv.CSVWriter(folder / "ratings.csv", schema, write_options=options) as writer:
        for number, (start, stop) in enumerate(_blocks(counts, ratings_per_block)):
            rng = np.random.default_rng((seed, 2, number))
            writer.write(pa.table(_rate(catalogue, start, counts[start:stop], rng), schema=schema))


class _Catalogue:
    """Items with their raw id, genre, strand, quality, and the power law of their popularity.

    Strands of all genres are numbered through: number = genre * strands + strand.
    """

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
        self.titles = _titles(num_items, rng)
        self.second_genre = rng.integers(0, len(GENRES), num_items)
        self._of_all = _Draw(np.zeros(num_items, np.int64), self.popularity)
        self._of_strand = _Draw(self.strand, self.popularity)

    def draw(self, strand: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """One item of each given strand, by popularity."""
        return self._of_strand(strand, rng)

    def draw_any(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """So many items, by popularity."""
        return self._of_all(np.zeros(count, np.int64), rng)

    def write(self, path: Path) -> None:
        """Write `movies.csv`."""
        genre = self.strand // self.strands
        second = np.where(self.second_genre == genre, -1, self.second_genre)
        pairs = zip(genre.tolist(), second.tolist(), strict=True)
        names = ["|".join(sorted(GENRES[genre] for genre in pair if genre >= 0)) for pair in pairs]
        pa.csv.write_csv(
            pa.table({"movieId": self.movie_ids, "title": self.titles, "genres": names}),
            path,
            pa.csv.WriteOptions(quoting_style="needed", quoting_header="none"),
        )


class _Draw:
    """Draws members of groups by their weights.

    One row of cumulative weights for every group, each raised by the group's number, so that a single binary search
    draws from any mixture of groups.
    """

    def __init__(self, group: NDArray[np.int64], weight: NDArray[np.float64]) -> None:
        self._order = np.argsort(group, kind="stable")
        sorted_group, sorted_weight = group[self._order], weight[self._order]
        total = np.bincount(sorted_group, sorted_weight)
        before = (np.cumsum(total) - total)[sorted_group]
        share = (np.cumsum(sorted_weight) - before) / total[sorted_group]
        self._cumulative = sorted_group + np.clip(share, 0.0, 1.0)
        self._groups = np.unique(sorted_group)

    def __call__(self, group: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """A member of each given group; of the next one where a group has none."""
        place = np.minimum(np.searchsorted(self._groups, group), len(self._groups) - 1)
        wanted = self._groups[place] + rng.random(len(group))
        found = np.searchsorted(self._cumulative, wanted, side="left")
        return np.asarray(self._order[np.minimum(found, len(self._order) - 1)], np.int64)


def _titles(items: int, rng: np.random.Generator) -> list[str]:
    """Readable titles, no two alike."""
    patterns = ("The {} {}", "{} {}", "A {} {}", "Return to the {} {}", "Beyond the {} {}", "My {} {}")
    base = [pattern.format(first, second) for pattern in patterns for second in SECOND_WORDS for first in FIRST_WORDS]
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


def _distinct_items(
    catalogue: _Catalogue, tastes: NDArray[np.int64], counts: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each user so many different items, in random order; rows are grouped by user."""
    num_items = catalogue.num_items
    keys = np.empty(0, np.int64)
    missing, attempt = counts, 0
    while missing.any():
        user = np.repeat(np.arange(len(counts)), missing + missing // 3 + 1)
        item = _drawn_by_taste(catalogue, tastes, user, rng)
        # Who runs out of what they like takes more and more of anything, so that this ends.
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
    # Late draws are the odd ones; what is held out for test, the last in time, must be like all others.
    keys = rng.permutation(keys)
    keys = keys[np.argsort(keys // num_items, kind="stable")]
    return keys // num_items, keys % num_items


def _drawn_by_taste(
    catalogue: _Catalogue, tastes: NDArray[np.int64], user: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """One item a row: of a favourite strand (65 %), elsewhere in its genre (15 %), or what everybody watches (20 %)."""
    which = np.minimum(rng.geometric(0.5, len(user)) - 1, FAVOURITES - 1)
    strand = tastes[user, which]
    kind = rng.random(len(user))
    elsewhere = strand // catalogue.strands * catalogue.strands + rng.integers(0, catalogue.strands, len(user))
    item = catalogue.draw(np.where(kind < 0.15, elsewhere, strand), rng)
    popular = kind > 0.8
    item[popular] = catalogue.draw_any(int(popular.sum()), rng)
    return item


def _timestamps(user: NDArray[np.int64], counts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Seconds since 1970: people rate in sittings, some seconds between two ratings and days between two sittings."""
    joined = rng.integers(FIRST_DAY, LAST_DAY, len(counts)) * SECONDS_PER_DAY
    gap = rng.exponential(20.0, len(user))
    gap += np.where(rng.random(len(user)) < 0.02, rng.exponential(10.0 * SECONDS_PER_DAY, len(user)), 0.0)
    elapsed = np.cumsum(gap)
    since_first = elapsed - elapsed[np.cumsum(counts) - counts][user]
    return np.asarray(joined[user] + since_first, np.int64)
