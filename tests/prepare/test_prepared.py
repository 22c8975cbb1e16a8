"""The prepared folder: interrupted, foreign, changed and abandoned ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recspec.base.errors import DataError
from recspec.data.prepare import PrepareContext
from recspec.datasets import DATASETS
from tests.dataset_cases import CASES, bytes_of, prepare_movielens, run, write_latest


def test_an_interrupted_run_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    raw = write_latest(tmp_path / "raw")
    prepare_movielens(raw, tmp_path / "out")
    before = bytes_of(tmp_path / "out")

    def interrupt(stage: str, done: int, total: int | None) -> None:  # noqa: ARG001
        if stage == "writing splits":
            raise KeyboardInterrupt

    dataset = DATASETS["movielens"]
    with pytest.raises(KeyboardInterrupt) as caught:
        dataset.prepare(
            PrepareContext(raw, tmp_path / "out", force=True, progress=interrupt, threads=1), dataset.Settings()
        )
    assert caught.value.__notes__ == [f"Nothing was lost: {tmp_path / 'out'} is as it was before."]
    assert bytes_of(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw"]


def test_a_folder_that_recspec_did_not_prepare_is_never_replaced(tmp_path: Path) -> None:
    raw = write_latest(tmp_path / "raw")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="is not a dataset that recspec prepared; name another place"):
        run(CASES["movielens-latest"], raw, tmp_path / "out", force=True)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    prepare_movielens(write_latest(tmp_path / "raw"), tmp_path / "out")
    assert (tmp_path / "out" / "feature_spec.yaml").is_file()


def test_a_raw_file_whose_name_is_not_utf_8_is_refused_before_the_work(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / os.fsdecode(b"\xff.csv")).write_text("user_id,item_id\n1,2\n")
    context = PrepareContext(raw, tmp_path / "out", progress=lambda *_: pytest.fail("the work began"), threads=1)
    with pytest.raises(DataError, match=r"a raw file: the name '.*\\udcff.csv' holds bytes that are not UTF-8;"):
        DATASETS["table"].prepare(context, DATASETS["table"].Settings(timestamp=None))
    assert not (tmp_path / "out").exists()


def test_changed_raw_files_are_noticed(tmp_path: Path) -> None:
    raw = write_latest(tmp_path / "raw")
    prepare_movielens(raw, tmp_path / "out")
    with (raw / "ratings.csv").open("a") as file:
        file.write("3,40,1,1\n")
    with pytest.raises(DataError, match="inputs: the raw files are not the same"):
        prepare_movielens(raw, tmp_path / "out")


def test_what_a_killed_run_left_is_cleared_away(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    number = dead.stdout.decode().strip()
    (tmp_path / f".out.{number}.tmp" / "work").mkdir(parents=True)
    (tmp_path / ".out.backup.tmp").mkdir()
    prepare_movielens(write_latest(tmp_path / "raw"), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.backup.tmp", "out", "raw"]


def test_a_run_killed_between_its_two_renames_loses_nothing(tmp_path: Path) -> None:
    raw = write_latest(tmp_path / "raw")
    prepare_movielens(raw, tmp_path / "out")
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (tmp_path / "out").rename(tmp_path / f".out.{dead.stdout.decode().strip()}.old.tmp")
    assert prepare_movielens(raw, tmp_path / "out").message.startswith("already prepared")
