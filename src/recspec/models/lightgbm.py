"""LightGBM: boosted trees over numbers, categories, counts of lists, and the label's mean of ids and of pairs of ids.

    logit = sum over trees of the value of the leaf that the row reaches

Shapes: B rows; V values of numerical features in a row; I scalar features of ids; K known pairs of ids; P pairs of
features; C columns of the matrix that trees split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from recspec.base import config
from recspec.base.errors import SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.models.base import Traits
from recspec.models.known_items import Stored
from recspec.models.layers import Batch, RowsHeld, num_rows, side_by_side
from recspec.models.row_model import FittedRowModel
from recspec.models.trees import Trees

TargetMeans = Literal["none", "columns", "pairs"]


class LightGbmSettings(config.Settings):
    """Settings of LightGBM."""

    target_means: TargetMeans = Field(
        "none",
        description=(
            "further columns: `columns`, the label's mean of each id; `pairs`, also of pairs of ids; by default chosen"
            " on valid"
        ),
    )
    num_leaves: int = Field(31, ge=2, le=1024, description="leaves of a tree; by default chosen on valid")
    max_categories: int = Field(
        4000,
        ge=0,
        le=65_536,
        description=(
            "most frequent ids of a feature that trees tell apart, as far as LightGBM does, which joins those of the "
            "rarest 1 % of rows; the others share one; 0: means alone; by default chosen on valid"
        ),
    )
    max_cat_threshold: int = Field(
        32, ge=1, le=4096, description="most ids on one side of a split; by default chosen on valid"
    )
    trees: int | None = Field(
        None, ge=1, le=20_000, description="number of trees; null: until the log loss of valid stops falling"
    )
    learning_rate: float = Field(0.1, gt=0, le=1, description="factor of each tree's values")
    min_rows: int = Field(20, ge=1, description="fewest training rows of a leaf; by default chosen on valid")
    l2: float = Field(0.0, ge=0, description="L2 penalty of the values of leaves; by default chosen on valid")
    feature_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the columns that a tree may split, drawn by the seed; by default chosen on valid",
    )


class PairMeans(Stored):
    """The label's mean of pairs of ids, in lists of ascending keys: that of ids a, b is a * ids of the second + b."""

    columns: Tensor  # (2, P) the features of each pair
    offsets: Tensor  # (P + 1,) pair p's keys are keys[offsets[p]:offsets[p + 1]]
    keys: Tensor  # (K,)
    means: Tensor  # (K,)
    rest: Tensor  # () the mean of a pair of ids without a key

    _types: ClassVar[Mapping[str, tuple[torch.dtype, int]]] = {
        "columns": (torch.int64, 2),
        "offsets": (torch.int64, 1),
        "keys": (torch.int64, 1),
        "means": (torch.float32, 1),
        "rest": (torch.float32, 0),
    }

    def __init__(self, num_ids: Sequence[int]) -> None:
        super().__init__()
        self.num_ids, self.steps = tuple(num_ids), 0
        self.register_buffer("columns", torch.zeros(2, 0, dtype=torch.int64))
        self.register_buffer("offsets", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("keys", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("means", torch.zeros(0))
        self.register_buffer("rest", torch.zeros(()))

    @property
    def num_pairs(self) -> int:
        """P."""
        return self.columns.shape[1]

    def fill(
        self,
        pairs: Sequence[tuple[int, int]],
        keys: Sequence[NDArray[np.int64]],
        means: Sequence[NDArray[np.float32]],
        rest: float,
    ) -> None:
        """Take pairs of features, and each one's ascending keys with their means."""
        offsets = np.cumsum([0, *map(len, keys)])
        self.columns = torch.from_numpy(np.array(pairs, np.int64).reshape(-1, 2).T.copy())
        self.offsets = torch.from_numpy(offsets)
        self.keys = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *keys]))
        self.means = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *means]))
        self.rest = torch.tensor(rest, dtype=torch.float32)
        self._count_steps(self.offsets)

    def forward(self, ids: Tensor) -> Tensor:
        """Means (B, P) of rows' ids (B, I), by a binary search that any exporter can write down."""
        if not len(self.keys):
            return self.rest.expand(ids.shape[0], self.num_pairs)
        wide = torch.tensor(self.num_ids, device=ids.device)[self.columns[1]]
        wanted = ids[:, self.columns[0]] * wide + ids[:, self.columns[1]]
        low, high = self.offsets[:-1].expand_as(wanted), self.offsets[1:].expand_as(wanted)
        for _ in range(self.steps):
            middle = (low + high) >> 1
            less = (low < high) & (self.keys[middle.clamp(max=len(self.keys) - 1)] < wanted)
            low, high = torch.where(less, middle + 1, low), torch.where(less, high, middle)
        place = low.clamp(max=len(self.keys) - 1)
        found = (low < self.offsets[1:]) & (self.keys[place] == wanted)
        return torch.where(found, self.means[place], self.rest)

    def _count_steps(self, offsets: Tensor) -> None:
        self.steps = int(offsets.diff().max()).bit_length() if len(offsets) > 1 else 0

    def allocate_buffers(self, stored: Mapping[str, Tensor]) -> list[str]:
        held = {name: stored.get(name) for name in self._types}
        if any(each is None or (each.dtype, each.dim()) != self._types[name] for name, each in held.items()):
            return []
        columns, offsets, keys = (stored[name] for name in ("columns", "offsets", "keys"))
        if columns.shape[0] != 2 or len(offsets) != columns.shape[1] + 1 or len(keys) != len(stored["means"]):
            return ["'columns', 'offsets', 'keys' and 'means' have sizes that do not fit each other"]
        for name, each in stored.items():
            setattr(self, name, torch.empty(each.shape, dtype=each.dtype, device=self.rest.device))
        if bool((columns < 0).any()) or bool((columns >= len(self.num_ids)).any()):
            return [f"'columns' names a feature outside 0 to {len(self.num_ids) - 1}"]
        if offsets[0] != 0 or offsets[-1] != len(keys) or bool((offsets.diff() < 0).any()):
            return [f"'offsets' does not rise from 0 to {len(keys)}, the number of keys"]
        rises, first = keys.diff() > 0, offsets[1:-1]
        rises[first[(first > 0) & (first < len(keys))] - 1] = True  # the next pair's keys may begin lower
        if not bool(rises.all()):
            return ["'keys' does not rise within each pair of features"]
        self._count_steps(offsets)
        return []


