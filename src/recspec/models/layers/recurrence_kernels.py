"""Triton kernels of `Gru`: a recurrence over all steps in one launch, and another one for its gradients.

A program takes a block of rows through all of their steps. In plain torch, step by step, a hundred steps are thousands
of launches, each of a few microseconds of work.

Shapes: B rows; T events; S steps; H of a state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from recspec.models.layers import kernels
from recspec.models.layers.events import Events

if TYPE_CHECKING:
    import triton.language as tl


MAX_HIDDEN = 256
"""The widest state: a step's work grows with its square, and a program does it alone."""

OPTIONS = {"num_warps": 8, "maxnreg": 128}
"""Two programs share a multiprocessor: 2 x 8 warps of 32 threads with 128 registers are all it has."""


def can_recur(weight_h: Tensor, events: Events) -> bool:
    """Whether the kernels support these weights (3H, H) and events."""
    return weight_h.dtype == torch.float32 and weight_h.shape[1] <= MAX_HIDDEN and events.starts is not None


def recur(gates: Tensor, attention: Tensor | None, weight_h: Tensor, events: Events) -> tuple[Tensor, Tensor, Tensor]:
    """States (T, H), last states (B, H) and the states' products with the candidate's weights, U_c h, (T, H).

    Args:
        gates: W x + b of the gates u, r and the candidate c (T, 3H); overwritten with u, r and c.
        attention: of each event (T,); None for 1.
        weight_h: U of u, r and c (3H, H).
        events: in the jagged form. Behind a row's last event, its state stays.
    """
    hidden = weight_h.shape[1]
    states, recalled = gates.new_empty(2, events.num_events, hidden)
    if not events.sizes:
        return states, gates.new_zeros(events.num_rows, hidden), recalled
    last = gates.new_empty(events.num_rows, hidden)
    grid, known = _launch(hidden, events)
    given = gates, attention, weight_h, *_where(events), states, recalled, last, *_counts(events), *known
    with kernels._current(gates.device):
        kernels._compiled(_recur)[grid](*given, **OPTIONS)
    return states, last, recalled


