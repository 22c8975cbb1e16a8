"""Made-up reviews in the layouts of Amazon's releases of 2014, 2018 and 2023: a few by hand, or any number."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

DAY = 86_400
START = 1_300_000_000

Review = tuple[str, str, int]
"""User, item, time in seconds."""


def write_reviews(path: Path, reviews: Iterable[Review], release: int = 2014) -> Path:
    """A file of reviews, packed if its name ends so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if ".csv" in path.suffixes:
        rows = [f"{user},{item},4.0,{time * 1000}\n" for user, item, time in reviews]
        return _write(path, "user_id,parent_asin,rating,timestamp\n" + "".join(rows))
    return _write(path, "".join(json.dumps(_review(review, release)) + "\n" for review in reviews))


def _review(review: Review, release: int) -> dict[str, Any]:
    user, item, time = review
    text = {"title": "Fine", "text": 'so "so" \\', "helpful_vote": 0}
    if release == 2023:
        return {
            "rating": 5.0,
            **text,
            "asin": f"{item}-V",
            "parent_asin": item,
            "user_id": user,
            "timestamp": time * 1000,
        }
    return {"reviewerID": user, "asin": item, "reviewText": "it's", "overall": 5.0, "unixReviewTime": time, **text}


def write_meta(path: Path, entries: Iterable[Mapping[str, Any]], *, literals: bool = True) -> Path:
    """What is said of items: Python literals as in 2014, or JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return _write(path, "".join((repr(entry) if literals else json.dumps(entry)) + "\n" for entry in entries))


def _write(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode(), 1) if path.suffix == ".gz" else text.encode())
    return path


def made_up(num_users: int, num_items: int, num_reviews: int, seed: int = 0) -> list[Review]:
    """Reviews whose users and items are about as unevenly active as in the real files, in no order."""
    rng = np.random.default_rng(seed)
    users = _uneven(rng, num_users, num_reviews)
    items = _uneven(rng, num_items, num_reviews)
    times = START + rng.integers(0, 1500, num_reviews) * DAY
    return [
        (f"A{user:09d}", f"B{item:09d}", time)
        for user, item, time in zip(users.tolist(), items.tolist(), times.tolist(), strict=True)
    ]


def _uneven(rng: np.random.Generator, count: int, draws: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    weights = 1 / (np.arange(count) + 10.0)
    return np.searchsorted(np.cumsum(weights / weights.sum())[:-1], rng.random(draws))


def described(num_items: int, seed: int = 0) -> Iterable[dict[str, Any]]:
    """What is said of items, in the keys of 2014; of every tenth nothing."""
    rng = np.random.default_rng(seed)
    for item in range(num_items):
        if item % 10 == 9:
            continue
        group, kind = int(rng.integers(8)), int(rng.integers(20))
        yield {
            "asin": f"B{item:09d}",
            "title": f"It's no. {item}",
            "price": 9.99,
            "related": {"also_bought": [f"B{other:09d}" for other in rng.integers(0, num_items, 5).tolist()]},
            "brand": f"brand {item % 7}",
            "categories": [["All", f"group {group}", f"kind {group}.{kind}"], ["Elsewhere"]],
        }


def write(folder: Path, *, num_users: int = 60, num_items: int = 40, num_reviews: int = 1500, seed: int = 0) -> Path:
    """A folder in the layout of 2014."""
    write_reviews(folder / "reviews_Toys.json.gz", made_up(num_users, num_items, num_reviews, seed))
    write_meta(folder / "meta_Toys.json.gz", described(num_items, seed))
    return folder


def days(user: str, items: Sequence[str]) -> list[Review]:
    """One review a day."""
    return [(user, item, START + number * DAY) for number, item in enumerate(items)]
