"""The report of one run."""

from __future__ import annotations

from recspec.report.markup import tag
from recspec.report.page import page
from recspec.report.run_calibration import calibration_section
from recspec.report.run_cost import cost_section, reproduce_section
from recspec.report.run_curves import curves_section
from recspec.report.run_data import data_section
from recspec.report.run_examples import examples_section
from recspec.report.run_exposure import exposure_section
from recspec.report.run_facts import RunFacts
from recspec.report.run_metrics import metrics_section, verdict_section
from recspec.report.run_plan import plan_section
from recspec.report.run_slices import slices_section

SECTIONS = (
    verdict_section, metrics_section, slices_section, exposure_section, calibration_section, examples_section,
    curves_section, data_section, plan_section, cost_section, reproduce_section,
)  # fmt: skip


def run_page(run: RunFacts) -> str:
    """The whole page."""
    record = run.data_record
    data = f", trained on {record.name}" if record is not None else ""
    when = run.record.started if run.record is not None else ""
    lead = tag("p", "Model ", tag("strong", run.card.model), data, f", {when[:10]}" if when else "", ". Folder ",
               tag("code", str(run.path)), ".", class_="lead")  # fmt: skip
    left_out = () if run.has_users else (exposure_section, examples_section)
    return page(f"Run {run.name}", lead, [section(run) for section in SECTIONS if section not in left_out])
