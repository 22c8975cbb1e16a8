"""A server of models: beside a notebook's kernel, or in the foreground."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from recspec.api.verb_checks import Place, path_or_none, several, verb
from recspec.base.errors import MissingExtraError, SettingsError, listed, require_extra

if TYPE_CHECKING:
    from pydantic import BaseModel

    from recspec.serving import Addresses, BackgroundServer, Showing


T = TypeVar("T", bound="BaseModel")

log = logging.getLogger("recspec.serve")


class Serving:
    """A server that answers in the background until `stop()`, or until the end of its `with` block.

    Attributes:
        url: Address of its page and JSON routes, such as http://127.0.0.1:8000.
        grpc: Address of gRPC; None without it.
        models: Names of the models.
    """

    def __init__(self, server: BackgroundServer, addresses: Addresses, models: Sequence[str]) -> None:
        self._server = server
        atexit.register(self._server.stop)  # the interpreter would end below a thread that still serves
        self.url, self.grpc, self.models = addresses.http, addresses.grpc, tuple(models)

    @property
    def runs(self) -> bool:
        """Whether it answers."""
        return self._server.runs

    def stop(self) -> None:
        """Answer the requests under way, then end; a second call does nothing."""
        self._server.stop()
        atexit.unregister(self._server.stop)

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        grpc = f", gRPC at {self.grpc}" if self.grpc else ""
        return f"{', '.join(self.models)} at {self.url}{grpc}{'' if self.runs else ' (stopped)'}"

    def _repr_html_(self) -> str:
        if not self.runs:
            return f"<p>{escape(repr(self))}</p>"
        where = escape(self.url, quote=True)
        return f"<p>{escape(', '.join(self.models))} at <a href='{where}' target='_blank'>{where}</a></p>"


@verb
def serve(
    models: Place | Sequence[Place],
    *,
    journal: str | None = None,
    experiment: Place | None = None,
    explore: bool = False,
    explore_temperature: float = 0.5,
    explore_floor: float = 0.05,
    explore_pool: int = 200,
    explore_last: int | None = None,
    host: str = "127.0.0.1",
    http_port: int = 8000,
    grpc_port: int | None = None,
    grpc: bool = True,
    token_file: Place | None = None,
    allowed_host: str | Sequence[str] | None = None,
    control: bool = False,
    insecure: bool = False,
    tls_cert: Place | None = None,
    tls_key: Place | None = None,
    max_batch: int = 4096,
    max_delay_ms: float = 0.0,
    queue: int = 512,
    max_rows: int = 65_536,
    max_events: int = 1000,
    journal_queue: int = 20_000,
    max_body_mb: float = 32,
    max_held_mb: float = 512,
    max_requests: int = 1024,
    timeout: float = 30.0,
    threads: int | None = None,
    workers: int = 1,
    watch: float = 5.0,
    drift: float = 900.0,
    device: str = "cpu",
    verify: bool = True,
    block: bool = False,
    ready: Callable[[Serving], None] | None = None,
    force: Callable[[str], object] | None = None,
) -> Serving:
    """Serve models over HTTP and gRPC, with a page to try them.

    Args:
        models: Runs, bundles, exports, or folders with versions 1, 2, ... of one.
        journal: Journal that stores events and answers: sqlite:///FILE or postgresql+psycopg://USER@HOST/DATABASE.
        experiment: File that describes an experiment, or several; needs a journal.
        explore: Draw lists by chance and log the chances; needs a journal.
        explore_temperature: Spread of the draws in standard deviations of the scores; towards 0, the best items.
        explore_floor: Share of each place that is drawn evenly from the pool.
        explore_pool: Number of best items that may be shown.
        explore_last: Number of places at the end of a list that are drawn; by default all.
        host: Address to listen on; 0.0.0.0 admits other machines and requires a token.
        http_port: HTTP port; 0 picks a free one.
        grpc_port: gRPC port; 0 picks a free one; by default 8001, or free if the HTTP port is 0. --no-grpc (grpc=False)
            turns gRPC off.
        grpc: Answer over gRPC too, if tritonclient is installed.
        token_file: File with the bearer token; by default the variable RECSPEC_TOKEN.
        allowed_host: Further host name of the server, or several.
        control: Let clients load and unload models; requires a token.
        insecure: Accept other machines without a token.
        tls_cert: PEM certificate with its chain; turns on TLS.
        tls_key: PEM private key, without a password.
        max_batch: Maximum rows computed together.
        max_delay_ms: Milliseconds that an idle model waits for more requests.
        queue: Maximum waiting requests of a model; others get 503.
        max_rows: Maximum rows per request; larger ones get 413.
        max_events: Maximum events per request; larger ones get 413.
        journal_queue: Maximum events and answers that wait for the journal; others get 503.
        max_body_mb: Maximum MiB per request; larger ones get 413.
        max_held_mb: Maximum MiB of requests in progress; others get 503.
        max_requests: Maximum requests in progress per protocol; others get 503.
        timeout: Maximum seconds per request; slower ones get 504.
        threads: Threads per worker; by default torch's number, or a share of the cores.
        workers: Processes that answer, with shared models and ports; in Python under `if __name__ == "__main__":`.
        watch: Seconds between checks for new models; 0 disables them.
        drift: Seconds between measurements of drift against the journal, for /metrics; 0 disables them.
        device: Device: auto, cpu, cuda or cuda:N.
        verify: Compare files with their manifest.
        block: Serve in the foreground, and return after the end.
        ready: With `block`, called once the server answers.
        force: With `block`, called with a reason if the server does not end in time; must end the process.

    Returns:
        The server, at once: it answers in a thread of its own. With `block`, after SIGTERM or Ctrl-C.

    Raises:
        SettingsError: if a port is taken, settings would admit clients by accident, or the experiment can't be run.
        BundleError: if a model can't be opened.
        DataError: if the journal can't be opened.
        MissingExtraError: without the libraries of the extra `serve`, or of `loop` for a journal; without those of gRPC
            alone, only if `grpc_port` is given.
    """
    given = dict(locals())
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # or else each refused call writes a line, which clients choose
    for library in ("starlette", "uvicorn", "httptools", "orjson", "prometheus_client"):
        require_extra(library, "serve")
    if journal is not None:
        require_extra("sqlalchemy", "loop")
    grpc = grpc and _has_grpc(asked=grpc_port is not None)
    from recspec.base import config
    from recspec.serving import BackgroundServer, Limits, RepositorySettings, ServerOptions, ServeSettings, sources_of
    from recspec.serving import serve as run_server

    sources = sources_of([os.fspath(each) for each in several(models)])
    if grpc_port is None:
        grpc_port = ServeSettings().grpc_port if http_port else 0
    given |= {"grpc_port": grpc_port if grpc else None, "allowed_host": several(allowed_host)}

    def of(kind: type[T]) -> T:
        return config.build(kind, "serve", {name: given[name] for name in kind.model_fields if name in given})

    token = config.read_token(os.environ, path_or_none(token_file))
    showing = _showing(journal, experiment, explore, explore_temperature, explore_floor, explore_pool, explore_last)
    options = ServerOptions(sources, of(ServeSettings), of(RepositorySettings), of(Limits), token, showing)
    names = [each.name for each in sources]
    server = BackgroundServer(options)
    if not block:
        if ready is not None or force is not None:
            raise SettingsError("serve: ready and force go with block=True")
        return Serving(server, server.start(), names)
    told: list[Serving] = []

    def tell(addresses: Addresses) -> None:
        told.append(Serving(server, addresses, names))
        if ready is not None:
            ready(told[0])

    run_server(options, ready=tell, **({} if force is None else {"force": force}))
    return told[0]


def _showing(
    journal: str | None,
    experiment: Place | None,
    explore: bool,
    temperature: float,
    floor: float,
    pool: int,
    last: int | None,
) -> Showing:
    """How lists are made. Without a journal, nobody would know what chance or an experiment has shown."""
    from recspec.serving import Showing

    if journal is None:
        if asked := [name for name, value in (("experiment", experiment), ("explore", explore)) if value]:
            raise SettingsError(f"serve: {listed(asked)}: needs a journal; add --journal sqlite:///journal.db")
        return Showing()
    from recspec.loop import Exploration, load_experiments

    exploration = Exploration(temperature, floor, pool, last)
    if not explore and exploration != Exploration():
        raise SettingsError("serve: settings of exploration need --explore")
    experiments = () if experiment is None else load_experiments(Path(experiment))
    return Showing(exploration if explore else None, experiments)


def _has_grpc(*, asked: bool) -> bool:
    """Whether the libraries of gRPC are installed; if not, an error or a warning names the first missing one."""
    try:
        require_extra("grpc", "serve")
        require_extra("tritonclient", "serve")
        require_extra("rapidjson", "serve")  # tritonclient reads it
    except MissingExtraError as error:
        if asked:
            raise
        log.warning("no gRPC, HTTP alone: %s", error)
        return False
    return True
