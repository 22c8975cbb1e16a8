"""The commands as a user types them: what they print, where, and their exit status."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from recspec import api, datasets
from recspec.api import verb_checks
from recspec.bench import speed
from recspec.bundle import folder as bundle
from recspec.cli import app as cli
from recspec.cli import console, demo, presenters, rich_consoles
from recspec.datasets import write_shop
from recspec.feature_spec import FeatureSpec
from recspec.inference.recommendation import Recommendation, RecommendedItem
from tests import made_up
from tests.asking import serving, sources
from tests.cli.conftest import Cli
from tests.feature_spec.files import EXAMPLE
from tests.made_up_films import write_movielens_like
from tests.made_up_models import made_up_bundle

WORKED_EXAMPLE = "\n" + EXAMPLE


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("cli") / "data")


def sets(*assignments: str) -> list[str]:
    """The options that set settings."""
    return [word for each in assignments for word in ("--set", each)]


def worked_example(folder: Path, text: str = WORKED_EXAMPLE) -> Path:
    """The specification of the design, with files as it says: 2 + 3 rows beside 5 rows, and a test of 3."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "feature_spec.yaml").write_text(text)
    (folder / "train_data_0_0.csv").write_text("1,33\n2,18\n")
    (folder / "train_data_0_1.csv").write_text("0,52\n1,21\n2,40\n")
    (folder / "train_data_1.csv").write_text("0,0,1\n1,855,0\n2654,3,1\n7,8,0\n9,10,1\n")
    (folder / "test_data.csv").write_text("0,5,1,1,30\n1,6,0,2,31\n2,7,1,0,32\n")
    return folder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_asked_to_end_leaves_nothing_behind(
    number: signal.Signals, run: Cli, data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: object) -> None:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # a shell and the kernel both tell of a closed terminal

    monkeypatch.setattr(FeatureSpec, "save", save)
    before = signal.signal(number, signal.SIG_DFL)  # under nohup, SIGHUP is ignored
    try:
        status, _, said = run("transcode", data.folder, tmp_path / "new" / "out")
        assert status == 130
        assert "error" not in said
        assert list(tmp_path.iterdir()) == []
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("gone", ["pipe", "disk"])
def test_work_goes_on_if_nobody_reads_its_remarks(gone: str) -> None:
    if gone == "pipe":
        reader, number = os.pipe()
        os.close(reader)
    else:
        number = os.open("/dev/full", os.O_WRONLY)
    with os.fdopen(number, "w", buffering=1, closefd=False) as file:
        remarks = rich_consoles.Remarks(file=file)
        for _ in range(2):
            remarks.print("epoch 1")
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)  # so that the file can be closed
    assert remarks.quiet


