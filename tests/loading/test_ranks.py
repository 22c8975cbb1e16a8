"""One rank's share of rows, and the exchanges of one process with itself."""

from __future__ import annotations

import pytest
import torch

from recspec.loading.ranks import Ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("n", [0, 1, 2, 6, 7, 8, 9, 100, 101])
def test_the_shares_of_all_ranks_are_all_rows_once_and_in_order(n: int, world_size: int) -> None:
    shares = [Ranks(rank, world_size).share(n) for rank in range(world_size)]
    assert [row for share in shares for row in range(n)[share]] == list(range(n))
    sizes = [share.stop - share.start for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_one_process_tells_itself_what_it_knows() -> None:
    ranks = Ranks()
    rows = torch.tensor([[1, 2], [3, 4]])
    assert ranks.is_first
    assert torch.equal(ranks.gather(rows), rows)
    assert torch.equal(ranks.sum(rows), rows)
    assert (ranks.any(True), ranks.any(False)) == (True, False)
    ranks.barrier()
