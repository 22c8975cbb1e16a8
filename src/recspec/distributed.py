"""Who this process is among the processes of a run, what they tell each other, and which tables each of them holds.

A `Ranks` is a value that is handed down; nothing reads the environment but `join`, and with one process every exchange
is the identity.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from recspec import liveness
from recspec.errors import RecspecError, SettingsError, TrainingError
from recspec.liveness import Member, Watch

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for another before it gives up with an error."""


@dataclass(frozen=True)
class Ranks:
    """Rank, world size and device of this process."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    local_world_size: int = field(default=1, kw_only=True)
    """Ranks on this machine."""
    restarted: bool = field(default=False, kw_only=True)
    """Whether torchrun has started these processes anew because one of them died (`--max-restarts`)."""
    before: Callable[[], None] | None = field(default=None, compare=False, repr=False, kw_only=True)
    """What all ranks finish together before anything is summed, gathered or waited for, if anything."""
    watch: Watch | None = field(default=None, compare=False, repr=False, kw_only=True)
    """Who tells that another rank was lost; nobody where there is none, or where the first one can't be reached."""

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
        sizes = [int(size) for size in self._gather_sizes(local.shape[0])]
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
        """Rows to every rank and from every rank: the first `send[0]` go to rank 0, the next `send[1]` to rank 1, ...

        What comes back holds `receive[0]` rows of rank 0, then `receive[1]` of rank 1, and so on.
        """
        if self.world_size == 1:
            return rows
        came = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(came, rows.contiguous(), list(receive), list(send))
        return came

    def to_first(self, rows: torch.Tensor, owner: int) -> torch.Tensor:
        """The owner's rows on the first rank; both call this with tensors alike in shape and type, and nobody else."""
        if owner == 0:
            return rows
        beside = rows.to(self.device).contiguous()
        if self.is_first:
            dist.recv(beside, owner)
            return beside.to(rows.device)
        dist.send(beside, 0)
        return rows

    @contextmanager
    def guarded(self, advice: Callable[[], str]) -> Iterator[None]:
        """Should another rank be lost in this block, the error names it and says what `advice` says of what to do."""
        if self.world_size == 1:
            yield
            return
        with self.watch.advising(advice) if self.watch is not None else nullcontext():
            try:
                yield
            except RecspecError:
                raise
            except Exception as error:
                broken = _of_collective(error)
                if self.watch is not None and (lost := self.watch.lost(HEARING if broken else 0.0)) is not None:
                    raise lost from None
                if broken:
                    what = f"rank {self.rank}: an exchange with the other ranks broke off ({_first_line(error)})"
                    raise TrainingError(f"{what}; {advice()}") from None
                raise

    def _finish_first(self) -> None:
        if self.before is not None:
            self.before()

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
def join(device: str = "auto", end: Callable[[RecspecError], None] | None = None) -> Iterator[Ranks]:
    """The ranks that torchrun started (one process when it didn't), left again at the end.

    gloo on CPU, NCCL on GPU. Where a rank dies or ends with an error, the others end with a `TrainingError` that names
    it; a rank that does not come back from waiting for it is ended by `end`, in a thread of its own, if that is given.
    A rank that waits longer than `TIMEOUT` for one that lives raises instead of hanging.

    Raises:
        TrainingError: if another rank is lost. `told` says of this and any other `RecspecError` of the block whether
            another process of this machine tells it.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, _ = place()
    chosen = pick_device(device, local_rank)
    if world_size == 1:
        yield Ranks(device=chosen)
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    try:
        _start(chosen, world_size)
        ranks = _introduce(chosen, world_size, end)
    except Exception as error:
        if not _of_collective(error):
            raise
        what = f"rank {os.environ.get('RANK')} could not meet the other {world_size - 1} ({_first_line(error)})"
        raise TrainingError(f"{what}; start the same command again") from None
    with _watching(ranks.watch):
        try:
            with ranks.guarded(lambda: "start the same command again"):
                yield ranks
        finally:
            dist.destroy_process_group()  # may wait for the dead, so within the watch


def _start(device: torch.device, world_size: int) -> None:
    store = _store_of_this_start()
    rank, size = (int(os.environ["RANK"]), world_size) if store is not None else (-1, -1)  # -1: as the environment says
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=size)


def _introduce(device: torch.device, world_size: int, end: Callable[[RecspecError], None] | None) -> Ranks:
    """This rank among the others, once all know each other and whether torchrun started any of them anew."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    ranks = Ranks(dist.get_rank(), world_size, device, local_world_size=local)
    restarted = ranks.any(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")
    return replace(ranks, restarted=restarted, watch=_meet(ranks, end))


def _store_of_this_start() -> Store | None:
    """A part of torchrun's store that belongs to this start alone; None where no start comes after another.

    torchrun keeps one store over its restarts (torch 2.13), and ranks that are started anew find the addresses of the
    dead there: gloo's tried them until it gave up.
    """
    keeps = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not keeps or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    port = int(os.environ["MASTER_PORT"])
    store: Store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=TIMEOUT)  # type: ignore[attr-defined]
    return PrefixStore(_name_of_start(store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])), store)