def recur_backward(
    of_states: Tensor | None,
    of_last: Tensor | None,
    gates: Tensor,
    attention: Tensor | None,
    weight_h: Tensor,
    states: Tensor,
    recalled: Tensor,
    events: Events,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of U_c h, u, r and c before their activations (T, 4H); of attention (T,); each place's state before.

    The states before have no rows of the first step, where they are zeros. The other arguments are those of `recur` and
    what it found.
    """
    hidden, first = weight_h.shape[1], events.sizes[0] if events.sizes else 0
    slopes = gates.new_empty(events.num_events, 4 * hidden)
    of_attention = None if attention is None else torch.empty_like(attention)
    # With all rows at every step, the states before are one part of the states.
    even = first * len(events.sizes) == events.num_events
    before = None if even else torch.empty_like(states)
    if events.sizes:
        given = (
            None if of_states is None else of_states.contiguous(),
            None if of_last is None else of_last.contiguous(),
            gates,
            attention,
            weight_h,
            *_where(events),
            states,
            recalled,
        )
        carried = states.new_empty(events.num_rows, hidden)
        grid, known = _launch(hidden, events)
        found = slopes, of_attention, before, carried
        with kernels._current(gates.device):
            kernels._compiled(_recur_backward)[grid](*given, *found, *_counts(events), *known, **OPTIONS)
    return slopes, of_attention, states[: len(states) - first] if before is None else before[first:]


def _where(events: Events) -> tuple[Tensor, Tensor, Tensor]:
    return cast(Tensor, events.starts), cast(Tensor, events.order), events.lengths


def _counts(events: Events) -> tuple[int, int, int]:
    return events.num_rows, events.num_events, len(events.sizes)


def _launch(hidden: int, events: Events) -> tuple[tuple[int], tuple[int | bool | str, ...]]:
    """The grid; the constants: H, a tile's rows and units, whether rows have places behind their end, precision.

    A program's registers hold a few tiles. Exact products need more of them; tiles of 32 units would spill.
    """
    precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    rows, units = 64, 16 if hidden <= 16 or precision == "ieee" else 32
    return (-(-events.num_rows // rows),), (hidden, rows, units, events.held is not None, precision)


# States and slopes of a step are products' operands right after. They come back from the cache, a tile at a time, so
# that a state of any width fits into the registers. A barrier between makes the program's threads see them.


def _recur(
    gates: tl.tensor,
    attention: tl.tensor,
    weight_h: tl.tensor,
    starts: tl.tensor,
    order: tl.tensor,
    lengths: tl.tensor,
    states: tl.tensor,
    recalled: tl.tensor,
    last: tl.tensor,
    num_rows: tl.tensor,
    num_events: tl.tensor,
    num_steps: tl.tensor,
    hidden: tl.constexpr,
    rows: tl.constexpr,
    units: tl.constexpr,
    full: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    own = tl.load(order + row, mask=row < num_rows, other=0)
    length = tl.load(lengths + own, mask=row < num_rows, other=0)
    unit = tl.arange(0, units)
    for first in tl.range(0, hidden, units, num_stages=1):
        empty = ((row < num_rows) & (length == 0))[:, None] & (first + unit < hidden)[None, :]
        ends = last + own[:, None] * hidden + (first + unit)[None, :]
        tl.store(ends, tl.zeros((rows, units), tl.float32), mask=empty)
    stop = num_steps if full else tl.max(length, 0)
    for step in tl.range(0, stop, num_stages=1):
        place = tl.load(starts + step) + row
        there = place < tl.load(starts + step + 1, mask=step + 1 < num_steps, other=num_events)
        earlier = tl.load(starts + step - 1, mask=step > 0, other=0) + row
        remembers = there & (step > 0)
        for first in tl.range(0, hidden, units, num_stages=1):
            column = first + unit
            mask = there[:, None] & (column < hidden)[None, :]
            gate = gates + place[:, None] * (3 * hidden) + column[None, :]
            # Asked for early: they come from memory while the products are computed. A third one would spill.
            x_reset = tl.load(gate + hidden, mask=mask, other=0.0)
            x_candidate = tl.load(gate + 2 * hidden, mask=mask, other=0.0)
            update = tl.zeros((rows, units), tl.float32)
            reset = tl.zeros((rows, units), tl.float32)
            memory = tl.zeros((rows, units), tl.float32)
            for start in tl.range(0, hidden, units, num_stages=1):
                source = start + unit
                before = states + earlier[:, None] * hidden + source[None, :]
                before = tl.load(before, mask=remembers[:, None] & (source < hidden)[None, :], other=0.0)
                weights = weight_h + column[None, :] * hidden + source[:, None]
                known = (column < hidden)[None, :] & (source < hidden)[:, None]
                weight = tl.load(weights, mask=known, other=0.0)
                update += tl.dot(before, weight, input_precision=precision)
                weight = tl.load(weights + hidden * hidden, mask=known, other=0.0)
                reset += tl.dot(before, weight, input_precision=precision)
                weight = tl.load(weights + 2 * hidden * hidden, mask=known, other=0.0)
                memory += tl.dot(before, weight, input_precision=precision)
            at = place[:, None] * hidden + column[None, :]
            tl.store(recalled + at, memory, mask=mask)
            reset = tl.sigmoid(x_reset + reset)
            tl.store(gate + hidden, reset, mask=mask)
            candidate = x_candidate + reset * memory
            candidate = 2 * tl.sigmoid(2 * candidate) - 1  # tanh
            tl.store(gate + 2 * hidden, candidate, mask=mask)
            update = tl.sigmoid(tl.load(gate, mask=mask, other=0.0) + update)
            tl.store(gate, update, mask=mask)
            if attention is not None:
                update *= tl.load(attention + place, mask=there, other=0.0)[:, None]
            state = tl.load(states + earlier[:, None] * hidden + column[None, :], mask=mask & (step > 0), other=0.0)
            state = tl.where((step < length)[:, None], state + update * (candidate - state), state)
            tl.store(states + at, state, mask=mask)
            tl.store(last + own[:, None] * hidden + column[None, :], state, mask=mask & (step + 1 == length)[:, None])
        tl.debug_barrier()


def _recur_backward(
    of_states: tl.tensor,
    of_last: tl.tensor,
    gates: tl.tensor,
    attention: tl.tensor,
    weight_h: tl.tensor,
    starts: tl.tensor,
    order: tl.tensor,
    lengths: tl.tensor,
    states: tl.tensor,
    recalled: tl.tensor,
    slopes: tl.tensor,
    of_attention: tl.tensor,
    before: tl.tensor,
    carried: tl.tensor,
    num_rows: tl.tensor,
    num_events: tl.tensor,
    num_steps: tl.tensor,
    hidden: tl.constexpr,
    rows: tl.constexpr,
    units: tl.constexpr,
    full: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * rows + tl.arange(0, rows)).to(tl.int64)
    own = tl.load(order + row, mask=row < num_rows, other=0)
    length = tl.load(lengths + own, mask=row < num_rows, other=0)
    unit = tl.arange(0, units)
    stop = num_steps if full else tl.max(length, 0)
    for back in tl.range(0, stop, num_stages=1):
        step = stop - 1 - back
        place = tl.load(starts + step) + row
        there = place < tl.load(starts + step + 1, mask=step + 1 < num_steps, other=num_events)
        earlier = tl.load(starts + step - 1, mask=step > 0, other=0) + row
        alive = (step < length)[:, None]
        if attention is not None:
            weight = tl.load(attention + place, mask=there, other=0.0)[:, None]
            of_weight = tl.zeros((rows,), tl.float32)
        for first in tl.range(0, hidden, units, num_stages=1):
            column = first + unit
            mask = there[:, None] & (column < hidden)[None, :]
            known = (row < num_rows)[:, None] & (column < hidden)[None, :]
            at = place[:, None] * hidden + column[None, :]
            carry = carried + row[:, None] * hidden + column[None, :]
            so_far = tl.load(carry, mask=known & (back > 0), other=0.0)
            if of_last is not None:
                so_far += tl.load(
                    of_last + own[:, None] * hidden + column[None, :], mask=known & (back == 0), other=0.0
                )
            here = so_far
            if of_states is not None:
                here += tl.load(of_states + at, mask=mask, other=0.0)
            here = tl.where(alive, here, 0.0)
            old = tl.load(
                states + earlier[:, None] * hidden + column[None, :], mask=mask & alive & (step > 0), other=0.0
            )
            if before is not None:
                tl.store(before + at, old, mask=mask)
            gate = gates + place[:, None] * (3 * hidden) + column[None, :]
            slope = slopes + place[:, None] * (4 * hidden) + column[None, :]
            candidate = tl.load(gate + 2 * hidden, mask=mask, other=0.0)
            update = tl.load(gate, mask=mask, other=0.0)
            of_update = (candidate - old) * here * update
            of_gate = of_update * (1 - update)
            if attention is not None:
                of_weight += tl.sum(of_update, 1)
                of_gate *= weight
                update *= weight
            tl.store(slope + hidden, of_gate, mask=mask)
            of_candidate = here * update
            tl.store(carry, tl.where(alive, here - of_candidate, so_far), mask=known)
            of_candidate *= 1 - candidate * candidate
            tl.store(slope + 3 * hidden, of_candidate, mask=mask)
            reset = tl.load(gate + hidden, mask=mask, other=0.0)
            of_recalled = of_candidate * reset
            tl.store(slope, of_recalled, mask=mask)
            of_gate = of_recalled * (1 - reset) * tl.load(recalled + at, mask=mask, other=0.0)
            tl.store(slope + 2 * hidden, of_gate, mask=mask)
        if attention is not None:
            tl.store(of_attention + place, of_weight, mask=there)
        tl.debug_barrier()
        for first in tl.range(0, hidden, units, num_stages=1):
            column = first + unit
            total = tl.zeros((rows, units), tl.float32)
            for start in tl.range(0, 3 * hidden, units, num_stages=1):
                source = start + unit
                part = tl.load(
                    slopes + place[:, None] * (4 * hidden) + source[None, :],
                    mask=there[:, None] & (source < 3 * hidden)[None, :],
                    other=0.0,
                )
                # The slopes' columns are of U_c h, u and r; the weights' rows of u, r and c.
                gate_row = tl.where(source < hidden, source + 2 * hidden, source - hidden)
                weight_of = tl.load(
                    weight_h + gate_row[:, None] * hidden + column[None, :],
                    mask=(source < 3 * hidden)[:, None] & (column < hidden)[None, :],
                    other=0.0,
                )
                total += tl.dot(part, weight_of, input_precision=precision)
            known = (row < num_rows)[:, None] & (column < hidden)[None, :]
            carry = carried + row[:, None] * hidden + column[None, :]
            tl.store(carry, tl.load(carry, mask=known, other=0.0) + total, mask=known)
        tl.debug_barrier()
