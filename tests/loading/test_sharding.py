"""Tables that are divided or left on the host train and save as whole ones do: two processes as one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from recspec.base.errors import SettingsError
from recspec.bundle import folder as bundle
from recspec.bundle.checkpoint import read_tensors
from recspec.feature_spec import FeatureSpec
from recspec.loading.placement import Placement, PlacementSettings, place
from recspec.loading.ranks import Ranks
from recspec.loading.sharding import build, distinct
from recspec.models import MODELS
from recspec.models.base import Model
from recspec.models.layers.embeddings import Embeddings, RowsHeld
from recspec.training.choices import Choice
from recspec.training.loop import train
from recspec.training.settings import TrainSettings
from tests import made_up
from tests.closeness import assert_close
from tests.processes import ranks, recspec, recspec_on_two

ALONE = Ranks()
DLRM = {"embedding_dim": 4, "bottom": [8, 4], "top": [8], "dropout": 0.0}
WIDE_DEEP = {"embedding_dim": 4, "hidden": [8], "dropout": 0.0}


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    """Users are more rows than all else together, so that two ranks cut their table."""
    return made_up.clicks(tmp_path_factory.mktemp("sharding") / "clicks", num_users=400)


def placed(spec: FeatureSpec, ranks: Ranks, model: str = "wide_deep", **values: Any) -> Placement:
    chosen = PlacementSettings.model_validate(
        {f"{what}_embeddings" if what != "memory" else "embedding_memory": f"{value}" for what, value in values.items()}
    )
    settings = MODELS[model].Settings.model_validate({"wide_deep": WIDE_DEEP, "dlrm": DLRM}.get(model, {}))
    return place(partial(MODELS[model], spec, settings), ranks, chosen, lambda _, width: 4 * width)


def test_tables_are_divided_where_asked_or_where_they_do_not_fit(clicks: FeatureSpec) -> None:
    stores = ("wide.tables.stores.1", "deep.embeddings.stores.4")
    size = 20 * sum(clicks.num_ids(name) for name in clicks.inputs(categorical=True))  # 4 bytes of widths 1 and 4
    two = Ranks(0, 2)
    assert placed(clicks, two).plan.stores == ()
    assert placed(clicks, two, memory=size).plan.stores == ()
    assert placed(clicks, two, memory=size - 1).plan.stores == stores
    assert placed(clicks, two, memory=1, shard="never").plan.stores == ()
    assert placed(clicks, two, shard="always").plan.stores == stores
    assert placed(clicks, ALONE, shard="always").plan.stores == (), "nobody to share with"
    assert sum(placed(clicks, two, shard="always").plan.bytes) == size


def test_the_largest_tables_stay_on_the_host_until_the_device_holds_the_others(clicks: FeatureSpec) -> None:
    wide, deep = "wide.tables.stores.1", "deep.embeddings.stores.4"
    gpu = Ranks(device=torch.device("cuda", 0))
    ids = sum(clicks.num_ids(name) for name in clicks.inputs(categorical=True))
    assert placed(clicks, gpu, memory=20 * ids).offloaded == set()
    assert placed(clicks, gpu, memory=20 * ids - 1).offloaded == {deep}
    assert placed(clicks, gpu, memory=4 * ids - 1).offloaded == {wide, deep}
    assert placed(clicks, gpu, memory=1, offload="never").offloaded == set()
    assert placed(clicks, ALONE, memory=1).offloaded == set(), "a CPU's tables are there already"
    assert placed(clicks, ALONE, offload="always").offloaded == {wide, deep}
    two = Ranks(0, 2, torch.device("cuda", 0))
    assert placed(clicks, two, memory=10 * ids, shard="always").offloaded == set(), "half of them fits"
    both = placed(clicks, two, memory=10 * ids - 1, shard="always")
    assert both.offloaded == {deep}
    assert set(both.plan.stores) == {wide, deep}


def test_what_is_not_a_table_goes_to_the_device_and_batches_with_it(clicks: FeatureSpec) -> None:
    elsewhere = Ranks(device=torch.device("meta"))  # stands for a GPU: tensors have a device and no numbers
    settings = MODELS["wide_deep"].Settings.model_validate({**WIDE_DEEP, "use_wide": False})

    def make(held: RowsHeld | None) -> Model:
        return MODELS["wide_deep"](clicks, settings, held)

    placement = place(make, elsewhere, PlacementSettings(offload_embeddings="always"), lambda _, width: 4 * width)
    model, _ = build(make, elsewhere, placement)
    devices = {name: parameter.device.type for name, parameter in model.named_parameters()}
    assert next(iter(devices)) == "deep.embeddings.stores.4"
    assert [name for name, device in devices.items() if device == "cpu"] == ["deep.embeddings.stores.4"]
    assert model.device == elsewhere.device


def test_a_model_without_tables_to_divide_is_refused(tmp_path: Path) -> None:
    spec = made_up.interactions(tmp_path / "data")
    with pytest.raises(SettingsError) as caught:
        placed(spec, Ranks(0, 2), "neumf", shard="always", offload="always")
    assert str(caught.value) == (
        "train.shard_embeddings and train.offload_embeddings: always, but NeuMF has no embedding tables that can be "
        "divided or left on the host; leave it at auto"
    )
    assert placed(spec, Ranks(0, 2), "neumf", memory=1).plan.pieces == ()


@pytest.mark.parametrize("start", ["uniform", "glorot"])
def test_rows_that_are_held_start_as_they_do_among_all(
    clicks: FeatureSpec, start: Literal["uniform", "glorot"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recspec.models.layers.embeddings.DRAWN", 100)  # several blocks a table
    widths = dict.fromkeys(clicks.inputs(categorical=True), 3)

    def made(held: RowsHeld | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(5)
        store = Embeddings(clicks, widths, start=start, table_rows=held).stores["3"]
        return store, torch.rand(1)

    whole, after = made()
    held = (range(2), range(30, 77), range(390, len(whole)))
    some, after_some = made(lambda *_: held)
    assert torch.equal(some, torch.cat([whole[rows.start : rows.stop] for rows in held]))
    assert torch.equal(after, after_some), "what is drawn next is the same too"


def test_distinct_keys_ascend_and_every_key_finds_its_place() -> None:
    for keys in ([0], [0, 6, 3, 6], [0, 1 << 42, 7, 0, 1 << 42], [1 << 62, 0, 1 << 62]):
        found, places = distinct(torch.tensor(keys))
        assert found.tolist() == sorted(set(keys))
        assert found[places].tolist() == keys


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_fetched_rows_are_looked_up_as_rows_that_are_here(
    clicks: FeatureSpec, combiner: Literal["sum", "mean"]
) -> None:
    def make(held: RowsHeld | None = None) -> nn.Module:
        torch.manual_seed(3)
        widths = {"user_id": 2, "tags": 2, "hour": 2, "item_id": 3}
        return nn.ModuleDict({"all": Embeddings(clicks, widths, combiner=combiner, table_rows=held)})

    def step(model: nn.Module, names: tuple[str, ...] | None) -> torch.Tensor:
        embeddings = model["all"]  # type: ignore[index]
        found: torch.Tensor = embeddings(batch, names)
        (found * torch.arange(1.0, 1 + found.shape[1])).sum().backward()
        return found.detach()

    batch = {
        "user_id": torch.tensor([7, 0, 7, 390]),
        "hour": torch.tensor([1, 1, 23, 0]),
        "item_id": torch.tensor([1, 2, 3, 4]),
        "tags": torch.tensor([[1, 2, 0, 0], [0, 0, 0, 0], [3, 3, 3, 3], [5, 0, 0, 0]]),
    }
    batch["tags"] = nn.functional.pad(batch["tags"], (0, (clicks.features["tags"].length or 4) - 4))
    for names in (None, ("tags",), ("hour", "item_id")):
        whole, there = make(), None
        placement = place(make, ALONE, PlacementSettings(offload_embeddings="always"), lambda _, width: 4 * width)
        there, shards = build(make, ALONE, placement)
        assert there.state_dict().keys() == whole.state_dict().keys()
        assert_close(step(there, names), step(whole, names))
        shards.collect()
        for sparse in (True, False):
            if not sparse:
                step(there, names)
                shards.collect()
            shards.deliver(lambda _, sparse=sparse: sparse)  # type: ignore[misc]
            for name, weight in there.named_parameters():
                expected = dict(whole.named_parameters())[name].grad
                assert weight.grad is not None
                assert weight.grad.is_sparse == sparse
                torch.testing.assert_close(
                    weight.grad.to_dense(), torch.zeros_like(weight) if expected is None else expected
                )


# --- two processes as one --------------------------------------------------------------------------------------------

COMMON = {"batch_size": 333, "log_every": 1, "tensorboard": False, "precision": "fp32", "learning_rate": 0.05}

CASES: Mapping[str, tuple[str, Mapping[str, object], Mapping[str, object]]] = {
    "adagrad, rows seen, micro-batches": (
        "dlrm",
        DLRM,
        {"optimizer": "adagrad", "accumulate": 4, "sparse_gradients": "always", "epochs": 2},
    ),
    "sgd, tables cut by rows": ("wide_deep", WIDE_DEEP, {"optimizer": "sgd", "sparse_gradients": "always"}),
    "adam of all rows, clipped, averaged": (
        "wide_deep",
        WIDE_DEEP,
        {"optimizer": "adam", "sparse_gradients": "never", "clip_norm": 0.05, "average": 0.9, "learning_rate": 0.005},
    ),
    "row-wise adagrad and ftrl, tables on the host": (
        "wide_deep",
        WIDE_DEEP,
        {
            "optimizer": "rowwise_adagrad",
            "parts": {"wide": {"optimizer": "ftrl"}},
            "offload_embeddings": "always",
            "keep_best": False,
        },
    ),
    "rmsprop, several widths, held-out rows": (
        "dcnv2",
        {"embedding_dim": "rule", "bottom": [4], "top": [8], "cross_layers": 2, "cross_rank": 2, "dropout": 0.0},
        {"optimizer": "rmsprop", "sparse_gradients": "always", "valid_share": 0.2, "learning_rate": 0.01},
    ),
}

TRAIN = """
import json, sys
from pathlib import Path
from recspec.loading import join
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS
from recspec.training.settings import TrainSettings
from recspec.training.loop import train