class LightGbm(FittedRowModel):
    """Gradient boosting on labelled rows (Ke et al., "LightGBM", NeurIPS 2017), over every feature that it may read."""

    name = "lightgbm"
    Settings = LightGbmSettings
    settings: LightGbmSettings
    traits = Traits(libraries=("lightgbm",))
    space = MappingProxyType(
        {
            "settings.target_means": ["none", "columns", "pairs"],
            "settings.num_leaves": "7..255 log",
            "settings.max_categories": [4000, 100, 0],
            "settings.max_cat_threshold": "4..64 log",
            "settings.learning_rate": "0.02..0.2 log",
            "settings.min_rows": "5..200 log",
            "settings.l2": "0 or 0.01..100.0 log",
            "settings.feature_share": "0.3..1.0",
        }
    )

    most_listed: ClassVar[int] = 32
    """Ids of a list that get a column of counts, the most frequent ones."""

    codes: Tensor
    means: Tensor

    @classmethod
    def searched(cls) -> tuple[str, ...]:
        names = ("target_means", "max_categories", "max_cat_threshold", "feature_share", "num_leaves", "min_rows", "l2")
        return (*names, "trees")

    def __init__(self, spec: FeatureSpec, settings: LightGbmSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        numbers, named = spec.inputs(categorical=False), spec.inputs(categorical=True)
        # The buckets of a number are ordered, behind 0 for a missing value: sets of them are learnt by heart.
        own_buckets = [f"{name}_bucket" for name in numbers if f"{name}_bucket" in named]
        self.numbers = (*numbers, *own_buckets)
        named = tuple(name for name in named if name not in own_buckets)
        self.lists = tuple(name for name in named if spec.features[name].is_list)
        self.ids = tuple(name for name in named if name not in self.lists)
        if not named and not numbers:
            raise SettingsError(f"{self.name}: there is no feature to read in the roles user, item and context")
        self.widths = [spec.features[name].length or 1 for name in self.numbers]
        sizes = [spec.num_ids(name) for name in (*self.ids, *self.lists)]
        self.first = dict(zip((*self.ids, *self.lists), np.cumsum([0, *sizes]).tolist(), strict=False))
        self.has_means = settings.target_means != "none" and bool(self.ids)
        num_scalar = sum(sizes[: len(self.ids)])
        self.register_buffer("codes", torch.zeros(sum(sizes), dtype=torch.int32))
        self.register_buffer("means", torch.zeros(num_scalar if self.has_means else 0))
        self.pairs = PairMeans(sizes[: len(self.ids)] if settings.target_means == "pairs" else [])
        self.trees = Trees(0)

    def how(self) -> str:
        super().how()
        until = f"{self.settings.trees:,} trees" if self.settings.trees else "until the log loss of held-out rows rises"
        return f"trees are added one by one, {until}"

    def allocate_buffers(self, weights: Mapping[str, Tensor]) -> list[str]:
        columns = weights.get("pairs.columns")
        # A tensor of no rows may claim any number of columns.
        pairs = columns.shape[1] if columns is not None and columns.dim() == 2 and len(columns) == 2 else 0
        self.trees.num_columns = len(self.column_features([(0, 0)] * pairs))
        return super().allocate_buffers(weights)

    def column_features(self, pairs: Sequence[tuple[int, int]] | None = None) -> list[tuple[str, ...]]:
        """The feature, or the pair of features, that each column (C,) is made of."""
        if pairs is None:
            pairs = [(int(a), int(b)) for a, b in self.pairs.columns.T.tolist()]
        made = [(name,) for name, width in zip(self.numbers, self.widths, strict=True) for _ in range(width)]
        made += [(name,) for name in self.ids]
        made += [(name,) for name in self.lists for _ in range(self.most_listed + 1)]
        made += [(name,) for name in self.ids if self.has_means]
        return [*made, *((self.ids[a], self.ids[b]) for a, b in pairs if self.ids)]

    def columns(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The matrix (B, C) in fp64: numbers, codes of ids, counts of lists, means of ids, means of pairs."""
        parts = list[Tensor]()
        if self.numbers:
            numbers = side_by_side([batch[name].double() for name in self.numbers])  # ONNX joins no buckets with floats
            parts.append(torch.where(numbers.isnan(), 0.0, numbers))
        if self.ids:
            ids = torch.stack([batch[name].long() for name in self.ids], dim=1)
            places = ids + torch.tensor([self.first[name] for name in self.ids], device=ids.device)
            parts.append(self.codes[places].double())
        for name in self.lists:
            parts.append(self._counts(batch[name].long(), self.first[name]))
        if self.has_means:
            parts.append(self.means[places].double())
        if self.pairs.num_pairs:
            parts.append(self.pairs(ids).double())
        return torch.cat(parts, dim=1)

    def _counts(self, ids: Tensor, first: int) -> Tensor:
        """(B, most_listed + 1) the length of each row's list (B, L), then how often it holds each code from 1."""
        held = ids != 0
        codes = torch.where(held, self.codes[ids + first], 0)
        counted = codes.unsqueeze(2) == torch.arange(1, self.most_listed + 1, device=ids.device)
        return torch.cat([held.sum(1, keepdim=True), counted.sum(1)], dim=1).double()

    def forward(self, batch: Batch) -> Tensor:
        if not torch.compiler.is_compiling() and not num_rows(batch):
            return torch.zeros(0, device=self.device)
        made: Tensor = self.trees(self.columns(batch)).float()
        return made

    def fill(self, structures: Sequence[Mapping[str, Any]]) -> None:
        """Take the trees that LightGBM grew on `columns`: the entries `tree_structure` of its `dump_model`."""
        self.trees.num_columns = len(self.column_features())
        self.trees.fill(structures)

    def size(self) -> str:
        leaves = len(self.trees.feature) - int(self.trees.is_inner().sum())
        return f"{len(self.trees.roots):,} trees, {leaves:,} leaves"

    def gains(self) -> dict[str, float]:
        """What the splits of each feature explain; see `Trees.gains`."""
        names, gains = self._by_feature(self.trees.gains().unsqueeze(0))
        return dict(zip(names, gains[0].tolist(), strict=True))

    def contributions(self, batch: Batch) -> tuple[list[str], Tensor, float]:
        return *self._by_feature(self.trees.contributions(self.columns(batch))), self.trees.base()

    def _by_feature(self, values: Tensor) -> tuple[list[str], Tensor]:
        """Features (F,), and the sums (B, F) of the columns (B, C) made of each; of a pair each feature gets half."""
        names, made = [*self.features()], values.new_zeros(len(values), len(self.features()))
        for column, features in zip(values.T, self.column_features(), strict=True):
            for each in features:
                made[:, names.index(each)] += column / len(features)
        return names, made
