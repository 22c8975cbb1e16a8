"""The leaderboard of a search, and recipes that repeat a candidate's training."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import yaml

from recspec import __version__
from recspec.base.files import whole_file
from recspec.bundle import folder as bundle
from recspec.training.search.candidates import is_fitted
from recspec.training.search.state import (
    BEST,
    BLEND,
    BOARD,
    COMMANDS,
    RECIPE,
    RECIPES,
    RUNS,
    Ending,
    Line,
    Place,
    State,
    sign_of,
)


def write_recipe(line: Line, run: Path, dataset: str) -> None:
    """Write the recipe that repeats a candidate's training up to its best epoch."""
    card = bundle.read_card(bundle.find(run))
    by_steps = {**card.train, "epochs": max(1, math.ceil(line.best_epoch)), "minutes": None, "patience": None}
    how = f"candidate {line.name} of `recspec auto`"
    about = {"dataset": dataset, "how": how, "recspec": __version__}
    train = dict(line.train) if is_fitted(line.model) else by_steps
    _write(run, {"about": about, "model": line.model, "settings": dict(card.settings), "train": train})


def write_again(run: Path, again: Path, train: Mapping[str, object]) -> None:
    """Write the recipe of the second training in `again` of the run's model."""
    _write(again, {**yaml.safe_load((run / RECIPE).read_text(encoding="utf-8")), "train": dict(train)})


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
        lines.append(_command("train", model, dataset, f"AGAIN/{name}", "--recipe", f"{RECIPES}/{recipe.name}"))
    how = ("--like", str(like)) if like is not None else ("--data", dataset, "--metric", metric)
    lines.append(_command("pipeline", "blend", "AGAIN/blend", *(f"AGAIN/{name}" for name in runs), *how))
    with whole_file(run / COMMANDS) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _command(*words: str) -> str:
    return shlex.join(("recspec", *words))


def _write(run: Path, recipe: Mapping[str, object]) -> None:
    with whole_file(run / RECIPE) as temporary:
        temporary.write_text(yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True), encoding="utf-8")


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
    """Candidates that were trained, with their values, standard errors, cost, and the command that repeats each."""
    verdict: str
    """Whether the winner's lead is significant, or why that can't be told."""
    best: Path
    """The run of the winner."""
    seconds: float
    """The time spent in all calls."""
    seconds_of_losers: float
    """Of these, the time spent on candidates that did not win."""
    left_out: Mapping[str, str]
    """Models that can't train on the dataset, and candidates that failed or did not begin, with the reason."""
    warnings: tuple[str, ...] = ()
    """What makes the metric say little on this dataset."""
    users: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """With protocol full, how many users were ranked, and of how many: for `valid`, `valid_error` and `test`. The lead
    is over the users of `valid_error`."""

    @classmethod
    def of(cls, state: State, ending: Ending, folder: Path) -> Self:
        """The leaderboard of a search that is over."""
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
        won = {ending.judged[0], *state.members(ranked[0])}
        losers = sum(line.seconds for line in state.candidates if line.name not in won)
        left_out = {**state.left_out, **failed}
        blended = bool(state.members(ranked[0]))
        return cls(
            state.deciding,
            tuple(lines),
            _verdict(ranked, ending, state.deciding, blended=blended),
            folder / BEST,
            state.spent,
            losers,
            left_out,
            tuple(state.warnings),
            ending.users_of,
        )

    @property
    def share_of_losers(self) -> float:
        """Share of the time that was spent on candidates that did not win."""
        return self.seconds_of_losers / max(self.seconds, 1e-9)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON; a value that was not measured is null."""
        return {
            "metric": self.metric,
            "lines": [{name: _plain(value) for name, value in line.items()} for line in self.lines],
            "verdict": self.verdict,
            "best": str(self.best),
            "seconds": round(self.seconds, 1),
            "seconds_of_losers": round(self.seconds_of_losers, 1),
            "share_of_losers": round(self.share_of_losers, 4),
            "left_out": dict(self.left_out),
            "warnings": list(self.warnings),
            "users": {figure: {"ranked": ranked, "of": known} for figure, (ranked, known) in self.users.items()},
        }

    def save(self, folder: Path) -> None:
        """Write `leaderboard.json`."""
        with whole_file(folder / BOARD) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False), encoding="utf-8")


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


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
