"""Small bundles whose weights are made up, so that their probabilities differ from row to row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recspec import bundle
from recspec.bundle import Card
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS
from recspec.repository import NUMPY
from recspec.signature import Port


def made_up_bundle(folder: Path, spec: FeatureSpec, name: str, seed: int = 0, *, scale: float = 1.0) -> Path:
    """A bundle of a registered model with weights of a normal distribution."""
    settings = MODELS[name].Settings()
    model = MODELS[name](spec, settings)
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            width = parameter.shape[-1] if parameter.dim() > 1 else 10
            parameter.copy_(torch.randn(parameter.shape, generator=numbers) * scale / width**0.5)
    return bundle.save(folder, model, Card(model=name, settings=settings.model_dump(mode="json")))


def made_up_rows(ports: tuple[Port, ...], rows: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Inputs (rows, width) of a model."""
    numbers = np.random.default_rng(seed)
    return {
        port.name: numbers.integers(0, port.num_ids, (rows, port.width)).astype(NUMPY[port.dtype])
        if port.num_ids
        else numbers.random((rows, port.width), np.float32)
        for port in ports
    }
