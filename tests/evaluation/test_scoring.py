"""Models and rankers give the same scores, whatever the blocks."""

from pathlib import Path

import numpy as np
import pytest

from recspec.base.errors import DataError
from recspec.evaluation.evaluations import evaluate_model
from recspec.evaluation.scoring import ModelRanker, score_rows
from recspec.evaluation.task import EvaluateSettings, EvaluationTask
from tests.evaluation.tables import RichModel, TableModel, TableRanker, dataset, rich_dataset, series


def test_a_model_and_a_ranker_with_its_scores_reach_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    rows = series(rng, 30, 50, 12)
    spec = dataset(tmp_path, {"train": rows[:50], "test": rows}, users=30, items=50)
    table = rng.normal(size=(30, 50)).astype(np.float32)
    model = TableModel(spec, table).train()
    ours = evaluate_model(model, spec, "test")
    theirs = evaluate_model(TableRanker(table), spec, "test")
    assert model.training, "evaluation leaves the model as it was"
    assert set(ours.metrics) == {"rows", "sampled", "full"}
    log_loss = ours.metrics["rows"].pop("log_loss")
    for name in ("accuracy", "calibration_error"):  # a ranker's scores are no logits, so it has none of these
        del ours.metrics["rows"][name]
    assert ours.metrics == theirs.metrics
    labels, logits = np.array([y for *_, y in rows]), np.array([table[u, i] for u, i, _ in rows])
    assert log_loss == pytest.approx(
        float(np.mean(np.log1p(np.exp(-np.where(labels == 1, logits, -logits))))), rel=1e-6
    )


def test_rows_are_scored_in_order_whatever_the_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    rows = series(rng, 10, 50, 11)
    spec = dataset(tmp_path, {"test": rows}, users=10, items=50)
    table = rng.normal(size=(10, 50)).astype(np.float32)
    monkeypatch.setattr("recspec.evaluation.interactions.ROWS_PER_BLOCK", 13)
    monkeypatch.setattr("recspec.evaluation.scoring.ROWS_PER_BLOCK", 13)
    monkeypatch.setattr("recspec.evaluation.scoring.ROWS_PER_FORWARD", 4)
    stages: list[tuple[str, float, float | None]] = []
    scores = score_rows(TableModel(spec, table), spec, "test", progress=lambda *step: stages.append(step))
    np.testing.assert_array_equal(scores, [table[u, i] for u, i, _ in rows])  # same operations: looked up
    assert stages[0] == ("rows", 0, 110)
    assert stages[-1] == ("rows", 110, 110)


def test_a_diverged_model_is_an_error(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"test": [(0, 3, 1), (0, 1, 0)]})
    table = np.full((4, 6), np.nan)
    for protocol in ("rows", "sampled", "full"):
        with pytest.raises(DataError, match="scores are NaN"):
            evaluate_model(TableModel(spec, table), spec, "test", protocols=[protocol])


@pytest.mark.parametrize("catalogue", [True, False])
def test_full_ranking_joins_each_users_request_with_every_items_features(tmp_path: Path, catalogue: bool) -> None:
    spec = rich_dataset(tmp_path, catalogue=catalogue)
    model = RichModel(spec, np.zeros((1, 1)))
    # user 1's first positive row has hour 1, user 2's hour 2
    requests = {1: 10 + 100 + 2.0, 2: 20 + 200 + 1.2}
    parts = {1: 0.5 + 1.2, 2: 1.5 + 2.0, 3: 2.5 + 3.0, 4: (4.0 + 1.0) if catalogue else 0.0}
    task = EvaluationTask(spec, "test", ["full"], EvaluateSettings(ks=(1,)))
    ranker = ModelRanker(model, task)
    expected = [[requests[user] * parts[item] + item for item in (1, 2, 3, 4)] for user in (1, 2)]
    np.testing.assert_allclose(ranker.score_users(np.array([1, 2]))[:, 1:], expected, rtol=1e-6)
    np.testing.assert_allclose(
        ranker.score_pairs(np.array([2, 1, 2]), np.array([3, 2, 1])),
        [expected[1][2], expected[0][1], expected[1][0]],
        rtol=1e-6,
    )
    assert ranker.score_pairs(np.array([], dtype=int), np.array([], dtype=int)).shape == (0,)
    result = evaluate_model(model, spec, "test", protocols=["full"], settings=EvaluateSettings(ks=(1,)))
    assert result.protocols["full"]["fewest_candidates"] == 4
    assert result.metrics["full"]["recall@1"] == 0.75  # item 3 is first for both; user 1 has two positives
