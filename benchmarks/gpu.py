"""A GPU's correctness and speed: every model beside the CPU, and beside what one A100 was published with.

    python benchmarks/gpu.py [--device cuda] [--models neumf,wide_deep,dlrm,sim] [--minutes 4] [--out results/gpu.json]
    python benchmarks/gpu.py --device cpu --small        the same code on a CPU, in seconds; its speeds say nothing

Needs torch, numpy, pyarrow, typer, PyYAML, safetensors and pydantic, and no network. Data is made up in the published
shapes, ids uniform, and lies on the device. For each model: the same steps on the CPU in fp32 and on the device in
fp32 and bf16; two deterministic runs; training in several settings; answers in several settings. Each is a task; the
tasks of a model run in a process of their own, so that one that fails, hangs or breaks the device is told in the table
and the others go on. `--minutes` is for each model. Tasks that `--out` holds already are not run again without
`--again`, so a run that was cut short goes on with the same command.

Published (AMP, one A100): training 34.08 M samples/s NeuMF on MovieLens 20M, 2.31 M Wide & Deep on Outbrain, 4.55 M
DLRM on Criteo Terabyte (frequency limit 15), 0.565 M SIM on Amazon Books; answers 82.7 M, 10.35 M, 14.8 M, 1.48 M
rows/s.

`matrix`: floating-point operations that torch counts in an unfused step, over the largest rate that a product of two
square matrices reaches here in the same precision. `bandwidth`: bytes that the operations of the unfused step read and
write, over what a copy reaches here; fused operations move fewer, so it can exceed 1.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, cast

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before torch: what deterministic products need

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from recspec import __version__, config, machine
from recspec.batch import Batch, num_rows
from recspec.bench import speed as bench
from recspec.distributed import Ranks, pick_device
from recspec.loading.loader import Loader
from recspec.models import MODELS
from recspec.models.base import Model
from recspec.nn import kernels
from recspec.nn.embeddings import Embeddings
from recspec.spec import FILE_NAME, FeatureSpec
from recspec.storage.random_data import synthesize
from recspec.training.loop import TrainingRun
from recspec.training.plan import make_plan
from recspec.training.precision import arithmetic
from recspec.training.settings import TrainSettings

ROOT = Path(__file__).parents[1]

Figures = dict[str, Any]
"""What a task found, as JSON."""

CRITEO_T15 = (
    7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11, 2209, 10667, 104, 4, 968, 15,
    8165896, 2675940, 7156453, 302516, 12022, 97, 35,
)  # fmt: skip
"""Cardinalities published for Criteo Terabyte with ids of fewer than 15 occurrences left out."""

CRITEO_NUMBERS = 13
ML_20M = {"user_id": 138_493, "item_id": 26_744}

SMALL_CARDINALITY, SMALL_BATCH = 50, 64
"""Of `--small`; correctness is checked at cardinalities of `CHECKED` and in batches of `CHECKED_BATCH`."""

CHECKED, CHECKED_BATCH, CHECKED_STEPS = 5_000, 4_096, 4
DETERMINISTIC_STEPS, DETERMINISTIC_IDS = 8, 1_000_000

MEMORY_SHARE = 0.6
"""Of a device's memory that embedding tables and their state may take; larger tables are capped."""

TOLERANCE = {"fp32": (1e-4, 0.02), "bf16": (2e-2, 0.5)}
"""Largest difference of a loss as a share of it, and of the weights' as a share of how far training moved them."""


# --- what is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A model at its published sizes."""

    recipe: str
    batch: int
    batches: int
    """Of an epoch of the made-up data, so that no batch is a partial one."""
    answers: int
    """Rows of a batch of answers."""
    published: float
    """Samples/s in training, mixed precision, one A100."""
    published_answers: float
    shape: Callable[[int], FeatureSpec]
    """The specification, no cardinality above the one given."""


def _shape(features: Mapping[str, Mapping[str, object]], channels: Mapping[str, Sequence[str]]) -> FeatureSpec:
    named = {**features, "label": {"dtype": "int8"}}
    chunk = {"type": "parquet", "features": list(named), "files": ["train.parquet"]}
    return FeatureSpec.from_dict(
        {
            "feature_spec": named,
            "source_spec": {"train": [chunk]},
            "channel_spec": {**{role: list(names) for role, names in channels.items()}, "label": ["label"]},
        }
    )


def _ids(cardinalities: Mapping[str, int], most: int, **more: object) -> dict[str, dict[str, object]]:
    return {name: {"dtype": "int32", "cardinality": min(ids, most), **more} for name, ids in cardinalities.items()}


def movielens(most: int) -> FeatureSpec:
    """MovieLens 20M."""
    return _shape(_ids(ML_20M, most), {"user": ["user_id"], "item": ["item_id"]})


