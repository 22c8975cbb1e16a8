"""An MLP, dropout whose masks are drawn a bit at a time, and a loss computed with its gradients in blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recspec.mlp import (
    BLOCK_FLOATS,
    SMALL,
    Mlp,
    Scratch,
    Tail,
    bernoulli_words,
    block_rows,
    cross_entropy_,
    in_blocks,
    relu_dropout_,
)

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


def test_impossible_bits_are_all_zeros() -> None:
    assert bernoulli_words(3, 0.0, 32).tolist() == [0, 0, 0]
    assert bernoulli_words(3, 2.0**-17, 32).tolist() == [0, 0, 0]  # what is rounded to that


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


# --- in blocks -------------------------------------------------------------------------------------------------------


def a_tail(mlp: Mlp) -> tuple[Tensor, ...]:
    """Its further layers, and one of one unit."""
    last = torch.nn.Linear(mlp.layers[-1].out_features, 1)  # type: ignore[arg-type]
    return (*mlp.tail, *last.parameters())


def of_whole_batch(mlp: Mlp, tail: Sequence[Tensor], first: Tensor, slope: Tensor) -> list[Tensor]:
    """Logits (B,), and the gradients of what the first layer gives and of all weights, by torch's own backward pass."""
    first = first.clone().requires_grad_()
    torch.manual_seed(13)
    logits = F.linear(mlp.after_first(first * 1), *tail[-2:]).squeeze(1)
    return [logits.detach(), *torch.autograd.grad(logits, [first, *tail], slope)]


def of_blocks(mlp: Mlp, tail: Sequence[Tensor], first: Tensor, slope: Tensor, rows: int) -> list[Tensor]:
    """The same, `rows` rows at a time."""
    network, scratch = Tail("relu", [each.detach() for each in tail], mlp.keep), Scratch(first, rows)
    logits, slopes = torch.empty(len(first)), torch.empty_like(first)
    torch.manual_seed(13)
    for start in range(0, len(first), rows):
        some = slice(start, start + rows)
        layers = network.layers(first[some].clone(), scratch)
        assert network.forward(layers, logits[some]) is not None
        slopes[some] = network.backward(slope[some], layers, scratch)
    return [logits, slopes, *network.gradients()]


@pytest.mark.parametrize("dims", [[7, 6], [7, 6, 5, 4]])
@pytest.mark.parametrize("num_rows", [1, 4, 5, 6, 17])
def test_blocks_give_the_logits_and_gradients_of_all_rows_at_once(dims: list[int], num_rows: int) -> None:
    torch.manual_seed(12)
    mlp = Mlp(dims)
    tail, first, slope = a_tail(mlp), torch.randn(num_rows, 6), torch.randn(num_rows)
    expected = of_whole_batch(mlp, tail, first, slope)
    for one, other in zip(of_blocks(mlp, tail, first, slope, rows=5), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_block_worked_by_hand() -> None:
    # Units (1, 0) of (1, -2); second layer 3 * 1 + 4 * 0 - 1 = 2; logit 2 * 5 + 7 = 17.
    tail = [torch.tensor([[3.0, 4.0]]), torch.tensor([-1.0]), torch.tensor([[5.0]]), torch.tensor([7.0])]
    network, scratch = Tail("relu", tail), Scratch(tail[0], 1)
    layers = network.layers(torch.tensor([[1.0, -2.0]]), scratch)
    assert network.forward(layers, torch.empty(1)).tolist() == [17.0]
    # With a gradient of 1: 5 of the second layer's unit, so (5 * 3, stopped) of the first's.
    assert network.backward(torch.tensor([1.0]), layers, scratch).tolist() == [[15.0, 0.0]]
    assert [gradient.tolist() for gradient in network.gradients()] == [[[5.0, 0.0]], [5.0], [[2.0]], [1.0]]


def test_a_block_of_sigmoids_worked_by_hand() -> None:
    # sigmoid(0) = 1/2, whose slope is 1/4; a logit of 8 / 2 + 1 = 5.
    tail = [torch.tensor([[8.0]]), torch.tensor([1.0])]
    network, scratch = Tail("sigmoid", tail), Scratch(tail[0], 1)
    layers = network.layers(torch.tensor([[0.0]]), scratch)
    assert network.forward(layers, torch.empty(1)).tolist() == [5.0]
    assert network.backward(torch.tensor([1.0]), layers, scratch).tolist() == [[2.0]]


def test_a_block_of_all_rows_drops_what_they_do_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recspec.mlp.SMALL", 0)
    mlp = Mlp([7, 40, 30], dropout=0.3)
    tail, first, slope = a_tail(mlp), torch.randn(99, 40), torch.randn(99)
    expected = of_whole_batch(mlp, tail, first, slope)
    for one, other in zip(of_blocks(mlp, tail, first, slope, rows=99), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_scratch_is_the_same_memory_for_the_same_name() -> None:
    scratch = Scratch(torch.zeros(1), rows=3)
    one = scratch("a", 2, 4)
    assert one.shape == (2, 4)
    assert scratch("a", 3, 4).data_ptr() == one.data_ptr() != scratch("b", 2, 4).data_ptr()
    assert scratch("a", 5, 4).shape == (5, 4)  # more rows than were told


def test_the_gradient_of_cross_entropy_worked_by_hand() -> None:
    logits = torch.tensor([0.0, 3.0**0.5])
    loss, slope = cross_entropy_(logits, torch.tensor([1.0, 0.0]), 1 / 4)
    # (log 2 + log(1 + e^1.732)) / 4, and (sigmoid - label) / 4.
    assert loss.item() == pytest.approx((math.log(2) + math.log1p(math.exp(3**0.5))) / 4)
    assert slope.tolist() == pytest.approx([-0.125, 0.25 / (1 + math.exp(-(3**0.5)))])
    assert slope is logits


@pytest.mark.parametrize(
    ("dtype", "units", "expected"),
    [
        (torch.float32, SMALL, True),
        (torch.float32, SMALL - 1, False),
        (torch.float64, SMALL, True),
        (torch.bfloat16, SMALL, False),
    ],
)
def test_blocks_are_for_many_units_of_single_precision_or_double(
    dtype: torch.dtype, units: int, expected: bool
) -> None:
    assert in_blocks(torch.zeros(1, dtype=dtype), units) == expected


def test_there_are_no_blocks_without_gradients_or_in_other_precisions() -> None:
    with torch.no_grad():
        assert not in_blocks(torch.zeros(1), SMALL)
    with torch.autocast("cpu", torch.bfloat16):
        assert not in_blocks(torch.zeros(1), SMALL)


@pytest.mark.parametrize(
    ("widths", "rows"), [([256], BLOCK_FLOATS // 256), ([64, 256, 1], BLOCK_FLOATS // 256), ([BLOCK_FLOATS * 2], 1)]
)
def test_the_widest_tensor_decides_on_the_rows_of_a_block(widths: list[int], rows: int) -> None:
    assert block_rows(*widths) == rows
