"""Spark: the rows of DuckDB on data of several part files, whatever files and folders are called.

A session takes seconds to start, so the quick tests ask much of each. The slow ones ask every registered dataset, with
more than 100,000 rows.
"""

from __future__ import annotations

import gzip
import json
import operator
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import ibis
import ibis.expr.operations as ops
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

from recspec.base.errors import DataError
from recspec.data.encoding import Vocabulary
from recspec.data.prepare import Roles, interaction_rows, interactions
from recspec.data.prepare.backend import Backend, Part, Share, count_rows, fetch
from recspec.data.prepare.names import Notes
from recspec.data.prepare.raw_files import stage
from recspec.data.prepare.raw_rows import Reading
from recspec.data.prepare.spark_backend import SparkBackend, _parts
from recspec.data.prepare.splits import by_time
from recspec.data.prepare.text_files import ROW, ColumnType, JsonFile, TextFile
from recspec.datasets import DATASETS
from tests import made_up_amazon, made_up_criteo, made_up_outbrain
from tests.dataset_cases import ADULT, CASES, MOVIES, TABLE_COLUMNS, Case, bytes_of, run, write_latest
from tests.made_up_films import write_movielens_like
from tests.prepare.same_rows import same_dataset
from tests.prepare.small_tables import connect, read
from tests.prepare.test_duckdb_backend import COLUMNS, MALFORMED, OBJECTS, READ_OBJECTS, written

WRITE_PART = interactions._write_part
PATTERNS = ("userId=1", "data[1]", "a*", "?", "{a,b}", "%20", "a%2Fb", "c:d", "s3:", "x,y", "a=1=2", "a=", "=")
ODD = ("it's", 'double"quote', "sp ace ", "é☃", "-leading", "back\\slash", "tab\t", "new\nline", "$HOME", "~", "`;|&")
HOSTILE = (*PATTERNS, *ODD, "_hidden", ".hidden", "#part", "copied._COPYING_")


@pytest.fixture(autouse=True)
def _java() -> None:
    pytest.importorskip("pyspark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs a command `java`")


@pytest.fixture
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """Makes Spark cut all it reads and writes; holds the sizes of the part files of every table it wrote, in bytes."""
    found: list[list[int]] = []
    start, write = SparkBackend.__init__, SparkBackend._write

    def started(self: SparkBackend, *arguments: Any) -> None:
        start(self, *arguments)
        for name, value in (
            ("spark.sql.files.maxPartitionBytes", "1000000" if request.node.get_closest_marker("slow") else "50000"),
            ("spark.sql.shuffle.partitions", "3"),
            ("spark.sql.adaptive.coalescePartitions.enabled", "false"),
        ):
            self._session.conf.set(name, value)

    def written(self: SparkBackend, table: Any, by: Sequence[str] = ()) -> Path:
        folder = write(self, table, by)
        found.append([path.stat().st_size for path in _parts(folder)])
        return folder

    monkeypatch.setattr(SparkBackend, "__init__", started)
    monkeypatch.setattr(SparkBackend, "_write", written)
    yield found
    assert any(len(sizes) > 2 and sizes != sorted(sizes, reverse=True) for sizes in found), (
        f"no table had three parts that Spark would read out of their order: {found}"
    )


def same_rows(case: Case, raw: Path, folder: Path) -> None:
    """Prepares with both engines; the splits and users hold the same rows, and every other file is the same."""
    run(case, raw, folder / "duckdb", threads=2)
    run(case, raw, folder / "spark", engine="spark", threads=2)
    same_dataset(folder / "duckdb", folder / "spark")


# --- order -----------------------------------------------------------------------------------------------------------


