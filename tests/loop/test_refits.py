"""`forget --refit`: runs that a forgotten person shaped are trained again, each whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import recspec as rs
from recspec.base.errors import Interrupted
from recspec.base.machine import command_line
from recspec.bundle import folder as bundle
from recspec.bundle import run_record
from recspec.bundle.checkpoint import load_latest, read_tensors
from recspec.inference import Predictor, Recommendation, build_pipeline
from recspec.loop import forget, refits
from recspec.loop.forgetting import SHARED
from recspec.loop.refits import MARK
from recspec.training import Learning
from tests.made_up_events import prepared, shop_events, written

PERSON = "user03"
RUNS = ("ease", "neumf", "popularity", "blend", "pipeline")
ALL = {*(f"runs/{name}" for name in RUNS), "runs/neumf/updates/0001"}


def learning() -> Learning:
    return Learning(build_pipeline=build_pipeline)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset, runs, an update, a blend and a pipeline."""
    place, folder = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("shop")
    known, new = shop_events()
    prepared(place, known)
    shutil.move(place / "data", folder / "data")
    runs = folder / "runs"
    for name, settings in {"ease": {}, "popularity": {}, "neumf": {"train.epochs": 1, "train.seed": 7}}.items():
        rs.train(name, folder / "data", runs / name, settings=settings, progress=False)
    rs.blend(runs / "blend", [runs / "ease", runs / "popularity"], folder / "data", progress=False)
    rs.pipeline(runs / "pipeline", retriever=runs / "ease", ranker=runs / "neumf")
    rs.update(runs / "neumf", written(place / "new.csv", new), progress=False)
    return folder


@pytest.fixture
def shop(raw: Path) -> Iterator[Path]:
    """The folder in the place where its runs say that it lies; it is as it was at the end."""
    shutil.copytree(raw, raw.with_name("before"), symlinks=True)
    yield raw
    shutil.rmtree(raw)
    raw.with_name("before").rename(raw)


def answer(run: Path, user: str) -> Recommendation:
    return Predictor.open(run, device="cpu").recommend([user], k=3)[0]


def weights(run: Path) -> dict[str, list[float]]:
    tensors, _ = read_tensors(bundle.find(run) / "weights.safetensors")
    return {name: each.flatten().tolist() for name, each in tensors.items()}


def test_every_run_is_trained_again_on_the_cleaned_data(shop: Path) -> None:
    before = {name: weights(shop / "runs" / name) for name in RUNS}
    done = forget(PERSON, shop, learning=learning())
    assert done.stays == []
    assert {str(each.relative_to(shop)) for each in done.refitted} == ALL
    assert done.found == []
    assert not list(shop.rglob(MARK))
    assert not list(shop.rglob(".refit*"))
    for name in RUNS:
        rs.verify(shop / "runs" / name)
        assert weights(shop / "runs" / name) != before[name], name
        assert len(answer(shop / "runs" / name, "user04").items) == 3
    # the same operations on the same data
    card = bundle.read_card(bundle.find(shop / "runs" / "ease"))
    own = {f"settings.{name}": value for name, value in card.settings.items()}
    rs.train("ease", shop / "data", shop / "fresh", settings=own, progress=False)
    assert weights(shop / "fresh") == weights(shop / "runs" / "ease")


def test_an_update_is_trained_with_the_settings_of_its_run_on_its_own_data(shop: Path) -> None:
    forget(PERSON, shop, learning=learning())
    version = shop / "runs/neumf/updates/0001"
    card = bundle.read_card(version / "bundle")
    assert (card.train["epochs"], card.train["seed"], card.train["schedule"]) == (
        1,
        7,
        bundle.read_card(shop / "runs/neumf/bundle").train["schedule"],
    )
    record = run_record.read(version)
    assert record is not None
    assert record.data is not None
    assert record.data.path == str(version / "data")
    assert answer(shop / "runs/neumf", "zoe").known, "the update's new user stays"
    state, _ = load_latest(version / "checkpoints")
    assert state is not None, "the next update goes on from the new training"
    known, new = shop_events()
    later = new.slice(60).set_column(2, "timestamp", known["timestamp"].slice(0, 30).combine_chunks())
    made = rs.update(shop / "runs/neumf", written(shop / "new.csv", later), progress=False)
    assert made.found is not None
    assert made.found.counts["events"] == 30


