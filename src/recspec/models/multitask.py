"""One model of several labels, such as click and purchase: shared bottom, MMoE or ESMM.

Shapes: B rows; T labels; X width of x_0; H width of an expert; R requests; N items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from recspec.base import config
from recspec.base.errors import unknown
from recspec.feature_spec import FeatureSpec
from recspec.models import click_defaults as rules
from recspec.models.base import (
    DECAY_SPACE,
    TRAINING_SPACE,
    WIDTHS_SPACE,
    LossNeeds,
    Model,
    UniformStd,
    Widths,
)
from recspec.models.facts import DataFacts, Proposals
from recspec.models.item_model import shallow_copy
from recspec.models.layers import Batch, CalibrationMap, Mlp, RowsHeld, cross_entropy, embedding_widths
from recspec.models.tabular import Part, Tabular, linear_of_parts

SMALLEST = 1e-6
"""Least 1 - p of a product of probabilities, so that its logit stays finite in fp32."""


class MultiTaskSettings(config.Settings):
    """Sizes of the shared part and of each label's tower."""

    form: Literal["shared", "mmoe", "esmm"] = Field(
        "mmoe",
        description="how labels share experts: shared, mmoe or esmm",
    )
    embedding_dim: int = Field(16, ge=1, description="width of every embedding")
    embedding_std: UniformStd = None
    experts: int = Field(8, ge=1, le=1000, description="number of experts, with form mmoe")
    expert: Widths = Field((256,), description="widths of the MLP of an expert")
    tower: Widths = Field((128,), description="widths of the MLP of each label")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of units dropped after each hidden ReLU")
    label_weights: dict[str, Annotated[float, Field(ge=0, le=1e6)]] = Field(
        {}, description="weights of labels in the loss, as {label: weight}; 1 for the others"
    )


