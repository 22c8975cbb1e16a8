"""FinalNet: a layer and the gates worked by hand, its loss, and batch normalisation that follows a step's rows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from recspec.loading import Ranks
from recspec.models.finalnet import Branch, FinalNet, FinalNetSettings
from recspec.models.layers import BatchNorm
from recspec.training.step import UnitStatistics
from tests import made_up
from tests.models.test_dlrm import criteo


def test_a_layer_multiplies_its_halves() -> None:
    branch = Branch((2, 4), dropout=0.0, batch_norm=False)
    with torch.no_grad():
        branch.first.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0], [1.0, 1.0], [2.0, 0.0]]))
        branch.first.bias.copy_(torch.tensor([0.0, 0.0, 1.0, 0.0]))
        branch.out.weight.copy_(torch.tensor([[1.0, 10.0, 100.0, 1000.0]]))
        branch.out.bias.fill_(0.5)
    # h = (2, -3, 6, 4): h2 = (2, -3), h1 = (6, 4), h1 * h2 = (12, -12). ReLU of (2, -3, 12, -12) is (2, 0, 12, 0).
    assert branch(torch.tensor([[2.0, 3.0]])).tolist() == [2.0 + 1200.0 + 0.5]


def test_gates_mix_features_and_leave_numbers_alone() -> None:
    model = FinalNet(criteo((5, 5), numbers=1), FinalNetSettings(embedding_dim=2, gated=(2,), plain=(2,)))
    x = torch.tensor([[7.0, 1.0, 2.0, 3.0, 4.0]])
    assert model._with_gates(x).tolist() == [[7, 1, 2, 3, 4, 1, 2, 3, 4]], "gates start as 1"
    with torch.no_grad():
        model.gate.weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        model.gate.bias.zero_()
    # The gate of each feature is now the other's embedding.
    assert model._with_gates(x).tolist() == [[7, 1, 2, 3, 4, 3, 8, 3, 8]]


def test_branches_learn_from_their_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FinalNet(made_up.clicks(tmp_path / "data", num_rows=100), FinalNetSettings())
    gated, plain = (torch.tensor([each], requires_grad=True) for each in (1.0, 3.0))
    monkeypatch.setattr(model, "_branches", lambda _: (gated, plain))
    loss = model.loss({model.spec.label: torch.tensor([1.0])})
    taught = 1 / (1 + math.exp(-2))

    def entropy(logit: float, label: float) -> float:
        return math.log1p(math.exp(logit)) - label * logit

    assert loss.item() == pytest.approx(entropy(2, 1) + entropy(1, taught) + entropy(3, taught))
    slope = torch.autograd.grad(loss, gated)[0].item()
    assert slope == pytest.approx((taught - 1) / 2 + 1 / (1 + math.exp(-1)) - taught), "none through what is taught"


def test_odd_widths_are_refused() -> None:
    with pytest.raises(ValidationError, match="7 is odd, and a layer multiplies its two halves; take even widths"):
        FinalNetSettings(gated=(8, 7))


def test_batch_norm_by_hand() -> None:
    norm = BatchNorm(1, momentum=0.5, eps=0.0)
    with torch.no_grad():
        norm.scale.fill_(2.0)
        norm.shift.fill_(1.0)
    # Mean 3, variance 4: (1, 5) is (-1, 1) standardised. The running values start at 0 and 1.
    assert norm(torch.tensor([[1.0], [5.0]])).tolist() == [[-1.0], [3.0]]
    assert (norm.mean.tolist(), norm.variance.tolist()) == ([1.5], [2.5])
    norm.eval()
    assert norm(torch.tensor([[[1.5]]])).tolist() == [[[1.0]]], "the running mean gives the shift"


def test_batch_norm_is_torchs_in_training_and_in_its_gradients() -> None:
    torch.manual_seed(0)
    ours, theirs = BatchNorm(3).double(), torch.nn.BatchNorm1d(3).double()
    x = torch.randn(20, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(20, 3, dtype=torch.float64)
    (slope,), (wanted,) = (torch.autograd.grad((norm(x) * weights).sum(), x) for norm in (ours, theirs))
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(slope, wanted)


def test_the_running_values_take_in_the_parts_of_a_step_together() -> None:
    model = FinalNet(criteo((5, 5)), FinalNetSettings(embedding_dim=2, gated=(4, 2), plain=(2,)))
    norms = [*model.gated.norms, *model.plain.norms]
    assert UnitStatistics(model, Ranks(), accumulate=2).units == norms
    assert all(norm.parts == [] for norm in norms)