def outbrain(most: int) -> FeatureSpec:
    """Outbrain's clicks, as `recspec bench` makes them up."""
    numbers = {f"number_{place}": {"dtype": "float32"} for place in range(bench.OUTBRAIN_NUMBERS)}
    scalars = _ids({**bench.OUTBRAIN_ITEM, **bench.OUTBRAIN_CONTEXT}, most)
    lists = _ids(bench.OUTBRAIN_LISTS, most, length=3, padding=0)
    context = [*bench.OUTBRAIN_CONTEXT, *lists, *numbers]
    return _shape({**scalars, **lists, **numbers}, {"item": [*bench.OUTBRAIN_ITEM], "context": context})


def criteo(most: int) -> FeatureSpec:
    """Criteo Terabyte, frequency limit 15."""
    ids = _ids({f"C{place}": size for place, size in enumerate(CRITEO_T15)}, most)
    numbers = {f"I{place}": {"dtype": "float32"} for place in range(CRITEO_NUMBERS)}
    return _shape({**numbers, **ids}, {"context": [*numbers, *ids]})


def books(most: int) -> FeatureSpec:
    """Amazon's books as SIM was published with them."""
    of_item = {name: min(ids + 1, most) for name, ids in bench.BOOKS_ITEM.items()}
    events = {
        f"{role}_{name}": {"dtype": "int32", "length": bench.BOOKS_LENGTH, "padding": 0, "cardinality": ids,
                           "vocabulary": name}
        for role in ("history", "negative_history") for name, ids in of_item.items()
    }  # fmt: skip
    scalars = _ids({**{name: ids + 1 for name, ids in bench.BOOKS_USER.items()}, **of_item}, most)
    roles = {role: [f"{role}_{name}" for name in of_item] for role in ("history", "negative_history")}
    return _shape({**scalars, **events}, {"user": [*bench.BOOKS_USER], "item": [*of_item], **roles})


SUBJECTS: Mapping[str, Subject] = {
    "neumf": Subject("neumf-ml-20m", 1 << 20, 16, 1 << 20, 34.08e6, 82.7e6, movielens),
    "wide_deep": Subject("wide-deep-outbrain", 131072, 6, 131072, 2.31e6, 10.35e6, outbrain),
    "dlrm": Subject("dlrm-criteo-terabyte-t15", 65536, 8, 32768, 4.55e6, 14.8e6, criteo),
    "sim": Subject("sim-amazon-books", 131072, 3, 131072, 0.565e6, 1.48e6, books),
}

TRAINING = ("bf16 compile", "bf16", "tf32 compile", "tf32", "fp32")
ANSWERS = ("bf16 compile", "fp16 compile", "bf16", "fp16", "fp32")
"""Settings, probably the fastest first: time may run out. On a GPU, `compile` replays CUDA graphs."""


@dataclass(frozen=True)
class Scene:
    """Where tasks run, and how large."""

    device: torch.device
    small: bool
    folder: Path
    seconds: float = 3.0
    """Of measured steps a setting."""
    rates: dict[str, float] = field(default_factory=dict)

    def most_ids(self, name: str) -> int:
        """The largest cardinality of a feature that is measured."""
        if self.small:
            return SMALL_CARDINALITY
        largest = 2**31 - 1
        if name != "dlrm":
            return largest
        room = MEMORY_SHARE * _memory(self.device) / (4 * 128)
        sizes = sorted(CRITEO_T15, reverse=True)
        if sum(sizes) <= room:
            return largest
        return next(
            most for most in (1 << place for place in range(30, 8, -1)) if sum(min(most, s) for s in sizes) <= room
        )

    def data(self, name: str, *, most: int, rows: int) -> FeatureSpec:
        """Made-up rows, written once."""
        folder = self.folder / f"{name}-{most}-{rows}"
        if (folder / FILE_NAME).exists():
            return FeatureSpec.load(folder)
        return synthesize(SUBJECTS[name].shape(most), folder, rows)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine.total_memory()


def tasks_of(models: Sequence[str], device: str, chosen: Sequence[str] = ()) -> dict[str, list[str]]:
    """The tasks, by the process that runs them; in the `chosen` settings, if any."""
    found = {"machine": ["machine", "kernels"]}
    on_gpu = device.startswith("cuda")
    for name in models:
        training, answers = (
            [each for each in settings if (on_gpu or "fp16" not in each) and (not chosen or each in chosen)]
            for settings in (TRAINING, ANSWERS)
        )
        trained = [f"train:{name}:{each}" for each in training]
        answered = [f"answer:{name}:{each}" for each in answers]
        found[name] = [f"check:{name}", *trained[:1], *answered[:1], *trained[1:], *answered[1:]]
        found[name].append(f"deterministic:{name}")
    return found


