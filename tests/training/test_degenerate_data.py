"""Data of which hardly anything can be learned: training ends with a bundle, or says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

import recspec as rs
from recspec.base.errors import RecspecError
from recspec.bundle import folder as bundle
from recspec.models import MODELS, FittedModel, ItemModel, Model, TrainedItemModel
from tests.model_cases import OF_LABELLED_ROWS

COLUMNS = {"user": "user", "item": "item", "timestamp": "time"}
KINDS = {
    "one event each": ("user,item,time", [f"{user},i{user % 3},{user}" for user in range(12)], {}),
    "no positive": ("user,item,time,clicked", [f"{k % 7},i{k % 5},{k},0" for k in range(60)], {"label": "clicked"}),
    "one item": ("user,item,time", [f"{k % 6},x,{k}" for k in range(18)], {}),
    "empty histories": ("user,item,time", [f"{user},i{user % 3},{user}" for user in range(12)], {"history": 2}),
}


def cannot_learn(model: type[Model], kind: str) -> bool:
    """Whether a model can't learn from such data: of users' events it takes two each, or a positive."""
    return issubclass(model, TrainedItemModel) or (issubclass(model, ItemModel) and kind == "no positive")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_model_ends_with_a_bundle_or_says_what_is_missing(kind: str, tmp_path: Path) -> None:
    head, rows, settings = KINDS[kind]
    (tmp_path / "rows.csv").write_text("\n".join([head, *rows]) + "\n")
    data = tmp_path / "data"
    rs.prepare(tmp_path / "rows.csv", data, settings={**COLUMNS, **settings}, progress=False)
    for name, model in MODELS.items():
        lacks = "history" in model.needs and "history" not in settings
        epochs = {} if issubclass(model, FittedModel) else {"train.epochs": 1}
        if lacks or name in OF_LABELLED_ROWS or cannot_learn(model, kind):
            with pytest.raises(RecspecError):
                rs.train(name, data, tmp_path / name, settings=epochs, progress=False)
            continue
        rs.train(name, data, tmp_path / name, settings=epochs, progress=False)
        assert bundle.load(tmp_path / name).model.name == name
