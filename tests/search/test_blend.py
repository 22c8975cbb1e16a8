"""A search ends with a blend of its best models, which is trained again, goes on where it was stopped, and is told."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from recspec.base.errors import Interrupted, SettingsError
from recspec.bundle import Blend
from recspec.bundle import folder as bundle
from recspec.cli.app import app
from recspec.evaluation import blending
from recspec.feature_spec import FeatureSpec
from recspec.inference import Predictor
from recspec.models import MODELS
from recspec.training.search import AutoSearch, Leaderboard, by_reason, candidates, finish
from recspec.training.search.finish import affordable
from recspec.training.search.race import blend_candidates
from recspec.training.search.state import BEST, COMMANDS, RECIPES, RUNS, STATE, Line, State, judge, question_of
from tests import made_up

FITTED = ("ease", "markov", "popularity")
JUDGED = finish._judged
FEW = {"epochs": 2, "batch_size": 64, "precision": "fp32"}


@pytest.fixture
def equal_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model joins the blend, nothing is tried, and the blend wins."""

    def run(search: blending._Search) -> tuple[list[blending._Part], float, list[float]]:
        parts = [blending._Part(model, "score", 1e-3, 1.0) for model in range(len(search.scores))]
        return parts, search.value(parts), [0.0 for _ in parts]

    monkeypatch.setattr(blending._Search, "run", run)
    monkeypatch.setattr(finish, "_judged", lambda *_: (1.0, ""))
    monkeypatch.setattr(finish, "SECONDS", 0.01)


