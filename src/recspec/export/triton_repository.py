"""A model repository of NVIDIA's Triton Inference Server: folders and their configurations.

NAME/config.pbtxt, NAME/VERSION/model.onnx          the program: features in, probabilities out
NAME_encode/config.pbtxt, NAME_encode/VERSION/      raw values in, features out (Python backend, numpy alone)
NAME_raw/config.pbtxt                               both, one after the other (an ensemble)

`triton_pipeline` adds the retrieval stage of a pipeline.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recspec.base.errors import ExportError
from recspec.base.files import confine, confined
from recspec.data.encoding import (
    CrossEncoder,
    Encoder,
    Encoders,
    NumberEncoder,
    TextEncoder,
    VocabularyEncoder,
    hashing,
    raw_values,
    text_vectors,
)
from recspec.export import triton_model
from recspec.export.exported_model import unused_prefix
from recspec.feature_spec import FeatureSpec, Level, Port, PortType, Signature
from recspec.inference import merging

Backend = Literal["onnxruntime", "python"]

PYTHON, ENSEMBLE, ONNX_RUNTIME = 'backend: "python"', 'platform: "ensemble"', 'platform: "onnxruntime_onnx"'

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

    max_batch_size: int = 131_072  # rows; the size that Wide & Deep was published with
    preferred: tuple[int, ...] = (64, 512, 4096)  # rows at which a batch is computed at once
    max_queue_delay_microseconds: int = 200  # the longest time a request waits for others


@dataclass(frozen=True)
class Beside:
    """A history aligned with the history of the items' own ids."""

    items: str  # the history of the items' ids
    of_items: NDArray[np.generic] | None  # the value of each item by its id; None for numbers, which the rows hold


def histories_beside(spec: FeatureSpec, features: Collection[str]) -> dict[str, Beside]:
    """The model's histories that follow the history of item ids: from the item catalogue, or as numbers."""
    past = [name for name in spec.role("history") if name in features]
    if not past or not spec.role("item"):
        return {}
    own = {spec.vocabulary(name): name for name in reversed(spec.role("item")) if spec.features[name].is_categorical}
    pairs = {name: own.get(spec.vocabulary(name)) for name in past if spec.features[name].is_categorical}
    items = next((name for name, item in pairs.items() if item == spec.item_id), None)
    if items is None:
        return {}
    known = _of_items(spec, {*pairs.values()} - {None, spec.item_id})
    made = {name: Beside(items, None) for name in past if name not in pairs}
    return made | {name: Beside(items, known[item]) for name, item in pairs.items() if item in known}


def _of_items(spec: FeatureSpec, names: Collection[str | None]) -> dict[str | None, NDArray[np.generic]]:
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
) -> tuple[Port, ...]:
    """The raw columns that a program's features are made from, in order; texts unless read as numbers alone.

    Raises:
        ExportError: naming features without an encoder, and columns that request and item features share.
    """
    beside, known = beside or {}, encoders.encoders
    problems = [
        f"feature '{port.name}' has no encoder"
        for port in signature.inputs
        if port.name not in known and (port.name not in beside or beside[port.name].of_items is None)
    ]
    problems += [
        f"feature '{port.name}': numbers of events, but no history of the items' own ids to stand beside"
        for port in signature.inputs
        if port.is_list and isinstance(known.get(port.name), NumberEncoder) and port.name not in beside
    ]
    ExportError.refuse("raw values", problems)
    readers: dict[str, list[Port]] = {}
    for port in signature.inputs:
        for column in columns_of(port.name, encoders, beside):
            readers.setdefault(column, []).append(port)
    made = []
    for column, ports in readers.items():
        if len({port.level for port in ports}) > 1:
            problems.append(f"column '{column}' makes request and item features; take --form rows")
        read_by = [known[_reader(port.name, column, encoders, beside)] for port in ports]
        dtype: PortType = "float64" if all(_reads_numbers(encoder, column) for encoder in read_by) else "string"
        # A list that is not one text with a separator comes as any number of values a row.
        pairs = zip(ports, read_by, strict=True)
        wide = any(
            port.is_list and encoder.kind != "text" and getattr(encoder, "separator", None) is None
            for port, encoder in pairs
        )
        made.append(Port(column, dtype, -1 if wide else 1, ports[0].level))
    ExportError.refuse("raw values", problems)
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
    return encoder.kind not in ("vocabulary", "hash", "text", "clock")


