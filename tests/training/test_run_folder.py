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


def test_a_checkpoint_of_before_products_over_events_were_a_choice_is_of_onednn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state: dict[str, object] = {"train": {}, "model_settings": {}, "precision": "tf32"}
    for kept, chosen in (({}, "onednn"), ({"event_products": None}, None), ({"event_products": "blas"}, "blas")):
        monkeypatch.setattr(run_folder.checkpoint, "newest_state", lambda _, kept=kept: {**state, **kept})
        found = run_folder.settings_of(tmp_path)
        assert found is not None
        assert found["chosen"] == {"precision": "tf32", "event_products": chosen}
