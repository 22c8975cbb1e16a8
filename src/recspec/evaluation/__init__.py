"""Protocols, scores, baselines and the evaluation report."""

from recspec.evaluation.evaluations import evaluate, evaluate_model
from recspec.evaluation.fitting import METRIC, Fitted, ItemFit, Tried
from recspec.evaluation.interactions import id_feature, positives
from recspec.evaluation.question import PROTOCOLS, EvaluateSettings, Question
from recspec.evaluation.report import LOWER_IS_BETTER, Report
from recspec.evaluation.scoring import ModelRanker, as_batch, check_same_features, score_rows

__all__ = [
    "LOWER_IS_BETTER",
    "METRIC",
    "PROTOCOLS",
    "EvaluateSettings",
    "Fitted",
    "ItemFit",
    "ModelRanker",
    "Question",
    "Report",
    "Tried",
    "as_batch",
    "check_same_features",
    "evaluate",
    "evaluate_model",
    "id_feature",
    "positives",
    "score_rows",
]
