"""Small bundles whose weights are made up, so that their probabilities differ from row to row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recspec.bundle import folder as bundle
from recspec.bundle.folder import Card
from recspec.datasets import DATASETS
from recspec.models import MODELS
from recspec.prepare import PrepareContext
from recspec.spec import FeatureSpec
from recspec.spec.signature import Port
from recspec.training.loop import train
from recspec.training.settings import TrainSettings
from tests import made_up
from tests.known_users import informed


def made_up_bundle(folder: Path, spec: FeatureSpec, name: str, seed: int = 0, *, scale: float = 1.0) -> Path:
    """A bundle of a registered model with weights of a normal distribution."""
    settings = MODELS[name].Settings()
    model = informed(MODELS[name](spec, settings), spec)
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            width = parameter.shape[-1] if parameter.dim() > 1 else 10
            parameter.copy_(torch.randn(parameter.shape, generator=numbers) * scale / width**0.5)
    return bundle.save(folder, model, Card(model=name, settings=settings.model_dump(mode="json")))


def films_and_clicks(folder: Path, title: str) -> dict[str, Path]:
    """Runs: `films` recommends items 100 to 129 to users u0 to u29; `clicks` scores rows without users to recommend to.

    Each item's title is `title` and its id.
    """
    made_up.write_films(folder, 30, title, kinds=False)
    table = DATASETS["table"]
    table.prepare(
        PrepareContext(folder / "rows.csv", folder / "data"), table.Settings(items="items.csv", num_negatives=10)
    )  # type: ignore[call-arg]
    how = TrainSettings(epochs=1, batch_size=500, tensorboard=False)
    small = {
        "neumf": (FeatureSpec.load(folder / "data"), {"factors": 4, "layers": (8, 4)}),
        "wide_deep": (made_up.clicks(folder / "clicks", num_rows=800), {"hidden": (8,)}),
    }
    for name, (spec, chosen) in small.items():
        made = MODELS[name].Settings.model_validate(chosen)
        train(name, spec, folder / name, settings=how, model_settings=made)
    return {"films": folder / "neumf", "clicks": folder / "wide_deep"}


def made_up_rows(ports: tuple[Port, ...], rows: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Inputs (rows, width) of a model."""
    numbers = np.random.default_rng(seed)
    return {
        port.name: numbers.integers(0, port.num_ids, (rows, port.width)).astype(port.dtype)
        if port.num_ids
        else numbers.random((rows, port.width), np.float32)
        for port in ports
    }
