"""Metrics: hand-worked numbers, edges, every order of ties by enumeration, and scikit-learn where it has the same."""

import itertools
import math

import numpy as np
import pytest
import sklearn.metrics

from recspec.base.errors import DataError, SettingsError
from recspec.metrics import measures as metrics
from recspec.metrics.measures import (
    Ranking,
    auc,
    auc_of_rows,
    group_auc,
    hit_rate,
    log_loss,
    log_loss_of_probabilities,
    log_losses,
    mean_average_precision,
    mrr,
    ndcg,
    precision,
    rank_groups,
    recall,
)

AT_K = [hit_rate, ndcg, recall, precision, mrr, mean_average_precision]


def one_group(scores: list[float], labels: list[int]) -> Ranking:
    return rank_groups(scores, labels, np.zeros(len(scores), dtype=int))


# --- AUC ---


def test_auc_counts_the_pairs_in_order() -> None:
    # positives .8 and .3, negatives .5, .3, .1: .8 beats 3; .3 beats 1 and ties 1. (3 + 1.5) / 6
    assert auc([0.8, 0.5, 0.3, 0.3, 0.1], [1, 0, 1, 0, 0]) == 4.5 / 6
    assert auc([np.inf, -np.inf, 0.0], [1, 0, 0]) == 1.0


@pytest.mark.parametrize(("scores", "labels"), [([], []), ([1.0], [1]), ([1.0, 2.0], [1, 1]), ([1.0, 2.0], [0, 0])])
def test_auc_of_one_class_or_none_is_nan(scores: list[float], labels: list[int]) -> None:
    assert math.isnan(auc(scores, labels))
    assert math.isnan(group_auc(scores, labels, [0] * len(scores)))


@pytest.mark.parametrize("decimals", [1, 2, 9])
def test_auc_equals_scikit_learn(decimals: int) -> None:
    rng = np.random.default_rng(decimals)
    labels = rng.random(2000) < 0.2
    scores = (rng.normal(size=2000) + labels).round(decimals)
    assert auc(scores, labels) == pytest.approx(sklearn.metrics.roc_auc_score(labels, scores), abs=1e-12)


# --- GAUC ---


def test_group_auc_weighs_by_rows_and_leaves_one_class_out() -> None:
    # group 7: 1 pair of 2 right (1/2, 3 rows); group 2: tie (1/2... of 1 pair, 2 rows); group 9: right (1, 4 rows);
    # groups 1 and 3 have one class. (3/2 + 2/2 + 4) / 9
    scores = [0.5, 0.9, 0.1, 0.4, 0.4, 0.8, 0.2, 0.2, 0.1, 1.0, 2.0, 3.0]
    labels = [1, 0, 0, 1, 0, 1, 0, 0, 0, 1, 1, 0]
    groups = [7, 7, 7, 2, 2, 9, 9, 9, 9, 1, 1, 3]
    assert group_auc(scores, labels, groups) == pytest.approx((1.5 + 1.0 + 4.0) / 9)


def test_numbers_of_groups_have_the_mean_and_the_standard_error_of_gauc() -> None:
    # The groups above: AUC 1/2, 1/2 and 1 of 3, 2 and 4 rows, so GAUC 13/18 and mean weight 3.
    ranking = rank_groups(
        [0.5, 0.9, 0.1, 0.4, 0.4, 0.8, 0.2, 0.2, 0.1], [1, 0, 0, 1, 0, 1, 0, 0, 0], [7, 7, 7, 2, 2, 9, 9, 9, 9]
    )
    gauc = 13 / 18
    expected = {2: gauc + 2 / 3 * (0.5 - gauc), 7: gauc + (0.5 - gauc), 9: gauc + 4 / 3 * (1 - gauc)}
    found = metrics.areas_of_groups(ranking)
    assert found.tolist() == pytest.approx([expected[2], expected[7], expected[9]])
    assert found.mean() == pytest.approx(gauc)
    assert len(metrics.areas_of_groups(rank_groups([1.0, 2.0], [1, 1], [0, 0]))) == 0


