"""Reports: what a prepared dataset holds, what a run reached, and how runs compare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recspec.report import dataset_summary

if TYPE_CHECKING:
    from recspec.feature_spec import FeatureSpec

__all__ = [
    "dataset_summary", "write_dataset_page", "write_report",
]  # fmt: skip


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
    from recspec.report import reports

    paths = [Path(run) for run in runs]
    return reports.write_report(paths, None if out is None else Path(out), data=None if data is None else Path(data))


def write_dataset_page(spec: FeatureSpec, out: str | Path) -> Path:
    """Write a page about a prepared dataset as one HTML file that needs no network.

    Raises:
        DataError: the first values found that contradict the specification; `check` finds all.
    """
    from recspec.report import dataset_page

    return dataset_page.write_dataset_page(spec, Path(out))