def a_search(spec: FeatureSpec, out: Path, models: tuple[str, ...] = FITTED, **more: object) -> AutoSearch:
    values: dict[str, object] = {"minutes": 600.0, "train": FEW, "most_variants": 0, **more}
    return AutoSearch(spec, out, models=models, **values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def out(data: FeatureSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auto") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blending, "WEIGHTS", (0.3, 1.0))
        patch.setattr(blending, "FACTORS", (0.7, 1.4))
        patch.setattr(finish, "LEAST_LEAD", 0.0)
        a_search(data, folder).run()
    return folder


def board_of(out: Path) -> dict[str, object]:
    found = json.loads((out / "leaderboard.json").read_text())
    assert isinstance(found, dict)
    return found


def test_the_blend_wins_and_serves(out: Path) -> None:
    lines = board_of(out)["lines"]
    assert isinstance(lines, list)
    first = lines[0]
    assert first["name"] == "blend"
    members = first["members"]
    assert set(members) <= set(FITTED)
    assert len(members) >= 2
    assert first["valid"] >= max(line["valid"] for line in lines)
    assert first["trained_again_on"] == ["train", "valid"]
    assert first["test"] is not None
    assert first["p50_ms"] is not None
    best = Predictor.open(out / BEST)
    assert len(best.recommend([best.busiest_user()], k=3)[0].items) == 3
    assert bundle.read_card(bundle.find(out / BEST)).trained["splits"] == ["train", "valid"]


def test_its_lead_on_the_users_of_its_weights_is_no_evidence(out: Path) -> None:
    verdict = str(board_of(out)["verdict"])
    assert re.fullmatch(
        r"blend leads (ease|markov|popularity) by 0\.\d{4} in full/ndcg@10 on valid; its weights were chosen on "
        r"users of valid, so this lead is no evidence: compare the two on test",
        verdict,
    ), verdict


def test_its_value_is_that_of_the_question_asked_of_all(data: FeatureSpec, out: Path) -> None:
    state = State.load(out)
    assert state is not None
    question = question_of(data, "valid", state.deciding, state.users)
    for line in state.ranked:
        found = judge(bundle.load(out / RUNS / line.name).model.eval(), question, state.deciding)
        assert found.value == pytest.approx(line.best, rel=1e-5), line.name


def test_its_commands_repeat_it(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State.load(out)
    assert state is not None
    assert state.blend is not None
    monkeypatch.chdir(out / BEST)
    said = (out / BEST / COMMANDS).read_text().splitlines()
    assert len(said) == len(state.blend.members) + 1
    for line in said:
        words = [word.replace("AGAIN/", f"{tmp_path}/") for word in shlex.split(line)][1:]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    assert sorted(each.stem for each in (out / BEST / RECIPES).iterdir()) == sorted(state.blend.members)
    users = torch.arange(1, 9)
    models = [bundle.load(run).model for run in (tmp_path / "blend", out / BEST)]
    first, second = (model.score_users(users) for model in models if isinstance(model, Blend))
    torch.testing.assert_close(first, second)


def test_the_same_command_prints_the_same(data: FeatureSpec, out: Path) -> None:
    again = a_search(data, out).run()
    assert json.loads(json.dumps(again.to_dict()))["lines"] == board_of(out)["lines"]


def test_losers_are_those_that_the_blend_does_not_hold(out: Path) -> None:
    state = State.load(out)
    assert state is not None
    assert state.blend is not None
    losers = sum(line.seconds for line in state.lines if line.name not in state.blend.members)
    assert board_of(out)["seconds_of_losers"] == pytest.approx(losers, abs=0.06)


@pytest.mark.usefixtures("equal_parts")
def test_a_blend_of_models_trained_by_steps_is_stopped_anywhere_and_goes_on(data: FeatureSpec, tmp_path: Path) -> None:
    stops = ["weights of a blend", "blend is trained again", "final evaluation: blend"]
    told: list[str] = []
    models = ("mult_vae", "sasrec")
    for stop in stops:
        found = a_search(data, tmp_path / "out", models, tell=told.append)
        found.stop_requested = lambda stop=stop: any(each.startswith(stop) for each in told)  # type: ignore[misc]
        with pytest.raises(Interrupted, match="the same command goes on"):
            found.run()
        told.clear()
    board = a_search(data, tmp_path / "out", models, tell=told.append).run()
    assert not any(each.startswith("weights of a blend") for each in told)
    names = {str(line["name"]) for line in board.lines}
    assert names == {*models, "blend"}
    assert board.lines[0]["trained_again_on"] == ["train", "valid"]


@pytest.mark.usefixtures("equal_parts")
def test_a_member_that_can_not_be_trained_again_leaves_the_blend_of_train(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def tell(message: str) -> None:
        told.append(message)
        if message.startswith("blend is trained again"):
            monkeypatch.setattr(MODELS["markov"], "_fit", too_large)

    def too_large(*_: object) -> None:
        raise MemoryError

    board = a_search(data, tmp_path / "out", tell=tell).run()
    assert board.lines[0]["name"] == "blend"
    assert "not enough memory" in str(board.lines[0]["not_trained_again"])
    assert bundle.read_card(bundle.find(tmp_path / "out" / BEST)).trained["splits"] == ["train"]
    assert "pipeline blend" in (tmp_path / "out" / BEST / COMMANDS).read_text()


@pytest.mark.usefixtures("equal_parts")
def test_more_minutes_blend_anew(data: FeatureSpec, tmp_path: Path) -> None:
    told: list[str] = []
    models = ("popularity", "markov", "mult_vae")
    a_search(data, tmp_path / "out", models, tell=told.append).run()
    a_search(data, tmp_path / "out", models, tell=told.append, minutes=6000.0, most_variants=1).run()
    assert sum(each.startswith("weights of a blend") for each in told) == 2


def test_few_seconds_leave_it_out_with_the_reason(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finish, "seconds_of_trial", lambda _: 1e9)
    board = a_search(data, tmp_path / "out", ("popularity", "markov")).run()
    assert "blend" not in {line["name"] for line in board.lines}
    assert "too few to choose its weights; give more --minutes" in board.left_out["blend"]


def test_models_that_do_not_help_leave_it_out(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = blending._Part(0, "score", 1e-3, 1.0)
    monkeypatch.setattr(blending._Search, "run", lambda search: ([alone], search.value([alone]), [0.0, 0.0]))
    board = a_search(data, tmp_path / "out", ("popularity", "markov")).run()
    assert board.left_out["blend"] == f"no other model improves {board.lines[0]['name']}"


@pytest.mark.usefixtures("equal_parts")
def test_a_gain_below_its_standard_error_leaves_it_out(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finish, "_judged", JUDGED)
    monkeypatch.setattr(finish, "LEAST_LEAD", 1e6)
    board = a_search(data, tmp_path / "out", ("popularity", "markov")).run()
    assert "less than a standard error" in board.left_out["blend"]


def test_each_model_is_offered_once_and_four_at_most() -> None:
    names = ["neumf", "sasrec-2", "sasrec", "ease", "markov", "ials", "gf_cf"]
    lines = [Line(name=name, model=name.partition("-")[0], values=[1.0 - at / 10]) for at, name in enumerate(names)]
    state = State(dataset="", metric="full/ndcg@10", seed=0, lines=lines)
    assert [line.name for line in blend_candidates(state)] == ["sasrec-2", "ease", "markov", "ials"]
    state.metric = "sampled/ndcg@10"
    assert blend_candidates(state) == []
    state = State(dataset="", metric="full/ndcg@10", seed=0, lines=lines[:3])
    assert blend_candidates(state) == [], "of one model"


def test_models_and_users_that_the_time_affords_by_hand() -> None:
    lines = [Line(name=name, model=name) for name in ("ease", "markov", "ials")]
    state = State(dataset="", metric="full/ndcg@10", seed=0, each={"ease": 0.01, "markov": 0.01, "ials": 0.01})
    # Three models: 2 * .03 and 60 * (1 + 2) * .001 are .24 s a user. Two: .04 + .06 = .1 s.
    assert affordable(state, lines, 1000, 240.0, 0.001) == (lines, 1000)
    assert affordable(state, lines, 1000, 72.1, 0.001) == (lines, 300)
    assert affordable(state, lines, 1000, 24.1, 0.001) == (lines[:2], 241)
    assert affordable(state, lines, 1000, 10.0, 0.001)[0] == lines[:1]
    assert affordable(state, lines, 5, 1.3, 0.001) == (lines, 5)
    assert affordable(State(dataset="", metric="full/ndcg@10", seed=0), lines, 7, 1.0, 0.0) == (lines, 7)


def test_labels_leave_out_the_models_that_rank_items(tmp_path: Path) -> None:
    clicks = made_up.clicks(tmp_path / "clicks", num_rows=600)
    board = a_search(clicks, tmp_path / "out", ("ease", "sasrec", "wide_deep")).run()
    assert board.metric == "rows/log_loss"
    assert [line["name"] for line in board.lines] == ["wide_deep"]
    assert by_reason(board.left_out) == [
        "ease, sasrec: ranks items: rows/log_loss decides, and it gives no probability"
    ]
    assert "blend" not in board.left_out
    ranked = a_search(clicks, tmp_path / "ranked", ("popularity",)).run()
    assert ranked.metric == "full/ndcg@10", "as models alone were asked for that rank"


def test_a_model_of_events_is_timed_with_the_events(data: FeatureSpec, tmp_path: Path) -> None:
    known: list[int] = []
    timed = candidates.seconds_each

    def noted(model: torch.nn.Module, question: object) -> float:
        known.append(len(model.known.items))  # type: ignore[arg-type, union-attr]
        return timed(model, question)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "seconds_each", noted)
        a_search(data, tmp_path / "out", ("mult_vae",)).run()
    assert known[0] > 100


@pytest.mark.parametrize("damage", ["name", "members", "stranger", "itself"])
def test_a_damaged_blend_is_told(data: FeatureSpec, out: Path, tmp_path: Path, damage: str) -> None:
    state = json.loads((out / STATE).read_text())
    (tmp_path / STATE).parent.mkdir(exist_ok=True)
    if damage == "name":
        state["blend"]["line"]["name"] = "../../outside"
    else:
        state["blend"]["members"] = {"members": [], "stranger": ["../x", "markov"], "itself": ["blend", "ease"]}[damage]
    (tmp_path / STATE).write_text(json.dumps(state))
    with pytest.raises(SettingsError, match="damaged: the blend"):
        a_search(data, tmp_path).run()


@pytest.mark.usefixtures("equal_parts")
def test_deleted_runs_are_told_once_they_are_needed(data: FeatureSpec, tmp_path: Path) -> None:
    models = ("popularity", "mult_vae")
    a_search(data, tmp_path / "out", models).run()
    (tmp_path / "out" / RUNS).rename(tmp_path / "elsewhere")
    assert isinstance(a_search(data, tmp_path / "out", models).run(), Leaderboard)
    said = (
        r"runs: the search can't go on without .*; put the deleted runs back, or name another folder; .*best is still"
    )
    with pytest.raises(SettingsError, match=said) as caught:
        a_search(data, tmp_path / "out", models, minutes=6000.0, most_variants=1).run()
    assert "'blend'" in str(caught.value)
    assert json.loads((tmp_path / "out" / STATE).read_text())["ending"]["done"]
    shutil.rmtree(tmp_path / "out" / BEST)
    with pytest.raises(SettingsError, match=r"another folder$"):
        a_search(data, tmp_path / "out", models).run()
