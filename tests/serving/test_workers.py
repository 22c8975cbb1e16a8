"""A server of several processes: one answer wherever it comes from, and none lost but those of a worker that dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

grpc = pytest.importorskip("grpc")
triton_grpc = pytest.importorskip("tritonclient.grpc")

from recspec.base.errors import BundleError, RequestError, SettingsError  # noqa: E402
from recspec.feature_spec import FeatureSpec  # noqa: E402
from recspec.serving import workers  # noqa: E402
from recspec.serving.access import Access  # noqa: E402
from recspec.serving.model_folders import Source  # noqa: E402
from recspec.serving.running import server_of  # noqa: E402
from recspec.serving.server import Addresses, Server, ServerOptions, Shared  # noqa: E402
from recspec.serving.server_metrics import ServerMetrics, summed, without_gauges  # noqa: E402
from recspec.serving.settings import RepositorySettings, ServeSettings  # noqa: E402
from recspec.serving.showing import Showing  # noqa: E402
from recspec.serving.workers import Ended, WorkerChannel, Workers, threads_of_each  # noqa: E402
from tests.closeness import assert_close  # noqa: E402
from tests.made_up import interactions  # noqa: E402
from tests.made_up_models import made_up_bundle  # noqa: E402
from tests.processes import PATIENCE  # noqa: E402
from tests.serving.test_repository import expected  # noqa: E402

TOKEN = "of-this-test"
ROWS = {"user_id": [1, 2, 3, 4], "item_id": [4, 3, 2, 1]}
ANY = ServeSettings(http_port=0, grpc_port=0, workers=2)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are tested where /proc shows their memory")


class Serving:
    """Workers on a loop in a thread of its own."""

    def __init__(
        self,
        folder: Path,
        watch: float = 0,
        opening: RepositorySettings | None = None,
        showing: Showing | None = None,
    ) -> None:
        self._runner = asyncio.Runner()
        opening = opening or RepositorySettings(watch=watch, control=True, threads=1)
        options = ServerOptions([Source("films", folder)], ANY, opening, token=TOKEN, showing=showing or Showing())
        self.workers = server_of(options)
        assert isinstance(self.workers, Workers)
        self.addresses: Addresses = self._runner.run(self.workers.start())
        self._thread = threading.Thread(target=self._runner.get_loop().run_forever)
        self._thread.start()

    def stop(self) -> None:
        """Stop the workers, then the loop."""
        loop = self._runner.get_loop()
        asyncio.run_coroutine_threadsafe(self.workers.stop(), loop).result(PATIENCE)
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(PATIENCE)
        self._runner.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that answer."""
        return self.workers.pids

    def ask(self, path: str, body: object = None, **headers: str) -> bytes:
        """One request on a connection of its own, which any worker may accept."""
        sent = None if body is None else json.dumps(body).encode()
        told = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json", **headers}
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.addresses.http}{path}", sent, told), timeout=PATIENCE
        ) as answer:
            said: bytes = answer.read()
            return said

    def refused(self, path: str, body: object = None) -> tuple[int, str]:
        """The status and the text of a refusal."""
        with pytest.raises(urllib.error.HTTPError) as error:
            self.ask(path, body)
        with error.value as answer:
            return answer.code, answer.read().decode()

    def score(self) -> list[float]:
        """Scores of `ROWS`, from 0 to 1."""
        inputs = [
            {"name": name, "datatype": "INT32", "shape": [len(ids), 1], "data": ids} for name, ids in ROWS.items()
        ]
        answer = json.loads(self.ask("/v2/models/films/infer", {"inputs": inputs}))
        scores: list[float] = next(each["data"] for each in answer["outputs"] if each["name"] == "sigmoid")
        return scores

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        found = 0.0
        for line in self.ask("/metrics").decode().splitlines():
            said = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if said and said[1] == name:
                given = dict(re.findall(r'(\w+)="([^"]*)"', said[2] or ""))
                found += float(said[3]) if labels.items() <= given.items() else 0
        return found


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return interactions(tmp_path_factory.mktemp("workers") / "data")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, spec: FeatureSpec) -> Path:
    return made_up_bundle(tmp_path_factory.mktemp("workers") / "films", spec, "neumf")


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[Serving]:
    started = Serving(folder)
    yield started
    started.stop()


def wait_until_both_answer(serving: Serving) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(serving.pids) < 2:
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


# --- as one server ---------------------------------------------------------------------------------------------------


