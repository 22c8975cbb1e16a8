"""Off-policy estimates: the case by hand, their intervals, and what they refuse."""

import math
import sys
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from recspec.loop.exploration import Exploration
from recspec.loop.off_policy import (
    OF_CHOICES,
    OF_LISTS,
    LoggedLists,
    counts_p,
    effective_size,
    estimate,
    ips,
    refusals,
    snips,
)
from tests.made_up_lists import list_chances

CHANCES = np.array([[0.5, 0.4, 0.25], [0.2, 0.5, 0.5]])
TARGET = np.array([[0.6, 0.3, 0.5], [0.4, 0.25, 0.4]])
REWARDS = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
HAND = LoggedLists(
    CHANCES,
    TARGET,
    REWARDS,
    np.arange(2),
    np.tile([0.3, 0.2, 0.1], (2, 1)),
    np.array([[0.35, 0.25, 0.15], [0.25, 0.2, 0.1]]),
)


def value(ratios):
    return estimate(ratios, np.arange(2)).value


def choices(weights, rewards, users=None, chances=None):
    """Single choices whose weights are given."""
    chances = np.full(len(weights), 0.1) if chances is None else chances
    users = np.arange(len(weights)) if users is None else users
    return LoggedLists(chances[:, None], (chances * weights)[:, None], np.asarray(rewards, float)[:, None], users)


def test_the_case_by_hand():
    # Weights 1.2, .9, 1.8 and 2, 1, .8; obp 0.4.1 gives the same for all but cascade-DR.
    assert value(ips(HAND)) == pytest.approx(2.2, abs=1e-12)
    assert value(OF_LISTS["rips"](HAND)) == pytest.approx(2.0, abs=1e-12)
    assert value(OF_LISTS["sn_rips"](HAND)) == pytest.approx(1.593623, abs=5e-7)
    assert value(OF_LISTS["cascade_dr"](HAND)) == pytest.approx(1.9675, abs=1e-12)
    # the whole list: 2 * 1.8 and 1 * .8 over 1.8 + .8
    assert value(snips(HAND)) == pytest.approx(4.4 / 2.6, abs=1e-12)


def test_of_single_choices_the_estimators_of_lists_are_the_classic_ones():
    one, users = HAND.first(1), np.arange(2)
    assert value(OF_LISTS["rips"](one)) == value(ips(one)) == pytest.approx(0.6)  # (1.2 * 1 + 2 * 0) / 2
    assert value(OF_LISTS["sn_rips"](one)) == value(snips(one)) == pytest.approx(1.2 / 3.2)
    assert estimate(OF_CHOICES["dm"](one), users).value == pytest.approx(0.3)  # (.35 + .25) / 2
    # .3 + (1.2 * (1 - .3) + 2 * (0 - .3)) / 2
    assert estimate(OF_CHOICES["dr"](one), users).value == pytest.approx(0.42)


def test_the_error_of_snips_is_that_of_the_formula_and_grows_with_clusters():
    rng = np.random.default_rng(3)
    weights, rewards = rng.gamma(2, 0.5, 400), rng.integers(0, 2, 400)
    found = estimate(snips(choices(weights, rewards)), np.arange(400))
    # sqrt(sum w^2 (r - V)^2) / sum w, for a sample
    by_hand = math.sqrt((weights**2 * (rewards - found.value) ** 2).sum()) / weights.sum() * math.sqrt(400 / 399)
    assert found.standard_error == pytest.approx(by_hand, rel=1e-12)
    assert found.values.mean() == pytest.approx(found.value)
    twice = choices(np.repeat(weights, 2), np.repeat(rewards, 2), np.repeat(np.arange(400), 2))
    clustered = estimate(snips(twice), twice.users)
    assert clustered.value == pytest.approx(found.value)
    assert clustered.standard_error == pytest.approx(found.standard_error, rel=1e-12)


def test_intervals_of_skewed_values_reach_further_up_and_those_of_few_users_are_wide_or_unknown():
    rng = np.random.default_rng(4)
    rare = estimate(ips(choices(np.ones(500), rng.random(500) < 0.01)), np.arange(500))
    assert rare.high - rare.value > 1.3 * (rare.value - rare.low)
    assert rare.low > 0
    same = estimate(ips(choices(np.ones(5), np.ones(5))), np.arange(5))
    assert (same.low, same.value, same.high) == (1, 1, 1)
    one = estimate(ips(choices(np.ones(5), np.ones(5))), np.zeros(5, int))
    assert one.value == 1
    assert all(map(math.isnan, (one.standard_error, one.low, one.high)))


