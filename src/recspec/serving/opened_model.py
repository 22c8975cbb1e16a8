"""One version of a model, opened from its folder."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from recspec.base.errors import BundleError, ExportError, RecspecError, of_the_machine
from recspec.base.files import manifest, removed
from recspec.bundle import versions
from recspec.data.encoding import CrossEncoder, Encoders
from recspec.data.storage import Ragged
from recspec.export import (
    Arrays,
    ExportedModel,
    as_model_batch,
    columns_of,
    histories_beside,
    open_exported_model,
    raw_columns,
    read_description,
)
from recspec.feature_spec import Port, Signature, find_export_file, signature_of
from recspec.inference import ROLES, ItemChanges, Predictor, place_of
from recspec.models import logits_of_labels, probabilities_of_labels
from recspec.serving.model_folders import Fingerprint, PrivateCopy, export_beside
from recspec.serving.settings import RepositorySettings

DIGEST = 16
CHECKED_ROWS = 64
"""Rows on which an export is compared with its bundle."""
SHOWN = 500
"""Characters of an unexpected error that a reason shows."""
MOST = 0.05
"""Upper limit for the difference that an export's description allows; whoever edits an export can edit that too."""
SAME = 1e-3
"""Largest difference of probabilities if an export's description names none."""

log = logging.getLogger("recspec.serve")


class TorchModel:
    """A bundle's model under torch, on its device, with the inputs and outputs of an export."""

    def __init__(self, predictor: Predictor) -> None:
        self._model, self._device = predictor.model, predictor.device
        self.signature = signature_of(predictor.spec, predictor.model.features(), "rows", predictor.bundle.outputs)

    def run(self, inputs: Arrays) -> Arrays:
        """The outputs of the signature, (B, 1) each."""
        with torch.inference_mode():
            tensors = {port: torch.from_numpy(inputs[port.name]).to(self._device) for port in self.signature.inputs}
            logits = logits_of_labels(self._model, as_model_batch(tensors))
            first, *others = probabilities_of_labels(self._model, logits)
            made = [each.cpu().numpy() for each in (first, logits[:, :1], *others)]
            return dict(zip(self.signature.outputs, made, strict=True))


@dataclass(frozen=True)
class Opened:
    """The content of a version's folder."""

    exported: ExportedModel
    predictor: Predictor | None
    """None for an export, which scores features but takes no raw values, users or items."""
    raw: tuple[Port, ...]
    """The raw columns; empty if they are unknown."""
    content: Fingerprint
    update: int
    """The number of the run's update whose bundle answers; 0 before the first."""
    digest: str
    """The first `DIGEST` digits of the SHA-256 of the folder's manifest."""
    note: str
    """Reason why the export of a bundle does not compute; empty if it does, or if there is none."""
    export: str = ""
    """The export of a bundle that computes requests to infer, with its format and precision; empty if none does."""
    copy: PrivateCopy | None = None
    """The files of the content, which are removed once nobody holds them."""
    changes: FileState = None
    """The state of the file with what became of the run's items since."""

    @property
    def platform(self) -> str:
        """What computes, as the protocol names it."""
        return f"recspec_{type(self.exported).__name__.removesuffix('Model').lower()}"

    @property
    def signature(self) -> Signature:
        return self.exported.signature

    def run(self, inputs: Arrays) -> Arrays:
        """Outputs of checked inputs, which may be read-only or not contiguous."""
        usual = {name: array if array.flags.carray else array.copy() for name, array in inputs.items()}
        return self.exported.run(usual)

    def encode(self, columns: Arrays, rows: int) -> Arrays:
        """Features (B, width) of raw columns (B, 1) or (B, any)."""
        predictor, inputs = self.predictor, self.signature.inputs
        assert predictor is not None
        assert predictor.encoders is not None
        table = pa.table({port.name: _raw_column(port, columns[port.name]) for port in self.raw})
        table = _without_empty_texts(table, predictor.encoders)
        past = [port.name for port in inputs if port.name in predictor.spec.role("history")]
        given = [port.name for port in inputs if port.name not in past]
        encoded: dict[str, object] = {**predictor.encoders.encode(table, given)}
        if past:
            numbers = [name for name in past if not predictor.spec.features[name].is_categorical]
            optional = {column for name in numbers for column in columns_of(name, predictor.encoders, {})}
            table = table.drop_columns([name for name in optional if _is_empty(table.column(name))])
            histories, _ = predictor.encode(table, past)
            encoded |= {name: tensor.cpu().numpy() for name, tensor in histories.items()}
        return {port.name: _feature(port, encoded[port.name], rows) for port in inputs}


