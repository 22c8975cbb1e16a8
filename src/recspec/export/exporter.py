"""Exports a bundle to ONNX, AOTInductor or a Triton model repository, and compares the export with the model.

Every export holds `export.json`: the difference of its probabilities from the model's, AUC of both on a sample, latency
by batch size, size, versions, and the arithmetic of each precision. An export that drifts beyond its tolerance is not
written.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from recspec import latency, machine
from recspec.batch import Batch, num_rows, take
from recspec.bundle import Bundle
from recspec.encoding import Encoders
from recspec.errors import ExportError, SettingsError, listed, unknown
from recspec.evaluation import as_batch, check_same_features
from recspec.export import onnx_graph, triton_repository
from recspec.export.exported_model import (
    ONNX_FILE,
    PT2_FILE,
    Arrays,
    EagerModel,
    Exportable,
    ExportedModel,
    OnnxModel,
    Pt2Model,
    as_inputs,
)
from recspec.export.onnx_graph import Precision
from recspec.export.triton_repository import Backend, Batching
from recspec.files import local, locked, made, manifest, staging, whole_folder
from recspec.metrics import auc
from recspec.models import Model
from recspec.spec import EXPORT_FILE, FORMS, PROBABILITY, FeatureSpec, Form, Signature, find_export_file, signature_of
from recspec.storage import open_split, synthesize

if TYPE_CHECKING:
    from onnx import ModelProto

Format = Literal["onnx", "pt2", "triton"]
FORMATS: tuple[Format, ...] = get_args(Format)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

TOLERANCE: Mapping[Precision, float] = {"fp32": 1e-6, "bf16": 5e-4, "fp16": 2e-4, "int8": 5e-4}
"""Mean difference of probabilities that an export may have; the largest may be `LARGEST` times that.

fp16: what NVIDIA published for Wide & Deep in mixed precision; int8 and bf16: what ranking does not notice.
"""
LARGEST = 20

SAMPLE_ROWS = 20_000
MADE_UP_ROWS = 4_096
CHECKED = (1, 2, 7, 64, 1000)
"""Rows of a call at which an export is compared with the model; the whole sample follows in calls of `BLOCK`."""
BLOCK = 4_096
REQUESTS = 8
"""Requests that a ranker is compared on, each with the sample's items as candidates."""

PT2_HOW: Mapping[Precision, str] = {
    "fp32": "weights and products in fp32",
    "bf16": "matrix products in bf16 (torch's autocast), in hardware where the CPU has AVX-512 BF16 or AMX; embeddings "
    "and sums in fp32",
}

Floats = NDArray[np.float32]
Tell = Callable[[str], None]
"""Told each stage as it begins, in words."""


def silent(stage: str) -> None:
    """Stages that nobody watches."""


@dataclass(frozen=True)
class ExportSettings:
    """What to export, and how it is checked."""

    format: Format = "onnx"
    precision: Precision = "fp32"
    form: Form = "rows"
    tolerance: float | None = None
    """Mean difference of probabilities; None: `TOLERANCE` of the precision."""
    allow_drift: bool = False
    batch_sizes: tuple[int, ...] = (1, 64, 512, 4096)
    """At which latency is measured."""
    seconds: float = 0.5
    """Of measuring, for each batch size."""
    threads: int | None = None
    name: str | None = None
    """Of the model in a Triton repository; the model's own by default."""
    triton_backend: Backend = "onnxruntime"
    batching: Batching = field(default_factory=Batching)
    raw: bool = True
    """Whether a Triton repository gets the ensemble that takes raw values, where the bundle knows them."""

    def __post_init__(self) -> None:
        problems = [
            unknown(what, value, known)
            for what, value, known in (
                ("format", self.format, FORMATS),
                ("precision", self.precision, PRECISIONS),
                ("form", self.form, FORMS),
                ("triton backend", self.triton_backend, triton_repository.BACKENDS),
            )
            if value not in known
        ]
        if self.format == "pt2" and self.precision not in PT2_HOW:
            problems.append(f"format pt2 has the precisions {listed(PT2_HOW)}; take --format onnx for {self.precision}")
        if self.tolerance is not None and self.tolerance < 0:
            problems.append(f"tolerance is {self.tolerance}; expected 0 or more")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            problems.append(f"batch sizes are {list(self.batch_sizes)}; expected whole numbers from 1")
        if problems:
            raise SettingsError.of("export", problems)


