"""Logistic regression as a model: the fitted sums by hand, and what it makes of lists and bins."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recspec.data.storage import open_split
from recspec.evaluation.row_baselines import LogisticFit
from recspec.evaluation.scoring import as_batch
from recspec.feature_spec import FeatureSpec
from recspec.models import LogisticRegression
from tests.closeness import assert_close


def mixed(folder: Path, rows: int = 300) -> FeatureSpec:
    """Ids, a number far from 0 with many values, one with three, a list of numbers and a list of ids."""
    rng = np.random.default_rng(0)
    columns = {
        "ids": rng.integers(0, 4, rows),
        "time": 1.6e9 + rng.normal(0, 1e5, rows),
        "few": rng.integers(0, 3, rows).astype(float),
        "pair": [rng.normal(size=2).tolist() for _ in range(rows)],
        "list": [rng.integers(1, 5, int(rng.integers(0, 4))).tolist() for _ in range(rows)],
        "label": rng.integers(0, 2, rows),
    }
    pq.write_table(pa.table({name: pa.array(list(each)) for name, each in columns.items()}), folder / "t.parquet")
    features = {
        "ids": {"dtype": "int64", "cardinality": 4},
        "time": {"dtype": "float64"},
        "few": {"dtype": "float64"},
        "pair": {"dtype": "float64", "length": 2},
        "list": {"dtype": "int64", "cardinality": 5, "length": 3, "padding": 0},
    }
    return FeatureSpec.from_dict(
        {
            "feature_spec": {**features, "label": {"dtype": "int64"}},
            "source_spec": {"train": [{"type": "parquet", "features": list(columns), "files": ["t.parquet"]}]},
            "channel_spec": {"context": list(features), "label": ["label"]},
        },
        folder,
    )


def filled(fit: LogisticFit, spec: FeatureSpec, l2: float) -> LogisticRegression:
    model = LogisticRegression(spec, LogisticRegression.Settings())
    model.fill(fit.layout.mean, fit.layout.std, fit.layout.edges, *fit.solve(l2))
    return model


def test_the_model_gives_the_logits_of_its_fit(tmp_path: Path) -> None:
    spec = mixed(tmp_path)
    fit = LogisticFit(spec, ["train"])
    model = filled(fit, spec, 0.5)
    columns = open_split(spec, "train", fit.layout.features).read(0, 2**62)
    weights, intercept = fit.solve(0.5)
    expected = fit.layout.encode(columns) @ weights + intercept
    # the number of seconds has 24 bits in a batch: it may fall into the bin beside
    assert np.abs(model(as_batch(columns, spec)).numpy() - expected).mean() < 2e-2


def test_by_hand(tmp_path: Path) -> None:
    """Ids with 3 and 1 of 4 rows positive: 4 sigmoid(w) - 3 + l2 w = 0 gives w = ln 2 where l2 is 1 / (3 ln 2)."""
    table = pa.table({"x": [1] * 4 + [2] * 4, "label": [1, 1, 1, 0, 1, 0, 0, 0]})
    pq.write_table(table, tmp_path / "t.parquet")
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"x": {"cardinality": 9}, "label": {"dtype": "int64"}},
            "source_spec": {"train": [{"type": "parquet", "features": ["x", "label"], "files": ["t.parquet"]}]},
            "channel_spec": {"context": ["x"], "label": ["label"]},
        },
        tmp_path,
    )
    model = filled(LogisticFit(spec, ["train"]), spec, 1 / (3 * math.log(2)))
    found = model({"x": torch.tensor([1, 2, 5])})  # id 5 was never seen
    np.testing.assert_allclose(found.numpy(), [math.log(2), -math.log(2), 0.0], atol=1e-4)


def test_bins_lists_and_padding() -> None:
    features = {"n": {"dtype": "float32"}, "l": {"cardinality": 3, "length": 2, "padding": 0}, "label": {}}
    spec = FeatureSpec.from_dict(
        {"feature_spec": features, "channel_spec": {"context": ["n", "l"], "label": ["label"]}}
    )
    model = LogisticRegression(spec, LogisticRegression.Settings())
    # 2 (x - 1) / 2, bins below 1, from 1, from 3: 10, 20, 30; ids 0, 1, 2: 100, 1, 2; intercept .5
    weights = np.array([2.0, 10.0, 20.0, 30.0, 100.0, 1.0, 2.0])
    model.fill(np.array([1.0]), np.array([2.0]), [np.array([1.0, 3.0])], weights, 0.5)
    lists = torch.tensor([[0, 0], [1, 0], [1, 2], [2, 2]])
    logits = model({"n": torch.tensor([0.0, 1.0, 3.0, 9.0]), "l": lists})
    assert_close(
        logits.numpy(), np.array([-1 + 10 + 0.5, 20 + 1 + 0.5, 2 + 30 + 3 + 0.5, 8 + 30 + 4 + 0.5], np.float32)
    )
    model.set_usual(np.array([20.0, 2.0]))
    names, parts, base = model.contributions({"n": torch.tensor([0.0, 3.0]), "l": lists[1:3]})
    assert (names, base) == (["n", "l"], 22.5)
    assert parts.tolist() == [[9 - 20, 1 - 2], [32 - 20, 3 - 2]]


@pytest.mark.parametrize("std", [0.0, -1.0, float("nan")])
def test_a_deviation_that_cannot_divide_is_no_weight(std: float) -> None:
    features = {"n": {"dtype": "float32"}, "label": {}}
    spec = FeatureSpec.from_dict({"feature_spec": features, "channel_spec": {"context": ["n"], "label": ["label"]}})
    model = LogisticRegression(spec, LogisticRegression.Settings())
    assert "weight 'std'" in "".join(model.allocate_buffers({"std": torch.tensor([std], dtype=torch.float64)}))