with join("cpu") as ranks:
    for data, model, model_settings, settings, folder, resume in json.loads(sys.argv[1]):
        train(
            model, FeatureSpec.load(data), Path(folder), ranks=ranks, resume=resume,
            settings=TrainSettings.model_validate(settings),
            model_settings=MODELS[model].Settings.model_validate(model_settings),
        )
"""


def train_on(world_size: int, runs: list[tuple[Any, ...]]) -> None:
    with ranks(TRAIN, world_size, json.dumps(runs)) as processes:
        for done in [process.ended() for process in processes]:
            assert done.returncode == 0, done.stderr


def train_here(run: tuple[Any, ...]) -> None:
    data, model, model_settings, settings, folder, resume = run
    train(
        model,
        FeatureSpec.load(data),
        Path(folder),
        resume=resume,
        settings=TrainSettings.model_validate(settings),
        model_settings=MODELS[model].Settings.model_validate(model_settings),
    )


def of_case(spec: FeatureSpec, folder: Path, case: str, *, resume: bool = False, **values: object) -> tuple[Any, ...]:
    """A run, as `train_on` and `train_here` take it."""
    model, model_settings, settings = CASES[case]
    chosen = {**COMMON, "epochs": 1, **settings, "shard_embeddings": "always", **values}
    return str(spec.folder), model, model_settings, chosen, str(folder), resume


RESUMED = "sgd, tables cut by rows"


@pytest.fixture(scope="module")
def data_of(clicks: FeatureSpec) -> Mapping[str, FeatureSpec]:
    """Each case's data; one has no valid split."""
    folder = clicks.folder.parent / "no-valid"
    held_out = made_up.clicks(folder, num_users=400)
    sources = {split: held_out.sources[split] for split in ("train", "test")}
    held_out.replace(sources=sources).save(folder)
    held_out = FeatureSpec.load(folder)
    return {case: held_out if "valid_share" in settings else clicks for case, (_, _, settings) in CASES.items()}


