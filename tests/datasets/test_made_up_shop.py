"""The made-up shop: equal bytes, rows that fit together, and every kind of knowledge that recommenders can use."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow import csv

from recspec.datasets import write_shop
from recspec.datasets.made_up_shop import CATEGORIES


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    write_shop(folder, num_customers=300, num_products=120, num_visits=2500)
    return folder


def rows(file: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = csv.read_csv(file).to_pylist()
    return found


def test_equal_seeds_give_equal_bytes(shop: Path, tmp_path: Path) -> None:
    write_shop(tmp_path, num_customers=300, num_products=120, num_visits=2500)
    for file in ("events.csv", "products.csv", "customers.csv"):
        assert (tmp_path / file).read_bytes() == (shop / file).read_bytes()


def test_events_are_of_customers_and_of_products_that_were_sold(shop: Path) -> None:
    launched = {row["sku"]: row["launched"] for row in rows(shop / "products.csv")}
    customers = {row["customer"] for row in rows(shop / "customers.csv")}
    events = rows(shop / "events.csv")
    assert {row["type"] for row in events} == {"view", "cart", "purchase"}
    assert all(row["customer"] in customers for row in events)
    assert all(row["at"].date() >= launched[row["sku"]] for row in events)  # type: ignore[attr-defined]
    assert [row["at"] for row in events] == sorted(row["at"] for row in events)  # type: ignore[type-var]


def test_some_products_have_no_event(shop: Path) -> None:
    assert {row["sku"] for row in rows(shop / "products.csv")} > {row["sku"] for row in rows(shop / "events.csv")}


def test_what_was_carted_is_bought_and_the_next_type_follows(shop: Path) -> None:
    carted, follows, pairs = set(), 0, 0
    titles = {row["sku"]: str(row["title"]) for row in rows(shop / "products.csv")}
    order = [kind for kinds in CATEGORIES.values() for kind in kinds]
    kind_of = {sku: next(at for at, kind in enumerate(order) if f" {kind} " in title) for sku, title in titles.items()}
    last: dict[object, int] = {}
    for row in rows(shop / "events.csv"):
        customer, kind = row["customer"], kind_of[row["sku"]]
        if row["type"] == "cart":
            carted.add((customer, row["sku"]))
        elif row["type"] == "purchase":
            assert (customer, row["sku"]) in carted
            if customer in last:
                pairs, follows = pairs + 1, follows + (kind == last[customer] // 6 * 6 + (last[customer] + 1) % 6)
            last[customer] = kind
    assert follows / pairs > 0.3  # 1 in 48 types by chance alone
