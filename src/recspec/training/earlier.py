"""The best trials of earlier searches, as starts of another one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recspec.errors import SettingsError, require_extra
from recspec.files import confine, local
from recspec.training.search_space import Around, OneOf, Range, parse_space, sections_of
from recspec.training.study import NAME, STUDY, number_of, storage_of, written_in

if TYPE_CHECKING:
    import optuna

MOST_STARTS = 3
"""Trials taken from each earlier search."""


def best_of(folders: Sequence[Path], model: str) -> dict[str, Mapping[str, object]]:
    """The settings of the best complete trials of earlier searches of a model, by a name for each.

    Nothing is written to the folders.

    Raises:
        SettingsError: with every folder that holds no search of this model, or none with a complete trial.
    """
    found: dict[str, Mapping[str, object]] = {}
    problems: list[str] = []
    for folder in folders:
        try:
            found |= _best_in(local(folder, "--like"), model)
        except SettingsError as error:
            problems += error.problems
    if problems:
        raise SettingsError.of("--like", problems)
    return found


def _best_in(folder: Path, model: str) -> dict[str, Mapping[str, object]]:
    optuna: Any = require_extra("optuna", "tune")
    if not (folder / STUDY).is_file():
        raise SettingsError(f"{folder}: holds no search; expected the folder of an earlier `recspec tune {model}`")
    confine(folder, written_in())
    with storage_of(optuna, folder, read_only=True) as storage:
        try:
            study = optuna.load_study(study_name=NAME, storage=storage)
        except KeyError:
            raise SettingsError(f"{folder / STUDY}: holds no search of recspec's") from None
        known, searched = study.user_attrs.get("model"), study.user_attrs.get("search")
        if known != model:
            raise SettingsError(f"{folder}: is a search of '{known}', not of '{model}'")
        space = _known(searched if isinstance(searched, dict) else {}, model)
        trials = study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    judged = [trial for trial in trials if trial.value is not None and math.isfinite(trial.value)]
    if not judged:
        raise SettingsError(f"{folder}: no trial of this search is complete")
    best = sorted(judged, key=lambda trial: (trial.value, trial.number))[:MOST_STARTS]
    return {f"trial {number_of(trial)} of {folder}": _values(trial, space) for trial in best}


def _known(searched: Mapping[str, object], model: str) -> dict[str, OneOf | Range | Around]:
    """The entries of a search that this version can read: settings come and go, and anyone may write the file."""
    found: dict[str, OneOf | Range | Around] = {}
    for name, written in searched.items():
        try:
            found |= parse_space({name: written}, sections_of(model))
        except SettingsError:
            continue
    return found


def _values(trial: optuna.trial.FrozenTrial, space: Mapping[str, OneOf | Range | Around]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, stored in trial.params.items():
        drawn = space.get(name)
        if isinstance(drawn, (OneOf, Range)) and drawn.holds(stored):
            found[name] = drawn.value(stored)
    return found
