"""The beginning of a search: the models that suit, the metric that decides, and what an evaluation costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from recspec.base.errors import SettingsError
from recspec.evaluation import seconds_of_an_operation, warnings
from recspec.feature_spec import FeatureSpec
from recspec.loading import Ranks, item_features
from recspec.models import FittedModel, Model, TrainedItemModel, on_meta_device
from recspec.training import FitPlan, TrainingPlan
from recspec.training.search import candidates
from recspec.training.search import candidates as cost
from recspec.training.search.state import OF_PROBABILITIES, Line, State, check_metric, question_of

MOST_FOR_JUDGING = 0.2
"""Share of the time that one evaluation of a model may take; a model that takes longer is left out."""
MOST_FOR_FIT = 0.4
"""Share of the time that one fit of a model may take, which can't be stopped in between."""


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
    plans, left_out = candidates.suitable(spec, models, {} if metric is None else {"metric": metric}, ranks)
    planned = next(iter(plans.values()))
    if not planned.valid.value:
        raise SettingsError(
            f"{spec.folder}: there is no split valid to choose the best model on; prepare a dataset with one"
        )
    decides = metric or candidates.common_metric(spec, plans)
    if decides in OF_PROBABILITIES:
        why = f"{decides} decides, and it gives no probability; --metric full/ndcg@10 compares all models that rank"
        left_out |= {name: f"{name} ranks items: {why}" for name in plans if candidates.ranks_items(name)}
        plans = {name: plan for name, plan in plans.items() if name not in left_out}
    state = State(
        dataset=str(spec.folder.resolve()),
        metric=decides,
        seed=seed,
        models=None if models is None else sorted(models),
        left_out=left_out,
    )
    by_steps = {name: plan for name, plan in plans.items() if isinstance(plan, TrainingPlan)}
    too_slow = [*_measure_cost(state, spec, by_steps, ranks, minutes)]
    fits = _seconds_of_fits({name: plan for name, plan in plans.items() if name not in by_steps})
    for name, seconds in fits.items():
        if seconds > MOST_FOR_FIT * minutes * 60:
            too_slow.append(name)
            state.left_out[name] = f"one fit takes {seconds:.0f} of {60 * minutes:.0f} s; give more --minutes"
    common: dict[str, object] = {"tensorboard": False, "seed": seed}
    if state.users is not None:
        common["valid_users"] = state.users

    def order(name: str) -> tuple[bool, float]:
        """Fitted models first; then the cheaper ones, as what an evaluation costs is about what training costs."""
        return name in by_steps, state.each.get(name, 0.0) if name in by_steps else fits[name]

    for name in sorted((name for name in plans if name not in too_slow), key=order):
        own = dict(train) if name in by_steps else dict[str, object]()
        if metric is not None or plans[name].metric.value != state.metric:
            own["metric"] = state.metric
        state.lines.append(Line(name=name, model=name, train={**common, **own}))
    if not state.lines:
        problems = [f"{name}: {candidates.main_reason(why)}" for name, why in state.left_out.items()]
        raise SettingsError.of(f"{out}: no model can train in {minutes:g} minutes", problems)
    return state, by_steps


def _seconds_of_fits(plans: Mapping[str, TrainingPlan | FitPlan]) -> dict[str, float]:
    """Roughly the seconds of one fit of each model, so that the cheaper ones come first and none takes all the time."""
    found = {}
    one = seconds_of_an_operation()
    for name, plan in plans.items():
        model = on_meta_device(lambda plan=plan: plan.make(None))  # type: ignore[misc]
        assert isinstance(model, FittedModel)
        found[name] = one * model.operations()
    return found


def _measure_cost(
    state: State, spec: FeatureSpec, plans: Mapping[str, TrainingPlan], ranks: Ranks, minutes: float
) -> Sequence[str]:
    """Find the users that all models are judged on, and the models whose evaluation takes too long."""
    protocol = state.metric.partition("/")[0]
    if not plans and protocol == "full":
        state.users = cost.MOST_USERS
    if not plans and protocol == "rows":
        return ()
    question = question_of(spec, "valid" if "valid" in spec.splits else "train", state.metric)
    state.size = cost.size_of(question)
    if not state.size:
        raise SettingsError(
            f"{spec.folder}: {state.metric} judges nothing, as no positive of valid is an item that is new to its "
            "user; ask for another metric, such as --metric rows/auc"
        )
    if protocol == "full" or (protocol == "sampled" and spec.has_series):
        facts = {"repeats_left_out": question.num_repeats, "of_positives": question.positives.num_pairs}
        state.warnings = [each.message for each in warnings.of_repeats({protocol: facts}, question.split)]
    if not plans:
        return ()
    for name, plan in plans.items():
        state.each[name] = cost.seconds_each(_untrained(plan, ranks), question)
    most = MOST_FOR_JUDGING * minutes * 60
    if state.metric.startswith("full/"):
        state.users, too_slow = cost.users_to_rank(state.each, state.size, most)
    else:
        too_slow = [name for name, each in state.each.items() if each * state.size > most]
    for name in too_slow:
        takes = state.each[name] * (state.users or state.size)
        state.left_out[name] = f"one evaluation takes {takes:.0f} of {60 * minutes:.0f} s; give more --minutes"
    return too_slow


def _untrained(plan: TrainingPlan, ranks: Ranks) -> Model:
    """A model with its first weights, which knows the users' events."""
    model = plan.make(None).to(ranks.device).eval()
    if isinstance(model, TrainedItemModel) and plan.interactions is not None:
        model.learn_from(plan.interactions)
        model.describe(item_features(plan.spec, plan.settings.train_splits, model.item_inputs))
    return model


def so_far(state: State, left: float) -> str:
    """A sentence on a search that is taken up, with `left` seconds."""
    over = sum(line.is_over for line in state.lines)
    took, left_over = f"{state.spent:.0f} s", f"{max(0.0, left) / 60:.1f} minutes"
    said = [f"the search goes on after {took}, {left_over} are left: {over} of {len(state.lines)} candidates are over"]
    if state.ranked:
        best = state.ranked[0]
        said.append(f"best so far {best.name}, {state.deciding} {abs(best.best):.4g}")
    if state.ending is not None:
        judged = f"{len(state.ending.places)} of {len(state.ending.judged)} candidates are judged"
        said.append(f"final evaluation: {'done' if state.ending.done else judged}")
    return "; ".join(said)
