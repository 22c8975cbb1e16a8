"""Evaluation: protocols by hand and against plain loops, models beside rankers, drawn candidates, ranks, the report."""

import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from recspec import config
from recspec import evaluate as evaluation
from recspec.baselines import BASELINES, ROW_BASELINES, Interactions, logistic_regression, popularity
from recspec.batch import Batch
from recspec.distributed import Ranks
from recspec.errors import DataError, SettingsError, SpecError
from recspec.evaluate import (
    EvaluateSettings,
    ModelRanker,
    Question,
    draw_candidates,
    evaluate,
    evaluate_baselines,
    evaluate_model,
    evaluate_ranker,
    positives,
    score_rows,
    verdicts,
)
from recspec.feature_spec import Chunk, FeatureSpec
from recspec.models.base import Model
from tests import made_up

Row = tuple[int, int, int]


def dataset(
    folder: Path,
    splits: Mapping[str, Iterable[Row]],
    *,
    users: int = 4,
    items: int = 6,
    group: bool = True,
    metadata: Mapping[str, object] | None = None,
) -> FeatureSpec:
    """A prepared dataset of rows (user, item, label) in CSV files."""
    for split, rows in splits.items():
        (folder / f"{split}.csv").write_text("".join(f"{u},{i},{y}\n" for u, i, y in rows))
    names = ["user", "item", "label"]
    return FeatureSpec.from_dict(
        {
            "feature_spec": {
                "user": {"dtype": "int32", "cardinality": users},
                "item": {"dtype": "int32", "cardinality": items},
                "label": {"dtype": "float32"},
            },
            "source_spec": {split: [{"type": "csv", "features": names, "files": [f"{split}.csv"]}] for split in splits},
            "channel_spec": {
                "user": ["user"],
                "item": ["item"],
                "label": ["label"],
                **({"group": ["user"]} if group else {}),
            },
            "metadata": dict(metadata or {}),
        },
        folder,
    )


@dataclass
class TableRanker:
    """Scores every pair from a table."""

    table: np.ndarray

    def score_pairs(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        return self.table[users, items]

    def score_users(self, users: np.ndarray) -> np.ndarray:
        return self.table[users].copy()


class TableModel(Model):
    """Gives a pair the logit of a table; it can be trained no further."""

    needs: ClassVar[tuple[str, ...]] = ("user", "item", "label")
    Settings = config.Settings

    def __init__(self, spec: FeatureSpec, table: np.ndarray) -> None:
        super().__init__(spec, config.Settings())
        self.table = nn.Parameter(torch.from_numpy(table.astype(np.float32)))
        self.dropout = nn.Dropout(0.9)

    def forward(self, batch: Batch) -> Tensor:
        return self.dropout(self.table[batch[self.spec.user_id].long(), batch[self.spec.item_id].long()])


@dataclass(frozen=True)
class Trained:
    """What evaluation reads of a bundle."""

    model: Model
    train: dict[str, object] = field(default_factory=dict)

    @property
    def card(self) -> "Trained":
        return self


def series(rng: np.random.Generator, users: int, items: int, size: int) -> list[Row]:
    rows: list[Row] = []
    for user in range(users):
        chosen = rng.choice(items, size, replace=False)
        rows += [(user, int(item), int(place == 0)) for place, item in enumerate(chosen)]
    return rows


# --- sampled ---


def test_sampled_ranks_the_splits_own_candidates_by_hand(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": [(0, 0, 1)], "test": [(0, 3, 1), (0, 1, 0), (0, 2, 0), (1, 5, 1), (1, 4, 0)]})
    table = np.zeros((4, 6))
    table[0] = [9, 3, 1, 2, 9, 9]  # of items 3, 1, 2 the positive is second
    table[1] = [0, 0, 0, 0, 7, 8]  # of items 5, 4 it is first
    result = evaluate_ranker(TableRanker(table), spec, "test", settings=EvaluateSettings(ks=(1, 2)))
    sampled = result.metrics["sampled"]
    assert sampled["hit_rate@1"] == 0.5
    assert sampled["hit_rate@2"] == 1.0
    assert sampled["ndcg@2"] == pytest.approx((1 / math.log2(3) + 1) / 2)
    assert sampled["mrr"] == 0.75
    assert result.protocols["sampled"] == {
        "candidates": "the dataset's own",
        "groups": 2,
        "positives": 2,
        "fewest_candidates": 2,
        "most_candidates": 3,
        "groups_without_positive": 0,
        "duplicates_counted_once": 0,
    }
    assert result.standard_errors["sampled"]["hit_rate@1"] == pytest.approx(0.5)


def test_a_positive_among_its_own_negatives_is_counted_once(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"test": [(0, 3, 1), (0, 3, 0), (0, 2, 0)]})
    result = evaluate_ranker(
        TableRanker(np.eye(4, 6)), spec, "test", protocols=["sampled"], settings=EvaluateSettings(ks=(1,))
    )
    assert result.metrics["sampled"]["hit_rate@1"] == 0.5  # a tie of two candidates
    assert result.protocols["sampled"]["duplicates_counted_once"] == 1


def test_a_group_need_not_be_a_user(tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("7,0,1\n7,1,0\n8,1,1\n8,0,0\n")
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"shown": {"dtype": "int64"}, "ad": {"cardinality": 2}, "label": {}},
            "source_spec": {"test": [{"type": "csv", "features": ["shown", "ad", "label"], "files": ["test.csv"]}]},
            "channel_spec": {"context": ["ad"], "group": ["shown"], "label": ["label"]},
        },
        tmp_path,
    )

    class Ad(TableModel):
        needs = ("label",)

        def forward(self, batch: Batch) -> Tensor:
            return batch["ad"].float()

    result = evaluate_model(Ad(spec, np.zeros((1, 1))), spec, "test", settings=EvaluateSettings(ks=(1,)))
    assert result.metrics["sampled"]["hit_rate@1"] == 0.5
    assert result.metrics["rows"]["group_auc"] == 0.5
    assert result.left_out == {"full": "the dataset has no user and no item"}


@pytest.mark.parametrize(("ks", "named"), [((2, 10), {}), (None, {"cut_offs": [2, 10]})])
def test_a_cut_off_longer_than_every_list_is_an_error_where_the_lists_are_made_to_one_length(
    tmp_path: Path, ks: tuple[int, ...] | None, named: dict[str, object]
) -> None:
    rows = [(0, 3, 1), (0, 1, 0), (0, 2, 0)]
    spec = dataset(tmp_path, {"test": rows}, items=60, metadata={"test_samples_per_series": 3, **named})
    ranker = TableRanker(np.random.default_rng(0).random((4, 60)))
    message = r"k = 10: longer than every list of candidates \(the longest has 3.*choose k from 1 to 3, as --k 3"
    with pytest.raises(SettingsError, match=message):
        evaluate_ranker(ranker, spec, "test", settings=EvaluateSettings(ks=ks))


@pytest.mark.parametrize(("candidates", "k"), [(2, 1), (5, 1), (6, 5), (9, 5), (10, 10), (11, 10)])
def test_a_cut_off_that_nobody_named_is_shorter_than_the_series(tmp_path: Path, candidates: int, k: int) -> None:
    rows = [(user, item, int(item == user)) for user in range(3) for item in range(candidates + user)[user:]]
    metadata = {"test_samples_per_series": candidates}
    spec = dataset(tmp_path, {"train": [(0, 1, 1)], "test": rows}, items=20, metadata=metadata)
    ranker = TableRanker(np.random.default_rng(0).random((4, 20)))
    found = evaluate_ranker(ranker, spec, "test", protocols=["sampled"])
    assert f"ndcg@{k}" in found.metrics["sampled"]
    assert {name.split("@")[1] for name in found.metrics["sampled"] if "@" in name} == {str(k)}


