"""Held-out rows must not show in what a model learns from: asked of every dataset, on data made to give them away."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray

from recspec.data.encoding.encoders import Encoders
from recspec.data.prepare import PrepareContext
from recspec.data.storage import open_split
from recspec.datasets import DATASETS, append_events
from recspec.evaluation.interactions import positives
from recspec.feature_spec import FeatureSpec
from recspec.loading.sampling import sampler_for
from recspec.metrics import measures as metrics
from tests import made_up_amazon, made_up_criteo, made_up_outbrain
from tests.dataset_cases import ADULT, CASES, Case, write_adult

NUM_USERS, NUM_ITEMS, PER_USER = 60, 15, 8
Row = tuple[str, str, int]
"""User, item, time."""


def made_up_rows(seed: int = 0, *, num_users: int = NUM_USERS) -> list[Row]:
    """Different items of each user at times that no two rows share, in the shuffled order of a file."""
    rng = np.random.default_rng(seed)
    times = 1_700_000_000 + 60 * rng.permutation(num_users * PER_USER)
    items = [rng.permutation(NUM_ITEMS)[:PER_USER] for _ in range(num_users)]
    pairs = [(f"{100 + user}", f"{500 + item}") for user, own in enumerate(items) for item in own]
    rows = [(user, item, int(time)) for (user, item), time in zip(pairs, times, strict=True)]
    return [rows[place] for place in rng.permutation(len(rows))]


def held_out(rows: Sequence[Row], split: str) -> set[Row]:
    """Rows of valid and test: each user's last two, the latest fifth, those that a column names, or a random fifth."""
    if split == "share":  # by the place in the file and the seed
        digests = [hashlib.md5(f"1:{place}".encode()).hexdigest() for place in range(len(rows))]
        return {row for row, digest in zip(rows, digests, strict=True) if digest < f"{int(0.2 * 2**32):08x}"}
    if split == "given":
        return {row for row, part in parts(rows).items() if part != "train"}
    if split == "time":
        return set(sorted(rows, key=lambda row: row[2])[-len(rows) // 5 :])
    by_user: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row[2]):
        by_user.setdefault(row[0], []).append(row)
    return {row for own in by_user.values() for row in own[-2:]}


def parts(rows: Sequence[Row]) -> dict[Row, str]:
    """Ready-made splits: of rows in order of time every eighth is for valid, and every eighth for test."""
    return {
        row: {1: "valid", 5: "test"}.get(place % 8, "train")
        for place, row in enumerate(sorted(rows, key=lambda row: row[2]))
    }


def with_other_items(rows: Sequence[Row], split: str) -> list[Row]:
    """The same rows, but every held-out one is of another item, which train has and its user has not met."""
    out = held_out(rows, split)
    met = {user: {item for other, item, _ in rows if other == user} for user, _, _ in rows}
    changed = []
    for row in rows:
        user, item, time = row
        if row in out:
            item = min({item for _, item, _ in rows} - met[user])
            met[user].add(item)
        changed.append((user, item, time))
    return changed


# --- what a model may learn from -------------------------------------------------------------------------------------


def learnt_from(folder: Path) -> dict[str, object]:
    """All of a prepared folder that train sees: its rows, ids, encoders and catalogues.

    A user's history in the catalogue holds all that the user did: requests are answered by it, and training never
    reads it.
    """
    spec = FeatureSpec.load(folder)
    found: dict[str, object] = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for part in ("train", "train-new", "vocabularies", "encoders.json")
        for path in sorted([folder / part] if (folder / part).is_file() else (folder / part).rglob("*"))
        if path.is_file()
    }
    for path in sorted(folder.glob("*s.parquet")):
        past = [name for name in pq.read_schema(path).names if name in spec.role("history")]
        found[path.name] = pq.read_table(path).drop_columns(past)
    return {**found, "features": spec.features}


def prepare(dataset: str, raw: Path, out: Path, settings: Mapping[str, object]) -> FeatureSpec:
    made = DATASETS[dataset].Settings.model_validate(settings)
    return DATASETS[dataset].prepare(PrepareContext(raw, out, threads=1), made).spec


