"""`recspec runs`, `report` and `describe --html`, and the last line of commands: the next one."""

import ast
import inspect
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

import recspec.cli
from recspec.api import Section, figures
from recspec.cli import console, rich_consoles
from recspec.cli.app import COMMANDS
from recspec.feature_spec import FeatureSpec
from tests import made_up
from tests.cli.conftest import Cli


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    folder = tmp_path_factory.mktemp("a shop's runs") / "data"
    return made_up.interactions(folder, num_users=40, num_items=30, num_rows=500)


def test_each_next_command_does_what_it_says_from_train_to_runs(
    run: Cli, data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "my run"
    status, _, said = run("train", "popularity", data.folder, place)
    assert status == 0, said
    last = said.splitlines()[-1]
    assert last == f"next: {shlex.join(['recspec', 'evaluate', str(place), str(data.folder), '--baselines'])}"
    status, printed, said = run(*shlex.split(last)[2:])
    assert status == 0, said
    kept, following = said.splitlines()[-2:]
    assert re.fullmatch(rf"{re.escape(str(place))}/evaluations/test-[0-9a-f]{{10}}\.json: kept", kept)
    assert following == f"next: {shlex.join(['recspec', 'report', str(place)])}"
    monkeypatch.chdir(tmp_path)
    status, printed, said = run("runs")
    assert (status, said) == (0, "")
    assert "1 run in .\n" in printed
    told = r"my run\s+│ data \(synthetic\) │ popularity │ full/ndcg@10 │ 0\.[0-9]{4} │ 0\.[0-9]{4} │ 20"
    assert re.search(told, printed)
    (place / "updates" / "0001" / "bundle").mkdir(parents=True)
    (place / "updates" / "0001" / "bundle" / "bundle.json").touch()
    assert run("runs")[2] == "* my run: 1 update since; the newest answers\n"
    shutil.rmtree(place / "updates")
    status, printed, _ = run("runs", tmp_path, "--json", "--sort", "rows/auc")
    assert json.loads(printed)["runs"][0]["path"] == str(place)
    status, printed, _ = run("runs", tmp_path, "--sort", "rows/auc", "--split", "valid")
    assert status == 2


def test_what_is_wrong_in_a_folder_is_told_after_the_table(run: Cli, data: FeatureSpec, tmp_path: Path) -> None:
    assert run("runs", tmp_path)[:2] == (0, f"no run in {tmp_path}\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("[" * 100_000)
    (tmp_path / "loop").symlink_to(tmp_path)
    status, printed, said = run("runs", tmp_path)
    assert status == 0
    assert "broken" in printed
    assert "damaged: lists and objects are nested too deeply; unfinished: it holds no bundle" in said
    assert f"note: {tmp_path / 'loop'}: links to folders, which are not followed" in said
    assert run("runs", tmp_path / "none")[0] == 2
    assert run("train", "popularity", data.folder, tmp_path / "run")[0] == 0
    assert run("evaluate", tmp_path / "run", data.folder, "--repeats", "keep")[0] == 0
    status, printed, said = run("runs", tmp_path)
    assert f"* {tmp_path / 'run'}: on test with repeats keep" in said
    assert re.search(r"0\.[0-9]{4} \*", printed)


def test_evaluation_on_other_data_is_told_and_done(run: Cli, data: FeatureSpec, tmp_path: Path) -> None:
    place = tmp_path / "run"
    assert run("train", "popularity", data.folder, place)[0] == 0
    other = Path(shutil.copytree(data.folder, tmp_path / "other"))
    (other / "prepare.json").unlink()
    status, printed, _ = run("evaluate", place, other)
    assert status == 0
    assert f"the model was trained on another dataset: {data.folder.resolve()} (" in printed


def test_a_path_of_the_next_command_is_quoted_and_never_read_as_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["plain", "two words", "it's", "$HOME", "a;rm -rf b", "-x", "--json", "*", "#", "ü", "[red]"]
    for name in names:
        console.print_next("evaluate", Path(name), "--baselines")
        printed = capsys.readouterr().err.rstrip("\n")
        _, program, command, path, option = shlex.split(printed)
        assert (program, command, Path(path), option) == ("recspec", "evaluate", Path(name), "--baselines")
        assert not path.startswith("-")
    console.print_next("serve", Path("s3://bucket/run"))  # which has one slash by now
    assert capsys.readouterr().err == "next: recspec serve s3://bucket/run\n"
    console.print_next("serve", Path("a\tb'\x1bü\udcff\\"))
    assert capsys.readouterr().err == "next: recspec serve $'a\\x09b\\x27\\x1b\\xc3\\xbc\\xff\\x5c'\n"


def test_texts_of_others_neither_steer_the_terminal_nor_become_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b]0;title\x07 \x9b31m \x7f\r\b sku:100:x [red]é\t\n"
    shown = "\\x1b]0;title\\x07 \\x9b31m \\x7f\\x0d\\x08 sku:100:x [red]é"
    for print_it in (
        lambda: console.out.print(hostile),
        lambda: console.err.print(f"error: {hostile}", style="red"),
        lambda: console.print_section(figures(hostile, {hostile: 1})),
        lambda: console.print_section(Section("lines", (hostile,), [(hostile,)])),
    ):
        print_it()
        found = "".join(capsys.readouterr())
        assert shown in found
        assert not {chr(each) for each in rich_consoles.STEERING} & {*found}
    console.print_json({hostile: hostile})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {hostile: hostile}
    assert not {chr(each) for each in rich_consoles.STEERING} & {*printed}


def test_every_next_command_is_one() -> None:
    """Each literal that `print_next` is given names a command of the application."""
    known = {name.partition(" ")[0] for name in COMMANDS}
    found = set()
    for file in Path(inspect.getfile(recspec.cli)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print_next" and not node.keywords:
                found.add(ast.literal_eval(node.args[0]))
    assert found
    assert found <= known


def test_report_writes_a_page_and_prints_its_path(run: Cli, data: FeatureSpec, tmp_path: Path) -> None:
    assert run("train", "popularity", data.folder, tmp_path / "run")[0] == 0
    pages = (tmp_path / "run" / "report.html", tmp_path / "page.html")
    assert run("report", tmp_path / "run")[1] == f"{pages[0]}\n"
    assert run("report", tmp_path / "run", "--out", pages[1], "--data", data.folder)[1] == f"{pages[1]}\n"
    assert all(page.read_text(encoding="utf-8").startswith("<!doctype html>") for page in pages)
    status, _, said = run("report", tmp_path / "rum")
    assert (status, "no such folder" in said) == (2, True)


def test_describe_writes_a_page_or_prints_json(run: Cli, data: FeatureSpec, tmp_path: Path) -> None:
    assert run("describe", data.folder, "--html", tmp_path / "data.html")[1] == f"{tmp_path / 'data.html'}\n"
    assert "Suspected leaks" in (tmp_path / "data.html").read_text(encoding="utf-8")
    said = run("describe", data.folder, "--html", tmp_path / "data.html", "--json")[2]
    assert "describe: --html and --json are two outputs; give one of them" in said
