"""The items that a fitted model knows of each user, and two forms of weights between items.

Shapes: U users; N items; P interactions; B rows or pairs; R requests; L the longest list of a user; k neighbours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recspec.models.interactions import Interactions

ENTRIES = 1 << 22
"""Entries of users' lists that are gathered at once: 16 MB."""

ACTED = 1 << 26
"""Flags of users x items held at once: 64 MB."""


class Stored(nn.Module, ABC):
    """Buffers of a fitted model whose size or content depends on the data that it was fitted to."""

    @abstractmethod
    def make_room(self, stored: Mapping[str, Tensor]) -> list[str]:
        """Give the buffers the sizes of the tensors of a file, by name; returns the problems of their contents.

        Tensors of another type or number of dimensions are left to the caller's comparison.
        """


class KnownItems(Stored):
    """Which items each user acted on: user u's are `items[offsets[u]:offsets[u + 1]]`, ascending."""

    offsets: Tensor
    items: Tensor

    def __init__(self, num_users: int, num_items: int) -> None:
        super().__init__()
        self.num_items = num_items
        self.longest = 0  # items of one user
        self.register_buffer("offsets", torch.zeros(num_users + 1, dtype=torch.int64))
        self.register_buffer("items", torch.zeros(0, dtype=torch.int32))

    def set(self, interactions: Interactions, device: torch.device | None = None) -> None:
        """Hold these interactions."""
        self.offsets = torch.from_numpy(interactions.offsets).to(device)
        self.items = torch.from_numpy(interactions.items).to(device)
        self.longest = int(self.offsets.diff().max()) if len(self.offsets) > 1 else 0

    def interactions(self) -> Interactions:
        """What is held, as numpy arrays."""
        return Interactions(self.offsets.cpu().numpy(), self.items.cpu().numpy(), self.num_items)

    def make_room(self, stored: Mapping[str, Tensor]) -> list[str]:
        offsets, items = stored.get("offsets"), stored.get("items")
        if offsets is None or items is None or items.dim() != 1 or items.dtype != torch.int32:
            return []
        self.items = torch.empty(len(items), dtype=torch.int32, device=self.items.device)
        if offsets.shape != self.offsets.shape or offsets.dtype != torch.int64:
            return []
        lengths = offsets.diff()
        if problems := problems_of_lists(offsets, items, self.num_items):
            return problems
        rises = items.diff() > 0
        first = offsets[1:-1]
        rises[first[(first > 0) & (first < len(items))] - 1] = True  # the next user's list may begin lower
        if not bool(rises.all()):
            return ["'items' does not rise within each user's list"]
        self.longest = int(lengths.max()) if len(lengths) else 0
        return []

    def lists(self, users: Tensor) -> tuple[Tensor, Tensor]:
        """The items (B, L) of users (B,), and which of them count: lists are filled up with any item."""
        starts, lengths = self.offsets[users], self.offsets[users + 1] - self.offsets[users]
        longest = self.longest
        if not torch.compiler.is_compiling():
            longest = int(lengths.max()) if len(lengths) else 0
        places = torch.arange(longest, device=users.device)
        held = places < lengths.unsqueeze(1)
        if not len(self.items):
            return torch.zeros_like(held, dtype=torch.int64), held
        return self.items[torch.where(held, starts.unsqueeze(1) + places, 0)].long(), held

    def bags(self, users: Tensor) -> tuple[Tensor, Tensor]:
        """The items of users (R,) one after the other, and the place where each user's begin: an embedding bag."""
        starts, lengths = self.offsets[users], self.offsets[users + 1] - self.offsets[users]
        first = lengths.cumsum(0) - lengths
        rows = torch.repeat_interleave(torch.arange(len(users), device=users.device), lengths)
        return self.items[torch.arange(len(rows), device=users.device) + (starts - first)[rows]].long(), first

    def acted(self, users: Tensor) -> Tensor:
        """(R, N) whether each user acted on each item."""
        items, held = self.lists(users)
        acted = torch.zeros(users.shape[0], self.num_items + 1, dtype=torch.bool, device=users.device)
        return acted.scatter(1, torch.where(held, items, self.num_items), True)[:, : self.num_items]

    def blocks(self, users: Tensor) -> list[Tensor]:
        """Places of users (B,) in blocks whose lists are gathered at once; all of them in a compiled program."""
        places = torch.arange(users.shape[0], device=users.device)
        if torch.compiler.is_compiling():
            return [places]
        return list(torch.split(places, max(1, ENTRIES // max(1, self.longest))))


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
            lists, held = known.lists(users[rows])
            parts.append((self.weight[lists, items[rows].unsqueeze(1)] * held).sum(1))
        return torch.cat(parts)

    def score_users(self, known: KnownItems, users: Tensor) -> Tensor:
        """(R, N) scores of every item."""
        if torch.compiler.is_compiling():
            return known.acted(users).float() @ self.weight
        items, first = known.bags(users)
        return F.embedding_bag(items, self.weight, first, mode="sum")


class Neighbours(Stored):
    """The k neighbours of each item: score(u, i) is the sum of weight[i, n] over those that the user acted on."""

    items: Tensor
    weight: Tensor

    def __init__(self, num_items: int, k: int) -> None:
        super().__init__()
        self.num_items, self.k = num_items, min(k, num_items - 1)
        self.register_buffer("items", torch.zeros(num_items, self.k, dtype=torch.int32))
        self.register_buffer("weight", torch.zeros(num_items, self.k))

    def make_room(self, stored: Mapping[str, Tensor]) -> list[str]:
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
        acted = known.acted(users).float()
        if torch.compiler.is_compiling():
            return (acted[:, self.items.long()] * self.weight).sum(2)
        if not self.k:
            return torch.zeros_like(acted)
        table = acted.T.contiguous()
        return F.embedding_bag(self.items.long(), table, per_sample_weights=self.weight, mode="sum").T


def problems_of_lists(offsets: Tensor, items: Tensor, num_items: int) -> list[str]:
    """What is wrong with the users' lists of a file."""
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(items) or bool((offsets.diff() < 0).any()):
        return [f"'offsets' does not rise from 0 to {len(items)}, the number of 'items'"]
    if len(items) and not 0 <= int(items.min()) <= int(items.max()) < num_items:
        return [f"'items' holds ids from {items.min()} to {items.max()}; expected 0 to {num_items - 1}"]
    return []
