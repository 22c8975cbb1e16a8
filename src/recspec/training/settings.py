"""The settings of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from recspec import config
from recspec.distributed import PlacementSettings
from recspec.errors import listed
from recspec.evaluation import PROTOCOLS
from recspec.machine import Affinity, parse_bytes
from recspec.training.optimizer_settings import READ_BY, OptimizerSettings

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]


class TrainSettings(PlacementSettings, OptimizerSettings):
    """How a model is trained. A recipe's section `train`, and `--set train.NAME=VALUE`."""

    old_names: ClassVar[Mapping[str, config.OldName]] = {
        "cuda_graphs": config.OldName("compile", {"auto": "auto", "always": "auto"})
    }

    epochs: int = Field(10, ge=0, description="passes over the training rows")
    batch_size: int | None = Field(
        None,
        ge=1,
        description="rows of a step over all ranks, drawn negatives included; by default a power of two that gives "
        "200 to 400 steps an epoch, at least 256, at most 65536 on a CPU and 131072 on a GPU",
    )
    accumulate: int = Field(1, ge=1, description="micro-batches of a step; their gradients are averaged")
    parts: dict[str, dict[str, object]] = Field(
        {},
        description="optimizer, learning rate and schedule of a part of the model where they differ from the rest: "
        "{wide: {optimizer: ftrl, learning_rate: 0.02}}; a part is the dotted beginning of parameter names",
    )
    frozen: tuple[str, ...] = Field(
        (), description="parts that keep their first weights, as [deep.embeddings]; named like `parts`"
    )
    sparse_gradients: Literal["auto", "never", "always"] = Field(
        "auto",
        description="update only the rows of embedding tables that a step has seen; auto: where that is faster and "
        "the optimizer gives the same result",
    )
    embedding_backend: Literal["auto", "torch", "triton", "fbgemm"] = Field(
        "auto",
        description="library that looks up and updates the rows of embedding tables; auto: triton on a GPU that has "
        "it, else torch",
    )
    clip_norm: float | None = Field(None, gt=0, description="largest gradient norm; no limit by default")
    average: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="decay of a running mean of the weights, which is then evaluated and saved; 0: no mean",
    )
    negatives: int | None = Field(
        None, ge=0, description="negatives drawn for each positive; by default 4 where rows are interactions, else 0"
    )
    negative_distribution: Literal["uniform", "popularity"] = Field("uniform", description="how negatives are drawn")
    popularity_power: float = Field(0.75, ge=0, description="exponent on popularity when negatives follow it")
    reject_positives: bool = Field(False, description="redraw negatives that the user acted on in training")
    train_splits: tuple[str, ...] = Field(("train",), min_length=1, description="train, or train and valid together")
    valid_share: float = Field(0.0, ge=0, lt=1, description="share of train held out where there is no valid split")
    metric: str | None = Field(
        None, description="PROTOCOL/METRIC on valid that picks the best epoch, as sampled/ndcg@10"
    )
    evaluate_every: int = Field(1, ge=1, description="epochs between evaluations on valid")
    patience: int | None = Field(None, ge=1, description="evaluations without improvement before stopping early")
    target: float | None = Field(None, description="stop as soon as the metric on valid reaches this")
    keep_best: bool = Field(True, description="save the weights of the best evaluation; otherwise the last ones")
    precision: Precision = Field("auto", description="arithmetic of the step; auto: the fastest of the device")
    seed: int = Field(0, ge=0, description="seed of weights, order, negatives and dropout")
    deterministic: bool = Field(False, description="use deterministic kernels only; slower on a GPU")
    compile: bool | Literal["auto"] = Field(
        False,
        description="compile the step with torch.compile; auto: on a GPU only. On one GPU, batches of one shape run as "
        "CUDA graphs",
    )
    threads: int | None = Field(
        None, ge=1, description="threads of a process's computations on a CPU; by default torch's number"
    )
    affinity: Affinity = Field(
        "disabled", description="cores that each process of a machine runs on; see docs/training.md"
    )
    memory_budget: str = Field("4GB", description="a split larger than this is streamed instead of held in memory")
    checkpoint_minutes: float = Field(
        10, ge=0, description="minutes between checkpoints within an epoch; 0: every step"
    )
    keep_checkpoints: int = Field(2, ge=1, description="number of newest checkpoints to keep")
    log_every: int = Field(50, ge=1, description="steps between log lines")
    tensorboard: bool = Field(True, description="write curves for TensorBoard where it is installed")

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
