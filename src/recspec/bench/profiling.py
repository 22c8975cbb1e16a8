"""Where the time of a training step goes, and what a step has to multiply and to move.

The parts of a step (loader, forward, backward, optimizer) are measured by the clock, in steps that nothing watches; the
operations by torch's profiler, in steps of their own, since watching makes them slower.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from recspec.training import TrainingRun

Part = Literal["loader", "forward", "backward", "optimizer"]
PARTS: tuple[Part, ...] = ("loader", "forward", "backward", "optimizer")
"""A step's parts, which leave nothing out. Loader: choosing rows, drawing negatives. Forward: with the gradients of
losses that come with them, as those of NeuMF and of models of histories on a CPU. Backward: with clipping and what
ranks tell each other. Optimizer: up to the next row that is chosen."""

MOST = 12
"""Operations that a profile names one by one."""

PRODUCTS = re.compile(r"(mm|addmm_?|bmm|baddbmm_?|mv|addmv_?|dot|vdot|linear|matmul|_addmm_activation)$")
ROWS = re.compile(
    r"(_?embedding|_?index|gather|scatter|take|_?unique|sort|argsort|_?segment|_?sparse|_?coalesce|bincount|"
    r"searchsorted|repeat_interleave|nonzero|bucketize|fbgemm)"
)
COPIES = re.compile(
    r"(copy_|_?to_copy|to|contiguous|clone|cat|stack|pad|constant_pad_nd|zero_?|zeros(_like)?|ones(_like)?|fill_|full|"
    r"empty(_like|_strided)?|new_\w+|resize_|_?unsafe_view|view|_?reshape\w*|t|transpose|permute|select|slice|split|"
    r"narrow|expand(_as)?|unsqueeze|squeeze|as_strided|detach_?|alias|flatten|unbind|set_|lift_fresh|item|"
    r"_local_scalar_dense)$"
)
OVERHEAD = "Python and dispatch"

Line = dict[str, Any]
"""A line of a table: `what`, `ms` a step, `share` of the step, and what else is known of it."""


@dataclass
class Watch:
    """Seconds of each part of the steps of a run, from the first `now` to the last."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    _part: str = ""
    _since: float = 0.0
    _range: Any = None

    def now(self, part: Part) -> None:
        """From here on the time is the part's."""
        self.stop()
        self._part, self._range = part, record_function(part)
        self._range.__enter__()

    def stop(self) -> None:
        """The time is nobody's."""
        wait(self.device)
        at = time.perf_counter()
        if self._range is not None:
            self.seconds[self._part] += at - self._since
            self._range.__exit__(None, None, None)
        self._since, self._range = at, None


@contextmanager
def watched(run: TrainingRun) -> Iterator[Watch]:
    """A watch that a run's steps switch from part to part; whoever takes the steps says when one ends."""
    watch = Watch(run.ranks.device)
    hooks = [
        run.step.objective.register_forward_pre_hook(lambda *_: watch.now("forward")),
        run.step.objective.register_forward_hook(lambda *_: watch.now("backward")),
        *(
            optimizer.register_step_pre_hook(lambda *_: watch.now("optimizer"))
            for optimizer in run.optimizers.parts.values()
        ),
    ]
    try:
        yield watch
    finally:
        watch.stop()
        for hook in hooks:
            hook.remove()


def endless(run: TrainingRun) -> Iterator[Tensor]:
    """The loss of each step of a run; epochs follow each other."""
    while True:
        yield from run.epoch()
        run.progress.epoch, run.progress.batch = run.progress.epoch + 1, 0


def wait(device: torch.device) -> None:
    """Wait until the device has computed all that it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- where the time goes ---------------------------------------------------------------------------------------------


def profile_steps(run: TrainingRun, taken: Iterator[Tensor], steps: int) -> dict[str, Any]:
    """Twice `steps` steps more of a run, first by the clock, then by torch's profiler; to be called after warm-up.

    `taken` are the run's `endless` steps.

    `parts` are the step's parts by the clock. `operations` are groups of operations, as shares of the same step: loader
    and optimizer as they are, and forward and backward split by what their operations do. `Python and dispatch` is what
    is left of those two: Python, autograd's own work, and what torch does between operations. `largest` are the
    operations of forward and backward that take most, by torch's names.
    Raises:
        ValueError: if `steps` is below 1.
    """
    if steps < 1:
        raise ValueError(f"{steps} steps: expected 1 or more")
    parts = _by_the_clock(run, taken, steps)
    step = sum(parts.values())
    events = _recorded(run, taken, steps)
    seconds, calls = _by_operation(events, on_gpu=run.ranks.device.type == "cuda")
    # Watched operations take longer than unwatched ones; together they never take longer than the clock says.
    room = (parts["forward"] + parts["backward"]) * steps
    scale = min(1.0, room / max(1e-12, sum(seconds.values()))) / steps
    groups = {"loader": parts["loader"], "optimizer": parts["optimizer"]}
    for name, spent in seconds.items():
        groups[group_of(name)] = groups.get(group_of(name), 0.0) + scale * spent
    groups[OVERHEAD] = max(0.0, step - sum(groups.values()))
    largest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:MOST]
    return {
        "steps": steps,
        "ms_per_step": round(1000 * step, 3),
        "parts": [_line(part, parts[part], step) for part in PARTS],
        "operations": [_line(name, groups[name], step) for name in sorted(groups, key=groups.__getitem__)[::-1]],
        "largest": [
            {
                **_line(name, scale * seconds[name], step),
                "group": group_of(name),
                "calls": round(calls[name] / steps, 1),
            }
            for name in largest
        ],
    }


def _line(what: str, seconds: float, step: float) -> Line:
    return {"what": what, "ms": round(1000 * seconds, 3), "share": round(seconds / step, 4)}


def _by_the_clock(run: TrainingRun, taken: Iterator[Tensor], steps: int) -> dict[str, float]:
    """Seconds a step of each part."""
    with watched(run) as watch:
        _take(taken, steps, watch)
    return {part: seconds / steps for part, seconds in watch.seconds.items()}


def _recorded(run: TrainingRun, taken: Iterator[Tensor], steps: int) -> list[FunctionEvent]:
    """What torch's profiler saw of some steps, without the kernels of a GPU: their time stands at who started them."""
    on_gpu = run.ranks.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with watched(run) as watch, profile(activities=activities) as record:
        _take(taken, steps, watch)
    return [event for event in record.events() or () if event.device_type == DeviceType.CPU]


