"""What the machine offers: memory, cores for each process, and an allocator set for training.

Most answers come from Linux's own files; elsewhere every answer is the safe one.
"""

from __future__ import annotations

import gc
import os
import platform
import re
import resource
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from recspec.base.errors import SettingsError, unknown

Affinity = Literal["disabled", "all", "single", "single_unique", "unique_interleaved", "unique_contiguous"]
AFFINITIES: tuple[Affinity, ...] = get_args(Affinity)

_keeps_freed_memory = False

SPINS = "10000"
"""How often a thread of OpenMP looks for work before it sleeps."""

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt (malloc.h)."""


@cache
def processor() -> str:
    """The CPU's name, with its flags on Linux."""
    return f"{_cpu_model()} {' '.join(cpu_flags(_read('/proc/cpuinfo')))}"


def cpu_flags(cpuinfo: str) -> tuple[str, ...]:
    """The instruction sets of the first core, from the text of /proc/cpuinfo."""
    found = re.search(r"^flags\s*:(.*)", cpuinfo, re.MULTILINE)
    return tuple(found[1].split()) if found else ()


def _cpu_model() -> str:
    found = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
    return found[1].strip() if found else platform.processor()


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory instead of handing every large tensor back to the kernel; False if it can't.

    By default each tensor over 32 MB is mapped and unmapped at every step, and the page faults cost 1.3 to 3 times an
    embedding step. The effect is that of MALLOC_MMAP_MAX_=0 and MALLOC_TRIM_THRESHOLD_ in the
    environment. If the user set an allocator's variable, nothing changes.
    """
    if _allocator_variables() or platform.libc_ver()[0] != "glibc":
        return False
    import ctypes

    global _keeps_freed_memory
    mallopt = ctypes.CDLL(None).mallopt
    _keeps_freed_memory = bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))
    return _keeps_freed_memory


def freeze_heap() -> None:
    """Leave what is loaded out of later garbage collections: one over a server's heap holds requests up for .2 s."""
    gc.collect()
    gc.freeze()


def return_freed_memory() -> None:
    """Hand freed memory back to the system once, between works that need other sizes: it is kept otherwise."""
    if platform.libc_ver()[0] == "glibc":
        import ctypes

        ctypes.CDLL(None).malloc_trim(0)


def freed_memory() -> tuple[str, str]:
    """What this process does with freed memory, and the reason."""
    if _keeps_freed_memory:
        return "kept by the process", "returning it and asking anew costs page faults at every step"
    if asked := _allocator_variables():
        return "left to the system's allocator", f"the environment sets {', '.join(asked)}"
    return "left to the system's allocator", "recspec.base.machine.keep_freed_memory() was not called, or not on glibc"


