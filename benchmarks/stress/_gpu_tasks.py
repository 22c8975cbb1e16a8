"""What `gpu_lease.py` does with each model on a device: first steps, checks against a CPU, speeds, profiles.

A task has a part that needs the host alone (`ready`: data, the CPU's side of a check, compiling) and a part that needs
the device (`run`), alone if it measures time.
"""

from __future__ import annotations

import copy
import math
import os
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before torch: what deterministic products need

import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from _gpu_subjects import SUBJECTS, Subject
from recspec.base import latency, machine
from recspec.bench.profiling import endless, wait, work_of_step
from recspec.data.storage import synthesize
from recspec.feature_spec import FILE_NAME, FeatureSpec
from recspec.loading import Ranks
from recspec.loading.loader import Loader
from recspec.models import Model, TrainedItemModel
from recspec.models.layers import kernels
from recspec.models.layers.batch import Batch, take
from recspec.training import TrainingRun, TrainSettings, arithmetic, make_plan

ROOT = Path(__file__).parents[2]

Figures = dict[str, Any]
"""What a task found, as JSON."""

CHECKED_IDS, CHECKED_ROWS, CHECKED_STEPS = 300, 512, 8
"""Checks: tables have fewer rows than a batch, so that NeuMF takes its whole tables, as in its measurement."""

TOLERANCE = {"fp32": (1e-3, 0.05), "bf16": (3e-2, 0.5)}
"""Largest difference of a loss as a share of it, and of the weights' as a share of how far training moved them."""

DETERMINISTIC_STEPS, DETERMINISTIC_IDS = 8, 1_000_000
LATENCY_ROWS = (1, 64, 512, 4096)
GRAPHED = ("dlrm", "neumf", "wide_deep", "sim", "dcnv2", "two_tower")
"""Models whose answers wait for nothing, so that a CUDA graph can hold them."""
RANKED_ITEMS, RANKED_USERS = 1_000_000, (1, 64, 1024)
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Place:
    """Where tasks run, and how large."""

    device: torch.device
    small: bool
    folder: Path
    seconds: float = 2.0
    """Of a measurement."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Task:
    """A piece of work, and what it needs."""

    name: str
    seconds: float
    """Expected on the device; a task is skipped when half of them are not left."""
    run: Callable[[], Figures]
    ready: Callable[[], object] = lambda: None
    """The part before, which needs the host alone."""
    alone: bool = True
    """Whether nothing else may run on the device meanwhile."""
    worth: float = 5.0
    """Tasks that wait for the device get it in this order."""


# --- time ------------------------------------------------------------------------------------------------------------


def seconds_of(call: Callable[[], object], place: Place, *, warmup: int = 3, groups: int = 5) -> float:
    """Seconds of a call: the median of groups of calls in a row, by the device's own events on a GPU."""
    for _ in range(warmup):
        call()
    wait(place.device)
    started = time.perf_counter()
    call()
    wait(place.device)
    calls = max(1, int(place.seconds / groups / max(1e-6, time.perf_counter() - started)))
    return statistics.median(_seconds_of_group(call, calls, place.device) / calls for _ in range(groups))


