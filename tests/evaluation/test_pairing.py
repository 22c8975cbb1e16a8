"""Two kept evaluations, group by group."""

from pathlib import Path

import numpy as np
import pytest

from recspec.base.errors import DataError
from recspec.evaluation import compare, how_questions_differ, pair, saved
from recspec.feature_spec import FeatureSpec
from tests.evaluation.conftest import kept


def test_a_pair_says_what_comparing_the_evaluations_themselves_says(small_runs: Path, small_data: FeatureSpec) -> None:
    ours, theirs = (kept(small_runs / name, small_data)[0] for name in ("knn", "popular"))
    first, second = (
        next(each for each in saved(small_runs / name) if each.split == "test" and each.settings["users"] is None)
        for name in ("knn", "popular")
    )
    expected = compare(ours.model, theirs.model, draws=200)
    for protocol in ("rows", "sampled", "full"):
        found = pair(first, second, protocol)
        assert found.ids is not None
        assert len(found.ids) == len(next(iter(found.ours.values())))
        for name, each in expected[protocol].items():
            assert found.compare(draws=200)[name].difference == pytest.approx(each.difference, abs=1e-6)
    swapped = pair(second, first, "full")
    np.testing.assert_array_equal(swapped.ours["mrr"], pair(first, second, "full").theirs["mrr"])
    assert swapped.events is not None


def test_unlike_questions_are_refused_with_every_difference(small_runs: Path, small_data: FeatureSpec) -> None:
    kept(small_runs / "knn", small_data, users=7)
    kept(small_runs / "popular", small_data, "valid", repeats="keep")
    first = next(each for each in saved(small_runs / "knn") if each.settings["users"] == 7)
    second = next(each for each in saved(small_runs / "popular") if each.split == "valid")
    with pytest.raises(DataError, match=r"can't be compared under full: \d+ problems") as caught:
        pair(first, second, "full")
    assert "the split: 'test' and 'valid'" in caught.value.problems
    assert "repeats: 'drop' and 'keep'" in caught.value.problems
    assert any(each.startswith("groups: 7 and ") for each in caught.value.problems)
    assert how_questions_differ(first, first, "full") == []
    assert how_questions_differ(first, first, "none") == [f"{first.file} has no values under none"] * 2
