"""A model repository of NVIDIA's Triton Inference Server: folders and their configurations.

NAME/config.pbtxt, NAME/VERSION/model.onnx          the program: features in, probabilities out
NAME_encode/config.pbtxt, NAME_encode/VERSION/      raw values in, features out (Python backend, numpy alone)
NAME_raw/config.pbtxt                               both, one after the other (an ensemble)
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recspec.encoding import (
    CrossEncoder,
    Encoder,
    Encoders,
    HashEncoder,
    NumberEncoder,
    VocabularyEncoder,
    hashing,
    raw_values,
)
from recspec.errors import ExportError
from recspec.export import triton_encode, triton_onnx
from recspec.files import confine, confined
from recspec.spec import OUTPUTS, FeatureSpec, Level, Port, PortType, Signature

Backend = Literal["onnxruntime", "python"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

TYPES: Mapping[PortType, str] = {
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "string": "TYPE_STRING",
}


@dataclass(frozen=True)
class Batching:
    """How the server batches waiting requests."""

    max_batch_size: int = 131_072
    """Rows; the size that Wide & Deep was published with."""

    preferred: tuple[int, ...] = (64, 512, 4096)
    """Rows at which a batch is computed at once."""

    max_queue_delay_microseconds: int = 200
    """The longest time a request waits for others."""


@dataclass(frozen=True)
class RawColumn:
    """A raw column that the ensemble takes, and the features made from it."""

    port: Port
    features: tuple[str, ...]


@dataclass(frozen=True)
class Beside:
    """A history aligned with the history of the items' own ids."""

    items: str
    """The history of the items' ids."""
    of_items: NDArray[np.generic] | None
    """Its value for each item, by the item's id; None for numbers, which the rows hold."""


def histories_beside(spec: FeatureSpec, features: Collection[str]) -> dict[str, Beside]:
    """The model's histories that follow the items of another one: from the item catalogue, or as numbers.

    Other histories are left out.
    """
    past = [name for name in spec.role("history") if name in features]
    if not past or not spec.role("item"):
        return {}
    own = {spec.vocabulary(name): name for name in reversed(spec.role("item")) if spec.features[name].is_categorical}
    pairs = {name: own.get(spec.vocabulary(name)) for name in past if spec.features[name].is_categorical}
    items = next((name for name, item in pairs.items() if item == spec.item_id), None)
    if items is None:
        return {}
    known = _of_items(spec, {item for item in pairs.values() if item is not None} - {spec.item_id})
    made = {name: Beside(items, None) for name in past if name not in pairs}
    return made | {name: Beside(items, known[item]) for name, item in pairs.items() if item in known}


def _of_items(spec: FeatureSpec, names: Collection[str]) -> dict[str, NDArray[np.generic]]:
    """Columns of the item catalogue, by the item's id; ids below the first item's have the value 0."""
    file = spec.catalogue("item")
    if file is None or not names:
        return {}
    held = [name for name in names if name in pq.read_schema(file).names]
    table = pq.read_table(file, columns=held, partitioning=None)
    columns = {name: table.column(name).to_numpy() for name in held}
    nobody = int(spec.reserves_unknown(spec.item_id))
    return {name: np.concatenate([np.zeros(nobody, each.dtype), each]) for name, each in columns.items()}


def raw_columns(
    encoders: Encoders, signature: Signature, beside: Mapping[str, Beside] | None = None
) -> tuple[RawColumn, ...]:
    """The raw columns that a program's features are made from, in order; texts unless read as numbers alone.

    Raises:
        ExportError: naming features without an encoder, and columns that request and item features share.
    """
    beside = beside or {}
    problems = [
        f"feature '{port.name}' has no encoder"
        for port in signature.inputs
        if port.name not in encoders.encoders and (port.name not in beside or beside[port.name].of_items is None)
    ]
    problems += [
        f"feature '{port.name}': numbers of events, but no history of the items' own ids to stand beside"
        for port in signature.inputs
        if port.is_list and isinstance(encoders.encoders.get(port.name), NumberEncoder) and port.name not in beside
    ]
    if problems:
        raise ExportError.of("raw values", problems)
    readers: dict[str, list[Port]] = {}
    for port in signature.inputs:
        for column in columns_of(port.name, encoders, beside):
            readers.setdefault(column, []).append(port)
    made = []
    for column, ports in readers.items():
        levels: set[Level] = {port.level for port in ports}
        if len(levels) > 1:
            problems.append(f"column '{column}' makes request and item features; take --form rows")
        read_by = [encoders.encoders[_reader(port.name, column, encoders, beside)] for port in ports]
        numeric = all(_reads_numbers(encoder, column) for encoder in read_by)
        # Lists that are no text with a separator come as several values a row, however many.
        wide = any(
            port.is_list and getattr(encoder, "separator", None) is None
            for port, encoder in zip(ports, read_by, strict=True)
        )
        port = Port(column, "float64" if numeric else "string", -1 if wide else 1, ports[0].level)
        made.append(RawColumn(port, tuple(port.name for port in ports)))
    if problems:
        raise ExportError.of("raw values", problems)
    return tuple(made)


