"""Prepared rows to batches."""

from recspec.loading.ahead import Share
from recspec.loading.blocks import Part
from recspec.loading.loader import Loader
from recspec.loading.sampling import (
    Distribution,
    NegativeSampler,
    holds_negatives,
    item_features,
    negatives_by_default,
    sampler_for,
)
from recspec.loading.users import UserLoader

__all__ = [
    "Distribution", "Loader", "NegativeSampler", "Part", "Share", "UserLoader", "holds_negatives",
    "item_features", "negatives_by_default", "sampler_for",
]  # fmt: skip
