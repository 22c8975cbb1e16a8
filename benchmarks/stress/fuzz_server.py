"""`recspec serve` under random requests, over HTTP and gRPC, while correct clients check every answer.

    python benchmarks/stress/fuzz_server.py --minutes 5 --seed 1

From nothing: trains three small models (those of serve_load.py) and starts the server as a user would, on free ports of
this machine alone, with a token and `--control`. Then, at the same time and from one seed:

- correct clients ask as in serve_load.py, and compare each answer with the bundle's;
- raw sockets send requests that are malformed, pipelined, in chunks, half-closed, oversized, slow or never read;
- bodies of the JSON routes and of the Open Inference Protocol are mutated in their structure and in their bytes;
- messages of gRPC are mutated likewise, packed, called off, and sent to methods that are not there;
- one model is unloaded and loaded, and must answer exactly while it is loaded; another is loaded anew all the time.

A finding is: a status of 500 or above other than 503 and 504 (of gRPC: INTERNAL, UNKNOWN), no answer within a bound, a
wrong answer or one of the wrong form, a traceback in the log, memory that grows, a process that ends, or one that does
not when it is asked to. Prints the cases tried and the findings, and exits with 1 where there is any.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from recspec.inference.predictor import Predictor
from serve_load import (
    BEARER,
    BODY_MB,
    JSON,
    TOKEN,
    Client,
    Grpc,
    Http,
    Question,
    binary,
    hostile_requests,
    make_models,
    memory,
    predicted,
    questions_of,
    ranked,
    recommended,
    serving,
)

HANG_SECONDS = 60.0
"""For an answer; the server takes 20 s for a head and for a computation."""
GROWTH = 0.15
"""Of the server's memory, from the second quarter of the run to the last."""
REFUSED = (503, 504)
WEIRD: Sequence[Any] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**53,
    2**63 - 1,
    -(2**63),
    2**64,
    1e308,
    -1e-308,
    0.5,
    "",
    "x",
    "x" * 1001,
    "\x00",
    "ü\u2028",
    "user_id",
    "9" * 40,
    [],
    {},
    [[]],
    [{}],
    {"": ""},
    [None],
    "1|2|3",
)
METHODS = (
    "ServerLive",
    "ServerReady",
    "ServerMetadata",
    "ModelReady",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
    "ModelInfer",
    "ModelInfer",
    "ModelInfer",
    "RepositoryIndex",
    "RepositoryModelLoad",
    "SystemSharedMemoryStatus",
    "ModelStreamInfer",
    "Nothing",
)


@dataclass
class Findings:
    """What was tried, and what should not have happened."""

    tried: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)

    def add(self, what: str, case: object = "") -> None:
        """A finding, with what led to it."""
        self.found.append(f"{what}: {repr(case)[:400]}")


@dataclass(frozen=True)
class Target:
    """A running server."""

    address: str
    grpc: str
    bodies: Mapping[str, Sequence[Question]]
    """Route -> bodies that it answers."""
    tensors: Sequence[Question]


