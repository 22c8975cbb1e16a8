"""Datasets: one file each, from raw files to a prepared dataset, and the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from recspec.base.config import Settings
from recspec.data.prepare import PrepareContext, Prepared
from recspec.datasets import adult, amazon, criteo, movielens, ncf, outbrain, synthetic, table
from recspec.datasets.made_up_shop import write_shop
from recspec.datasets.table_growth import Grown, RawEvents, append_events, read_new_events
from recspec.datasets.table_rows import EVENTS, GROWTH_FILE
from recspec.datasets.table_settings import Words


@dataclass(frozen=True)
class Dataset:
    """A dataset that `recspec prepare` knows."""

    prepare: Callable[[PrepareContext, Any], Prepared]
    """From raw files to a prepared dataset; the settings are of the dataset's own class.

    Raises:
        DataError: if raw files are missing or malformed, no row is left for train, or `out` holds something else.
        SettingsError: if settings name files, columns or days that do not exist.
    """
    Settings: type[Settings]
    about: str  # its raw files, for `recspec datasets`


def _dataset(module: Any, about: str) -> Dataset:
    return Dataset(module.prepare, module.Settings, about)


DATASETS: Mapping[str, Dataset] = MappingProxyType({
    "movielens": _dataset(movielens, "MovieLens 100K, 1M, 10M, 20M, 25M, latest: the zip or its folder"),
    "ncf": _dataset(ncf, "the NCF paper's split: PREFIX.train.rating, .test.rating, .test.negative"),
    "outbrain": _dataset(outbrain, "Outbrain's click prediction tables: Kaggle's zip, or a folder of them"),
    "table": _dataset(table, "your own CSV, JSON lines or Parquet files, rows or sequences"),
    "adult": _dataset(adult, "UCI Adult (Census Income): the zip or its folder"),
    "criteo": _dataset(criteo, "Criteo's click logs: Kaggle's train.txt, or a folder of day_0 to day_23"),
    "amazon": _dataset(amazon, "Amazon's reviews of 2014, 2018, 2023: a category's files, or SIM's records"),
    "synthetic": _dataset(synthetic, "generated rows with a known best possible score; RAW is not read"),
})  # fmt: skip

__all__ = [
    "DATASETS", "EVENTS", "GROWTH_FILE", "Dataset", "Grown", "RawEvents", "Words", "append_events", "read_new_events",
    "write_shop",
]  # fmt: skip
