"""Reading ahead: batches made by a thread while the one before is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
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
    """The same items, made by a thread: while one is used, `depth` more are made, and the one after them is begun.

    Errors of the source are raised here. When the consumer stops early, the thread ends before this returns.
    """
    with closing(source):
        worker = ThreadPoolExecutor(1, "recspec-prefetch")
        try:
            items = deque(worker.submit(next, source, None) for _ in range(depth + 1))
            while (item := items.popleft().result()) is not None:
                items.append(worker.submit(next, source, None))
                yield item
        finally:
            worker.shutdown(cancel_futures=True)


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
