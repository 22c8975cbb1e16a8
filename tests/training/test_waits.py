"""How often a step waits for a GPU, and that the branches that it takes there give the CPU's numbers."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from recspec.data.storage import synthesize
from recspec.feature_spec import FeatureSpec
from recspec.loading.ranks import Ranks
from recspec.models import MODELS
from recspec.models.layers.batch import Batch, num_rows, to_device
from recspec.training.loop import TrainingRun
from recspec.training.optimizers import make_optimizers
from recspec.training.plan import TrainingPlan, make_plan
from recspec.training.settings import TrainSettings
from recspec.training.step import Built, TrainingStep, build_model, make_sampler
from tests import made_up
from tests.closeness import assert_close
from tests.made_up_device import DEVICE, made_up_device
from tests.model_cases import MODEL_CASES, TRAINED_BY_STEPS, kind_of_data

LISTS = "models/known_items.py: sizes: list[int] = lengths.tolist()"
SIZES = (
    "models/layers/events.py: "
    "sizes, starts = tuple(size for size in counts.tolist() if size), counts.cumsum(0) - counts"
)

WAITS: Mapping[str, list[str]] = MappingProxyType(
    {
        **{name: [] for name in TRAINED_BY_STEPS},
        "din, long histories": [SIZES],
        "dien, long histories": [SIZES],
        "sim, long histories": [],  # its latest events are few, and the earlier ones are padded
        "sasrec": [LISTS],
        "bert4rec": [LISTS, "models/bert4rec.py: chosen = hidden.nonzero().squeeze(1)"],
        "mult_vae": [LISTS],
    }
)
"""Each place where a step waits, once a step; most models wait nowhere."""

OTHER_OPTIMIZERS = ("adagrad", "rowwise_adagrad", "ftrl", "adam", "rmsprop")


@pytest.fixture(scope="module")
def data(datasets: Mapping[str, FeatureSpec], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, FeatureSpec]:
    return {**datasets, "long histories": made_up.sequences(tmp_path_factory.mktemp("waits") / "long", length=40)}


def a_plan(case: str, data: Mapping[str, FeatureSpec], optimizer: str, ranks: Ranks, **more: object) -> TrainingPlan:
    name, _, kind = case.partition(", ")
    given = {"batch_size": 64, "precision": "fp32", "tensorboard": False, "optimizer": optimizer, "learning_rate": 0.01}
    own = MODELS[name].Settings.model_validate(MODEL_CASES[name].tiny)
    settings = TrainSettings.model_validate({**given, "sparse_gradients": "never", "compile": False, **more})
    return make_plan(name, data[kind or kind_of_data(name)], settings, own, ranks)


def batches_of(plan: TrainingPlan, number: int) -> list[Batch]:
    """The first batches of a plan with their drawn negatives, on the CPU."""
    sampler, found = make_sampler(build_model(plan, Ranks())), []
    for step, share in zip(range(number), plan.loader.batches(), strict=False):
        found.append(share.batch if sampler is None else sampler(share, epoch=0, step=step))
    return found


def steps(built: Built, batches: list[Batch], device: torch.device) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The losses of a step with each batch, and the weights after them, on the device."""
    model = built.model.to(device).train()
    optimizers = make_optimizers([*model.named_parameters()], built.plan.settings)
    ranks, losses = replace(built.ranks, device=device), list[Tensor]()
    step = TrainingStep(replace(built, ranks=ranks, optimizers=optimizers))
    for batch in batches:
        rows = num_rows(batch) // step.rows_each
        losses.append(step(to_device(batch, device), rows, rows))
    return losses, {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    ("case", "optimizer"), [*((case, "sgd") for case in WAITS), *(("neumf", each) for each in OTHER_OPTIMIZERS)]
)
def test_a_step_waits_for_a_gpu_where_the_table_says_and_gives_the_numbers_of_a_cpu(
    case: str, optimizer: str, data: Mapping[str, FeatureSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = a_plan(case, data, optimizer, Ranks())
    batches = batches_of(plan, 3)
    here, once, there = (build_model(plan, Ranks()) for _ in range(3))
    losses, weights = steps(here, batches, torch.device("cpu"))
    with made_up_device(monkeypatch) as device:
        steps(once, batches[:1], DEVICE)
        first = device.waits.copy()
        device.waits.clear()
        far_losses, far_weights = steps(there, batches, DEVICE)
        waits = device.waits - first  # a first step also prepares what all others use
        far_losses = [each.cpu() for each in far_losses]
        far_weights = {name: each.cpu() for name, each in far_weights.items()}
    assert waits == dict.fromkeys(WAITS[case], len(batches) - 1)
    for ours, theirs in zip(far_losses, losses, strict=True):
        assert_close(ours, theirs)
    for name, weight in weights.items():
        assert_close(far_weights[name], weight, name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", WAITS)
def test_a_gpu_is_waited_for_as_often(case: str, data: Mapping[str, FeatureSpec], tmp_path: Path) -> None:
    """With the loader and the drawn negatives; CUDA tells of each wait."""
    ranks = Ranks(device=torch.device("cuda"))
    epoch = TrainingRun(a_plan(case, data, "adam", ranks), tmp_path, ranks).epoch()
    next(epoch)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            next(epoch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Setting the mode warns too, once in a process: "Synchronization debug mode is a prototype feature".
    waits = [f"{each.filename}:{each.lineno}" for each in told if "called a synchronizing" in str(each.message)]
    assert len(waits) == len(WAITS[case]), waits


BOUNDS = {"dlrm": 75, "wide_deep": 195, "neumf": 105, "two_tower": 130}
"""The most operations of a step, of which a sort or a gradient of embeddings takes several launches."""


@pytest.fixture
def subjects(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The models at their published sizes."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "stress"))
    yield importlib.import_module("_gpu_subjects").SUBJECTS
    del sys.modules["_gpu_subjects"]


def launches(plan: TrainingPlan, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The operations of a second step, whose first one also prepares what all others use."""
    built, (batch,) = build_model(plan, Ranks()), batches_of(plan, 1)
    with made_up_device(monkeypatch) as made_up:
        model = built.model.to(DEVICE).train()
        optimizers = make_optimizers([*model.named_parameters()], plan.settings)
        step = TrainingStep(replace(built, ranks=replace(built.ranks, device=DEVICE), optimizers=optimizers))
        there = to_device(batch, DEVICE)
        rows = num_rows(batch) // step.rows_each
        step(there, rows, rows)
        made_up.launches.clear()
        step(there, rows, rows)
        return made_up.launches.copy()


@pytest.mark.parametrize("name", BOUNDS)
def test_a_step_at_published_sizes_asks_for_few_launches(
    name: str, subjects: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subjects[name]
    spec = synthesize(subject.shape(50), tmp_path, 640)
    # Adam and SGD are fused on a GPU, which the made-up device cannot do.
    given = subject.train_settings(batch_size=64, precision="fp32", compile=False)
    if name != "wide_deep":
        given = {key: value for key, value in given.items() if key not in ("betas", "eps")} | {"optimizer": "rmsprop"}
    settings, sizes = TrainSettings.model_validate(given), subject.model_settings(name, small=False)
    found = launches(make_plan(name, spec, settings, sizes, Ranks()), monkeypatch)
    assert found.total() <= BOUNDS[name], found.most_common()
