"""NeuMF: sizes, initial weights, and that every way it takes to a number gives the same number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from recspec.base import config
from recspec.base.errors import SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.models.facts import DataFacts
from recspec.models.layers import sampled_softmax
from recspec.models.layers.batch import Batch, drawn_of, log_expected_of, take
from recspec.models.neumf import NeuMF, NeuMFSettings, repeat_period

USERS, ITEMS = 30, 20
SMALL = {"factors": 4, "layers": (8, 6, 4), "dropout": 0.0}


def spec(users: int = USERS, items: int = ITEMS) -> FeatureSpec:
    features = {
        "user_id": {"dtype": "int32", "cardinality": users},
        "item_id": {"dtype": "int32", "cardinality": items},
        "label": {"dtype": "float32"},
    }
    return FeatureSpec.from_dict(
        {
            "feature_spec": features,
            "source_spec": {"train": [{"type": "csv", "features": list(features), "files": ["train.csv"]}]},
            "channel_spec": {"user": ["user_id"], "item": ["item_id"], "label": ["label"]},
        },
        Path(),
    )


def neumf(users: int = USERS, items: int = ITEMS, **settings: object) -> NeuMF:
    torch.manual_seed(0)
    model = NeuMF(spec(users, items), NeuMFSettings.model_validate({**SMALL, **settings}))
    for parameter in model.parameters():  # as small as they start, a mistake in them would hide in the tolerance
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def batch(num_rows: int, negatives: int = 0) -> Batch:
    """Positives, then their users over and over with other items."""
    generator = torch.Generator().manual_seed(1)
    user = torch.randint(USERS, (num_rows,), generator=generator, dtype=torch.int32)
    rows = num_rows * (1 + negatives)
    return {
        "user_id": user.repeat(1 + negatives),
        "item_id": torch.randint(ITEMS, (rows,), generator=generator, dtype=torch.int32),
        "label": (torch.arange(rows) < num_rows).float(),
    }


def logits_by_hand(model: NeuMF, rows: Batch) -> torch.Tensor:
    """The paper's equation, pair by pair."""
    user, item = rows["user_id"].long(), rows["item_id"].long()
    parts = []
    if model.settings.use_gmf:
        parts.append(model.gmf_user.weight[user] * model.gmf_item.weight[item])
    if model.settings.use_mlp:
        x = torch.cat([model.mlp_user.weight[user], model.mlp_item.weight[item]], dim=1)
        for layer in model.mlp.layers:
            x = layer(x).relu()
        parts.append(x)
    logits = model.out(torch.cat(parts, dim=1)).squeeze(1)
    return logits + model.item_bias.weight[item, 0] if model.settings.item_bias else logits


VARIANTS: list[dict[str, object]] = [
    {},
    {"item_bias": True},
    {"use_gmf": False},
    {"use_mlp": False, "item_bias": True},
    {"layers": (8, 6)},
]


# --- what it is ------------------------------------------------------------------------------------------------------


def test_parameters_at_the_published_sizes() -> None:
    with torch.device("meta"):
        model = NeuMF(spec(138_493, 26_744), NeuMFSettings())
        assert model.num_parameters() == 31_832_577
        hidden = sum(weight.numel() for name, weight in model.named_parameters() if name.startswith(("mlp.", "out.")))
        assert hidden == 107_073
        with_bias = NeuMF(spec(138_493, 26_744), NeuMFSettings(item_bias=True))
        assert with_bias.num_parameters() == 31_832_577 + 26_744


@pytest.mark.parametrize(
    ("variant", "names"),
    [
        ({"use_mlp": False}, {"gmf_user", "gmf_item", "out"}),
        ({"use_gmf": False}, {"mlp_user", "mlp_item", "mlp", "out"}),
        ({"item_bias": True}, {"gmf_user", "gmf_item", "mlp_user", "mlp_item", "mlp", "item_bias", "out"}),
    ],
)
def test_only_what_the_settings_ask_for_has_weights(variant: dict[str, object], names: set[str]) -> None:
    assert {name.split(".")[0] for name, _ in neumf(**variant).named_parameters()} == names