@dataclass(frozen=True)
class Exported:
    """An export on disk, and the content of its `export.json`."""

    folder: Path
    description: dict[str, Any]


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
        data: A prepared dataset whose test rows (or valid, or train) the export is checked on, AUC included; rows of
            the specification's shape are made up without.
        tell: Told each stage as it begins.

    Raises:
        ExportError: if the model can't be exported, or the export's probabilities drift beyond the tolerance. Nothing
            is left behind then.
    """
    out, settings = local(out, "OUT"), settings or ExportSettings()
    with locked(out, "exporting into"):
        refuse_to_replace(out, settings)
        try:
            return _export(trained, out, settings, data, tell)
        except OSError as error:
            raise ExportError(f"{out}: the export could not be written: {error}") from None


def _export(trained: Bundle, out: Path, settings: ExportSettings, data: FeatureSpec | None, tell: Tell) -> Exported:
    model = trained.model.eval()
    signature = signature_of(trained.spec, model.features(), settings.form)
    tell("reading rows to check the export on" if data is not None else "making up rows to check the export on")
    sample = sample_of(trained, data)
    if settings.format == "triton":
        with made(out.parent), staging(out) as staged:
            return _into_repository(trained, signature, sample, settings, staged, out, tell)
    with whole_folder(out) as folder:
        description = _write(trained, signature, sample, settings, folder, tell)
        manifest.write(folder)
    return Exported(out, description)


def refuse_to_replace(out: Path, settings: ExportSettings) -> None:
    """An export replaces an older one, and nothing else.

    Raises:
        ExportError: if `out` is a file, or a folder that holds something else.
    """
    if out.is_file():
        raise ExportError(f"{out}: is a file; expected a folder to write")
    if settings.format != "triton" and out.is_dir() and any(out.iterdir()) and find_export_file(out) is None:
        raise ExportError(f"{out}: holds something that is no export; name another folder, or empty this one")


# --- the export -----------------------------------------------------------------------------------------------------


def _write(
    trained: Bundle, signature: Signature, sample: Sample, settings: ExportSettings, to: Path, tell: Tell
) -> dict[str, Any]:
    """Write the model and its description into a folder; return the description."""
    model = trained.model
    tolerance = TOLERANCE[settings.precision] if settings.tolerance is None else settings.tolerance
    check = Check(model, signature, sample)
    kept: list[str] = []
    tell(f"tracing the model{', compiling it' if settings.format == 'pt2' else ''} in {settings.precision}")
    if settings.format == "pt2":
        exported: ExportedModel = _compile(model, signature, check.examples, settings.precision, to / PT2_FILE)
    else:
        graph, kept = _narrowed(model, signature, settings, check, tolerance)
        onnx_graph.save(graph, str(to / ONNX_FILE))
        exported = OnnxModel(to / ONNX_FILE, signature, threads=settings.threads)
    tell(f"comparing the export with the model on {sample.origin}")
    difference = check.of(exported)
    if not difference.within(tolerance) and not settings.allow_drift:
        raise ExportError(drift_message(difference, tolerance, settings.precision))
    tell(f"measuring latency of calls of {', '.join(map(str, settings.batch_sizes))} rows")
    description = _describe(trained, signature, settings, sample, check, exported, difference, tolerance, kept)
    description["size_bytes"] = sum(each.stat().st_size for each in to.iterdir())
    (to / EXPORT_FILE).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    return description


def drift_message(difference: Difference, tolerance: float, precision: str) -> str:
    """Why an export is refused, and what to do."""
    if not difference.finite:
        return f"{precision}: the export gives probabilities that are no numbers; take another precision"
    return (
        f"{precision}: probabilities drift by {difference.mean:.2g} on average and {difference.largest:.2g} at most "
        f"over {difference.rows:,} rows; allowed are {tolerance:.2g} and {LARGEST * tolerance:.2g}. Nothing was "
        "written; take another precision, a larger --tolerance, or --allow-drift"
    )


def _narrowed(
    model: Model, signature: Signature, settings: ExportSettings, check: Check, tolerance: float
) -> tuple[ModelProto, list[str]]:
    """The ONNX model at its precision, and the products that stay in fp32 so that int8 keeps to the tolerance."""
    traced = onnx_graph.trace(Exportable(model, signature).eval(), signature, check.examples)
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
    narrowed, found = drift(products)
    if found.within(tolerance) or settings.allow_drift or len(products) == 1:
        return narrowed, []
    alone = {name: drift([name])[1].mean for name in products}
    worst_first = sorted(products, key=lambda name: alone[name], reverse=True)
    for count in range(1, len(products)):
        chosen = [name for name in products if name not in worst_first[:count]]
        narrowed, found = drift(chosen)
        if found.within(tolerance):
            return narrowed, worst_first[:count]
    return narrowed, worst_first[:-1]


def _compile(
    model: Model, signature: Signature, examples: Sequence[torch.Tensor], precision: Precision, to: Path
) -> Pt2Model:
    """A package that AOTInductor makes with the C++ compiler of this machine.

    Raises:
        ExportError: if there is no compiler, or it fails.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ExportError(
            f"format pt2 compiles the model with '{compiler}', which is not installed; install it (Debian: apt-get "
            "install g++), name another in the environment variable CXX, or take --format onnx"
        )
    autocast = torch.bfloat16 if precision == "bf16" else None
    traced = onnx_graph.trace(Exportable(model, signature, autocast).eval(), signature, examples)
    try:
        with torch.no_grad(), onnx_graph.quietly():
            torch._inductor.aoti_compile_and_package(
                traced, package_path=str(to), inductor_configs={"freezing": True} if autocast else None
            )
    except Exception as error:  # a compiler's failure comes as many kinds
        raise ExportError(f"format pt2: AOTInductor can't compile the model: {onnx_graph.short(error)}") from error
    return Pt2Model(to, signature)


