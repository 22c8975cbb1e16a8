"""`experiment_report` and `experiment_check`: what they return, show and refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import recspec as rs
from recspec.base.errors import DataError, SettingsError
from recspec.loop import Journal
from tests.loop.shop_of_experiments import DEFINITION, experiment, simulated


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with experiments and a journal; the second experiment is interleaved."""
    folder = tmp_path_factory.mktemp("shop")
    drawn = DEFINITION | {"name": "drawn", "interleave": True, "salt": "other"}
    plain = [{"name": each["name"], "share": 0.5} for each in DEFINITION["variants"]]  # type: ignore[attr-defined]
    both = {"experiments": [DEFINITION | {"variants": plain}, drawn]}
    (folder / "both.yaml").write_text(yaml.safe_dump(both), encoding="utf-8")
    (folder / "home.yaml").write_text(yaml.safe_dump(DEFINITION), encoding="utf-8")
    for name, found in (("home", experiment()), ("drawn", experiment(name="drawn", interleave=True, salt="other"))):
        with Journal(f"sqlite:///{folder / name}.db") as journal:
            simulated(journal, found, 600, 1.5)
    return folder


def report(shop: Path, **more: object) -> rs.ExperimentResult:
    named = {"journal": f"sqlite:///{shop / 'home.db'}", "at": "2026-12-06"} | more
    return rs.experiment_report(shop / "home.yaml", **named)  # type: ignore[arg-type]


def test_a_report_has_a_verdict_a_frame_and_plain_values(shop: Path) -> None:
    result = report(shop)
    assert result.verdict == result.report.verdict == result.to_dict()["verdict"]
    frame = result.to_frame("pandas")
    assert frame["metric"].tolist() == ["clicks", "ctr"]
    assert frame["difference"][0] == result.report.metrics[0].effect.difference
    assert result.page is None
    text = repr(result)
    assert text.startswith("experiment home\nusers\n")
    for told in ("Welch, at this look alone", "variance left", "guardrail", "coverage", result.verdict):
        assert told in text


def test_before_the_planned_end_the_view_says_that_welch_is_not_valid(shop: Path) -> None:
    result = report(shop, at="2026-12-05T23:59:59Z")
    assert not result.report.is_over
    assert "Welch, not valid yet" in repr(result)


def test_a_page_is_written_where_it_was_asked_for(shop: Path, tmp_path: Path) -> None:
    result = report(shop, out=tmp_path / "page.html")
    assert result.page == tmp_path / "page.html"
    assert result.verdict.split(";")[0] in result.page.read_text(encoding="utf-8")


def test_an_interleaved_experiment_shows_preferences(shop: Path) -> None:
    result = rs.experiment_report(
        shop / "both.yaml", journal=f"sqlite:///{shop / 'drawn.db'}", name="drawn", at="2026-12-06T02:00:00+02:00"
    )
    assert result.report.preference is not None
    assert result.report.is_over
    text = repr(result)
    for told in ("interleaved", "prefer control", "prefer new", "p of signs", result.verdict):
        assert told in text


def test_by_default_a_report_is_of_now(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recspec.loop.now_us", lambda: experiment().start_us + 5)
    assert report(shop, at=None).report.at == experiment().start_us + 5


def test_what_a_report_can_not_be_made_of_is_refused(shop: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--at 'tomorrow': expected ISO 8601, such as 2026-12-01"):
        report(shop, at="tomorrow")
    with pytest.raises(DataError, match="there is no such journal"):
        report(shop, journal=f"sqlite:///{tmp_path / 'none.db'}")
    with pytest.raises(SettingsError, match="holds 2 experiments; choose one with --name: 'home', 'drawn'"):
        rs.experiment_report(shop / "both.yaml", journal="sqlite:///x.db")
    with pytest.raises(DataError, match="nobody was assigned to the experiment 'drawn' yet"):
        rs.experiment_report(shop / "both.yaml", journal=f"sqlite:///{shop / 'home.db'}", name="drawn")


def test_a_check_shows_experiments_and_the_variants_of_users(shop: Path) -> None:
    found = rs.experiment_check(shop / "both.yaml", user=["ann", "bob"])
    assert found.assigned["ann"] == {"home": experiment().variant_of("ann"), "drawn": "interleaved"}
    text = repr(found)
    for told in ("control 50 %, new 50 %", "2026-12-01 00:00", "2026-12-06 00:00", "clicks", "ann", "interleaved"):
        assert told in text
    assert found.to_dict()["experiments"][0]["name"] == "home"
    assert "\nusers\n" not in repr(rs.experiment_check(shop / "home.yaml"))
    assert rs.experiment_check(shop / "home.yaml", user="ann").assigned == {
        "ann": {"home": experiment().variant_of("ann")}
    }
