"""Made-up data, for first runs and tests without a download: rows whose best possible score is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import Field, model_validator

from recspec.data.prepare import (
    LABEL,
    ROW,
    TIMESTAMP,
    USER,
    Backend,
    Catalogue,
    Column,
    HistorySettings,
    PrepareContext,
    Prepared,
    Progress,
    Source,
    clicks,
    interactions,
    prepared,
    splits,
)
from recspec.data.storage import open_split
from recspec.feature_spec import FeatureSpec
from recspec.metrics import measures as metrics

NAME = "synthetic"
Ids = NDArray[np.int64]
FIRST_WORDS: Sequence[str] = """
Silent Golden Broken Hidden Crimson Distant Electric Forgotten Last Burning Quiet Winter Midnight Paper Velvet Hollow
Northern Savage Gentle Iron Lonely Scarlet Second Sleeping Stolen Summer Tangled Wandering Wild Wooden Empty Endless
Fallen First Frozen Glass Infinite Little Lost Painted
""".split()
SECOND_WORDS: Sequence[str] = """
Harbor River Garden Empire Promise Letters Mountain Station Circus Orchard Shadow Kingdom Voyage Witness Bridge Island
Carnival Detective Lighthouse Machine Melody Mirror Morning Neighbor Ocean Palace Planet Road Season Secret Soldier
Stranger Teacher Thief Tiger Tower Treasure Valley Window Wolf
""".split()


class Settings(HistorySettings):
    """Settings of made-up rows."""

    kind: Literal["clicks", "interactions"] = Field(
        "clicks", description="clicks: labelled rows with features of every kind; interactions: users' items in order"
    )
    num_users: int = Field(300, ge=2, description="number of users")
    num_items: int = Field(200, ge=8, description="number of items")
    num_rows: int = Field(20_000, ge=100, description="number of rows of all splits")
    num_negatives: int = Field(50, ge=1, description="interactions: candidates beside the positive in each series")
    seed: int = Field(0, ge=0, description="seed of all draws")

    @model_validator(mode="after")
    def _fits_the_kind(self) -> Settings:
        given = [name for name, field in HistorySettings.model_fields.items() if getattr(self, name) != field.default]
        if self.kind == "clicks" and given:
            raise ValueError(f"{' and '.join(given)}: of kind interactions; set kind=interactions too")
        return self


def prepare(context: PrepareContext, settings: Settings) -> Prepared:
    """Make up a dataset; `context.raw` is not read.

    `metadata.summary.best_possible` holds the scores of the best possible model on valid and test: for clicks, the AUC
    and log loss of the labels' own probabilities (column `probability`); for interactions, HR@10 and NDCG@10 of the
    users' preferences.
    """

    def build(folder: Path) -> FeatureSpec:
        with context.connect(folder / "work") as backend:
            make = _make_clicks if settings.kind == "clicks" else _make_interactions
            return make(backend, folder, settings, context.progress)

    return prepared.run(context, NAME, settings, [], build)


NUM_TAGS, MOST_TAGS = 30, 4
HOURS = 24


def _make_clicks(backend: Backend, folder: Path, settings: Settings, progress: Progress) -> FeatureSpec:
    users, items, rows = _draw_clicks(settings, np.random.default_rng(settings.seed))
    file = folder / "work" / "rows.parquet"
    pq.write_table(rows, file)
    table = backend.read_parquet([file], row=True)
    user_columns = (Column("age", "number"), Column("gender", "category"))
    item_columns = (Column("price", "number"), Column("tags", "list", separator="|"))
    context_columns = (Column("hour", "category"), Column("speed", "number"))
    source = clicks.Source(
        dataset=NAME,
        rows=splits.by_share(table, row=ROW, valid=0.1, test=0.1, seed=settings.seed),
        ids={"user": Column("user_id", "category"), "item": Column("item_id", "category")},
        columns={"user": user_columns, "item": item_columns, "context": context_columns},
        users=Catalogue(users, "user_id", user_columns),
        items=Catalogue(items, "item_id", item_columns, {"title": "title"}),
        grouped="values",
        kept=("probability",),
    )
    return _with_best(clicks.write(backend, folder, source, progress=progress), _best_of_clicks)


def _draw_clicks(settings: Settings, rng: Generator) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Users, items and rows. Every kind of feature adds to the logit of a click."""
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

    user, item = _popular(num_users, num_rows, rng), _popular(num_items, num_rows, rng)
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
    items = pa.table({"item_id": item_ids, "price": price, "tags": tag_texts, "title": made_up_titles(num_items, rng)})
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


def _popular(number: int, rows: int, rng: Generator) -> Ids:
    """Draw `rows` of `number` things, whose popularity follows a power law."""
    weight = (np.arange(number) + 5.0) ** -0.7
    return rng.permutation(number)[rng.choice(number, rows, p=weight / weight.sum())]