def _name_of_start(store: Store, rank: int, world_size: int) -> str:
    """A name that all ranks of this start have in common, and no other start has.

    The first rank makes it up and answers the others' questions, which hold a word that nobody used before; questions
    of the dead get answers that nobody reads, until each rank has said that it knows the name.
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


POLLING = 0.05
"""Seconds between the first rank's looks at who has come."""


# --- those who die ---------------------------------------------------------------------------------------------------

HEARING = 2.0
"""Seconds after a collective broke within which it is known that a rank was lost: it may be heard of second."""


@contextmanager
def _watching(watch: Watch | None) -> Iterator[None]:
    """Until the end of the block the others hear how this rank ends; its error is told once a machine."""
    if watch is None:
        yield
        return
    ends = False

    def terminated(number: int, _: FrameType | None) -> None:
        """torchrun ends the others when a process ends; they are about to say why themselves."""
        if ends:
            return
        if (lost := watch.lost(HEARING)) is not None:
            raise lost
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    in_charge = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminated) if in_charge else None
    try:
        yield
    except BaseException as error:
        ends = True
        tells = watch.fail(error)
        if isinstance(error, RecspecError):
            error.told = not tells
        raise
    finally:
        ends = True
        watch.close()
        if in_charge:
            signal.signal(signal.SIGTERM, before)


def _meet(ranks: Ranks, end: Callable[[RecspecError], None] | None) -> Watch | None:
    """All ranks tell each other who they are and connect to the first one; none of them watches if one can't."""
    me = liveness.this_member(ranks.rank)
    offered = liveness.offer(one_host=ranks.local_world_size == ranks.world_size) if ranks.is_first else None
    said = {"host": me.host, "pid": me.pid, "port": offered.port if offered else 0, "token": offered and offered.token}
    row = torch.frombuffer(bytearray(json.dumps(said).encode().ljust(CARD_BYTES)), dtype=torch.uint8)
    cards = [json.loads(bytes(card.tolist())) for card in ranks.gather(row[None])]
    members = [Member(rank, card["host"], card["pid"]) for rank, card in enumerate(cards)]
    connections: dict[int, socket.socket] = {}
    try:
        if offered is not None:
            connections = liveness.admit(offered, range(1, ranks.world_size))
        else:
            one_host = ranks.local_world_size == ranks.world_size
            address = "127.0.0.1" if one_host else os.environ["MASTER_ADDR"]
            connections = {0: liveness.reach(address, cards[0]["port"], cards[0]["token"], ranks.rank)}
        problem = False
    except OSError:
        problem = True
    if ranks.any(problem):
        for connection in connections.values():
            connection.close()
        return None
    return Watch(members, ranks.rank, connections, end)


