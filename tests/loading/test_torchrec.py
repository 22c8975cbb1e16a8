"""Tables that TorchRec divides train, resume and save as whole ones do: two processes as one.

TorchRec is loaded in processes of their own alone: importing it takes seconds, and FBGEMM warns of what it lacks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from recspec.base.errors import SettingsError
from recspec.bundle import folder as bundle
from recspec.feature_spec import FeatureSpec
from recspec.loading import Ranks, Shards, torchrec_tables
from recspec.loading.placement import Piece, Table
from recspec.models import MODELS
from recspec.models.base import Model
from recspec.models.layers.embeddings import RowsHeld
from recspec.training.choices import place_tables
from recspec.training.optimizers import MetaModel
from recspec.training.settings import TrainSettings
from tests import made_up
from tests.loading.test_sharding import assert_alike, events, train_here, train_on
from tests.processes import ranks

needs_torchrec = pytest.mark.skipif(
    find_spec("torchrec") is None, reason="TorchRec is not installed (pip install 'recspec[torchrec]')"
)

COMMON = {"batch_size": 333, "log_every": 1, "tensorboard": False, "precision": "fp32", "epochs": 1}
DLRM = {"embedding_dim": 8, "bottom": [8, 8], "top": [8], "dropout": 0.0}
WIDE_DEEP = {"embedding_dim": 4, "hidden": [8], "dropout": 0.0}

CASES: Mapping[str, tuple[str, Mapping[str, object], Mapping[str, object]]] = {
    "row-wise adagrad, as the planner cuts": ("dlrm", DLRM, {"optimizer": "rowwise_adagrad", "learning_rate": 0.05}),
    "adagrad, by columns": (
        "dlrm",
        DLRM,
        {"optimizer": "adagrad", "learning_rate": 0.05, "initial_accumulator": 0.1, "shard_cut": "column_wise"},
    ),
    "sgd, whole tables, micro-batches, a rate that falls": (
        "dlrm",
        DLRM,
        {"optimizer": "sgd", "learning_rate": 0.5, "schedule": "linear", "accumulate": 4, "shard_cut": "table_wise"},
    ),
    "adagrad, by rows, and tables of width 1 by recspec": (
        "wide_deep",
        WIDE_DEEP,
        {
            "optimizer": "adagrad",
            "learning_rate": 0.05,
            "parts": {"wide": {"optimizer": "ftrl"}},
            "shard_cut": "row_wise",
        },
    ),
}
BY_ROWS, BY_COLUMNS = list(CASES)[:2]
BY_TORCHREC = {"shard_embeddings": "always", "shard_by": "torchrec"}


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.clicks(tmp_path_factory.mktemp("torchrec") / "clicks", num_users=400)


def of_case(spec: FeatureSpec, folder: Path, case: str, *, resume: bool = False, **values: object) -> tuple[Any, ...]:
    """A run, as `train_on` and `train_here` take it."""
    model, model_settings, settings = CASES[case]
    chosen = {**COMMON, **settings, **BY_TORCHREC, **values}
    return str(spec.folder), model, model_settings, chosen, str(folder), resume


@pytest.fixture(scope="module")
def runs(clicks: FeatureSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case trained by one process (`one/`) and by two with TorchRec (`two/`), and beside them:

    `one/two epochs of CASE`, `two-one` and `two-three/CASE`, begun by two and continued by others; `recspec`, divided
    by recspec; `fp16`, which sends numbers in fp16.
    """
    root = tmp_path_factory.mktemp("runs")
    for case in CASES:
        train_here(of_case(clicks, root / "one" / case, case))
    resumed = [root / "two-three" / case for case in (BY_ROWS, BY_COLUMNS)]
    train_on(
        2,
        [
            *(of_case(clicks, root / "two" / case, case) for case in CASES),
            *(of_case(clicks, folder, folder.name) for folder in resumed),
            of_case(clicks, root / "two-one", BY_ROWS),
            of_case(clicks, root / "recspec", BY_ROWS, shard_by="recspec"),
            of_case(clicks, root / "fp16", BY_ROWS, shard_precision="fp16"),
        ],
    )
    train_here(of_case(clicks, root / "two-one", BY_ROWS, resume=True, epochs=2))
    train_on(3, [of_case(clicks, folder, folder.name, resume=True, epochs=2) for folder in resumed])
    for case in (BY_ROWS, BY_COLUMNS):
        train_here(of_case(clicks, root / "one" / f"two epochs of {case}", case, epochs=2))
    return root


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in events(folder, "step")]


@needs_torchrec
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(runs: Path, case: str) -> None:
    one, two = runs / "one" / case, runs / "two" / case
    assert len(losses(two)) == 10
    assert losses(one) == pytest.approx(losses(two), abs=3e-6)
    assert_alike(one, two)
    start = events(two, "start")[0]
    assert [line.partition(":")[0] for line in start["sharding"]] == ["rank 0", "rank 1"]
    assert "sharded over the ranks (by TorchRec: " in start["choices"]["tables"]
    assert (", columns 4 to 7 of 8)" in start["sharding"][1]) == ("by columns" in case)
    if "by rows" in case:
        assert "user_id (rows 0 to 198 of 397)" in start["sharding"][0]
        assert "wide.tables.stores.1" not in start["choices"]["tables"]


