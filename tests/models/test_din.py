"""DIN: its formula, its variants, what it reads and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recspec.base.errors import SettingsError, SpecError
from recspec.feature_spec import FeatureSpec
from recspec.models.base import SCORE_FLOATS, Model
from recspec.models.din import Din, DinSettings
from recspec.models.layers.batch import Batch


def a_spec(**extra: object) -> FeatureSpec:
    """A spec with every kind of feature that the model takes; `extra` is added to the context."""
    lists = {"length": 4, "padding": 0}
    features: dict[str, object] = {
        "user_id": {"cardinality": 7},
        "age": {"dtype": "float32"},
        "item_id": {"cardinality": 12},
        "category": {"cardinality": 5},
        "brand": {"cardinality": 6},
        "genres": {"cardinality": 9, **lists},
        "price": {"dtype": "float32"},
        "hour": {"cardinality": 25},
        "history_item_id": {"cardinality": 12, "vocabulary": "item_id", **lists},
        "history_category": {"cardinality": 5, "vocabulary": "category", **lists},
        "negative_history_item_id": {"cardinality": 12, "vocabulary": "item_id", **lists},
        "negative_history_category": {"cardinality": 5, "vocabulary": "category", **lists},
        "history_gap": {"dtype": "float32", "length": 4},
        "label": {"dtype": "float32"},
        **extra,
    }
    channels = {
        "user": ["user_id", "age"],
        "item": ["item_id", "category", "brand", "genres", "price"],
        "context": ["hour", *extra],
        "history": ["history_item_id", "history_category", "history_gap"],
        "negative_history": ["negative_history_item_id", "negative_history_category"],
        "label": ["label"],
    }
    return FeatureSpec.from_dict({"feature_spec": features, "channel_spec": channels})


def a_batch(rows: int = 6, length: int = 4) -> Batch:
    torch.manual_seed(1)
    present = torch.arange(length) < torch.randint(0, length + 1, (rows, 1))

    def ids(count: int, *shape: int) -> Tensor:
        return torch.randint(1, count, shape)

    return {
        "user_id": ids(7, rows),
        "age": torch.randn(rows),
        "item_id": ids(12, rows),
        "category": ids(5, rows),
        "brand": ids(6, rows),
        "genres": ids(9, rows, 4),
        "price": torch.randn(rows),
        "hour": ids(25, rows),
        "history_item_id": ids(12, rows, length) * present,
        "history_category": ids(5, rows, length) * present,
        "negative_history_item_id": ids(12, rows, length) * present,
        "negative_history_category": ids(5, rows, length) * present,
        "history_gap": torch.rand(rows, length) * present,
        "label": (torch.rand(rows) < 0.5).float(),
    }


ITEM = ("item_id", "category", "brand", "genres", "price")
SMALL = {"embedding_dim": 3, "hidden": (6, 4), "attention_hidden": (5,)}


def a_din(spec: FeatureSpec | None = None, **settings: object) -> Din:
    torch.manual_seed(0)
    model = Din(spec or a_spec(), DinSettings.model_validate({**SMALL, **settings}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


@pytest.mark.parametrize("attention", ["unit", "dot"])
@pytest.mark.parametrize("softmax", [False, True])
class TestAttention:
    def test_is_the_formula_row_by_row(self, attention: str, softmax: bool) -> None:
        model, batch = a_din(attention=attention, softmax=softmax), a_batch()
        tables = model.inputs.embeddings

        def vectors(item: Tensor, category: Tensor) -> Tensor:
            return tables({"item_id": item, "category": category}, ("item_id", "category"))

        rows = []
        for row in range(6):
            there = batch["history_item_id"][row] != 0
            target = vectors(batch["item_id"][row : row + 1], batch["category"][row : row + 1])
            happened = vectors(batch["history_item_id"][row][there], batch["history_category"][row][there])
            if attention == "dot":
                weights = happened @ target[0]
            else:
                t = target.expand_as(happened)
                weights = model.unit.out(model.unit.mlp(torch.cat([happened, t, happened - t, happened * t], 1)))[:, 0]
            weights = weights.softmax(0) if softmax else weights
            rows.append(torch.cat([target[0], weights @ happened]))
        side = model.inputs(batch, [model.histories.target(batch)])[1]
        assert side.shape == (6, 4 * 3 + 2)  # user_id, brand, genres, hour; age and price
        wanted = model.head(torch.cat([torch.stack(rows), side], dim=1))
        torch.testing.assert_close(model(batch), wanted)

    @pytest.mark.parametrize("floats", [1, 100, SCORE_FLOATS], ids=["pair by pair", "some", "all"])
    def test_scores_items_as_pairs(
        self, attention: str, softmax: bool, floats: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("recspec.models.base.SCORE_FLOATS", floats)
        model, batch = a_din(attention=attention, softmax=softmax), a_batch(11)
        items = {name: batch[name] for name in ITEM}
        request = {name: value[:5] for name, value in batch.items() if name in model.features() and name not in ITEM}
        wanted = model.pair_scores(request, items)
        torch.testing.assert_close(model.score_items(request, items), wanted)
        for rows, candidates in ((0, 11), (5, 0)):
            some = {name: value[:rows] for name, value in request.items()}
            assert model.score_items(some, {k: v[:candidates] for k, v in items.items()}).shape == (rows, candidates)


def test_reads_inputs_and_histories_and_neither_gaps_nor_sampled_ids() -> None:
    read = set(a_din().features())
    assert read == set(a_batch()) - {"label", "history_gap", "negative_history_item_id", "negative_history_category"}


def test_the_published_sizes_and_first_slopes() -> None:
    model = Din(a_spec(), DinSettings())
    widths = [tuple(each.weight.shape) for each in model.unit.mlp.layers]  # type: ignore[union-attr]
    assert widths == [(80, 4 * 32), (40, 80)]
    assert [each.out_features for each in model.head.mlp.layers] == [200, 80]  # type: ignore[union-attr]
    assert all((each.weight == 0.1).all() for each in model.head.mlp.activations)  # type: ignore[union-attr]
    assert set(model.inputs.embeddings.tables["16"]) == {"item_id", "category", "user_id", "brand", "genres", "hour"}


def test_the_logit_stays_in_fp32_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert a_din()(a_batch()).dtype == torch.float32


def test_lists_of_numbers_and_lacking_roles_are_refused() -> None:
    with pytest.raises(SettingsError, match="din: feature 'clicks' is a list of numbers, which din does not take"):
        a_din(a_spec(clicks={"dtype": "float32", "length": 3}))
    bare = FeatureSpec.from_dict(
        {
            "feature_spec": {"item_id": {"cardinality": 3}, "label": {}},
            "channel_spec": {"item": ["item_id"], "label": ["label"]},
        }
    )
    with pytest.raises(SpecError, match="Din needs a feature in the role 'history'"):
        a_din(bare)
    with pytest.raises(ValueError, match="every width is at least 1"):
        DinSettings(hidden=(0,))


# --- how a step is computed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "prelu"])
@pytest.mark.parametrize("rows", [1, 6])
def test_the_loss_and_its_gradients_are_those_of_the_logits(activation: str, rows: int) -> None:
    torch.manual_seed(0)
    model = Din(a_spec(), DinSettings.model_validate({"embedding_dim": 4, "hidden": (8, 4), "activation": activation}))
    batch = a_batch(rows)
    found = []
    for loss in (model.loss(batch), Model.loss(model, batch)):
        model.zero_grad()
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*found)


# --- vectors ---------------------------------------------------------------------------------------------------------


def test_vectors_are_those_of_one_table_a_vocabulary() -> None:
    batch, histories = a_batch(), (inputs := Din(a_spec(), DinSettings(embedding_dim=3)).inputs).histories
    tables = inputs.embeddings
    assert tables.ids_per_row("3") == 2 * (1 + 2 * 4) + 1 + 1 + 4 + 1
    events = histories.events(batch)
    asked = [histories.target(batch), *histories.at(batch, events, sampled=True)]
    (target, happened, sampled), side = inputs(batch, asked)
    assert target.shape == (6, 6)
    assert happened.shape == sampled.shape == (int((batch["history_item_id"] != 0).sum()), 6)
    for ids, categories, vectors in (
        ("item_id", "category", target),
        ("history_item_id", "history_category", happened),
        ("negative_history_item_id", "negative_history_category", sampled),
    ):
        flat = {"item_id": batch[ids], "category": batch[categories]}
        if flat["item_id"].dim() == 2:
            flat = {name: events.flat(value) for name, value in flat.items()}
        assert torch.equal(vectors, tables(flat, ("item_id", "category")))
    numbers = torch.stack([batch["age"], batch["price"]], dim=1)
    assert torch.equal(side, torch.cat([tables(batch, inputs.others), numbers], dim=1))


def test_only_what_is_asked_for_is_looked_up() -> None:
    batch, histories = a_batch(), (inputs := Din(a_spec(), DinSettings(embedding_dim=3)).inputs).histories
    items = {name: batch[name] for name in ("item_id", "category")}
    (target,), side = inputs(items, [histories.target(items)])
    assert (target.shape, side.shape) == ((6, 6), (6, 0))
    request = {name: value for name, value in batch.items() if name.startswith("history")}
    (happened,), side = inputs(request, histories.at(request, histories.events(request)))
    assert (happened.shape[1], side.shape) == (6, (6, 0))
