"""Evaluations that are kept with a run."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from recspec.base.errors import BundleError, DataError
from recspec.base.files import manifest
from recspec.bundle import folder as bundle
from recspec.bundle import run_record
from recspec.data.encoding import Encoders
from recspec.evaluation import Report, compare, pair, save, saved
from recspec.evaluation.bootstrap import how_tasks_differ
from recspec.evaluation.report import Evaluation
from recspec.evaluation.saved import held_values, raw_ids
from recspec.feature_spec import FeatureSpec
from tests import made_up
from tests.evaluation.conftest import kept


@pytest.fixture
def run(small_runs: Path, tmp_path: Path) -> Path:
    """A copy of a run, which a test may damage."""
    without = shutil.ignore_patterns("evaluations")
    return Path(shutil.copytree(small_runs / "knn", tmp_path / "knn", ignore=without))


def test_an_evaluation_is_kept_with_its_run_and_read_again(run: Path, small_data: FeatureSpec) -> None:
    report, where = kept(run, small_data, baselines=True)
    assert where.file is not None
    assert where.file.parent == run / "evaluations"
    (found,) = saved(run)
    assert saved(run / "bundle") == (found,), "by its bundle too"
    assert (found.split, found.model.name, found.is_current) == ("test", "item_knn", True)
    assert found.model.digest == manifest.check(run / "bundle"), "and the manifest does not know of evaluations"
    assert (found.metrics, found.baseline_metrics) == (report.metrics, report.baselines)
    assert found.settings["ks"] == [5]
    record = run_record.read(run)
    assert record is not None
    assert found.data == record.data
    for protocol, values in report.model.values.items():
        table, held = found.table(protocol), found.groups[protocol]
        assert held.saved == held.of == len(table)
        for metric, of in values.items():
            np.testing.assert_allclose(held_values(table, metric), of, rtol=1e-6)
            assert (len(of) < len(table)) == (metric == "group_auc"), "which has one value a group"
            theirs = report.beside["popularity"].values[protocol]
            assert (f"popularity/{metric}" in table.column_names) == (metric in theirs)
            if metric in theirs:
                np.testing.assert_allclose(held_values(table, f"popularity/{metric}"), theirs[metric], rtol=1e-6)
        assert (table.column("row").to_pylist() == [*range(len(table))]) if protocol == "rows" else True


def test_values_stand_beside_raw_ids_and_the_number_of_events(run: Path, small_data: FeatureSpec) -> None:
    """The users of test as the vocabulary writes them, each with the items of its rows in train and valid."""
    kept(run, small_data)
    (found,) = saved(run)
    vocabulary = Encoders.load(small_data.folder).vocabulary_of(small_data.user_id)
    for protocol in ("full", "sampled"):
        table = found.table(protocol)
        assert (found.groups[protocol].feature, found.groups[protocol].raw) == (small_data.user_id, True)
        ids = vocabulary.encode(table.column("id").to_pylist())
        assert ids.tolist() == sorted({*ids.tolist()})
        assert min(ids) > 0
        trained = bundle.load(run)
        assert trained.seen is not None  # the model knows the same items: of train and valid
        events = [len({*trained.seen.known_of(user).tolist()}) for user in ids.tolist()]
        assert table.column("events").to_pylist() == events


def test_asking_the_same_again_replaces_it_and_asking_otherwise_does_not(run: Path, small_data: FeatureSpec) -> None:
    (_, first), (_, again) = (kept(run, small_data) for _ in range(2))
    (_, other), (_, valid) = kept(run, small_data, repeats="keep"), kept(run, small_data, "valid")
    assert first.file == again.file
    files = {each.file for each in (first, other, valid)}
    assert len(files) == 3
    assert {each.file for each in saved(run)} == files
    assert all(each.is_current for each in saved(run))
    assert sorted(each.name.partition("-")[0] for each in saved(run)) == ["test", "test", "valid"]
    (run / "bundle" / "note.txt").write_text("new")
    manifest.write(run / "bundle")
    assert not any(each.is_current for each in saved(run)), "they are of an earlier bundle"


def test_a_bundle_without_a_run_keeps_them_itself_outside_its_manifest(
    run: Path, small_data: FeatureSpec, tmp_path: Path
) -> None:
    alone = Path(shutil.copytree(run / "bundle", tmp_path / "alone"))
    _, where = kept(alone, small_data)
    assert where.file is not None
    assert where.file.parent == alone / "evaluations"
    assert len(saved(alone)) == 1
    manifest.check(alone)


def test_a_folder_that_cannot_be_written_to_is_a_note(run: Path, small_data: FeatureSpec) -> None:
    (run / "evaluations").write_text("a file")
    report, where = kept(run, small_data)
    assert report.metrics
    assert where.file is None
    assert where.why_not.startswith("the evaluation is not kept: ")
    (run / "evaluations").unlink()
    (run / "evaluations").symlink_to(run.parent)
    assert "leads outside the folder" in kept(run, small_data)[1].why_not


HOSTILE = {
    "empty": "",
    "not JSON": "{",
    "deep": "[" * 100_000,
    "a list": "[]",
    "of another format": '{"format": 2}',
    "without a model": '{"format": 1, "time": "now"}',
    "of a wrong kind": '{"format": 1, "time": 3, "model": [], "data": 0, "split": {}, "report": "x"}',
}


def test_what_is_damaged_is_left_out_with_the_reason(run: Path, small_data: FeatureSpec) -> None:
    kept(run, small_data)
    folder = run / "evaluations"
    for name, text in HOSTILE.items():
        (folder / f"{name}.json").write_text(text)
    (folder / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (folder / "link.json").symlink_to("/etc/passwd")
    os.mkfifo(folder / "pipe.json")
    problems: list[str] = []
    assert len(saved(run, problems)) == 1
    assert len(problems) == len(HOSTILE) + 3
    for problem in problems:
        assert str(folder) in problem
    assert any("of another format.json: evaluation format 2; this recspec reads 1" in each for each in problems)


def test_values_that_are_not_those_written_are_refused(run: Path, small_data: FeatureSpec) -> None:
    kept(run, small_data)
    (found,) = saved(run)
    with pytest.raises(DataError, match="unknown protocol 'ful' \\(did you mean 'full'\\?\\)"):
        found.table("ful")
    file = found.file.with_suffix(".parquet")
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(BundleError, match=r"is not the file that was written with test-.*; evaluate again"):
        found.table("full")
    file.unlink()
    with pytest.raises(BundleError, match="can't be read"):
        found.table("full")


def test_numbers_that_are_none_are_null_in_the_file(run: Path, small_data: FeatureSpec) -> None:
    report, _ = kept(run, small_data)
    broken = Evaluation({"rows": {"auc": float("nan")}}, values={"rows": {"auc": np.array([1.0, float("nan")])}})
    where = save(Report("../test", broken, asked=report.asked), bundle.load(run), small_data)
    assert where.file is not None
    assert where.file.parent == run / "evaluations", "whatever the split is called"
    text = where.file.read_text()
    assert json.loads(text)["report"]["metrics"] == {"rows": {"auc": None}}
    assert "NaN" not in text
    assert next(each for each in saved(run) if each.file == where.file).metrics == {"rows": {}}


def test_groups_without_a_vocabulary_keep_their_numbers(small_data: FeatureSpec, tmp_path: Path) -> None:
    ids, raw = raw_ids(small_data, "", np.array([7, 9]))
    assert (ids.to_pylist(), raw) == (["7", "9"], True)
    plain = made_up.sequences(tmp_path / "plain", num_rows=200, num_users=5)
    assert raw_ids(plain, "user_id", np.array([2, 3]))[0].to_pylist() == ["2", "3"]


def test_another_or_a_changed_dataset_is_told(run: Path, small_data: FeatureSpec, tmp_path: Path) -> None:
    moved = FeatureSpec.load(shutil.copytree(small_data.folder, tmp_path / "moved"))
    assert kept(run, moved)[0].notes == (), "the same data may lie elsewhere"
    text = (moved.folder / "prepare.json").read_text()
    (moved.folder / "prepare.json").write_text(text.replace('"seconds"', '"duration"'))
    (note,) = kept(run, moved)[0].notes
    assert note.startswith(f"the model was trained on another dataset: {small_data.folder.resolve()} (")
    record = run_record.read(run)
    assert record is not None
    assert record.data is not None
    there = record.data.model_copy(update={"path": str(moved.folder.resolve())})
    record.model_copy(update={"data": there}).write(run)
    (note,) = kept(run, moved)[0].notes
    assert note.startswith(f"{moved.folder.resolve()} has changed since the model was trained on it: its digest was ")
    (run / "run.json").write_text("{")
    (note,) = kept(run, moved)[0].notes
    assert "run.json: damaged" in note
    (run / "run.json").unlink()
    assert kept(run, moved)[0].notes == ()


# --- pairs of kept evaluations ----------------------------------------------------------------------------------------


def test_a_pair_says_what_comparing_the_evaluations_themselves_says(small_runs: Path, small_data: FeatureSpec) -> None:
    ours, theirs = (kept(small_runs / name, small_data)[0] for name in ("knn", "popular"))
    first, second = (
        next(each for each in saved(small_runs / name) if each.split == "test" and each.settings["users"] is None)
        for name in ("knn", "popular")
    )
    expected = compare(ours.model, theirs.model, draws=200)
    for protocol in ("rows", "sampled", "full"):
        found = pair(first, second, protocol)
        assert found.ids is not None
        assert len(found.ids) == len(next(iter(found.ours.values())))
        for name, each in expected[protocol].items():
            assert found.compare(draws=200)[name].difference == pytest.approx(each.difference, abs=1e-6)
    swapped = pair(second, first, "full")
    np.testing.assert_array_equal(swapped.ours["mrr"], pair(first, second, "full").theirs["mrr"])
    assert swapped.events is not None


def test_unlike_tasks_are_refused_with_every_difference(small_runs: Path, small_data: FeatureSpec) -> None:
    kept(small_runs / "knn", small_data, users=7)
    kept(small_runs / "popular", small_data, "valid", repeats="keep")
    first = next(each for each in saved(small_runs / "knn") if each.settings["users"] == 7)
    second = next(each for each in saved(small_runs / "popular") if each.split == "valid")
    with pytest.raises(DataError, match=r"can't be compared under full: \d+ problems") as caught:
        pair(first, second, "full")
    assert "the split: 'test' and 'valid'" in caught.value.problems
    assert "repeats: 'drop' and 'keep'" in caught.value.problems
    assert any(each.startswith("groups: 7 and ") for each in caught.value.problems)
    assert how_tasks_differ(first, first, "full") == []
    assert how_tasks_differ(first, first, "none") == [f"{first.file} has no values under none"] * 2
