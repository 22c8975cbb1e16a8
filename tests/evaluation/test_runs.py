"""The runs under a folder."""

import json
import os
import shutil
from pathlib import Path

import pytest

from recspec.base.errors import DataError, SettingsError
from recspec.bundle import run_record
from recspec.evaluation import find_runs, runs
from recspec.feature_spec import FeatureSpec
from tests.evaluation.conftest import kept


@pytest.fixture
def folder(small_runs: Path, tmp_path: Path) -> Path:
    """A copy of the runs, in two folders; a bundle alone; and a prepared dataset, which is none."""
    made = tmp_path / "all"
    shutil.copytree(small_runs / "knn", made / "a" / "knn", ignore=shutil.ignore_patterns("evaluations"))
    shutil.copytree(small_runs / "popular", made / "b" / "c" / "popular", ignore=shutil.ignore_patterns("evaluations"))
    shutil.copytree(small_runs / "knn" / "bundle", made / "alone")
    (made / "data" / "train").mkdir(parents=True)
    (made / "data" / "feature_spec.yaml").write_text("")
    (made / "data" / "train" / "bundle.json").write_text("{}")
    return made


def test_runs_are_found_with_what_is_known_of_them(folder: Path, small_data: FeatureSpec) -> None:
    report, _ = kept(folder / "a" / "knn", small_data)
    found = find_runs(folder, sort="run")
    assert found.problems == ()
    assert [each.path.removeprefix(f"{folder}/") for each in found.runs] == ["a/knn", "alone", "b/c/popular"]
    knn, alone, popular = found.runs
    assert (knn.model, knn.kind, knn.data, knn.metric) == ("item_knn", "fitted", "synthetic", "full/ndcg@10")
    assert (alone.kind, alone.data, alone.model) == ("", "", "item_knn")
    assert knn.data_path == str(small_data.folder.resolve())
    assert knn.values["test"]["full/ndcg@5"] == report.metrics["full"]["ndcg@5"]
    assert knn.value("valid") == alone.value("valid") is not None
    assert popular.value("test") is None
    files = (file for file in (folder / "alone").rglob("*") if file.is_file())
    assert alone.size == knn.size == sum(file.stat().st_size for file in files)
    record = run_record.read(folder / "a" / "knn")
    assert record is not None
    assert (knn.time, knn.seconds) == (record.started, record.seconds)
    assert json.loads(json.dumps(found.to_dict()))["runs"][0]["model"] == "item_knn"
    assert [each.path for each in find_runs(folder / "a" / "knn").runs] == [str(folder / "a" / "knn")], "itself too"


def test_a_run_says_how_often_it_was_updated(folder: Path) -> None:
    for number, is_whole in (("0001", True), ("0002", True), ("0003", False)):
        bundle = folder / "a" / "knn" / "updates" / number / "bundle"
        bundle.mkdir(parents=True)
        if is_whole:
            (bundle / "bundle.json").touch()
    assert [each.updates for each in find_runs(folder, sort="run").runs] == [2, 0, 0]


def of_data(run: Path, **changed: str) -> None:
    """Change the dataset of a run's record."""
    record = run_record.read(run)
    assert record is not None
    assert record.data is not None
    record.model_copy(update={"data": record.data.model_copy(update={"name": "table", **changed})}).write(run)


def test_runs_on_different_data_name_their_folders(folder: Path) -> None:
    of_data(folder / "a/knn", path="/shop/data", digest="a" * 64)
    for path, digest, shown, other in (
        ("/shop/data", "a", "data (table)", "data (table)"),
        ("/bakery/data", "a", "shop/data (table)", "bakery/data (table)"),
        ("/data", "a", "shop/data (table)", "/data (table)"),
        ("/shop/data", "b", "data (table, aaaaaa)", "data (table, bbbbbb)"),  # prepared again in between
        ("/", "a", "data (table)", "/ (table)"),
    ):
        of_data(folder / "b/c/popular", path=path, digest=digest * 64)
        assert [each.data_shown for each in find_runs(folder, sort="run").runs] == [shown, "", other]
    assert [each.data_shown for each in find_runs(folder, sort="data").runs] == ["/ (table)", "data (table)", ""]


