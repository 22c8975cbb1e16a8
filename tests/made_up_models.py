"""Small bundles whose weights are made up, so that their probabilities differ from row to row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recspec.bundle import folder as bundle
from recspec.bundle.folder import Card
from recspec.data.prepare import PrepareContext
from recspec.datasets import DATASETS
from recspec.feature_spec import FeatureSpec
from recspec.feature_spec.signature import Port
from recspec.models import MODELS
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


def shop(folder: Path, title: str) -> dict[str, Path]:
    """Runs on purchases and impressions of 24 items, p0 to p23, by 30 customers, c0 to c29.

    `ease` and `ials` learned from purchases; `clicks` is a logistic regression of impressions, which reads the device
    and the hour. The catalogue has prices, stocks, dates, tags and pictures: those of even items are data, those of odd
    ones on another host.
    """
    rng = np.random.default_rng(0)
    pixel = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="
    lines = ["sku,title,category,price,in_stock,tags,added,image"]
    for item in range(24):
        picture = f"https://pictures.example/{item}.png" if item % 2 else f'"{pixel}"'
        tags, stock = ("new|eco", "eco", "")[item % 3], ("true", "false")[item % 5 == 0]
        lines.append(
            f'p{item},"{title} {item}",{"abc"[item % 3]},{item + 0.5},{stock},{tags},2026-01-{item + 1:02d},{picture}'
        )
    (folder / "items.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    users = [f"c{user},Customer {user},{20 + user}" for user in range(30)]
    (folder / "users.csv").write_text("\n".join(["customer,name,age", *users]) + "\n")
    bought, shown = ["customer,sku,at"], ["customer,sku,at,device,hour,clicked"]
    for user in range(30):
        for time, item in enumerate(rng.permutation(24)[:10].tolist()):
            bought.append(f"c{user},p{item},{time}")
            clicked = int(rng.random() < (0.7 if item % 3 == user % 3 else 0.2))
            shown.append(f"c{user},p{item},{time},{('phone', 'laptop')[item % 2]},{time},{clicked}")
    own: dict[str, Any] = {"user": "customer", "item": "sku", "timestamp": "at", "items": "items.csv"}
    table, made = DATASETS["table"], dict[str, Path]()
    people = {"users": "users.csv", "user_columns": ("name",)}
    for name, rows, more in (
        (
            "bought",
            bought,
            {**people, "item_features": ("category",), "num_negatives": 5},
        ),
        ("shown", shown, {"label": "clicked", "split": "share", "context_features": ("device", "hour")}),
    ):
        (folder / f"{name}.csv").write_text("\n".join(rows) + "\n")
        settings = table.Settings(**own, **more)  # type: ignore[call-arg]
        table.prepare(PrepareContext(folder / f"{name}.csv", folder / name, threads=1), settings)
    for name, model, data in (
        ("ease", "ease", "bought"),
        ("ials", "ials", "bought"),
        ("clicks", "logistic_regression", "shown"),
    ):
        chosen: dict[str, dict[str, object]] = {"ease": {"l2": 5.0}, "ials": {"factors": 4, "l2": 0.01}}
        made[name] = folder / f"run_{name}"
        of_model = MODELS[model].Settings.model_validate(chosen.get(name, {}))
        how, spec = TrainSettings(tensorboard=False), FeatureSpec.load(folder / data)
        train(model, spec, made[name], settings=how, model_settings=of_model)
    return made


def made_up_rows(ports: tuple[Port, ...], rows: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Inputs (rows, width) of a model."""
    numbers = np.random.default_rng(seed)
    return {
        port.name: numbers.integers(0, port.num_ids, (rows, port.width)).astype(port.dtype)
        if port.num_ids
        else numbers.random((rows, port.width), np.float32)
        for port in ports
    }
