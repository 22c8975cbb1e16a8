"""Backward passes written by hand, each at least a tenth faster in a training step than plain torch.

Every class here has the gradient of a formula in plain torch, to which `tests/layers/test_hand_written.py` holds it.
docs/decisions.md has the ratios. Callers ask `may_replace` first, and run plain modules where it says no.

Shapes: B rows; T events; D width of an event's vector; H of a state; F vectors a row; R rows of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recspec.models.layers import kernels, recurrence_kernels
from recspec.models.layers.blocks import Tail, relu_and_drop_
from recspec.models.layers.events import Events
from recspec.models.layers.gathered_rows import sparse_rows


def may_replace(*modules: nn.Module) -> bool:
    """Whether hand-written code may run instead of these modules and all modules in them.

    It may not if one has a hook, another class than torch's or ours, or a `forward` of its own, because these expect a
    call. It may not under a transform of `torch.func`, which knows only torch's own operations. Hooks of all modules at
    once do not count: profilers set them, and a profile must not change the run.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    return not torch._C._are_functorch_transforms_active() and all(map(_is_plain, modules))


def _is_plain(module: nn.Module | None) -> bool:
    if module is None:
        return True
    held = vars(module)
    if "forward" in held or not type(module).__module__.startswith(("torch.nn.modules.", "recspec.")):
        return False
    if held["_forward_hooks"] or held["_forward_pre_hooks"] or held["_backward_hooks"] or held["_backward_pre_hooks"]:
        return False
    return all(map(_is_plain, held["_modules"].values()))


@contextmanager
def own_precision(x: Tensor, events: Events | None = None) -> Iterator[None]:
    """Compute products of tensors in the parameters' own type until the end of the block.

    On a CPU, torch sends products of tf32 or bf16 precision through oneDNN. That compiles a kernel for every new number
    of rows, in 1.0 to 1.5 ms; the product of 1024 rows takes 0.06. So products go through the BLAS, except those over
    `events` in even steps. A compiled program has the precision of the process, as it cannot change that.
    """
    with torch.autocast(x.device.type, enabled=False):
        stays = x.device.type != "cpu" or torch.compiler.is_compiling() or (events is not None and events.in_even_steps)
        before = "highest" if stays else torch.get_float32_matmul_precision()
        if before == "highest":
            yield
            return
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


