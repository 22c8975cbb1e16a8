"""A shop's events in two parts: those a dataset was prepared from, and later ones with new users and items."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from recspec.data.prepare import PrepareContext
from recspec.datasets import DATASETS
from recspec.feature_spec import FeatureSpec

NUM_USERS, NUM_ITEMS, NUM_EVENTS, NUM_NEW = 40, 24, 600, 90
NEW_USER, NEW_ITEM = "zoe", "i90"
COLUMNS = {"user": "user_id", "item": "item_id", "timestamp": "timestamp", "item_features": ["kind"]}


def shop_events() -> tuple[pa.Table, pa.Table]:
    """Known events, and new ones: every fifth is of two new users, and every seventh of a new item of a new kind."""
    rng = np.random.default_rng(0)
    total = NUM_EVENTS + NUM_NEW
    users = np.array([f"user{u:02d}" for u in rng.integers(0, NUM_USERS, total)], object)
    items = np.array([f"i{i:02d}" for i in rng.integers(0, NUM_ITEMS, total)], object)
    new = np.arange(NUM_EVENTS, total)
    users[new[::5]] = np.array([NEW_USER, "aaron"], object)[np.arange(len(new[::5])) % 2]
    items[new[::7]] = NEW_ITEM
    kinds = ["new" if item == NEW_ITEM else "abc"[int(item[1:]) % 3] for item in items]
    times = 1_600_000_000 + np.arange(total) * 3600
    table = pa.table(
        {
            "user_id": users.tolist(),
            "item_id": items.tolist(),
            "timestamp": times,
            "kind": kinds,
            "hour": (times // 3600 % 24).astype(float),
        }
    )
    return table.slice(0, NUM_EVENTS), table.slice(NUM_EVENTS)


def prepared(folder: Path, events: pa.Table, **settings: object) -> FeatureSpec:
    """A dataset of events, in `folder / "data"`."""
    folder.mkdir(parents=True, exist_ok=True)
    pa_csv.write_csv(events, folder / "rows.csv")
    table = DATASETS["table"]
    asked = table.Settings(**{"num_negatives": 5, **COLUMNS, **settings})  # type: ignore[arg-type]
    table.prepare(PrepareContext(folder / "rows.csv", folder / "data"), asked)
    return FeatureSpec.load(folder / "data")


def written(file: Path, events: pa.Table) -> Path:
    """A CSV file of events."""
    pa_csv.write_csv(events, file)
    return file