def test_the_standard_error_of_gauc_is_the_spread_of_gauc_over_drawn_groups() -> None:
    rng = np.random.default_rng(2)
    sizes = rng.integers(2, 9, 400)
    groups = np.repeat(np.arange(400), sizes)
    labels, scores = rng.random(len(groups)) < 0.4, rng.normal(size=len(groups))
    areas, weights = metrics._areas(rank_groups(scores, labels, groups))
    drawn = rng.integers(0, len(areas), (4000, len(areas)))
    spread = ((areas * weights)[drawn].sum(1) / weights[drawn].sum(1)).std()
    values = metrics.areas_of_groups(rank_groups(scores, labels, groups))
    assert values.std(ddof=1) / np.sqrt(len(values)) == pytest.approx(spread, rel=0.1)


def test_group_auc_equals_scikit_learn_group_by_group() -> None:
    rng = np.random.default_rng(1)
    groups = rng.integers(0, 50, 3000)
    labels, scores = rng.random(3000) < 0.1, rng.normal(size=3000).round(1)
    total = weight = 0.0
    for group in range(50):
        rows = groups == group
        if 0 < labels[rows].sum() < rows.sum():
            total += rows.sum() * sklearn.metrics.roc_auc_score(labels[rows], scores[rows])
            weight += rows.sum()
    assert group_auc(scores, labels, groups) == pytest.approx(total / weight, abs=1e-12)


# --- log loss ---


def test_log_loss_by_hand() -> None:
    # logit 0: log 2 either way; logit log 3: p = 3/4
    assert log_loss([0.0, math.log(3.0)], [1, 1]) == pytest.approx((math.log(2) + math.log(4 / 3)) / 2)
    assert log_losses([0.0, math.log(3.0)], [0, 0]) == pytest.approx([math.log(2), math.log(4)])
    assert math.isnan(log_loss([], []))
    assert math.isnan(log_loss_of_probabilities([], []))


def test_auc_of_rows_by_hand() -> None:
    """Positives 3 and 1, negatives 2 and 0: AUC 3/4. The positive at 3 is above all negatives, that at 1 above half."""
    found = auc_of_rows([3.0, 1.0, 2.0, 0.0], [1, 1, 0, 0])
    assert found == pytest.approx([1.25, 0.25, 0.25, 1.25])  # 3/4 + 2 (share won - 3/4)
    assert found.mean() == auc([3.0, 1.0, 2.0, 0.0], [1, 1, 0, 0])
    # DeLong's variance: S10 / 2 + S01 / 2 with the variances 1/16 of the shares (over n, as this mean has it)
    assert found.var() / 4 == pytest.approx(1 / 16 / 2 + 1 / 16 / 2)
    assert np.isnan(auc_of_rows([0.0, 1.0], [1, 1])).all()
    assert len(auc_of_rows([], [])) == 0


def test_auc_of_rows_counts_ties_one_half_and_its_error_is_that_of_drawn_samples() -> None:
    rng = np.random.default_rng(0)

    def draw(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        labels = rng.random(num_rows) < 0.3
        return np.round(rng.normal(size=num_rows) + labels, 1), labels

    scores, labels = draw(1000)
    of_rows = auc_of_rows(scores, labels)
    assert of_rows.mean() == pytest.approx(auc(scores, labels), rel=1e-12)
    drawn = np.std([auc(*draw(1000)) for _ in range(300)])
    assert of_rows.std() / 1000**0.5 == pytest.approx(drawn, rel=0.15)


def test_log_loss_is_stable_where_the_sigmoid_saturates() -> None:
    assert log_loss([1000.0], [0]) == 1000.0
    assert log_loss([-1000.0], [1]) == 1000.0
    assert log_loss([100.0], [1]) == pytest.approx(math.exp(-100), rel=1e-12)
    assert log_loss([np.inf, -np.inf], [1, 0]) == log_loss_of_probabilities([1.0, 0.0], [1, 0]) == 0.0
    assert log_loss_of_probabilities([0.0, 0.5], [1, 0]) == math.inf


def test_log_loss_equals_scikit_learn_and_its_own_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "ROWS_PER_BLOCK", 100)  # several blocks
    rng = np.random.default_rng(2)
    labels, logits = rng.random(1050) < 0.3, rng.normal(size=1050) * 3
    probabilities = 1 / (1 + np.exp(-logits))
    expected = sklearn.metrics.log_loss(labels, probabilities)
    assert log_loss(logits, labels) == pytest.approx(expected, rel=1e-12)
    assert log_loss_of_probabilities(probabilities, labels) == pytest.approx(expected, rel=1e-12)


def test_logits_given_as_probabilities_are_refused() -> None:
    with pytest.raises(DataError, match=r"2 of 3 probabilities are outside \[0, 1\], the first is 1.5 in row 1"):
        log_loss_of_probabilities([0.5, 1.5, -0.1], [1, 0, 0])


