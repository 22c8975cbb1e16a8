"""Protocols by hand and against plain loops, on any number of ranks."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from recspec.base.errors import DataError, SettingsError
from recspec.evaluation.evaluations import evaluate_model
from recspec.evaluation.report import Evaluation, Report
from recspec.evaluation.task import EvaluateSettings
from recspec.feature_spec import FeatureSpec
from recspec.loading.ranks import Ranks
from recspec.metrics import measures as metrics
from recspec.metrics.calibration import calibration_error
from recspec.models.layers.batch import Batch
from tests.evaluation.tables import (
    ADS,
    HELD_OUT,
    SHOWN,
    Score,
    TableModel,
    TableRanker,
    csv_spec,
    dataset,
    displays,
    random_displays,
    ranked,
    series,
    with_histories,
)

VOCABULARIES = {"vocabularies": "vocabularies"}  # id 0 is unknown


def described(found: Evaluation, protocol: str) -> str:
    return Report("test", found).described(protocol)


# --- sampled ----------------------------------------------------------------------------------------------------------


def test_sampled_ranks_the_splits_own_candidates_by_hand(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": [(0, 0, 1)], "test": [(0, 3, 1), (0, 1, 0), (0, 2, 0), (1, 5, 1), (1, 4, 0)]})
    table = np.zeros((4, 6))
    table[0] = [9, 3, 1, 2, 9, 9]  # of items 3, 1, 2 the positive is second
    table[1] = [0, 0, 0, 0, 7, 8]  # of items 5, 4 it is first
    result = ranked(spec, table, ks=(1, 2))
    sampled = result.metrics["sampled"]
    assert (sampled["hit_rate@1"], sampled["hit_rate@2"], sampled["mrr"]) == (0.5, 1.0, 0.75)
    assert sampled["ndcg@2"] == pytest.approx((1 / math.log2(3) + 1) / 2)
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
    result = ranked(spec, np.eye(4, 6), "sampled", ks=(1,))
    assert result.metrics["sampled"]["hit_rate@1"] == 0.5  # a tie of two candidates
    assert result.protocols["sampled"]["duplicates_counted_once"] == 1


def test_a_group_need_not_be_a_user(tmp_path: Path) -> None:
    channels = {"context": ["ad"], "group": ["shown"], "label": ["label"]}
    spec = csv_spec(tmp_path, {"test": SHOWN}, ADS, channels)

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
    message = r"k = 10: longer than every list of candidates \(the longest has 3.*choose k from 1 to 3, as --k 3"
    with pytest.raises(SettingsError, match=message):
        ranked(spec, np.random.default_rng(0).random(60), ks=ks)


@pytest.mark.parametrize(("candidates", "k"), [(2, 1), (5, 1), (6, 5), (10, 10)])
def test_a_cut_off_that_nobody_named_is_shorter_than_the_series(tmp_path: Path, candidates: int, k: int) -> None:
    rows = [(user, item, int(item == user)) for user in range(3) for item in range(candidates + user)[user:]]
    metadata = {"test_samples_per_series": candidates}
    spec = dataset(tmp_path, {"train": [(0, 1, 1)], "test": rows}, items=20, metadata=metadata)
    found = ranked(spec, np.random.default_rng(0).random((4, 20)), "sampled").metrics["sampled"]
    assert f"ndcg@{k}" in found
    assert {name.split("@")[1] for name in found if "@" in name} == {str(k)}


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
    assert described(result, "sampled") == (
        "sampled (5 groups, 1 to 40 candidates each: the dataset's own; 1 groups without a positive left out; 1 groups "
        "hold positives alone, which any model ranks right)"
    )


@pytest.mark.parametrize("ks", [None, (2,)])
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
    certain = f"the dataset's own; hit_rate@{k}, recall@{k} left out, 1 for any model)"
    assert described(found, "sampled").endswith(certain)
    shorter = evaluate_model(Score(spec), spec, "test", settings=EvaluateSettings(ks=(1, 2))).metrics["sampled"]
    assert {name for name in shorter if name.startswith(("hit", "recall"))} == {"hit_rate@1", "recall@1"}


def test_groups_of_single_rows_are_not_ranked(tmp_path: Path) -> None:
    spec = displays(tmp_path, [(1, 0, 0.9, 0), (2, 1, 0.5, 0)])
    left_out = evaluate_model(Score(spec), spec, "test").left_out
    assert left_out["sampled"] == "every group is a single row, so there is nothing to rank"


def expected_map(rows: Sequence[tuple[int, int, float]], k: int, draws: int = 2000) -> float:
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
    plain = [(g, y, x) for g, y, x, _ in rows]
    leaked = [(g, y, 1 / (1 + math.exp(-x)) + of) for g, y, x, of in rows]
    for k in (12, 5):
        for name, of in (("mean_average_precision", plain), ("mean_average_precision_with_leak", leaked)):
            assert sampled[f"{name}@{k}"] == pytest.approx(expected_map(of, k), abs=0.003)


def in_small_blocks(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Groups are cut by blocks, and by ranks."""
    monkeypatch.setattr("recspec.evaluation.interactions.ROWS_PER_BLOCK", rows)
    monkeypatch.setattr("recspec.evaluation.scoring.ROWS_PER_BLOCK", rows)


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
    in_small_blocks(monkeypatch, 37)
    monkeypatch.setattr("recspec.evaluation.scoring.ROWS_PER_FORWARD", 10)
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


