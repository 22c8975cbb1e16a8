"""Experiments as a file describes them, and the variant of each user, by a hash.

The same user gets the same variant on every host and at every time, without a database. Nothing of it is random.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, field_validator, model_validator

from recspec.base.config import Settings, build, read_yaml
from recspec.base.errors import SettingsError, listed, unknown
from recspec.base.files import PathError, local, read_text
from recspec.loop.exploration import Exploration
from recspec.loop.interleaving import INTERLEAVED

MOST_BYTES, MOST_EXPERIMENTS = 1 << 20, 100  # of a file
MOST_VARIANTS, MOST_METRICS, MOST_FIELDS = 20, 50, 20  # of an experiment
DAY_US = 86_400 * 1_000_000


def _is_name(value: str) -> str:
    if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", value):
        raise ValueError("expected 1 to 64 letters, digits, points, hyphens or underscores, a letter or digit first")
    return value


Name = Annotated[str, AfterValidator(_is_name)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Margin = Annotated[float, Field(gt=0, lt=1)]


class Variant(Settings):
    """One way to answer, and the share of users who get it."""

    name: Name = Field(description="name in the journal and in reports")
    share: float = Field(gt=0, le=1, description="share of the experiment's users; all shares sum to 1")
    model: Text | None = Field(None, description="name of the served model that answers; by default the request's")
    version: Text | None = Field(None, description="version of that model; by default the newest")
    request: dict[Name, object] = Field(
        {}, max_length=MOST_FIELDS, description="fields of the request to set, as {diversity: 0.3}"
    )
    explore: Exploration | None = Field(
        None,
        description="temperature, floor, pool and last of lists drawn by chance; by default as `serve`",
    )

    @property
    def sets(self) -> set[str]:
        """What of an answer it decides."""
        own = ("model", "version", "explore")
        return {*self.request, *(name for name in own if getattr(self, name) is not None)}


class Metric(Settings):
    """An outcome of each user, counted from the events after the first exposure."""

    name: Name = Field(description="name in reports")
    event: Text = Field(description="type of the events that count")
    measure: Literal["count", "value", "any"] = Field(
        "count", description="count of events, sum of values, or 1 if any"
    )
    per: Literal["user", "exposure", "impression"] = Field(
        "user", description="user; or answer given, or answer confirmed by an impression, of events with its request id"
    )
    better: Literal["higher", "lower"] = Field("higher", description="direction of success")
    margin: Margin | None = Field(
        None, description="makes it a guardrail: largest share of the control's value that may be lost"
    )


class Guardrails(Settings):
    """Largest harm that a variant may do; null leaves a guardrail out."""

    errors: Margin | None = Field(0.01, description="rise of the share of answers that were a fallback after an error")
    empty: Margin | None = Field(0.01, description="rise of the share of answers without any item")
    latency: Margin | None = Field(0.1, description="relative rise of the mean milliseconds of an answer")
    coverage: Margin | None = Field(0.1, description="relative fall of the number of different items shown")


class Experiment(Settings):
    """Variants that are compared on users drawn by a hash. The first variant is the control."""

    name: Name = Field(description="name in the journal and in reports")
    variants: tuple[Variant, ...] = Field(min_length=2, max_length=MOST_VARIANTS, description="the control first")
    metrics: tuple[Metric, ...] = Field(
        min_length=1, max_length=MOST_METRICS, description="outcomes; the first one decides"
    )
    start: datetime = Field(description="when the first users enter, in UTC if it names no zone")
    days: float = Field(14.0, gt=0, le=366, description="days in which users enter")
    window_days: float = Field(7.0, gt=0, le=90, description="days after a user's first exposure that count")
    users: int = Field(10_000, ge=200, description="expected users at the end, where intervals are about narrowest")
    traffic: float = Field(1.0, gt=0, le=1, description="share of users who enter; raise it, and those who are in stay")
    unit: Literal["user"] = Field("user", description="what gets a variant")
    salt: Name | None = Field(None, description="salt of the hash; by default the name")
    layer: Name | None = Field(None, description="experiments of a layer share no user: each has a slot of its own")
    slot: tuple[float, float] = Field((0.0, 1.0), description="part of the layer, from and to, between 0 and 1")
    interleave: bool = Field(False, description="show one list drawn from both variants in turn, by team draft")
    decide: Literal["anytime", "end"] = Field(
        "anytime", description="verdict by the confidence sequence at any look, or by Welch's test at the end alone"
    )
    alpha: float = Field(0.05, gt=0, le=0.2, description="share of false alarms")
    cuped: bool = Field(True, description="reduce variance by each user's past, of window_days before the exposure")
    guardrails: Guardrails = Field(Guardrails(), description="largest harm that a variant may do")

    @field_validator("start", mode="before")
    @classmethod
    def _day_begins_at_midnight(cls, value: object) -> object:
        return datetime.combine(value, time()) if isinstance(value, date) and not isinstance(value, datetime) else value

    @field_validator("start")
    @classmethod
    def _is_in_utc(cls, value: datetime) -> datetime:
        if not 1970 < value.year < 2100:
            raise ValueError("expected a year from 1971 to 2099")
        return value.astimezone(UTC) if value.tzinfo is not None else value.replace(tzinfo=UTC)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if problems := [*self._problems()]:
            raise ValueError("; ".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        for what, names in (
            ("variants", [each.name for each in self.variants]),
            ("metrics", [each.name for each in self.metrics]),
        ):
            if twice := {name for name in names if names.count(name) > 1}:
                yield f"{what}: {listed(sorted(twice))} stands twice"
        if INTERLEAVED in {each.name for each in self.variants}:
            yield f"variants: the name '{INTERLEAVED}' is taken; give another one"
        if abs((total := sum(each.share for each in self.variants)) - 1) > 1e-9:
            yield f"variants: the shares sum to {total:.6g}; expected 1"
        if not 0 <= self.slot[0] < self.slot[1] <= 1:
            yield f"slot: found {[*self.slot]}; expected [from, to] with 0 <= from < to <= 1"
        if self.layer is None and self.slot != (0.0, 1.0):
            yield "slot: needs a layer"
        if self.interleave and len(self.variants) != 2:
            yield f"interleave: found {len(self.variants)} variants; expected 2"

    @property
    def start_us(self) -> int:
        """The start in microseconds since 1970 in UTC."""
        return round(self.start.timestamp() * 1_000_000)

    @property
    def window_us(self) -> int:
        """Microseconds after a user's first exposure that count."""
        return round(self.window_days * DAY_US)

    @property
    def entry_end_us(self) -> int:
        """When the last users have entered."""
        return self.start_us + round(self.days * DAY_US)

    @property
    def end_us(self) -> int:
        """The planned end: the last users' windows close."""
        return self.entry_end_us + self.window_us

    def variant_of(self, unit: str) -> str:
        """The variant that the hash gives a unit, whether or not the unit enters."""
        if self.interleave:
            return INTERLEAVED
        place, end = position(f"{self.salt or self.name}.variant", unit), 0.0
        for each in self.variants:
            end += each.share
            if place < end:
                return each.name
        return self.variants[-1].name  # shares may sum to a rounding below 1

    def enters(self, unit: str) -> bool:
        """Whether a unit takes part: it lies in the slot of the layer, and in the traffic."""
        low, high = self.slot
        if self.layer is not None and not low <= position(f"{self.layer}.layer", unit) < high:
            return False
        return position(f"{self.salt or self.name}.traffic", unit) < self.traffic