def test_answers_over_both_protocols_are_the_bundles(serving: Serving, folder: Path) -> None:
    arrays = {name: np.array(ids, np.int32)[:, None] for name, ids in ROWS.items()}
    wanted = expected(folder, arrays)[:, 0]
    for _ in range(6):
        assert_close(np.array(serving.score(), np.float32), wanted)
    inputs = [triton_grpc.InferInput(name, array.shape, "INT32") for name, array in arrays.items()]
    for each, array in zip(inputs, arrays.values(), strict=True):
        each.set_data_from_numpy(array)
    for _ in range(4):  # each channel is a connection, which the kernel gives to one of the workers
        with triton_grpc.InferenceServerClient(
            serving.addresses.grpc, channel_args=[("grpc.use_local_subchannel_pool", 1)]
        ) as client:
            answer = client.infer("films", inputs, headers={"authorization": f"Bearer {TOKEN}"})
            assert_close(answer.as_numpy("sigmoid")[:, 0], wanted)
    assert len(serving.pids) == 2
    assert os.getpid() not in serving.pids


def test_a_link_that_one_worker_signed_is_admitted_by_another() -> None:
    def access(key: bytes) -> Access:
        shared = Shared(socket.socket(), None, key)
        with shared.listening:
            return Server(ServerOptions([Source("films", Path("films"))], token=TOKEN), shared)._access

    path, _, query = access(b"k" * 32).signed("/report/films").partition("?")
    assert access(b"k" * 32).admits(path, query.encode())
    assert not access(b"x" * 32).admits(path, query.encode())


def test_metrics_are_the_sums_of_all_workers(serving: Serving) -> None:
    wait_until_both_answer(serving)
    before = serving.metric("recspec_requests_total", route="infer")
    for _ in range(10):
        serving.score()
    assert serving.metric("recspec_requests_total", route="infer") == before + 10
    assert (serving.metric("recspec_workers"), serving.metric("recspec_models")) == (2, 1)


def test_workers_share_the_pages_of_the_weights(serving: Serving) -> None:
    wait_until_both_answer(serving)
    for _ in range(6):
        serving.score()
    for pid in serving.pids:
        kept: dict[str, int] = {}
        inside = False
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                inside = line.endswith("weights.safetensors")
            elif inside and (said := re.match(r"(\w+): +(\d+) kB", line)):
                kept[said[1]] = kept.get(said[1], 0) + int(said[2])
        assert kept["Rss"] > 0, "the weights are read where they lie in the file"
        assert kept["Private_Dirty"] == kept["Anonymous"] == 0, "and no page of them was copied"


def test_a_model_that_one_client_loads_or_unloads_is_so_in_every_worker(
    serving: Serving, folder: Path, spec: FeatureSpec, tmp_path: Path
) -> None:
    wait_until_both_answer(serving)
    first = serving.score()
    other = made_up_bundle(tmp_path / "other", spec, "neumf", seed=1)
    kept = folder.rename(tmp_path / "kept")
    try:
        shutil.copytree(other, tmp_path / "whole")
        (tmp_path / "whole").rename(folder)
        serving.ask("/v2/repository/models/films/load", {})
        second = [serving.score() for _ in range(8)]
        assert all(each == second[0] != first for each in second)
        serving.ask("/v2/repository/models/films/unload", {})
        for _ in range(8):
            assert serving.refused("/v2/models/films/ready")[0] == 503
    finally:
        shutil.rmtree(folder)
        kept.rename(folder)
        serving.ask("/v2/repository/models/films/load", {})
    assert serving.score() == first


def test_a_model_that_cannot_be_loaded_is_one_error_and_the_old_one_answers(serving: Serving, folder: Path) -> None:
    wait_until_both_answer(serving)
    first = serving.score()
    away = folder.rename(folder.with_name("away"))
    try:
        _, said = serving.refused("/v2/repository/models/films/load", {})
    finally:
        away.rename(folder)
    assert said.count("no such folder") == 1
    assert serving.score() == first


# --- a worker that dies ----------------------------------------------------------------------------------------------


def test_a_killed_worker_is_replaced_while_others_answer_and_no_count_falls(serving: Serving) -> None:
    wait_until_both_answer(serving)
    first = serving.score()
    counted = serving.metric("recspec_requests_total", route="infer")
    restarts = serving.metric("recspec_worker_restarts_total")
    victim = serving.pids[0]
    os.kill(victim, signal.SIGKILL)
    assert [serving.score() for _ in range(4)] == [first] * 4  # no connection waits at the dead one alone
    deadline = time.monotonic() + PATIENCE
    while serving.metric("recspec_worker_restarts_total") <= restarts or len(serving.pids) < 2:
        assert time.monotonic() < deadline
        assert serving.score() == first
        counted += 1
    assert victim not in serving.pids
    assert serving.metric("recspec_requests_total", route="infer") == counted + 4


