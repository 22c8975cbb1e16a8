"""What is said of the machine."""

import os
import platform
import subprocess
import sys

import pytest

from recspec.base import machine
from recspec.base.errors import SettingsError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000", 1000),
        ("2GB", 2_000_000_000),
        ("512 MiB", 512 << 20),
        ("1.5kb", 1500),
        ("3tib", 3 << 40),
        ("7B", 7),
        (" 2 GB ", 2 * 10**9),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert machine.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "2 apples", "-1GB", "1e9", "1" + " " * 1_000_000 + "x"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write it as 2GB or 512MiB"):
        machine.parse_bytes(text)


def test_a_report_names_the_processor_and_the_cores() -> None:
    report = machine.describe()
    assert report["cores"]
    assert isinstance(report["bf16_units"], bool)


def test_peak_memory_grows_with_what_is_held() -> None:
    """In a small process: one that once held gigabytes grows only beyond them."""
    program = """
from recspec.base import machine
before = machine.peak_memory()
held = b"x" * (before + (64 << 20))
print(machine.peak_memory() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 32 << 20


@pytest.mark.parametrize(("environment", "changed"), [({}, True), ({"MALLOC_ARENA_MAX": "2"}, False)])
def test_the_allocator_is_left_alone_where_the_user_set_it(environment: dict[str, str], changed: bool) -> None:
    keeps = "from recspec.base.machine import keep_freed_memory as keep"
    program = f"import platform; {keeps}; print(platform.libc_ver()[0], keep())"
    whole = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", program], env=whole, capture_output=True, text=True, check=True)
    libc, kept = done.stdout.split()
    assert kept == str(changed and libc == "glibc")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_freed_memory_that_was_kept_can_be_returned() -> None:
    program = """
from recspec.base import machine
machine.keep_freed_memory()
held = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
large, last = b"x" * (64 << 20), b"y" * (1 << 20)
del large
before = held()
machine.return_freed_memory()
print(before - held())
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 32 << 20


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "10000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_waiting_threads_sleep_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: dict[str, str]
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    machine.limit_openmp_spin()
    assert {name: os.environ[name] for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if name in os.environ} == expected


# --- cores of each process ---

PAIRS = {core: (core % 4, core % 4 + 4) for core in range(8)}
"""Eight cores that are four physical ones: 0 and 4, 1 and 5, 2 and 6, 3 and 7."""


@pytest.mark.parametrize(
    ("mode", "of_ranks"),
    [
        ("disabled", [None, None, None]),
        ("all", [(0, 1, 2, 3, 4, 5, 6, 7)] * 3),
        ("single", [(0,), (1,), (2,)]),
        ("single_unique", [(0, 4), (1, 5), (2, 6)]),
        ("unique_interleaved", [(0, 3, 4, 7), (1, 5), (2, 6)]),
        ("unique_contiguous", [(0, 1, 4, 5), (2, 6), (3, 7)]),
    ],
)
def test_each_affinity_gives_the_cores_worked_by_hand(mode: str, of_ranks: list[tuple[int, ...] | None]) -> None:
    assert [machine.cores_of(mode, rank, 3, range(8), PAIRS) for rank in range(3)] == of_ranks


def test_only_cores_that_the_process_may_use_are_given() -> None:
    allowed = {1, 5, 2, 7}  # physical ones: 1 with 5, 2 alone, 7 alone
    assert machine.cores_of("all", 0, 2, allowed, PAIRS) == (1, 2, 5, 7)
    found = [machine.cores_of("unique_contiguous", rank, 2, allowed, PAIRS) for rank in range(2)]
    assert found == [(1, 2, 5), (7,)]


def test_without_siblings_every_core_is_a_physical_one() -> None:
    found = [machine.cores_of("unique_interleaved", rank, 2, range(5), {}) for rank in range(2)]
    assert found == [(0, 2, 4), (1, 3)]
    assert [machine.cores_of("single", rank, 3, range(2), {}) for rank in range(3)] == [(0,), (1,), (0,)]


@pytest.mark.parametrize("mode", ["single_unique", "unique_interleaved", "unique_contiguous"])
def test_more_processes_than_physical_cores_are_refused_where_each_wants_its_own(mode: str) -> None:
    message = rf"affinity '{mode}' gives each process physical cores of its own, but 5 processes share 4; start fewer"
    with pytest.raises(SettingsError, match=message):
        machine.cores_of(mode, 0, 5, range(8), PAIRS)


