"""Where the time of a training step goes, and what a step has to multiply and to move.

The parts of a step (loader, forward, backward, optimizer) are measured by the clock, without torch's profiler. The
profiler measures the operations in steps of their own, because it slows them down.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
"""A step's parts, which leave nothing out. Loader: choosing rows, drawing negatives. Forward: also the gradients that
some losses compute at once, as those of NeuMF and of models of histories on a CPU. Backward: also clipping and the
exchange between ranks. Optimizer: up to the choice of the next rows."""

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


@dataclass
class Watch:
    """Seconds of each part of a run's steps."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    _part: str = ""
    _since: float = 0.0
    _range: Any = None

    def now(self, part: Part) -> None:
        """Count the time from now on for this part."""
        self.stop()
        self._part, self._range = part, record_function(part)
        self._range.__enter__()

    def stop(self) -> None:
        """Count the time from now on for no part."""
        wait(self.device)
        at = time.perf_counter()
        if self._range is not None:
            self.seconds[self._part] += at - self._since
            self._range.__exit__(None, None, None)
        self._since, self._range = at, None


@contextmanager
def watched(run: TrainingRun) -> Iterator[Watch]:
    """A watch that a run's steps switch from part to part; the caller starts each step's first part."""
    watch = Watch(run.ranks.device)
    with ExitStack() as hooks:
        hooks.callback(run.step.objective.register_forward_pre_hook(lambda *_: watch.now("forward")).remove)
        hooks.callback(run.step.objective.register_forward_hook(lambda *_: watch.now("backward")).remove)
        for optimizer in run.optimizers.parts.values():
            hooks.callback(optimizer.register_step_pre_hook(lambda *_: watch.now("optimizer")).remove)
        hooks.callback(watch.stop)
        yield watch


def endless(run: TrainingRun) -> Iterator[Tensor]:
    """The loss of each step of a run; epochs follow each other."""
    while True:
        yield from run.epoch()
        run.progress.epoch, run.progress.batch = run.progress.epoch + 1, 0


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- where the time goes ---------------------------------------------------------------------------------------------


def profile_steps(run: TrainingRun, taken: Iterator[Tensor], steps: int) -> dict[str, Any]:
    """Take twice `steps` steps more of a run, first by the clock, then under torch's profiler; call it after warm-up.

    `taken` are the run's `endless` steps. The result holds three tables. `parts` are the step's parts by the clock.
    `operations` divides the same step: loader and optimizer are as above, forward and backward are divided by what
    their operations do. `Python and dispatch` is the rest of those two: Python, autograd's own work, and torch's work
    between operations. `largest` are the slowest operations of forward and backward, by torch's names.

    Raises:
        ValueError: if `steps` is below 1.
    """
    if steps < 1:
        raise ValueError(f"{steps} steps: expected 1 or more")
    with watched(run) as watch:
        _take(taken, steps, watch)
    parts = {part: seconds / steps for part, seconds in watch.seconds.items()}
    step = sum(parts.values())
    seconds, calls = _by_operation(_recorded(run, taken, steps), on_gpu=run.ranks.device.type == "cuda")
    # Watched operations take longer than unwatched ones; together they never take longer than the clock says.
    room = (parts["forward"] + parts["backward"]) * steps
    scale = min(1.0, room / max(1e-12, sum(seconds.values()))) / steps
    groups = defaultdict[str, float](float, {name: parts[name] for name in ("loader", "optimizer")})
    for name, spent in seconds.items():
        groups[group_of(name)] += scale * spent
    groups[OVERHEAD] = max(0.0, step - sum(groups.values()))
    largest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:MOST]
    return {
        "steps": steps,
        "ms_per_step": round(1000 * step, 3),
        "parts": [_line(part, parts[part], step) for part in PARTS],
        "operations": [_line(name, groups[name], step) for name in sorted(groups, key=groups.__getitem__)[::-1]],
        "largest": [
            _line(name, scale * seconds[name], step) | {"group": group_of(name), "calls": round(calls[name] / steps, 1)}
            for name in largest
        ],
    }


def _line(what: str, seconds: float, step: float) -> dict[str, Any]:
    return {"what": what, "ms": round(1000 * seconds, 3), "share": round(seconds / step, 4)}


def _recorded(run: TrainingRun, taken: Iterator[Tensor], steps: int) -> list[FunctionEvent]:
    """Events of some steps under torch's profiler, without a GPU's kernels: their starters hold the kernels' time."""
    on_gpu = run.ranks.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with watched(run) as watch, profile(activities=activities, acc_events=True) as record:
        _take(taken, steps, watch)
    return [event for event in record.events() or () if event.device_type == DeviceType.CPU]


def _take(taken: Iterator[Tensor], steps: int, watch: Watch) -> None:
    """Take some steps under a watch."""
    for _ in range(steps):
        watch.now("loader")
        next(taken)
    watch.stop()


def _by_operation(events: Sequence[FunctionEvent], *, on_gpu: bool) -> tuple[dict[str, float], Counter[str]]:
    """Seconds of each operation of forward and backward without the operations inside it, and the number of calls.

    On a GPU, seconds of the kernels that the operation started.
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
    """The work that a step's formulas need at least.

    `products` are the floating-point operations of all matrix products, two for a multiplication and addition. The
    other numbers are bytes read and written; a cache may spare a step some of them.

    - A weight with a whole gradient is read in both passes, its gradient is written and read, and weight and optimizer
      state are read and written: 6 n + 2 s for n bytes of weights and s of state.
    - Of a table whose gradient holds only the rows seen, each id's row is read and its gradient written and read, and
      each distinct row and its state are read and written: 3 k + 2 u + 2 s for k bytes of rows looked up, u of distinct
      rows and s of their state. Ids do not count.
    - An activation (a tensor other than weights that autograd keeps for the backward pass) is written and read: 2 a.

    Temporary tensors of a pass, the reading of the batch, and tables that FBGEMM updates in the backward pass do not
    count.
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
    """The work of one step more of a run; `taken` are its `endless` steps."""
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

    added = torch.ops.aten.addmm_, torch.ops.aten.baddbmm_, torch.ops.aten._addmm_activation
    counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(added, _added_product))
    with ExitStack() as hooks, counter as counted, saved_tensors_hooks(keep, lambda tensor: tensor):
        for optimizer in run.optimizers.parts.values():
            hooks.callback(optimizer.register_step_pre_hook(look).remove)
        next(taken)
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
