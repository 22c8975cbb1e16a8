"""Made-up raw files of every dataset, small and seeded, in a folder each.

    PYTHONPATH=TREE/src:TREE python benchmarks/_raw_files.py FOLDER

The larger writers are those of the tests of TREE, so this file runs as a process of its own. The others are below.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

USERS, ITEMS, EACH = 90, 60, 20
GENRES = ("Action", "Comedy", "Drama", "War", "Children's")


def write_all(folder: Path) -> None:
    """Write the raw files of every dataset."""
    from tests import made_up_amazon, made_up_criteo, made_up_outbrain

    made_up_amazon.write(folder / "amazon", num_users=150, num_items=80, num_reviews=4000)
    made_up_outbrain.write(folder / "outbrain", num_rows=3000)
    made_up_criteo.write(folder / "criteo" / "train.txt.gz", num_rows=4000)
    made_up_criteo.write_days(folder / "criteo_days", [400, 300, 301])
    rows = interactions(np.random.default_rng(0))
    write_movielens_latest(folder / "movielens_latest", rows)
    write_movielens_1m(folder / "movielens_1m", rows)
    write_ncf(folder / "ncf", rows)
    write_table(folder / "table", np.random.default_rng(1))
    write_adult(folder / "adult", np.random.default_rng(2))


def interactions(rng: np.random.Generator) -> list[tuple[int, int, int, int]]:
    """User, item, stars and time of each rating; popular items come first."""
    weights = 1 / np.arange(5, ITEMS + 5)
    weights /= weights.sum()
    return [
        (user + 1, int(item) + 1, int(rng.integers(1, 6)), 1_000_000 + user * 1000 + 7 * place)
        for user in range(USERS)
        for place, item in enumerate(rng.choice(ITEMS, EACH, replace=False, p=weights))
    ]


def titles() -> list[tuple[int, str, str]]:
    """Item, title and genres."""
    return [
        (item, f"Film, the {item}th ({1950 + item % 60})", "|".join({GENRES[item % 5]: 0, GENRES[item % 3]: 0}))
        for item in range(1, ITEMS + 1)
    ]


def write_movielens_latest(folder: Path, rows: list[tuple[int, int, int, int]]) -> None:
    """The layout of MovieLens 20M, 25M and latest."""
    ratings = "".join(f"{user},{item},{stars}.0,{time}\n" for user, item, stars, time in rows)
    movies = "".join(f'{item},"{title}",{genres}\n' for item, title, genres in titles())
    _write(folder / "ratings.csv", "userId,movieId,rating,timestamp\n" + ratings)
    _write(folder / "movies.csv", "movieId,title,genres\n" + movies)


def write_movielens_1m(folder: Path, rows: list[tuple[int, int, int, int]]) -> None:
    """The layout of MovieLens 1M."""
    _write(folder / "ratings.dat", "".join("::".join(map(str, row)) + "\n" for row in rows))
    _write(folder / "movies.dat", "".join("::".join(map(str, movie)) + "\n" for movie in titles()))
    people = (
        f"{user}::{'FM'[user % 2]}::{(1, 18, 25, 56)[user % 4]}::{user % 21}::{10_000 + user % 30}\n"
        for user in range(1, USERS + 1)
    )
    _write(folder / "users.dat", "".join(people))


def write_ncf(folder: Path, rows: list[tuple[int, int, int, int]]) -> None:
    """The files of the NCF paper: the last row of each user is the test positive, with ten negatives."""
    last = {user: place for place, (user, *_) in enumerate(rows)}
    held_out = set(last.values())
    train = (rows[place] for place in range(len(rows)) if place not in held_out)
    _write(folder / "x.train.rating", "".join("\t".join(map(str, row)) + "\n" for row in train))
    test = [rows[place] for place in last.values()]
    _write(folder / "x.test.rating", "".join("\t".join(map(str, row)) + "\n" for row in test))
    acted = {user: {item for other, item, *_ in rows if other == user} for user in last}
    negatives = {user: [item for item in range(1, ITEMS + 1) if item not in acted[user]][:10] for user in last}
    lines = (f"({user},{item})\t" + "\t".join(map(str, negatives[user])) + "\n" for user, item, *_ in test)
    _write(folder / "x.test.negative", "".join(lines))


def write_table(folder: Path, rng: np.random.Generator) -> None:
    """Clicks with ids, numbers, lists, text and missing values."""
    rows = []
    for _ in range(3000):
        who, what = int(rng.integers(60)), int(rng.integers(50))
        price, clicked = rng.normal(), int(rng.random() < 0.2 + 0.5 * (who % 3 == what % 3))
        tags = "|".join(sorted(set(rng.choice(list("abcd"), 2))))
        device = ("mobile", "tablet", "")[rng.integers(3)]
        rows.append(f"u{who},{what},{rng.integers(10_000)},{clicked},{price:.4f},{tags},{device}\n")
    _write(folder / "clicks.csv", "who,what,when,clicked,price,tags,device\n" + "".join(rows))


def write_adult(folder: Path, rng: np.random.Generator) -> None:
    """The layout of UCI Adult; who studied and worked long earns more."""

    def row() -> str:
        education, hours = int(rng.integers(1, 17)), int(rng.integers(10, 70))
        gain = int(rng.integers(1, 20_000)) if rng.random() < 0.1 else 0
        loss = int(rng.integers(1, 3_000)) if rng.random() < 0.1 else 0
        rich = rng.random() < 1 / (1 + np.exp(12 - 0.6 * education - 0.1 * hours))
        cells = [
            rng.integers(17, 80),
            rng.choice(["Private", "State-gov", "?"]),
            rng.integers(10_000, 400_000),
            rng.choice(["Bachelors", "HS-grad", "Masters"]),
            education,
            rng.choice(["Divorced", "Never-married"]),
            rng.choice(["Sales", "Adm-clerical", "?"]),
            rng.choice(["Husband", "Own-child"]),
            rng.choice(["White", "Black"]),
            rng.choice(["Male", "Female"]),
            gain,
            loss,
            hours,
            rng.choice(["Canada", "Cuba", "?"]),
            ">50K" if rich else "<=50K",
        ]
        return ", ".join(map(str, cells))

    _write(folder / "adult.data", "".join(row() + "\n" for _ in range(2000)))
    _write(folder / "adult.test", "|1x3 Cross validator\n" + "".join(row() + ".\n" for _ in range(500)))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