def many_ratings(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    seen = [(user, movie) for user in rng.permutation(900).tolist() for movie in MOVIES if rng.random() < 0.8]
    return write_latest(folder, [(user, movie, 4.0, int(rng.integers(10**9, 10**9 + 500))) for user, movie in seen])


@pytest.mark.slow
@pytest.mark.usefixtures("parts")
def test_executors_write_the_rows_of_duckdb_and_the_driver_reads_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except the pairs of `seen.parquet`, which the driver copies in blocks, because they are one file."""
    fetched: list[int] = []
    batches = SparkBackend.batches

    def counted(self: SparkBackend, table: Any, rows: int = 65_536) -> Iterator[pa.RecordBatch]:
        for batch in batches(self, table, rows):
            if batch.schema.names != ["user_id", "item_id", "split"]:
                fetched.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(SparkBackend, "batches", counted)
    raw = many_ratings(tmp_path / "raw")
    chosen = {"num_negatives": 2, "split": "time", "history": 3, "valid_share": 0.2, "test_share": 0.2}
    same_rows(Case("movielens", write_latest, chosen), raw, tmp_path)
    assert max(fetched) <= 900, "the driver read more than the vocabulary of users"
    folders = [tmp_path / "spark" / split for split in ("train", "valid", "test")]
    assert min(len(list(folder.iterdir())) for folder in folders) >= 3, "a split was not written by several tasks"


def test_a_split_by_time_sorts_the_times_and_not_the_rows() -> None:
    """A window over all rows would be one task of Spark; one over the distinct times is small."""
    table = ibis.table({"time": "int64", "user": "string"}, name="rows")
    split = by_time(table, time="time", valid=0.1, test=0.1)
    windows = split.op().find(ops.WindowFunction)
    assert windows
    assert all(any(isinstance(held, ops.Aggregate) for held in window.find(ops.Relation)) for window in windows)


def write_and_die_once(flag: str, plan: interaction_rows.Plan, part: Part) -> Any:
    """Writes a part, and ends the process in the middle if it is the first to get there."""

    def done(rows: int) -> None:
        part.done(rows)
        try:
            os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    return WRITE_PART(plan, replace(part, done=done))


@pytest.mark.slow
@pytest.mark.usefixtures("parts")
def test_nothing_is_lost_if_the_process_of_an_executor_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, case = many_ratings(tmp_path / "raw"), Case("movielens", write_latest, {"num_negatives": 2, "history": 3})
    run(case, raw, tmp_path / "duckdb", threads=2)
    monkeypatch.setenv("SPARK_MASTER", "local[2,4]")  # a task may fail three times; on one machine, by default never
    monkeypatch.setattr(interactions, "_write_part", partial(write_and_die_once, str(tmp_path / "died")))
    start = SparkBackend.__init__

    def started(self: SparkBackend, *arguments: Any) -> None:
        start(self, *arguments)
        self._session.sparkContext.environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # workers import this file

    monkeypatch.setattr(SparkBackend, "__init__", started)
    run(case, raw, tmp_path / "spark", engine="spark", threads=2)
    assert (tmp_path / "died").exists()
    same_dataset(tmp_path / "duckdb", tmp_path / "spark")


@pytest.mark.slow
def test_spark_reads_and_numbers_a_file_in_many_parts_as_duckdb_does(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs a command `java`")
    lines = [f'{number % 97},"é, {number}",{number / 2}\n' for number in range(20_000)]
    lines[5] = "3,,1\n"
    file = TextFile(written(tmp_path / "a.csv", "user,item,stars\n" + "".join(lines)), COLUMNS)
    bad = TextFile(written(tmp_path / "bad.csv", "user,item,stars\n1,a,4\nx,b,5\n3,c\n"), COLUMNS)
    with connect(folder=tmp_path / "duck", threads=1) as backend:
        expected = fetch(backend, backend.read_text(file).order_by(ROW))
    with connect("spark", folder=tmp_path / "spark", threads=2) as backend:
        backend._session.conf.set("spark.sql.files.maxPartitionBytes", "50000")  # type: ignore[attr-defined]
        found = fetch(backend, backend.read_text(file).order_by(ROW))
        with pytest.raises(DataError, match="line 3: column 'user' is 'x'; expected a whole number"):
            backend.read_text(bad)
    assert found.equals(expected.cast(found.schema))


@pytest.mark.slow
def test_spark_reads_json_lines_as_duckdb_does(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs a command `java`")
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(OBJECTS.encode()))
    bad = JsonFile(written(tmp_path / "bad.json", MALFORMED), COLUMNS, required=("user",))
    short = tmp_path / "short.json.gz"
    short.write_bytes(gzip.compress(OBJECTS.encode())[:-20])
    with connect("spark", folder=tmp_path / "spark", threads=2) as backend:
        table = backend.read_json(JsonFile(tmp_path / "a.json.gz", COLUMNS))
        assert fetch(backend, table.order_by(ROW)).to_pylist() == READ_OBJECTS
        with pytest.raises(DataError, match=r"line 3: 'user' is '1\.5'; expected a whole number"):
            backend.read_json(bad)
        with pytest.raises(DataError, match="cut short"):
            backend.read_json(JsonFile(short, COLUMNS))


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """Spark at work in a hostile folder, with a default file system that cannot be reached."""
    with connect("spark", folder=nested(tmp_path_factory.mktemp("spark"), HOSTILE) / "work", threads=2) as backend:
        backend._session.conf.set("fs.defaultFS", "hdfs://nowhere.invalid:9000")  # type: ignore[attr-defined]
        yield backend


@contextmanager
def settings_of(session: Any, values: Mapping[str, str]) -> Iterator[None]:
    before = {name: session.conf.get(name) for name in values}
    for name, value in values.items():
        session.conf.set(name, value)
    yield
    for name, value in before.items():
        session.conf.set(name, value)


def nested(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        folder /= name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_readers_and_writers(spark: Backend, folder: Path, name: str) -> None:
    """A file of every kind called so, beside others that a pattern would find, in a folder that is called so too."""
    folder = nested(folder, (name,))
    csv = folder / f"{name}.csv"
    objects = folder / f"{name}.json"
    parquet = [folder / f"{name}.{number}.parquet" for number in range(2)]
    for beside in ("data1.csv", "a.csv", "b.csv", "ab.csv"):
        (folder / beside).write_text("a,b\n0,wrong\n")
    csv.write_text("a,b\n1,x\n2,y\n")
    objects.write_text('{"a": 1, "b": "x"}\n{"a": 2, "b": "y"}\n')
    pq.write_table(pa.table({"a": [1], "b": ["x"]}), parquet[0])
    pq.write_table(pa.table({"a": [2], "b": ["y"]}), parquet[1])
    expected = [{ROW: 0, "a": 1, "b": "x"}, {ROW: 1, "a": 2, "b": "y"}]
    columns: Mapping[str, ColumnType] = {"a": "int64", "b": "string"}
    for table in (
        spark.read_text(TextFile(csv, columns)),
        spark.read_text(TextFile(csv, columns, multiline=True), folder / f"{name} staged"),
        spark.read_json(JsonFile(objects, columns)),
        spark.read_parquet(parquet, row=True),
        spark.stage(spark.read_parquet(parquet, row=True).order_by(ROW), folder / f"{name} sorted"),
        spark.read_parquet([folder / f"{name} sorted"]),
    ):
        assert table.columns == (ROW, "a", "b")
        assert fetch(spark, table.order_by(ROW)).to_pylist() == expected
    assert sorted(fetch(spark, spark.read_parquet(parquet)).column("b").to_pylist()) == ["x", "y"]


@pytest.mark.slow
def test_names_and_the_default_file_system_mean_nothing_to_spark(spark: Backend, tmp_path: Path) -> None:
    check_readers_and_writers(spark, tmp_path, "_a=[1]{b,c}*?:%20")
    files = [tmp_path / f"{name}.parquet" for name in HOSTILE]
    for number, file in enumerate(files):
        pq.write_table(pa.table({"a": pa.array([number] * (number % 3), pa.int64())}), file)
    table = spark.read_parquet(files, row=True)
    found = fetch(spark, table.order_by(ROW))
    assert found.column("a").to_pylist() == [number for number in range(len(files)) for _ in range(number % 3)]
    assert found.column(ROW).to_pylist() == list(range(found.num_rows))
    assert count_rows(spark, table) == found.num_rows


@pytest.mark.slow
def test_columns_may_be_called_like_those_that_spark_adds(spark: Backend, tmp_path: Path) -> None:
    names = ["_metadata", "block", "number", "start", "before", "column_0", "`tick`", "A", "row", "sp ace", "x.y"]
    path = tmp_path / "a.csv"
    path.write_text(",".join(names) + "\n" + ",".join(map(str, range(len(names)))) + "\n")
    table = spark.read_text(TextFile(path, dict.fromkeys(names, "int64")))
    expected = {ROW: 0, **{name: number for number, name in enumerate(names)}}
    assert fetch(spark, table).to_pylist() == [expected]
    pq.write_table(pa.table({name: [number] for name, number in expected.items() if name != ROW}), tmp_path / "p")
    assert fetch(spark, spark.read_parquet([tmp_path / "p"], row=True)).to_pylist() == [expected]


@pytest.mark.slow
def test_decimals_are_whole_numbers_by_the_rule_of_duckdb(spark: Backend, tmp_path: Path) -> None:
    decimals = {
        "small": (38, 0, "5"),
        "large": (38, 0, f"{2**64}"),
        "scaled": (38, 10, f"{2**53 + 1}"),
        "price": (10, 2, "1.5"),
        "tiny": (38, 20, "0.0000000001"),
    }
    columns = {
        name: pa.array([Decimal(text), Decimal(0), None], pa.decimal128(digits, scale))
        for name, (digits, scale, text) in decimals.items()
    }
    columns["unsigned"] = pa.array([2**64 - 1, 0, None], pa.uint64())
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    with connect("duckdb", folder=tmp_path / "work", threads=1) as duckdb:
        found = []
        for engine in (spark, duckdb):
            rows = stage(engine, [tmp_path / "rows.parquet"], ("user", "item"), Reading(), Notes(), tmp_path)
            found.append(fetch(engine, rows.table.order_by(ROW).select(*columns)).to_pydict())
    expected = {
        "small": 5,
        "large": f"{2**64}",
        "scaled": 2**53 + 1,
        "price": 1.5,
        "tiny": 1e-10,
        "unsigned": f"{2**64 - 1}",
    }
    assert found[0] == found[1]
    assert {name: values[0] for name, values in found[0].items()} == expected


@pytest.mark.slow
def test_values_are_understood_as_duckdb_understands_them(spark: Backend, tmp_path: Path) -> None:
    """Spark's own readers take each of these otherwise."""
    lines = 'a,b\r\n"x\r\ny",1\r\n "z",2\r\n'
    objects = '{"a": 1.50, "b": [1, 2.50]}\n{"a": {"c": 1e3, "d": [1, 2]}, "b": ["x"]}\n{"a": "y", "b": null}\n'
    (tmp_path / "lines.csv").write_text(lines, newline="")
    (tmp_path / "LINES.CSV.GZ").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "PLAIN.GZ").write_bytes(gzip.compress(b"a,b\nx,1\n"))
    (tmp_path / "objects.json").write_text(objects)
    texts: Mapping[str, ColumnType] = {"a": "string", "b": "string"}
    with connect("duckdb", folder=tmp_path / "work", threads=1) as duckdb:
        for file in (
            TextFile(tmp_path / "lines.csv", texts, multiline=True),
            TextFile(tmp_path / "LINES.CSV.GZ", texts, multiline=True),
            TextFile(tmp_path / "PLAIN.GZ", texts),
            JsonFile(tmp_path / "objects.json", {"a": "string", "b": "list"}),
        ):
            one, two = (
                fetch(engine, engine.read_text(file) if isinstance(file, TextFile) else engine.read_json(file))
                for engine in (duckdb, spark)
            )
            assert two.num_rows
            assert two.sort_by(ROW).to_pylist() == one.to_pylist()


