"""Clients of `serve_throughput.py`: one process and one thread for all connections, which sends bytes that lie ready.

    python benchmarks/stress/_throughput_client.py http 127.0.0.1 8000 wide_deep requests.npz '{"seconds": 1, ...}'

Each connection asks again as soon as it has its answer. HTTP/1.1 and gRPC are spoken over plain sockets. A request over
gRPC is an HTTP/2 stream: one HEADERS frame, which differs only in its number, and DATA frames within the server's
window. Official clients in Python take longer for a request than the servers do, so they would measure themselves.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

DATATYPES = {"int32": "INT32", "int64": "INT64", "float32": "FP32"}
"""numpy's names -> the protocol's."""
OUTPUT = "probability"


class Connection(Protocol):
    """One connection, with at most one request under way."""

    socket: socket.socket

    def send(self, request: bytes) -> None:
        """Ask."""

    def receive(self) -> bytes | None:
        """Read what has come: the answer's body when it is whole, else None."""


class Http:
    """A connection that speaks HTTP/1.1 and stays open."""

    def __init__(self, host: str, port: int) -> None:
        self.socket = _connected(host, port)
        self._read = b""

    def send(self, request: bytes) -> None:
        """Ask; a request fits into the socket's buffer."""
        self.socket.sendall(request)

    def receive(self) -> bytes | None:
        """See `Connection`; an answer other than 200 ends the measurement."""
        self._read += _some(self.socket)
        end = self._read.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = self._read[:end].lower()
        _, _, length = head.partition(b"\r\ncontent-length: ")
        whole = end + 4 + int(length.partition(b"\r\n")[0])
        if len(self._read) < whole:
            return None
        if not head.startswith(b"http/1.1 200"):
            raise SystemExit(self._read[:400].decode(errors="replace"))
        answer, self._read = self._read[:whole], self._read[whole:]
        return answer


DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
MOST = 16_384
"""Largest payload of a frame."""
WINDOW = 65_535
"""Bytes that may be sent before the other side says more."""


class Grpc:
    """A connection that speaks as much HTTP/2 as a unary call of gRPC needs."""

    def __init__(self, host: str, port: int) -> None:
        self.socket = _connected(host, port)
        self._read, self._body, self._stream = b"", b"", -1
        self._left, self._window, self._first, self._of_stream = b"", WINDOW, WINDOW, 0
        settings = struct.pack(">HI", 4, 2**31 - 1)  # the window of a stream
        wide = struct.pack(">I", 2**31 - 1 - WINDOW)
        head = _fields(
            {
                ":method": "POST",
                ":scheme": "http",
                ":path": "/inference.GRPCInferenceService/ModelInfer",
                ":authority": f"{host}:{port}",
                "te": "trailers",
                "content-type": "application/grpc",
            }
        )
        self._head = head
        start = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0, settings)
        self.socket.sendall(start + _frame(WINDOW_UPDATE, 0, 0, wide))

    def send(self, request: bytes) -> None:
        """Open the next stream."""
        self._stream += 2
        self._left, self._of_stream, self._body = request, self._first, b""
        self._push(_frame(HEADERS, END_HEADERS, self._stream, self._head))

    def _push(self, before: bytes = b"") -> None:
        """Send as much of the request as the server takes now."""
        out = [before]
        while self._left and (size := min(MOST, self._window, self._of_stream, len(self._left))) > 0:
            part, self._left = self._left[:size], self._left[size:]
            out.append(_frame(DATA, 0 if self._left else END_STREAM, self._stream, part))
            self._window -= size
            self._of_stream -= size
        if any(out):
            self.socket.sendall(b"".join(out))

    def receive(self) -> bytes | None:
        """See `Connection`; a call that fails ends the measurement."""
        self._read += _some(self.socket)
        at, found, answer = 0, self._read, None
        while len(found) - at >= 9:
            end = at + 9 + int.from_bytes(found[at : at + 3], "big")
            if end > len(found):
                break
            kind, flags, stream = found[at + 3], found[at + 4], int.from_bytes(found[at + 5 : at + 9], "big")
            if self._take(kind, flags, stream, found[at + 9 : end]):
                answer = self._body
            at = end
        self._read = found[at:]
        return answer

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> bool:
        """One frame; tells whether it ends the answer."""
        if kind == DATA:
            self._body += payload
        elif kind == HEADERS and flags & END_STREAM:
            if stream != self._stream or len(self._body) < 5:
                raise SystemExit(f"the call failed: {payload!r}")
            return True
        elif kind == SETTINGS and not flags & ACK:
            for number, value in struct.iter_unpack(">HI", payload):
                if number == 4:
                    self._of_stream += value - self._first
                    self._first = value
            self.socket.sendall(_frame(SETTINGS, ACK, 0, b""))
            self._push()
        elif kind == PING and not flags & ACK:
            self.socket.sendall(_frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            (more,) = struct.unpack(">I", payload)
            if stream == 0:
                self._window += more
            elif stream == self._stream:
                self._of_stream += more
            self._push()
        elif kind in (RST_STREAM, GOAWAY):
            raise SystemExit(f"the server ended a stream or the connection: {payload!r}")
        return False


def _connected(host: str, port: int) -> socket.socket:
    made = socket.create_connection((host, port), timeout=30)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    return made


def _some(source: socket.socket) -> bytes:
    read = source.recv(1 << 18)
    if not read:
        raise SystemExit("the server closed a connection")
    return read


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _fields(headers: dict[str, str]) -> bytes:
    """HPACK without its tables: each name and value to the letter."""
    parts = [(name.encode(), value.encode()) for name, value in headers.items()]
    return b"".join(b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in parts)


# --- requests and answers --------------------------------------------------------------------------------------------


def http_request(host: str, port: int, model: str, inputs: Arrays) -> bytes:
    """A request over HTTP with binary tensors, which asks for the probabilities in binary."""
    parts = [array.tobytes() for array in inputs.values()]
    tensors = [
        {
            "name": name,
            "shape": array.shape,
            "datatype": DATATYPES[array.dtype.name],
            "parameters": {"binary_data_size": len(part)},
        }
        for (name, array), part in zip(inputs.items(), parts, strict=True)
    ]
    head = {"inputs": tensors, "outputs": [{"name": OUTPUT, "parameters": {"binary_data": True}}]}
    text = json.dumps(head, separators=(",", ":")).encode()
    lines = [
        f"POST /v2/models/{model}/infer HTTP/1.1",
        f"Host: {host}:{port}",
        "Content-Type: application/octet-stream",
        f"Inference-Header-Content-Length: {len(text)}",
        f"Content-Length: {len(text) + sum(map(len, parts))}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + b"".join([text, *parts])


def grpc_request(_: str, __: int, model: str, inputs: Arrays) -> bytes:
    """A request over gRPC with raw contents: a message after its length."""
    from tritonclient.grpc import service_pb2 as messages

    request = messages.ModelInferRequest(model_name=model)
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype=DATATYPES[array.dtype.name], shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    request.outputs.add(name=OUTPUT)
    message: bytes = request.SerializeToString()
    return b"\x00" + struct.pack(">I", len(message)) + message


def http_answer(answer: bytes) -> NDArray[np.float32]:
    """The probabilities, which are the last bytes."""
    head, _, body = answer.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"inference-header-content-length: ")[2].partition(b"\r\n")[0])
    assert json.loads(body[:length])["outputs"][0]["name"] == OUTPUT
    return np.frombuffer(body[length:], np.float32)