def do(task: str, scene: Scene) -> Figures:
    """One task."""
    kind, _, rest = task.partition(":")
    name, _, setting = rest.partition(":")
    if kind == "machine":
        return measure_machine(scene)
    if kind == "kernels":
        return check_kernels(scene)
    if kind == "check":
        return check(name, scene)
    if kind == "train":
        return train(name, setting, scene)
    return answer(name, setting, scene) if kind == "answer" else deterministic(name, scene)


# --- the device itself -----------------------------------------------------------------------------------------------


def measure_machine(scene: Scene) -> Figures:
    """What matrix products and copies reach here."""
    found: Figures = {"bandwidth_bytes_per_second": bandwidth(scene)}
    for precision in ("fp32", "tf32", "bf16"):
        found[f"matrix_rate_{precision}"] = matrix_rate(precision, scene)
    return found


def bandwidth(scene: Scene) -> float:
    """Bytes a second that a copy reads and writes."""
    if "bandwidth" not in scene.rates:
        numbers = 1 << (18 if scene.small else 28)
        source = torch.ones(numbers, device=scene.device)
        to = torch.empty_like(source)
        scene.rates["bandwidth"] = 8 * numbers / _seconds_of(lambda: to.copy_(source), scene)
    return scene.rates["bandwidth"]


def matrix_rate(precision: str, scene: Scene) -> float:
    """Floating-point operations a second of products of square matrices."""
    if precision not in scene.rates:
        size = 128 if scene.small else 8192
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
        left, right = (torch.randn(size, size, device=scene.device).to(dtype) for _ in range(2))
        with arithmetic(precision, deterministic=False):
            scene.rates[precision] = 2 * size**3 / _seconds_of(lambda: torch.mm(left, right), scene)
    return scene.rates[precision]


def _seconds_of(call: Callable[[], object], scene: Scene) -> float:
    """Of one call, several in a row."""
    for _ in range(3):
        call()
    wait(scene.device)
    calls, started = 0, time.perf_counter()
    while True:
        for _ in range(5):
            call()
        wait(scene.device)
        calls += 5
        if time.perf_counter() - started > min(1.0, scene.seconds):
            return (time.perf_counter() - started) / calls


def wait(device: torch.device) -> None:
    """Until the device has done all it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that operations read and write: of a lookup the rows taken, not the table."""

    LOOKUPS = ("index_select", "embedding", "_embedding_bag", "embedding_bag", "index", "gather")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count one operation."""
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            written = _bytes(out)
            name = func._schema.name.rpartition("::")[2]
            if name in self.LOOKUPS:
                self.bytes += 2 * written
            elif not name.startswith(("empty", "new_empty", "detach")):
                self.bytes += written + _bytes((args, kwargs))
        return out


def _bytes(given: Any) -> int:
    if isinstance(given, Tensor):
        return 0 if given.is_sparse else given.nbytes
    if isinstance(given, Mapping):
        return sum(map(_bytes, given.values()))
    return sum(map(_bytes, given)) if isinstance(given, (list, tuple)) else 0


# --- runs ------------------------------------------------------------------------------------------------------------


def make_run(
    name: str,
    scene: Scene,
    spec: FeatureSpec,
    *,
    device: torch.device | None = None,
    dropout: bool = True,
    **own: Any,
) -> TrainingRun:
    """A run of a model at the sizes of its recipe, settings as given over the recipe's."""
    recipe = config.load_recipe(ROOT / "recipes" / f"{SUBJECTS[name].recipe}.yaml")
    sizes = {**recipe.settings, **(_small_sizes(name) if scene.small else {}), **({} if dropout else {"dropout": 0.0})}
    # Tables of billions of numbers are filled on the device, which takes a hundredth of the time.
    filled_there = name == "dlrm" and not scene.small and "embedding_std" not in sizes
    if filled_there:
        sizes["embedding_std"] = 0.0
    given = {**recipe.train, "metric": None, "train_splits": ("train",), "tensorboard": False,
             "memory_budget": "64GB", "epochs": 1000, **own}  # fmt: skip
    settings, own_settings = TrainSettings.model_validate(given), MODELS[name].Settings.model_validate(sizes)
    ranks = Ranks(device=device or scene.device)
    run = TrainingRun(make_plan(name, spec, settings, own_settings, ranks), scene.folder / "run", ranks)
    if filled_there:
        for module in run.model.modules():
            if isinstance(module, Embeddings):
                for store in module.stores.values():
                    store.data.uniform_(-0.01, 0.01)
    return run


def _small_sizes(name: str) -> dict[str, object]:
    return {
        "neumf": {"factors": 4, "layers": (8, 8, 4)},
        "wide_deep": {"hidden": (16, 8), "embedding_dim": 4, "embedding_dims": {}},
        "dlrm": {"embedding_dim": 4, "bottom": (8, 4), "top": (16, 8)},
        "sim": {"embedding_dim": 4, "gru_hidden": 8, "top_k": 5, "hidden": (16, 8), "search_hidden": (8,)},
    }[name]