def item_and_place(share: Share[int]) -> tuple[int, Path]:
    """An item and its folder, after ten rows for each of its units."""
    share.done(10 * share.item)
    return share.item, share.folder


@pytest.mark.slow
def test_each_file_is_a_part_and_an_error_of_ours_is_raised_as_it_is(spark: Backend, tmp_path: Path) -> None:
    pq.write_table(pa.table({"user": [number % 50 for number in range(1000)]}), tmp_path / "a.parquet")
    session = spark._session  # type: ignore[attr-defined]
    with settings_of(session, {"spark.sql.adaptive.coalescePartitions.enabled": "false"}):
        staged = spark.stage_by(spark.read_parquet([tmp_path / "a.parquet"], row=True), "user", [ROW])
    told: list[int] = []
    firsts = list(spark.each_part(staged, operator.attrgetter("first_row"), told.append))
    assert firsts[0] == 0
    assert len(firsts) > 1
    assert all(first % 20 == 0 for first in firsts), "a user's rows are in two parts"
    assert firsts == sorted(firsts)
    assert sum(told) == 1000
    users = fetch(spark, staged).column("user").to_pylist()
    assert users == sorted(users)
    assert spark.call(partial(max, 1, 2)) == 2
    shares = spark.each_share([3, 5], item_and_place, told.append)
    assert [item for item, _ in shares] == [3, 5]
    assert len({place for _, place in shares}) == 2  # each call has a folder of its own
    assert told[-2:] == [30, 50]
    with pytest.raises(DataError, match=f"^{tmp_path / 'none'}: no such vocabulary"):
        spark.call(partial(Vocabulary.load, tmp_path / "none"))


