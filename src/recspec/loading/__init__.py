"""Prepared rows to batches."""

from recspec.loading import torchrec_tables
from recspec.loading.blocks import HeldOutShare, NewRowsAndReplay, UserRows
from recspec.loading.loader import Loader
from recspec.loading.placement import Placement, PlacementSettings, place, stores_of
from recspec.loading.ranks import RankLost, Ranks, join, local_ranks, pick_device
from recspec.loading.sampling import (
    Distribution,
    NegativeSampler,
    SharedNegatives,
    holds_negatives,
    ids_present,
    item_features,
    negatives_by_default,
    sampler_for,
    shared_negatives_for,
)
from recspec.loading.sharding import Shards, Streamed, build, divide, rows_of_block
