"""A made-up shop for kitchens: events, products and customers as CSV files, for first runs without a download.

Everything that recommenders can use decides what is bought: tastes and price levels of customers, brands and prices of
products, what was viewed and carted before, and what goes with the last purchase. Products arrive all the time, so the
newest ones have few events or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.random import Generator
from numpy.typing import NDArray

CATEGORIES: dict[str, Sequence[str]] = {
    "Coffee": ("espresso machine", "coffee grinder", "espresso beans", "milk frother", "espresso cups", "descaler"),
    "Tea": ("kettle", "teapot", "green tea", "black tea", "tea strainer", "tea mugs"),
    "Baking": ("stand mixer", "kitchen scale", "baking tin", "bread flour", "dough scraper", "cooling rack"),
    "Knives": ("chef's knife", "cutting board", "sharpening stone", "paring knife", "knife block", "bread knife"),
    "Pots": ("frying pan", "saucepan", "cast-iron pot", "wok", "pot lid", "steamer basket"),
    "Storage": ("glass jars", "lunch box", "spice rack", "bread box", "vacuum bags", "labels"),
    "Table": ("dinner plates", "soup bowls", "water glasses", "cutlery set", "linen napkins", "serving tray"),
    "Grill": ("charcoal grill", "grill tongs", "briquettes", "meat thermometer", "pizza stone", "apron"),
}
"""Category -> its types of products, in the order in which they are bought one after another."""
BRANDS: Sequence[str] = ("Alba", "Brenna", "Corvo", "Dalgo", "Elmer & Fitz", "Faro")
VARIANTS: Sequence[str] = ("Basic", "Classic", "Plus", "Studio", "Nordic", "Pro")
START = np.datetime64("2026-01-05T00:00:00", "s")
DAY = 86_400  # seconds
FOLLOWS = 0.5  # share of visits that look for what goes with the last purchase
BUYS = 0.4  # share of visits that end with a purchase of what is in the cart


def write_shop(
    folder: Path,
    *,
    num_customers: int = 1200,
    num_products: int = 300,
    num_visits: int = 8000,
    days: int = 180,
    seed: int = 0,
) -> None:
    """Write `events.csv`, `products.csv` and `customers.csv` of a shop. Equal arguments give equal bytes.

    Events have `customer`, `sku`, `type` (view, cart or purchase) and `at`; products `sku`, `title`, `category`,
    `brand`, `price`, `in_stock` and `launched`; customers `customer` and `country`.
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    shop = _Shop(num_customers, num_products, days, rng)
    for name, table in (
        ("events", shop.visits(num_visits, rng)),
        ("products", shop.products(rng)),
        ("customers", shop.customers(rng)),
    ):
        pyarrow.csv.write_csv(table, folder / f"{name}.csv", pa.csv.WriteOptions(quoting_style="needed"))


