"""TwoTower: its score, its loss worked by hand, unknown ids, and items that training never saw."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recspec.base import config
from recspec.base.errors import RecspecError, SettingsError
from recspec.bundle import folder as bundle
from recspec.data.storage import SplitWriter
from recspec.feature_spec import Chunk, FeatureSpec
from recspec.models.facts import DataFacts
from recspec.models.layers.batch import Batch, drawn_of, log_expected_of
from recspec.models.two_tower import TwoTower, TwoTowerSettings
from recspec.training.loop import train
from recspec.training.settings import TrainSettings
from tests import made_up


def a_spec(*, lists: bool = False, reserved: bool = True) -> FeatureSpec:
    features: dict[str, dict[str, object]] = {
        "user_id": {"dtype": "int32", "cardinality": 6},
        "item_id": {"dtype": "int32", "cardinality": 8},
        "category": {"dtype": "int32", "cardinality": 4},
        "price": {"dtype": "float32"},
        "hour": {"dtype": "float32"},
        "label": {"dtype": "float32"},
    }
    if lists:
        features["history_item_id"] = {
            "dtype": "int32",
            "cardinality": 8,
            "vocabulary": "item_id",
            "length": 4,
            "padding": 0,
        }
        features["history_gap"] = {"dtype": "float32", "length": 4}
    channels = {
        "user": ["user_id"],
        "item": ["item_id", "category", "price"],
        "context": ["hour"],
        "label": ["label"],
        **({"history": ["history_item_id", "history_gap"]} if lists else {}),
    }
    metadata = {"user_id": "user_id", "item_id": "item_id", **({"vocabularies": "vocabularies"} if reserved else {})}
    return FeatureSpec.from_dict({"feature_spec": features, "channel_spec": channels, "metadata": metadata})


def a_model(spec: FeatureSpec, **settings: object) -> TwoTower:
    torch.manual_seed(0)
    sizes = {"dim": 5, "embedding_dim": 4, **settings}
    model = TwoTower(spec, TwoTowerSettings.model_validate(sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def a_batch() -> Batch:
    return {
        "user_id": torch.tensor([1, 2, 3]),
        "hour": torch.tensor([0.5, -1.0, 2.0]),
        "item_id": torch.tensor([4, 5, 6]),
        "category": torch.tensor([1, 2, 3]),
        "price": torch.tensor([1.0, 0.0, -1.0]),
        "label": torch.ones(3),
    }


# --- the score -------------------------------------------------------------------------------------------------------


def test_the_score_is_the_cosine_over_the_temperature_plus_a_number_of_the_item() -> None:
    model, batch = a_model(a_spec(), temperature=0.25), a_batch()
    request, items = model.request_tower(batch), model.item_tower(batch)
    cosine = torch.cosine_similarity(request, items[:, :5])
    torch.testing.assert_close(model(batch), cosine / 0.25 + items[:, 5])
    vectors, theirs = model.request_vector(batch), model.item_vectors(batch)
    torch.testing.assert_close(vectors[:, :5].norm(dim=1), torch.full((3,), 4.0))
    torch.testing.assert_close(theirs[:, :5].norm(dim=1), torch.ones(3))
    assert vectors[:, 5].tolist() == [1.0] * 3
    torch.testing.assert_close((vectors @ theirs.T).diagonal(), model(batch))


def test_without_bias_and_length_one_it_is_the_product_over_the_temperature() -> None:
    model, batch = a_model(a_spec(), temperature=0.5, normalize=False, item_bias=False), a_batch()
    torch.testing.assert_close(model(batch), (model.request_tower(batch) * model.item_tower(batch)).sum(1) / 0.5)
    assert model.request_vector(batch).shape == model.item_vectors(batch).shape == (3, 5)


def test_the_towers_read_the_features_of_their_sides() -> None:
    model = a_model(a_spec(lists=True))
    assert set(model.request_tower.features) == {"user_id", "hour", "history_item_id"}
    assert set(model.item_tower.features) == {"item_id", "category", "price"}


def test_a_side_without_features_is_refused() -> None:
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"item_id": {"cardinality": 8}, "label": {}},
            "channel_spec": {"item": ["item_id"], "label": ["label"]},
        }
    )
    with pytest.raises(SettingsError, match="there is no feature to read in the roles user, context and history"):
        TwoTower(spec, TwoTowerSettings())
    with pytest.raises(RecspecError, match="every width is at least 1"):
        config.build(TwoTowerSettings, "settings", {"hidden": [8, 0]})


# --- the loss --------------------------------------------------------------------------------------------------------


def with_vectors(model: TwoTower, requests: torch.Tensor, items: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "request_vector", lambda batch: requests[: len(batch["user_id"])])
    monkeypatch.setattr(model, "item_vectors", lambda batch: items[batch["item_id"]])


def test_the_softmax_worked_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, batch = a_spec(), {name: values[:2] for name, values in a_batch().items()}
    model = a_model(spec)
    vectors = torch.tensor([[0.0], [1.0], [2.0], [0.0], [math.log(3)], [math.log(4)], [0.0], [0.0]])
    with_vectors(model, torch.ones(2, 1), vectors, monkeypatch)
    candidates = {"item_id": torch.tensor([4, 5, 7]), "category": torch.tensor([1, 2, 0]), "price": torch.zeros(3)}
    columns = {drawn_of(name): values.expand(2, -1) for name, values in candidates.items()}
    expected = torch.tensor([[torch.inf, math.log(2), math.log(0.5)], [math.log(3), torch.inf, math.log(0.5)]])
    columns[log_expected_of("item_id")] = expected
    loss = model.loss({**batch, **columns})
    # Row 0: item 4 of weight 3, against item 5, 4 / 2, and item 7, 1 / .5. Row 1: item 5 against 3 / 3 and 1 / .5.
    wanted = -(math.log(3 / (3 + 2 + 2)) + math.log(4 / (4 + 1 + 2))) / 2
    assert loss.item() == pytest.approx(wanted)
    halved = model.loss({**batch, **columns, "label": torch.tensor([1.0, 0.0])})
    assert halved.item() == pytest.approx(-math.log(3 / 7) / 2)  # a row with label 0 is no positive


def test_the_binary_loss_is_the_cross_entropy_of_the_labels() -> None:
    model, batch = a_model(a_spec(), loss="binary"), {**a_batch(), "label": torch.tensor([1.0, 0.0, 1.0])}
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
    torch.testing.assert_close(model.loss(batch), wanted)
    assert model.gives_logits
    assert not model.loss_needs().compares_negatives
    assert not a_model(a_spec()).gives_logits
    assert a_model(a_spec()).loss_needs().negatives == "batch and positives"
    assert a_model(a_spec(), in_batch=False).loss_needs().negatives == "batch"


# --- unknown ids -----------------------------------------------------------------------------------------------------


def present(spec: FeatureSpec, **ids: list[int]) -> dict[str, torch.Tensor]:
    found = {}
    for name in ("user_id", "item_id", "category", "history_item_id"):
        if name in spec.features:
            found[name] = torch.zeros(spec.num_ids(name), dtype=torch.bool)
            found[name][ids.get(name, range(spec.num_ids(name)))] = True
    return found


def test_an_id_that_training_never_saw_is_scored_as_an_unknown_one() -> None:
    spec = a_spec()
    model, batch = a_model(spec), a_batch()
    before = model(batch)
    assert model.needs_seen_ids() == ("user_id", "item_id", "category")
    model.set_seen_ids(present(spec, item_id=[4, 5], user_id=[1, 2, 3]))
    after = model(batch)
    torch.testing.assert_close(after[:2], before[:2])
    assert (after[2] - before[2]).abs() > 1e-3
    unknown = {**batch, "item_id": torch.tensor([0, 0, 0])}
    torch.testing.assert_close(model(unknown)[2], after[2])
    other = {**batch, "item_id": torch.tensor([7, 7, 7]), "category": torch.tensor([3, 3, 3])}
    torch.testing.assert_close(model.item_vectors(other)[2], model.item_vectors(batch)[2])
    assert (model.item_vectors(other)[2] - model.item_vectors({**other, "category": torch.ones(3).int()})[2]).any()


def test_id_0_is_an_item_like_others_where_no_id_is_reserved() -> None:
    batch = {**a_batch(), "item_id": torch.tensor([0, 0, 0])}
    free, taken = a_model(a_spec(reserved=False)), a_model(a_spec())
    assert (free(batch) - taken(batch)).abs().min() > 1e-3


def test_unknown_events_of_a_history_are_padding() -> None:
    spec = a_spec(lists=True)
    model = a_model(spec)
    model.set_seen_ids(present(spec, history_item_id=[1, 2]))
    batch = {**a_batch(), "history_gap": torch.zeros(3, 4)}
    both = {**batch, "history_item_id": torch.tensor([[1, 2, 5, 0]] * 3)}
    known = {**batch, "history_item_id": torch.tensor([[1, 2, 0, 0]] * 3)}
    none = {**batch, "history_item_id": torch.zeros(3, 4, dtype=torch.int64)}
    torch.testing.assert_close(model(both), model(known))
    assert (model(none) - model(known)).abs().min() > 1e-3
    assert torch.isfinite(model(none)).all()


def test_dropout_hides_the_ids_of_training_rows_alone() -> None:
    model, batch = a_model(a_spec(), id_dropout=0.5), a_batch()
    many = {name: values[:1].expand(2000) for name, values in batch.items()}
    hidden = {**many, "item_id": torch.zeros(2000, dtype=torch.int64)}
    shown, unknown = model.item_vectors(many)[0], model.item_vectors(hidden)[0]
    torch.manual_seed(1)
    found = model.train().item_vectors(many)
    is_hidden = (found - unknown).abs().max(1).values < 1e-6
    assert 0.45 < is_hidden.float().mean() < 0.55
    torch.testing.assert_close(found[~is_hidden], shown.expand_as(found[~is_hidden]))
    torch.testing.assert_close(model.eval().item_vectors(many), shown.expand(2000, -1))


def test_an_id_alone_is_never_hidden() -> None:
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"user_id": {"cardinality": 6}, "item_id": {"cardinality": 8}, "label": {}},
            "channel_spec": {"user": ["user_id"], "item": ["item_id"], "label": ["label"]},
        }
    )
    model = a_model(spec, id_dropout=0.9).train()
    batch = a_batch()
    assert torch.equal(model(batch), model.eval()(batch))  # same operations: nothing is drawn


# --- items that training never saw ----------------------------------------------------------------------------------

CATEGORIES, PER_CATEGORY, COLD = 6, 10, 3
"""Of each category's items, the last `COLD` are in no training row."""


