"""When to stop and when to write a checkpoint."""

import pytest

from recspec.loading.ranks import Ranks
from recspec.training.loop import RankConsensus


@pytest.mark.parametrize(
    ("minutes", "asked", "stop", "due"),
    [(0, False, False, True), (1e6, False, False, False), (1e6, True, True, True), (0, True, True, True)],
)
def test_a_run_that_stops_writes_a_checkpoint_first(minutes: float, asked: bool, stop: bool, due: bool) -> None:
    agreement = RankConsensus(Ranks(), minutes, lambda: asked)
    agreement.start(5)
    assert agreement.after(6) == (stop, due, False)
    assert agreement.after(7, late=True) == (stop, due, True)