def columns_of(feature: str, encoders: Encoders, beside: Mapping[str, Beside]) -> tuple[str, ...]:
    """The raw columns that a feature is made from; for a history aligned with the items', the items' columns first."""
    if feature in beside:
        own = () if beside[feature].of_items is not None else columns_of(feature, encoders, {})
        return columns_of(beside[feature].items, encoders, {}) + own
    encoder = encoders.encoders[feature]
    return encoder.columns if isinstance(encoder, CrossEncoder) else (encoder.column or feature,)


def _reader(feature: str, column: str, encoders: Encoders, beside: Mapping[str, Beside]) -> str:
    """The feature whose encoder reads a column: the feature itself, or the items' history."""
    if feature in beside and column in columns_of(beside[feature].items, encoders, {}):
        return beside[feature].items
    return feature


def _reads_numbers(encoder: Encoder, column: str) -> bool:
    if isinstance(encoder, CrossEncoder):
        return column in encoder.boundaries
    if isinstance(encoder, NumberEncoder) and encoder.separator is not None:
        return False  # a list that is one text
    return not isinstance(encoder, (VocabularyEncoder, HashEncoder))


# --- folders ---------------------------------------------------------------------------------------------------------


def write_model(
    folder: Path, name: str, version: int, signature: Signature, backend: Backend, batching: Batching
) -> Path:
    """Write the configuration of a program in `folder/name`, and return the folder for its model.onnx."""
    to = folder / name / str(version)
    to.mkdir(parents=True)
    if backend == "python":
        _copy_module(triton_onnx, to / "model.py")
    kind = ['platform: "onnxruntime_onnx"'] if backend == "onnxruntime" else ['backend: "python"']
    text = _config(name, kind, signature.inputs, _outputs(signature), signature, batching)
    (folder / name / "config.pbtxt").write_text(text, encoding="utf-8")
    return to


def write_raw(
    folder: Path,
    name: str,
    version: int,
    signature: Signature,
    encoders: Encoders,
    batching: Batching,
    beside: Mapping[str, Beside] | None = None,
) -> None:
    """Write `NAME_encode` and the ensemble `NAME_raw`, which takes raw values.

    Raises:
        ExportError: naming features whose raw columns are not known.
    """
    beside = beside or {}
    columns = [column.port for column in raw_columns(encoders, signature, beside)]
    encode = folder / f"{name}_encode" / str(version)
    encode.mkdir(parents=True)
    _copy_module(triton_encode, encode / "model.py")
    for module in (hashing, raw_values):
        _copy_module(module, encode / f"{module.__name__.rpartition('.')[2]}.py")
    _write_encoders(encode, columns, signature, encoders, beside)
    text = _config(f"{name}_encode", ['backend: "python"'], columns, signature.inputs, signature, batching)
    (encode.parent / "config.pbtxt").write_text(text, encoding="utf-8")
    raw = folder / f"{name}_raw"
    (raw / str(version)).mkdir(parents=True)
    (raw / str(version) / ".keep").write_text("", encoding="utf-8")  # an ensemble's version is an empty folder
    steps = _ensemble(name, columns, signature)
    outputs = _outputs(signature)
    text = _config(f"{name}_raw", ['platform: "ensemble"'], columns, outputs, signature, batching, more=steps)
    (raw / "config.pbtxt").write_text(text, encoding="utf-8")


def _write_encoders(
    to: Path, columns: Sequence[Port], signature: Signature, encoders: Encoders, beside: Mapping[str, Beside]
) -> None:
    told = {
        "columns": [{"name": port.name, "dtype": port.dtype} for port in columns],
        "features": [_feature(port, encoders, beside) for port in signature.inputs],
    }
    (to / triton_encode.ENCODE_FILE).write_text(json.dumps(told, indent=1, ensure_ascii=False), encoding="utf-8")
    (to / "vocabularies").mkdir()
    for port in signature.inputs:
        encoder = encoders.encoders.get(beside[port.name].items if port.name in beside else port.name)
        if isinstance(encoder, VocabularyEncoder):
            values = encoders.vocabularies[encoder.vocabulary].values.to_pylist()
            file = confined(to / "vocabularies", f"{encoder.vocabulary}.json")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    (to / triton_encode.OF_ITEMS).mkdir()
    for feature, own in beside.items():
        if own.of_items is not None:
            file = confined(to / triton_encode.OF_ITEMS, f"{feature}.npy")
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file, own.of_items, allow_pickle=False)


