"""The log of a run: its lines, and a disk that takes no more of them."""

import json
from pathlib import Path

import pytest

from recspec.base.errors import TrainingError
from recspec.training.run_folder import Event, RunLog


def test_the_first_rank_writes_and_tells_each_event_and_the_others_nothing(tmp_path: Path) -> None:
    told: list[Event] = []
    for is_first in (False, True):
        log = RunLog(tmp_path, told.append, tensorboard=False)
        if is_first:
            log.open()
        log.write("note", message="something to know")
        log.write("step", step=3, loss=0.5)
        log.close()
        log.write("step", step=4, loss=0.4)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == told
    assert [(line["event"], line.get("message"), line.get("step")) for line in lines] == [
        ("note", "something to know", None),
        ("step", None, 3),
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file on a disk that is always full is Linux's")
def test_a_full_disk_is_told_with_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    log = RunLog(tmp_path, lambda _: None, tensorboard=False)
    log.open()
    with pytest.raises(TrainingError) as caught:
        log.write("step", step=1)
    assert str(caught.value) == (
        f"{tmp_path}: the log could not be written: [Errno 28] No space left on device; make room, and the same "
        "command with --resume continues from the last checkpoint"
    )
    log.close()


def test_a_folder_that_is_not_there_is_told_too(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "gone", lambda _: None, tensorboard=False)
    with pytest.raises(TrainingError, match=r"the log could not be written: .*No such file or directory"):
        log.open()
    log.close()
