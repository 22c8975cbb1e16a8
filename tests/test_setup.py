"""`make`'s setup: the installer is silent unless it fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
# Plays .venv/bin/python: of version 3.11, without torch, and with a pip that warns and may fail.
case "$*" in
    *"-m pip"*) echo "WARNING: a location is ignored" >&2; echo "$*" >> asked; exit "${PIP_STATUS:-0}" ;;
    *sys.version_info*) echo True ;;
    *fcntl.flock*) exec python3 "$@" ;;
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
        env={**os.environ, "PYTHON": "", "HASHES": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_pip_says_is_kept_in_a_file(clone: Path) -> None:
    done = set_up(clone, "demo")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "WARNING: a location is ignored" in (clone / ".venv" / "setup.log").read_text()
    assert ".[baselines,serve,loop,report]" in (clone / "asked").read_text()


def test_a_pip_that_fails_is_shown(clone: Path) -> None:
    done = set_up(clone, "dev", PIP_STATUS="1")
    assert done.returncode == 1
    assert "WARNING: a location is ignored" in done.stderr
    assert done.stderr.endswith(
        "setup: pip failed; all it said is in .venv/setup.log. "
        "Mend what it names (network, disk, proxy) and try again\n"
    )


def test_hashes_are_asked_for_where_the_user_wants_them(clone: Path) -> None:
    set_up(clone, "dev")
    assert "--require-hashes" not in (clone / "asked").read_text()
    set_up(clone, "dev", HASHES="1")
    assert "install --no-deps --require-hashes -r requirements.lock" in (clone / "asked").read_text()


def test_the_lock_holds_the_versions_of_the_constraints_each_with_its_hashes() -> None:
    def normal(pin: str) -> tuple[str, str]:
        name, _, version = pin.partition("==")
        return re.sub(r"[-_.]+", "-", name).lower(), version

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    text = (ROOT / "requirements.lock").read_text().replace(" \\\n", " ")
    platforms = re.compile(r" ; sys_platform == '\w+'")
    locked = [platforms.sub("", line).split() for line in text.splitlines() if not line.startswith("#")]
    pinned = {normal(platforms.sub("", line)) for line in lines if not line.startswith("#")}
    assert {normal(name) for name, *_ in locked} == pinned, "`make lock` writes it anew"
    for name, *hashes in locked:
        assert hashes, name
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", each) for each in hashes), name


def test_the_versions_for_a_gpu_pin_every_library_that_recspec_needs() -> None:
    lines = [line for line in (ROOT / "constraints-gpu.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = (*project["dependencies"], *project["optional-dependencies"]["serve"], "duckdb", "pytest", "hypothesis")
    names = {re.split(r"[^\w-]", each.lower())[0] for each in needed}
    assert names <= pinned, names - pinned


def test_a_python_that_is_too_old_or_none_is_named(clone: Path) -> None:
    done = set_up(clone, "demo", PYTHON="/nonexistent/python")
    assert done.returncode == 2
    assert "PYTHON=/nonexistent/python is not a Python of version 3.11 or newer" in done.stderr