CARD_BYTES = 512
"""Of what a rank says of itself: a host's name has 253 letters at most."""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _of_collective(error: Exception) -> bool:
    """Whether it is how torch tells that an exchange between ranks broke off."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and re.search("gloo|nccl|connection", str(error), re.IGNORECASE) is not None
    )


# --- which rank holds which tables -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """An embedding table as a plan sees it: rows [first, first + rows) of the store it lies in."""

    store: str
    name: str
    first: int
    rows: int
    bytes_per_row: int
    """Of weights, and of all that the optimizer keeps beside them."""


@dataclass(frozen=True)
class Piece:
    """Rows [first, stop) of a store, all of one table, and the rank that holds them."""

    table: Table
    first: int
    stop: int
    rank: int

    @property
    def bytes(self) -> int:
        """Memory that the rank needs for it."""
        return (self.stop - self.first) * self.table.bytes_per_row

    def __str__(self) -> str:
        first, stop, rows = self.first - self.table.first, self.stop - self.table.first, self.table.rows
        where = f"{rows:,} rows" if stop - first == rows else f"rows {first:,} to {stop - 1:,} of {rows:,}"
        return f"{self.table.store} {self.table.name} ({where})"


@dataclass(frozen=True)
class ShardingPlan:
    """Which rank holds which rows of which embedding table."""

    pieces: tuple[Piece, ...]
    """By store and row; those of a store are all its rows, each once."""
    world_size: int

    @property
    def stores(self) -> tuple[str, ...]:
        """The stores that are divided."""
        return tuple(dict.fromkeys(piece.table.store for piece in self.pieces))

    def of(self, store: str) -> tuple[Piece, ...]:
        """A store's pieces in the order of their rows."""
        return tuple(piece for piece in self.pieces if piece.table.store == store)

    def held(self, store: str, rank: int) -> tuple[range, ...]:
        """The rows of a store that a rank holds, ascending."""
        return tuple(range(piece.first, piece.stop) for piece in self.of(store) if piece.rank == rank)

    @property
    def bytes(self) -> tuple[int, ...]:
        """Each rank's memory."""
        return tuple(sum(piece.bytes for piece in self.pieces if piece.rank == rank) for rank in range(self.world_size))

    def __str__(self) -> str:
        lines = []
        for rank, size in enumerate(self.bytes):
            held = [str(piece) for piece in self.pieces if piece.rank == rank]
            lines.append(f"rank {rank}: {size:,} bytes: {', '.join(held) or 'nothing'}")
        return "\n".join(lines)


def plan_sharding(tables: Iterable[Table], world_size: int) -> ShardingPlan:
    """Whole tables to ranks, the largest first and each to the rank with the least so far.

    A table that is larger than an equal share of all is cut by rows, into the fewest even pieces that are not; so no
    rank has more than its share and one piece.
    """
    known = list(tables)
    share = sum(table.rows * table.bytes_per_row for table in known) / world_size
    pieces = [piece for table in known for piece in _cut(table, share, world_size)]
    load = [0] * world_size
    placed = []
    for piece in sorted(pieces, key=lambda piece: -piece.bytes):
        rank = load.index(min(load))
        load[rank] += piece.bytes
        placed.append(Piece(piece.table, piece.first, piece.stop, rank))
    order = {table: place for place, table in enumerate(known)}
    return ShardingPlan(tuple(sorted(placed, key=lambda piece: (order[piece.table], piece.first))), world_size)


def _cut(table: Table, share: float, world_size: int) -> Iterator[Piece]:
    """Even pieces of a table, none larger than the share, and no more than there are ranks or rows."""
    size = table.rows * table.bytes_per_row
    count = min(world_size, table.rows, max(1, math.ceil(size / share))) if size else 1
    for place in range(count):
        rows = Ranks(place, count).share(table.rows)
        yield Piece(table, table.first + rows.start, table.first + rows.stop, rank=0)


# --- tensors that no rank holds whole --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Streamed:
    """A tensor as blocks of its rows, in order, so that nobody need hold it whole.

    Where ranks hold parts of it, all of them take the blocks together, and the first rank alone gets what they hold.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[torch.Tensor]]


def rows_of_block(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Rows of a tensor that are moved at once: some `BLOCK_BYTES` of them, one at least."""
    return max(1, BLOCK_BYTES // max(1, math.prod(shape[1:]) * dtype.itemsize))


BLOCK_BYTES = 1 << 26