class EventWeights(torch.autograd.Function):
    """The weights of `AttentionUnit`, for a block of rows of a step at a time.

    Layers over all events move every activation and its gradient through memory several times. Here they leave the
    cache once, for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, events: Events, kind: str, *given: Tensor) -> Tensor:
        happened, target, of_targets, by_event, by_product, *tail = given
        order = cast(Tensor, events.order)
        target, of_targets = target.index_select(0, order), of_targets.index_select(0, order)
        kept = [happened.new_empty(len(happened), len(each)) for each in (by_event, *tail[:-2:2])]
        blocks, event, product = events.blocks, by_event.t(), by_product.t()
        scratch, network = blocks.scratch(happened), Tail(kind, tail)
        weights = happened.new_empty(len(happened))
        for rows, x, own, *parts in zip(blocks.rows, *map(blocks.cut, (happened, weights, *kept)), strict=True):
            first = torch.addmm(of_targets[rows], x, event, out=parts[0])
            first.addmm_(torch.mul(x, target[rows], out=scratch("joined", *x.shape)), product)
            network.forward(parts, own)
        ctx.save_for_backward(happened, target, by_event, by_product, *tail, *kept)
        ctx.events, ctx.kind, ctx.num_tail = events, kind, len(tail)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        happened, target, by_event, by_product, *rest = ctx.saved_tensors
        network, kept = Tail(ctx.kind, rest[: ctx.num_tail]), rest[ctx.num_tail :]
        events: Events = ctx.events
        of_happened, of_target = torch.empty_like(happened), torch.zeros_like(target)
        of_first = target.new_zeros(len(target), len(by_event))
        of_by_event, of_by_product = torch.zeros_like(by_event), torch.zeros_like(by_product)
        blocks, scratch = events.blocks, events.blocks.scratch(happened)
        cut = map(blocks.cut, (happened, of_happened, gradient, *kept))
        with own_precision(happened, events):
            for rows, x, of_x, of_own, *parts in zip(blocks.rows, *cut, strict=True):
                own = target[rows]
                slope = network.backward(of_own, parts, scratch)
                of_first[rows].add_(slope)
                turned = slope.t()
                of_by_event.addmm_(turned, x)
                joined = torch.mul(x, own, out=scratch("joined", *x.shape))
                of_by_product.addmm_(turned, joined)
                # f = E h + P (h * t): df/dh = E + P diag(t), and df/dt = P diag(h).
                of_joined = torch.mm(slope, by_product, out=joined)
                of_target[rows].addcmul_(of_joined, x)
                torch.mm(slope, by_event, out=of_x).addcmul_(of_joined, own)
        rank = cast(Tensor, events.rank)
        to_rows = of_target.index_select(0, rank), of_first.index_select(0, rank)
        return None, None, of_happened, *to_rows, of_by_event, of_by_product, *network.slopes


class NextEventLoss(torch.autograd.Function):
    """The loss of `NextEvent`, for a block of rows of a step at a time.

    The loss is one number, so a block's logits determine its gradient but for a factor. It is computed at once, and no
    activation is kept.
    """

    @staticmethod
    def forward(ctx: Any, events: Events, *given: Tensor) -> Tensor:
        states, happened, sampled, by_state, by_event, bias, *tail = given
        slopes = [torch.zeros_like(each) for each in given[:6]]
        of_states, of_happened, of_sampled, of_by_state, of_by_event, of_bias = slopes
        share = ((events.lengths - 1).clamp(min=1) * max(1, events.num_rows)).to(states.dtype).reciprocal()
        share = share.index_select(0, cast(Tensor, events.order))
        total, scratch = states.new_zeros(()), events.blocks.scratch(states)
        network, blocks = Tail("sigmoid", tail), events.blocks
        events_of_block = map(blocks.cut, (happened, sampled, of_happened, of_sampled))
        states_before = map(blocks.cut_before, (states, of_states))
        held = [None] * len(blocks.rows) if events.held is None else blocks.cut(events.held)
        for rows, first_step, there, right_event, wrong_event, of_right, of_wrong, state, of_state in zip(
            blocks.rows, blocks.first, held, *events_of_block, *states_before, strict=True
        ):
            if first_step:
                continue
            own = share[rows] if there is None else share[rows] * there
            size = len(own)
            known = torch.addmm(bias, state, by_state.t(), out=scratch("known", size, len(bias)))
            first = scratch("0", 2 * size, len(bias))  # both answers share the network's tensors
            right, wrong = slice(0, size), slice(size, 2 * size)
            for half, each in ((right, right_event), (wrong, wrong_event)):
                torch.addmm(known, each, by_event.t(), out=first[half])
            layers = network.layers(first, scratch)
            logits = network.forward(layers, scratch("logits", 2 * size, 1).squeeze(1))
            total += torch.dot(F.softplus(-logits[right]) + F.softplus(logits[wrong]), own)
            # d softplus(-x) / dx = sigmoid(x) - 1, and d softplus(x) / dx = sigmoid(x).
            gradient = logits.sigmoid_()
            gradient[right] -= 1
            gradient.view(2, size).mul_(own)
            slope = network.backward(gradient, layers, scratch)
            for half, each, of_each in ((right, right_event, of_right), (wrong, wrong_event, of_wrong)):
                of_by_event.addmm_(slope[half].t(), each)
                torch.mm(slope[half], by_event, out=of_each)
            of_known = torch.add(slope[right], slope[wrong], out=known)
            of_by_state.addmm_(of_known.t(), state)
            of_bias += of_known.sum(0)
            torch.mm(of_known, by_state, out=of_state)
        slopes += network.slopes
        ctx.save_for_backward(*slopes)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "this loss computes its gradients with it and has no second derivatives (create_graph); use torch's "
                "binary cross-entropy of the model's logits instead"
            )
        scale = gradient.item()  # mostly 1
        return None, *(ctx.saved_tensors if scale == 1.0 else (slope * gradient for slope in ctx.saved_tensors))


_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input


class Recurrence(torch.autograd.Function):
    """`Gru` over events in the jagged form.

    A block of rows takes all its steps before the next block does, so that it stays in the cache. Blocks also compute
    the inputs' part of the gates and the gradients of weights: one product for all steps would read the events from
    memory again, at half the speed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, attention: Tensor | None, weight_x: Tensor, weight_h: Tensor, bias: Tensor, events: Events
    ) -> tuple[Tensor, Tensor]:
        hidden = weight_h.shape[1]
        both = 2 * hidden
        gates = x.new_empty(len(x), both)  # u and r
        candidates, recalled, states = (x.new_empty(len(x), hidden) for _ in range(3))  # recalled: U_c h
        x_gates, x_candidate, h_gates, h_candidate = (
            each for weight in (weight_x, weight_h) for each in (weight[:both].t(), weight[both:].t())
        )
        of_gates, of_candidate = bias[:both], bias[both:]
        blocks, scratch = events.blocks, events.blocks.scratch(x)
        kept = (x, gates, *gates.split_with_sizes([hidden, hidden], 1), candidates, recalled, states)
        for first, weight, old, own, gate, u, r, c, memory, state in zip(
            blocks.first,
            [None] * len(blocks.rows) if attention is None else blocks.cut(attention.unsqueeze(1)),
            blocks.cut_before(states),
            *map(blocks.cut, kept),
            strict=True,
        ):
            torch.addmm(of_gates, own, x_gates, out=gate)
            torch.addmm(of_candidate, own, x_candidate, out=c)
            if first:
                gate.sigmoid_()
            else:
                gate.addmm_(old, h_gates).sigmoid_()
                c.addcmul_(r, torch.mm(old, h_candidate, out=memory))
            c.tanh_()
            update = u if weight is None else torch.mul(u, weight, out=scratch("update", *state.shape))
            _ = torch.mul(c, update, out=state) if first else torch.lerp(old, c, update, out=state)
        ctx.save_for_backward(x, attention, weight_x, weight_h, gates, candidates, recalled, states)
        ctx.events = events
        ctx.set_materialize_grads(False)
        return states, last_states(states, events)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_states: Tensor | None, of_last: Tensor | None) -> tuple[Tensor | None, ...]:
        x, attention, weight_x, weight_h, gates, candidates, recalled, states = ctx.saved_tensors
        events: Events = ctx.events
        hidden = weight_h.shape[1]
        # The gradient of each row's state so far (B, H).
        if of_last is None or events.held is not None:
            carried = x.new_zeros(events.num_rows, hidden)
        else:
            carried = of_last.index_select(0, cast(Tensor, events.order))
        if of_last is not None and events.held is not None:  # steps go on behind a row's last event
            of_last = of_last.masked_fill((events.lengths == 0).unsqueeze(1), 0.0)
            of_states = torch.zeros_like(states) if of_states is None else of_states.clone()
            of_states.index_add_(0, _last_places(events), of_last)
        of_x, of_attention = torch.empty_like(x), None if attention is None else torch.empty_like(attention)
        by_x = torch.cat([weight_x[2 * hidden :], weight_x[: 2 * hidden]])
        of_by_x, of_weight_h, of_bias = torch.zeros_like(by_x), torch.zeros_like(weight_h), x.new_zeros(3 * hidden)
        blocks, scratch = events.blocks, events.blocks.scratch(x)
        none = [None] * len(blocks.rows)
        parts = zip(
            blocks.rows,
            blocks.first,
            none if of_states is None else blocks.cut(of_states),
            none if attention is None else blocks.cut(attention.unsqueeze(1)),
            none if of_attention is None else blocks.cut(of_attention),
            *map(blocks.cut, (x, of_x)),
            blocks.cut_before(states),
            *map(blocks.cut, (*gates.split_with_sizes([hidden, hidden], 1), candidates, recalled)),
            strict=True,
        )
        with own_precision(x, events):
            for rows, first, of_state, weight, of_weight, own, of_own, old, u, r, c, memory in reversed([*parts]):
                here = carried[rows]
                if of_state is not None:
                    here += of_state
                # The gradients of c, u, r and U_c h: the first three reach x, the last three the state.
                slope = scratch("slope", len(here), 4 * hidden)
                of_c, of_u, of_r, of_recalled = slope.split_with_sizes([hidden] * 4, 1)
                update, of_update = u, scratch("of_update", *here.shape)
                _ = torch.mul(c, here, out=of_update) if first else torch.sub(c, old, out=of_update).mul_(here)
                if weight is not None:
                    update = torch.mul(of_update, u, out=scratch("weighted", *here.shape))
                    torch.sum(update, 1, out=of_weight)
                    of_update *= weight
                    torch.mul(u, weight, out=update)
                of_candidate = torch.mul(here, update, out=scratch("of_candidate", *here.shape))
                _sigmoid_backward(of_update, u, grad_input=of_u)
                _tanh_backward(of_candidate, c, grad_input=of_c)
                if first:
                    of_r.zero_()
                else:
                    here -= of_candidate
                    _sigmoid_backward(torch.mul(of_c, memory, out=of_candidate), r, grad_input=of_r)
                    torch.mul(of_c, r, out=of_recalled)
                    recurrent = slope[:, hidden:]
                    here.addmm_(recurrent, weight_h)
                    of_weight_h.addmm_(recurrent.t(), old)
                inputs = slope[:, : 3 * hidden]
                torch.mm(inputs, by_x, out=of_own)
                of_by_x.addmm_(inputs.t(), own)
                of_bias += inputs.sum(0)
        of_weight_x, of_bias = (torch.cat([each[hidden:], each[:hidden]]) for each in (of_by_x, of_bias))
        return of_x, of_attention, of_weight_x, of_weight_h, of_bias, None