class _Shop:
    """Customers and products, and how much each customer wants each product of a type."""

    def __init__(self, num_customers: int, num_products: int, days: int, rng: Generator) -> None:
        kinds = [(category, kind) for category, kinds in CATEGORIES.items() for kind in kinds]
        self.days, self.per_category = days, len(kinds) // len(CATEGORIES)
        self.type = rng.permutation(np.arange(num_products) % len(kinds))
        self.brand = rng.integers(0, len(BRANDS), num_products)
        base = rng.uniform(8, 90, len(kinds))
        level = rng.normal(0, 0.5, num_products)  # log price of a product against others of its type
        self.price = np.round(base[self.type] * np.exp(level)) - 0.01
        self.launched = np.where(rng.random(num_products) < 0.7, 0, rng.integers(0, days, num_products))
        self.appeal = rng.gumbel(0, 0.7, num_products)
        self.of_type = [np.flatnonzero(self.type == each) for each in range(len(kinds))]
        self.skus = np.array([f"sku-{number:03d}" for number in rng.permutation(num_products)])
        names = [VARIANTS[each] for each in rng.integers(0, len(VARIANTS), num_products)]
        self.titles = [
            f"{BRANDS[brand]} {kinds[kind][1]} {name}"
            for brand, kind, name in zip(self.brand, self.type, names, strict=True)
        ]
        self.categories = [kinds[kind][0] for kind in self.type]
        self.taste = rng.dirichlet(np.full(len(CATEGORIES), 0.3), num_customers)
        loyalty = rng.normal(0, 1.2, (num_customers, len(BRANDS)))
        wealth = rng.normal(0, 0.5, num_customers)
        distance = (level[None, :] - wealth[:, None]) / 0.4
        self.wish = self.appeal + loyalty[:, self.brand] - distance**2 / 2  # (customers, products) logits

    def visits(self, num_visits: int, rng: Generator) -> pa.Table:
        """Events of visits in the order of time."""
        activity = rng.lognormal(0, 0.8, len(self.taste))
        who = rng.choice(len(self.taste), num_visits, p=activity / activity.sum())
        at = np.sort(rng.integers(0, self.days * DAY, num_visits))
        last = np.full(len(self.taste), -1)  # type of each customer's last purchase
        waiting = np.full(len(self.taste), -1)  # product that lies in the cart since an earlier visit
        rows: list[tuple[int, int, int, str]] = []
        for customer, second in zip(who.tolist(), at.tolist(), strict=True):
            if waiting[customer] >= 0 and rng.random() < 0.5:
                wanted = int(waiting[customer])
                events = [(wanted, "view")]
            else:
                shown = self._looked_at(customer, int(last[customer]), second / DAY, rng)
                wanted = int(shown[np.argmax(self.wish[customer, shown] + rng.gumbel(0, 0.5, len(shown)))])
                events = [*((int(each), "view") for each in shown), (wanted, "cart")]
            waiting[customer] = wanted
            if rng.random() < BUYS:
                events.append((wanted, "purchase"))
                last[customer], waiting[customer] = self.type[wanted], -1
            rows += [(second + 40 * place, customer, item, kind) for place, (item, kind) in enumerate(events)]
        rows.sort(key=lambda row: row[0])
        when, customers, items, kinds = zip(*rows, strict=True)
        return pa.table(
            {
                "customer": [f"c{number + 1}" for number in customers],
                "sku": self.skus[list(items)],
                "type": kinds,
                "at": (START + np.array(when)).astype(str),
            }
        )

    def _looked_at(self, customer: int, last: int, day: float, rng: Generator) -> NDArray[np.int64]:
        """Up to five products of one type, of those that are sold already."""
        if last >= 0 and rng.random() < FOLLOWS:  # the next type of the same category, from its last to its first
            place = (last + 1) % self.per_category
            kind = last - last % self.per_category + place
        else:
            category = rng.choice(len(CATEGORIES), p=self.taste[customer])
            kind = int(category * self.per_category + rng.integers(self.per_category))
        sold = self.of_type[kind][self.launched[self.of_type[kind]] <= day]
        if not len(sold):
            sold = np.flatnonzero(self.launched <= day)
        drawn = self.wish[customer, sold] + rng.gumbel(0, 1, len(sold))
        return np.asarray(sold[np.argsort(-drawn)[: rng.integers(1, 5)]], np.int64)

    def products(self, rng: Generator) -> pa.Table:
        return pa.table(
            {
                "sku": self.skus,
                "title": self.titles,
                "category": self.categories,
                "brand": [BRANDS[each] for each in self.brand],
                "price": self.price,
                "in_stock": rng.random(len(self.skus)) < 0.9,
                "launched": (START.astype("datetime64[D]") + self.launched).astype(str),
            }
        )

    def customers(self, rng: Generator) -> pa.Table:
        numbers = range(1, len(self.taste) + 1)
        countries = rng.choice(["de", "fr", "it"], len(numbers), p=[0.5, 0.3, 0.2])
        return pa.table({"customer": [f"c{number}" for number in numbers], "country": countries})
