"""Several optimizers over parts of a model: rates, checkpoints, scalers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from recspec.base.errors import CheckpointError, SettingsError
from recspec.bundle import checkpoint
from recspec.training.optimizers import Optimizers
from recspec.training.settings import OptimizerSettings
from tests.training.stepping import EVERY, model, settings, sparse


def test_parts_cover_every_parameter_once_and_the_longest_wins() -> None:
    net = model()
    parts = {"wide": settings("ftrl"), "deep": settings("rmsprop"), "deep.embeddings": settings("adagrad")}
    optimizers = Optimizers(net.named_parameters(), settings("sgd"), parts)
    names = {
        part: [name for group in optimizer.param_groups for name in group["param_names"]]
        for part, optimizer in optimizers.parts.items()
    }
    assert names == {
        "wide": ["wide.weight", "wide.bias"],
        "deep": ["deep.mlp.weight", "deep.mlp.bias"],
        "deep.embeddings": ["deep.embeddings.weight"],
    }


def test_parts_that_have_no_parameter_are_named_all_at_once() -> None:
    parts = {name: settings("sgd") for name in ("", "widee", "deep", "deep.mlp", "deep.embeddings", "deep.mpl")}
    del parts[""]
    with pytest.raises(SettingsError) as error:
        Optimizers(model().named_parameters(), settings("sgd"), parts)
    some = "some do with 'deep', 'deep.embeddings', 'deep.mlp', 'wide', 'wide.bias', 'wide.weight'"
    assert str(error.value) == (
        "train.parts: 3 problems"
        "\n  - all parameters of 'deep' belong to longer parts; remove it"
        f"\n  - no parameter's name begins with 'deep.mpl' (did you mean 'deep.mlp'?); {some}"
        f"\n  - no parameter's name begins with 'widee' (did you mean 'wide'?); {some}"
    )


def test_each_part_has_its_own_schedule() -> None:
    parts = {
        "wide": settings("ftrl", learning_rate=0.02),
        "deep.mlp": settings("adam", learning_rate=1.0, schedule="step", step_epochs=[1, 2], step_factors=[0.5, 0.1]),
    }
    given = settings("sgd", learning_rate=8.0, schedule="linear", warmup_epochs=0.5)
    optimizers = Optimizers(model().named_parameters(), given, parts)
    rates = []
    for step in (0, 1, 4, 8, 11):
        optimizers.set_learning_rates(step, steps_per_epoch=4, epochs=3)
        rates.append([optimizers.learning_rates[part] for part in ("wide", "deep.mlp", "")])
    # Warm-up over 2 of 12 steps, then to zero at step 12: 8 * (1/2, 1, 8/10, 4/10, 1/10).
    expected = [[0.02, 1.0, 4.0], [0.02, 1.0, 8.0], [0.02, 0.5, 6.4], [0.02, 0.05, 3.2], [0.02, 0.05, 0.8]]
    assert [[pytest.approx(rate) for rate in row] for row in expected] == rates


@pytest.mark.parametrize("optimizer", [*EVERY, "sgd with momentum", "rmsprop with momentum"])
def test_a_restored_run_continues_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    kind, _, momentum = optimizer.partition(" with ")
    given = settings(kind, learning_rate=0.1, **({"momentum": 0.5} if momentum else {}))
    by_rows = kind != "adamw" and not momentum

    def steps(net: nn.ModuleDict, optimizers: Optimizers, numbers: range) -> None:
        for number in numbers:
            torch.manual_seed(number)
            for name, weight in net.named_parameters():
                weight.grad = torch.randn_like(weight)
                if by_rows and name == "deep.embeddings.weight":
                    weight.grad = sparse(5, torch.randint(0, 5, (3,)).tolist(), torch.randn(3, 4))
            optimizers.step()

    straight, stopped = model(), model()
    parts = {"wide": settings("ftrl", learning_rate=0.3)}
    whole = Optimizers(straight.named_parameters(), given, parts)
    steps(straight, whole, range(7))
    half = Optimizers(stopped.named_parameters(), given, parts)
    steps(stopped, half, range(3))
    checkpoint.write_tensors(tmp_path / "state.safetensors", half.tensors(), {})
    saved, _ = checkpoint.read_tensors(tmp_path / "state.safetensors")
    resumed = Optimizers(stopped.named_parameters(), given, parts)
    resumed.restore(saved)
    steps(stopped, resumed, range(3, 7))
    for name, weight in straight.named_parameters():
        assert torch.equal(weight, stopped.get_parameter(name)), name
    ours, theirs = whole.tensors(), resumed.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in ours)


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adagrad", "rmsprop", "ftrl", "rowwise_adagrad"])
def test_state_of_another_shape_or_type_is_refused_before_a_kernel_reads_it(optimizer: str) -> None:
    """torch's fused optimizers take the shapes for granted: a forged checkpoint ended the process (SIGSEGV)."""
    weight = nn.Parameter(torch.ones(6, 4))
    given = {"optimizer": optimizer, "momentum": 0.9} if optimizer == "sgd" else {"optimizer": optimizer}
    own = Optimizers([("w", weight)], OptimizerSettings.model_validate(given))
    weight.grad = torch.ones_like(weight)
    own.step()
    saved = own.tensors()
    own.restore(saved)
    assert saved, "the optimizer keeps something"
    for name, tensor in saved.items():
        for forged in (tensor[None], tensor.reshape(-1)[:0], tensor.reshape(-1)[:1].repeat(3)):
            with pytest.raises(CheckpointError, match=f"'{name}' is .*; expected"):
                own.restore({**saved, name: forged})
        with pytest.raises(CheckpointError, match=f"'{name}' is torch.float16 .*; expected"):
            own.restore({**saved, name: tensor.half()})
        if len(saved) > 1:
            with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
                own.restore({other: each for other, each in saved.items() if other != name})
        with pytest.raises(CheckpointError, match="nothing that the optimizer keeps"):
            own.restore({**saved, f"{name}_": tensor})
    own.step()


