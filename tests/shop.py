"""The made-up shop that the documents' examples are about."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

CATEGORIES = ("tea", "coffee", "mug", "honey")


def write(folder: Path, *, customers: int = 60, items: int = 40, seed: int = 0) -> None:
    """`purchases.csv`, `products.csv` and `customers.csv`: alice, bob and others, who keep to one or two categories."""
    rng = np.random.default_rng(seed)
    names = ["alice", "bob", *(f"customer-{number}" for number in range(2, customers))]
    rows = []
    for at, name in enumerate(names):
        liked = np.flatnonzero(np.arange(items) % len(CATEGORIES) == at % len(CATEGORIES))
        chosen = [int(item) for item in rng.choice(liked, 6, replace=False)]
        chosen += [int(item) for item in rng.choice(items, 3, replace=False) if item not in chosen]
        rows += [(name, f"sku-{item}", f"2026-03-{day + 1:02}T12:00:00") for day, item in enumerate(chosen)]
    customer, sku, bought_at = zip(*rows, strict=True)
    numbers = np.arange(items)
    tables = {
        "purchases": pa.table({"customer": customer, "sku": sku, "bought_at": bought_at}),
        "products": pa.table(
            {
                "sku": [f"sku-{item}" for item in numbers],
                "name": [f"{CATEGORIES[item % len(CATEGORIES)]} no. {item}" for item in numbers],
                "category": [CATEGORIES[item % len(CATEGORIES)] for item in numbers],
                "price": (5 + numbers * 7 % 60).tolist(),
                "in_stock": (numbers % 5 > 0).tolist(),
                "is_new": (numbers % 7 == 0).tolist(),
            }
        ),
        "customers": pa.table({"customer": names, "country": [("de", "fr", "it")[len(name) % 3] for name in names]}),
    }
    for name, table in tables.items():
        pyarrow.csv.write_csv(table, folder / f"{name}.csv")
