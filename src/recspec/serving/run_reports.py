"""The report of a served run: the file `report.html` of its folder, and nothing else of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from recspec.base.errors import RequestError

REPORTS = "/report/"
"""What the paths of reports begin with."""
REPORT = "report.html"
REPORT_BYTES = 16 << 20
"""Largest report that is served."""


def report_path(folder: Path) -> Path:
    """Where the report of a bundle lies: in the run around its folder, or in the folder itself."""
    return (folder.parent if folder.name == "bundle" else folder) / REPORT


def has_report(folder: Path) -> bool:
    """Whether there is a report: an ordinary file, and no link."""
    try:
        return stat.S_ISREG(report_path(folder).lstat().st_mode)
    except OSError:
        return False


def read_report(folder: Path, model: str) -> bytes:
    """The report of a bundle.

    Raises:
        RequestError: 404 if there is none, or if it is a link, no ordinary file, or larger than `REPORT_BYTES`.
    """
    missing = RequestError(f"model '{model}' has no report; write one with `recspec report RUN`", status=404)
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        with os.fdopen(os.open(report_path(folder), flags), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise missing
            text = file.read(REPORT_BYTES + 1)
    except OSError:
        raise missing from None
    if len(text) > REPORT_BYTES:
        raise RequestError(f"the report of model '{model}' is larger than {REPORT_BYTES >> 20} MiB", status=404)
    return text
