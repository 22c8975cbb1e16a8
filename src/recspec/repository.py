"""The models that a server holds: several, in versions, opened and replaced while others are answered.

A model comes from a run, a bundle, an export, or a folder of these named 1, 2, ... A bundle with an export in its
folder `export` is computed by that, if it gives the bundle's probabilities. A request that has begun is answered
by the model it began with; one that is replaced is closed when its last request is. What can't be opened leaves what
was there, and `index` tells why. Models whose raw columns are known are there twice: `NAME` takes features as the
model reads them, `NAME_raw` takes raw values and encodes them as `prepare` fitted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from pydantic import Field

from recspec import __version__, bundle, config
from recspec.batching import Batcher, Compute, Duration, Limits, Statistics
from recspec.bodies import Intake
from recspec.bundle import Seen
from recspec.encoding import CrossEncoder, Encoders
from recspec.errors import BundleError, ExportError, RecspecError, RequestError, SettingsError, nearest
from recspec.evaluate import id_feature
from recspec.paths import PathError, local
from recspec.predict import ROLES, Predictor
from recspec.programs import SHEET, Arrays, Program, as_model_batch, open_program, read_sheet
from recspec.signature import LOGIT, OUTPUTS, PROBABILITY, Port, Signature, signature_of
from recspec.storage import Ragged
from recspec.telemetry import Labels, Telemetry
from recspec.tensors import DATATYPES, Tensor, checked
from recspec.triton_repository import TYPES, columns_of, histories_beside, raw_columns

RAW = "_raw"
EXPORT = "export"
CHECKED_ROWS = 64
"""Rows on which an export is compared with its bundle."""
MOST = 0.05
"""And the largest that a sheet may name: whoever changes a program can change its sheet."""
SAME = 1e-3
"""Largest difference of probabilities where an export's sheet names none."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
NUMPY: Mapping[str, type[np.generic]] = {"int32": np.int32, "int64": np.int64, "float32": np.float32}

SERVER = {
    "name": "recspec",
    "version": __version__,
    "extensions": ["binary_tensor_data", "model_repository", "model_configuration", "statistics"],
}
"""The protocol's server metadata."""

log = logging.getLogger("recspec.serve")

Fingerprint = tuple[tuple[str, int, int, int], ...]


class RepositorySettings(config.Settings):
    """How models are opened and looked after."""

    device: str = Field("cpu", description="that computes: auto, cpu, cuda")
    threads: int | None = Field(None, ge=1, description="that compute a batch; torch's own number by default")
    verify: bool = Field(True, description="compare a model's files with its manifest before it is opened")
    control: bool = Field(False, description="whether clients that bear the token may load and unload models")
    watch_seconds: float = Field(5.0, ge=0, description="between looks for new content in a model's folder; 0: never")


@dataclass(frozen=True)
class Source:
    """A model's name, and the folder that the user named for it."""

    name: str
    path: Path


def sources_of(named: Sequence[str]) -> tuple[Source, ...]:
    """`["runs/neumf", "ctr=runs/dlrm"]` -> names and folders; a folder's own name is the model's by default.

    Raises:
        SettingsError: for a name that is none, or that two have.
    """
    sources: list[Source] = []
    problems: list[str] = []
    for text in named:
        name, equals, path = text.partition("=")
        if not equals or "/" in name:
            name, path = "", text
        try:
            folder = local(path, "a model")
        except PathError as error:
            problems.append(str(error))
            continue
        own = folder.resolve()
        name = name or (own.parent.name if own.name == "bundle" else own.name)
        if not NAME.fullmatch(name):
            problems.append(f"'{name}' is no name for a model: letters, digits, _ . and -; write NAME={path}")
        if name in {source.name for source in sources}:
            problems.append(f"two models are called '{name}'; write NAME={path}")
        if name.endswith(RAW) and name.removesuffix(RAW) in {source.name for source in sources}:
            problems.append(f"'{name}' is what the raw form of '{name.removesuffix(RAW)}' is called; write NAME={path}")
        sources.append(Source(name, folder))
    if not sources:
        problems.append("no model was named; name a run, a bundle, or NAME=PATH")
    if problems:
        raise SettingsError.of("models", problems)
    return tuple(sources)


