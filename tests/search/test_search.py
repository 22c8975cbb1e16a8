"""A search finds the better model, repeats every line, goes on where it was stopped, and distrusts its own file."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from recspec.api import AutoResult, Data
from recspec.base import config
from recspec.base.errors import Interrupted, SettingsError
from recspec.bundle import DataRecord, run_record
from recspec.bundle import folder as bundle
from recspec.data.prepare import PrepareContext
from recspec.datasets import DATASETS
from recspec.evaluation import Evaluation, EvaluationTask
from recspec.feature_spec import FeatureSpec
from recspec.inference import Predictor
from recspec.loading import Ranks
from recspec.models import MODELS, Model
from recspec.training import Result, TrainingPlan, TrainSettings, defaults, plan_run, train
from recspec.training.run_folder import RECIPE
from recspec.training.search import AutoSearch, by_reason, candidates, finish, main_reason
from recspec.training.search.auto import MOST_ATTEMPTS
from recspec.training.search.candidates import begin
from recspec.training.search.race import BEHIND, Race, first_slice, hope_of, next_of
from recspec.training.search.state import (
    BEST,
    BOARD,
    RUNS,
    STATE,
    Ending,
    Judged,
    Line,
    State,
    _verdict,
    check_metric,
    judge,
    question_of,
    what_more_buys,
)
from tests import made_up

FEW = {"epochs": 2, "batch_size": 512, "precision": "fp32"}


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.clicks(tmp_path_factory.mktemp("auto") / "clicks", num_rows=1200)


def a_search(spec: FeatureSpec, out: Path, models: tuple[str, ...], **more: object) -> AutoSearch:
    values: dict[str, object] = {"minutes": 600.0, "train": FEW, "most_variants": 0, **more}
    return AutoSearch(spec, out, models=models, **values)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_search_leaves_a_winner_that_serves_and_lines_that_can_be_repeated(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Race, "is_behind", lambda *_: False)  # so that there are variants of the worst
    board = a_search(data, tmp_path / "out", ("popularity", "ease", "neumf"), most_variants=2).run()
    names = [str(line["name"]) for line in board.lines]
    assert {"popularity", "ease", "neumf", "neumf-2", "neumf-3"} == set(names)
    valid = [float(str(line["valid"])) for line in board.lines]
    assert valid == sorted(valid, reverse=True)
    assert board.metric == "full/ndcg@10"
    first = board.lines[0]
    assert all(math.isfinite(float(str(first[each]))) for each in ("valid_error", "test", "test_error", "p50_ms"))
    assert json.loads((tmp_path / "out" / BOARD).read_text()) == board.to_dict()
    assert "standard errors" in board.verdict
    assert board.seconds_of_losers < board.seconds

    user = Predictor.open(tmp_path / "out" / BEST).busiest_user()
    assert len(Predictor.open(tmp_path / "out" / BEST).recommend([user], k=3)[0].items) == 3
    assert first["trained_again_on"] == ["train", "valid"]
    record = run_record.read(tmp_path / "out" / BEST)
    assert record is not None
    assert (record.kind, record.data) == ("auto", DataRecord.of(data))

    again = config.load_recipe(tmp_path / "out" / RUNS / "neumf" / RECIPE)
    settings = config.build(MODELS["neumf"].Settings, "recipe", again.settings)
    train_settings = config.build(TrainSettings, "recipe", again.train)
    repeated = train("neumf", data, tmp_path / "again", settings=train_settings, model_settings=settings)
    there = bundle.load(tmp_path / "out" / RUNS / "neumf").model.state_dict()
    for name, weight in bundle.load(repeated.bundle).model.state_dict().items():
        assert torch.equal(weight, there[name]), name


def test_labelled_rows_are_judged_by_log_loss(clicks: FeatureSpec, tmp_path: Path) -> None:
    given = {**FEW, "epochs": 1, "calibration": "temperature"}
    board = a_search(clicks, tmp_path / "out", ("wide_deep", "dlrm"), train=given).run()
    assert board.metric == "rows/log_loss"
    values = [float(str(line["valid"])) for line in board.lines]
    assert len(values) == 2
    assert values == sorted(values)
    assert board.lines[0]["trained_again_on"] == ["train", "valid"], "though nothing is left to calibrate on"
    recipe = config.load_recipe(tmp_path / "out" / BEST / RECIPE)
    assert recipe.train["train_splits"] == ["train", "valid"]
    assert f"by {values[1] - values[0]:.4f} in rows/log_loss" in board.verdict


def test_a_stopped_search_goes_on(data: FeatureSpec, tmp_path: Path) -> None:
    trained: list[str] = []

    def search() -> AutoSearch:
        found = a_search(data, tmp_path / "out", ("popularity", "ease"))
        found.on_event = lambda name, _: trained.append(name)
        return found

    stopped = search()
    stopped.stop_requested = lambda: "ease" in trained
    with pytest.raises(Interrupted, match="the same command goes on"):
        stopped.run()
    assert set(trained) == {"popularity", "ease"}
    trained.clear()
    board = search().run()
    assert "popularity" not in trained  # it had ended; the fit of ease starts again
    assert {str(line["name"]) for line in board.lines} == {"popularity", "ease"}


def opened_tests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The metric of each evaluation of test, noted as it happens."""
    found: list[str] = []

    def noted(model: Model, question: EvaluationTask, metric: str, *more: object) -> Judged:
        if question.split == "test":
            found.append(model.name)
        return judge(model, question, metric, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(finish, "judge", noted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_stopped_final_evaluation_goes_on_and_opens_test_for_no_other_choice(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    opened, told = opened_tests(monkeypatch), list[str]()
    monkeypatch.setattr(finish, "blend_candidates", lambda *_: [])  # without a blend
    names = ("popularity", "ease", "item_knn")
    stopped = a_search(data, tmp_path / "out", names, tell=told.append)
    stopped.stop_requested = lambda: sum(each.startswith("final evaluation") for each in told) > after
    with pytest.raises(Interrupted, match="the same command goes on"):
        stopped.run()
    state = json.loads((tmp_path / "out" / STATE).read_text())
    assert len(state["ending"]["places"]) == after == len(opened)
    chosen, spent = state["ending"]["judged"], state["spent"]

    # More minutes would let other candidates train; the choice for which test was opened comes first.
    told.clear()
    found = a_search(data, tmp_path / "out", names, tell=told.append, most_variants=4, minutes=6000.0)
    board = found.run()
    assert f"final evaluation: {after} of 3 candidates are judged" in told[0]
    assert [line["name"] for line in board.lines[:3]] == chosen
    assert opened == [*chosen, chosen[0]], "each once, the winner again for its second training"
    assert board.seconds > spent
    losers = sum(line["seconds"] for line in state["lines"] if line["name"] != chosen[0])
    assert board.share_of_losers == pytest.approx(losers / board.given)
    assert board.given == pytest.approx(6000 * 60)
    assert "standard errors" in board.verdict

    # Once it is done, the same command says the same without opening test.
    again = a_search(data, tmp_path / "out", names).run()
    assert again.lines == board.lines
    assert len(opened) == 4
    assert (tmp_path / "out" / BEST / RECIPE).is_file()


def test_a_second_training_that_was_stopped_goes_on(data: FeatureSpec, tmp_path: Path) -> None:
    events: list[str] = []

    def search() -> AutoSearch:
        found = a_search(data, tmp_path / "out", ("neumf",), train={**FEW, "checkpoint_minutes": 0})
        found.on_event = lambda name, event: events.append(f"{name} {event['event']}")
        return found

    stopped = search()
    stopped.stop_requested = lambda: "neumf, again start" in events
    with pytest.raises(Interrupted, match="the same command goes on"):
        stopped.run()
    assert "neumf, again interrupted" in events
    events.clear()
    board = search().run()
    assert not any(each.startswith("neumf ") for each in events)
    assert board.lines[0]["trained_again_on"] == ["train", "valid"]
    assert RECIPE in [each.name for each in (tmp_path / "out" / BEST).iterdir()]


def test_what_cannot_be_measured_is_told_and_leaves_a_winner(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> Judged:
        raise MemoryError

    monkeypatch.setattr(finish, "judge", failing)
    board = a_search(data, tmp_path / "out", ("popularity", "ease")).run()
    assert "not enough memory" in str(board.lines[0]["problem"])
    assert bundle.find(tmp_path / "out" / BEST).is_dir()


def test_a_model_that_runs_out_of_memory_does_not_end_the_search(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(MODELS["ease"], "_fit", too_large)
    board = a_search(data, tmp_path / "out", ("popularity", "ease")).run()
    assert [line["name"] for line in board.lines] == ["popularity"]
    assert "not enough memory" in board.left_out["ease"]


def test_a_model_that_ends_the_process_is_given_up(data: FeatureSpec, tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def search() -> AutoSearch:
        return a_search(data, tmp_path / "out", ("popularity", "ease"))

    def kill(name: str, _: object) -> None:
        if name == "ease":
            raise Killed

    for _ in range(MOST_ATTEMPTS):
        found = search()
        found.on_event = kill
        with pytest.raises(Killed):
            found.run()
    board = search().run()
    assert [line["name"] for line in board.lines] == ["popularity"]
    assert board.left_out["ease"] == "the process ended 3 times while it trained"


def test_one_folder_holds_one_search(data: FeatureSpec, tmp_path: Path) -> None:
    a_search(data, tmp_path / "out", ("popularity",)).run()
    with pytest.raises(SettingsError, match="holds another search; name another folder") as caught:
        a_search(data, tmp_path / "out", ("popularity",), seed=1, metric="full/hit_rate@10").run()
    assert "seed was 0, and is 1" in str(caught.value)
    assert "metric was 'full/ndcg@10', and is 'full/hit_rate@10'" in str(caught.value)


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("full/foo", "metric 'full/foo': unknown metric 'foo'"),
        ("full/ndgc@10", "did you mean 'ndcg@10'"),
        ("full/ndcg@0", "unknown metric 'ndcg@0'"),
        ("full/auc", "unknown metric 'auc'"),
        ("rows/ndcg@10", "unknown metric"),
        ("fll/ndcg@10", "did you mean 'full'"),
        ("ndcg@10", "a metric is PROTOCOL/NAME"),
        ("", "a metric is PROTOCOL/NAME"),
        ("full/ndcg@" + "9" * 5000, "unknown metric"),
    ],
)
def test_an_unknown_metric_is_refused_before_anything_is_written(
    data: FeatureSpec, tmp_path: Path, metric: str, said: str
) -> None:
    with pytest.raises(SettingsError, match=re.escape(said)):
        a_search(data, tmp_path / "out", ("popularity",), metric=metric).run()
    assert not (tmp_path / "out" / STATE).exists()


@pytest.mark.parametrize("metric", ["full/hit_rate@7", "sampled/mrr", "rows/group_auc", "rows/log_loss"])
def test_known_metrics_pass(metric: str) -> None:
    check_metric(metric)


@pytest.fixture(scope="module")
def searched(data: FeatureSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a search that has ended."""
    folder = tmp_path_factory.mktemp("searched") / "out"
    a_search(data, folder, ("popularity",)).run()
    return folder


def test_repeats_that_leave_few_positives_are_told(tmp_path: Path) -> None:
    # The item before the last, that of valid, is new to five users of forty.
    rows = [f"u{user},i{user % 5 + (turn if user < 5 else turn % 3)},{turn}" for user in range(40) for turn in range(8)]
    (tmp_path / "again.csv").write_text("user_id,item_id,timestamp\n" + "\n".join(rows) + "\n")
    table, context = DATASETS["table"], PrepareContext(tmp_path / "again.csv", tmp_path / "again")
    table.prepare(context, table.Settings(num_negatives=0, repeats="keep"))
    told: list[str] = []
    search = a_search(FeatureSpec.load(tmp_path / "again"), tmp_path / "out", ("popularity",), tell=told.append)
    board = search.run()
    assert any(each.startswith("warning: full ranks only new items") for each in told)
    assert board.to_dict()["warnings"] == list(board.warnings)
    assert "ranks only new items and skipped" in board.warnings[0]


@pytest.mark.parametrize(
    "damage", ["{", '{"lines": 3}', "metric", "name", "model", "long", "twice", "none", "size", "each", "nan"]
)
def test_a_damaged_state_is_told(data: FeatureSpec, searched: Path, tmp_path: Path, damage: str) -> None:
    file = shutil.copytree(searched, tmp_path / "out") / STATE
    state = json.loads(file.read_text())
    if damage == "name":
        state["lines"][0]["name"] = "../../outside"
        damage = json.dumps(state)
    elif damage == "model":
        state["lines"][0]["model"] = "nonesuch"
        damage = json.dumps(state)
    elif damage in ("size", "each", "metric"):
        damage = json.dumps({**state, damage: {"size": -1, "each": {"ease": -1.0}, "metric": "full/foo"}[damage]})
    elif damage in ("long", "twice", "none"):
        state["lines"][0]["values"] = [0.5] * (5000 if damage == "long" else 1)
        state["lines"] = state["lines"] * {"long": 1, "twice": 2, "none": 0}[damage]
        damage = json.dumps(state)
    elif damage == "nan":
        damage = json.dumps({**state, "spent": float("nan")})
    file.write_text(damage)
    with pytest.raises(SettingsError, match="damaged") as caught:
        a_search(data, tmp_path / "out", ("popularity",)).run()
    told = str(caught.value)
    assert (told.count("damaged: "), told.count(STATE)) == (1, 1), told
    assert not (tmp_path / "outside").exists()


def test_models_that_do_not_fit_are_told(data: FeatureSpec, clicks: FeatureSpec, tmp_path: Path) -> None:
    told: list[str] = []
    names = ("popularity", "din", "dien", "logistic_regression")
    board = a_search(data, tmp_path / "out", names, tell=told.append).run()
    assert "history" in board.left_out["din"]
    assert "train holds interactions alone" in board.left_out["logistic_regression"]
    assert not any("left out" in each for each in told), "the end says it, once"
    first, second = by_reason(board.left_out)
    assert first.startswith("logistic_regression: needs labelled rows")
    assert second.startswith("din, dien: needs a feature in the role 'history'")
    assert main_reason("no item; prepare one\nno user") == "no item"
    with pytest.raises(SettingsError, match="did you mean 'neumf'"):
        a_search(data, tmp_path / "other", ("neumv",)).run()
    with pytest.raises(SettingsError, match="no model can train on it"):
        a_search(clicks, tmp_path / "other", ("din",)).run()


@pytest.mark.parametrize(
    ("lead", "blended", "said"),
    [
        ((0.03, 0.01), False, "a leads b by 0.0300 in full/mrr on valid, 3.0 standard errors: the lead is significant"),
        ((0.01, 0.01), False, "a leads b by 0.0100 in full/mrr on valid, 1.0 standard errors: no significant lead;"),
        (
            (-0.03, 0.01),
            False,
            "a was ahead in the search, but now trails b by 0.0300 in full/mrr on valid, 3.0 standard",
        ),
        ((0.0, 0.0), False, "a and b are equal on valid in full/mrr"),
        (None, False, "a leads b on valid; the standard error of the lead is unknown"),
        ((0.03, 0.01), True, "a leads b by 0.0300 in full/mrr on valid; its weights were chosen on users of valid, so"),
        (
            (-0.03, 0.01),
            True,
            "a was ahead in the search, but now trails b by 0.0300 in full/mrr on valid, 3.0 standard",
        ),
        (None, True, "a leads b on valid; the standard error of the lead is unknown"),
    ],
)
def test_verdicts_by_hand(lead: tuple[float, float] | None, blended: bool, said: str) -> None:
    lines = [Line(name=name, model=name, values=[1.0]) for name in "ab"]
    found = _verdict(lines, Ending(judged=["a", "b"], lead=lead), "full/mrr", blended=blended)
    assert found.startswith(said)
    assert ("no evidence" in found) == (blended and lead is not None and lead[0] > 0)


def test_users_to_rank_by_hand() -> None:
    # 1 ms a user: 10 s rank all 800. 100 ms a user: 500 users take 50 s, more than 10 s.
    assert candidates.users_to_rank({"a": 0.001, "b": 0.1}, 800, 10.0) == (800, ["b"])
    assert candidates.users_to_rank({"a": 0.016}, 100_000, 10.0) == (1562, [])
    assert candidates.users_to_rank({}, 100_000, 10.0) == (2000, [])
    assert candidates.users_to_rank({"a": 0.001}, 20, 10.0) == (20, [])


def test_cheap_fits_come_first_and_long_ones_are_left_out(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "seconds_of_an_operation", lambda: 1.0)
    seconds = {"popularity": 200.0, "ease": 250.0, "ials": 100.0}
    for name, each in seconds.items():
        monkeypatch.setattr(MODELS[name], "operations", lambda _, each=each: each)
    state, _ = begin(data, tmp_path, 10.0, None, tuple(seconds), 0, {}, Ranks())
    assert [line.name for line in state.lines] == ["ials", "popularity"]
    assert state.left_out["ease"] == "one fit takes 250 of 600 s; give more --minutes"
    with pytest.raises(SettingsError, match="no model can train in 1 minutes"):
        begin(data, tmp_path, 1.0, None, tuple(seconds), 0, {}, Ranks())


def test_bert4rec_is_tried_only_if_it_is_named(data: FeatureSpec) -> None:
    plans, left_out = candidates.suitable(data, None, {}, Ranks())
    assert "sasrec" in plans
    assert "bert4rec" not in {*plans, *left_out}
    assert list(candidates.suitable(data, ["bert4rec"], {}, Ranks())[0]) == ["bert4rec"]


def test_models_trained_by_steps_begin_with_the_cheapest(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = {"dcnv2": 3e-4, "mult_vae": 2e-4, "neumf": 4e-4, "wide_deep": 1e-4}
    monkeypatch.setattr(candidates, "seconds_each", lambda model, _: each[model.name])
    state, _ = begin(data, tmp_path, 10.0, None, (*each, "popularity"), 0, {}, Ranks())
    assert [line.name for line in state.lines] == ["popularity", "wide_deep", "mult_vae", "dcnv2", "neumf"]


def test_every_candidate_is_on_the_leaderboard_or_left_out_with_a_reason(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(race: Race) -> float:
        return 0.0 if any(line.values for line in race.state.lines) else 60.0

    monkeypatch.setattr(Race, "left_to_train", property(left))
    models = ("popularity", "ease", "neumf", "din")
    board = a_search(data, tmp_path / "out", models).run()
    assert [line["name"] for line in board.lines] == ["popularity"]
    assert {*board.left_out} == {"ease", "neumf", "din"}
    for name in ("ease", "neumf"):
        assert board.left_out[name] == "not begun: no time was left; give more --minutes"

    monkeypatch.setattr(Race, "left_to_train", 0.0)
    with pytest.raises(SettingsError, match=r"no model was trained: popularity: not begun: no time was left; give"):
        a_search(data, tmp_path / "none", ("popularity",)).run()


def test_the_leaderboard_says_how_many_users_each_figure_is_of(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "MOST_USERS", 7)
    told: list[str] = []
    board = a_search(data, tmp_path / "out", ("popularity", "ease"), tell=told.append).run()
    known = {split: len(question_of(data, split, "full/ndcg@10").ranked_users) for split in ("valid", "test")}
    assert known["valid"] > 7
    assert f"all candidates are judged on 7 of the {known['valid']} users of valid" in told
    assert board.users == {
        "valid": (7, known["valid"]),
        "valid_error": (known["valid"], known["valid"]),  # as there was time for all of them
        "test": (known["test"], known["test"]),
    }
    assert board.to_dict()["users"] == {name: {"ranked": some, "of": of} for name, (some, of) in board.users.items()}
    assert a_search(data, tmp_path / "out", ("popularity", "ease")).run().users == board.users

    view = AutoResult(board, Data(data)).view()
    assert (
        f"users ranked: 7 of {known['valid']} for valid, {known['valid']} of {known['valid']} for its standard error "
        f"and the lead, {known['test']} of {known['test']} for test" in "\n".join(view.notes)
    )


def test_every_model_is_ranked_in_full_though_train_would_take_less(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FEW_PAIRS", "MOST_PAIRS", "PAIRS_PER_SAMPLE"):
        monkeypatch.setattr(defaults, name, 0)
    board = a_search(data, tmp_path / "out", ("popularity", "neumf")).run()
    assert {line["name"] for line in board.lines} == {"popularity", "neumf"}


def test_few_items_are_judged_by_a_shorter_list(tmp_path: Path) -> None:
    rows = [f"u{user},i{(user * (turn + 1)) % 7},{turn}" for user in range(60) for turn in range(5)]
    (tmp_path / "few.csv").write_text("\n".join(["user,item,timestamp", *dict.fromkeys(rows)]) + "\n", encoding="utf-8")
    table = DATASETS["table"]
    context = PrepareContext(tmp_path / "few.csv", tmp_path / "few")
    table.prepare(context, table.Settings(repeats="first", num_negatives=0))
    few = FeatureSpec.load(tmp_path / "few")
    board = a_search(few, tmp_path / "out", ("popularity", "ease", "neumf")).run()
    assert len(board.lines) == 3
    assert board.metric in ("full/ndcg@5", "full/ndcg@1")
    assert a_search(few, tmp_path / "out", ("popularity", "ease", "neumf")).run().metric == board.metric


def test_repeats_alone_are_told_at_the_start(tmp_path: Path) -> None:
    rows = [f"u{user},i{item}" for _ in range(4) for user in range(12) for item in range(3)]
    (tmp_path / "again.csv").write_text("user_id,item_id\n" + "\n".join([*rows, "x,i9", "x,i8"]) + "\n")
    table, context = DATASETS["table"], PrepareContext(tmp_path / "again.csv", tmp_path / "again")
    table.prepare(context, table.Settings(num_negatives=0, repeats="keep"))
    with pytest.raises(SettingsError, match=r"full/ndcg@10 judges nothing.*--metric rows/auc"):
        a_search(FeatureSpec.load(tmp_path / "again"), tmp_path / "out", ("ease", "neumf")).run()
    assert not (tmp_path / "out" / "auto.json").exists()


def of_values(metric: str, *values: float) -> Judged:
    protocol, name = metric.split("/")
    each = np.array(values)
    return Judged(metric, Evaluation({protocol: {name: float(each.mean())}}, values={protocol: {name: each}}))


def test_value_and_error_by_hand() -> None:
    judged = of_values("full/ndcg@10", 0.0, 1.0, 0.0, 1.0)
    assert judged.value == 0.5
    assert judged.error == pytest.approx(math.sqrt((4 * 0.25 / 3) / 4))


def test_a_lead_over_the_same_users_is_surer_than_two_errors() -> None:
    ours, theirs = of_values("full/ndcg@10", 0.1, 0.9, 0.5), of_values("full/ndcg@10", 0.0, 0.8, 0.4)
    by, error = ours.lead(theirs)
    assert by == pytest.approx(0.1)
    assert error == pytest.approx(0.0, abs=1e-12)
    assert ours.error > 0.2


def test_less_log_loss_leads() -> None:
    by, error = of_values("rows/log_loss", 0.2, 0.3).lead(of_values("rows/log_loss", 0.4, 0.7))
    assert by == pytest.approx(0.3)
    assert error == pytest.approx(0.1)


def test_errors_that_cannot_be_known_are_nan() -> None:
    assert math.isnan(of_values("full/ndcg@10", 0.5).error)
    assert math.isnan(of_values("full/mrr", 0.5, 0.5).lead(of_values("full/mrr", 0.5, 0.5, 0.5))[1])


@dataclass
class Made:
    """A made-up candidate whose curve is known."""

    name: str
    curve: tuple[float, ...] = ()
    values: list[float] = field(default_factory=list)
    is_over: bool = False

    def train(self) -> None:
        """Take the next slice."""
        self.values.append(max([*self.values[-1:], self.curve[len(self.values)]]))
        self.is_over = len(self.values) == len(self.curve)


def order(*made: Made) -> list[str]:
    """Names in the order of their slices, until all are over."""
    names = []
    while (found := next_of(made)) is not None:
        assert isinstance(found, Made)
        found.train()
        names.append(found.name)
    return names


def test_all_begin_and_the_better_half_goes_on_first() -> None:
    a, b, c, d = (
        Made(name, (best, best + 0.01, best + 0.02)) for name, best in zip("abcd", (0.1, 0.4, 0.3, 0.2), strict=True)
    )
    # b is the better of two, so it goes on at once; of four, b and c do. b ends first, then what waits, best first.
    assert "".join(order(a, b, c, d)) == "abbcdcbcddaa"


def test_by_hand() -> None:
    a, b = Made("a", values=[0.1]), Made("b", values=[0.2])
    assert next_of([a, b]) is b  # the better of two
    b.values.append(0.25)
    b.is_over = True
    assert next_of([a, b]) is a  # what waits goes on when nothing better can
    a.is_over = True
    assert next_of([a, b]) is None


def test_untried_ones_come_before_the_worse_half() -> None:
    worse, better, fresh = Made("worse", values=[0.1]), Made("better", values=[0.2, 0.2], is_over=True), Made("fresh")
    assert next_of([worse, better, fresh]) is fresh


def test_one_that_ended_early_still_counts_among_those_that_had_more_slices() -> None:
    ended = Made("ended", values=[0.9], is_over=True)
    two = [Made("x", values=[0.1, 0.2]), Made("y", values=[0.1, 0.3])]
    # Of three that had two slices or ended, one may go on: the best is over, so nobody is promoted.
    assert next_of([ended, *two]).name == "y"  # type: ignore[union-attr]


def test_nothing_to_train() -> None:
    assert next_of([]) is None


def test_a_slow_starter_is_trained_to_its_end_if_time_allows() -> None:
    slow, fast = Made("slow", (0.0, 0.0, 0.0, 0.9)), Made("fast", (0.5, 0.5, 0.5, 0.5))
    assert order(slow, fast).count("slow") == 4


@pytest.mark.parametrize(("seconds", "candidates", "first"), [(600, 5, 30.0), (10, 100, 2.0), (60, 0, 15.0)])
def test_the_first_slice(seconds: float, candidates: int, first: float) -> None:
    assert first_slice(seconds, candidates) == first


# --- the race ---------------------------------------------------------------------------------------------------------


def a_race(**lines: Line) -> AutoSearch:
    """A search of 1,000 s, of which 800 are for training, with these candidates."""
    found = AutoSearch(None, Path(), minutes=1000 / 60)  # type: ignore[arg-type]
    found.state = State(dataset="", metric="full/ndcg@10", seed=0, lines=list(lines.values()))
    found.race = Race(found.state, found.minutes)
    return found


def a_line(name: str, value: float, **more: object) -> Line:
    return Line(name=name, model="sasrec", values=[value], trained=10.0, **more)  # type: ignore[arg-type]


def test_a_candidate_ends_that_its_hope_and_two_errors_do_not_take_to_the_best() -> None:
    behind, hopeful, unknown = (a_line(name, 0.2) for name in ("behind", "hopeful", "unknown"))
    search = a_race(best=a_line("best", 0.5), behind=behind, hopeful=hopeful, unknown=unknown, alone=a_line("x", 0.1))
    behind.hope, hopeful.hope = 0.19, 0.21
    # They trail by .3 with an error of .05: at least .2 without two errors.
    search.race.judged = {name: of_values("full/ndcg@10", 0.15, 0.25) for name in ("behind", "hopeful", "unknown")}
    search.race.judged["best"] = of_values("full/ndcg@10", 0.5, 0.5)
    search.race.end_hopeless()
    assert [line.ended for line in search.state.lines] == ["", BEHIND, "", "", ""]
    # With time for only a tenth of what its pace needs, so much less may come of it.
    search.state.spent = 798.0
    search.race.end_hopeless()
    assert hopeful.ended == BEHIND
    assert not unknown.ended, "a slow starter"


def test_a_slow_starter_is_not_ended_by_any_leader() -> None:
    # Flat for eight epochs, then it climbs to .5: at each epoch its hope is unknown, or reaches a leader of .4.
    curve = [0.01] * 8 + [0.5 - 0.48 * 0.8**epoch for epoch in range(1, 30)]
    for epochs in range(1, len(curve)):
        trace = {"epoch": list(map(float, range(1, epochs + 1))), "full/ndcg@10": curve[:epochs]}
        result = Result(Path(), epochs, {}, 0.0, 1.0, "minutes", trace, metric="full/ndcg@10")
        hope = hope_of(result, 1.0)
        assert (hope is None) == (epochs < 9)
        assert hope is None or curve[epochs - 1] + hope >= 0.4, epochs


def test_hope_by_hand() -> None:
    trace = {"epoch": [float(epoch) for epoch in range(1, 10)], "rows/log_loss": [9.0, 8, 7, 6, 5, 4, 3.7, 3.9, 3.4]}
    result = Result(Path(), 9, {}, 0.0, 1.0, "minutes", trace, metric="rows/log_loss")
    # From epoch 3 to 9 it fell from 7 to 3.4: .6 an epoch, for 18 more.
    assert hope_of(result, -1.0) == pytest.approx(10.8)
    assert hope_of(Result(Path(), 0, {}, 0.0, 1.0, "minutes", {}, metric="rows/auc"), 1.0) is None


def test_losers_share_a_part_of_the_time_and_the_best_has_the_rest() -> None:
    best, other = a_line("best", 0.5, seconds=100.0), a_line("other", 0.3, seconds=150.0)
    search = a_race(best=best, other=other)
    search.state.spent = 250.0
    assert search.race.room(best) == pytest.approx(550)
    assert search.race.room(other) == pytest.approx(1000 * candidates.LOSERS - 150)
    other.seconds, other.beside = 1000 * candidates.LOSERS - 10, 11.0
    assert not search.race.has_room(other), "what a slice costs beside training is more than the 10 s that are left"
    other.values = [0.6]
    assert search.race.room(other) == pytest.approx(550), "the best one now"


def test_no_variants_of_a_model_that_is_clearly_behind() -> None:
    best, other = a_line("ease", 0.5, ended="fitted"), a_line("sasrec", 0.3, ended="patience")
    search = a_race(best=best, other=other)
    search.race.judged = {"ease": of_values("full/mrr", 0.5, 0.6), "sasrec": of_values("full/mrr", 0.3, 0.4)}
    assert not search._add_variants([other])


def test_a_first_fit_tries_one_combination_and_those_that_may_win_the_others(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[str, tuple[str, ...]]] = []

    def see(name: str, event: Mapping[str, object]) -> None:
        if event["event"] == "tried" and name in found.models and "recency" not in event["settings"]:  # type: ignore[operator]
            tried.append((name, tuple(event["settings"])))  # type: ignore[arg-type]

    found = a_search(data, tmp_path / "out", ("popularity", "ease", "item_knn"), on_event=see)
    monkeypatch.setattr(Race, "is_behind", lambda _, line, __: line.name == "item_knn")
    board = found.run()
    names = [name for name, _ in tried]
    assert names[:3] == ["popularity", "item_knn", "ease"], "each one combination"
    assert set(names[3:]) == {"ease"}
    assert len(names) > 5
    ended = {str(line["name"]): line["ended"] for line in board.lines}
    assert ended == {"popularity": "fitted", "ease": "fitted", "item_knn": BEHIND}


def test_a_fit_that_is_killed_while_it_chooses_starts_again(data: FeatureSpec, tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    seen: list[str] = []

    def kill(name: str, event: Mapping[str, object]) -> None:
        seen.append(name)
        if name == "ease" and event["event"] == "start" and seen.count("popularity") and "ease" in seen[:-1]:
            raise Killed

    search = a_search(data, tmp_path / "out", ("popularity", "ease"), on_event=kill)
    with pytest.raises(Killed):
        search.run()
    assert not (tmp_path / "out" / RUNS / "ease" / "bundle").exists()
    board = a_search(data, tmp_path / "out", ("popularity", "ease")).run()
    assert {str(line["name"]) for line in board.lines} == {"popularity", "ease"}


def test_what_more_minutes_buy_by_hand() -> None:
    best = a_line("best", 0.5, ended="fitted")
    lines = [best, a_line("near", 0.45, hope=0.1), a_line("far", 0.2, hope=0.1), a_line("new", 0.1)]
    state = State(dataset="", metric="full/mrr", seed=0, lines=[*lines, Line(name="late", model="sasrec")])
    assert what_more_buys(state, best) == (
        "more minutes may find a better model: near is 0.05 behind and may gain 0.1; 'new' trained too little to tell; "
        "'late' did not begin"
    )
    best.ended, best.hope = "", 0.012
    state.lines = [best]
    assert what_more_buys(state, best) == "more minutes may find a better model: best may still gain 0.012"
    best.model = "ease"
    assert what_more_buys(state, best) == "more minutes may find a better model: best has settings left to try"
    best.ended = "patience"
    assert what_more_buys(state, best) == (
        "more minutes would hardly find a better model: every candidate has ended, or is too far behind"
    )


def test_a_long_fit_comes_after_the_first_slices_of_others_and_only_with_room() -> None:
    long = Line(name="ease", model="ease", fit=100.0)
    short, steps = Line(name="ials", model="ials", fit=1.0), Line(name="sasrec", model="sasrec")
    search = a_race(long=long, steps=steps, short=short)
    assert search._next() is long, "a third of the losers' 350 s is 117 s"
    long.fit = 140.0
    assert search._next() is short
    short.values, short.ended = [0.1], "fitted"
    assert search._next() is steps
    steps.values = [0.2]
    assert search._next() is long
    long.fit = 401.0
    assert search._next() is steps


def test_variants_draw_some_settings_and_are_the_same_for_a_seed(data: FeatureSpec) -> None:
    own, train_settings = candidates.build_settings("neumf", {}, FEW)
    plan = plan_run("neumf", data, Path(), train_settings, own, Ranks(), resume=False)
    assert isinstance(plan, TrainingPlan)

    def drawn(seed: int) -> list[tuple[dict[str, object], dict[str, object]]]:
        return list(islice(candidates.variants("neumf", plan, FEW, seed), 30))

    sizes = [len(of_model) + len(of_training) - len(FEW) for of_model, of_training in drawn(0)]
    assert min(sizes) >= 1
    assert len(set(sizes)) > 2, "another number of settings each time"
    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)


def test_a_fit_without_time_tries_one_combination_and_what_needs_no_other_fit(
    data: FeatureSpec, tmp_path: Path
) -> None:
    seen: list[Mapping[str, object]] = []
    settings = candidates.build_settings("ease", {}, {"minutes": 1e-6})
    result = candidates.train_candidate("ease", data, tmp_path / "run", settings, on_event=seen.append)
    tried = [each["settings"] for each in seen if each["event"] == "tried"]
    assert result.cut
    assert len({each["l2"] for each in tried}) == 1  # type: ignore[index]
    assert len({each.get("recency") for each in tried}) > 2  # type: ignore[attr-defined]
    assert result.evaluation is not None
    assert result.evaluation.metrics == result.metrics
    assert "evaluation" not in result.to_dict()
    given = candidates.build_settings("ease", {"l2": 10.0, "dropout": 0.0, "recency": 1.0}, {"minutes": 1e-6})
    assert not candidates.train_candidate("ease", data, tmp_path / "given", given).cut


def test_a_model_of_several_labels_is_no_candidate_for_one(clicks: FeatureSpec) -> None:
    plans, left_out = candidates.suitable(clicks, None, {}, Ranks())
    assert left_out["multitask"] == "multitask is for several labels, and the dataset has one"
    assert "multitask" not in plans
    assert "multitask" in candidates.suitable(clicks, ["multitask"], {}, Ranks())[0]