# --- mutations -------------------------------------------------------------------------------------------------------


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Each object or list in data, with a key or index of it."""
    for key in list(data) if isinstance(data, dict) else range(len(data)):
        yield data, key
        if isinstance(data[key], (dict, list)):
            yield from places(data[key])


def mutated(data: Any, dice: random.Random) -> Any:
    """JSON with a few of its values replaced, left out, repeated, renamed or moved."""
    data = json.loads(json.dumps(data))
    for _ in range(dice.choice((0, 1, 1, 2, 5))):
        found = list(places(data))
        if not found:
            return dice.choice(WEIRD)
        holder, key = dice.choice(found)
        kind = dice.randrange(7)
        if kind == 0:
            holder[key] = json.loads(json.dumps(dice.choice(WEIRD)))
        elif kind == 1:
            del holder[key]
        elif kind == 2 and isinstance(holder, dict):
            holder[dice.choice(("c", key + " ", key.upper(), "", "x" * 300))] = holder.pop(key)
        elif kind == 3:
            holder[key] = [holder[key]] * dice.choice((0, 1, 2, 100))
        elif kind == 4 and isinstance(holder[key], list):
            holder[key] = holder[key] * dice.choice((2, 50))
        elif kind == 5 and isinstance(holder, dict):
            holder.update((f"c{each}", each) for each in range(dice.choice((1, 5, 200))))
        elif kind == 6:
            other, place = dice.choice(found)
            with suppress(KeyError, IndexError):
                holder[key] = json.loads(json.dumps(other[place]))
    return data


def broken(body: bytes, dice: random.Random) -> bytes:
    """Bytes, a few of them changed, left out or added; most of the time none."""
    held = bytearray(body)
    for _ in range(dice.choice((0, 0, 0, 1, 3, 20))):
        at = dice.randrange(len(held) + 1)
        kind = dice.randrange(4)
        if kind == 0 and at < len(held):
            held[at] = dice.randrange(256)
        elif kind == 1:
            del held[at : at + dice.choice((1, 10, 1000))]
        elif kind == 2:
            held[at:at] = dice.randbytes(dice.choice((1, 10, 1000)))
        else:
            held[at:at] = held[: dice.choice((1, 10, 1000))]
    return bytes(held)


def headed(method: str, path: str, body: bytes, dice: random.Random, more: Mapping[str, str]) -> bytes:
    """A request as bytes, its head now and then wrong."""
    headers = [
        ("Host", "localhost"),
        ("Authorization", f"Bearer {TOKEN}"),
        ("Content-Type", "application/json"),
        ("Content-Length", str(len(body))),
        *more.items(),
    ]
    if dice.random() < 0.1:
        body = gzip.compress(body)[: dice.choice((None, None, -3))]
        headers = [*headers[:3], ("Content-Encoding", "gzip"), ("Content-Length", str(len(body)))]
    elif dice.random() < 0.15:
        cuts = sorted(dice.randrange(len(body) + 1) for _ in range(3))
        parts = [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts if part) + b"0\r\n\r\n"
        headers = [*headers[:3], ("Transfer-Encoding", "chunked"), *more.items()]
    if dice.random() < 0.2:
        wrong = (
            ("Host", "evil.example"),
            ("Host", ""),
            ("Origin", "http://evil"),
            ("Content-Length", "-1"),
            ("Content-Length", "1" * 30),
            ("Content-Length", "3"),
            ("Transfer-Encoding", "gzip, chunked"),
            ("Authorization", "bearer no"),
            ("Content-Type", "text/html"),
            ("Content-Encoding", "br"),
            ("Expect", "100-continue"),
            ("Upgrade", "websocket"),
            ("Connection", "Upgrade, close"),
            ("Inference-Header-Content-Length", "7"),
            ("X" * 300, "y" * 3000),
            ("X", "\x00"),
        )
        headers.append(dice.choice(wrong))
        if dice.random() < 0.3:
            del headers[dice.randrange(len(headers))]
    version = dice.choice(("HTTP/1.1",) * 20 + ("HTTP/1.0", "HTTP/2.0", "HTTP/1.1 "))
    lines = [f"{method} {path} {version}", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


# --- HTTP ------------------------------------------------------------------------------------------------------------


def statuses(address: str, parts: Sequence[bytes], *, pause: float = 0.0, half_close: bool = True) -> list[int] | None:
    """The statuses of all answers to what is sent; None where the server neither answers nor hangs up in time."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=HANG_SECONDS) as connection:
        told = b""
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            while more := connection.recv(1 << 16):
                told += more
        except TimeoutError:
            return None
        except OSError:  # closed by the server while it was still being written to
            pass
    return [int(line.split()[1]) for line in told.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


def one_request(target: Target, dice: random.Random) -> tuple[str, bytes]:
    """What is tried, and a request of it."""
    kind = dice.choice(("route",) * 6 + ("infer",) * 3 + ("binary",) * 2 + ("get",) * 2)
    if kind == "route":
        path = dice.choice(list(target.bodies))
        body = mutated(json.loads(dice.choice(target.bodies[path]).body), dice)
        return kind, headed("POST", path, broken(json.dumps(body).encode(), dice), dice, {})
    if kind == "get":
        query = dice.choice(
            ("", "?query=1&limit=5", "?limit=1000", "?query=%ff%00", "?model=clicks", "?" + "a=1&" * 99)
        )
        path = dice.choice(
            (
                "/users",
                "/items",
                "/models",
                "/metrics",
                "/",
                "/docs",
                "/openapi.json",
                "/v2",
                "/v2/",
                "/v2/models/films",
                "/v2/models/films/config",
                "/v2/models/stats",
                "/v2/health/ready",
                "/v2/models/films/versions/1",
                "/v2/models/%2e%2e/x",
                "/" + "a" * 2000,
                "*",
                "//",
                "/v2#x",
            )
        )
        return kind, headed(dice.choice(("GET",) * 8 + ("HEAD", "POST", "BREW")), path + query, b"", dice, {})
    question = dice.choice(target.tensors)
    if kind == "binary":
        return kind, headed("POST", "/v2/models/films/infer", broken(question.body, dice), dice, question.headers)
    inputs = [
        {"name": name, "datatype": array.dtype.name.upper(), "shape": list(array.shape), "data": array.tolist()}
        for name, array in question.arrays.items()
    ]
    body = {"id": "x", "inputs": inputs, "outputs": [{"name": "logit"}], "parameters": {"timeout": 0}}
    model = dice.choice(("films", "films", "films_raw", "clicks", "spare"))
    raw = broken(json.dumps(mutated(body, dice)).encode(), dice)
    return kind, headed("POST", f"/v2/models/{model}/infer", raw, dice, {})


def over_http(target: Target, dice: random.Random, findings: Findings) -> None:
    """One case on a connection of its own."""
    kind, said = one_request(target, dice)
    parts, pause, way = [said], 0.0, dice.randrange(12)
    if way == 0:
        kind, parts = "pipelined", [said + one_request(target, dice)[1] for _ in range(3)]
    elif way == 1:
        cuts = sorted(dice.randrange(len(said) + 1) for _ in range(4))
        kind, pause = "slow", 0.02
        parts = [said[start:end] for start, end in zip([0, *cuts], [*cuts, len(said)], strict=True)]
    elif way == 2:
        kind, parts = "cut off", [said[: dice.randrange(len(said) + 1)]]
    elif way == 3:
        kind, parts = "hostile", [dice.choice(list(hostile_requests().values()))]
    elif way == 4:
        kind, parts = "random bytes", [dice.randbytes(dice.choice((1, 100, 100_000)))]
    elif way == 5 and dice.random() < 0.1:
        size = BODY_MB * 2**20 + dice.choice((-1, 1, 2**20))
        body = b'{"rows":[' + b"{}," * (size // 3 - 5) + b"{}]}"
        kind, parts = "oversized", [headed("POST", "/predict", body, dice, {})]
    elif way == 6 and dice.random() < 0.2:
        findings.tried["never read"] += 1
        _never_read(target, dice)
        return
    findings.tried[kind] += 1
    found = statuses(target.address, parts, pause=pause)
    if found is None:
        findings.add(f"{kind}: no answer, and the connection stays open", parts)
        return
    for status in found or [0]:
        findings.answers[str(status) if status else "closed"] += 1
        if status >= 500 and status not in REFUSED:
            findings.add(f"{kind}: status {status}", parts)


def _never_read(target: Target, dice: random.Random) -> None:
    host, _, port = target.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection, suppress(OSError):
        path = dice.choice(("/openapi.json", "/metrics", "/models"))
        connection.sendall(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode() * 500
        )
        time.sleep(dice.random())


def answered(target: Target, dice: random.Random, findings: Findings) -> None:
    """A body of a JSON route that is mutated, and if it is answered, answered in the form of what was asked."""
    path = dice.choice(list(target.bodies))
    body = mutated(json.loads(dice.choice(target.bodies[path]).body), dice)
    findings.tried[f"mutated {path}"] += 1
    connection = http.client.HTTPConnection(target.address, timeout=HANG_SECONDS)
    try:
        connection.request("POST", path, json.dumps(body).encode(), {**JSON, **BEARER})
        answer = connection.getresponse()
        data = json.loads(answer.read())
    except (OSError, ValueError) as error:
        findings.add(f"{path}: no answer in JSON ({type(error).__name__}: {error})", body)
        return
    finally:
        connection.close()
    findings.answers[str(answer.status)] += 1
    if answer.status >= 500 and answer.status not in REFUSED:
        findings.add(f"{path}: status {answer.status}: {data}", body)
    if answer.status != 200:
        if set(data) != {"error"}:
            findings.add(f"{path}: a refusal of the wrong form: {data}", body)
        return
    if path == "/predict":
        fits = len(data["probabilities"]) == len(body["rows"]) and all(0 <= each <= 1 for each in data["probabilities"])
    elif path == "/rank":
        most = body.get("top_k") or len(body["candidates"])
        scores = [each["score"] for each in data["items"]]
        fits = len(scores) == min(most, len(body["candidates"])) and scores == sorted(scores, reverse=True)
    else:
        fits = len(data["items"]) <= body.get("k", 10)
    if not fits:
        findings.add(f"{path}: an answer of the wrong form: {str(data)[:200]}", body)


# --- gRPC ------------------------------------------------------------------------------------------------------------


class Calls:
    """Random calls on a few channels."""

    def __init__(self, target: Target) -> None:
        import grpc
        from tritonclient.grpc import service_pb2

        self._grpc, self._messages, self._target = grpc, service_pb2, target
        sizes = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self._channels = [grpc.insecure_channel(target.grpc, [*sizes, ("number", number)]) for number in range(3)]

    def __call__(self, _: Target, dice: random.Random, findings: Findings) -> None:
        """One call."""
        name = dice.choice(METHODS)
        message, more = self._message(name, dice), dict[str, Any]()
        if dice.random() < 0.1:
            more["compression"] = self._grpc.Compression.Gzip
        metadata = () if dice.random() < 0.05 else tuple(BEARER.items())
        seconds = dice.choice((HANG_SECONDS,) * 8 + (0.001, 0.01))
        findings.tried[f"gRPC {name}"] += 1
        channel = dice.choice(self._channels)
        service = "inference.GRPCInferenceService" if dice.random() < 0.98 else "grpc.health.v1.Health"
        began = time.monotonic()
        call = channel.unary_unary(f"/{service}/{name}").future(message, timeout=seconds, metadata=metadata, **more)
        if dice.random() < 0.05:
            time.sleep(0.002 * dice.random())
            call.cancel()
        code = call.code().name
        findings.answers[code] += 1
        late = code == "DEADLINE_EXCEEDED" and time.monotonic() - began > HANG_SECONDS - 1
        if code in ("INTERNAL", "UNKNOWN", "DATA_LOSS") or late:
            findings.add(f"gRPC {name}: {code}: {call.details()}", message)

    def _message(self, name: str, dice: random.Random) -> bytes:
        if name != "ModelInfer":
            kind = getattr(self._messages, f"{name}Request", self._messages.ModelReadyRequest)
            message = kind()
            for each in message.DESCRIPTOR.fields:
                if each.type == each.TYPE_STRING and dice.random() < 0.7:
                    setattr(message, each.name, dice.choice(("films", "films_raw", "x", "", "1", "ü" * 50)))
            return broken(message.SerializeToString(), dice)
        message = self._messages.ModelInferRequest(model_name=dice.choice(("films",) * 5 + ("clicks", "spare", "x")))
        for key, array in dice.choice(self._target.tensors).arrays.items():
            shape = list(array.shape) if dice.random() < 0.9 else [dice.choice((-1, 0, 2**40, 3)) for _ in range(3)]
            kind = dice.choice((array.dtype.name.upper(),) * 9 + ("FP64", "BYTES", "BF16"))
            tensor = message.inputs.add(name=key if dice.random() < 0.95 else "x", datatype=kind, shape=shape)
            if dice.random() < 0.03:
                tensor.parameters["shared_memory_region"].string_param = "x"
            if dice.random() < 0.5:
                message.raw_input_contents.append(array.tobytes())
            else:
                field = "int64_contents" if array.dtype.name == "int64" else "int_contents"
                getattr(tensor.contents, field).extend(array.ravel().tolist())
        if dice.random() < 0.05:
            message.raw_input_contents.append(b"x" * dice.choice((0, 10**6, BODY_MB * 2**20 + 1)))
        if dice.random() < 0.1:
            message.parameters["timeout"].int64_param = dice.choice((0, 1, -1, 10**6))
        return broken(message.SerializeToString(), dice)


# --- state -----------------------------------------------------------------------------------------------------------


class State:
    """Unloads and loads a model that nobody else controls, and asks it in between; loads another anew."""

    def __init__(self) -> None:
        self._loaded = True

    def __call__(self, target: Target, dice: random.Random, findings: Findings) -> None:
        """One step."""
        kind = dice.choice(("load", "unload", "ask", "ask", "anew", "index", "unknown"))
        findings.tried[f"state: {kind}"] += 1
        if kind in ("load", "unload"):
            self._expect(target, findings, f"/v2/repository/models/spare/{kind}", 200)
            self._loaded = kind == "load"
        elif kind == "ask":
            self._expect(target, findings, "/v2/models/spare/infer", 400 if self._loaded else 503)
        elif kind == "anew":
            self._expect(target, findings, "/v2/repository/models/films/load", 200)
        elif kind == "index":
            self._expect(target, findings, "/v2/repository/index", 200)
        else:
            self._expect(target, findings, "/v2/repository/models/none/load", 404)
        time.sleep(0.05)

    @staticmethod
    def _expect(target: Target, findings: Findings, path: str, status: int) -> None:
        connection = http.client.HTTPConnection(target.address, timeout=HANG_SECONDS)
        try:
            connection.request("POST", path, b'{"inputs": []}', {**JSON, **BEARER})
            found = connection.getresponse()
            told = found.read()
            findings.answers[str(found.status)] += 1
            if found.status != status:
                findings.add(f"{path}: status {found.status}, expected {status}", told)
        except OSError as error:
            findings.add(f"{path}: {type(error).__name__}: {error}")
        finally:
            connection.close()


# --- the run ---------------------------------------------------------------------------------------------------------

Case = Callable[[Target, random.Random, Findings], None]


def repeat(case: Case, target: Target, seed: str, stop: threading.Event, findings: Findings) -> None:
    """Try a kind of case until told to stop."""
    dice = random.Random(seed)
    while not stop.is_set():
        try:
            case(target, dice, findings)
        except ConnectionError:
            findings.answers["no connection"] += 1
            time.sleep(0.05)
        except Exception as error:
            findings.add(f"the fuzzer itself: {type(error).__name__}: {error}")


def fuzz(minutes: float, seed: int, folder: Path) -> dict[str, Any]:
    """Figures and findings."""
    models = make_models(folder)
    predictors = {name: Predictor.open(path, device="cpu") for name, path in models.items()}
    # "films" is never replaced by another model here, so each question has one answer
    questions = questions_of({**predictors, "second": predictors["first"]})
    served = {"films": models["first"], "spare": models["second"], "clicks": models["clicks"]}
    log, findings, sizes = folder / "server.log", Findings(), list[int]()
    with serving(served, log, "--max-rows", "20000") as (process, told):
        address, over = told["http"].removeprefix("http://"), told["grpc"]
        bodies = {f"/{name}": questions[name] for name in ("recommend", "rank", "predict")}
        target = Target(address, over, bodies, questions["tensors"])
        clients = [
            Client("JSON /recommend", Http(address, "/recommend", recommended), questions["recommend"]),
            Client("JSON /rank", Http(address, "/rank", ranked), questions["rank"]),
            Client("JSON /predict", Http(address, "/predict", predicted), questions["predict"]),
            Client("binary tensors", Http(address, "/v2/models/films/infer", binary), questions["tensors"]),
            Client("gRPC", Grpc(over, "films"), questions["tensors"]),
        ]
        stop, none = threading.Event(), threading.Event()
        cases: list[Case] = [over_http, over_http, answered, Calls(target), State()]
        threads = [threading.Thread(target=each.run, args=(stop, none)) for each in clients]
        threads += [
            threading.Thread(target=repeat, args=(each, target, f"{seed}/{number}", stop, findings))
            for number, each in enumerate(cases)
        ]
        for thread in threads:
            thread.start()
        ends = time.monotonic() + 60 * minutes
        while time.monotonic() < ends:
            time.sleep(min(2.0, max(0.0, ends - time.monotonic())))
            try:
                sizes.append(memory(process))
            except (OSError, SystemExit):
                findings.add("the server's process ended")
                break
        stop.set()
        for thread in threads:
            thread.join(2 * HANG_SECONDS)
            if thread.is_alive():
                findings.add(f"a client still waits {2 * HANG_SECONDS:g} s after the end")
    return _figures(findings, clients, sizes, log.read_text(errors="replace"), minutes, seed)


def _figures(
    findings: Findings, clients: Sequence[Client], sizes: Sequence[int], log: str, minutes: float, seed: int
) -> dict[str, Any]:
    for client in clients:
        findings.found += [f"correct client, {client.kind}: {problem}" for problem in client.problems]
    if "Traceback" in log:
        findings.found.append("a traceback in the server's log: " + log[max(0, log.index("Traceback") - 200) :][:6000])
    quarter = len(sizes) // 4
    early, late = (statistics.median(part) if part else 0 for part in (sizes[quarter : 2 * quarter], sizes[-quarter:]))
    if quarter and late > (1 + GROWTH) * early:
        findings.add(f"memory grew from {early / 2**20:.0f} to {late / 2**20:.0f} MiB")
    step = max(1, len(sizes) // 12)
    return {
        "minutes": minutes,
        "seed": seed,
        "cases": findings.tried.total(),
        "tried": dict(findings.tried.most_common()),
        "answers": dict(findings.answers.most_common()),
        "correct_answers": {each.kind: len(each.times) for each in clients},
        "rss_mib": [round(size / 2**20) for size in sizes[::step]],
        "findings": len(findings.found),
        "found": findings.found[:50],
    }


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            figures = fuzz(given.minutes, given.seed, Path(folder))
        except SystemExit as error:  # the server did not end, or not well
            print((Path(folder) / "server.log").read_text(errors="replace")[-3000:], file=sys.stderr)
            raise SystemExit(f"finding: {error}") from None
    print(json.dumps(figures, indent=2, ensure_ascii=False))
    if given.out is not None:
        given.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if figures["findings"] else 0)


if __name__ == "__main__":
    main()
