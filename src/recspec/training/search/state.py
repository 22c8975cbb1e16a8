"""What a search remembers between calls, and the value of one metric with its standard error.

A search lives in a folder and outlasts the process:

    OUT/auto.json           the candidates, their slices and values
    OUT/runs/NAME/          the run of each candidate, with the recipe that repeats it
    OUT/best/               the run of the winner
    OUT/leaderboard.json    the leaderboard
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recspec.base.errors import BundleError, SettingsError, listed, unknown
from recspec.base.files import PathError, confined, read_json, whole_file
from recspec.bundle import folder as bundle
from recspec.evaluation import (
    PROTOCOLS,
    EvaluateSettings,
    Evaluation,
    Progress,
    Question,
    difference,
    informed,
    is_lower_better,
    run_protocols,
    scores_of,
    silent,
)
from recspec.feature_spec import FeatureSpec
from recspec.loading import Ranks
from recspec.metrics import AT_K
from recspec.models import Model, known_models

OF_ROWS = ("auc", "log_loss", "accuracy", "calibration_error", "group_auc")
"""Metrics of protocol rows."""
OF_PROBABILITIES = tuple(f"rows/{name}" for name in OF_ROWS if name not in ("auc", "group_auc"))
"""Metrics that scores without a probability do not have."""


@dataclass(frozen=True, eq=False)
class Judged:
    """A model's evaluation, seen by one metric, `PROTOCOL/METRIC`."""

    metric: str
    evaluation: Evaluation

    @property
    def value(self) -> float:
        """The value."""
        protocol, _, name = self.metric.partition("/")
        return self.evaluation.metrics[protocol][name]

    @property
    def error(self) -> float:
        """Its standard error; NaN if unknown."""
        protocol, _, name = self.metric.partition("/")
        return self.evaluation.standard_errors.get(protocol, {}).get(name, math.nan)

    def lead(self, other: Judged) -> tuple[float, float]:
        """By how much it is better than another over the same users or rows, and the standard error of that; or NaN."""
        found = difference(other.evaluation, self.evaluation, *self.metric.split("/", 1))
        return (math.nan, math.nan) if found is None else (sign_of(self.metric) * found[0], found[1])


def question_of(spec: FeatureSpec, split: str, metric: str, users: int | None = None) -> Question:
    """What a split asks of every model alike; of so many users, if full ranking is asked of fewer."""
    protocol, _, name = metric.partition("/")
    cut_off = name.rpartition("@")[2]
    ks = (int(cut_off),) if "@" in name and cut_off.isdecimal() and int(cut_off) > 0 else None
    return Question(spec, split, (protocol,), EvaluateSettings(ks=ks, users=users if protocol == "full" else None))


def check_metric(metric: str) -> None:
    """Refuse a metric that no evaluation has.

    Raises:
        SettingsError: with the nearest known name.
    """
    protocol, _, name = metric.partition("/")
    if protocol not in PROTOCOLS:
        raise SettingsError(f"metric {metric!r}: {unknown('protocol', protocol, PROTOCOLS)}; a metric is PROTOCOL/NAME")
    at_k = [*AT_K, *(["mean_average_precision_with_leak"] if protocol == "sampled" else [])]
    known = OF_ROWS if protocol == "rows" else ("mrr", *(f"{each}@10" for each in at_k))
    found = re.fullmatch("(.+)@[1-9][0-9]{0,8}", name)
    name = f"{found[1]}@10" if found else name
    if name not in known:
        raise SettingsError(f"metric {metric!r}: {unknown('metric', name, known)}")


def judge(
    model: Model, question: Question, metric: str, ranks: Ranks | None = None, progress: Progress = silent
) -> Judged:
    """Evaluate a model on a split; an item model knows the users' events before it.

    Raises:
        SettingsError: if the split has no such metric.
    """
    found = run_protocols(scores_of(informed(model, question), question, ranks, progress))
    protocol, _, name = metric.partition("/")
    if name not in (known := found.metrics.get(protocol, {})):
        raise SettingsError(f"metric {metric}: {unknown('metric', name, known)}")
    return Judged(metric, found)


