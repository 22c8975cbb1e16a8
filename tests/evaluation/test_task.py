"""What an evaluation accepts or refuses, and the negatives that it draws: different, unseen and uniform."""

from pathlib import Path

import numpy as np
import pytest

from recspec.base import config
from recspec.base.errors import SettingsError, SpecError
from recspec.evaluation.evaluations import BASELINES, evaluate, evaluate_baselines, evaluate_model
from recspec.evaluation.report import Report
from recspec.evaluation.task import EvaluateSettings, EvaluationTask, draw_candidates
from recspec.feature_spec import FeatureSpec
from recspec.models import Interactions
from tests.evaluation.tables import (
    ADS,
    HELD_OUT,
    SHOWN,
    RichModel,
    TableModel,
    csv_spec,
    dataset,
    displays,
    ranked,
    rich_dataset,
    row_baselines_here,
    trained,
    with_histories,
)

SCORES = np.array([0.0, 5, 4, 3, 2])


def test_full_and_sampled_wait_to_be_asked_where_requests_differ(tmp_path: Path) -> None:
    spec = rich_dataset(tmp_path, catalogue=True)
    result = evaluate_model(RichModel(spec, np.zeros((1, 1))), spec, "test")
    assert set(result.metrics) == {"rows"}
    assert result.left_out == {
        "full": "requests differ by 'hour', 'history'; ask for it with the protocol's name",
        "sampled": "the dataset names no group; ask for it with the protocol's name",
    }


def test_full_is_left_out_if_histories_make_it_long_and_the_model_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before test, users 1, 2 and 3 acted on 2, 3 and 0 items; times 8 items, 40 pairs."""
    spec = with_histories(tmp_path, {"train": [(1, 7, 1, [5]), (2, 1, 1, [2, 3])], "test": HELD_OUT})
    task = EvaluationTask(spec, "test", None, EvaluateSettings())
    assert task.pairs_of_events == 40
    assert "full" in task.choose()[0]
    monkeypatch.setattr("recspec.evaluation.task.MOST_PAIRS_OF_EVENTS", 39)
    assert task.choose()[1] == {
        "full": "it weighs every item against 'history_item' of each user, 4.0e+01 pairs of item and event, more than "
        "4e+01; ask for it with the protocol's name, or for fewer users with --users"
    }
    assert "full" in EvaluationTask(spec, "test", None, EvaluateSettings(users=1)).choose()[0]
    assert "full" in evaluate_model(TableModel(spec, np.eye(4, 8)), spec, "test").metrics
    with pytest.raises(SettingsError, match="known is train, and the model reads 'history_item' of each row, which"):
        EvaluationTask(
            with_histories(tmp_path / "valid too", {"train": [(1, 7, 1, [5])], "valid": HELD_OUT, "test": HELD_OUT}),
            "test",
            None,
            EvaluateSettings(known="train"),
        )


def choices(folder: Path) -> FeatureSpec:
    """User 1: item 1 in train, 2 in valid, 3 in test; user 2: 2 in train, 1 in valid, again 2 in test."""
    splits = {"train": [(1, 1, 1), (2, 2, 1)], "valid": [(1, 2, 1), (2, 1, 1)], "test": [(1, 3, 1), (2, 2, 1)]}
    return dataset(folder, splits, items=5)


def test_repeats_are_targets_and_candidates_if_they_are_kept(tmp_path: Path) -> None:
    spec = choices(tmp_path)
    without, beside = (ranked(spec, SCORES, "full", ks=(1,), repeats=name) for name in ("drop", "keep"))
    dropped, kept = without.protocols["full"], beside.protocols["full"]
    # Without repeats only user 1 has a target, 3: of 0, 3 and 4 it leads. With them: third of five, and second of five.
    assert (dropped["groups"], dropped["fewest_candidates"], without.metrics["full"]["mrr"]) == (1, 3, 1.0)
    assert dropped["repeats_left_out"] == 1
    assert (kept["groups"], kept["most_candidates"]) == (2, 5)
    assert beside.metrics["full"]["mrr"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert "repeats_left_out" not in kept
    told = "all items; items that the user acted on before are candidates and targets"
    assert told in Report("test", beside).described("full")


def test_unknown_users_are_not_ranked_as_if_they_were_one_user(tmp_path: Path) -> None:
    """User 0 stands for all strangers: what one did in valid is no repeat of another's, and they have no list."""
    splits = {"train": [(1, 1, 1), (2, 2, 1)], "valid": [(0, 3, 1)], "test": [(0, 3, 1), (0, 4, 1), (1, 3, 1)]}
    spec = dataset(tmp_path, splits, items=5, metadata={"vocabularies": "vocabularies"})
    found = ranked(spec, SCORES, "full", "sampled", ks=(1,))
    for protocol, described in found.protocols.items():
        assert (described["groups"], described["positives"], described["of_unknown_users_left_out"]) == (1, 1, 2)
        assert "repeats_left_out" not in described
        assert "2 positives of unknown users left out" in Report("test", found).described(protocol)
    assert "unknown user" in EvaluationTask(spec, "valid", None, EvaluateSettings()).choose()[1]["full"]


