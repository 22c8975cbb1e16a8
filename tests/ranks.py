"""Ranks of a run as processes of their own, which meet at a store that the test holds.

torchrun does the same: it keeps the store and hands its port down. A port that is looked for first and opened later by
the first rank could be taken in between.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import TCPStore

PATIENCE = 600.0
"""Seconds until processes that hang are ended; they take a few on a quiet machine."""


def a_store() -> TCPStore:
    """A store at a port that the system chose; ranks can meet there as long as the store is kept."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@contextmanager
def started(
    code: str, world_size: int, *arguments: str, store: TCPStore | None = None, **environment: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of all ranks, with pipes for what they print; those that still run at the end are killed."""
    store = store or a_store()
    shared = {"WORLD_SIZE": f"{world_size}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{store.port}",
              "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1", **environment}  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **shared, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
        )
        for rank in range(world_size)
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
