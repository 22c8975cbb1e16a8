"""The simulated shop, small: what is updated every 15 minutes is clicked more than what is frozen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import ended

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_updates_every_15_minutes_are_worth_clicks(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import shop_loop; shop_loop.main()"
    found = ended(code, str(tmp_path / "shop"), "--quick", "--out", str(tmp_path / "out.json"))
    assert found.returncode == 0, found.stderr
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["against"]["frozen"]["errors"] > 3
    assert [each["state"] for each in told["loop"]["each"]] == ["new version"] * 3
    assert told["events"]["loop"] > told["events"]["frozen"] > 10_000