# --- folders ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Staged:
    """New models of one version, which `move_into` moves into a repository."""

    folder: Path
    version: int

    def write_model(self, name: str, signature: Signature, backend: Backend, batching: Batching) -> Path:
        """Write the configuration of a program in `folder/name`; return the folder for its model.onnx."""
        ports = signature.inputs, _outputs(signature)
        return self.write_program(name, *ports, backend, _of(signature, batching))

    def write_program(
        self,
        name: str,
        inputs: Sequence[Port],
        outputs: Sequence[Port],
        backend: Backend,
        batching: Batching | None = None,
    ) -> Path:
        """Write an ONNX program's configuration, of single requests without `batching`; return model.onnx's folder."""
        if backend == "python":
            return self.write_python(name, inputs, outputs, batching)
        return self._write(name, _config(name, ONNX_RUNTIME, inputs, outputs, batching))

    def write_python(
        self, name: str, inputs: Sequence[Port], outputs: Sequence[Port], batching: Batching | None = None
    ) -> Path:
        """Write a Python model, with the modules that it imports beside it; return the folder for its own files."""
        to = self._write(name, _config(name, PYTHON, inputs, outputs, batching))
        for module in (triton_model, hashing, merging, raw_values, text_vectors):
            own = "model" if module is triton_model else module.__name__.rpartition(".")[2]
            _copy_module(module, to / f"{own}.py")
        return to

    def write_ensemble(
        self,
        name: str,
        inputs: Sequence[Port],
        outputs: Sequence[Port],
        steps: Sequence[Sequence[str]],
        batching: Batching | None = None,
    ) -> None:
        """Write the configuration of several models, one after the other; see `step`."""
        more = ["ensemble_scheduling {", *(line for each in steps for line in each), "}"]
        text = _config(name, ENSEMBLE, inputs, outputs, batching, more=more)
        (self._write(name, text) / ".keep").touch()  # the version itself is empty

    def write_raw(
        self,
        name: str,
        signature: Signature,
        encoders: Encoders,
        batching: Batching,
        beside: Mapping[str, Beside] | None = None,
    ) -> None:
        """Write `NAME_encode` and the ensemble `NAME_raw`, which takes raw values.

        Raises:
            ExportError: if a column can't be read, or has the name of an output.
        """
        refuse_answer_names(raw_columns(encoders, signature, beside), _outputs(signature))
        columns = self.write_encode(f"{name}_encode", signature, encoders, batching, beside)
        prefix = unused_prefix(port.name for port in columns)
        inside = {port.name: f"{prefix}feature.{port.name}" for port in signature.inputs}
        steps = [
            step(f"{name}_encode", {port.name: port.name for port in columns}, inside),
            step(name, inside, {each: each for each in signature.outputs}),
        ]
        self.write_ensemble(f"{name}_raw", columns, _outputs(signature), steps, _of(signature, batching))

    def write_encode(
        self,
        name: str,
        signature: Signature,
        encoders: Encoders,
        batching: Batching,
        beside: Mapping[str, Beside] | None = None,
    ) -> tuple[Port, ...]:
        """Write a Python model from raw columns, which are returned, to the inputs of a signature."""
        columns = raw_columns(encoders, signature, beside)
        to = self.write_python(name, columns, signature.inputs, _of(signature, batching))
        _write_encoders(to, columns, signature, encoders, beside or {})
        return columns

    def _write(self, name: str, config: str) -> Path:
        """A new folder for the version of a model, beside the model's configuration."""
        to = self.folder / name / str(self.version)
        to.mkdir(parents=True)
        (to.parent / "config.pbtxt").write_text(config, encoding="utf-8")
        return to


def step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> list[str]:
    """A step of an ensemble: each of the model's tensors with its name in the ensemble."""
    maps = [("input_map", *each) for each in inputs.items()] + [("output_map", *each) for each in outputs.items()]
    lines = [f"    {kind} {{ key: {_quoted(key)} value: {_quoted(value)} }}" for kind, key, value in maps]
    return ["  step {", f"    model_name: {_quoted(model)}", "    model_version: -1", *lines, "  }"]


def refuse_answer_names(columns: Sequence[Port], answers: Sequence[Port]) -> None:
    """Refuse raw columns with the name of an ensemble's answer. Raises ExportError with every such column."""
    if taken := sorted({port.name for port in columns} & {port.name for port in answers}):
        problems = [f"a column is called '{name}', as an answer of the ensemble; rename it" for name in taken]
        raise ExportError("; ".join(problems))


def _of(signature: Signature, batching: Batching) -> Batching | None:
    """How requests are batched; those of a ranker are not, as each has its own request features."""
    return batching if signature.form == "rows" else None


