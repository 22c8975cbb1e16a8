"""Criteo: what rows become, worked by hand; vocabularies that do not peek; runs that go on after a kill."""

from __future__ import annotations

import gzip
import math
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError, SettingsError
from recspec.base.files import outputs
from recspec.data.encoding.encoder_kinds import BucketEncoder, ScaleEncoder
from recspec.data.encoding.encoders import Encoders
from recspec.data.prepare import PrepareContext, duckdb_backend, prepared, scatter
from recspec.data.storage import open_split
from recspec.data.storage.check import check
from recspec.datasets import criteo
from recspec.feature_spec import FeatureSpec
from tests import made_up_criteo

ROWS = """\
1\t1\t\ta\tx
0\t-3\t5\tb\tx
0\t-2\t0\tb\t
1\t\t2\ta\ty
0\t7\t-9\tc\tx
1\t1\t1\tb\tz
0\t9\t3\tc\tx
1\t0\t4\tnew\tx
0\t5\t\t\tz
1\t2\t8\tb\ty
"""
"""Two integers and two categories. Train is the first six rows with the shares below."""
TWO = {"num_numerical": 2, "num_categorical": 2, "shuffle": False}
SMALL: Mapping[str, object] = {**TWO, "min_count": 1, "valid": 0.2, "test": 0.2}