def _raw_column(port: Port, values: NDArray[Any]) -> pa.Array:
    kind = pa.string() if port.dtype == "string" else pa.float64()
    if port.width == -1:
        flat = pa.array(values.ravel(), kind, from_pandas=True)
        return pa.ListArray.from_arrays(pa.array(np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]), flat)
    return pa.array(values[:, 0], kind, from_pandas=True)


def _without_empty_texts(table: pa.Table, encoders: Encoders) -> pa.Table:
    """The raw columns with null for empty texts, except where a TensorFlow cross takes an empty text as a value."""
    crosses = [each for each in encoders.encoders.values() if isinstance(each, CrossEncoder) and each.needs_all]
    chained = {column for each in crosses for column in each.columns}
    for place, name in enumerate(table.column_names):
        column = table.column(place)
        if pa.types.is_string(column.type) and name not in chained:
            table = table.set_column(place, name, pc.if_else(pc.equal(column, ""), None, column))
    return table


def _is_empty(column: pa.ChunkedArray) -> bool:
    """Whether no row of a raw column holds a value."""
    values = pc.list_flatten(column) if pa.types.is_list(column.type) else column
    return bool(values.null_count == len(values))


def _feature(port: Port, column: object, rows: int) -> NDArray[Any]:
    if isinstance(column, tuple):
        flat, offsets = column
        column = Ragged(np.asarray(flat), np.asarray(offsets)).pad(port.width)
    return np.asarray(column).reshape(rows, -1).astype(port.dtype, copy=False)


def open_version(copy: PrivateCopy, content: Fingerprint, settings: RepositorySettings) -> Opened:
    """Open the copy of a bundle or an export, and check that it gives finite numbers for a row of zeros.

    The copy was compared with its manifest; it is removed once nobody uses what was opened.
    """
    folder, predictor, raw, note, export = copy.folder, None, tuple[Port, ...](), "", ""
    changes = state_of_changes(copy.origin)
    if find_export_file(folder) is not None:
        exported = open_exported_model(folder, threads=settings.threads, verify=False)
        if exported.signature.form != "rows":
            why = "exported with --form ranker, which takes one request a call; take --form rows"
            raise BundleError(f"{folder}: {why}")
    else:
        predictor = _read(Predictor.open(folder, device=settings.device, verify=False, origin=copy.origin))
        predictor.bundle = replace(predictor.bundle, folder=copy.origin)  # beside which the run's report lies
        if settings.journal is not None:
            _ = predictor.bundle.events  # read now, and refused if they are damaged
        torch_model = TorchModel(predictor)
        raw = _raw_ports(predictor, torch_model.signature)
        exported, note, export = _fastest(folder, torch_model, settings)
    update = versions.number_of(copy.origin)
    digest = manifest.digest(folder)[:DIGEST]
    held = replace(copy)  # the only reference is in what was opened, also after `with_changes`
    weakref.finalize(held, removed, copy.place)
    notes = copy.shown(note), copy.shown(export)
    opened = Opened(exported, predictor, raw, content, update, digest, *notes, held, changes)
    zeros = {port.name: np.zeros((1, port.width), port.dtype) for port in exported.signature.inputs}
    if not all(np.isfinite(array).all() for array in opened.run(zeros).values()):
        raise BundleError(f"{folder}: the model gives no finite number for a row of zeros; train it again")
    return opened


