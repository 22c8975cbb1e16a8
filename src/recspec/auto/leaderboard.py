"""The leaderboard of a search."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from recspec import latency
from recspec.auto.cost import one_request
from recspec.auto.judging import Judged, judge, sign_of
from recspec.auto.state import BEST, BOARD, RECIPE, RUNS, Line, State
from recspec.bundle import folder as bundle
from recspec.distributed import Ranks
from recspec.files import whole_file
from recspec.spec import FeatureSpec

JUDGED = 5
"""Best candidates that are measured again for standard errors, and on test."""
AGAIN = "again"
"""Name of the winner's second training."""
CLEAR = 2.0
"""Standard errors from which a lead counts as significant."""
SECONDS = 0.3
"""Time for each latency."""


@dataclass(frozen=True)
class Place:
    """What was measured of a finished candidate."""

    valid: Judged | None
    test: Judged | None
    parameters: int
    size_bytes: int
    p50_ms: float | None
    """Median time for one request on one process: all items for a user, or one row."""


def measure_places(
    spec: FeatureSpec, metric: str, runs: Mapping[str, Path], again: Path | None, ranks: Ranks, *, users: int | None
) -> dict[str, Place]:
    """Measure some candidates by their runs, and under the name `AGAIN` the winner that was trained again.

    With `users`, so many of them are ranked.
    """
    found = {}
    named = {**runs, **({AGAIN: again} if again is not None else {})}
    for name, run in named.items():
        opened = bundle.load(run, device=ranks.device)
        model, folder = opened.model.eval(), bundle.find(run)
        with torch.inference_mode():
            judged = name != AGAIN and "valid" in spec.splits  # the second training of the winner has seen valid
            calibration, model.calibration = model.calibration, None  # it was fitted to the rows of valid
            valid = judge(model, spec, "valid", metric, ranks, users=users) if judged else None
            model.calibration = calibration
            test = judge(model, spec, "test", metric, ranks, users=users) if "test" in spec.splits else None
            call, _ = one_request(model, spec, metric.partition("/")[0])
            taken = latency.measure(call, 1, seconds=SECONDS, warmup=3, at_least=5).p50
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        found[name] = Place(valid, test, sum(each.numel() for each in model.state_dict().values()), size, taken)
    return found


@dataclass(frozen=True)
class Leaderboard:
    """The candidates of a search, best first by valid, and what the search concludes."""

    metric: str
    lines: tuple[Mapping[str, object], ...]
    """Candidates that were trained, with their values, standard errors, cost, and the command that repeats each."""
    verdict: str
    """Whether the winner's lead is significant."""
    best: Path
    """The run of the winner."""
    seconds: float
    """The time spent in all calls."""
    seconds_of_losers: float
    """Of these, the time spent on candidates that did not win."""
    left_out: Mapping[str, str]
    """Models that can't train on the dataset, and candidates that failed, with the reason."""

    @classmethod
    def of(
        cls, state: State, ranked: Sequence[Line], places: Mapping[str, Place], *, not_again: str, folder: Path
    ) -> Self:
        """The leaderboard of a search that is over; `not_again`: why the winner was not trained again, if so."""
        sign = sign_of(state.deciding)
        lines = [_line(line, places.get(line.name), sign, folder, state.dataset) for line in ranked]
        winner = ranked[0]
        if not_again:
            lines[0] = {**lines[0], "not_trained_again": not_again}
        else:
            once_more = places[AGAIN]
            test = {} if once_more.test is None else {"test": once_more.test.value, "test_error": once_more.test.error}
            lines[0] = {
                **lines[0],
                "trained_again_on": ["train", "valid"],
                **{f"again_{k}": v for k, v in test.items()},
            }
        failed = {line.name: line.failed for line in state.lines if line.failed}
        losers = sum(line.seconds for line in state.lines if line.name != winner.name)
        verdict = _verdict(ranked, places, state.deciding)
        left_out = {**state.left_out, **failed}
        return cls(state.deciding, tuple(lines), verdict, folder / BEST, state.spent, losers, left_out)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON; a value that was not measured is null."""
        return {
            "metric": self.metric,
            "lines": [{name: _plain(value) for name, value in line.items()} for line in self.lines],
            "verdict": self.verdict,
            "best": str(self.best),
            "seconds": round(self.seconds, 1),
            "seconds_of_losers": round(self.seconds_of_losers, 1),
            "left_out": dict(self.left_out),
        }

    def save(self, folder: Path) -> None:
        """Write `leaderboard.json`."""
        with whole_file(folder / BOARD) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False), encoding="utf-8")


def _line(line: Line, place: Place | None, sign: float, folder: Path, dataset: str) -> dict[str, object]:
    recipe = folder / RUNS / line.name / RECIPE
    found: dict[str, object] = {
        "name": line.name,
        "model": line.model,
        "valid": sign * line.best,
        "valid_error": place.valid.error if place and place.valid else None,
        "test": place.test.value if place and place.test else None,
        "test_error": place.test.error if place and place.test else None,
        "seconds": round(line.seconds, 1),
        "epochs": line.epoch,
        "ended": line.ended or "waited",
        "parameters": place.parameters if place else None,
        "megabytes": round(place.size_bytes / 1e6, 3) if place else None,
        "p50_ms": round(place.p50_ms, 3) if place and place.p50_ms is not None else None,
        "again": f"recspec train {line.model} {shlex.quote(dataset)} RUN --recipe {shlex.quote(str(recipe))}",
    }
    return found


def _verdict(ranked: Sequence[Line], places: Mapping[str, Place], metric: str) -> str:
    """A sentence on the winner's lead over the next other model."""
    winner = ranked[0]
    second = next((line for line in ranked if line.model != winner.model and line.name in places), None)
    if second is None:
        return f"{winner.name} is the only model that was compared"
    ours, theirs = places[winner.name].valid, places[second.name].valid
    by, error = (math.nan, math.nan) if ours is None or theirs is None else ours.lead(theirs)
    if math.isnan(error):
        return f"{winner.name} leads {second.name} on valid; the standard error of the lead is unknown"
    if error == 0:
        return f"{winner.name} and {second.name} are equal on valid in {metric}"
    said = f"{winner.name} leads {second.name} by {by:.4f} in {metric} on valid, {by / error:.1f} standard errors"
    if by / error >= CLEAR:
        return f"{said}: the lead is significant"
    return f"{said}: no significant lead; take the cheaper or the faster of the two"


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
