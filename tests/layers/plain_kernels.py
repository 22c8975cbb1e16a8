"""What every Triton kernel computes, in plain torch.

See the functions of the same names in `kernels` and `recurrence_kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from recspec.models.layers import history_search, kernels
from recspec.models.layers.events import Events


def gather_rows(
    store: Tensor, ids: Tensor, firsts: Tensor | None, stops: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    rows = ids.long() + (0 if firsts is None else firsts)
    inside = (ids >= 0) & (rows < (len(store) if stops is None else stops))
    vectors = store.index_select(0, rows.where(inside, 0).flatten()).view(*ids.shape, store.shape[1]).to(dtype)
    return vectors.masked_fill(~inside.unsqueeze(-1), torch.nan), rows.where(inside, -1)


def add_rows(into: Tensor, rows: Tensor, gradient: Tensor) -> None:
    into.index_add_(0, rows[rows >= 0], gradient[rows >= 0].to(into.dtype))


def attend(store: Tensor, rows: Tensor, present: Tensor, queries: Tensor, *, mean: bool) -> tuple[Tensor, Tensor]:
    vectors = store[rows].flatten(2)
    scores, sums = history_search.attend(vectors, present, queries)
    if mean:
        more = history_search.mean_with_one_more(vectors, present)
        sums = torch.cat([sums, more.unsqueeze(1)], dim=1)
    return scores, sums


def attend_backward(
    store: Tensor, rows: Tensor, present: Tensor, queries: Tensor, gradient: Tensor, of_store: Tensor, *, mean: bool
) -> Tensor:
    with torch.enable_grad():
        given = store.detach().requires_grad_(), queries.detach().requires_grad_()
        _, sums = attend(given[0], rows, present, given[1], mean=mean)
        slope, of_queries = torch.autograd.grad(sums, given, gradient)
    of_store += slope
    return of_queries


def update_rows(
    rule: kernels.Rule,
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
    inside = (ids >= 0) & (ids < len(weight))
    rows, place = torch.unique(ids[inside], return_inverse=True)
    total = weight.new_zeros(len(rows), weight.shape[1], dtype=torch.float32)
    total.index_add_(0, place, gradient[inside].float())
    own, state = weight[rows].float(), [each[rows] for each in states]
    if rule == "sgd":
        own -= lr * total
    elif rule == "adam":
        assert corrections is not None
        state[0] += (total - state[0]) * (1 - betas[0])
        state[1] += (total.square() - state[1]) * (1 - betas[1])
        own -= lr * state[0] / (((state[1] / corrections[1]).sqrt() + eps) * corrections[0])
    else:
        square = total.square()
        state[0] += square.mean(1, keepdim=True) if rule == "rowwise_adagrad" else square
        own -= lr * total / (state[0].sqrt() + eps)
    weight[rows] = own.to(weight.dtype)
    for table, changed in zip(states, state, strict=True):
        table[rows] = changed


def dots(vectors: Tensor) -> Tensor:
    row, column = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1, device=vectors.device)
    return torch.bmm(vectors, vectors.transpose(1, 2))[:, row, column]


def dots_backward(vectors: Tensor, gradient: Tensor) -> Tensor:
    row, column = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1, device=vectors.device)
    both = gradient.new_zeros(len(vectors), vectors.shape[1], vectors.shape[1])
    both[:, row, column] = both[:, column, row] = gradient
    return torch.bmm(both, vectors)


def recur(gates: Tensor, attention: Tensor | None, weight_h: Tensor, events: Events) -> tuple[Tensor, Tensor, Tensor]:
    hidden = weight_h.shape[1]
    states, recalled = gates.new_zeros(2, events.num_events, hidden)
    state, ends = gates.new_zeros(events.num_rows, hidden), _ends(events)
    for step, place in _steps(events):
        old = state[: len(recalled[place])]
        product, gate = old @ weight_h.t(), gates[place]
        recalled[place] = product[:, 2 * hidden :]
        gate[:, : 2 * hidden] = (gate[:, : 2 * hidden] + product[:, : 2 * hidden]).sigmoid()
        update, reset, candidate = gate.chunk(3, 1)
        candidate += reset * recalled[place]
        candidate.tanh_()
        weight = 1.0 if attention is None else attention[place, None]
        changed = old + weight * update * (candidate - old)
        states[place] = torch.where((step < ends[: len(old)]).unsqueeze(1), changed, old)
        state = torch.cat([states[place], state[len(old) :]])
    return states, torch.empty_like(state).index_copy_(0, _order(events), state), recalled


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
    hidden, ends = weight_h.shape[1], _ends(events)
    slopes = gates.new_zeros(len(gates), 4 * hidden)
    of_attention = None if attention is None else torch.zeros_like(attention)
    carried = gates.new_zeros(events.num_rows, hidden) if of_last is None else of_last[_order(events)]
    before = torch.zeros_like(states)
    places = [place for _, place in _steps(events)]
    for earlier, place in pairwise(places):
        before[place] = states[earlier][: len(states[place])]
    for step, place in reversed([*_steps(events)]):
        update, reset, candidate = gates[place].chunk(3, 1)
        alive = (step < ends[: len(update)]).unsqueeze(1)
        here = carried[: len(update)] + (0.0 if of_states is None else of_states[place])
        here = here.where(alive, 0.0)
        weight = 1.0 if attention is None else attention[place, None]
        of_update = (candidate - before[place]) * here * update
        if of_attention is not None:
            of_attention[place] = of_update.sum(1)
        of_candidate = here * update * weight
        of_inner = of_candidate * (1 - candidate.square())
        of_reset = of_inner * recalled[place] * reset * (1 - reset)
        slopes[place] = torch.cat([of_inner * reset, of_update * weight * (1 - update), of_reset, of_inner], 1)
        own = here - of_candidate + slopes[place, : 3 * hidden] @ weight_h.roll(hidden, 0)
        carried = torch.cat([torch.where(alive, own, carried[: len(own)]), carried[len(own) :]])
    return slopes, of_attention, before[events.sizes[0] if events.sizes else 0 :]


def _steps(events: Events) -> Iterator[tuple[int, slice]]:
    """Every step and its places."""
    stops = [*accumulate(events.sizes)]
    return enumerate(map(slice, [0, *stops], stops))


def _order(events: Events) -> Tensor:
    assert events.order is not None
    return events.order


def _ends(events: Events) -> Tensor:
    """The number of events of each row, from the longest history to the shortest."""
    return events.lengths[_order(events)]