def sign_of(metric: str) -> float:
    """1 if more of the metric is better, otherwise -1."""
    return -1.0 if is_lower_better(metric) else 1.0


STATE, RUNS, BEST, BOARD, RECIPE = "auto.json", "runs", "best", "leaderboard.json", "recipe.yaml"
RECIPES, COMMANDS = "recipes", "commands.txt"
"""Of a blend: the recipes of its members, and the commands that train and blend them."""
WRITTEN = (STATE, RUNS, BEST, BOARD)
"""Files and folders that a search writes."""
BLEND = "blend"
"""Name of the blend among the candidates."""
MOST_MEMBERS = 4
"""Candidates that are blended."""


class Line(BaseModel):
    """A candidate: a model, what was set of it, and how far its training came."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str
    model: str
    settings: dict[str, object] = {}
    train: dict[str, object] = {}
    values: list[float] = Field([], max_length=64, description="the best value so far after each slice; more is better")
    began: int = Field(0, description="number of its latest slice, counted over all candidates")
    seconds: float = Field(0.0, ge=0, description="of all its slices, planning, judging and writing included")
    trained: float = Field(0.0, ge=0, description="seconds of training alone, by which a slice is bounded")
    epoch: float = Field(0.0, ge=0)
    best_epoch: float = Field(0.0, ge=0)
    beside: float = Field(0.0, ge=0, description="seconds of its latest slice beside training")
    attempts: int = Field(0, ge=0, description="slices that began since the last one that ended in any way")
    ended: str = Field("", description="why training ended by itself; empty while it waits")
    failed: str = Field("", description="the message of its failure")

    @property
    def is_over(self) -> bool:
        """Whether its training has ended by itself, or failed."""
        return bool(self.ended or self.failed)

    @property
    def best(self) -> float:
        """The best value so far; more is better."""
        return self.values[-1] if self.values and not self.failed else float("-inf")


class Place(BaseModel):
    """What was measured of a candidate at the end; null: not measured, or unknown."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    valid_error: float | None = None
    test: float | None = None
    test_error: float | None = None
    parameters: int = 0
    size_bytes: int = 0
    p50_ms: float | None = Field(None, description="median time of one request: all items for a user, or one row")
    problem: str = Field("", description="why it could not be measured")


class Blending(BaseModel):
    """The blend of the best candidates, or why there is none."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    members: list[str] = Field([], max_length=MOST_MEMBERS, description="names of the candidates that it holds")
    line: Line | None = None
    why_not: str = ""


class Ending(BaseModel):
    """The final evaluation. What is judged is written down before test is opened, so that test can't change it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    judged: list[str] = Field(min_length=1, description="candidates from best to worst on valid; the first has won")
    users: int | None = Field(None, ge=1, description="users ranked, with protocol full; null: all")
    trains_again: bool = Field(False, description="whether the winner is trained on train and valid")
    trained_again: bool = False
    not_again: str = Field("", description="why the winner was not trained again")
    members_again: list[str] = Field([], description="members of a blend that were trained again")
    places: dict[str, Place] = {}
    users_of: dict[str, tuple[int, int]] = Field(
        {}, description="with protocol full: users ranked, and of how many, for `valid`, `valid_error` and `test`"
    )
    lead: tuple[float, float] | None = Field(None, description="of the winner over the next model, and its error")
    done: bool = False