# --- Triton ----------------------------------------------------------------------------------------------------------


def _into_repository(
    trained: Bundle,
    signature: Signature,
    sample: Sample,
    settings: ExportSettings,
    staged: Path,
    out: Path,
    tell: Tell,
) -> Exported:
    """A new version of a model in a repository."""
    name = settings.name or trained.card.model
    if not name.replace("_", "").replace("-", "").isalnum():
        raise SettingsError(f"--name {name!r}: expected letters, digits, - and _")
    known = triton_repository.versions(out / name)
    version = known[-1] + 1 if known else 1
    to = triton_repository.write_model(staged, name, version, signature, settings.triton_backend, settings.batching)
    _refuse_other_inputs(out / name, staged / name)
    description = _write(trained, signature, sample, replace(settings, format="triton"), to, tell)
    description["triton"] = {"model": name, "version": version, "backend": settings.triton_backend, "raw": None}
    if settings.raw:
        description["triton"]["raw"] = _write_raw(trained, signature, settings, staged, name, version)
    (to / EXPORT_FILE).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    manifest.write(to)
    triton_repository.move_into(out, staged)
    return Exported(out / name / str(version), description)


def _write_raw(
    trained: Bundle, signature: Signature, settings: ExportSettings, staged: Path, name: str, version: int
) -> str:
    """Write the ensemble of raw values; its name, or why there is none."""
    if not trained.spec.metadata.get("encoders"):
        return "none: the dataset was not prepared by recspec, so features are what its files hold"
    try:
        encoders = Encoders.load(trained.folder)
        names = [port.name for port in signature.inputs]
        beside = triton_repository.histories_beside(trained.spec, names)
        triton_repository.write_raw(staged, name, version, signature, encoders, settings.batching, beside)
    except ExportError as error:
        return f"none: {error}"
    return f"{name}_raw"