def test_rows_with_one_item_are_candidates_of_their_own_where_more_than_the_item_differs(tmp_path: Path) -> None:
    rows = "5,1,1,0.1\n5,1,0,0.3\n5,0,0,0.2\n5,0,0,0.4\n"  # item 1 at two hours; item 0 is unknown
    features: dict[str, dict[str, object]] = {"display": {"dtype": "int64"}, "ad": {"dtype": "int32", "cardinality": 3}}
    features |= {"label": {}, "score": {}}
    own = {"group": ["display"], "label": ["label"]}
    for channels, candidates in (({"item": ["ad"], "context": ["score"]}, 4), ({"item": ["ad", "score"]}, 3)):
        spec = csv_spec(tmp_path, {"test": rows}, features, {**channels, **own}, VOCABULARIES)
        found = evaluate_model(Score(spec), spec, "test", protocols=["sampled"])
        assert found.protocols["sampled"]["most_candidates"] == candidates


# --- full -------------------------------------------------------------------------------------------------------------


def test_full_ranks_all_unseen_items_by_hand(tmp_path: Path) -> None:
    splits = {
        "train": [(0, 0, 1), (0, 1, 1), (1, 0, 1), (0, 5, 0)],
        "valid": [(0, 2, 1), (0, 4, 0)],
        "test": [(0, 3, 1)],
    }
    spec, scores = dataset(tmp_path, splits), np.array([6.0, 5.0, 4.0, 2.0, 3.0, 1.0])
    test, valid, train = (ranked(spec, scores, "full", split=split, ks=(1, 2)) for split in ("test", "valid", "train"))
    # train and valid positives 0, 1, 2 are out; 4 and 5 were negatives, so they stay: 4 > 3 > 5
    assert test.metrics["full"]["mrr"] == 0.5
    assert (test.protocols["full"]["groups"], test.protocols["full"]["most_candidates"]) == (1, 3)
    assert test.protocols["full"]["candidates"] == "all items without those of the user in train and valid"
    assert valid.metrics["full"]["mrr"] == 1.0  # 0 and 1 are out, 2 is the best of the rest
    assert valid.protocols["full"]["most_candidates"] == 4
    assert train.protocols["full"]["candidates"] == "all items"
    assert train.metrics["full"]["recall@2"] == 1.0


def test_the_unknown_item_is_never_ranked(tmp_path: Path) -> None:
    splits = {"train": [(1, 1, 1)], "test": [(1, 2, 1), (2, 0, 1), (3, 0, 1), (3, 5, 1)]}
    spec = dataset(tmp_path, splits, metadata=VOCABULARIES)
    result = ranked(spec, np.arange(6.0)[::-1], "full", ks=(1,))  # item 0 scores highest
    assert result.protocols["full"]["groups"] == 2  # user 2's only positive is unknown
    assert result.values["full"]["mrr"].tolist() == [1.0, 1 / 5]


