"""The server as its clients see it: NVIDIA's tritonclient, and others that wish it ill."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

grpc = pytest.importorskip("grpc")
pytest.importorskip("gevent")  # without it, tritonclient.http raises no ImportError
triton_grpc = pytest.importorskip("tritonclient.grpc")
triton_http = pytest.importorskip("tritonclient.http")

from tritonclient.grpc import service_pb2, service_pb2_grpc  # noqa: E402
from tritonclient.utils import InferenceServerException  # noqa: E402

import recspec as rs  # noqa: E402
from recspec.base.config import read_token  # noqa: E402
from recspec.base.errors import BundleError, SettingsError  # noqa: E402
from recspec.inference.predictor import Predictor  # noqa: E402
from recspec.serving import server as server_module  # noqa: E402
from recspec.serving.http_bodies import LARGE  # noqa: E402
from recspec.serving.model_folders import Source  # noqa: E402
from recspec.serving.repository import Repository  # noqa: E402
from recspec.serving.running import serve  # noqa: E402
from recspec.serving.server import HEAD_BYTES, Addresses, Server, ServerOptions  # noqa: E402
from recspec.serving.settings import Limits, RepositorySettings, ServeSettings  # noqa: E402
from recspec.serving.tensors import DATATYPES  # noqa: E402
from tests.asking import Running, ask, asking, total  # noqa: E402
from tests.closeness import assert_close  # noqa: E402
from tests.documented import ROOT, fences  # noqa: E402
from tests.made_up import clicks, interactions  # noqa: E402
from tests.made_up_models import made_up_bundle, made_up_rows  # noqa: E402
from tests.serving.test_repository import expected  # noqa: E402

T = TypeVar("T")
MODELS = ("neumf", "wide_deep", "dlrm")
LIMITS = Limits(max_rows=100, max_body_mb=100_000 / 2**20, timeout=600)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    specs = {"neumf": interactions(folder / "interactions"), "wide_deep": clicks(folder / "clicks", num_rows=500)}
    return {name: made_up_bundle(folder / name, specs.get(name, specs["wide_deep"]), name) for name in MODELS}


@pytest.fixture(scope="module")
def running(bundles: dict[str, Path]) -> Iterator[Running]:
    with Running([Source(name, path) for name, path in bundles.items()], LIMITS) as server:
        yield server


def first_output(name: str) -> str:
    """NeuMF learned interactions, so it only ranks."""
    return "sigmoid" if name in ("neumf", "m") else "probability"


def over(module: Any, address: str, **how: bool) -> Callable[..., Any]:
    """Inference by a module of tritonclient."""

    def infer(name: str, arrays: dict[str, NDArray[Any]], types: dict[str, str], **more: Any) -> Any:
        inputs = [module.InferInput(key, values.shape, types[key]) for key, values in arrays.items()]
        for each, values in zip(inputs, arrays.values(), strict=True):
            each.set_data_from_numpy(values, **how)
        with module.InferenceServerClient(address) as client:
            outputs = [module.InferRequestedOutput(first_output(name), **how)]
            return client.infer(name, inputs, outputs=outputs, **more)

    return infer


def ways(running: Running) -> dict[str, Callable[..., Any]]:
    return {
        "http binary": over(triton_http, running.host, binary_data=True),
        "http json": over(triton_http, running.host, binary_data=False),
        "grpc": over(triton_grpc, running.grpc),
    }


def rows_of(running: Running, name: str, rows: int, seed: int = 0) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    ports = running.repository.endpoint(name).inputs
    return made_up_rows(ports, rows, seed), {port.name: DATATYPES[port.dtype] for port in ports}


def infer_body(running: Running, name: str, rows: int = 2, **more: object) -> str:
    arrays, types = rows_of(running, name, rows)
    inputs = [
        {"name": key, "datatype": types[key], "shape": list(values.shape), "data": values.ravel().tolist()}
        for key, values in arrays.items()
    ]
    return json.dumps({"inputs": inputs, **more})


# --- tritonclient ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_tritonclient_gets_the_bundle_s_probabilities_in_every_way(
    running: Running, bundles: dict[str, Path], name: str
) -> None:
    arrays, types = rows_of(running, name, 9)
    wanted = expected(bundles[name], arrays)
    assert len(np.unique(wanted)) > 5
    for way, infer in ways(running).items():
        answer = infer(name, arrays, types, request_id="17")
        assert_close(answer.as_numpy(first_output(name)), wanted, way)
        assert answer.as_numpy("logit") is None, way
        told = answer.get_response() if way != "grpc" else answer.get_response(as_json=True)
        assert (told["id"], told["model_name"], told["model_version"]) == ("17", name, "1"), way


def test_raw_values_need_no_vocabulary(running: Running, bundles: dict[str, Path]) -> None:
    arrays = {
        "user_id": np.array([["u00001"], ["nobody"]], object),
        "gender": np.array([["f"], [""]], object),
        "item_id": np.array([["1"], ["7"]], object),
        "tags": np.array([["t1|t2"], [""]], object),
        "hour": np.array([["3"], ["22"]], object),
        "age": np.array([[31.0], [np.nan]]),
        "price": np.array([[1.0], [2.5]]),
        "speed": np.array([[0.1], [-2.0]]),
    }
    import pyarrow as pa

    types = {name: "BYTES" if values.dtype == object else "FP64" for name, values in arrays.items()}
    for way, infer in ways(running).items():
        arrays["age"][1] = 50.0 if way == "http json" else np.nan  # JSON has no NaN
        rows = pa.table({name: pa.array(values[:, 0].tolist(), from_pandas=True) for name, values in arrays.items()})
        wanted = Predictor.open(bundles["dlrm"], device="cpu").predict(rows)[0]
        found = infer("dlrm_raw", arrays, types).as_numpy("probability")
        assert_close(found[:, 0], wanted, way)


def test_without_named_outputs_both_come(running: Running) -> None:
    arrays, types = rows_of(running, "neumf", 2)
    inputs = [triton_http.InferInput(key, values.shape, types[key]) for key, values in arrays.items()]
    for each, values in zip(inputs, arrays.values(), strict=True):
        each.set_data_from_numpy(values)
    with triton_http.InferenceServerClient(running.host) as client:
        answer = client.infer("neumf", inputs)
        packed = client.infer("neumf", inputs, request_compression_algorithm="gzip")
        deflated = client.infer("neumf", inputs, request_compression_algorithm="deflate")
    logits = answer.as_numpy("logit")
    assert np.allclose(1 / (1 + np.exp(-logits)), answer.as_numpy("sigmoid"), atol=1e-6)
    assert_close(packed.as_numpy("logit"), logits)
    assert_close(deflated.as_numpy("logit"), logits)


def test_both_protocols_tell_the_same_of_server_and_models(running: Running) -> None:
    with (
        triton_http.InferenceServerClient(running.host) as http_client,
        triton_grpc.InferenceServerClient(running.grpc) as grpc_client,
    ):
        for client in (http_client, grpc_client):
            assert client.is_server_live()
            assert client.is_server_ready()
            assert client.is_model_ready("dlrm")
            assert client.is_model_ready("dlrm_raw", "1")
            assert not client.is_model_ready("dlrm", "2")
            assert not client.is_model_ready("nothing")
        told = http_client.get_server_metadata()
        assert (told["name"], "binary_tensor_data" in told["extensions"]) == ("recspec", True)
        assert grpc_client.get_server_metadata(as_json=True) == told
        raw = http_client.get_model_metadata("dlrm_raw")["inputs"]
        assert {"name": "tags", "datatype": "BYTES", "shape": [-1, 1]} in raw
        assert {"name": "age", "datatype": "FP64", "shape": [-1, 1]} in raw
        metadata = http_client.get_model_metadata("wide_deep")
        assert [each["name"] for each in metadata["outputs"]] == ["probability", "logit"]
        assert {"name": "tags", "datatype": "INT32", "shape": [-1, 4]} in metadata["inputs"]
        over = grpc_client.get_model_metadata("wide_deep", as_json=True)
        assert [each["name"] for each in over["inputs"]] == [each["name"] for each in metadata["inputs"]]
        config = http_client.get_model_config("wide_deep")
        assert config["max_batch_size"] == 100
        assert config["dynamic_batching"] == {"preferred_batch_size": [4096], "max_queue_delay_microseconds": 0}
        assert {"name": "tags", "data_type": "TYPE_INT32", "dims": [4]} in config["input"]
        over = grpc_client.get_model_config("wide_deep").config
        assert over.max_batch_size == 100
        assert over.HasField("dynamic_batching")
        assert {each.name: list(each.dims) for each in over.input}["tags"] == [4]
        index = http_client.get_model_repository_index()
        assert {each["name"] for each in index} == {*MODELS, *(f"{name}_raw" for name in MODELS)}
        assert {each["state"] for each in index} == {"READY"}
        assert len(grpc_client.get_model_repository_index().models) == len(index)


def test_statistics_count_rows_and_batches(running: Running) -> None:
    with (
        triton_http.InferenceServerClient(running.host) as client,
        triton_grpc.InferenceServerClient(running.grpc) as over,
    ):
        before = client.get_inference_statistics("neumf")["model_stats"][0]
        arrays, types = rows_of(running, "neumf", 3)
        for infer in ways(running).values():
            infer("neumf", arrays, types)
        after = client.get_inference_statistics("neumf", "1")["model_stats"][0]
        assert after["inference_count"] - before["inference_count"] == 9
        assert after["execution_count"] - before["execution_count"] == 3
        assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 3
        assert 3 in [each["batch_size"] for each in after["batch_stats"]]
        for each in (after["inference_stats"], *after["batch_stats"]):  # or else perf_analyzer ends in the middle
            assert len({each[f"compute_{part}"]["count"] for part in ("input", "infer", "output")}) == 1
        assert over.get_inference_statistics("neumf").model_stats[0].inference_count == after["inference_count"]
        assert len(client.get_inference_statistics()["model_stats"]) == 6
        assert len(over.get_inference_statistics().model_stats) == 6


def test_models_are_unloaded_and_loaded_over_both_protocols_where_the_server_was_started_for_it(
    running: Running, bundles: dict[str, Path]
) -> None:
    bearing = {"authorization": "Bearer s3cret"}
    with (
        Running([Source("neumf", bundles["neumf"])], token="s3cret", control=True) as controlled,
        triton_http.InferenceServerClient(controlled.host) as first,
        triton_grpc.InferenceServerClient(controlled.grpc) as second,
    ):
        for client in (first, second):
            with pytest.raises(InferenceServerException, match=r"(?i)authorization: Bearer TOKEN"):
                client.unload_model("neumf")
            client.unload_model("neumf", headers=bearing)
            assert not client.is_model_ready("neumf", headers=bearing)
            client.load_model("neumf", headers=bearing)
            assert client.is_model_ready("neumf", headers=bearing)
            with pytest.raises(InferenceServerException, match="no model 'x'"):
                client.load_model("x", headers=bearing)
            with pytest.raises(InferenceServerException, match="'config' and files can't be sent"):
                client.load_model("neumf", config="{}", headers=bearing)
    with (
        triton_http.InferenceServerClient(running.host) as first,
        triton_grpc.InferenceServerClient(running.grpc) as second,
    ):
        for client in (first, second):
            for change in (client.load_model, client.unload_model):
                with pytest.raises(InferenceServerException, match="start the server with --control and a token"):
                    change("neumf")
            assert client.is_model_ready("neumf")


# --- what is refused -------------------------------------------------------------------------------------------------


def test_wrong_requests_have_their_status_and_a_message(running: Running) -> None:
    good = infer_body(running, "neumf")
    for method, path, body, headers, status, message in (
        ("GET", "/nothing", None, {}, 404, "no route '/nothing'"),
        ("GET", "/v2/models/neumf/infer", None, {}, 405, "GET is not answered here"),
        ("POST", "/v2/models/neumfs/infer", good, {}, 404, "no model 'neumfs' (did you mean 'neumf'?)"),
        ("POST", "/v2/models/neumf/infer", "{", {}, 400, "the request's head is not JSON"),
        ("POST", "/v2/models/neumf/infer", good, {"content_type": "text/plain"}, 415, "content-type 'text/plain'"),
        ("POST", "/v2/models/neumf/infer", good, {"content_encoding": "br"}, 415, "content-encoding 'br' is not read"),
        ("POST", "/v2/models/neumf/infer", good, {"content_encoding": "gzip"}, 400, "the body is not gzip"),
        ("POST", "/v2/models/neumf/infer", good, {"inference_header_content_length": "-1"}, 400, "is '-1'"),
        ("POST", "/v2/models/neumf/infer", infer_body(running, "neumf", 101), {}, 413, "has 101 rows; at most 100"),
        ("POST", "/v2/models/neumf/infer", " " * 100_001, {}, 413, "larger than the 100000 bytes taken"),
        ("POST", "/v2/models/neumf/infer", infer_body(running, "neumf", parameters={"timeout": 1}), {}, 504, "answer"),
        ("POST", "/v2/repository/index", "[]", {}, 400, "expected a JSON object"),
        ("POST", "/v2/repository/models/neumf/load", '{"parameters": {"config": "{}"}}', {}, 403, "with --control"),
        ("GET", "/v2", None, {"host": "evil.example"}, 403, "host 'evil.example' is not answered"),
        ("GET", "/v2", None, {"host": "a b"}, 400, "expected one header 'Host' with a name or address; found 'a b'"),
        ("GET", "/v2", None, {"origin": "http://evil.example"}, 403, "pages of other origins"),
    ):
        found, _, told = running.send(method, path, body, **headers)
        assert (found, message in told["error"]) == (status, True), (path, found, told)
    assert running.send("GET", "/v2", origin=f"http://{running.host}")[0] == 200
    assert running.send("POST", "/v2/models/neumf/infer", good)[0] == 200


def test_a_large_request_is_answered_too(bundles: dict[str, Path]) -> None:
    with Running([Source("neumf", bundles["neumf"])], Limits()) as running:
        arrays, types = rows_of(running, "neumf", 65_536)
        assert arrays["user_id"].nbytes * 2 < LARGE < len(infer_body(running, "neumf", 65_536, pad=" " * LARGE))
        wanted = expected(bundles["neumf"], arrays)
        status, _, told = running.send(
            "POST", "/v2/models/neumf/infer", infer_body(running, "neumf", 65_536, pad=" " * LARGE)
        )
        assert status == 200
        assert_close(np.array(told["outputs"][0]["data"], np.float32), wanted[:, 0])
        assert_close(over(triton_grpc, running.grpc)("neumf", arrays, types).as_numpy("sigmoid"), wanted)
        assert running.send("POST", "/v2/models/neumf/infer", infer_body(running, "neumf", 65_537))[0] == 413


def test_a_body_that_unpacks_to_more_than_the_limit_is_refused(running: Running) -> None:
    bomb = gzip.compress(b" " * 10_000_000)
    assert len(bomb) < 100_000
    for body in (bomb, gzip.compress(b"{}")[:-4], gzip.compress(b"{}") + b"more"):
        status, _, told = running.send("POST", "/v2/models/neumf/infer", body, content_encoding="gzip")
        assert status == (413 if body is bomb else 400), told


def raw_exchange(running: Running, *parts: bytes) -> bytes:
    """What the server says to bytes that are no good HTTP."""
    host, port = running.host.split(":")
    with socket.create_connection((host, int(port)), timeout=600) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the server hung up, as it may
        found = b""
        try:
            while part := connection.recv(65_536):
                found += part
        except ConnectionResetError:
            pass
        return found


def test_bytes_that_are_no_http_do_not_disturb_the_server(running: Running) -> None:
    assert raw_exchange(running, b"\x16\x03\x01\x02\x00\x01\x00").startswith(b"HTTP/1.1 400")
    assert b"431" in raw_exchange(running, b"GET /v2 HTTP/1.1\r\n", b"x: " + b"a" * (HEAD_BYTES + 1))
    for head in (b"content-length: 50", b"content-length: 99999999999999999999", b"transfer-encoding: chunked"):
        found = raw_exchange(running, b"POST /v2/models/neumf/infer HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\n{")
        assert not found.startswith(b"HTTP/1.1 5"), found
    assert running.send("GET", "/v2/health/ready")[0] == 200
    assert running.repository.body_reader.held == 0


def grpc_call(running: Running, method: str, request: Any, **more: Any) -> Any:
    with grpc.insecure_channel(running.grpc) as channel:
        return getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), method)(request, timeout=600, **more)


def grpc_request(**more: Any) -> Any:
    request = service_pb2.ModelInferRequest(model_name="neumf", **more)
    for name in ("user_id", "item_id"):
        request.inputs.add(name=name, datatype="INT32", shape=[2, 1]).contents.int_contents.extend([1, 2])
    return request


def test_the_example_of_tritonclient_in_the_documents_answers_over_http_and_grpc(tmp_path: Path) -> None:
    rows = [
        {"user_id": 1 + n % 42, "item_id": 1 + n % 12, "price": 4.0 + n % 3, "hour": n % 24, "clicked": n % 5 // 4}
        for n in range(400)
    ]
    data = rs.prepare(rows, tmp_path / "data", label="clicked", progress=False)
    rs.train("wide_deep", data, tmp_path / "run", hidden=[4], epochs=1, progress=False)
    (example,) = (each for each in fences(ROOT / "docs" / "serving.md") if "import tritonclient.http" in each.text)
    names: dict[str, Any] = {}
    exec(compile(example.text, str(example), "exec"), names)
    with Running([Source("clicks", tmp_path / "run")]) as running:
        found = names["score"](triton_http, running.host, names["COLUMNS"])
        assert found.shape == (2, 1)
        assert_close(names["score"](triton_grpc, running.grpc, names["COLUMNS"]), found)


def test_typed_and_raw_contents_are_read_over_grpc(running: Running, bundles: dict[str, Path]) -> None:
    answer = grpc_call(running, "ModelInfer", grpc_request(id="x"))
    assert (answer.id, [each.name for each in answer.outputs]) == ("x", ["sigmoid", "logit"])
    for ids in ([1, 2], [3, 4]):  # the head of the second request is known
        rows = {name: np.array(ids, np.int32)[:, None] for name in ("user_id", "item_id")}
        request = service_pb2.ModelInferRequest(model_name="neumf", raw_input_contents=[rows["user_id"].tobytes()] * 2)
        for name in rows:
            request.inputs.add(name=name, datatype="INT32", shape=[2, 1])
        raw = grpc_call(running, "ModelInfer", request).raw_output_contents[0]
        assert_close(np.frombuffer(raw, "<f4").reshape(2, 1), expected(bundles["neumf"], rows))
        assert (raw == answer.raw_output_contents[0]) == (ids == [1, 2])


def test_a_bug_behind_infer_is_a_500_without_a_word_of_python(
    bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> NoReturn:
        raise KeyError("secret")

    answers: list[Any] = []
    monkeypatch.setattr(Repository, "infer", broken)
    with asking([Source("neumf", bundles["neumf"])]) as asked:
        request = ask(asked.app, "POST", "/v2/models/neumf/versions/1/infer", {"inputs": []}, got=answers)
        with pytest.raises(KeyError):  # uvicorn writes it to the log
            asked.runner.run(request)
    assert answers[0]["status"] == 500
    assert json.loads(answers[1]["body"]) == {"error": "the server failed; its log says why"}


def test_wrong_requests_over_grpc_have_their_status(running: Running) -> None:
    code = grpc.StatusCode

    def changed(change: Callable[[Any], object], **more: Any) -> Any:
        request = grpc_request(**more)
        change(request)
        return request

    def foreign_id(request: Any) -> None:
        request.inputs[0].contents.int_contents[1] = 10**6

    def half(request: Any, datatype: str) -> None:
        request.inputs[0].datatype = datatype

    def many_rows(request: Any) -> None:
        for each in request.inputs:
            each.shape[0] = 101
            each.contents.int_contents[:] = [1] * 101

    def short(request: Any) -> None:
        for each in request.inputs:
            each.ClearField("contents")

    def parameter(kind: str, value: object) -> Any:
        return changed(lambda each: setattr(each.parameters["timeout"], kind, value))

    output = service_pb2.ModelInferRequest.InferRequestedOutputTensor(name="logits")
    raw = [b"12345678"]
    for request, message, status in (
        (grpc_request(model_version="3"), "no version '3'", code.NOT_FOUND),
        (changed(lambda each: each.inputs.pop()), "input 'item_id' is missing", code.INVALID_ARGUMENT),
        (changed(foreign_id), "row 2 (user_id[1]) is 1000000; expected an id in [0,", code.INVALID_ARGUMENT),
        (grpc_request(outputs=[output]), "unknown output 'logits'", code.INVALID_ARGUMENT),
        (grpc_request(raw_input_contents=raw), "raw_input_contents has 1 entries", code.INVALID_ARGUMENT),
        (grpc_request(raw_input_contents=raw * 2), "has contents and raw_input_contents", code.INVALID_ARGUMENT),
        (changed(short, raw_input_contents=[b"1234567"] * 2), "7 bytes; INT32 of shape", code.INVALID_ARGUMENT),
        (changed(lambda each: half(each, "FP16")), "FP16 has no typed contents", code.INVALID_ARGUMENT),
        (changed(lambda each: half(each, "INT3")), "unknown datatype 'INT3'", code.INVALID_ARGUMENT),
        (parameter("int64_param", 1), "no answer within 1e-06 s", code.DEADLINE_EXCEEDED),
        (parameter("double_param", 2.5), "'timeout' is 2.5; expected microseconds", code.INVALID_ARGUMENT),
        (changed(many_rows), "has 101 rows; at most 100", code.RESOURCE_EXHAUSTED),
        (grpc_request(raw_input_contents=[b" " * 200_000]), "larger than max", code.RESOURCE_EXHAUSTED),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            grpc_call(running, "ModelInfer", request)
        assert refused.value.code() == status, (message, refused.value)
        assert message in refused.value.details()


def test_what_grpc_does_not_have_here_is_unimplemented(running: Running) -> None:
    for method, request in (
        ("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest()),
        ("TraceSetting", service_pb2.TraceSettingRequest()),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            grpc_call(running, method, request)
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED, method
    with grpc.insecure_channel(running.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.ModelStreamInfer(iter([service_pb2.ModelInferRequest()]), timeout=600))
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_everything_is_counted_in_one_place(running: Running) -> None:
    metrics = running.repository.metrics
    before = total(metrics, "recspec_requests_total", protocol="http", route="infer", model="neumf", status="200")
    running.send("POST", "/v2/models/neumf/infer", infer_body(running, "neumf"))
    running.send("POST", "/v2/models/" + "x" * 50 + "/infer", "{}")
    with pytest.raises(grpc.RpcError):
        grpc_call(running, "ModelInfer", grpc_request(raw_input_contents=[b"12345678"]))
    after = total(metrics, "recspec_requests_total", protocol="http", route="infer", model="neumf", status="200")
    assert after - before == 1
    text = metrics.text().decode()
    assert "xxx" not in text
    for _ in range(60_000):  # a call is counted once its answer has left
        if total(metrics, "recspec_requests_total", protocol="grpc", status="INVALID_ARGUMENT"):
            break
        time.sleep(0.01)
    assert total(metrics, "recspec_requests_total", protocol="grpc", status="INVALID_ARGUMENT") > 0
    assert not total(metrics, "recspec_requests_total", status="500")
    assert "\nrecspec_models 3.0\n" in text
    assert "\nrecspec_held_bytes 0.0\n" in text


# --- limits, tokens, life --------------------------------------------------------------------------------------------


def test_a_full_queue_answers_503_with_retry_after_over_both_protocols(bundles: dict[str, Path]) -> None:
    running = Running([Source("m", bundles["neumf"])], Limits(queue=1, retry_seconds=3))
    gate = threading.Event()
    try:
        batcher = running.repository.endpoint("m").model.batcher

        async def fill() -> list[asyncio.Task[bool]]:
            tasks = [asyncio.ensure_future(batcher.call(lambda: gate.wait(600))) for _ in range(1)]
            await asyncio.sleep(0)
            tasks.append(asyncio.ensure_future(batcher.call(lambda: True)))
            await asyncio.sleep(0)
            return tasks

        tasks = running.call(fill())
        status, headers, told = running.send("POST", "/v2/models/m/infer", infer_body(running, "m"))
        assert (status, headers["retry-after"]) == (503, "3")
        assert told["error"] == "model 'm': 1 requests wait already; try again in 3 s"
        request = grpc_request()
        request.model_name = "m"
        with pytest.raises(grpc.RpcError) as refused:
            grpc_call(running, "ModelInfer", request)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert dict(refused.value.trailing_metadata())["retry-after"] == "3"
        gate.set()
        running.call(_all(tasks))
        assert running.send("POST", "/v2/models/m/infer", infer_body(running, "m"))[0] == 200
    finally:
        gate.set()
        running.stop()


async def _all(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    return list(await asyncio.gather(*tasks))


def test_with_a_token_only_health_is_told_without_it(bundles: dict[str, Path]) -> None:
    token = "s3cret-ü".encode().hex()
    with Running([Source("m", bundles["neumf"])], token=token) as running:
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": token}):
            status, headers, told = running.send("GET", "/v2", **given)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert told["error"] == "expected the header 'Authorization: Bearer TOKEN'"
            assert running.send("POST", "/v2/models/m/infer", "{}", **given)[0] == 401
            assert running.send("GET", "/nothing", **given)[0] == 401
        assert running.send("GET", "/v2/health/ready")[0] == 200
        assert running.send("GET", "/v2", authorization=f"Bearer {token}")[0] == 200
        with triton_grpc.InferenceServerClient(running.grpc) as client:
            assert client.is_server_ready()
            for headers in (None, {"authorization": "Bearer wrong"}):
                with pytest.raises(InferenceServerException, match="expected metadata 'authorization: Bearer TOKEN'"):
                    client.get_server_metadata(headers=headers)
            assert client.get_server_metadata(headers={"authorization": f"Bearer {token}"}).name == "recspec"


def test_a_token_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("abc\n")
    assert read_token({}) is None
    assert read_token({"RECSPEC_TOKEN": "xyz"}) == "xyz"
    assert read_token({"RECSPEC_TOKEN": "xyz"}, file) == "abc"
    file.write_text("a b")
    with pytest.raises(SettingsError, match=r"token file .*: expected one line of letters, digits and signs"):
        read_token({}, file)
    with pytest.raises(SettingsError, match="RECSPEC_TOKEN: expected one line"):
        read_token({"RECSPEC_TOKEN": ""})
    with pytest.raises(SettingsError, match="can't be read"):
        read_token({}, tmp_path / "none")


def test_a_reload_in_the_middle_of_many_requests_drops_none(tmp_path: Path, bundles: dict[str, Path]) -> None:
    spec = Predictor.open(bundles["neumf"]).spec
    folder = made_up_bundle(tmp_path / "m", spec, "neumf", 0)
    running = Running([Source("m", folder)])
    arrays, types = rows_of(running, "m", 3)
    allowed = [expected(folder, arrays)]
    begun, wrong, answered = threading.Barrier(5), list[object](), list[int]()
    done = threading.Event()

    def client(infer: Callable[..., Any]) -> None:
        try:
            begun.wait(600)
            while not done.is_set():
                found = infer("m", arrays, types).as_numpy("sigmoid")
                answered.append(next((at for at, each in enumerate(allowed) if np.allclose(found, each)), -1))
        except Exception as error:
            wrong.append(error)

    used = [*ways(running).values(), over(triton_grpc, running.grpc)]
    threads = [threading.Thread(target=client, args=(infer,)) for infer in used]
    try:
        for each in threads:
            each.start()
        begun.wait(600)
        for seed in (1, 2):
            other = made_up_bundle(tmp_path / f"new{seed}", spec, "neumf", seed)
            allowed.append(expected(other, arrays))
            made_up_bundle(folder, spec, "neumf", seed)
            running.call(running.repository.load("m"))
            np.testing.assert_allclose(used[0]("m", arrays, types).as_numpy("sigmoid"), allowed[-1], atol=1e-6)
            count = len(answered)  # only now: while a model is opened, the old one answers any number of requests
            while len(answered) < count + 12 and not wrong:
                threading.Event().wait(0.005)
    finally:
        done.set()
        for each in threads:
            each.join()
        running.stop()
    assert not wrong
    assert set(answered) >= {1, 2}
    assert -1 not in answered


def test_an_address_that_is_taken_is_told(
    running: Running, bundles: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    port = int(running.host.split(":")[1])

    async def start(settings: ServeSettings, source: Source) -> None:
        await Server(ServerOptions([source], settings, RepositorySettings(watch=0))).start()

    good = Source("m", bundles["neumf"])
    with pytest.raises(SettingsError, match=f"HTTP: can't listen at 127.0.0.1:{port}: Address already in use"):
        asyncio.run(start(ServeSettings(http_port=port), good))
    taken = int(running.grpc.split(":")[1])
    with pytest.raises(SettingsError, match=f"gRPC: can't listen at 127.0.0.1:{taken}: Address .* --grpc-port$"):
        asyncio.run(start(ServeSettings(http_port=0, grpc_port=taken), good))
    assert capfd.readouterr().err == ""  # no log of gRPC's own before the message
    with pytest.raises(BundleError, match="no such folder"):
        asyncio.run(start(ServeSettings(http_port=0, grpc_port=0), Source("m", bundles["neumf"] / "none")))


def takes_connections(address: str) -> bool:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=600).close()
    except OSError:
        return False
    return True


def test_asked_to_end_the_server_answers_what_is_under_way_and_ends_well(bundles: dict[str, Path]) -> None:
    answered: list[tuple[int, bytes]] = []
    clients: list[threading.Thread] = []

    def client(addresses: Addresses) -> None:
        try:
            connection = http.client.HTTPConnection(addresses.http.removeprefix("http://"), timeout=600)
            connection.request("GET", "/v2/health/ready")
            assert connection.getresponse().read() == b""
            body = json.dumps({"inputs": []}).encode()
            connection.putrequest("POST", "/v2/models/m/infer")
            connection.putheader("content-length", str(len(body)))
            connection.endheaders(body[:5])  # under way, but not whole
            with triton_grpc.InferenceServerClient(str(addresses.grpc)) as over_grpc:
                assert over_grpc.is_server_ready()
            os.kill(os.getpid(), signal.SIGTERM)
            while takes_connections(addresses.http.removeprefix("http://")):
                threading.Event().wait(0.01)
            connection.send(body[5:])
            told = connection.getresponse()
            answered.append((told.status, told.read()))
            connection.close()
        finally:
            os.kill(os.getpid(), signal.SIGTERM) if not answered else None

    def ready(addresses: Addresses) -> None:
        clients.append(threading.Thread(target=client, args=(addresses,)))
        clients[0].start()

    settings = ServeSettings(http_port=0, grpc_port=0, shutdown_seconds=60)
    serve(ServerOptions([Source("m", bundles["dlrm"])], settings), ready=ready)
    clients[0].join()
    assert [(status, b"is missing" in told) for status, told in answered] == [(400, True)]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_server_that_ends_answers_connections_that_wait_or_are_open(
    bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Running([Source("neumf", bundles["neumf"])])
    host, port = running.host.rsplit(":", 1)
    request = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    clients = [socket.create_connection((host, int(port)), timeout=600)]
    clients[0].sendall(request)
    assert clients[0].recv(1 << 16).startswith(b"HTTP/1.1 200")  # open, and kept alive
    end = server_module._Http.shutdown

    async def shutdown(self: Any, sockets: Any = None) -> None:
        for _ in range(5):  # the loop does nothing else meanwhile, so they wait to be accepted
            clients.append(socket.create_connection((host, int(port)), timeout=600))
            clients[-1].sendall(request)
        asyncio.get_running_loop().call_later(0.2, clients[0].sendall, request)
        await end(self, sockets)

    monkeypatch.setattr(server_module._Http, "shutdown", shutdown)
    monkeypatch.setattr(server_module, "LAST_SECONDS", 300.0)  # whatever the load
    running.stop()
    for client in clients:
        with client:
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))  # noqa: B023
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"\r\nconnection: close\r\n" in answer
