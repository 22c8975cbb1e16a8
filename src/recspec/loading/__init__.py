"""Prepared rows to batches."""

from recspec.loading.ahead import Share
from recspec.loading.blocks import Newest, Part
from recspec.loading.loader import Loader
from recspec.loading.sampling import (
    Distribution,
    NegativeSampler,
    holds_negatives,
    item_features,
    negatives_by_default,
    sampler_for,
)
from recspec.loading.shared_negatives import SharedNegatives, ids_present, shared_negatives_for
from recspec.loading.users import UserRows

__all__ = [
    "Distribution", "Loader", "NegativeSampler", "Newest", "Part", "Share", "SharedNegatives", "UserRows",
    "holds_negatives", "ids_present", "item_features", "negatives_by_default", "sampler_for", "shared_negatives_for",
]  # fmt: skip
