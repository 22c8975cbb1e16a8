"""Two source trees side by side: what differs is found, what differs from run to run is not."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

MAIN = """
import pathlib, sys
command, *rest = sys.argv[1:]
if command == "break":
    sys.exit("error: it broke")
with pathlib.Path("asked").open("a") as file:
    print(command, file=file)
print("{answer}")
"""


@pytest.fixture
def same(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("same_results")


def source_tree(folder: Path, answer: str) -> Path:
    package = folder / "src" / "recspec"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(MAIN.replace("{answer}", answer))
    return folder


def test_two_trees_are_compared_line_by_line_and_the_status_tells(
    same: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [
        same.Check("train/one", lambda tree: {"printed": tree.recspec("say").strip()}),
        same.Check("train/two", lambda tree: {"length": len(tree.recspec("say"))}),
        same.Check("train/three", lambda tree: {"printed": tree.recspec("break")}),
        same.Check("serve/four", lambda _: {}),
    ]
    monkeypatch.setattr(same, "checks", lambda: iter(checks))
    monkeypatch.setattr(same, "make_raw", lambda *_: None)
    a, b = (str(source_tree(tmp_path / name, answer)) for name, answer in (("a", "left"), ("b", "rite")))
    out = tmp_path / "out.json"

    def status(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["same_results.py", a, b, "--out", str(out), *options])
        code: int = same.main()
        return code

    assert status("--only", "train") == 1
    lines = {line["check"]: line for line in json.loads(out.read_text())["checks"]}
    assert {name: line["outcome"] for name, line in lines.items()} == {
        "train/one": "differs",
        "train/two": "same",
        "train/three": "failed",
    }
    assert lines["train/one"]["first"] == "printed: left / rite"
    assert lines["train/three"]["first"].endswith(": error: it broke (status 1 of -m recspec break)")
    assert "1 same, 0 expected, 1 differs, 1 failed" in capsys.readouterr().out

    assert status("--only", "train/one", "serve", "--expect", "train/*:print*=says otherwise") == 0
    assert "says otherwise" in capsys.readouterr().out
    assert status("--only", "train/one", "--expect", "train/*:length=says otherwise") == 1


def test_a_command_is_run_once(same: ModuleType, tmp_path: Path) -> None:
    tree = same.Tree("A", source_tree(tmp_path / "source", "yes"), tmp_path / "folder")
    tree.check()
    assert [tree.recspec("say"), tree.recspec("say")] == ["yes\n", "yes\n"]
    assert (tmp_path / "folder" / "asked").read_text() == "say\n"


def test_a_tree_without_a_package_of_its_own_is_refused(same: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    tree = same.Tree("A", tmp_path / "source", tmp_path / "folder")
    with pytest.raises(same.CommandError, match=r"^A: imports .* lies outside"):
        tree.check()


def test_what_is_neither_folder_nor_commit_is_refused(same: ModuleType, tmp_path: Path) -> None:
    with (
        pytest.raises(SystemExit, match=r"^no-such-commit: neither a folder with src/recspec nor a commit"),
        same.source_of("no-such-commit", tmp_path / "made"),
    ):
        pass


def test_values_that_differ_from_run_to_run_are_left_out(same: ModuleType) -> None:
    first = {
        "seconds": 1.0,
        "recspec": "1",
        "rows": {"train": 5, "load_seconds": 2},
        "notes": ["a", "b"],
        "k": [1, None],
    }
    second = {
        "seconds": 2.0,
        "recspec": "2",
        "rows": {"train": 5, "load_seconds": 3},
        "notes": ["c", "d"],
        "k": [1, None],
    }
    expected = {"rows/train": 5, "notes count": 2, "k count": 2, "k/0": 1, "k/1": None}
    assert same.flat(first) == same.flat(second) == expected
    assert same.digest(same.flat(first)) == same.digest(same.flat(second))


def test_every_kind_of_difference_is_named(same: ModuleType) -> None:
    weights = np.arange(4, dtype=np.float32)
    a = {"same": 1, "number": 1, "type": 1, "gone": 0, "weights": weights, "shape": weights, "equal": weights}
    b = {
        "same": 1,
        "number": 2,
        "type": 1.0,
        "weights": weights + np.array([0, 0, 0.5, 0], np.float32),
        "shape": weights[:3],
        "equal": weights.copy(),
        "new": 0,
    }
    assert dict(same.differences(a, b)) == {
        "number": "1 / 2",
        "type": "1 / 1.0",
        "gone": "only A has it",
        "weights": "1 of 4 values, by up to 0.5",
        "shape": "float32(4,) / float32(3,)",
        "new": "only B has it",
    }
    assert same.digest(a) != same.digest(b)


def test_a_model_that_no_check_covers_is_a_failure(same: ModuleType, tmp_path: Path) -> None:
    answer = "neumf  matrices\\n  more of it\\nbrand_new  unheard of"
    tree = same.Tree("A", source_tree(tmp_path / "A", answer), tmp_path / "folder")
    assert same.registered(tree, "models", {"neumf", "brand_new"}) == {"names": "neumf, brand_new"}
    with pytest.raises(same.CommandError, match=r"^A: no check covers brand_new, which `recspec models` lists$"):
        same.registered(tree, "models", {"neumf"})


def test_an_expectation_names_a_check_and_a_reason(same: ModuleType) -> None:
    assert same.Expected.parse("prepare/*=new version") == same.Expected("prepare/*", "*", "new version")
    assert same.Expected.parse("a/b:c/*=x = y") == same.Expected("a/b", "c/*", "x = y")
    for text in ("a/b", "=why", "a/b="):
        with pytest.raises(argparse.ArgumentTypeError, match=r"expected NAME=REASON or NAME:KEY=REASON"):
            same.Expected.parse(text)