def find_versions(path: Path) -> dict[int, Path]:
    """Version -> folder of a bundle, run or export; a folder that is one itself is version 1.

    Raises:
        BundleError: if there is none.
    """
    if path.is_dir() and not _holds_model(path):
        found = {int(each.name): each for each in path.iterdir() if each.name.isdecimal() and _holds_model(each)}
        if found:
            return dict(sorted(found.items()))
    return {1: path if (path / SHEET).is_file() else bundle.find(path)}


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("bundle.json", "bundle/bundle.json", SHEET))


def fingerprint(folder: Path) -> Fingerprint:
    """What tells one content of a folder from another without reading it: names, times, sizes, places on disk."""
    folder = folder / "bundle" if (folder / "bundle" / "bundle.json").is_file() else folder
    export = export_beside(folder)
    found = []
    for file in [*sorted(folder.iterdir()), *(sorted(export.iterdir()) if export is not None else ())]:
        stat = file.stat()
        found.append((file.name, stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return tuple(found)


def export_beside(folder: Path) -> Path | None:
    """The export of a bundle, in `export` beside or inside its folder, as `recspec export RUN RUN/export` writes it."""
    places = [folder / EXPORT, folder.parent / EXPORT] if folder.name == "bundle" else [folder / EXPORT]
    return next((place for place in places if (place / SHEET).is_file()), None)


def refuse_load_parameters(parameters: object) -> None:
    """A model is loaded from the folder that the server was started with, and nothing else.

    Raises:
        RequestError: if a client brings files or a configuration.
    """
    if parameters:
        raise RequestError("a model is loaded as it stands in its folder; 'config' and files can't be sent")


# --- one version of a model ------------------------------------------------------------------------------------------


class TorchProgram:
    """A bundle's model as torch runs it, on its device, with the inputs and outputs of an export."""

    def __init__(self, predictor: Predictor, signature: Signature) -> None:
        self._model, self._device, self.signature = predictor.model, predictor.device, signature

    def run(self, inputs: Arrays) -> Arrays:
        """`probability` and `logit`, (B, 1) each."""
        with torch.inference_mode():
            tensors = {port: torch.from_numpy(inputs[port.name]).to(self._device) for port in self.signature.inputs}
            logit = self._model(as_model_batch(tensors)).float().unsqueeze(1)
            return {PROBABILITY: torch.sigmoid(logit).cpu().numpy(), LOGIT: logit.cpu().numpy()}


@dataclass(frozen=True)
class Opened:
    """What was read of a version's folder."""

    folder: Path
    program: Program
    platform: str
    predictor: Predictor | None
    """None of an export: it scores features, but knows no raw values, users or items."""
    raw: tuple[Port, ...]
    """The raw columns; empty where they are not known."""
    content: Fingerprint
    note: str = ""
    """Why an export that is there does not compute."""

    @property
    def signature(self) -> Signature:
        """Its inputs."""
        return self.program.signature

    def run(self, inputs: Arrays) -> Arrays:
        """Outputs of checked inputs, from whatever memory they lie in."""
        return self.program.run(
            {name: np.require(array, requirements=("C", "A", "W")) for name, array in inputs.items()}
        )

    def encode(self, columns: Arrays, rows: int) -> Arrays:
        """Features (B, width) of raw columns (B, 1) or (B, any).

        Raises:
            DataError: naming each value that can't be encoded.
        """
        assert self.predictor is not None
        assert self.predictor.encoders is not None
        table = pa.table({port.name: _raw_column(port, columns[port.name]) for port in self.raw})
        table = _without_empty_texts(table, self.predictor.encoders)
        past = [port.name for port in self.signature.inputs if port.name in self.predictor.spec.role("history")]
        given = [port.name for port in self.signature.inputs if port.name not in past]
        encoded: dict[str, object] = {**self.predictor.encoders.encode(table, given)}
        if past:
            histories, _ = self.predictor.encode(self._without_empty_numbers(table, past), past)
            encoded |= {name: tensor.cpu().numpy() for name, tensor in histories.items()}
        return {port.name: _feature(port, encoded[port.name], rows) for port in self.signature.inputs}

    def _without_empty_numbers(self, table: pa.Table, past: Sequence[str]) -> pa.Table:
        """The raw columns without those of events' numbers that are empty in every row, which may be left out."""
        assert self.predictor is not None
        assert self.predictor.encoders is not None
        numbers = [name for name in past if not self.predictor.spec.features[name].is_categorical]
        named = {column for name in numbers for column in columns_of(name, self.predictor.encoders, {})}
        return table.drop_columns([name for name in named if _is_empty(table.column(name))])


def _raw_column(port: Port, values: NDArray[Any]) -> pa.Array:
    kind = pa.string() if port.dtype == "string" else pa.float64()
    if port.width == -1:
        flat = pa.array(values.ravel(), kind, from_pandas=True)
        return pa.ListArray.from_arrays(pa.array(np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]), flat)
    return pa.array(values[:, 0], kind, from_pandas=True)


def _without_empty_texts(table: pa.Table, encoders: Encoders) -> pa.Table:
    """The raw columns with null for empty texts, but where TensorFlow chains an empty one as a value."""
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
        column = Ragged(np.asarray(flat), np.asarray(offsets)).truncate(port.width).pad(port.width)
    return np.asarray(column).reshape(rows, -1).astype(NUMPY[port.dtype], copy=False)


def open_version(folder: Path, settings: RepositorySettings) -> Opened:
    """Read a bundle or an export, and compute one row with it.

    Raises:
        RecspecError: if it is damaged, or gives no number for a row of zeros.
    """
    content = fingerprint(folder)
    if (folder / SHEET).is_file():
        program = open_program(folder, threads=settings.threads, verify=settings.verify)
        if program.signature.form != "rows":
            raise BundleError(
                f"{folder}: exported with --form ranker, which takes one request a call; take --form rows"
            )
        opened = Opened(folder, program, _platform(program), None, (), content)
    else:
        predictor = _detached(Predictor.open(folder, device=settings.device, verify=settings.verify))
        signature = signature_of(predictor.spec, predictor.model.features(), "rows")
        raw = _raw_ports(predictor, signature)
        program, note = _fastest(folder, TorchProgram(predictor, signature), settings)
        opened = Opened(folder, program, _platform(program), predictor, raw, content, note)
    zeros = {port.name: np.zeros((1, port.width), NUMPY[port.dtype]) for port in opened.signature.inputs}
    if not all(np.isfinite(array).all() for array in opened.run(zeros).values()):
        raise BundleError(f"{folder}: the model gives no finite number for a row of zeros; train it again")
    return opened


def _platform(program: Program) -> str:
    return f"recspec_{type(program).__name__.removesuffix('Program').lower()}"


def _fastest(folder: Path, torch_program: TorchProgram, settings: RepositorySettings) -> tuple[Program, str]:
    """The export beside a bundle if it gives the bundle's probabilities, else torch, and why."""
    found = export_beside(folder)
    if found is None:
        return torch_program, ""
    try:
        program = open_program(found, threads=settings.threads, verify=settings.verify)
        if program.signature != torch_program.signature:
            raise BundleError(f"{found}: takes other inputs than the bundle; export it again")
        allowed = min(float(read_sheet(found).get("difference", {}).get("allowed_largest", SAME)), MOST)
        rows = _any_rows(torch_program.signature)
        answers = (each.run(rows)[PROBABILITY].astype(np.float64) for each in (program, torch_program))
        drift = float(np.abs(np.subtract(*answers)).max())
        if not drift <= allowed:
            raise BundleError(f"{found}: gives probabilities {drift:.2g} off the bundle's; export it again")
    except (RecspecError, OSError, ValueError, TypeError, RuntimeError) as error:
        return torch_program, f"torch computes, not the export: {error}"
    return program, ""


def _any_rows(signature: Signature) -> Arrays:
    """Rows that tell programs of two models from each other: any ids, numbers of a normal distribution."""
    numbers = np.random.default_rng(0)
    return {
        port.name: numbers.integers(0, port.num_ids, (CHECKED_ROWS, port.width)).astype(NUMPY[port.dtype])
        if port.num_ids is not None
        else numbers.standard_normal((CHECKED_ROWS, port.width), np.float32)
        for port in signature.inputs
    }


def _detached(predictor: Predictor) -> Predictor:
    """A predictor that no longer reads its folder, so that what is written there can't reach it.

    Weights are mapped from their file: one that is cut short in place, as by `cp`, would end the process (SIGBUS).
    """
    with torch.no_grad():
        for tensor in (*predictor.model.parameters(), *predictor.model.buffers()):
            tensor.data = tensor.data.clone()
    seen = predictor.bundle.seen
    if seen is not None:
        kept = Seen(seen.offsets.clone(), seen.items.clone(), seen.counts.clone())
        predictor.bundle = replace(predictor.bundle, seen=kept)
    for role in ROLES:
        if id_feature(predictor.spec, role) is not None:
            _ = predictor.users if role == "user" else predictor.items  # read now, not when they are first asked for
    return predictor


def _raw_ports(predictor: Predictor, signature: Signature) -> tuple[Port, ...]:
    if predictor.encoders is None:
        return ()
    try:
        beside = histories_beside(predictor.spec, predictor.model.features())
        return tuple(column.port for column in raw_columns(predictor.encoders, signature, beside))
    except ExportError:  # a feature without an encoder: there is no raw form
        return ()


@dataclass(eq=False)
class Model:
    """One version of a model, loaded: what computes it, and who uses it."""

    name: str
    version: str
    opened: Opened
    batcher: Batcher
    encoder: Batcher
    """Makes features of raw values, on a thread beside the model's."""
    users: int = 0
    retired: bool = False

    @property
    def predictor(self) -> Predictor | None:
        """Raw rows, users and items; call it on the model's thread: `await model.batcher.call(...)`."""
        return self.opened.predictor

    @property
    def statistics(self) -> Statistics:
        """What it has done."""
        return self.batcher.statistics


@dataclass(frozen=True)
class Form:
    """A model under one of its names: of features, or of raw values."""

    name: str
    model: Model
    is_raw: bool = False

    @property
    def inputs(self) -> tuple[Port, ...]:
        """What it takes."""
        return self.model.opened.raw if self.is_raw else self.model.opened.signature.inputs


@dataclass(eq=False)
class _Shelf:
    """A source, and its versions that are loaded."""

    source: Source
    versions: dict[int, Model] = field(default_factory=dict)
    unloaded: bool = False
    reasons: dict[int, str] = field(default_factory=dict)
    """Version -> why what now stands in its folder is not served; 0: the folder as a whole."""
    refused: dict[int, Fingerprint] = field(default_factory=dict)
    """Contents that could not be opened, so that they are not tried again and again."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


# --- all of them -----------------------------------------------------------------------------------------------------


class Repository:
    """Every model of a server, by name and version. Used on one event loop."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        settings: RepositorySettings | None = None,
        limits: Limits | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.settings, self.limits = settings or RepositorySettings(), limits or Limits()
        self.telemetry, self.intake = telemetry or Telemetry(), Intake(self.limits)
        self._shelves = {source.name: _Shelf(source) for source in sources}
        self._tasks: set[asyncio.Task[None]] = set()
        self._batchers = WeakSet[Batcher]()
        self._watch: asyncio.Task[None] | None = None
        self.telemetry.gauge("recspec_queued_requests", self._queued)
        self.telemetry.gauge("recspec_models", lambda: {(): float(len(list(self._models())))})
        self.telemetry.gauge("recspec_held_bytes", lambda: {(): float(self.intake.held)})

    async def start(self) -> None:
        """Open every model, and begin to look for new content.

        Raises:
            BundleError: naming each that can't be opened.
        """
        problems: list[str] = []
        for name in self._shelves:
            try:
                await self.load(name)
            except RecspecError as error:
                problems += error.problems
        if problems:
            await self.close()
            raise BundleError.of("models", problems)
        if self.settings.watch_seconds:
            self._watch = asyncio.create_task(self._look_again())

    async def close(self) -> None:
        """Take no model away from a request: wait until all are answered, then close."""
        if self._watch is not None:
            self._watch.cancel()
        for shelf in self._shelves.values():
            shelf.unloaded = True
            for number in list(shelf.versions):
                self._retire(shelf.versions.pop(number))
        while self._tasks:
            await asyncio.gather(*self._tasks)

    # --- finding ------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether every model that was asked for, and not unloaded, can answer."""
        return all(shelf.versions or shelf.unloaded for shelf in self._shelves.values())

    @property
    def given_up(self) -> int:
        """Computations that were given up and still run, those of unloaded models included."""
        return sum(each.given_up for each in self._batchers)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of loaded models, raw forms included."""
        loaded = [(name, shelf) for name, shelf in self._shelves.items() if shelf.versions]
        raw = [name + RAW for name, shelf in loaded if any(each.opened.raw for each in shelf.versions.values())]
        return tuple(name for name, _ in loaded) + tuple(name for name in raw if name not in self._shelves)

    def form(self, name: str, version: str = "") -> Form:
        """A loaded model by its name, at its newest version by default.

        Raises:
            RequestError: 404 for one that is not there, 503 for one that is not loaded.
        """
        shelf, is_raw = self._shelf(name)
        if not shelf.versions:
            raise RequestError(f"model '{name}' is not loaded; POST /v2/repository/models/{name}/load", status=503)
        number = int(version) if version.isascii() and version.isdecimal() and len(version) < 10 else None
        model = shelf.versions.get(max(shelf.versions) if not version else number or 0)
        if model is None:
            known = ", ".join(map(str, shelf.versions))
            raise RequestError(f"model '{name}' has no version '{version[:20]}'; loaded: {known}", status=404)
        if is_raw and not model.opened.raw:
            raise RequestError(
                f"model '{name}': the raw columns are not known; ask '{name.removesuffix(RAW)}' with features",
                status=404,
            )
        return Form(name, model, is_raw)

    def versions(self, name: str) -> tuple[str, ...]:
        """Its loaded versions, oldest first."""
        return tuple(map(str, sorted(self._shelf(name)[0].versions)))

    @contextmanager
    def use(self, name: str, version: str = "") -> Iterator[Form]:
        """A model that stays open until the block ends, also when it is replaced meanwhile."""
        form = self.form(name, version)
        form.model.users += 1
        try:
            yield form
        finally:
            form.model.users -= 1
            if form.model.retired and not form.model.users:
                self._close(form.model)

    def _shelf(self, name: str) -> tuple[_Shelf, bool]:
        if name in self._shelves:
            return self._shelves[name], False
        if name.endswith(RAW) and name.removesuffix(RAW) in self._shelves:
            return self._shelves[name.removesuffix(RAW)], True
        raise RequestError(f"no model '{name[:80]}'{nearest(name[:80], self.names)}", status=404)

    def _models(self) -> Iterator[Model]:
        return (model for shelf in self._shelves.values() for model in shelf.versions.values())

    def _queued(self) -> dict[Labels, float]:
        return {(("model", each.name), ("version", each.version)): float(len(each.batcher)) for each in self._models()}

    # --- answering ----------------------------------------------------------------------------------------------

    async def infer(
        self, name: str, version: str, tensors: Mapping[str, Tensor], *, timeout: float | None = None
    ) -> tuple[Model, Arrays]:
        """The model that answered, and its outputs `probability` and `logit`, (B, 1) each.

        Raises:
            RequestError: with the status that says why.
            DataError: for raw values that can't be encoded.
        """
        with self.use(name, version) as form:
            inputs, rows = checked(tensors, form.inputs, self.limits.max_rows)
            if not rows:
                return form.model, {output: np.zeros((0, 1), np.float32) for output in OUTPUTS}
            seconds = min(self.limits.timeout_seconds, math.inf if timeout is None else timeout)
            if form.is_raw:
                began = time.monotonic()
                inputs = await self._encoded(form.model, inputs, rows, seconds)
                seconds = max(0.0, seconds - (time.monotonic() - began))
            outputs = await form.model.batcher.infer(inputs, rows, timeout=seconds)
            wrong = ~np.isfinite(outputs[LOGIT][:, 0])
            if wrong.any():
                index = int(wrong.argmax())
                raise RequestError(f"row {index + 1} (logit[{index}]): the model's answer is no finite number; its "
                                   "inputs are too large")  # fmt: skip
            return form.model, outputs

    async def _encoded(self, model: Model, columns: Arrays, rows: int, seconds: float) -> Arrays:
        """Features of raw columns, made beside the model's thread, within the same limits."""
        return await model.encoder.call(partial(model.opened.encode, columns, rows), timeout=seconds)

    # --- loading ------------------------------------------------------------------------------------------------

    async def load(self, name: str) -> None:
        """Open a model's versions anew, whatever their content; requests are answered by the old ones until then.

        Raises:
            RequestError: 404 for a name that the server was not started with.
            BundleError: naming what can't be opened; the old ones stay.
        """
        shelf = self._shelf(name)[0]
        async with shelf.lock:
            shelf.unloaded = False
            problems = await self._refresh(shelf, anew=True)
        if problems:
            raise BundleError.of(f"model '{shelf.source.name}'", problems)

    def refuse_control(self) -> None:
        """Refuse a client that wants to load or unload a model, unless the server was started for that.

        Raises:
            RequestError: 403.
        """
        if not self.settings.control:
            raise RequestError(
                "clients may not load or unload models; start the server with --control and a token", status=403
            )

    async def unload(self, name: str) -> None:
        """Take no more requests for a model; those under way are answered.

        Raises:
            RequestError: 404 for a name that the server was not started with.
        """
        shelf = self._shelf(name)[0]
        async with shelf.lock:
            shelf.unloaded = True
            shelf.reasons = {0: "unloaded"}
            for number in list(shelf.versions):
                self._retire(shelf.versions.pop(number))
            self.telemetry.count("recspec_loads_total", model=shelf.source.name, outcome="unloaded")

    async def look(self) -> None:
        """Open what is new in the models' folders. What can't be opened is told in the log and by `index`."""
        for shelf in self._shelves.values():
            async with shelf.lock:
                if not shelf.unloaded:
                    for problem in await self._refresh(shelf, anew=False):
                        log.warning("model '%s' stays as it is: %s", shelf.source.name, problem)

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(self.settings.watch_seconds)
            try:
                await self.look()
            except Exception:  # a look that fails must not be the last
                log.exception("looking for new models failed")

    async def _refresh(self, shelf: _Shelf, *, anew: bool) -> list[str]:
        """Bring a shelf up to its folder; what could not be opened."""
        try:
            found = await asyncio.to_thread(find_versions, shelf.source.path)
        except (RecspecError, OSError) as error:
            if anew or not shelf.versions:
                shelf.reasons[0] = str(error)
                return [str(error)]
            return []  # a bundle is replaced by two renames: there is a moment without one
        shelf.reasons.pop(0, None)
        problems = []
        for number, folder in found.items():
            problem = await self._open(shelf, number, folder, anew)
            problems += [problem] if problem else []
        if anew:
            for number in set(shelf.versions) - set(found):
                self._retire(shelf.versions.pop(number))
        return problems

    async def _open(self, shelf: _Shelf, number: int, folder: Path, anew: bool) -> str | None:
        """Open one version if its content is new; why it could not be."""
        old = shelf.versions.get(number)
        try:
            content = await asyncio.to_thread(fingerprint, folder)
            known = (old.opened.content if old else None, shelf.refused.get(number))
            if not anew and content in known:
                return None
            shelf.refused[number] = content
            opened = await asyncio.to_thread(open_version, folder, self.settings)
        except (RecspecError, OSError, ValueError, RuntimeError) as error:
            return self._refuse(
                shelf, number, f"{folder}: {error}" if not isinstance(error, RecspecError) else str(error)
            )
        shelf.refused.pop(number, None)
        shelf.reasons.pop(number, None)
        if opened.note:
            shelf.reasons[number] = opened.note
            log.warning("model '%s': %s", shelf.source.name, opened.note)
        shelf.versions[number] = self._model(shelf.source.name, number, opened)
        if old is not None:
            self._retire(old)
        self.telemetry.count("recspec_loads_total", model=shelf.source.name, outcome="reloaded" if old else "loaded")
        return None

    def _refuse(self, shelf: _Shelf, number: int, problem: str) -> str:
        stays = "; the older one answers" if number in shelf.versions else ""
        shelf.reasons[number] = f"{problem}{stays}"
        self.telemetry.count("recspec_loads_total", model=shelf.source.name, outcome="refused")
        return problem

    def _model(self, name: str, number: int, opened: Opened) -> Model:
        threads = self.settings.threads
        initialize = partial(torch.set_num_threads, threads) if threads else None

        def batcher(called: str) -> Batcher:
            made = Batcher(opened.run, self.limits, name=called, telemetry=self.telemetry, initialize=initialize)
            self._batchers.add(made)
            return made

        return Model(name, str(number), opened, batcher(name), batcher(name + RAW))

    def _retire(self, model: Model) -> None:
        model.retired = True
        if not model.users:
            self._close(model)

    def _close(self, model: Model) -> None:
        for batcher in (model.batcher, model.encoder):
            task = asyncio.create_task(batcher.close())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    # --- telling ------------------------------------------------------------------------------------------------

    def index(self, *, only_ready: bool = False) -> list[dict[str, str]]:
        """Name, version, state and reason of every model, as the protocol's repository extension has them."""
        told = []
        for name, shelf in self._shelves.items():
            for number in sorted({*shelf.versions, *shelf.reasons} - {0}):
                state = "READY" if number in shelf.versions else "UNAVAILABLE"
                told.append({"name": name, "version": str(number), "state": state,
                             "reason": shelf.reasons.get(number, "")})  # fmt: skip
                if number in shelf.versions and name + RAW in self.names and shelf.versions[number].opened.raw:
                    told.append({"name": name + RAW, "version": str(number), "state": state, "reason": ""})
            if 0 in shelf.reasons:
                told.append({"name": name, "version": "", "state": "UNAVAILABLE", "reason": shelf.reasons[0]})
        return [each for each in told if each["state"] == "READY" or not only_ready]

    def metadata(self, form: Form) -> dict[str, Any]:
        """The protocol's model metadata: names, datatypes and shapes, the batch first."""
        return {
            "name": form.name,
            "versions": list(self.versions(form.name)),
            "platform": form.model.opened.platform,
            "inputs": [
                {"name": port.name, "datatype": DATATYPES[port.dtype], "shape": [-1, port.width]}
                for port in form.inputs
            ],
            "outputs": [{"name": name, "datatype": "FP32", "shape": [-1, 1]} for name in OUTPUTS],
        }

    def configuration(self, form: Form) -> dict[str, Any]:
        """The model configuration as Triton's clients read it: shapes there are of one row."""
        return {
            "name": form.name,
            "platform": form.model.opened.platform,
            "backend": "recspec",
            "version_policy": {"specific": {"versions": [int(each) for each in self.versions(form.name)]}},
            "max_batch_size": self.limits.max_rows,
            "input": [
                {"name": port.name, "data_type": TYPES[port.dtype], "dims": [port.width]} for port in form.inputs
            ],
            "output": [{"name": name, "data_type": "TYPE_FP32", "dims": [1]} for name in OUTPUTS],
            "dynamic_batching": {
                "preferred_batch_size": [self.limits.max_batch_rows],
                "max_queue_delay_microseconds": round(1000 * self.limits.max_delay_ms),
            },
            "instance_group": [
                {"name": form.name, "kind": "KIND_CPU" if self.settings.device == "cpu" else "KIND_AUTO", "count": 1}
            ],
        }

    def statistics(self, forms: Sequence[Form]) -> dict[str, Any]:
        """The protocol's statistics; both forms of a model share theirs."""
        return {"model_stats": [_statistics(form) for form in forms]}

    def every_form(self) -> list[Form]:
        """Every loaded version under every name."""
        return [
            self.form(name, version)
            for name in self.names
            for version in self.versions(name)
            if not name.endswith(RAW) or name in self._shelves or self._shelf(name)[0].versions[int(version)].opened.raw
        ]


def _statistics(form: Form) -> dict[str, Any]:
    found = form.model.statistics

    def told(duration: Duration) -> dict[str, int]:
        return {"count": duration.count, "ns": duration.ns}

    def compute(spent: Compute) -> dict[str, dict[str, int]]:
        parts = {"compute_input": spent.join, "compute_infer": spent.infer, "compute_output": spent.split}
        return {name: told(part) for name, part in parts.items()}

    none = {"count": 0, "ns": 0}
    return {
        "name": form.name,
        "version": form.model.version,
        "last_inference": found.last_ms,
        "inference_count": found.rows,
        "execution_count": found.batches,
        "inference_stats": {
            "success": told(found.success),
            "fail": told(found.fail),
            "queue": told(found.queue),
            **compute(found.compute),
            "cache_hit": none,
            "cache_miss": none,
        },
        "batch_stats": [{"batch_size": rows, **compute(each)} for rows, each in sorted(found.by_rows.items())],
        "memory_usage": [],
    }
