"""Requests that wait together are computed together, and nobody pays for another's mistake."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from recspec.base.errors import DataError, RequestError
from recspec.serving.batching import Arrays, Batcher
from recspec.serving.server_metrics import ServerMetrics
from recspec.serving.settings import Limits
from tests.asking import total


@dataclass
class Doubling:
    """Doubles `x`; waits before each batch until it is let go, and remembers how many rows each had."""

    held: bool = False
    gate: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    batches: list[list[float]] = field(default_factory=list)

    def __call__(self, inputs: Arrays) -> Arrays:
        self.batches.append(inputs["x"][:, 0].tolist())
        self.begun.set()
        if self.held:
            assert self.gate.wait(600)
        if (inputs["x"] < 0).any():
            raise RuntimeError("a negative number")
        return {"y": 2 * inputs["x"]}


def rows(*values: float) -> Arrays:
    return {"x": np.array(values, np.float32).reshape(-1, 1)}


def ask(batcher: Batcher, *values: float, timeout: float | None = None) -> asyncio.Task[Arrays]:
    return asyncio.ensure_future(batcher.infer(rows(*values), len(values), timeout=timeout))


async def settled(*_: object) -> None:
    """Every task that can go on has gone on."""
    for _turn in range(5):
        await asyncio.sleep(0)


@asynccontextmanager
async def batching(run: Doubling, metrics: ServerMetrics | None = None, **limits: float) -> AsyncIterator[Batcher]:
    batcher = Batcher(run, Limits.model_validate(limits), name="doubling", metrics=metrics)
    try:
        yield batcher
    finally:
        run.gate.set()
        await batcher.close()


def begun(run: Doubling) -> Awaitable[bool]:
    return asyncio.to_thread(run.begun.wait, 30)


async def test_requests_that_wait_are_joined_and_each_gets_its_own_rows() -> None:
    run = Doubling(held=True)

    async with batching(run) as batcher:
        first = ask(batcher, 1)
        await begun(run)
        others = [ask(batcher, 2, 3), ask(batcher, 4), ask(batcher, 5, 6, 7)]
        await settled()
        assert len(batcher) == 3
        run.gate.set()
        answers = await asyncio.gather(first, *others)
        assert [answer["y"].ravel().tolist() for answer in answers] == [[2], [4, 6], [8], [10, 12, 14]]
    assert run.batches == [[1], [2, 3, 4, 5, 6, 7]]


async def test_a_batch_holds_at_most_so_many_rows_and_a_larger_request_goes_alone() -> None:
    run = Doubling(held=True)

    async with batching(run, max_batch=3) as batcher:
        tasks = [ask(batcher, 1)]
        await begun(run)
        tasks += [ask(batcher, 2), ask(batcher, 3, 4), ask(batcher, 5, 6, 7, 8, 9), ask(batcher, 10)]
        await settled()
        run.gate.set()
        await asyncio.gather(*tasks)
    assert run.batches == [[1], [2, 3, 4], [5, 6, 7, 8, 9], [10]]


async def test_an_idle_model_waits_for_others_up_to_the_delay_and_goes_when_the_batch_is_full() -> None:
    run = Doubling()

    async with batching(run, max_delay_ms=10_000, max_batch=2) as batcher:
        first = ask(batcher, 1)
        await settled()
        assert len(batcher) == 1
        await asyncio.gather(first, ask(batcher, 2))
    assert run.batches == [[1, 2]]


async def test_a_lone_request_goes_when_the_delay_is_over() -> None:
    run = Doubling()

    async with batching(run, max_delay_ms=1) as batcher:
        assert (await batcher.infer(rows(3), 1))["y"].tolist() == [[6]]


async def test_a_full_queue_refuses_with_503_and_when_to_come_again() -> None:
    run, metrics = Doubling(held=True), ServerMetrics()

    async with batching(run, metrics, queue=2, retry_seconds=7) as batcher:
        tasks = [ask(batcher, 1)]
        await begun(run)
        tasks += [ask(batcher, 2), ask(batcher, 3)]
        await settled()
        with pytest.raises(
            RequestError, match="model 'doubling': 2 requests wait already; try again in 7 s"
        ) as refused:
            await batcher.infer(rows(4), 1)
        assert (refused.value.status, refused.value.retry_after) == (503, 7)
        run.gate.set()
        await asyncio.gather(*tasks)
    assert total(metrics, "recspec_rejected_total", reason="queue") == 1


async def test_a_request_whose_time_is_over_is_given_up_and_never_computed() -> None:
    run = Doubling(held=True)

    async with batching(run) as batcher:
        first = ask(batcher, 1)
        await begun(run)
        late, patient = ask(batcher, 2, timeout=0.001), ask(batcher, 3)
        with pytest.raises(RequestError, match=r"no answer within 0\.001 s; the request was given up") as refused:
            await late
        assert (refused.value.status, len(batcher)) == (504, 1)
        run.gate.set()
        assert [(await each)["y"].tolist() for each in (first, patient)] == [[[2]], [[6]]]
    assert run.batches == [[1], [3]]


async def test_clients_that_go_away_do_not_disturb_the_others() -> None:
    run = Doubling(held=True)

    async with batching(run) as batcher:
        gone_in_computation = ask(batcher, 1)
        await begun(run)
        gone_in_queue, stays = ask(batcher, 2), ask(batcher, 3)
        await settled()
        gone_in_computation.cancel()
        gone_in_queue.cancel()
        await settled()
        assert len(batcher) == 1
        run.gate.set()
        assert (await stays)["y"].tolist() == [[6]]
    assert run.batches == [[1], [3]]


async def test_a_batch_that_fails_is_computed_one_by_one_and_only_the_bad_request_fails() -> None:
    run = Doubling(held=True)

    async with batching(run) as batcher:
        first = ask(batcher, 1)
        await begun(run)
        good, bad, fine = ask(batcher, 2), ask(batcher, -1), ask(batcher, 4)
        await settled()
        run.gate.set()
        assert [(await each)["y"].tolist() for each in (first, good, fine)] == [[[2]], [[4]], [[8]]]
        with pytest.raises(RuntimeError, match="a negative number"):
            await bad
        found = batcher.statistics.inference_stats
        assert (found["success"].count, found["fail"].count) == (3, 1)
    assert run.batches == [[1], [2, -1, 4], [2], [-1], [4]]


async def test_a_function_is_called_in_its_turn_on_the_model_s_thread_and_joined_with_nothing() -> None:
    run = Doubling(held=True)

    def name() -> str:
        run.batches.append([])
        return threading.current_thread().name

    def wrong() -> None:
        raise DataError("no such user")

    async with batching(run) as batcher:
        tasks = [ask(batcher, 1)]
        await begun(run)
        tasks.append(ask(batcher, 2))
        called = asyncio.ensure_future(batcher.call(name))
        failed = asyncio.ensure_future(batcher.call(wrong))
        tasks.append(ask(batcher, 3))
        await settled()
        run.gate.set()
        assert (await called).startswith("model-doubling")
        with pytest.raises(DataError, match="no such user"):
            await failed
        await asyncio.gather(*tasks)
    assert run.batches == [[1], [2], [], [3]]


async def test_closing_waits_for_every_answer() -> None:
    run = Doubling(held=True)
    batcher = Batcher(run, Limits())
    tasks = [ask(batcher, 1), ask(batcher, 2)]
    await begun(run)
    closing = asyncio.ensure_future(batcher.close())
    await settled()
    assert not closing.done()
    run.gate.set()
    await closing
    assert [task.result()["y"].tolist() for task in tasks] == [[[2]], [[4]]]


async def test_what_was_done_is_counted() -> None:
    run, metrics = Doubling(), ServerMetrics()

    async with batching(run, metrics) as batcher:
        await batcher.infer(rows(1, 2, 3), 3)
        await batcher.infer(rows(1), 1)
        kept = batcher.statistics
        spent = kept.inference_stats
        assert (kept.inference_count, kept.execution_count) == (4, 2)
        assert (spent["success"].count, spent["queue"].count) == (2, 2)
        assert {rows: each["compute_infer"].count for rows, each in kept.by_rows.items()} == {3: 1, 1: 1}
        assert spent["success"].ns >= spent["compute_infer"].ns > 0
        assert kept.last_inference > 1_700_000_000_000
    assert total(metrics, "recspec_rows_total", model="doubling") == 4
    assert total(metrics, "recspec_batch_rows_bucket", model="doubling", le="1.0") == 1
    assert total(metrics, "recspec_batch_rows_bucket", model="doubling", le="4.0") == 2
    assert total(metrics, "recspec_batch_rows_sum", model="doubling") == 4
    assert total(metrics, "recspec_batch_rows_count") == 2
