"""The folder of a run and the job that owns it."""

from __future__ import annotations

from pathlib import Path

import pytest

from recspec.training import run_folder


def test_a_job_knows_the_runs_that_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    run_folder.sign(tmp_path)
    assert not (tmp_path / ".job").exists()
    assert not run_folder.is_of_this_job(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert not run_folder.is_of_this_job(tmp_path)
    run_folder.sign(tmp_path)
    assert run_folder.is_of_this_job(tmp_path)
    monkeypatch.setattr(run_folder.os, "getppid", lambda: -1)
    assert not run_folder.is_of_this_job(tmp_path), "another torchrun's"
