"""Every registered model at small sizes: one row per model, read by all contract suites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS, FittedItemModel, FittedModel


@dataclass(frozen=True)
class ModelCase:
    """Settings of a model for tests; those of a fitted model leave nothing to choose."""

    fits: Mapping[str, object]
    """Under these, the model fits the made-up data in seconds."""
    tiny: Mapping[str, object]
    """Under these, a step takes milliseconds and is free of randomness."""
    part: str = "head"
    """A part of the model that may have an optimizer of its own."""
    reaches: float = 0.75
    """Share of the best possible ranking that it reaches at least; less for a model that knows no tastes."""


MODEL_CASES: Mapping[str, ModelCase] = {
    "neumf": ModelCase(
        {"factors": 8, "layers": (16, 8), "dropout": 0.0},
        {"factors": 4, "layers": [8, 4], "dropout": 0.0, "item_bias": True},
        "mlp",
    ),
    "wide_deep": ModelCase(
        {"hidden": (32, 16), "dropout": 0.0, "embedding_dim": 8},
        {"embedding_dim": 4, "hidden": [8], "dropout": 0.0},
        "wide",
    ),
    "dlrm": ModelCase(
        {"embedding_dim": 8, "bottom": (16, 8), "top": (32, 16)},
        {"embedding_dim": 4, "bottom": [8, 4], "top": [8]},
        "top",
    ),
    "dcnv2": ModelCase(
        {"embedding_dim": 8, "bottom": (), "cross_layers": 2, "cross_rank": 16, "top": (32, 16)},
        {"embedding_dim": 4, "bottom": [], "cross_layers": 1, "top": [8]},
        "cross",
    ),
    "finalnet": ModelCase(
        {"embedding_dim": 8, "gated": (32, 16), "plain": (32,)},
        {"embedding_dim": 4, "gated": [8, 4], "plain": [8], "batch_norm": False},
        "gated",
    ),
    "multitask": ModelCase(
        {"embedding_dim": 8, "form": "mmoe", "experts": 2, "expert": (32,), "tower": (16,)},
        {"embedding_dim": 4, "form": "mmoe", "experts": 2, "expert": [8], "tower": [8]},
        "towers",
    ),
    "din": ModelCase(
        {"embedding_dim": 8, "hidden": (32, 16), "attention_hidden": (16, 8)},
        {"embedding_dim": 4, "hidden": [8], "attention_hidden": [8]},
    ),
    "dien": ModelCase(
        {"embedding_dim": 8, "hidden": (32, 16), "attention_hidden": (16, 8), "auxiliary_hidden": (16,)},
        {"embedding_dim": 4, "hidden": [8], "attention_hidden": [8], "auxiliary_hidden": [8]},
    ),
    "sim": ModelCase(
        {"embedding_dim": 8, "hidden": (32, 16), "short": "din", "short_length": 2, "top_k": 8},
        {
            "embedding_dim": 4,
            "hidden": [8],
            "attention_hidden": [8],
            "auxiliary_hidden": [8],
            "search_hidden": [8],
            "short_length": 2,
            "top_k": 2,
            "heads": 2,
        },
    ),
    "mult_vae": ModelCase(
        {"hidden": (32,), "latent": 16, "dropout": 0.2},
        {"hidden": [8], "latent": 4, "dropout": 0.0, "kl_weight": 0.0},
        "decoder",
    ),
    "sasrec": ModelCase(
        {"dim": 16, "hidden": 16, "dropout": 0.4},
        {"dim": 4, "heads": 2, "hidden": 4, "dropout": 0.0, "id_dropout": 0.0},
        "blocks",
        reaches=0.6,
    ),
    "bert4rec": ModelCase(
        {"dim": 16, "hidden": 16, "dropout": 0.4, "hidden_share": 0.2},
        {"dim": 4, "heads": 2, "hidden": 4, "dropout": 0.0, "id_dropout": 0.0, "hidden_share": 1.0},
        "blocks",
        reaches=0.5,  # a fifth of the events predict at each of 30 steps
    ),
    "two_tower": ModelCase(
        {"dim": 16, "embedding_dim": 16, "temperature": 0.2},
        {"dim": 4, "embedding_dim": 4, "hidden": [8]},
        "item_tower",
    ),
    "markov": ModelCase(
        {"window": 50, "decay": 1.0, "source": 0.5, "recency": 1.0},
        {"k": 2},  # the order of this data says nothing
    ),
    "gf_cf": ModelCase({"vectors": 8, "k": 60, "recency": 1.0, "alpha": 0.3}, {"vectors": 2, "k": 3}),
    "popularity": ModelCase({}, {}, reaches=0.5),
    "item_knn": ModelCase({"k": 20, "shrink": 1.0}, {"k": 2}),
    "ease": ModelCase({"l2": 50.0}, {"l2": 5.0}),
    "logistic_regression": ModelCase({"l2": 10.0}, {"l2": 10.0}, reaches=0.6),
    "lightgbm": ModelCase(
        {
            "target_means": "none",
            "max_categories": 4000,
            "feature_share": 1.0,
            "num_leaves": 31,
            "max_cat_threshold": 32,
            "trees": 60,
        },
        {
            "target_means": "pairs",
            "max_categories": 50,
            "feature_share": 0.7,
            "num_leaves": 4,
            "max_cat_threshold": 4,
            "trees": 3,
        },
        reaches=0.6,
    ),
    "ials": ModelCase({"factors": 16, "l2": 0.1, "unobserved_weight": 0.3}, {"factors": 2, "iterations": 1}),
}

TRAINED_BY_STEPS = sorted(name for name, model in MODELS.items() if not issubclass(model, FittedModel))
"""Models of which the promises of gradient training are asked."""
FITTED = sorted(set(MODELS) - set(TRAINED_BY_STEPS))
OF_LABELLED_ROWS = [name for name in FITTED if not issubclass(MODELS[name], FittedItemModel)]
"""Fitted models that need rows of both classes, and draw no negatives."""


def kind_of_data(name: str) -> str:
    """The made-up data that a model needs: `sequences`, `interactions` or `clicks`."""
    needs = set(MODELS[name].needs)
    return "sequences" if "history" in needs else "interactions" if {"user", "item"} <= needs else "clicks"


def reads_numbers(name: str) -> bool:
    """Whether the model reads numbers that lie beside ids; one that does reads vectors too."""
    columns = {"user": "u", "item": "i", "history": "h", "context": "number", "label": "label"}
    ids = {"cardinality": 9, "dtype": "int32"}
    features = {"u": ids, "i": {**ids, "vocabulary": "i"}, "h": {**ids, "vocabulary": "i", "length": 3, "padding": 0}}
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {**features, "number": {"dtype": "float32"}, "label": {}},
            "channel_spec": {role: [column] for role, column in columns.items()},
        }
    )
    model = MODELS[name](spec, MODELS[name].Settings.model_validate(MODEL_CASES[name].tiny))
    return "number" in model.features()
