"""The loop: exact resume, equal weights on one process and on two, early stop, one message for each way to fail."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import get_args

import pytest
import torch

from recspec.api.verb_checks import settings_of
from recspec.base.config import load_recipe
from recspec.base.errors import CheckpointError, SettingsError, SpecError, TrainingError
from recspec.bundle import folder as bundle
from recspec.bundle.checkpoint import read_tensors
from recspec.data.storage import open_split, synthesize
from recspec.evaluation import evaluate_model
from recspec.feature_spec import FeatureSpec
from recspec.loading.blocks import HeldOutShare
from recspec.loading.loader import Loader
from recspec.loading.ranks import Ranks
from recspec.models import MODELS
from recspec.training import choices
from recspec.training.defaults import MOST_EPOCHS, PATIENCE
from recspec.training.loop import RankConsensus, TrainingRun, train
from recspec.training.settings import TrainSettings
from tests import made_up
from tests.processes import COMMAND, Ended, Running, ended, recspec, recspec_on_two

SMALL = {"factors": 4, "layers": (8, 4), "dropout": 0.2, "use_mlp": True, "item_bias": False}
SMALL |= {"loss": "cross_entropy", "l2_positives": 0.0}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(datasets: Mapping[str, FeatureSpec]) -> FeatureSpec:
    return datasets["interactions"]


@pytest.fixture(scope="module")
def clicks(datasets: Mapping[str, FeatureSpec]) -> FeatureSpec:
    return datasets["clicks"]


def settings(**values: object) -> TrainSettings:
    return TrainSettings.model_validate(
        {
            "epochs": 3,
            "batch_size": 2000,
            "negatives": 4,
            "learning_rate": 0.01,
            "log_every": 1,
            "tensorboard": False,
            "precision": "fp32",  # exact to 1e-6 or so on every CPU
            **values,
        }
    )


def run(
    spec: FeatureSpec,
    folder: Path,
    *,
    model: Mapping[str, object] = MappingProxyType({}),
    resume: bool = False,
    **values: object,
) -> Path:
    model_settings = MODELS["neumf"].Settings.model_validate({**SMALL, **model})
    train("neumf", spec, folder, settings=settings(**values), model_settings=model_settings, resume=resume)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_tensors(folder / "bundle" / "weights.safetensors")[0]


def events(folder: Path, kind: str) -> list[dict[str, object]]:
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def assert_equal_weights(first: Path, second: Path) -> None:
    left, right = weights(first), weights(second)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


# --- learning --------------------------------------------------------------------------------------------------------


def test_a_run_learns_and_leaves_bundle_log_and_checkpoints(data: FeatureSpec, tmp_path: Path) -> None:
    folder = run(data, tmp_path / "run", epochs=8, model={"dropout": 0.0})
    losses = [event["train_loss"] for event in events(folder, "epoch")]
    assert losses[-1] < losses[0]
    start, done = events(folder, "start")[0], events(folder, "done")[0]
    assert start["negatives"] == 4
    assert start["samples_per_epoch"] == 5 * start["rows"]
    assert done["stopped"] == "epochs"
    assert {path.suffix for path in (folder / "checkpoints").iterdir()} == {".safetensors"}
    assert bundle.load(folder).card.trained["steps"] == start["steps"]


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(data: FeatureSpec, tmp_path: Path) -> None:
    first, second = run(data, tmp_path / "a"), run(data, tmp_path / "b")
    other = run(data, tmp_path / "c", seed=1)
    assert_equal_weights(first, second)
    assert any(not torch.equal(weights(first)[name], weights(other)[name]) for name in weights(first))


@pytest.mark.parametrize("few_items", [False, True])
def test_the_recipe_of_a_run_gives_the_same_run(few_items: bool, data: FeatureSpec, tmp_path: Path) -> None:
    """What suited the data is in it, such as the batch size; and the metric that valid could give."""
    if few_items:
        data = made_up.interactions(tmp_path / "data", num_users=60, num_items=8, num_rows=300)
    own = MODELS["neumf"].Settings.model_validate(SMALL)
    asked = TrainSettings(epochs=2, seed=3, tensorboard=False, mlflow="none")
    train("neumf", data, tmp_path / "run", settings=asked, model_settings=own)
    model, how = settings_of("neumf", tmp_path / "run" / "recipe.yaml", {})
    train("neumf", data, tmp_path / "again", settings=how, model_settings=model)
    assert_equal_weights(tmp_path / "run", tmp_path / "again")
    first, second = (bundle.read_card(tmp_path / each / "bundle") for each in ("run", "again"))
    assert first.metrics == second.metrics
    assert first.settings == second.settings
    assert how.seed == 3
    assert how.batch_size == events(tmp_path / "run", "start")[0]["batch_size"]
    assert "mlflow" not in load_recipe(tmp_path / "run" / "recipe.yaml").train


def test_the_last_partial_batch_is_used(data: FeatureSpec, tmp_path: Path) -> None:
    folder = run(data, tmp_path / "run", batch_size=999, epochs=1)
    start = events(folder, "start")[0]
    steps = -(-start["rows"] // (999 // 5))  # type: ignore[operator]
    assert len(events(folder, "step")) == steps
    assert bundle.load(folder).card.trained["samples"] == start["samples_per_epoch"]


def test_the_loss_of_an_epoch_is_a_mean_over_rows_however_small_the_last_batch_is(
    data: FeatureSpec, tmp_path: Path
) -> None:
    rows = open_split(data, "train").num_rows
    size = min(range(rows // 4, rows // 2), key=lambda size: rows % size or size)  # the last batch has a row or few
    folder = run(data, tmp_path / "run", batch_size=5 * size, epochs=1)
    losses = [float(str(event["loss"])) for event in events(folder, "step")]
    counts = [size] * (len(losses) - 1) + [rows % size]
    wanted = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / rows
    assert events(folder, "epoch")[0]["train_loss"] == pytest.approx(wanted, rel=1e-6)


def test_micro_batches_change_nothing_but_rounding(data: FeatureSpec, tmp_path: Path) -> None:
    whole = run(data, tmp_path / "whole", model={"dropout": 0.0}, epochs=1)
    parts = run(data, tmp_path / "parts", model={"dropout": 0.0}, epochs=1, accumulate=3)
    for name, value in weights(whole).items():
        torch.testing.assert_close(value, weights(parts)[name], atol=2e-5, rtol=1e-4)


def test_training_on_valid_too_leaves_its_drawn_candidates_out(data: FeatureSpec, tmp_path: Path) -> None:
    alone = run(data, tmp_path / "alone", epochs=1)
    both = run(data, tmp_path / "both", epochs=1, train_splits=("train", "valid"))
    series = events(both, "start")[0]["rows"] - events(alone, "start")[0]["rows"]  # type: ignore[operator]
    assert 0 < series <= 120, "one positive a user, none of its 20 negatives"
    assert events(both, "start")[0]["metric"] is None


def test_a_streamed_split_trains_on_every_row(data: FeatureSpec, tmp_path: Path) -> None:
    folder = run(data, tmp_path / "run", epochs=1, memory_budget="10kB")
    assert events(folder, "start")[0]["loader"] == "stream"
    assert bundle.load(folder).card.trained["samples"] == events(folder, "start")[0]["samples_per_epoch"]


@pytest.mark.parametrize("optimizer", get_args(TrainSettings.model_fields["optimizer"].annotation))
def test_every_optimizer_lowers_the_loss(data: FeatureSpec, tmp_path: Path, optimizer: str) -> None:
    rate = {"sgd": 5.0, "adagrad": 0.05, "ftrl": 0.05, "rowwise_adagrad": 0.05}.get(optimizer, 0.01)
    folder = run(data, tmp_path / "run", optimizer=optimizer, learning_rate=rate, epochs=4, model={"dropout": 0.0})
    losses = [event["train_loss"] for event in events(folder, "epoch")]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_every_precision_of_a_cpu_trains(data: FeatureSpec, tmp_path: Path, precision: str) -> None:
    folder = run(data, tmp_path / "run", precision=precision, epochs=2)
    assert events(folder, "start")[0]["precision"] == precision
    assert torch.get_float32_matmul_precision() == "highest", "what was set before is set again"


@pytest.fixture(scope="module")
def without_valid(clicks: FeatureSpec) -> FeatureSpec:
    """A published kind of dataset: labelled rows in train and test, no valid."""
    return clicks.replace(sources={split: clicks.sources[split] for split in ("train", "test")})


def test_a_share_of_train_picks_the_best_epoch_where_there_is_no_valid(
    without_valid: FeatureSpec, tmp_path: Path
) -> None:
    whole = run(without_valid, tmp_path / "whole", epochs=1, valid_share=0.0)
    parts = run(without_valid, tmp_path / "parts", epochs=2, valid_share=0.25)
    rows = [events(folder, "start")[0]["rows"] for folder in (whole, parts)]
    assert rows[1] == pytest.approx(0.75 * rows[0], rel=0.05)  # type: ignore[operator]
    assert events(whole, "start")[0]["metric"] is None
    found = events(parts, "epoch")[0]["metrics"]["rows"]  # type: ignore[index]
    assert set(found) == {"auc", "log_loss", "accuracy", "calibration_error"}
    assert "rows" in bundle.load(parts).card.metrics


def test_held_out_rows_and_the_others_are_all_rows(without_valid: FeatureSpec) -> None:
    def seen(part: HeldOutShare | None) -> list[tuple[float, ...]]:
        loader = Loader(without_valid, "train", batch_size=300, part=part)
        rows = [
            zip(*(t.flatten(1).sum(1) if t.dim() > 1 else t for t in share.batch.values()), strict=True)
            for share in loader.batches()
        ]
        return sorted(tuple(float(value) for value in row) for batch in rows for row in batch)

    for share in (0.0, 0.3, 0.999):
        assert sorted(seen(HeldOutShare(share, True)) + seen(HeldOutShare(share, False))) == seen(None)
    assert seen(HeldOutShare(0.3, True, seed=1)) != seen(HeldOutShare(0.3, True, seed=2))


def test_a_run_with_an_average_resumes_and_saves_it(data: FeatureSpec, tmp_path: Path) -> None:
    straight = run(data, tmp_path / "straight", epochs=3, average=0.9, keep_best=False)
    resumed = run(data, tmp_path / "resumed", epochs=2, average=0.9, keep_best=False)
    run(data, resumed, epochs=3, average=0.9, keep_best=False, resume=True)
    assert_equal_weights(straight, resumed)
    plain = run(data, tmp_path / "plain", epochs=3, keep_best=False)
    assert any(not torch.equal(weights(plain)[name], weights(straight)[name]) for name in weights(plain))
    best = run(data, tmp_path / "best", epochs=3, average=0.9, metric="sampled/ndcg@10")
    found = evaluate_model(bundle.load(best).model, data, "valid", protocols=("sampled",)).metrics
    assert found["sampled"] == pytest.approx(bundle.load(best).card.metrics["sampled"], abs=1e-6)


# --- stopping --------------------------------------------------------------------------------------------------------


def test_a_target_ends_the_run_and_the_bundle_is_written(data: FeatureSpec, tmp_path: Path) -> None:
    folder = run(data, tmp_path / "run", epochs=9, target=0.01)
    assert events(folder, "done")[0]["stopped"] == "target"
    assert bundle.load(folder).card.trained["epochs"] == 1


def test_patience_ends_the_run_and_the_best_epoch_is_kept(data: FeatureSpec, tmp_path: Path) -> None:
    folder = run(
        data,
        tmp_path / "run",
        epochs=40,
        patience=2,
        learning_rate=0.2,
        model={"dropout": 0.0},
        metric="sampled/ndcg@10",
    )
    epochs = events(folder, "epoch")
    values = [event["metrics"]["sampled"]["ndcg@10"] for event in epochs]  # type: ignore[index]
    done = events(folder, "done")[0]
    assert done["stopped"] == "patience"
    assert len(epochs) == done["best_epoch"] + 2  # type: ignore[operator]
    assert done["best"] == max(values)
    assert bundle.load(folder).card.metrics["sampled"]["ndcg@10"] == max(values)


def test_the_saved_weights_are_those_of_the_best_epoch(data: FeatureSpec, tmp_path: Path) -> None:
    long = run(data, tmp_path / "long", epochs=40, patience=2, learning_rate=0.2, model={"dropout": 0.0})
    best = events(long, "done")[0]["best_epoch"]
    assert best < events(long, "done")[0]["epochs"]  # type: ignore[operator]
    short = run(data, tmp_path / "short", epochs=best, learning_rate=0.2, model={"dropout": 0.0}, keep_best=False)
    assert_equal_weights(long, short)


def test_a_run_without_epochs_goes_on_until_valid_stops_improving(clicks: FeatureSpec, tmp_path: Path) -> None:
    own = MODELS["wide_deep"].Settings(embedding_dim=4)
    chosen = TrainSettings(learning_rate=0.05, tensorboard=False, precision="fp32", batch_size=2000)
    result = train("wide_deep", clicks, tmp_path / "run", settings=chosen, model_settings=own)
    start, done = events(tmp_path / "run", "start")[0], events(tmp_path / "run", "done")[0]
    assert start["train"]["epochs"] == MOST_EPOCHS > done["epochs"]  # type: ignore[index]
    assert result.stopped in ("patience", "falling")
    assert result.trace["rows/log_loss"][int(result.best_epoch) - 1] == min(result.trace["rows/log_loss"])
    assert len(result.trace["rows/auc"]) == len(result.trace["epoch"]) == done["epochs"]
    card = bundle.load(tmp_path / "run").card
    assert card.settings["hidden"] == [256, 128], "the card holds what was proposed"
    assert (card.train["patience"], card.train["metric"]) == (PATIENCE, "rows/log_loss")
    train("wide_deep", clicks, tmp_path / "run", settings=chosen, model_settings=own, resume=True)
    again = events(tmp_path / "run", "start")[1]
    assert again["train"] == start["train"]
    assert again["choices"]["train.patience"] == f"{PATIENCE}: as at the start of the run"  # type: ignore[index]
    assert "the run is over: it was stopped by" in str(events(tmp_path / "run", "note")[-1]["message"])


def test_more_patience_continues_a_run_that_had_stopped(data: FeatureSpec, tmp_path: Path) -> None:
    values = {"learning_rate": 0.2, "model": {"dropout": 0.0}, "metric": "rows/log_loss", "keep_best": False}
    straight = run(data, tmp_path / "straight", epochs=9, **values)  # type: ignore[arg-type]
    halted = run(data, tmp_path / "halted", epochs=9, patience=1, **values)  # type: ignore[arg-type]
    assert events(halted, "done")[0]["stopped"] == "patience"
    run(data, halted, epochs=9, patience=20, resume=True, **values)  # type: ignore[arg-type]
    assert events(halted, "done")[1]["stopped"] == "epochs"
    assert_equal_weights(straight, halted)


def test_minutes_end_a_run_within_an_epoch_and_more_minutes_continue_it(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"batch_size": 500, "epochs": 2, "keep_best": False}
    straight = run(data, tmp_path / "straight", **values)  # type: ignore[arg-type]
    halted = tmp_path / "halted"
    with monkeypatch.context() as patched:
        patched.setattr(TrainingRun, "_is_late", lambda training: training.progress.step >= 7)
        run(data, halted, minutes=1, **values)  # type: ignore[arg-type]
    done = events(halted, "done")[0]
    steps = events(halted, "start")[0]["steps_per_epoch"]
    assert (done["stopped"], done["best_epoch"]) == ("minutes", 7 / steps)  # type: ignore[operator]
    assert events(halted, "epoch")[0]["metrics"], "it is evaluated where it ends"
    assert bundle.load(halted).card.trained["steps"] == 7
    run(data, halted, minutes=1000, resume=True, **values)  # type: ignore[arg-type]
    assert events(halted, "done")[1]["stopped"] == "epochs"
    assert_equal_weights(straight, halted)


# --- parts and sparse gradients --------------------------------------------------------------------------------------

PARTS = {"wide": {"optimizer": "ftrl", "learning_rate": 0.1}, "deep.mlp": {"schedule": "linear"}}


def run_wide_deep(spec: FeatureSpec, folder: Path, *, resume: bool = False, **values: object) -> Path:
    model_settings = MODELS["wide_deep"].Settings.model_validate({"hidden": (8,), "embedding_dim": 4})
    chosen = settings(**{"batch_size": 500, "epochs": 2, "negatives": None, **values})
    train("wide_deep", spec, folder, settings=chosen, model_settings=model_settings, resume=resume)
    return folder


def test_parts_follow_their_own_optimizers_and_schedules(clicks: FeatureSpec, tmp_path: Path) -> None:
    folder = run_wide_deep(clicks, tmp_path / "run", parts=PARTS)
    rates = [event["learning_rates"] for event in events(folder, "step")]
    assert rates[0] == {"": 0.01, "wide": 0.1, "deep.mlp": 0.01}
    assert rates[-1]["wide"] == 0.1  # type: ignore[index]
    assert 0 < rates[-1]["deep.mlp"] < 0.01  # type: ignore[index]
    assert rates[-1][""] == 0.01  # type: ignore[index]


def test_the_start_says_which_features_are_not_read(clicks: FeatureSpec, tmp_path: Path) -> None:
    first = events(run(clicks, tmp_path / "run", epochs=0), "start")[0]
    read = {"user_id", "item_id"}
    others = {role: [name for name in clicks.role(role) if name not in read] for role in ("user", "item", "context")}
    assert all(others.values())
    assert first["not_read"] == others


@pytest.mark.parametrize("sparse", ["never", "always"])
def test_frozen_parts_keep_their_first_weights(clicks: FeatureSpec, tmp_path: Path, sparse: str) -> None:
    first = weights(run_wide_deep(clicks, tmp_path / "first", epochs=0))
    folder = run_wide_deep(
        clicks,
        tmp_path / "run",
        frozen=["deep.embeddings", "wide.bias"],
        sparse_gradients=sparse,
        parts={"deep.embeddings": {"learning_rate": 0.5}},
    )
    for name, value in weights(folder).items():
        frozen = name.startswith("deep.embeddings") or name == "wide.bias"
        assert torch.equal(value, first[name]) == frozen, name
    start = events(folder, "start")[0]
    sizes = {name: value.numel() for name, value in first.items()}
    tables = sum(size for name, size in sizes.items() if name.startswith("deep.embeddings"))
    assert start["frozen"] == {"deep.embeddings": tables, "wide.bias": 1}
    assert start["trained_parameters"] == start["parameters"] - tables - 1 == sum(sizes.values()) - tables - 1  # type: ignore[operator]


def test_frozen_parts_must_be_there_and_leave_something(clicks: FeatureSpec, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"train\.frozen: unknown part 'deeep' \(did you mean 'deep"):
        run_wide_deep(clicks, tmp_path / "run", frozen=["deeep"])
    with pytest.raises(SettingsError, match="every part is frozen"):
        run_wide_deep(clicks, tmp_path / "run", frozen=["deep", "wide"])


def test_fbgemm_is_told_apart_from_a_decay_of_every_row(clicks: FeatureSpec, tmp_path: Path) -> None:
    told = (
        r"deep\.embeddings\.stores\.4: weight_decay is 0\.1, which moves every row of a table at every step, and "
        r"fbgemm updates the rows of a batch alone; set train\.parts\.deep\.embeddings\.weight_decay=0"
    )
    with pytest.raises(SettingsError, match=told):
        run_wide_deep(clicks, tmp_path / "run", optimizer="adagrad", weight_decay=0.1, embedding_backend="fbgemm")
    assert not (tmp_path / "run").exists()


def test_a_part_that_is_not_there_and_settings_it_cannot_have_are_named(clicks: FeatureSpec, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no parameter's name begins with 'wid' \(did you mean 'wide'\?\)"):
        run_wide_deep(clicks, tmp_path / "run", parts={"wid": {"learning_rate": 0.1}})
    with pytest.raises(ValueError, match=r"parts\.wide: unknown setting 'rate'"):
        settings(parts={"wide": {"rate": 0.1}})
    with pytest.raises(ValueError, match=r"parts\.deep: setting 'learning_rate' is -1"):
        settings(parts={"deep": {"learning_rate": -1}})


@pytest.mark.parametrize("optimizer", ["adagrad", "rmsprop", "sgd", "rowwise_adagrad"])
def test_sparse_gradients_train_to_the_weights_of_dense_ones(
    clicks: FeatureSpec, tmp_path: Path, optimizer: str
) -> None:
    values = {"optimizer": optimizer, "accumulate": 2, "batch_size": 100}
    dense = run_wide_deep(clicks, tmp_path / "dense", sparse_gradients="never", **values)
    sparse = run_wide_deep(clicks, tmp_path / "sparse", sparse_gradients="always", **values)
    assert events(dense, "start")[0]["sparse_gradients"] == []
    stores = ["wide.tables.stores.1", "deep.embeddings.stores.4"]
    assert events(sparse, "start")[0]["sparse_gradients"] == stores
    for name, value in weights(dense).items():
        torch.testing.assert_close(value, weights(sparse)[name], atol=1e-5, rtol=1e-4)


def test_sparse_gradients_are_chosen_where_they_pay_and_change_nothing(clicks: FeatureSpec, tmp_path: Path) -> None:
    few = run_wide_deep(clicks, tmp_path / "few", optimizer="adagrad", batch_size=1, epochs=0)
    assert events(few, "start")[0]["sparse_gradients"] == ["wide.tables.stores.1", "deep.embeddings.stores.4"]
    for name, values in {
        "many": {"optimizer": "adagrad", "batch_size": 4000},
        "lazy": {"optimizer": "adam", "batch_size": 1},
        "clipped": {"optimizer": "adagrad", "batch_size": 1, "clip_norm": 1.0},
        "decayed": {"optimizer": "sgd", "batch_size": 1, "weight_decay": 0.1},
    }.items():
        folder = run_wide_deep(clicks, tmp_path / name, epochs=0, **values)
        assert events(folder, "start")[0]["sparse_gradients"] == [], name
    with pytest.raises(SettingsError, match="clip_norm measures whole gradients"):
        run_wide_deep(clicks, tmp_path / "both", clip_norm=1.0, sparse_gradients="always")


# --- resuming --------------------------------------------------------------------------------------------------------


def command(data: FeatureSpec, folder: Path, *more: str) -> list[str]:
    assignments = [
        "factors=4",
        "layers=[8,4]",
        "dropout=0.2",
        "train.batch_size=500",
        "train.epochs=4",
        "train.learning_rate=0.01",
        "train.log_every=1",
        "train.tensorboard=false",
        "train.checkpoint_minutes=0",
        "train.precision=fp32",
    ]
    chosen = [part for assignment in assignments for part in ("--set", assignment)]
    return ["train", "neumf", str(data.folder), str(folder), *chosen, *more]


KILLS_ITSELF = """
import os, signal, sys
from recspec import cli
from recspec.training.run_folder import RunLog