def write(path: Path, text: str = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def prepare(raw: Path, out: Path, *, run: Mapping[str, object] | None = None, **settings: object) -> FeatureSpec:
    given = criteo.Settings.model_validate({**SMALL, **settings})
    return criteo.prepare(PrepareContext(raw, out, **{"threads": 1, **(run or {})}), given).spec  # type: ignore[arg-type]


def column(spec: FeatureSpec, split: str, name: str) -> list[float]:
    return open_split(spec, split, [name]).read(0, 10**9)[name].tolist()


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file of a prepared folder but the one that holds the seconds."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "prepare.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def rows_of(spec: FeatureSpec, split: str) -> list[tuple[object, ...]]:
    columns = open_split(spec, split).read(0, 10**9)
    return list(zip(*(columns[name].tolist() for name in sorted(columns)), strict=True))


# --- rows ------------------------------------------------------------------------------------------------------------


def test_a_small_file_worked_by_hand(tmp_path: Path) -> None:
    spec = prepare(write(tmp_path / "train.txt"), tmp_path / "out")
    check(spec)
    # C1 of train: a b b a c b; C2: x x - y x z, of which y and z are equally frequent
    assert Encoders.load(tmp_path / "out").vocabulary_of("C1").values.to_pylist() == ["b", "a", "c"]
    assert Encoders.load(tmp_path / "out").vocabulary_of("C2").values.to_pylist() == ["x", "y", "z"]
    assert column(spec, "train", "C1") == [2, 1, 1, 2, 3, 1]
    assert column(spec, "train", "C2") == [1, 1, 0, 2, 1, 3]
    assert column(spec, "valid", "C1") == [3, 0]  # `new` was never seen in train
    assert column(spec, "test", "C1") == [0, 1]  # and a missing value has no id
    assert column(spec, "train", "label") == [1, 0, 0, 1, 0, 1]
    # ln(x + 3); missing, and -3 and less, which have no logarithm: 0
    assert column(spec, "train", "I1") == pytest.approx([math.log(4), 0, 0, 0, math.log(10), math.log(4)])
    assert column(spec, "train", "I2") == pytest.approx([0, math.log(8), math.log(3), math.log(5), 0, math.log(4)])
    assert spec.metadata["summary"] == {
        "rows": {"train": 6, "valid": 2, "test": 2},
        "left_out": 0,
        "positives": 5,
        "numbers_without_logarithm": 2,
        "changed": ["2 numbers of -3 or less have no ln(x + 3), so they count as missing"],
    }
    dtypes = {"I1": "float32", "I2": "float32", "C1": "int8", "C2": "int8", "label": "bool"}
    assert {name: feature.dtype for name, feature in spec.features.items()} == dtypes
    assert spec.role("context") == ("I1", "I2", "C1", "C2")


def test_rare_values_share_id_zero_and_columns_may_have_limits_of_their_own(tmp_path: Path) -> None:
    raw = write(tmp_path / "train.txt")
    spec = prepare(raw, tmp_path / "out", min_count=2, min_counts={"C1": 3})
    assert column(spec, "train", "C1") == [0, 1, 1, 0, 0, 1]  # b stands thrice, a twice
    assert column(spec, "train", "C2") == [1, 1, 0, 0, 1, 0]
    everything = [prepare(raw, tmp_path / f"out {least}", min_count=least) for least in (0, 1)]
    assert rows_of(everything[0], "train") == rows_of(everything[1], "train")


def test_vocabularies_do_not_peek_unless_asked_to(tmp_path: Path) -> None:
    raw = write(tmp_path / "train.txt")
    spec = prepare(raw, tmp_path / "train only")
    seen = prepare(raw, tmp_path / "all", vocabulary_from="all")
    assert spec.features["C1"].cardinality == 4
    # of all rows: b four times, a and c twice each, new once
    assert Encoders.load(tmp_path / "all").vocabulary_of("C1").values.to_pylist() == ["b", "a", "c", "new"]
    assert column(seen, "valid", "C1") == [3, 4]
    assert column(seen, "train", "C1") == column(spec, "train", "C1")


def test_serving_encodes_raw_rows_as_they_were_prepared(tmp_path: Path) -> None:
    spec = prepare(write(tmp_path / "train.txt"), tmp_path / "out", buckets=True, scale=True)
    cells = [line.split("\t") for line in ROWS.splitlines()[6:8]]
    raw = pa.table({name: [row[place] for row in cells] for place, name in enumerate(("I1", "I2", "C1", "C2"), 1)})
    for name, values in Encoders.load(tmp_path / "out").encode(raw).items():
        assert values.tolist() == pytest.approx(column(spec, "valid", name)), name  # type: ignore[union-attr]


def test_numbers_are_scaled_by_what_train_knows(tmp_path: Path) -> None:
    spec = prepare(write(tmp_path / "train.txt"), tmp_path / "out", scale=True)
    encoder = Encoders.load(tmp_path / "out").encoders["I1"]
    assert isinstance(encoder, ScaleEncoder)
    logs = np.log([4, 1, 10, 4])  # -3 has no logarithm, and one is missing: both become the mean
    assert (encoder.mean, encoder.std) == pytest.approx((logs.mean(), logs.std()))
    expected = (np.log([4, 10]) - logs.mean()) / logs.std()
    assert [column(spec, "train", "I1")[row] for row in (0, 4)] == pytest.approx(expected)
    assert [column(spec, "train", "I1")[row] for row in (1, 3)] == [0, 0]


def test_integers_are_cut_into_buckets_of_the_squared_logarithm() -> None:
    values = np.array([-2, 0, 1, 2, 3, 4, 5, 7, 8, 100])
    # floor(ln(x)^2) of 3, 4, 5, 7, 8, 100: 1, 1, 2, 3, 4, 21; the least integers there: 3, 5, 6, 8, 98
    cuts = criteo.log_squared_boundaries(values, np.ones(10, np.int64), 0)
    assert cuts == [0, 1, 2, 3, 5, 6, 8, 98]
    assert math.log(97) ** 2 < 21 <= math.log(98) ** 2
    largest = np.array([3, 2**40])
    (cut,) = criteo.log_squared_boundaries(largest, np.ones(2, np.int64), 0)
    assert math.log(cut - 1) ** 2 < math.floor(math.log(2**40) ** 2) <= math.log(cut) ** 2
    encoders = Encoders({"x": BucketEncoder(boundaries=cuts)})
    found = encoders.encode_column("x", [-9, -2, 0, 3, 4, 97, 98, None])
    assert np.asarray(found).tolist() == [1, 1, 2, 5, 5, 8, 9, 0]


def test_buckets_that_few_rows_hold_join_the_next() -> None:
    values, counts = np.array([-1, 0, 1, 2, 100]), np.array([1, 9, 4, 1, 2])
    # -1 joins 0; 1 and 2 together have 5; 100 is too rare for the last place and joins them
    assert criteo.log_squared_boundaries(values, counts, 5) == [1]
    assert criteo.log_squared_boundaries(values, counts, 3) == [1, 2]  # 1 alone; 2 and 100 together have 3
    assert criteo.log_squared_boundaries(np.zeros(0, np.int64), np.zeros(0, np.int64), 5) == []


def test_buckets_stand_beside_the_numbers(tmp_path: Path) -> None:
    spec = prepare(write(tmp_path / "train.txt"), tmp_path / "out", buckets=True)
    # I1 of train: 1 -3 -2 - 7 1
    assert column(spec, "train", "I1_bucket") == [3, 1, 2, 0, 4, 3]
    assert spec.features["I1_bucket"].cardinality == 5
    assert column(spec, "valid", "I1_bucket") == [4, 2]  # 9 as 7; 0, never seen, as what lies below 1


# --- splits ----------------------------------------------------------------------------------------------------------


def test_shares_and_counts_keep_the_order_of_time(tmp_path: Path) -> None:
    raw = write(tmp_path / "train.txt")
    labels = [[1, 0, 0, 1, 0, 1], [0, 1], [0, 1]]
    for name, given in (("shares", SMALL), ("rows", {**TWO, "rows": (6, 2, 2)})):
        context = PrepareContext(raw, tmp_path / name, threads=1)
        spec = criteo.prepare(context, criteo.Settings.model_validate(given)).spec
        assert [column(spec, split, "label") for split in ("train", "valid", "test")] == labels
    context = PrepareContext(raw, tmp_path / "more", threads=1)
    with pytest.raises(DataError, match=r"rows \[8, 2, 1\] are 11, and the data hold 10"):
        criteo.prepare(context, criteo.Settings.model_validate({**TWO, "rows": (8, 2, 1)}))


def test_rows_beyond_those_asked_for_are_left_out(tmp_path: Path) -> None:
    context = PrepareContext(write(tmp_path / "t.tsv"), tmp_path / "out", threads=1)
    made = criteo.prepare(context, criteo.Settings.model_validate({**TWO, "rows": (3, 0, 1)}))
    assert made.summary["rows"] == {"train": 3, "test": 1}
    assert made.summary["left_out"] == 6
    assert column(made.spec, "train", "label") == [1, 0, 0]
    assert column(made.spec, "test", "label") == [1]
    assert made.summary["positives"] == 2, "of the rows that were kept"
    assert made.summary["numbers_without_logarithm"] == 1, "-3 in row 2; -9 is in row 5, which is left out"


def day(*labels: int) -> str:
    return "".join(f"{label}\t{place}\t1\ta\tv{label}\n" for place, label in enumerate(labels))


def test_the_last_day_is_halved_test_first(tmp_path: Path) -> None:
    for number, text in {0: day(1, 0), 2: day(0), 10: day(1, 1, 0, 0, 1)}.items():
        write(tmp_path / "raw" / f"day_{number}{'.gz' * (number == 2)}", text)
    spec = prepare(tmp_path / "raw", tmp_path / "out")
    assert column(spec, "train", "label") == [1, 0, 0]
    assert column(spec, "test", "label") == [1, 1]
    assert column(spec, "valid", "label") == [0, 0, 1]
    assert column(spec, "test", "I1") == pytest.approx(np.log([3, 4]))


def test_days_are_chosen(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path / "raw" / f"day_{number}", day(*[number % 2] * (number + 1)))
    spec = prepare(tmp_path / "raw", tmp_path / "a", valid_days=[1], test_days=[3])
    assert spec.metadata["summary"]["rows"] == {"train": 4, "valid": 2, "test": 4}  # type: ignore[index]
    spec = prepare(tmp_path / "raw", tmp_path / "b", train_days=[0], valid_days=[2], test_days=[])
    assert spec.metadata["summary"]["rows"] == {"train": 1, "valid": 3}  # type: ignore[index]
    spec = prepare(tmp_path / "raw", tmp_path / "c", split="share")
    assert spec.metadata["summary"]["rows"] == {"train": 6, "valid": 2, "test": 2}  # type: ignore[index]
    assert column(spec, "train", "label") == [0, 1, 1, 0, 0, 0]


def test_train_rows_are_shuffled_once_and_by_the_seed(tmp_path: Path) -> None:
    raw = write(tmp_path / "train.txt", "".join(f"1\t{row}\t1\ta\tb\n" for row in range(2000)))
    plain = prepare(raw, tmp_path / "plain")
    first = prepare(raw, tmp_path / "first", shuffle=True)
    other = prepare(raw, tmp_path / "other", shuffle=True, seed=2)
    orders = [np.rint(np.exp(column(spec, "train", "I1"))).astype(int) - 3 for spec in (plain, first, other)]
    assert orders[0].tolist() == list(range(1200))
    for order in orders[1:]:
        assert sorted(order) == list(range(1200))
        assert abs(np.corrcoef(order, np.arange(1200))[0, 1]) < 0.1  # 3 standard deviations
    assert abs(np.corrcoef(orders[1], orders[2])[0, 1]) < 0.1
    for split in ("valid", "test"):
        assert rows_of(plain, split) == rows_of(first, split) == rows_of(other, split)


# --- files in and out ------------------------------------------------------------------------------------------------


def test_compressed_files_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt.gz", "c/train.txt.gz"):
        write(tmp_path / name)
    plain = prepare(tmp_path / "a.txt", tmp_path / "plain")
    prepare(tmp_path / "b.txt.gz", tmp_path / "gz")
    prepare(tmp_path / "c", tmp_path / "folder")
    assert bytes_of(plain.folder) == bytes_of(tmp_path / "gz") == bytes_of(tmp_path / "folder")


def test_split_binary_is_written_as_published(tmp_path: Path) -> None:
    raw = tmp_path / "train.txt"
    made_up_criteo.write(raw, num_rows=2000, num_numerical=2, num_categorical=3)
    spec = prepare(raw, tmp_path / "out", format="split_binary", num_categorical=3)
    check(spec)
    files = {path.name: path.stat().st_size for path in (tmp_path / "out" / "train").iterdir()}
    ids = {f"C{place}": np.dtype(spec.features[f"C{place}"].dtype).itemsize for place in (1, 2, 3)}
    assert ids == {"C1": 2, "C2": 2, "C3": 2}
    assert files == {"numerical.bin": 1200 * 2 * 2, "label.bin": 1200, **{f"{c}.bin": 1200 * n for c, n in ids.items()}}
    assert spec.features["I1"].dtype == "float16"
    assert spec.features["label"].dtype == "bool"
    same = prepare(raw, tmp_path / "parquet", num_categorical=3)
    assert column(spec, "test", "C3") == column(same, "test", "C3")
    assert column(spec, "test", "I1") == pytest.approx(column(same, "test", "I1"), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "split_binary"])