def test_a_step_that_spark_cannot_finish_is_one_message(spark: Backend, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "a.parquet")
    table = spark.read_parquet([tmp_path / "a.parquet"])
    assert spark.row(table.aggregate(rows=table.count(), least=table["a"].min())) == (1, "x")
    with pytest.raises(DataError, match=r"^Spark could not finish a step: .*CAST_INVALID_INPUT"):
        fetch(spark, table.mutate(b=table["a"].cast("int64")))


def check_a_name(spark: Backend, folder: Path, name: str) -> None:
    """A raw file called so, and a table written to and read from a folder called so, in a folder called so."""
    folder = nested(folder, (name,))
    (folder / name).write_text("a,b\n1,x\n2,y\n")
    for beside in ("a", "b", "ab", "data1", "part1"):
        (folder / f"{beside}.csv").write_text("a,b\n0,wrong\n")
    table = spark.read_text(TextFile(folder / name, {"a": "int64", "b": "string"}))
    staged = spark.stage(table.order_by(ROW), Path(os.path.relpath(folder / f"{name} staged")))
    assert staged.columns == (ROW, "a", "b")
    assert (
        fetch(spark, staged.order_by(ROW)).to_pylist()
        == fetch(spark, staged).to_pylist()
        == [{ROW: 0, "a": 1, "b": "x"}, {ROW: 1, "a": 2, "b": "y"}]
    )


