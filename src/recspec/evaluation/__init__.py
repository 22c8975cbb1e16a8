"""Protocols, scores, baselines and the evaluation report."""

from recspec.evaluation import warnings
from recspec.evaluation.blending import choose_weights
from recspec.evaluation.boosting import BoostedFit
from recspec.evaluation.bootstrap import (
    Paired,
    better,
    compare,
    compare_over,
    compare_values,
    favours,
    pair,
    tested_difference,
)
from recspec.evaluation.choosing import Tried
from recspec.evaluation.evaluations import evaluate, evaluate_baselines, evaluate_model, informed
from recspec.evaluation.fitting import Fitted, ItemFit, RowFit
from recspec.evaluation.interactions import (
    disliked_items,
    id_feature,
    interactions_of,
    positives,
    read_events,
    read_rows,
    seen_items,
)
from recspec.evaluation.protocols import run_protocols
from recspec.evaluation.rankings import users_at_once
from recspec.evaluation.report import (
    Asked,
    Comparison,
    Evaluation,
    Groups,
    Interval,
    Report,
    Slice,
    difference,
    is_lower_better,
)
from recspec.evaluation.row_baselines import count_labels
from recspec.evaluation.runs import FoundRun, RunList, find_runs
from recspec.evaluation.saved import Kept, SavedEvaluation, held_values, real, save, saved
from recspec.evaluation.scoring import (
    ModelRanker,
    Progress,
    as_batch,
    check_same_features,
    score_rows,
    scores_of,
    seconds_of,
    seconds_of_an_operation,
    silent,
)
from recspec.evaluation.seeds import (
    Method,
    MethodPair,
    SeedValues,
    compare_methods,
    holm,
    measured_methods,
    methods_of,
)
from recspec.evaluation.slices import evaluate_rows
from recspec.evaluation.task import PROTOCOLS, EvaluateSettings, EvaluationTask, list_metric
from recspec.evaluation.warnings import ModelWarning, is_clear

__all__ = [
    "PROTOCOLS",
    "Asked",
    "BoostedFit",
    "Comparison",
    "EvaluateSettings",
    "Evaluation",
    "EvaluationTask",
    "Fitted",
    "FoundRun",
    "Groups",
    "Interval",
    "ItemFit",
    "Kept",
    "Method",
    "MethodPair",
    "ModelRanker",
    "ModelWarning",
    "Paired",
    "Progress",
    "Report",
    "RowFit",
    "RunList",
    "SavedEvaluation",
    "SeedValues",
    "Slice",
    "Tried",
    "as_batch",
    "better",
    "check_same_features",
    "choose_weights",
    "compare",
    "compare_methods",
    "compare_over",
    "compare_values",
    "count_labels",
    "difference",
    "disliked_items",
    "evaluate",
    "evaluate_baselines",
    "evaluate_model",
    "evaluate_rows",
    "favours",
    "find_runs",
    "held_values",
    "holm",
    "how_tasks_differ",
    "id_feature",
    "informed",
    "interactions_of",
    "is_clear",
    "is_lower_better",
    "list_metric",
    "measured_methods",
    "methods_of",
    "pair",
    "positives",
    "read_events",
    "read_rows",
    "real",
    "run_protocols",
    "save",
    "saved",
    "score_rows",
    "scores_of",
    "seconds_of",
    "seconds_of_an_operation",
    "seen_items",
    "silent",
    "tested_difference",
    "users_at_once",
    "warnings",
]  # fmt: skip
