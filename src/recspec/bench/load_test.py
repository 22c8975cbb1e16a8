"""How fast a running server answers: clients side by side, each asking again as soon as it has its answer.

Any server of the Open Inference Protocol over HTTP can be asked; of ours the ranges of ids are known (`GET /models`),
of others every id is 0. The clients are threads of this process, and share its interpreter: what they take themselves
bounds what is measured on many cores, as it does for any client in Python.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
from numpy.typing import NDArray

from recspec import latency, machine
from recspec.errors import SettingsError, nearest

NUMPY: Mapping[str, str] = {
    **{f"INT{8 * size}": f"<i{size}" for size in (1, 2, 4, 8)},
    **{f"UINT{8 * size}": f"<u{size}" for size in (1, 2, 4, 8)},
    "FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "BOOL": "?",
}  # fmt: skip
"""The protocol's datatypes of fixed size -> numpy's."""

TIMEOUT = 60.0
"""Seconds that a client waits for an answer."""


@dataclass(frozen=True)
class Server:
    """A server's address, the token it wants, and the certificates that its own one is checked with."""

    url: str
    token: str | None = None
    tls_ca: Path | None = None
    """Certificates in PEM that are trusted; those of the machine when None."""

    def connect(self) -> http.client.HTTPConnection:
        """A new connection; nothing is sent yet.

        Raises:
            SettingsError: if the address is none.
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
            SettingsError: if nobody answers.
        """
        connection = self.connect()
        try:
            connection.request("GET", path, headers=self.headers)
            answer = connection.getresponse()
            return answer.status, _json(answer.read())
        except (OSError, http.client.HTTPException) as error:
            hint = "; name its certificate with --tls-ca" if isinstance(error, ssl.SSLCertVerificationError) else ""
            raise SettingsError(f"{self.url}: no server answers: {error}{hint}") from None
        finally:
            connection.close()

    @property
    def headers(self) -> dict[str, str]:
        """What every request bears."""
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

    Every client sends the same made-up rows as binary tensors, on a connection of its own; what is asked in the
    `warmup` seconds before is not counted.

    Raises:
        SettingsError: if nobody answers there, the model is unknown, or an answer is no success.
    """
    wrong = [f"concurrency {count}: expected 1 or more" for count in concurrency if count < 1]
    wrong += [f"rows {rows}: expected 1 or more"] if rows < 1 else []
    wrong += ["no concurrency; give --concurrency 1,2"] if not concurrency else []
    if wrong:
        raise SettingsError.of("bench serve", wrong)
    name = model or _only_model(server)
    call = infer_call(server, name, rows)
    measured = [_measured(server, call, count, rows, seconds, warmup) for count in concurrency]
    return {
        "url": server.url,
        "model": name,
        "measured": measured,
        "seconds": seconds,
        "warmup_seconds": warmup,
        "machine": machine.describe(),
    }


def _only_model(server: Server) -> str:
    status, told = server.get("/models")
    names = [each["name"] for each in told["models"]] if status == 200 else []
    if len(names) == 1:
        return str(names[0])
    known = f"; it holds {', '.join(names)}" if names else ""
    raise SettingsError(f"{server.url}: say which model with --model{known}")


def infer_call(server: Server, model: str, rows: int, seed: int = 0) -> Call:
    """A request to infer with made-up rows: uniform ids, numbers from 0 to 1.

    Raises:
        SettingsError: if the server has no such model, or it takes texts.
    """
    status, told = server.get(f"/v2/models/{quote(model, safe='')}")
    if status != 200:
        _, listed = server.get("/models")
        names = [each["name"] for each in listed.get("models", ())] if isinstance(listed, dict) else []
        why = told.get("error", "") if isinstance(told, dict) else ""
        raise SettingsError(f"{server.url}: no model '{model}'{nearest(model, names)}: status {status} {why}".strip())
    num_ids = _num_ids(server, model)
    random = np.random.default_rng(seed)
    arrays = {each["name"]: _made_up(each, rows, num_ids.get(each["name"]), random) for each in told["inputs"]}
    body, length = infer_body(arrays, {each["name"]: each["datatype"] for each in told["inputs"]})
    headers = {
        "content-type": "application/octet-stream",
        "inference-header-content-length": str(length),
        **server.headers,
    }
    return Call(f"/v2/models/{quote(model, safe='')}/infer", body, headers)


def infer_body(arrays: Mapping[str, NDArray[Any]], datatypes: Mapping[str, str]) -> tuple[bytes, int]:
    """A body with binary tensors that asks for binary answers, and the length of its JSON."""
    parts = [np.ascontiguousarray(array).tobytes() for array in arrays.values()]
    inputs = [
        {"name": name, "datatype": datatypes[name], "shape": list(array.shape),
         "parameters": {"binary_data_size": len(part)}}
        for (name, array), part in zip(arrays.items(), parts, strict=True)
    ]  # fmt: skip
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return b"".join([head, *parts]), len(head)


def _num_ids(server: Server, model: str) -> dict[str, int | None]:
    """How many ids each input has; nothing where the server does not say."""
    status, told = server.get("/models")
    if status != 200 or not isinstance(told, dict) or "models" not in told:
        return {}
    return {port["name"]: port["num_ids"] for each in told["models"] if each["name"] == model
            for port in each["features"]}  # fmt: skip


def _made_up(port: Mapping[str, Any], rows: int, num_ids: int | None, random: np.random.Generator) -> NDArray[Any]:
    if port["datatype"] not in NUMPY:
        raise SettingsError(f"input '{port['name']}' takes {port['datatype']}; measure the form that takes features")
    shape = [rows, *(max(1, width) for width in port["shape"][1:])]
    kind = np.dtype(NUMPY[port["datatype"]])
    if kind.kind == "f":
        return random.random(shape).astype(kind)
    return random.integers(0, num_ids or 1, shape).astype(kind)


def _measured(server: Server, call: Call, count: int, rows: int, seconds: float, warmup: float) -> dict[str, object]:
    """One line of the table."""
    clients = [_Client(server, call) for _ in range(count)]
    began = time.perf_counter()
    threads = [threading.Thread(target=each.ask, args=(began + warmup, began + warmup + seconds)) for each in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    problems = [each.problem for each in clients if each.problem]
    times = [spent for each in clients for spent in each.times]
    if problems or not times:
        raise SettingsError(f"{server.url}{call.path}: {problems[0] if problems else 'no answer in time'}")
    found = latency.of_times(times, rows).to_dict()
    del found["rows_per_second"]  # of one caller
    per_second = len(times) / seconds
    return {"concurrency": count, **found, "requests_per_second": round(per_second, 1),
            "rows_per_second": round(per_second * rows)}  # fmt: skip


class _Client:
    """Asks on one connection until its time is over."""

    def __init__(self, server: Server, call: Call) -> None:
        self.times: list[float] = []
        self.problem: str | None = None
        self._server, self._call = server, call

    def ask(self, first: float, last: float) -> None:
        """Ask until `last`; count what begins after `first` (both on time.perf_counter)."""
        connection = self._server.connect()
        try:
            while (began := time.perf_counter()) < last:
                connection.request("POST", self._call.path, self._call.body, dict(self._call.headers))
                answer = connection.getresponse()
                body = answer.read()
                if answer.status != 200:
                    self.problem = f"status {answer.status}: {body[:300].decode('utf-8', 'replace')}"
                    return
                if began >= first:
                    self.times.append(time.perf_counter() - began)
        except (OSError, http.client.HTTPException) as error:
            self.problem = f"no answer: {error}"
        finally:
            connection.close()


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return {}