def _take(taken: Iterator[Tensor], steps: int, watch: Watch) -> None:
    """Some steps, watched from the first row chosen to the last weight updated."""
    for _ in range(steps):
        watch.now("loader")
        next(taken)
    watch.stop()


def _by_operation(events: Sequence[FunctionEvent], *, on_gpu: bool) -> tuple[dict[str, float], Counter[str]]:
    """Seconds of each operation of forward and backward, without what it called, and how often it was called.

    On a GPU, seconds of the kernels that it started.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for event in events:
        if _part_of(event) in ("loader", "optimizer") or group_of(event.name) == OVERHEAD:
            continue
        alone = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        seconds[event.name] += 1e-6 * max(0.0, float(alone))
        calls[event.name] += 1
    return dict(seconds), calls


def _part_of(event: FunctionEvent) -> str:
    """The part of the step that an operation was called in; a GPU's backward pass is in a thread of its own."""
    while event.cpu_parent is not None:
        event = event.cpu_parent
    return event.name if event.name in PARTS else "backward"


def group_of(name: str) -> str:
    """What an operation does, by torch's name of it."""
    space, _, own = name.rpartition("::")
    if space not in ("aten", "fbgemm", "mkldnn"):
        return OVERHEAD
    if space == "mkldnn" or PRODUCTS.match(own):
        return "matrix products"
    if space == "fbgemm" or ROWS.match(own):
        return "rows of tables"
    return "copies" if COPIES.match(own) else "elementwise"


# --- what a step multiplies and moves -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What a step has to do, however fast it is done.

    `products` are the floating-point operations of all its matrix products, two a multiplication and addition.

    The rest are bytes that a step has to read or write, each part of them as the steps' formulas need it at least.

    A weight with a whole gradient is read in the forward and in the backward pass, its gradient is written and read,
    and weight and optimizer state are read and written: 6 n + 2 s for n bytes of weights and s of state. Of a table
    whose gradient holds the rows seen alone, each id's row is read and its gradient written and read, and each distinct
    row and its state are read and written: 3 k + 2 u + 2 s for k bytes of rows looked up, u of distinct ones and s of
    their state; ids do not count. An activation, which is what autograd keeps for the backward pass and is no weight,
    is written and read: 2 a. What is made and forgotten within a pass doesn't count, nor does the batch's own way from
    the data set, nor a table that FBGEMM updates in the backward pass. A cache may spare a step some of it.
    """

    products: int
    weights: int
    tables: int
    activations: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.weights + self.tables + self.activations


def work_of_step(run: TrainingRun, taken: Iterator[Tensor]) -> Work:
    """What one step more of a run does; `taken` are its `endless` steps."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in run.model.parameters()}
    kept: dict[tuple[int, int], int] = {}
    moved: dict[Tensor, tuple[int, int]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
        if storage and storage not in weights:
            kept[tensor.data_ptr(), tensor.numel()] = tensor.numel() * tensor.element_size()
        return tensor

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            # An optimizer's step may call that of the class it extends, whose hooks are these too.
            moved.update({weight: _moved(optimizer, weight) for weight in group["params"] if weight.grad is not None})

    hooks = [optimizer.register_step_pre_hook(look) for optimizer in run.optimizers.parts.values()]
    in_place = dict.fromkeys((torch.ops.aten.addmm_, torch.ops.aten.baddbmm_), _added_product)
    try:
        counter = FlopCounterMode(display=False, custom_mapping=in_place)
        with counter as counted, saved_tensors_hooks(keep, lambda tensor: tensor):
            next(taken)
    finally:
        for hook in hooks:
            hook.remove()
    weight_bytes, table_bytes = (sum(each) for each in zip((0, 0), *moved.values(), strict=True))
    return Work(counted.get_total_flops(), weight_bytes, table_bytes, 2 * sum(kept.values()))


def _added_product(_: object, left: Sequence[int], right: Sequence[int], **__: object) -> int:
    """Floating-point operations of a product that is added to something: (..., n, k) x (..., k, m)."""
    return 2 * math.prod(left) * right[-1]


def _moved(optimizer: torch.optim.Optimizer, weight: Tensor) -> tuple[int, int]:
    """Bytes of a parameter's weights, gradient and state that are moved: of a whole gradient, of a table's rows."""
    state = [each for each in optimizer.state.get(weight, {}).values() if isinstance(each, Tensor) and each.dim()]
    state_bytes = sum(each.numel() * each.element_size() for each in state)
    gradient = cast(Tensor, weight.grad)
    if not gradient.is_sparse:
        return 6 * weight.numel() * weight.element_size() + 2 * state_bytes, 0
    row = weight[0].numel() * weight.element_size()
    ids = gradient._indices()[0]
    distinct = len(torch.unique(ids))
    return 0, 3 * len(ids) * row + 2 * distinct * (row + state_bytes // len(weight))