# --- groups of any size, as the ads of a page ---


def displays(
    folder: Path, rows: Sequence[tuple[int, int, float, int]], *, metadata: Mapping[str, object] | None = None
) -> FeatureSpec:
    """Rows (group, label, score, leak) whose score is a context feature; `leak` is kept and plays no role."""
    folder.mkdir(exist_ok=True)
    (folder / "test.csv").write_text("".join(f"{g},{y},{x!r},{leak}\n" for g, y, x, leak in rows))
    names = ["display", "label", "score", "leak"]
    return FeatureSpec.from_dict(
        {
            "feature_spec": {"display": {"dtype": "int64"}, "label": {}, "score": {"dtype": "float64"}, "leak": {}},
            "source_spec": {"test": [{"type": "csv", "features": names, "files": ["test.csv"]}]},
            "channel_spec": {"context": ["score"], "group": ["display"], "label": ["label"]},
            "metadata": dict(metadata or {}),
        },
        folder,
    )


class Score(Model):
    """The logit is the row's own score."""

    needs: ClassVar[tuple[str, ...]] = ("label",)
    Settings = config.Settings

    def __init__(self, spec: FeatureSpec) -> None:
        super().__init__(spec, config.Settings())
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: Batch) -> Tensor:
        return batch["score"].float() * self.weight


def test_map_at_12_of_groups_of_any_size_by_hand(tmp_path: Path) -> None:
    rows = [(7, int(place == 3), -float(place), 0) for place in range(1, 5)]  # 1 / 3
    rows += [(8, int(place in (1, 12, 13)), -float(place), 0) for place in range(1, 41)]  # (1 / 1 + 2 / 12) / 3
    rows += [(9, int(place == 13), -float(place), 0) for place in range(1, 15)]  # after the cut-off: 0
    rows += [(10, 1, 0.5, 0), (10, 0, 0.5, 0)]  # a tie: (1 / 1 + 1 / 2) / 2
    rows += [(11, 0, 0.5, 0), (11, 0, 0.4, 0), (12, 1, 0.1, 0)]  # no positive: left out; alone: 1
    spec = displays(tmp_path, rows, metadata={"cut_offs": [12]})
    result = evaluate_model(Score(spec), spec, "test")
    expected = [1 / 3, (1 + 1 / 6) / 3, 0.0, 0.75, 1.0]
    np.testing.assert_allclose(result.values["sampled"]["mean_average_precision@12"], expected)
    assert result.metrics["sampled"]["mean_average_precision@12"] == pytest.approx(np.mean(expected))
    assert not [name for name in result.metrics["sampled"] if "@" in name and not name.endswith("@12")]
    assert evaluation.describe("sampled", result.protocols["sampled"]) == (
        "sampled (5 groups, 1 to 40 candidates each: the dataset's own; 1 groups without a positive left out)"
    )


@pytest.mark.parametrize("ks", [None, (10,), (2,)])
def test_a_cut_off_from_the_longest_ragged_group_on_ranks_them_whole_and_leaves_out_what_is_1_for_any_model(
    tmp_path: Path, ks: tuple[int, ...] | None
) -> None:
    spec = displays(tmp_path, [(1, 0, 0.9, 0), (1, 1, 0.5, 0), (2, 1, 0.7, 0), (2, 0, 0.1, 0)])
    found = evaluate_model(Score(spec), spec, "test", settings=EvaluateSettings(ks=ks))
    k = (ks or (10,))[0]
    assert found.metrics["sampled"] == {
        f"ndcg@{k}": pytest.approx((1 / math.log2(3) + 1) / 2),
        f"mean_average_precision@{k}": 0.75,
        "mrr": 0.75,
    }
    assert found.protocols["sampled"]["certain"] == [f"hit_rate@{k}", f"recall@{k}"]
    assert evaluation.describe("sampled", found.protocols["sampled"]).endswith(
        f"the dataset's own; hit_rate@{k}, recall@{k} left out, 1 for any model)"
    )
    shorter = evaluate_model(Score(spec), spec, "test", settings=EvaluateSettings(ks=(1, 2)))
    assert {name for name in shorter.metrics["sampled"] if name.startswith(("hit", "recall"))} == {
        "hit_rate@1",
        "recall@1",
    }


def test_groups_of_single_rows_are_not_ranked(tmp_path: Path) -> None:
    spec = displays(tmp_path, [(1, 0, 0.9, 0), (2, 1, 0.5, 0)])
    found = evaluate_model(Score(spec), spec, "test")
    assert found.left_out["sampled"] == "every group is a single row, so there is nothing to rank"


def random_displays(seed: int = 0) -> list[tuple[int, int, float, int]]:
    """Groups of 1 to 45 rows with tied scores, several positives or none; some rows are leaked."""
    rng = np.random.default_rng(seed)
    rows = []
    for group in rng.choice(10**12, 60, replace=False):
        size = int(rng.integers(1, 46))
        labels, leak = rng.random(size) < 0.15, rng.random(size) < 0.1
        scores = rng.integers(-8, 9, size) / 4
        rows += [(int(group), int(y), float(x), int(of)) for y, x, of in zip(labels, scores, leak, strict=True)]
    return rows


def expected_map(rows: Sequence[tuple[int, int, float]], k: int, draws: int = 4000) -> float:
    """MAP@k by plain loops, ties in random order, averaged over draws."""
    rng = np.random.default_rng(1)
    of_groups = []
    for group in {g for g, *_ in rows}:
        labels = np.array([y for g, y, _ in rows if g == group])
        scores = np.array([x for g, _, x in rows if g == group])
        if not labels.any():
            continue
        order = np.lexsort((rng.random((draws, len(labels))), np.tile(-scores, (draws, 1))), axis=1)
        ranked = labels[order][:, :k]
        precision = ranked.cumsum(axis=1) / np.arange(1, ranked.shape[1] + 1)
        of_groups.append((precision * ranked).sum(axis=1).mean() / min(k, labels.sum()))
    return float(np.mean(of_groups))


def test_map_of_random_groups_is_what_plain_loops_expect(tmp_path: Path) -> None:
    rows = random_displays()
    spec = displays(tmp_path, rows, metadata={"leak": "leak"})
    sampled = evaluate_model(Score(spec), spec, "test", settings=EvaluateSettings(ks=(12, 5))).metrics["sampled"]
    leaked = [(g, y, 1 / (1 + math.exp(-x)) + of) for g, y, x, of in rows]
    for k in (12, 5):
        assert sampled[f"mean_average_precision@{k}"] == pytest.approx(
            expected_map([(g, y, x) for g, y, x, _ in rows], k), abs=0.003
        )
        assert sampled[f"mean_average_precision_with_leak@{k}"] == pytest.approx(expected_map(leaked, k), abs=0.003)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("order", ["as it is", "permuted", "reversed"])
def test_ranking_metrics_are_exact_whatever_the_rows_order_the_blocks_and_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, world_size: int
) -> None:
    rows = random_displays()
    spec = displays(tmp_path / "whole", rows, metadata={"leak": "leak"})
    whole = evaluate_model(Score(spec), spec, "test")
    places = {"as it is": np.arange(len(rows)), "reversed": np.arange(len(rows))[::-1]}
    permuted = np.random.default_rng(3).permutation(len(rows))
    other = displays(tmp_path / "o", [rows[at] for at in places.get(order, permuted)], metadata={"leak": "leak"})
    monkeypatch.setattr(evaluation, "ROWS_PER_BLOCK", 37)  # groups are cut by blocks, and by ranks
    monkeypatch.setattr(evaluation, "ROWS_PER_FORWARD", 10)
    for found in on_ranks(world_size, lambda ranks: evaluate_model(Score(other), other, "test", ranks=ranks)):
        assert found.metrics["sampled"] == whole.metrics["sampled"]
        assert found.protocols["sampled"] == whole.protocols["sampled"]
        assert found.protocols["sampled"]["groups_without_positive"]


