"""Exports a bundle to ONNX, AOTInductor or a Triton model repository, and compares the export with the model.

Every export holds `export.json`: the difference of its probabilities from the model's, AUC of both on a sample, latency
by batch size, size, versions and arithmetic. An export that drifts beyond its tolerance is not written.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from recspec.base import latency, machine
from recspec.base.errors import ExportError, SettingsError, listed, unknown
from recspec.base.files import local, locked, manifest, mkdir_or_undo, staging, whole_folder
from recspec.bundle import Bundle
from recspec.data.encoding import Encoders
from recspec.data.storage import open_split, synthesize
from recspec.evaluation import as_batch, check_same_features
from recspec.export import onnx_graph, triton_pipeline, triton_repository
from recspec.export.exported_model import Arrays, EagerModel, Exportable, ExportedModel, OnnxModel, Pt2Model, as_inputs
from recspec.export.onnx_graph import Precision
from recspec.export.triton_repository import Backend, Batching
from recspec.feature_spec import EXPORT_FILE, FORMS, FeatureSpec, Form, Signature, find_export_file, signature_of
from recspec.metrics import auc
from recspec.models import KnownEvents, Model
from recspec.models.layers import Batch, num_rows, take

if TYPE_CHECKING:
    from onnx import ModelProto


Format = Literal["onnx", "pt2", "triton"]

# Mean difference of probabilities that an export may have; the largest may be `LARGEST` times that. fp16: as NVIDIA
# published for Wide & Deep in mixed precision; int8 and bf16: too little to change a ranking.
TOLERANCE: Mapping[Precision, float] = {"fp32": 1e-6, "bf16": 5e-4, "fp16": 2e-4, "int8": 5e-4}
LARGEST = 20

SAMPLE_ROWS = 20_000
MADE_UP_ROWS = 4_096
MOST_EVENTS = 400_000  # of a sample; int8 may be checked once or twice for each product, at 16 s for 20,000 rows of 200
FEWEST_ROWS = 1_000
CHECKED = (1, 2, 7, 64, 1000)  # rows of the calls compared with the model; the whole sample follows in calls of `BLOCK`
BLOCK = 4_096
REQUESTS = 8  # requests that a ranker is compared on, each with the sample's items as candidates

PT2_HOW: Mapping[Precision, str] = {
    "fp32": "weights and products in fp32",
    "bf16": "matrix products in bf16 (torch's autocast), in hardware where the CPU has AVX-512 BF16 or AMX; embeddings "
    "and sums in fp32",
}

Tell = Callable[[str], None]  # called with a description of each stage as it begins


def silent(stage: str) -> None:
    """Stages without a display."""


@dataclass(frozen=True)
class ExportSettings:
    """Settings of an export and of its check."""

    format: Format = "onnx"
    precision: Precision = "fp32"
    form: Form = "rows"
    tolerance: float | None = None  # mean difference of probabilities; None: `TOLERANCE` of the precision
    allow_drift: bool = False
    batch_sizes: tuple[int, ...] = (1, 64, 512, 4096)  # of the latency measurement
    seconds: float = 0.5  # of measuring, for each batch size
    threads: int | None = None
    name: str | None = None  # in a Triton repository; by default the model's own
    triton_backend: Backend = "onnxruntime"
    batching: Batching = field(default_factory=Batching)
    raw: bool = True  # a Triton repository gets the ensemble that takes raw values, if the bundle knows them

    def __post_init__(self) -> None:
        choices: list[tuple[str, str, tuple[str, ...]]] = [
            ("format", self.format, get_args(Format)),
            ("precision", self.precision, get_args(Precision)),
            ("form", self.form, FORMS),
            ("triton backend", self.triton_backend, get_args(Backend)),
        ]
        problems = [unknown(what, value, known) for what, value, known in choices if value not in known]
        if self.format == "pt2" and self.precision not in PT2_HOW:
            problems.append(f"format pt2 has the precisions {listed(PT2_HOW)}; take --format onnx for {self.precision}")
        if self.tolerance is not None and self.tolerance < 0:
            problems.append(f"tolerance is {self.tolerance}; expected 0 or more")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            problems.append(f"batch sizes are {list(self.batch_sizes)}; expected whole numbers from 1")
        SettingsError.refuse("export", problems)


@dataclass(frozen=True)
class Exported:
    """An export on disk, and the content of its `export.json`."""

    folder: Path
    description: dict[str, Any]


def export(
    trained: Bundle,
    out: Path,
    settings: ExportSettings | None = None,
    data: FeatureSpec | None = None,
    *,
    tell: Tell = silent,
) -> Exported:
    """Write a bundle's model as an export to the folder `out`, or into the Triton repository `out`.

    Args:
        data: A prepared dataset on whose test rows (or valid, or train) the export is checked, AUC included. By
            default rows of the specification's shape are made up.

    Raises:
        ExportError: if the model can't be exported, if the export's probabilities drift beyond the tolerance, or if
            `out` holds something other than an export. Nothing is left behind then.
    """
    out, settings = local(out, "OUT"), settings or ExportSettings()
    with locked(out, "exporting into"):
        if out.is_file():
            raise ExportError(f"{out}: is a file; expected a folder to write")
        if settings.format != "triton" and out.is_dir() and any(out.iterdir()) and find_export_file(out) is None:
            raise ExportError(f"{out}: holds something that is no export; name another folder, or empty this one")
        try:
            model = trained.model.eval()
            signature = signature_of(trained.spec, model.features(), settings.form, trained.outputs)
            if settings.format != "pt2":
                onnx_graph.refuse_output_names(signature)
            tell(f"{'making up' if data is None else 'reading'} rows to check the export on")
            check = Check(model, signature, sample_of(trained, data))
            if settings.format == "triton":
                with mkdir_or_undo(out.parent), staging(out) as staged:
                    return _into_repository(trained, check, settings, staged, out, tell)
            with whole_folder(out) as folder:
                description = _write(trained, check, settings, folder, tell)
                manifest.write(folder)
            return Exported(out, description)
        except OSError as error:
            raise ExportError(f"{out}: the export could not be written: {error}") from None


# --- the export -----------------------------------------------------------------------------------------------------


def _write(trained: Bundle, check: Check, settings: ExportSettings, to: Path, tell: Tell) -> dict[str, Any]:
    """Write the model and its description into a folder; return the description."""
    signature, origin = check.signature, check.sample.origin
    tolerance = TOLERANCE[settings.precision] if settings.tolerance is None else settings.tolerance
    kept: list[str] = []
    tell(f"tracing the model{', compiling it' if settings.format == 'pt2' else ''} in {settings.precision}")
    if settings.format == "pt2":
        exported: ExportedModel = _compile(check, settings.precision, to / Pt2Model.file)
    else:
        graph, kept = _narrowed(check, settings, tolerance, tell)
        onnx_graph.save(graph, str(to / OnnxModel.file))
        exported = OnnxModel(to / OnnxModel.file, signature, threads=settings.threads)
    tell(f"comparing the export with the model on {origin}")
    difference = check.of(exported)
    if not difference.within(tolerance) and not settings.allow_drift:
        raise ExportError(drift_message(difference, tolerance, settings.precision))
    tell(f"measuring latency of batches of size {', '.join(map(str, settings.batch_sizes))}")
    how = PT2_HOW[settings.precision] if settings.format == "pt2" else onnx_graph.HOW[settings.precision]
    if kept:
        stay = "1 product stays" if len(kept) == 1 else f"{len(kept)} products stay"
        how += f"; {stay} in fp32, without which the export would drift too far"
    description = {
        "model": trained.card.model,
        "format": settings.format,
        "precision": settings.precision,
        "computed": how,
        "calibration": trained.card.calibration.method if trained.card.calibration is not None else "none",
        "signature": signature.to_dict(),
        "checked_on": origin,
        "difference": {
            "mean": float(f"{difference.mean:.3g}"),
            "largest": float(f"{difference.largest:.3g}"),
            "rows": difference.rows,
            "rows_a_call": sorted({len(rows) for rows, _ in check.calls}),
            "allowed_mean": tolerance,
            "allowed_largest": LARGEST * tolerance,
            "drifts": not difference.within(tolerance),
        },
        "auc": _auc(check, exported),
        "latency": [
            latency.measure(partial(exported.run, check.of_size(size)), size, seconds=settings.seconds).to_dict()
            for size in settings.batch_sizes
        ],
        "threads": settings.threads or torch.get_num_threads(),
        "versions": _versions(),
        "machine": machine.describe(),
        "size_bytes": sum(each.stat().st_size for each in to.iterdir()),
    }
    (to / EXPORT_FILE).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    return description


def drift_message(difference: Difference, tolerance: float, precision: str) -> str:
    """The error for an export that drifts beyond its tolerance."""
    if not difference.finite:
        return f"{precision}: the export gives probabilities that are no numbers; take another precision"
    mean, most = _beside(difference.mean, tolerance), _beside(difference.largest, LARGEST * tolerance)
    broken = {"mean": difference.mean > tolerance, "largest difference": difference.largest > LARGEST * tolerance}
    return (
        f"{precision}: probabilities drift by {mean} on average and {most} at most over {difference.rows:,} rows. The "
        f"{' and the '.join(name for name, is_so in broken.items() if is_so)} exceeded what is allowed. Nothing was "
        "written; take another precision, a larger --tolerance, or --allow-drift"
    )


def _beside(value: float, allowed: float) -> str:
    """A difference and what is allowed, with enough digits to tell them apart."""
    digits = next((few for few in range(2, 17) if f"{value:.{few}g}" != f"{allowed:.{few}g}"), 2)
    return f"{value:.{digits}g} (allowed: {allowed:.{digits}g})"


def _auc(check: Check, exported: ExportedModel) -> dict[str, float] | str:
    """AUC of the sample by the model and by the export, or why there is none."""
    labels = check.sample.labels
    if check.signature.form == "ranker":
        return "none: a ranker answers one request a call; see the form rows"
    if labels is None:
        return "none: rows were made up or had no label; give --data"
    if labels.all() or not labels.any():
        return "none: all labels of the sample are equal"
    programs = {"before": EagerModel(check.model, check.signature), "after": exported}
    return {when: round(auc(check.probabilities(each), labels), 6) for when, each in programs.items()}


def _versions() -> dict[str, str]:
    found = {}
    for name in ("recspec", "torch", "onnx", "onnxscript", "onnxruntime", "numpy"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _narrowed(check: Check, settings: ExportSettings, tolerance: float, tell: Tell) -> tuple[ModelProto, list[str]]:
    """The ONNX model at its precision, and the products that stay in fp32 so that int8 keeps to the tolerance."""
    signature = check.signature
    traced = onnx_graph.trace(Exportable(check.model, signature).eval(), signature, check.examples)
    graph = onnx_graph.to_onnx(traced, signature)
    if settings.precision != "int8":
        return onnx_graph.narrow(graph, settings.precision), []

    def drift(names: Sequence[str]) -> tuple[ModelProto, Difference]:
        narrowed = onnx_graph.with_int8_products(copy.deepcopy(graph), names)
        if onnx_graph.num_weight_bytes(narrowed) > onnx_graph.LARGEST_FILE:
            return narrowed, Difference(0.0, 0.0, 0, True)
        return narrowed, check.of(OnnxModel(narrowed.SerializeToString(), signature, threads=settings.threads))

    products = onnx_graph.wide_products(graph)
    if not products:
        raise ExportError(
            f"int8: the model has no matrix product with {onnx_graph.NARROWEST} inputs and outputs or more, so there "
            "is nothing to make smaller; take --precision fp32 or fp16"
        )
    tell("comparing int8 with the model")
    narrowed, found = drift(products)
    if found.within(tolerance) or settings.allow_drift or len(products) == 1:
        return narrowed, []
    alone = {}
    for place, name in enumerate(products, 1):
        tell(f"it drifts too far: measuring product {place} of {len(products)} in int8 alone")
        alone[name] = drift([name])[1].mean
    worst_first = sorted(products, key=alone.__getitem__, reverse=True)
    for count in range(1, len(products)):
        tell(f"comparing int8 without {count} of {len(products)} products")
        narrowed, found = drift([name for name in products if name not in worst_first[:count]])
        if found.within(tolerance):
            break
    return narrowed, worst_first[:count]


def _compile(check: Check, precision: Precision, to: Path) -> Pt2Model:
    """Compile the model to a package with AOTInductor and the C++ compiler of this machine."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ExportError(
            f"format pt2 compiles the model with '{compiler}', which is not installed; install it (Debian: apt-get "
            "install g++), name another in the environment variable CXX, or take --format onnx"
        )
    autocast = torch.bfloat16 if precision == "bf16" else None
    module = Exportable(check.model, check.signature, autocast).eval()
    traced = onnx_graph.trace(module, check.signature, check.examples)
    try:
        with torch.no_grad(), onnx_graph.quietly():
            torch._inductor.aoti_compile_and_package(
                traced, package_path=str(to), inductor_configs={"freezing": True} if autocast else None
            )
    except Exception as error:  # compilers raise many kinds
        raise ExportError(f"format pt2: AOTInductor can't compile the model: {onnx_graph.short(error)}") from error
    return Pt2Model(to, check.signature)


