"""One optimizer step: which batches run compiled, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn

from recspec.feature_spec import FeatureSpec
from recspec.loading.loader import Loader
from recspec.loading.ranks import Ranks
from recspec.models import MODELS
from recspec.models.layers.batch import Batch, num_rows
from recspec.training.choices import Choice
from recspec.training.loop import TrainingRun
from recspec.training.plan import TrainingPlan, make_plan
from recspec.training.product_rates import arithmetic
from recspec.training.settings import TrainSettings
from recspec.training.step import WeightAverage

SIZES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "neumf": {"factors": 4, "layers": (8, 4)},
        "wide_deep": {"hidden": (8,), "embedding_dim": 4},
        "dlrm": {"embedding_dim": 4, "bottom": (8, 4), "top": (8,)},
        "dcnv2": {"embedding_dim": 4, "bottom": (8, 4), "top": (8,)},
        "din": {"embedding_dim": 4, "hidden": (8,)},
        "dien": {"embedding_dim": 4, "hidden": (8,)},
        "sim": {"embedding_dim": 4, "hidden": (8,), "search_hidden": (8,), "top_k": 3, "short_length": 2},
    }
)


def spec_of(model: str, datasets: Mapping[str, FeatureSpec]) -> FeatureSpec:
    needs = set(MODELS[model].needs)
    return datasets["sequences" if "history" in needs else "interactions" if {"user", "item"} <= needs else "clicks"]


def a_plan(model: str, datasets: Mapping[str, FeatureSpec], ranks: Ranks, **values: object) -> TrainingPlan:
    given = {"batch_size": 450, "precision": "fp32", "tensorboard": False, "learning_rate": 0.01, **values}
    own = MODELS[model].Settings.model_validate(SIZES[model])
    return make_plan(model, spec_of(model, datasets), TrainSettings.model_validate(given), own, ranks)


def trained(run: TrainingRun, epochs: int = 2) -> dict[str, Tensor]:
    for _ in range(epochs):
        for _ in run.epoch():
            pass
        run.progress.epoch, run.progress.batch = run.progress.epoch + 1, 0
    return {name: parameter.detach().cpu().clone() for name, parameter in run.model.named_parameters()}


def test_full_batches_run_as_a_graph_and_others_uncompiled(
    datasets: Mapping[str, FeatureSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    asked: list[Mapping[str, object]] = []

    def compiled(module: nn.Module, **how: object) -> Callable[[Batch], Tensor]:
        def call(batch: Batch) -> Tensor:
            calls.append(num_rows(batch))
            return module(batch)  # type: ignore[no-any-return]

        asked.append(how)
        return call

    marked: list[None] = []
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marked.append(None))
    plan = a_plan("neumf", datasets, Ranks())
    assert plan.loader.num_rows % plan.loader.batch_size  # so the last batch is a smaller one
    eager = trained(TrainingRun(plan, tmp_path, Ranks()))
    assert not asked
    graphs = replace(plan, compile=Choice("reduce-overhead", "as on a GPU"))
    as_graph = trained(TrainingRun(graphs, tmp_path, Ranks()))
    assert asked == [{"mode": "reduce-overhead", "dynamic": False}]
    assert calls == [450] * (2 * (plan.steps_per_epoch - 1))
    assert len(marked) == len(calls)
    for name, weight in eager.items():
        assert torch.equal(weight, as_graph[name]), name  # same operations
    calls.clear()
    trained(TrainingRun(replace(plan, compile=Choice("default", "as asked")), tmp_path, Ranks()))
    assert len(calls) == 2 * plan.steps_per_epoch
    assert asked[1] == {"mode": "default", "dynamic": None}


@pytest.mark.parametrize("model", ["din", "dien", "sim"])
def test_padded_events_give_the_same_loss(
    model: str, datasets: Mapping[str, FeatureSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(model, datasets)
    made = MODELS[model](spec, MODELS[model].Settings.model_validate(SIZES[model])).eval()
    features = (*made.loss_needs().features, spec.label)
    batch = next(iter(Loader(spec, "train", batch_size=64, features=features, fixed_length=True).batches())).batch
    with torch.no_grad():
        as_it_is = made.loss(batch)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        torch.testing.assert_close(made.loss(batch), as_it_is, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model", sorted(SIZES))
def test_a_graph_gives_the_weights_of_an_uncompiled_run(
    model: str, datasets: Mapping[str, FeatureSpec], tmp_path: Path
) -> None:
    ends = []
    ranks = Ranks(device=torch.device("cuda"))
    for compiles in (True, False):
        plan = a_plan(model, datasets, ranks, compile=compiles, deterministic=True, sparse_gradients="never")
        assert plan.compile.value == ("reduce-overhead" if compiles else "none")
        with arithmetic("fp32", deterministic=True):
            ends.append(trained(TrainingRun(plan, tmp_path, ranks)))
    for name, weight in ends[0].items():
        torch.testing.assert_close(weight, ends[1][name], rtol=1e-4, atol=1e-5, msg=name)


def test_the_average_of_the_weights_follows_its_formula() -> None:
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(layer.weight, 0.0)
    average = WeightAverage(layer, 0.15)
    for step, weight in enumerate((1.0, 2.0)):  # decays 1/10, then 0.15 since 2/11 is more
        torch.nn.init.constant_(layer.weight, weight)
        average.update(step)
    assert average.tensors["weight"].item() == pytest.approx(0.15 * 0.9 + 0.85 * 2.0)
    with average.in_place():
        assert layer.weight.item() == pytest.approx(1.835)
    assert layer.weight.item() == 2.0
