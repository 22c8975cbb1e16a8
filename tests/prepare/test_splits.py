"""Splits, on tables small enough to split by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ibis.expr.types import Table

from recspec.data.prepare.backend import Backend, fetch
from recspec.data.prepare.splits import by_group, by_share, by_time, folds, leave_one_out
from recspec.data.prepare.text_files import ROW
from tests.prepare.small_tables import connect

Make = Callable[..., Table]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    with connect(folder=tmp_path_factory.mktemp("splits") / "work", threads=1) as opened:
        yield opened


@pytest.fixture
def make(backend: Backend, tmp_path: Path) -> Make:
    def made(**columns: list[object]) -> Table:
        path = tmp_path / "table.parquet"
        pq.write_table(pa.table(columns), path)
        return backend.read_parquet([path], row=True)

    return made


def splits(backend: Backend, table: Table) -> list[str]:
    """The split of each row, in the order of the rows."""
    found: list[str] = fetch(backend, table.order_by(ROW)).column("split").to_pylist()
    return found


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([5], ["train"]),
        ([5, 4], ["test", "train"]),
        ([2, 3, 1], ["valid", "test", "train"]),
        ([4, 1, 2, 3], ["test", "train", "train", "valid"]),
        ([7, 7, 7], ["train", "valid", "test"]),  # a tie: the file's order
    ],
)
def test_each_users_last_row_is_test_and_the_last_but_one_valid(
    backend: Backend, make: Make, times: list[int], expected: list[str]
) -> None:
    table = make(user=["a"] * len(times), time=times)
    assert splits(backend, leave_one_out(table, by="user", order=["time", ROW])) == expected


def test_users_do_not_take_part_in_each_others_split(backend: Backend, make: Make) -> None:
    table = make(user=[1, 2, 1, 2, 1, 3], time=[9, 1, 8, 2, 7, 5])
    found = splits(backend, leave_one_out(table, by="user", order=["time", ROW]))
    assert found == ["test", "train", "valid", "test", "train", "train"]


def test_the_latest_share_is_test(backend: Backend, make: Make) -> None:
    table = make(time=[10, 9, 8, 7, 6, 5, 4, 3, 2, 1])
    found = splits(backend, by_time(table, time="time", valid=0.2, test=0.1))
    assert found == ["test", "valid", "valid"] + ["train"] * 7


def test_rows_of_one_time_stay_together_on_the_earlier_side(backend: Backend, make: Make) -> None:
    table = make(time=[1, 1, 1, 2, 2, 2, 2, 3, 4, 5])
    found = splits(backend, by_time(table, time="time", valid=0.2, test=0.3))
    assert found == ["train"] * 7 + ["test"] * 3  # the cut of valid falls among the 2s


@pytest.mark.parametrize(
    ("rows", "valid", "test", "expected"),
    [
        ([1] * 7, 0.1, 0.1, ["train"] * 5 + ["valid", "test"]),  # a tenth of a week's rows is less than a day's
        ([1] * 7, 0.1, 0, ["train"] * 6 + ["valid"]),
        ([1] * 7, 0, 0.1, ["train"] * 6 + ["test"]),
        ([1] * 4, 0.1, 0.1, ["train"] * 2 + ["valid", "test"]),
        ([1] * 3, 0.1, 0.1, ["train"] * 2 + ["test"]),  # valid would leave a third for train
        ([3, 2], 0.1, 0.1, ["train"] * 3 + ["test"] * 2),
        ([2, 3], 0.1, 0.1, ["train"] * 5),
        ([5], 0.1, 0.1, ["train"] * 5),
        ([90, 9, 1], 0.1, 0.05, ["train"] * 90 + ["valid"] * 9 + ["test"]),
        ([8, 1, 1], 0.1, 0.1, ["train"] * 8 + ["valid", "test"]),
        ([1] * 10, 0, 0, ["train"] * 10),
    ],
)
def test_a_split_by_time_that_would_be_empty_gets_its_latest_time(
    backend: Backend, make: Make, rows: list[int], valid: float, test: float, expected: list[str]
) -> None:
    times = [time for time, count in enumerate(rows) for _ in range(count)]
    assert splits(backend, by_time(make(time=times), time="time", valid=valid, test=test)) == expected


def test_shares_by_time_are_exact_where_binary_fractions_are_not(backend: Backend, make: Make) -> None:
    table = make(time=list(range(1000)))
    found = splits(backend, by_time(table, time="time", valid=0.1, test=0.2))
    assert found == ["train"] * 700 + ["valid"] * 100 + ["test"] * 200


def test_a_random_share_is_near_what_was_asked_and_the_seed_moves_it(backend: Backend, make: Make) -> None:
    table = make(value=list(range(20_000)))
    first, again, other = (
        splits(backend, by_share(table, row=ROW, valid=0.1, test=0.2, seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert first.count("test") == pytest.approx(4000, abs=170)  # 3 standard deviations
    assert first.count("valid") == pytest.approx(2000, abs=128)
    assert set(splits(backend, by_share(table, row=ROW, valid=0, test=0, seed=1))) == {"train"}


@pytest.mark.parametrize("names", [[1, 2, 3], ["x", "y", "zé"]])
def test_the_rows_of_a_group_never_part(backend: Backend, make: Make, names: list[object]) -> None:
    groups = [names[number % 3] if number < 30 else number // 7 for number in range(2000)]
    groups = [str(group) for group in groups] if isinstance(names[0], str) else groups
    table = make(group=groups)
    found = splits(backend, by_group(table, group="group", valid=0.2, test=0.2, seed=3))
    assert len(set(zip(groups, found, strict=True))) == len(set(groups))
    assert set(found) == {"train", "valid", "test"}


def test_folds_are_even_keep_groups_whole_and_are_drawn_apart_from_the_splits(backend: Backend, make: Make) -> None:
    groups = [number // 2 for number in range(20_000)]
    table = by_group(
        folds(make(group=groups), group="group", folds=4, seed=1), group="group", valid=0, test=0.5, seed=1
    )
    found = fetch(backend, table.order_by(ROW))
    dealt = found.column("fold").to_pylist()
    assert len(set(zip(groups, dealt, strict=True))) == 10_000
    together = [(fold, split) for fold, split in zip(dealt, found.column("split").to_pylist(), strict=True)]
    for fold in range(4):
        assert dealt.count(fold) == pytest.approx(5000, abs=260)  # 3 standard deviations, each group twice
        assert together.count((fold, "test")) == pytest.approx(2500, abs=200)


def test_a_fold_is_decided_by_the_digest_of_seed_and_group(backend: Backend, make: Make) -> None:
    names = list(range(50))
    table = folds(make(group=names), group="group", folds=2, seed=7)
    by_hand = [int(hashlib.md5(f"fold:7:{name}".encode()).hexdigest()[0], 16) // 8 for name in names]
    assert fetch(backend, table.order_by(ROW)).column("fold").to_pylist() == by_hand
    one = folds(make(group=["a", "b", "c"]), group="group", folds=1, seed=0)
    assert fetch(backend, one).column("fold").to_pylist() == [0, 0, 0]