def test_map_with_leak_by_hand(tmp_path: Path) -> None:
    rows = [(1, 0, 9.0, 0), (1, 1, -9.0, 1), (1, 0, 1.0, 0)]  # probability alone: third; with leak: first
    rows += [(2, 1, 0.0, 0), (2, 0, -40.0, 1), (2, 0, -50.0, 1), (2, 1, 3.0, 0)]  # the leaked ones are above: 3rd, 4th
    spec = displays(tmp_path, rows, metadata={"cut_offs": [12], "leak": "leak"})
    found = evaluate_model(Score(spec), spec, "test")
    assert found.metrics["sampled"]["mean_average_precision@12"] == pytest.approx((1 / 3 + 1) / 2)
    with_leak = (1 + (1 / 3 + 2 / 4) / 2) / 2
    assert found.metrics["sampled"]["mean_average_precision_with_leak@12"] == pytest.approx(with_leak)
    assert found.standard_errors["sampled"]["mean_average_precision_with_leak@12"] > 0


def test_a_leak_that_is_no_flag_is_an_error(tmp_path: Path) -> None:
    spec = displays(tmp_path, [(1, 0, 9.0, 0), (1, 1, -9.0, 3)], metadata={"leak": "leak"})
    message = r"split 'test', feature 'leak': row 2 is 3\.0; metadata\.leak is 0 or 1"
    with pytest.raises(DataError, match=message):
        evaluate_model(Score(spec), spec, "test")


def test_rows_with_one_item_are_candidates_of_their_own_where_more_than_the_item_differs(tmp_path: Path) -> None:
    rows = "5,1,1,0.1\n5,1,0,0.3\n5,0,0,0.2\n5,0,0,0.4\n"  # item 1 at two hours; item 0 is unknown
    (tmp_path / "test.csv").write_text(rows)
    for context, candidates in ((True, 4), (False, 3)):
        spec = FeatureSpec.from_dict(
            {
                "feature_spec": {
                    "display": {"dtype": "int64"},
                    "ad": {"dtype": "int32", "cardinality": 3},
                    "score": {},
                    "label": {},
                },
                "source_spec": {
                    "test": [
                        {"type": "csv", "features": ["display", "ad", "label", "score"], "files": ["test.csv"]},
                    ]
                },
                "channel_spec": {
                    "item": ["ad"] if context else ["ad", "score"],
                    **({"context": ["score"]} if context else {}),
                    "group": ["display"],
                    "label": ["label"],
                },
                "metadata": {"vocabularies": "vocabularies"},
            },
            tmp_path,
        )
        found = evaluate_model(Score(spec), spec, "test", protocols=["sampled"])
        assert found.protocols["sampled"]["most_candidates"] == candidates


# --- full ---


def test_full_ranks_all_unseen_items_by_hand(tmp_path: Path) -> None:
    splits = {
        "train": [(0, 0, 1), (0, 1, 1), (1, 0, 1), (0, 5, 0)],
        "valid": [(0, 2, 1), (0, 4, 0)],
        "test": [(0, 3, 1)],
    }
    spec = dataset(tmp_path, splits)
    ranker = TableRanker(np.tile(np.array([6.0, 5.0, 4.0, 2.0, 3.0, 1.0]), (4, 1)))
    settings = EvaluateSettings(ks=(1, 2))
    test = evaluate_ranker(ranker, spec, "test", protocols=["full"], settings=settings)
    # train and valid positives 0, 1, 2 are out; 4 and 5 were negatives, so they stay: 4 > 3 > 5
    assert test.metrics["full"]["mrr"] == 0.5
    assert (test.protocols["full"]["groups"], test.protocols["full"]["most_candidates"]) == (1, 3)
    assert test.protocols["full"]["candidates"] == "all items without those of the user in train and valid"
    valid = evaluate_ranker(ranker, spec, "valid", protocols=["full"], settings=settings)
    assert valid.metrics["full"]["mrr"] == 1.0  # 0 and 1 are out, 2 is the best of the rest
    assert valid.protocols["full"]["most_candidates"] == 4
    train = evaluate_ranker(ranker, spec, "train", protocols=["full"], settings=settings)
    assert train.protocols["full"]["candidates"] == "all items"
    assert train.metrics["full"]["recall@2"] == 1.0


def test_a_positive_seen_before_is_still_ranked(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": [(0, 3, 1), (0, 4, 1)], "test": [(0, 3, 1)]})
    ranker = TableRanker(np.tile(np.arange(6.0), (4, 1)))
    result = evaluate_ranker(ranker, spec, "test", protocols=["full"], settings=EvaluateSettings(ks=(2,)))
    assert result.metrics["full"]["mrr"] == 0.5  # 5 is above, 4 is out
    assert result.protocols["full"]["most_candidates"] == 5


def test_the_unknown_item_is_never_ranked(tmp_path: Path) -> None:
    splits = {"train": [(1, 1, 1)], "test": [(1, 2, 1), (2, 0, 1), (3, 0, 1), (3, 5, 1)]}
    spec = dataset(tmp_path, splits, metadata={"vocabularies": "vocabularies"})
    ranker = TableRanker(np.tile(np.arange(6.0)[::-1], (4, 1)))  # item 0 scores highest
    result = evaluate_ranker(ranker, spec, "test", protocols=["full"], settings=EvaluateSettings(ks=(1,)))
    assert result.protocols["full"]["groups"] == 2  # user 2's only positive is unknown
    assert result.values["full"]["mrr"].tolist() == [1.0, 1 / 5]


def reference_full(
    table: np.ndarray, seen: set[tuple[int, int]], truth: set[tuple[int, int]], k: int
) -> dict[str, float]:
    """Recall@k and MRR by plain loops; the scores must not tie."""
    recalls, reciprocals = [], []
    for user in sorted({u for u, _ in truth}):
        mine = {i for u, i in truth if u == user}
        items = [i for i in range(table.shape[1]) if i in mine or (user, i) not in seen]
        ranked = sorted(items, key=lambda i, user=user: -table[user, i])
        recalls.append(len(mine & set(ranked[:k])) / len(mine))
        reciprocals.append(1 / (1 + min(ranked.index(i) for i in mine)))
    return {f"recall@{k}": float(np.mean(recalls)), "mrr": float(np.mean(reciprocals))}


@pytest.mark.parametrize("scores_per_block", [1, 200, 1 << 22])
def test_full_equals_plain_loops_in_every_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scores_per_block: int
) -> None:
    monkeypatch.setattr(evaluation, "SCORES_PER_BLOCK", scores_per_block)
    rng = np.random.default_rng(1)
    pairs = {split: {(int(u), int(i)) for u, i in rng.integers(0, (20, 40), (n, 2))} for split, n in
             (("train", 200), ("valid", 40), ("test", 60))}  # fmt: skip
    spec = dataset(tmp_path, {s: [(u, i, 1) for u, i in sorted(p)] for s, p in pairs.items()}, users=20, items=40)
    table = rng.random((20, 40)).astype(np.float32)
    expected = reference_full(table, pairs["train"] | pairs["valid"], pairs["test"], 5)
    for scorer in (TableRanker(table), TableModel(spec, table)):
        run = evaluate_model if isinstance(scorer, Model) else evaluate_ranker
        result = run(scorer, spec, "test", protocols=["full"], settings=EvaluateSettings(ks=(5,)))  # type: ignore[operator]
        for name, value in expected.items():
            assert result.metrics["full"][name] == pytest.approx(value)


