"""Starting a Spark session: local, or on the cluster that the environment variable SPARK_MASTER names."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import warnings
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from recspec.base.errors import SettingsError, require_extra, shortened

MASTERS = ("local", "spark://", "yarn", "k8s://")  # how a master begins, as spark-submit knows them
EXAMPLES = "local[4], spark://HOST:7077, yarn or k8s://https://HOST:PORT"
CONNECT_SECONDS = 5  # that a master has to answer; Spark itself waits more than a minute
CAUSE = 300  # most characters of an error of Spark in a message
_ERROR_LINE = re.compile(r"([a-z]\w*\.)*[A-Z]\w*(Error|Exception|Failure)\b")


def start_session(settings: Mapping[str, str], other_engine: str) -> Any:
    """Start a session with these settings of Spark, on the master that SPARK_MASTER names if it is set.

    Raises SettingsError, which proposes `other_engine`, if there is no Java or Spark can't be started.
    """
    sql = require_extra("pyspark.sql", "spark")
    master = os.environ.get("SPARK_MASTER")
    if not {"SPARK_MASTER", "JAVA_HOME"} & set(os.environ) and shutil.which("java") is None:
        raise SettingsError(
            f"--engine spark: needs Java; install a JDK (17 or newer), set JAVA_HOME, or use --engine {other_engine}"
        )
    if master is not None and (problem := master_problem(master)):
        raise SettingsError(problem)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # otherwise workers start the system's python3
    try:
        return sql.SparkSession.builder.config(map=dict(settings)).getOrCreate()
    except Exception as error:
        if not is_of_spark(error):
            raise
        raise SettingsError(not_started(master, str(error), other_engine)) from error


def is_of_spark(error: BaseException) -> bool:
    """Whether Spark raised the error, in Java or in Python."""
    return type(error).__module__.startswith(("pyspark", "py4j"))


def without_pandas_warning() -> warnings.catch_warnings[None]:
    """Silences Spark's warning about the version of pandas, through which no row passes; a context manager."""
    return warnings.catch_warnings(action="ignore", category=FutureWarning)


def master_problem(master: str) -> str | None:
    """What is wrong with a value of SPARK_MASTER: it names no master, or no master answers there."""
    if not master.startswith(MASTERS):
        return f"SPARK_MASTER is '{shortened(master)}', which is no master of Spark; expected such as {EXAMPLES}"
    if not master.startswith("spark://"):
        return None
    silent = []
    for place in master.removeprefix("spark://").split(","):
        host, _, port = place.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            return f"SPARK_MASTER is '{shortened(master)}'; expected spark://HOST:PORT, such as spark://HOST:7077"
        try:
            with closing(socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS)):
                return None
        except OSError as error:
            silent.append(f"{shortened(place)} ({error.strerror or error})")
    return f"SPARK_MASTER is '{shortened(master)}', and no master answers at {', '.join(silent)}; start or correct it"


def not_started(master: str | None, said: str, other_engine: str) -> str:
    """The message for a session that Spark could not start."""
    where = "on this machine" if master is None else f"with SPARK_MASTER={shortened(master)}"
    cause = first_cause(said)
    if "JAVA_GATEWAY_EXITED" in said:
        cause = "Java ended at once, and printed the reason above"
    return f"Spark could not be started {where}: {cause}; correct its configuration, or use --engine {other_engine}"


def first_cause(said: str) -> str:
    """The first cause in an error of Spark, in one line: of Java the last `Caused by`, of Python the last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    caused = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    if "Traceback (most recent call last)" in said:
        caused += [line for line in lines if _ERROR_LINE.match(line)][-1:]
    if not caused:
        if lines and lines[0].startswith("An error occurred while calling"):
            del lines[0]
        ends = (place for place, line in enumerate(lines) if line.startswith(("at ", "Driver stacktrace", "JVM stack")))
        caused = [" ".join(lines[: next(ends, len(lines))])]
    return " ".join(caused[-1].removeprefix(": ").split())[:CAUSE] or "no reason was given"
