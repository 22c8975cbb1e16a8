"""Rules for settings of click models, worked by hand, and their edges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS, DataFacts, IdFacts, PreparedNegatives
from recspec.models import click_defaults as rules
from recspec.training.settings import TrainSettings

CLICK_MODELS = ("dlrm", "dcnv2", "finalnet", "wide_deep")


def facts(rows: int, *tables: tuple[int, float], numbers: int = 0) -> DataFacts:
    """Labelled rows with tables of so many ids and rows per id."""
    ids = {f"C{place}": IdFacts(*table) for place, table in enumerate(tables, 1)}
    return DataFacts(task="clicks", rows=rows, samples=rows, positive_share=0.3, ids=ids, numbers=numbers)


def proposed(model: str, about: DataFacts) -> dict[str, object]:
    return {name: value for name, (value, _) in MODELS[model].defaults(about).items()}


def test_rows_per_id_is_the_mean_over_all_tables() -> None:
    assert rules.rows_per_id(facts(300, (10, 30.0), (90, 300 / 90))) == pytest.approx(600 / 100)
    assert rules.rows_per_id(facts(300, numbers=3)) == 0


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1, 64), (255, 64), (1024, 128), (10_000, 256), (65_536, 1024), (10**6, 2048), (10**9, 65_536), (10**12, 65_536)],
)
def test_the_batch_is_the_power_of_two_up_to_four_roots_of_the_rows(rows: int, expected: int) -> None:
    assert rules.batch_size(facts(rows)) == expected  # 4 sqrt(10,000) = 400


def test_decay_falls_with_the_root_of_the_rows_per_id_and_beyond_a_million_rows() -> None:
    assert rules.decay(facts(1000, (1000, 1.0))) == 0.1
    assert rules.decay(facts(1000, (5000, 0.2))) == 0.1  # fewer rows than ids
    assert rules.decay(facts(1000, (10, 100.0))) == 0.01
    assert rules.decay(facts(1000, (333, 3.0))) == 0.058  # 0.1 / sqrt(3), to two digits
    assert rules.decay(facts(4_000_000, (40_000, 100.0))) == 0.0025


@pytest.mark.parametrize("model", CLICK_MODELS)
def test_each_part_with_embeddings_gets_its_share_of_the_decay(model: str) -> None:
    parts = proposed(model, facts(1000, (10, 100.0), (10, 100.0)))["train.parts"]
    shares = {"deep.embeddings": 0.01, "wide.tables": 0.00033}
    own = shares if model == "wide_deep" else {"embeddings": 0.01}
    assert parts == {part: {"weight_decay": decay} for part, decay in own.items()}


@pytest.mark.parametrize("model", CLICK_MODELS)
def test_tables_too_large_for_a_pass_at_every_step_get_adagrad(model: str) -> None:
    # 4 sqrt(10^6) gives a batch of 2048, so tables may hold 20,000 x 2048 = 40,960,000 numbers: 2,560,000 ids x 16.
    largest = proposed(model, facts(10**6, (2_560_000, 0.39)))["train.parts"]
    assert isinstance(largest, dict)
    assert all("weight_decay" in own for own in largest.values())
    beyond = proposed(model, facts(10**6, (2_560_001, 0.39)))["train.parts"]
    assert isinstance(beyond, dict)
    assert beyond.keys() == largest.keys()
    assert all(own == {"optimizer": "adagrad", "learning_rate": 0.02} for own in beyond.values())


@pytest.mark.parametrize("model", CLICK_MODELS)
def test_a_billion_rows_get_the_published_sizes_without_decay(model: str) -> None:
    found = proposed(model, facts(10**9, (10**7, 100.0), (10**6, 1000.0), numbers=13))
    assert found == {"train.batch_size": 65_536, "train.learning_rate": 0.001}


@pytest.mark.parametrize("model", CLICK_MODELS)
def test_without_categorical_features_no_part_is_named(model: str) -> None:
    assert "train.parts" not in proposed(model, facts(5000, numbers=4))


def test_dlrm_multiplies_vectors_of_ids_with_many_rows_only() -> None:
    dense = proposed("dlrm", facts(2000, (10, 200.0), (10, 200.0)))
    assert "interaction" not in dense
    assert dense["embedding_std"] == 0.1
    rare = proposed("dlrm", facts(1990, (10, 199.0), (10, 199.0)))
    assert rare["interaction"] == "cat"
    assert "embedding_std" not in rare


@pytest.mark.parametrize("model", CLICK_MODELS)
def test_interactions_get_sizes_alone(model: str) -> None:
    about = replace(facts(1000, (10, 100.0), (10, 100.0)), task="interactions")
    found = proposed(model, about)
    assert found["dropout"] == 0.1
    assert not [name for name in found if name.startswith("train.") or name in ("interaction", "embedding_std")]


@pytest.mark.parametrize("model", ["din", "dien", "sim"])
def test_models_of_histories_draw_negatives_by_popularity_anew(model: str) -> None:
    about = replace(facts(1000, (10, 100.0)), task="interactions")
    assert proposed(model, about) == {}  # without prepared negatives
    by_popularity = replace(about, prepared_negatives=PreparedNegatives(2, by_popularity=True, reject_seen=True))
    assert proposed(model, by_popularity) == {
        "train.batch_size": 64,
        "train.learning_rate": 0.001,
        "train.parts": {"inputs.embeddings": {"weight_decay": 0.001}},  # a tenth of 0.1 / sqrt(100)
        "train.negatives": 2,
        "train.negative_distribution": "popularity",
        "train.popularity_power": 1.0,
        "train.reject_positives": True,
    }
    evenly = replace(about, prepared_negatives=PreparedNegatives(2, by_popularity=False, reject_seen=False))
    assert proposed(model, evenly) == {}
    assert proposed(model, replace(by_popularity, task="clicks")) == proposed(model, replace(about, task="clicks"))


@pytest.mark.parametrize("model", ["din", "dien", "sim"])
def test_models_of_histories_decay_embeddings_of_labelled_rows(model: str) -> None:
    assert proposed(model, facts(1000, (10, 100.0), (10, 100.0))) == {
        "train.batch_size": 64,
        "train.learning_rate": 0.001,
        "train.parts": {"inputs.embeddings": {"weight_decay": 0.01}},
    }


@pytest.mark.parametrize("about", [facts(9000, (3, 3000.0)), facts(9000, numbers=3), facts(10**9, (3, 1e9 / 3))])
def test_dlrm_with_one_vector_does_not_multiply(about: DataFacts) -> None:
    assert proposed("dlrm", about)["interaction"] == "cat"


def test_cross_layers_of_many_columns_have_low_rank() -> None:
    at_most = proposed("dcnv2", facts(1000, *[(10, 100.0)] * 63, numbers=16))  # 63 x 16 + 16 = 1024 columns
    assert at_most["cross_rank"] == 0
    assert proposed("dcnv2", facts(1000, *[(10, 100.0)] * 63, numbers=17))["cross_rank"] == 256


@pytest.mark.parametrize("model", CLICK_MODELS)
@pytest.mark.parametrize("rows", [1, 5000, 5_000_000])
@pytest.mark.parametrize(("ids", "numbers"), [(1, 0), (0, 1), (2, 0), (1, 1), (3, 2)])
def test_every_shape_of_data_makes_a_model_with_these_parts(model: str, rows: int, ids: int, numbers: int) -> None:
    about = facts(rows, *[(7, rows / 7)] * ids, numbers=numbers)
    found = proposed(model, about)
    own = {name: value for name, value in found.items() if not name.startswith("train.")}
    features = {f"C{place}": {"cardinality": 7} for place in range(1, ids + 1)}
    dense: dict[str, dict[str, object]] = {f"I{place}": {"dtype": "float32"} for place in range(1, numbers + 1)}
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {**dense, **features, "label": {"dtype": "float32"}},
            "channel_spec": {"numerical": [*dense], "categorical": [*features], "label": ["label"]},
        }
    )
    made = MODELS[model](spec, MODELS[model].Settings.model_validate(own))
    batch = {name: torch.tensor([1, 2]) for name in features} | {name: torch.ones(2) for name in dense}
    assert made(batch).shape == (2,)
    train = TrainSettings.model_validate(
        {name.removeprefix("train."): found[name] for name in found if "train." in name}
    )
    names = [name for name, _ in made.named_parameters()]
    assert all(any(f"{name}.".startswith(f"{part}.") for name in names) for part in train.parts)


def test_columns_cross_whose_pairs_of_ids_have_ten_rows() -> None:
    about = facts(1000, (10, 200.0), (4, 200.0), (11, 200.0))
    names = list(about.ids)
    # 10 x 4, 4 x 11 and 10 x 11 pairs of ids; 1,000 rows are ten for 100 pairs.
    found = proposed("wide_deep", about)
    assert found["crosses"] == ((names[0], names[1]), (names[1], names[2]))
    assert found["cross_buckets"] == 44
    assert found["train.parts"]["wide.cross_weights"] == {"weight_decay": 0.001}  # type: ignore[index]
    # Six crosses of 100 pairs would take more than a weight for two rows.
    few = facts(1000, *[(10, 200.0)] * 4)
    assert len(proposed("wide_deep", few)["crosses"]) == 5  # type: ignore[arg-type]
    listed = {**about.ids, names[1]: replace(about.ids[names[1]], is_list=True)}
    rare = facts(1000, (10, 199.0), (4, 199.0))
    for without in (rare, replace(about, items=11), replace(about, task="interactions"), replace(about, ids=listed)):
        assert "crosses" not in proposed("wide_deep", without)  # type: ignore[arg-type]