def test_a_constant_ranker_gets_chance_under_full(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": [(0, 0, 1)], "test": [(0, 3, 1)]}, items=101)
    result = evaluate_ranker(TableRanker(np.zeros((4, 101))), spec, "test", protocols=["full"])
    assert result.metrics["full"]["hit_rate@10"] == pytest.approx(0.1)


# --- models ---


def test_a_model_and_a_ranker_with_its_scores_reach_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    rows = series(rng, 30, 50, 12)
    spec = dataset(tmp_path, {"train": rows[:50], "test": rows}, users=30, items=50)
    table = rng.normal(size=(30, 50)).astype(np.float32)
    model = TableModel(spec, table).train()
    ours = evaluate_model(model, spec, "test")
    theirs = evaluate_ranker(TableRanker(table), spec, "test")
    assert model.training, "evaluation leaves the model as it was"
    assert set(ours.metrics) == {"rows", "sampled", "full"}
    log_loss = ours.metrics["rows"].pop("log_loss")
    del ours.metrics["rows"]["accuracy"]  # a ranker's scores are no logits, so it has neither
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
    monkeypatch.setattr(evaluation, "ROWS_PER_BLOCK", 13)
    monkeypatch.setattr(evaluation, "ROWS_PER_FORWARD", 4)
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


def rich_dataset(folder: Path, *, catalogue: bool) -> FeatureSpec:
    """User id and age, item id, genres and price, an hour and a history; item 4 stands in no row."""
    genres = {1: [1, 2], 2: [2], 3: [3], 4: [1]}
    price = {1: 0.5, 2: 1.5, 3: 2.5, 4: 4.0}
    rows = [(1, 1, 1), (1, 2, 0), (1, 3, 1), (2, 3, 1), (2, 1, 0)]
    (folder / "test").mkdir()
    pq.write_table(
        pa.table(
            {
                "user": pa.array([u for u, _, _ in rows], pa.int32()),
                "age": pa.array([10.0 * u for u, _, _ in rows], pa.float32()),
                "item": pa.array([i for _, i, _ in rows], pa.int32()),
                "genres": pa.array([genres[i] for _, i, _ in rows], pa.list_(pa.int32())),
                "price": pa.array([price[i] for _, i, _ in rows], pa.float32()),
                "hour": pa.array([1, 1, 3, 2, 2], pa.int32()),
                "history": pa.array([[2], [2], [2], [1, 2], [1, 2]], pa.list_(pa.int32())),
                "label": pa.array([y for _, _, y in rows], pa.float32()),
            }
        ),
        folder / "test" / "part.parquet",
    )
    if catalogue:
        items = range(1, 5)
        table = {"genres": pa.array([genres[i] for i in items], pa.list_(pa.int32())), "title": list("abcd")}
        pq.write_table(
            pa.table({**table, "price": pa.array([price[i] for i in items], pa.float32())}), folder / "i.parquet"
        )
    names = ["user", "age", "item", "genres", "price", "hour", "history", "label"]
    return FeatureSpec.from_dict(
        {
            "feature_spec": {
                "user": {"dtype": "int32", "cardinality": 3},
                "age": {},
                "item": {"dtype": "int32", "cardinality": 5},
                "genres": {"dtype": "int32", "cardinality": 4, "length": 2, "padding": 0},
                "price": {},
                "hour": {"dtype": "int32", "cardinality": 4},
                "history": {"dtype": "int32", "cardinality": 5, "length": 3, "padding": 0, "vocabulary": "item"},
                "label": {},
            },
            "source_spec": {"test": [{"type": "parquet", "features": names, "files": ["test/part.parquet"]}]},
            "channel_spec": {
                "user": ["user", "age"],
                "item": ["item", "genres", "price"],
                "context": ["hour"],
                "history": ["history"],
                "label": ["label"],
            },
            "metadata": {"vocabularies": "v", **({"catalogues": {"item": "i.parquet"}} if catalogue else {})},
        },
        folder,
    )


class RichModel(TableModel):
    """Uses every feature, so that one that is missing or of another row shows."""

    needs = ("user", "item", "context", "history", "label")

    def features(self) -> tuple[str, ...]:
        return (*super().features(), "history")

    def forward(self, batch: Batch) -> Tensor:
        request = (
            batch["age"] + 100.0 * batch["hour"] + (batch["history"].float() * torch.tensor([1.0, 0.1, 0.01])).sum(1)
        )
        item = batch["price"] + (batch["genres"].float() * torch.tensor([1.0, 0.1])).sum(1)
        return request * item + batch["item"].float()


@pytest.mark.parametrize("catalogue", [True, False])
def test_full_ranking_joins_each_users_request_with_every_items_features(tmp_path: Path, catalogue: bool) -> None:
    spec = rich_dataset(tmp_path, catalogue=catalogue)
    model = RichModel(spec, np.zeros((1, 1)))
    # user 1's first positive row has hour 1, user 2's hour 2
    requests = {1: 10 + 100 + 2.0, 2: 20 + 200 + 1.2}
    parts = {1: 0.5 + 1.2, 2: 1.5 + 2.0, 3: 2.5 + 3.0, 4: (4.0 + 1.0) if catalogue else 0.0}
    question = Question(spec, "test", ["full"], EvaluateSettings(ks=(1,)))
    ranker = evaluation._ModelScores(model, question, Ranks()).ranker()
    expected = [[requests[user] * parts[item] + item for item in (1, 2, 3, 4)] for user in (1, 2)]
    np.testing.assert_allclose(ranker.score_users(np.array([1, 2]))[:, 1:], expected, rtol=1e-6)
    np.testing.assert_allclose(
        ranker.score_pairs(np.array([2, 1, 2]), np.array([3, 2, 1])),
        [expected[1][2], expected[0][1], expected[1][0]],
        rtol=1e-6,
    )
    result = evaluate_model(model, spec, "test", protocols=["full"], settings=EvaluateSettings(ks=(1,)))
    assert result.protocols["full"]["fewest_candidates"] == 4
    assert result.metrics["full"]["recall@1"] == 0.75  # item 3 is first for both; user 1 has two positives


def test_full_and_sampled_wait_to_be_asked_where_requests_differ(tmp_path: Path) -> None:
    spec = rich_dataset(tmp_path, catalogue=True)
    result = evaluate_model(RichModel(spec, np.zeros((1, 1))), spec, "test")
    assert set(result.metrics) == {"rows"}
    assert result.left_out == {
        "full": "requests differ by 'hour', 'history'; ask for it with the protocol's name",
        "sampled": "the dataset names no group; ask for it with the protocol's name",
    }


# --- histories ---


def with_histories(
    folder: Path,
    splits: Mapping[str, Sequence[tuple[int, int, int, list[int]]]],
    *,
    users: int = 4,
    items: int = 8,
    shared: bool = True,
) -> FeatureSpec:
    """Series of rows (user, item, label, history); every row of a user is in one series."""
    features: dict[str, dict[str, object]] = {
        "user": {"dtype": "int32", "cardinality": users},
        "item": {"dtype": "int32", "cardinality": items},
        "history_item": {"dtype": "int32", "cardinality": items, "length": 5, "padding": 0},
        "label": {"dtype": "float32"},
    }
    if shared:
        features["history_item"]["vocabulary"] = "item"
    sources = {}
    for split, rows in splits.items():
        (folder / split).mkdir(parents=True)
        columns = {
            "user": pa.array([row[0] for row in rows], pa.int32()),
            "item": pa.array([row[1] for row in rows], pa.int32()),
            "history_item": pa.array([row[3] for row in rows], pa.list_(pa.int32())),
            "label": pa.array([row[2] for row in rows], pa.float32()),
        }
        pq.write_table(pa.table(columns), folder / split / "part.parquet")
        sources[split] = [{"type": "parquet", "features": list(features), "files": [f"{split}/part.parquet"]}]
    channels = {"user": ["user"], "item": ["item"], "history": ["history_item"], "label": ["label"], "group": ["user"]}
    metadata = {"user_id": "user", "item_id": "item", "test_samples_per_series": 2}
    parts = {"feature_spec": features, "source_spec": sources, "channel_spec": channels, "metadata": metadata}
    return FeatureSpec.from_dict(parts, folder)


class HistoryModel(TableModel):
    """Scores an item by how often it stands in the history, and by its id a little."""

    needs = ("user", "item", "history", "label")

    def features(self) -> tuple[str, ...]:
        return (*super().features(), "history_item")

    def forward(self, batch: Batch) -> Tensor:
        among = (batch["history_item"] == batch["item"][:, None]).sum(1)
        return among + batch["item"].float() / 100


HELD_OUT = [(1, 2, 1, [3, 2]), (1, 7, 0, [3, 2]), (2, 4, 1, [6, 5]), (2, 5, 0, [6, 5]), (3, 1, 1, []), (3, 6, 0, [])]


def test_series_of_a_positive_and_a_negative_beside_histories_by_hand(tmp_path: Path) -> None:
    """Logits: 1.02 and .07; .04 and 1.05; .01 and .06. User 1's positive alone is first of its two."""
    spec = with_histories(tmp_path, {"train": HELD_OUT, "test": HELD_OUT})
    found = evaluate_model(HistoryModel(spec, np.zeros((1, 1))), spec, "test")
    assert set(found.metrics) == {"rows", "sampled"}
    assert found.left_out == {
        "full": "it weighs every item against 'history_item' of each user, which takes long; ask for it with the "
        "protocol's name"
    }
    assert found.metrics["sampled"]["hit_rate@1"] == pytest.approx(1 / 3)
    assert found.metrics["sampled"]["ndcg@1"] == pytest.approx(1 / 3)
    assert found.metrics["sampled"]["mrr"] == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert found.metrics["rows"]["group_auc"] == pytest.approx(1 / 3)
    assert found.metrics["rows"]["auc"] == pytest.approx(2 / 9)  # 1.02 above .07 and .06
    assert {"log_loss", "accuracy"} <= set(found.metrics["rows"])
    assert evaluation.describe("sampled", found.protocols["sampled"]) == (
        "sampled (3 groups, 2 candidates each: the dataset's own)"
    )


def test_full_gives_each_user_the_history_of_its_row_where_it_is_asked_for(tmp_path: Path) -> None:
    spec = with_histories(tmp_path, {"train": [(1, 7, 1, [5])], "test": HELD_OUT})
    model = HistoryModel(spec, np.zeros((1, 1)))
    found = evaluate_model(model, spec, "test", protocols=["full"], settings=EvaluateSettings(ks=(1, 2)))
    # User 1 did 5 and 7 before: 1, 2, 3, 4, 6 are left, 3 (1.03) and 2 (1.02) lead. User 2: 6, 5, then 7, 4.
    # User 3: 7, 6, 5, 4, 3, 2, 1.
    assert found.metrics["full"]["hit_rate@1"] == 0
    assert found.metrics["full"]["hit_rate@2"] == pytest.approx(1 / 3)
    assert found.metrics["full"]["mrr"] == pytest.approx((1 / 2 + 1 / 4 + 1 / 7) / 3)
    assert found.protocols["full"]["candidates"] == ("all items without those of the user in train, histories included")


def test_a_model_that_ignores_histories_is_asked_for_full_without_being_told(tmp_path: Path) -> None:
    spec = with_histories(tmp_path, {"train": HELD_OUT, "test": HELD_OUT})
    assert "full" in evaluate_model(TableModel(spec, np.eye(4, 8)), spec, "test").metrics
    assert "full" in Question(spec, "test", None, EvaluateSettings()).choose()[1]


@pytest.mark.parametrize("keys_held", [0, 1 << 25])
@pytest.mark.parametrize("shared", [True, False])
def test_positives_hold_what_stands_in_histories_alone(
    tmp_path: Path, shared: bool, keys_held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "KEYS_HELD", keys_held)
    train = [(1, 2, 1, [7, 3]), (1, 5, 0, [7, 3]), (2, 4, 0, [6]), (3, 1, 1, [])]
    known = positives(with_histories(tmp_path, {"train": train}, shared=shared), ["train"])
    assert [known.items[known.offsets[user] : known.offsets[user + 1]].tolist() for user in range(4)] == [
        [],
        [2, 3, 7],
        [6],  # of a row of label 0 the history counts, and the item does not
        [1],
    ]


TASTES = [[1, 2, 3], [5, 6, 7]]


def of_two_tastes() -> dict[str, list[tuple[int, int, int, list[int]]]]:
    """30 users like items 1 to 3 or 5 to 7; user 1's taste shows in its valid row alone, user 2 has no train row."""
    users = [(user, TASTES[user % 2]) for user in range(3, 33)]
    train = [(user, likes[2], 1, likes[:2]) for user, likes in users]
    train += [(user, TASTES[1 - user % 2][0], 0, likes[:2]) for user, likes in users] + [(1, 4, 1, [])]
    valid = [(1, 2, 1, [4]), (1, 6, 0, [4])]
    test = [(1, 1, 1, [4, 2]), (1, 5, 0, [4, 2]), (2, 3, 1, []), (2, 7, 0, [])]
    return {"train": train, "valid": valid, "test": test}


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_know_what_the_rows_histories_know(tmp_path: Path, name: str) -> None:
    spec = with_histories(tmp_path, of_two_tastes(), users=33, items=8)
    question = Question(spec, "test", ["rows", "sampled"], EvaluateSettings())
    found, missing = evaluate_baselines(question, names=(name,))
    assert missing == {}
    assert found[name].fitted == {"users_known_by": "rows and histories of train and valid"}
    assert set(found[name].metrics) == {"rows", "sampled"}
    assert {"auc", "group_auc"} == set(found[name].metrics["rows"])
    of_users = found[name].values["sampled"]["hit_rate@1"].tolist()
    # 15 like each item: popularity is undecided on both. User 2 has done nothing: so are the others on it.
    assert of_users == pytest.approx([0.5, 0.5] if name == "popularity" else [1.0, 0.5])


def test_baselines_have_the_users_they_were_fitted_on_where_there_are_no_histories(tmp_path: Path) -> None:
    spec, _ = liked_items(tmp_path)
    found, _ = evaluate_baselines(Question(spec, "test", ["sampled"], EvaluateSettings(ks=(1,))), names=("item_knn",))
    assert found["item_knn"].fitted == {}


def test_a_model_ranker_scores_nothing_for_nobody(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"test": [(0, 3, 1)]})
    ids = {"item": torch.arange(6)}
    ranker = ModelRanker(
        TableModel(spec, np.eye(4, 6)), {"user": torch.tensor([2])}, ids, users=np.array([2]), num_users=4
    )
    assert ranker.score_pairs(np.array([], dtype=int), np.array([], dtype=int)).shape == (0,)
    assert ranker.score_users(np.array([2])).tolist() == [[0, 0, 1, 0, 0, 0]]