def _drawn(name: str) -> int:
    return 4 if name == "neumf" else 0


def _said(setting: str) -> dict[str, Any]:
    """Settings of training, of a name such as `bf16 compile`."""
    precision, *more = setting.split()
    return {"precision": precision, "compile": "compile" in more}


def steps(run: TrainingRun) -> Generator[Tensor]:
    """The losses of one step after the other, epochs without end."""
    while True:
        yield from run.epoch()
        run.progress.epoch, run.progress.batch = run.progress.epoch + 1, 0


def timed(run: TrainingRun, scene: Scene, *, warmup: int = 8) -> tuple[float, float, float]:
    """Samples a second, seconds a step, and the last loss."""
    going = steps(run)
    loss = next(going)
    for _ in range(warmup):
        loss = next(going)
    wait(scene.device)
    count, done, started, before = 5, 0, time.perf_counter(), run.progress.samples
    while True:
        for _ in range(count):
            loss = next(going)
        done += count
        wait(scene.device)
        seconds = time.perf_counter() - started
        if seconds >= scene.seconds:
            return (run.progress.samples - before) / seconds, seconds / done, float(loss)
        count = max(1, min(100, int(done * (scene.seconds - seconds) / max(seconds, 1e-6)) + 1))


def train(name: str, setting: str, scene: Scene) -> Figures:
    """Training speed in one setting."""
    subject = SUBJECTS[name]
    batch = SMALL_BATCH if scene.small else subject.batch
    positives = batch // (1 + _drawn(name))
    spec = scene.data(name, most=scene.most_ids(name), rows=positives * (3 if scene.small else subject.batches))
    if scene.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(scene.device)
    run = make_run(name, scene, spec, batch_size=batch, negatives=_drawn(name), **_said(setting))
    with arithmetic(run.plan.precision.value, deterministic=False):
        speed, seconds, loss = timed(run, scene, warmup=1 if scene.small else 8)
    found: Figures = {
        "samples_per_second": speed,
        "published": subject.published,
        "ratio": speed / subject.published,
        "milliseconds_per_step": 1000 * seconds,
        "batch_size": batch,
        "loss": loss,
        "peak_memory_bytes": _peak(scene.device),
        "embedding_backend": run.plan.embedding_backend.value,
        "compile": str(run.plan.compile),
        "sparse_gradients": sorted(run.plan.sparse_gradients.value),
        "optimizer": run.optimizers.described,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "loader": run.loader.held,
        "largest_cardinality": scene.most_ids(name),
    }
    return {**found, **shares(name, run, seconds, scene)}


def shares(name: str, run: TrainingRun, seconds: float, scene: Scene) -> Figures:
    """The share of the machine's rates that a step of so many seconds reaches; what can't be counted is told."""
    kept = scene.folder / f"counted-{name}.json"
    if not kept.exists():
        try:
            kept.write_text(json.dumps(count(run)))
        except Exception as error:
            kept.write_text(json.dumps({"not_counted": _cause(error)}))
    counted = json.loads(kept.read_text())
    if "not_counted" in counted:
        return cast(Figures, counted)
    return {
        **counted,
        "share_of_matrix_rate": counted["flops_per_step"] / seconds / matrix_rate(run.plan.precision.value, scene),
        "share_of_bandwidth": counted["bytes_per_step"] / seconds / bandwidth(scene),
    }


def count(run: TrainingRun) -> Figures:
    """Floating-point operations and bytes of one more step, operation by operation in torch's own."""
    step, objective = run.step, run.step.objective
    backends = {module: module.backend for module in run.model.modules() if isinstance(module, Embeddings)}
    step.objective = step.uncompiled
    for module in backends:
        module.backend = "torch"
    traffic = Traffic()
    try:
        run.optimizers.use_backend("torch")
        with FlopCounterMode(display=False) as flops, traffic:
            next(steps(run))
    finally:
        step.objective = objective
        run.optimizers.use_backend(run.plan.embedding_backend.value)
        for module, backend in backends.items():
            module.backend = backend
    return {"flops_per_step": flops.get_total_flops(), "bytes_per_step": traffic.bytes}


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else machine.peak_memory()


# --- correctness -----------------------------------------------------------------------------------------------------


