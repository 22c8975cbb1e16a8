"""Speed of training, beside the machine's own limits, and of inference."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recspec.base import config, latency, machine
from recspec.base.errors import SettingsError
from recspec.bench.profiling import endless, profile_steps, wait, work_of_step
from recspec.bundle import find_export
from recspec.bundle import folder as bundle
from recspec.data.storage import synthesize
from recspec.export import Arrays, EagerModel, ExportedModel, open_exported_model, read_description
from recspec.feature_spec import FeatureSpec, Form, Signature, signature_of
from recspec.loading import Ranks
from recspec.models import TrainedItemModel, find_model
from recspec.training import TrainingRun, TrainSettings, arithmetic, make_plan

ML_1M = {"users": 6040, "items": 3706, "rows": 994_169}
"""Sizes of the NCF paper's ml-1m training split."""

OUTBRAIN_ROWS = 1_000_000
"""Made-up rows in Outbrain's shape. A step costs as much with its 60 million, since a million exceed every cache."""

OUTBRAIN_ITEM = {
    "ad_id": 250_000,
    "document_id_promo": 100_000,
    "campaign_id": 5_000,
    "advertiser_id": 2_500,
    "source_id_promo": 4_000,
    "publisher_id_promo": 1_000,
}
OUTBRAIN_CONTEXT = {
    "document_id": 300_000,
    "platform": 4,
    "source_id": 4_000,
    "publisher_id": 1_000,
    "geo_location": 2_500,
    "geo_location_country": 300,
    "geo_location_state": 2_000,
}
OUTBRAIN_LISTS = {"topic_id_list": 350, "entity_id_list": 10_000, "category_id_list": 100}
OUTBRAIN_NUMBERS = 13
"""Cardinalities and numbers published for Wide & Deep on Outbrain; a list holds up to three ids."""

BOOKS_USER, BOOKS_ITEM, BOOKS_LENGTH = {"user_id": 105_925}, {"item_id": 1_209_081, "category": 2_330}, 100
"""Largest ids, and the most events of a history, that SIM was published with on Amazon's books."""

BOOKS_ROWS = 200_000
"""Made-up rows in their shape. A step costs as much with their 12 million."""

MATRIX_SIZE = 2048
TRIAD_BYTES = 1 << 28
"""Bytes of each of three vectors: together three times the largest cache that a server's cores share."""

LIMIT_SECONDS = 1.0
"""Time for measuring a limit of the machine."""


def bench_training(
    model: str,
    spec: FeatureSpec | None,
    *,
    settings: TrainSettings,
    model_settings: config.Settings,
    ranks: Ranks,
    steps: int,
    warmup: int,
    profiled: int = 0,
) -> dict[str, object]:
    """Samples/s of `steps` training steps after `warmup`, everything but evaluation and checkpoints included.

    Without a specification the data is made up: in the shape of the NCF paper's ml-1m for a model that needs users and
    items, of SIM's books for one that needs histories, of Outbrain's clicks for any other. `share_of_matrix_rate` and
    `share_of_memory_bandwidth` are those of `measure_limits`. With `profiled` steps the result holds a `profile` of so
    many more steps (`recspec.bench.profiling.profile_steps`).
    """
    with tempfile.TemporaryDirectory() as folder:
        data = spec if spec is not None else _made_up(model, Path(folder) / "data")
        kind = find_model(model)
        draws = "user" in kind.needs and not issubclass(kind, TrainedItemModel)
        if spec is None and settings.negatives is None and draws:
            settings = settings.model_copy(update={"negatives": 4})
        run = TrainingRun(make_plan(model, data, settings, model_settings, ranks), Path(folder) / "run", ranks)
        precision = run.plan.precision.value
        with arithmetic(precision, settings.deterministic):
            before = matrix_rate(precision, ranks.device)
            taken = endless(run)
            seconds, samples = _timed_steps(run, taken, steps, warmup)
            memory = machine.peak_memory()
            limits = measure_limits(run, taken, steps / seconds, before)
            profile = {"profile": profile_steps(run, taken, profiled)} if profiled else {}
    speed = samples / seconds
    return {
        "model": model,
        "settings": run.model.settings.model_dump(mode="json"),
        "samples_per_second": round(speed),
        "milliseconds_per_step": round(1000 * seconds / steps, 3),
        "batch_size": run.plan.batch_size.value,
        "negatives": run.plan.negatives.value,
        "rows": run.loader.num_rows,
        "loader": run.loader.mode,
        **limits,
        "precision": precision,
        "device": str(ranks.device),
        "world_size": ranks.world_size,
        "threads": torch.get_num_threads(),
        "peak_memory_bytes": memory,
        "torch": torch.__version__,
        "machine": machine.describe(),
        **profile,
    }


