"""Classic models beside a trained one on valid."""

from pathlib import Path

import pytest

from recspec.evaluation import EvaluateSettings, Question, evaluate_baselines
from recspec.training import result
from tests import made_up


@pytest.fixture(scope="module")
def question(tmp_path_factory: pytest.TempPathFactory) -> Question:
    data = made_up.interactions(tmp_path_factory.mktemp("beside") / "data", num_users=40, num_items=30, num_rows=500)
    return Question(data, "valid", ("full",), EvaluateSettings())


def test_a_short_training_stands_beside_popularity_alone(question: Question) -> None:
    found = result.cheap_baselines(question, ("train",), "neumf", 0.0)
    expected, _ = evaluate_baselines(question, ("train",), names=("popularity",))
    assert {name: of.metrics for name, of in found.items()} == {name: of.metrics for name, of in expected.items()}
    assert set(result.cheap_baselines(question, ("train",), "neumf", 9.9)) == {"popularity"}
    assert result.cheap_baselines(question, ("train",), "popularity", 0.0) == {}, "no baseline of itself"


def test_a_longer_one_stands_beside_those_that_fit_a_tenth_of_its_time(
    question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 items and an operation of a second: EASE takes 31 cubed, item-kNN more than 31 squared; Markov counts."""
    monkeypatch.setattr(result, "seconds_of_an_operation", lambda: 0.0)
    everything = {"popularity", "item_knn", "markov", "ease"}
    assert set(result.cheap_baselines(question, ("train",), "neumf", 600.0)) == everything
    assert set(result.cheap_baselines(question, ("train",), "ease", 600.0)) == everything - {"ease"}
    monkeypatch.setattr(result, "seconds_of_an_operation", lambda: 1.0)
    assert set(result.cheap_baselines(question, ("train",), "neumf", 600.0)) == {"popularity", "markov"}


def test_data_without_users_has_no_such_baseline(tmp_path: Path) -> None:
    clicks = made_up.clicks(tmp_path / "clicks", num_rows=300)
    channels = {name: of for name, of in clicks.channels.items() if "user" not in name}
    metadata = {name: of for name, of in clicks.metadata.items() if name not in ("user_id", "catalogues")}
    bare = clicks.replace(channels=channels, metadata=metadata)
    assert result.cheap_baselines(Question(bare, "valid", ("rows",), EvaluateSettings()), ("train",), "dlrm", 99) == {}
