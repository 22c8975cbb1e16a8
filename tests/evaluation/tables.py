"""Small prepared datasets, and models and rankers whose scores stand in a table."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from recspec.base import config
from recspec.bundle import Bundle, Card
from recspec.evaluation.evaluations import ROW_BASELINES, evaluate_model
from recspec.evaluation.report import Evaluation
from recspec.evaluation.task import EvaluateSettings
from recspec.feature_spec import FeatureSpec
from recspec.models import Interactions
from recspec.models.base import Model
from recspec.models.layers.batch import Batch

Row = tuple[int, int, int]


def row_baselines_here() -> list[str]:
    """The baselines of labelled rows whose libraries are installed."""
    return [name for name in ROW_BASELINES if name != "lightgbm" or find_spec("lightgbm") is not None]


def csv_spec(
    folder: Path,
    splits: Mapping[str, str],
    features: Mapping[str, Mapping[str, object]],
    channels: Mapping[str, Sequence[str]],
    metadata: Mapping[str, object] | None = None,
) -> FeatureSpec:
    """A dataset of a CSV file for each split; `features` are its columns."""
    folder.mkdir(exist_ok=True)
    for split, text in splits.items():
        (folder / f"{split}.csv").write_text(text)
    sources = {split: [{"type": "csv", "features": [*features], "files": [f"{split}.csv"]}] for split in splits}
    sections = {"feature_spec": features, "source_spec": sources, "channel_spec": channels, "metadata": metadata or {}}
    return FeatureSpec.from_dict(sections, folder)


def dataset(
    folder: Path,
    splits: Mapping[str, Iterable[Row]],
    *,
    users: int = 4,
    items: int = 6,
    group: bool = True,
    metadata: Mapping[str, object] | None = None,
) -> FeatureSpec:
    """A prepared dataset of rows (user, item, label) in CSV files."""
    texts = {split: "".join(f"{u},{i},{y}\n" for u, i, y in rows) for split, rows in splits.items()}
    ids = {name: {"dtype": "int32", "cardinality": count} for name, count in (("user", users), ("item", items))}
    channels = {name: [name] for name in ("user", "item", "label")} | ({"group": ["user"]} if group else {})
    return csv_spec(folder, texts, {**ids, "label": {"dtype": "float32"}}, channels, metadata)


ADS = {"shown": {"dtype": "int64"}, "ad": {"cardinality": 2}, "label": {}}
SHOWN = "7,0,1\n7,1,0\n8,1,1\n8,0,0\n"
"""Two displays of two ads each."""


@dataclass
class TableRanker:
    """Scores every pair from a table."""

    table: np.ndarray

    def score_pairs(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        return self.table[users, items]

    def score_users(self, users: np.ndarray) -> np.ndarray:
        return self.table[users].copy()


def ranked(
    spec: FeatureSpec, table: np.ndarray, *protocols: str, split: str = "test", **settings: object
) -> Evaluation:
    """The evaluation of a table of scores; every user's are alike if it has one row."""
    scores = np.tile(table, (spec.num_ids("user"), 1)) if np.ndim(table) == 1 else table
    asked = EvaluateSettings.model_validate(settings)
    return evaluate_model(TableRanker(scores), spec, split, protocols=protocols or None, settings=asked)


class TableModel(Model):
    """Gives a pair the logit of a table; it can be trained no further."""

    needs: ClassVar[tuple[str, ...]] = ("user", "item", "label")
    Settings = config.Settings

    def __init__(self, spec: FeatureSpec, table: np.ndarray) -> None:
        super().__init__(spec, config.Settings())
        self.table = nn.Parameter(torch.from_numpy(table.astype(np.float32)))
        self.dropout = nn.Dropout(0.9)

    def forward(self, batch: Batch) -> Tensor:
        return self.dropout(self.table[batch[self.spec.user_id].long(), batch[self.spec.item_id].long()])


def trained(model: Model, train: Mapping[str, object] | None = None) -> Bundle:
    """A bundle of a model, which lies in no folder."""
    return Bundle(model, Card(model="table", settings={}, train=dict(train or {})), model.spec, Path("nowhere"))


def series(rng: np.random.Generator, users: int, items: int, size: int) -> list[Row]:
    rows: list[Row] = []
    for user in range(users):
        chosen = rng.choice(items, size, replace=False)
        rows += [(user, int(item), int(place == 0)) for place, item in enumerate(chosen)]
    return rows


def displays(
    folder: Path, rows: Sequence[tuple[int, int, float, int]], *, metadata: Mapping[str, object] | None = None
) -> FeatureSpec:
    """Rows (group, label, score, leak) whose score is a context feature; `leak` is kept and plays no role."""
    text = "".join(f"{g},{y},{x!r},{leak}\n" for g, y, x, leak in rows)
    features = {"display": {"dtype": "int64"}, "label": {}, "score": {"dtype": "float64"}, "leak": {}}
    channels = {"context": ["score"], "group": ["display"], "label": ["label"]}
    return csv_spec(folder, {"test": text}, features, channels, metadata)


