"""Drawn lists: their order, their chances, and those of another policy for them."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recspec.base.errors import DataError, SettingsError
from recspec.loop import Exploration, explore, generator, slot_chances
from tests.made_up_lists import list_chances

SCORES = np.array([3.0, 1.0, 2.0])  # mean 2, standard deviation sqrt(2 / 3)


def drawn(scores, k, policy, seed="a", ids=None):
    ids = range(len(scores)) if ids is None else ids
    own = policy.temperature, policy.floor, generator(seed)
    return explore(scores, ids, k, *own, pool=policy.pool, last=policy.last)


def test_chances_of_a_list_worked_out_by_hand():
    # T = 1 / sqrt(2 / 3): s / T is 3, 1, 2 in units of the scores. Slot 1: e^2 of e^3 + e^1 + e^2; slot 2: e^3 of
    # e^3 + e^1; slot 3: what is left. With a floor of .1: .9 p + .1 / |R_k|.
    policy = Exploration(temperature=float(1 / np.sqrt(2 / 3)), floor=0.1)
    found = list_chances(SCORES[None], np.array([[2, 0, 1]]), policy)[0]
    assert found == pytest.approx([0.9 * 0.24472847 + 0.1 / 3, 0.9 * 0.88079708 + 0.05, 1.0], abs=1e-8)


@pytest.mark.parametrize(("floor", "last"), [(0.0, None), (0.2, None), (0.2, 1), (1.0, 2)])
def test_chances_of_all_lists_sum_to_one(floor, last):
    scores = np.array([0.3, -1.0, 2.0, 0.4])
    policy = Exploration(temperature=0.7, floor=floor, last=last)
    lists = np.array([*permutations(range(4), 3)])
    chances = list_chances(np.tile(scores, (len(lists), 1)), lists, policy).prod(1)
    assert chances.sum() == pytest.approx(1.0, abs=1e-12)


@settings(max_examples=200, deadline=None)
@given(
    scores=st.lists(st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=12),
    k=st.integers(1, 14),
    temperature=st.sampled_from([0.001, 0.3, 1.0, 1000.0]),
    floor=st.sampled_from([0.0, 0.05, 1.0]),
    last=st.none() | st.integers(1, 5),
    seed=st.text(max_size=3),
)
def test_a_drawn_list_has_the_chances_that_its_policy_gives_it(scores, k, temperature, floor, last, seed):
    policy = Exploration(temperature, floor, last=last)
    places, chances = drawn(scores, k, policy, seed.encode("utf-8", "replace").decode())
    assert len({*places.tolist()}) == len(places) == min(k, len(scores))
    assert (chances > 0).all() or floor == 0
    again = list_chances(np.array([scores]), places[None], policy)[0]
    np.testing.assert_allclose(chances, again, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("last", [None, 1])
def test_lists_are_drawn_as_often_as_their_chances_say(last):
    policy = Exploration(temperature=0.8, floor=0.3, last=last)
    rng, num_draws, counts = generator("frequencies"), 20_000, dict[tuple[int, ...], int]()
    for _ in range(num_draws):
        places, _ = explore(SCORES, [7, 8, 9], 2, policy.temperature, policy.floor, rng, last=last)
        counts[tuple(places.tolist())] = counts.get(tuple(places.tolist()), 0) + 1
    lists = np.array([*permutations(range(3), 2)])
    chances = list_chances(np.tile(SCORES, (6, 1)), lists, policy).prod(1)
    expected, observed = num_draws * chances, np.array([counts.get(tuple(each), 0) for each in lists.tolist()])
    assert (observed[chances == 0] == 0).all()
    likely = chances > 0
    chi2 = ((observed - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi2 < 20.5  # 99.9 % quantile for 5 degrees of freedom


def test_the_same_seed_draws_the_same_list_in_whatever_order_the_candidates_stand():
    rng = np.random.default_rng(5)
    scores, ids = rng.integers(0, 20, 60) / 7, np.array([f"sku-{number}" for number in range(60)])
    policy, order = Exploration(pool=10), rng.permutation(60)
    first, chances = drawn(scores, 5, policy, ids=ids)
    second, again = drawn(scores[order], 5, policy, ids=ids[order])
    assert ids[first].tolist() == ids[order][second].tolist()
    assert chances.tolist() == again.tolist()
    assert ids[drawn(scores, 5, policy, seed="b", ids=ids)[0]].tolist() != ids[first].tolist()


def test_only_the_pool_is_shown_and_a_score_that_is_not_finite_is_no_candidate():
    scores = np.array([5.0, 4.0, 3.0, -np.inf, np.nan, 2.0])
    shown = {place for seed in range(50) for place in drawn(scores, 2, Exploration(1e3, 1.0, pool=3), str(seed))[0]}
    assert shown == {0, 1, 2}
    assert sorted(drawn(scores, 9, Exploration())[0].tolist()) == [0, 1, 2, 5]
    places, chances = drawn(np.array([np.nan]), 3, Exploration())
    assert places.tolist() == chances.tolist() == []


def test_with_few_last_slots_the_best_items_stand_above():
    scores = np.arange(20.0)
    for seed in range(20):
        places, chances = drawn(scores, 5, Exploration(2.0, 0.1, last=2), str(seed))
        assert places[:3].tolist() == [19, 18, 17]
        assert [each < 1 for each in chances] == [False, False, False, True, True]
    assert drawn(scores, 5, Exploration(last=9))[1][0] < 1


def test_an_item_outside_the_pool_has_no_chance_and_takes_none_from_others():
    policy = Exploration(temperature=1.0, floor=0.0)
    pools = np.array([[2.0, 1.0, -np.inf], [2.0, 1.0, 0.0]])
    chances = [each.sum(1).tolist() for each in slot_chances(pools, np.array([[-1, 0, 1], [0, 1, 2]]), policy)]
    assert np.allclose(chances, 1)
    assert list_chances(pools, np.array([[-1, 0, 1], [-1, 0, 1]]), policy)[:, 0].tolist() == [0, 0]
    empty = next(slot_chances(np.full((1, 2), -np.inf), np.array([[-1]]), policy))
    assert empty.tolist() == [[0, 0]]


def test_policies_survive_the_journal_and_wrong_ones_are_refused():
    policy = Exploration(0.25, 0.1, 50, 3)
    assert Exploration.of(policy.to_dict()) == policy
    with pytest.raises(DataError, match="policy: found 'greedy'; expected 'plackett-luce'"):
        Exploration.of({"name": "greedy"})
    with pytest.raises(DataError, match="can't be read"):
        Exploration.of({"name": "plackett-luce", "temperature": "warm"})
    with pytest.raises(SettingsError) as told:
        Exploration(0.0, 2.0, 0, 0)
    for said in (
        "temperature: found 0.0; expected 0.001 to 1,000",
        "floor: found 2.0; expected 0 to 1",
        "pool: found 0; expected 1 to 10,000 items",
        "last: found 0; expected at least 1 slot",
    ):
        assert said in str(told.value)
