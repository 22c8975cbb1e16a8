"""Sparse gradients of embedding tables."""

from __future__ import annotations

import torch

from recspec.models.layers.gathered_rows import sparse_rows
from tests.processes import ended


def test_rows_that_repeat_are_summed() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    made = sparse_rows(torch.tensor([2, 0, 2]), values, (4, 2))
    assert made.is_sparse
    assert not made.is_coalesced()
    assert made.to_dense().tolist() == [[3, 4], [0, 0], [6, 8], [0, 0]]
    assert sparse_rows(torch.tensor([0, 2]), values[:2], (4, 2), is_coalesced=True).is_coalesced()


def test_no_version_of_torch_warns() -> None:
    call = "sparse_rows(torch.ones(1).long(), torch.ones(1, 2), (3, 2))"
    strict = "import warnings; warnings.simplefilter('error', UserWarning)"
    done = ended(f"{strict}; import torch; from recspec.models.layers import sparse_rows; {call}")
    assert done.returncode == 0, done.stderr