@needs_torchrec
@pytest.mark.slow
@pytest.mark.parametrize("case", [BY_ROWS, BY_COLUMNS])
def test_a_run_of_two_ranks_goes_on_with_three(runs: Path, case: str) -> None:
    resumed = runs / "two-three" / case
    assert [event["world_size"] for event in events(resumed, "start")] == [2, 3]
    assert_alike(runs / "one" / f"two epochs of {case}", resumed)


@needs_torchrec
@pytest.mark.slow
def test_a_run_of_two_ranks_goes_on_with_one(runs: Path) -> None:
    assert [event["world_size"] for event in events(runs / "two-one", "start")] == [2, 1]
    assert_alike(runs / "one" / f"two epochs of {BY_ROWS}", runs / "two-one")


@needs_torchrec
@pytest.mark.slow
def test_a_bundle_is_as_of_the_other_exchange(runs: Path, clicks: FeatureSpec) -> None:
    batch = {name: torch.tensor([3, 1, 2]) for name in clicks.inputs(categorical=True)}
    batch |= {name: torch.tensor([0.5, 0.0, 1.0]) for name in clicks.inputs(categorical=False)}
    tags = clicks.features["tags"]
    batch["tags"] = torch.tensor([[1, 2, 3], [4, 0, 0], [0, 0, 0]]).repeat(1, tags.length or 1)[:, : tags.length]
    found = []
    for folder in (runs / "recspec", runs / "two" / BY_ROWS):
        with torch.no_grad():
            found.append(bundle.load(folder).model(batch))
        assert type(bundle.load(folder, ranks=Ranks(1, 2)).shards) is Shards, "an evaluation on two ranks needs none"
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    assert_alike(runs / "recspec", runs / "two" / BY_ROWS)


@needs_torchrec
@pytest.mark.slow
def test_numbers_may_be_sent_in_half_precision(runs: Path) -> None:
    whole, half = losses(runs / "two" / BY_ROWS), losses(runs / "fp16")
    assert half == pytest.approx(whole, abs=1e-3)
    assert half != pytest.approx(whole, abs=1e-7)


# --- evaluations -----------------------------------------------------------------------------------------------------

UNEVEN = """
import sys, torch
from torch import nn
from recspec.loading import PlacementSettings, build, join, place, torchrec_tables
from recspec.models.layers import Embeddings
from recspec.feature_spec import FeatureSpec

spec = FeatureSpec.load(sys.argv[1])
with join("cpu") as ranks:
    def make(held=None):
        torch.manual_seed(0)
        return nn.ModuleList([Embeddings(spec, {"user_id": 4, "hour": 4, "item_id": 8, "tags": 2}, table_rows=held)])
    settings = PlacementSettings(shard_embeddings="always", shard_by="torchrec")
    placement = place(make, ranks, settings, lambda _, width: 4 * width)
    placement = torchrec_tables.divide_by_torchrec(placement, ranks, settings, by_column=True)
    model, shards = build(make, ranks, placement)
    shards = torchrec_tables.with_torchrec(shards, model, dict.fromkeys(placement.by_torchrec), "fp32")
    whole, ids = make(), torch.arange(20)
    batch = dict.fromkeys(("user_id", "hour", "item_id"), ids)
    batch["tags"] = ids.repeat(30, 1).t()[:, : spec.features["tags"].length]
    wanted = [("user_id",), ("hour", "item_id"), None, ("item_id",), ("tags",)] if ranks.rank == 0 else [("item_id",)]
    with torch.inference_mode():
        for names in wanted:
            torch.testing.assert_close(model[0](batch, names), whole[0](batch, names))
        print(shards.evaluating.gather(torch.tensor([len(wanted)])).tolist())
"""


@needs_torchrec
@pytest.mark.slow
def test_ranks_may_need_different_numbers_of_lookups(clicks: FeatureSpec) -> None:
    with ranks(UNEVEN, 2, str(clicks.folder)) as processes:
        done = [process.ended() for process in processes]
    assert [each.returncode for each in done] == [0, 0], done
    assert [each.stdout.strip() for each in done] == ["[5, 1]", "[5, 1]"]


# --- messages --------------------------------------------------------------------------------------------------------


def refused(spec: FeatureSpec, model: str = "dlrm", **values: object) -> str:
    """The message of settings on two ranks."""
    model_settings = MODELS[model].Settings.model_validate({"dlrm": DLRM, "wide_deep": WIDE_DEEP}[model])

    def make(held: RowsHeld | None) -> Model:
        return MODELS[model](spec, model_settings, held)

    settings = TrainSettings.model_validate({"optimizer": "sgd", **BY_TORCHREC, **values})
    with pytest.raises(SettingsError) as caught:
        place_tables(MetaModel(make, settings, torch.device("cpu")), settings, Ranks(0, 2), "fp32")
    return str(caught.value)


