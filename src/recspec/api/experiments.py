"""Experiments: what a file describes, and what a journal says of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recspec.api.frames import chosen_kind, from_table, table_of
from recspec.api.verb_checks import Place, several, verb
from recspec.api.views import Section, View, Viewed
from recspec.base.errors import SettingsError, require_extra

if TYPE_CHECKING:
    from recspec.loop import Effect, Experiment, ExperimentReport, GuardrailResult, MetricResult

STATES = {"holds": "holds", "broken": "broken", "open": "not yet sure"}


class ExperimentResult(Viewed):
    """What an experiment found so far.

    Attributes:
        report: Everything that was computed.
        page: The HTML page, if one was asked for.
    """

    def __init__(self, report: ExperimentReport, page: Path | None = None) -> None:
        self.report, self.page = report, page

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        return self.report.verdict

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, as `recspec experiment report --json` prints them."""
        return self.report.to_dict()

    def to_frame(self, kind: str | None = None) -> Any:
        """One row a metric and variant: `metric`, `variant`, `control`, `treatment`, `difference`, `standard_error`;
        `low`, `high` and `p`, valid at any look; `fixed_low`, `fixed_high` and `fixed_p`, valid at the planned end."""
        import pyarrow as pa

        numbers = ("difference", "standard_error", "low", "high", "p", "fixed_low", "fixed_high", "fixed_p")
        kinds = dict.fromkeys(("metric", "variant"), pa.string())
        kinds |= dict.fromkeys(("control", "treatment", *numbers), pa.float64())
        rows = [
            (each.name, each.variant, each.control, each.treatment, *(getattr(each.effect, name) for name in numbers))
            for each in self.report.metrics
        ]
        return from_table(table_of(kinds, rows), chosen_kind(kind))

    def view(self) -> View:
        """Users, metrics, guardrails and the verdict."""
        report = self.report
        names = report.variants if len(report.entered) > 1 else ("interleaved",)
        users = [*zip(names, report.entered, report.counted, strict=True)]
        sections = [Section("users", ("variant", "entered", "with a closed window"), users)]
        pair = (report.variants[0], "variant's")
        if report.metrics:
            welch = "Welch, at this look alone" if report.is_over else "Welch, not valid yet"
            columns = ("metric", "variant", *pair, *EFFECT, welch, "variance left")
            rows: list[Sequence[object]] = []
            for each in report.metrics:
                ends = f"p {each.effect.fixed_p:.3g}", f"{100 * each.variance_left:.0f} %"
                rows.append((each.name, each.variant, *_figures(each), *_cells(each.effect), *ends))
            sections.append(Section("metrics", columns, rows))
        if report.guardrails:
            rows = []
            for guard in report.guardrails:
                margin = f"{100 * guard.margin:g} %" if guard.is_relative else f"{guard.margin:g}"
                rows.append((guard.name, guard.variant, *_figures(guard), margin, STATES[guard.state]))
            sections.append(Section("guardrails", ("guardrail", "variant", *pair, "margin", "state"), rows))
        if (found := report.preference) is not None:
            prefer = (f"prefer {name}" for name in report.variants)
            told = ("users with a click", *prefer, "tied", *EFFECT, "p of signs")
            counts = (found.users, found.first, found.second, found.tied)
            sections.append(Section("preference", told, [(*counts, *_cells(found.effect), f"{found.p_sign:.3g}")]))
        remarks = [f"note: {each}" for each in report.notes]
        return View(f"experiment {report.name}", sections, [report.verdict], remarks=remarks)


EFFECT = ("difference", "at any look", "p at any look")


def _cells(effect: Effect) -> tuple[str, str, str]:
    return f"{effect.difference:+.4g}", f"{effect.low:+.4g} to {effect.high:+.4g}", f"{effect.p:.3g}"


def _figures(each: MetricResult | GuardrailResult) -> tuple[str, str]:
    return f"{each.control:.4g}", f"{each.treatment:.4g}"