def _seconds_of_group(call: Callable[[], object], calls: int, device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def as_graph(call: Callable[[], object]) -> Callable[[], object]:
    """A call recorded as a CUDA graph, which replays its kernels on the same inputs without the host's work."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def peak_memory(device: torch.device) -> int:
    """Bytes of tensors at most since the last reset; of the process on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else machine.peak_memory()


# --- the device itself -----------------------------------------------------------------------------------------------


def measure_device(place: Place) -> Figures:
    """Bytes a second of copies, read and written, and operations a second of square products."""
    numbers, size = (1 << 18, 128) if place.small else (1 << 29, 8192)
    source = torch.randn(numbers, device=place.device)
    to = torch.empty_like(source)
    found: Figures = {"bytes_per_second": 8 * numbers / seconds_of(lambda: to.copy_(source), place)}
    for precision in ("fp32", "tf32", "bf16", "fp16") if place.on_gpu else ("fp32", "bf16"):
        dtype = HALVES.get(precision, torch.float32)
        left, right = (torch.randn(size, size, device=place.device).to(dtype) for _ in range(2))
        with arithmetic(precision, deterministic=False):
            seconds = seconds_of(lambda: torch.mm(left, right), place)  # noqa: B023
        found[f"{precision}_flops_per_second"] = 2 * size**3 / seconds
    return found


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """One model on a device, in a process of its own."""

    name: str
    place: Place
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def subject(self) -> Subject:
        return SUBJECTS[self.name]

    @property
    def batch(self) -> int:
        """Samples of a measured step."""
        return min(64, self.subject.batch) if self.place.small else self.subject.batch

    def data(self, *, most: int = 2**31 - 1, rows: int | None = None) -> FeatureSpec:
        """Made-up rows, written once; enough full batches for an epoch without a partial one."""
        subject, most = self.subject, min(most, 50) if self.place.small else most
        if rows is None:
            batches = 3 if self.place.small else subject.batches
            rows = self.batch // (1 + subject.negatives) * batches
            if subject.users and not self.place.small:
                rows = 12_000_000
        folder = self.place.folder / f"{self.name}-{most}-{rows}"
        if (folder / FILE_NAME).exists():
            return FeatureSpec.load(folder)
        return synthesize(subject.shape(most), folder, rows)

    def make_run(
        self, spec: FeatureSpec, *, device: torch.device | None = None, dropout: bool = True, **own: object
    ) -> TrainingRun:
        """A run at the published sizes, with the settings given over the recipe's.

        Weights of large runs are drawn on the device; those of checks on the host, so that two devices start alike.
        """
        device = device or self.place.device
        settings = TrainSettings.model_validate(self.subject.train_settings(**{"batch_size": self.batch, **own}))
        sizes = self.subject.model_settings(self.name, small=self.place.small, dropout=dropout)
        ranks = Ranks(device=device)
        plan = make_plan(self.name, spec, settings, sizes, ranks)
        if dropout:

            def on_device(held: Any) -> Model:
                with torch.device(device):
                    return plan_make(held)

            plan_make = plan.make
            plan = replace(plan, make=on_device)
        return TrainingRun(plan, self.place.folder / f"run-{self.name}", ranks)

    # --- checks ---

    @property
    def checked(self) -> dict[str, object]:
        """Settings of checks: no dropout, nothing drawn."""
        return {"batch_size": 64 if self.place.small else CHECKED_ROWS, "negatives": 0, "dropout": False}

    def checked_data(self) -> FeatureSpec:
        """Eight batches, or four of a model of users."""
        rows = 64 if self.place.small else CHECKED_ROWS
        return self.data(most=CHECKED_IDS, rows=rows * (16 if self.subject.users else 4))

    def smoke(self) -> Figures:
        """A step and an answer in the arithmetic of a GPU."""
        spec = self.checked_data()
        run = self.make_run(spec, precision="bf16", batch_size=64)
        with arithmetic("bf16", deterministic=False):
            loss = float(next(endless(run)))
            answers = self._answers(run.model.eval(), self._some_rows(run, 64), torch.bfloat16)
        assert math.isfinite(loss), f"the loss is {loss}"
        assert bool(torch.isfinite(answers).all()), "an answer is not a number"
        return {"loss": loss, "backend": run.plan.embedding_backend.value}

    def on_cpu(self) -> None:
        """The CPU's side of `check`."""
        if "cpu" not in self.state:
            self.state["cpu"] = self._few_steps(torch.device("cpu"), precision="fp32")

    def check(self, *ways: str) -> Figures:
        """The same steps on the CPU in fp32 and on the device, from the same weights.

        Raises:
            AssertionError: where they differ by more than `TOLERANCE`, with all figures.
        """
        losses_on_cpu, moved_on_cpu = self.state["cpu"]
        whole = max(sum(float(each.abs().sum()) for each in moved_on_cpu.values()), 1e-12)
        found: Figures = {"losses_on_cpu": losses_on_cpu}
        wrong = []
        for way in ways:
            precision, *more = way.split()
            losses, moved = self._few_steps(self.place.device, precision=precision, compile="compile" in more)
            of_loss = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(losses, losses_on_cpu, strict=True))
            apart = sum(float((moved[each] - moved_on_cpu[each]).abs().sum()) for each in moved) / whole
            found[way] = {"loss_difference": of_loss, "weights_difference": apart, "losses": losses}
            most_loss, most_weights = TOLERANCE[precision]
            most_weights = max(most_weights, self.subject.rounding)
            if not (of_loss <= most_loss and apart <= most_weights):
                wrong.append(f"{way}: loss {of_loss:.1e} (<= {most_loss}), weights {apart:.1e} (<= {most_weights})")
        if wrong:
            found["error"] = "; ".join(wrong)
        return found

    def _few_steps(self, device: torch.device, **own: object) -> tuple[list[float], dict[str, Tensor]]:
        """The losses of some steps, and how far they moved each parameter."""
        run = self.make_run(self.checked_data(), device=device, **{**self.checked, **own})  # type: ignore[arg-type]
        first = {each: parameter.detach().cpu().clone() for each, parameter in run.model.named_parameters()}
        going = endless(run)
        with arithmetic(run.plan.precision.value, deterministic=False):
            losses = [float(next(going)) for _ in range(CHECKED_STEPS)]
        end = {each: parameter.detach().cpu() for each, parameter in run.model.named_parameters()}
        return losses, {each: value - first[each] for each, value in end.items()}

    def deterministic(self) -> Figures:
        """Two deterministic runs, equal bit for bit, and what that costs beside a run that need not be.

        Raises:
            AssertionError: naming the parameters that differ.
        """
        self.forget()
        spec = self.data(most=DETERMINISTIC_IDS)

        def run(*, deterministic: bool, steps: int) -> tuple[dict[str, Tensor], float]:
            made = self.make_run(spec, precision="bf16", deterministic=deterministic)
            going = endless(made)
            with arithmetic("bf16", deterministic=deterministic):
                for _ in range(steps):
                    next(going)
                end = {each: parameter.detach().clone() for each, parameter in made.model.named_parameters()}
                return end, seconds_of(lambda: next(going), replace(self.place, seconds=self.place.seconds / 4))

        first, _ = run(deterministic=True, steps=DETERMINISTIC_STEPS)
        second, seconds = run(deterministic=True, steps=DETERMINISTIC_STEPS)
        differ = [each for each, value in first.items() if not torch.equal(value, second[each])]
        assert not differ, f"two deterministic runs differ in {', '.join(differ)}"
        del first, second
        _, free = run(deterministic=False, steps=1)
        return {"equal_after_steps": DETERMINISTIC_STEPS, "costs": seconds / free - 1}

    # --- speeds ---

    def warm(self, setting: str) -> None:
        """A run whose step is compiled: a dozen steps, which also record its CUDA graphs."""
        self._start(setting)
        with arithmetic(self.state["run"].plan.precision.value, deterministic=False):
            for _ in range(12):
                next(self.state["going"])
        wait(self.place.device)

    def _start(self, setting: str) -> None:
        precision, *more = setting.split()
        self.forget()
        if self.place.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.place.device)
        run = self.make_run(self.data(), precision=precision, compile="compile" in more)
        self.state |= {"run": run, "going": endless(run), "setting": setting}

    def forget(self) -> None:
        """Drop the run that later tasks of a model would use."""
        self.state.pop("run", None)
        self.state.pop("going", None)
        if self.place.on_gpu:
            torch.cuda.empty_cache()

    def train(self, setting: str) -> Figures:
        """Training speed in one setting."""
        if self.state.get("setting") != setting or "run" not in self.state:
            self._start(setting)
        run, going = self.state["run"], self.state["going"]
        losses: list[Tensor] = []

        def step() -> None:
            losses[:] = [next(going)]

        with arithmetic(run.plan.precision.value, deterministic=False):
            for _ in range(3):
                step()
            before = run.progress.samples, run.progress.step
            seconds = seconds_of(step, self.place)
        samples = (run.progress.samples - before[0]) / (run.progress.step - before[1])
        loss, published = float(losses[0]), self.subject.published
        assert math.isfinite(loss), f"the loss is {loss}"
        return {
            "samples_per_second": samples / seconds,
            "published": published,
            "ratio": samples / seconds / published if published else None,
            "milliseconds_per_step": 1000 * seconds,
            "batch_size": run.plan.batch_size.value,
            "loss": loss,
            "peak_memory_bytes": peak_memory(self.place.device),
            "embedding_backend": run.plan.embedding_backend.value,
            "compile": run.plan.compile.value,
            "sparse_gradients": sorted(run.plan.sparse_gradients.value),
            "tables": run.plan.tables.value,
            "rows": run.loader.held,
            "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        }

    def profile(self, steps: int = 3) -> Figures:
        """The kernels of a step by time, its launches and its waits for the device; and its share of the floor.

        `gpu_milliseconds` is the sum of all kernels of a step; less than the step's own time means that the device
        was idle. `host_milliseconds` is what the host takes to launch a step under the profiler, which slows it down.
        Operations and bytes are those that the step's formulas need at least (`work_of_step`).
        """
        run, going = self.state["run"], self.state["going"]
        run.model.train()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.place.on_gpu else [])]
        with arithmetic(run.plan.precision.value, deterministic=False):
            next(going)
            wait(self.place.device)
            with profile(activities=activities, acc_events=True) as record:
                started = time.perf_counter()
                for _ in range(steps):
                    next(going)
                host_seconds = time.perf_counter() - started
                wait(self.place.device)
            work = work_of_step(run, going)
        ours = DeviceType.CUDA if self.place.on_gpu else DeviceType.CPU
        spent: defaultdict[str, float] = defaultdict(float)
        on_host: defaultdict[str, float] = defaultdict(float)
        calls, host = Counter[str](), Counter[str]()
        for event in record.events() or ():
            if event.device_type == ours and not event.is_user_annotation and not event.name.startswith("Optimizer."):
                alone = event.time_range.elapsed_us() if self.place.on_gpu else event.self_cpu_time_total
                spent[event.name] += float(alone)
                calls[event.name] += 1
            if event.device_type == DeviceType.CPU:
                host[event.name] += 1
                on_host[event.name] += float(event.self_cpu_time_total)
        waits = {each: (host[each] - (each == "cudaDeviceSynchronize")) / steps for each in WAITS if host[each]}
        return {
            "gpu_milliseconds": sum(spent.values()) / 1000 / steps,
            "launches": sum(calls.values()) / steps,
            "waits": waits,
            "flops": work.products,
            "bytes": work.total,
            "host_milliseconds": 1000 * host_seconds / steps,
            "host": [
                {"operation": name[:60], "milliseconds": micro / 1000 / steps, "calls": host[name] / steps}
                for name, micro in sorted(on_host.items(), key=lambda each: -each[1])[:12]
            ],
            "largest": [
                {"kernel": name[:120], "milliseconds": micro / 1000 / steps, "calls": calls[name] / steps}
                for name, micro in sorted(spent.items(), key=lambda each: -each[1])[:20]
            ],
        }

    def answer(self) -> Figures:
        """Rows a second of probabilities in bf16 and fp16, and how far they are from those in fp32.

        `correlation` is that of the error with the probability: an error that grows with it moves more than ranks.
        """
        run = self.state["run"]
        rows = self.batch if self.place.small else (self.subject.answers or self.subject.batch)
        batch, model = self._some_rows(run, min(rows, 1024) if self.subject.users else rows), run.model.eval()
        del run
        self.forget()  # the optimizers' state may be twice as large as the model
        with arithmetic("fp32", deterministic=False):
            exact = self._answers(model, batch, None)
        found: Figures = {"batch_size": len(exact)}
        for precision, half in HALVES.items():
            if precision == "fp16" and not self.place.on_gpu:
                continue
            narrow = copy.deepcopy(model).to(half)

            def call(narrow: Model = narrow, half: torch.dtype = half) -> Tensor:
                return self._answers(narrow, batch, half)

            apart, quick = call() - exact, replace(self.place, seconds=self.place.seconds / 2)
            published = self.subject.published_answers
            ways = {"": call, **({" graph": as_graph(call)} if self.place.on_gpu and self.name in GRAPHED else {})}
            for way, each in ways.items():
                seconds = seconds_of(each, quick)
                found[precision + way] = {
                    "rows_per_second": len(exact) / seconds,
                    "ratio": len(exact) / seconds / published if published else None,
                    "milliseconds": 1000 * seconds,
                }
            found[precision] |= {
                "largest_error": float(apart.abs().max()),
                "mean_error": float(apart.abs().mean()),
                "correlation": _correlation(apart.abs(), exact),
            }
            del narrow, call, ways
        return found

    def latencies(self, *, compiled: bool = False) -> Figures:
        """Milliseconds of one call in bf16 by its number of rows, as it is and as a CUDA graph, or compiled."""
        run = self.state.get("run") or self.make_run(self.checked_data(), **self.checked)  # type: ignore[arg-type]
        model, half = copy.deepcopy(run.model).eval().to(torch.bfloat16), torch.bfloat16
        found: Figures = {}
        for rows in (1, 8) if self.place.small else LATENCY_ROWS:
            batch = self._some_rows(run, rows)
            called: Callable[[Batch], Tensor] = model
            if compiled:
                mode = "reduce-overhead" if self.place.on_gpu else "default"
                called = torch.compile(model, mode=mode, dynamic=False)

            def call(called: Callable[[Batch], Tensor] = called, batch: Batch = batch) -> Tensor:
                return self._answers(called, batch, half)

            ways = {"": call, **({" graph": as_graph(call)} if self.place.on_gpu and not compiled else {})}
            for way, each in ways.items():

                def ended(each: Callable[[], object] = each) -> None:
                    each()
                    wait(self.place.device)

                measured = latency.measure(ended, rows, seconds=0.1 if self.place.small else 0.7, warmup=12)
                found[f"{rows}{way}"] = measured.to_dict()
        return found

    def _answers(self, model: Callable[[Batch], Tensor], batch: Batch, half: torch.dtype | None) -> Tensor:
        """Probabilities (B,), or scores of all items of a model of users (B, N)."""
        narrow: AbstractContextManager[Any] = (
            torch.autocast(self.place.device.type, half, cache_enabled=False) if half is not None else nullcontext()
        )
        with torch.inference_mode(), narrow:
            if isinstance(model, TrainedItemModel):
                return model.score_users(batch[model.user_id].long()).float()
            return torch.sigmoid(model(batch).float())

    def _some_rows(self, run: TrainingRun, rows: int) -> Batch:
        """So many rows of the run's data with the features of its model, on the device."""
        model = run.model
        if isinstance(model, TrainedItemModel):
            return {model.user_id: torch.arange(1, 1 + min(rows, model.num_users - 1), device=self.place.device)}
        loader = Loader(
            run.plan.spec,
            "train",
            batch_size=rows,
            features=model.features(),
            device=self.place.device,
            shuffle=False,
            memory_budget=1 << 36,
        )
        batch = {name: tensor.contiguous() for name, tensor in next(iter(loader.batches())).batch.items()}
        return take(batch, slice(0, rows))

    def rank(self) -> Figures:
        """Milliseconds of the ten best of a million items, for one user and for many."""
        self.forget()
        count = 200 if self.place.small else RANKED_ITEMS
        spec = self.subject.shape(2**31 - 1)
        features = dict(spec.features)
        items = [name for name in spec.role("item") if features[name].is_categorical]
        features[spec.item_id] = features[spec.item_id].model_copy(update={"cardinality": count + 1})
        spec = synthesize(spec.replace(features=features), self.place.folder / f"{self.name}-items-{count}", 4096)
        run = self.make_run(spec, batch_size=512, precision="bf16")
        model, device = run.model.eval(), self.place.device
        ids = {name: torch.randint(1, spec.num_ids(name), (count,), device=device) for name in items}
        ids[spec.item_id] = torch.arange(1, count + 1, device=device)
        item_batch = {name: each.int() for name, each in ids.items() if name in model.features()}
        found: Figures = {}
        for users in (1, 8) if self.place.small else RANKED_USERS:
            rows = self._some_rows(run, users)
            request = {name: each for name, each in rows.items() if name not in item_batch}
            if self.name == "wide_deep" and users > 1:
                continue  # millions of rows of five wide layers
            if self.place.on_gpu:
                torch.cuda.reset_peak_memory_stats(device)
            with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16):
                scores = model.scorer(item_batch)

                def best(scores: Callable[[Batch], Tensor] = scores, request: Batch = request) -> Any:
                    return scores(request).topk(10)

                seconds = seconds_of(best, replace(self.place, seconds=self.place.seconds / 2), groups=3)
            found[str(users)] = {"milliseconds": 1000 * seconds, "peak_memory_bytes": peak_memory(device)}
        return found


WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "aten::item",
    "aten::nonzero",
    "aten::_unique2",
    "aten::unique_consecutive",
)
"""Names of calls that let the host wait for the device, in a profile."""


def _correlation(one: Tensor, other: Tensor) -> float:
    both = torch.stack([one.flatten().double(), other.flatten().double()])
    return float(torch.corrcoef(both)[0, 1].nan_to_num())


# --- kernels ---------------------------------------------------------------------------------------------------------


def kernel_calls(place: Place, alpha: float | None) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any], int]]:
    """Triton's kernels and their equivalents in plain torch at DLRM's sizes, and the bytes that each has to move.

    With `alpha`, ids follow a power law, and tables of 4 ids are among them.
    """
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # this file may be run from anywhere
    from tests.layers import plain_kernels

    device = place.device
    rows, batch, width, features = (40, 8, 8, 3) if place.small else (200_000, 65_536, 128, 26)
    sizes = torch.tensor([4 if alpha and feature % 8 == 0 else rows for feature in range(features)])
    stops = sizes.cumsum(0)
    firsts = (stops - sizes).to(device)
    stops = stops.to(device)
    store = torch.randn(int(sizes.sum()), width, device=device)
    u = torch.rand(batch, features, device=device)
    share = u if alpha is None else u ** (2 * alpha)  # most ids are small
    ids = (share * sizes.to(device)).long().clamp(max=rows - 1)
    vectors = torch.randn(batch, features + 1, width, device=device)
    slope = torch.randn(batch, (features + 1) * features // 2, device=device)
    looked_up = batch * features * width * 4
    if alpha is None:
        yield (
            "gather_rows",
            lambda: kernels.gather_rows(store, ids, firsts, stops, torch.float32),
            lambda: plain_kernels.gather_rows(store, ids, firsts, stops, torch.float32),
            2 * looked_up,
        )
        for half in (torch.float32, torch.bfloat16):
            own, its, each = vectors.to(half), slope.to(half), str(half).removeprefix("torch.")
            bytes_of = own.nbytes + its.nbytes
            yield (f"dots {each}", lambda own=own: kernels.dots(own), lambda own=own: plain_kernels.dots(own), bytes_of)  # type: ignore[misc]
            yield (
                f"dots_backward {each}",
                lambda own=own, its=its: kernels.dots_backward(own, its),  # type: ignore[misc]
                lambda own=own, its=its: plain_kernels.dots_backward(own, its),  # type: ignore[misc]
                2 * own.nbytes + its.nbytes,
            )
    places = (ids + firsts).flatten()
    gradient = torch.randn(len(places), width, device=device)
    distinct = len(torch.unique(places)) * width * 4
    rules: Mapping[kernels.Rule, int] = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 0, "adam": 2}
    for rule, states in rules.items():
        yield (
            f"update_rows {rule}",
            _updated(kernels.update_rows, rule, store, places, gradient),
            _updated(plain_kernels.update_rows, rule, store, places, gradient),
            looked_up + 2 * distinct * (1 + states),
        )


