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
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np
import torch

from recspec.base.errors import BundleError, RecspecError, RequestError, how_many, listed, nearest, shortened
from recspec.base.files import removed
from recspec.bundle import versions as run_versions
from recspec.export import Arrays
from recspec.feature_spec import LOGIT, Port
from recspec.inference import Predictor, requests
from recspec.serving.batching import Batcher
from recspec.serving.drift_watch import DriftWatch
from recspec.serving.exposure_log import ExposureLog
from recspec.serving.http_bodies import BodyReader
from recspec.serving.journal_reader import JournalReader
from recspec.serving.model_folders import (
    RAW,
    Fingerprint,
    LinkedCopies,
    OwnCopies,
    PrivateCopy,
    Source,
    find_versions,
    fingerprint,
)
from recspec.serving.opened_model import FileState, Opened, open_version, reason, state_of_changes, with_changes
from recspec.serving.server_metrics import NO_MODEL, ServerMetrics
from recspec.serving.settings import Limits, RepositorySettings
from recspec.serving.showing import Showing, Ways
from recspec.serving.tensors import Tensor, checked

if TYPE_CHECKING:
    from recspec.loop import Experiment, Histories, Journal, JournalWriter, Writer

log = logging.getLogger("recspec.serve")


MOST_NOTED = 5
"""Types of events that notes name."""


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
    histories: Histories | None = None
    """What the journal holds beside the model's dataset; None without a journal, or without users and items."""


@dataclass(frozen=True)
class Endpoint:
    """A model under one of its names: for features, or for raw values."""

    name: str
    model: Model
    is_raw: bool = False

    @property
    def inputs(self) -> tuple[Port, ...]:
        return self.model.opened.raw if self.is_raw else self.model.opened.signature.inputs