@pytest.mark.slow
def test_no_hostile_name_means_anything_to_spark(spark: Backend, tmp_path: Path) -> None:
    for name in HOSTILE:
        check_a_name(spark, tmp_path, name)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(st.sampled_from("ab1=[]{}*?!^-,:;%20#&$~'\"`\\ \t\n._é☃"), min_size=1, max_size=12).filter(
        lambda name: name not in (".", "..")
    )
)
def test_no_name_at_all_means_anything_to_spark(spark: Backend, tmp_path: Path, name: str) -> None:
    shutil.rmtree(tmp_path)
    check_a_name(spark, tmp_path, name)


@pytest.mark.slow
def test_a_dataset_is_prepared_from_and_into_folders_of_any_name(tmp_path: Path) -> None:
    case = Case("movielens", write_latest, {"num_negatives": 3})
    run(case, write_latest(tmp_path / "raw"), tmp_path / "plain", threads=1)
    run(
        case,
        write_latest(nested(tmp_path, HOSTILE) / "raw"),
        nested(tmp_path / "out", HOSTILE) / "spark",
        engine="spark",
        threads=2,
    )
    assert bytes_of(nested(tmp_path / "out", HOSTILE) / "spark") == bytes_of(tmp_path / "plain")


# --- every dataset, in several parts ---------------------------------------------------------------------------------

ROWS = 110_000


def movielens_like(folder: Path) -> Path:
    write_movielens_like(folder, num_users=1500, num_items=900, num_ratings=ROWS)
    return folder


