"""What a search remembers between calls, the value of one metric with its standard error, and the leaderboard.

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
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recspec import __version__
from recspec.base import config
from recspec.base.errors import BundleError, SettingsError, listed, unknown
from recspec.base.files import PathError, confined, read_json, write_whole
from recspec.bundle import Blend
from recspec.bundle import folder as bundle
from recspec.evaluation import (
    PROTOCOLS,
    EvaluateSettings,
    Evaluation,
    EvaluationTask,
    Progress,
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
from recspec.models import FittedModel, Model, find_model, known_models
from recspec.training import RECIPE, Event, TrackedSearch

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


def question_of(spec: FeatureSpec, split: str, metric: str, users: int | None = None) -> EvaluationTask:
    """What a split asks of every model alike; of so many users, if full ranking is asked of fewer."""
    protocol, _, name = metric.partition("/")
    cut_off = name.rpartition("@")[2]
    ks = (int(cut_off),) if "@" in name and cut_off.isdecimal() and int(cut_off) > 0 else None
    return EvaluationTask(
        spec, split, (protocol,), EvaluateSettings(ks=ks, users=users if protocol == "full" else None)
    )


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
    model: Model, question: EvaluationTask, metric: str, ranks: Ranks | None = None, progress: Progress = silent
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


STATE, RUNS, BEST, BOARD = "auto.json", "runs", "best", "leaderboard.json"
RECIPES, COMMANDS = "recipes", "commands.txt"
"""Of a blend: the recipes of its members, and the commands that train and blend them."""
WRITTEN = (STATE, RUNS, BEST, BOARD)
"""Files and folders that a search writes."""
BLEND = "blend"
"""Name of the blend among the candidates."""
MOST_MEMBERS = 4
"""Candidates that are blended."""


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Line(_Stored):
    """A candidate: a model, what was set of it, and how far its training came."""

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
    fit: float = Field(0.0, ge=0, description="seconds of one fit, estimated before the first")
    hope: float | None = Field(None, ge=0, description="most that it may still gain; null: unknown")
    attempts: int = Field(0, ge=0, description="slices that began since the last one that ended in any way")
    ended: str = Field("", description="why training ended by itself; empty while it waits")
    failed: str = Field("", description="the message of its failure")

    @property
    def is_fitted(self) -> bool:
        """Whether its model is fitted in closed form, so that its training can't pause."""
        return self.model != Blend.name and issubclass(find_model(self.model), FittedModel)

    @property
    def is_over(self) -> bool:
        """Whether its training has ended by itself, or failed."""
        return bool(self.ended or self.failed)

    @property
    def best(self) -> float:
        """The best value so far; more is better."""
        return self.values[-1] if self.values and not self.failed else float("-inf")


class Place(_Stored):
    """What was measured of a candidate at the end; null: not measured, or unknown."""

    valid_error: float | None = None
    test: float | None = None
    test_error: float | None = None
    parameters: int = 0
    size_bytes: int = 0
    p50_ms: float | None = Field(None, description="median time of one request: all items for a user, or one row")
    problem: str = Field("", description="why it could not be measured")


class Blending(_Stored):
    """The blend of the best candidates, or why there is none."""

    members: list[str] = Field([], max_length=MOST_MEMBERS, description="names of the candidates that it holds")
    line: Line | None = None
    why_not: str = ""


class Ending(_Stored):
    """The final evaluation. What is judged is written down before test is opened, so that test can't change it."""

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


class State(_Stored):
    """A search: what it is about, the time spent, and its candidates."""

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

    def progress(self, left: float) -> str:
        """A sentence on a search that is taken up, with `left` seconds."""
        over = f"{sum(line.is_over for line in self.lines)} of {len(self.lines)} candidates are over"
        said = [f"the search goes on after {self.spent:.0f} s, {max(0.0, left) / 60:.1f} minutes are left: {over}"]
        if self.ranked:
            said.append(f"best so far {self.ranked[0].name}, {self.deciding} {abs(self.ranked[0].best):.4g}")
        if self.ending is not None:
            judged = f"{len(self.ending.places)} of {len(self.ending.judged)} candidates are judged"
            said.append(f"final evaluation: {'done' if self.ending.done else judged}")
        return "; ".join(said)

    @classmethod
    def load(cls, out: Path) -> State | None:
        """The state in a folder; None if there is none.

        Raises:
            SettingsError: if the file is damaged, or names a run outside the folder.
        """
        file, advice = out / STATE, "name another folder, or delete this one"
        if not file.is_file():
            return None
        try:
            data = read_json(file)
        except PathError as error:
            raise SettingsError(f"{error}; {advice}") from None
        try:
            found = cls.model_validate(data)
            found._check(out)
        except (ValidationError, PathError, SettingsError, ValueError) as error:
            raise SettingsError(f"{file}: damaged: {_first_problem(error)}; {advice}") from None
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
        """Refuse what no search writes."""
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
        write_whole(out / STATE, json.dumps(self.model_dump(mode="json"), indent=1))