def test_weights_start_as_published() -> None:
    torch.manual_seed(0)
    model = NeuMF(spec(2000, 3000), NeuMFSettings(item_bias=True))
    for table in (model.gmf_user, model.gmf_item, model.mlp_user, model.mlp_item):
        assert table.weight.mean().item() == pytest.approx(0, abs=1e-4)
        assert table.weight.std().item() == pytest.approx(0.01, rel=0.01)
    for layer, (x_dim, y_dim) in zip(model.mlp.layers, [(256, 256), (256, 128), (128, 64)], strict=True):
        assert isinstance(layer, torch.nn.Linear)
        assert layer.weight.shape == (y_dim, x_dim)
        _assert_uniform(layer.weight, (6 / (x_dim + y_dim)) ** 0.5)
    _assert_uniform(model.out.weight, (3 / 128) ** 0.5)
    assert not model.item_bias.weight.any()


def _assert_uniform(weight: torch.Tensor, bound: float) -> None:
    assert weight.abs().max().item() <= bound
    assert weight.abs().max().item() > 0.95 * bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers": [255, 64]}, r"the first of layers is 255, .* it must be even, as 256"),
        ({"layers": [256, 0]}, r"layers are \[256, 0\]; every width is at least 1"),
        ({"layers": [256]}, r"setting 'layers' is \[256\]: expected a list of at least 2"),
        ({"use_gmf": False, "use_mlp": False}, r"use_gmf and use_mlp are both false; a model needs one of them"),
        ({"dropout": 1.0}, r"setting 'dropout' is 1.0: input should be less than 1"),
        ({"factor": 8}, r"unknown setting 'factor' \(did you mean 'factors'\?\)"),
    ],
)
def test_settings_that_make_no_model_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        config.build(NeuMFSettings, "settings", values)


# --- the same function, whichever way --------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_rows", [1, 7, 25, 100])  # fewer than items, than users, and more than both
def test_logits_are_the_papers_equation(variant: dict[str, object], num_rows: int) -> None:
    model, rows = neumf(**variant), batch(num_rows)
    torch.testing.assert_close(model(rows), logits_by_hand(model, rows))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("num_rows", "negatives"), [(1, 0), (3, 2), (20, 4), (80, 3), (25, 0)])
@pytest.mark.parametrize(("l2", "l2_hidden"), [(0.0, 0.0), (0.3, 0.7)])
def test_loss_and_gradients_are_the_equations_and_count_each_row_that_a_batch_uses_once(
    variant: dict[str, object], num_rows: int, negatives: int, l2: float, l2_hidden: float
) -> None:
    model, rows = neumf(**variant, l2=l2, l2_hidden=l2_hidden), batch(num_rows, negatives)
    users, items = rows["user_id"].unique().long(), rows["item_id"].unique().long()
    penalty = torch.zeros(())
    if model.settings.use_gmf:
        penalty = penalty + l2 * (model.gmf_user.weight[users] ** 2).sum()
        penalty = penalty + l2 * (model.gmf_item.weight[items] ** 2).sum()
    if model.settings.item_bias:
        penalty = penalty + l2 * (model.item_bias.weight[items] ** 2).sum()
    if model.settings.use_mlp:
        weight, bias = model.mlp.first.weight, model.mlp.first.bias
        penalty = penalty + l2_hidden * ((model.mlp_user.weight[users] @ weight[:, :4].T + bias) ** 2).sum()
        penalty = penalty + l2_hidden * ((model.mlp_item.weight[items] @ weight[:, 4:].T) ** 2).sum()
    expected = F.binary_cross_entropy_with_logits(logits_by_hand(model, rows), rows["label"])
    _assert_same_loss(model, rows, expected + penalty / len(rows["label"]))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("num_rows", "negatives"), [(1, 0), (3, 2), (20, 4)])
def test_each_positive_pays_for_its_user_and_its_item(
    variant: dict[str, object], num_rows: int, negatives: int
) -> None:
    model, rows = neumf(**variant, l2_positives=0.3), batch(num_rows, negatives)
    expected = F.binary_cross_entropy_with_logits(logits_by_hand(model, rows), rows["label"])
    penalty = squares_by_hand(model, rows)[:num_rows].sum()
    _assert_same_loss(model, rows, expected + 0.3 * penalty / len(rows["label"]))