# --- ranking ---


def test_metrics_are_the_mean_over_groups_in_any_row_order_and_size() -> None:
    scores = np.array([0.1, 0.9, 0.5, 0.4, 0.3, 0.7])
    labels = np.array([1, 0, 1, 0, 0, 0])
    groups = np.array([5, 5, -3, -3, 5, 5])  # group 5: the positive last of 4; group -3: first of 2
    for order in itertools.permutations(range(6)):
        rows = np.array(order)
        ranking = rank_groups(scores[rows], labels[rows], groups[rows])
        assert ranking.num_candidates.tolist() == [2, 4]
        assert hit_rate(ranking, 1) == 0.5
        assert mrr(ranking) == pytest.approx((1 + 1 / 4) / 2)


def test_groups_and_items_may_be_far_apart_or_text() -> None:
    far = rank_groups([1.0, 0.0, 1.0], [0, 1, 1], [10**17, 10**17, -(10**17)], candidates=[1, 10**18, 5])
    named = rank_groups([1.0, 0.0, 1.0], [0, 1, 1], ["b", "b", "a"], candidates=["x", "y", "x"])
    assert far.higher.tolist() == named.higher.tolist() == [0, 1]
    # in fp32 these two ids are one number
    items = np.array([2**24 + 1, 2**24, 2**24 + 2])
    assert rank_groups([0.1, 0.2, 0.3], [1, 0, 0], [0, 0, 0], candidates=items).num_candidates.tolist() == [3]


# --- edges ---


@pytest.mark.parametrize("metric", AT_K)
def test_no_group_gives_nan(metric) -> None:
    assert math.isnan(metric(rank_groups([], [], []), 10))
    assert math.isnan(metric(one_group([1.0, 2.0], [0, 0]), 10))


@pytest.mark.parametrize("metric", [hit_rate, ndcg, mrr, mean_average_precision])
@pytest.mark.parametrize("scores", [[3.0, 2.0, 1.0], [1.0, 1.0, 1.0]])
@pytest.mark.parametrize("k", [1, 3, 10])
def test_a_group_of_positives_only_is_ranked_perfectly(metric, scores: list[float], k: int) -> None:
    assert metric(one_group(scores, [1, 1, 1]), k) == pytest.approx(1)


def test_recall_and_precision_of_positives_only() -> None:
    ranking = one_group([3.0, 2.0, 1.0], [1, 1, 1])
    assert recall(ranking, 2) == pytest.approx(2 / 3)
    assert precision(ranking, 2) == 1
    assert recall(ranking, 6) == 1
    assert precision(ranking, 6) == pytest.approx(1 / 2)


def test_capped_recall_divides_by_the_positives_that_the_list_can_hold() -> None:
    """Three positives in places 1, 3 and 4: of two places 1 / 2 holds one, recall says 1 / 3."""
    ranking = one_group([9.0, 8.0, 7.0, 6.0, 5.0], [1, 0, 1, 1, 0])
    assert [metrics.capped_recalls(ranking, k).item() for k in (1, 2, 3, 4)] == [1, 1 / 2, 2 / 3, 1]
    assert metrics.recalls(ranking, 2).item() == 1 / 3
    tied = one_group([1.0, 1.0, 1.0, 1.0], [1, 1, 1, 0])
    assert metrics.capped_recalls(tied, 2).item() == 3 / 4


def test_a_cut_off_beyond_the_list_counts_the_whole_list() -> None:
    ranking = one_group([3.0, 2.0, 1.0], [0, 0, 1])
    for metric in (hit_rate, ndcg, recall, mrr, mean_average_precision):
        assert metric(ranking, 50) == metric(ranking, 3)


def test_a_cut_off_longer_than_every_list_is_refused_when_checked() -> None:
    ranking = rank_groups([1.0, 0.0, 3.0, 2.0, 4.0], [1, 0, 1, 0, 0], [1, 1, 2, 2, 2])
    metrics.check_cut_offs(ranking, (1, 3))
    with pytest.raises(SettingsError, match=r"k = 5, 10: longer than every list .* longest has 3.* from 1 to 3"):
        metrics.check_cut_offs(ranking, (1, 5, 10))


