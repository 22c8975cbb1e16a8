"""What is written is whole or not there, one writer at a time."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from recspec.base.errors import DataError, SettingsError, of_the_machine
from recspec.base.files import outputs
from recspec.cli import app as cli
from recspec.data.prepare import PrepareContext
from recspec.data.storage import synthesize, transcode
from recspec.datasets import DATASETS
from recspec.models import MODELS
from recspec.tf_import.wide_deep import import_tf
from recspec.training.loop import train
from recspec.training.settings import TrainSettings
from tests import made_up

HOLDER = """
import sys, time
from pathlib import Path
from recspec.base.files import outputs
with getattr(outputs, sys.argv[1])(Path(sys.argv[2]), "writing"):
    print("held", flush=True)
    time.sleep(600)
"""


def a_holder(how: str, out: Path) -> subprocess.Popen[str]:
    """Another process that holds a lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, how, str(out)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("how", ["locked", "locked_inside"])
def test_a_second_writer_is_told_at_once_and_a_killed_one_leaves_no_lock(how: str, tmp_path: Path) -> None:
    lock, out = getattr(outputs, how), tmp_path / "deep" / "out"
    process = a_holder(how, out)
    try:
        told = "out: another process is preparing it; wait for it, end it, or name another folder"
        with pytest.raises(DataError, match=told), lock(out, "preparing"):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with lock(out, "preparing"):
        assert outputs.is_locked(out) == (how == "locked")
    assert not list(out.parent.glob("**/*lock*")), "the lock is gone with its holder"


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with suppress(ZeroDivisionError), outputs.whole_folder(out) as folder:
        (folder / "half").write_text("half")
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == [], "nor a parent that was made for it"
    for text in ("first", "second"):
        with outputs.whole_folder(out) as folder:
            (folder / text).write_text(text)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["second"]


def test_what_a_broken_rename_took_away_comes_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "before").touch()
    with pytest.raises(FileNotFoundError):
        outputs.put_in_place(tmp_path / "gone", out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["before"]


@pytest.mark.parametrize("how", ["beside", "inside"])
def test_the_next_writer_removes_what_a_killed_one_left(how: str, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / ".other.0123456789abcdef.tmp"
    for left in (outputs.temporary_name(out), other):
        left.mkdir()
        (left / "half").touch()
    before = outputs.hidden_sibling(out, "0123456789abcdef.old.tmp")  # a kill between the two renames
    before.mkdir()
    (before / "whole").touch()
    locks = outputs.locked(out, "writing"), outputs.locked_inside(tmp_path, "writing", holds="out")
    with locks[how == "inside"]:
        assert [path.name for path in out.iterdir()] == ["whole"]
    assert sorted(tmp_path.iterdir()) == [other, out], "what another writer may still write stays"


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    out.write_text("before")
    with suppress(ZeroDivisionError), outputs.whole_file(out) as file:
        file.write_text("half")
        _ = 1 / 0
    assert (out.read_text(), len(list(tmp_path.iterdir()))) == ("before", 1)


def test_a_device_is_never_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    with (
        pytest.raises(SettingsError, match="is there and is no regular file"),
        outputs.whole_file(tmp_path / "pipe.csv"),
    ):
        pass


def test_every_writer_refuses_a_folder_that_another_one_writes(tmp_path: Path) -> None:
    spec = made_up.interactions(tmp_path / "data", num_rows=300)
    settings = MODELS["neumf"].Settings.model_validate({"factors": 4, "layers": (8, 4)})
    out, synthetic = tmp_path / "out", DATASETS["synthetic"]
    writers: list[Callable[[], object]] = [
        lambda: synthetic.prepare(PrepareContext(Path(), out), synthetic.Settings(num_rows=300)),
        lambda: transcode(spec, out),
        lambda: synthesize(spec, out, 5),
        lambda: import_tf(tmp_path, out, tmp_path / "columns.json"),
    ]
    for write in writers:
        with outputs.locked(out, "writing"), pytest.raises(DataError, match=r"out: another process is .* it; wait for"):
            write()
        assert not out.exists()
    run = tmp_path / "run"
    with outputs.locked_inside(run, "training in"):
        for resume in (False, True):
            with pytest.raises(DataError, match="another process is training in it"):
                train("neumf", spec, run, settings=TrainSettings(), model_settings=settings, resume=resume)


# --- what the machine refuses ----------------------------------------------------------------------------------------

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process: its exit status and what it says on standard error."""

    def run(*arguments: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["recspec", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, capsys.readouterr().err

    return run


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that is full as soon as a file holds so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up.interactions(tmp_path_factory.mktemp("outputs") / "data", num_rows=9000).folder


@pytest.mark.parametrize(
    "command",
    [
        ["prepare", "synthetic", "-", "OUT"],
        ["transcode", "DATA", "OUT", "--to", "csv"],
        ["synthesize", "DATA", "OUT", "--rows", "20000"],
        ["train", "neumf", "DATA", "OUT", "--set", "epochs=1", "--set", "factors=64", "--set", "tensorboard=no"],
    ],
    ids=lambda command: command[0],
)
def test_a_full_disk_is_one_message_and_nothing_half_written(
    command: list[str], data: Path, run: Command, tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "out"
    places = {"OUT": out, "DATA": data}
    with files_of_at_most(20_000):
        status, told = run(*(places.get(each, each) for each in command))
    assert status == 2
    assert "File too large" in told
    assert len([line for line in told.splitlines() if line.startswith("error: ")]) == 1
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left <= ({"log.jsonl", "run.json"} if command[0] == "train" else set()), "no temporary file stays"
    assert command[0] == "train" or list(tmp_path.iterdir()) == [], "and no folder"


@pytest.mark.parametrize("command", ["prepare", "transcode", "synthesize", "train", "import-tf", "tune"])
def test_a_parent_that_is_a_file_is_one_message(command: str, data: Path, run: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out"
    (tmp_path / "columns.json").write_text("{}")
    arguments: dict[str, list[str | Path]] = {
        "prepare": ["synthetic", "-", out],
        "transcode": [data, out],
        "synthesize": [data, out],
        "train": ["neumf", data, out],
        "import-tf": [tmp_path, out, "--columns", tmp_path / "columns.json"],
        "tune": ["neumf", data, out, "--trials", "1"],
    }
    status, told = run(command, *arguments[command])
    assert status == 2
    assert f"error: {tmp_path / 'file'}" in told


def test_errors_of_the_machine_are_told_from_mistakes_of_ours() -> None:
    assert of_the_machine(OSError(28, "No space left on device", "/a/b")) == "/a/b: No space left on device"
    assert of_the_machine(OSError(30, "Read-only file system", "a", None, "b")) == "a -> b: Read-only file system"
    assert of_the_machine(PermissionError(13, "Permission denied", "x")) == "x: Permission denied"
    assert of_the_machine(RuntimeError("Io error: No space left on device (os error 28)")) is not None
    assert of_the_machine(MemoryError()) is not None
    wrapped = ValueError("odd")
    wrapped.__cause__ = OSError(28, "No space left on device")
    assert of_the_machine(wrapped) == "No space left on device"
    for ours in (ValueError("odd"), TypeError("a bug"), KeyError("x"), AssertionError()):
        assert of_the_machine(ours) is None


def test_a_full_disk_is_told_with_the_file_that_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="space") as caught, outputs.whole_file(tmp_path / "a.csv"):
        raise OSError(28, "No space left on device")
    assert of_the_machine(caught.value) == f"{tmp_path / 'a.csv'}: No space left on device"