def squares_by_hand(model: NeuMF, rows: Batch) -> torch.Tensor:
    """The squares of the rows of each pair's user and item."""
    user, item, squares = rows["user_id"].long(), rows["item_id"].long(), torch.zeros(len(rows["label"]))
    if model.settings.use_gmf:
        squares = squares + (model.gmf_user.weight[user] ** 2).sum(1) + (model.gmf_item.weight[item] ** 2).sum(1)
    if model.settings.use_mlp:
        weight, bias = model.mlp.first.weight, model.mlp.first.bias
        squares = squares + ((model.mlp_user.weight[user] @ weight[:, :4].T + bias) ** 2).sum(1)
        squares = squares + ((model.mlp_item.weight[item] @ weight[:, 4:].T) ** 2).sum(1)
    return squares


def test_the_softmax_worked_by_hand() -> None:
    # Two draws among four items: each is expected half a time. log(e^0 + e^0 / .5 + e^log(2) / .5) = log 7.
    loss = sampled_softmax(torch.tensor([0.0]), torch.tensor([[1.0], [2.0]]).log(), torch.full((2, 1), 0.5).log())
    torch.testing.assert_close(loss, torch.tensor([7.0]).log())
    left_out = sampled_softmax(torch.tensor([0.0]), torch.tensor([[-torch.inf], [0.0]]), torch.full((2, 1), 0.5).log())
    torch.testing.assert_close(left_out, torch.tensor([3.0]).log())