def test_what_is_1_for_any_model_is_named_from_the_longest_list_on() -> None:
    ranking = rank_groups([1.0, 0.0, 3.0, 2.0, 4.0], [1, 0, 1, 0, 0], [1, 1, 2, 2, 2])
    assert metrics.certain(ranking, (2, 3, 12)) == ("hit_rate@3", "recall@3", "hit_rate@12", "recall@12")
    for k in (3, 12):
        assert metrics.hits(ranking, k).tolist() == metrics.recalls(ranking, k).tolist() == [1, 1]
    assert metrics.hits(ranking, 2).tolist() == [1, 1]  # but only for this order
    none = rank_groups([1.0], [0], [1])
    assert metrics.certain(none, (10,)) == ()  # nothing is ranked
    assert (none.num_groups, none.num_left_out) == (0, 1)


@pytest.mark.parametrize("metric", AT_K)
def test_a_cut_off_below_one_is_refused(metric) -> None:
    with pytest.raises(SettingsError, match="k = 0: a cut-off is 1 or more"):
        metric(one_group([1.0], [1]), 0)


def test_a_nan_score_is_refused_and_not_ranked_first() -> None:
    for metric in (auc, log_loss, log_loss_of_probabilities):
        with pytest.raises(DataError, match=r"1 of 3 scores are NaN, the first in row 2"):
            metric([0.1, 0.2, math.nan], [0, 0, 1])
    with pytest.raises(DataError, match="1 of 2 scores are NaN"):
        rank_groups([0.1, math.nan], [0, 1], [0, 0])


def test_wrong_labels_and_lengths_are_refused() -> None:
    with pytest.raises(DataError, match="1 of 2 labels are neither 0 nor 1, the first is 5 in row 1"):
        auc([0.1, 0.2], [0, 5])
    with pytest.raises(DataError, match=r"labels have shape \(1,\), expected \(2,\)"):
        auc([0.1, 0.2], [0])
    with pytest.raises(DataError, match=r"groups have shape \(3,\), expected \(2,\)"):
        rank_groups([0.1, 0.2], [0, 1], [0, 0, 1])
    with pytest.raises(DataError, match=r"candidates have shape \(1,\), expected \(2,\)"):
        rank_groups([0.1, 0.2], [0, 1], [0, 0], candidates=[1])
    with pytest.raises(DataError, match=r"scores have shape \(2, 1\)"):
        auc([[0.1], [0.2]], [0, 1])


# --- duplicates (E4) ---


def test_a_candidate_listed_twice_is_counted_once_and_its_positive_row_is_kept() -> None:
    # item 4 is listed as positive and as negative, item 6 twice as negative; without merging HR@2 would be 0
    ranking = rank_groups([0.5, 0.9, 0.9, 0.5, 0.5], [1, 0, 0, 0, 0], [0] * 5, candidates=[4, 6, 6, 4, 8])
    assert ranking.num_candidates.tolist() == [3]
    assert ranking.num_duplicates == 2
    assert metrics.mean_area(ranking) == 0.25  # of the pairs with 6 and 8: merged duplicates count once
    assert (ranking.higher.tolist(), ranking.tied.tolist(), ranking.positives.tolist()) == ([1], [2], [1])


def test_the_positive_is_kept_wherever_it_stands() -> None:
    for order in itertools.permutations(range(3)):
        labels, items = np.array([0, 1, 0])[list(order)], np.array([7, 7, 9])[list(order)]
        ranking = rank_groups([0.5, 0.5, 0.9], labels, [3, 3, 3], candidates=items)
        assert ranking.num_groups == 1
        assert ranking.num_candidates.tolist() == [2]


# --- several positives, every order of the ties ---


def expectation(scores: np.ndarray, labels: np.ndarray, metric) -> float:
    """The mean of a metric over all orders of a group's rows that sort by score."""
    orders = [
        order
        for order in itertools.permutations(range(len(scores)))
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order))
    ]
    return float(np.mean([metric(labels[list(order)]) for order in orders]))


def by_definition(k: int) -> dict:
    """Each metric of one ordered list of 0/1 labels, as a textbook writes it."""
    discount = 1 / np.log2(np.arange(2, 50))

    def average_precision(y: np.ndarray) -> float:
        found = [y[: p + 1].sum() / (p + 1) for p in range(min(k, len(y))) if y[p]]
        return sum(found) / min(k, y.sum())

    return {
        hit_rate: lambda y: float(y[:k].any()),
        recall: lambda y: y[:k].sum() / y.sum(),
        precision: lambda y: y[:k].sum() / k,
        ndcg: lambda y: (y * discount[: len(y)])[:k].sum() / discount[: min(k, y.sum())].sum(),
        mrr: lambda y: 1 / (np.argmax(y) + 1) if y[:k].any() else 0.0,
        mean_average_precision: average_precision,
    }