@verb
def experiment_report(
    experiment: Place, *, journal: str, name: str | None = None, at: str | None = None, out: Place | None = None
) -> ExperimentResult:
    """Say whether a variant of an experiment is better, from a journal.

    Look as often as you like: the verdict rests on tests that allow it.

    Args:
        experiment: YAML file of the experiment.
        journal: Journal: sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE.
        name: Name of the experiment, if the file has several.
        at: Time of the report, ISO 8601; by default now.
        out: HTML page to write.

    Raises:
        SettingsError: if the file is wrong, or the time.
        DataError: if the journal can't be read, or nobody was assigned yet.
        MissingExtraError: without the extra `loop`; for a page, without `report`.
    """
    require_extra("sqlalchemy", "loop")
    if out is not None:
        require_extra("matplotlib", "report")
    from recspec.loop import Journal, analyse, load_experiments, named, now_us, read_outcomes

    found = named(load_experiments(Path(experiment)), name)
    moment = now_us() if at is None else moment_of(at)
    with Journal(journal, read_only=True) as opened:
        report = analyse(found, read_outcomes(opened, found, moment), moment)
    if out is None:
        return ExperimentResult(report)
    from recspec.report import write_experiment_page

    return ExperimentResult(report, write_experiment_page(report, Path(out)))


def moment_of(text: str) -> int:
    """An ISO 8601 time of the option `at`, in microseconds since 1970; without a zone it is of UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise SettingsError(f"--at {text[:80]!r}: expected ISO 8601, such as 2026-12-01 or 2026-12-01T09:00Z") from None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1_000_000)


def moment_text(micros: int) -> str:
    """A time in microseconds since 1970 as ISO 8601."""
    return datetime.fromtimestamp(micros / 1e6, UTC).isoformat(timespec="seconds")


class ExperimentList(Viewed):
    """Experiments of a file, and the variants that users get.

    Attributes:
        experiments: Those of the file.
        assigned: User -> experiment -> variant, of the users that were asked for.
    """

    def __init__(self, experiments: Sequence[Experiment], assigned: dict[str, dict[str, str]]) -> None:
        self.experiments, self.assigned = tuple(experiments), assigned

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, as `recspec experiment check --json` prints them."""
        return {"experiments": [each.model_dump(mode="json") for each in self.experiments], "assigned": self.assigned}

    def view(self) -> View:
        """Experiments with their variants, and users with theirs."""
        rows = [
            (
                each.name,
                ", ".join(f"{one.name} {100 * one.share:.3g} %" for one in each.variants),
                f"{100 * each.traffic * (each.slot[1] - each.slot[0]):.3g} %",
                f"{each.start:%Y-%m-%d %H:%M}",
                f"{datetime.fromtimestamp(each.end_us / 1e6, UTC):%Y-%m-%d %H:%M}",
                each.metrics[0].name,
            )
            for each in self.experiments
        ]
        columns = ("experiment", "variants", "of all users", "start (UTC)", "planned end", "decided by")
        sections = [Section("", columns, rows)]
        names = [each.name for each in self.experiments]
        if self.assigned:
            users = [(user, *(got.get(name, "") for name in names)) for user, got in self.assigned.items()]
            sections.append(Section("users", ("user", *names), users))
        return View("experiments", sections)


@verb
def experiment_check(experiment: Place, *, user: str | Sequence[str] | None = None) -> ExperimentList:
    """Check a file of experiments, and show the variants of users.

    Args:
        experiment: YAML file of the experiment.
        user: Raw id of a user whose variants to show, or several.

    Raises:
        SettingsError: with every problem of the file.
        MissingExtraError: without the extra `loop`.
    """
    require_extra("sqlalchemy", "loop")
    from recspec.loop import assign, load_experiments

    found = load_experiments(Path(experiment))
    return ExperimentList(found, {each: assign(found, each) for each in several(user)})
