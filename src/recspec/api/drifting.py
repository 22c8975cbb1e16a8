"""Drift: how far new events have moved from the data that a run was trained on."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recspec.api.data import opened
from recspec.api.experiments import moment_of, moment_text
from recspec.api.frames import chosen_kind, from_table, table_of
from recspec.api.verb_checks import Place, path_or_none, verb
from recspec.api.views import Section, View, Viewed
from recspec.base.errors import require_extra

if TYPE_CHECKING:
    from recspec.loop import DriftReport


class Drift(Viewed):
    """How far new events have moved from the data that a run was trained on.

    Attributes:
        report: Everything that was measured.
        file: The JSON file, if one was asked for.
    """

    def __init__(self, run: Path, report: DriftReport, file: Path | None = None) -> None:
        self.run, self.report, self.file = run, report, file

    @property
    def flagged(self) -> list[str]:
        """Names of what has drifted."""
        return self.report.flagged

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, as `recspec drift --json` prints them; times are ISO 8601."""
        found = self.report.to_dict()
        return {**found, **{name: moment_text(found[name]) for name in ("since", "until")}}

    def to_frame(self, kind: str | None = None) -> Any:
        """One row a distribution: `name`, `kind`, `before`, `now`, `psi`, `limit`, `distance`, `unknown`,
        `unknown_before` and `flagged`."""
        import pyarrow as pa

        kinds = {"name": pa.string(), "kind": pa.string(), "before": pa.int64(), "now": pa.int64()}
        kinds |= dict.fromkeys(("psi", "limit", "distance", "unknown", "unknown_before"), pa.float64())
        rows = [(*(getattr(each, name) for name in kinds), each.flagged) for each in self.report.shifts]
        return from_table(table_of({**kinds, "flagged": pa.bool_()}, rows), chosen_kind(kind))

    def view(self) -> View:
        """Distributions, shares, calibration, and what can't be said."""
        report, sections = self.report, list[Section]()
        if report.shifts:
            columns = ("distribution", "rows before", "now", "PSI", "PSI without drift", "KS D", "unknown", "")
            rows = [
                (
                    each.name,
                    each.before,
                    each.now,
                    f"{each.psi:.4f}",
                    f"{each.limit:.4f}",
                    "" if each.distance is None else f"{each.distance:.3f}",
                    "" if each.unknown is None else _percent(each.unknown),
                    "drifted" if each.flagged else "",
                )
                for each in sorted(report.shifts, key=lambda each: -each.psi)
            ]
            sections.append(Section("distributions", columns, rows))
        if report.shares:
            shares = [(SHARES[each.name], _percent(each.value), each.count, each.of) for each in report.shares]
            sections.append(Section("shares", ("", "share", "count", "of"), shares))
        if (found := report.calibration) is not None:
            names = ("rows", "mean chance", "acted on", "chance / acted on", "95 % interval", "")
            interval = f"{found.low:.3f} to {found.high:.3f}"
            cells = (found.rows, f"{found.predicted:.4f}", f"{found.observed:.4f}", f"{found.ratio:.3f}", interval)
            sections.append(Section("calibration", names, [(*cells, "drifted" if found.flagged else "")]))
        window = f"{moment_text(report.since)} to {moment_text(report.until)}"
        compared = bool(report.shifts) or report.calibration is not None
        told = "nothing has drifted" if compared else "nothing can be compared; the notes say why"
        told = f"drifted: {', '.join(report.flagged)}" if report.flagged else told
        notes = [f"{told}; {report.events:,} events and {report.answers:,} answers of {window}"]
        return View(f"Drift of {self.run}", sections, notes, remarks=[f"note: {each}" for each in report.untold])


SHARES = {
    "unknown_users": "events of unknown users",
    "new_items": "events of new items",
    "new_shown_items": "shown items that are new",
}
"""What a share is of, by its name."""


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


@verb
def drift(
    run: Place,
    *,
    journal: str,
    window: str = "7d",
    label_window: str = "30m",
    at: str | None = None,
    data: Place | None = None,
    out: Place | None = None,
) -> Drift:
    """Say whether new events differ from train.

    Compares what the run was trained on with the newest events of a journal: each feature, types of events, items by
    popularity, scores, unknown users, new items, and predicted chances against what happened. A distribution has
    drifted if its population stability index (PSI) is above .1 and above the 99 % quantile that it has without drift.

    Args:
        run: Folder of a run.
        journal: URL of the journal: sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE.
        window: Time before now whose events are compared, such as 12h or 7d.
        label_window: Time after an answer in which an act on an item makes its label 1.
        at: Time of the report, ISO 8601; by default now.
        data: Dataset of the run, if it was moved.
        out: JSON file to write.

    Raises:
        BundleError: if the run holds no model.
        SettingsError: if a time or a window is wrong, or the URL names no journal.
        DataError: if there is no such journal, or it can't be read.
        MissingExtraError: without the extra `loop`.
    """
    require_extra("sqlalchemy", "loop")
    from recspec.base import config
    from recspec.base.files import write_whole
    from recspec.inference import Predictor
    from recspec.loop import DriftReference, DriftSettings, Journal, measure_drift, now_us

    settings = config.build(DriftSettings, "drift", {"window": window, "label_window": label_window})
    moment = now_us() if at is None else moment_of(at)
    spec = opened(data).spec if data is not None else None
    with Journal(journal, read_only=True) as source:
        predictor = Predictor.open(Path(run), device="cpu")
        report = measure_drift(predictor, DriftReference.of(predictor, spec), source, moment, settings)
    found = Drift(Path(run), report, path_or_none(out))
    if found.file is not None:
        write_whole(found.file, json_text.dumps(found.to_dict(), indent=2) + "\n")
    return found
