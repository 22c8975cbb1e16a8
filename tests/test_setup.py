"""`make`'s setup: the installer is silent unless it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
# Plays .venv/bin/python: of version 3.11, without torch, and with a pip that warns and may fail.
case "$*" in
    *"-m pip"*) echo "WARNING: a location is ignored" >&2; echo "$*" >> asked; exit "${PIP_STATUS:-0}" ;;
    *sys.version_info*) echo True ;;
    *) exit 1 ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A checkout in a folder with a space, whose .venv is there already."""
    folder = tmp_path / "a clone"
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", folder / "scripts")
    shutil.copy(ROOT / "constraints.txt", folder)
    python = folder / ".venv" / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return folder


def set_up(clone: Path, what: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", clone / "scripts" / "setup.sh", what],
        env={**os.environ, "PYTHON": "", **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_what_pip_says_is_kept_in_a_file(clone: Path) -> None:
    done = set_up(clone, "demo")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "WARNING: a location is ignored" in (clone / ".venv" / "setup.log").read_text()
    assert ".[baselines,serve]" in (clone / "asked").read_text()


def test_a_pip_that_fails_is_shown(clone: Path) -> None:
    done = set_up(clone, "dev", PIP_STATUS="1")
    assert done.returncode == 1
    assert "WARNING: a location is ignored" in done.stderr
    assert done.stderr.endswith(
        "setup: pip failed; all it said is in .venv/setup.log. "
        "Mend what it names (network, disk, proxy) and try again\n"
    )


def test_a_python_that_is_too_old_or_none_is_named(clone: Path) -> None:
    done = set_up(clone, "demo", PYTHON="/nonexistent/python")
    assert done.returncode == 2
    assert "PYTHON=/nonexistent/python is not a Python of version 3.11 or newer" in done.stderr
