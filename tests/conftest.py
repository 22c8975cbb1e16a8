"""What all tests share: one thread each, and real data where it is there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy or torch is loaded: several tests run side by side
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is loaded: its kernels then run without a GPU

REAL_DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Torch computes on one thread, whatever the machine: sums come out the same, and tests don't fight for cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], Path]:
    """Folder of a real data set: `real_data("movielens-100k")`; the test skips where it is not there."""
    root = Path(os.environ.get("RECSPEC_DATA", REAL_DATA))

    def folder(name: str) -> Path:
        if not (root / name).is_dir():
            pytest.skip(f"no folder {name} in {root}; set RECSPEC_DATA to the folder with the real data sets")
        return root / name

    return folder
