"""Writes the report of one run, or the comparison of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recspec.base.errors import DataError, SettingsError, of_the_machine
from recspec.base.files import local, whole_file
from recspec.report.compare_page import compare_page
from recspec.report.run_facts import read_runs
from recspec.report.run_page import run_page

FILE_NAME = "report.html"
MOST_RUNS = 6
"""Runs of a comparison: more lists side by side could not be read."""


def write_report(runs: Sequence[Path], out: Path | None = None, *, data: Path | None = None) -> Path:
    """Write the report and return its path; see `recspec.report.write_report`."""
    if not runs or len(runs) > MOST_RUNS:
        raise SettingsError(f"report: {len(runs)} runs; give 1 to {MOST_RUNS}")
    whole = [path.resolve() for path in runs]
    if repeated := [path for place, path in enumerate(runs) if whole[place] in whole[:place]]:
        raise SettingsError(f"report: {repeated[0]} is given twice")
    out = _place(runs, out)
    found = read_runs(runs, data)
    text = run_page(found[0]) if len(found) == 1 else compare_page(found)
    try:
        with whole_file(out) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{out}: the report could not be written: {of_the_machine(error) or error}; give another place with --out"
        ) from None
    return out


def _place(runs: Sequence[Path], out: Path | None) -> Path:
    from recspec.bundle import folder, run_record

    if out is not None:
        if out.is_dir():
            raise SettingsError(f"report: --out {out} is a folder; give the name of a file, such as {out / FILE_NAME}")
        return local(out, "--out")
    if len(runs) > 1:
        return Path("comparison.html")
    return run_record.home(folder.find(local(runs[0], "RUN"))) / FILE_NAME