def _best_of_clicks(spec: FeatureSpec, split: str) -> dict[str, float]:
    columns = open_split(spec, split, ["probability", LABEL]).read(0, 2**62)
    probability, label = np.asarray(columns["probability"], np.float64), np.asarray(columns[LABEL])
    return {"auc": metrics.auc(probability, label), "log_loss": metrics.log_loss_of_probabilities(probability, label)}


# --- interactions ----------------------------------------------------------------------------------------------------


def _make_interactions(backend: Backend, folder: Path, settings: Settings, progress: Progress) -> FeatureSpec:
    rng = np.random.default_rng(settings.seed)
    preference = _preferences(settings, rng)
    file = folder / "work" / "rows.parquet"
    pq.write_table(_take_in_order(preference, settings, rng), file)
    table = backend.read_parquet([file], row=True)
    items = pa.table(
        {"item_id": np.arange(1, settings.num_items + 1), "title": made_up_titles(settings.num_items, rng)}
    )
    rows = splits.leave_one_out(table, by=USER, order=(TIMESTAMP, ROW))
    source = Source(dataset=NAME, rows=rows, items=Catalogue(items, "item_id", (), {"title": "title"}))
    spec = interactions.write(
        backend, folder, source, settings, num_negatives=settings.num_negatives, seed=settings.seed, progress=progress
    )

    def best(spec: FeatureSpec, split: str) -> dict[str, float]:
        columns = open_split(spec, split, [spec.user_id, spec.item_id, spec.label]).read(0, 2**62)
        user, item, label = (np.asarray(columns[name]) for name in (spec.user_id, spec.item_id, spec.label))
        raw_user, raw_item = (_raw_ids(folder, name)[ids] for name, ids in (("user_id", user), ("item_id", item)))
        ranking = metrics.rank_groups(preference[raw_user - 1, raw_item - 1], label, user, candidates=item)
        return {"hit_rate@10": metrics.hit_rate(ranking, 10), "ndcg@10": metrics.ndcg(ranking, 10)}

    return _with_best(spec, best)


def _preferences(settings: Settings, rng: Generator) -> NDArray[np.float64]:
    """(users, items) logits by which users take items."""
    taste = rng.normal(0, 1, (settings.num_users, 4))
    trait = rng.normal(0, 1, (settings.num_items, 4))
    return np.asarray(taste @ trait.T + rng.normal(0, 0.7, settings.num_items))


def _take_in_order(preference: NDArray[np.float64], settings: Settings, rng: Generator) -> pa.Table:
    """Each user takes items one after another, by the softmax of the preferences over those not yet taken.

    Sorting by preference plus Gumbel noise does so (Gumbel-top-k). The best ranking is by preference.
    """
    num_users, num_items = preference.shape
    counts = ratings_per_user(num_users, num_items, min(settings.num_rows, num_users * (num_items // 2)), rng)
    order = np.argsort(-(preference + rng.gumbel(size=preference.shape)), axis=1)
    user = np.repeat(np.arange(num_users), counts)
    place = np.arange(len(user)) - np.repeat(np.cumsum(counts) - counts, counts)
    columns = {"user_id": user + 1, "item_id": order[user, place] + 1, "timestamp": place}
    shuffled = rng.permutation(len(user))
    return pa.table({name: column[shuffled] for name, column in columns.items()})


def _raw_ids(folder: Path, name: str) -> Ids:
    values = pq.read_table(folder / "vocabularies" / f"{name}.parquet").column("value").to_numpy()
    return np.concatenate([np.zeros(1, np.int64), values])


def _with_best(spec: FeatureSpec, best: Callable[[FeatureSpec, str], dict[str, float]]) -> FeatureSpec:
    """The specification with the scores of the best possible model in its summary."""
    summary = spec.metadata["summary"]
    assert isinstance(summary, Mapping)
    scores = {
        split: {name: round(float(value), 6) for name, value in best(spec, split).items()}
        for split in ("valid", "test")
    }
    return spec.replace(metadata={**spec.metadata, "summary": {**summary, "best_possible": scores}})


def made_up_titles(items: int, rng: Generator) -> list[str]:
    """Titles of films, each with a year."""
    patterns = ("The {} {}", "{} {}", "A {} {}", "Return to the {} {}", "Beyond the {} {}", "My {} {}")
    base = [pattern.format(first, second) for pattern in patterns for second in SECOND_WORDS for first in FIRST_WORDS]
    picked = rng.permutation(len(base))
    years = rng.integers(1950, 2020, items)
    parts = ["" if part == 0 else f" {part + 1}" for part in range(items // len(base) + 1)]
    return [f"{base[picked[i % len(base)]]}{parts[i // len(base)]} ({years[i]})" for i in range(items)]


def ratings_per_user(users: int, items: int, ratings: int, rng: Generator) -> Ids:
    """The number of items that each user rates: heavy-tailed, at most half of the items, summing to `ratings`."""
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