def test_a_run_that_no_metric_chose_shows_that_of_the_others(folder: Path) -> None:
    file = folder / "alone" / "bundle.json"
    card = json.loads(file.read_text())
    del card["trained"]["valid_metric"]
    edit(file, trained=card["trained"], metrics={"rows": {"auc": 0.5}, **card["metrics"]})
    assert {each.metric for each in find_runs(folder).runs} == {"full/ndcg@10"}
    edit(file, metrics={"rows": {"auc": 0.5}})
    assert find_runs(folder, sort="run").runs[1].metric == "rows/auc"


def test_a_search_lists_its_best_and_not_what_was_trained_again_for_it(folder: Path) -> None:
    search = folder / "search"
    for name in ("runs/knn", "runs/knn-again", "runs/other-again"):
        shutil.copytree(folder / "a" / "knn", search / name)
    assert len(find_runs(search).runs) == 3, "not a search"
    (search / "leaderboard.json").write_text("{}")
    assert len(find_runs(search).runs) == 3, "it is not finished"
    shutil.copytree(folder / "a" / "knn", search / "best")
    found = [each.path.removeprefix(f"{search}/") for each in find_runs(search, sort="run").runs]
    assert found == ["best", "runs/knn", "runs/other-again"]
    assert len(find_runs(search / "runs" / "knn-again").runs) == 1, "it was named"


def test_runs_are_sorted_by_a_metric_or_a_figure(folder: Path, small_data: FeatureSpec) -> None:
    for name in ("a/knn", "b/c/popular"):
        kept(folder / name, small_data)
    values = {each.path: each.value("test", "rows/log_loss") for each in find_runs(folder).runs}
    found = find_runs(folder, sort="rows/log_loss").runs
    assert [each.path for each in found[:2]] == sorted(filter(values.get, values), key=lambda path: values[path] or 0)
    assert found[-1].path.endswith("alone"), "a run without a value comes last"
    ranked = [each.value("test", "full/mrr") or 0.0 for each in find_runs(folder, sort="full/mrr").runs]
    assert ranked == sorted(ranked, reverse=True)
    sizes = [each.size or 0 for each in find_runs(folder, sort="size").runs]
    assert sizes == sorted(sizes)
    with pytest.raises(SettingsError, match=r"--sort: unknown metric 'full/mmr' \(did you mean 'full/mrr'\?\)"):
        find_runs(folder, sort="full/mmr")
    with pytest.raises(SettingsError, match="on valid, and time, seconds, size, model, data, run"):
        find_runs(folder, sort="full/mrr@3", split="valid")


def test_an_evaluation_with_other_choices_gives_way_and_is_marked(folder: Path, small_data: FeatureSpec) -> None:
    run = folder / "a" / "knn"
    unusual, _ = kept(run, small_data, repeats="keep", users=9)
    (found,) = find_runs(run).runs
    assert found.choices == {"test": "repeats keep, users 9"}
    assert found.values["test"]["full/mrr"] == unusual.metrics["full"]["mrr"]
    plain, _ = kept(run, small_data)
    (found,) = find_runs(run).runs
    assert found.choices == {}
    assert found.values["test"]["full/mrr"] == plain.metrics["full"]["mrr"]


