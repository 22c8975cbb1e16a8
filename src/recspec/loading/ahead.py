"""Shares of batches, and their way to a GPU."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

import torch

from recspec.batch import Batch
from recspec.prefetch import prefetched

QUEUED_BATCHES = 4


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
