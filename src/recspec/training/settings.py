"""The settings of training and of its optimizers, with what follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from recspec.base import config
from recspec.base.errors import listed
from recspec.base.machine import Affinity, parse_bytes
from recspec.evaluation import PROTOCOLS
from recspec.loading import Distribution, PlacementSettings
from recspec.training.tracking import check_address

Schedule = Literal["constant", "linear", "polynomial", "step"]


class OptimizerSettings(config.Settings):
    """How parameters are updated: the optimizer, its settings, and its learning rate over the run."""

    optimizer: Literal["adam", "adamw", "sgd", "adagrad", "rmsprop", "ftrl", "rowwise_adagrad"] = Field(
        "adam", description="name of the optimizer"
    )
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate; the schedule multiplies it")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="decay rates of Adam and AdamW"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of SGD and RMSprop")
    eps: float | None = Field(
        None,
        gt=0,
        description="term added to the optimizer's denominator; by default 1e-8 for Adam and AdamW, 1e-7 for "
        "RMSprop, 1e-10 for Adagrad and row-wise Adagrad. Not used by FTRL and SGD",
    )
    weight_decay: float = Field(
        0.0, ge=0, description="weight decay: decoupled in AdamW, otherwise added to the gradient"
    )
    rho: float = Field(0.9, ge=0, lt=1, description="decay rate of RMSprop's mean square")
    initial_accumulator: float | None = Field(
        None, ge=0, description="initial sum of squares of Adagrad and FTRL; by default 0 for Adagrad, 0.1 for FTRL"
    )
    l1: float = Field(0.0, ge=0, description="L1 regularisation of FTRL: adds l1 |w| to the loss")
    l2: float = Field(0.0, ge=0, description="L2 regularisation of FTRL: adds l2 w^2 to the loss")
    schedule: Schedule = Field(
        "constant",
        description="learning rate after warm-up: constant, linear or polynomial decay to zero, or reduced in steps",
    )
    decay_power: float = Field(2.0, gt=0, description="exponent of the polynomial schedule")
    decay_start: float = Field(0.0, ge=0, lt=1, description="fraction of the run after which the decay starts")
    decay_end: float = Field(
        1.0, gt=0, description="fraction of the run at which the rate reaches zero; above 1, the run ends earlier"
    )
    step_epochs: tuple[float, ...] = Field(
        (), description="epochs at which the learning rate is multiplied by step_factors, with schedule step"
    )
    step_factors: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        (0.1,), description="factors at step_epochs: one for each, or one for all"
    )
    warmup_epochs: float = Field(0.0, ge=0, description="number of epochs of linear warm-up; may be a fraction")

    @model_validator(mode="after")
    def _optimizer_agrees(self) -> OptimizerSettings:
        if self.schedule == "step" and not self.step_epochs:
            raise ValueError("schedule 'step' needs step_epochs, as [5, 8]")
        if self.schedule == "step" and len(self.step_factors) not in (1, len(self.step_epochs)):
            raise ValueError(
                f"step_factors holds {len(self.step_factors)} numbers for the {len(self.step_epochs)} of step_epochs; "
                "give one for each, or one for all"
            )
        if self.decay_end <= self.decay_start:
            raise ValueError(f"decay_end {self.decay_end} is not after decay_start {self.decay_start}")
        if self.optimizer == "ftrl" and self.initial_accumulator == 0:
            raise ValueError("initial_accumulator is 0, and FTRL divides by its root; give a number above 0, as 0.1")
        return self


READ_BY: Mapping[str, frozenset[str]] = {
    "betas": frozenset({"adam", "adamw"}),
    "momentum": frozenset({"sgd", "rmsprop"}),
    "eps": frozenset({"adam", "adamw", "adagrad", "rowwise_adagrad", "rmsprop"}),
    "rho": frozenset({"rmsprop"}),
    "initial_accumulator": frozenset({"adagrad", "rowwise_adagrad", "ftrl"}),
    "l1": frozenset({"ftrl"}),
    "l2": frozenset({"ftrl"}),
}
"""Settings that only some optimizers read, and those optimizers."""

_ADAM = {"step": "number", "exp_avg": "weight", "exp_avg_sq": "weight"}
KEPT: Mapping[str, Mapping[str, str]] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "sgd": {"momentum_buffer": "weight"},
    "adagrad": {"step": "number", "sum": "weight"},
    "rmsprop": {"step": "count", "square": "weight", "velocity": "weight", "row_step": "row"},
    "ftrl": {"accumulator": "weight", "linear": "weight"},
    "rowwise_adagrad": {"sum": "column"},
}
"""Each optimizer's state of a parameter: shaped as the weight, its rows or a column of them, or a number or a count."""