def _updated(update: Any, rule: kernels.Rule, store: Tensor, ids: Tensor, gradient: Tensor) -> Callable[[], Tensor]:
    """A step of a rule on a copy of the store."""
    kept = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 1, "adam": 2}[rule]
    weight = store.clone()
    states = [store.new_ones(len(store), 1 if rule == "rowwise_adagrad" else store.shape[1]) for _ in range(kept)]
    rate = torch.full((), 0.01, device=store.device)
    corrections = torch.tensor([0.1, 0.001]).to(store.device) if rule == "adam" else None

    def step() -> Tensor:
        update(rule, weight, ids, gradient, states, lr=rate, eps=1e-8, betas=(0.9, 0.999), corrections=corrections)
        return weight

    return step


def check_kernels(place: Place, *, timed: bool) -> Figures:
    """The kernels on uniform and on skewed ids against plain torch, in fp32; with `timed`, their milliseconds too."""
    if why_not := kernels.why_not("triton", place.device):
        return {"skipped": why_not}
    found: Figures = {}
    wrong = []
    quick = replace(place, seconds=0.2)
    with arithmetic("fp32", deterministic=False):
        for ids, alpha in (("uniform", None), ("skewed", 1.5)):
            for name, ours, plain, bytes_of in kernel_calls(place, alpha):
                what = f"{name} {ids}"
                try:
                    if timed:
                        seconds, plainly = seconds_of(ours, quick), seconds_of(plain, quick)
                        found[what] = {
                            "milliseconds": 1000 * seconds,
                            "milliseconds_plain": 1000 * plainly,
                            "bytes_per_second": bytes_of / seconds,
                        }
                        continue
                    apart = max(_differences(ours(), plain()))
                    found[what] = {"difference": apart}
                    if not apart < (2e-2 if "bfloat16" in name else 1e-3):
                        wrong.append(f"{what} {apart:.1e}")
                except Exception as error:
                    wrong.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
    return {**found, **({"error": "; ".join(wrong)} if wrong else {})}


