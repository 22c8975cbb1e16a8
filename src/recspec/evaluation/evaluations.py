"""Evaluation of a model or the baselines on a split of a prepared dataset."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar, cast

from recspec.base.errors import RecspecError, SettingsError, listed, unknown
from recspec.base.stores import shown
from recspec.bundle import Bundle, DataRecord
from recspec.data.storage import label_columns
from recspec.evaluation.boosting import boosted_trees
from recspec.evaluation.bootstrap import compare, intervals
from recspec.evaluation.fitting import ItemFit
from recspec.evaluation.interactions import history_of_items
from recspec.evaluation.protocols import run_protocols
from recspec.evaluation.report import Asked, Evaluation, Report
from recspec.evaluation.row_baselines import Scorer, constant, count_labels, logistic_regression, splits_of_rows
from recspec.evaluation.saved import data_notes, other_data
from recspec.evaluation.scoring import FullRanker, Progress, Ranker, SplitScores, check_same_features, scores_of, silent
from recspec.evaluation.task import EvaluateSettings, EvaluationTask, list_metric
from recspec.feature_spec import FeatureSpec
from recspec.loading import Ranks
from recspec.models import MODELS, FittedItemModel, ItemModel, Model, MultiTask, labels_of

Scored = TypeVar("Scored", bound=Model | Ranker)
OfAll = Callable[[Bundle, EvaluationTask], FullRanker]

BASELINES: Mapping[str, type[FittedItemModel]] = MappingProxyType(
    {name: model for name, model in MODELS.items() if issubclass(model, FittedItemModel)}
)
"""Models of users' interactions alone, beside which any other model of users and items is put."""

ROW_BASELINES: Mapping[str, Callable[[FeatureSpec, Sequence[str]], Scorer]] = MappingProxyType(
    {"constant": constant, "logistic_regression": logistic_regression, "lightgbm": boosted_trees}
)
"""Classic models of labelled rows, beside which any other model of such rows is put."""

DRAWS = 1_000
"""Bootstrap draws of a comparison, unless the settings name another number."""


def evaluate(
    trained: Bundle,
    spec: FeatureSpec,
    split: str = "test",
    *,
    protocols: Sequence[str] | None = None,
    baselines: bool = False,
    settings: EvaluateSettings | None = None,
    against: Mapping[str, Bundle] | None = None,
    ranks: Ranks | None = None,
    progress: Progress = silent,
    of_all: OfAll | None = None,
) -> Report:
    """Evaluate a trained model on a split of a prepared dataset, with baselines for comparison.

    The first rank alone fits the baselines, on the positives of the splits that the model was trained on. Models
    `against` it are evaluated under the same protocols, and compared metric by metric over the same groups. `of_all`
    makes the ranker of all items of a pipeline, for protocol full.

    Raises:
        SpecError: if the dataset lacks the model's features, or the roles that a protocol needs.
        SettingsError: for an unknown protocol, or a cut-off longer than every list of candidates.
    """
    ranks, started, reads = ranks or Ranks(), time.monotonic(), trained.model.features()
    fitted_on, settings, against = _train_splits(trained), settings or EvaluateSettings(), against or {}
    check_same_features(trained.model, spec, trained.folder)
    spec = _of_label(trained, spec, settings.label)
    task = EvaluationTask(spec, split, protocols, settings, reads=reads, trained_on=fitted_on)

    def evaluated(bundle: Bundle, task: EvaluationTask) -> Evaluation:
        answers = scores_of(informed(bundle.model, task), task, ranks, progress)
        if of_all is not None and bundle.pipeline is not None:
            answers = replace(answers, of_all=of_all(bundle, task))
        return run_protocols(answers, list_metrics=True)

    model, data = evaluated(trained, task), DataRecord.of(spec) if ranks.is_first else None
    named = None if protocols is None else tuple(protocols)
    report = Report(
        split,
        model,
        intervals=intervals(model, settings.bootstrap, settings.seed),
        asked=Asked(named, settings.model_dump(mode="json"), baselines, tuple(against)),
        data=data,
        folder=shown(spec.folder),
        data_notes=() if data is None else data_notes(trained, data),
        label_columns=label_columns(spec, reads) if ranks.is_first else {},
    )
    report = _beside_runs(report, trained, task, against, evaluated)
    if baselines and ranks.is_first:
        names = [name for name in (*ROW_BASELINES, *BASELINES) if name != trained.card.model]
        task = task.with_protocols(tuple(model.metrics))
        beside, missing = evaluate_baselines(task, fitted_on, names=names, progress=progress)
        chosen_by = str(trained.card.trained.get("valid_metric") or "")
        report = replace(report, beside=beside, not_fitted=missing, chosen_by=chosen_by)
    return replace(report, seconds=time.monotonic() - started)


def _of_label(trained: Bundle, spec: FeatureSpec, label: str | None) -> FeatureSpec:
    """The dataset with the label to measure as the first. Raises `SettingsError` if the model did not learn it."""
    learned = labels_of(trained.model)
    if label is not None and label not in learned:
        raise SettingsError(f"evaluate: {unknown('label', label, learned)} of {trained.folder}")
    return spec.of_label(label or learned[0])


def _train_splits(trained: Bundle) -> list[str]:
    splits = trained.card.train.get("train_splits")
    return [str(name) for name in splits] if isinstance(splits, (list, tuple)) else ["train"]