def numbers_beside(settings: OptimizerSettings, width: int) -> float:
    """Numbers of optimizer state for each weight of a table of that width."""
    kept = KEPT[settings.optimizer].items()
    kinds = [kind for name, kind in kept if settings.momentum or name not in ("momentum_buffer", "velocity")]
    return kinds.count("weight") + (kinds.count("row") + kinds.count("column")) / width


def updates_rows_exactly(settings: OptimizerSettings, *, from_zero: bool) -> bool:
    """Whether a sparse gradient gives the same table as the whole gradient; `from_zero`: its weights start at zero."""
    if settings.weight_decay or (settings.momentum and settings.optimizer in READ_BY["momentum"]):
        return False
    if settings.optimizer == "ftrl":
        return from_zero and settings.schedule == "constant" and not settings.warmup_epochs
    return settings.optimizer in ("sgd", "adagrad", "rowwise_adagrad", "rmsprop")


def moves_every_row(settings: OptimizerSettings) -> str | None:
    """The setting, if any, that makes the optimizer move rows without a gradient."""
    if settings.optimizer == "adamw":
        return "optimizer 'adamw'"
    if settings.momentum and settings.optimizer in READ_BY["momentum"]:
        return f"momentum {settings.momentum:g}"
    return f"weight_decay {settings.weight_decay:g}" if settings.weight_decay else None


def learning_rate_factor(settings: OptimizerSettings, step: int, *, steps_per_epoch: int, epochs: int) -> float:
    """The factor of the learning rate at step number `step`; 0 is the first.

    Warm-up and decay multiply each other, so a schedule may decay during warm-up. A decay starts at the end of the
    warm-up if `decay_start` is earlier.
    """
    total, warmup = max(1, epochs * steps_per_epoch), round(settings.warmup_epochs * steps_per_epoch)
    start, stop = max(warmup, round(settings.decay_start * total)), round(settings.decay_end * total)
    match settings.schedule:
        case "constant":
            factor = 1.0
        case "linear":
            factor = polynomial_decay(step, start=start, stop=stop, power=1.0)
        case "polynomial":
            factor = polynomial_decay(step, start=start, stop=stop, power=settings.decay_power)
        case "step":
            at = [round(epoch * steps_per_epoch) for epoch in settings.step_epochs]
            factor = step_decay(step, at=at, factors=settings.step_factors)
    return warm_up(step, steps=warmup) * factor


def warm_up(step: int, *, steps: int) -> float:
    """Linear climb: 1 / steps at the first step, 1 from step `steps - 1` on. Without a warm-up, always 1."""
    return min(1.0, (step + 1) / steps) if steps > 0 else 1.0


def polynomial_decay(step: int, *, start: int, stop: int, power: float) -> float:
    """1 up to step `start`, then ((stop - step) / (stop - start)) ** power, and 0 from `stop` on."""
    if step <= start:
        return 1.0
    return float((max(0, stop - step) / (stop - start)) ** power) if stop > start else 0.0