# --- what users acted on ---


def test_positives_are_the_distinct_pairs_with_a_positive_label(tmp_path: Path) -> None:
    splits = {"train": [(0, 0, 1), (0, 5, 0), (2, 1, 1), (2, 1, 1)], "valid": [(2, 0, 1), (2, 4, 0)]}
    spec = dataset(tmp_path, splits)
    both = positives(spec, ["train", "valid"])
    assert both.offsets.tolist() == [0, 1, 1, 3, 3]
    assert both.items.tolist() == [0, 0, 1]
    assert (both.num_users, both.num_items) == (4, 6)
    assert positives(spec, []).num_pairs == 0


def test_a_label_that_is_no_label_is_named_with_its_row(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"test": [(0, 3, 1), (0, 1, 4)]})
    with pytest.raises(DataError, match=r"test\.csv, column 'label', row 2: 4\.0 is no label; a label is 0 or 1"):
        evaluate_ranker(TableRanker(np.eye(4, 6)), spec, "test")


# --- drawn candidates ---


def some_interactions(seed: int, users: int, items: int, count: int) -> Interactions:
    rng = np.random.default_rng(seed)
    return Interactions.from_pairs(
        rng.integers(0, users, count), rng.integers(1, items, count), num_users=users, num_items=items
    )


def test_drawn_negatives_are_different_unseen_real_items() -> None:
    seen, truth = some_interactions(0, 50, 400, 3000), some_interactions(1, 50, 400, 60)
    drawn = draw_candidates(truth, seen, num_negatives=20, first_item=1, seed=5)
    assert drawn.users is not None
    assert drawn.items is not None
    negative = ~drawn.labels
    asked = np.flatnonzero(np.diff(truth.offsets))
    assert np.bincount(drawn.users[negative], minlength=50)[asked].tolist() == [20] * len(asked)
    assert not seen.contain(drawn.users[negative], drawn.items[negative]).any()
    assert not truth.contain(drawn.users[negative], drawn.items[negative]).any()
    assert drawn.items.min() >= 1
    assert len(np.unique(drawn.users.astype(np.int64) * 400 + drawn.items)) == len(drawn.items)
    assert drawn.labels.sum() == truth.num_pairs