def measure_limits(
    run: TrainingRun, taken: Iterator[torch.Tensor], steps_per_second: float, rate_before: float
) -> dict[str, Any]:
    """Shares of the machine's own limits that a run reached, from its steps a second and measurements around it.

    `share_of_matrix_rate`: the floating-point operations of all matrix products over the rate of square products of the
    same precision (`matrix_rate`; the mean of before and now). `share_of_memory_bandwidth`: the bytes that a step has
    to move over the rate of a triad (`memory_bandwidth`). One step more of `taken`, the run's `endless` steps, counts
    both (`recspec.bench.profiling.Work`).
    """
    device, work = run.ranks.device, work_of_step(run, taken)
    rate = (rate_before + matrix_rate(run.plan.precision.value, device)) / 2
    bandwidth = memory_bandwidth(device)
    moved = {name: round(1e-6 * getattr(work, name), 1) for name in ("weights", "tables", "activations", "total")}
    return {
        "gflop_per_step": round(1e-9 * work.products, 3),
        "gflops_per_second": round(1e-9 * work.products * steps_per_second, 1),
        "matrix_rate_gflops_per_second": round(1e-9 * rate, 1),
        "share_of_matrix_rate": round(work.products * steps_per_second / rate, 4),
        "megabytes_per_step": moved,
        "memory_bandwidth_gigabytes_per_second": round(1e-9 * bandwidth, 1),
        "share_of_memory_bandwidth": round(work.total * steps_per_second / bandwidth, 4),
    }


def bench_inference(
    paths: Sequence[Path],
    *,
    batch_sizes: Sequence[int],
    threads: Sequence[int] = (),
    form: Form = "rows",
    seconds: float = 1.0,
    warmup: int = 10,
    verify: bool = True,
) -> dict[str, object]:
    """Latency and rows/s of runs (in torch) and exports with one caller, by batch size and threads.

    Every call has the same random ids and numbers, already encoded in memory. A run is measured in the given `form`, an
    export in its own.

    Raises:
        BundleError: if a path is neither.
        SettingsError: for a batch size or a number of threads below 1.
    """
    problems = [f"batch size {size}: expected 1 or more" for size in batch_sizes if size < 1]
    problems += [f"{count} threads: expected 1 or more" for count in threads if count < 1]
    if problems or not batch_sizes:
        raise SettingsError.of("bench infer", problems or ["no batch size; give --batch-sizes 1,64"])
    before = torch.get_num_threads()
    measured: list[dict[str, object]] = []
    try:
        for count in threads or (before,):
            torch.set_num_threads(count)
            for path in paths:
                exported, what = _opened(path, form, count, verify)
                for size in batch_sizes:
                    inputs = made_up_inputs(exported.signature, size)
                    found = latency.measure(lambda: exported.run(inputs), size, seconds=seconds, warmup=warmup)  # noqa: B023
                    measured.append({**what, "threads": count, **found.to_dict()})
    finally:
        torch.set_num_threads(before)
    return {"measured": measured, "seconds": seconds, "warmup": warmup, "machine": machine.describe()}


def _opened(path: Path, form: Form, threads: int, verify: bool) -> tuple[ExportedModel, dict[str, object]]:
    """The opened run or export, and its description."""
    folder = find_export(path)
    if folder is not None:
        description = read_description(folder)
        what = {name: description.get(name) for name in ("model", "format", "precision")}
        exported = open_exported_model(folder, threads=threads, verify=verify)
        return exported, {"path": str(path), **what, "form": exported.signature.form}
    trained = bundle.load(path, verify=verify)
    signature = signature_of(trained.spec, trained.model.features(), form, trained.outputs)
    what = {"model": trained.card.model, "format": "torch", "precision": "fp32", "form": form}
    return EagerModel(trained.model, signature), {"path": str(path), **what}


def made_up_inputs(signature: Signature, rows: int, seed: int = 0) -> Arrays:
    """Random inputs of a call: uniform ids, numbers from 0 to 1; one row for inputs at request level."""
    random = np.random.default_rng(seed)
    made: Arrays = {}
    for port in signature.inputs:
        shape = (1 if port.level == "request" else rows, port.width)
        ids = random.integers(0, port.num_ids, shape) if port.num_ids is not None else random.random(shape)
        made[port.name] = ids.astype(port.dtype)
    return made


