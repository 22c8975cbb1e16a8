"""The first steps of a run: in one process, in micro-batches, or on two ranks.

`main` is one of two ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import torch

from recspec.feature_spec import FeatureSpec
from recspec.loading import join
from recspec.loading.ranks import Ranks
from recspec.models import MODELS
from recspec.training.loop import TrainingRun
from recspec.training.plan import make_plan
from recspec.training.product_rates import arithmetic
from recspec.training.settings import READ_BY, OptimizerSettings, TrainSettings
from tests.variants import switched_on

STEPS = 10
OPTIMIZERS = get_args(OptimizerSettings.model_fields["optimizer"].annotation)


def everything_on(optimizer: str) -> dict[str, object]:
    """Settings of training under which every number that the optimizer reads takes part: decays, norms, averages."""
    numbers = {
        name: value
        for name, value in switched_on(OptimizerSettings).items()
        if name not in READ_BY or optimizer in READ_BY[name]
    }
    fixed = {"optimizer": optimizer, "learning_rate": 0.02, "schedule": "linear", "decay_end": 1.0}
    return {**numbers, **fixed, "average": 0.3, "clip_norm": 0.5}


def first_steps(case: Mapping[str, Any], folder: Path, ranks: Ranks, accumulate: int = 1) -> dict[str, Any]:
    """Losses of the first steps over all ranks, and then weights, buffers and their running means."""
    name, spec = case["model"], FeatureSpec.load(case["data"])
    settings = TrainSettings.model_validate(
        {"epochs": 10, "precision": "fp32", "tensorboard": False, "accumulate": accumulate, **case["train"]}
    )
    model_settings = MODELS[name].Settings.model_validate(case["settings"])
    run = TrainingRun(make_plan(name, spec, settings, model_settings, ranks), folder, ranks)
    with arithmetic("fp32", False):
        losses = [float(ranks.sum(loss)) for loss in islice(_steps(run), case["steps"])]
    averages = {} if run.average is None else {f"mean of {each}": x for each, x in run.average.tensors.items()}
    tensors = {**dict(run.model.named_parameters()), **dict(run.model.named_buffers()), **averages}
    return {"losses": losses, "tensors": {each: x.detach().clone() for each, x in tensors.items()}}


def _steps(run: TrainingRun) -> Iterator[torch.Tensor]:
    while True:
        yield from run.epoch()
        run.progress.epoch, run.progress.batch = run.progress.epoch + 1, 0


def main(cases: str, store: str) -> None:
    """Save what this rank has after the steps of each of `cases`, a JSON file, as `STORE.RANK.PLACE`."""
    torch.set_num_threads(1)
    with join("cpu") as ranks:
        for place, each in enumerate(json.loads(Path(cases).read_text())):
            found = first_steps(each, Path(store).parent / f"{place}", ranks)
            torch.save(found, f"{store}.{ranks.rank}.{place}")
