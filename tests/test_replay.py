"""Recorded steps: which batches are played, what falls back and why, and that nothing of a step asks a device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from recspec import replay, train
from recspec.batch import Batch
from recspec.distributed import Ranks
from recspec.errors import SettingsError, TrainingError
from recspec.feature_spec import FeatureSpec
from recspec.loader import Loader
from recspec.models import MODELS
from recspec.optim import Optimizers
from recspec.replay import REHEARSALS, RecordingError, Replay, first_cause, waits_among
from recspec.sequences import in_one_shape
from recspec.train import TrainingRun, TrainSettings
from tests import made_up
from tests.closeness import assert_close

SIZES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "neumf": {"factors": 4, "layers": (8, 4)},
        "wide_deep": {"hidden": (8,), "embedding_dim": 4},
        "dlrm": {"embedding_dim": 4, "bottom": (8, 4), "top": (8,)},
        "dcnv2": {"embedding_dim": 4, "bottom": (8, 4), "top": (8,)},
        "din": {"embedding_dim": 4, "hidden": (8,)},
        "dien": {"embedding_dim": 4, "hidden": (8,)},
        "sim": {"embedding_dim": 4, "hidden": (8,), "search_hidden": (8,), "top_k": 3, "short_length": 2},
    }
)


class Again:
    """Plays a step by running it anew; a CUDA graph, too, reads the buffers as they are then."""

    def __init__(self, *, waits: Sequence[str] = (), refuses: str = "") -> None:
        self.waits, self.refuses = waits, refuses
        self.rehearsed = self.recorded = self.played = 0

    def rehearse(self, step: Callable[[], Tensor]) -> tuple[Tensor, Sequence[str]]:
        self.rehearsed += 1
        return step(), self.waits

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if self.refuses:
            raise RecordingError(self.refuses)
        self.recorded += 1

        def play() -> Tensor:
            self.played += 1
            return step()

        return play


class Steps:
    """A step that remembers where its batches lay."""

    def __init__(self) -> None:
        self.places: list[int] = []

    def __call__(self, batch: Batch) -> Tensor:
        self.places.append(batch["x"].data_ptr())
        return batch["x"].float().sum() + batch["ids"].sum()


def rows(number: int, value: int = 1, width: int = 2) -> Batch:
    return {"x": torch.full((number, width), float(value)), "ids": torch.arange(number)}


# --- which batches are played ----------------------------------------------------------------------------------------


def test_steps_are_rehearsed_recorded_once_and_then_played_from_the_same_buffers() -> None:
    step, recorder, told = Steps(), Again(), list[str]()
    play = Replay(step, recorder, rows=3, tell=told.append)
    losses = [float(play(rows(3, value))) for value in range(1, 7)]
    assert losses == [6 * value + 3 for value in range(1, 7)]
    assert (recorder.rehearsed, recorder.recorded, recorder.played) == (REHEARSALS, 1, 6 - REHEARSALS)
    assert len(set(step.places)) == 1
    assert play.plays
    assert told == ["CUDA graph: steps of 3 rows are recorded and played, others run as they are"]


@pytest.mark.parametrize("other", [rows(2), rows(3, width=5), {**rows(3), "more": torch.ones(3)}])
def test_a_batch_of_another_shape_runs_as_it_is(other: Batch) -> None:
    step, recorder = Steps(), Again()
    play = Replay(step, recorder, rows=3, tell=lambda _: None)
    for _ in range(REHEARSALS + 1):
        play(rows(3))
    assert float(play(other)) == float(Steps()(other))
    assert step.places[-1] == other["x"].data_ptr()
    assert recorder.played == 1
    assert float(play(rows(3, 5))) == 33
    assert recorder.played == 2


def test_a_step_that_waits_is_not_recorded_and_says_where() -> None:
    step, recorder, told = Steps(), Again(waits=["neumf.py:7", "neumf.py:7", "optim.py:3"]), list[str]()
    play = Replay(step, recorder, rows=3, tell=told.append)
    losses = [float(play(rows(3, value))) for value in range(1, 6)]
    assert losses == [6 * value + 3 for value in range(1, 6)]
    assert (recorder.rehearsed, recorder.recorded, play.plays) == (REHEARSALS, 0, False)
    assert told == ["no CUDA graph: a step makes the host wait for the device (neumf.py:7, optim.py:3)"]


def test_a_step_that_cannot_be_recorded_goes_on_as_it_is() -> None:
    step, told = Steps(), list[str]()
    play = Replay(step, Again(refuses="out of memory"), rows=3, tell=told.append)
    losses = [float(play(rows(3, value))) for value in range(1, 7)]
    assert losses == [6 * value + 3 for value in range(1, 7)]
    assert len(step.places) == 6
    assert told == ["no CUDA graph: out of memory"]


# --- what torch tells ------------------------------------------------------------------------------------------------


def test_waits_are_told_by_their_place_and_other_warnings_are_passed_on() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warnings.warn_explicit("called a synchronizing CUDA operation (...)", UserWarning, "recspec/optim.py", 12)
        warnings.warn_explicit("Synchronization debug mode is a prototype feature", UserWarning, "cuda.py", 1)
        warnings.warn_explicit("something else", UserWarning, "other.py", 3)
    with pytest.warns(UserWarning, match="something else") as passed:
        assert waits_among(told) == ["optim.py:12"]
    assert len(passed) == 1


def test_the_first_cause_of_several_errors_is_told() -> None:
    last, first = RuntimeError("capture was invalidated"), ValueError("no room\nat all")
    last.__context__ = first
    assert first_cause(last) == "no room"
    assert first_cause(KeyError()) == "KeyError"


# --- in training -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, FeatureSpec]:
    folder = tmp_path_factory.mktemp("replay")
    return {
        "interactions": made_up.interactions(folder / "interactions"),
        "clicks": made_up.clicks(folder / "clicks"),
        "sequences": made_up.sequences(folder / "sequences"),
    }


def spec_of(model: str, data: Mapping[str, FeatureSpec]) -> FeatureSpec:
    needs = set(MODELS[model].needs)
    return data["sequences" if "history" in needs else "interactions" if {"user", "item"} <= needs else "clicks"]


def make_run(model: str, data: Mapping[str, FeatureSpec], folder: Path, **values: object) -> TrainingRun:
    given = {
        "batch_size": 500, "precision": "fp32", "tensorboard": False, "learning_rate": 0.01, "cuda_graphs": "auto",
        **values,
    }  # fmt: skip
    settings = TrainSettings.model_validate(given)
    model_settings = MODELS[model].Settings.model_validate(SIZES[model])
    return TrainingRun(model, spec_of(model, data), folder, settings, model_settings, Ranks())


def trained(run: TrainingRun, epochs: int = 2) -> dict[str, Tensor]:
    for _ in range(epochs):
        for _ in run.epoch():
            pass
        run.progress.epoch, run.progress.batch = run.progress.epoch + 1, 0
    return {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}


@pytest.mark.parametrize("model", sorted(SIZES))
def test_a_recorded_run_has_the_weights_of_one_that_is_not(
    model: str, data: Mapping[str, FeatureSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingRun, "_why_not_recorded", lambda _: None)
    monkeypatch.setattr(TrainingRun, "_why_no_update_is_recorded", lambda _: None)
    played, as_it_is = Again(), Again(refuses="for comparison")
    ends = []
    for recorder in (played, as_it_is):
        monkeypatch.setattr(TrainingRun, "_recorder", lambda _, recorder=recorder: recorder)
        run = make_run(model, data, tmp_path / "run", average=0.9, batch_size=450)
        assert run.loader.num_rows % run.loader.batch_size  # so the last batch is a smaller one
        ends.append(trained(run))
    assert played.played >= 2
    assert as_it_is.played == 0
    for name, weight in ends[0].items():
        assert_close(weight, ends[1][name], name)


@pytest.mark.parametrize(
    ("model", "values", "why"),
    [
        ("neumf", {}, "the run is on cpu"),
        ("neumf", {"cuda_graphs": "never"}, "train.cuda_graphs is never"),
        (
            "din",
            {},
            "din has other shapes at every step, those of its histories' events; with train.cuda_graphs=always",
        ),
    ],
)
def test_what_keeps_a_step_from_being_recorded_is_in_the_first_lines(
    model: str, values: Mapping[str, object], why: str, data: Mapping[str, FeatureSpec], tmp_path: Path
) -> None:
    run = make_run(model, data, tmp_path / "run", **values)
    if why != "the run is on cpu":
        run.ranks = Ranks(device=torch.device("cuda"))
    assert run.replay is None
    assert str(run._why_not_recorded()).startswith(why)
    run.ranks = Ranks()
    assert run._choices()["cuda_graphs"] == "none: the run is on cpu"
    assert run._described()["cuda_graphs"] is False


@pytest.mark.parametrize(
    ("ranks", "precision", "why"),
    [
        (Ranks(0, 2, torch.device("cuda")), "bf16", "2 processes exchange gradients in every step"),
        (
            Ranks(device=torch.device("cuda")),
            "fp16",
            "precision fp16 looks for overflows after every step; bf16 does not",
        ),
        (Ranks(device=torch.device("cuda")), "bf16", None),
    ],
)
def test_processes_and_loss_scaling_are_not_recorded(
    ranks: Ranks, precision: str, why: str | None, data: Mapping[str, FeatureSpec], tmp_path: Path
) -> None:
    run = make_run("neumf", data, tmp_path / "run")
    run.ranks, run.precision = ranks, precision
    assert run._why_not_recorded() == why


def test_always_is_refused_where_there_is_no_gpu(data: Mapping[str, FeatureSpec], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"train\.cuda_graphs is always, but the run is on cpu; auto takes what"):
        make_run("neumf", data, tmp_path / "run", cuda_graphs="always")


def test_always_stops_where_recording_fails(
    data: Mapping[str, FeatureSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingRun, "_why_not_recorded", lambda _: None)
    monkeypatch.setattr(TrainingRun, "_recorder", lambda _: Again(refuses="out of memory"))
    run = make_run("neumf", data, tmp_path / "run", cuda_graphs="always")
    with pytest.raises(TrainingError, match=r"cuda_graphs is always, and there is no CUDA graph: out of memory; auto"):
        trained(run)


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        ("rmsprop", "optimizer 'rmsprop' has no kernel for the rows seen"),
        ("adagrad", "without Triton equal ids are counted before their rows are updated"),
    ],
)
def test_updates_of_rows_that_have_no_steady_shape_are_named(
    optimizer: str, why: str, data: Mapping[str, FeatureSpec], tmp_path: Path
) -> None:
    run = make_run("dlrm", data, tmp_path / "run", optimizer=optimizer, sparse_gradients="always")
    told = f"embeddings.stores.4 has sparse gradients, and {why}; train.sparse_gradients=never records it"
    assert run._why_no_update_is_recorded() == told
    whole = make_run("dlrm", data, tmp_path / "run", optimizer=optimizer, sparse_gradients="never")
    assert whole._why_no_update_is_recorded() is None


def test_updates_by_kernel_are_recorded_but_for_lists(
    data: Mapping[str, FeatureSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"optimizer": "adagrad", "sparse_gradients": "always"}
    lists = make_run("dlrm", data, tmp_path / "lists", **values)
    scalars = make_run("dlrm", {"clicks": data["interactions"]}, tmp_path / "scalars", **values)
    monkeypatch.setattr("recspec.kernels.uses_triton", lambda *_: True)
    assert scalars._why_no_update_is_recorded() is None
    assert "its lists hold another number of ids at every step" in str(lists._why_no_update_is_recorded())


# --- nothing asks the device -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        *((model, "rmsprop") for model in sorted(SIZES)),
        *(("neumf", name) for name in ("adagrad", "rowwise_adagrad", "ftrl")),
    ],
)
def test_a_step_needs_no_answer_of_a_device(
    model: str, optimizer: str, data: Mapping[str, FeatureSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device tensors have shapes and no numbers: whatever asks for one, or for as many, raises.

    What torch fuses for GPUs alone (Adam, SGD) is not there; theirs are torch's own to answer for.
    """
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # it knows no meta device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    spec = spec_of(model, data)
    made = MODELS[model](spec, MODELS[model].Settings.model_validate(SIZES[model])).to("meta")
    settings = TrainSettings.model_validate({"optimizer": optimizer})
    optimizers = Optimizers(list(made.named_parameters()), settings)
    optimizers.use_backend("torch")
    optimizers.keep_rates_on_device()
    loader = Loader(spec, "train", batch_size=8, features=(*made.loss_features(), spec.label), fixed_length=True)
    batch = {name: tensor.to("meta") for name, tensor in next(iter(loader.batches())).batch.items()}
    for step in range(2):
        optimizers.set_learning_rates(step, steps_per_epoch=10, epochs=1)
        with in_one_shape():
            made.loss(batch).backward()
        optimizers.step()
        optimizers.zero_grad()


