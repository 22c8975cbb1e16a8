"""The trained models at the sizes of their published results, on made-up data of the published shapes.

Shapes of ids follow the papers' datasets; ids are uniform unless a task asks for others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recspec.base import config
from recspec.bench import speed
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS

RECIPES = Path(__file__).parents[2] / "recipes"

CRITEO_T15 = (
    7912889,
    33823,
    17139,
    7339,
    20046,
    4,
    7105,
    1382,
    63,
    5554114,
    582469,
    245828,
    11,
    2209,
    10667,
    104,
    4,
    968,
    15,
    8165896,
    2675940,
    7156453,
    302516,
    12022,
    97,
    35,
)
"""Cardinalities published for Criteo Terabyte with ids of fewer than 15 occurrences left out."""

CRITEO_NUMBERS = 13
ML_20M = {"user_id": 138_493, "item_id": 26_744}

GENTLE: Mapping[str, object] = {
    "schedule": "constant",
    "warmup_epochs": 0.0,
    "step_epochs": (),
    "decay_start": 0.0,
    "decay_end": 1.0,
}
"""A constant rate: published schedules climb for thousands of steps."""


@dataclass(frozen=True)
class Subject:
    """A model at its published sizes."""

    shape: Callable[[int], FeatureSpec]
    """The specification, no cardinality above the one given."""
    batch: int
    """Samples of a training step; of `users`, users."""
    batches: int
    """Full batches of an epoch of the made-up data."""
    small: Mapping[str, object]
    """Sizes for `--small`."""
    recipe: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    train: Mapping[str, object] = field(default_factory=dict)
    negatives: int = 0
    answers: int = 0
    """Rows of a batch of answers; 0: the training batch."""
    published: float | None = None
    """Samples (users) a second in training with mixed precision on one A100."""
    published_answers: float | None = None
    rounding: float = 0.0
    """How far roundings move weights in eight steps in fp32, as a share of how far training does."""
    users: int = 0
    """Users of a model whose training rows are users; 0 for other models."""

    def model_settings(self, name: str, *, small: bool, dropout: bool = True) -> config.Settings:
        """The model's own settings, for the checks without dropout and noise."""
        recipe = config.load_recipe(RECIPES / f"{self.recipe}.yaml").settings if self.recipe else {}
        kind = MODELS[name].Settings
        sizes: dict[str, object] = {**recipe, **self.settings, **(self.small if small else {})}
        if not dropout:
            sizes |= {each: 0.0 for each in ("dropout", "id_dropout", "kl_weight") if each in kind.model_fields}
        return kind.model_validate(sizes)

    def train_settings(self, **own: object) -> dict[str, object]:
        """The recipe's settings of training, without its schedule and metric."""
        recipe = config.load_recipe(RECIPES / f"{self.recipe}.yaml").train if self.recipe else {}
        parts: Mapping[str, object] = {
            "metric": None,
            "train_splits": ("train",),
            "tensorboard": False,
            "memory_budget": "64GB",
        }
        return {**recipe, **GENTLE, **self.train, **parts, "epochs": 1000, "negatives": self.negatives, **own}


def _spec(features: Mapping[str, Mapping[str, object]], channels: Mapping[str, Sequence[str]]) -> FeatureSpec:
    named = {**features, "label": {"dtype": "int8"}}
    chunk = {"type": "parquet", "features": list(named), "files": ["train.parquet"]}
    return FeatureSpec.from_dict(
        {
            "feature_spec": named,
            "source_spec": {"train": [chunk]},
            "channel_spec": {**{role: list(names) for role, names in channels.items()}, "label": ["label"]},
        }
    )


def _ids(cardinalities: Mapping[str, int], most: int, **more: object) -> dict[str, dict[str, object]]:
    return {name: {"dtype": "int32", "cardinality": min(ids, most), **more} for name, ids in cardinalities.items()}


def movielens(most: int) -> FeatureSpec:
    """MovieLens 20M."""
    return _spec(_ids(ML_20M, most), {"user": ["user_id"], "item": ["item_id"]})