def test_an_unknown_affinity_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"unknown affinity 'singel' \(did you mean 'single'\?\)"):
        machine.cores_of("singel", 0, 1, range(2), {})


@pytest.mark.parametrize(
    ("text", "cores"), [("0-2,8\n", (0, 1, 2, 8)), ("3", (3,)), ("0,64", (0, 64)), ("", ()), ("none", ()), ("1-", ())]
)
def test_sets_of_cores_are_read_as_linux_writes_them(text: str, cores: tuple[int, ...]) -> None:
    assert machine.parse_cores(text) == cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system can't keep a process on cores")
def test_a_process_and_the_threads_it_has_stay_on_the_cores_given() -> None:
    program = (
        "import os, threading\n"
        "from recspec.base.machine import pin\n"
        "meeting, seen = threading.Event(), []\n"
        "thread = threading.Thread(target=lambda: (meeting.wait(), seen.append(os.sched_getaffinity(0))))\n"
        "thread.start()\n"
        "before = os.sched_getaffinity(0)\n"
        "assert pin('disabled') is None and os.sched_getaffinity(0) == before\n"
        "cores = pin('single', 0, 2)\n"
        "meeting.set(); thread.join()\n"
        "assert cores is not None and len(cores) == 1 and set(cores) <= before\n"
        "assert os.sched_getaffinity(0) == set(cores) == seen[0], (os.sched_getaffinity(0), seen)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_system_that_cannot_pin_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    assert machine.pin("disabled") is None
    with pytest.raises(SettingsError, match=r"affinity 'all': .* can't keep a process on cores; take disabled"):
        machine.pin("all")


@pytest.mark.parametrize(
    ("cpuinfo", "flags"),
    [
        ("flags\t\t: avx2 avx512_bf16\nbugs : x\nflags : avx", ("avx2", "avx512_bf16")),
        ("flags :\n", ()),
        ("vmx flags : ept", ()),
        ("", ()),
    ],
)
def test_the_flags_of_a_cpu_are_those_of_its_first_core(cpuinfo: str, flags: tuple[str, ...]) -> None:
    assert machine.cpu_flags(cpuinfo) == flags
    assert isinstance(machine.processor(), str)


@pytest.mark.parametrize(
    ("asked", "environment", "quota", "processes", "expected"),
    [
        (3, {"OMP_NUM_THREADS": "1"}, 1, 1, (3, "as asked")),
        (None, {"OMP_NUM_THREADS": "8"}, 1, 1, (8, "as OMP_NUM_THREADS says")),
        (None, {}, None, 1, (8, "the cores that torch found")),
        (None, {}, 16, 1, (8, "the cores that torch found")),
        (None, {}, 2, 1, (2, "the container may use 2 cores at once")),
        (None, {}, 4, 2, (2, "the container may use 4 cores at once")),
        (None, {}, 1, 2, (1, "the container may use 1 cores at once")),
    ],
)
def test_threads_have_a_reason(
    asked: int | None, environment: dict[str, str], quota: int | None, processes: int, expected: tuple[int, str]
) -> None:
    assert machine.pick_threads(asked, 8, environment, quota, processes=processes) == expected


def test_a_thread_that_torchrun_left_is_said_to_be_its_doing() -> None:
    found = machine.pick_threads(None, 1, {"OMP_NUM_THREADS": "1"}, None, processes=2)
    assert found == (1, "as OMP_NUM_THREADS says; torchrun sets it to 1 where nobody did")


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("200000 100000\n", 2),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("max 100000\n", None),
        ("", None),
        ("1 0", None),
    ],
)
def test_a_control_groups_quota_is_read(text: str, cores: int | None) -> None:
    assert machine.parse_quota(text) == cores


def test_what_becomes_of_freed_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_keeps_freed_memory", True)
    assert machine.freed_memory()[0] == "kept by the process"
    monkeypatch.setattr(machine, "_keeps_freed_memory", False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert machine.freed_memory() == ("left to the system's allocator", "the environment sets MALLOC_ARENA_MAX")
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    assert machine.freed_memory()[1] == "recspec.base.machine.keep_freed_memory() was not called, or not on glibc"


def test_instruction_sets_are_read_from_the_processors_flags() -> None:
    xeon = "flags : fpu avx2 fma avx512f avx512bw avx512dq avx512vl avx512_vnni"
    assert machine.instruction_sets(xeon) == ["avx2", "fma", "avx512f", "avx512_vnni"]
    assert machine.instruction_sets("") == []
