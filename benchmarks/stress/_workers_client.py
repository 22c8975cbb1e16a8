"""Clients of `benchmarks/stress/serve_workers.py`, in a process of their own and without torch.

python -m benchmarks._workers_client http http://127.0.0.1:8000 4 64 3.0
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from urllib.parse import urlsplit

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

PATH = "/v2/models/m/infer"


def question(rows: int) -> tuple[bytes, dict[str, str]]:
    """A request's body and headers: ids of user and item as binary tensors."""
    numbers = np.random.default_rng()
    names = {"user_id": 100_000, "item_id": 10_000}
    parts = [numbers.integers(0, most, (rows, 1)).astype(np.int32).tobytes() for most in names.values()]
    head = json.dumps(
        {
            "inputs": [
                {"name": name, "datatype": "INT32", "shape": [rows, 1], "parameters": {"binary_data_size": len(part)}}
                for name, part in zip(names, parts, strict=True)
            ],
            "outputs": [{"name": "probability", "parameters": {"binary_data": True}}],
        }
    ).encode()
    return b"".join([head, *parts]), {"inference-header-content-length": str(len(head))}


def ask_for(address: str, rows: int, connection: http.client.HTTPConnection | None = None) -> None:
    """One request, on a connection of its own by default."""
    own = connection or http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    body, headers = question(rows)
    own.request("POST", PATH, body, headers)
    answer = own.getresponse()
    said = answer.read()
    if answer.status != 200:
        raise SystemExit(said.decode(errors="replace"))
    if connection is None:
        own.close()


def over_http(address: str, rows: int, until: float, times: list[float]) -> None:
    """Ask over one connection, again and again."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    while time.perf_counter() < until:
        began = time.perf_counter()
        ask_for(address, rows, connection)
        times.append(time.perf_counter() - began)


def over_grpc(address: str, rows: int, until: float, times: list[float]) -> None:
    """Ask over one channel with a connection of its own, again and again."""
    numbers = np.random.default_rng()
    channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    while time.perf_counter() < until:
        request = service_pb2.ModelInferRequest(model_name="m")
        for name, most in {"user_id": 100_000, "item_id": 10_000}.items():
            request.inputs.add(name=name, datatype="INT32", shape=[rows, 1])
            request.raw_input_contents.append(numbers.integers(0, most, (rows, 1)).astype(np.int32).tobytes())
        request.outputs.add(name="probability")
        began = time.perf_counter()
        stub.ModelInfer(request, timeout=60)
        times.append(time.perf_counter() - began)


def main() -> None:
    """Ask, and print the figures as JSON."""
    protocol, address, connections, rows, seconds = sys.argv[1:]
    ask = over_http if protocol == "http" else over_grpc
    lists: list[list[float]] = [[] for _ in range(int(connections))]
    began = time.perf_counter()
    until = began + float(seconds)
    threads = [threading.Thread(target=ask, args=(address, int(rows), until, times)) for times in lists]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    took = time.perf_counter() - began
    times = np.sort(np.concatenate([np.array(each) for each in lists]))
    p50, p99 = (float(1000 * np.quantile(times, share)) for share in (0.5, 0.99))
    print(
        json.dumps(
            {
                "answers": len(times),
                "per_second": round(len(times) / took, 1),
                "p50_ms": round(p50, 3),
                "p99_ms": round(p99, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
