"""The search for settings: what is asked for is understood, trials are judged on valid, and a killed search goes on."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml
from pydantic import BaseModel

pytest.importorskip("optuna", reason="the extra `tune` is not installed")

from recspec.bundle import folder as bundle
from recspec.errors import Interrupted, SettingsError
from recspec.models import MODELS
from recspec.spec import FeatureSpec
from recspec.training.run_folder import Event
from recspec.training.search_space import OneOf, Range, default_space, parse_space
from recspec.training.settings import TrainSettings
from recspec.training.study import Found
from recspec.training.tune import Tuning
from tests import made_up
from tests.model_cases import FITTED, TRAINED_BY_STEPS

SECTIONS: dict[str, type[BaseModel]] = {"settings": MODELS["neumf"].Settings, "train": TrainSettings}
VALUES = MappingProxyType(
    {
        "settings": {"factors": 4, "layers": [8, 4], "dropout": 0.0},
        "train": {"epochs": 3, "batch_size": 2000, "tensorboard": False, "checkpoint_minutes": 0},
    }
)
RATES = MappingProxyType({"train.learning_rate": Range(1e-4, 3e-2, log=True)})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("tune") / "data", num_rows=1200)


def a_search(data: FeatureSpec, out: Path, **changed: object) -> Tuning:
    values: dict[str, object] = {
        "model": "neumf", "spec": data, "out": out, "values": VALUES, "space": RATES, "trials": 3, **changed
    }  # fmt: skip
    return Tuning(**values)  # type: ignore[arg-type]


def test_ranges_and_lists_are_read() -> None:
    entries = {
        "learning_rate": "1e-4..1e-2 log",
        "dropout": "0.0..0.5",
        "settings.factors": "4..16",
        "batch_size": [1, 2],
    }
    assert parse_space(entries, SECTIONS) == {
        "train.learning_rate": Range(1e-4, 1e-2, log=True),
        "settings.dropout": Range(0.0, 0.5),
        "settings.factors": Range(4, 16),
        "train.batch_size": OneOf((1, 2)),
    }


def test_all_that_is_wrong_is_told_at_once() -> None:
    entries = {
        "learning_rat": "1..2",
        "dropout": 0.5,
        "factors": "16..4",
        "epochs": "0..4 log",
        "seed": [1],
        "momentum": "a..b",
        "average": "0.1..0.9 linear",
    }
    with pytest.raises(SettingsError) as caught:
        parse_space(entries, SECTIONS)
    told = str(caught.value)
    assert "unknown setting 'learning_rat' (did you mean 'learning_rate'?)" in told
    assert "'dropout' is 0.5: expected a list of values or a range; write '[16, 32, 64]'" in told
    assert "'factors' is '16..4': the first number is not below the second" in told
    assert "'epochs' is '0..4 log': magnitudes need a lowest number above 0" in told
    assert "'seed' is [1]: expected at least two values" in told
    assert "'momentum' is 'a..b': the ends of the range are no numbers" in told
    assert "'linear' behind the range; expected 'log' or nothing" in told


@pytest.mark.parametrize("name", TRAINED_BY_STEPS)
def test_every_model_has_something_to_search(name: str) -> None:
    search = default_space(name, {"settings": {}, "train": {"learning_rate": 0.02}})
    assert search["train.learning_rate"] == Range(0.002, 0.2, log=True)
    sections: dict[str, type[BaseModel]] = {"settings": MODELS[name].Settings, "train": TrainSettings}
    assert parse_space({each: drawn.written() for each, drawn in search.items()}, sections) == search


@pytest.mark.parametrize("name", FITTED)
def test_fitted_models_search_their_own_settings(name: str) -> None:
    nothing: dict[str, dict[str, object]] = {"settings": {}, "train": {}}
    if not MODELS[name].Settings.model_fields:
        with pytest.raises(SettingsError, match=f"there is nothing to search: {name} has no settings"):
            default_space(name, nothing)
        return
    assert default_space(name, nothing)
    assert all(each.startswith("settings.") for each in default_space(name, nothing))


def test_a_fitted_model_is_searched_like_any_other(data: FeatureSpec, tmp_path: Path) -> None:
    values: dict[str, dict[str, object]] = {"settings": {}, "train": {"tensorboard": False}}
    found = Tuning("ease", data, tmp_path, values, default_space("ease", values), trials=3).run()
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


def test_the_recipe_counts_all_trials_though_the_best_one_came_early(data: FeatureSpec, tmp_path: Path) -> None:
    found = a_search(data, tmp_path, trials=4).run()
    assert found.best is not None
    about = yaml.safe_load((tmp_path / "best.yaml").read_text())["about"]
    assert about["how"] == f"trial {found.best.number}, the best of 4 of `recspec tune`, chosen on valid alone"


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
    assert sorted(path.name for path in (tmp_path / "trials").iterdir()) == ["0000", "0002"]


def test_more_trials_go_on_from_those_there_are(data: FeatureSpec, tmp_path: Path) -> None:
    first = a_search(data, tmp_path, trials=1).run()
    assert a_search(data, tmp_path, trials=1).run() == first
    more = a_search(data, tmp_path, trials=2).run()
    assert more.trials[0] == first.trials[0]
    assert len(more.trials) == 2
    assert more.trials[0].settings != more.trials[1].settings, "a call that goes on draws something else"


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


def test_the_time_ends_the_call_and_not_the_search(data: FeatureSpec, tmp_path: Path) -> None:
    found = a_search(data, tmp_path, trials=2, minutes=0.0).run()
    assert found.left == 2
    assert found.best is None
    assert a_search(data, tmp_path, trials=2).run().left == 0


def test_another_search_in_the_same_folder_is_refused(data: FeatureSpec, tmp_path: Path) -> None:
    a_search(data, tmp_path, trials=1).run()
    with pytest.raises(SettingsError, match="holds another search; name another folder") as caught:
        a_search(data, tmp_path, space={"train.learning_rate": Range(1e-3, 1e-2)}).run()
    assert json.dumps({"train.learning_rate": "0.001..0.01"}) in str(caught.value)


def test_settings_that_fit_no_trial_end_the_search(data: FeatureSpec, tmp_path: Path) -> None:
    space = {"settings.factors": OneOf((-1, -2, -3))}
    with pytest.raises(SettingsError, match=r"[2-5] trials failed and none went well; the last one: .*'factors' is -"):
        a_search(data, tmp_path, space=space, trials=9).run()


def test_poor_trials_are_stopped_early(data: FeatureSpec, tmp_path: Path) -> None:
    values = {**VALUES, "train": {**VALUES["train"], "epochs": 6}}
    rates = {"train.learning_rate": OneOf((0.01, 1e-7))}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = a_search(data, tmp_path, values=values, space=rates, trials=12).run()
    pruned = [trial for trial in found.trials if trial.state == "pruned"]
    assert pruned
    assert {trial.settings["train.learning_rate"] for trial in pruned} == {1e-7}
    assert found.best is not None
    assert found.best.settings["train.learning_rate"] == 0.01