def _refuse_other_inputs(there: Path, made: Path) -> None:
    """Versions of a model in a repository share one configuration.

    Raises:
        ExportError: if the one that is there differs.
    """
    file = there / "config.pbtxt"
    if not file.is_file():
        return
    old, new = (_ports((folder / "config.pbtxt").read_text(encoding="utf-8")) for folder in (there, made))
    if old != new:
        differing = sorted(set(old) ^ set(new))
        raise ExportError(
            f"{file}: the model that is there takes other inputs or another backend ({'; '.join(differing[:4])}); "
            "versions of a model share them, so give this one another --name"
        )


def _ports(config: str) -> list[str]:
    lines = (line.strip() for line in config.splitlines())
    return [line for line in lines if line.startswith(("input", "output", "platform", "backend"))]


# --- the check -------------------------------------------------------------------------------------------------------


class Check:
    """The sample's probabilities by the model, to compare exports with."""

    def __init__(self, model: Model, signature: Signature, sample: Sample) -> None:
        self.signature, self.sample = signature, sample
        self.inputs = as_inputs(sample.batch, signature)
        self.rows = num_rows(sample.batch)
        self.calls = list(self._calls())
        with torch.inference_mode():
            self.expected = [self._expected(model, call) for call in self.calls]

    @property
    def examples(self) -> list[torch.Tensor]:
        """Inputs to trace the model with: a few rows, since torch takes one row for a special case."""
        picked = self.of_size(7)
        return [torch.from_numpy(picked[port.name]) for port in self.signature.inputs]

    def call(self, rows: range) -> Arrays:
        """Inputs of one call."""
        return self._picked(self.inputs, np.array(rows), rows.start)

    def of_size(self, size: int) -> Arrays:
        """Inputs of a call of `size` rows, which repeat where the sample has fewer."""
        return self._picked(self.inputs, np.resize(np.arange(self.rows), size), 0)

    def of(self, exported: ExportedModel) -> Difference:
        """How far an export is from the model, over calls of several sizes."""
        largest, total, count, finite = 0.0, 0.0, 0, True
        for (rows, request), expected in zip(self.calls, self.expected, strict=True):
            found = exported.run(self._picked(self.inputs, rows, request))[PROBABILITY][:, 0]
            difference = np.abs(found.astype(np.float64) - expected)
            finite = finite and bool(np.isfinite(difference).all())
            largest, total, count = (
                max(largest, float(difference.max())),
                total + float(difference.sum()),
                count + len(rows),
            )
        return Difference(largest, total / count, count, finite)

    def probabilities(self, exported: ExportedModel) -> Floats:
        """Of every row of the sample, by an export of the form `rows`."""
        parts = [
            exported.run(self.call(range(start, min(start + BLOCK, self.rows))))[PROBABILITY][:, 0]
            for start in range(0, self.rows, BLOCK)
        ]
        return np.concatenate(parts)

    def _calls(self) -> Sequence[tuple[NDArray[np.int64], int]]:
        """Rows of each call (for a ranker: candidates), and the row whose request features it has."""
        ends = [size for size in CHECKED if size <= self.rows]
        if self.signature.form == "rows":
            calls = [(np.arange(size), 0) for size in ends]
            return calls + [
                (np.arange(start, min(start + BLOCK, self.rows)), start) for start in range(0, self.rows, BLOCK)
            ]
        requests = np.unique(np.linspace(0, self.rows - 1, REQUESTS).astype(int))
        return [(np.arange(size), int(request)) for request in requests for size in ends]

    def _picked(self, inputs: Arrays, rows: NDArray[np.int64], request: int) -> Arrays:
        return {
            port.name: inputs[port.name][request : request + 1] if port.level == "request" else inputs[port.name][rows]
            for port in self.signature.inputs
        }

    def _expected(self, model: Model, call: tuple[NDArray[np.int64], int]) -> NDArray[np.float64]:
        """The model's own probabilities, by `forward` on the pairs."""
        rows, request = call
        items = take(self.sample.batch, torch.from_numpy(rows))
        for port in self.signature.of_level("request"):
            items[port.name] = self.sample.batch[port.name][request : request + 1].expand_as(items[port.name])
        return torch.sigmoid(model(items).float()).double().numpy()


