"""Methods over seeds: means, deviations, tests and groups, by hand."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from recspec.evaluation import SeedValues, compare_methods, find_runs, holm, methods_of


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], []),
        ([0.04], [0.04]),
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.5, 0.6], [1.0, 1.0]),
        ([0.02, 0.02], [0.04, 0.04]),
    ],
)
def test_holm_corrects_known_p_values(given: list[float], wanted: list[float]) -> None:
    assert holm(given) == pytest.approx(wanted)


def test_a_test_that_could_not_be_made_does_not_count() -> None:
    first, missing, last = holm([0.01, math.nan, 0.04])
    assert (first, last) == pytest.approx((0.02, 0.04))
    assert math.isnan(missing)


def test_mean_and_deviation_are_over_seeds() -> None:
    values = SeedValues((0.1, 0.2, 0.3))
    assert (values.mean, values.deviation) == pytest.approx((0.2, 0.1))
    alone = SeedValues((0.4,))
    assert alone.mean == 0.4
    assert math.isnan(alone.deviation)


def test_the_test_counts_users_and_seeds() -> None:
    """Differences of users 1, 0, 1, 0 have variance 1/3; two seeds 0.2 apart have 0.02. 1/12 + 0.01 = 0.30551^2."""
    ours = SeedValues((0.9, 1.1), np.array([2.0, 1.0, 1.0, 0.0]), spread=0.02)
    theirs = SeedValues((0.5,), np.array([1.0, 1.0, 0.0, 0.0]))
    (found,) = compare_methods({"a": {"full/ndcg@10": ours}, "b": {"full/ndcg@10": theirs}})
    assert (found.method, found.other, found.difference) == ("a", "b", 0.5)
    assert found.standard_error == pytest.approx(0.305505)
    assert found.p_value == found.p_holm == pytest.approx(0.184735, abs=5e-5)  # t with 3.6074 degrees, by scipy
    assert found.better == ""


def test_less_log_loss_is_better_and_equal_values_are_not() -> None:
    users = np.linspace(0.0, 1.0, 50)
    low, high = SeedValues((0.5,), users), SeedValues((0.6,), users + 0.1)
    (found,) = compare_methods({"low": {"rows/log_loss": low}, "high": {"rows/log_loss": high}})
    assert found.better == "low"
    (equal,) = compare_methods({"a": {"rows/log_loss": low}, "b": {"rows/log_loss": low}})
    assert (equal.p_value, equal.better) == (1.0, "")
    (unknown,) = compare_methods({"a": {"full/x": SeedValues((0.5,))}, "b": {"full/x": SeedValues((0.6,))}})
    assert math.isnan(unknown.p_holm)
    assert unknown.better == ""


def test_three_methods_are_corrected_for_three_pairs_of_each_metric() -> None:
    rng = np.random.default_rng(0)
    made = {name: rng.normal(0.3, 0.1, 200) for name in "abc"}
    values = {name: {f"full/{m}": SeedValues((of.mean(),), of) for m in "xy"} for name, of in made.items()}
    pairs = compare_methods(values)
    assert [(each.metric, each.method, each.other) for each in pairs[:3]] == [
        ("full/x", "a", "b"),
        ("full/x", "a", "c"),
        ("full/x", "b", "c"),
    ]
    assert [each.p_holm for each in pairs[:3]] == holm([each.p_value for each in pairs[:3]])
    assert [each.p_holm for each in pairs[3:]] == [each.p_holm for each in pairs[:3]]


def test_lucky_seeds_are_rarely_called_a_better_method() -> None:
    """Two equal methods whose seeds differ by 0.03, on users of one evaluation: at most 5 % of 400 (and 2 errors)."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(400):
        users = rng.normal(0.3, 0.3, 300)
        values = {}
        for name in "ab":
            runs = users + rng.normal(0, 0.03, (3, 1)) + rng.normal(0, 0.2, (3, 300))
            means = runs.mean(1)
            values[name] = {"full/x": SeedValues(tuple(means), runs.mean(0), float(means.var(ddof=1)))}
        wrong += bool(compare_methods(values)[0].better)
    assert wrong <= 400 * 0.05 + 2 * math.sqrt(400 * 0.05 * 0.95)


def copied(run: Path, place: Path, **changed: object) -> None:
    """A copy of a run whose bundle says that some settings are others."""
    shutil.copytree(run, place)
    file = place / "bundle" / "bundle.json"
    card = json.loads(file.read_text())
    for name, value in changed.items():
        section, _, key = name.partition("__")
        card[section][key] = value
    file.write_text(json.dumps(card))


def test_runs_that_differ_by_their_seed_alone_are_one_method(small_runs: Path, tmp_path: Path) -> None:
    knn = small_runs / "knn"
    copied(knn, tmp_path / "a", train__seed=1)
    copied(knn, tmp_path / "b", train__seed=0, train__threads=7)
    copied(knn, tmp_path / "c", train__seed=1)
    copied(knn, tmp_path / "d", train__seed=0, train__train_splits=["train", "valid"])
    copied(small_runs / "popular", tmp_path / "e")
    (tmp_path / "f" / "checkpoints").mkdir(parents=True)
    methods, notes = methods_of(find_runs(tmp_path).runs)
    names = [each.name for each in methods]
    assert names == ["item_knn train_splits=['train']", "item_knn train_splits=['train', 'valid']", "popularity"]
    assert methods[0].runs == (str(tmp_path / "b"), str(tmp_path / "a"))
    assert methods[0].seeds == (0, 1)
    assert notes[0] == f"{tmp_path / 'c'}: left out: the settings and the seed are those of {tmp_path / 'a'}"
    assert notes[1].startswith(f"{tmp_path / 'f'}: left out: {tmp_path / 'f'}")


def test_settings_that_were_chosen_on_valid_may_differ_and_given_ones_may_not(small_runs: Path, tmp_path: Path) -> None:
    knn = small_runs / "knn"
    setting, *_ = json.loads((knn / "bundle" / "bundle.json").read_text())["settings"]
    tried = [{"settings": {setting: 0.25}, "value": 0.1}]
    copied(knn, tmp_path / "a", train__seed=0, trained__tried=tried, **{f"settings__{setting}": 0.25})
    copied(knn, tmp_path / "b", train__seed=1, trained__tried=tried, **{f"settings__{setting}": 0.5})
    copied(knn, tmp_path / "c", train__seed=2, trained__tried=None, **{f"settings__{setting}": 0.5})
    methods, notes = methods_of(find_runs(tmp_path).runs)
    assert notes == []
    assert [each.seeds for each in methods] == [(0, 1), (2,)]
    assert methods[1].name == f"item_knn {setting}=0.5"
