"""The Python of the documents runs: the blocks of a page in order, in one process; of a tutorial its commands too."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from recspec.cli import app as cli
from recspec.models import MODELS
from tests import shop
from tests.documented import PAGES, fences, name_of
from tests.test_docs_code import lines_of


@pytest.fixture(autouse=True)
def _models_as_they_were() -> Iterator[None]:
    """Takes out the models of one's own that a page enters."""
    before = dict(MODELS)
    yield
    MODELS.clear()
    MODELS.update(before)


def page_of(path: Path) -> object:
    """A case of a page; what takes longer than a second or two is slow."""
    marks = [pytest.mark.slow] if name_of(path) in SLOW else []
    if name_of(path) == "docs/guides/object_stores.md":
        marks = [
            pytest.mark.skip(reason="reads s3://shop, a store of the reader's; tests/stores/test_s3.py runs its story")
        ]
    return pytest.param(path, id=name_of(path), marks=marks)


SLOW = {
    "docs/serving.md",
    "docs/tutorials/first_steps.md",
}

WITHOUT_END = {"serve"}
"""Commands that end only when they are told to."""


def serving_runs(folder: Path) -> None:
    """A run of every kind that docs/serving.md names."""
    import recspec as rs

    rng = np.random.default_rng(0)
    numbers = range(1, 61)
    items = [{"item_id": n, "title": f"item {n}", "price": 3 + n * 7 % 60, "is_new": n % 5 == 0} for n in numbers]
    rows = [
        {"user_id": user, "item_id": int(item), "timestamp": time, "hour": int(rng.integers(24))}
        for user in range(1, 61)
        for time, item in enumerate(rng.permutation(60)[:8] + 1)
    ]
    events = rs.prepare(rows, folder / "data", items=items, title="title", progress=False)
    rs.train("neumf", events, folder / "RUN", factors=8, layers=[16, 8], epochs=1, progress=False)
    rs.open(folder / "RUN").export(folder / "OUT", batch_sizes=[1])
    labelled = [{**row, "clicked": int(rng.integers(2)), "price": 3 + row["item_id"] * 7 % 60} for row in rows]
    clicks = rs.prepare(labelled, folder / "clicks", label="clicked", progress=False)
    rs.train("wide_deep", clicks, folder / "CLICKS", hidden=[16], epochs=1, progress=False)
    rs.open(folder / "CLICKS").export(folder / "RANKER", form="ranker", batch_sizes=[1], precision="fp32")
    with (folder / "scores.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["display_id", "ad_id", "probability"], [7, 20, 0.1], [7, 3, 0.4]])
    import pyarrow.csv
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.csv.read_csv(folder / "scores.csv"), folder / "scores.parquet")


def module_of_models(folder: Path) -> None:
    """The module that docs/notebooks/4_own_model.ipynb speaks of."""
    (folder / "library_models.py").write_text("")


PREPARED: dict[str, Callable[[Path], None]] = {
    "README.md": shop.write,
    "docs/index.md": shop.write,
    "docs/notebooks/4_own_model.ipynb": module_of_models,
    "docs/serving.md": serving_runs,
}
"""What must lie in the folder before a page's first block runs."""


@pytest.mark.parametrize("page", [page_of(p) for p in PAGES if any(f.language == "python" for f in fences(p))])
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PREPARED.get(name_of(page), lambda _: None)(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["recspec", "version"])  # what a block that calls `main` runs
    names: dict[str, object] = {"__name__": "__main__"}
    for fence in fences(page):
        if fence.language == "python":
            code = compile(fence.text, str(fence), "exec")
            assert not status(lambda code=code: exec(code, names)), str(fence)
        elif fence.language == "sh" and page.parent.name == "tutorials":
            for words in lines_of(fence.text):
                if words[0] == "recspec" and words[1] not in WITHOUT_END:
                    monkeypatch.setattr(sys, "argv", words)
                    assert not status(cli.main), f"{fence}: {words}"


def status(function: Callable[[], object]) -> int | str | None:
    """The exit status with which it ends the process; None if it does not."""
    try:
        function()
    except SystemExit as ended:
        return ended.code
    return None
