"""Boosted trees as tensors: evaluated by torch, without the library that grew them.

Shapes: B rows; C columns; T trees; M nodes of all trees; W words of 32 categories.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recspec.models.known_items import Stored

DEEPEST = 1023
"""Levels of a tree; each takes a step of the evaluation. LightGBM's trees are less deep than they have leaves."""

AT_ONCE = 1 << 17
"""Places in trees held at once on a CPU: 1 MB."""

_TYPES: Mapping[str, torch.dtype] = {
    "feature": torch.int32,
    "threshold": torch.float64,
    "branches": torch.int32,
    "set_start": torch.int32,
    "set_words": torch.int32,
    "sets": torch.int32,
    "value": torch.float64,
    "rows": torch.float64,
    "roots": torch.int32,
}


def tree_sums(x: Tensor, *given: Any) -> Tensor:
    """Sums (B,) of the values of the leaves that rows (B, C) reach.

    A node sends a row to its first child if the feature is at most the threshold, or if its category is in the node's
    set; a leaf is its own child. `given` are the buffers of `Trees` but `rows`, in their order, and `deeper`:
    `deeper[d]` trees, which are the first ones, have more than d levels of nodes.
    """
    *nodes, value, roots, deeper = given
    for places in _places(x, *(*nodes, roots, deeper)):
        leaves = places
    sums: Tensor = value[leaves].sum(1)
    return sums


def _places(
    x: Tensor,
    feature: Tensor,
    threshold: Tensor,
    branches: Tensor,
    set_start: Tensor,
    set_words: Tensor,
    sets: Tensor,
    roots: Tensor,
    deeper: Sequence[int],
) -> Iterator[Tensor]:
    """The nodes (B, T) where rows are, from the roots to the leaves, level by level."""
    rows = x.shape[0]
    places = roots.long().expand(rows, roots.shape[0])
    yield places
    for count in deeper:  # one dimension: torch selects from it twice as fast as by an index of two
        at = places[:, :count].reshape(-1)
        values = x.gather(1, feature.index_select(0, at).long().view(rows, count)).view(-1)
        right = values > threshold.index_select(0, at)
        if sets.shape[0]:
            words, category = set_words.index_select(0, at), values.int()
            held = (category >= 0) & (category >> 5 < words)
            word = sets.index_select(0, torch.where(held, set_start.index_select(0, at) + (category >> 5), 0))
            right = torch.where(words > 0, ~(held & (word >> (category & 31) & 1).bool()), right)
        below = branches.index_select(0, 2 * at + right).long().view(rows, count)
        places = torch.cat([below, places[:, count:]], dim=1)
        yield places


# An operator, so that an exporter sees one node where ONNX has one; elsewhere torch decomposes it.
_library: Any = torch.library.Library("recspec", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "tree_sums(Tensor x, Tensor feature, Tensor threshold, Tensor branches, Tensor set_start, Tensor set_words, "
    "Tensor sets, Tensor value, Tensor roots, int[] deeper) -> Tensor"
)
_library.impl("tree_sums", tree_sums, "CompositeImplicitAutograd")