def test_a_kill_at_any_step_leaves_the_old_model_or_the_new_one(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, kills = {name: getattr(refits, name) for name in ("refit", "put_in_place", "_replace")}, 0

    def killed(name: str) -> None:
        once = set[str]()

        def call(*given: object) -> None:
            nonlocal kills
            key = str(given[-1] if name != "refit" else given[0])
            if key not in once and any(run in key for run in ("runs/ease/", "runs/neumf/updates", "runs/pipeline/")):
                once.add(key)
                kills += 1
                raise KeyboardInterrupt
            real[name](*given)

        monkeypatch.setattr(refits, name, call)

    for name in real:
        killed(name)
    done = None
    for _ in range(100):
        try:
            done = forget(PERSON, shop, learning=learning())
        except KeyboardInterrupt:
            for run in RUNS:
                rs.verify(shop / "runs" / run)
                assert answer(shop / "runs" / run, "user04").known
            continue
        break
    assert done is not None
    assert kills == 3 * 2 + 3 * 4, "of three runs: before it is trained, before the bundle is put in place, and after"
    assert not list(shop.rglob(MARK))
    assert not list(shop.rglob(".*tmp"))


def test_a_mark_of_an_earlier_command_is_worked_off_later(shop: Path) -> None:
    done = forget(PERSON, shop)
    assert SHARED in done.stays
    assert SHARED == "Weights that many people shaped are not recomputed at once; `forget --refit` does."
    assert {str(each.parent.relative_to(shop)) for each in shop.rglob(MARK)} == ALL
    assert "since" in json.loads((shop / "runs/ease" / MARK).read_text())
    (shop / "runs/ease/.refit.0123456789abcdef.tmp/bundle").mkdir(parents=True)  # as a killed command leaves it
    later = forget(PERSON, shop, learning=learning())
    assert len(later.refitted) == len(ALL)
    assert not list(shop.rglob(".refit*"))
    assert forget(PERSON, shop, learning=learning()).refitted == []


def test_what_can_not_be_trained_again_is_named_with_the_reason(shop: Path) -> None:
    shutil.rmtree(shop / "runs/popularity")
    (shop / "runs/neumf/run.json").unlink()
    done = forget(PERSON, shop, learning=learning())
    told = {each.partition(": was not trained again: ")[0]: each for each in done.stays}
    assert {str(Path(each).relative_to(shop)) for each in told} == {"runs/blend", "runs/neumf", "runs/pipeline"}
    assert "popularity: holds no model of the data" in told[str(shop / "runs/blend")]
    assert "does not say which dataset it was trained on" in told[str(shop / "runs/neumf")]
    assert f"its part {shop / 'runs/neumf'} was not trained again" in told[str(shop / "runs/pipeline")]
    assert (shop / "runs/blend" / MARK).is_file(), "it is tried again later"
    for name in ("blend", "neumf", "pipeline"):
        rs.verify(shop / "runs" / name)


def test_a_dataset_outside_the_folder_is_not_trusted(shop: Path) -> None:
    done = forget(PERSON, shop / "runs" / "ease", learning=learning())
    (told,) = done.stays
    assert f"its dataset {shop / 'data'} lies outside {shop / 'runs' / 'ease'}, and may hold the person" in told
    assert (shop / "runs/ease/bundle").is_dir()


def test_a_signal_ends_it_and_keeps_what_is_to_be_done(shop: Path) -> None:
    asked = iter([False, True, True, True])
    with pytest.raises(Interrupted):
        forget(PERSON, shop, learning=Learning(build_pipeline=build_pipeline, stop_requested=lambda: next(asked, True)))
    assert list(shop.rglob(MARK))
    for name in RUNS:
        rs.verify(shop / "runs" / name)


def test_a_part_of_an_update_is_locked_with_the_run_that_is_updated(tmp_path: Path) -> None:
    run = tmp_path / "updates" / "run"
    (run / "updates").mkdir(parents=True)
    for home in (run, run / "updates/0002", run / "updates/0002/parts/1-ease"):
        assert refits._updated_run(home) == run
    assert refits._updated_run(tmp_path / "updates" / "other") is None


def test_the_verb_says_what_was_trained_again(shop: Path) -> None:
    done = rs.forget(PERSON, under=shop, refit=True, progress=False)
    assert "trained again" in str(done)
    assert done.to_dict()["refitted"] == [*map(str, done.found.refitted)]
    assert len(done.found.refitted) == len(ALL)


def test_no_record_names_the_person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/recspec", "forget", PERSON, "--under", "."])
    assert command_line() == ("recspec", "forget")
