"""The models of a server, in versions, opened and replaced while requests are answered.

A model comes from a run, a bundle, an export, or a folder of these named 1, 2, ... If a bundle's folder `export` holds
an export with the bundle's probabilities, the export computes. A request is answered by the model that it began with;
a replaced model is closed after its last request. If a new version can't be opened, the old one stays, and `index`
gives the reason. A model whose raw columns are known has two names: `NAME` takes features, `NAME_raw` takes raw values
and encodes them as `prepare` fitted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

import numpy as np
import torch

from recspec.base.errors import BundleError, RecspecError, RequestError, nearest
from recspec.base.files import removed
from recspec.export import Arrays
from recspec.feature_spec import LOGIT, Port
from recspec.inference import Directory, ItemFields
from recspec.serving.batching import Batcher, Limits
from recspec.serving.http_bodies import BodyReader
from recspec.serving.opened_model import Opened, RepositorySettings, open_version, reason
from recspec.serving.private_copies import Copies, OwnCopies, PrivateCopy
from recspec.serving.server_metrics import NO_MODEL, ServerMetrics
from recspec.serving.sources import RAW, Fingerprint, Source, find_versions, fingerprint
from recspec.serving.tensors import Tensor, checked

log = logging.getLogger("recspec.serve")


@dataclass(eq=False)
class Model:
    """A loaded version of a model, and the number of its users."""

    name: str
    version: str
    opened: Opened
    batcher: Batcher
    encoder: Batcher
    """Encodes raw values, on a thread of its own."""
    users: int = 0
    retired: bool = False
    directories: dict[str, Directory] = field(default_factory=dict)
    """Role -> its users or items, made at the first search."""
    item_fields: ItemFields | None = None
    """The item catalogue as the page shows it, made at its first use."""


@dataclass(frozen=True)
class Form:
    """A model under one of its names: for features, or for raw values."""

    name: str
    model: Model
    is_raw: bool = False

    @property
    def inputs(self) -> tuple[Port, ...]:
        return self.model.opened.raw if self.is_raw else self.model.opened.signature.inputs


@dataclass(eq=False)
class _Shelf:
    """A source, and its loaded versions."""

    source: Source
    versions: dict[int, Model] = field(default_factory=dict)
    unloaded: bool = False
    reasons: dict[int, str] = field(default_factory=dict)
    """Version -> reason why its present content is not served; 0 means the whole folder."""
    refused: dict[int, Fingerprint] = field(default_factory=dict)
    """Contents that could not be opened, and are not tried again."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Everywhere(Protocol):
    """What concerns all processes of a server, whichever of them a client reaches."""

    async def load(self, name: str) -> None:
        """Open a model's versions again; see `Repository.load`."""

    async def unload(self, name: str) -> None:
        """Take no more requests for a model."""

    async def metrics(self) -> bytes:
        """The metrics in Prometheus's text format."""
        ...


class _Alone:
    """A server of one process."""

    def __init__(self, repository: Repository) -> None:
        self.load, self.unload, self._metrics = repository.load, repository.unload, repository.metrics

    async def metrics(self) -> bytes:
        """The metrics of the process."""
        return self._metrics.text()


