"""Hooks, replaced layers and transforms of `torch.func` reach every module, and change no result."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS
from recspec.models.base import Model
from recspec.models.layers import may_replace
from recspec.models.layers.batch import Batch
from tests.known_users import informed
from tests.models.test_model_maths import NAMES, TINY, a_batch, close, gradients, specs  # noqa: F401  a fixture


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches too take the code written by hand."""
    for name in ("events.SLICED", "mlp.SMALL", "embeddings.MANY"):
        monkeypatch.setattr(f"recspec.models.layers.{name}", 0)


def a_model(name: str, spec: FeatureSpec) -> Model:
    settings = TINY[name] | ({"short": "dien"} if name == "sim" else {})
    if name in ("din", "dien", "sim"):
        settings = settings | {"activation": "relu"}
    torch.manual_seed(0)
    model = informed(MODELS[name](spec, MODELS[name].Settings.model_validate(settings)), spec)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double()


def layers(model: Model) -> dict[str, nn.Module]:
    return {name: each for name, each in model.named_modules() if isinstance(each, (nn.Linear, nn.Embedding))}


def sides(spec: FeatureSpec, batch: Batch) -> tuple[Batch, Batch]:
    """Some requests and some items."""
    items = spec.role("item")
    return (
        {key: value[:3] for key, value in batch.items() if key not in items and key != spec.label},
        {key: value[3:7] for key, value in batch.items() if key in items},
    )


@pytest.mark.parametrize("pre", [False, True], ids=["forward hook", "pre-hook"])
@pytest.mark.parametrize("name", NAMES)
def test_hooks_of_every_layer_fire_and_change_nothing(
    name: str,
    pre: bool,
    specs: dict[str, FeatureSpec],  # noqa: F811
) -> None:
    spec, model = specs[name], a_model(name, specs[name])
    batch, request_and_items = a_batch(spec, 60), sides(spec, a_batch(spec, 60))
    ways = {
        "loss": lambda: model.loss(batch),
        "logits": lambda: model(batch),
        "scores": lambda: model.score_items(*request_and_items),
    }
    wanted = {way: call() for way, call in ways.items()}
    slopes = gradients(model, wanted["loss"])
    for way, call in ways.items():
        fired: set[str] = set()
        for key, layer in layers(model).items():
            register = layer.register_forward_pre_hook if pre else layer.register_forward_hook
            register(lambda *_, key=key, seen=fired: seen.add(key))
        assert not (layers(model) and may_replace(model))
        found = call()
        close(found, wanted[way], f"{name}: {way}")
        unheard = layers(model).keys() - fired
        if way != "loss":  # the heads of auxiliary losses take no part
            unheard = {key for key in unheard if not key.startswith(("next_event", "search_head"))}
        assert unheard == set(), way
    close(gradients(model, model.loss(batch)), slopes, name, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_transform_of_torch_func_gives_the_gradients_of_autograd(
    name: str,
    specs: dict[str, FeatureSpec],  # noqa: F811
) -> None:
    spec, model = specs[name], a_model(name, specs[name])
    batch = a_batch(spec, 60)
    wanted = gradients(model, model.loss(batch))
    weights = {key: each.detach() for key, each in model.named_parameters()}

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self) -> torch.Tensor:
            return self.model.loss(batch)

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        renamed = {f"model.{key}": each for key, each in weights.items()}
        return torch.func.functional_call(Loss(), renamed, ())  # type: ignore[no-any-return]

    close(torch.func.grad(loss)(weights), wanted, name, rtol=1e-6, atol=1e-9)


def test_a_layer_wrapped_as_an_adapter_does_takes_part(specs: dict[str, FeatureSpec]) -> None:  # noqa: F811
    class Adapter(nn.Linear):
        """A linear layer with something added, as LoRA's."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1.0

    Adapter.__module__ = "elsewhere"
    spec, model = specs["neumf"], a_model("neumf", specs["neumf"])
    batch = a_batch(spec, 20)
    before = model.loss(batch)
    first = model.mlp.layers[0]  # type: ignore[union-attr,index]
    first.__class__ = Adapter  # type: ignore[assignment]
    assert model.loss(batch) != before
