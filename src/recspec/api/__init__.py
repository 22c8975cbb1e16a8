"""The Python API: the verbs of the command line on data frames, with the same names and defaults."""

from recspec.api import model
from recspec.api.backtesting import Backtest, backtest
from recspec.api.cataloguing import CatalogueState, catalogue
from recspec.api.comparing import MethodTable, compare_folder
from recspec.api.data import Data, Description, check, describe, open_data, prepare, synthesize, transcode
from recspec.api.drifting import Drift, drift
from recspec.api.evaluating import EvaluationResult, compare, evaluate
from recspec.api.experiments import ExperimentList, ExperimentResult, experiment_check, experiment_report
from recspec.api.exporting import Digest, Exported, Imported, export, import_tf, verify
from recspec.api.forgetting import Forgotten, forget
from recspec.api.frames import KINDS, Kind
from recspec.api.journals import (
    ImportedRows,
    JournalRows,
    JournalView,
    journal_export,
    journal_import,
    journal_prune,
    journal_show,
    journal_verify,
)
from recspec.api.listing import Listing, Report, Runs, datasets, models, report, runs
from recspec.api.measuring import bench_infer, bench_serve, bench_train
from recspec.api.model import Model, Note, Plan, open, predict, reasons, recommend, similar
from recspec.api.progress import Bar, Stages, event_number, stages
from recspec.api.serving import Serving, serve
from recspec.api.training import AutoResult, BlendedModel, PipelineModel, Search, auto, blend, pipeline, train, tune
from recspec.api.updating import Update, update
from recspec.api.verb_checks import Place, stop_on_signal, verb
from recspec.api.views import Section, View, figures

__all__ = [
    "KINDS", "AutoResult", "Backtest", "Bar", "BlendedModel", "CatalogueState", "Data", "Description", "Digest",
    "Drift", "EvaluationResult", "ExperimentList", "ExperimentResult", "Exported", "Forgotten", "Imported",
    "ImportedRows", "JournalRows", "JournalView", "Kind", "Listing", "MethodTable", "Model", "Note",
    "PipelineModel", "Place", "Plan", "Report", "Runs", "Search", "Section", "Serving", "Stages", "Update", "View",
    "auto", "backtest", "bench_infer", "bench_serve", "bench_train", "blend", "catalogue", "check", "compare",
    "compare_folder", "datasets", "describe", "drift", "evaluate", "event_number", "experiment_check",
    "experiment_report", "export", "figures", "forget", "import_tf", "journal_export", "journal_import",
    "journal_prune", "journal_show", "journal_verify", "model", "models", "open", "open_data", "pipeline",
    "predict", "prepare", "reasons", "recommend", "report", "runs", "serve", "similar", "stages",
    "stop_on_signal", "synthesize", "train", "transcode", "tune", "update", "verb", "verify",
]  # fmt: skip
