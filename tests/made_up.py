"""Small made-up datasets that several test files train on."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recspec.data.prepare import PrepareContext
from recspec.data.storage import Columns, Ragged, SplitWriter
from recspec.datasets import DATASETS
from recspec.feature_spec import Chunk, FeatureSpec
from recspec.metrics import measures as metrics


def write_films(folder: Path, users: int, title: str, *, kinds: bool) -> None:
    """Tables of users u0 on, 12 items each of those numbered 100 to 129: `rows.csv`, and `items.csv` with their titles.

    A title is `title` and the item's number; of three kinds, where they are asked for.
    """
    rng = np.random.default_rng(0)
    rows = [
        (f"u{user}", 100 + int(item), t) for user in range(users) for t, item in enumerate(rng.permutation(30)[:12])
    ]
    text = "\n".join(f"{user},{item},{t}" for user, item, t in rows)
    (folder / "rows.csv").write_text(f"user_id,item_id,timestamp\n{text}\n")
    told = [(f'{item},"{title} {item}"', f",{'abc'[item % 3]}" if kinds else "") for item in range(100, 130)]
    text = "\n".join(left + right for left, right in told)
    (folder / "items.csv").write_text(f"item_id,title{',kind' if kinds else ''}\n{text}\n")


def interactions(folder: Path, **settings: object) -> FeatureSpec:
    """Who took what, in order, prepared with candidates in valid and test: 120 users, 60 items."""
    synthetic = DATASETS["synthetic"]
    sizes = {"kind": "interactions", "num_users": 120, "num_items": 60, "num_rows": 2500, "num_negatives": 20}
    synthetic.prepare(PrepareContext(Path(), folder), synthetic.Settings(**{**sizes, **settings}))
    return FeatureSpec.load(folder)


def clicks(folder: Path, **settings: object) -> FeatureSpec:
    """Labelled rows with user, item, context, numerical and list features; the best possible AUC is known."""
    synthetic = DATASETS["synthetic"]
    sizes = {"kind": "clicks", "num_users": 100, "num_items": 50, "num_rows": 4000}
    synthetic.prepare(PrepareContext(Path(), folder), synthetic.Settings(**{**sizes, **settings}))
    return FeatureSpec.load(folder)


def sequences(
    folder: Path, *, length: int = 10, num_rows: int = 4000, num_users: int = 100, num_items: int = 60, seed: int = 0
) -> FeatureSpec:
    """Labelled rows whose label depends on the user's history and the target alone.

    An item has one of 6 categories. Of a row's history of 0 to `length` events about half are of the row's favourite
    category, the others of any; so is the target. The logit of a 1 is -3 + 5 * (share of the events that have the
    target's category) + 1 if the last event has it, so no column by itself says more than a coin. What the best
    possible model scores stands in `metadata.summary.best_possible` (AUC 0.89), each row's true probability in
    the column `probability`. One row in about `length` has no history.
    """
    features = _features_of_sequences(length, num_users, num_items)
    category = np.arange(num_items) % NUM_CATEGORIES + 1  # of item i + 1
    sources: dict[str, tuple[Chunk, ...]] = {}
    best = {}
    folder.mkdir(parents=True, exist_ok=True)
    for number, (split, rows) in enumerate({"train": num_rows, "valid": num_rows // 4, "test": num_rows // 4}.items()):
        columns = _drawn_sequences(np.random.default_rng((seed, number)), rows, length, num_users, category)
        with SplitWriter(folder, split, features.features) as writer:
            writer.write(columns)
        sources[split] = writer.chunks
        best[split] = {"auc": metrics.auc(np.asarray(columns["probability"]), np.asarray(columns["label"]))}
        users = columns
    _write_catalogues(folder, users, num_users, category)
    catalogues = {"user": "users.parquet", "item": "items.parquet"}
    about = {"user_id": "user_id", "item_id": "item_id", "catalogues": catalogues, "summary": {"best_possible": best}}
    features.replace(sources=sources, metadata=about, folder=folder).save(folder)
    return FeatureSpec.load(folder)


def vectors(folder: Path, *, labelled: bool = False) -> FeatureSpec:
    """Rows of your own table with a vector of each user, item, row and title, prepared with histories or with labels.

    The raw files stay in `folder / "raw"`.
    """
    rng = np.random.default_rng(0)
    raw, num_users, num_items = folder / "raw", 25, 20
    raw.mkdir(parents=True)
    for name, count in (("user", num_users), ("item", num_items)):
        held: list[dict[str, object]] = [
            {f"{name}_id": f"{name[0]}{at}", f"{name}_vector": rng.normal(size=3).tolist()} for at in range(count)
        ]
        for at, each in enumerate(held if name == "item" else ()):
            each["title"] = f"{'a red' if at % 2 else 'the blue'} {'chair' if at % 3 else 'table'}"
        (raw / f"{name}s.jsonl").write_text("".join(json.dumps(each) + "\n" for each in held))
    lines = []
    for user in range(num_users):
        for time, item in enumerate(rng.permutation(num_items)[:8]):
            mood = rng.normal(size=2).round(4).tolist()
            lines.append(f'u{user},i{item},{time},{rng.integers(2)},"{mood}"\n')
    (raw / "rows.csv").write_text("user_id,item_id,timestamp,clicked,mood\n" + "".join(lines))
    settings = {
        "users": "users.jsonl",
        "items": "items.jsonl",
        "user_features": ["user_vector"],
        "item_features": ["item_vector"],
        "context_features": ["mood"],
        "text": ["title"],
        "text_dim": 4,
    }
    own = {"label": "clicked", "split": "share"} if labelled else {"label": None, "history": 4, "num_negatives": 3}
    table = DATASETS["table"]
    table.prepare(PrepareContext(raw / "rows.csv", folder / "data", threads=1), table.Settings(**settings, **own))  # type: ignore[arg-type]
    return FeatureSpec.load(folder / "data")


NUM_CATEGORIES = 6


def _features_of_sequences(length: int, num_users: int, num_items: int) -> FeatureSpec:
    ids = {"item_id": num_items + 1, "category": NUM_CATEGORIES + 1}
    lists = {
        f"{channel}_{name}": {
            "dtype": "int32",
            "cardinality": count,
            "vocabulary": name,
            "length": length,
            "padding": 0,
        }
        for channel in ("history", "negative_history")
        for name, count in ids.items()
    }
    return FeatureSpec.from_dict(
        {
            "feature_spec": {
                "user_id": {"dtype": "int32", "cardinality": num_users},
                **{name: {"dtype": "int32", "cardinality": count} for name, count in ids.items()},
                **lists,
                "history_gap": {"dtype": "float32", "length": length},
                "hour": {"dtype": "int32", "cardinality": 25},
                "label": {"dtype": "float32"},
                "probability": {"dtype": "float32"},
            },
            "channel_spec": {
                "user": ["user_id"],
                "item": list(ids),
                "context": ["hour"],
                "history": ["history_item_id", "history_category", "history_gap"],
                "negative_history": ["negative_history_item_id", "negative_history_category"],
                "label": ["label"],
                "group": ["user_id"],
            },
        }
    )


def _write_catalogues(folder: Path, rows: Columns, num_users: int, category: NDArray[np.int64]) -> None:
    """Items with their category, and users with the history of one of their rows; empty where they have none."""
    items = pa.array(np.arange(1, len(category) + 1, dtype=np.int32))
    pq.write_table(pa.table({"item_id": items, "category": category.astype(np.int32)}), folder / "items.parquet")
    user = np.asarray(rows["user_id"])
    histories = {
        name: column.tolist()
        for name, column in rows.items()
        if name.startswith("history") and isinstance(column, Ragged)
    }
    place = {int(user): row for row, user in enumerate(user)}
    of_users: dict[str, object] = {"user_id": pa.array(np.arange(num_users, dtype=np.int32))}
    for name, lists in histories.items():
        kind = pa.list_(pa.float32() if name == "history_gap" else pa.int32())
        of_users[name] = pa.array([lists[place[u]] if u in place else [] for u in range(num_users)], kind)
    pq.write_table(pa.table(of_users), folder / "users.parquet")


def _drawn_sequences(
    random: np.random.Generator, rows: int, length: int, num_users: int, category: NDArray[np.int64]
) -> Columns:
    num_items = len(category)
    favourite = random.integers(1, NUM_CATEGORIES + 1, rows)
    counts = random.integers(0, length + 1, rows)
    row = np.repeat(np.arange(rows), counts)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    def items(of: NDArray[np.int64]) -> NDArray[np.int64]:
        """An item of the favourite category in half of the draws, else any."""
        place = random.integers(0, num_items // NUM_CATEGORIES, len(of))
        liked = place * NUM_CATEGORIES + of
        return np.where(random.random(len(of)) < 0.5, liked, random.integers(1, num_items + 1, len(of)))

    target, events, negatives = items(favourite), items(favourite[row]), random.integers(1, num_items + 1, len(row))
    same = category[events - 1] == category[target - 1][row]
    share = np.bincount(row, same, rows) / np.maximum(counts, 1)
    last = np.zeros(rows)
    last[counts > 0] = same[offsets[1:][counts > 0] - 1]
    probability = 1 / (1 + np.exp(3 - 5 * share - last))
    days = random.exponential(30.0, len(row))
    days = days[np.lexsort((-days, row))]  # the oldest event first
    return {
        "user_id": random.integers(0, num_users, rows).astype(np.int32),
        "item_id": target.astype(np.int32),
        "category": category[target - 1].astype(np.int32),
        "history_item_id": Ragged(events.astype(np.int32), offsets),
        "history_category": Ragged(category[events - 1].astype(np.int32), offsets),
        "history_gap": Ragged(np.log1p(days).astype(np.float32), offsets),
        "negative_history_item_id": Ragged(negatives.astype(np.int32), offsets),
        "negative_history_category": Ragged(category[negatives - 1].astype(np.int32), offsets),
        "hour": random.integers(1, 25, rows).astype(np.int32),
        "label": (random.random(rows) < probability).astype(np.float32),
        "probability": probability.astype(np.float32),
    }


OUTBRAIN_CARDINALITIES = {
    "document_id": 300_000,
    "document_id_promo": 100_000,
    "platform": 4,
    "source_id": 4_000,
    "geo_location": 2_500,
    "geo_location_country": 300,
    "geo_location_state": 2_000,
    "publisher_id": 1_000,
    "ad_id": 250_000,
    "advertiser_id": 2_500,
    "source_id_promo": 4_000,
    "publisher_id_promo": 1_000,
    "campaign_id": 5_000,
    "topic_id_list": 350,
    "entity_id_list": 10_000,
    "category_id_list": 100,
}
OUTBRAIN_WIDTHS = {
    **dict.fromkeys(OUTBRAIN_CARDINALITIES, 64),
    "document_id": 128,
    "document_id_promo": 128,
    "ad_id": 128,
    "campaign_id": 128,
    "platform": 19,
}
"""The published widths of the embeddings, 1235 numbers in all."""


def like_outbrain() -> FeatureSpec:
    """A specification of the published Outbrain features, without files: 13 ids, 3 lists, 13 numbers."""
    ids = {
        name: {"cardinality": cardinality, **({"length": 3, "padding": 0} if name.endswith("_list") else {})}
        for name, cardinality in OUTBRAIN_CARDINALITIES.items()
    }
    numbers: dict[str, dict[str, object]] = {f"number_{place}": {"dtype": "float32"} for place in range(13)}
    features = {**ids, **numbers}
    return FeatureSpec.from_dict(
        {
            "feature_spec": {**features, "label": {"dtype": "float32"}},
            "channel_spec": {"context": list(features), "label": ["label"]},
        }
    )
