"""Datasets: one file each, from raw files to a prepared dataset, and the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from recspec.config import Settings
from recspec.datasets import adult, amazon, criteo, movielens, ncf, outbrain, synthetic, table
from recspec.datasets.movielens_like import write_movielens_like
from recspec.prepare import PrepareContext, Prepared


@dataclass(frozen=True)
class Dataset:
    """A dataset that `recspec prepare` knows."""

    prepare: Callable[[PrepareContext, Any], Prepared]
    """Raw files in, a prepared dataset out; the settings are of the dataset's own class."""
    Settings: type[Settings]
    about: str
    """Its raw files, for `recspec datasets`."""


DATASETS: Mapping[str, Dataset] = MappingProxyType(
    {
        "movielens": Dataset(
            movielens.prepare, movielens.Settings, "MovieLens 100K, 1M, 10M, 20M, 25M, latest: the zip or its folder"
        ),
        "ncf": Dataset(
            ncf.prepare, ncf.Settings, "the NCF paper's split: PREFIX.train.rating, .test.rating, .test.negative"
        ),
        "outbrain": Dataset(
            outbrain.prepare, outbrain.Settings, "Outbrain's click prediction tables: Kaggle's zip, or a folder of them"
        ),
        "table": Dataset(table.prepare, table.Settings, "your own CSV or Parquet file, with columns that you name"),
        "adult": Dataset(adult.prepare, adult.Settings, "UCI Adult (Census Income): the zip or its folder"),
        "criteo": Dataset(
            criteo.prepare, criteo.Settings, "Criteo's click logs: Kaggle's train.txt, or a folder of day_0 to day_23"
        ),
        "amazon": Dataset(
            amazon.prepare,
            amazon.Settings,
            "Amazon's reviews of 2014, 2018, 2023: a category's files, or SIM's records",
        ),
        "synthetic": Dataset(
            synthetic.prepare, synthetic.Settings, "made-up rows whose best possible score is known; RAW is not read"
        ),
    }
)

__all__ = ["DATASETS", "Dataset", "write_movielens_like"]
