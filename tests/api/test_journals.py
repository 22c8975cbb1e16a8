"""The verbs of a journal, as functions and as commands."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recspec import api
from recspec.base.errors import DataError, SettingsError
from tests.cli.conftest import Cli, run  # noqa: F401

ROWS = "customer,item,time\nann,1,5\nbob,2,6\nbob,3,never\n"


def test_a_journal_from_files_to_files(tmp_path: Path, run: Cli) -> None:  # noqa: F811
    url, rows = f"sqlite:///{tmp_path / 'j.db'}", tmp_path / "rows.csv"
    rows.write_text(ROWS)
    status, printed, _ = run("journal", "import", url, rows, "--column", "user=customer", "--type", "view")
    assert status == 0
    assert "accepted" in printed
    assert "row 3: time: found 'never'" in printed
    shown = api.journal_show(url)
    assert shown.found.rows["event"] == 2
    assert "view" in shown.view().to_text()
    assert json.loads(run("journal", "show", url, "--json")[1])["newest_seq"] == 2
    assert "the journal is whole" in run("journal", "verify", url)[1]
    status, printed, _ = run("journal", "export", url, tmp_path / "out")
    assert (status, f"wrote {tmp_path / 'out'}" in printed.replace("\n", "")) == (0, True)
    (file,) = (tmp_path / "out" / "events").rglob("*.parquet")
    assert pq.read_table(file, partitioning=None)["user"].to_pylist() == ["ann", "bob"]
    assert api.journal_export(url, tmp_path / "out", until="2020-01-01").view().notes == (
        "no event or answer is of these days",
    )
    assert api.journal_prune(url).to_dict() == {"events": 0, "exposures": 0}


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'j.db'}"
    with pytest.raises(DataError, match="there is no such journal"):
        api.journal_prune(url)
    assert not (tmp_path / "j.db").exists()
    with pytest.raises(SettingsError, match="column: found 'user'; expected FIELD=COLUMN, such as user=customer_id"):
        api.journal_import(url, tmp_path / "rows.csv", column="user")
    with pytest.raises(SettingsError, match=r"unknown value 'h'.*known: 's', 'ms', 'us'"):
        api.journal_import(url, tmp_path / "rows.csv", time_unit="h")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="since: found 'monday'; expected a day such as 2026-11-28"):
        api.journal_export(url, tmp_path / "out", since="monday")
    with pytest.raises(SettingsError, match="events_days is 0; expected 1 or more"):
        api.journal_prune(url, events_days=0)
