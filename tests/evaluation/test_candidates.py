"""Drawn negatives are different, unseen and uniform."""

import numpy as np

from recspec.evaluation.candidates import draw_candidates
from recspec.evaluation.interactions import Interactions


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