def test_rows_are_the_same_however_much_is_held_in_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up_criteo.write_days(tmp_path / "raw", [700, 900, 800])
    settings = {"num_numerical": 13, "num_categorical": 26, "min_count": 2, "shuffle": True, "format": kind}
    whole = prepare(tmp_path / "raw", tmp_path / "at once", **settings)
    monkeypatch.setattr(scatter, "BUCKET_BYTES", 20_000)  # some ten buckets
    monkeypatch.setattr(scatter, "CACHED_ROWS", 7)
    monkeypatch.setattr(criteo, "BLOCK_ROWS", 100)
    monkeypatch.setattr(criteo, "JOINED_BYTES", 1_000_000)  # so all but the smallest columns are joined on their own
    cut = prepare(tmp_path / "raw", tmp_path / "in parts", run={"memory_limit": "500MB", "threads": 2}, **settings)
    files = {split: len(list((cut.folder / split).iterdir())) for split in ("train", "valid")}
    assert (files["train"] > 3) if kind == "parquet" else (bytes_of(cut.folder) == bytes_of(whole.folder))
    for split in ("train", "valid", "test"):
        assert rows_of(cut, split) == rows_of(whole, split), split


def test_rows_that_are_lost_on_the_way_are_told(tmp_path: Path) -> None:
    made_up_criteo.write(tmp_path / "train.txt", num_rows=100)
    settings = {"num_numerical": 13, "num_categorical": 26}
    with pytest.raises(Stop):
        prepare(tmp_path / "train.txt", tmp_path / "out", run={"progress": stop_at("writing splits")}, **settings)
    (work,) = tmp_path.glob(".out*/work")
    (held,) = work.glob("buckets-0/*/train")
    (held / scatter.ENDS).unlink()
    with pytest.raises(DataError, match=r"40 of the 100 encoded rows are in .*work; remove that folder"):
        prepare(tmp_path / "train.txt", tmp_path / "out", **settings)


