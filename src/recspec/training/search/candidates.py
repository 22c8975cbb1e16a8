"""The models that a dataset's roles fill, variants of them, and what their evaluation costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from recspec.base import config
from recspec.base.errors import RecspecError, SettingsError, of_the_machine, unknown
from recspec.bundle import Blend
from recspec.data.storage import open_split
from recspec.evaluation import ModelRanker, Question, as_batch, seconds_of, users_at_once
from recspec.feature_spec import FeatureSpec
from recspec.loading import Ranks, negatives_by_default
from recspec.models import MODELS, FittedModel, ItemModel, Model, find_model, known_models, require_libraries
from recspec.models.layers import to_device
from recspec.training import FitPlan, TrainingPlan, TrainSettings, plan_run, task_of
from recspec.training.search.search_space import assigned, search_space, sections_of

MOST_USERS, FEWEST_USERS = 2000, 500
"""Users ranked between epochs: more hardly sharpen the choice, fewer are noise."""
ROWS = 16_384
"""Rows that are timed."""
MOST_TIMED = 2.0
"""Seconds that one timed call may take by what one user takes alone."""


def one_request(model: Model, question: Question) -> Callable[[], object]:
    """A call that scores every item for one user, or one row where rows are judged."""
    return _request(model, question, 1)


def seconds_each(model: Model, question: Question) -> float:
    """Seconds to judge a model on one user, or one row, of many that are scored together."""
    with torch.inference_mode():
        if not _ranks(question):
            rows = max(1, min(ROWS, size_of(question)))
            return seconds_of(_request(model, question, rows)) / rows
        one = seconds_of(_request(model, question, 1))
        users = min(users_at_once(question.truth.num_items, model.device), size_of(question))
        if one * users > MOST_TIMED:
            return one
        return min(one, seconds_of(_request(model, question, users)) / users)


def size_of(question: Question) -> int:
    """Users that are ranked, or rows that are judged."""
    return len(question.ranked_users) if _ranks(question) else len(question.rows.labels)


def users_of(question: Question) -> tuple[int, int]:
    """How many users protocol `full` ranks, and of how many that could be ranked."""
    return len(question.ranked_users), int(np.count_nonzero(np.diff(question.truth.offsets)))


def _ranks(question: Question) -> bool:
    return question.choose()[0] == ("full",)


def _request(model: Model, question: Question, number: int) -> Callable[[], object]:
    """A call that scores so many users or rows at once."""
    if _ranks(question):
        ranker, users = ModelRanker(model, question), question.ranked_users[:number]
        return lambda: ranker.score_users(users)
    reader = open_split(question.spec, question.split, model.features())
    batch = to_device(as_batch(reader.read(0, min(number, reader.num_rows)), question.spec), model.device)
    return lambda: model(batch).cpu()


def users_to_rank(each: Mapping[str, float], users: int, seconds: float) -> tuple[int, list[str]]:
    """How many users all models are judged on, and the models that take more than `seconds` for the fewest.

    `each` holds a model's seconds for one user.
    """
    fewest = min(FEWEST_USERS, users)
    too_slow = [name for name, one in each.items() if one * fewest > seconds]
    slowest = max((one for name, one in each.items() if name not in too_slow), default=0.0)
    affordable = int(seconds / 4 / slowest) if slowest > 0 else users
    return min(users, MOST_USERS, max(fewest, affordable)), too_slow


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
    return model != Blend.name and issubclass(find_model(model), FittedModel)


def suitable(
    spec: FeatureSpec, only: Sequence[str] | None, train: Mapping[str, object], ranks: Ranks
) -> tuple[dict[str, TrainingPlan | FitPlan], dict[str, str]]:
    """The plan of each model that can train on the dataset, fitted ones first; and why each other one can't.

    Raises:
        SettingsError: if `only` names an unknown model, or no model can train.
    """
    strange = [name for name in only or () if name not in MODELS]
    if strange and (strange := [name for name in strange if name not in (known := known_models())]):
        raise SettingsError(f"--models: {unknown('model', strange, known)}")
    plans, left_out = {}, {}
    for name in sorted(only or MODELS, key=lambda each: not is_fitted(each)):
        try:
            model_settings, train_settings = built(name, {"settings": {}, "train": train})
            kind = find_model(name)
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
    return model != Blend.name and issubclass(find_model(model), ItemModel)


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
    own = config.build(find_model(model).Settings, f"settings of {model}", given["settings"])
    return own, config.build(TrainSettings, f"settings of {model}", given["train"])


def variants(model: str, plan: TrainingPlan, train: Mapping[str, object], seed: int) -> Iterator[Given]:
    """Settings drawn evenly from the model's own space, without end; the same for the same seed."""
    space = search_space(model, plan, {}, fixed=[f"train.{name}" for name in train])
    rng = np.random.default_rng([seed, *model.encode()])
    while True:
        sections = assigned({name: each.drawn(rng) for name, each in space.items()}, sections_of(model))
        yield {"settings": sections["settings"], "train": {**train, **sections["train"]}}
