"""Commands as a user types them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from recspec.cli import app as cli

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command in this process: exit status, standard output, standard error."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["recspec", *map(str, arguments)])
        capsys.readouterr()
        status = 0
        try:
            cli.main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run
