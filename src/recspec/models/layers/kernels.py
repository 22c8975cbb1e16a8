"""Kernels for embedding tables and dot products: Triton on a GPU, FBGEMM on a CPU.

Every Triton kernel has an equivalent in plain torch, in `tests/layers/plain_kernels.py`, with which tests compare it.
Triton and FBGEMM are imported at their first use. With TRITON_INTERPRET=1, Triton's kernels run on a CPU, element by
element, for tests.

Shapes: B rows of a batch; F features; N rows of a store; D its width; m ids of a step, F B of them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton.language as tl


Backend = Literal["torch", "triton", "fbgemm"]
"""The implementation that looks up and updates rows of embedding tables."""

Rule = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]
"""The optimizers that `update_rows` has."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Types of numbers that the kernels read and write; sums are float32."""

MAX_FEATURES = 64
"""The most vectors a row whose dot products fit into a program's registers and shared memory."""

MAX_WIDTH = 4096
"""The most numbers of a row that one program updates."""


def why_not(backend: Backend, device: torch.device) -> str | None:
    """Why a backend cannot run on a device; None if it can."""
    if backend == "triton":
        if device.type != "cuda" and not _interprets():
            return f"triton's kernels run on a GPU, and this run is on {device.type}"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; it comes with torch's CUDA builds (pip install triton)"
        return None if _interprets() else _why_triton_cannot_launch()
    if backend == "fbgemm":
        if device.type != "cpu":
            return f"fbgemm is used on a CPU, and this run is on {device.type}"
        if importlib.util.find_spec("fbgemm_gpu") is None:
            return "fbgemm_gpu is not installed (pip install 'recspec[fbgemm]')"
        return _why_fbgemm_does_not_load()
    return None


def uses_triton(backend: Backend | None, device: torch.device) -> bool:
    """Whether to use the kernels: if asked for, and by default on a GPU with Triton.

    Not while a model is compiled or exported, nor under `torch.func`: these know only torch's own operations.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if backend == "triton":  # not for tables left in the host's memory
        return device.type == "cuda" or _interprets()
    return backend is None and _picks_triton(device.type)


@cache
def _picks_triton(device_type: str) -> bool:
    return device_type == "cuda" and why_not("triton", torch.device(device_type)) is None


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _why_triton_cannot_launch() -> str | None:
    """Triton compiles the call of each kernel as C code, at its first launch."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "triton needs a C compiler to launch kernels, and neither gcc nor clang is there (or set CC)"
    # As Triton does, for Debian's Python.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    named = os.pathsep.join(os.environ.get(name, "") for name in ("CPATH", "C_INCLUDE_PATH")).split(os.pathsep)
    folders = [sysconfig.get_paths(scheme)["include"], *filter(None, named)]
    if not any(Path(folder, "Python.h").exists() for folder in folders):
        lacking = f"{folders[0]}/Python.h is missing (apt-get install python3-dev)"
        return f"triton needs Python's headers to launch kernels, and {lacking}"
    return None


@cache
def _compiled(kernel: Callable[..., None]) -> Any:
    """A kernel that can be launched on a grid."""
    import triton

    kernel.__globals__["tl"] = triton.language  # its own module's
    # As types alone: a last, smaller batch would compile them anew.
    return triton.jit(kernel, do_not_specialize=["num_ids", "num_rows", "num_events", "num_steps"])


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one, on which Triton launches, wherever the tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


# --- looking rows up -------------------------------------------------------------------------------------------------


