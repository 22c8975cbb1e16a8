"""Team draft: lists by hand, fairness, and what clicks say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recspec.loop.interleaving import NEITHER, interleave, preference


class Coins(np.random.Generator):
    """A generator whose coins are given."""

    def __init__(self, *coins: int) -> None:
        super().__init__(np.random.PCG64(0))
        self.coins = [*coins]

    def integers(self, *_: object, **__: object) -> int:  # type: ignore[override]
        return self.coins.pop(0)


def test_each_picks_its_best_unused_item_in_turn() -> None:
    """Round 1: A picks a, B picks b. Round 2: B picks c, A picks d, as b and c are taken."""
    drawn = interleave(["a", "b", "c", "d"], ["b", "a", "c", "e"], Coins(0, 1))
    assert drawn == (["a", "b", "c", "d"], [0, 1, 1, 0])


def test_the_last_place_of_an_odd_list_goes_to_who_wins_the_coin() -> None:
    lists = ["a", "b", "c"], ["x", "y", "z"]
    assert interleave(*lists, Coins(0, 0), 3) == (["a", "x", "b"], [0, 1, 0])
    assert interleave(*lists, Coins(0, 1), 3) == (["a", "x", "y"], [0, 1, 1])
    assert interleave(*lists, Coins(), 0) == ([], [])


def test_items_without_an_opponent_belong_to_neither() -> None:
    assert interleave(["a", "b", "c"], ["x"], Coins(1, 0)) == (["x", "a", "b"], [1, 0, NEITHER])
    assert interleave(["a", "b", "c"], ["x"], Coins(1, 1), 9) == (["x", "a", "b", "c"], [1, 0, NEITHER, NEITHER])
    assert interleave(["a", "b"], [], Coins(0)) == (["a", "b"], [NEITHER, NEITHER])
    assert interleave(["a"], ["a"], Coins(1)) == (["a"], [NEITHER])
    assert interleave([], [], Coins(0)) == ([], [])


ITEMS = st.lists(st.sampled_from("abcdefgh"), max_size=8)


@given(first=ITEMS, second=ITEMS, k=st.integers(0, 10), seed=st.integers(0, 5))
def test_a_list_holds_no_item_twice_and_as_many_of_either_team(
    first: list[str], second: list[str], k: int, seed: int
) -> None:
    items, teams = interleave(first, second, np.random.default_rng(seed), k)
    assert len(items) == len({*items}) == len(teams) == min(k, len({*first, *second}))
    assert abs(teams.count(0) - teams.count(1)) <= 1
    if len(items) % 2 == 0 and NEITHER not in teams:
        assert teams.count(0) == teams.count(1)


def test_equal_lists_give_either_team_each_place_as_often() -> None:
    rng, same = np.random.default_rng(7), ["a", "b", "c", "d"]
    teams = np.array([interleave(same, same, rng)[1] for _ in range(4_000)])
    assert np.abs(teams.mean(axis=0) - 0.5).max() < 0.03


def test_preferences_are_of_users_with_a_click() -> None:
    found = preference(np.array([[3, 1], [0, 0], [0, 2], [1, 1], [0, 5]]))
    assert found.shares.tolist() == [-0.5, 1, 0, 1]
    assert (found.first, found.second, found.tied) == (1, 2, 1)
    assert found.p_sign == 1
    assert preference(np.zeros((3, 2), int)).p_sign == 1


def test_a_better_model_is_preferred() -> None:
    """Users click items of the second model twice as often."""
    rng = np.random.default_rng(8)
    clicks = np.zeros((1_000, 2), int)
    for user in range(1_000):
        _, teams = interleave([f"a{n}" for n in range(6)], [f"b{n}" for n in range(6)], rng)
        for team in teams:
            clicks[user, team] += rng.random() < (0.1 if team == 0 else 0.2)
    found = preference(clicks)
    assert found.second > found.first
    assert found.p_sign < 1e-6
    assert found.shares.mean() == pytest.approx(0.3, abs=0.1)
