"""Listings: the models and the datasets that recspec knows, with their settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from recspec.api.verbs import verb
from recspec.api.views import Section, View, Viewed


class Listing(Viewed, Mapping[str, type[BaseModel]]):
    """Names with their descriptions and settings: `listing["sasrec"]` is the class of the settings."""

    def __init__(self, what: str, about: Mapping[str, str], settings: Mapping[str, type[BaseModel]],
                 values: Mapping[str, object]) -> None:  # fmt: skip
        self._what, self._about, self._settings, self._values = what, about, settings, values

    def __getitem__(self, name: str) -> type[BaseModel]:
        return self._settings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    def settings(self, name: str) -> View:
        """The settings of one, with their defaults, as a table."""
        rows = [
            (field, "required" if each.is_required() else json.dumps(each.get_default(call_default_factory=True),
                                                                     default=str), each.description or "")
            for field, each in self._settings[name].model_fields.items()
        ]  # fmt: skip
        return View(f"settings of {name}", [Section("", ("name", "default", "what it is"), rows)])

    def to_dict(self) -> dict[str, object]:
        """Names and JSON Schemas of settings, as the command prints them with `--json`."""
        return dict(self._values)

    def _view(self) -> View:
        rows = [(name, self._about[name]) for name in self]
        return View(self._what, [Section("", ("name", "about"), rows)])


@verb
def models() -> Listing:
    """List the models, the roles they need and their settings."""
    from recspec.models import MODELS
    from recspec.training import TrainSettings

    about = {name: f"{_first_line(model.__doc__)} Needs: {', '.join(model.needs)}." for name, model in MODELS.items()}
    schemas = {name: {"needs": list(model.needs), "settings": model.Settings.model_json_schema()["properties"]}
               for name, model in MODELS.items()}  # fmt: skip
    values = {"models": schemas, "train": TrainSettings.model_json_schema()["properties"]}
    return Listing("models", about, {name: model.Settings for name, model in MODELS.items()}, values)


@verb
def datasets() -> Listing:
    """List the datasets of `prepare`, the files they take and their settings."""
    from recspec.datasets import DATASETS

    about = {name: dataset.about for name, dataset in DATASETS.items()}
    values = {name: dataset.Settings.model_json_schema()["properties"] for name, dataset in DATASETS.items()}
    return Listing("datasets", about, {name: dataset.Settings for name, dataset in DATASETS.items()}, values)


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]
