"""Wide & Deep: sizes of the published model, worked cases of both parts, shapes of data it must take."""

from __future__ import annotations

import pytest
import torch

from recspec.base.errors import SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.models.wide_deep import WideDeep, WideDeepSettings
from tests.made_up import OUTBRAIN_CARDINALITIES, OUTBRAIN_WIDTHS, like_outbrain


def a_spec(**features: dict[str, object]) -> FeatureSpec:
    """A specification with the given features in the role context, and a label."""
    return FeatureSpec.from_dict(
        {
            "feature_spec": {**features, "label": {"dtype": "float32"}},
            "channel_spec": {"context": list(features), "label": ["label"]},
        }
    )


TWO_IDS = {"a": {"cardinality": 3}, "b": {"cardinality": 4}}
MIXED = {**TWO_IDS, "tags": {"cardinality": 5, "length": 3, "padding": 0}, "price": {"dtype": "float32"}}


def build(spec: FeatureSpec, **settings: object) -> WideDeep:
    torch.manual_seed(0)
    defaults = {"hidden": (4,), "dropout": 0.0, "embedding_dim": 2}
    return WideDeep(spec, WideDeepSettings.model_validate({**defaults, **settings})).eval()


def parameters_of(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_published_sizes_give_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = WideDeep(like_outbrain(), WideDeepSettings(embedding_dims=OUTBRAIN_WIDTHS))
    assert model.deep.embeddings.width == 1235
    assert model.deep.width == 1248
    assert parameters_of(model.deep.embeddings) == 85_616_076
    assert parameters_of(model.deep.mlp) + parameters_of(model.deep.out) == 5_478_401
    assert parameters_of(model.wide) == sum(OUTBRAIN_CARDINALITIES.values()) + 13 + 1 == 682_768
    assert model.num_parameters() == 91_777_245


def test_the_linear_part_worked_by_hand() -> None:
    wide = build(a_spec(**MIXED), use_deep=False, crosses=[["a", "b"]], cross_buckets=12)
    with torch.no_grad():
        # Rows of the store: a 0-2, b 3-6, tags 7-11.
        wide.wide.tables.stores["1"].copy_(torch.arange(12.0).view(12, 1))
        wide.wide.slopes.fill_(10.0)
        wide.wide.bias.fill_(0.25)
        wide.wide.cross_weights.copy_(100 * torch.arange(12.0).view(12, 1))
    batch = {
        "a": torch.tensor([1, 2]),
        "b": torch.tensor([3, 0]),
        "price": torch.tensor([0.5, -2.0]),
        "tags": torch.tensor([[1, 4, 0], [0, 0, 0]]),
    }
    # Row 1: a=1 -> 1; b=3 -> 6; tags 1, 4 -> 8 + 11; 10 x .5 = 5; cross 1 x 4 + 3 = 7 -> 700; bias .25.
    # Row 2: a=2 -> 2; b=0 -> 3; no tag; 10 x -2 = -20; cross 2 x 4 + 0 = 8 -> 800; bias .25.
    torch.testing.assert_close(wide(batch), torch.tensor([731.25, 785.25]))


def test_the_deep_part_worked_by_hand() -> None:
    model = build(a_spec(**MIXED), use_wide=False, hidden=(2,), embedding_dim=1, combiner="mean")
    with torch.no_grad():
        model.deep.embeddings.stores["1"].copy_(torch.arange(12.0).view(12, 1))
        # Input: a, b, tags (mean), price.
        model.deep.mlp.first.weight.copy_(torch.tensor([[1.0, 1.0, 2.0, 4.0], [-1.0, 0.0, 0.0, 0.0]]))
        model.deep.out.weight.copy_(torch.tensor([[0.5, 7.0]]))
        model.deep.out.bias.fill_(1.0)
    batch = {
        "a": torch.tensor([1, 2]),
        "b": torch.tensor([3, 0]),
        "price": torch.tensor([0.5, -2.0]),
        "tags": torch.tensor([[1, 4, 0], [0, 0, 0]]),
    }
    # Row 1: 1 + 6 + 2 x (8 + 11) / 2 + 4 x .5 = 28, the second unit is stopped: .5 x 28 + 1 = 15.
    # Row 2: 2 + 3 + 0 - 8 = -3, both are stopped: 1.
    torch.testing.assert_close(model(batch), torch.tensor([15.0, 1.0]))


def test_both_parts_add_up() -> None:
    spec = a_spec(**MIXED)
    both = build(spec)
    with torch.no_grad():
        both.wide.tables.stores["1"].normal_()
        both.wide.slopes.normal_()
    batch = {
        "a": torch.tensor([1]),
        "b": torch.tensor([3]),
        "price": torch.tensor([0.5]),
        "tags": torch.tensor([[1, 4, 0]]),
    }
    torch.testing.assert_close(both(batch), both.wide(batch) + both.deep(batch))


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_padding_changes_nothing(combiner: str) -> None:
    spec = a_spec(tags={"cardinality": 6, "length": 4, "padding": 0})
    model = build(spec, combiner=combiner)
    short = {"tags": torch.tensor([[2, 5]])}
    long = {"tags": torch.tensor([[2, 0, 5, 0]])}
    torch.testing.assert_close(model(short), model(long))


def test_a_one_hot_feature_selects_a_column_of_the_first_layer() -> None:
    model = build(a_spec(**TWO_IDS), indicators=["b"], use_wide=False)
    assert list(model.deep.embeddings.widths) == ["a"]
    assert model.deep.width == 2 + 4
    inputs = model.deep.inputs({"a": torch.tensor([0]), "b": torch.tensor([3])})
    assert inputs[0, 2:].tolist() == [0, 0, 0, 1]


def test_a_one_hot_list_counts_its_ids_without_padding() -> None:
    model = build(a_spec(tags={"cardinality": 4, "length": 4, "padding": 0}), indicators=["tags"], use_wide=False)
    assert model.deep.inputs({"tags": torch.tensor([[1, 3, 1, 0]])}).tolist() == [[0, 2, 0, 1]]


def test_combinations_have_a_weight_each_while_they_fit_and_share_by_hash_beyond() -> None:
    ids = {"a": torch.arange(3).repeat_interleave(4), "b": torch.arange(4).repeat(3)}
    fits = build(a_spec(**TWO_IDS), crosses=[["a", "b"]], cross_buckets=12, use_deep=False)
    assert fits.wide.bucket(ids, ("a", "b")).tolist() == list(range(12))
    hashed = build(a_spec(**TWO_IDS), crosses=[["a", "b"]], cross_buckets=11, use_deep=False)
    buckets = hashed.wide.bucket(ids, ("a", "b"))
    assert 0 <= int(buckets.min()) <= int(buckets.max()) < 11
    assert len(buckets.unique()) > 5


def test_a_hash_spreads_evenly() -> None:
    spec = a_spec(a={"cardinality": 1000}, b={"cardinality": 1000})
    model = build(spec, crosses=[["a", "b"]], cross_buckets=100, use_deep=False)
    ids = {"a": torch.arange(1000).repeat(100), "b": torch.arange(100).repeat_interleave(1000)}
    counts = model.wide.bucket(ids, ("a", "b")).bincount(minlength=100)
    assert 850 < int(counts.min()) <= int(counts.max()) < 1150


def test_widths_by_rule() -> None:
    model = build(a_spec(a={"cardinality": 10_000}, b={"cardinality": 16}), embedding_dim="rule")
    assert model.deep.embeddings.widths == {"a": 60, "b": 12}


def test_parts_read_the_features_they_are_given() -> None:
    model = build(a_spec(**MIXED), wide_features=["a"], deep_features=["b", "price"])
    assert model.wide.features == ("a",)
    assert model.features() == ("a", "b", "price")


@pytest.mark.parametrize("crosses", [(), (("a", "b"),), (("b", "c"),)])
def test_items_are_scored_as_their_pairs_whatever_the_crosses(crosses: tuple[tuple[str, str], ...]) -> None:
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {
                "a": {"cardinality": 5},
                "price": {},
                "b": {"cardinality": 7},
                "c": {"cardinality": 3},
                "tags": {"cardinality": 6, "length": 3, "padding": 0},
                "label": {},
            },
            "channel_spec": {"context": ["a", "price"], "item": ["b", "c", "tags"], "label": ["label"]},
        }
    )
    model = build(spec, crosses=crosses, indicators=["c"], embedding_dims={"b": 3})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    request = {"a": torch.tensor([1, 4]), "price": torch.tensor([0.5, -1.0])}
    items = {
        "b": torch.arange(7),
        "c": torch.arange(7) % 3,
        "tags": torch.tensor([[1, 2, 0], [0, 0, 0], [5, 0, 0], [1, 1, 1], [2, 3, 4], [3, 0, 0], [4, 5, 0]]),
    }
    with torch.inference_mode():
        torch.testing.assert_close(model.score_items(request, items), model.pair_scores(request, items))
        none = {name: tensor[:0] for name, tensor in items.items()}
        assert model.score_items(request, none).shape == (2, 0)


