"""The candidates of a search: the models that suit a dataset, variants of them, and what their evaluation costs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recspec.base import config
from recspec.base.errors import RecspecError, SettingsError, of_the_machine, unknown
from recspec.bundle import Blend
from recspec.data.storage import open_split
from recspec.evaluation import (
    EvaluationTask,
    ModelRanker,
    as_batch,
    list_metric,
    seconds_of,
    seconds_of_an_operation,
    users_at_once,
    warnings,
)
from recspec.feature_spec import FeatureSpec
from recspec.loading import Ranks, item_features, negatives_by_default
from recspec.models import (
    MODELS,
    FittedModel,
    ItemModel,
    Model,
    MultiTask,
    TrainedItemModel,
    find_model,
    known_models,
    on_meta_device,
    require_libraries,
)
from recspec.models.layers import to_device
from recspec.training import FitPlan, Result, TrainingPlan, TrainSettings, has_checkpoint, plan_run, task_of, train
from recspec.training.search.search_space import assigned, search_space, sections_of
from recspec.training.search.state import OF_PROBABILITIES, Line, State, check_metric, question_of

MOST_USERS, FEWEST_USERS = 2000, 500
"""Users ranked between epochs: more hardly sharpen the choice, fewer are noise."""
ROWS = 16_384
"""Rows that are timed."""
MOST_TIMED = 2.0
"""Seconds that one timed call may take by what one user takes alone."""
MOST_FOR_JUDGING = 0.02
"""Share of the time that one evaluation of a model may take; there is one an epoch, so a slower one is left out."""
MORE = 2.5
"""How many times as long it may take for more users than the fewest."""
LOSERS = 0.35
"""Share of the time for candidates that are not the best one. That may change, so the end finds some more: up to two
fifths. One fit, which can't be stopped, may not take more than this share."""

DRAWN = 0.3
"""Share of the settings that a variant draws. Of ten variants on Adult and on MovieLens 100K as labelled rows, the best
log loss was .2542 and .5793 with this share, .2582 and .5866 if all were drawn; the defaults have .2546 and .5843."""

FAILURES = (RecspecError, MemoryError, ArithmeticError, ValueError, RuntimeError)
"""Errors of one model that don't end a search: libraries raise the others for too little memory, or numbers that have
no solution."""


def begin(
    spec: FeatureSpec,
    out: Path,
    minutes: float,
    metric: str | None,
    models: Sequence[str] | None,
    seed: int,
    train: Mapping[str, object],
    ranks: Ranks,
) -> tuple[State, dict[str, TrainingPlan]]:
    """A search with a candidate for each model, and the plans of those that train by steps.

    `train` holds settings that each of these is given.

    Raises:
        SettingsError: if no model can train on the dataset in the time.
    """
    if metric is not None:
        check_metric(metric)
    plans, left_out = suitable(spec, models, {} if metric is None else {"metric": metric}, ranks)
    if not next(iter(plans.values())).valid.value:
        raise SettingsError(
            f"{spec.folder}: there is no split valid to choose the best model on; prepare a dataset with one"
        )
    decides = metric or _common_metric(spec, plans)
    if decides in OF_PROBABILITIES:
        why = f"{decides} decides, and it gives no probability; --metric full/ndcg@10 compares all models that rank"
        left_out |= {name: f"{name} ranks items: {why}" for name in plans if ranks_items(name)}
        plans = {name: plan for name, plan in plans.items() if name not in left_out}
    asked = None if models is None else sorted(models)
    state = State(dataset=str(spec.folder.resolve()), metric=decides, seed=seed, models=asked, left_out=left_out)
    by_steps = {name: plan for name, plan in plans.items() if isinstance(plan, TrainingPlan)}
    _measure_cost(state, spec, by_steps, ranks, minutes)
    fits = _seconds_of_fits({name: plan for name, plan in plans.items() if name not in by_steps})
    for name, seconds in fits.items():
        if seconds > LOSERS * minutes * 60:
            state.left_out[name] = f"one fit takes {seconds:.0f} of {60 * minutes:.0f} s; give more --minutes"
    common: dict[str, object] = {"tensorboard": False, "seed": seed}
    if state.users is not None:
        common["valid_users"] = state.users

    def order(name: str) -> tuple[bool, float]:
        """Fitted models first; then the cheaper ones, as what an evaluation costs is about what training costs."""
        return name in by_steps, state.each.get(name, 0.0) if name in by_steps else fits[name]

    for name in sorted((name for name in plans if name not in state.left_out), key=order):
        own = dict(train) if name in by_steps else dict[str, object]()
        if metric is not None or plans[name].metric.value != state.metric:
            own["metric"] = state.metric
        state.lines.append(Line(name=name, model=name, train={**common, **own}, fit=fits.get(name, 0.0)))
    if not state.lines:
        raise _nothing_to_train(f"{out}: no model can train in {minutes:g} minutes", state.left_out)
    return state, by_steps


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
    usual = [name for name, model in MODELS.items() if model.traits.in_auto]
    for name in sorted(only or usual, key=lambda each: not issubclass(find_model(each), FittedModel)):
        try:
            model_settings, train_settings = build_settings(name, {}, train)
            kind = find_model(name)
            require_libraries(kind)
            if issubclass(kind, FittedModel) and kind.metric.startswith("rows/") and negatives_by_default(spec):
                raise SettingsError(f"{name} needs labelled rows of both classes, and train holds interactions alone")
            if only is None and issubclass(kind, MultiTask) and len(spec.labels) == 1:
                raise SettingsError(f"{name} is for several labels, and the dataset has one")
            plans[name] = plan_run(name, spec, Path(), train_settings, model_settings, ranks, resume=False)
        except RecspecError as error:
            left_out[name] = problems_of(error)
    if not plans:
        raise _nothing_to_train(f"{spec.folder}: no model can train on it", left_out)
    return plans, left_out