def test_the_same_seed_draws_the_same_negatives() -> None:
    seen, truth = some_interactions(0, 50, 400, 3000), some_interactions(1, 50, 400, 60)
    first, again, other = (
        draw_candidates(truth, seen, num_negatives=20, first_item=1, seed=seed).items for seed in (5, 5, 6)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()  # type: ignore[operator]


def test_drawn_negatives_are_uniform() -> None:
    nobody = some_interactions(0, 3000, 101, 0)
    truth = Interactions.from_pairs(np.arange(3000), np.ones(3000, dtype=int), num_users=3000, num_items=101)
    drawn = draw_candidates(truth, nobody, num_negatives=10, first_item=1)
    counts = np.bincount(drawn.items[~drawn.labels], minlength=101)[2:]  # type: ignore[index]
    expected = 30_000 / 99
    assert ((counts - expected) ** 2 / expected).sum() < 160  # chi-square of 98 degrees: beyond it 1 in 10,000


def test_a_user_who_has_seen_nearly_all_gets_what_is_left() -> None:
    pairs = [(0, i) for i in range(1, 8)] + [(1, 1)]
    seen = Interactions.from_pairs(*np.array(pairs).T, num_users=3, num_items=10)
    truth = Interactions.from_pairs(np.array([0, 1, 2]), np.array([8, 2, 3]), num_users=3, num_items=10)
    drawn = draw_candidates(truth, seen, num_negatives=6, first_item=1)
    chosen = {u: sorted(drawn.items[(drawn.users == u) & ~drawn.labels].tolist()) for u in range(3)}  # type: ignore[index]
    assert chosen[0] == [9]
    assert len(chosen[1]) == len(chosen[2]) == 6
    assert not {1, 2} & set(chosen[1])


@pytest.mark.parametrize("kind", ["ranker", "model"])
def test_a_split_of_positives_only_is_ranked_among_drawn_negatives(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(4)
    train = [(u, int(i), 1) for u in range(30) for i in rng.choice(200, 10, replace=False)]
    spec = dataset(tmp_path, {"train": train, "test": [(u, u, 1) for u in range(30)]}, users=30, items=200, group=False)
    table = rng.random((30, 200)).astype(np.float32)
    scorer = TableRanker(table) if kind == "ranker" else TableModel(spec, table)
    run = evaluate_ranker if kind == "ranker" else evaluate_model
    result = run(scorer, spec, "test", settings=EvaluateSettings(num_negatives=30, seed=1))  # type: ignore[operator]
    assert result.left_out == {"rows": "the split's rows are of one class"}
    assert result.protocols["sampled"]["candidates"] == "30 uniform negatives a user, seed 1"
    assert result.protocols["sampled"]["most_candidates"] == 31
    assert 0 < result.metrics["sampled"]["hit_rate@10"] < 1


# --- what may be asked ---


def test_unknown_protocols_and_splits_are_refused(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"test": [(0, 3, 1), (0, 1, 0)]})
    with pytest.raises(SettingsError, match=r"unknown protocol 'sample' \(did you mean 'sampled'\?\)"):
        evaluate_ranker(TableRanker(np.eye(4, 6)), spec, "test", protocols=["sample"])
    message = r"protocols: unknown protocols 'row' \(did you mean 'rows'\?\), 'x'; known: 'rows', 'sampled', 'full'$"
    with pytest.raises(SettingsError, match=message):
        evaluate_ranker(TableRanker(np.eye(4, 6)), spec, "test", protocols=["row", "x"])
    with pytest.raises(SpecError, match="unknown split 'tset'"):
        evaluate_ranker(TableRanker(np.eye(4, 6)), spec, "tset")


def test_ranking_without_users_and_items_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("0.5,1\n0.1,0\n")
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"x": {}, "label": {}},
            "source_spec": {"test": [{"type": "csv", "features": ["x", "label"], "files": ["test.csv"]}]},
            "channel_spec": {"context": ["x"], "label": ["label"]},
        },
        tmp_path,
    )
    with pytest.raises(SpecError, match="protocol 'full' needs a feature in the role 'item'"):
        Question(spec, "test", ["full"], EvaluateSettings())
    question = Question(spec, "test", None, EvaluateSettings())
    found, missing = evaluate_baselines(question)
    assert not found
    assert missing["logistic_regression"] == missing["ease"] == "the dataset has no split 'train' to fit them on"
    found, missing = evaluate_baselines(question, ["test"])
    assert set(found) == set(ROW_BASELINES)
    assert missing["ease"] == "the dataset has no user and no item"
    assert question.choose()[1] == {
        "full": "the dataset has no user and no item",
        "sampled": "the dataset has no user and no item, and no group",
    }


def test_a_dataset_with_an_item_but_no_user_lacks_the_user_alone(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("7,0,1\n7,1,0\n8,1,1\n8,0,0\n")
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"shown": {"dtype": "int64"}, "ad": {"cardinality": 2}, "label": {}},
            "source_spec": {"train": [{"type": "csv", "features": ["shown", "ad", "label"], "files": ["train.csv"]}]},
            "channel_spec": {"item": ["ad"], "group": ["shown"], "label": ["label"]},
        },
        tmp_path,
    )
    question = Question(spec, "train", None, EvaluateSettings())
    assert question.choose() == (("rows", "sampled"), {"full": "the dataset has no user"})
    found, missing = evaluate_baselines(question)
    assert set(found) == set(ROW_BASELINES)
    assert missing == dict.fromkeys(BASELINES, "the dataset has no user")


def test_users_that_no_feature_tells_apart_have_no_baselines(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("0.5,0,1\n0.1,1,0\n")
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"age": {}, "ad": {"cardinality": 2}, "label": {}},
            "source_spec": {"train": [{"type": "csv", "features": ["age", "ad", "label"], "files": ["train.csv"]}]},
            "channel_spec": {"user": ["age"], "item": ["ad"], "label": ["label"]},
        },
        tmp_path,
    )
    _, missing = evaluate_baselines(Question(spec, "train", None, EvaluateSettings()))
    assert missing == dict.fromkeys(BASELINES, "the dataset has no user")