def test_rows_may_have_numbers_or_categories_alone(tmp_path: Path) -> None:
    alone = {"num_numerical": 1, "num_categorical": 0, "valid": 0, "test": 0}
    spec = prepare(write(tmp_path / "a", "1\t2\n0\t3\n"), tmp_path / "1", **alone)
    assert spec.role("context") == ("I1",)
    alone |= {"num_numerical": 0, "num_categorical": 1}
    spec = prepare(write(tmp_path / "b", "1\tx\n0\t\n"), tmp_path / "2", **alone)
    assert column(spec, "train", "C1") == [1, 0]


# --- going on after an end -------------------------------------------------------------------------------------------

STAGES = ("reading rows", "finding ids", "encoding rows", "writing splits")


class Stop(Exception):
    """Stands for whatever ends a process."""


def stop_at(stage: str) -> Callable[[str, int, int | None], None]:
    def progress(now: str, done: int, total: int | None) -> None:
        if now == stage and done == total:
            raise Stop

    return progress


RESUMED = {"num_numerical": 13, "num_categorical": 6, "shuffle": True, "buckets": True, "scale": True}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    """What a run that nothing ends leaves, and beside it the raw files."""
    folder = tmp_path_factory.mktemp("whole")
    for day, rows in enumerate((300, 200)):
        made_up_criteo.write(folder / "raw" / f"day_{day}", num_rows=rows, seed=day, num_categorical=6)
    return prepare(folder / "raw", folder / "out", **RESUMED)


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_ended_goes_on_where_it_was(
    stage: str, whole: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = whole.folder.parent / "raw"
    with pytest.raises(Stop) as caught:
        prepare(raw, tmp_path / "out", run={"progress": stop_at(stage)}, **RESUMED)
    unfinished = tmp_path / ".out.unfinished.tmp"
    (note,) = caught.value.__notes__
    assert note == (
        f"Nothing was lost: {tmp_path / 'out'} is as it was before. What is finished lies in {unfinished}: "
        "the same command goes on from there."
    )
    assert not (tmp_path / "out").exists()

    def read(*_: object) -> None:
        raise AssertionError("the raw files were read once and need not be read again")

    monkeypatch.setattr(duckdb_backend.DuckDBBackend, "read_text", read)
    remarks: list[str] = []

    def note_remarks(now: str, done: int, total: int | None) -> None:  # noqa: ARG001
        remarks.extend([now] if isinstance(now, prepared.Remark) else [])

    settings = criteo.Settings.model_validate({**SMALL, **RESUMED})
    made = criteo.prepare(PrepareContext(raw, tmp_path / "out", threads=1, progress=note_remarks), settings)
    held = {
        "encoding rows": "within stage 'encoding rows', of which 1 of 2 parts are there",  # all but the last file
        "writing splits": "after stage 'encoding rows'",
    }.get(stage, f"after stage '{stage}'")
    assert remarks == [f"continuing {held}"]
    assert made.message == f"prepared criteo in {tmp_path / 'out'}, continuing {held}"
    assert "seconds" not in made.summary
    assert isinstance(made.summary["seconds of the last run"], float)
    again = made.spec
    assert again == whole.replace(folder=again.folder)
    assert bytes_of(tmp_path / "out") == bytes_of(whole.folder)
    assert not list(tmp_path.glob(".*"))


def test_a_killed_process_loses_its_last_stage_and_no_more(tmp_path: Path) -> None:
    made_up_criteo.write(tmp_path / "train.txt", num_rows=400, num_numerical=2, num_categorical=4)
    code = """
import os, signal, sys
from pathlib import Path
from recspec.datasets import criteo
from recspec.data.prepare import PrepareContext

def progress(stage, done, total):
    if stage == "encoding rows":
        os.kill(os.getpid(), signal.SIGKILL)

folder = Path(sys.argv[1])
context = PrepareContext(folder / "train.txt", folder / "out", threads=1, progress=progress)
criteo.prepare(context, criteo.Settings(num_numerical=2, num_categorical=4))
"""
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    work = tmp_path / ".out.unfinished.tmp" / "work"
    before = {path: path.stat().st_mtime_ns for path in [work / "rows-0.parquet", *(work / "vocabularies").iterdir()]}
    assert len(before) == 5
    stages = []
    settings = criteo.Settings(num_numerical=2, num_categorical=4)

    def progress(stage: str, done: int, total: int | None) -> None:  # noqa: ARG001
        stages.append(stage)
        if stage == "encoding rows":
            assert {path: path.stat().st_mtime_ns for path in before} == before

    criteo.prepare(PrepareContext(tmp_path / "train.txt", tmp_path / "out", threads=1, progress=progress), settings)
    assert "encoding rows" in stages
    criteo.prepare(PrepareContext(tmp_path / "train.txt", tmp_path / "whole", threads=1), settings)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


def test_a_run_that_ended_within_a_stage_says_how_much_of_it_is_there(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / "raw" / f"day_{number}", day(1, 0))
    told: list[str] = []

    def stop_in_the_third(now: str, done: int, total: int | None) -> None:
        told.append(now)
        if now == "reading rows" and total is not None and done == total * 2 // 3:
            raise Stop

    with pytest.raises(Stop):
        prepare(tmp_path / "raw", tmp_path / "out", run={"progress": stop_in_the_third})
    assert not any(isinstance(now, prepared.Remark) for now in told), "there was nothing to continue"
    prepare(tmp_path / "raw", tmp_path / "out", run={"progress": lambda now, *_: told.append(now)})
    assert "continuing within stage 'reading rows', of which 2 of 3 parts are there" in told


def test_another_job_starts_anew(tmp_path: Path) -> None:
    raw = write(tmp_path / "train.txt")
    for change in ({}, {"min_count": 2}):
        with pytest.raises(Stop):
            prepare(raw, tmp_path / "out", run={"progress": stop_at("encoding rows")}, **change)
    spec = prepare(raw, tmp_path / "out")
    assert column(spec, "train", "C1") == [2, 1, 1, 2, 3, 1]
    assert bytes_of(tmp_path / "out") == bytes_of(prepare(raw, tmp_path / "fresh").folder)


def test_two_processes_do_not_prepare_one_folder(tmp_path: Path) -> None:
    raw = write(tmp_path / "train.txt")
    with pytest.raises(Stop):
        prepare(raw, tmp_path / "out", run={"progress": stop_at("encoding rows")})
    work = tmp_path / ".out.unfinished.tmp" / "work"
    with (
        outputs.locked(tmp_path / "out", "preparing"),
        pytest.raises(DataError, match="out: another process is preparing it; wait for it, end it, or name another"),
    ):
        prepare(raw, tmp_path / "out")
    assert (work / "rows-0.parquet").exists()


def test_an_earlier_result_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    raw = write(tmp_path / "train.txt")
    prepare(raw, tmp_path / "out")
    before = bytes_of(tmp_path / "out")
    with pytest.raises(Stop):
        prepare(raw, tmp_path / "out", run={"force": True, "progress": stop_at("writing splits")}, min_count=2)
    assert bytes_of(tmp_path / "out") == before
    prepare(raw, tmp_path / "out", run={"force": True}, min_count=2)
    assert bytes_of(tmp_path / "out") != before


def test_malformed_data_leave_no_trace(tmp_path: Path) -> None:
    raw = write(tmp_path / "train.txt", ROWS + "2\t1\t1\ta\ta\n")
    with pytest.raises(DataError) as caught:
        prepare(raw, tmp_path / "out")
    assert caught.value.__notes__ == [f"Nothing was lost: {tmp_path / 'out'} is as it was before."]
    assert [path.name for path in tmp_path.iterdir()] == ["train.txt"]


def test_a_job_that_can_be_resumed_says_which_engine_made_its_stages(tmp_path: Path) -> None:
    def build(folder: Path) -> FeatureSpec:
        (folder / "work" / "mine").touch()
        raise Stop

    for engine, other in pairwise(("duckdb", "duckdb", "spark")):
        with pytest.raises(Stop):
            resume(tmp_path, engine, build)
        assert (tmp_path / ".out.unfinished.tmp" / "work" / "mine").exists()
        if other != engine:
            with pytest.raises(Stop):
                resume(tmp_path, other, _is_fresh)


def resume(folder: Path, engine: str, build: Callable[[Path], FeatureSpec]) -> None:
    context = PrepareContext(Path(), folder / "out", engine)
    prepared.run(context, "criteo", criteo.Settings(), [], build, resumable=True)


def _is_fresh(folder: Path) -> FeatureSpec:
    assert not (folder / "work" / "mine").exists()
    raise Stop


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,1,1,a,b\n", r"separates columns by ','; Criteo's own .*`recspec prepare table .* OUT` reads"),
        ("label\tI1\tI2\tC1\tC2\n1\t1\t1\ta\tb\n", r"begins with a header; .*`recspec prepare table .* OUT` reads"),
        ("1\t1\t1\ta\n", r"has 4 columns, separated by tabs; expected 5: the label, 2 integers and 2 categories; set"),
        ("", "is empty, or starts with an empty line; expected rows"),
        (ROWS + "1\t1\t1\ta\n", r"line 11: has 4 columns, expected 5 separated by '\\t'"),
        (ROWS + "1\t1.5\t1\ta\tb\n", r"line 11: column 'I1' is '1.5'; expected a whole number"),
        (ROWS + "\t1\t1\ta\tb\n", r"line 11: column 'label' has no value; expected one in every row"),
        (ROWS + "2\t1\t1\ta\tb\n-1\t\t\t\t\n", r"2 problems\n  - line 11: the label is 2; .*\n  - line 12: "),
        (ROWS + "3\t1\t1\ta\tb\n" * 12, r"12 labels are wrong, the first of them: 10 problems\n  - line 11: the la"),
        (
            "7\t1\t1\ta\tb\n" + ROWS + "1\t1\t1\ta\n-1\t\t\t\t\nno\t\t\t\t\n",
            (
                r"4 problems\n  - line 1: the label is 7; expected 0 or 1\n  - line 12: has 4 columns, .*"
                r"\n  - line 13: the label is -1; expected 0 or 1\n  - line 14: column 'label' is 'no'; expected a"
            ),
        ),
    ],
)
def test_malformed_files_are_told(text: str, message: str, tmp_path: Path) -> None:
    raw = write(tmp_path / "train.txt", text)
    with pytest.raises(DataError, match=message) as caught:
        prepare(raw, tmp_path / "out")
    assert str(raw) in str(caught.value)


