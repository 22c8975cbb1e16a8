"""Batches: rows taken, joined, repeated and moved."""

from __future__ import annotations

import torch

from recspec.models.layers.batch import concatenate, num_rows, repeat_rows, take, tile_rows, to_device


def batch() -> dict[str, torch.Tensor]:
    """Three rows of a scalar and of a list."""
    return {"item": torch.tensor([1, 2, 3]), "genres": torch.tensor([[1, 0], [2, 3], [4, 0]])}


def as_lists(rows: dict[str, torch.Tensor]) -> dict[str, list[object]]:
    return {name: tensor.tolist() for name, tensor in rows.items()}


def test_num_rows() -> None:
    assert num_rows(batch()) == 3
    assert num_rows({}) == 0
    assert num_rows({"item": torch.zeros(0)}) == 0


def test_rows_are_taken_by_index_and_by_slice() -> None:
    assert as_lists(take(batch(), torch.tensor([2, 0, 2]))) == {"item": [3, 1, 3], "genres": [[4, 0], [1, 0], [4, 0]]}
    assert as_lists(take(batch(), slice(1, None))) == {"item": [2, 3], "genres": [[2, 3], [4, 0]]}
    assert num_rows(take(batch(), torch.tensor([], dtype=torch.int64))) == 0


def test_a_slice_is_a_view() -> None:
    rows = batch()
    assert take(rows, slice(0, 2))["item"].data_ptr() == rows["item"].data_ptr()


def test_batches_are_joined() -> None:
    assert as_lists(concatenate([batch(), take(batch(), slice(0, 1))]))["item"] == [1, 2, 3, 1]
    assert concatenate([]) == {}


def test_repeated_rows_stand_side_by_side_and_tiled_ones_block_by_block() -> None:
    """So that row i of one and row i of the other are the pairs (request i // N, item i % N)."""
    assert as_lists(repeat_rows(batch(), 2)) == {
        "item": [1, 1, 2, 2, 3, 3],
        "genres": [[1, 0], [1, 0], [2, 3], [2, 3], [4, 0], [4, 0]],
    }
    assert as_lists(tile_rows(batch(), 2)) == {
        "item": [1, 2, 3, 1, 2, 3],
        "genres": [[1, 0], [2, 3], [4, 0], [1, 0], [2, 3], [4, 0]],
    }
    assert num_rows(repeat_rows(batch(), 0)) == num_rows(tile_rows(batch(), 0)) == 0


def test_a_batch_on_its_own_device_stays_as_it_is() -> None:
    moved = to_device(batch(), torch.device("cpu"))
    assert as_lists(moved) == as_lists(batch())
    assert {name: tensor.dtype for name, tensor in moved.items()} == {"item": torch.int64, "genres": torch.int64}
