"""Recipes that repeat the training of a candidate, and the winner's second one."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

import yaml

from recspec import __version__
from recspec.auto.candidates import is_fitted
from recspec.auto.state import COMMANDS, RECIPE, RECIPES, Line
from recspec.bundle import folder as bundle
from recspec.files import whole_file


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