def large_ncf(folder: Path) -> Path:
    """The layout of the NCF paper's files, users in shuffled order."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    users, items, negatives = 1000, 600, 20
    lines, tests, listed = [], [], []
    for user in range(users):
        chosen = rng.permutation(items)[: 112 + negatives]
        times = rng.integers(10**9, 10**9 + 10**6, len(chosen))
        rated = [f"{user}\t{item}\t4\t{time}\n" for item, time in zip(chosen, times, strict=True)]
        lines += rated[:111]
        tests.append(rated[111])
        listed.append(f"({user},{chosen[111]})\t" + "\t".join(map(str, chosen[112:])) + "\n")
    lines = [lines[place] for place in rng.permutation(len(lines))]
    (folder / "x.train.rating").write_text("".join(lines))
    (folder / "x.test.rating").write_text("".join(tests))
    (folder / "x.test.negative").write_text("".join(listed))
    return folder


def large_table(folder: Path) -> Path:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    users, items = rng.zipf(1.3, ROWS) % 2000, rng.integers(700, size=ROWS)
    columns = zip(
        users,
        items,
        rng.integers(50_000, size=ROWS),
        rng.integers(2, size=ROWS),
        rng.normal(size=ROWS),
        rng.integers(16, size=ROWS),
        strict=True,
    )
    texts = ["|".join(tag for place, tag in enumerate("abcd") if held >> place & 1) for held in range(16)]
    rows = [
        f"u{user},{item},{10**9 + time},{clicked},{price:.4f},{texts[held]},{'mobile' if held % 3 else ''}\n"
        for user, item, time, clicked, price, held in columns
    ]
    (folder / "clicks.csv").write_text("who,what,when,clicked,price,tags,device\n" + "".join(rows))
    return folder / "clicks.csv"


def large_parquet(folder: Path) -> Path:
    """The same rows in four files, the last of them the largest."""
    table = pa.csv.read_csv(large_table(folder))
    (folder / "clicks.csv").unlink()
    for number, (start, stop) in enumerate([(0, 10_000), (10_000, 15_000), (15_000, 40_000), (40_000, ROWS)]):
        pq.write_table(table.slice(start, stop - start), folder / f"part-{number}.parquet")
    return folder


def shop_rows(folder: Path) -> pa.Table:
    """Rows with features of their own, beside files of users and items that have columns of the same names.

    Times have zones, some numbers are missing, some ids have leading zeros, and a user may do the same twice.
    """
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    users, items = rng.zipf(1.3, ROWS) % 2000, rng.integers(700, size=ROWS)
    seconds = rng.integers(50_000, size=ROWS)
    zones = rng.integers(-8, 9, size=ROWS)
    first = np.datetime64("2024-03-30T00:00:00", "s")
    clocks = np.datetime_as_string(first + (seconds + 3600 * zones).astype("timedelta64[s]")).tolist()
    times = [f"{clock}{zone:+03d}:00" if zone else f"{clock}Z" for clock, zone in zip(clocks, zones, strict=True)]
    marks = np.array(["n/a", "", "-", "NA"])
    price = [f"{number:.4f}" for number in rng.normal(size=ROWS).tolist()]
    for place in rng.integers(ROWS, size=500).tolist():
        price[place] = str(marks[place % 4])
    held = rng.integers(16, size=ROWS).tolist()
    tags = [[tag for place, tag in enumerate("abcd") if held_ >> place & 1] for held_ in held]
    table = pa.table(
        {
            "who": [f"{user:04d}" for user in users.tolist()],
            "what": [str(item) for item in items.tolist()],
            "when": times,
            "clicked": np.where(rng.random(ROWS) < 0.3, "yes", "No").tolist(),
            "price": price,
            "tags": tags,
            "age": [str(number) for number in rng.integers(18, 80, ROWS).tolist()],
            "device": [f"d{number % 7}" if number % 3 else "" for number in held],
        }
    )
    rows = (f"{user:04d},{'n/a' if user % 50 == 0 else 18 + user % 60},d{user % 5}\n" for user in range(5, 2000))
    (folder / "users.csv").write_text("who,age,device\n" + "".join(rows))
    rows = (
        json.dumps(
            {
                "what": str(item),
                "title": f"Item {item}",
                "price": item / 4 if item % 9 else None,
                "tags": ["ab"[item % 2], f"t{item % 11}"],
            }
        )
        + "\n"
        for item in range(20, 800)
    )
    (folder / "items.jsonl").write_text("".join(rows))
    return table


def shop_csv(folder: Path) -> Path:
    """The rows in three files, the last of them the largest; one is compressed."""
    table = shop_rows(folder)
    joined = pa.array(["|".join(tags) for tags in table.column("tags").to_pylist()])
    table = table.set_column(table.column_names.index("tags"), "tags", joined)
    for number, (start, stop) in enumerate([(0, 10_000), (10_000, 25_000), (25_000, ROWS)]):
        pa.csv.write_csv(table.slice(start, stop - start), folder / f"rows-{number}.csv")
    plain = (folder / "rows-1.csv").read_bytes()
    (folder / "rows-1.CSV.GZ").write_bytes(gzip.compress(plain))
    (folder / "rows-1.csv").unlink()
    return folder


def shop_json(folder: Path) -> Path:
    """The rows in one compressed file of JSON lines."""
    table = shop_rows(folder)
    with gzip.open(folder / "rows.jsonl.gz", "wt", encoding="utf-8", compresslevel=1) as file:
        file.writelines(json.dumps(row) + "\n" for row in table.to_pylist())
    return folder / "rows.jsonl.gz"


def large_sequences(folder: Path) -> Path:
    """Users in two files, each with all of their items in a line; some items stand twice in a line."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, users in (("b.txt", range(300)), ("a.txt", range(300, 1000))):
        lines = (f"{user:04d} " + " ".join(map(str, rng.integers(600, size=110).tolist())) for user in users)
        (folder / name).write_text("".join(f"{line}\n" for line in lines) + f"{name}-alone\n")
    return folder