def reference_full(
    table: np.ndarray, seen: set[tuple[int, int]], truth: set[tuple[int, int]], k: int
) -> dict[str, float]:
    """Recall@k and MRR of new items by plain loops; the scores must not tie."""
    recalls, reciprocals, truth = [], [], truth - seen
    for user in sorted({u for u, _ in truth}):
        mine = {i for u, i in truth if u == user}
        items = [i for i in range(table.shape[1]) if (user, i) not in seen]
        order = sorted(items, key=lambda i, user=user: -table[user, i])
        recalls.append(len(mine & set(order[:k])) / len(mine))
        reciprocals.append(1 / (1 + min(order.index(i) for i in mine)))
    return {f"recall@{k}": float(np.mean(recalls)), "mrr": float(np.mean(reciprocals))}


@pytest.mark.parametrize("scores_per_block", [1, 200, 1 << 22])
def test_full_equals_plain_loops_in_every_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scores_per_block: int
) -> None:
    monkeypatch.setattr("recspec.evaluation.rankings.SCORES_PER_BLOCK", scores_per_block)
    rng = np.random.default_rng(1)
    pairs = {
        split: {(int(u), int(i)) for u, i in rng.integers(0, (20, 40), (n, 2))}
        for split, n in (("train", 200), ("valid", 40), ("test", 60))
    }
    spec = dataset(tmp_path, {s: [(u, i, 1) for u, i in sorted(p)] for s, p in pairs.items()}, users=20, items=40)
    table = rng.random((20, 40)).astype(np.float32)
    expected = reference_full(table, pairs["train"] | pairs["valid"], pairs["test"], 5)
    for scorer in (TableRanker(table), TableModel(spec, table)):
        result = evaluate_model(scorer, spec, "test", protocols=["full"], settings=EvaluateSettings(ks=(5,)))
        for name, value in expected.items():
            assert result.metrics["full"][name] == pytest.approx(value)


def test_a_constant_ranker_gets_chance_under_full(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": [(0, 0, 1)], "test": [(0, 3, 1)]}, items=101)
    assert ranked(spec, np.zeros(101), "full").metrics["full"]["hit_rate@10"] == pytest.approx(0.1)


class HistoryModel(TableModel):
    """Scores an item by how often it stands in the history, and by its id a little."""

    needs = ("user", "item", "history", "label")

    def features(self) -> tuple[str, ...]:
        return (*super().features(), "history_item")

    def forward(self, batch: Batch) -> Tensor:
        among = (batch["history_item"] == batch["item"][:, None]).sum(1)
        return among + batch["item"].float() / 100


def test_series_of_a_positive_and_a_negative_beside_histories_by_hand(tmp_path: Path) -> None:
    """Logits: 1.02 and .07; .04 and 1.05; .01 and .06. User 1's positive alone is first of its two."""
    spec = with_histories(tmp_path, {"train": [(1, 7, 1, [5])], "test": HELD_OUT})
    model = HistoryModel(spec, np.zeros((1, 1)))
    found = evaluate_model(model, spec, "test")
    assert set(found.metrics) == {"rows", "sampled", "full"}
    assert found.protocols["full"]["input"] == "the histories of the rows of test"
    assert found.metrics["sampled"]["hit_rate@1"] == pytest.approx(1 / 3)
    assert found.metrics["sampled"]["mrr"] == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert found.metrics["rows"]["group_auc"] == pytest.approx(1 / 3)
    assert found.metrics["rows"]["auc"] == pytest.approx(2 / 9)  # 1.02 above .07 and .06
    assert {"log_loss", "accuracy"} <= set(found.metrics["rows"])
    assert described(found, "sampled") == (
        "sampled (3 groups, 2 candidates each: the dataset's own; input at test: the histories of the rows of test)"
    )
    # Full gives each user the history of its row. User 1 did 5 and 7 before: 1, 2, 3, 4, 6 are left, 3 (1.03) and 2
    # (1.02) lead. User 2: 6, 5, then 7, 4. User 3: 7, 6, 5, 4, 3, 2, 1.
    found = evaluate_model(model, spec, "test", protocols=["full"], settings=EvaluateSettings(ks=(1, 2)))
    assert found.metrics["full"]["hit_rate@1"] == 0
    assert found.metrics["full"]["hit_rate@2"] == pytest.approx(1 / 3)
    assert found.metrics["full"]["mrr"] == pytest.approx((1 / 2 + 1 / 4 + 1 / 7) / 3)
    assert found.protocols["full"]["candidates"] == ("all items without those of the user in train, histories included")


@pytest.mark.parametrize("kind", ["ranker", "model"])
def test_a_split_of_positives_only_is_ranked_among_drawn_negatives(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(4)
    train = [(u, int(i), 1) for u in range(30) for i in rng.choice(200, 10, replace=False)]
    spec = dataset(tmp_path, {"train": train, "test": [(u, u, 1) for u in range(30)]}, users=30, items=200, group=False)
    table = rng.random((30, 200)).astype(np.float32)
    scorer = TableRanker(table) if kind == "ranker" else TableModel(spec, table)
    result = evaluate_model(scorer, spec, "test", settings=EvaluateSettings(num_negatives=30, seed=1))
    assert result.left_out == {"rows": "every row of test is positive"}
    assert result.protocols["sampled"]["candidates"] == "30 uniform negatives a user, seed 1"
    assert result.protocols["sampled"]["most_candidates"] == 31
    assert 0 < result.metrics["sampled"]["hit_rate@10"] < 1


# --- ranks ------------------------------------------------------------------------------------------------------------


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


def on_ranks(world_size: int, work: Callable[[Ranks], Evaluation]) -> list[Evaluation]:
    """What each of some ranks gets, one thread a rank."""
    meeting: threading.Barrier = threading.Barrier(world_size, timeout=600)
    board: dict[int, Tensor] = {}
    results: dict[int, Evaluation] = {}

    def run(rank: int) -> None:
        results[rank] = work(ThreadRanks(rank, world_size, meeting=meeting, board=board))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 5])
