"""What all tests share: one thread each, the same surroundings on every machine, and real data where it is there."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import HealthCheck, settings

gc.disable()  # until all tests are collected: a look for garbage takes longer with each module and test
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy or torch is loaded: several tests run side by side
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is loaded: its kernels then run without a GPU

# Spark's Java compiles lightly and collects garbage on one thread: a session of a test is over before more pays.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

KEPT = {"RECSPEC_DATA", "RECSPEC_TENSORFLOW"}
MEANT_FOR_OTHERS = {
    # a proxy would get what a test asks its own server
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "grpc_proxy",
    "no_proxy",
    # torchrun's, or a batch system's: a test would be taken for one rank of many
    "rank",
    "local_rank",
    "group_rank",
    "role_rank",
    "world_size",
    "local_world_size",
    "master_addr",
    "master_port",
    # width and colours of help and tables
    "columns",
    "lines",
    "no_color",
    "force_color",
    "clicolor",
    "clicolor_force",
    "py_colors",
    "tty_compatible",
    "tty_interactive",
    "terminal_width",
    "typer_use_rich",
    # memory, threads and Spark, which some tests set themselves
    "glibc_tunables",
    "gomp_spincount",
    "omp_wait_policy",
    "spark_home",
    "spark_conf_dir",
    "pyspark_submit_args",
}
OF_OTHERS = ("MALLOC_", "MLFLOW_", "TORCHELASTIC_")
"""Variables of the environment, in lower case, that change what is tested and say nothing about the machine."""

for variable in list(os.environ):
    ours = variable.startswith("RECSPEC_") and variable not in KEPT
    if ours or variable.lower() in MEANT_FOR_OTHERS or variable.startswith(OF_OTHERS):
        del os.environ[variable]

settings.register_profile(
    "everywhere",
    deadline=None,  # a busy machine is slow
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,  # the same examples on every machine; `--hypothesis-profile=default` draws others
    database=None,  # nothing is written into the checkout
)
settings.load_profile("everywhere")

REAL_DATA = Path(__file__).parents[2] / "shared" / "data"


def pytest_collection_finish() -> None:
    """Look for garbage less often, and not among modules and tests: it took a tenth of the time of the tests."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    gc.enable()


def pytest_sessionfinish() -> None:
    """Let the end of the process free everything, as libraries expect."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Torch computes on one thread, whatever the machine: sums come out the same, and tests don't fight for cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is kept in the user's cache folder is kept in one of the tests' own, for their processes too."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def shared_engine() -> Iterator[Callable[..., duckdb.DuckDBPyConnection]]:
    """Engines without a memory limit are connections to one: to start one is a tenth of preparing a small file.

    Returns the function that starts one, for tests of the engine itself.
    """
    start, engines = duckdb.connect, dict[int, duckdb.DuckDBPyConnection]()

    def connect(*given: Any, **named: Any) -> duckdb.DuckDBPyConnection:
        config = named.get("config", {})
        if {*config} != {"threads", "temp_directory"}:
            return start(*given, **named)
        if (threads := config["threads"]) not in engines:
            engines[threads] = start(config={"threads": threads})
        return engines[threads].cursor()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duckdb, "connect", connect)
        yield start


@pytest.fixture(scope="session")
def shop_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs on a made-up shop, whose titles a careless page would run; see `made_up_models.shop`."""
    from tests.made_up_models import shop

    return shop(tmp_path_factory.mktemp("shop"), "<img src=x onerror=document.title=1>")


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], Path]:
    """Folder of a real data set: `real_data("movielens-100k")`; the test skips where it is not there."""
    root = Path(os.environ.get("RECSPEC_DATA", REAL_DATA))

    def folder(name: str) -> Path:
        if not (root / name).is_dir():
            pytest.skip(f"no folder {name} in {root}; set RECSPEC_DATA to the folder with the real data sets")
        return root / name

    return folder
