"""Reports: what a prepared dataset holds, what a run reached, and how runs compare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recspec.base.errors import DataError, SettingsError, of_the_machine
from recspec.base.files import local, whole_file, write_whole
from recspec.report import dataset_summary

if TYPE_CHECKING:
    from recspec.feature_spec import FeatureSpec
    from recspec.loop import ExperimentReport

__all__ = ["REPORT_FILE", "dataset_summary", "write_dataset_page", "write_experiment_page", "write_report"]

REPORT_FILE = "report.html"
MOST_RUNS = 6
"""Runs of a comparison: more lists side by side could not be read."""


def write_report(runs: Sequence[str | Path], out: str | Path | None = None, *, data: str | Path | None = None) -> Path:
    """Write the report of a run, or the comparison of several, as one HTML file that needs no network.

    Args:
        runs: Folders of runs or bundles. The first of several is the one that the others are compared with.
        out: The file; by default `RUN/report.html` for one run, and `comparison.html` here for several.
        data: The dataset of the runs; by default where they say it lies, if it has not changed since.

    Raises:
        BundleError: if a folder holds no trained model, or a damaged one.
        DataError: if the report can't be written.
        SettingsError: for no run, too many, or one that is given twice.
    """
    from recspec.report.compare_page import compare_page
    from recspec.report.run_facts import read_runs
    from recspec.report.run_page import run_page

    paths = [Path(run) for run in runs]
    if not paths or len(paths) > MOST_RUNS:
        raise SettingsError(f"report: {len(paths)} runs; give 1 to {MOST_RUNS}")
    whole = [path.resolve() for path in paths]
    if repeated := [path for place, path in enumerate(paths) if whole[place] in whole[:place]]:
        raise SettingsError(f"report: {repeated[0]} is given twice")
    file = _file(paths, None if out is None else Path(out))
    found = read_runs(paths, None if data is None else Path(data))
    return _write(file, run_page(found[0]) if len(found) == 1 else compare_page(found))


def write_experiment_page(report: ExperimentReport, out: str | Path) -> Path:
    """Write the page of an experiment as one HTML file that needs no network.

    Raises:
        DataError: if it can't be written.
    """
    from recspec.report.experiment_page import experiment_page

    return _write(_not_a_folder(Path(out)), experiment_page(report))


def _write(file: Path, text: str) -> Path:
    try:
        write_whole(file, text)
    except OSError as error:
        why = of_the_machine(error) or error
        raise DataError(f"{file}: the report could not be written: {why}; give another place with --out") from None
    return file


def _file(runs: Sequence[Path], out: Path | None) -> Path:
    """Where a report goes."""
    from recspec.bundle import folder, run_record

    if out is not None:
        return _not_a_folder(out)
    if len(runs) > 1:
        return Path("comparison.html")
    return run_record.home(folder.find(local(runs[0], "RUN"))) / REPORT_FILE


def _not_a_folder(out: Path) -> Path:
    if out.is_dir():
        raise SettingsError(f"report: --out {out} is a folder; give the name of a file, such as {out / REPORT_FILE}")
    return local(out, "--out")


def write_dataset_page(spec: FeatureSpec, out: str | Path) -> Path:
    """Write a page about a prepared dataset as one HTML file that needs no network.

    Raises:
        DataError: the first values found that contradict the specification; `check` finds all.
    """
    from recspec.report import dataset_page

    return dataset_page.write_dataset_page(spec, Path(out))
