"""The choice among combinations of settings by a metric, going on beyond the grid while its edge is best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from recspec.base.errors import SettingsError

T = TypeVar("T")

Combination = Mapping[str, object]
"""Values of settings by name."""

MOST_BEYOND = 6
"""Combinations tried beyond the grid: with steps of a factor of 3, values up to 700 times those of the edge."""


@dataclass(frozen=True)
class Tried:
    """A combination of settings and its metric on valid."""

    settings: Combination
    value: float
    best: bool
    """Whether it is taken instead of the one taken before."""
    is_level: bool = False
    """Whether it leads the one taken before by no more than chance, and so is not taken."""


def choose(
    grid: Sequence[Combination],
    attempt: Callable[[Combination], tuple[float, T]],
    *,
    lower: bool,
    beats: Callable[[T, T], bool] = lambda *_: True,
    may_be: Callable[[Combination], bool] = lambda _: True,
    on_tried: Callable[[Tried], None] = lambda _: None,
    enough: Callable[[], bool] = lambda: False,
    start: tuple[Tried, T] | None = None,
) -> tuple[T, tuple[Tried, ...]]:
    """The best combination's result, and all combinations tried.

    A combination is better if its metric is, and if its result beats the best one so far; of combinations that are
    level, the first one stays. All of the grid is tried. While the best combination has the smallest or largest value
    of a numeric setting, values beyond it are tried: each such setting alone, then all of them together. A combination
    with which nothing can be fitted is passed over, except for the first one.

    Args:
        grid: At least one combination.
        attempt: Gives the metric and the result of a combination.
        lower: Whether less is better.
        beats: Whether the first result's lead over the second one is more than chance.
        may_be: Whether values beyond the grid are within the limits of the settings.
        on_tried: Called after each combination.
        enough: Whether to stop.
        start: The best of combinations tried before, which is not tried again.
    """
    tried: list[Tried] = []
    path = [*([start[0].settings] if start else []), *grid]  # the values that have an edge
    done = list(path)  # whatever was tried
    best = start

    def tries(combination: Combination) -> bool:
        nonlocal best
        try:
            value, result = attempt(combination)
        except SettingsError:
            if best is None:
                raise
            return False
        leads = best is None or (value < best[0].value if lower else value > best[0].value)
        better = leads and (best is None or beats(result, best[1]))
        tried.append(Tried(combination, value, better, leads and not better))
        if better:
            best = tried[-1], result
        on_tried(tried[-1])
        return better

    for combination in grid:
        if best is not None and enough():
            break
        tries(combination)
    assert best is not None
    for _ in range(MOST_BEYOND):
        further = (each for each in _beyond(best[0].settings, path) if each not in done and may_be(each))
        combination = next(further, {})
        if not combination or enough():
            break
        done.append(combination)
        if tries(combination):
            path.append(combination)
    return best[1], tuple(tried)


def _beyond(best: Combination, path: Sequence[Combination]) -> Iterator[Combination]:
    """The best combination with each setting at an edge one step further, then with all of them."""
    further = {}
    for name, value in best.items():
        values = sorted({each for one in path if _is_number(each := one.get(name))})  # type: ignore[type-var]
        if len(values) > 1 and _is_number(value) and value in (values[0], values[-1]):
            inner = values[1] if value == values[0] else values[-2]
            further[name] = _step(value, inner)  # type: ignore[arg-type]
    for name, value in further.items():
        yield {**best, name: value}
    if len(further) > 1:
        yield {**best, **further}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _step(edge: float, inner: float) -> float:
    """The number that is to the edge as the edge is to the number beside it; of three digits, whole for whole ones."""
    beyond = edge * edge / inner
    if isinstance(edge, int):
        return round(beyond)
    return float(f"{beyond:.3g}")