@pytest.mark.parametrize("drawn", [False, True])
def test_every_number_of_ranks_gives_the_numbers_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, drawn: bool
) -> None:
    in_small_blocks(monkeypatch, 64)
    monkeypatch.setattr("recspec.evaluation.rankings.SCORES_PER_BLOCK", 200)
    rng = np.random.default_rng(6)
    rows = series(rng, 21, 50, 12)
    train = [(u, int(i), 1) for u in range(21) for i in rng.choice(50, 10, replace=False)]
    test = [row for row in rows if row[2] or not drawn]
    spec = dataset(tmp_path, {"train": train, "test": test}, users=21, items=50)
    table, settings = rng.normal(size=(21, 50)), EvaluateSettings(num_negatives=12)
    alone = evaluate_model(TableModel(spec, table), spec, "test", settings=settings)
    assert len(alone.metrics) == (2 if drawn else 3)
    for result in on_ranks(
        world_size, lambda ranks: evaluate_model(TableModel(spec, table), spec, "test", ranks=ranks, settings=settings)
    ):
        assert result.metrics == alone.metrics
        assert result.protocols == alone.protocols


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


@pytest.mark.parametrize("world_size", [2, 5])
def test_rows_without_users_reach_the_numbers_of_the_metrics_on_any_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    in_small_blocks(monkeypatch, 40)
    spec = clicks_without_users(tmp_path, 1000)
    logits = np.round(np.random.default_rng(0).normal(size=23), 1).astype(np.float32)  # some items tie
    read = [line.split(",") for path in tmp_path.glob("test-*.csv") for line in path.read_text().splitlines()]
    scores, labels = logits[[int(item) for item, _ in read]], np.array([label == "1" for _, label in read])
    model = ItemModel(spec, logits)
    alone = evaluate_model(model, spec, "test")
    assert alone.protocols == {"rows": {"rows": 1000, "positives": 334}}
    assert alone.metrics["rows"] == {
        "auc": metrics.auc(scores, labels),
        "log_loss": pytest.approx(metrics.log_loss(scores, labels), rel=1e-14),
        "accuracy": metrics.accuracy(scores, labels),
        "calibration_error": calibration_error(scores, labels).value,
    }
    error = metrics.log_losses(scores, labels).std(ddof=1) / 1000**0.5
    assert alone.standard_errors["rows"]["log_loss"] == pytest.approx(error, rel=1e-5)
    for result in on_ranks(world_size, lambda ranks: evaluate_model(model, spec, "test", ranks=ranks)):
        assert result.metrics == alone.metrics
        assert result.protocols == alone.protocols


