"""Dropout whose masks are drawn a bit at a time, and embedding tables laid side by side."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recspec.feature_spec import FeatureSpec
from recspec.layers import SMALL, Embeddings, Mlp, bernoulli_words, beside_dots, dot_interaction, relu_dropout_

ROWS, WIDTH = 1024, 128
assert ROWS * WIDTH > SMALL


def dropped(x: Tensor, p: float) -> Tensor:
    kept, scale = relu_dropout_(x.clone(), p, training=True)
    return kept * scale


@pytest.mark.parametrize("p", [0.5, 0.1, 0.25, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_units_are_dropped_at_the_rate_and_the_mean_stays(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    y = dropped(torch.ones(ROWS, WIDTH, dtype=dtype), p).double()
    count = ROWS * WIDTH
    # Five standard deviations of a share of `count` independent draws.
    assert (y == 0).double().mean().item() == pytest.approx(p, abs=5 * (p * (1 - p) / count) ** 0.5 + 2**-17)
    assert y.max().item() == pytest.approx(1 / (1 - p), rel=1e-2 if dtype == torch.bfloat16 else 1e-4)
    assert y.mean().item() == pytest.approx(1, abs=5 * (p / (1 - p) / count) ** 0.5 + 1e-2 * (dtype == torch.bfloat16))


@pytest.mark.parametrize("p", [0.5, 0.3])
def test_units_are_dropped_independently_of_each_other(p: float) -> None:
    torch.manual_seed(1)
    kept = (dropped(torch.ones(4096, 64), p) > 0).double() - (1 - p)
    rows = kept.T @ kept / (len(kept) * p * (1 - p))  # correlations between units
    off_diagonal = rows - torch.diag(rows.diagonal())
    assert off_diagonal.abs().max().item() < 6 / len(kept) ** 0.5
    flat = kept.view(-1)
    for distance in (1, 2, 31, 32, 64, 4096, 8192, 100_000):  # words, slices and rows
        correlation = (flat[distance:] * flat[:-distance]).mean().item() / (p * (1 - p))
        assert abs(correlation) < 6 / len(flat) ** 0.5


def test_each_draw_is_new_and_follows_torchs_seed() -> None:
    torch.manual_seed(2)
    first, second = dropped(torch.ones(ROWS, WIDTH), 0.5), dropped(torch.ones(ROWS, WIDTH), 0.5)
    assert not torch.equal(first, second)
    torch.manual_seed(2)
    assert torch.equal(dropped(torch.ones(ROWS, WIDTH), 0.5), first)


def test_kept_units_are_their_relu() -> None:
    torch.manual_seed(3)
    x = torch.randn(ROWS + 3, WIDTH + 1)  # no multiple of 32
    y = dropped(x, 0.5)
    kept = y != 0
    torch.testing.assert_close(y[kept], 2 * x.relu()[kept])
    assert kept[x > 0].double().mean().item() == pytest.approx(0.5, abs=0.01)
    assert not kept[x <= 0].any()


def test_the_gradient_passes_where_the_output_is_not_zero() -> None:
    torch.manual_seed(4)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight = torch.randn(ROWS, WIDTH)
    y, scale = relu_dropout_(x * 1, 0.25, training=True)
    (y * scale * weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.where(y != 0, weight * scale, 0))


@pytest.mark.parametrize(("p", "training"), [(0.5, False), (0.0, True)])
def test_without_dropout_it_is_relu(p: float, training: bool) -> None:
    x = torch.randn(ROWS, WIDTH)
    y, scale = relu_dropout_(x.clone(), p, training=training)
    assert torch.equal(y, x.relu())
    assert scale == 1.0


def test_small_and_strided_tensors_take_torchs_own_dropout() -> None:
    for x in (torch.ones(8, 8), torch.ones(ROWS, 2 * WIDTH)[:, ::2]):
        torch.manual_seed(5)
        expected = F.dropout(x, 0.5)
        torch.manual_seed(5)
        y, scale = relu_dropout_(x.clone() if x.is_contiguous() else x, 0.5, training=True)
        assert scale == 1.0
        assert torch.equal(y, expected)


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("probability", [0.5, 0.75, 0.3, 1 / 3])
def test_every_bit_of_a_word_has_the_probability(bits: int, probability: float) -> None:
    torch.manual_seed(6)
    words = bernoulli_words(20_001, probability, bits)
    assert len(words) == 20_001
    places = torch.arange(bits, dtype=words.dtype)
    shares = ((words.view(-1, 1) >> places) & 1).double().mean(0)
    deviation = (probability * (1 - probability) / len(words)) ** 0.5
    assert (shares - probability).abs().max().item() < 6 * deviation


def test_certain_bits_are_all_ones() -> None:
    assert bernoulli_words(3, 1.0, 32).tolist() == [-1, -1, -1]


def test_mlp_without_dropout_is_linear_layers_with_relu() -> None:
    torch.manual_seed(7)
    mlp = Mlp([6, 5, 4])
    x = torch.randn(3, 6)
    hidden = (x @ mlp.first.weight.T + mlp.first.bias).relu()
    second = mlp.layers[1]
    torch.testing.assert_close(mlp(x), (hidden @ second.weight.T + second.bias).relu())  # type: ignore[operator]


def test_mlp_takes_any_number_of_leading_dimensions() -> None:
    mlp = Mlp([6, 5, 4]).eval()
    x = torch.randn(2, 3, 6)
    assert mlp(x).shape == (2, 3, 4)
    torch.testing.assert_close(mlp(x)[1], mlp(x[1]))


def test_mlp_with_dropout_has_the_mean_of_many_draws_in_its_linear_part() -> None:
    # With one hidden layer and positive units, E[dropout(h)] = h; the second layer sees it through its weights.
    torch.manual_seed(8)
    mlp = Mlp([4, 64, 3], dropout=0.5)
    for parameter in mlp.parameters():
        parameter.data.abs_()  # nothing is stopped by ReLU
    x = torch.rand(4, 4)
    expected = mlp.eval()(x)
    many = mlp.train()(x.repeat(20_000, 1)).view(20_000, 4, 3).mean(0)
    torch.testing.assert_close(many, expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("width", [79, 80, 81])
def test_a_width_that_is_no_multiple_of_8_changes_nothing_but_the_speed(width: int) -> None:
    torch.manual_seed(10)
    mlp, x = Mlp([width, 32]), torch.randn(ROWS, width, requires_grad=True)
    assert x.numel() > SMALL
    assert mlp.first.weight.shape == (32, width)
    y = F.relu(F.linear(x, mlp.first.weight, mlp.first.bias))
    slope = torch.randn_like(y)
    places = (x, mlp.first.weight, mlp.first.bias)
    expected = torch.autograd.grad(y, places, slope)
    found = mlp(x)
    torch.testing.assert_close(found, y)
    torch.testing.assert_close(torch.autograd.grad(found, places, slope), expected)


def test_mlp_starts_glorot_uniform() -> None:
    torch.manual_seed(9)
    weight = Mlp([300, 500]).first.weight
    bound = (6 / 800) ** 0.5
    assert weight.abs().max().item() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.01)


# --- dot products ----------------------------------------------------------------------------------------------------


def test_a_vector_beside_dot_products_worked_by_hand() -> None:
    first, others = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0, 5.0, 6.0]])
    # (1, 2), (3, 4), (5, 6): 3 + 8, 5 + 12, 15 + 24.
    assert beside_dots(first, others).tolist() == [[1.0, 2.0, 11.0, 17.0, 39.0]]


@pytest.mark.parametrize("rows", [0, 1, 255, 256, 257, 600])
@pytest.mark.parametrize("others", [1, 3, 4, 26])
def test_a_vector_beside_dot_products_in_blocks_is_that_of_all_rows_at_once(rows: int, others: int) -> None:
    torch.manual_seed(11)
    dim = 5
    vectors = [torch.randn(rows, width, dtype=torch.float64, requires_grad=True) for width in (dim, others * dim)]
    dots = dot_interaction(torch.cat(vectors, dim=1).view(rows, 1 + others, dim))
    expected = torch.cat([vectors[0], dots], dim=1)
    found = beside_dots(*vectors)
    torch.testing.assert_close(found, expected)
    slope = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, vectors, slope), torch.autograd.grad(expected, vectors, slope)
    )


def test_a_vector_beside_dot_products_is_the_same_under_autocast() -> None:
    torch.manual_seed(12)
    first, others = torch.randn(300, 8), torch.randn(300, 24)
    with torch.autocast("cpu", torch.bfloat16):
        found = beside_dots(first, others)
    torch.testing.assert_close(found.float(), beside_dots(first, others), rtol=0.02, atol=0.1)


# --- embeddings ------------------------------------------------------------------------------------------------------


def tables(**settings: object) -> Embeddings:
    """Widths 2 and 3; `seen` shares the table of `page`."""
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {
                "page": {"cardinality": 4}, "hour": {"cardinality": 3}, "shop": {"cardinality": 5},
                "seen": {"cardinality": 4, "length": 3, "padding": 0, "vocabulary": "page"}, "label": {},
            },
            "channel_spec": {"context": ["page", "hour", "shop", "seen"], "label": ["label"]},
        }
    )  # fmt: skip
    return Embeddings(spec, {"page": 2, "hour": 2, "shop": 3, "seen": 2}, **settings)  # type: ignore[arg-type]


BATCH = {
    "page": torch.tensor([1, 3], dtype=torch.int32),
    "hour": torch.tensor([0, 2], dtype=torch.int32),
    "shop": torch.tensor([4, 0]),
    "seen": torch.tensor([[2, 3, 0], [0, 0, 0]]),
}


@pytest.mark.parametrize(("combiner", "pooled"), [("sum", [10.0, 12.0]), ("mean", [5.0, 6.0])])
def test_vectors_stand_side_by_side_and_lists_are_pooled_without_padding(
    combiner: Literal["sum", "mean"], pooled: list[float]
) -> None:
    embeddings = tables(combiner=combiner)
    with torch.no_grad():  # page: rows 0-3, hour: rows 4-6
        embeddings.stores["2"].copy_(torch.arange(14.0).view(7, 2))
        embeddings.stores["3"].copy_(torch.arange(15.0).view(5, 3))
    assert embeddings.order() == ("page", "hour", "seen", "shop")
    assert embeddings.width == 9
    expected = [[2, 3, 8, 9, *pooled, 12, 13, 14], [6, 7, 12, 13, 0, 0, 0, 1, 2]]
    torch.testing.assert_close(embeddings(BATCH), torch.tensor(expected, dtype=torch.float32))


def test_some_features_alone_are_columns_of_all() -> None:
    embeddings = tables()
    whole = embeddings(BATCH)
    names = ("shop", "hour")
    assert embeddings.order(names) == ("hour", "shop")
    torch.testing.assert_close(embeddings(BATCH, names), whole[:, [2, 3, 6, 7, 8]])


def test_a_row_alone_and_no_row_at_all_are_looked_up() -> None:
    embeddings = tables()
    one = {name: tensor[:1] for name, tensor in BATCH.items()}
    torch.testing.assert_close(embeddings(one), embeddings(BATCH)[:1])
    assert embeddings({name: tensor[:0] for name, tensor in BATCH.items()}).shape == (0, 9)


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_a_sparse_gradient_is_the_dense_one(combiner: Literal["sum", "mean"]) -> None:
    gradients = []
    for sparse in (False, True):
        torch.manual_seed(0)
        embeddings = tables(combiner=combiner)
        embeddings.sparse = set(embeddings.stores) if sparse else set()
        (embeddings(BATCH) ** 2).sum().backward()
        found = embeddings.stores["2"].grad
        assert found is not None
        assert found.is_sparse == sparse
        gradients.append(found.to_dense())
    torch.testing.assert_close(gradients[0], gradients[1])


def test_padding_gets_no_gradient() -> None:
    embeddings = tables()
    embeddings(BATCH, ["seen"]).sum().backward()
    gradient = embeddings.stores["2"].grad
    assert gradient is not None
    assert gradient[:, 0].tolist() == [0, 0, 1, 1, 0, 0, 0]


def test_pooling_as_exporters_see_it_is_pooling_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for combiner in ("sum", "mean"):
        embeddings = tables(combiner=combiner)
        running = embeddings(BATCH)
        with monkeypatch.context() as patched:
            patched.setattr(torch.compiler, "is_compiling", lambda: True)
            torch.testing.assert_close(embeddings(BATCH), running)


def test_rows_start_glorot_normal_or_with_the_deviation_given() -> None:
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"a": {"cardinality": 20_000}, "b": {"cardinality": 100}, "label": {}},
            "channel_spec": {"context": ["a", "b"], "label": ["label"]},
        }
    )
    torch.manual_seed(0)
    store = Embeddings(spec, {"a": 8, "b": 8}).stores["8"]
    assert store[:20_000].std().item() == pytest.approx((2 / 20_008) ** 0.5, rel=0.02)
    assert store[20_000:].std().item() == pytest.approx((2 / 108) ** 0.5, rel=0.1)
    assert Embeddings(spec, {"a": 8}, std=0.3).stores["8"].std().item() == pytest.approx(0.3, rel=0.02)
    assert not Embeddings(spec, {"a": 8}, std=0.0).stores["8"].any()


def test_gradients_of_many_ids_are_those_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = FeatureSpec.from_dict(
        {"feature_spec": {"a": {"cardinality": 9}, "b": {"cardinality": 5}, "label": {}},
         "channel_spec": {"context": ["a", "b"], "label": ["label"]}}
    )  # fmt: skip
    tables = Embeddings(spec, {"a": 4, "b": 4})
    batch = {"a": torch.randint(0, 9, (50,)), "b": torch.randint(0, 5, (50,), dtype=torch.int32)}
    weights, gradients = torch.randn(50, 8), []
    for many in (1, 1000):
        monkeypatch.setattr("recspec.layers.MANY", many)
        (gradient,) = torch.autograd.grad((tables(batch) * weights).sum(), [tables.stores["4"]])
        gradients.append(gradient)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_one_updating_lookup_gives_rows_of_a_batch_and_vectors_of_other_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """FBGEMM's lookup is played by sums of bags in torch, which is what it computes."""
    spec = FeatureSpec.from_dict(
        {"feature_spec": {"item": {"cardinality": 9}, "kind": {"cardinality": 5}, "user": {"cardinality": 7},
                          "tags": {"cardinality": 6, "length": 3, "padding": 0}, "label": {}},
         "channel_spec": {"item": ["item", "kind"], "user": ["user", "tags"], "label": ["label"]}}
    )  # fmt: skip
    tables = Embeddings(spec, {"item": 4, "user": 4, "kind": 2, "tags": 4}, more_ids={"item": 10})
    assert (tables.ids_per_row("4"), tables.ids_per_row("2")) == (1 + 10 + 1 + 3, 1)
    batch = {"user": torch.tensor([1, 2]), "tags": torch.tensor([[1, 2, 0], [0, 0, 0]])}
    wanted = {}
    for rows in (1, 2, 5):
        ids = {"item": torch.arange(rows) + 1, "kind": torch.arange(rows) % 5}
        wanted[rows] = tables.beside(batch, ("user", "tags"), ids)
        assert torch.equal(wanted[rows][1], tables(ids, ids))
    lookups = []

    def bags(store: Tensor, firsts: list[int], _: object, ids: Tensor, offsets: Tensor, *rest: object) -> Tensor:
        assert len(rest) == 2  # no weights of ids; the update
        lookups.append(store)
        features = len(firsts)
        rows = (len(offsets) - 1) // features
        counts = offsets.diff().view(features, rows).sum(1)
        placed = ids + torch.tensor(firsts).repeat_interleave(counts)
        summed = F.embedding_bag(placed, store, offsets, mode="sum", include_last_offset=True)
        return summed.view(features, rows, -1).transpose(0, 1).flatten(1)

    monkeypatch.setattr("recspec.kernels.fbgemm_lookup", bags)
    tables.updates = dict.fromkeys(tables.stores)  # type: ignore[arg-type]
    for rows, (ours, theirs) in wanted.items():
        ids = {"item": torch.arange(rows) + 1, "kind": torch.arange(rows) % 5}
        lookups.clear()
        found = tables.beside(batch, ("user", "tags"), ids)
        assert ours is not None
        assert found[0] is not None
        assert len(lookups) == 2  # one a store
        torch.testing.assert_close(found[0], ours)
        torch.testing.assert_close(found[1], theirs)