FileState = tuple[int, int, int] | None
"""Time, size and inode of a file; None if there is none."""


def state_of_changes(origin: Path) -> FileState:
    """The state of the file with what became of the items of a bundle's run."""
    file = place_of(origin)
    try:
        found = file.stat() if file is not None else None
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)


def with_changes(opened: Opened) -> Opened:
    """The same content after what became of its run's items by now; only the catalogue is read again.

    Raises:
        BundleError: if the file is damaged.
    """
    assert opened.copy is not None
    assert opened.predictor is not None
    state = state_of_changes(opened.copy.origin)
    predictor = opened.predictor.with_changes(ItemChanges.of_bundle(opened.copy.origin))
    predictor.bundle = replace(predictor.bundle, folder=opened.copy.origin)
    return replace(opened, predictor=_read(predictor), changes=state)


def reason(error: Exception, folder: Path) -> str:
    """Why a folder's content can't be opened, in one line; the log gets the traceback of an error that we don't expect.

    A damaged or edited file may raise anything, and what it raises must not stop other models.
    """
    if isinstance(error, RecspecError):
        return str(error)
    if isinstance(error, OSError):
        return f"{folder}: {of_the_machine(error) or error}"
    log.error("%s: opening it failed", folder, exc_info=error)
    said = of_the_machine(error) or f"{type(error).__name__}: {str(error)[:SHOWN]}"
    return f"{folder}: can't be opened: {said}; the server's log has the traceback"


def _fastest(folder: Path, torch_model: TorchModel, settings: RepositorySettings) -> tuple[ExportedModel, str, str]:
    """The export beside a bundle if it gives the bundle's probabilities, else torch; `Opened.note`; `Opened.export`."""
    found = export_beside(folder)
    if found is None:
        return torch_model, "", ""
    try:
        exported = open_exported_model(found, threads=settings.threads, verify=False)
        if exported.signature != torch_model.signature:
            raise BundleError(f"{found}: takes other inputs than the bundle; export it again")
        description = read_description(found)
        said = description.get("difference", {}).get("allowed_largest")
        allowed = SAME if said is None else min(said, MOST)
        rows = _any_rows(torch_model.signature)
        answers = (each.run(rows)[each.signature.outputs[0]].astype(np.float64) for each in (exported, torch_model))
        drift = float(np.abs(np.subtract(*answers)).max())
        if not drift <= allowed:
            raise BundleError(f"{found}: gives probabilities {drift:.2g} off the bundle's; export it again")
    except Exception as error:  # an export may be anything
        return torch_model, f"torch computes, not the export: {reason(error, found)}", ""
    return exported, "", f"{found} ({description.get('format')}, {description.get('precision')})"


def _any_rows(signature: Signature) -> Arrays:
    """Rows on which the exports of two models differ: random ids, and numbers from a normal distribution."""
    numbers = np.random.default_rng(0)
    return {
        port.name: numbers.integers(0, port.num_ids, (CHECKED_ROWS, port.width)).astype(port.dtype)
        if port.num_ids is not None
        else numbers.standard_normal((CHECKED_ROWS, port.width), np.float32)
        for port in signature.inputs
    }


def _read(predictor: Predictor) -> Predictor:
    """A predictor that has read its catalogues and its pipeline, instead of at their first use."""
    _ = predictor.pipeline
    for role in ROLES:
        if predictor.spec.id_of(role) is not None:
            predictor.catalogues.of(role)
    return predictor


def _raw_ports(predictor: Predictor, signature: Signature) -> tuple[Port, ...]:
    if predictor.encoders is None:
        return ()
    try:
        beside = histories_beside(predictor.spec, predictor.model.features())
        return raw_columns(predictor.encoders, signature, beside)
    except ExportError:  # a feature without an encoder has no raw form
        return ()
