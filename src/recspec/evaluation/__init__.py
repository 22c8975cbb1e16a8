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
from recspec.evaluation.fitting import Fitted, ItemFit, RowFit, metric_value
from recspec.evaluation.interactions import (
    disliked_items,
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