ITEMS, SLOTS = 6, 3
LISTS = np.array([*permutations(range(ITEMS), SLOTS)])
RATES = np.array([0.05, 0.3, 0.1, 0.2, 0.02, 0.15])


def cascade_rates(users):
    """(U, lists, K) chance of a click at each slot: people of other appetite read on until they click."""
    own = RATES[LISTS] * users[:, None, None]
    above = np.concatenate([np.ones((*own.shape[:2], 1)), np.cumprod(1 - own, axis=2)[:, :, :-1]], axis=2)
    return own * above


@pytest.mark.parametrize("lists_of_a_user", [1, 4])
def test_intervals_cover_the_truth_as_often_as_they_say(lists_of_a_user):
    policies = Exploration(1.0, 0.1), Exploration(0.7, 0.1)
    scores = np.array([[0.0, 0.5, 1.0, 0.2, -0.5, 0.1], [0.0, 1.0, 0.3, 0.8, -0.5, 0.1]])  # the target's are better
    logged, target = (
        list_chances(np.tile(own, (len(LISTS), 1)), LISTS, policy) for own, policy in zip(scores, policies, strict=True)
    )
    appetites = np.array([0.5, 1.5])
    truth = float((target.prod(1) * cascade_rates(appetites).sum(2)).sum(1).mean())
    # of each item at each slot: q is RATES without regard to who reads on, so it is too high below slot 1
    left = np.ones((len(LISTS), ITEMS), bool)
    expected = np.zeros((len(LISTS), SLOTS))
    for slot in range(SLOTS):
        from_all = np.exp(scores[1] / scores[1].std() / policies[1].temperature) * left
        chances = 0.9 * from_all / from_all.sum(1, keepdims=True) + 0.1 * left / left.sum(1, keepdims=True)
        expected[:, slot] = chances @ RATES
        left[np.arange(len(LISTS)), LISTS[:, slot]] = False
    rng, num_lists, repeats = np.random.default_rng(7), 1200, 500
    rates, covered = cascade_rates(appetites), dict.fromkeys(OF_LISTS, 0)
    users = np.repeat(np.arange(num_lists // lists_of_a_user), lists_of_a_user)
    for _ in range(repeats):
        kind = rng.integers(0, 2, num_lists // lists_of_a_user)[users]
        which = np.searchsorted(logged.prod(1).cumsum(), rng.random(num_lists), side="right").clip(max=len(LISTS) - 1)
        # a click ends the list, so at most one slot has one
        passed = rates[kind, which].cumsum(1)
        draw = rng.random((num_lists, 1))
        clicks = (draw < passed) & (draw >= passed - rates[kind, which])
        lists = LoggedLists(
            logged[which], target[which], clicks.astype(float), users, RATES[LISTS[which]], expected[which]
        )
        for name, of in OF_LISTS.items():
            found = estimate(of(lists), users)
            covered[name] += found.low <= truth <= found.high
    shares = {name: count / repeats for name, count in covered.items()}
    assert all(0.93 <= share <= 0.97 for share in shares.values()), shares


def test_good_logs_are_not_refused():
    rng = np.random.default_rng(0)
    which = rng.integers(0, 2, 2000)
    assert refusals(choices(np.array([0.5, 1.5])[which], rng.integers(0, 2, 2000))) == []


def test_few_lists_in_effect_are_refused_with_the_slots_that_would_do():
    rng = np.random.default_rng(1)
    ratios = np.stack([rng.choice([0.9, 1.1], 1000), rng.choice([1.99, 0.01], 1000), rng.choice([0.01, 5.0], 1000)], 1)
    chances = np.full((1000, 3), 0.1)
    lists = LoggedLists(chances, chances * ratios, np.zeros((1000, 3)), np.arange(1000))
    few = LoggedLists(*(each[:300] for each in (lists.chances, lists.target, lists.rewards, lists.users)))
    told = refusals(few)
    sizes = [effective_size(each) for each in few.weights.T]
    assert f"the weights leave {sizes[2]:.1f} of 300 lists in effect; at least 200 are needed" in told[0]
    assert f"the first 1 slot would have {sizes[0]:.0f} (--k 1)" in told[0]
    assert "--k" not in refusals(choices(np.ones(10), np.zeros(10)))[0]
    assert effective_size(np.zeros(3)) == 0


def test_one_list_with_much_of_the_weight_is_refused():
    weights = np.ones(1000)
    weights[5] = 100.0
    told = [each for each in refusals(choices(weights, np.zeros(1000))) if "one list" in each]
    assert told == ["one list has 9.1% of all weight; at most 5% may have"]  # 100 / 1,099


def test_weights_that_do_not_average_one_are_refused():
    rng = np.random.default_rng(2)
    told = refusals(choices(rng.choice([1.0, 1.4], 2000), np.zeros(2000)))
    assert len(told) == 1
    assert told[0].startswith("weights have the mean 1.1984, 44.4 standard errors from 1")
    assert "the logged chances are not those of the shown lists, or the target policy shows others" in told[0]
    assert "inf standard errors from 1" in refusals(choices(np.full(500, 2.0), np.zeros(500)))[0]


def test_a_target_that_shows_what_the_log_could_not_is_refused():
    lists = LoggedLists(*(np.full((1000, 2), each) for each in (0.5, 0.5, 0.0)), np.arange(1000))
    lists.target[:, 1] = np.where(np.arange(1000) % 10 < 4, 0.0, 0.5)
    told = refusals(lists)
    expected = "slot 2: 40.0% of the target policy's chance falls on items that the log could not show"
    assert told[0] == f"{expected}; at most 1% may"
    assert not any("slot 1:" in each for each in told)


def test_counts_are_tested_against_their_chances():
    rng = np.random.default_rng(8)
    due = np.array([[400.0, 300.0], [500.0, 600.0], [98.0, 98.0], [1.0, 1.0], [1.0, 1.0]])
    fair = np.stack([rng.multinomial(1000, each / 1000) for each in due.T], axis=1).astype(float)
    assert counts_p(fair, due) > 0.01
    # (10^2 / 400 + 10^2 / 500) + 0 with 2 degrees of freedom each: exp(-.225) (1 + .225)
    near = due + np.array([[10.0, 0], [-10, 0], [0, 0], [0, 0], [0, 0]])
    assert counts_p(near, due) == pytest.approx(math.exp(-0.225) * 1.225, rel=1e-12)
    assert counts_p(due + np.array([[90.0], [-90], [0], [0], [0]]), due) < 1e-6
    assert counts_p(np.array([[1.0], [9.0]]), np.array([[0.0], [10.0]])) == 0
    assert counts_p(np.array([[3.0], [1.0]]), np.array([[2.0], [2.0]])) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("campaign", "shown", "other", "by_ips", "by_snips", "size", "largest", "mean"),
    [
        ("all", 0.0038, 0.0042, 0.004553, 0.004776, 1639.5, 19.60, 0.9533),
        ("men", 0.0046, 0.0069, 0.004534, 0.004604, 2467.4, 10.69, 0.9847),
        ("women", 0.0046, 0.0046, 0.006813, 0.006811, 1954.3, 12.56, 1.0004),
    ],
)
def test_the_open_bandit_sample(real_data, monkeypatch, campaign, shown, other, by_ips, by_snips, size, largest, mean):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "stress"))
    monkeypatch.delitem(sys.modules, "off_policy", raising=False)
    import off_policy

    folder = real_data("obp")  # of obp 0.4.1; see the benchmark
    log, thompson = (off_policy.read_log(folder, policy, campaign) for policy in ("random", "bts"))
    lists = off_policy.choices(log, off_policy.thompson_chances(folder, campaign))
    weights = lists.weights[:, 0]
    assert (round(log.click.mean(), 4), round(thompson.click.mean(), 4)) == (shown, other)
    found = [estimate(of(lists), lists.users).value for of in (ips, snips)]
    assert [round(each, 6) for each in found] == [by_ips, by_snips]
    assert (round(effective_size(weights), 1), round(weights.max(), 2), round(weights.mean(), 4)) == (
        size,
        largest,
        mean,
    )
    assert refusals(lists) == []
    num_items = int(thompson.item.max()) + 1
    back = off_policy.choices(thompson, np.full((num_items, 3), 1 / num_items))
    # of women one row was logged with a chance of 1e-6, and the mean of the weights does not tell
    assert (effective_size(back.weights[:, 0]) < 3) == bool(refusals(back)) == (campaign == "women")
