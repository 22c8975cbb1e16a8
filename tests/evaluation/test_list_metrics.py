"""Coverage, novelty, diversity and popularity lift by hand."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.evaluation.evaluations import evaluate
from recspec.evaluation.list_metrics import (
    coverage,
    disliked,
    diversities,
    exposure,
    history_popularity,
    measures_of,
    novelties,
    popularity_lift,
    revenues,
)
from recspec.evaluation.task import EvaluateSettings, EvaluationTask
from recspec.models import Interactions
from tests.evaluation.tables import TableModel, dataset, trained

LISTS = np.array([[0, 1], [1, 2], [3, -1]], dtype=np.int32)
COUNTS = np.array([4, 2, 1, 0])


def test_measures_by_hand() -> None:
    assert coverage(LISTS, 5) == 0.8
    # Of 4 users, 4, 2, 1 and 0 (as 1) have the items: 0, 1, 2 and 2 bits.
    assert novelties(LISTS, COUNTS, 4).tolist() == [0.5, 1.5, 2.0]
    # Mean popularities 3, 1.5 and 0 of the lists; 2, 1 and none of the histories: (3 + 1.5) / 2 over 3 / 2.
    assert popularity_lift(LISTS, COUNTS, np.array([2.0, 1.0, np.nan])) == pytest.approx(0.5)


def test_diversity_is_the_mean_distance_of_pairs_by_hand() -> None:
    kinds = np.array([[1, 2, 0], [1, 0, 0], [3, 0, 0], [0, 0, 0]])
    lists = np.array([[0, 1, 2], [3, 3, 0], [1, -1, -1]], dtype=np.int32)
    # {1, 2} and {1}: Jaccard 1/2; {3} shares nothing. Without an id: distance 1 to any. One item: no pair.
    np.testing.assert_allclose(diversities(lists, kinds), [(0.5 + 1 + 1) / 3, 1.0, np.nan])
    one_id = np.array([[1], [1], [2], [0]])
    np.testing.assert_allclose(diversities(lists[:1], one_id), [2 / 3])


def test_disliked_items_in_lists_by_hand() -> None:
    """Of 4 disliked items, user 0's list holds one of two, user 1's none of none, user 2's one of two."""
    dislikes = Interactions.from_pairs(np.array([0, 0, 2, 2]), np.array([1, 3, 2, 3]), num_users=3, num_items=4)
    shares = disliked(LISTS, dislikes)
    assert shares.tolist() == [3 / 4, 0.0, 3 / 4]
    assert shares.mean() == 2 / 4


def test_captured_revenue_by_hand() -> None:
    """Prices 5, 10, 0 (unknown) and 5: users 0 and 1 find items of 10 and 0; user 2's of 5 is in no list of theirs."""
    targets = Interactions.from_pairs(np.array([0, 0, 1, 2]), np.array([1, 3, 2, 0]), num_users=3, num_items=4)
    captured = revenues(LISTS, targets, np.array([5.0, 10.0, 0.0, 5.0]))
    assert captured.tolist() == [10 * 3 / 20, 0.0, 0.0]
    assert captured.mean() == pytest.approx(10 / 20)


@pytest.mark.parametrize(
    ("prices", "expected"),
    [
        ({"price": pa.array([0.0, 2.0, 0.0, 0.0, 4.0, 8.0])}, 8 / 10),
        ({"price": pa.array([1, None, None, None, -4, 8])}, 1.0),
        ({"price": pa.array(["1 EUR"] * 6)}, None),
        ({"cost": pa.array([1.0] * 6)}, None),
        ({"price": pa.array([0.0] * 6)}, None),
    ],
)
def test_revenue_is_measured_where_the_catalogue_has_prices(
    prices: dict[str, pa.Array], expected: float | None, tmp_path: Path
) -> None:
    """User 0's target is in the first place; user 1's, item 1, is the last."""
    spec = dataset(tmp_path, {"train": [(0, 0, 1), (1, 0, 1)], "test": [(0, 5, 1), (1, 1, 1)]})
    ids = {spec.item_id: np.arange(6)}
    pq.write_table(pa.table({**ids, **prices}), spec.folder / "items.parquet")
    spec = spec.replace(metadata={**spec.metadata, "catalogues": {"item": "items.parquet"}})
    table = np.tile([9.0, 1, 2, 3, 4, 5], (4, 1))
    report = evaluate(
        trained(TableModel(spec, table)), spec, "test", protocols=["full"], settings=EvaluateSettings(ks=(1,))
    )
    found = report.model.list_metrics.get("revenue@1")
    assert found == (None if expected is None else pytest.approx(expected))


def test_empty_lists_and_no_items_have_no_value() -> None:
    nothing = np.full((2, 3), -1, dtype=np.int32)
    assert np.isnan(coverage(nothing, 0))
    assert coverage(nothing, 3) == 0
    assert np.isnan(novelties(nothing, COUNTS, 4)).all()
    assert np.isnan(popularity_lift(nothing, COUNTS, np.array([1.0, 1.0])))
    assert np.isnan(popularity_lift(LISTS, COUNTS * 0, np.array([0.0, 0.0, 0.0])))


def test_the_popularity_of_histories_by_hand() -> None:
    history = Interactions.from_pairs(np.array([0, 0, 2]), np.array([0, 2, 1]), num_users=3, num_items=4)
    np.testing.assert_allclose(history_popularity(history, np.array([0, 1, 2]), COUNTS), [2.5, np.nan, 2.0])


def test_evaluate_measures_the_lists_of_full(tmp_path: Path) -> None:
    """Users 0 and 1 acted on item 0; user 0 is given 5 and 4, user 1 5 and 2."""
    splits = {"train": [(0, 0, 1), (1, 0, 1), (2, 5, 1)], "test": [(0, 5, 1), (1, 5, 1)]}
    spec = dataset(tmp_path, splits)
    table = np.tile([9.0, 1, 2, 3, 4, 5], (4, 1))
    table[1, 2] = 4.5
    report = evaluate(
        trained(TableModel(spec, table)), spec, "test", protocols=["full"], settings=EvaluateSettings(ks=(1, 2))
    )
    found = report.model.list_metrics
    assert found["coverage@1"] == pytest.approx(1 / 6)
    assert found["coverage@2"] == pytest.approx(3 / 6)
    assert found["novelty@1"] == pytest.approx(np.log2(3))
    # Popularity: item 5 one user, 2 and 4 none, item 0 two: .5 against 2.
    assert found["popularity_lift@2"] == pytest.approx(0.5 / 2 - 1)
    assert "diversity@2" not in found
    assert report.to_dict()["beyond_accuracy"] == {"model": found}
    measures = measures_of(EvaluationTask(spec, "test", ["full"], EvaluateSettings(cold="drop")), np.array([0, 1]))
    assert measures.num_candidates == 2


def test_exposure_by_hand() -> None:
    """Of ten interactions item 1 holds the first six tenths, item 2 three, item 3 the last one, item 4 none."""
    found = exposure(np.array([[1, 2], [1, 4], [-1, -1]], np.int32), np.array([0, 6, 3, 1, 0]), first_item=1)
    assert found.shares == (0.5, 0, 0, 0, 0, 0, 0.25, 0, 0, 0, 0.25)
    assert found.items == (1, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1)
    nothing = np.zeros((0, 3), np.int32)
    assert set(exposure(nothing, np.array([2, 1])).shares) == {0.0}
    assert exposure(np.array([[0, 1]], np.int32), np.array([0, 0])).shares[-1] == 1.0
