"""Models and baselines evaluated side by side."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from recspec.base.errors import SettingsError
from recspec.evaluation import evaluations
from recspec.evaluation.evaluations import BASELINES, evaluate, evaluate_baselines, evaluate_model
from recspec.evaluation.report import Report
from recspec.evaluation.row_baselines import logistic_regression
from recspec.evaluation.task import EvaluateSettings, EvaluationTask
from recspec.feature_spec import FeatureSpec
from recspec.models import FittedItemModel, Interactions
from tests import made_up
from tests.evaluation.tables import (
    Score,
    TableModel,
    TableRanker,
    dataset,
    displays,
    random_displays,
    row_baselines_here,
    trained,
    with_histories,
)

TASTES = [[1, 2, 3], [5, 6, 7]]


def of_two_tastes() -> dict[str, list[tuple[int, int, int, list[int]]]]:
    """30 users like items 1 to 3 or 5 to 7; user 1's taste shows in its valid row alone, user 2 has no train row."""
    users = [(user, TASTES[user % 2]) for user in range(3, 33)]
    train = [(user, likes[2], 1, likes[:2]) for user, likes in users]
    train += [(user, TASTES[1 - user % 2][0], 0, likes[:2]) for user, likes in users] + [(1, 4, 1, [])]
    valid = [(1, 2, 1, [4]), (1, 6, 0, [4])]
    test = [(1, 1, 1, [4, 2]), (1, 5, 0, [4, 2]), (2, 3, 1, []), (2, 7, 0, [])]
    return {"train": train, "valid": valid, "test": test}


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_know_what_the_rows_histories_know(tmp_path: Path, name: str) -> None:
    spec = with_histories(tmp_path, of_two_tastes(), users=33, items=8)
    task = EvaluationTask(spec, "test", ["rows", "sampled"], EvaluateSettings())
    found, missing = evaluate_baselines(task, names=(name,))
    assert missing == {}
    assert found[name].fitted["users_known_by"] == "rows and histories of train and valid"
    assert set(found[name].metrics) == {"rows", "sampled"}
    assert {"auc", "group_auc"} == set(found[name].metrics["rows"])
    of_users = found[name].values["sampled"]["hit_rate@1"].tolist()
    # 15 like each item: popularity is undecided on both. User 2 has done nothing: so are the others on it.
    # Item 1 comes before item 2, which user 1 knows: it never followed it.
    assert of_users == pytest.approx([0.5, 0.5] if name in ("popularity", "markov") else [1.0, 0.5])


def liked_items(tmp_path: Path) -> tuple[FeatureSpec, np.ndarray]:
    """Users like one half of the items each; a table of scores that knows it."""
    rng = np.random.default_rng(7)
    train, test = [], []
    taste = np.zeros((40, 60), dtype=np.float32)
    for user in range(40):
        half = np.arange(30) + 30 * (user % 2)
        taste[user, half] = 1
        liked = rng.choice(half, 16, replace=False)
        train += [(user, int(item), 1) for item in liked[1:]]
        others = rng.choice(np.setdiff1d(np.arange(60), liked), 12, replace=False)
        test += [(user, int(liked[0]), 1), *((user, int(item), 0) for item in others)]
    return dataset(tmp_path, {"train": train, "test": test}, users=40, items=60), taste


def test_the_report_puts_the_model_beside_every_baseline(tmp_path: Path) -> None:
    spec, taste = liked_items(tmp_path)
    stages: list[tuple[str, float, float | None]] = []
    report = evaluate(
        trained(TableModel(spec, taste)), spec, "test", baselines=True, progress=lambda *step: stages.append(step)
    )
    assert set(report.baselines) == set(BASELINES)
    assert "users_known_by" not in report.beside["item_knn"].fitted, "there are no histories"
    for metrics in report.baselines.values():
        assert set(metrics) == {"rows", "sampled", "full"}
        assert "log_loss" not in metrics["rows"]
        assert set(metrics["sampled"]) == set(report.metrics["sampled"])
    assert report.metrics["sampled"]["ndcg@10"] > report.baselines["popularity"]["sampled"]["ndcg@10"]
    assert ("baselines", len(BASELINES), len(BASELINES)) in stages
    assert report.described("sampled") == "sampled (40 groups, 13 candidates each: the dataset's own)"
    assert report.described("full") == (
        "full (40 users, 45 candidates each: all items without those of the user in train; trained on train)"
    )
    assert report.described("rows") == "rows (520 rows, 40 positive)"
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert plain["metrics"]["sampled"] == report.metrics["sampled"]
    assert plain["split"] == "test"


def test_a_baseline_that_wins_is_said_to_win(tmp_path: Path) -> None:
    spec, taste = liked_items(tmp_path)
    one = trained(TableModel(spec, -taste))
    itself = replace(one, card=one.card.model_copy(update={"model": "ease"}))
    report = evaluate(itself, spec, "test", baselines=True, protocols=["sampled"])
    others = [name for name in BASELINES if name != "ease"]
    assert list(report.baselines) == others, "a model is not put beside itself"
    assert [verdict.split(" beats")[0] for verdict in report.verdicts] == [f"sampled: {name}" for name in others]
    assert "hit_rate@10 " in report.verdicts[0]
    assert report.verdicts[0].count(" standard errors)") == 2
    assert report.verdicts[0].endswith(" and 2 more")  # recall says the same as HR, so MAP and MRR


def test_a_baseline_that_cannot_be_fitted_is_left_out_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, taste = liked_items(tmp_path)

    def too_large(*_: object) -> None:
        raise SettingsError("too many items")

    monkeypatch.setattr(BASELINES["ease"], "_fit", too_large)
    task = EvaluationTask(spec, "test", None, EvaluateSettings())
    found, missing = evaluate_baselines(task, names=("popularity", "ease"))
    assert set(found) == {"popularity"}
    report = Report("test", evaluate_model(TableRanker(taste), spec, "test"), found, missing)
    assert report.verdicts == ()
    assert report.notes == ("ease left out: too many items",)
    assert report.to_dict()["left_out"] == {"ease": "too many items"}


