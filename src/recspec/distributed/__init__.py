"""Ranks of a run, and embedding tables over ranks."""

from recspec.distributed import torchrec_tables
from recspec.distributed.placement import Placement, PlacementSettings, place, stores_of
from recspec.distributed.process_group import join, local_ranks, pick_device
from recspec.distributed.ranks import RankLost, Ranks
from recspec.distributed.sharding import Shards, build, divide
from recspec.distributed.streamed import Streamed, rows_of_block

__all__ = [
    "Placement", "PlacementSettings", "RankLost", "Ranks", "Shards", "Streamed", "build", "divide", "join",
    "local_ranks", "pick_device", "place", "rows_of_block", "stores_of", "torchrec_tables",
]  # fmt: skip
