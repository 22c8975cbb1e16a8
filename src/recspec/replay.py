"""A training step recorded once and played again, as a CUDA graph.

A step of a small model is some hundred kernels of a few microseconds each, and the CPU takes longer to issue them than
the GPU to run them. Where every step does the same things to tensors of the same shapes it is recorded, and then played
with one launch.

What is recorded knows addresses, not names: it reads its batch from buffers that each batch is copied into, weights,
state and learning rates from where they lie, and the generator's seed from what `torch.manual_seed` left before it is
played. Nothing in it may ask the device for a number. The first steps are run on buffers and stream as they will be
recorded, and watched: if they make the host wait, nothing is recorded, and the reason is told. All of them are steps of
the run; recording itself computes nothing. A batch of another shape, as an epoch's last, takes the step as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from recspec.batch import Batch, num_rows
from recspec.errors import TrainingError

REHEARSALS = 3
"""Steps before one is recorded: the first make what is made once, as kernels and the optimizers' state."""

_WAITED = "called a synchronizing CUDA operation"
_PROTOTYPE = "Synchronization debug mode is a prototype"


class RecordingError(TrainingError):
    """A step that can't be recorded; nothing of it has been computed."""


class Recorder(Protocol):
    """What records a step on a device."""

    def rehearse(self, step: Callable[[], Tensor]) -> tuple[Tensor, Sequence[str]]:
        """Run the step as it will be recorded; its loss, and where it made the host wait for the device."""

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """What runs the step; recording it computes nothing.

        Raises:
            RecordingError: saying why it can't be recorded.
        """


class Replay:
    """A step of batches of so many rows, recorded after the first ones.

    Args:
        step: one whole step on a batch, from the forward pass to the optimizers; gives the loss.
        recorder: records it.
        rows: rows of the batches that are recorded; all others take the step as it is.
        tell: is told once whether the step is played from now on, or why not.
    """

    def __init__(
        self, step: Callable[[Batch], Tensor], recorder: Recorder, *, rows: int, tell: Callable[[str], None]
    ) -> None:
        self.step, self.recorder, self.rows, self.tell = step, recorder, rows, tell
        self.buffers: Batch = {}
        self.rehearsals = 0
        self.why_not: str | None = None
        self._play: Callable[[], Tensor] | None = None

    @property
    def plays(self) -> bool:
        """Whether a step has been recorded."""
        return self._play is not None

    def __call__(self, batch: Batch) -> Tensor:
        """One step; the loss."""
        if self.why_not is not None or num_rows(batch) != self.rows:
            return self.step(batch)
        if not self.buffers:
            self.buffers = {
                name: torch.empty(own.shape, dtype=own.dtype, device=own.device) for name, own in batch.items()
            }
        if not self._fits(batch):
            return self.step(batch)
        if self._play is None and self.rehearsals == REHEARSALS and not self._record():
            return self.step(batch)
        self._fill(batch)
        if self._play is not None:
            return self._play()
        return self._rehearse()

    def _fits(self, batch: Batch) -> bool:
        return batch.keys() == self.buffers.keys() and all(
            own.shape == self.buffers[name].shape and own.dtype == self.buffers[name].dtype
            for name, own in batch.items()
        )

    def _fill(self, batch: Batch) -> None:
        """Copy the batch into the buffers, in as many launches as it has types."""
        by_type: dict[torch.dtype, list[str]] = {}
        for name, own in batch.items():
            by_type.setdefault(own.dtype, []).append(name)
        for names in by_type.values():
            torch._foreach_copy_([self.buffers[name] for name in names], [batch[name] for name in names])

    def _rehearse(self) -> Tensor:
        loss, waits = self.recorder.rehearse(self._whole_step)
        self.rehearsals += 1
        if waits and self.rehearsals == REHEARSALS:
            self._give_up(f"a step makes the host wait for the device ({', '.join(dict.fromkeys(waits))})")
        return loss

    def _record(self) -> bool:
        try:
            self._play = self.recorder.record(self._whole_step)
        except RecordingError as error:
            self._give_up(str(error))
            return False
        self.tell(f"CUDA graph: steps of {self.rows:,} rows are recorded and played, others run as they are")
        return True

    def _whole_step(self) -> Tensor:
        return self.step(self.buffers)

    def _give_up(self, why: str) -> None:
        self.why_not = why
        self.buffers = {}
        self.tell(f"no CUDA graph: {why}")


class CudaRecorder:
    """Records on a stream of its own.

    Args:
        device: a GPU.
        recording: entered while a step is recorded.
        counters: numbers in the host's memory that a step counts up by one, and a played one can't.
        forget: called when a step could not be recorded, to let go of its gradients.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        recording: Callable[[], AbstractContextManager[None]],
        counters: Callable[[], Sequence[Tensor]],
        forget: Callable[[], None],
    ) -> None:
        self.device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
        self.recording, self.counters, self.forget = recording, counters, forget
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def rehearse(self, step: Callable[[], Tensor]) -> tuple[Tensor, Sequence[str]]:
        """See `Recorder`; torch tells of the operations that wait."""
        here, before = torch.cuda.current_stream(self.device), torch.cuda.get_sync_debug_mode()
        self.stream.wait_stream(here)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with torch.cuda.stream(self.stream):
                    loss = step()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        here.wait_stream(self.stream)
        loss.record_stream(here)
        return loss, waits_among(told)

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `Recorder`."""
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self.device.index]
        spare = generator.clone_state()
        counted = [(counter, counter.clone()) for counter in self.counters()]
        here = torch.cuda.current_stream(self.device)
        try:
            # Other threads, as the loader's, may go on asking CUDA for memory meanwhile.
            with (
                torch.cuda.device(self.device),
                self.recording(),
                torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"),
            ):
                loss = step()
        except RuntimeError as error:
            # What was begun is not ended: the stream is still the recording's, and so is the generator.
            torch.cuda.set_stream(here)
            generator.graphsafe_set_state(spare)
            self.forget()
            raise RecordingError(f"recording failed: {first_cause(error)}") from error
        finally:
            for counter, before in counted:
                counter.copy_(before)

        def play() -> Tensor:
            graph.replay()
            for counter, _ in counted:
                counter.add_(1)
            return loss.clone()  # the next step writes over it

        return play


def waits_among(told: Sequence[warnings.WarningMessage]) -> list[str]:
    """Where torch says that a step waited, as `file:line`; warnings of anything else are passed on."""
    waits = []
    for each in told:
        message = str(each.message)
        if _WAITED in message:
            waits.append(f"{Path(each.filename).name}:{each.lineno}")
        elif _PROTOTYPE not in message:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return waits


def first_cause(error: BaseException) -> str:
    """The first line of the error that the others followed."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