# --- Triton ----------------------------------------------------------------------------------------------------------


def _into_repository(
    trained: Bundle, check: Check, settings: ExportSettings, staged: Path, out: Path, tell: Tell
) -> Exported:
    """Write a new version of a model into a repository."""
    name = settings.name or trained.card.model
    if not name.replace("_", "").replace("-", "").isalnum():
        raise SettingsError(f"--name {name!r}: expected letters, digits, - and _")
    version = max(triton_repository.versions(out / name), default=0) + 1
    new = triton_repository.Staged(staged, version)
    to = new.write_model(name, check.signature, settings.triton_backend, settings.batching)
    triton_repository.refuse_other_inputs(out / name, staged / name)
    description = _write(trained, check, settings, to, tell)
    raw = _write_raw(trained, check.signature, settings, new, name) if settings.raw else None
    description["triton"] = {"model": name, "version": version, "backend": settings.triton_backend, "raw": raw}
    if trained.pipeline is not None:
        tell("writing the retrievers")
        description["triton"]["recommend"] = _write_pipeline(trained, check.signature, settings, new, name)
    (to / EXPORT_FILE).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    manifest.write(to)
    triton_repository.move_into(out, staged)
    return Exported(out / name / str(version), description)


def _write_pipeline(
    trained: Bundle, signature: Signature, settings: ExportSettings, staged: triton_repository.Staged, name: str
) -> str:
    """Write the ensemble of a pipeline; its name, or why there is none."""
    try:
        return triton_pipeline.write_pipeline(trained, staged, name, signature, settings.triton_backend)
    except ExportError as error:
        for each in staged.folder.glob(f"{name}_*"):
            if each.name not in (f"{name}_encode", f"{name}_raw"):
                shutil.rmtree(each)
        return f"none: {error}"


