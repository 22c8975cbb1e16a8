"""A run is its newest whole version; what a killed update left, and links that lead elsewhere, are none."""

from __future__ import annotations

from pathlib import Path

from recspec.bundle import folder as bundle
from recspec.bundle import versions


def run_of(folder: Path, updates: int) -> Path:
    """A run with its bundle and some updates."""
    for place in ("bundle", *(f"updates/{number:04d}/bundle" for number in range(1, updates + 1))):
        (folder / place).mkdir(parents=True)
        (folder / place / "bundle.json").touch()
    return folder


def test_a_run_is_its_newest_version_and_each_version_can_be_named(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 2)
    assert bundle.find(run) == run / "updates" / "0002" / "bundle"
    assert bundle.find(run / "bundle") == run / "bundle"
    assert bundle.find(run / "updates" / "0001") == run / "updates" / "0001" / "bundle"
    numbers = [versions.number_of(each) for each in (run / "bundle", bundle.find(run / "updates" / "0001"))]
    assert numbers == [0, 1]


def test_what_a_killed_update_left_is_no_version_and_makes_room_for_the_next(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 2)
    (run / "updates" / "0002" / "bundle").rename(run / "updates" / "0002" / ".bundle.7.tmp")
    assert bundle.find(run) == run / "updates" / "0001" / "bundle"
    assert versions.next_update(run) == run / "updates" / "0002"
    assert not (run / "updates" / "0002").exists()


def test_links_that_lead_elsewhere_are_no_versions(tmp_path: Path) -> None:
    run, other = run_of(tmp_path / "run", 1), run_of(tmp_path / "other", 1)
    (run / "updates" / "0002").symlink_to(other / "updates" / "0001")
    assert bundle.find(run) == run / "updates" / "0001" / "bundle"
    assert versions.next_update(run) == run / "updates" / "0002"
    assert bundle.find(other) == other / "updates" / "0001" / "bundle", "only the link was removed"