@pytest.mark.slow
@pytest.mark.parametrize("command", ["models", "schema"])
def test_whoever_reads_may_have_enough(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        ended = subprocess.run(
            [sys.executable, "-m", "recspec", command], stdout=pipe, stderr=subprocess.PIPE, text=True
        )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_standard_stream_that_was_closed_is_as_one_to_dev_null(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    console.open_closed_streams()
    assert [each.fileno() for each in (sys.stdin, sys.stdout, sys.stderr)] == [0, 1, 2]


# --- the specification -----------------------------------------------------------------------------------------------


def test_the_worked_example_checks_describes_and_trains_as_it_stands(run: Cli, tmp_path: Path) -> None:
    folder = worked_example(tmp_path / "example")
    assert run("check", folder) == (0, "ok: 5 features; train 5 rows, test 3 rows\n", "")
    status, printed, _ = run("describe", folder, "--json")
    assert status == 0
    assert json.loads(printed)["splits"]["train"]["rows"] == 5
    status, _, said = run("train", "neumf", folder, tmp_path / "run", "--set", "epochs=2", "--set", "negatives=2")
    assert status == 0, said
    assert "bundle of epoch 2" in said
    status, printed, _ = run("evaluate", tmp_path / "run", folder, "--protocol", "rows", "--json")
    assert status == 0
    assert set(json.loads(printed)["metrics"]) == {"rows"}
    status, printed, _ = run("evaluate", tmp_path / "run", folder, "--baselines")
    assert status == 0
    left_out = [line for line in printed.splitlines() if line.startswith("protocol ")]
    assert left_out == [
        "protocol full left out: requests differ by 'user_age'; ask for it with the protocol's name",
        "protocol sampled left out: the dataset names no group; ask for it with the protocol's name",
    ]
    assert "warning: " not in printed  # of three rows nothing can be said


TINY = ("embedding_dim=4", "bottom=[4]", "top=[4]", "train.epochs=1")
BROKEN: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "unknown feature in a channel": (
        lambda f: worked_example(f, WORKED_EXAMPLE.replace("numeric_inputs: [user_age]", "numeric_inputs: [user_aje]")),
        ["line 15: channel_spec.numeric_inputs[0]: unknown feature 'user_aje' (did you mean 'user_age'?)"],
    ),
    "id beyond its cardinality": (
        lambda f: (worked_example(f) / "train_data_1.csv").write_text("0,0,1\n1,856,0\n2654,3,1\n7,8,0\n9,10,1\n"),
        ["train_data_1.csv", "item_id", "row 2", "856"],
    ),
    "missing file": (
        lambda f: (worked_example(f) / "test_data.csv").rename(f / "tests_data.csv"),
        ["test_data.csv", "did you mean 'tests_data.csv'?"],
    ),
    "a path outside the folder": (
        lambda f: worked_example(f, WORKED_EXAMPLE.replace("[test_data.csv]", "[../test_data.csv]")),
        ["line 13: source_spec.test[0].files[0]: '../test_data.csv' leads outside the folder"],
    ),
    "bad YAML": (lambda f: worked_example(f, WORKED_EXAMPLE.replace("[item_id]", "[item_id")), ["not valid YAML"]),
    "empty split": (lambda f: (worked_example(f) / "test_data.csv").write_text(""), ["test", "no row"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_check_tells_what_is_wrong_and_where(run: Cli, tmp_path: Path, name: str) -> None:
    break_it, expected = BROKEN[name]
    break_it(tmp_path / "broken")
    status, printed, said = run("check", tmp_path / "broken")
    assert status == 2
    assert printed == ""
    assert said.startswith("error: ")
    assert "Traceback" not in said
    for part in expected:
        assert part in said


def test_ids_and_numbers_that_break_the_specification_are_told_alike_by_check_and_by_training(
    run: Cli, tmp_path: Path
) -> None:
    as_float = WORKED_EXAMPLE.replace("user_age:    {dtype: torch.int8}", "user_age:    {dtype: float16}")
    folder = worked_example(tmp_path / "broken", as_float)
    (folder / "train_data_0_1.csv").write_text("0,nan\n1,inf\n2,40\n")
    (folder / "train_data_1.csv").write_text("0,0,1\n1,856,0\n-1,3,1\n7,8,0\n9,10,1\n")
    expected = [
        "3 problems",
        "train_data_0_1.csv, column 'user_age', row 1: nan is not a finite number (and 1 more row like it)",
        "train_data_1.csv, column 'item_id', row 2: 856 is too large for an id: the cardinality is 856, so",
        "train_data_1.csv, column 'user_id', row 3: -1 is negative; an id lies in [0, cardinality): 0 to 2654",
    ]
    train = ["train", "dlrm", folder, tmp_path / "run", *sets(*TINY)]
    for command in (["check", folder], train):
        status, _, said = run(*command)
        assert (status, "Traceback" in said) == (2, False), said
        for part in expected:
            assert part in said
    assert not (tmp_path / "run" / "bundle").exists()


def test_a_label_that_is_none_is_told_alike_by_check_training_and_evaluation(run: Cli, tmp_path: Path) -> None:
    options = sets(*TINY)
    folder = worked_example(tmp_path / "data")
    assert run("train", "dlrm", folder, tmp_path / "run", *options)[0] == 0
    (folder / "test_data.csv").write_text("0,8,2,0,40\n0,18,1,1,20\n")
    status, _, said = run("evaluate", tmp_path / "run", folder)
    assert (status, "test_data.csv, column 'label', row 1: 2.0 is not a label; a label is 0 or 1" in said) == (2, True)
    (folder / "train_data_1.csv").write_text("0,0,1\n1,8,0\n2,3,0.5\n7,8,4\n9,10,1\n")
    expected = "train_data_1.csv, column 'label', row 3: 0.5 is not a label; a label is 0 or 1: convert the column, or"
    for command in (["check", folder], ["train", "dlrm", folder, tmp_path / "other", *options]):
        status, _, said = run(*command)
        assert (status, "Traceback" in said) == (2, False), said
        assert expected in said
        assert "(and 1 more row like it)" in said


def test_the_start_says_what_is_frozen_capped_and_not_divided(run: Cli, tmp_path: Path) -> None:
    folder = worked_example(tmp_path / "data")
    options = sets(
        *TINY, "frozen=[embeddings, bottom]", "max_table_size=100", "shard_embeddings=always", "interaction=dot"
    )
    status, _, said = run("train", "dlrm", folder, tmp_path / "run", *options)
    assert status == 0, said
    # tables: 3 + 100 + 100 rows of 4; bottom: 1 x 4 + 4; top: 4 + 6 pairs in, 4 out; out: 4 in, 1 out
    assert "parameters: 869, 49 of them trained; frozen: embeddings (812), bottom (8)\n" in said
    assert "note: settings.max_table_size caps the tables of 'user_id', 'item_id' at 100 rows; ids beyond share" in said
    assert "note: train.shard_embeddings is always, and there is one process: nothing to divide; torchrun" in said
    status, _, said = run("train", "dlrm", folder, tmp_path / "plain", *sets(*TINY, "max_table_size=9999"))
    assert status == 0, said
    assert "parameters: 10,4" not in said
    assert "frozen" not in said
    assert "note: settings.max_table_size is 9,999, and no table has more rows: nothing was capped" in said


def test_training_begins_with_what_matters_and_tells_the_rest_where_it_is_asked_to(run: Cli, tmp_path: Path) -> None:
    folder = worked_example(tmp_path / "data")
    options = [
        *sets("epochs=2", "factors=4", "layers=[8,4]", "negatives=2", "precision=fp32", "train.threads=1"),
        "--device",
        "cpu",
    ]
    status, _, said = run("train", "neumf", folder, tmp_path / "run", *options)
    assert status == 0, said
    lines = said.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("epoch 1/2"))
    assert [re.sub(r"^parameters: [0-9,]+", "parameters: N", line) for line in lines[:5]] == [
        f"data:       {folder}: 5 rows and 2 drawn negatives each; not read: user user_gender, context user_age",
        "model:      neumf",
        "parameters: N",
        "steps:      1 an epoch, 256 rows each; 2 epochs; no split valid to measure on",
        "runs on:    cpu, 1 thread, precision fp32",
    ]
    assert all(line.startswith("note: ") for line in lines[5:first])
    following = shlex.join(["recspec", "evaluate", str(tmp_path / "run"), str(folder), "--baselines"])
    assert lines[-1] == f"next: {following}"
    _, _, said = run("train", "neumf", folder, tmp_path / "other", *options, "-v")
    choices = json.loads((tmp_path / "other" / "log.jsonl").read_text().splitlines()[0])["choices"]
    assert "compile" in choices
    for name, what in choices.items():
        assert f"{name}: {what}" in said
    assert "-v shows" not in said


def test_an_open_ended_run_shows_no_length_and_says_why_it_stopped(run: Cli, data: FeatureSpec, tmp_path: Path) -> None:
    options = sets("factors=4", "layers=[8,4]", "learning_rate=0.3", "patience=1", "train.batch_size=4000")
    status, _, said = run("train", "neumf", data.folder, tmp_path / "run", *options)
    assert status == 0, said
    assert "; epochs until valid no longer improves, 1000 at most; valid full/ndcg@10 is measured" in said
    assert re.search(r"^model:      neumf, [0-9]+ settings chosen for the data", said, re.MULTILINE)
    choices = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])["choices"]
    assert choices["path"] == "implicit: rows are interactions without labels: negatives are drawn, ranking judges"
    assert re.search(r"^full/ndcg@10 on valid: [0-9.]+; .*popularity.*: [0-9.]+$", said, re.MULTILINE)
    assert re.search(r"^epoch 1  loss ", said, re.MULTILINE)
    assert "; stopped, as valid no longer improved" in said


def test_a_plan_is_shown_without_training(run: Cli, tmp_path: Path) -> None:
    folder, made = worked_example(tmp_path / "data"), tmp_path / "run"
    options = [
        *sets("factors=4", "layers=[8,4]", "negatives=2", "precision=fp32", "train.threads=1", "epochs=10"),
        "--device",
        "cpu",
    ]
    status, printed, said = run("train", "neumf", folder, made, *options, "--plan", "--json")
    assert status == 0, said
    plan = json.loads(printed)
    assert plan["choices"]["precision"] == {"value": "fp32", "reason": "as asked"}
    assert plan["choices"]["negatives"] == {"value": 2, "reason": "as asked"}
    assert plan["choices"]["sparse_gradients"]["value"] == []
    assert (plan["rows"], plan["samples_per_epoch"], plan["steps"]) == (5, 15, 10)
    status, printed, said = run("train", "neumf", folder, made, *options, "--plan")
    assert status == 0, said
    lines = printed.splitlines()
    assert {"precision: fp32: as asked", "threads: 1: as asked", "negatives: 2: as asked"} <= set(lines)
    assert [line.partition(":")[0] for line in lines] == list(plan["choices"])
    assert not made.exists()
    status, printed, said = run("train", "neumf", folder, made, *options, "--set", "epochs=1", "--json")
    assert status == 0, said
    assert json.loads(printed)["bundle"] == str(made / "bundle")
    logged = json.loads((made / "log.jsonl").read_text().splitlines()[0])
    assert list(logged["choices"].values()) == lines_without_names(lines)
    status, printed, said = run("train", "neumf", folder, made, *options, "--plan", "--resume")
    assert status == 0, said
    assert "batch_size: 256: as at the start of the run" in printed.splitlines()


def lines_without_names(lines: list[str]) -> list[str]:
    return [line.partition(": ")[2] for line in lines]


def test_auto_cardinality_is_refused_by_training_and_resolved_by_transcode(run: Cli, tmp_path: Path) -> None:
    text = WORKED_EXAMPLE.replace("cardinality: 2655", "cardinality: auto").replace(
        "cardinality: 856", "cardinality: auto"
    )
    folder = worked_example(tmp_path / "auto", text)
    status, _, said = run("train", "neumf", folder, tmp_path / "run")
    assert status == 2
    assert "is 'auto', which only `recspec transcode DATA OUT` resolves" in said
    assert run("transcode", folder, tmp_path / "made", "--to", "split_binary")[0] == 0
    assert FeatureSpec.load(tmp_path / "made").num_ids("user_id") == 2655
    assert run("train", "neumf", tmp_path / "made", tmp_path / "run", "--set", "epochs=1")[0] == 0


def test_synthesize_makes_data_of_a_specifications_shape(run: Cli, tmp_path: Path) -> None:
    folder = worked_example(tmp_path / "shape")
    status, printed, said = run("synthesize", folder, tmp_path / "made", "--rows", "200", "--distribution", "power_law")
    assert status == 0, said
    assert "written as parquet" in printed
    status, printed, _ = run("check", tmp_path / "made")
    assert (status, "train 200 rows" in printed) == (0, True)


def test_a_specification_without_files_is_described_by_its_features(run: Cli, tmp_path: Path) -> None:
    text = WORKED_EXAMPLE.split("source_spec:")[0] + "channel_spec:" + WORKED_EXAMPLE.split("channel_spec:")[1]
    (tmp_path / "feature_spec.yaml").write_text(text)
    status, printed, said = run("describe", tmp_path)
    assert status == 0, said
    assert "splits" not in printed
    assert "2,655" in printed
    assert "\nthe specification names no files; `recspec synthesize` makes some\n" in printed


def test_schema_is_json(run: Cli) -> None:
    status, printed, _ = run("schema")
    assert status == 0
    assert json.loads(printed)["title"] == "Dataset Feature Specification"


# --- the whole way ---------------------------------------------------------------------------------------------------


def test_from_raw_files_to_recommendations(run: Cli, tmp_path: Path) -> None:
    rows = [(user, (user * 7 + step * step) % 40, step) for user in range(1, 31) for step in range(12)]
    (tmp_path / "clicks.csv").write_text(
        "user_id,item_id,timestamp\n" + "".join(f"{user},{item},{t}\n" for user, item, t in rows)
    )
    made, trained, once = tmp_path / "data", tmp_path / "run", ("--set", "repeats=first")
    status, printed, said = run("prepare", "table", tmp_path / "clicks.csv", made, "--set", "num_negatives=10", *once)
    assert status == 0, said
    assert "prepared table" in said
    assert "rows kept" in printed
    again = " rows repeat an earlier one of the same user and item, such as user '1' and item"
    assert [line for line in printed.splitlines() if line.startswith("  - ") and again in line]
    assert printed.index("│ rows kept") < printed.index("\ndropped\n  - ")
    assert "already" in run("prepare", "table", tmp_path / "clicks.csv", made, "--set", "num_negatives=10", *once)[2]
    status, _, said = run("prepare", "table", tmp_path / "clicks.csv", made, "--set", "num_negatives=5", *once)
    assert (status, "num_negatives was 10, now 5" in said) == (2, True)

    status, _, said = run(
        "train", "neumf", made, trained, "--set", "factors=4", "--set", "layers=[8,4]", "--set", "epochs=2"
    )
    assert status == 0, said
    assert "epoch 2/2" in said
    status, printed, said = run("evaluate", trained, made, "--baselines", "--json")
    assert status == 0, said
    report = json.loads(printed)
    assert set(report["metrics"]) == {"rows", "sampled", "full"}
    assert {"popularity", "item_knn", "ease", "ials"} <= set(report["baselines"])
    status, printed, _ = run("evaluate", trained, made, "--baselines")
    assert (status, "test, full" in printed, "popularity" in printed) == (0, True, True)
    assert "test, sampled" not in printed
    assert "rows and sampled: measured too and kept; --protocol NAME (protocol=NAME) shows one" in printed
    status, printed, _ = run("evaluate", trained, made, "--protocol", "rows", "--protocol", "full")
    assert (status, "test, rows" in printed, "test, full" in printed) == (0, True, True)
    assert "measured too" not in printed

    status, printed, _ = run("recommend", trained, "--user", "7", "-k", "3", "--json")
    assert status == 0
    assert len(json.loads(printed)[0]["items"]) == 3
    asked = ("--items", "7,1,zz", "--filter", "item_id != 2", "--exclude", "3", "--boost", "item_id < 9: 1")
    status, printed, _ = run("recommend", trained, *asked, "-k", "3", "--explain", "--json")
    (answer,) = json.loads(printed)
    assert (status, answer["user"], answer["answered_by"], len(answer["items"])) == (0, None, "basket_vectors", 3)
    status, printed, _ = run("similar", trained, "7", "-k", "3", "--filter", "item_id != 2")
    assert (status, "like 7" in printed) == (0, True)
    status, _, said = run("similar", trained, "-1", "-k", "3")
    assert (status, "item '-1'" in said) == (2, True)  # an id, and no option
    status, _, said = run("similar", trained, "none", "--filter", "title <")
    assert (status, "filter, character 8" in said, "no item 'none'" in said) == (2, True, True)
    status, printed, _ = run("recommend", trained, "--user", "nobody", "-k", "3")
    assert (status, "unknown, so the most popular items" in printed) == (0, True)
    status, _, said = run("recommend", trained, "--all", "--out", tmp_path / "all.parquet")
    assert (status, "30 users" in said) == (0, True)
    (tmp_path / "rows.csv").write_text("user_id,item_id\n1,7\n")
    status, _, said = run("predict", trained, tmp_path / "rows.csv", "--out", tmp_path / "scored.csv")
    assert (status, "1 row" in said) == (0, True)
    (tmp_path / "none.csv").write_text("user_id,item_id\n")
    status, printed, said = run("predict", trained, tmp_path / "none.csv")
    assert (status, printed) == (0, '"user_id","item_id","score"\n')
    assert f"note: {tmp_path / 'none.csv'} holds no row" in said
    status, printed, said = run("evaluate", trained, made, "--protocol", "sampled", "--k", "5", "--k", "2", "--json")
    assert status == 0, said
    assert {"hit_rate@5", "hit_rate@2"} <= set(json.loads(printed)["metrics"]["sampled"])
    assert "hit_rate@10" not in json.loads(printed)["metrics"]["sampled"]

    asked = (
        "--protocol",
        "full",
        "--slice",
        "activity",
        "--slice",
        "popularity",
        "--bootstrap",
        "50",
        "--cold",
        "drop",
        "--known",
        "train",
        "--repeats",
        "keep",
        "--against",
        trained,
    )
    status, printed, said = run("evaluate", trained, made, *asked, "--json")
    assert status == 0, said
    found = json.loads(printed)
    interval = found["intervals"]["full"]["mrr"]
    assert interval["low"] <= interval["value"] <= interval["high"]
    assert found["against"][str(trained)]["full"]["mrr"]["p_value"] == 1.0
    assert {"coverage@10", "novelty@10", "popularity_lift@10"} <= set(found["beyond_accuracy"]["model"])
    assert set(found["slices"]["full"]) == {"activity", "popularity"}
    assert (found["protocols"]["full"]["cold"], found["protocols"]["full"]["repeats"]) == ("drop", "keep")
    status, printed, said = run("evaluate", trained, made, *asked, "--users", "5")
    assert status == 0, said
    for part in ("full (5 users", "; trained on train; cold: ", "full by activity", "against", "novelty@10", "95 %"):
        assert part in printed
    status, _, said = run("evaluate", trained, made, "--cold", "drp")
    assert (status, "evaluate: setting 'cold' is 'drp': input should be 'keep' or 'drop'" in said) == (2, True)

    status, _, said = run("predict", trained, made, "--split", "valid", "--out", tmp_path / "valid.jsonl")
    assert (status, "rows" in said) == (0, True)
    first = json.loads((tmp_path / "valid.jsonl").read_text().splitlines()[0])
    assert list(first) == ["user_id", "item_id", "label", "score"]
    status, printed, said = run("predict", trained, made, "--columns", "item_id, user_id", "--out", tmp_path / "t.csv")
    assert (status, printed) == (0, ""), said
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert lines[0] == '"item_id","user_id","score"'
    assert len(lines) == 1 + report["protocols"]["rows"]["rows"]  # of test, as evaluate
    status, _, said = run("predict", trained, tmp_path / "rows.csv", "--columns", "item")
    assert (status, "unknown column 'item' (did you mean 'item_id'?)" in said) == (2, True)
    status, _, said = run("predict", trained, tmp_path / "rows.csv", "--split", "test")
    assert (status, "holds raw rows, which have no split; leave split='test' out" in said) == (2, True)


def test_a_recipe_with_changes_over_it(run: Cli, tmp_path: Path, data: FeatureSpec) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: neumf\nsettings: {factors: 4, layers: [8, 4]}\ntrain: {epochs: 9, learning_rate: 1e-2}\n")
    status, _, said = run(
        "train", "neumf", data.folder, tmp_path / "run", "--recipe", recipe, "--set", "train.epochs=1"
    )
    assert status == 0, said
    assert "epoch 1/1" in said
    card = json.loads((tmp_path / "run" / "bundle" / "bundle.json").read_text())
    assert (card["settings"]["factors"], card["train"]["learning_rate"]) == (4, 0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "epohs=1"), "unknown setting 'epohs' (did you mean 'epochs'?)"),
        (("--set", "settings.factor=1"), "unknown setting 'settings.factor' (did you mean 'settings.factors'?)"),
        (("--set", "epochs"), "'epochs' is not of the form name=value"),
        (("--set", "epochs=-1"), "setting 'epochs' is -1"),
        (("--set", "epochs=0"), "train.epochs is 0, which trains nothing and leaves a run to continue; ask for 1 or"),
        (("--set", "vocabulary_form=all"), "--set: unknown setting 'vocabulary_form'; see `recspec models`"),
        (("--set", "layers=[7, 4]"), "it must be even"),
        (("--recipe", "no-such.yaml"), "recipe no-such.yaml: no such file"),
        (("--device", "gpu"), "device is 'gpu'; expected auto, cpu, cuda or cuda:N"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(
    run: Cli, tmp_path: Path, data: FeatureSpec, arguments: tuple[str, ...], message: str
) -> None:
    status, _, said = run("train", "neumf", data.folder, tmp_path / "run", *arguments)
    assert status == 2
    assert message in said
    assert "prepare." not in said
    assert not (tmp_path / "run").exists()


def test_of_many_processes_the_first_tells_a_mistake_and_no_mistake_is_lost(
    run: Cli, tmp_path: Path, data: FeatureSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("recspec.api.verb_checks.time.sleep", waited.append)
    for rank, expected in (
        ("0", []),
        ("1", [verb_checks.PATIENCE]),
    ):  # nobody ends the second, so it tells after its wait
        monkeypatch.setenv("LOCAL_RANK", rank)
        status, _, said = run("train", "neumf", data.folder, tmp_path / "run", "--set", "epohs=1")
        assert (status, waited) == (2, expected)
        assert "unknown setting 'epohs' (did you mean 'epochs'?)" in said


def test_unknown_names_get_the_nearest_known_one(run: Cli, tmp_path: Path, data: FeatureSpec) -> None:
    assert "did you mean 'neumf'?" in run("train", "neuml", data.folder, tmp_path / "run")[2]
    assert "did you mean 'movielens'?" in run("prepare", "movielense", tmp_path, tmp_path / "out")[2]
    said = run("prepare", "criteo", tmp_path, tmp_path / "out", "--set", "vocabulary_form=all")[2]
    assert "unknown setting 'vocabulary_form' (did you mean 'vocabulary_from'?); see `recspec datasets`" in said
    assert "unknown chunk type 'parquets'" in run("transcode", data.folder, tmp_path / "out", "--to", "parquets")[2]
    assert "no such file or folder" in run("check", tmp_path / "nowhere")[2]


def test_recommend_without_users_says_how(run: Cli, tmp_path: Path, data: FeatureSpec) -> None:
    run("train", "neumf", data.folder, tmp_path / "run", "--set", "epochs=1")
    assert "name users, take all, or give items or a context" in run("recommend", tmp_path / "run")[2]
    assert "--all needs --out" in run("recommend", tmp_path / "run", "--all")[2]
    assert "--items: holds no id" in run("recommend", tmp_path / "run", "--items", ", ,")[2]
    for option in ("--user", "--items"):  # as Python gives bytes of a command line that are no UTF-8
        status, _, said = run("recommend", tmp_path / "run", option, "\udcff")
        assert (status, "'\\udcff' is no UTF-8 text; write it in UTF-8" in said) == (2, True), said
    said = run("recommend", tmp_path / "run", "--all", "--out", tmp_path / "all.xls")[2]
    assert "expected a name that ends in .csv, .jsonl or .parquet" in said
    said = run("recommend", tmp_path / "run", "--user", "1", "--users", tmp_path / "u.txt")[2]
    assert "--user and --users: give one of them" in said


def test_what_there_is_is_listed(run: Cli) -> None:
    listed = run("models")[1]
    assert "neumf" in listed
    assert "embedding_dim" not in listed, "one line a model"
    status, _, said = run("models", "neum")
    assert (status, "unknown model 'neum' (did you mean 'neumf'?)" in said) == (2, True)
    assert "movielens" in run("datasets")[1]
    listing = json.loads(run("models", "--json")[1])
    assert listing["models"]["neumf"]["needs"] == ["user", "item", "label"]
    assert "learning_rate" in listing["train"]
    assert "movielens" in json.loads(run("datasets", "--json")[1])
    assert run("version")[1].strip() == "0.1.0"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("lightgbm", ("labelled rows, fitted in one go", "num_leaves", "calibration", "recspec[baselines]")),
        ("ease", ("interactions, fitted in one go", "user, item, label", "recency")),
        ("sasrec", ("users, with their events, by gradient steps", "recspec train sasrec DATA RUN", "learning_rate")),
        ("two_tower", ("rows, by gradient steps", "ranked by their features", "embedding_dim")),
    ],
)
def test_of_one_model_everything_is_told(run: Cli, name: str, told: tuple[str, ...]) -> None:
    printed = run("models", name)[1]
    assert [each for each in told if each not in printed] == []
    assert [*json.loads(run("models", name, "--json")[1])["models"]] == [name]


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own limits, measured in no time."""
    for name, value in (("MATRIX_SIZE", 16), ("TRIAD_BYTES", 4096), ("LIMIT_SECONDS", 0.0)):
        monkeypatch.setattr(speed, name, value)


@pytest.mark.usefixtures("small_limits")
def test_bench_train_says_where_the_time_of_a_step_goes(run: Cli, data: FeatureSpec) -> None:
    given = ("bench", "train", "neumf", "--data", data.folder, "--steps", "1", "--warmup", "1", "--profile")
    status, printed, said = run(*given)
    assert status == 0, said
    assert all(
        word in printed
        for word in ("samples_per_second", "backward", "matrix products", "Python and dispatch", "aten::mm")
    )


def test_every_command_of_the_demo_can_be_copied(run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "write_shop", partial(write_shop, num_customers=50, num_products=30, num_visits=350))
    monkeypatch.setattr(demo, "MODELS", "popularity,markov")  # fitted in one go, so that the search ends by itself
    monkeypatch.chdir(tmp_path)
    status, printed, said = run("demo", "--minutes", "5")
    assert status == 0, said
    assert "test, full" in printed
    assert "because" in printed
    assert (tmp_path / printed.splitlines()[-1]).name == "report.html"
    printed_commands = re.findall(r"^(?:▸ |next: | {4})recspec (.*)", said, re.MULTILINE)
    commands = list(dict.fromkeys(printed_commands))
    verbs = [shlex.split(each)[0] for each in commands]
    assert [verb for verb, _ in groupby(verbs)] == [
        "prepare",
        "auto",
        "evaluate",
        "report",
        "recommend",
        "serve",
    ]
    for each in commands:
        words = shlex.split(each)
        if words[0] == "serve":
            bundle.load(tmp_path / words[1])
        else:
            status, _, said = run(*words, *(("--models", "markov") if words[-1] == "2" else ()))
            assert status == 0, said


def test_the_demo_takes_real_files(run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MODELS", "popularity")
    write_movielens_like(tmp_path / "raw", num_users=50, num_items=40, num_ratings=900)
    status, printed, said = run("demo", "--raw", tmp_path / "raw", "--out", tmp_path / "demo", "--minutes", "5")
    assert status == 0, said
    assert "recspec prepare movielens" in said
    assert "test, full" in printed


def test_without_a_command_five_commands_lead_on(run: Cli) -> None:
    status, printed, _ = run()
    assert status == 0
    assert re.findall(r"^  recspec (\w+)", printed, re.MULTILINE) == [
        "prepare",
        "auto",
        "evaluate",
        "recommend",
        "serve",
    ]
    assert "recspec --help" in printed


# --- serve -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle_folder(tmp_path_factory: pytest.TempPathFactory, data: FeatureSpec) -> Path:
    return made_up_bundle(tmp_path_factory.mktemp("serve") / "neumf", data, "neumf")


def test_serve_tells_where_and_ends_when_it_is_asked_to(bundle_folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "recspec",
        "serve",
        str(bundle_folder),
        f"second={bundle_folder}",
        "--json",
        "--http-port",
        "0",
        "--grpc-port",
        "0",
    ]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as served:
        assert served.stdout is not None
        assert served.stderr is not None
        try:
            told = json.loads("".join(iter(served.stdout.readline, "}\n")) + "}")
            assert told["models"] == ["neumf", "second"]
            assert told["grpc"].startswith("127.0.0.1:")
            with urllib.request.urlopen(f"{told['http']}/models") as answer:
                assert [each["name"] for each in json.load(answer)["models"]] == ["neumf", "second"]
        finally:
            served.send_signal(signal.SIGTERM)
        said = served.stderr.read()
        assert f"neumf, second at {told['http']} (a page to try it" in said
        assert f"INFO recspec.serve: model 'second': version 1 answers, from {bundle_folder}" in said
        assert served.wait(600) == 0


def test_serve_says_what_is_in_the_way(run: Cli, tmp_path: Path, bundle_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, said = run("serve", bundle_folder, "--http-port", str(port), "--no-grpc")
    assert (status, f"HTTP: can't listen at 127.0.0.1:{port}: " in said) == (2, True), said
    status, _, said = run("serve", tmp_path / "nothing", "--http-port", "0", "--no-grpc")
    assert (status, "no such folder" in said) == (2, True), said
    status, _, said = run("serve", bundle_folder, bundle_folder, "--http-port", "0", "--no-grpc")
    assert (status, "two models are called 'neumf'; write NAME=" in said) == (2, True), said
    status, _, said = run("serve", bundle_folder, "--timeout", "0", "--http-port", "0", "--no-grpc")
    assert (status, "serve: setting 'timeout' is 0" in said) == (2, True), said


def test_serves_defaults_are_those_of_its_settings() -> None:
    from recspec.serving.settings import Limits, RepositorySettings, ServeSettings

    options = {name: parameter.default for name, parameter in inspect.signature(api.serve).parameters.items()}
    settings = {name: value for kind in (Limits, ServeSettings, RepositorySettings) for name, value in kind()}
    settings |= {"grpc_port": None, "allowed_host": None}  # that of the settings, or a free one beside a free HTTP port
    of_both = set(options) & set(settings)
    assert {name: options[name] for name in of_both} == {name: settings[name] for name in of_both}
    explored = {"explore", "explore_temperature", "explore_floor", "explore_pool", "explore_last"}
    others = {"models", "grpc", "token_file", "block", "ready", "force", "experiment"}
    assert set(options) - of_both == others | explored


def test_bench_serve_measures_a_running_server(run: Cli, bundle_folder: Path) -> None:
    with serving(sources(neumf=bundle_folder)) as addresses:
        arguments = ("bench", "serve", addresses.http, "--concurrency", "1,2", "--seconds", "0.2", "--warmup", "0")
        status, printed, _ = run(*arguments, "--json")
        assert status == 0
        assert [line["concurrency"] for line in json.loads(printed)["measured"]] == [1, 2]
        status, printed, _ = run(*arguments)
        assert (status, "requests_per_second" in printed, f"neumf at {addresses.http}" in printed) == (0, True, True)
    status, _, said = run("bench", "serve", addresses.http)
    assert (status, "no server answers" in said) == (2, True), said


# --- values of options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("export", "BUNDLE", "OUT", "--format", "onx", "--precision", "int"),
            """error: export: 2 problems
  - unknown format 'onx' (did you mean 'onnx'?); known: 'onnx', 'pt2', 'triton'
  - unknown precision 'int' (did you mean 'int8'?); known: 'fp32', 'bf16', 'fp16', 'int8'