def _first_problem(error: Exception) -> str:
    """The first problem in a line."""
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        return f"{where}: {problem['msg']}" if where else problem["msg"]
    return str(error).partition("\n")[0]


@dataclass
class Search:
    """A search and who watches it: what its race and its end have in common."""

    spec: FeatureSpec
    out: Path
    _: KW_ONLY
    ranks: Ranks = field(default_factory=Ranks)
    on_event: Callable[[str, Event], None] = lambda _, __: None
    """Called with the name of a candidate and each event of its training."""
    stop_requested: Callable[[], bool] = lambda: False
    tell: Callable[[str], None] = lambda _: None
    """Called with a sentence on what the search takes up, leaves out, or does at its end."""
    state: State = field(init=False, repr=False)
    tracked: TrackedSearch = field(init=False, repr=False)

    def run_of(self, name: str) -> Path:
        """The folder of a candidate's run."""
        return self.out / RUNS / name


# --- the leaderboard -------------------------------------------------------------------------------------------------

AGAIN = "again"
"""Name of the winner's second training."""
CLEAR = 2.0
"""Standard errors from which a lead counts as significant."""
NOT_BEGUN = "not begun: no time was left; give more --minutes"
"""Why a candidate was not trained."""


@dataclass(frozen=True)
class Leaderboard:
    """The candidates of a search, best first by valid, and what the search concludes."""

    metric: str
    lines: tuple[Mapping[str, object], ...]
    """Trained candidates with their values, standard errors, cost, and the command that repeats each."""
    verdict: str
    """Whether the winner's lead is significant, or why that can't be told."""
    best: Path
    """The run of the winner."""
    seconds: float
    """The time spent in all calls."""
    given: float
    """The seconds given; a search ends early if nothing more can win."""
    seconds_of_losers: float
    """Of the time spent, that on candidates that did not win."""
    more: str
    """What more minutes would buy."""
    left_out: Mapping[str, str]
    """Models that can't train on the dataset, and candidates that failed or did not begin, with the reason."""
    warnings: tuple[str, ...] = ()
    """What makes the metric say little on this dataset."""
    users: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """With protocol full, how many users were ranked, and of how many: for `valid`, `valid_error` and `test`. The lead
    is over the users of `valid_error`."""

    @classmethod
    def of(cls, state: State, ending: Ending, folder: Path, given: float) -> Self:
        """The leaderboard of a search that is over, with the seconds that it was given."""
        sign, ranked = sign_of(state.deciding), state.ranked
        lines = [_line(line, ending.places.get(line.name), sign, folder, state) for line in ranked]
        if not ending.trained_again:
            lines[0]["not_trained_again"] = ending.not_again
        else:
            lines[0]["trained_again_on"] = ["train", "valid"]
            once_more = ending.places.get(AGAIN)
            if once_more is not None and once_more.test is not None:
                lines[0] |= {"again_test": once_more.test, "again_test_error": once_more.test_error}
        failed = {line.name: line.failed or NOT_BEGUN for line in state.lines if line.failed or not line.values}
        if state.blend is not None and state.blend.why_not:
            failed[BLEND] = state.blend.why_not
        members = state.members(ranked[0])
        return cls(
            metric=state.deciding,
            lines=tuple(lines),
            verdict=_verdict(ranked, ending, state.deciding, blended=bool(members)),
            best=folder / BEST,
            seconds=state.spent,
            given=given,
            more=what_more_buys(state, ranked[0]),
            seconds_of_losers=sum(
                line.seconds for line in state.candidates if line.name not in (ending.judged[0], *members)
            ),
            left_out={**state.left_out, **failed},
            warnings=tuple(state.warnings),
            users=ending.users_of,
        )

    @property
    def share_of_losers(self) -> float:
        """Share of the time given that was spent on candidates that did not win."""
        return self.seconds_of_losers / max(self.seconds, self.given, 1e-9)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON; a value that was not measured is null."""
        return {
            "metric": self.metric,
            "lines": [{name: _plain(value) for name, value in line.items()} for line in self.lines],
            "verdict": self.verdict,
            "best": str(self.best),
            "more": self.more,
            "seconds": round(self.seconds, 1),
            "given": round(self.given, 1),
            "seconds_of_losers": round(self.seconds_of_losers, 1),
            "share_of_losers": round(self.share_of_losers, 4),
            "left_out": dict(self.left_out),
            "warnings": list(self.warnings),
            "users": {figure: {"ranked": ranked, "of": known} for figure, (ranked, known) in self.users.items()},
        }

    def save(self, folder: Path) -> None:
        """Write `leaderboard.json`."""
        write_whole(folder / BOARD, json.dumps(self.to_dict(), indent=1, ensure_ascii=False))


def _line(line: Line, place: Place | None, sign: float, folder: Path, state: State) -> dict[str, object]:
    run, members = folder / RUNS / line.name, state.members(line)
    words = ["train", line.model, state.dataset, "RUN", "--recipe", str(run / RECIPE)]
    if members:
        runs = [str(folder / RUNS / name) for name in members]
        words = ["pipeline", "blend", "RUN", *runs, "--data", state.dataset, "--metric", state.deciding]
    found: dict[str, object] = {
        "name": line.name,
        "model": line.model,
        "valid": sign * line.best,
        "valid_error": place.valid_error if place else None,
        "test": place.test if place else None,
        "test_error": place.test_error if place else None,
        "seconds": round(line.seconds, 1),
        "epochs": line.epoch,
        "ended": line.ended or "waited",
        "parameters": place.parameters if place else None,
        "megabytes": round(place.size_bytes / 1e6, 3) if place else None,
        "p50_ms": round(place.p50_ms, 3) if place and place.p50_ms is not None else None,
        "again": shlex.join(["recspec", *words]),
        **({"members": members} if members else {}),
    }
    return {**found, "problem": place.problem} if place and place.problem else found


def second_of(ranked: Sequence[Line], judged: Sequence[str]) -> Line | None:
    """The best candidate of another model than the winner's among those that are judged."""
    return next((line for line in ranked if line.model != ranked[0].model and line.name in judged), None)