class Trees(Stored):
    """A sum of trees. Nodes lie so that children come after their parent, and the deepest trees come first."""

    feature: Tensor  # (M,) the column that a node reads
    threshold: Tensor  # (M,)
    branches: Tensor  # (2 M,) the children of node m are at 2 m and 2 m + 1
    set_start: Tensor  # (M,) the first word of a node's set of categories
    set_words: Tensor  # (M,) its number of words; 0 for a node that compares with a threshold
    sets: Tensor  # (W,) bits of categories
    value: Tensor  # (M,) of a leaf; of other nodes the mean over the training rows that came by
    rows: Tensor  # (M,) training rows that came by
    roots: Tensor  # (T,)

    def __init__(self, num_columns: int) -> None:
        super().__init__()
        self.num_columns, self.deeper = num_columns, list[int]()
        for name, dtype in _TYPES.items():
            self.register_buffer(name, torch.zeros(0, dtype=dtype))

    def fill(self, grown: Sequence[Mapping[str, Any]]) -> None:
        """Take trees as LightGBM's `dump_model` tells them: the entries `tree_structure` of `tree_info`."""
        made = [_Tree(each) for each in grown]
        made.sort(key=lambda each: -each.depth)
        starts = np.cumsum([0, *(len(each.feature) for each in made)])
        words = np.cumsum([0, *(len(each.sets) for each in made)])
        parts: dict[str, list[NDArray[Any]]] = {name: [np.zeros(0, np.int64)] for name in _TYPES}
        for each, start, word in zip(made, starts, words, strict=False):
            for name in ("feature", "threshold", "set_words", "value", "rows"):
                parts[name].append(np.array(getattr(each, name)))
            parts["branches"].append(np.array(each.branches).reshape(-1) + start)
            parts["set_start"].append(np.where(np.array(each.set_words) > 0, np.array(each.set_start) + word, 0))
            parts["sets"].append(np.array(each.sets, np.uint32).view(np.int32))
        parts["roots"].append(starts[:-1])
        for name, dtype in _TYPES.items():
            setattr(self, name, torch.from_numpy(np.concatenate(parts[name])).to(dtype))
        self.deeper = self._levels()[0]

    def forward(self, x: Tensor) -> Tensor:
        """Sums (B,) in fp64 of rows (B, C) in fp64, none of which is NaN."""
        if torch.compiler.is_compiling():
            return self._sums(x)
        step = max(1, AT_ONCE // max(1, len(self.roots)))
        return torch.cat([self._sums(rows) for rows in torch.split(x, step)])

    def _sums(self, x: Tensor) -> Tensor:
        nodes = (self.feature, self.threshold, self.branches, self.set_start, self.set_words, self.sets)
        made: Tensor = torch.ops.recspec.tree_sums(x, *nodes, self.value, self.roots, self.deeper)
        return made

    def contributions(self, x: Tensor) -> Tensor:
        """Shares (B, C + 1) of columns in the sums of rows (B, C), and last the mean sum of the training rows.

        Each step from a node to its child changes the mean of the training rows that came by; the column that the node
        reads gets the change (Saabas, "Interpreting random forests", 2014). The shares of a row add up to its sum.
        """
        nodes = (self.feature, self.threshold, self.branches, self.set_start, self.set_words, self.sets)
        made = x.new_zeros(len(x), self.num_columns + 1)
        made[:, -1] = self.value[self.roots].sum()
        for before, after in pairwise(_places(x, *nodes, self.roots, self.deeper)):
            made.scatter_add_(1, self.feature[before].long(), self.value[after] - self.value[before])
        return made

    def gains(self) -> Tensor:
        """(C,) what the splits of each column explain: the variance of values between children, over training rows."""
        inner = torch.nonzero(self._is_inner()).squeeze(1)
        made = torch.zeros(self.num_columns, dtype=torch.float64)
        for side in (0, 1):
            child = self.branches[2 * inner + side]
            made.index_add_(0, self.feature[inner], self.rows[child] * (self.value[child] - self.value[inner]) ** 2)
        return made

    def _is_inner(self) -> Tensor:
        return self.branches[::2] != torch.arange(len(self.feature), device=self.branches.device)

    def _levels(self) -> tuple[list[int], list[int]]:
        """`deeper`, and the number of levels of each tree; of trees whose nodes are in order."""
        branches, tree = self.branches.numpy().reshape(-1, 2), np.arange(len(self.roots))
        at, deeper, levels = self.roots.numpy().astype(np.int64), list[int](), np.zeros(len(self.roots), np.int64)
        while len(at) and len(deeper) <= DEEPEST:
            inner = branches[at, 0] != at
            at, tree = branches[at[inner]].reshape(-1), np.repeat(tree[inner], 2)
            if len(at):
                levels[tree] = len(deeper) + 1
                deeper.append(int(tree.max()) + 1)
        return deeper, levels.tolist()

    def allocate_buffers(self, stored: Mapping[str, Tensor]) -> list[str]:
        held = {name: stored.get(name) for name in _TYPES}
        if any(each is None or each.dim() != 1 or each.dtype != _TYPES[name] for name, each in held.items()):
            return []
        for name, each in held.items():
            assert each is not None
            setattr(self, name, torch.empty(len(each), dtype=each.dtype, device=self.value.device))
        found = self._problems({name: each.numpy() for name, each in held.items() if each is not None})
        if not found:
            checked = Trees(self.num_columns)
            for name, each in held.items():
                setattr(checked, name, each)
            self.deeper, levels = checked._levels()
            if len(self.deeper) > DEEPEST:
                found = [f"a tree has more than {DEEPEST} levels"]
            elif any(first < second for first, second in pairwise(levels)):
                found = ["a deeper tree comes after one of fewer levels"]
        return found

    def _problems(self, held: Mapping[str, NDArray[Any]]) -> list[str]:
        """What is wrong with nodes and sets."""
        count, words = len(held["feature"]), len(held["sets"])
        sizes = {name: len(held[name]) for name in _TYPES if name not in ("sets", "roots", "branches")}
        if {*sizes.values(), len(held["branches"]) / 2} != {count}:
            return [f"{count} nodes have {sizes} entries and {len(held['branches'])} branches"]
        branches, own = held["branches"].reshape(-1, 2), np.arange(count)
        leaf = (branches == own[:, None]).all(axis=1)
        reached = np.sort(np.concatenate([branches[~leaf].reshape(-1), held["roots"]]))
        in_order = (branches[~leaf] > own[~leaf, None]).all()
        starts, sizes_of_sets = held["set_start"].astype(np.int64), held["set_words"].astype(np.int64)
        found = {
            "a node is no child of exactly one node before it": not (in_order and np.array_equal(reached, own)),
            f"a node reads a column outside 0 to {self.num_columns - 1}": ((held["feature"] < 0).any())
            or (held["feature"] >= self.num_columns).any(),
            f"a set of categories lies outside the {words} words": (starts < 0).any()
            or (sizes_of_sets < 0).any()
            or (starts + sizes_of_sets > words).any(),
        }
        return [what for what, is_so in found.items() if is_so]


class _Tree:
    """The nodes of one tree, a parent before its children."""

    def __init__(self, structure: Mapping[str, Any]) -> None:
        self.feature, self.threshold, self.branches = list[int](), list[float](), list[tuple[int, int]]()
        self.set_start, self.set_words, self.sets = list[int](), list[int](), list[int]()
        self.value, self.rows, self.depth = list[float](), list[float](), 0
        waiting = [(structure, -1, 0, 0)]  # a node, its parent, on which side, and its level
        while waiting:
            node, parent, side, level = waiting.pop()
            own = len(self.feature)
            self.depth = max(self.depth, level)
            if parent >= 0:
                pair = list(self.branches[parent])
                pair[side] = own
                self.branches[parent] = (pair[0], pair[1])
            self.branches.append((own, own))
            self._add(node)
            if "split_feature" in node:
                waiting.append((node["right_child"], own, 1, level + 1))
                waiting.append((node["left_child"], own, 0, level + 1))
        self._set_means()

    def _add(self, node: Mapping[str, Any]) -> None:
        inner, sets = "split_feature" in node, list[int]()
        if inner and node["decision_type"] == "==":
            categories = np.array([int(each) for each in node["threshold"].split("||")])
            bits = np.zeros(32 * (int(categories.max()) // 32 + 1), np.uint8)
            bits[categories] = 1
            sets = np.packbits(bits, bitorder="little").view("<u4").tolist()
        elif inner:
            assert node["decision_type"] == "<="
            assert node["missing_type"] == "None"
        self.set_start.append(len(self.sets))
        self.set_words.append(len(sets))
        self.sets += sets
        self.feature.append(node["split_feature"] if inner else 0)
        self.threshold.append(float(node["threshold"]) if inner and not sets else 0.0)
        self.value.append(0.0 if inner else float(node["leaf_value"]))
        self.rows.append(0.0 if inner else float(node.get("leaf_count", 1)))

    def _set_means(self) -> None:
        """The rows and the mean value of nodes from those of their children, which come later."""
        for own in reversed(range(len(self.feature))):
            first, second = self.branches[own]
            if first != own:
                rows = self.rows[first] + self.rows[second]
                self.rows[own] = rows
                total = self.rows[first] * self.value[first] + self.rows[second] * self.value[second]
                self.value[own] = total / rows if rows else 0.0
