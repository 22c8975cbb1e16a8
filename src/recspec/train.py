"""The training loop that serves every model.

A step: a batch of rows, negatives drawn beside them where asked for, the model's own loss under the chosen precision,
gradients averaged over micro-batches and ranks, one optimizer step at the schedule's learning rate. Every draw is a
function of (seed, epoch, step), so a run that was killed continues to the same weights, bit for bit on a CPU.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, cast

import torch
from pydantic import Field, TypeAdapter, ValidationError, model_validator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recspec import __version__, bundle, checkpoint, config, kernels, machine, metrics, runlog
from recspec.batch import Batch, num_rows, take
from recspec.bundle import Card, Seen
from recspec.checkpoint import Checkpoint
from recspec.distributed import Ranks
from recspec.errors import CheckpointError, Interrupted, SettingsError, SpecError, TrainingError, listed, unknown
from recspec.evaluate import LOWER_IS_BETTER, PROTOCOLS, evaluate_model, id_feature, positives
from recspec.feature_spec import NO_FILES, FeatureSpec, Role
from recspec.layers import Embeddings
from recspec.loader import Loader, Part, Share
from recspec.machine import Affinity, cpu_is_intels, cpu_multiplies_bf16, parse_bytes
from recspec.models import MODELS
from recspec.models.base import Model, counts_of
from recspec.optim import (
    READ_BY,
    Optimizers,
    OptimizerSettings,
    numbers_beside,
    sparse_pays,
    updates_rows_exactly,
)
from recspec.outputs import locked_inside
from recspec.paths import confine, local
from recspec.replay import CudaRecorder, Recorder, Replay
from recspec.runlog import Event, RunLog
from recspec.sampling import NegativeSampler, holds_negatives, negatives_by_default, sampler_for
from recspec.sequences import Dice, follow_together, in_one_shape
from recspec.sharding import PlacementSettings, Shards, build, place
from recspec.storage import companions

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]


class TrainSettings(PlacementSettings, OptimizerSettings):
    """How a model is trained. A recipe's section `train`, and `--set train.NAME=VALUE`."""

    epochs: int = Field(10, ge=0, description="passes over the training rows")
    batch_size: int | None = Field(
        None,
        ge=1,
        description="rows a step over all ranks, drawn negatives included; when not given a power of two that makes "
        "200 to 400 steps of an epoch, at least 256, at most 65536 on a CPU and 131072 on a GPU",
    )
    accumulate: int = Field(1, ge=1, description="micro-batches a step is split into; their gradients are averaged")
    parts: dict[str, dict[str, object]] = Field(
        {},
        description="settings of the optimizer, its learning rate and schedule for a part of the model, where they "
        "differ: {wide: {optimizer: ftrl, learning_rate: 0.02}}; a part is the dotted beginning of parameter names",
    )
    frozen: tuple[str, ...] = Field(
        (), description="parts that keep their first weights, as [deep.embeddings]; named like `parts`"
    )
    sparse_gradients: Literal["auto", "never", "always"] = Field(
        "auto",
        description="update only the rows of embedding tables that a step has seen: auto where that is faster and "
        "the optimizer then does exactly the same",
    )
    embedding_backend: Literal["auto", "torch", "triton", "fbgemm"] = Field(
        "auto",
        description="what looks up and updates the rows of embedding tables: auto takes triton on a GPU that has it, "
        "else torch",
    )
    clip_norm: float | None = Field(None, gt=0, description="largest gradient norm; none when not given")
    average: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="decay of a running mean of the weights, which is then evaluated and saved; 0: none",
    )
    negatives: int | None = Field(
        None, ge=0, description="negatives drawn for each positive; 4 where rows are interactions, else 0"
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
    keep_best: bool = Field(True, description="save the weights of the best evaluation; the last ones otherwise")
    precision: Precision = Field("auto", description="arithmetic of the step; auto takes what the device does fastest")
    seed: int = Field(0, ge=0, description="of weights, order, negatives and dropout")
    deterministic: bool = Field(False, description="only deterministic kernels; slower on a GPU")
    compile: bool = Field(False, description="torch.compile the step; pays on a GPU")
    cuda_graphs: Literal["auto", "never", "always"] = Field(
        "never",
        description="record a step on a GPU and play it with one launch: auto where every step has the same shapes; "
        "always refuses where it can't be; not the default, since no GPU has run it yet",
    )
    threads: int | None = Field(
        None, ge=1, description="threads of a process's computations on a CPU; torch's number when not given"
    )
    affinity: Affinity = Field(
        "disabled", description="which cores each process of a machine keeps to; see docs/training.md"
    )
    memory_budget: str = Field("4GB", description="a split larger than this is streamed instead of held in memory")
    checkpoint_minutes: float = Field(
        10, ge=0, description="minutes between checkpoints within an epoch; 0: every step"
    )
    keep_checkpoints: int = Field(2, ge=1, description="how many of the newest checkpoints stay")
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
        """What is said of settings that no optimizer reads: they would be ignored in silence."""
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
        """Each part's optimizer: what stands under its name, and else what holds for all.

        Raises:
            ValueError: naming every unknown or impossible setting of a part.
        """
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


@dataclass(frozen=True)
class Result:
    """How a run ended: the bundle, the best evaluation and the speed."""

    bundle: Path
    best_epoch: float
    metrics: Mapping[str, Mapping[str, float]]
    samples_per_second: float
    seconds: float
    stopped: str


class Objective(nn.Module):
    """What DDP wraps: its forward is the model's loss, so an auxiliary loss needs no case in the loop."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        """The model's loss of a batch, a scalar."""
        return self.model.loss(batch)


class Average:
    """A running mean of a model's weights and buffers: a <- d a + (1 - d) w after each step.

    The decay d climbs as (1 + t) / (10 + t) with the step t up to its setting, so that the first weights, which know
    nothing, do not linger.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        # Buffers too: weights and the statistics of other weights' units (Dice) do not belong together.
        self.weights: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
        self.tensors = {name: weight.detach().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after step number `step`, the first being 0."""
        new = 1 - min(self.decay, (1 + step) / (10 + step))
        if all(mean.device.type == "cuda" for mean in self.tensors.values()):  # a launch for many of them
            torch._foreach_lerp_(list(self.tensors.values()), [self.weights[name] for name in self.tensors], new)
            return
        for name, mean in self.tensors.items():
            mean.lerp_(self.weights[name], new)

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from a checkpoint's mean; of what an older one lacks (buffers), from what the model has."""
        for name, mean in self.tensors.items():
            tensor = saved.get(name, self.weights[name].detach())
            if tensor.shape != mean.shape:
                raise ValueError(f"the average of '{name}' has shape {tuple(tensor.shape)}")
            mean.copy_(tensor)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model's weights are the mean until the end of the block."""
        own = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self._give(self.tensors)
        try:
            yield
        finally:
            self._give(own)

    @torch.no_grad()
    def _give(self, tensors: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(tensors[name])


class Statistics:
    """The running statistics of a model's units (Dice), where a step has several parts: micro-batches or ranks.

    They follow all rows of a step once. If each part moved them, they would move as often as there are parts, and each
    rank would have its own.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, accumulate: int) -> None:
        divided = ranks.world_size > 1 or accumulate > 1
        self.ranks, self.units = ranks, [unit for unit in model.modules() if divided and isinstance(unit, Dice)]
        for unit in self.units:
            unit.parts = []

    def leave_out_last(self) -> None:
        """Forget the last part: it was a row of filling."""
        for unit in self.units:
            assert unit.parts
            unit.parts.pop()

    def follow(self) -> None:
        """Take in the parts of a step, those of all ranks."""
        for unit in self.units:
            assert unit.parts is not None
            own = torch.stack(unit.parts) if unit.parts else unit.mean.new_zeros(0, 1 + 2 * len(unit.mean))
            follow_together(unit, self.ranks.gather(own))
            unit.parts.clear()


def train(
    model_name: str,
    spec: FeatureSpec,
    run: Path,
    *,
    settings: TrainSettings,
    model_settings: config.Settings,
    ranks: Ranks | None = None,
    resume: bool = False,
    on_event: Callable[[Event], None] = lambda _: None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Result:
    """Train a model on a prepared dataset and leave `run/bundle`, `run/checkpoints` and `run/log.jsonl`.

    Raises:
        SpecError: if the dataset lacks a role the model needs, or a split.
        SettingsError: if a setting does not fit the dataset.
        DataError: if another process is training in `run`, or a file that the dataset's metadata names is missing.
        CheckpointError: with `resume`, if there is nothing to continue from or it is of another run.
        TrainingError: if the loss is no longer a number, another rank is lost, or the disk is full.
        Interrupted: if `stop_requested` says so; a checkpoint is written first.
    """
    run, ranks = local(run, "RUN"), ranks or Ranks()
    before = torch.get_num_threads()
    threads, why_threads = machine.pick_threads(
        settings.threads, before, os.environ, machine.cores_at_once(), processes=ranks.local_world_size
    )
    if threads != before:
        torch.set_num_threads(threads)
    try:
        alone = locked_inside(run, "training in") if ranks.is_first else nullcontext()
        with ranks.guarded(lambda: _how_to_go_on(run)), alone:
            confine(run, WRITTEN)
            # torchrun starts a job's processes anew after one has died; what it refused the first time stays refused.
            again = ranks.restarted and ranks.any(ranks.is_first and _has_checkpoint(run) and _is_of_this_job(run))
            resume = resume or again
            before_us = _batch_size_of(run) if resume and settings.batch_size is None else None
            if before_us is not None:
                settings = settings.model_copy(update={"batch_size": before_us})
            training = TrainingRun(model_name, spec, run, settings, model_settings, ranks, on_event, stop_requested)
            training.why_threads = why_threads
            if before_us is not None:
                training.why_batch_size = "as when the run began"
            try:
                return training.train(resume)
            finally:
                training.log.close()
    finally:
        if threads != before:
            torch.set_num_threads(before)


# --- the run ---------------------------------------------------------------------------------------------------------


@dataclass
class _Progress:
    """Where a run stands: what a checkpoint's header holds."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_epoch: float = 0.0
    best_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    stale: int = 0
    stopped: str = ""


_PROGRESS = TypeAdapter(_Progress)


class TrainingRun:
    """One training run, from settings to a bundle."""

    def __init__(
        self,
        model_name: str,
        spec: FeatureSpec,
        run: Path,
        settings: TrainSettings,
        model_settings: config.Settings,
        ranks: Ranks,
        on_event: Callable[[Event], None] = lambda _: None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        if model_name not in MODELS:
            raise SettingsError(unknown("model", model_name, MODELS))
        self.model_name, self.spec, self.folder, self.settings = model_name, spec, run, settings
        self.ranks, self.stop_requested = ranks, stop_requested
        self.precision, why = pick_precision(settings.precision, ranks.device, steady=MODELS[model_name].steady_shapes)
        self.train_splits = _check_splits(spec, settings)
        companions(spec)  # which the bundle will hold: better missed now than after the last epoch
        self.valid = _valid_of(spec, settings)
        self.model, self.shards = self._make_model(model_settings)
        self.num_negatives = _num_negatives(spec, settings)
        self.why_not_recorded = self._why_not_recorded()
        loader = self._make_loader(held_out=False)
        samples = loader.num_rows * (1 + self.num_negatives)
        self.batch_size, self.why_batch_size = pick_batch_size(settings.batch_size, samples, ranks.device)
        self.settings = settings = settings.model_copy(update={"batch_size": self.batch_size})
        self.loader = loader.resized(max(1, self.batch_size // (1 + self.num_negatives)))
        self.sampler = self._make_sampler()
        self.steps_per_epoch = self.loader.num_batches
        trained = _without_frozen(self.model, settings.frozen)
        parts = {part: own for part, own in settings.part_settings.items() if part not in settings.frozen}
        self.optimizers = Optimizers(trained, settings, parts)
        self.embedding_backend = self._choose_embedding_backend()
        self.sparse = self._choose_sparse()
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=self.precision == "fp16")
        self.average = Average(self.model, settings.average) if settings.average else None
        self.statistics = Statistics(self.model, ranks, settings.accumulate)
        self.objective = self._make_objective()
        self.why_not_recorded = self.why_not_recorded or self._why_no_update_is_recorded()
        self.replay = self._make_replay()
        self.progress = _Progress()
        self.metric = settings.metric or _default_metric(spec)
        self.last_loss = torch.zeros(())
        self.saved_at = self.agreed_at = 0.0
        self.agreed_step = self.agree_at = 0
        self.log = RunLog(run, on_event, is_first=ranks.is_first, tensorboard=settings.tensorboard)
        self.why_precision = why
        self.why_threads = "as the caller's program has it"
        for note in (
            *_capped(self.model),
            *_not_divided(settings, ranks),
            *_not_watched(ranks),
            *_padding_unsaid(spec),
        ):
            self.log.note(note)

    def train(self, resume: bool) -> Result:
        """The whole run."""
        if resume:
            self._restore()
        elif self.ranks.is_first:
            _start_afresh(self.folder)
        if self.ranks.is_first:
            _sign(self.folder)
        self.ranks.barrier()
        self.log.open()
        self.log.write("start", **self._described(), resumed_at_step=self.progress.step)
        state, settings = self.progress, self.settings
        started = time.monotonic() - state.seconds
        with arithmetic(self.precision, settings.deterministic):
            self.saved_at = self.agreed_at = time.monotonic()
            self.agreed_step = self.agree_at = state.step
            while state.epoch < settings.epochs and not state.stopped:
                epoch_started, epoch_samples = time.monotonic(), state.samples
                loss_sum = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
                counted = state.samples
                for loss in self.epoch():
                    loss_sum += loss * (state.samples - counted)  # the last batch of an epoch has fewer rows
                    self.last_loss, counted = loss, state.samples
                    state.seconds = time.monotonic() - started
                    self._after_step(loss)
                state.epoch, state.batch = state.epoch + 1, 0
                seconds = time.monotonic() - epoch_started
                self._finish_epoch(
                    train_loss=self._finite(loss_sum / max(1, state.samples - epoch_samples)),
                    samples_per_second=(state.samples - epoch_samples) / max(seconds, 1e-9),
                    seconds=seconds,
                )
                state.seconds = time.monotonic() - started
                self._save()
        return self._finish()

    # --- one epoch ---------------------------------------------------------------------------------------------

    def epoch(self) -> Iterator[Tensor]:
        """Every step of the current epoch from where the run stands; gives each step's loss, still on the device."""
        self.model.train()
        state = self.progress
        for share in self.loader.batches(epoch=state.epoch, start=state.batch):
            self.optimizers.set_learning_rates(
                state.step, steps_per_epoch=self.steps_per_epoch, epochs=self.settings.epochs
            )
            loss = self._step(share)
            state.step += 1
            state.batch += 1
            state.samples += share.total_rows * (1 + self.num_negatives)
            yield loss

    def _step(self, share: Share) -> Tensor:
        """One optimizer step on this rank's share of a batch; gives the mean loss over all ranks' rows."""
        settings, state = self.settings, self.progress
        # The generator starts anew for each step, so that dropout is the same after a resume.
        torch.manual_seed(_mix(settings.seed, state.step, self.ranks.rank))
        batch = share.batch
        if self.sampler is not None:
            batch = self.sampler(share, epoch=state.epoch, step=state.step)
        if self.replay is not None:
            loss = self.replay(batch)
        else:
            loss = self._update(batch, share.num_rows, share.total_rows)
        if self.average is not None:
            self.average.update(state.step)
        return loss

    def _update(self, batch: Batch, own_share: int, all_shares: int) -> Tensor:
        """Gradients of a batch and a step of the optimizers; gives the mean loss over all ranks' rows.

        Args:
            batch: this rank's rows, drawn negatives included.
            own_share: this rank's rows without those; 0 where the batch is one row of filling.
            all_shares: likewise, those of all ranks.
        """
        settings, rows = self.settings, num_rows(batch)
        batch = self._with_counts(batch, rows if own_share else 0)
        # Every rank takes as many micro-batches as the one with most rows: they look up rows of each other's tables.
        most = math.ceil(all_shares / self.ranks.world_size) * (1 + self.num_negatives)
        micro = math.ceil(most / settings.accumulate)
        # DDP averages over ranks and the loss over rows: weights make it the mean over the rows of all ranks.
        weight = self.ranks.world_size * own_share / all_shares
        total = torch.zeros((), device=self.ranks.device)
        for start in range(0, most, micro):
            part = take(batch, slice(start, start + micro)) if settings.accumulate > 1 else batch
            own_rows = num_rows(part)
            if not own_rows:
                part = take(batch, slice(0, 1))
            with self._no_sync(start + micro >= most), self._autocast():
                loss = self.objective(part) * (weight * own_rows / rows)
            if not (own_rows and own_share):
                self.statistics.leave_out_last()
            self.scaler.scale(loss).backward()
            self.shards.collect()
            total += loss.detach()
        self.statistics.follow()
        self._share_sparse_gradients()
        self.shards.deliver(self._is_sparse)
        if settings.clip_norm is not None:
            self.optimizers.unscale(self.scaler)
            self._clip(settings.clip_norm)
        self.optimizers.step(self.scaler)
        self.scaler.update()
        self.optimizers.zero_grad()
        return total / self.ranks.world_size

    def _with_counts(self, batch: Batch, rows: int) -> Batch:
        """The batch, and how often each id that the loss counts occurs in the first `rows` rows of all ranks together.

        A batch that is not split holds all rows, and needs no such columns.
        """
        names = self.model.counted()
        if not names or (self.ranks.world_size == 1 and self.settings.accumulate == 1):
            return batch
        counts = {}
        for name in names:
            ids, times = torch.unique(self.ranks.gather(batch[name][:rows]), return_counts=True)
            # A row of filling may have an id that no row has; its loss has no weight.
            counts[counts_of(name)] = times[torch.searchsorted(ids, batch[name]).clamp(max=len(ids) - 1)]
        return {**batch, **counts}

    def _no_sync(self, last: bool) -> AbstractContextManager[None]:
        if isinstance(self.objective, DistributedDataParallel) and not last:
            return cast(AbstractContextManager[None], self.objective.no_sync())
        return nullcontext()

    def _autocast(self) -> AbstractContextManager[None]:
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        if half is None:
            return nullcontext()
        return cast(AbstractContextManager[None], torch.autocast(self.ranks.device.type, dtype=half))

    def _share_sparse_gradients(self) -> None:
        """The mean over ranks of the gradients that DDP leaves alone: everybody's rows, one rank's after another's."""
        if self.ranks.world_size == 1:
            return
        for parameter in self.sparse.values():
            assert parameter.grad is not None
            ids = self.ranks.gather(parameter.grad._indices()[0])
            values = self.ranks.gather(parameter.grad._values()) / self.ranks.world_size
            parameter.grad = torch.sparse_coo_tensor(ids.unsqueeze(0), values, parameter.shape, check_invariants=False)

    def _is_sparse(self, name: str) -> bool:
        """Whether the gradient of a store of embeddings holds the rows seen alone."""
        prefix, _, key = name.partition(".stores.")
        return key in cast(Embeddings, self.model.get_submodule(prefix)).sparse

    def _clip(self, most: float) -> None:
        """Scale all gradients down to a norm of at most `most`, the rows on other ranks counted too."""
        here = [p.grad for name, p in self.model.named_parameters() if p.grad is not None and name not in self.shards]
        there = [p.grad for name, p in self.model.named_parameters() if p.grad is not None and name in self.shards]
        norm = nn.utils.get_total_norm(here)
        if there:
            squares = torch.stack([gradient.square().sum().to(self.ranks.device) for gradient in there]).sum()
            norm = (norm.square() + self.ranks.sum(squares)).sqrt()
        nn.utils.clip_grads_with_norm_(self.model.parameters(), most, norm)

    def _after_step(self, loss: Tensor) -> None:
        """Log, checkpoint and stop where it is time; looks at the loss only then, so a GPU need not wait for us."""
        state, settings = self.progress, self.settings
        on_schedule = state.step % settings.log_every == 0
        if on_schedule:
            self.log.write(
                "step",
                step=state.step,
                steps=settings.epochs * self.steps_per_epoch,
                epoch=state.epoch + state.batch / self.steps_per_epoch,
                loss=self._finite(loss),
                learning_rate=next(iter(self.optimizers.learning_rates.values())),
                learning_rates=self.optimizers.learning_rates,
                samples_per_second=state.samples / max(state.seconds, 1e-9),
                seconds=state.seconds,
            )
        interrupted, due = False, settings.checkpoint_minutes == 0
        if self.ranks.world_size == 1 or state.step >= self.agree_at:  # agreeing costs a message
            interrupted, is_late = self._agree()
            due = due or is_late
        if interrupted or due:
            self._save()
        if interrupted:
            self.ranks.barrier()  # torchrun ends the others once one has ended, and the first is still writing
            self.log.write("interrupted", step=state.step)
            raise Interrupted(
                f"stopped at step {state.step} as asked; nothing is lost: the same command with --resume continues"
            )

    def _agree(self) -> tuple[bool, bool]:
        """Whether any rank was asked to stop, and whether a checkpoint is late: the same on all ranks.

        They ask each other every `AGREEING` seconds, told in steps, since all must ask after the same one: torchrun
        waits half a minute for those that it asks to stop.
        """
        now, step = time.monotonic(), self.progress.step
        steps = round((step - self.agreed_step) * AGREEING / max(1e-3, now - self.agreed_at))
        late = now - self.saved_at >= 60 * self.settings.checkpoint_minutes
        asked = self.ranks.sum(torch.tensor([self.stop_requested(), late, steps], dtype=torch.int64))
        self.agreed_at, self.agreed_step = time.monotonic(), step
        self.agree_at = step + max(1, int(asked[2]) // self.ranks.world_size)
        return bool(asked[0]), bool(asked[1])

    def _finite(self, loss: Tensor) -> float:
        """The mean loss over all ranks.

        Raises:
            TrainingError: if it is not a number; the checkpoints written so far are whole.
        """
        value = float(self.ranks.sum(loss.detach()).item())
        if not math.isfinite(value):
            raise TrainingError(
                f"the loss is {value} at step {self.progress.step}; lower train.learning_rate "
                f"({self.settings.learning_rate}), set train.clip_norm, or use train.precision=fp32 "
                f"(now {self.precision}); --resume continues from the last checkpoint, which is from before"
            )
        return value

    # --- between epochs ----------------------------------------------------------------------------------------

    def _finish_epoch(self, **figures: float) -> None:
        """Evaluate where it is time, remember the best weights, decide whether to stop."""
        state, settings = self.progress, self.settings
        metrics: Mapping[str, Mapping[str, float]] = {}
        due = state.epoch % settings.evaluate_every == 0 or state.epoch == settings.epochs
        evaluation_seconds = 0.0
        if due and self.valid:
            started = time.monotonic()
            with self._averaged():
                metrics = self._evaluate()
                self._remember(metrics)
            evaluation_seconds = time.monotonic() - started
        self.log.write(
            "epoch",
            epoch=state.epoch,
            epochs=settings.epochs,
            step=state.step,
            **figures,
            evaluation_seconds=evaluation_seconds,
            metrics=metrics,
            metric=self.metric,
            best=state.best,
            best_epoch=state.best_epoch,
        )

    def _evaluate(self) -> Mapping[str, Mapping[str, float]]:
        self.model.eval()
        if self.valid == HELD_OUT:
            return {"rows": self._evaluate_held_out()}
        protocol = self.metric.partition("/")[0]
        ranks = self.shards.evaluating
        return evaluate_model(self.model, self.spec, self.valid, protocols=(protocol,), ranks=ranks).metrics

    @cached_property
    def held_out(self) -> Loader:
        """Rows of train that `valid_share` keeps from training, in order."""
        return self._make_loader(held_out=True)

    def _evaluate_held_out(self) -> dict[str, float]:
        """AUC and log loss of the rows of train that `valid_share` keeps from training."""
        logits, labels = [torch.zeros(0)], [torch.zeros(0)]
        with torch.inference_mode():
            for share in self.held_out.batches():
                batch = take(share.batch, slice(0, share.num_rows))
                logits.append(self.model(batch).float().cpu())
                labels.append(batch[self.spec.label].float().cpu())
        ranks = self.shards.evaluating
        scores, truth = ranks.gather(torch.cat(logits)).numpy(), ranks.gather(torch.cat(labels)).numpy()
        found = {"auc": metrics.auc(scores, truth), "log_loss": metrics.log_loss(scores, truth)}
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def _remember(self, metrics: Mapping[str, Mapping[str, float]]) -> None:
        state, settings = self.progress, self.settings
        protocol, _, name = self.metric.partition("/")
        if name not in metrics.get(protocol, {}):
            known = [f"{of}/{metric}" for of, values in metrics.items() for metric in values]
            if self.metric == "rows/auc" and known:
                raise SettingsError(
                    f"{self.spec.folder}: the rows of '{self.valid}' are of one class, so AUC has no value there; "
                    f"set train.metric to one of {listed(known)}"
                )
            raise SettingsError(f"train.metric: {unknown('metric', self.metric, known)}")
        value = metrics[protocol][name]
        if state.best is None or (value < state.best if name in LOWER_IS_BETTER else value > state.best):
            state.best, state.best_epoch, state.stale = value, state.epoch, 0
            state.best_metrics = {of: dict(values) for of, values in metrics.items()}
            whole = self.shards.whole(self.model.state_dict())
            if self.ranks.is_first:
                path = self.folder / CHECKPOINTS / BEST
                checkpoint.write_tensors(path, whole, {"format": bundle.FORMAT, "epoch": state.epoch})
            else:
                checkpoint.take_part(whole)
        else:
            state.stale += 1
        reached = settings.target is not None and (
            value <= settings.target if name in LOWER_IS_BETTER else value >= settings.target
        )
        if reached:
            state.stopped = "target"
        elif settings.patience is not None and state.stale >= settings.patience:
            state.stopped = "patience"

    def _finish(self) -> Result:
        """Write the bundle and the last log line."""
        with self._averaged():
            return self._finish_with_weights()

    def _finish_with_weights(self) -> Result:
        state = self.progress
        self.model.eval()
        weights = self.shards.whole(self.model.state_dict())
        use_best = self.settings.keep_best and state.best is not None
        card = Card(
            model=self.model_name,
            settings=self.model.settings.model_dump(mode="json"),
            train=self.settings.model_dump(mode="json"),
            trained={
                "epoch": state.best_epoch if use_best else state.epoch,
                "epochs": state.epoch,
                "steps": state.step,
                "samples": state.samples,
                "seconds": round(state.seconds, 3),
                "samples_per_second": round(state.samples / max(state.seconds, 1e-9)),
                "splits": list(self.train_splits),
                "stopped": state.stopped or "epochs",
                "precision": self.precision,
                "device": str(self.ranks.device),
                "world_size": self.ranks.world_size,
                "torch": torch.__version__,
                "valid_metric": self.metric if state.best is not None else None,
            },
            metrics=state.best_metrics if use_best else {},
        )
        if self.ranks.is_first:
            best = self.folder / CHECKPOINTS / BEST
            bundle.save(
                self.folder / "bundle", self.model, card, seen=self._seen(), weights=best if use_best else weights
            )
        elif not use_best:
            checkpoint.take_part(weights)
        self.ranks.barrier()
        result = Result(
            self.folder / "bundle",
            state.best_epoch if use_best else state.epoch,
            state.best_metrics,
            state.samples / max(state.seconds, 1e-9),
            state.seconds,
            state.stopped or "epochs",
        )
        self.log.write(
            "done",
            bundle=str(result.bundle),
            stopped=result.stopped,
            epochs=state.epoch,
            best_epoch=result.best_epoch,
            best=state.best,
            metric=self.metric,
            metrics=state.best_metrics,
            samples_per_second=result.samples_per_second,
            seconds=result.seconds,
        )
        return result

    def _seen(self) -> Seen | None:
        """Which items each user acted on, for answers that leave them out."""
        if id_feature(self.spec, "user") is None or id_feature(self.spec, "item") is None:
            return None
        splits = [split for split in ("train", "valid") if split in self.spec.splits]
        known = positives(self.spec, splits)
        return Seen(torch.from_numpy(known.offsets), torch.from_numpy(known.items), torch.from_numpy(known.counts))

    def _averaged(self) -> AbstractContextManager[None]:
        """The model with the weights that are evaluated and saved."""
        return self.average.in_place() if self.average is not None else nullcontext()

    # --- checkpoints -------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Write a checkpoint on the first rank, unless the loss has left the numbers."""
        self.saved_at = time.monotonic()
        self._finite(self.last_loss)
        whole = self.shards.whole
        average = whole(self.average.tensors) if self.average is not None else {}
        tensors = whole(self.model.state_dict()), whole(self.optimizers.tensors())
        if not self.ranks.is_first:
            checkpoint.take_part(Checkpoint(*tensors, {}, average).tensors)
            return
        state = {
            "progress": asdict(self.progress),
            "model": self.model_name,
            "model_settings": self.model.settings.model_dump(mode="json"),
            "train": self.settings.model_dump(mode="json"),
            "spec": self.spec.content_hash(),
            "loader": self.loader.mode,
            "precision": self.precision,
            "scaler": self.scaler.state_dict(),
        }
        checkpoint.save(
            self.folder / CHECKPOINTS,
            Checkpoint(*tensors, state, average),
            step=self.progress.step,
            keep=self.settings.keep_checkpoints,
        )

    def _restore(self) -> None:
        """Continue from the newest whole checkpoint; every rank reads it."""
        saved, notes = checkpoint.load_latest(self.folder / CHECKPOINTS, self.shards.held)
        for note in notes:
            self.log.note(note)
        self._check_same_step(saved)
        self._check_same_run(saved)
        self._check_not_done(saved)
        try:
            self.progress = _PROGRESS.validate_python(saved.state["progress"])
            bad = [name for name, each in saved.weights.items() if not bool(cast(Tensor, each).isfinite().all())]
            if bad:
                raise ValueError(f"the weights {listed(bad)} hold numbers that are not finite")
            self.model.load_state_dict(dict(saved.weights))
            self.optimizers.restore(cast(Mapping[str, Tensor], saved.optimizer))
            self.scaler.load_state_dict(cast(dict[str, object], saved.state["scaler"]))
            if self.average is not None:
                self.average.restore(cast(Mapping[str, Tensor], saved.average))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{saved.path}: is not a checkpoint of this run: {error}") from None

    def _check_same_step(self, saved: Checkpoint) -> None:
        """Refuse to go on where ranks found different checkpoints: one may read what another can't."""
        step = self._progress_of(saved).step
        steps = self.ranks.gather(torch.tensor([step])).tolist()
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"{self.folder / CHECKPOINTS}: the newest whole checkpoints that ranks find are of steps "
                f"{', '.join(f'{found} (rank {rank})' for rank, found in enumerate(steps))}; every host must read the "
                "same files"
            )

    def _progress_of(self, saved: Checkpoint) -> _Progress:
        try:
            return _PROGRESS.validate_python(saved.state.get("progress"))
        except ValidationError as error:
            raise CheckpointError(f"{saved.path}: damaged: {error}") from None

    def _check_not_done(self, saved: Checkpoint) -> None:
        """Refuse fewer epochs than the run has behind it; they can't be taken back."""
        done = self._progress_of(saved).epoch
        if done > self.settings.epochs:
            raise CheckpointError(
                f"{saved.path}: the run has {done} epochs behind it, and train.epochs is {self.settings.epochs}; "
                f"ask for {done} or more, or start another run without --resume"
            )

    def _check_same_run(self, saved: Checkpoint) -> None:
        """Refuse to continue another run: its weights would train on under settings it never had."""
        may_change = {"affinity", "log_every", "checkpoint_minutes", "keep_checkpoints", "tensorboard"}
        may_change |= {*PlacementSettings.model_fields, "embedding_backend", "cuda_graphs", "threads"}
        parts = (self.settings, *self.settings.part_settings.values())
        if all(part.schedule in ("constant", "step") for part in parts):
            may_change.add("epochs")
        now = {
            "model": self.model_name,
            "the dataset's features": self.spec.content_hash(),
            "loader mode (train.memory_budget)": self.loader.mode,
            "precision": self.precision,
            **{f"settings.{name}": value for name, value in self.model.settings.model_dump(mode="json").items()},
            **{f"train.{name}": value for name, value in self.settings.model_dump(mode="json").items()},
        }
        state = saved.state
        for name in ("model_settings", "train"):
            if not isinstance(state.get(name, {}), dict):
                raise CheckpointError(f"{saved.path}: damaged: its '{name}' is {state[name]!r}; expected settings")
        then = {
            "model": state.get("model"),
            "the dataset's features": state.get("spec"),
            "loader mode (train.memory_budget)": state.get("loader"),
            "precision": state.get("precision"),
            **{f"settings.{k}": v for k, v in cast(dict[str, object], state.get("model_settings", {})).items()},
            **{f"train.{k}": v for k, v in cast(dict[str, object], state.get("train", {})).items()},
        }
        problems = [
            f"{name} is {now.get(name)!r}, but the run was started with {then.get(name)!r}"
            for name in {**now, **then}
            if now.get(name) != then.get(name) and name.removeprefix("train.") not in may_change
        ]
        if problems:
            raise CheckpointError.of(
                f"{saved.path}: this is another run; --resume continues the same one, with the same --recipe and --set",
                problems,
            )

    # --- what the run is made of -------------------------------------------------------------------------------

    def _make_model(self, model_settings: config.Settings) -> tuple[Model, Shards]:
        """The model with its first values, its tables where the settings and the memory want them."""
        settings, model_class = self.settings, MODELS[self.model_name]

        def make() -> Model:
            return model_class(self.spec, model_settings)

        with torch.device("meta"):
            optimizers = Optimizers(make().named_parameters(), settings, settings.part_settings)

        def bytes_per_row(store: str, width: int) -> float:
            own = optimizers.settings_of(store)
            whole_gradient = settings.clip_norm is not None or not updates_rows_exactly(own)
            return 4 * width * (1 + numbers_beside(own, width) + whole_gradient + (settings.average > 0))

        placement = place(make, self.ranks, settings, bytes_per_row)
        if placement.plan.pieces and self.precision == "fp16":
            raise SettingsError(
                f"train.precision is fp16, whose loss scaler knows only gradients that every rank has, and tables are "
                f"divided or left on the host ({placement.why}); take bf16 or tf32"
            )
        torch.manual_seed(settings.seed)
        return build(make, self.ranks, placement)

    def _make_loader(self, *, held_out: bool) -> Loader:
        share = self.settings.valid_share if self.valid == HELD_OUT else 0.0
        positives_per_batch = max(1, (self.settings.batch_size or 1) // (1 + self.num_negatives))
        used = {*(self.model.features() if held_out else self.model.loss_features()), self.spec.label}
        features = tuple(name for name in self.spec.columns(self.train_splits[0]) if name in used)
        loader = Loader(
            self.spec,
            self.train_splits,
            batch_size=positives_per_batch,
            features=features,
            seed=self.settings.seed,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            memory_budget=parse_bytes(self.settings.memory_budget),
            device=self.ranks.device,
            # A history's lists stay as wide as they must be where a step is not recorded.
            fixed_length=self.settings.compile or self.why_not_recorded is None,
            positives_only=self.num_negatives > 0
            and self.spec.has_series
            and ("valid" in self.train_splits or holds_negatives(self.spec)),
            shuffle=not held_out,
            part=Part(share, held_out, self.settings.seed) if share else None,
        )
        if loader.num_rows == 0:
            raise SpecError(f"{self.spec.folder}: the training splits {listed(self.train_splits)} hold no row")
        return loader

    def _make_sampler(self) -> NegativeSampler | None:
        if self.num_negatives == 0:
            return None
        return sampler_for(
            self.spec,
            self.num_negatives,
            features=self.model.loss_features(),
            distribution=self.settings.negative_distribution,
            power=self.settings.popularity_power,
            reject_positives=self.settings.reject_positives,
            splits=self.train_splits,
            seed=self.settings.seed,
            device=self.ranks.device,
        )

    def _choose_embedding_backend(self) -> kernels.Backend:
        """What looks up and updates embedding tables, told to all that do.

        Raises:
            SettingsError: naming all that stands in the way of what was asked for.
        """
        asked, device = self.settings.embedding_backend, self.ranks.device
        backend: kernels.Backend = "triton" if kernels.uses_triton(None, device) else "torch"
        problems = []
        if asked != "auto":
            backend = asked
            why_not = kernels.why_not(backend, device)
            problems += [why_not] if why_not else []
        tables = {name: module for name, module in self.model.named_modules() if isinstance(module, Embeddings)}
        for module in tables.values():
            module.backend = backend
        self.optimizers.use_backend(backend)
        if backend == "fbgemm":
            problems += self._fuse_updates(tables)
        if problems:
            raise SettingsError.of(f"train.embedding_backend is {backend}; auto takes what is there", problems)
        return backend

    def _fuse_updates(self, tables: Mapping[str, Embeddings]) -> list[str]:
        """Let FBGEMM update embedding tables in the backward pass; gives what needs their gradients."""
        settings = self.settings
        needs = {
            f"train.accumulate is {settings.accumulate}": settings.accumulate > 1,
            f"train.clip_norm is {settings.clip_norm}": settings.clip_norm is not None,
            "train.sparse_gradients is never": settings.sparse_gradients == "never",
            "train.compile is true": settings.compile,
            f"{self.ranks.world_size} processes train together": self.ranks.world_size > 1,
        }
        problems = [
            f"{what}, which needs gradients, and fbgemm updates tables in the backward pass and leaves none"
            for what, is_so in needs.items()
            if is_so
        ]
        for prefix, module in tables.items():
            for key, store in module.stores.items():
                name = f"{prefix}.stores.{key}"
                if not store.requires_grad or name in self.shards:
                    continue
                if decay := self.optimizers.settings_of(name).weight_decay:
                    problems.append(
                        f"{name}: weight_decay is {decay}, which moves every row of a table at every step, and fbgemm "
                        f"updates the rows of a batch alone; set train.parts.{prefix}.weight_decay=0"
                    )
                    continue
                try:
                    module.updates[key] = self.optimizers.fused_update(name)
                except SettingsError as error:
                    problems.append(str(error))
        return problems

    def _choose_sparse(self) -> dict[str, nn.Parameter]:
        """Switch on sparse gradients of embedding tables where the settings and the rows of a batch speak for them."""
        settings, chosen = self.settings, dict[str, nn.Parameter]()
        if settings.sparse_gradients == "never":
            return chosen
        if settings.clip_norm is not None:
            if settings.sparse_gradients == "always":
                raise SettingsError("train.clip_norm measures whole gradients; leave train.sparse_gradients at auto")
            return chosen
        rows = math.ceil(self.batch_size / self.ranks.world_size)
        for prefix, module in self.model.named_modules():
            for key, store in module.stores.items() if isinstance(module, Embeddings) else ():
                if key in module.updates or not store.requires_grad:
                    continue
                name = f"{prefix}.stores.{key}"
                divided = name in self.shards
                held = self.shards.num_rows(name) // self.ranks.world_size if divided else store.shape[0]
                pays = sparse_pays(held, store.shape[1], rows * module.ids_per_row(key))
                exact = updates_rows_exactly(self.optimizers.settings_of(name))
                if settings.sparse_gradients == "always" or (pays and exact and not settings.compile):
                    module.sparse.add(key)
                    if not divided:
                        chosen[name] = store
        return chosen

    def _why_not_recorded(self) -> str | None:
        """What keeps a step from being recorded, of what is known before there is a loader."""
        settings, ranks = self.settings, self.ranks
        steady = MODELS[self.model_name].steady_shapes or settings.compile or settings.cuda_graphs == "always"
        reasons = {
            f"the run is on {ranks.device.type}": ranks.device.type != "cuda",
            "train.cuda_graphs is never": settings.cuda_graphs == "never",
            f"{ranks.world_size} processes exchange gradients in every step": ranks.world_size > 1,
            "the loss counts the ids of all micro-batches": settings.accumulate > 1 and bool(self.model.counted()),
            "tables are divided or left on the host, and their rows are fetched": bool(self.shards.stores),
            "precision fp16 looks for overflows after every step; bf16 does not": self.precision == "fp16",
            f"{self.model_name} has other shapes at every step, those of its histories' events; with "
            "train.cuda_graphs=always they are padded": not steady,
        }
        return next((why for why, is_so in reasons.items() if is_so), None)

    def _why_no_update_is_recorded(self) -> str | None:
        """What keeps the updates of rows of embedding tables from being recorded."""
        for prefix, module in self.model.named_modules():
            for key in module.sparse if isinstance(module, Embeddings) else ():
                name = f"{prefix}.stores.{key}"
                why_not = self.optimizers.why_not_recorded(name)
                if not why_not and any(module.widths[each] == int(key) for each in module.lists):
                    why_not = "its lists hold another number of ids at every step"
                if not why_not and self.settings.compile:
                    why_not = "a compiled step knows no kernels for the rows seen"
                if why_not:
                    return f"{name} has sparse gradients, and {why_not}; train.sparse_gradients=never records it"
        return None

    def _make_replay(self) -> Replay | None:
        """What plays the step, where it may be recorded.

        Raises:
            SettingsError: if it must be, and can't.
        """
        why_not = self.why_not_recorded
        if why_not is not None:
            if self.settings.cuda_graphs == "always":
                raise SettingsError(f"train.cuda_graphs is always, but {why_not}; auto takes what is there")
            return None
        self.optimizers.keep_rates_on_device()

        def step(batch: Batch) -> Tensor:
            rows = num_rows(batch) // (1 + self.num_negatives)
            with in_one_shape():
                return self._update(batch, rows, rows)

        rows = self.loader.batch_size * (1 + self.num_negatives)
        return Replay(step, self._recorder(), rows=rows, tell=self._tell_of_recording)

    def _recorder(self) -> Recorder:
        return CudaRecorder(
            self.ranks.device,
            recording=self.optimizers.being_recorded,
            counters=self.optimizers.counters_on_host,
            forget=self.optimizers.zero_grad,
        )

    def _tell_of_recording(self, what: str) -> None:
        """Log whether steps are played.

        Raises:
            TrainingError: if they must be, and can't.
        """
        self.log.write("note", message=what)
        if self.settings.cuda_graphs == "always" and self.replay is not None and self.replay.why_not is not None:
            raise TrainingError(f"train.cuda_graphs is always, and there is {what}; auto goes on without")

    def _make_objective(self) -> nn.Module:
        objective: nn.Module = Objective(self.model)
        if self.settings.compile:
            objective = cast(nn.Module, torch.compile(objective))
        if self.ranks.world_size > 1:
            # Buffers are alike on all ranks (`Statistics`); else the first rank's would be sent in every step.
            buffers = [name for name, _ in self.model.named_buffers()]
            ignored = [f"model.{name}" for name in (*self.sparse, *self.shards.stores, *buffers)]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
                objective, ignored
            )
            devices = [self.ranks.device] if self.ranks.device.type == "cuda" else None
            objective = DistributedDataParallel(objective, device_ids=devices)
        return objective

    def _described(self) -> dict[str, object]:
        """The first log line: all that decides how the run goes."""
        return {
            "recspec": __version__,
            "torch": torch.__version__,
            "model": self.model_name,
            "model_settings": self.model.settings.model_dump(mode="json"),
            "train": self.settings.model_dump(mode="json"),
            "parameters": sum(p.numel() for p in self.model.parameters()) + self.shards.elsewhere,
            "trained_parameters": sum(self._size(name) for name, p in self.model.named_parameters() if p.requires_grad),
            "frozen": {
                part: sum(self._size(name) for name in _in_part(self.model, part)) for part in self.settings.frozen
            },
            "rows": self.loader.num_rows,
            "negatives": self.num_negatives,
            "samples_per_epoch": self.loader.num_rows * (1 + self.num_negatives),
            "steps_per_epoch": self.steps_per_epoch,
            "steps": self.steps_per_epoch * self.settings.epochs,
            "loader": self.loader.mode,
            "device": str(self.ranks.device),
            "world_size": self.ranks.world_size,
            "threads": torch.get_num_threads(),
            "precision": self.precision,
            "precision_reason": self.why_precision,
            "embedding_backend": self.embedding_backend,
            "sparse_gradients": list(self.sparse) + [name for name in self.shards.stores if self._is_sparse(name)],
            "cuda_graphs": self.replay is not None,
            "cuda_graphs_reason": self.why_not_recorded or "every step has the same shapes",
            "sharding": str(self.shards.placement.plan).splitlines() if self.shards.stores else None,
            "offloaded": sorted(self.shards.placement.offloaded),
            "placement_reason": self.shards.placement.why,
            "batch_size": self.batch_size,
            "choices": self._choices(),
            "not_read": {role: names for role, names in unread(self.model, self.spec).items() if names},
            "splits": list(self.train_splits),
            "metric": self.metric if self.valid else None,
        }

    def _choices(self) -> dict[str, str]:
        """What was chosen for this device, each with its reason; a setting of that name takes its place."""
        settings = self.settings
        recorded = "recorded after the first steps" if self.replay is not None else "none"
        on_gpu = self.ranks.device.type == "cuda"
        compiles = "pays on a GPU, and costs a minute at the start" if on_gpu else "does not pay on a CPU"
        return {
            "batch_size": f"{self.batch_size:,}: {self.why_batch_size}",
            "precision": f"{self.precision}: {self.why_precision}",
            "threads": f"{torch.get_num_threads()}: {self.why_threads}",
            "freed memory": machine.freed_memory(),
            "optimizer": self.optimizers.described,
            "memory_budget": f"{settings.memory_budget}: rows {self.loader.held}",
            "compile": f"{str(settings.compile).lower()}: {'as asked' if settings.compile else compiles}",
            "cuda_graphs": f"{recorded}: {self.why_not_recorded or 'every step has the same shapes'}",
        }

    def _size(self, name: str) -> int:
        """Numbers of a parameter, those that other ranks hold counted too."""
        parameter = self.model.get_parameter(name)
        return self.shards.num_rows(name) * parameter.shape[1] if name in self.shards else parameter.numel()


# --- choices ---------------------------------------------------------------------------------------------------------

AGREEING = 2.0
"""Seconds between the moments at which ranks agree whether to stop or to write a checkpoint."""

CHECKPOINTS = "checkpoints"
JOB = ".job"
BEST = "best.safetensors"
WRITTEN = ("bundle", CHECKPOINTS, f"{CHECKPOINTS}/{BEST}", JOB, runlog.LOG, runlog.CURVES)
"""What a run writes in its folder."""
HELD_OUT = "held out"


def pick_precision(asked: Precision, device: torch.device, *, steady: bool = True) -> tuple[str, str]:
    """The arithmetic of a step, and why; `steady` where all products have the same shapes at every step.

    Raises:
        SettingsError: if the device can't do what was asked at a usable speed.
    """
    if asked == "fp16" and device.type == "cpu":
        raise SettingsError("train.precision is fp16, which a CPU does many times slower than fp32; use bf16 or fp32")
    if asked != "auto":
        return asked, "as asked"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported():
            return "bf16", "this GPU multiplies bf16 at full speed"
        return "fp16", "this GPU has fp16 units and no bf16 units"
    if not steady:
        return (
            "fp32",
            "products of ever new shapes are slower in bf16 and through oneDNN, which prepares for each shape",
        )
    if cpu_multiplies_bf16():
        return "bf16", "this CPU multiplies bf16 faster than fp32"
    if cpu_is_intels():
        return "fp32", "this CPU multiplies nothing faster"
    return "tf32", "this CPU is not faster in bf16; products go through oneDNN, in fp32 arithmetic here"


STEPS_PER_EPOCH = 200
MOST_ROWS = {"cpu": 65536, "cuda": 131072}
FEWEST_ROWS = 256


def pick_batch_size(asked: int | None, samples: int, device: torch.device) -> tuple[int, str]:
    """Rows of a step, and why; `samples` is how many an epoch has."""
    if asked is not None:
        return asked, "as asked"
    most = MOST_ROWS.get(device.type, MOST_ROWS["cpu"])
    wanted = 1 << max(0, (samples // STEPS_PER_EPOCH).bit_length() - 1)
    size = min(most, max(FEWEST_ROWS, wanted))
    if wanted > most:
        return size, f"no more on a {device.type} unless asked, for an epoch of {samples:,} samples"
    if wanted < FEWEST_ROWS:
        return size, f"no fewer unless asked, for an epoch of {samples:,} samples"
    return size, f"200 to 400 steps for an epoch of {samples:,} samples"


def unread(model: Model, spec: FeatureSpec) -> dict[str, tuple[str, ...]]:
    """Features of each role that say something of a row, and that a model makes no use of."""
    roles: tuple[Role, ...] = ("user", "item", "context", "history", "negative_history")
    read = model.loss_features()
    return {role: tuple(name for name in spec.role(role) if name not in read) for role in roles}


def _without_frozen(model: nn.Module, frozen: Sequence[str]) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are trained, by name; those of frozen parts get no gradient.

    Raises:
        SettingsError: naming every part that is not there, or if nothing is left to train.
    """
    named = list(model.named_parameters())
    found = {part: [model.get_parameter(name) for name in _in_part(model, part)] for part in frozen}
    missing = [part for part, held in found.items() if not held]
    if missing:
        known = dict.fromkeys(name.split(".")[0] for name, _ in named)
        raise SettingsError.of("train.frozen", [unknown("part", part, known) for part in missing])
    for parameter in (parameter for held in found.values() for parameter in held):
        parameter.requires_grad_(False)
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not trained:
        raise SettingsError("train.frozen: every part is frozen; leave one to train")
    return trained


def _in_part(model: nn.Module, part: str) -> list[str]:
    """Names of the parameters of a part: the one of that name, and those that its dotted name begins."""
    return [name for name, _ in model.named_parameters() if name == part or name.startswith(f"{part}.")]


def _capped(model: nn.Module) -> list[str]:
    """What a largest table size did, in a line: which features share rows, and of how many ids."""
    capped = {
        name: rows
        for module in model.modules()
        if isinstance(module, Embeddings)
        for name, rows in module.rows_of_hashed.items()
    }
    size = getattr(getattr(model, "settings", None), "max_table_size", None)
    if size is None:
        return []
    if not capped:
        return [f"settings.max_table_size is {size:,}, and no table has more rows: nothing was capped"]
    return [f"settings.max_table_size caps the tables of {listed(capped)} at {size:,} rows; ids beyond share rows"]


def _not_divided(settings: PlacementSettings, ranks: Ranks) -> list[str]:
    if settings.shard_embeddings != "always" or ranks.world_size > 1:
        return []
    return ["train.shard_embeddings is always, and there is one process: nothing to divide; torchrun starts several"]


def _not_watched(ranks: Ranks) -> list[str]:
    if ranks.world_size == 1 or ranks.watch is not None:
        return []
    told = (
        "the first rank takes no connections from the others beside torch's own, so a rank that dies may be noticed "
        "as late as after 10 minutes; let its host accept them on any port"
    )
    return [told]


def _padding_unsaid(spec: FeatureSpec) -> list[str]:
    names = spec.leaves_padding_unsaid
    if not names:
        return []
    told = (
        f"{listed(names)} declare no padding, so id 0 counts as an event; if 0 fills them up, as in SIM's published "
        "records, train on what `recspec prepare amazon FOLDER OUT` makes of them"
    )
    return [told]


def _check_splits(spec: FeatureSpec, settings: TrainSettings) -> tuple[str, ...]:
    if not spec.splits:
        raise SpecError(f"{spec.folder}: {NO_FILES}")
    problems = [unknown("split", split, spec.splits) for split in settings.train_splits if split not in spec.splits]
    if problems:
        raise SpecError.of(f"{spec.folder}: train.train_splits", problems)
    return settings.train_splits


def _valid_of(spec: FeatureSpec, settings: TrainSettings) -> str:
    """The split that picks the best epoch; `HELD_OUT` rows of train where there is none; nothing (empty) at all."""
    if "valid" in spec.splits:
        return "" if "valid" in settings.train_splits else "valid"
    return HELD_OUT if settings.valid_share else ""


def _num_negatives(spec: FeatureSpec, settings: TrainSettings) -> int:
    """Negatives a positive: as asked, else 4 where rows are interactions of users with items, else none."""
    if settings.negatives is not None:
        if settings.negatives > 0:
            spec.require(("user", "item"), "drawing negatives (train.negatives)")
        return settings.negatives
    return negatives_by_default(spec)


def _default_metric(spec: FeatureSpec) -> str:
    """How far up the positive stands among its candidates, where there are enough of them; else AUC of all rows."""
    candidates = spec.metadata.get("test_samples_per_series")
    ranks = "valid" in spec.splits and isinstance(candidates, int) and candidates > 10
    return "sampled/ndcg@10" if ranks else "rows/auc"


def _mix(seed: int, step: int, rank: int) -> int:
    """A generator's seed for one step of one rank; neighbours get unlike ones (splitmix64)."""
    value = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (value ^ (value >> 31)) & (2**63 - 1)


@contextmanager
def arithmetic(precision: str, deterministic: bool) -> Iterator[None]:
    """Matrix products as the precision says, and deterministic kernels if asked, until the end of the block."""
    before = torch.get_float32_matmul_precision()
    if deterministic:  # cuBLAS asks the environment for it, and reads it when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_float32_matmul_precision({"fp32": "highest"}.get(precision, "medium"))
    if deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.use_deterministic_algorithms(was_deterministic)


def _start_afresh(folder: Path) -> None:
    """Refuse to write over a run that is there; a folder without one is made."""
    if (folder / "bundle").exists() or _has_checkpoint(folder):
        raise SettingsError(f"{folder}: holds a run already; continue it with --resume, or name another folder")
    folder.mkdir(parents=True, exist_ok=True)


def _sign(folder: Path) -> None:
    """Leave in a run's folder which job of torchrun trains it now."""
    if _this_job():
        (folder / JOB).write_text(_this_job(), encoding="utf-8")


def _is_of_this_job(folder: Path) -> bool:
    """Whether a run was begun, or gone on with, by the job that started this process."""
    file = folder / JOB
    return bool(_this_job()) and file.is_file() and file.read_text(encoding="utf-8") == _this_job()


def _this_job() -> str:
    """The agent of torchrun that started this process; empty without one."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{job} {platform.node()} {os.getppid()}" if job else ""


def _batch_size_of(folder: Path) -> int | None:
    """The batch size that a run has had so far."""
    settings = checkpoint.newest_state(folder / CHECKPOINTS).get("train")
    size = settings.get("batch_size") if isinstance(settings, dict) else None
    return size if isinstance(size, int) else None


def _has_checkpoint(folder: Path) -> bool:
    return checkpoint.newest(folder / CHECKPOINTS) is not None


def _how_to_go_on(folder: Path) -> str:
    """What to do after a run broke off."""
    step = checkpoint.newest(folder / CHECKPOINTS)
    if step is None:
        return "no checkpoint was written yet: start the same command again"
    return f"the same command with --resume continues from the checkpoint of step {step:,}"
