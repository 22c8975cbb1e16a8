"""Boosted trees as tensors: evaluated by torch, without the library that grew them.

Shapes: B rows; C columns; T trees; M nodes of all trees; E edges to their children; W words of 32 categories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

EDGES_AT_ONCE = 1 << 19
"""Edges of rows whose contributions are computed at once: some arrays of 4 MB."""

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
    feature, threshold, branches, set_start, set_words, sets, value, roots, deeper = given
    rows = x.shape[0]
    places = roots.long().expand(rows, roots.shape[0])
    for count in deeper:  # one dimension: torch selects from it twice as fast as by an index of two
        at = places[:, :count].reshape(-1)
        values = x.gather(1, feature.index_select(0, at).long().view(rows, count)).view(-1)
        right = _goes_right(values, at, threshold, set_start, set_words, sets)
        below = branches.index_select(0, 2 * at + right).long().view(rows, count)
        places = torch.cat([below, places[:, count:]], dim=1)
    sums: Tensor = value[places].sum(1)
    return sums


def _goes_right(
    values: Tensor, at: Tensor, threshold: Tensor, set_start: Tensor, set_words: Tensor, sets: Tensor
) -> Tensor:
    """Whether the nodes `at` (N,) send their features' values (N,) to their second child."""
    right = values > threshold.index_select(0, at)
    if sets.shape[0]:
        words, category = set_words.index_select(0, at), values.int()
        held = (category >= 0) & (category >> 5 < words)
        word = sets.index_select(0, torch.where(held, set_start.index_select(0, at) + (category >> 5), 0))
        right = torch.where(words > 0, ~(held & (word >> (category & 31) & 1).bool()), right)
    return right


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
        self._edges: _Edges | None = None
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
        self.deeper, self._edges = self._levels()[0], None

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

    def base(self) -> float:
        """The mean sum of the training rows."""
        return float(self.value[self.roots].sum())

    def contributions(self, x: Tensor) -> Tensor:
        """Contributions (B, C) of columns to the sums of rows (B, C): with `base`, they add up to the sums.

        They are Shapley values of the game in which a column that does not play sends a row to both children, by their
        training rows (TreeSHAP: Lundberg, Erion and Lee, "Consistent individualized feature attribution for tree
        ensembles", 2018). A leaf of value v, with d columns on the way to it, gives column i

            v (o_i - z_i) integral from 0 to 1 of prod over the other columns j of (t o_j + (1 - t) z_j) dt

        where o_j is 1 if the row passes all of j's nodes there, else 0, and z_j is the share of the training rows that
        pass them. The integral of t^s (1 - t)^(d-1-s) is Shapley's weight s! (d-1-s)! / d!, and Gauss's quadrature is
        exact for such polynomials. Sums over leaves go through the trees as in "Linear TreeSHAP" (Yu et al., 2022).
        """
        if self._edges is None:
            self._edges = _Edges.of(self)
        step = max(1, EDGES_AT_ONCE // max(1, len(self._edges.child)))
        return torch.cat([self._contributions(rows, self._edges) for rows in torch.split(x, step)])

    def _contributions(self, x: Tensor, edges: _Edges) -> Tensor:
        """Of a block of rows. Tensors (E + 1, B) end with the absent edge above the first ones, which all rows pass."""
        parent, above, same, share = (
            each.to(x.device) for each in (edges.parent, edges.above, edges.same, edges.share)
        )
        num, rows = len(parent), len(x)
        feature = self.feature[parent].long()
        nodes = (self.threshold, self.set_start, self.set_words, self.sets)
        at = parent.repeat_interleave(rows)
        right = _goes_right(x.T.index_select(0, feature).reshape(-1), at, *nodes).view(num, rows)
        passed = x.new_ones(num + 1, rows)
        passed[:-1] = right == edges.is_right.to(x.device).unsqueeze(1)
        for here in edges.levels:
            passed[here] *= passed[same[here]]
        leaf_values = torch.where(self.is_inner(), 0.0, self.value)[edges.child.to(x.device)].unsqueeze(1)
        of_edges = x.new_zeros(num, rows)
        for t, weight in edges.points:
            factor = t * passed + (1 - t) * share.unsqueeze(1)
            products = x.new_ones(num + 1, rows)
            products[:-1] = factor[:-1] / factor[same]
            for here in edges.levels:
                products[here] *= products[above[here]]
            below = leaf_values * products[:-1]  # sums over the leaves below an edge
            for here in reversed(edges.levels[1:]):
                below[above[here][::2]] = below[here][::2] + below[here][1::2]
            change = (passed - share.unsqueeze(1)) / factor
            of_edges += weight * below * (change[:-1] - change[same])
        return x.new_zeros(self.num_columns, rows).index_add_(0, feature, of_edges).T

    def gains(self) -> Tensor:
        """(C,) what the splits of each column explain: the variance of values between children, over training rows."""
        inner = torch.nonzero(self.is_inner()).squeeze(1)
        made = torch.zeros(self.num_columns, dtype=torch.float64)
        for side in (0, 1):
            child = self.branches[2 * inner + side]
            made.index_add_(0, self.feature[inner], self.rows[child] * (self.value[child] - self.value[inner]) ** 2)
        return made

    def is_inner(self) -> Tensor:
        """(M,) whether a node splits."""
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
            self._edges = None
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
            "a node has no training rows": not (np.isfinite(held["rows"]) & (held["rows"] > 0)).all(),
            f"a set of categories lies outside the {words} words": (starts < 0).any()
            or (sizes_of_sets < 0).any()
            or (starts + sizes_of_sets > words).any(),
        }
        return [what for what, is_so in found.items() if is_so]


