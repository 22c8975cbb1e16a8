"""`recspec experiment report` and `check` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from recspec.loop import Journal
from tests.cli.conftest import Cli
from tests.loop.shop_of_experiments import DEFINITION, experiment, simulated


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(DEFINITION), encoding="utf-8")
    with Journal(f"sqlite:///{tmp_path / 'journal.db'}") as journal:
        simulated(journal, experiment(), 600, 2.0)
    return tmp_path


def test_a_report_is_a_table_json_and_a_page(run: Cli, shop: Path) -> None:
    command = ("experiment", "report", shop / "experiment.yaml", "--journal", f"sqlite:///{shop / 'journal.db'}")
    page = shop / "page.html"
    status, printed, said = run(*command, "--at", "2026-12-06", "--out", page)
    assert (status, said) == (0, f"{page}: the page\n")
    assert page.is_file()
    assert "new is better: clicks +" in printed
    assert "│ clicks │ new" in printed
    status, printed, _ = run(*command, "--at", "2026-12-06", "--json")
    assert json.loads(printed)["verdict"].startswith("new is better: clicks +")
    status, printed, said = run(*command, "--at", "2026-11-01")
    assert status == 2
    assert "nobody was assigned to the experiment 'home' yet" in said


def test_a_check_prints_all_problems_or_the_variants(run: Cli, shop: Path) -> None:
    status, printed, _ = run("experiment", "check", shop / "experiment.yaml", "--user", "ann")
    assert status == 0
    assert "ann" in printed
    status, printed, _ = run("experiment", "check", shop / "experiment.yaml", "--json")
    assert json.loads(printed)["assigned"] == {}
    (shop / "experiment.yaml").write_text("name: 3\n", encoding="utf-8")
    status, _, said = run("experiment", "check", shop / "experiment.yaml")
    assert status == 2
    assert "experiment.yaml: 4 problems" in said