def _allocator_variables() -> list[str]:
    return sorted(name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES")


def pick_threads(
    asked: int | None, torchs: int, environment: Mapping[str, str], quota: int | None, *, processes: int = 1
) -> tuple[int, str]:
    """Threads of a process's computations on a CPU, and the reason.

    `asked` is the number in the settings, `torchs` torch's own; `quota` the cores that the container may use at once,
    None for no limit; `processes` the number of this run's processes on this machine.
    """
    if asked is not None:
        return asked, "as asked"
    if "OMP_NUM_THREADS" in environment:
        torchrun = "; torchrun sets it to 1 where nobody did" if processes > 1 and torchs == 1 else ""
        return torchs, f"as OMP_NUM_THREADS says{torchrun}"
    if quota is not None and (own := max(1, quota // processes)) < torchs:
        return own, f"the container may use {quota} cores at once"
    return torchs, "the cores that torch found"


def cores_at_once() -> int | None:
    """Cores that this process's container may use at once; None for no limit."""
    return parse_quota(_read("/sys/fs/cgroup/cpu.max"))


def parse_quota(text: str) -> int | None:
    """`200000 100000`, a control group's time and period as Linux writes them -> 2 cores; None for any other text."""
    match = re.fullmatch(r"(\d+) (\d+)\s*", text)
    return max(1, int(match[1]) // int(match[2])) if match and int(match[2]) else None


def stop_signals() -> list[signal.Signals]:
    """The signals that ask a process to stop: Ctrl-C, SIGTERM, and SIGHUP of a terminal that was closed.

    SIGHUP is none of them in a process that ignores it, as under `nohup`.
    """
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


def limit_openmp_spin() -> None:
    """Let OpenMP's threads sleep while they wait for each other; torch reads this once, when it is loaded.

    By default a waiting thread spins. If other work shares the cores, it slows the thread that it waits for: 300
    products of 16384 x 64 x 64 took 17.9 s on two threads beside two busy processes, and 2.3 s with a short spin. A
    spin too short sends threads to sleep between the small operations of one user, and waking them takes longer than
    most of these. If the user set OMP_WAIT_POLICY or GOMP_SPINCOUNT, nothing changes.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def cores_of(
    mode: str, local_rank: int, local_world_size: int, cores: Iterable[int], siblings: Mapping[int, tuple[int, ...]]
) -> tuple[int, ...] | None:
    """The cores that a process of this machine should run on, ascending; None leaves it where the system puts it.

        disabled             None
        all                  every core
        single               one core for each process in turn; they share cores if there are fewer
        single_unique        one physical core, and no other process on it
        unique_interleaved   physical cores dealt out in turn: of 4 and 2 processes, 0 and 2 to the first
        unique_contiguous    physical cores in neighbouring shares: 0 and 1 to the first

    A physical core is a core with its `siblings` (threads of one core, itself included) as far as they are in `cores`;
    the last three modes give all of it.

    Raises:
        SettingsError: for an unknown mode, or one that needs more physical cores than there are.
    """
    if mode not in AFFINITIES:
        raise SettingsError(unknown("affinity", mode, AFFINITIES))
    if mode == "disabled":
        return None
    mine = sorted(set(cores))
    physical = list(dict.fromkeys(tuple(c for c in mine if c == core or c in siblings.get(core, ())) for core in mine))
    if mode == "all":
        return tuple(mine)
    if mode == "single":
        return physical[local_rank % len(physical)][:1]
    if len(physical) < local_world_size:
        raise SettingsError(
            f"affinity '{mode}' gives each process physical cores of its own, but {local_world_size} processes share "
            f"{len(physical)}; start fewer, or take all, single or disabled"
        )
    if mode == "single_unique":
        return physical[local_rank]
    if mode == "unique_interleaved":
        chosen = physical[local_rank::local_world_size]
    else:
        small, extra = divmod(len(physical), local_world_size)
        start = local_rank * small + min(local_rank, extra)
        chosen = physical[start : start + small + (local_rank < extra)]
    return tuple(sorted(core for of in chosen for core in of))


def pin(mode: str, local_rank: int = 0, local_world_size: int = 1) -> tuple[int, ...] | None:
    """Keep this process, its threads and those they start on `cores_of` the cores it may use; returns these.

    Raises:
        SettingsError: as `cores_of`, or if the system can't pin a process.
    """
    if mode != "disabled" and not hasattr(os, "sched_setaffinity"):
        raise SettingsError(f"affinity '{mode}': {platform.system()} can't keep a process on cores; take disabled")
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    threads = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    siblings = {core: parse_cores(_read(threads.format(core))) or (core,) for core in allowed}
    chosen = cores_of(mode, local_rank, local_world_size, allowed, siblings)
    if chosen is None:
        return None
    tasks = Path("/proc/self/task")
    for thread in [int(task.name) for task in tasks.iterdir()] if tasks.is_dir() else [0]:  # 0: the calling thread
        with suppress(ProcessLookupError):  # it has ended since it was listed
            os.sched_setaffinity(thread, chosen)
    return chosen


def parse_cores(text: str) -> tuple[int, ...]:
    """`0-2,8`, a set of cores as Linux writes it -> (0, 1, 2, 8); nothing for any other text."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text.strip()):
        return ()
    ends = [[int(end) for end in part.split("-")] for part in text.strip().split(",")]
    return tuple(core for part in ends for core in range(part[0], part[-1] + 1))


def peak_memory() -> int:
    """The most memory that this process has held so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def command_line() -> tuple[str, ...] | None:
    """The command line of this process, if it runs the program recspec; None if another program uses the library."""
    program = Path(sys.argv[0]) if sys.argv else Path()
    is_ours = program.name == "recspec" or program.parts[-2:] == ("recspec", "__main__.py")
    if is_ours and sys.argv[1:2] == ["forget"]:  # the rest names a person, whom no record may name
        return ("recspec", "forget")
    return ("recspec", *sys.argv[1:]) if is_ours else None


def total_memory() -> int:
    """The machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe() -> dict[str, object]:
    """Processor, cores, memory (bytes) and system, for a report of measurements."""
    memory = re.search(r"MemTotal:\s*(\d+) kB", _read("/proc/meminfo"))
    return {
        "processor": _cpu_model(),
        "cores": os.cpu_count(),
        "memory": int(memory[1]) * 1024 if memory else None,
        "isa": instruction_sets(_read("/proc/cpuinfo")),
        "bf16_units": bool({"avx512_bf16", "amx_bf16"} & {*cpu_flags(_read("/proc/cpuinfo"))}),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def instruction_sets(cpuinfo: str) -> list[str]:
    """Which of the instruction sets that matter for products of matrices a CPU has, as /proc/cpuinfo names them."""
    known = ("avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")
    held = set(cpu_flags(cpuinfo))
    return [name for name in known if name in held]


def parse_bytes(text: str) -> int:
    """`2GB`, `512MiB`, `1000` -> bytes.

    Raises:
        ValueError: for any other text.
    """
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"'{text}' is not a size; write it as 2GB or 512MiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " "))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