HEAD = "train.shard_by is torchrec; recspec's own exchange takes any settings"


def test_missing_torchrec_is_told_with_the_way_to_install_it(
    clicks: FeatureSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", None)
    told = "this needs the library 'torchrec', which is not installed: pip install 'recspec[torchrec]'"
    assert refused(clicks) == f"{HEAD}: {told}"


def test_a_torchrec_that_does_not_load_is_told(clicks: FeatureSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: str) -> None:
        raise OSError("undefined symbol: x\nand more")

    monkeypatch.setattr(torchrec_tables, "require_extra", fail)
    told = f"TorchRec does not load beside torch {torch.__version__} (undefined symbol: x)"
    assert refused(clicks) == f"{HEAD}: {told}"


def test_all_that_torchrec_cannot_do_is_told_at_once(clicks: FeatureSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrec_tables, "why_not", lambda: None)
    chosen = {"optimizer": "adam", "clip_norm": 1.0, "average": 0.9, "sparse_gradients": "never"}
    message = refused(clicks, "wide_deep", **chosen, offload_embeddings="always", shard_precision="bf16")
    head, *problems = [line.strip(" -") for line in message.splitlines()]
    assert head == f"{HEAD}: 6 problems"
    needs = "which needs gradients, and TorchRec updates tables in the backward pass and leaves none"
    fused = "it has 'sgd', 'adagrad', 'rowwise_adagrad'"
    assert problems[1:] == [
        f"deep.embeddings.stores.4: fbgemm cannot update tables by optimizer 'adam'; {fused}",
        "train.average is 0.9, and TorchRec keeps no running mean of its tables",
        f"train.clip_norm is 1.0, {needs}",
        "train.shard_precision is bf16, which gloo cannot send; take fp16",
        f"train.sparse_gradients is never, {needs}",
    ]
    assert problems[0].startswith("'deep.embeddings.stores.4', 'wide.tables.stores.1' would stay on the host (tables")
    assert problems[0].endswith(
        "), and TorchRec holds tables on the device; take more ranks, or train.offload_embeddings=never"
    )


NO_PLAN = """
import sys
from torch import nn
from recspec import machine
from recspec.loading import PlacementSettings, join, place, torchrec_tables
from recspec.base.errors import SettingsError
from recspec.models.layers import Embeddings
from recspec.feature_spec import FeatureSpec

spec = FeatureSpec.load(sys.argv[1])
with join("cpu") as ranks:
    make = lambda held=None: nn.ModuleList([Embeddings(spec, {"user_id": 4}, table_rows=held)])
    settings = PlacementSettings(shard_embeddings="always", shard_by="torchrec")
    placement = place(make, ranks, settings, lambda _, width: 4 * width)
    if ranks.rank == 1:
        machine.total_memory = lambda: 1000
    try:
        torchrec_tables.divide_by_torchrec(placement, ranks, settings, by_column=True)
    except SettingsError as error:
        print(error)
"""


@needs_torchrec
@pytest.mark.slow
def test_tables_that_do_not_fit_the_smallest_rank_are_told(clicks: FeatureSpec) -> None:
    with ranks(NO_PLAN, 2, str(clicks.folder)) as processes:
        done = [process.ended() for process in processes]
    told = (
        "train.shard_by is torchrec, whose planner finds no plan: Unable to find a plan for this model because of "
        "insufficient storage; take more ranks, or train.shard_by=recspec"
    )
    assert [each.stdout.strip() for each in done] == [told, told], done


def test_row_wise_adagrad_is_not_cut_by_columns(clicks: FeatureSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrec_tables, "why_not", lambda: None)
    assert refused(clicks, optimizer="rowwise_adagrad", shard_cut="column_wise") == (
        f"{HEAD}: train.shard_cut is column_wise, and rowwise_adagrad keeps one number for a whole row of "
        "'embeddings.stores.8'; take optimizer adagrad or sgd, or train.shard_cut=row_wise"
    )


def test_tables_of_other_widths_alone_are_refused(clicks: FeatureSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrec_tables, "why_not", lambda: None)
    monkeypatch.setattr(torchrec_tables, "COLUMNS", 16)
    assert refused(clicks) == f"{HEAD}: no table has a width of a multiple of 16, as FBGEMM needs"


def test_settings_of_torchrec_alone_are_refused_without_it() -> None:
    told = "shard_cut is row_wise and shard_precision is fp16, which only TorchRec reads; set shard_by=torchrec"
    with pytest.raises(ValueError, match=told):
        TrainSettings.model_validate({"shard_cut": "row_wise", "shard_precision": "fp16"})


def test_a_piece_of_columns_says_so_and_counts_its_bytes() -> None:
    piece = Piece(Table("all.stores.8", "user_id", 10, 5, 64), 10, 15, 0, range(4, 8))
    assert str(piece) == "all.stores.8 user_id (5 rows, columns 4 to 7 of 8)"
    assert piece.bytes == 160
