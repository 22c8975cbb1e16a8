"""Training: settings, plan, loop, checkpoints, optimizers and the search for settings."""

from recspec.training.blend import Blended, blend_runs
from recspec.training.choices import Choice
from recspec.training.defaults import task_of
from recspec.training.fit import FitPlan
from recspec.training.loop import TrainingRun, plan_run, train
from recspec.training.plan import TrainingPlan, make_plan
from recspec.training.precision import arithmetic
from recspec.training.result import Result
from recspec.training.run_folder import Event, has_checkpoint
from recspec.training.search_space import assigned, describe, parse_space, search_space, sections_of
from recspec.training.settings import TrainSettings
from recspec.training.study import Found
from recspec.training.tracking import TrackedSearch, require_mlflow, send_file
from recspec.training.tune import Tuning
from recspec.training.updating import Updated, UpdateSettings, update

__all__ = [
    "Blended", "Choice", "Event", "FitPlan", "Found", "Result", "TrackedSearch", "TrainSettings", "TrainingPlan",
    "TrainingRun", "Tuning", "UpdateSettings", "Updated", "arithmetic", "assigned", "blend_runs", "describe",
    "has_checkpoint", "make_plan", "parse_space", "plan_run", "require_mlflow", "search_space", "sections_of",
    "send_file", "task_of", "train", "update",
]  # fmt: skip