def position(salt: str, unit: str) -> float:
    """Where a unit lies in [0, 1) under a salt: the first 8 bytes of SHA-256(salt:unit) over 2⁶⁴, rounded down."""
    digest = hashlib.sha256(f"{salt}:{unit}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)  # a float has 53 bits; rounded up it could be 1


def assign(
    experiments: Iterable[Experiment],
    unit: str,
    *,
    at: int | None = None,
    recorded: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Experiment -> variant for a unit; experiments that it doesn't take part in are left out.

    Args:
        experiments: Those of a file.
        unit: Raw id of the user.
        at: Time in microseconds since 1970; new units enter only from the start on for `days`. None: at any time.
        recorded: Experiment -> variant of the journal. It holds, whatever became of traffic, shares and time.
    """
    found = {}
    for each in experiments:
        known = (recorded or {}).get(each.name)
        if known == INTERLEAVED or known in {variant.name for variant in each.variants}:
            found[each.name] = str(known)
        elif (at is None or each.start_us <= at < each.entry_end_us) and each.enters(unit):
            found[each.name] = each.variant_of(unit)
    return found


# --- the file --------------------------------------------------------------------------------------------------------


def load_experiments(path: str | Path) -> tuple[Experiment, ...]:
    """The experiments of a file: one, or several as a list under `experiments`.

    Raises:
        SettingsError: with every problem of the file.
    """
    file = local(path, "the experiments")
    try:
        data = read_yaml(read_text(file, most=MOST_BYTES))
    except PathError as error:
        raise SettingsError(str(error)) from None
    except ValueError as error:
        raise SettingsError(f"{file}: {error}") from None
    several = data["experiments"] if isinstance(data, dict) and [*data] == ["experiments"] else [data]
    if not isinstance(several, list) or not several or not all(isinstance(each, dict) for each in several):
        raise SettingsError(f"{file}: expected an experiment (name, start, variants, metrics), or a list `experiments`")
    if len(several) > MOST_EXPERIMENTS:
        raise SettingsError(f"{file}: {len(several):,} experiments; expected at most {MOST_EXPERIMENTS}")
    built: list[Experiment] = []
    problems: list[str] = []
    for place, each in enumerate(several):
        try:
            built.append(build(Experiment, str(file), each))
        except SettingsError as error:
            name = each.get("name") if len(several) > 1 else None
            prefix = "" if len(several) == 1 else f"{name if isinstance(name, str) else f'experiments[{place}]'}: "
            problems += [f"{prefix}{problem}" for problem in error.problems]
    problems += _meetings(built)
    SettingsError.refuse(str(file), problems)
    return tuple(built)


def named(experiments: Sequence[Experiment], name: str | None) -> Experiment:
    """The experiment of a name; the only one if there is no name.

    Raises:
        SettingsError: if there is none of this name, or several and no name.
    """
    known = [each.name for each in experiments]
    if name is None and len(experiments) > 1:
        raise SettingsError(f"the file holds {len(known)} experiments; choose one with --name: {listed(known)}")
    found = next((each for each in experiments if name in (None, each.name)), None)
    if found is None:
        raise SettingsError(f"--name: {unknown('experiment', str(name), known)}")
    return found


def _meetings(experiments: Sequence[Experiment]) -> Iterator[str]:
    """Problems of two experiments that may meet in one user."""
    for one, other in itertools.combinations(experiments, 2):
        if one.name == other.name:
            yield f"the experiment '{one.name}' stands twice; give it another name"
        elif (one.salt or one.name) == (other.salt or other.name):
            yield f"'{one.name}' and '{other.name}' have the same salt, so their users fall alike; give each its own"
        apart = one.slot[1] <= other.slot[0] or other.slot[1] <= one.slot[0]
        if one.layer is not None and one.layer == other.layer:
            if not apart:
                yield f"'{one.name}' and '{other.name}' share a part of the layer '{one.layer}'; give them other slots"
        elif both := _set_by(one) & _set_by(other):
            names = f"'{one.name}' and '{other.name}' both set {listed(sorted(both))} and may meet in one user"
            yield f"{names}; put them in one layer with a slot each"


def _set_by(experiment: Experiment) -> set[str]:
    own: set[str] = {"model"} if experiment.interleave else set()
    return own.union(*(each.sets for each in experiment.variants))