def check(name: str, scene: Scene) -> Figures:
    """The same steps on the CPU in fp32 and on the device in fp32, in bf16, and compiled; no dropout, nothing drawn.

    Raises:
        AssertionError: where they differ by more than `TOLERANCE`, with all figures.
    """
    rows = SMALL_BATCH if scene.small else CHECKED_BATCH
    spec = scene.data(name, most=SMALL_CARDINALITY if scene.small else CHECKED, rows=rows * CHECKED_STEPS)
    own: dict[str, object] = {"batch_size": rows, "negatives": 0, "dropout": False, **_gentle(name)}
    cpu = _few_steps(name, scene, spec, torch.device("cpu"), {**own, "precision": "fp32"})
    found: Figures = {}
    wrong = []
    ways = {"fp32": {"precision": "fp32"}, "bf16": {"precision": "bf16"}}
    if scene.device.type == "cuda":
        ways["fp32 compile"] = {"precision": "fp32", "compile": "auto"}
    for way, said in ways.items():
        losses, moved = _few_steps(name, scene, spec, scene.device, {**own, **said})
        of_loss = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(losses, cpu[0], strict=True))
        apart = sum(float((moved[each] - cpu[1][each]).abs().sum()) for each in moved)
        of_weights = apart / max(sum(float(each.abs().sum()) for each in cpu[1].values()), 1e-12)
        found[way] = {"loss_difference": of_loss, "weights_difference": of_weights, "losses": losses}
        most_loss, most_weights = TOLERANCE[way.split()[0]]
        if not (of_loss <= most_loss and of_weights <= most_weights):
            wrong.append(f"{way}: loss {of_loss:.2e} (at most {most_loss}), weights {of_weights:.2e} ({most_weights})")
    assert not wrong, "; ".join(wrong)
    return {"losses_on_cpu": cpu[0], **found}


def _gentle(name: str) -> dict[str, object]:
    """A rate at which a few steps from the start do not run away; published ones climb for thousands of steps."""
    return {"learning_rate": 0.1, "schedule": "constant", "warmup_epochs": 0.0} if name == "dlrm" else {}


