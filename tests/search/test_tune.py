"""The search for settings: what is asked for is understood, trials are judged on valid, and a killed search goes on."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml

pytest.importorskip("optuna", reason="the extra `tune` is not installed")

from recspec import training
from recspec.base import config
from recspec.base.errors import Interrupted, SettingsError
from recspec.bundle import folder as bundle
from recspec.bundle import run_record
from recspec.evaluation import find_runs
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS
from recspec.training.run_folder import Event
from recspec.training.search import candidates, tune
from recspec.training.search.search_space import OneOf, Range
from recspec.training.search.study import Found
from recspec.training.search.tune import Tuning
from recspec.training.settings import TrainSettings
from tests import made_up
from tests.made_up_training import made_up_training

VALUES = MappingProxyType(
    {
        "settings": {"factors": 4, "layers": [8, 4], "dropout": 0.0},
        "train": {"epochs": 3, "batch_size": 2000, "tensorboard": False, "checkpoint_minutes": 0},
    }
)
RATES = MappingProxyType({"train.learning_rate": Range(1e-4, 3e-2, log=True)})


def a_search(data: FeatureSpec, out: Path, **changed: object) -> Tuning:
    values: dict[str, object] = {
        "model": "neumf",
        "spec": data,
        "out": out,
        "values": VALUES,
        "asked": RATES,
        "only": True,
        "trials": 3,
        **changed,
    }
    return Tuning(**values)  # type: ignore[arg-type]


def test_a_fitted_model_is_searched_like_any_other(data: FeatureSpec, tmp_path: Path) -> None:
    values: dict[str, dict[str, object]] = {"settings": {}, "train": {"tensorboard": False}}
    found = Tuning("ease", data, tmp_path, values, {}, trials=3).run()
    assert [trial.state for trial in found.trials] == ["complete"] * 3
    assert found.metric == "full/ndcg@10"
    assert found.best is not None
    assert bundle.load(tmp_path / "best").card.settings["l2"] == found.best.settings["settings.l2"]


def test_the_best_trial_leaves_its_recipe_and_its_bundle(data: FeatureSpec, tmp_path: Path) -> None:
    seen: list[tuple[int, Event]] = []
    found = a_search(data, tmp_path, on_event=lambda trial, event: seen.append((trial, event))).run()
    assert [trial.state for trial in found.trials] == ["complete"] * 3
    assert found.left == 0
    assert found.best is not None
    assert found.best.value == max(trial.value for trial in found.trials if trial.value is not None)
    recipe = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert recipe["model"] == "neumf"
    assert recipe["train"]["learning_rate"] == found.best.settings["train.learning_rate"]
    assert recipe["settings"]["factors"] == 4
    card = bundle.load(tmp_path / "best").card
    assert card.train["learning_rate"] == recipe["train"]["learning_rate"]
    protocol, _, metric = found.metric.partition("/")
    assert card.metrics[protocol][metric] == found.best.value
    assert {trial for trial, event in seen if event["event"] == "epoch"} == {0, 1, 2}
    assert not list((tmp_path / "trials").glob("*/checkpoints"))
    assert not list((tmp_path / "trials").glob("*/bundle"))
    record = run_record.read(tmp_path / "best")
    assert record is not None
    assert (record.kind, record.model) == ("tuned", "neumf")
    assert [each.path for each in find_runs(tmp_path).runs] == [str(tmp_path / "best")], "trials are no runs"


def test_several_workers_share_the_trials_of_a_folder(data: FeatureSpec, tmp_path: Path) -> None:
    """A second worker begins while the first one's trial is under way: neither makes the other's trial."""
    others: list[Found] = []

    def begin_another(trial: int, event: Event) -> None:
        if trial == 0 and event["event"] == "start" and not others:
            others.append(a_search(data, tmp_path, trials=3).run())

    found = a_search(data, tmp_path, trials=3, on_event=begin_another).run()
    (other,) = others
    assert [trial.state for trial in other.trials] == ["running", "complete", "complete"], "the first one's goes on"
    assert [trial.state for trial in found.trials] == ["complete"] * 3
    assert len({trial.settings["train.learning_rate"] for trial in found.trials}) == 3, "no two workers draw the same"
    assert found.best is not None
    assert bundle.load(tmp_path / "best").card.train["learning_rate"] == found.best.settings["train.learning_rate"]
    assert not list((tmp_path / "trials").glob("*/bundle"))
    assert not list((tmp_path / "trials").glob(".*.lock"))


def test_a_trial_whose_worker_is_gone_is_made_again(data: FeatureSpec, tmp_path: Path) -> None:
    class Killed(BaseException):
        """As `kill -9`: nothing is told."""

    def die(_: int, event: Event) -> None:
        if event["event"] == "epoch":
            raise Killed

    with pytest.raises(Killed):
        a_search(data, tmp_path, trials=2, on_event=die).run()
    found = a_search(data, tmp_path, trials=2).run()
    assert [trial.state for trial in found.trials] == ["complete"] * 2
    assert sorted(path.name for path in (tmp_path / "trials").iterdir()) == ["0000", "0001"]


def test_a_kill_between_a_trial_s_record_and_its_bundle_loses_no_bundle(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The study knows the best trial, so the next call keeps its bundle, even with no trial left to run."""

    class Killed(BaseException):
        """As `kill -9`: nothing is told."""

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(tune, "put_in_place", die)
        with pytest.raises(Killed):
            a_search(data, tmp_path, trials=1).run()
    assert not (tmp_path / "best").exists()
    found = a_search(data, tmp_path, trials=1).run()
    assert found.best is not None
    assert bundle.load(tmp_path / "best").card.train["learning_rate"] == found.best.settings["train.learning_rate"]
    assert (tmp_path / "best.yaml").is_file()
    assert [each.path for each in find_runs(tmp_path).runs] == [str(tmp_path / "best")], "trials are no runs"


