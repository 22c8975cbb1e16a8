"""Items made by a thread while the one before is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

_T = TypeVar("_T")


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