def outbrain(most: int) -> FeatureSpec:
    """Outbrain's clicks."""
    numbers = {f"number_{place}": {"dtype": "float32"} for place in range(speed.OUTBRAIN_NUMBERS)}
    scalars = _ids({**speed.OUTBRAIN_ITEM, **speed.OUTBRAIN_CONTEXT}, most)
    lists = _ids(speed.OUTBRAIN_LISTS, most, length=3, padding=0)
    context = [*speed.OUTBRAIN_CONTEXT, *lists, *numbers]
    return _spec({**scalars, **lists, **numbers}, {"item": [*speed.OUTBRAIN_ITEM], "context": context})


def criteo(most: int) -> FeatureSpec:
    """Criteo Terabyte, frequency limit 15."""
    ids = _ids({f"C{place}": size for place, size in enumerate(CRITEO_T15)}, most)
    numbers = {f"I{place}": {"dtype": "float32"} for place in range(CRITEO_NUMBERS)}
    return _spec({**numbers, **ids}, {"context": [*numbers, *ids]})


def books(most: int) -> FeatureSpec:
    """Amazon's books as SIM was published with them."""
    of_item = {name: min(ids + 1, most) for name, ids in speed.BOOKS_ITEM.items()}
    events = {
        f"{role}_{name}": {
            "dtype": "int32",
            "length": speed.BOOKS_LENGTH,
            "padding": 0,
            "cardinality": ids,
            "vocabulary": name,
        }
        for role in ("history", "negative_history")
        for name, ids in of_item.items()
    }
    scalars = _ids({**{name: ids + 1 for name, ids in speed.BOOKS_USER.items()}, **of_item}, most)
    roles = {role: [f"{role}_{name}" for name in of_item] for role in ("history", "negative_history")}
    return _spec({**scalars, **events}, {"user": [*speed.BOOKS_USER], "item": [*of_item], **roles})


ADAM: Mapping[str, object] = {"optimizer": "adam", "learning_rate": 1e-3}
HISTORY: Mapping[str, object] = {"embedding_dim": 4, "hidden": (16, 8), "attention_hidden": (8, 4)}
DLRM: Mapping[str, object] = {"embedding_dim": 4, "bottom": (8, 4), "top": (16, 8)}

SUBJECTS: Mapping[str, Subject] = {
    "dlrm": Subject(
        criteo,
        65536,
        8,
        DLRM,
        "dlrm-criteo-terabyte-t15",
        answers=32768,
        published=4.55e6,
        published_answers=14.8e6,
        train={"learning_rate": 0.1},
    ),
    "neumf": Subject(
        movielens,
        1 << 20,
        8,
        {"factors": 4, "layers": (8, 8, 4)},
        "neumf-ml-20m",
        negatives=4,
        published=34.08e6,
        published_answers=82.7e6,
    ),
    "wide_deep": Subject(
        outbrain,
        131072,
        4,
        {"hidden": (16, 8), "embedding_dim": 4, "embedding_dims": {}},
        "wide-deep-outbrain",
        published=2.31e6,
        published_answers=10.35e6,
        rounding=0.3,  # on a CPU, 1e-7 of the first weights makes .11
    ),
    "sim": Subject(
        books,
        131072,
        2,
        {**HISTORY, "gru_hidden": 8, "top_k": 5, "search_hidden": (8,), "auxiliary_hidden": (8,)},
        "sim-amazon-books",
        published=0.565e6,
        published_answers=1.48e6,
    ),
    "dcnv2": Subject(
        criteo, 65536, 4, {**DLRM, "cross_layers": 2, "cross_rank": 4}, "dcnv2-criteo-terabyte-t15", published=1.37e6
    ),
    "mult_vae": Subject(
        movielens,
        24576,
        3,
        {"hidden": (8,), "latent": 4},
        train={**ADAM, "learning_rate": 0.004},
        published=365_474,
        users=138_000,
    ),
    "sasrec": Subject(
        movielens,
        1024,
        20,
        {"dim": 8, "hidden": 8, "length": 10},
        "sasrec-ml-1m",
        train={"average": 0.0},
        users=138_000,
    ),
    "two_tower": Subject(
        movielens,
        16384,
        8,
        {"dim": 8, "embedding_dim": 8, "hidden": (8,)},
        settings={"hidden": (128,)},
        train=ADAM,
        negatives=1,
    ),
    "din": Subject(books, 65536, 2, HISTORY, train=ADAM),
    "dien": Subject(books, 65536, 2, {**HISTORY, "gru_hidden": 8, "auxiliary_hidden": (8,)}, train=ADAM),
}
"""The ten models trained by steps, in the order of what a figure of them is worth."""
