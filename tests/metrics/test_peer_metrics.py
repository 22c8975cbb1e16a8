"""Small inputs on which nine libraries were run, beside this one, and the table of their values in the documents.

The peers' numbers are what the libraries printed on 2026-11-27 (Python 3.11; LensKit: 3.13). None is imported here.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from recspec.base.errors import DataError
from recspec.metrics import measures as metrics
from recspec.metrics.measures import Ranking
from tests.documented import ROOT

Values = tuple[float, float, float]
NAN = math.nan
K = 3

BOTH = [[0, 1, 0, 1, 1], [1, 0, 0, 0, 0]]
LISTS: Mapping[str, list[list[int]]] = {"A": BOTH, "B": [*BOTH, [0, 0, 0, 0, 0]], "C": [[0, 1]]}
"""Labels of each user's list, best score first: two users; a third without a positive; a list shorter than k."""

NAMES = ("ndcg", "map", "precision", "recall")
OURS: Mapping[str, Callable[[Ranking, int], float]] = dict(
    zip(NAMES, (metrics.ndcg, metrics.mean_average_precision, metrics.precision, metrics.recall), strict=True)
)
HERE: Mapping[str, Values] = {
    "ndcg": (0.6480, 0.6480, 0.6309),
    "map": (0.5833, 0.5833, 0.5),
    "precision": (0.3333, 0.3333, 0.3333),
    "recall": (0.6667, 0.6667, 1.0),
}

PEERS: Mapping[str, Mapping[str, Values]] = {
    "RecBole 1.2.1": {
        "ndcg": (0.6480, 0.4320, 0.6309),
        "map": (0.5833, 0.3889, 0.5),
        "precision": (0.3333, 0.2222, 0.3333),
        "recall": (0.6667, NAN, 1.0),
    },
    "RecTools 0.19.0": {
        "ndcg": (0.3827, 0.3827, 0.2961),
        "map": (0.5833, 0.5833, 0.5),
        "precision": (0.3333, 0.3333, 0.3333),
        "recall": (0.6667, 0.6667, 1.0),
    },
    "LensKit 2026.4.0": {
        "ndcg": (0.6900, 0.6900, 1.0),
        "precision": (0.3333, 0.2222, 0.5),
        "recall": (0.6667, 0.6667, 1.0),
    },
    "recommenders 1.2.1": HERE,
    "implicit 0.7.3": {"ndcg": (0.6480, 0.6480, 0.6309), "map": (0.5833, 0.5833, 0.5), "precision": (0.5, 0.5, 1.0)},
    "ranx 0.3.21": {
        "ndcg": (0.6480, 0.4320, 0.6309),
        "map": (0.5833, 0.3889, 0.5),
        "precision": (0.3333, 0.2222, 0.3333),
        "recall": (0.6667, 0.4444, 1.0),
    },
    "torchmetrics 1.9.0": {
        "ndcg": (0.6480, 0.4320, 0.6309),
        "map": (0.7500, 0.5000, 0.5),
        "precision": (0.3333, 0.2222, 0.3333),
        "recall": (0.6667, 0.4444, 1.0),
    },
    "LightGBM 4.7.0": {"ndcg": (0.6480, 0.7654, 0.6309), "map": (0.5833, 0.7222, 0.5)},
    "TF-Ranking 0.5.5": {
        "ndcg": (0.6480, 0.4320, 0.6309),
        "map": (0.5833, 0.3889, 0.5),
        "precision": (0.3333, 0.2222, 0.5),
        "recall": (0.6667, 0.4444, 1.0),
    },
}

TEXT = (ROOT / "docs" / "explanation" / "metrics.md").read_text(encoding="utf-8")


def ranking(lists: list[list[int]]) -> Ranking:
    labels = [label for each in lists for label in each]
    scores = [9.0 - place for each in lists for place in range(len(each))]
    groups = [user for user, each in enumerate(lists) for _ in each]
    return metrics.rank_groups(scores, labels, groups)


def line(library: str, found: Mapping[str, Values]) -> str:
    """A row of the table in the documents."""
    cells = (
        ", ".join(f"{value:.4f}".removeprefix("0") for value in found[name]) if name in found else "none"
        for name in NAMES
    )
    return f"| {library} | {' | '.join(cells)} |"


