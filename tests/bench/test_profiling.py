"""Where the time of a step goes, on runs so small that what a step multiplies and moves is counted by hand."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from recspec.bench.profiling import OVERHEAD, PARTS, Watch, endless, group_of, profile_steps, work_of_step
from recspec.data.storage import synthesize
from recspec.feature_spec import FeatureSpec
from recspec.loading.ranks import Ranks
from recspec.models import MODELS
from recspec.training.loop import TrainingRun
from recspec.training.plan import make_plan
from recspec.training.settings import TrainSettings

ROWS, USERS, ITEMS = 64, 10, 6


@pytest.fixture
def rows(tmp_path: Path) -> FeatureSpec:
    """Rows of a user, an item and a label."""
    shape = FeatureSpec.from_dict(
        {
            "feature_spec": {
                "user_id": {"dtype": "int32", "cardinality": USERS},
                "item_id": {"dtype": "int32", "cardinality": ITEMS},
                "label": {"dtype": "int8"},
            },
            "source_spec": {
                "train": [{"type": "parquet", "features": ["user_id", "item_id", "label"], "files": ["train.parquet"]}]
            },
            "channel_spec": {"user": ["user_id"], "item": ["item_id"], "label": ["label"]},
        }
    )
    return synthesize(shape, tmp_path / "data", ROWS)


def a_run(model: str, spec: FeatureSpec, folder: Path, sizes: Mapping[str, object], **train: object) -> TrainingRun:
    settings = TrainSettings.model_validate(
        {"batch_size": ROWS, "negatives": 0, "precision": "fp32", "tensorboard": False, **train}
    )
    made = MODELS[model].Settings.model_validate(sizes)
    return TrainingRun(make_plan(model, spec, settings, made, Ranks()), folder / "run", Ranks())


GMF = {"factors": 4, "use_mlp": False}


def test_a_profile_shares_out_the_whole_step(rows: FeatureSpec, tmp_path: Path) -> None:
    run = a_run("neumf", rows, tmp_path, {"factors": 4, "layers": [8, 8, 4], "dropout": 0.0})
    taken = endless(run)
    found = profile_steps(run, taken, 2)
    assert [line["what"] for line in found["parts"]] == list(PARTS)
    for table in ("parts", "operations"):
        assert sum(line["share"] for line in found[table]) == pytest.approx(1, abs=1e-3)
        assert sum(line["ms"] for line in found[table]) == pytest.approx(found["ms_per_step"], abs=0.01)
    groups = {line["what"]: line["share"] for line in found["operations"]}
    assert groups.keys() == {
        "matrix products",
        "rows of tables",
        "elementwise",
        "copies",
        "loader",
        "optimizer",
        OVERHEAD,
    }
    assert all(share >= 0 for share in groups.values())
    calls = {line["what"]: line["calls"] for line in found["largest"]}
    assert calls.get("aten::mm", 0) + calls.get("aten::addmm", 0) >= 4  # the layers, forward and backward
    assert run.progress.step == 4  # two by the clock, two watched by torch


def test_a_profile_leaves_the_run_as_it_would_be_without(rows: FeatureSpec, tmp_path: Path) -> None:
    plain, watched = (a_run("neumf", rows, tmp_path / name, GMF) for name in ("plain", "watched"))
    steps = endless(plain)
    for _ in range(3):
        next(steps)
    taken = endless(watched)
    profile_steps(watched, taken, 1)
    work_of_step(watched, taken)
    for one, other in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not watched.step.objective._forward_hooks
    assert not any(each._optimizer_step_pre_hooks for each in watched.optimizers.parts.values())


def test_no_step_is_no_profile(rows: FeatureSpec, tmp_path: Path) -> None:
    run = a_run("neumf", rows, tmp_path, GMF)
    with pytest.raises(ValueError, match="0 steps: expected 1 or more"):
        profile_steps(run, endless(run), 0)


def test_a_watch_gives_each_part_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 15.0, 17.0, 99.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    watch = Watch(torch.device("cpu"))
    watch.now("loader")
    watch.now("forward")
    watch.stop()
    watch.stop()  # nothing runs any more
    assert watch.seconds == {"loader": 5.0, "forward": 2.0, "backward": 0.0, "optimizer": 0.0}


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("aten::addmm_", "matrix products"),
        ("aten::bmm", "matrix products"),
        ("aten::index_select", "rows of tables"),
        ("aten::_embedding_bag", "rows of tables"),
        ("fbgemm::split_embedding_codegen_lookup", "rows of tables"),
        ("aten::copy_", "copies"),
        ("aten::to", "copies"),
        ("aten::slice", "copies"),
        ("aten::threshold_backward", "elementwise"),
        ("aten::tanh", "elementwise"),
        ("aten::sum", "elementwise"),
        ("autograd::engine::evaluate_function: MmBackward0", OVERHEAD),
        ("Optimizer.step#Adam.step", OVERHEAD),
    ],
)
def test_operations_are_grouped_by_what_they_do(name: str, group: str) -> None:
    assert group_of(name) == group


# --- what a step multiplies and moves --------------------------------------------------------------------------------


def test_the_work_of_a_layer_is_counted_by_hand(rows: FeatureSpec, tmp_path: Path) -> None:
    # An MLP of 2 x 2 -> 3 -> 2: a batch has more rows than the tables, so the first layer is computed by table.
    run = a_run("neumf", rows, tmp_path, {"layers": [4, 3, 2], "use_gmf": False, "dropout": 0.0}, optimizer="sgd")
    users, items = run.model.num_ids["user"], run.model.num_ids["item"]  # type: ignore[attr-defined]
    work = work_of_step(run, endless(run))
    first = 3 * 2 * (users + items) * 2 * 3  # forward, and gradients of rows and weights
    second = 3 * 2 * ROWS * 3 * 2
    assert work.products == first + second  # the logit is a product with a vector
    weights = 4 * run.model.num_parameters()
    assert work.weights == 6 * weights  # SGD without momentum has no state
    assert work.tables == 0
    assert work.activations > 2 * 4 * ROWS * (3 + 2)  # both hidden layers at least


def test_adams_state_is_moved_too(rows: FeatureSpec, tmp_path: Path) -> None:
    torch.optim.Adam(
        [torch.nn.Parameter(torch.zeros(1))]
    )  # from then on torch hooks the step of the class extended too
    run = a_run("neumf", rows, tmp_path, GMF, optimizer="adam")
    taken = endless(run)
    next(taken)  # which makes the state
    assert work_of_step(run, taken).weights == (6 + 2 * 2) * 4 * run.model.num_parameters()


def test_of_a_table_only_rows_in_use_are_moved(rows: FeatureSpec, tmp_path: Path) -> None:
    sizes = {"embedding_dim": 4, "bottom": [], "cross_layers": 1, "cross_rank": 0, "top": [2]}
    run = a_run("dcnv2", rows, tmp_path, sizes, optimizer="adagrad", sparse_gradients="always")
    assert run.plan.sparse_gradients.value
    taken = endless(run)
    next(taken)
    work = work_of_step(run, taken)
    looked_up, distinct = 2 * ROWS, USERS + ITEMS  # 64 uniform draws meet every id of 10 and of 6
    assert work.tables == 4 * 4 * (3 * looked_up + 4 * distinct)
    assert work.total == work.weights + work.tables + work.activations