# --- interactions ----------------------------------------------------------------------------------------------------


def write_ratings(folder: Path, rows: Sequence[Row]) -> Path:
    folder.mkdir(parents=True)
    lines = [f"{user},{item},{4},{time}\n" for user, item, time in rows]
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + "".join(lines))
    movies = [f"{500 + item},Film {item},Drama\n" for item in range(NUM_ITEMS)]
    (folder / "movies.csv").write_text("movieId,title,genres\n" + "".join(movies))
    return folder


def write_papers(folder: Path, rows: Sequence[Row]) -> Path:
    """The NCF paper's files: a user's last row for test."""
    folder.mkdir(parents=True)
    last = {user: row for row in sorted(rows, key=lambda row: row[2]) for user in [row[0]]}
    for name, part in (("train", [row for row in rows if row != last[row[0]]]), ("test", [*last.values()])):
        text = "".join(f"{user}\t{item}\t1\t{time}\n" for user, item, time in part)
        (folder / f"x.{name}.rating").write_text(text)
    negatives = "".join(f"({user},{item})\t500\t501\n" for user, item, _ in last.values())
    (folder / "x.test.negative").write_text(negatives)
    return folder


def write_reviews(folder: Path, rows: Sequence[Row]) -> Path:
    folder.mkdir(parents=True)
    made_up_amazon.write_reviews(folder / "reviews_Toys.json.gz", rows)
    return folder


def write_table(folder: Path, rows: Sequence[Row], out: set[Row] = frozenset(), mark: str = "") -> Path:  # type: ignore[assignment]
    """Each row with features made to leak: `last` is its own item, and `drift` grows with time.

    Args:
        out: Rows whose features and label are written otherwise.
        mark: What stands before them then.
    """
    folder.mkdir(parents=True)
    start = min(time for _, _, time in rows)
    span = max(time for _, _, time in rows) - start + 1
    lines = ["user_id,item_id,timestamp,last,drift,clicked,part\n"]
    split = parts(rows)
    for row in rows:
        user, item, time = row
        said = mark if row in out else ""
        lines.append(
            f"{user},{item},{time},{said}i{item},{said}d{10 * (time - start) // span},"
            f"{(time // 60 + (row in out)) % 2},{split[row]}\n"
        )
    (folder / "rows.csv").write_text("".join(lines))
    return folder / "rows.csv"


ALL_DRAWN = {"history": 4, "negative_history": True, "train_negatives": 2, "negatives": "popularity"}
WRITERS: Mapping[str, tuple[Callable[[Path, Sequence[Row]], Path], Mapping[str, object]]] = {
    "movielens": (write_ratings, {"num_negatives": 3}),
    "ncf": (write_papers, {}),
    "amazon": (write_reviews, {"min_reviews": 1, "num_negatives": 3}),
    "table": (write_table, {"num_negatives": 3, "user_features": ["last"], "item_features": ["drift"]}),
}
BY_TIME: Mapping[str, Mapping[str, object]] = {
    "movielens": {"valid_share": 0.1, "test_share": 0.1},
    "amazon": {"valid_share": 0.1, "test_share": 0.1},
    "table": {"valid": 0.1, "test": 0.1},
}


def splitting(dataset: str, split: str) -> dict[str, object]:
    """The settings of a split."""
    return {
        "time": {"split": "time", **BY_TIME.get(dataset, {})},
        "given": {"splits": "part", "label": None},
        "group": {"split": "group", "group": "user_id"},
    }.get(split, {"split": split})


@pytest.mark.parametrize(
    ("dataset", "split"),
    [*((name, "leave_one_out") for name in WRITERS), *((name, "time") for name in BY_TIME), ("table", "given")],
)
def test_train_is_the_same_whatever_the_held_out_items_are(dataset: str, split: str, tmp_path: Path) -> None:
    write, settings = WRITERS[dataset]
    given = {**settings, **ALL_DRAWN, **(splitting(dataset, split) if split != "leave_one_out" else {})}
    rows = made_up_rows()
    for name, written in (("a", rows), ("b", with_other_items(rows, split))):
        prepare(dataset, write(tmp_path / f"raw-{name}", written), tmp_path / name, given)
    assert learnt_from(tmp_path / "a") == learnt_from(tmp_path / "b")


