"""Training of models that are fitted in one go: plan, log, bundle, refusals."""

import json
from pathlib import Path

import pytest

from recspec import config
from recspec.bundle import folder as bundle
from recspec.distributed import Ranks
from recspec.errors import Interrupted, SettingsError, SpecError
from recspec.models import MODELS
from recspec.spec import FeatureSpec
from recspec.training.fit import FitPlan
from recspec.training.loop import plan_run, train
from recspec.training.result import Result
from recspec.training.run_folder import Event
from recspec.training.settings import TrainSettings
from tests import made_up
from tests.model_cases import FITTED, MODEL_CASES


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("fit") / "data", num_users=60, num_rows=1000)


def run(name: str, spec: FeatureSpec, folder: Path, train_settings: dict[str, object] | None = None, **how) -> Result:  # type: ignore[no-untyped-def]
    own = config.build(MODELS[name].Settings, "", how.pop("settings", {}))
    settings = TrainSettings.model_validate({"tensorboard": False, **(train_settings or {})})
    return train(name, spec, folder, settings=settings, model_settings=own, **how)


def plan_of(name: str, spec: FeatureSpec, **settings: object) -> FitPlan:
    own = config.build(MODELS[name].Settings, "", settings)
    plan = plan_run(name, spec, Path("run"), TrainSettings(), own, Ranks(), resume=False)
    assert isinstance(plan, FitPlan)
    return plan


@pytest.mark.parametrize("name", FITTED)
def test_a_fit_leaves_a_bundle_whose_card_says_how_it_was_chosen(name: str, data: FeatureSpec, tmp_path: Path) -> None:
    seen: list[Event] = []
    result = run(name, data, tmp_path / "run", settings=MODEL_CASES[name].tiny, on_event=seen.append)
    loaded = bundle.load(tmp_path / "run")
    card, (first, *tried, last) = loaded.card, seen
    assert (first["event"], first["fitted"], last["event"]) == ("start", True, "done")
    assert {each["event"] for each in tried} == {"tried"}
    assert result.metrics == card.metrics == last["metrics"]
    assert card.trained["tried"] == [{"settings": each["settings"], "value": each["value"]} for each in tried]
    assert card.trained["stopped"] == result.stopped == "fitted"
    assert set(card.train) <= set(MODELS[name].reads)  # type: ignore[attr-defined]
    protocol, _, metric = str(card.trained["valid_metric"]).partition("/")
    assert card.metrics[protocol][metric] == last["best"]
    assert loaded.seen is not None
    assert loaded.model.gives_logits
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == [each["event"] for each in seen]


def test_the_plan_gives_every_choice_and_its_reason(data: FeatureSpec, tmp_path: Path) -> None:
    plan = plan_of("ease", data)
    assert str(plan.chosen) == "l2: not given; the best of a few values on valid is taken"
    assert str(plan.metric) == "full/ndcg@10: all items ranked for each user"
    assert plan.method.reason.startswith("form primal: 61 users, 61 items")
    assert plan.parameters == 61 * 61 + 2
    assert str(plan_of("ease", data, l2=3.0).chosen) == "none: all were given"
    assert str(plan_of("popularity", data).chosen) == "none: popularity has nothing to choose"
    names = ["method", "negatives", "valid", "metric", "chosen", "threads"]
    assert list(json.loads(json.dumps(plan.to_dict()))["choices"]) == names
    assert not list(tmp_path.iterdir())


def test_settings_of_gradient_steps_are_refused(data: FeatureSpec, tmp_path: Path) -> None:
    message = r"train\.epochs, train\.learning_rate are settings of gradient steps, and ease is fitted in one go; leave"
    with pytest.raises(SettingsError, match=message):
        run("ease", data, tmp_path / "run", {"epochs": 3, "learning_rate": 0.1})
    with pytest.raises(SettingsError, match=r"train\.batch_size is a setting of .* leave it out\. It reads"):
        run("ials", data, tmp_path / "run", {"batch_size": 10})
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_not_overwritten_unless_asked(data: FeatureSpec, tmp_path: Path) -> None:
    run("popularity", data, tmp_path / "run")
    with pytest.raises(SettingsError, match="holds a run already"):
        run("popularity", data, tmp_path / "run")
    seen: list[Event] = []
    run("popularity", data, tmp_path / "run", resume=True, on_event=seen.append)
    assert seen[0]["message"] == ("popularity is fitted in one go: there is nothing to continue, so it is fitted again")


def test_a_stopped_fit_leaves_no_bundle(data: FeatureSpec, tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="nothing was written, so start the same command again"):
        run("ease", data, tmp_path / "run", stop_requested=lambda: True)
    assert not (tmp_path / "run" / "bundle").exists()
    run("ease", data, tmp_path / "run")


def test_what_the_dataset_lacks_is_told(data: FeatureSpec, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"train\.train_splits: unknown split 'trian'"):
        run("ease", data, tmp_path / "run", {"train_splits": ["trian"]})
    bare = FeatureSpec.from_dict({"feature_spec": {"x": {"cardinality": 3}, "label": {}},
                                  "channel_spec": {"context": ["x"], "label": ["label"]}})  # fmt: skip
    with pytest.raises(SpecError):
        run("ease", bare, tmp_path / "run")


def test_one_of_several_ranks_fits(data: FeatureSpec, tmp_path: Path) -> None:
    own = MODELS["popularity"].Settings()
    plan = plan_run("popularity", data, tmp_path, TrainSettings(), own, Ranks(0, 2), resume=False)
    assert "popularity is fitted by the first process; the others wait" in plan.notes