def test_groups_of_positives_only_cannot_be_ranked_without_users_and_items(tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("7,1\n8,1\n")
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"shown": {"dtype": "int64"}, "label": {}},
            "source_spec": {"test": [{"type": "csv", "features": ["shown", "label"], "files": ["test.csv"]}]},
            "channel_spec": {"group": ["shown"], "label": ["label"]},
        },
        tmp_path,
    )
    assert Question(spec, "test", None, EvaluateSettings()).choose()[1]["sampled"] == (
        "the split lists no negatives, and the dataset has no user and no item to draw them for"
    )
    question = Question(spec, "test", ["sampled"], EvaluateSettings())
    with pytest.raises(SpecError, match=r"'sampled' on the split 'test', which lists no negatives, needs .* 'user'"):
        _ = question.candidates


def test_another_dataset_than_the_models_is_refused(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"test": [(0, 3, 1), (0, 1, 0)]})
    model = TableModel(spec, np.eye(4, 6))
    larger = dataset(tmp_path, {"test": [(0, 3, 1), (0, 1, 0)]}, items=7)
    with pytest.raises(SpecError, match="feature 'item' has 7 ids; the model was trained on 6"):
        evaluate(Trained(model), larger, "test")
    with pytest.raises(
        SpecError, match=r"unknown features 'user', 'item'; known: 'display', 'label', 'score', 'leak'$"
    ):
        evaluate(Trained(model), displays(tmp_path, [(0, 0, 0.5, 0)]), "test")


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(SettingsError, match="ks"):
        config.build(EvaluateSettings, "evaluate", {"ks": [0]})


# --- several ranks ---


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    """Ranks that are threads of one process: gather joins their tensors in the order of ranks, as torch's does."""

    meeting: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    board: dict[int, Tensor] = field(default_factory=dict)

    def gather(self, tensor: Tensor) -> Tensor:
        self.board[self.rank] = tensor
        self.meeting.wait()
        joined = torch.cat([self.board[rank] for rank in range(self.world_size)])
        self.meeting.wait()
        return joined


@pytest.mark.parametrize("world_size", [2, 5])
@pytest.mark.parametrize("drawn", [False, True])
def test_every_number_of_ranks_gives_the_numbers_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, drawn: bool
) -> None:
    monkeypatch.setattr(evaluation, "ROWS_PER_BLOCK", 64)
    monkeypatch.setattr(evaluation, "SCORES_PER_BLOCK", 200)
    rng = np.random.default_rng(6)
    rows = series(rng, 21, 50, 12)
    train = [(u, int(i), 1) for u in range(21) for i in rng.choice(50, 10, replace=False)]
    test = [row for row in rows if row[2] or not drawn]
    spec = dataset(tmp_path, {"train": train, "test": test}, users=21, items=50)
    table = rng.normal(size=(21, 50))
    settings = EvaluateSettings(num_negatives=12)
    alone = evaluate_model(TableModel(spec, table), spec, "test", settings=settings)
    results = on_ranks(
        world_size, lambda ranks: evaluate_model(TableModel(spec, table), spec, "test", ranks=ranks, settings=settings)
    )
    assert len(alone.metrics) == (2 if drawn else 3)
    for result in results:
        assert result.metrics == alone.metrics
        assert result.protocols == alone.protocols


def on_ranks(world_size: int, work: Callable[[Ranks], evaluation.Evaluation]) -> list[evaluation.Evaluation]:
    """What each of some ranks gets, one thread a rank."""
    meeting: threading.Barrier = threading.Barrier(world_size, timeout=600)
    board: dict[int, Tensor] = {}
    results: dict[int, evaluation.Evaluation] = {}

    def run(rank: int) -> None:
        results[rank] = work(ThreadRanks(rank, world_size, meeting=meeting, board=board))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(world_size)]


def clicks_without_users(folder: Path, num_rows: int) -> FeatureSpec:
    """Rows (item, label) in files of 40 rows, a third of them positive, and no group."""
    rows = [(item % 23, int(item % 3 == 0)) for item in range(num_rows)]
    files = []
    for start in range(0, num_rows, 40):
        files.append(f"test-{start}.csv")
        (folder / files[-1]).write_text("".join(f"{i},{y}\n" for i, y in rows[start : start + 40]))
    return FeatureSpec.from_dict(
        {
            "feature_spec": {"item": {"cardinality": 23}, "label": {}},
            "source_spec": {"test": [{"type": "csv", "features": ["item", "label"], "files": files}]},
            "channel_spec": {"item": ["item"], "label": ["label"]},
        },
        folder,
    )


class ItemModel(TableModel):
    """Gives each item a logit."""

    needs: ClassVar[tuple[str, ...]] = ("item", "label")

    def forward(self, batch: Batch) -> Tensor:
        return self.table[batch["item"].long()]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_rows_that_are_not_held_in_memory_reach_the_same_numbers_on_any_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    monkeypatch.setattr(evaluation, "ROWS_PER_BLOCK", 40)
    spec = clicks_without_users(tmp_path, 1000)
    logits = np.round(np.random.default_rng(0).normal(size=23), 1)  # some items tie
    held = evaluate_model(ItemModel(spec, logits), spec, "test")
    monkeypatch.setattr(evaluation, "_read_rows", lambda *_: pytest.fail("all labels are read"))
    streamed = EvaluateSettings(memory_rows=100)
    alone = evaluate_model(ItemModel(spec, logits), spec, "test", settings=streamed)
    assert held.protocols == alone.protocols == {"rows": {"rows": 1000, "positives": 334}}
    assert (alone.left_out, set(alone.metrics["rows"])) == (held.left_out, {"auc", "log_loss", "accuracy"})
    for name in ("auc", "accuracy"):
        assert alone.metrics["rows"][name] == held.metrics["rows"][name]
    assert alone.metrics["rows"]["log_loss"] == pytest.approx(held.metrics["rows"]["log_loss"], rel=1e-14)
    for result in on_ranks(
        world_size, lambda ranks: evaluate_model(ItemModel(spec, logits), spec, "test", ranks=ranks, settings=streamed)
    ):
        assert result.metrics == alone.metrics
        assert result.protocols == alone.protocols


def test_a_streamed_split_of_one_class_has_no_auc_and_says_why_rows_are_left_out(tmp_path: Path) -> None:
    spec = clicks_without_users(tmp_path, 40)
    (tmp_path / "test-0.csv").write_text("1,0\n" * 40)
    settings = EvaluateSettings(memory_rows=10)
    left = evaluate_model(ItemModel(spec, np.zeros(23)), spec, "test", settings=settings)
    assert (left.metrics, left.left_out["rows"]) == ({}, "the split's rows are of one class")
    asked = evaluate_model(ItemModel(spec, np.zeros(23)), spec, "test", protocols=["rows"], settings=settings)
    assert asked.metrics == {"rows": {"log_loss": pytest.approx(math.log(2)), "accuracy": 0.5}}


def test_a_streamed_split_names_its_wrong_label_and_a_diverged_model(tmp_path: Path) -> None:
    spec = clicks_without_users(tmp_path, 80)
    settings = EvaluateSettings(memory_rows=10)
    with pytest.raises(DataError, match="80 of 80 scores are NaN: the model has diverged"):
        evaluate_model(ItemModel(spec, np.full(23, np.nan)), spec, "test", settings=settings)
    (tmp_path / "test-40.csv").write_text("1,0\n1,3\n" + "2,1\n" * 38)
    with pytest.raises(DataError, match=r"test-40\.csv, column 'label', row 2: 3\.0 is no label; a label is 0 or 1"):
        evaluate_model(ItemModel(spec, np.zeros(23)), spec, "test", settings=settings)


def test_a_streamed_split_has_the_baselines_of_rows(tmp_path: Path) -> None:
    spec = clicks_without_users(tmp_path, 400)
    spec = spec.replace(sources={**spec.sources, "train": spec.sources["test"]})
    held = evaluate_baselines(Question(spec, "test", ["rows"], EvaluateSettings()))[0]
    streamed = evaluate_baselines(Question(spec, "test", ["rows"], EvaluateSettings(memory_rows=50)))[0]
    assert set(held) == set(streamed) == set(ROW_BASELINES)
    for name, found in streamed.items():
        assert found.metrics["rows"] == pytest.approx(held[name].metrics["rows"], rel=1e-14)