def large_adult(folder: Path) -> Path:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = []
    for number, age in enumerate(rng.integers(17, 90, ROWS).tolist()):
        fields = ADULT[number % len(ADULT)].split(", ")
        rows.append(", ".join([str(age), fields[1], str(100 * age + number % 977), *fields[3:]]))
    (folder / "adult.data").write_text("".join(f"{row}\n" for row in rows))
    (folder / "adult.test").write_text("|1x3 Cross validator\n" + "".join(f"{row}.\n" for row in rows[:5000]))
    return folder


def large_amazon(folder: Path) -> Path:
    return made_up_amazon.write(folder, num_users=9000, num_items=3000, num_reviews=ROWS)


def large_criteo(folder: Path) -> Path:
    made_up_criteo.write(folder / "train.txt", num_rows=ROWS, num_numerical=2, num_categorical=3)
    return folder


OF_TABLE = {**TABLE_COLUMNS, "item_features": ["price"], "context_features": ["device"]}
LABELLED = {
    **TABLE_COLUMNS,
    "label": "clicked",
    "item_features": ["tags"],
    "lists": ["tags"],
    "context_features": ["price", "device"],
}
SHOP = {
    "user_features": ["age", "device"],
    "item_features": ["price", "tags"],
    "context_features": ["price", "device"],
    "title": "title",
    "num_negatives": 20,
}
BY_TIME = {"split": "time", "valid_share": 0.1, "test_share": 0.1}
LARGE: Mapping[str, Case] = {
    **{name: replace(case, write=case.large) for name, case in CASES.items() if case.large},
    "movielens": Case("movielens", movielens_like),
    "movielens-history": Case("movielens", movielens_like, {"history": 50}),
    "movielens-time": Case("movielens", movielens_like, BY_TIME),
    "movielens-windows": Case("movielens", movielens_like, {"split": "time", "window": 1_000, "earlier": 1}),
    "movielens-users": Case("movielens", movielens_like, {"split": "users", "history": 10}),
    "ncf": Case("ncf", large_ncf),
    "table": Case("table", large_table, OF_TABLE),
    "table-history": Case("table", large_table, {**OF_TABLE, "history": 20, "split": "time"}),
    "table-labels": Case("table", large_table, LABELLED),
    "table-labels-time": Case("table", large_table, {**LABELLED, "split": "time"}),
    "table-parquet": Case("table", large_parquet, LABELLED),
    "table-files-repeats": Case(
        "table",
        shop_csv,
        {
            **TABLE_COLUMNS,
            "files": ["rows-2.csv", "rows-0.csv"],
            "users": "users.csv",
            "items": "items.jsonl",
            "repeats": "keep",
            **SHOP,
        },
    ),
    "table-gzip-time": Case(
        "table",
        shop_csv,
        {
            **TABLE_COLUMNS,
            "files": ["rows-1.CSV.GZ"],
            "rows": 12_000,
            "split": "time",
            "item_features": ["tags", "price"],
            "user_features": ["age", "device"],
            "lists": ["tags"],
            "history": 5,
            "missing_values": ["d1"],
        },
    ),
    "table-json": Case(
        "table",
        shop_json,
        {
            **TABLE_COLUMNS,
            "item_features": ["tags", "price"],
            "numeric": ["price", "age"],
            "user_features": ["age"],
            "negatives": "popularity",
        },
    ),
    "table-labels-files": Case(
        "table",
        shop_json,
        {
            **TABLE_COLUMNS,
            "label": "clicked",
            "split": "group",
            "users": "users.csv",
            "items": "items.jsonl",
            "numeric": ["price", "age"],
            "min_count": 3,
            "buckets": {"age": 5},
            **SHOP,
        },
    ),
    "table-sequences": Case(
        "table",
        large_sequences,
        {
            "user": "who",
            "item": "what",
            "layout": "sequences",
            "files": ["b.txt", "a.txt"],
            "repeats": "keep",
            "history": 20,
        },
    ),
    "amazon": Case("amazon", large_amazon, {"min_reviews": 5, "brand": True, "categories": "path"}),
    "amazon-time": Case(
        "amazon", large_amazon, {"min_reviews": 5, "min_item_reviews": 3, "repeats": "drop", **BY_TIME}
    ),
    "adult": Case("adult", large_adult),
    "outbrain": Case("outbrain", lambda folder: made_up_outbrain.write(folder, num_rows=ROWS)),
    "outbrain-views": Case(
        "outbrain",
        lambda folder: made_up_outbrain.write(folder, num_rows=ROWS),
        {"page_views": True, "submission": True},
    ),
    "criteo": Case("criteo", large_criteo, {"num_numerical": 2, "num_categorical": 3, "buckets": True, "scale": True}),
    "synthetic-clicks": Case("synthetic", lambda folder: folder, {"num_rows": ROWS}),
    "synthetic-interactions": Case("synthetic", lambda folder: folder, {"kind": "interactions", "num_rows": ROWS}),
}


