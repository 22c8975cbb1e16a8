"""The plan of a run: every choice with its reason, equal to what the run then does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from recspec.bundle import folder as bundle
from recspec.feature_spec import FeatureSpec
from recspec.loading.ranks import Ranks
from recspec.models import MODELS
from recspec.models.layers.embeddings import Embeddings
from recspec.training.choices import pick_compile
from recspec.training.loop import TrainingRun, train
from recspec.training.plan import TrainingPlan, make_plan
from recspec.training.settings import TrainSettings
from tests.model_cases import TRAINED_BY_STEPS

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def a_plan(model: str, datasets: Mapping[str, FeatureSpec], **values: object) -> TrainingPlan:
    needs = set(MODELS[model].needs)
    spec = datasets["sequences" if "history" in needs else "interactions" if {"user", "item"} <= needs else "clicks"]
    settings = TrainSettings.model_validate({"tensorboard": False, **values})
    return make_plan(model, spec, settings, MODELS[model].Settings(), Ranks())


def test_every_choice_is_logged_with_its_reason(datasets: Mapping[str, FeatureSpec], tmp_path: Path) -> None:
    settings, own = TrainSettings(epochs=1, threads=1, tensorboard=False), MODELS["neumf"].Settings(factors=4)
    train("neumf", datasets["interactions"], tmp_path / "run", settings=settings, model_settings=own)
    start = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])
    choices = start["choices"]
    assert list(choices)[:14] == [
        "path",
        "batch_size",
        "precision",
        "threads",
        "freed_memory",
        "optimizer",
        "negatives",
        "rows",
        "valid",
        "metric",
        "tables",
        "embedding_backend",
        "sparse_gradients",
        "compile",
    ]
    assert start["batch_size"] == 8192
    assert choices["batch_size"].startswith("8,192: 512 of ")
    assert choices["settings.loss"].startswith("softmax: ")
    assert choices["threads"] == "1: as asked"
    assert choices["optimizer"].startswith("adam (fused: one pass over weights and state): ")
    assert choices["negatives"].startswith("15: ")
    assert re.fullmatch(r"held in memory: the rows take [0-9,]+ bytes, and train.memory_budget is 4GB", choices["rows"])
    assert choices["valid"] == "valid: the dataset has this split"
    assert choices["compile"] == "none: does not pay on a CPU"
    assert bundle.load(tmp_path / "run").card.train["batch_size"] == 8192


def test_tables_that_can_be_divided_have_their_bytes_told_and_others_have_none(
    datasets: Mapping[str, FeatureSpec],
) -> None:
    assert a_plan("neumf", datasets).tables.reason == "this model has no tables that can be divided or left on the host"
    reason = a_plan("dlrm", datasets).tables.reason
    assert re.fullmatch(r"tables and their optimizer state take [1-9][0-9,]* bytes, and a rank has room for .*", reason)


def test_the_same_arguments_give_the_same_plan(datasets: Mapping[str, FeatureSpec]) -> None:
    assert a_plan("dlrm", datasets).to_dict() == a_plan("dlrm", datasets).to_dict()
    json.dumps(a_plan("dlrm", datasets).to_dict())


@pytest.mark.parametrize("model", TRAINED_BY_STEPS)
@pytest.mark.parametrize("values", [{}, {"optimizer": "rmsprop", "sparse_gradients": "always"}])
def test_the_run_has_what_the_plan_says(
    model: str, values: dict[str, object], datasets: Mapping[str, FeatureSpec], tmp_path: Path
) -> None:
    plan = a_plan(model, datasets, batch_size=5, negatives=0, **values)
    run = TrainingRun(plan, tmp_path, Ranks())
    assert plan.optimizer.value == run.optimizers.described
    assert plan.sizes["parameters"] == sum(each.numel() for each in run.model.parameters())
    assert plan.sizes["trained_parameters"] == run.model.num_parameters()
    assert plan.steps_per_epoch == -(-run.loader.num_rows // 5)
    sparse = [
        f"{prefix}.stores.{key}"
        for prefix, module in run.model.named_modules()
        if isinstance(module, Embeddings)
        for key in module.stores
        if key in module.sparse
    ]
    assert list(plan.sparse_gradients.value) == sparse
    assert bool(sparse) == (bool(values) and any(isinstance(each, Embeddings) for each in run.model.modules()))


TABLE = ("embeddings.stores.16",)


@pytest.mark.parametrize(
    ("values", "ranks", "sparse", "fetched", "mode", "reason"),
    [
        ({"compile": False}, Ranks(), (), (), "none", "does not pay on a CPU"),
        ({"compile": "auto"}, Ranks(), (), (), "none", "does not pay on a CPU"),
        ({"compile": True}, Ranks(), (), (), "default", "no CUDA graphs: the run is on cpu"),
        ({"compile": False}, Ranks(device=GPU), (), (), "none", "faster on the GPU that was measured"),
        ({"compile": True}, Ranks(device=GPU), (), (), "reduce-overhead", "full batches have one shape"),
        ({"compile": "auto"}, Ranks(device=GPU), (), (), "none", "faster on the GPU that was measured"),
        ({"compile": True}, Ranks(device=GPU), TABLE, (), "reduce-overhead", "full batches have one shape"),
        ({"compile": True}, Ranks(0, 2, GPU), (), (), "default", "2 processes exchange gradients in every step"),
        ({"compile": True, "accumulate": 2}, Ranks(device=GPU), (), (), "default", "train.accumulate is 2"),
        ({"compile": True}, Ranks(device=GPU), (), TABLE, "default", "some tables have sparse gradients, or their"),
        (
            {"compile": True, "sparse_gradients": "always"},
            Ranks(device=GPU),
            TABLE,
            (),
            "default",
            "some tables have sparse gradients, or their rows are fetched",
        ),
    ],
)
def test_cuda_graphs_are_chosen_where_every_step_is_alike(
    values: dict[str, object], ranks: Ranks, sparse: Sequence[str], fetched: Sequence[str], mode: str, reason: str
) -> None:
    choice = pick_compile(TrainSettings.model_validate(values), ranks, sparse=sparse, fetched=fetched)
    assert choice.value == mode
    assert reason in choice.reason


def test_whole_gradients_of_a_compiled_step_are_noted(datasets: Mapping[str, FeatureSpec]) -> None:
    plan = a_plan("dlrm", datasets, optimizer="sgd", batch_size=1, compile=True)
    weights = plan.make(None).get_parameter("embeddings.stores.128").numel()
    note = (
        f"a compiled step computes and applies whole gradients, {4 * weights:,} bytes for 'embeddings.stores.128', "
        "though it sees few of their rows; train.compile=false or train.sparse_gradients=always is probably faster"
    )
    assert note in plan.notes
    assert (plan.compile.value, str(plan.sparse_gradients)) == ("default", f"none: {note}")
    assert a_plan("dlrm", datasets, optimizer="sgd", batch_size=1).sparse_gradients.value == ("embeddings.stores.128",)


def test_a_compiled_step_has_lists_of_full_length(datasets: Mapping[str, FeatureSpec]) -> None:
    assert a_plan("din", datasets, compile=True).loader._layout.fixed_length
    assert not a_plan("din", datasets, compile=False).loader._layout.fixed_length


def test_an_option_of_torchrec_without_tables_to_divide_is_noted(datasets: Mapping[str, FeatureSpec]) -> None:
    told = "train.shard_by is torchrec, and no table is divided (there is one process), so TorchRec is not used"
    assert a_plan("neumf", datasets, shard_by="torchrec").notes == (told,)
    assert a_plan("neumf", datasets).notes == ()