def test_files_that_are_overwritten_or_cut_short_change_no_answer_of_any_worker(
    spec: FeatureSpec, tmp_path: Path
) -> None:
    folder = made_up_bundle(tmp_path / "films", spec, "neumf")
    other = made_up_bundle(tmp_path / "other", spec, "neumf", seed=1)
    serving = Serving(folder, watch=0.05)
    try:
        wait_until_both_answer(serving)
        first = serving.score()
        for cut in (None, 100, 0):
            for file in [each for each in folder.rglob("*") if each.is_file() and each.name != "manifest.json"]:
                with file.open("r+b") as opened:
                    if cut is None:
                        opened.write((other / file.relative_to(folder)).read_bytes())
                    else:
                        opened.truncate(cut)
            assert [serving.score() for _ in range(8)] == [first] * 8
        restarts = serving.metric("recspec_worker_restarts_total")
        os.kill(serving.pids[0], signal.SIGKILL)  # the next worker begins with the content that was read before
        deadline = time.monotonic() + PATIENCE
        while serving.metric("recspec_worker_restarts_total") <= restarts or len(serving.pids) < 2:
            assert time.monotonic() < deadline
            assert serving.score() == first
        assert [serving.score() for _ in range(8)] == [first] * 8
        index = serving.ask("/v2/repository/index", {}).decode()
        assert "its SHA-256 is not the one in manifest.json" in index
        shutil.rmtree(folder)
        other.rename(folder)  # a whole new bundle is taken up again
        deadline = time.monotonic() + PATIENCE
        while len({tuple(serving.score()) for _ in range(8)} | {tuple(first)}) != 2:
            assert time.monotonic() < deadline
    finally:
        serving.stop()


