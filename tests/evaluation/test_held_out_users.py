"""Held-out users: known by what is folded in, measured as Liang et al., 2018, do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recspec.base.errors import SpecError
from recspec.data.storage import Ragged, open_split
from recspec.evaluation import EvaluateSettings, EvaluationTask, evaluate_model
from recspec.evaluation.fitting import ItemFit
from recspec.evaluation.interactions import read_events
from recspec.feature_spec import FeatureSpec
from recspec.loading import Ranks
from recspec.models import MODELS, FittedItemModel
from recspec.training import TrainSettings
from recspec.training.loop import plan_run
from tests.dataset_cases import prepare_table

USERS, ITEMS, HELD_OUT, L2 = 120, 110, 20, 5.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    """Users like one half of the items; every fourth row is of a rating too low."""
    folder, random = tmp_path_factory.mktemp("held-out"), np.random.default_rng(0)
    rows = []
    for user in range(USERS):
        liked = random.permutation(ITEMS // 2)[: random.integers(4, 50)] * 2 + user % 2
        rows += [f"{user:03d},{item:03d},{time},{1 + 4 * (time % 4 > 0)}\n" for time, item in enumerate(liked)]
    text = "user_id,item_id,timestamp,stars\n" + "".join(rows)
    asked = {"split": "users", "heldout_users": HELD_OUT, "history": 6, "rating": "stars", "min_rating": 4}
    return prepare_table(folder / "a.csv", folder / "out", text, num_negatives=0, **asked).spec


def pairs(data: FeatureSpec, split: str) -> np.ndarray:
    """(users, items) 1 where a split has a row."""
    rows = open_split(data, split, ("user_id", "item_id")).read(0, 10**6)
    table = np.zeros((data.num_ids("user_id"), data.num_ids("item_id")))
    np.add.at(table, (np.asarray(rows["user_id"]), np.asarray(rows["item_id"])), 1)
    assert table.max() == 1
    return table


def ease(data: FeatureSpec, **settings: object) -> ItemFit:
    kind = MODELS["ease"]
    assert issubclass(kind, FittedItemModel)
    return ItemFit(kind, data, kind.Settings.model_validate(settings), ("train",), "valid", "full/ndcg@50")


def test_measures_are_those_of_the_papers_own_code(data: FeatureSpec) -> None:
    """EASE, Recall@20 = hits / min(20, targets) and NDCG@50, in NumPy, of the held-out users alone."""
    train, known, targets = (pairs(data, split) for split in ("train", "fold_in", "test"))
    inverse = np.linalg.inv(train.T @ train + L2 * np.eye(len(train.T)))
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0)
    scores = known @ weights
    scores[known > 0] = -np.inf
    scores[:, 0] = -np.inf  # the id of unknown items
    recalls, gains = [], []
    for user in np.flatnonzero(targets.any(1)):
        hit = targets[user][np.argsort(-scores[user])]
        count, discounts = int(hit.sum()), 1 / np.log2(np.arange(2, 52))
        recalls.append(hit[:20].sum() / min(20, count))
        gains.append((hit[:50] * discounts).sum() / discounts[: min(50, count)].sum())
    assert not train[targets.any(1) | known.any(1)].any()
    assert not (known * targets).any()

    found = evaluate_model(ease(data, l2=L2, dropout=0.0, recency=1.0).run().model, data, "test", protocols=("full",))
    assert data.metadata["cut_offs"] == [20, 50]
    assert found.protocols["full"]["groups"] == len(recalls) <= HELD_OUT
    assert found.metrics["full"]["recall@20"] == pytest.approx(np.mean(recalls))  # no user has over 20 targets
    assert found.metrics["full"]["ndcg@50"] == pytest.approx(np.mean(gains))
    assert "capped_recall@20" not in found.metrics["full"]
    short = evaluate_model(
        ease(data, l2=L2, dropout=0.0, recency=1.0).run().model,
        data,
        "test",
        settings=EvaluateSettings(ks=(2,)),
        protocols=["full"],
    )
    assert short.metrics["full"]["capped_recall@2"] > short.metrics["full"]["recall@2"]


def test_settings_are_chosen_by_what_held_out_users_of_valid_would_get(data: FeatureSpec) -> None:
    found = ease(data).run()
    assert found.metric == "full/ndcg@50"
    again = evaluate_model(found.model, data, "valid", protocols=("full",))
    assert found.value == pytest.approx(again.metrics["full"]["ndcg@50"])
    assert found.model.gives_logits  # a line through scores, of which all would be 0 for unknown users


def test_only_what_is_folded_in_is_known_whatever_else_users_did(data: FeatureSpec) -> None:
    """Items of low ratings stay candidates, as in the paper, though `recommend` leaves them out."""
    for known in ("before", "train"):
        task = EvaluationTask(data, "test", ["full"], EvaluateSettings(known=known), reads=("user_id", "item_id"))
        users = task.ranked_users
        folded, (rows, items) = pairs(data, "fold_in"), task.excluded.of(users)
        assert {*zip(users[rows].tolist(), items.tolist(), strict=True)} == {
            (user, item) for user in users.tolist() for item in np.flatnonzero(folded[user]).tolist()
        }
        events = task.known_interactions(MODELS["sasrec"]).events
        times = {user: events.items[events.offsets[user] : events.offsets[user + 1]].tolist() for user in users}
        assert all(sorted(times[user]) == np.flatnonzero(folded[user]).tolist() for user in users)


def test_histories_of_targets_are_the_latest_events_folded_in(data: FeatureSpec) -> None:
    events = read_events(data, ["fold_in"])
    for split in ("valid", "test"):
        rows = open_split(data, split, ("user_id", "history_item_id")).read(0, 10**6)
        lists = rows["history_item_id"]
        assert isinstance(lists, Ragged)
        for place, user in enumerate(np.asarray(rows["user_id"]).tolist()):
            own = events.items[events.offsets[user] : events.offsets[user + 1]]
            assert lists.values[lists.offsets[place] : lists.offsets[place + 1]].tolist() == own[-6:].tolist()


@pytest.mark.parametrize(("name", "metric"), [("sasrec", "full/ndcg@50"), ("two_tower", "full/ndcg@50")])
def test_models_that_read_events_are_chosen_by_the_longest_list(
    name: str, metric: str, data: FeatureSpec, tmp_path: Path
) -> None:
    plan = plan_run(name, data, tmp_path, TrainSettings(), MODELS[name].Settings(), Ranks(), resume=False)
    assert plan.metric.value == metric


def test_a_model_without_events_is_refused(data: FeatureSpec, tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"train has no row of the users of valid and test, and neumf reads no events .* ease or sasrec"
    ):
        plan_run("neumf", data, tmp_path, TrainSettings(), MODELS["neumf"].Settings(), Ranks(), resume=False)