def _verdict(ranked: Sequence[Line], ending: Ending, metric: str, *, blended: bool) -> str:
    """A sentence on the winner's lead over the next other model."""
    winner, second = ranked[0], second_of(ranked, ending.judged)
    if second is None:
        return f"{winner.name} is the only model that was compared"
    by, error = ending.lead or (math.nan, math.nan)
    if blended and by > 0:
        return (
            f"{winner.name} leads {second.name} by {by:.4f} in {metric} on valid; its weights were chosen on users of "
            "valid, so this lead is no evidence: compare the two on test"
        )
    if math.isnan(by):
        return f"{winner.name} leads {second.name} on valid; the standard error of the lead is unknown"
    if error == 0:
        return f"{winner.name} and {second.name} are equal on valid in {metric}"
    leads = "leads" if by >= 0 else "was ahead in the search, but now trails"
    beside = f"{abs(by):.4f} in {metric} on valid, {abs(by) / error:.1f} standard errors"
    said = f"{winner.name} {leads} {second.name} by {beside}"
    if by / error >= CLEAR:
        return f"{said}: the lead is significant"
    return f"{said}: no significant lead; take the cheaper or the faster of the two"


def what_more_buys(state: State, winner: Line) -> str:
    """A sentence on the candidates that could still train, and how much they may gain."""
    said, unknown_yet, fresh = list[str](), list[str](), list[str]()
    for line in state.lines:
        if line.is_over:
            continue
        if not line.values:
            fresh.append(line.name)
        elif line.hope is None:
            unknown_yet.append(line.name)
        elif line.is_fitted:  # what other settings bring is not known from those that were tried
            if line is winner or winner.best - line.best < line.hope:
                said.append(f"{line.name} has settings left to try")
        elif line is winner:
            said.append(f"{line.name} may still gain {line.hope:.2g}")
        elif winner.best - line.best < line.hope:
            said.append(f"{line.name} is {winner.best - line.best:.2g} behind and may gain {line.hope:.2g}")
    if unknown_yet:
        said.append(f"{listed(unknown_yet)} trained too little to tell")
    if fresh:
        said.append(f"{listed(fresh)} did not begin")
    if said:
        return f"more minutes may find a better model: {'; '.join(said)}"
    return "more minutes would hardly find a better model: every candidate has ended, or is too far behind"


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- recipes ---------------------------------------------------------------------------------------------------------


def write_recipe(line: Line, run: Path, dataset: str) -> None:
    """Write the recipe that repeats a candidate's training up to its best epoch."""
    card = bundle.read_card(bundle.find(run))
    by_steps = {**card.train, "epochs": max(1, math.ceil(line.best_epoch)), "minutes": None, "patience": None}
    about = {"dataset": dataset, "how": f"candidate {line.name} of `recspec auto`", "recspec": __version__}
    train = dict(line.train) if line.is_fitted else by_steps
    recipe = {"about": about, "model": line.model, "settings": dict(card.settings), "train": train}
    config.write_recipe(run / RECIPE, recipe)


def write_blend(
    run: Path, runs: Mapping[str, Path], dataset: str, *, metric: str = "", like: Path | None = None
) -> None:
    """Write the recipes of a blend's members, and the commands that train and blend them again.

    The blend's weights are chosen by a metric on valid, or are those of another blend.
    """
    folder, lines = run / RECIPES, list[str]()
    folder.mkdir(exist_ok=True)
    for name, each in runs.items():
        recipe = folder / f"{name}.yaml"
        shutil.copyfile(each / RECIPE, recipe)
        model = yaml.safe_load(recipe.read_text(encoding="utf-8"))["model"]
        words = ("train", model, dataset, f"AGAIN/{name}", "--recipe", f"{RECIPES}/{recipe.name}")
        lines.append(shlex.join(("recspec", *words)))
    how = ("--like", str(like)) if like is not None else ("--data", dataset, "--metric", metric)
    members = (f"AGAIN/{name}" for name in runs)
    lines.append(shlex.join(("recspec", "pipeline", "blend", "AGAIN/blend", *members, *how)))
    write_whole(run / COMMANDS, "\n".join(lines) + "\n")
