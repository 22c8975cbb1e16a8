"""The Python API: the verbs of the command line on data frames, with the same names and defaults."""

from recspec.api import model
from recspec.api.answering import predict, recommend, similar
from recspec.api.data import Data, Description, check, describe, open_data, prepare, synthesize, transcode
from recspec.api.evaluating import EvaluationResult, compare, evaluate
from recspec.api.exporting import Exported, Imported, export, import_tf, verify, verify_at
from recspec.api.frames import KINDS, Kind
from recspec.api.joining import BlendedModel, PipelineModel, blend, pipeline
from recspec.api.listing import Listing, Report, Runs, datasets, models, report, runs
from recspec.api.model import Model, Note, Plan, open
from recspec.api.process import keep_to_cores, settings_of, stop_on_signal
from recspec.api.serving import Serving, serve
from recspec.api.training import AutoResult, Search, auto, train, tune
from recspec.api.updating import Update, update

__all__ = [
    "KINDS", "AutoResult", "BlendedModel", "Data", "Description", "EvaluationResult", "Exported", "Imported",
    "Kind", "Listing", "Model", "Note", "PipelineModel", "Plan", "Report", "Runs", "Search", "Serving", "Update",
    "auto", "blend", "check", "compare", "datasets", "describe", "evaluate", "export", "import_tf", "keep_to_cores",
    "model", "models", "open", "open_data", "pipeline", "predict", "prepare", "recommend", "report", "runs",
    "serve", "settings_of", "similar", "stop_on_signal", "synthesize", "train", "transcode", "tune", "update",
    "verify", "verify_at",
]  # fmt: skip