def test_files_that_are_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file or folder; expected Kaggle's train\.txt, or a folder of day_0"):
        prepare(tmp_path / "nowhere", tmp_path / "out")
    write(tmp_path / "raw" / "trian.txt")
    with pytest.raises(DataError, match=r"expected train\.txt, or day_0 to day_23, each plain or \.gz; found 'trian"):
        prepare(tmp_path / "raw", tmp_path / "out")
    for name in ("day_0", "day_0.gz", "day_1"):
        write(tmp_path / "raw" / name)
    with pytest.raises(DataError, match=r"'day_0', 'day_0\.gz' are one day; keep one of them"):
        prepare(tmp_path / "raw", tmp_path / "out")
    (tmp_path / "raw" / "day_0").unlink()
    with pytest.raises(SettingsError, match="no file of days 5, 7; found days 0, 1"):
        prepare(tmp_path / "raw", tmp_path / "out", valid_days=[5], test_days=[7])
    with pytest.raises(SettingsError, match="is one file; a split by days takes a folder of day_0, day_1"):
        prepare(tmp_path / "raw" / "day_1", tmp_path / "out", split="days")


def test_a_single_day_leaves_nothing_to_train_on(tmp_path: Path) -> None:
    write(tmp_path / "raw" / "day_3")
    told = (
        r"raw: no row is for training: day 3 is for valid and test, and there is no other; add days, or set split=share"
    )
    with pytest.raises(DataError, match=told):
        prepare(tmp_path / "raw", tmp_path / "out")
    assert prepare(tmp_path / "raw", tmp_path / "out", split="share").splits == ("train", "valid", "test")
    write(tmp_path / "raw" / "day_4")
    with pytest.raises(DataError, match="no row is for training: days 3, 4 are for valid and test, and there is no"):
        prepare(tmp_path / "raw", tmp_path / "other", valid_days=[3], test_days=[4])


