"""Every promise of `Model`, asked of every registered model, on data whose best possible score is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recspec.base import config
from recspec.base.errors import RecspecError, SettingsError
from recspec.bundle import folder as bundle
from recspec.bundle.folder import Card
from recspec.data.storage import open_split
from recspec.evaluation import evaluate_model, positives
from recspec.evaluation.boosting import BoostedFit
from recspec.evaluation.row_baselines import LogisticFit
from recspec.evaluation.scoring import score_rows
from recspec.feature_spec import FeatureSpec
from recspec.loading.loader import Loader
from recspec.loading.sampling import item_features
from recspec.metrics import measures as metrics
from recspec.models import MODELS, FittedItemModel, LightGbm, LogisticRegression, TrainedItemModel
from recspec.models.base import Model, on_meta_device
from recspec.models.layers.batch import Batch, num_rows, take
from recspec.training.loop import train
from recspec.training.settings import TrainSettings
from tests import made_up
from tests.known_users import informed
from tests.model_cases import FITTED, MODEL_CASES, OF_LABELLED_ROWS, TRAINED_BY_STEPS
from tests.processes import ended

NAMES = sorted(MODELS)
OF_HISTORIES = [name for name in NAMES if "history" in MODELS[name].needs]


@pytest.fixture(scope="module")
def interactions(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("models") / "interactions")


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.sequences(tmp_path_factory.mktemp("models") / "sequences")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.clicks(tmp_path_factory.mktemp("models") / "clicks")


@pytest.fixture
def data(name: str, interactions: FeatureSpec, sequences: FeatureSpec, labelled: FeatureSpec) -> FeatureSpec:
    """What the model is asked on: interactions with candidates, or rows with histories or labels if it needs those."""
    if name in OF_LABELLED_ROWS:
        return labelled
    return sequences if name in OF_HISTORIES else interactions


@pytest.fixture
def clicks(name: str, labelled: FeatureSpec, sequences: FeatureSpec) -> FeatureSpec:
    return sequences if name in OF_HISTORIES else labelled


def build(name: str, spec: FeatureSpec, **changed: object) -> Model:
    torch.manual_seed(0)
    model = MODELS[name](spec, MODELS[name].Settings.model_validate({**MODEL_CASES[name].fits, **changed}))
    if isinstance(model, LogisticRegression):
        fit = LogisticFit(spec, ["train"])
        model.fill(fit.layout.mean, fit.layout.std, fit.layout.edges, *fit.solve(10.0))
    if isinstance(model, LightGbm):
        fitted = BoostedFit(LightGbm, spec, model.settings).run().model
        model.allocate_buffers(fitted.state_dict())
        model.load_state_dict(fitted.state_dict(), assign=True)
    if isinstance(model, FittedItemModel):
        model.fit(positives(spec, ["train"]))
        scores = model.score_users(torch.arange(5))
        model.set_line(1 / float(scores.std()), -float(scores.mean() / scores.std()))
    for parameter in model.parameters():  # large enough that rows differ
        torch.nn.init.normal_(parameter, std=0.3)
    return informed(model, spec).eval()


def test_models_are_served_and_trained_without_the_compiler_of_torch(
    interactions: FeatureSpec, sequences: FeatureSpec, labelled: FeatureSpec, tmp_path: Path
) -> None:
    """It takes as long to load as torch itself. Whatever trains: the optimizer, the average of weights, the rest."""
    code = """
import sys
from pathlib import Path
import recspec.serving
from recspec.models import MODELS
from recspec.models.base import on_meta_device
from recspec.feature_spec import FeatureSpec
from tests.model_cases import MODEL_CASES, OF_LABELLED_ROWS, TRAINED_BY_STEPS

interactions, sequences, labelled = map(FeatureSpec.load, sys.argv[1:4])

def settings_and_data(name):
    kind = MODELS[name]
    spec = labelled if name in OF_LABELLED_ROWS else sequences if "history" in kind.needs else interactions
    return kind.Settings.model_validate(MODEL_CASES[name].tiny), spec

for name in MODELS:
    settings, spec = settings_and_data(name)
    on_meta_device(lambda: MODELS[name](spec, settings))
    assert "torch._dynamo" not in sys.modules, f"serving {name}"

from recspec.training import TrainSettings, train

