"""How many operations with a kernel a training step asks of a GPU; each takes the host some 40 microseconds."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recspec.data.storage import synthesize
from recspec.loading.ranks import Ranks
from recspec.models.layers.batch import num_rows, to_device
from recspec.training.optimizers import make_optimizers
from recspec.training.plan import TrainingPlan, make_plan
from recspec.training.settings import TrainSettings
from recspec.training.step import TrainingStep, build_model
from tests.made_up_device import DEVICE, made_up_device
from tests.training.test_waits import batches_of

BOUNDS = {"dlrm": 75, "wide_deep": 195, "neumf": 105, "two_tower": 130}
"""The most operations of a step, of which a sort or a gradient of embeddings takes several launches."""


@pytest.fixture
def subjects(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The models at their published sizes."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
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
