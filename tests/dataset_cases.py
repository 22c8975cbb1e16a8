"""Every registered dataset on small raw files: one row per case, read by all contract suites."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from recspec.data.encoding.encoders import Encoders
from recspec.data.prepare import PrepareContext, prepared
from recspec.data.storage import open_split
from recspec.datasets import DATASETS, movielens
from recspec.feature_spec import FeatureSpec
from tests import made_up_amazon, made_up_criteo, made_up_outbrain

RATINGS = [  # user, movie, stars, time: movies 10 to 50, each user in shuffled order of time
    (3, 10, 4.0, 500),
    (3, 20, 3.0, 100),
    (3, 30, 5.0, 300),
    (7, 20, 2.0, 50),
    (7, 30, 4.0, 40),
    (8, 50, 1.0, 10),
    (9, 40, 5.0, 7),
    (9, 10, 4.5, 8),
    (9, 20, 0.5, 9),
    (9, 10, 3.0, 6),
    (9, 30, 3.5, 2),
]
MOVIES = {
    10: ("Ten, The (1990)", "Drama|War"),
    20: ('"Twenty"', "Comedy"),
    30: ("Thirty (2001)", "(no genres listed)"),
    40: ("Léon (1994)", "Drama"),
    50: ("Fifty (1950) (1951)", "Comedy|Drama|War"),
    60: ("Unseen", "War"),
}
SPLIT_BY_HAND = {
    "train": {(3, 20), (7, 30), (8, 50), (9, 30), (9, 10)},
    "valid": {(3, 30), (9, 40)},
    "test": {(3, 10), (7, 20), (9, 20)},
}
"""Movie 10 of user 9 counts at time 6, the earlier of its two ratings."""


def write_latest(folder: Path, ratings: Sequence[tuple[int, int, float, int]] = RATINGS) -> Path:
    """The layout of MovieLens 20M, 25M and latest."""
    folder.mkdir(parents=True)
    lines = [f"{user},{movie},{stars},{time}\n" for user, movie, stars, time in ratings]
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + "".join(lines))
    titles = {movie: title.replace('"', '""') for movie, (title, _) in MOVIES.items()}
    movies = [f'{movie},"{titles[movie]}",{genres}\n' for movie, (_, genres) in MOVIES.items()]
    (folder / "movies.csv").write_text("movieId,title,genres\n" + "".join(movies), encoding="utf-8")
    return folder


def write_1m(folder: Path, *, users: bool = True) -> Path:
    """The layout of MovieLens 1M, or without users of 10M."""
    folder.mkdir(parents=True)
    lines = [f"{user}::{movie}::{stars:g}::{time}\n" for user, movie, stars, time in RATINGS]
    (folder / "ratings.dat").write_text("".join(lines))
    movies = [f"{movie}::{title}::{genres}\n" for movie, (title, genres) in MOVIES.items()]
    (folder / "movies.dat").write_text("".join(movies), encoding="latin-1" if users else "utf-8")
    if users:
        (folder / "users.dat").write_text("3::F::1::10::48067\n7::M::56::16::70072\n8::M::25::15::55117-1234\n")
    return folder


def write_100k(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "u.data").write_text("".join(f"{u}\t{m}\t{s:g}\t{t}\n" for u, m, s, t in RATINGS))
    flags = {
        m: "|".join(str(int(g in genres.split("|"))) for g in movielens.GENRES_100K)
        for m, (_, genres) in MOVIES.items()
    }
    movies = [f"{movie}|{title}|01-Jan-1995||http://x|{flags[movie]}\n" for movie, (title, _) in MOVIES.items()]
    (folder / "u.item").write_text("".join(movies), encoding="latin-1")
    (folder / "u.user").write_text("3|24|M|technician|85711\n7|53|F|other|94043\n8|23|M|writer|32067\n")
    return folder


def write_ncf(folder: Path) -> Path:
    folder.mkdir(parents=True)
    train = ["0\t5\t4\t10", "0\t6\t4\t30", "0\t7\t4\t20", "1\t5\t4\t1", "0\t6\t1\t40"]
    (folder / "x.train.rating").write_text("\n".join(train) + "\n")
    (folder / "x.test.rating").write_text("0\t8\t5\t50\n1\t6\t5\t2\n")
    (folder / "x.test.negative").write_text("(0,8)\t9\t8\t9\n(1,6)\t7\t8\t9\n")
    return folder


def write_table(folder: Path) -> Path:
    folder.mkdir(parents=True)
    path = folder / "clicks.csv"
    rng = np.random.default_rng(0)
    rows = [
        f"u{rng.integers(12)},{rng.integers(9)},{rng.integers(1000)},{rng.integers(2)},{rng.normal():.4f},"
        f"{'|'.join(sorted(set(rng.choice(list('abcd'), 2))))},{'mobile' if rng.random() < 0.5 else ''}\n"
        for _ in range(400)
    ]
    path.write_text("who,what,when,clicked,price,tags,device\n" + "".join(rows))
    return path


def write_vectors(folder: Path) -> Path:
    """Labelled rows with a vector each, and a vector of each item in a file."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = [
        f'u{rng.integers(12)},{rng.integers(9)},{rng.integers(1000)},{rng.integers(2)},"{rng.normal(size=2).tolist()}"\n'
        for _ in range(200)
    ]
    (folder / "rows.csv").write_text("user_id,item_id,timestamp,clicked,mood\n" + "".join(rows))
    images = [
        json.dumps(
            {
                "item_id": str(item),
                "image": rng.normal(size=3).tolist(),
                "title": f"a {rng.choice(['red', 'blue'])} chair {item}",
            }
        )
        + "\n"
        for item in range(9)
    ]
    (folder / "items.jsonl").write_text("".join(images))
    return folder / "rows.csv"