@dataclass(eq=False)
class ModelVersions:
    """A source, and its loaded versions."""

    source: Source
    loaded: dict[int, Model] = field(default_factory=dict)
    unloaded: bool = False
    reasons: dict[int, str] = field(default_factory=dict)
    """Version -> reason why its present content is not served; 0 means the whole folder."""
    refused: dict[int, Fingerprint] = field(default_factory=dict)
    """Contents that could not be opened, and are not tried again."""
    refused_changes: dict[int, FileState] = field(default_factory=dict)
    """Likewise files of what became of items."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        return self.source.name


WorkerBroadcast = Callable[[str, str], Awaitable[str]]
"""Does what `Repository.perform` does in every process of a server, whichever of them a client reaches."""


class Repository:
    """Every model of a server, by name and version. Used on one event loop.

    One class because finding, loading and closing models work on the same versions.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        settings: RepositorySettings | None = None,
        limits: Limits | None = None,
        showing: Showing | None = None,
    ) -> None:
        self.settings, self.limits = settings or RepositorySettings(), limits or Limits()
        self.metrics, self.body_reader = ServerMetrics(), BodyReader(self.limits)
        self.broadcast: WorkerBroadcast = self.perform
        self.copies: OwnCopies | LinkedCopies = OwnCopies(verify=self.settings.verify)
        self.journal: Journal | None = None
        """The journal to read; None without one."""
        self.journal_reader = JournalReader()
        self.writer: Writer | None = None
        """Stores events and answers. A worker is given one if another process writes."""
        self.ways = Ways(showing or Showing(), self.journal_reader)
        self.exposures: ExposureLog | None = None
        """Logs what was shown; None without a journal."""
        self.measures_drift = True
        """Whether this process does; of several workers one is enough."""
        self._drift: DriftWatch | None = None
        self._versions = {source.name: ModelVersions(source) for source in sources}
        self._tasks: set[asyncio.Task[None]] = set()
        self._batchers = WeakSet[Batcher]()
        self._watch: asyncio.Task[None] | None = None
        self.metrics.queued = lambda: [(each.name, each.version, len(each.batcher)) for each in self._loaded()]
        self.metrics.models.set_function(lambda: len(list(self._loaded())))
        self.metrics.held_bytes.set_function(lambda: self.body_reader.held)

    async def start(self) -> None:
        """Open the journal and every model, and start to check for new content.

        Raises:
            BundleError: names every model that can't be opened.
            DataError: if the journal can't be opened.
            SettingsError: if an experiment can't be run with these models.
        """
        if self.settings.journal is not None:
            await self._open_journal(self.settings.journal)
        problems: list[str] = []
        for name in self._versions:
            try:
                await self.load(name)
            except RecspecError as error:
                problems += error.problems
        if problems:
            await self.close()
            raise BundleError.of("models", problems)
        try:
            self.ways.check(self)
        except RecspecError:
            await self.close()
            raise
        if self.journal is not None:
            for note in self.notes_of_types(await asyncio.to_thread(self.journal.recent_types)):
                log.warning("the newest events of the journal: %s", note)
            metrics = {metric.event: 0 for each in self.ways.experiments for metric in each.metrics}
            for note in self.notes_of_types(metrics):
                log.warning("metrics of the experiments: %s", note)
        if self.settings.watch:
            self._watch = asyncio.create_task(self._look_again())
        if self.journal is not None and self.measures_drift and self.settings.drift:
            self._drift = DriftWatch(self, self.journal, self.metrics.drift, seconds=self.settings.drift)

    async def _open_journal(self, url: str) -> None:
        from recspec.loop import Journal

        if self.writer is None:
            self.writer = await open_writer(url, self.limits, self.metrics, self.ways.experiments)
        self.exposures = ExposureLog(self.writer, self.metrics.shown)
        self.journal = self.ways.journal = await asyncio.to_thread(partial(Journal, url, read_only=True))
        newest = await asyncio.to_thread(self.journal.newest_received_at)
        self.metrics.journal.newest.set((newest or 0) / 1e6)

    def notes_of_types(self, counts: Mapping[str, int]) -> list[str]:
        """A sentence on each type of some events that no served model reads, of at most `MOST_NOTED`."""
        loaded = [model for versions in self._versions.values() for model in versions.loaded.values()]
        histories = [model.histories for model in loaded if model.histories is not None]
        known = dict.fromkeys(kind for each in histories for kind in each.event_types)
        ignored = [kind for kind in counts if histories and all(each.ignores(kind) for each in histories)]
        times = {kind: f" ({how_many(count, 'event')})" if count else "" for kind, count in counts.items()}
        return [
            f"type '{shortened(kind)}'{times[kind]}: no served model reads it"
            f"{nearest(kind, known)}; they read {listed(known)}"
            for kind in ignored[:MOST_NOTED]
        ]

    async def close(self) -> None:
        """Close every model, after its requests are answered, and the journal, after what waits is stored."""
        if self._watch is not None:
            self._watch.cancel()
        if self._drift is not None:
            await self._drift.close()
        for versions in self._versions.values():
            versions.unloaded = True
            self._retire(versions, versions.loaded)
        while self._tasks:
            await asyncio.gather(*self._tasks)
        self.copies.close()
        if self.exposures is not None:
            await self.exposures.flush()
        if self.writer is not None:
            await self.writer.close()
        self.journal_reader.close()
        if self.journal is not None:
            self.journal.close()

    # --- finding ------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether every model that was not unloaded can answer."""
        return all(versions.loaded or versions.unloaded for versions in self._versions.values())

    @property
    def num_abandoned(self) -> int:
        """Abandoned computations that still run, including those of unloaded models."""
        return sum(each.num_abandoned for each in self._batchers)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of loaded models, including raw forms."""
        loaded = [(name, versions) for name, versions in self._versions.items() if versions.loaded]
        raw = [name + RAW for name, versions in loaded if any(each.opened.raw for each in versions.loaded.values())]
        return tuple(name for name, _ in loaded) + tuple(name for name in raw if name not in self._versions)

    def endpoint(self, name: str, version: str = "") -> Endpoint:
        """A loaded model by its name, by default its newest version; 404 if it is unknown, 503 if it is not loaded."""
        versions, is_raw = self._find(name)
        if not versions.loaded:
            raise RequestError(f"model '{name}' is not loaded; POST /v2/repository/models/{name}/load", status=503)
        number = int(version) if version.isascii() and version.isdecimal() and len(version) < 10 else None
        model = versions.loaded.get(max(versions.loaded) if not version else number or 0)
        if model is None:
            known = ", ".join(map(str, sorted(versions.loaded)))
            raise RequestError(f"model '{name}' has no version '{version[:20]}'; loaded: {known}", status=404)
        if is_raw and not model.opened.raw:
            message = f"model '{name}': the raw columns are unknown; send features to '{name.removesuffix(RAW)}'"
            raise RequestError(message, status=404)
        return Endpoint(name, model, is_raw)

    def _is_loaded(self, name: str) -> bool:
        """Whether a name is among `names`, which take longer to list."""
        if name in self._versions:
            return bool(self._versions[name].loaded)
        return name.endswith(RAW) and name in self.names

    def versions(self, name: str) -> tuple[str, ...]:
        """Its loaded versions, oldest first."""
        return tuple(map(str, sorted(self._find(name)[0].loaded)))

    def endpoints(self, name: str = "", version: str = "") -> list[Endpoint]:
        """A model's loaded versions, or one of them; without a name, every version of every model."""
        if name:
            return [self.endpoint(name, each) for each in ([version] if version else self.versions(name))]
        named = [(each, *self._find(each)) for each in self.names]
        return [
            Endpoint(each, model, is_raw)
            for each, versions, is_raw in named
            for _, model in sorted(versions.loaded.items())
            if model.opened.raw or not is_raw
        ]

    @contextmanager
    def use(self, name: str, version: str = "") -> Iterator[Endpoint]:
        """A model that stays open until the block ends, even if it is replaced meanwhile."""
        endpoint = self.endpoint(name, version)
        endpoint.model.users += 1
        try:
            yield endpoint
        finally:
            endpoint.model.users -= 1
            if endpoint.model.retired and not endpoint.model.users:
                self._close(endpoint.model)

    def _find(self, name: str) -> tuple[ModelVersions, bool]:
        if name in self._versions:
            return self._versions[name], False
        if name.endswith(RAW) and name.removesuffix(RAW) in self._versions:
            return self._versions[name.removesuffix(RAW)], True
        raise RequestError(f"no model '{name[:80]}'{nearest(name[:80], self.names)}", status=404)

    def _loaded(self) -> Iterator[Model]:
        return (model for versions in self._versions.values() for model in versions.loaded.values())

    # --- answering ----------------------------------------------------------------------------------------------

    async def infer(
        self, name: str, version: str, tensors: Mapping[str, Tensor], *, timeout: float | None = None
    ) -> tuple[Model, Arrays]:
        """The model that answered, and its outputs, (B, 1) each."""
        with self.use(name, version) as endpoint:
            inputs, rows = checked(tensors, endpoint.inputs, self.limits.max_rows)
            if not rows:
                empty = np.zeros((0, 1), np.float32)
                return endpoint.model, dict.fromkeys(endpoint.model.opened.signature.outputs, empty)
            seconds = min(self.limits.timeout, math.inf if timeout is None else timeout)
            if endpoint.is_raw:
                began = time.monotonic()
                encode = partial(endpoint.model.opened.encode, inputs, rows)
                inputs = await endpoint.model.encoder.call(encode, timeout=seconds)
                seconds = max(0.0, seconds - (time.monotonic() - began))
            outputs = await endpoint.model.batcher.infer(inputs, rows, timeout=seconds)
            wrong = ~np.isfinite(outputs[LOGIT][:, 0])
            if wrong.any():
                index = int(wrong.argmax())
                message = "the model's answer is no finite number; its inputs are too large"
                raise RequestError(f"row {index + 1} (logit[{index}]): {message}")
            return endpoint.model, outputs

    async def perform(self, what: str, name: str) -> str:
        """Load or unload a model of this process, or give its metrics in Prometheus's text format."""
        if what == "metrics":
            return self.metrics.text().decode()
        await (self.load(name) if what == "load" else self.unload(name))
        return ""

    def count(self, protocol: str, route: str, model: str | None, status: str, seconds: float) -> None:
        """Count an answered request in the metrics."""
        known = model if model is not None and self._is_loaded(model) else NO_MODEL
        self.metrics.count(protocol, route, known, status, seconds)

    # --- loading ------------------------------------------------------------------------------------------------

    async def load(self, name: str) -> None:
        """Open a model's versions again, changed or not; the old ones answer until then, and stay if that fails."""
        versions = self._find(name)[0]
        async with versions.lock:
            versions.unloaded = False
            problems = await self._refresh(versions, anew=True)
        BundleError.refuse(f"model '{versions.name}'", problems)

    def refuse_control(self) -> None:
        """Refuse to load or unload a model for a client, unless the server was started with --control."""
        if not self.settings.control:
            message = "clients may not load or unload models; start the server with --control and a token"
            raise RequestError(message, status=403)

    async def load_everywhere(self, name: str, parameters: object) -> None:
        """Load a model in every process for a client, who can't send files or a configuration."""
        if parameters:
            raise RequestError("a model is loaded from its folder alone; 'config' and files can't be sent")
        await self.broadcast("load", name)

    async def unload(self, name: str) -> None:
        """Take no more requests for a model; requests under way are answered."""
        versions = self._find(name)[0]
        async with versions.lock:
            versions.unloaded = True
            versions.reasons = {0: "unloaded"}
            self._retire(versions, versions.loaded)
            self.metrics.loads.labels(versions.name, "unloaded").inc()

    async def look(self) -> None:
        """Open new content of the models' folders; failures go to the log and to `index`."""
        for versions in self._versions.values():
            async with versions.lock:
                if not versions.unloaded:
                    for problem in await self._refresh(versions, anew=False):
                        log.warning("model '%s' stays as it is: %s", versions.name, problem)

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(self.settings.watch)
            try:
                await self.look()
            except Exception:  # the next check must still come
                log.exception("looking for new models failed")

    async def _refresh(self, versions: ModelVersions, *, anew: bool) -> list[str]:
        """Update a model's versions from its folder; the problems of versions that could not be opened."""
        try:
            found = await asyncio.to_thread(find_versions, versions.source.path)
        except (RecspecError, OSError) as error:
            if anew or not versions.loaded:
                versions.reasons[0] = str(error)
                return [str(error)]
            return []  # a bundle is replaced by two renames: there is a moment without one
        except Exception as error:
            versions.reasons[0] = reason(error, versions.source.path)
            return [versions.reasons[0]]
        versions.reasons.pop(0, None)
        problems = []
        for number, folder in found.items():
            problem = await self._open(versions, number, folder, anew)
            problems += [problem] if problem else []
        if anew:
            self._retire(versions, set(versions.loaded) - set(found))
        return problems

    async def _open(self, versions: ModelVersions, number: int, folder: Path, anew: bool) -> str | None:
        """Open one version if its content is new; the problem if that fails."""
        old = versions.loaded.get(number)
        try:
            content = await asyncio.to_thread(fingerprint, folder)
            known = (old.opened.content if old else None, versions.refused.get(number))
            if not anew and content in known:
                return await self._take_changes(versions, number, old) if old is not None else None
            versions.refused[number] = content
            copy, stale = await self.copies.of(versions.name, number, folder, is_new=old is None)
            opened = await self._opened(copy, content)
        except Exception as error:  # a damaged or edited file may raise anything
            problem = reason(error, folder)
            versions.reasons[number] = f"{problem}; the older one answers" if old else problem
            self.metrics.loads.labels(versions.name, "refused").inc()
            return problem
        versions.reasons.pop(number, None)
        if opened.note:
            versions.reasons[number] = opened.note
        if stale:
            versions.reasons[number] = f"{stale}; the content before it answers"
            log.warning("model '%s': %s", versions.name, versions.reasons[number])
        else:
            versions.refused.pop(number, None)
        model = self._model(versions.name, number, opened)
        if number in versions.loaded:
            self._retire(versions, [number])
        versions.loaded[number] = model
        self.metrics.loads.labels(versions.name, "reloaded" if old else "loaded").inc()
        is_of_run = run_versions.run_of(folder) == versions.source.path
        which = run_versions.called(opened.update) if is_of_run else f"version {number}"
        computing = opened.note or (opened.export and f"{opened.export} computes")
        more = f"; for requests to infer, {computing}" if computing else ""
        level = logging.WARNING if opened.note else logging.INFO
        log.log(level, "model '%s': %s answers, from %s%s", versions.name, which, folder, more)
        return None

    async def _take_changes(self, versions: ModelVersions, number: int, model: Model) -> str | None:
        """Take up what became of the items of a version's run; the problem if its file can't be read."""
        opened = model.opened
        if opened.predictor is None or opened.copy is None:
            return None
        state = await asyncio.to_thread(state_of_changes, opened.copy.origin)
        if state == opened.changes or (
            number in versions.refused_changes and versions.refused_changes[number] == state
        ):
            return None
        try:
            changed = await asyncio.to_thread(with_changes, opened)
        except Exception as error:  # a damaged file may raise anything
            versions.refused_changes[number] = state
            problem = reason(error, opened.copy.origin)
            versions.reasons[number] = f"{problem}; the catalogue before it answers"
            return problem
        versions.refused_changes.pop(number, None)
        versions.reasons.pop(number, None)
        versions.reasons |= {number: changed.note} if changed.note else {}
        # Requests under way keep the predictor that they began with.
        model.opened = changed
        self.metrics.loads.labels(versions.name, "catalogue").inc()
        log.info("model '%s': takes up the catalogue of %s", versions.name, opened.copy.origin)
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
        threads = self.settings.threads
        initialize = partial(torch.set_num_threads, threads) if threads else lambda: None

        def batcher(called: str) -> Batcher:
            made = Batcher(opened.run, self.limits, name=called, metrics=self.metrics, initialize=initialize)
            self._batchers.add(made)
            return made

        return Model(
            name, str(number), opened, batcher(name), batcher(name + RAW), histories=self._histories(opened.predictor)
        )

    def _histories(self, predictor: Predictor | None) -> Histories | None:
        if self.journal is None or predictor is None or not requests.knows_users_and_items(predictor):
            return None
        from recspec.loop import Histories

        return Histories(self.journal, predictor)

    def _retire(self, versions: ModelVersions, numbers: Iterable[int]) -> None:
        """Retire versions, and close them after their last request."""
        for model in [versions.loaded.pop(number) for number in [*numbers]]:
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
        for name, versions in self._versions.items():
            for number in sorted({*versions.loaded, *versions.reasons} - {0}):
                state = "READY" if number in versions.loaded else "UNAVAILABLE"
                reason = versions.reasons.get(number, "")
                entries.append({"name": name, "version": str(number), "state": state, "reason": reason})
                if number in versions.loaded and name + RAW in self.names and versions.loaded[number].opened.raw:
                    entries.append({"name": name + RAW, "version": str(number), "state": state, "reason": ""})
            if 0 in versions.reasons:
                entries.append({"name": name, "version": "", "state": "UNAVAILABLE", "reason": versions.reasons[0]})
        return [each for each in entries if each["state"] == "READY" or not only_ready]


async def open_writer(
    url: str, limits: Limits, metrics: ServerMetrics, experiments: Sequence[Experiment] = ()
) -> JournalWriter:
    """The writer of a server's journal, which is made if there is none; its groups are counted."""
    from recspec.loop import Journal, JournalWriter, register

    journal = await asyncio.to_thread(Journal, url)
    await asyncio.to_thread(register, journal, experiments)
    writer = JournalWriter(journal, max_waiting=limits.journal_queue, observed=metrics.journal.count_group)
    metrics.journal.waiting.set_function(lambda: writer.waiting)
    return writer