def test_rows_of_a_folder_of_days_are_refused_unless_a_split_by_rows_is_asked_for(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / "raw" / f"day_{number}", day(1, 0))
    given = {"num_numerical": 2, "num_categorical": 2, "rows": (3, 1, 2)}
    told = "is a folder of days, which are split by days, and rows cuts by counts of rows; set split=share to cut all"
    with pytest.raises(SettingsError, match=told):
        criteo.prepare(PrepareContext(tmp_path / "raw", tmp_path / "out"), criteo.Settings.model_validate(given))
    asked = criteo.Settings.model_validate({**given, "split": "share"})
    made = criteo.prepare(PrepareContext(tmp_path / "raw", tmp_path / "out", threads=1), asked)
    assert made.summary["rows"] == {"train": 3, "valid": 1, "test": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_counts": {"C27": 3}}, "unknown column in min_counts 'C27' .did you mean 'C7"),
        ({"min_counts": {"C1": -3}}, "min_counts: C1: -3 is below 0"),
        ({"num_numerical": 0, "num_categorical": 0}, "a row needs a feature"),
        ({"valid": 0.5, "test": 0.5}, "valid and test take 1 of the rows; leave some for train"),
        ({"rows": [5, 1, 1], "valid": 0.2}, "rows stand in place of the shares valid and test"),
        ({"rows": [0, 1, 1]}, r"\[0, 1, 1\]: train needs a row, and no count may be below 0"),
        ({"rows": [5, 1, 1], "split": "days"}, "rows are of a split by rows; leave out split: days"),
        ({"split": "share", "train_days": [1]}, "'train_days' go with split days, not with shares or rows"),
        ({"valid_days": [1]}, "valid_days and test_days go together; give both"),
        ({"train_days": [1, 2], "valid_days": [2], "test_days": [3]}, "days 2 are for train and for valid or test"),
    ],
)
def test_settings_that_do_not_go_together_are_said(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        criteo.Settings.model_validate(settings)


# --- real data -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_sample_is_split_as_measured(tmp_path: Path, real_data: Callable[[str], Path]) -> None:
    raw = real_data("criteo-kaggle") / "train_first80k.tsv"
    settings = criteo.Settings(rows=(50_000, 10_000, 20_000), min_count=2, buckets=True)
    made = criteo.prepare(PrepareContext(raw, tmp_path / "out", threads=1), settings)
    assert made.summary["rows"] == {"train": 50_000, "valid": 10_000, "test": 20_000}
    lines = [line.split("\t") for line in raw.read_text().splitlines()]
    assert column(made.spec, "test", "label") == [int(row[0]) for row in lines[60_000:]]
    counts = Counter(row[14] for row in lines[:50_000])
    kept = sorted((value for value, count in counts.items() if count >= 2), key=lambda value: (-counts[value], value))
    ids = {value: number for number, value in enumerate(kept, 1)}
    assert column(made.spec, "test", "C1") == [ids.get(row[14], 0) for row in lines[60_000:]]


# --- Spark -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_spark_prepares_the_same_rows_of_days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs a command `java`")
    made_up_criteo.write_days(tmp_path / "raw", [900, 700], suffix=".gz")
    settings = {**RESUMED, "num_categorical": 26, "min_count": 3}
    prepare(tmp_path / "raw", tmp_path / "duckdb", **settings)
    run = {"engine": "spark", "threads": 2, "progress": stop_at("finding ids")}
    with pytest.raises(Stop):
        prepare(tmp_path / "raw", tmp_path / "spark", run=run, **settings)
    monkeypatch.setenv("SPARK_MASTER", "local[2]")  # as on a cluster, whose settings are left alone
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    prepare(tmp_path / "raw", tmp_path / "spark", run={"engine": "spark"}, **settings)
    assert bytes_of(tmp_path / "spark") == bytes_of(tmp_path / "duckdb")
    assert pq.read_metadata(tmp_path / "spark" / "vocabularies" / "C1.parquet").num_columns == 1
