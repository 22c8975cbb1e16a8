"""How fast a running server answers: clients side by side, each asking again as soon as it has its answer.

Any server of the Open Inference Protocol over HTTP can be asked. The ranges of ids of recspec's own server are known
(`GET /models`); for other servers every id is 0. The clients are threads of this process and share its interpreter, so
on many cores the clients bound the result, as any client in Python does.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
from numpy.typing import NDArray

from recspec.base import latency, machine
from recspec.base.errors import SettingsError, nearest

NUMPY: Mapping[str, str] = {
    **{f"INT{8 * size}": f"<i{size}" for size in (1, 2, 4, 8)},
    **{f"UINT{8 * size}": f"<u{size}" for size in (1, 2, 4, 8)},
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
    "BOOL": "?",
}
"""The protocol's datatypes of fixed size -> numpy's."""

TIMEOUT = 60.0
"""Seconds that a client waits for an answer."""


@dataclass(frozen=True)
class Server:
    """A server's address, its token, and the certificates that its own certificate is checked with."""

    url: str
    token: str | None = None
    tls_ca: Path | None = None
    """Certificates in PEM that are trusted; those of the machine when None."""

    def connect(self) -> http.client.HTTPConnection:
        """A new connection; nothing is sent yet.

        Raises:
            SettingsError: if the address is invalid.
        """
        try:
            parts = urlsplit(self.url if "//" in self.url else f"http://{self.url}")
            scheme, host, port = parts.scheme, parts.hostname, parts.port
        except ValueError:
            scheme, host, port = "", None, None
        if scheme not in ("http", "https") or not host:
            raise SettingsError(f"{self.url!r} is no address; expected one such as http://127.0.0.1:8000")
        if scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=self._trusted)
        if self.tls_ca is not None:
            raise SettingsError(f"--tls-ca {self.tls_ca}: is for an address that begins with https://, not {self.url}")
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT)

    @cached_property
    def _trusted(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self.tls_ca)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise SettingsError(f"--tls-ca {self.tls_ca}: expected certificates in PEM: {error}") from None

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of a path.

        Raises:
            SettingsError: if no server answers.
        """
        with closing(self.connect()) as connection:
            try:
                connection.request("GET", path, headers=self.headers)
                answer = connection.getresponse()
                return answer.status, _json(answer.read())
            except (OSError, http.client.HTTPException) as error:
                hint = "; name its certificate with --tls-ca" if isinstance(error, ssl.SSLCertVerificationError) else ""
                raise SettingsError(f"{self.url}: no server answers: {error}{hint}") from None

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"authorization": f"Bearer {self.token}"} if self.token else {}


@dataclass(frozen=True)
class Call:
    """A request that is sent over and over."""

    path: str
    body: bytes
    headers: Mapping[str, str]


def run_load_test(
    server: Server,
    *,
    model: str | None = None,
    concurrency: Sequence[int] = (1, 2, 4, 8),
    rows: int = 1,
    seconds: float = 5.0,
    warmup: float = 1.0,
) -> dict[str, object]:
    """Latency and requests/s of a model by number of clients.

    Every client sends the same made-up rows as binary tensors, on a connection of its own. Requests of the first
    `warmup` seconds are not counted.

    Raises:
        SettingsError: if no server answers, the model is unknown, or an answer reports a failure.
    """
    wrong = [f"concurrency {count}: expected 1 or more" for count in concurrency if count < 1]
    wrong += [f"rows {rows}: expected 1 or more"] if rows < 1 else []
    wrong += ["no concurrency; give --concurrency 1,2"] if not concurrency else []
    SettingsError.refuse("bench serve", wrong)
    name = model or _only_model(server)
    call = infer_call(server, name, rows)
    return {
        "url": server.url,
        "model": name,
        "measured": [_measured(server, call, count, rows, seconds, warmup) for count in concurrency],
        "seconds": seconds,
        "warmup_seconds": warmup,
        "machine": machine.describe(),
    }


def _models(server: Server) -> dict[str, dict[str, int | None]]:
    """The number of ids of each input of each model; nothing where the server does not say."""
    status, told = server.get("/models")
    models = told.get("models", ()) if status == 200 and isinstance(told, dict) else ()
    return {each["name"]: {port["name"]: port.get("num_ids") for port in each.get("features", ())} for each in models}


def _only_model(server: Server) -> str:
    names = [*_models(server)]
    if len(names) == 1:
        return names[0]
    known = f"; it holds {', '.join(names)}" if names else ""
    raise SettingsError(f"{server.url}: say which model with --model{known}")


def infer_call(server: Server, model: str, rows: int) -> Call:
    """A request to infer with made-up rows: uniform ids, numbers from 0 to 1."""
    path = f"/v2/models/{quote(model, safe='')}"
    status, told = server.get(path)
    models = _models(server)
    if status != 200:
        why = told.get("error", "") if isinstance(told, dict) else ""
        raise SettingsError(f"{server.url}: no model '{model}'{nearest(model, models)}: status {status} {why}".strip())
    num_ids = models.get(model, {})
    random = np.random.default_rng(0)
    arrays = {each["name"]: _made_up(each, rows, num_ids.get(each["name"]), random) for each in told["inputs"]}
    body, length = infer_body(arrays, {each["name"]: each["datatype"] for each in told["inputs"]})
    about = {"content-type": "application/octet-stream", "inference-header-content-length": str(length)}
    return Call(f"{path}/infer", body, {**about, **server.headers})


def infer_body(arrays: Mapping[str, NDArray[Any]], datatypes: Mapping[str, str]) -> tuple[bytes, int]:
    """A body with binary tensors that asks for binary answers, and the length of its JSON."""
    parts = [np.ascontiguousarray(array).tobytes() for array in arrays.values()]
    inputs = [
        {
            "name": name,
            "datatype": datatypes[name],
            "shape": list(array.shape),
            "parameters": {"binary_data_size": len(part)},
        }
        for (name, array), part in zip(arrays.items(), parts, strict=True)
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return b"".join([head, *parts]), len(head)


def _made_up(port: Mapping[str, Any], rows: int, num_ids: int | None, random: np.random.Generator) -> NDArray[Any]:
    if port["datatype"] not in NUMPY:
        raise SettingsError(f"input '{port['name']}' takes {port['datatype']}; measure the form that takes features")
    shape = [rows, *(max(1, width) for width in port["shape"][1:])]
    kind = np.dtype(NUMPY[port["datatype"]])
    if kind.kind == "f":
        return random.random(shape).astype(kind)
    return random.integers(0, num_ids or 1, shape).astype(kind)


def _measured(server: Server, call: Call, count: int, rows: int, seconds: float, warmup: float) -> dict[str, object]:
    """Latency and speed with `count` clients."""
    first = time.perf_counter() + warmup
    with ThreadPoolExecutor(count) as threads:
        clients = [threads.submit(request_times, server, call, first, first + seconds) for _ in range(count)]
    times = [spent for client in clients for spent in client.result()]
    if not times:
        raise SettingsError(f"{server.url}{call.path}: no answer in time")
    found = latency.of_times(times, rows).to_dict()
    del found["rows_per_second"], found["rows_per_second_at_p50"]  # of one caller
    speed = len(times) / seconds
    speeds = {"requests_per_second": round(speed, 1), "rows_per_second": round(speed * rows)}
    return {"concurrency": count, **found, **speeds}


def request_times(server: Server, call: Call, first: float, last: float) -> list[float]:
    """Seconds of each request that begins between `first` and `last`, on one connection that asks from now on."""
    times: list[float] = []
    where = f"{server.url}{call.path}"
    with closing(server.connect()) as connection:
        try:
            while (began := time.perf_counter()) < last:
                connection.request("POST", call.path, call.body, dict(call.headers))
                answer = connection.getresponse()
                body = answer.read()
                if answer.status != 200:
                    raise SettingsError(f"{where}: status {answer.status}: {body[:300].decode('utf-8', 'replace')}")
                if began >= first:
                    times.append(time.perf_counter() - began)
        except (OSError, http.client.HTTPException) as error:
            raise SettingsError(f"{where}: no answer: {error}") from None
    return times


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return {}