def _nothing_to_train(what: str, left_out: Mapping[str, str]) -> SettingsError:
    return SettingsError.of(what, by_reason(left_out))


def _common_metric(spec: FeatureSpec, plans: Mapping[str, TrainingPlan | FitPlan]) -> str:
    """The metric for all models, whatever one model's plan takes: full ranking of interactions, log loss of labels."""
    planned = next(iter(plans.values()))
    if task_of(spec) == "clicks":
        planned = next((plan for name, plan in plans.items() if not ranks_items(name)), planned)
    if planned.valid.value in spec.splits and planned.metric.value.partition("/")[0] != "rows":
        return list_metric(spec)
    return planned.metric.value


def ranks_items(model: str) -> bool:
    """Whether a model ranks items by the users' events, which a blend can hold."""
    return model != Blend.name and issubclass(find_model(model), ItemModel)


def build_settings(
    model: str, settings: Mapping[str, object], train: Mapping[str, object]
) -> tuple[config.Settings, TrainSettings]:
    """The settings of a model and of its training, from the sections of a recipe."""
    where = f"settings of {model}"
    return config.build(find_model(model).Settings, where, settings), config.build(TrainSettings, where, train)


def train_candidate(
    model: str, spec: FeatureSpec, run: Path, settings: tuple[config.Settings, TrainSettings], **how: Any
) -> Result:
    """Train with the settings of a model and of its training, from the run's checkpoint if there is one, or anew."""
    own, train_settings = settings
    resume = has_checkpoint(run) and not issubclass(find_model(model), FittedModel)
    if not resume:
        shutil.rmtree(run, ignore_errors=True)
    return train(model, spec, run, settings=train_settings, model_settings=own, resume=resume, **how)


def problems_of(error: Exception) -> str:
    """Every problem of an error, one a line."""
    if isinstance(error, RecspecError):
        return "\n".join(error.problems)
    return of_the_machine(error) or f"{type(error).__name__}: {error}"


def main_reason(why: str) -> str:
    """The first problem in one line, without advice."""
    return why.partition("\n")[0].partition("; ")[0]


def by_reason(left_out: Mapping[str, str]) -> list[str]:
    """A line for each main reason, which begins with the models that share it."""
    named: dict[str, list[str]] = {}
    for name, why in left_out.items():
        first, _, rest = main_reason(why).partition(" ")
        is_own = first.lower() == name.replace("_", "")  # the name or the class of the model, which the line has
        named.setdefault(rest if is_own or first == name else f"{first} {rest}", []).append(name)
    return [f"{', '.join(names)}: {why}" for why, names in named.items()]


def variants(
    model: str, plan: TrainingPlan, train: Mapping[str, object], seed: int
) -> Iterator[tuple[dict[str, object], dict[str, object]]]:
    """Sections `settings` and `train` of variants, without end; the same for a seed.

    A variant draws each setting of the model's own space with probability `DRAWN`, at least one; the others keep their
    defaults.
    """
    space = search_space(model, plan, {}, fixed=[f"train.{name}" for name in train])
    rng = np.random.default_rng([seed, *model.encode()])
    while True:
        drawn = {name: each.drawn(rng) for name, each in space.items()}
        kept = (rng.random(len(space)) < DRAWN) | (np.arange(len(space)) == rng.integers(max(1, len(space))))
        sections = assigned(dict(compress(drawn.items(), kept)), sections_of(model))
        yield dict(sections["settings"]), {**train, **sections["train"]}


