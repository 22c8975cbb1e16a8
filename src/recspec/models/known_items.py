"""The items and events that a model knows of each user, and three forms of weights between items.

Shapes: U users; N items; P interactions, or events of the requests; B rows or pairs; R requests; L the longest list of
a user or request; k neighbours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from recspec.models.interactions import Interactions, UserEvents

if TYPE_CHECKING:
    from scipy.sparse import csr_array


ENTRIES = 1 << 22
"""Entries of users' lists that are gathered at once: 16 MB."""

ACTED = 1 << 24
"""Weights of users x items held at once: 64 MB."""


PRODUCTS = 1 << 21
"""Products of entries summed at once for rows of X'X: about 25 MB."""


class Stored(nn.Module, ABC):
    """Buffers of a fitted model whose size or content depends on the data that it was fitted to."""

    @abstractmethod
    def allocate_buffers(self, stored: Mapping[str, Tensor]) -> list[str]:
        """Give the buffers the sizes of the tensors of a file, by name; returns the problems of their contents.

        Tensors of another type or number of dimensions are left to the caller's comparison.
        """


class SeenIds(nn.Module, ABC):
    """A part of a model that must know which ids of its features `ids` occur in train."""

    ids: tuple[str, ...]

    @abstractmethod
    def set_seen_ids(self, present: Mapping[str, Tensor]) -> None:
        """Learn which ids occur: a flag for each id (ids,), by feature."""


LEAST = 1e-4
"""Items whose weight is below this share of their user's largest one are not held: they would decide nothing."""


class StoredLists(Stored):
    """Lists of items one after the other: list r is `items[offsets[r]:offsets[r + 1]]`."""

    offsets: Tensor
    items: Tensor

    def __init__(self, num_lists: int, num_items: int, **beside: torch.dtype) -> None:
        """`beside` gives the type of further buffers, which hold a number for each item of the lists."""
        super().__init__()
        self.num_items, self.longest, self._types = num_items, 0, {"items": torch.int32, **beside}
        self.register_buffer("offsets", torch.zeros(num_lists + 1, dtype=torch.int64))
        for name, dtype in self._types.items():
            self.register_buffer(name, torch.zeros(0, dtype=dtype))

    def set_lists(self, offsets: NDArray[np.int64], device: torch.device | None, **numbers: NDArray[Any]) -> None:
        """Hold these lists: their offsets, and the numbers of each buffer."""
        self.offsets = torch.from_numpy(offsets).to(device)
        for name, values in numbers.items():
            setattr(self, name, torch.from_numpy(values).to(device))
        self.longest = int(self.offsets.diff().max()) if len(offsets) > 1 else 0

    def allocate_buffers(self, stored: Mapping[str, Tensor]) -> list[str]:
        offsets, items = stored.get("offsets"), stored.get("items")
        if offsets is None or items is None or items.dim() != 1 or items.dtype != torch.int32:
            return []
        for name, dtype in self._types.items():
            setattr(self, name, torch.empty(len(items), dtype=dtype, device=self.items.device))
        if offsets.shape != self.offsets.shape or offsets.dtype != torch.int64:
            return []
        problems = problems_of_lists(offsets, items, self.num_items) or self.disorder(offsets, items)
        if not problems:
            self.longest = int(offsets.diff().max()) if len(offsets) > 1 else 0
        return problems

    def disorder(self, offsets: Tensor, items: Tensor) -> list[str]:  # noqa: ARG002
        """What is wrong with the order within the lists; by default any order is right."""
        return []