def sample_of(trained: Bundle, data: FeatureSpec | None) -> Sample:
    """The rows that an export is checked on: a dataset's own, or made-up ones of the specification's shape."""
    names = trained.model.features()
    if data is None:
        with tempfile.TemporaryDirectory() as folder:
            made = synthesize(trained.spec, Path(folder) / "rows", {"test": MADE_UP_ROWS}, cardinality=1000)
            return Sample(_read(made, "test", names, MADE_UP_ROWS), None, f"{MADE_UP_ROWS:,} made-up rows")
    check_same_features(trained.model, data)
    split = next((split for split in ("test", "valid", "train") if split in data.splits), None)
    if split is None:
        raise ExportError(f"{data.folder}: has no split to check the export on")
    labelled = data.label in data.columns(split)
    batch = _read(data, split, (*names, data.label) if labelled else names, SAMPLE_ROWS)
    if not num_rows(batch):
        raise ExportError(f"{data.folder}: split '{split}' holds no row to check the export on")
    labels = batch.pop(data.label).numpy() > 0 if labelled else None
    return Sample(batch, labels, f"the first {num_rows(batch):,} rows of {split}")


def _read(spec: FeatureSpec, split: str, names: Sequence[str], rows: int) -> Batch:
    reader = open_split(spec, split, tuple(dict.fromkeys(names)))
    columns = reader.read(0, min(rows, reader.num_rows))
    return as_batch({name: columns[name] for name in dict.fromkeys(names)}, reader.spec)


# --- the description -------------------------------------------------------------------------------------------------


def _describe(
    trained: Bundle,
    signature: Signature,
    settings: ExportSettings,
    sample: Sample,
    check: Check,
    exported: ExportedModel,
    difference: Difference,
    tolerance: float,
    kept: Sequence[str],
) -> dict[str, Any]:
    how = PT2_HOW[settings.precision] if settings.format == "pt2" else onnx_graph.HOW[settings.precision]
    if kept:
        how += f"; {len(kept)} of the products stay in fp32, without which the export would drift too far"
    threads = settings.threads or torch.get_num_threads()
    return {
        "model": trained.card.model,
        "format": settings.format,
        "precision": settings.precision,
        "computed": how,
        "signature": signature.to_dict(),
        "checked_on": sample.origin,
        "difference": {
            **{
                key: float(f"{value:.3g}")
                for key, value in (("mean", difference.mean), ("largest", difference.largest))
            },
            "rows": difference.rows,
            "rows_a_call": sorted({len(rows) for rows, _ in check.calls}),
            "allowed_mean": tolerance,
            "allowed_largest": LARGEST * tolerance,
            "drifts": not difference.within(tolerance),
        },
        "auc": _auc(signature, sample, check, exported, trained.model),
        "latency": [
            latency.measure(_call(exported, check.of_size(size)), size, seconds=settings.seconds).to_dict()
            for size in settings.batch_sizes
        ],
        "threads": threads,
        "versions": _versions(),
        "machine": machine.describe(),
    }


def _call(exported: ExportedModel, inputs: Arrays) -> Callable[[], object]:
    return lambda: exported.run(inputs)


def _auc(
    signature: Signature, sample: Sample, check: Check, exported: ExportedModel, model: Model
) -> dict[str, float] | str:
    """AUC of the sample by the model and by the export, or why there is none."""
    if signature.form == "ranker":
        return "none: a ranker answers one request a call; see the form rows"
    if sample.labels is None:
        return "none: rows were made up or had no label; give --data"
    if sample.labels.all() or not sample.labels.any():
        return "none: all labels of the sample are equal"
    before, after = (check.probabilities(each) for each in (EagerModel(model, signature), exported))
    return {"before": round(auc(before, sample.labels), 6), "after": round(auc(after, sample.labels), 6)}


def _versions() -> dict[str, str]:
    found = {}
    for name in ("recspec", "torch", "onnx", "onnxscript", "onnxruntime", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