""",
        ),
        (
            ("prepare", "synthetic", "OUT", "OUT", "--engine", "duckdbb"),
            "error: --engine: unknown value 'duckdbb' (did you mean 'duckdb'?); known: 'duckdb', 'spark'\n",
        ),
        (
            ("bench", "infer", "BUNDLE", "--form", "ranked"),
            "error: --form: unknown value 'ranked' (did you mean 'ranker'?); known: 'rows', 'ranker'\n",
        ),
        (
            ("synthesize", "BUNDLE", "OUT", "--distribution", "even", "--to", "csv"),
            "error: --distribution: unknown value 'even'; known: 'uniform', 'power_law'\n",
        ),
    ],
)
def test_a_value_that_an_option_does_not_have_is_told_once_with_the_nearest(
    run: Cli, bundle_folder: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    places: dict[str, str | Path] = {"BUNDLE": bundle_folder, "OUT": tmp_path / "out"}
    status, printed, said = run(*(places.get(each, each) for each in arguments))
    assert (status, printed, said) == (2, "", message)
    assert not (tmp_path / "out").exists()


# --- what is said of rows and of answers ------------------------------------------------------------------------------


def test_predict_tells_columns_that_are_not_read_on_standard_error(
    run: Cli, bundle_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("user_id,item_id,why\n1,2,a\n")
    status, printed, said = run("predict", bundle_folder, tmp_path / "rows.csv")
    assert (status, len(printed.splitlines())) == (0, 2)
    assert "note: not read: 'why'\n" in said


def test_a_table_of_recommendations_has_titles_and_plain_values_and_says_who_gets_popular_items(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for title, heads in ((None, "item ┃ score"), ("A film", "item ┃ title")):
        answer = Recommendation("u", True, (RecommendedItem(7, title, 0.5),))
        presenters.print_recommendation(answer, {"year": [2016], "price": [1234.5]})
        printed = capsys.readouterr().out
        assert heads in " ".join(printed.split())
        assert ("title" in printed) == (title is not None)
        assert "2016" in printed
        assert "1234.5" in printed  # without thousands separators
    for user, known, heading in (
        ("u", False, "user u: unknown, so the most popular items"),
        ("u", True, "user u: the most popular items"),
        (None, False, "the most popular items"),
    ):
        presenters.print_recommendation(Recommendation(user, known, (), answered_by="popularity"), {})
        assert capsys.readouterr().out.splitlines()[1] == heading


# --- URLs ------------------------------------------------------------------------------------------------------------


def path_arguments() -> list[tuple[str, ...]]:
    """Every path argument of every command: its command's words, then its name."""
    found = []
    for name, (verb, present) in cli.COMMANDS.items():
        for each in (*inspect.signature(verb).parameters.values(), *inspect.signature(present).parameters.values()):
            is_path = "Place" in str(each.annotation) and each.name not in ("models", "retriever")
            if is_path or (each.name in ("raw", "rows", "new_events") and each.default is each.empty):
                found.append((*name.split(), each.name))
    return sorted(found)