def by_category(folder: Path) -> FeatureSpec:
    """60 users, each of whom takes items of one category; an item's id tells nothing of its category."""
    random = np.random.default_rng(0)
    order = random.permutation(CATEGORIES * PER_CATEGORY)
    category = order % CATEGORIES + 1
    warm = order // CATEGORIES < PER_CATEGORY - COLD
    users = np.repeat(np.arange(60), 12)
    items = np.array([random.choice(np.flatnonzero(warm & (category == user % CATEGORIES + 1))) for user in users])
    features = FeatureSpec.from_dict(
        {
            "feature_spec": {
                "user_id": {"dtype": "int32", "cardinality": 60},
                "item_id": {"dtype": "int32", "cardinality": len(category)},
                "category": {"dtype": "int32", "cardinality": CATEGORIES + 1},
                "label": {"dtype": "float32"},
            },
            "channel_spec": {"user": ["user_id"], "item": ["item_id", "category"], "label": ["label"]},
        }
    )
    folder.mkdir()
    with SplitWriter(folder, "train", features.features) as writer:
        writer.write(
            {
                "user_id": users.astype(np.int32),
                "item_id": items.astype(np.int32),
                "category": category[items].astype(np.int32),
                "label": np.ones(len(users), np.float32),
            }
        )
    ids = np.arange(len(category), dtype=np.int32)
    pq.write_table(pa.table({"item_id": ids, "category": category.astype(np.int32)}), folder / "items.parquet")
    sources: dict[str, tuple[Chunk, ...]] = {"train": writer.chunks}
    about = {"user_id": "user_id", "item_id": "item_id", "catalogues": {"item": "items.parquet"}}
    features.replace(sources=sources, metadata=about, folder=folder).save(folder)
    return FeatureSpec.load(folder)