def edit(file: Path, **changed: object) -> None:
    """Change values of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))


def test_evaluations_of_another_bundle_or_dataset_do_not_count(folder: Path, small_data: FeatureSpec) -> None:
    run = folder / "a" / "knn"
    _, where = kept(run, small_data)
    assert where.file is not None
    before = json.loads(where.file.read_text())
    for part in ("model", "data"):
        edit(where.file, **{**before, part: {**before[part], "digest": "0" * 64}})
        assert set(find_runs(run).runs[0].values) == {"valid"}, part


def test_strange_values_of_a_run_fit_in_a_line(folder: Path) -> None:
    run = folder / "a" / "knn"
    edit(run / "run.json", model="x" * 10_000, started="\x1b[2J\n", seconds=float("inf"), kind="auto")
    edit(run / "bundle" / "bundle.json", metrics={"rows": {"auc": float("nan"), "\n": 1.0}})
    (found,) = find_runs(run).runs
    assert (found.time, found.seconds, found.values) == ("\\x1b[2J\\n", None, {"valid": {"rows/\\n": 1.0}})
    (run / "bundle" / "bundle.json").unlink()
    (found,) = find_runs(run).runs
    assert len(found.model) < 300


def test_numbers_beyond_any_float_are_no_numbers(folder: Path, small_data: FeatureSpec) -> None:
    _, where = kept(folder / "a" / "knn", small_data)
    assert where.file is not None
    report = json.loads(where.file.read_text())["report"]
    report["metrics"]["full"]["ndcg@5"] = 10**400
    edit(where.file, report=report)
    card = folder / "alone" / "bundle.json"
    trained = json.loads(card.read_text())["trained"]
    for seconds in (10**400, float("inf"), -1, True, "1"):
        edit(card, trained={**trained, "seconds": seconds})
        knn, alone, _ = find_runs(folder, sort="run").runs
        assert "full/ndcg@5" not in knn.values["test"]
        assert "rows/auc" in knn.values["test"]
        assert alone.seconds is None


def test_damaged_runs_are_lines_with_a_reason(folder: Path) -> None:
    texts = {"empty": "", "deep": "[" * 100_000, "list": "[]", "newer": '{"format": 9}', "wrong": '{"format": 1}'}
    for name, text in texts.items():
        for file in ("run.json", "bundle.json"):
            where = folder / name / file
            where.parent.mkdir(exist_ok=True)
            where.write_text(text)
    (folder / "bytes").mkdir()
    (folder / "bytes" / "bundle.json").write_bytes(b"\xff\xfe")
    (folder / "pipe").mkdir()
    os.mkfifo(folder / "pipe" / "run.json")
    (folder / "begun" / "checkpoints").mkdir(parents=True)
    found = {Path(each.path).name: each for each in find_runs(folder).runs}
    assert len(found) == 3 + len(texts) + 3
    for name in (*texts, "bytes", "pipe", "begun"):
        assert found[name].problem, name
        assert "\n" not in found[name].problem
    assert found["begun"].problem == "unfinished: it holds no bundle"
    assert "is a named pipe" in found["pipe"].problem
    assert "run.json: run format 9; this recspec reads 1" in found["newer"].problem


def test_links_loops_and_folders_that_cannot_be_read_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "b" / "loop").symlink_to(folder)
    (folder / "itself").symlink_to(folder / "itself")
    (folder / "out").symlink_to("/")
    scandir = os.scandir

    def refused(path: Path) -> object:
        if Path(path).name == "secret":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    (folder / "secret").mkdir()
    found = find_runs(folder)
    assert len(found.runs) == 3
    secret, links = found.problems
    assert secret == f"{folder / 'secret'}: Permission denied"
    assert links == f"{folder / 'out'} and 1 more: links to folders, which are not followed"


def test_the_search_ends_at_its_limits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_runs(folder, depth=1)
    assert [Path(each.path).name for each in found.runs] == ["alone"]
    deep = "what is in them is too deep and was not looked at; see --depth"
    assert found.problems == (f"{folder / 'a'} and 1 more: {deep}",)
    assert len(find_runs(folder, depth=2).runs) == 2
    assert len(find_runs(folder, depth=3).runs) == 3
    monkeypatch.setattr(runs, "MOST_IN_FOLDER", 5)
    many = folder / "many"
    many.mkdir()
    for number in range(7):
        (many / f"{number}").write_text("")
    assert f"{many}: holds more than 5 entries; the others were not looked at" in find_runs(folder).problems
    monkeypatch.setattr(runs, "MOST_RUNS", 2)
    found = find_runs(folder)
    assert len(found.runs) == 2
    assert "there are more than 2 runs; name a folder inside" in found.problems
    monkeypatch.setattr(runs, "MOST_IN_ALL", 3)
    assert "more than 3 files were met; name a folder inside" in find_runs(folder).problems


def test_names_that_would_break_a_line_are_escaped(small_runs: Path, tmp_path: Path) -> None:
    for number, name in enumerate((b"a\nb", b"\x1b[31mred", b"\xff\xfe", "é ü".encode())):
        place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
        shutil.copytree(small_runs / "popular", place, ignore=shutil.ignore_patterns("evaluations", "tensorboard"))
        assert number + 1 == len(find_runs(tmp_path).runs)
    found = sorted(Path(each.path).name for each in find_runs(tmp_path).runs)
    assert found == sorted(["a\\nb", "\\x1b[31mred", "\\udcff\\udcfe", "é ü"])


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder; name one that holds runs"):
        find_runs(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="not a folder"):
        find_runs(tmp_path / "file")
    assert find_runs(tmp_path).runs == ()