def test_what_was_unloaded_stays_so_in_a_worker_that_is_started_later(serving: Serving) -> None:
    wait_until_both_answer(serving)
    serving.ask("/v2/repository/models/films/unload", {})
    try:
        restarts = serving.metric("recspec_worker_restarts_total")
        os.kill(serving.pids[0], signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE
        while serving.metric("recspec_worker_restarts_total") <= restarts or serving.metric("recspec_workers") < 2:
            assert time.monotonic() < deadline
        for _ in range(8):
            assert serving.refused("/v2/models/films/ready")[0] == 503
    finally:
        serving.ask("/v2/repository/models/films/load", {})


# --- start and end ---------------------------------------------------------------------------------------------------


def test_models_that_cannot_be_opened_are_named_and_no_worker_is_left(tmp_path: Path) -> None:
    workers = Workers(ServerOptions([Source("films", tmp_path / "nowhere")], ANY))

    async def start() -> None:
        with pytest.raises(BundleError, match="nowhere: no such folder"):
            await workers.start()

    asyncio.run(start())
    assert not workers.pids


def test_a_taken_grpc_port_is_refused_although_workers_share_theirs(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        workers = Workers(ServerOptions([Source("films", folder)], ANY.model_copy(update={"grpc_port": port})))
        with pytest.raises(SettingsError, match=f"gRPC: can't listen at 127.0.0.1:{port}"):
            asyncio.run(workers.start())


def test_without_a_token_workers_refuse_what_one_process_refuses() -> None:
    open_to_all = ANY.model_copy(update={"host": "0.0.0.0"})
    with pytest.raises(SettingsError, match="admits other machines without a token"):
        asyncio.run(Workers(ServerOptions([Source("films", Path("films"))], open_to_all)).start())


def test_a_system_that_cannot_share_ports_takes_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(SettingsError, match="--workers 2: this system can't share ports between processes; take 1"):
        asyncio.run(Workers(ServerOptions([Source("films", Path("films"))], ANY)).start())


def test_cores_are_divided_among_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("recspec.serving.workers.machine.cores_at_once", lambda: None)
    monkeypatch.setattr("recspec.serving.workers.torch.get_num_threads", lambda: 8)
    assert [threads_of_each(None, workers) for workers in (2, 3, 8, 20)] == [4, 2, 1, 1]
    assert threads_of_each(5, 2) == 5


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_supervisor_however_it_ends(folder: Path, number: signal.Signals) -> None:
    served_films = ["serve", f"films={folder}", "--http-port", "0", "--workers", "2", "--json"]
    command = [sys.executable, "-m", "recspec", *served_films]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as served:
        assert served.stdout is not None
        try:
            address = json.loads("".join(iter(served.stdout.readline, "}\n")) + "}")["http"]
            assert urllib.request.urlopen(f"{address}/v2/health/ready", timeout=PATIENCE).status == 200
            assert len(mapping(folder)) == 2
            if number is signal.SIGINT:
                os.killpg(served.pid, number)  # as a terminal does
            else:
                served.send_signal(number)
            assert served.wait(PATIENCE) == (-number if number is signal.SIGKILL else 0)
            deadline = time.monotonic() + PATIENCE
            while mapping(folder):
                assert time.monotonic() < deadline
                threading.Event().wait(0.02)
        finally:
            served.kill()


def mapping(folder: Path) -> list[int]:
    """The processes that map a bundle's weights."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            found += [int(maps.parent.name)] if f"{folder}/weights.safetensors" in maps.read_text() else []
    return found


# --- the line between two processes ----------------------------------------------------------------------------------


def lines(answer: Mapping[str, Any]) -> tuple[WorkerChannel, WorkerChannel, list[socket.socket]]:
    async def answered(what: str, value: Any) -> Any:
        found = answer[what]
        if isinstance(found, BaseException):
            raise found
        return [found, value]

    return WorkerChannel(answered), WorkerChannel(answered), list(socket.socketpair())


async def test_either_end_may_ask_and_an_error_comes_back_whole() -> None:
    one, other, ends = lines(
        {"name": "é\n", "fails": BundleError.of("x", ["first", "second"]), "breaks": KeyError("of ours")}
    )
    await one.open(ends[0])
    await other.open(ends[1])
    assert await asyncio.gather(one.ask("name", 1), other.ask("name", {"a": [2]})) == [
        ["é\n", 1],
        ["é\n", {"a": [2]}],
    ]
    with pytest.raises(BundleError) as failed:
        await one.ask("fails")
    assert failed.value.problems == ("first", "second")
    with pytest.raises(BundleError, match="KeyError: 'of ours'"):
        await other.ask("breaks")


async def test_a_question_to_a_process_that_ends_is_answered_by_that() -> None:
    never = asyncio.Event()

    async def wait(*_: object) -> None:
        await never.wait()

    one, (end, other) = WorkerChannel(wait), socket.socketpair()
    await one.open(end)
    asked = asyncio.create_task(one.ask("name"))
    await asyncio.sleep(0)
    other.close()
    with pytest.raises(Ended):
        await asked
    with pytest.raises(Ended):
        await one.ask("name")


# --- sums ------------------------------------------------------------------------------------------------------------


def test_counters_and_histograms_add_up_and_gauges_do_too_unless_they_are_of_each() -> None:
    one, other = ServerMetrics(), ServerMetrics()
    for metrics, seconds in ((one, 0.002), (other, 0.2)):
        metrics.requests.labels("http", "rank", 'a"b\\c', "200").inc(2)
        metrics.compute_seconds.labels("m").observe(seconds)
        metrics.models.set(3)
        metrics.held_bytes.set(100)
    other.rejected.labels("m", "queue").inc()
    text = summed([each.text().decode() for each in (one, other)])
    assert 'recspec_requests_total{model="a\\"b\\\\c",protocol="http",route="rank",status="200"} 4.0' in text
    assert 'recspec_compute_seconds_bucket{le="0.0025",model="m"} 1.0' in text
    assert 'recspec_compute_seconds_bucket{le="+Inf",model="m"} 2.0' in text
    assert 'recspec_compute_seconds_count{model="m"} 2.0' in text
    assert 'recspec_rejected_total{model="m",reason="queue"} 1.0' in text
    assert ("\nrecspec_models 3.0\n" in text, "\nrecspec_held_bytes 200.0\n" in text) == (True, True)
    assert summed([text]) == text, "the sum is in the format that it was read in"


def test_of_an_ended_worker_counters_stay_and_gauges_go() -> None:
    metrics = ServerMetrics()
    metrics.rows.labels("m").inc(5)
    metrics.held_bytes.set(100)
    kept = without_gauges(metrics.text().decode())
    assert 'recspec_rows_total{model="m"} 5.0' in kept
    assert "recspec_held_bytes" not in kept
    assert "recspec_models" not in kept


def test_a_worker_whose_supervisor_was_killed_asks_for_the_events_again() -> None:
    options = ServerOptions([], repository=RepositorySettings(journal="sqlite:///journal.db"))

    async def stored() -> None:
        channel = WorkerChannel(lambda *_: asyncio.sleep(0))  # never opened, as one that has ended
        writer = workers._remote_writer(options, channel)
        assert writer is not None
        await writer.store([])

    with pytest.raises(RequestError, match="the server ends; send the events again") as refused:
        asyncio.run(stored())
    assert (refused.value.status, refused.value.retry_after) == (503, 1)
