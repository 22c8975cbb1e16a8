"""What the machine offers: bf16 units, memory, and an allocator set for training.

Linux is asked directly; elsewhere every answer falls back to the safe one.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import sys
from functools import cache
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt (malloc.h)."""


@cache
def cpu_multiplies_bf16() -> bool:
    """Whether the CPU has instructions that multiply bf16 (AVX-512 BF16 or AMX); without them bf16 is the slower."""
    flags = _read("/proc/cpuinfo")
    return "avx512_bf16" in flags or "amx_bf16" in flags


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory instead of handing every large tensor back to the kernel; False where it can't.

    By default each tensor over 32 MB is mapped and unmapped at every step, and the page faults cost 1.3 to 3 times an
    embedding step (docs/decisions.md). Same effect as MALLOC_MMAP_MAX_=0 and MALLOC_TRIM_THRESHOLD_ in the
    environment, without having to know; where the user set either, nothing is changed.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))


def wait_politely() -> None:
    """Let OpenMP's threads sleep when they wait for each other; before torch is loaded, which reads this once.

    By default a waiting thread spins. Where other work shares the cores it spins in the way of the thread it waits for:
    300 products of 16384 x 64 x 64 took 17.9 s on two threads beside two busy processes, and 2.3 s with a short spin
    (docs/decisions.md). Where the user set OMP_WAIT_POLICY or GOMP_SPINCOUNT, nothing is changed.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def peak_memory() -> int:
    """Most memory this process has held so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def total_memory() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe() -> dict[str, object]:
    """Processor, cores, memory (bytes) and system, for a report of measurements."""
    model = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
    memory = re.search(r"MemTotal:\s*(\d+) kB", _read("/proc/meminfo"))
    return {
        "processor": model[1].strip() if model else platform.processor(),
        "cores": os.cpu_count(),
        "memory": int(memory[1]) * 1024 if memory else None,
        "bf16_units": cpu_multiplies_bf16(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def parse_bytes(text: str) -> int:
    """`2GB`, `512MiB`, `1000` -> bytes.

    Raises:
        ValueError: if it is none of these.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"'{text}' is not a size; write it as 2GB or 512MiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " "))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
