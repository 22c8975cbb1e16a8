"""The end of a search: the winner is trained again on train and valid, test is opened, the leaderboard is written."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from recspec.auto import candidates
from recspec.auto.leaderboard import JUDGED, Leaderboard, measure_places
from recspec.auto.state import BEST, RECIPE, RUNS, Line, State
from recspec.bundle import folder as bundle
from recspec.distributed import Ranks
from recspec.errors import Interrupted, RecspecError, SettingsError
from recspec.files import put_in_place, staging, whole_file
from recspec.spec import FeatureSpec
from recspec.training import Event, train

LEAST = 20.0
"""Seconds that the end may take even if the time is over."""


def finish(
    spec: FeatureSpec,
    state: State,
    out: Path,
    left: float,
    ranks: Ranks,
    on_event: Callable[[str, Event], None],
    stop_requested: Callable[[], bool],
) -> Leaderboard:
    """Choose the winner on valid and judge the best candidates, with `left` seconds.

    Raises:
        SettingsError: if no candidate was trained.
        Interrupted: if `stop_requested` says so.
    """
    ranked = sorted((line for line in state.lines if line.values and not line.failed), key=lambda line: -line.best)
    if not ranked:
        failed = [f"{line.name}: {line.failed or 'it did not begin in the time'}" for line in state.lines]
        raise SettingsError.of(f"{out}: no model was trained; give more --minutes", failed)
    left = max(left, LEAST)
    run = out / RUNS / ranked[0].name
    trained = _train_again(spec, ranked[0], run, left, ranks, on_event, stop_requested)
    again = trained if isinstance(trained, Path) else None
    with staging(out / BEST) as copied:
        best = copied / "run"
        shutil.copytree(again or run, best, ignore=shutil.ignore_patterns("checkpoints", ".*"))
        put_in_place(best, out / BEST)
    needed = 2 * state.size * sum(state.each.get(line.model, 0.0) for line in ranked[:JUDGED])
    users = state.users if needed > left else None  # all of them if the time allows it
    judged = {line.name: out / RUNS / line.name for line in ranked[:JUDGED]}
    places = measure_places(spec, state.deciding, judged, again, ranks, users=users)
    why_not = trained if isinstance(trained, str) else ""
    board = Leaderboard.of(state, ranked, places, not_again=why_not, folder=out)
    board.save(out)
    return board


def _train_again(
    spec: FeatureSpec,
    line: Line,
    run: Path,
    left: float,
    ranks: Ranks,
    on_event: Callable[[str, Event], None],
    stop_requested: Callable[[], bool],
) -> Path | str:
    """The run of the winner trained on train and valid up to its best epoch, or the reason that there is none."""
    if "valid" not in spec.splits:
        return "the dataset has no split valid"
    again = run.parent / f"{line.name}-again"
    shutil.rmtree(again, ignore_errors=True)
    card = bundle.read_card(bundle.find(run))
    if candidates.is_fitted(line.model):
        tried = card.trained.get("tried")
        needed = line.seconds / max(1, len(tried) if isinstance(tried, Sequence) else 1)
        asked = {**line.train}
    else:
        needed = 1.5 * line.seconds * line.best_epoch / max(1.0, line.epoch)
        # Nothing is left to calibrate on.
        asked = {**card.train, "epochs": max(1, math.ceil(line.best_epoch)), "calibration": "none"}
        asked |= {"minutes": None, "patience": None, "valid_share": 0.0}
    if needed > left:
        return f"it would take {needed:.0f} s, and {left:.0f} s are left"
    asked["train_splits"] = ["train", "valid"]
    own, train_settings = candidates.built(line.model, {"settings": card.settings, "train": asked})
    try:
        train(spec=spec, model_name=line.model, run=again, settings=train_settings, model_settings=own, ranks=ranks,
              on_event=lambda event: on_event(f"{line.name}, again", event), stop_requested=stop_requested)  # fmt: skip
    except Interrupted:
        raise
    except RecspecError as error:
        return str(error)
    recipe = {**yaml.safe_load((run / RECIPE).read_text(encoding="utf-8")), "train": asked}
    with whole_file(again / RECIPE) as temporary:
        temporary.write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return again
