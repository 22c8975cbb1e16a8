"""Protocols, scores, baselines and the evaluation report."""

from recspec.evaluation.evaluations import evaluate, evaluate_model
from recspec.evaluation.fitting import Fitted, ItemFit, RowFit, Tried
from recspec.evaluation.interactions import id_feature, positives
from recspec.evaluation.question import PROTOCOLS, EvaluateSettings
from recspec.evaluation.report import LOWER_IS_BETTER, Report
from recspec.evaluation.scoring import as_batch, check_same_features

__all__ = [
    "LOWER_IS_BETTER",
    "PROTOCOLS",
    "EvaluateSettings",
    "Fitted",
    "ItemFit",
    "Report",
    "RowFit",
    "Tried",
    "as_batch",
    "check_same_features",
    "evaluate",
    "evaluate_model",
    "id_feature",
    "positives",
]
