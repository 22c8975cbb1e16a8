"""The choices of a run and their reasons."""

from __future__ import annotations

import pytest
import torch

from recspec.errors import SettingsError
from recspec.training.choices import Choice, pick_batch_size, pick_precision


@pytest.mark.parametrize(
    ("asked", "so_far", "samples", "device", "size", "why"),
    [
        (7, 9, 10, "cpu", 7, "as asked"),
        (None, 9, 10, "cpu", 9, "as at the start of the run"),
        (None, None, 0, "cpu", 256, "the smallest automatic size, for an epoch of 0 samples"),
        (None, None, 10_000, "cpu", 256, "the smallest automatic size, for an epoch of 10,000 samples"),
        (None, None, 1_000_000, "cpu", 4096, "200 to 400 steps for an epoch of 1,000,000 samples"),
        (None, None, 10**8, "cpu", 65536, "the most chosen on a cpu, for an epoch of 100,000,000 samples"),
        (None, None, 10**8, "cuda", 131072, "the most chosen on a cuda, for an epoch of 100,000,000 samples"),
    ],
)
def test_an_unset_batch_size_makes_some_hundred_steps(
    asked: int | None, so_far: int | None, samples: int, device: str, size: int, why: str
) -> None:
    assert pick_batch_size(asked, so_far, samples, torch.device(device)) == Choice(size, why)


def test_auto_says_why_and_fp16_on_a_cpu_is_refused() -> None:
    cpu = torch.device("cpu")
    choice = pick_precision("auto", cpu)
    told = {"bf16": "multiplies bf16 faster", "tf32": "through oneDNN", "fp32": "multiplies nothing faster"}
    assert told[choice.value] in choice.reason
    choice = pick_precision("auto", cpu, steady=False)
    assert (choice.value, "products change shape at every step" in choice.reason) == ("fp32", True)
    with pytest.raises(SettingsError, match="fp16, which a CPU does many times slower than fp32; use bf16 or fp32"):
        pick_precision("fp16", cpu)
