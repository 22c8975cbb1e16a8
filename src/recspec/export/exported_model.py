"""Exported models: the form in which a model is exported, and the runtimes that run an export.

Shapes: B rows of an input; L a list's length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recspec.base.errors import BundleError, nearest, require_extra
from recspec.base.files import PathError, confined, local, manifest, read_json
from recspec.feature_spec import EXPORT_FILE, Port, Signature, check_description, find_export_file
from recspec.models import Model, logits_of_labels, probabilities_of_labels
from recspec.models.layers import Batch

BLOCK = 1024  # rows that ONNX Runtime computes at once: MLPs of 1024 units are 1.3 times as fast as on 4,096 rows
Arrays = dict[str, NDArray[Any]]  # input name -> (B, 1) or (B, L)

TYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


class Exportable(nn.Module):
    """A model as a function of its inputs in the order of the signature: sigmoid (B, 1) and logit (B, 1), and the
    probabilities (B, 1) of labels besides the first.

    The sigmoid is the probability, if the model gives any; it is calibrated if the model is. The logit is the model's
    own, as ranking uses it. Both are NaN for a row with an id that `known_ids` can't answer. With `autocast`, matrix
    products use that type.
    """

    def __init__(self, model: Model, signature: Signature, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.model, self.signature, self.autocast = model, signature, autocast

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        known, strange = known_ids(dict(zip(self.signature.inputs, inputs, strict=True)))
        with torch.autocast("cpu", self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            batch = as_model_batch(known)
            items = {port.name: batch.pop(port.name) for port in self.signature.of_level("item")}
            logits = logits_of_labels(self.model, batch, items)
        first, *others = probabilities_of_labels(self.model, logits)
        outputs = [first, logits[:, :1], *others]
        for rows in strange:
            outputs = [each.masked_fill(rows, torch.nan) for each in outputs]
        return tuple(outputs)


def known_ids(inputs: Mapping[Port, Tensor]) -> tuple[dict[Port, Tensor], list[Tensor]]:
    """Inputs with id 0, unknown, in place of ids outside a feature's range, as int64.

    Also returns masks (B, 1) of the rows with such an id of a feature whose id 0 is a real value. A gather would read
    id -1 as the last one. The ids of one type and level are compared together, to spare the program small steps.
    """
    alike: dict[tuple[str, str, bool], dict[Port, int]] = {}
    for port in inputs:
        if port.num_ids is not None:
            alike.setdefault((port.dtype, port.level, port.has_unknown), {})[port] = port.num_ids
    known, strange = dict(inputs), list[Tensor]()
    for (_, _, has_unknown), ports in alike.items():
        ids = torch.cat([inputs[port] for port in ports], 1).long()
        ends = torch.tensor([num_ids for port, num_ids in ports.items() for _ in range(port.width)])
        wrong = (ids < 0) | (ids >= ends)
        parts = torch.split(ids.masked_fill(wrong, 0), [port.width for port in ports], 1)
        known |= dict(zip(ports, parts, strict=True))
        if not has_unknown:
            strange.append(wrong.any(1, keepdim=True))
    return known, strange


def as_model_batch(inputs: Mapping[Port, Tensor]) -> Batch:
    """Inputs (B, 1) and (B, L) as the batch a model reads: ids int64, scalars (B,)."""
    batch: Batch = {}
    for port, tensor in inputs.items():
        ids = tensor.long() if port.num_ids is not None else tensor
        batch[port.name] = ids if port.is_list else ids.squeeze(1)
    return batch


def as_inputs(batch: Mapping[str, Tensor], signature: Signature) -> Arrays:
    """A model's batch as the inputs of an exported model."""
    return {
        port.name: batch[port.name].reshape(len(batch[port.name]), -1).to(TYPES[port.dtype]).contiguous().numpy()
        for port in signature.inputs
    }


def unused_prefix(names: Iterable[str]) -> str:
    """The shortest run of `_` that no name begins with: any name with this prefix is another one."""
    names, prefix = tuple(names), "_"
    while any(name.startswith(prefix) for name in names):
        prefix += "_"
    return prefix


# --- running an export -----------------------------------------------------------------------------------------------


class ExportedModel(Protocol):
    """An export in memory."""

    signature: Signature

    def run(self, inputs: Arrays) -> Arrays:
        """The outputs of the signature, (B, 1) each."""


