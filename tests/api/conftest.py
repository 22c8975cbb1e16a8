"""A small dataset from a frame and a model of it, which no test changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from recspec import api

USERS = 30


def events() -> pd.DataFrame:
    """Who bought which film when: 12 films of 30 each, with times an hour apart."""
    rng = np.random.default_rng(0)
    rows = [(f"u{user}", f"f{item}") for user in range(USERS) for item in rng.permutation(30)[:12]]
    frame = pd.DataFrame(rows, columns=["customer", "film"])
    return frame.assign(bought_at=pd.date_range("2024-01-01", periods=len(frame), freq="h"))


def films() -> pd.DataFrame:
    """The films, with titles and kinds; one title is hostile."""
    titles = [f"Film {item}" for item in range(30)]
    titles[0] = "<script>alert(1)</script>"
    return pd.DataFrame({"film": [f"f{item}" for item in range(30)], "title": titles, "kind": ["a", "b", "c"] * 10})


def prepared(folder: Path) -> api.Data:
    """The dataset in `folder / "data"`."""
    return api.prepare(
        events(), folder / "data", user="customer", item="film", timestamp="bought_at", items=films(), progress=False
    )


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="package")
def data(folder: Path) -> api.Data:
    return prepared(folder)


@pytest.fixture(scope="package")
def model(folder: Path, data: api.Data) -> api.Model:
    return api.train("ease", data, folder / "run", settings={"settings.l2": 20, "recency": 1}, progress=False)
