"""Small made-up datasets that several test files train on."""

from pathlib import Path

from recspec.datasets import DATASETS
from recspec.feature_spec import FeatureSpec


def interactions(folder: Path, **settings: object) -> FeatureSpec:
    """Who took what, in order, prepared with candidates in valid and test: 120 users, 60 items."""
    synthetic = DATASETS["synthetic"]
    sizes = {"kind": "interactions", "num_users": 120, "num_items": 60, "num_rows": 2500, "num_negatives": 20}
    synthetic.prepare(Path(), folder, synthetic.Settings(**{**sizes, **settings}))
    return FeatureSpec.load(folder)


def clicks(folder: Path, **settings: object) -> FeatureSpec:
    """Labelled rows with user, item, context, numerical and list features; the best possible AUC is known."""
    synthetic = DATASETS["synthetic"]
    sizes = {"kind": "clicks", "num_users": 100, "num_items": 50, "num_rows": 4000}
    synthetic.prepare(Path(), folder, synthetic.Settings(**{**sizes, **settings}))
    return FeatureSpec.load(folder)
