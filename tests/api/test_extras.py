"""What needs a library that only an extra installs says so before it reads anything."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from recspec import cli
from recspec.models import MODELS

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]

NOWHERE = "nowhere"
COMMANDS = [
    *(
        (library, "baselines", ["train", name, NOWHERE, "run"])
        for name, model in MODELS.items()
        for library in model.traits.libraries
    ),
    ("optuna", "tune", ["tune", "neumf", NOWHERE, "out"]),
    ("ray", "ray", ["train", "neumf", NOWHERE, "run", "--launcher", "ray"]),
    *(
        (library, "onnx", ["export", NOWHERE, "out", "--format", kind])
        for library in ("onnx", "onnxscript", "onnxruntime")
        for kind in ("onnx", "triton")
    ),
    ("matplotlib", "report", ["report", NOWHERE]),
    ("matplotlib", "report", ["describe", NOWHERE, "--html", "page.html"]),
    ("pyspark", "spark", ["prepare", "table", NOWHERE, "data", "--engine", "spark"]),
    *(
        (library, "serve", ["serve", NOWHERE])
        for library in ("starlette", "uvicorn", "httptools", "orjson", "prometheus_client")
    ),
    ("grpc", "serve", ["serve", NOWHERE, "--grpc-port", "0"]),
]

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """What a command says that ends with an error, where a library is not installed."""

    def said(library: str, *words: str) -> str:
        for name in [*sys.modules, library]:
            if name.split(".")[0] == library:
                monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["recspec", *words])
        with pytest.raises(SystemExit, match="2"):
            cli.main()
        return re.sub(r"\s+", " ", capsys.readouterr().err).strip()

    return said


@pytest.mark.parametrize(("library", "extra", "words"), COMMANDS, ids=lambda value: str(value).replace(" ", ""))
def test_a_missing_library_is_the_first_thing_that_is_said(
    run: Run, library: str, extra: str, words: list[str], tmp_path: Path
) -> None:
    needed = f"error: this needs the library '{library}', which is not installed: pip install 'recspec[{extra}]'"
    assert run(library, *words) == needed
    assert not list(tmp_path.iterdir())
    assert extra in EXTRAS


def test_tracking_that_is_asked_for_needs_mlflow_before_anything_is_read(run: Run) -> None:
    said = run("mlflow", "train", "neumf", NOWHERE, "run", "--set", "train.mlflow=http://localhost:5000")
    assert (
        said == "error: train.mlflow needs the library 'mlflow', which is not installed: pip install 'recspec[mlflow]'"
    )


@pytest.mark.parametrize("library", ["starlette", "uvicorn", "prometheus_client"])
def test_a_server_is_measured_without_the_libraries_of_a_server(
    run: Run, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import recspec.serving

    monkeypatch.setattr(recspec, "serving", recspec.serving)  # which comes back with the modules
    for name in [name for name in sys.modules if name.startswith("recspec.serving")]:
        monkeypatch.delitem(sys.modules, name)  # as if it had never been imported
    said = run(library, "bench", "serve", "http://127.0.0.1:1")
    assert said.startswith("error: http://127.0.0.1:1: ")
    assert "not installed" not in said