class KnownItems(StoredLists):
    """Which items each user acted on: user u's are `items[offsets[u]:offsets[u + 1]]`, ascending.

    If it is `weighted`, each of them has a weight, that of a disliked one below 0; otherwise all count 1.
    """

    weights: Tensor

    def __init__(self, num_users: int, num_items: int, *, weighted: bool = False) -> None:
        super().__init__(num_users, num_items, **({"weights": torch.float32} if weighted else {}))
        self.weighted = weighted

    def set(self, interactions: Interactions, device: torch.device | None = None) -> None:
        """Hold these interactions; weights close to 0 are left out."""
        if self.weighted:
            interactions = _of_weight(interactions)
        weights = {"weights": interactions.weights} if self.weighted and interactions.weights is not None else {}
        self.set_lists(interactions.offsets, device, items=interactions.items, **weights)

    def interactions(self) -> Interactions:
        """What is held, as numpy arrays."""
        weights = self.weights.cpu().numpy() if self.weighted else None
        return Interactions(self.offsets.cpu().numpy(), self.items.cpu().numpy(), self.num_items, weights=weights)

    def disorder(self, offsets: Tensor, items: Tensor) -> list[str]:
        rises, first = items.diff() > 0, offsets[1:-1]
        rises[first[(first > 0) & (first < len(items))] - 1] = True  # the next user's list may begin lower
        return [] if bool(rises.all()) else ["'items' does not rise within each user's list"]

    def lists(self, users: Tensor) -> tuple[Tensor, Tensor]:
        """The items (B, L) of users (B,), and their weights, of which 0 stands for no item."""
        starts, lengths = self.offsets[users], self.offsets[users + 1] - self.offsets[users]
        longest = self.longest
        if not torch.compiler.is_compiling():
            longest = int(lengths.max()) if len(lengths) else 0
        places = torch.arange(longest, device=users.device)
        held = places < lengths.unsqueeze(1)
        if not len(self.items):
            return torch.zeros_like(held, dtype=torch.int64), held.float()
        places = torch.where(held, starts.unsqueeze(1) + places, 0)
        return self.items[places].long(), held * self.weights[places] if self.weighted else held.float()

    def bags(self, users: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The items of users (R,) one after the other, where each user's begin, and weights: an embedding bag."""
        starts, lengths = self.offsets[users], self.offsets[users + 1] - self.offsets[users]
        first = lengths.cumsum(0) - lengths
        rows = torch.repeat_interleave(torch.arange(len(users), device=users.device), lengths)
        places = torch.arange(len(rows), device=users.device) + (starts - first)[rows]
        return self.items[places].long(), first, self.weights[places] if self.weighted else None

    def acted(self, users: Tensor) -> Tensor:
        """(R, N) the weight of each item for each user; 0 for items that the user did not act on."""
        items, weights = self.lists(users)
        acted = torch.zeros(users.shape[0], self.num_items + 1, device=users.device)
        items = torch.where(weights != 0, items, self.num_items)
        return acted.scatter(1, items, weights)[:, : self.num_items]

    def blocks(self, users: Tensor, of_item: int = 1) -> list[Tensor]:
        """Places of users (B,) in blocks whose lists, with `of_item` entries an item, are gathered at once.

        In a compiled program, there is one block.
        """
        places = torch.arange(users.shape[0], device=users.device)
        if torch.compiler.is_compiling():
            return [places]
        return list(torch.split(places, max(1, ENTRIES // max(1, self.longest * of_item))))


class ItemWeights(nn.Module):
    """A weight from every item to every item: score(u, i) is the sum of weight[j, i] over the user's items j."""

    weight: Tensor

    def __init__(self, num_items: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(num_items, num_items))

    def score_pairs(self, known: KnownItems, users: Tensor, items: Tensor) -> Tensor:
        """(B,) scores of pairs."""
        parts = []
        for rows in known.blocks(users):
            lists, weights = known.lists(users[rows])
            parts.append((self.weight[lists, items[rows].unsqueeze(1)] * weights).sum(1))
        return torch.cat(parts)

    def score_users(self, known: KnownItems, users: Tensor) -> Tensor:
        """(R, N) scores of every item."""
        if torch.compiler.is_compiling():
            return known.acted(users) @ self.weight
        items, first, weights = known.bags(users)
        return F.embedding_bag(items, self.weight, first, mode="sum", per_sample_weights=weights)


class Neighbours(Stored):
    """The k neighbours of each item: score(u, i) is the sum of weight[i, n] times the user's weight of n."""

    items: Tensor
    weight: Tensor

    def __init__(self, num_items: int, k: int) -> None:
        super().__init__()
        self.num_items, self.k = num_items, min(k, num_items - 1)
        self.register_buffer("items", torch.zeros(num_items, self.k, dtype=torch.int32))
        self.register_buffer("weight", torch.zeros(num_items, self.k))

    def allocate_buffers(self, stored: Mapping[str, Tensor]) -> list[str]:
        items = stored.get("items")
        if items is None or items.dtype != torch.int32 or not items.numel():
            return []
        if not 0 <= int(items.min()) <= int(items.max()) < self.num_items:
            return [f"'items' holds ids from {items.min()} to {items.max()}; expected 0 to {self.num_items - 1}"]
        return []

    def score_pairs(self, known: KnownItems, users: Tensor, items: Tensor) -> Tensor:
        """(B,) scores of pairs."""
        if torch.compiler.is_compiling():
            return self._of_places(known.acted(users), torch.arange(users.shape[0], device=users.device), items)
        parts = []
        step = max(1, min(ACTED // self.num_items, ENTRIES // max(1, self.k, known.longest)))
        for ours, theirs in zip(torch.split(users, step), torch.split(items, step), strict=True):
            distinct, places = torch.unique(ours, return_inverse=True)
            parts.append(self._of_places(known.acted(distinct), places, theirs))
        return torch.cat(parts)

    def _of_places(self, acted: Tensor, places: Tensor, items: Tensor) -> Tensor:
        return (acted[places.unsqueeze(1), self.items[items].long()] * self.weight[items]).sum(1)

    def score_users(self, known: KnownItems, users: Tensor) -> Tensor:
        """(R, N) scores of every item."""
        acted = known.acted(users)
        if torch.compiler.is_compiling():
            return (acted[:, self.items.long()] * self.weight).sum(2)
        if not self.k:
            return torch.zeros_like(acted)
        table = acted.T.contiguous()
        return F.embedding_bag(self.items.long(), table, per_sample_weights=self.weight, mode="sum").T


class Successors(StoredLists):
    """Weights from each item to at most k others: score(u, i) sums weight[j, i] times the user's weight of j.

    Item j's are `items[offsets[j]:offsets[j + 1]]`, ascending. Scores of all items cost the entries of the user's items
    alone, and memory is that of the entries.
    """

    weight: Tensor

    def __init__(self, num_items: int, k: int) -> None:
        super().__init__(num_items, num_items, weight=torch.float32)
        self.most = num_items * min(k, num_items)
        self.most_bytes = 8 * self.most

    def set(self, blocks: Iterable[csr_array]) -> None:
        """Hold the entries (N, N) of blocks of rows with sorted indices.

        Memory is that of the entries: pages that none fills take none, and `scipy.sparse.vstack` would hold all twice.
        """
        items, weight = np.empty(self.most, np.int32), np.empty(self.most, np.float32)
        held, lengths = 0, [np.zeros(1, np.int64)]
        for block in blocks:
            ours = slice(held, held + block.nnz)
            items[ours], weight[ours], held = block.indices, block.data, ours.stop
            lengths.append(np.diff(block.indptr))
        self.set_lists(np.cumsum(np.concatenate(lengths)), None, items=items[:held], weight=weight[:held])

    def score_pairs(self, known: KnownItems, users: Tensor, items: Tensor) -> Tensor:
        """(B,) scores of pairs."""
        scores = torch.zeros(users.shape[0], device=users.device)
        if not len(self.items):
            return scores
        if torch.compiler.is_compiling():
            lists, weights = known.lists(users)
            return (self._between(lists, items.unsqueeze(1)) * weights).sum(1)
        for rows in known.blocks(users):
            theirs, first, of_items = known.bags(users[rows])
            pairs = torch.repeat_interleave(rows, torch.diff(first, append=first.new_tensor([len(theirs)])))
            values = self._between(theirs, items[pairs])
            scores.index_add_(0, pairs, values if of_items is None else values * of_items)
        return scores

    def _between(self, sources: Tensor, items: Tensor) -> Tensor:
        """The weight from each source to its item, 0 if it is not held: a binary search in the source's list."""
        low, end = self.offsets[sources], self.offsets[sources + 1]
        high = end
        for _ in range(self.longest.bit_length()):
            middle = (low + high) // 2
            below = (low < high) & (self.items[middle.clamp(max=len(self.items) - 1)] < items)
            low, high = torch.where(below, middle + 1, low), torch.where(below, high, torch.maximum(low, middle))
        at = low.clamp(max=len(self.items) - 1)
        return ((low < end) & (self.items[at] == items)) * self.weight[at]

    def score_users(self, known: KnownItems, users: Tensor) -> Tensor:
        """(R, N) scores of every item."""
        if torch.compiler.is_compiling():
            scores = torch.zeros(users.shape[0], self.num_items + 1, device=users.device)
            if not len(self.items):
                return scores[:, : self.num_items]
            lists, weights = known.lists(users)
            theirs, values = self._entries(lists)
            values = values * weights.unsqueeze(2)
            return scores.scatter_add(1, theirs.flatten(1), values.flatten(1))[:, : self.num_items]
        return (self.list_by_list if users.device.type == "cpu" else self.by_entries)(known, users)

    def by_entries(self, known: KnownItems, users: Tensor) -> Tensor:
        """`score_users` in a few sums over entries."""
        scores = torch.zeros(len(users) * self.num_items, device=users.device)
        places = torch.arange(len(users), device=users.device)
        for rows in torch.split(places, max(1, ENTRIES // max(1, known.longest * self.longest))):
            items, first, of_items = known.bags(users[rows])
            lengths = torch.diff(first, append=first.new_tensor([len(items)]))
            starts = torch.repeat_interleave(rows * self.num_items, lengths)
            counts = self.offsets[items + 1] - self.offsets[items]
            before = counts.cumsum(0) - counts
            shift = torch.repeat_interleave(self.offsets[items] - before, counts)
            entries = torch.arange(len(shift), device=users.device) + shift
            values = self.weight[entries]
            if of_items is not None:
                values = values * torch.repeat_interleave(of_items, counts)
            scores.index_add_(0, torch.repeat_interleave(starts, counts) + self.items[entries], values)
        return scores.view(len(users), self.num_items)

    def list_by_list(self, known: KnownItems, users: Tensor) -> Tensor:
        """`score_users` by numpy: 2,000 users of 39,000 entries take 1.5 s, and in one sum over entries 2.7 s."""
        scores = np.zeros((len(users), self.num_items), np.float32)
        items, weight = self.items.numpy(), self.weight.numpy()
        theirs, first, of_items = known.bags(users)
        starts, ends = (self.offsets[places].tolist() for places in (theirs, theirs + 1))
        lengths = torch.diff(first, append=first.new_tensor([len(theirs)]))
        owners = torch.repeat_interleave(lengths).tolist()
        factors = [1.0] * len(owners) if of_items is None else of_items.tolist()
        for owner, start, end, factor in zip(owners, starts, ends, factors, strict=True):
            scores[owner][items[start:end]] += np.float32(factor) * weight[start:end]
        return torch.from_numpy(scores)

    def _entries(self, items: Tensor) -> tuple[Tensor, Tensor]:
        """Items and weights (B, L, K) that the items (B, L) lead to; item N with weight 0 fills lists up."""
        starts = self.offsets[items]
        places = torch.arange(self.longest, device=items.device)
        held = places < (self.offsets[items + 1] - starts).unsqueeze(2)
        places = torch.where(held, starts.unsqueeze(2) + places, 0)
        return torch.where(held, self.items[places].long(), self.num_items), held * self.weight[places]


def blocks_of_gram(matrix: csr_array) -> Iterator[tuple[int, csr_array]]:
    """Rows of X'X (N, N) from X (U, N), in sparse blocks of bounded work: each block's first row, and the block."""
    by_item = matrix.T.tocsr()
    lengths = np.diff(matrix.indptr)
    work = np.cumsum(np.add.reduceat(np.append(lengths[by_item.indices], 0), by_item.indptr[:-1]))
    first = 0
    while first < by_item.shape[0]:
        done = work[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(work, done + PRODUCTS, side="right")))
        yield first, by_item[first:last] @ matrix
        first = last


def largest_entries(matrix: csr_array, k: int) -> csr_array:
    """The k largest entries of each row of a CSR matrix; of equal ones, those of the first columns."""
    lengths = np.diff(matrix.indptr)
    matrix.sort_indices()
    if not len(lengths) or lengths.max() <= k:
        return matrix
    kept = np.ones(len(matrix.data), dtype=bool)
    for row in np.flatnonzero(lengths > k):
        values = matrix.data[matrix.indptr[row] : matrix.indptr[row + 1]]
        least = np.partition(values, -k)[-k]
        above, equal = values > least, np.flatnonzero(values == least)
        above[equal[: k - np.count_nonzero(above)]] = True
        kept[matrix.indptr[row] : matrix.indptr[row + 1]] = above
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.minimum(lengths, k))])
    return type(matrix)((matrix.data[kept], matrix.indices[kept], offsets), shape=matrix.shape)


def _of_weight(interactions: Interactions) -> Interactions:
    """The interactions, with weights, whose weight is not close to 0 beside the user's largest one."""
    if interactions.weights is None:
        return replace(interactions, weights=np.ones(interactions.num_pairs, np.float32))
    weights, offsets = interactions.weights, interactions.offsets
    lengths = np.diff(offsets)
    largest = np.zeros(len(lengths), np.float32)
    if len(weights):
        largest[lengths > 0] = np.maximum.reduceat(np.abs(weights), offsets[:-1][lengths > 0])
    kept = np.abs(weights) >= LEAST * np.repeat(largest, lengths)
    kept &= weights != 0
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])[offsets]
    return Interactions(offsets, interactions.items[kept], interactions.num_items, weights=weights[kept])


def problems_of_lists(offsets: Tensor, items: Tensor, num_items: int) -> list[str]:
    """What is wrong with the users' lists of a file."""
    falls = offsets[1:] < offsets[:-1]  # compared, as differences of a damaged file's numbers may overflow
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(items) or bool(falls.any()):
        return [f"'offsets' does not rise from 0 to {len(items)}, the number of 'items'"]
    if len(items) and not 0 <= int(items.min()) <= int(items.max()) < num_items:
        return [f"'items' holds ids from {items.min()} to {items.max()}; expected 0 to {num_items - 1}"]
    return []


class KnownEvents(StoredLists):
    """The events of each user: user u's are `items[offsets[u]:offsets[u + 1]]`, oldest first; an item may repeat."""

    times: Tensor

    def __init__(self, num_users: int, num_items: int, *, with_times: bool = False) -> None:
        super().__init__(num_users, num_items, **({"times": torch.float64} if with_times else {}))
        self.with_times = with_times

    def set(self, events: UserEvents, device: torch.device | None = None) -> None:
        """Hold these events; without times, all of them have the time 0."""
        times = np.zeros(len(events.items)) if events.times is None else events.times
        self.set_lists(events.offsets, device, items=events.items, **({"times": times} if self.with_times else {}))

    def lengths(self, users: Tensor, most: int, *, before: int = 0) -> Tensor:
        """(R,) number of the latest events of users (R,), at most `most`; `before` later ones are left out."""
        return (self.offsets[users + 1] - self.offsets[users] - before).clamp(min=0, max=most)

    def packed(self, users: Tensor, most: int, *, before: int = 0) -> tuple[Tensor, Tensor, list[int]]:
        """Places (P,) in `items` of these latest events of each user, oldest first, and their `lengths`.

        The lengths come as a tensor (R,) and as numbers, for which a step waits once.
        """
        lengths = self.lengths(users, most, before=before)
        sizes: list[int] = lengths.tolist()
        first, total = lengths.cumsum(0) - lengths, sum(sizes)
        starts = self.offsets[users + 1] - before - lengths
        shift = torch.repeat_interleave(starts - first, lengths, output_size=total)
        return torch.arange(total, device=users.device) + shift, lengths, sizes

    def padded(self, users: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Places (R, L) in `items` of the latest events, the last of them in the last column, and which of them count.

        L is at most `most`; places that do not count are filled up with 0. In a compiled program, L depends on the
        longest list of all users.
        """
        lengths = self.lengths(users, most)
        longest = min(most, self.longest)
        if not torch.compiler.is_compiling():
            longest = int(lengths.max()) if len(lengths) else 0
        back = torch.arange(longest, 0, -1, device=users.device)
        held = back <= lengths.unsqueeze(1)
        return torch.where(held, self.offsets[users + 1].unsqueeze(1) - back, 0), held
