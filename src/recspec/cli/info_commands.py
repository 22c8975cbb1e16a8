"""Commands that list what recspec knows: models, datasets, schema, version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recspec import __version__
from recspec.cli.console import first_line, out, print_json, print_settings
from recspec.cli.options import Json
from recspec.spec import json_schema

if TYPE_CHECKING:
    pass


def models(json_output: Json = False) -> None:
    """List the models, the roles they need, their settings, and the settings of training."""
    from recspec.models import MODELS
    from recspec.training import TrainSettings

    if json_output:
        listing = {
            name: {"needs": list(model.needs), "settings": model.Settings.model_json_schema()["properties"]}
            for name, model in MODELS.items()
        }
        print_json({"models": listing, "train": TrainSettings.model_json_schema()["properties"]})
        return
    for name, model in MODELS.items():
        out.print(f"[bold]{name}[/bold]  {first_line(model.__doc__)}  needs: {', '.join(model.needs)}")
        print_settings(f"settings of {name}", model.Settings)
    print_settings("settings of training (--set train.NAME=VALUE)", TrainSettings)


def datasets(json_output: Json = False) -> None:
    """List the datasets of `recspec prepare`, the files they take and their settings."""
    from recspec.datasets import DATASETS

    if json_output:
        print_json({name: dataset.Settings.model_json_schema()["properties"] for name, dataset in DATASETS.items()})
        return
    for name, dataset in DATASETS.items():
        out.print(f"[bold]{name}[/bold]  {dataset.about}")
        print_settings(f"settings of {name}", dataset.Settings)


def schema() -> None:
    """Print the JSON Schema of a specification file, for editors."""
    print_json(json_schema())


def version() -> None:
    """Print the version of recspec."""
    out.print(__version__, highlight=False)