@pytest.mark.parametrize("model", ["din", "dien", "sim"])
def test_padded_events_give_the_same_loss(model: str, data: Mapping[str, FeatureSpec]) -> None:
    spec = spec_of(model, data)
    made = MODELS[model](spec, MODELS[model].Settings.model_validate(SIZES[model])).eval()
    loader = Loader(spec, "train", batch_size=64, features=(*made.loss_features(), spec.label), fixed_length=True)
    batch = next(iter(loader.batches())).batch
    with torch.no_grad(), in_one_shape():
        padded = made.loss(batch)
    with torch.no_grad():
        torch.testing.assert_close(padded, made.loss(batch), rtol=1e-5, atol=1e-6)


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model", sorted(SIZES))
def test_a_graph_gives_the_weights_of_steps_as_they_are(
    model: str, data: Mapping[str, FeatureSpec], tmp_path: Path
) -> None:
    ends = []
    for graphs in ("always", "never"):
        settings = TrainSettings.model_validate(
            {"batch_size": 500, "precision": "fp32", "tensorboard": False, "cuda_graphs": graphs, "deterministic": True}
        )
        sizes = MODELS[model].Settings.model_validate(SIZES[model])
        run = TrainingRun(model, spec_of(model, data), tmp_path, settings, sizes, Ranks(device=torch.device("cuda")))
        with train.arithmetic("fp32", deterministic=True):
            ends.append(trained(run))
        assert (run.replay is not None and run.replay.plays) == (graphs == "always")
    for name, weight in ends[0].items():
        torch.testing.assert_close(weight, ends[1][name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_that_waits_is_seen_on_a_gpu() -> None:
    told: list[str] = []
    recorder = replay.CudaRecorder(torch.device("cuda"), recording=nullcontext, counters=list, forget=lambda: None)
    play = Replay(lambda batch: batch["x"].sum() * batch["x"].sum().item(), recorder, rows=2, tell=told.append)
    for _ in range(REHEARSALS + 1):
        assert float(play({"x": torch.ones(2, device="cuda")})) == 4
    assert len(told) == 1
    assert told[0].startswith("no CUDA graph: a step makes the host wait for the device (test_replay.py:")
