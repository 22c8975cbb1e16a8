"""Who this process is among the processes of a run, and what they tell each other.

A `Ranks` is a value that is handed down; nothing reads the environment but `join`, and with one process every exchange
is the identity.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from recspec.errors import SettingsError

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for another before it gives up with an error."""


@dataclass(frozen=True)
class Ranks:
    """Rank, world size and device of this process."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def share(self, n: int) -> slice:
        """This rank's contiguous share of n rows; the first ranks take one more when n does not divide."""
        small, extra = divmod(n, self.world_size)
        start = self.rank * small + min(self.rank, extra)
        return slice(start, start + small + (self.rank < extra))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of every rank's tensor, on every rank."""
        if self.world_size == 1:
            return tensor
        total = tensor.to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(tensor.device)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.sum(torch.tensor(int(flag))).item())

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rows of every rank's tensor (n_r, ...) -> (sum of n_r, ...), in the order of the ranks, on every rank."""
        if self.world_size == 1:
            return tensor
        local = tensor.to(self.device)
        sizes = [int(size) for size in self._gather_sizes(local.shape[0])]
        padded = local.new_zeros((max(sizes), *local.shape[1:]))
        padded[: local.shape[0]] = local
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).to(tensor.device)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            dist.barrier()

    def _gather_sizes(self, size: int) -> list[int]:
        mine = torch.tensor([size], dtype=torch.int64, device=self.device)
        sizes = [torch.zeros_like(mine) for _ in range(self.world_size)]
        dist.all_gather(sizes, mine)
        return [int(size.item()) for size in sizes]


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` (a GPU where there is one), `cpu`, `cuda` or `cuda:N`.

    Raises:
        SettingsError: if the device is not here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not re.fullmatch(r"cuda(:[0-9]+)?", name):
        raise SettingsError(f"device is '{name}'; expected auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise SettingsError(f"device is '{name}', but torch {torch.__version__} sees no GPU here; use cpu or auto")
    device = torch.device(name if ":" in name else f"cuda:{local_rank}")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise SettingsError(
            f"device is '{device}', but torch sees {torch.cuda.device_count()} GPUs, the first is cuda:0"
        )
    return device


def place() -> tuple[int, int]:
    """This process's number among those that torchrun started on this machine, and how many there are."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def join(device: str = "auto") -> Iterator[Ranks]:
    """The ranks that torchrun started (one process when it didn't), left again at the end.

    gloo on CPU, NCCL on GPU. A rank that waits longer than `TIMEOUT` for another raises instead of hanging.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, _ = place()
    chosen = pick_device(device, local_rank)
    if world_size == 1:
        yield Ranks(device=chosen)
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield Ranks(dist.get_rank(), world_size, chosen)
    finally:
        dist.destroy_process_group()