class Repository:
    """Every model of a server, by name and version. Used on one event loop.

    One class because finding, loading and closing models work on the same shelves.
    """

    def __init__(
        self, sources: Sequence[Source], *, settings: RepositorySettings | None = None, limits: Limits | None = None
    ) -> None:
        self.settings, self.limits = settings or RepositorySettings(), limits or Limits()
        self.metrics, self.body_reader = ServerMetrics(), BodyReader(self.limits)
        self.everywhere: Everywhere = _Alone(self)
        self.copies: Copies = OwnCopies(verify=self.settings.verify)
        self._shelves = {source.name: _Shelf(source) for source in sources}
        self._tasks: set[asyncio.Task[None]] = set()
        self._batchers = WeakSet[Batcher]()
        self._watch: asyncio.Task[None] | None = None
        self.metrics.queued = lambda: [(each.name, each.version, len(each.batcher)) for each in self._models()]
        self.metrics.models.set_function(lambda: len(list(self._models())))
        self.metrics.held_bytes.set_function(lambda: self.body_reader.held)

    async def start(self) -> None:
        """Open every model, and start to check for new content; the error names every model that can't be opened."""
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
        """Close every model, after its requests are answered."""
        if self._watch is not None:
            self._watch.cancel()
        for shelf in self._shelves.values():
            shelf.unloaded = True
            self._retire(shelf, shelf.versions)
        while self._tasks:
            await asyncio.gather(*self._tasks)
        self.copies.close()

    # --- finding ------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether every model that was not unloaded can answer."""
        return all(shelf.versions or shelf.unloaded for shelf in self._shelves.values())

    @property
    def given_up(self) -> int:
        """Abandoned computations that still run, including those of unloaded models."""
        return sum(each.given_up for each in self._batchers)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of loaded models, including raw forms."""
        loaded = [(name, shelf) for name, shelf in self._shelves.items() if shelf.versions]
        raw = [name + RAW for name, shelf in loaded if any(each.opened.raw for each in shelf.versions.values())]
        return tuple(name for name, _ in loaded) + tuple(name for name in raw if name not in self._shelves)

    def form(self, name: str, version: str = "") -> Form:
        """A loaded model by its name, by default its newest version; 404 if it is unknown, 503 if it is not loaded."""
        shelf, is_raw = self._shelf(name)
        if not shelf.versions:
            raise RequestError(f"model '{name}' is not loaded; POST /v2/repository/models/{name}/load", status=503)
        number = int(version) if version.isascii() and version.isdecimal() and len(version) < 10 else None
        model = shelf.versions.get(max(shelf.versions) if not version else number or 0)
        if model is None:
            known = ", ".join(map(str, sorted(shelf.versions)))
            raise RequestError(f"model '{name}' has no version '{version[:20]}'; loaded: {known}", status=404)
        if is_raw and not model.opened.raw:
            message = f"model '{name}': the raw columns are unknown; send features to '{name.removesuffix(RAW)}'"
            raise RequestError(message, status=404)
        return Form(name, model, is_raw)

    def _is_loaded(self, name: str) -> bool:
        """Whether a name is among `names`, which take longer to list."""
        if name in self._shelves:
            return bool(self._shelves[name].versions)
        return name.endswith(RAW) and name in self.names

    def versions(self, name: str) -> tuple[str, ...]:
        """Its loaded versions, oldest first."""
        return tuple(map(str, sorted(self._shelf(name)[0].versions)))

    def forms(self, name: str = "", version: str = "") -> list[Form]:
        """A model's loaded versions, or one of them; without a name, every version of every model."""
        if name:
            return [self.form(name, each) for each in ([version] if version else self.versions(name))]
        named = [(each, *self._shelf(each)) for each in self.names]
        return [
            Form(each, model, is_raw)
            for each, shelf, is_raw in named
            for _, model in sorted(shelf.versions.items())
            if model.opened.raw or not is_raw
        ]

    @contextmanager
    def use(self, name: str, version: str = "") -> Iterator[Form]:
        """A model that stays open until the block ends, even if it is replaced meanwhile."""
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

    # --- answering ----------------------------------------------------------------------------------------------

    async def infer(
        self, name: str, version: str, tensors: Mapping[str, Tensor], *, timeout: float | None = None
    ) -> tuple[Model, Arrays]:
        """The model that answered, and its outputs, (B, 1) each."""
        with self.use(name, version) as form:
            inputs, rows = checked(tensors, form.inputs, self.limits.max_rows)
            if not rows:
                return form.model, {
                    output: np.zeros((0, 1), np.float32) for output in form.model.opened.signature.outputs
                }
            seconds = min(self.limits.timeout_seconds, math.inf if timeout is None else timeout)
            if form.is_raw:
                began = time.monotonic()
                encode = partial(form.model.opened.encode, inputs, rows)
                inputs = await form.model.encoder.call(encode, timeout=seconds)
                seconds = max(0.0, seconds - (time.monotonic() - began))
            outputs = await form.model.batcher.infer(inputs, rows, timeout=seconds)
            wrong = ~np.isfinite(outputs[LOGIT][:, 0])
            if wrong.any():
                index = int(wrong.argmax())
                message = "the model's answer is no finite number; its inputs are too large"
                raise RequestError(f"row {index + 1} (logit[{index}]): {message}")
            return form.model, outputs

    def count(self, protocol: str, route: str, model: str | None, status: str, seconds: float) -> None:
        """Count an answered request in the metrics."""
        known = model if model is not None and self._is_loaded(model) else NO_MODEL
        self.metrics.count(protocol, route, known, status, seconds)

    # --- loading ------------------------------------------------------------------------------------------------

    async def load(self, name: str) -> None:
        """Open a model's versions again, changed or not; the old ones answer until then, and stay if that fails."""
        shelf = self._shelf(name)[0]
        async with shelf.lock:
            shelf.unloaded = False
            problems = await self._refresh(shelf, anew=True)
        if problems:
            raise BundleError.of(f"model '{shelf.source.name}'", problems)

    def refuse_control(self) -> None:
        """Refuse to load or unload a model for a client, unless the server was started with --control."""
        if not self.settings.control:
            message = "clients may not load or unload models; start the server with --control and a token"
            raise RequestError(message, status=403)

    async def unload(self, name: str) -> None:
        """Take no more requests for a model; requests under way are answered."""
        shelf = self._shelf(name)[0]
        async with shelf.lock:
            shelf.unloaded = True
            shelf.reasons = {0: "unloaded"}
            self._retire(shelf, shelf.versions)
            self.metrics.loads.labels(shelf.source.name, "unloaded").inc()

    async def look(self) -> None:
        """Open new content of the models' folders; failures go to the log and to `index`."""
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
            except Exception:  # the next check must still come
                log.exception("looking for new models failed")

    async def _refresh(self, shelf: _Shelf, *, anew: bool) -> list[str]:
        """Update a shelf from its folder; the problems of versions that could not be opened."""
        try:
            found = await asyncio.to_thread(find_versions, shelf.source.path)
        except (RecspecError, OSError) as error:
            if anew or not shelf.versions:
                shelf.reasons[0] = str(error)
                return [str(error)]
            return []  # a bundle is replaced by two renames: there is a moment without one
        except Exception as error:
            shelf.reasons[0] = reason(error, shelf.source.path)
            return [shelf.reasons[0]]
        shelf.reasons.pop(0, None)
        problems = []
        for number, folder in found.items():
            problem = await self._open(shelf, number, folder, anew)
            problems += [problem] if problem else []
        if anew:
            self._retire(shelf, set(shelf.versions) - set(found))
        return problems

    async def _open(self, shelf: _Shelf, number: int, folder: Path, anew: bool) -> str | None:
        """Open one version if its content is new; the problem if that fails."""
        old = shelf.versions.get(number)
        try:
            content = await asyncio.to_thread(fingerprint, folder)
            known = (old.opened.content if old else None, shelf.refused.get(number))
            if not anew and content in known:
                return None
            shelf.refused[number] = content
            copy, stale = await self.copies.of(shelf.source.name, number, folder, is_new=old is None)
            opened = await self._opened(copy, content)
        except Exception as error:  # a damaged or edited file may raise anything
            problem = reason(error, folder)
            shelf.reasons[number] = f"{problem}; the older one answers" if old else problem
            self.metrics.loads.labels(shelf.source.name, "refused").inc()
            return problem
        shelf.reasons.pop(number, None)
        if opened.note:
            shelf.reasons[number] = opened.note
        if stale:
            shelf.reasons[number] = f"{stale}; the content before it answers"
            log.warning("model '%s': %s", shelf.source.name, shelf.reasons[number])
        else:
            shelf.refused.pop(number, None)
        model = self._model(shelf.source.name, number, opened)
        if number in shelf.versions:
            self._retire(shelf, [number])
        shelf.versions[number] = model
        self.metrics.loads.labels(shelf.source.name, "reloaded" if old else "loaded").inc()
        which = f"update {opened.update}" if opened.update else f"version {number}"
        computing = opened.note or (opened.export and f"{opened.export} computes")
        more = f"; for requests to infer, {computing}" if computing else ""
        level = logging.WARNING if opened.note else logging.INFO
        log.log(level, "model '%s': %s answers, from %s%s", shelf.source.name, which, folder, more)
        return None

    async def _opened(self, copy: PrivateCopy, content: Fingerprint) -> Opened:
        try:
            return await asyncio.to_thread(open_version, copy, content, self.settings)
        except Exception as error:
            removed(copy.place)
            if isinstance(error, RecspecError):
                raise BundleError(copy.shown(str(error))) from None
            raise

    def _model(self, name: str, number: int, opened: Opened) -> Model:
        def initialize() -> None:
            if self.settings.threads:
                torch.set_num_threads(self.settings.threads)

        def batcher(called: str) -> Batcher:
            made = Batcher(opened.run, self.limits, name=called, metrics=self.metrics, initialize=initialize)
            self._batchers.add(made)
            return made

        return Model(name, str(number), opened, batcher(name), batcher(name + RAW))

    def _retire(self, shelf: _Shelf, numbers: Iterable[int]) -> None:
        """Take versions off a shelf, and close them after their last request."""
        for model in [shelf.versions.pop(number) for number in [*numbers]]:
            model.retired = True
            if not model.users:
                self._close(model)

    def _close(self, model: Model) -> None:
        for batcher in (model.batcher, model.encoder):
            task = asyncio.create_task(batcher.close())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def index(self, *, only_ready: bool = False) -> list[dict[str, str]]:
        """Name, version, state and reason of every model, for the protocol's repository extension."""
        entries = []
        for name, shelf in self._shelves.items():
            for number in sorted({*shelf.versions, *shelf.reasons} - {0}):
                state = "READY" if number in shelf.versions else "UNAVAILABLE"
                reason = shelf.reasons.get(number, "")
                entries.append({"name": name, "version": str(number), "state": state, "reason": reason})
                if number in shelf.versions and name + RAW in self.names and shelf.versions[number].opened.raw:
                    entries.append({"name": name + RAW, "version": str(number), "state": state, "reason": ""})
            if 0 in shelf.reasons:
                entries.append({"name": name, "version": "", "state": "UNAVAILABLE", "reason": shelf.reasons[0]})
        return [each for each in entries if each["state"] == "READY" or not only_ready]


def refuse_load_parameters(parameters: object) -> None:
    """Refuse files or a configuration from a client; a model is loaded from its folder alone."""
    if parameters:
        raise RequestError("a model is loaded from its folder alone; 'config' and files can't be sent")
