"""Settings that were not given: the facts, the proposals, and what wins over them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from pydantic import Field

from recspec.base import config
from recspec.bundle import folder as bundle
from recspec.feature_spec import FeatureSpec
from recspec.loading.ranks import Ranks
from recspec.models import MODELS, DataFacts, IdFacts, Model, PreparedNegatives, Proposals, Task
from recspec.training import defaults
from recspec.training.defaults import Resolved, gather_facts, pick_path, resolve
from recspec.training.loop import train
from recspec.training.plan import make_plan
from recspec.training.settings import TrainSettings
from tests import made_up
from tests.model_cases import TRAINED_BY_STEPS, kind_of_data

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(datasets: Mapping[str, FeatureSpec]) -> Mapping[str, FeatureSpec]:
    sources = datasets["clicks"].sources
    without_valid = datasets["clicks"].replace(sources={split: sources[split] for split in ("train", "test")})
    return {**datasets, "without_valid": without_valid}


class Ruled(Model):
    """A model with rules."""

    name = "ruled"
    proposals: ClassVar[Proposals] = {}

    class Settings(config.Settings):
        """Its settings."""

        width: int = Field(8, description="width")
        dropout: float = Field(0.0, lt=1, description="dropout")

    @classmethod
    def defaults(cls, facts: DataFacts) -> Proposals:  # noqa: ARG003
        return cls.proposals


def resolved(
    spec: FeatureSpec,
    proposals: Proposals = {},  # noqa: B006
    own: Mapping[str, object] = {},
    so_far: Mapping[str, Mapping[str, object]] | None = None,
    model: type[Model] | None = None,
    **train: object,
) -> defaults.Resolved:
    class Chosen(Ruled):
        """With these rules."""

    Chosen.proposals = proposals
    chosen = model or Chosen
    settings = TrainSettings.model_validate(train)
    return resolve(chosen, spec, settings, chosen.Settings.model_validate(own), CPU, so_far)


# --- facts -----------------------------------------------------------------------------------------------------------


def test_facts_of_interactions(data: Mapping[str, FeatureSpec]) -> None:
    facts = gather_facts(data["interactions"], TrainSettings(), CPU)
    rows = facts.rows
    assert (facts.task, facts.users, facts.items) == ("interactions", 120, 60)
    assert (facts.samples, facts.positive_share) == (5 * rows, 0.2)
    assert facts.density == rows / (120 * 60)
    assert facts.ids["item_id"] == IdFacts(61, rows / 61)
    assert gather_facts(data["interactions"], TrainSettings(negatives=1), CPU).samples == 2 * rows


def test_facts_of_labelled_rows_and_of_histories(data: Mapping[str, FeatureSpec]) -> None:
    facts = gather_facts(data["clicks"], TrainSettings(), CPU)
    assert (facts.task, facts.samples, facts.history) == ("clicks", facts.rows, 0)
    assert 0 < facts.positive_share < 1
    assert facts.numbers == len(data["clicks"].inputs(categorical=False))
    facts = gather_facts(data["sequences"], TrainSettings(), CPU)
    assert facts.ids["history_item_id"].is_list
    assert 0 < facts.history < facts.longest_history == 10


def test_facts_of_prepared_negatives(data: Mapping[str, FeatureSpec], tmp_path: Path) -> None:
    spec = made_up.interactions(tmp_path / "data", num_rows=800, train_negatives=2, negatives="popularity")
    known = PreparedNegatives(2, by_popularity=True, reject_seen=True)
    assert gather_facts(spec, TrainSettings(), CPU).prepared_negatives == known
    assert gather_facts(spec, TrainSettings(negatives=0), CPU).prepared_negatives is None  # they are kept
    assert gather_facts(data["interactions"], TrainSettings(), CPU).prepared_negatives is None  # there are none
    for unknown in ("[", '{"settings": {}}', '{"settings": {"negatives": ["popularity"]}}'):
        (spec.folder / "prepare.json").write_text(unknown)
        assert gather_facts(spec, TrainSettings(), CPU).prepared_negatives is None


def test_the_share_of_positives_is_read_of_a_part_of_the_rows(
    data: Mapping[str, FeatureSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gather_facts(data["clicks"], TrainSettings(), CPU).positive_share
    monkeypatch.setattr(defaults, "MOST_LABELS", 800)
    assert gather_facts(data["clicks"], TrainSettings(), CPU).positive_share == pytest.approx(whole, abs=0.1)


def test_facts_leave_out_a_feature_whose_cardinality_is_not_resolved(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("".join(f"{row % 3},{row},1\n" for row in range(6)))
    chunk = {"type": "csv", "features": ["item", "session", "label"], "files": ["rows.csv"]}
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"item": {"cardinality": 3}, "session": {"cardinality": "auto"}, "label": {}},
            "source_spec": {"train": [chunk], "valid": [chunk]},
            "channel_spec": {"item": ["item"], "context": ["session"], "label": ["label"]},
        },
        tmp_path,
    )
    facts = gather_facts(spec, TrainSettings(), CPU)
    assert facts.ids == {"item": IdFacts(3, 2.0)}
    assert (facts.rows, facts.valid_rows, facts.positive_share, facts.numbers, facts.users) == (6, 6, 1.0, 0, 0)


# --- what wins -------------------------------------------------------------------------------------------------------


def test_a_given_setting_wins_even_at_its_default(data: Mapping[str, FeatureSpec]) -> None:
    rules: Proposals = {"width": (16, "rows"), "dropout": (0.3, "rows"), "train.learning_rate": (0.01, "rows")}
    found = resolved(data["clicks"], rules, {"width": 8}, learning_rate=0.001)
    assert found.model_settings.model_dump() == {"width": 8, "dropout": 0.3}
    assert found.settings.learning_rate == 0.001
    assert str(found.proposed["settings.dropout"]) == "0.3: rows"
    assert not {"settings.width", "train.learning_rate"} & set(found.proposed)
    complete = resolve(
        Ruled, data["clicks"], config.mark_all_set(TrainSettings()), config.mark_all_set(Ruled.Settings()), CPU
    )
    assert not complete.proposed
    assert complete.settings == TrainSettings()


def test_a_rate_for_another_optimizer_is_not_taken(data: Mapping[str, FeatureSpec]) -> None:
    rules: Proposals = {"train.learning_rate": (0.01, "rows"), "train.batch_size": (64, "rows")}
    found = resolved(data["clicks"], rules, optimizer="sgd")
    assert (found.settings.learning_rate, found.settings.batch_size) == (0.001, 64)
    assert resolved(data["clicks"], rules, optimizer="adam").settings.learning_rate == 0.01


def test_a_proposal_that_does_not_go_with_a_given_setting_gives_way(data: Mapping[str, FeatureSpec]) -> None:
    rules: Proposals = {"train.accumulate": (8, "rows"), "dropout": (0.2, "rows")}
    found = resolved(data["clicks"], rules, batch_size=4)
    assert (found.settings.accumulate, found.model_settings.model_dump()["dropout"]) == (1, 0.2)


def test_a_run_goes_on_with_the_settings_that_it_began_with(data: Mapping[str, FeatureSpec]) -> None:
    train = {"epochs": 7, "seed": 3, "compile": "auto"}
    began = {"train": train, "settings": {"width": 32}}
    found = resolved(data["clicks"], {"width": (16, "rows")}, so_far=began, seed=4)
    assert (found.settings.epochs, found.settings.seed, found.model_settings.model_dump()["width"]) == (7, 4, 32)
    assert (found.settings.patience, found.settings.compile) == (None, "auto")
    assert found.proposed["train.epochs"].reason == "as at the start of the run"


# --- the length of a run ---------------------------------------------------------------------------------------------


def test_epochs_that_are_given_are_all_made(data: Mapping[str, FeatureSpec]) -> None:
    found = resolved(data["clicks"], epochs=3).settings
    assert (found.epochs, found.patience, found.falling_patience) == (3, None, None)
    found = resolved(data["clicks"], patience=4).settings
    assert (found.epochs, found.patience) == (defaults.MOST_EPOCHS, 4)


@pytest.mark.parametrize(
    ("kind", "given", "reason"),
    [
        ("clicks", {"schedule": "linear"}, "train.schedule linear needs a length"),
        ("clicks", {"parts": {"head": {"schedule": "polynomial"}}}, "train.schedule polynomial needs a length"),
        ("clicks", {"train_splits": ("train", "valid")}, "train.train_splits trains on valid, so nothing says when"),
        (
            "without_valid",
            {"valid_share": 0.0},
            "no split valid, and train.valid_share is 0, so nothing says when to stop",
        ),
    ],
)
def test_a_run_that_nothing_can_stop_has_a_fixed_length(
    data: Mapping[str, FeatureSpec], kind: str, given: dict[str, object], reason: str
) -> None:
    found = resolved(data[kind], **given)  # type: ignore[arg-type]
    assert (found.settings.epochs, found.settings.patience) == (10, None)
    assert reason in found.proposed["train.epochs"].reason


def test_rows_are_held_out_where_there_is_no_valid_split(
    data: Mapping[str, FeatureSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = resolved(data["without_valid"])
    assert (found.settings.valid_share, found.settings.epochs) == (0.1, defaults.MOST_EPOCHS)
    assert "no split valid" in found.proposed["train.valid_share"].reason
    assert resolved(data["clicks"]).settings.valid_share == 0
    fixed = resolved(data["without_valid"], epochs=3)
    assert not fixed.proposed, "with a fixed length all rows are trained on"
    monkeypatch.setattr(defaults, "FEWEST_ROWS_TO_DIVIDE", 10**6)
    assert resolved(data["without_valid"]).settings.epochs == 10


# --- the metric ------------------------------------------------------------------------------------------------------


def test_labelled_rows_are_judged_by_log_loss(data: Mapping[str, FeatureSpec]) -> None:
    assert resolved(data["clicks"]).settings.metric == "rows/log_loss"
    assert resolved(data["clicks"], metric="rows/auc").settings.metric == "rows/auc"


@pytest.mark.parametrize(
    ("pairs", "given", "metric", "users"),
    [
        (120 * 60, {}, "full/ndcg@10", None),
        (100 * 60, {}, "full/ndcg@10", 100),
        (100 * 60, {"valid_users": 7}, "full/ndcg@10", 7),
        (49 * 60, {}, "sampled/ndcg@10", None),
    ],
)
def test_interactions_are_judged_by_full_ranking_where_it_costs_little(
    data: Mapping[str, FeatureSpec],
    monkeypatch: pytest.MonkeyPatch,
    pairs: int,
    given: dict[str, object],
    metric: str,
    users: int | None,
) -> None:
    monkeypatch.setattr(defaults, "FEW_PAIRS", pairs)
    monkeypatch.setattr(defaults, "MOST_PAIRS", pairs)
    monkeypatch.setattr(defaults, "PAIRS_PER_SAMPLE", 0)
    monkeypatch.setattr(defaults, "FEWEST_USERS", 50)
    found = resolved(data["interactions"], **given).settings  # type: ignore[arg-type]
    assert (found.metric, found.valid_users) == (metric, users)
    if metric == "sampled/ndcg@10":  # beside few candidates, an order of pairs alone
        monkeypatch.setattr(defaults, "FEW_CANDIDATES", 1_000)
        assert resolved(data["interactions"]).settings.metric == "rows/auc"


PRODUCTS = {
    "neumf": {"use_mlp": False, "factors": 2, "item_bias": True},
    "two_tower": {"dim": 2},
    "sasrec": {},
    "bert4rec": {},
    "mult_vae": {},
}
"""Models whose scores are a product of matrices, with settings that make it one."""


@pytest.mark.parametrize("name", TRAINED_BY_STEPS)
def test_all_users_choose_the_epoch_where_a_pair_costs_a_product(
    data: Mapping[str, FeatureSpec], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for price in ("FEW_PAIRS", "MOST_PAIRS", "PAIRS_PER_SAMPLE"):
        monkeypatch.setattr(defaults, price, 0)
    spec = data["sequences" if "history" in MODELS[name].needs else "interactions"]
    found = resolved(spec, own=PRODUCTS.get(name, {}), model=MODELS[name]).settings
    ranks_all = found.metric == "full/ndcg@10" and found.valid_users is None
    assert ranks_all == (name in PRODUCTS)


@pytest.mark.parametrize("name", ["neumf", "two_tower"])
def test_the_scores_of_a_product_have_its_rank(data: Mapping[str, FeatureSpec], name: str) -> None:
    spec, kind = data["interactions"], MODELS[name]
    users, items = torch.arange(1, 41), torch.arange(1, 61)

    def rank(own: Mapping[str, object]) -> int:
        torch.manual_seed(0)
        model = kind(spec, kind.Settings.model_validate(own)).eval()
        assert kind.traits.scores_by_product(model.settings) == (own == PRODUCTS[name])
        with torch.inference_mode():
            scores = model.score_items({spec.user_id: users}, {spec.item_id: items})
        return int(torch.linalg.matrix_rank(scores.double(), rtol=1e-5))

    assert rank(PRODUCTS[name]) <= 3, "two numbers a side, and a bias of items"
    if name == "neumf":
        assert rank({**PRODUCTS[name], "use_mlp": True}) > 3


def test_the_path_says_how_the_data_is_taken(data: Mapping[str, FeatureSpec], tmp_path: Path) -> None:
    assert pick_path(data["interactions"]).value == "implicit"
    assert pick_path(data["clicks"]).value == "labelled"
    (tmp_path / "prepare.json").write_text('{"settings": {"positive_from": 4, "split": "time"}}')
    rated = pick_path(data["clicks"].replace(folder=tmp_path))
    assert str(rated) == (
        "rated, split by time: labels are ratings from 4 on: no negatives are drawn; valid and test are the latest rows"
    )
    assert pick_path(data["interactions"].replace(folder=tmp_path)).value == "rated, split by time"
    for damaged in ("[", "[]", '{"settings": 3}', "[" * 100_000):
        (tmp_path / "prepare.json").write_text(damaged)
        assert pick_path(data["clicks"].replace(folder=tmp_path)).value == "labelled"


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize(("task", "share"), [("clicks", 0.3), ("interactions", 1.0)])
def test_every_models_rules_give_settings_that_it_has(name: str, task: Task, share: float) -> None:
    for rows in (1, 10, 10**5, 10**7, 10**9):
        facts = DataFacts(task=task, rows=rows, samples=rows, positive_share=share, ids={"a": IdFacts(10, rows / 10)})
        for setting, (value, reason) in MODELS[name].defaults(facts).items():
            section, _, bare = setting.rpartition(".")
            owner = TrainSettings if section == "train" else MODELS[name].Settings
            assert getattr(owner.model_validate({bare: value}), bare) == value, rows
            assert reason, rows


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, FeatureSpec]:
    folder = tmp_path_factory.mktemp("small")
    return {
        "interactions": made_up.interactions(folder / "interactions", num_rows=800),
        "clicks": made_up.clicks(folder / "clicks", num_rows=800),
        "sequences": made_up.sequences(folder / "sequences", num_rows=600),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED_BY_STEPS)
def test_every_model_trains_by_its_defaults(
    name: str, small: Mapping[str, FeatureSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "MOST_EPOCHS", 12)
    spec = small[kind_of_data(name)]
    settings = TrainSettings(tensorboard=False)
    result = train(name, spec, tmp_path / "run", settings=settings, model_settings=MODELS[name].Settings())
    assert result.stopped in ("patience", "falling", "epochs")
    (metric,) = (each for each in result.trace if each not in ("epoch", "rows/auc"))
    assert metric == ("full/ndcg@10" if kind_of_data(name) == "interactions" else "rows/log_loss")
    best = min if metric == "rows/log_loss" else max
    assert result.trace[metric][int(result.best_epoch) - 1] == best(result.trace[metric])
    card = bundle.load(tmp_path / "run").card
    plan = make_plan(name, spec, settings, MODELS[name].Settings(), Ranks(), propose=True)
    assert card.settings == plan.model_settings.model_dump(mode="json")
    assert card.train == plan.settings.model_dump(mode="json")


def with_parts(spec: FeatureSpec, model: str, own: Mapping[str, object] = {}, **given: object) -> Resolved:
    settings = TrainSettings.model_validate(given)
    chosen = MODELS[model]
    return resolve(chosen, spec, settings, chosen.Settings.model_validate(own), torch.device("cpu"))


def test_a_part_that_given_settings_leave_out_is_not_proposed(data: Mapping[str, FeatureSpec]) -> None:
    assert [*with_parts(data["clicks"], "wide_deep").settings.parts] == ["deep.embeddings", "wide.tables"]
    assert [*with_parts(data["clicks"], "wide_deep", {"use_wide": False}).settings.parts] == ["deep.embeddings"]
    neither = with_parts(data["clicks"], "wide_deep", {"use_wide": False, "deep_features": ["speed"]})
    assert neither.settings.parts == {}
    assert "train.parts" not in neither.proposed


def test_a_frozen_part_is_not_proposed(data: Mapping[str, FeatureSpec]) -> None:
    assert [*with_parts(data["clicks"], "wide_deep", frozen=["deep"]).settings.parts] == ["wide.tables"]
    assert with_parts(data["clicks"], "dcnv2", frozen=["embeddings"]).settings.parts == {}


@pytest.mark.parametrize(
    "given",
    [
        {"optimizer": "sgd"},
        {"weight_decay": 1e-4},
        {"weight_decay": 0.0},
        {"sparse_gradients": "always"},
        {"embedding_backend": "fbgemm"},
    ],
)
def test_given_settings_that_a_decay_of_whole_tables_does_not_suit_win(
    data: Mapping[str, FeatureSpec], given: dict[str, object]
) -> None:
    found = with_parts(data["clicks"], "dlrm", **given)
    assert found.settings.parts == {}
    assert "train.parts" not in found.proposed
    assert found.settings.batch_size is not None


def test_given_parts_win(data: Mapping[str, FeatureSpec]) -> None:
    parts = {"embeddings": {"learning_rate": 0.01}}
    assert with_parts(data["clicks"], "dcnv2", parts=parts).settings.parts == parts


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dlrm", "dcnv2", "wide_deep"])
def test_without_any_setting_the_model_beats_a_constant(
    model: str, data: Mapping[str, FeatureSpec], tmp_path: Path
) -> None:
    chosen = MODELS[model]
    settings = TrainSettings.model_validate({"tensorboard": False, "precision": "fp32"})
    result = train(model, data["clicks"], tmp_path / "run", settings=settings, model_settings=chosen.Settings())
    assert result.metrics["rows"]["auc"] > 0.6
    assert result.metrics["rows"]["log_loss"] < 0.69
