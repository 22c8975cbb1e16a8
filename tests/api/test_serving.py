"""A server beside other work: it answers, ends, and tells its mistakes."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import threading
import urllib.request
from types import ModuleType

import pytest

from recspec import api
from recspec.base.errors import BundleError, MissingExtraError, SettingsError

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


def _asked(url: str) -> dict[str, object]:
    with urllib.request.urlopen(f"{url}/models", timeout=20) as answer:
        found: dict[str, object] = json.load(answer)
        return found


def test_a_server_answers_in_the_background_until_its_block_ends(model: api.Model) -> None:
    before = signal.getsignal(signal.SIGINT)
    with model.serve(http_port=0, grpc=False, watch=0) as serving:
        assert "run" in json.dumps(_asked(serving.url))
        assert repr(serving) == f"run at {serving.url}"
        assert f"<a href='{serving.url}'" in serving._repr_html_()
        again = api.serve([model, f"second={model.path}"], http_port=0, grpc=False)
        assert again.models == ("run", "second")
        assert again.url != serving.url
        port = int(serving.url.rpartition(":")[2])
        with pytest.raises(SettingsError, match=f"can't listen at 127.0.0.1:{port}"):
            api.serve(model, http_port=port, grpc=False)
        again.stop()
        again.stop()
        assert not again.runs
        assert serving.runs
    assert repr(serving).endswith("(stopped)")
    assert "<a" not in serving._repr_html_()
    with pytest.raises(OSError, match="refused"):
        _asked(serving.url)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_free_port_for_http_is_one_for_grpc_too(model: api.Model) -> None:
    pytest.importorskip("grpc")
    pytest.importorskip("tritonclient")
    with model.serve(http_port=0, watch=0) as first, api.serve(model, http_port=0, watch=0) as second:
        ports = [int(str(each.grpc).rpartition(":")[2]) for each in (first, second)]
    assert len({*ports, 8001, 0}) == 4


@pytest.mark.parametrize("library", ["grpc", "tritonclient", "rapidjson"])
def test_without_the_libraries_of_grpc_it_answers_over_http_alone(
    library: str, model: api.Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("grpc", "tritonclient", "rapidjson"):
        monkeypatch.setitem(sys.modules, name, None if name == library else ModuleType(name))
    told = f"this needs the library '{library}', which is not installed: pip install 'recspec[serve]'"
    with caplog.at_level(logging.WARNING, "recspec.serve"), model.serve(http_port=0, watch=0) as serving:
        assert serving.grpc is None
        assert "run" in json.dumps(_asked(serving.url))
    assert caplog.messages == [f"no gRPC, HTTP alone: {told}"]
    with pytest.raises(MissingExtraError, match=re.escape(told)):
        model.serve(http_port=0, grpc_port=0)


def test_with_block_it_serves_until_a_signal(model: api.Model) -> None:
    answers: list[dict[str, object]] = []

    def ask_and_end(serving: api.Serving) -> None:
        def work() -> None:
            answers.append(_asked(serving.url))
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=work).start()

    ended = api.serve(model, http_port=0, grpc=False, block=True, ready=ask_and_end)
    assert answers
    assert ended.url.startswith("http://127.0.0.1:")


def test_mistakes_are_told_at_once(model: api.Model) -> None:
    with pytest.raises(BundleError, match="nowhere"):
        api.serve("nowhere", http_port=0, grpc=False)
    with pytest.raises(SettingsError, match="admits other machines without a token"):
        api.serve(model, host="0.0.0.0", http_port=0, grpc=False)
    with pytest.raises(SettingsError, match=r"unknown keyword 'port' \(did you mean"):
        api.serve(model, port=0)  # type: ignore[call-arg]
    with pytest.raises(SettingsError, match="ready and force go with block=True"):
        api.serve(model, http_port=0, ready=lambda _: None)
