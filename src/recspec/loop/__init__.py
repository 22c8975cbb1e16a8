"""The loop: events that a running server takes, what was shown, and what both say of the models."""

from typing import TYPE_CHECKING

from recspec.base.faces import lazy_face

if TYPE_CHECKING:
    from recspec.loop.assignment import Experiment, Guardrails, Metric, Variant, assign, load_experiments, named
    from recspec.loop.drift import DriftReference, DriftReport, DriftSettings, measure_drift
    from recspec.loop.event_file import evaluate_events
    from recspec.loop.events import Event, ReadEvents, is_text, read_events
    from recspec.loop.experiment_report import Effect, ExperimentReport, GuardrailResult, MetricResult, analyse
    from recspec.loop.exploration import GREEDY, Exploration, ListDraw, explore, generator, slot_chances
    from recspec.loop.forgetting import Forgotten, forget
    from recspec.loop.histories import Histories
    from recspec.loop.interleaving import INTERLEAVED, TEAM_DRAFT, TEAMS, interleave
    from recspec.loop.journal import REFUSALS, VARIANTS, Exposure, Journal, Outcome, is_sqlite, now_us
    from recspec.loop.journal_files import ImportedEvents, export_days, import_events
    from recspec.loop.outcomes import ERROR, MILLISECONDS, read_outcomes, recorded_variants, register, users_of_variants
    from recspec.loop.policy_evaluation import LoggedListSettings, evaluate_journal
    from recspec.loop.updates import JournalSettings, UpdateOutcome, Updater
    from recspec.loop.upkeep import JournalSummary, prune_journal, summarize, verify_journal
    from recspec.loop.writer import JournalWriter, RemoteWriter, Writer, store_rows

__getattr__ = lazy_face(__name__, __file__)  # only some of these need torch, which takes seconds to load
