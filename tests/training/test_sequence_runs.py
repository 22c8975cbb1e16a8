"""Runs on datasets with histories: one dataset for every model, two processes as one, an interrupted run as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from recspec.base.errors import Interrupted
from recspec.bundle import folder as bundle
from recspec.bundle.checkpoint import read_tensors
from recspec.data.encoding.encoders import Encoders
from recspec.data.prepare import PrepareContext
from recspec.data.storage import Ragged, open_split
from recspec.datasets import DATASETS
from recspec.evaluation import evaluate
from recspec.feature_spec import FeatureSpec
from recspec.inference.predictor import Predictor
from recspec.loading.loader import Loader
from recspec.models import MODELS
from recspec.models.layers import events
from recspec.models.layers.batch import Batch
from recspec.training.loop import train
from recspec.training.product_rates import ProductRates
from recspec.training.settings import TrainSettings
from tests import made_up
from tests.known_users import informed
from tests.made_up_films import write_movielens_like
from tests.model_cases import MODEL_CASES, TRAINED_BY_STEPS
from tests.processes import recspec_on_two

NAMES = TRAINED_BY_STEPS
SMALL: Mapping[str, Mapping[str, object]] = {
    name: {**case.tiny, **({"dropout": 0.2} if "dropout" in case.tiny else {})} for name, case in MODEL_CASES.items()
}
"""Tiny models, with dropout if they have it."""
OF_HISTORIES = [name for name in NAMES if "history" in MODELS[name].needs]
EXACT: Mapping[str, object] = {
    "epochs": 2,
    "batch_size": 53,
    "learning_rate": 0.01,
    "log_every": 1,
    "tensorboard": False,
    "precision": "fp32",
    "deterministic": True,
}


def prepare_movielens(folder: Path, **settings: object) -> FeatureSpec:
    write_movielens_like(folder / "raw", num_users=30, num_items=40, num_ratings=450)
    dataset = DATASETS["movielens"]
    made = dataset.Settings.model_validate({"num_negatives": 5, "history": 6, **settings})
    return dataset.prepare(PrepareContext(folder / "raw", folder / "data", threads=1), made).spec


@pytest.fixture(scope="module")
def movielens(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    """Users who watched, with what they watched before, and sampled movies beside that."""
    return prepare_movielens(tmp_path_factory.mktemp("movielens"), negative_history=True)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    """Labelled rows with histories, some of them empty."""
    return made_up.sequences(tmp_path_factory.mktemp("sequences"), length=6, num_rows=160)


def run(
    name: str,
    spec: FeatureSpec,
    folder: Path,
    *,
    resume: bool = False,
    stop_requested: Callable[[], bool] = lambda: False,
    **values: object,
) -> Path:
    train(
        name,
        spec,
        folder,
        settings=TrainSettings.model_validate({**EXACT, **values}),
        model_settings=MODELS[name].Settings.model_validate(SMALL[name]),
        resume=resume,
        stop_requested=stop_requested,
    )
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_tensors(folder / "bundle" / "weights.safetensors")[0]


def losses(folder: Path) -> list[float]:
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"]


# --- one dataset, every model ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_movielens_dataset_with_histories_serves_every_model(
    name: str, movielens: FeatureSpec, tmp_path: Path
) -> None:
    folder = run(name, movielens, tmp_path / "run", epochs=4, batch_size=100)
    assert losses(folder)[-1] < losses(folder)[0]
    trained = bundle.load(folder)
    assert ("history_item_id" in trained.model.features()) == (name in [*OF_HISTORIES, "two_tower"])
    report = evaluate(trained, movielens, "test", protocols=("rows", "sampled", "full"))
    assert set(report.metrics) == {"rows", "sampled", "full"}
    assert all(np.isfinite(value) for found in report.metrics.values() for value in found.values())
    first, nobody = Predictor.open(folder).recommend([1, 999], k=3)
    assert (first.known, nobody.known) == (True, False)
    assert len({item.item for item in first.items}) == 3
    scores = [item.score for item in first.items]
    assert scores == sorted(scores, reverse=True)


def test_what_was_done_before_the_rows_that_were_kept_is_not_recommended(tmp_path: Path) -> None:
    """With `prefixes=last` a user's first events stand in histories alone."""
    spec = prepare_movielens(tmp_path, prefixes="last", split="leave_one_out")
    columns = open_split(spec, "train").read(0, 10**9)
    history = columns["history_item_id"]
    assert isinstance(history, Ragged)
    users = np.asarray(columns["user_id"], np.int64)
    assert len(users) == len(set(users.tolist())), "one row a user"
    encoders = Encoders.load(spec.folder)
    predictor = Predictor.open(run("din", spec, tmp_path / "run", epochs=1))
    num_items = spec.num_ids("item_id") - 1
    for row in range(len(users)):
        before = history.values[history.offsets[row] : history.offsets[row + 1]].astype(np.int64)
        names = {str(item) for item in encoders.vocabulary_of("item_id").decode(before).to_pylist()}
        assert len(names) > 1
        user = encoders.vocabulary_of("user_id").decode(users[row : row + 1]).to_pylist()[0]
        (answer,) = predictor.recommend([user], k=num_items)
        assert not names & {str(item.item) for item in answer.items}
        (answer,) = predictor.recommend([user], k=num_items, include_seen=True)
        assert names <= {str(item.item) for item in answer.items}


