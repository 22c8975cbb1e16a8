"""One process's rank in a run: its device, its meeting and exchanges with the other ranks, and their end.

A `Ranks` is a value that callers pass on; nothing reads the environment but `join`. With one process every exchange
is the identity.

If a process dies, torchrun ends the others and reports its rank, process id and exit status. An exchange with a dead
rank fails at once on gloo; on NCCL torchrun ends the waiting ranks. An exchange with a rank that is only slow fails
after `TIMEOUT`.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from recspec.base.errors import RecspecError, SettingsError, TrainingError


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


TIMEOUT = timedelta(minutes=10)
"""Longest wait for another rank before an error."""

POLLING = 0.05
"""Seconds between the first rank's checks of which ranks have come."""


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The torch device for `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`.

    Raises:
        SettingsError: if this machine lacks the device.
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
        count = torch.cuda.device_count()
        raise SettingsError(f"device is '{device}', but torch sees {count} GPUs, the first is cuda:0")
    return device


def local_ranks() -> tuple[int, int]:
    """This process's rank on this machine, and the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def join(device: str = "auto") -> Iterator[Ranks]:
    """Join the ranks that torchrun started, and leave them at the end; without torchrun, one process alone.

    The backend is gloo on CPU and NCCL on GPU. `told` of a `RecspecError` says whether another process of this machine
    reports it.

    Raises:
        TrainingError: if the ranks can't meet.
        RankLost: if another rank dies or fails during an exchange, or does not answer within `TIMEOUT`.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = pick_device(device, local_ranks()[0])
    if world_size == 1:
        yield Ranks(device=chosen)
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    rank = int(os.environ["RANK"])
    try:
        store = _store_of_this_start(rank, world_size)
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=world_size)
        ranks = Ranks(rank, world_size, chosen, local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
        ranks = replace(ranks, restarted=ranks.any(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"))
    except Exception as error:
        if not is_broken_exchange(error):
            raise
        what = f"rank {rank} could not meet the other {world_size - 1} ({first_sentence(error)})"
        raise TrainingError(f"{what}; start the same command again") from None
    try:
        with ranks.guarded(lambda: "start the same command again"):
            yield ranks
    except BaseException as error:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to a rank that is about to report why
        reported = _is_reported(error, store)
        if isinstance(error, RecspecError):
            error.told = reported
        raise
    finally:
        dist.destroy_process_group()


def _is_reported(error: BaseException, store: Store) -> bool:
    """Whether another rank of this machine reports this error, or the error that it follows from."""
    here = f"recspec/told/{socket.gethostname()}"
    try:
        follows = store.add(f"{here}/failed", 1) > 1 and isinstance(error, RankLost)
        return follows or store.add(f"{here}/{hashlib.sha256(str(error).encode()).hexdigest()}", 1) > 1
    except RuntimeError:  # the store is gone with the process that kept it
        return False


def _store_of_this_start(rank: int, world_size: int) -> Store:
    """The store where the ranks meet, or a part of it that belongs to this start alone.

    torchrun keeps one store over its restarts (torch 2.13), and processes that train several seeds meet again. Ranks
    would find old addresses there, and gloo would try them until it gave up.
    """
    store: Store
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=TIMEOUT))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    return PrefixStore(_name_of_start(store, rank, world_size), store)


def _name_of_start(store: Store, rank: int, world_size: int) -> str:
    """A name that the ranks of this start share, and no other start has.

    The first rank makes up the name. Each other rank asks for it with a new random word, and the first rank answers
    under that word until every rank confirms. It also answers words of dead ranks; no rank reads those answers.
    """
    if rank:
        question = secrets.token_hex(8)
        store.set(f"recspec/asks/{rank}", question)
        name: str = store.get(f"recspec/answer/{question}").decode()
        store.set(f"{name}/knows/{rank}", "1")
        return name
    name, missing = f"recspec/start/{secrets.token_hex(8)}", set(range(1, world_size))
    until = time.monotonic() + TIMEOUT.total_seconds()
    while missing := {other for other in missing if not store.check([f"{name}/knows/{other}"])}:
        if time.monotonic() > until:
            raise dist.DistStoreError(f"ranks {sorted(missing)} did not come")
        for asks in (f"recspec/asks/{other}" for other in missing):
            if store.check([asks]):
                store.set(f"recspec/answer/{store.get(asks).decode()}", name)
        time.sleep(POLLING)
    return name
