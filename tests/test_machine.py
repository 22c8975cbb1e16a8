"""What is said of the machine."""

import os
import subprocess
import sys

import pytest

from recspec import machine


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("2GB", 2_000_000_000), ("512 MiB", 512 << 20), ("1.5kb", 1500), ("3tib", 3 << 40), ("7B", 7)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert machine.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "2 apples", "-1GB", "1e9"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write it as 2GB or 512MiB"):
        machine.parse_bytes(text)


def test_a_report_names_the_processor_and_the_cores() -> None:
    report = machine.describe()
    assert report["cores"]
    assert isinstance(report["bf16_units"], bool)


def test_peak_memory_grows_with_what_is_held() -> None:
    before = machine.peak_memory()
    held = bytearray(before + (64 << 20))
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    assert machine.peak_memory() >= before + (32 << 20)


@pytest.mark.parametrize(("environment", "changed"), [({}, True), ({"MALLOC_ARENA_MAX": "2"}, False)])
def test_the_allocator_is_left_alone_where_the_user_set_it(environment: dict[str, str], changed: bool) -> None:
    program = (
        "import platform; from recspec.machine import keep_freed_memory as keep; print(platform.libc_ver()[0], keep())"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    libc, kept = done.stdout.split()
    assert kept == str(changed and libc == "glibc")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, {"GOMP_SPINCOUNT": "1000"}), ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
     ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"})],
)  # fmt: skip
def test_waiting_threads_sleep_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: dict[str, str]
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    machine.wait_politely()
    assert {name: os.environ[name] for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if name in os.environ} == expected