class FusedRecurrence(torch.autograd.Function):
    """`Recurrence` on a GPU: one kernel for all steps, one for their gradients, and products over all events at once.

    Events may be of a narrower type than the weights; states and sums are float32.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, attention: Tensor | None, weight_x: Tensor, weight_h: Tensor, bias: Tensor, events: Events
    ) -> tuple[Tensor, Tensor]:
        gates = torch.addmm(bias, x.to(bias.dtype), weight_x.t())
        weights = None if attention is None else attention.to(bias.dtype).contiguous()
        states, last, recalled = recurrence_kernels.recur(gates, weights, weight_h.contiguous(), events)
        ctx.save_for_backward(x, attention, weight_x, weight_h, gates, recalled, states)
        ctx.events = events
        ctx.set_materialize_grads(False)
        return states, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_states: Tensor | None, of_last: Tensor | None) -> tuple[Tensor | None, ...]:
        x, attention, weight_x, weight_h, gates, recalled, states = ctx.saved_tensors
        events: Events = ctx.events
        hidden, first = weight_h.shape[1], events.sizes[0] if events.sizes else 0
        weights = None if attention is None else attention.to(gates.dtype).contiguous()
        given = gates, weights, weight_h.contiguous(), states, recalled, events
        slopes, of_weights, before = recurrence_kernels.recur_backward(of_states, of_last, *given)
        # Columns: the gradients of U_c h, u, r and c. The first three reach the state, the last three x.
        recurrent, inputs = slopes[first:, : 3 * hidden], slopes[:, hidden:]
        with own_precision(x, events):
            of_weight_h = torch.mm(recurrent.t(), before).roll(-hidden, 0)
            of_x = torch.mm(inputs, weight_x).to(x.dtype) if ctx.needs_input_grad[0] else None
            of_weight_x = torch.mm(inputs.t(), x.to(gates.dtype))
        of_attention = None if of_weights is None or attention is None else of_weights.to(attention.dtype)
        return of_x, of_attention, of_weight_x, of_weight_h, inputs.sum(0), None


def last_states(states: Tensor, events: Events) -> Tensor:
    """The state after each row's last event: (T, H) -> (B, H); zeros for an empty history."""
    if not events.sizes:
        return states.new_zeros(events.num_rows, states.shape[1])
    found = states.index_select(0, _last_places(events))
    full = events.sizes[0] == events.num_rows and events.held is None
    return found if full else found.masked_fill((events.lengths == 0).unsqueeze(1), 0.0)


