"""The training of every model: by steps, or fitted in one go.

A step takes a batch of rows with drawn negatives, the model's own loss in the chosen precision, gradients averaged over
micro-batches and ranks, and one optimizer step at the schedule's learning rate. Every draw is a function of (seed,
epoch, step), so a killed run continues to the same weights, bit for bit on a CPU.

In one go, the first rank fits and the others wait. Nothing is left to continue: a stopped fit starts again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recspec.base import config
from recspec.base.errors import Interrupted, SettingsError, TrainingError
from recspec.base.files import confine, local, locked_inside
from recspec.base.signals import stopping_at_once
from recspec.bundle import Card, DataRecord, RunRecord, run_record
from recspec.bundle import folder as bundle
from recspec.data.storage import label_columns
from recspec.evaluation import (
    BoostedFit,
    EvaluateSettings,
    EvaluationTask,
    Fitted,
    ItemFit,
    RowFit,
    Tried,
    metric_value,
    score_rows,
    warnings,
)
from recspec.feature_spec import FeatureSpec
from recspec.loading import Ranks
from recspec.metrics import Calibration
from recspec.models import FittedItemModel, FittedModel, FittedRowModel, LightGbm, LogisticRegression, find_model
from recspec.training import run_folder
from recspec.training.plan import FitPlan, Plan, TrainingPlan, make_fit_plan, make_plan
from recspec.training.product_rates import arithmetic
from recspec.training.result import (
    Result,
    calibrate,
    cheap_baselines,
    inform,
    judge,
    keeps_best,
    log_end,
    seen_of,
    values_of,
    write_bundle,
)
from recspec.training.run_folder import Event, Progress, RunCheckpoints, RunLog
from recspec.training.settings import TrainSettings
from recspec.training.step import Built, TrainingStep, WeightAverage, build_model, make_sampler
from recspec.training.step_threads import StepThreads
from recspec.training.tracking import TrackedSearch, Tracking
from recspec.training.validation import Validation

CONSENSUS_INTERVAL_S = 2.0
"""Seconds between agreements of ranks; torchrun gives processes that it stops half a minute."""


def train(
    model_name: str,
    spec: FeatureSpec,
    run: Path,
    *,
    settings: TrainSettings,
    model_settings: config.Settings,
    ranks: Ranks | None = None,
    resume: bool = False,
    force: bool = False,
    baselines: bool = False,
    on_event: Callable[[Event], None] = lambda _: None,
    stop_requested: Callable[[], bool] = lambda: False,
    part_of: TrackedSearch | None = None,
) -> Result:
    """Train a model on a prepared dataset; writes `run/bundle`, `run/checkpoints`, `run/log.jsonl`, `run/run.json`
    and `run/recipe.yaml`.

    With `force`, a run that the folder holds is removed once the plan of the new one is made.

    With `baselines` the model stands beside classic ones on valid, as far as they take a tenth of the time of training.

    `part_of` is the search that the run is a part of, for its tracking.

    Raises:
        SpecError: if the dataset lacks a role that the model needs, or a split.
        SettingsError: if a setting does not fit the dataset.
        DataError: if another process is training in `run`, or a file that the dataset's metadata names is missing.
        CheckpointError: with `resume`, if there is nothing to continue from or it is of another run.
        TrainingError: if the loss is no longer a number, another rank is lost, or the disk is full.
        Interrupted: if `stop_requested` says so; a checkpoint is written first.
    """
    if resume and force:
        raise SettingsError("resume continues the run of the folder and force replaces it; leave one of them out")
    run, ranks = local(run, "RUN"), ranks or Ranks()
    alone = locked_inside(run, "training in", holds=run_folder.BUNDLE) if ranks.is_first else nullcontext()
    with ranks.guarded(lambda: run_folder.how_to_go_on(run)), alone:
        confine(run, run_folder.WRITTEN)
        # After a process has died, torchrun starts the job's processes anew. A run that it refused stays refused.
        continues = ranks.is_first and run_folder.has_checkpoint(run) and run_folder.is_of_this_job(run)
        resume = resume or (ranks.restarted and ranks.any(continues))
        plan = plan_run(model_name, spec, run, settings, model_settings, ranks, resume=resume)
        if force and not resume and ranks.is_first:
            run_folder.remove_run(run)
        more: dict[str, Any] = {"baselines": baselines, "part_of": part_of}
        with using_threads(plan.threads.value):
            if isinstance(plan, FitPlan):
                result = run_fit(plan, run, ranks, on_event, stop_requested, resume=resume, **more)
            else:
                training = TrainingRun(plan, run, ranks, on_event, stop_requested, **more)
                with closing(training.log):
                    result = training.train(resume)
        if ranks.is_first:
            run_folder.write_recipe(run, str(spec.metadata.get("dataset") or spec.folder.name))
        return result


def plan_run(
    model_name: str,
    spec: FeatureSpec,
    run: Path,
    settings: TrainSettings,
    model_settings: config.Settings,
    ranks: Ranks,
    *,
    resume: bool,
) -> TrainingPlan | FitPlan:
    """The plan of `train` with the same arguments; raises what `make_plan` raises and writes nothing.

    Raises:
        Interrupted: at a signal to stop.
    """
    with stopping_at_once(NOT_BEGUN) if ranks.world_size == 1 else nullcontext():
        if issubclass(find_model(model_name), FittedModel):
            return make_fit_plan(model_name, spec, settings, model_settings, ranks, resume=resume)
        resumed = run_folder.resumed_settings(run) if resume else None
        return make_plan(model_name, spec, settings, model_settings, ranks, propose=True, resumed_settings=resumed)


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Let torch compute with so many threads until the end of the block."""
    before = torch.get_num_threads()
    if number != before:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number != before:
            torch.set_num_threads(before)


