"""The events that a model knows of each user, in order of time.

Shapes: U users; T events; R requests; P events of the requests; L the longest list of a request.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from recspec.models.interactions import UserEvents
from recspec.models.known_items import Stored, problems_of_lists


class KnownEvents(Stored):
    """The events of each user: user u's are `items[offsets[u]:offsets[u + 1]]`, oldest first; an item may repeat."""

    offsets: Tensor
    items: Tensor
    times: Tensor

    def __init__(self, num_users: int, num_items: int, *, with_times: bool = False) -> None:
        super().__init__()
        self.num_items, self.with_times = num_items, with_times
        self.longest = 0  # events of one user
        self.register_buffer("offsets", torch.zeros(num_users + 1, dtype=torch.int64))
        self.register_buffer("items", torch.zeros(0, dtype=torch.int32))
        if with_times:
            self.register_buffer("times", torch.zeros(0, dtype=torch.float64))

    def set(self, events: UserEvents, device: torch.device | None = None) -> None:
        """Hold these events; without times, all of them have the time 0."""
        self.offsets = torch.from_numpy(events.offsets).to(device)
        self.items = torch.from_numpy(events.items).to(device)
        if self.with_times:
            times = np.zeros(len(events.items)) if events.times is None else events.times
            self.times = torch.from_numpy(times).to(device)
        self.longest = int(events.lengths.max(initial=0))

    def make_room(self, stored: Mapping[str, Tensor]) -> list[str]:
        offsets, items = stored.get("offsets"), stored.get("items")
        if offsets is None or items is None or items.dim() != 1 or items.dtype != torch.int32:
            return []
        self.items = torch.empty(len(items), dtype=torch.int32, device=self.items.device)
        if self.with_times:
            self.times = torch.empty(len(items), dtype=torch.float64, device=self.times.device)
        if offsets.shape != self.offsets.shape or offsets.dtype != torch.int64:
            return []
        problems = problems_of_lists(offsets, items, self.num_items)
        if not problems:
            self.longest = int(offsets.diff().max()) if len(offsets) > 1 else 0
        return problems

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
