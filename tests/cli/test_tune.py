"""`recspec tune` as a user sees it: what it says it searches, its last lines, and its JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="the extra `tune` is not installed")

from recspec.api import Search
from recspec.cli import app as cli
from recspec.feature_spec import FeatureSpec
from recspec.training.search import Found, candidates
from recspec.training.search.study import Importance, Importances, Trial
from tests import made_up
from tests.made_up_training import made_up_training


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("tune") / "data", num_rows=600)


def run(
    data: FeatureSpec,
    out: Path,
    *options: str | Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> tuple[str, str]:
    """Standard output and error of `recspec tune neumf`, whose trials have their learning rate as their value."""
    monkeypatch.setattr(candidates, "train", made_up_training(lambda rate: [rate], "full/ndcg@10"))
    monkeypatch.setattr(sys, "argv", ["recspec", "tune", "neumf", str(data.folder), str(out), *map(str, options)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (None, 0)
    printed = capsys.readouterr()
    return printed.out, printed.err


def test_what_set_gives_is_not_searched_and_space_adds(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--trials", "2", "--set", "dropout=0.25", "--set", "epochs=3", "--space", "average=[0.0, 0.9]", "--json")
    printed, said = run(data, tmp_path / "out", *options, monkeypatch=monkeypatch, capsys=capsys)
    assert "searching " in said
    assert "train.average [0.0, 0.9]" in said
    assert "settings.factors [" in said
    assert "dropout" not in said
    found = json.loads(printed)
    assert found["counts"] == {"complete": 2, "pruned": 0, "failed": 0, "running": 0}
    assert found["defaults"]["number"] == 0
    assert found["importances"] == {"judged": 2, "needed": 15, "settings": {}}
    assert found["left"] == 0
    assert "dropout: 0.25" in (tmp_path / "out" / "best.yaml").read_text()


def test_like_and_only_are_options(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--trials", "2", "--space", "learning_rate=1e-4..1e-2 log", "--only")
    run(data, tmp_path / "first", *options, monkeypatch=monkeypatch, capsys=capsys)
    like = ("--like", tmp_path / "first")
    printed, said = run(data, tmp_path / "second", *options, *like, monkeypatch=monkeypatch, capsys=capsys)
    assert "▸ searching train.learning_rate 0.0001..0.01 log" in said.splitlines()
    assert "2 trials: 2 complete; full/ndcg@10 on valid" in printed
    assert "what mattered: too few trials to say: 2 judged, 15 needed" in printed


def found(**changed: object) -> Found:
    trials = [
        Trial(0, "complete", 0.25, {"settings.factors": 8}, 3.0, start="defaults"),
        Trial(1, "pruned", 0.1, {"settings.factors": 4}, 1.0),
        Trial(2, "failed", None, {"settings.factors": 2}, 1.0, "the loss is nan at step 3; lower it\nmore"),
        Trial(3, "complete", 0.5, {"settings.factors": 16, "settings.layers": [8, 4]}, 4.0),
        Trial(4, "running", 0.3, {"settings.factors": 32}, None),
    ]
    mattered = Importances(20, {"settings.factors": Importance(0.75, True), "settings.layers": Importance(0.25, False)})
    values = {"trials": trials, "best": trials[3], "left": 1, "importances": mattered, **changed}
    return Found(metric="full/ndcg@10", recipe=Path("search/best.yaml"), **values)  # type: ignore[arg-type]


def lines(**changed: object) -> list[str]:
    """The text view of a search."""
    return repr(Search(Path("search"), found(**changed), None)).splitlines()  # type: ignore[arg-type]


def test_the_last_lines_count_the_trials_and_say_what_mattered() -> None:
    first, *table, best, mattered, recipe, left = lines()
    assert first.endswith("5 trials: 2 complete, 1 pruned, 1 failed, 1 running; full/ndcg@10 on valid")
    assert best == "note: best: trial 3, full/ndcg@10 0.50000 on valid; the defaults, trial 0: 0.25000"
    assert mattered == "note: what mattered: settings.factors 75%; no more than chance: settings.layers 25%"
    assert recipe == "note: search/best.yaml: the best recipe; its bundle is in the folder best beside it"
    assert left == "note: 1 trial is left; the same call goes on"
    assert any("complete, defaults" in line for line in table)
    assert any("factors 16, layers [8, 4]" in line for line in table)


@pytest.mark.parametrize(
    ("best", "line"),
    [
        (0, "best: trial 0, full/ndcg@10 0.25000 on valid: the defaults"),
        (3, "best: trial 3, full/ndcg@10 0.50000 on valid; the defaults have no value yet"),
    ],
)
def test_the_best_trial_is_shown_beside_the_defaults(best: int, line: str) -> None:
    trials = found().trials
    assert f"note: {line}" in lines(best=trials[best], trials=trials if best == 0 else trials[1:])


def test_without_a_complete_trial_nothing_is_claimed() -> None:
    printed = "\n".join(lines(best=None, trials=[], left=3))
    assert "no trials; full/ndcg@10" in printed
    assert "best" not in printed
    assert "3 trials are left" in printed