CUT = 0.1
"""Factor of the learning rate where valid no longer improves; see `train.plateau_cuts`."""
NOT_BEGUN = "stopped as asked before training began; start the same command again"
EVALUATION_SECONDS = 5.0
"""Time for an evaluation to end after a signal to stop; then the run goes on from its last checkpoint."""


class TrainingRun:
    """The execution of a plan, which decides nothing by itself."""

    def __init__(
        self,
        plan: TrainingPlan,
        folder: Path,
        ranks: Ranks,
        on_event: Callable[[Event], None] = lambda _: None,
        stop_requested: Callable[[], bool] = lambda: False,
        *,
        baselines: bool = False,
        part_of: TrackedSearch | None = None,
        start: Callable[[Built], Sequence[str]] = lambda _: (),
    ) -> None:
        """Build everything; `start` may give the model other weights than its first ones, and returns notes."""
        self.baselines = baselines
        self.plan, self.settings, self.folder, self.ranks = plan, plan.settings, folder, ranks
        self.built = build_model(plan, ranks)
        self.start_notes = start(self.built)
        self.model, self.optimizers = self.built.model, self.built.optimizers
        self.loader, self.sampler = plan.loader, make_sampler(self.built)
        self.step = TrainingStep(self.built)
        self.average = WeightAverage(self.model, self.settings.average) if self.settings.average else None
        self.validation = Validation(self.built)
        self.checkpoints = RunCheckpoints(self.built, folder, self.step.scaler, self.average)
        self.consensus = RankConsensus(ranks, self.settings.checkpoint_minutes, stop_requested)
        self.log = _log_of(plan, folder, ranks, on_event, part_of)
        self.progress, self.last_loss = Progress(), torch.zeros(())
        self.record: RunRecord | None = None

    def train(self, resume: bool) -> Result:
        """Run from the first step, or from the newest checkpoint, to the bundle."""
        notes = [*self.plan.notes, *self.start_notes]
        if resume:
            self.progress, more = self.checkpoints.restore()
            notes += more
            notes += self.validation.resume(self.progress)
            self._recall_best()
        elif self.ranks.is_first:
            run_folder.start_afresh(self.folder)
        if self.ranks.is_first:
            run_folder.sign(self.folder)
            on: dict[str, Any] = {"device": str(self.ranks.device), "world_size": self.ranks.world_size}
            on |= {"precision": self.plan.precision.value, "threads": self.plan.threads.value}
            self.record = _begin_record(self.plan, self.folder, "trained", **on)
        self.ranks.barrier()
        if self.ranks.is_first:
            self.log.begin(notes, **self.plan.described(), resumed_at_step=self.progress.step)
        state, settings = self.progress, self.settings
        started = time.monotonic() - state.seconds
        threads = StepThreads(self.plan.threads.value if self.plan.measures_threads else 1, self._note)
        with arithmetic(self.plan.precision.value, settings.deterministic):
            self.consensus.start(state.step)
            while state.epoch < settings.epochs and not state.stopped:
                epoch_started, epoch_samples = time.monotonic(), state.samples
                bytes_before = self.loader.bytes_read
                loss_sum = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
                counted = state.samples
                for loss in threads.over(self.epoch(), lambda: state.samples):
                    loss_sum += loss * (state.samples - counted)  # the last batch of an epoch has fewer rows
                    self.last_loss, counted = loss, state.samples
                    state.seconds = time.monotonic() - started
                    if self._after_step(loss):
                        break
                if state.batch >= self.plan.steps_per_epoch:
                    state.epoch, state.batch = state.epoch + 1, 0
                seconds, samples = time.monotonic() - epoch_started, state.samples - epoch_samples
                train_loss, speed = self._finite(loss_sum / max(1, samples)), samples / max(seconds, 1e-9)
                read = self.ranks.gather(torch.tensor([self.loader.bytes_read - bytes_before])).tolist()
                self._finish_epoch(train_loss=train_loss, samples_per_second=speed, seconds=seconds, bytes_read=read)
                state.seconds = time.monotonic() - started
                if not state.stopped and self.ranks.any(self._is_late()):
                    state.stopped = "minutes"
                self._save()
        return self._finish()

    def epoch(self) -> Iterator[Tensor]:
        """Every step of the current epoch from the current batch.

        Yields the mean loss of each step over the rows of all ranks, still on the device.
        """
        self.model.train()
        state, plan, epochs = self.progress, self.plan, self.settings.epochs
        if state.batch == 0:
            state.lanes = self.ranks.world_size
        for share in self.loader.batches(epoch=state.epoch, start=state.batch, lanes=state.lanes):
            self.optimizers.set_learning_rates(
                state.step, steps_per_epoch=plan.steps_per_epoch, epochs=epochs, scale=CUT**state.cuts
            )
            # The generator starts anew for each step, so that dropout is the same after a resume.
            # On a CPU, `torch.manual_seed` takes 0.2 ms: it notes the stack for each kind of device that may follow.
            seed = torch.default_generator.manual_seed if self.ranks.device.type == "cpu" else torch.manual_seed
            seed(_mix(self.settings.seed, state.step, self.ranks.rank))
            draw = self.sampler
            batch = share.batch if draw is None else draw(share, epoch=state.epoch, step=state.step)
            loss = self.step(batch, share.num_rows, share.total_rows)
            if self.average is not None:
                self.average.update(state.step)
            state.step += 1
            state.batch += 1
            state.samples += share.total_rows * plan.samples_per_row
            yield loss

    def _is_late(self) -> bool:
        """Whether this rank has trained for `train.minutes`."""
        return self.settings.minutes is not None and self.progress.seconds >= 60 * self.settings.minutes

    def _after_step(self, loss: Tensor) -> bool:
        """Log, checkpoint and stop when it is time; returns whether the minutes of training are over.

        Reads the loss only to log it, so that a GPU is not kept waiting.
        """
        state, settings = self.progress, self.settings
        if state.step % settings.log_every == 0:
            self.log.write(
                "step",
                step=state.step,
                steps=settings.epochs * self.plan.steps_per_epoch,
                epoch=state.epochs(self.plan.steps_per_epoch),
                loss=self._finite(loss),
                learning_rate=next(iter(self.optimizers.learning_rates.values())),
                learning_rates=self.optimizers.learning_rates,
                samples_per_second=state.samples_per_second,
                seconds=state.seconds,
            )
        stop, due, late = self.consensus.after(state.step, late=self._is_late())
        if due:
            self._save()
        if stop:
            self.ranks.barrier()  # torchrun ends the others once one has ended, and the first is still writing
            self.log.write("interrupted", step=state.step)
            done = f"stopped at step {state.step} as asked"
            raise Interrupted(f"{done}; nothing is lost: the same command with --resume continues")
        if late:
            state.stopped = "minutes"
        return late

    def _finite(self, loss: Tensor) -> float:
        """The mean loss over all ranks, which must be a number; the checkpoints written so far are whole."""
        value = float(self.ranks.sum(loss.detach()).item())
        if not math.isfinite(value):
            raise TrainingError(
                f"the loss is {value} at step {self.progress.step}; lower train.learning_rate "
                f"({self.settings.learning_rate}), set train.clip_norm, or use train.precision=fp32 "
                f"(now {self.plan.precision.value}); --resume continues from the last checkpoint, which is from before"
            )
        return value

    def _save(self) -> None:
        """Write a checkpoint, unless the loss is no longer a number."""
        self.consensus.saved_at = time.monotonic()
        self._finite(self.last_loss)
        self.checkpoints.save(self.progress)

    def _finish_epoch(self, **figures: float | list[int]) -> None:
        """Evaluate when it is time and keep the best weights; a run may also end within an epoch."""
        state, settings = self.progress, self.settings
        is_last = state.epoch == settings.epochs or bool(state.stopped)
        found: Mapping[str, Mapping[str, float]] = {}
        evaluation_seconds = 0.0
        if self.validation.split and (is_last or state.epoch % settings.evaluate_every == 0):
            started = time.monotonic()
            with self._averaged():
                with self._stopping_at_once("an evaluation"):
                    found = self.validation.measure()
                if self.validation.is_best(found, state):
                    self.checkpoints.save_best(state.best_epoch)
            if self.validation.cuts_rate(state):
                self._cut_rate()
            evaluation_seconds = time.monotonic() - started
        self.log.write(
            "epoch",
            epoch=state.epochs(self.plan.steps_per_epoch),
            epochs=settings.epochs,
            open_ended=self.plan.is_open_ended,
            step=state.step,
            **figures,
            evaluation_seconds=evaluation_seconds,
            metrics=found,
            metric=self.validation.metric,
            best=state.best,
            best_epoch=state.best_epoch,
        )

    def _recall_best(self) -> None:
        """Evaluate the best epoch of a run that goes on again: later ones are compared with it row by row."""
        state = self.progress
        if not self.validation.pairs or state.best is None or state.stopped or state.epoch >= self.settings.epochs:
            return
        self.checkpoints.load_best()
        self.validation.kept = self.validation.evaluate()
        self.checkpoints.restore()

    def _cut_rate(self) -> None:
        """Go on with a smaller learning rate, from the best weights unless averages were judged.

        The plateau schedule of Zhu et al.: BARS, SIGIR 2022, after whose cuts click models improve once more.
        """
        state = self.progress
        state.cuts, state.cut_at, state.stopped = state.cuts + 1, len(state.trace["epoch"]), ""
        if self.average is None:
            self.checkpoints.load_best()
        rate = self.settings.learning_rate * CUT**state.cuts
        on = f"on from epoch {state.best_epoch:g} with learning rate {rate:.2g}"
        self._note(f"valid no longer improves: {on}")

    def _note(self, message: str) -> None:
        self.log.write("note", message=message)

    def _finish(self) -> Result:
        """Write the bundle and the last log line."""
        state = self.progress
        for note in self.validation.disagreements(state):
            self._note(note)
        best, metric = self.checkpoints.best, self.validation.metric
        with self._averaged():
            # The weights in memory are those of the best evaluation if no step has followed it.
            last = self.validation.last if state.best_epoch == state.epochs(self.plan.steps_per_epoch) else None
            if keeps_best(self.built, state) and last is None:
                self.checkpoints.load_best()
            with self._stopping_at_once("the last evaluation"):
                judgement = judge(self.validation, state, last, baselines=self.baselines)
            for note in judgement.notes:
                self._note(note)
            result = write_bundle(self.folder / run_folder.BUNDLE, self.built, state, best, metric, judgement)
        if self.record is not None:
            self.record.finish(self.folder, state.seconds)
        log_end(
            self.log,
            result,
            epochs=state.epochs(self.plan.steps_per_epoch),
            best_epoch=result.best_epoch,
            best=state.best,
            metric=self.validation.metric,
            metrics=state.best_metrics,
            calibration=result.calibration.method if result.calibration is not None else "none",
        )
        return result

    def _stopping_at_once(self, doing: str) -> AbstractContextManager[None]:
        """Do not wait long for what `--resume` does again. Several ranks stop together, after their next step."""
        if self.ranks.world_size > 1:
            return nullcontext()
        return stopping_at_once(
            f"stopped in {doing} as asked; {run_folder.how_to_go_on(self.folder)}", patience=EVALUATION_SECONDS
        )

    def _averaged(self) -> AbstractContextManager[None]:
        """The model with the weights that are evaluated and saved."""
        return self.average.in_place() if self.average is not None else nullcontext()


