"""Training: settings, plan, loop, checkpoints, optimizers and the search for settings."""

from recspec.training.choices import Choice
from recspec.training.fit import FitPlan
from recspec.training.loop import TrainingRun, plan_run, train
from recspec.training.plan import TrainingPlan, make_plan
from recspec.training.precision import arithmetic
from recspec.training.result import Result
from recspec.training.search_space import describe, parse_space, sections_of
from recspec.training.settings import TrainSettings
from recspec.training.study import Found
from recspec.training.tune import Tuning

__all__ = [
    "Choice", "FitPlan", "Found", "Result", "TrainSettings", "TrainingPlan", "TrainingRun", "Tuning", "arithmetic",
    "describe", "make_plan", "parse_space", "plan_run", "sections_of", "train",
]  # fmt: skip