def _feature(port: Port, encoders: Encoders, beside: Mapping[str, Beside]) -> dict[str, object]:
    """One feature as `triton_encode` reads it."""
    encoder = encoders.encoders.get(port.name)
    told: dict[str, object] = {
        "name": port.name,
        "dtype": port.dtype,
        "width": port.width,
        "is_list": port.is_list,
        "columns": list(columns_of(port.name, encoders, beside)),
        "encoder": encoder.model_dump(mode="json") if encoder is not None else {},
    }
    if port.name in beside:
        told["items"] = encoders.encoders[beside[port.name].items].model_dump(mode="json")
    return told


def _copy_module(module: ModuleType, to: Path) -> None:
    """Copy a module so that it imports the copies beside it instead of recspec."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    source = re.sub(r"^from recspec\.encoding import (\w+)$", r"import \1", source, flags=re.MULTILINE)
    source = re.sub(r"^from recspec\.encoding\.(\w+) import", r"from \1 import", source, flags=re.MULTILINE)
    to.write_text(source, encoding="utf-8")


def versions(folder: Path) -> list[int]:
    """The versions of a model that a repository holds, ascending."""
    return sorted(int(each.name) for each in folder.glob("*") if each.is_dir() and each.name.isdecimal())


def move_into(repository: Path, staged: Path) -> None:
    """Move the model folders under `staged` into a repository, beside the versions that are there.

    Versions are renamed, not copied, so a server that reads the repository meanwhile finds each one whole.
    """
    repository.mkdir(parents=True, exist_ok=True)
    confine(repository, (str(each.relative_to(staged)) for each in sorted(staged.rglob("*"))))
    for model in sorted(staged.iterdir()):
        there = repository / model.name
        if not there.exists():
            model.rename(there)
            continue
        for version in versions(model):
            old = there / str(version)
            if old.exists():
                shutil.rmtree(old)
            (model / str(version)).rename(old)
        (model / "config.pbtxt").replace(there / "config.pbtxt")


# --- config.pbtxt ----------------------------------------------------------------------------------------------------


def _outputs(signature: Signature) -> tuple[Port, ...]:
    level: Level = "row" if signature.form == "rows" else "item"
    return tuple(Port(name, "float32", 1, level) for name in OUTPUTS)


def _config(
    name: str,
    kind: Iterable[str],
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    signature: Signature,
    batching: Batching,
    *,
    more: Sequence[str] = (),
) -> str:
    """The text of a configuration. A ranker's requests are not batched, as each has its own request features."""
    batches = signature.form == "rows"
    lines = [f"name: {_quoted(name)}", *kind, f"max_batch_size: {batching.max_batch_size if batches else 0}"]
    lines += _ports("input", inputs, batches) + _ports("output", outputs, batches)
    ensemble = any("ensemble" in line for line in kind)
    if batches and not ensemble:
        preferred = ", ".join(map(str, batching.preferred))
        lines += [
            "dynamic_batching {",
            f"  preferred_batch_size: [ {preferred} ]",
            f"  max_queue_delay_microseconds: {batching.max_queue_delay_microseconds}",
            "}",
        ]
    if any("python" in line for line in kind):
        lines.append("instance_group [ { count: 1 kind: KIND_CPU } ]")
    return "\n".join([*lines, *more]) + "\n"


def _ports(kind: str, ports: Sequence[Port], batches: bool) -> list[str]:
    lines = []
    for port in ports:
        rows = [] if batches else [1 if port.level == "request" else -1]
        dims = ", ".join(map(str, [*rows, port.width]))
        lines.append(f"{kind} {{ name: {_quoted(port.name)} data_type: {TYPES[port.dtype]} dims: [ {dims} ] }}")
    return lines


def _quoted(text: str) -> str:
    """A text in the protobuf text format, which has JSON's escapes; a feature may have any name."""
    return json.dumps(text, ensure_ascii=False)


def _ensemble(name: str, columns: Sequence[Port], signature: Signature) -> list[str]:
    """Two steps: raw columns to features, features to probabilities. Names inside start with `feature.`."""

    def step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> list[str]:
        lines = ["  step {", f"    model_name: {_quoted(model)}", "    model_version: -1"]
        lines += [f"    input_map {{ key: {_quoted(key)} value: {_quoted(value)} }}" for key, value in inputs.items()]
        lines += [f"    output_map {{ key: {_quoted(key)} value: {_quoted(value)} }}" for key, value in outputs.items()]
        return [*lines, "  }"]

    raw = {port.name: port.name for port in columns}
    inside = {port.name: f"feature.{port.name}" for port in signature.inputs}
    answers = {name: name for name in OUTPUTS}
    return [
        "ensemble_scheduling {",
        *step(f"{name}_encode", raw, inside),
        *step(name, inside, answers),
        "}",
    ]
