"""Reports: what a prepared dataset holds, what a run reached, and how runs compare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recspec.report import dataset_summary

if TYPE_CHECKING:
    from recspec.spec import FeatureSpec

__all__ = ["dataset_summary", "write_dataset_page"]


def write_dataset_page(spec: FeatureSpec, out: Path) -> Path:
    """Write a page about a dataset: one HTML file; see docs/reports.md.

    Raises:
        DataError: the first values found that contradict the specification; `check` finds all.
    """
    from recspec.report import dataset_page

    return dataset_page.write_dataset_page(spec, out)
