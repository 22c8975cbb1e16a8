"""Spark that can't be started, or that fails, is one message. None of these tests starts Spark."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from recspec.base.errors import DataError, SettingsError
from recspec.base.spark_session import first_cause, master_problem, not_started, start_session
from recspec.data.prepare.spark_backend import SparkBackend, _errors_of_spark, _step_failed, _uri

JAVA = """\
An error occurred while calling None.org.apache.spark.api.java.JavaSparkContext.
: org.apache.spark.SparkException: Could not parse Master URL: 'local[x]'
\tat org.apache.spark.SparkContext.<init>(SparkContext.scala:603)
\tat java.base/java.lang.Thread.run(Thread.java:840)
"""
LOST = """\
An error occurred while calling o55.parquet.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 times, most recent \
failure: Lost task 0.3 in stage 1.0 (TID 3): ExecutorLostFailure (executor 0 exited) Reason: exit code 137
Driver stacktrace:
\tat org.apache.spark.scheduler.DAGScheduler.failJobAndIndependentStages(DAGScheduler.scala:2856)
"""
MEMORY = """\
An error occurred while calling o55.parquet.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed
\tat org.apache.spark.scheduler.DAGScheduler.x(DAGScheduler.scala:1)
Caused by: org.apache.spark.SparkException: Task failed
\tat a.b(c.scala:1)
Caused by: java.lang.OutOfMemoryError: Java heap space
\tat a.b(c.scala:1)
"""
PYTHON = """\
Job aborted due to stage failure: Task 0 in stage 3.0 failed 1 times: org.apache.spark.api.python.PythonException: \
Traceback (most recent call last):
  File "worker.py", line 1, in main
    process()
OSError: [Errno 28] No space left on device

\tat org.apache.spark.api.python.BasePythonRunner.x(PythonRunner.scala:1)
"""


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (JAVA, "org.apache.spark.SparkException: Could not parse Master URL: 'local[x]'"),
        (MEMORY, "java.lang.OutOfMemoryError: Java heap space"),
        (PYTHON, "OSError: [Errno 28] No space left on device"),
        ("[CAST_INVALID_INPUT] The value\n'x' is malformed", "[CAST_INVALID_INPUT] The value 'x' is malformed"),
        ("", "no reason was given"),
        ("x" * 1000, "x" * 300),
    ],
)
def test_the_first_cause_of_an_error_of_spark_is_one_line(said: str, cause: str) -> None:
    assert first_cause(said) == cause


def test_a_lost_executor_is_named() -> None:
    assert first_cause(LOST).endswith("ExecutorLostFailure (executor 0 exited) Reason: exit code 137")


def test_a_session_that_does_not_start_names_its_master_and_the_cause() -> None:
    assert not_started("local[x]", JAVA, "duckdb") == (
        "Spark could not be started with SPARK_MASTER=local[x]: org.apache.spark.SparkException: Could not parse "
        "Master URL: 'local[x]'; correct its configuration, or use --engine duckdb"
    )
    told = not_started(
        None, "[JAVA_GATEWAY_EXITED] Java gateway process exited before sending its port number.", "local"
    )
    assert told.startswith(
        "Spark could not be started on this machine: Java ended at once, and printed the reason above;"
    )


@pytest.mark.parametrize(
    ("master", "problem"),
    [
        (
            "nonsense",
            "SPARK_MASTER is 'nonsense', which is no master of Spark; expected such as local[4], spark://HOST",
        ),
        ("", "SPARK_MASTER is '', which is no master of Spark"),
        ("spark://host", "SPARK_MASTER is 'spark://host'; expected spark://HOST:PORT"),
        ("spark://host:0", "expected spark://HOST:PORT"),
        ("spark://a:b", "expected spark://HOST:PORT"),
    ],
)
def test_a_value_that_is_no_master_is_refused(master: str, problem: str) -> None:
    assert problem in str(master_problem(master))


@pytest.mark.parametrize(
    "master", ["local", "local[2]", "local[*]", "local-cluster[2,1,1024]", "yarn", "k8s://https://a:1"]
)
def test_other_masters_are_left_to_spark(master: str) -> None:
    assert master_problem(master) is None


def test_a_master_has_to_answer() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # without listening: connections are refused
        port = bound.getsockname()[1]
        problem = str(master_problem(f"spark://127.0.0.1:{port}"))
        assert problem == (
            f"SPARK_MASTER is 'spark://127.0.0.1:{port}', and no master answers at 127.0.0.1:{port} (Connection "
            "refused); start or correct it"
        )
        with socket.create_server(("127.0.0.1", 0)) as master:
            several = f"spark://127.0.0.1:{port},127.0.0.1:{master.getsockname()[1]}"
            assert master_problem(several) is None


def of_spark(message: str) -> Exception:
    """An error whose class is in a module of Spark's."""
    return type("SparkError", (Exception,), {"__module__": "pyspark.errors"})(message)  # type: ignore[no-any-return]


class Builder:
    """Raises an error in place of starting Spark."""

    error: Exception

    def config(self, map: dict[str, str]) -> Builder:  # noqa: ARG002
        return self

    def getOrCreate(self) -> None:
        raise self.error


def test_an_error_of_spark_at_the_start_is_a_settings_error_and_one_of_ours_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sql = pytest.importorskip("pyspark.sql")
    builder = Builder()
    monkeypatch.setattr(sql.SparkSession, "builder", builder)
    monkeypatch.setenv("SPARK_MASTER", "local[x]")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    builder.error = of_spark(JAVA)
    with pytest.raises(SettingsError, match=r"SPARK_MASTER=local.x.: .*Could not parse Master.*--engine duckdb"):
        SparkBackend(tmp_path / "work", None, 1)
    builder.error = KeyError("ours")
    with pytest.raises(KeyError):
        start_session({}, "local")
    monkeypatch.setenv("SPARK_MASTER", "nonsense")
    with pytest.raises(SettingsError, match="SPARK_MASTER is 'nonsense'"):
        start_session({}, "local")


def test_an_error_of_spark_in_a_step_is_one_line_and_one_of_ours_stays() -> None:
    expected = r"^Spark could not finish a step: java\.lang\.OutOfMemoryError: Java heap space$"
    with pytest.raises(DataError, match=expected), _errors_of_spark(_step_failed):
        raise of_spark(MEMORY)
    with pytest.raises(ZeroDivisionError), _errors_of_spark(_step_failed):
        raise ZeroDivisionError


def test_a_relative_folder_is_named_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _uri(Path("out%20") / "events.parquet") == f"file://{tmp_path}/out%20/events.parquet"
