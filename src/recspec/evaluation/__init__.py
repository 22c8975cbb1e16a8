"""Protocols, scores, baselines and the evaluation report."""

from recspec.evaluation import warnings
from recspec.evaluation.blending import Chosen, choose_weights
from recspec.evaluation.choosing import Tried
from recspec.evaluation.evaluations import evaluate, evaluate_baselines, evaluate_model, informed
from recspec.evaluation.fitting import Fitted, ItemFit, RowFit
from recspec.evaluation.interactions import id_feature, interactions_of, positives, read_events, read_rows
from recspec.evaluation.labelled_rows import count_labels
from recspec.evaluation.protocols import evaluate_rows, run_protocols
from recspec.evaluation.question import PROTOCOLS, EvaluateSettings, Question
from recspec.evaluation.report import Evaluation, Report, difference, is_lower_better
from recspec.evaluation.scoring import (
    FullRanker,
    ModelRanker,
    Progress,
    as_batch,
    check_same_features,
    score_rows,
    scores_of,
    silent,
)
from recspec.evaluation.warnings import ModelWarning

__all__ = [
    "PROTOCOLS",
    "Chosen",
    "EvaluateSettings",
    "Evaluation",
    "Fitted",
    "FullRanker",
    "ItemFit",
    "ModelRanker",
    "ModelWarning",
    "Progress",
    "Question",
    "Report",
    "RowFit",
    "Tried",
    "as_batch",
    "check_same_features",
    "choose_weights",
    "count_labels",
    "difference",
    "evaluate",
    "evaluate_baselines",
    "evaluate_model",
    "evaluate_rows",
    "id_feature",
    "informed",
    "interactions_of",
    "is_lower_better",
    "positives",
    "read_events",
    "read_rows",
    "run_protocols",
    "score_rows",
    "scores_of",
    "silent",
    "warnings",
]
