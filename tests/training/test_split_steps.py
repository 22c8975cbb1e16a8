"""A step is one step, however its batch is split: one process, four micro-batches and two ranks go the same way.

Asked of every registered model with every number of its settings, and of the optimizer's, switched on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recspec.data.storage import open_split
from recspec.feature_spec import FeatureSpec
from recspec.loading.ranks import Ranks
from recspec.models import MODELS
from tests import made_up
from tests.model_cases import MODEL_CASES, TRAINED_BY_STEPS, kind_of_data
from tests.processes import ranks
from tests.ten_steps import OPTIMIZERS, STEPS, everything_on, first_steps
from tests.variants import switched_on

NAMES = TRAINED_BY_STEPS

ROUNDING = {"rtol": 1e-5, "atol": 1e-6}
"""What ten steps in float32 may differ by, since sums are taken in another order: 2e-7 of a loss was seen.

NeuMF's penalties, counted once for each part, were off by 4e-5 (`l2`) and 4e-3 (`l2_hidden`) for two parts.
"""


def the_cases(folder: Path) -> dict[str, dict[str, Any]]:
    """Runs by name. The last batch of each epoch has one row, so that a rank and three micro-batches have none."""
    data = {
        "interactions": made_up.interactions(folder / "interactions", num_users=12, num_items=15, num_rows=120),
        "clicks": made_up.clicks(folder / "clicks", num_users=12, num_items=15, num_rows=300),
        "sequences": made_up.sequences(folder / "sequences", length=6, num_rows=161, num_users=12, num_items=12),
    }
    cases = {}
    for place, name in enumerate(NAMES):
        optimizer, other = (OPTIMIZERS[(place + move) % len(OPTIMIZERS)] for move in (0, 1))
        settings = {**MODEL_CASES[name].tiny, **switched_on(MODELS[name].Settings)}
        training = {**everything_on(optimizer), "parts": {MODEL_CASES[name].part: parted(other)}}
        cases[name] = {
            "model": name,
            "settings": settings,
            "data": data[kind_of_data(name)],
            "train": training,
            "steps": STEPS,
        }
    negatives = {"negatives": 3, "optimizer": "sgd"}
    cases["neumf, popular negatives"] = {
        **cases["neumf"],
        "train": {**negatives, "negative_distribution": "popularity", "reject_positives": True},
    }
    cases["neumf, softmax"] = {
        **cases["neumf"],
        "settings": {**cases["neumf"]["settings"], "loss": "softmax"},
        "train": {"negatives": 3, "negative_distribution": "popularity", "optimizer": "sgd"},
    }
    mixed = {"negatives": 2, "negative_distribution": "popularity", "reject_positives": True, "optimizer": "sgd"}
    cases["two_tower, mixed negatives"] = {**cases["two_tower"], "data": data["interactions"], "train": mixed}
    cases["dlrm, rows of tables"] = {
        **cases["dlrm"],
        "train": {"optimizer": "rowwise_adagrad", "sparse_gradients": "always"},
    }
    dice = {"activation": "dice", "attention_activation": "dice"}
    for name in ("din", "sim"):
        cases[f"{name}, dice"] = {**cases[name], "settings": {**cases[name]["settings"], **dice}, "steps": 1}
    for case in cases.values():
        case["train"]["batch_size"] = batch_size(
            case["data"], 1 + case["train"].get("negatives", 4 * (case["data"].has_series))
        )
        case["data"] = str(case["data"].folder)
    return cases


def parted(optimizer: str) -> dict[str, object]:
    """The settings of a part: those of the optimizer alone."""
    return {name: value for name, value in everything_on(optimizer).items() if name not in ("average", "clip_norm")}


def batch_size(spec: FeatureSpec, samples_per_row: int) -> int:
    """Samples of a batch of which an epoch has a few, and then one that is as small as can be."""
    rows = open_split(spec, "train").num_rows
    return samples_per_row * min(range(rows // 6, rows // 2), key=lambda size: rows % size or size)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return the_cases(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def on_two_ranks(
    request: pytest.FixtureRequest, cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """What each rank has after the steps of every case that is asked for."""
    asked = {item.callspec.params["name"] for item in request.session.items if "on_two_ranks" in item.fixturenames}  # type: ignore[attr-defined]
    cases = {name: case for name, case in cases.items() if name in asked}
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "cases.json").write_text(json.dumps(list(cases.values())))
    code = "import sys; from tests.ten_steps import main; main(*sys.argv[1:])"
    with ranks(code, 2, str(folder / "cases.json"), str(folder / "store")) as processes:
        done = [process.ended() for process in processes]
    assert [each.returncode for each in done] == [0, 0], done
    return {
        name: [torch.load(folder / f"store.{rank}.{place}", weights_only=True) for rank in range(2)]
        for place, name in enumerate(cases)
    }


NAMES_OF_CASES = [
    *NAMES,
    "neumf, popular negatives",
    "neumf, softmax",
    "two_tower, mixed negatives",
    "dlrm, rows of tables",
]
WITH_DICE = ["din, dice", "sim, dice"]


def test_every_case_is_asked(cases: dict[str, dict[str, Any]]) -> None:
    assert sorted(cases) == sorted([*NAMES_OF_CASES, *WITH_DICE])
    assert set(MODEL_CASES) == set(MODELS)
    used = {case["train"]["optimizer"] for case in cases.values()}
    used |= {part["optimizer"] for case in cases.values() for part in case["train"].get("parts", {}).values()}
    assert used == set(OPTIMIZERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES_OF_CASES)
def test_however_a_batch_is_split_the_steps_are_the_same(
    name: str, cases: dict[str, dict[str, Any]], on_two_ranks: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    whole = first_steps(cases[name], tmp_path / "whole", Ranks())
    assert len(whole["losses"]) == STEPS
    split = {"rank 0": on_two_ranks[name][0], "rank 1": on_two_ranks[name][1]}
    split["accumulate 4"] = first_steps(cases[name], tmp_path / "parts", Ranks(), accumulate=4)
    for how, found in split.items():
        torch.testing.assert_close(
            torch.tensor(found["losses"]), torch.tensor(whole["losses"]), **ROUNDING, msg=lambda s, h=how: f"{h}: {s}"
        )
        for key, tensor in whole["tensors"].items():
            torch.testing.assert_close(
                found["tensors"][key], tensor, **ROUNDING, msg=lambda s, h=how, k=key: f"{h}, {k}: {s}"
            )


@pytest.mark.parametrize("name", WITH_DICE)
def test_running_statistics_follow_a_step_once_and_all_ranks_have_the_same(
    name: str, cases: dict[str, dict[str, Any]], on_two_ranks: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Units of a first layer read what does not depend on how the batch is split; a later layer reads Dice's output."""
    whole = first_steps(cases[name], tmp_path / "whole", Ranks())["tensors"]
    parts = first_steps(cases[name], tmp_path / "parts", Ranks(), accumulate=4)["tensors"]
    first, second = (rank["tensors"] for rank in on_two_ranks[name])
    buffers = [key for key in whole if key.endswith((".mean", ".variance"))]
    of_first_layers = [key for key in buffers if "activations.0" in key and "unit" in key]
    assert of_first_layers
    for key in buffers:
        assert torch.equal(first[key], second[key]), key
    for key in of_first_layers:
        for found in (first, parts):
            torch.testing.assert_close(found[key], whole[key], **ROUNDING)