def test_every_wrong_name_is_told_at_once() -> None:
    with pytest.raises(SettingsError) as told:
        build(
            a_spec(**MIXED),
            wide_features=["pric"],
            embedding_dims={"price": 3},
            indicators=["z"],
            crosses=[["a", "tags"]],
        )
    message = str(told.value)
    assert "wide_features: unknown feature 'pric'" in message
    assert "did you mean 'price'" in message
    assert "embedding_dims: unknown categorical feature 'price'" in message
    assert "indicators: unknown categorical feature 'z'" in message
    assert "crosses: unknown scalar categorical feature 'tags'" in message


def test_a_feature_with_many_ids_is_not_taken_one_hot() -> None:
    with pytest.raises(SettingsError, match="indicators: feature 'a' has 20,000 ids, and one-hot takes at most 10,000"):
        build(a_spec(a={"cardinality": 20_000}), indicators=["a"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_wide": False, "use_deep": False}, "use_wide and use_deep are both false"),
        ({"use_wide": False, "crosses": [["a", "b"]]}, "crosses belong to the linear part, and use_wide is false"),
        ({"crosses": [["a"]]}, "a cross joins two features or more, each once"),
        ({"embedding_dim": 0}, "a width is at least 1; for a feature without an embedding see `indicators`"),
        ({"hidden": [8, 0]}, "every width is at least 1"),
    ],
)
def test_settings_that_make_no_model_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WideDeepSettings.model_validate(settings)