def _write_raw(
    trained: Bundle, signature: Signature, settings: ExportSettings, staged: triton_repository.Staged, name: str
) -> str:
    """Write the ensemble of raw values; its name, or why there is none."""
    if not trained.spec.metadata.get("encoders"):
        return "none: the dataset was not prepared by recspec, so features are what its files hold"
    try:
        encoders = Encoders.load(trained.folder)
        beside = triton_repository.histories_beside(trained.spec, [port.name for port in signature.inputs])
        staged.write_raw(name, signature, encoders, settings.batching, beside)
    except ExportError as error:
        return f"none: {error}"
    return f"{name}_raw"


# --- the check -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Rows that an export is compared with its model on."""

    batch: Batch
    labels: NDArray[np.bool_] | None
    origin: str


@dataclass(frozen=True)
class Difference:
    """How far an export's probabilities are from the model's."""

    largest: float
    mean: float
    rows: int
    finite: bool

    def within(self, tolerance: float) -> bool:
        """Whether the mean is at most the tolerance, and the largest `LARGEST` times that."""
        return self.finite and self.mean <= tolerance and self.largest <= LARGEST * tolerance


class Check:
    """The sample's probabilities by the model, to compare exports with."""

    def __init__(self, model: Model, signature: Signature, sample: Sample) -> None:
        self.model, self.signature, self.sample = model, signature, sample
        self.inputs, self.rows = as_inputs(sample.batch, signature), num_rows(sample.batch)
        self.calls = self._calls()
        with torch.inference_mode():
            self.expected = [self._expected(*call) for call in self.calls]

    @property
    def examples(self) -> list[torch.Tensor]:
        """Inputs to trace the model with: a few rows, since torch treats one row as a special case."""
        return [torch.from_numpy(each) for each in self.of_size(7).values()]

    def call(self, rows: range) -> Arrays:
        """Inputs of one call."""
        return self._picked(np.array(rows), rows.start)

    def of_size(self, size: int) -> Arrays:
        """Inputs of a call of `size` rows; the sample's rows repeat if they are fewer."""
        return self._picked(np.resize(np.arange(self.rows), size), 0)

    def of(self, exported: ExportedModel) -> Difference:
        """How far an export is from the model, over calls of several sizes."""
        found = [
            np.abs(exported.run(self._picked(*call))[self.signature.outputs[0]][:, 0].astype(np.float64) - expected)
            for call, expected in zip(self.calls, self.expected, strict=True)
        ]
        rows = sum(map(len, found))
        largest = max(0.0, *(float(each.max()) for each in found))
        finite = all(np.isfinite(each).all() for each in found)
        return Difference(largest, sum(float(each.sum()) for each in found) / rows, rows, finite)

    def probabilities(self, exported: ExportedModel) -> NDArray[np.float32]:
        """Probabilities of every row of the sample by an export of the form `rows`."""
        starts = range(0, self.rows, BLOCK)
        calls = (self.call(range(start, min(start + BLOCK, self.rows))) for start in starts)
        return np.concatenate([exported.run(call)[self.signature.outputs[0]][:, 0] for call in calls])

    def _calls(self) -> list[tuple[NDArray[np.int64], int]]:
        """Rows of each call (for a ranker: candidates), and the row whose request features it has."""
        ends = [size for size in CHECKED if size <= self.rows]
        if self.signature.form == "rows":
            blocks = [np.arange(start, min(start + BLOCK, self.rows)) for start in range(0, self.rows, BLOCK)]
            return [(rows, int(rows[0])) for rows in (*map(np.arange, ends), *blocks)]
        requests = np.unique(np.linspace(0, self.rows - 1, REQUESTS).astype(int))
        return [(np.arange(size), int(request)) for request in requests for size in ends]

    def _picked(self, rows: NDArray[np.int64], request: int) -> Arrays:
        """Inputs of some rows, with the request features of one row."""
        of_request = {port.name for port in self.signature.of_level("request")}
        one = slice(request, request + 1)
        return {name: each[one if name in of_request else rows] for name, each in self.inputs.items()}

    def _expected(self, rows: NDArray[np.int64], request: int) -> NDArray[np.float64]:
        """The model's own probabilities, by `forward` on the pairs."""
        items = take(self.sample.batch, torch.from_numpy(rows))
        for port in self.signature.of_level("request"):
            items[port.name] = self.sample.batch[port.name][request : request + 1].expand_as(items[port.name])
        return self.model.probabilities(self.model(items).float()).double().numpy()


