"""Users as rows: each once an epoch, in an order that depends on seed and epoch alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recspec.feature_spec import FeatureSpec
from recspec.loading import Loader, UserRows
from tests import made_up

USERS = np.array([7, 2, 9, 4, 101, 1, 8])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("users") / "data", num_rows=500)


def loader(data: FeatureSpec, batch_size: int, **settings: object) -> Loader:
    rows = UserRows(data, USERS)
    return Loader(data, (), rows=rows, features=(data.user_id,), batch_size=batch_size, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [1 << 30, 1])
def test_each_user_comes_once_an_epoch_on_any_number_of_ranks(data: FeatureSpec, budget: int) -> None:
    alone = loader(data, 3, seed=5, memory_budget=budget)
    assert (alone.num_rows, alone.num_batches, alone.features) == (7, 3, (data.user_id,))
    orders = []
    for epoch in range(3):
        batches = [share.batch[data.user_id].tolist() for share in alone.batches(epoch, lanes=2)]
        orders.append([user for batch in batches for user in batch])
        assert [len(each) for each in batches] == [3, 3, 1]
        assert sorted(orders[-1]) == sorted(USERS.tolist())
        two = [loader(data, 3, seed=5, rank=rank, world_size=2, memory_budget=budget) for rank in (0, 1)]
        shares = zip(*(each.batches(epoch) for each in two), strict=True)
        both = [[share.batch[data.user_id][: share.num_rows] for share in pair] for pair in shares]
        assert [torch.cat(pair).tolist() for pair in both] == batches
    assert len({tuple(order) for order in orders}) == 3


def test_blocks_hold_all_users_in_order(data: FeatureSpec) -> None:
    rows = UserRows(data, USERS)
    for size in (1, 2, 7, 100):
        blocks = rows.cut(size)
        assert [block.num_rows for block in blocks] == [len(rows.read(block)[data.user_id]) for block in blocks]
        assert np.concatenate([rows.read(block)[data.user_id] for block in blocks]).tolist() == USERS.tolist()
    assert sum(block.num_rows for block in UserRows(data, USERS[:0]).cut(4)) == 0