def with_drawn(rows: Batch, drawn: torch.Tensor, expected: float) -> Batch:
    return {**rows, drawn_of("item_id"): drawn, log_expected_of("item_id"): torch.full(drawn.shape, expected).log()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_with_every_item_drawn_once_the_softmax_is_the_cross_entropy_over_all_items(variant: dict[str, object]) -> None:
    model, rows = neumf(**variant, loss="softmax"), batch(7)
    every = torch.arange(ITEMS, dtype=torch.int32).expand(7, ITEMS)
    pairs = {"user_id": rows["user_id"].repeat_interleave(ITEMS), "item_id": every.reshape(-1)}
    logits = logits_by_hand(model, pairs).view(7, ITEMS)
    _assert_same_loss(model, with_drawn(rows, every, 1.0), F.cross_entropy(logits, rows["item_id"].long()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_softmax_takes_the_penalties_of_its_positives(variant: dict[str, object]) -> None:
    drawn = torch.randint(ITEMS, (25, 3), generator=torch.Generator().manual_seed(2))
    rows = with_drawn(batch(25), drawn, 3 / ITEMS)
    plain = neumf(**variant, loss="softmax").loss(rows)
    model = neumf(**variant, loss="softmax", l2_positives=0.3)
    torch.testing.assert_close(model.loss(rows), plain + 0.3 * squares_by_hand(model, rows).mean())
    every = neumf(**variant, loss="softmax", l2=0.3, l2_hidden=0.7)
    once = neumf(**variant, l2=0.3, l2_hidden=0.7).loss(batch(25)) - neumf(**variant).loss(batch(25))
    torch.testing.assert_close(every.loss(rows), plain + once)


def test_rows_with_label_0_add_nothing_to_the_softmax() -> None:
    model, rows = neumf(loss="softmax", l2_positives=0.3), batch(4)
    drawn = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    rows["label"] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    alone = model.loss(take(with_drawn(rows, drawn, 0.1), torch.tensor([0, 3])))
    torch.testing.assert_close(model.loss(with_drawn(rows, drawn, 0.1)), alone / 2)


def test_rows_without_drawn_negatives_have_a_cross_entropy_each() -> None:
    torch.testing.assert_close(neumf(loss="softmax").loss(batch(5)), neumf().loss(batch(5)))
    assert neumf(loss="softmax").loss_needs().compares_negatives
    assert not neumf(loss="softmax").gives_logits
    assert neumf().gives_logits
    assert not neumf(loss="softmax").out.bias.requires_grad
    assert not neumf().loss_needs().compares_negatives


def proposed(rows: int, **others: object) -> dict[str, object]:
    facts = {"task": "interactions", "rows": rows, "samples": 5 * rows, "positive_share": 0.2, "users": 10, "items": 20}
    return {name: value for name, (value, _) in NeuMF.defaults(DataFacts(**{**facts, **others})).items()}  # type: ignore[arg-type]


def test_interactions_get_factors_with_a_softmax() -> None:
    assert proposed(7403) == {
        "use_mlp": False,
        "factors": 128,
        "item_bias": True,
        "l2_positives": 0.03,
        "loss": "softmax",
        "train.negatives": 15,
        "train.batch_size": 8192,
        "train.learning_rate": 0.002,
    }


@pytest.mark.parametrize(
    ("rows", "positives", "rate"),
    [(1, 512, 0.002), (409_599, 512, 0.002), (409_600, 1024, 0.0028), (10**6, 2048, 0.004), (10**9, 8192, 0.008)],
)
def test_an_epoch_of_many_rows_has_larger_steps(rows: int, positives: int, rate: float) -> None:
    found = proposed(rows)
    assert (found["train.batch_size"], found["train.learning_rate"]) == (16 * positives, rate)


def test_prepared_negatives_are_not_compared_with_drawn_ones() -> None:
    assert "loss" not in proposed(100, samples=100, positive_share=0.2)
    assert proposed(100, task="clicks") == {}
    assert proposed(10, users=500_000, items=500_001)["factors"] == 64


def _assert_same_loss(model: NeuMF, rows: Batch, expected: torch.Tensor) -> None:
    loss = model.loss(rows)
    torch.testing.assert_close(loss, expected)
    parameters = [each for each in model.parameters() if each.requires_grad]
    for ours, by_hand in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(ours, by_hand)


def test_loss_with_dropout_learns_and_eval_has_none() -> None:
    torch.manual_seed(3)
    model, rows = neumf(users=USERS, layers=(64, 128, 64), dropout=0.5), batch(400, 4)
    losses = torch.stack([model.loss(rows).detach() for _ in range(3)])
    assert len(losses.unique()) == 3
    model.eval()
    assert torch.equal(model.loss(rows), model.loss(rows))  # same operations: nothing is drawn
    optimizer = torch.optim.Adam(model.train().parameters(), lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        loss = model.loss(rows)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.6 * losses.min().item()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("block", [1, 1 << 20])  # floats: one user at a time, or all at once
def test_scores_of_all_pairs_are_the_logits_of_each(
    variant: dict[str, object], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recspec.models.neumf.floats_in_cache", lambda _: block)
    model = neumf(**variant).eval()
    users, items = torch.tensor([3, 0, 29], dtype=torch.int32), torch.randperm(ITEMS)[:13]
    with torch.no_grad():
        scores = model.score_items({"user_id": users}, {"item_id": items})
        pairs = model({"user_id": users.repeat_interleave(13), "item_id": items.repeat(3)})
    torch.testing.assert_close(scores, pairs.view(3, 13))


def test_bf16_is_close_to_fp32() -> None:
    model, rows = neumf(layers=(64, 64, 32), l2=0.1, l2_hidden=0.1), batch(50, 4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(rows)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, model.loss(rows), rtol=0.02, atol=0)


# --- repetition ------------------------------------------------------------------------------------------------------


def periods() -> Iterator[tuple[list[int], int]]:
    yield [], 0
    yield [4], 1
    yield [4, 4, 4], 1
    yield [1, 2, 3], 3
    yield [1, 2, 1, 2, 1, 2], 2
    yield [1, 2, 1, 2, 1], 5
    yield [1, 1, 2, 1, 1, 2], 3
    yield [1, 2, 1, 3], 4
    yield [1, 2, 1, 2, 1, 3], 6


@pytest.mark.parametrize(("ids", "period"), list(periods()))
def test_the_period_of_repeated_ids(ids: list[int], period: int) -> None:
    assert repeat_period(torch.tensor(ids, dtype=torch.int64)) == period
