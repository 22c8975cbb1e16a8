"""Items that training never saw are recommended by what describes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from recspec.inference import Predictor, RecommendRequest
from recspec.models import MODELS
from recspec.training import TrainSettings, train
from tests.dataset_cases import prepare_table


@pytest.mark.parametrize("name", ["sasrec", "bert4rec"])
def test_a_new_item_is_ranked_by_its_features_at_once(name: str, tmp_path: Path) -> None:
    # Users stay with one kind of items; items 0 to 5 are of kind a, 6 to 11 of kind b.
    events = [(user, 6 * (user % 2) + (user // 2 + step) % 6) for user in range(48) for step in range(5)]
    items = [*((f"i{n}", "ab"[n // 6]) for n in range(12)), ("new a", "a"), ("new b", "b")]
    (tmp_path / "items.csv").write_text("item,kind\n" + "".join(f"{item},{kind}\n" for item, kind in items))
    given = {"user": "user", "item": "item", "timestamp": None, "items": str(tmp_path / "items.csv")}
    text = "user,item\n" + "".join(f"u{user},i{item}\n" for user, item in events)
    features = {"item_features": ["kind"], "unseen_items": True, "split": "none"}
    spec = prepare_table(tmp_path / "a.csv", tmp_path / "out", text, **given, **features).spec
    sizes = {"dim": 8, "hidden": 8, "dropout": 0.0, "side_features": True}
    settings = TrainSettings.model_validate(
        {"epochs": 15, "batch_size": 16, "learning_rate": 0.02, "tensorboard": False}
    )
    train(name, spec, tmp_path / "run", settings=settings, model_settings=MODELS[name].Settings.model_validate(sizes))
    predictor = Predictor.open(tmp_path / "run")
    for user, kind in (("u0", "a"), ("u1", "b")):
        answer = predictor.recommend(RecommendRequest(users=(user,), k=2))[0]
        assert f"new {kind}" in {each.item for each in answer.items}