# --- what has no value, and what is refused ---------------------------------------------------------------------------


def test_a_split_of_one_class_has_no_auc_and_says_why_rows_are_left_out(tmp_path: Path) -> None:
    spec = clicks_without_users(tmp_path, 40)
    (tmp_path / "test-0.csv").write_text("1,0\n" * 40)
    left = evaluate_model(ItemModel(spec, np.zeros(23)), spec, "test")
    assert (left.metrics, left.left_out["rows"]) == ({}, "every row of test is negative")
    asked = evaluate_model(ItemModel(spec, np.zeros(23)), spec, "test", protocols=["rows"])
    of_rows = {"log_loss": pytest.approx(math.log(2)), "accuracy": 0.5, "calibration_error": 0.5}
    assert (asked.metrics, asked.probabilities) == ({"rows": of_rows}, None)
    assert Report("test", asked).notes == ("rows has no AUC: every row of test is negative",)


def test_wrong_labels_and_leaks_and_a_diverged_model_are_named(tmp_path: Path) -> None:
    spec = clicks_without_users(tmp_path, 80)
    with pytest.raises(DataError, match="80 of 80 scores are NaN, the first in row 0: the model has diverged"):
        evaluate_model(ItemModel(spec, np.full(23, np.nan)), spec, "test")
    (tmp_path / "test-40.csv").write_text("1,0\n1,3\n" + "2,1\n" * 38)
    with pytest.raises(DataError, match=r"test-40\.csv, column 'label', row 2: 3\.0 is not a label; a label is 0 or 1"):
        evaluate_model(ItemModel(spec, np.zeros(23)), spec, "test")
    leaky = displays(tmp_path, [(1, 0, 9.0, 0), (1, 1, -9.0, 3)], metadata={"leak": "leak"})
    with pytest.raises(DataError, match=r"split 'test', feature 'leak': row 2 is 3\.0; metadata\.leak is 0 or 1"):
        evaluate_model(Score(leaky), leaky, "test")


REPEATS = {
    "train": [(0, 1, 1), (0, 2, 1), (1, 3, 1), (2, 5, 1)],
    "valid": [(0, 3, 1), (1, 3, 1)],
    "test": [(0, 1, 1), (1, 4, 1), (2, 5, 1), (2, 1, 1)],
}
"""Test repeats item 1 of user 0 and item 5 of user 2; valid item 3 of user 1."""


def test_a_positive_of_an_item_that_the_user_has_is_no_target(tmp_path: Path) -> None:
    spec = dataset(tmp_path, REPEATS)
    found = ranked(spec, np.array([0.0, 9, 0, 8, 5, 9]), ks=(1, 2), num_negatives=3)
    for protocol in ("full", "sampled"):
        facts = found.protocols[protocol]
        assert (facts["repeats_left_out"], facts["of_positives"], facts["positives"]) == (2, 4, 2)
    # user 1, without item 3: item 4 stands behind 1 and 5; user 2, without item 5: item 1 is first
    assert found.metrics["full"]["mrr"] == pytest.approx((1 / 3 + 1) / 2)
    assert found.metrics["full"]["hit_rate@1"] == 0.5
    assert "2 of 4 positives left out, which repeat items of the user" in described(found, "full")
    valid, train = (ranked(spec, np.zeros(6), "full", split=split, ks=(1,)) for split in ("valid", "train"))
    assert (valid.protocols["full"]["repeats_left_out"], valid.protocols["full"]["groups"]) == (1, 1), "like test"
    assert "repeats_left_out" not in train.protocols["full"], "train itself has no earlier split"


