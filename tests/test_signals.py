"""Signals to stop: noticed while a library computes, and at once where there is no checkpoint to go on from."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

import recspec as rs
from recspec.base.errors import Interrupted
from recspec.base.signals import handled, stopping_at_once
from recspec.models import MODELS, FittedItemModel
from tests import made_up
from tests.processes import Running

COMPUTES = """
import hashlib, sys, threading, time
from pathlib import Path
from recspec.api import stop_on_signal
from recspec.cli import process

def ready():  # once the main thread has computed for longer than it needs to get there
    clock = time.pthread_getcpuclockid(threading.main_thread().ident)
    until = time.clock_gettime(clock) + 0.2
    while time.clock_gettime(clock) < until:
        time.sleep(0.01)
    Path(sys.argv[1]).touch()

process.NOTICE_SECONDS = 0.05
with process.ended_like_ctrl_c(), stop_on_signal():
    threading.Thread(target=ready, daemon=True).start()
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2**31 - 1)  # runs no instruction of Python's for half an hour
"""
NOTICES = """
import sys, threading, time
from pathlib import Path
from recspec.api import stop_on_signal
from recspec.cli import process

process.NOTICE_SECONDS = 60
noticed, wait = [], threading.Event.wait

def recorded(event, seconds=None):
    within = wait(event, seconds)
    if seconds == process.NOTICE_SECONDS:
        noticed.append(within)
    return within

threading.Event.wait = recorded
with process.ended_like_ctrl_c(), stop_on_signal() as asked:
    Path(sys.argv[1]).touch()
    while not (asked() and noticed):
        time.sleep(0.01)
sys.exit(noticed != [True])
"""


def asked_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(60)


@pytest.mark.parametrize(("code", "status"), [(COMPUTES, 130), (NOTICES, 0)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_ends_by_force_only_if_its_handler_can_not_run(
    code: str, status: int, number: signal.Signals, tmp_path: Path
) -> None:
    process = Running(code, str(tmp_path / "ready"))
    while not (tmp_path / "ready").exists():
        assert process.runs, process.ended().stderr
        time.sleep(0.01)
    os.kill(process.pid, number)
    done = process.ended()
    assert done.returncode == status
    forced = "stopped as asked, in the middle of a computation; what was not finished does not count\n"
    assert done.stderr == (forced if status else "")


def test_a_block_that_can_not_go_on_stops_at_once_and_earlier_handlers_are_called_and_come_back() -> None:
    told: list[int] = []
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)]
    with handled(lambda number, _: told.append(number)):
        with pytest.raises(Interrupted, match="stopped here"), stopping_at_once("stopped here"):
            asked_to_stop()
        with stopping_at_once("not said", patience=60):  # the block ends in time
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted, match="stopped later"), stopping_at_once("stopped later", patience=0.01):
            asked_to_stop()
        os.kill(os.getpid(), signal.SIGTERM)
    assert told == [signal.SIGTERM] * 4
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_in_another_thread_nothing_is_changed() -> None:
    before, found = signal.getsignal(signal.SIGTERM), []

    def body() -> None:
        with handled(lambda *_: None), stopping_at_once("not said"):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [before]


FITTED = [name for name, kind in MODELS.items() if issubclass(kind, FittedItemModel)]


@pytest.mark.parametrize("name", FITTED)
def test_a_fit_stops_at_once_and_leaves_no_bundle(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODELS[name], "_fit", lambda *_, **__: asked_to_stop())
    data = made_up.interactions(tmp_path / "data", num_rows=300)
    run = tmp_path / "run"
    with pytest.raises(Interrupted, match="stopped as asked; nothing was written, so start the same command again"):
        rs.train(name, data.folder, run)
    events = [json.loads(line)["event"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert events[-1] == "interrupted"
    assert not (run / "bundle").exists()
    monkeypatch.undo()
    rs.train("popularity", data.folder, run)
    assert (run / "bundle" / "bundle.json").is_file()


def test_a_plan_stops_at_once_and_leaves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODELS["neumf"], "defaults", lambda *_, **__: asked_to_stop())
    data = made_up.interactions(tmp_path / "data", num_rows=300)
    with pytest.raises(Interrupted, match="stopped as asked before training began; start the same command again"):
        rs.train("neumf", data.folder, tmp_path / "run")
    assert not (tmp_path / "run" / "bundle").exists()