write, steps = RunLog.write, 0

def counted(log, event, **values):
    global steps
    write(log, event, **values)
    steps += event == "step"
    if steps == 32:
        os.kill(os.getpid(), signal.SIGKILL)

RunLog.write = counted
cli.main()
"""


def test_a_killed_run_continues_to_the_same_weights_bit_for_bit(data: FeatureSpec, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert_well(recspec(*command(data, whole)))
    done = ended(KILLS_ITSELF, *command(data, killed))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (killed / "bundle").exists()
    assert_well(recspec(*command(data, killed, "--resume")))
    assert events(killed, "start")[-1]["resumed_at_step"] > 0  # type: ignore[operator]
    assert_equal_weights(whole, killed)


def test_sigterm_writes_a_checkpoint_and_says_how_to_go_on(data: FeatureSpec, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    more = ("--set", "train.epochs=100000", "--set", "train.checkpoint_minutes=9")
    process = Running(COMMAND, *command(data, folder, *more))
    log = folder / "log.jsonl"
    while not (log.exists() and '"step"' in log.read_text()):
        assert process.runs, process.ended().stderr
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    done = process.ended()
    assert done.returncode == 130
    assert "error" not in done.stderr
    assert "nothing is lost: the same command with --resume continues" in done.stderr
    assert list((folder / "checkpoints").glob("step-*.safetensors"))


def test_another_runs_checkpoint_is_refused_with_every_difference(data: FeatureSpec, tmp_path: Path) -> None:
    folder = run(data, tmp_path / "run", epochs=1)
    with pytest.raises(CheckpointError) as caught:
        run(data, folder, epochs=1, resume=True, learning_rate=0.02, model={"factors": 6})
    message = str(caught.value)
    assert "settings.factors is 6, but the run was started with 4" in message
    assert "train.learning_rate is 0.02, but the run was started with 0.01" in message


def test_a_finished_run_can_be_given_more_epochs(data: FeatureSpec, tmp_path: Path) -> None:
    folder = run(data, tmp_path / "run", epochs=2, keep_best=False)
    run(data, folder, epochs=3, keep_best=False, resume=True)
    assert_equal_weights(folder, run(data, tmp_path / "straight", epochs=3, keep_best=False))


def test_fewer_epochs_than_are_done_are_refused(data: FeatureSpec, tmp_path: Path) -> None:
    folder = run(data, tmp_path / "run", epochs=3, keep_best=False)
    with pytest.raises(CheckpointError, match=r"the run has 3 epochs behind it, and train.epochs is 2; ask for 3 or"):
        run(data, folder, epochs=2, keep_best=False, resume=True)


def test_nothing_to_resume_and_a_run_that_is_there_are_both_refused(data: FeatureSpec, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        run(data, tmp_path / "none", resume=True)
    folder = run(data, tmp_path / "run", epochs=1)
    with pytest.raises(SettingsError, match=r"--resume \(in Python: resume=True\), replace it with --force"):
        run(data, folder, epochs=1)


def test_a_run_killed_before_its_first_checkpoint_starts_again(data: FeatureSpec, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "best.safetensors").write_bytes(b"written before the checkpoint of its epoch")
    with pytest.raises(CheckpointError, match="no checkpoint to resume from; start the run without --resume"):
        run(data, folder, epochs=1, resume=True)
    run(data, folder, epochs=1)
    assert_equal_weights(folder, run(data, tmp_path / "another", epochs=1))


# --- failing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_splits": ("trian",)}, r"unknown split 'trian'"),
        ({"metric": "sampled/ndgc@10"}, r"unknown metric 'sampled/ndgc@10'.*did you mean 'sampled/ndcg@10'"),
        ({"train_splits": ("train", "test")}, "train_splits names 'test', which only `recspec evaluate` opens"),
    ],
)
def test_what_the_dataset_lacks_is_refused(
    data: FeatureSpec, tmp_path: Path, values: dict[str, object], message: str
) -> None:
    with pytest.raises((SettingsError, SpecError, ValueError), match=message):
        run(data, tmp_path / "run", epochs=1, **values)


def test_unknown_models_and_splits_without_rows_are_refused(
    data: FeatureSpec, without_valid: FeatureSpec, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=r"unknown model 'neumff' \(did you mean 'neumf'\?\)"):
        train("neumff", data, tmp_path, settings=settings(), model_settings=MODELS["neumf"].Settings())
    with pytest.raises(SpecError, match="recspec synthesize"):
        run(data.replace(sources={}), tmp_path / "run")
    with pytest.raises(SettingsError, match=r"train\.valid_share 1e-09 of the rows of train is no row; raise it"):
        run(without_valid, tmp_path / "run", epochs=1, valid_share=1e-9)


def test_a_loss_that_is_no_number_stops_the_run_and_names_what_to_change(data: FeatureSpec, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"the loss is (nan|inf) at step \d+; lower train.learning_rate"):
        run(data, tmp_path / "run", optimizer="sgd", learning_rate=1e30)
    assert not (tmp_path / "run" / "bundle").exists()


def test_a_user_without_an_id_trains_and_has_no_seen_items(tmp_path: Path) -> None:
    parts = {
        "feature_spec": {"age": {}, "item_id": {"cardinality": 9}, "label": {}},
        "channel_spec": {"user": ["age"], "item": ["item_id"], "label": ["label"]},
        "source_spec": {"train": [{"type": "csv", "features": ["age", "item_id", "label"], "files": ["a.csv"]}]},
    }
    folder = run_wide_deep(synthesize(FeatureSpec.from_dict(parts), tmp_path / "data", 50), tmp_path / "run")
    assert bundle.load(folder).seen is None


def test_lists_shorter_than_the_usual_cut_off_are_judged_by_a_shorter_one(tmp_path: Path) -> None:
    """Drawn negatives repeat where items are few, so lists of 101 rows hold fewer than ten candidates."""
    few = made_up.interactions(tmp_path / "data", num_users=60, num_items=12, num_rows=300, num_negatives=100)
    for resume in (False, True):  # a run that is over evaluates nothing more, and remembers
        folder = run(few, tmp_path / "run", epochs=1, metric=None, resume=resume)
        trained = json.loads((folder / "bundle" / "bundle.json").read_text())["trained"]
        assert trained["valid_metric"] == "sampled/ndcg@5"


# --- several processes -----------------------------------------------------------------------------------------------


def assert_well(*done: Ended) -> None:
    assert [each.returncode for each in done] == [0] * len(done), [each.stderr for each in done]


@pytest.mark.slow
def test_two_processes_train_as_one_and_their_bundle_answers(data: FeatureSpec, tmp_path: Path) -> None:
    values = ("--set", "dropout=0", "--set", "train.batch_size=999", "--set", "train.epochs=2")
    one, two = tmp_path / "one", tmp_path / "two"
    assert_well(recspec(*command(data, one, *values)), *recspec_on_two(*command(data, two, *values)))
    losses = [[event["loss"] for event in events(folder, "step")] for folder in (one, two)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    for name, value in weights(one).items():
        torch.testing.assert_close(value, weights(two)[name], atol=1e-4, rtol=1e-3)
    evaluate = ("evaluate", two, data.folder, "--json")
    evaluated, alone = recspec_on_two(*evaluate), recspec(*evaluate)
    answer = recspec("recommend", two, "--user", "7", "-k", "3", "--json")
    assert_well(*evaluated, alone, answer)
    assert json.loads(evaluated[0].stdout)["metrics"] == json.loads(alone.stdout)["metrics"]
    assert len(json.loads(answer.stdout)[0]["items"]) == 3


# --- negatives that were prepared ------------------------------------------------------------------------------------


def test_prepared_negatives_are_learned_from_and_no_others_unless_asked(tmp_path: Path) -> None:
    spec = made_up.interactions(tmp_path / "data", train_negatives=1, num_negatives=1, num_rows=600)
    given = events(run(spec, tmp_path / "given", epochs=1, metric=None, negatives=None), "start")[0]
    drawn = events(run(spec, tmp_path / "drawn", epochs=1, negatives=2), "start")[0]
    assert (given["negatives"], drawn["negatives"]) == (0, 2)
    assert given["rows"] == 2 * drawn["rows"], "the rows of label 0 give way to drawn ones"
    assert events(tmp_path / "given", "epoch")[0]["metric"] == "rows/auc", "two candidates are too few for ndcg@10"


def test_a_valid_split_of_one_class_has_no_auc_and_says_so(tmp_path: Path) -> None:
    for split, labels in (("train", "0\n1\n1\n0\n"), ("valid", "1\n1\n1\n1\n")):
        (tmp_path / f"{split}.csv").write_text("".join(f"{row},{label}\n" for row, label in enumerate(labels.split())))
    (tmp_path / "feature_spec.yaml").write_text(
        "feature_spec: {item: {cardinality: 4, dtype: int32}, label: {}}\n"
        "source_spec: {train: [{type: csv, features: [item, label], files: [train.csv]}], "
        "valid: [{type: csv, features: [item, label], files: [valid.csv]}]}\n"
        "channel_spec: {item: [item], label: [label]}\n"
    )
    spec = FeatureSpec.load(tmp_path)
    model_settings = MODELS["wide_deep"].Settings(hidden=(4,), embedding_dim=2, dropout=0.0)
    with pytest.raises(SettingsError, match=r"rows of 'valid' are of one class, so AUC has no value there"):
        train(
            "wide_deep",
            spec,
            tmp_path / "run",
            settings=settings(batch_size=4, negatives=None, metric="rows/auc"),
            model_settings=model_settings,
        )


def test_a_run_goes_on_with_the_batch_size_that_it_began_with(
    data: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run(data, tmp_path / "run", epochs=1, batch_size=None)
    began = events(folder, "start")[0]["batch_size"]
    monkeypatch.setattr(choices, "FEWEST_ROWS", 2 * began)
    run(data, folder, epochs=2, batch_size=None, resume=True)
    start = events(folder, "start")[1]
    assert start["batch_size"] == began
    assert start["choices"]["batch_size"] == f"{began:,}: as at the start of the run"


@pytest.mark.parametrize(
    ("minutes", "asked", "stop", "due"),
    [(0, False, False, True), (1e6, False, False, False), (1e6, True, True, True), (0, True, True, True)],
)
def test_a_run_that_stops_writes_a_checkpoint_first(minutes: float, asked: bool, stop: bool, due: bool) -> None:
    agreement = RankConsensus(Ranks(), minutes, lambda: asked)
    agreement.start(5)
    assert agreement.after(6) == (stop, due, False)
    assert agreement.after(7, late=True) == (stop, due, True)
