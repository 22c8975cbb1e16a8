"""The page of an experiment: its sections, what it says of Welch's test, and hostile texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recspec.base.errors import DataError, SettingsError
from recspec.loop import ExperimentReport, analyse
from recspec.loop.outcomes import Counted, Outcomes
from recspec.loop.statistics import UnitValues
from recspec.report import write_experiment_page
from tests.loop.shop_of_experiments import experiment
from tests.report.pages import HOSTILE, Page, read


def report(at_the_end: bool = True, num_variants: int = 2, users: int = 600, **changes: object) -> ExperimentReport:
    """Two metrics of normal values, of which the second has a past, and two guardrails."""
    names = ("control", "new", "other")[:num_variants]
    metrics = [{"name": "clicks", "event": "click"}, {"name": "value", "event": "buy", "measure": "value"}]
    variants = [{"name": name, "share": 1 / num_variants} for name in names]
    found = experiment(**({"metrics": metrics, "variants": variants} | changes))
    rng, variant = np.random.default_rng(1), np.arange(users) % num_variants
    past, answers = rng.normal(size=users), np.full(users, 3.0)
    outcomes = Outcomes(
        variant,
        variant,
        {
            "clicks": Counted(UnitValues(rng.normal(1 + 0.5 * variant)), UnitValues(np.zeros(users))),
            "value": Counted(UnitValues(past + rng.normal(size=users)), UnitValues(past)),
        },
        {"latency": UnitValues(rng.uniform(5, 9, users), answers), "empty": UnitValues(np.zeros(users), answers)},
    )
    if changes.get("interleave"):
        outcomes = replace(outcomes, metrics={}, guardrails={}, clicks=rng.integers(0, 4, (users, 2)))
    return analyse(found, outcomes, found.end_us if at_the_end else found.end_us - 1)


def page_of(folder: Path, found: ExperimentReport) -> Page:
    return read(write_experiment_page(found, folder / "page.html"))


def test_a_page_shows_the_verdict_metrics_guardrails_and_a_chart(tmp_path: Path) -> None:
    found = report()
    page = page_of(tmp_path, found)
    assert page.inside["h2"] == ["Verdict", "Metrics", "Guardrails", "The first metric so far"]
    assert found.verdict in page.shown
    assert "of 300 users have a closed window" in page.shown
    effect = found.metrics[0].effect
    assert f"{effect.difference:+.4f}" in page.shown
    assert "planned end 2026-12-06 00:00 UTC" in page.shown
    assert "at all looks at once, with probability 0.9500." in page.shown
    assert "clicks: new minus control" in page.shown
    assert "It decides only if the experiment says" in page.shown


def test_before_the_planned_end_no_p_value_of_welch_is_called_significant(tmp_path: Path) -> None:
    page = page_of(tmp_path, report(at_the_end=False))
    assert "Its p-values are not significant yet, whatever they are." in page.shown
    assert "It decides only" not in page.shown


def test_every_variant_has_a_chart(tmp_path: Path) -> None:
    page = page_of(tmp_path, report(num_variants=3))
    assert "clicks: new minus control" in page.shown
    assert "clicks: other minus control" in page.shown
    assert "over all variants together" in page.shown


def test_interleaving_has_a_preference_in_place_of_metrics(tmp_path: Path) -> None:
    found = report(interleave=True)
    page = page_of(tmp_path, found)
    assert page.inside["h2"] == ["Verdict", "Preference"]
    assert found.preference is not None
    for text in ("prefer control", "prefer new", f"{found.preference.tied} ", "not by how much", found.verdict):
        assert text in page.shown


def test_an_early_page_has_a_verdict_alone(tmp_path: Path) -> None:
    page = page_of(tmp_path, report(users=20))
    assert page.inside["h2"] == ["Verdict"]
    assert "Too early for new: control has 10 users with a closed window; 100 are needed." in page.shown


def test_a_wrong_sample_ratio_stands_out(tmp_path: Path) -> None:
    page = page_of(tmp_path, replace(report(), ratio_p_sequential=1e-9))
    assert any("bad" in (each.get("class") or "") for each in page.all("div"))
    assert "p under 0.001" in page.shown


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_of_a_file_stay_texts(tmp_path: Path, text: str) -> None:
    page_of(tmp_path, replace(report(), notes=(f"clicks: no event of type '{text}'",)))


def test_a_page_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--out .* is a folder; give the name of a file"):
        write_experiment_page(report(users=20), tmp_path)
    with pytest.raises(DataError, match="could not be written"):
        write_experiment_page(report(users=20), Path(__file__) / "page.html")