def _few_steps(
    name: str, scene: Scene, spec: FeatureSpec, device: torch.device, own: Mapping[str, object]
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of some steps, and how far they moved each parameter."""
    run = make_run(name, scene, spec, device=device, **cast(dict[str, Any], own))
    first = {each: parameter.detach().cpu().clone() for each, parameter in run.model.named_parameters()}
    going = steps(run)
    with arithmetic(run.plan.precision.value, deterministic=False):
        # Two epochs: CUDA graphs are recorded in the first steps and replayed later.
        losses = [float(next(going)) for _ in range(2 * CHECKED_STEPS)]
    return losses, {each: parameter.detach().cpu() - first[each] for each, parameter in run.model.named_parameters()}


def deterministic(name: str, scene: Scene) -> Figures:
    """Two deterministic runs, equal bit for bit, and what that costs beside a run that need not be.

    Raises:
        AssertionError: naming the parameters that differ.
    """
    batch = SMALL_BATCH if scene.small else SUBJECTS[name].batch
    positives = batch // (1 + _drawn(name))
    # Smaller tables than are trained: two copies of them are compared on the host.
    most = min(scene.most_ids(name), DETERMINISTIC_IDS)
    spec = scene.data(name, most=most, rows=positives * (3 if scene.small else SUBJECTS[name].batches))
    own: dict[str, Any] = {"batch_size": batch, "negatives": _drawn(name), "precision": "bf16"}

    def run(*, is_deterministic: bool) -> tuple[dict[str, Tensor], float]:
        made = make_run(name, scene, spec, deterministic=is_deterministic, **own)
        with arithmetic(made.plan.precision.value, deterministic=is_deterministic):
            going = steps(made)
            for _ in range(DETERMINISTIC_STEPS):
                next(going)
            going.close()
            end = {each: parameter.detach().cpu().clone() for each, parameter in made.model.named_parameters()}
            return end, timed(made, scene, warmup=1)[0]

    (first, _), (second, speed) = (run(is_deterministic=True) for _ in range(2))
    differ = [each for each, value in first.items() if not torch.equal(value, second[each])]
    assert not differ, f"two deterministic runs differ in {', '.join(differ)}"
    _, free = run(is_deterministic=False)
    return {
        "equal": True,
        "steps": DETERMINISTIC_STEPS,
        "samples_per_second": speed,
        "samples_per_second_without": free,
        "costs": free / speed - 1,
    }


def check_kernels(scene: Scene) -> Figures:
    """Triton's kernels against their twins in plain torch, and the milliseconds of both.

    Raises:
        AssertionError: naming those that differ.
    """
    if why_not := kernels.why_not("triton", scene.device):
        return {"skipped": why_not}
    sys.path.insert(0, str(ROOT))  # this file may be run from anywhere
    from tests.nn import plain_kernels

    device = scene.device
    rows, batch, width, features = (40, 8, 8, 3) if scene.small else (50_000, 65_536, 128, 26)
    store = torch.randn(rows * features, width, device=device)
    firsts = torch.arange(features, device=device) * rows
    ids = torch.randint(rows, (batch, features), device=device)
    vectors = torch.randn(batch, features + 1, width, device=device)
    slope = torch.randn(batch, (features + 1) * features // 2, device=device)
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "gather_rows": (
            lambda: kernels.gather_rows(store, ids, firsts, firsts + rows, torch.float32),
            lambda: plain_kernels.gather_rows(store, ids, firsts, firsts + rows, torch.float32),
        ),
        "dots": (lambda: kernels.dots(vectors), lambda: plain_kernels.dots(vectors)),
        "dots_backward": (
            lambda: kernels.dots_backward(vectors, slope),
            lambda: plain_kernels.dots_backward(vectors, slope),
        ),
    }
    places = (ids + firsts).flatten()
    gradient = torch.randn(len(places), width, device=device)
    rules: Sequence[kernels.Rule] = ("sgd", "adagrad", "rowwise_adagrad", "adam")
    for rule in rules:
        calls[f"update_rows {rule}"] = (
            _updated(kernels.update_rows, rule, store, places, gradient),
            _updated(plain_kernels.update_rows, rule, store, places, gradient),
        )
    found: Figures = {}
    with arithmetic("fp32", deterministic=False):
        for name, (ours, plain) in calls.items():
            apart = max(_differences(ours(), plain()))
            found[name] = {
                "difference": apart,
                "milliseconds": 1000 * _seconds_of(ours, scene),
                "milliseconds_plain": 1000 * _seconds_of(plain, scene),
            }
    wrong = [f"{name} {each['difference']:.1e}" for name, each in found.items() if not each["difference"] < 1e-3]
    assert not wrong, f"kernels differ from plain torch: {', '.join(wrong)}"
    return found


def _updated(update: Any, rule: kernels.Rule, store: Tensor, ids: Tensor, gradient: Tensor) -> Callable[[], Tensor]:
    """A step of a rule from the same start, on a part of the store that is copied for it."""
    kept = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 1, "adam": 2}[rule]
    weight = store.clone()
    states = [store.new_ones(len(store), 1 if rule == "rowwise_adagrad" else store.shape[1]) for _ in range(kept)]
    rate = torch.full((), 0.01, device=store.device)
    corrections = torch.tensor([0.1, 0.001]).to(store.device) if rule == "adam" else None

    def step() -> Tensor:
        update(rule, weight, ids, gradient, states, lr=rate, eps=1e-8, betas=(0.9, 0.999), corrections=corrections)
        return weight

    return step


def _differences(ours: Any, plain: Any) -> Iterator[float]:
    """Largest differences over the largest value."""
    for one, other in zip(*((each if isinstance(each, tuple) else (each,)) for each in (ours, plain)), strict=True):
        yield float((one.float() - other.float()).abs().max() / other.float().abs().max().clamp(min=1e-6))


# --- answers ---------------------------------------------------------------------------------------------------------


def answer(name: str, setting: str, scene: Scene) -> Figures:
    """Rows a second of probabilities in one setting, and how far they are from those in fp32."""
    subject = SUBJECTS[name]
    rows = SMALL_BATCH if scene.small else subject.answers
    spec = scene.data(name, most=scene.most_ids(name), rows=rows)
    precision, *more = setting.split()
    # `make_run` makes the model as training does; only its weights and one batch are used.
    run = make_run(name, scene, spec, batch_size=rows, negatives=0, precision="fp32", optimizer="sgd", parts={},
                   **_only(name))  # fmt: skip
    model = run.model.eval()
    batch = _batch_of(spec, model, rows, scene, fixed="compile" in more)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    with torch.inference_mode(), arithmetic("fp32", deterministic=False):
        exact = torch.sigmoid(model(batch).float())
    if scene.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(scene.device)
    if half is not None:
        model = model.to(half)
    called: Callable[[Batch], Tensor] = model
    if "compile" in more:
        mode = "reduce-overhead" if scene.device.type == "cuda" else "default"
        called = torch.compile(model, mode=mode, dynamic=False)
    type_ = scene.device.type

    def call() -> Tensor:
        half_products: AbstractContextManager[Any] = (
            torch.autocast(type_, half, cache_enabled=False) if half is not None else nullcontext()
        )
        with torch.inference_mode(), half_products:
            return torch.sigmoid(called(batch).float())

    with arithmetic(precision, deterministic=False):
        apart = (call() - exact).abs()
        seconds = _seconds_of(call, scene)
    return {
        "rows_per_second": rows / seconds,
        "published": subject.published_answers,
        "ratio": rows / seconds / subject.published_answers,
        "milliseconds": 1000 * seconds,
        "batch_size": rows,
        "largest_difference": float(apart.max()),
        "mean_difference": float(apart.mean()),
        "peak_memory_bytes": _peak(scene.device),
    }


def _only(name: str) -> dict[str, Any]:
    """Nothing of a recipe's training that plain SGD does not read."""
    unread = {"betas": (0.9, 0.999), "eps": None, "rho": 0.9, "momentum": 0.0}
    steady = {"schedule": "constant", "warmup_epochs": 0.0, "step_epochs": (), "decay_start": 0.0, "decay_end": 1.0}
    return {**unread, **steady, "learning_rate": 0.01} if name else {}


def _batch_of(spec: FeatureSpec, model: Model, rows: int, scene: Scene, *, fixed: bool) -> Batch:
    loader = Loader(spec, "train", batch_size=rows, features=model.features(), device=scene.device, shuffle=False,
                    memory_budget=1 << 36, fixed_length=fixed)  # fmt: skip
    batch = {name: tensor.contiguous() for name, tensor in next(iter(loader.batches())).batch.items()}
    assert num_rows(batch) == rows
    return batch


# --- processes -------------------------------------------------------------------------------------------------------


def work(tasks: Sequence[str], scene: Scene, out: TextIO) -> None:
    """Do tasks one after the other; a JSON line before and after each."""
    for task in tasks:
        print(json.dumps({"begun": task}), file=out, flush=True)
        started = time.perf_counter()
        try:
            found = do(task, scene)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            found = {"error": _cause(error)}
        if scene.device.type == "cuda":
            torch.cuda.empty_cache()
        torch.compiler.reset()
        seconds = round(time.perf_counter() - started, 1)
        print(json.dumps({"task": task, "found": {**found, "task_seconds": seconds}}), file=out, flush=True)


def _cause(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:400]


def supervise(command: Sequence[str], tasks: Sequence[str], seconds: float) -> Iterator[tuple[str, Figures]]:
    """Have tasks done by a process that is started anew where it dies; tells of each task, done or not.

    Args:
        command: starts a process that does the tasks whose names follow, and writes what `work` writes.
        tasks: in their order.
        seconds: for all of them; the one that is under way then is ended, the others are not begun.
    """
    left, end = list(tasks), time.monotonic() + seconds
    while left and time.monotonic() < end:
        told: list[str] = []
        with subprocess.Popen(
            [*command, *left], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        ) as child:
            assert child.stdout is not None
            assert child.stderr is not None
            lines = _lines_of(child.stdout)
            reader = threading.Thread(target=_keep_last, args=(child.stderr, told), daemon=True)
            reader.start()
            begun, late = left[0], False
            while True:
                try:
                    line = lines.get(timeout=max(0.0, end - time.monotonic()))
                except queue.Empty:
                    late = True
                    child.kill()
                    break
                if line is None:
                    break
                event = _event(line)
                begun = event.get("begun", begun)
                if "task" in event:
                    left.remove(event["task"])
                    yield event["task"], event["found"]
            child.wait()
            reader.join(timeout=5)
        if late:
            left.remove(begun)
            yield begun, {"error": f"not done within the {seconds / 60:.1f} minutes of --minutes"}
        elif left and begun in left:  # a process that ends early takes the task it was at with it
            left.remove(begun)
            last = told[-1] if told else "no message"
            yield begun, {"error": f"its process ended with status {child.returncode}: {last}"[:400]}
        elif left:
            break
    for task in left:
        yield task, {"error": "not begun: the time of --minutes was over"}


def _lines_of(stream: Iterable[str]) -> queue.Queue[str | None]:
    """Lines as they come, then None."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _keep_last(stream: Iterable[str], told: list[str]) -> None:
    for line in stream:
        if line.strip():
            told[:] = [line.strip()]
            print(f"    {line.rstrip()}", file=sys.stderr)


def _event(line: str) -> dict[str, Any]:
    """What a line of `work` says; nothing where it is of somebody else."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


# --- the report ------------------------------------------------------------------------------------------------------


def best(found: Mapping[str, Figures], kind: str, name: str) -> str | None:
    """The task of a model that was fastest."""
    rate = "samples_per_second" if kind == "train" else "rows_per_second"
    own = {task: each[rate] for task, each in found.items() if task.startswith(f"{kind}:{name}:") and rate in each}
    return max(own, key=own.__getitem__) if own else None


def table(found: Mapping[str, Figures]) -> list[str]:
    """What was found, in lines."""
    lines = []
    for task, each in found.items():
        kind, _, rest = task.partition(":")
        name, _, _ = rest.partition(":")
        mark = "*" if kind in ("train", "answer") and best(found, kind, name) == task else " "
        lines.append(f"{mark} {task:34} {_said_of(each)}")
    return lines


def _said_of(each: Figures) -> str:
    if "error" in each:
        return f"FAILED: {each['error']}"
    if "skipped" in each:
        return f"skipped: {each['skipped']}"
    speed = each.get("samples_per_second", each.get("rows_per_second"))
    if "published" in each and speed is not None:
        took = each.get("milliseconds_per_step", each.get("milliseconds"))
        parts = [f"{speed / 1e6:9.3f} M/s", f"{each['ratio']:6.2f} x published {each['published'] / 1e6:.3g} M",
                 f"{took:8.2f} ms", f"{each['peak_memory_bytes'] / 2**30:5.1f} GiB"]  # fmt: skip
        parts += [f"matrix {each['share_of_matrix_rate']:.0%}"] if "share_of_matrix_rate" in each else []
        parts += [f"bandwidth {each['share_of_bandwidth']:.0%}"] if "share_of_bandwidth" in each else []
        parts += [f"|dp| <= {each['largest_difference']:.1e}"] if "largest_difference" in each else []
        return "  ".join(parts)
    if "equal" in each:
        return f"equal bit for bit after {each['steps']} steps; costs {each['costs']:+.0%} of the time"
    ways = [
        f"{way}: loss {own['loss_difference']:.1e}, weights {own['weights_difference']:.1e}"
        if "loss_difference" in own
        else f"{way} {own['difference']:.0e} {own['milliseconds']:.2f} ms (plain {own['milliseconds_plain']:.2f})"
        for way, own in each.items()
        if isinstance(own, dict)
    ]
    return "; ".join(ways) if ways else "  ".join(f"{key} {value:.3g}" for key, value in each.items())


def _commit() -> str | None:
    if shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def report(found: Mapping[str, Figures], arguments: argparse.Namespace) -> Figures:
    """All that was found, where, when and of what."""
    return {
        "what": "correctness and speed of a device; tasks by name",
        "device": _named(arguments.device),
        "small": arguments.small,
        "best": {f"{kind}:{name}": best(found, kind, name) for kind in ("train", "answer") for name in SUBJECTS},
        "tasks": dict(found),
        "recspec": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "machine": machine.describe(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _named(device: str) -> Figures:
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return {"name": device}
    known = torch.cuda.get_device_properties(pick_device(device))
    return {"name": known.name, "memory_bytes": known.total_memory, "multiprocessors": known.multi_processor_count}


def main(given: Sequence[str] | None = None) -> int:
    """Run the tasks, print the table, write JSON; 1 if one failed."""
    arguments = _arguments(given)
    if arguments.tasks:
        # What is told to `supervise` stays apart from whatever else is printed.
        with os.fdopen(os.dup(1), "w") as out:
            os.dup2(2, 1)
            work(arguments.tasks, _scene(arguments, arguments.folder), out)
        return 0
    found = _kept(arguments)
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = Path(folder)
        for part, tasks in tasks_of(arguments.models, arguments.device, arguments.settings).items():
            wanted = [task for task in tasks if "error" in found.get(task, {"error": ""})]
            for task, figures in _done(wanted, arguments):
                found[task] = figures
                print(f"{task:36} {_said_of(figures)}", flush=True)
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(report(found, arguments), indent=2) + "\n")
            print(f"-- {part} done", flush=True)
    print("\n".join(["", "* the fastest", *table(found)]))
    return int(any("error" in each for each in found.values()))


def _done(tasks: Sequence[str], arguments: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    """The tasks as they get done, in a process of their own or in this one."""
    if not tasks:
        return
    if not arguments.here:
        own = ["--device", arguments.device, "--seconds", str(arguments.seconds), "--folder", str(arguments.folder)]
        command = [sys.executable, __file__, *own, *(["--small"] if arguments.small else []), "--tasks"]
        yield from supervise(command, tasks, 60 * arguments.minutes)
        return
    scene = _scene(arguments, arguments.folder)
    for task in tasks:
        try:
            yield task, do(task, scene)
        except Exception as error:
            yield task, {"error": _cause(error)}


def _scene(arguments: argparse.Namespace, folder: Path) -> Scene:
    return Scene(pick_device(arguments.device), arguments.small, folder, seconds=arguments.seconds)


def _kept(arguments: argparse.Namespace) -> dict[str, Figures]:
    """What an earlier run of the same kind left, unless all is to be run again."""
    if arguments.again or not arguments.out.exists():
        return {}
    before = json.loads(arguments.out.read_text())
    same = before.get("device") == _named(arguments.device) and before.get("small") == arguments.small
    return dict(before["tasks"]) if same else {}


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that all runs")
    parser.add_argument("--models", default=",".join(SUBJECTS), help="of these, between commas")
    parser.add_argument("--settings", default="", help="as 'bf16 compile,fp32', between commas; all without")
    parser.add_argument("--minutes", type=float, default=6.0, help="for each model's tasks")
    parser.add_argument("--seconds", type=float, default=3.0, help="of measured steps a setting")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.json")
    parser.add_argument("--again", action="store_true", help="run what --out holds already")
    parser.add_argument("--here", action="store_true", help="no processes of their own, for a debugger")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tasks", nargs="*", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    arguments.settings = [each for each in arguments.settings.split(",") if each]
    arguments.models = [name for name in arguments.models.split(",") if name]
    if strangers := [name for name in arguments.models if name not in SUBJECTS]:
        parser.error(f"--models: {', '.join(strangers)}; expected some of {', '.join(SUBJECTS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
