"""Several seeds in one call, and the runs of a folder compared over them."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recspec import api
from recspec.api import comparing
from recspec.base.errors import DataError, SettingsError
from recspec.bundle import run_record
from recspec.evaluation import Method, SeedValues
from tests.cli.conftest import Cli, run  # noqa: F401

SHORT: dict[str, Any] = {"settings": {"epochs": 2, "factors": 8}, "progress": False}


def digest(place: Path) -> str:
    """Of a run's weights."""
    return hashlib.sha256((place / "bundle" / "weights.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def runs(data: api.Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one model, and one run of another."""
    folder = tmp_path_factory.mktemp("seeds") / "runs"
    api.train("neumf", data, folder / "neumf", seeds=2, **SHORT)
    api.train("popularity", data, folder / "popular", progress=False)
    return folder


def test_each_seed_is_an_ordinary_run(data: api.Data, runs: Path, tmp_path: Path) -> None:
    alone = api.train("neumf", data, tmp_path / "alone", settings={**SHORT["settings"], "seed": 1}, progress=False)
    assert digest(alone.path) == digest(runs / "neumf" / "seed-1") != digest(runs / "neumf" / "seed-0")


def test_a_stopped_call_goes_on_and_ends_with_the_same_weights(data: api.Data, runs: Path, tmp_path: Path) -> None:
    folder, epochs = tmp_path / "again", list[object]()

    def stop(event: Mapping[str, object]) -> None:
        epochs.extend(event["epoch"] for _ in range(event["event"] == "epoch"))
        if len(epochs) == 3:  # the first of seed 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.train("neumf", data, folder, seeds=2, **{**SHORT, "progress": stop})
    assert not (folder / "seed-1" / "bundle").exists()
    before = (folder / "seed-0" / "bundle" / "bundle.json").stat().st_mtime_ns
    said: list[str] = []
    table = api.train("neumf", data, folder, seeds=3, tell=said.append, **SHORT)
    assert (folder / "seed-0" / "bundle" / "bundle.json").stat().st_mtime_ns == before
    assert [each.rpartition(": ")[2] for each in said] == ["was trained before", "trained", "trained"]
    for seed in ("seed-0", "seed-1"):
        assert digest(folder / seed) == digest(runs / "neumf" / seed)
    (method,) = table.methods
    assert method.seeds == (0, 1, 2)
    cards = [json.loads((folder / f"seed-{seed}" / "bundle" / "bundle.json").read_text()) for seed in range(3)]
    reached = [each["metrics"]["full"]["ndcg@10"] for each in cards]
    found = table.metrics["neumf"]["full/ndcg@10"]
    assert found == pytest.approx((statistics.mean(reached), statistics.stdev(reached)))


def test_seeds_of_another_call_are_never_mixed(data: api.Data, runs: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"trained otherwise; repeat that call.*--force: train: .*epochs 3.*before:"
    ):
        api.train("neumf", data, runs / "neumf", seeds=2, settings={"epochs": 3, "factors": 8}, progress=False)
    with pytest.raises(SettingsError, match="is a run itself; name another folder for the runs of seeds"):
        api.train("neumf", data, runs / "popular", seeds=2, **SHORT)
    with pytest.raises(SettingsError, match="seeds is 0; expected 1 to 1000"):
        api.train("neumf", data, tmp_path / "none", seeds=0, **SHORT)
    with pytest.raises(SettingsError, match="resume continues the runs and force replaces them"):
        api.train("neumf", data, tmp_path / "none", seeds=1, resume=True, force=True, **SHORT)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "seeds.json").write_text("[")
    with pytest.raises(SettingsError, match=r"seeds\.json.*replace the runs with --force, or name another folder"):
        api.train("popularity", data, tmp_path / "bad", seeds=1, progress=False)
    table = api.train("popularity", data, tmp_path / "bad", seeds=2, force=True, progress=False)
    assert table.methods[0].seeds == (0, 1)
    api.train("ease", data, tmp_path / "bad", seeds=1, force=True, settings={"settings.l2": 5}, progress=False)
    assert not (tmp_path / "bad" / "seed-1" / "bundle").exists(), "or a later call would take it for one of its own"
    with pytest.raises(SettingsError, match="l2"):
        api.train("ease", data, tmp_path / "bad", seeds=1, force=True, settings={"settings.l2": -5}, progress=False)
    assert (tmp_path / "bad" / "seed-0" / "bundle").exists(), "a call that can't begin removes nothing"


def test_a_folder_of_runs_is_compared_and_each_is_measured_once(runs: Path) -> None:
    said: list[str] = []
    asked: dict[str, Any] = {"protocol": "full", "k": (3, 5), "progress": False, "tell": said.append}
    table = api.compare_folder(runs, **asked)
    assert [(each.name, each.seeds) for each in table.methods] == [("neumf", (0, 1)), ("popularity", (0,))]
    assert [each.rpartition(": ")[2] for each in said] == [f"measured, {n} of 3" for n in (1, 2, 3)]
    measured = {"protocol": "full", "k": (3, 5), "progress": False}
    alone = [api.open(runs / "neumf" / f"seed-{seed}").evaluate(**measured) for seed in (0, 1)]
    values = [each.metrics["full"]["ndcg@5"] for each in alone]
    assert table.metrics["neumf"]["full/ndcg@5"] == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    said.clear()
    again = api.compare_folder(runs, **asked)
    assert said == []
    assert again.to_dict() == table.to_dict()
    rows = table.comparisons("rows")
    own = next(each for each in rows if each["metric"] == "ndcg@5")
    assert own["difference"] == pytest.approx(
        table.metrics["neumf"]["full/ndcg@5"][0] - table.metrics["popularity"]["full/ndcg@5"][0]
    )
    assert own["p_holm"] == own["p_value"]
    assert table.notes == ("popularity: one run, so the tests don't count the chance of its training",)
    text = repr(table)
    assert "mean ± standard deviation over seeds" in text
    assert "against the best mean, over users and seeds" in text


def made(names: tuple[str, str]) -> api.MethodTable:
    """Two methods, of which the second is clearly better."""
    users = np.linspace(0, 1, 40)
    values = {
        names[0]: {"full/map_5%@1": SeedValues((0.25, 0.35), users, 1e-6)},
        names[1]: {"full/map_5%@1": SeedValues((0.75,), users + 0.45)},
    }
    return api.MethodTable([Method(name, "m", (), ()) for name in names], values, "test")


def test_the_table_of_a_paper_escapes_what_latex_reads() -> None:
    assert comparing.latex(r"a_b 5% R&D #1 $x {y} \z ~ ^") == (
        r"a\_b 5\% R\&D \#1 \$x \{y\} \textbackslash{}z \textasciitilde{} \textasciicircum{}"
    )
    assert made(("item_knn", "R&D")).to_text("latex") == (
        "\\begin{tabular}{lrr}\n\\hline\nmethod & runs & full/map\\_5\\%@1 \\\\\n\\hline\n"
        "item\\_knn & 2 & 0.3000 $\\pm$ 0.0707 \\\\\nR\\&D & 1 & \\textbf{0.7500} \\\\\n\\hline\n\\end{tabular}\n"
    )


def test_markdown_and_csv_have_the_same_figures() -> None:
    table = made(("a|b", "c"))
    assert table.to_text("markdown") == (
        "| method | runs | full/map_5%@1 |\n| --- | ---: | ---: |\n"
        "| a\\|b | 2 | 0.3000 ± 0.0707 |\n| c | 1 | **0.7500** |\n"
    )
    first, second = csv.DictReader(io.StringIO(table.to_text("csv")))
    assert (first["method"], first["runs"], float(first["mean"]), first["best"]) == ("a|b", "2", 0.3, "c")
    assert float(first["deviation"]) == pytest.approx(0.0707107)
    assert float(first["difference"]) == pytest.approx(-0.45)
    assert float(first["p_holm"]) == pytest.approx(0.0010, abs=5e-5)  # t = 636 with the one degree of two seeds
    assert (second["deviation"], second["p_value"]) == ("", "")
    with pytest.raises(SettingsError, match=r"--format: unknown value 'tex'.*known: 'csv', 'markdown', 'latex'"):
        table.to_text("tex")  # type: ignore[arg-type]


def test_what_cannot_be_compared_is_told(runs: Path, data: api.Data, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"unknown metric 'full/ndcg@7'.*'full/ndcg@5'.* on test"):
        api.compare_folder(runs, protocol="full", k=5, metric="full/ndcg@7", progress=False)
    with pytest.raises(SettingsError, match=r"--out t\.doc: expected a name that ends in '\.csv', '\.md', '\.tex'"):
        api.compare_folder(runs, out="t.doc")
    with pytest.raises(SettingsError, match=r"no run names its dataset; name the dataset, as in compare .* DATA"):
        api.compare_folder(tmp_path)
    with pytest.raises(DataError, match=r"holds no run of .* to compare: no run"):
        api.compare_folder(tmp_path, data)
    shutil.copytree(runs / "popular", tmp_path / "here")
    shutil.copytree(runs / "popular", tmp_path / "other")
    record = run_record.read(tmp_path / "other")
    assert record is not None
    assert record.data is not None
    elsewhere = record.data.model_copy(update={"digest": "0" * 64, "path": "/all"})
    record.model_copy(update={"data": elsewhere}).write(tmp_path / "other")
    with pytest.raises(SettingsError, match=r"the runs name 2 datasets \('/all', '.*data'\); name the dataset"):
        api.compare_folder(tmp_path)
    table = api.compare_folder(tmp_path, data, protocol="full", progress=False)
    assert table.notes == (f"{tmp_path / 'other'}: left out: it was trained on other data",)
    assert [each.runs for each in table.methods] == [(str(tmp_path / "here"),)]


def test_the_commands_train_seeds_and_write_the_table(run: Cli, data: api.Data, tmp_path: Path) -> None:  # noqa: F811
    place = tmp_path / "popular"
    status, printed, said = run("train", "popularity", data.path, place, "--seeds", 2)
    assert status == 0, said
    assert "valid, full: mean ± standard deviation over seeds" in printed
    assert said.splitlines()[-1] == f"next: recspec compare {place}"
    out = tmp_path / "table.tex"
    asked = ("compare", place, "--protocol", "full", "--metric", "full/ndcg@10", "-k", 10)
    status, printed, said = run(*asked, "--out", out)
    assert status == 0, said
    assert said.endswith(f"{out}: written\n")
    assert out.read_text().startswith("\\begin{tabular}{lrr}\n")
    status, printed, said = run(*asked, "--format", "markdown")
    assert (status, said) == (0, "")
    assert printed.startswith("| method | runs | full/ndcg@10 |\n| --- | ---: | ---: |\n| popularity | 2 | **0.")
    status, printed, _ = run(*asked, "--json")
    found = json.loads(printed)["metrics"][0]
    assert (found["method"], found["runs"], found["deviation"]) == ("popularity", 2, 0.0)
    assert run(*asked, "--json", "--format", "csv")[0] == 2
