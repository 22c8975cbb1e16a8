"""What a model's lists would earn, from lists that a simulated server drew, logged and saw clicked."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from recspec.base.errors import DataError, SettingsError
from recspec.inference import Predictor, RecommendRequest
from recspec.loop import (
    Event,
    Exploration,
    Exposure,
    Journal,
    LoggedListSettings,
    evaluate_journal,
)
from tests.made_up_lists import MINUTE, POLICY, START, USERS, Shop, likes, list_chances, simulated, values_of


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'journal.db'}"


@pytest.fixture(scope="module")
def ease(shop_runs: dict[str, Path]) -> Predictor:
    return Predictor.open(shop_runs["ease"], device="cpu")


@pytest.fixture(scope="module")
def ials(shop_runs: dict[str, Path]) -> Predictor:
    return Predictor.open(shop_runs["ials"], device="cpu")


def true_value(predictor: Predictor, k: int) -> float:
    """Clicks of a list that the model draws, over all lists of each user."""
    values = []
    for user in USERS:
        found = predictor.recommend(RecommendRequest((user,), k=200))[0].items
        rates = np.array([likes(user, str(each.item)) for each in found])
        lists = np.array([*permutations(range(len(found)), k)])
        scores = np.tile([each.score for each in found], (len(lists), 1))
        clicked = 1 - np.prod(1 - rates[lists], axis=1)
        values.append(float(list_chances(scores, lists, POLICY).prod(1) @ clicked))
    return float(np.mean(values))


def test_estimates_are_near_what_the_model_would_earn(url, ease, ials):
    with Journal(url) as journal:
        simulated(journal, ease, 3_000).store()
        reports = evaluate_journal({"ials": ials, "ease": ease}, journal, LoggedListSettings())
    report, truth = reports["ials"], true_value(ials, 3)
    errors, metrics = report.model.standard_errors["off_policy"], report.metrics["off_policy"]
    assert [*metrics] == ["rips@3", "sn_rips@3", "cascade_dr@3"]
    for name, value in metrics.items():
        assert abs(value - truth) < 3 * errors[name]
        assert errors[name] < 0.05
        interval = report.intervals["off_policy"][name]
        assert interval.low < value < interval.high
    assert errors["cascade_dr@3"] < errors["rips@3"]
    # the model that drew the lists has weights of 1: its estimate is what they earned
    logged = report.beside["as logged"].metrics["off_policy"]["rips@3"]
    assert reports["ease"].metrics["off_policy"]["rips@3"] == pytest.approx(logged, rel=1e-6)
    assert 0.3 < logged < 0.7
    compared = report.against["ease"]["off_policy"]["cascade_dr@3"]
    assert compared.difference == pytest.approx(
        reports["ease"].metrics["off_policy"]["cascade_dr@3"] - metrics["cascade_dr@3"]
    )
    assert report.data.path == url
    told = report.described("off_policy")
    assert told.startswith("off_policy (3,000 lists to 30 users: ")
    assert told.endswith("in effect for 3 slots, click within 30m; drawn with temperature 1, floor 0.1, pool 200)")


def test_single_choices_have_the_classic_estimates(url, ease, ials):
    with Journal(url) as journal:
        simulated(journal, ease, 2_000, k=1).store()
        report = evaluate_journal({"ials": ials}, journal, LoggedListSettings())["ials"]
    metrics, errors = report.metrics["off_policy"], report.model.standard_errors["off_policy"]
    assert [*metrics] == ["dm", "ips", "snips", "dr"]
    truth = true_value(ials, 1)
    assert all(abs(metrics[name] - truth) < 3 * errors[name] for name in ("ips", "snips", "dr"))
    assert "2,000 lists to 30 users: " in report.described("off_policy")


def test_the_first_slots_can_be_asked_alone(url, ease, ials):
    with Journal(url) as journal:
        simulated(journal, ease, 1_000).store()
        report = evaluate_journal({"": ials}, journal, LoggedListSettings(ks=(1, 2)))[""]
        metrics = report.metrics["off_policy"]
        assert [*metrics][::3] == ["rips@1", "rips@2"]
        assert metrics["cascade_dr@1"] < metrics["cascade_dr@2"]
        with pytest.raises(SettingsError, match="evaluate: k is 4; expected 1 to 3, the longest list of the journal"):
            evaluate_journal({"": ials}, journal, LoggedListSettings(ks=(1, 4)))


def test_a_model_answers_as_of_each_list(url, ease):
    # Later events of a user hide items and change scores; the logged chances are those of before.
    with Journal(url) as journal:
        shop = Shop(journal, ease)
        for number in range(24):
            user = f"n{90 + number % 4}"
            act = Event(f"v{number}", user, "view", f"p{number % 24}", None, START + number, START + number)
            journal.store([act])
            for _ in range(10):
                shop.show(user)
        shop.store()
        report = evaluate_journal({"": ease}, journal, LoggedListSettings())[""]
    logged = report.beside["as logged"].metrics["off_policy"]["rips@3"]
    assert report.metrics["off_policy"]["rips@3"] == pytest.approx(logged, rel=1e-6)
    assert report.described("off_policy").startswith("off_policy (240 lists to 4 users: 240 in effect for 3 slots")


def test_a_logged_request_is_asked_again_with_its_filter(url, ease):
    with Journal(url) as journal:
        shop = Shop(journal, ease)
        for number in range(240):
            request = ({"filter": "category == 'a'"}, {"exclude": ["p1", "p2"]}, {})[number % 3]
            shop.show(USERS[number % 30], k=1 + number % 2, **request)
        shop.store()
        report = evaluate_journal({"": ease}, journal, LoggedListSettings())[""]
        assert "(240 lists to 30 users: 240 in effect" in report.described("off_policy")
        shop.show("c1", filter="price > 0")
        lost = Exposure(**{**values_of(shop.shown[-1]), "policy": {**POLICY.to_dict(), "request": {"filter": "red"}}})
        journal.store((), [lost])
        with pytest.raises(DataError, match=r"a logged request can't be answered: .*red"):
            evaluate_journal({"": ease}, journal, LoggedListSettings())


def test_what_is_left_out_is_told(url, ease):
    with Journal(url) as journal:
        shop = simulated(journal, ease, 400)
        first, *_ = shop.shown

        def odd(name, **values):
            return Exposure(**{**values_of(first), "request_id": name, **values})

        others = [
            odd("o1", propensities=None),
            odd("o2", subject=None),
            odd("o3", policy={"name": "greedy"}, propensities=None),
            odd("o4", propensities=[1.0, 1.0, 1.0]),
            odd("o5", items=[], propensities=[]),
            odd("o6", propensities=[0.5, 0.5]),
            odd("o7", propensities=[0.5, 0.5, 1.5]),
            odd("o8", policy={**POLICY.to_dict(), "answered_by": "user"}),
            odd("o9", items=["p1", "p1", "p2"]),
        ]
        now = START + 401 + 30 * MINUTE
        open_ = odd("o10", served_at=now - 30 * MINUTE + 1)
        journal.store(shop.clicks, [*shop.shown, *others, open_])
        report = evaluate_journal({"": ease}, journal, LoggedListSettings(), at=now)[""]
        assert report.data_notes == (
            "1 answer left out: chances not known",
            "3 answers left out: damaged",
            "1 answer left out: empty",
            "1 answer left out: no user",
            "2 answers left out: nothing drawn by chance",
            "1 answer left out: request too large to log",
            "1 answer left out: window still open",
        )
        shown = Event("i", "c1", "impression", None, None, START, START, shop.shown[0].request_id)
        journal.store([replace(shown, subject=str(shop.shown[0].subject))])
        with pytest.raises(DataError, match=r"the weights leave 1\.0 of 1 list in effect; at least 200 are needed"):
            evaluate_journal({"": ease}, journal, LoggedListSettings(), at=now)


def test_a_journal_without_drawn_lists_is_refused_with_the_reasons(url, ease):
    with Journal(url) as journal:
        with pytest.raises(DataError) as told:
            evaluate_journal({"": ease}, journal, LoggedListSettings())
        expected = "holds no list that was drawn by chance and shown; serve with --journal and --explore first"
        assert str(told.value) == f"{url}: {expected}"
        shop = simulated(journal, ease, 2)
        journal.store((), [replace(each, policy={"name": "greedy"}) for each in shop.shown])
        with pytest.raises(DataError, match="drawn by chance and shown; 2 answers left out: nothing drawn by chance"):
            evaluate_journal({"": ease}, journal, LoggedListSettings())


def test_a_model_that_the_log_can_not_tell_of_is_refused(url, ease, ials):
    with Journal(url) as journal:
        shop = simulated(journal, ease, 400, policy=Exploration(0.2, 0.01))
        shop.store()
        with pytest.raises(DataError) as told:
            evaluate_journal({"new": ials, "old": ease}, journal, LoggedListSettings())
    assert f"{url}: its 400 lists can't tell" in str(told.value)
    assert "new: the weights leave " in str(told.value)
    assert "old:" not in str(told.value)


def test_lists_unlike_their_own_chances_are_refused(url, ease):
    # A cache showed some lists again and again: each was drawn once.
    with Journal(url) as journal:
        shop = simulated(journal, ease, 400)
        again = [replace(shop.shown[0], request_id=f"again{number}") for number in range(150)]
        journal.store(shop.clicks, [*shop.shown, *again])
        with pytest.raises(DataError) as told:
            evaluate_journal({"": ease}, journal, LoggedListSettings())
    assert "550 lists by this very model, items stand at their slots more or less often than its chances" in str(
        told.value
    )


def test_lists_whose_clicks_a_model_has_learned_are_left_out(url, ease):
    with Journal(url) as journal:
        shop = simulated(journal, ease, 600)
        journal.store(shop.clicks, [replace(each, history_seq=place) for place, each in enumerate(shop.shown)])
        learned = copy(ease)
        learned.spec = replace(ease.spec, metadata={**ease.spec.metadata, "trained_to": 300})
        report = evaluate_journal({"": learned}, journal, LoggedListSettings())[""]
    assert report.data_notes == ("300 answers left out: a model has learned from its clicks",)


def test_how_the_model_draws_is_as_logged_or_asked(url, ease):
    with Journal(url) as journal:
        shop = simulated(journal, ease, 1_000)
        journal.store(shop.clicks, [replace(each, policy={"name": "ours"}) for each in shop.shown])
        with pytest.raises(SettingsError, match="another system drew the newest list; say how the model would draw"):
            evaluate_journal({"": ease}, journal, LoggedListSettings())
        own = LoggedListSettings(explore_temperature=1.0, explore_floor=0.1)
        same = evaluate_journal({"": ease}, journal, own)[""].metrics["off_policy"]
        colder = LoggedListSettings(explore_temperature=0.8, explore_floor=0.1)
        assert evaluate_journal({"": ease}, journal, colder)[""].metrics["off_policy"] != same
