"""Percentiles of calls: worked by hand, warm-up left out."""

from __future__ import annotations

from recspec.base.latency import measure, of_times


def test_percentiles_and_throughput_of_times_worked_by_hand() -> None:
    found = of_times([0.001 * each for each in range(1, 102)], batch_size=10)  # 1 ms to 101 ms, the median is 51
    assert (round(found.p50, 6), round(found.p90, 6), round(found.p99, 6)) == (51, 91, 100)
    assert round(found.rows_per_second, 6) == round(10 / 0.051, 6)
    assert found.to_dict()["p95_ms"] == 96


def test_rows_a_second_are_told_from_the_mean_and_from_the_median() -> None:
    found = of_times([0.010, 0.010, 0.100], batch_size=10).to_dict()  # one call in three is slow: the mean is 40 ms
    assert (found["rows_per_second"], found["rows_per_second_at_p50"]) == (250, 1000)


def test_the_calls_of_the_warm_up_are_not_among_the_measured() -> None:
    calls: list[int] = []
    found = measure(lambda: calls.append(1), 1, seconds=0.0, warmup=4, at_least=3)
    assert found.calls == 3
    assert len(calls) >= 1 + 1 + 3  # the first one tells how long a call takes


def test_one_call_is_all_its_percentiles() -> None:
    found = of_times([0.25], batch_size=1)
    assert found.p50 == found.p99 == found.mean == 250