class MultiTask(Tabular):
    """Several labels of a row at once, from shared embeddings; rows are judged and ranked by the first label.

    - `shared`: label k has the logit tower_k(f(x)) (Caruana: Multitask learning, 1997).
    - `mmoe`: tower_k(sum_i softmax(G_k x)_i f_i(x)) (Ma et al.: Modeling task relationships in multi-task learning with
      multi-gate mixture-of-experts, KDD 2018, equations 5 to 7).
    - `esmm`: p_k = p_(k-1) sigmoid(tower_k(f(x))), for labels in the order of a funnel: with click and purchase,
      purchases are learned from all impressions and not from clicked rows alone (Ma et al.: Entire space multi-task
      model, SIGIR 2018, equations 3 and 5).

    With one label it is an MLP over embeddings.
    """

    name = "multitask"
    Settings = MultiTaskSettings
    space = MappingProxyType(
        {
            **TRAINING_SPACE,
            "form": ["shared", "mmoe"],
            "embedding_dim": [8, 16, 32, 64],
            "experts": [4, 8, 16],
            "expert": WIDTHS_SPACE,
            "dropout": "0.0..0.6",
            "train.parts.embeddings.weight_decay": DECAY_SPACE,
        }
    )
    settings: MultiTaskSettings

    @classmethod
    def defaults(cls, facts: DataFacts) -> Proposals:
        """See `Model.defaults`: the widths and the decay of the other click models."""
        size, (wide, narrow) = f"{facts.samples:,} samples", rules.hidden(facts)
        return {
            **rules.training(facts, {"embeddings": 1.0}),
            "embedding_dim": (rules.embedding_dim(facts), size),
            "expert": ((wide,), size),
            "tower": ((narrow,), size),
            "dropout": (0.1, size),
        }

    def __init__(self, spec: FeatureSpec, settings: MultiTaskSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.labels = spec.labels
        self.calibrations: dict[str, CalibrationMap] = {}  # of a trained model, for the labels besides the first
        self.make_inputs(
            embedding_widths(spec, self.ids, settings.embedding_dim, {}),
            (),
            combiner="sum",
            std=settings.embedding_std,
            max_rows=None,
            table_rows=table_rows,
        )
        number = settings.experts if settings.form == "mmoe" else 1
        self.pair_floats = max(self.width, number * max(settings.expert))
        dims = (self.width, *settings.expert)
        self.experts = nn.ModuleList(Mlp(dims, dropout=settings.dropout) for _ in range(number))
        self.gates = nn.ModuleList(nn.Linear(self.width, number) for _ in self.labels if number > 1)
        dims = (settings.expert[-1], *settings.tower)
        self.towers = nn.ModuleList(Mlp(dims, dropout=settings.dropout) for _ in self.labels)
        self.outs = nn.ModuleList(nn.Linear(settings.tower[-1], 1) for _ in self.labels)
        for out in self.outs:
            nn.init.xavier_uniform_(cast(nn.Linear, out).weight)

    def problems(self) -> list[str]:
        weights, labels = self.settings.label_weights, self.spec.labels
        found = [f"label_weights: {unknown('label', name, labels)}" for name in weights if name not in labels]
        if not any(weights.get(label, 1.0) for label in labels):
            found.append("label_weights: all are 0, so nothing is learned; give one label a weight above 0")
        return found + super().problems()

    def of_label(self, label: str) -> MultiTask:
        """This model, with the same weights, as one of that label: its logits and its calibration."""
        other = cast(MultiTask, shallow_copy(self))
        other.spec, other.calibration = self.spec.of_label(label), self.calibrations.get(label)
        return other

    def loss_needs(self) -> LossNeeds:
        """The features, and the labels besides the first."""
        return LossNeeds((*self.features(), *self.labels[1:]))

    def loss(self, batch: Batch) -> Tensor:
        """The mean over labels of their weighted cross-entropies, in nats."""
        weights = self.settings.label_weights
        logits = self.label_logits(batch)
        losses = [
            weights.get(label, 1.0) * cross_entropy(logits[:, place], batch[label])
            for place, label in enumerate(self.labels)
        ]
        return torch.stack(losses).mean()

    def forward(self, batch: Batch) -> Tensor:
        return self.label_logits(batch)[:, self._place]

    def label_logits(self, batch: Batch) -> Tensor:
        """Logits (B, T) of all labels, in the order of `labels`."""
        parts = self.inputs(batch)
        x = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        return self._logits([expert(x) for expert in self.experts], lambda gate: cast(Tensor, gate(x)))

    def logits_of(self, parts: Sequence[Part]) -> Tensor:
        return self._logits_of(parts)[..., self._place]

    def label_scores(self, request: Batch, items: Batch) -> Tensor:
        """Logits (R, N, T) of all labels, of every item for every request."""
        return self._logits_of(self.parts_of_pairs(self.columns_of(request), self.columns_of(items)))

    def _logits_of(self, parts: Sequence[Part]) -> Tensor:
        """Logits (R, N, T), with the first product of experts and gates summed over the parts."""
        experts = [cast(Mlp, expert) for expert in self.experts]
        hidden = [expert.after_first(linear_of_parts(expert.first, parts)) for expert in experts]
        return self._logits(hidden, lambda gate: linear_of_parts(gate, parts))

    @property
    def _place(self) -> int:
        return self.labels.index(self.spec.label)

    def _logits(self, hidden: Sequence[Tensor], product: Callable[[nn.Linear], Tensor]) -> Tensor:
        """Logits (..., T) from the experts' outputs (..., H) each and the product of a gate with x_0."""
        logits = []
        for place, (tower, out) in enumerate(zip(self.towers, self.outs, strict=True)):
            x = hidden[0]
            if len(self.gates):
                shares = torch.softmax(product(cast(nn.Linear, self.gates[place])), dim=-1)
                # Equation 6: the sum over experts i of g_k(x)_i f_i(x).
                x = (torch.stack([*hidden], dim=-1) @ shares.unsqueeze(-1)).squeeze(-1)
            logits.append(out(tower(x)).squeeze(-1))
        if self.settings.form == "esmm":
            logits = _products(logits)
        return torch.stack(logits, dim=-1)


def _products(logits: Sequence[Tensor]) -> list[Tensor]:
    """Logits of sigmoid(z_1), sigmoid(z_1) sigmoid(z_2), ..., each of the shape of z."""
    products, log_p = [logits[0]], F.logsigmoid(logits[0].float())
    for logit in logits[1:]:
        log_p = log_p + F.logsigmoid(logit.float())
        # logit(p) = ln p - ln(1 - p), with ln(1 - exp(x)) in the form that loses no digits near x = 0 and far from it.
        x = log_p.clamp(max=-SMALLEST)
        rest = torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))
        products.append(x - rest)
    return products


def labels_of(model: Model) -> tuple[str, ...]:
    """The labels that a model learned, that of its logits first."""
    if not isinstance(model, MultiTask):
        return (model.spec.label,)
    return model.spec.labels


def label_views(model: Model) -> Mapping[str, Model]:
    """A model of several labels as a model of each label besides the first; empty for any other model."""
    return {label: model.of_label(label) for label in labels_of(model)[1:]} if isinstance(model, MultiTask) else {}


def logits_of_labels(model: Model, batch: Batch, items: Batch | None = None) -> Tensor:
    """Logits (B, T) of rows, or of B items for one request, in fp32: a column for each of `labels_of`."""
    if not isinstance(model, MultiTask):
        return (model.score_items(batch, items)[0] if items else model(batch)).float().unsqueeze(1)
    logits = model.label_scores(batch, items)[0] if items else model.label_logits(batch)
    return logits.float()[:, [model.labels.index(label) for label in labels_of(model)]]


def probabilities_of_labels(model: Model, logits: Tensor) -> list[Tensor]:
    """Probabilities (B, 1) of each of `labels_of`, calibrated if the model is, from `logits_of_labels`."""
    first, *others = torch.split(logits, 1, dim=1)
    held = model.calibrations if isinstance(model, MultiTask) else {}
    calibrated = [
        held[label](each) if label in held else each for each, label in zip(others, labels_of(model)[1:], strict=True)
    ]
    return [model.probabilities(first), *map(torch.sigmoid, calibrated)]