def test_published_histories_without_padding_are_trained_on_with_a_note(rows: FeatureSpec, tmp_path: Path) -> None:
    names = [name for name in rows.role("history") if rows.features[name].is_categorical]
    features = {
        name: one.model_copy(update={"padding": None} if name in names else {}) for name, one in rows.features.items()
    }
    channels = {name: held for name, held in rows.channels.items() if "history" not in name}
    bare = rows.replace(features=features, channels={**channels, "positive_history": tuple(names)})
    log = (run("din", bare, tmp_path / "run", epochs=0) / "log.jsonl").read_text()
    notes = [event["message"] for event in map(json.loads, log.splitlines()) if event["event"] == "note"]
    assert [
        note
        for note in notes
        if note.startswith(f"'{names[0]}', '{names[1]}' declare no padding, so id 0 counts as an event")
        and "`recspec prepare amazon FOLDER OUT`" in note
    ]


# --- several processes, and one that ends early ----------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_HISTORIES)
def test_a_batch_without_a_single_event_reaches_every_parameter(name: str, rows: FeatureSpec) -> None:
    """Otherwise the processes that share a batch would wait for gradients that never come."""
    model = informed(MODELS[name](rows, MODELS[name].Settings.model_validate(SMALL[name])), rows).train()
    batch = next(iter(Loader(rows, "train", batch_size=8).batches())).batch
    lists = (*rows.role("history"), *rows.role("negative_history"))
    empty: Batch = {**batch, **{each: batch[each][:, :0] for each in lists}}
    loss = model.loss(empty)
    loss.backward()  # type: ignore[no-untyped-call]
    without = [each for each, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "sim" else pytest.mark.slow) for name in OF_HISTORIES]
)
def test_two_processes_train_as_one(name: str, rows: FeatureSpec, tmp_path: Path) -> None:
    one, two = run(name, rows, tmp_path / "one"), tmp_path / "two"
    assignments = {**SMALL[name], **{f"train.{key}": value for key, value in EXACT.items()}}
    chosen = [part for key, value in assignments.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    done = recspec_on_two("train", name, rows.folder, two, *chosen)
    assert [each.returncode for each in done] == [0, 0], done
    assert losses(one) == pytest.approx(losses(two), abs=1e-5)
    for parameter, value in weights(one).items():
        torch.testing.assert_close(value, weights(two)[parameter], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", OF_HISTORIES)
def test_an_interrupted_run_goes_on_to_the_same_weights_bit_for_bit(
    name: str, rows: FeatureSpec, tmp_path: Path
) -> None:
    whole, halted = run(name, rows, tmp_path / "whole"), tmp_path / "halted"
    asked = iter([False, True])
    with pytest.raises(Interrupted, match="stopped at step 2"):
        run(name, rows, halted, stop_requested=lambda: next(asked))
    run(name, rows, halted, resume=True)
    assert losses(halted) == losses(whole)
    left, right = weights(whole), weights(halted)
    assert left.keys() == right.keys()
    assert [each for each in left if not torch.equal(left[each], right[each])] == []


# --- arithmetic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["din", "dien", "sim"])
@pytest.mark.parametrize("sliced", [1, 10**9], ids=["even steps", "even together"])
def test_a_run_over_even_events_is_the_run_over_others(
    name: str, sliced: int, rows: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "SLICED", sliced)
    plain = run(name, rows, tmp_path / "plain", deterministic=False)
    jagged = events.jagged_events
    monkeypatch.setattr(events, "jagged_events", lambda present, **_: jagged(present, even=True))
    even = run(name, rows, tmp_path / "even", deterministic=False)
    assert losses(even) == pytest.approx(losses(plain), rel=1e-4)


@pytest.mark.parametrize("name", ["din", "dien", "sim"])
def test_a_measurement_chooses_the_arithmetic_and_a_run_that_continues_keeps_it(
    name: str, rows: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fast(**faster: float) -> None:
        rates = ProductRates(**{**dict.fromkeys(ProductRates.model_fields, 100.0), **faster})
        monkeypatch.setattr("recspec.training.plan.rates_of_all", lambda _: rates)

    def choice(folder: Path) -> list[str]:
        lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
        starts = (each["choices"] for each in lines if each["event"] == "start")
        return [choices[of] for choices in starts for of in ("precision", "event_products") if of in choices]

    fast(wide_bf16=400.0, narrow_tf32=120.0)
    run(name, rows, tmp_path / "run", precision="auto", deterministic=False, schedule="constant", epochs=1)
    fast(wide_bf16=10.0)
    run(name, rows, tmp_path / "run", resume=True, precision="auto", deterministic=False, schedule="constant", epochs=2)
    first, products, again, products_again = choice(tmp_path / "run")
    assert first.startswith("bf16: this CPU multiplies 1.6 times as fast as in fp32 (measured; tf32: 1)")
    assert products.startswith("blas: this CPU multiplies narrow matrices 1.2 times as fast through oneDNN")
    assert (again, products_again) == ("bf16: as at the start of the run", "blas: as at the start of the run")
    assert all(np.isfinite(losses(tmp_path / "run")))
    run(name, rows, tmp_path / "anew", precision="auto", deterministic=False, epochs=1)
    (anew,) = choice(tmp_path / "anew")
    assert anew.startswith("fp32: this CPU multiplies nothing faster")