def _differences(ours: Any, plain: Any) -> Iterator[float]:
    """Largest differences over the largest value."""
    for one, other in zip(*((each if isinstance(each, tuple) else (each,)) for each in (ours, plain)), strict=True):
        yield float((one.float() - other.float()).abs().max() / other.float().abs().max().clamp(min=1e-6))


# --- the tests and the commands that need a GPU ----------------------------------------------------------------------

TESTS = (
    "tests/training/test_waits.py",
    "tests/layers/test_kernels.py",
    "tests/layers/test_gathered_rows.py",
    "tests/layers/test_history_search.py",
    "tests/layers/test_recurrent.py",
)


def run_tests(place: Place, seconds: float = 60) -> Figures:
    """The tests that use a GPU where there is one."""
    chosen = ["tests/layers/test_sparse_rows.py"] if place.small else [*TESTS]
    printed = _ended([sys.executable, "-m", "pytest", "-q", "--maxfail=20", "-p", "no:cacheprovider", *chosen], seconds)
    return {"printed": printed, **({} if printed.endswith("status 0") else {"error": printed[-300:]})}


def run_commands(place: Place, seconds: float = 60) -> Figures:
    """What a user types, each command in a process of its own."""
    folder, recspec = place.folder / "demo", [sys.executable, "-m", "recspec"]
    data, run, device = str(folder / "data"), str(folder / "sasrec"), ["--device", place.device.type]
    found: Figures = {}
    for command in (
        ["demo", "--out", str(folder), "--epochs", "1"],
        ["train", "sasrec", data, run, *device, "--set", "epochs=1"],
        ["evaluate", run, data, *device],
        ["recommend", run, "--user", "1", *device],
    ):
        started = time.perf_counter()
        printed = _ended([*recspec, *command], seconds)
        found[command[0]] = {"seconds": round(time.perf_counter() - started, 1), "printed": printed[-1000:]}
        if not printed.endswith("status 0"):
            return {**found, "error": f"{command[0]}: {printed[-300:]}"}
    return found