def test_items_that_training_never_saw_are_ranked_by_their_features(tmp_path: Path) -> None:
    spec = by_category(tmp_path / "data")
    train(
        "two_tower",
        spec,
        tmp_path / "run",
        settings=TrainSettings(epochs=12, batch_size=128, negatives=1, learning_rate=0.01, tensorboard=False),
        model_settings=TwoTowerSettings(dim=8, embedding_dim=8, id_dropout=0.3, temperature=0.3, loss="softmax"),
    )
    model = bundle.load(tmp_path / "run").model
    assert model.traits.scores_unseen_items
    table = pq.read_table(spec.folder / "items.parquet", partitioning=None)
    items = {name: torch.tensor(table.column(name).to_pylist()) for name in ("item_id", "category")}
    seen = torch.zeros(len(table), dtype=torch.bool)
    seen[pq.read_table(spec.folder / "train", partitioning=None).column("item_id").to_pylist()] = True
    cold = ~seen[items["item_id"].long()]
    assert cold.sum() >= COLD * CATEGORIES
    users = torch.arange(60)
    with torch.inference_mode():
        scores = model.score_items({"user_id": users}, {name: values[cold] for name, values in items.items()})
    category = items["category"][cold][scores.topk(COLD, dim=1).indices]
    recall = (category == (users % CATEGORIES + 1)[:, None]).float().mean().item()
    assert recall > 0.8  # by chance 1 / 6


def test_the_softmax_on_labelled_rows_is_judged_by_auc(tmp_path: Path) -> None:
    spec = made_up.clicks(tmp_path / "clicks", num_rows=1000)
    result = train(
        "two_tower",
        spec,
        tmp_path / "run",
        settings=TrainSettings(epochs=2, tensorboard=False),
        model_settings=TwoTowerSettings(dim=4, embedding_dim=4, loss="softmax"),
    )
    assert result.best_epoch is not None
    trained = bundle.load(tmp_path / "run")
    assert set(trained.card.metrics["rows"]) == {"auc", "group_auc"}


def test_interactions_are_learnt_by_mixed_negatives() -> None:
    facts = DataFacts(task="interactions", rows=1_000_000, samples=5_000_000, positive_share=0.2, users=10, items=20)
    found = {name: value for name, (value, _) in TwoTower.defaults(facts).items()}
    assert found["train.negatives"] == 1
    assert found["train.batch_size"] == 2 * 2048
    assert found["train.learning_rate"] == 0.006
    assert "loss" not in found


def test_labelled_rows_are_learnt_by_their_labels() -> None:
    facts = DataFacts(task="clicks", rows=1000, samples=1000, positive_share=0.5, users=10, items=20)
    assert TwoTower.defaults(facts)["loss"][0] == "binary"
