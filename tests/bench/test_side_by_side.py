"""Measurements beside peers: a peer that can't be installed or run is a line with its reason, and the rest stands."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

SCRIPT = """
import json, sys
given = json.loads(sys.argv[2])
if given["told"].get("breaks"):
    sys.exit("its loader is broken")
speed = given["told"]["speed"] * (2 if given["pace"]["profiled"] else 1)
found = {"samples_per_second": speed, "samples_per_cpu_second": speed, "parameters": 1, "precision": "fp32",
         "torch": "2", "peak_memory_bytes": 3_000_000, "matrix_rate": 1000.0}
if given["pace"]["profiled"]:
    found |= {"flop_per_sample": 2.0, "share_of_memory_bandwidth": 0.5}
print("what a library says on its way")
print(json.dumps(found))
"""


@pytest.fixture
def side_by_side(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_side_by_side")


@pytest.fixture
def arguments(side_by_side: ModuleType, tmp_path: Path) -> argparse.Namespace:
    options = side_by_side.parser("About.", str(tmp_path / "made_up.py"), batch_size=8)
    settled = side_by_side.settled(options.parse_args(["--rounds", "3", "--environments", str(tmp_path)]))
    assert isinstance(settled, argparse.Namespace)
    return settled


def test_peers_that_fail_are_lines_with_their_reason(
    side_by_side: ModuleType,
    arguments: argparse.Namespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def only_two(environment: object, folder: Path) -> Path:
        assert folder == tmp_path
        if environment is side_by_side.ENVIRONMENTS["torchrec"]:
            raise subprocess.CalledProcessError(1, "pip", stderr=b"Collecting\nERROR: No matching distribution\n")
        return Path(sys.executable)

    monkeypatch.setattr(side_by_side, "peer_python", only_two)
    script = tmp_path / "made_up.py"
    script.write_text(SCRIPT, encoding="utf-8")
    contender = side_by_side.Contender
    table = side_by_side.Comparison(
        script,
        "dlrm",
        "DLRM",
        {
            "recspec": contender("recspec", {"speed": 60.0}),
            "recspec, smaller": contender("recspec", {"speed": 70.0}),
            "slow": contender("deepctr", {"speed": 20.0}),
            "fast": contender("rechub", {"speed": 30.0}),
            "broken": contender("fuxictr", {"speed": 1.0, "breaks": True}),
            "absent": contender("torchrec", {"speed": 1.0}),
        },
        same_products=True,
        opposite={"slow": "recspec, smaller"},
        left_out={"another": "it has no such model"},
    )
    found = side_by_side.compared(table, arguments)
    assert found["not_measured"] == {
        "absent": "its environment could not be made: ERROR: No matching distribution",
        "broken": "its measurement failed: its loader is broken",
        "another": "it has no such model",
    }
    assert found["fastest_peer"] == "fast"
    # 120, 60, 60 samples/s, the first round being profiled: the median is 60.
    assert found["over_each_peer"]["recspec / fast"]["ratio"] == 2.0
    assert found["over_each_peer"]["recspec / slow"]["ratio"] == 3.0
    assert found["over_equals"] == {"slow": 3.5, "fast": 2.0}
    assert found["results"]["recspec"]["share_of_matrix_rate"] == pytest.approx(2 * 60 / 1000)
    assert found["results"]["slow"]["share_of_matrix_rate"] == pytest.approx(2 * 20 / 1000)
    assert [len(rounds) for rounds in found["runs"].values()] == [3, 3, 3, 3]
    printed = capsys.readouterr().out
    assert "broken: not measured; its measurement failed: its loader is broken" in printed
    json.dumps(found)


def test_what_is_measured_of_recspec_may_not_fail(
    side_by_side: ModuleType, arguments: argparse.Namespace, tmp_path: Path
) -> None:
    script = tmp_path / "made_up.py"
    script.write_text(SCRIPT, encoding="utf-8")
    contenders = {"recspec": side_by_side.Contender("recspec", {"breaks": True})}
    with pytest.raises(subprocess.CalledProcessError) as caught:
        side_by_side.compared(side_by_side.Comparison(script, "dlrm", "DLRM", contenders), arguments)
    assert "its loader is broken" in caught.value.stderr


def test_quick_is_short_unless_said_otherwise(side_by_side: ModuleType, tmp_path: Path) -> None:
    options = side_by_side.parser("About.", str(tmp_path / "made_up.py"), batch_size=8)
    quick = side_by_side.settled(options.parse_args(["--quick", "--seconds", "7"]))
    assert (quick.rounds, quick.seconds, quick.warm_up) == (2, 7.0, 2)
    assert side_by_side.settled(options.parse_args([])).rounds == 3
    assert quick.out == tmp_path / "results" / "made_up.json"


def test_an_environment_of_other_versions_is_made_anew(
    side_by_side: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[tuple[str, ...]] = []
    monkeypatch.setattr(side_by_side.venv, "create", lambda home, **_: home.mkdir(exist_ok=True))
    monkeypatch.setattr(side_by_side, "_install", lambda _, *what: installed.append(what))
    peer = side_by_side.Environment("Peer", "peer", ("peer==1.0",), alone=("other==2",))
    python = side_by_side.peer_python(peer, tmp_path)
    assert installed == [(side_by_side.TORCH,), ("peer==1.0",), ("--no-deps", "other==2")]
    assert side_by_side.peer_python(peer, tmp_path) == python
    assert len(installed) == 3  # it stood
    side_by_side.peer_python(side_by_side.Environment("Peer", "peer", ("peer==1.1",)), tmp_path)
    assert installed[-1] == ("peer==1.1",)


def test_every_benchmark_is_of_a_registered_model(side_by_side: ModuleType) -> None:
    from recspec.models import MODELS

    training = importlib.import_module("training")
    assert set(training.PARTS) <= set(MODELS)
    for part, told in training.PARTS.values():
        assert {"recspec"} < set(part.MEASURES)
        part.options().parse_args([*told])
        for who in part.MEASURES:
            assert who == "recspec" or who in side_by_side.ENVIRONMENTS


def test_the_table_says_who_is_slower_and_who_is_missing(
    side_by_side: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert side_by_side
    training = importlib.import_module("training")
    lines = [{"what": what, "share": 0.25} for what in ("forward", "backward", "matrix products")]
    table = {
        "model": "dlrm",
        "results": {
            "recspec": {
                "samples_per_second": 1234,
                "share_of_matrix_rate": 0.5,
                "share_of_memory_bandwidth": 0.25,
                "peak_memory_bytes": 2_000_000_000,
            }
        },
        "fastest_peer": "TorchRec",
        "over_equals": {"TorchRec": 1.6, "TorchRec, helped": 1.2},
        "not_measured": {"FuxiCTR": "it has no DLRM"},
        "runs": {
            "recspec": [
                {
                    "gflop_per_step": 1.0,
                    "matrix_rate_gflops_per_second": 2.0,
                    "megabytes_per_step": {},
                    "memory_bandwidth_gigabytes_per_second": 3.0,
                    "profile": {"parts": lines, "operations": lines},
                }
            ]
        },
    }
    row = {"setting": "published", **training._row(table)}
    assert row["least_ratio"] == 1.2
    training._print({"table": [row], "failed": {"din": "no memory"}})
    printed = capsys.readouterr().out
    assert "dlrm, published" in printed
    assert "1.20 TorchRec, helped, 1.60 TorchRec; FuxiCTR: it has no DLRM" in printed
    assert "25%" in printed
    assert "din: failed; no memory" in printed
