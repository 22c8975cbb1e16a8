"""One process's rank in a run, and its exchanges with the other ranks.

A `Ranks` is a value that callers pass on; nothing reads the environment but `join`. With one process every exchange
is the identity.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from recspec.errors import RecspecError, TrainingError


class RankLost(TrainingError):
    """An exchange broke off, because another rank died, failed or did not answer in time."""


@dataclass(frozen=True)
class Ranks:
    """Rank, world size and device of this process."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    local_world_size: int = field(default=1, kw_only=True)
    """Ranks on this machine."""
    restarted: bool = field(default=False, kw_only=True)
    """Whether torchrun restarted these processes after one of them died (`--max-restarts`)."""
    before: Callable[[], None] | None = field(default=None, compare=False, repr=False, kw_only=True)
    """Work that all ranks finish together before any sum, gather or barrier."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def share(self, n: int) -> slice:
        """This rank's contiguous share of n rows; if n does not divide evenly, the first ranks take one more."""
        small, extra = divmod(n, self.world_size)
        start = self.rank * small + min(self.rank, extra)
        return slice(start, start + small + (self.rank < extra))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of every rank's tensor, on every rank."""
        if self.world_size == 1:
            return tensor
        self._finish_first()
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
        self._finish_first()
        local = tensor.to(self.device)
        mine = torch.tensor([local.shape[0]], dtype=torch.int64, device=self.device)
        counts = [torch.zeros_like(mine) for _ in range(self.world_size)]
        dist.all_gather(counts, mine)
        sizes = [int(count) for count in counts]
        padded = local.new_zeros((max(sizes), *local.shape[1:]))
        padded[: local.shape[0]] = local
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).to(tensor.device)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            self._finish_first()
            dist.barrier()

    def swap(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Send the first `send[0]` rows to rank 0, the next `send[1]` to rank 1, and so on.

        Returns `receive[0]` rows of rank 0, then `receive[1]` of rank 1, and so on.
        """
        if self.world_size == 1:
            return rows
        came = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(came, rows.contiguous(), list(receive), list(send))
        return came

    def to_first(self, rows: torch.Tensor, owner: int) -> torch.Tensor:
        """The owner's rows on the first rank. Only these two ranks call it, with tensors of one shape and dtype."""
        if owner == 0:
            return rows
        copied = rows.to(self.device).contiguous()
        if self.is_first:
            dist.recv(copied, owner)
            return copied.to(rows.device)
        dist.send(copied, 0)
        return rows

    @contextmanager
    def guarded(self, advice: Callable[[], str]) -> Iterator[None]:
        """Raise a broken exchange with another rank as `RankLost`, with `advice` on how to continue."""
        try:
            yield
        except RecspecError:
            raise
        except Exception as error:
            if self.world_size == 1 or not is_broken_exchange(error):
                raise
            what = f"rank {self.rank}: an exchange with the other ranks broke off ({first_sentence(error)})"
            raise RankLost(f"{what}; torchrun's report names the rank that failed first; {advice()}") from None

    def _finish_first(self) -> None:
        if self.before is not None:
            self.before()


def is_broken_exchange(error: Exception) -> bool:
    """Whether torch raises this error for an exchange between ranks that broke off."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and re.search("gloo|nccl|connection", str(error), re.IGNORECASE) is not None
    )


def first_sentence(error: Exception) -> str:
    """The first sentence of an error's message; torch puts general advice and a C++ trace after it."""
    return re.split(r"\.?\s*\n|\.\s", str(error).strip(), maxsplit=1)[0]