def test_a_trial_that_was_cut_off_goes_on_where_it_stopped(data: FeatureSpec, tmp_path: Path) -> None:
    whole = a_search(data, tmp_path / "whole", trials=1).run()
    steps: list[Event] = []

    def note(_: int, event: Event) -> None:
        if event["event"] == "epoch":
            steps.append(event)

    with pytest.raises(Interrupted, match="stopped after 0 of 1 trials; the same command goes on"):
        a_search(data, tmp_path / "cut", trials=1, on_event=note, stop_requested=lambda: len(steps) == 1).run()
    resumed: list[Event] = []
    found = a_search(data, tmp_path / "cut", trials=1, on_event=lambda _, event: resumed.append(event)).run()
    assert resumed[0]["resumed_at_step"] > 0  # type: ignore[operator]
    assert whole.best is not None
    assert found.best is not None
    assert found.best.settings == whole.best.settings
    assert found.best.value == whole.best.value
    assert len(found.trials) == 1


# --- with made-up traces ---------------------------------------------------------------------------------------------


def test_losers_are_stopped_and_a_slow_starter_wins(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = {
        0.001: [0.7] * 31,
        0.002: [0.71] * 31,
        0.003: [0.5] * 6 + [0.55, 0.65, 0.7] + [0.8] * 22,
        1e-7: [0.5] * 31,
    }
    monkeypatch.setattr(candidates, "train", made_up_training(lambda rate: curves[rate]))
    found = a_search(data, tmp_path, asked={"train.learning_rate": OneOf(tuple(curves))}, trials=20).run()
    states = {rate: {t.state for t in found.trials if t.settings["train.learning_rate"] == rate} for rate in curves}
    assert states[0.003] == {"complete"}
    assert "pruned" in states[1e-7]
    assert found.best is not None
    assert (found.best.settings["train.learning_rate"], found.best.value) == (0.003, 0.8)
    assert (tmp_path / "best" / "rate").read_text() == "0.003"
    counted = found.counted
    assert found.counts == f"20 trials: {counted['complete']} complete, {counted['pruned']} pruned"
    assert found.counts in yaml.safe_load((tmp_path / "best.yaml").read_text())["about"]["how"], (
        "as they are at the end"
    )
    assert next(iter(found.importances.settings)) == "train.learning_rate"
    assert found.importances.judged == 20


def test_a_model_that_chooses_its_settings_is_shown_with_them(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a fitted model, which compares a grid on valid where its settings are not given."""
    given: list[set[str]] = []

    def fitted(*_: object, model_settings: config.Settings, on_event: Callable[[Event], None], **__: object) -> None:
        given.append(set(model_settings.model_fields_set))
        settings = model_settings.model_dump(mode="json")
        if "factors" not in model_settings.model_fields_set:
            settings["factors"] = 12
        on_event({"event": "done", "metric": "full/ndcg@10", "best": 0.5, "settings": settings})

    monkeypatch.setattr(candidates, "train", fitted)
    values = {"settings": {"dropout": 0.0}, "train": {}}
    found = a_search(data, tmp_path, values=values, asked={"settings.factors": Range(4, 256)}, trials=2).run()
    assert given == [{"dropout"}, set(MODELS["neumf"].Settings.model_fields)]
    assert found.counts == "2 trials: 2 complete"
    assert found.defaults is not None
    assert found.best == found.defaults
    assert found.best.settings["settings.factors"] == 12
    assert found.best.settings["settings.dropout"] == 0.0, "all of its settings, so that the recipe gives the same"
    assert config.load_recipe(tmp_path / "best.yaml").settings["factors"] == 12
    assert a_search(data, tmp_path, values=values, asked={"settings.factors": Range(4, 256)}, trials=2).run() == found


def test_a_metric_that_is_no_number_fails_the_trial(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "train", made_up_training(lambda rate: [0.5] if rate == 0.001 else [math.nan]))
    rates = {"train.learning_rate": OneOf((0.001, 0.002))}
    found = a_search(data, tmp_path, asked=rates, trials=12).run()
    failed = [trial for trial in found.trials if trial.state == "failed"]
    assert failed
    assert all(trial.reason.endswith("the metric on valid is no number") for trial in failed)
    assert found.counts == f"12 trials: {12 - len(failed)} complete, {len(failed)} failed"
    assert found.left == 0
    assert found.best is not None
    assert found.best.value == 0.5


def test_a_lower_metric_is_better_where_it_is(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "train", made_up_training(lambda rate: [rate], "rows/log_loss"))
    found = a_search(data, tmp_path, trials=8).run()
    assert found.best is not None
    assert found.best.value == min(trial.value for trial in found.trials if trial.value is not None)


def test_more_trials_go_on_from_those_there_are(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "train", made_up_training(lambda rate: [rate]))
    first = a_search(data, tmp_path, trials=1).run()
    assert a_search(data, tmp_path, trials=1).run() == first
    more = a_search(data, tmp_path, trials=2).run()
    assert more.trials[0] == first.trials[0]
    assert len(more.trials) == 2
    assert more.trials[0].settings != more.trials[1].settings, "a call that goes on draws something else"


def test_a_worker_leaves_the_end_of_the_search_to_the_first_process(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise MLflow would register the best model once for each."""
    tracked: list[object] = []
    monkeypatch.setattr(training.TrackedSearch, "finish", lambda *_, done, **__: tracked.append(done))
    monkeypatch.setattr(candidates, "train", made_up_training(lambda rate: [rate]))
    tune.work(a_search(data, tmp_path, trials=1), lambda: False)
    assert not tracked
    a_search(data, tmp_path, trials=1).run()
    assert len(tracked) == 1


def test_the_time_ends_the_call_and_not_the_search(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "train", made_up_training(lambda rate: [rate]))
    found = a_search(data, tmp_path, trials=2, minutes=0.0).run()
    assert found.left == 2
    assert found.best is None
    assert a_search(data, tmp_path, trials=2).run().left == 0


def test_another_search_in_the_same_folder_is_refused(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "train", made_up_training(lambda rate: [rate]))
    a_search(data, tmp_path, trials=1).run()
    with pytest.raises(SettingsError, match="holds another search; name another folder") as caught:
        a_search(data, tmp_path, asked={"train.learning_rate": Range(1e-3, 1e-2)}).run()
    assert json.dumps({"train.learning_rate": "0.001..0.01"}) in str(caught.value)


def test_settings_that_fit_no_trial_end_the_search(data: FeatureSpec, tmp_path: Path) -> None:
    space = {"settings.factors": OneOf((-1, -2, -3))}
    with pytest.raises(SettingsError, match=r"[2-5] trials failed and none went well; the last one: .*'factors' is -"):
        a_search(data, tmp_path, asked=space, trials=9).run()


# --- starts ----------------------------------------------------------------------------------------------------------


def test_the_first_trial_is_the_defaults(data: FeatureSpec, tmp_path: Path) -> None:
    """With nothing else to tell them apart, it reaches the value of plain training."""
    values = {"settings": VALUES["settings"], "train": {"epochs": 2}}
    found = a_search(data, tmp_path / "search", values=values, only=False, asked={}, trials=1).run()
    (first,) = found.trials
    assert found.defaults == found.best == first
    assert first.start == "defaults"
    assert first.settings["settings.factors"] == 4, "the given value"
    own, train = MODELS["neumf"].Settings(**values["settings"]), TrainSettings(epochs=2)  # type: ignore[arg-type]
    plain = training.train("neumf", data, tmp_path / "plain", settings=train, model_settings=own)
    protocol, _, metric = found.metric.partition("/")
    assert first.value == plain.metrics[protocol][metric]


def test_the_recipe_holds_what_was_chosen_and_trains_to_the_same_result(data: FeatureSpec, tmp_path: Path) -> None:
    values = {"settings": VALUES["settings"], "train": {"epochs": 2}}
    asked = {"train.learning_rate": Range(0.01, 0.02), "train.negatives": Range(2, 3)}
    found = a_search(data, tmp_path / "search", values=values, asked=asked, trials=2).run()
    recipe = config.load_recipe(tmp_path / "search" / "best.yaml")
    assert recipe.settings.items() >= values["settings"].items()
    assert {"epochs", "learning_rate", "negatives"} <= set(recipe.train)
    assert set(recipe.train) <= {"epochs", "learning_rate", "negatives", "batch_size", "metric"}, "no plain defaults"
    own = config.build(MODELS["neumf"].Settings, "recipe", recipe.settings)
    train = config.build(TrainSettings, "recipe", recipe.train)
    again = training.train("neumf", data, tmp_path / "again", settings=train, model_settings=own)
    protocol, _, metric = found.metric.partition("/")
    assert found.best is not None
    assert again.metrics[protocol][metric] == found.best.value


def test_the_recipe_names_the_metric_that_valid_could_give(tmp_path: Path) -> None:
    data = made_up.interactions(tmp_path / "data", num_users=60, num_items=8, num_rows=300)
    values = {"settings": VALUES["settings"], "train": {"epochs": 1}}
    found = a_search(data, tmp_path / "search", values=values, trials=1).run()
    assert config.load_recipe(tmp_path / "search" / "best.yaml").train["metric"] == found.metric == "full/ndcg@5"


def test_what_worked_elsewhere_is_tried_after_the_defaults(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "train", made_up_training(lambda rate: [1 - abs(rate - 0.01)]))
    space = {
        "train.learning_rate": Range(1e-4, 0.1, log=True),
        "settings.factors": OneOf((4, 8)),
        "train.average": Range(0.1, 0.9),
    }
    earlier = a_search(data, tmp_path / "earlier", asked=space, trials=10).run()
    best = sorted(earlier.trials, key=lambda trial: -(trial.value or 0))[:3]
    before = contents(tmp_path / "earlier")
    space = {
        "train.learning_rate": Range(1e-4, 0.1, log=True),
        "settings.factors": OneOf((4, 16)),
        "settings.dropout": Range(0.0, 0.5),
    }
    found = a_search(data, tmp_path / "new", asked=space, trials=5, like=[tmp_path / "earlier"]).run()
    assert contents(tmp_path / "earlier") == before, "nothing is written there"
    first, *others, drawn = found.trials
    assert (first.start, drawn.start) == ("defaults", "")
    for trial, source in zip(others, best, strict=True):
        assert trial.start == f"trial {source.number} of {tmp_path / 'earlier'}"
        assert trial.settings["train.learning_rate"] == source.settings["train.learning_rate"]
        assert trial.settings["settings.dropout"] == 0.0, "the default of what it did not search"
        assert trial.settings["settings.factors"] == 4, "8 is no value of this search"


def test_a_folder_without_a_search_of_this_model_is_refused(data: FeatureSpec, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "study.db").write_text("no study" * 1000)
    (tmp_path / "alien").mkdir()
    sqlite3.connect(tmp_path / "alien" / "study.db").execute("create table a (b)").connection.close()
    a_search(data, tmp_path / "none", minutes=0.0).run()
    folders = [tmp_path / name for name in ("empty", "damaged", "alien", "none", "missing")]
    before = contents(tmp_path / "alien")
    with pytest.raises(SettingsError) as caught:
        a_search(data, tmp_path / "new", like=folders).run()
    told = str(caught.value)
    assert f"{folders[0]}: holds no search; expected the folder of an earlier `recspec tune neumf`" in told
    assert f"{folders[1] / 'study.db'}: can't be read: file is not a database" in told
    assert f"{folders[2] / 'study.db'}: can't be read" in told
    assert f"{folders[3]}: no trial of this search is complete" in told
    assert f"{folders[4]}: holds no search" in told
    assert contents(tmp_path / "alien") == before
    assert not (tmp_path / "new").exists()


def test_a_search_of_another_model_is_no_start(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "train", made_up_training(lambda rate: [rate]))
    a_search(data, tmp_path / "deep", model="wide_deep", values={"settings": {}, "train": {}}, trials=1).run()
    with pytest.raises(SettingsError, match="is a search of 'wide_deep', not of 'neumf'"):
        a_search(data, tmp_path / "new", like=[tmp_path / "deep"]).run()


def test_data_without_a_valid_split_is_refused_before_the_first_trial(data: FeatureSpec, tmp_path: Path) -> None:
    values = {"settings": {}, "train": {"train_splits": ["train", "valid"]}}
    with pytest.raises(SettingsError, match=r"there is no valid split to judge trials on; set train.valid_share=0.1"):
        a_search(data, tmp_path / "new", values=values).run()
    assert not (tmp_path / "new").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