class Score(Model):
    """The logit is the row's own score."""

    needs: ClassVar[tuple[str, ...]] = ("label",)
    Settings = config.Settings

    def __init__(self, spec: FeatureSpec) -> None:
        super().__init__(spec, config.Settings())
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: Batch) -> Tensor:
        return batch["score"].float() * self.weight


def random_displays(seed: int = 0) -> list[tuple[int, int, float, int]]:
    """Groups of 1 to 45 rows with tied scores, several positives or none; some rows are leaked."""
    rng = np.random.default_rng(seed)
    rows = []
    for group in rng.choice(10**12, 60, replace=False):
        size = int(rng.integers(1, 46))
        labels, leak = rng.random(size) < 0.15, rng.random(size) < 0.1
        scores = rng.integers(-8, 9, size) / 4
        rows += [(int(group), int(y), float(x), int(of)) for y, x, of in zip(labels, scores, leak, strict=True)]
    return rows


def rich_dataset(folder: Path, *, catalogue: bool) -> FeatureSpec:
    """User id and age, item id, genres and price, an hour and a history; item 4 stands in no row."""
    genres, price = {1: [1, 2], 2: [2], 3: [3], 4: [1]}, {1: 0.5, 2: 1.5, 3: 2.5, 4: 4.0}
    rows = [(1, 1, 1, [2], 1), (1, 2, 1, [2], 0), (1, 3, 3, [2], 1), (2, 3, 2, [1, 2], 1), (2, 1, 2, [1, 2], 0)]
    lines = [f'{u},{10 * u},{i},"{genres[i]}",{price[i]},{hour},"{events}",{y}' for u, i, hour, events, y in rows]
    if catalogue:
        columns = {"genres": pa.array([*genres.values()], pa.list_(pa.int32())), "title": list("abcd")}
        pq.write_table(pa.table({**columns, "price": pa.array([*price.values()], pa.float32())}), folder / "i.parquet")
    features = {
        "user": {"dtype": "int32", "cardinality": 3},
        "age": {},
        "item": {"dtype": "int32", "cardinality": 5},
        "genres": {"dtype": "int32", "cardinality": 4, "length": 2, "padding": 0},
        "price": {},
        "hour": {"dtype": "int32", "cardinality": 4},
        "history": {"dtype": "int32", "cardinality": 5, "length": 3, "padding": 0, "vocabulary": "item"},
        "label": {},
    }
    channels = {"user": ["user", "age"], "item": ["item", "genres", "price"]}
    channels |= {"context": ["hour"], "history": ["history"], "label": ["label"]}
    metadata = {"vocabularies": "v", **({"catalogues": {"item": "i.parquet"}} if catalogue else {})}
    return csv_spec(folder, {"test": "\n".join([*lines, ""])}, features, channels, metadata)


class RichModel(TableModel):
    """Uses every feature, so that one that is missing or of another row shows."""

    needs = ("user", "item", "context", "history", "label")

    def features(self) -> tuple[str, ...]:
        return (*super().features(), "history")

    def forward(self, batch: Batch) -> Tensor:
        request = (
            batch["age"] + 100.0 * batch["hour"] + (batch["history"].float() * torch.tensor([1.0, 0.1, 0.01])).sum(1)
        )
        item = batch["price"] + (batch["genres"].float() * torch.tensor([1.0, 0.1])).sum(1)
        return request * item + batch["item"].float()


def with_histories(
    folder: Path,
    splits: Mapping[str, Sequence[tuple[int, int, int, list[int]]]],
    *,
    users: int = 4,
    items: int = 8,
    shared: bool = True,
) -> FeatureSpec:
    """Series of rows (user, item, label, history); every row of a user is in one series."""
    ids = {name: {"dtype": "int32", "cardinality": count} for name, count in (("user", users), ("item", items))}
    events = {**ids["item"], "length": 5, "padding": 0, **({"vocabulary": "item"} if shared else {})}
    features = {**ids, "history_item": events, "label": {"dtype": "float32"}}
    texts = {split: "".join(f'{u},{i},"{told}",{y}\n' for u, i, y, told in rows) for split, rows in splits.items()}
    channels = {"user": ["user"], "item": ["item"], "history": ["history_item"], "label": ["label"], "group": ["user"]}
    metadata = {"user_id": "user", "item_id": "item", "test_samples_per_series": 2}
    return csv_spec(folder, texts, features, channels, metadata)


HELD_OUT = [(1, 2, 1, [3, 2]), (1, 7, 0, [3, 2]), (2, 4, 1, [6, 5]), (2, 5, 0, [6, 5]), (3, 1, 1, []), (3, 6, 0, [])]


def acted(pairs: list[tuple[int, int]], num_users: int, num_items: int) -> Interactions:
    users, items = np.array(pairs, dtype=np.int32).reshape(-1, 2).T
    return Interactions.from_pairs(users, items, num_users=num_users, num_items=num_items)