ADULT = """\
39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Canada, <=50K
52, Private, 209642, HS-grad, 9, Married-civ-spouse, Exec-managerial, Husband, White, Male, 0, 0, 45, Canada, >50K
31, ?, 45781, Masters, 14, Never-married, ?, Not-in-family, White, Female, 14084, 0, 50, ?, >50K
17, Private, 338409, 11th, 7, Never-married, Sales, Own-child, Black, Female, 0, 1902, 20, Cuba, <=50K
""".splitlines()


def write_adult(folder: Path) -> Path:
    """The layout of UCI Adult: a remark at the head of adult.test, where labels end in a dot, and empty lines."""
    folder.mkdir(parents=True)
    (folder / "adult.data").write_text("".join(f"{row}\n" for row in ADULT * 20) + "\n")
    (folder / "adult.test").write_text("|1x3 Cross validator\n" + "".join(f"{row}.\n" for row in ADULT))
    return folder


def write_criteo(folder: Path) -> Path:
    made_up_criteo.write(folder / "train.txt.gz", num_rows=1500, num_numerical=2, num_categorical=3)
    return folder


def nothing(folder: Path) -> Path:
    return folder


@dataclass(frozen=True)
class Case:
    """Raw files of a dataset, and settings they are prepared with."""

    dataset: str
    write: Callable[[Path], Path]
    settings: Mapping[str, object] = field(default_factory=dict)
    other: Mapping[str, object] = field(default_factory=lambda: {"seed": 5})
    """Settings that ask for something else."""
    spoil: Callable[[Path, Path], None] | None = None
    """Changes values of held-out rows in the raw files, given the prepared folder; train must stay the same."""
    large: Callable[[Path], Path] | None = None
    """Raw files of more than 100,000 rows, for Spark."""


