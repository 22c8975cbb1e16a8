"""How fast a server answers: every client is counted, the warm-up is not, and what goes wrong is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from recspec.base.errors import SettingsError
from recspec.bench.load_test import Call, Server, infer_body, infer_call, request_times, run_load_test
from tests import made_up
from tests.asking import serving, sources
from tests.made_up_models import made_up_bundle


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("load_test")
    spec = made_up.clicks(folder / "data", num_rows=300)
    made = {
        "clicks": made_up_bundle(folder / "a", spec, "wide_deep"),
        "other": made_up_bundle(folder / "b", spec, "dlrm"),
    }
    with serving(sources(**made), token="secret") as addresses:
        yield Server(addresses.http, "secret")


def refused(server: Server, message: str, **named: object) -> None:
    with pytest.raises(SettingsError) as caught:
        run_load_test(server, seconds=0.1, warmup=0.0, **named)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_every_number_of_clients_has_a_line(server: Server) -> None:
    figures = run_load_test(server, model="clicks", concurrency=(1, 3), rows=4, seconds=0.3, warmup=0.05)
    lines = figures["measured"]
    assert isinstance(lines, list)
    assert [(line["concurrency"], line["batch_size"]) for line in lines] == [(1, 4), (3, 4)]
    for line in lines:
        assert line["calls"] > 0
        assert 0 < line["p50_ms"] <= line["p90_ms"] <= line["p99_ms"]
        assert line["requests_per_second"] == pytest.approx(line["calls"] / 0.3, abs=0.1)
        assert line["rows_per_second"] == round(line["calls"] / 0.3 * 4)
    json.dumps(figures)


def test_ids_are_drawn_from_the_range_that_the_server_tells(server: Server) -> None:
    call = infer_call(server, "clicks", 50)
    assert call.path == "/v2/models/clicks/infer"
    assert call.headers["authorization"] == "Bearer secret"
    head = json.loads(call.body[: int(call.headers["inference-header-content-length"])])
    assert all(each["shape"][0] == 50 for each in head["inputs"])
    ids = np.frombuffer(call.body[-head["inputs"][-1]["parameters"]["binary_data_size"] :], np.uint8)
    assert len(ids)
    assert any(call.body[int(call.headers["inference-header-content-length"]) :])  # not all ids are 0


def test_a_body_is_the_heads_json_and_the_tensors_bytes() -> None:
    body, length = infer_body({"x": np.array([[1], [2]], "<i4")}, {"x": "INT32"})
    head = json.loads(body[:length])
    assert head["inputs"] == [
        {"name": "x", "datatype": "INT32", "shape": [2, 1], "parameters": {"binary_data_size": 8}}
    ]
    assert head["parameters"] == {"binary_data_output": True}
    assert body[length:] == b"\1\0\0\0\2\0\0\0"


def test_what_can_not_be_measured_is_told(server: Server) -> None:
    refused(server, "say which model with --model; it holds clicks, other")
    refused(server, "no model 'click' (did you mean 'clicks'?)", model="click")
    refused(server, "input 'user_id' takes", model="clicks_raw")
    refused(server, "concurrency 0: expected 1 or more", concurrency=(0,))
    refused(Server("http://127.0.0.1:9"), "no server answers", model="clicks")
    refused(Server("ftp://here"), "'ftp://here' is no address; expected one such as http://127.0.0.1:8000")
    refused(Server("http://[", None), "is no address")
    refused(Server(server.url, "wrong"), "status 401", model="clicks")
    nothing = Path("nothing.pem")
    refused(Server("https://127.0.0.1:9", tls_ca=nothing), "--tls-ca nothing.pem: expected certificates in PEM")
    refused(Server("http://127.0.0.1:9", tls_ca=nothing), "is for an address that begins with https://, not http://")


def test_a_token_that_ends_meanwhile_is_a_failure_and_no_figure(server: Server) -> None:
    call = infer_call(server, "clicks", 1)
    with pytest.raises(SettingsError, match="/v2/models/clicks/infer: status 400"):
        request_times(server, Call(call.path, b"{}", call.headers), 0.0, float("inf"))