def test_items_that_training_never_saw_are_dropped_if_asked(tmp_path: Path) -> None:
    found = ranked(choices(tmp_path), SCORES, "full", "sampled", ks=(1,), cold="drop", repeats="keep")
    # Train has items 1 and 2: user 1's target 3 falls out, user 2's is second of two.
    assert found.metrics["full"]["mrr"] == 0.5
    facts = found.protocols["full"]
    assert (facts["groups"], facts["most_candidates"]) == (1, 2)
    assert (facts["cold"], facts["cold_targets_dropped"], facts["cold_items"]) == ("drop", 1, 3)
    assert "; cold: 1 targets and 3 items dropped)" in Report("test", found).described("full")
    assert found.protocols["sampled"]["most_candidates"] == 2


def test_known_names_the_splits_that_are_a_models_input(tmp_path: Path) -> None:
    spec = choices(tmp_path)
    for known, splits in (("before", ("train", "valid")), ("train", ("train",))):
        assert EvaluationTask(spec, "test", None, EvaluateSettings(known=known)).known == splits
    assert EvaluationTask(spec, "train", None, EvaluateSettings()).known == ()


def test_unknown_protocols_splits_and_settings_are_refused(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"test": [(0, 3, 1), (0, 1, 0)]})
    message = r"protocols: unknown protocols 'row' \(did you mean 'rows'\?\), 'x'; known: 'rows', 'sampled', 'full'$"
    with pytest.raises(SettingsError, match=message):
        ranked(spec, np.eye(4, 6), "row", "x")
    with pytest.raises(SpecError, match="unknown split 'tset'"):
        ranked(spec, np.eye(4, 6), split="tset")
    with pytest.raises(SettingsError, match="ks"):
        config.build(EvaluateSettings, "evaluate", {"ks": [0]})


def test_ranking_without_users_and_items_is_refused(tmp_path: Path) -> None:
    channels = {"context": ["x"], "label": ["label"]}
    spec = csv_spec(tmp_path, {"test": "0.5,1\n0.1,0\n"}, {"x": {}, "label": {}}, channels)
    with pytest.raises(SpecError, match="protocol 'full' needs a feature in the role 'item'"):
        EvaluationTask(spec, "test", ["full"], EvaluateSettings())
    task = EvaluationTask(spec, "test", None, EvaluateSettings())
    found, missing = evaluate_baselines(task)
    assert not found
    assert missing["logistic_regression"] == missing["ease"] == "the dataset has no split 'train' to fit them on"
    found, missing = evaluate_baselines(task, ["test"])
    assert list(found) == row_baselines_here()
    assert missing["ease"] == "the dataset has no user and no item"
    assert task.choose()[1] == {
        "full": "the dataset has no user and no item",
        "sampled": "the dataset has no user and no item, and no group",
    }


def test_a_dataset_without_a_user_that_a_feature_tells_apart_has_no_baselines_of_users(tmp_path: Path) -> None:
    channels = {"item": ["ad"], "group": ["shown"], "label": ["label"]}
    task = EvaluationTask(csv_spec(tmp_path, {"train": SHOWN}, ADS, channels), "train", None, EvaluateSettings())
    assert task.choose() == (("rows", "sampled"), {"full": "the dataset has no user"})
    found, missing = evaluate_baselines(task)
    assert list(found) == row_baselines_here()
    assert {name: missing[name] for name in BASELINES} == dict.fromkeys(BASELINES, "the dataset has no user")
    features = {"age": {}, "ad": {"cardinality": 2}, "label": {}}
    channels = {"user": ["age"], "item": ["ad"], "label": ["label"]}
    spec = csv_spec(tmp_path, {"train": "0.5,0,1\n0.1,1,0\n"}, features, channels)
    _, missing = evaluate_baselines(EvaluationTask(spec, "train", None, EvaluateSettings()))
    assert {name: missing[name] for name in BASELINES} == dict.fromkeys(BASELINES, "the dataset has no user")


def test_groups_of_positives_only_cannot_be_ranked_without_users_and_items(tmp_path: Path) -> None:
    channels = {"group": ["shown"], "label": ["label"]}
    spec = csv_spec(tmp_path, {"test": "7,1\n8,1\n"}, {"shown": {"dtype": "int64"}, "label": {}}, channels)
    assert EvaluationTask(spec, "test", None, EvaluateSettings()).choose()[1]["sampled"] == (
        "the split lists no negatives, and the dataset has no user and no item to draw them for"
    )
    task = EvaluationTask(spec, "test", ["sampled"], EvaluateSettings())
    with pytest.raises(SpecError, match=r"'sampled' on the split 'test', which lists no negatives, needs .* 'user'"):
        _ = task.candidates


def test_another_dataset_than_the_models_is_refused(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"test": [(0, 3, 1), (0, 1, 0)]})
    model = TableModel(spec, np.eye(4, 6))
    larger = dataset(tmp_path, {"test": [(0, 3, 1), (0, 1, 0)]}, items=7)
    with pytest.raises(SpecError, match="feature 'item' has 7 ids; the model was trained on 6"):
        evaluate(trained(model), larger, "test")
    with pytest.raises(
        SpecError, match=r"unknown features 'user', 'item'; known: 'display', 'label', 'score', 'leak'$"
    ):
        evaluate(trained(model), displays(tmp_path, [(0, 0, 0.5, 0)]), "test")


# --- drawn negatives --------------------------------------------------------------------------------------------------


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
    again, other = (draw_candidates(truth, seen, num_negatives=20, first_item=1, seed=seed).items for seed in (5, 6))
    np.testing.assert_array_equal(drawn.items, again)
    assert (drawn.items != other).any()


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
