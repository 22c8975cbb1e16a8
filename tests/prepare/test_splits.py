"""Splits, on tables small enough to split by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ibis.expr.types import Table

from recspec.base.errors import DataError
from recspec.data.prepare.backend import Backend, fetch
from recspec.data.prepare.names import TARGET
from recspec.data.prepare.splits import by_group, by_share, by_time, by_users, folds, leave_one_out
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


# --- held-out users ---------------------------------------------------------------------------------------------------


def of_held_out_users(table: pd.DataFrame, number: int, seed: int) -> dict[str, set[int]]:
    """The rows of each split as `vae_cf` (Liang et al., 2018) draws them with pandas, for rows without repeats."""
    np.random.seed(seed)  # noqa: NPY002
    users = table.groupby("user_id").size().index
    users = users[np.random.permutation(users.size)]  # noqa: NPY002
    known = table[table["user_id"].isin(users[: len(users) - 2 * number])]
    found = {"train": {*known.index}, "fold_in": set[int](), "valid": set[int](), "test": set[int]()}
    for split, held in (("valid", users[-2 * number : -number]), ("test", users[-number:])):
        rows = table[table["user_id"].isin(held) & table["item_id"].isin(known["item_id"].unique())]
        np.random.seed(seed)  # noqa: NPY002
        for _, own in rows.groupby("user_id"):
            targets = np.zeros(len(own), bool)
            if len(own) >= 5:
                targets[np.random.choice(len(own), size=int(0.2 * len(own)), replace=False)] = True  # noqa: NPY002
            found[split] |= {*own.index[targets]}
            found["fold_in"] |= {*own.index[~targets]}
    return found


@pytest.mark.parametrize(("seed", "named"), [(98765, False), (0, True), (2**32 + 3, False)])
def test_held_out_users_and_their_targets_are_those_that_the_paper_draws(
    backend: Backend, make: Make, tmp_path: Path, seed: int, named: bool
) -> None:
    random = np.random.default_rng(seed)
    pairs = pd.DataFrame({"user_id": random.integers(40, size=900), "item_id": random.integers(250, size=900) ** 2})
    pairs = pairs.drop_duplicates(ignore_index=True)
    if named:  # ids of text, in the order of their bytes: u10 before u9
        pairs["user_id"] = "u" + pairs["user_id"].astype(str)
    table = make(user_id=pairs["user_id"].tolist(), item_id=pairs["item_id"].tolist())
    divided = by_users(backend, table, tmp_path / "work", valid=0, test=0, number=7, seed=seed)
    held = fetch(backend, divided.order_by(ROW)).to_pandas()
    expected = of_held_out_users(pairs, 7, seed % 2**32)
    assert {split: {*held[ROW][held["split"] == split]} for split in expected} == expected
    assert all(len(rows) > 4 for rows in expected.values())
    assert len(held) < len(pairs)  # some rows are of items that train lacks
    assert (held[TARGET] == held["split"].isin(["valid", "test"])).all()


def test_users_of_few_rows_are_folded_in_whole_and_shares_are_of_the_users(
    backend: Backend, make: Make, tmp_path: Path
) -> None:
    """Of 10 users, two are held out for valid and one for test; ones with 4 rows have no target, with 5 one."""
    users = [user for user in range(10) for _ in range(4 + user % 2)]
    table = make(user_id=users, item_id=[1] * len(users))
    divided = by_users(backend, table, tmp_path / "work", valid=0.2, test=0.1, number=None, seed=3)
    held = fetch(backend, divided).to_pandas()
    order = np.random.RandomState(3).permutation(10)
    assert {*held["user_id"][held["split"] == "train"]} == {*order[:7]}
    targets = held[held[TARGET] == 1].groupby(["split", "user_id"]).size().to_dict()
    assert targets == {
        (split, user): 1 for split, own in (("valid", order[7:9]), ("test", order[9:])) for user in own if user % 2
    }


def test_no_user_left_for_train_is_said(backend: Backend, make: Make, tmp_path: Path) -> None:
    table = make(user_id=[1, 2, 3, 4], item_id=[1, 1, 1, 1])
    with pytest.raises(
        DataError,
        match=r"split users: of 4 users, 2 are held out for valid and 2 for test; hold out fewer \(heldout_users\)",
    ):
        by_users(backend, table, tmp_path, valid=0, test=0, number=2, seed=1)