# --- cost ------------------------------------------------------------------------------------------------------------


def _seconds_of_fits(plans: Mapping[str, TrainingPlan | FitPlan]) -> dict[str, float]:
    """Roughly the seconds of one fit of each model, so that the cheaper ones come first and none takes all the time."""
    found, one = {}, seconds_of_an_operation()
    for name, plan in plans.items():
        model = on_meta_device(lambda plan=plan: plan.make(None))  # type: ignore[misc]
        assert isinstance(model, FittedModel)
        found[name] = one * model.operations()
    return found


def _measure_cost(
    state: State, spec: FeatureSpec, plans: Mapping[str, TrainingPlan], ranks: Ranks, minutes: float
) -> None:
    """Find the users that all models are judged on, and leave out the models whose evaluation takes too long."""
    protocol = state.metric.partition("/")[0]
    if not plans and protocol == "full":
        state.users = MOST_USERS
    if not plans and protocol == "rows":
        return
    question = question_of(spec, "valid" if "valid" in spec.splits else "train", state.metric)
    state.size = size_of(question)
    if not state.size:
        raise SettingsError(
            f"{spec.folder}: {state.metric} judges nothing, as no positive of valid is an item that is new to its "
            "user; ask for another metric, such as --metric rows/auc"
        )
    if protocol == "full" or (protocol == "sampled" and spec.has_series):
        facts = {"repeats_left_out": question.num_repeats, "of_positives": question.positives.num_pairs}
        state.warnings = [each.message for each in warnings.of_repeats({protocol: facts}, question.split)]
    if not plans:
        return
    for name, plan in plans.items():
        state.each[name] = seconds_each(_untrained(plan, ranks), question)
    most = MOST_FOR_JUDGING * minutes * 60
    if protocol == "full":
        state.users, too_slow = users_to_rank(state.each, state.size, most)
    else:
        too_slow = [name for name, each in state.each.items() if each * state.size > most]
    for name in too_slow:
        takes = state.each[name] * (state.users or state.size)
        state.left_out[name] = f"one evaluation takes {takes:.0f} of {60 * minutes:.0f} s; give more --minutes"


def _untrained(plan: TrainingPlan, ranks: Ranks) -> Model:
    """A model with its first weights, which knows the users' events."""
    model = plan.make(None).to(ranks.device).eval()
    if isinstance(model, TrainedItemModel) and plan.interactions is not None:
        model.learn_from(plan.interactions)
        model.describe(item_features(plan.spec, plan.settings.train_splits, model.item_inputs))
    return model


def users_to_rank(each: Mapping[str, float], users: int, seconds: float) -> tuple[int, list[str]]:
    """How many users all models are judged on, and the models that take more than `seconds` for the fewest.

    More users may take `MORE` times that.

    `each` holds a model's seconds for one user.
    """
    fewest = min(FEWEST_USERS, users)
    too_slow = [name for name, one in each.items() if one * fewest > seconds]
    slowest = max((one for name, one in each.items() if name not in too_slow), default=0.0)
    affordable = int(MORE * seconds / slowest) if slowest > 0 else users
    return min(users, MOST_USERS, max(fewest, affordable)), too_slow


def seconds_each(model: Model, question: EvaluationTask) -> float:
    """Seconds to judge a model on one user, or one row, of many that are scored together."""
    with torch.inference_mode():
        if not _ranks(question):
            rows = max(1, min(ROWS, size_of(question)))
            return seconds_of(request_of(model, question, rows)) / rows
        one = seconds_of(request_of(model, question, 1))
        users = min(users_at_once(question.truth.num_items, model.device), size_of(question))
        if one * users > MOST_TIMED:
            return one
        return min(one, seconds_of(request_of(model, question, users)) / users)


def size_of(question: EvaluationTask) -> int:
    """Users that are ranked, or rows that are judged."""
    return len(question.ranked_users) if _ranks(question) else len(question.rows.labels)


def _ranks(question: EvaluationTask) -> bool:
    return question.choose()[0] == ("full",)


def request_of(model: Model, question: EvaluationTask, number: int) -> Callable[[], object]:
    """A call that scores every item for so many users at once, or so many rows where rows are judged."""
    if _ranks(question):
        ranker, users = ModelRanker(model, question), question.ranked_users[:number]
        return lambda: ranker.score_users(users)
    reader = open_split(question.spec, question.split, model.features())
    batch = to_device(as_batch(reader.read(0, min(number, reader.num_rows)), question.spec), model.device)
    return lambda: model(batch).cpu()
