"""Plans by hand: each rank gets its share of the rows of embedding tables."""

from __future__ import annotations

import pytest

from recspec.loading.placement import Table, plan_sharding


def table(name: str, rows: int, *, first: int = 0, bytes_per_row: int = 1, store: str = "s") -> Table:
    return Table(store, name, first, rows, bytes_per_row)


def test_the_largest_table_goes_first_and_each_to_the_rank_with_least() -> None:
    tables = [table("a", 40), table("b", 100, first=40), table("c", 60, first=140)]
    plan = plan_sharding(tables, 2)  # a share is 100: b fills one rank, then c and a the other
    assert plan.held("s", 0) == (range(40, 140),)
    assert plan.held("s", 1) == (range(40), range(140, 200))
    assert plan.bytes == (100, 100)


def test_a_table_larger_than_a_share_is_cut_by_rows_into_the_fewest_pieces_that_are_not() -> None:
    plan = plan_sharding([table("a", 90), table("b", 6, first=90), table("c", 3, first=96)], 3)
    # A share is 33: a becomes three pieces of 30, then b and c go to the first two ranks.
    assert [plan.held("s", rank) for rank in range(3)] == [
        (range(30), range(90, 96)),
        (range(30, 60), range(96, 99)),
        (range(60, 90),),
    ]
    assert plan.bytes == (36, 33, 30)


def test_bytes_decide_and_not_rows() -> None:
    plan = plan_sharding([table("thin", 100, store="1"), table("wide", 10, bytes_per_row=64, store="16")], 2)
    # 740 bytes, a share is 370: wide (640) is cut in two; thin (100) goes to the first of two equal ranks.
    assert plan.held("16", 0) == (range(5),)
    assert plan.held("16", 1) == (range(5, 10),)
    assert plan.held("1", 0) == (range(100),)
    assert plan.held("1", 1) == ()
    assert plan.stores == ("1", "16")


def test_a_plan_says_who_holds_what() -> None:
    plan = plan_sharding([table("user", 5000, bytes_per_row=4), table("item", 10, first=5000, bytes_per_row=4)], 2)
    assert str(plan) == (
        "rank 0: 10,040 bytes: s user (rows 0 to 2,499 of 5,000), s item (10 rows)\n"
        "rank 1: 10,000 bytes: s user (rows 2,500 to 4,999 of 5,000)"
    )
    assert str(plan_sharding([table("one", 1)], 2)) == "rank 0: 1 bytes: s one (1 rows)\nrank 1: 0 bytes: nothing"


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("sizes", [[], [1], [7, 7, 7], [1000, 1], [3, 500, 20, 20, 8, 1]])
def test_every_row_is_held_once_and_no_rank_has_more_than_its_share_and_a_piece(
    sizes: list[int], world_size: int
) -> None:
    firsts = [sum(sizes[:place]) for place in range(len(sizes))]
    tables = [table(f"at {first}", rows, first=first) for first, rows in zip(firsts, sizes, strict=True)]
    plan = plan_sharding(tables, world_size)
    rows = [row for rank in range(world_size) for part in plan.held("s", rank) for row in part]
    assert sorted(rows) == list(range(sum(sizes)))
    assert sum(plan.bytes) == sum(sizes)
    largest = max((piece.bytes for piece in plan.pieces), default=0)
    assert max(plan.bytes) <= sum(sizes) / world_size + largest
