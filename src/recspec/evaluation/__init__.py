"""Protocols, scores, baselines and the evaluation report."""

from recspec.evaluation import warnings
from recspec.evaluation.bootstrap import compare, compare_values, favours, intervals
from recspec.evaluation.choosing import Tried
from recspec.evaluation.evaluations import evaluate, evaluate_baselines, evaluate_model
from recspec.evaluation.fitting import Fitted, ItemFit, RowFit
from recspec.evaluation.interactions import id_feature, positives, read_rows
from recspec.evaluation.labelled_rows import count_labels
from recspec.evaluation.protocols import run_protocols
from recspec.evaluation.question import PROTOCOLS, EvaluateSettings, Question
from recspec.evaluation.report import Comparison, Evaluation, Interval, Report, Slice, difference, is_lower_better
from recspec.evaluation.scored_rows import evaluate_rows
from recspec.evaluation.scoring import (
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
    "Comparison",
    "EvaluateSettings",
    "Evaluation",
    "Fitted",
    "Interval",
    "ItemFit",
    "ModelRanker",
    "ModelWarning",
    "Progress",
    "Question",
    "Report",
    "RowFit",
    "Slice",
    "Tried",
    "as_batch",
    "check_same_features",
    "compare",
    "compare_values",
    "count_labels",
    "difference",
    "evaluate",
    "evaluate_baselines",
    "evaluate_model",
    "evaluate_rows",
    "favours",
    "id_feature",
    "intervals",
    "is_lower_better",
    "positives",
    "read_rows",
    "run_protocols",
    "score_rows",
    "scores_of",
    "silent",
    "warnings",
]