def test_the_walk_finds_the_paths() -> None:
    found = path_arguments()
    assert len(found) > 25
    assert {("train", "run"), ("prepare", "raw"), ("bench", "infer", "paths"), ("recommend", "users")} <= set(found)


@pytest.mark.parametrize("where", path_arguments(), ids=".".join)
def test_no_path_of_any_command_may_be_a_url_with_a_password(
    run: Cli, where: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    import typer

    command: Any = typer.main.get_command(cli.app)
    for word in where[:-1]:
        command = command.commands[word]
    arguments: list[str] = []
    for parameter in command.params:
        url = "s3://id:secret@bucket/x" if parameter.name == where[-1] else None
        if parameter.param_type_name == "argument":
            arguments.append(url or "x")
        elif url is not None or parameter.required:
            arguments += [parameter.opts[0], url or "x"]
    status, printed, told = run(*where[:-1], *arguments)
    assert (status, printed) == (2, "")
    assert "'s3://***@bucket/x' holds a user or a password; leave it out" in told
    assert "secret" not in told
    assert list(tmp_path.iterdir()) == []


def test_no_model_of_a_server_may_be_a_url_with_a_password(run: Cli) -> None:
    status, _, told = run("serve", "clicks=s3://id:secret@bucket/run")
    assert status == 2
    assert "'s3://***@bucket/run' holds a user or a password" in told
    assert "secret" not in told


# --- what is verified ------------------------------------------------------------------------------------------------


def test_verify_prints_the_manifest_s_digest_and_names_what_was_changed(
    run: Cli, data: FeatureSpec, tmp_path: Path
) -> None:
    folder = made_up_bundle(tmp_path / "made", data, "neumf")
    status, digest, _ = run("verify", folder)
    assert status == 0
    assert len(digest.split()[0]) == 64
    assert run("verify", folder, "--expect", digest.split()[0])[0] == 0
    status, _, told = run("verify", folder, "--expect", "0" * 64)
    assert (status, "expected 0000" in told) == (2, True)
    weights = next(tmp_path.rglob("weights.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    status, _, told = run("verify", folder)
    assert (status, "'weights.safetensors' was changed" in told) == (2, True)
    status, _, told = run("recommend", folder, "--user", "1")
    assert (status, "'weights.safetensors' was changed" in told) == (2, True)


HOSTILE = "-o a?b=1#c%20d[1]*.{x}'\"ü"


@pytest.mark.slow
def test_every_writer_takes_the_name_of_its_place_as_it_is(
    run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command writes one place, whatever its name would mean to a library, a pattern or a URL."""
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    commands = {
        "prepare": ["prepare", "synthetic", "none", "OUT", "--set", "kind=interactions", "--set", "num_rows=3000"],
        "train": ["train", "neumf", "prepare/NAME", "OUT", "--set", "epochs=1", "--set", "tensorboard=false"],
        "tune": ["tune", "neumf", "prepare/NAME", "OUT", "--trials", "1", "--set", "epochs=1"],
        "transcode": ["transcode", "prepare/NAME", "OUT", "--to", "csv"],
        "export": ["export", "train/NAME", "OUT", "--batch-sizes", "1"],
    }
    for command, words in commands.items():
        (tmp_path / command).mkdir()
        given = [word.replace("OUT", f"{command}/{HOSTILE}").replace("NAME", HOSTILE) for word in words]
        status, _, err = run(*given)
        assert status == 0, err
        assert [path.name for path in (tmp_path / command).iterdir()] == [HOSTILE]
