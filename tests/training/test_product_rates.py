"""The rates of matrix products: measured once, kept, shared by ranks; a bad file is measured anew."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recspec.training import product_rates
from recspec.training.product_rates import ProductRates, kept_rates, measure_rates, rates_of_all

MEASURED = ProductRates(wide_fp32=100.0, wide_tf32=110.0, wide_bf16=30.0, narrow_fp32=50.0, narrow_tf32=60.0)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often was measured; the cache folder is `tmp_path`."""
    times: list[None] = []

    def measure() -> ProductRates:
        times.append(None)
        return MEASURED

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(product_rates, "measure_rates", measure)
    return lambda: len(times)


def in_a_new_process() -> ProductRates:
    product_rates._kept_rates.cache_clear()
    return kept_rates()


@pytest.fixture(autouse=True)
def _forget() -> None:
    product_rates._kept_rates.cache_clear()


def the_file(folder: Path) -> Path:
    (file,) = (folder / "recspec").iterdir()
    return file


def test_every_rate_is_a_positive_number() -> None:
    for rate in measure_rates().model_dump().values():
        assert 0 < rate < 1e6
    assert torch.get_float32_matmul_precision() == "highest", "what was set before is set again"


def test_rates_are_measured_once_for_a_machine_and_a_torch(
    measured: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept_rates() == kept_rates() == in_a_new_process() == MEASURED
    assert measured() == 1
    changes: list[Callable[[pytest.MonkeyPatch], None]] = [
        lambda patch: patch.setattr(torch, "__version__", "9.9"),
        lambda patch: patch.setattr("recspec.base.machine.processor", lambda: "another"),
        lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
    ]
    for number, change in enumerate(changes, start=2):
        with monkeypatch.context() as patch:
            change(patch)
            assert kept_rates() == MEASURED
        assert measured() == number
    assert len([*(tmp_path / "recspec").iterdir()]) == 4


GOOD = MEASURED.model_dump()
BAD = {
    "no JSON": b"{",
    "no object": b"[]",
    "not UTF-8": b"\xff\xfe",
    "large": b" " * 5000 + json.dumps(GOOD).encode(),
    "missing": json.dumps({name: rate for name, rate in GOOD.items() if name != "wide_bf16"}).encode(),
    "unknown": json.dumps({**GOOD, "wide_fp8": 1.0}).encode(),
    "negative": json.dumps({**GOOD, "narrow_tf32": -1.0}).encode(),
    "NaN": json.dumps({**GOOD, "wide_bf16": float("nan")}).encode(),
    "infinite": json.dumps({**GOOD, "wide_bf16": float("inf")}).encode(),
    "huge": json.dumps({**GOOD, "wide_bf16": 10**400}).encode(),
    "true": json.dumps({**GOOD, "wide_bf16": True}).encode(),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_file_is_measured_anew(name: str, measured: Callable[[], int], tmp_path: Path) -> None:
    kept_rates()
    the_file(tmp_path).write_bytes(BAD[name])
    assert in_a_new_process() == MEASURED
    assert measured() == 2
    assert json.loads(the_file(tmp_path).read_text()) == GOOD


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_left_alone(
    make: Callable[[Path], None], measured: Callable[[], int], tmp_path: Path
) -> None:
    kept_rates()
    file = the_file(tmp_path)
    file.unlink()
    make(file)
    assert in_a_new_process() == MEASURED
    assert measured() == 2
    assert not file.is_file()


def test_without_a_cache_folder_every_process_measures(
    measured: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recspec").write_text("a file where the folder would be")
    assert in_a_new_process() == in_a_new_process() == MEASURED
    assert measured() == 2
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(Path, "home", _no_home)
    assert in_a_new_process() == MEASURED


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_all_ranks_take_the_rates_of_the_first(measured: Callable[[], int]) -> None:
    first = ProductRates(wide_fp32=1.0, wide_tf32=2.0, wide_bf16=3.0, narrow_fp32=4.0, narrow_tf32=5.0)
    of_first = torch.tensor([*first.model_dump().values()], dtype=torch.float64)
    second = SimpleNamespace(world_size=2, gather=lambda own: torch.cat([of_first, own]))
    assert rates_of_all(second) == first  # type: ignore[arg-type]
    assert measured() == 1


def test_half_of_the_operations_of_a_model_of_events_are_narrow() -> None:
    # fp32: 1/100 + 1/50 = .03; tf32: 1/110 + 1/50; bf16: 1/30 + 1/50. The narrow ones stay with the BLAS.
    assert MEASURED.speed("tf32", narrow=False) == pytest.approx(1.1)
    assert MEASURED.speed("tf32", narrow=True) == pytest.approx(0.03 / (1 / 110 + 1 / 50))
    assert MEASURED.speed("bf16", narrow=False) == pytest.approx(0.3)
    assert MEASURED.speed("bf16", narrow=True) == pytest.approx(0.5625)
    fast = MEASURED.model_copy(update={"narrow_tf32": 100.0})  # through oneDNN
    assert fast.speed("tf32", narrow=True) == pytest.approx(0.03 / (1 / 110 + 1 / 100))
