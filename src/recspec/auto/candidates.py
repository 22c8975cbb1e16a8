"""The models that a dataset's roles fill, and variants of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from recspec import config
from recspec.distributed import Ranks
from recspec.errors import RecspecError, SettingsError, of_the_machine, unknown
from recspec.loading import negatives_by_default
from recspec.models import MODELS, FittedModel, ItemModel, require_libraries
from recspec.spec import FeatureSpec
from recspec.training import (
    FitPlan,
    TrainingPlan,
    TrainSettings,
    assigned,
    plan_run,
    search_space,
    sections_of,
    task_of,
)

Given = Mapping[str, Mapping[str, object]]
"""Sections `settings` and `train`: what differs from what a plan would choose."""


FAILURES = (RecspecError, MemoryError, ArithmeticError, ValueError, RuntimeError)
"""Errors of one model that don't end a search: libraries raise the others for too little memory, or numbers that have
no solution."""


def told(error: Exception) -> str:
    """Every problem of an error, one a line."""
    if isinstance(error, RecspecError):
        return "\n".join(error.problems)
    return of_the_machine(error) or f"{type(error).__name__}: {error}"


def main_reason(why: str) -> str:
    """The first problem in one line, without advice."""
    return why.partition("\n")[0].partition("; ")[0]


def is_fitted(model: str) -> bool:
    """Whether a model is fitted in closed form, so that its training can't pause."""
    return model in MODELS and issubclass(MODELS[model], FittedModel)


def suitable(
    spec: FeatureSpec, only: Sequence[str] | None, train: Mapping[str, object], ranks: Ranks
) -> tuple[dict[str, TrainingPlan | FitPlan], dict[str, str]]:
    """The plan of each model that can train on the dataset, fitted ones first; and why each other one can't.

    Raises:
        SettingsError: if `only` names an unknown model, or no model can train.
    """
    strange = [name for name in only or () if name not in MODELS]
    if strange:
        raise SettingsError(f"--models: {unknown('model', strange, MODELS)}")
    plans, left_out = {}, {}
    for name in sorted(only or MODELS, key=lambda each: not is_fitted(each)):
        try:
            model_settings, train_settings = built(name, {"settings": {}, "train": train})
            kind = MODELS[name]
            require_libraries(kind)
            if issubclass(kind, FittedModel) and kind.metric.startswith("rows/") and negatives_by_default(spec):
                raise SettingsError(f"{name} needs labelled rows of both classes, and train holds interactions alone")
            plans[name] = plan_run(name, spec, Path(), train_settings, model_settings, ranks, resume=False)
        except RecspecError as error:
            left_out[name] = told(error)
    if not plans:
        problems = [f"{name}: {main_reason(why)}" for name, why in left_out.items()]
        raise SettingsError.of(f"{spec.folder}: no model can train on it", problems)
    return plans, left_out


def ranks_items(model: str) -> bool:
    """Whether a model ranks items by the users' events, which a blend can hold."""
    return model in MODELS and issubclass(MODELS[model], ItemModel)


def common_metric(spec: FeatureSpec, plans: Mapping[str, TrainingPlan | FitPlan]) -> str:
    """The metric for all models, whatever one model's plan takes: full ranking of interactions, log loss of labels."""
    planned = next(iter(plans.values()))
    if task_of(spec) == "clicks":
        planned = next((plan for name, plan in plans.items() if not ranks_items(name)), planned)
    if planned.valid.value in spec.splits and planned.metric.value.partition("/")[0] != "rows":
        return "full/ndcg@10"
    return planned.metric.value


def built(model: str, given: Given) -> tuple[config.Settings, TrainSettings]:
    """The settings of a model and its training from sections."""
    own = config.build(MODELS[model].Settings, f"settings of {model}", given["settings"])
    return own, config.build(TrainSettings, f"settings of {model}", given["train"])


def variants(model: str, plan: TrainingPlan, train: Mapping[str, object], seed: int) -> Iterator[Given]:
    """Settings drawn evenly from the model's own space, without end; the same for the same seed."""
    space = search_space(model, plan, {}, fixed=[f"train.{name}" for name in train])
    rng = np.random.default_rng([seed, *model.encode()])
    while True:
        sections = assigned({name: each.drawn(rng) for name, each in space.items()}, sections_of(model))
        yield {"settings": sections["settings"], "train": {**train, **sections["train"]}}
