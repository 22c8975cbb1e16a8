"""Evaluation of a model, a ranker or the baselines on a split of a prepared dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from recspec.distributed import Ranks
from recspec.errors import RecspecError, listed
from recspec.evaluation.interactions import Interactions, history_of_items, positives
from recspec.evaluation.item_baselines import BASELINES, Ranker
from recspec.evaluation.protocols import run_protocols
from recspec.evaluation.question import EvaluateSettings, Question
from recspec.evaluation.report import Evaluation, Report
from recspec.evaluation.row_baselines import ROW_BASELINES, count_labels
from recspec.evaluation.scoring import (
    ModelScores,
    Progress,
    RankerScores,
    ScorerScores,
    SplitScores,
    check_same_features,
    silent,
)
from recspec.models import Model
from recspec.spec import FeatureSpec


class _TrainedCard(Protocol):
    @property
    def train(self) -> Mapping[str, object]: ...


class Trained(Protocol):
    """The parts of a bundle that evaluation reads."""

    @property
    def model(self) -> Model:
        """The model."""

    @property
    def card(self) -> _TrainedCard:
        """The model card, with the training settings."""


def evaluate(
    trained: Trained,
    spec: FeatureSpec,
    split: str = "test",
    *,
    protocols: Sequence[str] | None = None,
    baselines: bool = False,
    settings: EvaluateSettings | None = None,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Report:
    """Evaluate a trained model on a split of a prepared dataset, with baselines for comparison.

    The first rank alone fits the baselines, on the positives of the splits that the model was trained on.

    Raises:
        SpecError: if the dataset lacks the model's features, or the roles that a protocol needs.
        SettingsError: for an unknown protocol, or a cut-off longer than every list of candidates.
    """
    ranks = ranks or Ranks()
    check_same_features(trained.model, spec)
    question = Question(spec, split, protocols, settings or EvaluateSettings(), reads=trained.model.features())
    model = run_protocols(ModelScores(trained.model, question, ranks), question, ranks, progress or silent)
    beside: dict[str, Evaluation] = {}
    not_fitted: dict[str, str] = {}
    if baselines and ranks.is_first:
        splits = trained.card.train.get("train_splits")
        fitted_on = [str(name) for name in splits] if isinstance(splits, (list, tuple)) else ["train"]
        beside, not_fitted = evaluate_baselines(question, fitted_on, protocols=tuple(model.metrics), progress=progress)
    return Report(split, model, beside, not_fitted)


def evaluate_model(
    model: Model,
    spec: FeatureSpec,
    split: str,
    *,
    protocols: Sequence[str] | None = None,
    settings: EvaluateSettings | None = None,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate a model in memory, as training does after an epoch."""
    ranks = ranks or Ranks()
    question = Question(spec, split, protocols, settings or EvaluateSettings(), reads=model.features())
    return run_protocols(ModelScores(model, question, ranks), question, ranks, progress or silent)


def evaluate_ranker(
    ranker: Ranker,
    spec: FeatureSpec,
    split: str,
    *,
    protocols: Sequence[str] | None = None,
    settings: EvaluateSettings | None = None,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate a ranker of user-item pairs. Its scores are not logits, so it has no log loss."""
    ranks = ranks or Ranks()
    question = Question(spec, split, protocols, settings or EvaluateSettings(), reads=())
    return run_protocols(RankerScores(ranker, question, ranks), question, ranks, progress or silent)


def evaluate_baselines(
    question: Question,
    fitted_on: Sequence[str] = ("train",),
    *,
    names: Sequence[str] = (*ROW_BASELINES, *BASELINES),
    protocols: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Evaluation], dict[str, str]]:
    """Fit baselines and evaluate them under the protocols of a question.

    `BASELINES` need users and items. `ROW_BASELINES` need rows of both classes, and are evaluated if rows are scored.

    If rows hold histories, a model knows the user's earlier events at each row. To match that, a baseline learns item
    similarities from `fitted_on`, but knows every item that the user acted on before the split.

    Returns:
        The evaluation of each baseline, and the reason for each baseline that was left out.
    """
    spec, progress = question.spec, progress or silent
    question = question if protocols is None else question.under(protocols)
    fits: dict[str, Callable[[], tuple[SplitScores, Question, Mapping[str, object]]]] = {}
    missing: dict[str, str] = {}

    def of_rows(name: str, question: Question) -> tuple[SplitScores, Question, Mapping[str, object]]:
        scorer = ROW_BASELINES[name](spec, fitted_on)
        return ScorerScores(scorer, question), question, scorer.facts

    def of_pairs(name: str, interactions: Interactions) -> tuple[SplitScores, Question, Mapping[str, object]]:
        baseline = BASELINES[name](interactions)
        if not question.before or history_of_items(spec) is None:
            return RankerScores(baseline, question, Ranks()), question, {}
        facts = {"users_known_by": f"rows and histories of {' and '.join(question.before)}"}
        return RankerScores(baseline.knowing(question.seen), question, Ranks()), question, facts

    of_own_rows = ("rows", "sampled") if question.lists_candidates else ("rows",)
    scored = [protocol for protocol in question.choose()[0] if protocol in of_own_rows]
    absent = [split for split in fitted_on if split not in spec.splits]
    if absent:
        reason = f"the dataset has no split {listed(absent)} to fit them on"
        return {}, dict.fromkeys(names, reason)
    if scored and _carry_both_classes(spec, fitted_on):
        fits |= {name: partial(of_rows, name, question.under(scored)) for name in names if name in ROW_BASELINES}
    recommending = [name for name in names if name in BASELINES]
    if not (question.has_users and question.has_items):
        missing = dict.fromkeys(recommending, question.lacks)
    elif recommending:
        interactions = positives(spec, fitted_on)
        fits |= {name: partial(of_pairs, name, interactions) for name in recommending}

    found: dict[str, Evaluation] = {}
    for number, (name, fit) in enumerate(fits.items()):
        progress("baselines", number, len(fits))
        try:
            answers, scope, facts = fit()
        except RecspecError as error:
            missing[name] = str(error)
            continue
        found[name] = replace(run_protocols(answers, scope, Ranks(), silent), fitted=facts)
    progress("baselines", len(fits), len(fits))
    return found, missing


def _carry_both_classes(spec: FeatureSpec, splits: Sequence[str]) -> bool:
    rows, positive = count_labels(spec, splits)
    return 0 < positive < rows
