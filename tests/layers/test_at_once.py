"""How much a device computes at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from recspec.models.base import at_once


@pytest.mark.parametrize(
    ("gigabytes", "width", "number"),
    [(80, 1, 1 << 27), (8, 1, 8 * 10**9 // 256), (1, 1, 1 << 23), (80, 1024, 1 << 23)],
    ids=["as many as pay", "a share of the memory", "never fewer than a CPU", "rows too"],
)
def test_a_gpu_takes_more_than_a_cpu_within_a_share_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, gigabytes: int, width: int, number: int
) -> None:
    memory = SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    assert at_once(1 << 23, torch.device("cuda"), width=width) == number
    assert at_once(1 << 23, torch.device("cpu"), width=width) == 1 << 23
