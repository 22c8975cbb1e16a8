"""A model repository of NVIDIA's Triton Inference Server: its configurations, and the folders they stand in.

NAME/config.pbtxt, NAME/VERSION/model.onnx          the program: features in, probabilities out
NAME_encode/config.pbtxt, NAME_encode/VERSION/      raw values in, features out (Python backend, numpy alone)
NAME_raw/config.pbtxt                               both, one after the other (an ensemble)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from recspec import hashing, triton_encode, triton_onnx
from recspec.encoding import CrossEncoder, Encoder, Encoders, HashEncoder, NumberEncoder, VocabularyEncoder
from recspec.errors import ExportError
from recspec.signature import OUTPUTS, Level, Port, PortType, Signature

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
    """How the server joins requests that wait."""

    max_batch_size: int = 131_072
    """Rows; the size that Wide & Deep was published with."""

    preferred: tuple[int, ...] = (64, 512, 4096)
    """Rows at which a batch is sent off at once."""

    max_queue_delay_microseconds: int = 200
    """Longest that a request waits for others."""


@dataclass(frozen=True)
class RawColumn:
    """A raw column that the ensemble takes: its type, whether it holds lists, and what a row of it belongs to."""

    port: Port
    features: tuple[str, ...]


UNKNOWN_KEYS = ("buckets", "otherwise", "whole", "needs_all")
"""Of encoders of models that TensorFlow trained: `triton_encode` would give other ids than theirs."""


def raw_columns(encoders: Encoders, signature: Signature) -> tuple[RawColumn, ...]:
    """The raw columns that a program's features are made from, in order; texts unless read as numbers alone.

    Raises:
        ExportError: naming features without an encoder, and columns that request and item features share.
    """
    problems = [
        f"feature '{port.name}' has no encoder" for port in signature.inputs if port.name not in encoders.encoders
    ]
    problems += [
        f"feature '{port.name}': the ensemble does not apply '{key}' of its encoder; `recspec serve` answers raw rows"
        for port in signature.inputs
        for key in UNKNOWN_KEYS
        if getattr(encoders.encoders.get(port.name), key, None)
        and not isinstance(encoders.encoders[port.name], NumberEncoder)
    ]
    if problems:
        raise ExportError.of("raw values", problems)
    readers: dict[str, list[Port]] = {}
    for port in signature.inputs:
        for column in columns_of(port.name, encoders.encoders[port.name]):
            readers.setdefault(column, []).append(port)
    made = []
    for column, ports in readers.items():
        levels: set[Level] = {port.level for port in ports}
        if len(levels) > 1:
            problems.append(f"column '{column}' makes request and item features; take --form rows")
        numeric = all(_reads_numbers(encoders.encoders[port.name], column) for port in ports)
        # Lists that are no text with a separator come as several values a row, however many.
        wide = any(port.is_list and getattr(encoders.encoders[port.name], "separator", None) is None for port in ports)
        port = Port(column, "float64" if numeric else "string", -1 if wide else 1, ports[0].level)
        made.append(RawColumn(port, tuple(port.name for port in ports)))
    if problems:
        raise ExportError.of("raw values", problems)
    return tuple(made)


def columns_of(feature: str, encoder: Encoder) -> tuple[str, ...]:
    """The raw columns that a feature is made from."""
    return encoder.columns if isinstance(encoder, CrossEncoder) else (encoder.column or feature,)


def _reads_numbers(encoder: Encoder, column: str) -> bool:
    if isinstance(encoder, CrossEncoder):
        return column in encoder.boundaries
    return not isinstance(encoder, (VocabularyEncoder, HashEncoder))


# --- folders ---------------------------------------------------------------------------------------------------------


def write_model(
    folder: Path, name: str, version: int, signature: Signature, backend: Backend, batching: Batching
) -> Path:
    """Write the configuration of a program in `folder/name`, and give the folder that its model.onnx belongs in."""
    to = folder / name / str(version)
    to.mkdir(parents=True)
    if backend == "python":
        _copy_module(triton_onnx, to / "model.py")
    kind = ['platform: "onnxruntime_onnx"'] if backend == "onnxruntime" else ['backend: "python"']
    text = _config(name, kind, signature.inputs, _outputs(signature), signature, batching)
    (folder / name / "config.pbtxt").write_text(text, encoding="utf-8")
    return to


def write_raw(
    folder: Path, name: str, version: int, signature: Signature, encoders: Encoders, batching: Batching
) -> None:
    """Write `NAME_encode` and the ensemble `NAME_raw`, which takes raw values.

    Raises:
        ExportError: if some feature's raw value is not known.
    """
    columns = [column.port for column in raw_columns(encoders, signature)]
    encode = folder / f"{name}_encode" / str(version)
    encode.mkdir(parents=True)
    _copy_module(triton_encode, encode / "model.py")
    _copy_module(hashing, encode / "hashing.py")
    _write_encoders(encode, columns, signature, encoders)
    text = _config(f"{name}_encode", ['backend: "python"'], columns, signature.inputs, signature, batching)
    (encode.parent / "config.pbtxt").write_text(text, encoding="utf-8")
    raw = folder / f"{name}_raw"
    (raw / str(version)).mkdir(parents=True)
    (raw / str(version) / ".keep").write_text("", encoding="utf-8")  # an ensemble's version is an empty folder
    steps = _ensemble(name, columns, signature)
    outputs = _outputs(signature)
    text = _config(f"{name}_raw", ['platform: "ensemble"'], columns, outputs, signature, batching, more=steps)
    (raw / "config.pbtxt").write_text(text, encoding="utf-8")


def _write_encoders(to: Path, columns: Sequence[Port], signature: Signature, encoders: Encoders) -> None:
    features = [
        {
            "name": port.name,
            "dtype": port.dtype,
            "width": port.width,
            "is_list": port.is_list,
            "columns": list(columns_of(port.name, encoders.encoders[port.name])),
            "encoder": encoders.encoders[port.name].model_dump(mode="json"),
        }
        for port in signature.inputs
    ]
    told = {"columns": [{"name": port.name, "dtype": port.dtype} for port in columns], "features": features}
    (to / triton_encode.ENCODE_FILE).write_text(json.dumps(told, indent=1, ensure_ascii=False), encoding="utf-8")
    (to / "vocabularies").mkdir()
    for port in signature.inputs:
        encoder = encoders.encoders[port.name]
        if isinstance(encoder, VocabularyEncoder):
            values = encoders.vocabularies[encoder.vocabulary].values.to_pylist()
            file = to / "vocabularies" / f"{encoder.vocabulary}.json"
            file.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")


def _copy_module(module: object, to: Path) -> None:
    """A module of ours as a file that stands alone: what it imports of recspec lies beside it."""
    source = Path(str(getattr(module, "__file__"))).read_text(encoding="utf-8")  # noqa: B009 - any module has it
    to.write_text(source.replace("from recspec.hashing import", "from hashing import"), encoding="utf-8")


def versions(folder: Path) -> list[int]:
    """The versions of a model that a repository holds, ascending."""
    return sorted(int(each.name) for each in folder.glob("*") if each.is_dir() and each.name.isdigit())


def move_into(repository: Path, staged: Path) -> None:
    """Move the model folders under `staged` into a repository: versions beside those that are there.

    A server that looks at the repository meanwhile finds each version whole: it is renamed, not copied.
    """
    repository.mkdir(parents=True, exist_ok=True)
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
    """The text of a configuration. Requests of a ranker are not joined: each has its own request features."""
    batches = signature.form == "rows"
    lines = [f'name: "{name}"', *kind, f"max_batch_size: {batching.max_batch_size if batches else 0}"]
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
        lines.append(f'{kind} {{ name: "{port.name}" data_type: {TYPES[port.dtype]} dims: [ {dims} ] }}')
    return lines


def _ensemble(name: str, columns: Sequence[Port], signature: Signature) -> list[str]:
    """Two steps: raw columns to features, features to probabilities. Names inside start with `feature.`."""

    def step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> list[str]:
        lines = ["  step {", f'    model_name: "{model}"', "    model_version: -1"]
        lines += [f'    input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
        lines += [f'    output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()]
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
