"""Reading ahead: batches made by a thread while the one before is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import torch

from recspec.batch import Batch

QUEUED_BATCHES = 4
_T = TypeVar("_T")


@dataclass(frozen=True)
class Share:
    """One rank's part of a global batch."""

    batch: Batch
    num_rows: int
    """This rank's rows. With 0, where a batch has fewer rows than there are ranks, `batch` is one filler row."""
    total_rows: int
    """Rows of the global batch."""
    first_row: int
    """Where this rank's rows begin in the global batch."""


def prefetched(source: Generator[_T], depth: int) -> Generator[_T]:
    """The same items, made by a thread that runs at most `depth` items ahead.

    What the source raises is raised here; when the consumer stops early, the thread ends and is waited for.
    """
    items: queue.Queue[_T | _End] = queue.Queue(depth)
    stopped = threading.Event()
    thread = threading.Thread(target=_produce, args=(source, items, stopped), name="recspec-prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := items.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
        thread.join()


def arriving(batches: Generator[Share], device: torch.device) -> Generator[Share]:
    """The same batches, made by a thread that copies to a GPU on a stream of its own."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def sent() -> Generator[tuple[Share, torch.cuda.Event]]:
        with closing(batches):
            while True:
                with torch.cuda.stream(stream):
                    share = next(batches, None)
                if share is None:
                    return
                yield share, stream.record_event()

    with closing(prefetched(sent(), QUEUED_BATCHES)) as arrived:
        for share, copied in arrived:
            here = torch.cuda.current_stream(device)
            here.wait_event(copied)
            for tensor in share.batch.values():
                tensor.record_stream(here)  # its memory belongs to the other stream
            yield share


@dataclass(frozen=True)
class _End:
    """After the last item: what ended the source, if not its own end."""

    error: BaseException | None


def _produce(source: Generator[_T], items: queue.Queue[_T | _End], stopped: threading.Event) -> None:
    error: BaseException | None = None
    try:
        for item in source:
            _put(item, items, stopped)
            if stopped.is_set():
                break
    except BaseException as raised:  # told to the consumer, whatever it is
        error = raised
    finally:
        source.close()
    _put(_End(error), items, stopped)


def _put(item: _T, items: queue.Queue[_T], stopped: threading.Event) -> None:
    """Wait for room, but not for a consumer that has gone."""
    while not stopped.is_set():
        try:
            items.put(item, timeout=0.05)
        except queue.Full:
            continue
        return