how = TrainSettings(batch_size=4096, epochs=1, average=0.9, clip_norm=1.0, tensorboard=False)
for name in sorted(TRAINED_BY_STEPS):
    settings, spec = settings_and_data(name)
    train(name, spec, Path(sys.argv[4]) / name, settings=how, model_settings=settings)
    assert not {"torch._dynamo", "torch._inductor", "sympy"} & {*sys.modules}, f"training {name}"
"""
    given = [*(str(spec.folder) for spec in (interactions, sequences, labelled)), str(tmp_path)]
    done = ended(code, *given)
    assert done.returncode == 0, done.stderr


def run_training(name: str, spec: FeatureSpec, run: Path, **settings: object) -> None:
    """Train a model by steps with these settings, or fit it, which takes none of them."""
    chosen = {**settings, "learning_rate": 0.01} if name in TRAINED_BY_STEPS else {}
    train(
        name,
        spec,
        run,
        settings=TrainSettings.model_validate({**chosen, "tensorboard": False}),
        model_settings=MODELS[name].Settings.model_validate(MODEL_CASES[name].fits),
    )


def a_batch(spec: FeatureSpec, rows: int = 37) -> Batch:
    return next(iter(Loader(spec, "valid", batch_size=rows, seed=3).batches())).batch


HOOKS = {"name", "needs", "Settings", "space", "traits", "shapes", "defaults", "forward", "features", "loss"}
HOOKS |= {"loss_needs", "item_parts", "side_scores", "gives_logits", "allocate_buffers"}


def test_a_model_overrides_nothing_but_the_hooks_of_its_class() -> None:
    public = {name for name in (*vars(Model), *Model.__annotations__) if not name.startswith("_")}
    for kind in [each for model in MODELS.values() for each in model.__mro__ if issubclass(each, Model)]:
        overridden = public & vars(kind).keys() if kind is not Model else set()
        assert overridden <= HOOKS, f"{kind.__name__}: {overridden - HOOKS}"
    assert public >= HOOKS
    assert all(f"`{name}`" in (Model.__doc__ or "") for name in HOOKS)


def test_every_model_has_a_case() -> None:
    assert set(MODEL_CASES) == set(MODELS)


@pytest.mark.parametrize("name", NAMES)
class TestEveryModel:
    def test_scores_a_row_alone_as_in_a_batch(self, name: str, data: FeatureSpec) -> None:
        model, batch = build(name, data), a_batch(data)
        alone = torch.cat([model(take(batch, slice(row, row + 1))) for row in range(num_rows(batch))])
        assert torch.isfinite(alone).all()
        torch.testing.assert_close(alone, model(batch), atol=1e-5, rtol=1e-5)

    def test_does_not_look_at_the_label(self, name: str, data: FeatureSpec) -> None:
        model, batch = build(name, data), a_batch(data)
        without = {feature: tensor for feature, tensor in batch.items() if feature in model.features()}
        assert data.label not in without
        assert torch.equal(model(batch), model(without))  # same operations: nothing else is read

    def test_has_a_scalar_loss_that_reaches_every_parameter(self, name: str, data: FeatureSpec) -> None:
        model = build(name, data).train()
        if name not in TRAINED_BY_STEPS:
            with pytest.raises(SettingsError, match=f"{name} is fitted in one go, .* so it has no loss"):
                model.loss({})
            return
        loss = model.loss(next(iter(Loader(data, "train", batch_size=37).batches())).batch)
        assert loss.shape == ()
        loss.backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []

    def test_scores_items_as_the_pairs_one_by_one(self, name: str, data: FeatureSpec) -> None:
        model = build(name, data)
        batch = a_batch(data, rows=5)
        item_names = [feature for feature in model.features() if feature in data.role("item")]
        items = item_features(data, ("train",), [feature for feature in item_names if feature != data.item_id])
        items[data.item_id] = torch.arange(data.num_ids(data.item_id))
        request = {feature: tensor for feature, tensor in batch.items() if feature not in item_names}
        with torch.inference_mode():
            scores = model.score_items(request, items)
            pairs = model.pair_scores(request, items)
        assert scores.shape == (5, data.num_ids(data.item_id))
        torch.testing.assert_close(scores, pairs, atol=1e-5, rtol=1e-5)

    def test_comes_back_from_a_bundle_with_the_same_logits(self, name: str, data: FeatureSpec, tmp_path: Path) -> None:
        model, batch = build(name, data), a_batch(data)
        card = Card(model=name, settings=model.settings.model_dump(mode="json"))
        bundle.save(tmp_path / "bundle", model, card)
        back = bundle.load(tmp_path / "bundle").model
        for name, value in model.state_dict().items():
            assert torch.equal(back.state_dict()[name], value), name
        # A product's last bit may depend on where in memory a weight begins.
        torch.testing.assert_close(back(batch), model(batch), atol=1e-6, rtol=1e-6)

    def test_reaches_most_of_what_the_best_possible_ranking_does(
        self, name: str, data: FeatureSpec, tmp_path: Path
    ) -> None:
        sizes = {"epochs": 30, "batch_size": 1024} if data.has_series else {"epochs": 5, "batch_size": 256}
        run_training(name, data, tmp_path / "run", **sizes)
        best = data.metadata["summary"]["best_possible"]  # type: ignore[index]
        if not data.has_series:
            found = evaluate_model(bundle.load(tmp_path / "run").model, data, "test", protocols=("rows",))
            assert found.metrics["rows"]["auc"] - 0.5 > MODEL_CASES[name].reaches * (best["test"]["auc"] - 0.5)
            return
        reached = evaluate_model(bundle.load(tmp_path / "run").model, data, "test", protocols=("sampled",))
        assert reached.metrics["sampled"]["ndcg@10"] > MODEL_CASES[name].reaches * best["test"]["ndcg@10"]

    def test_says_what_is_missing_in_a_specification_with_nothing_but_a_label(self, name: str) -> None:
        bare = FeatureSpec.from_dict({"feature_spec": {"label": {}}, "channel_spec": {"label": ["label"]}})
        roles = f"{MODELS[name].__name__} needs a feature in the role '.*'; add one to"
        with pytest.raises(RecspecError, match=f"{roles}|there is no feature to read in the roles"):
            MODELS[name](bare, MODELS[name].Settings())

    def test_is_the_same_for_the_same_seed(self, name: str, data: FeatureSpec) -> None:
        made = []
        for _ in range(2):
            torch.manual_seed(5)
            made.append(MODELS[name](data, MODELS[name].Settings.model_validate(MODEL_CASES[name].fits)))
            if isinstance(model := made[-1], FittedItemModel):
                model.fit(positives(data, ["train"]), seed=5)
            elif name not in TRAINED_BY_STEPS:
                made[-1] = build(name, data)
        for key, value in made[0].state_dict().items():
            assert torch.equal(value, made[1].state_dict()[key]), key

    def test_scores_a_split_in_its_order(self, name: str, data: FeatureSpec) -> None:
        model = build(name, data)
        scores = score_rows(model, data, "valid")
        whole = next(iter(Loader(data, "valid", batch_size=10**6, shuffle=False).batches())).batch
        np.testing.assert_allclose(scores, model(whole).detach().numpy(), atol=1e-5)
        labels = open_split(data, "valid").read(0, len(scores))[data.label]
        assert 0 < metrics.auc(scores, np.asarray(labels) > 0) < 1


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*OF_HISTORIES, *OF_LABELLED_ROWS)])
def test_a_model_of_interactions_trains_on_labelled_rows_too(name: str, labelled: FeatureSpec, tmp_path: Path) -> None:
    run_training(name, labelled, tmp_path / "run", epochs=8, batch_size=256)
    trained = bundle.load(tmp_path / "run")
    if name in TRAINED_BY_STEPS and not issubclass(MODELS[name], TrainedItemModel):
        found = trained.card.metrics["rows"]["auc"]
    else:
        found = evaluate_model(trained.model, labelled, "valid", protocols=("rows",)).metrics["rows"]["auc"]
    assert found > 0.55


@pytest.mark.parametrize("name", OF_HISTORIES)
class TestEveryModelOfHistories:
    """What holds of a history: its padding, its company, its end."""

    def test_more_padding_changes_nothing(self, name: str, data: FeatureSpec) -> None:
        model, batch = build(name, data), a_batch(data)
        lists = [feature for feature in batch if batch[feature].dim() == 2]
        longer = {**batch, **{feature: F.pad(batch[feature], (0, 5)) for feature in lists}}
        most = int((batch["history_item_id"] != 0).sum(1).max())
        trimmed = {**batch, **{feature: batch[feature][:, :most] for feature in lists}}
        for other in (longer, trimmed):
            torch.testing.assert_close(model(other), model(batch), atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(model.loss(other), model.loss(batch), atol=1e-6, rtol=1e-6)

    def test_other_rows_change_nothing(self, name: str, data: FeatureSpec) -> None:
        model, batch = build(name, data), a_batch(data, rows=200)
        order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(model(take(batch, order)), model(batch)[order], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model(take(batch, slice(0, 3))), model(batch)[:3], atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("rows", [1, 3])
    @pytest.mark.parametrize("length", [0, 4])
    def test_rows_without_an_event_train(self, name: str, data: FeatureSpec, rows: int, length: int) -> None:
        batch = {
            feature: value[:rows] if value.dim() == 1 else value.new_zeros(rows, length)
            for feature, value in a_batch(data).items()
        }
        for model in (build(name, data), build(name, data).train()):
            loss = model.loss(batch)
            loss.backward()
            assert torch.isfinite(loss)
            assert torch.isfinite(model(batch)).all()
            assert all(each.grad is None or torch.isfinite(each.grad).all() for each in model.parameters())

    def test_the_history_matters(self, name: str, data: FeatureSpec) -> None:
        model, batch = build(name, data), a_batch(data)
        without = {**batch, **{each: torch.zeros_like(batch[each]) for each in data.role("history")}}
        empty = (batch["history_item_id"] == 0).all(1)
        assert ((model(without) - model(batch)).abs() > 1e-4).tolist() == (~empty).tolist()

    def test_a_prediction_does_not_read_the_sampled_history(self, name: str, data: FeatureSpec) -> None:
        model = build(name, data)
        assert not set(model.features()) & set(data.role("negative_history"))
        assert not set(model.train().features()) & set(data.role("negative_history"))

    def test_a_loss_reads_what_it_says(self, name: str, data: FeatureSpec) -> None:
        model, batch = build(name, data), a_batch(data)
        given = {feature: batch[feature] for feature in (*model.loss_needs().features, data.label)}
        assert torch.equal(model.loss(given), model.loss(batch))  # same operations: nothing else is read

    def test_the_padded_form_gives_the_same(
        self, name: str, data: FeatureSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, batch = build(name, data), a_batch(data)
        jagged, loss = model(batch), model.loss(batch)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        torch.testing.assert_close(model(batch), jagged, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model.loss(batch), loss, atol=1e-5, rtol=1e-5)

    def test_bf16_gives_nearly_the_same(self, name: str, data: FeatureSpec) -> None:
        model, batch = build(name, data).train(), a_batch(data)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(batch)
        loss.backward()
        assert model(batch).dtype == torch.float32
        torch.testing.assert_close(loss, model.loss(batch), atol=0.05, rtol=0.05)


def whole_numbers(name: str, value: int) -> list[dict[str, object]]:
    """The settings of a model with each whole number, list of them and mapping to them replaced by a value."""
    changed: list[dict[str, object]] = []
    for key, field in MODELS[name].Settings.model_fields.items():
        holds = str(field.annotation)
        if "dict[str, int]" in holds:
            changed.append({key: {"item_id": value}})
        elif "tuple[int" in holds:
            changed.append({key: [value, value]})
        elif "int" in holds.replace("Interaction", ""):
            changed.append({key: value})
    return changed


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_number_of_any_size_is_built_or_refused(name: str, clicks: FeatureSpec) -> None:
    values = (2**31, 2**40, 2**62, 2**63 - 1, 2**63, 10**30, -(10**30))
    settings = [(value, changed) for value in values for changed in whole_numbers(name, value)]
    assert settings or name in FITTED
    for value, changed in settings:
        try:
            values = {**MODEL_CASES[name].tiny, **changed}
            built = config.build(MODELS[name].Settings, "settings", values)
            on_meta_device(lambda built=built: MODELS[name](clicks, built))
        except RecspecError as error:
            assert next(iter(changed)) in str(error) or "larger than any memory" in str(error)  # noqa: PT017
        else:
            assert abs(value) < 2**63, changed