class State(BaseModel):
    """A search: what it is about, the time spent, and its candidates."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    dataset: str
    metric: str
    seed: int
    shorter: str = Field("", description="the metric that decides instead, if all lists are shorter than its cut-off")
    spent: float = Field(0.0, ge=0)
    users: int | None = Field(None, ge=1, description="users ranked on valid, with protocol full; null: all")
    each: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {}, description="seconds to judge a model on one user or row, by model"
    )
    size: int = Field(0, ge=0, description="users or rows of valid")
    models: list[str] | None = Field(None, description="models that were asked for; null: all that suit")
    lines: list[Line] = []
    left_out: dict[str, str] = {}
    warnings: list[str] = Field([], description="what makes the metric say little on this dataset")
    blend: Blending | None = Field(None, description="the blend of the best candidates; null: not tried yet")
    ending: Ending | None = None

    @property
    def candidates(self) -> list[Line]:
        """The models, and the blend if there is one."""
        return self.lines if self.blend is None or self.blend.line is None else [*self.lines, self.blend.line]

    @property
    def trained(self) -> list[Line]:
        """Candidates that were trained."""
        return [line for line in self.candidates if line.values and not line.failed]

    @property
    def ranked(self) -> list[Line]:
        """Candidates that were trained, from best to worst on valid."""
        return sorted(self.trained, key=lambda line: -line.best)

    def line(self, name: str) -> Line:
        """The candidate of a name."""
        return next(line for line in self.candidates if line.name == name)

    def members(self, line: Line) -> list[str]:
        """The candidates that a blend holds; none for a model."""
        return self.blend.members if self.blend is not None and line is self.blend.line else []

    @property
    def deciding(self) -> str:
        """The metric that decides."""
        return self.shorter or self.metric

    @classmethod
    def load(cls, out: Path) -> State | None:
        """The state in a folder; None if there is none.

        Raises:
            SettingsError: if the file is damaged, or names a run outside the folder.
        """
        file = out / STATE
        if not file.is_file():
            return None
        advice = "name another folder, or delete this one"
        try:
            data = read_json(file)
        except PathError as error:
            raise SettingsError(f"{error}; {advice}") from None
        try:
            found = cls.model_validate(data)
            found._check(out)
        except (ValidationError, PathError, SettingsError, ValueError) as error:
            raise SettingsError(f"{file}: damaged: {_first(error)}; {advice}") from None
        return found

    def check_runs(self, out: Path) -> None:
        """Refuse to go on if a run was deleted.

        Raises:
            SettingsError: with the names of all such runs.
        """
        gone = []
        for line in self.trained:
            try:
                bundle.find(out / RUNS / line.name)
            except BundleError:
                gone.append(line.name)
        if gone:
            kept = f"; {out / BEST} is still there" if (out / BEST).is_dir() else ""
            raise SettingsError(
                f"{out / RUNS}: the search can't go on without {listed(gone)}; put the deleted runs back, or name "
                f"another folder{kept}"
            )

    def _check(self, out: Path) -> None:
        """Refuse what no search writes.

        Raises:
            ValueError: with the first problem.
            PathError: for a run outside the folder.
            SettingsError: for an unknown metric.
        """
        for metric in filter(None, (self.metric, self.shorter)):
            check_metric(metric)
        if len({line.name for line in self.candidates}) < len(self.candidates) or not self.lines:
            raise ValueError("two candidates of one name, or none at all")
        for line in self.lines:
            confined(out / RUNS, line.name)
            if line.model not in (known := known_models()):
                raise ValueError(unknown("model", line.model, known))
        names = {line.name for line in self.trained}
        if self.blend is not None:
            own = self.blend.line
            if own is not None and ((own.name, own.model) != (BLEND, BLEND) or not self.blend.members):
                raise ValueError("the blend has another name or no members")
            if not names.issuperset(self.blend.members) or BLEND in self.blend.members:
                raise ValueError("the blend holds a candidate that was not trained")
        if self.ending is not None and not names.issuperset(self.ending.judged):
            raise ValueError("the final evaluation names a candidate that was not trained")

    def save(self, out: Path) -> None:
        """Write the state, whole or not at all."""
        with whole_file(out / STATE) as temporary:
            temporary.write_text(json.dumps(self.model_dump(mode="json"), indent=1), encoding="utf-8")


def _first(error: Exception) -> str:
    """The first problem in a line."""
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        return f"{where}: {problem['msg']}" if where else problem["msg"]
    return str(error).partition("\n")[0]
