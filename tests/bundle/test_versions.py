"""Which version of a run answers: the newest, or the one that `current.json` names."""

from __future__ import annotations

from pathlib import Path

import pytest

from recspec.base.errors import BundleError, DataError
from recspec.bundle import folder as bundle
from recspec.bundle import versions


def made(run: Path, *numbers: int) -> Path:
    """A run whose bundle and updates are there, each by its card alone."""
    for place in (run, *(run / "updates" / f"{each:04d}" for each in numbers)):
        (place / "bundle").mkdir(parents=True, exist_ok=True)
        (place / "bundle" / "bundle.json").write_text("{}")
    return run


def answers(run: Path) -> int:
    return versions.number_of(bundle.find(run))


def folders(run: Path) -> list[str]:
    return sorted(each.name for each in (run / "updates").iterdir() if each.is_dir())


def test_without_a_file_the_newest_answers_and_with_one_the_one_it_names(tmp_path: Path) -> None:
    run = made(tmp_path / "run", 1, 2)
    assert answers(run) == 2
    assert versions.hold(run) == versions.Current(version=2, earlier=(0, 1), newest=2)
    made(run, 3)
    assert answers(run) == 2, "a version that is not judged yet"
    assert versions.next_update(run).name == "0003"
    assert folders(run) == ["0001", "0002"], "what a killed update left is made anew"
    made(run, 3)
    assert versions.publish(run, 3, base=2).earlier == (0, 1, 2)
    assert answers(run) == 3


def test_a_version_of_another_base_than_the_one_that_answers_does_not_count(tmp_path: Path) -> None:
    run = made(tmp_path / "run", 1, 2)
    versions.hold(run)
    versions.roll_back(run)
    made(run, 3)
    assert versions.publish(run, 3, base=2).version == 1
    assert answers(run) == 1


def test_some_versions_before_stay_and_the_others_go(tmp_path: Path) -> None:
    run = made(tmp_path / "run", 1, 2, 3)
    versions.hold(run)
    made(run, 4)
    assert versions.publish(run, 4, base=3, keep=2).earlier == (2, 3)
    assert folders(run) == ["0002", "0003", "0004"]
    assert (run / "bundle" / "bundle.json").is_file(), "the run's own bundle stays"


def test_failures_freeze_and_numbers_are_not_given_again(tmp_path: Path) -> None:
    run = made(tmp_path / "run", 1)
    versions.hold(run)
    for number, frozen in ((2, ""), (3, "2 new versions in a row failed")):
        assert versions.next_update(run).name == f"{number:04d}"
        made(run, number)
        assert versions.fail(run, number, most=2).frozen == frozen
        assert (answers(run), folders(run)) == (1, ["0001"])
    assert versions.next_update(run).name == "0004"
    assert versions.unfreeze(run) == versions.Current(version=1, earlier=(0,), newest=3)
    made(run, 4)
    versions.publish(run, 4, base=1)
    assert versions.state(run).failures == 0


def test_going_back_takes_the_versions_one_by_one_and_freezes(tmp_path: Path) -> None:
    run = made(tmp_path / "run", 1, 2)
    assert (versions.roll_back(run).frozen, answers(run)) == ("update 2 was rolled back", 1)
    assert (versions.roll_back(run).frozen, answers(run)) == ("update 1 was rolled back", 0)
    with pytest.raises(DataError, match=r"run: there is no version before update 0 \(as trained\) to go back to"):
        versions.roll_back(run)
    assert versions.next_update(run).name == "0003"


def test_a_version_that_somebody_deleted_is_passed_over(tmp_path: Path) -> None:
    run = made(tmp_path / "run", 1, 2)
    versions.hold(run)
    (run / "updates" / "0002" / "bundle" / "bundle.json").unlink()
    assert answers(run) == 1
    (run / "updates" / "0001" / "bundle" / "bundle.json").unlink()
    assert answers(run) == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"format": 2}', "state of versions format 2; this recspec reads 1"),
        ('{"format": 1, "version": -1}', "damaged: version:"),
        ("[", "current.json"),
    ],
)
def test_a_damaged_file_is_refused(text: str, told: str, tmp_path: Path) -> None:
    run = made(tmp_path / "run", 1)
    (run / "updates" / "current.json").write_text(text)
    with pytest.raises(BundleError, match=told):
        bundle.find(run)


def test_processes_take_turns_to_change_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(tmp_path / "run", 1)
    monkeypatch.setattr(versions, "PATIENCE", 0.01)
    with (
        versions.FileLock(run / "updates" / versions.TURN),
        pytest.raises(DataError, match="run: another process changes its versions; try again"),
    ):
        versions.roll_back(run)
    assert answers(run) == 1