def grpc_answer(answer: bytes) -> NDArray[np.float32]:
    """The probabilities of a message after its length."""
    from tritonclient.grpc import service_pb2 as messages

    found = messages.ModelInferResponse.FromString(answer[5:])
    assert [each.name for each in found.outputs] == [OUTPUT]
    return np.frombuffer(found.raw_output_contents[0], np.float32)


SPOKEN: dict[str, tuple[Callable[[str, int], Connection], Any, Any]] = {
    "http": (Http, http_request, http_answer),
    "grpc": (Grpc, grpc_request, grpc_answer),
}
"""Protocol -> its connection, its requests and its answers."""


# --- the measurement -------------------------------------------------------------------------------------------------


def load(connections: Sequence[Connection], requests: Sequence[bytes], warmup: float, seconds: float) -> dict[str, Any]:
    """Answers a second and percentiles of requests that begin after the warm-up, in a closed loop."""
    polled = select.epoll()
    places = {each.socket.fileno(): place for place, each in enumerate(connections)}
    for number in places:
        polled.register(number, select.EPOLLIN)
    begun, times, clock = [0.0] * len(connections), list[float](), time.perf_counter
    first, after = clock() + warmup, 0.0
    last, busy = first + seconds, time.process_time()
    for place, each in enumerate(connections):
        begun[place] = clock()
        each.send(requests[place % len(requests)])
    waiting = asked = len(connections)
    while waiting:
        for number, _ in polled.poll():
            place = places[number]
            if connections[place].receive() is None:
                continue
            now = clock()
            if begun[place] >= first:
                times.append(now - begun[place])
            waiting -= 1
            if now < last:
                asked += 1
                begun[place] = clock()
                connections[place].send(requests[asked % len(requests)])
                waiting += 1
            after = now
    busy = time.process_time() - busy
    p50, p99 = (float(1000 * np.quantile(times, share)) for share in (0.5, 0.99))
    return {
        "clients": len(connections),
        "asked": asked,
        "answers": len(times),
        "per_second": round(len(times) / (after - first), 1),
        "p50_ms": round(p50, 3),
        "p99_ms": round(p99, 3),
        "client_busy": round(busy / (after - first + warmup), 2),
    }


def differs(connection: Connection, requests: Sequence[bytes], expected: Sequence[Any], read: Any) -> float:
    """The largest difference of the answers from what is expected."""
    worst = 0.0
    for request, wanted in zip(requests, expected, strict=True):
        connection.send(request)
        while (answer := connection.receive()) is None:
            pass
        worst = max(worst, float(np.abs(read(answer) - wanted).max()))
    return worst


def main() -> None:
    """Ask one model in requests of one size, with more and more clients, and print the figures as JSON."""
    protocol, host, port, model, file, given = sys.argv[1:]
    told = json.loads(given)
    connect, make, read = SPOKEN[protocol]
    with np.load(Path(file)) as stored:
        arrays = {name: stored[name] for name in stored.files}
    expected, rows = arrays.pop(""), told["rows"]
    starts = range(0, rows * told["requests"], rows)
    parts = [{name: array[start : start + rows] for name, array in arrays.items()} for start in starts]
    requests = [make(host, int(port), model, part) for part in parts]
    wanted = [expected[start : start + rows] for start in starts]
    found: dict[str, Any] = {"difference": differs(connect(host, int(port)), requests, wanted, read), "load": []}
    too_slow, found["asked"] = 0, len(requests)
    for clients in told["clients"]:
        connections = [connect(host, int(port)) for _ in range(clients)]
        found["load"].append(load(connections, requests, told["warmup"], told["seconds"]))
        found["asked"] += found["load"][-1].pop("asked")
        for each in connections:
            each.socket.close()
        too_slow += found["load"][-1]["p99_ms"] > told["goal_ms"]
        if too_slow == 2:  # more clients wait longer
            break
    print(json.dumps(found))


if __name__ == "__main__":
    main()
