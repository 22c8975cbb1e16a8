"""Made-up rows, and made-up files in the MovieLens layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from recspec.data.storage import open_split
from recspec.metrics import measures as metrics
from tests.dataset_cases import CASES, Case, run, write_latest
from tests.made_up_films import GENRES, write_movielens_like


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
    write_movielens_like(tmp_path / "tiny", num_users=1, num_items=2, num_ratings=1)
    assert pa.csv.read_csv(tmp_path / "tiny" / "ratings.csv").num_rows == 1
    with pytest.raises(ValueError, match="can't spread 2 ratings over 1 users"):
        write_movielens_like(tmp_path / "d", num_users=1, num_items=2, num_ratings=2)
    popularity = np.sort(np.unique(ratings.column("movieId").to_numpy(), return_counts=True)[1])[::-1]
    assert popularity[:40].sum() > popularity[-160:].sum()  # a tenth of the items against two fifths


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
