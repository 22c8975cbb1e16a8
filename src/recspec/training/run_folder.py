"""The folder of a run."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from recspec.bundle import checkpoint
from recspec.errors import SettingsError
from recspec.training import run_log

BUNDLE = "bundle"
CHECKPOINTS = "checkpoints"
BEST = "best.safetensors"
JOB = ".job"
WRITTEN = (BUNDLE, CHECKPOINTS, f"{CHECKPOINTS}/{BEST}", JOB, run_log.LOG, run_log.CURVES)
"""Files and folders that a run writes."""


def start_afresh(folder: Path) -> None:
    """Make the folder.

    Raises:
        SettingsError: if it holds a run already.
    """
    if (folder / BUNDLE).exists() or has_checkpoint(folder):
        raise SettingsError(f"{folder}: holds a run already; continue it with --resume, or name another folder")
    folder.mkdir(parents=True, exist_ok=True)


def has_checkpoint(folder: Path) -> bool:
    """Whether a run can continue from here."""
    return checkpoint.newest(folder / CHECKPOINTS) is not None


def batch_size_of(folder: Path) -> int | None:
    """The batch size of the run so far."""
    settings = checkpoint.newest_state(folder / CHECKPOINTS).get("train")
    size = settings.get("batch_size") if isinstance(settings, dict) else None
    return size if isinstance(size, int) else None


def how_to_go_on(folder: Path) -> str:
    """What to do after a run broke off."""
    step = checkpoint.newest(folder / CHECKPOINTS)
    if step is None:
        return "no checkpoint was written yet: start the same command again"
    return f"the same command with --resume continues from the checkpoint of step {step:,}"


def sign(folder: Path) -> None:
    """Write down which job of torchrun trains the run now."""
    if _this_job():
        (folder / JOB).write_text(_this_job(), encoding="utf-8")


def is_of_this_job(folder: Path) -> bool:
    """Whether the job that started this process began or continued the run."""
    file = folder / JOB
    return bool(_this_job()) and file.is_file() and file.read_text(encoding="utf-8") == _this_job()


def _this_job() -> str:
    """The agent of torchrun that started this process; empty without one."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{job} {platform.node()} {os.getppid()}" if job else ""
