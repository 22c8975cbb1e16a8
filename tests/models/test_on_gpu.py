"""What models ask of a GPU, without one: whole graphs to compile, and few launches."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recspec.feature_spec import FeatureSpec
from recspec.loading import Loader
from recspec.models import MODELS, Model
from recspec.models.layers.batch import Batch
from tests import made_up
from tests.model_cases import MODEL_CASES, kind_of_data

WHOLE = ("neumf", "wide_deep", "dcnv2", "din", "dien", "sim", "two_tower")

LAUNCH_NOTHING = {
    "_unsafe_view",
    "alias",
    "as_strided",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "expand",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
    "permute",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
}
"""Operations that look at memory in another way, or reserve it."""


class Launches(TorchDispatchMode):
    """Counts operations that a GPU would be asked for."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.overloadpacket.__name__ not in LAUNCH_NOTHING
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, FeatureSpec]:
    folder = tmp_path_factory.mktemp("on_gpu")
    return {
        "interactions": made_up.interactions(folder / "interactions"),
        "clicks": made_up.clicks(folder / "clicks"),
        "sequences": made_up.sequences(folder / "sequences", length=3),
        "books": made_up.sequences(folder / "books", length=100, num_rows=20),
    }


@pytest.mark.parametrize("name", WHOLE)
def test_a_loss_compiles_to_one_graph_without_breaks(name: str, data: Mapping[str, FeatureSpec]) -> None:
    spec = data[kind_of_data(name)]
    model = MODELS[name](spec, MODELS[name].Settings.model_validate(MODEL_CASES[name].tiny))
    features = (*model.loss_needs().features, spec.label)
    share = next(iter(Loader(spec, "train", batch_size=16, features=features, fixed_length=True).batches()))
    torch._dynamo.reset()
    found = torch._dynamo.explain(model.loss)(share.batch)
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons


def test_a_step_of_sim_launches_as_much_whatever_the_batch_and_waits_for_nothing(
    data: Mapping[str, FeatureSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the published sizes. On the meta device, tensors have no numbers, and an operation that reads one raises."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # it knows no meta device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    own = {"gru_hidden": 96, "exact": "din", "long_length": 90}
    model = MODELS["sim"](data["books"], MODELS["sim"].Settings.model_validate(own)).to("meta")
    first, few, many = (launches(model, rows) for rows in (10, 1_000, 131_072))  # the first step prepares more
    assert few == many <= first <= 1_200


def launches(model: Model, rows: int) -> int:
    """The operations of a loss and its gradients."""
    batch: Batch = {}
    for name in (*model.loss_needs().features, model.spec.label):
        feature = model.spec.features[name]
        shape = (rows, feature.length) if feature.length else (rows,)
        batch[name] = torch.empty(shape, dtype=torch.int32 if feature.is_categorical else torch.float32, device="meta")
    model.zero_grad()
    with Launches() as counted:
        model.loss(batch).backward()
    return counted.number