def test_every_registered_dataset_is_asked_of_spark() -> None:
    assert {case.dataset for case in LARGE.values()} == set(DATASETS)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.usefixtures("parts")
def test_every_dataset_has_the_rows_of_duckdb(name: str, tmp_path: Path) -> None:
    raw = LARGE[name].write(tmp_path / "raw")
    same_rows(LARGE[name], raw, tmp_path)
    record = json.loads((tmp_path / "spark" / "prepare.json").read_text())
    assert record["dataset"] == LARGE[name].dataset
    assert run(LARGE[name], raw, tmp_path / "spark").message.startswith("already prepared")  # engines share results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("movielens-1m", Case("movielens", movielens_like)),
        ("movielens-1m", Case("movielens", movielens_like, {"history": 50})),
        ("movielens-1m", Case("movielens", movielens_like, BY_TIME)),
        ("amazon-beauty", Case("amazon", movielens_like, {"min_reviews": 5})),
        ("amazon-beauty", Case("amazon", movielens_like, {"min_reviews": 5, **BY_TIME})),
    ],
)
@pytest.mark.usefixtures("parts")
def test_real_data_have_the_rows_of_duckdb(
    name: str, case: Case, tmp_path: Path, real_data: Callable[[str], Path]
) -> None:
    same_rows(case, real_data(name), tmp_path)


@pytest.mark.slow
def test_layouts_and_dialects_are_read_as_duckdb_reads_them(spark: Backend, tmp_path: Path) -> None:
    texts = {
        "a.csv": 'user_id;item_id;when;price\n1;"a \\"b\\"; c";Sat Oct  7 00:00:00 -0700 2017;1.234,5\n'
        "2;b;Sun Oct 15 00:00:00 GMT 2017;0,25\n",
        "b.txt": "1:\n15,4,2000-11-24\n7,3,2003-12-03\n",
        "c.txt": "1 0:3:1 0:4:1 1:9:0.5\n0 0:4:1 1:9:1\n",
        "d.json": "{'user_id': 'u', 'items': [{'item_id': 'x', 'n': 1}, {'item_id': 'y', 'n': None}]}\n",
    }
    nested = [{"user_id": "u", "items": [{"item_id": "x", "n": 1}, {"item_id": "y", "n": None}]}]
    pq.write_table(pa.Table.from_pylist(nested), tmp_path / "e.parquet")
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    ids = Roles(ids=("user_id", "item_id"))
    asked: dict[str, tuple[Roles | None, dict[str, object]]] = {
        "a.csv": (replace(ids, time="when", features=("price",)), {"decimal": ","}),
        "b.txt": (replace(ids, time="timestamp", numbers=("rating",)), {}),
        "c.txt": (None, {}),
        "d.json": (None, {"item": "items.item_id"}),
        "e.parquet": (None, {"item": "items.item_id"}),
    }
    for name, (roles, reading) in asked.items():
        one, two = (read(tmp_path / name, roles, engine, **reading) for engine in (None, spark))
        assert one == two, name
    assert read(tmp_path / "a.csv", *asked["a.csv"][:1], **asked["a.csv"][1])[0][0]["price"] == 1234.5
