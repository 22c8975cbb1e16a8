"""The choices of the rows that a run reads."""

from __future__ import annotations

import pytest
import torch

from recspec.training.data_choices import pick_batch_size


@pytest.mark.parametrize(
    ("asked", "samples", "device", "size", "why"),
    [
        (7, 10, "cpu", 7, "as asked"),
        (None, 0, "cpu", 256, "the fewest chosen, for an epoch of 0 samples"),
        (None, 10_000, "cpu", 256, "the fewest chosen, for an epoch of 10,000 samples"),
        (None, 1_000_000, "cpu", 4096, "200 to 400 steps for an epoch of 1,000,000 samples"),
        (None, 10**8, "cpu", 65536, "the most chosen on a cpu, for an epoch of 100,000,000 samples"),
        (None, 10**8, "cuda", 131072, "the most chosen on a cuda, for an epoch of 100,000,000 samples"),
    ],
)
def test_an_unset_batch_size_makes_some_hundred_steps(
    asked: int | None, samples: int, device: str, size: int, why: str
) -> None:
    assert pick_batch_size(asked, samples, torch.device(device)) == (size, why)
