"""The comparison of several runs; the first is the one that the others are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from recspec.report.compare_rest import (
    cost_section,
    curves_section,
    exposure_section,
    settings_section,
    slices_section,
)
from recspec.report.compare_users import lists_section, users_section
from recspec.report.compare_verdict import differences_section, paired, verdict_section
from recspec.report.markup import tag
from recspec.report.page import page
from recspec.report.run_facts import RunFacts


def compare_page(runs: Sequence[RunFacts]) -> str:
    """The whole page."""
    beside = paired(runs)
    names = [run.name for run in runs]
    told = f" beside {', '.join(names[1:])}. A difference is the other run's metric minus that of {names[0]}."
    lead = tag("p", tag("strong", names[0]), told, class_="lead")
    sections = [
        verdict_section(runs, beside), differences_section(runs, beside), users_section(runs, beside),
        slices_section(runs, beside), exposure_section(runs), lists_section(runs, beside), curves_section(runs),
        settings_section(runs), cost_section(runs),
    ]  # fmt: skip
    if not any(run.has_users for run in runs):  # they score rows and recommend nothing
        sections = [each for each in sections if each.name not in ("users", "exposure", "lists")]
    return page(f"Comparison of {' and '.join([', '.join(names[:-1]), names[-1]])}", lead, sections)