def _ended(command: Sequence[str], seconds: float) -> str:
    """What a command printed, and its status at the end."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            env={**os.environ, "PYTHONPATH": _path()},
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return f"{late.stdout or b''!r}\nnot done within {seconds:.0f} s"
    return f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}\nstatus {done.returncode}"


def _path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))


# --- what is done in which phase -------------------------------------------------------------------------------------

HEADLINES = ("dlrm", "neumf", "wide_deep", "sim")
PROFILED = (*HEADLINES, "dcnv2", "din", "dien", "mult_vae", "sasrec", "two_tower")
COMPILED = ("neumf", "wide_deep", "sim")
RANKED = ("neumf", "sasrec", "wide_deep")


def tasks_of(process: str, phase: int, place: Place) -> list[Task]:
    """The tasks of a process in a phase, in their order."""
    if process == "device":
        return _tasks_of_device(phase, place)
    bench, order = Bench(process, place), list(SUBJECTS).index(process)
    if phase == 1:
        return _first_tasks(bench, order)
    return _second_tasks(bench, order)


def _tasks_of_device(phase: int, place: Place) -> list[Task]:
    if phase == 1:
        return [
            Task("device", 4, lambda: measure_device(place), worth=0.5),
            Task("kernels:check", 10, lambda: check_kernels(place, timed=False), alone=False, worth=1),
            Task("kernels:times", 15, lambda: check_kernels(place, timed=True), worth=6),
        ]
    return [
        Task("commands", 60, lambda: run_commands(place), alone=False, worth=6),
        Task("tests", 60, lambda: run_tests(place), alone=False, worth=7),
    ]


def _first_tasks(bench: Bench, order: int) -> list[Task]:
    name = bench.name
    worth = 3 + order / 20
    found = [
        Task(f"smoke:{name}", 2, bench.smoke, bench.checked_data, alone=False, worth=0),
        Task(f"check:{name}", 4, lambda: bench.check("fp32", "bf16"), bench.on_cpu, alone=False, worth=2),
        Task(f"train:{name}:bf16", 6, lambda: bench.train("bf16"), bench.data, worth=worth),
        Task(f"profile:{name}:bf16", 3, bench.profile, worth=worth),
        *([Task(f"latency:{name}:bf16", 5, bench.latencies, worth=worth)] if name == "wide_deep" else []),
        Task(f"answer:{name}", 4, bench.answer, worth=worth),
    ]
    if name in HEADLINES:
        many = lambda: bench.data(most=DETERMINISTIC_IDS)  # noqa: E731
        found.append(Task(f"deterministic:{name}", 8, bench.deterministic, many, worth=5))
        for precision in ("fp32", "tf32") if bench.place.on_gpu else ("fp32",):
            found.append(
                Task(f"train:{name}:{precision}", 5, lambda precision=precision: bench.train(precision), worth=6)  # type: ignore[misc]
            )
    return found


def _second_tasks(bench: Bench, order: int) -> list[Task]:
    name, found = bench.name, list[Task]()
    worth = 4 + order / 20
    compiles = name in COMPILED and (bench.place.on_gpu or name != "sim")  # on a CPU, SIM takes minutes to compile
    if compiles:
        setting = "bf16 compile"
        found += [
            Task(f"train:{name}:bf16", 6, lambda: bench.train("bf16"), bench.data, worth=worth),
            Task(f"train:{name}:{setting}", 6, lambda: bench.train(setting), lambda: bench.warm(setting), worth=worth),
            Task(f"profile:{name}:{setting}", 3, bench.profile, worth=worth),
        ]
    if name == "wide_deep":
        found.append(
            Task(f"latency:{name}:{'bf16 compile'}", 60, lambda: bench.latencies(compiled=True), alone=False, worth=5)
        )
    if name in RANKED:
        found.append(Task(f"rank:{name}", 10, bench.rank, worth=4))
    if compiles:
        again = lambda: bench.check("fp32 compile")  # noqa: E731
        found.append(Task(f"check:{name}:compile", 60, again, bench.on_cpu, alone=False, worth=5))
    return found