class RankConsensus:
    """The moments at which ranks agree: whether any was asked to stop, and whether a checkpoint is due."""

    def __init__(self, ranks: Ranks, checkpoint_minutes: float, stop_requested: Callable[[], bool]) -> None:
        self.ranks, self.checkpoint_minutes, self.stop_requested = ranks, checkpoint_minutes, stop_requested
        self.start(0)

    def start(self, step: int) -> None:
        """Measure time and steps from here."""
        self.saved_at = self.agreed_at = time.monotonic()
        self.agreed_step = self.agree_at = step

    def after(self, step: int, *, late: bool = False) -> tuple[bool, bool, bool]:
        """Whether to stop after this step, to write a checkpoint, and whether any rank is `late`; as all ranks say.

        Several ranks ask each other every `CONSENSUS_INTERVAL_S` seconds or so, at a step that all of them know.
        """
        stop, due, over = False, self.checkpoint_minutes == 0, False
        if self.ranks.world_size == 1 or step >= self.agree_at:  # agreeing costs a message
            now = time.monotonic()
            steps = round((step - self.agreed_step) * CONSENSUS_INTERVAL_S / max(1e-3, now - self.agreed_at))
            unsaved = now - self.saved_at >= 60 * self.checkpoint_minutes
            asked = self.ranks.sum(torch.tensor([self.stop_requested(), unsaved, late, steps], dtype=torch.int64))
            self.agreed_at, self.agreed_step = time.monotonic(), step
            self.agree_at = step + max(1, int(asked[3]) // self.ranks.world_size)
            stop, due, over = bool(asked[0]), due or bool(asked[1]), bool(asked[2])
        return stop, stop or due, over


def _mix(seed: int, step: int, rank: int) -> int:
    """A generator's seed for one step of one rank; neighbouring steps get unlike seeds (splitmix64)."""
    value = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (value ^ (value >> 31)) & (2**63 - 1)


def _begin_record(plan: Plan, folder: Path, kind: run_record.Kind, **how: Any) -> RunRecord:
    """Write down what the folder's run is made of."""
    kind = "updated" if plan.update_of else kind
    return run_record.begin(folder, kind, plan.model, DataRecord.of(plan.spec), made_of=plan.update_of, **how)


def _log_of(
    plan: Plan, folder: Path, ranks: Ranks, on_event: Callable[[Event], None], part_of: TrackedSearch | None
) -> RunLog:
    track = Tracking.of(plan.settings.mlflow, folder, part_of) if ranks.is_first else None
    return RunLog(folder, on_event, tensorboard=plan.settings.tensorboard, track=track)


# --- models that are fitted in one go ---------------------------------------------------------------------------------

FIT_STOPPED = "stopped as asked; nothing was written, so start the same command again"


def run_fit(
    plan: FitPlan,
    folder: Path,
    ranks: Ranks,
    on_event: Callable[[Event], None] = lambda _: None,
    stop_requested: Callable[[], bool] = lambda: False,
    *,
    resume: bool = False,
    baselines: bool = False,
    part_of: TrackedSearch | None = None,
) -> Result:
    """Fit on the first rank and write the bundle.

    Raises:
        Interrupted: if `stop_requested` says so; nothing is written then but the log.
    """
    result = Result(folder / run_folder.BUNDLE, 0.0, {}, 0.0, 0.0, "fitted", {})
    if ranks.is_first:
        if not resume:
            run_folder.start_afresh(folder)
        folder.mkdir(parents=True, exist_ok=True)
        record = _begin_record(plan, folder, "fitted")
        with closing(_log_of(plan, folder, ranks, on_event, part_of)) as log:
            result = _fit(plan, folder, log, stop_requested, baselines)
        record.finish(folder, result.seconds)
    ranks.barrier()
    return result


def _fit(plan: FitPlan, folder: Path, log: RunLog, stop_requested: Callable[[], bool], baselines: bool) -> Result:
    log.begin(plan.notes, **plan.described())
    started = time.monotonic()
    ends, cut, of_best = [started], False, 0.0

    def late() -> bool:
        """Whether one more combination, as long as the last one, would end after the minutes."""
        nonlocal cut
        minutes = plan.settings.minutes
        cut = minutes is not None and 2 * ends[-1] - ends[-2] - started > 60 * minutes
        return cut

    def tell(tried: Tried) -> None:
        nonlocal of_best
        ends.append(time.monotonic())
        of_best = max(of_best, ends[-1] - ends[-2]) if tried.best else of_best
        told = {"value": tried.value, "best": tried.best, "is_level": tried.is_level}
        log.write("tried", settings=dict(tried.settings), metric=plan.metric.value, **told)
        if stop_requested():
            raise Interrupted(FIT_STOPPED)

    fit = _fit_of(plan, tell, late)
    try:
        with stopping_at_once(FIT_STOPPED):
            found = fit.run()
            seconds = time.monotonic() - started
            known = inform(found.model, plan.spec)
            seen, events = seen_of(plan.spec, known), None if known is None else known.order
            others = _baselines(plan, fit, found, seconds) if baselines else {}
    except Interrupted:
        log.write("interrupted")
        raise
    calibration = None
    if isinstance(found.model, FittedRowModel):
        found, calibration, notes = _with_calibration(plan, found)
        for note in notes:
            log.write("note", message=note)
    told = warnings.of_label_columns(label_columns(plan.spec, found.model.features()))
    found = replace(found, warnings=(*told, *found.warnings))
    if plan.chosen.value and plan.valid.value and found.value is None:
        what = f"{plan.valid.value} has no positive of an item that is new to its user, or none of a user of train"
        then = "so settings could not be chosen; those that were not given have their defaults"
        log.write("note", message=f"{what}, {then}")
    if doubt := found.model.doubt():
        log.write("note", message=doubt)
    card = _card(plan, found, seconds, of_best or seconds, calibration)
    where = bundle.save(folder / run_folder.BUNDLE, found.model, card, seen=seen, events=events)
    speed = found.num_pairs / max(seconds, 1e-9)
    fitted = Result(where, 0.0, found.metrics, speed, seconds, "fitted", {}, found.warnings, metric=found.metric)
    result = replace(fitted, baselines=others, evaluation=found.evaluation, cut=cut, calibration=calibration)
    if isinstance(found.model, FittedRowModel):
        result = replace(result, size=found.model.size(), importance=found.importance)
    log_end(
        log,
        result,
        epochs=0,
        best_epoch=0,
        best=found.value,
        metric=found.metric or plan.metric.value,
        metrics=found.metrics,
        settings=found.model.settings.model_dump(mode="json"),
        calibration=calibration.method if calibration is not None else "none",
        size=result.size,
        importance=dict(result.importance),
    )
    return result


def _with_calibration(plan: FitPlan, found: Fitted) -> tuple[Fitted, Calibration | None, list[str]]:
    """What was fitted with its evaluation calibrated if that is asked for, the calibration, and notes."""
    model, method, split = found.judged or found.model, plan.settings.calibration, plan.valid.value
    calibration, notes = None, list[str]()
    if found.evaluation is None:
        return found, None, notes
    if method != "none":
        labels = EvaluationTask(plan.spec, split, ("rows",), EvaluateSettings()).rows.labels
        logits = score_rows(model, plan.spec, split)
        calibration, evaluation, notes = calibrate(model, logits, labels, method, found.evaluation, split)
        value = metric_value(evaluation.metrics, found.metric)
        found = replace(found, evaluation=evaluation, metrics=evaluation.metrics, value=value)
    assert found.evaluation is not None
    told = warnings.of_probabilities(found.evaluation.probabilities, split, warnings.CALIBRATE_FITTED)
    return replace(found, warnings=(*told, *found.warnings)), calibration, notes


def _fit_of(plan: FitPlan, tell: Callable[[Tried], None], late: Callable[[], bool]) -> BoostedFit | ItemFit | RowFit:
    kind, spec, own, train = plan.kind, plan.spec, plan.model_settings, plan.settings
    valid, metric = plan.valid.value, plan.metric.value
    if issubclass(kind, FittedItemModel):
        return ItemFit(kind, spec, own, train.train_splits, valid, metric, train.seed, train.valid_users, tell, late)
    if issubclass(kind, LightGbm):
        return BoostedFit(kind, spec, own, train.train_splits, valid, metric, train.seed, tell, late)
    assert issubclass(kind, LogisticRegression)
    return RowFit(kind, spec, own, train.train_splits, valid, metric, tell, late)


def _baselines(plan: FitPlan, fit: BoostedFit | ItemFit | RowFit, found: Fitted, seconds: float) -> dict[str, float]:
    """The metric that chose the settings, of cheap baselines on the same users of valid."""
    if not isinstance(fit, ItemFit) or found.value is None or (question := fit.task()) is None:
        return {}
    before = [split for split in plan.settings.train_splits if split != plan.valid.value]
    return values_of(cheap_baselines(question, before, plan.model, seconds), found.metric)


def _card(plan: FitPlan, found: Fitted, seconds: float, of_best: float, calibration: Calibration | None) -> Card:
    trained: dict[str, object] = {
        "epoch": 0,
        "seconds": round(seconds, 3),
        "seconds_of_best": round(of_best, 3),
        "splits": list(plan.settings.train_splits),
        "stopped": "fitted",
        "device": "cpu",
        "world_size": plan.world_size,
        "torch": torch.__version__,
        "valid_metric": found.metric or None,
        "tried": [{"settings": dict(each.settings), "value": each.value, "taken": each.best} for each in found.tried],
        "logits_from": found.logits_from,
    }
    if isinstance(found.model, FittedRowModel):
        trained |= {"size": found.model.size(), "importance": dict(found.importance)}
    return Card(
        model=plan.model,
        settings=found.model.settings.model_dump(mode="json"),
        train=plan.read_settings(),
        trained=trained,
        metrics=found.metrics,
        calibration=calibration,
        warnings=tuple(each.to_dict() for each in found.warnings),
    )
