"""The commands of pages that tell a whole way run, one after another, in a folder of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documented import ROOT, fences
from tests.made_up_films import write_movielens_like
from tests.test_docs_code import lines_of

NOT_RUN = {"serve"}
"""Commands that wait for requests; the tests of the server run them."""


def commands(page: Path, *, until: str = "") -> Iterator[list[str]]:
    """The words of recspec's commands on a page, up to a text that ends the way."""
    for fence in fences(page):
        if until and fence.line > _line_of(page, until):
            return
        if fence.language == "sh":
            yield from (words for words in lines_of(fence.text) if words[0] == "recspec" and words[1] not in NOT_RUN)


def _line_of(page: Path, text: str) -> int:
    lines = page.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


def run(words: list[str], folder: Path) -> None:
    done = subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


@pytest.mark.slow
def test_the_first_commands_of_the_readme_run(tmp_path: Path) -> None:
    write_movielens_like(tmp_path / "ml-latest-small", num_users=150, num_items=100, num_ratings=4000)
    asked = list(commands(ROOT / "README.md", until="To use your own environment"))
    assert [words[1] for words in asked] == ["prepare", "auto", "evaluate", "recommend"]
    for words in asked:
        run(["0.1" if word == "5" else word for word in words], tmp_path)  # minutes of the search