@pytest.mark.parametrize("name", NAMES)
def test_our_values_are_those_worked_by_hand(name: str) -> None:
    found = [OURS[name](ranking(lists), K) for lists in LISTS.values()]
    assert found == pytest.approx(HERE[name], abs=5e-5)
    second, third = 1 / math.log2(3), 0.5
    by_hand = {
        "ndcg": ((second / (1 + second + third)) + 1) / 2,
        "map": (1 / 2 / 3 + 1) / 2,
        "precision": 1 / 3,
        "recall": (1 / 3 + 1) / 2,
    }
    assert found[0] == pytest.approx(by_hand[name])


@pytest.mark.parametrize("library", PEERS)
def test_the_documents_hold_the_values_that_peers_gave(library: str) -> None:
    assert line(library, PEERS[library]) in TEXT
    assert line("recspec", HERE) in TEXT


def test_each_difference_follows_from_a_convention() -> None:
    """The peers' values of A, from the divisors that the documents name."""
    second, third = 1 / math.log2(3), 0.5
    divided_by_k_hits = (second + 1) / 2 / (1 + second + third)
    assert PEERS["RecTools 0.19.0"]["ndcg"][0] == pytest.approx(divided_by_k_hits, abs=5e-5)
    discount_from_three_on = (1 / (1 + 1 + second) + 1) / 2
    assert PEERS["LensKit 2026.4.0"]["ndcg"][0] == pytest.approx(discount_from_three_on, abs=5e-5)
    hits_by_reachable_hits = (1 + 1) / (3 + 1)
    assert PEERS["implicit 0.7.3"]["precision"][0] == hits_by_reachable_hits
    divided_by_hits_found = (1 / 2 + 1) / 2
    assert PEERS["torchmetrics 1.9.0"]["map"][0] == divided_by_hits_found
    nobody_counts_one = (2 * HERE["ndcg"][0] + 1) / 3
    assert PEERS["LightGBM 4.7.0"]["ndcg"][1] == pytest.approx(nobody_counts_one, abs=1e-4)
    nobody_counts_zero = 2 * HERE["ndcg"][0] / 3
    assert PEERS["ranx 0.3.21"]["ndcg"][1] == pytest.approx(nobody_counts_zero, abs=1e-4)


@pytest.mark.parametrize("labels", [[1, 0, 0, 0], [0, 0, 0, 1]])
def test_ties_do_not_depend_on_the_order_of_rows(labels: list[int]) -> None:
    """NDCG@1 of four equal scores: ranx, recommenders and LightGBM 1 or 0, torchmetrics and this library 1/4."""
    found = metrics.rank_groups([0.5] * 4, labels, [0] * 4)
    assert metrics.ndcg(found, 1) == metrics.hit_rate(found, 1) == 0.25
    assert metrics.mrr(found) == pytest.approx(np.mean([1, 1 / 2, 1 / 3, 1 / 4]))  # torchmetrics: 1/3 and 1/2
    assert "| .25, .25 |" in TEXT


def test_graded_labels_are_refused() -> None:
    """Labels 2, 0, 1: linear gains .6199 (torchmetrics), exponential .5869 (LightGBM, TF-Ranking)."""
    with pytest.raises(DataError, match="labels are neither 0 nor 1"):
        metrics.rank_groups([0.1, 0.9, 0.5], [2, 0, 1], [0, 0, 0])
    assert all(value in TEXT for value in (".6199", ".5869", ".6934", ".7540"))


def test_auc_and_gauc() -> None:
    """AUC with a tie: all .875. tf.keras.metrics.AUC gives .5 for small probabilities in perfect order."""
    assert metrics.auc([0.1, 0.4, 0.4, 0.8], [0, 0, 1, 1]) == 0.875
    assert metrics.auc([1e-5, 2e-5, 3e-5, 4e-5], [0, 0, 1, 1]) == 1.0
    scores, labels, groups = [0.9, 0.1, 0.5, 0.2, 0.8, 0.7, 0.3], [1, 0, 0, 1, 0, 1, 1], [0, 0, 0, 1, 1, 2, 2]
    assert metrics.group_auc(scores, labels, groups) == pytest.approx((3 * 1 + 2 * 0) / 5)
    assert "is .6 in recspec, .5 in RecBole and .3333 in\ntorchmetrics" in TEXT


def test_an_empty_list_does_not_change_a_mean() -> None:
    assert metrics.ndcg(ranking([*BOTH, []]), K) == metrics.ndcg(ranking(BOTH), K)
    assert math.isnan(metrics.ndcg(ranking([[0, 0]]), K))
