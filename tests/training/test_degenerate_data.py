"""Data of which hardly anything can be learned: training ends with a bundle, or says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

import recspec as rs
from recspec.base.errors import RecspecError
from recspec.bundle import folder as bundle
from recspec.models import MODELS

COLUMNS = {"user": "user", "item": "item", "timestamp": "time"}
KINDS = {
    "one event each": ("user,item,time", [f"{user},i{user % 3},{user}" for user in range(12)], {}),
    "no positive": ("user,item,time,clicked", [f"{k % 7},i{k % 5},{k},0" for k in range(60)], {"label": "clicked"}),
    "one item": ("user,item,time", [f"{k % 6},x,{k}" for k in range(18)], {}),
    "empty histories": ("user,item,time", [f"{user},i{user % 3},{user}" for user in range(12)], {"history": 2}),
}
REFUSED = {
    "no positive": ("popularity", "item_knn", "ease", "ials", "markov", "gf_cf", "mult_vae", "sasrec"),
    "one event each": ("mult_vae", "sasrec"),
    "one item": ("mult_vae", "sasrec"),
    "empty histories": ("mult_vae", "sasrec"),
}
"""Models that can't learn from such data, beside those that lack a feature or a label of each kind."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_model_ends_with_a_bundle_or_says_what_is_missing(kind: str, tmp_path: Path) -> None:
    head, rows, settings = KINDS[kind]
    (tmp_path / "rows.csv").write_text("\n".join([head, *rows]) + "\n")
    data = tmp_path / "data"
    rs.prepare(tmp_path / "rows.csv", data, settings={**COLUMNS, **settings}, progress=False)
    for name, model in MODELS.items():
        lacks = "history" in model.needs and "history" not in settings
        epochs = {"train.epochs": 1} if name in ("neumf", "wide_deep", "dlrm", "dcnv2", "din", "dien", "sim") else {}
        if lacks or name == "logistic_regression" or name in REFUSED[kind]:
            with pytest.raises(RecspecError):
                rs.train(name, data, tmp_path / name, settings=epochs, progress=False)
            continue
        rs.train(name, data, tmp_path / name, settings=epochs, progress=False)
        assert bundle.load(tmp_path / name).model.name == name