@dataclass(frozen=True)
class _Edges:
    """The edges of trees (E,), those near the roots first; index E is the absent edge above the first ones."""

    parent: Tensor
    child: Tensor
    is_right: Tensor
    above: Tensor
    """The edge that leads to the parent."""
    same: Tensor
    """The nearest edge above whose parent reads the same column."""
    share: Tensor
    """(E + 1,) the share of the training rows that take this edge, and those above that read the same column, each
    counted among the rows at its parent."""
    levels: tuple[slice, ...]
    points: tuple[tuple[float, float], ...]
    """Places and weights of the quadrature from 0 to 1."""

    @classmethod
    def of(cls, trees: Trees) -> _Edges:
        branches, feature, rows = (
            each.cpu().numpy() for each in (trees.branches.view(-1, 2), trees.feature, trees.rows)
        )
        at, edge_to = trees.roots.cpu().numpy().astype(np.int64), np.full(len(feature), -1)
        parents, children, sizes = [at[:0]], [at[:0]], [0]
        while len(at):
            inner = at[branches[at, 0] != at]
            parents.append(np.repeat(inner, 2))
            at = branches[inner].reshape(-1).astype(np.int64)
            edge_to[at] = sum(sizes) + np.arange(len(at))
            children.append(at)
            sizes.append(len(at))
        parent, child = np.concatenate(parents), np.concatenate(children)
        none = len(parent)
        above = np.append(np.where(edge_to[parent] < 0, none, edge_to[parent]), none)
        read = np.append(feature[parent], -1)
        same = above.copy()
        while (other := (same < none) & (read[same] != read)).any():
            same[other] = above[same[other]]
        share, num_columns = np.append(rows[child] / rows[parent], 1.0), np.zeros(none + 1, np.int64)
        levels = tuple(slice(int(a), int(b)) for a, b in pairwise(np.cumsum(sizes)) if a < b)
        for here in levels:
            share[here] *= share[same[here]]
            num_columns[here] = num_columns[above[here]] + (same[here] == none)
        places, weights = np.polynomial.legendre.leggauss(max(1, int(num_columns.max() + 1) // 2))
        points = tuple(zip(((places + 1) / 2).tolist(), (weights / 2).tolist(), strict=True))
        made = torch.from_numpy
        nodes = made(parent), made(child), made(branches[parent, 1] == child)
        return cls(*nodes, made(above[:-1]), made(same[:-1]), made(share), levels, points)


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