def _last_places(events: Events) -> Tensor:
    """The place of each row's last event (B,); any place for an empty history."""
    starts, rank = cast(Tensor, events.starts), cast(Tensor, events.rank)
    places = starts.index_select(0, (events.lengths - 1).clamp(min=0)) + rank
    # An empty history stands behind all others; its place may lie outside the first step.
    return places.clamp(max=events.num_events - 1)


class ReluDropout(torch.autograd.Function):
    """`mlp.relu_dropout_` on a CPU.

    The backward pass overwrites the incoming gradient. So the operation that uses the output must make a gradient of
    its own, as a product does; an addition would pass the same gradient to its other operand.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: float) -> Tensor:
        relu_and_drop_(x.view(-1), keep)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        # Nothing else uses the gradient of a matrix product; overwriting it saves a pass over fresh memory.
        if gradient.is_contiguous() and gradient._base is None:
            return torch.ops.aten.threshold_backward.grad_input(gradient, y, 0, grad_input=gradient), None
        return torch.ops.aten.threshold_backward(gradient, y, 0), None


class DenseLayers(torch.autograd.Function):
    """`mlp.dense` in a type, from weight and bias of each layer; the first `hidden` layers have ReLU and dropout.

    On a GPU that takes half the launches of torch's operations. The product adds the bias and applies the ReLU;
    parameters change their type together, and so do their gradients. The backward pass needs no masks: a unit that
    dropout or ReLU set to 0 passes no gradient, and the products multiply by dropout's factor.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, is_raw: bool, dtype: torch.dtype, dropout: float, hidden: int, *parameters: Tensor
    ) -> Tensor:
        def dropped(y: Tensor) -> Tensor:
            return torch.native_dropout(y, dropout, True)[0] if dropout else y

        narrow = _narrowed(parameters, dtype, x.shape[1])
        kept = [dropped(x.relu().to(dtype)) if is_raw else x.to(dtype)]
        for place, (weight, bias) in enumerate(zip(narrow[::2], narrow[1::2], strict=True)):
            if place < hidden:
                kept.append(dropped(torch._addmm_activation(bias, kept[-1], weight.t())))
            else:
                kept.append(torch.addmm(bias, kept[-1], weight.t()))
        ctx.save_for_backward(*kept, *narrow[::2])
        ctx.is_raw, ctx.hidden, ctx.scale, ctx.dtype = is_raw, hidden, 1 / (1 - dropout), x.dtype
        ctx.wide, ctx.columns = parameters[0].dtype, parameters[0].shape[1]
        return kept[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        number = len(ctx.saved_tensors) // 2
        kept, weights = ctx.saved_tensors[: number + 1], ctx.saved_tensors[number + 1 :]
        of_weights, of_biases = list[Tensor](), list[Tensor]()
        for place in reversed(range(number)):
            scale = ctx.scale if place < ctx.hidden else 1.0
            if place < ctx.hidden:
                gradient = torch.ops.aten.threshold_backward(gradient, kept[place + 1], 0)
            of_weights.insert(0, _product(gradient.t(), kept[place], scale))
            of_biases.insert(0, gradient.sum(0, dtype=ctx.wide))
            if place or ctx.needs_input_grad[0]:
                below = ctx.scale if ctx.is_raw and not place else 1.0
                gradient = _product(gradient, weights[place], scale * below)
        if ctx.scale != 1.0 and ctx.hidden:
            torch._foreach_mul_(of_biases[: ctx.hidden], ctx.scale)
        of_first = of_weights[0][:, : ctx.columns].to(ctx.wide).contiguous()
        of_weights = [of_first, *_together(of_weights[1:], ctx.wide)]
        slopes = [each for pair in zip(of_weights, of_biases, strict=True) for each in pair]
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = torch.ops.aten.threshold_backward(gradient, kept[0], 0) if ctx.is_raw else gradient
            of_x = of_x.to(ctx.dtype)
        return of_x, None, None, None, None, *slopes


def _narrowed(parameters: Sequence[Tensor], dtype: torch.dtype, columns: int) -> list[Tensor]:
    """The parameters in a type, the first one with so many columns."""
    first, rest = parameters[0], list(parameters[1:])
    if columns > first.shape[1]:
        padded = first.new_zeros(len(first), columns, dtype=dtype)
        padded[:, : first.shape[1]].copy_(first)
        return [padded, *_together(rest, dtype)]
    return _together([first, *rest], dtype)


def _together(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors in a type, by one copy of all."""
    if not tensors or tensors[0].dtype == dtype:
        return tensors
    found = [torch.empty_like(each, dtype=dtype) for each in tensors]
    torch._foreach_copy_(found, tensors)
    return found


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.mm(a, b) if scale == 1.0 else torch.addmm(a.new_empty(()), a, b, beta=0, alpha=scale)


class Gather(torch.autograd.Function):
    """`kernels.gather_rows`; the gradient is of the store, or a COO tensor of the rows seen, whose ids may repeat."""

    @staticmethod
    def forward(
        ctx: Any, store: Tensor, ids: Tensor, firsts: Tensor, stops: Tensor, dtype: torch.dtype, sparse: bool
    ) -> Tensor:
        vectors, rows = kernels.gather_rows(store, ids, firsts, stops, dtype)
        ctx.save_for_backward(rows)
        ctx.shape, ctx.dtype, ctx.sparse = store.shape, store.dtype, sparse
        return vectors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (rows,) = ctx.saved_tensors
        if ctx.sparse:
            values = gradient.to(ctx.dtype).reshape(rows.numel(), -1)  # in this order, one copy does both
            found = sparse_rows(rows, values, ctx.shape)
        else:
            found = gradient.new_zeros(ctx.shape, dtype=torch.promote_types(ctx.dtype, torch.float32))
            kernels.add_rows(found, rows.flatten(), gradient.reshape(rows.numel(), ctx.shape[1]))
            found = found.to(ctx.dtype)
        return found, None, None, None, None, None


class Dots(torch.autograd.Function):
    """`kernels.dots` with the gradient `kernels.dots_backward`."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        ctx.save_for_backward(vectors)
        return kernels.dots(vectors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (vectors,) = ctx.saved_tensors
        return kernels.dots_backward(vectors, gradient)


class RowsOf(torch.autograd.Function):
    """Rows of a table on a CPU; the gradient sums equal ids in sorted order, as sparse gradients do.

    torch adds gradients one by one at random places, which takes five times as long for 400,000 ids of 16 numbers.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, store: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = store.shape
        return F.embedding(ids, store)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        rows, order, starts = kernels.segments(ids.flatten())
        sums = F.embedding_bag(order, gradient.reshape(-1, ctx.shape[1]), starts, mode="sum")
        return None, gradient.new_zeros(ctx.shape).index_copy_(0, rows, sums)


LOGITS = 3 << 18
"""Logits of rows x classes that a CPU holds at once; they stay in the cache between products and softmax."""
LOGITS_OF_GPU = 1 << 28
TINY = 1e-30
"""Share of a target below which its logarithm is computed from the logits."""
TOGETHER = 4
"""Blocks of rows whose share of the classes' gradient is one product."""


class SoftmaxLoss(torch.autograd.Function):
    """The sum of -log softmax(rows classes')[target] over rows (P, d), for classes (N, d) and targets (P,).

    Plain torch keeps the logits (P, N), their softmax and its gradient; here a block of them stays in the cache. On a
    GPU, a row's loss is at most 69 nats, -log(`TINY`): looking for larger ones would wait for it. Gradients are exact.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, classes: Tensor, targets: Tensor) -> Tensor:
        device, wide = rows.device.type, classes.dtype
        is_half = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
        with torch.autocast(device, enabled=False):
            exact_rows = rows.to(wide)
            ours, theirs = (each.bfloat16() if is_half else each for each in (exact_rows, classes))
            of_rows = torch.empty_like(exact_rows) if any(ctx.needs_input_grad) else None
            of_classes = torch.zeros_like(classes) if of_rows is not None else None
            chosen = torch.empty(len(rows), dtype=wide, device=rows.device)
            most = LOGITS if device == "cpu" else LOGITS_OF_GPU
            step = max(16, most // len(classes) // 16 * 16)
            shares = ours.new_empty(min(len(ours), TOGETHER * step), len(classes))
            for start in range(0, len(ours), TOGETHER * step):
                whole = slice(start, min(len(ours), start + TOGETHER * step))
                for first in range(start, whole.stop, step):
                    part = slice(first, min(whole.stop, first + step))
                    share = shares[part.start - start : part.stop - start]
                    torch.softmax(ours[part] @ theirs.t(), 1, out=share)
                    chosen[part] = share.gather(1, targets[part, None]).squeeze(1)
                    if of_rows is not None:
                        of_rows[part] = share @ theirs
                if of_classes is not None:
                    of_classes += shares[: whole.stop - start].t() @ ours[whole]
            if of_rows is not None and of_classes is not None:
                of_rows -= classes[targets]
                of_classes.index_add_(0, targets, exact_rows, alpha=-1)
            loss = -chosen.clamp(min=TINY).log().sum()
            if device == "cpu" and len(tiny := torch.nonzero(chosen < TINY).squeeze(1)):
                logits = exact_rows[tiny] @ classes.t()
                logs = logits.log_softmax(1).gather(1, targets[tiny, None])
                loss += len(tiny) * math.log(TINY) - logs.sum()
        ctx.of_rows, ctx.of_classes, ctx.dtype = of_rows, of_classes, rows.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return (ctx.of_rows * gradient).to(ctx.dtype), ctx.of_classes * gradient, None
