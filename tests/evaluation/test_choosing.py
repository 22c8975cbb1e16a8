"""The choice among combinations, on metrics whose best value is known."""

import math
from collections.abc import Mapping

import pytest

from recspec.base.errors import SettingsError
from recspec.evaluation.choosing import MOST_BEYOND, Combination, Tried, choose


def log_distance(combination: Mapping[str, object], **best: float) -> float:
    return sum(abs(math.log(float(str(combination[name])) / value)) for name, value in best.items())


def chosen(grid: list[Combination], limit: float = math.inf, **best: float) -> tuple[Combination, list[Combination]]:
    found, tried = choose(
        grid,
        lambda each: (log_distance(each, **best), each),
        lower=True,
        may_be=lambda each: all(0 < float(str(value)) <= limit for value in each.values()),
    )
    return found, [each.settings for each in tried]


STRENGTHS: list[Combination] = [{"l2": 30.0}, {"l2": 10.0}, {"l2": 100.0}, {"l2": 300.0}]


@pytest.mark.parametrize(
    ("best", "found", "beyond"),
    [
        (40.0, 30.0, []),  # within the grid
        (1.0, 1.11, [3.33, 1.11, 0.37]),  # below it, until it gets worse
        (1000.0, 900.0, [900.0, 2700.0]),
    ],
)
def test_the_search_goes_on_beyond_the_grid_while_its_edge_is_best(
    best: float, found: float, beyond: list[float]
) -> None:
    assert chosen(STRENGTHS, l2=best) == ({"l2": found}, STRENGTHS + [{"l2": value} for value in beyond])


def test_the_search_ends_after_some_steps_and_at_the_limits_of_the_settings() -> None:
    assert len(chosen(STRENGTHS, l2=1e30)[1]) == 4 + MOST_BEYOND
    assert chosen(STRENGTHS, limit=1000.0, l2=1e30)[0] == {"l2": 900.0}


def test_whole_numbers_stay_whole() -> None:
    found, tried = chosen([{"k": 50}, {"k": 20}, {"k": 200}], k=7)
    assert found == {"k": 8}
    assert tried[3:] == [{"k": 8}, {"k": 3}]
    assert chosen([{"k": 1}, {"k": 2}], k=0.01)[1] == [{"k": 1}, {"k": 2}]  # the limits refuse 0


def test_settings_at_an_edge_move_alone_and_together() -> None:
    grid: list[Combination] = [{"l2": 1.0, "alpha": 1.0}, {"l2": 3.0, "alpha": 3.0}]

    def ridge(each: Combination) -> tuple[float, Combination]:
        l2, alpha = (float(str(each[name])) for name in ("l2", "alpha"))
        return 10 * abs(math.log(l2 / alpha)) + abs(math.log(l2 / 30)), each

    found, tried = choose(grid, ridge, lower=True)
    assert found == {"l2": 27.0, "alpha": 27.0}
    assert {"l2": 9.0, "alpha": 3.0} in [each.settings for each in tried]


def test_settings_of_one_value_or_without_a_number_have_no_edge() -> None:
    grid: list[Combination] = [{"l2": 2.0, "form": "a"}, {"l2": 2.0, "form": "b"}]
    assert chosen(grid, l2=50.0) == (grid[0], grid)
    assert chosen([{}]) == ({}, [{}])


def test_a_combination_that_fits_nothing_is_passed_over_but_for_the_first() -> None:
    def attempt(each: Combination) -> tuple[float, Combination]:
        if float(str(each["l2"])) < 5:
            raise SettingsError("too small")
        return float(str(each["l2"])), each

    found, tried = choose(STRENGTHS, attempt, lower=True)
    assert found == {"l2": 10.0}
    assert [each.settings for each in tried] == STRENGTHS
    with pytest.raises(SettingsError, match="too small"):
        choose([{"l2": 1.0}, *STRENGTHS], attempt, lower=True)


def test_each_combination_is_told_and_enough_is_enough() -> None:
    told: list[Tried] = []
    choose(STRENGTHS, lambda each: (1.0, each), lower=False, on_tried=told.append, enough=lambda: len(told) == 2)
    assert [(each.settings, each.value, each.best) for each in told] == [
        ({"l2": 30.0}, 1.0, True),
        ({"l2": 10.0}, 1.0, False),
    ]


def test_a_lead_that_is_no_more_than_chance_leaves_the_first() -> None:
    values = {30.0: 5.0, 10.0: 5.5, 100.0: 7.0, 300.0: 7.5}

    def attempt(each: Combination) -> tuple[float, float]:
        value = values.get(float(str(each["l2"])), 0.0)
        return value, value

    found, tried = choose(STRENGTHS, attempt, lower=False, beats=lambda ours, theirs: ours - theirs > 1)
    assert found == 7.0
    assert [each.best for each in tried] == [True, False, True, False]
    assert [each.is_level for each in tried] == [False, True, False, True]
    assert len(tried) == 4  # 100 is no edge
