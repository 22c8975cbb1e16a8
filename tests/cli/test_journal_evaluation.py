"""`recspec evaluate RUN --journal URL`: measured, kept, compared, and what it refuses."""

from __future__ import annotations

import json
from shutil import copytree

import pytest

import recspec as rs
from recspec.base.errors import SettingsError
from recspec.inference import Predictor
from recspec.loop import Journal
from tests.made_up_lists import simulated


def test_evaluate_measures_keeps_and_compares_runs_from_a_journal(shop_runs, run, tmp_path):
    url = f"sqlite:///{tmp_path / 'journal.db'}"
    ease = Predictor.open(shop_runs["ease"], device="cpu")
    with Journal(url) as journal:
        simulated(journal, ease, 1_000).store()
    own, other = (copytree(shop_runs[name], tmp_path / name) for name in ("ials", "ease"))
    result = rs.evaluate(own, journal=url, against=other, k=2)
    assert [*result.metrics["off_policy"]] == ["rips@2", "sn_rips@2", "cascade_dr@2"]
    frame = result.to_frame().to_pylist()
    assert {row["model"] for row in frame} == {"ials", "as logged"}
    assert all(row["low"] < row["value"] < row["high"] for row in frame if row["model"] == "ials")
    assert len(result.comparisons()) == 3
    assert {each.parent.parent for each in result.files} == {own, other}
    assert "ials" in repr(result.view())
    page = tmp_path / "page.html"
    rs.report([own, other], out=page)
    assert "what the model&#39;s lists would earn" in page.read_text()
    assert "trained on other data" not in page.read_text()
    status, out, _ = run("evaluate", own, "--journal", url, "-k", "2", "--json")
    assert status == 0
    assert "cascade_dr@2" in json.loads(out)["metrics"]["off_policy"]
    assert rs.open(own).evaluate(journal=url, k=1).metrics.keys() == {"off_policy"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "evaluate: expected a dataset or a journal"),
        ({"data": "d", "journal": "sqlite:///x"}, "evaluate: expected one of data and journal"),
        (
            {"journal": "sqlite:///x", "baselines": True, "users": 3},
            "evaluate: 'baselines', 'users': used with data alone",
        ),
        ({"data": "d", "event": "buy"}, "evaluate: 'event': used with journal alone"),
        ({"journal": "sqlite:///x", "window": "soon"}, "setting 'window' is 'soon': expected a time such as 90d"),
    ],
)
def test_settings_of_the_other_source_are_refused(given, said):
    with pytest.raises(SettingsError, match=said):
        rs.evaluate("run", **given)