@pytest.mark.parametrize("seed", range(8))
def test_ties_give_the_mean_over_all_their_orders(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(3, 7))
    scores = rng.integers(0, 1 + seed % 4, size).astype(float)
    labels = rng.integers(0, 2, size)
    labels[0] = 1
    ranking = one_group(scores.tolist(), labels.tolist())
    for k in range(1, size + 2):
        for metric, definition in by_definition(k).items():
            assert metric(ranking, k) == pytest.approx(expectation(scores, labels, definition), abs=1e-12), metric


@pytest.mark.parametrize("decimals", [0, 1, 8])
def test_ndcg_equals_scikit_learn_with_its_ties(decimals: int) -> None:
    rng = np.random.default_rng(3)
    labels = rng.random((40, 30)) < 0.2
    labels[:, 0] = True
    scores = rng.normal(size=(40, 30)).round(decimals)
    ranking = rank_groups(scores.ravel(), labels.ravel(), np.repeat(np.arange(40), 30))
    for k in (1, 5, 30):
        assert ndcg(ranking, k) == pytest.approx(sklearn.metrics.ndcg_score(labels, scores, k=k), abs=1e-12)


def test_without_ties_map_mrr_and_hit_rate_equal_scikit_learn() -> None:
    rng = np.random.default_rng(4)
    scores, labels = rng.normal(size=(30, 20)), rng.random((30, 20)) < 0.2
    labels[:, 3] = True
    ranking = rank_groups(scores.ravel(), labels.ravel(), np.repeat(np.arange(30), 20))
    expected = [sklearn.metrics.average_precision_score(y, s) for y, s in zip(labels, scores, strict=True)]
    assert mean_average_precision(ranking) == pytest.approx(np.mean(expected), abs=1e-12)

    target = rng.integers(0, 20, 30)
    single = np.eye(20, dtype=int)[target]
    ranking = rank_groups(scores.ravel(), single.ravel(), np.repeat(np.arange(30), 20))
    expected_hits = sklearn.metrics.top_k_accuracy_score(target, scores, k=5, labels=np.arange(20))
    assert hit_rate(ranking, 5) == pytest.approx(expected_hits)
    assert mrr(ranking) == pytest.approx(sklearn.metrics.label_ranking_average_precision_score(single, scores))


def test_one_huge_tie_with_several_positives_is_fast_and_right() -> None:
    # P(first of 2 among n at place x) = 2 (n - x) / (n (n - 1))
    n = 5_000
    ranking = Ranking(*(np.array([v]) for v in (0, 0, n, 2, n)))
    places = np.arange(1, n + 1)
    assert mrr(ranking) == pytest.approx(float((2 * (n - places) / (n * (n - 1)) / places).sum()), rel=1e-9)


def test_a_ranking_from_counts_equals_the_one_from_rows() -> None:
    rng = np.random.default_rng(5)
    groups = rng.integers(0, 30, 400)
    scores, labels = rng.integers(0, 6, 400).astype(float), rng.random(400) < 0.2
    from_rows = rank_groups(scores, labels, groups)
    held = np.unique(groups[labels])
    rows = rng.permutation(np.flatnonzero(labels))
    same = groups[rows][:, None] == groups[None, :]
    from_counts = Ranking.of_positives(
        np.searchsorted(held, groups[rows]),
        (same & (scores[None, :] > scores[rows][:, None])).sum(1),
        (same & (scores[None, :] == scores[rows][:, None])).sum(1),
        np.array([(groups == group).sum() for group in held]),
    )
    for name in ("group", "higher", "tied", "positives", "num_candidates", "num_positives", "positives_above"):
        assert getattr(from_rows, name).tolist() == getattr(from_counts, name).tolist(), name


def test_accuracy_by_hand_and_a_logit_of_zero_counts_one_half() -> None:
    assert metrics.accuracy([2.0, -1.0, 0.5, -3.0], [1, 0, 0, 1]) == 0.5
    assert metrics.accuracy([0.0, 0.0, 1.0], [1, 0, 1]) == pytest.approx(2 / 3)
    assert math.isnan(metrics.accuracy([], []))