TABLE_COLUMNS = {"user": "who", "item": "what", "timestamp": "when"}
CASES = {
    "movielens-latest": Case("movielens", write_latest, {"num_negatives": 3}),
    "movielens-1m": Case("movielens", write_1m, {"num_negatives": 3}),
    "movielens-10m": Case("movielens", lambda folder: write_1m(folder, users=False), {"num_negatives": 3}),
    "movielens-100k": Case("movielens", write_100k, {"num_negatives": 3}),
    "ncf": Case("ncf", write_ncf),
    "table-interactions": Case(
        "table",
        write_table,
        {
            **TABLE_COLUMNS,
            "label": None,
            "repeats": "first",
            "num_negatives": 1,
            "item_features": ["price"],
            "context_features": ["device"],
        },
    ),
    "table-clicks": Case(
        "table",
        write_table,
        {
            **TABLE_COLUMNS,
            "label": "clicked",
            "item_features": ["tags"],
            "lists": ["tags"],
            "context_features": ["price", "device"],
        },
    ),
    "table-vectors": Case(
        "table",
        write_vectors,
        {
            "label": "clicked",
            "items": "items.jsonl",
            "item_features": ["image"],
            "context_features": ["mood"],
            "text": ["title"],
            "text_dim": 3,
        },
    ),
    "table-weights": Case(
        "table",
        write_table,
        {
            **TABLE_COLUMNS,
            "label": None,
            "num_negatives": 1,
            "half_life": 300,
            "event": "clicked",
            "event_weights": {"0": 1, "1": 2.5},
            "repeats": "keep",
        },
    ),
    "labelled-histories": Case(
        "table",
        write_table,
        {
            **TABLE_COLUMNS,
            "label": "clicked",
            "history": 5,
            "split": "time",
            "negative_history": True,
            "item_features": ["device"],
            "context_features": ["price"],
        },
    ),
    "table-hashed": Case(
        "table",
        write_table,
        {
            **TABLE_COLUMNS,
            "label": "clicked",
            "item_features": ["tags"],
            "lists": ["tags"],
            "context_features": ["price", "device"],
            "buckets": {"price": 4},
            "hashed": {"tags": 9, "device": 50},
            "crosses": [["device", "price_bucket"], ["who", "what"]],
            "cross_cardinality": 1000,
        },
    ),
    "amazon": Case("amazon", made_up_amazon.write, {"min_reviews": 5, "categories": "path", "brand": True}),
    "movielens-histories": Case(
        "movielens",
        write_1m,
        {"num_negatives": 3, "history": 3, "negative_history": True, "train_negatives": 1, "negatives": "popularity"},
    ),
    "by-time-movielens": Case(
        "movielens",
        write_latest,
        {"num_negatives": 2, "history": 3, "split": "time", "valid_share": 0.2, "test_share": 0.2},
    ),
    "held-out-users": Case(
        "table",
        write_table,
        {**TABLE_COLUMNS, "label": None, "repeats": "first", "split": "users", "valid": 0.2, "test": 0.2, "history": 3},
    ),
    "held-out-users-of-amazon": Case(
        "amazon", made_up_amazon.write, {"min_reviews": 5, "split": "users", "heldout_users": 2}
    ),
    "adult": Case("adult", write_adult, {"num_buckets": 4, "cross_cardinality": 1000}),
    "outbrain": Case("outbrain", lambda folder: made_up_outbrain.write(folder, num_rows=2000)),
    "criteo-days": Case(
        "criteo",
        lambda folder: made_up_criteo.write_days(folder, [400, 300, 301]),
        {"min_count": 2, "min_counts": {"C3": 1}, "buckets": True, "scale": True},
    ),
    "criteo-binary": Case("criteo", write_criteo, {"format": "split_binary", "num_numerical": 2, "num_categorical": 3}),
    "synthetic-clicks": Case("synthetic", nothing, {"num_rows": 2000}),
    "synthetic-interactions": Case("synthetic", nothing, {"kind": "interactions", "num_rows": 3000}),
}


def run(case: Case, raw: Path, out: Path, **extra: object) -> prepared.Prepared:
    dataset = DATASETS[case.dataset]
    settings = dataset.Settings.model_validate({**case.settings, **extra.pop("settings", {})})  # type: ignore[dict-item]
    return dataset.prepare(PrepareContext(raw, out, **{"threads": 1, **extra}), settings)  # type: ignore[arg-type]


def prepare_movielens(raw: Path, out: Path, **settings: object) -> prepared.Prepared:
    return run(Case("movielens", write_latest, {"num_negatives": 2, **settings}), raw, out)


def raw_pairs(spec: FeatureSpec, split: str, label: int = 1) -> list[tuple[object, object]]:
    """Raw user and item of every row of a split with that label, in the order of the files."""
    columns = open_split(spec, split, [spec.user_id, spec.item_id, spec.label]).read(0, 10**9)
    encoders = Encoders.load(spec.folder)
    chosen = np.asarray(columns[spec.label]) == label
    users, items = (
        encoders.vocabulary_of(name).decode(np.asarray(columns[name])[chosen]).to_pylist()
        for name in (spec.user_id, spec.item_id)
    )
    return list(zip(users, items, strict=True))


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file of a prepared folder but the one that holds the seconds."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "prepare.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def prepare_table(path: Path, out: Path, text: str | None = None, **settings: object) -> prepared.Prepared:
    if text is not None:
        path.write_text(text)
    return run(Case("table", write_table, {"num_negatives": 1, **settings}), path, out)


def prepare_text(folder: Path, text: str | None = None, out: str = "out", **settings: object) -> prepared.Prepared:
    """A table from the file `a.csv` of a folder, which holds `text` if given."""
    return prepare_table(folder / "a.csv", folder / out, text, **settings)
