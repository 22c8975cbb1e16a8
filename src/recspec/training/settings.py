"""The settings of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from recspec import config
from recspec.distributed import PlacementSettings
from recspec.errors import listed
from recspec.evaluation import PROTOCOLS
from recspec.loading import Distribution
from recspec.machine import Affinity, parse_bytes
from recspec.training.optimizer_settings import READ_BY, OptimizerSettings
from recspec.training.tracking import check_address

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]


class TrainSettings(PlacementSettings, OptimizerSettings):
    """How a model is trained. A recipe's section `train`, and `--set train.NAME=VALUE`."""

    old_names: ClassVar[Mapping[str, config.OldName]] = {
        "cuda_graphs": config.OldName("compile", {"auto": "auto", "always": "auto"})
    }

    epochs: int = Field(
        10,
        ge=0,
        description="passes over the training rows; unless given, training goes on until valid stops improving",
    )
    minutes: float | None = Field(
        None,
        gt=0,
        description="minutes of training after which it stops and keeps the best epoch, those before a resume "
        "included; no limit by default",
    )
    batch_size: int | None = Field(
        None,
        ge=1,
        description="rows per step over all ranks, drawn negatives included; by default the power of two that gives "
        "200 to 400 steps an epoch, from 256 to 65536 on a CPU and 131072 on a GPU",
    )
    accumulate: int = Field(1, ge=1, description="number of micro-batches per step, whose gradients are averaged")
    parts: dict[str, dict[str, object]] = Field(
        {},
        description="optimizer, learning rate and schedule of parts of the model, for example {wide: {optimizer: "
        "ftrl, learning_rate: 0.02}}; a part is a dotted prefix of parameter names",
    )
    frozen: tuple[str, ...] = Field(
        (), description="parts that are not trained, for example [deep.embeddings]; named as in `parts`"
    )
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
        description="decay of a running mean of the weights, which is evaluated and saved instead of the weights; 0 "
        "turns it off",
    )
    negatives: int | None = Field(
        None,
        ge=0,
        description="negatives drawn for each positive; by default 4 if rows are interactions without prepared "
        "negatives, otherwise 0",
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
        description="auto: rows are drawn in proportion to the weights of their events, if the dataset has them; "
        "ignore: each row is drawn once an epoch",
    )
    train_splits: tuple[str, ...] = Field(
        ("train",), min_length=1, description="splits to train on: train, or train and valid"
    )
    valid_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of train held out for validation if there is no valid split; unless given, 0.1 of labelled "
        "rows",
    )
    metric: str | None = Field(
        None,
        description="PROTOCOL/METRIC on valid that selects the best epoch, for example sampled/ndcg@10; by default "
        "rows/log_loss if rows have labels, and full/ndcg@10 or sampled/ndcg@10 for interactions",
    )
    valid_users: int | None = Field(
        None,
        ge=1,
        description="number of users, drawn with the seed, whose items are ranked between epochs under protocol full; "
        "unless given, all, or fewer if that would cost more than an epoch",
    )
    evaluate_every: int = Field(1, ge=1, description="number of epochs between evaluations on valid")
    patience: int | None = Field(
        None,
        ge=1,
        description="number of evaluations without improvement after which training stops; no limit if epochs is given",
    )
    falling_patience: int | None = Field(
        None,
        ge=1,
        description="number of evaluations in a row that are worse than the best one by more than its standard error, "
        "after which training stops; no limit if epochs is given",
    )
    target: float | None = Field(None, description="value of the metric on valid at which training stops")
    keep_best: bool = Field(True, description="save the weights of the best evaluation; otherwise the last ones")
    calibration: Literal["none", "temperature", "isotonic"] = Field(
        "none",
        description="map of the trained model's logits that is fitted on valid and calibrates its probabilities; "
        "temperature: a line (Guo et al., 2017; Platt, 1999); isotonic: pool adjacent violators, piecewise linear",
    )
    precision: Precision = Field(
        "auto", description="arithmetic of a step; auto: the device's fastest (see docs/training.md)"
    )
    seed: int = Field(0, ge=0, description="seed of initial weights, row order, negatives and dropout")
    deterministic: bool = Field(False, description="use deterministic kernels only; slower on a GPU")
    compile: bool | Literal["auto"] = Field(
        False,
        description="compile the step with torch.compile; auto: no, since uncompiled steps were faster on CPUs and "
        "on a GPU. On one GPU, full batches run as CUDA graphs",
    )
    threads: int | None = Field(
        None, ge=1, description="number of CPU threads of each process; by default torch's number"
    )
    affinity: Affinity = Field("disabled", description="CPU cores of each process; see docs/training.md")
    memory_budget: str = Field(
        "4GB", description="largest size of a split that is held in memory; larger splits are streamed"
    )
    checkpoint_minutes: float = Field(
        10, ge=0, description="minutes between checkpoints within an epoch; 0 writes one after every step"
    )
    keep_checkpoints: int = Field(2, ge=1, description="number of newest checkpoints to keep")
    log_every: int = Field(50, ge=1, description="steps between log lines")
    tensorboard: bool = Field(True, description="write curves for TensorBoard if it is installed")
    mlflow: Annotated[str, AfterValidator(check_address)] | None = Field(
        None,
        description="address of MLflow that tracks the run, such as http://localhost:5000 or sqlite:///mlflow.db; "
        "none: no tracking; by default the environment variable MLFLOW_TRACKING_URI",
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
