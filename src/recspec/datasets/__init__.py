"""Raw files to a prepared dataset: one file a dataset, and the table of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from recspec.config import Settings
from recspec.datasets import adult, amazon, criteo, movielens, ncf, outbrain, synthetic, table
from recspec.datasets.prepared import Prepared, Progress, silent


class Prepare(Protocol):
    """Raw files in, a prepared dataset out; `settings` are of the dataset's own class."""

    def __call__(
        self,
        raw: Path,
        out: Path,
        settings: Any,
        *,
        engine: str = "duckdb",
        memory_limit: str | None = None,
        threads: int | None = None,
        progress: Progress = silent,
        force: bool = False,
    ) -> Prepared: ...


@dataclass(frozen=True)
class Dataset:
    """What can be prepared, how, and from which files."""

    prepare: Prepare
    Settings: type[Settings]
    about: str


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
        "table": Dataset(table.prepare, table.Settings, "your own CSV or Parquet file, of which you name the columns"),
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