def gather_rows(
    store: Tensor, ids: Tensor, firsts: Tensor | None, stops: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Look up the vectors (B, F, D) of several features' ids (B, F), and their rows in the store (B, F).

    The store (N, D) holds one table after the other: that of each feature from row `firsts` to before `stops` (F,). Ids
    count from the first row of their table; without bounds, the store is one table. An id outside its table has row -1
    and a vector of NaN, so that the loss becomes NaN.
    """
    rows = torch.empty(ids.shape, dtype=torch.int64, device=store.device)
    out = torch.empty((*ids.shape, store.shape[1]), dtype=dtype, device=store.device)
    if out.numel():
        width = store.shape[1]
        block_d = min(_power_of_two(width), 256)
        block_n = max(1, 2048 // block_d)
        grid = (-(-ids.numel() // block_n), -(-width // block_d))
        tensors = ids.contiguous(), firsts, stops, store, out, rows
        with _current(store.device):
            _compiled(_gather_rows)[grid](*tensors, ids.numel(), len(store), ids.shape[1], width, block_n, block_d)
    return out, rows


def _gather_rows(
    ids: tl.tensor,
    firsts: tl.tensor,
    stops: tl.tensor,
    store: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    num_ids: tl.tensor,
    num_rows: tl.tensor,
    features: tl.tensor,
    width: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * block_n + tl.arange(0, block_n)
    known = place < num_ids
    own = tl.load(ids + place, mask=known, other=-1).to(tl.int64)
    row = own
    inside = known & (own >= 0)
    if firsts is None:
        inside = inside & (own < num_rows)
    else:
        feature = place % features
        row += tl.load(firsts + feature, mask=known, other=0)
        inside = inside & (row < tl.load(stops + feature, mask=known, other=0))
    if tl.program_id(1) == 0:
        tl.store(rows + place, tl.where(inside, row, -1), mask=known)
    column = tl.program_id(1) * block_d + tl.arange(0, block_d)
    held = (column < width)[None, :]
    vectors = tl.load(store + row[:, None] * width + column[None, :], mask=inside[:, None] & held, other=float("nan"))
    tl.store(
        out + place[:, None] * width + column[None, :], vectors.to(out.dtype.element_ty), mask=known[:, None] & held
    )


def add_rows(into: Tensor, rows: Tensor, gradient: Tensor) -> None:
    """Add each row of a gradient (m, D) to the row `rows` (m,) of `into` (N, D), float32; rows below 0 are skipped.

    Equal rows are added in any order, so that last digits may differ from run to run; if torch's deterministic
    algorithms are on, in the order of their places. On an H200, sorting took 50 ms where this takes 1 (29 million rows
    of 16 numbers, half of them among 2,330).
    """
    if not gradient.numel():
        return
    if torch.are_deterministic_algorithms_enabled():
        update_rows("sgd", into, rows, gradient, [], lr=-1.0)
        return
    width = into.shape[1]
    block_d = min(_power_of_two(width), 256)
    block_n = max(1, 1024 // block_d)
    grid = (-(-len(rows) // block_n), -(-width // block_d))
    with _current(into.device):
        _compiled(_add_rows)[grid](rows.contiguous(), gradient.contiguous(), into, len(rows), width, block_n, block_d)


def _add_rows(
    rows: tl.tensor,
    gradient: tl.tensor,
    into: tl.tensor,
    num_ids: tl.tensor,
    width: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * block_n + tl.arange(0, block_n)
    row = tl.load(rows + place, mask=place < num_ids, other=-1).to(tl.int64)
    column = tl.program_id(1) * block_d + tl.arange(0, block_d)
    held = (row >= 0)[:, None] & (column < width)[None, :]
    part = tl.load(gradient + place[:, None] * width + column[None, :], mask=held, other=0.0).to(tl.float32)
    tl.atomic_add(into + row[:, None] * width + column[None, :], part, mask=held, sem="relaxed")


# --- attention to events in their table ------------------------------------------------------------------------------

MOST_EVENTS = 1 << 14
"""Numbers of one row's events that a program of `attend` holds."""


def can_attend(store: Tensor, length: int, columns: int) -> bool:
    """Whether `attend` supports histories of so many events of so many rows of a store each."""
    size = _power_of_two(length) * _power_of_two(columns * store.shape[1])
    sums_in_its_type = store.dtype == torch.float32 or (store.dtype in FLOATS and not torch.is_grad_enabled())
    return sums_in_its_type and store.is_contiguous() and size <= MOST_EVENTS


def attend(store: Tensor, rows: Tensor, present: Tensor, queries: Tensor, *, mean: bool) -> tuple[Tensor, Tensor]:
    """Dot products of each history's events with its queries, and sums of the events weighted by their softmax.

    An event's vector is C rows of the store side by side, D = C W numbers; a row below 0 gives NaN.

    Args:
        store: the table (N, W), float32.
        rows: the rows of each event (B, L, C).
        present: the places that hold an event (B, L).
        queries: (B, H, D), float32.
        mean: also sum the events, divided by their number plus one.

    Returns:
        scores (B, H, L), 0 at places without an event; sums (B, H, D), with `mean` (B, H + 1, D).
    """
    size, heads, dim = rows.shape[0], queries.shape[1], queries.shape[2]
    scores = queries.new_empty(size, heads, rows.shape[1])
    sums = queries.new_empty(size, heads + mean, dim)
    if sums.numel():
        sizes, warps = _attend_sizes(store, rows, heads, mean)
        given = store, rows.contiguous(), present.contiguous(), queries.contiguous()
        with _current(store.device):
            _compiled(_attend)[(size,)](*given, scores, sums, *sizes, **warps)
    return scores, sums


def attend_backward(
    store: Tensor, rows: Tensor, present: Tensor, queries: Tensor, gradient: Tensor, of_store: Tensor, *, mean: bool
) -> Tensor:
    """The queries' gradient (B, H, D) from that of `attend`'s sums; adds the store's to `of_store` (N, W).

    Equal rows are added in any order.
    """
    of_queries = torch.empty_like(queries, memory_format=torch.contiguous_format)
    if gradient.numel():
        sizes, warps = _attend_sizes(store, rows, queries.shape[1], mean)
        given = rows.contiguous(), present.contiguous(), queries.contiguous(), gradient.contiguous()
        tensors = store, *given, of_queries, of_store
        with _current(store.device):
            _compiled(_attend_backward)[(rows.shape[0],)](*tensors, *sizes, **warps)
    return of_queries


def _attend_sizes(store: Tensor, rows: Tensor, heads: int, mean: bool) -> tuple[tuple[int, ...], dict[str, int]]:
    """The constants of `_attend`, and its warps."""
    _, length, columns = rows.shape
    width = store.shape[1]
    block_l, block_d = _power_of_two(length), _power_of_two(columns * width)
    warps = max(1, min(8, block_l * block_d // 512))
    return (length, columns, width, heads, int(mean), block_l, block_d), {"num_warps": warps}


def _attend(
    store: tl.tensor,
    rows: tl.tensor,
    present: tl.tensor,
    queries: tl.tensor,
    scores: tl.tensor,
    sums: tl.tensor,
    length: tl.constexpr,
    columns: tl.constexpr,
    width: tl.constexpr,
    heads: tl.constexpr,
    mean: tl.constexpr,
    block_l: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    own = tl.program_id(0).to(tl.int64)
    event, number = tl.arange(0, block_l), tl.arange(0, block_d)
    dim: tl.constexpr = columns * width
    held = number < dim
    there = tl.load(present + own * length + event, mask=event < length, other=0) != 0
    both = there[:, None] & held[None, :]
    column = tl.where(held, number // width, 0)
    row = tl.load(rows + (own * length + event)[:, None] * columns + column[None, :], mask=both, other=-1).to(tl.int64)
    x = tl.load(store + row * width + (number % width)[None, :], mask=both & (row >= 0), other=float("nan"))
    x = tl.where(both, x.to(tl.float32), 0.0)
    for head in tl.static_range(heads):
        query = tl.load(queries + (own * heads + head) * dim + number, mask=held, other=0.0)
        score = tl.sum(x * query[None, :], 1)
        tl.store(scores + (own * heads + head) * length + event, score, mask=event < length)
        score = tl.where(there, score, -float("inf"))
        # Without an event the largest score would be -inf, and its difference to itself NaN.
        largest = tl.maximum(tl.max(score, 0), -3.0e38)
        weight = tl.where(there, tl.exp(score - largest), 0.0)
        weight = weight / tl.maximum(tl.sum(weight, 0), 1e-30)
        tl.store(sums + (own * (heads + mean) + head) * dim + number, tl.sum(x * weight[:, None], 0), mask=held)
    if mean:
        count = tl.sum(there.to(tl.float32), 0)
        tl.store(sums + (own * (heads + 1) + heads) * dim + number, tl.sum(x, 0) / (1.0 + count), mask=held)


def _attend_backward(
    store: tl.tensor,
    rows: tl.tensor,
    present: tl.tensor,
    queries: tl.tensor,
    gradient: tl.tensor,
    of_queries: tl.tensor,
    of_store: tl.tensor,
    length: tl.constexpr,
    columns: tl.constexpr,
    width: tl.constexpr,
    heads: tl.constexpr,
    mean: tl.constexpr,
    block_l: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    own = tl.program_id(0).to(tl.int64)
    event, number = tl.arange(0, block_l), tl.arange(0, block_d)
    dim: tl.constexpr = columns * width
    held = number < dim
    there = tl.load(present + own * length + event, mask=event < length, other=0) != 0
    both = there[:, None] & held[None, :]
    column = tl.where(held, number // width, 0)
    row = tl.load(rows + (own * length + event)[:, None] * columns + column[None, :], mask=both, other=-1).to(tl.int64)
    known = both & (row >= 0)
    x = tl.load(store + row * width + (number % width)[None, :], mask=known, other=0.0)
    of_x = tl.zeros((block_l, block_d), tl.float32)
    for head in tl.static_range(heads):
        query = tl.load(queries + (own * heads + head) * dim + number, mask=held, other=0.0)
        of_sum = tl.load(gradient + (own * (heads + mean) + head) * dim + number, mask=held, other=0.0).to(tl.float32)
        score = tl.where(there, tl.sum(x * query[None, :], 1), -float("inf"))
        weight = tl.where(there, tl.exp(score - tl.maximum(tl.max(score, 0), -3.0e38)), 0.0)
        weight = weight / tl.maximum(tl.sum(weight, 0), 1e-30)
        slope = tl.sum(x * of_sum[None, :], 1)
        slope = weight * (slope - tl.sum(weight * slope, 0))
        tl.store(of_queries + (own * heads + head) * dim + number, tl.sum(x * slope[:, None], 0), mask=held)
        of_x += slope[:, None] * query[None, :] + weight[:, None] * of_sum[None, :]
    if mean:
        of_mean = tl.load(gradient + (own * (heads + 1) + heads) * dim + number, mask=held, other=0.0).to(tl.float32)
        of_x += (of_mean / (1.0 + tl.sum(there.to(tl.float32), 0)))[None, :]
    tl.atomic_add(of_store + row * width + (number % width)[None, :], of_x, mask=known, sem="relaxed")


# --- summing the rows of equal ids -----------------------------------------------------------------------------------


ROWS = 1 << 18
"""Numbers of a sparse gradient's sums in a block on a CPU: few enough for the cache, enough to hide a block's calls."""


def summed_rows(gradient: Tensor, most: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """A sparse gradient's distinct ids, ascending (m,), and their rows' sums (m, dim), in blocks.

    A block has `most` rows, by default a number that suits the device. On a GPU, the host waits once, for the number of
    distinct ids.
    """
    assert gradient.sparse_dim() == 1
    ids, values = gradient._indices()[0], gradient._values()
    if ids.device.type != "cpu" or _interprets():
        ids = ids.clamp(min=0)  # -1 stands for an id outside its table; its gradient is NaN, as the loss is
    if gradient.is_coalesced() or len(ids) < 2:
        yield ids, values
        return
    distinct, order, starts = segments(ids)
    if most is None:
        most = max(1, ROWS // max(1, values[0].numel())) if ids.device.type == "cpu" else len(distinct)
    for first in range(0, len(distinct), most):
        here = starts[first : first + most]
        start = int(here[0]) if first else 0
        stop = int(starts[first + most]) if first + most < len(starts) else len(order)
        # An embedding bag gathers and sums segments in one pass, on all cores.
        sums = torch.nn.functional.embedding_bag(order[start:stop], values, here - start, mode="sum")
        yield distinct[first : first + most], sums


def sum_rows(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """A sparse gradient's distinct ids, ascending (m,), and the sums of their rows (m, dim)."""
    return next(summed_rows(gradient, gradient._nnz() or 1))


def segments(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct ids, ascending; the stable order that sorts `ids`; the start of each id in that order."""
    place_bits = (len(ids) - 1).bit_length()
    if ids.device.type != "cpu" or int(ids.max()) >> (63 - place_bits):
        ids, order = ids.sort(stable=True)
        distinct, counts = torch.unique_consecutive(ids, return_counts=True)
        return distinct, order, counts.cumsum(0) - counts
    # NumPy sorts plain integers in vector registers. With the place packed below the id, the sorted keys also give the
    # order: 8,192 ids take 0.04 ms. torch's sort takes 0.35, and its coalesce, with sums of 16 numbers, 0.7.
    small = int(ids.max()).bit_length() + place_bits <= 32
    keys: npt.NDArray[Any] = ids.numpy().astype(np.uint32 if small else np.int64)
    keys <<= place_bits
    keys |= np.arange(len(keys), dtype=keys.dtype)
    keys.sort()
    found = keys >> place_bits
    starts = np.flatnonzero(np.concatenate(([True], found[1:] != found[:-1])))
    places = (keys & ((1 << place_bits) - 1)).astype(np.int64)
    return torch.from_numpy(found[starts].astype(np.int64)), torch.from_numpy(places), torch.from_numpy(starts)


# --- updating the rows seen ------------------------------------------------------------------------------------------


def can_update(weight: Tensor) -> bool:
    """Whether `update_rows` supports a table."""
    return weight.dim() == 2 and weight.is_contiguous() and weight.dtype in FLOATS and weight.shape[1] <= MAX_WIDTH


def update_rows(
    rule: Rule,
    weight: Tensor,
    ids: Tensor,
    gradient: Tensor,
    states: Sequence[Tensor],
    *,
    lr: float | Tensor,
    eps: float = 0.0,
    betas: tuple[float, float] = (0.0, 0.0),
    corrections: Tensor | None = None,
) -> None:
    """One step of an optimizer on the rows seen: the sums of equal ids' gradients, and the update.

    The ids are sorted. For the first of equal ids, a program adds up the gradients in order and rewrites one row of
    weights and state. Equal ids that reach beyond the next chunk of `CHUNK` places are summed by a program for each
    chunk; a second pass adds these sums in order and rewrites the row. So sums repeat bit for bit, and a table of few
    rows keeps all of a GPU busy. Ids outside the table are skipped. The host never waits for the device.

    Args:
        rule: the optimizer.
        weight: the table (N, D).
        ids: rows of the table (m,), in any order; they may repeat.
        gradient: their gradients (m, D).
        states: the rule's state: none; (N, D); (N, 1); for Adam mean and mean square (N, D).
        lr: the learning rate; for a recorded step a tensor () on the table's device.
        eps: added to the root.
        betas: Adam's decay rates.
        corrections: Adam's two bias corrections, 1 - beta^step, (2,) on the table's device.
    """
    if not gradient.numel():
        return
    # For tables of fewer than 2^31 rows, ids are sorted as half as many bytes, in half the passes.
    small = ids.int() if ids.dtype == torch.int64 and weight.shape[0] < 2**31 else ids
    ordered, order = small.sort(stable=True)
    rate = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float32, device=weight.device)
    width, block_d = weight.shape[1], _power_of_two(weight.shape[1])
    # One sum for each border between chunks: at most one id's places lie on both sides of it.
    borders = -(-len(ids) // CHUNK)
    sums = weight.new_empty(borders, width, dtype=torch.float32)
    rows = torch.full((borders,), -1, dtype=ordered.dtype, device=weight.device)
    table = weight, *[*states, None, None][:2], corrections
    numbers = weight.shape[0], rate, float(eps), float(1 - betas[0]), float(1 - betas[1])
    known = width, max(1, min(8, 2048 // block_d)), block_d
    warps = {"num_warps": min(8, max(1, block_d // 128))}  # a warp moves 128 numbers at once, and a row is often alone
    update = _compiled(_update_rows)
    with _current(weight.device):
        update[(len(ids),)](
            ordered, order, gradient.contiguous(), rows, sums, *table, len(ids), *numbers, *known, CHUNK, rule, **warps
        )
        if len(ids) > 2 * CHUNK:
            update[(borders,)](rows, None, sums, None, None, *table, borders, *numbers, *known, 0, rule, **warps)


CHUNK = 64
"""Places of sorted ids after which another program goes on with the sum of equal ids."""


def _update_rows(
    ids: tl.tensor,
    order: tl.tensor,
    gradient: tl.tensor,
    sum_ids: tl.tensor,
    sums: tl.tensor,
    weight: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    corrections: tl.tensor,
    num_ids: tl.tensor,
    num_rows: tl.tensor,
    lr: tl.tensor,
    eps: tl.tensor,
    rest1: tl.tensor,
    rest2: tl.tensor,
    width: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    chunk: tl.constexpr,
    rule: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + place).to(tl.int64)
    whole = row != tl.load(ids + place - 1, mask=place > 0, other=-1)
    mine = whole
    stop = place * 0 + num_ids
    border = place * 0
    if chunk > 0:
        # The first of equal ids takes its chunk and the next one; from then on, each chunk has a program of its own.
        border = place // chunk
        earlier = (border - 1) * chunk - 1
        is_start = (place % chunk == 0) & (earlier >= 0)
        mine = whole | (is_start & (tl.load(ids + earlier, mask=is_start, other=-1) == row))
        border += whole.to(tl.int64)
        stop = tl.minimum((border + 1) * chunk, num_ids)
        whole = whole & (tl.load(ids + stop, mask=stop < num_ids, other=-1) != row)
    if mine & (row >= 0) & (row < num_rows):
        column = tl.arange(0, block_d)
        held = column < width
        # Before the sums, so that both reads of memory are under way at once.
        own = tl.load(weight + row * width + column, mask=held & whole, other=0.0).to(tl.float32)
        total = tl.zeros((block_d,), tl.float32)
        while tl.load(ids + place, mask=place < stop, other=-1) == row:
            places = place + tl.arange(0, block_n)
            same = tl.load(ids + places, mask=places < stop, other=-1) == row
            source = places
            if order is not None:
                source = tl.load(order + places, mask=same, other=0)
            part = tl.load(
                gradient + source[:, None] * width + column[None, :], mask=same[:, None] & held[None, :], other=0.0
            )
            total += tl.sum(part.to(tl.float32), 0)
            place += block_n
        if whole:
            rate = tl.load(lr)
            if rule == "sgd":
                own -= rate * total
            elif rule == "rowwise_adagrad":
                mass = tl.load(first + row).to(tl.float32) + tl.sum(total * total, 0) / width
                tl.store(first + row, mass.to(first.dtype.element_ty))
                own -= rate * total / (tl.sqrt(mass) + eps)
            elif rule == "adagrad":
                square = tl.load(first + row * width + column, mask=held, other=0.0).to(tl.float32) + total * total
                tl.store(first + row * width + column, square.to(first.dtype.element_ty), mask=held)
                own -= rate * total / (tl.sqrt(square) + eps)
            else:
                mean = tl.load(first + row * width + column, mask=held, other=0.0).to(tl.float32)
                square = tl.load(second + row * width + column, mask=held, other=0.0).to(tl.float32)
                mean += (total - mean) * rest1
                square += (total * total - square) * rest2
                tl.store(first + row * width + column, mean.to(first.dtype.element_ty), mask=held)
                tl.store(second + row * width + column, square.to(second.dtype.element_ty), mask=held)
                root = tl.sqrt(square / tl.load(corrections + 1)) + eps
                own -= rate * mean / (root * tl.load(corrections))
            tl.store(weight + row * width + column, own.to(weight.dtype.element_ty), mask=held)
        elif chunk > 0:
            tl.store(sum_ids + border, row.to(sum_ids.dtype.element_ty))
            tl.store(sums + border * width + column, total, mask=held)


# --- dot products of all pairs ---------------------------------------------------------------------------------------


def can_dot(vectors: Tensor) -> bool:
    """Whether the kernels support these vectors (B, F, D)."""
    return vectors.dtype in FLOATS and vectors.shape[1] <= MAX_FEATURES


def dots(vectors: Tensor) -> Tensor:
    """The dot product of every pair of a row's vectors: (B, F, D) -> (B, F (F - 1) / 2)."""
    rows, features, width = vectors.shape
    out = vectors.new_empty(rows, features * (features - 1) // 2)
    if out.numel():
        block_f, block_d, precision = _dot_blocks(features, width)
        with _current(vectors.device):
            _compiled(_dots)[(rows,)](vectors.contiguous(), out, features, width, block_f, block_d, precision)
    return out


def dots_backward(vectors: Tensor, gradient: Tensor) -> Tensor:
    """The vectors' gradient (B, F, D) from that of the dot products (B, F (F - 1) / 2)."""
    rows, features, width = vectors.shape
    out = torch.empty_like(vectors, memory_format=torch.contiguous_format)
    if out.numel():
        block_f, block_d, precision = _dot_blocks(features, width)
        with _current(vectors.device):
            _compiled(_dots_backward)[(rows,)](
                vectors.contiguous(), gradient.contiguous(), out, features, width, block_f, block_d, precision
            )
    return out


def _dot_blocks(features: int, width: int) -> tuple[int, int, str]:
    """Vectors and numbers of a tile, and the precision of float32 products by torch's setting."""
    precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    block_f = max(16, _power_of_two(features))
    # Exact products of more than 32 vectors, 64 numbers at once, would spill 7 kB a thread.
    most = 16 if precision == "ieee" and block_f > 32 else 64
    return block_f, min(most, max(16, _power_of_two(width))), precision


def _dots(
    vectors: tl.tensor,
    out: tl.tensor,
    features: tl.constexpr,
    width: tl.constexpr,
    block_f: tl.constexpr,
    block_d: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, block_f)
    gram = tl.zeros((block_f, block_f), tl.float32)
    for start in range(0, width, block_d):
        column = start + tl.arange(0, block_d)
        held = (feature < features)[:, None] & (column < width)[None, :]
        x = tl.load(vectors + (row * features + feature)[:, None] * width + column[None, :], mask=held, other=0.0)
        gram += tl.dot(x, tl.trans(x), input_precision=precision)
    high, low = feature[:, None], feature[None, :]
    pair = row * (features * (features - 1) // 2) + high * (high - 1) // 2 + low
    tl.store(out + pair, gram.to(out.dtype.element_ty), mask=(low < high) & (high < features))


def _dots_backward(
    vectors: tl.tensor,
    gradient: tl.tensor,
    out: tl.tensor,
    features: tl.constexpr,
    width: tl.constexpr,
    block_f: tl.constexpr,
    block_d: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, block_f)
    one, other = feature[:, None], feature[None, :]
    high, low = tl.maximum(one, other), tl.minimum(one, other)
    pair = row * (features * (features - 1) // 2) + high * (high - 1) // 2 + low
    # A pair's gradient stands on both sides of the diagonal.
    both = tl.load(gradient + pair, mask=(low < high) & (high < features), other=0.0)
    for start in range(0, width, block_d):
        column = start + tl.arange(0, block_d)
        held = (feature < features)[:, None] & (column < width)[None, :]
        place = (row * features + feature)[:, None] * width + column[None, :]
        x = tl.load(vectors + place, mask=held, other=0.0)
        found = tl.dot(both.to(x.dtype), x, input_precision=precision)
        tl.store(out + place, found.to(out.dtype.element_ty), mask=held)


# --- FBGEMM ----------------------------------------------------------------------------------------------------------

FBGEMM_RULES: tuple[Rule, ...] = ("sgd", "adagrad", "rowwise_adagrad")
"""Optimizers that FBGEMM supports on a CPU."""


@dataclass(frozen=True)
class FusedUpdate:
    """The optimizer of a lookup that updates its table in the backward pass."""

    rule: Rule
    group: Mapping[str, Any]
    """The optimizer's settings with the current learning rate; torch calls this a group."""
    states: Callable[[], list[Tensor]]
    """Returns the rule's current state tensors."""
    count: Callable[[], None]
    """Called once an update."""


@cache
def _why_fbgemm_does_not_load() -> str | None:
    try:
        _fbgemm()
    except (ImportError, OSError, AttributeError) as error:
        return (
            f"fbgemm_gpu does not load beside torch {torch.__version__} ({str(error).splitlines()[0]}); each "
            "version of it belongs to one of torch, as fbgemm-gpu-cpu 1.8.0 to torch 2.13"
        )
    return None


@cache
def _fbgemm() -> Mapping[Rule, Callable[..., Tensor]]:
    """FBGEMM's lookups with an update, by rule."""
    import fbgemm_gpu  # noqa: F401  registers them

    names = {rule: f"split_embedding_codegen_lookup_{rule}_function_cpu" for rule in FBGEMM_RULES}
    return {rule: getattr(torch.ops.fbgemm, name).default for rule, name in names.items()}


def fbgemm_lookup(
    store: Tensor,
    firsts: Sequence[int],
    num_rows: Sequence[int],
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    update: FusedUpdate,
) -> Tensor:
    """Sums of rows by bags (B, F D); the backward pass updates the store and its state in place, without a gradient.

    Args:
        store: the tables (N, D), one after the other.
        firsts: the first row of each feature's table in the store, ascending; features of one table are adjacent.
        num_rows: the number of rows of each feature's table.
        ids: the ids of all features, feature by feature, each counted from the first row of its table (m,).
        offsets: the start of each bag, feature by feature, and the end (F B + 1,).
        weights: factors of the ids' rows (m,); None for 1.
        update: the optimizer.
    """
    width, features = store.shape[1], len(firsts)
    places = torch.zeros(features, dtype=torch.int32)
    begins = torch.tensor(firsts, dtype=torch.int64)
    given: dict[str, Any] = {
        # A separate leaf, because the store itself gets no gradient.
        "host_weights": store.detach().view(-1).requires_grad_(),
        "weights_placements": places,
        "weights_offsets": begins * width,
        "D_offsets": torch.arange(features + 1, dtype=torch.int32) * width,
        "total_D": features * width,
        "max_D": width,
        "hash_size_cumsum": torch.tensor([*firsts, firsts[-1] + num_rows[-1]], dtype=torch.int64),
        "total_hash_size_bits": len(store).bit_length() + 1,
        "indices": ids,
        "offsets": offsets,
        "pooling_mode": 0,  # sum
        "indice_weights": weights,
        "feature_requires_grad": None,
        "gradient_clipping": False,
        "max_gradient": 1.0,
        "stochastic_rounding": False,
        "learning_rate": float(update.group["lr"]),
    }
    if states := update.states():
        per_row = states[0].shape[1]
        given |= {
            "momentum1_host": states[0].view(-1),
            "momentum1_placements": places,
            "momentum1_offsets": begins * per_row,
            "eps": float(update.group["eps"]),
        }
    if update.rule == "rowwise_adagrad":
        given["weight_decay_mode"] = 0  # the operator's default is not an integer
    found = _fbgemm()[update.rule](**given)
    found.register_hook(lambda _: update.count())  # type: ignore[no-untyped-call]
    return found