@pytest.mark.parametrize(
    ("split", "late"),
    [
        ("leave_one_out", True),
        ("given", False),
        ("share", True),
        ("labelled-time", False),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("leave_one_out", False),
                ("given", True),
                ("time", False),
                ("time", True),
                ("labelled-given", True),
            )
        ),
    ],
)
def test_an_update_learns_nothing_of_held_out_rows(split: str, late: bool, tmp_path: Path) -> None:
    """New events are the newest third, or any that are not held out before."""
    labelled, split = split == "share" or split.startswith("labelled-"), split.removeprefix("labelled-")
    rows = made_up_rows()
    out = held_out(rows, split)
    newest = set(sorted(rows, key=lambda row: row[2])[len(rows) * 2 // 3 :])
    new = {row for place, row in enumerate(rows) if (place % 3 == 0 or row in out if late else row in newest)}
    if split == "share":  # which takes rows by their place
        new = set(rows[len(rows) * 2 // 3 :])
    given = {**WRITERS["table"][1], **ALL_DRAWN, **splitting("table", split)}
    if labelled:
        given = {name: given[name] for name in given if name not in ALL_DRAWN and name != "num_negatives"}
        given |= {"label": "clicked", "history": 4, "negative_history": True}
    for name, changed in (("a", rows), ("b", with_other_items(rows, split))):
        whole = write_table(
            tmp_path / name, changed, set(changed) - set(rows) if name == "b" else frozenset(), "other-"
        )
        header, *lines = whole.read_text().splitlines(keepends=True)
        for file, wanted in (("part", False), ("new", True)):
            kept = [line for line, row in zip(lines, rows, strict=True) if (row in new) == wanted]
            (tmp_path / name / f"{file}.csv").write_text("".join([header, *kept]))
        base = prepare("table", tmp_path / name / "part.csv", tmp_path / f"base-{name}", given)
        append_events(base, tmp_path / name / "new.csv", tmp_path / f"grown-{name}")
    assert learnt_from(tmp_path / "grown-a") == learnt_from(tmp_path / "grown-b")


@pytest.mark.parametrize("settings", [{"splits": "part"}, {"splits": "half"}, {"splits": "half", "timestamp": None}])
def test_histories_of_ready_made_splits_hold_no_event_of_a_later_split(
    settings: Mapping[str, object], tmp_path: Path
) -> None:
    """With two splits, valid is made from train: by time, or of random rows."""
    text = write_table(tmp_path / "raw", made_up_rows()).read_text().splitlines()
    halves = [text[0] + ",half", *(f"{line},{'test' if line.endswith('test') else 'train'}" for line in text[1:])]
    (tmp_path / "rows.csv").write_text("\n".join(halves) + "\n")
    spec = prepare(
        "table", tmp_path / "rows.csv", tmp_path / "out", {"history": 8, "label": None, "num_negatives": 2, **settings}
    )
    pairs = {split: pairs_of(spec, split) for split in spec.splits}
    assert len(pairs["valid"]) > 20
    for place, split in enumerate(spec.splits):
        earlier = set().union(*(pairs[each] for each in spec.splits[: place + 1]))
        held = positives(spec, [split])
        found = {(user, int(item)) for user in range(held.num_users) for item in held.of(np.array([user]))[1]}
        assert pairs[split] <= found <= earlier


def pairs_of(spec: FeatureSpec, split: str) -> set[tuple[int, int]]:
    columns = columns_of(spec, split)
    kept = columns["label"] > 0
    return set(zip(columns["user_id"][kept].tolist(), columns["item_id"][kept].tolist(), strict=True))


# --- rows with values of their own -----------------------------------------------------------------------------------


def table_with(split: str, *, label: bool, history: bool = False) -> Case:
    rows = made_up_rows()
    settings: dict[str, object] = {"user_features": ["last"], "item_features": ["drift"], **splitting("table", split)}
    settings |= {"label": "clicked"} if label else {"num_negatives": 3, "label": None}
    settings |= ALL_DRAWN if history and not label else {"history": 4, "negative_history": True} if history else {}

    def spoil(raw: Path, _: Path) -> None:
        raw.unlink()
        raw.parent.rmdir()
        write_table(raw.parent, rows, held_out(rows, split), "other-")

    return Case("table", lambda folder: write_table(folder, rows), settings, spoil=spoil)


def spoil_groups(raw: Path, out: Path) -> None:
    """The rows of held-out users have other values."""
    spec = FeatureSpec.load(out)
    known, rows = set(Encoders.load(spec.folder).vocabularies["user_id"].values.to_pylist()), made_up_rows()
    raw.unlink()
    raw.parent.rmdir()
    write_table(raw.parent, rows, {row for row in rows if row[0] not in known}, "other-")


def spoil_adult(raw: Path, _: Path) -> None:
    other = [row.replace("Canada", "Atlantis").replace(" 40,", " 99,") for row in ADULT]
    (raw / "adult.test").write_text("|1x3 Cross validator\n" + "".join(f"{row}.\n" for row in other))


def write_criteo(folder: Path) -> Path:
    for day, count in enumerate((400, 300, 301)):
        made_up_criteo.write(folder / f"day_{day}", num_rows=count, seed=day, num_numerical=2, num_categorical=3)
    return folder


def spoil_criteo(raw: Path, _: Path) -> None:
    made_up_criteo.write(raw / "day_2", num_rows=301, seed=77, num_numerical=2, num_categorical=3)


def spoil_outbrain(raw: Path, out: Path) -> None:
    """No click in any held-out display: click rates of train must not move."""
    spec = FeatureSpec.load(out)
    groups = [open_split(spec, split, ["group"]).read(0, 2**40)["group"] for split in ("valid", "test")]
    displays = {str(display) for group in groups for display in np.asarray(group).tolist()}
    header, *lines = (raw / "clicks_train.csv").read_text().splitlines()
    parts = [line.split(",") for line in lines]  # display, ad, clicked
    lines = [",".join([*part[:2], "0" if part[0] in displays else part[2]]) for part in parts]
    (raw / "clicks_train.csv").write_text("\n".join([header, *lines]) + "\n")


VALUES: Mapping[str, Case] = {
    **{name: case for name, case in CASES.items() if case.spoil},
    "table-leave-one-out": table_with("leave_one_out", label=False),
    "table-time": table_with("time", label=False),
    "table-histories": table_with("leave_one_out", label=False, history=True),
    "table-labelled-time": table_with("time", label=True),
    "table-given": table_with("given", label=False, history=True),
    "table-labelled-given": table_with("given", label=True),
    "table-labelled-share": table_with("share", label=True),
    "table-labelled-histories": table_with("time", label=True, history=True),
    "table-labelled-group": replace(table_with("group", label=True), spoil=spoil_groups),
    "adult": Case("adult", write_adult, {"num_buckets": 4, "valid": 0.2}, spoil=spoil_adult),
    "criteo": Case(
        "criteo",
        write_criteo,
        {"num_numerical": 2, "num_categorical": 3, "min_count": 2, "buckets": True, "scale": True},
        spoil=spoil_criteo,
    ),
    "outbrain": Case("outbrain", lambda folder: made_up_outbrain.write(folder, num_rows=2000), spoil=spoil_outbrain),
}
WITHOUT = {"synthetic": "reads no file"}


def test_every_dataset_is_asked() -> None:
    assert {*WRITERS, *(case.dataset for case in VALUES.values()), *WITHOUT} == set(DATASETS)


@pytest.mark.parametrize("name", VALUES)
def test_train_is_the_same_whatever_the_held_out_values_are(name: str, tmp_path: Path) -> None:
    case = VALUES[name]
    raw = case.write(tmp_path / "raw")
    prepare(case.dataset, raw, tmp_path / "a", case.settings)
    assert case.spoil is not None
    case.spoil(raw, tmp_path / "a")
    prepare(case.dataset, raw, tmp_path / "b", case.settings)
    assert learnt_from(tmp_path / "a") == learnt_from(tmp_path / "b")
    values = [columns_of(FeatureSpec.load(tmp_path / folder), "test") for folder in ("a", "b")]
    changed = [name for name in values[0] if values[0][name].tolist() != values[1][name].tolist()]
    assert changed or case.settings.get("label") is None  # labelled rows keep their own values, so these differ


# --- what the leak alone is worth ------------------------------------------------------------------------------------


def columns_of(spec: FeatureSpec, split: str) -> dict[str, NDArray[np.generic]]:
    held = open_split(spec, split).read(0, 2**40)
    return {name: column for name, column in held.items() if isinstance(column, np.ndarray)}


def rates(spec: FeatureSpec, feature: str) -> NDArray[np.float64]:
    """Of each id of a feature the share of train rows with label 1; the share of all for an id that train lacks."""
    train, size = columns_of(spec, "train"), spec.num_ids(feature)
    rows = np.bincount(train[feature], minlength=size)
    clicks = np.bincount(train[feature], train["label"].astype(np.float64), minlength=size)
    return np.where(rows > 0, clicks / np.maximum(rows, 1), train["label"].mean())


def matches(spec: FeatureSpec, split: str) -> NDArray[np.float64]:
    """Whether the user's feature names the row's item."""
    encoders, columns = Encoders.load(spec.folder), columns_of(spec, split)
    said = encoders.vocabulary_of("last").decode(columns["last"]).to_pylist()
    items = encoders.vocabulary_of("item_id").decode(columns["item_id"]).to_pylist()
    return np.array([one == f"i{item}" for one, item in zip(said, items, strict=True)], np.float64)


@pytest.mark.parametrize("split", ["leave_one_out", "time", "labelled"])
def test_the_leak_alone_is_worth_nothing(split: str, tmp_path: Path) -> None:
    rows = made_up_rows(1, num_users=400)
    settings: dict[str, object] = {"user_features": ["last"], "item_features": ["drift"]}
    settings |= {"label": "clicked", "split": "time"} if split == "labelled" else {"split": split}
    settings |= {} if split == "labelled" else {"train_negatives": 2, "num_negatives": 2}
    spec = prepare("table", write_table(tmp_path / "raw", rows), tmp_path / "out", settings)
    test = columns_of(spec, "test")
    labels = test["label"].astype(np.float64)
    for scores in (
        matches(spec, "test"),
        -matches(spec, "test"),
        rates(spec, "drift")[test["drift"]],
        rates(spec, "last")[test["last"]],
    ):
        assert metrics.auc(scores, labels) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("split", ["share", "time"])
def test_drawn_negatives_beside_labelled_rows_have_features_of_the_same_place(split: str, tmp_path: Path) -> None:
    given = {"item_features": ["drift"], "label": "clicked", "split": split}
    spec = prepare("table", write_table(tmp_path / "raw", made_up_rows()), tmp_path / "out", given)
    batch = {name: torch.from_numpy(np.array(column)) for name, column in columns_of(spec, "train").items()}
    sampler = sampler_for(spec, 2, features=["item_id", "drift"])
    made = sampler(_All(batch), epoch=0, step=0)
    catalogue = pq.read_table(tmp_path / "out" / "items.parquet").column("drift").to_numpy()
    assert made["drift"].numpy().tolist() == catalogue[made["item_id"].numpy() - 1].tolist()
    assert made["drift"].min() > 0  # no catalogue value is unknown, as if it came from a held-out row


@dataclass(frozen=True)
class _All:
    """All rows of a split as one batch."""

    batch: dict[str, torch.Tensor]
    first_row: int = 0

    @property
    def total_rows(self) -> int:
        return len(self.batch["label"])