@pytest.fixture(scope="module")
def runs(data_of: Mapping[str, FeatureSpec], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case trained by one process (`one/`) and by two with tables divided (`two/`), all in one start of the two.

    Beside them a run that one process began and two continued (`one-two`), and the other way round (`two-one`).
    """
    root = tmp_path_factory.mktemp("runs")
    for case in CASES:
        train_here(of_case(data_of[case], root / "one" / case, case))
    data = data_of[RESUMED]
    train_here(of_case(data, root / "one" / "two epochs", RESUMED, epochs=2))
    train_here(of_case(data, root / "one-two", RESUMED))
    on_both = [of_case(data_of[case], root / "two" / case, case) for case in CASES]
    train_on(
        2,
        [
            *on_both,
            of_case(data, root / "one-two", RESUMED, resume=True, epochs=2),
            of_case(data, root / "two-one", RESUMED),
        ],
    )
    train_here(of_case(data, root / "two-one", RESUMED, resume=True, epochs=2))
    return root


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def assert_alike(first: Path, second: Path) -> None:
    """Same losses, same metrics, same tensors in every checkpoint and in the bundle, to rounding."""
    losses = [[event["loss"] for event in events(folder, "step")] for folder in (first, second)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    for one, two in zip(events(first, "epoch"), events(second, "epoch"), strict=True):
        assert one["metrics"].keys() == two["metrics"].keys() == {"rows"}
        assert one["metrics"]["rows"] == pytest.approx(two["metrics"]["rows"], abs=2e-4)
    files = [sorted(path.relative_to(folder) for path in folder.rglob("*.safetensors")) for folder in (first, second)]
    assert files[0] == files[1]
    for file in files[0]:
        left, right = read_tensors(first / file)[0], read_tensors(second / file)[0]
        assert left.keys() == right.keys(), file
        for name, tensor in left.items():
            torch.testing.assert_close(tensor, right[name], atol=1e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_with_divided_tables_train_as_one(runs: Path, case: str) -> None:
    one, two = runs / "one" / case, runs / "two" / case
    start = events(two, "start")[0]
    assert [line.partition(":")[0] for line in start["sharding"]] == ["rank 0", "rank 1"]
    assert start["parameters"] == events(one, "start")[0]["parameters"]
    assert start["rows"] % 333 != 0, "the last batch is smaller, and its rows are not even"
    if "by rows" in case:
        assert "rows 0 to " in start["sharding"][0]
    assert_alike(one, two)


@pytest.mark.parametrize("resumed", ["one-two", "two-one"])
def test_a_checkpoint_of_one_world_size_resumes_on_another(runs: Path, resumed: str) -> None:
    whole = runs / "one" / "two epochs"
    assert [event["world_size"] for event in events(runs / resumed, "start")] == (
        [1, 2] if resumed == "one-two" else [2, 1]
    )
    assert_alike(whole, runs / resumed)


def test_a_bundle_of_divided_tables_is_divided_again_for_an_evaluation(
    runs: Path, data_of: Mapping[str, FeatureSpec]
) -> None:
    run, data = runs / "two" / RESUMED, data_of[RESUMED]
    name = "deep.embeddings.stores.4"
    whole = bundle.load(run)
    assert not whole.shards.stores
    for rank in range(2):
        part = bundle.load(run, ranks=Ranks(rank, 2))
        rows = part.shards.placement.plan.held(name, rank)
        expected = torch.cat([whole.model.state_dict()[name][r.start : r.stop] for r in rows])
        assert torch.equal(part.model.state_dict()[name], expected)
    command = ["evaluate", run, data.folder, "--json"]
    done = [recspec(*command), *recspec_on_two(*command)]
    assert [each.returncode for each in done] == [0, 0, 0], done
    assert not done[2].stdout, "the first rank alone answers"
    metrics = [json.loads(each.stdout)["metrics"]["rows"] for each in done[:2]]
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-6)


def test_tables_that_stay_on_the_host_train_as_tables_on_the_device(clicks: FeatureSpec, tmp_path: Path) -> None:
    for case in ("adagrad, rows seen, micro-batches", "adam of all rows, clipped, averaged"):
        for folder, offload in (("here", "never"), ("there", "always")):
            train_here(of_case(clicks, tmp_path / case / folder, case, offload_embeddings=offload))
        assert events(tmp_path / case / "there", "start")[0]["offloaded"]
        assert not events(tmp_path / case / "here", "start")[0]["offloaded"]
        assert_alike(tmp_path / case / "here", tmp_path / case / "there")


def test_a_loss_scaler_and_tables_elsewhere_do_not_go_together(
    clicks: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp16 = Choice("fp16", "as on a GPU without bf16")
    monkeypatch.setattr("recspec.training.choices.pick_precision", lambda *_, **__: fp16)
    with pytest.raises(SettingsError, match=r"train.precision is fp16, whose .* take bf16 or tf32"):
        train_here(of_case(clicks, tmp_path / "run", RESUMED, offload_embeddings="always"))


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="'much' is not a size; write it as 2GB or 512MiB"):
        TrainSettings.model_validate({"embedding_memory": "much"})


# --- a rank that dies ------------------------------------------------------------------------------------------------

ONE_LEAVES = """
import os, sys, torch
from torch import nn
from pathlib import Path
from recspec.loading import join
from recspec.feature_spec import FeatureSpec
from recspec.loading import PlacementSettings, build, place
from recspec.models.layers.embeddings import Embeddings

spec = FeatureSpec.load(sys.argv[1])
with join("cpu") as ranks:
    make = lambda held: nn.ModuleList([Embeddings(spec, {"user_id": 2}, table_rows=held)])
    placement = place(make, ranks, PlacementSettings(shard_embeddings="always"), lambda _, width: 4 * width)
    model, _ = build(make, ranks, placement)
    batch = {"user_id": torch.arange(390)}
    model[0](batch)
    ranks.barrier()
    if ranks.rank == 1:
        os._exit(9)
    model[0](batch)
"""


def test_a_rank_that_dies_ends_the_others(clicks: FeatureSpec) -> None:
    with ranks(ONE_LEAVES, 2, str(clicks.folder)) as processes:
        done = [process.ended() for process in processes]
    assert [each.returncode for each in done] == [1, 9]
    assert "rank 0: an exchange with the other ranks broke off (" in done[0].stderr