def step_decay(step: int, *, at: Sequence[int], factors: Sequence[float]) -> float:
    """The product of the factors of the entries of `at` that the run has reached; a single factor serves them all."""
    each = factors if len(factors) > 1 else [*factors] * len(at)
    return math.prod(factor for reached, factor in zip(at, each, strict=True) if step >= reached)


Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]


class TrainSettings(PlacementSettings, OptimizerSettings):
    """How a model is trained. A recipe's section `train`, and `--set train.NAME=VALUE`."""

    epochs: int = Field(
        10,
        ge=0,
        description="passes over the training rows; unless given, until valid stops improving",
    )
    minutes: float | None = Field(
        None,
        gt=0,
        description="limit of minutes, those before a resume included; no limit by default",
    )
    batch_size: int | None = Field(
        None,
        ge=1,
        description=(
            "rows per step over all ranks, drawn negatives included; by default a power of two for 200 to 400 steps an"
            " epoch, from 256 to 65536 (131072 on a GPU)"
        ),
    )
    accumulate: int = Field(1, ge=1, description="number of micro-batches per step, whose gradients are averaged")
    parts: dict[str, dict[str, object]] = Field(
        {},
        description=(
            "optimizer, learning rate and schedule of parts of the model, such as {wide: {optimizer: ftrl, "
            "learning_rate: 0.02}}"
        ),
    )
    frozen: tuple[str, ...] = Field((), description="parts that are not trained, such as [deep.embeddings]")
    sparse_gradients: Literal["auto", "never", "always"] = Field(
        "auto",
        description="update only the rows of embedding tables that a step uses; auto: if that is faster and the "
        "result is the same",
    )
    embedding_backend: Literal["auto", "torch", "triton", "fbgemm"] = Field(
        "auto",
        description="library that looks up and updates the rows of embedding tables; auto: triton on a GPU that has "
        "it, otherwise torch",
    )
    clip_norm: float | None = Field(None, gt=0, description="largest gradient norm; no limit by default")
    average: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="decay of a running mean of the weights, which evaluations and the bundle take; 0 turns it off",
    )
    negatives: int | None = Field(
        None,
        ge=0,
        description=(
            "negatives drawn for each positive; by default 4 for interactions without prepared negatives, otherwise 0"
        ),
    )
    negative_distribution: Distribution = Field(
        "uniform", description="distribution of drawn negatives: uniform, or by popularity"
    )
    popularity_power: float = Field(
        0.75, ge=0, description="exponent of an item's popularity, with negative_distribution popularity"
    )
    reject_positives: bool = Field(False, description="redraw negatives that the user acted on in training")
    event_weights: Literal["auto", "ignore"] = Field(
        "auto",
        description="auto: draw rows in proportion to the weights of their events; ignore: each row once an epoch",
    )
    train_splits: tuple[str, ...] = Field(
        ("train",), min_length=1, description="splits to train on: train, or train and valid"
    )
    valid_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of train held out if there is no valid split; unless given, 0.1 of labelled rows",
    )
    metric: str | None = Field(
        None,
        description=(
            "PROTOCOL/METRIC on valid that selects the best epoch, such as sampled/ndcg@10; by default as the kind of "
            "data needs"
        ),
    )
    valid_users: int | None = Field(
        None,
        ge=1,
        description=(
            "users ranked between epochs under protocol full; by default all, or fewer if they would cost more than an"
            " epoch"
        ),
    )
    evaluate_every: int = Field(1, ge=1, description="number of epochs between evaluations on valid")
    patience: int | None = Field(
        None,
        ge=1,
        description="evaluations without improvement after which training stops; no limit if epochs is given",
    )
    falling_patience: int | None = Field(
        None,
        ge=1,
        description=(
            "evaluations in a row, clearly worse than the best, after which training stops; no limit if epochs is given"
        ),
    )
    plateau_cuts: int = Field(
        0,
        ge=0,
        le=10,
        description=(
            "how often training, instead of stopping, goes back to the best weights with a tenth of the learning rate"
        ),
    )
    label: str | None = Field(
        None, description="of several labels, the one to learn or to judge the epochs by; by default the first"
    )
    target: float | None = Field(None, description="value of the metric on valid at which training stops")
    keep_best: bool = Field(True, description="save the weights of the best evaluation; otherwise the last ones")
    calibration: Literal["none", "temperature", "isotonic"] = Field(
        "none", description="calibration of probabilities on valid: temperature (a line) or isotonic (piecewise linear)"
    )
    precision: Precision = Field(
        "auto", description="arithmetic of a step; auto: the device's fastest (see docs/training.md)"
    )
    seed: int = Field(0, ge=0, description="seed of initial weights, row order, negatives and dropout")
    deterministic: bool = Field(False, description="use deterministic kernels only; slower on a GPU")
    compile: bool | Literal["auto"] = Field(
        False, description="compile the step with torch.compile; auto: no, because uncompiled steps were faster"
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="number of CPU threads of each process; by default torch's, or one where that is as fast",
    )
    affinity: Affinity = Field("disabled", description="CPU cores of each process; see docs/training.md")
    memory_budget: str = Field("4GB", description="largest split held in memory; larger ones are streamed")
    checkpoint_minutes: float = Field(
        10, ge=0, description="minutes between checkpoints within an epoch; 0 writes one after every step"
    )
    keep_checkpoints: int = Field(2, ge=1, description="number of newest checkpoints to keep")
    log_every: int = Field(50, ge=1, description="steps between log lines")
    tensorboard: bool = Field(True, description="write curves for TensorBoard if it is installed")
    mlflow: Annotated[str, AfterValidator(check_address)] | None = Field(
        None,
        description=(
            "address of MLflow, such as sqlite:///mlflow.db; none: no tracking; by default the variable "
            "MLFLOW_TRACKING_URI"
        ),
    )

    @model_validator(mode="after")
    def _agree(self) -> TrainSettings:
        if problems := self._unread_settings():
            raise ValueError("; ".join(problems))
        protocol, _, metric = (self.metric or "rows/auc").partition("/")
        if protocol not in PROTOCOLS or not metric:
            raise ValueError(
                f"metric is '{self.metric}'; expected PROTOCOL/METRIC with one of the protocols {listed(PROTOCOLS)}, "
                "as rows/auc or sampled/ndcg@10"
            )
        if "test" in self.train_splits:
            raise ValueError("train_splits names 'test', which only `recspec evaluate` opens")
        if self.batch_size is not None and self.accumulate > self.batch_size:
            raise ValueError(f"accumulate {self.accumulate} is more than batch_size {self.batch_size}")
        parse_bytes(self.memory_budget)
        return self

    def _unread_settings(self) -> list[str]:
        """Messages about settings that no chosen optimizer reads; they would be ignored silently."""
        parts = self.part_settings
        taken = {self.optimizer, *(part.optimizer for part in parts.values())}
        given = [("", self.model_dump(), taken)]
        given += [(f"parts.{part}.", own, {parts[part].optimizer}) for part, own in self.parts.items()]
        return [
            f"{where}{name} is {values[name]}, which {listed(sorted(readers))} read; the optimizer is "
            f"{listed(sorted(used))}"
            for where, values, used in given
            for name, readers in READ_BY.items()
            if name in values and values[name] != type(self).model_fields[name].default and not readers & used
        ]

    @property
    def part_settings(self) -> dict[str, OptimizerSettings]:
        """The optimizer of each part: its own settings over the shared ones."""
        shared = self.model_dump(include=set(OptimizerSettings.model_fields))
        made, problems = {}, []
        for part, own in self.parts.items():
            try:
                made[part] = OptimizerSettings.model_validate({**shared, **own})
            except ValidationError as error:
                problems += [f"parts.{part}: {what}" for what in config.settings_problems(error, OptimizerSettings)]
        if problems:
            raise ValueError("; ".join(problems))
        return made
