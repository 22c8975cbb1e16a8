"""Training of models that are fitted in one go: plan, log, bundle, refusals."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from recspec.api.verb_checks import settings_of
from recspec.base import config
from recspec.base.errors import BundleError, DataError, Interrupted, SettingsError, SpecError
from recspec.bundle import Bundle, checkpoint
from recspec.bundle import folder as bundle
from recspec.evaluation import EvaluateSettings, EvaluationTask, score_rows
from recspec.evaluation.saved import FOLDER
from recspec.feature_spec import FeatureSpec
from recspec.loading import Ranks
from recspec.metrics import fit
from recspec.models import MODELS
from recspec.report import REPORT_FILE
from recspec.training import run_folder
from recspec.training.loop import plan_run, train
from recspec.training.plan import FitPlan
from recspec.training.result import Result
from recspec.training.run_folder import Event
from recspec.training.settings import TrainSettings
from tests import made_up
from tests.evaluation.tables import dataset
from tests.model_cases import FITTED, MODEL_CASES, OF_LABELLED_ROWS


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("fit") / "data", num_users=60, num_rows=1000)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.clicks(tmp_path_factory.mktemp("fit") / "clicks", num_rows=2000)


def run(name: str, spec: FeatureSpec, folder: Path, train_settings: dict[str, object] | None = None, **how) -> Result:  # type: ignore[no-untyped-def]
    own = config.build(MODELS[name].Settings, "", how.pop("settings", {}))
    settings = TrainSettings.model_validate({"tensorboard": False, **(train_settings or {})})
    return train(name, spec, folder, settings=settings, model_settings=own, **how)


@pytest.fixture(scope="module")
def ease(data: FeatureSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ease") / "run"
    run("ease", data, folder, settings={"l2": 5.0})
    return folder


def plan_of(name: str, spec: FeatureSpec, **settings: object) -> FitPlan:
    own = config.build(MODELS[name].Settings, "", settings)
    plan = plan_run(name, spec, Path("run"), TrainSettings(), own, Ranks(), resume=False)
    assert isinstance(plan, FitPlan)
    return plan


@pytest.mark.parametrize("name", FITTED)
def test_a_fit_leaves_a_bundle_whose_card_says_how_it_was_chosen(
    name: str, data: FeatureSpec, clicks: FeatureSpec, tmp_path: Path
) -> None:
    data = clicks if name in OF_LABELLED_ROWS else data
    seen: list[Event] = []
    result = run(name, data, tmp_path / "run", settings=MODEL_CASES[name].tiny, on_event=seen.append)
    loaded = bundle.load(tmp_path / "run")
    card, (first, *tried, last) = loaded.card, seen
    assert (first["event"], first["fitted"], last["event"]) == ("start", True, "done")
    tried = [each for each in tried if each["event"] != "warning"]
    assert {each["event"] for each in tried} == {"tried"}
    assert result.metrics == card.metrics == last["metrics"]
    names = {"settings": "settings", "value": "value", "taken": "best"}
    assert card.trained["tried"] == [{name: each[of] for name, of in names.items()} for each in tried]
    assert tried == [] or [each for each in tried if each["best"]][-1]["settings"].items() <= card.settings.items()  # type: ignore[attr-defined]
    assert card.trained["stopped"] == result.stopped == "fitted"
    assert 0 <= float(str(card.trained["seconds_of_best"])) <= float(str(card.trained["seconds"]))
    assert set(card.train) <= set(MODELS[name].reads)  # type: ignore[attr-defined]
    protocol, _, metric = str(card.trained["valid_metric"]).partition("/")
    assert card.metrics[protocol][metric] == last["best"]
    assert loaded.seen is not None
    assert loaded.model.gives_logits
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == [each["event"] for each in seen]


def test_the_plan_gives_every_choice_and_its_reason(data: FeatureSpec, tmp_path: Path) -> None:
    plan = plan_of("ease", data)
    assert str(plan.chosen) == "l2, dropout, recency: not given; the best of a few values on valid is taken"
    assert str(plan.metric) == "full/ndcg@10: all items ranked for each user"
    assert plan.method.reason.startswith("form primal: it inverts 61 x 61 items")
    assert plan.parameters == 61 * 61 + 2
    assert str(plan_of("ease", data, l2=3.0, dropout=0.0, recency=1.0).chosen) == "none: all were given"
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
    assert [each["event"] for each in seen[:2]] == ["start", "note"]
    assert seen[1]["message"] == ("popularity is fitted in one go: there is nothing to continue, so it is fitted again")


def test_force_replaces_a_run_and_nothing_else(data: FeatureSpec, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run("popularity", data, folder)
    (folder / "evaluations").mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(SettingsError, match=r"leave it out"):  # a run that can't begin removes nothing
        run("ials", data, folder, {"batch_size": 10}, force=True)
    assert (folder / "bundle").is_dir()
    run("ease", data, folder, force=True)
    assert bundle.load(folder).card.model == "ease"
    assert not (folder / "evaluations").exists()
    assert (folder / "notes.txt").read_text() == "mine"
    with pytest.raises(SettingsError, match="resume continues the run of the folder and force replaces it"):
        run("ease", data, folder, resume=True, force=True)
    with pytest.raises(SettingsError, match="is a bundle, whose files must stay"):
        run("ease", data, folder / "bundle", force=True)
    other = tmp_path / "other"
    (other / "bundle").mkdir(parents=True)
    with pytest.raises(SettingsError, match=r"this is none: it holds .bundle. without "):
        run("ease", data, other, force=True)
    assert (other / "bundle").is_dir()


def test_what_later_commands_keep_has_the_names_that_they_give_it() -> None:
    assert run_folder.KEPT == (FOLDER, REPORT_FILE)


def test_a_stopped_fit_leaves_no_bundle(data: FeatureSpec, tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="nothing was written, so start the same command again"):
        run("ease", data, tmp_path / "run", stop_requested=lambda: True)
    assert not (tmp_path / "run" / "bundle").exists()
    run("ease", data, tmp_path / "run")


def test_what_the_dataset_lacks_is_told(data: FeatureSpec, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"train\.train_splits: unknown split 'trian'"):
        run("ease", data, tmp_path / "run", {"train_splits": ["trian"]})
    bare = FeatureSpec.from_dict(
        {"feature_spec": {"x": {"cardinality": 3}, "label": {}}, "channel_spec": {"context": ["x"], "label": ["label"]}}
    )
    with pytest.raises(SpecError):
        run("ease", bare, tmp_path / "run")


def test_logistic_regression_takes_the_strength_that_suits_valid(clicks: FeatureSpec, tmp_path: Path) -> None:
    seen: list[Event] = []
    run("logistic_regression", clicks, tmp_path / "run", on_event=seen.append)
    tried = [(each["settings"], each["value"], each["best"]) for each in seen if each["event"] == "tried"]
    strengths = [settings["l2"] for settings, _, _ in tried]  # type: ignore[index]
    assert strengths[:3] == [3.0, 10.0, 1.0]
    best = [each for each in tried if each[2]][-1]
    card = bundle.load(tmp_path / "run").card
    assert card.settings == best[0]
    assert card.metrics["rows"]["log_loss"] == best[1]
    assert str(plan_of("logistic_regression", clicks).metric) == "rows/log_loss: rows have labels of their own"


def test_a_fit_whose_settings_leave_nothing_tells_so(data: FeatureSpec, tmp_path: Path) -> None:
    seen: list[Event] = []
    run("ials", data, tmp_path / "run", settings={"l2": 1e5, "factors": 4}, on_event=seen.append)
    (note,) = (str(each["message"]) for each in seen if each["event"] == "note")
    assert note.startswith("l2 100000 is too strong on these interactions")


def test_logistic_regression_without_valid_holds_out_a_tenth_of_train(clicks: FeatureSpec, tmp_path: Path) -> None:
    alone = clicks.replace(sources={"train": clicks.sources["train"]})
    run("logistic_regression", alone, tmp_path / "run")
    card = bundle.load(tmp_path / "run").card
    assert 0.1 < float(str(card.settings["l2"])) < 1000
    assert card.metrics == {}


def test_logistic_regression_of_interactions_says_what_is_missing(data: FeatureSpec, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="labelled rows of both classes are needed"):
        run("logistic_regression", data, tmp_path / "run")


def test_one_of_several_ranks_fits(data: FeatureSpec, tmp_path: Path) -> None:
    own = MODELS["popularity"].Settings()
    plan = plan_run("popularity", data, tmp_path, TrainSettings(), own, Ranks(0, 2), resume=False)
    assert "popularity is fitted by the first process; the others wait" in plan.notes


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("known.items", lambda each: each + 1000, r"weight 'known': 'items' holds ids from \d+ to \d+; expected 0 to"),
        ("known.items", lambda each: each[:-1], r"weight 'known': 'offsets' does not rise from 0 to"),
        (
            "known.items",
            lambda each: each.float(),
            r"weight 'known.items' is torch.float32; the model expects torch.int32",
        ),
        ("known.offsets", lambda each: each[:-1], r"weight 'known.offsets' has shape"),
        ("weights.weight", lambda each: each[:-1], r"weight 'weights.weight' has shape"),
        ("weights.weight", lambda each: each * float("nan"), r"weight 'weights.weight' holds .* not finite"),
    ],
)
def test_a_bundle_with_wrong_weights_is_refused(
    name: str, change: Callable[[Tensor], Tensor], problem: str, ease: Path, tmp_path: Path
) -> None:
    shutil.copytree(ease, tmp_path / "run")
    file = tmp_path / "run" / "bundle" / "weights.safetensors"
    weights, _ = checkpoint.read_tensors(file)
    weights[name] = change(weights[name])
    checkpoint.write_tensors(file, weights, {"format": 1})
    with pytest.raises(BundleError, match=problem):
        bundle.load(tmp_path / "run", verify=False)


def test_a_bundle_whose_settings_ask_for_other_shapes_is_refused(ease: Path, tmp_path: Path) -> None:
    shutil.copytree(ease, tmp_path / "run")
    file = tmp_path / "run" / "bundle" / "bundle.json"
    for form, problem in (("sparse", "weight 'weights.items' is missing"), ("dual", "'weights.leverage' is missing")):
        card = json.loads(file.read_text())
        file.write_text(json.dumps({**card, "settings": {**card["settings"], "form": form}}))
        with pytest.raises(BundleError, match=problem):
            bundle.load(tmp_path / "run", verify=False)


def repeated(folder: Path, valid: list[tuple[int, int, int]]) -> FeatureSpec:
    """Twelve users with two items each, and a valid split."""
    folder.mkdir()
    return dataset(
        folder, {"train": [(u, u % 6 + n, 1) for u in range(12) for n in (0, 1)], "valid": valid}, users=12, items=8
    )


def test_a_fit_warns_of_a_valid_split_of_repeats(tmp_path: Path) -> None:
    spec = repeated(tmp_path / "data", [(u, u % 6 + (0 if u < 8 else 2), 1) for u in range(12)])
    result = run("item_knn", spec, tmp_path / "run")
    (warning,) = result.warnings
    assert warning.message.startswith("full ranks only new items and skipped 8 of 12 positives of valid")
    assert [each["kind"] for each in bundle.load(tmp_path / "run").card.warnings] == ["mostly_repeats"]


def test_a_fit_without_a_new_item_on_valid_tells_that_nothing_was_chosen(tmp_path: Path) -> None:
    spec = repeated(tmp_path / "data", [(u, u % 6, 1) for u in range(12)])
    seen: list[Event] = []
    run("item_knn", spec, tmp_path / "run", on_event=seen.append)
    (note,) = (str(each["message"]) for each in seen if each["event"] == "note")
    assert note.startswith("valid has no positive of an item that is new to its user")


# --- models of labelled rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_LABELLED_ROWS)
@pytest.mark.parametrize("splits", [("train",), ("train", "valid")])
def test_a_model_of_rows_is_calibrated_on_valid_before_all_rows_are_fitted(
    name: str, splits: tuple[str, ...], clicks: FeatureSpec, tmp_path: Path
) -> None:
    """The weights are those of a run without calibration, and the map that of the model which valid judged."""
    seen: list[Event] = []
    own = {"lightgbm": MODEL_CASES["lightgbm"].tiny, "logistic_regression": {"l2": 0.01}}[name]
    asked = {"train_splits": splits, "calibration": "temperature"}
    result = run(name, clicks, tmp_path / "run", asked, settings=own, on_event=seen.append)
    run(name, clicks, tmp_path / "alone", settings=own)
    trained, alone = (bundle.load(tmp_path / each) for each in ("run", "alone"))
    logits = score_rows(alone.model, clicks, "valid")
    labels = EvaluationTask(clicks, "valid", ("rows",), EvaluateSettings()).rows.labels
    assert trained.card.calibration == result.calibration == fit(logits, labels, "temperature")
    metrics = result.metrics["rows"]
    assert metrics["log_loss"] < metrics["log_loss_uncalibrated"]
    assert metrics["log_loss_uncalibrated"] == pytest.approx(alone.card.metrics["rows"]["log_loss"])
    assert result.value == metrics["log_loss"]
    (note,) = (str(each["message"]) for each in seen if each["event"] == "note")
    assert note.startswith("calibrated on valid by temperature: log loss ")
    assert seen[-1]["calibration"] == "temperature"
    assert trained.card.train["calibration"] == "temperature"


def test_a_model_of_rows_without_rows_to_calibrate_on_is_refused(clicks: FeatureSpec, tmp_path: Path) -> None:
    bare = clicks.replace(sources={"train": clicks.sources["train"]})
    with pytest.raises(
        SettingsError, match=r"train.calibration is isotonic, and there are no rows to fit it on: no split"
    ):
        run("logistic_regression", bare, tmp_path / "run", {"calibration": "isotonic"})


@pytest.mark.parametrize(
    ("name", "size"), [("lightgbm", r"\d+ trees, [\d,]+ leaves"), ("logistic_regression", r"[\d,]+ weights")]
)
def test_a_model_of_rows_says_its_size_and_which_columns_matter(
    name: str, size: str, clicks: FeatureSpec, tmp_path: Path
) -> None:
    result = run(name, clicks, tmp_path / "run", settings=MODEL_CASES[name].tiny)
    trained = bundle.load(tmp_path / "run").card.trained
    assert re.fullmatch(size, result.size)
    assert (trained["size"], trained["importance"]) == (result.size, result.importance)
    assert set(result.importance) == set(clicks.inputs())
    shares = list(result.importance.values())
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1)
    assert plan_of(name, clicks).parameters is None


# --- recipes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lightgbm", "logistic_regression", "ials"])
def test_the_recipe_of_a_fit_gives_the_same_run(
    name: str, data: FeatureSpec, clicks: FeatureSpec, tmp_path: Path
) -> None:
    """Its chosen settings are in it, so nothing is chosen again."""
    data = clicks if name in OF_LABELLED_ROWS else data
    own = {**MODEL_CASES[name].tiny}
    own.pop("l2", None)
    run(name, data, tmp_path / "run", {"seed": 3}, settings=own)
    model, train_settings = settings_of(name, tmp_path / "run" / run_folder.RECIPE, {})
    seen: list[Event] = []
    train(name, data, tmp_path / "again", settings=train_settings, model_settings=model, on_event=seen.append)
    first, second = (bundle.load(tmp_path / each) for each in ("run", "again"))
    assert weights_of(first) == weights_of(second)
    assert first.card.metrics == second.card.metrics
    assert (first.card.settings, first.card.train) == (second.card.settings, second.card.train)
    assert len([each for each in seen if each["event"] == "tried"]) == 1
    recipes = [(tmp_path / each / run_folder.RECIPE).read_text() for each in ("run", "again")]
    assert recipes[0] == recipes[1]


def weights_of(trained: Bundle) -> dict[str, list[object]]:
    return {name: each.tolist() for name, each in trained.model.state_dict().items()}


def test_a_recipe_of_ones_own_in_the_folder_is_not_overwritten(data: FeatureSpec, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("model: ease\n")
    with pytest.raises(
        SettingsError, match=r"run: a run writes its recipe.yaml there, and yours is there already; move"
    ):
        run("ease", data, tmp_path / "run", settings={"l2": 5.0})
    assert (tmp_path / "run" / "recipe.yaml").read_text() == "model: ease\n"