def sample_of(trained: Bundle, data: FeatureSpec | None) -> Sample:
    """The rows that an export is checked on: a dataset's own, or made-up ones of the specification's shape.

    Rows with many events are fewer, because each takes as much work as its events.
    """
    names = trained.model.features()
    most = max(FEWEST_ROWS, MOST_EVENTS // _events_of_a_row(trained.model, signature_of(trained.spec, names, "rows")))
    if data is None:
        rows = min(MADE_UP_ROWS, most)
        with tempfile.TemporaryDirectory() as folder:
            made = synthesize(trained.spec, Path(folder) / "rows", {"test": rows}, cardinality=1000)
            return Sample(_read(made, "test", names, rows), None, f"{rows:,} made-up rows")
    check_same_features(trained.model, data, trained.folder)
    data = data.of_label(trained.spec.label)
    split = next((split for split in ("test", "valid", "train") if split in data.splits), None)
    if split is None:
        raise ExportError(f"{data.folder}: has no split to check the export on")
    labelled = data.label in data.columns(split)
    batch = _read(data, split, (*names, data.label) if labelled else names, min(SAMPLE_ROWS, most))
    if not num_rows(batch):
        raise ExportError(f"{data.folder}: split '{split}' holds no row to check the export on")
    labels = batch.pop(data.label).numpy() > 0 if labelled else None
    return Sample(batch, labels, f"the first {num_rows(batch):,} rows of {split}")


def _events_of_a_row(model: Model, signature: Signature) -> int:
    """The most events that a row has: in its longest input, or as the model knows them of a user."""
    known = max((each.longest for each in model.modules() if isinstance(each, KnownEvents)), default=1)
    read = getattr(model.settings, "length", None) or known
    return max(1, min(known, read), *(port.width for port in signature.inputs))


def _read(spec: FeatureSpec, split: str, names: Sequence[str], rows: int) -> Batch:
    reader = open_split(spec, split, tuple(dict.fromkeys(names)))
    return as_batch(reader.read(0, min(rows, reader.num_rows)), reader.spec)
