"""Datasets: every promise of `prepare` asked of every registered dataset, then what each one alone must do."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ibis
import ibis.expr.operations as ops
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from ibis.expr.types import Table
from numpy.typing import NDArray

from recspec import encoding, metrics, tables
from recspec.card import check
from recspec.datasets import DATASETS, histories, interactions, movielens, outbrain, prepared
from recspec.datasets.columns import boundaries
from recspec.datasets.movielens import LAYOUTS, recognise
from recspec.datasets.negatives import Seen
from recspec.datasets.synthetic import GENRES, write_movielens_like
from recspec.encoding import BucketEncoder, CrossEncoder, Encoders, HashEncoder, ScaleEncoder, VocabularyEncoder
from recspec.errors import DataError, SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.hashing import cross, fingerprint64
from recspec.storage import open_split
from recspec.tables import ROW, _DuckDB, connect, fetch
from tests import made_up_amazon, made_up_criteo, made_up_outbrain

# --- raw rows --------------------------------------------------------------------------------------------------------

RATINGS = [  # user, movie, stars, time: movies 10 to 50, each user in shuffled order of time
    (3, 10, 4.0, 500), (3, 20, 3.0, 100), (3, 30, 5.0, 300),
    (7, 20, 2.0, 50), (7, 30, 4.0, 40),
    (8, 50, 1.0, 10),
    (9, 40, 5.0, 7), (9, 10, 4.5, 8), (9, 20, 0.5, 9), (9, 10, 3.0, 6), (9, 30, 3.5, 2),
]  # fmt: skip
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
    flags = {m: "|".join(str(int(g in genres.split("|"))) for g in movielens.GENRES_100K) for m, (_, genres) in
             MOVIES.items()}  # fmt: skip
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


TABLE_COLUMNS = {"user": "who", "item": "what", "timestamp": "when"}
CASES = {
    "movielens-latest": Case("movielens", write_latest, {"num_negatives": 3}),
    "movielens-1m": Case("movielens", write_1m, {"num_negatives": 3}),
    "movielens-10m": Case("movielens", lambda folder: write_1m(folder, users=False), {"num_negatives": 3}),
    "movielens-100k": Case("movielens", write_100k, {"num_negatives": 3}),
    "ncf": Case("ncf", write_ncf),
    "table-interactions": Case("table", write_table, {**TABLE_COLUMNS, "num_negatives": 1, "item_features": ["price"],
                               "context_features": ["device"]}),
    "table-clicks": Case("table", write_table, {**TABLE_COLUMNS, "label": "clicked", "item_features": ["tags"],
                         "lists": ["tags"], "context_features": ["price", "device"]}),
    "table-hashed": Case("table", write_table, {**TABLE_COLUMNS, "label": "clicked", "item_features": ["tags"],
                         "lists": ["tags"], "context_features": ["price", "device"], "buckets": {"price": 4},
                         "hashed": {"tags": 9, "device": 50}, "crosses": [["device", "price_bucket"], ["who", "what"]],
                         "cross_cardinality": 1000}),
    "amazon": Case("amazon", made_up_amazon.write, {"min_reviews": 5, "categories": "path", "brand": True}),
    "movielens-histories": Case("movielens", write_1m, {"num_negatives": 3, "history": 3, "negative_history": True,
                                "train_negatives": 1, "negatives": "popularity"}),
    "by-time-movielens": Case("movielens", write_latest, {"num_negatives": 2, "history": 3, "split": "time",
                              "valid_share": 0.2, "test_share": 0.2}),
    "adult": Case("adult", write_adult, {"num_buckets": 4, "cross_cardinality": 1000}),
    "outbrain": Case("outbrain", lambda folder: made_up_outbrain.write(folder, num_rows=2000)),
    "criteo-days": Case("criteo", lambda folder: made_up_criteo.write_days(folder, [400, 300, 301]),
                        {"min_count": 2, "min_counts": {"C3": 1}, "buckets": True, "scale": True}),
    "criteo-binary": Case("criteo", write_criteo, {"format": "split_binary", "num_numerical": 2, "num_categorical": 3}),
    "synthetic-clicks": Case("synthetic", nothing, {"num_rows": 2000}),
    "synthetic-interactions": Case("synthetic", nothing, {"kind": "interactions", "num_rows": 3000}),
}  # fmt: skip


def run(case: Case, raw: Path, out: Path, **extra: object) -> prepared.Prepared:
    dataset = DATASETS[case.dataset]
    settings = dataset.Settings.model_validate({**case.settings, **extra.pop("settings", {})})  # type: ignore[dict-item]
    return dataset.prepare(raw, out, settings, **{"threads": 1, **extra})  # type: ignore[arg-type]


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


@dataclass(frozen=True)
class Made:
    case: Case
    raw: Path
    out: Path
    result: prepared.Prepared
    stages: list[tuple[str, int, int | None]]


@pytest.fixture(scope="module", params=list(CASES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A dataset prepared once, for all that only look."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp(request.param)
    raw, stages = case.write(folder / "raw"), []
    result = run(case, raw, folder / "out", progress=lambda *stage: stages.append(stage))
    return Made(case, raw, folder / "out", result, stages)


WITHOUT_IDS = ("adult", "criteo", "outbrain")
"""Datasets of rows that name neither users nor items."""


def with_ids(spec: FeatureSpec) -> list[str]:
    """The roles that have an id."""
    return list(spec.metadata["catalogues"])


def ids_of(spec: FeatureSpec) -> dict[str, str]:
    """The id of each role that has one."""
    return {role: spec.user_id if role == "user" else spec.item_id for role in with_ids(spec)}


# --- what every dataset promises -------------------------------------------------------------------------------------


def test_every_registered_dataset_is_tested() -> None:
    assert {case.dataset for case in CASES.values()} == set(DATASETS)


def test_the_folder_is_a_whole_dataset(made: Made) -> None:
    spec = FeatureSpec.load(made.out)
    assert spec == made.result.spec
    check(spec)
    assert spec.splits == ("train", "valid", "test")
    assert {path.name for path in made.out.parent.iterdir()} <= {"raw", "out"}
    expected = {"feature_spec.yaml", "prepare.json", "encoders.json", "vocabularies", "train", "valid", "test"}
    assert {path.name for path in made.out.iterdir()} == expected | {f"{role}s.parquet" for role in with_ids(spec)}
    assert with_ids(spec) == ([] if made.case.dataset in WITHOUT_IDS else ["user", "item"])


def test_no_row_depends_on_an_order_that_was_not_asked_for(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that gives rows in random order wherever SQL lets it, as Spark does with a table's parts."""
    ordered: set[str] = set()

    def shuffled(table: Table) -> Table:
        op = table.op()
        if isinstance(op, ops.UnboundTable) and op.name in ordered:
            return table
        while isinstance(op, (ops.Limit, ops.Project, ops.DropColumns)):
            op = op.parent
        return table if isinstance(op, ops.Sort) else table.order_by(ibis.random())

    stage, batches = _DuckDB.stage, _DuckDB.batches

    def staged(self: _DuckDB, table: Table, into: Path | None = None) -> Table:
        found = stage(self, asked := shuffled(table), into)
        ordered.update([found.get_name()] if asked is table else [])
        return found

    monkeypatch.setattr(_DuckDB, "stage", staged)
    monkeypatch.setattr(_DuckDB, "batches", lambda self, table, *rows: batches(self, shuffled(table), *rows))
    run(made.case, made.raw, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(made.out)


@pytest.mark.parametrize("name", ["amazon", "movielens-histories", "ncf", "table-clicks", "table-hashed"])
def test_text_beyond_the_limit_of_one_array_changes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is 2 GiB; here a few bytes stand for it."""
    case = CASES[name]
    raw = case.write(tmp_path / "raw")
    run(case, raw, tmp_path / "usual")
    monkeypatch.setattr(encoding, "TEXT_BYTES", 20)
    run(case, raw, tmp_path / "large")
    assert bytes_of(tmp_path / "large") == bytes_of(tmp_path / "usual")


def test_id_zero_is_nobodys(made: Made) -> None:
    spec = made.result.spec
    for name in ids_of(spec).values():
        assert np.asarray(open_split(spec, "train", [name]).read(0, 10**9)[name]).min() >= 1
    assert all(spec.reserves_unknown(name) for name, feature in spec.features.items() if feature.is_categorical)
    for name, feature in spec.features.items():
        assert not (feature.is_list and feature.is_categorical) or feature.padding == 0, name


def test_vocabularies_give_the_cardinalities_and_the_way_back(made: Made) -> None:
    encoders = Encoders.load(made.out)
    for name, feature in made.result.spec.features.items():
        encoder = encoders.encoders.get(name)
        if isinstance(encoder, (HashEncoder, BucketEncoder, CrossEncoder)):
            assert encoder.cardinality == feature.cardinality
            with pytest.raises(DataError, match=f"feature '{name}' is encoded by {encoder.kind}; it has no vocabulary"):
                encoders.vocabulary_of(name)
        elif feature.is_categorical and encoder is not None:
            vocabulary = encoders.vocabulary_of(name)
            assert vocabulary.cardinality == feature.cardinality
            ids = np.arange(1, vocabulary.cardinality)
            assert vocabulary.encode(vocabulary.decode(ids)).tolist() == ids.tolist()
            if made.case.dataset != "criteo":  # whose ids follow how often a value stands in train
                assert vocabulary.values.to_pylist() == sorted(vocabulary.values.to_pylist())


def test_catalogues_have_a_row_for_every_id_and_agree_with_the_rows(made: Made) -> None:
    spec = made.result.spec
    columns = open_split(spec, "train").read(0, 10**9)
    for role, identity in ids_of(spec).items():
        catalogue = pq.read_table(made.out / f"{role}s.parquet")
        assert catalogue.column(identity).to_pylist() == list(range(1, spec.num_ids(identity)))
        ids = np.asarray(columns[identity])
        for name in spec.role(role)[1:]:  # type: ignore[arg-type]
            if made.case.dataset == "table" and "label" in made.case.settings:
                continue  # features of a row's own moment
            held, column = catalogue.column(name).to_pylist(), columns[name]
            assert column.tolist()[:500] == [held[number - 1] for number in ids[:500]], name


def test_the_files_hold_what_the_encoders_make_of_raw_values(made: Made) -> None:
    encoders = Encoders.load(made.out)
    spec = made.result.spec
    if not with_ids(spec):
        pytest.skip("no ids; the dataset's own tests compare rows")
    pairs = raw_pairs(spec, "train")
    columns = open_split(spec, "train", [spec.user_id, spec.item_id, spec.label]).read(0, 10**9)
    positive = np.asarray(columns[spec.label]) == 1
    for place, name in enumerate((spec.user_id, spec.item_id)):
        encoder = encoders.encoders[name]
        assert isinstance(encoder, VocabularyEncoder)
        raw = encoder.column or name
        texts = pa.table({raw: [str(pair[place]) for pair in pairs]})
        assert encoders.encode(texts, [name])[name].tolist() == np.asarray(columns[name])[positive].tolist()  # type: ignore[union-attr]


def test_series_are_one_positive_then_negatives_the_user_never_met(made: Made) -> None:
    spec = made.result.spec
    if not spec.has_series:
        pytest.skip("rows as given, no series")
    length = spec.metadata["test_samples_per_series"]
    met: dict[int, set[int]] = {}
    for split in spec.splits:
        columns = open_split(spec, split, [spec.user_id, spec.item_id, spec.label]).read(0, 10**9)
        users, items, labels = (np.asarray(columns[name]) for name in (spec.user_id, spec.item_id, spec.label))
        for user, item in zip(users[labels == 1].tolist(), items[labels == 1].tolist(), strict=True):
            met.setdefault(user, set()).add(item)
    for split in ("valid", "test"):
        columns = open_split(spec, split).read(0, 10**9)
        users, items, labels = (
            np.asarray(columns[name]).reshape(-1, length) for name in (spec.user_id, spec.item_id, spec.label)
        )
        assert (users == users[:, :1]).all()
        assert (labels[:, 0] == 1).all()
        assert not labels[:, 1:].any()
        if spec.group == spec.user_id:
            assert len(np.unique(users[:, 0])) == len(users)
        if made.case.dataset != "ncf" or split == "valid":  # the paper's own negatives are as they are
            for user, negatives in zip(users[:, 0].tolist(), items[:, 1:].tolist(), strict=True):
                assert not met[user] & set(negatives)
        for name in (*spec.role("user"), *spec.role("context")):  # one value a request
            values = np.asarray(columns[name]).reshape(-1, length)
            assert (values == values[:, :1]).all()


def test_the_summary_counts_the_rows_of_the_files(made: Made) -> None:
    spec, summary = made.result.spec, made.result.summary
    assert summary["rows"] == {split: open_split(spec, split).num_rows for split in spec.splits}
    for role, identity in ids_of(spec).items():
        assert summary[f"{role}s"] == spec.num_ids(identity) - 1
    assert isinstance(summary["seconds"], float)
    assert made.result.message == f"prepared {made.case.dataset} in {made.out}"


def test_progress_is_told_and_reaches_its_total(made: Made) -> None:
    done = [(done, total) for stage, done, total in made.stages if stage == "writing splits"]
    assert done == sorted(done)
    assert done[-1][0] == done[-1][1]


def test_the_same_again_returns_at_once_and_touches_nothing(made: Made) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.out.rglob("*")}
    again = run(made.case, made.raw, made.out)
    assert again.message == f"already prepared: {made.out} holds what was asked for"
    assert again.summary == made.result.summary
    assert again.spec == made.result.spec
    assert {path: path.stat().st_mtime_ns for path in made.out.rglob("*")} == before


def test_the_same_elsewhere_is_the_same_byte_for_byte(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the many small blocks that a low memory limit makes."""
    monkeypatch.setattr(tables, "BYTES_PER_VALUE", 10**9 // 200)
    monkeypatch.setattr(histories, "BYTES_PER_VALUE", 10**9 // 200)
    run(made.case, made.raw, tmp_path / "out", threads=2, memory_limit="1GB")
    assert bytes_of(tmp_path / "out") == bytes_of(made.out)


def test_other_settings_are_refused_and_change_nothing(made: Made) -> None:
    before = bytes_of(made.out)
    name, value = next(iter(made.case.other.items()))
    with pytest.raises(DataError, match=f"pass --force to replace it, or name another place: settings: {name} was .*, "
                       f"now {value}"):  # fmt: skip
        run(made.case, made.raw, made.out, settings=made.case.other)
    assert bytes_of(made.out) == before


@pytest.mark.parametrize("name", ["movielens-latest", "ncf", "table-clicks", "synthetic-clicks"])
def test_force_replaces_what_was_prepared_otherwise(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    raw = case.write(tmp_path / "raw")
    run(case, raw, tmp_path / "out")
    run(case, raw, tmp_path / "out", settings=case.other, force=True)
    run(case, raw, tmp_path / "fresh", settings=case.other)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "fresh")
    assert not list(tmp_path.glob(".*"))


def test_preparing_does_not_load_torch() -> None:
    code = "import sys; from recspec.datasets import DATASETS; assert 'torch' not in sys.modules, 'torch is loaded'"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the folder ------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    raw = write_latest(tmp_path / "raw")
    prepare_movielens(raw, tmp_path / "out")
    before = bytes_of(tmp_path / "out")

    def interrupt(stage: str, done: int, total: int | None) -> None:  # noqa: ARG001
        if stage == "writing splits":
            raise KeyboardInterrupt

    dataset = DATASETS["movielens"]
    with pytest.raises(KeyboardInterrupt) as caught:
        dataset.prepare(raw, tmp_path / "out", dataset.Settings(), force=True, progress=interrupt, threads=1)
    assert caught.value.__notes__ == [f"Nothing was lost: {tmp_path / 'out'} is as it was before."]
    assert bytes_of(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw"]


def test_a_folder_that_recspec_did_not_prepare_is_never_replaced(tmp_path: Path) -> None:
    raw = write_latest(tmp_path / "raw")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="is not a dataset that recspec prepared; name another place"):
        run(CASES["movielens-latest"], raw, tmp_path / "out", force=True)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    prepare_movielens(write_latest(tmp_path / "raw"), tmp_path / "out")
    assert (tmp_path / "out" / "feature_spec.yaml").is_file()


def test_changed_raw_files_are_noticed(tmp_path: Path) -> None:
    raw = write_latest(tmp_path / "raw")
    prepare_movielens(raw, tmp_path / "out")
    with (raw / "ratings.csv").open("a") as file:
        file.write("3,40,1,1\n")
    with pytest.raises(DataError, match="inputs: the raw files are not the same"):
        prepare_movielens(raw, tmp_path / "out")


def test_what_a_killed_run_left_is_cleared_away(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    number = dead.stdout.decode().strip()
    (tmp_path / f".out.{number}.tmp" / "work").mkdir(parents=True)
    (tmp_path / ".out.backup.tmp").mkdir()
    prepare_movielens(write_latest(tmp_path / "raw"), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.backup.tmp", "out", "raw"]


def test_a_run_killed_between_its_two_renames_loses_nothing(tmp_path: Path) -> None:
    raw = write_latest(tmp_path / "raw")
    prepare_movielens(raw, tmp_path / "out")
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (tmp_path / "out").rename(tmp_path / f".out.{dead.stdout.decode().strip()}.old.tmp")
    assert prepare_movielens(raw, tmp_path / "out").message.startswith("already prepared")


# --- UCI Adult -------------------------------------------------------------------------------------------------------


def prepare_adult(raw: Path, out: Path, **settings: object) -> prepared.Prepared:
    return run(Case("adult", write_adult, settings), raw, out)


def test_adult_is_cut_into_train_and_valid_and_its_test_is_the_published_one(tmp_path: Path) -> None:
    result = prepare_adult(write_adult(tmp_path / "raw"), tmp_path / "out", valid=0.25)
    rows = result.summary["rows"]
    assert rows["train"] + rows["valid"] == 80  # type: ignore[index]
    assert 10 <= rows["valid"] <= 30  # type: ignore[index]
    assert rows["test"] == 4  # type: ignore[index]
    assert result.summary["positives"] == 42
    columns = open_split(result.spec, "test").read(0, 10**9)
    assert np.asarray(columns["label"]).tolist() == [0, 1, 1, 0]


def test_adult_features_are_those_worked_by_hand(tmp_path: Path) -> None:
    result = prepare_adult(write_adult(tmp_path / "raw"), tmp_path / "out", crosses=[["education", "age_bucket"]])
    columns = {name: np.asarray(column) for name, column in open_split(result.spec, "test").read(0, 10**9).items()}
    assert columns["occupation"].tolist() == [1, 2, 0, 3]  # Adm-clerical, Exec-managerial, missing, Sales
    assert columns["native_country"].tolist() == [1, 1, 0, 2]  # Canada, Canada, missing, Cuba
    assert columns["age_bucket"].tolist() == [5, 8, 4, 1]  # cut at 18, 25, 30, 35, 40, 45, 50, 55, 60 and 65
    assert columns["capital_gain_bucket"].tolist() == [2, 1, 3, 1]  # zero keeps a bucket to itself
    encoders = Encoders.load(tmp_path / "out")
    gain = encoders.encoders["capital_gain"]
    assert isinstance(gain, ScaleEncoder)
    expected = (np.log1p([2174, 0, 14084, 0]) - gain.mean) / gain.std
    assert columns["capital_gain"].tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    parts = [fingerprint64(pa.array(["Bachelors", "HS-grad", "Masters", "11th"])), np.array([4, 7, 3, 0], np.uint64)]
    assert columns["education_x_age_bucket"].tolist() == (1 + cross(parts) % np.uint64(9_999)).tolist()
    raw = pa.table({"age": ["39", "52", "31", "17"], "education": ["Bachelors", "HS-grad", "Masters", "11th"]})
    served = encoders.encode(raw, ["education_x_age_bucket", "age_bucket", "age", "education"])
    assert {name: np.asarray(column).tolist() for name, column in served.items()} == {
        name: columns[name].tolist() for name in served
    }


def test_adult_is_fitted_on_train_alone(tmp_path: Path) -> None:
    raw = write_adult(tmp_path / "raw")
    before = prepare_adult(raw, tmp_path / "a").spec
    with (raw / "adult.test").open("a") as file:
        file.write(ADULT[0].replace("State-gov", "Astronaut").replace("39,", "90,") + ".\n")
    after = prepare_adult(raw, tmp_path / "b").spec
    assert before.features == after.features
    assert np.asarray(open_split(after, "test", ["workclass"]).read(4, 5)["workclass"]).tolist() == [0]
    assert (tmp_path / "a" / "encoders.json").read_bytes() == (tmp_path / "b" / "encoders.json").read_bytes()


def test_adult_comes_from_a_zip_too(tmp_path: Path) -> None:
    raw = write_adult(tmp_path / "raw")
    with zipfile.ZipFile(tmp_path / "adult.zip", "w") as archive:
        for path in raw.iterdir():
            archive.write(path, path.name)
    prepare_adult(raw, tmp_path / "a")
    prepare_adult(tmp_path / "adult.zip", tmp_path / "b")
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


def test_adult_lines_that_are_malformed_are_named_all_at_once(tmp_path: Path) -> None:
    raw = write_adult(tmp_path / "raw")
    bad = [ADULT[0].replace("39,", "thirty,"), "1, 2", ADULT[1].replace(">50K", "rich")]
    (raw / "adult.test").write_text("|1x3\n" + "\n".join([*bad, ADULT[2]]) + "\n")
    with pytest.raises(DataError) as caught:
        prepare_adult(raw, tmp_path / "out")
    assert caught.value.problems == (
        "adult.test: line 2 has age 'thirty'; expected a whole number",
        "adult.test: line 3 has 2 values; expected 15, between commas",
        "adult.test: line 4 has the label 'rich'; expected <=50K or >50K",
    )
    (raw / "adult.test").write_text("1, 2\n" * 50)
    with pytest.raises(DataError) as caught:
        prepare_adult(raw, tmp_path / "out")
    assert len(caught.value.problems) == 11
    assert caught.value.problems[-1] == "and perhaps more"


def test_adult_files_that_are_missing_are_named(tmp_path: Path) -> None:
    raw = write_adult(tmp_path / "raw")
    (raw / "adult.test").unlink()
    with pytest.raises(
        DataError, match=r"no 'adult\.test'; expected UCI's 'adult.data', 'adult.test', found 'adult.data'"
    ):
        prepare_adult(raw, tmp_path / "out")
    (tmp_path / "adult.zip").write_text("no zip")
    with pytest.raises(DataError, match=r"adult\.zip: not a zip file, or damaged .*; download it again"):
        prepare_adult(tmp_path / "adult.zip", tmp_path / "out")


@pytest.mark.parametrize(
    ("crosses", "message"),
    [
        ([["education", "ocupation"]], r"unknown feature to cross 'ocupation' \(did you mean 'occupation'\?\)"),
        ([["education", "education"]], r"the cross \['education', 'education'\] must be of two different features"),
        ([["education"]], r"the cross \['education'\] must be of two different features or more"),
        ([["race", "gender"], ["race", "gender"]], r"the cross \['race', 'gender'\] is named twice"),
    ],
)
def test_adult_crosses_that_can_not_be_are_explained(crosses: list[list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DATASETS["adult"].Settings.model_validate({"crosses": crosses})


def test_the_whole_of_adult_is_prepared(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    result = prepare_adult(real_data("adult"), tmp_path / "out")
    assert result.summary["rows"] == {"train": 29_234, "valid": 3_327, "test": 16_281}
    assert result.summary["positives"] == 7_841 + 3_846
    check(result.spec)


# --- buckets, hashes and crosses of a table --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "counts", "num_buckets", "expected"),
    [
        ([1, 2, 3, 4], [1, 1, 1, 1], 2, (3.0,)),
        ([4, 3, 2, 1], [1, 1, 1, 1], 4, (2.0, 3.0, 4.0)),
        ([0, 5, 6, 7], [90, 2, 2, 2], 4, (5.0, 6.0, 7.0)),  # zeros fill one bucket, three are left
        ([1, 2, 3], [1, 98, 1], 3, (2.0, 3.0)),
        ([7], [5], 10, ()),
        ([], [], 10, ()),
    ],
)
def test_buckets_are_about_equally_full_and_none_is_empty(
    values: list[int], counts: list[int], num_buckets: int, expected: tuple[float, ...]
) -> None:
    assert boundaries(np.array(values, np.int64), np.array(counts, np.int64), num_buckets) == expected


def test_a_table_hashes_cuts_and_crosses_by_setting(tmp_path: Path) -> None:
    case = CASES["table-hashed"]
    raw = case.write(tmp_path / "raw")
    spec = run(case, raw, tmp_path / "out").spec
    encoders = Encoders.load(spec.folder)
    kinds = {name: encoder.kind for name, encoder in encoders.encoders.items()}
    assert kinds == {
        "user_id": "vocabulary", "item_id": "vocabulary", "tags": "hash", "price": "scale", "price_bucket": "bucket",
        "device": "hash", "device_x_price_bucket": "cross", "who_x_what": "cross",
    }  # fmt: skip
    assert spec.role("context") == ("price", "price_bucket", "device", "device_x_price_bucket", "who_x_what")
    assert spec.features["tags"].length == 2
    rows = pyarrow.csv.read_csv(raw)
    train = open_split(spec, "train").read(0, 10**9)
    bucket = np.bincount(np.asarray(train["price_bucket"]), minlength=5)
    assert bucket[0] == 0
    assert bucket[1:].min() > 0.9 * bucket[1:].max()
    served = encoders.encode(rows, ["device_x_price_bucket", "who_x_what", "user_id", "price_bucket"])
    prepared_rows = {
        (int(user), int(at), int(pair))
        for split in spec.splits
        for columns in [open_split(spec, split).read(0, 10**9)]
        for user, at, pair in zip(*(np.asarray(columns[n]) for n in ("user_id", "device_x_price_bucket", "who_x_what")))  # noqa: B905
    }
    assert prepared_rows == set(
        zip(*(np.asarray(served[name]).tolist() for name in ("user_id", "device_x_price_bucket", "who_x_what")))  # noqa: B905
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hashed": {"devise": 10}}, "setting 'hashed': unknown feature 'devise'"),
        ({"buckets": {"device": 3}}, "feature 'device' is no number, so it can't be cut into buckets; set it as num"),
        ({"buckets": {"cost": 3}}, "setting 'buckets': unknown feature 'cost'"),
        ({"crosses": [["device", "prise"]]}, r"setting 'crosses': unknown feature 'prise'"),
        ({"crosses": [["device", "price"]]}, "'price' is a number, which can't be crossed; cross its bucket"),
        ({"crosses": [["device", "tags"]]}, "'tags' is a list, which can't be crossed; leave it out"),
        ({"hashed": {"what": 9}}, "setting 'hashed': 'what' is the item's id, which has a vocabulary; leave it out"),
        ({"buckets": {"who": 9}}, "setting 'buckets': 'who' is the user's id, which has a vocabulary; leave it out"),
        ({"hashed": {"when": 9}}, "setting 'hashed': 'when' is a column, but no feature; add it to context_features"),
        ({"buckets": {"when": 9}}, "setting 'buckets': 'when' is a column, but no feature; add it to context_features"),
        ({"crosses": [["device", "when"]]}, "'crosses': 'when' is a column, but no feature; add it to context_feat"),
    ],
)
def test_columns_that_can_not_be_hashed_cut_or_crossed_are_named(
    settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    case = CASES["table-clicks"]
    with pytest.raises(SettingsError, match=message):
        run(case, case.write(tmp_path / "raw"), tmp_path / "out", settings=settings)


@pytest.mark.parametrize("name", ["table-interactions", "table-clicks"])
def test_a_table_brings_its_cut_offs(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    raw = case.write(tmp_path / "raw")
    assert "cut_offs" not in run(case, raw, tmp_path / "without").spec.metadata
    asked = run(case, raw, tmp_path / "out", settings={**case.settings, "cut_offs": [5, 12]}).spec
    assert asked.metadata["cut_offs"] == [5, 12]
    assert FeatureSpec.load(tmp_path / "out").metadata["cut_offs"] == [5, 12]
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        DATASETS["table"].Settings.model_validate({"cut_offs": [0]})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"buckets": {"price": [2, 1]}}, r"the boundaries of 'price' must rise, found \[2.0, 1.0\]"),
        ({"crosses": [["a", "b"]]}, "crosses need a label; name its column, or leave crosses out"),
        ({"label": "y", "crosses": [["a"]]}, r"a cross is of two different features or more and named once, .*\['a'\]"),
    ],
)
def test_settings_of_buckets_and_crosses_that_do_not_fit_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DATASETS["table"].Settings.model_validate(settings)


def test_the_real_part_of_outbrain_goes_through_prepare_table(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    settings = {
        "label": "clicked", "user": None, "item": "ad_id", "timestamp": None, "group": "display_id", "split": "group",
        "context_features": ["document_id", "platform", "geo_location", "day"], "categorical": ["day"],
        "hashed": {"document_id": 1000, "geo_location": 2000}, "buckets": {"platform": [2, 3]},
        "crosses": [["platform_bucket", "geo_location"], ["ad_id", "platform_bucket"]],
    }  # fmt: skip
    raw = real_data("outbrain") / "clicks_events_first1959displays.csv"
    result = run(Case("table", nothing, settings), raw, tmp_path / "out")
    assert sum(result.summary["rows"].values()) == 9_999  # type: ignore[attr-defined]
    assert result.summary["positives"] == 1_959
    check(result.spec)
    groups = [set(np.asarray(open_split(result.spec, split, ["group"]).read(0, 10**9)["group"])) for split in
              result.spec.splits]  # fmt: skip
    assert len(set().union(*groups)) == 1_959 == sum(map(len, groups))


# --- MovieLens -------------------------------------------------------------------------------------------------------

MOVIELENS = [name for name in CASES if name.startswith("movielens")]


@pytest.mark.parametrize("name", MOVIELENS)
def test_each_release_is_split_as_worked_out_by_hand(name: str, tmp_path: Path) -> None:
    result = run(CASES[name], CASES[name].write(tmp_path / "raw"), tmp_path / "out")
    assert {split: set(raw_pairs(result.spec, split)) for split in result.spec.splits} == SPLIT_BY_HAND
    assert len(raw_pairs(result.spec, "train")) == 5
    assert result.summary["ratings"] == 11
    assert result.summary["repeats_dropped"] == 1
    assert result.summary["release"] in {layout.releases for layout in LAYOUTS}
    titles = pq.read_table(tmp_path / "out" / "items.parquet")
    assert titles.column("title").to_pylist() == [MOVIES[movie][0] for movie in (10, 20, 30, 40, 50)]
    assert titles.column("year").to_pylist() == [1990, None, 2001, 1994, 1951]
    assert titles.column("genres").to_pylist() == [[2, 3], [1], [], [2], [1, 2, 3]]


def test_users_of_1m_have_their_features_and_one_without_has_unknown(tmp_path: Path) -> None:
    spec = run(CASES["movielens-1m"], write_1m(tmp_path / "raw"), tmp_path / "out").spec
    assert spec.role("user") == ("user_id", "gender", "age", "occupation", "zip")
    users = pq.read_table(tmp_path / "out" / "users.parquet").to_pydict()
    assert users["gender"] == [1, 2, 2, 0]
    assert users["age"] == [1, 3, 2, 0]
    assert users["zip_text"] == ["48067", "70072", "55117-1234", None]


def test_ratings_may_be_filtered_by_stars_and_users_by_how_many(tmp_path: Path) -> None:
    raw = write_latest(tmp_path / "raw")
    high = prepare_movielens(raw, tmp_path / "high", min_rating=3.5)
    assert high.summary["below_min_rating_dropped"] == 5
    assert raw_pairs(high.spec, "train") == [(3, 30), (7, 30), (9, 30)]
    assert raw_pairs(high.spec, "test") == [(3, 10)]  # user 9 met all three movies that are left
    busy = prepare_movielens(raw, tmp_path / "busy", min_interactions=3)
    assert Encoders.load(tmp_path / "busy").vocabulary_of("user_id").values.to_pylist() == [3, 9]
    assert busy.summary["of_users_with_too_few_dropped"] == 3
    assert busy.summary["repeats_dropped"] == 1


def test_filters_that_leave_nothing_say_so(tmp_path: Path) -> None:
    raw = write_latest(tmp_path / "raw")
    with pytest.raises(DataError, match="no user has 20 items or more; set min_interactions lower"):
        prepare_movielens(raw, tmp_path / "out", min_interactions=20)
    with pytest.raises(DataError, match="none of 11 ratings has 6 stars; set min_rating lower"):
        prepare_movielens(raw, tmp_path / "out", min_rating=6)
    write_latest(tmp_path / "empty", [])
    with pytest.raises(DataError, match="the raw files hold no interaction, a header at most; expected one row"):
        prepare_movielens(tmp_path / "empty", tmp_path / "out", min_interactions=20)
    for label in ({}, {"label": "clicked"}):
        with pytest.raises(DataError, match="holds no row, a header at most; expected one row at least"):
            prepare_table(tmp_path / "a.csv", tmp_path / "out", "user_id,item_id,clicked\n", **label)
    assert not (tmp_path / "out").exists()


def test_a_tie_in_time_is_settled_by_the_order_of_the_file(tmp_path: Path) -> None:
    raw = write_latest(tmp_path / "raw", [(1, movie, 4.0, 77) for movie in (30, 10, 20, 40)] + [(2, 50, 1.0, 1)])
    spec = prepare_movielens(raw, tmp_path / "out").spec
    assert raw_pairs(spec, "test") == [(1, 40)]
    assert raw_pairs(spec, "valid") == [(1, 20)]


def test_the_order_of_the_rows_does_not_matter_where_times_differ(tmp_path: Path) -> None:
    ratings = [(user, movie, 4.0, 100 * user + movie) for user in (1, 2, 3) for movie in (10, 20, 30, 40)]
    ratings += [(4, 50, 3.0, 5)]
    for name, rows in (("a", ratings), ("b", ratings[::-1])):
        prepare_movielens(write_latest(tmp_path / f"raw {name}", rows), tmp_path / name)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


def test_a_user_who_met_every_item_stays_in_train_alone(tmp_path: Path) -> None:
    ratings = [(1, movie, 4.0, movie) for movie in (10, 20, 30)] + [(2, movie, 4.0, movie) for movie in (10, 20)]
    result = prepare_movielens(write_latest(tmp_path / "raw", ratings), tmp_path / "out")
    assert result.summary["users_without_possible_negatives"] == 2  # of valid and of test
    assert raw_pairs(result.spec, "test") == [(2, 20)]
    assert raw_pairs(result.spec, "train") == [(1, 10), (2, 10)]
    assert result.spec.splits == ("train", "test")  # nobody is left for valid
    assert not (tmp_path / "out" / "valid").exists()
    check(result.spec)


def test_no_negatives_make_series_of_one(tmp_path: Path) -> None:
    spec = prepare_movielens(write_latest(tmp_path / "raw"), tmp_path / "out", num_negatives=0).spec
    assert spec.metadata["test_samples_per_series"] == 1
    assert raw_pairs(spec, "test", label=0) == []


def test_another_seed_draws_other_negatives_and_changes_nothing_else(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write_movielens_like(raw, num_users=40, num_items=60, num_ratings=500)
    one, two = (prepare_movielens(raw, tmp_path / str(seed), seed=seed).spec for seed in (1, 2))
    assert raw_pairs(one, "test", label=0) != raw_pairs(two, "test", label=0)
    assert raw_pairs(one, "test") == raw_pairs(two, "test")
    assert bytes_of(tmp_path / "1")["train/part-00000.parquet"] == bytes_of(tmp_path / "2")["train/part-00000.parquet"]


@pytest.mark.parametrize("folder", ["", "ml-latest/"])
def test_a_zip_is_read_as_its_folder(folder: str, tmp_path: Path) -> None:
    raw = write_latest(tmp_path / "raw")
    with zipfile.ZipFile(tmp_path / "ml.zip", "w") as archive:
        archive.writestr(f"{folder}README.txt", "read me")
        for path in raw.iterdir():
            archive.write(path, f"{folder}{path.name}")
    prepare_movielens(raw, tmp_path / "a")
    zipped = prepare_movielens(tmp_path / "ml.zip", tmp_path / "b")
    assert str(zipped.summary["checksum"]).startswith("not a known release, so not compared: MD5 ")
    a, b = bytes_of(tmp_path / "a"), bytes_of(tmp_path / "b")
    assert {name: a[name] for name in a if name != "feature_spec.yaml"} == {
        name: b[name] for name in b if name != "feature_spec.yaml"
    }


def test_a_zip_cannot_write_outside_its_folder(tmp_path: Path) -> None:
    raw = write_latest(tmp_path / "raw")
    with zipfile.ZipFile(tmp_path / "ml.zip", "w") as archive:
        for path in raw.iterdir():
            archive.write(path, f"../../{path.name}")
    prepare_movielens(tmp_path / "ml.zip", tmp_path / "deep" / "out")
    assert sorted(path.name for path in tmp_path.rglob("*.csv")) == ["movies.csv", "ratings.csv"]


def test_a_zip_that_bears_a_releases_name_must_be_that_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write_1m(tmp_path / "raw")
    with zipfile.ZipFile(tmp_path / "ml-1m.zip", "w") as archive:
        for path in raw.iterdir():
            archive.write(path, f"ml-1m/{path.name}")
    with pytest.raises(
        DataError, match=r"ml-1m\.zip: checksum FAILED: MD5 is [0-9a-f]{32}, the publisher's is c4d9eecf"
    ):
        prepare_movielens(tmp_path / "ml-1m.zip", tmp_path / "out")
    found = movielens._check_sum((tmp_path / "ml-1m.zip").rename(tmp_path / "other.zip"))
    monkeypatch.setitem(movielens.CHECKSUMS, "ml-1m.zip", found.split()[-1])
    result = prepare_movielens(tmp_path / "other.zip", tmp_path / "out")
    assert str(result.summary["checksum"]).startswith("PASSED: ml-1m.zip, MD5 ")


def test_a_damaged_zip_is_said(tmp_path: Path) -> None:
    (tmp_path / "ml.zip").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(DataError, match=r"ml\.zip: not a zip file, or damaged .*; download it again"):
        prepare_movielens(tmp_path / "ml.zip", tmp_path / "out")


def test_a_folder_right_in_the_named_one_is_found_and_two_are_not_guessed_between(tmp_path: Path) -> None:
    write_1m(tmp_path / "raw" / "ml-1m")
    assert recognise(tmp_path / "raw")[0].releases == "1M"
    write_latest(tmp_path / "raw" / "ml-25m")
    with pytest.raises(DataError, match=r"holds several releases, in .*ml-1m.*ml-25m.*; name one of these folders"):
        recognise(tmp_path / "raw")


def test_other_files_are_listed_beside_what_each_release_has(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "rating.csv").write_text("")
    with pytest.raises(DataError) as caught:
        recognise(tmp_path / "raw")
    assert "raw: not a MovieLens release; found 'rating.csv': 4 problems" in str(caught.value)
    assert "MovieLens 20M, 25M, latest has ratings.csv, movies.csv" in caught.value.problems
    with pytest.raises(DataError, match="no such file or folder; expected a MovieLens zip or its unpacked folder"):
        recognise(tmp_path / "nowhere")


def test_malformed_ratings_are_named_by_file_and_line(tmp_path: Path) -> None:
    raw = write_1m(tmp_path / "raw")
    with (raw / "ratings.dat").open("a") as file:
        file.write("1::2::3\n1::two::3::4\n")
    with pytest.raises(DataError) as caught:
        prepare_movielens(raw, tmp_path / "out")
    assert str(raw / "ratings.dat") in str(caught.value)
    assert caught.value.problems == (
        "line 12: has 3 columns, expected 4 separated by '::'",
        "line 13: column 'movieId' is 'two'; expected a whole number",
    )
    assert not (tmp_path / "out").exists()


def test_a_movie_that_stands_twice_is_said(tmp_path: Path) -> None:
    raw = write_latest(tmp_path / "raw")
    with (raw / "movies.csv").open("a") as file:
        file.write("10,Again,Drama\n")
    with pytest.raises(
        DataError, match="the item catalogue names 1 ids more than once, such as '10'; expected one row"
    ):
        prepare_movielens(raw, tmp_path / "out")


# --- the NCF paper's files -------------------------------------------------------------------------------------------


def test_the_papers_split_is_kept_and_the_last_of_train_is_valid(tmp_path: Path) -> None:
    result = run(CASES["ncf"], write_ncf(tmp_path / "raw"), tmp_path / "out")
    spec = result.spec
    assert raw_pairs(spec, "train") == [(0, 5), (0, 7), (1, 5)]
    assert raw_pairs(spec, "valid") == [(0, 6)]
    assert raw_pairs(spec, "test") == [(0, 8), (1, 6)]
    assert raw_pairs(spec, "test", label=0) == [(0, 9), (0, 8), (0, 9), (1, 7), (1, 8), (1, 9)]
    assert raw_pairs(spec, "valid", label=0) == [(0, 9)] * 3  # the only item user 0 never met
    assert spec.metadata["test_samples_per_series"] == 4
    assert result.summary["repeats_dropped"] == 1
    assert result.summary["rows_with_positive_among_negatives"] == 1


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("width", [2, 3])
def test_the_papers_files_may_lack_times_and_end_lines_either_way(width: int, end: str, tmp_path: Path) -> None:
    raw = write_ncf(tmp_path / "raw")
    for path in raw.iterdir():
        lines = [line.split("\t") for line in path.read_text().splitlines()]
        cut = lines if path.suffix == ".negative" else [line[:width] for line in lines]
        path.write_bytes("".join("\t".join(line) + end for line in cut).encode())
    result = run(CASES["ncf"], raw, tmp_path / "out", settings={"history": 3})
    assert raw_pairs(result.spec, "train") == [(0, 5), (0, 6), (1, 5)]
    assert raw_pairs(result.spec, "valid") == [(0, 7)]  # the last of the file
    assert raw_pairs(result.spec, "test") == [(0, 8), (1, 6)]
    assert "history_gap" not in result.spec.features
    told = "no times: x.train.rating and x.test.rating without a fourth column, so each user's rows are in the order of"
    assert result.summary["inferred"][0] == f"{told} the file"  # type: ignore[index]


def test_titles_may_stand_in_a_file_of_their_own(tmp_path: Path) -> None:
    raw = write_ncf(tmp_path / "raw")
    (raw / "titles.csv").write_text("item_id,title\n8,Eight\n5,Five\n77,Nobody\n")
    run(CASES["ncf"], raw, tmp_path / "out", settings={"titles": "titles.csv"})
    items = pq.read_table(tmp_path / "out" / "items.parquet")
    assert items.column("title").to_pylist() == ["Five", None, None, "Eight", None]
    with pytest.raises(SettingsError, match=r"setting 'titles': .*title\.csv: no such file"):
        run(CASES["ncf"], raw, tmp_path / "b", settings={"titles": "title.csv"})
    (raw / "titles.csv").write_text("id,title\n8,Eight\n")
    with pytest.raises(DataError, match="header: no column 'item_id'; found 'id', 'title'"):
        run(CASES["ncf"], raw, tmp_path / "b", settings={"titles": "titles.csv"})


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            "x.train.rating",
            "0\t5\t4\t1\n0\t6\t4\n",
            "x.train.rating: line 2: has 3 columns, expected 4 separated by '\\t'",
        ),
        ("x.train.rating", "0\n", "x.train.rating: line 1: has 1 columns, expected 4 separated by '\\t'"),
        ("x.train.rating", "0\tx\t4\t1\n", "x.train.rating: line 1: column 'item_id' is 'x'; expected a whole number"),
        ("x.test.rating", "0\t8\t5\t50\n0\t6\t5\t2\n", "x.test.rating: line 2: user 0 stands in line 1 too"),
        ("x.test.negative", "(0,8)\t9\n", "x.test.negative: has 1 lines, but the test file has 2"),
        ("x.test.negative", "(0,8)\t9\n(1,7)\t9\n", "line 2: is of (1,7), but line 2 of the test file is of (1,6)"),
        ("x.test.negative", "(0,8)\t9\t8\n(1,6)\t9\n", "line 2: lists 1 negatives; expected 2, as in line 1"),
        ("x.test.negative", "0,8\t9\n(1,6)\t9\n", "line 1: begins with '0,8'; expected `(user,item)`"),
        ("x.test.negative", "(0,8)\t9\n(1,6)\tnine\n", "line 2: negative 'nine' is not an item's number"),
        ("x.test.negative", "", "line 1: lists no negative"),
    ],
)
def test_malformed_lines_of_the_papers_files_are_named(file: str, text: str, message: str, tmp_path: Path) -> None:
    raw = write_ncf(tmp_path / "raw")
    (raw / file).write_text(text)
    with pytest.raises(DataError) as caught:
        run(CASES["ncf"], raw, tmp_path / "out")
    assert message in str(caught.value)


def test_missing_and_doubled_files_of_the_paper_are_said(tmp_path: Path) -> None:
    raw = write_ncf(tmp_path / "raw")
    (raw / "y.test.rating").write_text("")
    with pytest.raises(DataError) as caught:
        run(CASES["ncf"], raw, tmp_path / "out")
    assert caught.value.problems == ("y.test.negative is missing", "y.train.rating is missing")
    for suffix in ("train.rating", "test.negative"):
        (raw / f"y.{suffix}").write_text("")
    with pytest.raises(DataError, match="holds files of 'x', 'y'; put each into a folder of its own"):
        run(CASES["ncf"], raw, tmp_path / "out")
    (tmp_path / "other").mkdir()
    with pytest.raises(
        DataError, match=r"holds none of the NCF paper's files; found none, expected PREFIX\.train\.rating"
    ):
        run(CASES["ncf"], tmp_path / "other", tmp_path / "out")


# --- your own table --------------------------------------------------------------------------------------------------


def prepare_table(path: Path, out: Path, text: str | None = None, **settings: object) -> prepared.Prepared:
    if text is not None:
        path.write_text(text)
    return run(Case("table", write_table, {"num_negatives": 1, **settings}), path, out)


def test_three_columns_are_enough(tmp_path: Path) -> None:
    text = "user_id,item_id,timestamp\nann,x,3\nann,y,1\nann,z,2\nbob,y,9\n"
    result = prepare_table(tmp_path / "a.csv", tmp_path / "out", text)
    assert raw_pairs(result.spec, "train") == [("ann", "y"), ("bob", "y")]
    assert result.summary["users_without_possible_negatives"] == 2  # ann met all three
    assert result.summary["order"] == "by column 'timestamp'"


def test_without_a_timestamp_the_files_order_counts_and_is_said(tmp_path: Path) -> None:
    text = "user_id,item_id\nann,x\nann,y\nbob,z\nann,w\n"
    result = prepare_table(tmp_path / "a.csv", tmp_path / "out", text)
    assert raw_pairs(result.spec, "test") == [("ann", "w")]
    assert result.summary["order"] == "as in the file: there is no timestamp"
    with pytest.raises(SettingsError, match="setting 'timestamp': no column 'time'; found 'user_id', 'item_id'"):
        prepare_table(tmp_path / "a.csv", tmp_path / "b", timestamp="time")


@pytest.mark.parametrize("times", [["2020-01-03", "2020-01-01", "2020-01-02"], ["2020-01-01 10:00:03",
                         "2020-01-01 10:00:01", "2020-01-01 10:00:02"], ["1.75", "1.25", "1.5"]])  # fmt: skip
def test_times_may_be_dates_or_fractions(times: list[str], tmp_path: Path) -> None:
    rows = [f"ann,{item},{time}\n" for item, time in zip("xyz", times, strict=True)]
    text = "user_id,item_id,timestamp\n" + "".join(rows) + f"bob,w,{times[0]}\n"
    result = prepare_table(tmp_path / "a.csv", tmp_path / "out", text)
    assert raw_pairs(result.spec, "test") == [("ann", "x")]
    assert raw_pairs(result.spec, "valid") == [("ann", "z")]


def test_a_time_that_is_none_is_named(tmp_path: Path) -> None:
    text = "user_id,item_id,timestamp\nann,x,2020-01-01\nann,y,soon\n"
    with pytest.raises(DataError, match="column 'timestamp': line 3 is 'soon'; expected a time of ISO 8601"):
        prepare_table(tmp_path / "a.csv", tmp_path / "out", text)


def test_users_and_items_files_bring_titles_and_features(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("sku,name,price,tags\nb,Bread,2.5,food|fresh\na,Axe,30,tool\nq,Quill,1,\n")
    (tmp_path / "users.csv").write_text("who,age\n2,40\n1,20\n")
    text = "who,sku\n1,a\n1,b\n1,c\n2,b\n2,c\n3,a\n"
    settings = {"user": "who", "item": "sku", "items": "items.csv", "users": "users.csv", "title": "name",
                "user_features": ["age"], "item_features": ["price", "tags"], "lists": ["tags"]}  # fmt: skip
    spec = prepare_table(tmp_path / "a.csv", tmp_path / "out", text, **settings).spec
    items = pq.read_table(tmp_path / "out" / "items.parquet").to_pydict()
    assert items["title"] == ["Axe", "Bread", None]
    assert items["tags"] == [[3], [1, 2], []]
    assert items["tags_text"] == ["tool", "food|fresh", None]
    assert items["price"] == pytest.approx([1.0, -1.0, 0.0])  # of 30 and 2.5; the missing one is the mean
    assert pq.read_table(tmp_path / "out" / "users.parquet").column("age").to_pylist() == [-1.0, 1.0, 0.0]
    assert spec.role("user") == ("user_id", "age")
    assert spec.role("item") == ("item_id", "price", "tags")
    check(spec)


def test_features_in_the_rows_are_the_latest_of_each_item(tmp_path: Path) -> None:
    text = "user_id,item_id,kind,place\n1,a,old,home\n2,a,new,work\n1,b,x,work\n1,c,x,home\n2,b,,home\n3,d,x,home\n"
    spec = prepare_table(tmp_path / "a.csv", tmp_path / "out", text, item_features=["kind"],
                         context_features=["place"]).spec  # fmt: skip
    items = pq.read_table(tmp_path / "out" / "items.parquet").column("kind").to_pylist()
    assert Encoders.load(tmp_path / "out").vocabulary_of("kind").decode(items).to_pylist() == ["new", None, None, "x"]
    assert spec.role("context") == ("place",)
    told = "'kind' of 2 of 4 items, such as 'b': they have no train row, and values of held-out rows are not used; "
    assert spec.metadata["summary"]["dropped"] == [f"{told}a file of items (items=FILE) can give them"]  # type: ignore[index]
    check(spec)


@pytest.mark.parametrize("split", ["share", "time", "group"])
def test_labelled_rows_are_split_as_asked_and_kept_as_given(split: str, tmp_path: Path) -> None:
    path = write_table(tmp_path / "raw")
    settings = {**TABLE_COLUMNS, "label": "clicked", "split": split, "valid": 0.2, "test": 0.2,
                "context_features": ["price"]}  # fmt: skip
    result = prepare_table(path, tmp_path / "out", **settings)
    given = pa.csv.read_csv(path)
    rows = result.summary["rows"]
    assert isinstance(rows, dict)
    assert sum(rows.values()) == 400
    assert result.summary["positives"] == sum(given.column("clicked").to_pylist())
    assert result.spec.group == "group"
    assert not result.spec.has_series
    groups = [set(np.asarray(open_split(result.spec, name, ["group"]).read(0, 400)["group"]).tolist())
              for name in result.spec.splits]  # fmt: skip
    assert (split == "group") == groups[0].isdisjoint(groups[1] | groups[2])
    train = open_split(result.spec, "train", ["price"]).read(0, 400)["price"]
    assert np.mean(np.asarray(train)) == pytest.approx(0, abs=1e-6)  # fitted on train alone
    assert np.std(np.asarray(train)) == pytest.approx(1, abs=1e-6)


def test_values_seen_only_after_train_or_too_seldom_are_unknown(tmp_path: Path) -> None:
    rows = [f"{user},{item},{time},1\n" for time, (user, item) in enumerate(["ax", "ax", "ay", "bx", "ax", "az"])]
    settings = {"label": "y", "split": "time", "valid": 0, "test": 0.2, "min_count": 2}
    spec = prepare_table(tmp_path / "a.csv", tmp_path / "out", "user_id,item_id,timestamp,y\n" + "".join(rows),
                         **settings).spec  # fmt: skip
    test = open_split(spec, "test", ["user_id", "item_id"]).read(0, 9)
    assert (test["user_id"].tolist(), test["item_id"].tolist()) == ([1], [0])  # type: ignore[union-attr]
    assert spec.splits == ("train", "test")
    check(spec)


def test_unknown_items_keep_the_features_of_their_file(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id,kind\na,tool\nb,tool\nc,food\n")
    rows = [f"{item},{time},1\n" for time, item in enumerate("acacacab")]
    settings = {"user": None, "label": "y", "split": "time", "valid": 0, "test": 0.2, "items": "items.csv",
                "item_features": ["kind"]}  # fmt: skip
    spec = prepare_table(tmp_path / "a.csv", tmp_path / "out", "item_id,timestamp,y\n" + "".join(rows), **settings).spec
    test = open_split(spec, "test", ["item_id", "kind"]).read(0, 9)
    assert (test["item_id"].tolist(), test["kind"].tolist()) == ([0], [2])  # type: ignore[union-attr]


def test_a_label_may_begin_at_a_number_of_stars(tmp_path: Path) -> None:
    text = "user_id,item_id,stars\n" + "".join(f"1,{item},{item % 5 + 1}\n" for item in range(50))
    with pytest.raises(
        DataError, match=r"column 'stars', the label: line 3 is '2', .*expected 0 or 1.* .or set positive_from"
    ):
        prepare_table(tmp_path / "a.csv", tmp_path / "out", text, label="stars")
    assert (
        prepare_table(tmp_path / "a.csv", tmp_path / "out", label="stars", positive_from=4).summary["positives"] == 20
    )


def test_rows_without_users_and_items_have_a_context_alone(tmp_path: Path) -> None:
    text = "age,job,rich\n" + "".join(f"{age},{'ab'[age % 2]},{age % 3 // 2}\n" for age in range(60))
    spec = prepare_table(tmp_path / "a.csv", tmp_path / "out", text, user=None, item=None, label="rich",
                         context_features=["age", "job"]).spec  # fmt: skip
    assert spec.inputs() == ("age", "job")
    assert not (tmp_path / "out" / "users.parquet").exists()
    check(spec)


def test_parquet_with_every_type_is_read(tmp_path: Path) -> None:
    rows = 40
    table = pa.table(
        {
            "user_id": pa.array([f"u{row % 5}" for row in range(rows)]).dictionary_encode(),
            "item_id": pa.array([row % 7 for row in range(rows)], pa.int16()),
            "timestamp": pa.array(range(rows), pa.timestamp("s")),
            "flag": [row % 2 == 0 for row in range(rows)],
            "amount": pa.array([None if row == 3 else row / 2 for row in range(rows)], pa.float32()),
            "tags": pa.array([["a", "b"][: row % 3] for row in range(rows)], pa.list_(pa.string())),
        }
    )
    for number in range(2):
        (tmp_path / "raw").mkdir(exist_ok=True)
        pq.write_table(table.slice(number * 20, 20), tmp_path / "raw" / f"{number}.parquet")
    spec = prepare_table(tmp_path / "raw", tmp_path / "out", context_features=["flag", "amount", "tags"],
                         categorical=["flag"]).spec  # fmt: skip
    assert spec.features["flag"].cardinality == 3
    assert spec.features["tags"].length == 2
    check(spec)


def test_every_column_that_is_nowhere_is_named(tmp_path: Path) -> None:
    settings = {"user": "uid", "item_features": ["prize", "item_id"], "numeric": ["colour"]}
    with pytest.raises(SettingsError) as caught:
        prepare_table(tmp_path / "a.csv", tmp_path / "out", "user_id,item_id,price\n1,2,3\n", **settings)
    assert "setting 'user': no column 'uid' (did you mean 'user_id'?); found 'user_id', 'item_id', 'price'" in str(
        caught.value
    )
    assert "item feature 'prize' is no column (did you mean 'price'?)" in str(caught.value)
    assert "item feature 'item_id' is the item's id, which is a feature already; leave it out" in str(caught.value)
    assert "'colour' is set as numeric, categorical or list, but is no feature" in str(caught.value)


def test_rows_without_a_user_are_named(tmp_path: Path) -> None:
    text = "user_id,item_id\n1,a\n,b\n,c\n"
    with pytest.raises(DataError, match="column 'user_id' has no value in 2 rows, such as line 3, line 4"):
        prepare_table(tmp_path / "a.csv", tmp_path / "out", text)


def test_a_file_that_names_an_item_twice_is_said(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id,name\na,1\na,2\n")
    with pytest.raises(
        DataError, match=r"items\.csv: names 'a' more than once in column 'item_id'; expected one row each"
    ):
        prepare_table(tmp_path / "a.csv", tmp_path / "out", "user_id,item_id\n1,a\n", items="items.csv")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label": "y", "split": "leave_one_out"}, "so goes without a label"),
        ({"split": "share"}, "split share needs a label"),
        ({"history": 5, "label": "y"}, "history: of rows without a label"),
        ({"min_history": 2, "negative_history": True}, "min_history and negative_history say how histories are made"),
        ({"user": None}, "needs the columns of user and item"),
        ({"label": "y", "split": "time", "timestamp": None}, "split time needs the column of the timestamp"),
        ({"label": "y", "split": "group", "user": None}, "split group needs the column of the group"),
        ({"label": "y", "valid": 0.5, "test": 0.5}, "leave some for train"),
    ],
)
def test_settings_that_do_not_go_together_are_said(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DATASETS["table"].Settings.model_validate(settings)


def test_files_of_several_kinds_in_a_folder_are_not_guessed_between(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    for name in ("a.csv", "b.jsonl"):
        (tmp_path / "raw" / name).write_text("user_id,item_id\n1,a\n")
    with pytest.raises(
        DataError, match=r"expected files of one kind.* found 'a\.csv', 'b\.jsonl'; name those you mean"
    ):
        prepare_table(tmp_path / "raw", tmp_path / "out")
    with pytest.raises(DataError, match="no such file or folder; expected CSV, JSON lines or Parquet"):
        prepare_table(tmp_path / "nowhere", tmp_path / "out")


def test_compressed_and_tab_separated_text_is_read(tmp_path: Path) -> None:
    text = "user_id,item_id\n1,a\n1,b\n2,c\n"
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "a.tsv").write_text(text.replace(",", "\t"))
    for name in ("a.csv.gz", "a.tsv"):
        assert raw_pairs(prepare_table(tmp_path / name, tmp_path / f"out {name}").spec, "test") == [("1", "b")]


# --- columns that are named alike, and what a preparation says of itself ---------------------------------------------

ALIKE = ("label", "group", "timestamp", "split", "series", "title", "channel", "item_id_of_file", "count", "a b", "ü|x")
"""Columns that rows, users and items all have; recspec and its engines use some of these names themselves."""


@pytest.mark.parametrize("labelled", [True, False])
def test_any_column_name_may_stand_in_rows_users_and_items_at_once(labelled: bool, tmp_path: Path) -> None:
    alike, users, items = list(ALIKE), ["u1", "u2", "u3"], ["i1", "i2", "i3", "i4", "i5"]
    rows = [(user, item) for user in users for item in items[:4]]
    header = ",".join(["who", "what", "when", "clicked", "Price", *alike])
    lines = [f"{user},{item},{place},{place % 2},1.5,{','.join(f'{n}-r{place % 3}' for n in alike)}"
             for place, (user, item) in enumerate(rows)]  # fmt: skip
    (tmp_path / "rows.csv").write_text("\n".join([header, *lines]) + "\n")
    for role, key, ids in (("users", "who", users), ("items", "what", items)):
        table = [",".join([key, "price", *alike]), *(f"{i},cheap,{','.join(f'{n}-{i}' for n in alike)}" for i in ids)]
        (tmp_path / f"{role}.csv").write_text("\n".join(table) + "\n")
    features = {f"{role}_features": [*alike, *(["price"] if role == "item" else [])] for role in ("user", "item")}
    settings = {"user": "who", "item": "what", "timestamp": "when", "users": "users.csv", "items": "items.csv",
                **features, "context_features": alike, "split": "time" if labelled else None,
                **({"label": "clicked"} if labelled else {})}  # fmt: skip
    spec = prepare_table(tmp_path / "rows.csv", tmp_path / "out", None, **settings).spec
    check(spec)
    encoders = Encoders.load(spec.folder)
    train = open_split(spec, "train").read(0, 10**9)
    ids = encoders.vocabulary_of("item_id").decode(np.asarray(train["item_id"])).to_pylist()
    owners = encoders.vocabulary_of("user_id").decode(np.asarray(train["user_id"])).to_pylist()
    for name in alike:
        for role, wanted in (("item", ids), ("user", owners)):
            made = f"{name}_{role}"
            values = encoders.vocabulary_of(made).decode(np.asarray(train[made])).to_pylist()
            assert values == [f"{name}-{one}" for one in wanted]
        context = next(n for n in spec.role("context") if n in (name, f"{name}_context"))
        told = encoders.vocabulary_of(context).decode(np.asarray(train[context])).to_pylist()
        assert {str(value)[: len(name) + 2] for value in told} == {f"{name}-r"}
        given = encoders.encode(pa.table({name: ["x", f"{name}-r0"]}), [context])[context]
        assert np.asarray(given).tolist() == [0, 1]  # raw rows keep their columns' plain names
    assert "price_item" in spec.role("item")
    shown = pq.read_table(spec.folder / "items.parquet").column_names
    assert "title_text" in shown
    assert len({name.lower() for name in shown}) == len(shown)
    changed = spec.metadata["summary"]["changed"]  # type: ignore[index]
    assert ("item feature 'channel_item' is the column 'channel' of items.csv, because the plain name is another "
            "column's") in changed  # fmt: skip
    assert any(note.startswith("context feature 'label_context' is the column 'label' of the rows") for note in changed)


def test_settings_of_a_renamed_feature_take_its_plain_name_or_its_own(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id,tag,size\n1,a|b,1\n2,b,2\n")
    text = "user_id,item_id,tag,size,clicked\nu,1,x,9,1\nu,2,y,8,0\nv,1,x,7,0\nv,2,x,9,1\n"
    asked = {"items": "items.csv", "item_features": ["tag", "size_item"], "context_features": ["tag"],
             "lists": ["tag_item"], "buckets": {"size": [2]}, "label": "clicked", "valid": 0, "test": 0.1}  # fmt: skip
    spec = prepare_table(tmp_path / "a.csv", tmp_path / "out", text, **asked).spec
    assert spec.role("item") == ("item_id", "tag_item", "size_item", "size_item_bucket")
    assert spec.features["tag_item"].is_list
    assert not spec.features["tag"].is_list


def test_a_column_of_the_rows_is_one_feature_alone(tmp_path: Path) -> None:
    asked = {"user_features": ["kind"], "item_features": ["kind", "kind"]}
    with pytest.raises(SettingsError) as caught:
        prepare_table(tmp_path / "a.csv", tmp_path / "out", "user_id,item_id,kind\nu,1,x\n", **asked)
    assert caught.value.problems == (
        "feature 'kind' is named as user feature and as item feature; leave one",
        "item feature 'kind' is named twice",
    )


@pytest.mark.parametrize(
    ("features", "problem"),
    [
        ({"context_features": ["row"]}, "context feature 'row' is no column; found 'user_id', 'item_id', 'kind'"),
        ({"item_features": ["row"]}, "item feature 'row' is no column; found 'user_id', 'item_id', 'kind', 'size'"),
        ({"item_features": ["size_item"]}, "item feature 'size_item' is no column (did you mean 'size'?)"),
        (
            {"item_features": ["kind", "kind_item"]},
            "feature 'kind' is named as item feature and as item feature; leave",
        ),
    ],
)
def test_a_name_stands_for_one_column_of_the_files(
    features: dict[str, list[str]], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "items.csv").write_text("item_id,kind,size\n1,a,2\n")
    with pytest.raises(SettingsError) as caught:
        prepare_table(
            tmp_path / "a.csv", tmp_path / "out", "user_id,item_id,kind\nu,1,x\n", items="items.csv", **features
        )
    assert problem in str(caught.value)


def test_a_model_of_columns_named_alike_trains_recommends_and_predicts(tmp_path: Path) -> None:
    from recspec.models import MODELS
    from recspec.predict import Predictor
    from recspec.train import TrainSettings, train

    (tmp_path / "items.csv").write_text("item_id,title,channel\n" + "".join(f"{i},T{i},c{i % 2}\n" for i in range(9)))
    lines = [f"u{u},{i},{10 * u + i},{'web' if i % 2 else 'app'}\n" for u in range(5) for i in range(u, u + 5)]
    text = "user_id,item_id,timestamp,channel\n" + "".join(lines)
    how = TrainSettings(epochs=1, batch_size=20, tensorboard=False)
    asked: Sequence[dict[str, object]] = ({"context_features": ["channel"]}, {"item_features": ["channel"]}, {})
    for number, features in enumerate(asked):
        settings = {"items": "items.csv", **features}
        spec = prepare_table(tmp_path / "a.csv", tmp_path / f"out{number}", text, **settings).spec
        model = "dlrm" if features else "neumf"
        train(model, spec, tmp_path / f"run{number}", settings=how, model_settings=MODELS[model].Settings())
        predictor = Predictor.open(tmp_path / f"run{number}")
        rows = pa.table({"user_id": ["u1"], "item_id": ["3"], "channel": ["web"]})
        assert 0 < predictor.predict(rows)[0][0] < 1
        assert len(predictor.items.titles_of(np.array([1, 2])).drop_null()) == 2
        if "context_features" not in features:  # whose value no request for recommendations gives
            found = predictor.recommend(["u1"], k=2)[0].items
            assert [item.title for item in found] == [f"T{item.item}" for item in found]
            assert len(found) == 2


def test_the_latest_value_is_the_latest_in_time_and_of_train(tmp_path: Path) -> None:
    text = "user_id,item_id,timestamp,mood\nu,1,30,late\nu,2,10,early\nu,3,50,test\nu,4,40,valid\nu,5,20,middle\n"
    asked = {"user_features": ["mood"], "num_negatives": 0}
    spec = prepare_table(tmp_path / "a.csv", tmp_path / "out", text, **asked).spec
    moods = Encoders.load(spec.folder).vocabulary_of("mood").values.to_pylist()
    assert moods == ["late"]
    told = "user feature 'mood' varies within 1 of 1 users, such as user 'u' ('late' and 'early'); every row has its "
    told += "user's latest value of train; if the value belongs to the event, name the column in context_features"
    assert spec.metadata["summary"]["changed"] == [told]  # type: ignore[index]
    labelled = text.replace("mood\n", "mood,clicked\n").replace("\nu", ",1\nu").replace(",1\nu,1,30", "\nu,1,30", 1)
    labelled = labelled.rstrip("\n") + ",0\n"
    asked = {"user_features": ["mood"], "label": "clicked", "split": "time", "valid": 0.2, "test": 0.2}
    spec = prepare_table(tmp_path / "b.csv", tmp_path / "b", labelled, **asked).spec
    held = pq.read_table(spec.folder / "users.parquet").column("mood").to_pylist()
    assert Encoders.load(spec.folder).vocabulary_of("mood").decode(held).to_pylist() == ["late"]
    (note,) = [note for note in spec.metadata["summary"]["changed"] if "varies" in note]  # type: ignore[index]
    assert "rows keep their own; what a request leaves out is taken from users.parquet" in note


def test_items_that_only_the_rows_or_only_the_file_name_are_counted(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id,title\na,A\nq,Q\nz,Z\n,Nobody\n")
    text = "user_id,item_id\nu,a\nu,b\nv,a\nv,c\n"
    summary = prepare_table(tmp_path / "a.csv", tmp_path / "out", text, items="items.csv").summary
    assert summary["dropped"] == [
        "1 rows of items.csv: they have no 'item_id'",
        "2 of 3 items in items.csv stand in no row, such as 'q'; they have no id, so they are never recommended",
        "the split valid: it has no row",
    ]
    told = "2 of 3 items of the rows are not in items.csv, such as 'b'; nothing of the file is known of them: add them "
    assert summary["changed"] == [f"{told}to it"]
    (tmp_path / "items.csv").write_text("item_id,title\nA-1,A\nA-2,Q\n")
    with pytest.raises(DataError) as caught:
        prepare_table(tmp_path / "a.csv", tmp_path / "b", text, items="items.csv")
    assert str(caught.value) == (
        "items.csv: describes none of the 3 items of the rows; its column 'item_id' holds 'A-1', 'A-2', the rows' ids "
        "are such as 'a', 'b', 'c'; name the file that fits, or leave it out"
    )


def test_what_is_dropped_is_told_with_a_count_and_an_example(tmp_path: Path) -> None:
    raw = write_latest(tmp_path / "raw")
    summary = prepare_movielens(raw, tmp_path / "out", min_rating=2, min_interactions=3).summary
    repeat = "1 of 9 rows repeat an earlier one of the same user and item, such as user '9' and item '10'"
    assert summary["dropped"] == [
        "2 of 6 items in movies.csv stand in no row, such as '50'; they have no id, so they are never recommended",
        "2 of 11 ratings of fewer than 2 stars, such as that of user '8' for movie '50' (min_rating)",
        f"{repeat}; the earliest counts",
        "2 rows of users with fewer than 3 items, such as user '7' (min_interactions)",
    ]
    assert json.loads((tmp_path / "out" / "prepare.json").read_text())["summary"]["dropped"] == summary["dropped"]


def test_repeats_may_be_kept(tmp_path: Path) -> None:
    rows = pa.table({"user_id": ["u", "u", "u"], "item_id": [1, 2, 1], "timestamp": [1, 2, 3]})
    pq.write_table(rows, tmp_path / "rows.parquet")
    with connect("duckdb", folder=tmp_path / "work") as backend:
        table = backend.read_parquet([tmp_path / "rows.parquet"], row=True)
        for repeats, kept in (("first", [1, 2]), ("keep", [1, 2, 3])):
            cleaned = interactions.clean(
                backend, table, min_interactions=1, order=["timestamp", ROW], repeats=repeats  # type: ignore[arg-type]
            )  # fmt: skip
            times = fetch(backend, cleaned.rows.order_by("timestamp")).column("timestamp").to_pylist()
            assert times == kept


# --- negatives -------------------------------------------------------------------------------------------------------


def drawn_by(seen: Seen, users: Iterable[int], count: int) -> NDArray[np.int64]:
    """So many draws of each user: (users, count)."""
    owners = np.repeat(np.array(list(users)), count)
    return seen.draw(owners, np.tile(np.arange(count), len(owners) // count), (1, 2)).reshape(-1, count)


def test_unseen_items_are_drawn_evenly_and_seen_ones_never() -> None:
    seen = {5: [1, 2, 7], 6: [], 7: [1, 2, 3, 4, 5, 6, 7, 8, 9]}
    users = np.array([user for user, items in seen.items() for _ in items])
    items = np.array([item for own in seen.values() for item in own])
    drawn = drawn_by(Seen.of(users, items, num_items=10), [5, 7], 7000)
    assert set(drawn[1].tolist()) == {10}
    counts = np.bincount(drawn[0], minlength=11)
    assert counts[[0, 1, 2, 7]].tolist() == [0, 0, 0, 0]
    assert counts[[3, 4, 5, 6, 8, 9, 10]] == pytest.approx([1000] * 7, abs=120)  # 4 standard deviations


def test_draws_are_of_the_user_alone() -> None:
    users, items = np.repeat(np.arange(1, 51), 4), np.tile([1, 2, 3, 4], 50)
    together = drawn_by(Seen.of(users, items, 100), range(1, 51), 20)
    alone = drawn_by(Seen.of(users[:8], items[:8], 100), [2], 20)
    assert together[1].tolist() == alone[0].tolist()
    assert len(np.unique(together)) > 90
    assert (together[0] != together[1]).any()


# --- made-up data ----------------------------------------------------------------------------------------------------


def test_clicks_keep_the_probability_they_were_drawn_from(tmp_path: Path) -> None:
    result = run(CASES["synthetic-clicks"], tmp_path, tmp_path / "out", settings={"num_rows": 30_000})
    columns = open_split(result.spec, "train", ["probability", "label"]).read(0, 10**9)
    probability, label = np.asarray(columns["probability"], np.float64), np.asarray(columns["label"])
    for low in np.arange(0, 1, 0.2):
        chosen = (probability >= low) & (probability < low + 0.2)
        assert label[chosen].mean() == pytest.approx(probability[chosen].mean(), abs=0.03)
    best = result.summary["best_possible"]["test"]["auc"]  # type: ignore[index]
    assert 0.75 < best < 0.9
    assert "probability" not in result.spec.inputs()
    assert set(result.spec.inputs(is_list=True)) == {"tags"}
    assert len(result.spec.role("user")) == 3


def test_interactions_are_ranked_best_by_the_preferences(tmp_path: Path) -> None:
    result = run(CASES["synthetic-interactions"], tmp_path, tmp_path / "out")
    best = result.summary["best_possible"]["test"]  # type: ignore[index]
    assert best["hit_rate@10"] > 0.5  # by chance 10 of 51


def test_made_up_movielens_has_exactly_the_rows_asked_for(tmp_path: Path) -> None:
    write_movielens_like(tmp_path / "a", num_users=300, num_items=400, num_ratings=12_345, seed=3)
    ratings = pa.csv.read_csv(tmp_path / "a" / "ratings.csv")
    movies = pa.csv.read_csv(tmp_path / "a" / "movies.csv")
    assert ratings.num_rows == 12_345
    assert ratings.group_by(["userId", "movieId"]).aggregate([]).num_rows == 12_345
    counts = np.bincount(ratings.column("userId").to_numpy())[1:]
    assert (len(counts), counts.min(), counts.max() <= 200) == (300, 20, True)
    assert movies.num_rows == 400
    assert len(set(movies.column("title").to_pylist())) == 400
    assert {genre for text in movies.column("genres").to_pylist() for genre in text.split("|")} <= set(GENRES)
    assert set(ratings.column("movieId").to_pylist()) <= set(movies.column("movieId").to_pylist())
    popularity = np.sort(np.unique(ratings.column("movieId").to_numpy(), return_counts=True)[1])[::-1]
    assert popularity[:40].sum() > popularity[-160:].sum()  # a tenth of the items against two fifths


def test_made_up_movielens_is_the_same_again_and_may_be_tiny(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_movielens_like(
            tmp_path / name, num_users=50, num_items=80, num_ratings=900, seed=3, ratings_per_block=200
        )
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    write_movielens_like(tmp_path / "c", num_users=1, num_items=2, num_ratings=1)
    assert pa.csv.read_csv(tmp_path / "c" / "ratings.csv").num_rows == 1
    with pytest.raises(ValueError, match="can't spread 2 ratings over 1 users"):
        write_movielens_like(tmp_path / "d", num_users=1, num_items=2, num_ratings=2)


def test_made_up_movielens_has_tastes_that_beat_popularity(tmp_path: Path) -> None:
    write_movielens_like(tmp_path / "raw", num_users=600, num_items=800, num_ratings=40_000)
    spec = run(Case("movielens", write_latest), tmp_path / "raw", tmp_path / "out").spec
    train = open_split(spec, "train", ["user_id", "item_id"]).read(0, 10**9)
    counts = np.zeros((spec.num_ids("user_id"), spec.num_ids("item_id")))
    counts[train["user_id"], train["item_id"]] = 1  # type: ignore[index]
    together = counts.T @ counts
    np.fill_diagonal(together, 0)
    similar = together / np.sqrt(np.outer(counts.sum(0), counts.sum(0)) + 1)
    test = open_split(spec, "test", ["user_id", "item_id", "label"]).read(0, 10**9)
    users, items, labels = (np.asarray(test[name]) for name in ("user_id", "item_id", "label"))
    rates = [
        metrics.hit_rate(metrics.rank_groups(scores, labels, users, candidates=items), 10)
        for scores in (counts.sum(0)[items], (counts @ similar)[users, items])
    ]
    assert rates[1] > rates[0] + 0.15


# --- real data -------------------------------------------------------------------------------------------------------

RealData = Callable[[str], Path]


@pytest.mark.parametrize(
    ("name", "users", "items", "ratings"),
    [("movielens-100k", 943, 1682, 100_000), ("movielens-latest-small", 610, 9724, 100_836),
     pytest.param("movielens-1m", 6040, 3706, 1_000_209, marks=pytest.mark.slow)],
)  # fmt: skip
def test_real_movielens_has_the_published_sizes(
    name: str, users: int, items: int, ratings: int, tmp_path: Path, real_data: RealData
) -> None:
    result = run(Case("movielens", write_latest), real_data(name), tmp_path / "out")
    assert (result.summary["users"], result.summary["items"], result.summary["ratings"]) == (users, items, ratings)
    assert result.summary["rows"] == {"train": ratings - 2 * users, "valid": 101 * users, "test": 101 * users}


@pytest.mark.slow
def test_the_papers_own_files_have_the_published_sizes(tmp_path: Path, real_data: RealData) -> None:
    result = run(CASES["ncf"], real_data("ncf-ml-1m"), tmp_path / "out")
    assert result.summary["rows"] == {"train": 988_129, "valid": 604_000, "test": 604_000}
    assert result.summary["rows_with_positive_among_negatives"] == 156


# --- archives ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["movielens", "outbrain", "adult"])
def test_a_zip_that_takes_far_more_space_unpacked_is_refused(dataset: str, tmp_path: Path) -> None:
    names = {"movielens": ["ratings.csv", "movies.csv"], "adult": ["adult.data", "adult.test"],
             "outbrain": [f"{name}.csv" for name in outbrain.TABLES]}[dataset]  # fmt: skip
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, b"0" * 10)
    data = bytearray((tmp_path / "a.zip").read_bytes())
    place = data.index(b"PK\x01\x02")  # the directory says how much there is; no more is read
    data[place + 24 : place + 28] = (3 << 30).to_bytes(4, "little")
    (tmp_path / "a.zip").write_bytes(bytes(data))
    with pytest.raises(
        DataError, match=r"takes [0-9]+ bytes in the zip and 3,221,225,472 unpacked, more than 1,000,000,00"
    ):
        run(Case(dataset, nothing), tmp_path / "a.zip", tmp_path / "out")
