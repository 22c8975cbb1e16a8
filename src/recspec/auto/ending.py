"""The end of a search: the winner is trained again on train and valid, test is opened, the leaderboard is written."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from recspec.auto import candidates
from recspec.auto.leaderboard import JUDGED, Leaderboard, measure_places
from recspec.auto.state import BEST, RECIPE, RUNS, Line, State
from recspec.bundle import folder as bundle
from recspec.distributed import Ranks
from recspec.errors import RecspecError, SettingsError
from recspec.files import put_in_place, staging
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
    again = _train_again(spec, ranked[0], run, left, ranks, on_event, stop_requested)
    with staging(out / BEST) as copied:
        best = copied / "run"
        shutil.copytree(again or run, best, ignore=shutil.ignore_patterns("checkpoints", ".*"))
        put_in_place(best, out / BEST)
    needed = 2 * state.size * sum(state.each.get(line.model, 0.0) for line in ranked[:JUDGED])
    users = state.users if needed > left else None  # all of them if the time allows it
    judged = {line.name: out / RUNS / line.name for line in ranked[:JUDGED]}
    places = measure_places(spec, state.deciding, judged, again, ranks, users=users)
    board = Leaderboard.of(state, ranked, places, again=again is not None, folder=out)
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
) -> Path | None:
    """The run of the winner trained on train and valid up to its best epoch; None if time or data don't allow it."""
    if "valid" not in spec.splits:
        return None
    again = run.parent / f"{line.name}-again"
    shutil.rmtree(again, ignore_errors=True)
    card = bundle.read_card(bundle.find(run))
    if candidates.is_fitted(line.model):
        tried = card.trained.get("tried")
        needed = line.seconds / max(1, len(tried) if isinstance(tried, Sequence) else 1)
        asked = {**line.train}
    else:
        needed = 1.5 * line.seconds * line.best_epoch / max(1.0, line.epoch)
        asked = {**card.train, "epochs": max(1, math.ceil(line.best_epoch)), "minutes": None, "patience": None}
    if needed > left:
        return None
    asked["train_splits"] = ["train", "valid"]
    own, train_settings = candidates.built(line.model, {"settings": card.settings, "train": asked})
    try:
        train(spec=spec, model_name=line.model, run=again, settings=train_settings, model_settings=own, ranks=ranks,
              on_event=lambda event: on_event(f"{line.name}, again", event), stop_requested=stop_requested)  # fmt: skip
    except RecspecError:
        if stop_requested():
            raise
        return None
    shutil.copyfile(run / RECIPE, again / RECIPE)
    return again
