"""Learning-rate schedules: what multiplies the peak rate at each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

from recspec.errors import SettingsError, unknown

Schedule: TypeAlias = Literal["constant", "linear", "polynomial", "step"]
SCHEDULES: tuple[Schedule, ...] = ("constant", "linear", "polynomial", "step")


def learning_rate_factor(
    schedule: str,
    step: int,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    decay_start: float = 0.0,
    decay_end: float = 1.0,
    power: float = 2.0,
    step_at: Sequence[int] = (),
    step_factor: float | Sequence[float] = 0.1,
) -> float:
    """The factor of the learning rate at step number `step`; 0 is the first.

    Warm-up and decay multiply each other, so a schedule may decay during warm-up.

    Args:
        schedule: one of `SCHEDULES`.
        step: steps already done.
        total_steps: steps of the whole run.
        warmup_steps: steps over which the rate climbs linearly; it is above zero at the first.
        decay_start: share of the run after which linear and polynomial decay start, or the end of the warm-up if later.
        decay_end: share of the run at which they reach 0; it may be above 1.
        power: exponent of polynomial decay.
        step_at: steps at which the step schedule multiplies by `step_factor`.
        step_factor: one factor for every entry of `step_at`, or one for each.

    Raises:
        SettingsError: for an unknown schedule.
    """
    start = max(warmup_steps, round(decay_start * total_steps))
    if schedule == "constant":
        factor = 1.0
    elif schedule == "linear":
        factor = polynomial_decay(step, start=start, stop=round(decay_end * total_steps), power=1.0)
    elif schedule == "polynomial":
        factor = polynomial_decay(step, start=start, stop=round(decay_end * total_steps), power=power)
    elif schedule == "step":
        factor = step_decay(step, at=step_at, factor=step_factor)
    else:
        raise SettingsError(unknown("schedule", schedule, SCHEDULES))
    return warm_up(step, steps=warmup_steps) * factor


def warm_up(step: int, *, steps: int) -> float:
    """Linear climb: 1 / steps at the first step, 1 from step `steps - 1` on. Without a warm-up, always 1."""
    return min(1.0, (step + 1) / steps) if steps > 0 else 1.0


def polynomial_decay(step: int, *, start: int, stop: int, power: float) -> float:
    """1 up to step `start`, then ((stop - step) / (stop - start)) ** power, and 0 from `stop` on."""
    if step <= start:
        return 1.0
    return float((max(0, stop - step) / (stop - start)) ** power) if stop > start else 0.0


def step_decay(step: int, *, at: Sequence[int], factor: float | Sequence[float]) -> float:
    """The product of the factors of the entries of `at` that the run has reached; one factor serves them all."""
    factors = [factor] if isinstance(factor, (int, float)) else list(factor)
    if len(factors) == 1:
        factors = factors * len(at)
    return math.prod(each for reached, each in zip(at, factors, strict=True) if step >= reached)