# --- baselines and the report ---


def liked_items(tmp_path: Path) -> tuple[FeatureSpec, np.ndarray]:
    """Users like one half of the items each; a table of scores that knows it."""
    rng = np.random.default_rng(7)
    train, test = [], []
    taste = np.zeros((40, 60), dtype=np.float32)
    for user in range(40):
        half = np.arange(30) + 30 * (user % 2)
        taste[user, half] = 1
        liked = rng.choice(half, 16, replace=False)
        train += [(user, int(item), 1) for item in liked[1:]]
        others = rng.choice(np.setdiff1d(np.arange(60), liked), 12, replace=False)
        test += [(user, int(liked[0]), 1), *((user, int(item), 0) for item in others)]
    return dataset(tmp_path, {"train": train, "test": test}, users=40, items=60), taste


def test_the_report_puts_the_model_beside_every_baseline(tmp_path: Path) -> None:
    spec, taste = liked_items(tmp_path)
    stages: list[tuple[str, float, float | None]] = []
    report = evaluate(
        Trained(TableModel(spec, taste)), spec, "test", baselines=True, progress=lambda *step: stages.append(step)
    )
    assert set(report.baselines) == set(BASELINES)
    for metrics in report.baselines.values():
        assert set(metrics) == {"rows", "sampled", "full"}
        assert "log_loss" not in metrics["rows"]
        assert set(metrics["sampled"]) == set(report.metrics["sampled"])
    assert report.metrics["sampled"]["ndcg@10"] > report.baselines["popularity"]["sampled"]["ndcg@10"]
    assert ("baselines", 4, 4) in stages
    assert report.described("sampled") == "sampled (40 groups, 13 candidates each: the dataset's own)"
    assert (
        report.described("full") == "full (40 groups, 45 candidates each: all items without those of the user in train)"
    )
    assert report.described("rows") == "rows (520 rows, 40 positive)"
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert plain["metrics"]["sampled"] == report.metrics["sampled"]
    assert plain["split"] == "test"


def test_a_baseline_that_wins_is_said_to_win(tmp_path: Path) -> None:
    spec, taste = liked_items(tmp_path)
    report = evaluate(Trained(TableModel(spec, -taste)), spec, "test", baselines=True, protocols=["sampled"])
    assert [verdict.split(" beats")[0] for verdict in report.verdicts] == [f"sampled: {name}" for name in BASELINES]
    assert "hit_rate@10 " in report.verdicts[0]
    assert report.verdicts[0].count(" standard errors)") == 2
    assert report.verdicts[0].endswith(" and 2 more")  # recall says the same as HR, so MAP and MRR


def test_verdicts_know_which_way_is_better_and_keep_silent_when_the_model_wins() -> None:
    model = evaluation.Evaluation({"rows": {"auc": 0.8, "log_loss": 0.5}})
    better = evaluation.Evaluation({"rows": {"auc": 0.7, "log_loss": 0.4}})
    assert verdicts(model, {"simple": better}) == ("rows: simple beats the model: log_loss 0.4000 against 0.5000",)
    assert verdicts(better, {"simple": evaluation.Evaluation({"rows": {"auc": 0.6}})}) == ()


def test_verdicts_weigh_the_difference_by_its_standard_error_over_the_groups() -> None:
    def of(values: Sequence[float]) -> evaluation.Evaluation:
        array = np.array(values)
        return evaluation.Evaluation({"full": {"mrr": float(array.mean())}}, values={"full": {"mrr": array}})

    # differences .2, .1, .3, .2: mean .2, standard error .0816 / 2
    (verdict,) = verdicts(of([0.1, 0.2, 0.3, 0.4]), {"b": of([0.3, 0.3, 0.6, 0.6])})
    assert verdict == "full: b beats the model: mrr 0.4500 against 0.2500 (4.9 standard errors)"


def test_a_baseline_that_cannot_be_fitted_is_left_out_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, taste = liked_items(tmp_path)

    def too_large(interactions: Interactions) -> TableRanker:  # noqa: ARG001
        raise SettingsError("too many items")

    monkeypatch.setattr(evaluation, "BASELINES", {"popularity": popularity, "ease": too_large})
    question = Question(spec, "test", None, EvaluateSettings())
    found, missing = evaluate_baselines(question, names=("popularity", "ease"))
    assert set(found) == {"popularity"}
    report = evaluation.Report("test", evaluate_ranker(TableRanker(taste), spec, "test"), found, missing)
    assert report.verdicts == ()
    assert report.notes == ("ease left out: too many items",)
    assert report.to_dict()["left_out"] == {"ease": "too many items"}


def test_baselines_are_fitted_on_what_the_model_was_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {"train": [(0, 0, 1)], "valid": [(0, 1, 1), (0, 2, 0)], "test": [(0, 3, 1), (0, 5, 0)]}
    spec = dataset(tmp_path, splits)
    sizes = []

    def counting(interactions: Interactions) -> TableRanker:
        sizes.append(interactions.num_pairs)
        return TableRanker(np.eye(4, 6))

    monkeypatch.setattr(evaluation, "BASELINES", dict.fromkeys(BASELINES, counting))
    model = TableModel(spec, np.eye(4, 6))
    settings = EvaluateSettings(ks=(1,))
    for train in ({}, {"train_splits": ["train", "valid"]}):
        evaluate(Trained(model, train), spec, "test", baselines=True, settings=settings)
    assert sizes == [1] * 4 + [2] * 4


def test_a_click_model_stands_beside_logistic_regression_under_every_protocol_of_rows(tmp_path: Path) -> None:
    spec = made_up.clicks(tmp_path / "data", num_rows=3000)
    model = Score(spec)
    model.forward = lambda batch: batch["speed"] * model.weight  # type: ignore[method-assign]
    report = evaluate(Trained(model), spec, "valid", baselines=True, protocols=["rows", "sampled"])
    assert list(report.baselines) == ["constant", "logistic_regression", *BASELINES]
    ours, theirs = report.metrics, report.baselines["logistic_regression"]
    assert {protocol: set(of) for protocol, of in theirs.items()} == {name: set(of) for name, of in ours.items()}
    assert theirs["rows"]["auc"] > 0.65
    assert theirs["rows"]["log_loss"] < report.baselines["constant"]["rows"]["log_loss"]
    assert report.baselines["constant"]["rows"]["auc"] == 0.5
    assert "rows: logistic_regression beats the model: auc " in " ".join(report.verdicts)
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert plain["fitted"]["logistic_regression"]["rows"] == plain["fitted"]["logistic_regression"]["of_rows"]
    assert report.notes == ()


def test_a_dataset_without_users_and_items_has_the_baselines_of_rows_and_says_once_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_displays()
    spec = displays(tmp_path, rows)
    (tmp_path / "train.csv").write_text((tmp_path / "test.csv").read_text())
    spec = spec.replace(sources={**spec.sources, "train": [Chunk(**{**spec.sources["test"][0].model_dump(),
                                                                   "files": ["train.csv"]})]})  # fmt: skip
    few = partial(logistic_regression, most_entries=1200)
    monkeypatch.setattr(evaluation, "ROW_BASELINES", {"logistic_regression": few})
    report = evaluate(Trained(Score(spec)), spec, "test", baselines=True)
    assert set(report.baselines) == {"logistic_regression"}
    *left_out, note = report.notes
    assert left_out == [
        "protocol full left out: the dataset has no user and no item",
        "popularity, item_knn, ease, ials left out: the dataset has no user and no item",
    ]
    assert re.fullmatch(rf"logistic_regression was fitted on an even sample of [56]\d\d of {len(rows):,} rows", note)