def _write_encoders(
    to: Path, columns: Sequence[Port], signature: Signature, encoders: Encoders, beside: Mapping[str, Beside]
) -> None:
    described = {
        "columns": [{"name": port.name, "dtype": port.dtype} for port in columns],
        "features": [_feature(port, encoders, beside) for port in signature.inputs],
    }
    text = json.dumps(described, indent=1, ensure_ascii=False)
    (to / triton_model.ENCODE_FILE).write_text(text, encoding="utf-8")
    (to / "vocabularies").mkdir()
    for port in signature.inputs:
        encoder = encoders.encoders.get(beside[port.name].items if port.name in beside else port.name)
        if isinstance(encoder, VocabularyEncoder):
            values = encoders.vocabularies[encoder.vocabulary].values.to_pylist()
            file = _made(to / "vocabularies", f"{encoder.vocabulary}.json")
            file.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
        if isinstance(encoder, TextEncoder):
            held = encoder.held
            file = _made(to / triton_model.OF_TEXTS, f"{encoder.projection}.npz")
            np.savez(file, buckets=held.buckets, rarity=held.rarity, weights=held.weights)
    (to / triton_model.OF_ITEMS).mkdir()
    for feature, own in beside.items():
        if own.of_items is not None:
            np.save(_made(to / triton_model.OF_ITEMS, f"{feature}.npy"), own.of_items, allow_pickle=False)


def _made(folder: Path, name: str) -> Path:
    """A file to write inside a folder; its parent is made."""
    file = confined(folder, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def _feature(port: Port, encoders: Encoders, beside: Mapping[str, Beside]) -> dict[str, object]:
    """One feature as `triton_model` reads it."""
    known, encoder = encoders.encoders, encoders.encoders.get(port.name)
    items = {"items": known[beside[port.name].items].model_dump(mode="json")} if port.name in beside else {}
    return {
        **{key: getattr(port, key) for key in ("name", "dtype", "width", "is_list")},
        "columns": list(columns_of(port.name, encoders, beside)),
        "encoder": encoder.model_dump(mode="json") if encoder is not None else {},
        **items,
    }


def _copy_module(module: ModuleType, to: Path) -> None:
    """Copy a module so that it imports the copies beside it instead of recspec."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    folders = r"^from recspec\.(?:data\.encoding|inference) import ([\w, ]+)$"
    source = re.sub(folders, r"import \1", source, flags=re.MULTILINE)
    source = re.sub(r"^from recspec\.(?:\w+\.)*(\w+) import", r"from \1 import", source, flags=re.MULTILINE)
    to.write_text(source, encoding="utf-8")


def versions(folder: Path) -> list[int]:
    """The versions of a model that a repository holds, ascending."""
    return sorted(int(each.name) for each in folder.glob("*") if each.is_dir() and each.name.isdecimal())


def refuse_other_inputs(there: Path, made: Path) -> None:
    """Check that a new version fits the configuration that all versions of a model share."""
    file = there / "config.pbtxt"
    if not file.is_file():
        return
    shared = ("input", "output", "platform", "backend")
    old, new = (
        [line.strip() for line in each.read_text(encoding="utf-8").splitlines() if line.strip().startswith(shared)]
        for each in (file, made / file.name)
    )
    if old != new:
        differing = sorted(set(old) ^ set(new))
        raise ExportError(
            f"{file}: the model that is there takes other inputs or another backend ({'; '.join(differing[:4])}); "
            "versions of a model share them, so give this one another --name"
        )


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
    return tuple(Port(name, "float32", 1, level) for name in signature.outputs)


def _config(
    name: str,
    kind: str,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    batching: Batching | None,
    *,
    more: Sequence[str] = (),
) -> str:
    """The text of a configuration."""
    batches = batching is not None
    lines = [f"name: {_quoted(name)}", kind, f"max_batch_size: {batching.max_batch_size if batching else 0}"]
    lines += _ports("input", inputs, batches) + _ports("output", outputs, batches)
    if batching and kind != ENSEMBLE:
        preferred = f"  preferred_batch_size: [ {', '.join(map(str, batching.preferred))} ]"
        delay = f"  max_queue_delay_microseconds: {batching.max_queue_delay_microseconds}"
        lines += ["dynamic_batching {", preferred, delay, "}"]
    if kind == PYTHON:
        lines.append("instance_group [ { count: 1 kind: KIND_CPU } ]")
    return "\n".join([*lines, *more]) + "\n"


def _ports(kind: str, ports: Sequence[Port], batches: bool) -> list[str]:
    rows: dict[Level, str] = {} if batches else {"request": "1, ", "item": "-1, "}
    return [
        f"{kind} {{ name: {_quoted(port.name)} data_type: {TYPES[port.dtype]} "
        f"dims: [ {rows.get(port.level, '')}{port.width} ] }}"
        for port in ports
    ]


def _quoted(text: str) -> str:
    """A text in the protobuf text format, which has JSON's escapes; a feature may have any name."""
    return json.dumps(text, ensure_ascii=False)
