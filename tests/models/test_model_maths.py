"""What holds of every model's loss and logits with every setting switched on: parts, holes, float64, averages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from recspec.feature_spec import FeatureSpec
from recspec.loading.loader import Loader
from recspec.models import MODELS
from recspec.models.base import Model, counts_of
from recspec.models.layers.batch import Batch, num_rows, take
from recspec.training.step import WeightAverage
from tests import made_up
from tests.known_users import informed
from tests.model_cases import MODEL_CASES, TRAINED_BY_STEPS
from tests.variants import variants

FURTHER: Mapping[str, Mapping[str, object]] = {
    "wide_deep": {"indicators": ["hour"]},
    "dcnv2": {"cross_rank": 3},
    "sim": {"short_length": 3},
}
"""Settings of further branches of a model."""
TINY = {name: {**case.tiny, **FURTHER.get(name, {})} for name, case in MODEL_CASES.items()}
NAMES = TRAINED_BY_STEPS
OF_HISTORIES = [name for name in NAMES if "history" in MODELS[name].needs]
LENGTH = 7


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FeatureSpec]:
    folder = tmp_path_factory.mktemp("maths")
    clicks = made_up.clicks(folder / "clicks", num_users=12, num_items=15, num_rows=600)
    sequences = made_up.sequences(folder / "sequences", length=LENGTH, num_rows=400, num_users=12, num_items=12)
    return {name: sequences if name in OF_HISTORIES else clicks for name in NAMES}


def models(name: str, spec: FeatureSpec, dtype: torch.dtype = torch.float64) -> Iterator[tuple[Model, str]]:
    """The model under each of its variants, with weights large enough that rows differ, and what the variant is."""
    defaults = MODELS[name].Settings.model_validate(TINY[name]).model_dump()
    for settings in variants(MODELS[name].Settings, TINY[name], lambda made: MODELS[name](spec, made)):
        torch.manual_seed(0)
        model = informed(MODELS[name](spec, settings), spec)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        changed = {key: value for key, value in settings.model_dump().items() if value != defaults[key]}
        yield model.to(dtype), f"{name} with {changed}"


def a_batch(spec: FeatureSpec, rows: int, dtype: torch.dtype = torch.float64) -> Batch:
    batch = next(iter(Loader(spec, "train", batch_size=rows, seed=3).batches())).batch
    assert num_rows(batch) == rows
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


def gradients(model: Model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True, materialize_grads=True)
    return {name: each.to_dense() for name, each in zip(trained, found, strict=True)}


def close(found: Any, wanted: Any, what: str, **tolerance: float) -> None:
    torch.testing.assert_close(found, wanted, msg=lambda said: f"{what}: {said}", **tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_losses_of_parts_sum_to_the_loss_of_the_whole(name: str, specs: dict[str, FeatureSpec]) -> None:
    """A part's loss, times its share of the rows. Dice standardises by a part's own rows in training, so not there."""
    spec = specs[name]
    few = a_batch(spec, 140)
    batch = {
        key: torch.cat([value, value if key in spec.role("user") else value.flip(0)]) for key, value in few.items()
    }
    for model, what in models(name, spec):
        model.train("dice" not in what)
        whole = model.loss(batch)
        counted = {
            counts_of(key): (batch[key][:, None] == batch[key]).sum(1) for key in model.loss_needs().counted_features
        }
        parts = [take({**batch, **counted}, slice(*cut)) for cut in ((0, 1), (1, 90), (90, 140), (140, 280))]
        split = sum((model.loss(part) * (num_rows(part) / 280) for part in parts), torch.zeros(()))
        close(split, whole, what)
        close(gradients(model, split), gradients(model, whole), what, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_float64_trains_and_float32_gives_nearly_the_same(name: str, specs: dict[str, FeatureSpec]) -> None:
    spec = specs[name]
    for (wide, what), (narrow, _) in zip(models(name, spec), models(name, spec, torch.float32), strict=True):
        losses = []
        for model, dtype in ((wide.train(), torch.float64), (narrow.train(), torch.float32)):
            loss = model.loss(a_batch(spec, 200, dtype))
            losses.append((loss, gradients(model, loss)))
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            assert torch.isfinite(model.loss(a_batch(spec, 50, dtype)))
        (loss, slopes), (nearly, their_slopes) = losses
        assert loss.dtype == torch.float64, f"{what}: the loss is computed in {loss.dtype}"
        assert all(each.dtype == torch.float64 for each in slopes.values())
        close(nearly.double(), loss, what, rtol=1e-5, atol=1e-6)
        largest = max(slope.norm() for slope in slopes.values())
        for key, slope in slopes.items():  # that of a bias before a softmax is zero, and rounding in float32
            error = (their_slopes[key] - slope).norm() / slope.norm().clamp(min=1e-2 * largest)
            assert error < 1e-4, f"{what}: {key} is off by {error:.1e} of its size"


@pytest.mark.parametrize("name", NAMES)
def test_a_running_mean_has_every_weight_and_every_buffer(name: str, specs: dict[str, FeatureSpec]) -> None:
    spec = specs[name]
    for model, what in models(name, spec, torch.float32):
        average = WeightAverage(model, decay=0.75)
        weights = {key: value for key, value in model.state_dict().items() if value.is_floating_point()}
        assert set(average.tensors) == set(weights), what
        first = {key: value.clone() for key, value in weights.items()}
        with torch.no_grad():
            for value in weights.values():
                value.add_(1.0)
        average.update(step=1000)
        with average.in_place():
            for key, value in weights.items():
                close(value, first[key] + 0.25, f"{what}: {key}")
        assert all(torch.equal(value, first[key] + 1.0) for key, value in weights.items())


# --- holes -----------------------------------------------------------------------------------------------------------


def with_holes(spec: FeatureSpec, dtype: torch.dtype = torch.float64) -> tuple[Batch, Batch]:
    """Histories with id 0 anywhere, at both ends, or everywhere; and the same events without the holes."""
    batch = a_batch(spec, 300, dtype)
    lists = [key for key in batch if key in (*spec.role("history"), *spec.role("negative_history"))]
    random = torch.Generator().manual_seed(1)
    present = torch.rand(300, LENGTH, generator=random) < torch.rand(300, 1, generator=random)
    present[0], present[1] = False, True
    present[2, 0], present[3, -1] = False, False
    present[4], present[5] = torch.arange(LENGTH) == 0, torch.arange(LENGTH) == LENGTH - 1
    assert batch[lists[0]].shape == present.shape
    full = {key: torch.where(batch[key] == 0, torch.ones_like(batch[key]), batch[key]) for key in lists}
    order = (~present).long().sort(dim=1, stable=True).indices
    holes = {key: torch.where(present, full[key], 0) for key in lists}
    return {**batch, **holes}, {**batch, **{key: value.gather(1, order) for key, value in holes.items()}}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_HISTORIES)
def test_a_place_without_an_event_counts_nowhere(
    name: str, specs: dict[str, FeatureSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Histories with holes are those without: logits, loss, gradients and scores, jagged and padded."""
    spec = specs[name]
    holes, plain = with_holes(spec)
    items = {key: torch.arange(5) % 3 + 1 for key in spec.role("item")}

    def answers(model: Model, batch: Batch) -> dict[str, Any]:
        request = {key: value[:20] for key, value in batch.items() if key not in items}
        loss = model.loss(batch)
        return {
            "logits": model(batch).detach(),
            "loss": loss.detach(),
            "gradients": gradients(model, loss),
            "scores": model.score_items(request, items).detach(),
        }

    for model, what in models(name, spec):
        model.train()
        wanted = answers(model, plain)
        found = {"jagged": answers(model, holes)}
        with monkeypatch.context() as patched:
            patched.setattr(torch.compiler, "is_compiling", lambda: True)
            found |= {"padded": answers(model, holes), "padded, no holes": answers(model, plain)}
        for form, theirs in found.items():
            for key, value in wanted.items():
                close(theirs[key], value, f"{what}, {form}: {key}", rtol=1e-6, atol=1e-8)
