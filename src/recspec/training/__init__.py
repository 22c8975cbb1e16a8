"""Training: settings, plan, loop, checkpoints, optimizers and the search for settings."""

from recspec.training.blend import Blended, blend_runs
from recspec.training.choices import Choice
from recspec.training.defaults import task_of
from recspec.training.loop import TrainingRun, plan_run, train
from recspec.training.plan import FitPlan, Plan, TrainingPlan, make_plan
from recspec.training.product_rates import arithmetic
from recspec.training.refitting import refit
from recspec.training.result import Result
from recspec.training.run_folder import RECIPE, Event, has_checkpoint, remove_run
from recspec.training.settings import TrainSettings
from recspec.training.tracking import TrackedSearch, require_mlflow, send_file
from recspec.training.updating import (
    Learning,
    Updated,
    UpdateSettings,
    check_run,
    dataset_of,
    next_version,
    parts_of,
    update,
)
