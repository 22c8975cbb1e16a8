"""`recspec serve` under load: good clients, one that wishes it ill, and a model replaced in the middle.

    python benchmarks/stress/serve_load.py
    python benchmarks/stress/serve_load.py --seconds 60 --out benchmarks/results/serve_load.json

From nothing: trains two NeuMF models of one made-up dataset and a Wide & Deep, starts the server as a user would, and
asks from threads, each again as soon as it has its answer: JSON (`/recommend`, `/rank`, `/predict`), binary tensors
over HTTP, tensors over gRPC. Every answer is compared with the bundle's own. Half way the first NeuMF's folder is
replaced by the second's and loaded: until then answers are the first's, from then on the second's, and none is missing.
Beside them a client sends what is malformed, oversized, cut off or hostile, and must never get a 5xx. The server's
memory (RSS) is read at the start (after two seconds), in the middle and at the end.

Prints a table and, with --out, writes JSON. Exit status 1 where anything of this does not hold.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recspec.base import latency, machine
from recspec.bench.load_test import infer_body
from recspec.data.prepare import PrepareContext
from recspec.datasets import DATASETS
from recspec.feature_spec import FeatureSpec
from recspec.inference import requests as answers
from recspec.inference.predictor import Predictor
from recspec.inference.recommendation import RecommendRequest
from recspec.models import MODELS
from recspec.training.loop import train
from recspec.training.settings import TrainSettings

TOLERANCE = 1e-5
GROWTH = 0.10
"""Of the server's memory from start to end."""
BODY_MB = 4
USERS, ROWS, K = 64, 32, 10

TOKEN = "made-up-for-this-run"
BEARER = {"authorization": f"Bearer {TOKEN}"}

Arrays = dict[str, NDArray[Any]]


# --- models and the server -------------------------------------------------------------------------------------------


def make_models(folder: Path) -> dict[str, Path]:
    """Two models of interactions that differ, and one of clicks."""
    synthetic = DATASETS["synthetic"]
    sizes = {
        "interactions": {"num_users": 2000, "num_items": 1000, "num_rows": 40_000, "num_negatives": 20},
        "clicks": {"num_users": 2000, "num_items": 1000, "num_rows": 20_000},
    }
    specs = {}
    for kind, chosen in sizes.items():
        synthetic.prepare(
            PrepareContext(Path(), folder / kind), synthetic.Settings.model_validate({"kind": kind, **chosen})
        )
        specs[kind] = FeatureSpec.load(folder / kind)
    small: dict[str, tuple[str, str, dict[str, Any], int]] = {
        "first": ("neumf", "interactions", {"factors": 16, "layers": (64, 32, 16)}, 0),
        "second": ("neumf", "interactions", {"factors": 16, "layers": (64, 32, 16)}, 1),
        "clicks": ("wide_deep", "clicks", {"hidden": (128, 64)}, 0),
    }
    for name, (model, data, settings, seed) in small.items():
        how = TrainSettings(epochs=2, batch_size=2048, learning_rate=0.01, tensorboard=False, seed=seed)
        train(
            model,
            specs[data],
            folder / name,
            settings=how,
            model_settings=MODELS[model].Settings.model_validate(settings),
        )
    return {name: folder / name / "bundle" for name in small}