def open_exported_model(folder: Path, *, threads: int | None = None, verify: bool = True) -> ExportedModel:
    """Load the export in a folder, or a version of a model in a Triton repository.

    Args:
        threads: Threads for one call; by default all cores. AOTInductor and torch use torch's number.
        verify: Compare every file with the export's manifest first.

    Raises:
        BundleError: if the folder holds no export, or a damaged one.
    """
    folder = local(folder, "the export")
    if verify and find_export_file(folder) is not None:
        manifest.check(folder)
    signature = Signature.from_dict(read_description(folder)["signature"])
    try:
        if (file := confined(folder, OnnxModel.file)).is_file():
            return OnnxModel(file, signature, threads=threads)
        if (file := confined(folder, Pt2Model.file)).is_file():
            return Pt2Model(file, signature)
    except PathError as error:
        raise BundleError(f"{folder}: {error}") from None
    raise BundleError(
        f"{folder}: {EXPORT_FILE} is there, but neither {OnnxModel.file} nor {Pt2Model.file}; export it again"
    )


def read_description(folder: Path) -> dict[str, Any]:
    """The content of an export's `export.json`.

    Raises:
        BundleError: if it is missing or damaged; it names the file and every field that is wrong.
    """
    file = find_export_file(folder)
    if file is None:
        known = [found.name for found in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise BundleError(f"{folder / EXPORT_FILE}: no such file; not an export{nearest(folder.name, known)}")
    try:
        confined(folder, file.name)
        description = read_json(file)
    except PathError as error:
        raise BundleError(str(error)) from None
    check_description(description, file)
    assert isinstance(description, dict), "checked above"
    return description


class OnnxModel:
    """An ONNX model under ONNX Runtime, on the CPU."""

    file = "model.onnx"

    def __init__(self, source: Path | bytes, signature: Signature, *, threads: int | None = None) -> None:
        runtime = require_extra("onnxruntime", "onnx")
        options = runtime.SessionOptions()
        options.log_severity_level = 3  # errors only; a warning for each constant-folded node would fill the terminal
        if threads is not None:
            options.intra_op_num_threads = threads
        given = str(source) if isinstance(source, Path) else source
        try:
            self._session = runtime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its exceptions have no other common base
            raise BundleError(f"{source if isinstance(source, Path) else 'ONNX model'}: {error}") from None
        self.signature = signature
        self._of_request = {port.name for port in signature.of_level("request")}

    def run(self, inputs: Arrays) -> Arrays:
        """The signature's outputs, (B, 1) each. Many rows go in blocks, so that hidden layers stay in the cache."""
        rows = max(len(each) for name, each in inputs.items() if name not in self._of_request)
        outputs = self.signature.outputs
        if rows <= BLOCK:
            return dict(zip(outputs, self._session.run(outputs, inputs), strict=True))
        parts = [
            self._session.run(
                outputs,
                {
                    name: each if name in self._of_request else each[start : start + BLOCK]
                    for name, each in inputs.items()
                },
            )
            for start in range(0, rows, BLOCK)
        ]
        return {name: np.concatenate(part) for name, part in zip(outputs, zip(*parts, strict=True), strict=True)}


class EagerModel:
    """A model as torch runs it, with the inputs and outputs of an export."""

    _call: Callable[..., tuple[Tensor, ...]]

    def __init__(self, model: Model, signature: Signature) -> None:
        self._call, self.signature = Exportable(model, signature).eval(), signature

    def run(self, inputs: Arrays) -> Arrays:
        """The outputs of the signature, (B, 1) each."""
        with torch.inference_mode():
            outputs = self._call(*(torch.from_numpy(inputs[port.name]) for port in self.signature.inputs))
        return {name: tensor.numpy() for name, tensor in zip(self.signature.outputs, outputs, strict=True)}


class Pt2Model(EagerModel):
    """A model compiled by AOTInductor, on the CPU it was compiled for."""

    file = "model.pt2"

    def __init__(self, file: Path, signature: Signature) -> None:
        from torch._inductor import aoti_load_package

        try:
            self._call, self.signature = aoti_load_package(str(file)), signature
        except (RuntimeError, OSError) as error:
            raise BundleError(f"{file}: {error}") from None