def test_a_repeat_is_no_candidate_of_a_series_and_stays_among_rows_of_their_own(tmp_path: Path) -> None:
    splits = {
        "train": [(0, 1, 1), (1, 2, 1)],
        "test": [(0, 1, 1), (0, 3, 0), (0, 4, 0), (1, 3, 1), (1, 4, 0), (1, 5, 0)],
    }
    spec = dataset(tmp_path / "series", splits, metadata={"test_samples_per_series": 3})
    found = ranked(spec, np.arange(6.0), "sampled", "rows", ks=(1,))
    facts = found.protocols["sampled"]
    assert (facts["groups"], facts["groups_without_positive"], facts["repeats_left_out"]) == (1, 1, 1)
    assert found.metrics["sampled"]["mrr"] == pytest.approx(1 / 3)  # user 1: items 4 and 5 stand before 3
    assert found.protocols["rows"] == {"rows": 6, "positives": 2}
    found = ranked(dataset(tmp_path, splits), np.arange(6.0), "sampled", ks=(1,))
    assert found.protocols["sampled"]["groups"] == 2
    assert "repeats_left_out" not in found.protocols["sampled"]


def test_repeats_alone_leave_rankings_out_and_are_told(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": [(0, 1, 1), (1, 2, 1)], "test": [(0, 1, 1), (1, 2, 1)]})
    why = "no positive of test can be ranked: 2 of items that the user acted on before (--repeats keep ranks them)"
    found = ranked(spec, np.zeros(6))
    assert found.left_out["full"] == found.left_out["sampled"] == why
    asked = ranked(spec, np.zeros(6), "full", "sampled")
    assert (asked.metrics, asked.left_out) == ({}, {"full": why, "sampled": why})
    (warning,) = Report("test", asked).warnings
    assert warning.kind == "mostly_repeats"
    assert warning.message == (
        "sampled ranks only new items and skipped 2 of 2 positives of test; for repeat purchases judge by labelled "
        "rows (protocol rows), or evaluate with --repeats keep"
    )


@pytest.mark.parametrize("protocols", [(), ("full", "sampled")])
@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([(1, 1, 0), (2, 2, 0)], "no row of test is positive"),
        ([(0, 3, 1), (0, 4, 1)], "no positive of test can be ranked: 2 of unknown users"),
        ([(1, 0, 1), (0, 0, 1)], "no positive of test can be ranked: 1 of unknown users, 1 of unknown items"),
        ([(1, 2, 1)], "no positive of test can be ranked: 1 of items that training never saw (--cold keep ranks them)"),
    ],
)
def test_a_ranking_without_a_target_says_why(
    tmp_path: Path, protocols: Sequence[str], rows: list[tuple[int, int, int]], why: str
) -> None:
    splits = {"train": [(1, 1, 1), (2, 3, 1)], "test": rows}
    spec = dataset(tmp_path, splits, group=False, metadata=VOCABULARIES)
    found = ranked(spec, np.zeros(6), *protocols, cold="drop", ks=(1,))
    assert found.metrics == {}
    assert {found.left_out[name] for name in ("full", "sampled")} == {why}
    assert f"protocol full left out: {why}" in Report("test", found).sentences


def test_titles_count_unknown_items_and_groups_of_one_class(tmp_path: Path) -> None:
    """User 1 has both classes, 2 positives alone, 3 negatives alone; one positive is of unknown item 0."""
    test = [(1, 1, 1), (1, 2, 0), (2, 3, 1), (3, 1, 0), (1, 0, 1)]
    found = ranked(dataset(tmp_path, {"train": [(2, 1, 1)], "test": test}, metadata=VOCABULARIES), np.zeros(6), ks=(1,))
    assert described(found, "rows") == (
        "rows (5 rows, 3 positive; GAUC leaves out 1 groups without a positive and 1 groups without a negative)"
    )
    assert "1 groups without a positive left out; 1 groups hold positives alone" in described(found, "sampled")
    assert "; 1 positives of unknown items left out" in described(found, "full")


def test_rows_without_a_group_of_both_classes_have_no_gauc_and_say_so(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": [(2, 1, 1)], "test": [(1, 1, 1), (1, 2, 1), (2, 3, 0)]})
    apart = "1 groups without a positive and 1 groups without a negative"
    assert Report("test", ranked(spec, np.zeros(6), "rows", "full")).notes == (
        f"rows has no GAUC: no group has rows of both classes ({apart})",
        "full has no standard errors: it ranks a single user",
    )