def _beside_runs(
    report: Report,
    trained: Bundle,
    task: EvaluationTask,
    against: Mapping[str, Bundle],
    evaluated: Callable[[Bundle, EvaluationTask], Evaluation],
) -> Report:
    """The report with other runs' evaluations under its task, and their comparisons."""
    assert report.asked is not None
    asked, model, task = task.settings, report.model, task.with_protocols(tuple(report.metrics))
    compared, others, not_alone, elsewhere = {}, {}, {}, {}
    if against and report.data is not None:
        every = {"": trained, **against}
        elsewhere = {name: where for name, each in every.items() if (where := other_data(each, report.data))}
    for name, other in against.items():
        started = time.monotonic()
        check_same_features(other.model, task.spec, other.folder)
        _of_label(other, task.spec, task.spec.label if len(task.spec.labels) > 1 else None)
        found = evaluated(other, task.read_by(other.model.features()))
        compared[name] = compare(model, found, asked.bootstrap or DRAWS, asked.seed)
        if set(_train_splits(other)) != set(task.trained_on or ()):  # popular and cold items would be others
            why = f"trained on {listed(_train_splits(other))}, unlike the model; evaluate it alone"
            not_alone[name] = f"the evaluation is not kept: {why}"
            continue
        if name in elsewhere:  # a report of both runs would call it better
            not_alone[name] = "the evaluation is not kept: the run was trained on other data"
            continue
        others[name] = Report(
            report.split,
            replace(found, left_out=model.left_out),
            intervals=intervals(found, asked.bootstrap, asked.seed),
            asked=replace(report.asked, baselines=False, against=()),
            data=report.data,
            data_notes=() if report.data is None else data_notes(other, report.data),
            seconds=time.monotonic() - started,
        )
    return replace(report, against=compared, others=others, not_alone=not_alone, elsewhere=elsewhere)


def evaluate_model(
    model: Model | Ranker,
    spec: FeatureSpec,
    split: str,
    *,
    protocols: Sequence[str] | None = None,
    settings: EvaluateSettings | None = None,
    ranks: Ranks | None = None,
) -> Evaluation:
    """Evaluate a model in memory, or a ranker of user-item pairs (no logits, so no log loss)."""
    reads = model.features() if isinstance(model, Model) else ()
    task = EvaluationTask(spec, split, protocols, settings or EvaluateSettings(), reads=reads)
    return run_protocols(scores_of(informed(model, task), task, ranks))


def informed(model: Scored, task: EvaluationTask) -> Scored:
    """The model, as one of the task's label; an item model knows the users' events of the splits that it names."""
    if isinstance(model, MultiTask) and model.spec.label != task.spec.label:
        return cast(Scored, model.of_label(task.spec.label))
    if not isinstance(model, ItemModel) or not task.known:
        return model
    return cast(Scored, model.knowing(task.known_interactions(model)))


def evaluate_baselines(
    task: EvaluationTask,
    fitted_on: Sequence[str] = ("train",),
    *,
    names: Sequence[str] = (*ROW_BASELINES, *BASELINES),
    progress: Progress = silent,
) -> tuple[dict[str, Evaluation], dict[str, str]]:
    """The evaluation of each baseline under the protocols of a task, and the reason for each one left out.

    `BASELINES` need users and items. `ROW_BASELINES` need rows of both classes, and are evaluated if rows are scored.
    The candidates that valid lists in a series were drawn for evaluation; nothing is fitted to them.

    On test, the settings of `BASELINES` are chosen on valid first, as those of a model are.

    A baseline learns item similarities from `fitted_on`, but knows every item that the user acted on before the split.
    """
    spec = task.spec
    if absent := [split for split in fitted_on if split not in spec.splits]:
        return {}, dict.fromkeys(names, f"the dataset has no split {listed(absent)} to fit them on")
    of_own_rows = ("rows", "sampled") if task.lists_candidates else ("rows",)
    scored = [protocol for protocol in task.choose()[0] if protocol in of_own_rows]
    rows_of = splits_of_rows(spec, fitted_on)
    num_rows, num_positive = count_labels(spec, rows_of) if scored else (0, 0)
    fits = [name for name in names if name in ROW_BASELINES] if 0 < num_positive < num_rows else []
    recommending = [name for name in names if name in BASELINES]
    missing = dict.fromkeys(recommending, task.lacks) if task.lacks else {}
    if recommending and not task.lacks:
        fits += recommending
    valid = "valid" if "valid" in spec.splits and task.split != "valid" else ""

    def fit(name: str) -> tuple[SplitScores, Mapping[str, object]]:
        if name in ROW_BASELINES:
            scorer = ROW_BASELINES[name](spec, rows_of)
            return scores_of(scorer, task.with_protocols(scored)), scorer.facts
        kind = BASELINES[name]
        fitted = ItemFit(kind, spec, kind.Settings(), tuple(fitted_on), valid, list_metric(spec)).run()
        facts: dict[str, object] = {}
        if fitted.value is not None and kind.Settings.model_fields:
            chosen = f"valid {fitted.metric} {fitted.value:.4f}, the best of {len(fitted.tried)}"
            facts |= {"settings": fitted.model.settings.model_dump(mode="json"), "chosen_by": chosen}
        if {*task.known} != {*fitted_on} or history_of_items(spec) is not None:
            rows = "rows and histories" if history_of_items(spec) is not None else "rows"
            facts["users_known_by"] = f"{rows} of {' and '.join(task.known)}"
        return scores_of(informed(fitted.model, task), task), facts

    found: dict[str, Evaluation] = {}
    for number, name in enumerate(fits):
        progress("baselines", number, len(fits))
        try:
            answers, facts = fit(name)
        except RecspecError as error:
            missing[name] = str(error)
            continue
        found[name] = replace(run_protocols(answers, list_metrics=True), fitted=facts)
    progress("baselines", len(fits), len(fits))
    return found, missing