def test_a_checkpoint_names_part_parameter_and_state() -> None:
    net = model()
    optimizers = Optimizers(net.named_parameters(), settings("sgd"), {"wide": settings("ftrl")})
    for weight in net.parameters():
        weight.grad = torch.ones_like(weight)
    optimizers.step()
    assert sorted(optimizers.tensors()) == [
        "wide/wide.bias/accumulator",
        "wide/wide.bias/linear",
        "wide/wide.weight/accumulator",
        "wide/wide.weight/linear",
    ]


def test_tensors_of_another_run_are_refused() -> None:
    optimizers = Optimizers(model().named_parameters(), settings("sgd"))
    with pytest.raises(CheckpointError) as error:
        optimizers.restore({"/deep.mpl.weight/sum": torch.zeros(1), "wide/wide.bias/linear": torch.zeros(1)})
    assert str(error.value) == (
        "optimizer tensors in the checkpoint: 2 problems"
        "\n  - '/deep.mpl.weight/sum' belongs to no part and parameter of this run"
        "\n  - 'wide/wide.bias/linear' belongs to no part and parameter of this run"
    )


def test_a_scaler_unscales_rows_and_whole_parameters_alike() -> None:
    """As on a GPU in fp16, where no GPU is: the scaler's factor goes, in either order of calls."""
    for unscale_first in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        table, layer = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(2))
        optimizers = Optimizers([("table", table), ("layer", layer)], settings("sgd"), {"layer": settings("adam")})
        scaler.scale(torch.zeros(()))  # makes the factor
        table.grad, layer.grad = sparse(3, [1, 1], torch.full((2, 2), 8.0)), torch.full((2,), 8.0)
        if unscale_first:
            optimizers.unscale(scaler)
        optimizers.step(scaler)
        scaler.update()
        assert table.tolist() == [[0.0, 0.0], [-1.0, -1.0], [0.0, 0.0]]
        assert layer.tolist() == [pytest.approx(-0.5)] * 2


def test_a_scaler_skips_the_part_that_overflowed() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    table, layer = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(2))
    optimizers = Optimizers([("table", table), ("layer", layer)], settings("sgd"), {"layer": settings("sgd")})
    scaler.scale(torch.zeros(()))
    table.grad, layer.grad = sparse(3, [1], torch.tensor([[math.inf, 1.0]])), torch.full((2,), 8.0)
    optimizers.step(scaler)
    scaler.update()
    assert torch.equal(table, torch.zeros(3, 2))
    assert layer.tolist() == [-0.5, -0.5]


def test_what_updates_whole_parameters_is_told() -> None:
    optimizers = Optimizers(model().named_parameters(), settings("adam"), {"wide": settings("ftrl")})
    told = "adam (fused: one pass over weights and state), wide: ftrl (own formula, block by block on a CPU)"
    assert optimizers.described == told
