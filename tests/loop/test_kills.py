"""No acknowledged event is lost or counted twice, whenever the server is killed.

`benchmarks/stress/journal_kills.py` has hundreds of kills, also of workers, updaters and the database.
"""

from __future__ import annotations

import random
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import tests.processes  # noqa: F401 - copies begin with what it loads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kills read /proc")


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "stress"))
    return import_module("journal_kills")


def test_acknowledged_events_survive_a_killed_server(kills: Any, url: str, tmp_path: Path) -> None:
    run, draw = kills.made_run(tmp_path), random.Random(0)
    with kills.Clients(number=3) as clients:
        steps = ("before the commit", "after the commit")
        made = kills.kill_servers(run, url, tmp_path, clients, draw, steps=steps, each=1, at_random=1)
        last = kills.Server.of(run, url, tmp_path)
        clients.port = last.wait()
        clients.wait_for(10)
        clients.__exit__()
        last.kill()
    assert made == {"before the commit": 1, "after the commit": 1, "at random": 1}
    found = kills.counted(url, clients)
    assert (found["lost"], found["doubled"], found["refused"]) == (0, 0, [])
    assert found["acknowledged"] >= 13
    assert found["stored already when sent again"] >= 1, "of the write that was killed after its commit"


def test_what_counts_as_lost_or_doubled(kills: Any, tmp_path: Path) -> None:
    from recspec.loop import Event, Journal

    url = f"sqlite:///{tmp_path / 'journal.db'}"
    with Journal(url) as journal:
        rows = [
            Event(f"e{n}", "c0", "view", "i1", None, 1_700_000_000_000_000 + n // 2, 1_700_000_000_000_000)
            for n in range(4)
        ]
        journal.store(rows)
    clients = kills.Clients()
    clients.acknowledged = {("c0", 1_700_000_000_000_000 + n, "i1"): "accepted" for n in range(3)}
    found = kills.counted(url, clients)
    assert (found["acknowledged"], found["lost"], found["doubled"]) == (3, 1, 2)