@contextmanager
def serving(models: Mapping[str, Path], log: Path, *more: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The server as a process of its own: its id and its addresses."""
    command = [
        sys.executable,
        "-m",
        "recspec",
        "serve",
        *(f"{name}={path}" for name, path in models.items()),
        "--json",
        "--http-port",
        "0",
        "--grpc-port",
        "0",
        "--threads",
        "1",
        "--watch",
        "0",
        "--max-body-mb",
        str(BODY_MB),
        "--timeout",
        "20",
        "--control",
        *more,
    ]
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "env": {**os.environ, "RECSPEC_TOKEN": TOKEN}}
    with log.open("w") as errors, subprocess.Popen(command, stderr=errors, **given) as served:
        assert served.stdout is not None
        try:
            told = "".join(iter(served.stdout.readline, "}\n")) + "}"
            yield served.pid, json.loads(told)
            served.send_signal(signal.SIGTERM)
            if served.wait(60):
                raise SystemExit(f"the server ended with status {served.returncode}; see {log}")
        finally:
            served.kill()


def replace(live: Path, new: Path) -> None:
    """Put another bundle in the place of one, by renames."""
    beside, old = live.with_name("beside"), live.with_name("old")
    shutil.copytree(new, beside)
    live.rename(old)
    beside.rename(live)
    shutil.rmtree(old)


def memory(process: int) -> int:
    """Bytes of a process that are in memory."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    raise SystemExit("no VmRSS in /proc")


# --- good clients ----------------------------------------------------------------------------------------------------


@dataclass
class Question:
    """What is asked again and again, and what may be answered: one list of numbers a model."""

    body: bytes
    headers: dict[str, str]
    expected: tuple[NDArray[np.float64], ...]
    arrays: Arrays = field(default_factory=dict)


@dataclass
class Client:
    """Asks in a thread until it is told to stop."""

    kind: str
    ask: Callable[[Question], NDArray[np.float64]]
    questions: Sequence[Question]
    times: list[float] = field(default_factory=list)
    by_model: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def run(self, stop: threading.Event, replaced: threading.Event) -> None:
        """Ask and compare."""
        for question in itertools.cycle(self.questions):
            if stop.is_set():
                return
            after, began = replaced.is_set(), time.perf_counter()
            try:
                found = self.ask(question)
            except Exception as error:
                self.problems.append(f"no answer: {type(error).__name__}: {error}"[:300])
                time.sleep(0.01)
                continue
            self.times.append(time.perf_counter() - began)
            fits = [place for place, numbers in enumerate(question.expected) if _same(found, numbers)]
            self.by_model[fits[0] if fits else -1] += 1
            if not fits or (after and fits[-1] != len(question.expected) - 1):
                self.problems.append(f"wrong answer: {found[:4]}{' of the model before' if fits else ''}")


def _same(found: NDArray[np.float64], expected: NDArray[np.float64]) -> bool:
    return found.shape == expected.shape and bool(np.allclose(found, expected, rtol=0, atol=TOLERANCE))


class Http:
    """One connection that stays open."""

    def __init__(
        self, address: str, path: str, read: Callable[[bytes, Mapping[str, str]], NDArray[np.float64]]
    ) -> None:
        self._connection, self._path, self._read = http.client.HTTPConnection(address, timeout=30), path, read

    def __call__(self, question: Question) -> NDArray[np.float64]:
        """Numbers of an answer."""
        self._connection.request("POST", self._path, question.body, {**question.headers, **BEARER})
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {body[:200]!r}")
        return self._read(body, {name.lower(): value for name, value in answer.getheaders()})


class Grpc:
    """One channel."""

    def __init__(self, address: str, model: str) -> None:
        import tritonclient.grpc as triton

        self._triton, self._model = triton, model
        self._client = triton.InferenceServerClient(address)

    def __call__(self, question: Question) -> NDArray[np.float64]:
        """Sigmoids of the logits."""
        inputs = []
        for name, array in question.arrays.items():
            tensor = self._triton.InferInput(name, list(array.shape), DATATYPES[array.dtype.name])
            inputs.append(tensor.set_data_from_numpy(array))
        found = self._client.infer(self._model, inputs, client_timeout=30, headers=BEARER).as_numpy("sigmoid")
        return np.asarray(found[:, 0], np.float64)


DATATYPES = {"int32": "INT32", "int64": "INT64", "float32": "FP32"}


def recommended(body: bytes, _: Mapping[str, str]) -> NDArray[np.float64]:
    """Items and scores, in turn."""
    return np.array([number for each in json.loads(body)["items"] for number in (int(each["item"]), each["score"])])


def ranked(body: bytes, _: Mapping[str, str]) -> NDArray[np.float64]:
    """Places in the request and scores, in turn."""
    return np.array([number for each in json.loads(body)["items"] for number in (each["index"], each["score"])])


def predicted(body: bytes, _: Mapping[str, str]) -> NDArray[np.float64]:
    """Probabilities."""
    return np.array(json.loads(body)["probabilities"])


def binary(body: bytes, headers: Mapping[str, str]) -> NDArray[np.float64]:
    """Probabilities, which are the first output."""
    length = int(headers["inference-header-content-length"])
    size = json.loads(body[:length])["outputs"][0]["parameters"]["binary_data_size"]
    return np.frombuffer(body[length : length + size], "<f4").astype(np.float64)


JSON = {"content-type": "application/json"}


def questions_of(predictors: Mapping[str, Predictor]) -> dict[str, list[Question]]:
    """What each kind of client asks."""
    pair = (predictors["first"], predictors["second"])
    numbers = np.random.default_rng(0)
    users = pair[0].raw_ids("user", numbers.integers(1, 1900, USERS)).to_pylist()
    items = pair[0].raw_ids("item", numbers.integers(1, 900, ROWS)).to_pylist()

    def ask(body: object, *expected: Sequence[float]) -> Question:
        return Question(json.dumps(body).encode(), JSON, tuple(np.array(each, np.float64) for each in expected))

    recommend = [
        ask(
            {"model": "films", "user": user, "k": K},
            *(
                [
                    number
                    for each in answers.recommend(one, RecommendRequest(users=(user,), k=K))["items"]
                    for number in (int(each["item"]), each["score"])
                ]
                for one in pair
            ),
        )
        for user in users
    ]
    rank = [
        ask(
            {"model": "films", "user": user, "candidates": items, "top_k": K},
            *(
                [
                    number
                    for each in answers.rank(one, {one.spec.user_id: user}, items, top_k=K).items
                    for number in (float(each.index), each.score)
                ]
                for one in pair
            ),
        )
        for user in users
    ]
    clicks = predictors["clicks"]
    predict = []
    for _ in range(16):
        rows = [raw_row(clicks, numbers) for _ in range(ROWS)]
        predict.append(ask({"model": "clicks", "rows": rows}, answers.predict(clicks, rows).values))
    tensors = []
    for _ in range(16):
        arrays = {
            name: numbers.integers(1, pair[0].spec.num_ids(name), (ROWS, 1)).astype(np.int64)
            for name in pair[0].model.features()
        }
        tensors.append(_tensors(pair, arrays))
    return {"recommend": recommend, "rank": rank, "predict": predict, "tensors": tensors}


def _tensors(pair: Sequence[Predictor], ids: Arrays) -> Question:
    from recspec.feature_spec.signature import signature_of

    ports = signature_of(pair[0].spec, pair[0].model.features(), "rows").inputs
    arrays = {port.name: ids[port.name].astype(port.dtype) for port in ports}
    body, length = infer_body(arrays, {name: DATATYPES[array.dtype.name] for name, array in arrays.items()})
    batch = {name: torch.from_numpy(array[:, 0]) for name, array in ids.items()}
    with torch.inference_mode():
        expected = tuple(torch.sigmoid(one.model(batch)).double().numpy() for one in pair)
    headers = {"content-type": "application/octet-stream", "inference-header-content-length": str(length)}
    return Question(body, headers, expected, arrays)


def raw_row(predictor: Predictor, numbers: np.random.Generator) -> dict[str, Any]:
    """A raw row: small whole numbers, lists of them where a feature is a list."""
    return {
        name: numbers.integers(1, 50, 2).tolist()
        if predictor.spec.features[name].is_list
        else int(numbers.integers(1, 50))
        for name in predictor.model.features()
    }


# --- one that wishes it ill ------------------------------------------------------------------------------------------


def hostile_requests() -> dict[str, bytes]:
    """What is sent as it stands, on a connection of its own."""

    def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
        size = len(body) if length is None else length
        told = [
            "POST " + path + " HTTP/1.1",
            "Host: localhost",
            f"Content-Length: {size}",
            f"Authorization: Bearer {TOKEN}",
            *headers,
        ]
        return "\r\n".join(told).encode() + b"\r\n\r\n" + body

    large = BODY_MB * 2**20
    bearing = b" HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n"
    chunked, closing = bearing + b"Transfer-Encoding: chunked\r\n\r\n", bearing + b"Connection: close\r\n\r\n"
    infer = "/v2/models/films/infer"
    head = json.dumps(
        {
            "inputs": [
                {"name": "user_id", "datatype": "INT64", "shape": [2**40, 1], "parameters": {"binary_data_size": 8}}
            ]
        }
    ).encode()
    chunk = b"%x\r\n" % 2**16 + b" " * 2**16 + b"\r\n"
    return {
        "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00" + bytes(range(256)),
        "a line without end": b"GET /" + b"a" * 200_000,
        "headers without end": b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: %s\r\n" % (n, b"a" * 900) for n in range(200)),
        "half a head": b"POST /recommend HTTP/1.1\r\nHost: localhost\r\nContent-",
        "half a body": post("/recommend", b'{"user": 1', length=1000),
        "a length that lies": post("/recommend", b'{"user": 1}', length=4),
        "a length without end": post("/predict", b"{}", length=10**30),
        "a negative length": post("/predict", b"{}", length=-1),
        "two lengths": post("/recommend", b'{"user": 1}', "Content-Length: 3"),
        "chunks and a length": post("/recommend", b"5\r\n12345\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
        "chunks that are none": b"POST /recommend" + chunked + b"zz\r\n",
        "more than is taken": post("/predict", b" " * (large + 1)),
        "more than is taken, in chunks": b"POST /predict" + chunked + chunk * (large // 2**16 + 2) + b"0\r\n\r\n",
        "packed a thousand times": post("/predict", gzip.compress(b" " * (64 << 20)), "Content-Encoding: gzip"),
        "packed badly": post("/predict", b"\x1f\x8b" + b"x" * 50, "Content-Encoding: gzip"),
        "lists in lists": post("/predict", b'{"rows":[{"a":' + b"[" * 1000 + b"]" * 1000 + b"}]}"),
        "lists in lists, deeper": post("/predict", b"[" * 100_000),
        "not a number": post("/predict", b'{"rows":[{"user_id":NaN}]}'),
        "a number of 10,000 digits": post("/recommend", b'{"user":' + b"9" * 10_000 + b"}"),
        "65 bits": post("/recommend", b'{"model":"films","user":9223372036854775808}'),
        "wrong types": post("/rank", b'{"model":"films","user":[],"candidates":{}}'),
        "another origin": post("/recommend", b'{"user":1}', "Origin: http://evil"),
        "a form": post("/recommend", b"user=1", "Content-Type: application/x-www-form-urlencoded"),
        "a path upwards": b"GET /v2/models/..%2f..%2fetc/passwd" + closing,
        "an unknown method": b"BREW /" + closing,
        "a tensor that lies": post(infer, head + b"12345678", f"Inference-Header-Content-Length: {len(head)}"),
        "a head that lies": post(infer, head, f"Inference-Header-Content-Length: {10**12}"),
        "ids out of range": post(
            infer,
            json.dumps(
                {
                    "inputs": [
                        {"name": name, "datatype": kind, "shape": [1, 1], "data": [2**31 - 1]}
                        for name in ("user_id", "item_id")
                        for kind in ("INT32", "INT64")
                    ]
                }
            ).encode(),
        ),
        "a version that is none": post("/v2/models/films/versions/999999999999999999999/infer", b"{}"),
        "a model from elsewhere": post("/v2/repository/models/..%2f..%2ftmp/load", b"{}"),
        "a load with files": post("/v2/repository/models/clicks/load", b'{"parameters":{"file:1/model.onnx":"AAAA"}}'),
    }


def send_hostile(address: str, said: bytes, *, to_grpc: bool = False) -> int | None:
    """The status of the answer; None where the connection was closed without one."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        try:
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            if to_grpc:
                return None
            told = b""
            while b"\r\n" not in told:
                more = connection.recv(4096)
                if not more:
                    break
                told += more
        except OSError:  # closed by the server, or nothing comes
            return None
    return int(told.split()[1]) if told.startswith(b"HTTP/1.1 ") else None


def wish_ill(http_address: str, grpc_address: str, stop: threading.Event, seen: Counter[str]) -> None:
    """Send everything over and over, a little after each other."""
    requests = hostile_requests()
    for name, said in itertools.cycle(requests.items()):
        if stop.is_set():
            return
        seen[f"{name}: {send_hostile(http_address, said) or 'closed'}"] += 1
        send_hostile(grpc_address, said, to_grpc=True)
        time.sleep(0.005)


# --- the run ---------------------------------------------------------------------------------------------------------


def load(seconds: float, clients: int, folder: Path) -> dict[str, Any]:
    """Figures, and problems."""
    models = make_models(folder)
    predictors = {name: Predictor.open(path, device="cpu") for name, path in models.items()}
    live = folder / "live"
    shutil.copytree(models["first"], live)
    questions = questions_of(predictors)
    for question in questions["tensors"]:
        assert not _same(*question.expected), "the two models must differ"
    with serving({"films": live, "clicks": models["clicks"]}, folder / "server.log") as (process, told):
        address, grpc_address = told["http"].removeprefix("http://"), told["grpc"]
        asked: list[Client] = []
        for _ in range(clients):
            asked += [
                Client("JSON /recommend", Http(address, "/recommend", recommended), questions["recommend"]),
                Client("JSON /rank", Http(address, "/rank", ranked), questions["rank"]),
                Client("JSON /predict", Http(address, "/predict", predicted), questions["predict"]),
                Client("binary tensors", Http(address, "/v2/models/films/infer", binary), questions["tensors"]),
                Client("gRPC", Grpc(grpc_address, "films"), questions["tensors"]),
            ]
        stop, replaced, hostile = threading.Event(), threading.Event(), Counter[str]()
        threads = [threading.Thread(target=each.run, args=(stop, replaced)) for each in asked]
        threads.append(threading.Thread(target=wish_ill, args=(address, grpc_address, stop, hostile)))
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        time.sleep(min(2.0, seconds / 4))
        sizes = {"start": memory(process)}
        time.sleep(max(0.0, began + seconds / 2 - time.perf_counter()))
        sizes["middle"] = memory(process)
        reload_seconds = _reload(address, live, models["second"])
        replaced.set()
        time.sleep(max(0.0, began + seconds - time.perf_counter()))
        sizes["end"] = memory(process)
        stop.set()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - began
    return _figures(asked, hostile, sizes, took, reload_seconds)


def _reload(address: str, live: Path, new: Path) -> float:
    replace(live, new)
    connection, began = http.client.HTTPConnection(address, timeout=30), time.perf_counter()
    connection.request("POST", "/v2/repository/models/films/load", b"{}", {**JSON, **BEARER})
    status = connection.getresponse().status
    if status != 200:
        raise SystemExit(f"the model was not loaded: status {status}")
    return time.perf_counter() - began


def _figures(
    asked: Sequence[Client], hostile: Counter[str], sizes: Mapping[str, int], took: float, reload_seconds: float
) -> dict[str, Any]:
    lines, problems = [], [f"{each.kind}: {problem}" for each in asked for problem in each.problems]
    for kind in dict.fromkeys(each.kind for each in asked):
        of_kind = [each for each in asked if each.kind == kind]
        times = [spent for each in of_kind for spent in each.times]
        by_model = sum((each.by_model for each in of_kind), Counter[int]())
        told = latency.of_times(times or [float("nan")], ROWS).to_dict()
        lines.append(
            {
                "asked": kind,
                "clients": len(of_kind),
                "answers": len(times),
                "wrong_or_missing": sum(len(each.problems) for each in of_kind),
                "of_first": by_model[0],
                "of_second": by_model[1],
                "requests_per_second": round(len(times) / took, 1),
                **{name: told[name] for name in ("p50_ms", "p95_ms", "p99_ms")},
            }
        )
        if kind != "JSON /predict" and not (by_model[0] and by_model[1]):
            problems.append(f"{kind}: {dict(by_model)} answers by model; expected some of both")
    problems += [f"a 5xx of bad input: {each}" for each in hostile if each.rsplit(": ", 1)[1].startswith("5")]
    if len(hostile) < len(hostile_requests()):
        problems.append(f"of {len(hostile_requests())} kinds of hostile requests {len(hostile)} were sent")
    if sizes["end"] > (1 + GROWTH) * sizes["start"]:
        problems.append(f"memory grew from {sizes['start']:,} to {sizes['end']:,} bytes")
    return {
        "seconds": round(took, 1),
        "lines": lines,
        "hostile": {"sent": hostile.total(), "answers": dict(hostile)},
        "rss_bytes": dict(sizes),
        "reload_seconds": round(reload_seconds, 3),
        "problems": problems[:50],
        "num_problems": len(problems),
        "machine": machine.describe(),
    }


def show(figures: Mapping[str, Any]) -> None:
    """Print the table."""
    names = list(figures["lines"][0])
    rows = [names, *([str(line[name]) for name in names] for line in figures["lines"])]
    widths = [max(len(row[place]) for row in rows) for place in range(len(names))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    sizes = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in figures["rss_bytes"].items())
    print(f"server's memory: {sizes}; reloaded in {figures['reload_seconds']} s")
    print(f"hostile requests: {figures['hostile']['sent']}, in {len(figures['hostile']['answers'])} kinds and answers")
    print(f"problems: {figures['num_problems']}", *figures["problems"], sep="\n  ")


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=1, help="of each of the five kinds")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = load(given.seconds, given.clients, Path(folder))
    show(figures)
    if given.out is not None:
        given.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if figures["num_problems"] else 0)


if __name__ == "__main__":
    main()
