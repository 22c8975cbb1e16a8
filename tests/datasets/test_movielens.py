"""MovieLens."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError
from recspec.data.encoding.encoders import Encoders
from recspec.data.storage.check import check
from recspec.datasets import movielens
from recspec.datasets.movielens import LAYOUTS, recognise
from tests.dataset_cases import (
    CASES,
    MOVIES,
    SPLIT_BY_HAND,
    Case,
    bytes_of,
    prepare_movielens,
    prepare_text,
    raw_pairs,
    run,
    write_1m,
    write_latest,
)
from tests.prepare.test_splits import of_held_out_users

# --- MovieLens --------------------------------------------------------------------------------------------------------
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
            prepare_text(tmp_path, "user_id,item_id,clicked\n", **label)
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
    held = [bytes_of(tmp_path / name) for name in ("a", "b")]
    assert held[0].pop("raw/events.parquet") != held[1].pop("raw/events.parquet")  # as in the file
    assert held[0] == held[1]


def test_a_user_who_met_every_item_has_no_row_in_test(tmp_path: Path) -> None:
    ratings = [(1, movie, 4.0, movie) for movie in (10, 20, 30)] + [(2, movie, 4.0, movie) for movie in (10, 20)]
    result = prepare_movielens(write_latest(tmp_path / "raw", ratings), tmp_path / "out")
    assert result.summary["users_without_possible_negatives"] == 1
    assert raw_pairs(result.spec, "test") == [(2, 20)]
    assert raw_pairs(result.spec, "train") == [(1, 10), (2, 10)]
    assert raw_pairs(result.spec, "valid") == [(1, 20)]
    assert raw_pairs(result.spec, "valid", label=0) == [(1, 30)] * 2  # valid knows nothing of test
    check(result.spec)


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
    with pytest.raises(DataError, match=r"movies.csv: names '10' more than once in column 'movieId'; expected one row"):
        prepare_movielens(raw, tmp_path / "out")


# --- real data --------------------------------------------------------------------------------------------------------
RealData = Callable[[str], Path]


@pytest.mark.parametrize(
    ("name", "users", "items", "ratings"),
    [
        ("movielens-100k", 943, 1682, 100_000),
        ("movielens-latest-small", 610, 9724, 100_836),
        pytest.param("movielens-1m", 6040, 3706, 1_000_209, marks=pytest.mark.slow),
    ],
)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["movielens-100k", "movielens-1m"])
def test_held_out_users_of_real_ratings_are_those_of_the_papers_own_code(
    name: str, tmp_path: Path, real_data: RealData
) -> None:
    asked = {"split": "users", "heldout_users": 90, "min_rating": 4, "min_interactions": 5, "seed": 98765}
    spec = run(Case("movielens", write_latest, asked), real_data(name), tmp_path / "out").spec
    file, separator = ("u.data", "\t") if name.endswith("100k") else ("ratings.dat", "::")
    names = ["user_id", "item_id", "rating", "time"]
    rows = pd.read_csv(real_data(name) / file, sep=separator, names=names, engine="python")
    rows = rows[rows["rating"] > 3.5]
    rows = rows[rows.groupby("user_id")["item_id"].transform("size") >= 5].reset_index(drop=True)
    pairs = list(zip(rows["user_id"], rows["item_id"], strict=True))
    expected = of_held_out_users(rows, 90, 98765)
    assert {split: {*raw_pairs(spec, split)} for split in spec.splits} == {
        split: {pairs[place] for place in places} for split, places in expected.items()
    }