def matrix_rate(precision: str, device: torch.device) -> float:
    """Floating-point operations a second of square matrix products, at the precision in force."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    left, right = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device, dtype=dtype) for _ in range(2))
    return 2 * MATRIX_SIZE**3 * _times_a_second(lambda: torch.mm(left, right), device)


def memory_bandwidth(device: torch.device) -> float:
    """Bytes a second of a triad, a <- b + 3 c, of vectors that no cache holds (McCalpin's STREAM: three each count)."""
    size = TRIAD_BYTES // 4
    a, b, c = (torch.ones(size, device=device) for _ in range(3))
    return 3 * TRIAD_BYTES * _times_a_second(lambda: torch.add(b, c, alpha=3, out=a), device)


def _times_a_second(work: Callable[[], object], device: torch.device) -> float:
    """Calls of `work` a second, after a first one."""
    started = time.perf_counter()
    work()
    wait(device)
    if (first := time.perf_counter() - started) > 10 * LIMIT_SECONDS:  # a CPU without a kernel for the type
        return 1 / first
    times, started, passed = 0, time.perf_counter(), 0.0
    while times == 0 or passed < LIMIT_SECONDS:
        for _ in range(4):
            work()
        wait(device)
        times, passed = times + 4, time.perf_counter() - started
    return times / passed


def interactions_like_ml_1m(folder: Path) -> FeatureSpec:
    """Made-up interactions with the sizes of ml-1m, ids uniform: the arithmetic is that of the real ones."""
    features = _ids({"user_id": ML_1M["users"], "item_id": ML_1M["items"]})
    return _synthesized(folder, ML_1M["rows"], features, {"user": ["user_id"], "item": ["item_id"]})


def clicks_like_outbrain(folder: Path) -> FeatureSpec:
    """Made-up clicks with the features that Wide & Deep was published with on Outbrain, ids uniform.

    Uniform ids repeat least within a batch, so an update of the rows in use has more of them than with real clicks.
    """
    numbers = [f"number_{place}" for place in range(OUTBRAIN_NUMBERS)]
    lists = _ids(OUTBRAIN_LISTS, length=3, padding=0)
    scalars = _ids({**OUTBRAIN_ITEM, **OUTBRAIN_CONTEXT})
    features = {**scalars, **lists, **{name: {"dtype": "float32"} for name in numbers}}
    context = [*OUTBRAIN_CONTEXT, *OUTBRAIN_LISTS, *numbers]
    return _synthesized(folder, OUTBRAIN_ROWS, features, {"item": [*OUTBRAIN_ITEM], "context": context})


def reviews_like_books(folder: Path) -> FeatureSpec:
    """Made-up rows with the features that SIM was published with on Amazon's books; ids and lengths uniform."""
    items = {name: count + 1 for name, count in BOOKS_ITEM.items()}
    events: dict[str, dict[str, object]] = {
        role: {
            f"{role}_{name}": {**feature, "vocabulary": name}
            for name, feature in _ids(items, length=BOOKS_LENGTH, padding=0).items()
        }
        for role in ("history", "negative_history")
    }
    users = {name: count + 1 for name, count in BOOKS_USER.items()}
    features = {**_ids({**users, **items}), **events["history"], **events["negative_history"]}
    roles = {"user": [*users], "item": [*items], **{role: [*names] for role, names in events.items()}}
    return _synthesized(folder, BOOKS_ROWS, features, roles)


def _ids(cardinalities: Mapping[str, int], **more: object) -> dict[str, dict[str, object]]:
    """Features of ids."""
    return {name: {"dtype": "int32", "cardinality": ids, **more} for name, ids in cardinalities.items()}


def _synthesized(
    folder: Path, rows: int, features: Mapping[str, object], roles: Mapping[str, Sequence[str]]
) -> FeatureSpec:
    """Made-up rows of some features and a label."""
    features = {**features, "label": {"dtype": "int8"}}
    chunk = {"type": "parquet", "features": list(features), "files": ["train.parquet"]}
    shape = {
        "feature_spec": features,
        "source_spec": {"train": [chunk]},
        "channel_spec": {**roles, "label": ["label"]},
    }
    return synthesize(FeatureSpec.from_dict(shape), folder, rows)


def _made_up(model: str, folder: Path) -> FeatureSpec:
    """Made-up data of a shape that the model reads."""
    needs = set(find_model(model).needs)
    if "history" in needs:
        return reviews_like_books(folder)
    return interactions_like_ml_1m(folder) if {"user", "item"} <= needs else clicks_like_outbrain(folder)


def _timed_steps(run: TrainingRun, taken: Iterator[torch.Tensor], steps: int, warmup: int) -> tuple[float, int]:
    """Seconds and samples of `steps` steps after `warmup`, or one: the first step makes what is made once."""
    for _ in range(max(1, warmup)):
        next(taken)
    wait(run.ranks.device)
    started, samples = time.perf_counter(), run.progress.samples
    for _ in range(steps):
        next(taken)
    wait(run.ranks.device)
    return time.perf_counter() - started, run.progress.samples - samples