def test_a_list_of_numbers_is_refused() -> None:
    with pytest.raises(SettingsError, match="feature 'prices' is a list of numbers, which wide_deep does not take"):
        build(a_spec(prices={"dtype": "float32", "length": 3}, **TWO_IDS))


def test_the_first_layers_parts_are_kept_by_a_model_that_only_answers() -> None:
    """And let go when it is trained, loaded or moved: fused optimizers change weights without a trace."""
    model = build(a_spec(**MIXED), hidden=(8, 4))
    items = {"b": torch.arange(4), "tags": torch.tensor([[1, 2, 0]] * 4)}
    request = {"a": torch.tensor([2]), "price": torch.tensor([0.5])}

    def scores_are_those_of_pairs() -> None:
        with torch.inference_mode():
            torch.testing.assert_close(model.score_items(request, items), model.pair_scores(request, items))

    scores_are_those_of_pairs()
    assert model.deep._first_parts is None
    model.prepare_for_inference()
    scores_are_those_of_pairs()
    assert model.deep._first_parts is not None
    assert len(model.deep._first_parts) == 2
    before = model.state_dict()
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    model.loss({**request, **{name: tensor[:1] for name, tensor in items.items()}, "label": torch.ones(1)}).backward()
    optimizer.step()
    model.eval()
    scores_are_those_of_pairs()
    for change in (
        lambda: model.load_state_dict({name: 2 * value for name, value in before.items()}),
        lambda: model.load_state_dict({name: 3 * value for name, value in before.items()}, assign=True),
        lambda: model.double().float(),
    ):
        model.prepare_for_inference()
        scores_are_those_of_pairs()
        change()
        assert model.deep._first_parts is None
        scores_are_those_of_pairs()