def test_baselines_are_fitted_on_what_the_model_was_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {"train": [(0, 0, 1)], "valid": [(0, 1, 1), (0, 2, 0)], "test": [(0, 3, 1), (0, 5, 0)]}
    spec = dataset(tmp_path, splits)
    sizes = []

    def counting(_: FittedItemModel, interactions: Interactions, *, seed: int = 0) -> None:  # noqa: ARG001
        sizes.append(interactions.num_pairs)
        raise SettingsError("counted")

    monkeypatch.setattr(FittedItemModel, "fit", counting)
    model = TableModel(spec, np.eye(4, 6))
    settings = EvaluateSettings(ks=(1,))
    for train in ({}, {"train_splits": ["train", "valid"]}):
        evaluate(trained(model, train), spec, "valid", baselines=True, settings=settings)
    assert sizes == [1] * len(BASELINES) + [2] * len(BASELINES)


def test_a_baselines_settings_are_chosen_on_valid_before_test_is_judged(tmp_path: Path) -> None:
    spec = made_up.interactions(tmp_path / "data", num_users=40, num_rows=600)
    found = {}
    for split in ("test", "valid"):
        found[split] = evaluate_baselines(EvaluationTask(spec, split, ["full"], EvaluateSettings()), names=("ease",))[0]
    facts = found["test"]["ease"].fitted
    assert str(facts["chosen_by"]).startswith("valid full/ndcg@10 0.")
    assert re.search(r", the best of ([4-9]|10)$", str(facts["chosen_by"]))
    assert facts["settings"]["form"] == "dual"  # type: ignore[index]
    assert "chosen_by" not in found["valid"]["ease"].fitted  # valid is judged: nothing may be chosen on it


def test_row_baselines_are_never_fitted_to_the_candidates_that_valid_lists(tmp_path: Path) -> None:
    """Train holds positives alone: nothing to fit; with train's own negatives, valid adds no row."""
    spec = made_up.interactions(tmp_path / "data", num_users=40, num_rows=600)
    task = EvaluationTask(spec, "test", ["rows"], EvaluateSettings())
    found, _ = evaluate_baselines(task, ("train", "valid"), names=("constant", "logistic_regression"))
    assert found == {}
    splits = {
        "train": [(u, i, int(i < 3)) for u in range(4) for i in range(6)],
        "valid": [(u, i, int(i == 3)) for u in range(4) for i in range(6)],
        "test": [(u, i, int(i == 4)) for u in range(4) for i in range(6)],
    }
    spec = dataset(tmp_path, splits, metadata={"test_samples_per_series": 6})

    def constant(spec: FeatureSpec, *on: str) -> dict[str, float]:
        task = EvaluationTask(spec, "test", ["rows"], EvaluateSettings())
        return evaluate_baselines(task, on, names=("constant",))[0]["constant"].metrics["rows"]

    alone = constant(spec, "train")
    assert constant(spec, "train", "valid") == alone
    own_labels = dataset(tmp_path, splits)
    assert constant(own_labels, "train", "valid")["log_loss"] < alone["log_loss"]


def test_a_click_model_stands_beside_logistic_regression_under_every_protocol_of_rows(tmp_path: Path) -> None:
    spec = made_up.clicks(tmp_path / "data", num_rows=2000)
    model = Score(spec)
    model.forward = lambda batch: batch["speed"] * model.weight  # type: ignore[method-assign]
    report = evaluate(trained(model), spec, "valid", baselines=True, protocols=["rows", "sampled"])
    assert list(report.baselines) == [*row_baselines_here(), *BASELINES]
    ours, theirs = report.metrics, report.baselines["logistic_regression"]
    assert {protocol: set(of) for protocol, of in theirs.items()} == {name: set(of) for name, of in ours.items()}
    assert theirs["rows"]["auc"] > 0.65
    assert theirs["rows"]["log_loss"] < report.baselines["constant"]["rows"]["log_loss"]
    assert report.baselines["constant"]["rows"]["auc"] == 0.5
    assert "rows: logistic_regression beats the model: auc " in " ".join(report.verdicts)
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert plain["fitted"]["logistic_regression"]["rows"] == plain["fitted"]["logistic_regression"]["of_rows"]
    absent = "lightgbm left out: this needs the library 'lightgbm', which is not installed: pip install "
    assert report.notes == (() if "lightgbm" in row_baselines_here() else (f"{absent}'recspec[baselines]'",))


def test_a_dataset_without_users_and_items_has_the_baselines_of_rows_and_says_once_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_displays()
    spec = displays(tmp_path, rows)
    (tmp_path / "train.csv").write_text((tmp_path / "test.csv").read_text())
    chunk = spec.sources["test"][0].model_copy(update={"files": ("train.csv",)})
    spec = spec.replace(sources={**spec.sources, "train": [chunk]})
    few = partial(logistic_regression, most_entries=1200)
    monkeypatch.setattr(evaluations, "ROW_BASELINES", {"logistic_regression": few})
    report = evaluate(trained(Score(spec)), spec, "test", baselines=True)
    assert set(report.baselines) == {"logistic_regression"}
    *left_out, note = report.notes
    assert left_out == [
        "protocol full left out: the dataset has no user and no item",
        f"{', '.join(BASELINES)} left out: the dataset has no user and no item",
    ]
    assert re.fullmatch(rf"logistic_regression was fitted on an even sample of [56]\d\d of {len(rows):,} rows", note)
